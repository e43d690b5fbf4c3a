"""The ranks' environment: found and activated without conda on PATH, created on all hosts, compared."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher import environment, hostactivate, hostanswer, hostprefork
from launcher.environment import Look
from launcher.errors import HostError, InputError, RingctlError
from tests.cluster import Cluster
from tests.launcher import ringctl as tool
from tests.launcher.hosts import HOME, tidy

HOSTS = ("server1", "server2")
ENV = "ring-env"
# Neither PyPI, npm nor Debian has a conda, mamba or micromamba that could be installed here. This stands in
# for them: it notes its arguments, and makes a prefix as they do. All else in these tests is the real thing.
STAND_IN = """#!/bin/sh
echo "$@" >> ~/calls
cp "$(eval echo \\${$#})" ~/seen.yaml
echo "Solving environment: done"
for prefix in $MAMBA_ROOT_PREFIX/envs/NAME; do
  mkdir -p $prefix/bin $prefix/conda-meta
  ln -sf "$(command -v python3)" $prefix/bin/python
done
AND_THEN
"""
GUARD = "case $- in *i*) ;; *) return;; esac\n"  # what Debian's .bashrc begins with


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(2, folder=tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


class Hosts:
    """Two servers with tidy homes, and ringctl as someone uses it who has their key."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.environ = {**os.environ, "HOME": str(cluster.home)}
        for host in HOSTS:
            tidy(cluster, host)

    def sh(self, host: str, script: str) -> str:
        return self.cluster.run(host, "sh", "-c", f"HOME={HOME}; {script}").stdout

    def write(self, host: str, path: str, text: str, executable: bool = False) -> None:
        """A file in the home there."""
        mode = "755" if executable else "644"
        script = f"mkdir -p $(dirname ~/{path}) && cat > ~/{path} && chmod {mode} ~/{path}"
        self.cluster.run(host, "sh", "-c", f"HOME={HOME}; {script}", input=text)

    def conda_prefix(self, host: str, path: str) -> None:
        """A conda environment as far as anyone can see it from outside."""
        self.sh(
            host,
            f"mkdir -p ~/{path}/bin ~/{path}/conda-meta && ln -s $(command -v python3) ~/{path}/bin/python",
        )

    def stand_in(self, host: str, path: str, and_then: str = "", root: str = f"{HOME}/micromamba") -> None:
        text = STAND_IN.replace("NAME", ENV).replace("AND_THEN", and_then).replace("$MAMBA_ROOT_PREFIX", root)
        self.write(host, path, text, executable=True)

    def processes(self, host: str) -> list[str]:
        return [process.name for process in self.cluster.processes(host)]

    def wait_until_idle(self) -> None:
        tool.wait_for(lambda: not any(map(self.processes, HOSTS)), "the end of everything on the hosts")

    def calls(self, host: str) -> list[str]:
        return self.sh(host, "cat ~/calls").splitlines()

    def inventory(self, **of_host: Mapping[str, Any]) -> str:
        """The hosts, with `env: {conda: ENV}` for all; more or other keys of one by its name."""
        data = yaml.safe_load(self.cluster.hosts_file.read_text())
        data["defaults"]["env"] = {"conda": ENV}
        for host in data["hosts"]:
            host.update(of_host.get(host["name"], {}))
        path = self.folder / "hosts.yaml"
        path.write_text(yaml.safe_dump(data))
        return str(path)

    def ringctl(self, *args: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        return tool.ringctl(*args, code=code, cwd=self.folder, env=self.environ)

    def create(self, *args: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        return self.ringctl("env", "create", "--hosts", self.inventory(), *args, code=code)

    def check(self, hosts_file: str, *args: str, code: int | None = 0) -> dict[str, Any]:
        done = self.ringctl("env", "check", "--json", "--hosts", hosts_file, *args, code=code)
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def executables(self, hosts_file: str) -> dict[str, str]:
        """Which Python each host's ranks would run in."""
        return {host["host"]: host["executable"] for host in self.check(hosts_file, code=3)["hosts"]}


@pytest.fixture
def hosts(cluster: Cluster, tmp_path: Path) -> Hosts:
    folder = tmp_path / "project"
    folder.mkdir()
    return Hosts(cluster, folder)


# --- Finding -------------------------------------------------------------------------------------


def test_it_is_found_in_the_usual_places(hosts: Hosts) -> None:
    hosts.conda_prefix("server1", f"miniforge3/envs/{ENV}")
    hosts.conda_prefix("server2", f".local/share/mamba/envs/{ENV}")
    assert hosts.executables(hosts.inventory()) == {
        "server1": f"{HOME}/miniforge3/envs/{ENV}/bin/python",
        "server2": f"{HOME}/.local/share/mamba/envs/{ENV}/bin/python",
    }


def test_it_is_found_through_the_users_environments_txt(hosts: Hosts) -> None:
    hosts.conda_prefix("server1", f"disk/{ENV}")  # made with --prefix
    hosts.write("server1", ".conda/environments.txt", f"{HOME}/gone\n{HOME}/disk/{ENV}\n")
    hosts.conda_prefix("server2", f"disk/conda/envs/{ENV}")  # another one of that conda is noted
    hosts.write("server2", ".conda/environments.txt", f"{HOME}/disk/conda/envs/other\n")
    assert hosts.executables(hosts.inventory()) == {
        "server1": f"{HOME}/disk/{ENV}/bin/python",
        "server2": f"{HOME}/disk/conda/envs/{ENV}/bin/python",
    }


def test_it_is_found_through_the_variables_of_conda_and_mamba(hosts: Hosts) -> None:
    for host, line in (
        ("server1", "CONDA_EXE=~/odd/place/bin/conda"),
        ("server2", "MAMBA_ROOT_PREFIX=~/odd/place"),
    ):
        hosts.conda_prefix(host, f"odd/place/envs/{ENV}")
        hosts.write(host, ".bashrc", f"export {line}\n" + GUARD)
    expected = f"{HOME}/odd/place/envs/{ENV}/bin/python"
    assert set(hosts.executables(hosts.inventory()).values()) == {expected}


def test_it_is_found_when_only_an_interactive_shell_knows_conda(hosts: Hosts) -> None:
    noise = 'echo welcome; sleep 600 & \n eval "$(ssh-agent -s)"\n'
    for host, file in (("server1", ".bashrc"), ("server2", ".profile")):
        hosts.conda_prefix(host, f"odd/place/envs/{ENV}")
        hosts.write(host, file, GUARD + noise + "export MAMBA_ROOT_PREFIX=~/odd/place\n")
    expected = f"{HOME}/odd/place/envs/{ENV}/bin/python"
    assert set(hosts.executables(hosts.inventory()).values()) == {expected}
    hosts.wait_until_idle()
    assert [hosts.sh(host, "ls -d /tmp/ssh-* 2>/dev/null || true") for host in HOSTS] == ["", ""]


def test_a_host_without_it_says_so_and_how_to_get_it(hosts: Hosts) -> None:
    hosts.conda_prefix("server1", f"miniforge3/envs/{ENV}")
    done = hosts.ringctl("env", "check", "--hosts", hosts.inventory(), code=3)
    assert (
        f"error: server2: there is no conda environment '{ENV}' on this host; create it: ringctl env create"
        in done.stderr
    )


# --- Activating ----------------------------------------------------------------------------------

SHOW_ENVIRON = "import json, os, sys; print(json.dumps([sys.executable, dict(os.environ)]))"


def launched(hosts: Hosts, hosts_file: str, code: int = 0) -> list[Any]:
    """Launch a rank on each host that shows its environment; the events."""
    argv = ("launch", "--json", "--hosts", hosts_file, "--", "python", "-c", SHOW_ENVIRON)
    return [json.loads(line) for line in hosts.ringctl(*argv, code=code).stdout.splitlines()]


def test_ranks_have_what_conda_activate_would_give_them(hosts: Hosts) -> None:
    prefix = f"miniconda3/envs/{ENV}"
    for host in HOSTS:
        hosts.conda_prefix(host, prefix)
        scripts = f"{prefix}/etc/conda/activate.d"
        hosts.write(
            host, f"{scripts}/a.sh", 'echo noise; export PLAIN="two words"; unset OF_A_PACKAGE; sleep 600 &\n'
        )
        hosts.write(
            host,
            f"{scripts}/b.sh",
            'words=(one "$PLAIN"); [[ -n $PLAIN ]] && export BASH_ISM="${words[1]}"\n',
        )
        hosts.write(host, f"{scripts}/c.sh", 'export PATH="$CONDA_PREFIX/extra:$PATH"\n')
        hosts.write(
            host,
            f"{prefix}/etc/conda/env_vars.d/p.json",
            '{"OF_A_PACKAGE": "1", "BOTH": "package", "KEPT": "1"}',
        )
        state = {"env_vars": {"BOTH": "user", "GONE": "***unset***", "PATH": "/nowhere", "LINES": "1\n2"}}
        hosts.write(host, f"{prefix}/conda-meta/state", json.dumps(state))
    full = f"{HOME}/{prefix}"
    expected = {
        "CONDA_PREFIX": full,
        "CONDA_DEFAULT_ENV": ENV,
        "PLAIN": "two words",
        "BASH_ISM": "two words",
        "BOTH": "user",
        "KEPT": "1",
        "LINES": "1\n2",
    }
    events = launched(hosts, hosts.inventory())
    for rank in (0, 1):
        ((executable, environ),) = map(json.loads, tool.lines(events, rank))
        assert executable == f"{full}/bin/python"
        assert environ["PATH"].startswith(f"{full}/extra:{full}/bin:/")
        assert {name: environ.get(name) for name in expected} == expected
        assert not {"GONE", "OF_A_PACKAGE"} & set(environ)


def test_an_activation_script_that_ends_the_shell_is_named_and_nothing_is_started(hosts: Hosts) -> None:
    for host in HOSTS:
        hosts.conda_prefix(host, f"miniconda3/envs/{ENV}")
    script = f"miniconda3/envs/{ENV}/etc/conda/activate.d/broken.sh"
    hosts.write("server2", script, "echo no compiler >&2; exit 1\n")
    done = hosts.ringctl("launch", "--hosts", hosts.inventory(), "--", "sleep", "600", code=None)
    assert done.returncode not in (0, 130)
    assert f"server2: {HOME}/{script} did not come to its end; it said: no compiler" in done.stderr
    hosts.wait_until_idle()


@pytest.fixture
def prefix_here(tmp_path: Path) -> Path:
    folder = tmp_path / "prefix" / "etc" / "conda" / "activate.d"
    folder.mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "env").symlink_to("/usr/bin/env")
    return tmp_path / "prefix"


def activated(prefix: Path, script: str) -> dict[str, str]:
    """As on a machine that has no bash."""
    (prefix / "etc/conda/activate.d/a.sh").write_text(script)
    return hostactivate.run_activation_scripts(
        str(prefix), {"PATH": str(prefix.parent / "bin"), "PWD": "/before"}
    )


def test_activation_works_without_bash(prefix_here: Path) -> None:
    assert activated(prefix_here, "cd /tmp; export FROM_SH=1") == {
        "PATH": str(prefix_here.parent / "bin"),
        "PWD": "/before",
        "FROM_SH": "1",
    }


def test_a_script_for_bash_is_named_where_there_is_no_bash(prefix_here: Path) -> None:
    with pytest.raises(
        hostanswer.Refused, match=r"activate\.d/a\.sh did not come to its end; it said: .*yntax error"
    ):
        activated(prefix_here, "words=(one two)")


def test_a_script_that_ends_the_shell_without_a_word_is_quoted_with_none(prefix_here: Path) -> None:
    with pytest.raises(hostanswer.Refused, match=r"activate\.d/a\.sh did not come to its end$"):
        activated(prefix_here, "exit 1")


def test_a_shell_that_hangs_is_given_up_and_ended() -> None:
    began = "echo began >&2; sleep 600"
    assert hostactivate.shell_environ(["sh", "-c", began], dict(os.environ), 1.0) == (None, "began\n")


def test_a_login_shell_that_is_not_there_is_no_login(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", "/no/such/shell")
    monkeypatch.setenv("PATH", "/nowhere")
    assert list(hostactivate.login_environs()) == []


def test_what_a_login_shell_leaves_in_sessions_of_its_own_ends_with_it_and_nothing_else_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / "left"
    notes = f'echo $! >> "{left}"\n'
    program(
        tmp_path / "agent",
        f"#!/bin/sh\ntrap : TERM\nsleep 600 &\n{notes}setsid sleep 600 &\n{notes}wait; wait\n",
    )
    program(tmp_path / "shell", f'#!/bin/sh\nsetsid "{tmp_path}/agent" &\n{notes}sleep 0.2; eval "$2"\n')
    monkeypatch.setenv("SHELL", str(tmp_path / "shell"))
    monkeypatch.setenv("PATH", "/bin:/usr/bin")
    was = hostprefork.is_subreaper()
    with subprocess.Popen(["sleep", "600"]) as ours:
        try:
            assert next(hostactivate.login_environs())["TERM"] == "dumb"
            assert ours.poll() is None
        finally:
            ours.kill()
    pids = [int(pid) for pid in left.read_text().split()]
    assert len(pids) == 3
    assert not any(map(tool.is_alive, pids))
    assert hostprefork.is_subreaper() == was


def test_what_an_activation_leaves_is_for_ranks_and_not_for_a_look(here: Path) -> None:
    script = here / "miniconda3" / "envs" / ENV / "etc/conda/activate.d/agent.sh"
    script.write_text('setsid sleep 600 &\nexport AGENT=$!; echo $! >> "$HOME/began"\n')
    tool.ringctl("preflight", "--deep", code=None)
    tool.ringctl("launch", "--", "sh", "-c", 'kill -0 "$AGENT"')
    pids = [int(pid) for pid in (here / "began").read_text().split()]
    assert len(pids) == 2
    assert not any(map(tool.is_alive, pids))


# --- Creating with conda and its kin -------------------------------------------------------------


def write_file(hosts: Hosts, *packages: str, pip: tuple[str, ...] = ("ringtoy==1.0",)) -> None:
    data = {"name": ENV, "dependencies": [*packages, "pip", {"pip": list(pip)}]}
    (hosts.folder / "environment.yaml").write_text(yaml.safe_dump(data))


def test_each_host_uses_the_tool_it_has_and_does_nothing_when_nothing_changed(hosts: Hosts) -> None:
    hosts.stand_in("server1", ".local/bin/micromamba")
    hosts.stand_in(
        "server2", "miniconda3/bin/conda", root=f"{HOME}/miniconda3", and_then="env | grep YES >> ~/calls"
    )
    write_file(hosts, "python=3.11")
    done = hosts.create()
    for host, prefix in (("server1", "micromamba"), ("server2", "miniconda3")):
        assert f"{host}: Solving environment: done" in done.stdout
        assert f"{host}: created: {HOME}/{prefix}/envs/{ENV} " in done.stdout
        assert hosts.sh(host, "cat ~/seen.yaml") == (hosts.folder / "environment.yaml").read_text()
    file = f"{HOME}/.ringctl/envs/{ENV}/environment.yaml"
    assert hosts.calls("server1") == [f"create -n {ENV} -y -f {file}"]
    first, *asked = hosts.calls("server2")
    assert first == f"env create -n {ENV} -f {file}"
    assert "CONDA_ALWAYS_YES=true" in asked
    again = hosts.create("--json")
    assert {host: done["how"] for host, done in json.loads(again.stdout)["hosts"].items()} == dict.fromkeys(
        HOSTS, "up to date"
    )
    assert len(hosts.calls("server1")) == 1
    write_file(hosts, "python=3.12")
    assert "server1: updated" in hosts.create().stdout
    assert hosts.calls("server1")[1:] == [f"install -p {HOME}/micromamba/envs/{ENV} -y -f {file}"]
    assert f"env update -p {HOME}/miniconda3/envs/{ENV} -f {file}" in hosts.calls("server2")


def test_a_tool_that_only_an_interactive_shell_knows_is_used(hosts: Hosts) -> None:
    for host in HOSTS:
        hosts.stand_in(host, "odd/micromamba", root=f"{HOME}/odd")
        hosts.write(host, ".bashrc", GUARD + "export MAMBA_EXE=~/odd/micromamba MAMBA_ROOT_PREFIX=~/odd\n")
    write_file(hosts)
    hosts.create()
    assert hosts.executables(hosts.inventory())["server2"] == f"{HOME}/odd/envs/{ENV}/bin/python"


def test_what_broke_off_is_not_taken_for_finished_and_can_be_repeated(hosts: Hosts) -> None:
    hosts.stand_in("server1", ".local/bin/micromamba")
    hosts.stand_in("server2", ".local/bin/micromamba", and_then="echo critical: disk full >&2; exit 7")
    write_file(hosts)
    done = hosts.create(code=1)
    assert "server1: created" in done.stdout
    assert "error: server2: micromamba failed with exit code 7" in done.stderr
    assert "\n    critical: disk full\n" in done.stderr
    refused = hosts.ringctl("env", "check", "--hosts", hosts.inventory(), code=3)
    assert f"server2: the environment '{ENV}' on this host is not finished" in refused.stderr
    hosts.stand_in("server2", ".local/bin/micromamba")
    repeated = hosts.create()
    assert "server1: up to date" in repeated.stdout
    assert "server2: created" in repeated.stdout
    assert set(hosts.executables(hosts.inventory())) == set(HOSTS)


def test_a_tool_that_takes_too_long_is_ended(hosts: Hosts) -> None:
    for host in HOSTS:
        hosts.stand_in(host, ".local/bin/micromamba", and_then="trap '' TERM; sleep 600 & sleep 600")
    write_file(hosts)
    done = hosts.create("--timeout", "1", code=1)
    assert "server2: micromamba was not done after 1 s, and was ended" in done.stderr
    hosts.wait_until_idle()


@pytest.mark.parametrize(
    ("how", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)], ids=["Ctrl-C", "KILL"]
)
def test_a_creation_ends_with_the_one_who_asked_for_it(hosts: Hosts, how: signal.Signals, code: int) -> None:
    for host in HOSTS:
        hosts.stand_in(host, ".local/bin/micromamba", and_then="sleep 600")
    write_file(hosts)
    process = tool.start("env", "create", "--hosts", hosts.inventory(), cwd=hosts.folder, env=hosts.environ)
    tool.wait_for(lambda: all("sleep" in hosts.processes(host) for host in HOSTS), "micromamba on both")
    process.send_signal(how)
    process.communicate()
    assert process.returncode == code
    hosts.wait_until_idle()


def test_a_creation_that_is_killed_on_its_host_leaves_nothing_of_its_tool(hosts: Hosts) -> None:
    """Neither in the tool's own session, nor in another."""
    for host in HOSTS:
        hosts.stand_in(host, ".local/bin/micromamba", and_then="setsid sleep 600 & sleep 600 & sleep 600")
    write_file(hosts)
    process = tool.start("env", "create", "--hosts", hosts.inventory(), cwd=hosts.folder, env=hosts.environ)
    tool.wait_for(lambda: all(hosts.processes(host).count("sleep") == 3 for host in HOSTS), "all of it")
    for host in HOSTS:
        makers = [each.pid for each in hosts.cluster.processes(host) if "hostenv" in each.argv]
        os.kill(min(makers), signal.SIGKILL)
    _, errors = process.communicate()
    assert "server1: the creation broke off" in errors
    hosts.wait_until_idle()


TEMPORARY = f"{HOME}/.ringctl/envs/{ENV}/tmp"


def test_what_a_tool_has_put_aside_goes_with_it_however_it_ends(hosts: Hosts) -> None:
    """Ended by Ctrl-C; killed on its host with whoever had started it, by the next creation; by itself."""
    aside = 'mkdir "$TMPDIR/pip-unpack-x" && touch "$TMPDIR/pip-unpack-x/half.whl"\n'
    aside += 'chmod a-w "$TMPDIR/pip-unpack-x"\n'
    write_file(hosts)
    for how in ("Ctrl-C", "KILL"):
        for host in HOSTS:
            hosts.stand_in(host, ".local/bin/micromamba", and_then=aside + "sleep 600")
        process = tool.start(
            "env", "create", "--hosts", hosts.inventory(), cwd=hosts.folder, env=hosts.environ
        )
        tool.wait_for(lambda: all("sleep" in hosts.processes(host) for host in HOSTS), "micromamba on both")
        half = [hosts.cluster.path(host, f"{TEMPORARY}/pip-unpack-x/half.whl") for host in HOSTS]
        assert all(path.exists() for path in half)
        if how == "Ctrl-C":
            process.send_signal(signal.SIGINT)
        else:
            for host in HOSTS:
                makers = [each.pid for each in hosts.cluster.processes(host) if "hostenv" in each.argv]
                os.kill(min(makers), signal.SIGKILL)
        process.communicate()
        hosts.wait_until_idle()
        assert [path.exists() for path in half] == [how == "KILL"] * 2
    for host in HOSTS:
        hosts.stand_in(host, ".local/bin/micromamba", and_then=aside)  # in which the same is not there
    hosts.create()
    assert not any(hosts.cluster.path(host, TEMPORARY).exists() for host in HOSTS)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of an inventory's only host, which is this machine; with a conda environment in it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    prefix = tmp_path / "miniconda3" / "envs" / ENV
    for folder in ("bin", "conda-meta", "etc/conda/activate.d"):
        (prefix / folder).mkdir(parents=True)
    (prefix / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "hosts.yaml").write_text(f"hosts:\n  - {{name: me, local: true, env: {{conda: {ENV}}}}}\n")
    return tmp_path


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def test_where_a_socket_would_have_too_long_a_name_a_tool_has_the_usual_place(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(here / ".local/bin/micromamba", '#!/bin/sh\necho "$TMPDIR" >~/told; exit 1\n')
    (here / "environment.yaml").write_text(f"name: {ENV}\ndependencies: [python]\n")
    monkeypatch.setenv("RINGCTL_HOME", str(here / ("long" * 20)))
    tool.ringctl("env", "create", code=1)
    assert (here / "told").read_text() == f"{os.environ['TMPDIR']}\n"


WAITS = 'sleep 600 & echo $! > "$HOME/began"; wait\n'


@pytest.mark.parametrize("where", ["tool", "activation", "import"])
def test_on_this_machine_too_what_was_begun_ends_with_ctrl_c(here: Path, where: str) -> None:
    prefix, args = here / "miniconda3" / "envs" / ENV, ("preflight", "--deep")
    if where == "tool":
        program(here / ".local/bin/micromamba", f"#!/bin/sh\nsh -c '{WAITS.strip()}'\n")
        args = ("env", "create")
    elif where == "activation":
        (prefix / "etc/conda/activate.d/slow.sh").write_text(WAITS)
    else:
        program(prefix / "bin" / "python", f"#!/bin/sh\n{WAITS}")
    (here / "environment.yaml").write_text(f"name: {ENV}\ndependencies: [python]\n")
    process = tool.start(*args)
    began = here / "began"
    pid = int(tool.wait_for(lambda: began.exists() and began.read_text(), "what it is to end"))
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 130
    assert not tool.is_alive(pid)


# --- Creating without conda ----------------------------------------------------------------------


OFFLINE = ("--no-index", f"--find-links {HOME}")  # lines of the pip part, for hosts without a registry


def push_wheel(hosts: Hosts, host: str, version: str) -> None:
    """A small package into the host's home."""
    about, data = f"ringtoy-{version}.dist-info", io.BytesIO()
    with zipfile.ZipFile(data, "w") as wheel:
        wheel.writestr("ringtoy.py", f"VERSION = {version!r}\n")
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: ringtoy\nVersion: {version}\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    place = hosts.cluster.path(host, f"{HOME}/ringtoy-{version}-py3-none-any.whl")
    place.write_bytes(data.getvalue())
    place.chmod(0o644)


def venv(hosts: Hosts, host: str) -> str:
    return hosts.sh(host, f"readlink -f ~/.ringctl/venvs/{ENV}").strip()


def test_hosts_without_conda_get_a_virtual_environment_of_the_pip_part(hosts: Hosts) -> None:
    push_wheel(hosts, "server1", "1.0")
    write_file(hosts, "python=3.7", "cudatoolkit", pip=(*OFFLINE, "ringtoy==1.0"))
    done = hosts.create("--include", "server1")
    first = venv(hosts, "server1")
    assert f"server1: created: {first} (venv)" in done.stdout
    assert "server1: note: without conda these were left out: cudatoolkit" in done.stdout
    assert "server1: note: the file asks for Python 3.7" in done.stdout
    show = "import os, ringtoy; print(ringtoy.VERSION, os.environ['VIRTUAL_ENV'])"
    argv = (
        "launch",
        "--json",
        "--hosts",
        hosts.inventory(),
        "--include",
        "server1",
        "--",
        "python",
        "-c",
        show,
    )
    events = [json.loads(line) for line in hosts.ringctl(*argv).stdout.splitlines()]
    assert tool.lines(events, 0) == [f"1.0 {first}"]
    assert "server1: up to date" in hosts.create("--include", "server1").stdout

    push_wheel(hosts, "server1", "2.0")
    write_file(hosts, pip=(*OFFLINE, "ringtoy==2.0"))
    both = hosts.create(code=1)
    assert "server1: updated" in both.stdout
    assert "error: server2: pip failed with exit code 1" in both.stderr
    assert "    ERROR: No matching distribution found for ringtoy==2.0" in both.stderr
    answer = hosts.check(hosts.inventory(), "--package", "ringtoy", code=3)
    assert answer["hosts"][0]["packages"]["ringtoy"] == "2.0"
    assert f"server2: there is no conda environment '{ENV}'" in answer["hosts"][1]["error"]
    assert hosts.sh("server1", f"ls -d ~/.ringctl/envs/{ENV}/venv-*").split() == [venv(hosts, "server1")]
    assert hosts.sh("server2", f"ls ~/.ringctl/envs/{ENV}").split() == ["lock", "log", "requirements.txt"]


def test_a_python_that_cannot_make_virtual_environments_is_told_with_what_to_do(hosts: Hosts) -> None:
    write_file(hosts)
    find = "import ensurepip, os; print(os.path.dirname(ensurepip.__file__))"
    folder = hosts.cluster.run("server2", "python3", "-c", find).stdout.strip()
    hosts.cluster.run("server2", "mount", "-t", "tmpfs", "none", folder, user="root")
    try:
        done = hosts.create("--include", "server2", code=1)
    finally:
        hosts.cluster.run("server2", "umount", folder, user="root")
    assert "error: server2: " in done.stderr
    assert "cannot make virtual environments (no ensurepip)" in done.stderr
    assert f"install the package python3.{sys.version_info[1]}-venv" in done.stderr


# --- Comparing -----------------------------------------------------------------------------------


def fake_packages(hosts: Hosts, host: str, **versions: str) -> None:
    """A virtual environment whose packages are there by their records only; nothing is imported anyway."""
    hosts.sh(host, "test -d ~/v || python3 -m venv --without-pip ~/v")
    folder = hosts.sh(host, "rm -rf ~/v/lib/*/site-packages/*; echo ~/v/lib/*/site-packages").strip()
    for name, version in versions.items():
        about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        hosts.write(host, f"{folder[len(HOME) + 1 :]}/{name}-{version}.dist-info/METADATA", about)


SAME = {"torch": "2.13.0+cpu", "torchvision": "0.28.0", "numpy": "2.4.6", "pillow": "12.0.0"}


def test_env_check_shows_what_differs(hosts: Hosts) -> None:
    file = hosts.inventory(server1={"env": {"venv": "~/v"}}, server2={"env": {"venv": "~/v"}})
    for host in HOSTS:
        fake_packages(hosts, host, **SAME)
    same = hosts.ringctl("env", "check", "--hosts", file)
    assert same.stdout.splitlines()[-1] == "the hosts agree"
    assert "2.13.0+cpu" in same.stdout
    assert "*" not in same.stdout

    fake_packages(hosts, "server2", **{**SAME, "torch": "2.12.0", "numpy": "2.0.0"})
    differs = hosts.ringctl("env", "check", "--hosts", file, code=3)
    row = next(line for line in differs.stdout.splitlines() if line.startswith("server2"))
    assert re.split("  +", row)[4:] == ["2.12.0 *", "0.28.0", "2.0.0 *", "12.0.0"]
    assert "torch differs: 2.13.0+cpu on server1; 2.12.0 on server2" in differs.stdout

    fake_packages(hosts, "server2", torch="2.13.0", torchvision="0.28.0", numpy="2.0.0")
    missing = hosts.check(file, code=3)
    assert not missing["ok"]
    assert {one["what"]: one["blocking"] for one in missing["differs"]} == {
        "torch": False,  # another build of the same version
        "numpy": False,
        "pillow": True,
    }


def test_env_check_sees_the_hosts_real_torch(hosts: Hosts) -> None:
    import importlib.metadata

    answer = hosts.check(str(hosts.cluster.hosts_file))
    versions = [host["packages"]["torch"] for host in answer["hosts"]]
    assert versions == [importlib.metadata.version("torch")] * 2
    assert answer["differs"] == []


def test_env_check_and_create_tell_a_host_that_cannot_be_reached_from_the_rest(hosts: Hosts) -> None:
    file = hosts.inventory(server1={"env": {"python": Cluster.python}}, server2={"port": 1})
    done = hosts.ringctl("env", "check", "--hosts", file, code=4)
    assert "server1" in done.stdout
    assert "error: server2: connection refused" in done.stderr
    write_file(hosts)
    hosts.stand_in("server1", ".local/bin/micromamba")
    created = hosts.ringctl("env", "create", "--hosts", file, code=4)
    assert "server1: created" in created.stdout
    assert f"the ranks on server1 run in it once the inventory says env: {{conda: {ENV}}}" in created.stdout


def look(python: str = "3.11.7", **packages: str | None) -> Look:
    return Look(python=python, executable="/e/bin/python", machine="x86_64", packages=packages)


@pytest.mark.parametrize(
    ("looks", "differs", "code"),
    [
        ([look(torch="2.13.0"), look(torch="2.13.0")], {}, 0),
        ([look("3.11.2"), look("3.11.9")], {"python": False}, 0),
        ([look("3.11.2"), look("3.12.2")], {"python": True}, 3),
        ([look(torchvision="0.28.0"), look(torchvision="0.27.0")], {"torchvision": True}, 3),
        ([look(torch="2.13.0+cpu"), look(torch="2.13.0+cu126")], {"torch": False}, 0),
        ([look(numpy=None), look(numpy=None)], {"numpy": True}, 3),
        ([look(), RingctlError("server1: there is none")], {}, 3),
        ([look(numpy=None), HostError("server1", "away")], {"numpy": True}, 4),
    ],
)
def test_what_counts_as_a_difference(
    looks: list[Look | RingctlError], differs: dict[str, bool], code: int
) -> None:
    results = {f"server{number}": look for number, look in enumerate(looks)}
    found = environment.differences({h: one for h, one in results.items() if isinstance(one, Look)})
    assert {one.what: one.blocking for one in found} == differs
    assert environment.exit_code(results, found) == code


def test_the_odd_host_out_is_marked() -> None:
    looks = {
        "a": look(torch="2.12.0"),
        "b": look(torch="2.13.0"),
        "c": look(torch="2.13.0"),
        "d": look(torch=None),
    }
    rows = environment.check_rows(looks, dict.fromkeys(looks))
    assert [row[-1] for row in rows] == ["TORCH", "2.12.0 *", "2.13.0", "2.13.0", "missing *"]
    (one,) = environment.differences(looks)
    assert environment.difference_line(one) == "torch differs: 2.12.0 on a; 2.13.0 on b, c; missing on d"


# --- The file ------------------------------------------------------------------------------------


def test_the_projects_own_file_is_understood() -> None:
    spec = environment.read_spec(Path(environment.__file__).parent.parent / "environment.yaml")
    assert (spec.name, spec.python, spec.conda_only) == ("fl38", "3.11", ())
    assert [line.partition("==")[0] for line in spec.pip] == ["torch", "torchvision", "numpy"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("name: [", "not YAML"),
        ("- torch", "not an environment file"),
        ("dependencies: [python]", "name: write letters"),
        ("name: ../up\ndependencies: []", "name: write letters"),
        ("name: base\ndependencies: []", "not base"),
        ("name: x", "dependencies: write a list"),
        ("name: x\ndependencies: [{pip: torch}]", "pip: write a list"),
        ("name: x\ndependencies: [{pip: [-r more.txt]}]", "'-r more.txt' means a file of this machine"),
        ("name: x\ndependencies: [{pip: [./wheel.whl]}]", "means a file of this machine"),
        ("name: x\ndependencies: [{pip: [-e .]}]", "means a file of this machine"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "environment.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=f"{re.escape(str(path))}: .*{re.escape(complaint)}"):
        environment.read_spec(path)


def test_nothing_is_touched_when_the_file_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("name: x")
    done = tool.ringctl("env", "create", "--file", "other.yaml", "-H", "nowhere", code=2, cwd=tmp_path)
    assert done.stderr == "error: other.yaml: dependencies: write a list of packages\n"


def test_without_a_file_it_says_what_to_write(tmp_path: Path) -> None:
    done = tool.ringctl("env", "create", "-H", "nowhere", code=2, cwd=tmp_path)
    assert "there is no environment.yaml here\n  write one, or name another: --file FILE" in done.stderr
    with pytest.raises(InputError, match=r"other\.yaml: no such file"):
        environment.find_file("other.yaml")


def test_a_comment_does_not_make_it_another_environment(tmp_path: Path) -> None:
    file = tmp_path / "environment.yml"
    digests = []
    for text in (
        "name: x\ndependencies: [python]",
        "# new\nname: x\ndependencies:\n- python",
        "name: x\ndependencies: []",
    ):
        file.write_text(text)
        digests.append(environment.read_spec(file).digest)
    assert digests[0] == digests[1] != digests[2]
