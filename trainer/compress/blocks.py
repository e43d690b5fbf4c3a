"""Narrow codes with a scale for every block of 256 values, which is what the narrow formats share.

A message is one fp32 scale a block, then the codes. The scale maps the largest magnitude of its block onto
the largest code, so nothing is ever too large, and a block of small values loses nothing to large ones
elsewhere.

Where a block has an infinity or a NaN its scale is not finite, and so is all that the block decodes to.
Scales are at least the smallest normal fp32 number: below that a division by them would overflow. So a block
of zeros decodes to zeros, and what lies below 1e-38 is rounded to multiples of that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.config import Config

BLOCK = 256
TINY = torch.finfo(torch.float32).tiny
SCALE_BYTES = 4


class Blocks:
    """The shared part; a format adds how scaled values become codes (`pack`) and back (`unpack`)."""

    block = BLOCK
    feedback = True
    limit: float  # the largest magnitude that has a code
    code_bytes: int  # of all codes of a block

    def __init__(self, _: Config) -> None:
        self._scratch = torch.empty(0, BLOCK)

    def size(self, count: int) -> int:
        return _blocks(count) * (SCALE_BYTES + self.code_bytes)

    def encode(self, values: Tensor, message: Tensor) -> None:
        rows = values.view(-1, BLOCK)
        scales, codes = self._parts(message, len(rows))
        # The largest magnitude; faster than to write all magnitudes down and look for it there.
        torch.amax(rows, dim=1, keepdim=True, out=scales)
        torch.maximum(scales, rows.amin(dim=1, keepdim=True).neg_(), out=scales)
        # A hair below 1 / limit, so that limit * scale cannot be rounded up to infinity.
        scales.mul_((1 - 2**-22) / self.limit).clamp_(min=TINY)
        work = self._work(len(rows))
        torch.mul(rows, scales.reciprocal(), out=work)
        self.pack(work, codes)

    def decode(self, message: Tensor, values: Tensor) -> None:
        rows = values.view(-1, BLOCK)
        scales, codes = self._parts(message, len(rows))
        self.unpack(codes, rows)
        rows.mul_(scales)

    def add(self, message: Tensor, values: Tensor, factor: float = 1.0) -> None:
        rows = values.view(-1, BLOCK)
        scales, codes = self._parts(message, len(rows))
        work = self._work(len(rows))
        self.unpack(codes, work)
        rows.addcmul_(work, scales, value=factor)

    def pack(self, scaled: Tensor, codes: Tensor) -> None:
        """Write values between -limit and limit (rows of a block each, free to be changed) as codes."""
        raise NotImplementedError

    def unpack(self, codes: Tensor, scaled: Tensor) -> None:
        """The values that the codes stand for; exact."""
        raise NotImplementedError

    def _parts(self, message: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        scales = message[: SCALE_BYTES * rows].view(torch.float32).view(rows, 1)
        return scales, message[SCALE_BYTES * rows :].view(rows, self.code_bytes)

    def _work(self, rows: int) -> Tensor:
        if len(self._scratch) < rows:
            self._scratch = torch.empty(rows, BLOCK)
        return self._scratch[:rows]


def _blocks(count: int) -> int:
    if count % BLOCK:
        raise ValueError(f"{count} values are not whole blocks of {BLOCK}")
    return count // BLOCK
