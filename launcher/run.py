"""Launch a run: the steps, on whatever transport the hosts have."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from launcher import fold, history
from launcher.agent import ANSWER_S, Agent, Conversation, agents_for
from launcher.ask import Asked, chosen_hosts, lease_seconds
from launcher.diagnose import Cause
from launcher.errors import NO_THREAD, HostError, RingctlError, StoppedEarly
from launcher.fanout import fan_out, succeeded
from launcher.history import new_run_id
from launcher.hostword import NOT_AGAIN
from launcher.model import CheckResult, Inventory, Plan, to_json
from launcher.plan import LaunchOptions, make_plan, place
from launcher.preflight import survey as surveys
from launcher.preflight.examine import Examined, examine, result_line
from launcher.push import Snapshot, push
from launcher.redact import Hidden
from launcher.runs import STOPPED, stop
from launcher.told import words_of
from launcher.transport import Pool
from launcher.watch import Interrupts, Screen

ALREADY = "there is a run"
PORT_TAKEN = "the master port is taken:"
STOPPED_EARLY = "it was stopped while it was starting"
SLOTS_TAKEN = "no room for it by now:"
PORT_TRIES = 3
NOT_EVERYWHERE = "it did not start on all hosts"
FREE_PORT = "leave out --master-port and master_port, so that a free one is taken"


@dataclass(frozen=True)
class Prepared:
    """A plan, and the hosts that are ready for it."""

    plan: Plan
    agents: dict[str, Agent]
    lacking: dict[str, dict[str, Any]]  # what each host's code store said of the snapshot
    checked: Examined | None = None  # what preflight found
    open: Mapping[str, Conversation] = field(default_factory=dict)  # with a hostd that waits to start it

    @property
    def findings(self) -> Sequence[CheckResult]:
        """Of preflight, that do not block and are worth saying."""
        return self.checked.worth_saying if self.checked else ()

    def close(self, names: Iterable[str] | None = None) -> None:
        """Start nothing in these conversations, or in any."""
        for name in self.open if names is None else names:
            if name in self.open:
                self.open[name].close()


def prepare(
    inventory: Inventory,
    options: LaunchOptions,
    pool: Pool,
    snapshot: Snapshot | None = None,
    *,
    preflight: bool = False,
    ending: str = "",
) -> Prepared:
    """Ask the hosts for their facts and make the plan; nothing is changed anywhere. With `preflight` they are
    asked for all that could go wrong, and PreflightError says what would. What the run `ending` has is free
    by then."""
    placed = place(inventory, options.world)
    agents = agents_for([host for host, _ in placed], pool)
    code = snapshot.about() if snapshot else None
    checked = (
        examine(inventory, options, agents, code, figures=False, stay=True, ending=ending)
        if preflight
        else None
    )
    survey = checked.survey if checked else surveys.for_plan(agents, code)
    try:
        if checked and not ending:  # else that of the attempt that goes on still counts
            note_checked(options.run, checked)
        succeeded({**survey.facts, **survey.errors})
        if checked:
            checked.must_pass()
        plan = make_plan(inventory, survey.facts, options)
    except BaseException:
        for conversation in survey.open.values():
            conversation.close()
        raise
    return Prepared(plan, agents, dict(survey.lacking), checked, survey.open)


def could_start_again(asked: Asked, pool: Pool, known: Container[str]) -> None:
    """Raise what would keep the run from starting again, as far as that can be told while the attempt before
    goes on; nothing is changed anywhere. Hosts that are not `known` have not had its code yet."""
    history.need_room()
    options, snapshot = asked.options, asked.snapshot
    if snapshot is None and options.code:
        snapshot = Snapshot("", (), options.code)  # whose files nobody here has any more
    hosts = chosen_hosts(asked.inventory, None, ",".join(options.left_out) or None)
    ready = prepare(hosts, options, pool, snapshot, preflight=True, ending=options.run)
    try:
        refuse_without_folder(ready.plan, hosts)
        for name, told in ready.lacking.items():
            if asked.snapshot is None and name not in known and not told.get("have"):
                words = "it has not had the run's code, and what is here has changed since"
                raise HostError(name, words, fix="put the folder back as it was, or launch it anew")
        if asked.rooms:
            for conversation in claim(ready.plan, ready.agents, ready.open, asked.rooms).values():
                conversation.close()
    finally:
        ready.close()


def refuse_without_folder(plan: Plan, inventory: Inventory) -> None:
    """Ranks on this machine run where the user was, which may be gone."""
    local = {host.name for host in inventory.hosts if host.local}
    for host in plan.hosts:
        if host.host in local and not os.path.isdir(os.path.expanduser(host.workdir)):
            raise HostError(host.host, f"there is no folder {host.workdir} any more", fix="make it again")


def note_checked(run: str, checked: Examined) -> None:
    """For its report, and its page."""
    from launcher.preflight.report import as_json

    history.note_preflight(run, as_json(checked))


def start(
    plan: Plan,
    agents: Mapping[str, Agent],
    open_: Mapping[str, Conversation] | None = None,
    *,
    automatic: bool = False,
    since: int = 1,
    again: str = "",
) -> None:
    """Start every host's ranks, or none: if one host cannot, the others are stopped again. In an open
    conversation that saves the host another process. What starts by itself (`automatic`) does not where
    somebody has stopped the run, in the attempt `since` or later; what was announced as `again`, where
    somebody has since."""
    secret = secrets.token_hex(32)  # of this attempt's supervisors; nowhere but on their hosts
    token = secrets.token_hex(16)  # by which a host knows this start again, should it be asked twice
    common = {"lease": lease(plan, secret), "automatic": automatic, "since": since, "again": again}
    common["token"] = token
    requests = {host.host: {**start_request(plan, host.host), **common} for host in plan.hosts}
    bugs: list[Exception] = []  # of ours, raised once nothing is left of the start

    def start_there(name: str) -> dict[str, Any]:
        try:
            if open_ and name in open_:
                return open_[name].last(requests[name], ANSWER_S)
        except HostError:
            pass  # it ended meanwhile; should it have started them after all, the next one is told the same
        return agents[name].start(requests[name])

    def start_or_tell(name: str) -> dict[str, Any]:
        try:
            return start_there(name)
        except RingctlError:
            raise
        except Exception as bug:
            bugs.append(bug)
            raise HostError(name, f"{type(bug).__name__}: {bug}") from bug

    results = fan_out(requests, start_or_tell)
    errors = [error for error in results.values() if isinstance(error, RingctlError)]
    if errors:
        # What a host has of somebody else's start is not ours to end.
        its = {name: agents[name] for name in requests if not is_anothers(results[name])}
        error = undone(plan, its, errors, automatic)
        raise bugs[0] if bugs else error


def undone(
    plan: Plan, agents: Mapping[str, Agent], errors: Sequence[RingctlError], automatic: bool
) -> RingctlError:
    """Have these hosts end what they have of a start with errors: what to tell of it."""
    stopped = [error.message for error in errors if STOPPED_EARLY in error.message]
    reasons = [STOPPED if stopped else NOT_EVERYWHERE]
    if not automatic and any(host.keeps for host in plan.hosts):
        reasons.append(NOT_AGAIN)  # no attempt follows by itself, so none needs the slots that are kept
    answers = [ended(plan, agents, reason) for reason in reasons]
    unsure = [name for name, answer in answers[0].items() if isinstance(answer, RingctlError)]
    left = {
        name: words_of(answer["left"])
        for name, answer in answers[-1].items()
        if isinstance(answer, dict) and answer["left"]
    }
    if not unsure and len(agents) == len(plan.hosts):  # no host has it, so none can tell that it is over
        note_over(plan, STOPPED if stopped else NOT_EVERYWHERE, errors[0], automatic=automatic)
    if stopped:
        return StoppedEarly(stopped[0])
    if PORT_TAKEN in errors[0].message and not unsure and not left:
        return PortTaken(f"{errors[0].message}; nothing was left running", fix=FREE_PORT)
    if unsure:
        errors[0].message += f"; {', '.join(unsure)} could not be asked to stop what may have started"
        errors[0].fix = f"once it can be reached: ringctl stop {plan.run}"
    elif left:
        errors[0].message += "".join(
            f"; {name} could not end processes {pids}" for name, pids in left.items()
        )
        errors[0].fix = f"end them there; then: ringctl stop {plan.run}"
    elif agents:
        errors[0].message += "; nothing was left running"
    return errors[0]


def ended(
    plan: Plan, agents: Mapping[str, Agent], reason: str
) -> Mapping[str, dict[str, Any] | RingctlError]:
    """What these hosts have of a start, at once. That this machine cannot even ask them (too few files can be
    open, say) does not hide why it failed."""
    try:
        return stop(agents, plan.run, 0.0, reason, attempt=plan.attempt, exact=True)
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and str(error) != NO_THREAD:
            raise
        return {name: HostError(name, f"cannot be asked: {error}") for name in agents}


def claim(
    plan: Plan, agents: Mapping[str, Agent], open_: Mapping[str, Conversation], rooms: Mapping[str, int]
) -> dict[str, Conversation]:
    """Take the run's slots on all hosts, or none: the host itself says who has them, if they are not free
    among the `rooms` that there are. They are the run's while these conversations last, to start it in."""

    def ask(name: str) -> Conversation:
        request = {"claim": claim_request(plan, name, rooms[name])}
        if name in open_:
            try:
                open_[name].say(request)
                open_[name].answer(ANSWER_S)
                return open_[name]
            except HostError:
                open_[name].close()  # it ended meanwhile
        fresh = agents[name].converse("hostd.py", "hostd:start", [request])
        try:
            fresh.answer(ANSWER_S)
        except BaseException:
            fresh.close()
            raise
        return fresh

    results = fan_out([host.host for host in plan.hosts if host.host in rooms], ask)
    try:
        return succeeded(results)
    except BaseException as error:
        for each in results.values():
            if isinstance(each, Conversation):
                each.close()
        if isinstance(error, RingctlError) and SLOTS_TAKEN in error.message:
            raise SlotsTaken(error.message, plan, agents, rooms) from None
        raise


