"""The supervisor, as it is used: through real launches on this machine."""

from __future__ import annotations

import base64
import fcntl
import functools
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher import hostranks, hoststore, hostword, kit
from launcher.hostdisk import LOCK_S
from launcher.hostoutput import MetricsTail
from launcher.hostpending import Pending
from launcher.hostranks import Rank
from launcher.hostsupervisor import Supervisor
from launcher.hostword import REBOOTED
from tests.launcher.ringctl import (
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

HOSTD = [sys.executable, "-I", "-S", "-c", kit.RUN, kit.HERE, "hostd"]


def script(folder: Path, body: str) -> str:
    path = folder / "program.py"
    path.write_text(textwrap.dedent(body))
    return str(path)


def steps(run: str) -> list[int]:
    """What rank 0 told, as it is in the log."""
    return [event["step"] for event in events(run) if event["kind"] == "metric" and "step" in event]


# --- Output --------------------------------------------------------------------------------------


def what_came(events: list[dict[str, object]], rank: int, stream: str = "out") -> bytes:
    """The bytes a rank wrote, put together again from its events."""
    mine = [e for e in events if e["kind"] == "line" and e["rank"] == rank and e["stream"] == stream]
    text = "".join(str(e["text"]) + str(e.get("end", "\n")) for e in mine)
    return text.encode("utf-8", "surrogateescape")


ODD_OUTPUT = [
    b"one\ntwo\n",
    b"no newline at the end",
    b"\n\n\n",
    b"progress 1\rprogress 2\rdone\n",
    b"dos\r\nlines\r\n",
    b"ends in a return\r",
    b"\r\r\n\r",
    "gr\u00fc\u00dfe, \u4e16\u754c \U0001f600\n".encode(),
    bytes(range(256)) * 3,
    b"\xff\xfe half a character \xe4\xb8",
    b"x" * 10_000_000 + b"\nafter\n",
    b"",
]


def test_every_byte_a_rank_writes_comes_back(tmp_path: Path) -> None:
    for rank, data in enumerate(ODD_OUTPUT):
        (tmp_path / f"{rank}").write_bytes(data)
    run = detach(["sh", "-c", 'cat "$0/$RANK"', str(tmp_path)], world=len(ODD_OUTPUT))
    wait_until_final(run)
    seen = events(run)
    for rank, data in enumerate(ODD_OUTPUT):
        assert what_came(seen, rank) == data, data[:20]


def test_a_character_cut_in_two_by_a_flush_stays_whole(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        """
        import os, select
        data = "\u4e16\u754c\\n".encode()
        for i in range(len(data)):
            os.write(1, data[i:i + 1])
            select.select([], [], [], 0.02)
        """,
    )
    assert lines(launch(["python", "-S", program], world=1), 0) == ["\u4e16\u754c"]


def test_stdout_and_stderr_of_each_rank_are_told_apart() -> None:
    seen = launch(["sh", "-c", "echo out $RANK; echo err $RANK >&2"])
    for rank in (0, 1):
        assert lines(seen, rank) == [f"out {rank}"]
        assert lines(seen, rank, "err") == [f"err {rank}"]


@pytest.mark.parametrize("code", [0, 1])
def test_what_passes_through_a_filter_of_a_ranks_own_arrives_to_its_end(code: int) -> None:
    slow = "while read -r line; do echo through $line; done"
    seen = launch(["bash", "-c", f"exec > >({slow}) 2>&1; seq 1 3000; exit {code}"], world=1, code=code)
    assert lines(seen, 0) == [f"through {n}" for n in range(1, 3001)]


def test_metrics_that_a_filter_or_a_child_tells_behind_a_rank_arrive_too() -> None:
    slow = """while read -r line; do echo "{\\"step\\": $line}" >>$RINGCTL_METRICS; echo $line; done"""
    run = detach(["bash", "-c", f"exec > >({slow}); seq 1 300"], world=1)
    wait_until_final(run)
    assert lines(events(run), 0) == [str(n) for n in range(1, 301)]
    assert steps(run) == [*range(1, 301)]


def test_metrics_that_nobody_has_read_are_told_of() -> None:
    write = "import os; open(os.environ['RINGCTL_METRICS'], 'wb').truncate(80 << 20)"
    done = ringctl("launch", "--local", "--world", "1", "--", "python", "-S", "-c", write)
    words = "of metrics are not in the log: they came more quickly than they could be read"
    told = re.search(rf"localhost: ([0-9.]+) MB {words}", done.stdout)
    assert told, done.stdout
    most = ((80 << 20) - hostranks.MOST_METRICS) / 1e6
    assert most - 4 < float(told[1]) < most + 0.1, "some may have been read while it was there"


def test_many_lines_of_many_ranks_all_arrive_in_order() -> None:
    seen = launch(["sh", "-c", "seq 1 20000"], world=4)
    for rank in range(4):
        assert lines(seen, rank) == [str(n) for n in range(1, 20001)]


def test_a_full_segment_is_closed_and_the_log_goes_on_in_the_next() -> None:
    text = "x" * 10_000
    run = detach(["sh", "-c", f"yes {text} | head -n 8000"], world=1)
    wait_until_final(run)
    assert len(list(run_folder(run).glob("events-1-*.jsonl"))) == 2
    done = ringctl("logs", run, "--no-prefix")
    assert done.stdout == f"{text}\n" * 8000


# --- Endings -------------------------------------------------------------------------------------


def test_each_rank_has_one_final_event_with_its_exit_code() -> None:
    final = exits(launch(["sh", "-c", "exit $((RANK * 3))"], code=1))
    assert (final[0]["state"], final[0]["exit_code"]) == ("succeeded", 0)
    assert (final[1]["state"], final[1]["exit_code"]) == ("failed", 3)


def test_a_rank_that_dies_of_a_signal_says_which() -> None:
    final = exits(launch(["sh", "-c", "kill -SEGV $$"], world=1, code=1))
    assert (final[0]["exit_code"], final[0]["signal"]) == (-11, "SIGSEGV")


def test_when_a_rank_fails_the_others_are_ended_and_the_run_names_it() -> None:
    seen = launch(["sh", "-c", 'test $RANK = 1 && { echo "boom" >&2; exit 7; }; exec sleep 600'], code=1)
    final, last = exits(seen), seen[-1]
    assert final[1]["exit_code"] == 7
    assert final[0]["reason"] == "rank 1 failed"
    assert last["kind"] == "run_finished"
    assert last["state"] == "failed"
    assert "rank 1 on localhost exited with code 7: boom" in last["cause"]


def test_a_rank_that_ignores_term_is_killed() -> None:
    run = detach(["sh", "-c", 'trap "" TERM; echo ready; while :; do sleep 0.1; done'], world=1)
    wait_for(lambda: lines(events(run), 0), "the rank")
    ringctl("stop", run, "--grace", "0.3")
    assert exits(events(run))[0]["signal"] == "SIGKILL"


def test_what_a_rank_leaves_in_the_background_ends_with_the_run() -> None:
    run = detach(["sh", "-c", "setsid sleep 600 & echo $!"], world=1)
    wait_until_final(run)
    assert not is_alive(int(lines(events(run), 0)[0]))
    assert state(run)["state"] == "succeeded"


DOUBLE_FORK = """
    import os, sys, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            if "hide" in sys.argv:
                os.execve("/bin/sleep", ["sleep", "600"], {"MARKED": os.environ["RINGCTL_TEST_MARK"]})
            time.sleep(600)
        os._exit(0)
    print("ready", flush=True)
    time.sleep(600)
"""


def session_of_run(run: str) -> list[int]:
    """All processes that carry the run's id, and all below its supervisor."""
    below, queue = [], [state(run)["warden"]["pid"]]
    while queue:
        parent = queue.pop()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    ppid = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                except OSError:
                    continue
                if ppid == parent:
                    below.append(int(entry.name))
                    queue.append(int(entry.name))
    return below


@pytest.mark.parametrize("hide", [[], ["hide"]], ids=["with the run's id", "with an environment of its own"])
@pytest.mark.parametrize("prefork", ["--prefork", "--no-prefork"])
def test_when_the_supervisor_is_killed_no_rank_and_no_grandchild_survives(
    hide: list[str], prefork: str, tmp_path: Path
) -> None:
    run = detach(["python", "-S", script(tmp_path, DOUBLE_FORK), *hide], options=[prefork])
    wait_for(lambda: lines(events(run), 0) and lines(events(run), 1), "the ranks")
    pids = wait_for(lambda: len(p := session_of_run(run)) >= 5 and p, "the grandchildren")
    os.kill(state(run)["hostd"]["pid"], signal.SIGKILL)
    wait_for(lambda: not any(is_alive(pid) for pid in pids), "the end of all of them", seconds=5)
    final = wait_until_final(run)
    assert final["state"] == "failed"
    assert {e["reason"] for e in exits(events(run)).values()} == {"its supervisor was killed"}


def test_when_the_warden_is_killed_the_supervisor_ends_the_run() -> None:
    run = detach(["sleep", "600"])
    pids = session_of_run(run)
    os.kill(state(run)["warden"]["pid"], signal.SIGKILL)
    wait_for(lambda: not any(is_alive(pid) for pid in pids), "the end of all of them", seconds=10)
    assert state(run)["state"] == "failed"
    assert {e["reason"] for e in exits(events(run)).values()} == {"its supervisor was killed"}


def test_what_a_rank_failed_of_is_told_also_if_its_supervisor_is_killed_right_after() -> None:
    fails = "echo 'ValueError: label 17' >&2; exit 1"
    run = detach(["sh", "-c", f"trap '' TERM; [ $RANK = 1 ] || {{ {fails}; }}; sleep 600"])
    wait_for(lambda: 0 in exits(events(run)), "the failure")
    os.kill(state(run)["hostd"]["pid"], signal.SIGKILL)
    assert wait_until_final(run)["state"] == "failed"
    assert exits(events(run))[1]["reason"] == "its supervisor was killed"
    said = ringctl("explain", run, code=None).stdout
    assert "rank 0 on localhost exited with code 1: ValueError: label 17" in said


def test_what_ranks_said_while_their_supervisor_was_about_to_be_killed_is_not_lost(tmp_path: Path) -> None:
    said = "seq 1 1000; printf begun; touch $0/at$RANK; until [ -e $0/go ]; do sleep 0.02; done"
    said += "; printf ' and ended\\n'; seq 1 2000; printf end; touch $0/$RANK; sleep 600"
    run = detach(["sh", "-c", said, str(tmp_path)])
    supervisor = state(run)["hostd"]["pid"]
    wait_for(lambda: (tmp_path / "at0").exists() and (tmp_path / "at1").exists(), "the beginning of a line")
    wait_for(lambda: [lines(events(run), rank)[-1:] for rank in (0, 1)] == [["1000"]] * 2, "those before it")
    os.kill(supervisor, signal.SIGSTOP)  # it reads nothing any more
    (tmp_path / "go").touch()
    wait_for(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists(), "what they say")
    with open(run_folder(run) / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a stop that hangs at its disk, say
        os.kill(supervisor, signal.SIGKILL)
        time.sleep(LOCK_S + 1.0)
    assert wait_until_final(run)["state"] == "failed"
    for rank in (0, 1):
        numbers = [*map(str, range(1, 2001))]
        assert lines(events(run), rank) == [*numbers[:1000], "begun and ended", *numbers, "end"]
        assert set(exits(events(run))) == {0, 1}
    assert "may be lost" not in ringctl("logs", run).stderr


TELLS_STEPS = """
    import json, os, sys, time
    step, last = 0, float(sys.argv[1])
    with open(os.environ["RINGCTL_METRICS"], "a", buffering=1) as file:
        while not last or step < last:
            step += 1
            file.write(json.dumps({"step": step}) + "\\n")
            time.sleep(0.002)
        file.write('{"accuracy": 0.5}\\n')
"""


def test_what_ranks_told_until_their_supervisor_was_killed_is_not_lost(tmp_path: Path) -> None:
    run = detach(["python", "-S", script(tmp_path, TELLS_STEPS), "0"], world=1)
    wait_for(lambda: steps(run)[-1:] > [100], "some steps")
    os.kill(state(run)["hostd"]["pid"], signal.SIGKILL)
    final = wait_until_final(run)
    told = [json.loads(line) for line in (run_folder(run) / "ranks/0/metrics-1.jsonl").open()]
    assert steps(run) == [record["step"] for record in told]
    assert final["ranks"][0]["metric"]["step"] == told[-1]["step"]
    assert "may be lost" not in ringctl("logs", run).stderr


def test_a_record_that_took_the_place_of_another_until_the_supervisor_was_killed_is_not_lost(
    tmp_path: Path,
) -> None:
    told = """echo '{"step": 10}' >$RINGCTL_METRICS; until [ -e $0/go ]; do sleep 0.02; done"""
    told += """; echo '{"step": 11}' >$RINGCTL_METRICS; touch $0/told; sleep 600"""
    run = detach(["sh", "-c", told, str(tmp_path)], world=1)
    wait_for(lambda: steps(run) == [10], "the first record")
    hostd = state(run)["hostd"]["pid"]
    os.kill(hostd, signal.SIGSTOP)
    (tmp_path / "go").touch()
    wait_for((tmp_path / "told").exists, "the second one")
    os.kill(hostd, signal.SIGKILL)
    wait_until_final(run)
    assert steps(run) == [10, 11]


def test_ranks_that_had_ended_when_their_supervisor_was_killed_have_ended_as_they_did(tmp_path: Path) -> None:
    said = "touch $0/at$RANK; until [ -e $0/go ]; do sleep 0.02; done"
    said += """; echo '{"step": 7, "accuracy": 0.9}' >>$RINGCTL_METRICS; exit $RANK"""
    run = detach(["sh", "-c", said, str(tmp_path)])
    wait_for(lambda: (tmp_path / "at0").exists() and (tmp_path / "at1").exists(), "the ranks")
    about = state(run)
    os.kill(about["hostd"]["pid"], signal.SIGSTOP)  # it reaps nobody any more
    (tmp_path / "go").touch()
    wait_for(lambda: not any(is_alive(rank["pid"]) for rank in about["ranks"]), "their end")
    os.kill(about["hostd"]["pid"], signal.SIGKILL)
    final = wait_until_final(run)
    ends = exits(events(run))
    assert (ends[0]["state"], ends[0]["exit_code"]) == ("succeeded", 0)
    assert (ends[1]["state"], ends[1]["exit_code"]) == ("failed", 1)
    assert final["state"] == "failed"
    assert [rank["metric"] for rank in final["ranks"]] == [{"step": 7, "accuracy": 0.9}] * 2


@pytest.mark.parametrize("code", [0, 1])
def test_ranks_that_end_well_with_all_else_on_their_host_have_not_succeeded(
    tmp_path: Path, code: int
) -> None:
    polite = f"""
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit({code})))
        print("up", flush=True)
        time.sleep(600)
    """
    run = detach(["python", "-S", script(tmp_path, polite)])
    wait_for(lambda: lines(events(run), 0) and lines(events(run), 1), "the ranks")
    started = [event["pid"] for event in events(run) if event["kind"] == "rank_started"]
    about = state(run)
    for pid in (about["warden"]["pid"], about["hostd"]["pid"], *started):
        os.kill(pid, signal.SIGTERM)  # as when the host is shut down
    final = wait_until_final(run)
    assert (final["state"], lines(events(run), 0)) == ("failed", ["up", "saved"])
    for end in exits(events(run)).values():
        assert (end["state"], end["exit_code"]) == ("stopped", code)
        assert "its supervisor was told to end" in end["reason"]


def test_how_long_a_host_has_known_of_a_stop_is_told_with_each_rank_that_it_ends(tmp_path: Path) -> None:
    slow = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), sys.exit(0)))
        print("up", flush=True)
        time.sleep(600)
    """
    run = detach(["python", "-S", script(tmp_path, slow)], world=1)
    wait_for(lambda: lines(events(run), 0), "the rank")
    ringctl("stop", run, "--grace", "60")
    assert 0.9 < exits(events(run))[0]["stopping"] < 50
    assert state(run)["ranks"][0]["stopping"] == pytest.approx(exits(events(run))[0]["stopping"], abs=0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("who", ["warden", "hostd"])
def test_a_supervisor_that_is_told_to_end_by_nobody_of_ours_has_failed(who: str, number: int) -> None:
    run = detach(["sleep", "600"])
    pids = session_of_run(run)
    os.kill(state(run)[who]["pid"], number)  # as when the host is shut down
    wait_for(lambda: not any(is_alive(pid) for pid in pids), "the end of all of them", seconds=10)
    assert state(run)["state"] == "failed"
    assert {"and nobody had stopped the run" in e["reason"] for e in exits(events(run)).values()} == {True}


# What goes on in the background holds a lock, for as long as there is any of it.
HOLD = """
    import ctypes, fcntl, os, sys, threading, time
    held = open(sys.argv[1], "w")
    fcntl.flock(held, fcntl.LOCK_EX)
    end = time.monotonic() + 60
