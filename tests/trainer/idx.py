"""Small files in MNIST's format, for tests."""

from __future__ import annotations

import gzip
import random
import struct
from pathlib import Path


def mnist(train: int = 40, test: int = 20, side: int = 28) -> dict[str, bytes]:
    """Name -> content of the four files: random pixels, the digits 0 to 9 in turn."""
    draw = random.Random(train + test)
    files = {}
    for part, count in (("train", train), ("t10k", test)):
        pixels = draw.randbytes(count * side * side)
        files[f"{part}-images-idx3-ubyte"] = struct.pack(">IIII", 2051, count, side, side) + pixels
        files[f"{part}-labels-idx1-ubyte"] = struct.pack(">II", 2049, count) + bytes(
            number % 10 for number in range(count)
        )
    return files


def write(folder: Path, files: dict[str, bytes], *, packed: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content, mtime=0))
        else:
            (folder / name).write_bytes(content)
    return folder
