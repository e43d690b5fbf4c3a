"""What failed first, and what to do about it. Pure: a folded run and what its ranks said in, a Cause out."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from launcher.catalogue import BY_ID, BY_SIGNAL, STRENGTH, Row, find
from launcher.errors import InputError
from launcher.hostword import TOLD_TO_END
from launcher.logs import parse_ranks, ranges
from launcher.model import Event, RankState, RunState
from launcher.traces import (
    Frame,
    Stack,
    frames_of,
    last_error,
    last_report,
    lost_in_torch,
    telling,
    without_labels,
)

LAST_LINES = 200
LONGEST = 2000  # what is kept of a line
MOMENT_S = 0.5  # later than this is afterwards: metrics are read now and then
WHILE_S = 3.0  # a program that ends by itself may still say so much longer how it does
READ_S = 0.1  # apart: metrics are read less often, so what is told closer together was read at once
LAST_READINGS = 20
SAVING_S, FEW_LINES = 60.0, 6  # a program that saves what it has takes no longer for it, and says no more
SHOWN_LINES = 20
OF_TORCH = re.compile(r"^\[[WEF]\d{4} |^terminate called|^\s+what\(\):")  # what its C++ part prints
GOING_ON = ("waiting", "running", "unknown")
TRAINERS_WORD = re.compile(r"trainer: (?!warning: |still waiting: )")  # why it ends
SILENT = (*GOING_ON, "stopped")
# The words of hostd, whose lease has run out; and of what befell a host, there or as others were told of it.
MISSED = re.compile(r"(\S+) was not heard of for ")
BEFELL = re.compile(
    r"(?:(?:rank \d+ was ended on )?(\S+): )?(its supervisor (?:was|is) .+|the log cannot be written: .+)"
)
LATER_S = 15.0  # what befalls a host so long after a rank elsewhere has failed is not why
# Errors that no rank has for want of another one, so what befell a host after them is not why.
OWN_ERROR = re.compile(r"(?:Assertion|Attribute|Index|Key|Name|Type|UnboundLocal|Value|ZeroDivision)Error\b")


@dataclass(frozen=True)
class Cause:
    """The first failure of a run."""

    rank: int | None
    host: str
    text: str  # one sentence
    fix: str = ""
    lines: tuple[str, ...] = field(default=())  # its last words
    id: str = ""  # of the catalogue's row; "" where it has none
    trace: tuple[Frame, ...] = ()  # the user's own frames, outermost first
    known: bool = True  # False: nothing here says why
    befell: bool = False  # its host, or the supervisor there: the program has no part in it


class Tails:
    """What the ranks said in the end: the last lines of each one's stderr (or of its stdout where it has
    none), where it was when its host last looked, and whether the kernel killed it for memory."""

    def __init__(self) -> None:
        self._err: dict[int, deque[tuple[float, str]]] = {}
        self._out: dict[int, deque[tuple[float, str]]] = {}
        self._stepped: dict[int, deque[float]] = {}  # when steps of each were last read,
        self._spoke: dict[int, float] = {}  # and when it last said anything
        self.stacks: dict[int, Stack] = {}
        self.oom: set[int] = set()

    def add(self, event: Event) -> None:
        if event.rank is None:
            return
        if event.kind == "line":
            where = self._err if event.data["stream"] == "err" else self._out
            if event.rank not in where:
                where[event.rank] = deque(maxlen=LAST_LINES)
            text = event.data["text"]
            where[event.rank].append((event.time, text if len(text) <= LONGEST else text[:LONGEST]))
            self._spoke[event.rank] = event.time
        elif event.kind == "stack":
            self.stacks[event.rank] = Stack.from_event(event.data)
        elif event.kind == "metric" and "step" in event.data:
            self.stacks.pop(event.rank, None)  # it has moved since
            read = self._stepped.setdefault(event.rank, deque(maxlen=LAST_READINGS))
            if not read or abs(event.time - read[-1]) >= READ_S:
                read.append(event.time)
        elif event.kind == "oom":
            self.oom.add(event.rank)

    def of(self, rank: int) -> list[str]:
        return [text for _, text in self._said(rank)]

    def last_words(self, rank: RankState) -> list[str]:
        """The same without what it went on after, such as a warning: that is not why it ended."""
        killed = by_others(rank)
        since = self._spoke.get(rank.rank, 0.0) - (MOMENT_S if killed else WHILE_S)
        since = max(since, self._last_step(rank) - MOMENT_S)
        if killed:
            since = max(since, (rank.ended or 0.0) - WHILE_S)
        return [text for time, text in self._said(rank.rank) if time >= since or TRAINERS_WORD.match(text)]

    def since_its_steps(self, rank: RankState) -> list[tuple[float, str]]:
        """What it said after the last step that it made for sure, and when."""
        since = self._last_step(rank) - MOMENT_S
        return [(time, text) for time, text in self._said(rank.rank) if time >= since]

    def lines_after(self, rank: RankState, time: float) -> int:
        """How much it said after that, wherever."""
        streams = (self._err.get(rank.rank, ()), self._out.get(rank.rank, ()))
        return sum(said > time for stream in streams for said, _ in stream)

    def _last_step(self, rank: RankState) -> float:
        """When the last step was read that it made about then. What is only read at the end of a program that
        ends by itself may be from any time before: a file is written to the disk when it is closed."""
        read = list(self._stepped.get(rank.rank, ()))
        if not rank.signal and rank.ended is not None:
            read = [time for time in read if time < rank.ended - MOMENT_S]
        return read[-1] if read else 0.0

    def _said(self, rank: int) -> Iterable[tuple[float, str]]:
        return self._err.get(rank) or self._out.get(rank) or ()


@dataclass(frozen=True)
class Verdict:
    """Why one rank failed."""

    rank: RankState
    cause: Cause
    row: Row | None
    said: str = ""  # its own word for it

    @property
    def order(self) -> tuple[int, bool, float]:
        """Causes before symptoms before consequences, and the earlier first; but whoever could not come knows
        more than those who waited."""
        waited = self.row is not None and self.row.id == "ranks"
        return STRENGTH[self.row.kind] if self.row else 0, waited, self.rank.ended or 0.0


def first_failure(
    state: RunState,
    tails: Mapping[int, Iterable[str]] | Tails,
    away: Mapping[str, str] | None = None,
) -> Cause | None:
    """The earliest failure that is not the consequence of another; None if nothing failed, or only for want
    of ranks that somebody stopped. `away` are hosts that cannot be heard, and why."""
    if state.state == "stopped":
        return None
    tails = tails if isinstance(tails, Tails) else tails_of(tails)
    one_host = len({rank.host for rank in state.ranks.values()}) == 1
    failed = [rank for rank in state.ranks.values() if rank.state == "failed"]
    if failed:
        verdicts = [explain(rank, tails, one_host) for rank in failed]
        verdicts = [of_earlier_words(verdict, state, tails, away or {}, one_host) for verdict in verdicts]
        verdicts.sort(key=lambda verdict: verdict.order)
        row = verdicts[0].row
        if row is None and (cause := of_fallen_host(state, verdicts[0])):
            return cause
        if row is not None and row.consequence:
            return to_blame(state, verdicts, tails, away or {}) or verdicts[0].cause
        if row is not None and row.id in ("ranks", "store_timeout"):
            unreached = not_reached(state, verdicts, tails, away or {})
            if unreached:
                return unreached
        said = {verdict.said for verdict in verdicts}
        if len(verdicts) == state.world > 1 and len(said) == 1 and "" not in said:
            return of_all(verdicts)
        return (
            with_missing(verdicts[0], state, tails)
            if row is not None and row.id == "ranks"
            else verdicts[0].cause
        )
    return ended_outside(state, away or {})


def tails_of(lines: Mapping[int, Iterable[str]]) -> Tails:
    tails = Tails()
    for rank, said in lines.items():
        for text in said:
            tails.add(Event("line", 0.0, "", 0, "", rank, {"stream": "err", "text": text}))
    return tails


def ended_outside(state: RunState, away: Mapping[str, str]) -> Cause | None:
    """A run that no rank's failure ended."""
    if state.state == "failed":
        ended = [rank for rank in state.ranks.values() if rank.reason]
        if fallen := fallen_host(state):
            host, why = fallen
            row = find([why])
            text = f"the run was ended on {host}: {why}" + (f" ({row.cause})" if row else "")
            return Cause(None, host, text, in_words(row.fix, host) if row else "", id=row.id if row else "")
        if ended:
            missed = {rank.host: match[1] for rank in ended for match in [MISSED.match(rank.reason)] if match}
            cut_off = lonely_leader(state, missed)
            teller = next((rank for rank in ended if missed.get(rank.host) == cut_off), ended[0])
            row = find([teller.reason])
            fix = in_words(row.fix, teller.host) if row else ""
            why = f"{either(state, missed)} ({row.cause})" if row else ""
            text = f"the run was ended on {teller.host}: {teller.reason}{why}"
            host = missed.get(teller.host, teller.host)
            return Cause(None, host, text, fix, id=row.id if row else "")
    if state.state == "lost":
        # One that can still be running knows of nothing; what is not known is not told by its host.
        open_ = [rank for rank in state.ranks.values() if rank.state in GOING_ON]
        open_.sort(key=lambda rank: (rank.state != "unknown", rank.host not in away))
        host = open_[0].host if open_ else ""
        host = next(iter(away), host) if host == "?" else host  # nobody here knows where it is, if not there
        if host in away:
            return Cause(None, host, f"{away[host]}, and its ranks have not said how they ended", GONE_FIX)
        text = f"the supervisor on {host} is gone and has not said how its ranks ended"
        return Cause(None, host, text, "`ringctl stop` ends what is left of the run")
    return None