"""
HEADLESS = """
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            threading.Thread(target=time.sleep, args=[60]).start()
            print("ready", flush=True)
            ctypes.CDLL(None).pthread_exit(None)  # of the first thread: it looks dead from here on
        os._exit(0)
    time.sleep(60 if "stay" in sys.argv else 1)
"""
COMETS = """
    for _ in range(6):
        if os.fork() == 0:
            while time.monotonic() < end:
                os.setsid()
                if os.fork():
                    os._exit(0)
    print("ready", flush=True)
    time.sleep(1)
"""
CHAIN = """
    if os.fork() == 0:
        while time.monotonic() < end:
            if os.fork():
                os._exit(0)
    print("ready", flush=True)
    time.sleep(60)
"""


def is_held(path: Path) -> bool:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


@pytest.mark.parametrize("program", [HEADLESS, COMETS], ids=["without its first thread", "ever new ones"])
def test_what_a_look_at_the_processes_does_not_show_ends_with_the_run_too(
    program: str, tmp_path: Path
) -> None:
    held = tmp_path / "held"
    run = detach(["python3", "-S", script(tmp_path, HOLD + program), str(held)], world=1)
    wait_for(lambda: lines(events(run), 0), "what it leaves in the background")
    assert wait_until_final(run)["state"] == "succeeded"
    assert not is_held(held)
    assert events(run)[-1]["left"] == []


@pytest.mark.parametrize("program", [HEADLESS, CHAIN], ids=["without its first thread", "ever new ones"])
def test_a_stop_finds_what_a_look_at_the_processes_does_not_show(program: str, tmp_path: Path) -> None:
    held = tmp_path / "held"
    run = detach(["python3", "-S", script(tmp_path, HOLD + program), str(held), "stay"], world=1)
    wait_for(lambda: lines(events(run), 0), "what it leaves in the background")
    about = state(run)
    for who in ("warden", "hostd"):
        os.kill(about[who]["pid"], signal.SIGSTOP)
    for who in ("warden", "hostd"):
        os.kill(about[who]["pid"], signal.SIGKILL)
    ringctl("stop", run)
    wait_for(lambda: not is_held(held), "its end", seconds=5)


WITHOUT_ID = 'env -i MARKED="$RINGCTL_TEST_MARK" sleep 600'


@pytest.mark.parametrize("orphan", ["setsid sleep 600", WITHOUT_ID], ids=["with its id", "in a session"])
def test_a_run_whose_supervisors_all_died_is_lost_and_has_failed_once_somebody_stops_it(orphan: str) -> None:
    run = detach(["sh", "-c", f"{orphan} & echo $!; wait"], world=1)
    pid = int(wait_for(lambda: lines(events(run), 0), "the grandchild")[0])
    heard = state(run)["uptime"]
    about = wait_for(lambda: state(run)["uptime"] > heard and state(run), "a heartbeat since")
    for who in ("warden", "hostd"):
        os.kill(about[who]["pid"], signal.SIGSTOP)
    for who in ("warden", "hostd"):
        os.kill(about[who]["pid"], signal.SIGKILL)
    wait_for(
        lambda: json.loads(ringctl("status", run, "--json").stdout)["state"] == "lost", "the loss to be seen"
    )
    assert json.loads(ringctl("runs", "list", "--json").stdout)[0]["state"] == "lost"
    ringctl("stop", run)
    assert not is_alive(pid)
    assert json.loads(ringctl("status", run, "--json").stdout)["state"] == "failed"
    assert [event["reason"] for event in exits(events(run)).values()] == ["its supervisor was killed"]


@pytest.mark.parametrize(
    ("ago", "word_ago", "final"), [(60.0, 0.0, "failed"), (1.0, 0.0, "stopped"), (9e4, 9e4, "stopped")]
)
def test_who_was_gone_before_the_word_of_a_stop_was_left_was_not_stopped(
    ago: float, word_ago: float, final: str
) -> None:
    """Whoever left it has come no further; somebody does so again."""
    run = detach(["sleep", "600"], world=1)
    about = wait_for(lambda: state(run)["state"] == "running" and state(run), "its start")
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for who in ("warden", "hostd"):
            os.kill(about[who]["pid"], number)
    wait_for(lambda: not is_alive(about["ranks"][0]["pid"]), "the end of its rank")
    now = time.time()
    word = {"attempt": 1, "wanted": 1, "grace": 5.0, "reason": "stopped", "off": "", "time": now - word_ago}
    (run_folder(run) / "stop.json").write_text(json.dumps(word))
    if final == "stopped":  # and somebody else, who has less patience
        hostword.leave_word(str(run_folder(run)), 1, 1.0, "stopped")
    (run_folder(run) / "state.json").write_text(json.dumps({**about, "updated": now - ago}))
    ringctl("stop", run)
    assert json.loads(ringctl("status", run, "--json").stdout)["state"] == final
    end = exits(events(run))[0]
    assert (end.get("ago", 0.0) >= ago) == (final == "failed")


def test_a_run_whose_state_was_cut_short_when_its_host_lost_its_power_has_failed_and_may_start_again() -> (
    None
):
    run = detach(["sh", "-c", "[ $RINGCTL_ATTEMPT = 1 ] && sleep 600; echo up"], world=2)
    about = wait_for(lambda: state(run)["state"] == "running" and state(run), "its start")
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for who in ("warden", "hostd"):
            os.kill(about[who]["pid"], number)
    wait_for(lambda: not any(is_alive(rank["pid"]) for rank in about["ranks"]), "the end of its ranks")
    (run_folder(run) / "state.json").write_text("")
    plan = json.loads((run_folder(run) / "plan.json").read_text())
    (run_folder(run) / "plan.json").write_text(json.dumps({**plan, "boot": "the one before"}))
    told = json.loads(ringctl("status", run, "--json").stdout)
    assert (told["state"], [rank["state"] for rank in told["ranks"]]) == ("lost", ["unknown", "unknown"])
    said = ringctl("stop", run).stdout
    assert "had not started" not in said, said
    assert json.loads(ringctl("status", run, "--json").stdout)["state"] == "failed"
    assert {event["reason"] for event in exits(events(run)).values()} == {REBOOTED}
    ringctl("restart", run)
    assert json.loads(ringctl("status", run, "--json").stdout)["state"] == "succeeded"


def test_a_run_whose_state_was_cut_short_keeps_its_code() -> None:
    run, snapshot = detach(["true"], world=1), "c0de" * 16
    about = wait_for(lambda: state(run)["state"] == "succeeded" and state(run), "its end")
    wait_for(lambda: not is_alive(about["hostd"]["pid"]), "the end of who may write there")
    plan = json.loads((run_folder(run) / "plan.json").read_text())
    (run_folder(run) / "plan.json").write_text(
        json.dumps({**plan, "snapshot": snapshot, "boot": "the one before"})
    )
    assert hoststore.used_by_runs() == set()
    (run_folder(run) / "state.json").write_text("")
    assert hoststore.used_by_runs() == {snapshot}


def test_a_stop_ends_what_is_below_a_stuck_supervisor_whose_warden_died() -> None:
    run = detach(["sh", "-c", f"setsid {WITHOUT_ID} & echo $!; wait"], world=1)
    pid = int(wait_for(lambda: lines(events(run), 0), "the grandchild")[0])
    about = state(run)
    os.kill(about["hostd"]["pid"], signal.SIGSTOP)
    os.kill(about["warden"]["pid"], signal.SIGKILL)
    ringctl("stop", run, "--grace", "0")
    assert not is_alive(pid)


def test_a_stop_takes_away_what_was_half_made_when_all_were_killed() -> None:
    run = detach(["true"], world=1)
    gone = {**wait_until_final(run), "state": "starting"}
    folder = run_folder(run)
    half = [folder / "work.half", folder / f"plan.json.tmp{gone['hostd']['pid']}"]
    half[0].mkdir()
    half[1].write_text("{")
    wait_for(lambda: not is_alive(gone["warden"]["pid"]), "the end of its warden")
    (folder / "state.json").write_text(json.dumps(gone))
    ringctl("stop", run)
    assert [path for path in half if path.exists()] == []


def test_an_attached_launch_ends_what_is_left_of_a_run_whose_supervisors_all_died() -> None:
    launched = start(
        *("launch", "--local", "--world", "1", "--json"),
        *("--", "sh", "-c", "setsid sleep 600 & echo $!; wait"),
    )
    assert launched.stdout is not None
    told = (json.loads(line) for line in launched.stdout)
    said = next(event for event in told if event["kind"] == "line")
    about = state(said["run"])
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for who in ("warden", "hostd"):
            os.kill(about[who]["pid"], number)
    launched.communicate(timeout=30)
    assert launched.returncode == 1
    assert not is_alive(int(said["text"]))
    assert state(said["run"])["state"] == "failed"


def ask_hostd(command: str, request: dict[str, object]) -> bytes:
    argv = [*HOSTD, command]
    return subprocess.run(argv, input=json.dumps(request).encode(), capture_output=True, check=False).stdout


def test_a_run_stopped_before_its_start_reached_the_host_does_not_start() -> None:
    request: dict[str, object] = {"run": "20260101-000000-abcd", "grace": 0.0}
    assert json.loads(ask_hostd("stop", request).partition(b"\n")[2])["known"] is False
    first = {**request, "attempt": 1, "name": "", "world": 1, "host": "h", "ranks": [], "env": None}
    assert b"it was stopped while it was starting" in ask_hostd("start", first)


def test_a_start_whose_answer_was_lost_on_its_way_is_answered_again_and_anothers_is_refused() -> None:
    run = detach(["sleep", "600"], world=1)
    request = json.loads((run_folder(run) / "plan.json").read_text())
    pid = state(run)["hostd"]["pid"]
    assert json.loads(ask_hostd("start", request).partition(b"\n")[2])["hostd"] == pid
    assert b"there is a run" in ask_hostd("start", {**request, "token": "another"})
    twin = ask_hostd("start", {**request, "host": "twin"})
    assert b"localhost and twin are the same machine" in twin
    ringctl("stop", run)
    assert b"it was stopped while it was starting" in ask_hostd("start", request)


def test_who_follows_an_attempt_that_is_about_to_start_is_not_told_that_it_is_over() -> None:
    """The supervisor has opened its log, and has not written its state yet."""
    run = detach(["sh", "-c", "exit 3"], world=1)
    wait_until_final(run)
    (run_folder(run) / "events-2-000001.jsonl").touch()
    wanted: dict[str, object] = {"run": run, "follow": True, "attempt": 2}
    assert b"was not started on this host" in ask_hostd("follow", wanted)
    (run_folder(run) / "state.json").unlink()
    assert b"was not started on this host" in ask_hostd("follow", {**wanted, "attempt": 1})


def launched_slowly(tmp_path: Path) -> Any:
    """A launch whose environment is being activated, without end."""
    prefix = tmp_path / "env"
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin" / "python").symlink_to(sys.executable)
    (prefix / "conda-meta").mkdir()
    (prefix / "etc/conda/activate.d").mkdir(parents=True)
    (prefix / "etc/conda/activate.d/slow.sh").write_text(f"touch {tmp_path}/begun; sleep 600")
    inventory = tmp_path / "hosts.yaml"
    inventory.write_text(f"hosts: [{{name: here, local: true, slots: 2, env: {{conda: {prefix}}}}}]")
    launching = start("launch", "--hosts", str(inventory), "--", "true")
    wait_for((tmp_path / "begun").exists, "the activation")
    return launching


def test_a_run_stopped_while_its_environment_is_activated_is_stopped(tmp_path: Path) -> None:
    launching = launched_slowly(tmp_path)
    ringctl("stop")
    _, err = launching.communicate(timeout=60)
    assert launching.returncode == 130, err
    assert json.loads(ringctl("ps", "--json").stdout)[0]["state"] == "stopped"


@pytest.mark.parametrize(
    ("who", "number", "why"),
    [("hostd", signal.SIGTERM, "was told to end"), ("warden", signal.SIGKILL, "was killed")],
)
def test_a_start_that_somebody_else_has_ended_has_failed(
    tmp_path: Path, who: str, number: int, why: str
) -> None:
    launching = launched_slowly(tmp_path)
    run = json.loads(ringctl("ps", "--json").stdout)[0]["run"]
    os.kill(state(run)[who]["pid"], number)
    _, err = launching.communicate(timeout=60)
    assert launching.returncode == 1
    assert f"its supervisor {why}" in err
    assert state(run)["state"] == "failed"
    assert (
        not (run_folder(run) / "stop.json").exists()
        or "stopped" not in json.loads((run_folder(run) / "stop.json").read_text())["reason"]
    )


def test_a_stop_that_finds_the_supervisor_stuck_still_ends_as_a_stop() -> None:
    run = detach(["sleep", "600"], world=1)
    os.kill(state(run)["hostd"]["pid"], signal.SIGSTOP)
    ringctl("stop", run, "--grace", "0")
    assert json.loads(ringctl("status", run, "--json").stdout)["state"] == "stopped"


def test_what_a_rank_left_behind_may_write_metrics_for_ever_and_the_run_ends() -> None:
    flood = 'while :; do echo "{\\"step\\": 1}"; done >> $RINGCTL_METRICS & exit 0'
    assert launch(["sh", "-c", flood], world=1)[-1]["state"] == "succeeded"


def test_whatever_ranks_put_in_place_of_their_files_their_supervisor_goes_on(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_text("kept")
    program = script(
        tmp_path,
        f"""
        import os

        metrics, rank = os.environ["RINGCTL_METRICS"], os.environ["RANK"]
        stacks, fifo = metrics + ".stacks", metrics + ".fifo"
        if rank == "0":
            os.mkfifo(metrics)
        elif rank == "1":
            os.symlink("/dev/zero", metrics)
            os.unlink(stacks)
            os.mkdir(stacks)
        elif rank == "2":
            os.unlink(stacks)
            os.symlink({str(theirs)!r}, stacks)
        else:
            os.mkfifo(fifo)
        print("ready", flush=True)
        sleep = "import time; time.sleep(600)"
        exec(compile(sleep, fifo if rank == "3" else "here", "exec"))
        """,
    )
    run = detach(["python", program], world=4)
    wait_for(lambda: sum(event.get("text") == "ready" for event in events(run)) == 4, "all ranks")
    supervisor = state(run)["hostd"]["pid"]

    def looked_at() -> dict[int, Any]:
        """Where the ranks are, from what they have written by now."""
        before = len(events(run))
        os.kill(supervisor, signal.SIGUSR1)
        wait_for(
            lambda: sum(event["kind"] == "stack" for event in events(run)[before:]) == 4, "a look at all"
        )
        return {event["rank"]: event["frames"] for event in events(run)[before:] if event["kind"] == "stack"}

    assert wait_for(lambda: any(path.endswith(".fifo") for path, *_ in looked_at()[3]), "the rank's own file")
    assert wait_for(lambda: (seen := looked_at())[0] and not seen[1] and not seen[2], "those of the others")
    ringctl("stop", run, "--grace", "0")
    assert wait_until_final(run)["state"] == "stopped"
    assert theirs.read_text() == "kept"


ODD_STACKS = [
    '"Stack (most recent call first):\\n" + \'  File "a.py", line \' + "9" * 5000 + " in f\\n"',
    '"Thread" + "x" * 300_000',
]


@pytest.mark.parametrize("written", ODD_STACKS, ids=["a long number", "a long line"])
def test_whatever_a_rank_writes_for_its_stack_its_supervisor_goes_on(written: str, tmp_path: Path) -> None:
    program = script(
        tmp_path,
        f"""
        import os, signal, time

        def write(*_):
            with open(path, "w") as file:
                file.write({written})

        path = os.environ["RINGCTL_METRICS"] + ".stacks"
        open(path, "w").close()
        signal.signal(signal.SIGRTMIN + 9, write)
        print("ready", flush=True)
        time.sleep(600)
        """,
    )
    run = detach(["python3", program], world=1, options=["--no-prefork"])
    wait_for(lambda: lines(events(run), 0), "the rank")
    os.kill(state(run)["hostd"]["pid"], signal.SIGUSR1)
    wait_for(lambda: any(event["kind"] == "stack" for event in events(run)), "a look at it")
    began = state(run)["updated"]
    wait_for(lambda: state(run)["updated"] > began, "that it goes on")
    assert state(run)["state"] == "running"
    ringctl("stop", run, "--grace", "0")


SAVES = """
import os, signal, sys, time
try:
    import one_that_is_not_there
