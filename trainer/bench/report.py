"""The results of a benchmark as Markdown and JSON, and into files."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer import wholefile
from trainer.bench import collectives, table
from trainer.compress import AUTO, AUTO_STEPS
from trainer.errors import InputError, TrainerError

Row = table.Row | collectives.Row
NO_PICTURE = f"no picture: there is no matplotlib in {sys.executable}: pip install 'ringctl[bench]' there"


@dataclass(frozen=True)
class Results:
    """All there is to tell of a benchmark."""

    kind: str  # one of options.KINDS
    command: str  # that it was started with
    facts: Mapping[str, Any]
    planned: int
    measured: Sequence[Mapping[str, Any]]  # Run or Timing


def from_json(data: Mapping[str, Any]) -> Results:
    return Results(**data)


def rows(results: Results) -> Sequence[Row]:
    if results.kind == "table":
        return table.rows([table.run_from_json(each) for each in results.measured])
    timings = [collectives.timing_from_json(each) for each in results.measured]
    return collectives.rows(timings, results.facts.get("rate"))


def cells(row: Row) -> dict[str, str]:
    return table.cells(row) if isinstance(row, table.Row) else collectives.cells(row)


# --- Text ------------------------------------------------------------------------------------------

TITLES = {"table": "Ways to train", "collectives": "Ways for gradients to meet"}
NOTES = {
    "table": """\
Time is that of all steps on the slowest rank, without start and evaluation. Speed-up compares images a
second with one process alone. A step's communication is what a rank waits for the mean gradient, and for
slower ranks, after its own gradient was ready: what travels while it computes counts as computing. `ddp`
waits inside of its backward pass, where it cannot be told apart. Sent is what one rank sends, the mean over
the ranks. Figures are means over the seeds; ± is their standard deviation.""",
    "collectives": """\
Each time is the median of rounds in which all ways take turns, on the slowest rank of each round, for the
mean over all ranks of random gradients of that size in fp32. Bus bandwidth is bytes / time x 2(N-1)/N, as
nccl-tests defines it for an all-reduce; with a format it still counts the fp32 bytes that it stands for. Of
the wire is that bandwidth beside the links' own: 100 % is the most that fp32 can reach, and a format can
exceed it.""",
}


def markdown(results: Results, picture: bool) -> str:
    """The page that people read."""
    shown = [cells(row) for row in rows(results)]
    lines = [f"# {TITLES[results.kind]}", "", "```sh", results.command, "```", ""]
    lines += [f"- {words}" for words in fact_lines(results)]
    lines += ["", *markdown_table(shown)]
    if picture:
        lines += ["", f"![{TITLES[results.kind]}]({results.kind}.png)"]
    return "\n".join([*lines, "", NOTES[results.kind], ""])


def markdown_table(shown: Sequence[Mapping[str, str]]) -> list[str]:
    texts = [list(shown[0]), *(list(row.values()) for row in shown)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    words = ("sync", "compress")  # the rest are figures
    rule = [
        "-" * width if name in words else "-" * (width - 1) + ":"
        for name, width in zip(shown[0], widths, strict=True)
    ]
    padded = [
        [
            text.ljust(width) if name in words else text.rjust(width)
            for name, text, width in zip(shown[0], row, widths, strict=True)
        ]
        for row in texts
    ]
    return [f"| {' | '.join(row)} |" for row in (padded[0], rule, *padded[1:])]


def fact_lines(results: Results) -> list[str]:
    """What a reader must know to compare the figures with his own."""
    facts = results.facts
    hosts = facts["hosts"]
    places = ", ".join(f"{host['host']} ({host['ranks']} ranks, {host['cores']} cores)" for host in hosts)
    first = hosts[0]
    lines = [
        f"{facts['date']}: {facts['world']} ranks on {places}",
        f"{first['cpu']}, torch {first['torch']}, {counted(first['threads'], 'thread')} a rank",
        "links: " + (f"{facts['rate'] / 1e6:,g} Mbit/s, says --rate" if facts["rate"] else "of unknown rate"),
    ]
    if results.kind == "table":
        length = f"{facts['steps']} steps" if facts["steps"] else counted(facts["epochs"], "epoch")
        lines.append(
            f"{facts['model']} ({facts['parameters']:,} parameters), {facts['images']:,} images, {length}, "
            f"batch {facts['batch_size']} a rank, {counted(facts['seeds'], 'seed')}"
        )
        runs = [table.run_from_json(each) for each in results.measured]
        if any(run.case.way.compress == AUTO and run.steps < AUTO_STEPS for run in runs):
            lines.append(
                f"auto did not choose, for which it needs {AUTO_STEPS} steps: it is a mix of formats"
            )
    if len(results.measured) < results.planned:
        lines.append(f"cut short: {len(results.measured)} of {results.planned} measurements were taken")
    return lines


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def as_json(results: Results) -> dict[str, Any]:
    """Everything, for programs."""
    complete = len(results.measured) == results.planned
    return {**asdict(results), "complete": complete, "rows": [asdict(row) for row in rows(results)]}


# --- Files -----------------------------------------------------------------------------------------


def folder_for(out: str) -> Path:
    """The folder for the results, there and writable before anything is measured; or InputError."""
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"--out {out}: cannot write there: {error.strerror}") from None
    return folder


def write(folder: Path, results: Results) -> list[str]:
    """Write KIND.md, KIND.json and KIND.png there, each at once or not at all; what was written, in words."""
    from trainer.bench import plot

    picture = plot.png(results.kind, rows(results), results.facts) if plot.is_possible() else None
    contents = {
        "md": markdown(results, picture is not None).encode(),
        "json": json.dumps(as_json(results), indent=1).encode() + b"\n",
        **({"png": picture} if picture is not None else {}),
    }
    try:
        for suffix, content in contents.items():
            path = folder / f"{results.kind}.{suffix}"
            wholefile.write(path, path.with_name(f".{path.name}-{os.getpid()}"), content)
    except OSError as error:
        raise TrainerError(f"{folder}: the results cannot be written there: {error.strerror}") from None
    written = [f"wrote {', '.join(str(folder / f'{results.kind}.{suffix}') for suffix in contents)}"]
    return written if picture is not None else [*written, NO_PICTURE]
