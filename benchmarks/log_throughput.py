"""How fast much output comes through, and whether all of it does.

Live, the competitor is `torchrun --tee 3`, which labels and merges the output of its ranks as they run.
After the run torchrun leaves a file a rank and no tool to merge them, and `cat` would neither label nor
merge; so there the competitor is what one would write: time-stamped files through `heapq.merge`.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial

from benchmarks.measurement import Measurement, Series, Target
from benchmarks.programs.print_lines import line
from benchmarks.workbench import BIN, PROGRAMS, CannotRun, Workbench, free_port

RANKS, LINES = 4, 100_000
TOTAL = RANKS * LINES
PRINTER = [str(PROGRAMS / "print_lines.py"), str(LINES)]
RINGCTL, TORCHRUN = str(BIN / "ringctl"), str(BIN / "torchrun")
LABEL = re.compile(rb"\[(?:default)?(\d+)[^\]]*\]:? ?(.*)")


def log_throughput(bench: Workbench) -> Iterator[Measurement]:
    """4 ranks print 100,000 lines each: what arrives, how fast it is shown live and afterwards."""
    live = bench.alternate(
        "live",
        {"ringctl launch": partial(show_live, bench, launch()), "torchrun --tee": partial(show_live, bench, tee())},
        unit="lines/s", rounds=3, within=90,
    )  # fmt: skip
    logs = [RINGCTL, "logs"]
    arrived = Series("ringctl", "lines", (in_order(bench.run(logs)),))
    everything = Series("printed", "lines", (TOTAL,))
    yield Measurement("arrived, in order per rank", arrived, everything, Target("ours", "at least", TOTAL))
    merge = [sys.executable, str(PROGRAMS / "merge_files.py"), *write_files(bench)]
    after = bench.alternate(
        "afterwards",
        {"ringctl logs": partial(show_all, bench, logs), "heapq.merge": partial(show_all, bench, merge)},
        unit="lines/s", rounds=7, within=90,
    )  # fmt: skip
    target = Target("ours", "at least", 100_000)
    yield Measurement("ringctl logs, into a pipe", *after.values(), target, statistic="best")
    yield Measurement("shown live, into a pipe", *live.values())


def launch() -> list[str]:
    return [RINGCTL, "launch", "--local", "--world", str(RANKS), "--", "python", *PRINTER]


def tee() -> list[str]:
    port = str(free_port())
    return [TORCHRUN, "--nproc-per-node", str(RANKS), "--master-port", port, "--tee", "3", *PRINTER]


def show_all(bench: Workbench, argv: Sequence[str]) -> float:
    """Lines a second of a command that shows the whole log, its own start included."""
    start = time.perf_counter()
    out = bench.run(argv)
    took = time.perf_counter() - start
    return complete(argv, out) / took


def show_live(bench: Workbench, argv: Sequence[str]) -> float:
    """Lines a second from the first line that comes out to the last; starting the ranks does not count."""
    chunks: list[tuple[float, bytes]] = []
    with bench.start(argv) as process:
        assert process.stdout is not None
        while data := os.read(process.stdout.fileno(), 1 << 20):
            chunks.append((time.perf_counter(), data))
    bench.must_succeed(process)
    moments = [moment for moment, data in chunks if b" and some more words" in data]
    return complete(argv, b"".join(data for _, data in chunks)) / (moments[-1] - moments[0])


def complete(argv: Sequence[str], out: bytes) -> int:
    """How many lines came; speed means nothing where some are missing."""
    count = in_order(out)
    if count != TOTAL:
        raise CannotRun(f"{' '.join(argv[:2])} showed {count:,} of {TOTAL:,} lines in order")
    return count


def in_order(out: bytes) -> int:
    """The lines of those ranks of which every line is there, once, unchanged and in its place."""
    seen: dict[int, list[bytes]] = {rank: [] for rank in range(RANKS)}
    for text in out.split(b"\n"):
        match = LABEL.fullmatch(text)
        if match:
            seen[int(match[1])].append(match[2])
    return sum(LINES for rank in seen if seen[rank] == expected(rank))


def expected(rank: int) -> list[bytes]:
    return [line(rank, number).encode() for number in range(LINES)]


def write_files(bench: Workbench) -> list[str]:
    """The same lines as a file a rank, each line behind a time, the ranks taking turns."""
    paths = [bench.folder / f"rank{rank}.log" for rank in range(RANKS)]
    for rank, path in enumerate(paths):
        with path.open("w") as f:
            for number in range(LINES):
                f.write(f"{1e9 + (number * RANKS + rank) * 1e-5:.6f} {line(rank, number)}\n")
    return [str(path) for path in paths]
