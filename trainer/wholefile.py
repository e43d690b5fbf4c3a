"""A file that is all there or not at all, whoever is killed and whenever. Nothing here imports torch.

Until it is whole it has no name, so that what was begun of it goes with its process. Where that is not
possible, as on NFS, it has a temporary name, which the next who writes the file removes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: Path, temporary: Path) -> Iterator[BinaryIO]:
    """A file to write, which behind the block is on the disk in the place of what was there; if anything
    fails, that stays. `temporary` is a name in the same folder that nobody else has."""
    _remove(temporary)  # first: what was left there takes room
    try:
        file, is_named = _begun(temporary)
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if is_named or not _link(file, path):
                if not is_named and not _link(file, temporary):
                    _copy(file, temporary)
                os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException as error:
        _remove(temporary)
        if isinstance(error, OSError):  # not all of them know the file
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def write(path: Path, temporary: Path, raw: bytes) -> None:
    with replacing(path, temporary) as file:
        file.write(raw)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _begun(temporary: Path) -> tuple[BinaryIO, bool]:
    """A new file, and whether it has that name: none where the file system has files without one."""
    try:
        descriptor = os.open(temporary.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666)
    except OSError:  # if it is for another reason, the next line tells
        return temporary.open("wb"), True
    return os.fdopen(descriptor, "w+b"), False


def _link(file: BinaryIO, name: Path) -> bool:
    """Whether a file without a name has this one now: not if another has it, nor where there is no /proc or
    a link is not allowed."""
    descriptor = file.fileno()
    try:
        # Only where it is told a folder, which nobody looks at here, does Python follow the link in /proc.
        os.link(f"/proc/self/fd/{descriptor}", name, src_dir_fd=descriptor)
    except OSError:
        return False
    os.fsync(descriptor)  # once more: of a file without a name btrfs brings no size to the disk
    return True


def _copy(file: BinaryIO, place: Path) -> None:
    file.seek(0)
    with place.open("wb") as copy:
        shutil.copyfileobj(file, copy)
        copy.flush()
        os.fsync(copy.fileno())


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
