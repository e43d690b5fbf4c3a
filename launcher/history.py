"""What this controller has run: one small file a run, so that it can be found again from anywhere."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from launcher.errors import RingctlError
from launcher.model import Host, Inventory, Plan, RunState, from_json, to_json
from launcher.plan import LaunchOptions
from launcher.wholefile import replace_whole

T = TypeVar("T")
TURN_S = 5.0  # nobody needs the records for longer, unless it was stopped in the middle


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
    former: tuple[Host, ...] = ()  # hosts that only earlier attempts were on


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
    make_folder(path_of(plan.run).parent)
    with _turn():
        before = read(path_of(plan.run))
        earlier = (*before.hosts, *before.former) if before else ()
        former = tuple(host for host in earlier if host.name not in names)
        write(Record(plan, hosts, time.time(), inventory, options, former=former))


def close(end: RunState, cause: Mapping[str, Any] | None = None) -> None:
    """The run is over, and this is how it ended; a cause that was found before stays."""
    with _turn():
        record = read(path_of(end.run))
        if record is not None and record.plan.attempt == end.attempt:
            with contextlib.suppress(RingctlError):  # then the hosts are asked again the next time
                write(replace(record, end=end, cause=cause or record.cause))


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    """One after the other: who notes how an attempt ended must not undo that the next one has begun."""
    try:
        folder = os.open(home() / "history", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # there are no records
        yield
        return
    try:
        deadline = time.monotonic() + TURN_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
        yield
    finally:
        os.close(folder)


def forget(run: str) -> None:
    path_of(run).unlink(missing_ok=True)


def path_of(run: str) -> Path:
    return home() / "history" / f"{run}.json"


def write(record: Record) -> None:
    write_as(record, path_of(record.plan.run))


def write_as(record: Any, path: Path) -> None:
    """A record as JSON, in place of what was there, at once and for good."""
    make_folder(path.parent)
    try:
        replace_whole(path, json.dumps(to_json(record)).encode())
    except OSError as error:
        raise RingctlError(f"{path}: cannot be written: {error.strerror}") from None


def make_folder(path: Path) -> None:
    """One below ringctl's own, for us alone."""
    try:
        for folder in (home(), path):  # `mode` is that of the last folder only
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise RingctlError(f"{path}: cannot be made: {error.strerror}") from None


def recall() -> list[Record]:
    """All of them, oldest first; a file that cannot be read is left out."""
    records = [read(path) for path in (home() / "history").glob("*.json")]
    return sorted((record for record in records if record), key=lambda record: record.started)


def read(path: Path) -> Record | None:
    return read_as(Record, path)


def read_as(kind: type[T], path: Path) -> T | None:
    """What `write_as` wrote; None if there is nothing that can be read."""
    try:
        return from_json(kind, json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