except ImportError:
    signal.signal(signal.SIGTERM, lambda *_: (print("told to end", flush=True), sys.exit(3)))
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("saving", flush=True)
while not signal.sigpending():
    time.sleep(0.01)
time.sleep(0.2)
print("saved", flush=True)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
time.sleep(60)
"""


def test_signals_that_a_rank_holds_back_wait_until_it_takes_them(tmp_path: Path) -> None:
    run = detach(["python", script(tmp_path, SAVES)], world=1)
    wait_for(lambda: lines(events(run), 0), "the rank")
    ringctl("stop", run)
    assert lines(events(run), 0) == ["saving", "saved", "told to end"]


CLOSES = """
import os, sys, time
try:
    import one_that_is_not_there
except ImportError:
    os.closerange(3, 1100)
with open(sys.argv[1], "w") as file:
    file.write("whole")
    file.flush()
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_look_at_a_rank_writes_into_no_file_of_its_own(tmp_path: Path) -> None:
    run = detach(["python", script(tmp_path, CLOSES), str(tmp_path / "its")], world=1)
    wait_for(lambda: lines(events(run), 0), "the rank")
    os.kill(state(run)["hostd"]["pid"], signal.SIGUSR1)
    seen = wait_for(lambda: [event for event in events(run) if event["kind"] == "stack"], "a look at it")
    assert (seen[0]["frames"][0][3], (tmp_path / "its").read_text()) == ("time.sleep(60)", "whole")
    ringctl("stop", run, "--grace", "0")


