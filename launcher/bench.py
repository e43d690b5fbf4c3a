"""A benchmark's figures, taken out of rank 0's output while it runs. trainer/bench/reporter.py writes them.

What they mean is the trainer's business: here they are text to show, and JSON to hand back for the report.
"""

from __future__ import annotations

import json
import subprocess
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

from launcher import render, text
from launcher.ask import TRAINER
from launcher.errors import RingctlError
from launcher.logs import visible
from launcher.model import Event, Plan, RunState

if TYPE_CHECKING:
    from launcher.watch import Outcome

MARK = "bench "


class Figures:
    """What has been measured so far."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.planned = 0
        self.measured: list[Any] = []
        self._cells: dict[str, dict[str, str]] = {}  # the newest of each row, by its name

    def take(self, event: Event) -> str | None:
        """Learn from the event, if it tells a figure; what it says in words, or None."""
        record = record_of(event)
        if record is None:
            return None
        if "facts" in record:
            self.facts, self.planned = record["facts"], record["planned"]
            return f"{self.planned} measurements to take"
        cells = {str(column): visible(str(cell)) for column, cell in record["cells"].items()}
        self._cells[record["row"]] = cells
        self.measured.append(record["measured"])
        words = ", ".join(f"{column} {cell}" for column, cell in cells.items())
        return f"{self.progress}  {visible(str(record['row']))}: {words}"

    @property
    def progress(self) -> str:
        return f"{len(self.measured)}/{self.planned}"

    @property
    def rows(self) -> list[text.Row]:
        """The table so far, its header first; empty where there is nothing to show."""
        cells = list(self._cells.values())
        return (
            [[column.upper() for column in cells[0]], *(list(row.values()) for row in cells)] if cells else []
        )

    def results(self, kind: str, command: str) -> dict[str, Any]:
        """As the trainer's report wants them."""
        about = {"kind": kind, "command": command, "facts": self.facts}
        return {**about, "planned": self.planned, "measured": self.measured}


def record_of(event: Event) -> dict[str, Any] | None:
    """The record that rank 0 told in this line, if it is one."""
    if event.kind != "line" or event.rank != 0 or not event.data["text"].startswith(MARK):
        return None
    try:
        record = json.loads(event.data["text"][len(MARK) :])
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    is_row = {"row", "measured"} <= record.keys() and isinstance(record.get("cells"), dict)
    return record if is_row or {"facts", "planned"} <= record.keys() else None


def write_report(out: str, results: dict[str, Any]) -> list[str]:
    """Let the trainer write the files into the folder `out`; what it says of them."""
    argv = [sys.executable, TRAINER, "--bench", "report", out]
    done = subprocess.run(argv, input=json.dumps(results), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RingctlError(done.stderr.strip() or f"the report failed (exit code {done.returncode})")
    return done.stdout.splitlines()


# --- Screens -------------------------------------------------------------------------------------


class Quiet(render.JsonScreen):
    """Nothing on stdout, which is for the result; ringctl's own words on stderr."""

    def show(self, events: list[Event], state: RunState) -> None:
        pass

    def finish(self, outcome: Outcome) -> None:
        for line in text.cause_lines(outcome):
            self.note(line)


class Collecting:
    """A screen that keeps the figures, and shows the table that they make as it grows."""

    def __init__(self, on: render.RunScreen, figures: Figures) -> None:
        self._on, self._figures = on, figures

    def __enter__(self) -> None:
        self._on.__enter__()

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._on.__exit__(kind, value, trace)

    def plan(self, plan: Plan) -> None:
        self._on.plan(plan)

    def note(self, words: str) -> None:
        self._on.note(words)

    def finish(self, outcome: Outcome) -> None:
        self._on.finish(outcome)

    def show(self, events: list[Event], state: RunState) -> None:
        in_words = [self._in_words(event) for event in events]
        if isinstance(self._on, render.LiveScreen):
            self._on.kept, self._on.caption = self._figures.rows, self._figures.progress
            in_words = [event for event in in_words if not is_output(event)]  # the table says it better
        self._on.show(in_words, state)

    def _in_words(self, event: Event) -> Event:
        words = self._figures.take(event)
        return event if words is None else event._replace(data={**event.data, "text": words})


def is_output(event: Event) -> bool:
    return event.kind == "line" and event.data["stream"] == "out"
