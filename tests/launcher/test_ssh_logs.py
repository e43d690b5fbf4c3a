"""One log of all hosts, whatever happens to the cables; a run found, followed and ended from anywhere."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher import history
from tests.cluster import CONTROLLER, Cluster
from tests.conftest import eventually
from tests.launcher import hosts
from tests.launcher.conftest import become_controller
from tests.launcher.hosts import HOME, OURS, Hosts, inventory
from tests.launcher.ringctl import RINGCTL, ringctl, wait_for

# Numbered lines until somebody makes ~/done; what is printed is also in ~/written, byte for byte.
COUNT = """
i=0
until [ -e ~/done ]; do
    i=$((i+1))
    echo "rank $RANK line $i"
    echo "rank $RANK line $i" >>~/written
    sleep 0.1
done
"""


def detach(*args: str) -> str:
    return str(json.loads(ringctl("launch", "--detach", "--json", *args).stdout)["run"])


def written(cluster: Cluster, host: str) -> bytes:
    path = cluster.path(host, f"{HOME}/written")
    return path.read_bytes() if path.exists() else b""


def finish(cluster: Cluster) -> None:
    """Let the ranks come to their end."""
    for host in cluster.names:
        cluster.run(host, "touch", "done")


class Follower:
    """`ringctl logs --follow` in a terminal of its own, with its output in files."""

    def __init__(self, folder: Path, name: str, *args: str) -> None:
        self.out, self.err = folder / f"{name}.out", folder / f"{name}.err"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen([*RINGCTL, "logs", "--follow", *args], stdout=out, stderr=err)

    def of(self, rank: int) -> bytes:
        """What it has shown of one rank, without the label."""
        label = f"[{rank} server{rank + 1}] ".encode()
        shown = self.out.read_bytes().splitlines(keepends=True)
        return b"".join(line.removeprefix(label) for line in shown if line.startswith(label))

    def has_begun(self, *ranks: int) -> bool:
        return all(self.of(rank) for rank in ranks)

    def said(self) -> str:
        return self.err.read_text()


# --- Drops ---------------------------------------------------------------------------------------


def test_the_log_is_complete_and_without_repeats_through_every_kind_of_drop(
    cluster: Hosts, tmp_path: Path
) -> None:
    """At once: the cable of server2 is pulled, sshd of server3 restarts, server4's connections are reset."""
    detach("--", "sh", "-c", COUNT)
    first, second = Follower(tmp_path, "first"), Follower(tmp_path, "second", "--json")
    wait_for(lambda: first.has_begun(0, 1, 2, 3), "lines of all ranks")
    cluster.cut("server2")
    cluster.stop_sshd("server3")
    cluster.end_sessions("server3")
    cluster.reset_port("server4", 22)
    wait_for(lambda: all(f"server{n}: " in first.said() for n in (2, 3, 4)), "word that three hosts are away")
    before = first.of(0)
    wait_for(lambda: len(first.of(0)) > len(before) + 300, "more of the host that is not away")
    cluster.start_sshd("server3")
    cluster.clear_rules("server4")
    wait_for(lambda: "server3: is back" in first.said() and "server4: is back" in first.said(), "two hosts")
    assert "server2: is back" not in first.said()
    cluster.heal("server2")
    wait_for(lambda: "server2: is back" in first.said(), "the third host")
    caught_up = written(cluster, "server2")
    wait_for(lambda: len(first.of(1)) > len(caught_up), "what was missed, and more")
    cluster.end_sessions("server1")
    finish(cluster)
    for follower in (first, second):
        assert follower.process.wait(timeout=60) == 0, follower.said()
    events = [json.loads(line) for line in second.out.read_bytes().splitlines()]
    assert events[-1]["state"] == "succeeded"
    for rank, host in enumerate(cluster.names):
        whole = written(cluster, host)
        assert first.of(rank) == whole
        texts = [e["text"] for e in events if e["kind"] == "line" and e["rank"] == rank]
        assert "\n".join([*texts, ""]).encode() == whole
    assert len(first.out.read_bytes().splitlines()) == sum(
        written(cluster, h).count(b"\n") for h in cluster.names
    )


