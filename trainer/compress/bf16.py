"""bfloat16: the upper half of an fp32 number, rounded. It has the range of fp32 and needs no scale."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.config import Config


class BF16:
    """2 bytes a value, of which 8 bits are precise."""

    block = 1
    feedback = False

    def __init__(self, config: Config) -> None:
        pass

    def size(self, count: int) -> int:
        return 2 * count

    def encode(self, values: Tensor, message: Tensor) -> None:
        message.view(torch.bfloat16).copy_(values)

    def decode(self, message: Tensor, values: Tensor) -> None:
        values.copy_(message.view(torch.bfloat16))

    def add(self, message: Tensor, values: Tensor, factor: float = 1.0) -> None:
        values.add_(message.view(torch.bfloat16), alpha=factor)
