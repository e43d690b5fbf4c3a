"""The backend's own all-reduce, a bucket at a time: the yardstick for the ring."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor, nn

from trainer.config import Config
from trainer.flat import Flat
from trainer.sync.buckets import Span
from trainer.sync.overlap import Look, Overlapping


class AllReduce(Overlapping):
    """Averages with `torch.distributed.all_reduce`, while the backward pass still runs."""

    def __init__(self, model: nn.Module, flat: Flat, config: Config) -> None:
        super().__init__(model, flat, config)
        buckets = self.buckets(Span(0, len(flat.gradients)))
        self.use(
            [(span, Summed(flat.gradients[span.start : span.end], self.look, self.world)) for span in buckets]
        )


class Summed:
    """One bucket: see overlap.Exchange."""

    def __init__(self, values: Tensor, look: Look, world: int) -> None:
        self.values = values
        self.held = 0
        self._look = look
        # The backend does not say what it sends; gloo's all-reduce is a ring as well, which makes it this.
        self.bytes = 2 * (world - 1) * values.nbytes // world
        self._world = world
        self._work: dist.Work | None = None

    def start(self) -> None:
        self._look(self.values)
        self._work = dist.all_reduce(self.values, async_op=True)

    def finish(self) -> Iterator[int]:
        yield 0
        assert self._work is not None
        self._work.wait()
        self.values.div_(self._world)
