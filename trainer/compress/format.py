"""What a format is: fp32 values -> a message of bytes of known length -> fp32 values."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from trainer.config import Config


class Format(Protocol):
    """A way to write fp32 values into fewer bytes.

    The length of a message depends on the number of values alone, so that a receive can be posted before the
    message is written. Decoding takes single exactly rounded operations on the bytes of the message: every
    machine decodes the same bytes to the same bits. A value that is not finite makes its block decode to
    values that are not finite, never to ordinary ones.
    """

    block: int
    """Values are taken in groups of this many; every count given to a method is a multiple of it."""

    feedback: bool
    """Whether what a message loses is worth adding to the next one (see feedback.py)."""

    def __init__(self, config: Config) -> None: ...

    def size(self, count: int) -> int:
        """The bytes of a message of `count` values."""

    def encode(self, values: Tensor, message: Tensor) -> None:
        """Write `values` into `message` (uint8, as long as `size` says)."""

    def decode(self, message: Tensor, values: Tensor) -> None:
        """Replace `values` by what the message says."""

    def add(self, message: Tensor, values: Tensor, factor: float = 1.0) -> None:
        """Add what the message says, times `factor`, to `values`."""
