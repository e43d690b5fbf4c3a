"""Start the next attempt of a run that has failed, once everything is there for it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from launcher import ask, history, runs
from launcher.agent import Agent, agents_for
from launcher.ask import Asked
from launcher.errors import NotKept, RingctlError, StoppedEarly
from launcher.follow import first
from launcher.leftovers import end_before
from launcher.model import Plan
from launcher.plan import restart_delay
from launcher.restarts import counted, not_started, why_not_again, with_code, without
from launcher.rests import Rests
from launcher.run import SlotsTaken, launch
from launcher.transport import Pool
from launcher.watch import GRACE_S, Interrupts, Screen
from launcher.watching import Book

ROOM_S, LONGEST_PAUSE_S = 3600.0, 15.0  # how long, and how often, it is tried where our own disk is full
FIRST_LOOK_S, LAST_LOOK_S = 1.0, 30.0  # how often it is tried whether slots that others took are free again

Begun = tuple[Plan, Mapping[str, Agent]]


@dataclass(frozen=True)
class Next:
    """Who starts a run again, with what. Each step gives None if the run is not wanted any more."""

    asked: Asked
    pool: Pool
    screen: Screen
    interrupts: Interrupts
    book: Book
    rests: Rests

    def begin(self, plan: Plan, away: Mapping[str, float]) -> Begun | None:
        """After this attempt has failed; None also if it may not start again, or cannot. `away` are hosts
        that were not heard in the end, and since when."""
        attempt = plan.attempt
        while True:
            if not self.pause_before(attempt + 1):
                return None
            self.book.note(f"starting attempt {attempt + 1}")
            try:
                begun = self.once_free(attempt, away)
            except StoppedEarly:
                self.screen.note("somebody has stopped the run meanwhile: it is not started again")
                return None
            except RingctlError as error:
                self.book.note(failure=not_started(attempt + 1, error))
                used = current_attempt(plan.run, attempt)
                self.add_unfollowed(plan.run, range(attempt + 1, used + 1))
                attempt = max(attempt + 1, used)
                continue
            if begun is None:
                return None
            self.book.note()
            self.add_unfollowed(plan.run, range(attempt + 1, begun[0].attempt))
            if self.book.stopped:  # while it was starting
                runs.stop(begun[1], plan.run, GRACE_S, attempt=begun[0].attempt, exact=True)
            return begun

    def pause_before(self, attempt: int) -> bool:
        """Whether it may start, after some time, and is still wanted then."""
        options, failures = self.asked.options, self.book.failures
        why_not = why_not_again(options, failures)
        if why_not:
            self.screen.note(f"{failures[-1].cause}; {why_not}")
            return False
        seconds, left = restart_delay(options, len(failures)), options.max_restarts - counted(failures)
        what, when = f"attempt {attempt} begins", f"in {seconds:.0f} s"
        after = "the last one" if left == 0 else f"{left} more after it"
        why = f"attempt {failures[-1].attempt} failed: {failures[-1].cause}"
        self.screen.note(f"{why}; {what} {when}, {after}")
        self.book.note(what, due=time.time() + seconds)
        return self.wait(seconds)

    def once_free(self, attempt: int, away: Mapping[str, float]) -> Begun | None:
        """Where others have taken its slots, as soon as they are free again, which is no failure of the
        run's."""
        while True:
            try:
                return self.once_it_can_be_kept(attempt, away)
            except SlotsTaken as error:
                taken: SlotsTaken | None = error
            seconds, told = FIRST_LOOK_S, ""
            while taken is not None:
                words = f"attempt {attempt + 1} waits for its slots: {taken.message}"
                self.tell(words, told)
                if not self.wait(seconds):
                    return None
                seconds, told, taken = min(2 * seconds, LAST_LOOK_S), words, taken.still()

    def once_it_can_be_kept(self, attempt: int, away: Mapping[str, float]) -> Begun | None:
        """Once this machine can write down that there is one: a full disk here is no failure of the run,
        unless it stays so."""
        deadline, pause, told = time.monotonic() + ROOM_S, 0.5, ""
        while True:
            attempt = current_attempt(self.asked.options.run, attempt)
            try:
                return self.start(attempt, away)
            except NotKept as error:
                if time.monotonic() > deadline:
                    raise
                words = f"{error.message}; attempt {attempt + 1} begins once that has changed"
                self.tell(words, told)
                told = words
            pause = min(2 * pause, LONGEST_PAUSE_S)
            if not self.wait(pause):
                return None

    def start(self, attempt: int, away: Mapping[str, float]) -> Begun:
        """End what is left of the attempts that were begun, look whether all hosts are well, and start the
        next: on the same hosts, or, where that is allowed, without those that cannot be reached."""
        asked, run = self.asked, self.asked.options.run
        record = history.read(run)
        hosts = (*record.hosts, *record.former) if record else ()
        needed = {host.name for host in record.hosts} if record else set()
        begun = record.plan.attempt if record else attempt  # those after it have not, and are not stopped
        unasked = end_before(agents_for(hosts, self.pool), run, begun, away, needed)
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
            words = f"going on with {options.world} of {options.full_world} ranks, without {names}"
            self.screen.note(words)
        asked = replace(asked, options=options)
        return launch(asked, self.pool, self.screen, self.interrupts, automatic=True)

    def tell(self, words: str, told: str) -> None:
        """What it waits for; on the screen only once."""
        if words != told:
            self.screen.note(words)
        self.book.note(words)

    def wait(self, seconds: float) -> bool:
        """Whether the run is still wanted after so many seconds."""
        deadline = time.monotonic() + seconds
        while not self.interrupts.count and not self.book.stopped:
            if time.monotonic() >= deadline:
                return True
            time.sleep(0.1)
        return False

    def add_unfollowed(self, run: str, attempts: Iterable[int]) -> None:
        """What ranks said in attempts that did not start everywhere, and were ended again where they did."""
        record = history.read(run)
        if record is None:
            return
        agents = agents_for(record.hosts, self.pool)
        for attempt in attempts:
            places = dict.fromkeys(agents, first(attempt))
            self.rests.add(agents, places, attempt, record.rank_hosts_in(attempt), missed=False)


def current_attempt(run: str, attempt: int) -> int:
    """The newest attempt that somebody began to start; a start that failed has used up its number."""
    record = history.read(run)
    return max(attempt, record.plan.attempt) if record else attempt