def test_an_attached_launch_goes_on_after_a_drop_and_reports_the_end(cluster: Hosts, tmp_path: Path) -> None:
    inventory(cluster, only=("server1", "server2"))
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen([*RINGCTL, "launch", "--", "sh", "-c", COUNT], stdout=out)
    labels = (b"[0 server1]", b"[1 server2]")
    wait_for(lambda: all(label in (tmp_path / "out").read_bytes() for label in labels), "the first lines")
    cluster.end_sessions("server1")
    cluster.end_sessions("server2")
    seen = len(written(cluster, "server2"))
    wait_for(lambda: len(written(cluster, "server2")) > seen + 200, "some more lines")
    finish(cluster)
    assert process.wait(timeout=60) == 0
    shown = (tmp_path / "out").read_bytes().splitlines(keepends=True)
    for rank in (0, 1):
        label = f"[{rank} server{rank + 1}] ".encode()
        mine = b"".join(line.removeprefix(label) for line in shown if line.startswith(label))
        assert mine == written(cluster, f"server{rank + 1}")


def test_ctrl_c_ends_following_also_while_a_host_is_away_and_the_run_goes_on(
    cluster: Hosts, tmp_path: Path
) -> None:
    inventory(cluster, only=("server1", "server2"))
    run = detach("--", "sh", "-c", COUNT)
    follower = Follower(tmp_path, "follower")
    wait_for(lambda: follower.has_begun(0, 1), "lines of both ranks")
    cluster.drop_port("server2", 22)
    cluster.end_sessions("server2")
    wait_for(lambda: "server2: " in follower.said(), "word that it is away")
    follower.process.send_signal(signal.SIGINT)
    assert follower.process.wait(timeout=60) == 130
    assert "Traceback" not in follower.said()
    cluster.clear_rules("server2")
    assert json.loads(ringctl("status", run, "--json").stdout)["state"] == "running"
    ringctl("stop", run)


# --- After the end -------------------------------------------------------------------------------


def test_logs_of_a_run_that_is_over_are_whole_and_downloaded_byte_for_byte(
    cluster: Hosts, tmp_path: Path
) -> None:
    """Also when the hosts have no files of ringctl's any more, as after an upgrade of it."""
    odd = (
        r"printf 'plain\n\377\000odd\r\n  spaces  \n' | tee -a ~/written; printf 'no end' | tee -a ~/written"
    )
    ringctl("launch", "--", "sh", "-c", odd)
    assert "succeeded" in ringctl("status").stdout  # from now on no host need be asked how it ended
    for host in cluster.names:
        cluster.run(host, "rm", "-r", f"{OURS}/kit")
    ringctl("logs", "--download", str(tmp_path / "logs"))
    folder = next((tmp_path / "logs").iterdir())
    for rank, host in enumerate(cluster.names):
        assert (folder / f"rank{rank}.out.log").read_bytes() == written(cluster, host)
    done = subprocess.run([*RINGCTL, "logs", "--rank", "2"], capture_output=True)
    assert (
        done.stdout
        == b"[2 server3] plain\n[2 server3] \xff\0odd\n[2 server3]   spaces  \n[2 server3] no end\n"
    )


def test_a_host_that_is_away_is_told_and_the_others_logs_are_shown(cluster: Hosts) -> None:
    ringctl("launch", "--", "sh", "-c", "echo rank $RANK")
    cluster.reset_port("server2", 22)
    done = ringctl("logs", code=4)
    assert sorted(done.stdout.splitlines()) == [
        f"[{rank} server{rank + 1}] rank {rank}" for rank in (0, 2, 3)
    ]
    assert f"server2: connection refused by {cluster.address('server2')}:22" in done.stderr


