"""Runs that start again after a failure, on this machine: watched by their launch, or by a process apart."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher import (
    ask,
    attempts,
    cli,
    cli_runs,
    history,
    hoststop,
    nextattempt,
    pruning,
    render,
    restarts,
    showlogs,
    watching,
)
from launcher.agent import Agent, agents_for
from launcher.diagnose import Cause, Tails, first_failure
from launcher.errors import HostError, RingctlError, StoppedEarly
from launcher.hostproc import carriers
from launcher.hostword import KILLED, TOLD_TO_END
from launcher.leftovers import Ending, Leftovers, end_before
from launcher.logs import EVERYTHING
from launcher.model import Event, Host, Inventory, Plan, RankState, RankStatus, RunState, RunStatus
from launcher.plan import STARTS_S, LaunchOptions, kept_after_failure, restart_delay
from launcher.runs import Found, found_of
from launcher.transport import Pool
from launcher.watch import GRACE_S, Interrupts, Outcome, Silence
from launcher.watching import Failure
from tests.launcher.ringctl import (
    RINGCTL,
    detach,
    events,
    is_alive,
    lines,
    ringctl,
    run_folder,
    start,
    state,
    unread_pipe,
    wait_for,
)

SOON = ["--restart-delay", "0.1"]
# A command with a small disk of its own, which is filled and freed by a word on its standard input.
ON_SMALL_DISK = [
    *("unshare", "-m", "sh", "-c"),
    """mount -t tmpfs -o size=2m tmpfs "$0" && "$@" </dev/null & command=$!
    while read word; do
        case $word in
            fill) dd if=/dev/zero of="$0/filler" bs=4k 2>/dev/null; echo full;;
            free) rm "$0/filler";;
        esac
    done
    wait $command""",
]
# A restart that has ended the attempt before, and goes on when there is a file.
ENDS_SLOWLY = """
import pathlib, time
from launcher import cli_runs
end, folder = cli_runs.end_before, pathlib.Path({folder!r})
def slowly(*args):
    end(*args)
    (folder / "ended").touch()
    until = time.monotonic() + 60
    while not (folder / "go").exists() and time.monotonic() < until:
        time.sleep(0.02)
cli_runs.end_before = slowly
"""
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a disk")
OPTIONS = LaunchOptions(run="r", name="", command=("true",), trainer="", max_restarts=3)


def script(text: str) -> list[str]:
    return ["--", "sh", "-c", f"attempt=$RINGCTL_ATTEMPT; {text}"]


def launched(*options: str, code: int) -> tuple[list[Any], str]:
    """The events of an attached launch on this machine, and what ringctl said."""
    done = ringctl("launch", "--local", "--world", "2", "--json", *SOON, *options, code=code)
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def detached(*options: str) -> tuple[str, int]:
    """The run's id and its watcher."""
    done = ringctl("launch", "--local", "--world", "2", "--detach", "--json", *options)
    about = json.loads(done.stdout)
    return about["run"], about["watcher"]


def launching(*options: str, **more: Any) -> tuple[subprocess.Popen[str], str]:
    """An attached launch as soon as its run is watched, and the run's id."""
    launch = start(
        "launch", "--local", "--world", "1", "--json", "--max-restarts", "2", *SOON, *options, **more
    )
    while not watching.to_be_watched():
        assert launch.poll() is None
        time.sleep(0.001)
    return launch, watching.to_be_watched()[0]


def wait_until_nobody_watches(run: str) -> None:
    """It is over, and nobody need."""
    wait_for(lambda: not watching.file_of(run).exists() and not watching.is_watched(run), "the end of it all")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


def status(run: str) -> Any:
    return json.loads(ringctl("status", run, "--json").stdout)


# --- Whether, when and with whom -----------------------------------------------------------------


def failed(attempt: int, step: int | None = 3, error: str = "boom") -> Failure:
    return Failure(attempt, step, error, "rank 0 on a failed: boom")


def test_a_run_starts_again_as_often_as_it_may() -> None:
    different = [failed(n, step=n) for n in range(1, 6)]
    assert [bool(restarts.why_not_again(OPTIONS, different[:n])) for n in range(1, 6)] == [
        False, False, False, True, True,
    ]  # fmt: skip


def test_the_same_error_at_the_same_step_twice_ends_it_early() -> None:
    assert "at step 3" in restarts.why_not_again(OPTIONS, [failed(1), failed(2)])
    assert not restarts.why_not_again(OPTIONS, [failed(1, step=2), failed(2)])
    assert not restarts.why_not_again(OPTIONS, [failed(1, error="crash"), failed(2)])
    assert restarts.why_not_again(OPTIONS, [failed(1, step=None), failed(2, step=None)])


def test_an_attempt_that_nobody_started_is_none_of_those_that_are_allowed() -> None:
    never = Failure(2, None, "", "it was not started", counts=False)
    assert restarts.why_not_again(replace(OPTIONS, max_restarts=1), [failed(1, 2), never]) == ""
    assert restarts.why_not_again(replace(OPTIONS, max_restarts=1), [failed(1, 2), never, failed(3, 3)])


def test_hosts_that_were_away_twice_say_nothing_about_the_program() -> None:
    assert not restarts.why_not_again(OPTIONS, [failed(1, error=""), failed(2, error="")])


def ended_by(cause: Cause, *states: RankStatus, step: int | None = None) -> Outcome:
    metric = {} if step is None else {"step": step}
    ranks = {n: RankState(n, f"s{n}", state=state, metric=metric) for n, state in enumerate(states)}
    return Outcome(RunState("r", "", 1, len(ranks), "failed", ranks), cause)


@pytest.mark.parametrize("step", [None, 3])
def test_a_host_that_was_lost_twice_says_nothing_about_the_program(step: int | None) -> None:
    lost = Cause(1, "s1", "rank 1 on s1 cannot be heard any more; rank 0 on s0 waited for it", id="host_gone")
    peer = Cause(0, "s0", "rank 0 on s0 exited with code 1: Connection closed by peer", id="peer_died")
    for cause in (lost, peer):
        failures = [restarts.failure_of(ended_by(cause, "failed", "unknown", step=step))] * 2
        assert not restarts.why_not_again(OPTIONS, failures)


