"""The code store of a host: one file, standard library only, Python 3.8 and up.

    ~/.ringctl/code/blobs/<sha256>   the content of files, each once
    ~/.ringctl/code/<digest>/        snapshots: folders of hard links to them, read-only, put in place whole

One JSON request in the first line of stdin; `receive` reads the compressed content of the missing files
behind it. The answer is on stdout after a line that reads SENTINEL.

    check    which contents of a snapshot are missing here
    receive  take those, verify each by its hash, and put the snapshot in place
    collect  remove old snapshots that no run uses
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import zlib

TYPE_CHECKING = False  # a type checker takes it for true; importing `typing` at run time would cost a start
if TYPE_CHECKING:
    from typing import Any

SENTINEL = b"--ringctl-hostd--\n"
KEEP = 8  # snapshots that no run uses any more, the newest of them
CHUNK = 1 << 20
FINAL = ("succeeded", "failed", "stopped")


class Refused(Exception):
    """The request cannot be carried out; the message is for the user."""


def home_folder() -> str:
    return os.environ.get("RINGCTL_HOME") or os.path.expanduser("~/.ringctl")


def store(*parts: str) -> str:
    return os.path.join(home_folder(), "code", *parts)


def is_hex(text: str) -> bool:
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


def is_inside(path: str) -> bool:
    """Whether a relative path stays in the tree."""
    return bool(path) and not path.startswith("/") and ".." not in path.split("/") and "\0" not in path


def is_whole(folder: str, entries: list[dict[str, Any]]) -> bool:
    """Whether the snapshot is there with every file in its full length."""
    for entry in entries:
        path = os.path.join(folder, entry["path"])
        try:
            if entry["kind"] == "link":
                if os.readlink(path) != entry["content"]:
                    return False
            elif os.lstat(path).st_size != entry["size"]:
                return False
        except OSError:
            return False
    return os.path.isdir(folder)


def command_check(request: dict[str, Any]) -> dict[str, Any]:
    """{"have": true}, or the contents that are missing."""
    if not is_hex(request["digest"]):
        raise Refused("not a digest")
    if is_whole(store(request["digest"]), request["entries"]):
        os.utime(store(request["digest"]))
        return {"have": True, "missing": []}
    wanted = {entry["content"] for entry in request["entries"] if entry["kind"] == "file"}
    return {"have": False, "missing": sorted(c for c in wanted if not os.path.isfile(store("blobs", c)))}


def command_receive(request: dict[str, Any]) -> dict[str, Any]:
    """Take the contents that follow the request, then build the snapshot."""
    os.makedirs(store("blobs"), mode=0o700, exist_ok=True)
    stream = Inflate(sys.stdin.buffer)
    for content, size in request["blobs"]:
        take_blob(stream, content, size)
    build(request["digest"], request["entries"])
    return {"have": True, "missing": []}


class Inflate:
    """Reads a compressed stream."""

    def __init__(self, source: Any) -> None:
        self.source, self.inflater, self.ready = source, zlib.decompressobj(), b""

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; b"" at the end."""
        while not self.ready:
            data = self.inflater.unconsumed_tail or self.source.read1(CHUNK)
            if not data:
                return b""
            self.ready = self.inflater.decompress(data, CHUNK)
        data, self.ready = self.ready[:size], self.ready[size:]
        return data


def take_blob(stream: Inflate, content: str, size: int) -> None:
    """One file's content, checked against its name before it gets it."""
    if not is_hex(content):
        raise Refused("not a hash")
    digest, left = hashlib.sha256(), size
    fd, temporary = tempfile.mkstemp(dir=store("blobs"), prefix="tmp-")
    try:
        with os.fdopen(fd, "wb") as f:
            while left:
                data = stream.read(min(left, CHUNK))
                if not data:
                    raise Refused("the push broke off in the middle")
                digest.update(data)
                f.write(data)
                left -= len(data)
        if digest.hexdigest() != content:
            raise Refused("a file changed while it was pushed; push again")
        os.chmod(temporary, 0o444)
        os.rename(temporary, store("blobs", content))
    except BaseException:
        os.unlink(temporary)
        raise


def build(digest: str, entries: list[dict[str, Any]]) -> None:
    """Hard links beside the snapshot's place, then one rename."""
    if not is_hex(digest):
        raise Refused("not a digest")
    beside = tempfile.mkdtemp(dir=store(), prefix="tmp-")
    try:
        for entry in entries:
            place(beside, entry)
        if os.path.exists(store(digest)):  # damaged, or built by someone else in the meantime
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
    elif entry["executable"]:
        shutil.copyfile(store("blobs", entry["content"]), path)
        os.chmod(path, 0o555)
    else:
        os.link(store("blobs", entry["content"]), path)


def remove(folder: str) -> None:
    if os.path.isdir(folder):
        shutil.rmtree(folder, ignore_errors=True)


def command_collect(request: dict[str, Any]) -> dict[str, Any]:
    """Remove snapshots beyond the newest few, and contents that no snapshot has; never what a run uses."""
    used = used_by_runs() | set(request.get("keep") or [])
    snapshots = [name for name in os.listdir(store()) if is_hex(name)] if os.path.isdir(store()) else []
    old = sorted(
        (n for n in snapshots if n not in used), key=lambda n: os.stat(store(n)).st_mtime, reverse=True
    )
    for name in old[KEEP:]:
        remove(store(name))
    removed = 0
    if old[KEEP:]:
        kept = {os.path.basename(path) for path in contents_of_snapshots()}
        for blob in os.listdir(store("blobs")):
            if is_hex(blob) and os.stat(store("blobs", blob)).st_nlink == 1 and blob not in kept:
                os.unlink(store("blobs", blob))
                removed += 1
    return {"snapshots": len(old[KEEP:]), "contents": removed}


def contents_of_snapshots() -> list[str]:
    """Contents of executable files: snapshots hold those as copies, which link counts do not show."""
    found = []
    for name in os.listdir(store()):
        if is_hex(name):
            for folder, _, files in os.walk(store(name)):
                paths = [os.path.join(folder, file) for file in files]
                found += [sha256(p) for p in paths if not os.path.islink(p) and os.access(p, os.X_OK)]
    return found


def sha256(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        for data in iter(lambda: f.read(CHUNK), b""):
            digest.update(data)
    return digest.hexdigest()


def used_by_runs() -> set[str]:
    """Snapshots of runs that have not ended."""
    used, folder = set(), os.path.join(home_folder(), "runs")
    for run in os.listdir(folder) if os.path.isdir(folder) else []:
        try:
            with open(os.path.join(folder, run, "plan.json"), "rb") as f:
                plan = json.loads(f.read())
            with open(os.path.join(folder, run, "state.json"), "rb") as f:
                state = json.loads(f.read())
        except (OSError, ValueError):
            continue
        if state.get("state") not in FINAL and plan.get("code"):
            used.add(plan["code"])
    return used


def main() -> int:
    commands = {"check": command_check, "receive": command_receive, "collect": command_collect}
    request = json.loads(sys.stdin.buffer.readline() or b"{}")
    sys.stdout.buffer.write(SENTINEL)
    try:
        answer = commands[sys.argv[1]](request)
    except Refused as error:
        answer = {"kind": "error", "error": str(error)}
    except OSError as error:
        answer = {"kind": "error", "error": f"{error.filename or 'code store'}: {error.strerror}"}
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