def test_who_follows_a_run_that_is_over_changes_nothing_about_its_end(cluster: Hosts) -> None:
    inventory(cluster, only=("server1", "server2"))
    ringctl("launch", "--skip-preflight", "--", "sh", "-c", "echo rank $RANK")
    run = history.recall()[-1].plan.run
    changes: tuple[Callable[[], object], ...] = (
        lambda: shutil.rmtree(cluster.path("server2", f"{OURS}/runs/{run}")),
        lambda: cluster.reset_port("server2", 22),
    )
    for change in changes:
        change()
        done = ringctl("logs", "--follow", code=4)
        assert done.stdout == "[0 server1] rank 0\n"
        assert "server2: " in done.stderr
        assert f"run {run} succeeded" in done.stderr
        assert history.state_of(run) == "succeeded"
        assert json.loads(ringctl("explain", "--json", code=1).stdout)["state"] == "succeeded"


# --- From anywhere -------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(cluster: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call it, and you are at another controller that knows nothing but the inventory."""

    def go() -> None:
        folder = tmp_path / "elsewhere"
        folder.mkdir()
        become_controller(cluster, folder, monkeypatch)
        monkeypatch.setenv("RINGCTL_HOME", str(folder / "ringctl"))

    return go


def test_another_controller_finds_follows_and_ends_the_run_and_nothing_is_left(
    cluster: Hosts, tmp_path: Path, elsewhere: Any
) -> None:
    listen = (
        "import os, socket, time; s = socket.create_server(('', 0)); os.write(1, b'up\\n'); time.sleep(1000)"
    )
    run = detach("--", "sh", "-c", f'python3 -c "{listen}" & {COUNT}')
    elsewhere()
    assert json.loads(ringctl("ps", "--json").stdout) == []
    (found,) = json.loads(ringctl("ps", "--all", "--json").stdout)
    assert (found["run"], found["state"], found["world"]) == (run, "running", 4)
    assert found["hosts"] == list(cluster.names)
    follower = Follower(tmp_path, "elsewhere")
    wait_for(lambda: follower.has_begun(0, 1, 2, 3), "lines of all ranks")
    ranks = json.loads(ringctl("status", "--json").stdout)["ranks"]
    assert [(rank["rank"], rank["host"], rank["state"]) for rank in ranks] == [
        (number, host, "running") for number, host in enumerate(cluster.names)
    ]
    assert all(rank["pid"] and rank["heartbeat_age_s"] < 60 for rank in ranks)
    assert all(hosts.left_on(cluster)[host][1] for host in cluster.names), "each rank listens somewhere"
    stopped = ringctl("stop").stdout
    assert stopped.splitlines() == [
        f"{host}: ended ranks {number}; nothing is left of them" for number, host in enumerate(cluster.names)
    ]
    assert follower.process.wait(timeout=60) == 0
    assert "stopped" in follower.said()
    assert eventually(lambda: not hosts.left_on(cluster)), hosts.left_on(cluster)
    for rank, host in enumerate(cluster.names):
        shown = follower.of(rank).replace(b"up\n", b"")
        whole = written(cluster, host)
        length = min(len(shown), len(whole))  # the end came between the two copies of a line, or not
        assert length > 100
        assert shown[:length] == whole[:length]
    again = ringctl("stop").stdout
    assert again.count("was stopped already; nothing is left of it") == 4


def test_another_controller_misses_no_host_that_a_run_has_gone_on_without(
    cluster: Hosts, tmp_path: Path, elsewhere: Any
) -> None:
    inventory(cluster, only=("server1", "server2"))
    program = (
        "echo up; [ $RINGCTL_ATTEMPT = 1 ] && sleep 1000; until [ -e ~/done ]; do sleep 0.05; done; exit 3"
    )
    run = detach("--", "sh", "-c", program)
    ringctl("restart", run, "--world", "1", "--detach")
    elsewhere()
    follower = Follower(tmp_path, "elsewhere")
    wait_for(lambda: follower.has_begun(0), "its line", 10.0)  # sooner than hosts are given to start
    going_on = json.loads(ringctl("explain", "--json", code=None).stdout)
    assert "server2" not in json.dumps(going_on)
    cluster.run("server1", "touch", "done")
    assert follower.process.wait(timeout=60) == 0
    assert f"run {run} failed" in follower.said()
    shown = ringctl("logs")
    assert shown.stdout == "[0 server1] up\n"
    downloaded = ringctl("logs", "--download", str(tmp_path / "logs"))
    explained = json.loads(ringctl("explain", "--json", code=None).stdout)
    for said in (follower.said(), shown.stderr, downloaded.stderr, json.dumps(explained)):
        assert "server2" not in said
    (found,) = json.loads(ringctl("ps", "--all", "--json").stdout)
    assert found["hosts"] == ["server1", "server2"], "where something of it may be left"


