"""Follow a run through all its attempts, and write down what happens: each event once, whoever is killed."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from launcher import fold, history, queued, redact, runs, tape, watch, watching
from launcher.agent import Agent, agents_for
from launcher.diagnose import Tails
from launcher.errors import InputError, RingctlError
from launcher.follow import Place, Update, follow
from launcher.history import Record
from launcher.model import Event, RunState
from launcher.transport import Pool

FLUSH_S = 0.1  # how long events wait for others to be written down with
MOST_EVENTS = 5000  # that wait
START_S = 60.0  # by then a run that was remembered has started everywhere, or will not
AGAIN_S = 0.1
GONE_S = 60.0  # a host that the others do not wait for any more is waited for so long
GOING_ON = ("starting", "running", "lost")
GAP_S = 7 * 86400.0  # a host that was away is asked for the rest for so long
LATELY_S = 86400.0  # a run that ended before anybody recorded it, so long ago, is still recorded


@dataclass(frozen=True)
class Batch:
    """What was just written down."""

    run: str
    first: int  # the number of the first event
    events: Sequence[Event]
    state: RunState
    unheard: Mapping[str, str]  # hosts that cannot be heard at the moment, and why
    over: bool = False  # nothing more will come


class Recorder:
    """Records one run, in whatever thread `record` is called in."""

    def __init__(
        self,
        run: str,
        *,
        on_batch: Callable[[Batch], None] = lambda _: None,
        stop: threading.Event | None = None,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.run, self.on_batch, self.note = run, on_batch, note
        self.stop = stop or threading.Event()
        self.state: RunState | None = None  # as it is written down; only ever replaced
        self.unheard: Mapping[str, str] = {}

    def record(self) -> watch.Outcome | None:
        """Until the run is over and nobody starts it again, or until `stop` is set: then None."""
        with watching.lock(self.run, "recording") as got:
            if not got:
                raise RingctlError(f"run {self.run} is being recorded by somebody else at this moment")
            with contextlib.closing(Pool(no_input=True)) as pool, tape.Tape(self.run) as book:
                try:
                    return self._attempts(pool, book)
                except tape.Forgotten:  # its launch took another id
                    return None

    def _attempts(self, pool: Pool, book: tape.Tape) -> watch.Outcome | None:
        while (record := history.read(self.run)) is not None and not self.stop.is_set():
            newest = record.plan.attempt
            pool.hidden = self._hidden(record)
            for missed in range(1, newest):
                if not tape.is_recorded(self.run, missed):
                    Attempt(self, record, missed, pool, book).follow()
            outcome = recorded(self.run, newest)
            if outcome is None:
                attempt = Attempt(self, record, newest, pool, book)
                outcome = attempt.follow() if attempt.wait_for_start() else None
            if outcome is None:
                break
            over = outcome.state.state in ("succeeded", "stopped")
            while not over and is_launching(self.run) and not self.stop.wait(AGAIN_S):
                pass  # who is to start it again is only there once its launch is through
            if over or not watching.begins_again(self.run, newest, self.stop.is_set):
                self._tell(book.last + 1, (), outcome.state, {}, over=not self.stop.is_set())
                return outcome
        return None

    def _hidden(self, record: Record) -> tuple[str, ...]:
        try:
            return redact.of_run(record.options)
        except InputError as error:
            self.note(f"run {self.run}: secrets are not looked for in what is recorded: {error.message}")
            return ()

    def _tell(
        self,
        first: int,
        events: Sequence[Event],
        state: RunState,
        unheard: Mapping[str, str],
        *,
        over: bool = False,
    ) -> None:
        self.state, self.unheard = state, unheard
        self.on_batch(Batch(self.run, first, events, state, unheard, over))


class Attempt:
    """One attempt of a run that is recorded."""

    def __init__(self, recorder: Recorder, record: Record, attempt: int, pool: Pool, book: tape.Tape) -> None:
        self.recorder, self.record, self.attempt, self.book = recorder, record, attempt, book
        self.pool = pool
        self.newest = attempt == record.plan.attempt
        # Somebody here knows already what became of it, though no host has told: it never started, say.
        self.marked = record.end is None and history.state_of(record.plan.run) not in GOING_ON
        self.live = self.newest and record.end is None and not self.marked
        self.state, self.tails = resumed(record, attempt)
        self.pending: list[Event] = []
        self.places: Mapping[str, Place] = {}
        self.due = 0.0
        self.gone_since: float | None = None

    def agents(self) -> Mapping[str, Agent]:
        hosts = self.record.hosts if self.newest else (*self.record.hosts, *self.record.former)
        return agents_for(hosts, self.pool)

    def wait_for_start(self) -> bool:
        """Until every host that can be asked has the attempt: it is remembered before it is started. Whether
        there is any sense in following it: it was not forgotten, nor anybody told us to stop."""
        since = max(0.0, time.time() - self.record.started)  # the clock may have been set back
        deadline = time.monotonic() + START_S - since
        while self.live and time.monotonic() < deadline:
            answers = runs.ask_hosts(self.record.hosts, self.pool, self.record.plan.run)
            told = [
                [state["attempt"] for state in runs.states_in(answer, self.record.plan.run)]
                for _, answer in answers
                if not isinstance(answer, RingctlError)
            ]
            if all(max(each, default=0) >= self.attempt for each in told):
                break
            if self.recorder.stop.wait(AGAIN_S) or history.read(self.record.plan.run) is None:
                return False
        return not self.recorder.stop.is_set()

    def follow(self) -> watch.Outcome | None:
        """To its end, or as far as it goes; None if somebody told us to stop before."""
        update: Update | None = None
        places = self.book.places(self.attempt)
        try:
            events = follow(
                self.agents(),
                self.record.plan.run,
                live=self.live,
                attempt=self.attempt,
                some=not self.newest,
                after=places,
                rank_hosts=self.record.rank_hosts_in(self.attempt),
            )
            with contextlib.closing(events):
                for update in events:
                    self.take(update)
                    if self.recorder.stop.is_set() or self.waits_in_vain(update.away):
                        break
        except tape.NotRecorded:
            raise
        except RingctlError as error:  # no host knows of it
            return self.never_was(error)
        self.write(update.unheard if update else {})
        if self.recorder.stop.is_set():
            return None
        return self.end(update)

    def take(self, update: Update) -> None:
        """Keep what came until it is worth a transaction."""
        self.pending += update.events
        self.places = update.places
        now = time.monotonic()
        if update.unheard != self.recorder.unheard or len(self.pending) >= MOST_EVENTS:
            self.due = 0.0
        if (self.pending or update.unheard != self.recorder.unheard) and now >= self.due:
            self.write(update.unheard)
            self.due = now + FLUSH_S

    def write(self, unheard: Mapping[str, str]) -> None:
        events, self.pending = self.pending, []
        for event in events:
            if event.kind != "line":
                self.state = fold.fold(self.known(event), event)
            self.tails.add(event)
        first = self.book.append(events, self.attempt, self.places, self.state)
        self.recorder._tell(first, events, self.state, dict(unheard))

    def known(self, event: Event) -> RunState:
        return self.state if self.newest else fold.with_rank(self.state, event)

    def waits_in_vain(self, away: Mapping[str, str]) -> bool:
        """Whether the run is over everywhere but on hosts that have been away for long."""
        going_on = {rank.host for rank in self.state.ranks.values() if rank.state in ("waiting", "running")}
        ended = any(rank.ended is not None for rank in self.state.ranks.values())
        if not ended or not going_on or not going_on <= away.keys():
            self.gone_since = None
            return False
        self.gone_since = self.gone_since or time.monotonic()
        return time.monotonic() > self.gone_since + GONE_S

    def end(self, update: Update | None) -> watch.Outcome | None:
        """Write down how it ended."""
        unheard = update.unheard if update else {}
        outcome = watch.outcome(self.state, self.tails, unheard)
        if self.newest and not self.live and outcome.state.state == "lost":  # who saw it end has heard more
            known = self.record.end or replace(outcome.state, state="failed")
            outcome = watch.Outcome(known, None)
        if self.newest and not self.marked:
            outcome.note()
        self.book.finish(with_cause(outcome, self.record), gap=self.has_gap(update, outcome.state))
        return outcome

    def has_gap(self, update: Update | None, state: RunState) -> bool:
        """Whether a host has more than it told: it is away, its log is gone or cannot be read, or its ranks
        have not ended. Where a supervisor is gone, whoever ends the run there writes down how it ended."""
        if update is None:
            return False
        not_ended = self.state.state not in fold.ENDED and not update.lost
        return bool(update.away) or not_ended or any(self.was_on(host, state) for host in update.lost)

    def was_on(self, host: str, state: RunState) -> bool:
        """Whether there was a log of this attempt on a host."""
        if self.newest:
            its = (rank for rank in state.ranks.values() if rank.host == host)
            return not self.marked and any(map(fold.has_begun, its))
        places = self.record.rank_hosts_in(self.attempt)
        return places is None or host in places.values()

    def never_was(self, error: RingctlError) -> watch.Outcome | None:
        """An attempt that did not start, or of which nobody has a log any more that can be read."""
        if self.pending:
            self.write({})
        if not self.newest:
            begun = any(map(fold.has_begun, self.state.ranks.values()))
            self.book.finish(watch.Outcome(fold.as_lost(self.state), None), gap=begun)
            return None
        known = self.record.end or self.asked()
        if known is not None and known.state in ("starting", "running"):
            return None  # there is a log to come, perhaps
        begun = any(map(fold.has_begun, (known or self.state).ranks.values()))
        outcome = watch.Outcome(known or replace(fold.as_lost(self.state), state="failed"), None)
        self.book.finish(with_cause(outcome, self.record), gap=begun)
        if known is not None and self.record.end is None:
            outcome.note()
        elif known is None and not self.marked:
            words = f"{'nobody knows how it ended' if begun else 'it did not start'}: {error.message}"
            history.mark(self.record.plan.run, "failed", error=words, fix=error.fix, attempt=self.attempt)
        return outcome

    def asked(self) -> RunState | None:
        """How the attempt is, by its hosts' states: a log that cannot be read does not tell."""
        if self.marked:
            return None
        state = runs.refreshed(runs.found_of(self.record), self.pool).state
        return state if state is not None and state.attempt == self.attempt else None


