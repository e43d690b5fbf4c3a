"""Pure: Python tracebacks and stack dumps in a log, cut to what a reader needs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TRACEBACK = re.compile(r"^(?:Original |Exception Group )?Traceback \(most recent call last\):")
JOINERS = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
PART = re.compile(r"^ +\+(?:-\+)?-{5,} (?:\d+|\.\.\.) -{5,}$")  # of an exception group
FRAME = re.compile(r'^  File "(?P<file>.*?)", line (?P<line>\d+)(?:, in (?P<function>.*))?$')
MARKERS = re.compile(r"^\s*[\^~]+\s*$")  # where in the line, below it
MARGIN = re.compile(r"^ {2,}(?:\| ?|\+ (?=Exception Group ))")  # of an exception group and what it holds
RANK_LABEL = re.compile(r"^\[rank\d+\]: ?")  # torch's own, once a rank has joined
ERROR = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b")
LIBRARY = re.compile(
    r"/(?:site|dist)-packages/|/lib(?:64)?/python\d|^<frozen |^<string>$|/importlib/|/runpy\.py$|"
    r"/host(?:prefork|d)\.py$"
)
SOURCE = re.compile(
    r"\[(?:enforce fail at )?\S+\.(?:cc|cpp|h|hpp):\d+\] ?\.? ?"
)  # where in torch's own source
ADVICE = " This is typically caused by"  # gloo's guess, at the end of each of its messages
MOST_FRAMES = 6
WAITS = re.compile(
    r"\b(?:wait|barrier|monitored_barrier|all_reduce|all_gather\w*|all_to_all\w*|reduce\w*|broadcast\w*|"
    r"gather\w*|scatter\w*|recv\w*|irecv|send\w*|isend|init_process_group|rendezvous|TCPStore)\("
)
COLLECTIVES = re.compile(r"/torch/distributed/")
DIST_ERROR = re.compile(r"[\w.]*\bDist\w*Error\b")
BACKWARD = re.compile(r"/torch/(?:autograd/|_tensor\.py)")


@dataclass(frozen=True)
class Frame:
    """One level of a stack: where, and the line of source if it is known."""

    file: str
    line: int
    function: str
    text: str = ""

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def is_library(self) -> bool:
        return bool(LIBRARY.search(self.file))

    def __str__(self) -> str:
        return f"{self.place} in {self.function or '<module>'}" + (f": {self.text}" if self.text else "")


def without_labels(lines: Sequence[str]) -> list[str]:
    return [without_margin(RANK_LABEL.sub("", line)) for line in lines]


def without_margin(line: str) -> str:
    """A line of an exception group as it would be alone."""
    return MARGIN.sub("", line) if line.startswith("  ") else line


def joins(line: str) -> bool:
    """Whether the traceback that comes next belongs to the one before."""
    return line in JOINERS or bool(PART.match(line))


def last_report(lines: Sequence[str]) -> list[str]:
    """The last traceback with those that led to it, up to the end of the lines; empty if there is none."""
    starts = [number for number, line in enumerate(lines) if TRACEBACK.match(line)]
    if not starts:
        return []
    begin = starts.pop()
    while starts:
        between = lines[starts[-1] : begin]
        original = lines[begin].startswith("Original")
        if not original and not any(map(joins, between)):
            break
        begin = starts.pop()
    return list(lines[begin:])


def error_of(report: Sequence[str]) -> str:
    """The exception of the last traceback in `report`: the first line below its frames."""
    begin = max((n for n, line in enumerate(report) if TRACEBACK.match(line)), default=-1)
    rest = [line for line in report[begin + 1 :] if line.strip()]
    return next((line for line in rest if not line.startswith(" ")), "") if begin >= 0 else ""


def last_error(lines: Sequence[str]) -> str:
    """The line that says what went wrong: the end of the last traceback, else the last that looks like an
    exception, else the last line at all."""
    said = error_of(last_report(lines))
    if not said:
        errors = [line for line in lines if ERROR.match(line)]
        rest = [line.strip() for line in lines if line.strip()]
        said = (errors or rest or [""])[-1]
    return SOURCE.sub("", said.partition(ADVICE)[0])[:300]


def frames_of(report: Sequence[str]) -> list[Frame]:
    """The frames of the last traceback in a report, outermost first."""
    begin = max((n for n, line in enumerate(report) if TRACEBACK.match(line)), default=len(report))
    found: list[Frame] = []
    for line in report[begin + 1 :]:
        match = FRAME.match(line)
        if match:
            found.append(Frame(match["file"], int(match["line"]), match["function"] or ""))
        elif not line.startswith(" "):
            break
        elif found and not found[-1].text and not MARKERS.match(line):
            last = found[-1]
            found[-1] = Frame(last.file, last.line, last.function, line.strip()[:160])
    return found


def telling(frames: Sequence[Frame]) -> list[Frame]:
    """The frames of the user's own code, the innermost few of them; where there are none, where it ended."""
    own = [frame for frame in frames if not frame.is_library]
    return (own or list(frames[-1:]))[-MOST_FRAMES:]


def lost_in_torch(report: Sequence[str]) -> bool:
    """Whether the exception came out of a call that waits for other ranks. What torch's C++ part raises is a
    RuntimeError, and what Python's own sockets and pipes raise never is."""
    said = error_of(report)
    if DIST_ERROR.match(said):
        return True
    inner = frames_of(report)[-1:]
    others = any(frame.is_library and "/torch/" not in frame.file for frame in inner)
    return said.startswith("RuntimeError:") and not others and Stack(tuple(inner)).waits


@dataclass(frozen=True)
class Stack:
    """Where a rank was at a moment, as its host saw it."""

    frames: tuple[Frame, ...]  # innermost first; empty where the rank cannot tell
    state: str = ""  # of its process, as /proc has it: R, S, D, T
    busy: bool = False  # it was using the processor

    @classmethod
    def from_event(cls, data: Mapping[str, Any]) -> Stack:
        """Without frames where a host has sent anything else than it should."""
        try:
            frames = tuple(Frame(str(f[0]), int(f[1]), str(f[2]), str(f[3])) for f in data.get("frames", ()))
        except (TypeError, ValueError, LookupError, OverflowError):
            frames = ()
        return cls(frames, str(data.get("state", "")), bool(data.get("busy")))

    @property
    def own(self) -> Frame | None:
        """The innermost frame of the user's code."""
        return next((f for f in self.frames if not f.is_library), self.frames[0] if self.frames else None)

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks, as opposed to doing something of its own."""
        if not self.frames or self.state == "T":
            return False
        inner = self.frames[0]
        if any(COLLECTIVES.search(frame.file) for frame in self.frames):
            return True
        if WAITS.search(inner.text):
            return True
        return bool(BACKWARD.search(inner.file)) and not self.busy

    def doing(self, past: bool = False) -> str:
        """The rest of a sentence that begins with the rank's name."""
        if self.state == "T":
            return f"{'was' if past else 'is'} stopped by a signal (SIGSTOP) or a debugger"
        return f"{'sat' if past else 'is'} in {self}"

    def __str__(self) -> str:
        if self.state == "T":
            return "a stop by a signal (SIGSTOP) or a debugger"
        if self.own is None:
            return "a wait for a disk or a file server" if self.state == "D" else "an unknown place"
        return f"`{self.own.text or self.own.function}` at {self.own.place}"
