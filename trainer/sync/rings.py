"""The bandwidth-optimal ring: reduce-scatter, then all-gather, each rank talking to its two neighbours only.

The bucket is cut into as many chunks as there are ranks. In the first lap every chunk travels once around the
ring and each rank adds its own part to it, so that each rank ends up with the finished sum of one chunk. In
the second lap the finished chunks travel around. Each rank sends 2 (N-1)/N of the bucket in all, however many
ranks there are.

Chunks travel in pieces: while one is on the wire, the one before it is being added and passed on.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from trainer import group
from trainer.sync.buckets import pieces, shares
from trainer.sync.overlap import Look

# Measured at 200 Mbit/s, 1 Gbit/s and without a limit: every message costs a change of threads on either
# side, and adding a piece of this size is short beside its time on the wire.
PIECE_BYTES = 3 << 19


class RingMean:
    """The mean of `values` (contiguous, one dimension) over all ranks; see overlap.Exchange."""

    def __init__(self, values: Tensor, tag: int, look: Look, count: int | None = None) -> None:
        self._rank, self._world = group.rank(), group.world()
        self._left, self._right = (self._rank - 1) % self._world, (self._rank + 1) % self._world
        chunks = shares(len(values), self._world)
        count = count or max(1, -(-len(chunks[0]) * values.itemsize // PIECE_BYTES))
        self._pieces = [
            [values[piece.start : piece.end] for piece in pieces(chunk, count) if len(piece)]
            for chunk in chunks
        ]
        self._tag, self._count, self._look = tag, count, look
        self.tags = 2 * self._world * count
        # What arrives in the first lap must not land on our own part: it has yet to be added to it.
        self._inbox = [
            [torch.empty_like(piece) for piece in self._chunk(-step - 1)] for step in range(self._world - 1)
        ]
        self.held = sum(place.nbytes for places in self._inbox for place in places)
        self.bytes = sum(
            piece.nbytes
            for step in range(self._world - 1)
            for piece in self._chunk(-step) + self._chunk(1 - step)
        )
        self._receiving: list[dist.Work] = []
        self._sending: list[dist.Work] = []

    def start(self) -> None:
        """Post every receive, so that whatever comes has a place at once, and send the own chunk."""
        self._receiving = []
        for step in range(self._world - 1):
            self._receive(self._inbox[step], step)
        # Finished chunks replace what was there. They cannot come too early: each has passed through here.
        for step in range(self._world - 1):
            self._receive(self._chunk(-step), self._world - 1 + step)
        for number, piece in enumerate(self._chunk(0)):
            self._look(piece)
            self._send(piece, 0, number)

    def finish(self) -> Iterator[int]:
        arrivals = iter(self._receiving)
        # First lap: in each step one chunk goes right and the one that comes from the left grows.
        for step in range(self._world - 1):
            last = step == self._world - 2
            for number, growing in enumerate(self._chunk(-step - 1)):
                yield 0
                next(arrivals).wait()
                self._look(growing)
                growing.add_(self._inbox[step][number])
                if last:
                    # Only this rank divides it: the others copy its bytes, so all end with the same ones.
                    growing.div_(self._world)
                self._send(growing, step + 1, number)
        # Second lap: finished chunks go around, except to where they came from.
        for step in range(self._world - 1):
            last = step == self._world - 2
            for number, finished in enumerate(self._chunk(-step)):
                yield 1 if last else 0
                next(arrivals).wait()
                if not last:
                    self._send(finished, self._world + step, number)
        for sending in self._sending:
            sending.wait()
        self._sending.clear()

    def _chunk(self, offset: int) -> list[Tensor]:
        """The pieces of the chunk that is so many places after our own."""
        return self._pieces[(self._rank + offset) % self._world]

    def _receive(self, places: list[Tensor], step: int) -> None:
        for number, place in enumerate(places):
            work = dist.irecv(place, self._left, tag=self._tag + step * self._count + number)
            assert work is not None  # this rank is in the group
            self._receiving.append(work)

    def _send(self, piece: Tensor, step: int, number: int) -> None:
        # The tag keeps the steps apart, also between two ranks, where left and right are the same neighbour.
        work = dist.isend(piece, self._right, tag=self._tag + step * self._count + number)
        assert work is not None  # this rank is in the group
        self._sending.append(work)
