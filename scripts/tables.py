"""Fill the tables of docs/trainer.md from the names that the trainer knows, in place:

python scripts/tables.py
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from trainer import compress
from trainer.compress import AUTO, FORMATS
from trainer.config import Config
from trainer.models import MODELS
from trainer.sync import STRATEGIES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "trainer.md"
MANY = 1 << 16  # values: enough for what a message has beside them not to count


def strategies() -> str:
    rows = [["`--sync`", "what it is", "devices"], ["---"] * 3]
    rows += [
        [f"`{name}`", about(known.where), ", ".join(known.devices)] for name, known in STRATEGIES.items()
    ]
    return table(rows)


def formats() -> str:
    rows = [["`--compress`", "what it is", "bits a value", "error feedback"], ["---"] * 4]
    for name, where in FORMATS.items():
        feedback = "yes" if compress.load(name).feedback else ""
        rows.append([f"`{name}`", about(where), bits(name), feedback])
    return table(rows)


def pairs() -> str:
    """Who carries what; under it why not, where not."""
    names = [*FORMATS, AUTO]
    rows = [["", *(f"`{name}`" for name in STRATEGIES)], ["---"] + [":-:"] * len(STRATEGIES)]
    for format in names:
        able = ["yes" if format in known.formats else "" for known in STRATEGIES.values()]
        rows.append([f"`{format}`", *able])
    reasons = [f"`{name}`: {known.why}" for name, known in STRATEGIES.items() if known.why]
    return table(rows) + "\n\nWhy not: " + "; ".join(reasons) + "."


def models() -> str:
    rows = [["`--model`", "what it is"], ["---"] * 2]
    rows += [[f"`{name}`", first_line(make.__doc__)] for name, make in MODELS.items()]
    return table(rows)


def bits(name: str) -> str:
    if name == compress.LOW_RANK:
        return "by the shape"
    return f"{round(8 * compress.create(name, Config()).size(MANY) / MANY, 3):g}"


def about(where: str) -> str:
    """The first line of the module's own description."""
    return first_line(importlib.import_module(where.partition(":")[0]).__doc__)


def first_line(text: str | None) -> str:
    return (text or "").strip().splitlines()[0]


def table(rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


TABLES = {"strategies": strategies, "formats": formats, "pairs": pairs, "models": models}


def filled(page: str) -> str:
    """The page with what lies between `<!-- NAME -->` and `<!-- end of NAME -->` made anew."""
    for name, make in TABLES.items():
        before, begin, rest = page.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- end of {name} -->")
        if not end:
            raise SystemExit(f"the page has no place for the table of {name}")
        page = f"{before}{begin}{make()}\n{end}{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
