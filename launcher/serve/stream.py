"""Server-sent events. What all readers of a run get is encoded once; a reader that is slow, or was away, is
served from the tape at its own pace, so nothing is lost and nobody waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool

from launcher import listing, tape, watching
from launcher.model import Event
from launcher.serve.call import Answer, Call, Refused, to_bytes
from launcher.serve.limits import MOST_STREAMS, MOST_STREAMS_EACH

if TYPE_CHECKING:
    from launcher.recorder import Batch
    from launcher.serve.service import Service

HEARTBEAT_S = 10.0
LOOK_S = 1.0  # at the latest
PAUSE_S = 0.02  # after something has come: more tends to come at once, and larger blocks cost less
DETAIL_S, DETAIL_AGAIN_S = 0.3, 5.0  # how often a run's state is looked at, and told though it is the same
OLD_S = 2.0  # how old it may be by then, if looking takes long
NOW_S = 0.5  # how often a reader is told the time, by which it sees whether it keeps up
OVERVIEW_S = 0.5
LEFT_S = 30.0  # so long a run is looked at that has left the first screen: its last figures may come late
MOST_GONE = 1000  # forgotten runs that a reader is told of who was held up meanwhile
ENOUGH_EVENTS = 4000  # for one block
MOST_BLOCK = 2 << 20  # bytes of one that is encoded as it comes
MOST_KEPT = 8 << 20  # bytes of blocks kept for other readers
OVER = ("succeeded", "failed", "stopped", "lost", "cancelled")
STAYS = ("plan", "preflight", "links")  # what is large, and the same until the next attempt
HEARTBEAT = b": still here\n\n"
END = b"event: end\ndata: {}\n\n"


def framed(name: str, data: bytes, number: int | None = None) -> bytes:
    head = f"event: {name}\n" if number is None else f"event: {name}\nid: {number}\n"
    return b"".join((head.encode(), b"data: ", data, b"\n\n"))


@dataclass(frozen=True)
class Block:
    """Some events of a run, as they are sent."""

    last: int  # the number of the last of them
    data: bytes


def encoded(events: Sequence[tuple[int, Event]]) -> Block:
    """Metrics come before the lines, and the id after all: whoever is cut off in between gets both again."""
    lines = [line for number, event in events if (line := tape.line_of(number, event))]
    metrics = [metric for number, event in events if (metric := tape.metric_of(number, event))]
    last, parts = events[-1][0], []
    if metrics:
        parts.append(framed("metrics", to_bytes(metrics), None if lines else last))
    if lines:
        parts.append(framed("lines", to_bytes(lines), last))
    return Block(last, b"".join(parts) or f"id: {last}\n\n".encode())


def is_small(events: Sequence[Event]) -> bool:
    """Whether they are to be one block."""
    return sum(map(most_bytes, events)) <= MOST_BLOCK


def most_bytes(event: Event) -> int:
    """As streamed. Of a character that is not ASCII six are sent."""
    if event.kind == "line":
        return 6 * len(event.data["text"])
    return min(6 * len(str(event.data)), tape.LONGEST_METRIC) if event.kind == "metric" else 0


@dataclass(frozen=True)
class Told:
    """Something that is told again when it has changed."""

    version: int
    at: float
    data: bytes
    bare: bytes = b""  # for whoever may not change the run: without what can be done with it
    over: bool = False


class Live:
    """What the readers of all streams share. Used in the event loop only, but for what says otherwise."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.closing = asyncio.Event()
        self.streams = 0
        self.of_user: Counter[str] = Counter()
        self.of_run: Counter[str] = Counter()  # only those that somebody reads
        self._loop = asyncio.get_running_loop()
        self._news: dict[str, asyncio.Event] = {}
        self._heads: dict[str, int] = {}  # the newest event of runs that are being recorded
        self._blocks: OrderedDict[tuple[str, int], asyncio.Future[Block]] = OrderedDict()
        self._kept = 0
        self._details: dict[str, asyncio.Future[Told]] = {}
        self._newest: dict[str, tuple[Told, Any]] = {}
        self.overview = Overview(service)

    # --- from the recording threads ---

    def batch(self, batch: Batch) -> None:
        """Called by a recorder after its commit. Encoded here, once, if anybody reads the run: also whoever
        is a little behind comes to just this, which costs much less than to read it from the tape. Unless it
        is very much: then each reads some of it at a time."""
        block = None
        if batch.events and batch.run in self.of_run and is_small(batch.events):
            block = encoded(list(enumerate(batch.events, start=batch.first)))
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
            self._loop.call_soon_threadsafe(self._heard, batch, block)

    def changed(self, run: str) -> None:
        """Something else than its events is new; from any thread."""
        with contextlib.suppress(RuntimeError):  # as above
            self._loop.call_soon_threadsafe(self._changed, run)

    def _heard(self, batch: Batch, block: Block | None) -> None:
        key = batch.run, batch.first - 1
        before = self._blocks.get(key)
        if block is not None and (before is None or not before.done()):  # else it is the same
            done: asyncio.Future[Block] = self._loop.create_future()
            done.set_result(block)
            self._keep(key, done)
        self._heads[batch.run] = batch.first + len(batch.events) - 1
        if batch.over:
            del self._heads[batch.run]
        self._tell(batch.run)

    def _changed(self, run: str) -> None:
        self._heads.pop(run, None)  # perhaps nobody records it any more
        self._tell(run)

    def _tell(self, run: str) -> None:
        news = self._news.pop(run, None)
        if news is not None:
            news.set()

    def close_soon(self) -> None:
        """From a signal's handler."""
        self._loop.call_soon_threadsafe(self.close)

    def close(self) -> None:
        """Every stream ends."""
        self.closing.set()
        for news in self._news.values():
            news.set()
        self._news.clear()

    # --- for the readers ---

    def news(self, run: str) -> asyncio.Event:
        """Is set when something comes; asked for before looking, so that nothing comes in between."""
        if run not in self._news:
            self._news[run] = asyncio.Event()
        return self._news[run]

    async def block(self, run: str, after: int, *, sure: bool = False) -> Block | None:
        """What comes after an event; None if nothing does yet. To be `sure` the tape is asked, not only its
        recorder believed: also whether it still has what is kept here. (Nobody prunes what is recorded.)"""
        if sure and (run, after) in self._blocks:
            self._drop_pruned(run, await run_in_threadpool(tape.first, run))
        found = self._blocks.get((run, after))
        if found is None:
            if after == self._heads.get(run) and not sure:
                return None
            found = asyncio.ensure_future(run_in_threadpool(read_block, run, after))
            self._keep((run, after), found)
        block = await asyncio.shield(found)
        if block.last == after:
            self._forget((run, after), found)
            return None
        return block

    def _drop_pruned(self, run: str, first: int | None) -> None:
        """What is before the `first` event that the tape has; all of it if it has none."""
        for key, future in list(self._blocks.items()):
            if key[0] == run and (block := made(future)) and (first is None or block.last < first):
                self._forget(key, future)

    def _keep(self, key: tuple[str, int], future: asyncio.Future[Block]) -> None:
        self._blocks[key] = future
        future.add_done_callback(lambda done: self._count(key, done))

    def _count(self, key: tuple[str, int], done: asyncio.Future[Block]) -> None:
        if self._blocks.get(key) is not done:
            return
        block = made(done)
        if block is None:
            del self._blocks[key]
            return
        self._kept += len(block.data)
        while self._kept > MOST_KEPT and len(self._blocks) > 1:
            first = next(iter(self._blocks))
            self._forget(first, self._blocks[first])

    def _forget(self, key: tuple[str, int], future: asyncio.Future[Block]) -> None:
        if self._blocks.get(key) is future:
            del self._blocks[key]
            if block := made(future):
                self._kept -= len(block.data)

    def known(self, run: str) -> Told | None:
        """How the run was a moment ago. Then somebody looks again beside, and says if it is another: lines do
        not wait for that."""
        told, _ = self._newest.get(run, (None, None))
        age = time.monotonic() - told.at if told else OLD_S
        if told is None or age >= (DETAIL_S if told.over else OLD_S):  # it may have been started again
            return None
        if age > DETAIL_S:
            self._begin_look(run).add_done_callback(lambda done: done.cancelled() or done.exception())
        return told

    async def detail(self, run: str) -> Told:
        """How the run is; looked up at most every DETAIL_S, for all readers."""
        return await asyncio.shield(self._begin_look(run))

    def _begin_look(self, run: str) -> asyncio.Future[Told]:
        found = self._details.get(run)
        if found is None or (found.done() and time.monotonic() - told_at(found) > DETAIL_S):
            found = self._details[run] = asyncio.ensure_future(self._look(run))
        return found

    async def _look(self, run: str) -> Told:
        detail, over = await run_in_threadpool(self.service.detail_and_over, run)
        before, known = self._newest.get(run, (None, None))
        same = steady(detail)
        version = (before.version if before else 0) + (same != known)
        data, bare = (framed("run", each) for each in for_readers(detail))
        told = Told(version, time.monotonic(), data, bare, over)
        self._newest[run] = (told, same)
        if over or not before or version != before.version:
            self._tell(run)
        if len(self._newest) > 4 * MOST_STREAMS:
            self._newest.clear()
            self._details.clear()
        return told


