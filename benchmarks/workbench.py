"""Where a benchmark works: a folder of its own, processes that end with it, contestants taking turns."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measurement import Series, Unit, quantity

BIN = Path(sys.executable).parent
PROGRAMS = Path(__file__).resolve().parent / "programs"
MARK = "BENCH_MARK"  # not RINGCTL_...: ringctl takes those out of the environment of what it starts
LEFT_OVER_S = 5.0  # how long what a benchmark started may take to end by itself
# What must not decide what is run, nor how: as a user has it who set nothing.
OF_THE_CALLER = (
    "RINGCTL_",
    "TORCHELASTIC_",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONUNBUFFERED",
)


class CannotRun(Exception):
    """The benchmark could not be carried out; the message says why."""


@dataclass(frozen=True)
class Workbench:
    """What a benchmark is given. `env` points ringctl at an empty home inside `folder`."""

    name: str
    folder: Path
    env: Mapping[str, str]

    @property
    def errors(self) -> Path:
        """Where the command started last writes its stderr."""
        return self.folder / "stderr"

    def say(self, text: str) -> None:
        """Progress, for whoever waits; the results are on stdout."""
        print(f"{self.name}: {text}", file=sys.stderr, flush=True)

    def run(
        self, argv: Sequence[str], *, timeout: float = 120.0, extra: Mapping[str, str] | None = None
    ) -> bytes:
        """Run a command to its end and return its stdout; raises CannotRun if it fails."""
        with self.start(argv, extra=extra) as process:
            try:
                out, _ = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                raise CannotRun(f"{shlex.join(argv)} did not end within {timeout:.0f} s") from None
        self.must_succeed(process)
        return out

    @contextmanager
    def start(
        self, argv: Sequence[str], *, extra: Mapping[str, str] | None = None
    ) -> Iterator[subprocess.Popen[bytes]]:
        """A command in a process group of its own, its stdout in a pipe; gone at the end of the block."""
        with self.errors.open("wb") as errors:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**self.env, **(extra or {})},
                cwd=self.folder,
                start_new_session=True,
            )
        with process:
            try:
                yield process
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise

    def must_succeed(self, process: subprocess.Popen[bytes]) -> None:
        """Raise CannotRun, with the last of what it said on stderr, if the command failed."""
        if process.returncode:
            said = self.errors.read_text(errors="replace").strip().splitlines()[-5:]
            command = shlex.join(map(str, process.args))  # type: ignore[arg-type]  # `start` gives a list
            raise CannotRun("\n  ".join([f"{command} exited with {process.returncode}", *said]))

    def alternate(
        self,
        what: str,
        contestants: Mapping[str, Callable[[], float]],
        *,
        unit: Unit,
        rounds: int,
        within: float,
    ) -> dict[str, Series]:
        """Let the contestants take turns, A B A B ..., each call giving one figure.

        There are `rounds` rounds, or fewer where another one would not fit into `within` seconds, but
        never less than two."""
        values: dict[str, list[float]] = {name: [] for name in contestants}
        began, longest = time.monotonic(), 0.0
        for number in range(1, rounds + 1):
            start = time.monotonic()
            if number > 2 and start + longest > began + within:
                break
            for name, once in contestants.items():
                values[name].append(once())
            took = time.monotonic() - start
            longest = max(longest, took)
            if took > 1:
                figures = ", ".join(f"{name} {quantity(seen[-1], unit)}" for name, seen in values.items())
                self.say(f"{what}, round {number}: {figures}")
        return {name: Series(name, unit, tuple(seen)) for name, seen in values.items()}


@contextmanager
def workbench(name: str) -> Iterator[Workbench]:
    """A workbench that leaves no process and no file behind, however the block ends."""
    folder = Path(tempfile.mkdtemp(prefix=f"ringctl-bench-{name}-"))
    mark = folder.name
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(OF_THE_CALLER)}
    own = {
        MARK: mark,
        "RINGCTL_HOME": str(folder / "home"),
        "RINGCTL_SLOTS": str(folder / "slots"),
        "TMPDIR": str(folder),
        "PATH": f"{BIN}:{os.environ.get('PATH', os.defpath)}",
        "OMP_NUM_THREADS": "1",  # what torchrun and ringctl give their ranks; spawn would take all cores
    }
    try:
        yield Workbench(name, folder, {**inherited, **own})
    finally:
        end_marked(mark)
        shutil.rmtree(folder)


def end_marked(mark: str) -> None:
    """Wait for every process that a workbench started, directly or not, and kill what does not end."""
    deadline = time.monotonic() + LEFT_OVER_S
    while pids := marked(mark):
        if time.monotonic() > deadline:
            for pid in pids:
                kill(pid)
        time.sleep(0.02)


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it has just ended by itself


def marked(mark: str) -> list[int]:
    """Living processes that carry the mark in their environment."""
    wanted = f"\0{MARK}={mark}\0".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if wanted in b"\0" + (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue  # it is gone, or not ours
    return found


def free_port() -> int:
    """A port that nobody listens on right now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
