"""The service under load: 64 ranks with 200 lines a second each, and five who look at them in browsers."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.measurement import Measurement, Series, Target, Unit
from benchmarks.workbench import PROGRAMS, Workbench

SECONDS, LONG_SECONDS = 30, 600
MINUTES = (1, 2, 5, 10)


def service(bench: Workbench) -> Iterator[Measurement]:
    """Beside five `ringctl logs --follow`, each of which asks the hosts by itself."""
    return measured(bench, SECONDS, most_growth=32.0)  # what is kept for all readers is still to fill


def service_long(bench: Workbench) -> Iterator[Measurement]:
    """The same for ten minutes, in which memory must not grow."""
    return measured(bench, LONG_SECONDS, most_growth=8.0)


def measured(bench: Workbench, seconds: int, most_growth: float) -> Iterator[Measurement]:
    there = shutil.which("chromium") and shutil.which("chromedriver")
    looks, where = ("page", "screen") if there else ("stream", "reader")  # without a browser, what it reads
    ours, theirs = figures(bench, looks, seconds), figures(bench, "logs", seconds)

    def measurement(what: str, unit: Unit, most: float, of: str) -> Measurement:
        mine = Series("ringctl serve", unit, (ours[of],))
        other = Series("ringctl logs --follow", unit, (theirs[of],))
        return Measurement(
            f"64 ranks x 200 lines/s, five {looks}s: {what}", mine, other, Target("ours", "at most", most)
        )

    yield measurement(f"delay from print to {where}, 99 of 100", "s", 1.0, "p99")
    yield measurement(f"delay from print to {where}, the longest", "s", 1.0, "longest")
    yield measurement(f"processor time of {seconds} s", "s", float(seconds), "cost")
    yield measurement("growth of memory in the second half", "MB", most_growth, "growth")
    yield measurement("lines lost", "lines", 0.0, "lost")


def figures(bench: Workbench, how: str, seconds: int) -> dict[str, float]:
    bench.say(how)
    program = [sys.executable, str(PROGRAMS / "service_readers.py"), how, str(seconds)]
    told: dict[str, Any] = json.loads(bench.run(program, timeout=2.0 * seconds + 180))
    median, p99, longest = told["delay"]
    over_time = [(s, mb) for s, mb in told["memory"] if s >= seconds / 2]
    minutes = [
        f"{mb:.0f} MB after {s / 60:.0f} min" for s, mb in told["memory"] if round(s / 60, 1) in MINUTES
    ]
    bench.say(f"{how}: delay {median:.3f} s median, {p99:.3f} s for 99 of 100, {longest:.3f} s the longest")
    bench.say(f"{how}: {', '.join(minutes) or f'{over_time[-1][1]:.0f} MB in the end'}")
    growth = over_time[-1][1] - over_time[0][1]
    return {"p99": p99, "longest": longest, "cost": told["cost"], "growth": growth, "lost": told["lost"]}
