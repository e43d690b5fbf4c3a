"""This machine, without SSH."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import IO

from launcher import kit
from launcher.errors import HostError
from launcher.hostproc import all_pids, has_ended, send, session_of, start_time
from launcher.model import Host
from launcher.transport import MOST_OUTPUT, Channel, Completed, TimedOut, too_much

READ_BYTES = 1 << 20
LEAVE_S = 10.0  # what is told to end has so long to see to what it has begun


class LocalTransport:
    """Commands as child processes in sessions of their own, so that Ctrl-C reaches only ringctl."""

    def __init__(self, host: Host) -> None:
        self.host = host

    def program(self, source: str) -> list[str]:
        return [sys.executable, "-I", "-S", "-c", kit.RUN, kit.HERE, kit.module(source)]

    def install(self) -> None:
        raise HostError(
            self.host.name, f"ringctl's own files are missing from {kit.PACKAGE}", fix="install it again"
        )

    def run(
        self, argv: Sequence[str], stdin: bytes | None, timeout: float, most: int = MOST_OUTPUT
    ) -> Completed:
        if stdin is not None:
            return self._finish(self._start(argv), stdin, timeout, most)
        theirs, ours = os.pipe()
        with os.fdopen(ours, "wb") as waiting:
            try:
                process = self._start(argv, theirs)
            finally:
                os.close(theirs)
            return self._finish(process, None, timeout, most, waiting)

    def _finish(
        self,
        process: subprocess.Popen[bytes],
        stdin: bytes | None,
        timeout: float,
        most: int,
        waiting: IO[bytes] | None = None,
    ) -> Completed:
        out, err, deadline = bytearray(), bytearray(), time.monotonic() + timeout
        try:
            if not exchange(process, stdin or b"", deadline, out, err, most):
                raise too_much(self.host.name, most)
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            abandon(process, waiting)
            raise TimedOut(self.host.name, timeout, bytes(out), bytes(err)) from None
        except BaseException:
            abandon(process, waiting)
            raise
        close_pipes(process)
        return Completed(process.returncode, bytes(out), bytes(err))

    def stream(self, argv: Sequence[str], stdin: bytes, more: bool = False) -> Channel:
        channel = LocalChannel(self.host.name, self._start(argv))
        with contextlib.suppress(HostError):  # it ended without reading all of it; what it said tells why
            channel.send(stdin)
        if not more:
            channel.end_input()
        return channel

    def address(self) -> str:
        return ""

    def host_key(self) -> None:
        return None

    def close(self) -> None:
        pass

    def _start(self, argv: Sequence[str], stdin: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        return subprocess.Popen(argv, stdin=stdin, stdout=pipe, stderr=pipe, start_new_session=True)


def exchange(
    process: subprocess.Popen[bytes],
    stdin: bytes,
    deadline: float,
    out: bytearray,
    err: bytearray,
    most: int,
) -> bool:
    """Write all of `stdin`, and hear all that is said; False if that is more than `most`."""
    assert process.stdout is not None
    assert process.stderr is not None
    left = memoryview(stdin)
    with selectors.DefaultSelector() as waiting:
        waiting.register(process.stdout, selectors.EVENT_READ, out)
        waiting.register(process.stderr, selectors.EVENT_READ, err)
        if process.stdin is not None:
            waiting.register(process.stdin, selectors.EVENT_WRITE)
        speaking = 2
        while speaking:
            ready = waiting.select(max(0.0, deadline - time.monotonic()))
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(process.args, 0.0)
            for key, _ in ready:
                if key.data is None:
                    left = left[written(key.fd, left) :]
                    ended = not left
                else:
                    data = os.read(key.fd, READ_BYTES)
                    key.data.extend(data)
                    ended, speaking = not data, speaking - (not data)
                if ended:
                    waiting.unregister(key.fileobj)
                if ended and process.stdin is not None and key.data is None:
                    process.stdin.close()  # which tells it that this was all
            if len(out) + len(err) > most:
                return False
    return True


def written(fd: int, data: memoryview) -> int:
    """How much of it a pipe has taken that has room; all, if nobody reads it any more."""
    try:
        return os.write(fd, data[: select.PIPE_BUF]) if data else 0
    except BrokenPipeError:
        return len(data)


def abandon(process: subprocess.Popen[bytes], waiting: IO[bytes] | None = None) -> None:
    """End it and whatever it started in its session. One that has begun something in another is told first,
    to see to that; by the end of its stdin, if it is one that can tell by that when nobody is `waiting`."""
    if process.returncode is None and waiting is not None and not has_ended(process.pid):
        waiting.close()
        wait_until(lambda: is_empty(process.pid))  # whoever does not want to leaves it to end by itself
        send(process.pid, signal.SIGKILL, group=True)
        process.wait()
    elif process.returncode is None:
        send(process.pid, signal.SIGTERM)
        try:
            wait_until(lambda: has_ended(process.pid))
        finally:  # also for whoever does not want to wait
            send(process.pid, signal.SIGKILL, group=True)
            process.wait()
    close_pipes(process)


def wait_until(is_over: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LEAVE_S
    while not is_over() and time.monotonic() < deadline:
        time.sleep(0.005)


def is_empty(session: int) -> bool:
    """Whether nobody of ours in it lives."""
    return not any(session_of(pid) == session and start_time(pid) is not None for pid in all_pids())


def close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class LocalChannel:
    """A child process."""

    began = True

    def __init__(self, host: str, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self.host, self.process = host, process
        self.fd = process.stdout.fileno()
        with contextlib.suppress(OSError):  # the usual size does as well, only slower
            fcntl.fcntl(self.fd, fcntl.F_SETPIPE_SZ, READ_BYTES)

    def read(self, timeout: float) -> bytes | None:
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        if not poll.poll(timeout * 1000):
            return None
        return os.read(self.fd, READ_BYTES)

    def send(self, data: bytes) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(data)
            self.process.stdin.flush()
        except BrokenPipeError:
            raise HostError(self.host, "the command ended before it had read all") from None

    def end_input(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def errors(self) -> bytes:
        assert self.process.stderr is not None
        ready, _, _ = select.select([self.process.stderr], [], [], 0)
        return os.read(self.process.stderr.fileno(), READ_BYTES) if ready else b""

    def close(self) -> None:
        abandon(self.process)
