"""The code store of a host: one file, standard library only, Python 3.8 and up.

    ~/.ringctl/code/blobs/<sha256>   the content of files, each once
    ~/.ringctl/code/<digest>/        snapshots: folders of hard links to them, read-only, put in place whole

Every file is checked by its hash when it arrives, and then gets the time VERIFIED. Whatever writes to it
later changes that, so looking for damage takes no reading.

One JSON request in the first line of stdin; `receive` reads the compressed content of the missing files
behind it. The answer is on stdout after a line that reads SENTINEL.

    check    which contents of a snapshot are missing here
    receive  take those, verify each by its hash, put the snapshot in place, then collect
    collect  remove old snapshots that no run uses
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time

from launcher.hostdisk import read_json

TYPE_CHECKING = False  # a type checker takes it for true; importing `typing` at run time would cost a start
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

SENTINEL = b"--ringctl-hostd--\n"
VERIFIED = 1_000_000_000  # in 2001, before anything could have been written here
KEEP = 8  # snapshots that no run uses any more, the newest of them
CHUNK = 1 << 20
BEAT_S = 20.0
OVER_S = 3600.0  # what a push left half done is not touched for so long is nobody's
FINAL = ("succeeded", "failed", "stopped")


class Refused(Exception):
    """The request cannot be carried out; the message is for the user."""


def home_folder() -> str:
    return os.environ.get("RINGCTL_HOME") or os.path.expanduser("~/.ringctl")


def not_ours(path: str) -> str:
    """Why ringctl's folder may hold what somebody else wants there; "" if it is ours alone, or not there yet.
    It may have been told to be in a shared place."""
    try:
        link, place = os.lstat(path), os.stat(path)
    except OSError:
        return ""
    if place.st_uid != os.getuid():
        return f"{path} belongs to {owner(place.st_uid)}"
    if link.st_uid not in (os.getuid(), 0):
        return f"{path} is a link that {owner(link.st_uid)} has made"
    return f"{path} can be written to by others" if place.st_mode & 0o022 else ""


def owner(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def store(*parts: str) -> str:
    return os.path.join(home_folder(), "code", *parts)


def is_hex(text: str) -> bool:
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


def is_inside(path: str) -> bool:
    """Whether a relative path stays in the tree."""
    return bool(path) and not path.startswith("/") and ".." not in path.split("/") and "\0" not in path


def is_whole(folder: str, entries: list[dict[str, Any]]) -> bool:
    """Whether the snapshot is there with every file as it was put there."""
    return os.path.isdir(folder) and all(is_intact(folder, entry) for entry in entries)


def is_intact(folder: str, entry: dict[str, Any]) -> bool:
    path = os.path.join(folder, entry["path"])
    try:
        if entry["kind"] == "link":
            return bool(os.readlink(path) == entry["content"])
        return is_verified(path, entry["size"]) and os.access(path, os.X_OK) == bool(entry["executable"])
    except OSError:
        return False


def is_verified(path: str, size: int) -> bool:
    """Whether nobody has written to a file since its hash was checked."""
    try:
        about = os.lstat(path)
    except OSError:
        return False
    return about.st_size == size and about.st_mtime == VERIFIED


def command_check(request: dict[str, Any]) -> dict[str, Any]:
    """{"have": true}, or the contents that are missing."""
    if not is_hex(request["digest"]):
        raise Refused("not a digest")
    if is_whole(store(request["digest"]), request["entries"]):
        os.utime(store(request["digest"]))
        return {"have": True, "missing": []}
    return {"have": False, "missing": missing(request["entries"])}


def missing(entries: list[dict[str, Any]]) -> list[str]:
    """Contents that are not here, or damaged."""
    wanted = {entry["content"]: entry["size"] for entry in entries if entry["kind"] == "file"}
    if not all(map(is_hex, wanted)):
        raise Refused("not a hash")
    return sorted(c for c, size in wanted.items() if not is_verified(store("blobs", c), size))


def command_receive(request: dict[str, Any]) -> dict[str, Any]:
    """Take the contents that follow the request, then build the snapshot; says again what is missing if
    something that was here has been collected meanwhile."""
    os.makedirs(store("blobs"), exist_ok=True)
    stream = Inflate(sys.stdin.buffer)
    for content, size in request["blobs"]:
        take_blob(stream, content, size)
    lacking = missing(request["entries"])
    if not lacking:
        build(request["digest"], request["entries"])
        command_collect({"keep": [request["digest"]]})
    return {"have": not lacking, "missing": lacking}


class Inflate:
    """Reads a chain of zlib streams as one."""

    def __init__(self, source: Any) -> None:
        import zlib  # what only a push needs is imported there: every launch asks `check`

        self.zlib: Any = zlib
        self.source, self.inflater = source, zlib.decompressobj()
        self.ready, self.taken = b"", 0

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; b"" at the end."""
        while self.taken >= len(self.ready):
            data = self.inflater.unconsumed_tail or self.inflater.unused_data or self.source.read1(CHUNK)
            if not data:
                return b""
            if self.inflater.eof:
                self.inflater = self.zlib.decompressobj()
            try:
                self.ready, self.taken = self.inflater.decompress(data, CHUNK), 0
            except self.zlib.error as error:
                raise Refused(f"the push was garbled on the way: {error}") from None
        data = self.ready[self.taken : self.taken + size]
        self.taken += len(data)
        return data


