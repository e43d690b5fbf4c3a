"""Runs as lists and pages show them: rows without asking any host, and all that is known of one run."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Mapping, Sequence
from typing import Any

from launcher import compare, database, history, redact, tape
from launcher.errors import InputError
from launcher.logs import ranges
from launcher.model import RankState, RunState, to_json
from launcher.text import number
from launcher.told import figure, step_of

GOING_ON = ("starting", "running")
COLUMNS = (
    *("run", "name", "user", "state", "world", "attempt"),
    *("submitted", "started", "ended", "error", "fix", "place"),
)
WORDS = """
    SELECT r.run, r.name, r.user, r.state, r.world, r.attempt, r.hosts, r.submitted, r.started, r.ended,
        r.error, r.fix, r.command, r.summary, r.rowid AS place, q.why, q.priority, q.after, q.at
    FROM runs r LEFT JOIN queue q ON q.run = r.run"""
SEARCHED = ("r.run", "r.name", "r.user", "r.error", "r.state")
LISTS = ("r.hosts", "r.command")  # searched as well; they are JSON

# Rows come in the order in which runs were handed in: ids tell the clock, which may have been set back. One
# that is forgotten by now was beside the ids around it.
PLACE = """coalesce((SELECT rowid FROM runs WHERE run = ?),
    (SELECT max(rowid) + 1 FROM runs WHERE run < ?), 0)"""

# --- Rows ----------------------------------------------------------------------------------------


def rows(
    limit: int = 50,
    before: str | None = None,
    state: str | None = None,
    search: str = "",
    now: float | None = None,
) -> list[dict[str, Any]]:
    """The newest runs, or those before one; in one of these states (separated by commas), or with these words
    in what is known of them."""
    wanted, values = ["1"], []
    if before is not None:
        wanted.append(f"r.rowid < {PLACE}")
        values += [database.storable(before)] * 2
    if state:
        states = database.storable(state).split(",")
        wanted.append(f"r.state IN ({', '.join('?' * len(states))})")
        values += states
    sought = [database.storable(word.lower()) for word in search.split()]
    if sought:
        wanted.append(f"tells({', '.join((*LISTS, *SEARCHED))})")
    words = f"{WORDS} WHERE {' AND '.join(wanted)} ORDER BY r.rowid DESC LIMIT ?"

    def work(db: sqlite3.Connection) -> list[sqlite3.Row]:
        # SQLite itself knows only the capitals of English.
        db.create_function("tells", -1, lambda *columns: tells(sought, *columns), deterministic=True)
        return db.execute(words, (*values, limit)).fetchall()

    nothing: list[sqlite3.Row] = []
    found = history.ask(work, nothing)
    return [row_of(row, time.time() if now is None else now) for row in found]


def tells(sought: Sequence[str], hosts: str, command: str, *others: str) -> bool:
    """Whether all of these words, in small letters, are in what is known of a run."""
    lists = ("\n".join(json.loads(words)) if "\\" in words else words for words in (hosts, command))
    text = "\n".join((*lists, *others)).lower()
    return all(word in text for word in sought)


def row(run: str, now: float | None = None) -> dict[str, Any] | None:
    found = history.ask(lambda db: db.execute(f"{WORDS} WHERE r.run = ?", (run,)).fetchone(), None)
    return row_of(found, time.time() if now is None else now) if found else None


def rows_of(runs: Sequence[str]) -> list[dict[str, Any]]:
    """Those of these that are known, in this order."""
    if not runs:
        return []
    words = f"{WORDS} WHERE r.run IN ({', '.join('?' * len(runs))})"
    nothing: list[sqlite3.Row] = []
    found = history.ask(lambda db: db.execute(words, runs).fetchall(), nothing)
    now = time.time()
    known = {row["run"]: row_of(row, now) for row in found}
    return [known[run] for run in runs if run in known]


def row_of(row: sqlite3.Row, now: float) -> dict[str, Any]:
    """As the API tells it."""
    summary = json.loads(row["summary"])
    return {
        **{key: row[key] for key in COLUMNS},
        "hosts": json.loads(row["hosts"]),
        "command": json.loads(row["command"]),
        **{key: figure(key, summary.get(key)) for key in history.TOLD},
        "spark": summary.get("spark", []),
        "left_s": left_s(summary, row["attempt"], now) if row["state"] == "running" else None,
        "waiting": row["why"] or "" if row["state"] == "queued" else "",
        "priority": row["priority"] or 0,
        "after": row["after"] or "",
        "at": row["at"],
    }


def left_s(summary: Mapping[str, Any], attempt: int, now: float) -> float | None:
    """How long the rest of the steps takes at the pace of this attempt so far."""
    step, steps, at = (number(summary.get(key)) for key in ("step", "steps", "at"))
    began: list[float] = summary.get("since", [0, 0.0, 0])
    first = number(began[2])
    if step is None or steps is None or at is None or first is None:
        return None
    if began[0] != attempt or step <= first:
        return None
    pace = (at - began[1]) / (step - first)
    return round(max(0.0, (steps - step) * pace - max(0.0, now - at)), 1)


def count_states() -> dict[str, int]:
    """How many runs are in each state."""
    words = "SELECT state, count(*) AS number FROM runs GROUP BY state"
    nothing: list[sqlite3.Row] = []
    found = history.ask(lambda db: db.execute(words).fetchall(), nothing)
    return {row["state"]: row["number"] for row in found}


# --- One run -------------------------------------------------------------------------------------

AT_THE_MOMENT: Mapping[str, Any] = {"watched": "", "actions": []}  # known to a service; nothing to be kept


def detail(run: str, now: float | None = None, live: RunState | None = None) -> dict[str, Any] | None:
    """All that is known here of a run; `live` is what whoever records it knows. What only a service knows
    is left empty."""
    now = time.time() if now is None else now
    about = row(run, now)
    if about is None:
        return None
    record = history.read(run)
    if live is not None and record is not None and live.attempt < record.plan.attempt:
        live = None  # it is being recorded what a host has of an attempt before
    state = live or tape.folded(run) or (record.end if record else None)
    if state is not None and record is not None and state.attempt < record.plan.attempt:
        state = None  # of an attempt before
    plan = redact.shown(record.plan) if record else None
    cause = record.cause if record and record.end else None
    former = [host.name for host in record.former] if record else []
    tried, checked = tape.attempts(run), history.preflight_of(run)
    return {
        **about,
        "ranks": ranks(state, record, now),
        "attempts": tried if record is None or is_among(tried, record) else [*tried, attempt_of(record)],
        "cause": tape.told_cause(cause),
        "former": former,
        "unwritten": dict(state.unwritten) if state else {},
        "unended": [name for name in former if record and name in record.unended],
        "plan": to_json(plan) if plan else None,
        "options": compare.options_of(record) if record else {},
        "environment": environment(record),
        **AT_THE_MOMENT,
        "links": links(checked["pairs"] if checked else [], about["hosts"]),
        "preflight": checked,
    }


def links(pairs: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> list[dict[str, Any]]:
    """Between the hosts of a run, as far as they were measured."""
    told = ("from", "to", "latency_ms", "mbit_s")
    found = [{key: pair[key] for key in told} for pair in pairs if {pair["from"], pair["to"]} <= set(hosts)]
    return [link for link in found if (link["latency_ms"], link["mbit_s"]) != (None, None)]


def is_among(attempts: Sequence[Mapping[str, Any]], record: history.Record) -> bool:
    return any(each["attempt"] == record.plan.attempt for each in attempts)


def attempt_of(record: history.Record) -> dict[str, Any]:
    """The newest, which nobody has recorded."""
    end = record.end
    about = {"attempt": record.plan.attempt, "state": end.state if end else "starting"}
    times = {"started": record.started, "ended": end.ended if end else None}
    return {**about, **times, "world": record.plan.world, "cause": None, **tape.how_recorded("no")}


def ranks(state: RunState | None, record: history.Record | None, now: float) -> list[dict[str, Any]]:
    """What is known of each; of a run that nobody has heard of yet, where they will be."""
    if state is None:
        planned = record.plan.rank_hosts if record else {}
        return [rank_json(RankState(rank, host), now) for rank, host in planned.items()]
    return [rank_json(rank, now) for rank in state.ranks.values()]


def rank_json(rank: RankState, now: float) -> dict[str, Any]:
    known = ("rank", "host", "state", "pid", "exit_code", "signal", "reason")
    told = ("step", "loss", "samples_per_s", "step_ms", "comm_ms", "bytes_sent")
    return {
        **{key: getattr(rank, key) for key in known},
        "heartbeat_age_s": round(max(0.0, now - rank.seen), 3) if rank.seen else None,
        **{key: number(rank.metric.get(key)) for key in told},
        "step": step_of(rank.metric.get("step")),
    }


def environment(record: history.Record | None) -> dict[str, Any]:
    """Of each host: what its ranks run in."""
    found = {}
    for host in record.plan.hosts if record else ():
        env = host.ranks[0].env if host.ranks else {}
        found[host.host] = {
            "ranks": ranges(rank.rank for rank in host.ranks),
            "interface": env.get("GLOO_SOCKET_IFNAME", ""),
            "threads": env.get("OMP_NUM_THREADS", ""),
            "environment": f"{host.env.kind} {host.env.value}" if host.env else "",
            "folder": host.workdir,
        }
    return found


def compared(runs: Sequence[str]) -> dict[str, Any]:
    """Some runs side by side; InputError if there is no such one."""
    found, options = [], []
    for run in runs:
        about, record = row(run), history.read(run)
        if about is None:
            raise InputError(f"there is no run {run!r}", fix="ringctl runs list shows them")
        found.append(about)
        options.append(compare.options_of(record) if record else {})
    return {"runs": found, **compare.compare(found, options)}
