"""Strategies at work on given gradients, for tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trainer import sync
from trainer.config import Config
from trainer.flat import Flat, as_bytes
from trainer.sync.strategy import Strategy

Shape = tuple[int, ...]


class Given(nn.Module):
    """A model of parameters with these shapes, whose backward pass makes any gradients one asks for."""

    def __init__(self, shapes: Sequence[Shape], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.all = nn.ParameterList([nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes])

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        products = [(own * given).sum() for own, given in zip(self.all, gradients, strict=True)]
        return torch.stack(products).sum()


@contextmanager
def strategy(
    shapes: Sequence[Shape], config: Config, dtype: torch.dtype = torch.float32
) -> Iterator[Strategy]:
    """A strategy on such a model, closed at the end."""
    model = Given(shapes, dtype)
    made = sync.create(model, Flat(model), config)
    try:
        yield made
    finally:
        made.close()


def part(
    rank: int, shapes: Sequence[Shape], seed: int = 0, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """What a rank brings along: its own random numbers."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def step(made: Strategy, gradients: Sequence[Tensor]) -> bool:
    """One step of training, up to the mean gradient."""
    made.begin()
    made.model(gradients).backward()
    return made.finish()


def averaged(made: Strategy, gradients: Sequence[Tensor]) -> bytes:
    """The mean of what all ranks gave, in the model's order."""
    assert step(made, gradients)
    return held(made)


def held(made: Strategy) -> bytes:
    """The gradients of a rank, in the model's order."""
    parameters = list(made.model.parameters())
    return b"".join(as_bytes(own.grad) for own in parameters if own.grad is not None)


def numbers(raw: bytes, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)


def flat(gradients: Sequence[Tensor]) -> Tensor:
    return torch.cat([gradient.reshape(-1) for gradient in gradients])


def mean(world: int, shapes: Sequence[Shape], seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """What every rank should end up with, in twice the precision."""
    return torch.stack([flat(part(rank, shapes, seed, dtype)).double() for rank in range(world)]).mean(0)
