"""Who has what of the hosts, and what they are doing: asked of all at once, as JSON and as a table."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.agent import Agent
from launcher.errors import RingctlError
from launcher.fanout import fan_out
from launcher.model import Host, SlotsTold
from launcher.text import Row
from launcher.told import HostNow

UNKNOWN = "-"


def look(agents: Mapping[str, Agent]) -> dict[str, HostNow | RingctlError]:
    """What each host says, or why it does not."""
    return fan_out(agents, lambda name: agents[name].slots())


def taken(runs: Sequence[SlotsTold]) -> int:
    """How many slots these have. Those that share lie on top of each other."""
    alone = sum(each.slots for each in runs if not each.shared)
    return alone + max((each.slots for each in runs if each.shared), default=0)


def host_json(host: Host, now: HostNow | RingctlError, seen: float | None = None) -> dict[str, Any]:
    """A host as `ringctl hosts --json` and the service tell it; `seen` is when it said so."""
    about: dict[str, Any] = {"name": host.name, "address": host.address, "slots": host.slots}
    if isinstance(now, RingctlError):
        nothing = dict.fromkeys(("memory_free", "memory_total", "disk_free", "disk_total"), -1)
        none = {"taken": 0, "free": 0, "runs": [], "load": [], "cores": 0, **nothing}
        return {**about, **none, "seen": seen, "problem": "", "error": now.message}
    has = taken(now.runs)
    return {
        **about,
        "taken": has,
        "free": max(0, host.slots - has),
        "runs": [
            {"run": each.run, "user": each.user, "slots": each.slots, "shared": each.shared}
            for each in now.runs
        ],
        "load": list(now.load),
        "cores": now.cores,
        "memory_free": now.memory_free,
        "memory_total": now.memory_total,
        "disk_free": now.disk_free,
        "disk_total": now.disk_total,
        "seen": time.time() if seen is None else seen,
        "problem": now.problem,
        "error": "",
    }


def rows(hosts: Sequence[dict[str, Any]]) -> list[Row]:
    """One for each host, and one more for each further run on it."""
    found: list[Row] = [("HOST", "SLOTS", "TAKEN", "BY RUN", "OF USER", "LOAD", "MEMORY FREE", "DISK FREE")]
    for host in hosts:
        if host["error"]:
            found.append((host["name"], str(host["slots"]), UNKNOWN, "does not answer", *[UNKNOWN] * 4))
            continue
        runs = [(run_text(each, len(host["runs"]) > 1), each["user"]) for each in host["runs"]]
        first, *others = runs or [(UNKNOWN, UNKNOWN)]
        load = f"{host['load'][0]:.1f} of {host['cores']}" if host["load"] else UNKNOWN
        memory = part_text(host["memory_free"], host["memory_total"])
        disk = part_text(host["disk_free"], host["disk_total"])
        found.append((host["name"], str(host["slots"]), str(host["taken"]), *first, load, memory, disk))
        found += [("", "", "", *other, "", "", "") for other in others]
    return found


def run_text(run: Mapping[str, Any], several: bool) -> str:
    """With its slots where the number of all does not say it."""
    notes = [str(run["slots"])] * several + ["shared"] * run["shared"]
    return f"{run['run']} ({', '.join(notes)})" if notes else str(run["run"])


def part_text(free: int, total: int) -> str:
    if free < 0 or total < 0:
        return UNKNOWN
    return f"{free / (1 << 30):.1f} of {total / (1 << 30):.1f} GB"
