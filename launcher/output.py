"""stdout and stderr while a run is followed. Whoever reads them may be slow, may have stopped to, or be gone:
that is no reason to act on Ctrl-C any later, or not at all."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

PIECE = select.PIPE_BUF  # so much goes at once into a pipe that has any room
LOOK_S = 0.1  # how often it is looked for Ctrl-C while there is none
UNREAD_S = 5.0  # after Ctrl-C, whoever takes nothing for so long is not waited for
GONE_S = 0.3  # Ctrl-C ends all of a pipeline, and that its reader is gone may be known before that it came
UNWRITTEN = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO)  # the last of a terminal that is gone
BROKEN = select.POLLERR | select.POLLHUP | select.POLLNVAL
UNSHOWN = "nobody reads this any more; Ctrl-C stops the run all the same, and the rest is not shown"


class Patient(io.BufferedWriter):
    """What is written to a stream of ours. Somebody may have made it so, for all who share it, that nobody
    waits there for room: here that is waited for. How much is written nobody but the buffer counts: where
    Ctrl-C comes in between, nothing is written twice."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(io.FileIO(stream.fileno(), "w", closefd=False))
        self._stream = stream  # which would close it otherwise

    def write(self, data: ReadableBuffer, /) -> int:
        rest = whole = memoryview(data).cast("B")
        while True:
            try:
                super().write(rest)
            except BlockingIOError as error:
                rest = rest[error.characters_written :]
                is_ready(self.fileno(), LOOK_S)
            else:
                return len(whole)

    def flush(self) -> None:
        while True:
            try:
                super().flush()
            except BlockingIOError:
                is_ready(self.fileno(), LOOK_S)
            else:
                return


def show_all() -> None:
    """From here on all that is written to stdout and stderr arrives there: also where they are unbuffered, so
    that a write may take only a part, and what their encoding lacks."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if descriptor_of(stream) is None:
            continue
        stream.flush()
        errors = "backslashreplace" if stream.errors == "strict" else stream.errors
        at_once = stream.line_buffering or stream.write_through
        text = io.TextIOWrapper(Patient(stream), stream.encoding, errors, line_buffering=at_once)
        setattr(sys, name, text)


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


class Interrupted:
    """Ctrl-C, as the KeyboardInterrupt that it is for everybody, but not in the middle of what is `held`: it
    comes after that, unless Ctrl-C is pressed again, or that is an `Output` at its writing, which writes the
    rest with whatever comes next."""

    def __init__(self) -> None:
        self.count = 0
        self.act: Callable[[], None] = self._interrupt
        self._holds = self._pending = False
        self._before: Any = None

    def __enter__(self) -> None:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else nobody is to hear of it
            self._before = signal.signal(signal.SIGINT, self)

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def __call__(self, *_: object) -> None:
        self.count += 1
        if self._holds and not self._pending:
            self._pending = True
            return
        self._pending = False
        raise KeyboardInterrupt

    def _interrupt(self) -> None:
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        self._holds = True
        try:
            yield
        finally:
            self._holds = False
        self._interrupt()


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
            if not (never_waits(stream) or is_ready(descriptor, LOOK_S)):
                waits_since = waits_since or time.monotonic()
                if self._has_waited(waits_since):
                    self._give_up()
                continue
            waits_since = None
            try:
                written = write_some(stream, rest[:PIECE])
            except BrokenPipeError:
                rest.clear()
                if not self._was_interrupted():
                    raise
                self._give_up()
                continue
            if written is None:  # somebody has made it so, for all who share it, that none waits for room
                time.sleep(LOOK_S)
            else:
                del rest[:written]

    def catch_up(self, meanwhile: Regardless | None) -> None:
        """What could not be written `meanwhile` is from here on as if it were so only now."""
        error = meanwhile.end() if meanwhile else None
        if error is not None and not self._was_interrupted():
            raise error
        if error is not None:
            self._give_up()
        for stream, held in meanwhile.take_held() if meanwhile else ():
            self._write(stream, held)

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


class Regardless:
    """From here to its `end`, nothing is kept from going on by whoever reads stdout or stderr, or by their
    disk: what would have to wait for a reader is held until then, and what cannot be written is dropped."""

    def __init__(self) -> None:
        self.lost: OSError | None = None  # why, the first time
        self._streams = contextlib.ExitStack()
        self._files: list[tuple[TextIO, Dropping]] = []

    def __enter__(self) -> Regardless:
        with contextlib.ExitStack() as failing:
            for stream, redirect in (
                (sys.stdout, contextlib.redirect_stdout),
                (sys.stderr, contextlib.redirect_stderr),
            ):
                descriptor = descriptor_of(stream)
                if descriptor is not None:
                    stream.flush()
                    file = Dropping(descriptor, self)
                    self._files.append((stream, file))
                    text = io.TextIOWrapper(
                        io.BufferedWriter(file), stream.encoding, stream.errors, line_buffering=True
                    )
                    failing.enter_context(redirect(text))
                    failing.callback(text.flush)
            self._streams = failing.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._streams.close()
        for stream, held in self.take_held():
            with contextlib.suppress(OSError):
                stream.buffer.write(held)
                stream.flush()

    def take_held(self) -> list[tuple[TextIO, bytes]]:
        """What nobody has taken yet, of which stream."""
        return [(stream, file.take_held()) for stream, file in self._files]

    def end(self) -> OSError | None:
        """Why something was dropped, which is for the caller to tell."""
        self._streams.close()
        return self.lost


class Dropping(io.FileIO):
    """One of our own descriptors: what it does not take at once is held, and all that comes later behind it;
    if it never takes any, all goes nowhere."""

    def __init__(self, descriptor: int, told: Regardless) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._told = told
        self._held = bytearray()

    def write(self, data: ReadableBuffer, /) -> int:
        piece = bytes(data)[:PIECE]
        try:
            written = super().write(piece) if not self._held and is_ready(self.fileno(), 0) else None
        except OSError as error:
            if error.errno not in UNWRITTEN:
                raise
            self._told.lost = self._told.lost or error
            drop(self.fileno())
            return len(piece)
        if written is None:
            self._held += piece
        return len(piece) if written is None else written

    def take_held(self) -> bytes:
        held, self._held = bytes(self._held), bytearray()
        return held


def never_waits(stream: TextIO) -> bool:
    return isinstance(getattr(stream.buffer, "raw", None), Dropping)


def write_some(stream: TextIO, data: bytes | bytearray) -> int | None:
    """How much its file takes at once, without Python's buffer; None while it would have to wait."""
    if never_waits(stream):
        taken: int = stream.buffer.raw.write(data)  # type: ignore[attr-defined]  # a BufferedWriter has it
        return taken
    try:
        return os.write(stream.fileno(), data)
    except BlockingIOError:
        return None


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
            drop(descriptor)


def drop(descriptor: int) -> None:
    """All that goes there goes nowhere from now on."""
    with contextlib.suppress(OSError):  # no descriptor to be had: then as it is
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
