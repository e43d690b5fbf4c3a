"""Any log, also one that ringctl did not write -> the first failure in it, in bounded memory.

Lines are told apart by rank where they carry a label: ringctl's own ("[1 server2] "), torch's ("[rank1]: ")
or torchrun's ("[default1]:"). A log without labels is one process's, or several mixed.
"""

from __future__ import annotations

import itertools
import json
import re
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import BinaryIO

from launcher import fold
from launcher.catalogue import BY_SIGNAL, STRENGTH, Row, find, is_known, may_be_known
from launcher.diagnose import (
    LAST_LINES,
    SHOWN_LINES,
    Cause,
    Tails,
    Verdict,
    first_failure,
    in_words,
    out_of_step,
    row_of,
)
from launcher.model import Event, RankState, RunState
from launcher.traces import TRACEBACK, frames_of, joins, last_error, telling, without_margin

PIECE = 1 << 16
BATCH = 500  # lines
LONGEST = 2000  # what is kept of a line
MOST_RANKS, MOST_REPORTS, MOST_REPORT_LINES, MOST_KNOWN = 1024, 64, 300, 50
FIRST_REPORT_LINES = 100  # stay when a report is too long, and so do its last
ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
UTF16 = re.compile(rb"\xff\xfe|\xfe\xff|(?:[^\0]\0){4}|(?:\0[^\0]){4}", re.S)
OUR_LABEL = re.compile(r"^(?:\d\d:\d\d:\d\d\.\d{3} )?\[(\d{1,6}) ([^\]\s]+)\] ?")
TORCH_LABEL = re.compile(r"^\[(?:rank(\d{1,6})\]: ?|(?:default|trainer)(\d{1,6})\]:)")
OUR_VERDICT = "failed first: "
OUR_SUCCESS = re.compile(r"run \S+ succeeded\b")
AFTERWARDS = 20  # lines of a rank after what looked like its end
ROOT_CAUSE = re.compile(r"^Root Cause \(first observed failure\)")
ROOT_RANK = re.compile(r"^\s+rank\s+: (\d+) ")
ROOT_HOST = re.compile(r"^\s+host\s+: (\S+)")
ROOT_EXIT = re.compile(r"^\s+exitcode\s+: (-?\d+) ")
WRAPPER = ("ChildFailedError", "ProcessExitedException", "CalledProcessError")  # say that a child failed


def is_utf16(begin: bytes) -> bool:
    """Whether a file that begins so is two bytes a character, as some shells of Windows write it."""
    return bool(UTF16.match(begin))


def lines_of(file: BinaryIO) -> Iterator[str]:
    """The text of each line: no colours, no line end, at most LONGEST characters; of a line that was drawn
    over and over, as progress bars are, the last state."""
    begun = False  # in the middle of a line longer than a piece
    while piece := file.readline(PIECE):
        if not begun:
            text = piece.decode("utf-8", "replace").rstrip("\r\n")
            if "\r" in text:
                text = text.rpartition("\r")[2]
            yield (ANSI.sub("", text) if "\x1b" in text else text)[:LONGEST]
        begun = not piece.endswith(b"\n")


@dataclass
class Speaker:
    """What one rank (or, without labels, the whole log) said."""

    rank: int | None
    host: str = ""
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    known: list[tuple[int, str]] = field(
        default_factory=list
    )  # lines of the catalogue's kind, outside reports
    reports: list[tuple[int, list[str]]] = field(default_factory=list)  # each a traceback, with its place
    open: bool = False  # the last report goes on
    inside: bool = False  # and its exception has yet to come
    said: int = 0  # how many lines
    said_then: int = 0  # when the last of `known` came

    @property
    def as_rank(self) -> RankState:
        """Without a label it is nobody, and not rank 0."""
        return RankState(-1 if self.rank is None else self.rank, self.host)

    @property
    def went_on(self) -> bool:
        """Whether so much followed what looked like a failure that it was none."""
        return self.said - self.said_then > AFTERWARDS

    def add(self, number: int, text: str, suspect: bool) -> None:
        self.tail.append(text)
        self.said += 1
        if TRACEBACK.match(text):
            joined = self.open and any(map(joins, self.reports[-1][1][-4:]))
            if not joined and not text.startswith("Original"):
                self._begin(number)
            self.open = self.inside = True
        if self.open:
            lines = self.reports[-1][1]
            if self.inside or len(lines) < MOST_REPORT_LINES:
                lines.append(text)
            if len(lines) > MOST_REPORT_LINES:
                del lines[next((n for n in range(FIRST_REPORT_LINES, len(lines)) if is_frame(lines[n])), -1)]
            self.inside = self.inside and (is_frame(text) or bool(TRACEBACK.match(text)))
        elif suspect and len(self.known) < MOST_KNOWN and is_known(text):
            self.known.append((number, text))
            self.said_then = self.said

    def _begin(self, number: int) -> None:
        """A labelled rank's last report is the one it ended with; without labels each may be."""
        if self.rank is not None:
            self.reports.clear()
        elif len(self.reports) >= MOST_REPORTS:
            self.reports.pop()
        self.reports.append((number, []))


