"""What was recorded of runs: their events, numbered from 1 in each run, in the same file as the history. No
number is given twice, also where what had it is forgotten (`runs prune --logs-only`).

Events are in compressed chunks of JSON lines; metrics also in rows, of which some are marked so that a long
series can be thinned without reading all of it. With the events of a transaction go the places up to which
each host's are taken, so that whoever goes on after a kill neither loses one nor records one twice.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import sqlite3
import sys
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from launcher import database, history
from launcher.errors import RingctlError
from launcher.fold import ASIDE
from launcher.follow import Place
from launcher.logs import found_in
from launcher.model import Event, RunState, from_json, to_json
from launcher.text import number
from launcher.told import figure, step_of

if TYPE_CHECKING:
    from launcher.watch import Outcome

Line = list[Any]  # [id, time, attempt, host, rank, stream, text]
Metric = list[Any]  # [id, time, attempt, rank, {...}]

CHUNK_BYTES = 64 << 10  # of JSON lines: a smaller chunk still grows
LARGEST_CHUNK = 1 << 20  # of many events that come at once: whoever wants few of them need not unpack all
LONGEST_METRIC = 8 << 10  # characters, as it is drawn and streamed; all of it is among the events
LEVEL = 1  # of zlib: the quickest, and a log shrinks to a tenth with it
FOLDED_S = 2.0  # how often the folded state is written down
SPARK = 40  # losses in a list
CHECKPOINT_PAGES = 4000
LOOK_BYTES = 32 << 20  # of log that one question looks through
MOST_BYTES = 1 << 20  # of events that it brings, as they are written down; the last of them may be longer
MOST_POINTS = 20_000  # of curves that it brings, of all ranks together
LAST_EVENTS = 100_000  # that may tell why a run failed
EARLIER_CHUNK = 500  # what a chunk counts for among the earlier ones
OUT, ERR, TELLING = 1, 2, 4  # flags of a chunk: lines of both streams, and what tells of a failure
WHOLE, WITH_A_GAP = 1, 2  # how an attempt that is over is recorded
RECORDED = {0: "part", WHOLE: "whole", WITH_A_GAP: "gap"}
ORDINARY, SCORED = 0, 1  # kinds of metrics: those with an accuracy are few, and none of them is to be missed
CURVES = ("loss", "accuracy", "samples_per_s", "step_ms", "comm_ms", "bytes_sent")
encode = json.JSONEncoder(separators=(",", ":")).encode
ESCAPE = encode("\x1b")[1:-1].encode()


class NotRecorded(RingctlError):
    """What happened could not be written down; whoever tries again goes on where it stopped."""


class Forgotten(NotRecorded):
    """There is no such run any more."""


# --- Pure: events as text ------------------------------------------------------------------------


def line_of(id_: int, event: Event) -> Line | None:
    """As the API tells it."""
    if event.kind != "line":
        return None
    return [id_, event.time, event.attempt, event.host, event.rank, event.data["stream"], event.data["text"]]


def numbered(id_: int, event: Event) -> dict[str, Any]:
    """As `logs --json` prints it, with its number; a record that has an `id` of its own, or `data`, is also
    in `data`, whole."""
    told = {"id": id_} | event.to_json() | {"id": id_}
    return told | {"data": event.data} if event.data.keys() & {"id", "data"} else told


def metric_of(id_: int, event: Event) -> Metric | None:
    """With null for what JSON has no word for, such as a loss that is not a number."""
    if event.kind != "metric":
        return None
    return [id_, event.time, event.attempt, event.rank, plain(event.data)]


def plain(data: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is no figure where there should be one; of a record that is out of all proportion, only
    what curves are drawn from."""
    known = {key: figure(key, value) for key, value in data.items() if key in history.TOLD}
    others = {key: number(value) if isinstance(value, float) else value for key, value in data.items()}
    if len(encode(others | known)) <= LONGEST_METRIC:
        return others | known
    return known | {key: number(data[key]) for key in CURVES if key in data}


