"""A file that is replaced whole: who reads it finds what was there or what came, also after a crash."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

OPEN_ALREADY = ("/dev/fd/", "/dev/stdout", "/dev/stderr", "/proc/")


def replace_whole(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Put `data` there, at once and for good. Raises OSError with the file as it was."""
    remove_leftovers(path)
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC  # not what somebody else has put there
    descriptor = os.open(temporary, flags, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.chmod(temporary, mode)
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_folder(path.parent)


@contextlib.contextmanager
def new_whole(path: Path) -> Iterator[IO[str]]:
    """A new file, for text of ASCII, that has its name once it is whole. Raises FileExistsError if there is
    one, also one that came meanwhile, and OSError; then nothing is left."""
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    remove_leftovers(path)
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            yield file
            file.flush()
            os.fsync(descriptor)
        name_it(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    sync_folder(path.parent)


def name_it(temporary: Path, path: Path) -> None:
    """Never in place of another, but where the file system knows no second names (FAT)."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:
        os.replace(temporary, path)


def write_where_named(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Where somebody wants it: a file is replaced whole, also one that a link leads to, and keeps its mode;
    what is no file (a device, a pipe), or is open already (/dev/fd/1), is written to."""
    try:
        there = os.stat(path).st_mode
    except FileNotFoundError:
        replace_whole(Path(os.path.realpath(path)), data, mode)
        return
    if stat.S_ISREG(there) and not os.path.abspath(path).startswith(OPEN_ALREADY):
        replace_whole(Path(os.path.realpath(path)), data, stat.S_IMODE(there))
    else:
        with open(path, "ab", buffering=0) as file:
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) or 0 :]


def sync_folder(path: Path) -> None:
    """So that a new name in it is there after a power cut, too."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(path: Path) -> None:
    """What others who were to replace this file have left beside it when they were killed."""
    for name in os.listdir(path.parent):
        head, _, pid = name.rpartition(".tmp")
        if head == path.name and pid.isdigit() and is_gone(int(pid)):
            with contextlib.suppress(OSError):
                os.unlink(path.with_name(name))


def is_gone(pid: int) -> bool:
    """Whether nobody has that number; what is written under our own is from somebody who had it before."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        return False
    return pid == os.getpid()
