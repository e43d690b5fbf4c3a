"""Launching on hosts: all start or none does, and the ring is the one that this machine alone would train."""

from __future__ import annotations

import ipaddress
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher import history, render, run, runs
from launcher.agent import Agent, Conversation
from launcher.ask import Asked
from launcher.errors import HostError, RingctlError
from launcher.inventory import load
from launcher.model import Facts, Host, Plan
from launcher.plan import LaunchOptions
from launcher.preflight import survey
from launcher.transport import Pool
from launcher.watch import Interrupts
from tests.cluster import Cluster
from tests.conftest import eventually
from tests.launcher import hosts
from tests.launcher.conftest import become_controller
from tests.launcher.hosts import HOME, OURS, Hosts, agents, dot_ssh, inventory
from tests.launcher.ringctl import RINGCTL, lines, ringctl, wait_for

TRAIN = ("--", "--steps", "12", "--threads", "1", "--seed", "3")
LISTEN = """
import socket, sys
server = socket.create_server(("", 0))
print(server.getsockname()[1], flush=True)
sys.stdin.read()
"""


def launch(*args: str, code: int = 0) -> list[Any]:
    """Launch, attached, and return the events."""
    return [json.loads(line) for line in ringctl("launch", "--json", *args, code=code).stdout.splitlines()]


def printed(events: list[Any], world: int) -> list[list[str]]:
    return [lines(events, rank) for rank in range(world)]


def logins(cluster: Cluster) -> int:
    logs = [cluster.path(host, "/var/log/sshd.log").read_text() for host in cluster.names]
    return sum(log.count("Accepted publickey") for log in logs)


# --- The ring ------------------------------------------------------------------------------------


def test_from_bare_hosts_to_the_same_bits_as_on_this_machine(bare: Cluster) -> None:
    """Nothing is there but sshd and a Python with torch, nobody is root, interfaces have different names."""
    (dot_ssh() / "known_hosts").unlink()
    ringctl("trust", "--yes")
    assert not any(bare.path(host, OURS).exists() for host in bare.names)
    plan = json.loads(ringctl("launch", "--dry-run", "--json", "--world", "4", *TRAIN).stdout)
    interfaces = [host["ranks"][0]["env"]["GLOO_SOCKET_IFNAME"] for host in plan["hosts"]]
    assert interfaces == [bare.ifname(host) for host in bare.names]
    assert len(set(interfaces)) == 4
    on_hosts = launch("--world", "3", *TRAIN)[-1]  # from three on a ring has two neighbours
    here = launch("--local", "--world", "3", *TRAIN)[-1]
    assert on_hosts["state"] == here["state"] == "succeeded"
    assert on_hosts["parameters_sha256"] == here["parameters_sha256"]
    assert on_hosts["accuracy"] == here["accuracy"]
    assert bare.path("server2", OURS).stat().st_mode & 0o777 == 0o700


@pytest.fixture
def confusing(
    clean: None,  # noqa: ARG001 - sets the environment that this adds to
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Cluster]:
    """Two hosts with a docker0 each, that both call themselves 127.0.1.1."""
    with hosts.Hosts(2, folder=tmp_path / "cluster", decoy=True, own_name_loopback=True) as cluster:
        become_controller(cluster, tmp_path, monkeypatch)
        yield cluster
        assert eventually(lambda: not hosts.left_on(cluster)), hosts.left_on(cluster)


def test_decoy_interfaces_and_names_that_mean_loopback_do_not_matter(confusing: Cluster) -> None:
    both = hosts.sh("server1", "ip -4 -o addr show docker0; getent hosts server1")
    assert "172.17.0.1" in both
    assert "127.0.1.1" in both
    inventory(
        confusing, defaults={"identity_file": None}, server1={"address": None}, server2={"address": None}
    )
    assert launch("--skip-preflight", "--", "--steps", "3", "--threads", "1")[-1]["state"] == "succeeded"


# --- The user's own command ----------------------------------------------------------------------


