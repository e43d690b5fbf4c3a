"""Code that is handed in with a run: what may be in it, and where it cannot get to."""

from __future__ import annotations

import asyncio
import errno
import gzip
import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from launcher import codestore, push
from launcher.errors import InputError, NotKept
from launcher.serve import api
from launcher.serve.call import Call
from tests.launcher.serve.service import Service


def packed(*members: tuple[str, str, bytes | str]) -> io.BytesIO:
    """A tar of (kind, name, content or target)."""
    kinds = {
        "file": tarfile.REGTYPE,
        "link": tarfile.SYMTYPE,
        "hard": tarfile.LNKTYPE,
        "fifo": tarfile.FIFOTYPE,
    }
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for kind, name, what in members:
            info = tarfile.TarInfo(name)
            info.type = kinds[kind]
            if isinstance(what, str):
                info.linkname = what
                tar.addfile(info)
            else:
                info.size = len(what)
                tar.addfile(info, io.BytesIO(what))
    out.seek(0)
    return out


def project(folder: Path) -> push.Snapshot:
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "a.py").write_text("print(1)")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("deep/a.py")
    return push.take(folder)


def test_a_snapshot_arrives_as_it_was(tmp_path: Path, at_the_door: Service) -> None:
    snapshot, file = project(tmp_path / "project"), io.BytesIO()
    codestore.packed(snapshot, file)
    there = at_the_door.client()
    assert there.get(f"/api/code/{snapshot.digest}")["have"] is False
    assert there.put(f"/api/code/{snapshot.digest}", file) == {"digest": snapshot.digest, "have": True}
    assert there.get(f"/api/code/{snapshot.digest}")["have"] is True
    assert codestore.snapshot(codestore.folder_of(snapshot.digest)).digest == snapshot.digest
    copy = tmp_path / "copy"
    codestore.copy(snapshot.digest, copy)
    assert os.readlink(copy / "link") == "deep/a.py"
    assert os.access(copy / "run.sh", os.X_OK)


def test_other_files_than_the_digest_says_are_not_kept(tmp_path: Path, at_the_door: Service) -> None:
    digest = project(tmp_path / "project").digest[::-1]
    with pytest.raises(InputError, match="not those of this digest"):
        at_the_door.client().put(f"/api/code/{digest}", packed(("file", "a.py", b"x")))
    assert at_the_door.client().get(f"/api/code/{digest}")["have"] is False


@pytest.mark.parametrize(
    "members",
    [
        [("file", "../out", b"x")],
        [("file", "/tmp/out", b"x")],
        [("file", "a/../../out", b"x")],
        [("file", "a//b", b"x")],
        [("link", "out", "/etc/passwd")],
        [("link", "out", "../../out")],
        [("link", "a", "."), ("file", "a/b", b"x")],
        [("file", "b", b"x"), ("link", "a", "b/../.."), ("file", "a/out", b"x")],
        [("file", "a", b"x"), ("file", "a", b"y")],
        [("file", "a", b"x"), ("hard", "b", "a")],
        [("fifo", "a", "")],
        [("link", "a", "b"), ("link", "b", "a")],
    ],
)
def test_nothing_leaves_the_folder(members: list[tuple[str, str, bytes | str]], tmp_path: Path) -> None:
    with pytest.raises(InputError):
        codestore.receive("0" * 64, packed(*members))
    assert list(codestore.store().iterdir()) == []
    assert not list(tmp_path.rglob("out"))


@pytest.mark.parametrize(
    "data",
    [b"", b"no tar", b"\x1f\x8b broken", gzip.compress(b"x" * 2000), b"\0" * 512 + b"x" * 512],
    ids=["empty", "text", "half a gzip", "a gzip of text", "zeros"],
)
def test_what_is_no_tar_is_refused(data: bytes) -> None:
    with pytest.raises(InputError):
        codestore.receive("0" * 64, io.BytesIO(data))
    assert list(codestore.store().iterdir()) == []


