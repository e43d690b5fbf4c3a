"""A run's own copy of its code: whole, or not there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import hostcode
from launcher.hostanswer import Refused
from tests.launcher.ringctl import wait_for

DIGEST = "a" * 64
COPY = "import sys; from launcher.hostcode import copy_code; copy_code(*sys.argv[1:])"


@pytest.fixture
def source() -> Path:
    """A snapshot as it lies on a host, and nothing of the run yet."""
    folder = Path(os.environ["RINGCTL_HOME"]) / "code" / DIGEST
    for n in range(40):
        (folder / f"part{n}").mkdir(parents=True)
        for m in range(40):
            (folder / f"part{n}" / f"{m}.py").write_text(f"{n} {m}\n")
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_copy_that_was_cut_short_is_none(source: Path, tmp_path: Path, number: int) -> None:
    work = tmp_path / "run" / "work"
    work.parent.mkdir()
    copying = subprocess.Popen([sys.executable, "-c", COPY, DIGEST, str(work)], stderr=subprocess.DEVNULL)
    wait_for(lambda: list(work.parent.glob("work.half/*/*")) or copying.poll() is not None, "its beginning")
    copying.send_signal(number)
    copying.wait(30)
    assert copying.returncode != 0, "it was too quick to be cut short"
    assert not work.exists()
    hostcode.copy_code(DIGEST, str(work))
    assert files(work) == files(source)
    assert os.listdir(work.parent) == ["work"]


def test_a_copy_that_fails_leaves_nothing_and_says_why(source: Path, tmp_path: Path) -> None:
    os.mkfifo(source / "part39" / "pipe")
    with pytest.raises(Refused, match=r"^the run's code cannot be copied: .*pipe.* is a named pipe$"):
        hostcode.copy_code(DIGEST, str(tmp_path / "work"))
    assert not list(tmp_path.glob("work*"))


def test_what_a_power_cut_has_shortened_is_mended_and_what_the_run_has_changed_is_not(
    source: Path, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    hostcode.copy_code(DIGEST, str(work))
    cut, changed, removed = (work / "part1" / f"{n}.py" for n in range(3))
    times = cut.stat()
    os.truncate(cut, 1)
    os.utime(cut, ns=(times.st_atime_ns, times.st_mtime_ns))
    changed.write_text("")
    removed.unlink()
    hostcode.mend_copy(DIGEST, str(work))
    assert cut.read_bytes() == (source / "part1" / "0.py").read_bytes()
    assert changed.read_text() == ""
    assert not removed.exists()
