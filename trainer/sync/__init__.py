"""How gradients meet: one file a strategy, one dict of names."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from torch import Tensor

STRATEGIES: dict[str, str] = {
    "ring": "trainer.sync.ring:Ring",
    "all-reduce": "trainer.sync.all_reduce:AllReduce",
}
"""Name of each strategy, and where it is as "module:Class": text, so that names cost no import of torch."""


class Strategy(Protocol):
    """A way to average a tensor over all ranks. Each process makes one, after it has joined the group."""

    bytes_sent: int
    """What this rank has sent so far."""

    def average(self, flat: Tensor) -> None:
        """Replace `flat` (one-dimensional, contiguous) by its mean over all ranks, the same bits on each.

        Every rank must call this with as many elements. With one rank it changes nothing.
        """


def create(name: str) -> Strategy:
    """A new strategy by its name in STRATEGIES."""
    module, _, attribute = STRATEGIES[name].partition(":")
    return cast(Strategy, getattr(importlib.import_module(module), attribute)())
