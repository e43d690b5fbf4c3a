"""Pure: which checkpoint a run can go on from, and how, judged by what every rank has found of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from trainer.errors import InputError

WHOLE, DAMAGED, UNFINISHED, ABSENT = "whole", "damaged", "unfinished", "absent"
"""Of a rank's own part; unfinished: without manifest, absent: without a trace."""

EXACT, AFRESH, RESIZED, UNUSABLE = "exact", "afresh", "resized", "unusable"
"""With every rank's own part; without that of some ranks; with another number of ranks; not at all."""

WORDS = {DAMAGED: "", UNFINISHED: "it was not finished", ABSENT: "its part is not on its host"}
SAVED_APART = "its part was saved beside another model.pt"
NOWHERE = "its model.pt is on none of these hosts"

PARTS = "parts_sha256"  # in a manifest: the checksums of all ranks' parts, by rank
WORLD, STEPS = "--world-size", "steps in all"
BY_WORLD = (WORLD, STEPS)
"""What another number of ranks changes in the description of a run."""


class Key(NamedTuple):
    """Which checkpoint: its step, and of how many, for another number of ranks counts other steps; and who
    saved which model, for attempts on other hosts may have come to the same step."""

    step: int
    steps: int | None  # None: no manifest tells
    turn: int = 0  # of those in one folder that have the number of this step, from 0
    world: int | None = None  # how many ranks saved it
    model: str = ""  # the checksum of its model.pt; "" if no manifest tells

    @property
    def place(self) -> tuple[int, int]:
        """What its folder is called after."""
        return self.step, self.turn

    @property
    def age(self) -> tuple[Fraction, int, int]:
        """More of what is newer: of what is further, and where that is the same, of what came later."""
        return Fraction(self.step, self.steps or 1), self.step, self.turn

    @property
    def is_told(self) -> bool:
        """Whether it is known from a manifest, and not by the name of its folder alone."""
        return self != Key(self.step, None, self.turn)

    def share(self, ranks: Collection[int]) -> Fraction:
        """How much of it is there, if these ranks have a manifest of it: 1 if it is complete."""
        return Fraction(len(ranks), self.world or 1)


class Look(NamedTuple):
    """What a rank has found of a checkpoint on its host."""

    kind: str  # of its own part
    text: str = ""  # what is damaged
    difference: str = ""  # what this run has otherwise than the one that saved it
    is_resized: bool = False  # and that is nothing but the number of ranks
    is_own: bool = False  # an earlier attempt of this very run saved it
    has_manifest: bool = False  # of any rank
    has_model: bool = False  # a manifest here lists model.pt
    sha256: str = ""  # of an unfinished part, where somebody has a manifest
    threads: str = ""  # of torch, if its part was saved with another number of them: which, and which now


def newest_first(found: Mapping[Key, Collection[int]]) -> list[Key]:
    """These checkpoints, of which these ranks have a manifest. Where some manifest tells what a step is, that
    counts for all; and of those that are as new, the one of which more is there comes first."""
    told = {key.place for key in found if key.is_told}
    kept = [key for key in found if key.is_told or key.place not in told]
    return sorted(
        kept, key=lambda key: (key.age, key.share(found[key]), key.world or 0, key.model), reverse=True
    )


def verdict(key: Key, looks: Sequence[Look], is_later: bool) -> str:
    """How to go on if its model.pt is whole; InputError if it is of another run.

    `is_later` says that this is a later attempt of a run. What an earlier one saved may then have lost parts,
    or be of another number of ranks. One that was not finished has lost nothing: one before it leads to the
    same bits.
    """
    for look in looks:
        if look.difference and not (is_later and look.is_own and look.is_resized):
            raise InputError(
                f"the checkpoint of step {key.step} was made with {look.difference}: go on with the same, or "
                "start afresh with another --checkpoint-dir, or replace it with --resume never"
            )
    if any(look.difference for look in looks):
        return RESIZED if any(look.has_model for look in looks) else UNUSABLE
    if all(look.kind == WHOLE for look in looks):
        return EXACT
    has_model = any(look.is_own and look.has_model for look in looks)
    return AFRESH if is_later and is_lost(looks) and has_model else UNUSABLE


