from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.trainer.ranks import records
from trainer.metrics import Lines, Metrics


@dataclass
class Sent:
    """What a strategy has counted."""

    bytes_sent: int
    skipped: int = 0


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in a list that a test can change."""
    clock = [100.0]
    monkeypatch.setattr("trainer.metrics.time.monotonic", lambda: clock[0])
    return clock


def test_records_are_means_since_the_last_one_and_a_quarter_of_a_second_apart(
    tmp_path: Path, now: list[float]
) -> None:
    path = tmp_path / "metrics.jsonl"
    rank = Metrics(str(path), steps=10, epochs=2)
    rank.epoch_begins()
    for step in range(1, 6):
        now[0] += 0.1
        rank.step_done(loss=float(step), samples=16, comm_seconds=0.02, sync=Sent(100 * step))
    (record,) = records(path)
    assert record.pop("time") > 0
    assert record == {
        "step": 3,
        "steps": 10,
        "epoch": 1,
        "epochs": 2,
        "loss": 2.0,
        "samples_per_s": 160.0,
        "step_ms": 100.0,
        "comm_ms": 20.0,
        "bytes_sent": 300,
    }


def test_an_epoch_ends_with_its_accuracy_and_what_was_not_reported_yet(
    tmp_path: Path, now: list[float]
) -> None:
    path = tmp_path / "metrics.jsonl"
    rank = Metrics(str(path), steps=4, epochs=2)
    for accuracy in (0.5, 0.75):
        rank.epoch_begins()
        now[0] += 0.1
        rank.step_done(loss=1 - accuracy, samples=16, comm_seconds=0.0, sync=Sent(0))
        rank.epoch_done(accuracy)
    told = [(r["epoch"], r["step"], r["loss"], r["accuracy"]) for r in records(path)]
    assert told == [(1, 1, 0.5, 0.5), (2, 2, 0.25, 0.75)]


def test_the_last_record_is_marked_and_has_the_means_of_the_whole_run(
    tmp_path: Path, now: list[float]
) -> None:
    path = tmp_path / "metrics.jsonl"
    rank = Metrics(str(path), steps=2, epochs=1)
    rank.epoch_begins()
    for loss, seconds in ((3.0, 1.0), (1.0, 3.0)):
        now[0] += seconds
        rank.step_done(loss, samples=8, comm_seconds=0.5, sync=Sent(7))
    rank.epoch_done(0.9)
    rank.run_done(0.9, "abc")
    last = records(path)[-1]
    assert (last["final"], last["accuracy"], last["parameters_sha256"]) == (True, 0.9, "abc")
    assert (last["loss"], last["step_ms"], last["samples_per_s"], last["bytes_sent"]) == (2.0, 2000.0, 4.0, 7)


def test_a_loss_that_is_no_number_is_null_so_that_every_line_is_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rank = Metrics(str(path), steps=1, epochs=1)
    rank.epoch_begins()
    rank.step_done(math.nan, samples=1, comm_seconds=0.0, sync=Sent(0))
    rank.epoch_done(0.1)
    assert records(path)[-1]["loss"] is None
    assert "NaN" not in path.read_text()


def test_where_nothing_was_trained_there_is_no_loss(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rank = Metrics(str(path), steps=4, epochs=1)
    rank.load_state_dict(
        {"step": 4, "epoch": 1, "bytes_sent": 0, "skipped": 0, "whole_run": {}, "this_epoch": {"steps": 4}}
    )
    rank.epoch_begins()
    rank.epoch_done(0.9)
    rank.run_done(0.9, "abc")
    assert [record["loss"] for record in records(path)] == [None, None]


def test_a_step_that_was_left_out_has_no_part_in_the_mean_loss_and_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rank = Metrics(str(path), steps=3, epochs=1)
    rank.epoch_begins()
    for loss, skipped in ((2.0, 0), (None, 1), (4.0, 1)):
        rank.step_done(loss, samples=1, comm_seconds=0.0, sync=Sent(0, skipped))
    rank.epoch_done(0.1)
    assert (records(path)[-1]["loss"], records(path)[-1]["skipped"]) == (3.0, 1)


def test_a_line_is_one_write_and_comes_after_what_others_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"from": "an earlier attempt"}\n')
    written: list[bytes] = []
    real_write = os.write

    def write(descriptor: int, text: bytes) -> int:
        written.append(text)
        return real_write(descriptor, text)

    monkeypatch.setattr(os, "write", write)
    lines = Lines(str(path))
    lines.append({"a": 1})
    with path.open("a") as other:
        other.write('{"from": "someone else"}\n')
    lines.append({"a": 2})
    lines.close()
    assert [json.loads(line) for line in written] == [{"a": 1}, {"a": 2}]
    assert [next(iter(r.values())) for r in records(path)] == ["an earlier attempt", 1, "someone else", 2]


def test_a_file_that_cannot_be_written_is_told_once_and_training_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Lines(str(tmp_path / "missing" / "metrics.jsonl")).append({"a": 1})
    full = Lines("/dev/full")
    full.append({"a": 1})
    full.append({"a": 2})
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2
    assert "No such file or directory" in told[0]
    assert "No space left on device" in told[1]


@contextmanager
def no_file_longer_than(size: int) -> Iterator[None]:
    """Like a full disk: what there is room for is written, and then nothing."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_once_there_is_room_again_records_go_on_and_half_a_record_spoils_only_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = Lines(str(path))
    assert lines.append({"a": 1})
    with no_file_longer_than(12):
        assert [lines.append({"a": number}) for number in (2, 3)] == [False, False]
    assert [lines.append({"a": number}) for number in (4, 5)] == [True, True]
    lines.close()
    assert path.read_text().splitlines() == ['{"a": 1}', '{"a', '{"a": 4}', '{"a": 5}']
    why = f"metrics are lost as long as {path} cannot be written: File too large"
    assert capsys.readouterr().err == f"trainer: warning: {why}\n"


