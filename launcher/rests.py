"""What hosts that were away when an attempt ended, or had not come to their end, have of its log: read beside
what comes after it, from when they can be heard again, and for a while after the run's end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from launcher.agent import Agent
from launcher.errors import RingctlError
from launcher.fanout import fan_out
from launcher.follow import STILL_GOES_ON, Place, Update, follow
from launcher.lastword import said_last
from launcher.model import Event, Plan, RunState
from launcher.transport import Pool
from launcher.watch import Screen

AT_ONCE_S = 0.05  # so long it is read before the newest attempt has its turn again
QUIET_S, LONGEST_S = 20.0, 300.0  # so long, after the end, hosts may be silent, and talk
HURRY_S = 10.0  # and so long if somebody waits for us to end
AGAIN_S = 1.0  # how often it is looked then whether ranks that still went on have been ended


@dataclass(frozen=True)
class Rest:
    """What a host has of an attempt from a place on."""

    attempt: int
    place: Place
    rank_hosts: Mapping[int, str] | None  # where its ranks are; see follow
    missed: bool = True  # if it cannot be had that is worth saying


class Reading:
    """One rest, as it comes. `live` through drops of the connection, and until the host's part is over."""

    def __init__(self, agent: Agent, run: str, rest: Rest, *, live: bool, is_new: bool = True) -> None:
        self.rest = rest
        self.is_there = False  # the host can be heard at this moment
        self.is_over = False
        self.is_new = is_new  # nothing of it has been shown
        self.problem = ""  # why there is less of it than there should be
        self.may_go_on = False  # what has been read has no end yet
        self._host = agent.host.name
        self._updates = follow(
            {self._host: agent},
            run,
            live=live,
            attempt=rest.attempt,
            after={self._host: rest.place},
            rank_hosts=rest.rank_hosts,
            hold=0.0,
        )

    def look(self, seconds: float) -> list[Event]:
        """What has come by now, as far as that is taken in so many seconds."""
        events: list[Event] = []
        until = time.monotonic() + seconds
        while not self.is_over and time.monotonic() < until:
            try:
                update = next(self._updates)
            except StopIteration:
                self.is_over = True
            except RingctlError as error:
                self.is_over, self.problem = True, error.message
            else:
                events += update.events
                self.rest = replace(self.rest, place=update.places.get(self._host, self.rest.place))
                self.problem, self.may_go_on = self._lacks(update)
                there = self.is_there or update.caught_up or bool(events)
                self.is_there = there and self._host not in update.away
                if not update.events:
                    break
        return events

    def _lacks(self, update: Update) -> tuple[str, bool]:
        """Why this is not all, and whether the rest may come once somebody has ended what is there."""
        host = self._host
        if host in update.away:
            return update.away[host], False
        why = update.lost.get(host) or (STILL_GOES_ON if host in update.going_on else "")
        return (f"{host}: {why}" if why else ""), bool(why)

    def close(self) -> None:
        self._updates.close()


