"""Runs that were handed in to a service: their rows in the database, their folders, and how one is started.

A row says `starting`, with the slots that were given to it, before its launch is begun. The launch holds a
lock for as long as it lives: so whoever comes after a killed service sees whether it still does.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from launcher import ask, codestore, database, history
from launcher.errors import InputError, RingctlError
from launcher.filelock import is_held, lock_soon
from launcher.model import Inventory, from_json, to_json
from launcher.plan import is_trainer
from launcher.wholefile import replace_whole

State = Literal["queued", "starting", "started", "failed", "cancelled"]
START = "start-queued"  # the hidden command that launches one
UNUSED_S = 86400.0  # a snapshot that no run uses is kept so long
MOST_TOLD = 64 << 10  # of what a launch said


@dataclass(frozen=True)
class Submission:
    """A run as it was handed in. Of secrets only the names are kept here."""

    command: tuple[str, ...] = ()
    world: int | None = None
    name: str = ""
    include: str = ""
    exclude: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 0
    restart_delay: float = 2.0
    min_world: int | None = None
    prefork: bool = True
    priority: int = 0
    after: str = ""
    at: float | None = None
    code: str = ""
    shared: bool = False
    master_port: int | None = None
    i_know: bool = False
    skip_preflight: bool = False
    key: str = ""  # chosen by whoever handed it in: once more with the same is the same run


@dataclass(frozen=True)
class Queued:
    """A row of the queue."""

    run: str
    place: int
    user: str
    state: State
    submission: Submission
    why: str = ""
    slots: Mapping[str, int] = field(default_factory=dict)  # given to it, once it starts
    pid: int = 0  # of its launch
    tries: int = 0
    rooms: Mapping[str, int] = field(default_factory=dict)  # how many slots those hosts have in all
    cancelled: bool = False  # while its launch was under way, which is to come to nothing


# --- Rows ----------------------------------------------------------------------------------------


def add(run: str, user: str, submission: Submission) -> str:
    """Remember what was handed in, its secrets in a file of their own; it is among all runs at once. Its id:
    another one if this user has handed it in before, by its key, and did not hear of that."""
    write_secrets(run, submission.secrets)
    hidden = replace(submission, secrets=dict.fromkeys(submission.secrets, ""))
    row = (run, submission.priority, submission.after, submission.at, json.dumps(to_json(hidden)), user)
    columns = "run, priority, after, at, submission, user, state"
    sql = f"INSERT INTO queue({columns}) VALUES (?, ?, ?, ?, ?, ?, 'queued')"  # noqa: S608 - as above
    name, world, command = submission.name, submission.world or 0, submission.command

    def work(db: sqlite3.Connection) -> str:
        if before := with_key(db, user, submission.key):
            return before
        db.execute(sql, row)
        history.enlist_in(db, run, name=name, user=user, world=world, command=command)
        return run

    known = history.change(work)
    if known != run:
        remove_folder(run, keep_work=False)
    return known


def with_key(db: sqlite3.Connection, user: str, key: str) -> str | None:
    """The run that this user has handed in with this key; None without a key."""
    if not key:
        return None
    sql = "SELECT * FROM queue WHERE user = ? AND instr(submission, ?) ORDER BY place"
    found = map(from_row, db.execute(sql, (user, json.dumps(key))))
    return next((row.run for row in found if row.submission.key == key), None)


def rows(*states: State) -> list[Queued]:
    """Those in one of these states, or all, in the order in which they came."""
    some = f"WHERE state IN ({','.join('?' * len(states))})" if states else ""
    sql = f"SELECT * FROM queue {some} ORDER BY place"  # noqa: S608 - question marks only
    return database.read(
        history.file(), lambda db: [from_row(row) for row in db.execute(sql, states).fetchall()], []
    )


def with_slots(recorded: Collection[str]) -> list[Queued]:
    """Those that start or go on, also those still `recorded`; thousands that are over cost nothing."""
    names = list(recorded)
    going = "SELECT q.* FROM runs r JOIN queue q ON q.run = r.run WHERE r.state IN ('starting', 'running')"
    marks = ",".join("?" * len(names))
    some = f"SELECT * FROM queue WHERE run IN ({marks})"  # noqa: S608 - question marks only

    def work(db: sqlite3.Connection) -> list[Queued]:
        starting = db.execute("SELECT * FROM queue WHERE state = 'starting'").fetchall()
        found = [*starting, *db.execute(going).fetchall(), *db.execute(some, names).fetchall()]
        each = {row["run"]: from_row(row) for row in found if row["state"] in ("starting", "started")}
        return sorted(each.values(), key=lambda row: row.place)

    return database.read(history.file(), work, [])


def row(run: str) -> Queued | None:
    sql = "SELECT * FROM queue WHERE run = ?"
    found = database.read(history.file(), lambda db: db.execute(sql, (run,)).fetchone(), None)
    return from_row(found) if found else None


def rooms(run: str) -> Mapping[str, int]:
    """The hosts that a run which was handed in has to find its slots free on, whoever starts it, and how many
    they have in all."""
    found = row(run)
    return found.rooms if found else {}


def from_row(found: sqlite3.Row) -> Queued:
    child = json.loads(found["child"] or "{}")
    return Queued(
        found["run"],
        found["place"],
        found["user"],
        found["state"],
        from_json(Submission, json.loads(found["submission"])),
        found["why"],
        child.get("slots", {}),
        child.get("pid", 0),
        child.get("tries", 0),
        child.get("rooms", {}),
        child.get("cancelled", False),
    )


def change(run: str, before: State, state: State, why: str = "", **child: Any) -> bool:
    """To another state, if it is still in the one that we have seen."""
    return database.write(history.file(), lambda db: changed(db, run, before, state, why, child))


def changed(
    db: sqlite3.Connection, run: str, before: State, state: State, why: str, child: Mapping[str, Any]
) -> bool:
    """The same, together with what else is written of it."""
    found = db.execute("SELECT child FROM queue WHERE run = ? AND state = ?", (run, before)).fetchone()
    if found is None:
        return False
    about = json.dumps({**json.loads(found["child"] or "{}"), **child})
    values = (state, database.storable(why), about, run)
    db.execute("UPDATE queue SET state = ?, why = ?, child = ? WHERE run = ?", values)
    return True


def begun(run: str) -> bool:
    """Its launch has started it: False if that is not wanted any more, for somebody has cancelled it."""

    def work(db: sqlite3.Connection) -> bool:
        found = db.execute("SELECT * FROM queue WHERE run = ?", (run,)).fetchone()
        if found is not None and from_row(found).cancelled:
            return False
        changed(db, run, "starting", "started", "", {})
        return True

    return database.write(history.file(), work)


def conclude(
    run: str,
    before: State,
    state: Literal["failed", "cancelled"],
    why: str = "",
    fix: str = "",
    attempt: int | None = None,
) -> bool:
    """It never comes to a start: at once in the queue and among all runs, for whoever is killed in between
    would leave a run that waits for ever. If it is about an `attempt`, that is not said of a later one, which
    somebody may have started without the service."""

    def work(db: sqlite3.Connection) -> bool:
        if not changed(db, run, before, state, why, {}):
            return False
        history.mark_in(db, run, state, why, fix, attempt)
        return True

    done = database.write(history.file(), work)
    if done and history.read(run) is None:  # else it may have begun somewhere, and can be started again
        remove_secrets(run)
    return done


def put_back(run: str, why: str) -> bool:
    """To its place in the queue: its slots are somebody else's by now, and nothing of it was started. Not if
    somebody has cancelled it meanwhile."""

    def work(db: sqlite3.Connection) -> bool:
        found = db.execute("SELECT * FROM queue WHERE run = ?", (run,)).fetchone()
        if found is None or from_row(found).cancelled:
            return False
        if not changed(db, run, "starting", "queued", why, {"slots": {}, "pid": 0}):
            return False
        history.mark_in(db, run, "queued")
        return True

    return database.write(history.file(), work)


def explain(reasons: Mapping[str, str]) -> None:
    """Why each of the runs waits."""
    sql = "UPDATE queue SET why = ? WHERE run = ? AND state = 'queued'"
    pairs = [(why, run) for run, why in reasons.items()]
    database.write(history.file(), lambda db: db.executemany(sql, pairs), safe=False)


# --- Folders -------------------------------------------------------------------------------------


def folder(run: str) -> Path:
    return history.home() / "serve" / "runs" / run


def work_folder(run: str) -> Path:
    """Where its launch, and its ranks on this machine, run."""
    return folder(run) / "work"


def env_file(run: str) -> Path:
    """Its secrets, for as long as the run is known: for a restart, and to hide them in its log."""
    return folder(run) / "secrets.env"


def write_secrets(run: str, values: Mapping[str, str]) -> None:
    make_folders(folder(run))
    if values:
        text = "".join(f"{name}={value}\n" for name, value in values.items())
        replace_whole(env_file(run), text.encode())


def make_folders(path: Path) -> None:
    for each in (history.home() / "serve", history.home() / "serve" / "runs", path):
        history.make_folder(each)


def remove_secrets(run: str) -> None:
    env_file(run).unlink(missing_ok=True)


def remove_folder(run: str, *, keep_work: bool) -> None:
    """Of a run that is forgotten; but for what its ranks may have written, if that is to be kept."""
    import shutil

    with contextlib.suppress(OSError):
        work_folder(run).rmdir()  # if there is nothing in it
    for path in folder(run).glob("*"):
        if path != work_folder(run):
            path.unlink(missing_ok=True) if path.is_file() else shutil.rmtree(path, ignore_errors=True)
        elif not keep_work:
            shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder(run).rmdir()


def remove_unused_code() -> None:
    """Snapshots that no run was handed in with; not what has just come, whose run may be on its way."""
    used = {row.submission.code for row in rows()}
    for path in codestore.store().glob("[0-9a-f]*"):
        if path.name not in used and time.time() - path.stat().st_mtime > UNUSED_S:
            codestore.remove(path.name)


@contextlib.contextmanager
def lock(run: str) -> Iterator[int | None]:
    """The descriptor that a launch holds while it lives; None if one does."""
    make_folders(folder(run))
    descriptor = os.open(folder(run) / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor if lock_soon(descriptor) else None
    finally:
        os.close(descriptor)


def is_launching(run: str) -> bool:
    return is_held(folder(run) / "lock")


# --- Starting ------------------------------------------------------------------------------------


def spawn(run: str, inventory: Inventory) -> subprocess.Popen[bytes] | None:
    """Begin the launch of a run on hosts with just the slots that it has, in a process and a session of its
    own; None if there is one already."""
    from launcher.watching import WATCHER

    with lock(run) as descriptor:
        if descriptor is None:
            return None
        history.write_as(inventory, folder(run) / "inventory.json")
        work_folder(run).mkdir(mode=0o700, exist_ok=True)
        with open(folder(run) / "out", "wb") as out, open(folder(run) / "err", "wb") as err:
            return subprocess.Popen(
                [sys.executable, "-c", WATCHER, "--no-input", START, run],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=work_folder(run),
                start_new_session=True,
                pass_fds=[descriptor],
            )


def told(run: str) -> tuple[bool, str]:
    """(whether a launch that has ended said that it started the run, what it complained of)."""
    said = tail(folder(run) / "out")
    started = any(line.startswith('{"run":') for line in said.splitlines())
    return started, unnamed(run, complaint(tail(folder(run) / "err")))


def unnamed(run: str, words: str) -> str:
    """Without the places of this machine, which tell nothing to whoever handed the run in."""
    words = words.replace(str(work_folder(run)), "what was handed in").replace(
        str(env_file(run)), "its secrets"
    )
    return words.replace(str(folder(run)), "the service's folder")


def complaint(said: str) -> str:
    """What a command said that failed, without the notes before it; "" if it has not lived to say so."""
    lines = said.strip().splitlines()
    at = next((at for at, line in enumerate(lines) if line.startswith("error: ")), len(lines))
    return "\n".join(lines[at:]).removeprefix("error: ")


def tail(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - MOST_TOLD))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def asked(run: str) -> ask.Asked:
    """What its launch does, from what was remembered; called in the run's work folder."""
    found = row(run)
    inventory = history.read_as(Inventory, folder(run) / "inventory.json")
    if found is None or inventory is None:
        raise InputError(f"there is no queued run {run} here")
    said, work = found.submission, work_folder(run)
    snapshot = None
    if not is_trainer(said.command):
        if said.code and not any(work.iterdir()):
            bring_code(said.code, work)
        snapshot = codestore.snapshot(work)
    asked = ask.run(
        inventory,
        said.command,
        run=run,
        world=sum(found.slots.values()) or said.world,
        name=said.name,
        master_port=said.master_port,
        prefork=said.prefork,
        variables=said.variables,
        env_file=str(env_file(run)) if said.secrets else None,
        i_know=said.i_know,
        shared=said.shared,
        restarts=ask.Restarts(said.max_restarts, said.restart_delay, said.min_world),
        snapshot=snapshot,
    )
    return replace(asked, rooms=found.rooms)


def is_checked(run: str) -> bool:
    """Whether its hosts are looked at before it starts."""
    found = row(run)
    return found is None or not found.submission.skip_preflight


def bring_code(digest: str, work: Path) -> None:
    """Its own copy, whole or not at all."""
    if not codestore.has(digest):
        raise RingctlError(f"the code {digest[:12]} is not here any more", fix="hand the run in again")
    import shutil

    half = work.with_name("work.coming")
    shutil.rmtree(half, ignore_errors=True)
    codestore.copy(digest, half)
    work.rmdir()
    half.rename(work)
    os.chdir(work)  # we were in the one that was removed
