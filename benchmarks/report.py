"""Pure: the measurements of a benchmark as a table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.measurement import Measurement, quantity

HEADER = ("WHAT", "OURS", "THEIRS", "", "RATIO", "TARGET", "REACHED", "BY")
LEGEND = """\
RATIO is ours divided by theirs. BY says which of the alternating runs the figures are: the median where
a ratio counts, the best where an absolute limit does, the worst where it must hold every time, the mean
where seeds differ."""


def table(measurements: Sequence[Measurement]) -> list[str]:
    """The comparisons as lines with aligned columns."""
    rows = [HEADER, *(row(measurement) for measurement in measurements)]
    widths = [max(len(cells[i]) for cells in rows) for i in range(len(HEADER))]
    return ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in rows]


def row(measurement: Measurement) -> tuple[str, ...]:
    ours, theirs = measurement.figures
    unit = measurement.ours.unit
    return (
        measurement.what,
        quantity(ours, unit),
        quantity(theirs, unit),
        measurement.theirs.name,
        "-" if measurement.ratio is None else f"{measurement.ratio:.2f}x",
        measurement.target.text(unit) if measurement.target else "-",
        {True: "yes", False: "no", None: "-"}[measurement.reached],
        judged_by(measurement),
    )


def judged_by(measurement: Measurement) -> str:
    """Which of our runs counts; where it is the best one, also what the median was, so that luck shows."""
    by = f"{measurement.statistic} of {len(measurement.ours.values)}"
    if measurement.statistic != "best":
        return by
    middle = [quantity(side.figure("median"), side.unit) for side in (measurement.ours, measurement.theirs)]
    return f"{by}; medians {middle[0]}, {middle[1]}"


def as_json(
    machine: Mapping[str, Any], results: Mapping[str, Sequence[Measurement]], failures: Mapping[str, str]
) -> dict[str, Any]:
    """{"machine", "benchmarks": {name: [comparison, ...]}, "failures": {name: why it could not run}}."""
    benchmarks = {name: [m.to_json() for m in measurements] for name, measurements in results.items()}
    return {"machine": dict(machine), "benchmarks": benchmarks, "failures": dict(failures)}
