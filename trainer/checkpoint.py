"""Checkpoints: a training that was interrupted goes on from one, to the same bits.

Every rank has a part of its own, on the disk of its own host. The folder of a step, `step-00000040`, has

    model.pt      from rank 0, with copies on other hosts: model and optimizer, which are the same on all
                  ranks and for any number of them
    rank-2.pt     what rank 2 alone knows
    rank-2.json   its manifest: which run, how far it was, and the checksums of what rank 2 wrote
    .gitignore    that keeps the folder out of git

A rank writes its manifest when all ranks have the rest on their disks; where there is none, the checkpoint
was not finished. What was there before is removed when all ranks have their manifests on their disks.

Nothing is written into a folder with a manifest. More ranks have fewer steps, and may come to the number of
the very checkpoint that they have gone on from: theirs is in `step-00000040.1` then.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer import agree, candidates, group, wholefile
from trainer import checkpoint_files as files
from trainer.candidates import ABSENT, DAMAGED, UNFINISHED, WHOLE, Key, Look
from trainer.checkpoint_files import MODEL, Damaged, place_of
from trainer.config import Config
from trainer.errors import InputError

KEEP = 2
MAY_CHANGE = (
    "--epochs", "--steps", "--on-nonfinite", "--check-sync", "--device", "--backend", "--checkpoint-every",
    "--checkpoint-copies", "--resume",
)  # fmt: skip
"""Options that need not be the same when a run goes on. Of epochs and steps the sum of all steps counts."""

OWN = ""
"""Stands for the checkpoints of earlier attempts of this very run, where others are of no interest."""


@dataclass(frozen=True)
class Part:
    """What a rank has read back."""

    step: int
    own: dict[str, Any] | None  # None: this rank's own state begins afresh
    shared: dict[str, Any] | None  # on rank `sender`
    sender: int
    epoch: int
    steps: int | None  # in all, as those who saved it counted
    turn: int
    world: int  # how many they were
    afresh: tuple[int, ...] = ()  # the ranks without `own`
    is_resized: bool = False  # another number of ranks than now saved it


@dataclass(frozen=True)
class Model:
    """The model.pt that all ranks take."""

    sender: int  # the rank that has it
    epoch: int
    world: int
    content: dict[str, Any] | None  # there


class Checkpoints:
    """The checkpoints of this run in a folder on this host. All ranks call its methods at the same time."""

    def __init__(
        self,
        folder: str,
        run: Mapping[str, Any],
        most_bytes: int,
        made_by: str = "",
        *,
        attempt: int = 1,
        hosts: Sequence[str] = (),
        copies: int = 0,
    ) -> None:
        self.folder = Path(folder).expanduser().absolute()
        self._run = run  # what must be the same when it goes on
        self._made_by = made_by  # ringctl's name for it, which all its attempts share
        self._is_later = bool(made_by) and attempt > 1
        self._most_bytes = most_bytes  # that a file may have
        self._writer = {"trainer": agree.code_digest()[:12], "torch": torch.__version__}
        self._threads = torch.get_num_threads()
        self._rank, self._world = group.rank(), group.world()
        self._hosts = hosts or [""] * self._world  # of each rank
        self._own = files.own_name(self._rank)
        self._manifest = files.manifest_name(self._rank)
        self._kept: list[tuple[int, int]] = []  # step and turn
        self.writes_model = self._rank in candidates.writers(self._hosts, copies)

    def prepare(self) -> None:
        """Make sure that every rank can write; InputError names those that cannot."""
        failed = failures(self._try_to_write, OSError)
        if failed:
            raise InputError(f"cannot write checkpoints: {failed}; choose another --checkpoint-dir")

    # --- Saving -----------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        epoch: int,
        shared: Mapping[str, Any],
        own: Mapping[str, Any],
        among: dist.ProcessGroup | None = None,
    ) -> bool:
        """Whether all ranks have saved this step; if not, that is told and the checkpoint before stays.

        They agree about it in the group `among`.
        """
        before: list[tuple[int, int]] = []
        turn, failed = self._free_turn(step, before, among)
        if not failed:
            place = place_of(self.folder, step, turn)
            failed = self._write(place, step, epoch, shared, own, among)
            if failed:
                self._withdraw(place, among)
        if failed:
            _warn(f"step {step} could not be saved, the checkpoint before it stays: {failed}")
            return False
        self._kept = [*self._kept, (step, turn)][-KEEP:]
        for old in before:
            if old not in self._kept:
                shutil.rmtree(place_of(self.folder, *old), ignore_errors=True)
        return True

    def _free_turn(
        self, step: int, before: list[tuple[int, int]], among: dist.ProcessGroup | None
    ) -> tuple[int, str]:
        """The turn of a new checkpoint of this step, which none that a rank has finished has; or what failed.

        What is there goes to `before`. No rank gets past this while another removes what was old.
        """
        turn = 0

        def look() -> None:
            nonlocal turn
            before.extend(files.places_in(self.folder))
            turn = files.free_turn(self.folder, before, step)

        failed = failures(look, OSError, among=among)
        return max(map(int, group.gather_texts(str(turn), among))), failed

    def _write(
        self,
        place: Path,
        step: int,
        epoch: int,
        shared: Mapping[str, Any],
        own: Mapping[str, Any],
        among: dist.ProcessGroup | None,
    ) -> str:
        """Write this rank's part of a checkpoint; which ranks failed and how, "" if none did."""
        about: dict[str, Any] = {"version": files.VERSION, "step": step, "epoch": epoch, "rank": self._rank}
        about |= {"run": self._run, "made_by": self._made_by, "written_by": self._writer}
        about |= {"threads": self._threads, "files": {}}
        contents = {self._own: own} | ({MODEL: shared} if self.writes_model else {})

        def write_files() -> None:
            place.mkdir(parents=True, exist_ok=True)
            wholefile.sync_folder(self.folder)
            files.keep_out_of_git(place)
            files.remove_strangers(place, self._world)
            for name, content in contents.items():
                about["files"][name] = files.write_packed(place / name, content)

        def compare_models() -> str:
            own = [about["files"].get(name, {}).get("sha256", "") for name in (MODEL, self._own)]
            told = [json.loads(text) for text in group.gather_texts(json.dumps(own), among)]
            models = [model for model, _ in told]
            about["model_sha256"], about[candidates.PARTS] = models[0], [part for _, part in told]
            return _unequal(models)

        def write_manifest() -> None:
            sealed = json.dumps(files.sealed(about), indent=1)
            files.write(place / self._manifest, sealed.encode() + b"\n")

        return (
            failures(write_files, OSError, MemoryError, among=among)
            or compare_models()
            or failures(write_manifest, OSError, among=among)
        )

    def _withdraw(self, place: Path, among: dist.ProcessGroup | None) -> None:
        """Remove what was written of a checkpoint that is none. The manifests first, on all ranks: whoever is
        killed meanwhile leaves none beside a part that is gone, which would be one that was lost."""

        def remove_manifest() -> None:
            (place / self._manifest).unlink(missing_ok=True)
            if place.is_dir():
                wholefile.sync_folder(place)

        failures(remove_manifest, OSError, among=among)
        shutil.rmtree(place, ignore_errors=True)

    def _try_to_write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        files.remove_probes(self.folder, self._rank, self._world)
        probe = self.folder / files.probe_name(self._rank)
        files.write(probe, b"")
        probe.unlink()
        for numbers in files.places_in(self.folder):
            files.remove_begun(place_of(self.folder, *numbers))

    # --- Going on ---------------------------------------------------------------------------------

    def newest(self, resume: str) -> Part | None:
        """The newest checkpoint that all ranks have whole; None if there never was one that was finished.

        For a later attempt of a run, if there is none, the newest whose model.pt a rank has whole; and
        where another number of ranks saved it, that is enough in any case.

        `resume` is "auto", OWN, or a folder of others, or of a single one, which must be there then.
        InputError if they are of another run, or cannot be looked at, or none of them is whole.
        """
        folder, only = (self.folder, None) if resume in ("auto", OWN) else files.source(resume)
        here = self._keys(folder, only, of_this_run=resume == OWN)
        problems: list[str] = []
        lost, second_best = False, None
        found = _gathered(here)
        for key in candidates.newest_first(found):
            part, problem, is_lost = self._judged(folder, key, found[key])
            problems += [problem] if problem else []
            lost = lost or is_lost
            if part is not None and part.afresh and not part.is_resized:
                second_best = second_best or part  # one before may be whole, and lead to the same bits
            elif part is not None:
                return self._taken(second_best if part.is_resized and second_best else part, here, problems)
        if second_best is not None:
            return self._taken(second_best, here, problems)
        if lost or resume not in ("auto", OWN):
            why = "; ".join(problems) or "there is none"
            how = "launch a new run" if resume == OWN else "--resume never"  # that is for first attempts
            raise InputError(f"cannot go on from {folder}: {why}. To start afresh: {how}")
        _warn(*problems)
        return None

    def _taken(self, part: Part, here: Mapping[Key, Collection[int]], problems: Sequence[str]) -> Part:
        _warn(*problems)
        age = Key(part.step, part.steps, part.turn).age
        older = [key for key in candidates.newest_first(here) if key.age <= age]
        self._kept = [key.place for key in reversed(older)]
        return part

    def _keys(self, folder: Path, only: tuple[int, int] | None, of_this_run: bool) -> dict[Key, list[int]]:
        """The checkpoints that this host has something of, or that one, and the ranks with a manifest here;
        InputError if a rank cannot look."""
        found: dict[Key, list[int]] = {}

        def look() -> None:
            for step, turn in files.places_in(folder):
                if only in (None, (step, turn)):
                    look_at(place_of(folder, step, turn), step, turn)

        def look_at(place: Path, step: int, turn: int) -> None:
            manifests = files.manifests_in(place, step)
            of_interest = [
                rank for rank, manifest in manifests.items() if not of_this_run or self._is_own(manifest)
            ]
            for rank in of_interest:
                found.setdefault(_key(manifests[rank], turn), []).append(rank)
            if not of_interest and (not of_this_run or self._has_damaged(place, step)):
                found[Key(step, None, turn)] = []

        failed = failures(look, OSError)
        if failed:
            raise InputError(f"cannot look for a checkpoint to go on from: {failed}")
        return found

    def _judged(self, folder: Path, key: Key, ranks: Collection[int]) -> tuple[Part | None, str, bool]:
        """The part to go on with, if it is possible; what is wrong; whether something is lost. These ranks
        have a manifest on some host."""
        own, look = self._look(folder, key)
        told = [Look(*json.loads(text)) for text in group.gather_texts(json.dumps(look))]
        looks = candidates.corrected(told, {*ranks, *self._strangers(folder, key, told)})
        verdict = candidates.verdict(key, looks, self._is_later)
        if verdict == candidates.UNUSABLE:
            return None, candidates.problem(key, looks), candidates.is_lost(looks)
        model, damaged = self._model(folder, key, looks)
        if model is None:
            return None, candidates.problem(key, looks, damaged), True
        part = Part(key.step, own, model.content, model.sender, model.epoch, key.steps, key.turn, model.world)
        is_resized = verdict == candidates.RESIZED
        afresh = list(range(self._world)) if is_resized else candidates.without_part(looks)
        part = replace(
            part, own=None if self._rank in afresh else own, afresh=tuple(afresh), is_resized=is_resized
        )
        if verdict == candidates.AFRESH:
            return part, candidates.problem(key, looks, damaged), True
        said = [candidates.copy_taken(key, model.sender, damaged)] if damaged else []
        return part, "; ".join(filter(None, [*said, candidates.other_threads(key, looks)])), False

    def _look(self, folder: Path, key: Key) -> tuple[dict[str, Any] | None, Look]:
        """This rank's own part, if it is whole, and what it has found of the checkpoint."""
        place = place_of(folder, *key.place)
        try:
            manifests = _manifests_of(key, place)
        except OSError as error:
            return None, Look(DAMAGED, _reason(error))
        own, look = self._own_part(place, key)
        differences = [found for found in manifests if candidates.difference(found, self._run)]
        if differences:
            resized = [
                not candidates.difference(found, self._run, candidates.BY_WORLD) for found in differences
            ]
            look = look._replace(
                difference=candidates.difference(differences[0], self._run), is_resized=all(resized)
            )
        return own, look._replace(
            is_own=bool(manifests) and all(map(self._is_own, manifests)),
            has_manifest=bool(manifests),
            has_model=any(map(files.lists_model, manifests)),
        )

    def _own_part(self, place: Path, key: Key) -> tuple[dict[str, Any] | None, Look]:
        path = place / self._own
        try:
            if not (place / self._manifest).exists():
                if not path.exists():
                    return None, Look(ABSENT)
                return None, Look(UNFINISHED, sha256=files.checksum_of(path) if key.is_told else "")
            manifest = files.read_manifest(place / self._manifest, key.step)
            if candidates.difference(manifest, self._run):
                return None, Look(ABSENT)
            if _key(manifest, key.turn) != key:
                return None, Look(ABSENT, candidates.SAVED_APART)
            own = files.read(path, manifest, self._most_bytes)
            files.expect_step(own, key.step, path)
        except (Damaged, OSError) as error:
            return None, Look(DAMAGED, _reason(error))
        if manifest.get("written_by") != self._writer:
            _warn(f"step {key.step} was saved by another version of the trainer or of torch: bits may differ")
        threads = files.count(manifest.get("threads"))  # None: from before it was written
        is_other = threads not in (None, self._threads)
        return own, Look(WHOLE, threads=f"{threads}, now {self._threads}" if is_other else "")

    def _strangers(self, folder: Path, key: Key, looks: Sequence[Look]) -> set[int]:
        """The ranks whose host has a part that an interrupted save has left, of another one than this."""
        if all(look.kind != UNFINISHED for look in looks):
            return set()
        here: set[int] = set()
        with contextlib.suppress(OSError):  # this rank's look has told
            for manifest in _manifests_of(key, place_of(folder, *key.place)):
                here.update(candidates.strangers(looks, manifest))
        return {rank for text in group.gather_texts(json.dumps(sorted(here))) for rank in json.loads(text)}

    def _model(
        self, folder: Path, key: Key, looks: Sequence[Look]
    ) -> tuple[Model | None, list[tuple[int, str]]]:
        """The model.pt of the first rank that has it whole; and which ranks have not, and why."""
        told: list[tuple[int, str]] = []
        for rank, look in enumerate(looks):
            if not look.has_model:
                continue
            found, said = self._model_here(folder, key) if rank == self._rank else (None, "")
            answer = json.dumps([said, found and vars(replace(found, content=None))])
            said, facts = json.loads(group.gather_texts(answer)[rank])
            if not said:
                return found or Model(**facts), told
            if (self._hosts[rank], said) not in [(self._hosts[other], text) for other, text in told]:
                told.append((rank, said))
        return None, told

    def _model_here(self, folder: Path, key: Key) -> tuple[Model | None, str]:
        """The one on this host, or why it cannot be taken."""
        place, said = place_of(folder, *key.place), ""
        try:
            listing = [manifest for manifest in _manifests_of(key, place) if files.lists_model(manifest)]
        except OSError as error:
            return None, _reason(error)
        for manifest in listing:
            try:
                epoch = files.count(manifest.get("epoch"))
                world = files.count(manifest["run"].get(candidates.WORLD))
                if epoch is None or world is None:
                    raise Damaged(f"the manifest of {place / MODEL} has no epoch or no {candidates.WORLD}")
                content = files.read(place / MODEL, manifest, self._most_bytes)
                return Model(self._rank, epoch, world, content), ""
            except (Damaged, OSError) as error:
                said = _reason(error)
        return None, said

    def _has_damaged(self, place: Path, step: int) -> bool:
        """Whether there is a damaged manifest of an earlier attempt of this very run."""
        return bool(self._made_by) and files.has_damaged(place, step, self._made_by)

    def _is_own(self, manifest: Mapping[str, Any]) -> bool:
        return bool(self._made_by) and manifest.get("made_by") == self._made_by


