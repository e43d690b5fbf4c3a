"""How gradients shrink on the wire: one file a format, one dict of names."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.compress.format import Format
    from trainer.config import Config

FORMATS: dict[str, str] = {
    "none": "trainer.compress.none:Exact",
    "fp16": "trainer.compress.fp16:FP16",
    "bf16": "trainer.compress.bf16:BF16",
    "fp8-e4m3": "trainer.compress.fp8_e4m3:E4M3",
    "fp8-e5m2": "trainer.compress.fp8_e5m2:E5M2",
    "int8": "trainer.compress.int8:Int8",
    "int4": "trainer.compress.int4:Int4",
    "topk": "trainer.compress.topk:TopK",
    "powersgd": "trainer.compress.powersgd:PowerSGD",
}
"""Name of each format, and where it is as "module:Class": text, so that names cost no import of torch."""

AUTO = "auto"
"""Stands for the format of AUTO_CHOICES that turns out fastest in the first steps."""

AUTO_CHOICES = ("none", "fp16", "int8")
"""What `auto` chooses from, the most faithful first; nothing that could cost accuracy."""

AUTO_TRIES = 4
"""Steps with each of them, of which the first does not count."""

AUTO_STEPS = AUTO_TRIES * len(AUTO_CHOICES)
"""What `auto` takes to choose."""

LOW_RANK = "powersgd"
"""The one format that is no code for values but a product of two matrices; it has an exchange of its own."""


def create(name: str, config: Config) -> Format:
    """A new format by its name in FORMATS, with the options that `config` has for it."""
    made: Format = load(name)(config)
    return made


def load(name: str) -> Any:
    module, _, attribute = FORMATS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
