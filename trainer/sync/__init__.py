"""How gradients meet: one file a strategy, one dict of names."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, NamedTuple

from trainer.compress import AUTO, FORMATS

if TYPE_CHECKING:
    from torch import nn

    from trainer.config import Config
    from trainer.flat import Flat
    from trainer.sync.strategy import Strategy


class Known(NamedTuple):
    """What can be said of a strategy without importing torch."""

    where: str  # "module:Class"
    formats: tuple[str, ...] = ("none",)  # that it can carry
    why: str = ""  # it cannot carry the others
    devices: tuple[str, ...] = ("cpu", "cuda")


STRATEGIES: dict[str, Known] = {
    "serial": Known("trainer.sync.serial:Serial", why="one process alone sends nothing"),
    "naive-ring": Known(
        "trainer.sync.naive_ring:NaiveRing",
        why="it would round the growing sum again at every rank",
        devices=("cpu",),
    ),
    "ring": Known("trainer.sync.ring:Ring", formats=(*FORMATS, AUTO), devices=("cpu",)),
    "all-reduce": Known("trainer.sync.all_reduce:AllReduce", why="the backend adds up what it is sent"),
    "reduce-broadcast": Known(
        "trainer.sync.reduce_broadcast:ReduceBroadcast", why="the backend adds up what it is sent"
    ),
    "ddp": Known(
        "trainer.sync.ddp:DDP", formats=("none", "fp16"), why="of torch's own hooks only that one is offered"
    ),
}
"""Each strategy by its name."""


def create(model: nn.Module, flat: Flat, config: Config) -> Strategy:
    """The strategy that `config` asks for; alone, every one of them is `serial`."""
    from trainer import group

    name = config.sync if group.world() > 1 else "serial"
    module, _, attribute = STRATEGIES[name].where.partition(":")
    made: Strategy = getattr(importlib.import_module(module), attribute)(model, flat, config)
    return made
