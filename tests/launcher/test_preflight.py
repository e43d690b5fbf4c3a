"""Each thing that is known to go wrong, put in place on real hosts: preflight finds it under its own name,
says nothing of the other hosts, and following what it says makes it pass."""

from __future__ import annotations

import contextlib
import json
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from launcher import ask
from launcher.agent import agents_for
from launcher.model import CheckResult
from launcher.plan import place
from launcher.preflight.checks import NAMES
from launcher.preflight.examine import Examined, examine
from launcher.preflight.survey import Asking
from launcher.transport import Pool
from tests.conftest import eventually
from tests.launcher import hosts
from tests.launcher.hosts import HOME, OURS, Hosts, dot_ssh, new_key, ssh_config, write_home
from tests.launcher.ringctl import ringctl, wait_for
from tests.trainer import idx

PROJECT = Path(__file__).resolve().parent.parent.parent
LISTEN = """
import socket, sys
server = socket.create_server(("", int(sys.argv[1])))
print("up", flush=True)
sys.stdin.read(1)
"""
PORT, EPHEMERAL = 23456, 40000


ALL: tuple[str, ...] = ()
TWO, THREE = ("server1", "server2"), ("server1", "server2", "server3")


def inventory(cluster: Hosts, only: tuple[str, ...] = TWO, **changes: dict[str, Any]) -> None:
    """Two hosts show as much as four, where they are not about each other, and take half the time."""
    hosts.inventory(cluster, only, **changes)


@pytest.fixture
def three(cluster: Hosts) -> Hosts:
    inventory(cluster, THREE)
    return cluster


def look(*command: str, **options: Any) -> Examined:
    """Preflight in this process, without the command line's start."""
    deep = options.pop("deep", False)
    asked = ask.run(ask.Where(), command, **options)
    pool = Pool(no_input=True)
    try:
        agents = agents_for([host for host, _ in place(asked.inventory, asked.options.world)], pool)
        return examine(asked.inventory, asked.options, agents, deep=deep)
    finally:
        pool.close()


def remarks(examined: Examined) -> list[CheckResult]:
    return [result for result in examined.results if result.status in ("warn", "fail")]


def names(examined: Examined) -> set[tuple[str, str]]:
    return {(result.name, result.host) for result in remarks(examined)}


def follow(cluster: Hosts, result: CheckResult) -> None:
    """Type what it says to type, on the host it says it of, as someone who may."""
    command = result.fix.replace("sudo ", "")
    cluster.run(result.host, "sh", "-c", command, user="root")


# --- Faults that a command on the host mends -----------------------------------------------------


def own_name_is_loopback(cluster: Hosts) -> None:
    addresses = {name: cluster.address(name) for name in cluster.names}
    cluster.write_hosts("server2", {**addresses, "server2": "127.0.1.1"})


def alias_is_missing(cluster: Hosts) -> None:
    known = {name: cluster.address(name) for name in cluster.names if name != "server3"}
    cluster.write_hosts("server2", known)


def alias_leads_elsewhere(cluster: Hosts) -> None:
    known = {name: cluster.address(name) for name in cluster.names}
    cluster.write_hosts("server2", {**known, "server3": "10.99.99.99"})


def name_means_docker(cluster: Hosts) -> None:
    script = "ip link add docker0 type bridge && ip address add 172.17.0.1/16 dev docker0"
    cluster.run("server2", "sh", "-c", script, user="root")
    known = {name: cluster.address(name) for name in cluster.names}
    cluster.write_hosts("server2", {**known, "server2": "172.17.0.1"})


def mtu_is_smaller(cluster: Hosts) -> None:
    cluster.set_mtu("server2", 1300)


def runs_belong_to_root(cluster: Hosts) -> None:
    cluster.run("server2", "mkdir", "-p", f"{OURS}/runs")
    cluster.run("server2", "sh", "-c", f"chown -R root {OURS}/runs; chmod 700 {OURS}/runs", user="root")


