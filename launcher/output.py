"""stdout and stderr while a run is followed. Whoever reads them may be slow, may have stopped to, or be gone:
that is no reason to act on Ctrl-C any later, or not at all."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable
from typing import Protocol, TextIO

PIECE = select.PIPE_BUF  # so much goes at once into a pipe that has any room
LOOK_S = 0.1  # how often it is looked for Ctrl-C while there is none
UNREAD_S = 5.0  # after Ctrl-C, whoever takes nothing for so long is not waited for
GONE_S = 0.3  # Ctrl-C ends all of a pipeline, and that its reader is gone may be known before that it came
BROKEN = select.POLLERR | select.POLLHUP | select.POLLNVAL
UNSHOWN = "nobody reads this any more; Ctrl-C stops the run all the same, and the rest is not shown"


class Counted(Protocol):
    """How often Ctrl-C was pressed, and what is to be done about it while something waits to be shown, which
    shows nothing itself."""

    count: int
    act: Callable[[], None]


class Count:
    """For who is interrupted by Ctrl-C as everybody is, and says so."""

    def __init__(self) -> None:
        self.count = 0
        self.act: Callable[[], None] = lambda: None


class Output:
    """Shows everything to whoever reads it at its pace. After Ctrl-C nobody who does not read is waited for:
    then all that comes goes nowhere. A reader who leaves without is a BrokenPipeError."""

    def __init__(self, interrupts: Counted | None = None) -> None:
        self.interrupts = interrupts or Count()
        self._seen, self._since = 0, 0.0  # how many Ctrl-Cs, and when the last of them came
        self._rest: dict[int, bytearray] = {}  # what is not yet written, should we be interrupted in between

    def write(self, data: bytes) -> None:
        self._write(sys.stdout, data)

    def note(self, words: str) -> None:
        """ringctl's own, on stderr."""
        self._write(sys.stderr, f"{words}\n".encode("utf-8", "backslashreplace"))

    def hint(self, words: str) -> None:
        """On stderr, unless that would have to wait for a reader."""
        if takes(sys.stderr):
            self.note(words)

    def _write(self, stream: TextIO, data: bytes) -> None:
        descriptor = descriptor_of(stream)
        if descriptor is None:
            stream.buffer.write(data)
            stream.flush()
            return
        stream.flush()
        rest = self._rest.setdefault(descriptor, bytearray())
        rest += data
        waits_since: float | None = None
        while rest:
            self._look()
            if not is_ready(descriptor, LOOK_S):
                waits_since = waits_since or time.monotonic()
                if self._has_waited(waits_since):
                    self._give_up()
                continue
            waits_since = None
            try:
                del rest[: os.write(descriptor, rest[:PIECE])]
            except BlockingIOError:  # somebody has made it so for all who share it
                time.sleep(LOOK_S)
            except BrokenPipeError:
                rest.clear()
                if not self._was_interrupted():
                    raise
                self._give_up()

    def _look(self) -> None:
        self.interrupts.act()
        if self.interrupts.count > self._seen:
            self._seen, self._since = self.interrupts.count, time.monotonic()

    def _has_waited(self, since: float) -> bool:
        """Long enough, for the one who pressed Ctrl-C; a third one is for not waiting at all."""
        return self._seen > 2 or (self._seen > 0 and time.monotonic() > max(since, self._since) + UNREAD_S)

    def _was_interrupted(self) -> bool:
        deadline = time.monotonic() + GONE_S
        while not self.interrupts.count and time.monotonic() < deadline:
            time.sleep(GONE_S / 10)
        return self.interrupts.count > 0

    def _give_up(self) -> None:
        drop_unread()
        self.hint(UNSHOWN)


def descriptor_of(stream: TextIO) -> int | None:
    """None for what is no file of the system's."""
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return None


def state_of(descriptor: int, seconds: float) -> int:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return next((state for _, state in poll.poll(seconds * 1000)), 0)


def is_ready(descriptor: int, seconds: float) -> bool:
    """Whether a write would not have to wait any more, within so many seconds: it may fail."""
    return state_of(descriptor, seconds) != 0


def takes(stream: TextIO) -> bool:
    """Whether it has a reader, and room."""
    descriptor = descriptor_of(stream)
    if descriptor is None:
        return True
    state = state_of(descriptor, 0)
    return bool(state) and not state & BROKEN


def drop_unread() -> None:
    """What goes to a reader who is gone, or does not read, goes nowhere from now on, whoever writes it; also
    what is still buffered, for which Python would wait in the end."""
    for stream in (sys.stdout, sys.stderr):
        descriptor = descriptor_of(stream)
        if descriptor is not None and not takes(stream):
            with contextlib.suppress(OSError):  # no descriptor to be had: then as it is
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