def fallen_host(state: RunState) -> tuple[str, str] | None:
    """The host whose own end, or that of its supervisor, ended the run, and what is said of it: by itself, or
    by those that were told."""
    found = [(rank.host, match) for rank in state.ranks.values() if (match := BEFELL.fullmatch(rank.reason))]
    told = [(match[1] or host, match[2], match[1] in (None, host)) for host, match in found]
    hosts = {rank.host for rank in state.ranks.values()}
    believed = sorted((who for who in told if who[0] in hosts), key=lambda who: not who[2])
    return believed[0][:2] if believed else None


def of_fallen_host(state: RunState, first: Verdict) -> Cause | None:
    """The same where ranks failed since, or for want of its ranks."""
    fallen = fallen_host(state)
    if fallen is None:
        return None
    host, why = fallen
    rank = next((r for r in state.ranks.values() if r.host == host and r.state in SILENT), None)
    if rank is None or failed_before(first, rank, why):
        return None
    row = find([why])
    how = f"was ended: {why}" + (f" ({row.cause})" if row else "")
    return blamed(rank, first, how, row.fix if row else "", row.id if row else "", befell=True)


def failed_before(first: Verdict, ended: RankState, why: str) -> bool:
    """Whether this befell the host of the rank that was ended only after another had failed. On one host the
    order is certain: a supervisor that was killed had written the failure down before, and one that ends its
    ranks for a reason of its own had it before any failure. Other hosts hear of each other late."""
    if first.rank.host == ended.host:
        return not why.startswith((TOLD_TO_END, "the log "))
    own = first.row is None and first.cause.known and OWN_ERROR.match(first.said)
    return (ended.ended or 0.0) > (first.rank.ended or 0.0) + (0.0 if own else LATER_S)


