"""Launch, watch, find and stop runs: the steps, on whatever transport the hosts have."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from launcher import fold, history
from launcher.agent import Agent
from launcher.diagnose import Cause, Tails, first_failure
from launcher.errors import InputError, RingctlError
from launcher.fanout import fan_out, succeeded
from launcher.follow import follow
from launcher.model import Event, Host, Inventory, Plan, RunState, to_json
from launcher.plan import LaunchOptions, make_plan, place

GRACE_S = 5.0  # between TERM and KILL


class Screen(Protocol):
    """Where a run is shown."""

    def show(self, events: list[Event], state: RunState) -> None:
        """Called several times a second, also with no events."""

    def note(self, text: str) -> None:
        """ringctl's own word about the run."""


# --- Launching -----------------------------------------------------------------------------------


def new_run_id() -> str:
    """Sorts by time, and ends in something short enough to tell apart at a glance."""
    return time.strftime("%Y%m%d-%H%M%S-", time.gmtime()) + secrets.token_hex(2)


def prepare(inventory: Inventory, options: LaunchOptions) -> tuple[Plan, dict[str, Agent]]:
    """Ask the hosts for their facts and make the plan; nothing is changed anywhere."""
    hosts = [host for host, _ in place(inventory, options.world)]
    agents = {host.name: Agent(host) for host in hosts}
    addresses = {host.name: host.data_address or host.address for host in hosts if not host.local}

    def facts(name: str) -> Any:
        return agents[name].facts([address for peer, address in addresses.items() if peer != name])

    return make_plan(inventory, succeeded(fan_out(agents, facts)), options), agents


def start(plan: Plan, agents: Mapping[str, Agent]) -> None:
    """Start every host's ranks, or none: if one host cannot, the others are stopped again."""
    history.remember(plan, tuple(agent.host for agent in agents.values()))
    requests = {host.host: start_request(plan, host.host) for host in plan.hosts}
    results = fan_out(requests, lambda name: agents[name].start(requests[name]))
    errors = [error for error in results.values() if isinstance(error, RingctlError)]
    if errors:
        stop({name: agents[name] for name in requests}, plan.run, grace=0.0)
        errors[0].message += "; nothing was left running"
        raise errors[0]


def start_request(plan: Plan, host: str) -> dict[str, Any]:
    """What one host's supervisor is told."""
    own = next(h for h in plan.hosts if h.host == host)
    about = {"run": plan.run, "name": plan.name, "attempt": plan.attempt, "world": plan.world}
    return {**about, **to_json(own)}


# --- Watching ------------------------------------------------------------------------------------


class Interrupts:
    """Counts Ctrl-C: the first stops the run cleanly, the second kills it."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *_: object) -> None:
        self.count += 1


@dataclass(frozen=True)
class Outcome:
    """How a run ended, as far as it could be seen."""

    state: RunState
    cause: Cause | None

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
    state: RunState, agents: Mapping[str, Agent], screen: Screen, interrupts: Interrupts | None = None
) -> Outcome:
    """Show the run until it is over. Ctrl-C, counted by `interrupts`, stops it."""
    tails, seen, stoppers = Tails(), 0, []
    for update in follow(agents, state.run, live=True):
        for event in update.events:
            state = fold.fold(state, event)
            tails.add(event)
        screen.show(update.events, state)
        if interrupts is not None and interrupts.count > seen:
            seen = interrupts.count
            grace = GRACE_S if seen == 1 else 0.0
            screen.note("stopping the run; press Ctrl-C again to kill it" if seen == 1 else "killing the run")
            stoppers.append(threading.Thread(target=stop, args=(agents, state.run, grace)))
            stoppers[-1].start()
    for thread in stoppers:
        thread.join()
    return outcome(state, tails)


def outcome(state: RunState, tails: Tails) -> Outcome:
    if state.state not in fold.ENDED:
        state = replace(state, state="lost")
    return Outcome(state, first_failure(state, tails))


# --- Finding -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """A run, the hosts it is on, and what they say of it."""

    run: str
    name: str
    hosts: tuple[Host, ...]
    started: float
    states: tuple[Mapping[str, Any], ...]  # one from each host that answered and knows it

    @property
    def state(self) -> RunState | None:
        return fold.from_states(self.states) if self.states else None


def find_runs(here: Host) -> list[Found]:
    """All runs that this controller started or this machine has, oldest first."""
    records = {record.plan.run: record for record in history.recall()}
    hosts = {host.name: host for record in records.values() for host in record.hosts} | {here.name: here}
    answers = fan_out(hosts, lambda name: Agent(hosts[name]).runs()["runs"])
    states: dict[str, list[Mapping[str, Any]]] = {run: [] for run in records}
    for answer in answers.values():
        for state in answer if isinstance(answer, list) else ():
            states.setdefault(state["run"], []).append(state)
    found = []
    for run, its in states.items():
        record = records.get(run)
        name = record.plan.name if record else its[0]["name"]
        started = record.started if record else min(state["started"] for state in its)
        found.append(Found(run, name, record.hosts if record else (here,), started, tuple(its)))
    return sorted(found, key=lambda f: f.started)


def find_run(reference: str | None, runs: Sequence[Found]) -> Found:
    """By id, by name (the latest of that name), by unique beginning of its id; None: the latest."""
    if not runs:
        raise InputError("there is no run yet", fix="start one: ringctl launch --local --world 2")
    if reference is None:
        return runs[-1]
    for matches in (
        [f for f in runs if f.run == reference],
        [f for f in runs if f.name == reference][-1:],
        [f for f in runs if reference and f.run.startswith(reference)],
    ):
        if len(matches) == 1:
            return matches[0]
        if len(matches) > 1:
            raise InputError(f"{reference!r} is the beginning of {len(matches)} runs; write more of it")
    raise InputError(f"there is no run {reference!r}", fix="ringctl ps lists the runs")


# --- Stopping ------------------------------------------------------------------------------------


def stop(agents: Mapping[str, Agent], run: str, grace: float) -> dict[str, dict[str, Any] | RingctlError]:
    """End the run on every host: what each one ended, or why it could not be asked."""
    work: Callable[[str], dict[str, Any]] = lambda name: agents[name].stop(run, grace)  # noqa: E731 - for its type
    return fan_out(agents, work)