def claim_request(plan: Plan, host: str, room: int) -> dict[str, Any]:
    own = next(h for h in plan.hosts if h.host == host)
    about = {"run": plan.run, "attempt": plan.attempt, "world": plan.world}
    return {**about, "slots": len(own.ranks), "shared": own.shared, "room": room}


def note_over(plan: Plan, reason: str, error: RingctlError, *, automatic: bool = False) -> None:
    """How it ended, and why, which no host can tell; of an `automatic` start, whoever watches the run has the
    last word (see attempts.py)."""
    end = fold.without_missing(fold.initial(plan), plan.rank_hosts, time.time(), reason)
    cause = Cause(None, "", error.message, error.fix) if end.state == "failed" else None
    if not automatic:
        history.close(end, to_json(cause) if cause else None)
    with contextlib.suppress(RingctlError):  # a full disk
        history.mark(plan.run, end.state, error=error.message, fix=error.fix, attempt=plan.attempt)


def is_anothers(answer: dict[str, Any] | RingctlError) -> bool:
    """Whether a host refused because the run is there already, as this attempt or a later one."""
    return isinstance(answer, RingctlError) and f": {ALREADY} " in answer.message


class SlotsTaken(RingctlError):
    """Others have the slots that a run was to find free."""

    def __init__(
        self, message: str, plan: Plan, agents: Mapping[str, Agent], rooms: Mapping[str, int]
    ) -> None:
        super().__init__(message)
        self._claim = functools.partial(claim, plan, agents, {}, rooms)

    def still(self) -> SlotsTaken | None:
        """What its hosts say now; None once there is room, or some host does not answer."""
        try:
            for conversation in self._claim().values():
                conversation.close()
        except SlotsTaken as error:
            return error
        except RingctlError:
            return None  # whoever starts the run hears what it is
        return None


