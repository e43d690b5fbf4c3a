"""4 bits: whole numbers from -7 to 7 times the block's scale, two to a byte."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.compress.blocks import BLOCK, Blocks


class Int4(Blocks):
    """132 bytes for 256 values: 7.76 times smaller than fp32.

    A byte is 16 high + low as a signed number, which fits (7 * 17 = 119). The low codes are those of the
    first half of all values, the high ones those of the second.
    """

    limit = 7.0
    code_bytes = BLOCK // 2

    def pack(self, scaled: Tensor, codes: Tensor) -> None:
        low, high = scaled.round_().view(2, -1)
        codes.view(torch.int8).view(-1).copy_(low.add_(high, alpha=16))

    def unpack(self, codes: Tensor, scaled: Tensor) -> None:
        both = codes.view(torch.int8).view(-1)
        low, high = scaled.view(2, -1)
        # The low code is the lower four bits with their sign. Eight more lifts it over zero, so that a
        # shift to the right, which rounds down, leaves the high code.
        low.copy_(both.bitwise_left_shift(4).bitwise_right_shift_(4))
        high.copy_(both.add(8).bitwise_right_shift_(4))
