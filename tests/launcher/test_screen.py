"""What a terminal shows: folded lines, a progress bar, a table, a verdict, and nothing it would obey."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from rich.console import Console

from launcher import fold
from launcher.diagnose import Tails
from launcher.model import Event, HostPlan, Plan, RankSpec, RunState
from launcher.render import LiveScreen
from launcher.watch import Outcome, outcome
from tests.launcher.ringctl import RINGCTL, detach, events, exits, ringctl, wait_for, wait_until_final

RANKS = tuple(RankSpec(r, r, ("t",), {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}) for r in range(4))
PLAN = Plan("r1", "mine", 1, 4, "127.0.0.1", 9, ("t", ":bug: [b]"), (HostPlan("h", "/w", None, True, RANKS),))
SGR = re.compile(r"\x1b\[([0-9;]*)m")
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def plain(shown: str) -> str:
    return ESCAPE.sub("", shown)


def event(kind: str, rank: int, when: float = 1.0, **data: Any) -> Event:
    return Event(kind, when, "r1", 1, "h", rank, data)


def line(rank: int, text: str, stream: str = "out") -> Event:
    return event("line", rank, stream=stream, text=text)


def exited(rank: int, state: str = "succeeded", code: int = 0) -> Event:
    return event("rank_exited", rank, 3.5, state=state, exit_code=code, signal=None, reason="")


def metric(rank: int, **more: Any) -> Event:
    usual = {"epoch": 1, "epochs": 2, "step": 30, "steps": 120, "loss": 0.5, "accuracy": 0.913}
    speed = {"samples_per_s": 1000, "step_ms": 10.0, "comm_ms": 2.5, "bytes_sent": 3_000_000}
    return event("metric", rank, **{**usual, **speed, **more})


class Shown:
    """A LiveScreen on a terminal of paper."""

    def __init__(self, **options: Any) -> None:
        self.paper = io.StringIO()
        self.console = Console(
            force_terminal=True, file=self.paper, width=120, highlight=False, emoji=False, **options
        )
        self.screen = LiveScreen(self.console)
        self.state: RunState = fold.initial(PLAN)

    def happens(self, *happened: Event) -> str:
        """What these events add to the paper; all of one moment."""
        before = len(self.paper.getvalue())
        with self.screen:
            for one in happened:
                self.state = fold.fold(self.state, one)
            self.screen.show(list(happened), self.state)
        return plain(self.paper.getvalue()[before:])

    def ends(self, tails: Tails | None = None) -> tuple[str, Outcome]:
        before = len(self.paper.getvalue())
        how = outcome(self.state, tails or Tails())
        self.screen.finish(how)
        return plain(self.paper.getvalue()[before:]), how


# --- LiveScreen ----------------------------------------------------------------------------------


def test_the_plan_is_shown_as_it_is() -> None:
    shown = Shown()
    shown.screen.plan(PLAN)
    text = plain(shown.paper.getvalue())
    assert "run r1 (mine): 4 ranks on 1 host, master 127.0.0.1:9" in text
    assert "command: t ':bug: [b]'" in text
    assert re.search(r"h +0-3 +lo +1 +as it is +/w", text)


def test_equal_lines_of_one_moment_are_folded_and_others_keep_their_label() -> None:
    text = Shown().happens(*(line(rank, "loading") for rank in range(4)), line(2, "only me"))
    assert "[0-3] loading\n" in text
    assert "[2 h] only me\n" in text
    assert text.count("loading") == 1


def test_progress_is_one_line_with_all_that_is_known() -> None:
    text = Shown().happens(*(metric(rank) for rank in range(4)))
    assert "epoch 1/2  step 30/120  loss 0.500  accuracy 91.3%  4,000 samples/s  communication 25%" in text
    assert "\u2501" in text, "a bar"


def test_before_the_first_metric_the_state_is_shown() -> None:
    assert "running: 4 ranks" in Shown().happens(event("rank_started", 0, pid=1))


def test_the_end_is_a_table_and_a_verdict() -> None:
    shown = Shown()
    shown.happens(
        event("rank_started", 0, pid=1), *(metric(r) for r in range(4)), *(exited(r) for r in range(4))
    )
    text, how = shown.ends()
    assert how.cause is None
    for rank in range(4):
        assert re.search(rf"{rank} +h +succeeded +0 +30 +0\.500 +1,000 +25% +3\.0 MB", text)
    assert text.rstrip().endswith("run r1 succeeded after 2.5 s; test accuracy 91.3%")


def test_a_failure_is_named_before_the_table() -> None:
    shown = Shown()
    happened = [line(1, "OSError: [Errno 28] No space left on device", "err"), exited(1, "failed", 3)]
    shown.happens(event("rank_started", 1, pid=1), *happened, *(exited(rank) for rank in (0, 2, 3)))
    tails = Tails()
    tails.add(happened[0])
    text, _ = shown.ends(tails)
    words = [part.strip() for part in text.strip().splitlines()]
    assert words[0].startswith("failed first: rank 1 on h exited with code 3: OSError: [Errno 28] No space")
    assert any(word.startswith("to do: free some space on h") for word in words)
    assert words[-1] == "run r1 failed after 2.5 s"


@pytest.mark.parametrize("text", ["[bold]not markup[/bold]", "[/]", ":warning: no emoji", "x" * 200])
def test_what_ranks_say_is_shown_and_not_interpreted(text: str) -> None:
    shown = Shown()
    assert f"[0 h] {text}\n" in shown.happens(line(0, text))
    shown.happens(metric(0, step=text, loss=text, epoch=text))
    assert brief_of(text) in plain(shown.paper.getvalue())


def brief_of(text: str) -> str:
    return f"loss {text[:20]}"


EVIL = "\x1b]0;title\x07\x1b[2J" + b"\xff\xfe".decode("utf-8", "surrogateescape") + "\ud800"


def test_nothing_a_rank_says_reaches_the_terminal_as_a_command() -> None:
    shown = Shown()
    tails = Tails()
    tails.add(line(0, f"ValueError: {EVIL}"))
    shown.happens(line(0, EVIL), metric(1, step=EVIL, loss=EVIL), exited(0, "failed", 1))
    shown.happens(*(exited(rank) for rank in (1, 2, 3)))
    shown.ends(tails)
    for seen in (shown.paper.getvalue(), shown.paper.getvalue().encode("utf-8").decode()):
        assert "\x1b]" not in seen
        assert "\x1b[2J" not in seen
        assert "\x07" not in seen
    assert r"[0 h] \x1b]0;title\x07\x1b[2J\xff\xfe\x00" in plain(shown.paper.getvalue())
    assert r"ValueError: \x1b]0;title" in plain(shown.paper.getvalue())


# --- A real terminal -----------------------------------------------------------------------------


@contextmanager
def on_a_terminal(*args: str, **environ: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """ringctl on a pseudo-terminal, and the end of it that we hold."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    process = subprocess.Popen(
        [*RINGCTL, *args],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", **environ},
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield process, ours
    finally:
        os.close(ours)
        process.wait(timeout=60)


