"""Launch a run and watch it: the steps, on whatever transport the hosts have."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from launcher import fold, history
from launcher.agent import Agent, agents_for
from launcher.diagnose import Cause, Tails, first_failure
from launcher.errors import RingctlError
from launcher.fanout import fan_out, succeeded
from launcher.follow import follow, presence
from launcher.model import Event, Facts, Inventory, Plan, RunState, to_json
from launcher.plan import LaunchOptions, make_plan, place
from launcher.push import Snapshot, push
from launcher.runs import stop
from launcher.transport import Pool

PORT_TAKEN = "the master port is taken:"
STOPPED_EARLY = "it was stopped while it was starting"
PORT_TRIES = 3
SETTLE_S, FAILED_GRACE_S = 1.0, 3.0  # as hostd does it on one host
GRACE_S = 5.0  # between TERM and KILL


class Screen(Protocol):
    """Where a run is shown."""

    def plan(self, plan: Plan) -> None:
        """Called once, before anything is started."""

    def show(self, events: list[Event], state: RunState) -> None:
        """Called several times a second, also with no events."""

    def note(self, text: str) -> None:
        """ringctl's own word about the run."""


# --- Launching -----------------------------------------------------------------------------------


def new_run_id() -> str:
    """Sorts by time, and ends in something short enough to tell apart at a glance."""
    return time.strftime("%Y%m%d-%H%M%S-", time.gmtime()) + os.urandom(2).hex()


@dataclass(frozen=True)
class Prepared:
    """A plan, and the hosts that are ready for it."""

    plan: Plan
    agents: dict[str, Agent]
    lacking: dict[str, dict[str, Any]]  # what each host's code store said of the snapshot


def prepare(
    inventory: Inventory, options: LaunchOptions, pool: Pool, snapshot: Snapshot | None = None
) -> Prepared:
    """Ask the hosts for their facts and make the plan; nothing is changed anywhere."""
    hosts = [host for host, _ in place(inventory, options.world)]
    agents = agents_for(hosts, pool)
    answers = succeeded(fan_out(agents, facts_of(agents, snapshot.about() if snapshot else None)))
    plan = make_plan(inventory, {name: facts for name, (facts, _) in answers.items()}, options)
    return Prepared(plan, agents, {name: lacking for name, (_, lacking) in answers.items() if lacking})


def facts_of(
    agents: Mapping[str, Agent], code: dict[str, Any] | None
) -> Callable[[str], tuple[Facts, dict[str, Any] | None]]:
    """How to ask one host: it must say which of its interfaces leads to the others."""
    named = {name: agent.host.data_address for name, agent in agents.items()}
    found = fan_out(agents, lambda name: named[name] or agents[name].transport.address())
    addresses = succeeded(found)

    def ask(name: str) -> tuple[Facts, dict[str, Any] | None]:
        peers = [address or agents[peer].host.address for peer, address in addresses.items() if peer != name]
        return agents[name].facts(peers, code)

    return ask


def start(plan: Plan, agents: Mapping[str, Agent]) -> None:
    """Start every host's ranks, or none: if one host cannot, the others are stopped again."""
    requests = {host.host: start_request(plan, host.host) for host in plan.hosts}
    results = fan_out(requests, lambda name: agents[name].start(requests[name]))
    errors = [error for error in results.values() if isinstance(error, RingctlError)]
    if errors:
        ended = stop({name: agents[name] for name in requests}, plan.run, grace=0.0)
        unsure = [name for name, answer in ended.items() if isinstance(answer, RingctlError)]
        if STOPPED_EARLY in errors[0].message:
            raise StoppedEarly(errors[0].message)
        if PORT_TAKEN in errors[0].message and not unsure:
            raise PortTaken(errors[0].message)
        if unsure:
            errors[0].message += f"; {', '.join(unsure)} could not be asked to stop what may have started"
            errors[0].fix = f"once it can be reached: ringctl stop {plan.run}"
        else:
            errors[0].message += "; nothing was left running"
        raise errors[0]


class StoppedEarly(RingctlError):
    """Somebody stopped the run before all of it had started."""

    exit_code = 130


class PortTaken(RingctlError):
    """Somebody took the master port between its choice and the start."""


