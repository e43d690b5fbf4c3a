"""How ranks get on: when each last did, and where it is when it does not."""

from __future__ import annotations

import os
import re
import signal
import time

from launcher.hostdisk import open_plain, read_plain
from launcher.hostprefork import INSIST_SIGNAL, STACK_SIGNAL, stack_file
from launcher.hostproc import alive, catches, cpu_and_state, send
from launcher.hostruns import read_state

TYPE_CHECKING = False  # a type checker takes it for true; importing `typing` at run time would cost a start
if TYPE_CHECKING:
    from typing import Any

    from launcher.hostevents import EventLog
    from launcher.hostranks import Rank

WATCHDOG_S = 30.0  # ranks that made no progress for so long, and for ten of their usual steps, are looked at
USUAL_STEPS = 10
UNTOLD_TIMES = 6  # ranks whose steps are not known may stand still this much longer if a host is silent
STACK_S = 0.5  # a rank writes its stack within this; if it has not in half of it, it is asked the other way
MOST_FRAMES = 40
THREADS = ("Current thread", "Thread", "Stack")  # a dump of each begins with one of these
THREAD_END = "(most recent call first):"
STACK_FRAME = re.compile(r'^  File "(.*)", line ([0-9]{1,9}) in (.*)$')


class Progress:
    """When a rank last got on, by its steps if it tells them, else by what it prints."""

    def __init__(self, patience: str) -> None:
        self.least = float(patience or WATCHDOG_S)
        self.at = time.monotonic()
        self.usual = 0.0  # seconds between two signs of progress, over the last few
        self.signs = 0
        self.excused = False  # for a time since then
        self.untold = False  # steps since then may be lost on a disk that could not be written
        self.step: object = None

    def made(self) -> None:
        now = time.monotonic()
        new = 0.2 if self.signs > 1 else 1.0  # how long it took to begin says nothing once there is more
        if not self.untold:
            self.usual = (1.0 - new) * self.usual + new * (now - self.at)
        self.at, self.excused, self.untold = now, False, False
        self.signs += 1

    def printed(self) -> None:
        if self.step is None:
            self.made()

    def stepped(self, record: dict[str, Any]) -> bool:
        """Whether this metrics record tells of another step than the one before."""
        step = record.get("step")
        if step is None or step == self.step:
            return False
        self.step = step
        self.made()
        return True

    def slept(self, seconds: float, now: float) -> None:
        """Nobody could look for so long, and so nobody knows whether it got on. That counts once until it
        does."""
        if seconds and not self.excused:
            self.at, self.excused = min(self.at + seconds, now), True

    def stood(self, lease: float, silence: float) -> bool:
        """Whether there was none for as long as the lease, and for ten usual steps. Where no steps are told,
        nobody knows: printed lines may mean nothing, so another host's silence has to be a long one. Where
        they may be lost, the time without one has to be."""
        if self.step is None:
            return silence > UNTOLD_TIMES * lease
        least = UNTOLD_TIMES * lease if self.untold else lease
        return time.monotonic() - self.at > max(least, USUAL_STEPS * self.usual)

    def lacks(self, times: float) -> bool:
        """Whether there was none for `times` as long as one waits for it; never if that is 0 or less."""
        patience = max(self.least, USUAL_STEPS * self.usual)
        return self.least > 0 and time.monotonic() - self.at > times * patience


def main_stack(dump: str) -> list[tuple[str, int, str]]:
    """(file, line, function) of the main thread in a dump of faulthandler's, innermost first. A rank may have
    written anything there: what is no dump has no frames."""
    threads: list[tuple[bool, list[tuple[str, int, str]]]] = []
    for line in dump.splitlines():
        frame = STACK_FRAME.match(line)
        if line.startswith(THREADS) and line.endswith(THREAD_END):
            threads.append((not line.startswith("Thread"), []))
        elif frame and threads:
            threads[-1][1].append((frame.group(1), int(frame.group(2)), frame.group(3)))
    threads = [(is_current, frames) for is_current, frames in threads if not is_ours(frames)]
    # A thread of ours writes the main one's, or the main one does; else it is the oldest.
    current = [frames for is_current, frames in threads if is_current and frames]
    return (current or [frames for _, frames in threads] or [[]])[-1][:MOST_FRAMES]


