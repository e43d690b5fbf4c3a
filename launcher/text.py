"""Pure: plans, states and outcomes as plain text, for pipes, files and terminals alike."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from launcher import fold
from launcher.logs import ranges, visible
from launcher.model import Plan, RankState, RunState
from launcher.plan import is_trainer
from launcher.told import unwritten

if TYPE_CHECKING:
    from launcher.diagnose import Cause
    from launcher.runs import Found
    from launcher.watch import Outcome

Row = Sequence[str]


def columns(rows: Sequence[Row]) -> list[str]:
    """Rows as lines with aligned columns; the first row is the header."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def ago(moment: float | None, now: float) -> str:
    if moment is None:
        return "-"
    seconds = max(0, int(now - moment))
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit} ago"
    return f"{seconds} s ago"


def command_text(command: Sequence[str]) -> str:
    if is_trainer(tuple(command)):
        return "built-in ring trainer" + (f" {shlex.join(command)}" if command else "")
    return shlex.join(command)


# --- Plan ----------------------------------------------------------------------------------------


def plan_rows(plan: Plan) -> list[Row]:
    rows: list[Row] = [("HOST", "RANKS", "INTERFACE", "THREADS", "ENVIRONMENT", "FOLDER")]
    for host in plan.hosts:
        env = host.ranks[0].env
        where = f"{host.env.kind} {host.env.value}" if host.env else "as it is"
        ranks = ranges(rank.rank for rank in host.ranks)
        rows.append(
            (host.host, ranks, env["GLOO_SOCKET_IFNAME"], env["OMP_NUM_THREADS"], where, host.workdir)
        )
    return rows


def plan_lines(plan: Plan) -> list[str]:
    """The plan as a table below two lines that say what and where."""
    name = f" ({plan.name})" if plan.name else ""
    hosts = count(len(plan.hosts), "host")
    return [
        f"run {plan.run}{name}: {count(plan.world, 'rank')} on {hosts}, "
        f"master {plan.master_address}:{plan.master_port}",
        f"command: {command_text(plan.command)}",
        *columns(plan_rows(plan)),
    ]


# --- Progress ------------------------------------------------------------------------------------


def number(value: Any) -> float | None:
    """`value` if it is a number that can be shown as one."""
    usable = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if usable else None


def size(number: int) -> str:
    """Bytes, to be read at a glance."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if number >= unit:
            return f"{number / unit:,.1f} {name}"
    return f"{number} bytes"


def brief(value: Any) -> str:
    """Whatever a rank called its step or loss, as a word that does no harm to a terminal."""
    return visible(str(value)[:20])


def loss_text(loss: Any) -> str:
    """Also one that is no number; "-" where nothing was trained."""
    value = number(loss)
    if value is not None:
        return f"{value:.3f}"
    return "-" if loss is None else brief(loss)


def communication_share(metric: dict[str, Any] | Any) -> float | None:
    """How much of a step's time went into communication, 0 to 1."""
    step, comm = number(metric.get("step_ms")), number(metric.get("comm_ms"))
    return comm / step if step and comm is not None else None


def progress_parts(state: RunState) -> list[str]:
    """Where the run is: epoch, step, loss, accuracy, speed, share of communication; what is known of it."""
    metrics = [rank.metric for rank in state.ranks.values()]
    first = next((metric for metric in metrics if "step" in metric), None)
    if first is None:
        return []
    speeds = [number(metric.get("samples_per_s")) or 0.0 for metric in metrics]
    parts = []
    for key, total in (("epoch", "epochs"), ("step", "steps")):
        if key in first:
            parts.append(f"{key} {brief(first[key])}" + (f"/{brief(first[total])}" if total in first else ""))
    if "loss" in first:
        parts.append(f"loss {loss_text(first['loss'])}")
    # Not what all agree on: ranks come to the end of an epoch one after the other.
    accuracy = number(next((metric["accuracy"] for metric in metrics if "accuracy" in metric), None))
    if accuracy is not None:
        parts.append(f"accuracy {accuracy:.1%}")
    if any(speeds):
        parts.append(f"{sum(speeds):,.0f} samples/s")
    share = communication_share(first)
    if share is not None:
        parts.append(f"communication {share:.0%}")
    return parts


# --- Outcome -------------------------------------------------------------------------------------


def ended_how(rank: RankState) -> str:
    if rank.exit_code is None:
        return "-"
    return rank.signal or str(rank.exit_code)


def rank_rows(state: RunState) -> list[Row]:
    rows: list[Row] = [
        ("RANK", "HOST", "STATE", "EXIT", "STEP", "LOSS", "SAMPLES/S", "COMMUNICATION", "SENT")
    ]
    for rank in state.ranks.values():
        metric = rank.metric
        loss, speed, sent = (number(metric.get(key)) for key in ("loss", "samples_per_s", "bytes_sent"))
        share = communication_share(metric)
        rows.append(
            (
                str(rank.rank),
                rank.host,
                rank.state,
                ended_how(rank),
                brief(metric.get("step", "-")),
                "-" if loss is None else f"{loss:.3f}",
                "-" if speed is None else f"{speed:,.0f}",
                "-" if share is None else f"{share:.0%}",
                "-" if sent is None else f"{sent / 1e6:,.1f} MB",
            )
        )
    return rows


