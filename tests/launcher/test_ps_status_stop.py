"""`ps`, `status` and `stop`: finding runs again, whoever started them, and ending them for good."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher import history, runs
from launcher.agent import Agent
from launcher.cli_runs import stopped_line
from launcher.hostproc import identity
from launcher.model import RankState, RunState, to_json
from launcher.text import progress_parts
from launcher.transport import Pool
from tests.launcher.ringctl import (
    RINGCTL,
    detach,
    events,
    exits,
    is_alive,
    launch,
    lines,
    ringctl,
    run_folder,
    start,
    state,
    wait_for,
    wait_until_final,
)


def finished(*command: str, world: int = 1, options: tuple[str, ...] = ()) -> str:
    run = detach(command, world=world, options=options)
    wait_until_final(run)
    return run


def ps(*options: str) -> list[Any]:
    found: list[Any] = json.loads(ringctl("ps", "--json", *options).stdout)
    return found


def status(*run: str) -> Any:
    return json.loads(ringctl("status", *run, "--json").stdout)


def home() -> Path:
    return Path(os.environ["RINGCTL_HOME"])


# --- ps ------------------------------------------------------------------------------------------


def test_where_nothing_ran_ps_says_how_to_start() -> None:
    assert "ringctl launch" in ringctl("ps").stdout
    assert ps() == []
    assert not home().exists()


def test_ps_lists_runs_with_their_states_oldest_first() -> None:
    begun = time.time()
    good = finished("true", world=2, options=("--name", "mine"))
    bad = finished("false")
    going = detach(["sleep", "600"], world=1)
    told = ps()
    assert [(r["run"], r["state"]) for r in told] == [
        (good, "succeeded"),
        (bad, "failed"),
        (going, "running"),
    ]
    first = told[0]
    assert {k: first[k] for k in ("name", "world", "hosts", "attempt")} == {
        "name": "mine",
        "world": 2,
        "hosts": ["localhost"],
        "attempt": 1,
    }
    assert begun <= first["started"] <= time.time()
    table = [line.split() for line in ringctl("ps").stdout.splitlines()]
    assert table[0] == ["RUN", "NAME", "STATE", "WORLD", "HOSTS", "STARTED"]
    assert table[1][:5] == [good, "mine", "succeeded", "2", "localhost"]
    ringctl("stop", going)
    assert ps()[-1]["state"] == "stopped"


def test_ps_shows_the_last_twenty_and_whatever_still_runs() -> None:
    going = detach(["sleep", "600"], world=1)
    done = finished("true")
    history.forget(done)
    original = state(done)
    for number in range(24):
        copy = f"{done}-{number:02}"
        shutil.copytree(run_folder(done), run_folder(copy))
        later = {**original, "run": copy, "started": original["started"] + number}
        (run_folder(copy) / "state.json").write_text(json.dumps(later))
    recent = [run["run"] for run in ps()]
    assert recent == [going, *(f"{done}-{number:02}" for number in range(4, 24))]
    assert len(ps("--all")) == 26
    ringctl("stop", going)


def test_a_run_is_found_on_this_machine_even_if_nobody_remembers_starting_it() -> None:
    run = detach(["sh", "-c", "echo up; exec sleep 600"], options=["--name", "mine"])
    history.file().unlink()
    assert [(r["run"], r["name"], r["state"]) for r in ps()] == [(run, "mine", "running")]
    wait_for(lambda: "up" in ringctl("logs", "mine").stdout, "its log")
    ringctl("stop", "mine")
    assert ps()[0]["state"] == "stopped"


def test_how_a_run_ended_is_remembered_by_whoever_saw_it() -> None:
    """Whether or not its hosts can be asked later: here they know nothing of it any more."""
    full = "echo OSError: [Errno 28] No space left on device >&2; exit 3"
    attached = launch(["sh", "-c", full], world=1, code=1)[-1]
    followed = detach(["true"])
    ringctl("logs", followed, "--follow")
    stopped = detach(["sleep", "600"])
    ringctl("stop", stopped)
    shutil.rmtree(run_folder(stopped).parent)
    assert [run["state"] for run in ps()] == ["failed", "succeeded", "stopped"]
    assert [rank["exit_code"] for rank in status(attached["run"])["ranks"]] == [3]
    told = json.loads(ringctl("explain", attached["run"], "--json").stdout)
    assert (told["cause"], told["fix"], told["rank"]) == (attached["cause"], attached["fix"], 0)


def broken_state_file() -> None:
    run_folder("broken").mkdir()
    (run_folder("broken") / "state.json").write_text('{"run": "bro')


def stray_file_among_the_runs() -> None:
    run_folder("stray").write_text("")


def folder_without_a_state() -> None:
    run_folder("empty").mkdir()


def spoil_row(run: str, record: str) -> None:
    history.enlist(run)
    history.change(lambda db: db.execute("INSERT INTO records VALUES (?, ?)", (run, record)))


def broken_history() -> None:
    """Rows that another version has written, and files of an older one."""
    (record,) = history.recall()
    odd = to_json(record)
    odd["hosts"][0]["variables"] = ["of", "another", "shape"]
    spoilt = ('{"plan": {"ru', "[]", json.dumps(odd))
    for number, text in enumerate(spoilt):
        spoil_row(f"spoilt-{number}", text)
    (home() / "history").mkdir()
    for number, text in enumerate(spoilt):
        (home() / "history" / f"{number}.json").write_text(text)


@pytest.mark.parametrize(
    "spoil",
    [broken_state_file, stray_file_among_the_runs, folder_without_a_state, broken_history],
    ids=lambda spoil: spoil.__name__,
)
def test_one_spoilt_file_does_not_hide_the_other_runs(spoil: Any) -> None:
    run = finished("echo", "hello")
    spoil()
    assert [(r["run"], r["state"]) for r in ps()] == [(run, "succeeded")]
    assert ringctl("logs", run, "--no-prefix").stdout == "hello\n"


# --- status --------------------------------------------------------------------------------------

METRICS = (
    'echo "{\\"step\\": 5, \\"steps\\": 9, \\"loss\\": 0.125, \\"samples_per_s\\": 1234}" >>$RINGCTL_METRICS'
)


def test_status_tells_of_each_rank() -> None:
    run = detach(["sh", "-c", f"{METRICS}; exec sleep 600"])
    wait_for(lambda: all(rank["step"] for rank in status(run)["ranks"]), "the metrics")
    told = status()
    assert {"run", "name", "state", "world", "hosts", "started", "attempt", "ranks"} <= told.keys()
    assert (told["run"], told["state"], told["world"]) == (run, "running", 2)
    for number, rank in enumerate(told["ranks"]):
        assert (rank["rank"], rank["host"], rank["state"]) == (number, "localhost", "running")
        assert is_alive(rank["pid"])
        assert rank["exit_code"] is None
        assert rank["heartbeat_age_s"] >= 0
        assert (rank["step"], rank["loss"]) == (5, 0.125)
    shown = ringctl("status", run).stdout.splitlines()
    assert shown[0] == f"run {run}: running"
    assert shown[1] == "step 5/9  loss 0.125  2,468 samples/s"
    assert shown[2].split()[:5] == ["RANK", "HOST", "STATE", "PID", "EXIT"]
    ringctl("stop", run)


def test_status_of_a_finished_run_tells_how_each_rank_ended() -> None:
    run = finished("sh", "-c", "test $RANK = 0 || kill -KILL $$; exec sleep 600", world=2)
    ranks = status(run)["ranks"]
    assert (ranks[1]["state"], ranks[1]["exit_code"], ranks[1]["signal"]) == ("failed", -9, "SIGKILL")
    assert ranks[0]["state"] == "stopped"
    assert "SIGKILL" in ringctl("status", run).stdout


@pytest.mark.parametrize(("loss", "shown"), [(0.125, "0.125"), (None, "-"), ("nan", "nan")])
def test_where_nothing_was_trained_no_loss_is_shown(loss: object, shown: str) -> None:
    rank = RankState(0, "a", "succeeded", metric={"step": 9, "loss": loss})
    assert progress_parts(RunState("r", "", 1, 1, "succeeded", {0: rank})) == ["step 9", f"loss {shown}"]


# --- stop ----------------------------------------------------------------------------------------


def test_stop_ends_the_ranks_and_says_which() -> None:
    run = detach(["sleep", "600"], world=3)
    pids = [rank["pid"] for rank in state(run)["ranks"]]
    assert ringctl("stop").stdout == "localhost: ended ranks 0-2; nothing is left of them\n"
    assert not any(map(is_alive, pids))
    assert {e["reason"] for e in exits(events(run)).values()} == {"stopped"}


def test_stop_may_be_repeated_and_does_not_change_how_a_run_ended() -> None:
    run = finished("false")
    for _ in range(2):
        assert ringctl("stop", run).stdout == "localhost: was failed already; nothing is left of it\n"
    assert status(run)["state"] == "failed"
    assert len(exits(events(run))) == 1


# Once its hosts have said that they have ended it, somebody else is about to start the run again.
BEGINS = """
from dataclasses import replace
from launcher import history
note = history.note_ended
def note_and_begin(run, ended, unended=()):
    note(run, ended, unended)
    record = history.read(run)
    history.remember(replace(record.plan, attempt=2), record.inventory, record.options)
