"""How fast much output comes through, and whether all of it does.

Live, the competitor is `torchrun --tee 3`, which labels and merges the output of its ranks as they run.
After the run torchrun leaves a file a rank and no tool to merge them, and `cat` would neither label nor
merge; so there the competitor is what one would write: time-stamped files through `heapq.merge`.

torchrun runs with PYTHONUNBUFFERED: without it, its threads share one buffered stdout, and of these lines
some thousands come out torn, twice or not at all.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.measurement import Measurement, Series, Target
from benchmarks.programs.print_lines import line
from benchmarks.workbench import BIN, PROGRAMS, CannotRun, Workbench, free_port

RANKS, LINES = 4, 100_000
TOTAL = RANKS * LINES
PRINTER = [str(PROGRAMS / "print_lines.py"), str(LINES)]
RINGCTL, TORCHRUN = str(BIN / "ringctl"), str(BIN / "torchrun")
LABELLED = re.compile(rb"^\[(?:default)?(\d+)[^\]]*\]:? ?(rank \d line (\d{6}) .*)$", re.MULTILINE)
TAIL = line(0, 0).encode()[-20:]  # the same in every line
Shown = tuple[bytes, float]


def log_throughput(bench: Workbench) -> Iterator[Measurement]:
    """4 ranks print 100,000 lines each: what arrives, how fast it is shown live and afterwards."""
    came: dict[str, list[float]] = {}

    def shown(name: str, argv: list[str], seconds: Callable[[Workbench, list[str]], Shown]) -> float:
        out, took = seconds(bench, argv)
        came.setdefault(name, []).append(in_order(out))
        return came[name][-1] / took

    commands = {"ringctl": launch(), "torchrun --tee": tee()}
    live = bench.alternate(
        "live",
        {name: partial(shown, name, argv, show_live) for name, argv in commands.items()},
        unit="lines/s",
        rounds=3,
        within=90,
    )
    merge = [sys.executable, str(PROGRAMS / "merge_files.py"), *write_files(bench)]
    commands = {"ringctl": [RINGCTL, "logs"], "heapq.merge": merge}
    after = bench.alternate(
        "afterwards",
        {name: partial(shown, name, argv, show_all) for name, argv in commands.items()},
        unit="lines/s",
        rounds=7,
        within=60,
    )
    whole = {name: Series(name, "lines", tuple(counts)) for name, counts in came.items()}
    everything, fast = Target("ours", "at least", TOTAL), Target("ours", "at least", 100_000)
    yield Measurement("arrived in order", whole["ringctl"], whole["torchrun --tee"], everything, "worst")
    yield Measurement("ringctl logs, piped", after["ringctl"], after["heapq.merge"], fast, "best")
    yield Measurement("live, piped", live["ringctl"], live["torchrun --tee"])


def launch() -> list[str]:
    return [RINGCTL, "launch", "--local", "--world", str(RANKS), "--", "python", *PRINTER]


def tee() -> list[str]:
    options = ["--nproc-per-node", str(RANKS), "--master-port", str(free_port()), "--tee", "3"]
    return ["env", "PYTHONUNBUFFERED=1", TORCHRUN, *options, *PRINTER]


def show_all(bench: Workbench, argv: list[str]) -> Shown:
    """The output of a command that shows the whole log, and the seconds it took, its start included."""
    start = time.perf_counter()
    out = bench.run(argv)
    return out, time.perf_counter() - start


def show_live(bench: Workbench, argv: list[str]) -> Shown:
    """The output of a run, and the seconds from the first line printed to the last one shown."""
    began = bench.folder / "began"
    began.unlink(missing_ok=True)
    chunks: list[bytes] = []
    shown = 0.0
    with bench.start(argv, extra={"BENCH_BEGAN": str(began)}) as process:
        assert process.stdout is not None
        while data := os.read(process.stdout.fileno(), 1 << 20):
            chunks.append(data)
            if TAIL in data:
                shown = time.time()
    bench.must_succeed(process)
    if not shown:
        raise CannotRun(f"{argv[0]} showed nothing of what the ranks printed")
    return b"".join(chunks), shown - min(map(float, began.read_text().split()))


def in_order(out: bytes) -> int:
    """How many lines came whole and in their rank's order, less those that came again or too late."""
    expected = [[line(rank, number).encode() for number in range(LINES)] for rank in range(RANKS)]
    last, count = [-1] * RANKS, 0
    for rank_text, text, number_text in LABELLED.findall(out):
        rank, number = int(rank_text), int(number_text)
        if text == expected[rank][number]:
            count += 1 if number > last[rank] else -1
            last[rank] = max(last[rank], number)
    return count


def write_files(bench: Workbench) -> list[str]:
    """The same lines as a file a rank, each line behind a time, the ranks taking turns."""
    paths = [bench.folder / f"rank{rank}.log" for rank in range(RANKS)]
    for rank, path in enumerate(paths):
        with path.open("w") as f:
            for number in range(LINES):
                f.write(f"{1e9 + (number * RANKS + rank) * 1e-5:.6f} {line(rank, number)}\n")
    return [str(path) for path in paths]
