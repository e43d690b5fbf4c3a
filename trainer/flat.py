"""A model's parameters and gradients as two flat tensors.

The model's own parameters and gradients become views into them. So the gradients of many layers travel in one
message, the optimizer is two lines, and neither copies anything.

The layout is that of the wire: first the parameters of one dimension (biases, batch norm), which always
travel in fp32, then the others, each kind in the model's order. Behind them a format's last block has room.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.errors import TrainerError

ROOM = 256  # the largest block of a format


@dataclass(frozen=True)
class Slot:
    """Where a parameter lies in the flat tensors."""

    name: str
    parameter: nn.Parameter
    start: int
    end: int


class Flat:
    """Moves the model's parameters and gradients into `parameters` and `gradients`.

    Zero the gradients with `gradients.zero_()`; `model.zero_grad()` would cut the connection.
    """

    def __init__(self, model: nn.Module) -> None:
        named = list(model.named_parameters())
        own = [parameter for _, parameter in named]
        kinds = {(parameter.dtype, parameter.device) for parameter in own}
        if len(kinds) != 1:
            found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds)) or "none"
            raise TrainerError(
                f"the model's parameters must all have one type and be on one device, but they are {found}"
            )
        ((dtype, device),) = kinds
        total = sum(parameter.numel() for parameter in own)
        room = torch.zeros(2, total + ROOM, dtype=dtype, device=device)
        self.parameters, self.gradients = room[0, :total], room[1, :total]
        self.slots = layout(named)
        """In the order of the flat tensors."""
        self._order = own
        first_matrix = next((slot.start for slot in self.slots if slot.parameter.dim() > 1), total)
        self.vectors = self.gradients[:first_matrix]
        """Gradients of the parameters of one dimension."""
        padded = -(-(total - first_matrix) // ROOM) * ROOM
        self.matrices = room[1, first_matrix : first_matrix + padded]
        """Gradients of the others, and zeros up to a multiple of ROOM."""
        for slot in self.slots:
            place = slice(slot.start, slot.end)
            self.parameters[place].copy_(slot.parameter.detach().reshape(-1))
            slot.parameter.data = self.parameters[place].view(slot.parameter.shape)
            slot.parameter.grad = self.gradients[place].view(slot.parameter.shape)

    def sha256(self) -> str:
        """Hash of all parameters in the model's order: equal if and only if two ranks hold the same model."""
        digest = hashlib.sha256()
        for parameter in self._order:
            digest.update(as_bytes(parameter.detach()))
        return digest.hexdigest()


def layout(named: list[tuple[str, nn.Parameter]]) -> list[Slot]:
    """The slots of these parameters one behind the other, those of one dimension first."""
    slots, start = [], 0
    for name, parameter in sorted(named, key=lambda item: item[1].dim() > 1):  # keeps the order otherwise
        slots.append(Slot(name, parameter, start, start + parameter.numel()))
        start = slots[-1].end
    return slots


def as_bytes(tensor: Tensor) -> bytes:
    """The memory of a tensor's values, whatever their type."""
    return tensor.reshape(-1).contiguous().view(torch.uint8).cpu().numpy().tobytes()
