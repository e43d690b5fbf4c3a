"""The service under load: 64 ranks with 200 lines a second each, and five who look."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from benchmarks.measurement import Measurement, Series, Target
from benchmarks.workbench import PROGRAMS, Workbench

SECONDS = 30
WHAT = "64 ranks x 200 lines/s, five readers"


def service(bench: Workbench) -> Iterator[Measurement]:
    """Beside five `ringctl logs --follow`, each of which asks the hosts by itself."""
    ours, theirs = figures(bench, "service"), figures(bench, "logs")

    def measurement(what: str, field: int, unit: str, target: Target | None) -> Measurement:
        mine = Series("ringctl serve", unit, (ours[field],))  # type: ignore[arg-type]  # one of Unit
        other = Series("ringctl logs --follow", unit, (theirs[field],))  # type: ignore[arg-type]  # the same
        return Measurement(f"{WHAT}: {what}", mine, other, target)

    yield measurement("delay from print to reader", 0, "s", Target("ours", "at most", 1.0))
    yield measurement(f"processor time of {SECONDS} s", 1, "s", Target("ours", "at most", float(SECONDS)))
    yield measurement("growth of memory in the second half", 2, "MB", Target("ours", "at most", 32.0))
    yield measurement("lines lost", 3, "lines", Target("ours", "at most", 0.0))


def figures(bench: Workbench, how: str) -> list[float]:
    bench.say(how)
    program = [sys.executable, str(PROGRAMS / "service_readers.py"), how, str(SECONDS)]
    return [float(word) for word in bench.run(program, timeout=4.0 * SECONDS + 120).split()]
