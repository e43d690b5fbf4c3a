"""One stream of events from all hosts of a run, in the order of their corrected times."""

from __future__ import annotations

import bisect
import contextlib
import json
import math
import operator
import queue
import random
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launcher import kit
from launcher.agent import ANSWER_S, LARGEST_ANSWER, LARGEST_NOISE, SENTINEL, Agent
from launcher.errors import HostError, RingctlError
from launcher.model import Event
from launcher.redact import without
from launcher.told import (
    CLOCKS_AGREE_S,
    MOST_RANKS_HERE,
    check_events,
    is_light,
    is_moment,
    shallow,
    words_of,
)

PATIENCE_S = 0.1  # how long to wait for news before giving the screen a turn
HOLD_S = 0.05  # how long a line of now waits for earlier ones of other hosts
SILENCE_S = 6.0  # a host that says nothing for so long is away
FIRST_RETRY_S, LAST_RETRY_S = 0.3, 5.0
ASLEEP_S = 1.0  # who is away for so much longer than meant has been stopped meanwhile
QUIT_S = 1.0  # whoever waits longer waits for a host that is away
BEHIND_S = 10.0  # a host that comes no nearer to the present for so long is not waited for
LONGEST_BEHIND_S = 300.0  # nor one that has not arrived there by then
NEARER_S = 1.0  # less is not nearer
LONGEST_STEP_S = 1.0  # whoever waits for longer at once has been stopped meanwhile
STUCK_S = 20.0  # if nothing comes for so long, nobody is kept waiting by what is held back
MOST_HELD = 8 << 20  # bytes of a host's log that wait for what others said earlier; then it waits, too
LONGEST_EVENT = 1 << 20  # bytes; what is longer is looked at before it is decoded
LONGEST_HEAD = 300  # what comes before the text of a line
NOT_AS_AGREED = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
NOT_STARTED = "was not started on this host"  # hostd's words
LATER_NOT_STARTED = re.compile(rf"attempt (?!1 )\d+ of run \S+ {NOT_STARTED}")
EARLIER = "`ringctl logs --previous` shows the attempt before it"
GONE = "its supervisor is gone, and has not said how its ranks ended"
STILL_GOES_ON = "its ranks still go on"
LINE, TEXT = b'{"kind":"line"', b'"text":"'
TOO_MUCH = "an event that holds more than any"
NOTES = (b'{"kind":"cursor"', b'{"kind":"tick"', b'{"kind":"end"', b'{"kind":"error"')
NOTE = re.compile(rb"^(?:" + b"|".join(re.escape(note) for note in NOTES) + rb").*$", re.M)


Cursor = tuple[int, int, int]  # attempt, segment, byte offset


@dataclass(frozen=True)
class Place:
    """How far a host's events have been taken: `taken` of them, of which `before` come before the cursor. A
    host tells them in the same order every time."""

    cursor: Cursor
    before: int = 0
    taken: int = 0


@dataclass
class Piece:
    """What one host sent: whole lines of events, and what hostd said between them."""

    host: str
    events: list[Event] = field(default_factory=list)
    size: int = 0  # bytes of them
    told: bool = False  # events have come, if only such as are known already or not believed
    watermark: float = 0.0  # nothing earlier than this will come from the host
    caught_up: bool = False
    over: bool = False
    state: str = ""  # how its part of the run ended, once it is over
    error: str = ""  # hostd refuses: there is no sense in asking again
    away: str | None = None  # why the host cannot be heard; "" once it can be again
    place: Place | None = None  # how far this goes