def test_the_folder_the_user_is_in_goes_along_and_what_ranks_write_stays_with_the_run(
    cluster: Cluster,
) -> None:
    Path("train.py").write_text(
        "import os, pathlib, sys, mylib\n"
        "assert sys.prefix == '/opt/ring', sys.prefix\n"
        "pathlib.Path('result.txt').write_text(os.environ['RANK'])\n"
        "print(mylib.greeting, sys.argv[1:], os.environ['MASTER_ADDR'])\n"
    )
    Path("mylib.py").write_text("greeting = 'hello'\n")
    events = launch("--", "python", "train.py", "a b")
    address = cluster.address("server1")
    assert ipaddress.ip_address(address)
    assert printed(events, 4) == [[f"hello ['a b'] {address}"]] * 4
    run_id = events[-1]["run"]
    for rank, host in enumerate(cluster.names):
        plan = json.loads(cluster.path(host, f"{OURS}/runs/{run_id}/plan.json").read_text())
        assert cluster.path(host, f"{OURS}/runs/{run_id}/work/result.txt").read_text() == str(rank)
        assert not cluster.path(host, f"{OURS}/code/{plan['code']}/result.txt").exists()
    assert not Path("result.txt").exists()


def test_a_workdir_is_where_ranks_run_and_pushed_files_are_still_found(cluster: Cluster) -> None:
    Path("train.py").write_text("import os\nprint(os.getcwd())\n")
    inventory(cluster, only=("server1", "server2"), defaults={"workdir": "~/data"})
    for host in ("server1", "server2"):
        cluster.run(host, "mkdir", "data")
    assert printed(launch("--", "python", "train.py"), 2) == [[f"{HOME}/data"]] * 2


# --- Which hosts ---------------------------------------------------------------------------------

WHERE = ("--", "sh", "-c", "echo $RANK $LOCAL_RANK $WORLD_SIZE $RINGCTL_HOST")


def test_hosts_can_be_listed_in_a_file_of_mpi_or_chosen_from_the_inventory(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert printed(launch("--include", "server2,server4,server3", "--exclude", "server3", *WHERE), 2) == [
        ["0 0 2 server2"],
        ["1 0 2 server4"],
    ]
    assert printed(launch("--world", "3", "--exclude", "server1", *WHERE), 3) == [
        ["0 0 3 server2"],
        ["1 0 3 server3"],
        ["2 0 3 server4"],
    ]
    monkeypatch.delenv("RINGCTL_HOSTS")
    assert printed(launch("-H", "server3:2,train@server1", *WHERE), 3) == [
        ["0 0 3 server3"],
        ["1 1 3 server3"],
        ["2 0 3 server1"],
    ]
    Path("hostfile").write_text("# mine\nserver4 slots=2\nserver2:1\n")
    assert printed(launch("--hostfile", "hostfile", *WHERE), 3)[2] == ["2 0 3 server2"]
    assert len(cluster.names) == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--world", "5"), "--world 5 is more than the 4 slots of"),
        (("-H", "server1,server2", "--world", "3"), "--world 3 is more than the 2 slots of -H"),
        (("--include", "server9"), "'server9' is not a host of"),
        (("-H", "server1", "--hostfile", "x"), "--hosts, -H and --hostfile exclude each other"),
    ],
)
def test_what_cannot_work_is_said_before_anybody_is_connected_to(
    cluster: Cluster, options: tuple[str, ...], words: str
) -> None:
    before = logins(cluster)
    assert words in ringctl("launch", *options, "--", "true", code=2).stderr
    assert logins(cluster) == before


