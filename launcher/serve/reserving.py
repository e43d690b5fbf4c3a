"""The slots of runs that are being started again, for as long as whoever does that lives.

A restart is a process of its own, and goes on when the service is killed. So its slots are in a file that it
holds the lock of, as a launch does: whoever comes after a killed service sees whether it still is at work.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from launcher import filelock, history
from launcher.errors import RingctlError
from launcher.schedule import Taken


def folder() -> Path:
    return history.home() / "serve" / "restarts"


class Reservation:
    """One run's. Only the keeper, of which there is one, makes and removes the file."""

    def __init__(self, taken: Taken, descriptor: int | None = None, pid: int = 0) -> None:
        self.taken, self.pid = taken, pid
        self.descriptor = descriptor  # None: of a service that was here before
        self._process: subprocess.Popen[bytes] | None = None

    def begun(self, process: subprocess.Popen[bytes]) -> None:
        """It is at work; somebody may come after us who has to interrupt it."""
        self._process = process
        if self.descriptor is not None:
            with contextlib.suppress(OSError):  # a full disk: then it is waited for
                os.write(self.descriptor, str(process.pid).encode())

    def interrupt(self) -> bool:
        """As Ctrl-C: it ends by itself what it has started. Whether there was anybody to tell."""
        with contextlib.suppress(ProcessLookupError):
            if self._process is not None:
                self._process.send_signal(signal.SIGINT)
                return True
            if self.pid and is_held(self.taken.run):  # so the number is its own
                os.kill(self.pid, signal.SIGINT)
                return True
        return False

    def let_go(self) -> None:
        """We do not need it any more; whoever we have started may."""
        if self.descriptor is not None:
            os.close(self.descriptor)
        self.descriptor = None


def reserve(taken: Taken, rooms: Mapping[str, int]) -> Reservation:
    """Written down, and the lock ours. `rooms`: how many slots hosts have that are in the run's inventory."""
    about = {"slots": dict(taken.slots), "shared": taken.shared, "user": taken.user, "rooms": dict(rooms)}
    history.make_folder(history.home() / "serve")
    history.make_folder(folder())
    path = folder() / taken.run
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise RingctlError(f"{path}: cannot be made: {error.strerror}") from None
    try:
        if not filelock.lock_soon(descriptor):
            raise BlockingIOError(0, "somebody else holds its lock")
        os.write(descriptor, json.dumps(about).encode() + b"\n")
    except OSError as error:
        os.close(descriptor)
        raise RingctlError(f"{path}: cannot be written: {error.strerror}") from None
    return Reservation(taken, descriptor)


def is_held(run: str) -> bool:
    """Whether somebody is starting it again."""
    return filelock.is_held(folder() / run)


def rooms(run: str) -> dict[str, int]:
    """For whoever starts it again: on which hosts it has to find its slots free, and among how many."""
    with contextlib.suppress(OSError, ValueError, LookupError):
        about, _, _ = (folder() / run).read_text().partition("\n")
        return dict(json.loads(about)["rooms"]) if is_held(run) else {}
    return {}


def remove(run: str) -> None:
    with contextlib.suppress(OSError):  # a read-only disk: nobody holds it
        (folder() / run).unlink(missing_ok=True)


def left() -> Iterator[Reservation]:
    """Those of restarts that a service before us has begun, and that are still at work."""
    for path in sorted(folder().glob("*")):
        if not is_held(path.name):
            remove(path.name)
            continue
        with contextlib.suppress(OSError, ValueError, LookupError):
            about, _, pid = path.read_text().partition("\n")
            said = json.loads(about)
            taken = Taken(path.name, said["slots"], said["shared"], said["user"])
            yield Reservation(taken, pid=int(pid or 0))
