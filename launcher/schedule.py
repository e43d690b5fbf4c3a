"""Pure: which queued runs start now, on which slots, and why the others wait. For users: docs/queue.md.

Runs go in order: higher priority first, then as they were handed in. One that finds its slots starts on the
first free ones. One that does not, waits, and those behind it may overtake it only if none of those ahead
could start later for it, whenever and in whatever order runs end.

What "later" means: than if from now on runs started strictly in order. Take runs that wait for any slots of
the same hosts, which have T in all. Run j of them, needing n, starts in order as soon as all before it have
started and n slots are free, that is: those that are busy, with the slots of some of the runs that have any
now and of some of those before j, are at most T - n. An overtaker with s slots makes that later only if those
can be more than T - n - s without being more than T - n. So it is harmless if no sum of some of these runs'
slots lies there; which sums there are is a bit set. Only runs that want exactly the same hosts are reckoned
with like this: where they overlap in part, an overtaker changes where those ahead end up, and so whom they
are in the way of; there, nobody overtakes.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from launcher.model import SlotsTold

MOST_NAMED = 4  # hosts in a sentence


# --- What goes in and what comes out --------------------------------------------------------------


@dataclass(frozen=True)
class Room:
    """A host and how many slots it has."""

    name: str
    slots: int
    answers: bool = True  # if not, what is free on it is not given away


@dataclass(frozen=True)
class Queued:
    """A run that waits for its turn."""

    run: str
    hosts: tuple[str, ...]  # that it may run on
    world: int | None = None  # None: every slot of these
    priority: int = 0  # higher ones go first
    place: int = 0  # lower ones go first among those of one priority
    after: str = ""  # a run that must be over before
    at: float | None = None  # not before this moment
    shared: bool = False  # shares its slots with others that say so, too


@dataclass(frozen=True)
class Taken:
    """A run that has slots already, whoever started it."""

    run: str
    slots: Mapping[str, int]  # by host
    shared: bool = False
    user: str = ""


@dataclass(frozen=True)
class Start:
    """A run that is to start now, on these slots, in the order of the hosts."""

    run: str
    slots: Mapping[str, int]


@dataclass(frozen=True)
class Decision:
    """Every queued run is in one of these; what is said of it is a sentence."""

    starts: tuple[Start, ...]
    waiting: Mapping[str, str]


def taken_by_others(told: Mapping[str, Sequence[SlotsTold]], own: Collection[str]) -> tuple[Taken, ...]:
    """What the hosts' slot records say, by host, of runs that are not our own."""
    slots: dict[tuple[str, str, bool], dict[str, int]] = {}
    for host, runs in told.items():
        for each in runs:
            if each.run not in own:
                of_run = slots.setdefault((each.run, each.user, each.shared), {})
                of_run[host] = of_run.get(host, 0) + each.slots
    return tuple(Taken(run, by_host, shared, user) for (run, user, shared), by_host in slots.items())


def used(taken: Sequence[Taken], host: str) -> int:
    """How many slots of a host these have; runs that share lie on top of each other."""
    alone = sum(each.slots.get(host, 0) for each in taken if not each.shared)
    return alone + max((each.slots.get(host, 0) for each in taken if each.shared), default=0)


# --- What is taken -------------------------------------------------------------------------------


class Group(NamedTuple):
    """The slots that a run wants: any of those of these hosts, to itself or to share."""

    hosts: tuple[str, ...]  # in the inventory's order
    shared: bool


class Table:
    """Who has which slots. Runs that share lie on top of each other; nobody else lies on them."""

    def __init__(self, rooms: Sequence[Room], taken: Iterable[Taken]) -> None:
        self.rooms = {room.name: room for room in rooms}
        self.alone = dict.fromkeys(self.rooms, 0)
        self.together = dict.fromkeys(self.rooms, 0)
        self.taken: list[Taken] = []
        self.totals: dict[Group, int] = {}  # that are free, as far as it was asked since the last change
        for each in taken:
            self.take(each)

    def take(self, taken: Taken) -> None:
        self.taken.append(taken)
        self.totals.clear()
        for host, slots in taken.slots.items():
            if host not in self.rooms:
                continue
            if taken.shared:
                self.together[host] = max(self.together[host], slots)
            else:
                self.alone[host] += slots

    def busy(self, host: str, shared: bool) -> int:
        """Slots that a run cannot have there now; more than there are, if others took more."""
        return self.alone[host] + (0 if shared else self.together[host])

    def free(self, host: str, shared: bool) -> int:
        room = self.rooms[host]
        return max(0, room.slots - self.busy(host, shared)) if room.answers else 0

    def total_free(self, group: Group) -> int:
        if group not in self.totals:
            self.totals[group] = sum(self.free(host, group.shared) for host in group.hosts)
        return self.totals[group]

    def first_fit(self, group: Group, need: int) -> dict[str, int] | None:
        """The first free slots in the order of the hosts, or None if there are too few."""
        if self.total_free(group) < need:
            return None
        found: dict[str, int] = {}
        for host in group.hosts:
            slots = min(need, self.free(host, group.shared))
            if slots:
                found[host] = slots
                need -= slots
        return found

    def blocks(self, group: Group) -> Iterator[int]:
        """What of the group's slots is busy now, in pieces of which any may become free before any other.
        Where the pieces are not known as such, they are single slots, so that none is overlooked."""
        crowded = {h for h in group.hosts if self.busy(h, group.shared) > self.rooms[h].slots}
        for host in group.hosts:
            room = self.rooms[host]
            if host in crowded:
                yield from [1] * room.slots
            else:
                if not room.answers:
                    yield room.slots - self.busy(host, group.shared)
                if not group.shared:
                    yield from [1] * self.together[host]
        plain = set(group.hosts) - crowded
        for taken in self.taken:
            if not taken.shared:
                yield sum(slots for host, slots in taken.slots.items() if host in plain)


