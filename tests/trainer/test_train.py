"""Whole trainings on real ranks, as short as they can be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.trainer import idx
from tests.trainer.ranks import together, trained
from trainer import data
from trainer.config import DEFAULT_EPOCHS, Config
from trainer.errors import TrainerError
from trainer.models import MODELS
from trainer.sync import STRATEGIES
from trainer.train import planned, share_batch_norm_statistics, train_on


@pytest.fixture
def small(tmp_path: Path) -> str:
    """A folder with 40 images to train on and 3 to test on."""
    return str(idx.write(tmp_path / "small", idx.mnist(40, 3)))


@pytest.mark.parametrize("sync", sorted(STRATEGIES))
def test_all_ranks_end_with_the_same_parameters(sync: str, tmp_path: Path) -> None:
    outcomes = trained(3, tmp_path, "--sync", sync, "--steps", "5")
    assert [outcome.exit_code for outcome in outcomes] == [0, 0, 0], [outcome.err for outcome in outcomes]
    assert len({outcome.last["parameters_sha256"] for outcome in outcomes}) == 1
    assert len({outcome.last["accuracy"] for outcome in outcomes}) == 1
    # They differ in what they trained on.
    assert len({outcome.last["loss"] for outcome in outcomes}) == 3


def test_the_strategies_lead_to_the_same_loss(tmp_path: Path) -> None:
    losses = [trained(2, tmp_path, "--sync", sync, "--steps", "8")[0].last["loss"] for sync in STRATEGIES]
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
    for record in rank_0.records:
        assert {"time", "loss", "samples_per_s", "step_ms", "comm_ms", "bytes_sent"} <= set(record)


def test_one_process_trains_alone_and_says_so(tmp_path: Path, small: str) -> None:
    (outcome,) = trained(1, tmp_path, "--data", small, "--epochs", "1")
    assert outcome.exit_code == 0
    assert "one process alone, nothing to synchronise" in outcome.out
    assert outcome.last["bytes_sent"] == 0


def test_more_ranks_than_test_images_is_no_problem(tmp_path: Path, small: str) -> None:
    outcomes = trained(4, tmp_path, "--data", small, "--epochs", "1")
    assert [outcome.exit_code for outcome in outcomes] == [0] * 4
    assert outcomes[0].last["accuracy"] in (0, 1 / 3, 2 / 3, 1)


def test_a_learning_rate_that_is_far_too_large_ends_with_advice(tmp_path: Path, small: str) -> None:
    for outcome in trained(2, tmp_path, "--data", small, "--lr", "1e30", "--epochs", "2"):
        assert outcome.exit_code == 1
        assert outcome.err == "trainer: the loss became nan in epoch 1: try a smaller --lr\n"


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