def test_a_host_that_was_lost_twice_says_nothing_though_another_then_saved_for_long() -> None:
    tails = Tails()
    for moment, words in ((10.0, "gloo: Connection closed by peer [10.0.0.2]:7431"), (15.0, "saved it")):
        tails.add(Event("line", moment, "r", 1, "s0", 0, {"stream": "err", "text": words}))
    failed = RankState(0, "s0", state="failed", exit_code=1, ended=15.1)
    state = RunState("r", "", 1, 2, "lost", {0: failed, 1: RankState(1, "s1", state="unknown")})
    outcome = Outcome(state, first_failure(state, tails, {"s1": "s1: no answer"}))
    assert not restarts.why_not_again(OPTIONS, [restarts.failure_of(outcome)] * 2)


@pytest.mark.parametrize("why", [KILLED, TOLD_TO_END, "the log cannot be written: Input/output error"])
@pytest.mark.parametrize("error", ["Connection closed by peer [10.0.0.2]:7431", "words that nobody knows"])
def test_a_host_whose_supervisor_was_ended_twice_says_nothing_about_the_program(error: str, why: str) -> None:
    ranks = {
        0: RankState(0, "s0", state="failed", exit_code=1, ended=2.0),
        1: RankState(1, "s1", state="stopped", signal="SIGTERM", reason=why, ended=1.0),
    }
    state = RunState("r", "", 1, 2, "failed", ranks)
    cause = first_failure(state, {0: [error]})
    assert cause is not None
    assert cause.text.startswith(f"rank 1 on s1 was ended: {why}")
    assert not restarts.why_not_again(OPTIONS, [restarts.failure_of(Outcome(state, cause))] * 2)


@pytest.mark.parametrize("id_", ["store_died", "uneven", ""])
def test_what_the_program_did_by_itself_twice_it_would_do_again(id_: str) -> None:
    cause = Cause(0, "s0", "rank 0 on s0 had ended by itself", id=id_)
    failures = [restarts.failure_of(ended_by(cause, "succeeded", "failed"))] * 2
    assert "starting again would not help" in restarts.why_not_again(OPTIONS, failures)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_a_rank_killed_from_outside_before_its_first_step_says_nothing_about_the_program(name: str) -> None:
    before, after = (
        [failed(n, step, f"rank 0 on a was killed by {name}") for n in (1, 2)] for step in (None, 3)
    )
    assert not restarts.why_not_again(OPTIONS, before)
    assert "at step 3" in restarts.why_not_again(OPTIONS, after)


@pytest.mark.parametrize("state", ["failed", "stopped"])
def test_a_run_that_somebody_stopped_on_another_machine_is_not_started_again(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], state: RunStatus
) -> None:
    ranks = {0: RankState(0, "s0", state="stopped", reason="stopped"), 1: RankState(1, "s1", state="failed")}
    outcome = Outcome(RunState("r", "", 1, 2, state, ranks), None)
    monkeypatch.setattr(attempts, "one_attempt", lambda *_, **__: (outcome, failed(1)))
    asked, plan = ask.Asked(HOSTS, OPTIONS, None), Plan("r", "", 1, 2, "", 1, (), ())
    screen, book = render.NoteScreen(), watching.take("r", here=False)
    seen = attempts.see_through(asked, plan, {}, screen, Interrupts(), Pool(no_input=True), book)
    assert seen is outcome
    assert "somebody has stopped the run: it is not started again" in capfd.readouterr().out


def test_the_world_that_was_chosen_by_hand_is_not_outgrown() -> None:
    chosen = replace(OPTIONS, min_world=1, world=2, full_world=4)
    assert restarts.without(HOSTS, chosen, {"s3": "no route"}).world == 2


def test_each_wait_is_twice_as_long_up_to_a_minute() -> None:
    assert [restart_delay(OPTIONS, failures) for failures in range(1, 9)] == [2, 4, 8, 16, 32, 60, 60, 60]
    assert restart_delay(replace(OPTIONS, restart_delay=300.0), 2) == 300


def test_slots_are_kept_until_the_next_attempt_should_have_started_and_after_the_last_not_at_all() -> None:
    thrice = replace(OPTIONS, max_restarts=3, since=4)
    kept = [kept_after_failure(replace(thrice, attempt=attempt)) for attempt in (4, 5, 6, 7)]
    assert kept == [2 + STARTS_S, 4 + STARTS_S, 8 + STARTS_S, 0]
    assert kept_after_failure(replace(OPTIONS, max_restarts=0)) == 0


HOSTS = Inventory(tuple(Host(f"s{n}", f"10.0.0.{n}") for n in range(1, 5)), "s1")


def test_a_host_that_was_left_out_and_is_back_is_taken_in_before_too_few_are_left() -> None:
    shrunk = replace(OPTIONS, min_world=3, world=3, full_world=4, left_out=frozenset({"s4"}))
    again = restarts.without(HOSTS, shrunk, {"s3": "no route"}, back={"s1", "s2", "s4"})
    assert (again.world, again.full_world, set(again.left_out)) == (3, 4, {"s3"})
    with pytest.raises(HostError, match="2 ranks are left"):
        restarts.without(HOSTS, shrunk, {"s3": "no route"}, back={"s1", "s2"})
    enough = restarts.without(HOSTS, replace(shrunk, min_world=2), {"s3": "no route"}, back={"s4"})
    assert enough.left_out == {"s3", "s4"}, "it is taken in by hand, or if it has to be"


def test_without_a_host_the_run_has_fewer_ranks_but_remembers_how_many_it_had() -> None:
    options = restarts.without(HOSTS, replace(OPTIONS, min_world=2), {"s3": "no route"})
    assert (options.world, options.full_world, set(options.left_out)) == (3, 4, {"s3"})
    fewer = restarts.without(HOSTS, options, {"s1": "no route"})
    assert (fewer.world, fewer.full_world, set(fewer.left_out)) == (2, 4, {"s1", "s3"})
    with pytest.raises(Exception, match="1 ranks are left, and --min-world is 2"):
        restarts.without(HOSTS, fewer, {"s2": "no route"})


# --- Attached ------------------------------------------------------------------------------------


def test_after_a_failure_the_run_goes_on_as_its_next_attempt_on_the_same_id() -> None:
    command = script("echo attempt $attempt; [ $attempt = 2 ]")
    seen, said = launched("--max-restarts", "2", *command, code=0)
    assert seen[-1]["state"] == "succeeded"
    assert {event["attempt"] for event in seen if event["kind"] == "line"} == {1, 2}
    assert len({event["run"] for event in seen}) == 1
    assert "attempt 1 failed: rank" in said
    assert "attempt 2 begins in" in said
    run = seen[-1]["run"]
    assert lines(events(run), 0).count("attempt 2") == 1
    assert "attempt 1" in ringctl("logs", run, "--previous").stdout
    assert status(run)["attempt"] == 2
    assert status(run)["watched"] is None


