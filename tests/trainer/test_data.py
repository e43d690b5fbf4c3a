from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.trainer import idx
from trainer import data, staging
from trainer.data import Dataset, Images
from trainer.errors import TrainerError


def same(loaded: Dataset, files: dict[str, bytes]) -> bool:
    """Whether a loaded dataset has exactly the pixels and labels of these files."""
    return all(
        images.pixels.numpy().tobytes() == files[f"{part}-images-idx3-ubyte"][16:]
        and bytes(images.labels.tolist()) == files[f"{part}-labels-idx1-ubyte"][8:]
        for part, images in (("train", loaded.train), ("t10k", loaded.test))
    )


def test_mini_has_6000_and_1000_images_as_many_of_each_digit() -> None:
    mini = data.load("mini", os.environ)
    assert torch.bincount(mini.train.labels).tolist() == [600] * 10
    assert torch.bincount(mini.test.labels).tolist() == [100] * 10
    assert mini.train.pixels.shape == (6000, 28, 28)
    assert mini.test.pixels.shape == (1000, 28, 28)


def test_the_shipped_files_are_small_and_carry_their_licence() -> None:
    assert sum(path.stat().st_size for path in staging.MINI.iterdir()) < 1_300_000
    assert "Attribution-ShareAlike 3.0" in (staging.MINI / "LICENSE.md").read_text()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("below", ["MNIST/raw", "raw", "."])
def test_a_folder_may_hold_the_files_packed_or_not_where_torchvision_puts_them_or_directly(
    below: str, packed: bool, tmp_path: Path
) -> None:
    files = idx.mnist()
    idx.write(tmp_path / "mine" / below, files, packed=packed)
    assert same(data.load(str(tmp_path / "mine"), os.environ), files)


def test_download_takes_the_mirror_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = idx.mnist()
    mirror = idx.write(tmp_path / "mirror", files, packed=True)
    asked = []

    def downloaded(mirrors: list[str], home: Path) -> Path:
        asked.extend(mirrors)
        return idx.write(home, files)

    monkeypatch.setattr(staging, "downloaded", downloaded)
    data.load("download", {"RINGCTL_HOME": str(tmp_path / "home"), "RINGCTL_MNIST_MIRROR": str(mirror)})
    assert asked == [str(mirror)]
    asked.clear()
    data.load("download", {"RINGCTL_HOME": str(tmp_path / "home")})
    assert all(url.startswith("http") for url in asked)
    assert asked


def test_labels_that_are_not_digits_are_refused(tmp_path: Path) -> None:
    files = idx.mnist()
    files["train-labels-idx1-ubyte"] = files["train-labels-idx1-ubyte"][:-1] + b"\x1a"
    with pytest.raises(TrainerError, match="labels other than 0 to 9"):
        data.load(str(idx.write(tmp_path / "letters", files)), os.environ)


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_ranks_train_on_equally_many_different_images(world: int) -> None:
    orders = [data.training_order(1000, 5, 0, rank, world) for rank in range(world)]
    assert {len(order) for order in orders} == {1000 // world}
    taken = torch.cat(orders)
    assert len(set(taken.tolist())) == len(taken)


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [int(number) for number in data.training_order(100, seed, epoch, 0, 2)]

    assert order(1, 1) == order(1, 1)
    assert len({tuple(order(seed, epoch)) for seed in range(4) for epoch in range(4)}) == 16


@pytest.mark.parametrize("world", [1, 3, 30])
def test_ranks_together_evaluate_on_every_image_once(world: int) -> None:
    shares = [data.evaluation_order(20, rank, world) for rank in range(world)]
    assert sorted(torch.cat(shares).tolist()) == list(range(20))


def test_batches_are_normalised_and_keep_image_and_label_together() -> None:
    pixels = torch.zeros(5, 28, 28, dtype=torch.uint8)
    pixels[3] = 255
    images = Images(pixels, torch.tensor([0, 1, 2, 3, 4]))
    batches = list(images.batches(torch.tensor([3, 0, 4]), size=2))
    assert [labels.tolist() for _, labels in batches] == [[3, 0], [4]]
    first = batches[0][0]
    assert first.shape == (2, 1, 28, 28)
    torch.testing.assert_close(first[0], torch.full((1, 28, 28), (1 - 0.1307) / 0.3081))
    torch.testing.assert_close(first[1], torch.full((1, 28, 28), -0.1307 / 0.3081))


def test_mnist_as_a_whole_has_mean_zero_and_deviation_one() -> None:
    mini = data.load("mini", os.environ).train
    ((pixels, _),) = mini.batches(torch.arange(len(mini)), size=len(mini))
    assert pixels.mean().item() == pytest.approx(0, abs=0.02)
    assert pixels.std().item() == pytest.approx(1, abs=0.02)
