"""Hosts that come and go: leases, attempts without a host and with it again, and none that goes on alone."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from launcher import history, leftovers, watching
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


def ends_on(cluster: Hosts, host: str, run: str) -> Any:
    return wait_for(
        lambda: (
            host_state(cluster, host, run)["state"] in ("failed", "stopped", "succeeded")
            and host_state(cluster, host, run)
        ),
        f"the end of the run on {host}",
        40.0,
    )


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


def test_what_was_stopped_from_elsewhere_while_disks_were_full_is_not_started_again(
    cluster: Hosts, tmp_path: Path
) -> None:
    path = inventory(cluster, only=TWO)
    options = ["--max-restarts", "1", "--restart-delay", "12"]
    about = detached(*options, "--", "sh", "-c", "[ $RINGCTL_ATTEMPT = 2 ] && sleep 600; exit 3")
    for host in TWO:
        assert ends_on(cluster, host, about["run"])["state"] == "failed"
    for host in TWO:
        cluster.fill_disk(host)
    elsewhere = {**os.environ, "RINGCTL_HOME": str(tmp_path / "elsewhere")}
    for _ in range(2):  # once more needs no room
        ringctl("stop", about["run"], "--hosts", str(path), env=elsewhere)
    for host in TWO:
        cluster.free_disk(host)
    wait_for(lambda: not is_alive(about["watcher"]), "the end of the watcher", 60.0)
    assert [host_state(cluster, host, about["run"])["attempt"] for host in TWO] == [1, 1]


def test_a_host_that_a_restart_does_without_may_have_a_full_disk(cluster: Hosts) -> None:
    inventory(cluster, only=TWO)
    ringctl("launch", "--", "false", code=1)
    run = history.recall()[-1].plan.run
    cluster.fill_disk("server2")
    said = ringctl("restart", run, code=1).stderr
    assert "No space left on device; nothing was touched" in said
    ringctl("restart", run, "--world", "1", code=1)
    assert [host_state(cluster, host, run)["attempt"] for host in TWO] == [2, 1]
    cluster.free_disk("server2")


def test_the_log_of_the_attempt_before_is_whole_also_when_it_was_on_other_hosts(cluster: Hosts) -> None:
    inventory(cluster, only=THREE)
    run = detached("--", "sh", "-c", "echo attempt $RINGCTL_ATTEMPT; sleep 1000")["run"]
    for world in ("2", "3"):
        wait_for(lambda: "attempt" in ringctl("logs", run).stdout, "lines")
        ringctl("restart", run, "--world", world, "--detach")
        said = sorted(ringctl("logs", run, "--previous", "--no-prefix").stdout.split("\n")[:-1])
        assert said == (["attempt 1"] * 3 if world == "2" else ["attempt 2"] * 2)
    ringctl("stop", run, "--grace", "0")


def test_tries_that_never_began_do_not_keep_the_run_from_starting_once_its_hosts_are_back(
    cluster: Hosts,
) -> None:
    inventory(cluster, only=TWO)
    fails = "while [ ! -e /home/train/go ]; do sleep 0.1; done; exit 3"
    about = detached("--max-restarts", "3", "--restart-delay", "0.1", "--", "sh", "-c", fails)
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
    cluster: Hosts, tmp_path: Path
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
    with (tmp_path / "seen").open("w") as seen:
        following = subprocess.Popen([*RINGCTL, "logs", run, "--follow", "--json"], stdout=seen)

    def ranks_seen() -> list[int]:
        whole = [line for line in (tmp_path / "seen").read_text().splitlines(True) if line.endswith("\n")]
        events = [json.loads(line) for line in whole]
        return sorted(e["rank"] for e in events if e["kind"] == "line" and e["attempt"] == 1)

    wait_for(lambda: ranks_seen() == [0, 1, 2], "all that the first attempt said")
    for lock in locks:
        os.close(lock)
    restarting.communicate(timeout=60)
    following.wait(60)
    assert ranks_seen() == [0, 1, 2], "once"
