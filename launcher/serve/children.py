"""The service's hands: ringctl itself as a process, for what takes long or must outlive the service."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from launcher.cli_runs import stopped_line
from launcher.errors import RingctlError
from launcher.serve.call import Refused
from launcher.serve.reserving import Reservation
from launcher.watching import WATCHER

LOOKING = ("checkpoints", "preflight")  # what changes nothing
LEAVE_S = 60.0  # whoever is told to leave off has so long for it
# At once: each is a Python, and most open connections. Hosts may be silent, so none has the others' places:
# those that look, those that users wait for, and those by which the keeper ends runs that were cancelled.
LOOKS, CHANGES, ENDS = (threading.BoundedSemaphore(most) for most in (4, 12, 4))


@dataclass(frozen=True)
class Done:
    """How one ended."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """What it printed with --json; Refused with its complaint if it did not get that far."""
        try:
            return json.loads(self.out.strip().splitlines()[-1])
        except (ValueError, IndexError):
            raise self.refusal() from None

    def refusal(self) -> Refused:
        """Its complaint; with --json, that of each host, and what came of it on the others."""
        lines = self._of_hosts() or [line for line in self.err.strip().splitlines() if line.strip()]
        start = next((i for i, line in enumerate(lines) if line.startswith("error: ")), 0)
        error = lines[start].removeprefix("error: ") if lines else f"it ended with code {self.code}"
        status = {2: 400, 4: 502}.get(self.code, 409)
        return Refused(status, error, " ".join(line.strip() for line in lines[start + 1 : start + 3]))

    def _of_hosts(self) -> list[str]:
        """What `stop --json` tells of hosts that did not do it: in a sentence, then what to do."""
        try:
            told = json.loads(self.out.strip().splitlines()[-1])
            said = [str(words).partition("\n") for words in told["errors"].values()]
            done = [stopped_line(host, answer) for host, answer in told["hosts"].items()]
        except (ValueError, LookupError, TypeError, AttributeError):
            return []
        fixes = dict.fromkeys(" ".join(fix.split()) for _, _, fix in said if fix.strip())
        return ["; ".join(error for error, _, _ in said), "; ".join((*fixes, *done))] if said else []


def ringctl(
    *args: str,
    seconds: float = 120.0,
    folder: Path | None = None,
    held: Reservation | None = None,
    hands: threading.BoundedSemaphore = CHANGES,
) -> Done:
    """Run it to its end, in a session of its own: should we be killed, it goes on, and what is `held` with
    it. Whoever wants to see what somebody else is just being shown gets the same."""
    if args[0] not in LOOKING:
        return alone(hands, args, seconds, folder, held)
    key, mine = (seconds, folder, *args), Future[Done]()
    theirs = under_way.setdefault(key, mine)
    if theirs is not mine:
        return theirs.result()
    try:
        mine.set_result(alone(LOOKS, args, seconds, folder))
    except BaseException as error:
        mine.set_exception(error)
    finally:
        under_way.pop(key, None)
    return mine.result()


under_way: dict[tuple[object, ...], Future[Done]] = {}  # looks, each with those who wait for it


def alone(
    hands: threading.BoundedSemaphore,
    args: Sequence[str],
    seconds: float,
    folder: Path | None,
    held: Reservation | None = None,
) -> Done:
    if not hands.acquire(timeout=30.0):
        raise Refused(429, "the service is busy with other requests", "try again in a moment")
    try:
        with (
            outlets(args[0]) as files,
            subprocess.Popen(
                [sys.executable, "-c", WATCHER, "--no-input", *args],
                stdin=subprocess.DEVNULL,
                stdout=files[0] if files else subprocess.PIPE,
                stderr=files[1] if files else subprocess.PIPE,
                start_new_session=True,
                cwd=folder,
                pass_fds=[held.descriptor] if held and held.descriptor is not None else [],
            ) as process,
        ):
            return waited_for(process, args[0], seconds, held, files)
    finally:
        hands.release()


@contextlib.contextmanager
def outlets(what: str) -> Iterator[Sequence[BinaryIO]]:
    """What changes something writes into files, which are there also if we are not any more, and have room on
    a full disk, too. What only looks is to end with whoever reads its pipes: none for that."""
    if what in LOOKING:
        yield ()
        return
    with os.fdopen(os.memfd_create("out"), "rb") as out, os.fdopen(os.memfd_create("err"), "rb") as err:
        yield out, err


def waited_for(
    process: subprocess.Popen[bytes],
    what: str,
    seconds: float,
    held: Reservation | None = None,
    files: Sequence[BinaryIO] = (),
) -> Done:
    if what in LOOKING:
        looks.add(process)
    try:
        if held:
            held.begun(process)
        printed = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        if what not in LOOKING:
            interrupt(process)
        raise RingctlError(f"ringctl {what} took longer than {seconds:.0f} s and was ended") from None
    finally:
        looks.discard(process)
        if process.returncode is None:
            process.kill()
    if files:
        printed = content(files[0]), content(files[1])
    out, err = (data.decode(errors="replace") for data in printed)
    return Done(process.returncode, out, err)


def content(file: BinaryIO) -> bytes:
    """All of it; where it is at is shared with whoever wrote it."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C does: what it has begun it ends."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=LEAVE_S)


looks: set[subprocess.Popen[bytes]] = set()


def end_looks() -> None:
    """Nobody waits for what they would show any more. Whatever changes something comes to its end."""
    for process in list(looks):
        process.kill()
