"""Odd places to sit at: a narrow terminal, a dumb one, a closed pipe, Ctrl-Z, a home that is of no use."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from launcher import watching
from tests.launcher.ringctl import (
    RINGCTL,
    detach,
    is_alive,
    ringctl,
    state,
    wait_for,
    wait_until_final,
)

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")


class Terminal:
    """A terminal of some size, what has appeared on it, and the program that sits at it."""

    def __init__(self, argv: list[str], columns: int, **environ: str) -> None:
        self.fd, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.shown = ""
        self.process = subprocess.Popen(
            argv,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm", **environ},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def wait(self, text: str | None = None, seconds: float = 60.0) -> str:
        """Until this has appeared since the last call, or, without it, until everybody has left."""
        deadline = time.monotonic() + seconds
        while text is None or text not in self.shown:
            assert time.monotonic() < deadline, f"waited for {text!r}; there was {self.shown!r}"
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    data = os.read(self.fd, 65536)
                except OSError:  # how Linux says that nobody holds the other end
                    break
                self.shown += ESCAPE.sub("", data.decode(errors="replace"))
        shown, self.shown = self.shown, ""
        return shown


@contextmanager
def terminal(argv: list[str], columns: int = 100, **environ: str) -> Iterator[Terminal]:
    one = Terminal(argv, columns, **environ)
    try:
        yield one
    finally:
        os.close(one.fd)
        one.process.wait(timeout=30)


# --- Terminals -----------------------------------------------------------------------------------

METRIC = '"{\\"step\\": 1, \\"loss\\": 0.5}"'
SAY = f'echo "a line that is longer than the terminal is wide"; echo {METRIC} >>$RINGCTL_METRICS'


def test_on_twenty_columns_everything_is_said() -> None:
    command = ("launch", "--local", "--world", "2", "--name", "narrow", "--", "sh", "-c", SAY)
    with terminal([*RINGCTL, *command], 20) as narrow:
        shown = narrow.wait()
    assert narrow.process.returncode == 0
    assert "Traceback" not in shown
    assert "a line that is longer than the terminal is wide" in shown.replace("\r\n", "")
    (run,) = re.findall(r"\d{8}-\d{6}-[0-9a-f]{4}", ringctl("ps").stdout)
    for args in (("ps",), ("status",), ("preflight", "--local", "--only", "disk")):
        with terminal([*RINGCTL, *args], 20) as narrow:
            shown = narrow.wait()
        assert narrow.process.returncode == 0, shown
        assert "Traceback" not in shown
        if args != ("preflight", "--local", "--only", "disk"):
            assert run in shown.replace("\r\n", ""), "an id that is cut is of no use"


def test_a_dumb_terminal_is_sent_no_commands() -> None:
    wait_until_final(detach(["printf", r"\033]0;title\a\033[2Jhi\n"], world=2))
    again = ("launch", "--local", "--world", "1", "--", "printf", r"\033[2J\n")
    for args in (("ps",), ("status",), ("logs",), again, ("preflight", "--local", "--only", "disk")):
        one = Terminal([*RINGCTL, *args], 60, TERM="dumb")
        raw = b""
        while True:
            try:
                raw += os.read(one.fd, 65536)
            except OSError:
                break
        os.close(one.fd)
        assert one.process.wait(timeout=30) == 0
        assert raw
        assert b"\x1b" not in raw, args


def test_what_would_turn_text_around_is_shown_as_signs() -> None:
    says = r"printf 'ValueError: \342\200\256 fr- mr\n' >&2; exit 1"
    for args in (("launch", "--local", "--world", "1", "--no-prefork", "--", "sh", "-c", says), ("explain",)):
        with terminal([*RINGCTL, *args]) as one:
            shown = one.wait()
        assert ("ValueError: \\u202e fr- mr" in shown, "\u202e" in shown) == (True, False), args


MANY = 6000
COUNT = f"for number in range({MANY}): print('line', number)"
NOT_WAITING = "import os, sys; os.set_blocking(1, False); os.execvp(sys.argv[1], sys.argv[1:])"


@pytest.mark.parametrize("command", ["launch", "logs"])
@pytest.mark.parametrize("buffered", [True, False], ids=["buffered", "unbuffered"])
def test_a_terminal_that_does_not_wait_for_room_is_shown_everything(command: str, buffered: bool) -> None:
    launch = ["launch", "--local", "--world", "1", "--no-prefork", "--", sys.executable, "-c", COUNT]
    if command == "logs":
        ringctl(*launch)
    argv = [sys.executable, "-c", NOT_WAITING, *RINGCTL, *(launch if command == "launch" else ["logs"])]
    with terminal(argv, PYTHONUNBUFFERED="" if buffered else "1") as one:
        shown = one.wait()
    assert one.process.returncode == 0, shown[-500:]
    assert re.findall(r"line (\d+)\b", shown) == [str(number) for number in range(MANY)]


def test_unbuffered_and_interrupted_while_it_writes_nothing_is_missing() -> None:
    ringctl("launch", "--local", "--world", "1", "--no-prefork", "--", sys.executable, "-c", COUNT)
    with terminal([*RINGCTL, "logs"], PYTHONUNBUFFERED="1") as one:
        shown = one.wait("line 500")
        for number in (signal.SIGSTOP, signal.SIGCONT):
            os.kill(one.process.pid, number)
            if number == signal.SIGSTOP:
                wait_for(lambda: not is_running(one.process.pid), "that it stands still")
        shown += one.wait()
    assert re.findall(r"line (\d+)\b", shown) == [str(number) for number in range(MANY)]


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "tT"


def test_what_a_terminal_has_no_letters_for_is_shown_as_signs() -> None:
    says = f"printf '\\342\\234\\223 done\\n'; echo {METRIC} >>$RINGCTL_METRICS"
    command = ("launch", "--local", "--world", "1", "--no-prefork", "--", "sh", "-c", says)
    for args in (command, ("logs",), ("status",), ("ps",)):
        with terminal([*RINGCTL, *args], PYTHONIOENCODING="latin-1", PYTHONUTF8="0") as one:
            shown = one.wait()
        assert one.process.returncode == 0, shown
        assert "Traceback" not in shown
        assert args in (("status",), ("ps",)) or "\\u2713 done" in shown


def test_after_ctrl_z_and_fg_nothing_is_missing() -> None:
    script = 'for i in 1 2 3 4 5 6 7 8 9; do echo "line $i of 9"; sleep 0.1; done'
    command = shlex.join([*RINGCTL, "launch", "--local", "--world", "1", "--", "sh", "-c", script])
    with terminal(["bash", "--norc", "-i"], PS1="ready: ") as one:
        one.wait("ready: ")
        one.type(command + "\n")
        seen = one.wait("] line 1 of 9")
        one.type("\x1a")
        seen += one.wait("Stopped")
        (run,) = Path(os.environ["RINGCTL_HOME"], "runs").iterdir()
        wait_for(lambda: state(run.name)["state"] == "succeeded", "the run to end, while nobody watches")
        one.type("fg\n")
        seen += one.wait("succeeded after")
        seen += one.wait("ready: ")
        one.type("exit\n")
        one.wait()
    assert re.findall(r"\] line (\d) of 9", seen) == [str(number) for number in range(1, 10)]
    assert "lost" not in seen


# --- Pipes ---------------------------------------------------------------------------------------


OFTEN = ["--local", "--world", "1", "--max-restarts", "2", "--restart-delay", "0.1"]


def failing_once(gate: Path) -> str:
    """What says `here`, waits for the gate, and fails the first time."""
    wait = f'while ! [ -e "{gate}" ]; do sleep 0.02; done'
    return f'printf "he%s\\n" re; {wait}; [ $RINGCTL_ATTEMPT = 2 ]'


def goes_on_watched(run: str, gate: Path) -> None:
    """To its second attempt, without any command."""
    wait_for(lambda: is_there(run), "a watcher")
    watch = watching.read(run)
    assert watch is not None
    assert not watch.here
    gate.touch()
    wait_for(lambda: state(run)["attempt"] == 2 and state(run)["state"] == "succeeded", "the second attempt")
    wait_for(lambda: not is_alive(watch.pid), "its watcher's end")


def is_there(run: str) -> bool:
    watch = watching.read(run)
    return watch is not None and not watch.here and is_alive(watch.pid)


def test_a_launch_whose_terminal_is_closed_has_somebody_else_watch_the_run(tmp_path: Path) -> None:
    one = Terminal([*RINGCTL, "launch", *OFTEN, "--", "sh", "-c", failing_once(tmp_path / "gate")], 100)
    run = re.findall(r"run (\S+): 1 rank", one.wait(": 1 rank"))[0]
    one.wait("here")
    os.close(one.fd)
    assert one.process.wait(timeout=30) == -signal.SIGHUP
    assert is_there(run), "before the launch had ended"
    goes_on_watched(run, tmp_path / "gate")


def test_a_launch_that_stood_still_when_its_terminal_was_closed_has_so_too(tmp_path: Path) -> None:
    """Its shell sends what it has stopped two signals at once."""
    command = [*RINGCTL, "launch", *OFTEN, "--", "sh", "-c", failing_once(tmp_path / "gate")]
    one = Terminal(["bash", "--norc", "-i"], 100, PS1="ready: ")
    one.wait("ready: ")
    one.type(shlex.join(command) + "\n")
    run = re.findall(r"run (\S+): 1 rank", one.wait(": 1 rank"))[0]
    one.wait("] here")
    one.type("\x1a")
    one.wait("Stopped")
    os.close(one.fd)
    one.process.wait(timeout=30)
    goes_on_watched(run, tmp_path / "gate")


def test_a_reader_who_leaves_or_never_was_is_no_reason_for_a_traceback() -> None:
    wait_until_final(detach(["sh", "-c", "seq 1 20000"], world=1))
    for args in ("logs | head -n 1", "ps --json | true", "status >&-", "ps >/dev/full", "logs >/dev/full"):
        line = f"{shlex.join(RINGCTL)} {args}"
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
        assert "Traceback" not in done.stderr, args
        assert "Exception ignored" not in done.stderr, args
        full = args.endswith("full")
        assert done.returncode == int(full), args
        assert ("a disk that is full" in done.stderr) is full, args


def test_a_launch_whose_reader_leaves_says_that_the_run_goes_on() -> None:
    line = f"{shlex.join(RINGCTL)} launch --local --world 1 -- sh -c 'seq 1000; sleep 600' | head -n 2"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "a run that was started goes on" in done.stderr) == (1, True)
    ringctl("stop")


# --- Homes ---------------------------------------------------------------------------------------


def in_a_home(set_up: str, *args: str, **environ: str | None) -> subprocess.CompletedProcess[str]:
    """ringctl where the home folder is made by this script, in a mount namespace of its own."""
    own: Mapping[str, str | None] = {**os.environ, "RINGCTL_HOME": None, **environ}
    env = {name: value for name, value in own.items() if value is not None}
    argv = ["unshare", "-m", "sh", "-e", "-c", f'{set_up}\nexec "$@"', "sh", *RINGCTL, *args]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60)


LAUNCH = ("launch", "--local", "--world", "1")


@root_only
@pytest.mark.parametrize(
    ("options", "words"),
    [("ro", "Read-only file system"), ("size=64k", "No space left on device|its disk is full")],
)
def test_a_home_that_is_read_only_or_full_is_named_and_nothing_is_started(
    options: str, words: str, tmp_path: Path
) -> None:
    mount = f'mount -t tmpfs -o {options} tmpfs "$HOME"; head -c 100000 /dev/zero 2>&- >"$HOME/fill" || true'
    mount = f"{{ {mount}; }} 2>/dev/null"
    for more, code in ((("--skip-preflight",), 1), ((), 3)):
        done = in_a_home(mount, *LAUNCH, *more, "--", "true", HOME=str(tmp_path))
        assert done.returncode == code, done.stderr
        assert re.search(words, done.stderr)
        assert str(tmp_path) in done.stderr
        assert "Traceback" not in done.stderr
    done = in_a_home(mount, "ps", HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "no runs yet" in done.stdout


@root_only
def test_without_any_home_the_user_is_told_what_to_set(tmp_path: Path) -> None:
    files = Path(tmp_path, "nsswitch.conf")
    files.write_text("passwd: files\n")
    hide = f"mount --bind /dev/null /etc/passwd; mount --bind {files} /etc/nsswitch.conf"
    nobody = f"{hide}; if getent passwd 0; then exit 77; fi"  # else it is the home of whoever runs this
    done = in_a_home(nobody, *LAUNCH, "--", "true", HOME=None)
    assert done.returncode == 2, done.stderr
    assert done.stderr == "error: you have no home folder\n  set HOME or RINGCTL_HOME to a folder of yours\n"
    done = in_a_home(nobody, "ps", HOME=None, RINGCTL_HOME=str(tmp_path / "own"))
    assert (done.returncode, done.stderr) == (0, "")
    assert in_a_home(nobody, "--help", HOME=None).returncode == 0
