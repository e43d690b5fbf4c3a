"""Forget runs that are over: which, and how their room is given back."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Sequence

from launcher import database, history, queued, watching

LOST_S = 86400.0  # a run that is lost so long has ended, for want of its lease
AT_ONCE = 50  # runs in one transaction: nobody waits for long
PAGES = 2000  # given back in one


KNOWN = """
    SELECT run, state, coalesce(ended, started, submitted, 0) AS moment,
        EXISTS (SELECT 1 FROM chunks WHERE chunks.run = runs.run) AS recorded
    FROM runs ORDER BY run DESC"""
LOGS = ("chunks", "metrics", "series", "positions")


def chosen(age: float | None, keep: int | None, now: float, *, logs_only: bool = False) -> list[str]:
    """Runs that may go, oldest first: older than so many seconds, and none of the newest `keep`."""
    nothing: list[sqlite3.Row] = []
    rows = history.ask(lambda db: db.execute(KNOWN).fetchall(), nothing)[keep or 0 :]
    old = [row for row in rows if age is None or row["moment"] < now - age]
    over = [row["run"] for row in old if is_over(row, now) and (row["recorded"] or not logs_only)]
    return [run for run in reversed(over) if not is_busy(run)]


def is_over(row: sqlite3.Row, now: float) -> bool:
    if row["state"] == "lost":
        return bool(row["moment"] < now - LOST_S)
    return row["state"] in ("succeeded", "failed", "stopped", "cancelled")


def is_busy(run: str) -> bool:
    """Whether somebody may start it again, or is writing it down."""
    if watching.read(run) is not None or watching.is_watched(run):
        return True
    if not (watching.folder() / f"{run}.recording").exists():
        return False
    with watching.lock(run, "recording") as got:
        return not got


def forget(runs: Sequence[str], *, logs_only: bool = False) -> None:
    """Some at a time, so that whoever writes meanwhile need not wait for all; then give the room back."""
    tables = LOGS if logs_only else ("runs", "queue", *database.OF_A_RUN)
    here = set() if logs_only else {run for run in runs if was_here(run)}
    for at in range(0, len(runs), AT_ONCE):
        some = [(run,) for run in runs[at : at + AT_ONCE]]

        def work(db: sqlite3.Connection, some: list[tuple[str]] = some) -> None:
            for table in tables:
                db.executemany(f"DELETE FROM {table} WHERE run = ?", some)  # noqa: S608 - names of our own tables
            if not logs_only:
                db.executemany(history.FORGET_NOTE, some)

        history.change(work)
    for run in () if logs_only else runs:
        for ending in ("lock", "log", "recording"):
            with contextlib.suppress(OSError):
                (watching.folder() / f"{run}.{ending}").unlink()
        queued.remove_folder(run, keep_work=run in here)
    if not logs_only:
        queued.remove_unused_code()
    give_room_back()


def was_here(run: str) -> bool:
    """Whether its ranks ran on this machine, where they may have written results beside their code."""
    record = history.read(run)
    return record is not None and any(host.local for host in (*record.hosts, *record.former))


def give_room_back() -> None:
    """To the disk, some pages at a time."""
    free = 1
    while free:
        history.change(lambda db: db.execute(f"PRAGMA incremental_vacuum({PAGES})").fetchall())
        left = int(history.ask(lambda db: db.execute("PRAGMA freelist_count").fetchone()[0], 0))
        free = left if left < free or free == 1 else 0  # a file that was made without it keeps its size
