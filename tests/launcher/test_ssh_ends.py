"""How a watched run on several hosts ends: by Ctrl-C at any moment, and when one host loses its part."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from launcher import watch
from launcher.hostword import REBOOTED
from launcher.transport.connect import DEAD_S
from tests.conftest import eventually
from tests.launcher import hosts
from tests.launcher.hosts import OURS, Hosts, inventory, sshd_option
from tests.launcher.ringctl import RINGCTL, ringctl, wait_for

TWO = ("server1", "server2")
TALK = ["--", "sh", "-c", "while :; do echo up; sleep 0.2; done"]


class Launch:
    """An attached launch of something that talks for ever."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.out, self.err = folder / "out", folder / "err"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen([*RINGCTL, "launch", *options], stdout=out, stderr=err)

    def said(self) -> str:
        return self.out.read_text() + self.err.read_text()

    def wait_for(self, words: str, seconds: float = 30.0) -> None:
        wait_for(lambda: words in self.said(), f"the words {words!r}", seconds)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def ended(self, code: int) -> str:
        assert self.process.wait(timeout=60) == code, self.said()
        return self.said()


@pytest.fixture
def launch(cluster: Hosts, tmp_path: Path) -> Launch:
    inventory(cluster, only=TWO)
    running = Launch(tmp_path, *TALK)
    for words in ("[0 server1] up", "[1 server2] up"):
        running.wait_for(words)
    return running


def supervisor(cluster: Hosts, host: str) -> dict[str, int]:
    run = json.loads(ringctl("ps", "--json").stdout)[-1]["run"]
    state = json.loads(cluster.path(host, f"{OURS}/runs/{run}/state.json").read_text())
    return {who: state[who]["pid"] for who in ("hostd", "warden")}


def test_what_a_rank_that_failed_said_through_a_filter_arrives_though_the_others_are_ended(
    cluster: Hosts,
) -> None:
    inventory(cluster, only=TWO)
    slow = "while read -r line; do sleep 0.08; echo through $line; done"
    program = f"test $RANK = 1 && exec sleep 600; exec > >({slow}) 2>&1; seq 1 20; exit 3"
    done = ringctl("launch", "--json", "--", "bash", "-c", program, code=1)
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["text"] for event in told if event["kind"] == "line"] == [
        f"through {number}" for number in range(1, 21)
    ]


# --- One host loses its part ---------------------------------------------------------------------


@pytest.mark.parametrize(("name", "how"), [("KILL", "killed"), ("TERM", "told to end (SIGTERM)")])
def test_when_a_supervisor_is_ended_the_run_ends_everywhere_and_the_host_is_named(
    cluster: Hosts, launch: Launch, name: str, how: str
) -> None:
    pid = supervisor(cluster, "server2")["hostd"]
    cluster.run("server2", "kill", f"-{name}", str(pid))
    said = launch.ended(1)
    first = said.partition("failed first:")[2].splitlines()[0]
    assert f"the run was ended on server2: its supervisor was {how}" in first
    assert eventually(lambda: not hosts.left_on(cluster)), hosts.left_on(cluster)


def test_when_a_host_reboots_the_run_ends_on_the_others_and_that_host_is_named(
    cluster: Hosts, launch: Launch
) -> None:
    cluster.reboot("server2")
    said = launch.ended(1)
    first = said.partition("failed first:")[2].splitlines()[0]
    assert "server2" in first
    assert "server1" not in first
    assert eventually(lambda: not hosts.left_on(cluster)), hosts.left_on(cluster)


