"""The queue's decision: who starts, on which slots, and why the others wait."""

from __future__ import annotations

import dataclasses
import functools
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from launcher import schedule
from launcher.model import SlotsTold
from launcher.schedule import Decision, Queued, Room, Start, Taken, decide, taken_by_others

NOW = 1_800_000_000.0
HOSTS = ("a", "b", "c")
FOUR = (Room("server1", 2), Room("server2", 2))
BOTH = ("server1", "server2")


def decided(
    *queued: Queued,
    own: tuple[Taken, ...] = (),
    others: tuple[Taken, ...] = (),
    rooms: tuple[Room, ...] = FOUR,
    over: frozenset[str] = frozenset(),
    now: float = NOW,
    going: frozenset[str] = frozenset(),
) -> Decision:
    return decide(queued, own, others, rooms, over, now, going)


def started(decision: Decision) -> dict[str, dict[str, int]]:
    return {start.run: dict(start.slots) for start in decision.starts}


# --- Who starts, and where ------------------------------------------------------------------------


def test_runs_start_in_the_order_of_their_priority_and_then_of_their_handing_in() -> None:
    low, late, early = (
        Queued("low", BOTH, 1, priority=-1, place=1),
        Queued("late", BOTH, 1, place=3),
        Queued("early", BOTH, 1, place=2),
    )
    assert [start.run for start in decided(low, late, early).starts] == ["early", "late", "low"]


def test_a_run_is_put_on_the_first_free_slots() -> None:
    busy = Taken("other", {"server1": 1})
    assert started(decided(Queued("r", BOTH, 2), others=(busy,))) == {"r": {"server1": 1, "server2": 1}}


def test_a_run_without_a_world_wants_all_slots_of_its_hosts() -> None:
    assert started(decided(Queued("r", ("server2",)))) == {"r": {"server2": 2}}
    waits = decided(Queued("r", BOTH), own=(Taken("x", {"server2": 1}),))
    assert waits.waiting == {"r": "waiting for 1 slot on server2"}


def test_three_runs_share_four_slots_and_the_third_is_told_what_it_waits_for() -> None:
    decision = decided(*(Queued(f"r{n}", BOTH, 2, place=n) for n in range(3)))
    assert started(decision) == {"r0": {"server1": 2}, "r1": {"server2": 2}}
    assert decision.waiting == {"r2": "waiting for 2 slots on server1, server2"}


def test_a_run_of_ours_that_the_hosts_tell_of_as_well_counts_once() -> None:
    ours = Taken("r", {"server1": 2})
    assert started(decided(Queued("next", BOTH, 2), own=(ours,), others=(ours,))) == {"next": {"server2": 2}}


def test_what_the_hosts_tell_of_others_is_put_together_by_run_and_user_and_ours_is_left_out() -> None:
    def told(run: str, user: str, slots: int, shared: bool = False) -> SlotsTold:
        return SlotsTold(run, user, 1, slots, 4, shared)

    found = taken_by_others(
        {
            "server1": [told("x", "bob", 2), told("mine", "me", 1)],
            "server2": [told("x", "bob", 1, True), told("x", "eve", 1)],
        },
        own=["mine"],
    )
    assert found == (
        Taken("x", {"server1": 2}, user="bob"),
        Taken("x", {"server2": 1}, shared=True, user="bob"),
        Taken("x", {"server2": 1}, user="eve"),
    )


def test_runs_that_share_lie_on_top_of_each_other_and_on_nobody_else() -> None:
    first = Taken("first", {"server1": 2}, shared=True)
    alone = Taken("alone", {"server2": 1})
    decision = decided(
        Queued("second", BOTH, 3, shared=True, place=1),
        Queued("third", ("server1",), 2, place=2),
        others=(first, alone),
    )
    assert started(decision) == {"second": {"server1": 2, "server2": 1}}
    assert decision.waiting == {"third": "waiting for 2 slots on server1"}


# --- Why a run waits ------------------------------------------------------------------------------


def test_a_run_waits_for_the_one_it_is_to_come_after_and_keeps_no_slots_meanwhile() -> None:
    chain = (Queued("second", BOTH, 4, after="first", place=1, priority=9), Queued("small", BOTH, 1, place=2))
    decision = decided(*chain, own=(Taken("first", {"server1": 1}),))
    assert decision.waiting == {"second": "waiting for run first to end"}
    assert started(decision) == {"small": {"server1": 1}}


def test_a_run_waits_also_for_one_that_goes_on_without_slots_here() -> None:
    decision = decided(Queued("r", BOTH, 1, after="elsewhere"), going=frozenset(["elsewhere"]))
    assert decision.waiting == {"r": "waiting for run elsewhere to end"}