# --- All or none ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words", "code"),
    [
        ({"env": {"python": "/no/such/python"}}, "server3: there is no Python at /no/such/python", 3),
        ({"workdir": "/no/such/folder"}, "server3: there is no folder /no/such/folder", 3),
        ({"python": "/no/such/python"}, "server3: ringctl's preflight/probe.py did not run there", 4),
    ],
    ids=["environment", "folder", "supervisor"],
)
def test_if_one_host_cannot_start_none_does(
    cluster: Cluster, change: dict[str, Any], words: str, code: int
) -> None:
    inventory(cluster, server3=change)
    done = ringctl("launch", "--", "sleep", "1000", code=code)
    assert f"error: {words}" in done.stderr
    assert "Traceback" not in done.stderr
    assert eventually(lambda: not hosts.left_on(cluster)), hosts.left_on(cluster)
    remembered = json.loads(ringctl("runs", "list", "--json").stdout)
    assert {row["state"] for row in remembered} <= {"failed"}, "no host can tell that it is over"


def test_a_host_that_is_away_keeps_all_others_from_starting(cluster: Cluster) -> None:
    cluster.reset_port("server4", 22)
    assert "server4: connection refused" in ringctl("launch", "--", "sleep", "1000", code=4).stderr
    assert not any(cluster.path(host, f"{OURS}/runs").exists() for host in cluster.names)


def launch_here(options: LaunchOptions, pool: Pool) -> tuple[Plan, dict[str, Agent]]:
    """In this process, on the hosts of the inventory, with nothing to push."""
    asked = Asked(load(Path(os.environ["RINGCTL_HOSTS"])), options, None)
    return run.launch(asked, pool, render.JsonScreen(), Interrupts())


