"""Forget runs that are over: which, and how their room is given back."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Mapping
from pathlib import Path

from launcher import codestore, database, history, queued, watching
from launcher.model import Inventory
from launcher.serve import reserving

LOST_S = 86400.0  # a run that is lost so long has ended, for want of its lease
LEFT_S = 3600.0  # what nobody knows is removed when it is so old
AT_ONCE = 50  # runs in one transaction: nobody waits for long
PAGES = 2000  # given back in one


KNOWN = """
    SELECT run, state, attempt, coalesce(ended, started, submitted, 0) AS moment,
        attempt > 1 AND EXISTS (
            SELECT 1 FROM records WHERE records.run = runs.run AND json_array_length(record, '$.unended') > 0
        ) AS unended,
        EXISTS (SELECT 1 FROM chunks WHERE chunks.run = runs.run) AS recorded
    FROM runs"""
ALL_RUNS = "SELECT run FROM runs UNION SELECT run FROM queue"
LOGS = ("chunks", "metrics", "series", "positions")
# Whoever has read the log that goes is to get what the next attempt says: its numbers go on from here.
KEEP_NUMBER = """
    UPDATE attempts SET upto = max(upto, (SELECT coalesce(max(last), 0) FROM chunks WHERE run = attempts.run))
    WHERE run = ?"""
LOCKS = ("lock", "again", "recording")  # of who starts, watches, restarts a run, and writes it down


def chosen(age: float | None, keep: int | None, now: float, *, logs_only: bool = False) -> dict[str, int]:
    """Runs that may go, oldest first, each with its newest attempt: older than so many seconds, and none of
    the newest `keep`."""
    nothing: list[sqlite3.Row] = []
    rows = history.ask(lambda db: db.execute(f"{KNOWN} ORDER BY rowid DESC").fetchall(), nothing)[keep or 0 :]
    old = [row for row in rows if age is None or row["moment"] < now - age]
    over = [row for row in old if is_over(row, now) and (row["recorded"] or not logs_only)]
    return {row["run"]: row["attempt"] for row in reversed(over) if not is_busy(row["run"])}


def is_over(row: sqlite3.Row, now: float) -> bool:
    if row["state"] == "lost" or row["unended"]:  # a host may still have something of it
        return bool(row["moment"] < now - LOST_S)
    return row["state"] in ("succeeded", "failed", "stopped", "cancelled")


def is_busy(run: str) -> bool:
    """Whether somebody may start it again, is about to, or is writing it down."""
    there = watching.is_watched(run) or watching.is_announced(run) or reserving.is_held(run)
    if there or watching.read(run) is not None:
        return True
    if not (watching.folder() / f"{run}.recording").exists():
        return False
    with watching.lock(run, "recording") as got:
        return not got


def forget(chosen: Mapping[str, int], *, logs_only: bool = False) -> list[str]:
    """Those of them that are as they were when they were chosen: which. Some at a time, so that whoever
    writes meanwhile need not wait for all; then give the room back."""
    runs, forgotten = list(chosen), list[str]()
    for at in range(0, len(runs), AT_ONCE):
        with contextlib.ExitStack() as held:
            free = {run: chosen[run] for run in runs[at : at + AT_ONCE] if is_had(run, held)}
            here = {run for run in free if was_here(run)}
            gone = history.change(deleting(free, logs_only=logs_only))
            for run in gone:
                remove_locks(run)
                if not logs_only:
                    remove_files(run, keep_work=run in here)
        forgotten += gone
    if not logs_only:
        sweep(LEFT_S)
    give_room_back()
    return forgotten


def sweep(age: float) -> None:
    """What belongs to no run, for whoever was to write its row, or to remove its folder, was killed: its
    secrets above all. Nothing younger than `age`, for it may be on its way."""
    before = time.time() - age
    names = [path.name for path in queued.folder("x").parent.glob("*") if is_older(path, before)]
    nothing: set[str] | None = None  # the database is not there, or was damaged: that tells nothing of runs
    known = history.ask(lambda db: {row["run"] for row in db.execute(ALL_RUNS)}, nothing)
    for run in names:
        if known is not None and run not in known and not queued.is_launching(run) and not is_busy(run):
            queued.remove_folder(run, keep_work=may_have_been_here(run))
    for path in codestore.store().glob(f"{codestore.COMING}*"):
        if is_older(path, before):
            codestore.remove_tree(path)
    queued.remove_unused_code()


def is_older(path: Path, moment: float) -> bool:
    """Whether it is a folder that nothing has come to since then."""
    try:
        return path.is_dir() and path.stat().st_mtime <= moment
    except OSError:  # it has just gone
        return False


def is_had(run: str, held: contextlib.ExitStack) -> bool:
    """Whether nobody starts, watches or records it, now and as long as this is `held`. Whoever is asked to
    start it again from now on has to wait for the lock, and then finds that it is forgotten."""
    locks = (watching.lock(run, what) for what in LOCKS)
    got = all(held.enter_context(lock) for lock in locks)
    return got and watching.read(run) is None and not reserving.is_held(run)


def deleting(chosen: Mapping[str, int], *, logs_only: bool) -> database.Work[list[str]]:
    """Whoever was asked whether they may go may have taken long to answer: it is looked at them again."""
    tables = LOGS if logs_only else ("runs", "queue", *database.OF_A_RUN)

    def work(db: sqlite3.Connection) -> list[str]:
        now, gone = time.time(), list[str]()
        for run, attempt in chosen.items():
            row = db.execute(f"{KNOWN} WHERE run = ?", (run,)).fetchone()
            if row is None or (is_over(row, now) and row["attempt"] == attempt):
                gone.append(run)
        if logs_only:
            db.executemany(KEEP_NUMBER, [(run,) for run in gone])
        for table in tables:
            db.executemany(f"DELETE FROM {table} WHERE run = ?", [(run,) for run in gone])  # noqa: S608 - names of our own tables
        if not logs_only:
            db.executemany(history.FORGET_NOTE, [(run,) for run in gone])
        return gone

    return work


def remove_files(run: str, *, keep_work: bool) -> None:
    with contextlib.suppress(OSError):
        (watching.folder() / f"{run}.log").unlink()
    queued.remove_folder(run, keep_work=keep_work)


def remove_locks(run: str) -> None:
    """They are ours meanwhile: see watching.lock."""
    for what in LOCKS:
        with contextlib.suppress(OSError):
            (watching.folder() / f"{run}.{what}").unlink()


def was_here(run: str) -> bool:
    """Whether its ranks ran on this machine, where they may have written results beside their code."""
    record = history.read(run)
    return record is not None and any(host.local for host in (*record.hosts, *record.former))


def may_have_been_here(run: str) -> bool:
    """The same of one that is forgotten, by what its launch was told."""
    told = history.read_as(Inventory, queued.folder(run) / "inventory.json")
    return told is None or any(host.local for host in told.hosts)


def give_room_back() -> None:
    """To the disk, some pages at a time."""
    free = 1
    while free:
        history.change(lambda db: db.execute(f"PRAGMA incremental_vacuum({PAGES})").fetchall())
        left = int(history.ask(lambda db: db.execute("PRAGMA freelist_count").fetchone()[0], 0))
        free = left if left < free or free == 1 else 0  # a file that was made without it keeps its size
