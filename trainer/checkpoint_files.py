"""The files of a checkpoint: written so that a crash leaves all or nothing, read so that damage is seen."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import stat
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from trainer import group, wholefile

VERSION = 1
TEMPORARY = ".tmp"
MODEL = "model.pt"
MANIFEST_BYTES = 1 << 20
SEAL = "sha256"  # in a manifest: of all else in it


class Damaged(Exception):
    """A file of a checkpoint is not what was written."""


# --- Names ----------------------------------------------------------------------------------------


def place_of(folder: Path, step: int, turn: int = 0) -> Path:
    """Where a checkpoint of this step is; those that find another of that number there have later turns."""
    return folder / (f"step-{step:08d}.{turn}" if turn else f"step-{step:08d}")


def numbers_of(place: Path) -> tuple[int, int] | None:
    """Step and turn of a checkpoint, by the name of its folder."""
    found = re.fullmatch(r"step-(\d{8,18})(?:\.([1-9]\d{0,5}))?", place.name)
    return (int(found[1]), int(found[2] or 0)) if found else None


def places_in(folder: Path) -> list[tuple[int, int]]:
    """Step and turn of all checkpoints in a folder, whole or not, in order; what is no folder is not one."""
    places = [place for place in folder.iterdir() if place.is_dir()] if folder.is_dir() else []
    return sorted(numbers for numbers in map(numbers_of, places) if numbers is not None)


def free_turn(folder: Path, places: Sequence[tuple[int, int]], step: int) -> int:
    """The turn behind those of this step of which a rank has finished its part."""
    turns = [turn for there, turn in places if there == step and has_manifest(place_of(folder, step, turn))]
    return max(turns, default=-1) + 1


def has_manifest(place: Path) -> bool:
    try:
        return any(rank_of(path, ".json") is not None for path in place.iterdir())
    except FileNotFoundError:  # another rank of this host has just removed it
        return False


def source(resume: str) -> tuple[Path, tuple[int, int] | None]:
    """The folder that a user named, and step and turn if it is that of one checkpoint."""
    named = Path(os.path.expanduser(resume)).absolute()  # pathlib's fails if there is no such user
    numbers = numbers_of(named)
    return (named, None) if numbers is None else (named.parent, numbers)


def own_name(rank: int) -> str:
    return f"rank-{rank}.pt"


def manifest_name(rank: int) -> str:
    return f"rank-{rank}.json"


def rank_of(path: Path, ending: str) -> int | None:
    """Whose file it is, if it is one of a rank with this ending."""
    found = re.fullmatch(rf"rank-(\d{{1,9}}){re.escape(ending)}", path.name)
    return int(found[1]) if found else None


# --- Writing --------------------------------------------------------------------------------------


def temporary_for(path: Path) -> Path:
    """What this process calls a file while it writes it, if it must: hosts may share a folder, and all
    write model.pt."""
    return path.with_name(f"{path.name}.{group.rank()}-{os.getpid()}{TEMPORARY}")


def is_temporary(path: Path) -> bool:
    """Whether a rank was about to write this file of a checkpoint."""
    found = re.fullmatch(rf"(.+?)(\.\d+-\d+)?{re.escape(TEMPORARY)}", path.name)
    name = path.with_name(found[1]) if found else path
    ours = name.name == MODEL or rank_of(name, ".pt") is not None or rank_of(name, ".json") is not None
    return found is not None and ours


def probe_name(rank: int) -> str:
    return f"probe-{rank}"


def remove_probes(folder: Path, rank: int, world: int) -> None:
    """Take out what an earlier attempt's rank of this number, or one that there is none of now, has written,
    or was about to, to see whether it could. Those of other ranks may be at it in this moment."""
    for path in folder.glob("probe-*"):
        found = re.fullmatch(rf"probe-(\d{{1,9}})(\.\d+-\d+{re.escape(TEMPORARY)})?", path.name)
        if found and (int(found[1]) == rank or int(found[1]) >= world) and is_empty_file(path):
            path.unlink(missing_ok=True)


def is_empty_file(path: Path) -> bool:
    """As a probe is; what has something in it is somebody's."""
    try:
        found = path.lstat()
    except FileNotFoundError:  # hosts may share a folder: another rank was faster
        return False
    return stat.S_ISREG(found.st_mode) and not found.st_size


def write(path: Path, raw: bytes) -> None:
    wholefile.write(path, temporary_for(path), raw)


