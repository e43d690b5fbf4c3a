"""torch's DistributedDataParallel, by the book: the competitor.

It copies gradients into buckets of its own and copies the mean back, so the flat gradients stay what they
are. It waits for communication inside of the backward pass; there is nothing left to wait for afterwards. Its
buffers are not broadcast: batch-norm statistics are treated as with every other strategy.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from trainer.config import Config
from trainer.flat import Flat
from trainer.sync.strategy import Strategy, finite


class DDP(Strategy):
    """Wraps the model; `--compress fp16` is torch's fp16 hook."""

    settles = True  # it arranges its buckets anew in the order in which the first step filled them

    def __init__(self, model: nn.Module, flat: Flat, config: Config) -> None:
        super().__init__(model, flat, config)
        for slot in flat.slots:
            if slot.parameter.requires_grad:
                # Called with this rank's own gradient, before DDP has it.
                look = functools.partial(self._look, slot.name)
                slot.parameter.register_hook(look)  # type: ignore[no-untyped-call]  # torch's
        known = inspect.signature(DistributedDataParallel).parameters
        # Newer versions of torch warn about the name that older ones know.
        name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        options: dict[str, Any] = {name: False}
        self.model = parallel = DistributedDataParallel(model, **options)
        wire_bytes = flat.gradients.nbytes
        if config.compress == "fp16":
            parallel.register_comm_hook(None, fp16_compress_hook)
            wire_bytes = 2 * len(flat.gradients)
        # It all-reduces, which in gloo is a ring.
        self._bytes = 2 * (self.world - 1) * wire_bytes // self.world

    def meet(self) -> None:
        self.bytes_sent += self._bytes

    def _look(self, name: str, gradient: Tensor) -> None:
        if not self._bad and not finite(gradient):
            self._bad = name
