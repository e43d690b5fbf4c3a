"""The script that makes trainer/mini/."""

from __future__ import annotations

import gzip
import hashlib
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import trainer
from tests.trainer import idx

SCRIPT = Path(trainer.__file__).parent.parent / "scripts" / "make_mini_mnist.py"


def make(source: Path, out: Path) -> dict[str, bytes]:
    """Run the script and return what it wrote."""
    subprocess.run([sys.executable, str(SCRIPT), str(source), "--out", str(out)], check=True, timeout=60)
    return {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.fixture(scope="module")
def whole() -> dict[str, bytes]:
    return idx.mnist(6500, 1100)


def test_the_subset_is_balanced_and_every_image_keeps_its_label(
    whole: dict[str, bytes], tmp_path: Path
) -> None:
    made = make(idx.write(tmp_path / "whole", whole), tmp_path / "mini")
    for part, per_digit in (("train", 600), ("t10k", 100)):
        images = gzip.decompress(made[f"{part}-images-idx3-ubyte.gz"])[16:]
        labels = gzip.decompress(made[f"{part}-labels-idx1-ubyte.gz"])[8:]
        assert [labels.count(digit) for digit in range(10)] == [per_digit] * 10
        original = whole[f"{part}-images-idx3-ubyte"][16:]
        label_of = {original[i * 784 : (i + 1) * 784]: i % 10 for i in range(len(original) // 784)}
        assert [label_of[images[i * 784 : (i + 1) * 784]] for i in range(len(labels))] == list(labels)


def test_the_same_files_packed_or_not_give_the_same_bytes(whole: dict[str, bytes], tmp_path: Path) -> None:
    plain = make(idx.write(tmp_path / "plain", whole), tmp_path / "a")
    packed = make(idx.write(tmp_path / "packed", whole, packed=True), tmp_path / "b")
    assert plain == packed
    lines = [line.split() for line in plain["SHA256SUMS"].decode().splitlines()]
    assert {name: digest for digest, name in lines} == {
        name.removesuffix(".gz"): hashlib.sha256(gzip.decompress(content)).hexdigest()
        for name, content in plain.items()
        if name.endswith(".gz")
    }


def test_other_files_are_refused() -> None:
    balanced_subset = runpy.run_path(str(SCRIPT))["balanced_subset"]
    files = idx.mnist()
    images, labels = files["train-images-idx3-ubyte"], files["t10k-labels-idx1-ubyte"]
    with pytest.raises(SystemExit, match="these are not MNIST's images and labels"):
        balanced_subset(images, labels, 1)
