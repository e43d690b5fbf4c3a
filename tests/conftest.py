"""Every test gets a ringctl home of its own, and fails if it leaves a process, port or temporary file."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

MARK = "RINGCTL_TEST_MARK"

# A shell starts what it puts into the background deaf to Ctrl-C, nohup deaf to SIGHUP, and so is all that is
# started from there.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Hundreds of processes import ringctl here: compiling it once is enough, whatever this shell is set to.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


# With a whole file for each worker, what begins last decides when all is done: these take longest, in order.
LONG = (
    "test_ssh_restarts.py", "test_queue.py", "test_ssh_leases.py", "test_ssh_one_end.py", "test_failures.py",
    "test_preflight.py", "test_restarts.py", "test_ssh_launch.py", "test_crash_points.py",
    "test_ssh_serve.py", "test_resume.py", "test_page.py", "test_ssh_logs.py", "test_soak.py",
    "test_page_places.py", "test_remote.py", "test_ssh_ends.py", "test_hostd.py", "test_bench.py",
    "test_large.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
    twice = [name for name, number in Counter(item.nodeid for item in items).items() if number > 1]
    if twice:
        raise pytest.UsageError(f"of tests with the same name workers run one: {', '.join(twice)}")


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """An own home and TMPDIR for the test, and a look at what is left of it afterwards."""
    mark = f"{os.getpid()}-{request.node.nodeid}"
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("RINGCTL_HOME", str(tmp_path / "ringctl"))
    monkeypatch.setenv("RINGCTL_SLOTS", str(tmp_path / "slots"))
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    for name in ("RINGCTL_HOSTS", "VIRTUAL_ENV", "CONDA_PREFIX", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    older, ports = set(os.listdir("/proc")), listening()
    yield
    assert eventually(lambda: not carrying(mark, older)), f"processes left behind: {carrying(mark, older)}"
    assert eventually(lambda: not listening() - ports), f"ports left open: {listening() - ports}"
    assert not list(scratch.iterdir()), f"temporary files left behind: {list(scratch.iterdir())}"


@pytest.fixture(scope="session")
def _torch_for_ddp(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Import once, for all forked ranks, what making a DistributedDataParallel imports: it takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        importlib.import_module("torch._dynamo")


@pytest.fixture
def with_ddp(_torch_for_ddp: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests whose ranks use torch's DistributedDataParallel."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def eventually(condition, seconds: float = 5.0) -> bool:  # type: ignore[no-untyped-def]  # any callable
    """Whether `condition()` comes true in time."""
    deadline = time.monotonic() + seconds
    while True:
        began = time.monotonic()
        if condition():
            return True
        if time.monotonic() > deadline:
            return False
        pause(time.monotonic() - began)


def pause(took: float) -> None:
    """Between two looks. Where a look took long it was work, and others wait for the processors."""
    time.sleep(min(max(0.02, 4 * took), 0.4))


def carrying(mark: str, older: set[str]) -> dict[int, str]:
    """Living processes that a test started, directly or not; none of those that are older than the test."""
    found = {}
    for pid in set(os.listdir("/proc")) - older:
        try:
            if f"{MARK}={mark}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes() + b"\0":
                found[int(pid)] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    return found


def listening() -> set[str]:
    """Addresses that this process listens on. It asks the sockets: the kernel's table takes milliseconds."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listed the folder is gone
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as end:
                    if end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        found.add(str(end.getsockname()))
    return found
