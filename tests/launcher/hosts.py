"""The test cluster, as the tests of ringctl over SSH use it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import shutil
import signal
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from launcher.agent import Agent
from launcher.errors import RingctlError
from launcher.inventory import load
from launcher.transport import Pool
from tests.cluster import Cluster
from tests.cluster.image import USER_ID
from tests.cluster.network import Block
from tests.launcher.ringctl import RINGCTL, wait_for

HOME = "/home/train"
OURS = f"{HOME}/.ringctl"
SLOTS = "/var/tmp/ringctl-slots"


# --- The controller's side -----------------------------------------------------------------------


def own_home(cluster: Cluster, folder: Path) -> Path:
    """A home for the controller, with what is needed to reach the hosts."""
    home = folder / "home"
    shutil.copytree(cluster.home, home)
    config = home / ".ssh" / "config"
    config.write_text(config.read_text().replace(str(cluster.home), str(home)))
    return home


def inventory(cluster: Cluster, only: tuple[str, ...] = (), **changes: dict[str, Any]) -> Path:
    """Write the inventory that ringctl finds: the cluster's, some of its hosts, each with changes (a value of
    None takes a key away; `defaults` are the defaults)."""
    content = yaml.safe_load(cluster.hosts_file.read_text())
    content["hosts"] = [host for host in content["hosts"] if not only or host["name"] in only]
    content["master"] = content["hosts"][0]["name"]
    for place in [content["defaults"], *content["hosts"]]:
        place.update(changes.get(place.get("name", "defaults"), {}))
        for key in [key for key, value in place.items() if value is None]:
            del place[key]
    path = Path(os.environ["RINGCTL_HOSTS"])
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def dot_ssh() -> Path:
    return Path(os.environ["HOME"]) / ".ssh"


def ssh_config(text: str) -> None:
    """Put this before what is in ~/.ssh/config: what comes first counts."""
    path = dot_ssh() / "config"
    path.write_text(text + "\n\nHost *\n" + path.read_text())


@contextlib.contextmanager
def agents() -> Iterator[dict[str, Agent]]:
    """The hosts of the inventory in this process, without the command line's start-up time."""
    pool = Pool(no_input=True)
    try:
        hosts = load(Path(os.environ["RINGCTL_HOSTS"])).hosts
        yield {host.name: Agent(host, pool.transport(host)) for host in hosts}
    finally:
        pool.close()


def sh(host: str, script: str) -> str:
    """What a script prints on a host, reached as ringctl reaches it."""
    with agents() as found:
        return found[host].transport.run(["/bin/sh", "-c", script], b"", 30.0).out.decode()


def refusal(host: str) -> RingctlError:
    """Why ringctl cannot reach a host."""
    try:
        with agents() as found:
            found[host].transport.run(["true"], b"", 30.0)
    except RingctlError as error:
        return error
    raise AssertionError(f"{host} let us in")


class Terminal:
    """ringctl on a terminal of its own, which someone types at."""

    def __init__(self, *args: str) -> None:
        self.fd, theirs = pty.openpty()
        self.seen = ""
        self.process = subprocess.Popen(
            [*RINGCTL, *args],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)

    def expect(self, text: str, seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.seen:
            if not self._read(deadline):
                self.process.kill()
                self.process.wait()
                raise AssertionError(f"waited in vain for {text!r}; there was {self.seen!r}")

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def finish(self, code: int) -> str:
        """All that was shown, once it is over."""
        deadline = time.monotonic() + 60.0
        while self._read(deadline):
            pass
        assert self.process.wait(timeout=10) == code, self.seen
        os.close(self.fd)
        return self.seen

    def _read(self, deadline: float) -> bool:
        if not select.select([self.fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return False
        try:
            data = os.read(self.fd, 65536)
        except OSError:  # nobody has the other end any more
            return False
        self.seen += data.decode(errors="replace")
        return bool(data)


def agent_listens() -> bool:
    return subprocess.run(["ssh-add", "-l"], capture_output=True, check=False).returncode != 2


@contextlib.contextmanager
def ssh_agent(*keys: Path) -> Iterator[None]:
    """A real agent that holds these keys."""
    socket = Path(os.environ["TMPDIR"]) / "agent"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(socket)], stdout=subprocess.DEVNULL)
    try:
        os.environ["SSH_AUTH_SOCK"] = str(socket)
        wait_for(agent_listens, "the agent")  # its socket is there a moment before it listens
        for key in keys:
            subprocess.run(["ssh-add", "-q", str(key)], check=True, stderr=subprocess.DEVNULL)
        yield
    finally:
        os.environ.pop("SSH_AUTH_SOCK", None)
        agent.terminate()
        agent.wait()
        socket.unlink(missing_ok=True)


def new_key(path: Path, passphrase: str = "", kind: str = "ed25519") -> Path:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", path.name, "-f", str(path)], check=True
    )
    return path


# --- The hosts' side -----------------------------------------------------------------------------


class Hosts(Cluster):
    """Remembers whose network a test has touched, for that takes time to put right."""

    def __init__(self, hosts: int = 4, **options: Any) -> None:
        super().__init__(hosts, **options)
        self.touched: set[str] = set()

    def cut(self, host: str) -> None:
        self.touched.add(host)
        super().cut(host)

    def _block(self, host: str, *blocks: Block) -> None:
        self.touched.add(host)
        super()._block(host, *blocks)


def mend(cluster: Hosts) -> None:
    """Every cable in, no rule, no connection that one end of does not know the other is gone, and no host
    that remembers for a while that another did not answer."""
    touched = bool(cluster.touched)
    while cluster.touched:
        host = cluster.touched.pop()
        cluster.heal(host)
        cluster.clear_rules(host)
        cluster.end_sessions(host)
    for host in cluster.names if touched else ():
        cluster.run(host, "ip", "neigh", "flush", "all", user="root")


