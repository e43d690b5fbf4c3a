from __future__ import annotations

import hashlib

import torch
from torch import nn

from tests.trainer.ranks import each
from trainer.flat import Flat
from trainer.models import MODELS


def backward(flat: Flat, model: nn.Module) -> None:
    flat.gradients.zero_()
    model(torch.ones(2, 1, 28, 28)).square().sum().backward()


def test_a_backward_pass_fills_the_flat_gradients_vectors_first() -> None:
    def work(_: int) -> tuple[bool, bool, bool]:
        model = MODELS["bn-cnn"]()
        flat = Flat(model)
        backward(flat, model)
        backward(flat, model)  # the connection also holds the second time
        own = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        vectors = torch.cat([gradient for gradient in own if gradient.dim() < 2])
        matrices = torch.cat([gradient.reshape(-1) for gradient in own if gradient.dim() > 1])
        return (
            bool(flat.gradients.any()) and torch.equal(flat.gradients, torch.cat([vectors, matrices])),
            torch.equal(flat.vectors, vectors),
            torch.equal(flat.matrices[: len(matrices)], matrices)
            and not flat.matrices[len(matrices) :].any(),
        )

    assert each(1, work) == [(True, True, True)]


def test_there_is_room_for_a_whole_block_at_the_end() -> None:
    model = nn.Linear(30, 10)
    flat = Flat(model)
    assert (len(flat.vectors), len(flat.gradients), len(flat.matrices)) == (10, 310, 512)


def test_changing_the_flat_parameters_changes_the_model() -> None:
    model = nn.Linear(3, 2)
    Flat(model).parameters.fill_(0.5)
    assert model.weight.tolist() == [[0.5] * 3] * 2
    assert model.bias.tolist() == [0.5] * 2


def test_the_hash_is_that_of_all_parameters_in_order() -> None:
    model = MODELS["bn-cnn"]()
    raw = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    flat = Flat(model)
    assert flat.sha256() == hashlib.sha256(raw).hexdigest()
    flat.parameters[-1] += 1
    assert flat.sha256() != hashlib.sha256(raw).hexdigest()
