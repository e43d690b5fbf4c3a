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
from launcher.diagnose import Cause, Tails, absent_ranks, first_failure, standstill
from launcher.errors import RingctlError
from launcher.fanout import fan_out, succeeded
from launcher.follow import follow, presence
from launcher.model import CheckResult, Event, Inventory, Plan, RunState, to_json
from launcher.plan import LaunchOptions, make_plan, place
from launcher.preflight import survey as surveys
from launcher.preflight.examine import examine, result_line
from launcher.push import Snapshot, push
from launcher.runs import stop
from launcher.transport import Pool

PORT_TAKEN = "the master port is taken:"
STOPPED_EARLY = "it was stopped while it was starting"
PORT_TRIES = 3
SETTLE_S, FAILED_GRACE_S = 1.0, 3.0  # as hostd does it on one host
GRACE_S = 5.0  # between TERM and KILL
STACKS_S = 3.0  # by then every host that noticed a standstill has said where its ranks are


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
    failures: tuple[CheckResult, ...] = ()  # of preflight, that do not block


def prepare(
    inventory: Inventory,
    options: LaunchOptions,
    pool: Pool,
    snapshot: Snapshot | None = None,
    *,
    preflight: bool = False,
) -> Prepared:
    """Ask the hosts for their facts and make the plan; nothing is changed anywhere. With `preflight` they are
    asked for all that could go wrong, and PreflightError says what would."""
    placed = place(inventory, options.world)
    agents = agents_for([host for host, _ in placed], pool)
    code = snapshot.about() if snapshot else None
    if preflight:
        checked = examine(inventory, options, agents, code)
        succeeded({**checked.survey.facts, **checked.survey.errors})
        checked.must_pass()
        survey, failures = checked.survey, checked.failures
    else:
        survey, failures = surveys.for_plan(agents, code), []
        succeeded({**survey.facts, **survey.errors})
    plan = make_plan(inventory, survey.facts, options)
    return Prepared(plan, agents, dict(survey.lacking), tuple(failures))


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
    inventory: Inventory,
    options: LaunchOptions,
    pool: Pool,
    snapshot: Snapshot | None,
    screen: Screen,
    *,
    preflight: bool = True,
) -> tuple[Plan, dict[str, Agent]]:
    """Check, plan, push and start; with another master port where ours was taken meanwhile."""
    fixed = options.master_port or inventory.master_port
    for attempt in range(PORT_TRIES):
        ready = prepare(inventory, options, pool, snapshot, preflight=preflight and attempt == 0)
        plan, agents = ready.plan, ready.agents
        if attempt == 0:
            screen.plan(plan)
            for failure in ready.failures:
                screen.note(result_line(failure))
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
    watchdog = os.environ.get("RINGCTL_WATCHDOG", "")  # seconds without progress until ranks are looked at
    return {**about, "snapshot": plan.code, "watchdog": watchdog, **to_json(own)}


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
    tails, ender, stalls = Tails(), Ender(agents, interrupts, screen), Stalls(screen)
    away: Mapping[str, str] = {}
    for update in follow(agents, state.run, live=True):
        for words in presence(away, update.away):
            screen.note(words)
        away = update.away
        for event in update.events:
            state = fold.fold(state, event)
            tails.add(event)
        screen.show(update.events, state)
        stalls.look(update.events, state, tails, away)
        ender.look(state)
        if ender.waits_in_vain(state, away):
            hosts = ", ".join(away)
            screen.note(f"{hosts} cannot be reached; once that changes: ringctl stop {state.run}")
            break
    ender.join()
    return outcome(state, tails, away)


class Stalls:
    """Says who keeps the others waiting when a run makes no progress, and who has not come when it begins.
    It ends nothing: what looks like a hang may only be slow."""

    def __init__(self, screen: Screen) -> None:
        self.screen = screen
        self.say_at: float | None = None  # when enough hosts have said where their ranks are
        self.said = ""

    def look(self, events: list[Event], state: RunState, tails: Tails, away: Mapping[str, str]) -> None:
        """Called several times a second."""
        absent = absent_ranks(
            e.data["text"] for e in events if e.kind == "line" and "not come" in e.data["text"]
        )
        if absent:
            self.say(", ".join(whereabouts(state, rank, away) for rank in sorted(absent)))
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


def whereabouts(state: RunState, rank: int, away: Mapping[str, str]) -> str:
    """What is known of a rank that the others wait for."""
    missing = state.ranks.get(rank)
    if missing is None:
        return f"rank {rank} is not part of this run"
    how = {"waiting": "has not been started yet", "running": "runs there but has not joined the others"}
    word = away.get(missing.host) or how.get(missing.state, f"has {missing.state}")
    return f"rank {rank} on {missing.host}: {word}"


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


def outcome(state: RunState, tails: Tails, away: Mapping[str, str] | None = None) -> Outcome:
    """How the run ended, and why; `away` are hosts that could not be heard in the end."""
    if state.state not in fold.ENDED:
        state = replace(state, state="lost")
    return Outcome(state, first_failure(state, tails, away))
