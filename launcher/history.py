"""What this controller has run: one small file a run, so that it can be found again from anywhere."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.errors import RingctlError
from launcher.model import Host, Inventory, Plan, RunState, from_json, to_json
from launcher.plan import LaunchOptions


@dataclass(frozen=True)
class Record:
    """A run that was started from here, and the hosts it is on."""

    plan: Plan
    hosts: tuple[Host, ...]
    started: float
    inventory: Inventory
    options: LaunchOptions
    end: RunState | None = None  # how it ended, as far as somebody here has seen it
    cause: Mapping[str, Any] | None = None  # and what failed first, a diagnose.Cause, if that was looked for


def new_run_id() -> str:
    """Sorts by time, and ends in something short enough to tell apart at a glance."""
    return time.strftime("%Y%m%d-%H%M%S-", time.gmtime()) + os.urandom(2).hex()


def home() -> Path:
    """ringctl's folder on this machine."""
    return Path(os.environ.get("RINGCTL_HOME") or Path.home() / ".ringctl")


def remember(plan: Plan, inventory: Inventory, options: LaunchOptions) -> None:
    """Written before anything is started, so that even a killed launch can be found and stopped."""
    names = {host.host for host in plan.hosts}
    hosts = tuple(host for host in inventory.hosts if host.name in names)
    write(Record(plan, hosts, time.time(), inventory, options))


def close(end: RunState, cause: Mapping[str, Any] | None = None) -> None:
    """The run is over, and this is how it ended; a cause that was found before stays."""
    record = read(path_of(end.run))
    if record is not None and record.plan.attempt == end.attempt:
        with contextlib.suppress(RingctlError):  # then the hosts are asked again the next time
            write(replace(record, end=end, cause=cause or record.cause))


def forget(run: str) -> None:
    path_of(run).unlink(missing_ok=True)


def path_of(run: str) -> Path:
    return home() / "history" / f"{run}.json"


def write(record: Record) -> None:
    path = path_of(record.plan.run)
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    try:
        for folder in (home(), path.parent):  # `mode` is that of the last folder only
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary.write_text(json.dumps(to_json(record)))
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise RingctlError(f"{path}: cannot be written: {error.strerror}") from None


def recall() -> list[Record]:
    """All of them, oldest first; a file that cannot be read is left out."""
    records = [read(path) for path in (home() / "history").glob("*.json")]
    return sorted((record for record in records if record), key=lambda record: record.started)


def read(path: Path) -> Record | None:
    try:
        return from_json(Record, json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, KeyError):
        return None