STUCK = """
import ctypes, os
try:
    import one_that_is_not_there
except ImportError:
    print("ready", flush=True)
ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)  # with the interpreter's lock
"""


def test_a_rank_that_keeps_the_interpreters_lock_is_seen_where_it_is(tmp_path: Path) -> None:
    run = detach(["python", script(tmp_path, STUCK)], world=1)
    wait_for(lambda: lines(events(run), 0), "the rank")
    os.kill(state(run)["hostd"]["pid"], signal.SIGUSR1)
    seen = wait_for(lambda: [event for event in events(run) if event["kind"] == "stack"], "a look at it")
    assert seen[0]["frames"][0][3].startswith("ctypes.PyDLL(None).read(")
    ringctl("stop", run, "--grace", "0")


DIALLING = """
import datetime
import torch.distributed as dist
print("ready", flush=True)
dist.TCPStore("127.0.0.1", 1, 2, False, timeout=datetime.timedelta(seconds=6))
"""


def test_a_rank_that_tries_to_reach_another_is_looked_at_and_goes_on_trying(tmp_path: Path) -> None:
    run = detach(["python", script(tmp_path, DIALLING)], world=1)
    wait_for(lambda: lines(events(run), 0), "the rank")

    def is_looked_at(times: int) -> bool:
        return [event["kind"] for event in events(run)].count("stack") >= times

    for looks in range(1, 5):  # each somewhere in the pauses between its tries
        os.kill(state(run)["hostd"]["pid"], signal.SIGUSR1)
        wait_for(functools.partial(is_looked_at, looks), "a look at it")
    assert wait_until_final(run)["state"] == "failed"
    said = "\n".join(event["text"] for event in events(run) if event["kind"] == "line")
    assert "client socket has timed out after 6000ms" in said
    assert "Interrupted system call" not in said


