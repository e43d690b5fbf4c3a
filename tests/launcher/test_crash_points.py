"""Whatever is written is cut off at each of its steps: by a kill, by a power cut, by a full disk. What was
there before or what came must be there, whole; it must go on from there; and nothing may stay beside it.
The history, which SQLite writes, is killed in test_history.py."""

from __future__ import annotations

import builtins
import contextlib
import errno
import hashlib
import io
import json
import os
import shutil
import sys
import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from launcher import (
    hostanswer,
    hostbooks,
    hostdisk,
    hostevents,
    hostproc,
    hostruns,
    hoststart,
    hoststop,
    hoststore,
    hostwarden,
    hostword,
    inventory,
    mending,
    watching,
)
from launcher.errors import RingctlError
from launcher.preflight.mend import Action, Means
from launcher.yamltext import Edit
from tests.conftest import eventually

DONE, FELL, REFUSED, GOT_OVER, BROKEN = 0, 70, 71, 72, 73  # how a process ends that was to be cut off
MOST_STEPS = 300
RUN = "20260101-000000-abcd"
MAKING = ("mkdir", "rename", "replace", "link", "symlink", "chmod", "utime", "truncate", "posix_fallocate")
REMOVING = ("unlink", "remove", "rmdir")  # which need no room
WRITING = ("write", "fsync", "sendfile")
ENDS = ("kill", "power cut", "full disk")


# --- Cutting it off ------------------------------------------------------------------------------


