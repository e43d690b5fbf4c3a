"""Make the subset of MNIST that ships in trainer/mini/, from the whole one.

    python scripts/make_mini_mnist.py FOLDER [--out trainer/mini]

FOLDER holds the four official files, packed (.gz) or not. The subset has 600 training and 100 test images of
each digit, drawn with a fixed seed and kept in their original order. The same input gives the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import random
import struct
from pathlib import Path

SEED = 28
PER_DIGIT = {"train": 600, "t10k": 100}
PIXELS = 28 * 28
IMAGES_MAGIC, LABELS_MAGIC = 2051, 2049

LICENSE = """\
# The images in this folder

A subset of the MNIST database of handwritten digits by Yann LeCun, Corinna Cortes and Christopher J. C.
Burges (<http://yann.lecun.com/exdb/mnist/>), made available under the [Creative Commons
Attribution-ShareAlike 3.0](https://creativecommons.org/licenses/by-sa/3.0/) licence. This subset is under the
same licence.

What was changed: of the 60,000 training and 10,000 test images, 600 and 100 of each digit were drawn at
random with a fixed seed (6,000 and 1,000 in all) and kept in their original order. No image or label was
altered. `scripts/make_mini_mnist.py` made these files; `SHA256SUMS` has the hash of each one, unpacked.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the MNIST subset that ships with the trainer.")
    parser.add_argument("folder", type=Path, help="folder with the four MNIST files, packed (.gz) or not")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).resolve().parent.parent / "trainer" / "mini"
    )
    arguments = parser.parse_args()

    files: dict[str, bytes] = {}
    for part, per_digit in PER_DIGIT.items():
        images, labels = f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"
        files[images], files[labels] = balanced_subset(
            read(arguments.folder, images), read(arguments.folder, labels), per_digit
        )
    write(files, arguments.out)


def balanced_subset(images: bytes, labels: bytes, per_digit: int) -> tuple[bytes, bytes]:
    """The same two idx files with `per_digit` images of each digit."""
    magic, count, rows, columns = struct.unpack_from(">IIII", images)
    expected = (IMAGES_MAGIC, PIXELS, (LABELS_MAGIC, count))
    if (magic, rows * columns, struct.unpack_from(">II", labels)) != expected:
        raise SystemExit("these are not MNIST's images and labels")
    digits, pixels = labels[8:], images[16:]
    draw = random.Random(SEED)
    chosen: list[int] = []
    for digit in range(10):
        chosen += draw.sample([index for index in range(count) if digits[index] == digit], per_digit)
    chosen.sort()
    return (
        struct.pack(">IIII", IMAGES_MAGIC, len(chosen), rows, columns)
        + b"".join(pixels[index * PIXELS : (index + 1) * PIXELS] for index in chosen),
        struct.pack(">II", LABELS_MAGIC, len(chosen)) + bytes(digits[index] for index in chosen),
    )


def read(folder: Path, name: str) -> bytes:
    packed = folder / f"{name}.gz"
    return gzip.decompress(packed.read_bytes()) if packed.exists() else (folder / name).read_bytes()


def write(files: dict[str, bytes], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        # mtime=0: the time of packing would make every run's bytes different.
        (out / f"{name}.gz").write_bytes(gzip.compress(content, compresslevel=9, mtime=0))
    sums = "".join(f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in files.items())
    (out / "SHA256SUMS").write_text(sums)
    (out / "LICENSE.md").write_text(LICENSE)
    total = sum(path.stat().st_size for path in out.iterdir())
    print(f"{out}: {total:,} bytes")


if __name__ == "__main__":
    main()
