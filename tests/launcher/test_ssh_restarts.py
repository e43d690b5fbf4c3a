"""Hosts that come and go: leases, attempts without a host and with it again, and none that goes on alone."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher import history, leftovers, watching
from tests.conftest import eventually
from tests.launcher import hosts
from tests.launcher.hosts import OURS, Hosts, inventory
from tests.launcher.ringctl import RINGCTL, is_alive, ringctl, start, wait_for

TWO, THREE = ("server1", "server2"), ("server1", "server2", "server3")
TRAIN = ["--", "--steps", "4000", "--batch-size", "4", "--threads", "1", "--checkpoint-every", "20"]
# Tells its steps, and can be made to stand still, as a rank does that waits for others.
STEPS = """
import json, os, time
metrics = open(os.environ["RINGCTL_METRICS"], "a", buffering=1)
step = 0
while True:
    while os.path.exists("/home/train/stand-still"): time.sleep(0.02)
    step += 1
    print(json.dumps({"step": step}), file=metrics)
    time.sleep(0.05)
"""
LAST_WORDS = """
import os, signal
signal.signal(signal.SIGTERM, lambda *_: (print("last words", flush=True), os._exit(1)))
"""
# Rank 1 fails as soon as rank 0 is gone, as one does that was training with it.
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
print("met", flush=True)
sys.exit(1 if peer.recv(1) == b"" else 0)
"""


