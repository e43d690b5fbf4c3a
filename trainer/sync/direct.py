"""The mean of compressed gradients, at the cost of two roundings however many ranks there are.

Every rank owns one share of the bucket. Each rank sends each owner its part of that share, encoded. The
owner adds them up in fp32 in a fixed order, divides, encodes the mean once, and sends that message to all.
Every rank, the owner too, takes the mean from the same bytes. So each value is rounded once on its way to the
owner (the owner's own not even that) and once on its way back; a ring would round at every hop.

In round d every rank sends to the d-th rank after it and hears from the d-th before it, so no link has to
carry two messages at once while others are idle. Shares travel in pieces, and a rank sends only a few pieces
more than it has heard: that keeps the ranks in step, and encoding, adding and the wire all busy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from trainer import group
from trainer.compress import feedback
from trainer.compress.format import Format
from trainer.sync.buckets import pieces, shares
from trainer.sync.overlap import Look

# Measured at 200 Mbit/s and 1 Gbit/s. Smaller pieces cost more calls than they save time; with more of them
# on the way, slow links get messages from several ranks at once, and lose packets.
PIECE_BYTES = 400 << 10
AHEAD_BYTES = 256 << 10


@dataclass(frozen=True)
class Piece:
    """Some values of the bucket and the message that carries them: to their owner, or from it to all."""

    number: int
    values: Tensor
    residual: Tensor | None
    message: Tensor


@dataclass(frozen=True)
class Arrival:
    """A message that will come: a part of an own piece, or the mean of another's."""

    piece: Piece
    message: Tensor
    sender: int
    is_mean: bool


class DirectMean:
    """The mean of `values` (contiguous, one dimension, whole blocks) over all ranks; see overlap.Exchange.

    `residual` is as long as the values, or None for no error feedback. For the own share it holds what the
    mean lost, for the others what their messages lost.
    """

    def __init__(
        self,
        values: Tensor,
        tag: int,
        look: Look,
        format: Format,
        residual: Tensor | None = None,
        count: int | None = None,
        ahead: int | None = None,
    ) -> None:
        self._format, self._tag, self._look = format, tag, look
        self._rank, self._world = group.rank(), group.world()
        spans = shares(len(values), self._world, format.block)
        self._count = count or max(1, -(-format.size(len(spans[0])) // PIECE_BYTES))
        self.tags = 2 * self._count
        piece_bytes = max(1, format.size(len(spans[0])) // self._count)
        self._ahead = ahead or max(2, AHEAD_BYTES // piece_bytes)
        self._shares = [
            [
                Piece(
                    number,
                    values[part.start : part.end],
                    None if residual is None else residual[part.start : part.end],
                    self._message(len(part)),
                )
                for number, part in enumerate(pieces(span, self._count, format.block))
            ]
            for span in spans
        ]
        mine = self._shares[self._rank]
        after = [(self._rank + step) % self._world for step in range(1, self._world)]
        before = [(self._rank - step) % self._world for step in range(1, self._world)]
        self._sends = [(piece, rank, False) for rank in after for piece in self._shares[rank]]
        self._sends += [(piece, rank, True) for rank in after for piece in mine]
        self._arrivals = [
            Arrival(piece, self._message(len(piece.values)), rank, False) for rank in before for piece in mine
        ]
        # A message that was sent to an owner has been read by it before its mean can come.
        self._arrivals += [
            Arrival(piece, self._message(len(piece.values)), rank, True)
            for rank in before
            for piece in self._shares[rank]
        ]
        self.bytes = sum(len(piece.message) for piece, _, _ in self._sends)
        own = sum(len(piece.message) for share in self._shares for piece in share)
        self.held = own + sum(len(arrival.message) for arrival in self._arrivals)
        self._sent = self._heard = 0
        self._receiving: list[dist.Work | None] = []
        self._sending: list[dist.Work | None] = []

    def start(self) -> None:
        """Post every receive, so that whatever comes has a place at once; send the first pieces."""
        self._sent = self._heard = 0
        self._receiving = [
            dist.irecv(arrival.message, arrival.sender, tag=self._tag_of(arrival.piece, arrival.is_mean))
            if len(arrival.message)
            else None
            for arrival in self._arrivals
        ]
        while self._sent < len(self._sends) and self._needed(self._sent) <= 0:
            self._send_next()

    def finish(self) -> Iterator[int]:
        while self._sent < len(self._sends):
            while self._heard < self._needed(self._sent):
                yield 0
                self._hear_next()
            self._send_next()
        while self._heard < len(self._arrivals):
            yield 1
            self._hear_next()
        for sending in self._sending:
            if sending is not None:
                sending.wait()
        self._sending.clear()

    def _needed(self, send: int) -> int:
        """How many arrivals must have been dealt with before this send."""
        piece, _, is_mean = self._sends[send]
        if not is_mean:
            return send + 1 - self._ahead
        parts = (self._world - 2) * self._count + piece.number + 1  # by then the last part of it is here
        return max(parts, send + 1 - 2 * self._count)

    def _send_next(self) -> None:
        piece, rank, is_mean = self._sends[self._sent]
        self._sent += 1
        if not len(piece.values):
            return
        if not is_mean:
            self._look(piece.values)
            feedback.encode(self._format, piece.values, piece.message, piece.residual)
        self._sending.append(dist.isend(piece.message, rank, tag=self._tag_of(piece, is_mean)))

    def _hear_next(self) -> None:
        arrival, receiving = self._arrivals[self._heard], self._receiving[self._heard]
        self._heard += 1
        if receiving is not None:
            receiving.wait()
            if arrival.is_mean:
                self._format.decode(arrival.message, arrival.piece.values)
            else:
                if self._heard <= self._count:  # the first part of this piece: so far it is our own
                    self._look(arrival.piece.values)
                self._format.add(arrival.message, arrival.piece.values)
        if not arrival.is_mean and self._heard > len(self._arrivals) // 2 - self._count:
            self._make_mean(arrival.piece)

    def _make_mean(self, piece: Piece) -> None:
        """All parts of it have been added: encode the mean, and keep what everyone will decode."""
        if len(piece.values):
            piece.values.div_(self._world)
            feedback.encode(self._format, piece.values, piece.message, piece.residual)
            self._format.decode(piece.message, piece.values)

    def _message(self, count: int) -> Tensor:
        return torch.empty(self._format.size(count), dtype=torch.uint8)

    def _tag_of(self, piece: Piece, is_mean: bool) -> int:
        return self._tag + piece.number + (self._count if is_mean else 0)
