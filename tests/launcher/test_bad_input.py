"""Bad input, end to end: exit code 2, one clear message, and nothing was touched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.launcher.ringctl import detach, ringctl, wait_until_final

PROJECT = Path(__file__).resolve().parents[2]


def refused(*args: str) -> str:
    """What ringctl says when it refuses; fails if it did more than say it."""
    before = sorted(Path().rglob("*"))
    done = ringctl(*args, code=2)
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.lower().count("error: ") == 1, done.stderr
    assert not Path(os.environ["RINGCTL_HOME"]).exists()
    assert sorted(Path().rglob("*")) == before
    return done.stderr


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without an inventory."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


# --- The inventory -------------------------------------------------------------------------------

HOST = "hosts:\n  - name: a\n"


@pytest.mark.parametrize(
    ("text", "where", "words"),
    [
        (HOST + "    adress: 10.0.0.1\n", "hosts.yaml:3: hosts[0].adress", ["did you mean 'address'?"]),
        ("host:\n  - a\n", "hosts.yaml:1: host", ["did you mean 'hosts'?"]),
        (HOST + "    slots: [2]\n", "hosts.yaml:3: hosts[0].slots", ["a list", "a whole number from 1"]),
        (HOST + "    slots: two\n", "hosts.yaml:3: hosts[0].slots", ["'two'", "a whole number from 1"]),
        (HOST + "    slots: 0\n", "hosts.yaml:3: hosts[0].slots", ["0", "a whole number from 1"]),
        ("hosts: {a: b}\n", "hosts.yaml:1: hosts", ["a mapping", "a list"]),
        (HOST + "    local: maybe\n", "hosts.yaml:3: hosts[0].local", ["'maybe'", "true or false"]),
        (HOST + "    port: 70000\n", "hosts.yaml:3: hosts[0].port", ["70000", "1 to 65535"]),
        (HOST + "    port: -1\n", "hosts.yaml:3: hosts[0].port", ["-1", "1 to 65535"]),
        (HOST + "    port: '22'\n", "hosts.yaml:3: hosts[0].port", ["write 22 without quotes"]),
        ("master_port: 99999\n" + HOST, "hosts.yaml:1: master_port", ["99999", "1 to 65535"]),
        ("hosts:\n  - a\n  - b\n  - a\n", "hosts.yaml:4: hosts[2].name", ["'a'", "hosts.yaml:2"]),
        ("", "hosts.yaml:1: hosts", ["the file is empty", "a list"]),
        ("hosts: []\n", "hosts.yaml:1: hosts", ["an empty list"]),
        (
            HOST + "    user: !!python/object/apply:os.system [touch pwned]\n",
            "hosts.yaml:3",
            ["python/object", "without a tag"],
        ),
        (
            "!!python/object/apply:os.system [touch pwned]\n",
            "hosts.yaml:1",
            ["python/object", "without a tag"],
        ),
        ("master: c\nhosts: [a, b]\n", "hosts.yaml:1: master", ["'c'", "a, b"]),
        ("hosts:\n  - 'a; touch pwned'\n", "hosts.yaml:2: hosts[0]", ["'a; touch pwned'", "letters, digits"]),
        ("hosts:\n  - '$(touch pwned)'\n", "hosts.yaml:2: hosts[0]", ["letters, digits"]),
        ("hosts:\n  - -oProxyCommand=touch\n", "hosts.yaml:2: hosts[0]", ["no dash"]),
        ('hosts:\n  - "a\\nb"\n', "hosts.yaml:2: hosts[0]", [r"'a\nb'"]),
        (HOST + "    address: 'b|c'\n", "hosts.yaml:3: hosts[0].address", ["'b|c'", "DNS name"]),
        (HOST + "    user: '`id`'\n", "hosts.yaml:3: hosts[0].user", ["'`id`'", "letters, digits"]),
        (HOST + "    user: -l\n", "hosts.yaml:3: hosts[0].user", ["'-l'", "no dash"]),
        (HOST + '    user: "x\\ny"\n', "hosts.yaml:3: hosts[0].user", [r"'x\ny'"]),
        (HOST + "    variables: {'A=B': c}\n", "hosts.yaml:3: hosts[0].variables", ["'A=B'", "no '='"]),
        (HOST + '    variables: {"A\\0": c}\n', "hosts.yaml:3: hosts[0].variables", [r"'A\x00'", "no NUL"]),
        (HOST + '    variables: {A: "c\\0"}\n', "hosts.yaml:3: hosts[0].variables.A", ["without NUL"]),
        (HOST + "    variables: {RANK: '7'}\n", "hosts.yaml:3: hosts[0].variables", ["'RANK'", "ringctl"]),
        ("hosts: [a\n", "hosts.yaml:", ["hosts.yaml"]),
    ],
)
def test_a_wrong_inventory_is_refused_by_file_line_and_key(text: str, where: str, words: list[str]) -> None:
    Path("hosts.yaml").write_text(text)
    said = refused("launch", "--hosts", "hosts.yaml", "--", "true")
    assert said.startswith(f"error: {where}"), said
    for word in words:
        assert word in said


def test_the_inventory_in_the_folder_is_judged_without_being_named() -> None:
    Path("hosts.yaml").write_text(HOST + "    slot: 2\n")
    assert "hosts.yaml:3: hosts[0].slot" in refused("launch", "--", "true")


def test_this_machine_may_be_in_the_inventory_once() -> None:
    Path("hosts.yaml").write_text("hosts: [{name: a, local: true}, {name: b, local: true}]\n")
    said = refused("launch", "--", "true")
    assert "hosts.yaml: hosts a and b are both this machine" in said
    assert "slots" in said


def test_an_inventory_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "nowhere.yaml: no such file" in refused("launch", "--hosts", "nowhere.yaml", "--", "true")
    monkeypatch.setenv("RINGCTL_HOSTS", "gone.yaml")
    assert "gone.yaml: no such file" in refused("launch", "--", "true")


# --- launch --------------------------------------------------------------------------------------


def test_more_ranks_than_slots_are_refused_with_how_many_there_are() -> None:
    Path("hosts.yaml").write_text("hosts:\n  - {name: a, slots: 2}\n  - {name: b, slots: 3}\n")
    said = refused("launch", "--hosts", "hosts.yaml", "--world", "6", "--", "true")
    assert "--world 6" in said
    assert "5 slots of hosts.yaml" in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--local", "--world", "0"], ["--world 0", "at least one rank"]),
        (["--local", "--world", "-3"], ["--world -3", "at least one rank"]),
        (["--local", "--world", "two"], ["'--world'", "'two'"]),
        (["--local", "--world", "100000"], ["--world 100000", "at most"]),
        (["--local", "--name", "../../x"], ["--name '../../x'", "letters, digits"]),
        (["--local", "--name", "-x"], ["--name '-x'", "letter or digit"]),
        (["--local", "--name", "a\nb"], [r"--name 'a\nb'", "letters, digits"]),
        (["--local", "--env", "NAME"], ["--env 'NAME'", "NAME=VALUE"]),
        (["--local", "--env", "=x"], ["--env '=x'", "write a name"]),
        (["--local", "--env", "RANK=7"], ["--env 'RANK=7'", "ringctl numbers the ranks"]),
        (["--local", "--env", "RINGCTL_RUN=x"], ["RINGCTL_RUN", "reserved"]),
        (["--local", "--master-port", "0"], ["--master-port", "0"]),
        (["--local", "--master-port", "http"], ["--master-port", "http"]),
        (["--local", "--hosts", "hosts.yaml"], ["--local", "leave"]),
        (["--local", "--commands"], ["--dry-run --commands"]),
        (["--local", "--wrld", "2"], ["--wrld", "--world"]),
        (["--local", "--verbos"], ["--verbos", "--verbose"]),
    ],
)
def test_wrong_options_of_launch_are_refused(options: list[str], words: list[str]) -> None:
    said = refused("launch", *options, "--", "true")
    for word in words:
        assert word in said


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("RINGCTL_LEASE", "nan"),
        ("RINGCTL_LEASE", "-1"),
        ("RINGCTL_LEASE", "0.5"),
        ("RINGCTL_LEASE", "inf"),
        ("RINGCTL_LEASE", "8 s"),
        ("RINGCTL_WATCHDOG", "-1"),
        ("RINGCTL_WATCHDOG", "soon"),
    ],
)
def test_wrong_patience_is_refused(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    assert f"{variable}={value}: write a number of seconds" in refused("launch", "--local", "--", "true")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["python", "missing.py", "--lr", "1"], ["missing.py", "no such script"]),
        (["python3", "-u", "-O", "missing.py"], ["missing.py", "no such script"]),
        (["python", "-W", "ignore", "missing.py"], ["missing.py", "no such script"]),
        (["python", "-X", "dev", "folder/missing.py"], ["folder/missing.py", "no such script"]),
        (["no-such-command-here", "x"], ["no-such-command-here", "no such command"]),
        (["./not-here.sh"], ["./not-here.sh", "no such command"]),
        ([""], ["empty"]),
        (["--bogus-option"], ["--bogus-option"]),
        (["--lr", "banana"], ["--lr", "banana"]),
    ],
)
def test_a_command_that_cannot_start_is_refused(command: list[str], words: list[str]) -> None:
    said = refused("launch", "--local", "--world", "2", "--", *command)
    for word in words:
        assert word in said


def test_a_script_that_cannot_be_run_as_a_command_is_refused() -> None:
    Path("tool.sh").write_text("#!/bin/sh\n")
    assert "./tool.sh" in refused("launch", "--local", "--", "./tool.sh")
    Path("folder").mkdir()
    assert "./folder" in refused("launch", "--local", "--", "./folder")
    Path("tool.sh").chmod(0o755)
    assert "tool.sh: no such command" in refused("launch", "--local", "--", "tool.sh"), "it is not on PATH"


def test_a_folder_that_is_gone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    done = ringctl("launch", "--local", "--", "true", code=2)
    assert done.stderr == "error: the folder you are in is gone; change to one that exists\n"
    assert "no runs yet" in ringctl("ps").stdout


# --- The other commands --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "reference"),
    [
        ("logs", "20260101-000000-abcd"),
        ("status", "../../etc"),
        ("stop", "-x"),
        ("stop", ""),
        ("logs", "a b"),
    ],
)
def test_an_unknown_run_is_refused(command: str, reference: str) -> None:
    said = refused(command, "--", reference)
    assert "there is no run" in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tail", "-5"], ["--tail", "-5"]),
        (["--tail", "many"], ["--tail", "many"]),
        (["--since", "banana"], ["--since banana", "90s, 10m, 2h, 1d", "2026-01-31T18:00"]),
        (["--grep", "("], ["--grep (", "not a regular expression"]),
        (["--grep", "a{9999999999}"], ["--grep a{9999999999}", "not a regular expression"]),
        (["--rank", "first"], ["--rank first", "0,2-3"]),
        (["--rank", "3-1"], ["--rank 3-1", "0,2-3"]),
        (["--follw"], ["--follw", "--follow"]),
    ],
)
def test_wrong_options_of_logs_are_refused_before_anything_is_looked_for(
    options: list[str], words: list[str]
) -> None:
    said = refused("logs", *options)
    for word in words:
        assert word in said


@pytest.mark.parametrize("grace", ["-1", "soon", "nan"])
def test_a_wrong_grace_is_refused(grace: str) -> None:
    assert "--grace" in refused("stop", "--grace", grace)


def test_a_host_that_is_not_of_the_run_is_refused_with_those_that_are() -> None:
    run = detach(["true"], world=1)
    wait_until_final(run)
    done = ringctl("logs", run, "--host", "elsewhere", code=2)
    assert f"--host elsewhere: not a host of run {run}, which has localhost" in done.stderr


@pytest.mark.parametrize(
    "args", [["lunch"], ["--wat"], ["logs", "a", "b"], ["completion"], ["completion", "tcsh"]]
)
def test_what_ringctl_does_not_know_is_refused(args: list[str]) -> None:
    assert "Usage: ringctl" in refused(*args)
