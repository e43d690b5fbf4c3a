"""What faults do to a host that the test cluster itself does not know."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.cluster.commands import wait_until
from tests.launcher.hosts import OURS, Hosts

SEGMENT = re.compile(r"^SEGMENT_BYTES = ", re.M)
# All hosts have the kernel's clock, so one whose own is set has programs of ours that add to it what a file
# says. Monotonic time goes on as it does.
SHIFTED = """
import time
if not hasattr(time, "kernel_time"):
    time.kernel_time = time.time
    def shifted():
        with open("{file}") as f:
            return time.kernel_time() + float(f.read())
    time.time = shifted
"""
CLOCK = "/etc/clock"
STARTED = ("hostd.py", "probe.py")  # what is started on hosts; the rest is imported by these


@contextlib.contextmanager
def longer(cluster: Hosts, host: str, more: Callable[[Path, str], str]) -> Iterator[None]:
    """Our programs on a host have `more` at their end for a while: only one that is shorter than it should be
    is found out."""
    (kit,) = cluster.path(host, f"{OURS}/kit").iterdir()
    before = {path: path.read_text() for path in kit.rglob("*.py")}
    added = {path: words for path, text in before.items() if (words := more(path, text))}
    assert added, "what was to be changed is not there"
    try:
        for path, words in added.items():
            path.write_text(before[path] + words)
        yield
    finally:
        for path in added:
            path.write_text(before[path])


@contextlib.contextmanager
def own_clock(cluster: Hosts, host: str) -> Iterator[Callable[[int], None]]:
    """A host whose clock can be set, by so many seconds."""
    place = cluster.path(host, CLOCK)

    def set_clock(seconds: int) -> None:
        new = place.with_suffix(".new")
        new.write_text(str(seconds))
        new.rename(place)

    def shifted(path: Path, _: str) -> str:
        return SHIFTED.format(file=CLOCK) if path.name in STARTED else ""

    set_clock(0)
    with longer(cluster, host, shifted):
        yield set_clock


def short_segments(cluster: Hosts, host: str, size: int) -> contextlib.AbstractContextManager[None]:
    """A host whose log goes on in another file after so many bytes."""
    words = f"\nSEGMENT_BYTES = {size}\n"
    return longer(cluster, host, lambda _, text: words if SEGMENT.search(text) else "")


# Kinds of steps in which files change, as strace names them, and how many of them there are at least in the
# seconds of a run.
STEPS = {"/^rename": 4, "/^f(data)?sync$": 4, "/^p?write": 100, "/^unlink": 1}


def killed_at(pid: int, step: str, count: int) -> subprocess.Popen[bytes]:
    """Have a process, by its number on this machine, killed as it is about to take its `count`-th step of
    this kind from now on; the returned process ends with it."""
    rule = [f"--trace={step}", f"--inject={step}:signal=KILL:when={count}"]
    command = ["strace", "-f", "-o", "/dev/null", *rule, "-p", str(pid)]
    tracer = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    wait_until(lambda: tracer.poll() is not None or is_traced(pid), "strace")
    return tracer


def is_traced(pid: int) -> bool:
    try:
        return "TracerPid:\t0\n" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True  # it is gone


def number_here(cluster: Hosts, host: str, pid: int) -> int:
    """On this machine, of a process that the host gives this number; 0 for one that is gone."""
    return next((process.pid for process in cluster.processes(host) if process.host_pid == pid), 0)


# The kernel gives the next process the number after this one, unless somebody is faster.
TAKE = """
for try in 1 2 3 4 5 6 7 8 9 10; do
    echo $(($0 - 1)) >/proc/sys/kernel/ns_last_pid || exit
    setpriv --reuid="$1" --regid="$1" --init-groups sleep 600 >/dev/null &
    if [ $! = $0 ]; then echo taken; wait; exit; fi
    kill $!
done
"""


@contextlib.contextmanager
def taken_number(cluster: Hosts, host: str, pid: int) -> Iterator[bool]:
    """Another process of the host's user has the number of one that has ended there; and whether that one is
    still there is told by `number_here`. False if the number could not be had."""
    taker = cluster.spawn(host, "sh", "-c", TAKE, str(pid), cluster.user, user="root")
    assert taker.stdout is not None
    try:
        yield taker.stdout.readline() == "taken\n"
    finally:
        with contextlib.suppress(ProcessLookupError):
            if number := number_here(cluster, host, pid):
                os.kill(number, signal.SIGKILL)
        taker.kill()
        taker.communicate()
