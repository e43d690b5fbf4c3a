"""What this controller has run: a row each in one SQLite file, to be found again from anywhere."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from launcher import database
from launcher.errors import NotKept, RingctlError
from launcher.fold import ENDED, newest_told, result
from launcher.model import Host, Inventory, Plan, RunState, from_json, to_json
from launcher.plan import LaunchOptions
from launcher.text import number
from launcher.told import figure
from launcher.wholefile import replace_whole, sync_folder

T = TypeVar("T")
UNREADABLE = (OSError, ValueError, TypeError, KeyError, RecursionError)
MOST_LAYOUTS = 50  # of a run; what hosts say of older attempts is not compared with any
TOLD = ("step", "steps", "epoch", "epochs", "loss", "accuracy", "samples_per_s", "parameters_sha256")
AGREED = ("accuracy", "parameters_sha256")  # of the whole run, and so of none where ranks tell others


@dataclass(frozen=True)
class Layout:
    """On which hosts ranks were planned, from an attempt on until there is another."""

    since: int
    rank_hosts: Mapping[int, str]


@dataclass(frozen=True)
class Record:
    """A run that was started from here, and the hosts it is on."""

    plan: Plan
    hosts: tuple[Host, ...]
    started: float
    inventory: Inventory
    options: LaunchOptions
    end: RunState | None = None  # how it ended, as far as somebody here has seen it
    cause: Mapping[str, Any] | None = None  # and what failed first, a diagnose.Cause, if that was looked for
    former: tuple[Host, ...] = ()  # hosts that only earlier attempts were on
    unended: tuple[str, ...] = ()  # those of them that have not said that nothing is left of it there
    layouts: tuple[Layout, ...] = ()  # oldest first, with that of the newest attempt

    def rank_hosts_in(self, attempt: int) -> Mapping[int, str] | None:
        """Where its ranks were planned; None for an attempt of which that is not known."""
        if attempt >= self.plan.attempt:
            return self.plan.rank_hosts if attempt == self.plan.attempt else None
        return next((old.rank_hosts for old in reversed(self.layouts) if old.since <= attempt), None)


def new_run_id() -> str:
    """Sorts by time, and ends in something short enough to tell apart at a glance."""
    return time.strftime("%Y%m%d-%H%M%S-", time.gmtime()) + os.urandom(2).hex()


def home() -> Path:
    """ringctl's folder on this machine."""
    return Path(os.environ.get("RINGCTL_HOME") or Path.home() / ".ringctl")


def file() -> Path:
    return home() / "history.db"


def make_folder(path: Path) -> None:
    """One below ringctl's own, for us alone."""
    try:
        for folder in (home(), path):  # `mode` is that of the last folder only
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise NotKept(f"{path}: cannot be made: {error.strerror}") from None


def need_room() -> None:
    """Raises NotKept where nothing could be remembered."""
    make_folder(home())
    try:
        with tempfile.TemporaryFile(dir=home()) as file:
            file.write(bytes(database.LEAST_ROOM))
            file.flush()
    except OSError as error:
        raise NotKept(f"{home()}: cannot be written: {error.strerror}") from None


# --- Runs ----------------------------------------------------------------------------------------


def remember(plan: Plan, inventory: Inventory, options: LaunchOptions) -> None:
    """Written before anything is started, so that even a killed launch can be found and stopped."""
    names = {host.host for host in plan.hosts}
    hosts = tuple(host for host in inventory.hosts if host.name in names)

    def work(db: sqlite3.Connection) -> None:
        before = record_of(db, plan.run)
        earlier = (*before.hosts, *before.former) if before else ()
        former = tuple(host for host in earlier if host.name not in names)
        unended = tuple(name for name in (before.unended if before else ()) if name not in names)
        # Then it is the last of them; see RECALL.
        db.execute("DELETE FROM records WHERE run = ?", (plan.run,))
        about = Record(plan, hosts, time.time(), inventory, options, former=former, unended=unended)
        put(db, replace(about, layouts=layouts_with(before, plan)))

    change(work)


