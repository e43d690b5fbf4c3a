"""Code that travels to a service: a tar becomes a folder that is known by its content, or nothing at all."""

from __future__ import annotations

import contextlib
import errno
import gzip
import os
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import BinaryIO

from launcher import history, push
from launcher.errors import InputError, NotKept

MOST_BYTES = 1 << 30  # unpacked
MOST_FILES = 20_000  # and as many folders
MOST_DEPTH = 64
MOST_PATH = 1024  # characters
PIECE = 1 << 20
COMING = ".coming-"  # what a snapshot is called until all of it is here
UP = ".removed-"  # and its folders, while it goes


def store() -> Path:
    return history.home() / "serve" / "code"


def folder_of(digest: str) -> Path:
    return store() / digest


def has(digest: str) -> bool:
    return folder_of(digest).is_dir()


def remove(digest: str) -> None:
    remove_tree(folder_of(digest))


def remove_tree(root: Path) -> None:
    """All that can be removed of it, however deep it is: each folder is brought up before it is looked into,
    so that neither a path nor a stack grows."""
    folders, count, mine = [root], 0, os.urandom(8).hex()
    while folders:
        folder = folders.pop()
        with contextlib.suppress(OSError):
            for entry in list(os.scandir(folder)):
                with contextlib.suppress(OSError):
                    if not entry.is_dir(follow_symlinks=False):
                        os.unlink(entry.path)
                    elif folder == root:
                        folders.append(Path(entry.path))
                    else:
                        count += 1
                        up = root / f"{UP}{mine}-{count}"
                        os.rename(entry.path, up)
                        folders.append(up)
        with contextlib.suppress(OSError):
            folder.rmdir()
    with contextlib.suppress(OSError):
        root.rmdir()


def receive(digest: str, packed: BinaryIO) -> None:
    """Unpack a tar, and keep it if it is what its digest says."""
    place = new_folder()
    try:
        names = unpack(packed, place)
        if push.snapshot_of(place, names).digest != digest:
            raise InputError(
                "the files are not those of this digest; nothing was kept",
                fix="did one change while it was sent? hand the run in again, or name it in .ringignore",
            )
        try:
            os.rename(place, folder_of(digest))
        except OSError:
            if not has(digest):  # else somebody else was as fast
                raise
    except (tarfile.TarError, EOFError, OSError, ValueError, RecursionError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise not_kept(error) from None
        words = getattr(error, "strerror", None) or str(error)  # not where that is on this machine
        raise InputError(f"the tar cannot be unpacked: {words[:200]}") from None
    finally:
        remove_tree(place)


def new_folder() -> Path:
    history.make_folder(store())
    try:
        return Path(tempfile.mkdtemp(prefix=COMING, dir=store()))
    except OSError as error:
        raise not_kept(error) from None


def not_kept(error: OSError) -> NotKept:
    """The disk here is full, or can only be read: it is not the tar that is wrong."""
    return NotKept(f"{store()}: cannot be written: {error.strerror}")


def unpack(packed: BinaryIO, place: Path) -> list[str]:
    """Only files and links that stay inside; the names of all of them."""
    names: set[str] = set()
    folders: set[str] = set()
    size = 0
    with tarfile.open(fileobj=Careful(packed), mode="r:") as tar:  # type: ignore[call-overload]  # reads, seeks
        for count, member in enumerate(tar, start=1):  # folders as well: a small file may hold millions
            if count > MOST_FILES:
                raise InputError(f"more than {MOST_FILES:,} files and folders")
            name = checked_name(member.name)
            if member.isdir():
                continue
            if name in names or not (member.isreg() or member.issym()):
                raise InputError(f"{name[:200]}: neither a file nor a link, or there twice")
            names.add(name)
            size += member.size
            if size > MOST_BYTES:
                raise InputError(f"more than {MOST_BYTES >> 20:,} MB")
            target = inside(place, name, folders)
            if member.issym():
                make_link(name, member.linkname, target)
            else:
                source = tar.extractfile(member)
                assert source is not None  # it is a file
                with open(target, "xb") as file:
                    shutil.copyfileobj(source, file, PIECE)
                os.chmod(target, 0o700 if member.mode & 0o100 else 0o600)
    return sorted(names)


class Careful:
    """A file that may be packed, read in small pieces only: a header that says it is huge does not fill our
    memory."""

    def __init__(self, file: BinaryIO) -> None:
        magic = file.read(2)
        file.seek(0)
        self._file: BinaryIO = gzip.GzipFile(fileobj=file) if magic == b"\x1f\x8b" else file  # type: ignore[assignment]  # enough of one
        self.seek, self.tell = self._file.seek, self._file.tell

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= 4 * PIECE:
            raise ValueError("a header that is too long")
        return self._file.read(size)


def checked_name(name: str) -> str:
    name = name.removeprefix("./").rstrip("/")
    parts = name.split("/")
    if name in ("", "."):
        return "."
    if name.startswith("/") or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise InputError(f"{name[:200]!r}: a path that leaves the folder")
    if len(parts) > MOST_DEPTH or len(name) > MOST_PATH:
        raise InputError(f"{name[:200]!r}: deeper than {MOST_DEPTH} folders, or longer than {MOST_PATH:,}")
    return name


def inside(place: Path, name: str, folders: set[str]) -> Path:
    """Where a file goes, its folders made, which are among `folders` then; never through a link that came
    before it."""
    parts = name.split("/")
    for end in range(1, len(parts)):
        folder = "/".join(parts[:end])
        if (place / folder).is_symlink():
            raise InputError(f"{name[:200]}: a path through a link")
        if folder not in folders:
            folders.add(folder)
            if len(folders) > MOST_FILES:
                raise InputError(f"more than {MOST_FILES:,} folders")
            (place / folder).mkdir(mode=0o700)
    return place / name


def make_link(name: str, target: str, path: Path) -> None:
    """One that stays inside as it is written; what it leads to is looked at once all is there."""
    end = os.path.normpath(os.path.join(os.path.dirname(name), target))
    if not target or os.path.isabs(target) or end == ".." or end.startswith("../"):
        raise InputError(f"{name[:200]}: a link that leaves the folder")
    os.symlink(target, path)


def snapshot(root: Path) -> push.Snapshot:
    """Of a folder that was unpacked here: everything in it belongs to it, whatever it is called."""
    found = []
    for parent, folders, files in os.walk(root):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        found += [os.path.relpath(os.path.join(parent, name), root) for name in files + links]
    return push.snapshot_of(root, sorted(found))


def copy(digest: str, target: Path) -> None:
    """For one run: what it writes there is not what others get."""
    shutil.copytree(folder_of(digest), target, symlinks=True)


def packed(of: push.Snapshot, file: BinaryIO) -> None:
    """The files of a snapshot as a tar, for a service somewhere else."""
    with tarfile.open(fileobj=file, mode="w:gz", compresslevel=1) as tar:
        for entry in of.entries:
            info = tarfile.TarInfo(entry.path)
            if entry.kind == "link":
                info.type, info.linkname = tarfile.SYMTYPE, entry.content
                tar.addfile(info)
                continue
            path = Path(of.root, entry.path)
            info.size, info.mode = path.stat().st_size, 0o755 if entry.executable else 0o644
            with open(path, "rb") as content:
                tar.addfile(info, content)
