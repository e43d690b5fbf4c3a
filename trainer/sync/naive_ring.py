"""The two-ring algorithm people start with: the sum goes round once to be made and once to be told.

At any moment one rank sends one message and all others wait, so it takes N times as long as the ring that
keeps every link busy. Here to be compared with: a parameter at a time, after the backward pass, as it is
usually written.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.config import Config
from trainer.flat import Flat
from trainer.sync.strategy import Strategy


class NaiveRing(Strategy):
    """Averages one parameter after the other, one rank after the other."""

    def __init__(self, model: nn.Module, flat: Flat, config: Config) -> None:
        super().__init__(model, flat, config)
        # Never the own gradient: what arrives would replace it before it was added.
        largest = max((slot.end - slot.start for slot in flat.slots), default=0)
        self._incoming = torch.empty(largest, dtype=flat.gradients.dtype)

    def meet(self) -> None:
        self.look(self.flat.gradients)
        for slot in self.flat.slots:
            if slot.end > slot.start:
                self._average(self.flat.gradients[slot.start : slot.end])

    def _average(self, gradient: Tensor) -> None:
        rank, last = self.rank, self.world - 1
        incoming = self._incoming[: len(gradient)]

        # First ring: the sum grows from rank 0 to the last rank, which sends it to rank 0.
        if rank > 0:
            dist.recv(incoming, rank - 1)
            gradient.add_(incoming)
        self._send(gradient, (rank + 1) % self.world)

        # Second ring: the sum goes from rank 0 on, to all but the last rank, which has it.
        if rank < last:
            dist.recv(incoming, (rank - 1) % self.world)
            gradient.copy_(incoming)
            if rank + 1 < last:
                self._send(gradient, rank + 1)
        gradient.div_(self.world)

    def _send(self, gradient: Tensor, to: int) -> None:
        dist.send(gradient, to)
        self.bytes_sent += gradient.nbytes