def everything(ours: int, until: Callable[[str], bool] = lambda _: False) -> str:
    """What appears on the terminal until it is closed, or `until` is true of it."""
    shown, deadline = b"", time.monotonic() + 60
    while not until(shown.decode(errors="replace")):
        assert time.monotonic() < deadline, shown
        if select.select([ours], [], [], 0.1)[0]:
            try:
                shown += os.read(ours, 65536)
            except OSError:  # how Linux says that nobody holds the other end
                break
    return shown.decode("utf-8").replace("\r\n", "\n")


METRIC = '{\\"step\\": $i, \\"steps\\": 3, \\"loss\\": 0.5, \\"samples_per_s\\": 10, \\"accuracy\\": 0.95}'
TRAIN = f'echo same; for i in 1 2 3; do echo "{METRIC}" >>$RINGCTL_METRICS; sleep 0.3; done; echo by $RANK'


def test_a_run_on_a_terminal_shows_progress_and_folds() -> None:
    with on_a_terminal("launch", "--local", "--world", "4", "--", "sh", "-c", TRAIN) as (process, ours):
        shown = everything(ours)
    assert process.returncode == 0
    text = plain(shown)
    assert "Traceback" not in text
    assert "[0-3] same\n" in text
    assert "[2 localhost] by 2\n" in text
    assert re.search(r"step [123]/3  loss 0\.500  accuracy 95\.0%  40 samples/s", text)
    assert re.search(r"run \S+ succeeded after [\d.]+ s; test accuracy 95\.0%\n", text)
    assert any(colour(code) for code in SGR.findall(shown))
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1, "the cursor is shown again"


