"""What was run is remembered: over kills, on full and read-only disks, with damage and other versions."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher import database, history, listing, runs, watching
from launcher.errors import InputError, RingctlError
from launcher.model import Host, Inventory, Plan, RankState, RunState, to_json
from launcher.plan import LaunchOptions
from tests.launcher.ringctl import launch, ringctl

RUN = "20260101-000000-abcd"
HOSTS = Inventory((Host("a", "10.0.0.1"), Host("b", "10.0.0.2")), "a")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a disk")


def remember(run: str = RUN, attempt: int = 1, name: str = "") -> None:
    plan = Plan(run, name, attempt, 1, "127.0.0.1", 1, ("true",), ())
    history.remember(plan, HOSTS, LaunchOptions(run, name, ("true",), "/t"))


def ended(run: str = RUN, attempt: int = 1, state: str = "failed") -> RunState:
    rank = RankState(0, "a", "failed", metric={"step": 7, "loss": 0.0, "accuracy": 0.5})
    return RunState(run, "", attempt, 1, state, {0: rank}, started=1.0, ended=2.0)  # type: ignore[arg-type]  # any


def attempts() -> dict[str, int]:
    return {record.plan.run: record.plan.attempt for record in history.recall()}


def row(run: str = RUN) -> sqlite3.Row:
    found: list[sqlite3.Row] = history.ask(
        lambda db: db.execute("SELECT * FROM runs WHERE run = ?", (run,)).fetchall(), []
    )
    return found[0]


def files() -> set[str]:
    return {path.name for path in history.home().iterdir()}


# --- Rows ----------------------------------------------------------------------------------------


def test_a_host_that_is_heard_of_later_does_not_undo_how_an_attempt_ended() -> None:
    remember()
    history.note_ended(RUN, (), ["server1"])
    history.mark(RUN, "failed", error="it did not start", fix="look there", attempt=1)
    history.note_ended(RUN, ["server1"])
    assert (row()["state"], row()["error"]) == ("failed", "it did not start")


def test_why_a_start_failed_stays_when_its_hosts_have_said_that_it_ended() -> None:
    remember()
    history.mark(RUN, "failed", error="there is no folder", fix="make it", attempt=1)
    for _ in range(2):
        history.close(ended(state="failed"))
        assert (row()["state"], row()["error"], row()["fix"]) == ("failed", "there is no folder", "make it")
    history.close(ended(state="stopped"))
    assert (row()["state"], row()["error"], row()["fix"]) == ("stopped", "", "")


def test_an_end_that_all_hosts_told_is_not_undone_by_who_cannot_hear_them_any_more() -> None:
    remember()
    history.close(ended(state="lost"))
    history.close(ended(state="succeeded"))
    history.close(ended(state="lost"))
    assert history.state_of(RUN) == "succeeded"
    remember(attempt=2)
    history.close(ended(attempt=2, state="lost"))
    assert history.state_of(RUN) == "lost"


AWAY = {"rank": None, "text": "b: no answer within 3 s", "fix": "is the host on?"}
BLAMED = {"rank": 0, "text": "rank 0 cannot be heard any more", "fix": "is the host on?"}


@pytest.mark.parametrize(
    ("cause", "state", "error"),
    [
        (AWAY, "succeeded", ""),
        (AWAY, "stopped", ""),
        (AWAY, "failed", ""),  # of something else, which the host has told by now
        (BLAMED, "succeeded", ""),
        (BLAMED, "stopped", ""),
        (BLAMED, "failed", BLAMED["text"]),
        (AWAY, "lost", AWAY["text"]),
    ],
)
def test_why_a_run_was_lost_is_forgotten_once_its_end_shows_that_this_was_not_it(
    cause: dict[str, Any], state: str, error: str
) -> None:
    remember()
    history.close(ended(state="lost"), cause)
    history.close(ended(state=state))
    assert (row()["state"], row()["error"], bool(row()["fix"])) == (state, error, bool(error))
    record = history.read(RUN)
    assert record is not None
    assert record.cause == (cause if error else None)


def test_what_failed_first_stays_when_somebody_tells_the_same_end_once_more() -> None:
    remember()
    history.close(ended(), AWAY)
    history.close(ended())
    assert row()["error"] == AWAY["text"]


def test_a_run_is_remembered_closed_and_forgotten() -> None:
    assert history.recall() == []
    assert history.read(RUN) is None
    assert not history.home().exists(), "who only asks makes nothing"
    remember(name="mine")
    assert (row()["state"], row()["name"], row()["error"]) == ("starting", "mine", "")
    history.close(ended(), {"text": "rank 0 failed", "fix": "mend it"})
    record = history.read(RUN)
    assert record is not None
    assert record.end == ended()
    assert (row()["state"], row()["error"], row()["fix"], row()["ended"]) == (
        "failed",
        "rank 0 failed",
        "mend it",
        2.0,
    )
    assert json.loads(row()["summary"]) == {"step": 7, "loss": 0.0, "accuracy": 0.5}
    remember(attempt=2)
    history.close(ended(attempt=1))  # somebody who has not seen the second one
    assert (row()["state"], row()["attempt"], row()["error"], row()["ended"]) == ("starting", 2, "", None)
    history.forget(RUN)
    assert history.recall() == []
    assert files() == {"history.db", "history.lock"}


def test_the_latest_is_the_one_that_was_started_last_also_if_the_clock_was_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ["20260101-120000-aaaa", "20260101-110000-bbbb", "20260101-110100-cccc"]
    for run, now in zip(names, (12.0, 11.0, 11.5), strict=True):  # after the first it is an hour earlier
        monkeypatch.setattr(time, "time", lambda now=now: 3600.0 * now)
        remember(run, name="mine")
    history.close(ended(names[0]))  # that somebody writes of it later does not make it the latest
    assert [found.run for found in runs.remembered()] == names
    assert runs.find_run(None, runs.candidates(None)).run == names[2]
    assert runs.find_run("mine", runs.candidates("mine")).run == names[2]
    assert [row["run"] for row in listing.rows()] == names[::-1]
    assert [row["run"] for row in listing.rows(before=names[2])] == names[1::-1]
    history.forget(names[1])
    assert [row["run"] for row in listing.rows(before=names[1])] == [], "nothing is older by its id"
    remember(names[0], attempt=2, name="mine")
    assert runs.find_run(None, runs.candidates(None)).run == names[0], "it was started again"
    assert runs.find_run("mine", runs.candidates("mine")).run == names[0]


def test_a_run_that_waits_is_meant_only_by_whoever_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for run, now in (("20260101-000001-aaaa", 1.0), ("20260101-000003-cccc", 3.0)):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        remember(run, name="mine")
    monkeypatch.setattr(time, "time", lambda: 2.0)
    history.enlist("20260101-000002-bbbb", name="mine")
    assert [found.run[-4:] for found in runs.candidates("mine")] == ["aaaa", "bbbb", "cccc"]
    assert runs.find_run("20260101-000002", runs.candidates("20260101-000002")).never_started
    assert runs.find_run(None, runs.candidates(None)).run[-4:] == "cccc"
    monkeypatch.setattr(time, "time", lambda: 4.0)
    history.enlist("20260101-000004-dddd", name="mine")
    assert runs.find_run("mine", runs.candidates("mine")).run[-4:] == "dddd"
    assert runs.find_run(None, runs.candidates(None)).run[-4:] == "cccc"


def test_no_name_is_the_name_of_no_run() -> None:
    remember()
    with pytest.raises(InputError, match="there is no run ''"):
        runs.find_run("", runs.remembered())


@pytest.mark.parametrize("search", ["Übung", "übung", "ÜBUNG", "übung EINS", '"größe"', "Ärger", "host-ä"])
def test_runs_are_found_by_what_was_typed_in_any_case_and_alphabet(search: str) -> None:
    command = ["python", "-c", 'print("Größe", "Übung")']
    history.enlist("other", name="eins", command=["true"])
    history.enlist(RUN, name="Eins", hosts=["Host-Ä"], command=command)
    history.mark(RUN, "failed", error="nichts als Ärger")
    assert [row["run"] for row in listing.rows(search=search)] == [RUN]
    assert listing.rows(search=f"{search} more") == []


def test_a_run_from_elsewhere_is_the_latest_if_it_began_after_all_that_were_here_by_then() -> None:
    here = [runs.Found("set-back", "", (), 9.0), runs.Found("after-that", "", (), 8.0)]
    elsewhere = [runs.Found(f"at-{at}", "", (), at, from_here=False) for at in (10.0, 8.5, 9.0)]
    order = [found.run for found in runs.in_order([*here, *elsewhere])]
    assert order == ["at-8.5", "at-9.0", "set-back", "after-that", "at-10.0"]


def test_who_handed_a_run_in_stays_when_it_starts() -> None:
    history.enlist(RUN, name="mine", user="alice", world=2, command=["true"])
    assert history.read(RUN) is None
    assert history.recall() == []
    handed_in = row()["submitted"]
    history.enlist(RUN, user="bob")
    remember(name="mine")
    assert (row()["user"], row()["submitted"], row()["state"]) == ("alice", handed_in, "starting")
    assert attempts() == {RUN: 1}
    history.mark(RUN, "failed", error="it never started", fix="look")
    assert (row()["state"], row()["error"]) == ("failed", "it never started")


@pytest.mark.parametrize("written", ["by whoever saw it end", "before figures were looked at"])
def test_a_list_has_figures_and_no_more_of_what_ranks_said(written: str) -> None:
    swollen: dict[str, object] = {
        **{"step": 10**4200, "steps": "9" * 4000, "epoch": "B" * 4000, "epochs": [1] * 4000},
        **{"loss": {"a": "b" * 4000}, "accuracy": float("inf"), "samples_per_s": True},
        **{"parameters_sha256": "A" * 4000},
    }
    remember()
    if written.startswith("before"):
        words = "UPDATE runs SET summary = ?, state = 'running'"
        told = json.dumps({**swollen, "at": 1.0, "since": [1, 0.0, -(10**4200)]})
        history.change(lambda db: db.execute(words, (told,)))
    else:
        history.close(replace(ended(), ranks={0: RankState(0, "a", "failed", metric=swollen)}))
        assert len(row()["summary"]) < 200
    shown = listing.rows()[0]
    assert {shown[key] for key in history.TOLD} == {None}
    assert len(json.dumps(shown)) < 1000


def test_figures_are_told_as_ranks_said_them() -> None:
    figures = {"step": 7, "steps": 9, "epoch": 1.5, "epochs": 2, "loss": 0.5, "accuracy": 1}
    said = {**figures, "samples_per_s": 10.0, "parameters_sha256": "ab" * 32}
    remember()
    history.close(replace(ended(), ranks={0: RankState(0, "a", "failed", metric=said)}))
    assert {key: listing.rows()[0][key] for key in history.TOLD} == said


def test_a_list_has_no_result_of_a_run_whose_ranks_tell_different_ones() -> None:
    ranks = {
        rank: RankState(
            rank, "a", "succeeded", metric={"step": 7, "accuracy": 0.5, "parameters_sha256": digest * 64}
        )
        for rank, digest in enumerate("ab")
    }
    remember()
    history.close(replace(ended(state="succeeded"), ranks=ranks))
    shown = listing.rows()[0]
    assert [shown[key] for key in ("step", "accuracy", "parameters_sha256")] == [7, 0.5, None]


def test_where_the_last_attempt_had_no_loss_that_of_an_earlier_one_is_not_shown() -> None:
    remember()
    history.close(ended())
    remember(attempt=2)
    nothing_left: dict[str, object] = {"step": 9, "loss": None}
    history.close(replace(ended(attempt=2), ranks={0: RankState(0, "a", "succeeded", metric=nothing_left)}))
    shown = listing.rows()[0]
    assert [shown[key] for key in ("step", "loss", "accuracy")] == [9, None, 0.5]


def test_notes_keep_the_newest() -> None:
    assert history.noted("preflight") is None
    for ok in (False, True):
        history.note("preflight", {"ok": ok})
    found = history.noted("preflight")
    assert found is not None
    assert found[1] == {"ok": True}
    assert found[0] <= time.time()


def remember_all(runs: list[str]) -> None:
    for run in runs:
        remember(run)


def test_threads_and_forked_children_write_at_the_same_time() -> None:
    remember()
    children = []
    for number in range(3):
        child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BaseException):
                for each in range(5):
                    remember(f"child-{number}-{each}")
                code = 0
            os._exit(code)
        children.append(child)
    threads = [
        threading.Thread(target=remember_all, args=([f"thread-{n}-{each}" for each in range(5)],))
        for n in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
    assert len(attempts()) == 31


# --- Kills ---------------------------------------------------------------------------------------


def killed_while(act: Callable[[int], None], after: float, *, once: bool = False) -> int:
    """Have a process do `act(1)`, `act(2)` and so on, and kill it, so many seconds after it began or has done
    it `once`: the last one that it had done."""
    done, told = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(done)
            for number in range(1, 10_000):
                act(number)
                os.write(told, b".")
        finally:
            os._exit(1)
    os.close(told)
    try:
        if once:
            assert select.select([done], [], [], 60.0)[0]
        time.sleep(after)  # a moment of its own each time, not a wait for something
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        count = 0
        while data := os.read(done, 65536):
            count += len(data)
        return count
    finally:
        os.close(done)


def killed_before_it_closes() -> None:
    """So that what it has remembered is in SQLite's log alone."""
    child = os.fork()
    if child == 0:
        db = database.opened(history.file())
        remember()
        os.kill(os.getpid(), signal.SIGKILL)
        db.close()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def is_sound() -> bool:
    found = history.ask(lambda db: db.execute("PRAGMA integrity_check").fetchone()[0], "ok")
    return bool(found == "ok")


