"""Pure: whether a run goes on after a failure, and with whom. What does it: attempts.py, nextattempt.py."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from launcher import ask
from launcher.ask import Asked
from launcher.diagnose import Cause
from launcher.errors import HostError, RingctlError
from launcher.model import Host, Inventory, Plan, RankState
from launcher.plan import LaunchOptions, place
from launcher.told import figure
from launcher.watch import Outcome
from launcher.watching import Failure

SAYS_NOTHING = ("host_gone", "peer_died", "store_died")  # about the program: rows of the catalogue
FROM_OUTSIDE = ("was killed by SIGKILL", "was killed by SIGTERM")
# Addresses, ports and times are never the same.
PASSING = re.compile(r"0x[0-9a-f]+|(?<=:)\d{4,5}\b|\b[\d.]+ ?m?s\b")


def failure_of(outcome: Outcome) -> Failure:
    """What is worth knowing of a failed attempt when the next one fails."""
    state, cause = outcome.state, outcome.cause
    who = state.ranks.get(cause.rank) if cause and cause.rank is not None else None
    steps = [figure("step", r.metric.get("step")) for r in ([who] if who else state.ranks.values())]
    step = max((step for step in steps if isinstance(step, (int, float))), default=None)
    text = cause.text if cause else f"it is {state.state}"
    telling = who is not None and not (cause and is_anothers(cause, who))
    return Failure(state.attempt, step, PASSING.sub("#", text) if telling else "", text)


def is_anothers(cause: Cause, who: RankState) -> bool:
    """Whether the program has no part in it: the rank's host was gone, or its supervisor ended, or it lost
    another, and nobody knows why. A rank that ended too early, so that the others lost it, did so by
    itself."""
    return cause.befell or (cause.id in SAYS_NOTHING and who.state != "succeeded")


def not_started(attempt: int, error: RingctlError, *, counts: bool = True) -> Failure:
    return Failure(attempt, None, "", error.message, counts)


def why_not_again(options: LaunchOptions, failures: Sequence[Failure]) -> str:
    """ "" if the run may start once more."""
    if counted(failures) > options.max_restarts:
        times = "once" if options.max_restarts == 1 else f"{options.max_restarts} times"
        return f"it was started again {times}, as often as --max-restarts allows"
    if len(failures) > 1 and failures[-1].error and same(failures[-1], failures[-2]):
        where = "" if failures[-1].step is None else f" at step {failures[-1].step:.12g}"
        return f"it failed{where} as the attempt before did; starting again would not help"
    return ""


def counted(failures: Sequence[Failure]) -> int:
    return sum(failure.counts for failure in failures)


def same(one: Failure, other: Failure) -> bool:
    """One that was killed from outside before its first step says nothing about the program either."""
    killed = one.step is None and any(words in one.error for words in FROM_OUTSIDE)
    return (one.step, one.error) == (other.step, other.error) and not killed


def without(
    inventory: Inventory, options: LaunchOptions, away: Mapping[str, str], back: Collection[str] = ()
) -> LaunchOptions:
    """The options with which the run goes on without these hosts. If too few ranks would be left, with those
    that were left out and are `back`; raises if these are too few, too."""
    left_out = options.left_out | away.keys()
    full = options.full_world or world_of(inventory, options)

    def world_without(names: Collection[str]) -> int:
        slots = sum(host.slots for host in inventory.hosts if host.name not in names)
        return min(options.world or full, slots)

    if world_without(left_out) < (options.min_world or 0):
        left_out -= set(back)
    world = world_without(left_out)
    if options.min_world is None or world < options.min_world:
        least = f", and --min-world is {options.min_world}" if options.min_world else ""
        raise HostError(
            next(iter(away)), f"{next(iter(away.values()))}; without it {world} ranks are left{least}"
        )
    return replace(options, world=world, full_world=full, left_out=frozenset(left_out))


def world_of(inventory: Inventory, options: LaunchOptions) -> int:
    return place(inventory, options.world)[-1][1].stop


def same_world(asked: Asked, plan: Plan, hosts: Sequence[Host]) -> Asked:
    """The run as its last attempt was."""
    names = {host.name for host in hosts}
    out = frozenset(host.name for host in asked.inventory.hosts if host.name not in names)
    full = asked.options.full_world or world_of(asked.inventory, asked.options)
    left_out = out if plan.world < full else asked.options.left_out
    return replace(
        asked, options=replace(asked.options, world=plan.world, full_world=full, left_out=left_out)
    )


def other_world(asked: Asked, world: int | None) -> Asked:
    """The run with so many ranks, or as many as it was launched with, on whatever hosts it needs for them."""
    full = asked.options.full_world or world_of(asked.inventory, asked.options)
    options = replace(asked.options, world=world or full, full_world=full, left_out=frozenset())
    place(asked.inventory, options.world)
    return replace(asked, options=options)


def needed(asked: Asked) -> list[Host]:
    """The hosts that its ranks are to be on."""
    hosts = ask.chosen_hosts(asked.inventory, None, ",".join(asked.options.left_out) or None)
    return [host for host, _ in place(hosts, asked.options.world)]


def leaving_out(asked: Asked, names: Iterable[str]) -> tuple[Asked, int]:
    """The same without these hosts, and how many ranks the others have room for."""
    left_out = asked.options.left_out.union(names)
    room = sum(host.slots for host in asked.inventory.hosts if host.name not in left_out)
    return replace(asked, options=replace(asked.options, left_out=left_out)), room


def with_code(asked: Asked, options: LaunchOptions, hosts: Sequence[Host]) -> LaunchOptions:
    """Without hosts that the run never was on, if nobody here could push its code to them."""
    if asked.snapshot is not None:
        return options
    strangers = {host.name for host in asked.inventory.hosts} - {host.name for host in hosts}
    return replace(options, left_out=options.left_out | strangers)