def encoded(e: Event) -> bytes:
    """A JSON line. What is looked for first comes first."""
    return encode([e.kind, e.host, e.rank, e.attempt, e.time, e.data]).encode() + b"\n"


def portions(events: Iterable[Event]) -> Iterator[tuple[list[Event], bytes]]:
    """All of them in order, some at a time, with their text: as much of it as a chunk may have."""
    some: list[Event] = []
    rows: list[bytes] = []
    size = 0
    for event in events:
        row = encoded(event)
        if some and size + len(row) > LARGEST_CHUNK:
            yield some, b"".join(rows)
            some, rows, size = [], [], 0
        some.append(event)
        rows.append(row)
        size += len(row)
    if some:
        yield some, b"".join(rows)


def decoded(run: str, row: bytes) -> Event:
    kind, host, rank, attempt, when, data = json.loads(row)
    return Event(kind, when, run, attempt, host, rank, data)


def flags_of(events: Iterable[Event]) -> int:
    flags = 0
    for event in events:
        if event.kind == "line":
            flags |= OUT if event.data["stream"] == "out" else ERR
        elif event.kind != "metric":
            flags |= TELLING
    return flags


def level_of(ordinal: int) -> int:
    """How far a series can be thinned with this one left: of every 2**level one is."""
    return (ordinal & -ordinal).bit_length() - 1