def test_killed_at_any_moment_a_run_is_remembered_as_it_was_or_as_it_is() -> None:
    chance = random.Random(7)
    for each in range(24):
        history.forget(RUN)
        after = chance.uniform(0.0, 0.02)
        done = killed_while(lambda number: remember(attempt=number), after, once=bool(each % 3))
        found = attempts().get(RUN, 0)
        assert found in (done, done + 1), "what was said to be remembered is, and only what was to be"
        assert is_sound()
    assert files() <= {"history.db", "history.lock"}


def test_killed_while_the_first_run_ever_is_remembered_the_next_one_is() -> None:
    chance = random.Random(8)
    for _ in range(15):
        for path in history.home().glob("*") if history.home().exists() else ():
            path.unlink()
        done = killed_while(lambda number: remember(attempt=number), chance.uniform(0.0, 0.03))
        assert attempts().get(RUN, 0) in (done, done + 1)
        remember("next")
        assert attempts()["next"] == 1
        assert is_sound()


# --- Disks ---------------------------------------------------------------------------------------


def on_a_disk_of(size: str, folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program whose RINGCTL_HOME is on a small disk of its own, which goes with it."""
    folder.mkdir()
    mount = f"mount -t tmpfs -o size={size} tmpfs {folder} && exec {sys.executable} -c"
    command = ["unshare", "-m", "sh", "-c", f'{mount} "$0"', script]
    environ = {**os.environ, "RINGCTL_HOME": str(folder / "ours"), "DISK": str(folder)}
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True)


HELPERS = """
import os, subprocess, sys
from launcher import history
from launcher.errors import RingctlError
from tests.launcher.test_history import *
disk = os.environ["DISK"]
def fill():
    with open(disk + "/filler", "wb", buffering=0) as f:
        try:
            while True: f.write(bytes(4096))
        except OSError: pass
def said(act):
    try: act()
    except RingctlError as error: return error.message
    return ""
"""


@as_root
def test_on_a_full_disk_it_says_so_and_keeps_what_there_was(tmp_path: Path) -> None:
    done = on_a_disk_of(
        "2m",
        tmp_path / "disk",
        HELPERS
        + """
remember()
fill()
print(said(lambda: [remember(f"more-{n}") for n in range(300)]))
history.close(ended())
print(sorted(name for name in attempts() if not name.startswith("more-")), is_sound())
os.unlink(disk + "/filler")
remember("later")
history.close(ended())
print(history.read(RUN).end.state, "later" in attempts(), is_sound())
""",
    )
    first, second, third = done.stdout.splitlines()
    assert first.endswith("history.db: cannot be written: its disk is full")
    assert second == f"['{RUN}'] True"
    assert third == "failed True True"


@as_root
def test_on_a_disk_that_is_full_from_the_start_nothing_is_launched(tmp_path: Path) -> None:
    done = on_a_disk_of(
        "64k",
        tmp_path / "disk",
        HELPERS
        + """
fill()
def run(*args):
    return subprocess.run([sys.executable, "-m", "launcher", *args], capture_output=True, text=True)
done = run("launch", "--local", "--world", "1", "--skip-preflight", "--", "true")
print(done.returncode, "Traceback" in done.stderr, done.stderr.strip())
print(run("ps", "--json").stdout.strip())
""",
    )
    said, listed = done.stdout.splitlines()
    assert said.startswith("1 False error: ")
    assert "cannot be" in said
    assert "No space left on device" in said or "its disk is full" in said
    assert listed == "[]"


@as_root
@pytest.mark.parametrize("killed", [False, True])
def test_on_a_disk_that_can_only_be_read_it_is_read(tmp_path: Path, killed: bool) -> None:
    """Also what is still in SQLite's log, because whoever wrote it was killed."""
    done = on_a_disk_of(
        "4m",
        tmp_path / "disk",
        HELPERS
        + f"""
if {killed}:
    remember("first")
    killed_before_it_closes()
    print((history.home() / "history.db-wal").stat().st_size > 0)
else:
    remember()
    print(True)
subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
print(attempts()[RUN], history.read(RUN).plan.run)
print(said(lambda: remember("another")))
history.close(ended())
""",
    )
    first, second, third = done.stdout.splitlines()
    assert first == "True"
    assert second == f"1 {RUN}"
    assert "history.db: cannot be written: its disk can only be read" in third


# --- Damage, and other versions ------------------------------------------------------------------


@pytest.mark.parametrize("where", ["its head", "all of it", "its middle"])
def test_a_damaged_file_is_moved_aside_and_a_new_one_begun(
    where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(40):
        remember(f"{RUN}-{number}")
    size = history.file().stat().st_size
    with open(history.file(), "r+b") as file:
        file.seek({"its head": 0, "all of it": 0, "its middle": 4096}[where])
        file.write(os.urandom({"its head": 100, "all of it": size, "its middle": size - 4096}[where]))
    assert history.recall() == []
    said = capsys.readouterr().err
    assert "history.db: it is damaged (" in said
    assert "a new one is begun" in said
    (aside,) = history.home().glob("history.db.damaged-*")
    assert str(aside) in said
    assert aside.stat().st_size == size
    remember()
    assert attempts() == {RUN: 1}
    assert capsys.readouterr().err == ""


def test_a_question_that_is_wrong_is_no_damage() -> None:
    remember()
    with pytest.raises(sqlite3.ProgrammingError):
        history.ask(lambda db: db.execute("SELECT ?", (1, 2)).fetchall(), [])
    with pytest.raises(RingctlError):
        history.change(lambda db: db.execute("INSERT INTO runs VALUES (?)", (1, 2)))
    assert attempts() == {RUN: 1}
    assert not list(history.home().glob("*damaged*"))


def test_a_run_is_launched_though_the_history_is_damaged() -> None:
    history.home().mkdir(mode=0o700)
    history.file().write_bytes(b"not a database at all" * 500)
    assert launch(["true"], world=1)[-1]["state"] == "succeeded"
    assert len(history.recall()) == 1


def test_a_newer_version_s_history_is_left_alone_and_named(tmp_path: Path) -> None:
    remember()
    with contextlib.closing(sqlite3.connect(history.file())) as db:
        db.execute("PRAGMA user_version=99")
    before = history.file().read_bytes()
    for args in (
        ["ps"],
        ["launch", "--local", "--world", "1", "--skip-preflight", "--", "true"],
        ["runs", "list"],
        ["runs", "export", "--out", str(tmp_path / "all.jsonl")],
        ["runs", "export", "--out", f"{tmp_path}/all/"],
    ):
        said = ringctl(*args, code=1).stderr
        assert f"{history.file()}: a newer ringctl has written it (schema 99; this one knows" in said
        assert "let RINGCTL_HOME name another folder" in said
        assert "Traceback" not in said
    assert history.file().read_bytes() == before
    assert not list(tmp_path.glob("all*")), "nor is an export made that would hold nothing"


# --- Files of before -----------------------------------------------------------------------------


def old_file(run: str, attempt: int = 1, end: RunState | None = None) -> Path:
    """As ringctl wrote one a run before it had a database."""
    plan = Plan(run, "old", attempt, 1, "127.0.0.1", 1, ("true",), ())
    record = history.Record(plan, HOSTS.hosts, 5.0, HOSTS, LaunchOptions(run, "", ("true",), "/t"), end)
    path = history.home() / "history" / f"{run}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(to_json(record)))
    return path


def test_files_of_an_older_version_are_taken_in_once() -> None:
    old_file("one", end=ended("one"))
    old_file("two")
    assert attempts() == {"one": 1, "two": 1}
    assert (row("one")["state"], row("one")["name"]) == ("failed", "old")
    assert files() == {"history.db", "history.lock"}
    remember("two", attempt=3)
    old_file("two", attempt=2)  # an older ringctl that still runs
    old_file("three")
    assert attempts() == {"one": 1, "two": 3, "three": 1}
    assert files() == {"history.db", "history.lock"}


def test_what_nobody_can_read_among_them_is_kept() -> None:
    old_file("one").with_name("cut.json").write_text('{"plan": ')
    assert attempts() == {"one": 1}
    (kept,) = history.home().glob("history.unread-*")
    assert [path.name for path in kept.iterdir()] == ["cut.json"]
    assert not (history.home() / "history").exists()


def test_killed_while_they_are_taken_in_none_is_lost() -> None:
    chance = random.Random(9)
    names = {f"run-{number}" for number in range(20)}
    for _ in range(10):
        for path in history.home().glob("history.*") if history.home().exists() else ():
            path.unlink()
        for name in names:
            old_file(name)
        killed_while(lambda _: history.take_in_old(), chance.uniform(0.0, 0.03))
        assert attempts().keys() == names


@as_root
def test_on_a_disk_that_can_only_be_read_they_are_read_where_they_are(tmp_path: Path) -> None:
    done = on_a_disk_of(
        "1m",
        tmp_path / "disk",
        HELPERS
        + """
old_file(RUN)
subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
print(attempts(), history.read(RUN).plan.run)
""",
    )
    assert done.stdout == f"{{'{RUN}': 1}} {RUN}\n"


# --- The rest ------------------------------------------------------------------------------------


def test_the_log_of_changes_is_sqlites_own_where_other_machines_have_no_part_in_the_disk() -> None:
    remember()
    mode = history.ask(lambda db: db.execute("PRAGMA journal_mode").fetchone()[0], "")
    assert mode == ("delete" if database.is_shared(history.home()) else "wal")


def test_what_others_keep_as_files_is_still_a_file() -> None:
    watching.write(watching.Watch(RUN))
    assert watching.read(RUN) == watching.Watch(RUN)
    with pytest.raises(RingctlError, match="cannot be"):
        history.write_as(watching.Watch(RUN), Path("/dev/null/x/y"))
