"""Pure: what preflight found, as tables, as sentences and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from launcher.model import CheckResult, Pair, to_json
from launcher.preflight.checks import CHECKS
from launcher.preflight.examine import Examined
from launcher.remote import grouped
from launcher.text import Row, count

SYMBOLS = {"ok": "✓", "warn": "!", "fail": "✗", "skip": "·"}
WORST = ("fail", "warn", "ok", "skip")
MOST_COLUMNS = 6  # hosts side by side; more are grouped by what was found
MOST_IN_MATRIX = 8
PAIR_COLUMNS = 15  # that a cell of the matrix takes
MOST_FINDINGS, MOST_FIXES = 30, 8  # that are shown; --verbose and --json have them all
SLOWEST = 3


# --- The table -----------------------------------------------------------------------------------


def table_rows(examined: Examined, *, every_check: bool = False) -> list[Row]:
    """Areas (or checks) by hosts; hosts with the same column share one where there are many."""
    rows: list[tuple[str, tuple[str, ...]]] = [(check.name, (check.name,)) for check in CHECKS]
    if not every_check:
        areas = dict.fromkeys(check.area for check in CHECKS)
        rows = [(area, tuple(check.name for check in CHECKS if check.area == area)) for area in areas]
    columns = {
        host.name: tuple(cell(examined, host.name, names, every_check) for _, names in rows)
        for host in examined.hosts
    }
    groups = grouped_columns(columns)
    header = ["CHECK" if every_check else "", *groups]
    body = [
        [title, *(cells[number] for cells in groups.values())]
        for number, (title, _) in enumerate(rows)
        if any(cells[number] for cells in groups.values())
    ]
    return [header, *body]


def host_lines(rows: Sequence[Row]) -> list[str]:
    """The table for a narrow terminal: what is not well with each host, one a line."""
    titles, *body = rows
    lines = []
    for number, host in enumerate(titles[1:], start=1):
        cells = [row[number] for row in body]
        bad = [cell for cell in cells if cell.startswith((SYMBOLS["fail"], SYMBOLS["warn"]))]
        lines += [f"{host}: {cell}" for cell in bad or [SYMBOLS["ok"]]]
    return lines


def cell(examined: Examined, host: str, names: Sequence[str], alone: bool) -> str:
    """The worst verdict, and whose it is; "" where none of the checks was asked for."""
    own = [r for r in examined.results if r.host == host and r.name in names]
    if not own:
        return ""
    worst = min((result.status for result in own), key=WORST.index)
    if worst in ("ok", "skip") or alone:
        return SYMBOLS[worst]
    guilty = dict.fromkeys(result.name for result in own if result.status == worst)
    return f"{SYMBOLS[worst]} {', '.join(guilty)}"


def grouped_columns(columns: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    if len(columns) <= MOST_COLUMNS:
        return columns
    by_cells: dict[tuple[str, ...], list[str]] = {}
    for host, cells in columns.items():
        by_cells.setdefault(cells, []).append(host)
    return {grouped(hosts): cells for cells, hosts in by_cells.items()}


# --- Pairs ---------------------------------------------------------------------------------------


def measured(examined: Examined) -> list[Pair]:
    """One pair for each two hosts and direction: the port that ranks meet at is tried besides, and is left
    out unless only that failed."""
    found: dict[tuple[str, str], Pair] = {}
    for pair in examined.survey.pairs:
        before = found.get((pair.source, pair.target))
        if before is None or (pair.problem and not before.problem):
            found[pair.source, pair.target] = pair
    return list(found.values())


def pair_rows(examined: Examined, width: int = 200) -> list[Row]:
    """A matrix where it fits into `width` columns, else the figures in short; nothing where nothing was
    dialled."""
    pairs = measured(examined)
    hosts = [host.name for host in examined.hosts if host.name in examined.survey.facts]
    if not pairs:
        return []
    if len(hosts) > MOST_IN_MATRIX or (len(hosts) > 2 and PAIR_COLUMNS * (len(hosts) + 1) > width):
        return summary_rows(pairs)
    by_ends = {(pair.source, pair.target): pair for pair in pairs}
    rows: list[Row] = [["FROM \\ TO, BIT/S", *hosts]]
    for source in hosts:
        cells = ["-" if source == t else pair_cell(by_ends.get((source, t))) for t in hosts]
        rows.append([source, *cells])
    return rows


def pair_cell(pair: Pair | None) -> str:
    if pair is None:
        return SYMBOLS["skip"]
    if pair.problem:
        return f"{SYMBOLS['fail']} {pair.problem.partition(' (')[0]}"
    latency = "?" if pair.latency_ms is None else f"{pair.latency_ms:.2g} ms"
    speed = "?" if pair.mbit_s is None else rate(pair.mbit_s).replace(" ", "").removesuffix("bit/s")
    return f"{latency} {speed}"


def rate(mbit_s: float) -> str:
    return f"{mbit_s / 1000:.1f} Gbit/s" if mbit_s >= 1000 else f"{mbit_s:.0f} Mbit/s"


def summary_rows(pairs: Sequence[Pair]) -> list[Row]:
    """Least, median and most of all pairs, and the slowest ones by name."""
    from statistics import median  # which takes longer to import than all else here

    good = [pair for pair in pairs if not pair.problem]
    rows: list[Row] = [["PAIRS", "LEAST", "MEDIAN", "MOST"]]
    rows.append([f"{len(good)} of {len(pairs)} reach each other", "", "", ""])
    latencies = [pair.latency_ms for pair in good if pair.latency_ms is not None]
    speeds = [pair.mbit_s for pair in good if pair.mbit_s is not None]
    if latencies:
        few = (min(latencies), median(latencies), max(latencies))
        rows.append(["latency", *(f"{value:.2g} ms" for value in few)])
    if speeds:
        rows.append(["bandwidth", *map(rate, (min(speeds), median(speeds), max(speeds)))])
    slow = sorted((p for p in good if p.mbit_s is not None), key=lambda p: p.mbit_s or 0.0)[:SLOWEST]
    rows += [[f"slowest: {p.source} to {p.target}", rate(p.mbit_s or 0.0), "", ""] for p in slow]
    return rows


# --- What needs attention ------------------------------------------------------------------------


def attention_lines(examined: Examined, *, everything: bool = False) -> list[str]:
    """Only what is not well, the worst first; what several hosts share is said once."""
    lines, findings = [], list(shared_findings(examined).items())
    shown = findings if everything else findings[:MOST_FINDINGS]
    for (status, name, found, wanted, peers, fixes), hosts in shown:
        where = f", from {grouped(peers)}" if peers else ""
        lines.append(f"{SYMBOLS[status]} {grouped(hosts)}: {found}{where} ({name})")
        lines += [f"    wanted: {wanted}"] if wanted else []
        to_type = [f"    {line}" for fix in fixes for line in fix.splitlines()]
        few = to_type if everything else to_type[:MOST_FIXES]
        lines += few
        if to_type[len(few) :]:
            lines.append(f"    ... {len(to_type) - len(few)} more lines: --verbose")
    if findings[len(shown) :]:
        lines.append(f"... and {len(findings) - len(shown)} more: --verbose")
    return lines


Shared = tuple[str, str, str, str, tuple[str, ...], tuple[str, ...]]


def shared_findings(examined: Examined) -> dict[Shared, list[str]]:
    """(status, check, found, wanted, peers, fixes) -> the hosts of which just that was said."""
    by_host: dict[tuple[str, ...], list[CheckResult]] = {}
    for status in ("fail", "warn"):
        for result in examined.results:
            if result.status == status:
                key = (status, result.name, result.found, result.wanted, result.host)
                by_host.setdefault(key, []).append(result)
    shared: dict[Shared, list[str]] = {}
    for (status, name, found, wanted, host), results in by_host.items():
        peers = tuple(result.peer for result in results if result.peer)
        fixes = tuple(dict.fromkeys(result.fix for result in results if result.fix))
        shared.setdefault((status, name, found, wanted, peers, fixes), []).append(host)
    return shared


def verdict(examined: Examined) -> str:
    hosts = count(len(examined.hosts), "host")
    blockers, others = len(examined.blockers), len(examined.failures) - len(examined.blockers)
    warnings = len(examined.warnings)
    rest = [count(others, "problem")] if others else []
    rest += [count(warnings, "warning")] if warnings else []
    if blockers:
        rest = [count(blockers, "blocker"), *rest]
        return f"not ready: {', '.join(rest)} on {hosts}"
    return f"ready: {hosts}" + (f", {', '.join(rest)}" if rest else ", nothing to remark")


def fact_lines(examined: Examined) -> list[str]:
    """All that each host said, one fact a line."""
    lines = []
    for name, facts in examined.survey.facts.items():
        lines.append(f"{name}:")
        lines += [f"    {key}: {value}" for key, value in to_json(facts).items() if key != "host"]
    return lines


# --- JSON ----------------------------------------------------------------------------------------


def as_json(examined: Examined, *, facts: bool = False) -> dict[str, Any]:
    """{"ok", "checks", "pairs"}; with `facts`, also what each host said."""
    about: dict[str, Any] = {
        "ok": examined.exit_code == 0,
        "checks": [to_json(result) for result in examined.results],
        "pairs": [pair_json(pair) for pair in measured(examined)],
    }
    if facts:
        about["facts"] = {name: to_json(each) for name, each in examined.survey.facts.items()}
    return about


def pair_json(pair: Pair) -> dict[str, Any]:
    return {
        "from": pair.source,
        "to": pair.target,
        "latency_ms": pair.latency_ms,
        "mbit_s": pair.mbit_s,
        "problem": pair.problem,
        "seen": pair.seen,
    }
