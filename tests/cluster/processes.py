"""Reading processes and listening ports from /proc, from the outside, so that looking changes nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .commands import ClusterError, wait_until

MARK = "RINGCTL_TEST_CLUSTER"  # in the environment of every process that holds a cluster up


@dataclass(frozen=True)
class Process:
    """One process of a test host."""

    pid: int  # as this machine numbers it
    host_pid: int  # as the host numbers it
    parent: int
    uid: int
    name: str
    argv: tuple[str, ...]


def everything(wanted: Callable[[int], bool] = lambda _: True) -> Iterator[Process]:
    """Every process of this machine that is wanted, by its pid, and not a zombie."""
    for pid in filter(wanted, _pids()):
        process = _read(Path(f"/proc/{pid}"))
        if process:
            yield process


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _read(folder: Path) -> Process | None:
    try:
        status = dict(
            line.split(":\t", 1) for line in (folder / "status").read_text().splitlines() if ":\t" in line
        )
        argv = (folder / "cmdline").read_text(errors="replace").split("\0")[:-1]
    except (FileNotFoundError, ProcessLookupError):
        return None  # it ended while we looked
    if status["State"].startswith(("Z", "X")):
        return None
    return Process(
        pid=int(folder.name),
        host_pid=int(status["NSpid"].split()[-1]),
        parent=int(status["PPid"]),
        uid=int(status["Uid"].split()[0]),
        name=status["Name"],
        argv=tuple(argv),
    )


def sharing_pid_namespace(init: int) -> list[Process]:
    """All processes in the PID namespace whose first process this is, that one included."""
    wanted = _namespace(init)
    if wanted is None:
        return []
    return list(everything(lambda pid: _namespace(pid) == wanted))


def _namespace(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


def descendants(*pids: int) -> list[Process]:
    """Children of these processes, their children, and so on."""
    found: list[Process] = []
    children: dict[int, list[Process]] = {}
    for process in everything():
        children.setdefault(process.parent, []).append(process)
    waiting = list(pids)
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += [process.pid for process in below]
    return found


def only_child(pid: int) -> int:
    """The one child of a process of ours that just waits for it."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())


def marked(mark: str) -> list[int]:
    """Processes started with this mark in their environment."""
    wanted = f"{MARK}={mark}".encode()
    return [pid for pid in _pids() if wanted in _environment(pid)]  # a zombie has no environment


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []  # it ended, or it is someone else's


def kill_all(find: Callable[[], list[int]], what: str) -> None:
    """SIGKILL what `find` finds until it finds nothing, so that nothing forked in between survives."""

    def none_left() -> bool:
        pids = find()
        for pid in pids:
            with suppress(ProcessLookupError):  # it ended by itself
                os.kill(pid, signal.SIGKILL)
        return not pids

    wait_until(none_left, f"ending {what}")


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks; with its pid this names it for good. None when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def listening_ports(pid: int) -> set[int]:
    """TCP ports that anything in this process's network namespace listens on."""
    ports = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        except FileNotFoundError as error:
            if table == "tcp6":
                continue  # a kernel without IPv6
            raise ClusterError(f"process {pid} is gone") from error
        for line in lines:
            _, local, _, state = line.split()[:4]
            if state == "0A":
                ports.add(int(local.rpartition(":")[2], 16))
    return ports
