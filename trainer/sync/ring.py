"""The bandwidth-optimal ring: reduce-scatter, then all-gather, each rank talking to its two neighbours only.

The buffer is cut into as many chunks as there are ranks. In the first lap every chunk travels once around the
ring and each rank adds its own part to it, so that each rank ends up with the finished sum of one chunk. In
the second lap the finished chunks travel around. Each rank sends 2 (N-1)/N of the buffer in all, however many
ranks there are.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from trainer import group


class Ring:
    """Averages by passing chunks to the right and taking chunks from the left."""

    def __init__(self) -> None:
        self.bytes_sent = 0
        self._rank = group.rank()
        self._world = group.world()
        self._left = (self._rank - 1) % self._world
        self._right = (self._rank + 1) % self._world

    def average(self, flat: Tensor) -> None:
        rank, world = self._rank, self._world
        chunks = flat.tensor_split(world)  # views; with fewer elements than ranks some are empty
        # What arrives must not land on our own part: it has yet to be added to it. The first chunk is the
        # largest.
        incoming = torch.empty_like(chunks[0])

        # First lap, reduce-scatter: in each step one chunk goes right and the one that comes from the left
        # grows.
        for step in range(world - 1):
            growing = chunks[(rank - step - 1) % world]
            arrived = incoming[: len(growing)]
            self._pass(chunks[(rank - step) % world], arrived, tag=step)
            growing += arrived

        # The last chunk that grew here is now the sum over all ranks. Only this rank divides it: the others
        # copy its bytes, which makes all ranks end with the same ones.
        chunks[(rank + 1) % world].div_(world)

        # Second lap, all-gather: finished chunks go around and replace what was there.
        for step in range(world - 1):
            self._pass(chunks[(rank + 1 - step) % world], chunks[(rank - step) % world], tag=world + step)

    def _pass(self, outgoing: Tensor, arriving: Tensor, tag: int) -> None:
        """Send one chunk right while one comes in from the left. Empty ones stay: both ends know them.

        The receive is posted first, so that what arrives has a place at once. The tag keeps the steps apart,
        also between two ranks, where left and right are the same neighbour.
        """
        receiving = dist.irecv(arriving, self._left, tag=tag) if len(arriving) else None
        sending = dist.isend(outgoing, self._right, tag=tag) if len(outgoing) else None
        for transfer in (receiving, sending):
            if transfer is not None:
                transfer.wait()
        self.bytes_sent += outgoing.nbytes