@pytest.mark.parametrize("away_from_home", [False, True], ids=["where it was started", "elsewhere"])
def test_stop_ends_what_it_can_reach_names_the_rest_and_can_be_repeated(
    cluster: Hosts, elsewhere: Any, away_from_home: bool
) -> None:
    detach("--include", "server2,server3", "--", "sleep", "1000")
    if away_from_home:
        elsewhere()
    cluster.drop_between("server2", "server3")  # else it hears of the stop from there, after a while
    cluster.reset_port("server3", 22, from_=CONTROLLER)
    done = ringctl("stop", code=4)
    assert done.stdout == "server2: ended ranks 0; nothing is left of them\n"
    assert f"error: server3: connection refused by {cluster.address('server3')}:22" in done.stderr
    assert eventually(lambda: set(hosts.left_on(cluster)) == {"server3"}), hosts.left_on(cluster)
    assert json.loads(ringctl("status", "--json", code=4).stdout)["state"] == "lost"
    assert "server3: connection refused" in ringctl("explain").stdout.splitlines()[0]
    cluster.clear_rules("server3")
    assert "server3: ended ranks 1; nothing is left of them" in ringctl("stop").stdout
    assert eventually(lambda: not hosts.left_on(cluster)), hosts.left_on(cluster)


def first_rank() -> Any:
    return json.loads(ringctl("status", "--json").stdout)["ranks"][0]


def test_a_run_is_not_called_over_while_a_host_of_it_is_away(cluster: Hosts, elsewhere: Any) -> None:
    inventory(cluster, only=("server1", "server2"))
    detach("--", "sh", "-c", "until [ -e ~/done ]; do sleep 0.05; done")
    cluster.run("server1", "touch", "done")
    wait_for(lambda: first_rank()["state"] == "succeeded", "the end of one rank")
    cluster.reset_port("server2", 22, from_=CONTROLLER)
    for command in (("status",), ("ps", "--all"), ("status",)):
        done = ringctl(*command, "--json", code=4)
        assert "error: server2: connection refused" in done.stderr
        found = json.loads(done.stdout)
        found = found[0] if command[0] == "ps" else found
        assert found["state"] == "running", command
        if command[0] == "status":
            assert [rank["state"] for rank in found["ranks"]] == ["succeeded", "unknown"]
        else:
            elsewhere()
    cluster.reset_port("server1", 22, from_=CONTROLLER)
    assert "connection refused" in ringctl("stop", code=4).stderr, "not: there is no run"
    for host in ("server1", "server2"):
        cluster.clear_rules(host)
    ringctl("stop")


def test_a_run_that_was_going_when_its_host_rebooted_is_lost_and_can_be_stopped(cluster: Hosts) -> None:
    inventory(cluster, only=("server1", "server2"))
    detach("--", "sleep", "1000")
    cluster.reboot("server2")
    told = json.loads(ringctl("status", "--json").stdout)
    assert (told["state"], [rank["state"] for rank in told["ranks"]]) == ("lost", ["running", "unknown"])
    assert "server1: ended ranks 0" in ringctl("stop").stdout
    assert json.loads(ringctl("status", "--json").stdout)["state"] == "stopped"


def test_a_controller_that_is_killed_leaves_a_run_that_goes_on(cluster: Hosts, elsewhere: Any) -> None:
    process = subprocess.Popen([*RINGCTL, "launch", "--", "sh", "-c", COUNT], stdout=subprocess.DEVNULL)
    wait_for(lambda: all(written(cluster, host) for host in cluster.names), "lines of all ranks")
    process.kill()
    process.wait()
    seen = len(written(cluster, "server4"))
    wait_for(lambda: len(written(cluster, "server4")) > seen + 200, "more lines")
    elsewhere()
    assert ringctl("stop").stdout.count("nothing is left of them") == 4
