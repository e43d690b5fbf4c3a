"""What a launch shows, and Ctrl-C: readers that are slow, have stopped to read, or are gone."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import click
import pytest

from launcher import output
from launcher.errors import RingctlError
from launcher.output import Count, Output, Regardless


@contextlib.contextmanager
def a_reader(folder: Path) -> Iterator[FileIO]:
    """That of a pipe which is our stdout meanwhile; our stderr is a file."""
    reads, writes = os.pipe()
    with (
        open(reads, "rb", buffering=0) as reader,
        open(writes, "w") as out,
        open(folder / "stderr", "w") as err,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        yield reader


def read_from(reader: FileIO, size: int, pause: float = 0.0) -> tuple[threading.Thread, bytearray]:
    """So many bytes, beside the test."""
    got = bytearray()

    def read() -> None:
        while len(got) < size:
            time.sleep(pause)
            got.extend(reader.read(4096))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread, got


MUCH = b"x" * 200_000  # more than a pipe takes


def test_a_slow_reader_gets_all_of_it_also_after_ctrl_c(tmp_path: Path) -> None:
    interrupts = Count()
    interrupts.count = 1
    with a_reader(tmp_path) as reader:
        thread, got = read_from(reader, len(MUCH), pause=0.005)
        Output(interrupts).write(MUCH)
        thread.join(30)
    assert got == MUCH


def test_ctrl_c_is_acted_on_while_nobody_reads_and_then_nobody_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "UNREAD_S", 0.3)
    interrupts = Count()

    def act() -> None:
        interrupts.count = max(interrupts.count, int(not output.takes(sys.stdout)))

    interrupts.act = act
    with a_reader(tmp_path) as reader:
        shown = Output(interrupts)
        shown.write(MUCH)
        shown.write(MUCH)
        shown.note("goes on")
        kept = reader.read(len(MUCH))
    assert (tmp_path / "stderr").read_text() == f"{output.UNSHOWN}\ngoes on\n"
    assert 0 < len(kept) < len(MUCH)


def test_what_an_interruption_cut_comes_before_what_is_shown_next(tmp_path: Path) -> None:
    interrupts = Count()

    def interrupt() -> None:
        if not output.takes(sys.stdout):
            raise KeyboardInterrupt

    interrupts.act = interrupt
    with a_reader(tmp_path) as reader:
        shown = Output(interrupts)
        with pytest.raises(KeyboardInterrupt):
            shown.write(MUCH)
        interrupts.act = lambda: None
        thread, got = read_from(reader, len(MUCH) + 4)
        shown.write(b"next")
        thread.join(30)
    assert got == MUCH + b"next"


def test_a_reader_who_leaves_without_ctrl_c_is_told_of(tmp_path: Path) -> None:
    with a_reader(tmp_path) as reader:
        reader.close()
        with pytest.raises(BrokenPipeError):
            Output().write(b"x\n")


@pytest.mark.parametrize("pressed", [0, 1])
def test_what_is_to_go_on_regardless_does_and_its_reader_is_missed_at_the_end(
    tmp_path: Path, pressed: int
) -> None:
    interrupts = Count()
    with a_reader(tmp_path) as reader:
        reader.close()
        shown, before = Output(interrupts), (sys.stdout, sys.stderr)
        with Regardless() as regardless:
            shown.write(b"x\n")
            click.echo("x")
            print("x" * 100_000)
            click.echo("this is read", err=True)
            shown.note("this, too")
            interrupts.count = pressed
            with contextlib.nullcontext() if pressed else pytest.raises(BrokenPipeError):
                shown.catch_up(regardless)
            assert (sys.stdout, sys.stderr) == before
    said = f"this is read\nthis, too\n{output.UNSHOWN if pressed else ''}"
    assert (tmp_path / "stderr").read_text().strip() == said.strip()


def test_where_all_was_read_nothing_is_missed(tmp_path: Path) -> None:
    with a_reader(tmp_path) as reader:
        with Regardless() as regardless:
            print("first", end=" ")
            Output().write(b"second\n")
            print("third", end="\n")
            Output().catch_up(regardless)
        Output().write(b"fourth\n")
        assert reader.read(100) == b"first second\nthird\nfourth\n"


def test_a_reader_who_only_waits_keeps_nothing_from_going_on_and_gets_all_of_it_then(tmp_path: Path) -> None:
    with a_reader(tmp_path) as reader:
        full = fill(sys.stdout.fileno())
        with Regardless() as regardless:
            print("first")
            Output().write(b"second\n" + MUCH)
            thread, got = read_from(reader, full + len("first\nsecond\n") + len(MUCH))
            Output().catch_up(regardless)
            thread.join(30)
    assert got[full:] == b"first\nsecond\n" + MUCH


def fill(descriptor: int) -> int:
    """Of a pipe: how much it has taken."""
    size = 0
    os.set_blocking(descriptor, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            size += os.write(descriptor, b"y" * 4096)
    os.set_blocking(descriptor, True)
    return size


def test_what_a_reader_has_not_taken_when_something_fails_comes_before_that(tmp_path: Path) -> None:
    regardless = Regardless()
    with a_reader(tmp_path) as reader:
        full = fill(sys.stdout.fileno())
        thread, got = read_from(reader, full + 2, pause=0.02)
        with pytest.raises(RingctlError, match="no room"):
            say_and_fail(regardless)
        thread.join(30)
    assert got[full:] == b"x\n"


def test_why_something_fails_is_not_hidden_by_a_reader_who_has_left(tmp_path: Path) -> None:
    regardless = Regardless()
    with a_reader(tmp_path) as reader:
        reader.close()
        with pytest.raises(RingctlError, match="no room"):
            say_and_fail(regardless)
    assert isinstance(regardless.lost, BrokenPipeError)


def say_and_fail(regardless: Regardless) -> None:
    with regardless:
        print("x", flush=True)
        raise RingctlError("no room")