def described(config: Config, training_images: int, steps: int) -> dict[str, Any]:
    """What decides about the bits of a run, by the names that users know."""
    sizes = {candidates.WORLD: config.world_size, "training images": training_images, candidates.STEPS: steps}
    options = {name: value for name, value in agree.options(config).items() if name not in MAY_CHANGE}
    return {"--model": config.model} | sizes | options


def failures(
    work: Callable[[], None], *kinds: type[Exception], among: dist.ProcessGroup | None = None
) -> str:
    """Do it on all ranks, and return which of them failed and how; "" if none did."""
    said = ""
    try:
        work()
    except kinds as error:
        said = f"{type(error).__name__}: {error}"
        if isinstance(error, OSError):
            said = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
    said = " ".join(said.split())
    return ", ".join(
        f"rank {rank}: {text}" for rank, text in enumerate(group.gather_texts(said, among)) if text
    )


def _unequal(sums: Sequence[str]) -> str:
    """Which ranks' model.pt is another than that of most, by its checksum; "" if all are the same."""
    having = [rank for rank, text in enumerate(sums) if text]
    strangers = [having[place] for place in agree.odd_ones_out([sums[rank] for rank in having])]
    return ", ".join(f"rank {rank}: its {MODEL} is not the same as that of other ranks" for rank in strangers)


