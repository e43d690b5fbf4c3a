"""Processes of this host: which run, what tells them from later ones of the same number, and ending them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time

from launcher.hostprefork import PR_SET_CHILD_SUBREAPER, is_subreaper, prctl

TYPE_CHECKING = False  # a type checker takes it for true; importing `typing` at run time would cost a start
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any


ATTEMPT = re.compile(rb"\0RINGCTL_ATTEMPT=(\d+)\0")
OUTSIDE = 0  # the group of whoever came into a container from elsewhere; to `kill` it would mean our own


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as f:
        return f.read().strip()


def start_time(pid: int) -> int | None:
    """When the process was started, in clock ticks since boot; None if it is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            fields = f.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if has_died(pid, fields[0]) else int(fields[19])


def has_died(pid: int, state: bytes) -> bool:
    """Whether a process of this state has. It looks so, too, when only its first thread has ended."""
    return state in (b"Z", b"X") and len(threads(pid)) < 2


def threads(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def identity(pid: int) -> dict[str, Any]:
    """What tells this process from a later one with the same pid."""
    return {"pid": pid, "start": start_time(pid), "boot": boot_id()}


def alive(who: dict[str, Any] | None) -> bool:
    """Whether the process with this identity still runs."""
    if not who or who.get("boot") != boot_id() or who.get("start") is None:
        return False
    return start_time(int(who["pid"])) == int(who["start"])


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def descendants(root: int) -> list[int]:
    """All living processes below `root`, nearest first."""
    children: dict[int, list[int]] = {}
    for pid in all_pids():
        try:
            with open(f"/proc/{pid}/stat", "rb") as f:
                fields = f.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if not has_died(pid, fields[0]):
            children.setdefault(int(fields[1]), []).append(pid)
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(0), [])
        found += below
        queue += below
    return found


class Carriers:
    """All our processes whose environment carries the run's id, except those we come from; only those of
    attempts `upto` one, if it is given."""

    def __init__(self, run: str, upto: int | None = None) -> None:
        self._mark, self._upto = b"\0RINGCTL_RUN=" + run.encode() + b"\0", upto
        self._asking = lineage()
        self._missed = False

    def look(self) -> Iterator[int]:
        """The newest first, and each as soon as it is seen: one that forks and ends is gone in a moment."""
        self._missed = False
        for pid in sorted(all_pids(), reverse=True):
            environ = environ_of(pid)
            self._missed = self._missed or not (environ or os.path.exists(f"/proc/{pid}"))
            if self._mark in environ and pid not in self._asking and start_time(pid) is not None:
                number = ATTEMPT.search(environ)
                if self._upto is None or number is None or int(number.group(1)) <= self._upto:
                    yield pid

    def saw_all(self) -> bool:
        """Whether the last look, now at its end, came to none too late to tell whether it is one of them."""
        return not self._missed


def carriers(run: str) -> Iterator[int]:
    return Carriers(run).look()


def lineage() -> list[int]:
    """This process, its parent, and so on: somebody may ask in a shell that has a rank's environment."""
    found = [os.getpid()]
    while found[-1] > 1:
        try:
            with open(f"/proc/{found[-1]}/stat", "rb") as f:
                found.append(int(f.read().rpartition(b")")[2].split()[1]))
        except OSError:
            break
    return found


def environ_of(pid: int) -> bytes:
    """What a process was started with, each variable between two NULs; of any of its threads, for one that
    has ended has none."""
    try:
        return thread_environ(pid, str(pid)) or next(filter(None, thread_environs(pid)), b"")
    except PermissionError:  # somebody else's
        return b""


def thread_environs(pid: int) -> Iterator[bytes]:
    return (thread_environ(pid, thread) for thread in threads(pid))


def thread_environ(pid: int, thread: str) -> bytes:
    """ "" of one that has ended."""
    try:
        with open(f"/proc/{pid}/task/{thread}/environ", "rb") as f:
            environ = f.read()
    except PermissionError:
        raise
    except OSError:
        return b""
    return b"\0" + environ if environ else b""


def send(pid: int, number: int, group: bool = False) -> None:
    """Signal a process or its group; one that is gone already is fine."""
    try:
        if group:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def is_ours(pid: int) -> bool:
    """Whether the process is there and can be ended by us."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def reap() -> list[tuple[int, int]]:
    """(pid, wait status) of every child that has ended."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, status))


def kill_all(
    find: Callable[[], Iterator[int]],
    seconds: float,
    looks: int = 1,
    saw_all: Callable[[], bool] = lambda: True,
) -> list[int]:
    """KILL what `find()` comes upon, with groups of its own, until it finds nothing, `looks` times in a row:
    one may miss what has forked meanwhile, and those that have not even seen all do not count. Returns what
    is still there after `seconds`."""
    deadline, in_vain = time.monotonic() + seconds, 0
    while True:
        reap()
        pids = []
        for pid in find():
            if leads_its_group(pid):
                kill_with_group(pid)
            else:
                send(pid, signal.SIGKILL)
            pids.append(pid)
        in_vain = 0 if pids else in_vain + saw_all()
        if in_vain >= looks or time.monotonic() > deadline:
            return pids
        time.sleep(0.02)


