"""Ranks that meddle with what their supervisor keeps of the run, as any program of the same user can: it ends
all the same, and nothing waits for it for ever."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher import hostbooks, hostslots, kit
from launcher.hostanswer import Refused
from tests.launcher.ringctl import (
    detach,
    is_alive,
    lines,
    ringctl,
    run_folder,
    state,
    wait_for,
    wait_until_final,
)

HOSTD = [sys.executable, "-I", "-S", "-c", kit.RUN, kit.HERE, "hostd"]
FIFO = "rm -f {place}; mkfifo {place}; echo ready; {then}"
HOLDS = "exec 9<>{place}; flock 9; echo ready; sleep 600"
WRITES = """
while :; do
    printf %s '{text}' >{place}.new; mv {place}.new {place}
    [ -e said ] || echo ready; touch said
done
"""


def meddling(what: str, name: str, **more: str) -> str:
    """A run of one rank that does this with a file of the run's folder, and has said that it did."""
    place = f"$RINGCTL_HOME/runs/$RINGCTL_RUN/{name}"
    run = detach(["sh", "-c", what.format(place=place, **more)], world=1)
    wait_for(lambda: lines(first_events(run), 0), "the rank")
    return run


def first_events(run: str) -> list[Any]:
    """Those of the first segment, which is a plain file."""
    text = (run_folder(run) / "events-1-000001.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize(
    "name", ["stop.json", "stop.json.room", "room", "plan.json", "events-1-000002.jsonl"]
)
def test_a_run_ends_though_a_rank_has_put_something_else_in_place_of_a_file(name: str) -> None:
    run = meddling(FIFO, name, then="sleep 600")
    ringctl("stop", run, "--grace", "0")
    assert state(run)["state"] == "stopped"
    assert "ready" in ringctl("logs", run).stdout


def test_a_stop_whose_word_cannot_be_written_down_is_one_all_the_same() -> None:
    run = detach(["sleep", "600"])
    (run_folder(run) / "lock").mkdir()
    ringctl("stop", run)
    assert state(run)["state"] == "stopped"


def test_a_stop_does_not_wait_for_a_lock_that_a_rank_holds() -> None:
    run = meddling(HOLDS, "lock")
    ringctl("stop", run, "--grace", "0")
    assert state(run)["state"] == "stopped"


@pytest.mark.parametrize(
    "word",
    ['{"attempt": "x"}', '{"attempt": 1, "grace": [], "reason": 5}', '{"grace": NaN}', "{}", "[]"],
)
def test_a_word_that_is_none_ends_no_run_and_keeps_nobody_from_ending_it(word: str) -> None:
    run = meddling("printf %s '{text}' >{place}; echo ready; sleep 600", "stop.json", text=word)
    before = state(run)["updated"]
    wait_for(lambda: state(run)["updated"] > before + 1.0, "a supervisor that has seen it")
    assert state(run)["state"] == "running"
    ringctl("stop", run, "--grace", "0")
    assert state(run)["state"] == "stopped"


@pytest.mark.parametrize("told", ['{"state": "running"}', '{"state": [], "attempt": {}, "ranks": 3}'])
def test_a_state_that_is_none_keeps_nobody_from_ending_the_run(told: str, tmp_path: Path) -> None:
    place = tmp_path / "work"
    place.mkdir()
    run = meddling(f"cd {place}; {WRITES}", "state.json", text=told)
    ringctl("stop", run, "--grace", "0")
    assert state(run)["state"] == "stopped"


@pytest.mark.parametrize("name", ["hostd.log", "room", "stop.json.room"])
def test_a_run_starts_again_though_a_rank_has_left_something_else_in_place_of_a_file(name: str) -> None:
    run = meddling(FIFO, name, then="exit 3")
    wait_until_final(run)
    ringctl("restart", run, "--detach")
    assert wait_until_final(run)["attempt"] > 1  # a number is used up where somebody else has the port


def test_code_is_taken_in_though_a_rank_has_left_a_pipe_for_a_plan() -> None:
    run = meddling(FIFO, "plan.json", then="true")
    wait_until_final(run)
    collected = subprocess.run(
        [*HOSTD[:-1], "hoststore", "collect"], input=b"{}\n", capture_output=True, timeout=20, check=True
    )
    assert b'"error"' not in collected.stdout
    assert ringctl("checkpoints", run, code=None).returncode in (0, 1), "it does not wait for the pipe either"


