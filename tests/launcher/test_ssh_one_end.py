"""However a run came to be half started, stopped by two or left behind, it has one end, the same for all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from launcher import history, leftovers
from tests.launcher import hosts
from tests.launcher.hosts import OURS, Hosts, inventory
from tests.launcher.ringctl import is_alive, ringctl, start, wait_for
from tests.launcher.test_ssh_restarts import (
    THREE,
    TWO,
    detached,
    ends_on,
    host_state,
    impatience,
    program,
    step_of,
)  # fmt: skip

__all__ = ["impatience"]  # a fixture of all tests here, too

# ringctl, with something that happens when $AT is asked to start the run, or when all is prepared.
INSTEAD = """
import os, pathlib, signal, time
from launcher import agent, run
def happens(name):
    if name in os.environ["AT"].split(","):
        exec(os.environ["THEN"])
for kind, method in ((agent.Conversation, "last"), (agent.Agent, "start")):
    def begin(self, request, *rest, real=getattr(kind, method)):
        happens(self.host.name)
        return real(self, request, *rest)
    setattr(kind, method, begin)
def prepare(*args, real=run.prepare, **options):
    done = real(*args, **options)
    happens("prepared")
    return done
run.prepare = prepare
from launcher.__main__ import main
main()
"""
ENDS_IN_ATTEMPT_2 = """
import itertools, json, os, time
metrics = open(os.environ["RINGCTL_METRICS"], "a", buffering=1)
for step in itertools.count(1):
    if os.environ["RINGCTL_ATTEMPT"] == "2" and step > 40:
        break
    print(json.dumps({"step": step}), file=metrics)
    time.sleep(0.05)
