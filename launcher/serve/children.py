"""The service's hands: ringctl itself as a process, for what takes long or must outlive the service."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import RingctlError
from launcher.serve.call import Refused
from launcher.serve.reserving import Reservation
from launcher.watching import WATCHER

MOST = threading.BoundedSemaphore(4)  # at once: each is a Python, and most open connections


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
        lines = [line for line in self.err.strip().splitlines() if line.strip()]
        start = next((i for i, line in enumerate(lines) if line.startswith("error: ")), 0)
        error = lines[start].removeprefix("error: ") if lines else f"it ended with code {self.code}"
        status = {2: 409, 4: 502}.get(self.code, 409)
        return Refused(status, error, " ".join(line.strip() for line in lines[start + 1 : start + 3]))


def ringctl(
    *args: str, seconds: float = 120.0, folder: Path | None = None, held: Reservation | None = None
) -> Done:
    """Run it to its end, in a session of its own: should we be killed, it goes on, and what is `held` with
    it."""
    if not MOST.acquire(timeout=30.0):
        raise Refused(429, "the service is busy with other requests", "try again in a moment")
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", WATCHER, "--no-input", *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            cwd=folder,
            pass_fds=[held.descriptor] if held and held.descriptor is not None else [],
        )
        with process:
            try:
                if held:
                    held.begun(process)
                out, err = process.communicate(timeout=seconds)
            except BaseException:
                process.kill()
                raise
    except subprocess.TimeoutExpired:
        raise RingctlError(f"ringctl {args[0]} took longer than {seconds:.0f} s and was ended") from None
    finally:
        MOST.release()
    return Done(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))