def test_a_run_that_ended_somehow_or_that_nobody_knows_any_more_holds_nobody_up() -> None:
    ended = decided(Queued("r", BOTH, 1, after="x"), own=(Taken("x", {"server1": 1}),), over=frozenset(["x"]))
    assert "r" in started(ended)
    assert "r" in started(decided(Queued("r", BOTH, 1, after="pruned")))


def test_a_run_waits_for_its_time_which_is_told_with_the_day_unless_that_is_today() -> None:
    noon = time.mktime((2027, 1, 15, 12, 0, 0, 0, 0, -1))
    evening = decided(Queued("r", BOTH, 1, at=noon + 6 * 3600), now=noon)
    assert evening.waiting == {"r": "waiting until 18:00"}
    tomorrow = decided(Queued("r", BOTH, 1, at=noon + 24 * 3600), now=noon)
    assert tomorrow.waiting == {"r": "waiting until 2027-01-16 12:00"}
    assert "r" in started(decided(Queued("r", BOTH, 1, at=noon), now=noon))
    both = Queued("r", BOTH, 1, after="x", at=noon + 6 * 3600)
    going = frozenset(["x"])
    assert decided(both, going=going, now=noon).waiting == {"r": "waiting until 18:00"}
    assert decided(both, going=going, now=noon + 6 * 3600).waiting == {"r": "waiting for run x to end"}


def test_a_small_run_does_not_overtake_one_that_it_would_delay() -> None:
    busy = Taken("busy", {"server1": 1, "server2": 1})
    decision = decided(Queued("large", BOTH, 4, place=1), Queued("small", BOTH, 1, place=2), own=(busy,))
    assert decision.waiting == {
        "large": "waiting for 2 slots on server1, server2",
        "small": "behind run large, which it would delay",
    }


def test_a_small_run_overtakes_one_that_cannot_miss_its_slots() -> None:
    rooms = (Room("server1", 4),)
    busy = Taken("busy", {"server1": 3})
    queue = (Queued("large", ("server1",), 3, place=1), Queued("small", ("server1",), 1, place=2))
    assert started(decided(*queue, own=(busy,), rooms=rooms)) == {"small": {"server1": 1}}


def test_what_is_left_over_by_the_first_ahead_is_not_taken_from_the_second() -> None:
    rooms, host = (Room("server1", 10),), ("server1",)
    queue = (Queued("one", host, 5, place=1), Queued("two", host, 5, place=2), Queued("o", host, 2, place=3))
    decision = decided(*queue, own=(Taken("busy", {"server1": 6}),), rooms=rooms)
    assert decision.waiting["o"] == "behind run two, which it would delay"


def test_of_two_that_are_harmless_each_only_one_overtakes_if_both_are_not() -> None:
    rooms, host = (Room("server1", 10),), ("server1",)
    queue = (Queued("large", host, 7, place=1), Queued("o", host, 2, place=2), Queued("p", host, 2, place=3))
    decision = decided(*queue, own=(Taken("busy", {"server1": 6}),), rooms=rooms)
    assert started(decision) == {"o": {"server1": 2}}
    assert decision.waiting["p"] == "behind run large, which it would delay"


def test_a_run_that_would_delay_another_goes_where_nobody_waits_if_it_can() -> None:
    busy = Taken("busy", {"server1": 1})
    decision = decided(
        Queued("pinned", ("server1",), 2, place=1), Queued("any", BOTH, 1, place=2), own=(busy,)
    )
    assert started(decision) == {"any": {"server2": 1}}


def test_what_can_never_start_says_so_and_is_in_nobodys_way() -> None:
    decision = decided(
        Queued("huge", BOTH, 8, priority=9),
        Queued("lost", ("gone",), 1, priority=9),
        Queued("a", BOTH, 1, after="b", priority=9),
        Queued("b", BOTH, 1, after="a", priority=9),
        Queued("good", BOTH, 4),
    )
    assert decision.waiting == {
        "huge": "needs 8 slots; the hosts have 4",
        "lost": "none of its hosts is in the inventory",
        "a": "is to wait for run b, which waits for it",
        "b": "is to wait for run a, which waits for it",
    }
    assert "good" in started(decision)


def test_nothing_is_put_on_a_host_that_does_not_answer_and_nobody_is_refused_for_it() -> None:
    rooms = (Room("server1", 2), Room("server2", 2, answers=False))
    decision = decided(Queued("r", BOTH, 3, place=1), Queued("s", ("server2",), 1, place=2), rooms=rooms)
    assert decision.waiting == {
        "r": "waiting for 1 slot on server2; server2 does not answer",
        "s": "waiting for 1 slot on server2; server2 does not answer",
    }


def test_a_sentence_does_not_name_dozens_of_hosts() -> None:
    rooms = tuple(Room(f"server{n}", 1) for n in range(9))
    names = tuple(room.name for room in rooms)
    busy = Taken("busy", dict.fromkeys(names, 1))
    decision = decided(Queued("r", names, 2), others=(busy,), rooms=rooms)
    assert decision.waiting == {"r": "waiting for 2 slots on server0, server1, server2 and 6 more"}


