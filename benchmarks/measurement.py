"""Pure: what was measured, what was wanted, and whether it was reached."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any, Literal

Unit = Literal["s", "lines/s", "lines", "MB", "%", ""]
Statistic = Literal["median", "mean", "best", "worst"]
OTHER_WAY = {"at most": "at least", "at least": "at most"}


@dataclass(frozen=True)
class Series:
    """All that one contestant measured, in the order of its runs."""

    name: str
    unit: Unit
    values: tuple[float, ...]

    def figure(self, statistic: Statistic) -> float:
        if statistic == "median":
            return statistics.median(self.values)
        if statistic == "mean":
            return statistics.fmean(self.values)
        lower_is_better = self.unit in ("s", "MB")
        return min(self.values) if lower_is_better == (statistic == "best") else max(self.values)


@dataclass(frozen=True)
class Target:
    """A limit on the ratio (ours / theirs), on the difference (ours - theirs), or on ours alone."""

    of: Literal["ratio", "difference", "ours"]
    bound: Literal["at most", "at least"]
    limit: float

    def text(self, unit: Unit) -> str:
        if self.of == "ratio":
            return f"{self.bound} {self.limit:g}x"
        if self.of == "difference" and self.limit < 0:
            return f"{OTHER_WAY[self.bound]} {quantity(-self.limit, unit)} less"
        more = " more" if self.of == "difference" else ""
        return f"{self.bound} {quantity(self.limit, unit)}{more}"


@dataclass(frozen=True)
class Measurement:
    """One comparison: ringctl, and what people would use instead, in the same run.

    `statistic` says what stands for a series. The median is for ratios: what disturbs the machine
    disturbs both sides. A limit in absolute figures is judged by the best run, which is the
    nearest to what the work itself costs; a promise that must always hold, by the worst; accuracy over
    several seeds by the mean."""

    what: str
    ours: Series
    theirs: Series
    target: Target | None = None
    statistic: Statistic = "median"

    @property
    def figures(self) -> tuple[float, float]:
        """(ours, theirs)."""
        return self.ours.figure(self.statistic), self.theirs.figure(self.statistic)

    @property
    def ratio(self) -> float | None:
        """None where theirs is nothing, such as lines lost."""
        ours, theirs = self.figures
        return ours / theirs if theirs else None

    @property
    def reached(self) -> bool | None:
        """None where there is no target."""
        if self.target is None:
            return None
        ours, theirs = self.figures
        value = {"ratio": self.ratio, "difference": ours - theirs, "ours": ours}[self.target.of]
        if value is None:
            return None
        return value <= self.target.limit if self.target.bound == "at most" else value >= self.target.limit

    def to_json(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "unit": self.ours.unit,
            "statistic": self.statistic,
            "ours": side_json(self.ours, self.statistic),
            "theirs": side_json(self.theirs, self.statistic),
            "ratio": self.ratio,
            "target": self.target.text(self.ours.unit) if self.target else None,
            "reached": self.reached,
        }


def side_json(series: Series, statistic: Statistic) -> dict[str, Any]:
    figures = {"value": series.figure(statistic), "median": series.figure("median")}
    return {"name": series.name, **figures, "runs": list(series.values)}


def quantity(value: float, unit: Unit) -> str:
    """A figure as people read it: 187 ms, 2.31 s, 100,000 lines/s."""
    if unit == "%":
        return f"{value:.2f} %"
    if unit != "s":
        return f"{value:,.0f} {unit}"
    return f"{value * 1000:.0f} ms" if abs(value) < 1 else f"{value:.2f} s"