def launch(
    inventory: Inventory, options: LaunchOptions, pool: Pool, snapshot: Snapshot | None, screen: Screen
) -> tuple[Plan, dict[str, Agent]]:
    """Plan, push and start; if a master port of our own choice was taken meanwhile, with another one."""
    fixed = options.master_port or inventory.master_port
    for attempt in range(PORT_TRIES):
        ready = prepare(inventory, options, pool, snapshot)
        plan, agents = ready.plan, ready.agents
        if attempt == 0:
            screen.plan(plan)
        if snapshot is not None and ready.lacking:
            remote = {name: agents[name] for name in ready.lacking}
            succeeded(push(snapshot, remote, screen.note, ready.lacking))
        history.remember(plan, inventory, options)
        try:
            start(plan, agents)
        except PortTaken:
            if fixed or attempt == PORT_TRIES - 1:
                raise
            history.forget(plan.run)
            options = replace(options, run=new_run_id())
        else:
            return plan, agents
    raise AssertionError("unreachable")


def start_request(plan: Plan, host: str) -> dict[str, Any]:
    """What one host's supervisor is told."""
    own = next(h for h in plan.hosts if h.host == host)
    about = {"run": plan.run, "name": plan.name, "attempt": plan.attempt, "world": plan.world}
    return {**about, "snapshot": plan.code, **to_json(own)}


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


def watch(state: RunState, agents: Mapping[str, Agent], screen: Screen, interrupts: Interrupts) -> Outcome:
    """Show the run until it is over. Ctrl-C, counted by `interrupts`, stops it."""
    tails, ender = Tails(), Ender(agents, interrupts, screen)
    away: Mapping[str, str] = {}
    for update in follow(agents, state.run, live=True):
        for words in presence(away, update.away):
            screen.note(words)
        away = update.away
        for event in update.events:
            state = fold.fold(state, event)
            tails.add(event)
        screen.show(update.events, state)
        ender.look(state)
        if ender.waits_in_vain(state, away):
            hosts = ", ".join(away)
            screen.note(f"{hosts} cannot be reached; once that changes: ringctl stop {state.run}")
            break
    ender.join()
    return outcome(state, tails)


class Ender:
    """Ends a watched run: when the user asks for it, and on all hosts once a rank has failed on one."""

    def __init__(self, agents: Mapping[str, Agent], interrupts: Interrupts, screen: Screen) -> None:
        self.agents, self.interrupts, self.screen = agents, interrupts, screen
        self.seen = 0
        self.end_at: float | None = None  # the other hosts' ranks may fail by themselves until then
        self.threads: list[threading.Thread] = []

    def look(self, state: RunState) -> None:
        """Called several times a second."""
        if self.interrupts.count > self.seen:
            self.seen = self.interrupts.count
            first = self.seen == 1
            self.screen.note(
                "stopping the run; press Ctrl-C again to kill it" if first else "killing the run"
            )
            self.stop(state.run, GRACE_S if first else 0.0, "stopped")
        failed = next((rank for rank in state.ranks.values() if rank.state == "failed"), None)
        if failed and self.end_at is None and len(self.agents) > 1:
            self.end_at = time.monotonic() + SETTLE_S
        if failed and self.end_at is not None and time.monotonic() >= self.end_at and state.ended is None:
            self.end_at = float("inf")
            self.stop(state.run, FAILED_GRACE_S, f"rank {failed.rank} failed")

    def stop(self, run: str, grace: float, reason: str) -> None:
        """In a thread of its own, so that what the ranks say in the end is still shown."""
        self.threads.append(threading.Thread(target=stop, args=(self.agents, run, grace, reason)))
        self.threads[-1].start()

    def waits_in_vain(self, state: RunState, away: Mapping[str, str]) -> bool:
        """Whether the run was ended wherever that was possible, and only hosts that are away are left."""
        going_on = {rank.host for rank in state.ranks.values() if rank.state in ("waiting", "running")}
        asked = bool(self.threads) and not any(thread.is_alive() for thread in self.threads)
        return asked and bool(away) and going_on <= away.keys()

    def join(self) -> None:
        for thread in self.threads:
            thread.join()


def outcome(state: RunState, tails: Tails) -> Outcome:
    if state.state not in fold.ENDED:
        state = replace(state, state="lost")
    return Outcome(state, first_failure(state, tails))
