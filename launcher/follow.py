"""One stream of events from all hosts of a run, in the order of their corrected times."""

from __future__ import annotations

import heapq
import json
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launcher.agent import SENTINEL, Agent
from launcher.errors import RingctlError
from launcher.model import Event

PATIENCE_S = 0.1  # how long to wait for news before giving the screen a turn
NOTES = (b'{"kind":"cursor"', b'{"kind":"tick"', b'{"kind":"end"', b'{"kind":"error"')


@dataclass
class Piece:
    """What one host sent: whole lines of events, and what hostd said between them."""

    host: str
    events: list[Event] = field(default_factory=list)
    watermark: float = 0.0  # nothing earlier than this will come from the host
    caught_up: bool = False
    over: bool = False
    error: str = ""


class Decoder:
    """Bytes of one host's stream -> Pieces; knows the cursor from which to go on after a drop."""

    def __init__(self, run: str, host: str, clock_offset: float = 0.0) -> None:
        self.run, self.host, self.clock_offset = run, host, clock_offset
        self.cursor: list[int] | None = None
        self._rest = b""
        self._begun = False

    def restart(self) -> None:
        """A new connection follows: what was cut off in the middle comes again."""
        self._rest, self._begun = b"", False

    def feed(self, data: bytes) -> Piece:
        data = self._rest + data
        if not self._begun:
            _, found, after = data.partition(SENTINEL)
            if not found:
                self._rest = data
                return Piece(self.host)
            self._begun, data = True, after
        whole, _, self._rest = data.rpartition(b"\n")
        piece = Piece(self.host)
        plain: list[bytes] = []
        for line in whole.split(b"\n") if whole else ():
            if line.startswith(NOTES):
                self._take(plain, piece)
                plain = []
                self._note(json.loads(line), piece)
            else:
                plain.append(line)
        self._take(plain, piece)
        return piece

    def _take(self, lines: list[bytes], piece: Piece) -> None:
        """Decode event lines in one go, and move the cursor past them."""
        if not lines or self.cursor is None:
            return
        attempt, run, host, offset = self.cursor[0], self.run, self.host, self.clock_offset
        self.cursor[2] += sum(map(len, lines)) + len(lines)
        for data in json.loads(b"[" + b",".join(lines) + b"]"):
            kind, time, rank = data.pop("kind"), data.pop("time") - offset, data.pop("rank", None)
            piece.events.append(Event(kind, time, run, attempt, host, rank, data))
        piece.watermark = piece.events[-1].time

    def _note(self, note: Mapping[str, Any], piece: Piece) -> None:
        if note["kind"] == "cursor":
            self.cursor = [note["attempt"], note["segment"], note["offset"]]
        elif note["kind"] == "error":
            piece.error, piece.over = note["error"], True
        else:
            piece.caught_up = True
            piece.over = note["kind"] == "end"
        piece.watermark = note["time"] - self.clock_offset


class Merger:
    """Pure: pieces of several hosts in, events in time order out, as soon as no earlier one can come."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._waiting: list[tuple[float, int, Event]] = []
        self._watermark = dict.fromkeys(hosts, 0.0)
        self._count = 0

    def add(self, piece: Piece) -> list[Event]:
        """Everything that can be shown now."""
        if piece.host in self._watermark:
            self._watermark[piece.host] = max(self._watermark[piece.host], piece.watermark)
        if piece.over:
            self._watermark.pop(piece.host, None)
        if not self._waiting and len(self._watermark) <= 1 and not (self._watermark.keys() - {piece.host}):
            return piece.events
        for event in piece.events:
            self._count += 1
            heapq.heappush(self._waiting, (event.time, self._count, event))
        return self._ready(min(self._watermark.values(), default=float("inf")))

    def _ready(self, until: float) -> list[Event]:
        ready = []
        while self._waiting and self._waiting[0][0] <= until:
            ready.append(heapq.heappop(self._waiting)[2])
        return ready


@dataclass(frozen=True)
class Update:
    """What `follow` yields, several times a second even when nothing happens."""

    events: list[Event]
    caught_up: bool  # everything that had happened when we began has been shown


def follow(
    agents: Mapping[str, Agent],
    run: str,
    *,
    live: bool,
    back: int = 0,
    offsets: Mapping[str, float] | None = None,
) -> Iterator[Update]:
    """The run's events. `live` waits for more until the run is over; `back` asks for an earlier attempt."""
    pieces: queue.Queue[Piece] = queue.Queue(maxsize=4 * len(agents))
    quit_ = threading.Event()
    request = {"run": run, "follow": live, "back": back}
    threads = []
    for name, agent in agents.items():
        decoder = Decoder(run, name, (offsets or {}).get(name, 0.0))
        threads.append(
            threading.Thread(target=read_host, args=(agent, request, decoder, pieces, quit_), daemon=True)
        )
        threads[-1].start()
    merger, behind, open_ = Merger(list(agents)), set(agents), set(agents)
    try:
        while open_:
            try:
                piece = pieces.get(timeout=PATIENCE_S)
            except queue.Empty:
                yield Update([], not behind)
                continue
            if piece.error:
                raise RingctlError(f"{piece.host}: {piece.error}")
            if piece.over:
                open_.discard(piece.host)
            if piece.caught_up or piece.over:
                behind.discard(piece.host)
            yield Update(merger.add(piece), not behind)
    finally:
        quit_.set()
        while any(thread.is_alive() for thread in threads):
            drain(pieces)


def drain(pieces: queue.Queue[Piece]) -> None:
    try:
        pieces.get(timeout=0.02)
    except queue.Empty:
        pass


def read_host(
    agent: Agent,
    request: dict[str, Any],
    decoder: Decoder,
    pieces: queue.Queue[Piece],
    quit_: threading.Event,
) -> None:
    """A thread: pass on what one host sends until it is over or nobody listens any more."""
    channel = agent.follow(request | {"cursor": decoder.cursor})
    try:
        while not quit_.is_set():
            data = channel.read(PATIENCE_S)
            if data is None:
                continue
            if not data:
                pieces.put(Piece(decoder.host, over=True, error="the log ended in the middle"))
                return
            piece = decoder.feed(data)
            pieces.put(piece)
            if piece.over:
                return
    except RingctlError as error:
        pieces.put(Piece(decoder.host, over=True, error=error.message))
    finally:
        channel.close()