def cause_lines(outcome: Outcome) -> list[str]:
    """The first failure and what to do about it; nothing where there was none."""
    return [] if outcome.cause is None else failure_lines(outcome.cause)


def failure_lines(cause: Cause) -> list[str]:
    """The sentence, the lines of the user's code that led there, and what to do; where nothing is known of
    it, its last words."""
    lines = [f"failed first: {cause.text}"]
    lines += [f"  at {frame}" for frame in cause.trace]
    if not cause.known:
        lines.append("  why is not known here; its last lines were" if cause.lines else "  it said nothing")
        lines += [f"  | {line}" for line in cause.lines]
    return [*lines, f"  to do: {cause.fix}"] if cause.fix else lines


def verdict(outcome: Outcome) -> str:
    """One line: how it ended, after how long, with what accuracy."""
    state = outcome.state
    took = f" after {max(0.0, state.ended - state.started):.1f} s" if state.ended and state.started else ""
    line = f"run {state.run} {state.state}{took}"
    accuracy = number(fold.result(state, "accuracy"))
    return line + (f"; test accuracy {accuracy:.1%}" if accuracy is not None else "")


# --- ps and status -------------------------------------------------------------------------------


def run_json(found: Found) -> dict[str, Any]:
    state = found.state
    return {
        "run": found.run,
        "name": found.name,
        "state": state.state if state else "unknown",
        "world": state.world if state else None,
        "hosts": [host.name for host in found.hosts],
        "started": found.started,
        "attempt": state.attempt if state else None,
    }


def status_json(found: Found, now: float) -> dict[str, Any]:
    ranks = [
        {
            "rank": rank.rank,
            "host": rank.host,
            "pid": rank.pid,
            "state": rank.state,
            "exit_code": rank.exit_code,
            "signal": rank.signal,
            "heartbeat_age_s": round(max(0.0, now - rank.seen), 3) if rank.seen else None,
            "step": rank.metric.get("step"),
            "loss": rank.metric.get("loss"),
            "samples_per_s": rank.metric.get("samples_per_s"),
        }
        for rank in (found.state.ranks.values() if found.state else ())
    ]
    return {**run_json(found), "ranks": ranks}


def ps_rows(runs: Sequence[Found], now: float) -> list[Row]:
    rows: list[Row] = [("RUN", "NAME", "STATE", "WORLD", "HOSTS", "STARTED")]
    for found in runs:
        about = run_json(found)
        hosts = ",".join(about["hosts"][:3]) + (
            f" +{len(about['hosts']) - 3}" if len(about["hosts"]) > 3 else ""
        )
        world = str(about["world"] or "-")
        rows.append((found.run, found.name or "-", about["state"], world, hosts, ago(found.started, now)))
    return rows


def attempt_lines(found: Found, watched: str) -> list[str]:
    """What there is to say about a run that was started more than once, or may be."""
    state, lines = found.state, []
    if state and state.attempt > 1:
        hosts = sorted({rank.host for rank in state.ranks.values()})
        without = [host.name for host in found.former if host.name not in hosts]
        lines.append(
            f"attempt {state.attempt}, {count(state.world, 'rank')}"
            + (f"; without {', '.join(without)}, where an earlier attempt was" if without else "")
        )
    if found.unended:
        names = ", ".join(found.unended)
        lines.append(f"{names} may still have ranks of an earlier attempt: ringctl stop {found.run}")
    return [*lines, watched] if watched else lines


def lost_lines(state: RunState | None) -> list[str]:
    """Whose log is not whole."""
    lost = state.unwritten if state else {}
    return [unwritten(host, {"unwritten": lines}) for host, lines in sorted(lost.items())]


def status_rows(found: Found, now: float) -> list[Row]:
    rows: list[Row] = [("RANK", "HOST", "STATE", "PID", "EXIT", "LAST SIGN", "STEP", "LOSS", "SAMPLES/S")]
    for rank in found.state.ranks.values() if found.state else ():
        loss, speed = number(rank.metric.get("loss")), number(rank.metric.get("samples_per_s"))
        rows.append(
            (
                str(rank.rank),
                rank.host,
                rank.state,
                str(rank.pid or "-"),
                ended_how(rank),
                ago(rank.seen, now),
                brief(rank.metric.get("step", "-")),
                "-" if loss is None else f"{loss:.3f}",
                "-" if speed is None else f"{speed:,.0f}",
            )
        )
    return rows


def json_line(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
