"""What rank 0 says while a benchmark runs, and the files it leaves; the other ranks are silent.

Under `ringctl bench` the files are the controller's business: it reads them out of the log, where each line

    bench {"facts": ..., "planned": N}
    bench {"row": NAME, "cells": {COLUMN: TEXT}, "measured": ...}

begins what is known, or tells the newest state of one row of the table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainer import group
from trainer.bench import report
from trainer.bench.collectives import Timing
from trainer.bench.options import NO_FILES, Asked
from trainer.bench.table import Run


class Reporter:
    """Takes what was measured, as it comes."""

    def __init__(self, asked: Asked, command: str) -> None:
        self._asked, self._command = asked, command
        self._facts: Mapping[str, Any] = {}
        self._planned = 0
        self._measured: list[dict[str, Any]] = []

    def begin(self, facts: Mapping[str, Any], planned: int) -> None:
        """Called once, inside of a group of all ranks."""
        self._facts, self._planned = facts, planned
        self._line({"facts": facts, "planned": planned})

    def add(self, measured: Run | Timing) -> None:
        """Called inside of the group that measured it."""
        if group.rank() != 0:
            return
        self._measured.append(asdict(measured))
        row = next(row for row in report.rows(self._results()) if row.name == measured.name)
        cells = report.cells(row)
        if self._asked.out != NO_FILES:
            words = ", ".join(f"{column} {text}" for column, text in cells.items())
            print(f"{len(self._measured)}/{self._planned}  {measured.name}: {words}", flush=True)
        self._line({"row": measured.name, "cells": cells, "measured": self._measured[-1]})

    def finish(self) -> None:
        """Write the files, also of a benchmark that was cut short."""
        if self._measured and self._asked.out != NO_FILES:
            for words in report.write(Path(self._asked.out), self._results()):
                print(words, flush=True)

    def _results(self) -> report.Results:
        return report.Results(
            self._asked.kind, self._command, self._facts, self._planned, tuple(self._measured)
        )

    def _line(self, record: Mapping[str, Any]) -> None:
        if group.rank() == 0 and self._asked.out == NO_FILES:
            print("bench " + json.dumps(record), flush=True)