class Decoder:
    """Bytes of one host's stream -> Pieces; knows the cursor from which to go on after a drop."""

    def __init__(
        self, run: str, host: str, clock: Callable[[], float] = time.time, hidden: Sequence[str] = ()
    ) -> None:
        self.run, self.host, self.clock = run, host, clock
        self.hidden = hidden  # values that no event may show
        self.ranks: set[int | None] = set()  # that it has told of
        self.own: frozenset[int | None] | None = None  # the ranks of which it may tell, if that is known
        self.attempt = 0  # of which it tells; 0 for whichever it has
        self.clock_offset: float | None = None  # how far the host's clock is ahead of ours; None until heard
        self._said = {"event": 0.0, "tick": 0.0}  # the last of its times, by its own clock
        self._live = False  # it has told all that is of before, on this connection
        self.cursor: list[int] | None = None
        self.count = 0  # events before the cursor
        self.skip = 0  # of those that come next, whoever asked has so many already
        self.good = Piece(host)  # what came before whatever was not as agreed
        self._rest = bytearray()  # grows in place: what drips in behind much is not copied for each drop
        self._begun = False

    def begin_at(self, place: Place) -> None:
        """Tell only what comes after this."""
        self.cursor, self.count = list(place.cursor), place.before
        self.skip = place.taken - place.before

    def restart(self) -> None:
        """A new connection follows: what was cut off in the middle comes again."""
        self._rest, self._begun, self._live = bytearray(), False, False

    @property
    def lacks_kit(self) -> bool:
        """Whether the host said that it does not have our files."""
        return not self._begun and kit.MISSING in self._rest

    def feed(self, data: bytes) -> Piece:
        """Raises one of NOT_AS_AGREED for whatever else a host may send; what came before that is `good`."""
        self.good = piece = Piece(self.host)
        try:
            self._decode(data, piece)
        finally:
            if self.cursor is not None:
                attempt, segment, offset = self.cursor
                piece.place = Place((attempt, segment, offset), self.count, self.count)
        return piece

    def _decode(self, data: bytes, piece: Piece) -> None:
        if len(self._rest) > (LARGEST_ANSWER if self._begun else LARGEST_NOISE):
            raise ValueError("something without an end")
        if not self._begun:
            looked = max(0, len(self._rest) - len(SENTINEL))
            self._rest += data
            at = self._rest.find(SENTINEL, looked)
            if at < 0:
                return
            self._begun, data = True, bytes(self._rest[at + len(SENTINEL) :])
            self._rest = bytearray()
        end = data.rfind(b"\n") + 1
        if not end:
            self._rest += data
            return
        whole, self._rest = b"".join((self._rest, data[:end])), bytearray(data[end:])
        if not any(note in whole for note in NOTES):
            self._take(whole, piece)
            return
        start = 0  # of the event lines since the last note
        for match in NOTE.finditer(whole):
            if match.end() - match.start() > LONGEST_EVENT:
                raise ValueError(TOO_MUCH)
            self._take(whole[start : match.start()], piece)
            self._note(json.loads(match.group()), piece)
            start = match.end() + 1
        self._take(whole[start:], piece)

    def _take(self, lines: bytes, piece: Piece) -> None:
        """Decode event lines, each with its end, and move the cursor past them."""
        start = 0  # of those that are not taken yet
        for begin, end in long_lines(lines):
            self._take_many(lines[start:begin], piece)
            self._take_decoded(long_event, lines[begin:end], piece)
            start = end
        self._take_many(lines[start:], piece)

    def _take_many(self, lines: bytes, piece: Piece) -> None:
        """In one go; or, if one of them is none, those that come before it."""
        clock = self.clock_offset, dict(self._said)
        try:
            self._take_decoded(many_events, lines, piece)
        except NOT_AS_AGREED:
            self.clock_offset, self._said = clock
            for line in lines.splitlines(keepends=True):
                if line.isspace():
                    break
                self._take_decoded(many_events, line, piece)
            raise

    def _take_decoded(self, decode: Callable[[bytes], list[Any]], lines: bytes, piece: Piece) -> None:
        if len(lines) < 2 or self.cursor is None:
            return
        told = decode(lines)
        if self._live:
            self._mind_clock("event", told[-1]["time"])
        attempt, run, host, offset = self.cursor[0], self.run, self.host, self.clock_offset or 0.0
        events = [
            Event(
                data.pop("kind"), data.pop("time") - offset, run, attempt, host, data.pop("rank", None), data
            )
            for data in told
        ]
        ranks = self.ranks | check_events(events)
        if len(ranks) > MOST_RANKS_HERE + 1:
            raise ValueError("more ranks than a host has")
        self.ranks = ranks
        self.cursor[2] += len(lines)
        piece.watermark, piece.told, piece.size = events[-1].time, True, piece.size + len(lines)
        if self.own is not None and not self.ranks <= self.own:
            events = [event for event in events if event.rank in self.own]
        self.count += len(events)
        if self.skip:
            known = min(self.skip, len(events))
            events, self.skip = events[known:], self.skip - known
        events = [event if event.kind == "line" else shallow(event) for event in events]
        piece.events += [self._shown(event) for event in events] if self.hidden else events

    def _shown(self, event: Event) -> Event:
        """Without what is secret. How a rank ended is told by words that mean something here, and stay."""
        own = () if event.kind == "metric" else ("stream", "end", "state", "signal")
        kept = {key: event.data[key] for key in own if key in event.data}
        return event._replace(data={**without(self.hidden, event.data), **kept})

    def _note(self, note: Mapping[str, Any], piece: Piece) -> None:
        if not is_moment(note["time"]):
            raise ValueError("a time that is none")
        if self.clock_offset is None:
            apart = note["time"] - self.clock()
            self.clock_offset = apart if abs(apart) > CLOCKS_AGREE_S else 0.0
        if note["kind"] == "cursor":
            self.cursor = [whole(note[key]) for key in ("attempt", "segment", "offset")]
            if self.attempt not in (0, self.cursor[0]):
                raise ValueError("an attempt that it was not asked for")
            self.attempt = self.cursor[0]
            return  # what follows may be of long ago
        if note["kind"] == "error":
            piece.error, piece.over = words_of(note["error"]) or "it refuses", True
        else:
            piece.caught_up = True
            if note["kind"] == "tick":
                self._mind_clock("tick", note["time"])
                self._live = True
            else:
                piece.over, piece.state = True, words_of(note.get("state", ""))
        piece.watermark = note["time"] - self.clock_offset

    def _mind_clock(self, kind: str, said: float) -> None:
        """A clock was set if its time falls from one event to the next, or from one tick, or is further ahead
        of ours than it was: what comes late, which an event may at any time, is further behind. Only of what
        the host says of this moment: in a log that is read later nobody can tell."""
        if not is_moment(said):
            raise ValueError("a time that is none")
        apart = said - self.clock()
        if apart > (self.clock_offset or 0.0) + CLOCKS_AGREE_S or said < self._said[kind] - CLOCKS_AGREE_S:
            self.clock_offset = apart if abs(apart) > CLOCKS_AGREE_S else 0.0
        self._said[kind] = said