def layouts_with(before: Record | None, plan: Plan) -> tuple[Layout, ...]:
    """Those that are known of the run; most attempts are where the one before was."""
    known = before.layouts if before else ()
    if before is not None and not known:  # an older version wrote it
        known = (Layout(before.plan.attempt, before.plan.rank_hosts),)
    if known and known[-1].rank_hosts == plan.rank_hosts:
        return known
    return (*known, Layout(plan.attempt, plan.rank_hosts))[-MOST_LAYOUTS:]


def note_ended(run: str, ended: Iterable[str], unended: Iterable[str] = ()) -> None:
    """These hosts have said that nothing is left of what they had of the run; those could not be asked."""

    def work(db: sqlite3.Connection) -> None:
        record = record_of(db, run)
        if record is not None:
            names = tuple(sorted({*record.unended, *unended} - set(ended)))
            if names != record.unended:
                db.execute(PUT_RECORD, (run, json.dumps(to_json(replace(record, unended=names)))))

    with contextlib.suppress(RingctlError):  # a full disk: they are asked again
        change(work)


def close(end: RunState, cause: Mapping[str, Any] | None = None) -> None:
    """The run is over, and this is how it ended; a cause that was found before stays as long as it can be
    one, and so does an end that all hosts told, whoever cannot hear them any more. Where nobody has found
    one, why it did not start, as it was `mark`ed, is all that is known."""

    def work(db: sqlite3.Connection) -> None:
        record = record_of(db, end.run)
        known = record.end if record else None
        if end.state == "lost" and known is not None and known.state in ENDED:
            return
        if record is not None and record.plan.attempt == end.attempt:
            marked = end.state not in ("succeeded", "stopped") and not record.cause
            put(db, replace(record, end=end, cause=cause or cause_by(record, end)), keep_words=marked)

    with contextlib.suppress(RingctlError):  # then the hosts are asked again the next time
        if file().exists() or old_folder().is_dir():
            change(work)


def cause_by(record: Record, end: RunState) -> Mapping[str, Any] | None:
    """What was found before to have failed first, if it can be that by this end: nothing has where the run
    succeeded or was stopped, nor a host that was away then, and has told by now how its ranks ended."""
    lost = record.end is not None and record.end.state == "lost"
    told = lost and end.state in ENDED and (record.cause or {}).get("rank") is None
    return None if told or end.state in ("succeeded", "stopped") else record.cause


def forget(run: str) -> None:
    """All that is known of it, also what was recorded."""

    def work(db: sqlite3.Connection) -> None:
        for table in ("runs", *database.OF_A_RUN):
            db.execute(f"DELETE FROM {table} WHERE run = ?", (run,))  # noqa: S608 - names of our own tables
        db.execute(FORGET_NOTE, (run,))

    change(work)


def write(record: Record) -> None:
    change(lambda db: put(db, record))


def recall(recent: int | None = None, like: str = "") -> list[Record]:
    """All of them, in the order in which they were started; one that cannot be read is left out. Only the
    `recent` ones and those that are not over, or only those that begin `like` this or have it as their name,
    if that is asked for."""
    nothing: list[str] = []
    limit = -1 if recent is None else recent
    like = database.storable(like)
    values = {"limit": limit, "like": like, "above": like + "\U0010ffff"}
    found = ask(lambda db: [row["record"] for row in db.execute(RECALL, values)], nothing)
    records = {record.plan.run: record for record in map(decoded, found) if record}
    return [*(record for run, record in old_records().items() if run not in records), *records.values()]


def read(run: str) -> Record | None:
    return ask(lambda db: record_of(db, run), None) or old_records().get(run)