def take_blob(stream: Inflate, content: str, size: int) -> None:
    """One file's content, checked against its name before it gets it. Until then it has none at all where
    the file system allows that: whoever is killed in the middle leaves nothing."""
    if not is_hex(content):
        raise Refused("not a hash")
    fd = open_nameless(store("blobs"))
    if fd is None:
        take_named(stream, content, size)
        return
    with os.fdopen(fd, "w+b") as f:
        receive_into(f, stream, content, size)
        f.flush()
        settle(fd, 0o444)
        if not link_nameless(fd, store("blobs", content), size):
            f.seek(0)
            take_named(f, content, size)


def take_named(stream: Any, content: str, size: int) -> None:
    """The same by a name of its own, which may replace a damaged one, and is collected if we are killed."""
    import tempfile

    fd, temporary = tempfile.mkstemp(dir=store("blobs"), prefix="tmp-")
    try:
        with os.fdopen(fd, "wb") as f:
            receive_into(f, stream, content, size)
        settle(temporary, 0o444)
        os.rename(temporary, store("blobs", content))
    except BaseException:
        os.unlink(temporary)
        raise


def receive_into(f: Any, stream: Any, content: str, size: int) -> None:
    import hashlib

    digest, left = hashlib.sha256(), size
    while left:
        data = stream.read(min(left, CHUNK))
        if not data:
            raise Refused("the push broke off in the middle")
        digest.update(data)
        f.write(data)
        left -= len(data)
    if digest.hexdigest() != content:
        raise Refused("a file changed while it was pushed; push again")


def open_nameless(folder: str) -> int | None:
    """A file on the folder's disk that goes with whoever has it open; None if it could not be had, or not be
    given a name later. Whatever else is wrong, the next try with a name tells."""
    if not os.path.isdir("/proc/self/fd"):
        return None
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:  # NFS, an old kernel
        return None


def link_nameless(fd: int, path: str, size: int) -> bool:
    """Give it its name; whether it is there whole now, which it is, too, if somebody else was faster."""
    try:
        # With a dir_fd, which counts for nothing here: only then does Python follow the link in /proc.
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)
    except FileExistsError:
        return is_verified(path, size)
    except OSError:  # a file system that has files without a name, and no links
        return False
    return True


def build(digest: str, entries: list[dict[str, Any]]) -> None:
    """Hard links beside the snapshot's place, then one rename."""
    if not is_hex(digest):
        raise Refused("not a digest")
    import tempfile

    beside = tempfile.mkdtemp(dir=store(), prefix="tmp-")
    try:
        for entry in entries:
            place(beside, entry)
        if is_whole(store(digest), entries):
            return  # somebody else was faster, and may have begun to use it
        if os.path.lexists(store(digest)):  # damaged
            os.rename(store(digest), beside + "-old")
        os.rename(beside, store(digest))
    except OSError as error:
        if not is_whole(store(digest), entries):
            raise Refused(f"cannot put the code in place: {error.strerror}") from None
    finally:
        remove(beside)
        remove(beside + "-old")


