"""Checkpoints: a training that was interrupted goes on from one, to the same bits.

Every rank has a part of its own, on the disk of its own host. The folder of a step, `step-00000040`, has

    model.pt      from rank 0: model and optimizer, which are the same on all ranks and for any number of them
    rank-2.pt     what rank 2 alone knows
    rank-2.json   its manifest: which run, how far it was, and the checksums of what rank 2 wrote
    .gitignore    that keeps the folder out of git

A rank writes its manifest when all ranks have the rest on their disks; where there is none, the checkpoint
was not finished. What was there before is removed when all ranks have their manifests on their disks.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer import agree, group
from trainer.config import Config
from trainer.errors import InputError

VERSION = 1
KEEP = 2
TEMPORARY = ".tmp"
MANIFEST_BYTES = 1 << 20
MAY_CHANGE = (
    "--epochs", "--steps", "--on-nonfinite", "--check-sync", "--device", "--backend", "--checkpoint-every",
    "--resume",
)  # fmt: skip
"""Options that need not be the same when a run goes on. Of epochs and steps the sum of all steps counts."""

OWN = ""
"""Stands for the checkpoints of earlier attempts of this very run, where others are of no interest."""

WHOLE, DAMAGED, UNFINISHED, ABSENT, OTHER = "whole", "damaged", "unfinished", "absent", "other"


class Damaged(Exception):
    """A file of a checkpoint is not what was written."""


@dataclass(frozen=True)
class Part:
    """What a rank has read back."""

    step: int
    own: dict[str, Any]
    shared: dict[str, Any] | None  # on rank 0


class Finding(NamedTuple):
    """What a rank says about its part of a checkpoint."""

    kind: str  # WHOLE, DAMAGED, UNFINISHED (no manifest), ABSENT (no trace), or OTHER (of another run)
    text: str = ""


class Checkpoints:
    """The checkpoints of this run in a folder on this host. All ranks call its methods at the same time."""

    def __init__(self, folder: str, run: Mapping[str, Any], most_bytes: int, made_by: str = "") -> None:
        self.folder = Path(folder).expanduser().absolute()
        self._run = run  # what must be the same when it goes on
        self._made_by = made_by  # ringctl's name for it, which all its attempts share
        self._most_bytes = most_bytes  # that a file may have
        self._writer = {"trainer": agree.code_digest()[:12], "torch": torch.__version__}
        self._rank = group.rank()
        self._own = f"rank-{self._rank}.pt"
        self._manifest = f"rank-{self._rank}.json"
        self._kept: list[int] = []

    def prepare(self) -> None:
        """Make sure that every rank can write; InputError names those that cannot."""
        failed = failures(self._try_to_write, OSError)
        if failed:
            raise InputError(f"cannot write checkpoints: {failed}; choose another --checkpoint-dir")

    def save(self, step: int, epoch: int, shared: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
        """Whether all ranks have saved this step; if not, that is told and the checkpoint before stays."""
        place = _place(self.folder, step)
        contents = {self._own: own} | ({"model.pt": shared} if self._rank == 0 else {})
        files: dict[str, Any] = {}

        def write_files() -> None:
            place.mkdir(parents=True, exist_ok=True)
            _sync_folder(self.folder)
            _keep_out_of_git(place)
            for name, content in contents.items():
                raw = _packed(content)
                files[name] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
                _write(place / name, raw)

        def write_manifest() -> None:
            about = {"version": VERSION, "step": step, "epoch": epoch, "rank": self._rank, "run": self._run}
            about |= {"made_by": self._made_by, "written_by": self._writer, "files": files}
            text = json.dumps(about, indent=1)
            _write(place / self._manifest, text.encode() + b"\n")

        for work in (write_files, write_manifest):
            failed = failures(work, OSError)
            if failed:
                shutil.rmtree(place, ignore_errors=True)
                _warn(f"step {step} could not be saved, the checkpoint before it stays: {failed}")
                return False
        self._kept = [*self._kept, step][-KEEP:]
        for old in _steps(self.folder):
            if old not in self._kept:
                shutil.rmtree(_place(self.folder, old), ignore_errors=True)
        return True

    def newest(self, resume: str) -> Part | None:
        """The newest checkpoint that all ranks have whole; None if there never was one that was finished.

        `resume` is "auto", OWN, or a folder of others, or of a single one, which must be there then.
        InputError if they are of another run, or none of them is whole; OWN may be lost.
        """
        folder, only = (self.folder, None) if resume in ("auto", OWN) else _source(resume)
        here = [step for step in _steps(folder) if only in (None, step)]
        if resume == OWN:
            here = [step for step in here if self._is_of_this_run(step)]
        everywhere = {step for text in group.gather_texts(json.dumps(here)) for step in json.loads(text)}
        problems: list[str] = []
        lost = False
        for step in sorted(everywhere, reverse=True):
            part, finding = self._read(folder, step)
            findings = [Finding(*json.loads(text)) for text in group.gather_texts(json.dumps(finding))]
            problem = _problem(step, findings)
            if part is not None and not problem:
                _warn(*problems)
                if folder == self.folder:
                    self._kept = [old for old in here if old <= step]
                return part
            problems.append(problem)
            lost = lost or _is_lost(findings)
        if resume not in ("auto", OWN) or (lost and resume == "auto"):
            why = "; ".join(problems) or "there is none"
            raise InputError(f"cannot go on from {folder}: {why}. To start afresh: --resume never")
        _warn(*problems)
        return None

    def _try_to_write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        probe = self.folder / f"probe-{self._rank}"
        _write(probe, b"")
        probe.unlink()
        for step in _steps(self.folder):  # what an attempt before this one was about to write
            for name in (self._own, self._manifest) + (("model.pt",) if self._rank == 0 else ()):
                (_place(self.folder, step) / (name + TEMPORARY)).unlink(missing_ok=True)

    def _is_of_this_run(self, step: int) -> bool:
        try:
            manifest = _read_manifest(_place(self.folder, step) / self._manifest, step)
        except (Damaged, OSError):
            return False
        return bool(self._made_by) and manifest.get("made_by") == self._made_by

    def _read(self, folder: Path, step: int) -> tuple[Part | None, Finding]:
        place = _place(folder, step)
        try:
            if not (place / self._manifest).exists():
                return None, Finding(UNFINISHED if (place / self._own).exists() else ABSENT)
            manifest = _read_manifest(place / self._manifest, step)
            difference = _difference(manifest, self._run)
            if difference:
                return None, Finding(OTHER, difference)
            own = self._read_file(place / self._own, manifest)
            _expect_step(own, step, place / self._own)
            shared = self._read_file(place / "model.pt", manifest) if self._rank == 0 else None
        except Damaged as error:
            return None, Finding(DAMAGED, str(error))
        except OSError as error:
            return None, Finding(DAMAGED, f"{error.filename} cannot be read: {error.strerror}")
        if manifest.get("written_by") != self._writer:
            _warn(f"step {step} was saved by another version of the trainer or of torch: bits may differ")
        return Part(step, own, shared), Finding(WHOLE)

    def _read_file(self, path: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
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
            if found > self._most_bytes:
                raise Damaged(f"{path} is too large for this model")
            raw = file.read()
        if hashlib.sha256(raw).hexdigest() != sha256:
            raise Damaged(f"{path} has not the checksum that it had when it was written")
        return _unpacked(raw, path, self._most_bytes)


def described(config: Config, training_images: int, steps: int) -> dict[str, Any]:
    """What decides about the bits of a run, by the names that users know."""
    sizes = {"--world-size": config.world_size, "training images": training_images, "steps in all": steps}
    options = {name: value for name, value in agree.options(config).items() if name not in MAY_CHANGE}
    return {"--model": config.model} | sizes | options


def failures(work: Callable[[], None], *kinds: type[Exception]) -> str:
    """Do it on all ranks, and return which of them failed and how; "" if none did."""
    said = ""
    try:
        work()
    except kinds as error:
        said = f"{type(error).__name__}: {error}"
        if isinstance(error, OSError):
            said = f"{error.filename}: {error.strerror}"
    said = " ".join(said.split())
    return ", ".join(f"rank {rank}: {text}" for rank, text in enumerate(group.gather_texts(said)) if text)


# --- Judging --------------------------------------------------------------------------------------


def _problem(step: int, findings: Sequence[Finding]) -> str:
    """Why this checkpoint cannot be taken, "" if it can; InputError if it is of another run."""
    for finding in findings:
        if finding.kind == OTHER:
            raise InputError(
                f"the checkpoint of step {step} was made with {finding.text}: go on with the same, or start "
                "afresh with another --checkpoint-dir, or replace it with --resume never"
            )
    if all(finding.kind == WHOLE for finding in findings):
        return ""
    if not _is_lost(findings):
        return f"the checkpoint of step {step} was not finished"
    words = {DAMAGED: "", UNFINISHED: "it was not finished", ABSENT: "its part is not on its host"}
    told = [
        f"rank {rank}: {finding.text or words[finding.kind]}"
        for rank, finding in enumerate(findings)
        if finding.kind != WHOLE
    ]
    return f"the checkpoint of step {step} is not whole: {', '.join(told)}"


def _is_lost(findings: Sequence[Finding]) -> bool:
    """Whether all ranks had their part once, and one has it no more.

    A rank with a manifest wrote that after all the others had written their files.
    """
    kinds = {finding.kind for finding in findings}
    return DAMAGED in kinds or (WHOLE in kinds and ABSENT in kinds)


def _difference(manifest: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    """The first thing that this run has otherwise than the one of the manifest; "" if all is the same."""
    theirs = manifest["run"]
    for name, ours in run.items():
        if name in theirs and theirs[name] != ours:
            return f"{name} {theirs[name]!r:.60}, not {ours!r}"
    return ""


# --- Files ----------------------------------------------------------------------------------------


def _place(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def _step(place: Path) -> int | None:
    found = re.fullmatch(r"step-(\d{8,18})", place.name)
    return int(found[1]) if found else None


def _steps(folder: Path) -> list[int]:
    """The steps of all checkpoints in the folder, whole or not, in order; what is no folder is not one."""
    places = [place for place in folder.iterdir() if place.is_dir()] if folder.is_dir() else []
    return sorted(step for step in map(_step, places) if step is not None)


def _source(resume: str) -> tuple[Path, int | None]:
    """The folder that a user named, and the step if it is that of one checkpoint."""
    named = Path(resume).expanduser().absolute()
    step = _step(named)
    return (named, None) if step is None else (named.parent, step)


def _keep_out_of_git(place: Path) -> None:
    """Checkpoints are no code: neither committed with a project, nor pushed along with it to the hosts."""
    with contextlib.suppress(FileExistsError), (place / ".gitignore").open("x") as file:
        file.write("*\n")


def _write(path: Path, raw: bytes) -> None:
    """Write a file that after a crash is either all there or not at all; on return it is on the disk."""
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with temporary.open("wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error  # not all of them know the file


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _packed(content: Mapping[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(_by_itself(content), file)
    return file.getvalue()


def _by_itself(value: Any) -> Any:
    """The same without what else is in the memory of its tensors, which torch would save along with them."""
    if isinstance(value, Mapping):
        return {key: _by_itself(inner) for key, inner in value.items()}
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def _unpacked(raw: bytes, path: Path, most_bytes: int) -> dict[str, Any]:
    """What `_packed` packed: tensors, numbers, texts and dicts of them. Nothing in the file is ever run."""
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


def _expect_step(own: Mapping[str, Any], step: int, path: Path) -> None:
    """Raise Damaged if this was not saved at that step."""
    metrics = own.get("metrics")
    saved = metrics.get("step") if isinstance(metrics, dict) else None
    if not isinstance(saved, int) or saved != step:
        raise Damaged(f"{path} is of step {saved!r:.20}, not {step}")


def _read_manifest(path: Path, step: int) -> dict[str, Any]:
    with path.open("rb") as file:
        raw = file.read(MANIFEST_BYTES)
    try:
        manifest = json.loads(raw)
    except (ValueError, RecursionError):
        manifest = None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("run"), dict):
        raise Damaged(f"{path} is not a manifest")
    if manifest.get("version") != VERSION:
        raise Damaged(f"{path} has version {manifest.get('version')!r:.20}, and this trainer reads {VERSION}")
    if manifest.get("step") != step:
        raise Damaged(f"{path} is of step {manifest.get('step')!r:.20}, not {step}")
    return manifest


def _warn(*texts: str) -> None:
    """Tell on rank 0 what the user should know; it is no reason to stop."""
    if group.rank() == 0:
        for text in texts:
            print(f"trainer: warning: {text}", file=sys.stderr, flush=True)
