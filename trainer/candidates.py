"""Pure: which checkpoint a run can go on from, and how, judged by what every rank has found of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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

WORLD, STEPS = "--world-size", "steps in all"
BY_WORLD = (WORLD, STEPS)
"""What another number of ranks changes in the description of a run."""


class Key(NamedTuple):
    """Which checkpoint: its step, and of how many, for another number of ranks counts other steps."""

    step: int
    steps: int | None  # None: no manifest tells
    turn: int = 0  # of those in one folder that have the number of this step, from 0

    @property
    def place(self) -> tuple[int, int]:
        """What its folder is called after."""
        return self.step, self.turn

    @property
    def age(self) -> tuple[Fraction, int, int]:
        """More of what is newer: of what is further, and where that is the same, of what came later."""
        return Fraction(self.step, self.steps or 1), self.step, self.turn


class Look(NamedTuple):
    """What a rank has found of a checkpoint on its host."""

    kind: str  # of its own part
    text: str = ""  # what is damaged
    difference: str = ""  # what this run has otherwise than the one that saved it
    is_resized: bool = False  # and that is nothing but the number of ranks
    is_own: bool = False  # an earlier attempt of this very run saved it
    has_model: bool = False  # a manifest here lists model.pt
    model_sha256: str = ""  # of the model.pt that its own part belongs to; "" if that is not told


def newest_first(found: Iterable[Key]) -> list[Key]:
    """All of them once. Where some rank knows of how many steps a step is, that counts for all."""
    keys = set(found)
    known = {key.place for key in keys if key.steps is not None}
    kept = [key for key in keys if key.steps is not None or key.place not in known]
    return sorted(kept, key=lambda key: key.age, reverse=True)


def verdict(key: Key, looks: Sequence[Look], is_later: bool) -> str:
    """How to go on if its model.pt is whole; InputError if it is of another run.

    `is_later` says that this is a later attempt of a run. What an earlier one saved may then be incomplete,
    or of another number of ranks.
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
    return AFRESH if is_later and any(look.is_own and look.has_model for look in looks) else UNUSABLE


def strangers(looks: Sequence[Look], model_sha256: str) -> list[int]:
    """The ranks whose own part is whole, but was saved beside another model.pt than this."""
    return [
        rank
        for rank, look in enumerate(looks)
        if look.kind == WHOLE and look.model_sha256 not in ("", model_sha256)
    ]


def without_part(looks: Sequence[Look], model_sha256: str) -> list[int]:
    """The ranks whose own part cannot be taken."""
    missing = [rank for rank, look in enumerate(looks) if look.kind != WHOLE]
    return sorted([*missing, *strangers(looks, model_sha256)])


def problem(
    key: Key, looks: Sequence[Look], models: Sequence[tuple[int, str]] = (), model_sha256: str = ""
) -> str:
    """Why this checkpoint cannot be taken as it is.

    `models` is what ranks say of a model.pt that is not whole, `model_sha256` the checksum of one that is.
    """
    told = list(models)
    if not any(look.difference for look in looks):  # else nobody needs the ranks' own parts
        told += [
            (rank, look.text or WORDS[look.kind]) for rank, look in enumerate(looks) if look.kind != WHOLE
        ]
        told += [(rank, SAVED_APART) for rank in strangers(looks, model_sha256) if model_sha256]
        if not models and not is_lost(looks) and {look.kind for look in looks} != {WHOLE}:
            return f"the checkpoint of step {key.step} was not finished"
    said = ", ".join(f"rank {rank}: {text}" for rank, text in sorted(told))
    return f"the checkpoint of step {key.step} is not whole: {said or NOWHERE}"


def copy_taken(key: Key, sender: int, models: Sequence[tuple[int, str]]) -> str:
    """What to say when the model.pt of other ranks is not whole, and that of `sender` is."""
    said = ", ".join(f"rank {rank}: {text}" for rank, text in models)
    return f"the model of step {key.step} is taken from rank {sender}, for it is not whole elsewhere: {said}"


def is_lost(looks: Sequence[Look]) -> bool:
    """Whether all ranks had their part once, and one has it no more.

    A rank with a manifest wrote that after all the others had written their files.
    """
    kinds = {look.kind for look in looks}
    finished = WHOLE in kinds or any(look.difference for look in looks)
    return DAMAGED in kinds or (finished and ABSENT in kinds)


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
