"""Pure: whether what a host tells of its runs is what it may tell. A host may be broken, or not on our side.

What is not of its kind raises TypeError, KeyError or ValueError. Afterwards a name can be part of a path, a
number can be counted to, a moment can be shown as a time, and words can be shown on a terminal.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from launcher.hostword import MAY_BE
from launcher.logs import visible
from launcher.model import Event, RankStatus, RunStatus, SlotsTold, from_json

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")  # of a run: also that of its folder
HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:%-]{0,254}")
USER = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.@+$-]{0,63}")
SIGNAL = re.compile(r"[A-Za-z0-9_+ -]{1,40}")  # an older ringctl wrote "signal 43"
MOST_RANKS = 100_000  # of a run
MOST_RANKS_HERE = 1024  # of a host: what an inventory allows
MOST_SECRETS = 1000  # of a run
MOST_RUNS = 1000  # that a host tells of at once
LATEST = 1e11  # in the year 5138; what `time.localtime` knows ends later
LONGEST_WORDS = 2000
DEEPEST = 20  # levels of lists and objects in what a host tells
NONE = type(None)
TEXT = operator.itemgetter("text")
STREAM = operator.itemgetter("stream")


def is_light(text: bytes, most: int) -> bool:
    """Whether JSON, as Python writes it in ASCII, holds no more values than so many. Small ones take up to
    fifty times as much memory as their text; an object counts for five, a list for three."""
    found = text.count(b",") + 2 * text.count(b"[") + 4 * text.count(b"{")
    return text.isascii() and found <= most


def words_of(said: Any) -> str:
    """As it can be shown: of bounded length, and with nothing that a terminal would obey."""
    text = said if isinstance(said, str) else f"{said!r:.200}"
    return "\n".join(visible(line) for line in text[:LONGEST_WORDS].splitlines())


# --- Figures -------------------------------------------------------------------------------------

DIGEST = re.compile(r"[0-9a-fA-F]{64}")
MOST = 1 << 53  # what a float, and so a browser, still counts to


def figure(key: str, value: Any) -> int | float | str | None:
    """What a rank calls its step, loss or digest, if it is one: lists and streams carry it, for every run."""
    if key == "parameters_sha256":
        return value if isinstance(value, str) and DIGEST.fullmatch(value) else None
    if isinstance(value, int) and not isinstance(value, bool):
        return value if abs(value) <= MOST else None
    return value if isinstance(value, float) and abs(value) < 1e300 else None


def step_of(value: Any) -> int | None:
    """A step as a whole number, which some programs tell as 20.0."""
    step = figure("step", value)
    return int(step) if isinstance(step, (int, float)) and abs(step) <= MOST else None


# --- Clocks --------------------------------------------------------------------------------------

CLOCKS_AGREE_S = 0.5  # what a message takes is no difference of clocks


def clocks_apart(said: Any, asked: float, answered: float) -> float:
    """How far a host's clock is ahead of ours, by what it said in between; 0 for what may be the way."""
    if not isinstance(said, (int, float)) or not is_moment(said):
        raise ValueError("a time that is none")
    apart, way = said - (asked + answered) / 2, abs(answered - asked) / 2
    return apart if abs(apart) > way + CLOCKS_AGREE_S else 0.0


def on_our_clock(state: Mapping[str, Any], apart: float) -> dict[str, Any]:
    """The state with the times that its host tells as ours has them."""

    def ours(moment: float | None) -> float | None:
        return None if moment is None else max(0.0, moment - apart)

    ranks = [{**rank, "seen": ours(rank["seen"])} for rank in state["ranks"]]
    return {**state, "ranks": ranks, "started": ours(state["started"]), "ended": ours(state["ended"])}


# --- States --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankTold:
    """What a host's state file says of a rank; see Rank.to_json in hostranks."""

    rank: int
    state: RankStatus
    pid: int | None
    exit_code: int | None
    signal: str | None
    reason: str
    seen: float | None
    metric: Mapping[str, Any]
    stopping: float | None = None


@dataclass(frozen=True)
class StateTold:
    """A host's state of a run; see Supervisor.write_state in hostsupervisor."""

    run: str
    name: str
    attempt: int
    world: int
    host: str
    state: RunStatus
    started: float
    ended: float | None
    ranks: tuple[RankTold, ...]


