"""Secrets reach the ranks, and nothing else: no plan, no history, no screen, no other account's eyes."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest

from launcher import redact
from launcher.plan import is_public
from launcher.redact import Hidden, tells
from tests.launcher.hosts import HOME, Hosts, inventory
from tests.launcher.ringctl import RINGCTL, ringctl

PROJECT = Path(__file__).parents[2]
SECRET = "hunter2 =\"x' $HOME \u4e16"
SHOW = 'test "$API_TOKEN" = "$0" || exit 7; echo "it is <$API_TOKEN>"; echo "<$API_TOKEN>" >&2; exit 3'


@pytest.fixture(autouse=True)
def here(clean: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001 - comes first
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def secret_file(
    text: str = f"# for the store\nAPI_TOKEN={SECRET}\r\n\nSHORT=abc\n", mode: int = 0o600
) -> str:
    path = Path("secret.env")
    path.write_bytes(text.encode())
    path.chmod(mode)
    return str(path)


def everything_below(folder: Path) -> dict[str, str]:
    return {str(path): path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file()}


def test_ranks_get_their_secrets_and_nothing_that_is_shown_or_kept_here_has_them() -> None:
    # The command is checked against the value by the rank itself; here it would be on a command line.
    Path("rank.sh").write_text(SHOW.replace('"$0"', '"$(cat wanted)"'))
    Path("wanted").write_text(SECRET)
    options = ("--local", "--world", "2", "--env-file", secret_file(), "--", "sh", "rank.sh")
    done = ringctl("--verbose", "launch", *options, code=1)
    said = [done.stdout + done.stderr]
    assert said[0].count("it is <***>") == 2
    assert "exited with code 3: <***>" in said[0]
    (run,) = re.findall(r"^run (\S+):", done.stdout)
    for args in (("logs", run), ("logs", run, "--json"), ("status", run, "--json"), ("explain", run)):
        again = ringctl(*args, code=None)
        said.append(again.stdout + again.stderr)
    assert "<***>" in said[1]
    assert "hunter2" not in "".join(said)
    home = Path(os.environ["RINGCTL_HOME"])
    kept = {str(path): path.read_bytes() for path in home.glob("history*")}
    assert any(b"API_TOKEN" in data for data in kept.values())
    assert not [path for path, data in kept.items() if b"hunter2" in data]
    holding = [Path(path) for path, text in everything_below(home / "runs").items() if "hunter2" in text]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in holding), "the plan, and what the ranks wrote"


@pytest.mark.parametrize("how", [["--json"], ["--commands"], ["-v"], []], ids=" ".join)
def test_a_dry_run_shows_no_secret_nor_what_looks_like_one(how: list[str]) -> None:
    options = ("--env-file", secret_file(), "--env", "HF_TOKEN=also-secret", "--env", "PROXY=http://a:pw77@b")
    done = ringctl("launch", "--local", "--world", "1", "--dry-run", *how, *options, "--", "true")
    for secret in ("hunter2", "also-secret", "pw77", "=abc"):
        assert secret not in done.stdout + done.stderr
    if how == ["--json"]:
        env = json.loads(done.stdout)["hosts"][0]["ranks"][0]["env"]
        assert {env["API_TOKEN"], env["HF_TOKEN"], env["PROXY"], env["SHORT"]} == {"***"}
    if how == ["--commands"]:
        assert "# export API_TOKEN HF_TOKEN PROXY SHORT first" in done.stdout


def test_variables_that_look_like_secrets_still_reach_the_ranks() -> None:
    options = ("--local", "--world", "1", "--env", "HF_TOKEN=also-secret")
    done = ringctl("launch", *options, "--", "sh", "-c", 'test "$HF_TOKEN" = also-secret')
    assert "succeeded" in done.stdout


def test_a_restart_reads_the_file_again_and_says_if_it_cannot() -> None:
    options = ("--local", "--world", "1", "--env-file", secret_file("API_TOKEN=first-one\n"))
    command = ("--", "sh", "-c", 'test "$API_TOKEN" = second-one')
    (run,) = re.findall(r"^run (\S+):", ringctl("launch", *options, *command, code=1).stdout)
    secret_file("OTHER=second-one\n")
    assert "API_TOKEN is gone" in ringctl("restart", run, code=2).stderr
    secret_file("API_TOKEN=second-one\n")
    assert "succeeded" in ringctl("restart", run).stdout
    Path("secret.env").unlink()
    assert "secret.env: cannot be read: No such file" in ringctl("restart", run, code=2).stderr


def failed_with_its_secret() -> str:
    """The id of a run that wrote its secret and failed."""
    Path("rank.sh").write_text('echo "it is <$API_TOKEN>"; echo "<$API_TOKEN>" >&2; exit 3')
    options = ("--local", "--world", "1", "--env-file", secret_file(), "--", "sh", "rank.sh")
    (run,) = re.findall(r"^run (\S+):", ringctl("launch", *options, code=1).stdout)
    return str(run)


def everything_said_of(run: str) -> str:
    again = [ringctl(*args, code=None) for args in (("logs", run), ("logs", run, "--json"), ("explain", run))]
    return "".join(done.stdout + done.stderr for done in again)


@pytest.mark.parametrize("lost", ["the record", "the file", "the value"])
def test_a_secret_stays_hidden_as_long_as_the_host_knows_it(lost: str) -> None:
    run = failed_with_its_secret()
    if lost == "the record":
        ringctl("runs", "prune", "--keep", "0", "--yes")
    elif lost == "the file":
        Path("secret.env").unlink()
    else:
        secret_file("API_TOKEN=another-one\n")
    said = everything_said_of(run)
    assert "it is <***>" in said
    assert "exited with code 3: <***>" in said
    assert "hunter2" not in said
    assert "warning" not in said


def test_a_secret_is_hidden_from_whoever_reads_the_log_on_another_machine(
    cluster: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inventory(cluster, ("server1", "server2"))
    Path("rank.sh").write_text('echo "it is <$API_TOKEN>"')
    options = ("--world", "2", "--skip-preflight", "--env-file", secret_file())
    (run,) = re.findall(r"^run (\S+):", ringctl("launch", *options, "--", "sh", "rank.sh").stdout)
    Path("secret.env").unlink()
    monkeypatch.setenv("RINGCTL_HOME", str(tmp_path / "another"))
    done = ringctl("logs", run)
    assert done.stdout.count("it is <***>") == 2
    assert "hunter2" not in done.stdout + done.stderr
    assert "warning" not in done.stderr


@pytest.mark.parametrize("lost", ["the record", "the file"])
def test_where_nobody_knows_what_was_secret_that_is_said(lost: str) -> None:
    run = failed_with_its_secret()
    plan = Path(os.environ["RINGCTL_HOME"]) / "runs" / run / "plan.json"
    told = json.loads(plan.read_text())
    assert told.pop("secrets") == ["API_TOKEN", "SHORT"]
    plan.write_text(json.dumps(told))
    assert "warning" not in ringctl("logs", run).stderr, "the file is enough"
    if lost == "the record":
        ringctl("runs", "prune", "--keep", "0", "--yes")
    else:
        Path("secret.env").unlink()
    why = "is not known here" if lost == "the record" else "secret.env: cannot be read"
    said = ringctl("logs", run).stderr
    assert re.search(f"^warning: secrets are not looked for in what is shown: .*{why}.*; localhost: ", said)


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        ("A=b\n", 0o644, ["others may open it (mode 0644)", "chmod 600 secret.env"]),
        ("A=b\n", 0o620, ["others may open it"]),
        ("A=b\nhunter2\n", 0o600, ["secret.env:2: not a variable"]),
        ("A B=hunter2\n", 0o600, ["secret.env:1: not a variable"]),
        ("RANK=hunter2\n", 0o600, ["secret.env:1: RANK: reserved"]),
        ("A=hunter2\nA=c\n", 0o600, ["secret.env:2: A is given twice"]),
        ('A="hunter2"\n', 0o600, ["secret.env:1: A:", "without quotes"]),
        ("A=hunter2\0\n", 0o600, ["secret.env:1: A:", "NUL"]),
        ("B=hunter2\n", 0o600, ["B is given by --env and in secret.env"]),
    ],
)
def test_a_file_that_is_not_private_or_not_understood_is_refused(
    text: str, mode: int, words: list[str]
) -> None:
    options = ("--local", "--world", "1", "--env", "B=x", "--env-file", secret_file(text, mode))
    said = ringctl("launch", *options, "--", "true", code=2).stderr
    assert all(word in said for word in words), said
    assert "hunter2" not in said
    assert not Path(os.environ["RINGCTL_HOME"]).exists()


def test_what_is_no_file_of_ours_is_refused() -> None:
    os.mkfifo("pipe", 0o600)
    for path, words in (("pipe", "not a file"), ("nowhere", "No such file"), ("/", "Is a directory")):
        said = ringctl("launch", "--local", "--env-file", path, "--", "true", code=2).stderr
        assert words in said, said
    if os.geteuid() == 0:
        os.chown(secret_file(), 12345, -1)
        said = ringctl("launch", "--local", "--env-file", "secret.env", "--", "true", code=2).stderr
        assert "belongs to somebody else" in said


def test_on_a_host_a_secret_is_on_no_command_line_and_in_no_file_that_others_may_open(cluster: Hosts) -> None:
    Path("rank.sh").write_text("echo up; sleep 600")
    done = ringctl(
        "launch", "--world", "2", "--skip-preflight", "--detach", "--json", "--env-file", secret_file(), "--",
        "sh", "rank.sh",
    )  # fmt: skip
    run = json.loads(done.stdout)["run"]
    ran = 0
    for host in ("server1", "server2"):
        for process in cluster.processes(host):
            assert "hunter2" not in " ".join(process.argv)
            ran += "rank.sh" in process.argv
        for path in cluster.path(host, HOME).rglob("*"):
            if path.is_file() and b"hunter2" in path.read_bytes():
                assert path.stat().st_mode & 0o777 == 0o600, path
                assert path.name != "secret.env", "it is not code, wherever it is"
    ringctl("stop", run)
    assert ran >= 2, "each rank, and what it forks"


# --- Names, addresses, folders -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "telling"),
    [
        ("HF_TOKEN", True), ("AWS_SECRET_ACCESS_KEY", True), ("PGPASSWORD", True), ("wandb_api_key", True),
        ("TOKENIZERS_PARALLELISM", False), ("KEYBOARD", False), ("MONKEY", False), ("OMP_NUM_THREADS", False),
    ],
)  # fmt: skip
def test_a_name_tells_whether_it_is_a_secret(name: str, telling: bool) -> None:
    assert tells(name, "x") is telling


def test_a_hidden_value_is_shown_by_no_usual_way() -> None:
    hidden: Any = Hidden("hunter2")
    for shown in (f"{hidden}", repr(hidden), str(hidden), json.dumps({"a": hidden}), hidden + ""):
        assert "hunter2" not in shown
    assert hidden.value == "hunter2"


def test_a_secret_is_taken_out_wherever_a_host_says_it() -> None:
    said = {"text": "a hunter2 b", "metric": {"hunter2": [1, "hunter2", {"x": "hunter2"}]}, "step": 2}
    shown = redact.without(["hunter2"], said)
    assert "hunter2" not in json.dumps(shown)
    assert (shown["step"], shown["text"]) == (2, f"a {redact.SHOWN} b")


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True), ("2001:4860:4860::8888", True), ("127.0.0.1", False), ("10.1.2.3", False),
        ("192.168.0.1", False), ("172.16.0.1", False), ("169.254.1.1", False), ("100.64.0.1", False),
        ("fe80::1%eth0", False), ("fd00::1", False), ("server1", False), ("", False),
    ],
)  # fmt: skip
def test_an_address_is_public_if_the_internet_reaches_it(address: str, public: bool) -> None:
    assert is_public(address) is public


def test_a_public_data_address_is_refused_unless_the_user_knows() -> None:
    Path("hosts.yaml").write_text("hosts: [{name: a, local: true, data_address: 8.8.8.8}]\n")
    for command in (("launch", "--dry-run"), ("preflight",)):
        said = ringctl(*command, "--", "true", code=2).stderr
        assert "a: its data address 8.8.8.8 is a public one" in said
        assert "--i-know" in said
    done = ringctl("launch", "--dry-run", "--i-know", "--", "true")
    assert "master 8.8.8.8:" in done.stdout


def test_a_public_address_that_only_the_host_knows_of_is_refused_too(cluster: Hosts) -> None:
    cluster.run("server1", *["ip", "address", "add", "8.8.8.8/32", "dev", "lo", "label", "lo:1"], user="root")
    try:
        inventory(cluster, ("server1",), server1={"ifname": "lo:1"})
        for command in (("launch", "--dry-run"), ("preflight", "--only", "public")):
            done = ringctl(*command, "--", "true", code=3)
            assert "its data address 8.8.8.8 is a public one" in done.stdout + done.stderr
        assert "lo:1" in ringctl("launch", "--dry-run", "--i-know", "--", "true").stdout
    finally:
        cluster.run("server1", *["ip", "address", "delete", "8.8.8.8/32", "dev", "lo"], user="root")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_folder_that_is_not_ours_alone_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "shared"
    (place / "history").mkdir(parents=True)
    monkeypatch.setenv("RINGCTL_HOME", str(place))
    place.chmod(0o777)
    said = ringctl("ps", code=2).stderr
    assert f"{place}: others may write to it (mode 0777)" in said
    assert f"chmod 700 {place}" in said
    place.chmod(0o700)
    assert ringctl("ps").stderr == ""
    os.chown(place, 12345, -1)
    assert f"{place}: belongs to user 12345" in ringctl("launch", "--local", "--", "true", code=2).stderr
    (tmp_path / "link").symlink_to(tmp_path / "own")
    (tmp_path / "own").mkdir(mode=0o700)
    monkeypatch.setenv("RINGCTL_HOME", str(tmp_path / "link"))
    assert ringctl("ps").stderr == "", "a link of our own is fine"
    os.lchown(tmp_path / "link", 12345, -1)
    assert "a link that user 12345 has made" in ringctl("ps", code=2).stderr
    assert subprocess.run([*RINGCTL, "--help"], capture_output=True).returncode == 0
    assert not list((tmp_path / "own").iterdir())


def test_a_folder_of_a_host_that_others_may_write_to_is_not_used(cluster: Hosts) -> None:
    inventory(cluster, ("server1",))
    cluster.run("server1", "chmod", "777", f"{HOME}/.ringctl")
    said = ringctl("launch", "--skip-preflight", "--", "true", code=1).stderr
    assert f"server1: {HOME}/.ringctl can be written to by others" in said
    done = ringctl("preflight", "--only", "folders", "--", "true", code=3)
    assert f"chmod go-w {HOME}/.ringctl" in done.stdout
    cluster.run("server1", "chmod", "go-w", f"{HOME}/.ringctl")
    assert "succeeded" in ringctl("launch", "--skip-preflight", "--", "true").stdout


# --- What is installed ---------------------------------------------------------------------------


def test_packages_with_known_holes_are_named() -> None:
    audit = runpy.run_path(str(PROJECT / "scripts" / "audit.py"))
    assert [line.split(":")[0] for line in audit["holes"]({"paramiko": "3.3.2", "torch": "2.13.0+cpu"})] == [
        "paramiko 3.3.2"
    ]
    assert audit["main"]() == 0