# --- What always holds ----------------------------------------------------------------------------


Case = tuple[tuple[Room, ...], list[Taken], list[Queued]]


@st.composite
def cases(draw: st.DrawFn, alike: bool = False) -> Case:
    """A small cluster, runs that have slots, and a queue; alike: all want any host, and nobody shares."""
    count = draw(st.integers(1, 3))
    rooms = tuple(Room(name, draw(st.integers(1, 4)), alike or draw(st.integers(0, 7)) > 0)
                  for name in HOSTS[:count])  # fmt: skip
    names = tuple(room.name for room in rooms)
    shared = st.just(False) if alike else st.sampled_from((False, False, False, True))
    left, taken = {room.name: room.slots for room in rooms}, []
    for number in range(draw(st.integers(0, 3))):
        slots = {name: draw(st.integers(0, left[name])) for name in names}
        left = {name: left[name] - slots[name] for name in names}
        taken.append(Taken(f"t{number}", {k: v for k, v in slots.items() if v}, draw(shared)))
    hosts = st.just(names)
    if not alike:
        hosts = st.one_of(hosts, st.lists(st.sampled_from(names), min_size=1, unique=True).map(tuple))
    queue = [
        Queued(f"q{place}", draw(hosts), draw(st.integers(1, 8)), draw(st.integers(0, 1)), place,
               shared=draw(shared))
        for place in range(draw(st.integers(1, 5)))
    ]  # fmt: skip
    return rooms, taken, queue


def in_order(queue: list[Queued]) -> list[Queued]:
    return sorted(queue, key=lambda run: (-run.priority, run.place))


def as_taken(start: Start, queue: list[Queued]) -> Taken:
    return Taken(start.run, start.slots, next(run.shared for run in queue if run.run == start.run))


def free_on(room: Room, taken: tuple[Taken, ...], shared: bool) -> int:
    """Counted anew, with nothing of the scheduler's own."""
    alone = sum(each.slots.get(room.name, 0) for each in taken if not each.shared)
    together = max([each.slots.get(room.name, 0) for each in taken if each.shared], default=0)
    return room.slots - alone - (0 if shared else together)


@given(cases())
@settings(max_examples=150, deadline=None)
def test_no_host_is_given_away_twice_and_every_run_is_told_of_once(case: Case) -> None:
    rooms, taken, queue = case
    decision = decide(queue, taken, (), rooms, (), NOW)
    told = [start.run for start in decision.starts] + [*decision.waiting]
    assert sorted(told) == sorted(run.run for run in queue)
    assert all(decision.waiting.values())
    after = (*taken, *(as_taken(start, queue) for start in decision.starts))
    before = {room.name: free_on(room, tuple(taken), False) for room in rooms}
    assert all(free_on(room, after, False) >= min(0, before[room.name]) for room in rooms)
    wanted = {run.run: run for run in queue}
    for start in decision.starts:
        assert sum(start.slots.values()) == wanted[start.run].world
        assert set(start.slots) <= set(wanted[start.run].hosts) & {r.name for r in rooms if r.answers}
    assert decide(queue[::-1], taken[::-1], (), rooms, (), NOW) == decision


@given(cases())
@settings(max_examples=100, deadline=None)
def test_of_two_runs_that_want_the_same_the_later_one_never_starts_alone(case: Case) -> None:
    rooms, taken, queue = case
    twins = [dataclasses.replace(run, run=run.run + "-twin", place=run.place + 100) for run in queue]
    decision = decide(queue + twins, taken, (), rooms, (), NOW)
    begun = [start.run for start in decision.starts]
    for name in begun:
        if name.endswith("-twin"):
            assert name.removesuffix("-twin") in begun
            assert begun.index(name.removesuffix("-twin")) < begun.index(name)


# --- Nobody ahead is delayed ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class World:
    """Runs that start strictly in order among those that want some of the same hosts."""

    rooms: tuple[Room, ...]
    alive: tuple[tuple[str, tuple[tuple[str, int], ...], bool], ...]
    waiting: tuple[Queued, ...]

    def taken(self) -> tuple[Taken, ...]:
        return tuple(Taken(run, dict(slots), shared) for run, slots, shared in self.alive)

    def settled(self) -> World:
        """Once everybody has started who can."""
        world, passed = self, set[str]()
        for run in self.waiting:
            slots = world.fit(run) if passed.isdisjoint(run.hosts) else None
            if slots is None:
                passed.update(run.hosts)
            else:
                rest = tuple(other for other in world.waiting if other.run != run.run)
                world = World(self.rooms, (*world.alive, (run.run, slots, run.shared)), rest)
        return world

    def fit(self, run: Queued) -> tuple[tuple[str, int], ...] | None:
        need, found, taken = run.world or 0, [], self.taken()
        for room in self.rooms:
            if room.name in run.hosts and need:
                slots = min(need, max(0, free_on(room, taken, run.shared)))
                found.append((room.name, slots))
                need -= slots
        return None if need else tuple(pair for pair in found if pair[1])

    def without(self, name: str) -> World:
        return World(
            self.rooms, tuple(each for each in self.alive if each[0] != name), self.waiting
        ).settled()

    def started(self) -> set[str]:
        return {run for run, _, _ in self.alive}


