"""PowerSGD: a gradient matrix as the product of two thin ones (Vogels and others, 2019).

One step of power iteration on the mean of all ranks: P = M Q, its mean made orthogonal, then Q = M' P. The
mean gradient is P Q'. Q is kept for the next step, where it is a good start; a column of it that is zero, as
after a gradient that is zero, starts anew, because it could not find anything any more. What the product
misses goes into the error feedback. P and Q are `--powersgd-rank` wide; what would not get smaller travels in
fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainer import group
from trainer.config import Config

ROUNDING = 1e-6
"""A column of which less than this share is left, without what those before it have, is parallel to them: the
rest is what fp32 has rounded."""


class PowerSGD:
    """Makes these matrices, parts of `whole`, their mean over all ranks, about; see sync.overlap.Exchange.

    `residuals` has one matrix for each of them, or none at all for no error feedback.
    """

    feedback = True

    def __init__(
        self,
        whole: Tensor,
        look: Callable[[Tensor], None],
        matrices: Sequence[Tensor],
        residuals: Sequence[Tensor],
        config: Config,
    ) -> None:
        self._whole, self._look = whole, look
        rank = config.powersgd_rank
        self._world = group.world()
        thin = [rank * sum(matrix.shape) < matrix.numel() for matrix in matrices]
        self._matrices = [matrix for matrix, is_thin in zip(matrices, thin, strict=True) if is_thin]
        self._residuals: Sequence[Tensor | None] = [None] * len(self._matrices)
        if residuals:
            self._residuals = [error for error, is_thin in zip(residuals, thin, strict=True) if is_thin]
        self._plain = [matrix for matrix, is_thin in zip(matrices, thin, strict=True) if not is_thin]
        self._left, self._lefts = _together([(len(matrix), rank) for matrix in self._matrices])
        widths = [(matrix.shape[1], rank) for matrix in self._matrices]
        self.right, self._rights = _together(widths)
        """What the next step begins with; the same on every rank."""
        self._fresh, self._freshs = _together(widths)
        self._fresh.copy_(torch.randn(len(self._fresh), generator=torch.Generator().manual_seed(config.seed)))
        self._rest, self._rests = _together([tuple(matrix.shape) for matrix in self._plain])
        self.start_anew()
        to_and_from_rank_0 = (self._world - 1 if group.rank() == 0 else 1) * self._left.nbytes
        all_reduced = 2 * (self._world - 1) * (self.right.nbytes + self._rest.nbytes) // self._world
        self.held = self._left.nbytes + self.right.nbytes + self._fresh.nbytes + self._rest.nbytes
        self.bytes = to_and_from_rank_0 + all_reduced

    def start_anew(self) -> None:
        """Forget what earlier steps found."""
        self.right.copy_(self._fresh)

    def start(self) -> None:
        pass

    def finish(self) -> Iterator[int]:
        yield 0
        self._look(self._whole)
        steps = list(zip(self._matrices, self._residuals, self._lefts, self._rights, strict=True))
        for matrix, residual, left, right in steps:
            if residual is not None:
                matrix.add_(residual)
            torch.mm(matrix, right, out=left)
        if steps:
            # One rank makes it orthogonal, because another kind of processor would round differently.
            dist.reduce(self._left, dst=0)
            if group.rank() == 0:
                for left in self._lefts:
                    left.copy_(orthogonal(left))
            dist.broadcast(self._left, src=0)
        for matrix, _, left, right in steps:
            torch.mm(matrix.T, left, out=right)
        for plain, rest in zip(self._plain, self._rests, strict=True):
            rest.copy_(plain)
        for shared in (self.right, self._rest):
            if len(shared):
                dist.all_reduce(shared)
                shared.div_(self._world)
        for matrix, residual, left, right in steps:
            _multiply(matrix, residual, left, right)
        for right, fresh in zip(self._rights, self._freshs, strict=True):
            right.copy_(torch.where(right.any(dim=0), right, fresh))
        for plain, rest in zip(self._plain, self._rests, strict=True):
            plain.copy_(rest)


def orthogonal(columns: Tensor) -> Tensor:
    """Columns of length one at right angles to each other that span the same space; zeros for one that adds
    nothing to those before it."""
    made = torch.empty_like(columns, dtype=torch.float64)
    for number, column in enumerate(columns.T.double()):
        negligible = ROUNDING * column.norm()
        for _ in range(2):  # once more takes out what rounding left
            done = made[:, :number]
            column = column - done @ (done.T @ column)
        length = column.norm()
        made[:, number] = column / length if length > negligible else 0.0
    return made.to(columns.dtype)


def _multiply(matrix: Tensor, error: Tensor | None, left: Tensor, right: Tensor) -> None:
    """matrix = left right', in steps of one rounding each, which give the same bits on any processor."""
    if error is not None:
        error.copy_(matrix)
    product = torch.empty_like(matrix)
    matrix.zero_()
    for column in range(left.shape[1]):
        torch.mul(left[:, column, None], right[None, :, column], out=product)
        matrix.add_(product)
    if error is not None:
        error.sub_(matrix)


def _together(shapes: Sequence[tuple[int, ...]]) -> tuple[Tensor, list[Tensor]]:
    """One flat tensor for all of these shapes, so that they travel in one message, and a view for each."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    flat = torch.zeros(sum(sizes))
    return flat, [part.view(shape) for part, shape in zip(torch.split(flat, sizes), shapes, strict=True)]