@pytest.fixture(autouse=True)
def impatience(cluster: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001 - its home is written to
    """A short lease, and nobody waits long for a host that is away."""
    monkeypatch.setenv("RINGCTL_LEASE", "2")
    hosts.ssh_config("ConnectTimeout 3")


def host_state(cluster: Hosts, host: str, run: str) -> Any:
    path = cluster.path(host, f"{OURS}/runs/{run}/state.json")
    return json.loads(path.read_text()) if path.exists() else {"state": "", "ranks": [], "attempt": 0}


def step_of(cluster: Hosts, host: str, run: str) -> int:
    return max((rank["metric"].get("step", 0) for rank in host_state(cluster, host, run)["ranks"]), default=0)


def detached(*options: str) -> Any:
    return json.loads(ringctl("launch", "--detach", "--json", *options).stdout)


def program() -> list[str]:
    Path("steps.py").write_text(STEPS)
    return ["--", "python3", "steps.py"]


@contextlib.contextmanager
def deaf(cluster: Hosts, host: str) -> Iterator[None]:
    """Its supervisors hear of nobody."""
    drop = "add table inet deaf; add chain inet deaf in { type filter hook input priority 0; }; "
    cluster.run(host, "nft", drop + "add rule inet deaf in meta l4proto udp drop", user="root")
    try:
        yield
    finally:
        cluster.run(host, "nft", "delete table inet deaf", user="root")


def ends_on(cluster: Hosts, host: str, run: str) -> Any:
    return wait_for(
        lambda: (
            host_state(cluster, host, run)["state"] in ("failed", "stopped", "succeeded")
            and host_state(cluster, host, run)
        ),
        f"the end of the run on {host}",
        40.0,
    )


# --- Leases --------------------------------------------------------------------------------------


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


def test_tries_that_never_began_do_not_keep_the_run_from_starting_once_its_hosts_are_back(
    cluster: Hosts,
) -> None:
    inventory(cluster, only=TWO)
    fails = "while [ ! -e /home/train/go ]; do sleep 0.1; done; exit 3"
    about = detached("--max-restarts", "2", "--restart-delay", "0.1", "--", "sh", "-c", fails)
    cluster.stop_sshd("server2")
    cluster.end_sessions("server2")
    for host in TWO:
        hosts.write_home(cluster, host, "go", "")
    wait_for(lambda: not is_alive(about["watcher"]), "its watcher to give up", 60.0)
    cluster.start_sshd("server2")
    for host in TWO:
        cluster.path(host, "/home/train/go").unlink()
    ringctl("restart", about["run"], "--detach")
    wait_for(lambda: host_state(cluster, "server2", about["run"])["state"] == "running", "its start")
    ringctl("stop", about["run"], "--grace", "0")


HISTORY = """
import json, os, time
with open(os.environ["RINGCTL_METRICS"], "a") as metrics:
    for step in range(40):
        print(json.dumps({"step": step}), file=metrics, flush=True)
        time.sleep(0.05)
    if os.environ["RANK"] == "1":
        metrics.writelines(json.dumps({"step": 40, "of": number}) + "\\n" for number in range(400_000))
        metrics.flush()
        os._exit(0)
time.sleep(8)  # evaluates
"""


def test_who_takes_long_to_read_what_a_rank_told_last_is_heard_of_meanwhile(cluster: Hosts) -> None:
    inventory(cluster, only=TWO)
    Path("history.py").write_text(HISTORY)
    ringctl("launch", "--", "python3", "history.py")
    (run,) = json.loads(ringctl("ps", "--json").stdout)
    assert host_state(cluster, "server2", run["run"])["ranks"][0]["metric"]["of"] == 399_999


def test_what_ranks_have_made_another_users_is_told_and_keeps_no_run_from_ending(cluster: Hosts) -> None:
    inventory(cluster, only=TWO)
    for host in TWO:
        program = cluster.path(host, "/opt/as-root")
        shutil.copy(str(shutil.which("setpriv")), program)
        program.chmod(0o4755)
    leave = "exec /opt/as-root --reuid=0 --clear-groups"  # what only root can end
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


# --- An attempt that was stopped does not come back ----------------------------------------------


def test_what_was_stopped_from_elsewhere_while_it_waited_is_not_started_again(
    cluster: Hosts, tmp_path: Path
) -> None:
    inventory(cluster, only=TWO)
    about = detached("--max-restarts", "3", "--restart-delay", "3", "--", "sh", "-c", "exit 1")
    run = about["run"]
    wait_for(lambda: (watch := watching.read(run)) and "begins" in watch.doing, "the wait")
    elsewhere = {**os.environ, "RINGCTL_HOME": str(tmp_path / "elsewhere")}
    ringctl("stop", run, "--hosts", os.environ["RINGCTL_HOSTS"], env=elsewhere)
    wait_for(lambda: not is_alive(about["watcher"]), "the watcher's end")
    assert {host_state(cluster, host, run)["attempt"] for host in TWO} == {1}
    log = (watching.folder() / f"{run}.log").read_text()
    assert "somebody has stopped the run meanwhile" in log


def test_the_log_of_the_attempt_before_is_whole_also_when_it_was_on_other_hosts(cluster: Hosts) -> None:
    inventory(cluster, only=THREE)
    run = detached("--", "sh", "-c", "echo attempt $RINGCTL_ATTEMPT; sleep 1000")["run"]
    for world in ("2", "3"):
        wait_for(lambda: "attempt" in ringctl("logs", run).stdout, "lines")
        ringctl("restart", run, "--world", world, "--detach")
        said = sorted(ringctl("logs", run, "--previous", "--no-prefix").stdout.split("\n")[:-1])
        assert said == (["attempt 1"] * 3 if world == "2" else ["attempt 2"] * 2)
    ringctl("stop", run, "--grace", "0")


# --- Without a host, and with it again -----------------------------------------------------------


def test_a_run_goes_on_without_a_host_that_was_lost_and_takes_it_in_again(
    cluster: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGCTL_LEASE", "7")  # longer than it takes to see that a host is away, as by default
    inventory(cluster, only=TWO)
    process = start("launch", "--max-restarts", "2", "--min-world", "1", "--restart-delay", "0.1", *TRAIN)
    run = wait_for(lambda: json.loads(ringctl("ps", "--json").stdout), "the run")[0]["run"]
    wait_for(lambda: step_of(cluster, "server1", run) > 60, "steps and checkpoints")
    cluster.cut("server1")  # rank 0, the master, and the first copy of the model
    wait_for(lambda: host_state(cluster, "server2", run)["attempt"] == 2, "the next attempt", 60.0)
    wait_for(lambda: step_of(cluster, "server2", run) > 0, "steps of it")
    assert step_of(cluster, "server2", run) >= 40, "it went on from a checkpoint"
    assert ends_on(cluster, "server1", run)["attempt"] == 1, "what was cut off ended by itself"
    cluster.heal("server1")
    told = ringctl("status", run).stdout
    assert "attempt 2, 1 rank; without server1, where an earlier attempt was" in told
    assert f"watched by its launch, process {process.pid}" in told
    process.terminate()
    out, _ = process.communicate(timeout=30)
    assert "going on with 1 of 2 ranks, without server1" in out
    ringctl("stop", run)
    ringctl("restart", run, "--grow", "--detach")
    wait_for(lambda: step_of(cluster, "server1", run) > 0, "steps with all hosts")
    status = json.loads(ringctl("status", run, "--json").stdout)
    assert (status["world"], status["attempt"]) == (2, 3)
    ringctl("stop", run, "--grace", "0")


def test_a_run_is_not_ended_for_a_host_that_could_not_have_its_code(cluster: Hosts) -> None:
    inventory(cluster, only=TWO)
    run = detached("--world", "1", *program())["run"]
    Path("steps.py").write_text("changed")
    said = ringctl("restart", run, "--world", "2", "--detach", code=4).stderr
    assert (
        "server2: it has not had the run's code, and what is here has changed since; attempt 1 is as" in said
    )
    assert host_state(cluster, "server1", run)["state"] == "running"
    ringctl("stop", run, "--grace", "0")


def test_what_a_host_said_while_it_was_cut_off_is_shown_by_the_launch_once_it_is_back(cluster: Hosts) -> None:
    inventory(cluster, only=TWO)
    Path("steps.py").write_text(LAST_WORDS + STEPS)
    launch = start(
        "launch", "--json", "--max-restarts", "9", "--restart-delay", "0.1", "--", "python3", "steps.py"
    )
    run = json.loads(launch.stdout.readline())["run"]  # type: ignore[union-attr]  # a pipe
    wait_for(lambda: step_of(cluster, "server2", run) > 3, "steps")
    cluster.cut("server2")
    still = [cluster.path(host, "/home/train/stand-still") for host in TWO]
    for path in still:
        path.touch()
    for host in TWO:
        assert ends_on(cluster, host, run)["attempt"] == 1
    for path in still:
        path.unlink()
    wait_for(lambda: (watch := watching.read(run)) and watch.failures, "that the launch goes on", 60)
    hosts.mend(cluster)
    wait_for(
        lambda: host_state(cluster, "server2", run)["attempt"] > 1 and step_of(cluster, "server2", run) > 1,
        "it",
        60,
    )
    ringctl("stop", run, "--grace", "0")
    shown = [json.loads(line) for line in launch.communicate(timeout=60)[0].splitlines()]
    said = [(event["host"], event["attempt"]) for event in shown if event.get("text") == "last words"]
    assert sorted(pair for pair in said if pair[1] == 1) == [("server1", 1), ("server2", 1)]


def test_ranks_that_need_nobody_are_ended_once_their_host_is_back_if_the_run_went_on_without_it(
    cluster: Hosts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Their steps go on, so their lease does not end them; only the watcher knows of the next attempt. Who
    follows the log sees all of them all the same."""
    monkeypatch.setenv("RINGCTL_LEASE", "60")
    inventory(cluster, only=TWO)
    run = detached("--max-restarts", "2", "--min-world", "1", "--restart-delay", "0.1", *program())["run"]
    wait_for(lambda: min(step_of(cluster, host, run) for host in TWO) > 0, "steps of both")
    seen = tmp_path / "seen"
    with seen.open("wb") as out:
        follower = subprocess.Popen([*RINGCTL, "logs", run, "--follow", "--json"], stdout=out)
    wait_for(lambda: '"server2"' in seen.read_text(), "the log to be followed")
    cluster.cut("server2")
    cluster.run("server1", "kill", "-KILL", str(host_state(cluster, "server1", run)["ranks"][0]["pid"]))
    wait_for(lambda: host_state(cluster, "server1", run)["attempt"] == 2, "the next attempt", 60.0)
    before = step_of(cluster, "server2", run)
    wait_for(lambda: step_of(cluster, "server2", run) > before, "steps of the host that is cut off")
    cluster.heal("server2")
    assert ends_on(cluster, "server2", run)["attempt"] == 1
    assert host_state(cluster, "server1", run)["state"] == "running"
    ringctl("stop", run, "--grace", "0")
    assert follower.wait(timeout=60) == 0
    told = cluster.path("server2", f"{OURS}/runs/{run}/events-1-000001.jsonl").read_text().splitlines()
    shown = [json.loads(line) for line in seen.read_text().splitlines()]
    assert [e["kind"] for e in shown if e["host"] == "server2"] == [json.loads(e)["kind"] for e in told]


def watched_without_server2(cluster: Hosts) -> tuple[str, Path]:
    """A run that may go on with one host of two, and its watcher's log: one rank has just failed, and server2
    has no sshd."""
    inventory(cluster, only=TWO)
    run = detached("--max-restarts", "2", "--min-world", "1", "--restart-delay", "0.1", *program())["run"]
    wait_for(lambda: min(step_of(cluster, host, run) for host in TWO) > 0, "steps of both")
    cluster.stop_sshd("server2")
    cluster.end_sessions("server2")
    log = watching.folder() / f"{run}.log"
    wait_for(lambda: "server2" in log.read_text(), "the watcher to miss it")
    cluster.run("server1", "kill", "-KILL", str(host_state(cluster, "server1", run)["ranks"][0]["pid"]))
    wait_for(lambda: "attempt 2 begins" in log.read_text(), "the failure to be seen")
    return run, log


def goes_on_with_both(cluster: Hosts, run: str, log: Path) -> None:
    wait_for(lambda: host_state(cluster, "server2", run)["attempt"] == 2, "it on both hosts", 40.0)
    assert "going on with" not in log.read_text()
    ringctl("stop", run, "--grace", "0")


def test_a_host_whose_sshd_is_away_for_a_moment_is_not_left_out(cluster: Hosts) -> None:
    run, log = watched_without_server2(cluster)
    cluster.start_sshd("server2")
    goes_on_with_both(cluster, run, log)


def test_a_controller_that_falls_asleep_does_not_leave_out_who_came_back_meanwhile(cluster: Hosts) -> None:
    run, log = watched_without_server2(cluster)
    watcher = wait_for(
        lambda: (known := watching.read(run)) and known.doing == "starting attempt 2" and known.pid,
        "the next attempt",
    )
    time.sleep(0.3)  # it has begun to ask
    os.kill(watcher, signal.SIGSTOP)
    cluster.start_sshd("server2")
    time.sleep(leftovers.STAYS_S + leftovers.ONCE_MORE_S + 1.0)  # longer than it would wait for a host
    os.kill(watcher, signal.SIGCONT)
    goes_on_with_both(cluster, run, log)


def test_what_ranks_said_in_an_attempt_that_did_not_start_everywhere_is_shown_as_well(cluster: Hosts) -> None:
    inventory(cluster, only=TWO)
    told = 'echo "attempt $RINGCTL_ATTEMPT"; [ $RINGCTL_ATTEMPT = 3 ] || sleep 600'
    again = ("--max-restarts", "2", "--restart-delay", "0")
    launching = start("launch", "--json", *again, "--", "sh", "-c", told)
    wait_for(lambda: list(cluster.path("server2", f"{OURS}/runs").glob("*/state.json")), "the run")
    folder = next(cluster.path("server2", f"{OURS}/runs").iterdir())
    run = folder.name
    wait_for(lambda: all(host_state(cluster, host, run)["state"] == "running" for host in TWO), "ranks")
    lock = os.open(folder / "start.lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)  # it is slow to start, and then cannot
    cluster.run("server1", "kill", "-9", str(host_state(cluster, "server1", run)["ranks"][0]["pid"]))
    log = cluster.path("server1", f"{OURS}/runs/{run}/events-2-000001.jsonl")
    wait_for(lambda: log.exists() and "attempt 2" in log.read_text(), "the second attempt on one host")
    plan = folder / "plan.json"
    plan.unlink()
    plan.mkdir()
    os.close(lock)
    wait_for(lambda: host_state(cluster, "server1", run)["state"] == "failed", "its end")
    plan.rmdir()
    out, err = launching.communicate(timeout=60)
    assert launching.returncode == 0, err
    seen = [json.loads(line) for line in out.splitlines()]
    lines = sorted((e["attempt"], e["rank"]) for e in seen if e["kind"] == "line")
    assert lines == [(1, 0), (1, 1), (2, 0), (3, 0), (3, 1)], err


def test_who_follows_while_the_next_attempt_starts_on_fewer_hosts_sees_all_of_the_one_before(
    cluster: Hosts,
) -> None:
    inventory(cluster, only=THREE)
    run = detached("--", "sh", "-c", 'echo "attempt $RINGCTL_ATTEMPT"; exit 3')["run"]
    for host in THREE:
        ends_on(cluster, host, run)
    locks = [os.open(cluster.path(h, f"{OURS}/runs/{run}/start.lock"), os.O_RDWR) for h in TWO]
    for lock in locks:
        fcntl.flock(lock, fcntl.LOCK_EX)  # they are slow to start
    restarting = start("restart", run, "--world", "2", "--detach")
    wait_for(lambda: (record := history.read(run)) and record.plan.attempt == 2, "the second attempt")
    seen = ringctl("logs", run, "--follow", "--json", code=None).stdout.splitlines()
    for lock in locks:
        os.close(lock)
    restarting.communicate(timeout=60)
    events = [json.loads(line) for line in seen]
    ranks = sorted(e["rank"] for e in events if e["kind"] == "line" and e["attempt"] == 1)
    assert ranks == [0, 1, 2]
