"""Find the runs that there are, and end them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from launcher import fold, history
from launcher.agent import Agent
from launcher.errors import InputError, RingctlError
from launcher.fanout import AT_ONCE, fan_out
from launcher.model import Host, RunState
from launcher.transport import Key, Pool, way_to

THIS_MACHINE = Host("localhost", local=True)
STOPPED = "stopped"  # the reason of whoever wants it so
TELL_S = 2.0  # so long, at most, the hosts that are told of a stop wait for the others to be


@dataclass(frozen=True)
class Found:
    """A run, the hosts it is on, and what they say of it."""

    run: str
    name: str
    hosts: tuple[Host, ...]
    started: float
    states: tuple[Mapping[str, Any], ...] = ()  # one from each host that answered and knows it
    silent: tuple[str, ...] = ()  # why each of the other hosts did not answer
    from_here: bool = True  # all of its hosts are known; else it may be on others too
    rank_hosts: Mapping[int, str] = field(default_factory=dict)  # where its ranks are, if it was planned here
    record: history.Record | None = None  # all that is known here of it
    end: RunState | None = None  # as somebody here has seen it; "lost" where a host could not be heard then
    cause: Mapping[str, Any] | None = None  # what failed first, a diagnose.Cause, if that was looked for
    attempt: int = 1  # the newest one that was begun here
    former: tuple[Host, ...] = ()  # hosts that only earlier attempts were on
    unended: tuple[str, ...] = ()  # of those, who may still have something of it
    never_started: bool = False  # handed in to a service, and on no host yet, or never

    @property
    def state(self) -> RunState | None:
        if not self.states:
            return self.end
        state = fold.from_states(self.states)
        # Ranks that nobody told of never started where the others were ended; else they are somewhere.
        started = state.state in ("succeeded", "running") or not self.from_here
        if self.silent or started:
            state = fold.with_unknown(state, self.rank_hosts)
        return replace(state, state=self.end.state) if self.silent and self.end else state

    def rank_hosts_in(self, attempt: int) -> Mapping[int, str] | None:
        """Where the ranks of an attempt are; None where that is not known: it was not planned here."""
        if attempt == self.attempt:
            return self.rank_hosts or None
        return self.record.rank_hosts_in(attempt) if self.record else None

    @property
    def elsewhere(self) -> list[int]:
        """Ranks that none of the hosts asked has told of, though all have answered."""
        state = None if self.silent or self.from_here or not self.states else fold.from_states(self.states)
        return [rank for rank in range(state.world) if rank not in state.ranks] if state else []

    def is_on_no_other(self, attempt: int) -> bool:
        """Whether all ranks of the attempt are on hosts that have told of it: of a run from elsewhere, those
        that know only an earlier one are among its hosts as well."""
        told = {rank["rank"] for s in self.states if s["attempt"] == attempt for rank in s["ranks"]}
        worlds = [state["world"] for state in self.states if state["attempt"] == attempt]
        return not self.from_here and bool(worlds) and len(told) >= max(worlds)

    @property
    def is_over(self) -> bool:
        """Whether all of its hosts have said, now or to whoever saw it end, that it has ended: its newest
        attempt, which some of them may not have begun yet."""
        if not self.states and self.end is not None:
            return self.end.state in fold.ENDED
        newest = max([self.attempt, *(state["attempt"] for state in self.states)])
        ended = [s for s in self.states if s["state"] in fold.ENDED and s["attempt"] == newest]
        return len(ended) == len(self.hosts) and not self.elsewhere


def remembered(recent: int | None = None, like: str = "") -> list[Found]:
    """The runs that were started from here, the latest last; no host is asked. See history.recall."""
    return [found_of(record) for record in history.recall(recent, like)]


def unstarted(like: str) -> list[Found]:
    """Those of which there is nothing but that they were handed in, of this name or with such an id."""
    return [Found(*about, never_started=True) for about in history.unstarted(like)]


def found_of(record: history.Record) -> Found:
    return Found(
        record.plan.run,
        record.plan.name,
        record.hosts,
        record.started,
        rank_hosts=record.plan.rank_hosts,
        record=record,
        end=record.end,
        cause=record.cause,
        attempt=record.plan.attempt,
        former=record.former,
        unended=tuple(host.name for host in record.former if host.name in record.unended),
    )


def find_runs(
    pool: Pool, more: Iterable[Host] = (), recent: int | None = None
) -> tuple[list[Found], list[RingctlError]]:
    """All runs that were started from here (or the `recent` ones and those that are not over), or are on this
    machine or on the hosts `more`, the latest last; and why some of the hosts did not answer."""
    known = {found.run: found for found in remembered(recent)}
    hosts = [host for found in known.values() if not found.is_over for host in found.hosts]
    answers = ask_hosts([THIS_MACHINE, *hosts, *more], pool)
    told = by_run(answers)
    for run in {run for _, states in told if not isinstance(states, RingctlError) for run in states}:
        if run not in known:
            its = of_run(run, told)
            states = [state for _, answer in its for state in states_in(answer, run)]
            about = run, states[0]["name"], hosts_of(run, its), states[0]["started"]
            attempt = max(state["attempt"] for state in states)
            known[run] = Found(*about, from_here=False, attempt=attempt)
    found = [updated(found, of_run(found.run, told)) for found in known.values()]
    errors = [answer for _, answer in answers if isinstance(answer, RingctlError)]
    return in_order(found), errors


def in_order(found: Sequence[Found]) -> list[Found]:
    """The latest last. Those that were started from here come as they were, which the clock need not show: it
    may have been set back. The others have nothing but their times, and come before what was here by then."""
    moment, times = 0.0, {}
    for each in found:
        started_here = each.from_here and not each.never_started
        moment = max(moment, each.started) if started_here else moment
        times[each.run] = moment if started_here else each.started
    return sorted(found, key=lambda f: (times[f.run], f.from_here))


Answer = list[Mapping[str, Any]] | RingctlError


def ask_hosts(hosts: Iterable[Host], pool: Pool, run: str | None = None) -> list[tuple[Host, Answer]]:
    """What each host says of its runs, each host asked once."""
    agents = {way_to(host): Agent(host, pool.transport(host)) for host in hosts}

    def ask(key: Key) -> list[Mapping[str, Any]]:
        return list(agents[key].runs(run)["runs"])

    return [(agents[key].host, answer) for key, answer in fan_out(agents, ask).items()]


Told = Sequence[tuple[Host, Mapping[str, list[Mapping[str, Any]]] | RingctlError]]


def by_run(answers: Sequence[tuple[Host, Answer]]) -> Told:
    """The same, for whoever looks for one run after the other: a host may tell of very many."""

    def sorted_out(states: list[Mapping[str, Any]]) -> Mapping[str, list[Mapping[str, Any]]]:
        found: dict[str, list[Mapping[str, Any]]] = {}
        for state in states:
            found.setdefault(state["run"], []).append(state)
        return found

    return [
        (host, answer if isinstance(answer, RingctlError) else sorted_out(answer)) for host, answer in answers
    ]


def of_run(run: str, told: Told) -> list[tuple[Host, Answer]]:
    """What each host says of this one."""
    return [
        (host, states if isinstance(states, RingctlError) else states.get(run, [])) for host, states in told
    ]


def hosts_of(run: str, answers: Sequence[tuple[Host, Answer]]) -> tuple[Host, ...]:
    """The hosts that know a run. While ranks of it are missing, also those that did not answer: it may be
    there, and must not be taken for ended when it is not."""
    states = [state for _, answer in answers for state in states_in(answer, run)]
    ranks = {rank["rank"] for state in states for rank in state["ranks"]}
    missing = len(ranks) < states[0]["world"]
    return tuple(
        host
        for host, answer in answers
        if states_in(answer, run) or (missing and isinstance(answer, RingctlError))
    )


def states_in(answer: Answer, run: str) -> list[Mapping[str, Any]]:
    return [state for state in answer if state["run"] == run] if isinstance(answer, list) else []


def updated(found: Found, answers: Iterable[tuple[Host, Answer]]) -> Found:
    """With what its hosts say now; the end of a run is written down, so that nobody need be asked again."""
    answers = list(answers)
    if found.from_here and any(
        s["attempt"] > found.attempt for _, a in answers for s in states_in(a, found.run)
    ):
        record = history.read(found.run)  # somebody here may have started it again meanwhile
        found = found_of(record) if record else found
    mine = {way_to(host) for host in found.hosts}
    heard = believed(found, [(host, answer) for host, answer in answers if way_to(host) in mine])
    states = tuple(state for answer in heard for state in states_in(answer, found.run))
    if found.is_over or not heard:
        return found
    silent = tuple(answer.message for answer in heard if isinstance(answer, RingctlError))
    newest = max((state["attempt"] for state in states), default=0)
    behind = {s["host"] for s in states if s["attempt"] < newest and s["state"] not in fold.ENDED}
    unended = tuple(sorted({*found.unended, *behind}))
    found = replace(found, states=states, silent=silent, unended=unended)
    if found.is_over and found.state and found.state.state in fold.ENDED:
        history.close(found.state)
    return found


def settle(run: str, attempt: int, pool: Pool) -> None:
    """All of its hosts have answered a stop of this attempt. What none of them tells of in it has not been
    started, and will not be: that is how it ended. A later one is nobody's to end here: it may be about to
    start."""
    record = history.read(run)
    if record is None or record.plan.attempt != attempt:
        return
    found = refreshed(found_of(record), pool)
    if found.silent or (record.end and record.end.state in fold.ENDED):
        return
    states = [state for state in found.states if state["attempt"] == attempt]
    if any(state["attempt"] > attempt for state in found.states):
        return  # somebody else has started it since
    if not states and history.state_of(run) in fold.ENDED:
        return  # whoever could not start it has said why
    state = fold.from_states(states) if states else fold.initial(record.plan)
    end = fold.without_missing(state, record.plan.rank_hosts, time.time())
    if end.state in fold.ENDED:
        history.close(end)


def believed(found: Found, answers: Sequence[tuple[Host, Answer]]) -> list[Answer]:
    """What hosts say of a run, without what they cannot know: how ranks are that were planned elsewhere, and
    how many there are. Whoever starts an attempt writes it down here before, so a later one is believed only
    if more than half of the run's hosts have come to it: this history may be an old copy."""
    names: dict[Key, set[str]] = {}
    for host in found.hosts:
        names.setdefault(way_to(host), set()).add(host.name)
    told = [max((s["attempt"] for s in states_in(answer, found.run)), default=0) for _, answer in answers]
    agreed = sorted(told, reverse=True)[len(told) // 2] if told else 0
    most = max(found.attempt, agreed)

    def its(host: Host, state: Mapping[str, Any]) -> Mapping[str, Any]:
        places = found.rank_hosts_in(state["attempt"])
        if places is None:
            return state
        own = names[way_to(host)]
        ranks = [rank for rank in state["ranks"] if places.get(rank["rank"]) in own]
        return {**state, "world": len(places), "ranks": ranks}

    def of(host: Host, answer: Answer) -> Answer:
        if isinstance(answer, RingctlError):
            return answer
        states = states_in(answer, found.run)
        return [its(host, state) for state in states if state["attempt"] <= most or not found.from_here]

    return [of(host, answer) for host, answer in answers]


def refreshed(found: Found, pool: Pool) -> Found:
    return found if found.is_over else updated(found, ask_hosts(found.hosts, pool, found.run))


def all_refreshed(found: Sequence[Found], pool: Pool) -> list[Found]:
    """The same of many, each host asked once."""
    hosts = [host for each in found if not each.is_over for host in each.hosts]
    told = by_run(ask_hosts(hosts, pool))
    return [updated(each, of_run(each.run, told)) for each in found]


def candidates(reference: str | None) -> list[Found]:
    """Those of the history among which find_run finds what is meant; no host is asked. One that was handed in
    and has not started is meant only by whoever names it."""
    if reference is None:
        return remembered(1)
    return in_order([*remembered(like=reference), *unstarted(reference)]) if reference else []


def find_run(reference: str | None, runs: Sequence[Found]) -> Found:
    """By id, by name (the latest of that name), by unique beginning of its id; None: the latest."""
    if not runs:
        raise InputError("there is no run yet", fix="start one: ringctl launch --local --world 2")
    if reference is None:
        return runs[-1]
    for matches in (
        [f for f in runs if f.run == reference],
        [f for f in runs if reference and f.name == reference][-1:],
        [f for f in runs if reference and f.run.startswith(reference)],
    ):
        if len(matches) == 1:
            return matches[0]
        if len(matches) > 1:
            raise InputError(f"{reference!r} is the beginning of {len(matches)} runs; write more of it")
    raise InputError(f"there is no run {reference!r}", fix="ringctl ps lists the runs")


def stop(
    agents: Mapping[str, Agent],
    run: str,
    grace: float,
    reason: str = STOPPED,
    *,
    attempt: int = 1,
    exact: bool = False,
    again: str = "",
    since: float | None = None,
) -> dict[str, dict[str, Any] | RingctlError]:
    """End the run on every host: what each one ended, or why it could not be asked. Up to `attempt`, and
    whatever later one a host knows of, unless it is `exact`: what ringctl ends by itself may arrive late. Who
    ends it to start it `again` does not call that off. `since` is when somebody wanted it (monotonic): what
    fails from then on may do so for want of what is ended."""
    since = time.monotonic() if since is None else since
    everyone = threading.Barrier(min(len(agents), AT_ONCE) or 1)

    def work(name: str) -> dict[str, Any]:
        if reason == STOPPED and len(agents) > 1:
            age = time.monotonic() - since

            def tell() -> None:
                agents[name].tell_stop(run, grace, attempt, TELL_S, exact=exact, again=again, age=age)

            before_the_first_ends(tell, everyone)
        age = time.monotonic() - since
        return agents[name].stop(run, grace, reason, attempt, exact=exact, again=again, age=age)

    return fan_out(agents, work)


def before_the_first_ends(tell: Callable[[], None], everyone: threading.Barrier) -> None:
    """Before the first host ends its ranks all know that it is wanted: those of a host that is asked late
    fail for want of the others. Who cannot be told does not keep them waiting."""
    try:
        tell()
        everyone.wait(TELL_S)
    except threading.BrokenBarrierError:
        pass
    except RingctlError:
        everyone.abort()