def lonely_leader(state: RunState, missed: Mapping[str, str]) -> str:
    """The host of rank 0, if it was cut off itself; "" if not. It hears all others, and they hear only it:
    who misses another than it had heard it. `missed` is whom each host did."""
    leader = state.ranks[min(state.ranks)].host
    others = {host: who for host, who in missed.items() if host != leader}
    return leader if len(others) > 1 and set(others.values()) == {leader} else ""


def either(state: RunState, missed: Mapping[str, str]) -> str:
    """Of two hosts that missed each other nobody can tell which one was cut off."""
    hosts = {rank.host for rank in state.ranks.values()}
    if len(hosts) != 2 or missed.keys() != hosts or set(missed.values()) != hosts:
        return ""
    return f"; {' and '.join(sorted(hosts))} did not hear each other, so it may be either"


# --- One rank ------------------------------------------------------------------------------------


def by_others(rank: RankState) -> bool:
    """Whether a signal ended it that it did not send itself. An abort says why; then its memory is saved, for
    as long as that takes."""
    return rank.signal not in (None, "", "SIGABRT")


def explain(rank: RankState, tails: Tails, one_host: bool = False) -> Verdict:
    """Why this rank failed, by its own words and the way it ended."""
    lines = without_labels(tails.of(rank.rank))
    report = [] if by_others(rank) else last_report(lines)
    words = lines if report else without_labels(tails.last_words(rank))
    row = BY_ID["oom"] if rank.rank in tails.oom else row_of(rank, words, report, one_host)
    said = last_error(words)
    how = f"was killed by {rank.signal}" if rank.signal else f"exited with code {rank.exit_code}"
    if rank.reason and rank.exit_code == 127:
        how, said = "did not start", rank.reason
    why = f" ({row.cause})" if row else ""
    text = f"rank {rank.rank} on {rank.host} {how}" + (f": {said}" if said else "") + why
    cause = Cause(
        rank.rank,
        rank.host,
        text,
        in_words(row.fix, rank.host) if row else "",
        tuple(lines[-SHOWN_LINES:]),
        row.id if row else "",
        tuple(telling(frames_of(report))),
        bool(row or report or (rank.reason and rank.exit_code == 127) or TRAINERS_WORD.match(said)),
    )
    return Verdict(rank, cause, row, said)


