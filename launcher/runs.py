"""Find the runs that there are, and end them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher import fold, history
from launcher.agent import Agent, agents_for
from launcher.errors import InputError, RingctlError
from launcher.fanout import fan_out
from launcher.model import Host, RunState
from launcher.transport import Pool

THIS_MACHINE = Host("localhost", local=True)


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


def find_runs(pool: Pool, here: Host = THIS_MACHINE) -> list[Found]:
    """All runs that this controller started or this machine has, oldest first."""
    records = {record.plan.run: record for record in history.recall()}
    hosts = {host.name: host for record in records.values() for host in record.hosts} | {here.name: here}
    agents = agents_for(hosts.values(), pool)
    answers = fan_out(agents, lambda name: agents[name].runs()["runs"])
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


def stop(agents: Mapping[str, Agent], run: str, grace: float) -> dict[str, dict[str, Any] | RingctlError]:
    """End the run on every host: what each one ended, or why it could not be asked."""

    def work(name: str) -> dict[str, Any]:
        return agents[name].stop(run, grace)

    return fan_out(agents, work)