def made(future: asyncio.Future[Block]) -> Block | None:
    """None while it is being read, or if that failed."""
    good = future.done() and not future.cancelled() and future.exception() is None
    return future.result() if good else None


def for_readers(detail: dict[str, Any] | None) -> tuple[bytes, bytes]:
    """For those who may change the run, and for the others."""
    if detail is None:
        return b"null", b"null"
    light = {key: value for key, value in detail.items() if key not in STAYS}
    whole = to_bytes(light)
    return whole, to_bytes({**light, "actions": []}) if light["actions"] else whole


def told_at(done: asyncio.Future[Told]) -> float:
    return 0.0 if done.cancelled() or done.exception() else done.result().at


def steady(detail: Any) -> Any:
    """Without what changes by the mere passing of time."""
    if not isinstance(detail, dict):
        return detail
    ranks = [{**rank, "heartbeat_age_s": None} for rank in detail.get("ranks", ())]
    watched = watching.steady(detail.get("watched", ""))
    return {**detail, "ranks": ranks, "left_s": None, "watched": watched}


def read_block(run: str, after: int) -> Block:
    """To where a batch ended: whoever has caught up goes on with what is encoded for all."""
    events = tape.whole_chunks(run, after, ENOUGH_EVENTS, tape.MOST_BYTES)
    return encoded(events) if events else Block(after, b"")


