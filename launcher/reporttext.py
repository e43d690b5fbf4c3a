"""A report as Markdown: tables, a curve made of blocks, the end of the log; and the words that both kinds of
report share. Pure."""

from __future__ import annotations

import collections
import itertools
import json
import math
import re
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from launcher import logs
from launcher.hostword import MAY_BE
from launcher.lastword import lacking
from launcher.text import number, size

Cells = Sequence[str]
BLOCKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 60
LINES_SHOWN = 60
ESCAPED = re.compile(r"([\\`*_\[\]<>|#~])")
RANKS = ("rank", "host", "state", "step", "loss", "samples/s", "step ms", "comm. ms", "sent", "ended")


# --- Words of both kinds -------------------------------------------------------------------------


def seen(text: str) -> str:
    """With whatever a terminal or a page would obey, or that turns text around, as signs."""
    return logs.visible(text)


def first_error(run: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What failed first, or kept it from starting: its text, and what to do."""
    error = {"text": run["error"], "fix": run.get("fix")} if run.get("error") else None
    return run.get("cause") or error


def moment(seconds: Any) -> str:
    value = number(seconds)
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(value)) if value is not None else "–"


def took(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    whole = max(0, round(seconds))
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{minutes} min {whole % 60} s"
    return f"{days} d {hours} h" if days else f"{hours} h {minutes} min"


def figure(value: Any, digits: int = 5) -> str:
    """A number with the digits that count; a text as it is."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10000 else str(value)
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10000 else f"{value:.{digits}g}"
    if isinstance(value, str):
        return seen(value) or "–"
    if isinstance(value, (list, tuple)) and all(isinstance(one, (str, int, float)) for one in value):
        return seen(shlex.join(str(one) for one in value)) or "–"
    return seen(json.dumps(value))


def title(run: Mapping[str, Any]) -> str:
    return seen(run.get("name") or run["run"])


def sentence(run: Mapping[str, Any]) -> str:
    """What, by whom, where and when."""
    hosts = run.get("hosts") or []
    ranks = f"{run.get('world')} ranks" if run.get("world") != 1 else "1 rank"
    where = f" on {', '.join(seen(host) for host in hosts)}" if hosts else ""
    who = f", {seen(run['user'])}" if run.get("user") else ""
    again = f", attempt {run['attempt']}" if (run.get("attempt") or 1) > 1 else ""
    return f"{ranks}{where}{who}, {moment(run.get('started') or run.get('submitted'))}{again}"


def lost(unwritten: Mapping[str, Any]) -> str:
    """How many on each host."""
    each = [f"{seen(host)}: {'some, maybe' if n == MAY_BE else n}" for host, n in sorted(unwritten.items())]
    return ", ".join(each) or "–"


def results(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What came out, as far as it is known."""
    started, ended = number(run.get("started")), number(run.get("ended"))
    accuracy = number(run.get("accuracy"))
    steps = f" of {figure(run['steps'])}" if run.get("steps") is not None else ""
    found = [
        ("loss", figure(run.get("loss"))),
        ("accuracy", f"{accuracy:.2%}" if accuracy is not None else "–"),
        ("step", figure(run.get("step")) + steps),
        ("samples a second", figure(run.get("samples_per_s"), 4)),
        ("took", took(ended - started) if started is not None and ended is not None else "–"),
        ("parameters (sha256)", figure(run.get("parameters_sha256"))),
        ("lines of the log that are lost", lost(run.get("unwritten") or {})),
    ]
    return [(name, value) for name, value in found if value != "–"]


def options(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was asked for; what hosts have in common once."""
    given = (run.get("options") or {}).items()
    known = [(seen(str(key)), value) for key, value in given if value not in (None, "", [], {})]
    return [(key, listed(value) if isinstance(value, list) else figure(value)) for key, value in known]


def listed(values: Sequence[Any]) -> str:
    return ", ".join(dict.fromkeys(figure(value) for value in values))


def environment(run: Mapping[str, Any]) -> tuple[Cells, list[Cells]]:
    """One row a host, where it is told by host; else one row a name."""
    told: Mapping[str, Any] = run.get("environment") or {}
    if told and all(isinstance(value, dict) for value in told.values()):
        names = list(dict.fromkeys(key for value in told.values() for key in value))
        by_host = [(seen(host), [figure(value.get(name)) for name in names]) for host, value in told.items()]
        return ["host", *names], [[host, *cells] for host, cells in by_host]
    return ["name", "value"], [[seen(str(key)), figure(value)] for key, value in told.items()]


def rank_rows(run: Mapping[str, Any]) -> list[Cells]:
    rows: list[Cells] = []
    for rank in run.get("ranks") or []:
        ending = [rank.get("signal") or "", seen(rank.get("reason") or "")]
        if rank.get("exit_code") is not None and not rank.get("signal"):
            ending[0] = f"exit code {rank['exit_code']}"
        numbers = ("step", "loss", "samples_per_s", "step_ms", "comm_ms", "bytes_sent")
        about = [figure(rank["rank"]), seen(rank.get("host") or ""), rank.get("state") or ""]
        values = [figure(number(rank.get(key)), 4) for key in numbers]
        values[0] = figure(rank.get("step"))
        rows.append([*about, *values, ", ".join(filter(None, ending)) or "–"])
    return rows


def attempt_rows(run: Mapping[str, Any]) -> list[Cells]:
    rows: list[Cells] = []
    lacks = lacking(run)
    for one in run.get("attempts") or []:
        started, ended = number(one.get("started")), number(one.get("ended"))
        lasted = took(ended - started) if started is not None and ended is not None else "–"
        told = (one.get("cause") or {}).get("text") or "", lacks.get(one.get("attempt"), "")
        about = [figure(one.get("attempt")), one.get("state") or "", moment(started), lasted]
        rows.append([*about, figure(one.get("world")), seen("; ".join(filter(None, told))) or "–"])
    return rows


def plan_rows(run: Mapping[str, Any]) -> list[Cells]:
    """What was started where; the ranks of a host have the same command."""
    rows: list[Cells] = []
    for host in (run.get("plan") or {}).get("hosts") or []:
        ranks = host.get("ranks") or []
        words = figure(ranks[0].get("argv")) if ranks else "–"
        rows.append([seen(host.get("host") or ""), logs.ranges(rank["rank"] for rank in ranks), words])
    return rows


def plan_words(run: Mapping[str, Any]) -> str:
    plan: Mapping[str, Any] = run.get("plan") or {}
    if not plan.get("master_address"):
        return ""
    code = f", code {plan['code'][:12]}" if plan.get("code") else ""
    return seen(f"Ranks meet at {plan['master_address']}:{plan.get('master_port')}{code}")


def link_rows(run: Mapping[str, Any]) -> list[Cells]:
    """Between the hosts of the run, as far as they were measured."""
    rows: list[Cells] = []
    for link in run.get("links") or []:
        latency, speed = number(link.get("latency_ms")), number(link.get("mbit_s"))
        cells = [
            "–" if latency is None else f"{latency:.3g} ms",
            "–" if speed is None else f"{speed:,.0f} Mbit/s",
        ]
        rows.append([seen(link.get("from") or ""), seen(link.get("to") or ""), *cells])
    return rows


def preflight_words(run: Mapping[str, Any]) -> str:
    """How the hosts were found to be, and when."""
    found: Mapping[str, Any] = run.get("preflight") or {}
    if not found:
        return ""
    count = collections.Counter(check["status"] for check in found.get("checks") or [])
    told = ", ".join(f"{count[key]} {word}" for key, word in STATUS.items() if count[key])
    how = "Ready" if found.get("ok") else "Not ready"
    return f"{how} on {moment(found.get('time'))}: {told or 'nothing checked'}"


def finding_rows(run: Mapping[str, Any]) -> list[Cells]:
    """What preflight found amiss, the worst first."""
    checks = (run.get("preflight") or {}).get("checks") or []
    bad = [check for status in ("fail", "warn") for check in checks if check["status"] == status]
    return [
        [
            seen(f"{check.get('host')} → {check['peer']}" if check.get("peer") else check.get("host") or ""),
            f"{check['name']} {STATUS[check['status']]}",
            seen(check.get("found") or ""),
            seen(check.get("fix") or "") or "–",
        ]
        for check in bad
    ]


def checkpoint_rows(data: Mapping[str, Any]) -> list[Cells]:
    rows: list[Cells] = []
    for of in (data.get("checkpoints") or {}).get("checkpoints") or []:
        whole = {True: "yes", False: "no", None: "unknown"}[of.get("complete")]
        hosts = dict.fromkeys(part["host"] for part in of.get("parts") or [])
        cells = [figure(of.get("step")), figure(of.get("epoch")), whole, figure(of.get("world"))]
        rows.append(
            [*cells, seen(", ".join(hosts)) or "–", size(of.get("bytes") or 0), moment(of.get("written"))]
        )
    return rows


def checkpoint_words(data: Mapping[str, Any]) -> str:
    """Whose part of them is missing."""
    errors = (data.get("checkpoints") or {}).get("errors") or {}
    return f"Not heard of: {', '.join(map(seen, errors))}" if errors else ""


STATUS = {"fail": "failed", "warn": "warned", "ok": "passed", "skip": "skipped"}
PLAN = ("host", "ranks", "command")
LINKS = ("from", "to", "latency", "bandwidth")
FINDINGS = ("host", "check", "found", "to do")
CHECKPOINTS = ("step", "epoch", "complete", "ranks", "on", "size", "written")
ATTEMPTS = ("attempt", "state", "started", "took", "ranks", "cause")


def log_line(line: Sequence[Any]) -> str:
    """[id, time, attempt, host, rank, stream, text] as one line of text that does no harm."""
    _, when, _, host, rank, stream, text = line
    who = seen(host) if rank is None else f"rank {rank}"
    mark = "!" if stream == "err" else " "
    return f"{time.strftime('%H:%M:%S', time.gmtime(when))} {who:<8}{mark} {seen(text)}"


# --- Markdown ------------------------------------------------------------------------------------


def spark(values: Iterable[float], width: int = SPARK_WIDTH) -> str:
    """A curve as high as a letter: the mean of what falls on each."""
    known = [value for value in values if number(value) is not None]
    if not known:
        return ""
    count = min(width, len(known))
    cuts = [round(i * len(known) / count) for i in range(count + 1)]
    means = [sum(known[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]
    low, high = min(means), max(means)
    return "".join(block(mean, low, high) for mean in means)


def block(value: float, low: float, high: float) -> str:
    """As high as the value is between those two; the lowest where they are too far apart, or not at all, to
    say."""
    part = (value - low) / (high - low) if high > low else 0.0
    return BLOCKS[round(part * (len(BLOCKS) - 1))] if math.isfinite(part) else BLOCKS[0]


def escaped(text: str) -> str:
    """As a cell of a table: one line that means nothing in Markdown."""
    return ESCAPED.sub(r"\\\1", text.replace("\n", " ").replace("\r", " "))


def md_table(head: Cells, rows: Iterable[Cells]) -> list[str]:
    lines = ["| " + " | ".join(escaped(cell) for cell in row) + " |" for row in (head, *rows)]
    return [lines[0], "|" + " --- |" * len(head), *lines[1:]]


def section(name: str, head: Cells, rows: Sequence[Cells], words: str = "") -> list[str]:
    said = [f"{escaped(words)}.", ""] if words else []
    table = [*md_table(head, rows), ""] if rows else []
    return [f"## {name}", "", *said, *table] if said or table else []


def curves(metrics: Mapping[str, Any]) -> list[Cells]:
    """Of rank 0, or the first that told, over all attempts."""
    series = sorted(metrics.get("series") or [], key=lambda one: (one["rank"], one["attempt"]))
    rows: list[Cells] = []
    for key, name in (("loss", "loss"), ("accuracy", "accuracy"), ("samples_per_s", "samples/s")):
        told = [one for one in series if any(number(value) is not None for value in one.get(key) or [])]
        if told:
            mine = [one for one in told if one["rank"] == told[0]["rank"]]
            values = [value for one in mine for value in one[key] if number(value) is not None]
            rows.append([name, figure(values[0], 4), spark(values), figure(values[-1], 4)])
    return rows


def fenced(lines: Sequence[str]) -> list[str]:
    """In a fence that nothing in the lines can end."""
    longest = max((len(run) for line in lines for run in re.findall(r"`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}text", *lines, fence]


def render_markdown(data: Mapping[str, Any]) -> str:
    run = data["run"]
    about = f"Run `{run['run']}` {run['state']}: {escaped(sentence(run))}."
    lines = [f"# {escaped(title(run))}", "", about, ""]
    cause = first_error(run)
    if cause and run["state"] != "succeeded":
        lines += [f"**{escaped(seen(cause.get('text') or ''))}**", ""]
        if cause.get("fix"):
            lines += [escaped(seen(cause["fix"])), ""]
    head, rows = environment(run)
    lines += section("Results", ("name", "value"), results(run))
    lines += section("Curves", ("of", "first", "", "last"), curves(data["metrics"]))
    lines += section("Options", ("name", "value"), options(run))
    lines += section("Ranks", RANKS, rank_rows(run))
    lines += section("Attempts", ATTEMPTS, attempt_rows(run))
    lines += section("Links", LINKS, link_rows(run))
    lines += section("Checkpoints", CHECKPOINTS, checkpoint_rows(data), checkpoint_words(data))
    lines += section("Plan", PLAN, plan_rows(run), plan_words(run))
    lines += section("Environment", head, rows)
    lines += section("Preflight", FINDINGS, finding_rows(run), preflight_words(run))
    said = [log_line(line) for line in data["log"]["lines"][-LINES_SHOWN:]]
    if said:
        lines += ["## End of the log", "", *fenced(said), ""]
    lines.append(f"Made by ringctl {data['ringctl']}, {moment(data['made'])}.")
    return "\n".join(lines).encode("utf-8", "replace").decode() + "\n"