def all_belongs_to_root(cluster: Hosts) -> None:
    cluster.run("server2", "mkdir", "-p", OURS)
    cluster.run("server2", "sh", "-c", f"chown root {OURS}; chmod 755 {OURS}", user="root")


def shm_is_tiny(cluster: Hosts) -> None:
    cluster.resize_shm("server2", "1m")


@pytest.mark.parametrize(
    ("name", "put"),
    [
        ("loopback_name", own_name_is_loopback),
        ("alias_missing", alias_is_missing),
        ("alias_elsewhere", alias_leads_elsewhere),
        ("multihomed", name_means_docker),
        ("mtu", mtu_is_smaller),
        ("folders", runs_belong_to_root),
        ("shm", shm_is_tiny),
    ],
)
def test_what_a_command_mends_is_found_and_mended_by_the_command_it_names(
    three: Hosts, name: str, put: Callable[[Hosts], None]
) -> None:
    cluster = three
    before = cluster.path("server2", "/etc/hosts").read_text()
    put(cluster)
    try:
        found = look()
        assert names(found) == {(name, "server2")}, remarks(found)
        follow(cluster, remarks(found)[0])
        assert names(look()) == set()
    finally:
        cluster.path("server2", "/etc/hosts").write_text(before)
        cluster.set_mtu("server2", 1500)
        cluster.resize_shm("server2", "50%")
        cluster.run("server2", "ip", "link", "delete", "docker0", user="root", check=False)


# --- Faults that are mended otherwise ------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """What is put in place and taken away again, how preflight is called, and what it should say."""

    name: str
    put: Callable[[Hosts], object]
    mend: Callable[[Hosts], object]
    fix: str  # what it says contains this
    host: str = "server2"
    command: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    blocking: bool = True
    also: tuple[tuple[str, str], ...] = ()


def given(**changes: dict[str, Any]) -> Callable[[Hosts], object]:
    return lambda cluster: inventory(cluster, **changes)


def bashrc(text: str) -> Callable[[Hosts], object]:
    return lambda cluster: write_home(cluster, "server2", ".bashrc", text)


def plain_inventory(cluster: Hosts) -> None:
    inventory(cluster)


def other_packages(**requires: str) -> Callable[[Hosts], object]:
    """A Python whose packages are of other versions, as their own records say: torch="2.12.0"."""

    def put(cluster: Hosts) -> None:
        for name, (version, text) in {k: v.split(" ", 1) for k, v in requires.items()}.items():
            write_home(cluster, "server2", f"site/{name}-{version}.dist-info/METADATA", text + "\n")
        wrapper = f'#!/bin/sh\nPYTHONPATH={HOME}/site exec {cluster.python} "$@"\n'
        write_home(cluster, "server2", "python", wrapper)
        cluster.run("server2", "chmod", "+x", "python")
        inventory(cluster, server2={"env": {"python": f"{HOME}/python"}})

    return put


def conda_env(cluster: Hosts, base: str) -> None:
    """What conda makes, as far as anybody looks."""
    wrapper = f'#!/bin/sh\nexec {cluster.python} "$@"\n'
    for host in cluster.names:
        write_home(cluster, host, f"{base}/envs/fl38/bin/python", wrapper)
        write_home(cluster, host, f"{base}/envs/fl38/conda-meta/history", "")
        cluster.run(host, "chmod", "+x", f"{base}/envs/fl38/bin/python")


def conda_behind_a_guard(cluster: Hosts) -> None:
    for host in cluster.names:
        conda_env(cluster, "miniconda3" if host != "server2" else "tools/weird")
    cluster.run("server2", "rm", "-r", "miniconda3")
    guard = "case $- in *i*) ;; *) return;; esac\nexport CONDA_EXE=$HOME/tools/weird/bin/conda\n"
    write_home(cluster, "server2", ".bashrc", guard)
    inventory(cluster, defaults={"env": {"conda": "fl38"}})


def conda_is_nowhere(cluster: Hosts) -> None:
    conda_env(cluster, "miniconda3")
    cluster.run("server2", "rm", "-r", "miniconda3")
    inventory(cluster, defaults={"env": {"conda": "fl38"}})


