"""One test host: a process that holds its namespaces, and, while it is switched on, a first process in them.

The holder keeps what a reboot keeps (disk, name, cables). A boot adds a PID namespace and what a
reboot empties (/tmp, /run, /dev/shm), and is over the moment its first process is killed.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from . import processes
from .commands import SYSTEM_PATH, ClusterError, call, inside, read_line, wait_until
from .guest import SSHD
from .image import GUEST, HOME_INODES, PYTHON, Image, root_spec
from .network import Cable
from .processes import Process

_HELD = ("mount", "uts", "ipc", "net")


class Machine:
    """Lifecycle and inspection of one host. Starting is in two steps so that many can start side by side."""

    def __init__(self, image: Image, cable: Cable, mark: str, folder: Path, shm_size: str) -> None:
        self.image = image
        self.cable = cable
        self.home = f"/home/{image.user}"
        self._environment = {processes.MARK: mark, "PATH": SYSTEM_PATH}
        self._folder = folder
        self._shm_size = shm_size
        self._holder: subprocess.Popen[str] | None = None
        self._boot: subprocess.Popen[str] | None = None
        self._init = 0

    # --- Life ------------------------------------------------------------------------------------

    def begin_build(self) -> None:
        root = self._folder / "root"
        root.mkdir(exist_ok=True)
        guest = str(Path(__file__).with_name("guest.py"))
        python = [sys.executable, "-I", "-S", guest, "build"]
        self._holder = self._start(["unshare", *(f"--{name}" for name in _HELD), *python])
        assert self._holder.stdin
        with self._holder.stdin as stdin:
            json.dump(root_spec(self.image, root), stdin)

    def finish_build(self) -> None:
        self._await_ready(self._holder)

    def begin_boot(self) -> None:
        if self._boot:
            raise ClusterError(f"{self.cable.name} is already running")
        first = [PYTHON, "-I", "-S", GUEST, "boot", str(uuid.uuid4()), self._shm_size]
        unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._boot = self._start([*inside(self.holder, *_HELD), *unshare, *first])

    def finish_boot(self) -> None:
        self._await_ready(self._boot)
        assert self._boot
        self._init = processes.only_child(self._boot.pid)
        wait_until(lambda: 22 in processes.listening_ports(self.init), f"{self.cable.name}: sshd")

    def kill(self) -> None:
        """End every process of the host at once; does nothing when it is off."""
        if self._boot:
            os.kill(self._init or self._boot.pid, signal.SIGKILL)  # its first process, or what would start it
            self._collect(self._boot)
            self._boot, self._init = None, 0

    def collect(self) -> None:
        """Collect what was killed from outside."""
        for process in (self._boot, self._holder):
            if process:
                self._collect(process)
        self._boot, self._holder, self._init = None, None, 0

    @property
    def holder(self) -> int:
        if not self._holder:
            raise ClusterError(f"{self.cable.name} does not exist")
        return self._holder.pid

    @property
    def init(self) -> int:
        """The host's first process, as this machine numbers it."""
        if not self._init:
            raise ClusterError(f"{self.cable.name} is switched off")
        return self._init

    # --- Inside ----------------------------------------------------------------------------------

    def command(self, argv: Sequence[str], user: str) -> list[str]:
        """A command line that runs in the host as one of its users, with what a login there would have."""
        soft, hard = resource.prlimit(self.init, resource.RLIMIT_NOFILE)
        return [
            *inside(self.init, *_HELD, "pid"),
            "setpriv",
            f"--reuid={user}",
            f"--regid={user}",
            "--init-groups",
            "--reset-env",
            "--pdeathsig=KILL",  # so that a caller who gives up ends what it started
            "prlimit",
            f"--nofile={soft}:{hard}",
            "env",
            f"--chdir={'/root' if user == 'root' else self.home}",
            *argv,
        ]

    def processes(self) -> list[Process]:
        return processes.sharing_pid_namespace(self.init) if self._init else []

    def is_idle(self) -> bool:
        """Whether nothing runs but the first process and the sshd that listens."""
        return all(process.host_pid in (1, self._sshd_pid()) for process in self.processes())

    def path(self, inside: str) -> Path:
        """A file of the host, from outside. Absolute symbolic links on the way would leave the host."""
        return Path(f"/proc/{self.init}/root", inside.lstrip("/"))

    # --- sshd and disk ---------------------------------------------------------------------------

    def sshd(self) -> Process | None:
        """The sshd that listens, if it runs."""
        host_pid = self._sshd_pid()
        return next((process for process in self.processes() if process.host_pid == host_pid), None)

    def _sshd_pid(self) -> int | None:
        """As the host numbers it, and sshd's own file says."""
        try:
            return int(self.path("/run/sshd.pid").read_text())
        except FileNotFoundError:
            return None

    def start_sshd(self) -> None:
        call(self.command(SSHD, "root"))
        wait_until(lambda: 22 in processes.listening_ports(self.init), f"{self.cable.name}: sshd")

    def stop_sshd(self) -> None:
        sshd = self.sshd()
        if sshd:
            os.kill(sshd.pid, signal.SIGTERM)
        wait_until(lambda: self.sshd() is None, f"{self.cable.name}: sshd's end")

    def fill_home(self, leave: int) -> None:
        """Shrink the home's file system to what it holds."""

        def done() -> bool:
            state = os.statvfs(self.path(self.home))
            used = (state.f_blocks - state.f_bfree) * state.f_frsize
            return self._remount_home(f"size={used + leave}")  # refused if more was written meanwhile

        wait_until(done, f"{self.cable.name}: filling the disk")

    def use_up_inodes(self) -> None:
        def done() -> bool:
            state = os.statvfs(self.path(self.home))
            return self._remount_home(f"nr_inodes={state.f_files - state.f_ffree}")

        wait_until(done, f"{self.cable.name}: using up inodes")

    def free_home(self) -> None:
        options = f"size={self.image.home_size},nr_inodes={HOME_INODES}"
        if not self._remount_home(options):
            raise ClusterError(f"{self.cable.name}: {self.home} cannot be mounted with {options}")

    def resize_shm(self, size: str) -> None:
        call(self.command(["mount", "-o", f"remount,size={size}", "/dev/shm"], "root"))

    def _remount_home(self, options: str) -> bool:
        argv = self.command(["mount", "-o", f"remount,{options}", self.home], "root")
        return subprocess.run(argv, capture_output=True).returncode == 0

    # --- Processes of ours -----------------------------------------------------------------------

    def _start(self, argv: Sequence[str]) -> subprocess.Popen[str]:
        with (self._folder / "guest.log").open("a") as log:
            return subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self._environment,
                start_new_session=True,  # Ctrl-C is for the tests, not for the hosts
            )

    def _await_ready(self, process: subprocess.Popen[str] | None) -> None:
        assert process
        assert process.stdout
        if process.stdin:
            process.stdin.close()
        with process.stdout as stdout:
            answer = read_line(stdout, self.cable.name)
        if answer != "ready\n":
            log = (self._folder / "guest.log").read_text()
            raise ClusterError(f"{self.cable.name} did not start:\n{log[-2000:]}")

    @staticmethod
    def _collect(process: subprocess.Popen[str]) -> None:
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream:
                stream.close()
