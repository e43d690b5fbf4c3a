"""`ringctl bench`: here and on hosts, from rank 0's lines to a table on the screen and three files."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launcher import fold
from launcher.bench import Collecting, Figures
from launcher.model import Event, HostPlan, Plan, RankSpec
from launcher.render import LiveScreen
from tests.launcher.hosts import Hosts
from tests.launcher.ringctl import ringctl

PLAN = Plan("r1", "", 1, 1, "127.0.0.1", 9, (), (HostPlan("h", "/w", None, True, (RankSpec(0, 0, (), {}),)),))


def line(text: str, rank: int = 0, stream: str = "out") -> Event:
    return Event("line", 1.0, "r1", 1, "h", rank, {"stream": stream, "text": text})


def told(record: Any) -> Event:
    return line("bench " + json.dumps(record))


def row(name: str, time: str) -> Event:
    return told({"row": name, "cells": {"way": name, "time": time}, "measured": {"figure": time}})


BEGIN = told({"facts": {"world": 1}, "planned": 3})


# --- What rank 0 tells ---------------------------------------------------------------------------


def test_the_newest_word_about_a_row_counts_and_every_measurement_is_kept() -> None:
    figures = Figures()
    assert figures.rows == []
    words = [
        figures.take(event) for event in (BEGIN, row("ring", "3 s"), row("ddp", "4 s"), row("ring", "2 s"))
    ]
    assert words == [
        "3 measurements to take",
        "1/3  ring: way ring, time 3 s",
        "2/3  ddp: way ddp, time 4 s",
        "3/3  ring: way ring, time 2 s",
    ]
    assert figures.rows == [["WAY", "TIME"], ["ring", "2 s"], ["ddp", "4 s"]]
    results = figures.results("table", "cmd")
    assert results["measured"] == [{"figure": "3 s"}, {"figure": "4 s"}, {"figure": "2 s"}]
    assert (results["kind"], results["command"], results["planned"]) == ("table", "cmd", 3)


@pytest.mark.parametrize(
    "event",
    [
        line("benchmarks are fun"),
        line("bench of wood"),
        line('bench {"cells": '),
        line('bench ["cells"]'),
        line('bench {"cells": {"a": "b"}}'),
        line('bench {"row": "x", "cells": 3, "measured": 1}'),
        line('bench {"facts": {}, "planned": 3}', rank=1),
        Event("metric", 1.0, "r1", 1, "h", 0, {"step": 1}),
    ],
)
def test_what_is_no_record_of_rank_0_is_left_as_it_is(event: Event) -> None:
    figures = Figures()
    assert figures.take(event) is None
    assert (figures.rows, figures.measured, figures.planned) == ([], [], 0)


def test_a_terminal_keeps_the_table_in_sight_and_shows_complaints_above_it() -> None:
    paper = io.StringIO()
    screen = LiveScreen(Console(force_terminal=True, file=paper, width=100, highlight=False))
    collecting = Collecting(screen, Figures())
    with collecting:
        events = [BEGIN, row("ring", "3 s\x1b[2J"), line("epoch 1/3"), line("a warning", stream="err")]
        collecting.show(events, fold.initial(PLAN))
    shown = paper.getvalue()
    assert "3 s\\x1b[2J" in shown
    assert "1/3" in shown
    assert "a warning" in shown
    assert "epoch 1/3" not in shown
    assert "measured" not in shown


# --- Real runs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("table", "--compress", "int9"), "--compress cannot be 'int9'; did you mean int8?"),
        (("table", "--world", "0"), "--world 0: a run has at least one rank"),
        (("collectives", "--out", "file/below"), "--out file/below: Not a directory"),
    ],
)
def test_bad_input_is_told_before_anything_starts(
    words: tuple[str, ...], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    done = ringctl("bench", *words, "--local", code=2)
    assert complaint in done.stderr
    assert not list((tmp_path / "ringctl").glob("runs/*"))


def test_the_table_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--local", "--world", "2", "--steps", "2", "--seeds", "1", "--compress", "int8", "--json"]
    done = ringctl("bench", "table", *words)
    data = json.loads(done.stdout)
    assert [row["case"]["ranks"] for row in data["rows"]] == [1, 2, 2]
    assert data["complete"]
    assert data["command"] == f"ringctl bench table {' '.join(words)}"
    assert data["facts"]["hosts"][0]["host"] == "localhost"
    folder = tmp_path / "bench-results"
    assert {path.name for path in folder.iterdir()} == {"table.md", "table.json", "table.png"}
    assert data["command"] in (folder / "table.md").read_text()
    shown = json.loads(ringctl("ps", "--json").stdout)
    assert [(run["name"], run["state"]) for run in shown] == [("bench-table", "succeeded")]


def test_collectives_between_hosts(cluster: Hosts, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = ringctl(
        "bench", "collectives", "--world", "2", "--sizes", "40kb", "--rounds", "2", "--rate", "1gbit",
        "--out", str(out),
    )  # fmt: skip
    assert "[0 server1] 2/2  40 KB ring: size 40 KB, sync ring" in done.stdout
    *_, title, gloo, ring, wrote = done.stdout.splitlines()
    assert title.split()[:2] == ["SIZE", "SYNC"]
    assert (gloo.split()[:4], ring.split()[:3]) == (["40", "KB", "gloo", "all_reduce"], ["40", "KB", "ring"])
    assert wrote.startswith("wrote ")
    data = json.loads((out / "collectives.json").read_text())
    assert [host["host"] for host in data["facts"]["hosts"]] == list(cluster.names[:2])
    for row in data["rows"]:
        assert row["wire_share"] == pytest.approx(8 * row["bus_bytes_per_s"] / 1e9)
