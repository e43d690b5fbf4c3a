"""Pure: a run as the history or a service tells of it (listing.detail), as what text.py and screens show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from launcher.diagnose import Cause
from launcher.model import Host, Plan, RankState, RunState, RunStatus, from_json
from launcher.runs import Found
from launcher.watch import Outcome

OF_RANK = ("rank", "host", "state", "pid", "exit_code", "signal", "reason")
FIGURES = ("step", "loss", "samples_per_s", "step_ms", "comm_ms", "bytes_sent")
OF_ALL = ("epoch", "epochs", "steps", "accuracy", "parameters_sha256")  # told once, as all ranks say the same


def found_of(detail: Mapping[str, Any], now: float) -> Found:
    """What `status` shows."""
    return Found(
        detail["run"],
        detail["name"],
        hosts_of(detail["hosts"]),
        detail["started"] or detail["submitted"],
        end=state_of(detail, now),
        cause=detail["cause"],
        attempt=detail["attempt"],
        former=hosts_of(detail["former"]),
        unended=tuple(detail["unended"]),
        never_started=detail["plan"] is None,
    )


def hosts_of(names: list[str]) -> tuple[Host, ...]:
    return tuple(Host(name) for name in names)


def state_of(detail: Mapping[str, Any], now: float) -> RunState:
    """Also of a run that waits, or was cancelled: these are states of no run that has started."""
    ranks = {rank["rank"]: rank_of(rank, now) for rank in detail["ranks"]}
    first = next((rank for rank in ranks.values() if "step" in rank.metric), None)
    first = first or next(iter(ranks.values()), None)
    if first is not None:
        shared = {key: detail[key] for key in OF_ALL if detail[key] is not None}
        ranks[first.rank] = replace(first, metric={**first.metric, **shared})
    times = [each["started"] for each in detail["attempts"] if each["attempt"] == detail["attempt"]]
    return RunState(
        run=detail["run"],
        name=detail["name"],
        attempt=detail["attempt"],
        world=detail["world"] or 0,
        state=cast(RunStatus, detail["state"]),
        ranks=ranks,
        started=(times or [detail["started"]])[0],
        ended=detail["ended"],
        unwritten={host: int(lines) for host, lines in (detail.get("unwritten") or {}).items()},
    )


def rank_of(told: Mapping[str, Any], now: float) -> RankState:
    age = told["heartbeat_age_s"]
    rank = from_json(RankState, {key: told[key] for key in OF_RANK})
    figures = {key: told[key] for key in FIGURES if told[key] is not None}
    return replace(rank, seen=None if age is None else now - age, metric=figures)


def outcome_of(detail: Mapping[str, Any], now: float) -> Outcome:
    """How it ended."""
    return with_cause(state_of(detail, now), detail["cause"])


def with_cause(state: RunState, cause: Mapping[str, Any] | None) -> Outcome:
    return Outcome(state, from_json(Cause, cause) if cause else None)


def plan_of(detail: Mapping[str, Any]) -> Plan | None:
    return from_json(Plan, detail["plan"]) if detail["plan"] else None


def unstarted_lines(detail: Mapping[str, Any]) -> list[str]:
    """Why a run has not started: what it waits for, or what kept it from it, and what to do."""
    if detail["plan"] is not None:
        return []
    words = [line for line in (detail["waiting"], detail["error"]) if line]
    fixes = detail["fix"].splitlines()
    return words + [f"  {'to do: ' if number == 0 else ''}{line}" for number, line in enumerate(fixes)]