# --- What an import leaves behind ----------------------------------------------------------------

DIES = """
import os, signal, time
if os.fork() == 0:
    time.sleep(600)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_fails_if_the_import_for_all_ranks_is_killed_and_leaves_somebody_behind(tmp_path: Path) -> None:
    """Such as a pool of processes that a backend starts; it has the pipe that says which ranks there are."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(DIES)
    (tmp_path / "program.py").write_text("import torch")
    run = detach(["python3", str(tmp_path / "program.py")], options=["-e", f"PYTHONPATH={tmp_path}"])
    told = wait_until_final(run)
    assert [(rank["state"], rank["signal"]) for rank in told["ranks"]] == [("failed", "SIGKILL")] * 2


# --- What is left of a start ---------------------------------------------------------------------


@pytest.fixture
def asking() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([*HOSTD, "start"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process


def test_slots_that_were_claimed_for_a_start_that_did_not_come_are_given_back(
    asking: subprocess.Popen[bytes],
) -> None:
    about = {"run": "r1", "attempt": 1, "world": 1, "slots": 1, "shared": False, "room": 2}
    assert asking.stdin is not None
    assert asking.stdout is not None
    asking.stdin.write(json.dumps({"claim": about}).encode() + b"\n")
    asking.stdin.flush()
    assert asking.stdout.readline().startswith(b"--ringctl")
    assert asking.stdout.readline() == b"{}\n"
    assert [each["run"] for each in hostslots.taken()[0]] == ["r1"]
    asking.stdin.close()
    assert asking.wait(20) == 0
    assert os.listdir(hostslots.place()) == []


def test_slots_that_were_claimed_for_a_start_that_is_refused_are_given_back(
    asking: subprocess.Popen[bytes],
) -> None:
    run = detach(["true"], world=1)
    wait_until_final(run)
    plan = {**json.loads((run_folder(run) / "plan.json").read_text()), "token": "another"}
    about = {"run": run, "attempt": 1, "world": 1, "slots": 1, "shared": False, "room": 2}
    told, _ = asking.communicate(json.dumps({"claim": about}).encode() + b"\n" + json.dumps(plan).encode())
    assert b"there is a run" in told
    assert asking.returncode == 1
    assert os.listdir(hostslots.place()) == []


def test_a_record_whose_writing_is_cut_short_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def told_to_end(*_: object, **__: object) -> None:
        raise Refused("told to end")

    monkeypatch.setattr(os, "rename", told_to_end)  # where the signal is heard
    with pytest.raises(Refused):
        hostslots.write("r1", 1, 1, 1, False, {"pid": os.getpid(), "start": 1, "boot": "x"})
    assert os.listdir(hostslots.place()) == []


def test_a_start_is_refused_while_the_one_before_has_no_state_yet_though_whoever_asked_was_killed() -> None:
    """Held by the supervisor itself: two of one attempt would be two runs."""
    run = detach(["sleep", "600"], world=1)
    held = Path(f"/proc/{state(run)['hostd']['pid']}/fd")
    assert not [file for file in held.iterdir() if "start.lock" in os.readlink(file)], "only until then"
    ringctl("stop", run, "--grace", "0")


def test_books_that_cannot_be_closed_yet_are_tried_again_without_end(tmp_path: Path) -> None:
    run = detach(["sleep", "600"], world=1)
    folder = tmp_path / "copy"
    shutil.copytree(run_folder(run), folder, ignore=shutil.ignore_patterns("work"))
    ringctl("stop", run, "--grace", "0")
    assert not is_alive(state(run)["hostd"]["pid"])
    before, limit = len(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))  # there is no room in any file
    try:
        for _ in range(5):
            with pytest.raises(OSError, match="large"):
                hostbooks.close_books(str(folder), "it was killed")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert len(os.listdir("/proc/self/fd")) == before
    hostbooks.close_books(str(folder), "it was killed")
    assert json.loads((folder / "state.json").read_text())["state"] == "failed"