def test_a_host_that_is_lost_while_it_starts_is_not_said_to_be_clean(
    cluster: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Conversation.last

    def lose(conversation: Conversation, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        if conversation.host.name == "server3":
            cluster.reset_port("server3", 22)
        return before(conversation, request, seconds)

    monkeypatch.setattr(Conversation, "last", lose)
    pool = Pool(no_input=True)
    inventory(cluster, only=("server2", "server3"))
    options = LaunchOptions(run=history.new_run_id(), name="", command=("sleep", "1000"), trainer="")
    with pytest.raises(HostError) as lost:
        launch_here(options, pool)
    pool.close()
    assert lost.value.message.endswith("server3 could not be asked to stop what may have started")
    assert f"ringctl stop {options.run}" in lost.value.fix


def test_a_rank_that_fails_ends_the_run_on_all_hosts_and_is_named_first(cluster: Cluster) -> None:
    script = 'if [ "$RANK" = 2 ]; then echo "no luck" >&2; exit 5; fi; sleep 1000'
    done = ringctl("launch", "--", "sh", "-c", script, code=1)
    assert "failed first: rank 2 on server3 exited with code 5: no luck" in done.stdout
    assert eventually(lambda: not hosts.left_on(cluster)), hosts.left_on(cluster)


def launch_until_up(folder: Path, world: int) -> tuple[subprocess.Popen[bytes], Path]:
    """An attached launch whose ranks have all been heard of, and the file that it shows them in."""
    shown = folder / "shown"
    with shown.open("wb") as out:
        process = subprocess.Popen([*RINGCTL, "launch", "--", "sh", "-c", "echo up; sleep 1000"], stdout=out)
    wait_for(lambda: shown.read_text().count("] up\n") == world, "a word of every rank")
    return process, shown


def test_ctrl_c_ends_the_run_everywhere(cluster: Cluster, tmp_path: Path) -> None:
    process, _ = launch_until_up(tmp_path, 4)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert eventually(lambda: not hosts.left_on(cluster)), hosts.left_on(cluster)


def test_ctrl_c_is_obeyed_also_when_a_host_has_gone_for_good(cluster: Hosts, tmp_path: Path) -> None:
    inventory(cluster, only=("server1", "server2"))
    ringctl("launch", "--", "true")
    assert eventually(lambda: not hosts.left_on(cluster)), "they wait for each other"
    process, shown = launch_until_up(tmp_path, 2)
    cluster.kill_host("server2")
    try:
        wait_for(lambda: "ringctl: server2: " in shown.read_text(), "word that it is away")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert "server2 cannot be reached; once that changes: ringctl stop" in shown.read_text()
        assert eventually(lambda: not hosts.left_on(cluster)), hosts.left_on(cluster)
        assert_told_like(shown.read_text(), code=4)
    finally:
        cluster.boot("server2")
    assert_told_like(shown.read_text(), code=0)
    ringctl("stop")
    assert [run["state"] for run in json.loads(ringctl("ps", "--json").stdout)] == ["succeeded", "stopped"]


def assert_told_like(shown: str, code: int) -> None:
    """Whether the host that was lost is off or back, all commands say what the launch said."""
    (said,) = [line for line in shown.splitlines() if line.startswith("failed first: server2: ")]
    assert ringctl("explain").stdout.splitlines()[0] == said
    assert [run["state"] for run in json.loads(ringctl("ps", "--json").stdout)] == ["succeeded", "lost"]
    told = json.loads(ringctl("status", "--json", code=code).stdout)
    ranks = [(rank["host"], rank["state"]) for rank in told["ranks"]]
    assert (told["state"], ranks) == ("lost", [("server1", "stopped"), ("server2", "unknown")])


def test_restart_goes_on_with_the_same_hosts_and_code_as_the_next_attempt(cluster: Cluster) -> None:
    Path("train.sh").write_text("echo $RINGCTL_ATTEMPT on $RINGCTL_HOST\n")
    inventory(cluster, only=("server2", "server3"))
    events = launch("--", "sh", "train.sh")
    Path("train.sh").write_text("echo changed\n")
    again = ringctl("restart", events[-1]["run"], "--json").stdout
    assert printed([json.loads(line) for line in again.splitlines()], 2) == [
        ["2 on server2"],
        ["2 on server3"],
    ]


# --- The master port -----------------------------------------------------------------------------


@pytest.fixture
def taken(cluster: Cluster) -> Iterator[int]:
    """A port of server1 that somebody listens on."""
    process = cluster.spawn("server1", "python3", "-c", LISTEN)
    assert process.stdin is not None
    assert process.stdout is not None
    yield int(process.stdout.readline())
    process.communicate()


def test_a_port_that_is_taken_in_between_is_replaced(
    cluster: Cluster, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, facts = [], survey.facts_from

    def facts_then_a_thief(host: Host, *rest: Any) -> Facts:
        found = facts(host, *rest)
        asked.append(host.name)
        return replace(found, free_port=taken) if asked.count(host.name) == 1 else found

    monkeypatch.setattr(survey, "facts_from", facts_then_a_thief)
    pool = Pool(no_input=True)
    options = LaunchOptions(run=history.new_run_id(), name="", command=("sleep", "1000"), trainer="")
    plan, found = launch_here(options, pool)
    try:
        assert plan.master_port != taken
        assert asked.count("server1") == 2
        running = [state for state in found["server1"].runs()["runs"] if state["state"] == "running"]
        assert [state["run"] for state in running] == [plan.run]
    finally:
        runs.stop(found, plan.run, 0.0)
        pool.close()
    assert cluster.listening_ports("server1") == {22, taken}


def test_a_port_that_the_user_fixed_is_not_replaced(cluster: Cluster, taken: int) -> None:
    done = ringctl("launch", "--master-port", str(taken), "--", "sleep", "1000", code=3)
    assert f"server1: port {taken} is taken by pid" in done.stderr
    done = ringctl("launch", "--skip-preflight", "--master-port", str(taken), "--", "sleep", "1000", code=1)
    assert f"server1: the master port is taken: {taken}" in done.stderr
    assert not [host for host in cluster.names[1:] if hosts.left_on(cluster).get(host)]


def test_two_runs_of_one_name_cannot_start_in_one_folder(cluster: Cluster) -> None:
    inventory(cluster, only=("server1",))
    ringctl("launch", "--", "true")
    run_id = json.loads(ringctl("ps", "--json").stdout)[-1]["run"]
    plan = json.loads(cluster.path("server1", f"{OURS}/runs/{run_id}/plan.json").read_text())
    with agents() as found, pytest.raises(RingctlError, match=r"there is a run .* on this host already"):
        found["server1"].start({**plan, "token": "of another start"})
