"""Whole trainings on real ranks, as short as they can be."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer import idx
from tests.trainer.ranks import together, trained
from trainer import agree, data, group
from trainer.compress import FORMATS
from trainer.config import DEFAULT_EPOCHS, Config
from trainer.errors import InputError, TrainerError
from trainer.models import MODELS
from trainer.optim import SGD
from trainer.sync import STRATEGIES
from trainer.train import planned, share_batch_norm_statistics, train_on


@pytest.fixture
def small(tmp_path: Path) -> str:
    """A folder with 40 images to train on and 3 to test on."""
    return str(idx.write(tmp_path / "small", idx.mnist(40, 3)))


NAMED = "1.running_var"  # a buffer of bn-cnn
TOGETHER = [name for name in STRATEGIES if name != "serial"]
WAYS = [[name] for name in TOGETHER] + [["ring", "--compress", name] for name in FORMATS if name != "none"]


@pytest.mark.usefixtures("with_ddp")
@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_all_ranks_end_with_the_same_parameters(way: list[str], tmp_path: Path, small: str) -> None:
    outcomes = trained(3, tmp_path, "--data", small, "--sync", *way, "--steps", "5", "--check-sync", "2")
    assert [outcome.exit_code for outcome in outcomes] == [0, 0, 0], [outcome.err for outcome in outcomes]
    assert len({outcome.last["parameters_sha256"] for outcome in outcomes}) == 1
    assert len({outcome.last["accuracy"] for outcome in outcomes}) == 1
    # They differ in what they trained on.
    assert len({outcome.last["loss"] for outcome in outcomes}) == 3


@pytest.mark.usefixtures("with_ddp")
def test_the_strategies_lead_to_the_same_loss(tmp_path: Path, small: str) -> None:
    options = ["--data", small, "--steps", "8"]
    losses = [trained(2, tmp_path, *options, "--sync", sync)[0].last["loss"] for sync in TOGETHER]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-3)


def test_the_same_seed_gives_the_same_bits_and_another_one_others(tmp_path: Path) -> None:
    def parameters(seed: str) -> str:
        sha256 = trained(2, tmp_path, "--steps", "4", "--seed", seed)[0].last["parameters_sha256"]
        assert isinstance(sha256, str)
        return sha256

    assert parameters("1") == parameters("1") != parameters("2")


def test_all_ranks_start_from_rank_0s_parameters_and_end_with_one_model_batch_norm_included(
    tmp_path: Path, small: str
) -> None:
    def model_after_a_step(first_seed: int) -> list[bytes]:
        def work(rank: int) -> bytes:
            torch.manual_seed(first_seed + rank)  # each rank would start from another model
            model = train_on(data.load(small, os.environ), Config(rank=rank, world_size=3, steps=1))
            return b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())

        return together(3, tmp_path, work)

    first, second = model_after_a_step(1), model_after_a_step(2)
    assert len(set(first)) == len(set(second)) == 1
    assert first != second


def test_training_learns(tmp_path: Path) -> None:
    rank_0, rank_1 = trained(2, tmp_path, "--steps", "60")
    lines = rank_0.out.splitlines()
    assert lines[0].startswith(
        "bn-cnn on 2 ranks: 6,000 images (mini), epochs 1, steps 60, batch 16 a rank, "
    )
    assert lines[1].startswith("epoch 1/1  loss ")
    assert lines[-1] == f"test accuracy {100 * rank_0.last['accuracy']:.1f} %"
    assert rank_0.last["accuracy"] > 0.85
    assert rank_1.out == ""


def test_every_record_says_how_far_it_is(tmp_path: Path, small: str) -> None:
    rank_0, rank_1 = trained(2, tmp_path, "--data", small, "--batch-size", "8", "--epochs", "2")
    epoch_ends = [record for record in rank_0.records if "accuracy" in record and "final" not in record]
    assert [(end["epoch"], end["epochs"], end["step"], end["steps"]) for end in epoch_ends] == [
        (1, 2, 3, 6),
        (2, 2, 6, 6),
    ]
    assert rank_0.last["final"] is True
    assert rank_0.last["bytes_sent"] + rank_1.last["bytes_sent"] == 6 * 2 * 29_034 * 4
    assert "skipped" not in rank_0.last
    for record in rank_0.records:
        assert {"time", "loss", "samples_per_s", "step_ms", "comm_ms", "bytes_sent"} <= set(record)


def test_one_process_trains_alone_and_says_so(tmp_path: Path, small: str) -> None:
    (outcome,) = trained(1, tmp_path, "--data", small, "--epochs", "1")
    assert outcome.exit_code == 0
    assert "one process alone, nothing to synchronise (as --sync serial)" in outcome.out
    assert outcome.last["bytes_sent"] == 0


def test_more_ranks_than_test_images_is_no_problem(tmp_path: Path, small: str) -> None:
    outcomes = trained(4, tmp_path, "--data", small, "--epochs", "1")
    assert [outcome.exit_code for outcome in outcomes] == [0] * 4
    assert outcomes[0].last["accuracy"] in (0, 1 / 3, 2 / 3, 1)


def test_a_learning_rate_that_is_far_too_large_ends_with_advice(tmp_path: Path, small: str) -> None:
    for outcome in trained(2, tmp_path, "--data", small, "--lr", "1e30", "--epochs", "2"):
        assert outcome.exit_code == 1
        assert outcome.err.startswith("trainer: the gradient of rank ")
        assert "try a smaller --lr" in outcome.err
        assert outcome.err.count("\n") == 1


def test_steps_that_are_not_finite_can_be_left_out_and_are_told(tmp_path: Path, small: str) -> None:
    options = ["--data", small, "--lr", "1e30", "--steps", "4", "--on-nonfinite", "skip"]
    rank_0, rank_1 = trained(2, tmp_path, *options)
    assert (rank_0.exit_code, rank_1.exit_code) == (0, 0), rank_0.err
    assert rank_0.last["skipped"] == rank_1.last["skipped"] > 0
    assert "step left out (1 so far)" in rank_0.out


def test_a_step_that_is_left_out_leaves_the_batch_norm_statistics_as_they_were(
    tmp_path: Path, small: str
) -> None:
    """Rank 1 sees one infinite batch, which its forward pass has put into them before the gradients meet."""

    def work(rank: int) -> tuple[int, list[bool], list[int]]:
        model = Infinite(at_step=3 if rank == 1 else 0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(MODELS, "infinite", lambda: model)
            folder = tmp_path / "checkpoints"
            config = Config(
                rank=rank, world_size=2, model="infinite", batch_size=4, steps=5, on_nonfinite="skip",
                checkpoint_every=5, checkpoint_dir=str(folder),
            )  # fmt: skip
            train_on(data.load(small, os.environ), config)
        saved = torch.load(folder / "step-00000005" / "model.pt", weights_only=True)["model"]
        return (
            int(model.normal.num_batches_tracked or 0),
            [bool(buffer.isfinite().all()) for buffer in model.buffers()],
            [name for name, value in saved.items() if not value.isfinite().all()],
        )

    assert together(2, tmp_path, work) == [(4, [True] * 3, [])] * 2


class Infinite(torch.nn.Module):
    """Batch norm that gets infinities in one forward pass of a training."""

    def __init__(self, at_step: int) -> None:
        super().__init__()
        self.normal, self.last = torch.nn.BatchNorm1d(784), torch.nn.Linear(784, 10)
        self._steps, self._at_step = 0, at_step

    def forward(self, pixels: torch.Tensor) -> Any:
        self._steps += self.training
        pixels = pixels.flatten(1)
        if self.training and self._steps == self._at_step:
            pixels = pixels + torch.inf
        return self.last(self.normal(pixels))


@pytest.fixture
def _rank_1_drifts(monkeypatch: pytest.MonkeyPatch) -> None:
    real_step = SGD.step

    def step(self: SGD, lr: float) -> None:
        real_step(self, lr)
        if group.rank() == 1:
            self.flat.parameters[17] += 1e-6

    monkeypatch.setattr(SGD, "step", step)


@pytest.mark.usefixtures("_rank_1_drifts")
@pytest.mark.parametrize(("check_sync", "told"), [(2, 2), (0, 4)], ids=["next comparison", "end"])
def test_a_rank_that_drifts_away_is_named_at_the_next_comparison_and_at_the_end(
    check_sync: int, told: int, tmp_path: Path, small: str
) -> None:
    def work(rank: int) -> str:
        config = Config(rank=rank, world_size=3, steps=4, check_sync=check_sync)
        with pytest.raises(TrainerError) as caught:
            train_on(data.load(small, os.environ), config)
        return str(caught.value)

    for message in together(3, tmp_path, work):
        assert message.startswith(
            f"rank 1 drifted: after step {told} its parameters differ from the other ranks'"
        )


@pytest.mark.usefixtures("_rank_1_drifts")
@pytest.mark.parametrize("hosts", ["aa", "ab"], ids=["one model", "a model and its copy"])
def test_the_end_of_a_run_whose_ranks_drifted_is_neither_saved_nor_told_as_its_result(
    hosts: str, tmp_path: Path, small: str
) -> None:
    folder = tmp_path / "checkpoints"
    options = ["--data", small, "--steps", "4", "--checkpoint-every", "4", "--checkpoint-dir", str(folder)]
    for outcome in trained(2, tmp_path, *options, env=lambda rank: {"RINGCTL_HOST": hosts[rank]}):
        assert outcome.exit_code == 1
        assert outcome.err.startswith("trainer: rank 1 drifted: after step 4 its parameters differ"), (
            outcome.err
        )
        assert not any("final" in record for record in outcome.records)
    assert not list(folder.glob("step-*"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 7}, "rank 2 has --seed 7 where the others have 0"),
        ({"sync": "all-reduce"}, "rank 2 has --sync all-reduce where the others have ring"),
        ({"compress": "int8"}, "rank 2 has --compress int8 where the others have none"),
        ({"model": "mnist-cnn"}, "rank 2 has --model mnist-cnn where the others have bn-cnn"),
        ({"first_world": 6}, "rank 2 has RINGCTL_FIRST_WORLD 6 where the others have None"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_rank_that_was_told_something_else_is_named_before_the_first_step(
    change: dict[str, Any], message: str, tmp_path: Path, small: str
) -> None:
    def work(rank: int) -> str:
        config = Config(rank=rank, world_size=3, steps=1, **(change if rank == 2 else {}))
        with pytest.raises(InputError) as caught:
            train_on(data.load(small, os.environ), config)
        return str(caught.value)

    for said in together(3, tmp_path, work):
        assert said.startswith(message)


def test_a_rank_with_other_code_is_named_before_the_first_step(
    tmp_path: Path, small: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(rank: int) -> str:
        if rank == 0:
            monkeypatch.setattr(agree, "code_digest", lambda: "0123456789abcdef")
        with pytest.raises(InputError) as caught:
            train_on(data.load(small, os.environ), Config(rank=rank, world_size=3, steps=1))
        return str(caught.value)

    for said in together(3, tmp_path, work):
        assert said.startswith("rank 0 has the trainer's code 0123456789ab where the others have ")


def test_ranks_end_with_a_sentence_when_the_data_is_damaged(tmp_path: Path) -> None:
    mine = idx.write(tmp_path / "mine", idx.mnist(), packed=True)
    (mine / "t10k-labels-idx1-ubyte.gz").write_bytes(b"\x1f\x8b")
    for outcome in trained(2, tmp_path, "--data", str(mine)):
        assert outcome.exit_code == 1
        assert "t10k-labels-idx1-ubyte.gz" in outcome.err
        assert "Traceback" not in outcome.err


def test_batch_norm_statistics_become_the_average_of_all_ranks(tmp_path: Path) -> None:
    def work(rank: int) -> list[float]:
        model = MODELS["bn-cnn"]()
        for number, buffer in enumerate(model.buffers()):
            buffer.fill_(10 * number + 2 * rank)
        share_batch_norm_statistics(model)
        return [float(buffer.double().mean()) for buffer in model.buffers() if buffer.is_floating_point()]

    assert together(3, tmp_path, work) == [[2.0, 12.0, 32.0, 42.0]] * 3


def test_buffers_of_any_shape_and_precision_are_averaged(tmp_path: Path) -> None:
    def work(rank: int) -> list[tuple[list[int], str, float]]:
        model = torch.nn.Module()
        for name, shape in ("none", ()), ("flat", (3,)), ("deep", (2, 3)):
            model.register_buffer(name, torch.full(shape, 2.0 * rank))
        model.register_buffer("precise", torch.full((2,), 2.0 * rank, dtype=torch.float64))
        model.register_buffer("mask", torch.full((2,), -torch.inf))
        share_batch_norm_statistics(model)
        return [(list(b.shape), str(b.dtype), float(b.mean())) for b in model.buffers()]

    single = [([], 1.0), ([3], 1.0), ([2, 3], 1.0)]
    expected = [(shape, "torch.float32", mean) for shape, mean in single]
    expected += [([2], "torch.float64", 1.0), ([2], "torch.float32", -torch.inf)]
    assert together(2, tmp_path, work) == [expected] * 2


def test_a_statistic_that_is_not_a_number_is_named_rather_than_averaged(tmp_path: Path) -> None:
    def work(rank: int) -> str:
        model = MODELS["bn-cnn"]()
        if rank == 1:
            next(buffer for name, buffer in model.named_buffers() if name == NAMED)[0] = torch.nan
        with pytest.raises(TrainerError) as told:
            share_batch_norm_statistics(model)
        return str(told.value)

    assert together(2, tmp_path, work) == [f"the statistics of rank 1 in {NAMED} have a NaN"] * 2


def test_a_model_without_batch_norm_has_nothing_to_share() -> None:
    share_batch_norm_statistics(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Config(), (DEFAULT_EPOCHS, DEFAULT_EPOCHS * 7)),
        (Config(epochs=2), (2, 14)),
        (Config(epochs=2, steps=10), (2, 10)),
        (Config(epochs=2, steps=100), (2, 14)),
        (Config(steps=100), (15, 100)),
        (Config(steps=7), (1, 7)),
        (Config(epochs=1, world_size=3), (1, 3)),
        (Config(epochs=1, world_size=100), (1, 1)),
        (Config(epochs=1, batch_size=1000), (1, 1)),
    ],
)
def test_epochs_and_steps_are_planned_from_the_smallest_of_all_limits(
    config: Config, expected: tuple[int, int]
) -> None:
    assert planned(config, 100) == expected


def test_more_ranks_than_images_is_refused() -> None:
    with pytest.raises(TrainerError, match="99 training images are too few for 100 ranks"):
        planned(Config(world_size=100), 99)
