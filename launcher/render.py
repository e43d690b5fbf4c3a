"""What a run looks like while it is watched: plain lines, JSON, or a live terminal.

The only importer of rich, and only where there is a terminal to draw on.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from launcher import text
from launcher.logs import Group, fold_repeats, line_writer, visible
from launcher.model import Event, Plan, RunState
from launcher.output import Output

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console, RenderableType

    from launcher.watch import Outcome

PROGRESS_S = 5.0  # how often a pipe gets a progress line
MOMENT_S = 0.15  # lines this close together count as the same moment
COLOURS = (
    "cyan",
    "green",
    "yellow",
    "magenta",
    "bright_blue",
    "bright_red",
    "bright_green",
    "bright_magenta",
)


def is_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def console() -> Console:
    """The terminal, as rich sees it; NO_COLOR is honoured."""
    from rich.console import Console

    return Console(highlight=False, emoji=False)


def screen_for(json: bool, output: Output | None = None) -> PlainScreen | JsonScreen | LiveScreen:
    """The screen that fits where stdout goes."""
    if json:
        return JsonScreen(output)
    return LiveScreen() if is_terminal() else PlainScreen(output)


def write_out(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def say(lines: list[str], write: Callable[[bytes], None] = write_out) -> None:
    """Into a pipe as it is."""
    if sys.stdout.isatty():
        lines = [visible(part) for line in lines for part in line.split("\n")]
    write("".join(line + "\n" for line in lines).encode("utf-8", "surrogateescape"))


class RunScreen(Protocol):
    """A screen (see watch.Screen) that is open while the run is watched, and then tells how it ended."""

    def __enter__(self) -> None: ...
    def __exit__(
        self, kind: type | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def plan(self, plan: Plan) -> None: ...
    def show(self, events: list[Event], state: RunState) -> None: ...
    def note(self, words: str, /) -> None: ...
    def finish(self, outcome: Outcome) -> None: ...


class _Context:
    """A screen is open while its `with` block runs."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        pass


class JsonScreen(_Context):
    """One event a line on stdout; ringctl's own words on stderr."""

    def __init__(self, output: Output | None = None) -> None:
        self._output = output or Output()

    def plan(self, plan: Plan) -> None:
        pass

    def show(self, events: list[Event], state: RunState) -> None:  # noqa: ARG002 - a Screen gets both
        if events:
            self._output.write("".join(text.json_line(event.to_json()) + "\n" for event in events).encode())

    def note(self, words: str) -> None:
        self._output.note(words)

    def finish(self, outcome: Outcome) -> None:
        self.show([outcome.event()], outcome.state)


class NoteScreen(_Context):
    """For a file that nobody reads unless something went wrong: ringctl's own words, each with its time."""

    def plan(self, plan: Plan) -> None:
        self.note(text.plan_lines(plan)[0])

    def show(self, events: list[Event], state: RunState) -> None:
        pass

    def note(self, words: str) -> None:
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {words}\n"
        with contextlib.suppress(OSError):  # a full disk: the run is looked after all the same
            os.write(sys.stdout.fileno(), line.encode("utf-8", "surrogateescape"))

    def finish(self, outcome: Outcome) -> None:
        for line in (*text.cause_lines(outcome), text.verdict(outcome)):
            self.note(line)


class PlainScreen(_Context):
    """For pipes, files, CI and dumb terminals: no animation, no colour, nothing folded."""

    def __init__(self, output: Output | None = None) -> None:
        self._output = output or Output()
        self._lines = line_writer(prefix=True, timestamps=False, obeyed=sys.stdout.isatty())
        self._next_progress = time.monotonic() + PROGRESS_S

    def plan(self, plan: Plan) -> None:
        self._say(text.plan_lines(plan))

    def show(self, events: list[Event], state: RunState) -> None:
        data = self._lines(events)
        if data:
            self._output.write(data)
        if time.monotonic() >= self._next_progress:
            self._next_progress = time.monotonic() + PROGRESS_S
            parts = text.progress_parts(state)
            if parts:
                self.note("  ".join(parts))

    def note(self, words: str) -> None:
        self._say([f"ringctl: {words}"])

    def finish(self, outcome: Outcome) -> None:
        ranks = text.columns(text.rank_rows(outcome.state))
        self._say([*text.cause_lines(outcome), *ranks, text.verdict(outcome)])

    def _say(self, lines: list[str]) -> None:
        say(lines, self._output.write)


