"""Only the largest values, `--topk-ratio` of them, each with its place; the error feedback keeps the rest."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainer.config import Config

SHORT = 1 << 16  # up to so many values a place fits into 16 bits


class TopK:
    """Messages have first the places of the largest magnitudes, then their values in fp32."""

    block = 4  # keeps the values in a message at addresses that fp32 needs
    feedback = True

    def __init__(self, config: Config) -> None:
        self.ratio = config.topk_ratio

    def size(self, count: int) -> int:
        kept, place = self._kept(count), self._place(count)
        return -(-kept * place.itemsize // 4) * 4 + 4 * kept

    def encode(self, values: Tensor, message: Tensor) -> None:
        kept = self._kept(len(values))
        _, places = torch.topk(values.abs(), kept, sorted=False)
        where, what = self._parts(message, len(values))
        what.copy_(values[places])
        where.copy_(places - self._offset(len(values)))

    def decode(self, message: Tensor, values: Tensor) -> None:
        where, what = self._parts(message, len(values))
        values.zero_()
        values[where.long() + self._offset(len(values))] = what

    def add(self, message: Tensor, values: Tensor, factor: float = 1.0) -> None:
        where, what = self._parts(message, len(values))
        values.index_add_(0, where.long() + self._offset(len(values)), what, alpha=factor)

    def _kept(self, count: int) -> int:
        return math.ceil(self.ratio * count)

    def _place(self, count: int) -> torch.dtype:
        return torch.int16 if count <= SHORT else torch.int32

    def _offset(self, count: int) -> int:
        """16 bits are signed: they count from the middle."""
        return SHORT // 2 if count <= SHORT else 0

    def _parts(self, message: Tensor, count: int) -> tuple[Tensor, Tensor]:
        kept, place = self._kept(count), self._place(count)
        values_at = len(message) - 4 * kept
        return message[: kept * place.itemsize].view(place), message[values_at:].view(torch.float32)
