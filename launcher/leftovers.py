"""Ends what earlier attempts of a run have left on hosts that could not be asked when it went on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping
from functools import partial
from typing import Any

from launcher import history
from launcher.agent import Agent
from launcher.errors import HostError, RingctlError
from launcher.model import Host
from launcher.told import words_of
from launcher.transport import Pool
from launcher.watch import GRACE_S, anew

AGAIN = "it is started again"  # why what is left of the attempt before is ended
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0
STEP_S = 0.05
STAYS_S = 5.0  # a host that cannot be asked for less, while its sshd is restarted, is not gone
ONCE_MORE_S = 2.0  # and who is gone for longer is asked once more
ASLEEP_S = 1.0  # a step that takes so much longer than meant


class Ending(threading.Thread):
    """Asks one host to end the attempts of a run up to this one: until it has, each time by a new connection.
    Later attempts are left alone, however late it gets through."""

    def __init__(self, agent: Agent, run: str, attempt: int, done: Callable[[], None] = lambda: None) -> None:
        super().__init__(daemon=True)
        self.done = done  # called once it has, if it still counts
        self.counts = True  # until another one asks for more, or the host is on the run again
        self.agent, self.run_id, self.attempt = agent, run, attempt
        self.answer: dict[str, Any] | RingctlError | None = None
        self.quit = threading.Event()

    def run(self) -> None:
        self._ask(self.agent)
        pause = FIRST_PAUSE_S
        while not (self.has_ended or self.is_refused) and not self.quit.wait(pause):
            pause = min(2 * pause, LONGEST_PAUSE_S)
            pool = Pool(no_input=True)
            try:
                self._ask(anew(self.agent.host, pool))
            finally:
                pool.close()
        if self.has_ended and self.counts:
            self.done()

    def _ask(self, agent: Agent) -> None:
        try:
            self.answer = agent.stop(self.run_id, GRACE_S, AGAIN, self.attempt, exact=True)
        except RingctlError as error:
            self.answer = error

    def give_up(self) -> None:
        self.counts = False
        self.quit.set()

    @property
    def has_ended(self) -> bool:
        return isinstance(self.answer, dict) and not self.answer["left"]

    @property
    def is_refused(self) -> bool:
        """Whether asking again would be of no use."""
        return isinstance(self.answer, RingctlError) and not isinstance(self.answer, HostError)

    @property
    def is_done(self) -> bool:
        """Whether it has said what became of it, though that may be that something is left."""
        return isinstance(self.answer, dict) or self.is_refused


def end_before(
    agents: Mapping[str, Agent],
    run: str,
    attempt: int,
    away: Mapping[str, float],
    needed: Container[str],
) -> dict[str, str]:
    """End the attempts up to this one: {host: why that could not be done}. Who cannot be asked has some time
    to come back, from when it went `away`. Raises if a host that is `needed` has something that it cannot
    end: nothing is to start beside that."""
    pool = Pool(no_input=True)  # whoever followed a host that went away may still have its connection in hand
    endings = {
        name: Ending(anew(agent.host, pool) if name in away else agent, run, attempt)
        for name, agent in agents.items()
    }
    for ending in endings.values():
        ending.start()
    asleep = 0.0  # so long we were stopped meanwhile, and nobody was asked
    began = last = time.monotonic()

    def waits_for(name: str, ending: Ending) -> bool:
        if ending.answer is None and name not in away:
            return True
        patience = max(away.get(name, began) + STAYS_S, began + ONCE_MORE_S) + asleep
        return not ending.is_done and time.monotonic() < patience

    while any(waits_for(name, ending) for name, ending in endings.items()):
        time.sleep(STEP_S)
        now = time.monotonic()
        asleep += now - last if now - last > ASLEEP_S else 0.0
        last = now
    for ending in endings.values():
        ending.quit.set()
    pool.close()
    for name, ending in endings.items():
        if name in needed and (left := what_is_left(ending.answer)):
            raise HostError(name, left)
    return {name: words(ending) for name, ending in endings.items() if not ending.has_ended}


def what_is_left(answer: dict[str, Any] | RingctlError | None) -> str:
    """That there are processes which could not be ended; "" if there are none."""
    if not isinstance(answer, dict) or not answer["left"]:
        return ""
    return f"what it has of the attempt before did not end: {words_of(answer['left'])}"


def words(ending: Ending) -> str:
    if isinstance(ending.answer, HostError):
        return ending.answer.words
    return what_is_left(ending.answer) or str(ending.answer or "it does not answer")


class Leftovers:
    """Hosts that a run is not on any more, and that are asked to end what they may still have of it for as
    long as somebody watches the run."""

    def __init__(self, run: str, pool: Pool) -> None:
        self.run, self.pool = run, pool
        self.endings: dict[str, Ending] = {}

    def look_after(
        self, hosts: Iterable[Host], now: Iterable[str], attempt: int, unended: Container[str]
    ) -> None:
        """These were on earlier attempts; those that are on it `now` have been told when it started. Who is
        known to have something `unended` may have been taken in, and lost again, since it was last asked."""
        for name in now:
            if name in self.endings:
                self.endings.pop(name).give_up()
        for host in hosts:
            before = self.endings.get(host.name)
            if before is None or (host.name in unended and before.attempt < attempt):
                if before:
                    before.give_up()
                agent = Agent(host, self.pool.transport(host))
                done = partial(history.note_ended, self.run, [host.name])
                self.endings[host.name] = Ending(agent, self.run, attempt, done)
                self.endings[host.name].start()

    def close(self) -> str:
        """A sentence about those that never said that all has ended."""
        for ending in self.endings.values():
            ending.quit.set()
        silent = sorted(name for name, ending in self.endings.items() if not ending.has_ended)
        if not silent:
            return ""
        one = "it is" if len(silent) == 1 else "they are"
        return (
            f"{', '.join(silent)} may still have ranks of an earlier attempt, "
            f"which could not be ended; when {one} back: ringctl stop {self.run}"
        )