class LiveScreen:
    """A terminal: lines scroll by above a progress bar; equal lines of several ranks are folded."""

    def __init__(self, on: Console | None = None) -> None:
        from rich.live import Live

        self.console = on or console()
        self._live = Live(console=self.console, refresh_per_second=8, transient=True)
        self._waiting: list[Event] = []
        self._show_at = 0.0
        self.kept: list[text.Row] = []  # a table to keep in sight
        self.caption = ""

    def __enter__(self) -> None:
        self._live.start()

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._print_waiting()
        self._live.stop()

    def plan(self, plan: Plan) -> None:
        head, command, *_ = (visible(line) for line in text.plan_lines(plan))
        self.console.print(head, style="bold", markup=False)
        self.console.print(command, style="dim", markup=False)
        self.console.print(table(text.plan_rows(plan)))

    def show(self, events: list[Event], state: RunState) -> None:
        lines = [event for event in events if event.kind == "line"]
        if lines and not self._waiting:
            self._show_at = time.monotonic() + MOMENT_S
        self._waiting += lines
        if self._waiting and time.monotonic() >= self._show_at:
            self._print_waiting()
        bar = progress(state)
        self._live.update(stacked(table(self.kept, self.caption), bar) if self.kept else bar)

    def note(self, words: str) -> None:
        self._print_waiting()
        self.console.print("\n".join(map(visible, words.split("\n"))), style="bold yellow", markup=False)

    def finish(self, outcome: Outcome) -> None:
        for line in text.cause_lines(outcome):
            self.console.print(visible(line), style="bold red", markup=False, soft_wrap=True)
        self.console.print(table(text.rank_rows(outcome.state)))
        good = outcome.state.state == "succeeded"
        self.console.print(text.verdict(outcome), style="bold green" if good else "bold red", markup=False)

    def _print_waiting(self) -> None:
        if self._waiting:
            print_groups(self.console, fold_repeats(self._waiting))
            self._waiting = []


def print_groups(
    console: Console, groups: list[Group], timestamps: bool = False, prefix: bool = True
) -> None:
    """Lines with their labels in each rank's own colour."""
    from rich.text import Text

    from launcher.logs import stamp

    out = Text()
    for group in groups:
        if timestamps:
            out.append(stamp(group.time) + " ", style="dim")
        colour = COLOURS[min(group.members) % len(COLOURS)] if len(group.members) == 1 else "bold"
        if prefix:
            out.append(visible(group.label()) + " ", style=colour)
        out.append(visible(group.text) + "\n", style="red" if group.stream == "err" else "")
    console.print(out, end="", soft_wrap=True)


def progress(state: RunState) -> RenderableType:
    """The bar and what is known of the run, in one line below the log."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    parts = text.progress_parts(state)
    if not parts:
        return spinner(f" {state.state}: {text.count(state.world, 'rank')}")
    first = next(rank.metric for rank in state.ranks.values() if "step" in rank.metric)
    step, steps = text.number(first.get("step")), text.number(first.get("steps"))
    grid = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=steps, completed=step or 0, width=24) if steps else spinner()
    grid.add_row(bar, Text("  ".join(parts)))
    return grid


def spinner(words: str = "") -> RenderableType:
    from rich.spinner import Spinner

    encoding = sys.__stdout__.encoding if sys.__stdout__ else ""  # a Live stands in the place of sys.stdout
    return Spinner("dots" if encoding.lower().startswith("utf") else "line", text=words)


def stacked(*parts: RenderableType) -> RenderableType:
    from rich import console

    return console.Group(*parts)


def table(rows: list[text.Row], caption: str | None = None) -> RenderableType:
    """Rows of text as a light table; the first row is the header."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    result = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, caption=caption)
    for place, title in enumerate(rows[0]):
        result.add_column(title.lower(), overflow="fold", no_wrap=place == 0)  # an id broken in two is no use
    for row in rows[1:]:
        styles = (STATE_STYLES.get(cell) or SYMBOL_STYLES.get(cell[:1], "") for cell in row)
        result.add_row(*(Text(cell, style=style) for cell, style in zip(row, styles, strict=True)))
    return result


STATE_STYLES = {
    "succeeded": "green",
    "running": "cyan",
    "starting": "cyan",
    "failed": "bold red",
    "lost": "bold red",
    "stopped": "yellow",
}


SYMBOL_STYLES = {"✓": "green", "✗": "bold red", "!": "yellow", "·": "dim"}


def show_findings(lines: list[str]) -> None:
    """What preflight has to say: on a terminal, each finding in its colour, and what to type set apart."""
    if not is_terminal():
        say(lines)
        return
    for line in lines:
        to_type = line.startswith("    ") and "wanted:" not in line
        style = "cyan" if to_type else SYMBOL_STYLES.get(line[:1], "")
        console().print(visible(line), style=style, markup=False, soft_wrap=True)


def show_table(rows: list[text.Row], instead: list[str] | None = None) -> None:
    """A table on a terminal, aligned columns elsewhere; on a terminal so narrow that a table would lose some
    of it, `instead`, or else plain rows."""
    if not is_terminal():
        say(text.columns(rows))
    elif least_width(rows) <= console().width:
        console().print(table([[visible(cell) for cell in row] for row in rows]))
    else:
        say([visible(line) for line in instead or ["  ".join(filter(None, row)) for row in rows]])


def least_width(rows: list[text.Row]) -> int:
    """Of a `table` in which no word is broken: the first column as it is, the others folded between words."""
    titles, *others = zip(*rows, strict=True)
    words = [max(len(word) for cell in column for word in cell.split() or [""]) for column in others]
    return max(map(len, titles)) + sum(3 + width for width in words) + 2
