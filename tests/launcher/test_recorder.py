"""A run is recorded through all its attempts, each event once, however often whoever records it is killed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher import fold, history, hostword, listing, tape, watch, watching
from launcher.agent import agents_for
from launcher.follow import Merger, Piece, Place, Taken
from launcher.model import Event
from launcher.recorder import Batch, Recorder, due, with_cause
from launcher.run import start_request
from launcher.transport import Pool
from tests.launcher import hosts
from tests.launcher.hosts import HOME, Hosts, inventory
from tests.launcher.ringctl import (
    detach,
    events,
    is_alive,
    launch,
    ringctl,
    run_folder,
    state,
    wait_for,
    wait_until_final,
)

RECORD = "import sys; from launcher.recorder import Recorder; Recorder(sys.argv[1]).record()"
CHATTY = """
import json, os, sys, time
metrics = open(os.environ["RINGCTL_METRICS"], "a", buffering=1)
for number in range(int(sys.argv[1])):
    print("line", number)
    print("error", number, file=sys.stderr)
    print(json.dumps({"step": number, "loss": 1 / (number + 1)}), file=metrics)
    time.sleep(0.002)
"""


def flat(recorded: Sequence[tuple[int, Event]]) -> list[Any]:
    """As the hosts have them on disk."""
    return [{"kind": e.kind, "time": e.time, "rank": e.rank, **e.data} for _, e in recorded]


def in_any_order(found: Sequence[Any]) -> Counter[str]:
    return Counter(json.dumps(each, sort_keys=True) for each in found)


def all_of(run: str) -> list[tuple[int, Event]]:
    recorded = tape.events(run, limit=10**9)
    assert [id_ for id_, _ in recorded] == list(range(1, len(recorded) + 1))
    return recorded


def record_with_kills(run: str, kills: int, most: float, seed: int = 3) -> None:
    """By one process after the other, each killed after a while; the last one may finish."""
    chance = random.Random(seed)
    for _ in range(kills):
        process = subprocess.Popen([sys.executable, "-c", RECORD, run])
        before = tape.last(run)
        deadline = time.monotonic() + 20
        while tape.last(run) == before and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(chance.uniform(0.0, most))  # a moment of its own each time, not a wait for something
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run([sys.executable, "-c", RECORD, run], check=True, timeout=90)


# --- Places: pure --------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_going_on_from_any_update_gives_the_rest_once(data: st.DataObject) -> None:
    """Hosts tell their events in pieces, merged by time; whoever begins anew at the places that were told
    skips what was given out, and misses nothing of what was held back."""
    hosts = ("a", "b")
    its = {
        host: [
            Event("line", t, "r", 1, host, 0, {"n": n})
            for n, t in enumerate(sorted(data.draw(st.lists(st.floats(0, 9), max_size=12))))
        ]
        for host in hosts
    }
    given_out: list[Event] = []
    places = {host: Place((1, 1, 0)) for host in hosts}
    for cut in (data.draw(st.integers(0, 8)), 10**6):
        taken, merger = Taken(places), Merger(hosts)
        told = {host: (places[host].cursor[2], places[host].taken) for host in hosts}
        pieces = []
        for host in hosts:
            at, skip = told[host]
            while at < len(its[host]):
                size = data.draw(st.integers(1, 4))
                some = its[host][at : at + size]
                new = [e for n, e in enumerate(some, at) if n >= skip]
                at += len(some)
                mark = some[-1].time
                pieces.append(Piece(host, new, watermark=mark, place=Place((1, 1, at), at, at)))
            pieces.append(Piece(host, over=True))
        for piece in sorted(pieces, key=lambda piece: (piece.over, piece.watermark))[:cut]:
            taken.heard(piece.host, piece.place)
            out = merger.add(piece)
            given_out += out
            taken.gave(out)
        places = dict(taken.places)
    for host in hosts:
        assert [e.data["n"] for e in given_out if e.host == host] == list(range(len(its[host])))


# --- One host ------------------------------------------------------------------------------------


def test_a_run_that_is_over_is_recorded_whole() -> None:
    run = detach(["sh", "-c", "seq 1 50; echo no >&2; exit 3"])
    wait_until_final(run)
    seen: list[Batch] = []
    outcome = Recorder(run, on_batch=seen.append).record()
    assert outcome is not None
    assert (outcome.state.state, outcome.cause is not None) == ("failed", True)
    assert flat(all_of(run)) == events(run)
    assert [event for batch in seen for event in batch.events] == [event for _, event in all_of(run)]
    assert [batch.over for batch in seen].count(True) == 1
    assert seen[-1].over
    assert seen[-1].state == tape.folded(run)
    (attempt,) = tape.attempts(run)
    assert attempt["state"] == history.state_of(run) == "failed"
    assert "exited with code 3: no" in attempt["cause"]["text"]
    assert due() == []


def test_a_run_is_about_to_start_again_only_while_somebody_watches_it() -> None:
    run = detach(["sh", "-c", "exit 3"], world=1)
    wait_until_final(run)
    Recorder(run).record()
    watching.write(watching.begin(run))
    with watching.alone(run):
        assert due() == [run]
    assert due() == [], "its watcher could not start, or was killed"
    watching.forget(run)


def test_killed_again_and_again_it_records_each_event_once(tmp_path: Path) -> None:
    (tmp_path / "chatty.py").write_text(CHATTY)
    run = detach([sys.executable, str(tmp_path / "chatty.py"), "900"])
    assert due() == [run]
    record_with_kills(run, 5, 0.3)
    assert in_any_order(flat(all_of(run))) == in_any_order(events(run))
    assert flat(all_of(run)) == events(run), "and one host's in its own order"
    assert len(tape.metrics(run, limit=10**6)) == 1800
    assert [len(curve["step"]) for curve in tape.series(run, points=1000)["series"]] == [900, 900]
    assert history.state_of(run) == "succeeded"
    assert due() == []


def test_the_cause_is_the_same_whoever_was_killed_meanwhile(tmp_path: Path) -> None:
    said = "echo 'ValueError: wrong shape' >&2"
    go = tmp_path / "go"
    run = detach(["sh", "-c", f"{said}; seq 200; while [ ! -e {go} ]; do sleep 0.05; done; exit 4"], world=1)
    process = subprocess.Popen([sys.executable, "-c", RECORD, run])
    wait_for(lambda: tape.last(run) > 200, "what it said first")
    process.send_signal(signal.SIGKILL)
    process.wait()
    go.touch()
    wait_until_final(run)
    outcome = Recorder(run).record()
    assert outcome is not None
    assert outcome.cause is not None
    assert "ValueError: wrong shape" in outcome.cause.text
    told = json.loads(ringctl("explain", run, "--json", code=None).stdout)
    assert told["cause"] == outcome.cause.text == tape.attempts(run)[0]["cause"]["text"]


def test_it_stops_when_it_is_told_to_and_nobody_else_records_meanwhile() -> None:
    run = detach(["sh", "-c", "echo up; exec sleep 600"], world=1)
    stop = threading.Event()
    recorder = Recorder(run, stop=stop)
    done: list[watch.Outcome | None] = []
    thread = threading.Thread(target=lambda: done.append(recorder.record()))
    thread.start()
    try:
        wait_for(lambda: [line[6] for line in tape.lines(run).lines] == ["up"], "its line")
        wait_for(lambda: recorder.state is not None, "its state, which comes after what is on the disk")
        assert recorder.state is not None
        assert recorder.state.state == history.state_of(run) == "running"
        with pytest.raises(Exception, match="being recorded by somebody else"):
            Recorder(run).record()
    finally:
        stop.set()
        thread.join(10)
    assert done == [None]
    assert due() == [run]
    ringctl("stop", run)
    assert Recorder(run).record() is not None
    assert (history.state_of(run), due()) == ("stopped", [])


# --- Attempts ------------------------------------------------------------------------------------

AGAIN = "echo attempt $RINGCTL_ATTEMPT; [ $RINGCTL_ATTEMPT -ge 3 ]"


def test_a_run_that_starts_again_by_itself_is_recorded_to_its_last_attempt() -> None:
    run = detach(["sh", "-c", AGAIN], world=1, options=["--max-restarts", "5", "--restart-delay", "0.1"])
    outcome = Recorder(run).record()
    assert outcome is not None
    assert (outcome.state.state, outcome.state.attempt) == ("succeeded", 3)
    assert [line[6] for line in tape.lines(run).lines] == ["attempt 1", "attempt 2", "attempt 3"]
    assert [(a["attempt"], a["state"]) for a in tape.attempts(run)] == [
        (1, "failed"),
        (2, "failed"),
        (3, "succeeded"),
    ]


def test_attempts_that_nobody_saw_are_recorded_later_and_so_is_one_by_hand() -> None:
    run = detach(["sh", "-c", AGAIN], world=1)
    wait_until_final(run)
    ringctl("restart", run, "--json", code=1)
    assert due() == [run]
    Recorder(run).record()
    assert [line[2] for line in tape.lines(run).lines] == [1, 2]
    assert due() == []
    ringctl("restart", run, "--json")
    assert due() == [run], "by hand, once it was over"
    outcome = Recorder(run).record()
    assert outcome is not None
    assert outcome.state.state == history.state_of(run) == "succeeded"
    assert [line[2] for line in tape.lines(run).lines] == [1, 2, 3]
    assert len(all_of(run)) == len(events(run))


def test_a_run_that_never_started_is_said_to_have_failed() -> None:
    run = launch(["true"], world=1)[-1]["run"]
    record = history.read(run)
    assert record is not None
    history.write(replace(record, end=None, started=1.0))
    os.rename(run_folder(run), run_folder("elsewhere"))
    assert due() == [run]
    Recorder(run).record()
    assert (history.state_of(run), due()) == ("failed", [])


@pytest.mark.timeout(20)
def test_a_start_is_not_waited_for_longer_because_the_clock_was_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("launcher.recorder.START_S", 0.5)
    run = launch(["true"], world=1)[-1]["run"]
    record = history.read(run)
    assert record is not None
    history.write(replace(record, end=None, started=time.time() + 3600.0))
    os.rename(run_folder(run), run_folder("elsewhere"))
    Recorder(run).record()
    assert history.state_of(run) == "failed"


@pytest.mark.parametrize("seen", [True, False])
def test_a_run_whose_log_cannot_be_read_is_not_said_to_have_never_started(seen: bool) -> None:
    run = launch(["seq", "100"], world=1)[-1]["run"]
    record = history.read(run)
    assert record is not None
    if not seen:
        history.write(replace(record, end=None))
    (log,) = run_folder(run).glob("events-1-*")
    whole = damage(log)
    for _ in range(2):
        Recorder(run).record()
        about = listing.row(run)
        assert about is not None
        assert (about["state"], about["error"]) == ("succeeded", "")
        assert 0 < len(tape.lines(run).lines) < 100
        assert [each["gap"] for each in tape.attempts(run)] == [True]
        assert (due(), due(gaps=False)) == ([run], [])
    log.write_bytes(whole)
    Recorder(run).record()
    assert [line[6] for line in tape.lines(run).lines] == [str(n) for n in range(1, 101)]
    assert due() == []


def test_what_is_known_of_a_run_that_no_host_knows_stays() -> None:
    run = launch(["true"], world=1)[-1]["run"]
    record = history.read(run)
    assert record is not None
    history.write(replace(record, end=None))
    os.rename(run_folder(run), run_folder("elsewhere"))
    history.mark(run, "failed", error="the service could not start it")
    assert due() == [run]
    Recorder(run).record()
    assert (history.state_of(run), due()) == ("failed", [])
    about = listing.row(run)
    assert about is not None
    assert (about["error"], about["ended"] is not None) == ("the service could not start it", True)


def test_old_runs_that_are_over_are_not_looked_for() -> None:
    run = launch(["true"], world=1)[-1]["run"]
    assert due() == [run], "it ended lately, and its log is not here yet"
    record = history.read(run)
    assert record is not None
    assert record.end is not None
    history.write(replace(record, end=replace(record.end, ended=5.0)))
    assert due() == []


# --- Several hosts -------------------------------------------------------------------------------


def test_of_several_hosts_each_event_is_recorded_once_over_kills(cluster: Hosts) -> None:
    Path("chatty.py").write_text(CHATTY)
    done = ringctl("launch", "--world", "4", "--detach", "--json", "--", "python3", "chatty.py", "300")
    run = json.loads(done.stdout)["run"]
    record_with_kills(run, 2, 0.5)
    said = Counter((e.host, e.data["stream"]) for _, e in all_of(run) if e.kind == "line")
    assert said == {(host, stream): 300 for host in cluster.names for stream in ("out", "err")}
    for rank in range(4):
        its = [e for _, e in all_of(run) if e.rank == rank]
        assert [e.data["text"] for e in its if e.kind == "line" and e.data["stream"] == "out"] == [
            f"line {n}" for n in range(300)
        ]
        assert [e.data["step"] for e in its if e.kind == "metric"] == list(range(300))
    assert history.state_of(run) == "succeeded"


AWAY = """
echo before
until [ -e ~/go ]; do sleep 0.05; done
seq 100
"""


def test_what_a_host_that_was_away_has_of_an_attempt_is_recorded_once_it_is_back(
    cluster: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.recorder.GONE_S", 0.5)
    inventory(cluster, only=("server1", "server2"))
    done = ringctl("launch", "--skip-preflight", "--detach", "--json", "--", "sh", "-c", AWAY)
    run = json.loads(done.stdout)["run"]
    recording = threading.Thread(target=Recorder(run).record)
    recording.start()
    wait_for(lambda: len(tape.lines(run).lines) == 2, "what they said first")
    cluster.reset_port("server2", 22)
    cluster.end_sessions("server2")
    for host in ("server1", "server2"):
        cluster.path(host, f"{HOME}/go").touch()
    recording.join(30)
    assert (history.state_of(run), due(), due(gaps=False)) == ("lost", [run], [])
    record = history.read(run)
    assert record is not None
    one = replace(record.inventory, hosts=record.hosts[:1])
    history.remember(
        replace(record.plan, attempt=2, hosts=record.plan.hosts[:1], world=1), one, record.options
    )
    with contextlib.closing(Pool(no_input=True)) as pool:
        plan = replace(record.plan, attempt=2)
        agents_for(record.hosts[:1], pool)["server1"].start(start_request(plan, "server1"))
    Recorder(run).record()
    assert due() == [run], "the second attempt is whole, the first is not"
    hosts.mend(cluster)
    Recorder(run).record()
    assert due() == []
    said = Counter(e.host for _, e in all_of(run) if e.kind == "line" and e.attempt == 1)
    assert said == {"server1": 101, "server2": 101}
    assert [each["state"] for each in tape.attempts(run)] == ["succeeded", "succeeded"]


def damage(log: Path) -> bytes:
    """As a power cut leaves it; what was there before."""
    whole = log.read_bytes()
    at = len(whole) // 2
    log.write_bytes(whole[:at] + bytes(300) + whole[at + 300 :])
    return whole


@pytest.mark.parametrize("how", ["damaged", "gone"])
def test_a_log_that_one_host_has_lost_is_recorded_with_a_gap_until_it_can_be_read(
    cluster: Hosts, how: str
) -> None:
    inventory(cluster, only=("server1", "server2"))
    done = ringctl("launch", "--skip-preflight", "--json", "--", "seq", "100")
    run = json.loads(done.stdout.splitlines()[-1])["run"]
    folder = cluster.path("server2", f"{HOME}/.ringctl/runs/{run}")
    (log,) = folder.glob("events-1-*")
    whole = damage(log) if how == "damaged" else b""
    if how == "gone":
        folder.rename(folder.with_name("gone"))
    for _ in range(2):
        Recorder(run).record()
        said = Counter(e.host for _, e in all_of(run) if e.kind == "line")
        assert said["server1"] == 100
        assert 0 < said["server2"] < 100 if how == "damaged" else said["server2"] == 0
        assert (history.state_of(run), due(), due(gaps=False)) == ("succeeded", [run], [])
        assert [each["gap"] for each in tape.attempts(run)] == [True]
    if how == "gone":
        folder.with_name("gone").rename(folder)
    else:
        log.write_bytes(whole)
    Recorder(run).record()
    said = Counter(e.host for _, e in all_of(run) if e.kind == "line")
    assert said == {"server1": 100, "server2": 100}
    assert ([each["gap"] for each in tape.attempts(run)], due()) == ([False], [])


def test_how_a_run_ended_whose_supervisor_is_gone_is_recorded_once_somebody_writes_it_down() -> None:
    run = detach(["sh", "-c", "echo up; exec sleep 600"], world=1)
    wait_for(lambda: [event for event in events(run) if event["kind"] == "line"], "its line")
    about = state(run)
    for who in ("warden", "hostd"):
        os.kill(about[who]["pid"], signal.SIGKILL)
    wait_for(lambda: not is_alive(about["hostd"]["pid"]), "its end")
    Recorder(run).record()
    assert [each["recorded"] for each in tape.attempts(run)] == ["gap"]
    ringctl("stop", run)
    Recorder(run).record()
    assert [each["recorded"] for each in tape.attempts(run)] == ["whole"]
    (last,) = [event for _, event in all_of(run) if event.kind == "host_finished"]
    assert (last.data["unwritten"], Counter(e.kind for _, e in all_of(run))["line"]) == (hostword.MAY_BE, 1)


def test_why_a_run_was_lost_is_not_recorded_of_one_that_turns_out_to_have_succeeded() -> None:
    (seen,) = launch(["true"], world=1)[-1:]
    record = history.read(seen["run"])
    assert record is not None
    assert record.end is not None
    away = {"rank": None, "host": "b", "text": "b: no answer within 3 s"}
    lost = replace(record, end=replace(record.end, state="lost"), cause=away)
    assert with_cause(watch.Outcome(record.end, None), lost).cause is None
    still = with_cause(watch.Outcome(fold.as_lost(record.end), None), lost).cause
    assert still is not None
    assert still.text == away["text"]