history.note_ended = note_and_begin
"""


def test_stop_ends_nothing_on_paper_that_began_after_its_hosts_were_told() -> None:
    run = detach(["sleep", "600"], world=1)
    argv = [*RINGCTL[:-1], BEGINS + RINGCTL[-1], "stop", run]
    subprocess.run(argv, check=True, capture_output=True)
    record = history.read(run)
    assert record is not None
    assert (record.plan.attempt, record.end, history.state_of(run)) == (2, None, "starting")
    ringctl("stop", run)  # which is about the second attempt, and keeps it from starting
    assert (status(run)["state"], history.state_of(run)) == ("stopped", "stopped")


def test_a_start_that_failed_has_failed_whoever_is_asked_also_once_it_is_stopped() -> None:
    first = detach(["sleep", "600"], world=1)
    record = history.read(first)
    assert record is not None
    port = ["--skip-preflight", "--master-port", str(record.plan.master_port)]
    said = ringctl("launch", "--local", "--world", "1", *port, "--", "true", code=1).stderr
    (run,) = (found["run"] for found in ps() if found["run"] != first)
    for _ in range(2):
        assert {found["run"]: found["state"] for found in ps()}[run] == "failed"
        assert status(run)["state"] == "failed"
        row = next(
            each for each in json.loads(ringctl("runs", "list", "--json").stdout) if each["run"] == run
        )
        assert row["state"] == "failed"
        assert "the master port is taken" in row["error"]
        assert row["error"] in said
        assert row["error"] in ringctl("explain", run).stdout
        ringctl("stop", run)
    ringctl("stop", first)


def test_a_mark_counts_for_one_attempt_alone() -> None:
    run = finished("true")
    record = history.read(run)
    assert record is not None
    history.remember(replace(record.plan, attempt=2), record.inventory, record.options)
    history.mark(run, "failed", error="it did not start", attempt=1)
    history.mark_running(run, 1)
    assert history.state_of(run) == "starting"
    history.mark(run, "failed", error="it did not start", attempt=2)
    history.mark_running(run, 2)  # late
    assert history.state_of(run) == "failed"


def test_stop_says_that_somebody_else_ends_it_at_the_same_time() -> None:
    answer = {"known": True, "was": "running", "ended": [], "left": []}
    assert stopped_line("here", answer) == "here: was being ended already; nothing is left of it"


def test_stop_as_json_tells_what_was_ended_where() -> None:
    run = detach(["sleep", "600"])
    told = json.loads(ringctl("stop", run, "--json").stdout)
    assert (told["run"], told["errors"]) == (run, {})
    here = told["hosts"]["localhost"]
    assert (here["ended"], here["left"], here["state"]) == ([0, 1], [], "stopped")


def test_two_who_stop_at_once_both_see_it_end() -> None:
    run = detach(["sleep", "600"])
    stops = [start("stop", run) for _ in range(3)]
    for stop in stops:
        out, err = stop.communicate(timeout=60)
        assert (stop.returncode, err) == (0, "")
        assert "nothing is left" in out
    assert len(exits(events(run))) == 2
    assert status(run)["state"] == "stopped"


def test_the_least_patient_of_those_who_stop_decides() -> None:
    run = detach(["sh", "-c", 'trap "" TERM; echo up; while :; do sleep 0.02; done'], world=1)
    wait_for(lambda: lines(events(run), 0), "the rank")
    stops = [start("stop", run, "--grace", grace) for grace in ("0", "3000", "3000")]
    for stop in stops:
        assert stop.communicate(timeout=60)[1] == ""
    assert exits(events(run))[0]["signal"] == "SIGKILL"


def test_a_rank_may_use_its_grace_to_finish() -> None:
    script = 'trap "sleep 0.3; echo saved; exit 0" TERM; echo up; while :; do sleep 0.02; done'
    run = detach(["sh", "-c", script], world=1)
    wait_for(lambda: lines(events(run), 0), "the rank")
    ringctl("stop", run, "--grace", "30")
    assert lines(events(run), 0) == ["up", "saved"]
    assert status(run)["ranks"][0]["exit_code"] == 0
    assert status(run)["state"] == "stopped"


def test_other_runs_go_on() -> None:
    ending, going = (detach(["sleep", "600"], world=1) for _ in range(2))
    ringctl("stop", ending)
    assert is_alive(state(going)["ranks"][0]["pid"])
    assert status(going)["state"] == "running"
    ringctl("stop", going)


def test_a_stop_ends_what_the_supervisor_could_not() -> None:
    run = detach(["true"])
    left = subprocess.Popen(["sleep", "600"], start_new_session=True)
    told = wait_until_final(run)
    (run_folder(run) / "state.json").write_text(json.dumps({**told, "left": [identity(left.pid)]}))
    ringctl("stop", run)
    assert left.wait(10) == -signal.SIGKILL


def test_whoever_asks_for_a_stop_in_a_shell_with_a_ranks_environment_hears_the_answer() -> None:
    run = detach(["sleep", "600"])
    done = subprocess.run(
        [*RINGCTL, "stop", run], env={**os.environ, "RINGCTL_RUN": run}, capture_output=True
    )
    assert done.returncode == 0
    assert b"localhost: ended ranks 0-1; nothing is left of them" in done.stdout


def test_of_many_runs_a_host_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [detach(["sleep", "600"], world=1) for _ in range(3)]
    asked, ask = list[str | None](), Agent.runs

    def counted(agent: Agent, run: str | None = None) -> dict[str, Any]:
        asked.append(run)
        return ask(agent, run)

    monkeypatch.setattr(Agent, "runs", counted)
    with contextlib.closing(Pool(no_input=True)) as pool:
        found = runs.all_refreshed([runs.found_of(record) for record in history.recall()], pool)
    assert {each.run: each.state and each.state.state for each in found} == dict.fromkeys(names, "running")
    assert asked == [None]
    for name in names:
        ringctl("stop", name)
