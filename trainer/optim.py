"""Stochastic gradient descent with momentum, as torch.optim.SGD does it.

Ours because constructing torch's imports torch._dynamo, which costs every rank 1.4 seconds at the start.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.flat import Flat


class SGD:
    """Moves the parameters of `flat` against its gradients."""

    def __init__(self, flat: Flat, momentum: float) -> None:
        self.flat = flat
        self.momentum = momentum
        self.velocity = torch.zeros_like(flat.parameters)

    def step(self, lr: float) -> None:
        self.velocity.mul_(self.momentum).add_(self.flat.gradients)
        self.flat.parameters.sub_(self.velocity, alpha=lr)

    def state_dict(self) -> dict[str, Tensor]:
        """The velocity of each parameter by its name: the same for any number of ranks."""
        return {slot.name: self.velocity[slot.start : slot.end] for slot in self.flat.slots}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for slot in self.flat.slots:
            self.velocity[slot.start : slot.end].copy_(state[slot.name])
