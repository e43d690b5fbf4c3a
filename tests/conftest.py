"""Every test gets a ringctl home of its own, and fails if it leaves a process, port or temporary file."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

MARK = "RINGCTL_TEST_MARK"

# A shell starts what it puts into the background deaf to Ctrl-C, and so is all that is started from there.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """An own home and TMPDIR for the test, and a look at what is left of it afterwards."""
    mark = f"{os.getpid()}-{request.node.nodeid}"
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("RINGCTL_HOME", str(tmp_path / "ringctl"))
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    for name in ("RINGCTL_HOSTS", "VIRTUAL_ENV", "CONDA_PREFIX", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    ports = listening(mark)
    yield
    assert eventually(lambda: not carrying(mark)), f"processes left behind: {carrying(mark)}"
    assert eventually(lambda: not listening(mark) - ports), f"ports left open: {listening(mark) - ports}"
    assert not list(scratch.iterdir()), f"temporary files left behind: {list(scratch.iterdir())}"


def eventually(condition, seconds: float = 5.0) -> bool:  # type: ignore[no-untyped-def]  # any callable
    """Whether `condition()` comes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def carrying(mark: str) -> dict[int, str]:
    """Living processes that a test started, directly or not."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if f"{MARK}={mark}\0".encode() in (entry / "environ").read_bytes() + b"\0":
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
    return found


def listening(mark: str) -> set[str]:
    """Local addresses that this process, or one that the test started, listens on."""
    sockets = set()
    for pid in {os.getpid(), *carrying(mark)}:
        with contextlib.suppress(OSError):
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    sockets.add(os.readlink(fd))
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.add(fields[1])
    return found
