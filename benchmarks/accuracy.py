"""Whole MNIST on four ranks: how accurate the ring is, and what narrow formats cost (`make bench-full`).

The data is the folder that $MNIST names, or is downloaded where that is not set.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measurement import Measurement, Series, Target
from benchmarks.workbench import BIN, Workbench

WORLD = 4
EPOCHS = 4
SEEDS = 3
MODEL = "bn-cnn"
WANTED = 99.0
# How many points less than the exact ring a format may reach.
MAY_LOSE = {"int8": 0.2, "int4": 0.5}
WITHIN_S = 3600.0


def accuracy(bench: Workbench) -> Iterator[Measurement]:
    """Test accuracy after 4 epochs of whole MNIST, 4 ranks: fp32, and 8 and 4 bits beside it."""
    found: dict[str, list[float]] = {name: [] for name in ("none", *MAY_LOSE)}
    for seed in range(SEEDS):
        for name, seen in found.items():
            seen.append(trained(bench, name, seed))
            bench.say(f"seed {seed}, {name}: {seen[-1]:.2f} %")
    series = {name: Series(f"ring, {name}", "%", tuple(seen)) for name, seen in found.items()}
    yield Measurement(
        f"{MODEL}, whole MNIST, {EPOCHS} epochs",
        series["none"],
        Series("wanted", "%", (WANTED,)),
        Target("ours", "at least", WANTED),
        statistic="worst",
    )
    for name, points in MAY_LOSE.items():
        target = Target("difference", "at least", -points)
        yield Measurement(f"the same with {name}", series[name], series["none"], target, statistic="mean")


def trained(bench: Workbench, format: str, seed: int) -> float:
    """The test accuracy in percent."""
    data = os.environ.get("MNIST", "")
    options = {
        "model": MODEL,
        "data": str(Path(data).resolve()) if data else "download",
        "epochs": EPOCHS,
        "compress": format,
        "seed": seed,
        "threads": 1,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [str(BIN / "ringctl"), "launch", "--local", "--world", str(WORLD), "--json", "--", *words]
    last = bench.run(command, timeout=WITHIN_S).splitlines()[-1]
    return 100 * float(json.loads(last)["accuracy"])
