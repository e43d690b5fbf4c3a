"""The picture of a benchmark's results. The only importer of matplotlib, which need not be there."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainer.bench import collectives, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT, GRID = "#1f2933", "#6b7785", "#e3e7eb"
COMPUTE, COMMUNICATION, UNKNOWN = "#4c78a8", "#f28e2b", "#b8c0c8"
LINES = ("#1f2933", "#4c78a8", "#f28e2b", "#3a9d6e", "#c44e8a", "#8a6fbf", "#b07d2b", "#2aa5b8")
MARKS = "osD^vP*X"
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRID,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "grid.color": GRID,
    "xtick.color": FAINT,
    "ytick.color": INK,
    "legend.frameon": False,
    "figure.constrained_layout.w_pad": 0.12,
    "figure.constrained_layout.h_pad": 0.12,
}


def is_possible() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def png(kind: str, rows: Sequence[Any], facts: Mapping[str, Any]) -> bytes:
    """The picture of these rows, as the content of a file."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        figure = comparison(rows) if kind == "table" else bandwidths(rows, facts.get("rate"))
        content = io.BytesIO()
        figure.savefig(content, format="png", dpi=160, facecolor="white")
    return content.getvalue()


# --- The comparison table --------------------------------------------------------------------------


def comparison(rows: Sequence[table.Row]) -> Figure:
    """What a step's time is made of, and beside it what the model knew in the end."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.5 + 0.42 * len(rows)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    steps(left, rows)
    accuracies(right, rows)
    left.set_yticks(range(len(rows)), [row.name for row in rows])
    left.set_ylim(len(rows) - 0.4, -0.6)  # the first on top
    for axes in (left, right):
        axes.tick_params(length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.grid(visible=False, axis="y")
    return figure


def steps(axes: Axes, rows: Sequence[table.Row]) -> None:
    longest = max(row.step_ms for row in rows)
    for place, row in enumerate(rows):
        if row.compute_ms is None or row.comm_ms is None:
            axes.barh(place, row.step_ms, height=0.62, color=UNKNOWN, hatch="////", edgecolor="white")
        else:
            axes.barh(place, row.compute_ms, height=0.62, color=COMPUTE)
            axes.barh(place, row.comm_ms, left=row.compute_ms, height=0.62, color=COMMUNICATION)
        length = f"{row.step_ms:,.0f}" if row.step_ms >= 100 else f"{row.step_ms:.3g}"
        words = f"{length} ms" + ("" if row.speed_up is None else f"   {row.speed_up:.2f}x")
        axes.text(row.step_ms + 0.012 * longest, place, words, va="center", color=FAINT, fontsize=9)
    axes.set_xlim(0, 1.28 * longest)
    axes.set_title("Time of a step, and speed-up in images a second", pad=26)
    axes.set_xlabel("ms", color=FAINT)
    parts = {"computing": COMPUTE, "waiting for the mean gradient": COMMUNICATION}
    if any(row.comm_ms is None for row in rows):
        parts["not told apart"] = UNKNOWN
    for name, colour in parts.items():
        axes.barh([0], [0], color=colour, label=name)
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=len(parts), borderaxespad=0.2,
        handlelength=1, handleheight=0.9, columnspacing=1.4, fontsize=9,
    )  # fmt: skip


def accuracies(axes: Axes, rows: Sequence[table.Row]) -> None:
    values = [100 * row.accuracy for row in rows]
    spreads = [100 * (row.spread or 0.0) for row in rows]
    axes.errorbar(
        values, range(len(rows)), xerr=spreads, fmt="o", color=INK, ecolor=FAINT, elinewidth=1.4, capsize=3,
        markersize=6,
    )  # fmt: skip
    for place, value in enumerate(values):
        axes.annotate(
            f"{value:.2f}", (value, place), (0, 8), textcoords="offset points", ha="center", va="bottom",
            color=FAINT, fontsize=8,
        )  # fmt: skip
    low = min(value - spread for value, spread in zip(values, spreads, strict=True))
    high = max(value + spread for value, spread in zip(values, spreads, strict=True))
    margin = max(0.15 * (high - low), 0.1)
    axes.set_xlim(low - margin, high + margin)
    several = max(row.seeds for row in rows)
    axes.set_title("Test accuracy", pad=26)
    over = f"mean and standard deviation of {several} seeds" if several > 1 else "of one seed"
    axes.annotate(over, (0, 1), (0, 9), xycoords="axes fraction", textcoords="offset points", fontsize=9)
    axes.set_xlabel("%", color=FAINT)


# --- Collectives -----------------------------------------------------------------------------------


def bandwidths(rows: Sequence[collectives.Row], rate: float | None) -> Figure:
    """Bus bandwidth over size, a line for each way."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    ways = list(dict.fromkeys(row.way for row in rows))
    for number, way in enumerate(ways):
        own = sorted((row for row in rows if row.way == way), key=lambda row: row.bytes)
        axes.plot(
            [row.bytes for row in own],
            [row.bus_bytes_per_s / 1e6 for row in own],
            color=LINES[number % len(LINES)],
            marker=MARKS[number % len(MARKS)],
            linestyle="--" if number == 0 else "-" if number < len(LINES) else "-.",
            linewidth=1.8,
            markersize=5,
            label="gloo all_reduce" if number == 0 else str(way),
        )
    if rate:
        axes.axhline(rate / 8e6, color=FAINT, linewidth=1, linestyle=":")
        axes.annotate(
            f"the links: {rate / 1e6:,g} Mbit/s", (0.01, rate / 8e6), (0, 3),
            xycoords=("axes fraction", "data"), textcoords="offset points", color=FAINT, fontsize=9,
        )  # fmt: skip
    sizes = sorted({row.bytes for row in rows})
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(sizes, [collectives.size_text(size) for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.tick_params(length=0, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("Bus bandwidth of the mean over all ranks")
    axes.set_xlabel("gradients in fp32", color=FAINT)
    axes.set_ylabel("MB/s", color=FAINT)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