# Started last is what was written last by `remember`, whatever the clock said then: the rowid tells.
RECALL = """
    SELECT record FROM runs JOIN records USING (run)
    WHERE (:like = '' OR name = :like OR (run >= :like AND run < :above))
        AND (:limit < 0 OR state IN ('starting', 'running', 'lost')
            OR run IN (SELECT run FROM records ORDER BY rowid DESC LIMIT :limit))
    ORDER BY records.rowid"""


def unstarted(like: str) -> list[tuple[str, str, tuple[Host, ...], float]]:
    """Runs that were handed in and have not come to a start, oldest first: id, name, no hosts, and when."""
    like = database.storable(like)
    values = {"like": like, "above": like + "\U0010ffff"}
    found: list[sqlite3.Row] = ask(lambda db: db.execute(UNSTARTED, values).fetchall(), [])
    return [(row["run"], row["name"], (), row["submitted"] or 0.0) for row in found]


UNSTARTED = """
    SELECT run, name, submitted FROM runs
    WHERE (name = :like OR (run >= :like AND run < :above)) AND run NOT IN (SELECT run FROM records)
    ORDER BY runs.rowid"""


def names() -> list[str]:
    """The ids of all runs, oldest first."""
    return ask(lambda db: [row["run"] for row in db.execute("SELECT run FROM runs ORDER BY run")], [])


def ask(work: database.Work[T], nothing: T) -> T:
    """What `work` finds in the history."""
    with contextlib.suppress(RingctlError):  # a disk that can only be read: they are read where they are
        take_in_old()
    return database.read(file(), work, nothing)


def change(work: database.Work[T], *, safe: bool = True) -> T:
    """All that `work` does, or nothing of it."""
    make_folder(home())
    take_in_old()
    return database.write(file(), work, safe=safe)


# --- Rows ----------------------------------------------------------------------------------------

PUT = """
    INSERT INTO runs (run, name, user, state, world, attempt, hosts, submitted, started, ended, error, fix,
        command, summary)
    VALUES (:run, :name, :user, :state, :world, :attempt, :hosts, :started, :started, :ended, :error, :fix,
        :command, :summary)
    ON CONFLICT (run) DO UPDATE SET name = :name, state = :state, world = :world, attempt = :attempt,
        hosts = :hosts, started = :started, ended = :ended, error = :error, fix = :fix, command = :command,
        summary = :summary"""
PUT_RECORD = "INSERT INTO records VALUES (?, ?) ON CONFLICT (run) DO UPDATE SET record = excluded.record"


def put(db: sqlite3.Connection, record: Record, *, keep_words: bool = False) -> None:
    """The run's row, in place of the one that was; who handed it in, and when, stays. So do the words for why
    it failed, if they are to be kept and there are no others."""
    plan, end, cause = record.plan, record.end, record.cause or {}
    told = db.execute("SELECT summary, error, fix FROM runs WHERE run = ?", (plan.run,)).fetchone()
    if told and keep_words and not cause:
        cause = {"text": told["error"], "fix": told["fix"]}
    values = {
        "run": plan.run,
        "name": plan.name,
        "user": own_name(),
        "state": end.state if end else "starting",
        "world": plan.world,
        "attempt": plan.attempt,
        "hosts": json.dumps([host.name for host in record.hosts]),
        "started": record.started,
        "ended": end.ended if end else None,
        "error": database.storable(str(cause.get("text") or "")) if end else "",
        "fix": database.storable(str(cause.get("fix") or "")) if end else "",
        "command": json.dumps(plan.command),
        "summary": json.dumps({**(json.loads(told["summary"]) if told else {}), **told_by(end)}),
    }
    db.execute(PUT, values)
    db.execute(PUT_RECORD, (plan.run, json.dumps(to_json(record))))


