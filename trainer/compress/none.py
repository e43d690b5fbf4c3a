"""Values as they are."""

from __future__ import annotations

from torch import Tensor

from trainer.config import Config


class Exact:
    """A message has the bytes of the values themselves."""

    block = 1
    feedback = False

    def __init__(self, config: Config) -> None:
        pass

    def size(self, count: int) -> int:
        return 4 * count

    def encode(self, values: Tensor, message: Tensor) -> None:
        message.view(values.dtype).copy_(values)

    def decode(self, message: Tensor, values: Tensor) -> None:
        values.copy_(message.view(values.dtype))

    def add(self, message: Tensor, values: Tensor, factor: float = 1.0) -> None:
        values.add_(message.view(values.dtype), alpha=factor)