def world(rooms: tuple[Room, ...], taken: tuple[Taken, ...], waiting: tuple[Queued, ...]) -> World:
    alive = tuple((each.run, tuple(each.slots.items()), each.shared) for each in taken)
    return World(rooms, alive, waiting).settled()


@functools.cache
def delays(without: World, with_it: World, overtaker: str) -> bool:
    """Whether some order of endings lets a run start later in the second world. In the worst of them the
    overtaker itself never ends."""
    if with_it.started() - {overtaker} != without.started():
        return True
    return any(
        delays(without.without(name), with_it.without(name), overtaker) for name in sorted(without.started())
    )


def silent_ones(rooms: tuple[Room, ...], taken: tuple[Taken, ...]) -> tuple[Taken, ...]:
    """Hosts that do not answer, as runs on them that may end: then they answer again."""
    return tuple(
        Taken(f"silent {room.name}", {room.name: max(0, free_on(room, taken, False))})
        for room in rooms
        if not room.answers
    )


@given(cases())
@settings(max_examples=150, deadline=None)
def test_whoever_overtakes_delays_nobody_ahead_in_whatever_order_runs_end(case: Case) -> None:
    rooms, taken, queue = case
    decision = decide(queue, taken, (), rooms, (), NOW)
    slots = {start.run: start for start in decision.starts}
    now = (*taken, *silent_ones(rooms, tuple(taken)))
    ahead: tuple[Queued, ...] = ()
    for run in in_order(queue):
        if run.run in decision.waiting:
            ahead += (run,)
        elif run.run in slots:
            with_it = (*now, as_taken(slots[run.run], queue))
            assert not delays(world(rooms, now, ahead), world(rooms, with_it, ahead), run.run)
            now = with_it
    delays.cache_clear()


@given(cases(alike=True))
@settings(max_examples=150, deadline=None)
def test_who_may_not_overtake_a_lone_run_would_delay_it_in_some_order_of_endings(case: Case) -> None:
    rooms, taken, queue = case
    first, second = in_order([*queue, dataclasses.replace(queue[0], run="last", place=99, world=1)])[:2]
    decision = decide([first, second], taken, (), rooms, (), NOW)
    if "behind" in decision.waiting.get(second.run, ""):
        now = world(rooms, tuple(taken), (first,))
        slots = dict(now.fit(second) or ())
        with_it = world(rooms, (*taken, Taken(second.run, slots)), (first,))
        assert delays(now, with_it, second.run)
    delays.cache_clear()


@given(cases(alike=True), st.lists(st.integers(1, 50), min_size=8, max_size=8))
@settings(max_examples=100, deadline=None)
def test_nobody_starts_later_than_if_all_started_strictly_in_order(
    case: Case, durations: list[float]
) -> None:
    rooms, taken, queue = case
    lasts = dict(zip([*(each.run for each in taken), *(run.run for run in queue)], durations, strict=False))
    strict = played(rooms, taken, queue, lasts, strictly=True)
    ours = played(rooms, taken, queue, lasts, strictly=False)
    assert all(ours[run] <= moment for run, moment in strict.items())
    assert set(ours) == set(strict)


def played(
    rooms: tuple[Room, ...],
    taken: list[Taken],
    queue: list[Queued],
    lasts: dict[str, float],
    *,
    strictly: bool,
) -> dict[str, float]:
    """When each run starts if each lasts as long as it does."""
    clock, began, alive = 0.0, dict[str, float](), {each.run: (lasts[each.run], each) for each in taken}
    queue = in_order(queue)
    never = dict(schedule.never(queue, {room.name: room for room in rooms}))
    while True:
        decision = decide(queue, [each for _, each in alive.values()], (), rooms, (), NOW)
        for start in decision.starts:
            if strictly and next(run.run for run in queue if run.run not in never) != start.run:
                break
            alive[start.run] = (clock + lasts[start.run], as_taken(start, queue))
            began[start.run] = clock
            queue = [run for run in queue if run.run != start.run]
        if not alive:
            return began
        clock = min(end for end, _ in alive.values())
        alive = {run: (end, each) for run, (end, each) in alive.items() if end > clock}