def test_a_run_that_failed_as_a_host_lost_its_power_stays_failed_when_it_is_stopped(
    cluster: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGCTL_LEASE", "1")
    inventory(cluster, only=TWO)
    launch = Launch(tmp_path, *TALK)
    often = 15  # meanwhile the supervisors have heard of each other
    wait_for(lambda: launch.said().count("[1 server2] up") > often, "that it has run for a while")
    cluster.power_off("server2")
    assert "ringctl stop" in launch.ended(1)
    cluster.boot("server2")
    cluster.heal("server2")
    ringctl("stop")
    end = json.loads(ringctl("logs", "--json").stdout.splitlines()[-1])
    assert (end["state"], end["exit_code"]) == ("failed", 1)
    assert end["cause"] == f"the run was ended on server2: {REBOOTED}"
    for listed in (("ps", "--all", "--json"), ("runs", "list", "--json")):
        assert [row["state"] for row in json.loads(ringctl(*listed).stdout)] == ["failed"]


def test_a_run_whose_folder_is_gone_on_one_host_is_ended_on_the_others(
    cluster: Hosts, launch: Launch
) -> None:
    pids = [str(pid) for pid in supervisor(cluster, "server2").values()]
    cluster.run("server2", "kill", "-STOP", *pids)
    cluster.run("server2", "kill", "-KILL", *pids)
    shutil.rmtree(cluster.path("server2", f"{OURS}/runs"))
    said = launch.ended(1)
    assert "failed first: server2: " in said, said[-1500:]
    assert eventually(lambda: not hosts.left_on(cluster)), hosts.left_on(cluster)


def test_logs_of_the_other_hosts_are_shown_when_one_has_lost_the_run(cluster: Hosts) -> None:
    inventory(cluster, only=TWO)
    ringctl("launch", "--", "echo", "here")
    shutil.rmtree(cluster.path("server2", f"{OURS}/runs"))
    done = ringctl("logs", code=4)
    assert "[0 server1] here" in done.stdout
    assert "server2: there is no run" in done.stderr


# --- Ctrl-C --------------------------------------------------------------------------------------


def test_interrupted_before_the_start_nothing_is_started(cluster: Hosts, tmp_path: Path) -> None:
    inventory(cluster, only=TWO)
    Path("big").write_bytes(os.urandom(6_000_000))
    cluster.limit_rate("server2", "2mbit")
    try:
        launch = Launch(tmp_path, "--", "sh", "-c", "echo started")
        launch.wait_for("command:")
        launch.interrupt()
        said = launch.ended(130)
    finally:
        cluster.limit_rate("server2", None)
    assert "interrupted; nothing was started" in said
    assert "] started" not in said
    assert not cluster.path("server1", f"{OURS}/runs").exists()
    cluster.end_sessions("server2")
    assert eventually(lambda: not hosts.left_on(cluster), 20.0), hosts.left_on(cluster)


def test_a_server_that_allows_one_session_is_stopped_by_another_connection(
    cluster: Hosts, tmp_path: Path
) -> None:
    inventory(cluster, only=TWO)
    with sshd_option(cluster, "server2", "MaxSessions 1"):
        launch = Launch(tmp_path, *TALK)
        for words in ("[0 server1] up", "[1 server2] up"):
            launch.wait_for(words)
        launch.interrupt()
        launch.ended(130)
        assert eventually(lambda: not hosts.left_on(cluster)), hosts.left_on(cluster)


def test_a_host_that_is_away_for_a_moment_is_stopped_when_it_is_back(cluster: Hosts, launch: Launch) -> None:
    cluster.stop_sshd("server2")
    cluster.end_sessions("server2")
    launch.wait_for("server2: the connection was lost")
    launch.interrupt()
    launch.wait_for("trying again")
    cluster.start_sshd("server2")
    launch.ended(130)
    assert eventually(lambda: not hosts.left_on(cluster)), hosts.left_on(cluster)


def test_a_host_that_did_not_answer_is_asked_once_more_though_we_slept_meanwhile(
    cluster: Hosts, launch: Launch
) -> None:
    cluster.cut("server2")
    launch.interrupt()
    launch.wait_for("stopping the run")
    launch.process.send_signal(signal.SIGSTOP)
    time.sleep(watch.RETRY_S + 1.0)
    launch.process.send_signal(signal.SIGCONT)
    launch.wait_for("trying again", DEAD_S + 30.0)
    cluster.heal("server2")
    assert "cannot be reached;" not in launch.ended(130)
    assert eventually(lambda: not hosts.left_on(cluster)), hosts.left_on(cluster)


# --- From elsewhere ------------------------------------------------------------------------------


def test_a_stop_that_cannot_know_all_hosts_of_a_run_says_so(
    cluster: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inventory(cluster, only=TWO)
    ringctl("launch", "--detach", *TALK)
    inventory(cluster, only=("server1",))
    monkeypatch.setenv("RINGCTL_HOME", str(tmp_path / "elsewhere"))
    done = ringctl("stop", code=4)
    assert "rank 1 of it is on a host that is not named here" in done.stderr
    assert json.loads(ringctl("ps", "--all", "--json").stdout)[0]["state"] != "stopped"
    inventory(cluster, only=TWO)
    ringctl("stop")
    assert eventually(lambda: not hosts.left_on(cluster)), hosts.left_on(cluster)
