"""8-bit floating point with 4 bits of exponent and 3 of fraction, times the block's scale."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.compress.blocks import BLOCK, Blocks


class E4M3(Blocks):
    """260 bytes for 256 values; finer than int8 for the small ones of a block, coarser for the large ones."""

    limit = 448.0
    code_bytes = BLOCK

    def pack(self, scaled: Tensor, codes: Tensor) -> None:
        codes.view(torch.float8_e4m3fn).copy_(scaled)

    def unpack(self, codes: Tensor, scaled: Tensor) -> None:
        # torch's own cast takes ten times as long. The same bits further left are a half-precision number
        # that is 2 ** 8 times too small, for its exponent counts from 15 instead of 7.
        bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
        scaled.copy_(bits.view(torch.float16)).mul_(256.0)