def kill_below(seconds: float, pause: Callable[[float], None] = time.sleep) -> list[dict[str, Any]]:
    """KILL all below this process, a sub-reaper: whatever loses its parent becomes its child, so nothing is
    left when it has none, however quickly they fork. Returns what is still there after `seconds`, such as
    what has become another user's. `pause` is called several times a second."""
    deadline, look_at = time.monotonic() + seconds, 0.0
    before: list[int] = []
    while True:
        reap()
        if is_childless():
            return []
        now, found = time.monotonic(), children()
        if now > deadline:
            return [identity(pid) for pid in descendants(os.getpid()) or found or before]
        for pid in found:
            kill_with_group(pid)
        if now >= look_at:
            look_at = now + 0.1
            for pid in descendants(os.getpid()):
                send(pid, signal.SIGKILL)
            pause(0.0)
        if found == before:  # else they are about to get away: at once again
            pause(0.005)
        before = found


@contextlib.contextmanager
def leaving_nothing(seconds: float = 2.0) -> Iterator[None]:
    """Whatever is started meanwhile, and outlives its parents in a session of its own as an ssh-agent does,
    falls to this process, and is ended when that is over. Children that there were before are left alone."""
    before, was = children(), is_subreaper()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        end_fallen(before, seconds)
        prctl(PR_SET_CHILD_SUBREAPER, was)


def end_fallen(before: list[int], seconds: float) -> None:
    """End all children but those `before`, and what then falls to us in their place. An agent that is told
    takes its socket away; whoever does not listen is killed after a quarter of `seconds`, which are for all:
    what is left then, such as what has become another user's, is left."""
    began = time.monotonic()
    told: list[int] = []
    while True:
        fallen, took = [pid for pid in children() if pid not in before], time.monotonic() - began
        for pid in fallen:
            if took > seconds / 4:
                kill_with_group(pid)
            elif pid not in told:
                send(pid, signal.SIGTERM)
                told.append(pid)
            with contextlib.suppress(ChildProcessError):  # somebody else has reaped it
                os.waitpid(pid, os.WNOHANG)
        if not fallen or took > seconds:
            return
        time.sleep(0.002)


def is_childless() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        return True
    return False


def children() -> list[int]:
    """Those of this process, found in less time than one of them needs to fork and end."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", "rb") as f:
            return [int(pid) for pid in f.read().split()]
    except OSError:
        return []  # a kernel without it


def kill_with_group(child: int) -> None:
    """A group is ended at once: none of it can fork meanwhile. Its number is its own until we reap `child`;
    and whoever is in another group than we are is below us, or was."""
    try:
        group = os.getpgid(child)
    except OSError:
        return
    send(child, signal.SIGKILL)
    if group not in (OUTSIDE, os.getpgrp()):
        send(group, signal.SIGKILL, group=True)


def leads_its_group(pid: int) -> bool:
    """Whether the process is the first of its group; or the first has ended, which had a session of its own,
    as a rank has. Else it may be in one with processes that are nobody's business here."""
    try:
        group, session = os.getpgid(pid), os.getsid(pid)
    except OSError:
        return False
    return group == pid or (OUTSIDE != group == session and start_time(group) is None)


def session_of(pid: int) -> int | None:
    """The session of a process of ours; None if it is gone, or somebody else's."""
    try:
        return os.getsid(pid) if os.stat(f"/proc/{pid}").st_uid == os.getuid() else None
    except OSError:
        return None


def has_ended(child: int) -> bool:
    """Whether a child has, without reaping it: until then its number, and its group's, are nobody else's."""
    try:
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    except ChildProcessError:  # somebody else has reaped it
        return True


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for a signal that would kill it otherwise."""
    try:
        with open(f"/proc/{pid}/status") as f:
            caught = next((line for line in f if line.startswith("SigCgt:")), "SigCgt: 0")
    except OSError:
        return False
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def cpu_and_state(pid: int) -> tuple[int, str]:
    """Clock ticks of processor time that a process has used, and its state: R, S, D, T."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            fields = f.read().rpartition(b")")[2].split()
    except OSError:
        return 0, ""
    return int(fields[11]) + int(fields[12]), fields[0].decode()


def oom_kills() -> int:
    """How many processes the kernel has killed for want of memory: in our control group, else at all."""
    try:
        with open("/proc/self/cgroup") as f:
            groups = [line.rstrip("\n").split(":", 2) for line in f]
    except OSError:
        groups = []
    places = [f"/sys/fs/cgroup{path}/memory.events" for _, names, path in groups if not names]
    places += [
        f"/sys/fs/cgroup/memory{path}/memory.oom_control"
        for _, names, path in groups
        if "memory" in names.split(",")
    ]
    for place in places + ["/proc/vmstat"]:
        try:
            with open(place) as f:
                counts = dict(line.split()[:2] for line in f)
        except (OSError, ValueError):
            continue
        if "oom_kill" in counts:
            return int(counts["oom_kill"])
    return 0


def exit_code(status: int) -> int:
    """A wait status as Python's subprocess gives it: -9 for SIGKILL."""
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def signal_name(status: int) -> str | None:
    if not os.WIFSIGNALED(status):
        return None
    try:
        return signal.Signals(os.WTERMSIG(status)).name
    except ValueError:
        return f"SIG{os.WTERMSIG(status)}"  # a real-time one has no name of its own
