"""What the history costs: the rows of the first screen, and writing down what 64 ranks say."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial

from benchmarks.measurement import Measurement, Target, Unit
from benchmarks.workbench import PROGRAMS, Workbench

RUNS = 10_000
FIRST_SCREEN = Target("ours", "at most", 0.1)
HALF_A_CORE = Target("ours", "at most", 5.0)
ROUNDS, WITHIN_S = 5, 40.0


def history(bench: Workbench) -> Iterator[Measurement]:
    """Fifty rows of ten thousand runs; and ten seconds of 12,800 lines a second."""
    program(bench, "make", str(RUNS))
    found = f"the newest 50 of {RUNS:,} runs"
    yield compared(bench, found, {"SQLite": "rows", "a file a run": "files"}, target=FIRST_SCREEN)
    ways = {"chunks": "chunks", "a row an event": "inserts"}
    recorded = "10 s of 64 ranks x 200 lines/s"
    yield compared(bench, f"recording {recorded}: processor time", ways, target=HALF_A_CORE)
    yield compared(bench, f"recording {recorded}: on disk", ways, unit="MB", field=1)


def compared(
    bench: Workbench,
    what: str,
    ways: dict[str, str],
    *,
    unit: Unit = "s",
    field: int = 0,
    target: Target | None = None,
) -> Measurement:
    contestants = {name: partial(figure, bench, how, field) for name, how in ways.items()}
    series = bench.alternate(what, contestants, unit=unit, rounds=ROUNDS, within=WITHIN_S)
    ours, theirs = (series[name] for name in ways)
    return Measurement(what, ours, theirs, target, "best" if target else "median")


def program(bench: Workbench, *args: str) -> bytes:
    return bench.run([sys.executable, str(PROGRAMS / "history_rows.py"), *args])


def figure(bench: Workbench, how: str, field: int) -> float:
    return float(program(bench, how).split()[field])