def many_events(lines: bytes) -> list[Any]:
    """In one go, which is much quicker than one by one."""
    found: list[Any] = json.loads(b"[" + lines[:-1].replace(b"\n", b",") + b"]")
    return found


def long_lines(lines: bytes) -> Iterator[tuple[int, int]]:
    """Begin and end of each that is looked at before it is decoded."""
    start = 0
    while len(lines) - start > LONGEST_EVENT:
        end = lines.rfind(b"\n", start, start + LONGEST_EVENT) + 1
        if not end:
            end = lines.find(b"\n", start) + 1 or len(lines)
            yield start, end
        start = end


def long_event(line: bytes) -> list[Any]:
    """One event, if it holds no more than a short one can. Of a line that a rank wrote, the text is a string,
    whatever is in there."""
    text, beside = "", line
    if line.startswith(LINE) and line.isascii() and (at := line.find(TEXT, 0, LONGEST_HEAD)) >= 0:
        begin = at + len(TEXT)
        text, end = json.JSONDecoder().raw_decode(line.decode("ascii"), begin - 1)
        beside = line[:begin] + line[end - 1 :]
    if not is_light(beside, LONGEST_EVENT):
        raise ValueError(TOO_MUCH)
    data = json.loads(beside)
    return [{**data, "text": text}] if text else [data]


