"""Shell completion, help and version: what a shell asks ringctl for."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess

import pytest

import launcher
from launcher import history
from launcher.cli import cli
from tests.launcher.ringctl import RINGCTL, detach, ringctl, wait_until_final


def completions(*words: str) -> list[str]:
    """What a bash user gets who has typed `words` and presses Tab."""
    environ = {
        **os.environ,
        "_RINGCTL_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(["ringctl", *words]),
        "COMP_CWORD": str(len(words)),
    }
    done = subprocess.run(RINGCTL, env=environ, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell_is_printed_and_names_ringctl(shell: str) -> None:
    script = ringctl("completion", shell).stdout
    assert "_RINGCTL_COMPLETE" in script
    assert "ringctl" in script


def test_the_script_for_bash_is_valid_and_completes_ringctl() -> None:
    script = ringctl("completion", "bash").stdout
    done = subprocess.run(
        ["bash", "-c", f"{script}\ncomplete -p ringctl"], capture_output=True, text=True, check=True
    )
    assert "_ringctl_completion" in done.stdout


def test_an_unknown_shell_is_refused() -> None:
    assert "'bash', 'zsh', 'fish'" in ringctl("completion", "tcsh", code=2).stderr


def test_commands_and_options_are_completed() -> None:
    assert completions("st") == ["status", "stop"]
    assert set(completions("logs", "--f")) == {"--follow"}
    assert {"--world", "--dry-run", "--detach"} <= set(completions("launch", "--"))


def test_runs_are_completed() -> None:
    runs = [detach(["true"], world=1) for _ in range(2)]
    for run in runs:
        wait_until_final(run)
    for command in ("logs", "status", "stop"):
        assert set(completions(command, "2")) == set(runs)
    assert completions("logs", runs[0]) == [runs[0]]
    assert completions("logs", "no-such") == []
    with contextlib.closing(sqlite3.connect(history.file())) as db:
        db.execute("PRAGMA user_version=99")  # what a newer ringctl has written
    assert completions("logs", "2") == [], "and nothing is said in the middle of a line"


def test_version_and_help_answer() -> None:
    assert ringctl("--version").stdout == f"ringctl, version {launcher.__version__}\n"
    assert ringctl("-h").stdout == ringctl("--help").stdout
    assert ringctl("--help").stdout.startswith("Usage: ringctl ")


@pytest.mark.parametrize("name", sorted(name for name in cli.commands if not cli.commands[name].hidden))
def test_every_command_has_help_and_a_line_in_the_list(name: str) -> None:
    assert name in ringctl("--help").stdout
    shown = ringctl(name, "--help").stdout
    assert shown.startswith(f"Usage: ringctl {name} ")
    assert all(option.help for option in cli.commands[name].params if option.param_type_name == "option")