class Fault:
    """In a process of its own: steps that change the disk are counted from here on, and the n-th fails."""

    def __init__(self, how: str, at: int) -> None:
        self.how, self.left, self.reached = how, at, False
        self.unsafe: set[str] = set()  # written since their last fsync
        self.real = {name: getattr(os, name) for name in (*MAKING, *REMOVING, *WRITING, "open")}
        for name in (*MAKING, *REMOVING):
            setattr(os, name, self.step(name))
        os.open, os.write, os.fsync, os.sendfile = self.open, self.write, self.fsync, self.sendfile  # type: ignore[assignment]  # looser
        builtins.open = io.open = os.fdopen = self.paper(io.open)

    def due(self) -> bool:
        self.left -= 1
        self.reached = self.reached or self.left == 0
        return self.left == 0

    def fail(self) -> None:
        if self.how == "full disk":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.end(FELL)

    def end(self, code: int) -> None:
        """A power cut takes what was not made safe."""
        for path in self.unsafe if self.how == "power cut" else ():
            with contextlib.suppress(OSError):
                about = os.stat(path)
                self.real["chmod"](path, 0o600)
                self.real["truncate"](path, 0)
                self.real["chmod"](path, about.st_mode)
                self.real["utime"](path, ns=(about.st_atime_ns, about.st_mtime_ns))
        os._exit(code)

    def step(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            if (name in MAKING or self.how != "full disk") and self.due():
                self.fail()
            nameless = os.readlink(args[0]) if name == "link" and args[0].startswith("/proc/self/fd/") else ""
            done = self.real[name](*args, **more)
            if nameless in self.unsafe:
                self.unsafe.add(str(args[1]))
            if name in ("rename", "replace") and str(args[0]) in self.unsafe:
                self.unsafe.remove(str(args[0]))
                self.unsafe.add(str(args[1]))
            return done

        return call

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if (flags & os.O_CREAT or flags & os.O_TMPFILE == os.O_TMPFILE) and self.due():
            self.fail()
        return int(self.real["open"](path, flags, mode, dir_fd=dir_fd))

    def write(self, fd: int, data: Any) -> int:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if not path.startswith("/"):
            return int(self.real["write"](fd, data))  # a pipe
        self.unsafe.add(path)
        some_room = not self.reached
        if self.due():
            written = self.real["write"](fd, data[: len(data) // 2]) if some_room else 0
            if not written or self.how != "full disk":
                self.fail()
            self.left = 1  # there was room for so much; the next step finds none
            return int(written)
        return int(self.real["write"](fd, data))

    def fsync(self, fd: int) -> None:
        if self.due():
            self.fail()
        self.real["fsync"](fd)
        self.unsafe.discard(os.readlink(f"/proc/self/fd/{fd}"))

    def sendfile(self, out: int, source: int, offset: int, count: int) -> int:
        self.unsafe.add(os.readlink(f"/proc/self/fd/{out}"))
        if self.due():
            self.fail()
        return int(self.real["sendfile"](out, source, offset, count))

    def paper(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """`open`, whose files write through `os.write`."""

        def call(file: Any, mode: str = "r", *args: Any, **more: Any) -> Any:
            if not set(mode) & set("wax+"):
                return real(file, mode, *args, **more)
            assert "b" in mode, "all that is written here is written as bytes"
            if isinstance(file, int):
                return Paper(file)
            return Paper(os.open(file, os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if "w" in mode else 0), 0o666))

        return call


class Paper:
    """A file that is written to, with a buffer as every one has: what is in there is lost in a crash."""

    def __init__(self, fd: int) -> None:
        self.fd, self.buffer, self.name = fd, b"", os.readlink(f"/proc/self/fd/{fd}")

    def __enter__(self) -> Paper:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.flush()
        finally:
            os.close(self.fd)

    def write(self, data: bytes) -> int:
        self.buffer += data
        return len(data)

    def flush(self) -> None:
        data, self.buffer = memoryview(self.buffer), b""
        while data:
            data = data[os.write(self.fd, data) :]

    def seek(self, offset: int) -> None:
        self.flush()
        os.lseek(self.fd, offset, os.SEEK_SET)

    def read(self, size: int) -> bytes:
        return os.read(self.fd, size)

    def fileno(self) -> int:
        return self.fd


def cut_off(act: Callable[[], object], how: str, at: int) -> int:
    """How `act` ends in a process of its own when its step number `at` fails."""
    child = os.fork()
    if child == 0:
        code = BROKEN
        fault = Fault(how, at)
        try:
            act()
            code = GOT_OVER if fault.reached else DONE
        except (OSError, RingctlError, hostanswer.Refused, hoststore.Refused):
            code = REFUSED
        except BaseException:
            traceback.print_exc()
        fault.end(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@dataclass
class Case:
    """Something that is written: what is there before, what is done, and what must hold then."""

    prepare: Callable[[], object]
    act: Callable[[], object]
    whole: Callable[[], object]  # what is there is what was, or what came
    done: Callable[[], object]  # and this is what came, with nothing beside it
    safe: bool = True  # a power cut afterwards takes none of it
    at_once: Callable[[], object] = lambda: None  # what a full disk must not leave, even before the next time


def goes_through(case: Case, how: str, folder: Path) -> None:
    """Cut it off at the first step, at the second, and so on, until it comes to its end."""
    for at in range(1, MOST_STEPS):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        case.prepare()
        code = cut_off(case.act, how, at)
        assert code in (DONE, *((REFUSED, GOT_OVER) if how == "full disk" else (FELL,))), f"step {at}: {code}"
        case.whole()
        if how == "full disk":
            case.at_once()
        if code != DONE or (how == "power cut" and not case.safe):
            case.act()
        case.done()
        if code == DONE:
            assert at > 3, "nothing was cut off"
            return
    raise AssertionError("it has no end")


def beside(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# --- On a host -----------------------------------------------------------------------------------

OLD, NEW = {"content": "old" * 50}, {"content": "new" * 50}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """ringctl's own, which is made anew for each step."""
    monkeypatch.setenv("RINGCTL_HOME", str(tmp_path / "ours"))
    return tmp_path / "ours"


@pytest.mark.parametrize("how", ENDS)
def test_a_state_file_holds_what_was_or_what_came(folder: Path, how: str) -> None:
    path = folder / "state.json"

    def done() -> None:
        assert hostdisk.read_json(str(path)) == NEW
        assert beside(folder) == {"state.json"}

    case = Case(
        prepare=lambda: path.write_text(json.dumps(OLD)),
        act=lambda: hostdisk.replace_file(str(path), json.dumps(NEW).encode()),
        whole=lambda: check(hostdisk.read_json(str(path)) in (OLD, NEW)),
        done=done,
        at_once=lambda: check(beside(folder) == {"state.json"}),
    )
    goes_through(case, how, folder)


@pytest.mark.parametrize("how", ENDS)
def test_the_word_that_a_run_is_to_end_is_there_or_not(folder: Path, how: str) -> None:
    def word() -> Any:
        return hostdisk.read_json(str(folder / "stop.json"))

    def done() -> None:
        assert (word()["attempt"], word()["reason"]) == (2, "stopped")
        assert beside(folder) == {"stop.json", "lock"}

    case = Case(
        prepare=lambda: (folder / "stop.json").write_text('{"attempt": 1, "grace": 5.0, "reason": "failed"}'),
        act=lambda: hostword.leave_word(str(folder), 2, 1.0, "stopped"),
        whole=lambda: check(word()["attempt"] in (1, 2)),
        done=done,
        at_once=lambda: check(beside(folder) <= {"stop.json", "lock"}),
    )
    goes_through(case, how, folder)


def lines_of(folder: Path) -> list[Any]:
    """Whole lines of all segments, as a follower is sent them."""
    paths = [folder / hostevents.segment_name(*segment) for segment in hostevents.segments(str(folder))]
    return [json.loads(line) for path in paths for line in path.read_bytes().split(b"\n")[:-1]]


@pytest.mark.parametrize(("exact", "off"), [(True, ""), (False, "token")])
def test_only_what_somebody_wants_stopped_calls_off_a_start_by_hand(
    folder: Path, exact: bool, off: str
) -> None:
    """What an automatic start undoes, because a restart has ended the attempt before, is none of that."""
    place = folder / "runs" / RUN
    place.mkdir(parents=True)
    hostword.command_again({"run": RUN, "again": "token"})
    hoststop.Wanted({"run": RUN, "attempt": 1, "exact": exact}).leave_word(1)
    word = hostword.read_word(str(place))
    assert word is not None
    assert word["off"] == off


def test_a_clock_that_was_set_back_makes_no_time_of_a_stop_that_is_none(folder: Path) -> None:
    folder.mkdir()
    a_run_whose_supervisor_died(folder)
    hostword.leave_word(str(folder), 1, 5.0, "stopped", age=-100.0)
    hostbooks.close_books(str(folder), hostword.KILLED)
    state = hostdisk.read_json(str(folder / "state.json"))
    assert state is not None
    assert [rank.get("stopping") for rank in state["ranks"]] == [None, 0.0, 0.0, None]


def a_run_whose_supervisor_died(folder: Path) -> None:
    dead = {"pid": 1, "start": 1, "boot": "another one"}
    ranks: list[dict[str, Any]] = [{"rank": rank, "state": "running", "pid": None} for rank in range(4)]
    ranks[3].update(state="succeeded", exit_code=0, signal=None, reason="")  # there was no room to log it
    state = {"run": RUN, "attempt": 1, "state": "running", "hostd": dead, "warden": dead, "ranks": ranks}
    (folder / "state.json").write_text(json.dumps(state))
    told = {"rank": 0, "state": "failed", "exit_code": 3, "signal": None, "reason": ""}
    log = [{"kind": "line", "rank": 1, "text": "before"}, {"kind": "rank_exited", **told}]
    text = "".join(json.dumps(event, separators=(",", ":")) + "\n" for event in log)
    (folder / hostevents.segment_name(1, 1)).write_text(text + '{"kind":"line","rank":2,"te')
    hostdisk.keep_room(str(folder))


@pytest.mark.parametrize("how", ENDS)
def test_each_rank_ends_once_however_often_the_books_are_closed(folder: Path, how: str) -> None:
    def whole() -> None:
        state = hostdisk.read_json(str(folder / "state.json"))
        assert state is not None
        assert state["state"] in ("running", "failed")
        ends = [event["rank"] for event in lines_of(folder) if event["kind"] == "rank_exited"]
        assert sorted(ends) == list(range(4)) if state["state"] == "failed" else len(ends) == len(set(ends))

    def done() -> None:
        whole()
        state = hostdisk.read_json(str(folder / "state.json")) or {}
        assert [rank["exit_code"] for rank in state["ranks"]] == [3, -9, -9, 0]
        assert all(rank.get("stopping") is None for rank in state["ranks"])
        codes = {e["rank"]: e["exit_code"] for e in lines_of(folder) if e["kind"] == "rank_exited"}
        assert codes == {0: 3, 1: -9, 2: -9, 3: 0}
        assert [e["kind"] for e in lines_of(folder)].count("host_finished") == 1
        assert lines_of(folder)[0]["text"] == "before"
        assert not [name for name in beside(folder) if ".tmp" in name or name == "room"]

    case = Case(
        prepare=lambda: a_run_whose_supervisor_died(folder),
        act=lambda: hostbooks.close_books(str(folder), hostword.KILLED),
        whole=whole,
        done=done,
    )
    goes_through(case, how, folder)


@pytest.mark.parametrize("how", ["kill", "full disk"])
def test_a_log_has_every_line_up_to_where_it_ends(
    folder: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostevents, "SEGMENT_BYTES", 300)
    most = 12

    def numbers() -> list[int]:
        return [event["number"] for event in lines_of(folder)]

    def act() -> None:
        log = hostevents.EventLog(str(folder), 1)
        for number in range(len(numbers()), most):
            log.event("line", number=number, text="x" * 50)
        check(log.finish() or log.finish())  # the first time there may be no room

    case = Case(
        prepare=lambda: None,
        act=act,
        whole=lambda: check(numbers() == list(range(len(numbers())))),
        done=lambda: check(numbers() == list(range(most)) and len(hostevents.segments(str(folder))) > 2),
    )
    goes_through(case, how, folder)


def start_cut_off(run: str, how: str, at: int) -> int:
    """Start a run whose supervisor's step number `at` fails."""
    rank = {"RINGCTL_RUN": run, "RINGCTL_METRICS": f"{hostruns.run_folder(run)}/ranks/0/metrics.jsonl"}
    rank["RINGCTL_CHECKPOINTS"] = f"{hostruns.run_folder(run)}/checkpoints"
    argv = ["sh", "-c", "echo one; echo two"]
    request = {
        "run": run, "name": "", "attempt": 1, "world": 1, "host": "h", "env": None, "workdir": "/",
        "prefork": False, "ranks": [{"rank": 0, "local_rank": 0, "argv": argv, "env": rank}],
    }  # fmt: skip
    child = os.fork()
    if child == 0:
        supervise = hostwarden.be_hostd

        def be_hostd(*args: Any, **more: Any) -> int:
            Fault(how, at)
            return supervise(*args, **more)

        hostwarden.be_hostd = be_hostd
        try:
            hoststart.command_start(request)
            os._exit(DONE)
        except hostanswer.Refused:
            os._exit(REFUSED)
        except BaseException:
            traceback.print_exc()
            os._exit(BROKEN)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def processes_of(run: str) -> list[int]:
    about = hostruns.read_state(run)
    supervisors = [about[who]["pid"] for who in ("hostd", "warden") if about and hostproc.alive(about[who])]
    return [*hostproc.carriers(run), *supervisors]


STEPS = (*range(1, 40), 10_000)  # all that a short run has, and one that it does not get to


@pytest.mark.parametrize("how", ["kill", "full disk"])
def test_a_supervisor_may_die_at_each_of_its_steps_and_the_run_ends(folder: Path, how: str) -> None:
    codes = {f"run-{at}": start_cut_off(f"run-{at}", how, at) for at in STEPS}
    assert set(codes.values()) == {DONE, REFUSED}
    for run, code in codes.items():
        place = folder / "runs" / run
        assert eventually(lambda run=run: not processes_of(run), 20.0), f"{run}: {processes_of(run)}"
        assert eventually(lambda place=place: is_closed(place), 20.0), f"{run}: {beside(place)}"
        state, log = hostdisk.read_json(str(place / "state.json")), lines_of(place)
        ends = [event["state"] for event in log if event["kind"] == "rank_exited"]
        said = [event["text"] for event in log if event["kind"] == "line"]
        assert said == ["one", "two"][: len(said)]
        assert len(ends) == 1 if state else code == REFUSED
        if ends == ["succeeded"]:  # also in a start that failed only after that
            assert state is not None
            end, lost = state["state"], state["unwritten"] == hostword.MAY_BE
            assert said == ["one", "two"] or (lost and how == "kill"), run
            assert end == "succeeded" if code == DONE else end == "failed" or how == "kill", run
        else:
            assert how == "kill" or code == REFUSED, run
    assert ends == ["succeeded"], "the last one was not cut off"


def is_closed(place: Path) -> bool:
    """Whether the run has a final state, or never had one, and nothing of use to nobody is left beside it."""
    state = hostdisk.read_json(str(place / "state.json"))
    left = [name for name in beside(place) if ".tmp" in name or name == "room"]
    return (state is None or state["state"] in hostruns.FINAL) and not left


FILES = {"src/train.py": b"print(1)\n" * 1000, "run.sh": b"#!/bin/sh\n"}


def snapshot() -> dict[str, Any]:
    entries = [
        {"path": path, "kind": "file", "content": hashlib.sha256(data).hexdigest(), "size": len(data)}
        | {"executable": path.endswith(".sh")}
        for path, data in FILES.items()
    ]
    link = {"path": "link", "kind": "link", "content": "src/train.py", "size": 0, "executable": False}
    return {"digest": "d" * 64, "entries": [*entries, link]}


def receive(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a controller pushes: it asks what is missing, and sends that."""
    request = snapshot()
    asked = hoststore.command_check(request)
    if asked["have"]:
        return
    by_name = {hashlib.sha256(data).hexdigest(): data for data in FILES.values()}
    sent = zlib.compress(b"".join(by_name[content] for content in asked["missing"]))
    blobs = [[content, len(by_name[content])] for content in asked["missing"]]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(sent))))
    check(hoststore.command_receive({**request, "blobs": blobs})["have"])


def damage(folder: Path) -> None:
    path = folder / "code" / ("d" * 64) / "src/train.py"
    path.chmod(0o600)
    path.write_bytes(b"damaged\n")


@pytest.mark.parametrize("damaged", [False, True], ids=["new", "in place of a damaged one"])
@pytest.mark.parametrize("how", ENDS)
def test_a_snapshot_is_there_whole_or_not_at_all(
    folder: Path, how: str, damaged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = folder / "code" / ("d" * 64)

    def prepare() -> None:
        if damaged:
            receive(monkeypatch)
            damage(folder)

    def whole() -> None:
        if hoststore.command_check(snapshot())["have"]:
            for path, data in FILES.items():
                assert (place / path).read_bytes() == data
        elif how == "kill" and not damaged:
            assert not place.exists()

    def tidy() -> None:
        left = beside(folder / "code") - {"blobs", "d" * 64} if (folder / "code").exists() else set()
        assert not left
        assert not [name for name in beside(folder / "code" / "blobs") if not hoststore.is_hex(name)]

    def done() -> None:
        check(hoststore.command_check(snapshot())["have"])
        whole()
        with monkeypatch.context() as later:
            later.setattr(hoststore, "OVER_S", -1.0)  # what was left is nobody's an hour later
            hoststore.command_collect({"keep": ["d" * 64]})
        tidy()

    def at_once() -> None:
        if (folder / "code" / "blobs").exists():
            tidy()

    # What a power cut has damaged is found, and pushed again: no push waits for the disk.
    case = Case(prepare, lambda: receive(monkeypatch), whole, done, safe=False, at_once=at_once)
    goes_through(case, how, folder)


# --- On the controller ---------------------------------------------------------------------------


@pytest.mark.parametrize("how", ENDS)
def test_a_watched_run_is_watched_until_its_end_or_to_be_picked_up(folder: Path, how: str) -> None:
    failure = watching.Failure(1, 3, "boom", "rank 0 failed")

    def act() -> None:
        with watching.watched(RUN) as book:
            assert book is not None
            book.note(failure=failure)
            with watching.giving_up(RUN, 5.0):
                pass

    def whole() -> None:
        assert not watching.is_watched(RUN)
        if watching.file_of(RUN).exists():
            assert watching.read(RUN) is not None
            assert watching.unwatched() == [RUN]

    def done() -> None:
        assert watching.unwatched() == []
        assert beside(folder / "watch") == {f"{RUN}.lock"}

    def once_more() -> None:
        if watching.file_of(RUN).exists() or not (folder / "watch" / f"{RUN}.lock").exists():
            act()

    case = Case(lambda: watching.write(watching.Watch(RUN)), once_more, whole, done)
    goes_through(case, how, folder)


BEFORE = "hosts:\n  - {name: a, address: 10.0.0.1}  # mine\n"
AFTER = "master_port: 23456\n" + BEFORE


@pytest.mark.parametrize("how", ENDS)
def test_an_inventory_is_the_old_one_or_the_new_one(folder: Path, how: str) -> None:
    path = folder / "hosts.yaml"

    def edit() -> None:
        text = path.read_text()
        means = Means(replace(inventory.parse(text, str(path)), source=str(path)), text)
        change = Action("inventory", (), "", edits=(Edit(0, len(text), AFTER),))
        outcome = mending.edit_inventory(change, means)[str(path)]
        if isinstance(outcome, RingctlError):
            raise outcome

    def done() -> None:
        assert path.read_text() == AFTER
        assert beside(folder) == {"hosts.yaml", "hosts.yaml.bak"}
        assert (folder / "hosts.yaml.bak").read_text() in (BEFORE, AFTER)

    def whole() -> None:
        assert path.read_text() in (BEFORE, AFTER)
        assert path.stat().st_mode & 0o777 == 0o640
        if path.read_text() == AFTER:
            assert (folder / "hosts.yaml.bak").read_text() == BEFORE

    def prepare() -> None:
        path.write_text(BEFORE)
        path.chmod(0o640)

    tidy = {"hosts.yaml", "hosts.yaml.bak"}
    case = Case(prepare, edit, whole, done, at_once=lambda: check(beside(folder) <= tidy))
    goes_through(case, how, folder)


def check(good: object) -> None:
    assert good
