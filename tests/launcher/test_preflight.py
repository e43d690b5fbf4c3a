"""Each thing that is known to go wrong, put in place on real hosts: preflight finds it under its own name,
says nothing of the other hosts, and doing what it says, to the letter, makes it pass."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher import ask, cli
from launcher.agent import agents_for
from launcher.model import CheckResult
from launcher.plan import place
from launcher.preflight.checks import NAMES
from launcher.preflight.examine import Examined, examine
from launcher.preflight.report import as_json
from launcher.preflight.survey import Asking
from launcher.transport import Pool
from tests.conftest import eventually
from tests.launcher import hosts
from tests.launcher.hosts import HOME, OURS, Hosts, Terminal, dot_ssh, new_key, ssh_config, write_home
from tests.launcher.ringctl import wait_for
from tests.trainer import idx

PROJECT = Path(__file__).resolve().parent.parent.parent
LISTEN = """
import socket, sys
server = socket.create_server(("", int(sys.argv[1])))
print("up", flush=True)
sys.stdin.read(1)
"""
PORT, EPHEMERAL = 23456, 40000
DATA = "sets/mnist"
TWO = ("server1", "server2")  # show as much as four, where they are not about each other


def look(*command: str, **options: Any) -> Examined:
    """Preflight in this process, without the command line's start."""
    deep = options.pop("deep", False)
    asked = ask.run(ask.inventory(ask.Where(), False, None), command, pushes=False, **options)
    pool = Pool(no_input=True)
    try:
        agents = agents_for([host for host, _ in place(asked.inventory, asked.options.world)], pool)
        return examine(asked.inventory, asked.options, agents, deep=deep)
    finally:
        pool.close()


def here(*args: str, code: int = 0) -> str:
    """The command `ringctl` in this process; what it says on both of its outputs."""
    said, before = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True), sys.argv
    sys.argv = ["ringctl", *args]
    try:
        with redirect_stdout(said), redirect_stderr(said), pytest.raises(SystemExit) as end:
            cli.main()
    finally:
        sys.argv = before
    said.seek(0)
    text = said.read()
    assert end.value.code == code, text
    return text


def remarks(examined: Examined) -> list[CheckResult]:
    return [result for result in examined.results if result.status in ("warn", "fail")]


def names(examined: Examined) -> set[tuple[str, str]]:
    return {(result.name, result.host) for result in remarks(examined)}


# --- Doing what it says --------------------------------------------------------------------------

WRITE = re.compile(r"write `(\w+): ([^`]+)`(?: for (\S+))? in the inventory")
LEAVE_OUT = re.compile(r"leave out `(\w+)` of (\S+) in the inventory")
# Real hosts have a sudo. This one asks for no password, and likewise takes only the command for root, not the
# pipe it stands in. There is no service manager: of that, what the console would be used for.
SUDO = """#!/bin/sh
PATH=/opt/admin:/usr/sbin:/usr/bin:/sbin:/bin exec /opt/admin/become --reuid 0 --regid 0 --clear-groups "$@"
"""
SYSTEMCTL = '#!/bin/sh\n[ "$*" = "start ssh" ] && exec /usr/sbin/sshd -E /var/log/sshd.log\n'
# ssh looks for its files in the home that /etc/passwd names; the tests have one of their own.
SSH = """#!/bin/sh
exec /usr/bin/ssh -F "$HOME/.ssh/config" -o UserKnownHostsFile="$HOME/.ssh/known_hosts" "$@"
"""


