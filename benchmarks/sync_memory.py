"""How much memory gradients and all that belongs to their meeting take."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

from benchmarks.measurement import Measurement, Series, Target
from benchmarks.workbench import BIN, PROGRAMS, CannotRun, Workbench

WORLD = 4
NAMES = {"ring": Target("ratio", "at most", 2.5), "ddp": None, "ring:int8": None}


def sync_memory(bench: Workbench) -> Iterator[Measurement]:
    """Memory of gradients and of what their meeting needs, on the largest of four ranks."""
    for name, target in NAMES.items():
        program = [sys.executable, str(PROGRAMS / "sync_memory.py"), name]
        launch = [str(BIN / "ringctl"), "launch", "--local", "--world", str(WORLD), "--json", "--", *program]
        events = [json.loads(line) for line in bench.run(launch).splitlines()]
        told = [json.loads(event["text"]) for event in events if event["kind"] == "line"]
        if len(told) != WORLD:
            raise CannotRun(f"{name}: {len(told)} of {WORLD} ranks said what they took")
        took = Series(name, "MB", (max(rank["took"] for rank in told),))
        gradient = Series("the gradients alone", "MB", (told[0]["gradient"],))
        yield Measurement(f"memory, {name}", took, gradient, target)
