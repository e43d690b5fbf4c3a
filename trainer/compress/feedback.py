"""Error feedback: what a message could not carry is remembered and added to the next one.

Without it a format that always rounds the same small gradient to zero would never let it through. With it the
sum of all that was sent stays within one rounding of the sum of all that was meant.
"""

from __future__ import annotations

from torch import Tensor

from trainer.compress.format import Format


def encode(format: Format, values: Tensor, message: Tensor, residual: Tensor | None) -> None:
    """Write `values`, and what earlier messages left in `residual`, into `message`.

    Afterwards `residual` has what this message lacks.
    """
    if residual is None:
        format.encode(values, message)
    else:
        residual.add_(values)
        format.encode(residual, message)
        format.add(message, residual, -1.0)
