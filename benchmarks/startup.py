"""What it costs to start ringctl at all."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence

from benchmarks.measurement import Measurement, Target
from benchmarks.workbench import BIN, Workbench

ROUNDS = 21
RINGCTL = str(BIN / "ringctl")
COMMANDS = {"ringctl --help": ("--help",), "ringctl ps": ("ps",)}


def startup(bench: Workbench) -> Iterator[Measurement]:
    """`ringctl --help` and `ringctl ps`, beside an interpreter that does nothing."""
    for _ in range(3):
        bench.run([RINGCTL, "launch", "--local", "--world", "2", "--", "true"])  # something for ps to show
    contestants = {name: timed(bench, [RINGCTL, *args]) for name, args in COMMANDS.items()}
    contestants["python -c pass"] = timed(bench, [sys.executable, "-c", "pass"])
    for once in contestants.values():
        once()  # compiled modules and the page cache are there from now on
    series = bench.alternate("start", contestants, unit="s", rounds=ROUNDS, within=60)
    target = Target("difference", "at most", 0.150)
    for name in COMMANDS:
        yield Measurement(name, series[name], series["python -c pass"], target, statistic="best")


def timed(bench: Workbench, argv: Sequence[str]) -> Callable[[], float]:
    def once() -> float:
        start = time.perf_counter()
        bench.run(argv)
        return time.perf_counter() - start

    return once
