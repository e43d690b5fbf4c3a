"""Locks of files, which go with whoever holds them, also when that is killed."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

LOOK_S = 0.5  # nobody who only looks has a lock for longer


def is_held(path: Path) -> bool:
    """Whether somebody holds the lock of that file. Others may look at the same time."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def try_lock(descriptor: int) -> bool:
    """Whether it is ours now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_soon(descriptor: int) -> bool:
    """The same, where somebody may just be looking whether it is held."""
    deadline = time.monotonic() + LOOK_S
    while not try_lock(descriptor):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