def checked_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state as it was told, once it is known to be one."""
    told = from_json(StateTold, dict(state))
    moments = [
        told.started,
        told.ended,
        *(part for rank in told.ranks for part in (rank.seen, rank.stopping)),
    ]
    signals = [rank.signal for rank in told.ranks if rank.signal is not None]
    good = (
        NAME.fullmatch(told.run)
        and (not told.name or NAME.fullmatch(told.name))
        and HOST.fullmatch(told.host)
        and 1 <= told.attempt <= 10**6
        and 1 <= told.world <= MOST_RANKS
        and len(told.ranks) <= MOST_RANKS_HERE
        and all(0 <= rank.rank < told.world for rank in told.ranks)
        and all(moment is None or is_moment(moment) for moment in moments)
        and all(map(SIGNAL.fullmatch, signals))
    )
    if not good:
        raise ValueError("a state that is none")
    return {**state, "ranks": [{**rank, "reason": words_of(rank["reason"])} for rank in state["ranks"]]}


def is_moment(value: float) -> bool:
    return 0 <= value <= LATEST  # which no NaN is


def check_stopped(answer: Mapping[str, Any]) -> None:
    """The answer to `stop`; see hoststop."""
    if type(answer["known"]) is not bool:
        raise TypeError("known")
    for numbers in (answer["ended"], answer["left"]):
        if not isinstance(numbers, list) or not {type(number) for number in numbers} <= {int}:
            raise TypeError("not a list of numbers")
    if type(answer.get("unwritten", 0)) is not int or type(answer.get("kept", True)) is not bool:
        raise TypeError("what it could write down")
    if answer["known"] and answer["was"] not in RunStatus.__args__:  # type: ignore[attr-defined]  # a Literal
        raise ValueError("was")


def unwritten(host: str, told: Mapping[str, Any]) -> str:
    """What a host says of lines that it could not write down, in its last event or in its answer to `stop`;
    "" if there are none."""
    count = told.get("unwritten", 0)
    if not told.get("kept", True):
        why = words_of(str(told.get("why") or "nobody has said why"))
        words = f"that it is over could not be written down there: {why}"
        return f"{host}: {words}; stop it again once that has changed"
    if type(count) is not int or not MAY_BE <= count <= MOST or count == 0:
        return ""
    if count == MAY_BE:
        return f"{host}: lines of its log may be lost: nobody could write them down"
    return f"{host}: {count} lines of its log are lost: they could not be written down"


def unread(host: str, told: Mapping[str, Any]) -> str:
    """What a host says in its last event of metrics that it has not read; "" if there are none."""
    size = told.get("unread", 0)
    if type(size) is not int or not 0 < size <= MOST:
        return ""
    words = "of metrics are not in the log: they came more quickly than they could be read"
    return f"{host}: {size / 1e6:,.1f} MB {words}"


def checked_secrets(answer: Mapping[str, Any]) -> dict[str, str]:
    """The answer to `secrets`; see hostruns. Each line of a log is searched for all of them."""
    told = dict(answer["secrets"])
    if len(told) > MOST_SECRETS or not {type(each) for pair in told.items() for each in pair} <= {str}:
        raise TypeError("secrets that are none")
    return told


# --- Slots ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostNow:
    """Who has what of a host, and what it is doing. What it does not know is -1, or no load."""

    runs: tuple[SlotsTold, ...]
    load: tuple[float, ...]
    cores: int
    memory_free: int
    memory_total: int
    disk_free: int
    disk_total: int
    time: float
    problem: str = ""  # why what runs take is not written down there for others to see


def checked_now(answer: Mapping[str, Any]) -> HostNow:
    """The answer to `slots`; see command_slots in hostruns."""
    told = from_json(HostNow, dict(answer))
    sizes = (told.memory_free, told.memory_total, told.disk_free, told.disk_total)
    good = (
        len(told.runs) <= MOST_RUNS
        and all(map(plausible, told.runs))
        and len(told.load) in (0, 3)
        and all(0 <= load < 1e6 for load in told.load)
        and 0 < told.cores < 1 << 20
        and all(-1 <= size < 1 << 64 for size in sizes)
        and is_moment(told.time)
    )
    if not good:
        raise ValueError("what no host is like")
    return replace(told, problem=words_of(told.problem))


def plausible(told: SlotsTold) -> bool:
    return bool(
        NAME.fullmatch(told.run)
        and USER.fullmatch(told.user)
        and 1 <= told.attempt <= 10**6
        and 1 <= told.slots <= MOST_RANKS_HERE
        and told.slots <= told.world <= MOST_RANKS
    )


# --- Events --------------------------------------------------------------------------------------


def check_events(events: Sequence[Event]) -> set[int | None]:
    """All at once, column by column, for there may be millions; the ranks that they are of."""
    kinds, times, _, _, _, ranks, datas = zip(*events, strict=True)
    if set(map(type, kinds)) != {str} or not set(map(type, times)) <= {float, int}:
        raise TypeError("an event without a kind or a time")
    if not math.isfinite(sum(times)) or min(times) < 0 or max(times) > LATEST:
        raise ValueError("a time that is none")
    if not set(map(type, ranks)) <= {int, NONE} or not all(
        0 <= rank < MOST_RANKS for rank in set(ranks) - {None}
    ):
        raise TypeError("a rank that is none")
    if set(kinds) != {"line"}:
        check_others([event for event in events if event.kind != "line"])
        lines = [event for event in events if event.kind == "line"]
        check_lines([event.rank for event in lines], [event.data for event in lines])
    else:
        check_lines(ranks, datas)
    return set(ranks)


def check_lines(ranks: Iterable[int | None], datas: Sequence[Mapping[str, Any]]) -> None:
    if None in set(ranks) or not set(map(STREAM, datas)) <= {"out", "err"}:
        raise ValueError("a line without a rank or a stream")
    if not set(map(type, map(TEXT, datas))) <= {str}:
        raise TypeError("a line without a text")
    odd = set(map(len, datas)) - {2}  # most lines end as lines do, and say nothing of it
    if odd and not {type(data.get("end", "")) for data in datas} <= {str}:
        raise TypeError("a line with an end that is none")


def check_others(events: Iterable[Event]) -> None:
    for event in events:
        if event.kind == "rank_exited":
            check_exit(event.data)
        elif event.kind == "rank_started" and type(event.data.get("pid")) not in (int, NONE):
            raise TypeError("a pid that is none")
        elif event.kind == "stack":
            check_stack(event.data)
        if event.kind != "metric" and not all(map(is_shallow, event.data.values())):
            raise ValueError("something that is nested too deep")


def is_shallow(value: Any) -> bool:
    """Whether it can be copied and written down without going deeper than Python does."""
    nested = [value] if isinstance(value, (dict, list)) else []
    for _ in range(DEEPEST):
        parts = [part for each in nested for part in (each.values() if isinstance(each, dict) else each)]
        nested = [part for part in parts if isinstance(part, (dict, list))]
    return not nested


def shallow(event: Event) -> Event:
    """A metric without what is nested too deep: a program may have written it, and its host only passes it
    on."""
    if event.kind != "metric" or all(map(is_shallow, event.data.values())):
        return event
    return event._replace(data={key: value for key, value in event.data.items() if is_shallow(value)})


def check_stack(data: Mapping[str, Any]) -> None:
    """See Stacks.note in hostprogress."""
    if any([type(part) for part in frame] != [str, int, str, str] for frame in data["frames"]):
        raise TypeError("a stack that is none")


def check_exit(data: Mapping[str, Any]) -> None:
    told = {key: data[key] for key in ("state", "exit_code", "signal", "reason")}
    told["stopping"], told["seen"] = data.get("stopping"), data.get("ago")
    rank = from_json(RankTold, {"rank": 0, "pid": None, "metric": {}, **told})
    if not all(seconds is None or is_moment(seconds) for seconds in (rank.stopping, rank.seen)):
        raise ValueError("a time that is none")
    if told["signal"] is not None and not SIGNAL.fullmatch(told["signal"]):
        raise ValueError("a signal that is none")
