"""Half precision with a scale for every block, so that nothing overflows and small gradients keep 11 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.compress.blocks import BLOCK, Blocks


class FP16(Blocks):
    """516 bytes for 256 values: 1.98 times smaller than fp32."""

    feedback = False  # it loses less than the order of a sum does
    limit = 65504.0
    code_bytes = 2 * BLOCK

    def pack(self, scaled: Tensor, codes: Tensor) -> None:
        codes.view(torch.float16).copy_(scaled)

    def unpack(self, codes: Tensor, scaled: Tensor) -> None:
        scaled.copy_(codes.view(torch.float16))