@pytest.mark.parametrize("words", ["no", "my file: got 0 bytes"])
def test_a_failure_that_repeats_itself_is_not_tried_for_ever(words: str) -> None:
    """Also in words that a rank might use that had lost another one."""
    seen, said = launched("--max-restarts", "3", *script(f"echo {words}; exit 9"), code=1)
    assert seen[-1]["attempt"] == 2
    assert "it failed as the attempt before did; starting again would not help" in said


@pytest.mark.parametrize("step", ["$attempt", "$attempt.0", "0.$attempt"])
def test_the_same_error_at_a_later_step_is_tried_again(step: str) -> None:
    told = f'echo "{{\\"step\\": {step}}}" >>$RINGCTL_METRICS'
    seen, said = launched("--max-restarts", "3", *script(f"{told}; [ $attempt = 3 ] || exit 9"), code=0)
    assert seen[-1]["attempt"] == 3, said


def test_after_the_last_attempt_that_it_may_have_it_is_over() -> None:
    command = script("exit $((9 + attempt))")
    seen, said = launched("--max-restarts", "2", *command, code=1)
    assert seen[-1]["attempt"] == 3
    assert "as often as --max-restarts allows" in said


def test_a_run_is_not_over_while_its_launch_hands_it_to_a_watcher(monkeypatch: pytest.MonkeyPatch) -> None:
    history.make_folder(watching.folder())
    watching.write(watching.Watch("r"))  # and nobody has its lock
    looks = iter((False, False, True))
    assert not watching.begins_again("r", 1, lambda: next(looks))
    assert list(looks) == [], "it was looked again"
    monkeypatch.setattr(watching, "BEGIN_S", 0.0)
    assert not watching.begins_again("r", 1), "nobody has taken it"
    watching.forget("r")
    assert not watching.begins_again("r", 1), "nobody need watch it"


def test_the_last_ranks_are_given_up_only_where_others_can_be_heard_and_time_has_passed_for_us() -> None:
    def lasts(going_on: str, away: str, *times: float, answering: str = "a") -> bool:
        silence = Silence(10.0, lambda: answering)
        why = ""
        for now in (0.0, *times):
            why = silence.look(set(going_on), set(away), 1000.0 + now)
            if silence.asking:
                silence.asking.join()
        return bool(why)

    long = [0.5 * step for step in range(1, 25)]
    assert lasts("b", "b", *long)
    assert lasts("bc", "bc", *long)
    assert not lasts("b", "b", *long[:15]), "it may be back in a moment"
    assert not lasts("b", "b", 0.5, 3600.0), "we were stopped meanwhile"
    assert not lasts("b", "b", *long, answering=""), "it is we who are away"
    assert not lasts("b", "b", *long, answering="ab"), "it is back"
    assert not lasts("bc", "b", *long), "the other notices it"
    assert not lasts("", "b", *long), "its ranks have ended"


def test_what_somebody_killed_has_left_beside_a_watch_is_forgotten_with_it() -> None:
    history.make_folder(watching.folder())
    half = watching.folder() / f"r.json.tmp{2**22 + 1}"  # no process has such a number
    half.touch()
    watching.forget("r")
    assert not half.exists()


def test_how_long_a_run_still_waits_is_told_as_it_is_when_somebody_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unused: Any = None
    asked = ask.Asked(HOSTS, replace(OPTIONS, max_restarts=3, restart_delay=40.0), None)
    monkeypatch.setattr(nextattempt.Next, "wait", lambda *_: True)
    with watching.alone("r"):
        book = watching.take("r", here=False)
        book.note(failure=failed(1))
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now)
        assert nextattempt.Next(asked, unused, render.NoteScreen(), unused, book, unused).pause_before(2)
        for left in (40, 25, 0, 0):
            assert watching.sentence("r").endswith(f", attempt 2 begins in {left} s")
            now += 15.0 if left == 40 else 30.0
        book.note("starting attempt 2")
        assert watching.sentence("r").endswith(", starting attempt 2")


def test_what_the_user_stops_is_not_started_again() -> None:
    process = start("launch", "--local", "--world", "2", "--max-restarts", "5", *script("exec sleep 1000"))
    run = wait_for(lambda: os.listdir(run_folder("")) if run_folder("").exists() else [], "the run")[0]
    wait_for(lambda: (run_folder(run) / "state.json").exists() and state(run)["state"] == "running", "ranks")
    wait_for(lambda: watching.is_watched(run), "its watcher")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, out + err
    assert state(run)["attempt"] == 1
    assert not watching.file_of(run).exists()


def test_ctrl_c_while_it_waits_after_a_start_that_failed_gives_the_run_up(tmp_path: Path) -> None:
    """The start failed for want of its port, and Ctrl-C was counted before that."""
    port = free_port()
    options = ["--skip-preflight", "--master-port", str(port), "--max-restarts", "9", *SOON]
    text = f"while ! [ -e {tmp_path}/gate ]; do sleep 0.02; done; exit 3"
    process = start("launch", "--local", "--world", "1", *options, *script(text))
    assert process.stdout is not None
    run = wait_for(lambda: os.listdir(run_folder("")) if run_folder("").exists() else [], "the run")[0]
    wait_for(lambda: (run_folder(run) / "state.json").exists() and state(run)["state"] == "running", "ranks")
    with socket.socket() as taken:
        taken.bind(("", port))
        taken.listen()
        (tmp_path / "gate").touch()
        seen = next((line for line in process.stdout if "attempt 3 begins in" in line), "")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 130, seen + said
    assert "nothing was started" not in said
    assert not watching.file_of(run).exists(), "the next command would start it again"


def test_ctrl_c_between_two_tries_of_a_start_gives_the_run_up() -> None:
    with contextlib.suppress(KeyboardInterrupt), watching.Keeper(Interrupts(), watches=True) as keeper:
        keeper.begin("r")
        raise KeyboardInterrupt
    assert not watching.file_of("r").exists()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_ctrl_c_that_comes_just_before_its_launch_is_ended_stops_the_run(number: signal.Signals) -> None:
    launch, run = launching(*script("echo here; exec sleep 1000"))
    assert launch.stdout is not None
    assert any("here" in line for line in launch.stdout)
    launch.send_signal(signal.SIGSTOP)  # it acts on neither before both are there
    launch.send_signal(signal.SIGINT)
    launch.send_signal(number)
    launch.send_signal(signal.SIGCONT)
    launch.communicate(timeout=30)
    assert launch.returncode == -number
    wait_until_nobody_watches(run)
    assert (state(run)["state"], state(run)["attempt"]) == ("stopped", 1)
    assert not list(watching.folder().glob(f"{run}.stop*"))


