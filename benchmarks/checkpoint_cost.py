"""What it costs to save checkpoints beside the training."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.measurement import Measurement, Series, Target
from benchmarks.workbench import BIN, CannotRun, Workbench

WORLD = 4
MODEL = "mnist-cnn"
EVERY = 50
STRETCHES, ROUNDS = 20, 4
WITHIN_S = 400.0
TARGET = Target("difference", "at most", 2.0)


def checkpoint_cost(bench: Workbench) -> Iterator[Measurement]:
    """Training time of 1.2 million parameters on four ranks: of 50 steps with a checkpoint beside them, as a
    share of the 50 before and the 50 after, which have none. Whole runs differ by more than the cost."""
    shares: list[float] = []
    for number in range(ROUNDS):
        found = shares_of(stretches(bench))
        bench.say(f"round {number + 1}: {', '.join(f'{share:.1f}' for share in found)} %")
        shares += found
    what = f"{EVERY} steps of {MODEL} with a checkpoint"
    yield Measurement(what, Series("with", "%", tuple(shares)), Series("without", "%", (100.0,)), TARGET)


def stretches(bench: Workbench) -> list[float]:
    """What each 50 steps of one run took; a checkpoint is begun at the beginning of every second one."""
    steps = str(EVERY * (STRETCHES + 1))
    options = ["--model", MODEL, "--steps", steps, "--batch-size", "16", "--threads", "1"]
    saving = ["--checkpoint-every", str(2 * EVERY)]
    launch = [str(BIN / "ringctl"), "launch", "--local", "--world", str(WORLD), "--json", "--"]
    last = json.loads(bench.run([*launch, *options, *saving], timeout=WITHIN_S).splitlines()[-1])
    ranks = Path(bench.env["RINGCTL_HOME"]) / "runs" / last["run"] / "ranks"
    told = [step_seconds(path) for path in sorted(ranks.glob("*/metrics-1.jsonl"))]
    if len(told) != WORLD:
        raise CannotRun(f"{len(told)} of {WORLD} ranks left their metrics in {ranks}")
    begins = range(EVERY, EVERY * (STRETCHES + 1), EVERY)
    return [max(sum(rank[begin : begin + EVERY]) for rank in told) for begin in begins]


def step_seconds(path: Path) -> list[float]:
    """What each step took: those that were told together, as long as their mean. Evaluations are no steps."""
    seconds: list[float] = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if not record.get("final"):
            seconds += [record["step_ms"] / 1000] * (record["step"] - len(seconds))
    return seconds


def shares_of(seconds: Sequence[float]) -> list[float]:
    """Of every second stretch, the second first, in percent of the mean of its neighbours."""
    return [
        100 * seconds[at] * 2 / (seconds[at - 1] + seconds[at + 1]) for at in range(1, len(seconds) - 1, 2)
    ]