def row_of(rank: RankState, lines: Sequence[str], report: Sequence[str], one_host: bool) -> Row | None:
    """The row that fits. An exception that no row knows is the program's own: what it said before, such as a
    warning that it went on after, is not why it ended."""
    row = find([*(report or lines), rank.reason], one_host=one_host, from_torch=lost_in_torch(report))
    if row is None and not report:
        row = BY_SIGNAL.get(rank.signal or "")
    if row is not None and row.id == "store_timeout" and rank.rank == 0:
        return BY_ID["stale_env"]  # it should not have had to look for itself
    if row is not None and row.kind != "cause" and report:
        before = find([line for line in lines if OF_TORCH.match(line)], one_host=one_host)
        row = before if before is not None and before.kind == "cause" else row
    return row


def of_earlier_words(
    verdict: Verdict, state: RunState, tails: Tails, away: Mapping[str, str], one_host: bool
) -> Verdict:
    """A program that has lost another rank may say so and then save for long what it has. Such words may also
    be of something that it went on after, so they count only if few others came after them, not too late, and
    where they fit what became of another rank."""
    rank, cause = verdict.rank, verdict.cause
    if cause.known or rank.signal:
        return verdict
    for time, text in tails.since_its_steps(rank):
        if time < (rank.ended or 0.0) - SAVING_S or tails.lines_after(rank, time) > FEW_LINES:
            continue
        row = find(without_labels([text]), one_host=one_host)
        if row is not None and row.consequence:
            why = f"{cause.text} ({row.cause})"
            told = replace(cause, text=why, fix=in_words(row.fix, rank.host), id=row.id, known=True)
            found = replace(verdict, cause=told, row=row)
            if is_borne_out(found, time, state, tails, away):
                return found
    return verdict


def is_borne_out(
    verdict: Verdict, said: float, state: RunState, tails: Tails, away: Mapping[str, str]
) -> bool:
    """Whether another rank was gone when this one said that it lost one, or hung until it gave up."""
    others = [r for r in state.ranks.values() if r is not verdict.rank and r.reason != "stopped"]
    if any(was_gone(other, verdict.rank, said, away) for other in others):
        return True
    silent = [other for other in others if other.state in SILENT]
    return verdict.row is BY_ID["hang"] and hanging(silent, verdict, tails) is not None


def was_gone(other: RankState, rank: RankState, said: float, away: Mapping[str, str]) -> bool:
    """Whether another rank had ended, or was cut off, when this one said so. Its connections end a while
    before it does."""
    if other.state in GOING_ON:
        return other.host in away and (other.seen or 0.0) <= said + MOMENT_S
    ended = other.ended or 0.0
    return ended <= (rank.ended or 0.0) and ended <= said + WHILE_S


