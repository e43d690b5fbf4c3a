"""The backend's own all-reduce: one call, the yardstick for the ring."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from trainer import group


class AllReduce:
    """Averages with `torch.distributed.all_reduce`."""

    def __init__(self) -> None:
        self.bytes_sent = 0
        self._world = group.world()

    def average(self, flat: Tensor) -> None:
        if self._world == 1 or not len(flat):
            return
        dist.all_reduce(flat)
        flat.div_(self._world)
        # The backend does not say what it sent; gloo's all-reduce is a ring as well, which makes it this
        # much.
        self.bytes_sent += 2 * (self._world - 1) * flat.nbytes // self._world
