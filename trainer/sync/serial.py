"""One process alone: no communication. The yardstick for all others."""

from __future__ import annotations

from torch import nn

from trainer.config import Config
from trainer.errors import InputError
from trainer.flat import Flat
from trainer.sync.strategy import Strategy


class Serial(Strategy):
    """The mean over one rank is its own gradient."""

    def __init__(self, model: nn.Module, flat: Flat, config: Config) -> None:
        super().__init__(model, flat, config)
        if self.world > 1:
            raise InputError(f"--sync serial is for one process, and this is one of {self.world}")

    def meet(self) -> None:
        self.look(self.flat.gradients)