def with_cause(outcome: watch.Outcome, record: Record) -> watch.Outcome:
    """With what whoever saw it end has found, where we have found nothing."""
    from launcher.diagnose import Cause
    from launcher.model import from_json

    same = outcome.state.attempt == record.plan.attempt
    known = history.cause_by(record, outcome.state) if same else None
    if outcome.cause is not None or known is None:
        return outcome
    with contextlib.suppress(*history.UNREADABLE):
        return replace(outcome, cause=from_json(Cause, dict(known)))
    return outcome


def recorded(run: str, attempt: int) -> watch.Outcome | None:
    """How an attempt ended of which there is nothing more to be heard."""
    state = tape.folded(run, attempt) if tape.is_recorded(run, attempt) else None
    return watch.Outcome(state, None) if state is not None and state.state in fold.ENDED else None


def resumed(record: Record, attempt: int) -> tuple[RunState, Tails]:
    """The attempt as far as it is recorded."""
    run, tails = record.plan.run, Tails()
    state = tape.folded(run, attempt)
    newest = attempt == record.plan.attempt
    if state is None:
        state = fold.initial(record.plan)
        if not newest:
            state = replace(state, attempt=attempt, ranks={}, world=0)  # it may have had others
    for event in tape.unfolded(run, attempt):
        state = fold.fold(state if newest else fold.with_rank(state, event), event)
    for event in tape.last_words(run, attempt):
        tails.add(event)
    return state, tails


