"""Launch a run and watch it: the steps, on whatever transport the hosts have."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from launcher import fold, history
from launcher.agent import Agent, agents_for
from launcher.diagnose import Cause, Tails, first_failure
from launcher.errors import RingctlError
from launcher.fanout import fan_out, succeeded
from launcher.follow import follow
from launcher.model import Event, Inventory, Plan, RunState, to_json
from launcher.plan import LaunchOptions, make_plan, place
from launcher.runs import stop
from launcher.transport import Pool

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
    return time.strftime("%Y%m%d-%H%M%S-", time.gmtime()) + os.urandom(2).hex()


def prepare(inventory: Inventory, options: LaunchOptions, pool: Pool) -> tuple[Plan, dict[str, Agent]]:
    """Ask the hosts for their facts and make the plan; nothing is changed anywhere."""
    hosts = [host for host, _ in place(inventory, options.world)]
    agents = agents_for(hosts, pool)
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
