"""Runs that go on after a failure: whether, when, and with whom; and the loop that does it."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from launcher import ask, fold, history, runs
from launcher.agent import Agent, agents_for
from launcher.ask import Asked
from launcher.errors import HostError, NotKept, RingctlError, StoppedEarly
from launcher.fanout import fan_out
from launcher.follow import first
from launcher.hostword import NOT_AGAIN
from launcher.leftovers import Leftovers, end_before
from launcher.model import Host, Inventory, Plan
from launcher.plan import LaunchOptions, place, restart_delay
from launcher.rests import Beside, Rests
from launcher.run import SlotsTaken, launch
from launcher.transport import Pool
from launcher.watch import GRACE_S, Interrupts, Outcome, Screen, watch
from launcher.watching import Book, Failure

ROOM_S, LONGEST_PAUSE_S = 3600.0, 15.0  # how long, and how often, it is tried where our own disk is full
FIRST_LOOK_S, LAST_LOOK_S = 1.0, 30.0  # how often it is tried whether slots that others took are free again
# Addresses, ports and times are never the same.
PASSING = re.compile(r"0x[0-9a-f]+|(?<=:)\d{4,5}\b|\b[\d.]+ ?m?s\b")

# --- Pure: whether, when, and with whom ----------------------------------------------------------


def failure_of(outcome: Outcome) -> Failure:
    """What is worth knowing of a failed attempt when the next one fails."""
    state, cause = outcome.state, outcome.cause
    who = state.ranks.get(cause.rank) if cause and cause.rank is not None else None
    steps = [r.metric.get("step") for r in ([who] if who else state.ranks.values())]
    step = max((step for step in steps if isinstance(step, int)), default=None)
    text = cause.text if cause else f"it is {state.state}"
    return Failure(state.attempt, step, PASSING.sub("#", text) if who else "", text)


def not_started(attempt: int, error: RingctlError, *, counts: bool = True) -> Failure:
    return Failure(attempt, None, "", error.message, counts)


def why_not_again(options: LaunchOptions, failures: Sequence[Failure]) -> str:
    """ "" if the run may start once more."""
    if counted(failures) > options.max_restarts:
        times = "once" if options.max_restarts == 1 else f"{options.max_restarts} times"
        return f"it was started again {times}, as often as --max-restarts allows"
    if len(failures) > 1 and failures[-1].error and same(failures[-1], failures[-2]):
        where = "" if failures[-1].step is None else f" at step {failures[-1].step}"
        return f"it failed{where} as the attempt before did; starting again would not help"
    return ""


def counted(failures: Sequence[Failure]) -> int:
    return sum(failure.counts for failure in failures)


def same(one: Failure, other: Failure) -> bool:
    """One that was killed from outside before its first step says nothing about the program either."""
    killed = "SIGKILL" in one.error and one.step is None
    return (one.step, one.error) == (other.step, other.error) and not killed


def without(
    inventory: Inventory, options: LaunchOptions, away: Mapping[str, str], back: Collection[str] = ()
) -> LaunchOptions:
    """The options with which the run goes on without these hosts. If too few ranks would be left, with those
    that were left out and are `back`; raises if these are too few, too."""
    left_out = options.left_out | away.keys()
    full = options.full_world or world_of(inventory, options)

    def world_without(names: Collection[str]) -> int:
        slots = sum(host.slots for host in inventory.hosts if host.name not in names)
        return min(options.world or full, slots)

    if world_without(left_out) < (options.min_world or 0):
        left_out -= set(back)
    world = world_without(left_out)
    if options.min_world is None or world < options.min_world:
        least = f", and --min-world is {options.min_world}" if options.min_world else ""
        raise HostError(
            next(iter(away)), f"{next(iter(away.values()))}; without it {world} ranks are left{least}"
        )
    return replace(options, world=world, full_world=full, left_out=frozenset(left_out))


def world_of(inventory: Inventory, options: LaunchOptions) -> int:
    return place(inventory, options.world)[-1][1].stop


def same_world(asked: Asked, plan: Plan, hosts: Sequence[Host]) -> Asked:
    """The run as its last attempt was."""
    names = {host.name for host in hosts}
    out = frozenset(host.name for host in asked.inventory.hosts if host.name not in names)
    full = asked.options.full_world or world_of(asked.inventory, asked.options)
    left_out = out if plan.world < full else asked.options.left_out
    return replace(
        asked, options=replace(asked.options, world=plan.world, full_world=full, left_out=left_out)
    )


def other_world(asked: Asked, world: int | None) -> Asked:
    """The run with so many ranks, or as many as it was launched with, on whatever hosts it needs for them."""
    full = asked.options.full_world or world_of(asked.inventory, asked.options)
    options = replace(asked.options, world=world or full, full_world=full, left_out=frozenset())
    place(asked.inventory, options.world)
    return replace(asked, options=options)


def needed(asked: Asked) -> list[Host]:
    """The hosts that its ranks are to be on."""
    hosts = ask.chosen_hosts(asked.inventory, None, ",".join(asked.options.left_out) or None)
    return [host for host, _ in place(hosts, asked.options.world)]


def leaving_out(asked: Asked, names: Iterable[str]) -> tuple[Asked, int]:
    """The same without these hosts, and how many ranks the others have room for."""
    left_out = asked.options.left_out.union(names)
    room = sum(host.slots for host in asked.inventory.hosts if host.name not in left_out)
    return replace(asked, options=replace(asked.options, left_out=left_out)), room


# --- The loop ------------------------------------------------------------------------------------


def see_through(
    asked: Asked,
    plan: Plan,
    agents: Mapping[str, Agent],
    screen: Screen,
    interrupts: Interrupts,
    pool: Pool,
    book: Book | None,
    *,
    lines: bool = True,
) -> Outcome:
    """Watch the run to its end, through as many attempts as it may have. Where nobody sees its `lines`, those
    of hosts that were away are not asked for later."""
    leftovers = Leftovers(plan.run, pool)
    rests = Rests(plan.run, screen.note, wanted=lines)
    beside = Beside(screen, rests)
    took_over = book is not None and book.took_over
    try:
        while True:
            leftovers.look_after(former_hosts(plan.run), agents, plan.attempt - 1)
            again = asked.options.max_restarts > 0
            outcome, failure = one_attempt(
                plan, agents, beside, interrupts, book, again=again, counts=not took_over
            )
            rests.add(agents, outcome.heard_to, plan.attempt, plan.rank_hosts)
            over = outcome.state.state in ("succeeded", "stopped") or interrupts.count
            if book is None or over or book.stopped or not again:
                break
            took_over = False
            book.note(failure=failure)
            begun = next_attempt(asked, plan, screen, interrupts, pool, book, outcome.since, rests)
            if begun is None:
                note_over(outcome)
                give_slots_back(plan, agents, outcome.since)
                break
            plan, agents = begun
        everybody = {**agents_for(former_hosts(plan.run), pool), **agents}
        show_last(rests, outcome, everybody, screen, interrupts, book)
        return outcome
    finally:
        rests.close()
        if unasked := leftovers.close():
            screen.note(unasked)


def show_last(
    rests: Rests,
    outcome: Outcome,
    agents: Mapping[str, Agent],
    screen: Screen,
    interrupts: Interrupts,
    book: Book | None,
) -> None:
    """What can still be had of the log, and what cannot. Who stopped the run waits for us to end; who presses
    Ctrl-C once more does not want to wait."""
    before = interrupts.count

    def hurry() -> bool:
        return before > 0 or (book is not None and book.stopped)

    for events in rests.last(agents, hurry, lambda: interrupts.count > before):
        screen.show(events, outcome.state)
    for words in rests.missing():
        screen.note(words)


def note_over(outcome: Outcome) -> None:
    """The run is remembered as an attempt that did not start, of which no host can tell: it has ended as the
    one before it did."""
    record = history.read(outcome.state.run)
    if record is None or record.end is not None or record.plan.attempt == outcome.state.attempt:
        return
    text, fix = (outcome.cause.text, outcome.cause.fix) if outcome.cause else ("", "")
    with contextlib.suppress(RingctlError):  # a full disk: the hosts are asked the next time
        run, attempt = record.plan.run, record.plan.attempt
        history.mark(run, outcome.state.state, error=text, fix=fix, attempt=attempt)


def give_slots_back(plan: Plan, agents: Mapping[str, Agent], away: Collection[str]) -> None:
    """There is no next attempt to keep them for. A host that cannot be asked does so for a while."""
    keeps = [host.host for host in plan.hosts if host.keeps and host.host not in away]
    attempt = current_attempt(plan.run, plan.attempt)
    fan_out(keeps, lambda name: agents[name].stop(plan.run, 0.0, NOT_AGAIN, attempt, exact=True))


def former_hosts(run: str) -> tuple[Host, ...]:
    """Those that only earlier attempts were on."""
    record = history.read(run)
    return record.former if record else ()


def one_attempt(
    plan: Plan,
    agents: Mapping[str, Agent],
    screen: Screen,
    interrupts: Interrupts,
    book: Book | None,
    *,
    again: bool,
    counts: bool = True,
) -> tuple[Outcome, Failure]:
    """How this attempt ended. One that whoever watched before us was about to start may be on no host: then
    it is none that `counts`."""
    state = fold.initial(plan)
    if book is None:
        outcome = watch(state, agents, screen, interrupts)
    else:
        try:
            outcome = watch(
                state, agents, screen, interrupts, again=again,
                given_up=lambda: book.stopped, unmet=book.unmet,
            )  # fmt: skip
        except RingctlError as error:
            return Outcome(fold.as_lost(state), None), not_started(plan.attempt, error, counts=counts)
    outcome.note()
    return outcome, failure_of(outcome)


def next_attempt(
    asked: Asked,
    plan: Plan,
    screen: Screen,
    interrupts: Interrupts,
    pool: Pool,
    book: Book,
    away: Mapping[str, float],
    rests: Rests,
) -> tuple[Plan, Mapping[str, Agent]] | None:
    """The run, started again; None if it may not, cannot, or is not wanted any more."""
    attempt = plan.attempt
    while True:
        why_not = why_not_again(asked.options, book.failures)
        if why_not:
            screen.note(f"{book.failures[-1].cause}; {why_not}")
            return None
        seconds = restart_delay(asked.options, len(book.failures))
        left = asked.options.max_restarts - counted(book.failures)
        what = f"attempt {attempt + 1} begins in {seconds:.0f} s"
        after = "the last one" if left == 0 else f"{left} more after it"
        screen.note(f"attempt {book.failures[-1].attempt} failed: {book.failures[-1].cause}; {what}, {after}")
        book.note(what)
        if not wait(seconds, interrupts, book):
            return None
        book.note(f"starting attempt {attempt + 1}")
        try:
            begun = once_free(asked, attempt, pool, screen, interrupts, away, book)
        except StoppedEarly:
            screen.note("somebody has stopped the run meanwhile: it is not started again")
            return None
        except RingctlError as error:
            book.note(failure=not_started(attempt + 1, error))
            used = current_attempt(plan.run, attempt)
            add_unfollowed(rests, plan.run, range(attempt + 1, used + 1), pool)
            attempt = max(attempt + 1, used)
            continue
        if begun is None:
            return None
        book.note()
        add_unfollowed(rests, plan.run, range(attempt + 1, begun[0].attempt), pool)
        if book.stopped:  # while it was starting
            runs.stop(begun[1], plan.run, GRACE_S, attempt=begun[0].attempt)
        return begun


def once_free(
    asked: Asked,
    attempt: int,
    pool: Pool,
    screen: Screen,
    interrupts: Interrupts,
    away: Mapping[str, float],
    book: Book,
) -> tuple[Plan, Mapping[str, Agent]] | None:
    """Start the next attempt; where others have taken its slots, as soon as they are free again, which is no
    failure of the run's. None if it is not wanted any more by then."""
    while True:
        try:
            return once_it_can_be_kept(asked, attempt, pool, screen, interrupts, away, book)
        except SlotsTaken as error:
            taken: SlotsTaken | None = error
        seconds, told = FIRST_LOOK_S, ""
        while taken is not None:
            words = f"attempt {attempt + 1} waits for its slots: {taken.message}"
            if words != told:
                screen.note(words)
                book.note(words)
            if not wait(seconds, interrupts, book):
                return None
            seconds, told, taken = min(2 * seconds, LAST_LOOK_S), words, taken.still()


