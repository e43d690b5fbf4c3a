"""Failures of the catalogue that take several hosts, or an sshd, brought about for real."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.failing import explained, failure, produces, together
from tests.launcher.hosts import Hosts, inventory, sshd_option, write_home
from tests.launcher.ringctl import ringctl

TWO = ("server1", "server2")


@contextlib.contextmanager
def docker0(cluster: Hosts) -> Iterator[None]:
    """What Docker makes of every host it is installed on."""
    address = "ip address add 172.17.0.1/16 dev docker0"
    make = f"ip link add docker0 type bridge && {address} && ip link set docker0 up"
    for host in TWO:
        cluster.run(host, "sh", "-c", make, user="root")
    try:
        yield
    finally:
        for host in TWO:
            cluster.run(host, "ip", "link", "delete", "docker0", user="root")


@produces("multihomed")
def test_a_bridge_of_docker_taken_for_the_network_is_told(cluster: Hosts) -> None:
    inventory(cluster, only=TWO, defaults={"ifname": "docker0"})
    with docker0(cluster):
        cause = failure(together("join()", timeout="1 if rank else 30"), local=False, world=2)
    assert (cause.rank, cause.host, cause.id) == (1, "server2", "multihomed")
    assert "(172.17.0.1, " in cause.text
    assert "take `ifname` out of the inventory" in cause.fix


def lose_large_packets(cluster: Hosts, host: str) -> None:
    """As behind a tunnel whose MTU nobody was told, and without a word about it; SSH is spared."""
    cluster.touched.add(host)
    table = "add table inet ringtest; add chain inet ringtest in { type filter hook input priority 0; }"
    rule = "add rule inet ringtest in tcp sport 1024-65535 tcp dport 1024-65535 meta length > 1400 drop"
    cluster.run(host, "nft", f"{table}; {rule}", user="root")


@produces("mtu")
def test_large_packets_that_get_lost_are_told(cluster: Hosts) -> None:
    inventory(cluster, only=TWO)
    lose_large_packets(cluster, "server2")
    body = "join()\ndist.all_reduce(torch.ones(10))\nstep(1, 100_000)"
    cause = failure(together(body, timeout=3), local=False, world=2)
    assert cause.id == "mtu"
    assert "nothing came of the first large exchange" in cause.text
    assert (
        f"rank {cause.rank} on {TWO[cause.rank or 0]} got no answer in time in `dist.all_reduce" in cause.text
    )
    assert "same MTU" in cause.fix


def ssh(program: str, *args: str, code: int = 255) -> str:
    """What one of OpenSSH's programs complains of."""
    options = ["-F", str(Path(os.environ["HOME"], ".ssh", "config")), "-o", "BatchMode=yes"]
    done = subprocess.run(
        [program, *options, *args], stdin=subprocess.DEVNULL, capture_output=True, timeout=30
    )
    assert done.returncode == code
    return done.stderr.decode()


@produces("ssh_limits")
def test_the_limits_of_an_sshd_are_told(cluster: Hosts) -> None:
    said = []
    with sshd_option(cluster, "server1", "MaxStartups 1:100:1\nMaxSessions 0\nAllowTcpForwarding no"):
        with socket.create_connection((cluster.address("server1"), 22)) as first:
            assert first.recv(100)
            said.append(ssh("ssh", "server1", "true"))
        said.append(ssh("ssh", "server1", "true"))
        said.append(ssh("ssh", "-J", "server1", "server2", "true"))
    for log in said:
        cause = explained(log)
        assert cause.id == "ssh_limits"
        assert "raise MaxStartups and MaxSessions" in cause.fix


@produces("ssh_noise")
def test_a_shell_that_greets_is_told(cluster: Hosts) -> None:
    write_home(cluster, "server1", ".bashrc", "echo Welcome to this server, dear user\n")
    cause = explained(ssh("scp", "/etc/hostname", "server1:there"))
    assert cause.id == "ssh_noise"
    assert "~/.bashrc" in cause.fix


@produces("env_missing")
@pytest.mark.parametrize("options", [(), ("--skip-preflight",)])
def test_an_environment_that_is_not_there_is_told(cluster: Hosts, options: tuple[str, ...]) -> None:
    inventory(cluster, only=("server2",), defaults={"env": {"venv": "~/no-such"}, "python": None})
    Path("train.py").touch()
    cause = explained(ringctl("launch", *options, "--", "python", "train.py", code=None).stderr)
    assert cause.id == "env_missing"
    assert "server2" in cause.text
    assert "ringctl env create" in cause.fix