def of_all(verdicts: Sequence[Verdict]) -> Cause:
    """What all ranks failed of alike: none of them was the first, so rank 0 speaks for them."""
    first = min(verdicts, key=lambda verdict: verdict.rank.rank)
    return replace(first.cause, text=f"{first.cause.text}; all {len(verdicts)} ranks said so")


def in_words(fix: str, host: str) -> str:
    return fix.replace("{host}", host or "that host")


# --- All ranks together --------------------------------------------------------------------------

GONE_FIX = BY_ID["host_gone"].fix
NETWORK = (
    "no rank hangs, all wait for each other: packets between the hosts are lost, such as behind a firewall "
    "that was raised or a link that broke while they trained"
)
NOTHING_LARGE = "no rank hangs, all wait for each other, and nothing came of the first large exchange"
STORE_LEFT = "the store, where ranks meet and leave word for each other, ended with it"
STAY = (
    "let rank 0 stay until all are done: `dist.barrier()` before its end, and keep what `TCPStore` returned"
)
OTHER_ADDRESS = "that is not the address and port where rank 0 listens, or packets to it are dropped"
NOT_MET = "they cannot reach each other: `ringctl preflight` says which, and why"


def to_blame(
    state: RunState, verdicts: Sequence[Verdict], tails: Tails, away: Mapping[str, str]
) -> Cause | None:
    """Where every failed rank only lost another: the one that they lost."""
    first = verdicts[0]
    # Whom the user has stopped nobody lost by a fault of its own.
    lost = [r for r in state.ranks.values() if r.state in SILENT and r.reason != "stopped"]
    gone = [rank for rank in lost if rank.host in away]
    if gone:
        return blamed(
            gone[0], first, f"cannot be heard any more ({away[gone[0].host]})", GONE_FIX, "host_gone"
        )
    if cause := of_fallen_host(state, first):
        return cause
    left = [
        r
        for r in state.ranks.values()
        if r.state == "succeeded" and (r.ended or 0) <= (first.rank.ended or 0)
    ]
    if left:
        if left[0].rank == 0 and first.row is BY_ID["store_died"]:
            return blamed(
                left[0], first, f"had ended by itself, without an error: {STORE_LEFT}", STAY, "store_died"
            )
        row = BY_ID["uneven"]
        how = f"had ended by itself, without an error ({row.cause})"
        return blamed(left[0], first, how, row.fix, row.id)
    return hanging(lost, first, tails) or out_of_step(verdicts, tails) or network(state, verdicts, tails)


def blamed(rank: RankState, waiting: Verdict, how: str, fix: str, id_: str, **more: object) -> Cause:
    """The sentence for a rank that made another one fail; one that does not say why has failed then."""
    other, inner = waiting.rank, waiting.cause.trace[-1:]
    where = f" in `{inner[0].text}`" if inner and inner[0].text else ""
    who = f"rank {rank.rank} on {rank.host}{at_step(rank)}"
    then = f"waited for it{where}" if waiting.row else "failed then"
    text = f"{who} {how}; rank {other.rank} on {other.host} {then}"
    cause = Cause(rank.rank, rank.host, text, in_words(fix, rank.host), waiting.cause.lines, id_)
    return replace(cause, **more)  # type: ignore[arg-type]  # fields of Cause


def at_step(rank: RankState) -> str:
    step = rank.metric.get("step")
    return f", after step {step}," if isinstance(step, (int, float)) else ""


def hanging(silent: Sequence[RankState], first: Verdict, tails: Tails) -> Cause | None:
    """A rank that did not fail, and was not waiting for others either."""
    behind = [rank for rank in silent if rank.rank in tails.stacks and not tails.stacks[rank.rank].waits]
    told = [
        rank for rank in behind if tails.stacks[rank.rank].frames or tails.stacks[rank.rank].state in "TD"
    ]
    mute = [rank for rank in silent if rank.rank not in tails.stacks]
    timed_out = first.row is not None and first.row.id == "hang"
    chosen = next(iter(told or behind or (mute if timed_out else [])), None)
    if chosen is None:
        return None
    stack = tails.stacks.get(chosen.rank)
    where = f"it {stack.doing(past=True)}" if stack and chosen in told else "it said nothing"
    fix = f"`ringctl logs --rank {chosen.rank}` shows what it said before; look at that line of the program"
    if stack and stack.state == "T":
        fix = f"`kill -CONT {chosen.pid}` on {chosen.host} lets such a rank go on"
    trace = tuple(reversed(stack.frames)) if stack else ()
    return blamed(
        chosen,
        first,
        f"hung: {where}",
        fix,
        "hang",
        trace=tuple(telling(trace)),
        lines=tuple(without_labels(tails.of(chosen.rank))[-SHOWN_LINES:]),
    )


