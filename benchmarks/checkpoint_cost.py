"""What it costs to save checkpoints beside the training."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measurement import Measurement, Target
from benchmarks.workbench import BIN, CannotRun, Workbench

WORLD = 4
MODEL = "mnist-cnn"
STEPS, EVERY = 300, 50
ROUNDS, WITHIN_S = 7, 400.0
SAVING, NOT_SAVING = f"a checkpoint every {EVERY} steps", "none"
TARGET = Target("ratio", "at most", 1.02)


def checkpoint_cost(bench: Workbench) -> Iterator[Measurement]:
    """Training time of 1.2 million parameters on four ranks, with checkpoints and without."""
    contestants = {
        SAVING: partial(seconds, bench, ["--checkpoint-every", str(EVERY)]),
        NOT_SAVING: partial(seconds, bench, []),
    }
    contestants[NOT_SAVING]()  # data are unpacked, and torch's files in the page cache, from now on
    what = f"{STEPS} steps of {MODEL}"
    series = bench.alternate(what, contestants, unit="s", rounds=ROUNDS, within=WITHIN_S)
    yield Measurement(what, series[SAVING], series[NOT_SAVING], TARGET)


def seconds(bench: Workbench, more: Sequence[str]) -> float:
    """How long the training took on the slowest rank, until its last checkpoint was on all disks."""
    options = ["--model", MODEL, "--steps", str(STEPS), "--batch-size", "16", "--threads", "1", *more]
    launch = [str(BIN / "ringctl"), "launch", "--local", "--world", str(WORLD), "--json", "--", *options]
    last = json.loads(bench.run(launch, timeout=WITHIN_S).splitlines()[-1])
    ranks = Path(bench.env["RINGCTL_HOME"]) / "runs" / last["run"] / "ranks"
    told = [path.read_text().splitlines() for path in sorted(ranks.glob("*/metrics-1.jsonl"))]
    if len(told) != WORLD:
        raise CannotRun(f"{len(told)} of {WORLD} ranks left their metrics in {ranks}")
    return max(took([json.loads(line) for line in lines]) for lines in told)


def took(records: Sequence[dict[str, Any]]) -> float:
    """From the beginning of the first step to the last record, which is written when all is saved."""
    first, last = records[0], records[-1]
    if not last.get("final"):
        raise CannotRun("a rank did not come to its end")
    began = first["time"] - first["step"] * first["step_ms"] / 1000
    return float(last["time"] - began)
