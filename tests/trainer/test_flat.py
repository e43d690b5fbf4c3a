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


def test_a_backward_pass_fills_the_flat_gradients_in_the_models_order() -> None:
    def work(_: int) -> bool:
        model = MODELS["bn-cnn"]()
        flat = Flat(model)
        backward(flat, model)
        backward(flat, model)  # the connection also holds the second time
        own = [parameter.grad for parameter in model.parameters()]
        expected = torch.cat([gradient.reshape(-1) for gradient in own if gradient is not None])
        return bool(flat.gradients.any()) and torch.equal(flat.gradients, expected)

    assert each(1, work) == [True]


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
