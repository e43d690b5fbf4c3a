"""What a rank says when the others do not come, or go away."""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.trainer.ranks import DEADLINE_S, each, free_port, together
from trainer import group
from trainer.config import Config
from trainer.errors import InputError, TrainerError


def failure(config: Config) -> str:
    try:
        with group.joined(config):
            group.wait_for_all(1.0)
    except TrainerError as error:
        return str(error)
    return "no error"


def test_alone_everything_is_a_no_op() -> None:
    with group.joined(Config()):
        tensor = torch.tensor([1.0, 2.0])
        group.copy_from_rank_0(tensor)
        group.add_over_ranks(tensor)
        group.wait_for_all(0.0)
        assert (group.rank(), group.world(), tensor.tolist()) == (0, 1, [1.0, 2.0])


def test_ranks_share_what_rank_0_has_and_add_what_all_have(tmp_path: Path) -> None:
    def work(rank: int) -> tuple[float, float]:
        copied, added = torch.tensor([float(rank + 1)]), torch.tensor([float(rank + 1)])
        group.copy_from_rank_0(copied)
        group.add_over_ranks(added)
        return copied.item(), added.item()

    assert together(3, tmp_path, work) == [(1.0, 6.0)] * 3


def test_ranks_tell_each_other_any_text_also_the_path_of_a_file_that_is_not_utf_8(tmp_path: Path) -> None:
    texts = [os.fsdecode(b"/data/\xff\xfe"), "größer"]
    assert together(2, tmp_path, lambda rank: group.gather_texts(texts[rank])) == [texts] * 2


def test_a_rank_that_never_comes_is_told_by_those_that_wait() -> None:
    address = f"tcp://127.0.0.1:{free_port()}"

    def work(rank: int) -> str:
        return failure(
            Config(rank=rank, world_size=3, init_method=address, gloo_socket_ifname="lo", timeout=1)
        )

    for rank, message in enumerate(each(2, work)):
        assert message.startswith(f"rank {rank} could not meet the other 2: ")
        assert "rank 2 has not come within 1" in message


def test_rank_0_says_for_whom_it_waits(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    monkeypatch.setattr(group, "TELL_S", 0.1)

    def work(rank: int) -> str:
        return failure(
            Config(rank=rank, world_size=4, init_method=address, gloo_socket_ifname="lo", timeout=1)
        )

    each(2, work)
    assert "trainer: still waiting: ranks 2, 3 have not come\n" in capfd.readouterr().err


def test_a_rank_that_comes_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    monkeypatch.setattr(group, "TELL_S", 0.05)

    def work(rank: int) -> str:
        while rank == 1 and not (tmp_path / "begun").exists():
            time.sleep(0.01)
        (tmp_path / "begun").touch()
        return failure(
            Config(rank=rank, world_size=2, init_method=address, gloo_socket_ifname="lo", timeout=DEADLINE_S)
        )

    assert each(2, work) == ["no error", "no error"]


def met(refused: Path, *configs: Config) -> list[str]:
    """What becomes of these ranks, of which the last one comes when another was refused."""
    address = f"tcp://127.0.0.1:{free_port()}"

    def work(number: int) -> str:
        if number == len(configs) - 1:
            deadline = time.monotonic() + DEADLINE_S
            while not refused.exists():
                assert time.monotonic() < deadline, "nobody was refused"
                time.sleep(0.01)
        told = failure(
            replace(configs[number], init_method=address, gloo_socket_ifname="lo", timeout=DEADLINE_S)
        )
        if told != "no error":
            refused.touch()
        return told

    return each(len(configs), work)


def test_a_rank_of_another_run_is_refused_and_the_others_do_not_notice(tmp_path: Path) -> None:
    ours, theirs = Config(world_size=2, run="mine"), Config(world_size=2, run="yours", attempt=2)
    told = met(tmp_path / "refused", ours, replace(theirs, rank=1), replace(ours, rank=1))
    assert told == [
        "no error",
        "rank 1 belongs to attempt 2 of run yours, but here meets attempt 1 of run mine: "
        "two runs use the same port",
        "no error",
    ]


def test_a_rank_that_comes_again_is_refused_and_the_others_do_not_notice(tmp_path: Path) -> None:
    told = met(tmp_path / "refused", *(Config(rank=rank, world_size=3) for rank in (0, 1, 1, 2)))
    assert sorted(told) == [
        "a process with rank 1 came before: give each process a rank of its own; "
        "if that one has ended, start all ranks again",
        *["no error"] * 3,
    ]


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2)])
def test_ranks_that_were_told_different_world_sizes_say_so(sizes: tuple[int, int]) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"

    def work(rank: int) -> str:
        config = Config(rank=rank, world_size=sizes[rank], init_method=address, timeout=DEADLINE_S)
        return failure(config)

    why = f"rank 1 has world size {sizes[1]}, and rank 0 {sizes[0]}: start all ranks with the same"
    assert each(2, work) == [why] * 2


def test_a_port_that_is_taken_is_told_as_wrong_input() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"rank 0 is there already, or something else has port {port} "):
            group.meeting_place(Config(world_size=2, init_method=f"tcp://127.0.0.1:{port}"))


def test_a_rank_that_dies_is_noticed_long_before_the_timeout(tmp_path: Path) -> None:
    def work(rank: int) -> str:
        address = f"file://{tmp_path / 'store'}"
        config = Config(
            rank=rank, world_size=2, init_method=address, gloo_socket_ifname="lo", timeout=10 * DEADLINE_S
        )

        def meet_twice() -> None:
            with group.joined(config):
                group.add_over_ranks(torch.zeros(1))
                if rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                group.add_over_ranks(torch.zeros(1))

        with pytest.raises(TrainerError) as caught:
            meet_twice()
        return str(caught.value)

    message, _ = each(2, work, dying=[1])
    assert message.startswith("rank 0 lost another rank, whose own output says why: ")
    assert "peer" in message
    assert "GLHF" not in message


def test_a_mistake_in_a_model_keeps_its_traceback(tmp_path: Path) -> None:
    def mistaken() -> None:
        dist.barrier()  # nobody leaves before all have met
        torch.zeros(3).add_(torch.zeros(4))

    def work(rank: int) -> None:
        address = f"file://{tmp_path / 'store'}"
        config = Config(rank=rank, world_size=2, init_method=address, gloo_socket_ifname="lo")
        with pytest.raises(RuntimeError, match="size of tensor"), group.joined(config):
            mistaken()

    each(2, work)