def mnist_everywhere(cluster: Hosts, cut: int | None = None) -> None:
    for host in cluster.names:
        for name, content in idx.mnist().items():
            path = cluster.path(host, f"{HOME}/mnist/{name}")
            path.parent.mkdir(exist_ok=True)
            short = host == "server2" and "images" in name
            path.write_bytes(content[:cut] if short else content)


OLD_PYTHON = """#!/usr/bin/env python3
import sys
sys.version_info = (3, 6, 9, "final", 0)
place = sys.argv.index("-c")
code, sys.argv = sys.argv[place + 1], ["-c"] + sys.argv[place + 2:]
exec(code)
"""


def python_is_old(cluster: Hosts) -> None:
    write_home(cluster, "server2", "old", OLD_PYTHON)
    cluster.run("server2", "chmod", "+x", "old")
    inventory(cluster, server2={"python": f"{HOME}/old"})


def key_is_refused(cluster: Hosts) -> None:
    new_key(dot_ssh() / "other")
    ssh_config(f"Host {cluster.address('server2')}\n  IdentitiesOnly yes")
    inventory(cluster, server2={"identity_file": str(dot_ssh() / "other")})


def host_key_is_unknown(cluster: Hosts) -> None:
    known = dot_ssh() / "known_hosts"
    own = {"server2", cluster.address("server2")}
    kept = [line for line in known.read_text().splitlines() if not own & set(line.split()[0].split(","))]
    known.write_text("\n".join(kept) + "\n")


