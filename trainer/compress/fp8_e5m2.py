"""8-bit floating point with 5 bits of exponent and 2 of fraction, times the block's scale."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.compress.blocks import BLOCK, Blocks


class E5M2(Blocks):
    """260 bytes for 256 values; more range inside a block than E4M3, less precision."""

    limit = 57344.0
    code_bytes = BLOCK

    def pack(self, scaled: Tensor, codes: Tensor) -> None:
        codes.view(torch.float8_e5m2).copy_(scaled)

    def unpack(self, codes: Tensor, scaled: Tensor) -> None:
        scaled.copy_(codes.view(torch.float8_e5m2))