# --- Whom an overtaker would delay ---------------------------------------------------------------


@dataclass(eq=False)
class Line:
    """Runs that wait for slots of some hosts, in order, and what those behind them must leave alone."""

    hosts: set[str]
    groups: set[Group]
    first: str  # the run at its head
    total: int = 0  # slots
    sums: int = 1  # bit n: runs that have slots now, or wait here, may have n of them at some moment
    needs: dict[int, tuple[int, str]] = field(default_factory=dict)  # (sums, run) by the slots it needs
    spare: int = 0  # slots that an overtaker may take
    strictest: str = ""  # the run that allows no more

    def wait(self, run: str, need: int) -> None:
        """One more at the end. Of those that need as many, the last has the most sums before it."""
        self.needs[need] = self.sums, run
        self.allow(need, first=len(self.needs) == 1)
        if not all(group.shared for group in self.groups):
            self.sums = add(self.sums, need, self.total)

    def allow(self, need: int, first: bool) -> None:
        """No more than what lies between the most that may be busy when it starts, and the nearest sum."""
        sums, run = self.needs[need]
        most = self.total - need
        spare = most - (sums & ((2 << most) - 1)).bit_length() + 1
        if first or spare < self.spare:
            self.spare, self.strictest = spare, run

    def take(self, block: int) -> None:
        """Somebody has these slots now."""
        self.sums = add(self.sums, block, self.total)
        self.needs = {need: (add(sums, block, self.total), run) for need, (sums, run) in self.needs.items()}
        for number, need in enumerate(self.needs):
            self.allow(need, first=not number)


def add(sums: int, block: int, total: int) -> int:
    """The bit set of all sums up to `total`, once a block more may be in them."""
    return (sums | sums << block) & ((2 << total) - 1)


class Ahead:
    """Those that wait for slots, as seen by whoever is behind them."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.lines: list[Line] = []

    def wait(self, run: str, group: Group, need: int) -> None:
        """Add one at the end. Lines that want some of the same hosts become one."""
        met = [line for line in self.lines if not line.hosts.isdisjoint(group.hosts)]
        if len(met) == 1 and met[0].groups == {group}:
            met[0].wait(run, need)
            return
        if met:
            line = Line(set(group.hosts), {group}, met[0].first)
            line.hosts.update(*(each.hosts for each in met))
            line.groups.update(*(each.groups for each in met))
        else:
            total = sum(self.table.rooms[host].slots for host in group.hosts)
            line = Line(set(group.hosts), {group}, run, total)
            for block in self.table.blocks(group):
                line.take(block)
            line.wait(run, need)
        self.lines = [each for each in self.lines if each not in met] + [line]

    def delayed(self, slots: Mapping[str, int], shared: bool) -> str:
        """A run that would wait longer if somebody behind it took these slots; "" if none would."""
        for line in self.lines:
            taken = self.of_line(line, slots, shared)
            if taken and (len(line.groups) > 1 or taken > line.spare):
                return line.strictest or line.first
        return ""

    def of_line(self, line: Line, slots: Mapping[str, int], shared: bool) -> int:
        """How many of these slots the line may miss: none, if all of it may lie on top of them."""
        if shared and all(group.shared for group in line.groups):
            return 0
        return sum(count for host, count in slots.items() if host in line.hosts)

    def taken(self, slots: Mapping[str, int], shared: bool) -> None:
        """Somebody has overtaken: that one's end, too, is now a moment at which others may start."""
        for line in self.lines:
            count = self.of_line(line, slots, shared)
            if len(line.groups) == 1:
                for block in [1] * count if shared else [count]:
                    line.take(block)

    def unwanted(self, group: Group) -> Group:
        """Of its hosts those that nobody ahead waits for."""
        wanted = set[str]().union(*(line.hosts for line in self.lines))
        return Group(tuple(host for host in group.hosts if host not in wanted), group.shared)


# --- The decision --------------------------------------------------------------------------------


