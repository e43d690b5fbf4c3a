"""Which clusters exist on this machine, so that those of a killed test run can be found and removed.

A record is written before anything is made. It holds no list of processes: whatever holds a cluster
up carries the cluster's mark in its environment, and everything else dies with those processes.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from . import memory, processes
from .commands import ClusterError, wait_until


@dataclass(frozen=True)
class Record:
    """One cluster. `number` is its own among those that exist now and picks its addresses."""

    mark: str
    number: int
    folder: str
    owner_pid: int  # 0: nobody's, it stays until it is taken down
    owner_start: int

    @property
    def link(self) -> str:
        """The controller's interface into the cluster."""
        return f"rc{self.mark}"

    @property
    def stale(self) -> bool:
        return self.owner_pid != 0 and processes.start_time(self.owner_pid) != self.owner_start


def temporary_folder() -> Path:
    """A name for a cluster's folder where none is given; `claim` makes it."""
    return Path(tempfile.gettempdir(), f"ringctl-cluster-{secrets.token_hex(8)}")


def claim(folder: Path, persistent: bool) -> Record:
    """Take a number, after removing what dead owners left behind. The folder must be empty or not exist."""
    with _locked() as home:
        records = _records(home)
        for stale in [record for record in records if record.stale]:
            records.remove(stale)
            _destroy(home, stale)
        if folder.exists() and any(folder.iterdir()):
            raise ClusterError(f"{folder} is not empty; take the cluster down first, or name another folder")
        used = {record.number for record in records}
        record = Record(
            mark=secrets.token_hex(4),
            number=next(number for number in range(256) if number not in used),
            folder=str(folder),
            owner_pid=0 if persistent else os.getpid(),
            owner_start=0 if persistent else processes.start_time(os.getpid()) or 0,
        )
        _write(home, record)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return record


def release(record: Record) -> None:
    """Remove a cluster: its processes, its link, its folder and its record."""
    with _locked() as home:
        _destroy(home, record)


def destroy_clusters(folder: Path | None = None) -> list[str]:
    """Remove the cluster of a folder, and every one whose owner is gone; returns the folders removed."""
    with _locked() as home:
        wanted = str(folder.resolve()) if folder else None
        doomed = [record for record in _records(home) if record.stale or record.folder == wanted]
        for record in doomed:
            _destroy(home, record)
    return [record.folder for record in doomed]


def _destroy(home: Path, record: Record) -> None:
    # A host without namespaces keeps its orphans below its first process, so children go before it.
    def below() -> list[int]:
        return [process.pid for process in processes.descendants(*processes.marked(record.mark))]

    processes.kill_all(below, f"the hosts of {record.folder}")
    processes.kill_all(lambda: processes.marked(record.mark), f"the cluster of {record.folder}")
    memory.lift(record.mark)
    if Path("/sys/class/net", record.link).exists():
        subprocess.run(["ip", "link", "delete", record.link], capture_output=True)
    # The kernel takes namespaces apart in the background; the link's other end may have gone first.
    wait_until(lambda: not Path("/sys/class/net", record.link).exists(), f"removing {record.link}")
    if Path(record.folder).exists():
        shutil.rmtree(record.folder)
    (home / f"{record.mark}.json").unlink(missing_ok=True)


def _write(home: Path, record: Record) -> None:
    unfinished = home / f"{record.mark}.new"
    unfinished.write_text(json.dumps(asdict(record)))
    unfinished.rename(home / f"{record.mark}.json")


def _records(home: Path) -> list[Record]:
    for unfinished in home.glob("*.new"):
        unfinished.unlink()  # its writer was killed before it made anything
    return [Record(**json.loads(path.read_text())) for path in sorted(home.glob("*.json"))]


@contextmanager
def _locked() -> Iterator[Path]:
    """The folder of records, for us alone; it exists only while there are clusters."""
    home = _home()
    descriptor = _lock(home)
    try:
        yield home
    finally:
        if [path.name for path in home.iterdir()] == ["lock"]:
            (home / "lock").unlink()
            home.rmdir()
        os.close(descriptor)


def _lock(home: Path) -> int:
    while True:
        try:
            home.mkdir(mode=0o700, exist_ok=True)
            if home.lstat().st_uid != os.getuid():
                raise ClusterError(f"{home} belongs to someone else")
            descriptor = os.open(home / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # the last cluster went between the two steps
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            if os.fstat(descriptor).st_ino == (home / "lock").stat().st_ino:
                return descriptor
        except FileNotFoundError:
            pass  # its holder removed it while we waited: what we locked is no longer the lock
        os.close(descriptor)


def _home() -> Path:
    if os.getuid() == 0:
        return Path("/run/ringctl-test-clusters")
    return Path(f"/tmp/ringctl-test-clusters-{os.getuid()}")  # not $TMPDIR: others must find it
