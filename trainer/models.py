"""The models by name. A new one is one function that returns an untrained model, and one line in MODELS.

torch is imported inside the functions, so that the names can be checked without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def bn_cnn() -> nn.Module:
    """Two convolutions with batch normalisation and a linear layer, for 28x28 images: 29,034 parameters."""
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=5, padding=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=5, padding=2),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(7 * 7 * 32, 10),
    )


def mnist_cnn() -> nn.Module:
    """The network of PyTorch's own MNIST example: 1,199,882 parameters, nearly all in one linear layer."""
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(12 * 12 * 64, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "bn-cnn": bn_cnn,
    "mnist-cnn": mnist_cnn,
}
