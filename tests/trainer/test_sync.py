"""The strategies, between real processes over gloo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.trainer.ranks import together
from trainer import group, sync

SIZES = (0, 1, 3, 1000, 1009)
STRATEGIES = sorted(sync.STRATEGIES)
WORLDS = (1, 2, 3, 4)

Floats = list[list[float]]


def part_of(rank: int, size: int) -> torch.Tensor:
    """What a rank brings along: its own random numbers."""
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * size + rank))


def averaged(make: Callable[[], sync.Strategy], world: int, folder: Path) -> list[list[bytes]]:
    """For each rank, the bytes it holds after averaging its part of each of SIZES."""

    def work(rank: int) -> list[bytes]:
        strategy = make()
        parts = [part_of(rank, size) for size in SIZES]
        for part in parts:
            strategy.average(part)
        return [part.numpy().tobytes() for part in parts]

    return together(world, folder, work)


def assert_all_hold_the_mean(results: list[list[bytes]]) -> None:
    world = len(results)
    for size, *held in zip(SIZES, *results, strict=True):
        assert held == [held[0]] * world, f"ranks differ with {size} elements"
        mean = torch.stack([part_of(rank, size).double() for rank in range(world)]).mean(0)
        got = torch.frombuffer(bytearray(held[0]), dtype=torch.float32) if size else torch.empty(0)
        torch.testing.assert_close(got.double(), mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_all_ranks_end_with_the_same_bytes_which_are_the_mean(name: str, world: int, tmp_path: Path) -> None:
    assert_all_hold_the_mean(averaged(lambda: sync.create(name), world, tmp_path))


class ReceivesIntoItsOwnGradient:
    """The often-copied ring that receives over its own part, and then adds what arrived to itself."""

    bytes_sent = 0

    def average(self, flat: torch.Tensor) -> None:
        rank, world = group.rank(), group.world()
        for _ in range(world - 1):
            sending = dist.isend(flat.clone(), (rank + 1) % world)
            dist.recv(flat, (rank - 1) % world)
            flat += flat
            assert sending is not None
            sending.wait()
        flat.div_(world)


def test_the_test_above_sees_a_ring_that_receives_into_its_own_gradient(tmp_path: Path) -> None:
    results = averaged(ReceivesIntoItsOwnGradient, 3, tmp_path)
    with pytest.raises(AssertionError):
        assert_all_hold_the_mean(results)


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_rank_counts_as_much_as_every_other(name: str, tmp_path: Path) -> None:
    world = 3

    def work(rank: int) -> Floats:
        strategy = sync.create(name)
        means = []
        for only in range(world):
            part = torch.full((7,), 3.0 if rank == only else 0.0)
            strategy.average(part)
            means.append(part.tolist())
        return means

    assert together(world, tmp_path, work) == [[[1.0] * 7] * world] * world


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("world", [2, 3])
def test_many_averages_in_a_row_do_not_mix(name: str, world: int, tmp_path: Path) -> None:
    def work(rank: int) -> Floats:
        strategy = sync.create(name)
        rounds = [torch.full((5,), float(number * world + rank)) for number in range(100)]
        for part in rounds:
            strategy.average(part)
        return [part.tolist() for part in rounds]

    expected = [[number * world + (world - 1) / 2] * 5 for number in range(100)]
    for got in together(world, tmp_path, work):
        assert torch.tensor(got).allclose(torch.tensor(expected))


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("name", STRATEGIES)
def test_all_ranks_together_send_the_buffer_twice_per_neighbour(
    name: str, world: int, tmp_path: Path
) -> None:
    def work(_: int) -> int:
        strategy = sync.create(name)
        strategy.average(torch.zeros(1200))
        return strategy.bytes_sent

    assert sum(together(world, tmp_path, work)) == 2 * (world - 1) * 1200 * 4


def test_the_ring_changes_nothing_outside_the_buffer_it_is_given(tmp_path: Path) -> None:
    def work(rank: int) -> list[float]:
        whole = torch.full((9,), float(rank))
        sync.create("ring").average(whole[2:7])
        return whole.tolist()

    low, high = together(2, tmp_path, work)
    assert low == [0, 0, 0.5, 0.5, 0.5, 0.5, 0.5, 0, 0]
    assert high == [1, 1, 0.5, 0.5, 0.5, 0.5, 0.5, 1, 1]
