"""Four real hosts for the tests of this folder. Each test finds their homes empty, but for ringctl's own
programs, and fails if it leaves a process or an open port on one of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.conftest import eventually
from tests.launcher import hosts


@pytest.fixture(scope="session")
def four_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hosts.Hosts]:
    cluster = hosts.Hosts(4, folder=tmp_path_factory.mktemp("hosts") / "cluster")
    with cluster:
        yield cluster


@pytest.fixture
def cluster(
    four_hosts: hosts.Hosts,
    clean: None,  # noqa: ARG001 - sets the environment that this adds to
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[hosts.Hosts]:
    """The hosts, a home with what is needed to reach them, an inventory that ringctl finds by itself, and an
    empty project folder to be in."""
    become_controller(four_hosts, tmp_path, monkeypatch)
    hosts.equip(four_hosts)
    try:
        yield four_hosts
        hosts.mend(four_hosts)
        assert eventually(lambda: not hosts.left_on(four_hosts), 20.0), hosts.left_on(four_hosts)
    finally:
        hosts.reset(four_hosts)


@pytest.fixture
def bare(cluster: hosts.Hosts) -> hosts.Hosts:
    """The hosts as they are before anyone has used ringctl there."""
    for host in cluster.names:
        shutil.rmtree(cluster.path(host, hosts.OURS))
    return cluster


def become_controller(cluster: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(hosts.own_home(cluster, folder)))
    monkeypatch.setenv("RINGCTL_HOSTS", str(folder / "hosts.yaml"))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    hosts.inventory(cluster)
    project = folder / "project"
    project.mkdir()
    monkeypatch.chdir(project)