def wait(seconds: float, interrupts: Interrupts, book: Book) -> bool:
    """Whether the run is still wanted after so many seconds."""
    deadline = time.monotonic() + seconds
    while not interrupts.count and not book.stopped:
        if time.monotonic() >= deadline:
            return True
        time.sleep(0.1)
    return False


def current_attempt(run: str, attempt: int) -> int:
    """The newest attempt that somebody began to start; a start that failed has used up its number."""
    record = history.read(run)
    return max(attempt, record.plan.attempt) if record else attempt


def add_unfollowed(rests: Rests, run: str, attempts: Iterable[int], pool: Pool) -> None:
    """What ranks said in attempts that did not start everywhere, and were ended again where they did."""
    record = history.read(run)
    if record is None:
        return
    agents = agents_for(record.hosts, pool)
    for attempt in attempts:
        places = dict.fromkeys(agents, first(attempt))
        rests.add(agents, places, attempt, record.rank_hosts_in(attempt), missed=False)


def once_it_can_be_kept(
    asked: Asked,
    attempt: int,
    pool: Pool,
    screen: Screen,
    interrupts: Interrupts,
    away: Mapping[str, float],
    book: Book,
) -> tuple[Plan, Mapping[str, Agent]] | None:
    """The next attempt, once this machine can write down that there is one: a full disk here is no failure of
    the run, unless it stays so. None if the run is not wanted any more."""
    deadline, pause, said = time.monotonic() + ROOM_S, 0.5, ""
    while True:
        attempt = current_attempt(asked.options.run, attempt)
        try:
            return again(asked, attempt, pool, screen, interrupts, away)
        except NotKept as error:
            if time.monotonic() > deadline:
                raise
            words = f"{error.message}; attempt {attempt + 1} begins once that has changed"
            if words != said:
                screen.note(words)
            said = words
            book.note(words)
        pause = min(2 * pause, LONGEST_PAUSE_S)
        if not wait(pause, interrupts, book):
            return None