# --- One run -------------------------------------------------------------------------------------


async def of_run(call: Call) -> Answer:
    run = call.path["run"]
    row = await run_in_threadpool(listing.row, run)
    if row is None:
        raise Refused(404, f"there is no run {run[:64]!r}")
    after, live, changes = start_after(call), call.service.live, call.may_change(row)
    return streamed(call, lambda: follow_run(live, run, after, changes), run)


def start_after(call: Call) -> int:
    """Where a reader goes on: the header of a browser that comes back goes before the address."""
    header = call.headers.get("last-event-id", "")
    if header.isascii() and header.isdigit() and len(header) < 16:
        return int(header)
    return int(call.query.get("after") or 0)


def streamed(call: Call, events: Callable[[], AsyncIterator[bytes]], run: str = "") -> Answer:
    live = call.service.live
    who = call.who.name if call.who else ""
    if live.streams >= MOST_STREAMS or live.of_user[who] >= MOST_STREAMS_EACH:
        raise Refused(503, "too many streams are open", "close a page", {"Retry-After": "5"})
    live.streams += 1  # before anybody else is asked: many may come at once
    live.of_user[who] += 1
    live.of_run[run] += 1

    def done() -> None:
        live.streams -= 1
        live.of_user[who] -= 1
        live.of_run[run] -= 1
        if not live.of_run[run]:
            del live.of_run[run]

    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    kind = "text/event-stream"
    return Answer(None, kind=kind, headers=headers, stream=while_allowed(call, events()), done=done)


