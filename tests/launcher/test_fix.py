"""`preflight --fix`: it mends what is safe to mend, after a yes, on real hosts; all else it leaves alone."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher import inventory, yamltext
from launcher.kit import HERE
from launcher.model import CheckResult, EnvSpec, Facts, Host, PortUse
from launcher.preflight import mend
from launcher.preflight.examine import Examined
from launcher.preflight.mend import Means
from launcher.preflight.survey import Survey
from tests.launcher.hosts import HOME, Hosts, Terminal, host_file, sh, write_home
from tests.launcher.ringctl import launch, lines, ringctl, start, wait_for
from tests.trainer import idx

PORT = 23456
DATA = f"{HOME}/mnist"
LISTEN = f"""
import socket, sys, time
server = socket.create_server(("", {PORT}))
print("up", flush=True)
time.sleep(600)
"""


def hosts_file() -> Path:
    return Path(os.environ["RINGCTL_HOSTS"])


def write_hosts(cluster: Hosts, top: str = "", **of_host: str) -> str:
    """An inventory as people write it, with `top` above the hosts and more keys of some of them."""
    entries = [
        f"  - {{name: {name}, address: {cluster.address(name)}{of_host.get(name, '')}}}  # {name}, of ours"
        for name in cluster.names
    ]
    text = f"""# our servers
{top}
defaults: {{user: train, identity_file: {cluster.identity_file}, env: {{python: {cluster.python}}}}}
hosts:   # in the rack
{chr(10).join(entries)}
"""
    hosts_file().write_text(text)
    return text


def fix(*args: str, code: int | None = 0) -> str:
    """All that `preflight --fix --yes` says."""
    done = ringctl("preflight", "--fix", "--yes", *args, code=code)
    return done.stdout + done.stderr


def put_data(cluster: Hosts, host: str, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        path = cluster.path(host, f"{DATA}/{name}")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        shutil.chown(path.parent, 23001)


def data_here() -> dict[str, bytes]:
    """MNIST's files, packed, on this machine, in the folder of that name in its user's home."""
    files = idx.mnist()
    idx.write(Path(os.environ["HOME"]) / "mnist", files, packed=True)
    return files


# --- Asking --------------------------------------------------------------------------------------


def test_without_a_yes_it_says_what_it_would_do_and_does_nothing(cluster: Hosts) -> None:
    data_here()
    before = write_hosts(cluster, "master_port: 40000", server2=", ifname: eth9")
    done = ringctl("--no-input", "preflight", "--fix", "--", "--data", "~/mnist", code=3)
    assert "would write into" in done.stdout
    assert "master_port: auto, instead of 40000" in done.stdout
    assert "ifname: enp1s0 for server2, instead of eth9" in done.stdout
    assert "would copy the dataset ~/mnist from this machine to server1-4" in done.stdout
    assert "nobody is here to say yes; say it with --yes\nnothing was changed\n" in done.stdout
    assert hosts_file().read_text() == before
    assert not any(cluster.path(host, DATA).exists() for host in cluster.names)
    assert not cluster.path("server1", f"{HOME}/.ringctl/code").exists()


def test_it_asks_whoever_sits_at_a_terminal(cluster: Hosts) -> None:
    before = write_hosts(cluster, server2=", ifname: eth9")
    terminal = Terminal("preflight", "--fix")
    terminal.expect("Do this? [y/N]")
    assert hosts_file().read_text() == before
    terminal.type("y\n")
    assert "ready: 4 hosts" in terminal.finish(0)
    assert hosts_file().read_text() == before.replace("eth9", "enp1s0")


def test_yes_alone_is_refused() -> None:
    assert "write --fix --yes" in ringctl("preflight", "--local", "--yes", code=2).stderr


# --- Mending -------------------------------------------------------------------------------------


def test_it_mends_inventory_code_and_data_and_looks_again(cluster: Hosts) -> None:
    before = write_hosts(cluster, "master_port: 40000  # since 2019", server2=", ifname: eth9")
    files = data_here()
    put_data(cluster, "server3", files)
    put_data(cluster, "server4", {n: c[:100] if "images" in n else c for n, c in files.items()})
    kept = cluster.path("server3", f"{DATA}/train-images-idx3-ubyte").stat()
    done = ringctl("preflight", "--fix", "--yes", "--json", "--", "--data", "~/mnist")
    assert json.loads(done.stdout)["ok"], "one document: the second look"
    assert "server1-2: has the dataset" in done.stderr
    assert hosts_file().read_text() == before.replace("40000", "auto").replace("eth9", "enp1s0")
    assert hosts_file().with_name("hosts.yaml.bak").read_text() == before
    for host, folder in (("server1", "mnist/MNIST/raw"), ("server4", "mnist")):
        there = {path.name: path.read_bytes() for path in cluster.path(host, f"{HOME}/{folder}").iterdir()}
        assert there == files
    assert cluster.path("server3", f"{DATA}/train-images-idx3-ubyte").stat().st_mtime_ns == kept.st_mtime_ns
    assert "there is nothing to mend" in fix("--", "--data", "~/mnist")


def test_what_cannot_be_mended_is_said_of_its_host_and_the_others_are_mended(cluster: Hosts) -> None:
    data_here()
    write_hosts(cluster)
    other = {**idx.mnist(train=50), "t10k-labels-idx1-ubyte": b"cut"}
    put_data(cluster, "server2", other)
    cluster.path("server3", DATA).mkdir()  # root's
    said = fix("--", "--data", "~/mnist", code=3)
    assert f"server2: not mended: {DATA}/train-images-idx3-ubyte is whole but not the same as here" in said
    assert f"server3: not mended: {DATA}/MNIST: Permission denied" in said
    assert "server1,4: has the dataset" in said
    assert {p.name: p.read_bytes() for p in cluster.path("server2", DATA).iterdir()} == other


CONDA = """#!/bin/sh
# Stands in for conda, which cannot be installed here: makes a prefix as it does, with torch in it.
prefix=~/micromamba/envs/fl38
mkdir -p $prefix/bin $prefix/conda-meta
printf '#!/bin/sh\\nexec PYTHON "$@"\\n' >$prefix/bin/python
chmod +x $prefix/bin/python
"""


def with_conda(cluster: Hosts, *hosts: str, and_then: str = "") -> None:
    """An environment.yaml here, and on the hosts something that makes environments, but none."""
    Path("environment.yaml").write_text("name: fl38\ndependencies: [python=3.11]\n")
    for host in hosts:
        write_home(cluster, host, "bin/micromamba", CONDA.replace("PYTHON", cluster.python) + and_then)
        write_home(cluster, host, ".bashrc", "export PATH=$HOME/bin:$PATH\n")
        cluster.run(host, "chmod", "+x", "bin/micromamba")
    text = write_hosts(cluster)
    hosts_file().write_text(text.replace(f"{{python: {cluster.python}}}", "{conda: fl38}"))


def test_a_missing_environment_is_created_where_it_is_missing(cluster: Hosts) -> None:
    with_conda(cluster, *cluster.names)
    sh("server1", "~/bin/micromamba")
    said = fix()
    assert "would create the environment fl38 of environment.yaml on server2-4" in said
    assert f"server2-4: created: {HOME}/micromamba/envs/fl38 (micromamba)" in said


def test_ctrl_c_ends_what_is_under_way_and_begins_nothing_more(cluster: Hosts) -> None:
    with_conda(cluster, "server1", and_then="touch ~/begun\nexec sleep 600\n")
    process = start("preflight", "--fix", "--yes", "--world", "1")
    wait_for(cluster.path("server1", f"{HOME}/begun").exists, "the creation")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted; what was under way there is being ended" in out
    assert "has the code" not in out
    assert not cluster.path("server1", f"{HOME}/.ringctl/code").exists()


# --- The master port -----------------------------------------------------------------------------


@contextlib.contextmanager
def listening(cluster: Hosts, *argv: str, user: str | None = None) -> Iterator[subprocess.Popen[str]]:
    """Somebody who has the port."""
    process = cluster.spawn("server1", *argv, cluster.python, "-c", LISTEN, user=user)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process
    finally:
        process.kill()
        process.communicate()
        for each in cluster.processes("server1"):
            if LISTEN in each.argv:
                os.kill(each.pid, signal.SIGKILL)


def test_what_is_left_of_an_old_run_of_ours_is_ended(cluster: Hosts) -> None:
    before = write_hosts(cluster, f"master_port: {PORT}")
    with listening(cluster, "env", "RINGCTL_RUN=20200101-000000-dead"):
        said = fix("--world", "1")
    assert f"stop run 20200101-000000-dead, which is over, but of which a process has port {PORT}" in said
    assert "server1: run 20200101-000000-dead is stopped" in said
    assert hosts_file().read_text() == before


def test_somebody_elses_process_is_left_alone_and_the_port_is_another(cluster: Hosts) -> None:
    before = write_hosts(cluster, f"master_port: {PORT}")
    with listening(cluster, user="root"):
        said = fix("--world", "1")
        assert PORT in cluster.listening_ports("server1")
    assert "would stop" not in said
    assert hosts_file().read_text() == before.replace(str(PORT), "auto")


def test_a_run_of_ours_that_goes_on_takes_a_yes_of_its_own(cluster: Hosts) -> None:
    write_hosts(cluster, f"master_port: {PORT}")
    Path("listen.py").write_text(LISTEN)
    done = ringctl("launch", "--world", "2", "--detach", "--json", "--", "python", "listen.py", code=None)
    run = json.loads(done.stdout)["run"]
    wait_for(lambda: PORT in cluster.listening_ports("server1"), "its port")
    terminal = Terminal("preflight", "--fix", "--world", "2", "--only", "port_used,busy")
    terminal.expect(f"And stop run {run}, which is still going on and has port {PORT} of server1? [y/N]")
    terminal.type("y\n")
    seen = terminal.finish(0)
    assert f"server1-2: run {run} is stopped" in seen
    assert ringctl("ps", "--json").stdout.count('"stopped"') == 1


# --- /etc/hosts ----------------------------------------------------------------------------------


@contextlib.contextmanager
def names_gone_astray(cluster: Hosts) -> Iterator[str]:
    """On server2 one alias is missing, one leads elsewhere, and its own name means loopback."""
    known = {name: cluster.address(name) for name in cluster.names if name != "server3"}
    with host_file(cluster, "server2", "/etc/hosts", lambda _: ""):
        cluster.write_hosts("server2", {**known, "server4": "10.9.9.9", "server2": "127.0.1.1"})
        text = cluster.path("server2", "/etc/hosts").read_text()
        yield text
    for backup in cluster.path("server2", "/etc").glob("hosts.ringctl-*"):
        backup.unlink()


@contextlib.contextmanager
def sudo(cluster: Hosts, host: str) -> Iterator[None]:
    """A sudo that asks for no password; there is none on this machine that hosts could share."""
    tool = cluster.path(host, "/opt/become")
    shutil.copyfile("/usr/bin/setpriv", tool)
    tool.chmod(0o4755)
    script = '#!/bin/sh\n[ "$1" = -n ] && shift\nexec /opt/become --reuid 0 --regid 0 --clear-groups "$@"\n'
    write_home(cluster, host, "bin/sudo", script)
    write_home(cluster, host, ".bashrc", "export PATH=$HOME/bin:$PATH\n")
    cluster.run(host, "chmod", "+x", "bin/sudo")
    try:
        yield
    finally:
        tool.unlink()


def test_names_are_put_right_with_sudo_and_the_old_file_is_kept(cluster: Hosts) -> None:
    write_hosts(cluster)
    with names_gone_astray(cluster) as before, sudo(cluster, "server2"):
        said = fix()
        after = cluster.path("server2", "/etc/hosts").read_text()
        backups = list(cluster.path("server2", "/etc").glob("hosts.ringctl-*.bak"))
        assert [path.read_text() for path in backups] == [before]
        assert backups[0].name in said
        assert "ready: 4 hosts, nothing to remark" in said
        for name in cluster.names:
            assert f"\n{cluster.address(name)} {name}\n" in after
        assert after.startswith("127.0.0.1 localhost\n")
        assert "10.9.9.9" not in after


def test_without_sudo_the_lines_are_there_to_paste_and_nothing_is_touched(cluster: Hosts) -> None:
    write_hosts(cluster)
    with names_gone_astray(cluster) as before:
        said = fix("--only", "alias_missing", "--exclude", "server4")
        assert "on server2: hosts=$(cat /etc/hosts) && " in said
        assert f"'{cluster.address('server3')} server3' | sudo tee /etc/hosts" in said
        assert "push" not in said  # more than was asked for
        assert cluster.path("server2", "/etc/hosts").read_text() == before


# --- Without hosts -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "names", "after"),
    [
        ("127.0.0.1 localhost\n", {"b": "10.0.0.2"}, "127.0.0.1 localhost\n10.0.0.2 b\n"),
        ("10.0.0.1\ta  # first\n", {"b": "10.0.0.2"}, "10.0.0.1\ta  # first\n10.0.0.2 b\n"),
        ("10.9.9.9 b\n10.0.0.1 a", {"b": "10.0.0.2"}, "10.0.0.1 a\n10.0.0.2 b\n"),
        ("10.9.9.9 b.lan b x # old\n", {"b": "10.0.0.2"}, "10.9.9.9 b.lan x  # old\n10.0.0.2 b\n"),
        ("# b was here\n10.1.1.1 bb\n", {"b": "10.0.0.2"}, "# b was here\n10.1.1.1 bb\n10.0.0.2 b\n"),
    ],
)
def test_a_name_means_one_address_and_the_rest_of_etc_hosts_stays(
    text: str, names: dict[str, str], after: str
) -> None:
    assert mend.etc_hosts(text, names) == after
    assert mend.etc_hosts(after, names) == after


STYLES = {
    "block": ("hosts:\n  - name: a  # one\n    ifname: eth9 # old\n  - b\n", "eth9", "eth0"),
    "quoted": ("hosts:\n- {name: 'a', ifname: \"eth9\"}\n", '"eth9"', "eth0"),
    "flow": ("hosts: [{name: a, slots: 2}, b]  # two\n", "{name: a", "{ifname: eth0, name: a"),
    "name": ("hosts:\r\n  - a   # just a name\r\n  - b\r\n", "- a ", "- {name: a, ifname: eth0} "),
    "defaults": (
        "defaults: {ifname: eth9}\nhosts:\n  -\n    # the first\n    name: a\n    slots: 2\n",
        "    name: a",
        "    ifname: eth0\n    name: a",
    ),
    "umlauts": ("# Rechner für Übungen 😀\nhosts: [{ifname: eth9, name: a}]\n", "eth9", "eth0"),
}


@pytest.mark.parametrize("style", STYLES)
def test_an_interface_is_written_in_whatever_style_the_file_has(style: str) -> None:
    text, old, new = STYLES[style]
    edit = yamltext.host_edit(text, "a", "ifname", "eth0")
    assert edit is not None
    after = yamltext.edited(text, [edit])
    assert after == text.replace(old, new)
    hosts = {host.name: host for host in inventory.parse(after, "hosts.yaml").hosts}
    assert hosts["a"].ifname == "eth0"
    assert hosts["a"].slots == inventory.parse(text, "hosts.yaml").hosts[0].slots


@pytest.mark.parametrize("name", ["on", "1e3", "0x10", "eth0:1", "wlp2s0", "null", "12"])
def test_a_value_that_yaml_would_read_otherwise_is_written_in_quotes(name: str) -> None:
    assert yaml.safe_load(f"{{ifname: {yamltext.scalar(name)}, x: 1}}") == {"ifname": name, "x": 1}


def examined(*results: CheckResult, **facts: Any) -> Examined:
    known = {
        host: Facts(host, "", 1, 20000, f"10.0.0.{number}", "eth0", "", hostname=host, **facts)
        for number, host in enumerate(("a", "b"), 1)
    }
    return Examined((Host("a"), Host("b")), Survey(known, {}), results)


def test_a_firewall_is_only_ever_talked_about() -> None:
    found = examined(CheckResult("firewall", "b", "fail", fix="sudo ufw allow proto tcp from 10.0.0.1"))
    means = Means(inventory.parse("hosts: [a, b]", "hosts.yaml"), text="hosts: [a, b]", sudo=frozenset("ab"))
    assert mend.actions(found, means) == []
    assert mend.by_hand(found, []) == ["on b: sudo ufw allow proto tcp from 10.0.0.1"]


def test_localhost_keeps_its_meaning_also_where_a_host_is_called_so() -> None:
    found = examined(CheckResult("loopback_name", "a", "warn"))
    facts = {**found.survey.facts, "a": Facts("a", "", 1, 1, "10.0.0.1", "eth0", "", hostname="localhost")}
    found = Examined(found.hosts, Survey(facts, {}), found.results)
    assert mend.wrong_names(found) == {}


@pytest.mark.parametrize(("env", "created"), [("fl38", True), ("another", False)])
def test_only_the_environment_that_the_file_here_describes_is_created(env: str, created: bool) -> None:
    host = Host("a", env=EnvSpec("conda", env))
    found = examined(CheckResult("env_missing", "a", "fail", fix="ringctl env create --include a"))
    found = Examined((host, Host("b")), found.survey, found.results)
    means = Means(inventory.parse("hosts: [a, b]", "hosts.yaml"), environment="fl38")
    assert [action.kind for action in mend.actions(found, means)] == ["environment"] * created


@pytest.mark.parametrize(("known", "going_on", "stopped"), [(0, 1, False), (1, 1, True), (0, 0, True)])
def test_only_a_run_that_is_over_or_was_started_from_here_is_stopped(
    known: int, going_on: int, stopped: bool
) -> None:
    port = PortUse(PORT, free=False, run="r1")
    found = examined(CheckResult("port_used", "a", "fail"), port=port, runs=("r1",) * going_on)
    means = Means(inventory.parse("hosts: [a, b]", "hosts.yaml"), runs=frozenset(["r1"] * known))
    assert [action.run for action in mend.actions(found, means)] == ["r1"] * stopped


def test_a_port_from_the_command_line_is_not_looked_for_in_the_file() -> None:
    text = "master_port: 40000\nhosts: [a, b]\n"
    found = examined(CheckResult("port_ephemeral", "a", "warn"))
    hosts = inventory.parse(text, "hosts.yaml")
    assert len(mend.actions(found, Means(hosts, text=text))) == 1
    assert mend.actions(found, Means(hosts, text=text, port_given=True)) == []


def stage(folder: Path, files: dict[str, bytes], sent: dict[str, bytes]) -> Any:
    """What the program on a host answers when it is told of `files` and `sent` arrives."""
    about = [(name, hashlib.sha256(data).hexdigest(), len(data)) for name, data in files.items()]
    request = json.dumps({"folder": str(folder), "files": about}).encode() + b"\n"
    program = "import sys; sys.path += sys.argv[1:]; from launcher import hostdata; hostdata.main()"
    done = subprocess.run(
        [sys.executable, "-I", "-c", program, HERE],
        input=request + zlib.compress(b"".join(sent.values())),
        capture_output=True,
        check=True,
    )
    return json.loads(done.stdout.split(b"\n")[1])


@pytest.mark.parametrize("spoil", [lambda data: data[:-1] + b"!", lambda data: data[:-1]])
def test_data_that_change_on_the_way_are_not_put_in_place(tmp_path: Path, spoil: Any) -> None:
    files = idx.mnist()
    last = list(files)[-1]
    sent = {**files, last: spoil(files[last])}
    assert stage(tmp_path / "mnist", files, sent)["kind"] == "error"
    assert [path for path in (tmp_path / "mnist").rglob("*") if path.is_file()] == []
    assert len(stage(tmp_path / "mnist", files, files)["written"]) == 4
    assert stage(tmp_path / "mnist", files, files)["written"] == []


def test_a_folder_in_the_place_of_a_file_is_named_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    files = idx.mnist()
    taken = tmp_path / "mnist" / "MNIST" / "raw" / next(iter(files))
    taken.mkdir(parents=True)
    assert stage(tmp_path / "mnist", files, files)["error"] == f"{taken} is a folder; move it away"
    assert list(taken.parent.iterdir()) == [taken]


def test_ranks_may_open_as_many_files_as_the_host_allows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("limit.py").write_text("import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
    try:
        for prefork in ("--prefork", "--no-prefork"):
            assert lines(launch(["python", "limit.py"], world=1, options=[prefork]), 0) == [f"{hard} {hard}"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