def vanish(cluster: Hosts, host: str, controller: subprocess.Popen[str]) -> None:
    """Take the controller away without a word to the host, whose TCP waits for it for seconds and not for a
    quarter of an hour until it gives up."""
    patience = "/proc/sys/net/ipv4/tcp_retries2"
    cluster.run(host, "sh", "-c", f"echo 3 >{patience}", user="root")
    cluster.cut(host)
    controller.kill()
    controller.communicate()
    try:
        wait_for(lambda: not left_on(cluster), "the end of what nobody waits for")
    finally:
        cluster.run(host, "sh", "-c", f"echo 15 >{patience}", user="root")


def equip(cluster: Hosts) -> None:
    """Have ringctl put its own programs where they are missing; each test doing so would take its time."""
    missing = [host for host in cluster.names if not cluster.path(host, f"{OURS}/kit").exists()]
    if missing:
        with agents() as found:
            for host in missing:
                found[host].runs()


def reset(cluster: Hosts) -> None:
    """Nothing runs, and homes are as on the first day, but for ringctl's own programs."""
    for host in cluster.names:
        for process in cluster.processes(host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        tidy(cluster, host)


def tidy(cluster: Cluster, host: str) -> None:
    """Remove all from the user's home but the way in and ringctl's own programs."""
    shutil.rmtree(cluster.path(host, SLOTS), ignore_errors=True)
    _clear(cluster.path(host, HOME), ".ssh", ".ringctl")
    ours = cluster.path(host, OURS)
    if ours.exists():
        _clear(ours, "kit")
        os.chown(ours, USER_ID, USER_ID)
        ours.chmod(0o700)


def _clear(folder: Path, *but: str) -> None:
    for path in folder.iterdir():
        if path.name not in but:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def left_on(cluster: Cluster) -> dict[str, tuple[list[str], set[int]]]:
    """What runs and what listens on each host besides sshd; hosts where nothing does are left out."""
    found = {}
    for host in cluster.names:
        if cluster.is_idle(host):
            continue  # without a process nothing listens, and the table of ports takes long to read
        running = [" ".join(process.argv)[:200] for process in cluster.processes(host)]
        ports = cluster.listening_ports(host) - {22}
        if running or ports:
            found[host] = (running, ports)
    return found


@contextlib.contextmanager
def host_file(cluster: Cluster, host: str, path: str, change: Any) -> Iterator[None]:
    """Change a file of a host, by a function of its text, for a while."""
    place = cluster.path(host, path)
    before = place.read_text()
    place.write_text(change(before))
    try:
        yield
    finally:
        place.write_text(before)


@contextlib.contextmanager
def sshd_option(cluster: Cluster, host: str, text: str) -> Iterator[None]:
    """A line at the top of a host's sshd_config, where it counts."""
    cluster.stop_sshd(host)
    try:
        with host_file(cluster, host, "/etc/ssh/sshd_config", lambda before: f"{text}\n{before}"):
            cluster.start_sshd(host)
            yield
    finally:
        cluster.stop_sshd(host)
        cluster.start_sshd(host)


def login_shell(cluster: Cluster, host: str, shell: str) -> contextlib.AbstractContextManager[None]:
    return host_file(
        cluster, host, "/etc/passwd", lambda text: text.replace(f"{HOME}:/bin/bash", f"{HOME}:{shell}")
    )


def write_home(cluster: Cluster, host: str, name: str, text: str) -> None:
    """A file in the user's home, as the user would have it: whole from the moment that it is there."""
    script = 'mkdir -p "$(dirname "$0")" && cat >"$0.new" && mv "$0.new" "$0"'
    cluster.run(host, "sh", "-c", script, name, input=text)


@contextlib.contextmanager
def second_user(cluster: Cluster, name: str = "bob") -> Iterator[Path]:
    """Another account on every host, with the same key to it, and an inventory of its own for ringctl."""
    number, home = USER_ID + 1, f"/home/{name}"
    lines = {
        "passwd": f"{name}:x:{number}:{number}::{home}:/bin/bash",
        "group": f"{name}:x:{number}:",
        "shadow": f"{name}:*:19000:0:99999:7:::",
    }
    before = {}
    for host in cluster.names:
        for file, line in lines.items():
            path = cluster.path(host, f"/etc/{file}")
            before[path] = path.read_text()
            path.write_text(f"{before[path]}{line}\n")
        keys = cluster.path(host, f"{home}/.ssh")
        keys.mkdir(parents=True)
        shutil.copy(cluster.path(host, f"{HOME}/.ssh/authorized_keys"), keys)
        for place in (keys.parent, keys, keys / "authorized_keys"):
            os.chown(place, number, number)
            place.chmod(0o600 if place.is_file() else 0o700)
    path = Path(os.environ["RINGCTL_HOSTS"]).with_name(f"{name}.yaml")
    content = yaml.safe_load(Path(os.environ["RINGCTL_HOSTS"]).read_text())
    content["defaults"]["user"] = name
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    try:
        yield path
    finally:
        for path_before, text in before.items():
            path_before.write_text(text)
        for host in cluster.names:
            shutil.rmtree(cluster.path(host, home))


def fingerprint(cluster: Cluster, host: str) -> str:
    """As ssh-keygen shows it."""
    key = cluster.path(host, "/etc/ssh/ssh_host_ed25519_key.pub")
    return subprocess.run(
        ["ssh-keygen", "-lf", str(key)], capture_output=True, text=True, check=True
    ).stdout.split()[1]