class PortTaken(RingctlError):
    """Somebody took the master port between its choice and the start."""


def launch(
    asked: Asked,
    pool: Pool,
    screen: Screen,
    interrupts: Interrupts,
    *,
    begin: Callable[[str], None] = lambda _: None,
    automatic: bool = False,
) -> tuple[Plan, dict[str, Agent]]:
    """Check, plan, push and start; with another master port where ours was taken meanwhile. Ctrl-C before
    the start ends it at once; from the start on, `interrupts` counts it. `begin` is called just before the
    start, with the run's id, and once more should that have to change."""
    inventory, options, snapshot = asked.inventory, asked.options, asked.snapshot
    fixed = options.master_port or inventory.master_port
    for attempt in range(PORT_TRIES):
        hosts = chosen_hosts(inventory, None, ",".join(options.left_out) or None)
        ready = prepare(hosts, options, pool, snapshot, preflight=options.preflight and attempt == 0)
        plan, agents = ready.plan, ready.agents
        if attempt == 0:
            screen.plan(plan)
            for finding in ready.findings:
                screen.note(result_line(finding))
        try:
            if snapshot is not None and ready.lacking:
                remote = {name: agents[name] for name in ready.lacking}
                # A server may allow one session only, and a push may take long.
                ready.close(name for name, told in ready.lacking.items() if not told.get("have"))
                succeeded(push(snapshot, remote, screen.note, ready.lacking))
            if asked.rooms and attempt == 0:
                ready = replace(ready, open={**ready.open, **claim(plan, agents, ready.open, asked.rooms)})
            ours = interrupts.hold()  # else they are whoever watches the run through all its attempts'
            history.remember(plan, inventory, options)
            if ready.checked and options.attempt == 1 and not options.promised:
                note_checked(plan.run, ready.checked)  # the first that is known of it
            begun(plan, begin)
            start(plan, agents, ready.open, automatic=automatic, since=options.since, again=asked.again)
        except PortTaken:
            if ours:
                interrupts.release()
            if fixed or attempt == PORT_TRIES - 1:
                raise
            if options.attempt > 1 or options.promised:  # the run keeps its id, and that attempt has failed
                options = replace(options, attempt=options.attempt + 1)
            else:
                history.forget(plan.run)
                options = replace(options, run=new_run_id())
        else:
            return plan, agents
        finally:
            ready.close()
    raise AssertionError("unreachable")


