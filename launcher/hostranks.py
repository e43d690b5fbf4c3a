"""The ranks of this host: their pipes and processes, what they need to start, and starting them."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time

from launcher import hostprefork
from launcher.hostactivate import find_program
from launcher.hostanswer import Refused
from launcher.hostdisk import READ_BYTES, read_json, read_plain
from launcher.hostevents import event_line
from launcher.hostoutput import LineSplitter, MetricsTail, keep_last
from launcher.hostpending import Pending
from launcher.hostprefork import become_rank_process
from launcher.hostproc import alive, exit_code, signal_name
from launcher.hostprogress import Progress
from launcher.hostruns import FINAL, run_folder, runs_here, state_to_tell
from launcher.hoststop import GONE_S, terminate

TYPE_CHECKING = False  # a type checker takes it for true; importing `typing` at run time would cost a start
if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator
    from typing import Any

IMPORTS = re.compile(rb"(?:^|[;:])[ \t]*(?:import|from)[ \t]+([\w.][\w., \t]*)", re.M)
# What may import more than it says: by name, or what it reads.
FINDS_MODULES = re.compile(rb"__import__|importlib|runpy|pickle|\b(?:exec|eval)\(|(?<![.\w])compile\(")
MOST_METRICS = 64 << 20  # bytes of a rank's metrics that are still read when it has ended: the last ones
PORT_TAKEN = "the master port is taken:"  # the controller knows this beginning, and chooses another


class PythonCommand:
    """`python FLAGS script.py ARGS` or `python FLAGS -m module ARGS`, taken apart."""

    def __init__(self, flags: list[str], target: str, module: bool, args: list[str]) -> None:
        self.flags, self.target, self.module, self.args = flags, target, module, args


def python_command(argv: list[str]) -> PythonCommand | None:
    """None for what is not Python, or what only a real start of Python can do (-c, -i, stdin, a folder)."""
    name = os.path.basename(argv[0])
    if not (
        (name.startswith("python") and name[len("python") :].replace(".", "").isdigit()) or name == "python"
    ):
        return None
    i = 1
    while i < len(argv):
        word = argv[i]
        if word in ("-W", "-X"):
            i += 2
        elif word == "-m":
            return PythonCommand(argv[1:i], argv[i + 1], True, argv[i + 2 :]) if i + 1 < len(argv) else None
        elif word.startswith(("-W", "-X")) or (
            word.startswith("-") and word[1:] and set(word[1:]) <= set("bBdEIOPqsSuv")
        ):
            i += 1
        elif word.startswith("-") or not word.endswith(".py"):
            return None
        else:
            return PythonCommand(argv[1:i], word, False, argv[i + 1 :])
    return None


def needs_others(command: PythonCommand, cwd: str) -> bool:
    """Whether the program may import anything besides what comes with Python, such as torch."""
    known = getattr(sys, "stdlib_module_names", None)  # since Python 3.10
    try:
        source = read_plain(os.path.join(cwd, command.target))
    except OSError:
        return True  # also a module, wherever it is
    if known is None or len(source) == READ_BYTES or FINDS_MODULES.search(source):
        return True
    lists = IMPORTS.findall(source.replace(b"\\\n", b" "))  # "os.path as p, sys", and "os import path"
    names = [name.split()[0] for names in lists for name in names.decode().split(",") if name.strip()]
    return any(name.partition(".")[0] not in known for name in names)


class Rank:
    """One rank of this host: its pipes, its process, how it ended."""

    def __init__(self, spec: dict[str, Any], patience: str = "") -> None:
        self.number = int(spec["rank"])
        self.local_rank = int(spec["local_rank"])
        self.argv = [str(word) for word in spec["argv"]]
        self.env = dict(spec["env"])
        self.metrics = MetricsTail(str(self.env["RINGCTL_METRICS"]))
        self.progress = Progress(patience)
        self.ticks = -1  # processor time when it was asked for its stack; -1 when it was not
        self.splitters: dict[int, LineSplitter] = {}
        self.pending: dict[int, Pending] = {}
        self.passed_on = Pending()  # up to which place its metrics are
        self.write_ends: list[int] = []
        self.pid = 0
        self.start: int | None = None
        self.status: int | None = None
        self.state = "waiting"
        self.reason = ""
        self.stopping: float | None = None  # how long it had been known that the run is to be stopped
        self.seen = time.time()
        self.last: dict[str, Any] = {}

    def open_pipes(self) -> None:
        import fcntl

        for stream in ("out", "err"):
            read, write = os.pipe()
            os.set_blocking(read, False)
            try:
                fcntl.fcntl(write, 1031, READ_BYTES)  # F_SETPIPE_SZ, named only from Python 3.10 on
            except OSError:
                pass  # the user's share of pipe memory is used up; the usual size does as well
            self.splitters[read] = LineSplitter(self.number, stream)
            self.pending[read] = Pending()
            self.write_ends.append(write)

    def last_words(self) -> Iterator[bytes]:
        """As events, what its supervisor, which is gone, has not passed on."""
        yield from self.last_lines()
        yield from self.last_metrics()

    def last_lines(self) -> Iterator[bytes]:
        """What is still in its pipes. As much as a pipe holds: what could not be ended may write for ever."""
        now = round(time.time(), 6)
        for fd, splitter in self.splitters.items():
            try:
                data = os.read(fd, READ_BYTES)
            except BlockingIOError:
                data = b""  # somebody who could not be ended has it as well, and says nothing
            rest = self.pending[fd].rest
            data = data.partition(b"\n")[2] if rest is None else rest + data  # no end of a line for a line
            if data:
                yield splitter.feed(data, now) + splitter.flush(now, at_end=True)

    def last_metrics(self) -> Iterator[bytes]:
        """What has come to its metrics file since."""
        place = self.passed_on.rest
        if place is None:
            return
        if place:
            self.metrics.go_on_from(place)
        for records in self.metrics.rest(MOST_METRICS):
            for record in records:
                keep_last(self.last, record)
            yield self.metric_lines(records)

    def metric_lines(self, records: list[dict[str, Any]]) -> bytes:
        return b"".join(event_line("metric", rank=self.number, **record) for record in records)

    def has_lost_words(self) -> bool:
        """Whether what the supervisor had read of it is gone with it."""
        marks = (self.passed_on, *self.pending.values())
        return bool(self.metrics.skipped) or any(mark.rest is None for mark in marks)

    def close_pipes(self) -> None:
        self.close_write_ends()
        for fd in self.splitters:
            os.close(fd)
        self.splitters = {}

    @property
    def ended(self) -> bool:
        return self.status is not None

    def close_write_ends(self) -> None:
        for fd in self.write_ends:
            os.close(fd)
        self.write_ends = []

    def to_json(self) -> dict[str, Any]:
        return {
            "rank": self.number, "pid": self.pid or None, "start": self.start, "state": self.state,
            "exit_code": None if self.status is None else exit_code(self.status),
            "signal": None if self.status is None else signal_name(self.status),
            "reason": self.reason, "stopping": self.stopping, "seen": self.seen, "metric": self.last,
        }  # fmt: skip


def hold_port(port: int, run: str) -> socket.socket | None:
    """Refuse to start ranks whose master port somebody has taken since it was chosen. A run has its port from
    here on, though its ranks do not listen yet: to other runs it is taken for as long as what this returns is
    open. That is a name, not a file, so that it is gone when the supervisor is, and means this host alone. A
    supervisor of ours whose ranks have ended gives it up."""
    import socket

    if not port:
        return None
    held = socket.socket(socket.AF_UNIX)
    if not is_bound(held, port):
        other = holder(port, run)
        if other and other["state"] in FINAL:  # it stays for other hosts only
            terminate(other, GONE_S, signal.SIGTERM)
        if not is_bound(held, port):
            held.close()
            who = f"run {other['run']}" if other else "a run of another user"
            raise Refused(f"{PORT_TAKEN} {port}, by {who}")
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("", port))
        except OSError as error:
            raise Refused(f"{PORT_TAKEN} {port}: {error.strerror}") from None
    return held


def is_bound(held: socket.socket, port: int) -> bool:
    """Whether the name that stands for this port is ours now."""
    try:
        held.bind(f"\0ringctl master port {port}")
    except OSError:
        return False
    return True


def holder(port: int, but: str) -> dict[str, Any] | None:
    """The state of another run of ours whose supervisor is here and has this master port."""
    for run in runs_here():
        plan, state = read_json(os.path.join(run_folder(run), "plan.json")), state_to_tell(run)
        if run == but or not plan or plan.get("listens") != port:
            continue
        if state and "hostd" in state and alive(state["hostd"]):  # else perhaps a newer ringctl's
            return state
    return None


def rank_program(rank: Rank, env: dict[str, str], cwd: str) -> str:
    """The executable of the rank's command. Where there is only a python3, `python` means that."""
    name, path = rank.argv[0], env.get("PATH", os.defpath)
    found = find_program(name, path, cwd) or (
        find_program("python3", path, cwd) if name == "python" else None
    )
    if found is None:
        raise Refused(f"there is no program {name!r} on this host")
    return found


