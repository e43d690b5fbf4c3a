"""The master-worker way: rank 0 adds everything up and tells everyone. Its link carries it all."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor, nn

from trainer.config import Config
from trainer.flat import Flat
from trainer.sync.buckets import Span
from trainer.sync.overlap import Look, Overlapping


class ReduceBroadcast(Overlapping):
    """`reduce` to rank 0, divide there, `broadcast`, while the backward pass still runs."""

    def __init__(self, model: nn.Module, flat: Flat, config: Config) -> None:
        super().__init__(model, flat, config)
        buckets = self.buckets(Span(0, len(flat.gradients)))
        parts = [(span, flat.gradients[span.start : span.end]) for span in buckets]
        self.use([(span, Told(part, self.look, self.rank, self.world)) for span, part in parts])


class Told:
    """One bucket: see overlap.Exchange."""

    def __init__(self, values: Tensor, look: Look, rank: int, world: int) -> None:
        self.values = values
        self.held = 0
        self._look = look
        # The backend does not say what it sends. A master with workers sends everyone the whole mean, and
        # gets everyone's whole gradient.
        self.bytes = values.nbytes * (world - 1 if rank == 0 else 1)
        self._rank, self._world = rank, world

    def start(self) -> None:
        """Nothing: all ranks must call the backend in one order, and they get here at different times."""

    def finish(self) -> Iterator[int]:
        yield 0
        self._look(self.values)
        dist.reduce(self.values, dst=0)
        if self._rank == 0:
            self.values.div_(self._world)  # only here: the others copy its bytes
        dist.broadcast(self.values, src=0)