def test_three_hundred_ranks_are_not_too_many_and_the_first_is_heard_before_the_last_starts() -> None:
    events = launch(["sh", "-c", "echo $RANK"], world=300)
    said = [event["rank"] for event in events if event["kind"] in ("line", "rank_started")]
    assert said.index(0, said.index(0) + 1) < said.index(299)
    final = exits(events)
    assert {event["exit_code"] for event in final.values()} == {0}
    assert len(final) == 300


def test_a_command_that_cannot_be_started_leaves_nothing_running(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    done = ringctl("launch", "--local", "--world", "2", "--", str(program), code=1)
    assert "cannot start" in done.stderr
    assert "nothing was left running" in done.stderr


# --- As if started by itself ---------------------------------------------------------------------

NOSY = """
    import __main__, json, os, random, sys
    torch = "torch" in sys.modules
    import numpy
    same = {
        "name": __name__, "main": __main__.__file__, "argv": sys.argv,
        "loader": type(__loader__).__name__, "notes": __annotations__,
        "cwd": os.getcwd(), "path0": sys.path[0],
        "stdin": os.fstat(0).st_rdev, "fds": sorted(map(int, os.listdir("/proc/self/fd")))[:3],
        "session": os.getsid(0) == os.getpid(), "no_user_site": sys.flags.no_user_site,
        "globals": "prefork" in globals(), "orig": sys.orig_argv[1:],
    }
    chance = {"random": random.random(), "numpy": float(numpy.random.random())}
    print(json.dumps({"same": same, "torch": torch, **chance}))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What two ranks say of themselves, forked and not."""
    folder = tmp_path_factory.mktemp("nosy")
    told = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RINGCTL_HOME", str(folder / "ringctl"))
        patch.setenv("RINGCTL_SLOTS", str(folder / "slots"))
        for option in ("--prefork", "--no-prefork"):
            seen = launch(["python", "-s", script(folder, NOSY), "a b", "--lr", "0.1"], options=[option])
            told[option] = [json.loads(lines(seen, rank)[0]) for rank in (0, 1)]
    return told


def test_a_preforked_script_cannot_tell_that_it_was(told: dict[str, list[Any]]) -> None:
    for forked, plain in zip(told["--prefork"], told["--no-prefork"], strict=True):
        assert forked["same"] == plain["same"]


def test_preforked_ranks_draw_different_random_numbers(told: dict[str, list[Any]]) -> None:
    first, second = told["--prefork"]
    assert first["random"] != second["random"]
    assert first["numpy"] != second["numpy"]


def test_torch_is_imported_before_the_fork(told: dict[str, list[Any]]) -> None:
    assert [rank["torch"] for rank in told["--prefork"]] == [True, True]
    assert [rank["torch"] for rank in told["--no-prefork"]] == [False, False]


@pytest.mark.parametrize(
    ("source", "needs"),
    [
        ("import os, sys as s\nfrom os.path import join\nprint('import torch')", False),
        ("import sys; import torch", True),
        ("try: import torch\nexcept ImportError: pass", True),
        ("import os, \\\n    torch", True),
        ("import os.path, torch.nn as nn", True),
        ("def main():\n    from torch import nn", True),
        ("from . import mine", True),
        ("import mine", True),
        ("import importlib\nimportlib.import_module('tor' + 'ch')", True),
        ("exec(open('mine.py').read())", True),
        ("import re\nre.compile('x')", False),
        ("# " + "x" * (1 << 20), True),
        (None, True),
    ],
)
def test_torch_is_imported_once_for_all_only_if_the_program_may_need_it(
    source: str | None, needs: bool, tmp_path: Path
) -> None:
    if source is not None:
        (tmp_path / "program.py").write_text(source)
    command = hostranks.python_command(["python", "program.py"])
    assert command is not None
    assert hostranks.needs_others(command, str(tmp_path)) is needs


@pytest.mark.timeout(20)
def test_a_program_that_is_a_pipe_is_not_waited_for_to_know_what_it_imports(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "program.py")
    command = hostranks.python_command(["python", "program.py"])
    assert command is not None
    assert hostranks.needs_others(command, str(tmp_path)) is True


def test_a_preforked_module_runs_as_python_m_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("import sys; print(__name__, __package__, sys.argv)")
    monkeypatch.chdir(tmp_path)
    told = [
        lines(launch(["python", "-S", "-m", "package", "x"], options=[o]), 1)
        for o in ("--prefork", "--no-prefork")
    ]
    assert told[0] == told[1]
    assert "__main__ package" in told[0][0]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("raise ValueError('boom')", 1),
        ("def f(): return 1 / 0\nf()", 1),
        ("syntax error here", 1),
        ("import sys; sys.exit(5)", 5),
        ("import sys; sys.exit('words')", 1),
        ("import os; os._exit(9)", 9),
        ("import atexit; atexit.register(print, 'at exit'); print('done')", 0),
        ("import threading; threading.Timer(0.1, print, ['late']).start()", 0),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -2),
    ],
)
def test_exit_codes_and_tracebacks_are_those_of_a_script_by_itself(
    body: str, code: int, tmp_path: Path
) -> None:
    program = script(tmp_path, body)
    alone = subprocess.run([sys.executable, "-S", program], capture_output=True, text=True, check=False)
    assert alone.returncode == code
    seen = launch(["python", "-S", program], options=["--prefork"], code=None)
    for rank in (0, 1):
        final = exits(seen)[rank]
        if final["reason"]:
            continue  # ended because the other one had failed
        assert final["exit_code"] == code
        assert lines(seen, rank) == alone.stdout.splitlines()
        assert lines(seen, rank, "err") == alone.stderr.splitlines()