def _key(manifest: Mapping[str, Any], turn: int) -> Key:
    run = manifest["run"]
    steps, world = files.count(run.get(candidates.STEPS)), files.count(run.get(candidates.WORLD))
    return Key(int(manifest["step"]), steps, turn, world, str(manifest.get("model_sha256", "")))


def _manifests_of(key: Key, place: Path) -> list[dict[str, Any]]:
    """Those on this host that are of this checkpoint."""
    there = files.manifests_in(place, key.step).values()
    return [manifest for manifest in there if _key(manifest, key.turn) == key]


def _gathered(here: Mapping[Key, Collection[int]]) -> dict[Key, set[int]]:
    """The checkpoints that the ranks have found on their hosts, and the ranks with a manifest anywhere."""
    found: dict[Key, set[int]] = {}
    for text in group.gather_texts(json.dumps([[key, ranks] for key, ranks in here.items()])):
        for key, ranks in json.loads(text):
            found.setdefault(Key(*key), set()).update(ranks)
    return found


def _reason(error: Damaged | OSError) -> str:
    if isinstance(error, OSError):
        return f"{error.filename} cannot be read: {error.strerror}"
    return str(error)


def _warn(*texts: str) -> None:
    """Tell on rank 0 what the user should know; it is no reason to stop."""
    if group.rank() == 0:
        for text in texts:
            print(f"trainer: warning: {text}", file=sys.stderr, flush=True)
