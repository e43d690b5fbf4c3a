"""Pure: how long exchanges took, and which bandwidth that is."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.bench.options import GLOO, Way


@dataclass(frozen=True)
class Timing:
    """All rounds of one way with gradients of one size."""

    bytes: int
    way: Way
    ranks: int
    seconds: tuple[float, ...]  # each on the slowest rank

    @property
    def name(self) -> str:
        return name(self.bytes, self.way)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Row:
    """A timing, and what follows from it."""

    bytes: int
    way: Way
    seconds: float  # median
    bus_bytes_per_s: float
    wire_share: float | None  # of what fp32 could reach at best; None where the links' rate is not known
    times_gloo: float | None  # how many times as fast as gloo's all_reduce

    @property
    def name(self) -> str:
        return name(self.bytes, self.way)


def name(size: int, way: Way) -> str:
    return f"{size_text(size)} {way}"


def traffic(ranks: int) -> float:
    """How many times its own size of fp32 gradients every rank has to send, at least."""
    return 2 * (ranks - 1) / ranks


def rows(timings: Sequence[Timing], rate: float | None) -> list[Row]:
    """One for each timing; `rate` of the links in bits a second, if it is known."""
    gloo = {timing.bytes: timing.median for timing in timings if timing.way == GLOO}
    found = []
    for timing in timings:
        bus = timing.bytes / timing.median * traffic(timing.ranks)
        share = 8 * bus / rate if rate else None
        beside = gloo[timing.bytes] / timing.median if timing.bytes in gloo else None
        found.append(Row(timing.bytes, timing.way, timing.median, bus, share, beside))
    return found


def cells(row: Row) -> dict[str, str]:
    """The row as people read it, by column."""
    share = {} if row.wire_share is None else {"of the wire": f"{100 * row.wire_share:.0f} %"}
    return {
        "size": size_text(row.bytes),
        "sync": "gloo all_reduce" if row.way == GLOO else row.way.sync,
        "compress": row.way.compress,
        "time": f"{1000 * row.seconds:.2f} ms",
        "bus bandwidth": f"{row.bus_bytes_per_s / 1e6:,.1f} MB/s",
        **share,
        "against gloo": "-" if row.times_gloo is None else f"{row.times_gloo:.2f}x",
    }


def size_text(size: float) -> str:
    """64 KB, 1.5 MB."""
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:g} {unit}"
        size /= 1000
    return f"{size:g} GB"


def timing_from_json(data: Mapping[str, Any]) -> Timing:
    """What `dataclasses.asdict` made of a Timing."""
    return Timing(data["bytes"], Way(**data["way"]), data["ranks"], tuple(data["seconds"]))
