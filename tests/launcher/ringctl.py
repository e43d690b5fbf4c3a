"""The real `ringctl`, as tests run it."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from tests.conftest import pause
from tests.launcher import warm

# From the very start, where warm.py will not do.
RINGCTL = [sys.executable, "-c", "from launcher.__main__ import main; main()"]


def ringctl(
    *args: str,
    code: int | None = 0,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    input: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run it to the end; `code` is the exit code the test counts on."""
    if input is None:
        done = warm.run(args, cwd, env)
    else:
        command = [*RINGCTL, *args]
        done = subprocess.run(command, cwd=cwd, env=env, input=input, capture_output=True, text=True)
    assert code is None or done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def start(*args: str, **options: Any) -> subprocess.Popen[str]:
    """Start it, with its output in pipes."""
    pipe = subprocess.PIPE
    return subprocess.Popen([*RINGCTL, *args], stdout=pipe, stderr=pipe, text=True, **options)


def unread_pipe() -> BinaryIO:
    """Whose reader has left."""
    reads, writes = os.pipe()
    os.close(reads)
    return os.fdopen(writes, "wb")


def waiting_in(pipe: int) -> int:
    """How many bytes nobody has read yet."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4), sys.byteorder)


def launch(
    command: Sequence[str], *, world: int = 2, options: Sequence[str] = (), code: int | None = 0
) -> list[Any]:
    """Launch on this machine, attached, and return the events."""
    done = ringctl("launch", "--local", "--world", str(world), "--json", *options, "--", *command, code=code)
    return [json.loads(line) for line in done.stdout.splitlines()]


def detach(command: Sequence[str], *, world: int = 2, options: Sequence[str] = ()) -> str:
    """Launch on this machine, detached, and return the run's id."""
    done = ringctl("launch", "--local", "--world", str(world), "--detach", "--json", *options, "--", *command)
    return str(json.loads(done.stdout)["run"])


def run_folder(run: str) -> Path:
    return Path(os.environ["RINGCTL_HOME"]) / "runs" / run


def state(run: str) -> Any:
    return json.loads((run_folder(run) / "state.json").read_text())


def events(run: str) -> list[Any]:
    """The run's events as they are on disk."""
    paths = sorted(run_folder(run).glob("events-*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_bytes().splitlines()]


def lines(events: Sequence[Any], rank: int, stream: str = "out") -> list[str]:
    """What one rank printed."""
    return [e["text"] for e in events if e["kind"] == "line" and e["rank"] == rank and e["stream"] == stream]


def exits(events: Sequence[Any]) -> dict[int, Any]:
    """The final event of each rank; fails if one has several."""
    final: dict[int, Any] = {}
    for event in events:
        if event["kind"] == "rank_exited":
            assert event["rank"] not in final, "two final events for one rank"
            final[event["rank"]] = event
    return final


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 30.0) -> Any:
    """The first true value of `condition()`."""
    deadline = time.monotonic() + seconds
    while True:
        began = time.monotonic()
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        pause(time.monotonic() - began)


def wait_until_final(run: str) -> Any:
    return wait_for(
        lambda: state(run)["state"] in ("succeeded", "failed", "stopped") and state(run), f"the end of {run}"
    )


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