def write_packed(path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Write tensors, numbers, texts and dicts of them; what a manifest says of the file."""
    with wholefile.replacing(path, temporary_for(path)) as file:
        counted = Counted(file)
        torch.save(content, counted)  # type: ignore[arg-type]  # it needs no more than `write` and `flush`
        if counted.failure is not None:
            raise counted.failure
    return {"bytes": counted.bytes, "sha256": counted.sha256.hexdigest()}


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest with its own checksum."""
    return {**manifest, SEAL: _checksum(manifest)}


def is_unharmed(manifest: Mapping[str, Any]) -> bool:
    """Whether it says what was written; before there were checksums of manifests, nothing told."""
    rest = {name: value for name, value in manifest.items() if name != SEAL}
    return SEAL not in manifest or manifest[SEAL] == _checksum(rest)


def _checksum(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


class Counted:
    """Counts and hashes what goes into a file, a piece at a time: nothing needs to be in memory twice."""

    def __init__(self, file: BinaryIO) -> None:
        self.bytes = 0
        self.sha256 = hashlib.sha256()
        self.failure: OSError | None = None  # torch would make something else of it
        self._file = file

    def write(self, piece: bytes | memoryview) -> int:
        self.bytes += len(piece)
        self.sha256.update(piece)
        if self.failure is None:
            try:
                self._file.write(piece)
            except OSError as error:
                self.failure = error
        return len(piece)

    def flush(self) -> None:
        """`wholefile` does it."""


def keep_out_of_git(place: Path) -> None:
    """Checkpoints are no code: neither committed with a project, nor pushed along with it to the hosts."""
    with contextlib.suppress(FileExistsError), (place / ".gitignore").open("x") as file:
        file.write("*\n")


def remove_strangers(place: Path, world: int) -> None:
    """Take out what ranks have left that are no more, where one was begun that was never finished."""
    for path in place.iterdir():
        rank = next((rank for rank in (rank_of(path, ".pt"), rank_of(path, ".json")) if rank is not None), -1)
        if rank >= world:
            path.unlink(missing_ok=True)


def remove_begun(place: Path) -> None:
    """Take out what an attempt before this one was about to write."""
    for path in filter(is_temporary, place.iterdir()):
        path.unlink(missing_ok=True)


def copied(value: Any) -> Any:
    """A copy that training does not change, without what else is in the memory of its tensors: torch would
    save that along with them."""
    if isinstance(value, Mapping):
        return {key: copied(inner) for key, inner in value.items()}
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


# --- Reading --------------------------------------------------------------------------------------


def read(path: Path, manifest: Mapping[str, Any], most_bytes: int) -> dict[str, Any]:
    """What is in a file, if that is what the manifest says of it; raises Damaged or OSError."""
    try:
        size, sha256 = manifest["files"][path.name]["bytes"], manifest["files"][path.name]["sha256"]
    except (KeyError, TypeError):
        size = sha256 = None
    if not isinstance(size, int) or not isinstance(sha256, str):
        raise Damaged(f"{path} is not in its manifest")
    with path.open("rb") as file:
        found = os.fstat(file.fileno()).st_size
        if found != size:
            raise Damaged(f"{path} has {found:,} bytes of {size:,}")
        if found > most_bytes:
            raise Damaged(f"{path} is too large for this model")
        raw = file.read()
    if hashlib.sha256(raw).hexdigest() != sha256:
        raise Damaged(f"{path} has not the checksum that it had when it was written")
    return unpacked(raw, path, most_bytes)


def checksum_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def unpacked(raw: bytes, path: Path, most_bytes: int) -> dict[str, Any]:
    """What `write_packed` has written. Nothing in the file is ever run."""
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            unpacked_bytes = sum(entry.file_size for entry in archive.infolist())
        if unpacked_bytes <= most_bytes:
            content = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
            if isinstance(content, dict):
                return content
    except Exception as error:  # the file is not ours, and torch may raise anything
        raise Damaged(f"{path} is not a checkpoint of the trainer ({type(error).__name__})") from error
    raise Damaged(f"{path} is not a checkpoint of the trainer")


def expect_step(own: Mapping[str, Any], step: int, path: Path) -> None:
    """Raise Damaged if this was not saved at that step."""
    metrics = own.get("metrics")
    saved = metrics.get("step") if isinstance(metrics, dict) else None
    if not isinstance(saved, int) or saved != step:
        raise Damaged(f"{path} is of step {saved!r:.20}, not {step}")


def read_manifest(path: Path, step: int) -> dict[str, Any]:
    with path.open("rb") as file:
        raw = file.read(MANIFEST_BYTES)
    try:
        manifest = json.loads(raw)
        unharmed = isinstance(manifest, dict) and is_unharmed(manifest)
    except (ValueError, RecursionError):
        manifest, unharmed = None, False
    if not isinstance(manifest, dict) or not isinstance(manifest.get("run"), dict):
        raise Damaged(f"{path} is not a manifest")
    if not unharmed:
        raise Damaged(f"{path} has not the checksum that it had when it was written")
    if manifest.get("version") != VERSION:
        raise Damaged(f"{path} has version {manifest.get('version')!r:.20}, and this trainer reads {VERSION}")
    if manifest.get("step") != step:
        raise Damaged(f"{path} is of step {manifest.get('step')!r:.20}, not {step}")
    return manifest


def manifests_in(place: Path, step: int) -> dict[int, dict[str, Any]]:
    """Those that make sense, by the number that the rank had: other attempts may have given others."""
    found = {}
    for path in place.iterdir() if place.is_dir() else ():
        rank = rank_of(path, ".json")
        if rank is not None:
            with contextlib.suppress(Damaged, OSError):  # its own rank tells
                found[rank] = read_manifest(path, step)
    return dict(sorted(found.items()))


def has_damaged(place: Path, step: int, made_by: str) -> bool:
    """Whether a manifest there is damaged, and still has the name of this run."""
    name = f'"made_by": {json.dumps(made_by)}'.encode()
    whole = manifests_in(place, step)
    for path in place.iterdir():
        if rank_of(path, ".json") not in (None, *whole):
            with contextlib.suppress(OSError), path.open("rb") as file:
                if name in file.read(MANIFEST_BYTES):
                    return True
    return False


def lists_model(manifest: Mapping[str, Any]) -> bool:
    return isinstance(manifest.get("files"), dict) and MODEL in manifest["files"]


def count(value: Any) -> int | None:
    """The value, if it counts something."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
