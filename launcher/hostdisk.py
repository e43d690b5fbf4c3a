"""Files that are whole whatever happens: replaced at once, and with room kept for the end on a full disk."""

from __future__ import annotations

import errno
import json
import os
import stat
import time

from launcher.hostproc import start_time

TYPE_CHECKING = False  # a type checker takes it for true; importing `typing` at run time would cost a start
if TYPE_CHECKING:
    from typing import Any

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
NO_FOLDER = (errno.ENOENT, errno.ENOTDIR)  # somebody has removed a run's folder: there is nothing to wait for
ROOM_BYTES = 1 << 20  # kept free on the disk while ranks run, for how they ended
WORD_BYTES = 1 << 10  # and, as long as the run is known, for that it is to end
ROOM = ".room"
READ_BYTES = 1 << 20  # at a time, of a file or a pipe
LOCK_S = 5.0  # whoever holds a lock of a run writes a small file; who holds it for longer has been stopped


def replace_file(path: str, data: bytes, durable: bool = True) -> None:
    """Put `data` at `path` so that a reader, or a crash, sees the old content or the new, never a part."""
    if durable:
        remove_leftovers(*os.path.split(path))
    temporary = f"{path}.tmp{os.getpid()}"
    fd = open_own(temporary, os.O_WRONLY | os.O_TRUNC)
    try:
        try:
            write_all(fd, data)
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except BaseException:  # also that we are told to end
        remove_file(temporary)
        raise
    if durable:
        sync_folder(os.path.dirname(path))


def remove_leftovers(folder: str, *names: str) -> None:
    """What others who were to replace one of these files have left beside it when they were killed."""
    for other in os.listdir(folder):
        head, _, pid = other.rpartition(".tmp")
        if head in names and pid.isdigit() and start_time(int(pid)) is None:
            remove_file(os.path.join(folder, other))


def remove_file(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def keep_room(folder: str) -> None:
    """Room on the disk for how the run ends, should the disk be full by then."""
    fd = open_own(room_file(folder), os.O_WRONLY)
    try:
        os.posix_fallocate(fd, 0, ROOM_BYTES)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise  # a file system that can keep nothing free is not told from one that did
    finally:
        os.close(fd)


def keep_room_for_word(path: str) -> None:
    """For what is to be at `path` one day, as little as it is: whoever writes it then must be able to."""
    fd = open_own(path + ROOM, os.O_WRONLY)
    try:
        write_all(fd, b" " * WORD_BYTES)
    finally:
        os.close(fd)


def replace_in_room(path: str, data: bytes) -> None:
    """The same as replace_file where the disk is full, once, if room was kept for it."""
    fd = open_plain(path + ROOM, os.O_WRONLY)
    try:
        write_all(fd, data.ljust(WORD_BYTES))
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(path + ROOM, path)
    sync_folder(os.path.dirname(path))


def room_file(folder: str) -> str:
    return os.path.join(folder, "room")


def sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class NotPlain(OSError):
    """What is there is no plain file."""


def open_plain(path: str, flags: int = os.O_RDONLY) -> int:
    """A file where ranks may have put anything under its name: what is no plain file, such as a FIFO, which
    it would wait at, is an OSError."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise NotPlain(errno.EINVAL, "it is no plain file", path)


def open_own(path: str, flags: int) -> int:
    """A file of the supervisor's, which is made if it is not there. What a rank has put in its place goes."""
    try:
        return open_plain(path, flags | os.O_CREAT | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENXIO, errno.ELOOP):
            raise
    remove_file(path)
    return open_plain(path, flags | os.O_CREAT | os.O_EXCL)


def lock_file(path: str, seconds: float) -> int:
    """The descriptor of a locked file. Whoever has it for so long is not waited for: an OSError."""
    import fcntl

    lock, deadline = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.02)
                continue
            os.close(lock)
            raise OSError(errno.EAGAIN, "somebody holds its lock", path) from None
        except BaseException:
            os.close(lock)
            raise
        return lock


def read_plain(path: str, offset: int = 0) -> bytes:
    """What such a file has from there on, up to READ_BYTES."""
    fd = open_plain(path)
    try:
        return os.pread(fd, READ_BYTES, offset)
    finally:
        os.close(fd)


def read_json(path: str) -> dict[str, Any] | None:
    """The file's object, or None if there is none to be read."""
    try:
        with os.fdopen(open_plain(path), "rb") as f:
            value = json.loads(f.read())
    except (FileNotFoundError, NotADirectoryError, NotPlain, ValueError, RecursionError):
        return None  # ValueError: cut short when the machine lost power
    return value if isinstance(value, dict) else None
