"""Watch a run to its end, and end it everywhere once it has to be ended."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from launcher import fold, history
from launcher.agent import Agent
from launcher.ask import lease_seconds
from launcher.diagnose import Cause, Tails, absent_ranks, first_failure, standstill
from launcher.errors import RingctlError
from launcher.fanout import fan_out
from launcher.follow import Clock, Place, Update, first, follow, newly_lost, presence
from launcher.lastword import said_last
from launcher.model import Event, Host, Plan, RankState, RunState, to_json
from launcher.runs import STOPPED, stop
from launcher.told import CLOCKS_AGREE_S
from launcher.transport import Pool

SETTLE_S, FAILED_GRACE_S = 1.0, 3.0  # as hostd does it on one host
GRACE_S = 5.0  # between TERM and KILL
STACKS_S = 3.0  # by then every host that noticed a standstill has said where its ranks are
TOLD_S = 10.0  # so long a host that was asked to end its ranks may be silent
LATEST_S, LONGEST_S = 120.0, 3600.0  # so long it may talk; the second as long as that leads to an end
MOST_LATE, AN_EVENT = 1 << 30, 100  # characters it may have left to tell; what an event is beside its text
GONE_S = 60.0  # and who cannot be heard any more, though its ranks have ended, may be away
NOT_OVER = "its ranks have ended, and the end of its log has not come; Ctrl-C does without"
NOT_TOLD = "it was asked to end its ranks, and does not tell that they ended: they may be there still"
AWAY_LEASES = 6  # so long a host with the last ranks may be away before the run goes on without
PROOFS = 2  # so often others are heard meanwhile, and it is not
LONGEST_STEP_S = 1.0  # who takes longer from one look to the next has been stopped meanwhile
RETRY_S, AGAIN_S = 15.0, 1.0  # how long, and how often, a host is asked to stop that cannot be asked


class Screen(Protocol):
    """Where a run is shown."""

    def plan(self, plan: Plan) -> None:
        """Called once, before anything is started."""

    def show(self, events: list[Event], state: RunState) -> None:
        """Called several times a second, also with no events."""

    def note(self, text: str) -> None:
        """ringctl's own word about the run."""


def do_nothing() -> None:
    """About Ctrl-C, as long as nobody watches."""