class Rests:
    """Those of all hosts of a run, one at a time of each, by connections of their own; none if they are not
    `wanted`."""

    def __init__(self, run: str, note: Callable[[str], None], *, wanted: bool = True) -> None:
        self.run, self.note, self._wanted = run, note, wanted
        self._pool = Pool(no_input=True)
        self._agents: dict[str, Agent] = {}
        self._waiting: dict[str, deque[Rest]] = {}
        self._open: dict[str, Reading] = {}
        self._unended: list[tuple[str, Reading]] = []  # read as far as they went, without an end
        self._missing: list[str] = []

    def add(
        self,
        agents: Mapping[str, Agent],
        places: Mapping[str, Place],
        attempt: int,
        rank_hosts: Mapping[int, str] | None,
        *,
        missed: bool = True,
    ) -> None:
        """What hosts have of an attempt after these places; see Rest."""
        for name in sorted(places) if self._wanted else ():
            if rank_hosts is not None and name not in rank_hosts.values():
                continue  # no rank of that attempt was there
            host, hidden = agents[name].host, agents[name].hidden
            self._agents[name] = Agent(host, self._pool.transport(host), hidden)
            rest = Rest(attempt, places[name], rank_hosts, missed)
            self._waiting.setdefault(name, deque()).append(rest)

    def look(self) -> list[Event]:
        """What has come by now."""
        return self._look(live=True) if self._waiting or self._open else []

    def last(
        self,
        agents: Mapping[str, Agent],
        hurry: Callable[[], bool] = lambda: False,
        given_up: Callable[[], bool] = lambda: False,
    ) -> Iterator[list[Event]]:
        """What can still be had now that the run is over: who is away is asked once more, as `agents`, and
        whoever has come to no end, again and again: somebody may be about to end what is there."""
        away = {name: reading for name, reading in self._open.items() if not reading.is_there}
        fan_out(away.values(), Reading.close)
        for name, reading in away.items():
            del self._open[name]
            self._waiting.setdefault(name, deque()).appendleft(reading.rest)
        self._agents.update({name: agents[name] for name in self._agents.keys() & agents.keys()})
        began = heard = time.monotonic()
        again = 0.0
        while (self._waiting or self._open or self._unended) and not given_up():
            now = time.monotonic()
            if now > heard + QUIET_S or now > began + (HURRY_S if hurry() else LONGEST_S):
                break
            if now > again:
                again = now + AGAIN_S
                self._ask_again()
            events = self._look(live=False)
            if events:
                came = time.monotonic()
                yield events
                heard = time.monotonic()
                began += heard - came  # whoever shows it may be slow, which is not the hosts' doing
            else:
                time.sleep(AT_ONCE_S)

    def missing(self) -> list[str]:
        """A sentence about each rest that has not been had."""
        sentences = list(self._missing)
        for name in sorted(self._waiting.keys() | self._open.keys()):
            reading, waiting = self._open.get(name), self._waiting.get(name, ())
            why = (reading and reading.problem) or f"{name}: it does not come to an end"
            rests = (*([reading.rest] if reading else []), *waiting)
            sentences += [words(why, rest) for rest in rests if rest.missed]
        unended = [reading for _, reading in self._unended if reading.rest.missed]
        return sentences + [words(reading.problem, reading.rest) for reading in unended]

    def close(self) -> None:
        fan_out(self._open.values(), Reading.close)  # each takes a moment if its host is away
        self._open.clear()
        self._pool.close()

    def _look(self, *, live: bool) -> list[Event]:
        events: list[Event] = []
        for name in [name for name in self._waiting if name not in self._open]:
            self._open[name] = Reading(self._agents[name], self.run, self._next(name), live=live)
        for name, reading in list(self._open.items()):
            came = reading.look(AT_ONCE_S / len(self._open))
            last = said_last(came)
            if reading.is_new and (last or any(event.kind == "line" for event in came)):
                reading.is_new = False
                self.note(f"{name}: what it said in attempt {reading.rest.attempt} while it was not heard:")
            for words_ in last:
                self.note(words_)
            events += came
            if reading.is_over:
                del self._open[name]
                if reading.may_go_on:
                    self._unended.append((name, reading))
                elif reading.problem and reading.rest.missed:
                    self._missing.append(words(reading.problem, reading.rest))
        return events

    def _ask_again(self) -> None:
        """Of each host one, for as long as another is open."""
        unended, self._unended = self._unended, []
        for name, former in unended:
            if name in self._open:
                self._unended.append((name, former))
                continue
            agent, is_new = self._agents[name], former.is_new
            self._open[name] = Reading(agent, self.run, former.rest, live=False, is_new=is_new)

    def _next(self, name: str) -> Rest:
        rest = self._waiting[name].popleft()
        if not self._waiting[name]:
            del self._waiting[name]
        return rest


def words(why: str, rest: Rest) -> str:
    return f"{why}; the rest of its log of attempt {rest.attempt} is missing here"


class Beside:
    """A screen that shows such rests, too."""

    def __init__(self, screen: Screen, rests: Rests) -> None:
        self._screen, self._rests = screen, rests

    def plan(self, plan: Plan) -> None:
        self._screen.plan(plan)

    def show(self, events: list[Event], state: RunState) -> None:
        late = self._rests.look()
        self._screen.show([*late, *events] if late else events, state)

    def note(self, text: str) -> None:
        self._screen.note(text)