def again(
    asked: Asked,
    attempt: int,
    pool: Pool,
    screen: Screen,
    interrupts: Interrupts,
    away: Mapping[str, float],
) -> tuple[Plan, Mapping[str, Agent]]:
    """End what is left of the attempts before, look whether all hosts are well, and start the next one: on
    the same hosts, or, where that is allowed, without those that cannot be reached; `away` are those that
    were not heard in the end, and since when."""
    run = asked.options.run
    record = history.read(run)
    hosts = (*record.hosts, *record.former) if record else ()
    needed = {host.name for host in record.hosts} if record else set()
    unasked = end_before(agents_for(hosts, pool), run, attempt, away)
    history.note_ended(run, [host.name for host in hosts if host.name not in unasked], unasked)
    history.need_room()  # before hosts are asked for more
    lacking = {name: why for name, why in unasked.items() if name in needed}
    options = replace(ask.again(record.options if record else asked.options), attempt=attempt + 1)
    if lacking and options.min_world is not None:
        before = with_code(asked, options, hosts)
        back = {host.name for host in hosts} - unasked.keys()
        options = without(asked.inventory, before, lacking, back)
        names = ", ".join(f"{host} ({why})" for host, why in lacking.items())
        taken_in = ", ".join(sorted(before.left_out - options.left_out))
        names += f", and with {taken_in} again" if taken_in else ""
        screen.note(f"going on with {options.world} of {options.full_world} ranks, without {names}")
    return launch(replace(asked, options=options), pool, screen, interrupts, automatic=True)


def with_code(asked: Asked, options: LaunchOptions, hosts: Sequence[Host]) -> LaunchOptions:
    """Without hosts that the run never was on, if nobody here could push its code to them."""
    if asked.snapshot is not None:
        return options
    strangers = {host.name for host in asked.inventory.hosts} - {host.name for host in hosts}
    return replace(options, left_out=options.left_out | strangers)