def told_by(end: RunState | None) -> dict[str, Any]:
    """What the ranks last said of how far they came; None where that is no figure, so that no earlier one
    seems to be it."""
    if end is None:
        return {}
    metrics = [rank.metric for rank in end.ranks.values()]
    first = {key: next((each[key] for each in newest_told(end) if key in each), None) for key in TOLD}
    whole = {key: result(end, key) for key in AGREED}
    told = {key: figure(key, value) for key, value in (first | whole).items()}
    speeds = [number(metric.get("samples_per_s")) for metric in metrics]
    told["samples_per_s"] = figure("samples_per_s", sum(filter(None, speeds))) or None
    return {key: value for key, value in told.items() if any(key in metric for metric in metrics)}


def own_name() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def record_of(db: sqlite3.Connection, run: str) -> Record | None:
    row = db.execute("SELECT record FROM records WHERE run = ?", (run,)).fetchone()
    return decoded(row["record"]) if row else None


def decoded(text: str) -> Record | None:
    """None for one that another version has written."""
    try:
        return from_json(Record, json.loads(text))
    except UNREADABLE:
        return None


def enlist(run: str, **about: Any) -> None:
    """A run that was handed in, and is not started yet; once more changes nothing."""
    change(lambda db: enlist_in(db, run, **about))


def enlist_in(
    db: sqlite3.Connection,
    run: str,
    *,
    name: str = "",
    user: str = "",
    world: int = 0,
    hosts: Sequence[str] = (),
    command: Sequence[str] = (),
    state: str = "queued",
) -> None:
    """The same, together with what else is written of it."""
    lists = (json.dumps(list(hosts)), json.dumps(list(command)))
    values = (run, name, user or own_name(), state, world, lists[0], time.time(), lists[1])
    db.execute(
        "INSERT INTO runs (run, name, user, state, world, attempt, hosts, submitted, command) "
        "VALUES (?, ?, ?, ?, ?, 1, ?, ?, ?) ON CONFLICT (run) DO NOTHING",
        values,
    )


def mark(run: str, state: str, *, error: str = "", fix: str = "", attempt: int | None = None) -> None:
    """How a run is that no host can tell of: it was cancelled, say, or never came to a start; only in this
    `attempt`, if that is said."""
    change(lambda db: mark_in(db, run, state, error, fix, attempt))


def mark_in(
    db: sqlite3.Connection, run: str, state: str, error: str = "", fix: str = "", attempt: int | None = None
) -> None:
    """The same, together with what else is written of it."""
    over = time.time() if state in ("failed", "cancelled", "stopped", "succeeded") else None
    words = """UPDATE runs SET state = ?, error = ?, fix = ?,
        ended = CASE WHEN ? IS NULL THEN NULL ELSE coalesce(ended, ?) END
        WHERE run = ? AND attempt = coalesce(?, attempt)"""
    said = map(database.storable, (error, fix))
    db.execute(words, (state, *said, over, over, run, attempt))


def mark_running(run: str, attempt: int) -> None:
    """Its hosts go on with this attempt; unless somebody knows more by now."""
    words = (
        "UPDATE runs SET state = 'running' WHERE run = ? AND attempt = ? AND state IN ('starting', 'lost')"
    )
    change(lambda db: db.execute(words, (run, attempt)))


def state_of(run: str) -> str:
    """As its row has it; "" for a run that is not there."""
    row = ask(lambda db: db.execute("SELECT state FROM runs WHERE run = ?", (run,)).fetchone(), None)
    return str(row["state"]) if row else ""


# --- Notes ---------------------------------------------------------------------------------------


def note(key: str, data: Any) -> None:
    """Keep the newest of its kind, such as the last preflight of an inventory."""
    values = (key, time.time(), json.dumps(data))
    change(lambda db: db.execute("INSERT OR REPLACE INTO notes VALUES (?, ?, ?)", values), safe=False)


def noted(key: str) -> tuple[float, Any] | None:
    """When it was noted, and what."""
    row = ask(lambda db: db.execute("SELECT time, data FROM notes WHERE key = ?", (key,)).fetchone(), None)
    return (row["time"], json.loads(row["data"])) if row else None


