"""See a run through, from attempt to attempt, to its end."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping

from launcher import fold, history
from launcher.agent import Agent, agents_for
from launcher.ask import Asked
from launcher.errors import RingctlError
from launcher.fanout import fan_out
from launcher.hostword import NOT_AGAIN
from launcher.leftovers import Leftovers
from launcher.model import Host, Plan
from launcher.nextattempt import Next, current_attempt
from launcher.restarts import failure_of, not_started
from launcher.rests import Beside, Rests
from launcher.transport import Pool
from launcher.watch import Interrupts, Outcome, Screen, watch
from launcher.watching import Book, Failure


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
            former, unended = former_hosts(plan.run)
            leftovers.look_after(former, agents, plan.attempt - 1, unended)
            again = asked.options.max_restarts > 0
            outcome, failure = one_attempt(
                plan,
                agents,
                beside,
                interrupts,
                book,
                again=again,
                least=asked.options.min_world,
                counts=not took_over,
            )
            rests.add(agents, outcome.heard_to, plan.attempt, plan.rank_hosts)
            over = outcome.state.state == "succeeded" or interrupts.count
            if book is None or over or book.stopped or not again:
                break
            if fold.was_stopped(outcome.state.ranks):  # on another machine: here nobody was told
                screen.note("somebody has stopped the run: it is not started again")
                give_slots_back(plan, agents, outcome.since)
                break
            took_over = False
            book.note(failure=failure)
            begun = Next(asked, pool, screen, interrupts, book, rests).begin(plan, outcome.since)
            if begun is None:
                note_over(outcome)
                give_slots_back(plan, agents, outcome.since)
                break
            plan, agents = begun
        everybody = {**agents_for(former_hosts(plan.run)[0], pool), **agents}
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


def former_hosts(run: str) -> tuple[tuple[Host, ...], tuple[str, ...]]:
    """Those that only earlier attempts were on, and which of them may still have something of it."""
    record = history.read(run)
    return (record.former, record.unended) if record else ((), ())


def one_attempt(
    plan: Plan,
    agents: Mapping[str, Agent],
    screen: Screen,
    interrupts: Interrupts,
    book: Book | None,
    *,
    again: bool,
    least: int | None,
    counts: bool = True,
) -> tuple[Outcome, Failure]:
    """How this attempt ended, which may go on with `least` ranks. One that whoever watched before us was
    about to start may be on no host: then it is none that `counts`."""
    state = fold.initial(plan)
    if book is None:
        outcome = watch(state, agents, screen, interrupts)
    else:
        try:
            outcome = watch(
                state, agents, screen, interrupts, again=again,
                given_up=lambda: book.stopped, unmet=book.unmet, least=least,
            )  # fmt: skip
        except RingctlError as error:
            return Outcome(fold.as_lost(state), None), not_started(plan.attempt, error, counts=counts)
    outcome.note()
    return outcome, failure_of(outcome)