def test_a_preforked_script_can_spawn_processes_of_its_own(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        """
        import multiprocessing
        def square(n): return n * n
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(2) as pool:
                print(pool.map(square, [1, 2, 3]))
        """,
    )
    assert lines(launch(["python", "-S", program]), 1) == ["[1, 4, 9]"]


# --- Environment ---------------------------------------------------------------------------------

ODD = "quotes ' \" `x` $HOME\nnewline \\ \u4e16\u754c"


def test_variables_arrive_byte_exact_and_stale_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("GROUP_RANK", "1")
    for option in ("--prefork", "--no-prefork"):
        show = "import base64, os; print(base64.b64encode(os.environb[b'ODD']).decode(), sorted(os.environ))"
        seen = launch(["python", "-S", "-c", show], options=[option, "--env", f"ODD={ODD}"])
        odd, _, names = lines(seen, 1)[0].partition(" ")
        assert base64.b64decode(odd).decode() == ODD
        assert "TORCHELASTIC_USE_AGENT_STORE" not in names
        assert "GROUP_RANK" not in names


def test_each_rank_finds_torchruns_variables(tmp_path: Path) -> None:
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR GLOO_SOCKET_IFNAME RINGCTL_HOST"
    body = f"import os; print(*[os.environ[n] for n in '{names} RINGCTL_ATTEMPT'.split()])"
    for option in ("--prefork", "--no-prefork"):
        seen = launch(["python", "-S", script(tmp_path, body)], options=[option])
        for rank in (0, 1):
            assert lines(seen, rank) == [f"{rank} {rank} 2 2 127.0.0.1 lo localhost 1"]


