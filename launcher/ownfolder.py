"""ringctl's folder on this machine, before anything in it is believed or written: it must be ours alone.

Where it is told to be in a shared place, somebody else may have made it, or may have put a link there. What
is brought here from hosts, into whichever folder, is ours alone too.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

from launcher.errors import InputError

OTHER = "let RINGCTL_HOME name a folder of your own"


def check() -> None:
    """Raise InputError if there is no such folder to be had, or if it is not ours."""
    from launcher import history

    try:
        home = history.home()
    except RuntimeError:  # how pathlib says that neither $HOME nor the system's list of users knows one
        raise InputError(
            "you have no home folder", fix="set HOME or RINGCTL_HOME to a folder of yours"
        ) from None
    refuse_foreign(home)


def refuse_foreign(path: Path) -> None:
    """Nothing is said of a folder that is not there yet: it will be made, for us alone."""
    try:
        link, place = path.lstat(), path.stat()
    except OSError:
        return
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (os.geteuid(), 0):
        raise InputError(f"{path}: a link that {owner(link.st_uid)} has made", fix=OTHER)
    if place.st_uid != os.geteuid():
        raise InputError(f"{path}: belongs to {owner(place.st_uid)}", fix=OTHER)
    if stat.S_ISDIR(place.st_mode) and place.st_mode & 0o022:
        mode = f"{stat.S_IMODE(place.st_mode):04o}"
        fix = f"look at what is in it, then: chmod 700 {shlex.quote(str(path))}"
        raise InputError(f"{path}: others may write to it (mode {mode})", fix=fix)


def owner(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


@contextlib.contextmanager
def closed_to_others() -> Iterator[None]:
    """Files and folders that are made meanwhile are; what is there already keeps its mode."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