FAULTS = [
    Fault("ifname", given(server2={"ifname": "enps1"}), plain_inventory, "ifname: enp1s0"),
    Fault(
        "ifname",
        lambda c: (
            c.run("server2", "ip", "link", "add", "plain0", "type", "bridge", user="root"),
            inventory(c, server2={"ifname": "plain0"}),
        ),
        plain_inventory,
        "ifname: enp1s0",
    ),
    Fault("data_address", given(server2={"data_address": "10.99.99.99"}), plain_inventory, "data_address"),
    Fault(
        "firewall",
        lambda c: c.drop_port("server3", (32768, 60999), new_only=True),
        lambda c: c.clear_rules("server3"),
        "tcp",
        host="server3",
    ),
    Fault(
        "firewall",
        lambda c: c.drop_between("server2", "server3"),
        lambda c: (c.clear_rules("server2"), c.clear_rules("server3")),
        "tcp",
        also=(("firewall", "server3"),),
    ),
    Fault(
        "firewall",
        lambda c: c.drop_port("server1", PORT, new_only=True),
        lambda c: c.clear_rules("server1"),
        "tcp",
        host="server1",
        options={"master_port": PORT},
    ),
    Fault(
        "port_ephemeral",
        given(),
        lambda _: None,
        "master_port",
        host="server1",
        options={"master_port": EPHEMERAL},
        blocking=False,
    ),
    Fault(
        "env_missing",
        conda_is_nowhere,
        lambda c: conda_env(c, "miniconda3"),
        "ringctl env create --include server2",
    ),
    Fault(
        "conda_shell",
        conda_behind_a_guard,
        lambda c: inventory(
            c,
            defaults={"env": {"conda": "fl38"}},
            server2={"env": {"conda": f"{HOME}/tools/weird/envs/fl38"}},
        ),
        f"env: {{conda: {HOME}/tools/weird/envs/fl38}}",
        blocking=False,
    ),
    Fault("env_missing", given(server2={"env": {"venv": f"{HOME}/nowhere"}}), plain_inventory, "env"),
    Fault("torch", given(server2={"env": {"python": "/usr/bin/python3"}}), plain_inventory, "env"),
    Fault(
        "versions",
        other_packages(torch="2.12.0 Name: torch", torchvision="0.27.0 Requires-Dist: torch==2.12.0"),
        plain_inventory,
        "env",
    ),
    Fault(
        "torchvision",
        other_packages(torchvision="0.28.0 Requires-Dist: torch (==2.0.1)"),
        plain_inventory,
        "pip install torchvision",
    ),
    Fault("python_old", python_is_old, plain_inventory, "Python 3.8 or newer"),
    Fault("disk", lambda c: c.fill_disk("server2"), lambda c: c.free_disk("server2"), "df -h"),
    Fault("inodes", lambda c: c.use_up_inodes("server2"), lambda c: c.free_disk("server2"), "df -i"),
    Fault(
        "folders",
        all_belongs_to_root,
        lambda c: c.run("server2", "chown", "train", OURS, user="root"),
        "~/.ringctl",
    ),
    Fault(
        "nofile",
        lambda c: c.limit_open_files("server2", 64),
        lambda c: (c.stop_sshd("server2"), c.start_sshd("server2")),
        "limits.conf",
    ),
    Fault("clock", bashrc("export RINGCTL_TEST_CLOCK_S=3600\n"), bashrc(""), "timedatectl", blocking=False),
    Fault(
        "ssh_noise",
        bashrc("echo welcome to server2\n"),
        bashrc("case $- in *i*) ;; *) return;; esac\necho welcome to server2\n"),
        "case $-",
        blocking=False,
    ),
    Fault("stale_env", bashrc("export TORCHELASTIC_RUN_ID=7\n"), bashrc(""), "remove them", blocking=False),
    Fault(
        "dataset",
        lambda c: mnist_everywhere(c, cut=500),
        mnist_everywhere,
        "rsync",
        command=("--data", f"{HOME}/mnist"),
    ),
    Fault("ssh_connect", lambda c: c.reset_port("server2", 22), lambda c: c.clear_rules("server2"), "sshd"),
    Fault("ssh_auth", key_is_refused, plain_inventory, "identity_file"),
    Fault(
        "ssh_hostkey",
        host_key_is_unknown,
        lambda _: ringctl("trust", "--yes", "server2"),
        "ringctl trust server2",
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=[f"{n}-{fault.name}" for n, fault in enumerate(FAULTS)])
def test_each_fault_is_found_under_its_name_and_gone_once_it_is_mended(cluster: Hosts, fault: Fault) -> None:
    inventory(cluster, ALL if fault.name == "firewall" else TWO)
    fault.put(cluster)
    try:
        found = look(*fault.command, **fault.options)
        assert names(found) == {(fault.name, fault.host), *fault.also}, remarks(found)
        for result in remarks(found):
            assert fault.fix in result.fix
            assert result.blocking is fault.blocking
        missed = fault.name.startswith("ssh_") and fault.blocking
        unasked = missed or fault.name == "python_old" or bool(found.survey.errors)
        assert found.exit_code == (4 if unasked else 3 if fault.blocking else 0)
    finally:
        fault.mend(cluster)
    if fault.name == "port_ephemeral":
        assert names(look()) == set()
        return
    again = look(*fault.command, **fault.options)
    assert names(again) == set(), remarks(again)
    assert again.exit_code == 0


def test_a_full_disk_is_named_also_where_ringctl_was_before(cluster: Hosts) -> None:
    look()
    cluster.fill_disk("server2")
    try:
        found = look()
        assert names(found) == {("disk", "server2")}
        assert found.exit_code == 3
    finally:
        cluster.free_disk("server2")


def test_inodes_are_named_also_where_ringctl_was_before(cluster: Hosts) -> None:
    look()
    cluster.use_up_inodes("server2")
    try:
        assert names(look()) == {("inodes", "server2")}
    finally:
        cluster.free_disk("server2")


# --- Ports ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def somebody_at(cluster: Hosts, port: int, user: str) -> Iterator[int]:
    process = cluster.spawn("server1", "python3", "-c", LISTEN, str(port), user=user)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "up\n"
        yield process.pid
    finally:
        process.communicate()


@pytest.mark.parametrize(("user", "owner"), [("train", "pid "), ("root", "a process of root")])
def test_who_has_the_master_port_is_said(cluster: Hosts, user: str, owner: str) -> None:
    with somebody_at(cluster, PORT, user):
        found = look(master_port=PORT)
        assert names(found) == {("port_used", "server1")}
        assert f"port {PORT} is taken by {owner}" in remarks(found)[0].found
        assert "master_port" in remarks(found)[0].fix
    assert names(look(master_port=PORT)) == set()
    assert names(look()) == set()  # as it says: leave it out


def test_an_old_run_of_ours_on_the_port_is_named_and_can_be_stopped(cluster: Hosts) -> None:
    script = f"sleep 1000 | python3 -c {shlex.quote(LISTEN)} $MASTER_PORT"
    started = ringctl(
        "launch", "--world", "1", "--detach", "--json", "--master-port", str(PORT), "--", "sh", "-c", script
    )
    run = json.loads(started.stdout)["run"]
    wait_for(lambda: PORT in cluster.listening_ports("server1"), "the old run's port")
    found = look(master_port=PORT)
    assert names(found) == {("port_used", "server1"), ("busy", "server1")}
    used = next(result for result in remarks(found) if result.name == "port_used")
    assert used.fix == f"ringctl stop {run}"
    ringctl("stop", run)
    assert names(look(master_port=PORT)) == set()


# --- The same host twice -------------------------------------------------------------------------


def test_one_host_under_two_names_is_refused(cluster: Hosts) -> None:
    inventory(cluster, only=("server1", "server2"), server2={"address": cluster.address("server1")})
    found = look()
    assert {result.name for result in found.blockers} == {"twice"}
    assert "it is the same host as server2" in found.blockers[0].found


def test_hosts_that_know_no_way_to_each_other_are_refused_also_unchecked(cluster: Hosts) -> None:
    inventory(cluster, only=("server1", "server2"), server2={"data_address": "192.0.2.77"})
    said = ringctl("launch", "--skip-preflight", "--", "true", code=3).stderr
    assert "server1: it has no route to 192.0.2.77" in said


# --- All is well ---------------------------------------------------------------------------------


def test_a_healthy_cluster_is_all_green_and_every_pair_was_tried(cluster: Hosts) -> None:
    found = look()
    assert remarks(found) == []
    assert {result.name for result in found.results} == set(NAMES)
    tried = {(pair.source, pair.target) for pair in found.survey.pairs}
    assert tried == {(a, b) for a in cluster.names for b in cluster.names if a != b}
    for pair in found.survey.pairs:
        assert pair.seen == cluster.address(pair.source)
    first = {(p.source, p.target): p for p in reversed(found.survey.pairs)}
    assert all(pair.latency_ms and pair.mbit_s for pair in first.values())
    assert eventually(lambda: hosts.left_on(cluster) == {})


def test_a_real_import_is_made_when_asked_for(cluster: Hosts) -> None:
    inventory(cluster, only=("server1",))
    found = look(deep=True)
    env = found.survey.facts["server1"].env
    assert env is not None
    assert env.imports["torch"] == ""
    assert env.imports["torch.distributed"] == ""
    assert remarks(found) == []


# --- A host that does not answer -----------------------------------------------------------------


def test_a_host_that_is_silent_costs_its_timeout_and_the_others_are_reported_fully(cluster: Hosts) -> None:
    ssh_config(f"Host {cluster.address('server2')}\n  ConnectTimeout 2")
    cluster.cut("server2")
    found = look()
    assert names(found) == {("ssh_connect", "server2")}
    assert "no answer within 2 s" in remarks(found)[0].found
    others = [name for name in cluster.names if name != "server2"]
    tried = {(pair.source, pair.target) for pair in found.survey.pairs}
    assert tried == {(a, b) for a in others for b in others if a != b}
    assert found.exit_code == 4


def test_a_host_lost_between_the_two_rounds_is_a_host_that_did_not_answer(
    cluster: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Asking.dial

    def lose(asking: Asking) -> None:
        cluster.end_sessions("server2")
        before(asking)

    monkeypatch.setattr(Asking, "dial", lose)
    found = look()
    assert "server2" in found.survey.errors
    assert ("ssh_connect", "server2") in names(found)
    assert set(found.survey.facts) == {"server1", "server3", "server4"}


# --- The command ---------------------------------------------------------------------------------


def test_the_command_says_what_is_well_and_what_is_not(cluster: Hosts) -> None:
    good = ringctl("preflight")
    assert "ready: 4 hosts, nothing to remark" in good.stdout
    assert "FROM \\ TO" in good.stdout, good.stdout
    inventory(cluster, ALL, server2={"ifname": "enps1"})
    bad = ringctl("preflight", code=3)
    assert "✗ ifname" in bad.stdout
    assert "✗ server2: there is no interface enps1; it has" in bad.stdout
    assert "write `ifname: enp1s0` for server2" in bad.stdout
    assert "not ready: 1 blocker on 4 hosts" in bad.stdout


def test_json_is_as_documented(cluster: Hosts) -> None:
    inventory(cluster, only=("server1", "server2"), server2={"ifname": "enps1"})
    told = json.loads(ringctl("preflight", "--json", code=3).stdout)
    assert set(told) == {"ok", "checks", "pairs"}
    assert told["ok"] is False
    keys = {"name", "host", "peer", "status", "blocking", "found", "wanted", "fix"}
    assert all(set(check) == keys for check in told["checks"])
    assert [c["host"] for c in told["checks"] if c["status"] == "fail"] == ["server2"]
    assert {(pair["from"], pair["to"]) for pair in told["pairs"]} == {
        ("server1", "server2"),
        ("server2", "server1"),
    }
    assert {"from", "to", "latency_ms", "mbit_s"} <= set(told["pairs"][0])


def test_only_some_checks_on_only_the_hosts_of_a_launch(cluster: Hosts) -> None:
    inventory(cluster, ALL, server1={"ifname": "enps1"}, server4={"ifname": "enps1"})
    told = json.loads(ringctl("preflight", "--world", "2", "--only", "disk,inodes", "--json").stdout)
    assert {(check["name"], check["host"]) for check in told["checks"]} == {
        (name, host) for name in ("disk", "inodes") for host in ("server1", "server2")
    }
    assert ringctl("preflight", "--world", "2", "--skip", "ifname").returncode == 0


@pytest.mark.parametrize("option", ["--only", "--skip"])
def test_a_check_that_does_not_exist_is_refused_with_the_nearest(option: str) -> None:
    said = ringctl("preflight", "--local", option, "firewal", code=2).stderr
    assert f"{option} firewal: there is no such check" in said
    assert "did you mean firewall?" in said


def test_launch_says_what_stands_in_its_way_and_starts_nothing(cluster: Hosts) -> None:
    inventory(cluster, ALL, server2={"ifname": "enps1"}, server3={"ifname": "enps2"})
    said = ringctl("launch", "--", "sleep", "1000", code=3).stderr
    assert "server2: there is no interface enps1" in said
    assert "server3: there is no interface enps2" in said
    assert "nothing was started" in said
    assert not any(cluster.path(host, f"{OURS}/runs").exists() for host in cluster.names)


def test_launch_is_quiet_when_all_is_well_and_about_what_does_no_harm(cluster: Hosts) -> None:
    own_name_is_loopback(cluster)
    try:
        done = ringctl("launch", "--", "true")
    finally:
        cluster.write_hosts("server2", {name: cluster.address(name) for name in cluster.names})
    assert "127.0.1.1" not in done.stdout + done.stderr
    assert "preflight" not in done.stdout + done.stderr


def test_the_page_is_made_from_the_table_of_checks() -> None:
    made = subprocess.run(
        [sys.executable, PROJECT / "scripts" / "checks.py"], capture_output=True, check=True
    )
    assert made.stdout.decode() == (PROJECT / "docs" / "preflight.md").read_text()


# --- Hosts that lie, and strangers ---------------------------------------------------------------

LIES = {
    "a number for a name": '{"hostname": 5}',
    "words for a number": '{"memory": "x"}',
    "a list for an address": '{"data_address": []}',
    "half a range": '{"ephemeral": [1]}',
    "a run that is a command": '{"runs": ["x; touch /tmp/pwned #"]}',
    "an address that is a command": '{"data_address": "1.2.3.4; reboot"}',
    "brackets without end": "[" * 3000,
}
LIAR = """#!/bin/sh
read -r line
echo --ringctl-hostd--
cat <<'END'
%s
END
"""


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_host_that_answers_nonsense_harms_nobody_but_itself(cluster: Hosts, lie: str) -> None:
    usual = {
        "home": "/x",
        "cores": 1,
        "free_port": 1,
        "data_address": "10.0.0.1",
        "ifname": "eth0",
        "python": "p",
    }
    answer = json.dumps({**usual, **json.loads(lie)}) if lie.startswith("{") else lie
    write_home(cluster, "server2", "liar", LIAR % answer)
    cluster.run("server2", "chmod", "+x", "liar")
    inventory(cluster, only=("server1", "server2"), server2={"python": f"{HOME}/liar"})
    found = look()
    assert {host for _, host in names(found)} == {"server2"}
    assert found.exit_code == 4


def test_a_stranger_at_the_probes_port_gets_no_word_and_does_no_harm(
    cluster: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[bytes] = []
    before = Asking.dial

    def intrude(asking: Asking) -> None:
        for words in (b"[" * 3000 + b"\n", b"\n", b'{"token": "guess"}\n', b"\xff" * 9000):
            port = asking.facts["server2"].listening[0]
            address = (cluster.address("server2"), port)
            with contextlib.suppress(OSError), socket.create_connection(address, timeout=10) as stranger:
                stranger.sendall(words)
                stranger.shutdown(socket.SHUT_WR)  # an error says that it was shown the door already
                answers.append(stranger.recv(100))
        before(asking)

    monkeypatch.setattr(Asking, "dial", intrude)
    assert remarks(look()) == []
    assert set(answers) <= {b""}


# --- Networks of other shapes --------------------------------------------------------------------


def test_a_second_address_of_an_interface_is_as_good_as_the_first(cluster: Hosts) -> None:
    for number, host in enumerate(("server1", "server2"), start=1):
        add = ["ip", "address", "add", f"10.88.0.{number}/24", "dev", cluster.ifname(host)]
        cluster.run(host, *add, user="root")
    try:
        both = {
            host: {"data_address": f"10.88.0.{number}"} for number, host in ((1, "server1"), (2, "server2"))
        }
        inventory(cluster, only=("server1", "server2"), **both)
        found = look()
        assert remarks(found) == []
        assert {facts.data_address for facts in found.survey.facts.values()} == {"10.88.0.1", "10.88.0.2"}
    finally:
        for number, host in enumerate(("server1", "server2"), start=1):
            delete = ["ip", "address", "delete", f"10.88.0.{number}/24", "dev", cluster.ifname(host)]
            cluster.run(host, *delete, user="root")


def test_an_interface_that_has_not_the_data_address_is_refused(cluster: Hosts) -> None:
    inventory(cluster, server2={"ifname": "lo", "data_address": cluster.address("server2")})
    found = look()
    assert names(found) == {("ifname", "server2")}
    assert "not the data address" in remarks(found)[0].found


def test_other_data_of_the_same_shape_is_noticed(cluster: Hosts) -> None:
    mnist_everywhere(cluster)
    images = cluster.path("server2", f"{HOME}/mnist/train-labels-idx1-ubyte")
    images.write_bytes(images.read_bytes()[:8] + bytes(40))
    found = look("--data", f"{HOME}/mnist")
    assert names(found) == {("dataset", "server2")}


def test_a_host_that_is_not_reached_is_said_whatever_was_asked_for(cluster: Hosts) -> None:
    cluster.reset_port("server2", 22)
    done = ringctl("preflight", "--only", "disk", code=4)
    assert "server2: connection refused" in done.stdout
    assert "not ready" in done.stdout
    assert json.loads(ringctl("preflight", "--only", "disk", "--json", code=4).stdout)["ok"] is False
