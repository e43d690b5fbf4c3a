"""What a host is doing: load, memory, disk. Standard library only, Python 3.8 and up; hostruns imports it."""

from __future__ import annotations

import os

TYPE_CHECKING = False  # a type checker takes it for true; importing `typing` at run time would cost a start
if TYPE_CHECKING:
    from typing import Any

MEMORY = {"MemTotal": "memory_total", "MemAvailable": "memory_free"}


def now(home: str) -> dict[str, Any]:
    """All of it; -1, or no load, where it cannot be known."""
    return dict(load=load(), cores=len(os.sched_getaffinity(0)), **memory(), **disk(home))


def load() -> list[float]:
    """How many processes ran or waited to, over one, five and fifteen minutes."""
    try:
        return [round(each, 2) for each in os.getloadavg()]
    except OSError:
        return []


def memory() -> dict[str, int]:
    found = dict.fromkeys(MEMORY.values(), -1)
    try:
        with open("/proc/meminfo") as f:
            for line in f:
                key, _, value = line.partition(":")
                if key in MEMORY:
                    found[MEMORY[key]] = int(value.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return found


def disk(home: str) -> dict[str, int]:
    """Of the file system that the user's runs are on."""
    while home != "/" and not os.path.isdir(home):
        home = os.path.dirname(home)
    try:
        about = os.statvfs(home)
    except OSError:
        return {"disk_free": -1, "disk_total": -1}
    return {"disk_free": about.f_bavail * about.f_frsize, "disk_total": about.f_blocks * about.f_frsize}
