"""How supervisors hear of each other, and none goes on as if it were alone: docs/decisions/008-leases.md."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher import history
from tests.conftest import eventually
from tests.launcher import hosts
from tests.launcher.hosts import OURS, Hosts, inventory
from tests.launcher.ringctl import ringctl, wait_for
from tests.launcher.test_ssh_ends import Launch
from tests.launcher.test_ssh_one_end import said_of
from tests.launcher.test_ssh_restarts import (
    THREE,
    TWO,
    detached,
    ends_on,
    host_state,
    impatience,  # noqa: F401 - a fixture
    program,
    step_of,
)

PEERS = """
import os, socket, sys, time
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    other = socket.create_server(place).accept()[0]
    time.sleep(1000)
for _ in range(500):
    try:
        peer = socket.create_connection(place)
        break
    except OSError:
        time.sleep(0.02)
time.sleep(3)  # by then the supervisors have met, too
print("met", flush=True)
sys.exit(1 if peer.recv(1) == b"" else 0)
"""


@contextlib.contextmanager
def deaf(cluster: Hosts, host: str) -> Iterator[None]:
    """Its supervisors hear of nobody."""
    drop = "add table inet deaf; add chain inet deaf in { type filter hook input priority 0; }; "
    cluster.run(host, "nft", drop + "add rule inet deaf in meta l4proto udp drop", user="root")
    try:
        yield
    finally:
        cluster.run(host, "nft", "delete table inet deaf", user="root")


def test_a_host_that_was_cut_off_while_the_run_was_stopped_ends_its_ranks_by_itself(cluster: Hosts) -> None:
    inventory(cluster, only=TWO)
    run = detached(*program())["run"]
    wait_for(lambda: step_of(cluster, "server2", run) > 1, "steps")
    cluster.cut("server2")
    cluster.path("server2", "/home/train/stand-still").touch()  # it would wait for the others from here on
    said = ringctl("stop", run, "--grace", "0", code=4)
    assert "server2" in said.stderr
    ended = ends_on(cluster, "server2", run)
    assert "server1 was not heard of" in ended["ranks"][0]["reason"]
    assert eventually(lambda: not hosts.left_on(cluster)), hosts.left_on(cluster)


@pytest.mark.parametrize("attached", [False, True])
def test_a_rank_that_fails_on_a_host_that_was_cut_off_when_the_run_was_stopped_makes_no_failure_of_it(
    cluster: Hosts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, attached: bool
) -> None:
    monkeypatch.setenv("RINGCTL_LEASE", "4")  # 24 s for a rank that tells no steps: it fails before
    inventory(cluster, only=TWO)
    script = ["--", "sh", "-c", "echo up; until [ -e ~/fail ]; do sleep 0.05; done; exit 7"]
    launch = Launch(tmp_path, *([] if attached else ["--detach"]), *script)
    for words in ("[0 server1] up", "[1 server2] up") if attached else ():
        launch.wait_for(words)
    assert attached or launch.ended(0)
    run = history.recall()[-1].plan.run
    cluster.cut("server2")
    if attached:
        launch.interrupt()
    else:
        ringctl("stop", run, "--grace", "0", code=4)
    assert ends_on(cluster, "server1", run)["state"] == "stopped"
    cluster.path("server2", "/home/train/fail").touch()
    assert ends_on(cluster, "server2", run)["state"] == "failed"
    hosts.mend(cluster)
    if attached:
        said = launch.ended(130)
        assert (f"run {run} stopped" in said, "failed first" in said) == (True, False)
    else:
        ringctl("stop", run)
    assert said_of(run) == {"stopped"}
    told = json.loads(ringctl("explain", run, "--json", code=1).stdout)
    assert (told["state"], told["cause"]) == ("stopped", None)


def test_a_run_that_lost_a_host_ends_by_itself_and_the_host_is_named(cluster: Hosts) -> None:
    inventory(cluster, only=TWO)
    run = detached(*program())["run"]
    wait_for(lambda: step_of(cluster, "server2", run) > 1, "steps")
    cluster.cut("server2")
    for host in TWO:
        cluster.path(host, "/home/train/stand-still").touch()
    for host in TWO:
        ends_on(cluster, host, run)
    hosts.mend(cluster)
    cause = json.loads(ringctl("explain", run, "--json", code=None).stdout)
    assert (cause["id"], cause["host"]) == ("host_gone", "server2")
    assert "the run was ended on server1: server2 was not heard of for" in cause["cause"]


def test_ranks_that_get_on_are_left_alone_however_long_a_supervisor_is_not_heard_of(cluster: Hosts) -> None:
    inventory(cluster, only=TWO)
    run = detached(*program())["run"]
    wait_for(lambda: step_of(cluster, "server2", run) > 1, "steps")
    cluster.cut("server2")
    before = step_of(cluster, "server1", run), step_of(cluster, "server2", run)
    many = 80  # steps, twice as long as the lease
    wait_for(lambda: step_of(cluster, "server1", run) > before[0] + many, "more steps")
    wait_for(lambda: step_of(cluster, "server2", run) > before[1] + many, "more steps")
    cluster.heal("server2")
    assert {host_state(cluster, host, run)["state"] for host in TWO} == {"running"}
    ringctl("stop", run, "--grace", "0")


def test_a_detached_run_that_fails_on_one_host_ends_on_all_though_nobody_watches(cluster: Hosts) -> None:
    inventory(cluster, only=THREE)
    script = 'sleep 0.5; [ "$RANK" = 1 ] && [ -e ~/fail ] && exit 7; exec sleep 1000'
    cluster.path("server2", "/home/train/fail").touch()
    run = detached("--", "sh", "-c", script)["run"]
    reasons = [ends_on(cluster, host, run)["ranks"][0]["reason"] for host in THREE]
    assert reasons == ["rank 1 failed", "", "rank 1 failed"]
    assert eventually(lambda: not hosts.left_on(cluster)), hosts.left_on(cluster)


def test_a_stop_that_reaches_one_host_only_is_passed_on_by_the_supervisors(cluster: Hosts) -> None:
    inventory(cluster, only=TWO)
    run = detached("--", "sleep", "1000")["run"]
    wait_for(lambda: host_state(cluster, "server2", run)["state"] == "running", "its start")
    cluster.stop_sshd("server2")
    try:
        ringctl("stop", run, "--grace", "0", code=4)
        assert ends_on(cluster, "server2", run)["state"] == "stopped"
    finally:
        cluster.start_sshd("server2")


def test_ranks_that_fail_for_want_of_those_that_were_stopped_first_were_stopped_too(cluster: Hosts) -> None:
    inventory(cluster, only=TWO)
    Path("peers.py").write_text(PEERS)
    run = detached("--", "python3", "peers.py")["run"]
    log = cluster.path("server2", f"{OURS}/runs/{run}") / "events-1-000001.jsonl"
    wait_for(lambda: log.exists() and "met" in log.read_text(), "both ranks")
    cluster.stop_sshd("server2")
    try:
        ringctl("stop", run, code=4)
        ended = ends_on(cluster, "server2", run)
        assert (ended["state"], ended["ranks"][0]["state"]) == ("stopped", "stopped")
        assert ended["ranks"][0]["exit_code"] == 1
    finally:
        cluster.start_sshd("server2")
    ringctl("stop", run)
    assert history.state_of(run) == "stopped"


def test_where_supervisors_cannot_hear_each_other_a_stop_that_comes_late_is_one_all_the_same(
    cluster: Hosts,
) -> None:
    inventory(cluster, only=TWO)
    Path("peers.py").write_text(PEERS)
    with deaf(cluster, "server2"):
        run = detached("--", "python3", "peers.py")["run"]
        log = cluster.path("server2", f"{OURS}/runs/{run}") / "events-1-000001.jsonl"
        wait_for(lambda: log.exists() and "met" in log.read_text(), "both ranks")
        with hosts.agents() as agents:
            agents["server2"].tell_stop(run, 5.0, 1, 10.0)
            agents["server1"].stop(run, 5.0)
        ended = ends_on(cluster, "server2", run)
        assert (ended["state"], ended["ranks"][0]["exit_code"]) == ("stopped", 1)
        ringctl("stop", run)
        assert history.state_of(run) == "stopped"


def test_a_host_that_was_told_of_a_stop_sees_to_it_if_nobody_comes(cluster: Hosts) -> None:
    inventory(cluster, only=TWO)
    run = detached("--", "sleep", "1000")["run"]
    wait_for(lambda: host_state(cluster, "server2", run)["state"] == "running", "its start")
    with hosts.agents() as agents:
        agents["server2"].tell_stop(run, 5.0, 1, 10.0)
    assert [ends_on(cluster, host, run)["state"] for host in TWO] == ["stopped", "stopped"]


def test_ranks_that_only_print_are_not_kept_alive_by_it_once_all_others_are_gone(
    cluster: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGCTL_LEASE", "1")
    inventory(cluster, only=TWO)
    run = detached("--", "sh", "-c", "while :; do echo on; sleep 0.2; done")["run"]
    wait_for(lambda: host_state(cluster, "server2", run)["state"] == "running", "its start")
    wait_for(
        lambda: (
            (cluster.path("server2", f"{OURS}/runs/{run}") / "events-1-000001.jsonl").stat().st_size > 800
        ),
        "lines",
    )
    cluster.cut("server2")
    ringctl("stop", run, "--grace", "0", code=4)
    assert "server1 was not heard of" in ends_on(cluster, "server2", run)["ranks"][0]["reason"]


@pytest.mark.parametrize("first", TWO)
def test_a_host_that_finishes_while_it_is_not_heard_of_is_not_missed_later(
    cluster: Hosts, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    monkeypatch.setenv("RINGCTL_LEASE", "1.5")
    inventory(cluster, only=TWO)
    last = TWO[1 - TWO.index(first)]
    wait = "while [ ! -e /home/train/go ]; do echo on; sleep 0.1; done"
    run = detached("--", "sh", "-c", wait)["run"]
    wait_for(lambda: has_met(cluster, run, 2), "that they hear of each other")
    cluster.drop_from(last, first)
    cluster.path(first, "/home/train/go").touch()
    assert ends_on(cluster, first, run)["state"] == "succeeded"
    cluster.clear_rules(last)
    wait_for(lambda: cluster.is_idle(first) or first == "server1", "that its supervisor need not stay")
    gone_on = time.monotonic() + 7 * 1.5  # longer than a silence that decides about ranks that tell no steps
    wait_for(lambda: time.monotonic() > gone_on or host_state(cluster, last, run)["state"] != "running", "it")
    cluster.path(last, "/home/train/go").touch()
    assert ends_on(cluster, last, run)["state"] == "succeeded"
    assert eventually(lambda: not hosts.left_on(cluster)), hosts.left_on(cluster)


def has_met(cluster: Hosts, run: str, many: int) -> bool:
    """Whether all are under way for so long that their supervisors have heard of each other."""
    states = [host_state(cluster, host, run) for host in THREE[:many]]
    return all(s["state"] == "running" and s["updated"] - s["started"] > 3.0 for s in states)


def has_supervisor(cluster: Hosts, host: str, run: str) -> bool:
    warden = host_state(cluster, host, run)["warden"]["pid"]
    return warden in [process.host_pid for process in cluster.processes(host)]


def put_as_root(cluster: Hosts) -> str:
    """The beginning of a command line whose rest only root can end."""
    for host in TWO:
        program = cluster.path(host, "/opt/as-root")
        shutil.copy(str(shutil.which("setpriv")), program)
        program.chmod(0o4755)
    return "exec /opt/as-root --reuid=0 --clear-groups"


def test_what_ranks_have_made_another_users_is_told_and_keeps_no_run_from_ending(cluster: Hosts) -> None:
    inventory(cluster, only=TWO)
    leave = put_as_root(cluster)
    script = f'if [ "$RANK" = 0 ]; then {leave} yes; else {leave} sleep 600 >/dev/null 2>&1; fi & sleep 1'
    run = detached("--", "sh", "-c", script)["run"]
    assert [ends_on(cluster, host, run)["state"] for host in TWO] == ["succeeded", "succeeded"]
    (left,) = host_state(cluster, "server2", run)["left"]
    try:
        assert f"server2: could not end processes [{left['pid']}]" in ringctl("stop", run, code=1).stdout
        refused = ringctl("restart", run, "--detach", code=None).stderr
        assert f"server2: what it has of the attempt before did not end: [{left['pid']}]" in refused
    finally:
        cluster.run("server2", "kill", "-KILL", str(left["pid"]), user="root")
    wait_for(lambda: cluster.is_idle("server2"), "its end")
    assert "could not" not in ringctl("stop", run).stdout


def test_a_start_that_fails_on_one_host_tells_what_another_could_not_end(cluster: Hosts) -> None:
    make = "mkdir -p late/bin late/conda-meta late/etc/conda/activate.d; ln -s {} late/bin/python; {}"
    fails = "echo 'sleep 2; exit 3' > late/etc/conda/activate.d/fails.sh"
    cluster.run("server2", "sh", "-c", make.format(cluster.python, fails))
    inventory(cluster, only=TWO, server2={"env": {"conda": "/home/train/late"}})
    script = f"{put_as_root(cluster)} sleep 600 & echo $! > /home/train/left; sleep 600"
    told = ringctl("launch", "--", "sh", "-c", script, code=None).stderr
    left = cluster.path("server1", "/home/train/left").read_text().strip()
    cluster.run("server1", "kill", "-KILL", left, user="root")
    assert f"server1 could not end processes [{left}]" in told, told


# Each rank ends when its host is told to, with what it is told.
TOLD = "while [ ! -e /home/train/go ]; do sleep 0.1; done; exit $(cat /home/train/go)"


def leader_is_through(cluster: Hosts, *options: str) -> str:
    """A run of three hosts, of which that of rank 0 has finished."""
    inventory(cluster, only=THREE)
    run = str(detached(*options, "--", "sh", "-c", TOLD)["run"])
    wait_for(lambda: has_met(cluster, run, 3), "that they hear of each other")
    hosts.write_home(cluster, "server1", "go", "0")
    assert ends_on(cluster, "server1", run)["state"] == "succeeded"
    return run


def test_a_failure_ends_the_others_also_when_rank_0_is_through(cluster: Hosts) -> None:
    run = leader_is_through(cluster)
    hosts.write_home(cluster, "server2", "go", "3")
    assert ends_on(cluster, "server3", run)["ranks"][0]["reason"] == "rank 1 failed"
    assert eventually(lambda: not hosts.left_on(cluster)), hosts.left_on(cluster)


def test_a_failure_ends_the_others_also_when_rank_0_was_through_before_they_were_heard_of(
    cluster: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGCTL_LEASE", "20")
    inventory(cluster, only=THREE)
    with deaf(cluster, "server1"):
        run = detached("--", "sh", "-c", TOLD)["run"]
        hosts.write_home(cluster, "server1", "go", "0")
        assert ends_on(cluster, "server1", run)["state"] == "succeeded"
    hosts.write_home(cluster, "server2", "go", "3")
    assert ends_on(cluster, "server3", run)["ranks"][0]["reason"] == "rank 1 failed"
    assert eventually(lambda: not hosts.left_on(cluster)), hosts.left_on(cluster)


@pytest.mark.parametrize("reached", ["server1", "server2"])
def test_a_stop_is_passed_on_also_when_rank_0_is_through(cluster: Hosts, reached: str) -> None:
    run = leader_is_through(cluster)
    with hosts.agents() as agents:
        agents[reached].stop(run, 5.0)
    assert ends_on(cluster, "server3", run)["state"] == "stopped"
    assert host_state(cluster, "server1", run)["state"] == "succeeded"
    ringctl("stop", run, "--grace", "0")
    assert not has_supervisor(cluster, "server1", run)


def test_rank_0s_supervisor_stays_for_the_others_and_keeps_nothing(cluster: Hosts) -> None:
    run = leader_is_through(cluster, "--master-port", "23456")
    assert has_supervisor(cluster, "server1", run)
    assert not list(cluster.path("server1", hosts.SLOTS).glob("*.json"))
    inventory(cluster, only=("server1", "server4"))
    other = detached("--master-port", "23456", "--", "sleep", "1000")["run"]  # which wants the port
    assert not has_supervisor(cluster, "server1", run)
    assert "no lease" not in cluster.path("server1", f"{OURS}/runs/{other}/hostd.log").read_text()
    ringctl("stop", other, "--grace", "0")
    inventory(cluster, only=THREE)
    assert {host_state(cluster, host, run)["state"] for host in THREE[1:]} == {"running"}
    ringctl("stop", run, "--grace", "0")


def test_an_attempt_starts_where_the_one_before_stays_for_other_hosts(cluster: Hosts) -> None:
    run = leader_is_through(cluster, "--master-port", "23456")
    cluster.cut("server3")  # so nobody tells it
    hosts.write_home(cluster, "server2", "go", "3")
    ends_on(cluster, "server2", run)
    cluster.path("server1", "/home/train/go").unlink()
    ringctl("restart", run, "--world", "1", "--detach")
    assert host_state(cluster, "server1", run)["attempt"] == 2
    hosts.mend(cluster)
    ringctl("stop", run, "--grace", "0")
