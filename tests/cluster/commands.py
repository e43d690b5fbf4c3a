"""Running the machine's own tools, in the namespaces of a process where wanted."""

from __future__ import annotations

import os
import select
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TypeVar

Item = TypeVar("Item")

# A user's PATH often lacks the folders of ip, nft and sshd.
SYSTEM_PATH = f"{os.environ.get('PATH', '/usr/bin:/bin')}:/usr/local/sbin:/usr/sbin:/sbin"
PATIENCE = 20.0  # seconds for anything that normally takes milliseconds; only a broken machine reaches it


class ClusterError(Exception):
    """The test cluster could not be made or changed."""


def require_tools(*names: str) -> None:
    """Complain once about every missing tool, with the line that installs them all."""
    missing = [name for name in names if find_tool(name) is None]
    if missing:
        packages = " ".join(Path(__file__).with_name("packages.txt").read_text().split())
        raise ClusterError(f"not installed: {', '.join(missing)}; try: apt-get install -y {packages}")


def find_tool(name: str) -> str | None:
    return shutil.which(name, path=SYSTEM_PATH)


def inside(pid: int, *namespaces: str) -> list[str]:
    """The beginning of a command line that runs the rest in these namespaces of a process."""
    return ["nsenter", "--target", str(pid), *(f"--{name}" for name in namespaces), "--"]


def call(argv: Sequence[str], input: str = "") -> str:
    """Run to the end and return what was printed; a failure is a ClusterError with its last words."""
    environment = {**os.environ, "PATH": SYSTEM_PATH}
    done = subprocess.run(
        argv, input=input, capture_output=True, text=True, timeout=PATIENCE, env=environment
    )
    if done.returncode:
        raise ClusterError(f"{' '.join(argv)}: exit {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def side_by_side(step: Callable[[Item], None], items: Iterable[Item]) -> None:
    """Do a step that mostly waits for many items at once; the first failure is raised when all are done."""
    with ThreadPoolExecutor(max_workers=8) as pool:
        list(pool.map(step, items))


def read_line(stream: IO[str], what: str) -> str:
    """One line from a process that was just started; says what it was if none comes."""
    if not select.select([stream], [], [], PATIENCE)[0]:
        raise ClusterError(f"{what}: no answer within {PATIENCE:.0f} s")
    return stream.readline()


def await_ssh(address: str, port: int = 22) -> None:
    """Wait until an sshd answers there."""

    def answers() -> bool:
        try:
            with socket.create_connection((address, port), timeout=1) as connection:
                return connection.recv(4) == b"SSH-"
        except OSError:
            return False

    wait_until(answers, f"sshd at {address}:{port}")


def wait_until(condition: Callable[[], bool], what: str, patience: float = PATIENCE) -> None:
    """Poll until the condition holds."""
    deadline = time.monotonic() + patience
    while not condition():
        if time.monotonic() > deadline:
            raise ClusterError(f"{what}: not within {patience:.0f} s")
        time.sleep(0.01)