def is_ours(frames: list[tuple[str, int, str]]) -> bool:
    """Whether these are the frames of the trainer's thread that writes stacks, when somebody else started
    it."""
    return any(name == "write_stacks" for _, _, name in frames)


def source_line(path: str, number: int) -> str:
    """A line of a file that a rank has named: "" if there is none."""
    try:
        lines = read_plain(path).decode(errors="replace").split("\n")
    except (OSError, ValueError):
        return ""
    return lines[number - 1].strip()[:160] if 0 < number <= len(lines) else ""


def empty_stack(path: str) -> bool:
    """Whether there is a file that a rank writes its stack to, which has nothing in it now. What somebody has
    put there in its place is left as it is."""
    try:
        fd = open_plain(path, os.O_WRONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        os.ftruncate(fd, 0)
    finally:
        os.close(fd)
    return True


def said_nothing(path: str) -> bool:
    """Whether there is such a file, still empty."""
    try:
        return not read_plain(path)
    except OSError:
        return False


class Stacks:
    """Where the ranks of this host are, as events of the run."""

    def __init__(self, log: EventLog) -> None:
        self.log = log
        self.wanted = False
        self.due: float | None = None  # when what the ranks wrote is read
        self.again: float | None = None  # when those that wrote nothing are asked once more
        self.looks = 0  # how often the ranks were looked at since they last got on

    def on_look(self, *_: object) -> None:
        self.wanted = True

    def watch(self, ranks: list[Rank], clock: float, look: bool) -> None:
        """Note where the ranks are when somebody asks, and if it is to `look`, when one of them has not got
        on for long: then again after four times as long, and so on."""
        running = [rank for rank in ranks if rank.pid and rank.status is None]
        if self.due is not None:
            if self.again is not None and clock >= self.again:
                self.again = None
                self.insist(running)
            if clock >= self.due:
                self.due = None
                self.note(running)
        elif self.wanted:
            self.wanted = False
            self.ask(running, clock)
        elif look and any(rank.progress.lacks(4**self.looks) for rank in running):
            self.looks += 1
            self.ask(running, clock)

    def ask(self, ranks: list[Rank], clock: float) -> None:
        """The signal to those that write their stack then, and to nobody whom it would kill."""
        self.due, self.again = clock + STACK_S, clock + STACK_S / 2
        for rank in ranks:
            rank.ticks = cpu_and_state(rank.pid)[0]
            path = stack_file(rank.metrics.path)
            if catches(rank.pid, STACK_SIGNAL) and empty_stack(path):
                send(rank.pid, STACK_SIGNAL)

    def insist(self, ranks: list[Rank]) -> None:
        """The other signal to ranks whose interpreter is locked, which the main thread answers without it."""
        for rank in ranks:
            silent = rank.ticks >= 0 and said_nothing(stack_file(rank.metrics.path))
            if silent and catches(rank.pid, INSIST_SIGNAL):
                send(rank.pid, INSIST_SIGNAL)

    def note(self, ranks: list[Rank]) -> None:
        """Write down what they wrote, and whether they were using the processor."""
        for rank in ranks:
            if rank.ticks < 0:
                continue
            ticks, state = cpu_and_state(rank.pid)
            try:
                dump = read_plain(stack_file(rank.metrics.path))
                stack = main_stack(dump.decode(errors="replace"))
            except OSError:
                stack = []
            frames = [[path, line, name, source_line(path, line)] for path, line, name in stack]
            busy = (ticks - rank.ticks) / os.sysconf("SC_CLK_TCK") > 0.2 * STACK_S
            rank.ticks = -1
            self.log.event("stack", rank=rank.number, frames=frames, state=state, busy=busy)


def command_stacks(request: dict[str, Any]) -> dict[str, Any]:
    """Have the supervisor look where its ranks are; says whether it is there to do so."""
    state = read_state(str(request["run"]))
    here = state is not None and state["state"] == "running" and alive(state["hostd"])
    if here and state is not None and catches(int(state["hostd"]["pid"]), signal.SIGUSR1):
        send(int(state["hostd"]["pid"]), signal.SIGUSR1)
        return {"known": True, "asked": True}
    return {"known": state is not None, "asked": False}