"""
KILLED = "time.sleep(1); os.kill(os.getpid(), signal.SIGKILL)"


def instead(*args: str, at: str, then: str) -> subprocess.Popen[str]:
    env = {**os.environ, "AT": at, "THEN": then}
    return subprocess.Popen(
        [sys.executable, "-c", INSTEAD, *args],
        env=env, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def killed(*args: str, at: str) -> str:
    """The run whose start was cut short."""
    with instead(*args, at=at, then=KILLED) as process:
        process.communicate(timeout=90)
    assert process.returncode == -signal.SIGKILL
    return history.recall()[-1].plan.run


def said_of(run: str) -> set[str]:
    """Its state, by all who tell it."""
    by = {}
    for words in (["ps"], ["runs", "list"]):
        rows = json.loads(ringctl(*words, "--json").stdout)
        by[words[0]] = {row["run"]: row["state"] for row in rows}[run]
    by["status"] = json.loads(ringctl("status", run, "--json").stdout)["state"]
    return {*by.values(), history.state_of(run)}


@pytest.mark.parametrize(
    ("code", "at", "end"),
    [(0, "server2", "stopped"), (3, "server2", "failed"), (0, "server1,server2", "stopped")],
)
def test_what_a_killed_launch_has_half_started_has_one_end_once_it_is_stopped(
    cluster: Hosts, code: int, at: str, end: str
) -> None:
    inventory(cluster, only=TWO)
    run = killed("launch", "--detach", "--", "sh", "-c", f"exit {code}", at=at)
    if at == "server2":
        ends_on(cluster, "server1", run)
    ringctl("stop", run)
    assert said_of(run) == {end}
    assert run in ringctl("runs", "prune", "--keep", "0", "--dry-run").stdout


def test_an_attempt_that_was_killed_before_it_was_anywhere_is_stopped_like_any_other(cluster: Hosts) -> None:
    inventory(cluster, only=TWO)
    ringctl("launch", "--", "true")
    run = killed("restart", history.recall()[-1].plan.run, "--detach", at="server1,server2")
    ringctl("stop", run)
    assert said_of(run) == {"stopped"}


def test_who_follows_a_run_hears_of_the_same_end_though_a_host_never_started_it(cluster: Hosts) -> None:
    inventory(cluster, only=TWO)
    run = detached("--", "sh", "-c", "echo $RINGCTL_ATTEMPT; sleep 600")["run"]
    follower = start("logs", run, "--follow", "--json")
    killed("restart", run, "--detach", at="server2")
    ringctl("stop", run, "--grace", "0")
    words, _ = follower.communicate(timeout=90)
    for shown in (words, ringctl("logs", run, "--json").stdout):
        last = json.loads([line for line in shown.splitlines() if line.startswith("{")][-1])
        assert (last["kind"], last["attempt"], last.get("state")) == ("run_finished", 2, "stopped")
    assert follower.returncode == 0, words


def test_a_run_is_left_alone_while_it_is_its_watcher_who_can_reach_nobody(
    cluster: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGCTL_LEASE", "2")
    inventory(cluster, only=TWO)
    script = "[ $RANK = 0 ] || until [ -e go ]; do sleep 0.1; done"
    about = detached("--max-restarts", "1", "--min-world", "1", "--", "sh", "-c", f"cd; {script}")
    ends_on(cluster, "server1", about["run"])
    for host in TWO:
        cluster.stop_sshd(host)
        cluster.end_sessions(host)
    time.sleep(20.0)  # more than six leases, and the time in which hosts are asked
    for host in TWO:
        cluster.start_sshd(host)
    hosts.write_home(cluster, "server2", "go", "")
    wait_for(lambda: not is_alive(about["watcher"]), "the end of the watcher", 60.0)
    assert said_of(about["run"]) == {"succeeded"}
    assert host_state(cluster, "server2", about["run"])["attempt"] == 1


def test_a_run_goes_on_without_a_host_that_has_its_last_ranks_and_is_lost(
    cluster: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGCTL_LEASE", "2")
    inventory(cluster, only=TWO)
    script = "[ $RINGCTL_ATTEMPT$RANK != 11 ] || sleep 600"
    run = detached("--max-restarts", "1", "--min-world", "1", "--", "sh", "-c", script)["run"]
    ends_on(cluster, "server1", run)
    cluster.cut("server2")
    wait_for(lambda: host_state(cluster, "server1", run)["attempt"] == 2, "the next attempt", 60.0)
    assert "without server2" in ringctl("status", run).stdout
    hosts.mend(cluster)
    ringctl("stop", run, "--grace", "0")
    assert ends_on(cluster, "server2", run)["attempt"] == 1


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_stop_while_a_restart_is_prepared_is_not_undone(
    cluster: Hosts, tmp_path: Path, elsewhere: bool
) -> None:
    path = inventory(cluster, only=TWO)
    ringctl("launch", "--", "false", code=1)
    run, ready = history.recall()[-1].plan.run, tmp_path / "ready"
    there = {**os.environ, "RINGCTL_HOME": str(tmp_path / "elsewhere")}
    then = f"pathlib.Path({str(ready)!r}).touch(); time.sleep(6)"
    with instead("restart", run, "--detach", at="prepared", then=then) as restart:
        wait_for(ready.exists, "the preparation", 60.0)
        ringctl("stop", run, *(("--hosts", str(path)) if elsewhere else ()), env=there if elsewhere else None)
        _, errors = restart.communicate(timeout=60)
    assert (restart.returncode, [host_state(cluster, host, run)["attempt"] for host in TWO]) == (130, [1, 1])
    assert ("it was stopped while it was starting" if elsewhere else "somebody has stopped") in errors
    assert said_of(run) <= {"stopped", "failed"}
    ringctl("restart", run, code=1)


def test_a_stop_from_elsewhere_while_a_restart_ends_the_run_is_not_undone(
    cluster: Hosts, tmp_path: Path
) -> None:
    path = inventory(cluster, only=TWO)
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    run = detached("--", "python3", "-c", stubborn)["run"]
    restart = start("restart", run, "--detach")
    words = [cluster.path(host, f"{OURS}/runs/{run}/stop.json") for host in TWO]
    wait_for(lambda: all(word.exists() for word in words), "its own stop", 30.0)
    elsewhere = {**os.environ, "RINGCTL_HOME": str(tmp_path / "elsewhere")}
    ringctl("stop", run, "--hosts", str(path), "--grace", "0", env=elsewhere)
    _, errors = restart.communicate(timeout=90)
    assert (restart.returncode, said_of(run)) == (130, {"stopped"}), errors
    ringctl("restart", run, "--detach")
    assert said_of(run) == {"running"}
    ringctl("stop", run, "--grace", "0")


def test_a_stop_from_elsewhere_reaches_a_host_that_is_only_about_to_start_it(
    cluster: Hosts, tmp_path: Path
) -> None:
    path = inventory(cluster, only=THREE)
    run = detached("--world", "2", "--", "sleep", "600")["run"]
    ringctl("stop", run, "--grace", "0")
    with instead("restart", run, "--world", "3", "--detach", at="server3", then="time.sleep(6)") as restart:
        wait_for(
            lambda: all(
                (host_state(cluster, host, run)["attempt"], host_state(cluster, host, run)["state"])
                == (2, "running")
                for host in TWO
            ),
            "the second attempt",
            60.0,
        )
        elsewhere = {**os.environ, "RINGCTL_HOME": str(tmp_path / "elsewhere")}
        ringctl("stop", run, "--hosts", str(path), "--grace", "0", env=elsewhere, code=4)
        _, errors = restart.communicate(timeout=90)
    assert restart.returncode == 130, errors
    assert host_state(cluster, "server3", run)["state"] in ("", "stopped")
    assert said_of(run) == {"stopped"}


def test_what_a_host_that_was_cut_off_still_has_is_told_watched_for_and_ended(
    cluster: Hosts, tmp_path: Path
) -> None:
    path = inventory(cluster, only=TWO)
    run = detached(*program())["run"]

    def without_the_second_host() -> Any:
        wait_for(lambda: step_of(cluster, "server2", run) > 3, "steps")
        cluster.cut("server2")
        return json.loads(ringctl("restart", run, "--world", "1", "--detach", "--json").stdout)

    watcher = without_the_second_host()["watcher"]
    assert "server2 may still have ranks of an earlier attempt" in ringctl("status", run).stdout
    hosts.mend(cluster)
    assert ends_on(cluster, "server2", run)["attempt"] == 1
    wait_for(lambda: "may still have" not in ringctl("status", run).stdout, "that it is known")
    assert is_alive(watcher)
    ringctl("restart", run, "--grow", "--detach")
    assert not is_alive(watcher)

    without_the_second_host()
    assert "error: server2: " in ringctl("stop", run, "--grace", "0", code=4).stderr
    assert run not in ringctl("runs", "prune", "--keep", "0", "--dry-run").stdout
    hosts.mend(cluster)
    elsewhere = {**os.environ, "RINGCTL_HOME": str(tmp_path / "elsewhere")}
    known = ringctl("status", run, "--hosts", str(path), env=elsewhere).stdout
    assert "server2 may still have ranks of an earlier attempt" in known
    assert "server2: ended ranks 1" in ringctl("stop", run, "--grace", "0").stdout
    assert host_state(cluster, "server2", run)["state"] == "stopped"
    assert "server2" not in ringctl("stop", run).stdout


def test_a_restart_by_hand_ends_nothing_if_it_lacks_a_host_and_with_fewer_ranks_does_without_it(
    cluster: Hosts,
) -> None:
    inventory(cluster, only=THREE)
    run = detached("--", "sleep", "600")["run"]
    cluster.cut("server2")
    refused = ringctl("restart", run, "--detach", code=4).stderr
    assert "server2: " in refused
    assert "nothing was touched" in refused
    assert f"ringctl restart {run} --world 2" in refused
    there = [host_state(cluster, host, run) for host in ("server1", "server3")]
    assert [(state["attempt"], state["state"]) for state in there] == [(1, "running")] * 2
    ringctl("restart", run, "--world", "2", "--detach")
    there = [host_state(cluster, host, run) for host in ("server1", "server3")]
    assert [(state["attempt"], state["state"]) for state in there] == [(2, "running")] * 2
    hosts.mend(cluster)
    ringctl("stop", run, "--grace", "0")


def test_a_run_on_hosts_whose_disks_are_full_can_be_stopped(cluster: Hosts) -> None:
    inventory(cluster, only=TWO)
    run = detached(*program())["run"]
    wait_for(lambda: step_of(cluster, "server2", run) > 3, "steps")
    for host in TWO:
        cluster.fill_disk(host)
    try:
        assert ringctl("stop", run, "--grace", "1").stdout.count("nothing is left of them") == 2
        assert not hosts.left_on(cluster)
    finally:
        for host in TWO:
            cluster.free_disk(host)


def test_a_host_that_cannot_be_asked_for_a_second_is_not_gone(cluster: Hosts) -> None:
    inventory(cluster, only=TWO)
    with hosts.agents() as agents:
        cluster.stop_sshd("server2")
        back = threading.Timer(1.5, cluster.start_sshd, ["server2"])
        back.start()
        try:
            assert leftovers.end_before(agents, "20260101-000000-abcd", 1, {}, TWO) == {}
        finally:
            back.join()
        cluster.stop_sshd("server2")
        began = time.monotonic()
        try:
            away = {"server2": began - 60.0}
            assert set(leftovers.end_before(agents, "20260101-000000-abcd", 1, away, TWO)) == {"server2"}
            assert time.monotonic() - began < leftovers.STAYS_S, "who has long been gone is not waited for"
        finally:
            cluster.start_sshd("server2")


def test_a_finished_run_grows_onto_a_host_that_still_has_an_earlier_attempt(
    cluster: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGCTL_LEASE", "600")  # it does not end by itself
    inventory(cluster, only=TWO)
    Path("steps.py").write_text(ENDS_IN_ATTEMPT_2)
    run = detached("--", "python3", "steps.py")["run"]
    wait_for(lambda: step_of(cluster, "server2", run) > 3, "steps")
    cluster.cut("server2")
    ringctl("restart", run, "--world", "1", code=None)
    cluster.heal("server2")
    wait_for(lambda: "server2 may still have ranks" in ringctl("status", run, code=None).stdout, "its word")
    assert (host_state(cluster, "server2", run)["attempt"], said_of(run)) == (1, {"succeeded"})
    wait_for(lambda: "does not answer" not in ringctl("hosts", code=None).stdout, "server2 to answer")
    ringctl("restart", run, "--grow", "--detach")
    assert {host_state(cluster, host, run)["attempt"] for host in TWO} == {3}
    wait_for(lambda: said_of(run) == {"running"}, "its start")
    ringctl("stop", run, "--grace", "0")