def header(name: str, size: int, kind: bytes) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize(
    "bomb",
    [
        lambda: header("x", 8 << 30, tarfile.REGTYPE),
        lambda: header("././@LongLink", 1 << 30, tarfile.GNUTYPE_LONGNAME),
        lambda: header("pax", 1 << 30, tarfile.XHDTYPE),
    ],
)
def test_a_tar_that_unpacks_to_gigabytes_is_refused(bomb: Callable[[], bytes]) -> None:
    with pytest.raises(InputError):
        codestore.receive("0" * 64, io.BytesIO(gzip.compress(bomb() + b"\0" * (1 << 20))))


def test_a_tar_of_countless_folders_or_names_is_refused() -> None:
    folder = tarfile.TarInfo("d")
    folder.type = tarfile.DIRTYPE
    many = gzip.compress(folder.tobuf() * (codestore.MOST_FILES + 1))
    with pytest.raises(InputError, match="more than"):
        codestore.receive("0" * 64, io.BytesIO(many))
    name = tarfile.TarInfo("././@LongLink")
    name.type, name.size = tarfile.GNUTYPE_LONGNAME, 512
    with pytest.raises(InputError, match="recursion"):
        codestore.receive("0" * 64, io.BytesIO((name.tobuf() + b"a" * 512) * 3000))


@pytest.mark.parametrize(
    "names",
    [
        [f"{i}/" + "a/" * 1900 + "x" for i in range(3)],
        ["a/" * codestore.MOST_DEPTH + "x"],
        ["a" * 200 + "/" + "/".join(["b" * 200] * 5)],
    ],
    ids=["abyss", "deep", "long"],
)
def test_a_few_names_do_not_become_folders_without_end(names: list[str]) -> None:
    with pytest.raises(InputError, match="deeper than"):
        codestore.receive("0" * 64, packed(*(("file", name, b"") for name in names)))
    assert list(codestore.store().iterdir()) == []


def test_folders_are_counted_as_files_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codestore, "MOST_FILES", 100)
    with pytest.raises(InputError, match="more than 100 folders"):
        codestore.receive("0" * 64, packed(*(("file", f"{i}/" + "a/" * 50 + "x", b"") for i in range(3))))
    assert list(codestore.store().iterdir()) == []


def test_what_is_too_deep_for_others_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codestore, "MOST_DEPTH", 10_000)  # as it was before there was a limit
    monkeypatch.setattr(codestore, "MOST_PATH", 10_000)
    place, kept = tmp_path / "abyss", tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    place.mkdir()
    codestore.unpack(
        packed(("link", "out", "a"), *(("file", "a/" * n + "x", b"") for n in (1, 5, 1800))), place
    )
    (place / "a" / "elsewhere").symlink_to(kept)
    codestore.remove_tree(place)
    assert not place.exists()
    assert (kept / "file").exists()


def no_room(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


FULL = "code: cannot be written: No space left on device"


@pytest.mark.parametrize(("module", "name"), [(shutil, "copyfileobj"), (tempfile, "mkdtemp")])
def test_a_tar_for_which_there_is_no_room_is_not_said_to_be_wrong(
    module: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, no_room)
    with pytest.raises(NotKept, match=FULL):
        codestore.receive("0" * 64, packed(("file", "a", b"x")))
    assert list(codestore.store().iterdir()) == []


async def body(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


@pytest.mark.parametrize("size", [1, 100_000], ids=["when all is here", "as it comes"])
def test_what_a_full_disk_has_no_room_for_is_refused(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    service: Any = None  # it is not asked
    call = Call(service, None, {"digest": "0" * 64}, {}, incoming=body(bytes(size)))
    with open("/dev/full", "w+b") as full:
        monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: full)
        with pytest.raises(NotKept, match=FULL):
            asyncio.run(api.put_code(call))


def test_a_run_whose_code_has_not_come_is_refused(at_the_door: Service) -> None:
    answer = at_the_door.raw("POST", "/api/submit", b'{"command": ["x"], "code": "%s"}' % (b"a" * 64))
    assert (answer.status, answer.json["error"]) == (409, "its code is not here")
