"""Pure: which events a user wants to see, and how a line looks."""

from __future__ import annotations

import bisect
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from launcher.errors import InputError
from launcher.model import Event

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True)
class Filter:
    """Which events pass. None and empty mean all."""

    ranks: frozenset[int] | None = None
    hosts: frozenset[str] | None = None
    since: float | None = None
    grep: re.Pattern[str] | None = None

    def passes(self, event: Event) -> bool:
        return (
            (self.ranks is None or event.rank in self.ranks)
            and (self.hosts is None or event.host in self.hosts)
            and (self.since is None or event.time >= self.since)
            and (self.grep is None or event.kind != "line" or found_in(event.data["text"], self.grep.search))
        )

    def apply(self, events: list[Event]) -> list[Event]:
        return events if self == EVERYTHING else [event for event in events if self.passes(event)]


EVERYTHING = Filter()


def filter_of(
    ranks: str | None, hosts: Sequence[str], since: str | None, grep: str | None, *, now: float
) -> Filter:
    """What the options of `logs` mean."""
    return Filter(
        ranks=parse_ranks(ranks) if ranks is not None else None,
        hosts=frozenset(hosts) or None,
        since=parse_since(since, now) if since is not None else None,
        grep=parse_grep(grep) if grep is not None else None,
    )


MOST_RANKS = 10**6  # what six digits say


def parse_ranks(text: str, below: int = MOST_RANKS) -> frozenset[int]:
    """ "0,2-3" -> {0, 2, 3}. Those `below` are made once each, however often they are named."""
    spans = [span_of(part) for part in text.split(",")]
    known = [span for span in spans if span is not None]
    if len(known) < len(spans):
        raise InputError(f"--rank {text}: write ranks and ranges, such as 0,2-3")
    ranks: set[int] = set()
    beyond = 0  # the lowest that is not in it yet
    for low, high in sorted(known):
        ranks.update(range(max(low, beyond), min(high + 1, below)))
        beyond = max(beyond, high + 1)
    return frozenset(ranks)


def span_of(part: str) -> tuple[int, int] | None:
    """ "2-3" -> (2, 3), "2" -> (2, 2)."""
    match = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part)
    if not match or (match[2] and int(match[2]) < int(match[1])):
        return None
    return int(match[1]), int(match[2] or match[1])


def parse_since(text: str, now: float) -> float:
    """A moment: "90s", "10m", "2h", "1d" ago, or a date and time such as 2026-01-31T18:00."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match:
        return now - float(match[1]) * UNITS[match[2]]
    from datetime import datetime

    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise InputError(
            f"--since {text}: not a time",
            fix="write how long ago (90s, 10m, 2h, 1d) or when (2026-01-31T18:00)",
        ) from None


def parse_grep(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:  # a{9999999999}, ((((...
        raise InputError(
            f"--grep {text}: not a regular expression: {error}", fix=r"write \( for a bracket"
        ) from None


# What colours text and moves the cursor: CSI ... letter, OSC ... BEL or ST, and the short ones.
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-Z\\^-~])")


def found_in(text: str, search: Callable[[str], object]) -> bool:
    """Whether a line holds it, as it was written or as a terminal shows it: colours may cut a word in two."""
    return bool(search(text) or ("\x1b" in text and search(ESCAPES.sub("", text))))


def ranges(numbers: Iterable[int]) -> str:
    """{0, 1, 2, 5} -> "0-2,5"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def stamp(moment: float) -> str:
    """The local time of a moment, to the millisecond."""
    return time.strftime("%H:%M:%S", time.localtime(moment)) + f".{int(moment % 1 * 1000):03d}"


def line_writer(prefix: bool, timestamps: bool, *, obeyed: bool = False) -> Callable[[list[Event]], bytes]:
    """How lines go into a pipe or a file: every byte the rank wrote, behind its label. Where control
    characters would be `obeyed`, they are shown instead."""
    labels: dict[tuple[int | None, str], str] = {}

    def write(events: list[Event]) -> bytes:
        out = []
        for event in events:
            if event.kind == "line":
                key = (event.rank, event.host)
                label = labels.get(key)
                if label is None:
                    label = labels[key] = f"[{event.rank} {event.host}] " if prefix else ""
                text = visible(event.data["text"]) if obeyed else event.data["text"]
                out.append(f"{stamp(event.time)} {label}{text}" if timestamps else label + text)
        return ("\n".join(out) + "\n").encode("utf-8", "surrogateescape") if out else b""

    return write


@dataclass
class Group:
    """The same line from several ranks."""

    text: str
    stream: str
    members: dict[int, str]  # rank -> host
    time: float

    def label(self) -> str:
        if len(self.members) == 1:
            return "".join(f"[{rank} {host}]" for rank, host in self.members.items())
        return f"[{ranges(self.members)}]"


def fold_repeats(events: Sequence[Event]) -> list[Group]:
    """Lines of one moment, with the same line of several ranks made one. Each rank's own order stays."""
    groups: list[Group] = []
    last: dict[int, int] = {}  # rank -> index of the last group it is in
    where: dict[tuple[str, str], list[int]] = {}  # the groups of a line, in their order
    for event in events:
        rank, text, stream = event.rank, event.data["text"], event.data["stream"]
        assert rank is not None
        key = (text, stream)
        same = where.setdefault(key, [])
        after = bisect.bisect_right(same, last.get(rank, -1))
        if after == len(same):
            same.append(len(groups))
            groups.append(Group(text, stream, {}, event.time))
        found = same[after]
        groups[found].members[rank] = event.host
        last[rank] = found
    return groups


CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\ud800-\udfff]")
TURNING = re.compile("[\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")  # text around, or lines


def visible(text: str) -> str:
    """For a terminal: control characters, stray bytes, and what turns text around, shown, not obeyed."""
    text = CONTROL.sub(lambda match: f"\\x{ord(match[0]) & 0xFF:02x}", text)
    return TURNING.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
