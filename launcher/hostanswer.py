"""How a host-side program answers whoever asked it.

The answer is on stdout after a line that reads SENTINEL, so that whatever a login shell prints before it
does no harm.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
import time

from launcher.hostdisk import write_all

TYPE_CHECKING = False  # a type checker takes it for true; importing `typing` at run time would cost a start
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

SENTINEL = b"--ringctl-hostd--\n"


class Refused(Exception):
    """The request cannot be carried out; the message is for the user."""


@contextlib.contextmanager
def leaving_when_told() -> Iterator[None]:
    """SIGTERM ends us meanwhile as an exit of our own would: what was begun is ended, what is half made
    goes."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def note(kind: str, **data: object) -> None:
    line = json.dumps(dict({"kind": kind, "time": time.time()}, **data), separators=(",", ":"))
    write_all(1, line.encode() + b"\n")


def answered(
    call: Callable[[dict[str, Any]], dict[str, Any] | None], command: str, request: dict[str, Any]
) -> int:
    """The exit code of having answered it."""
    write_all(1, SENTINEL)
    try:
        answer = call(request)
    except Refused as error:
        note("error", error=str(error))
        return 1
    except BrokenPipeError:
        return 0
    except OSError as error:
        note("error", error=f"{error.filename or command}: {os.strerror(error.errno or errno.EIO)}")
        return 1
    if answer is not None:
        write_all(1, json.dumps(answer).encode() + b"\n")
    return 0
