"""Pure: events -> RunState. What every screen, exit code and report is made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from launcher.hostword import MAY_BE, UNASKED
from launcher.model import Event, Plan, RankState, RunState, RunStatus
from launcher.told import MOST, words_of

ENDED = ("succeeded", "failed", "stopped")
ASIDE = ("line", "stack", "oom")  # told of a rank, without being a sign of its life
# From the beginning of a stop until hosts know of it: those that cannot be told are waited for (2 s), and
# clocks differ. Until what it ends has ended, if a host does not say how long that took: with a grace of 5 s.
TELLING_S, STOPPING_S = 3.0, 8.0
MOST_NAMES = 200  # of metrics that are kept of a rank
LONGEST_WORD = 200  # in them, as name or as value
PLAIN = (int, float, str, type(None))


def initial(plan: Plan) -> RunState:
    """The run before anything happened."""
    ranks = {rank: RankState(rank, host) for rank, host in plan.rank_hosts.items()}
    return RunState(plan.run, plan.name, plan.attempt, plan.world, "starting", ranks)


def before(state: RunState) -> RunState:
    """The same run before anything happened, to fold its events from the first one on."""
    ranks = {number: RankState(number, rank.host) for number, rank in state.ranks.items()}
    return replace(state, state="starting", ranks=ranks, started=None, ended=None, unwritten={})


def from_states(states: Sequence[Mapping[str, Any]]) -> RunState:
    """The run as its hosts' state files (one from each host) tell it; what they last said of a rank that has
    nobody to look after it any more means nothing."""
    newest = max(states, key=lambda state: state["attempt"])
    states = [state for state in states if state["attempt"] == newest["attempt"]]
    ranks = {r["rank"]: rank_from_state(state, r) for state in states for r in state["ranks"]}
    lost = any(state["state"] == "lost" for state in states)
    ended = [state["ended"] for state in states]
    return RunState(
        run=newest["run"],
        name=newest["name"],
        attempt=newest["attempt"],
        world=newest["world"],
        state="lost" if lost else run_status(ranks),
        ranks=dict(sorted(ranks.items())),
        started=min(state["started"] for state in states),
        ended=None if None in ended else max(ended),
        unwritten={state["host"]: lines for state in states if (lines := unwritten(state))},
    )


def unwritten(told: Mapping[str, Any]) -> int:
    """How many lines of its log a host says that are lost, MAY_BE if nobody knows whether any are."""
    lines = told.get("unwritten", 0)
    return lines if type(lines) is int and MAY_BE <= lines <= MOST else 0


def with_unknown(state: RunState, hosts: Mapping[int, str]) -> RunState:
    """With the ranks that no host has told of, on `hosts`: as long as there are any, the run may go on."""
    missing = [number for number in range(state.world) if number not in state.ranks]
    if not missing:
        return state
    unknown = {number: RankState(number, hosts.get(number, "?"), state="unknown") for number in missing}
    ranks = dict(sorted({**state.ranks, **unknown}.items()))
    return replace(
        state, ranks=ranks, state="lost" if state.state == "lost" else run_status(ranks), ended=None
    )


def without_missing(
    state: RunState, hosts: Mapping[int, str], now: float, reason: str = "stopped"
) -> RunState:
    """A run that has ended on all hosts: ranks that none has told of, or begun, were stopped before that, for
    this reason."""

    def never_began(number: int) -> RankState:
        rank = state.ranks.get(number) or RankState(number, hosts.get(number, "?"), state="waiting")
        return replace(rank, state="stopped", reason=reason) if rank.state == "waiting" else rank

    ranks = {number: never_began(number) for number in range(state.world)}
    status = "lost" if state.state == "lost" else run_status(ranks)
    return replace(state, ranks=ranks, state=status, ended=state.ended or now)


def rank_from_state(state: Mapping[str, Any], rank: Mapping[str, Any]) -> RankState:
    known = {
        key: rank[key] for key in ("rank", "state", "pid", "exit_code", "signal", "reason", "seen", "metric")
    }
    ended = rank["seen"] if rank["state"] in ENDED else None  # the last that there was to be seen of it
    more = {"ended": ended, "stopping": rank.get("stopping"), "metric": newest({}, rank["metric"])}
    found = RankState(host=state["host"], **{**known, **more})
    return out_of_sight(found) if state["state"] == "lost" else found


def as_lost(state: RunState) -> RunState:
    """A run that nobody hears of any more: what became of the ranks that had not ended is not known."""
    ranks = {number: out_of_sight(rank) for number, rank in state.ranks.items()}
    return replace(state, state="lost", ranks=ranks)


def out_of_sight(rank: RankState) -> RankState:
    return replace(rank, state="unknown") if rank.state in ("waiting", "running") else rank


def with_rank(state: RunState, event: Event) -> RunState:
    """With the rank that this is about, for an attempt of which nobody knows how many it had."""
    if event.rank is None or event.rank in state.ranks:
        return state
    ranks = dict(sorted({**state.ranks, event.rank: RankState(event.rank, event.host)}.items()))
    return replace(state, ranks=ranks, world=len(ranks))


def fold(state: RunState, event: Event) -> RunState:
    """The run after `event`."""
    if event.kind == "host_finished" and (lines := unwritten(event.data)):
        return replace(state, unwritten={**state.unwritten, event.host: lines})
    if event.kind in ASIDE or event.rank is None or event.rank not in state.ranks:
        return state
    rank = replace(state.ranks[event.rank], seen=event.time, host=event.host)
    if event.kind == "rank_started":
        rank = replace(rank, state="running", pid=event.data.get("pid"))
    elif event.kind == "metric":
        rank = replace(rank, metric=newest(rank.metric, event.data))
    elif event.kind == "rank_exited":
        ended = event.time - (event.data.get("ago") or 0.0)
        rank = replace(
            rank,
            state=event.data["state"],
            exit_code=event.data["exit_code"],
            signal=event.data["signal"],
            reason=words_of(event.data["reason"]),
            stopping=event.data.get("stopping"),
            ended=ended,
            seen=ended,
        )
    ranks: dict[int, RankState] = {**state.ranks, event.rank: rank}
    status = run_status(ranks)
    return replace(
        state,
        ranks=ranks,
        state=status,
        started=event.time if state.started is None else state.started,
        ended=event.time if status in ENDED else None,
    )


def newest(metric: Mapping[str, Any], told: Mapping[str, Any]) -> dict[str, Any]:
    """The newest value of each metric. What a program may write without end, every later record would have to
    carry on: names beyond the first so many are left out, and what is long or no plain value, as its host
    does."""
    plain = {
        name: value
        for name, value in told.items()
        if isinstance(value, PLAIN) and max(len(name), len(str(value))) <= LONGEST_WORD
    }
    if len(metric) + len(plain) > MOST_NAMES:
        room = [name for name in plain if name not in metric][: max(0, MOST_NAMES - len(metric))]
        plain = {name: plain[name] for name in (*(metric.keys() & plain.keys()), *room)}
    return {**metric, **plain}


def has_begun(rank: RankState) -> bool:
    """Whether it was started, or may have been: then there is a log."""
    return rank.pid is not None or rank.state in ("running", "unknown")


def run_status(ranks: Mapping[int, RankState]) -> RunStatus:
    """What the ranks together amount to."""
    states = {rank.state for rank in ranks.values()}
    if "unknown" in states and states & {"failed", "stopped"} and not states & {"waiting", "running"}:
        return "lost"  # it cannot go on, and how the others ended is not known
    if states & {"waiting", "running", "unknown"}:
        return "starting" if states == {"waiting"} else "running"
    if states & {"failed", "stopped"}:
        return "stopped" if was_stopped(ranks) and not failed_before(ranks) else "failed"
    return "succeeded"


def was_stopped(ranks: Mapping[int, RankState]) -> bool:
    """Whether somebody wanted the run to end, whatever became of ranks that this did not reach in time."""
    return any(rank.reason == "stopped" for rank in ranks.values())


def failed_before(ranks: Mapping[int, RankState]) -> bool:
    """Whether a rank had failed, or was lost, when somebody wanted the run to end: those that fail later do
    so for want of the others. A host that hears of a failure does not say of its ranks that they were
    stopped; if both happened, these hosts did not hear each other, and only the times tell. One that never
    began has none."""
    failures = [rank.ended for rank in ranks.values() if rank.state == "failed" or rank.reason in UNASKED]
    stops = [
        rank.ended - (STOPPING_S if rank.stopping is None else rank.stopping + TELLING_S)
        for rank in ranks.values()
        if rank.reason == "stopped" and rank.pid and rank.ended is not None
    ]
    return bool(failures) and (
        not stops or any(ended is not None and ended < min(stops) for ended in failures)
    )


def result(state: RunState, key: str) -> Any:
    """The newest value of a metric that all ranks agree on that tell of it, such as the test accuracy; else
    None."""
    told = [metric[key] for metric in newest_told(state) if metric.get(key) is not None]
    return told[0] if told and all(value == told[0] for value in told) else None


def newest_told(state: RunState) -> list[Mapping[str, Any]]:
    """What the ranks told last; of some that have told their end, theirs alone: that of others may be older,
    if their disk was full."""
    told = [rank.metric for rank in state.ranks.values()]
    return [metric for metric in told if metric.get("parameters_sha256")] or told


# The last is that of a run which a service was to start.
EXIT_CODES = {"succeeded": 0, "failed": 1, "lost": 1, "stopped": 130, "cancelled": 130}


def exit_code(state: RunState) -> int:
    """What a command that waited for the run exits with."""
    return EXIT_CODES.get(state.state, 1)