def place(folder: str, entry: dict[str, Any]) -> None:
    path = os.path.join(folder, entry["path"])
    if not is_inside(entry["path"]):
        raise Refused(f"a path that leaves the tree: {entry['path']!r}")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if entry["kind"] == "link":
        os.symlink(entry["content"], path)
        return
    blob = store("blobs", entry["content"])
    if not entry["executable"]:
        try:
            os.link(blob, path)
            return
        except OSError:
            pass  # a file system without hard links, or too many of this one
    import shutil

    shutil.copyfile(blob, path)
    settle(path, 0o555 if entry["executable"] else 0o444)


def settle(path: str | int, mode: int) -> None:
    os.chmod(path, mode)
    os.utime(path, (VERIFIED, VERIFIED))


def remove(folder: str) -> None:
    if os.path.isdir(folder):
        import shutil

        shutil.rmtree(folder, ignore_errors=True)


def command_collect(request: dict[str, Any]) -> dict[str, Any]:
    """Remove snapshots beyond the newest few, contents that no snapshot has, and what broken pushes left;
    never what a run uses."""
    used = used_by_runs() | set(request.get("keep") or [])
    names = os.listdir(store()) if os.path.isdir(store()) else []
    free = [name for name in names if is_hex(name) and name not in used]
    old = sorted(free, key=lambda name: os.stat(store(name)).st_mtime, reverse=True)[KEEP:]
    for name in old + [name for name in names if name.startswith("tmp-") and is_over(store(name))]:
        remove(store(name))
    return {"snapshots": len(old), "contents": collect_blobs()}


def collect_blobs() -> int:
    """Remove contents that no snapshot links to, unless they have just come: their snapshot is being made.
    Where a snapshot holds a copy, its content may come again."""
    removed = 0
    for name in os.listdir(store("blobs")) if os.path.isdir(store("blobs")) else []:
        path = store("blobs", name)
        if os.lstat(path).st_nlink == 1 and is_over(path):
            os.unlink(path)
            removed += 1
    return removed


def is_over(path: str) -> bool:
    """Whether nobody has changed it for so long that nobody is about to."""
    return time.time() - os.lstat(path).st_ctime > OVER_S


def used_by_runs() -> set[str]:
    """Snapshots of runs that go on, or could: the built-in trainer has no copy of its own to restart from."""
    from launcher.hostruns import state_in

    used, folder = set(), os.path.join(home_folder(), "runs")
    for run in os.listdir(folder) if os.path.isdir(folder) else []:
        try:
            plan = read_json(os.path.join(folder, run, "plan.json"))
            state = state_in(os.path.join(folder, run))
        except OSError:
            continue
        if plan is None or state is None:
            continue
        done = FINAL if plan.get("code") else ("succeeded",)
        if state.get("state") not in done and plan.get("snapshot"):
            used.add(str(plan["snapshot"]))
    return used


@contextlib.contextmanager
def speaking() -> Iterator[None]:
    """Meanwhile a space goes out now and then, before the answer. Who only listens does not learn that the
    other end has gone without a word, as after an outage; so TCP gives up on it, and our stdin ends. A
    controller that is suspended still has its kernel take them, and a slow one all the time that it needs."""
    before = signal.signal(signal.SIGALRM, lambda *_: os.write(1, b" "))
    signal.setitimer(signal.ITIMER_REAL, BEAT_S, BEAT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def answer_to(command: str) -> dict[str, Any]:
    commands = {"check": command_check, "receive": command_receive, "collect": command_collect}
    try:
        with speaking():
            request = json.loads(sys.stdin.buffer.readline() or b"{}")
            problem = not_ours(home_folder())
            if problem:
                raise Refused(problem)
            return commands[command](request)
    except Refused as error:
        return {"kind": "error", "error": str(error)}
    except OSError as error:
        return {"kind": "error", "error": f"{error.filename or 'code store'}: {error.strerror}"}


def main() -> int:
    os.umask(0o077)
    answer = answer_to(sys.argv[1])
    sys.stdout.buffer.write(SENTINEL + json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