def start_plain(rank: Rank, environ: dict[str, str], cwd: str, mask: set[int]) -> int:
    """Start the rank as a process of its own, with these signals blocked."""
    import subprocess

    env = dict(environ, **rank.env)
    program = rank_program(rank, env, cwd)
    supervisor = os.getpid()

    def prepare() -> None:
        become_rank_process(supervisor)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    try:
        process = subprocess.Popen(
            [program] + rank.argv[1:], env=env, cwd=cwd, stdin=subprocess.DEVNULL,
            stdout=rank.write_ends[0], stderr=rank.write_ends[1], preexec_fn=prepare,
        )  # fmt: skip
    except OSError as error:
        raise Refused(f"rank {rank.number}: cannot start {program}: {error.strerror}") from None
    process.returncode = 0  # reaped by the supervisor's own loop, not by Popen
    return process.pid


def start_zygote(
    ranks: list[Rank], command: PythonCommand, environ: dict[str, str], cwd: str
) -> tuple[int, int]:
    """Start the process that imports torch and forks the ranks: its pid, and where it reports their pids."""
    import subprocess

    common = {k: v for k, v in ranks[0].env.items() if all(r.env.get(k) == v for r in ranks)}
    env = dict(environ, **common)
    python = rank_program(ranks[0], env, cwd)
    report_read, report_write = os.pipe()
    os.set_blocking(report_read, False)
    others = needs_others(command, cwd)
    request = {
        "supervisor": os.getpid(), "report": report_write, "target": command.target, "module": command.module,
        "args": command.args, "others": others, "preload": others and len(ranks) > 1,
        "ranks": [
            {"rank": r.number, "argv": r.argv, "env": r.env, "fds": r.write_ends} for r in ranks
        ],
    }  # fmt: skip
    supervisor = os.getpid()
    process = subprocess.Popen(
        [python] + command.flags + [os.path.abspath(hostprefork.__file__)],
        env=env, cwd=cwd, stdin=subprocess.PIPE,
        stdout=ranks[0].write_ends[0], stderr=ranks[0].write_ends[1],
        pass_fds=[report_write] + [fd for r in ranks for fd in r.write_ends],
        preexec_fn=lambda: become_rank_process(supervisor),
    )  # fmt: skip
    os.close(report_write)
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(request).encode())
        process.stdin.close()
    except BrokenPipeError:
        pass  # it died at once; its exit status says why
    process.returncode = 0  # reaped by the supervisor's own loop, not by Popen
    return process.pid, report_read
