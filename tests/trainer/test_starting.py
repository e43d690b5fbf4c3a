"""The ways to start the trainer as a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import trainer
from launcher.hostproc import catches
from tests.conftest import eventually
from tests.trainer.ranks import free_port, records

PACKAGE = Path(trainer.__file__).parent
BY_PATH = [str(PACKAGE / "__main__.py")]
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment(**more: str) -> dict[str, str]:
    environ = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    return environ | {"PYTHONPATH": str(PACKAGE.parent)} | more


@pytest.mark.parametrize(
    "start", [BY_PATH, ["-P", *BY_PATH], ["-m", "trainer"], ["-m", "trainer.train"]], ids=" ".join
)
def test_every_way_of_starting_checks_the_options(start: list[str], tmp_path: Path) -> None:
    if "-P" in start and sys.version_info < (3, 11):
        start = BY_PATH  # that Python cannot leave the script's folder out of the search path
    for options, code in (["--check"], 0), (["--check", "--epochs", "0"], 2):
        done = subprocess.run(
            [sys.executable, *start, *options],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            timeout=60,
        )
        assert done.returncode == code, done.stderr


def test_started_by_path_a_trainer_py_in_the_users_folder_is_not_taken_for_it(tmp_path: Path) -> None:
    for name in ("trainer.py", "config.py", "data.py"):
        (tmp_path / name).write_text("raise SystemExit('this is the wrong one')")
    done = subprocess.run(
        [sys.executable, *BY_PATH, "--check", "--lr", "1"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_python_without_torch_is_told_where_to_install_it(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    done = subprocess.run(
        [sys.executable, *BY_PATH], env=environment(PYTHONPATH=str(tmp_path)), capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr == (
        f"trainer: No module named 'torch' in {sys.executable}: pip install 'ringctl[trainer]' there\n"
    )


def test_two_terminals_train_together(tmp_path: Path) -> None:
    """As people start it by hand, each rank a command of its own."""
    place = [
        "--init-method",
        f"tcp://127.0.0.1:{free_port()}",
        "--world-size",
        "2",
        "--gloo_socket_ifname",
        "lo",
    ]
    terminals = [
        subprocess.Popen(
            [sys.executable, "-u", "-m", "trainer.train", *place, "--rank", str(rank), "--steps", "5"],
            env=environment(RINGCTL_METRICS=str(tmp_path / f"{rank}.jsonl"), OMP_NUM_THREADS="1"),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [terminal.communicate(timeout=90)[0] for terminal in terminals]
    assert [terminal.returncode for terminal in terminals] == [0, 0]
    hashes = {records(tmp_path / f"{rank}.jsonl")[-1]["parameters_sha256"] for rank in range(2)}
    assert len(hashes) == 1
    assert outputs[0].splitlines()[-1].startswith("test accuracy ")
    assert outputs[1] == ""


def test_a_rank_that_looks_for_rank_0_is_asked_where_it_is_and_goes_on_looking(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    stacks = Path(f"{metrics}.stacks")
    place = ["--init-method", f"tcp://127.0.0.1:{free_port()}", "--world-size", "2", "--rank", "1"]
    rank = subprocess.Popen(
        [sys.executable, *BY_PATH, *place, "--timeout", "8"],
        env=environment(RINGCTL_METRICS=str(metrics)),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert eventually(lambda: catches(rank.pid, signal.SIGRTMIN + 9), 30)
    assert eventually(lambda: asked(rank, stacks) > 3, 30)
    said = rank.communicate(timeout=60)[1]
    assert "Interrupted system call" not in said
    assert "client socket has timed out after 8000ms" in said


def asked(rank: subprocess.Popen[str], stacks: Path) -> int:
    """Ask a rank where it is; how often it has been told so far that it looks for rank 0."""
    rank.send_signal(signal.SIGRTMIN + 9)
    return stacks.read_text().count("in meeting_place")