PREFLIGHT = "serve:preflight"  # what the service's last look at its hosts found
OF_RUN = "preflight:"  # what the launch of a run found, with its id behind
FORGET_NOTE = f"DELETE FROM notes WHERE key = '{OF_RUN}' || ?"  # noqa: S608 - our own word
NOTE_OF_RUN = "INSERT OR REPLACE INTO notes SELECT ?, ?, ? WHERE EXISTS (SELECT 1 FROM runs WHERE run = ?)"


def note_preflight(run: str, found: Any) -> None:
    """What was checked before a run started, or why it did not; only of a run that is remembered."""
    values = (OF_RUN + run, time.time(), json.dumps(found), run)
    with contextlib.suppress(RingctlError):  # a full disk: the run itself is what counts
        change(lambda db: db.execute(NOTE_OF_RUN, values), safe=False)


def preflight_of(run: str) -> dict[str, Any] | None:
    """What was found before it started. How fast the links are, which a launch does not measure, is what the
    service last found."""
    own, last = noted(OF_RUN + run), noted(PREFLIGHT)
    if own is None:
        return None
    known = {(pair["from"], pair["to"]): pair for pair in last[1]["pairs"]} if last else {}
    found = told_at(own)
    for pair in found["pairs"]:
        measured = {} if pair.get("problem") else known.get((pair["from"], pair["to"]), {})
        pair |= {key: measured.get(key) for key in ("latency_ms", "mbit_s") if pair[key] is None}
    return found


def told_at(noted: tuple[float, Any]) -> dict[str, Any]:
    when, data = noted
    return {"time": when, **{key: data[key] for key in ("ok", "checks", "pairs")}}


# --- What ringctl wrote before it had a database: a file a run -----------------------------------


def old_folder() -> Path:
    return home() / "history"


def old_records() -> dict[str, Record]:
    """Those of the files that can be read, oldest first."""
    try:
        paths = list(old_folder().glob("*.json")) if old_folder().is_dir() else []
    except OSError:
        return {}
    records = [record for record in (read_as(Record, path) for path in paths) if record]
    return {record.plan.run: record for record in sorted(records, key=lambda record: record.started)}


def take_in_old() -> None:
    """Make rows of the files, and only then remove them: whoever is killed in between does it again. An older
    ringctl that still runs may write new ones."""
    if not old_folder().is_dir():
        return
    make_folder(home())

    def work(db: sqlite3.Connection) -> list[Path]:
        records = old_records()
        for run, record in records.items():
            known = record_of(db, run)
            if known is None or is_later(record, known):
                put(db, record)
        return [old_folder() / f"{run}.json" for run in records]

    done = database.write(file(), work)
    try:
        for path in done:
            path.unlink(missing_ok=True)
        if list(old_folder().iterdir()):  # what nobody can read is nobody's to delete
            os.rename(old_folder(), home() / f"history.unread-{time.strftime('%Y%m%d-%H%M%S')}")
        else:
            old_folder().rmdir()
        sync_folder(home())
    except OSError:
        pass  # somebody else does it at the same time, or it is tried again the next time


def is_later(one: Record, other: Record) -> bool:
    known = (other.plan.attempt, other.end is not None)
    return (one.plan.attempt, one.end is not None) > known


# --- Files of others below our folder ------------------------------------------------------------


def write_as(record: Any, path: Path) -> None:
    """A record as JSON, in place of what was there, at once and for good."""
    make_folder(path.parent)
    try:
        replace_whole(path, json.dumps(to_json(record)).encode())
    except OSError as error:
        raise NotKept(f"{path}: cannot be written: {error.strerror}") from None


def read_as(kind: type[T], path: Path) -> T | None:
    """What `write_as` wrote; None if there is nothing that can be read."""
    try:
        return from_json(kind, json.loads(path.read_text()))
    except UNREADABLE:
        return None