def out_of_step(verdicts: Sequence[Verdict], tails: Tails) -> Cause | None:
    """Ranks that waited for each other in different calls."""
    places = {v.rank.rank: place_of(v, tails) for v in verdicts}
    known = {rank: place for rank, place in places.items() if place}
    if len(set(known.values())) < 2:
        return None
    row = BY_ID["uneven"]
    parts = [f"rank {rank} in {place}" for rank, place in sorted(known.items())[:4]]
    text = f"the ranks waited in different calls: {', '.join(parts)} ({row.cause})"
    first = verdicts[0]
    return replace(first.cause, text=text, fix=in_words(row.fix, first.rank.host), id=row.id)


def place_of(verdict: Verdict, tails: Tails) -> str:
    """The call of the user's code in which a rank waited."""
    if verdict.cause.trace:
        inner = verdict.cause.trace[-1]
        return f"`{inner.text}` at {inner.place}"
    stack = tails.stacks.get(verdict.rank.rank)
    return str(stack) if stack and stack.own else ""


def network(state: RunState, verdicts: Sequence[Verdict], tails: Tails) -> Cause | None:
    """All ranks waited, on several hosts, and at least one until its time was up."""
    hosts = {rank.host for rank in state.ranks.values()}
    timed_out = [v for v in verdicts if v.row is not None and v.row.id == "hang"]
    if len(hosts) < 2 or not timed_out:
        return None
    begun = any("step" in rank.metric for rank in state.ranks.values())
    first, row = timed_out[0], BY_ID["firewall" if begun else "mtu"]
    where = place_of(first, tails)
    rank = first.rank
    text = f"rank {rank.rank} on {rank.host}{at_step(rank)} got no answer in time" + (
        f" in {where}" if where else ""
    )
    why = NETWORK if begun else f"{NOTHING_LARGE} ({row.cause})"
    return replace(first.cause, text=f"{text}: {why}", fix=in_words(row.fix, rank.host), id=row.id)


DIALLED = re.compile(
    r"client socket has (?:timed out after \S+ while trying|failed) to connect to "
    r"(?:any network address of )?\((.+), (\d+)\)"
)


def dialled(lines: Iterable[str]) -> str:
    """Where a rank looked for rank 0 in vain; "" if it did not."""
    found = [f"{match[1]} port {match[2]}" for line in lines for match in [DIALLED.search(line)] if match]
    return found[-1] if found else ""


def not_reached(
    state: RunState, verdicts: Sequence[Verdict], tails: Tails, away: Mapping[str, str]
) -> Cause | None:
    """Ranks that could not reach rank 0, also those that were ended while they still tried."""
    others = {v.rank.rank for v in verdicts if v.row is None or v.row.id != "store_timeout"}
    tried = {rank: dialled(tails.of(rank)) for rank in sorted(state.ranks.keys() - others)}
    tried = {rank: address for rank, address in tried.items() if address}
    if not tried:
        return None
    number, address = next(iter(tried.items()))
    rank, row = state.ranks[number], BY_ID["store_timeout" if number else "stale_env"]
    text = (
        f"rank {number} on {rank.host} could not reach {'rank 0' if number else 'its own store'} at {address}"
    )
    if len(tried) > 1 and number:
        more = list(tried)[1:]
        text += f", and neither could rank{'s' if len(more) > 1 else ''} {ranges(more)}"
    text += f"; {whereabouts_of_0(state, verdicts, tails, away)}" if number else f" ({row.cause})"
    said = without_labels(tails.of(number))
    trace = next((v.cause.trace for v in verdicts if v.rank is rank), ())
    fix = in_words(row.fix, rank.host)
    return Cause(number, rank.host, text, fix, tuple(said[-SHOWN_LINES:]), row.id, trace)


