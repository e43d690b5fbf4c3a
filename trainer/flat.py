"""A model's parameters and gradients as two flat tensors.

The model's own parameters and gradients become views into them. So the gradients of all layers travel in one
message, the optimizer is two lines, and neither copies anything.
"""

from __future__ import annotations

import hashlib

import torch
from torch import nn


class Flat:
    """Moves the model's parameters and gradients into `parameters` and `gradients`, in the model's order.

    Zero the gradients with `gradients.zero_()`; `model.zero_grad()` would cut the connection.
    """

    def __init__(self, model: nn.Module) -> None:
        own = list(model.parameters())
        self.parameters = torch.cat([parameter.detach().reshape(-1) for parameter in own])
        self.gradients = torch.zeros_like(self.parameters)
        start = 0
        for parameter in own:
            end = start + parameter.numel()
            parameter.data = self.parameters[start:end].view_as(parameter)
            parameter.grad = self.gradients[start:end].view_as(parameter)
            start = end

    def sha256(self) -> str:
        """Hash of all parameters in order: equal if and only if two ranks hold the same model."""
        return hashlib.sha256(self.parameters.numpy().tobytes()).hexdigest()