def begun(plan: Plan, begin: Callable[[str], None]) -> None:
    """It is about to start; if it was stopped meanwhile, that is how it ended."""
    try:
        begin(plan.run)
    except StoppedEarly as error:
        note_over(plan, STOPPED, error)
        raise


def start_request(plan: Plan, host: str) -> dict[str, Any]:
    """What one host's supervisor is told."""
    own = next(h for h in plan.hosts if h.host == host)
    about = {"run": plan.run, "name": plan.name, "attempt": plan.attempt, "world": plan.world}
    watchdog = os.environ.get("RINGCTL_WATCHDOG", "")  # seconds without progress until ranks are looked at
    names = sorted({n for rank in own.ranks for n, value in rank.env.items() if isinstance(value, Hidden)})
    return {**about, "snapshot": plan.code, "watchdog": watchdog, "secrets": names, **to_json(own)}


def lease(plan: Plan, secret: str) -> dict[str, Any] | None:
    """How the supervisors of a run on several hosts hear of each other (see hostlease.py)."""
    if len(plan.hosts) < 2:
        return None
    place = {"leader": plan.hosts[0].host, "address": plan.master_address, "port": plan.master_port}
    return {**place, "others": len(plan.hosts) - 1, "secret": secret, "seconds": lease_seconds()}
