"""`ringctl init`: a hosts.yaml with what was found on real hosts, that works as it is."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher import cli_init, init, inventory
from launcher.errors import InputError
from launcher.init import FoundEnv, Met
from launcher.model import EnvSpec, Facts, Host
from tests.launcher.hosts import Hosts, dot_ssh, write_home
from tests.launcher.ringctl import RINGCTL, ringctl

FILE = Path("hosts.yaml")


@pytest.fixture
def servers(cluster: Hosts, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    """The hosts, and nothing here that names them but ~/.ssh."""
    os.unlink(os.environ["RINGCTL_HOSTS"])
    monkeypatch.delenv("RINGCTL_HOSTS")
    return cluster


def make_venv(servers: Hosts, *hosts: str) -> None:
    """A virtual environment with torch, where people have theirs."""
    for host in hosts or servers.names:
        servers.run(host, "sh", "-c", "mkdir venvs && ln -s /opt/ring venvs/ring")


# --- With hosts ----------------------------------------------------------------------------------


def test_the_file_has_what_was_found_and_works_as_it_is(servers: Hosts) -> None:
    make_venv(servers)
    for name in ("bin/python", "conda-meta/history"):  # without torch: not this one
        write_home(servers, "server1", f"miniconda3/envs/empty/{name}", '#!/bin/sh\nexec python3 "$@"\n')
    servers.run("server1", "chmod", "+x", "miniconda3/envs/empty/bin/python")
    said = ringctl("init", "-H", "server1,train@server2:2,server3").stdout
    assert said == "hosts.yaml: 3 hosts; next: ringctl preflight\n"
    assert stat.S_IMODE(FILE.stat().st_mode) == 0o644
    found = inventory.load(FILE)
    assert found.master == "server1"
    assert found.master_port is None
    assert [(host.name, host.user, host.slots, host.data_address, host.ifname) for host in found.hosts] == [
        ("server1", "", 1, servers.address("server1"), ""),
        ("server2", "train", 2, servers.address("server2"), ""),
        ("server3", "", 1, servers.address("server3"), ""),
    ]
    assert {host.env for host in found.hosts} == {EnvSpec("venv", "~/venvs/ring")}
    comments = FILE.read_text()
    for words in ("# ifname: enp1s0", "# user: train", "cores, ", " of memory free", "torch 2."):
        assert words in comments
    assert "ready: 3 hosts, nothing to remark" in ringctl("preflight").stdout


def test_a_host_that_is_not_reached_is_written_with_why_and_the_rest_is_filled(servers: Hosts) -> None:
    known = dot_ssh() / "known_hosts"
    lines = known.read_text().splitlines(keepends=True)
    known.write_text("".join(line for line in lines if not line.startswith("server3,")))
    make_venv(servers, "server1")
    servers.stop_sshd("server2")
    try:
        done = ringctl("init", "-H", "server1,server2,server3", code=4)
    finally:
        servers.start_sshd("server2")
    assert "error: server2: connection refused" in done.stderr
    assert "error: server3: unknown host key ssh-ed25519" in done.stderr
    assert "look at the new host keys with: ringctl trust; then repeat this" in done.stderr
    text = FILE.read_text()
    assert "  # not reached: connection refused by" in text
    assert "  # not reached: unknown host key ssh-ed25519" in text
    hosts = {host.name: host for host in inventory.load(FILE).hosts}
    assert hosts["server1"].data_address == hosts["server2"].data_address == ""  # it had nobody to talk to
    assert hosts["server1"].env == EnvSpec("venv", "~/venvs/ring")
    ringctl("trust", "--yes")
    assert f"{servers.address('server3')} ssh-ed25519" in known.read_text()
    ringctl("init", "-H", "server1,server2,server3", "--force")
    assert "not reached" not in FILE.read_text()


def test_where_no_torch_is_found_the_file_says_so(servers: Hosts) -> None:
    make_venv(servers, "server2")
    ringctl("init", "-H", "server1,server2")
    hosts = yaml.safe_load(FILE.read_text())["hosts"]
    assert "env" not in hosts[0]
    assert hosts[1]["env"] == {"venv": "~/venvs/ring"}
    assert (
        "no environment with torch was found; name one, or make one: ringctl env create" in FILE.read_text()
    )


# --- Where names come from -----------------------------------------------------------------------


def names_in(*args: str) -> list[str]:
    """The hosts that it writes without asking them."""
    text = ringctl("init", "--no-probe", "--output", "-", *args).stdout
    return [host.name for host in inventory.parse(text, "-").hosts]


def test_hosts_of_the_ssh_configuration_are_those_that_are_no_patterns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh" / "more").mkdir(parents=True)
    (tmp_path / ".ssh" / "more" / "lab").write_text("host=lab1\n  User x\nHost lab2 lab* !lab9\n")
    (tmp_path / ".ssh" / "config").write_text(
        'Host zeta "alpha"\n  Port 22\nInclude more/*\nHost *\nHost zeta\n'
    )
    assert names_in("--ssh-config") == ["zeta", "alpha", "lab1", "lab2"]
    assert names_in("--ssh-config", "lab?,zeta") == ["zeta", "lab1", "lab2"]
    done = ringctl("init", "--no-probe", "--ssh-config", "beta*", code=2)
    assert "--ssh-config beta*: ~/.ssh/config has no such Host" in done.stderr
    assert "it has zeta, alpha, lab1, lab2" in done.stderr


ETC_HOSTS = """\
127.0.0.1 localhost
127.0.1.1 laptop
::1 localhost ip6-localhost
ff02::1 ip6-allnodes
10.0.0.1 server1 server1.lan  # the first
10.0.0.2 server2.lan server2
10.0.0.2 again
fe80::2 server2.lan
"""


@pytest.mark.parametrize(
    ("names", "found"),
    [("", ["server1", "server2.lan"]), ("server2, server1.lan", ["server2", "server1.lan"])],
)
def test_of_etc_hosts_come_the_names_of_other_machines_or_those_that_are_named(
    names: str, found: list[str]
) -> None:
    assert init.of_etc_hosts(ETC_HOSTS, names) == found


@pytest.mark.parametrize(("text", "names"), [(ETC_HOSTS, "server9"), ("127.0.0.1 localhost me", "")])
def test_an_alias_that_is_not_there_is_refused(text: str, names: str) -> None:
    with pytest.raises(InputError, match="/etc/hosts"):
        init.of_etc_hosts(text, names)


def test_the_machines_own_etc_hosts_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hosts").write_text(ETC_HOSTS)
    monkeypatch.chdir(tmp_path)
    script = 'mount --bind hosts /etc/hosts && exec "$@"'
    argv = ["unshare", "--mount", "sh", "-c", script, "sh", *RINGCTL, "init", "--etc-hosts", "--no-probe"]
    subprocess.run(argv, check=True, capture_output=True)
    assert [host.name for host in inventory.load(FILE).hosts] == ["server1", "server2.lan"]


def test_a_hostfile_and_a_list_are_read_as_launch_reads_them(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("lab@one slots=2\n# no\n10.0.0.7\n")
    text = ringctl("init", "--no-probe", "--output", "-", "--hostfile", str(tmp_path / "file")).stdout
    assert [(h.name, h.user, h.slots) for h in inventory.parse(text, "-").hosts] == [
        ("one", "lab", 2),
        ("10.0.0.7", "", 1),
    ]
    assert names_in("-H", "a:3,[fe80::1],007") == ["a", "fe80::1", "007"]


@pytest.mark.parametrize("given", [(None,) * 4, ("a", None, None, ""), (None, "x", "", None)])
def test_hosts_are_named_in_exactly_one_way(given: tuple[str | None, ...]) -> None:
    with pytest.raises(InputError, match="in one way"):
        cli_init.hosts_from(*given)


# --- Writing -------------------------------------------------------------------------------------


def test_a_file_that_is_there_is_only_overwritten_by_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    FILE.write_text("mine")
    assert "--force" in ringctl("init", "--no-probe", "-H", "a,b", code=2).stderr
    assert FILE.read_text() == "mine"
    ringctl("init", "--no-probe", "-H", "a,b", "--force")
    assert [host.name for host in inventory.load(FILE).hosts] == ["a", "b"]
    done = ringctl("init", "--no-probe", "-H", "a,b", "--output", "nowhere/hosts.yaml", code=2)
    assert "nowhere/hosts.yaml: cannot be written: No such file" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"hosts.yaml", "scratch"}


anything = st.text(max_size=20) | st.sampled_from(
    ["a\n  - name: evil", "x: [", "# \x1b[31m", "\x85y\u2028z", "\ud800", "\U00016800"]
)


@settings(max_examples=50, deadline=None)
@given(user=anything, ifname=anything, address=anything, problem=anything, value=anything, python=anything)
def test_whatever_hosts_say_the_file_loads_and_has_just_these_hosts(
    user: str, ifname: str, address: str, problem: str, value: str, python: str
) -> None:
    facts = Facts("a", "", 2, 1, address, ifname, "", user=user, memory=1 << 30)
    env = FoundEnv(EnvSpec("conda", value), python, {"torch": python or "2.0"})
    text = init.inventory_text(
        [Met(Host("a", "a"), facts, (env,)), Met(Host("b", "b"), problem=problem or "?")]
    )
    found = inventory.parse(text, "hosts.yaml")
    assert [(host.name, host.user, host.slots) for host in found.hosts] == [("a", "", 1), ("b", "", 1)]
    assert found.hosts[0].env in (None, env.env)
    text.encode()


def met(name: str, *envs: tuple[str, str, str | None]) -> Met:
    found = tuple(FoundEnv(EnvSpec("conda", n), "3.11", {"torch": t, "torchvision": v}) for n, t, v in envs)
    return Met(Host(name, name), Facts(name, "", 1, 1, "", "", ""), found)


def test_of_several_environments_the_one_that_all_hosts_have_is_taken() -> None:
    one = met("a", ("first", "2.0", "0.15"), ("both", "2.1+cpu", "0.16"))
    other = met("b", ("both", "2.1", "0.16"), ("first", "1.9", "0.15"))
    assert {host: found.env.value for host, found in init.chosen_envs([one, other]).items()} == {
        "a": "both",
        "b": "both",
    }


def test_without_a_common_one_each_host_gets_one_that_has_all_that_the_trainer_needs() -> None:
    one = met("a", ("bare", "2.0", None), ("full", "2.0", "0.15"))
    other = met("b", ("empty", "", None), ("own", "2.0", "0.15"))
    assert {host: found.env.value for host, found in init.chosen_envs([one, other]).items()} == {
        "a": "full",
        "b": "own",
    }