def test_metrics_a_rank_writes_become_events_and_status(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        """
        import json, os
        with open(os.environ["RINGCTL_METRICS"], "a") as f:
            f.write("this is not JSON\\n")
            for step in (1, 2):
                f.write(json.dumps({"step": step, "loss": 0.5, "kind": "x"}) + "\\n")
            f.write('{"step": 3, "loss": NaN}\\n')
        """,
    )
    run = detach(["python", "-S", program])
    wait_until_final(run)
    metrics = [e for e in events(run) if e["kind"] == "metric" and e["rank"] == 1]
    assert [(e["step"], e["loss"]) for e in metrics] == [(1, 0.5), (2, 0.5), (3, "nan")]
    assert json.loads(ringctl("status", run, "--json").stdout)["ranks"][1]["step"] == 3


def test_what_is_kept_of_a_ranks_metrics_does_not_grow_without_end(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        """
        import json, os
        with open(os.environ["RINGCTL_METRICS"], "a") as f:
            for i in range(0, 4000, 100):
                f.write(json.dumps({f"name {n}": n for n in range(i, i + 100)}) + "\\n")
            f.write(json.dumps({"x" * 1000: 1, "name 1": "x" * 1000, "name 2": "new"}) + "\\n")
        """,
    )
    run = detach(["python3", "-S", program], world=1)
    kept = wait_until_final(run)["ranks"][0]["metric"]
    assert kept == {f"name {n}": n for n in range(200)} | {"name 2": "new"}
    told = [event for event in events(run) if event["kind"] == "metric"]
    assert len(told) == 41
    assert "name 3999" in told[-2]


def test_a_metrics_record_that_is_too_long_or_too_deep_is_left_out(tmp_path: Path) -> None:
    def nested(levels: int) -> str:
        return '{"step": 1, "x": ' + "[" * (levels - 1) + "1" + "]" * (levels - 1) + "}"

    path = tmp_path / "metrics"
    longest = '{"x": "' + "x" * ((64 << 10) - 9) + '"}'
    path.write_text("\n".join([nested(8), nested(9), nested(490), longest, longest + " ", '{"step": 2}', ""]))
    found = MetricsTail(str(path)).read()
    assert [(record.get("step"), len(json.dumps(record))) for record in found] == [
        (1, len(nested(8))),
        (None, 64 << 10),
        (2, 11),
    ]


def test_what_somebody_has_stopped_stays_stopped_when_a_later_number_was_used_up_elsewhere() -> None:
    """An attempt that did not start on this host has a number all the same; the stop was about the run."""
    run = detach(["sh", "-c", "exit 3"], world=1)
    wait_until_final(run)
    ringctl("stop", run)
    again: dict[str, object] = {"run": run, "grace": 0.0, "reason": "it is started again", "exact": True}
    ask_hostd("stop", {**again, "attempt": 2})
    plan = json.loads((run_folder(run) / "plan.json").read_text())
    refused = ask_hostd("start", {**plan, "attempt": 3, "automatic": True})
    assert b"it was stopped while it was starting" in refused


def test_what_was_stopped_before_somebody_started_it_again_elsewhere_may_start_by_itself_here() -> None:
    """A restart with fewer hosts leaves this one out; then it takes the place of one that is lost."""
    run = detach(["true"], world=1)
    ringctl("stop", run)
    ask_hostd("stop", {"run": run, "grace": 0.0, "reason": "started again", "exact": True, "attempt": 2})
    plan = json.loads((run_folder(run) / "plan.json").read_text())
    told = ask_hostd("start", {**plan, "attempt": 3, "automatic": True, "since": 2})
    assert b"error" not in told, told
    assert wait_until_final(run)["attempt"] == 3


def test_a_stop_of_ringctls_own_that_arrives_late_does_not_end_a_later_attempt() -> None:
    run = detach(["sleep", "600"], world=1)
    ringctl("restart", run, "--detach")
    late: dict[str, object] = {"run": run, "grace": 0.0, "reason": "it is started again", "attempt": 1}
    ask_hostd("stop", {**late, "exact": True})
    assert (state(run)["attempt"], state(run)["state"]) == (2, "running")
    assert b'"ended": [0]' in ask_hostd("stop", {**late, "reason": "stopped"})


