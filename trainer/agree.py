"""What all ranks must have in common: options and code before the first step, parameters at any time."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer import group
from trainer.config import Config
from trainer.errors import InputError, TrainerError

COMPARED = (
    "sync", "compress", "topk_ratio", "powersgd_rank", "error_feedback", "on_nonfinite", "bucket_mb", "model",
    "data", "epochs", "steps", "batch_size", "lr", "momentum", "seed", "check_sync", "device", "backend",
    "checkpoint_every", "checkpoint_copies", "resume",
)  # fmt: skip


def on_options(config: Config, training_images: int) -> None:
    """Return if all ranks were told the same and run the same code; InputError names who differs, and how."""
    own = (
        options(config)
        | {
            "RINGCTL_FIRST_WORLD": config.first_world,  # the learning rate depends on it
            "training images": training_images,
            "the trainer's code": code_digest()[:12],
        }
    )
    told = [json.loads(text) for text in group.gather_texts(json.dumps(own))]
    difference = first_difference(told)
    if difference:
        raise InputError(f"{difference}: start all ranks with the same options and the same code")


def options(config: Config) -> dict[str, Any]:
    """The options that must be the same on all ranks."""
    own = {f"--{name.replace('_', '-')}": getattr(config, name) for name in COMPARED}
    for name, words in ("--data", ("mini", "download")), ("--resume", ("auto", "never")):
        if own[name] not in words:
            own[name] = "a folder"  # may be another one on each host
    return own


def on_parameters(sha256: str, step: int) -> None:
    """Return if all ranks hold the same parameters; TrainerError names who drifted away."""
    strangers = odd_ones_out(group.gather_texts(sha256))
    if strangers:
        names = " and ".join(map(str, strangers))
        raise TrainerError(
            f"rank {names} drifted: after step {step} its parameters differ from the other ranks'. "
            "Compare the processors, the torch versions and the memory of the hosts"
        )


def first_difference(told: Sequence[Mapping[str, Any]]) -> str:
    """Which rank was told something else than most, and what; "" if none was."""
    for what in told[0]:
        values = [str(own.get(what)) for own in told]
        strangers = odd_ones_out(values)
        if strangers:
            usual = next(value for rank, value in enumerate(values) if rank not in strangers)
            others = "rank 0 has" if len(told) == 2 else "the others have"
            return f"rank {strangers[0]} has {what} {values[strangers[0]]} where {others} {usual}"
    return ""


def odd_ones_out(values: Sequence[str]) -> list[int]:
    """The ranks whose value is not that of most; where two are as frequent, rank 0's counts."""
    frequent = Counter(values)  # keeps the order in which they come
    usual = max(frequent, key=lambda value: frequent[value])
    return [rank for rank, value in enumerate(values) if value != usual]


def code_digest() -> str:
    """Hash of the trainer's own files."""
    here = Path(__file__).resolve().parent
    digest = hashlib.sha256()
    for path in sorted(here.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(here).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()