def decide(
    queued: Iterable[Queued],
    own: Iterable[Taken],
    others: Iterable[Taken],
    rooms: Sequence[Room],
    over: Collection[str],
    now: float,
    going: Collection[str] = (),
) -> Decision:
    """What starts now. `own` runs count as they are here, whatever `others` says of the same ones. Of runs
    that others are to come after, those that are `over` are, and those that are `going` on are not, whoever
    has slots."""
    own = list(own)
    mine = {taken.run for taken in own}
    table = Table(rooms, own + [taken for taken in others if taken.run not in mine])
    order = sorted(queued, key=lambda run: (-run.priority, run.place, run.run))
    going = ({run.run for run in order} | {taken.run for taken in table.taken} | set(going)) - set(over)
    waiting = dict(never(order, table.rooms))
    starts, short, ahead = list[Start](), list[tuple[str, Group, int]](), Ahead(table)
    for run in order:
        if run.run in waiting:
            continue
        why = not_yet(run, going, now)
        if why:
            waiting[run.run] = why  # it keeps no slots from others until then
            continue
        group, need = wish(run, table.rooms)
        slots, blocker = find(table, ahead, group, need)
        if slots is None or blocker:
            ahead.wait(run.run, group, need)
            waiting[run.run] = f"behind run {blocker}, which it would delay" if blocker else ""
            short += [] if blocker else [(run.run, group, need)]
        else:
            starts.append(Start(run.run, slots))
            ahead.taken(slots, run.shared)
            table.take(Taken(run.run, slots, run.shared))
    waiting.update((run, lacking(table, group, need)) for run, group, need in short)
    return Decision(tuple(starts), waiting)


def find(table: Table, ahead: Ahead, group: Group, need: int) -> tuple[dict[str, int] | None, str]:
    """(the slots that it would start on, None if there are too few; whom that would delay)."""
    slots = table.first_fit(group, need)
    blocker = ahead.delayed(slots, group.shared) if slots else ""
    if blocker:
        elsewhere = table.first_fit(ahead.unwanted(group), need)
        if elsewhere:
            return elsewhere, ""
    return slots, blocker


def wish(run: Queued, rooms: Mapping[str, Room]) -> tuple[Group, int]:
    """(where, how many)."""
    wanted = set(run.hosts)
    hosts = tuple(name for name in rooms if name in wanted)
    need = sum(rooms[name].slots for name in hosts) if run.world is None else run.world
    return Group(hosts, run.shared), need


# --- Why not ---------------------------------------------------------------------------------------


def never(queued: Sequence[Queued], rooms: Mapping[str, Room]) -> Iterator[tuple[str, str]]:
    """The runs that can never start as the hosts are, and why; they are in nobody's way. They wait all the
    same: a service may be started with other hosts once more."""
    in_circle = circle(queued)
    for run in queued:
        group, need = wish(run, rooms)
        has = sum(rooms[name].slots for name in group.hosts)
        if not group.hosts:
            yield run.run, "none of its hosts is in the inventory"
        elif need > has:
            yield run.run, f"needs {slots_text(need)}; the hosts have {has}"
        elif need < 1:
            yield run.run, "a run has at least one rank"
        elif run.run in in_circle:
            yield run.run, f"is to wait for run {run.after}, which waits for it"


def circle(queued: Sequence[Queued]) -> set[str]:
    """The runs that wait for themselves, by way of others."""
    after = {run.run: run.after for run in queued}
    found, done = set[str](), set[str]()
    for first in after:
        way: dict[str, None] = {}
        run = first
        while run in after and run not in done and run not in way:
            way[run] = None
            run = after[run]
        if run in way:
            names = list(way)
            found.update(names[names.index(run) :])
        done.update(way)
    return found


def not_yet(run: Queued, going: Collection[str], now: float) -> str:
    """Why it could not start on any slots."""
    if run.at is not None and run.at > now:
        return f"waiting until {moment_text(run.at, now)}"
    if run.after in going:
        return f"waiting for run {run.after} to end"
    return ""


def moment_text(moment: float, now: float) -> str:
    """With the day, unless it is today."""
    then = time.localtime(moment)
    today = then[:3] == time.localtime(now)[:3]
    return time.strftime("%H:%M" if today else "%Y-%m-%d %H:%M", then)


def lacking(table: Table, group: Group, need: int) -> str:
    """How many slots it lacks, and where those may come from."""
    missing = need - table.total_free(group)
    rooms = [table.rooms[host] for host in group.hosts]
    taken = [room.name for room in rooms if table.free(room.name, group.shared) < room.slots]
    silent = [room.name for room in rooms if not room.answers]
    words = f"waiting for {slots_text(missing)} on {names_text(taken)}"
    if silent:
        words += f"; {names_text(silent)} {'does' if len(silent) == 1 else 'do'} not answer"
    return words


def slots_text(count: int) -> str:
    return f"{count} slot" if count == 1 else f"{count} slots"


def names_text(names: Sequence[str]) -> str:
    if len(names) <= MOST_NAMED:
        return ", ".join(names)
    return f"{', '.join(names[: MOST_NAMED - 1])} and {len(names) - MOST_NAMED + 1} more"