def whole(value: object) -> int:
    """A number of a cursor."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError("a cursor that is none")
    return value


class Merger:
    """Pure: pieces of several hosts in, events in time order out, as soon as no earlier one can come."""

    def __init__(self, hosts: Sequence[str]) -> None:
        # Each host's own order stays, even when its clock was set back: its times never fall.
        self._waiting: dict[str, tuple[list[float], list[Event]]] = {host: ([], []) for host in hosts}
        self._watermark = dict.fromkeys(hosts, 0.0)
        self._latest = dict.fromkeys(hosts, 0.0)
        self._held = dict.fromkeys(hosts, 0.0)  # about how many bytes there are of it
        self._late: set[str] = set()  # hosts that nobody waits for until they have caught up

    def let_go(self, hosts: Iterable[str]) -> None:
        """The others do not wait for these any longer."""
        for host in hosts:
            self._late.add(host)
            self._watermark.pop(host, None)

    def add(self, piece: Piece, now: float = float("inf")) -> list[Event]:
        """Everything that can be shown now. What has come by `now` has happened by then, whatever its host's
        clock says: one that was set ahead does not hold its events back."""
        if piece.caught_up:
            self._late.discard(piece.host)
        if piece.over or piece.away or piece.host in self._late:
            self._watermark.pop(piece.host, None)  # the others do not wait for it
        else:
            self._watermark[piece.host] = max(self._watermark.get(piece.host, 0.0), min(piece.watermark, now))
        if len(self._waiting) == 1:
            return piece.events
        times, events = self._waiting[piece.host]
        latest = self._latest[piece.host]
        for event in piece.events:
            latest = max(latest, min(event.time, now))
            times.append(latest)
        self._latest[piece.host] = latest
        if piece.host in self._watermark:  # its times never fall: those to come are no earlier
            self._watermark[piece.host] = max(self._watermark[piece.host], latest)
        self._held[piece.host] += piece.size
        events += piece.events
        return self.ready(min(self._watermark.values(), default=float("inf")))

    def has_room(self, host: str) -> bool:
        """Whether so little of it is held back that it may go on."""
        return self._held[host] <= MOST_HELD

    @property
    def held_back(self) -> set[str]:
        """Hosts of which there are events that wait for those of others."""
        return {host for host, (_, events) in self._waiting.items() if events}

    def ready(self, until: float) -> list[Event]:
        """Events up to this moment, whether or not an earlier one may still come."""
        ready: list[tuple[float, Event]] = []
        for host, (times, events) in self._waiting.items():
            count = bisect.bisect_right(times, until)
            self._held[host] *= 1.0 - count / len(times) if times else 0.0
            ready += zip(times[:count], events[:count], strict=True)
            del times[:count], events[:count]
        ready.sort(key=operator.itemgetter(0))  # keeps the order of equals, and is quick on runs in order
        return [event for _, event in ready]


class Taken:
    """Pure: which place of each host stands for what was given out, while others of its events are held back
    for those of other hosts."""

    def __init__(self, begun: Mapping[str, Place]) -> None:
        self.places = dict(begun)
        self._count = Counter({host: place.taken for host, place in begun.items()})
        self._heard: dict[str, deque[Place]] = {}

    def heard(self, host: str, place: Place | None) -> None:
        if place is not None:
            self._heard.setdefault(host, deque()).append(place)

    def gave(self, events: Iterable[Event]) -> None:
        self._count.update(event.host for event in events)
        for host, places in self._heard.items():
            while places and places[0].before <= self._count[host]:
                self.places[host] = places.popleft()
        for host, place in self.places.items():
            self.places[host] = Place(place.cursor, place.before, self._count[host])


@dataclass(frozen=True)
class Update:
    """What `follow` yields, several times a second even when nothing happens."""

    events: list[Event]
    caught_up: bool  # what had happened when we began has been shown, or is not waited for any longer
    away: Mapping[str, str]  # hosts that cannot be heard at the moment, and why
    lost: Mapping[str, str]  # hosts whose part of the run is gone without having been ended, and why
    places: Mapping[str, Place] = field(default_factory=dict)  # where to go on after these events
    open: frozenset[str] = frozenset()  # hosts whose part is not over, or not given out to its end
    going_on: frozenset[str] = frozenset()  # hosts of which all is given out that there is, and more comes

    @property
    def unheard(self) -> dict[str, str]:
        """Both of them, with a sentence for each that names it."""
        return {**self.away, **{host: f"{host}: {why}" for host, why in self.lost.items()}}

    @property
    def ended_early(self) -> set[str]:
        """Those of them whose log was read to its end, as far as that got before its supervisor was gone."""
        return {host for host, why in self.lost.items() if why == GONE} - self.away.keys()


class Clock:
    """The time of day, which does not go back when somebody sets the clock."""

    def __init__(self) -> None:
        self._began = time.time() - time.monotonic()

    def now(self) -> float:
        return max(time.time(), self._began + time.monotonic())


def follow(
    agents: Mapping[str, Agent],
    run: str,
    *,
    live: bool,
    attempt: int = 0,
    some: bool = False,
    patience: float = 0.0,
    after: Mapping[str, Place] | None = None,
    rank_hosts: Mapping[int, str] | None = None,
    hold: float = HOLD_S,
) -> Generator[Update, None, None]:
    """The run's events. `live` waits for more until the run is over, through drops of the connection; 0 means
    the newest attempt that a host has. With `some`, hosts that the attempt was not on are not missed. A host
    that has not started it yet has `patience` seconds to do so. Only those `after` the places that an update
    of the same attempt told; {} for such places from the first on. Where it is known that the attempt's ranks
    are on `rank_hosts`, no host is believed about others than its own. An update without news comes after
    `hold` seconds."""
    request, clock = {"run": run, "follow": live, "attempt": attempt}, Clock()
    decoders = [decoder_for(each, run, attempt, after or {}, rank_hosts, clock) for each in agents.values()]
    readers = Readers(agents.values(), decoders, request, patience)
    taken = None if after is None else Taken({name: after.get(name, first(attempt)) for name in agents})
    merger, heard = Merger(list(agents)), Heard(set(agents), some)
    came = time.monotonic()
    try:
        while heard.open:
            began = time.monotonic()
            try:
                piece = readers.pieces.get(timeout=hold)
            except queue.Empty:
                # Nobody has said anything: what is waiting for a quiet host has waited long enough.
                stuck = began > came + STUCK_S and not all(map(merger.has_room, agents))
                events = merger.ready(math.inf) if stuck else []
            else:
                came = time.monotonic()
                heard.take(piece)
                events = merger.add(piece, clock.now() + CLOCKS_AGREE_S)
                if taken:
                    taken.heard(piece.host, piece.place)
            if live:
                merger.let_go(heard.waited(time.monotonic() - began, clock.now()))
            if not heard.behind:
                events += merger.ready(clock.now() - HOLD_S)
            readers.mind(merger.has_room)
            places = places_after(taken, events)
            unfinished = heard.open | merger.held_back
            places_and_open = places, frozenset(unfinished), frozenset(heard.going_on)
            yield Update(events, not heard.behind, heard.away, heard.lost, *places_and_open)
    finally:
        readers.stop()


def decoder_for(
    agent: Agent,
    run: str,
    attempt: int,
    after: Mapping[str, Place],
    rank_hosts: Mapping[int, str] | None,
    clock: Clock,
) -> Decoder:
    name = agent.host.name
    decoder = Decoder(run, name, clock.now, hidden=agent.hidden)
    if name in after:
        decoder.begin_at(after[name])
    if agent.host.local:
        decoder.clock_offset = 0.0
    decoder.attempt = attempt
    if rank_hosts is not None:
        decoder.own = frozenset([None, *(rank for rank, host in rank_hosts.items() if host == name)])
    return decoder


class Heard:
    """Pure: what is known of each host from the pieces that have come. With `some`, hosts that the attempt
    was not on are not missed."""

    def __init__(self, hosts: set[str], some: bool) -> None:
        self.hosts, self.some = hosts, some
        self.open, self.behind = set(hosts), set(hosts)
        self.away: Mapping[str, str] = {}
        self.lost: Mapping[str, str] = {}
        self.going_on: set[str] = set()
        self._refused: set[str] = set()
        self._spoken: set[str] = set()  # hosts of which anything has come
        self._told = dict.fromkeys(hosts, 0.0)  # the times of their latest events
        self._nearest: dict[str, tuple[float, float]] = {}  # how far behind at least, and waited until that
        self._waited = 0.0

    def take(self, piece: Piece) -> None:
        """Raises RingctlError once every host has refused."""
        host = piece.host
        if piece.error:
            self._refused.add(host)
            if self._refused == self.hosts:
                fix = EARLIER if LATER_NOT_STARTED.match(piece.error) else ""
                raise RingctlError(f"{host}: {piece.error}", fix=fix)
        missed = piece.error and not (self.some and NOT_STARTED in piece.error)
        if missed or piece.state == "lost":
            self.lost = {**self.lost, host: piece.error or GONE}
        if piece.away is not None:
            others = {name: why for name, why in self.away.items() if name != host}
            self.away = {**others, host: piece.away} if piece.away else others
        if piece.over:
            self.open.discard(host)
        if piece.over and piece.state in ("starting", "running"):  # it was not asked to wait for more
            self.going_on.add(host)
        self._spoken.add(host)
        if piece.events:
            self._told[host] = piece.events[-1].time
        if piece.caught_up or piece.over or piece.away:
            self.behind.discard(host)

    def waited(self, seconds: float, now: float) -> list[str]:
        """So long those were waited for that are behind. Who comes no nearer, or never arrives, is not waited
        for any longer: what it says still comes, but not in order, and what others say comes at once. Who has
        said nothing yet is about to be away, or to be heard."""
        self._waited += min(seconds, LONGEST_STEP_S) if self.behind else 0.0
        late = []
        for host in self.behind & self._spoken:
            apart = now - self._told[host]
            nearest, since = self._nearest.setdefault(host, (math.inf, self._waited))
            if apart <= nearest - NEARER_S:
                self._nearest[host], since = (apart, self._waited), self._waited
            if self._waited >= min(since + BEHIND_S, LONGEST_BEHIND_S):
                self.behind.discard(host)
                late.append(host)
        return late


def first(attempt: int) -> Place:
    """Before anything that a host tells of this attempt."""
    return Place((attempt, 1, 0))


def places_after(taken: Taken | None, events: Sequence[Event]) -> Mapping[str, Place]:
    if taken is None:
        return {}
    taken.gave(events)
    return {host: place for host, place in taken.places.items() if place.taken}


def presence(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """A sentence for each host that went away or came back."""
    return [now.get(host, f"{host}: is back") for host in sorted(before.keys() ^ now.keys())]


def newly_lost(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """A sentence for each host whose part of the run was found to be gone."""
    return [f"{host}: {now[host]}" for host in sorted(now.keys() - before.keys())]


class Readers:
    """One for each host, and what they have passed on."""

    def __init__(
        self, agents: Iterable[Agent], decoders: Sequence[Decoder], request: dict[str, Any], patience: float
    ) -> None:
        self.pieces: queue.Queue[Piece] = queue.Queue(maxsize=4 * len(decoders))
        self._quit = threading.Event()
        self._readers = [
            Reader(agent, request, decoder, self.pieces, self._quit, patience)
            for agent, decoder in zip(agents, decoders, strict=True)
        ]
        for reader in self._readers:
            reader.start()

    def mind(self, has_room: Callable[[str], bool]) -> None:
        for reader in self._readers:
            reader.may_go_on(has_room(reader.decoder.host))

    def stop(self) -> None:
        self._quit.set()
        deadline = time.monotonic() + QUIT_S
        while any(reader.is_alive() for reader in self._readers) and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):  # who waits for room sees that it may end
                self.pieces.get(timeout=0.02)


class Reader(threading.Thread):
    """Passes on what one host sends until it is over or nobody listens; goes on after a drop where it was."""

    def __init__(
        self,
        agent: Agent,
        request: dict[str, Any],
        decoder: Decoder,
        pieces: queue.Queue[Piece],
        quit_: threading.Event,
        patience: float = 0.0,
    ) -> None:
        super().__init__(daemon=True)
        self.agent, self.request, self.decoder = agent, request, decoder
        self.pieces, self.quit = pieces, quit_
        self.is_away = False
        self._room = threading.Event()
        self._room.set()
        self.patient_until = time.monotonic() + patience  # with a host that has not started it yet

    def may_go_on(self, has_room: bool) -> None:
        """Unless what it has passed on waits for what others said earlier."""
        if has_room:
            self._room.set()
        else:
            self._room.clear()

    def run(self) -> None:
        """Whatever ends this is told: who listens would wait for ever."""
        try:
            self.read_on()
        except Exception as error:
            what = f"its events cannot be read: {type(error).__name__}: {words_of(str(error))}"
            self.pieces.put(Piece(self.decoder.host, over=True, error=what))

    def read_on(self) -> None:
        """Raises one of NOT_AS_AGREED for what a host may send."""
        delay = FIRST_RETRY_S
        while not self.quit.is_set():
            heard = self.decoder.cursor
            try:
                self.read_until_over()
                return
            except HostError as error:
                lost = error
            except (OSError, EOFError) as error:  # of ours: no process is to be had, or no descriptor
                lost = HostError(self.decoder.host, str(error) or "the connection was lost")
            except RingctlError as error:
                self.pieces.put(Piece(self.decoder.host, over=True, error=error.message))
                return
            self.is_away = True
            self.pieces.put(Piece(self.decoder.host, away=lost.message, over=not self.request["follow"]))
            if not self.request["follow"]:
                return
            self.agent.transport.close()
            self.decoder.restart()
            delay = FIRST_RETRY_S if self.decoder.cursor != heard else min(delay * 2, LAST_RETRY_S)
            self.quit.wait(random.uniform(0.5, 1.0) * delay)

    def read_until_over(self) -> None:
        """Raises HostError when the host falls silent: hostd says at least a tick every second."""
        installed = False
        while not self.read_connection():
            if self.decoder.lacks_kit and installed:
                words = "ringctl's files have been put there, and it says that they are missing"
                raise HostError(self.decoder.host, words)
            if self.decoder.lacks_kit:
                self.agent.transport.install()
                installed = True
            else:
                self.quit.wait(FIRST_RETRY_S)
            self.decoder.restart()

    def read_connection(self) -> bool:
        """False if it is to be tried again: the host lacks our files, or has not started the run yet."""
        channel = self.agent.follow({**self.request, "cursor": self.decoder.cursor})
        heard = understood = time.monotonic()  # when something came, and something that counts
        try:
            while not self.quit.is_set():
                asked = time.monotonic()
                data = channel.read(PATIENCE_S)
                now = time.monotonic()
                if now > asked + PATIENCE_S + ASLEEP_S:
                    heard = understood = now  # it was us who were stopped (Ctrl-Z)
                if data == b"" and self.decoder.lacks_kit:
                    return False
                if data == b"" or (data is None and now > heard + SILENCE_S):
                    raise HostError(self.decoder.host, "the connection was lost")
                if now > understood + ANSWER_S:
                    raise HostError(self.decoder.host, f"nothing whole has come for {ANSWER_S:.0f} s")
                if data:
                    try:
                        piece = self.decoder.feed(data)
                    except NOT_AS_AGREED:
                        self.pieces.put(self.decoder.good)  # what cannot be read takes nothing else with it
                        raise
                    if piece.caught_up and not (piece.over or self.request["follow"]):
                        raise ValueError("it waits for more, and was not asked to")
                    if NOT_STARTED in piece.error and time.monotonic() < self.patient_until:
                        return False
                    if self.is_away:
                        piece.away, self.is_away = "", False
                    before = time.monotonic()
                    while not self._room.wait(PATIENCE_S) and not self.quit.is_set():
                        pass
                    self.pieces.put(piece)  # which takes as long as whoever shows it does
                    heard = time.monotonic()
                    understood = heard if self.goes_on(piece) else understood + heard - before
                    if piece.over:
                        break
            return True
        finally:
            channel.close()

    def goes_on(self, piece: Piece) -> bool:
        """Whether this is a reason to listen on. To whoever waits for more, what hostd says in between is
        one; as far as a log goes only the log itself is, or it would never have to come to an end."""
        return piece.told or (bool(self.request["follow"]) and bool(piece.watermark))
