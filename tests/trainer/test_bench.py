"""The benchmarks: what is compared, what the figures mean, what is refused, and that real ranks agree."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.ranks import each, free_port, trained
from trainer.__main__ import main
from trainer.bench import collectives, options, program, report, table, training
from trainer.bench.collectives import Timing
from trainer.bench.options import GLOO, RING, SERIAL, Way
from trainer.bench.table import Case, Run
from trainer.errors import InputError, TrainerError
from trainer.models import MODELS

INT8 = Way("ring", "int8")
ALONE = Run(Case(1, SERIAL), 0, 100, (500.0,), (30.0,), (0.5,), (0,), 0.90)
PAIR = Run(Case(2, INT8), 0, 50, (400.0, 400.0), (38.0, 40.0), (10.0, 14.0), (500, 700), 0.98)
HOST = {"host": "server1", "cpu": "a CPU", "cores": 8, "threads": 2, "torch": "2.0", "ranks": 2}
FACTS = {
    "date": "2026-01-31", "world": 2, "hosts": [HOST], "rate": 2e8, "model": "bn-cnn", "parameters": 29034,
    "images": 6000, "batch_size": 16, "epochs": 3, "steps": None, "seeds": 2,
}  # fmt: skip


# --- The table -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "names"),
    [
        (1, ["serial"]),
        (2, ["serial", "ring x2", "ring int8 x2"]),
        (4, ["serial", "ring x2", "ring x4", "ring int8 x4"]),
        (6, ["serial", "ring x2", "ring x4", "ring x6", "ring int8 x6"]),
    ],
)
def test_the_ring_is_compared_on_powers_of_two_and_all_ranks_every_format_on_all(
    world: int, names: list[str]
) -> None:
    assert [str(case) for case in table.cases(world, [RING, INT8])] == names


def test_a_row_is_the_mean_over_ranks_and_seeds() -> None:
    again = replace(PAIR, seed=1, accuracy=0.96, step_ms=(58.0, 60.0), samples_per_s=(300.0, 300.0))
    alone, pair = table.rows([ALONE, PAIR, again])
    assert (alone.speed_up, alone.comm_ms, alone.spread) == (1.0, 0.0, None)
    assert pair.seconds == pytest.approx((50 * 0.040 + 50 * 0.060) / 2)
    assert pair.speed_up == pytest.approx(700 / 500)
    assert (pair.step_ms, pair.comm_ms, pair.compute_ms) == (49.0, 12.0, 37.0)
    assert pair.bytes_per_step == 12.0
    assert pair.accuracy == pytest.approx(0.97)
    assert pair.spread == pytest.approx(0.01 * 2**0.5)
    assert table.cells(pair)["accuracy"] == "97.00 ± 1.41 %"


def test_what_ddp_waits_for_is_not_made_up() -> None:
    ddp = replace(PAIR, case=Case(2, Way("ddp")), comm_ms=(0.0, 0.0))
    (row,) = table.rows([ddp])
    assert row.comm_ms is row.compute_ms is row.speed_up is None
    assert table.cells(row)["communication"] == "not known"


# --- Collectives ---------------------------------------------------------------------------------


def test_bus_bandwidth_is_that_of_nccl_tests_and_the_wire_limit_is_fp32s() -> None:
    limit = 2 * 3 / 4 * 12e6 * 8 / 200e6  # what the bytes alone take at 200 Mbit/s
    timings = [
        Timing(12_000_000, GLOO, 4, (9.0, 2 * limit, 0.1)),
        Timing(12_000_000, RING, 4, (limit,)),
        Timing(12_000_000, INT8, 4, (limit / 4,)),
        Timing(4_000, RING, 4, (0.006,)),
    ]
    gloo, ring, int8, small = collectives.rows(timings, 200e6)
    assert ring.bus_bytes_per_s == pytest.approx(200e6 / 8)
    assert [row.wire_share for row in (gloo, ring, int8)] == pytest.approx([0.5, 1.0, 4.0])
    assert [row.times_gloo for row in (gloo, ring, int8)] == pytest.approx([1.0, 2.0, 8.0])
    assert small.bus_bytes_per_s == pytest.approx(1e6)
    assert small.times_gloo is None
    assert collectives.cells(ring)["of the wire"] == "100 %"
    assert "of the wire" not in collectives.cells(collectives.rows(timings, None)[0])


# --- Options -------------------------------------------------------------------------------------


def test_options_name_ways_sizes_and_rates_and_the_rest_is_the_trainers() -> None:
    words = "collectives --compress int8,ring:fp8_e4m3 --sync naive_ring,ring --sizes 12mb,4kb --rate 1gbit"
    asked = options.parse([*words.split(), "--threads", "2"], {})
    assert list(map(str, asked.ways)) == ["ring", "naive-ring", "ring int8", "ring fp8-e4m3"]
    assert (asked.sizes, asked.rate, asked.config.threads) == ((12_000_000, 4000), 1e9, 2)
    asked = options.parse(["table", "--sync", "serial", "--seed", "5", "--seeds", "2", "--epochs", "4"], {})
    assert (asked.ways, asked.config.seed, asked.seeds, asked.config.epochs) == ((RING,), 5, 2, 4)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("", "say which benchmark: it is table or collectives"),
        ("tabel", "'tabel' is no benchmark; did you mean table?"),
        ("table --compress in8", "--compress cannot be 'in8'; did you mean int8?"),
        ("table --sync ddq", "--sync cannot be 'ddq'; did you mean ddp?"),
        ("table --compress ddp:int4", "--sync ddp cannot carry --compress int4"),
        ("table --sedes 2", "there is no option --sedes"),
        ("table --seeds 0", "--seeds must be a whole number from 1 to 100, not '0'"),
        ("table --data /nowhere", "'/nowhere' is not a folder"),
        ("table --checkpoint-every 5", "leave out --checkpoint-every"),
        ("collectives --sizes 3x", "--sizes must be like 12mb or 64kb, not '3x'"),
        ("collectives --sizes 2b", "--sizes must be from 4b to 1gb"),
        ("collectives --sizes ,", "--sizes names no size"),
        ("collectives --rate 0mbit", "--rate must be like 200mbit or 1gbit"),
        ("collectives --sync ddp", "ddp exchanges gradients only inside a backward pass"),
        ("collectives --compress auto", "auto chooses in the first steps"),
    ],
)
def test_what_is_wrong_is_told_before_anything_starts(words: str, complaint: str) -> None:
    with pytest.raises(InputError) as told:
        options.parse(words.split(), {})
    assert complaint in str(told.value)


# --- The report ----------------------------------------------------------------------------------


def results(*runs: Run, planned: int = 2) -> report.Results:
    return report.Results("table", "the command", FACTS, planned, [asdict(run) for run in runs])


def test_the_files_say_the_same_with_the_command_on_top(tmp_path: Path) -> None:
    (told,) = report.write(tmp_path, results(ALONE, PAIR))
    page = (tmp_path / "table.md").read_text().splitlines()
    assert page[2:5] == ["```sh", "the command", "```"]
    assert "- 2026-01-31: 2 ranks on server1 (2 ranks, 8 cores)" in page
    (row,) = [line for line in page if "int8" in line]
    assert [cell.strip() for cell in row.split("|")[1:6]] == ["2", "ring", "int8", "2.0 s", "1.60x"]
    data = json.loads((tmp_path / "table.json").read_text())
    assert data["complete"]
    assert [row["step_ms"] for row in data["rows"]] == [30.0, 39.0]
    kept = {name: data[name] for name in ("kind", "command", "facts", "planned", "measured")}
    assert report.rows(report.from_json(kept)) == table.rows([ALONE, PAIR])
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")
    assert "![Ways to train](table.png)" in page
    assert sorted(path.name for path in tmp_path.glob("table.*")) == ["table.json", "table.md", "table.png"]
    assert all(path.name in told for path in tmp_path.glob("table.*"))


def test_without_matplotlib_the_rest_is_written_and_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # noqa: ARG005 - as it is called
    _, told = report.write(tmp_path, results(ALONE, PAIR))
    assert told.startswith("no picture: there is no matplotlib")
    assert "pip install 'ringctl[bench]'" in told
    assert ".png" not in (tmp_path / "table.md").read_text()
    assert (tmp_path / "table.json").exists()
    assert not (tmp_path / "table.png").exists()


def test_a_benchmark_that_was_cut_short_says_so(tmp_path: Path) -> None:
    report.write(tmp_path, results(ALONE, planned=7))
    assert "- cut short: 1 of 7 measurements were taken" in (tmp_path / "table.md").read_text()
    assert not json.loads((tmp_path / "table.json").read_text())["complete"]


def test_auto_is_not_shown_as_if_it_had_chosen_when_it_had_too_few_steps() -> None:
    auto = replace(PAIR, case=Case(2, Way("ring", "auto")), steps=11)
    note = "auto did not choose, for which it needs 12 steps: it is a mix of formats"
    assert note in report.fact_lines(results(ALONE, auto))
    assert note not in report.fact_lines(results(replace(ALONE, steps=11), replace(auto, steps=12)))


def test_a_folder_that_cannot_be_written_is_refused_first_and_told_in_the_end(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write there: Not a directory"):
        report.folder_for(str(tmp_path / "file" / "below"))
    (tmp_path / "table.md").mkdir()
    with pytest.raises(TrainerError, match="the results cannot be written there: Is a directory"):
        report.write(tmp_path, results(ALONE))
    left = {path.name for path in tmp_path.iterdir()} - {"scratch"}
    assert left == {"file", "table.md"}, "no half-written file"


# --- Real ranks ----------------------------------------------------------------------------------


def bench(world: int, folder: Path, *words: str) -> tuple[list[int], list[Any], list[str]]:
    """Exit codes of forked ranks, what rank 0 told in records, and what each complained of."""
    place = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def as_rank(rank: int) -> int:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / f"{rank}.{name}", os.O_CREAT | os.O_WRONLY), number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
        os.environ.update({**place, "RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"})
        os.environ.pop("RINGCTL_METRICS", None)
        return main(["--bench", *words, "--threads", "1", "--out", "-"])

    codes = each(world, as_rank)
    lines = (folder / "0.out").read_text().splitlines()
    records = [json.loads(line.removeprefix("bench ")) for line in lines if line.startswith("bench ")]
    return codes, records, [(folder / f"{rank}.err").read_text() for rank in range(world)]


def test_each_training_of_the_table_is_the_one_that_the_trainer_does(tmp_path: Path) -> None:
    """Three ranks, of which some wait while one or two train."""
    options = ("--steps", "3", "--seed", "7", "--batch-size", "8")
    codes, (head, *told), errors = bench(3, tmp_path, "table", *options, "--seeds", "2", "--compress", "int8")
    assert codes == [0, 0, 0], errors
    names = ["serial", "ring x2", "ring x3", "ring int8 x3"]
    assert (head["planned"], [record["row"] for record in told]) == (8, 2 * names)
    assert head["facts"]["world"] == head["facts"]["hosts"][0]["ranks"] == 3
    runs = [table.run_from_json(record["measured"]) for record in told]
    assert [run.seed for run in runs] == 4 * [7] + 4 * [8]
    size = 4 * sum(parameter.numel() for parameter in MODELS["bn-cnn"]().parameters())
    ring = table.rows(runs)[2]
    assert ring.bytes_per_step == pytest.approx(2 * 2 / 3 * size, rel=1e-3)
    assert all(step > wait for run in runs for step, wait in zip(run.step_ms, run.comm_ms, strict=True))
    by_trainer = [trained(run.case.ranks, tmp_path, *options)[0].last for run in runs[:3]]
    assert [run.accuracy for run in runs[:3]] == [last["accuracy"] for last in by_trainer]
    assert sum(runs[2].bytes_sent) // 3 == pytest.approx(by_trainer[2]["bytes_sent"], rel=1e-3)
    assert told[-1]["cells"] == table.cells(table.rows(runs)[-1])


def test_every_row_has_the_learning_rate_that_was_asked_for_also_in_a_later_attempt() -> None:
    later = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "80"}
    asked = options.parse(["table"], {**later, "RINGCTL_FIRST_WORLD": "4"})
    assert asked.config.first_world == 4
    rows = [training.configured(asked.config, case, seed=0) for case in table.cases(2, asked.ways)]
    assert [(row.world_size, row.first_world) for row in rows] == [(1, None), (2, None)]


def test_when_a_training_fails_the_ranks_that_wait_for_the_next_end_too(tmp_path: Path) -> None:
    codes, told, errors = bench(2, tmp_path, "table", "--steps", "3", "--lr", "1e30")
    assert codes == [1, 1]
    assert len(told) == 1, "nothing was measured"
    assert "try a smaller --lr" in errors[0]
    assert "rank 1 lost rank 0, whose own output says why" in errors[1]


def test_one_command_starts_its_own_ranks_and_leaves_the_files(tmp_path: Path) -> None:
    words = "collectives --world 2 --sizes 4kb --rounds 2 --compress int8 --rate 1gbit --out results"
    argv = [sys.executable, str(Path(program.MAIN)), "--bench", *words.split()]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "results" / "collectives.json").read_text())
    ways = [row["way"] for row in data["rows"]]
    assert ways == [
        {"sync": s, "compress": c} for s, c in (("gloo", "none"), ("ring", "none"), ("ring", "int8"))
    ]
    for row, timing in zip(data["rows"], data["measured"], strict=True):
        assert len(timing["seconds"]) == 2
        assert row["bus_bytes_per_s"] == pytest.approx(4000 / row["seconds"])  # 2(N-1)/N is 1 for two
    assert f"python -m trainer.bench {words}" in (tmp_path / "results" / "collectives.md").read_text()
    assert (tmp_path / "results" / "collectives.png").exists()
    assert "3/3  4 KB ring int8: " in done.stdout


@pytest.mark.parametrize(("number", "to_all"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_a_command_that_is_cut_short_leaves_what_was_measured_and_no_rank(
    number: int, to_all: bool, tmp_path: Path
) -> None:
    """By Ctrl-C in a terminal, which all ranks get, and by a signal to the command alone."""
    words = "collectives --world 2 --sizes 4kb,16mb --rounds 200 --out results"
    argv = [sys.executable, "-u", program.MAIN, "--bench", *words.split()]
    with subprocess.Popen(
        argv, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as command:
        assert command.stdout is not None
        for line in command.stdout:
            if line.startswith("2/4"):
                break
        (os.killpg if to_all else os.kill)(command.pid, number)
        rest = command.stdout.read()  # until no rank holds it any more
        assert command.wait(90) == 130
    assert "wrote results/collectives.md" in rest
    data = json.loads((tmp_path / "results" / "collectives.json").read_text())
    assert (len(data["measured"]), data["planned"], data["complete"]) == (2, 4, False)


def test_the_first_rank_that_fails_is_named_and_the_others_are_not_waited_for() -> None:
    ranks = [subprocess.Popen(["sh", "-c", script]) for script in ("exec sleep 600", "exit 3", "exit 0")]
    try:
        with pytest.raises(TrainerError, match="rank 1 ended with exit code 3"):
            program.wait_for(ranks)
        assert ranks[0].poll() is None
    finally:
        for process in ranks:
            process.kill()
            process.wait()
