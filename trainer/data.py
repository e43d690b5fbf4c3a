"""The images, as tensors in memory, and which of them each rank takes when.

torchvision's MNIST class reads the files; from there on whole batches are cut out of two tensors, never image
by image. Pixels stay bytes until they are in a batch, so each rank holds 55 MB of the whole MNIST, not 220.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer import staging
from trainer.errors import TrainerError
from trainer.vision import mnist_class

MEAN, DEVIATION = 0.1307 * 255, 0.3081 * 255  # of all pixels of MNIST
CLASSES = 10


@dataclass(frozen=True)
class Images:
    """Images (bytes, n x 28 x 28) and the digit that each shows."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, order: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The images with these numbers, `size` at a time (the last may be fewer), ready for a model."""
        for chosen in torch.split(order, size) if len(order) else ():
            pixels = self.pixels[chosen].unsqueeze(1).float().sub_(MEAN).div_(DEVIATION)
            # In this memory layout convolutions on a CPU take a third less time.
            yield pixels.to(memory_format=torch.channels_last), self.labels[chosen]


@dataclass(frozen=True)
class Dataset:
    train: Images
    test: Images


def load(data: str, environ: Mapping[str, str]) -> Dataset:
    """What `--data` asks for, unpacked or downloaded first where needed.

    A download comes from torchvision's mirrors, or from the URL in $RINGCTL_MNIST_MIRROR.
    """
    mnist = mnist_class()
    home = staging.home_folder(environ)
    if data == "mini":
        folder = staging.mini(home)
    elif data == "download":
        override = environ.get("RINGCTL_MNIST_MIRROR")
        folder = staging.downloaded([override] if override else mnist.mirrors, home)
    else:
        folder = staging.given(data, home)
    return Dataset(train=_read(mnist, folder, train=True), test=_read(mnist, folder, train=False))


def training_order(count: int, seed: int, epoch: int, rank: int, world: int) -> Tensor:
    """The numbers of the images that this rank trains on in this epoch, in order.

    All ranks draw the same permutation and take every world-th of it. Each gets as many, so that none waits
    for another at the end; up to world - 1 images sit out an epoch, others the next time.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(count, generator=generator)[: count - count % world][rank::world]


def evaluation_order(count: int, rank: int, world: int) -> Tensor:
    """The numbers of the images that this rank tests on: all ranks together take each one once."""
    return torch.arange(count)[rank::world]


def _read(mnist: Any, folder: Path, *, train: bool) -> Images:
    # The class looks for the files in <root>/MNIST/raw; here it is told their folder, wherever that is.
    reader = type("MNIST", (mnist,), {"raw_folder": str(folder)})
    files = reader(root=str(folder), train=train, download=False)
    if not len(files.targets) or int(files.targets.max()) >= CLASSES:
        raise TrainerError(
            f"{folder} has no images, or labels other than 0 to {CLASSES - 1}: it is not MNIST"
        )
    return Images(files.data, files.targets)
