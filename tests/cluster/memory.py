"""A limit on a host's memory, by a control group of this machine (version 1 or 2), with real OOM kills."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

from .commands import ClusterError, wait_until

_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")


def limit(mark: str, host: str, pids: Iterable[int], size: int) -> None:
    """Put processes, and so all that they start, under one limit without swap."""
    root, limits = _hierarchy()
    group = root / f"rc{mark}-{host}"
    try:
        group.mkdir(exist_ok=True)
        for name in limits:
            if (group / name).exists():  # a kernel without swap accounting lacks the second
                (group / name).write_text("0" if "swap.max" in name else str(size))
        for pid in pids:
            with suppress(ProcessLookupError):  # it ended by itself
                (group / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        raise ClusterError(f"{host}: cannot limit memory through {group}: {error}") from error


def lift(mark: str) -> None:
    """Remove the groups of a cluster whose processes have ended."""
    for group in (*_V1.glob(f"rc{mark}-*"), *_V2.glob(f"rc{mark}-*")):
        wait_until(partial(_removed, group), f"removing {group}")


def _removed(group: Path) -> bool:
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False  # the kernel still counts a process that has just ended
    return True


def _hierarchy() -> tuple[Path, tuple[str, ...]]:
    if _V1.is_dir():
        return _V1, ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
    controllers = _V2 / "cgroup.subtree_control"
    if controllers.exists() and "memory" in controllers.read_text().split():
        return _V2, ("memory.max", "memory.swap.max")
    raise ClusterError("this machine has no control groups for memory")