def test_a_ctrl_c_that_comes_while_a_run_is_handed_over_is_told_to_whoever_watches_it_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupts, watched = Interrupts(), contextlib.ExitStack()

    def interrupted(run: str) -> int:
        watched.enter_context(watching.alone(run))
        interrupts()
        return 1

    monkeypatch.setattr(watching, "spawn", interrupted)
    with watched:
        with contextlib.suppress(BrokenPipeError), watching.Keeper(interrupts, watches=True) as keeper:
            keeper.begin("r")
            raise BrokenPipeError
        assert watching.Book(watching.Watch("r")).unmet() == GRACE_S
    watching.forget("r")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--max-restarts", "1", "--min-world", "3"], "--min-world 3 is more than the 2 ranks"),
        (["--min-world", "1"], "add --max-restarts"),
        (["--max-restarts", "-1"], "max-restarts"),
        (["--max-restarts", "1", "--restart-delay", "nan"], "restart-delay"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_started(options: list[str], words: str) -> None:
    done = ringctl("launch", "--local", "--world", "2", *options, "--", "true", code=2)
    assert words in done.stderr
    assert not run_folder("").exists()


# --- Detached ------------------------------------------------------------------------------------


def test_a_detached_run_has_a_watcher_that_starts_it_again(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    text = f"[ $attempt = 2 ] && exit 0; while ! [ -e {gate} ]; do sleep 0.02; done; exit 3"
    run, watcher = detached("--max-restarts", "1", *SOON, *script(text))
    assert is_alive(watcher)
    assert f"process {watcher}" in status(run)["watched"]
    gate.touch()
    wait_for(lambda: state(run)["attempt"] == 2 and state(run)["state"] == "succeeded", "the second attempt")
    wait_for(lambda: not is_alive(watcher), "its watcher's end")
    assert status(run)["state"] == "succeeded"
    assert not watching.file_of(run).exists()


def test_following_the_log_goes_on_through_all_attempts_and_shows_each_line_once(tmp_path: Path) -> None:
    text = f"while ! [ -e {tmp_path}/gate ]; do sleep 0.02; done; echo line of $attempt; [ $attempt = 3 ]"
    run, _ = detached("--max-restarts", "5", *SOON, *script(f"{text} || exit $((attempt + 9))"))
    following = start("logs", run, "--follow", "--json")
    assert following.stdout is not None
    first = following.stdout.readline()  # that the ranks were started; they go on when this has been seen
    (tmp_path / "gate").touch()
    out, err = following.communicate(timeout=60)
    seen = [json.loads(line) for line in (first + out).splitlines()]
    assert sorted((e["attempt"], e["text"]) for e in seen if e["kind"] == "line" and e["rank"] == 0) == [
        (1, "line of 1"), (2, "line of 2"), (3, "line of 3"),
    ]  # fmt: skip
    assert [e["state"] for e in seen if e["kind"] == "run_finished"] == ["succeeded"], err


def test_a_watcher_that_was_killed_is_replaced_by_the_next_command_and_goes_on_counting(
    tmp_path: Path,
) -> None:
    text = f"while ! [ -e {tmp_path}/gate$attempt ]; do sleep 0.02; done; exit $((attempt % 3))"
    run, watcher = detached("--max-restarts", "2", *SOON, *script(text))
    (tmp_path / "gate1").touch()
    wait_for(lambda: state(run)["attempt"] == 2 and state(run)["state"] == "running", "the second attempt")
    os.kill(watcher, signal.SIGKILL)
    wait_for(lambda: not is_alive(watcher), "its end")
    (tmp_path / "gate2").touch()
    wait_for(lambda: state(run)["state"] == "failed", "a failure that nobody sees")
    said = ringctl("ps").stderr
    assert f"run {run} had lost its watcher" in said
    (tmp_path / "gate3").touch()
    wait_for(lambda: state(run)["attempt"] == 3 and state(run)["state"] == "succeeded", "the third attempt")
    wait_for(lambda: not watching.file_of(run).exists(), "its watcher's end")
    assert "lost its watcher" not in ringctl("ps").stderr


def test_a_launch_whose_reader_leaves_has_somebody_else_watch_the_run(tmp_path: Path) -> None:
    text = f"while ! [ -e {tmp_path}/gate$attempt ]; do sleep 0.02; done; echo $attempt; [ $attempt = 3 ]"
    options = ["--local", "--world", "1", "--max-restarts", "5", *SOON]
    launch = start("launch", *options, *script(f"{text} || exit $((attempt + 9))"))
    assert launch.stdout is not None
    run = launch.stdout.readline().split()[1].rstrip(":")
    launch.stdout.close()
    (tmp_path / "gate1").touch()  # what is said of its end is the first that nobody reads
    assert launch.wait(timeout=60) == 1
    watch = watching.read(run)
    assert watch is not None
    assert is_alive(watch.pid)
    (tmp_path / "gate2").touch()
    (tmp_path / "gate3").touch()
    wait_for(lambda: state(run)["attempt"] == 3 and state(run)["state"] == "succeeded", "the third attempt")
    wait_for(lambda: not is_alive(watch.pid), "its watcher's end")
    assert launch.stderr is not None
    assert "a run that was started goes on" in launch.stderr.read()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_launch_that_is_ended_while_it_starts_has_somebody_else_watch_the_run(
    number: signal.Signals, tmp_path: Path
) -> None:
    """Whether its first attempt is there by then or not: the run goes on without any other command."""
    launch, run = launching(*script(f"mkdir {tmp_path}/failed 2>/dev/null && exit 3; exit 0"))
    launch.send_signal(number)
    said, _ = launch.communicate(timeout=30)
    assert launch.returncode == -number, said
    wait_until_nobody_watches(run)
    assert (state(run)["state"], (tmp_path / "failed").exists()) == ("succeeded", True)


def test_a_restart_that_is_ended_while_it_starts_has_somebody_else_watch_the_run(tmp_path: Path) -> None:
    text = f"[ $attempt -gt 1 ] || exit 0; mkdir {tmp_path}/failed 2>/dev/null && exit 3; exit 0"
    run, _ = detached("--max-restarts", "2", *SOON, *script(text))
    wait_until_nobody_watches(run)
    restart = start("restart", run)
    wait_for(lambda: watching.file_of(run).exists(), "its next attempt")
    restart.send_signal(signal.SIGHUP)
    said, _ = restart.communicate(timeout=30)
    assert restart.returncode == -signal.SIGHUP, said
    wait_until_nobody_watches(run)
    assert (state(run)["state"], (tmp_path / "failed").exists()) == ("succeeded", True)


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_restart_that_is_to_end_once_it_has_ended_an_attempt_starts_the_next_one_before(
    number: signal.Signals, watched: bool, tmp_path: Path
) -> None:
    """It loses its terminal for good, or is told to end."""
    text = (
        f"[ $attempt -ne 2 ] || {{ until [ -e {tmp_path}/gate ]; do sleep 0.02; done; exit 3; }}; sleep 1000"
    )
    options = ["--max-restarts", "2", *SOON] if watched else []
    run = detach(script(text)[1:], world=1, options=options)
    ours, theirs = pty.openpty()
    argv = [*RINGCTL[:-1], ENDS_SLOWLY.format(folder=str(tmp_path)) + RINGCTL[-1]]
    on_terminal: dict[str, Any] = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    with subprocess.Popen(
        [*argv, "restart", run],
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        **on_terminal,
    ) as restart:
        os.close(theirs)
        wait_for(lambda: (tmp_path / "ended").exists(), "the end of the attempt before")
        if number is signal.SIGHUP:
            os.close(ours)
        else:
            restart.send_signal(number)
        (tmp_path / "go").touch()
        assert restart.wait(timeout=60) == -number
    if number is not signal.SIGHUP:
        os.close(ours)
    assert (state(run)["attempt"], state(run)["state"]) == (2, "running")
    (tmp_path / "gate").touch()
    if watched:
        wait_for(lambda: (state(run)["attempt"], state(run)["state"]) == (3, "running"), "the third attempt")
        ringctl("stop", run, "--grace", "0")
    else:
        wait_for(lambda: state(run)["state"] == "failed", "its end")
    wait_until_nobody_watches(run)


def test_a_restart_that_is_to_end_and_starts_nothing_says_why_before(tmp_path: Path) -> None:
    run = detach(["sleep", "1000"], world=1)
    argv = [*RINGCTL[:-1], ENDS_SLOWLY.format(folder=str(tmp_path)) + RINGCTL[-1]]
    with subprocess.Popen([*argv, "restart", run], stderr=subprocess.PIPE, text=True) as restart:
        wait_for(lambda: (tmp_path / "ended").exists(), "the end of the attempt before")
        restart.send_signal(signal.SIGTERM)
        restart.send_signal(signal.SIGHUP)
        stop = start("stop", run)
        wait_for(lambda: watching.again_of(run).read_bytes() == watching.CALLED_OFF, "the stop")
        (tmp_path / "go").touch()
        said = restart.communicate(timeout=60)[1]
        assert stop.communicate(timeout=60)[1] == ""
    assert f"somebody has stopped run {run} meanwhile: it is not started" in said
    assert restart.returncode in (-signal.SIGTERM, -signal.SIGHUP), "two at once come in any order"
    assert (state(run)["attempt"], state(run)["state"]) == (1, "stopped")


def test_a_launch_that_is_not_to_be_ended_by_a_signal_stays(tmp_path: Path) -> None:
    def ignore() -> None:  # as `nohup` does, and `trap "" TERM`
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    text = f"echo here; while ! [ -e {tmp_path}/gate ]; do sleep 0.02; done"
    launch, run = launching(*script(text), preexec_fn=ignore)
    assert launch.stdout is not None
    assert any("here" in line for line in launch.stdout)
    launch.send_signal(signal.SIGHUP)
    launch.send_signal(signal.SIGTERM)
    (tmp_path / "gate").touch()
    launch.communicate(timeout=30)
    assert (launch.returncode, state(run)["state"]) == (0, "succeeded")


def test_stop_ends_a_run_that_waits_for_its_next_attempt_and_its_watcher() -> None:
    run, watcher = detached("--max-restarts", "5", "--restart-delay", "600", *script("exit 1"))
    wait_for(lambda: "begins in" in (status(run)["watched"] or ""), "the wait")
    ringctl("stop", run)
    assert not is_alive(watcher)
    assert not watching.file_of(run).exists()
    assert state(run)["attempt"] == 1


def test_a_run_that_was_stopped_on_its_host_while_it_waited_is_remembered_as_over() -> None:
    run, watcher = detached("--max-restarts", "2", "--restart-delay", "1", *script("exit 3"))
    wait_for(lambda: (watching.read(run) or watching.Watch(run)).doing, "the wait for its next attempt")
    word = {"attempt": 1, "grace": 0, "reason": "stopped", "wanted": 1}  # as another controller leaves it
    (run_folder(run) / "stop.json").write_text(json.dumps(word))
    wait_for(lambda: not is_alive(watcher), "the end of the watcher")
    assert history.read(run).plan.attempt == 2  # type: ignore[union-attr]  # it is there
    assert history.state_of(run) == "failed"
    ringctl("stop", run)
    assert history.state_of(run) == "failed"


def test_a_restart_by_hand_takes_the_place_of_the_one_that_was_about_to_begin() -> None:
    run, watcher = detached(
        "--max-restarts", "5", "--restart-delay", "600", *script("[ $attempt = 1 ] && exit 1; sleep 1000")
    )
    wait_for(lambda: "begins in" in (status(run)["watched"] or ""), "the wait")
    again = json.loads(ringctl("restart", run, "--detach", "--json").stdout)
    assert not is_alive(watcher)
    assert is_alive(again["watcher"])
    assert (state(run)["attempt"], state(run)["state"]) == (2, "running")
    ringctl("stop", run)


@pytest.mark.parametrize("watched", [True, False])
def test_following_the_log_goes_on_through_a_restart_by_hand(watched: bool) -> None:
    options = ["--max-restarts", "5", "--restart-delay", "600"] if watched else []
    first = "exit 1" if watched else "exec sleep 1000"
    text = f"echo line of $attempt; [ $attempt = 1 ] && {first}; [ $attempt = 2 ]"
    run = detach(["sh", "-c", f"attempt=$RINGCTL_ATTEMPT; {text}"], world=1, options=options)
    following = start("logs", run, "--follow")
    assert following.stdout is not None
    seen = following.stdout.readline()
    if watched:
        wait_for(lambda: "begins in" in watching.sentence(run), "the wait for its next attempt")
    ringctl("restart", run, "--detach")
    out, err = following.communicate(timeout=60)
    assert (seen + out).split("\n")[:-1] == ["[0 localhost] line of 1", "[0 localhost] line of 2"], err
    assert "attempt 2:" in err


def test_following_a_log_begun_while_no_host_answers_goes_on_through_all_attempts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    gate = tmp_path / "gate"
    text = f"echo line of $attempt; until [ -e {gate} ]; do sleep 0.02; done; [ $attempt = 2 ]"
    run, watcher = detached("--max-restarts", "2", *SOON, *script(text))
    record = history.read(run)
    assert record is not None
    asked = iter([replace(found_of(record), silent=("localhost: it does not answer",))])
    gate.touch()
    wait_for(lambda: not is_alive(watcher), "the end of both attempts")
    with contextlib.closing(Pool()) as pool:

        def latest() -> tuple[Found, dict[str, Agent]]:
            record = history.read(run)
            assert record is not None
            return next(asked, found_of(record)), dict(agents_for(record.hosts, pool))

        look = showlogs.Look(as_json=False, prefix=False, timestamps=False, tail=None)
        assert showlogs.follow_attempts(run, latest, EVERYTHING, look) == 0
    shown = capfd.readouterr()
    assert shown.out.splitlines() == ["line of 1"] * 2 + ["line of 2"] * 2
    assert "attempt 1 failed; attempt 2:" in shown.err
    assert "succeeded" in shown.err


def test_attempts_that_cannot_even_start_count_too(tmp_path: Path) -> None:
    port = free_port()
    text = f"while ! [ -e {tmp_path}/gate ]; do sleep 0.02; done; exit 1"
    run, watcher = detached("--master-port", str(port), "--max-restarts", "2", *SOON, *script(text))
    with socket.socket() as taken:
        taken.bind(("", port))
        taken.listen()
        (tmp_path / "gate").touch()
        wait_for(lambda: not is_alive(watcher), "the end of its tries")
    log = (watching.folder() / f"{run}.log").read_text()
    assert log.count(" begins in ") == 2
    assert "it was started again 2 times, as often as --max-restarts allows" in log


@as_root
def test_a_full_disk_here_is_no_failed_attempt_and_is_waited_for(tmp_path: Path) -> None:
    """Only the history is on it: that of the hosts has room. One restart is allowed, and is had."""
    disk, ours, gate = tmp_path / "disk", tmp_path / "ours", tmp_path / "gate"
    disk.mkdir()
    ours.mkdir(mode=0o700)
    (ours / "history.db").symlink_to(disk / "history.db")
    text = f"while ! [ -e {gate} ]; do sleep 0.02; done; [ $attempt -gt 1 ]"
    options = ["--local", "--world", "1", "--skip-preflight", "--max-restarts", "1", *SOON, *script(text)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    environ = {**os.environ, "RINGCTL_HOME": str(ours)}
    command = [*ON_SMALL_DISK, str(disk), *RINGCTL, "launch", *options]
    with subprocess.Popen(command, env=environ, text=True, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        wait_for(lambda: list(ours.glob("runs/*/state.json")), "its start")
        print("fill", file=process.stdin, flush=True)
        for said in process.stdout:
            if said == "full\n":
                gate.touch()
            if "attempt 2 begins once" in said or "--max-restarts allows" in said:
                break
        assert "history.db: cannot be written: its disk is full; attempt 2 begins once" in said
        out, _ = process.communicate("free\n", timeout=60)
    assert process.returncode == 0, out


def test_who_restarts_a_run_that_was_started_again_meanwhile_is_told_so() -> None:
    launched(*script("exit 0"), code=0)
    record = history.recall()[0]
    run = record.plan.run
    late = ask.Asked(record.inventory, replace(record.options, attempt=1), None)
    with pytest.raises(RingctlError, match="started again by somebody else"):
        cli.refuse_late(late, run)
    cli.refuse_late(replace(late, options=replace(record.options, attempt=2)), run)


def test_of_two_who_restart_at_once_one_does() -> None:
    run = json.loads(
        ringctl("launch", "--local", "--world", "1", "--detach", "--json", "--", "sleep", "1000").stdout
    )["run"]
    ringctl("stop", run, "--grace", "0")
    both = [start("restart", run, "--detach") for _ in range(2)]
    said = [process.communicate(timeout=60) for process in both]
    codes = sorted(process.returncode for process in both)
    assert codes in ([0, 0], [0, 1]), said
    assert len(list(carriers(run))) == 1, "one rank, of one attempt"
    ringctl("stop", run, "--grace", "0")


def test_a_run_is_not_ended_for_a_restart_that_its_host_is_not_fit_for(tmp_path: Path) -> None:
    """But that the run itself has the port is no reason."""
    python, port = tmp_path / "python", str(free_port())
    python.symlink_to(sys.executable)
    about = f"hosts: [{{name: here, local: true, env: {{python: {python}}}}}]"
    (tmp_path / "hosts.yaml").write_text(about)
    listen = f"import socket; s = socket.create_server(('', {port})); print('there', flush=True); s.accept()"
    options = ["--hosts", str(tmp_path / "hosts.yaml"), "--master-port", port, "--max-restarts", "3"]
    command = ["--", sys.executable, "-c", listen]
    run = json.loads(ringctl("launch", *options, "--no-prefork", "--detach", "--json", *command).stdout)[
        "run"
    ]
    wait_for(lambda: "there" in lines(events(run), 0), "the port to be taken")
    python.rename(tmp_path / "elsewhere")
    said = ringctl("restart", run, "--detach", code=3).stderr
    assert "nothing was started; attempt 1 is as it was" in said
    assert "(env_missing)" in said
    assert "(port_used)" not in said
    assert (state(run)["state"], state(run)["attempt"]) == ("running", 1)
    assert "watched by a watcher" in status(run)["watched"]
    ringctl("stop", run, "--grace", "0")


def test_a_host_that_was_taken_in_and_lost_again_is_asked_to_end_that_attempt_too() -> None:
    run = detach(["sleep", "1000"], world=1)
    ringctl("restart", run, "--detach")
    here = Host("localhost", local=True)
    with contextlib.closing(Pool(no_input=True)) as pool:
        left = Leftovers(run, pool)
        for attempt, unended in ((1, ()), (2, ()), (2, ("localhost",))):
            assert state(run)["state"] == "running", "it was asked to end what came before this attempt only"
            left.look_after([here], [], attempt, unended)
            left.endings["localhost"].join()
        assert left.close() == ""
    assert state(run)["state"] == "failed"


class Stuck(Agent):
    """A host with a process that even SIGKILL does not end, which cannot be made at will."""

    def stop(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {"known": True, "was": "failed", "state": "failed", "ended": [], "left": [4711]}


def test_a_host_that_could_not_end_all_is_asked_again() -> None:
    ended = threading.Event()
    with contextlib.closing(Pool(no_input=True)) as pool:
        here = Host("localhost", local=True)
        Ending(Stuck(here, pool.transport(here)), "r", 1, ended.set).start()
        assert ended.wait(30), "by the second answer, a real one, nothing is left"


def test_an_attempt_is_not_started_beside_what_could_not_be_ended() -> None:
    with contextlib.closing(Pool(no_input=True)) as pool:
        here = Host("localhost", local=True)
        with pytest.raises(HostError, match=r"did not end: \[4711\]"):
            end_before({"localhost": Stuck(here, pool.transport(here))}, "r", 1, {}, ["localhost"])
        told = end_before({"localhost": Stuck(here, pool.transport(here))}, "r", 1, {}, [])
        assert "did not end: [4711]" in told["localhost"], "nothing starts there"


def test_a_run_is_not_ended_for_a_restart_whose_folder_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    command = ["--local", "--world", "1", "--detach", "--json", "--", "sleep", "1000"]
    run = json.loads(ringctl("launch", *command, cwd=folder).stdout)["run"]
    folder.rename(tmp_path / "elsewhere")
    said = ringctl("restart", run, "--detach", code=4).stderr
    assert f"there is no folder {folder} any more; attempt 1 is as it was" in said
    assert (state(run)["state"], state(run)["attempt"]) == ("running", 1)
    ringctl("stop", run, "--grace", "0")


@as_root
@pytest.mark.parametrize("watched", [True, False])  # then its folder there is full, too
def test_a_run_is_not_ended_for_a_restart_that_cannot_be_written_down(tmp_path: Path, watched: bool) -> None:
    run = detach(["sleep", "1000"], world=1, options=["--max-restarts", "3"] if watched else [])
    disk = tmp_path / "full"
    disk.mkdir(mode=0o700)
    full = """mount -t tmpfs -o size=64k,mode=700 tmpfs "$0" && ln -s "$RINGCTL_HOME"/* "$0"
        dd if=/dev/zero of="$0/filler" bs=4k 2>/dev/null
        RINGCTL_HOME="$0" exec "$@" """
    command = ["unshare", "-m", "sh", "-c", full, str(disk), *RINGCTL, "restart", run, "--detach"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done
    assert f"No space left on device; {'attempt 1' if watched else 'the run'} is as it was" in done.stderr
    assert (state(run)["state"], state(run)["attempt"]) == ("running", 1)
    ringctl("stop", run, "--grace", "0")


def test_a_restart_that_fails_after_all_says_what_it_has_ended(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho here; exec sleep 1000\n")
    program.chmod(0o755)
    run = detach([str(program)], world=1)
    following = start("logs", run, "--follow")
    assert following.stdout is not None
    assert "here" in following.stdout.readline()
    program.unlink()
    said = ringctl("restart", run, "--detach", code=1).stderr
    assert f"run {run} failed" in following.communicate(timeout=60)[1], "nobody starts it again"
    assert (
        f"no program '{program}' on this host; nothing was left running; attempt 1 was ended for it" in said
    )
    assert f"to go on: ringctl restart {run}" in said


def test_a_restart_that_is_interrupted_says_what_it_has_ended(capsys: pytest.CaptureFixture[str]) -> None:
    found, again = Found("r", "", (), 0.0, attempt=4), watching.Again("r")
    with contextlib.suppress(KeyboardInterrupt), cli_runs.telling_what_ended(found, again):
        raise KeyboardInterrupt
    assert "attempt 4 was ended for it\n  to go on: ringctl restart r" in capsys.readouterr().err
    again.started()
    with cli_runs.telling_what_ended(found, again):
        pass
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("where", "options"),
    [("stdout", []), ("both", ["--detach"]), ("full disk", []), ("full disk", ["--detach"])],
)
def test_an_attempt_that_was_ended_for_the_next_is_followed_by_it_whoever_reads(
    where: str, options: list[str]
) -> None:
    run = detach(["sleep", "1000"], world=1, options=["--no-prefork"])
    with open("/dev/full", "wb") if where == "full disk" else unread_pipe() as out:
        err = out if where == "both" else subprocess.PIPE
        argv = [*RINGCTL, "restart", run, *options]
        done = subprocess.run(argv, stdout=out, stderr=err, text=True, timeout=60, check=False)
    now = state(run)
    ringctl("stop", run, "--grace", "0")
    assert (now["attempt"], now["state"]) == (2, "running"), done
    why = {"stdout": cli.UNREAD, "both": "", "full disk": f"error: {cli.FULL}"}[where]
    said = f"{why}; a run that was started goes on\n" if why else None
    assert (done.returncode, done.stderr) == (1, said)


@pytest.mark.parametrize("options", [[], ["--max-restarts", "3"]], ids=["alone", "watched"])
def test_a_run_that_is_stopped_while_a_restart_ends_it_stays_so(tmp_path: Path, options: list[str]) -> None:
    run = detach(["sleep", "1000"], world=1, options=options)
    argv = [*RINGCTL[:-1], ENDS_SLOWLY.format(folder=str(tmp_path)) + RINGCTL[-1]]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*argv, "restart", run, "--detach"], text=True, **pipes) as restart:
        wait_for(lambda: (tmp_path / "ended").exists(), "the end of the attempt before")
        assert "by another ringctl" in status(run)["watched"]
        assert pruning.is_busy(run)
        stop = start("stop", run)
        wait_for(lambda: watching.again_of(run).read_bytes() == watching.CALLED_OFF, "the stop")
        (tmp_path / "go").touch()
        said = [*stop.communicate(timeout=60), *restart.communicate(timeout=60)]
    assert (stop.returncode, restart.returncode) == (0, 130), said
    assert f"somebody has stopped run {run} meanwhile: it is not started" in said[3]
    assert (state(run)["state"], state(run)["attempt"], history.state_of(run)) == ("stopped", 1, "stopped")
    assert not list(carriers(run))
    ringctl("restart", run, "--detach")
    assert state(run)["attempt"] == 2, "what was stopped before that is another matter"
    ringctl("stop", run, "--grace", "0")


def test_a_host_that_takes_long_to_stop_a_run_leaves_alone_what_was_started_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, end = detach(["sleep", "1000"], world=1), hoststop.terminate

    def slowly(*args: Any) -> None:
        end(*args)
        ringctl("restart", run, "--detach")

    monkeypatch.setattr(hoststop, "terminate", slowly)
    answer = hoststop.command_stop({"run": run, "attempt": 1, "grace": 0.0})
    assert (answer["ended"], answer["left"]) == ([0], [])
    there = state(run)
    assert (there["attempt"], there["state"]) == (2, "running")
    assert is_alive(there["ranks"][0]["pid"])
    ringctl("stop", run, "--grace", "0")


def test_a_stop_says_so_if_whoever_is_about_to_start_the_run_does_not_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = detach(["sleep", "1000"], world=1)
    monkeypatch.setattr(watching, "END_S", 0.1)
    with watching.Again(run) as again:
        assert cli.cli.main(["stop", run, "--grace", "0"], standalone_mode=False) == 1
        with pytest.raises(StoppedEarly):
            again.refuse_stopped()
    assert cli.cli.main(["stop", run, "--grace", "0"], standalone_mode=False) == 0


def test_a_watcher_that_dies_before_the_next_attempt_is_anywhere_is_replaced_and_that_starts() -> None:
    run, watcher = detached("--max-restarts", "3", "--restart-delay", "600", *script("[ $attempt -gt 2 ]"))
    wait_for(lambda: "begins in" in (status(run)["watched"] or ""), "the wait")
    os.kill(watcher, signal.SIGKILL)
    wait_for(lambda: not is_alive(watcher), "its end")
    record = history.read(run)
    assert record is not None
    plan = replace(record.plan, attempt=2)  # as it is written just before the start
    options = replace(record.options, restart_delay=0.1)
    history.write(replace(record, plan=plan, options=options, end=None, cause=None))
    assert "lost its watcher" in ringctl("ps").stderr
    wait_for(lambda: state(run)["attempt"] == 3 and state(run)["state"] == "succeeded", "the third attempt")
    wait_for(lambda: not watching.file_of(run).exists(), "its watcher's end")


def test_a_stop_says_so_if_whoever_watches_the_run_does_not_go(monkeypatch: pytest.MonkeyPatch) -> None:
    run, watcher = detached("--max-restarts", "2", *SOON, *script("sleep 1000"))
    os.kill(watcher, signal.SIGSTOP)
    try:
        monkeypatch.setattr(watching, "END_S", 0.5)
        assert cli.cli.main(["stop", run, "--grace", "0"], standalone_mode=False) == 1
    finally:
        os.kill(watcher, signal.SIGCONT)
    ringctl("stop", run, "--grace", "0")
    wait_for(lambda: not is_alive(watcher), "its end")


def test_stop_ends_a_watched_run_for_good() -> None:
    run, watcher = detached("--max-restarts", "5", *SOON, *script("exec sleep 1000"))
    ringctl("stop", run)
    assert not is_alive(watcher)
    assert (state(run)["state"], state(run)["attempt"]) == ("stopped", 1)
    again = json.loads(ringctl("restart", run, "--detach", "--json").stdout)
    assert is_alive(again["watcher"]), "by hand it may start, and has a watcher again"
    assert state(run)["attempt"] == 2
    ringctl("stop", run)


def test_a_stop_that_was_killed_before_it_asked_any_host_is_seen_to_by_whoever_watches_the_run() -> None:
    run, watcher = detached("--max-restarts", "5", *SOON, *script("exec sleep 1000"))
    killed = f"""
import os
from launcher import watching
with watching.giving_up({run!r}, 1.0) as watcher:
    assert watcher
    os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", killed], check=False).returncode == -signal.SIGKILL
    wait_for(lambda: not is_alive(watcher), "its end")
    assert (state(run)["state"], state(run)["attempt"]) == ("stopped", 1)
    assert not list(watching.folder().glob(f"{run}.stop*"))


# --- Training ------------------------------------------------------------------------------------


def train(*options: str) -> list[str]:
    words = "--steps 100 --batch-size 16 --seed 5 --checkpoint-every 25 --threads 1"
    return [*options, "--", *words.split()]


def test_a_training_whose_rank_is_killed_goes_on_and_ends_with_the_same_bits() -> None:
    undisturbed, _ = launched(*train(), code=0)
    options = ["--local", "--world", "2", "--json", "--max-restarts", "1", *SOON]
    process = start("launch", *options, *train())
    assert process.stdout is not None
    killed, last, pids = False, {}, {}
    for line in process.stdout:
        last = json.loads(line)
        if last["kind"] == "rank_started":
            pids[last["rank"]] = last["pid"]
        if not killed and last["kind"] == "metric" and last.get("step", 0) >= 30:
            os.kill(pids[1], signal.SIGKILL)
            killed = True
    process.communicate(timeout=60)
    assert killed
    assert (last["state"], last["attempt"]) == ("succeeded", 2)
    assert last["parameters_sha256"] == undisturbed[-1]["parameters_sha256"]


def test_a_run_can_be_stopped_when_the_disk_here_has_become_read_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = os.open

    def read_only(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if str(path).endswith(".lock") and flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
            raise OSError(30, "Read-only file system")
        return real(path, flags, *rest, **named)

    with watching.alone("r"):
        monkeypatch.setattr(os, "open", read_only)
        assert watching.is_watched("r")
    assert not watching.is_watched("r")


def test_a_watcher_that_comes_late_begins_nothing_anew() -> None:
    """Two commands at once may have asked for one, and the first has seen the run through."""
    run, watcher = detached("--max-restarts", "1", *SOON, *script("exit $((attempt + 2))"))
    wait_for(lambda: not is_alive(watcher), "the end of it all")
    assert watching.read(run) is None
    ringctl("--no-input", "watcher", run)
    assert (state(run)["attempt"], watching.read(run)) == (2, None)


def test_a_run_whose_watchers_file_cannot_be_read_is_told_of_and_one_that_is_seen_through_is_not() -> None:
    history.make_folder(watching.folder())
    watching.file_of("torn").write_text('{"run": "to')
    (said,) = watching.pick_up("ps")
    assert said.startswith(f"{watching.file_of('torn')} cannot be read, so nobody watches run torn; remove")
    watching.file_of("torn").unlink()
    assert watching.pick_up("ps") == []
