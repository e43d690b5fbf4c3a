from __future__ import annotations

import pytest
import torch

from trainer.models import MODELS


@pytest.mark.parametrize(("name", "parameters"), [("bn-cnn", 29_034), ("mnist-cnn", 1_199_882)])
def test_a_model_has_as_many_parameters_as_documented(name: str, parameters: int) -> None:
    assert sum(parameter.numel() for parameter in MODELS[name]().parameters()) == parameters


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_model_turns_images_into_ten_scores_each(name: str) -> None:
    with torch.no_grad():
        assert MODELS[name]()(torch.zeros(3, 1, 28, 28)).shape == (3, 10)