def test_a_late_stop_that_meets_a_later_attempt_on_its_way_leaves_it_alone() -> None:
    run = detach(["sleep", "600"], world=1)
    ringctl("stop", run, "--grace", "0")
    late = {"run": run, "grace": 0.0, "reason": "it is started again", "attempt": 1, "exact": True}
    lock = os.open(run_folder(run) / "lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)  # it has seen the first attempt, and is slow to leave its word
    argv = [*HOSTD, "stop"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as stopping:
        assert stopping.stdin is not None
        stopping.stdin.write(json.dumps(late).encode())
        stopping.stdin.close()
        wait_for(lambda: has_open(stopping.pid, run_folder(run) / "lock"), "the stop")
        os.kill(stopping.pid, signal.SIGSTOP)
        ringctl("restart", run, "--detach")
        os.close(lock)
        os.kill(stopping.pid, signal.SIGCONT)
    pid = state(run)["ranks"][0]["pid"]
    assert (state(run)["attempt"], state(run)["state"]) == (2, "running")
    assert is_alive(pid)
    ringctl("stop", run, "--grace", "0")


def has_open(pid: int, path: Path) -> bool:
    return any(file.resolve() == path for file in Path(f"/proc/{pid}/fd").iterdir())


def test_a_last_metrics_record_without_a_newline_is_read_when_its_rank_has_ended(tmp_path: Path) -> None:
    told = '{"step": 1}\n{"step": 2}'
    run = detach(["sh", "-c", f"printf '%s' '{told}' >>$RINGCTL_METRICS"], world=1)
    wait_until_final(run)
    assert [event["step"] for event in events(run) if event["kind"] == "metric"] == [1, 2]
    path = tmp_path / "metrics"
    path.write_text('{"step": 1, "loss": 0.')
    tail = MetricsTail(str(path))
    assert tail.read_unended() == [], "half a record is none"
    path.write_text('{"step": 1, "loss": 0.5}')
    assert (tail.read(), tail.read_unended(), tail.read_unended()) == ([], [{"step": 1, "loss": 0.5}], [])


def test_metrics_of_a_program_that_begins_its_file_anew_are_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "metrics"
    tail = MetricsTail(str(path))
    path.write_text('{"step": 1, "loss": 0.5}\n')
    assert tail.read() == [{"step": 1, "loss": 0.5}]
    path.write_text('{"step": 2}\n')
    assert (tail.read(), tail.read()) == ([{"step": 2}], [])
    path.write_text("{}\n")
    assert list(tail.rest(1000)) == [[{}], []]


def test_metrics_of_a_program_that_writes_only_its_newest_record_are_read_one_by_one(tmp_path: Path) -> None:
    """Of the same length, longer, shorter, and with much before or behind what has changed."""
    path = tmp_path / "metrics"
    tail = MetricsTail(str(path))
    for record in (
        {"step": 10, "loss": 0.5},
        {"step": 11, "loss": 0.5},
        {"step": 100, "loss": 0.5},
        {"step": 100, "loss": 0.5, "note": "x" * 1900},
        {"step": 101, "loss": 0.5, "note": "x" * 1900},
        {"note": "x" * 5000, "step": 102},
        {"note": "x" * 5000, "step": 103},
        {"step": 1012},
    ):
        path.write_bytes(b"")
        assert tail.read() == []
        path.write_text(json.dumps(record) + "\n")
        assert (tail.read(), tail.read()) == ([record], [])
    path.write_text('{"step": 1013}\n')
    assert list(tail.rest(1000)) == [[{"step": 1013}], []]


@pytest.mark.parametrize("note", ["", "x" * 100, "x" * 5000])
def test_metrics_of_a_program_that_writes_all_of_them_again_are_read_once(tmp_path: Path, note: str) -> None:
    """At whatever moment somebody looks, and also if the program is killed meanwhile."""
    path = tmp_path / "metrics"
    tail, seen, written = MetricsTail(str(path)), [], ""
    for step in range(40):
        written += json.dumps({"step": step, "note": note}) + "\n"
        for size in (0, 1, len(written) // 3, len(written) // 2, len(written) - 5, len(written)):
            path.write_text(written[:size])
            seen += tail.read()
    assert [record["step"] for record in seen] == list(range(40))
    for size in (0, 30, len(written) // 2, len(written)):
        path.write_text(written[:size])
        assert [record for records in tail.rest(1 << 20) for record in records] == []
    assert tail.skipped == 0


def test_whoever_goes_on_reading_metrics_knows_as_much_of_what_was_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics"
    kept = Pending()

    def read_by_another() -> list[dict[str, Any]]:
        tail = MetricsTail(str(path))
        if kept.rest:
            tail.go_on_from(kept.rest)
        records = tail.read()
        kept.done(tail.place)
        assert kept.rest is not None
        return records

    for many in (1, 500):
        path.write_text('{"step": 10}\n' * many)
        assert (len(read_by_another()), read_by_another()) == (many, [])
        path.write_text('{"step": 11}\n' * many)
        assert (len(read_by_another()), read_by_another()) == (many, [])
        path.write_text('{"step": 11}\n')
        assert read_by_another() == [], "it is to be written again"
        path.write_text('{"step": 11}\n' * many + '{"step": 12}\n')
        assert read_by_another() == [{"step": 12}]


def test_whoever_reads_a_long_end_of_metrics_has_an_ear_for_the_others(tmp_path: Path) -> None:
    told = "".join(json.dumps({"step": number, "note": "x" * 100}) + "\n" for number in range(40_000))
    (tmp_path / "metrics").write_text(told)
    attended: list[float] = []
    supervisor: Any = Supervisor.__new__(Supervisor)  # as much of one as this takes
    supervisor.ending = SimpleNamespace(attend=attended.append, asked=False)
    supervisor.stacks, supervisor.read_until = SimpleNamespace(looks=0), float("inf")
    supervisor.log = SimpleNamespace(write=lambda _: None, held=0, lost=0)
    rank = Rank(
        {"rank": 0, "local_rank": 0, "argv": [], "env": {"RINGCTL_METRICS": str(tmp_path / "metrics")}}
    )
    supervisor.read_last_metrics(rank)
    assert rank.last["step"] == 39_999
    assert len(attended) > 4, "once a piece"
    supervisor.ending.asked, supervisor.read_until = True, 0.0
    rank.metrics = MetricsTail(rank.metrics.path)
    supervisor.read_last_metrics(rank)
    assert len(attended) < 12
    assert rank.metrics.skipped > 0, "nobody who ends the run waits for all of it"


def test_a_number_that_a_rank_once_had_is_no_longer_its_own(tmp_path: Path) -> None:
    spec = {"rank": 0, "local_rank": 0, "argv": [], "env": {"RINGCTL_METRICS": str(tmp_path / "metrics")}}
    plan = {"run": "r", "name": "", "attempt": 1, "world": 1, "host": "here"}
    rank = Rank(spec)
    supervisor = Supervisor(str(tmp_path), plan, {}, [rank])
    rank.status, rank.state = 0, "succeeded"
    rank.pid = os.fork()
    if rank.pid == 0:
        os._exit(7)  # as something else below us, much later
    os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
    supervisor.collect()
    os.close(supervisor.log.fd)
    assert (rank.status, rank.state) == (0, "succeeded")
    assert (tmp_path / "events-1-000001.jsonl").read_bytes() == b""


def test_of_a_start_that_fails_in_the_middle_each_rank_that_had_ended_is_told_as_it_ended(
    tmp_path: Path,
) -> None:
    program = tmp_path / "program"
    program.write_text(
        """#!/bin/sh
        echo '{"step": 7}' >> $RINGCTL_METRICS
        echo said
        [ $RANK = 20 ] && rm $0
        exit 3
        """
    )
    program.chmod(0o700)
    ringctl("launch", "--local", "--world", "60", "--no-prefork", "--", str(program), code=1)
    (folder,) = (Path(os.environ["RINGCTL_HOME"]) / "runs").iterdir()
    seen = events(folder.name)
    assert (exits(seen)[0]["exit_code"], exits(seen)[59]["exit_code"]) == (3, 127)
    assert lines(seen, 0) == ["said"]
    assert [event["step"] for event in seen if event["kind"] == "metric" and event["rank"] == 0] == [7]


def test_a_stop_while_ranks_are_started_one_by_one_comes_between_two_lines() -> None:
    counting = "for i in $(seq 0 499 199500); do seq $((i + 1)) $((i + 499)); sleep 0.01; done"
    program = f"[ $RANK -lt 2 ] && {counting}; echo here; exec sleep 60"
    launching = start(
        "launch", "--local", "--world", "120", "--skip-preflight", "--no-prefork", "--", "sh", "-c", program
    )
    runs = Path(os.environ["RINGCTL_HOME"]) / "runs"
    (log,) = wait_for(lambda: [p for p in runs.glob("*/events-*") if p.stat().st_size > 200_000], "lines")
    ringctl("stop")
    launching.communicate(timeout=60)
    seen = events(log.parent.name)
    for rank in (0, 1):
        said = lines(seen, rank)
        assert said[:-1] == [str(n) for n in range(1, len(said))], "the last may have been cut off"
    talked = {event["rank"] for event in seen if event["kind"] == "line"}
    ends = exits(seen)
    assert not [rank for rank in talked if ends[rank]["exit_code"] == 127], "it was there"


@pytest.mark.parametrize("how", ["--no-prefork", "--prefork"])
def test_a_rank_begins_with_no_signal_blocked(how: str) -> None:
    code = "print(next(l for l in open('/proc/self/status') if l.startswith('SigBlk')))"
    seen = launch([sys.executable, "-c", code], options=[how])
    assert [lines(seen, rank)[0] for rank in (0, 1)] == [f"SigBlk:\t{0:016x}"] * 2