class Interrupts:
    """Counts Ctrl-C from `hold` on: the first stops the run cleanly, the second kills it. Before that, and
    after `release`, Ctrl-C is Python's own KeyboardInterrupt."""

    def __init__(self) -> None:
        self.count = 0
        self.act: Callable[[], None] = do_nothing  # called also while what is shown is not read
        self._before: Any = None

    def __call__(self, *_: object) -> None:
        self.count += 1

    @property
    def grace(self) -> float:
        """What the last of them leaves the ranks to end by themselves."""
        return GRACE_S if self.count == 1 else 0.0

    def hold(self) -> bool:
        """Whether they were not held before."""
        if self._before is not None:
            return False
        self._before = signal.signal(signal.SIGINT, self)
        return True

    def release(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None


@dataclass(frozen=True)
class Outcome:
    """How a run ended, as far as it could be seen."""

    state: RunState
    cause: Cause | None
    away: Mapping[str, str] = field(default_factory=dict)  # hosts that were not heard in the end, and why
    since: Mapping[str, float] = field(default_factory=dict)  # when they fell silent, on our monotonic clock
    heard_to: Mapping[str, Place] = field(default_factory=dict)  # how far whose log is shown that is not over

    def note(self) -> None:
        """Write it down, so that ps, status and explain say the same later, whoever can be asked then."""
        history.close(self.state, to_json(self.cause) if self.cause else None)

    def event(self) -> Event:
        """The last event that a reader of JSON gets."""
        data = {
            "state": self.state.state,
            "exit_code": fold.exit_code(self.state),
            "cause": self.cause.text if self.cause else None,
            "fix": self.cause.fix if self.cause else None,
            "accuracy": fold.result(self.state, "accuracy"),
            "parameters_sha256": fold.result(self.state, "parameters_sha256"),
        }
        when = self.state.ended or time.time()
        return Event("run_finished", when, self.state.run, self.state.attempt, "", None, data)


def watch(
    state: RunState,
    agents: Mapping[str, Agent],
    screen: Screen,
    interrupts: Interrupts,
    *,
    again: bool = False,
    given_up: Callable[[], bool] = lambda: False,
    unmet: Callable[[], float | None] = lambda: None,
    least: int | None = None,
) -> Outcome:
    """Show the run until it is over. Ctrl-C, counted by `interrupts`, stops it; so does a stop of somebody
    else's that is left `unmet`, with its grace. If it is to start `again`, nobody waits for hosts that are
    away: what they have ends by itself. With `least` ranks it may do without the others' hosts."""
    tails, ender, stalls = Tails(), Ender(agents, interrupts, screen, again, unmet, least), Stalls(screen)
    absent = Absent(screen)
    shown: Mapping[str, Place] = {}
    open_: frozenset[str] = frozenset()
    planned = {number: rank.host for number, rank in state.ranks.items()}
    after: Mapping[str, Place] | None = {} if again else None
    with ender.minding(lambda: ender.mind(state)):
        for update in follow(
            agents, state.run, live=True, attempt=state.attempt, rank_hosts=planned, after=after
        ):
            absent.take(update)
            shown, open_ = update.places, update.open
            for event in update.events:
                state = fold.fold(state, event)
                tails.add(event)
            for words in said_last(update.events):
                screen.note(words)
            began = time.monotonic()
            screen.show(update.events, state)
            ender.showed(update.events, state, began)
            stalls.look(update.events, state, tails, absent.away)
            ender.look(state, absent.lost, absent.away)
            if (
                ender.waits_in_vain(state, absent.unheard, open_)
                or ender.is_not_told_the_end(state, absent.since, open_, given_up)
                or (absent.away.keys() == agents.keys() and given_up())
            ):
                absent.add(ender.untold(state, absent.unheard))
                if not again:
                    screen.note(not_read(state, {*absent.unheard, *open_}))
                break
        ender.finish(state, absent.lost)
    rest = {*absent.unheard, *open_} if again else ()
    heard_to = {host: shown.get(host, first(state.attempt)) for host in rest}
    return replace(outcome(state, tails, absent.unheard), since=absent.since, heard_to=heard_to)


class Absent:
    """The hosts that cannot be heard, or whose part is lost, each with a sentence, and since when that is so.
    Whoever comes or goes is told."""

    def __init__(self, screen: Screen) -> None:
        self.away: Mapping[str, str] = {}
        self.lost: Mapping[str, str] = {}
        self.unheard: Mapping[str, str] = {}  # both, and what was `add`ed
        self.since: dict[str, float] = {}
        self._screen = screen

    def take(self, update: Update) -> None:
        for words in (*presence(self.away, update.away), *newly_lost(self.lost, update.lost)):
            self._screen.note(words)
        self.away, self.lost, self.unheard = update.away, update.lost, update.unheard
        self.since = {host: self.since.get(host, time.monotonic()) for host in self.unheard}

    def add(self, untold: Mapping[str, str]) -> None:
        """Hosts that may be heard, but have not told how it ended there."""
        for words in untold.values():
            self._screen.note(words)
        self.unheard = {**untold, **self.unheard}


def not_read(state: RunState, hosts: Iterable[str]) -> str:
    """Of hosts that were not heard to their end, where nobody reads on later."""
    return f"{', '.join(sorted(hosts))}: the rest of the log of attempt {state.attempt} is missing here"


def outcome(state: RunState, tails: Tails, away: Mapping[str, str] | None = None) -> Outcome:
    """How the run ended, and why; `away` are hosts that could not be heard in the end, or lost their part."""
    if state.state not in fold.ENDED:
        state = fold.as_lost(state)
    return Outcome(state, first_failure(state, tails, away), away or {})


# --- Ending it -----------------------------------------------------------------------------------


class Ender:
    """Ends a watched run: when the user asks for it, and everywhere once it cannot go on somewhere."""

    def __init__(
        self,
        agents: Mapping[str, Agent],
        interrupts: Interrupts,
        screen: Screen,
        again: bool,
        unmet: Callable[[], float | None],
        least: int | None,
    ) -> None:
        self.agents, self.interrupts, self.screen, self.again = agents, interrupts, screen, again
        self.unmet, self.least = unmet, least
        self.clock = Clock()  # as it was when the run began to be followed: events have their times by that
        self.seen = 0
        self.untold_words: list[str] = []  # about Ctrl-C
        self.end_at: float | None = None  # the other hosts' ranks may fail by themselves until then
        self.stops: list[Stop] = []
        self.patience = Patience()
        self.silence = Silence(AWAY_LEASES * lease_seconds(), lambda: who_answers(agents))
        self.all_ended: float | None = None  # when the last rank was seen to have ended
        self.told_who = ""  # that they do not come to the end
        self.in_vain = False  # somebody has asked again although the hosts had answered: not to wait any more

    def look(self, state: RunState, lost: Mapping[str, str], away: Mapping[str, str]) -> None:
        """Called several times a second."""
        self.mind(state)
        while self.untold_words:
            self.screen.note(self.untold_words.pop(0))
        for words in (words for one in self.stops for words in one.news()):
            self.screen.note(words)
        grace = None if self.stops or state.ended is not None else self.unmet()
        if grace is not None:
            self.screen.note("somebody has begun to stop the run, and not ended it: stopping it")
            self.stop(state, self.agents, grace, STOPPED)
        reason = "" if self.stops or len(self.agents) < 2 else why_it_cannot_go_on(state, lost)
        last = going_on(state)
        if not self.stops and self.can_do_without(state, last):
            reason = reason or self.silence.look(last, away, time.monotonic())
        if not reason or state.ended is not None:
            self.end_at = None
            return
        self.end_at = self.end_at or time.monotonic() + SETTLE_S
        if time.monotonic() >= self.end_at:
            there = {name: agent for name, agent in self.agents.items() if not self.again or name not in away}
            self.stop(state, there, FAILED_GRACE_S, reason)

    def mind(self, state: RunState) -> None:
        """Do what Ctrl-C is for. It shows nothing: it is called also while something waits to be shown."""
        if self.interrupts.count <= self.seen:
            return
        self.in_vain = self.seen > 0 and self.has_answers()
        self.seen = self.interrupts.count
        first = self.seen == 1
        self.untold_words.append(
            "stopping the run; press Ctrl-C again to kill it" if first else "killing the run"
        )
        self.stop(state, self.agents, GRACE_S if first else 0.0, STOPPED)

    @contextlib.contextmanager
    def minding(self, act: Callable[[], None]) -> Iterator[None]:
        """Ctrl-C does this meanwhile. Who leaves because nobody reads this any more has begun to end hosts
        only where that has to be done."""
        self.interrupts.act = act
        try:
            yield
        except BrokenPipeError:
            for one in self.stops:
                one.join()
            raise
        finally:
            self.interrupts.act = do_nothing

    def can_do_without(self, state: RunState, hosts: Collection[str]) -> bool:
        """Whether a next attempt may begin without these."""
        others = sum(rank.host not in hosts for rank in state.ranks.values())
        return self.again and self.least is not None and others >= self.least

    def stop(self, state: RunState, agents: Mapping[str, Agent], grace: float, reason: str) -> None:
        self.patience = Patience()
        self.stops.append(Stop(agents, state.run, grace, reason, state.attempt, self.clock))
        self.stops[-1].start()

    def has_answers(self) -> bool:
        """Whether the run was ended wherever that was possible."""
        return bool(self.stops) and not any(one.is_alive() for one in self.stops)

    def showed(self, events: list[Event], state: RunState, began: float) -> None:
        """That showing these events began then, and is done."""
        if self.has_answers():
            hosts = going_on(state)
            late = [event for event in events if event.host in hosts]
            self.patience.took(late, max(began, self.stops[-1].answered), self.stops[-1].answered_at)
        if events:
            self.patience.heard = time.monotonic()

    def waits_in_vain(self, state: RunState, unheard: Mapping[str, str], open_: Collection[str]) -> bool:
        """Whether the run was ended wherever that was possible, and what is left cannot be heard, or does not
        tell. Hosts whose ranks have ended may have a last word: a next attempt does not wait for it, for it
        is read beside that; where there is none, nobody would read it later."""
        if not self.has_answers() or not going_on(state):
            return False
        last_words = () if self.again else set(open_) - unheard.keys()
        return not (last_words or self.untold(state, unheard)) or self.is_late(time.monotonic())

    def is_not_told_the_end(
        self,
        state: RunState,
        since: Mapping[str, float],
        open_: Collection[str],
        given_up: Callable[[], bool],
    ) -> bool:
        """Whether all ranks have ended, and hosts do not come to an end of their log. One may wait for room
        on a full disk, so that is waited for, unless somebody has the run stopped or a next attempt waits:
        what they still say is read beside that. `since` when which hosts cannot be heard."""
        if going_on(state) or not open_:
            self.all_ended = None
            return False
        now = time.monotonic()
        self.all_ended = self.all_ended or now
        if self.has_answers():
            return self.is_late(now)
        quiet = now - max(self.all_ended, self.patience.heard)
        if quiet > TOLD_S and not self.told_who:
            self.told_who = ", ".join(sorted(open_))
            self.screen.note(f"{self.told_who}: {NOT_OVER}")
        if quiet > TOLD_S and given_up():
            return True
        gone = set(open_) <= since.keys() and now > max(since[host] for host in open_) + GONE_S
        return (gone and quiet > GONE_S) or (self.again and now - self.all_ended > LATEST_S)

    def is_late(self, now: float) -> bool:
        """Whether hosts that were asked to end their ranks had long enough to tell how they ended: that comes
        after all that the ranks have said. A next attempt does not wait for hosts that still tell of this
        one; whoever asks again once the hosts have answered does not either."""
        if self.in_vain or self.seen > 2:
            return True
        last = self.stops[-1]
        waits = self.again and last.reason != STOPPED
        return self.patience.is_over(now, last.answered, last.grace, LATEST_S if waits else LONGEST_S)

    def untold(self, state: RunState, unheard: Mapping[str, str]) -> dict[str, str]:
        """Hosts that can be heard, and have not told that their ranks ended; with a sentence."""
        hosts = sorted(going_on(state) - unheard.keys())
        return {host: f"{host}: {NOT_TOLD}" for host in hosts}

    def finish(self, state: RunState, lost: Mapping[str, str]) -> None:
        """Wait for what was asked of the hosts, and say what could not be. A host without supervisor may
        still have what its ranks have started."""
        if lost and not self.stops:
            gone = {name: self.agents[name] for name in lost}
            self.stop(state, gone, FAILED_GRACE_S, why_it_cannot_go_on(state, lost))
        for one in self.stops:
            one.join()
        if self.stops and self.stops[-1].failed:
            hosts = ", ".join(self.stops[-1].failed)
            later = (
                "what is there ends by itself"
                if self.again and self.stops[-1].reason != STOPPED
                else f"once that changes: ringctl stop {state.run}"
            )
            self.screen.note(f"{hosts} cannot be reached; {later}")


def going_on(state: RunState) -> set[str]:
    """Hosts with ranks that have not ended."""
    return {rank.host for rank in state.ranks.values() if rank.state in ("waiting", "running")}


def why_it_cannot_go_on(state: RunState, lost: Mapping[str, str]) -> str:
    """ "" as long as it can. Ranks that somebody else stopped are that one's business."""
    for host, why in lost.items():
        return f"{host}: {why}"
    for rank in state.ranks.values():
        if rank.state == "failed":
            return f"rank {rank.rank} failed"
        if rank.state == "stopped" and rank.reason not in ("", STOPPED):
            return f"rank {rank.rank} was ended on {rank.host}: {rank.reason}"
    return ""


class Silence:
    """Of hosts with the last ranks of a run. As long as others have some, they notice who is gone, and the
    lease decides; where all others are through, nobody is left who would. Time in which we were stopped
    ourselves does not count. In the middle and in the end all hosts are asked once more, anew: if none of
    those that are through answers, it is we who are away."""

    def __init__(self, limit: float, answering: Callable[[], Collection[str]]) -> None:
        self.limit, self.answering = limit, answering
        self.lasts = self._looked = 0.0
        self._proofs = 0  # how often in a row only others have answered
        self.asking: Asking | None = None

    def look(self, going_on: set[str], away: Collection[str], now: float) -> str:
        """Why the run cannot go on; "" as long as it can. Called several times a second."""
        step, self._looked = min(now - self._looked, LONGEST_STEP_S), now
        self.lasts += step
        if not going_on or not going_on <= set(away):
            self.lasts, self._proofs, self.asking = 0.0, 0, None
        elif self.asking is not None:
            self._take(self.asking, going_on)
        elif self._proofs < PROOFS and self.lasts > self.limit * (self._proofs + 1) / PROOFS:
            self.asking = Asking(self.answering)
            self.asking.start()
        if self._proofs < PROOFS:
            return ""
        hosts = ", ".join(sorted(going_on))
        return f"all others have ended, and {hosts} could not be reached for {self.lasts:.0f} s"

    def _take(self, asking: Asking, going_on: set[str]) -> None:
        if asking.is_alive():
            return
        self.asking, self._proofs = None, self._proofs + 1
        if not asking.answering or asking.answering & going_on:
            self.lasts, self._proofs = 0.0, 0


class Asking(threading.Thread):
    """Which hosts answer: beside whoever waits for that, and may be interrupted meanwhile."""

    def __init__(self, ask: Callable[[], Collection[str]]) -> None:
        super().__init__(daemon=True)
        self._ask = ask
        self.answering: set[str] = set()

    def run(self) -> None:
        self.answering = set(self._ask())


def who_answers(agents: Mapping[str, Agent]) -> list[str]:
    """Hosts that do at this moment, by new connections. This machine does whatever becomes of its network."""
    pool, others = Pool(no_input=True), [name for name, agent in agents.items() if not agent.host.local]
    try:
        answers = fan_out(others, lambda name: anew(agents[name].host, pool).slots())
    finally:
        pool.close()
    return [name for name, answer in answers.items() if not isinstance(answer, RingctlError)]


class Patience:
    """With hosts that have answered that their ranks are ended: they have so much left to tell, and no more.
    What they say of later than that, or beyond what they can have kept, brings them no nearer to their end.
    Time that we take to show the rest is none of theirs."""

    def __init__(self) -> None:
        self.heard = 0.0  # when the last event came
        self._nearer = 0.0  # when the last one came that had happened by their answer
        self._showing = 0.0  # seconds that it took to show those
        self._told = 0  # characters of those

    def took(self, events: Iterable[Event], began: float, answered_at: float) -> None:
        """Showing these events took from `began` until now. The answer came at that time of the clock."""
        left = [event for event in events if event.time <= answered_at + CLOCKS_AGREE_S]
        self._told += sum(AN_EVENT + (len(e.data["text"]) if e.kind == "line" else 0) for e in left)
        if left and self._told <= MOST_LATE:
            self._nearer = time.monotonic()
            self._showing += self._nearer - began

    def is_over(self, now: float, answered: float, grace: float, longest: float) -> bool:
        if now > max(answered, self.heard) + grace + TOLD_S:
            return True
        comes_nearer = now <= self._nearer + grace + TOLD_S
        return now - answered - self._showing > (longest if comes_nearer else LATEST_S)


class Stop(threading.Thread):
    """Asks all hosts to stop a run, and those that cannot be asked again for some time, by a new connection:
    the one that the log comes through may be all that the server allows, or lead nowhere any more. In a
    thread, so that what the ranks say in the end is still shown."""

    def __init__(
        self, agents: Mapping[str, Agent], run: str, grace: float, reason: str, attempt: int, clock: Clock
    ) -> None:
        super().__init__(daemon=True)
        self.agents, self.run_id, self.grace, self.reason = dict(agents), run, grace, reason
        self.attempt, self.clock = attempt, clock
        self.failed: dict[str, RingctlError] = {}
        self.answered = 0.0  # when all had, or had long enough
        self.answered_at = 0.0  # the same by the clock, as events have it
        self._news: list[str] = []

    def run(self) -> None:
        deadline = time.monotonic() + RETRY_S
        self._ask(self.agents)
        once_more = True  # in any case: it may have been us who were stopped meanwhile (Ctrl-Z, a closed lid)
        while self.failed and (once_more or time.monotonic() < deadline):
            once_more = False
            time.sleep(AGAIN_S)
            pool = Pool(no_input=True)
            try:
                self._ask({name: anew(self.agents[name].host, pool) for name in self.failed})
            finally:
                pool.close()
        self.answered_at = self.clock.now()
        self.answered = time.monotonic()

    def _ask(self, agents: Mapping[str, Agent]) -> None:
        exact = self.reason != STOPPED
        results = stop(agents, self.run_id, self.grace, self.reason, attempt=self.attempt, exact=exact)
        failed = {name: answer for name, answer in results.items() if isinstance(answer, RingctlError)}
        self._news += [f"{failed[name]}; trying again" for name in failed.keys() - self.failed.keys()]
        self.failed = failed

    def news(self) -> list[str]:
        """What has not been told yet."""
        told, self._news = self._news, []
        return told


def anew(host: Host, pool: Pool) -> Agent:
    return Agent(host, pool.transport(host))


# --- Standing still ------------------------------------------------------------------------------


class Stalls:
    """Says who keeps the others waiting when a run makes no progress, and who has not come when it begins.
    It ends nothing: what looks like a hang may only be slow."""

    def __init__(self, screen: Screen) -> None:
        self.screen = screen
        self.say_at: float | None = None  # when enough hosts have said where their ranks are
        self.said = ""

    def look(self, events: list[Event], state: RunState, tails: Tails, away: Mapping[str, str]) -> None:
        """Called several times a second."""
        said = (e.data["text"] for e in events if e.kind == "line" and "not come" in e.data["text"])
        absent = absent_ranks(said, state.world)
        missing = [state.ranks[rank] for rank in sorted(absent) if rank in state.ranks]
        if missing:
            self.say(", ".join(whereabouts(rank, away) for rank in missing))
        running = {rank.rank for rank in state.ranks.values() if rank.state == "running"}
        if any(event.kind == "stack" for event in events) and self.say_at is None:
            self.say_at = time.monotonic() + STACKS_S
        if not tails.stacks:
            self.say_at = None
        elif self.say_at and (running <= tails.stacks.keys() or time.monotonic() >= self.say_at):
            self.say_at = None
            if running and len(running) == state.world:
                self.say(standstill(state, tails, away))

    def say(self, words: str) -> None:
        if words and words != self.said:
            self.said = words
            self.screen.note(words)


def whereabouts(rank: RankState, away: Mapping[str, str]) -> str:
    """What is known of a rank that the others wait for."""
    how = {"waiting": "has not been started yet", "running": "runs there but has not joined the others"}
    word = away.get(rank.host) or how.get(rank.state, f"has {rank.state}")
    return f"rank {rank.rank} on {rank.host}: {word}"