def test_a_record_of_which_only_the_newline_found_no_room_is_written_and_that_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = Lines(str(path))
    for most in (len('{"a": 1}'), len('{"a": 1}\n{"a": 2}')):
        with no_file_longer_than(most):
            lines.append_last({"a": 1 if most < 10 else 2}, patience=0.0)
    assert path.read_text() == '{"a": 1}\n{"a": 2}'
    assert lines.append({"a": 3})
    lines.close()
    assert path.read_text().splitlines() == ['{"a": 1}', '{"a": 2}', '{"a": 3}']
    assert capsys.readouterr().err == "", "nothing is lost"


def test_a_file_that_could_not_be_made_is_made_with_a_later_record(tmp_path: Path) -> None:
    path = tmp_path / "later" / "metrics.jsonl"
    lines = Lines(str(path))
    path.parent.mkdir()
    lines.append({"a": 1})
    lines.close()
    assert records(path) == [{"a": 1}]


@pytest.mark.usefixtures("capsys")
def test_steps_whose_record_is_lost_count_in_the_next_one(tmp_path: Path, now: list[float]) -> None:
    path = tmp_path / "metrics.jsonl"
    rank = Metrics(str(path), steps=4, epochs=1)
    rank.epoch_begins()
    for loss, most in ((1.0, 0), (3.0, 1 << 20)):
        now[0] += 1.0
        with no_file_longer_than(most):
            rank.step_done(loss, samples=1, comm_seconds=0.0, sync=Sent(0))
    assert [(record["step"], record["loss"]) for record in records(path)] == [(2, 2.0)]


@pytest.mark.usefixtures("capsys")
def test_the_last_record_waits_for_room(
    tmp_path: Path, now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    rank = Metrics(str(path), steps=0, epochs=1)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 103.0:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)

    monkeypatch.setattr("trainer.metrics.time.sleep", sleep)
    with no_file_longer_than(0):
        rank.run_done(0.9, "abc")
    assert [record["parameters_sha256"] for record in records(path)] == ["abc"]


def test_a_last_record_for_which_no_room_comes_is_given_up_and_told(
    now: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trainer.metrics.time.sleep", lambda seconds: now.append(now.pop() + seconds))
    Metrics("/dev/full", steps=0, epochs=1).run_done(0.9, "abc", patience=2.0)
    assert 102.0 <= now[0] < 103.0
    told = capsys.readouterr().err.splitlines()[1:]
    assert told == ["trainer: warning: the last metrics record could not be written to /dev/full"]


def test_a_warning_for_which_there_is_no_room_either_does_not_end_the_training() -> None:
    program = "from trainer.metrics import Lines; Lines('/dev/full').append({}); print('it goes on')"
    with open("/dev/full", "w") as full:
        told = subprocess.check_output([sys.executable, "-c", program], stderr=full)
    assert told == b"it goes on\n"


def test_without_a_path_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = Lines("")
    lines.append({"a": 1})
    lines.close()
    assert [path.name for path in tmp_path.iterdir()] == ["scratch"]