def is_frame(text: str) -> bool:
    return text.startswith(" ") or not text


@dataclass(frozen=True)
class Finding:
    """One candidate for the first failure."""

    row: Row | None
    line: int
    cause: Cause

    @property
    def order(self) -> tuple[int, int]:
        return STRENGTH[self.row.kind] if self.row else 0, self.line

    @property
    def verdict(self) -> Verdict:
        return Verdict(RankState(self.cause.rank or 0, self.cause.host), self.cause, self.row)


@dataclass
class Root:
    """What torchrun says of the first failure it saw."""

    line: int = 0
    rank: int | None = None
    host: str = ""
    exit_code: int = 0


class Reader:
    """Takes a log line by line; `cause` is what it comes to."""

    def __init__(self) -> None:
        self.speakers: dict[int | None, Speaker] = {}
        self.root: Root | None = None
        self.told: list[str] = []  # ringctl's own words, where it wrote the log
        self.state: RunState | None = None  # where the log is of events
        self.tails = Tails()
        self.succeeded = False
        self.lines = 0

    def add(self, text: str, suspect: bool = True) -> None:
        """`suspect` is False where the catalogue is known to have nothing to say of the line."""
        self.lines += 1
        if text.startswith('{"kind":') and self._event(text):
            return
        if text.startswith(OUR_VERDICT):
            self.told = [text]
        elif text.startswith("command: "):
            return  # of a plan: what is going to be run is no sign of how it went
        elif OUR_SUCCESS.match(text):
            self.succeeded = True
        elif self.told and text.startswith("  ") and len(self.told) < MOST_REPORT_LINES:
            self.told.append(text)
        rank, host, text = labelled(text)
        if rank is None and (self.root is not None or text.startswith("Root Cause")):
            self._root_cause(text)
        if rank not in self.speakers and len(self.speakers) < MOST_RANKS:
            self.speakers[rank] = Speaker(rank, host)
        self.speakers.get(rank, Speaker(rank)).add(self.lines, text, suspect)

    def _event(self, text: str) -> bool:
        """A line of `logs --json` or of `logs --download`."""
        try:
            data = json.loads(text)
            head = {key: data.pop(key) for key in ("kind", "time", "run", "attempt", "host", "rank")}
            event = Event(**head, data=data)
            if not is_ours(event):
                return False
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return False
        if self.state is None:
            self.state = RunState(event.run, "", event.attempt, 0, "starting", {})
        if event.rank is not None and event.rank not in self.state.ranks:
            ranks = {**self.state.ranks, event.rank: RankState(event.rank, event.host)}
            self.state = replace(self.state, ranks=ranks, world=len(ranks))
        self.state = fold.fold(self.state, event)
        self.tails.add(event)
        return True

    def _root_cause(self, text: str) -> None:
        if ROOT_CAUSE.match(text):
            self.root = Root(self.lines)
        elif self.root is not None and self.lines < self.root.line + 10:
            if match := ROOT_RANK.match(text):
                self.root.rank = int(match[1])
            elif match := ROOT_HOST.match(text):
                self.root.host = match[1]
            elif match := ROOT_EXIT.match(text):
                self.root.exit_code = int(match[1])

    @property
    def cause(self) -> Cause | None:
        """The first failure; None if there is none to be seen."""
        if self.state is not None:
            return first_failure(self.state, self.tails)
        if self.told:
            return from_our_words(self.told)
        if self.succeeded:
            return None
        ranks = [speaker for speaker in self.speakers.values() if speaker.rank is not None]
        one_host = len(ranks) > 1 and len({speaker.host or speaker.rank for speaker in ranks}) == 1
        found = [finding for speaker in self.speakers.values() for finding in findings(speaker, one_host)]
        if self.root is not None:
            found += of_root(self.root)
        if not found:
            return None
        first = min(found, key=lambda finding: finding.order)
        if first.row is None or not first.row.consequence:
            return first.cause
        return out_of_step([finding.verdict for finding in found], Tails()) or elsewhere(first.cause)


