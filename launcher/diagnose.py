"""What failed first, and what to do about it. Pure: a folded run and its last lines in, a Cause out."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from launcher.model import Event, RankState, RunState

LAST_LINES = 60


@dataclass(frozen=True)
class Known:
    """One row of the catalogue of failures."""

    id: str
    pattern: str
    cause: str
    fix: str = ""
    consequence: bool = False  # something else went wrong first


CATALOGUE = (
    Known(
        "peer_died",
        r"Connection closed by peer|Connection reset by peer|Broken pipe|Socket closed",
        "another rank ended while this one was exchanging data with it",
        consequence=True,
    ),
    Known(
        "store_died",
        r"got 0 bytes|recvValue.* failed",
        "rank 0, which holds the rendezvous store, ended",
        consequence=True,
    ),
    Known(
        "hang",
        r"Timed out waiting \d+ms|Application timeout caused pair closure",
        "no answer from another rank in time",
        consequence=True,
    ),
    Known(
        "no_torch",
        r"No module named 'torch'",
        "torch is not installed in the Python that runs the ranks",
        "pip install 'ringctl[trainer]' there, or name the environment in the inventory (env:)",
    ),
    Known(
        "port_used",
        r"EADDRINUSE|errno: 98|failed to listen on any local network address",
        "the master port is in use",
        "leave out --master-port, so that a free one is taken, or stop what listens there",
    ),
    Known(
        "ifname",
        r"Unable to find address for: (\S+)",
        "that network interface is not on this host, or has no address",
        "leave `ifname` out of the inventory: it is found by itself",
    ),
    Known(
        "disk",
        r"No space left on device|Disk quota exceeded",
        "the disk is full",
        "free some space on that host",
    ),
)

SIGNALS = {
    "SIGKILL": ("usually out of memory", "use a smaller --batch-size or fewer ranks on that host"),
    "SIGILL": ("this build of torch needs CPU instructions that the host lacks", "install another build"),
    "SIGHUP": ("its terminal went away", ""),
}


@dataclass(frozen=True)
class Cause:
    """The first failure of a run."""

    rank: int | None
    host: str
    text: str  # one sentence
    fix: str = ""
    lines: tuple[str, ...] = field(default=())  # its last words


class Tails:
    """The last lines of each rank's stderr, or of its stdout where it has none."""

    def __init__(self) -> None:
        self._err: dict[int, deque[str]] = {}
        self._out: dict[int, deque[str]] = {}

    def add(self, event: Event) -> None:
        if event.kind == "line" and event.rank is not None:
            where = self._err if event.data["stream"] == "err" else self._out
            if event.rank not in where:
                where[event.rank] = deque(maxlen=LAST_LINES)
            where[event.rank].append(event.data["text"])

    def of(self, rank: int) -> list[str]:
        return list(self._err.get(rank) or self._out.get(rank) or ())


def first_failure(state: RunState, tails: Mapping[int, Iterable[str]] | Tails) -> Cause | None:
    """The earliest failure that is not the consequence of another; None if nothing failed."""
    last = tails.of if isinstance(tails, Tails) else lambda rank: list(tails.get(rank, ()))
    failed = [rank for rank in state.ranks.values() if rank.state == "failed"]
    if failed:
        explained = [explain(rank, last(rank.rank)) for rank in failed]
        order = sorted(zip(failed, explained, strict=True), key=lambda pair: (pair[1][1], pair[0].ended or 0))
        return order[0][1][0]
    if state.state == "failed":
        ended = [rank for rank in state.ranks.values() if rank.reason]
        if ended:
            return Cause(None, ended[0].host, f"the run was ended on {ended[0].host}: {ended[0].reason}")
    if state.state == "lost":
        host = next((r.host for r in state.ranks.values() if r.state in ("waiting", "running")), "")
        text = f"the supervisor on {host} is gone and has not said how its ranks ended"
        return Cause(None, host, text, "ringctl stop ends what is left of the run")
    return None


def explain(rank: RankState, lines: list[str]) -> tuple[Cause, bool]:
    """Why this rank failed, and whether that was only the consequence of something else."""
    known = next((k for k in CATALOGUE if any(re.search(k.pattern, line) for line in lines)), None)
    said = last_error(lines)
    why, fix = "", ""
    if known:
        why, fix = known.cause, known.fix
    elif rank.signal in SIGNALS:
        why, fix = SIGNALS[rank.signal]
    how = f"was killed by {rank.signal}" if rank.signal else f"exited with code {rank.exit_code}"
    if rank.reason and rank.exit_code == 127:
        how, said = "did not start", rank.reason
    text = (
        f"rank {rank.rank} on {rank.host} {how}"
        + (f": {said}" if said else "")
        + (f" ({why})" if why else "")
    )
    cause = Cause(rank.rank, rank.host, text, fix, tuple(lines[-20:]))
    return cause, bool(known and known.consequence)


def last_error(lines: list[str]) -> str:
    """The line that says what went wrong: the end of the last traceback, else the last line at all."""
    errors = [line for line in lines if re.match(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b", line)]
    rest = [line.strip() for line in lines if line.strip()]
    return (errors or rest or [""])[-1][:300]
