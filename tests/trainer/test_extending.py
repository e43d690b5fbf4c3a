"""What CONTRIBUTING.md says about a new strategy, format and model, done to a copy of the trainer."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROJECT = Path(__file__).resolve().parent.parent.parent
BLOCK = re.compile(r"^```python (\S+?)(?: (\w+))?\n(.*?)^```$", re.M | re.S)

RUN = """
import json, runpy, sys
from pathlib import Path
from ranks import trained

for name, options in json.loads(sys.argv[1]).items():
    ranks = trained(2, Path(name), "--steps", "3", "--check-sync", "1", *options)
    print(json.dumps([name, [[rank.exit_code, rank.err, rank.records[-1:]] for rank in ranks]]))
runpy.run_path("scripts/tables.py", run_name="__main__")
"""
RUNS = {
    "new strategy": ["--sync", "gather"],
    "ring": ["--sync", "ring"],
    "new format": ["--compress", "int16"],
    "known format": ["--compress", "fp16"],
    "new model": ["--model", "linear"],
}


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the trainer, into which all of CONTRIBUTING.md's code blocks have been put."""
    folder = tmp_path_factory.mktemp("extended")
    shutil.copytree(PROJECT / "trainer", folder / "trainer", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PROJECT / "tests" / "trainer" / "ranks.py", folder)
    for path in ("scripts/tables.py", "docs/trainer.md"):
        (folder / path).parent.mkdir()
        shutil.copy(PROJECT / path, folder / path)
    for path, table, code in BLOCK.findall((PROJECT / "CONTRIBUTING.md").read_text()):
        put(folder / path, table, code)
    return folder


def put(file: Path, table: str, code: str) -> None:
    """As the reader would: a new file, a function above the table, or a line at the end of the table."""
    if not file.exists():
        file.write_text(code)
        return
    before, begin, after = re.split(
        rf"(^{table or '[A-Z]+'}: dict.*?\n)", file.read_text(), maxsplit=1, flags=re.M
    )
    if table:
        assert len(code.splitlines()) == 1, f"{file.name}: more than one line"
        entries, end, rest = after.partition("}\n")
        file.write_text(before + begin + entries + code + end + rest)
    else:
        file.write_text(before + code + "\n\n" + begin + after)


@pytest.fixture(scope="module")
def trained(extended: Path) -> dict[str, list[dict[str, Any]]]:
    """The last record of each of two ranks, for each of RUNS; one process imports torch for all of them."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(RUNS)],
        cwd=extended,
        env=os.environ | {"PYTHONPATH": str(extended), "RINGCTL_HOME": str(extended / "home")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    records = {}
    for name, ranks in map(json.loads, done.stdout.splitlines()):
        assert [code for code, _, _ in ranks] == [0, 0], ranks
        records[name] = [last for _, _, (last,) in ranks]
        assert len({record["parameters_sha256"] for record in records[name]}) == 1
    return records


def test_the_new_strategy_makes_the_same_mean_as_the_ring(trained: dict[str, list[dict[str, Any]]]) -> None:
    # Of two ranks, whose sum is the same in either order.
    assert trained["new strategy"][0]["parameters_sha256"] == trained["ring"][0]["parameters_sha256"]
    assert trained["new strategy"][0]["bytes_sent"] == 3 * 4 * 29_034


def test_the_new_format_travels_in_16_bits(trained: dict[str, list[dict[str, Any]]]) -> None:
    assert trained["new format"][0]["bytes_sent"] == trained["known format"][0]["bytes_sent"]
    hashes = {trained[name][0]["parameters_sha256"] for name in ("new format", "known format", "ring")}
    assert len(hashes) == 3, "the new format was not used"
    assert trained["new format"][0]["loss"] == pytest.approx(trained["ring"][0]["loss"], abs=1e-3)


def test_the_new_model_is_trained(trained: dict[str, list[dict[str, Any]]]) -> None:
    # Each of two ranks sends as much as there is.
    assert trained["new model"][0]["bytes_sent"] == 3 * 4 * 7_850


@pytest.mark.usefixtures("trained")
def test_the_new_names_come_into_the_documentation_by_themselves(extended: Path) -> None:
    page = (extended / "docs" / "trainer.md").read_text()
    for words in (
        "| `gather` | Everybody's whole gradient to everybody",
        "| `int16` | 16 bits: whole numbers",
        "| `linear` | One linear layer",
    ):
        assert words in page
