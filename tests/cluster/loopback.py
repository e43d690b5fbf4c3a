"""Several sshds on loopback addresses and high ports, for what needs no namespaces. Anyone may start it.

The hosts share this machine's files and processes, but each has its own host key, home folder
(through $HOME), temporary folder and sshd, and knows the processes that came of its connections.
"""

from __future__ import annotations

import os
import pwd
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from . import processes, registry
from .access import AccessFiles, Door, new_key, write_access
from .commands import ClusterError, await_ssh, find_tool, read_line, require_tools, side_by_side, wait_until

# Root's sshd wants /run/sshd and a password that is not locked; in a mount namespace both leave no trace.
_AS_ROOT = """\
mount -t tmpfs tmpfs /run && mkdir -m 0755 /run/sshd &&
sed 's/^\\([^:]*\\):[^:]*/\\1:*/' /etc/shadow >/run/shadow && mount --bind /run/shadow /etc/shadow &&
exec "$@"
"""
_SSHD_CONFIG = """\
ListenAddress {address}:{port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile {folder}/sshd.pid
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PrintMotd no
AcceptEnv LANG LC_*
SetEnv "HOME={folder}/home" "TMPDIR={folder}/tmp" "PATH={path}"
Subsystem sftp internal-sftp
"""


class LoopbackCluster(AccessFiles):
    """N hosts that are sshds of the current user, made by `with` or `start()` and gone after it."""

    python = sys.executable

    def __init__(self, hosts: int = 4, *, folder: Path | None = None) -> None:
        super().__init__((folder or registry.temporary_folder()).resolve())
        self.user = pwd.getpwuid(os.getuid()).pw_name
        self.names = tuple(f"server{index + 1}" for index in range(hosts))
        self._record: registry.Record | None = None
        self._doors: dict[str, Door] = {}
        # A host's first process adopts what its sshd leaves behind; another start of sshd adds one.
        self._firsts: dict[str, list[subprocess.Popen[str]]] = {name: [] for name in self.names}

    # --- Life ------------------------------------------------------------------------------------

    def __enter__(self) -> LoopbackCluster:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> LoopbackCluster:
        """Returns when every sshd answers; leaves nothing behind if that fails."""
        require_tools("sshd", "ssh", *(["unshare"] if os.getuid() == 0 else []))
        self._record = registry.claim(self.folder, persistent=False)
        try:
            for index, name in enumerate(self.names):
                address = f"127.213.{self._record.number}.{index + 1}"
                self._doors[name] = Door(name, address, _free_port(address), new_key())
            self._write_files()
            side_by_side(self.start_sshd, self.names)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Remove everything; may be repeated."""
        if self._record:
            registry.release(self._record)
            self._record = None
        for name in self.names:
            self._collect(name)

    # --- Looking ---------------------------------------------------------------------------------

    def address(self, host: str) -> str:
        return self._doors[host].address

    def port(self, host: str) -> int:
        return self._doors[host].port

    def path(self, host: str, path: str) -> Path:
        """A file in a host's home folder."""
        return self._folder(host) / "home" / path

    def processes(self, host: str) -> list[processes.Process]:
        """What came of a host's connections and still runs, also what left its session."""
        firsts = [first.pid for first in self._firsts[host]]
        return [process for process in processes.descendants(*firsts) if process.name != "sshd"]

    # --- Changing --------------------------------------------------------------------------------

    def start_sshd(self, host: str) -> None:
        """Returns when it listens."""
        assert self._record
        sshd = [find_tool("sshd") or "sshd", "-D", "-f", f"{self._folder(host)}/sshd_config"]
        guest = [sys.executable, "-I", "-S", str(Path(__file__).with_name("guest.py")), "reap"]
        as_root = ["unshare", "--mount", "sh", "-c", _AS_ROOT, "sh"] if os.getuid() == 0 else []
        with (self._folder(host) / "guest.log").open("a") as log:
            first = subprocess.Popen(
                [*as_root, *guest, *sshd, "-E", f"{self._folder(host)}/sshd.log"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, processes.MARK: self._record.mark},
                start_new_session=True,
            )
        self._firsts[host].append(first)
        assert first.stdout
        with first.stdout as stdout:
            read_line(stdout, host)
        await_ssh(self.address(host), self.port(host))

    def stop_sshd(self, host: str) -> None:
        """New connections are refused; those that exist go on."""
        pid_file = self._folder(host) / "sshd.pid"
        if pid_file.exists():
            os.kill(int(pid_file.read_text()), signal.SIGTERM)
        wait_until(lambda: not pid_file.exists(), f"{host}: sshd's end")

    def kill_host(self, host: str) -> None:
        """End sshd and all that came of its connections."""
        firsts = [first.pid for first in self._firsts[host]]
        processes.kill_all(lambda: [process.pid for process in processes.descendants(*firsts)], host)
        for first in self._firsts[host]:
            first.kill()
        self._collect(host)
        (self._folder(host) / "sshd.pid").unlink(missing_ok=True)

    # --- Parts -----------------------------------------------------------------------------------

    def _folder(self, host: str) -> Path:
        if host not in self._doors:
            raise ClusterError(f"no host {host}; there are: {', '.join(self._doors)}")
        return self.folder / "hosts" / host

    def _write_files(self) -> None:
        identity = new_key()
        write_access(self, list(self._doors.values()), identity, self.user, self.python)
        path = f"{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin"
        for name, door in self._doors.items():
            folder = self._folder(name)
            for part in ("home", "tmp"):
                (folder / part).mkdir(parents=True)
            key = folder / "host_key"
            key.touch(mode=0o600)
            key.write_text(door.host_key.private)
            (folder / "authorized_keys").write_text(identity.public + "\n")
            config = _SSHD_CONFIG.format(address=door.address, port=door.port, folder=folder, path=path)
            (folder / "sshd_config").write_text(config)

    def _collect(self, host: str) -> None:
        for first in self._firsts[host]:
            first.wait()
        self._firsts[host].clear()


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port