@dataclass
class Summary:
    """What a list shows of a run, brought up to date by each metric."""

    told: dict[str, Any] = field(default_factory=dict)
    speeds: dict[int, float] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        data, rank = event.data, event.rank or 0
        speed = number(data.get("samples_per_s"))
        if speed is not None:
            self.speeds[rank] = speed
            self.told["samples_per_s"] = figure("samples_per_s", sum(self.speeds.values()))
        if rank != 0:
            return
        for key in history.TOLD:
            if key != "samples_per_s" and key in data:
                self.told[key] = figure(key, data[key])
        step, loss = step_of(data.get("step")), number(data.get("loss"))
        if step is not None:
            self.told["at"] = event.time
            if self.told.get("since", [0])[0] != event.attempt:
                self.told["since"] = [event.attempt, event.time, step]
        if loss is not None:
            self.draw(loss)

    def draw(self, loss: float) -> None:
        """Every n-th loss, and the newest; n doubles when there are too many."""
        told = self.told
        seen, every, spark = told.get("seen", 0), told.get("every", 1), told.get("spark", [])
        kept = spark[: -(-seen // every)]  # without the newest, if that is there only as such
        if len(kept) == SPARK:
            kept, every = kept[::2], every * 2
        told["seen"], told["every"] = seen + 1, every
        told["spark"] = [*kept, float(f"{loss:.5g}")]


# --- Writing -------------------------------------------------------------------------------------


class Tape:
    """Writes down one run; in the thread that made it, for it keeps the file open."""

    def __init__(self, run: str) -> None:
        self.run = run
        with told(history.file()):
            history.make_folder(history.home())
            self._db = database.opened(history.file())
            try:
                self._begin()
            except BaseException:
                self._db.close()
                raise

    def _begin(self) -> None:
        self._db.execute("PRAGMA synchronous=NORMAL")  # what a power cut takes is asked for again
        self._db.execute(f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}")
        self._db.execute(f"PRAGMA journal_size_limit={database.MOST_WAL}")
        ask = self._db.execute
        row = ask("SELECT summary FROM runs WHERE run = ?", (self.run,)).fetchone()
        self._summary = Summary(json.loads(row["summary"]) if row else {})
        chunk = ask("SELECT * FROM chunks WHERE run = ? ORDER BY first DESC LIMIT 1", (self.run,)).fetchone()
        upto = ask("SELECT coalesce(max(upto), 0) FROM attempts WHERE run = ?", (self.run,)).fetchone()
        self.last: int = upto[0]  # of a log that was pruned
        self._first, self._flags, self._open = self.last + 1, 0, b""
        if chunk is not None:
            self._first, self.last, self._flags = chunk["first"], chunk["last"], chunk["flags"]
            self._open = zlib.decompress(chunk["data"])
        counts = ask("SELECT attempt, rank, kind, count FROM series WHERE run = ?", (self.run,))
        self._counts = {(row["attempt"], row["rank"], row["kind"]): row["count"] for row in counts}
        self._folded, self._folded_at = (0, ""), 0.0  # what was last written down, and when

    def __enter__(self) -> Tape:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._db.close()

    def places(self, attempt: int) -> dict[str, Place]:
        """How far each host's events of this attempt are recorded."""
        words = "SELECT host, cursor, count FROM positions WHERE run = ? AND attempt = ?"
        found = {}
        for row in self._db.execute(words, (self.run, attempt)):
            (attempt_, segment, offset), before = json.loads(row["cursor"])
            found[row["host"]] = Place((attempt_, segment, offset), before, row["count"])
        return found

    def append(
        self, events: Sequence[Event], attempt: int, places: Mapping[str, Place], folded: RunState
    ) -> int:
        """Write down these events of an attempt, the places after them and what they amount to, all at once;
        the number of the first."""
        first = self.last + 1
        metrics = [(first + n, event) for n, event in enumerate(events) if event.kind == "metric"]
        for _, event in metrics:
            self._summary.add(event)
        now = folded.attempt, folded.state
        due = now != self._folded or time.monotonic() > self._folded_at + FOLDED_S
        with told(history.file()), database.transaction(self._db):
            chunk = self._chunk(events)
            counts = self._metrics(metrics)
            self._positions(attempt, places)
            if metrics or due:
                self._row(folded)
            if due:
                self._attempt(folded, first + len(events) - 1)
        self._first, self._flags, self._open = chunk
        self._counts |= counts
        self.last += len(events)
        if due:
            self._folded, self._folded_at = now, time.monotonic()
        return first

    def _chunk(self, events: Sequence[Event]) -> tuple[int, int, bytes]:
        """Into the last chunk as long as that is small: (its first number, flags, text)."""
        first, last, flags, text = self._first, self.last, self._flags, self._open
        for some, more in portions(events):
            if text and len(text) + len(more) <= CHUNK_BYTES:
                flags, text = flags | flags_of(some), text + more
            else:
                first, flags, text = last + 1, flags_of(some), more
            last += len(some)
            values = (self.run, first, last, flags, zlib.compress(text, LEVEL))
            self._db.execute("INSERT OR REPLACE INTO chunks VALUES (?, ?, ?, ?, ?)", values)
        return first, flags, text

    def _metrics(self, metrics: Sequence[tuple[int, Event]]) -> dict[tuple[int, int, int], int]:
        rows: list[tuple[Any, ...]] = []
        counts: dict[tuple[int, int, int], int] = {}
        last: dict[tuple[int, int, int], int] = {}
        for id_, event in metrics:
            data, rank, step = event.data, event.rank or 0, step_of(event.data.get("step"))
            key = event.attempt, rank, SCORED if "accuracy" in data else ORDINARY
            counts[key] = ordinal = counts.get(key, self._counts.get(key, 0)) + 1
            last[key] = id_
            where = (self.run, id_, event.attempt, rank, step, event.time)
            rows.append((*where, key[2], level_of(ordinal), encode(plain(data))))
        self._db.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
        self._db.executemany(
            "INSERT OR REPLACE INTO series VALUES (?, ?, ?, ?, ?, ?)",
            [(self.run, *key, count, last[key]) for key, count in counts.items()],
        )
        return counts

    def _positions(self, attempt: int, places: Mapping[str, Place]) -> None:
        rows = [
            (self.run, attempt, host, json.dumps([place.cursor, place.before]), place.taken)
            for host, place in places.items()
        ]
        self._db.executemany("INSERT OR REPLACE INTO positions VALUES (?, ?, ?, ?, ?)", rows)

    def _row(self, folded: RunState) -> None:
        """What lists show. How it ended is for `history.close` to say, which also knows why."""
        state = folded.state if folded.state in ("starting", "running") else None
        words = """UPDATE runs SET summary = ?, state = CASE WHEN ended IS NULL AND attempt = ?
            AND state IN ('starting', 'running', 'lost') THEN coalesce(?, state) ELSE state END
            WHERE run = ?"""
        done = self._db.execute(words, (json.dumps(self._summary.told), folded.attempt, state, self.run))
        if done.rowcount == 0:
            raise Forgotten(f"run {self.run} is not remembered any more")

    def _attempt(self, folded: RunState, upto: int, cause: str | None = None, over: int = 0) -> None:
        values = (
            *(self.run, folded.attempt, folded.state, folded.started, folded.ended, folded.world, cause),
            *(json.dumps(to_json(folded)), upto, over),
        )
        self._db.execute("INSERT OR REPLACE INTO attempts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values)

    def finish(self, outcome: Outcome, *, gap: bool = False) -> None:
        """An attempt is over, and all of it is recorded; or all but what a host still has, with a `gap`."""
        cause = json.dumps(to_json(outcome.cause)) if outcome.cause else None
        with told(history.file()), database.transaction(self._db):
            self._attempt(outcome.state, self.last, cause, WITH_A_GAP if gap else WHOLE)


@contextlib.contextmanager
def told(path: Any) -> Iterator[None]:
    """Whatever SQLite says, as one of our own errors."""
    try:
        yield
    except sqlite3.Error as error:
        raise NotRecorded(database.cannot_write(path, error).message) from None


# --- Reading -------------------------------------------------------------------------------------


def first(run: str) -> int | None:
    """The number of the oldest event; None where there is none, or all of them were forgotten."""
    words = "SELECT min(first) FROM chunks WHERE run = ?"
    found: int | None = history.ask(lambda db: db.execute(words, (run,)).fetchone()[0], None)
    return found


def last(run: str) -> int:
    """The number of the newest event."""
    words = "SELECT coalesce(max(last), 0) FROM chunks WHERE run = ?"
    return int(history.ask(lambda db: db.execute(words, (run,)).fetchone()[0], 0))


def events(run: str, after: int = 0, limit: int = 5000, most: int = sys.maxsize) -> list[tuple[int, Event]]:
    """Those that come next, in order; with the one that makes them `most` bytes they are enough."""
    return whole_chunks(run, after, limit, most)[:limit]


def whole_chunks(run: str, after: int, enough: int, most: int = sys.maxsize) -> list[tuple[int, Event]]:
    """Those that come next, to the end of the chunk with which they are enough, unless they are `most` bytes
    before. There, what was written down at a time ends, too, if it was not too much for one."""
    found: list[tuple[int, Event]] = []
    size = 0
    for first, rows in upwards(run, after):
        for id_, row in enumerate(rows, first):
            found.append((id_, decoded(run, row)))
            size += len(row)
            if size >= most:
                return found
        if len(found) >= enough:
            break
    return found


def events_of_kind(run: str, kind: str, after: int, limit: int) -> tuple[list[tuple[int, Event]], int, bool]:
    """Those of one kind that come next, neither lines nor metrics; what was looked through ends with this
    event; and whether there is more. Chunks without any such are not read."""
    found: list[tuple[int, Event]] = []
    head = b"[" + encode(kind).encode() + b","
    seen, size, newest = 0, 0, last(run)  # asked first: what comes meanwhile may not be looked at
    for first, rows in upwards(run, after, TELLING):
        for id_, row in enumerate(rows, first):
            if row.startswith(head):
                found.append((id_, decoded(run, row)))
                size += len(row)
                if len(found) == limit or size >= MOST_BYTES:
                    return found, id_, True
        after, seen = first + len(rows) - 1, seen + sum(map(len, rows))
        if seen > LOOK_BYTES:
            return found, after, True
    return found, max(after, newest), False


Chunks = Iterator[tuple[int, list[bytes]]]  # the number of the first, and the text of each


def upwards(run: str, after: int, flags: int = ~0) -> Chunks:
    """Those with one of these flags; or all, also of metrics alone, which have none. One that has grown since
    it was read comes once more, with what is new in it, before any that has begun since."""
    words = """SELECT first, data FROM chunks WHERE run = ?
        AND first >= (SELECT coalesce(max(first), 0) FROM chunks WHERE run = ? AND first <= ?)
        AND last > ? AND (flags | 8) & ? ORDER BY first LIMIT 1"""
    while chunk := one_chunk(words, (run, run, after + 1, after, flags)):
        first, rows = chunk
        new = max(first, after + 1)
        yield new, rows[new - first :]
        after = first + len(rows) - 1


def downwards(run: str, before: int, flags: int = ~0) -> Chunks:
    words = """SELECT first, data FROM chunks WHERE run = ? AND first < ? AND (flags | 8) & ?
        ORDER BY first DESC LIMIT 1"""
    while chunk := one_chunk(words, (run, before, flags)):
        yield chunk
        before = chunk[0]


def one_chunk(words: str, values: tuple[Any, ...]) -> tuple[int, list[bytes]] | None:
    """With a question of its own: nobody waits for whoever reads slowly."""
    row = history.ask(lambda db: db.execute(words, values).fetchone(), None)
    return (int(row["first"]), zlib.decompress(row["data"]).split(b"\n")[:-1]) if row else None


@dataclass(frozen=True)
class Page:
    """Some lines of a log."""

    lines: list[Line]
    first: int  # what is before this was not looked at
    last: int  # nor what is after this
    more: bool  # whether there is more that way


@dataclass(frozen=True)
class Wanted:
    """Which lines are looked for."""

    head: re.Pattern[bytes]
    since: float
    stream: str | None
    needle: bytes  # in lower case; b"" where the bytes tell nothing
    search: Callable[[str], object] | None

    def line(self, id_: int, row: bytes, run: str) -> Line | None:
        head = self.head.match(row)
        if not head or not self.may_be(row) or float(head["time"]) < self.since:
            return None
        line = line_of(id_, decoded(run, row))
        if line is None or (self.stream and line[5] != self.stream):
            return None
        return line if self.search is None or found_in(line[6], self.search) else None

    def may_be(self, row: bytes) -> bool:
        """By its bytes. A colour may cut the word that is looked for in two."""
        if self.stream and f'"stream":"{self.stream}"'.encode() not in row:
            return False
        return not self.needle or self.needle in row.lower() or ESCAPE in row


def wanted(
    rank: Collection[int] | None,
    host: Collection[str] | None,
    since: float,
    stream: str | None,
    search: str,
    regex: bool,
) -> Wanted:
    """Decides most by the bytes alone: decoding each line would take ten times as long."""
    hosts = "|".join(re.escape(encode(name)) for name in host) if host else r'"(?:[^"\\]|\\.)*"'
    ranks = "|".join(map(str, rank)) if rank else r"\w+"
    look: Callable[[str], object] | None = None
    if search:
        low = search.lower()
        look = re.compile(search).search if regex else lambda text: low in text.lower()
    head = re.compile(rf'\["line",(?:{hosts}),(?:{ranks}),\d+,(?P<time>[^,]+),'.encode())
    # Written as \u00c4, what is not ASCII has another lower case.
    needle = encode(search.lower())[1:-1].encode() if search.isascii() and not regex else b""
    return Wanted(head, since, stream, needle, look)


def lines(
    run: str,
    *,
    after: int | None = None,
    before: int | None = None,
    limit: int = 500,
    rank: Collection[int] | None = None,
    host: Collection[str] | None = None,
    since: float = -math.inf,
    stream: str | None = None,
    search: str = "",
    regex: bool = False,
) -> Page:
    """The newest lines, those just `before` an event, or those that come `after` one. Only so much of the log
    is looked through at a time, and brought: there may be `more` also where few are found. Those `since` a
    moment are not only the last: what a host that was away has said comes late."""
    look = wanted(rank, host, since, stream, search, regex)
    flags = {"out": OUT, "err": ERR}.get(stream or "", OUT | ERR)
    if after is not None:
        return page_up(run, upwards(run, after, flags), look, after, limit)
    newest = last(run)
    top = newest + 1 if before is None else min(before, newest + 1)
    return page_down(run, downwards(run, top, flags), look, top, limit)


def page_down(run: str, chunks: Chunks, look: Wanted, top: int, limit: int) -> Page:
    found: list[Line] = []
    seen = size = 0
    for first, rows in chunks:
        for id_ in range(min(first + len(rows), top) - 1, first - 1, -1):
            line = look.line(id_, rows[id_ - first], run)
            if line is not None:
                found.append(line)
                size += len(rows[id_ - first])
                if len(found) == limit or size >= MOST_BYTES:
                    return Page(found[::-1], id_, top - 1, more=id_ > 1)
        seen += sum(map(len, rows))
        if seen > LOOK_BYTES:
            return Page(found[::-1], first, top - 1, more=first > 1)
    return Page(found[::-1], 1, top - 1, more=False)


def page_up(run: str, chunks: Chunks, look: Wanted, after: int, limit: int) -> Page:
    found: list[Line] = []
    seen, size, end, newest = 0, 0, after, last(run)  # asked first: what comes meanwhile may not be looked at
    for first, rows in chunks:
        for id_, row in enumerate(rows, first):
            line = look.line(id_, row, run)
            if line is not None:
                found.append(line)
                size += len(row)
                if len(found) == limit or size >= MOST_BYTES:
                    return Page(found, after + 1, id_, more=True)
        end, seen = first + len(rows) - 1, seen + sum(map(len, rows))
        if seen > LOOK_BYTES:
            return Page(found, after + 1, end, more=True)
    return Page(found, after + 1, max(end, newest), more=False)


# --- Metrics -------------------------------------------------------------------------------------


def metrics(run: str, after: int = 0, limit: int = 5000) -> list[Metric]:
    """Those that come next, in order."""
    words = "SELECT id, time, attempt, rank, data FROM metrics WHERE run = ? AND id > ? ORDER BY id LIMIT ?"
    nothing: list[sqlite3.Row] = []
    rows = history.ask(lambda db: db.execute(words, (run, after, limit)).fetchall(), nothing)
    return [[*tuple(row)[:4], json.loads(row["data"])] for row in rows]


def series(run: str, points: int = 400) -> dict[str, Any]:
    """Curves of each rank and attempt, of about so many points each; of fewer where there are many curves."""
    nothing: list[sqlite3.Row] = []
    rows = history.ask(lambda db: thinned(db, run, points), nothing)
    curves: dict[tuple[int, int], dict[str, Any]] = {}
    newest = 0
    for row in sorted(rows, key=lambda row: cast(int, row["id"])):
        key = row["attempt"], row["rank"]
        if key not in curves:
            curves[key] = {"rank": key[1], "attempt": key[0], "step": [], "time": []} | {
                name: [] for name in CURVES
            }
        curve, data = curves[key], json.loads(row["data"])
        curve["step"].append(row["step"])
        curve["time"].append(row["time"])
        for name in CURVES:
            curve[name].append(number(data.get(name)))
        newest = row["id"]
    return {"last": newest, "series": [curves[key] for key in sorted(curves)]}


def thinned(db: sqlite3.Connection, run: str, points: int) -> list[sqlite3.Row]:
    """Of each series every 2**n-th, and the last."""
    longest = "SELECT attempt, kind, max(count) AS most FROM series WHERE run = ? GROUP BY attempt, kind"
    some = """SELECT id, time, attempt, rank, step, data FROM metrics
        WHERE run = ? AND attempt = ? AND kind = ? AND level >= ?"""
    final = """SELECT id, time, m.attempt, m.rank, step, data FROM series s JOIN metrics m
        ON m.run = s.run AND m.id = s.last WHERE s.run = ?"""
    found = {row["id"]: row for row in db.execute(final, (run,))}
    points = min(points, MOST_POINTS // max(len(found), 1))
    for attempt, kind, most in db.execute(longest, (run,)).fetchall():
        level = max(0, -(-most // max(points, 1)) - 1).bit_length()
        found |= {row["id"]: row for row in db.execute(some, (run, attempt, kind, level))}
    return list(found.values())


# --- Attempts ------------------------------------------------------------------------------------


def attempts(run: str) -> list[dict[str, Any]]:
    """Each of them, as far as it was recorded; with a `gap`, a host has more of its log, and could not be
    heard or read."""
    nothing: list[sqlite3.Row] = []
    words = "SELECT * FROM attempts WHERE run = ? ORDER BY attempt"
    rows = history.ask(lambda db: db.execute(words, (run,)).fetchall(), nothing)
    shown = ("attempt", "state", "started", "ended", "world")
    causes = [told_cause(json.loads(row["cause"]) if row["cause"] else None) for row in rows]
    return [
        {**{key: row[key] for key in shown}, "cause": cause, **how_recorded(RECORDED[row["over"]])}
        for row, cause in zip(rows, causes, strict=True)
    ]


def how_recorded(how: str) -> dict[str, Any]:
    """Whole, with a gap, a part so far, or not at all ("no")."""
    return {"recorded": how, "gap": how == "gap"}


def told_cause(cause: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A diagnose.Cause, as it is told to others."""
    told = ("text", "fix", "rank", "host", "lines", "trace", "known")
    return {key: cause[key] for key in told if key in cause} if cause else None


def folded(run: str, attempt: int = 0) -> RunState | None:
    """The state of an attempt, or of the newest, as it was last written down."""
    words = """SELECT folded FROM attempts WHERE run = ? AND ? IN (attempt, 0)
        ORDER BY attempt DESC LIMIT 1"""
    row = history.ask(lambda db: db.execute(words, (run, attempt)).fetchone(), None)
    try:
        return from_json(RunState, json.loads(row["folded"])) if row else None
    except history.UNREADABLE:
        return None


def unfolded(run: str, attempt: int) -> list[Event]:
    """What has happened in an attempt since its state was last written down, but for lines. (That of an
    earlier one may have been written down again since, if a host came back: it says nothing of this one.)"""
    words = "SELECT upto FROM attempts WHERE run = ? AND attempt <= ? ORDER BY attempt DESC LIMIT 1"
    known = history.ask(lambda db: db.execute(words, (run, attempt)).fetchone(), None)
    found = [
        decoded(run, row)
        for _, rows in upwards(run, known["upto"] if known else 0)
        for row in rows
        if not row.startswith(b'["line"')
    ]
    return [event for event in found if event.attempt == attempt]


def last_words(run: str, attempt: int) -> list[Event]:
    """The newest events of an attempt, as many as say why it failed; and, of those before them, what was said
    on stderr or tells of a failure. In order."""
    if folded(run, attempt) is None:
        return []  # it has none yet: nobody need look through those of the attempt before
    found: list[list[Event]] = []
    rest = LAST_EVENTS
    flags, before = ~0, last(run) + 1
    while rest > 0:
        first, rows = next(downwards(run, before, flags), (0, []))
        if not rows:
            break
        its = [event for row in rows if (event := decoded(run, row)).attempt == attempt]
        found.append([e for e in its if flags == ~0 or (e.kind in ASIDE and e.data.get("stream") != "out")])
        # One with none of its events is passed: what a host that was away has of another attempt comes late.
        before, rest = first, rest - (len(its) if its and flags == ~0 else EARLIER_CHUNK)
        if rest <= 0 and flags == ~0:
            flags, rest = ERR | TELLING, LAST_EVENTS
    return [event for chunk in reversed(found) for event in chunk]


def is_recorded(run: str, attempt: int) -> bool:
    """Whether all of an attempt is."""
    words = "SELECT 1 FROM attempts WHERE run = ? AND attempt = ? AND over = ?"
    return bool(history.ask(lambda db: db.execute(words, (run, attempt, WHOLE)).fetchone(), None))