def colour(code: str) -> bool:
    """Whether the code of an SGR sequence sets a colour."""
    return any(30 <= int(part or 0) <= 49 or 90 <= int(part or 0) <= 107 for part in code.split(";"))


def test_no_color_is_honoured() -> None:
    script = f"{TRAIN}; echo wrong >&2; exit 3"
    command = ("launch", "--local", "--world", "2", "--", "sh", "-c", script)
    with on_a_terminal(*command, NO_COLOR="1") as (process, ours):
        shown = everything(ours)
    assert process.returncode == 1
    assert "failed first: rank " in plain(shown)
    assert not [code for code in SGR.findall(shown) if colour(code)]
    for args in (("ps",), ("status",), ("logs",), ("launch", "--local", "--dry-run", "--", "true")):
        with on_a_terminal(*args, NO_COLOR="1") as (_, ours):
            assert not [code for code in SGR.findall(everything(ours)) if colour(code)], args


def test_a_dumb_terminal_gets_plain_lines() -> None:
    with on_a_terminal("launch", "--local", "--world", "2", "--", "echo", "hi", TERM="dumb") as (
        process,
        ours,
    ):
        shown = everything(ours)
    assert process.returncode == 0
    assert "\x1b" not in shown
    assert "[0 localhost] hi\n" in shown
    assert "[1 localhost] hi\n" in shown


def test_a_failure_with_stray_bytes_is_shown_to_its_end() -> None:
    script = r"printf 'ValueError: \377\033[2J :warning: [/]\n' >&2; exit 1"
    with on_a_terminal("launch", "--local", "--world", "1", "--", "sh", "-c", script) as (process, ours):
        shown = everything(ours)
    assert process.returncode == 1
    assert (
        r"failed first: rank 0 on localhost exited with code 1: ValueError: \xff\x1b[2J :warning: [/]"
        in shown
    )
    assert "\x1b[2J" not in shown
    with on_a_terminal("logs") as (process, ours):
        shown = everything(ours)
    assert process.returncode == 0
    assert r"ValueError: \xff\x1b[2J :warning: [/]" in shown
    assert "\x1b[2J" not in shown
    assert "Traceback" not in shown


def test_ctrl_c_at_the_terminal_stops_the_run() -> None:
    script = 'trap "echo got TERM; exit 0" TERM; echo up; while :; do sleep 0.05; done'
    with on_a_terminal("launch", "--local", "--world", "2", "--", "sh", "-c", script) as (process, ours):
        everything(ours, until=lambda shown: "[0-1] " in shown and "up" in shown)
        os.killpg(process.pid, signal.SIGINT)  # what a terminal does to all who sit at it
        shown = plain(everything(ours))
    assert process.returncode == 130
    assert "stopping the run; press Ctrl-C again to kill it" in shown
    assert "[0-1] got TERM" in shown
    assert re.search(r"run \S+ stopped after", shown)
    run = re.findall(r"run (\S+) stopped", shown)[0]
    assert {e["reason"] for e in exits(events(run)).values()} == {"stopped"}


def test_logs_on_a_terminal_are_folded_and_in_a_pipe_they_never_are() -> None:
    run = detach(["sh", "-c", "echo same; echo by $RANK"], world=3)
    wait_until_final(run)
    with on_a_terminal("logs", run) as (process, ours):
        shown = plain(everything(ours))
    assert process.returncode == 0
    assert "[0-2] same\n" in shown
    assert ringctl("logs", run).stdout.count("same") == 3


def test_tables_fit_a_terminal() -> None:
    run = detach(["sleep", "600"], world=1, options=["--name", "mine"])
    for args in (("ps",), ("status", run)):
        with on_a_terminal(*args) as (process, ours):
            shown = plain(everything(ours))
        assert process.returncode == 0
        assert run in shown
        assert "running" in shown
        assert max(map(len, shown.splitlines())) <= 120
    ringctl("stop", run)
    wait_for(lambda: "stopped" in ringctl("ps").stdout, "its end")


def test_a_watcher_goes_on_where_nothing_can_be_written_down() -> None:
    words = "from launcher.render import NoteScreen; NoteScreen().note('x'); import os; os.write(2, b'on')"
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-c", words], stdout=full, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"on")