def is_ours(event: Event) -> bool:
    """Whether what claims to be an event has what one of its kind must have."""
    known = isinstance(event.kind, str) and isinstance(event.run, str) and isinstance(event.host, str)
    number = isinstance(event.time, (int, float)) and isinstance(event.rank, (int, type(None)))
    if event.kind == "line":
        return known and number and all(isinstance(event.data.get(key), str) for key in ("stream", "text"))
    if event.kind == "rank_exited":
        return known and number and {"state", "exit_code", "signal", "reason"} <= event.data.keys()
    return known and number


def labelled(text: str) -> tuple[int | None, str, str]:
    """(rank, host, the rest) of a line."""
    rank, host = None, ""
    if text.startswith("[") or text[2:3] == ":":
        if match := OUR_LABEL.match(text):
            rank, host, text = int(match[1]), match[2], text[match.end() :]
        if match := TORCH_LABEL.match(text):
            rank, text = int(match[1] or match[2]) if rank is None else rank, text[match.end() :]
    return rank, host, without_margin(text)


def findings(speaker: Speaker, one_host: bool) -> Iterator[Finding]:
    """What may have ended this rank: its reports, else lines that the catalogue knows."""
    who = (
        ""
        if speaker.rank is None
        else f"rank {speaker.rank}" + (f" on {speaker.host}" if speaker.host else "")
    )
    before = [text for _, text in speaker.known]
    for number, report in speaker.reports:
        said = last_error(report)
        if any(name in said.partition(":")[0] for name in WRAPPER):
            continue
        row = row_of(speaker.as_rank, [*before, *report], report, one_host)
        trace = tuple(telling(frames_of(report)))
        cause = found_cause(speaker, who or f"line {number}", said, row)
        yield Finding(row, number, replace(cause, trace=trace, lines=tuple(report[-SHOWN_LINES:])))
    if not speaker.reports and not speaker.went_on:
        for number, text in speaker.known:
            row = find([text], one_host=one_host)
            cause = found_cause(speaker, who or f"line {number}", text.strip()[:300], row)
            yield Finding(row, number, replace(cause, lines=tuple(speaker.tail)[-SHOWN_LINES:]))


def found_cause(speaker: Speaker, who: str, said: str, row: Row | None) -> Cause:
    why, fix = (f" ({row.cause})", in_words(row.fix, speaker.host)) if row else ("", "")
    return Cause(speaker.rank, speaker.host, f"{who}: {said}{why}", fix, id=row.id if row else "")


def of_root(root: Root) -> list[Finding]:
    """torchrun's root cause, where a signal ended it: then the rank itself could not say anything."""
    if root.exit_code >= 0:
        return []
    try:
        name = signal.Signals(-root.exit_code).name
    except ValueError:
        return []
    row = BY_SIGNAL.get(name)
    who = Speaker(root.rank, root.host)
    where = f"rank {root.rank} on {root.host}" if root.host else f"rank {root.rank}"
    cause = found_cause(who, where, f"was killed by {name}", row)
    return [Finding(row, root.line, replace(cause, text=cause.text.replace(": was", " was", 1)))]


def elsewhere(cause: Cause) -> Cause:
    """A rank that only lost another one, whose own words are not in the log."""
    fix = "the rank that failed first is not in this log; look at the logs of the others"
    return replace(cause, fix=fix)


def from_our_words(told: list[str]) -> Cause:
    """What ringctl had found when it wrote the log; it knew more than the log tells."""
    fix = next((line.partition("to do: ")[2] for line in told if line.startswith("  to do: ")), "")
    known = not any("why is not known here" in line or "it said nothing" in line for line in told)
    text = told[0][len(OUR_VERDICT) :]
    match = re.match(r"rank (\d+) on ([^\s,]+)", text)
    rank, host = (int(match[1]), match[2]) if match else (None, "")
    row = find([text])
    lines = tuple(line[4:] for line in told if line.startswith("  | "))
    return Cause(rank, host, text, fix, lines, id=row.id if row else "", known=known)


def read(lines: Iterable[str]) -> Reader:
    """All of a log. The catalogue is asked about a batch at once: most of a log is nothing to it."""
    reader, source = Reader(), iter(lines)
    while batch := list(itertools.islice(source, BATCH)):
        suspect = may_be_known("\n".join(batch))
        for text in batch:
            reader.add(text, suspect)
    return reader
