"""A run's own copy of its code on this host."""

from __future__ import annotations

import os
import stat

from launcher.hostanswer import Refused
from launcher.hostruns import home_folder

WORK = "work"  # in a run's folder: its copy of the code
HALF = ".half"  # while it is made


def copy_code(digest: str, target: str) -> None:
    """A run's own copy of a snapshot: what it writes there stays with the run, and the snapshot as it was.
    It is there whole or not at all: the next attempt takes it as it is."""
    import shutil

    if not digest:
        os.mkdir(target, 0o700)
        return
    source, half = os.path.join(home_folder(), "code", digest), target + HALF
    if not os.path.isdir(source):
        raise Refused("the code of this run is not on this host; push it again")
    remove_half(os.path.dirname(target))  # that of a start which was killed
    try:
        shutil.copytree(source, half, symlinks=True)
        make_writable(half)
        os.rename(half, target)
    except BaseException as error:  # also that it is stopped
        shutil.rmtree(half, ignore_errors=True)
        if isinstance(error, OSError):
            raise Refused(f"the run's code cannot be copied: {why_not_copied(error)}") from None
        raise


def remove_half(folder: str) -> None:
    """What a copy that was cut short has left in a run's folder: all of it, or of a file."""
    import shutil

    half = os.path.join(folder, WORK + HALF)
    try:
        os.unlink(half)
    except OSError:  # there is none, or it is a folder, or it cannot be removed
        shutil.rmtree(half, ignore_errors=True)


def make_writable(folder: str) -> None:
    for place, _, files in os.walk(folder):
        os.chmod(place, 0o700)
        for path in [os.path.join(place, name) for name in files]:
            if not os.path.islink(path):
                os.chmod(path, os.stat(path).st_mode | 0o200)


def why_not_copied(error: OSError) -> str:
    """In a word: copytree goes on after a failure, and then lists all of them."""
    failures = error.args[0] if error.args and isinstance(error.args[0], list) else []
    return str(failures[0][-1]) if failures else error.strerror or str(error)


def mend_copy(digest: str, target: str) -> None:
    """Files of the run's copy that a power cut has shortened: nobody has changed them since they were copied,
    and yet they have another size."""
    import shutil

    source, half = os.path.join(home_folder(), "code", digest), target + HALF
    for place, _, files in os.walk(source):
        for name in files:
            first = os.path.join(place, name)
            copy = os.path.join(target, os.path.relpath(first, source))
            if os.path.isfile(copy) and is_shortened(os.lstat(first), os.lstat(copy)):
                shutil.copy2(first, half)
                os.chmod(half, os.stat(first).st_mode | 0o200)
                os.replace(half, copy)  # at once: cut short it would not be noticed another time


def is_shortened(first: os.stat_result, copy: os.stat_result) -> bool:
    plain = stat.S_ISREG(first.st_mode) and stat.S_ISREG(copy.st_mode)
    return plain and copy.st_size < first.st_size and copy.st_mtime_ns == first.st_mtime_ns