@pytest.fixture(scope="module", autouse=True)
def administrator(four_hosts: Hosts) -> Iterator[None]:
    """Somebody at each host who may become root."""
    for host in four_hosts.names:
        folder = four_hosts.path(host, "/opt/admin")
        folder.mkdir()
        shutil.copyfile("/usr/bin/setpriv", folder / "become")
        (folder / "become").chmod(0o4755)
        for name, text in (("sudo", SUDO), ("systemctl", SYSTEMCTL)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
    yield
    for host in four_hosts.names:
        shutil.rmtree(four_hosts.path(host, "/opt/admin"))


def follow(cluster: Hosts, result: CheckResult) -> str:
    """Do what a fix says: what its commands print."""
    said = ""
    for line in result.fix.splitlines():
        if change := WRITE.match(line):
            write_inventory(change[3], change[1], yaml.safe_load(change[2]))
        elif change := LEAVE_OUT.match(line):
            write_inventory(change[2], change[1], None)
        elif line.startswith(("ringctl ", "ssh", "rsync ")):
            said += type_here(line)
        else:
            said += type_there(cluster, result.host, line)
    return said


def write_inventory(host: str | None, key: str, value: Any) -> None:
    """A key of a host, or of all; None takes it away."""
    path = Path(os.environ["RINGCTL_HOSTS"])
    content = yaml.safe_load(path.read_text())
    entry = next(entry for entry in content["hosts"] if entry["name"] == host) if host else content
    entry[key] = value
    if value is None:
        del entry[key]
    path.write_text(yaml.safe_dump(content, sort_keys=False))


def type_there(cluster: Hosts, host: str, line: str) -> str:
    """In a shell of the host's user, who has sudo."""
    script = f"exec 2>&1; set -o pipefail; PATH=/opt/admin:$PATH\n{line}"
    shell = cluster.spawn(host, "bash", "-c", script)
    said, _ = shell.communicate(timeout=120)  # pip takes its time
    assert shell.returncode == 0, said
    return said


def type_here(line: str) -> str:
    """On the controller, with a yes to what it asks."""
    words = shlex.split(line, comments=True)
    if words[:2] == ["ringctl", "trust"]:
        terminal = Terminal(*words[1:])
        terminal.expect("Record 1 new key?")
        terminal.type("y\n")
        return terminal.finish(0)
    if words[0] == "ringctl":
        return here(*words[1:])
    ssh = Path(os.environ["HOME"]) / "bin" / "ssh"
    ssh.parent.mkdir(exist_ok=True)
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    environ = {**os.environ, "PATH": f"{ssh.parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", line], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# --- Faults --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A host that something is put wrong on."""

    cluster: Hosts
    host: str
    undo: contextlib.ExitStack  # what the fix leaves to be undone, such as a fault's own leftovers

    def write(self, **keys: Any) -> None:
        for key, value in keys.items():
            write_inventory(self.host, key, value)

    def home(self, name: str, text: str, *, executable: bool = False) -> None:
        write_home(self.cluster, self.host, name, text)
        if executable:
            self.run("chmod", "+x", name)

    def run(self, *argv: str) -> str:
        return self.cluster.run(self.host, *argv).stdout

    def as_root(self, script: str) -> None:
        self.cluster.run(self.host, "sh", "-c", script, user="root")

    def names(self, **addresses: str | None) -> None:
        """Let names mean other addresses there, or nothing."""
        file = self.cluster.path(self.host, "/etc/hosts")
        self.undo.callback(file.write_text, file.read_text())
        known = {name: self.cluster.address(name) for name in self.cluster.names}
        all_names = {**known, **addresses}
        self.cluster.write_hosts(self.host, {name: address for name, address in all_names.items() if address})


@dataclass(frozen=True)
class Fault:
    """Something wrong with a host, and how what preflight says of it is followed."""

    name: str
    put: Callable[[Place], object]
    blocking: bool = True
    unasked: bool = False  # the host cannot even be asked
    follow: Callable[[Place, CheckResult], object] = field(default=lambda at, said: follow(at.cluster, said))


def own_name_is_loopback(at: Place) -> None:
    at.names(**{at.host: "127.0.1.1"})


def alias_is_missing(at: Place) -> None:
    at.names(server1=None)


def alias_leads_elsewhere(at: Place) -> None:
    at.names(server1="10.99.99.99")


def name_means_docker(at: Place) -> None:
    at.as_root("ip link add docker0 type bridge && ip address add 172.17.0.1/16 dev docker0")
    at.undo.callback(at.as_root, "ip link delete docker0")
    at.names(**{at.host: "172.17.0.1"})


def mtu_is_smaller(at: Place) -> None:
    at.cluster.set_mtu(at.host, 1300)
    at.undo.callback(at.cluster.set_mtu, at.host, 1500)


def shm_is_tiny(at: Place) -> None:
    at.cluster.resize_shm(at.host, "1m")
    at.undo.callback(at.cluster.resize_shm, at.host, "50%")


def interface_is_not_there(at: Place) -> None:
    at.write(ifname="enps1")


def interface_has_no_address(at: Place) -> None:
    at.as_root("ip link add plain0 type bridge")
    at.undo.callback(at.as_root, "ip link delete plain0")
    at.write(ifname="plain0")


def data_address_is_another(at: Place) -> None:
    at.write(data_address="10.99.99.99")


# Firewalls


def ephemeral_ports_are_shut(at: Place) -> None:
    at.cluster.drop_port(at.host, (32768, 60999), new_only=True)


def master_port_is_shut(at: Place) -> None:
    write_inventory(None, "master_port", PORT)
    at.cluster.drop_port(at.host, PORT, new_only=True)


def nothing_gets_out(at: Place) -> None:
    chain = "{ type filter hook output priority 0; }"
    at.as_root(f"nft add table inet way && nft add chain inet way out '{chain}'")
    at.undo.callback(at.as_root, "nft delete table inet way")
    at.as_root("nft add rule inet way out tcp dport != 22 tcp flags == syn drop")


def shut_to_server3(at: Place) -> None:
    at.cluster.drop_from(at.host, "server3")


def shut_to_server2(at: Place) -> None:
    at.cluster.drop_from(at.host, "server2")


# Folders, disks and limits


def ringctl_belongs_to_root(at: Place) -> None:
    at.run("mkdir", "-p", OURS)
    at.as_root(f"chown root {OURS}; chmod 755 {OURS}")


def runs_belong_to_root(at: Place) -> None:
    at.run("mkdir", "-p", f"{OURS}/runs")
    at.as_root(f"chown -R root {OURS}/runs; chmod 700 {OURS}/runs")


def home_belongs_to_root(at: Place) -> None:
    at.as_root(f"chown root {HOME}")
    at.undo.callback(at.as_root, f"chown {at.cluster.user} {HOME}")


def workdir_is_the_systems(at: Place) -> None:
    at.write(workdir="/usr/share")


def disk_is_full(at: Place) -> None:
    """Of the little that there is, a file takes all."""
    state = os.statvfs(at.cluster.path(at.host, HOME))
    used = (state.f_blocks - state.f_bfree) * state.f_frsize
    resize_home(at, f"size={used + (220 << 20)}")
    at.run("sh", "-c", "cat /dev/zero >old-results 2>/dev/null || :")


def inodes_are_gone(at: Place) -> None:
    state = os.statvfs(at.cluster.path(at.host, HOME))
    resize_home(at, f"nr_inodes={state.f_files - state.f_ffree + 1100}")
    at.run(
        "sh",
        "-c",
        "mkdir old-results; cd old-results; n=0; (while : >$n; do n=$((n + 1)); done) 2>/dev/null || :",
    )


def resize_home(at: Place, options: str) -> None:
    at.undo.callback(at.cluster.free_disk, at.host)
    at.as_root(f"mount -o remount,{options} {HOME}")


def remove_what_nobody_needs(at: Place, said: CheckResult) -> None:
    """What that is, it cannot know; but it shows what there is to choose from."""
    assert f"{HOME}/old-results\n" in follow(at.cluster, said)
    at.run("rm", "-r", f"{HOME}/old-results")


def few_files_may_be_open(at: Place) -> None:
    """As an administrator limits them, by PAM, which the hosts' sshd does without otherwise."""
    files = {
        "/etc/pam.d/sshd": "".join(
            f"{kind} required {name}.so\n"
            for kind, name in (("auth", "pam_permit"), ("account", "pam_permit"), ("session", "pam_limits"))
        ),
        "/etc/security/limits.conf": "* - nofile 64\n",
    }
    for name, text in files.items():
        path = at.cluster.path(at.host, name)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        at.undo.callback(shutil.rmtree, path.parent)
    at.cluster.path(at.host, "/etc/security/limits.d").mkdir()
    at.undo.enter_context(hosts.sshd_option(at.cluster, at.host, "UsePAM yes"))


# Shells and clocks


def shell_is_noisy(at: Place) -> None:
    at.home(".bashrc", "echo welcome to server2\n")


def torchrun_left_a_variable(at: Place) -> None:
    at.home(".bashrc", "export TORCHELASTIC_RUN_ID=7\nexport EDITOR=vi\n")


def clock_is_an_hour_off(at: Place) -> None:
    at.home(".bashrc", "export RINGCTL_TEST_CLOCK_S=3600\n")


def set_the_clock(at: Place, said: CheckResult) -> None:
    """All hosts here share one clock, which no command of theirs may set: this alone is undone instead."""
    assert said.fix == "sudo timedatectl set-ntp true"
    at.home(".bashrc", "")


# SSH


def sshd_is_stopped(at: Place) -> None:
    at.cluster.stop_sshd(at.host)


def start_sshd(at: Place, said: CheckResult) -> None:
    follow(at.cluster, said)
    wait_for(lambda: 22 in at.cluster.listening_ports(at.host), "sshd")


def key_is_refused(at: Place) -> None:
    """One as clouds give it, without its public half beside it."""
    at.write(identity_file=str(new_key(dot_ssh() / "other")))
    (dot_ssh() / "other.pub").unlink()


def copy_the_key(at: Place, said: CheckResult) -> None:
    """Whoever may do that has another way in; here it is a key that an agent holds."""
    file = at.cluster.path(at.host, f"{HOME}/.ssh/authorized_keys")
    at.undo.callback(file.write_text, file.read_text())
    with hosts.ssh_agent(at.cluster.identity_file):
        follow(at.cluster, said)


def host_key_is_unknown(at: Place) -> None:
    known = dot_ssh() / "known_hosts"
    own = {at.host, at.cluster.address(at.host)}
    kept = [line for line in known.read_text().splitlines() if not own & set(line.split()[0].split(","))]
    known.write_text("\n".join(kept) + "\n")


# Python. The packages are stand-ins that hold their records alone: nothing here imports them. What makes
# environments of them is real, but for conda, which cannot be had here.

NOW = {name: importlib.metadata.version(name).partition("+")[0] for name in ("torch", "torchvision")}
OLD = {"torch": "2.0.1", "torchvision": "0.15.2"}
OLD_PYTHON = """#!/usr/bin/env python3
import sys
sys.version_info = (3, 6, 9, "final", 0)
place = sys.argv.index("-c")
code, sys.argv = sys.argv[place + 1], ["-c"] + sys.argv[place + 2:]
exec(code)
"""
MICROMAMBA = f"""#!/bin/sh
mkdir -p ~/micromamba/envs/fl38/bin ~/micromamba/envs/fl38/conda-meta
printf '#!/bin/sh\\nexec {Hosts.python} "$@"\\n' >~/micromamba/envs/fl38/bin/python
chmod +x ~/micromamba/envs/fl38/bin/python
"""


def wheel(name: str, version: str, needs: str = "") -> tuple[str, bytes]:
    """(file name, content) of a package without any code."""
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
    files = {"METADATA": about, "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
    folder, content = f"{name}-{version}.dist-info", io.BytesIO()
    with zipfile.ZipFile(content, "w") as packed:
        for file, text in {
            **files,
            "RECORD": "".join(f"{folder}/{file},,\n" for file in (*files, "RECORD")),
        }.items():
            packed.writestr(f"{folder}/{file}", text)
    return f"{name}-{version}-py3-none-any.whl", content.getvalue()


def packages(versions: Mapping[str, str]) -> dict[str, bytes]:
    needs = f"Requires-Dist: torch=={versions['torch']}\n"
    return dict([wheel("torch", versions["torch"]), wheel("torchvision", versions["torchvision"], needs)])


def package_index(at: Place) -> None:
    """Where pip finds its packages, as in a lab that is not connected."""
    at.run("mkdir", "wheels")
    for name, content in {**packages(OLD), **packages(NOW)}.items():
        at.cluster.path(at.host, f"{HOME}/wheels/{name}").write_bytes(content)
    at.home(".config/pip/pip.conf", f"[global]\nno-index = true\nfind-links = {HOME}/wheels\n")


def environment_with(at: Place, **versions: str) -> None:
    """A virtual environment that has these packages; pip is the one of the hosts' own, which saves time."""
    package_index(at)
    at.run(at.cluster.python, "-m", "venv", "--without-pip", "own")
    site = at.run("sh", "-c", "echo own/lib/*/site-packages").strip()
    pip = at.run(at.cluster.python, "-c", "import os, pip; print(os.path.dirname(pip.__file__))").strip()
    at.run("ln", "-s", pip, f"{site}/pip")
    for name, version in versions.items():
        file = next(f for known in (OLD, NOW) for f in packages(known) if f.startswith(f"{name}-{version}-"))
        at.run(at.cluster.python, "-m", "zipfile", "-e", f"wheels/{file}", site)
    at.write(env={"venv": f"{HOME}/own"})


def environment_is_gone(at: Place) -> None:
    package_index(at)
    at.write(env={"python": f"{HOME}/gone/bin/python"}, python=at.cluster.python)


def torch_is_missing(at: Place) -> None:
    environment_with(at)


def torch_is_another(at: Place) -> None:
    environment_with(at, **OLD)


def torchvision_is_for_another_torch(at: Place) -> None:
    environment_with(at, torch=NOW["torch"], torchvision=OLD["torchvision"])


def python_is_old(at: Place) -> None:
    at.home("old", OLD_PYTHON, executable=True)
    at.write(python=f"{HOME}/old")


def conda_everywhere(cluster: Hosts) -> None:
    """What conda makes, as far as anybody looks."""
    for host in cluster.names:
        conda_at(cluster, host, "miniconda3")
        write_inventory(host, "env", {"conda": "fl38"})
    Path("environment.yaml").write_text("name: fl38\ndependencies: [python]\n")


def conda_at(cluster: Hosts, host: str, base: str) -> None:
    write_home(cluster, host, f"{base}/envs/fl38/bin/python", f'#!/bin/sh\nexec {cluster.python} "$@"\n')
    write_home(cluster, host, f"{base}/envs/fl38/conda-meta/history", "")
    cluster.run(host, "chmod", "+x", f"{base}/envs/fl38/bin/python")


def conda_is_nowhere(at: Place) -> None:
    at.run("rm", "-r", "miniconda3")
    at.home(".local/bin/micromamba", MICROMAMBA, executable=True)


def conda_is_behind_a_guard(at: Place) -> None:
    at.run("rm", "-r", "miniconda3")
    conda_at(at.cluster, at.host, "tools/weird")
    guard = "case $- in *i*) ;; *) return;; esac\nexport CONDA_EXE=$HOME/tools/weird/bin/conda\n"
    at.home(".bashrc", guard)


# Data


def mnist_everywhere(cluster: Hosts) -> None:
    for folder in (Path(os.environ["HOME"]), *(cluster.path(host, HOME) for host in cluster.names)):
        (folder / DATA).mkdir(parents=True)
        for name, content in idx.mnist().items():
            (folder / DATA / name).write_bytes(content)
    for host in cluster.names:
        cluster.run(host, "chown", "-R", cluster.user, f"{HOME}/sets", user="root")


def data_is_cut_short(at: Place) -> None:
    at.run("truncate", "-s", "500", f"{DATA}/train-images-idx3-ubyte")


def data_is_not_there(at: Place) -> None:
    at.run("rm", "-r", "sets")


# --- Rounds: a fault each on some of four hosts ---------------------------------------------------


@dataclass(frozen=True)
class Round:
    """What is wrong with which host; with all others, nothing."""

    faults: Mapping[str, Fault]
    begin: Callable[[Hosts], object] = lambda _: None
    command: tuple[str, ...] = ()


def ringctl_was_never_there(cluster: Hosts) -> None:
    for host in cluster.names:
        shutil.rmtree(cluster.path(host, OURS))


ROUNDS = {
    "names": Round(
        {
            "server2": Fault("loopback_name", own_name_is_loopback, blocking=False),
            "server3": Fault("alias_missing", alias_is_missing, blocking=False),
            "server4": Fault("alias_elsewhere", alias_leads_elsewhere, blocking=False),
        }
    ),
    "kernel": Round(
        {
            "server2": Fault("multihomed", name_means_docker, blocking=False),
            "server3": Fault("mtu", mtu_is_smaller, blocking=False),
            "server4": Fault("shm", shm_is_tiny, blocking=False),
        }
    ),
    "inventory": Round(
        {
            "server2": Fault("ifname", interface_is_not_there),
            "server3": Fault("ifname", interface_has_no_address),
            "server4": Fault("data_address", data_address_is_another),
        }
    ),
    "firewall of three hosts": Round(
        {
            "server1": Fault("firewall", master_port_is_shut),
            "server3": Fault("firewall", ephemeral_ports_are_shut),
            "server4": Fault("firewall", nothing_gets_out),
        }
    ),
    "firewall between two hosts": Round(
        {
            "server2": Fault("firewall", shut_to_server3),
            "server3": Fault("firewall", shut_to_server2),
            "server4": Fault("nofile", few_files_may_be_open),
        }
    ),
    "storage": Round(
        {
            "server1": Fault("folders", workdir_is_the_systems),
            "server2": Fault("folders", runs_belong_to_root),
            "server3": Fault("disk", disk_is_full, follow=remove_what_nobody_needs),
            "server4": Fault("inodes", inodes_are_gone, follow=remove_what_nobody_needs),
        }
    ),
    "storage, before ringctl was ever there": Round(
        {
            "server1": Fault("folders", home_belongs_to_root, unasked=True),
            "server2": Fault("folders", ringctl_belongs_to_root, unasked=True),
            "server3": Fault("disk", disk_is_full, unasked=True, follow=remove_what_nobody_needs),
            "server4": Fault("inodes", inodes_are_gone, unasked=True, follow=remove_what_nobody_needs),
        },
        begin=ringctl_was_never_there,
    ),
    "shell": Round(
        {
            "server2": Fault("ssh_noise", shell_is_noisy, blocking=False),
            "server3": Fault("stale_env", torchrun_left_a_variable, blocking=False),
            "server4": Fault("clock", clock_is_an_hour_off, blocking=False, follow=set_the_clock),
        }
    ),
    "ssh": Round(
        {
            "server2": Fault("ssh_connect", sshd_is_stopped, unasked=True, follow=start_sshd),
            "server3": Fault("ssh_auth", key_is_refused, unasked=True, follow=copy_the_key),
            "server4": Fault("ssh_hostkey", host_key_is_unknown, unasked=True),
        }
    ),
    "conda": Round(
        {
            "server2": Fault("env_missing", conda_is_nowhere),
            "server3": Fault("conda_shell", conda_is_behind_a_guard, blocking=False),
        },
        begin=conda_everywhere,
    ),
    "environments": Round(
        {
            "server2": Fault("env_missing", environment_is_gone),
            "server3": Fault("torch", torch_is_missing),
            "server4": Fault("python_old", python_is_old, unasked=True),
        }
    ),
    "versions and data": Round(
        {
            "server1": Fault("dataset", data_is_not_there),
            "server2": Fault("versions", torch_is_another),
            "server3": Fault("torchvision", torchvision_is_for_another_torch),
            "server4": Fault("dataset", data_is_cut_short),
        },
        begin=mnist_everywhere,
        command=("--data", f"~/{DATA}"),
    ),
}


@pytest.mark.parametrize("round_", ROUNDS.values(), ids=ROUNDS)
def test_each_fault_is_found_under_its_name_and_gone_once_what_it_says_is_done(
    cluster: Hosts, round_: Round
) -> None:
    round_.begin(cluster)
    with contextlib.ExitStack() as undo:
        places = {host: Place(cluster, host, undo) for host in round_.faults}
        for host, fault in round_.faults.items():
            fault.put(places[host])
        found = look(*round_.command)
        assert names(found) == {(fault.name, host) for host, fault in round_.faults.items()}, remarks(found)
        assert {r.host: r.blocking for r in remarks(found)} == {
            h: f.blocking for h, f in round_.faults.items()
        }
        assert set(found.survey.errors) == {host for host, fault in round_.faults.items() if fault.unasked}
        blocking = any(fault.blocking for fault in round_.faults.values())
        assert found.exit_code == (4 if found.survey.errors else 3 if blocking else 0)
        told = {check["host"]: check["fix"] for check in as_json(found)["checks"] if check["fix"]}
        for host, fault in round_.faults.items():
            fixes = {result.fix for result in remarks(found) if result.host == host}
            assert fixes == {told[host]}  # one for all that is wrong with it
            fault.follow(places[host], next(result for result in remarks(found) if result.host == host))
        again = look(*round_.command)
        assert remarks(again) == []
        assert again.exit_code == 0


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


@pytest.mark.parametrize(
    ("user", "owner", "port", "also"),
    [
        ("train", "pid ", PORT, set()),
        ("root", "a process of root", EPHEMERAL, {("port_ephemeral", "server1")}),
    ],
)
def test_who_has_the_master_port_is_said_and_a_free_one_can_be_had(
    cluster: Hosts, user: str, owner: str, port: int, also: set[tuple[str, str]]
) -> None:
    hosts.inventory(cluster, TWO)
    write_inventory(None, "master_port", port)
    with somebody_at(cluster, port, user):
        found = look()
        assert names(found) == {("port_used", "server1"), *also}
        assert f"port {port} is taken by {owner}" in remarks(found)[0].found
        follow(cluster, remarks(found)[-1])
        assert names(look()) == set()


def test_a_port_that_any_program_may_be_given_is_warned_of(cluster: Hosts) -> None:
    hosts.inventory(cluster, TWO)
    found = look(master_port=EPHEMERAL)
    assert names(found) == {("port_ephemeral", "server1")}
    assert "leave out --master-port" in remarks(found)[0].fix
    assert found.exit_code == 0


def test_an_old_run_of_ours_on_the_port_is_named_and_can_be_stopped(cluster: Hosts) -> None:
    script = f"sleep 1000 | python3 -c {shlex.quote(LISTEN)} $MASTER_PORT"
    options = ("--world", "1", "--detach", "--json", "--master-port", str(PORT))
    run = json.loads(here("launch", *options, "--", "sh", "-c", script))["run"]
    wait_for(lambda: PORT in cluster.listening_ports("server1"), "the old run's port")
    found = look(master_port=PORT)
    assert names(found) == {("port_used", "server1"), ("busy", "server1")}
    assert {result.fix for result in remarks(found)} == {f"ringctl stop {run}"}
    follow(cluster, remarks(found)[0])
    assert names(look(master_port=PORT)) == set()


# --- The same host twice -------------------------------------------------------------------------


def test_one_host_under_two_names_is_refused(cluster: Hosts) -> None:
    hosts.inventory(cluster, TWO, server2={"address": cluster.address("server1")})
    found = look()
    assert {result.name for result in found.blockers} == {"twice"}
    assert "it is the same host as server2" in found.blockers[0].found


def test_hosts_that_know_no_way_to_each_other_are_refused_also_unchecked(cluster: Hosts) -> None:
    hosts.inventory(cluster, TWO, server2={"data_address": "192.0.2.77"})
    said = here("launch", "--skip-preflight", "--", "true", code=3)
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
    hosts.inventory(cluster, ("server1",))
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
    assert remarks(found)[0].fix.startswith("switch it on and plug it in")
    cluster.heal("server2")
    assert names(look()) == set()


def test_a_shell_that_waits_for_something_is_told_of(cluster: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts.inventory(cluster, TWO)
    monkeypatch.setattr("launcher.preflight.survey.FACTS_S", 3.0)
    write_home(cluster, "server2", ".bashrc", "echo your name?; cat >/dev/null\n")
    found = look()
    assert names(found) == {("ssh_connect", "server2")}
    assert "its login shell waits for something; it said: your name?" in remarks(found)[0].found
    assert remarks(found)[0].fix.endswith("~/.bashrc")


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
    good = here("preflight")
    assert "ready: 4 hosts, nothing to remark" in good
    assert "FROM \\ TO" in good, good
    hosts.inventory(cluster, server2={"ifname": "enps1"})
    bad = here("preflight", code=3)
    assert "✗ ifname" in bad
    assert "✗ server2: there is no interface enps1; it has" in bad
    assert "write `ifname: enp1s0` for server2" in bad
    assert "not ready: 1 blocker on 4 hosts" in bad


def test_json_is_as_documented(cluster: Hosts) -> None:
    hosts.inventory(cluster, TWO, server2={"ifname": "enps1"})
    told = json.loads(here("preflight", "--json", code=3))
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
    hosts.inventory(cluster, server1={"ifname": "enps1"}, server4={"ifname": "enps1"})
    told = json.loads(here("preflight", "--world", "2", "--only", "disk,inodes", "--json"))
    assert {(check["name"], check["host"]) for check in told["checks"]} == {
        (name, host) for name in ("disk", "inodes") for host in ("server1", "server2")
    }
    assert "ready: 2 hosts" in here("preflight", "--world", "2", "--skip", "ifname")


@pytest.mark.parametrize("option", ["--only", "--skip"])
def test_a_check_that_does_not_exist_is_refused_with_the_nearest(option: str) -> None:
    said = here("preflight", "--local", option, "firewal", code=2)
    assert f"{option} firewal: there is no such check" in said
    assert "did you mean firewall?" in said


def test_launch_says_what_stands_in_its_way_and_starts_nothing(cluster: Hosts) -> None:
    hosts.inventory(cluster, server2={"ifname": "enps1"}, server3={"ifname": "enps2"})
    said = here("launch", "--", "sleep", "1000", code=3)
    assert "server2: there is no interface enps1" in said
    assert "server3: there is no interface enps2" in said
    assert "nothing was started" in said
    assert not any(cluster.path(host, f"{OURS}/runs").exists() for host in cluster.names)


def test_launch_is_quiet_when_all_is_well_and_about_what_does_no_harm(cluster: Hosts) -> None:
    with contextlib.ExitStack() as undo:
        own_name_is_loopback(Place(cluster, "server2", undo))
        said = here("launch", "--", "true")
    assert "127.0.1.1" not in said
    assert "preflight" not in said


def test_the_page_is_made_from_the_table_of_checks() -> None:
    made = subprocess.run(
        [sys.executable, PROJECT / "scripts" / "checks.py"], capture_output=True, check=True
    )
    assert made.stdout.decode() == (PROJECT / "docs" / "preflight.md").read_text()


# --- Hosts that lie, and strangers ---------------------------------------------------------------

PLAUSIBLE = {
    "home": "/x",
    "cores": 1,
    "free_port": 1,
    "data_address": "10.0.0.1",
    "ifname": "eth0",
    "python": "p",
}
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


@pytest.mark.parametrize("few", [list(LIES)[:3], list(LIES)[3:6], list(LIES)[6:]], ids=" / ".join)
def test_a_host_that_answers_nonsense_harms_nobody_but_itself(cluster: Hosts, few: list[str]) -> None:
    liars = dict(zip(("server2", "server3", "server4"), few, strict=False))
    for host, what in liars.items():
        lie = LIES[what]
        answer = json.dumps({**PLAUSIBLE, **json.loads(lie)}) if lie.startswith("{") else lie
        write_home(cluster, host, "liar", LIAR % answer)
        cluster.run(host, "chmod", "+x", "liar")
        write_inventory(host, "python", f"{HOME}/liar")
    found = look()
    assert {host for _, host in names(found)} == set(liars)
    assert set(found.survey.errors) == set(liars)


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
        hosts.inventory(cluster, TWO, **both)
        found = look()
        assert remarks(found) == []
        assert {facts.data_address for facts in found.survey.facts.values()} == {"10.88.0.1", "10.88.0.2"}
    finally:
        for number, host in enumerate(("server1", "server2"), start=1):
            delete = ["ip", "address", "delete", f"10.88.0.{number}/24", "dev", cluster.ifname(host)]
            cluster.run(host, *delete, user="root")


def test_an_interface_that_has_not_the_data_address_is_refused(cluster: Hosts) -> None:
    hosts.inventory(cluster, TWO, server2={"ifname": "lo", "data_address": cluster.address("server2")})
    found = look()
    assert names(found) == {("ifname", "server2")}
    assert "not the data address" in remarks(found)[0].found


def test_other_data_of_the_same_shape_is_noticed(cluster: Hosts) -> None:
    mnist_everywhere(cluster)
    images = cluster.path("server2", f"{HOME}/{DATA}/train-labels-idx1-ubyte")
    images.write_bytes(images.read_bytes()[:8] + bytes(40))
    found = look("--data", f"{HOME}/{DATA}")
    assert names(found) == {("dataset", "server2")}


def test_a_host_that_is_not_reached_is_said_whatever_was_asked_for(cluster: Hosts) -> None:
    cluster.reset_port("server2", 22)
    said = here("preflight", "--only", "disk", code=4)
    assert "server2: connection refused" in said
    assert "not ready" in said
    assert json.loads(here("preflight", "--only", "disk", "--json", code=4))["ok"] is False