def whereabouts_of_0(
    state: RunState, verdicts: Sequence[Verdict], tails: Tails, away: Mapping[str, str]
) -> str:
    """What rank 0 did while another could not reach it."""
    zero, stack = state.ranks.get(0), tails.stacks.get(0)
    if zero is None:
        return BY_ID["store_timeout"].cause
    who = f"rank 0 on {zero.host}"
    if zero.host in away:
        return f"{who} cannot be heard any more ({away[zero.host]})"
    if any(v.rank is zero for v in verdicts) or (stack and stack.waits):
        return f"{who} was up and waited for it, so {OTHER_ADDRESS}"
    if zero.state == "succeeded":
        return f"{who} had ended by itself"
    if stack:
        return f"{who} had not opened its store: it {stack.doing(past=True)}"
    return f"{who} said nothing: {BY_ID['store_timeout'].cause}"


def with_missing(verdict: Verdict, state: RunState, tails: Tails) -> Cause:
    """Ranks that did not come to the meeting, with their hosts and what they did, where it is known which."""
    absent = sorted(absent_ranks(verdict.cause.lines, state.world))
    if not absent:
        others = [r.rank for r in state.ranks.values() if r is not verdict.rank and r.state != "failed"]
        absent = others if len(others) == 1 else []
    named = [
        f"rank {rank} on {state.ranks[rank].host}"
        + (f", which was in {tails.stacks[rank]}" if rank in tails.stacks else "")
        for rank in absent
        if rank in state.ranks
    ]
    return (
        replace(verdict.cause, text=f"{verdict.cause.text}; missing: {'; '.join(named)}")
        if named
        else verdict.cause
    )


ABSENT = re.compile(
    r"ranks? ([\d, -]+) (?:has|have) not come"
    r"|[Rr]anks? ([\d, ]+) failed to pass monitoredBarrier"
    r"|wait timeout after \d+ms, keys: \S*//cpu//\d+/(\d+)$"
)


def absent_ranks(lines: Iterable[str], world: int) -> frozenset[int]:
    """The ranks, of as many as there are, that the last such line names; none that names them is longer."""
    kept = (line for line in lines if len(line) <= LONGEST + 8 * world)
    found = [next(filter(None, match.groups())) for line in kept for match in ABSENT.finditer(line)]
    try:
        return parse_ranks(found[-1].replace(" ", "").strip(","), world) if found else frozenset()
    except InputError:  # not one of our lines, only like them
        return frozenset()


# --- A run that stands still ---------------------------------------------------------------------


def standstill(state: RunState, tails: Tails, away: Mapping[str, str]) -> str:
    """Who keeps the others waiting in a run that still runs, by the stacks its hosts took; "" if nobody does:
    a rank that computes is slow, and that is none of our business."""
    running = [rank for rank in state.ranks.values() if rank.state == "running"]
    waiting = [rank for rank in running if rank.rank in tails.stacks and tails.stacks[rank.rank].waits]
    behind = [
        rank for rank in running if rank not in waiting and (rank.rank in tails.stacks or rank.host in away)
    ]
    if not waiting:
        return ""
    others = f"ranks {ranges(r.rank for r in waiting)}" if len(waiting) > 1 else f"rank {waiting[0].rank}"
    held_up = f"{others} wait{'' if len(waiting) > 1 else 's'} in {tails.stacks[waiting[0].rank]}"
    if behind:
        rank = behind[0]
        doing = tails.stacks[rank.rank].doing() if rank.rank in tails.stacks else ""
        where = f"cannot be heard ({away[rank.host]})" if rank.host in away else doing
        return f"no progress: rank {rank.rank} on {rank.host}{at_step(rank)} {where}; {held_up}"
    if len(waiting) == len(running) == state.world and len({rank.host for rank in running}) > 1:
        begun = any("step" in rank.metric for rank in running)
        return f"no progress: {held_up}; {NETWORK if begun else NOT_MET}"
    return f"no progress: {held_up}" if len(waiting) < state.world else ""