async def while_allowed(call: Call, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """As long as the reader may still look."""
    checked = time.monotonic()
    yield b"retry: 1000\n\n"
    async for data in events:
        yield data
        if time.monotonic() - checked > HEARTBEAT_S:
            if not await run_in_threadpool(call.service.still_may, call):
                return
            checked = time.monotonic()


async def follow_run(live: Live, run: str, after: int, changes: bool) -> AsyncIterator[bytes]:
    """All that is known of a run after an event, and all that comes, to its end. `changes`: for somebody who
    may stop it and start it again."""
    version, told_at, heard, timed, sure = -1, 0.0, time.monotonic(), 0.0, True
    while not live.closing.is_set():
        news = live.news(run)
        # Before the block: if it is over, nothing comes after the block.
        detail = (live.known(run) if version >= 0 else None) or await live.detail(run)
        now = time.monotonic()
        block = await live.block(run, after, sure=sure or detail.over)
        sure = False
        if detail.version != version or now - told_at > DETAIL_AGAIN_S:
            version, told_at, heard = detail.version, now, now
            yield detail.data if changes else detail.bare
        if block is not None:
            if now - timed > NOW_S:
                timed = now
                yield framed("now", to_bytes(time.time()))
            after, heard = block.last, now
            yield block.data
            continue  # at once: whoever is behind is to catch up
        if detail.over:
            yield END
            return
        if now - heard > HEARTBEAT_S:
            heard = now
            yield HEARTBEAT
        sure = not await first_of(news.wait(), LOOK_S)
        await asyncio.sleep(PAUSE_S)


async def first_of(waiting: Awaitable[Any], seconds: float) -> bool:
    """Whether it came in time."""
    with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
        await asyncio.wait_for(waiting, seconds)
        return True
    return False


# --- All runs ------------------------------------------------------------------------------------


class Overview:
    """The rows of the first screen, and the hosts; each change has a number. What leaves the screen is told
    once more: how it ended, or that it is gone."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.version = 0
        self._rows: dict[str, tuple[int, dict[str, Any]]] = {}
        self._left: dict[str, float] = {}  # until when those are looked at that are not on it any more
        self._gone: dict[str, int] = {}  # runs that nobody knows any more
        self._hosts: tuple[int, list[dict[str, Any]]] = (0, [])
        self._looked = 0.0
        self._looking = asyncio.Lock()
        self._sent: OrderedDict[int, tuple[int, bytes]] = OrderedDict()

    async def look(self) -> None:
        """At most every OVERVIEW_S, whoever asks."""
        async with self._looking:
            if time.monotonic() - self._looked < OVERVIEW_S:
                return
            now = time.monotonic()
            known = [run for run in self._rows if self._left.get(run, now) >= now]
            first, left, hosts = await run_in_threadpool(self._read, known)
            self._looked = time.monotonic()
            self._left = {row["run"]: self._left.get(row["run"], now + LEFT_S) for row in left}
            self._take([*first, *left], known)
            if hosts != self._hosts[1]:
                self.version += 1
                self._hosts = (self.version, hosts)

    def _read(self, known: Sequence[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[Any]]:
        """The rows of the first screen; those of known runs that are not on it; and the hosts."""
        first = self.service.first_rows()
        there = {row["run"] for row in first}
        return first, listing.rows_of([run for run in known if run not in there]), self.service.host_rows()

    def _take(self, rows: Sequence[dict[str, Any]], known: Sequence[str]) -> None:
        found = {row["run"]: row for row in rows}
        changed = {run for run, row in found.items() if self._known(row) != untimed(row)}
        gone = [run for run in known if run not in found]
        if changed or gone:
            self.version += 1
        self._rows = {
            run: (self.version if run in changed else self._rows[run][0], row) for run, row in found.items()
        }
        self._gone = {run: number for run, number in self._gone.items() if run not in found}
        self._gone |= dict.fromkeys(gone, self.version)
        while len(self._gone) > MOST_GONE:
            del self._gone[next(iter(self._gone))]

    def _known(self, row: dict[str, Any]) -> Any:
        found = self._rows.get(row["run"])
        return untimed(found[1]) if found else None

    def since(self, version: int) -> bytes:
        """What has changed after it, encoded once for all who have seen as much; b"" for nothing."""
        if version == self.version:
            return b""
        kept = self._sent.get(version)
        if kept is not None and kept[0] == self.version:
            return kept[1]
        rows = [row for number, row in self._rows.values() if number > version]
        parts = [framed("runs", to_bytes(rows))] if rows else []
        if gone := [run for run, number in self._gone.items() if number > version >= 0]:
            parts.append(framed("gone", to_bytes(gone)))
        if self._hosts[0] > version:
            parts.append(framed("hosts", to_bytes(self._hosts[1])))
        data = b"".join(parts)
        self._sent[version] = (self.version, data)
        while len(self._sent) > 64:
            self._sent.popitem(last=False)
        return data


def untimed(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "left_s": None}


async def of_all(call: Call) -> Answer:
    """Whoever comes, also again, gets all rows first: there are few, and it was away."""
    return streamed(call, lambda: follow_all(call.service.live))


async def follow_all(live: Live) -> AsyncIterator[bytes]:
    version, heard = -1, time.monotonic()
    while not live.closing.is_set():
        await live.overview.look()
        data = live.overview.since(version)
        version = live.overview.version
        if data:
            heard = time.monotonic()
            yield data
        elif time.monotonic() - heard > HEARTBEAT_S:
            heard = time.monotonic()
            yield HEARTBEAT
        await first_of(live.closing.wait(), OVERVIEW_S)
