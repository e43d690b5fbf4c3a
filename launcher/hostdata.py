"""Puts MNIST's files in place on a host: one file, standard library only, Python 3.8 and up.

One JSON request in the first line of stdin (`folder`, and `files`: name, SHA-256 and size of each); behind it
their contents, one after the other, compressed. The answer is on stdout after a line that reads SENTINEL.

Each file gets its name once its hash is right. What is whole already stays: if it is the same it is not
needed, and if it is not, it is somebody's.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import zlib

from launcher import hoststore
from launcher.preflight import hostfacts

TYPE_CHECKING = False  # a type checker takes it for true; importing `typing` at run time would cost a start
if TYPE_CHECKING:
    from typing import Any

CHUNK = 1 << 20


def target_folder(root: str) -> str:
    """Where ranks will look first: the files that are there already, else as torchvision has it."""
    place, suffix = hostfacts.idx_place(root)
    return str(place) if place and not suffix else os.path.join(root, "MNIST", "raw")


def sha256_of(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        for block in iter(lambda: f.read(CHUNK), b""):
            digest.update(block)
    return digest.hexdigest()


def is_there(path: str, digest: str) -> bool:
    """Whether it is the wanted file; refuses where it is another one that is whole."""
    if not os.path.lexists(path):
        return False
    if os.path.isdir(path):
        raise hoststore.Refused(f"{path} is a folder; move it away")
    if os.path.isfile(path) and sha256_of(path) == digest:
        return True
    if not hostfacts.idx_file(path, "").startswith("!"):
        raise hoststore.Refused(f"{path} is whole but not the same as here; it is left as it is")
    return False


def receive(stream: Any, folder: str, digest: str, size: int) -> str:
    """One file under a temporary name, verified."""
    found, left = hashlib.sha256(), size
    fd, temporary = tempfile.mkstemp(dir=folder, prefix=".ringctl-")
    try:
        with os.fdopen(fd, "wb") as f:
            while left:
                data = stream.read(min(left, CHUNK))
                if not data:
                    raise hoststore.Refused("the copy broke off in the middle")
                found.update(data)
                f.write(data)
                left -= len(data)
        if found.hexdigest() != digest:
            raise hoststore.Refused("a file was garbled on the way")
        os.chmod(temporary, 0o644)
    except BaseException:
        os.unlink(temporary)
        raise
    return temporary


def stage(request: dict[str, Any]) -> dict[str, Any]:
    """{"folder", "written"}: where they are now, and which were not there before."""
    folder = target_folder(os.path.expanduser(request["folder"]))
    os.makedirs(folder, exist_ok=True)
    have = [name for name, digest, _ in request["files"] if is_there(os.path.join(folder, name), digest)]
    stream = hoststore.Inflate(sys.stdin.buffer)
    came: dict[str, str] = {}
    try:
        for name, digest, size in request["files"]:
            if name not in hostfacts.IDX_FILES:
                raise hoststore.Refused(f"{name!r} is not one of MNIST's files")
            came[name] = receive(stream, folder, digest, size)
        for name in [name for name in came if name not in have]:
            os.rename(came[name], os.path.join(folder, name))
            del came[name]
        return {"folder": folder, "written": [n for n, _, _ in request["files"] if n not in have]}
    finally:
        for temporary in came.values():
            os.unlink(temporary)


def main() -> int:
    request = {}
    try:
        with hoststore.speaking():
            request = json.loads(sys.stdin.buffer.readline() or b"{}")
            answer = stage(request)
    except hoststore.Refused as error:
        answer = {"kind": "error", "error": str(error)}
    except OSError as error:
        answer = {"kind": "error", "error": f"{error.filename or request.get('folder')}: {error.strerror}"}
    except zlib.error as error:
        answer = {"kind": "error", "error": f"the copy was garbled on the way: {error}"}
    sys.stdout.buffer.write(hoststore.SENTINEL + json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