def corrected(looks: Sequence[Look], ranks: Collection[int]) -> list[Look]:
    """What the ranks have found, now that it is known which of them have written their part elsewhere: those
    with a manifest on another host, and strangers. What is begun on their host now is of another attempt."""
    return [
        look._replace(kind=ABSENT) if look.kind == UNFINISHED and rank in ranks else look
        for rank, look in enumerate(looks)
    ]


def strangers(looks: Sequence[Look], manifest: Mapping[str, Any]) -> list[int]:
    """The ranks whose unfinished part is not the one that they wrote of the checkpoint of this manifest.
    A manifest from before parts were listed tells of none."""
    listed = manifest.get(PARTS)
    told = enumerate(zip(looks, listed, strict=False)) if isinstance(listed, list) else ()
    return [rank for rank, (look, sha256) in told if look.kind == UNFINISHED and look.sha256 != sha256]


def without_part(looks: Sequence[Look]) -> list[int]:
    """The ranks whose own part cannot be taken."""
    return [rank for rank, look in enumerate(looks) if look.kind != WHOLE]


def problem(key: Key, looks: Sequence[Look], models: Sequence[tuple[int, str]] = ()) -> str:
    """Why this checkpoint cannot be taken as it is; `models` is what ranks say of a model.pt that is not
    whole."""
    told = list(models)
    if not any(look.difference for look in looks):  # else nobody needs the ranks' own parts
        told += [
            (rank, look.text or WORDS[look.kind]) for rank, look in enumerate(looks) if look.kind != WHOLE
        ]
        if not models and not is_lost(looks) and {look.kind for look in looks} != {WHOLE}:
            return f"the checkpoint of step {key.step} was not finished"
    said = ", ".join(f"rank {rank}: {text}" for rank, text in sorted(told))
    return f"the checkpoint of step {key.step} is not whole: {said or NOWHERE}"


def copy_taken(key: Key, sender: int, models: Sequence[tuple[int, str]]) -> str:
    """What to say when the model.pt of other ranks is not whole, and that of `sender` is."""
    said = ", ".join(f"rank {rank}: {text}" for rank, text in models)
    return f"the model of step {key.step} is taken from rank {sender}, for it is not whole elsewhere: {said}"


def other_threads(key: Key, looks: Sequence[Look]) -> str:
    """What to say when ranks go on with another number of threads than they had; "" if none does."""
    changed: dict[str, list[str]] = {}
    for rank, look in enumerate(looks):
        if look.threads:
            changed.setdefault(look.threads, []).append(str(rank))
    said = ", ".join(f"rank {' and '.join(ranks)}: {threads}" for threads, ranks in changed.items())
    return (
        f"step {key.step} was saved with another number of threads ({said}): bits may differ" if said else ""
    )


def is_lost(looks: Sequence[Look]) -> bool:
    """Whether all ranks had their part once, and one has it no more.

    A rank with a manifest wrote that after all the others had written their files.
    """
    kinds = {look.kind for look in looks}
    return DAMAGED in kinds or (ABSENT in kinds and any(look.has_manifest for look in looks))


def difference(manifest: Mapping[str, Any], run: Mapping[str, Any], but: Sequence[str] = ()) -> str:
    """The first thing that this run has otherwise than the one of the manifest; "" if all is the same."""
    theirs = manifest["run"]
    for name, ours in run.items():
        if name in theirs and name not in but and theirs[name] != ours:
            return f"{name} {theirs[name]!r:.60}, not {ours!r}"
    return ""


def writers(hosts: Sequence[str], copies: int) -> list[int]:
    """The ranks that write model.pt: rank 0, and the first one on each of the next hosts."""
    first = {host: rank for rank, host in reversed(list(enumerate(hosts)))}
    return sorted(first.values())[: 1 + copies]


def ported(step: int, steps: int, steps_now: int) -> int:
    """As far into `steps_now` as `step` is into `steps`."""
    return step * steps_now // steps


def epoch_of(step: int, per_epoch: int, epochs: int) -> int:
    """The epoch, from 1, that goes on when so many steps are done; the last one when all are."""
    return min(step // per_epoch, epochs - 1) + 1