def is_launching(run: str) -> bool:
    row = queued.row(run)
    return row is not None and row.state == "starting"


def due(*, gaps: bool = True, lately: float = LATELY_S) -> list[str]:
    """Runs that are to be recorded, oldest first: those that go on, those whose newest attempt is recorded in
    part or not at all, those that somebody is about to start again, and those that ended `lately`, so many
    seconds ago at most, without anybody recording them. With `gaps` also those of which a host had more to
    tell when it was last asked, for some days."""
    words = """
        SELECT r.run FROM runs r LEFT JOIN attempts a ON a.run = r.run AND a.attempt = r.attempt
        WHERE (
            (r.state IN ('starting', 'running') AND NOT coalesce(a.over, 0))
            OR (a.run IS NOT NULL AND NOT a.over)
            OR (a.state = 'lost' AND r.ended IS NOT NULL)
            OR (a.run IS NULL AND EXISTS (SELECT 1 FROM attempts WHERE run = r.run))
            OR (a.run IS NULL AND r.ended > :lately)
            OR (:gaps AND coalesce(r.ended, r.started) > :gap AND EXISTS (
                SELECT 1 FROM attempts WHERE run = r.run AND over = :with_a_gap)))
        AND EXISTS (SELECT 1 FROM records WHERE run = r.run)
        ORDER BY r.run"""
    now = time.time()
    values = {"lately": now - lately, "gaps": gaps, "gap": now - GAP_S, "with_a_gap": tape.WITH_A_GAP}
    found: list[sqlite3.Row] = history.ask(lambda db: db.execute(words, values).fetchall(), [])
    about_to = [run for run in watching.to_be_watched() if watching.is_watched(run)]
    again = [run for run in about_to if history.state_of(run) in ("failed", "lost")]
    return sorted({*again, *(row["run"] for row in found)})
