"""Pure: how runs differ in what was asked for and in what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from launcher.redact import SHOWN, tells
from launcher.text import number

if TYPE_CHECKING:
    from launcher.history import Record

RESULTS = (
    *("state", "attempt", "step", "steps", "epoch", "epochs", "loss", "accuracy", "samples_per_s"),
    *("duration_s", "parameters_sha256", "error"),
)


def options_of(record: Record) -> dict[str, Any]:
    """What was asked for, one entry for each thing that can be asked for; no secret among them."""
    options, plan = record.options, record.plan
    asked = {
        "world": plan.world,
        "hosts": [host.name for host in record.hosts],
        "environment": [f"{host.env.kind} {host.env.value}" if host.env else "" for host in record.hosts],
        "code": plan.code,
        "max_restarts": options.max_restarts,
        "restart_delay": options.restart_delay,
        "min_world": options.min_world,
        "prefork": options.prefork,
        "preflight": options.preflight,
    }
    given = {name: SHOWN if tells(name, value) else value for name, value in options.variables.items()}
    given |= dict.fromkeys(options.secrets, SHOWN)
    return {**words_of(plan.command), **asked, **{f"env {name}": value for name, value in given.items()}}


def words_of(command: Sequence[str]) -> dict[str, Any]:
    """The options in a command line: `--lr 0.1 -v` -> {"--lr": "0.1", "-v": True}; and what else there is as
    "command". Of one that is given again the last counts, as most programs have it."""
    found: dict[str, Any] = {}
    rest, words = [], list(command)
    while words:
        word = words.pop(0)
        if not is_option(word):
            rest.append(word)
            continue
        name, equals, value = word.partition("=")
        if equals:
            found[name] = value
        elif words and not is_option(words[0]):
            found[name] = words.pop(0)
        else:
            found[name] = True
    return {"command": " ".join(rest) or "built-in ring trainer", **found}


def is_option(word: str) -> bool:
    """A negative number is none."""
    if not word.startswith("-") or word == "-":
        return False
    try:
        float(word)
    except ValueError:
        return True
    return False


def results_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """What came of it, from a row of a list."""
    started, ended = row.get("started"), row.get("ended")
    duration = round(ended - started, 1) if started is not None and ended is not None else None
    return {**{key: row.get(key) for key in RESULTS}, "duration_s": duration}


def compare(rows: Sequence[Mapping[str, Any]], options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Options and results side by side; a value that one of them lacks is None."""
    return {"options": side_by_side(options), "results": side_by_side([results_of(row) for row in rows])}


def side_by_side(each: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    keys = list(dict.fromkeys(key for one in each for key in one))
    table = [(key, [one.get(key) for one in each]) for key in keys]
    return [{"key": key, "values": values, "differs": differ(values)} for key, values in table]


def differ(values: Sequence[Any]) -> bool:
    """0.10 and 0.1 are the same learning rate."""
    return any(plain(value) != plain(values[0]) for value in values[1:])


def plain(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return number(float(value)) or value
        except ValueError:
            return value
    return value


def shown(value: Any) -> str:
    """As a cell of a table."""
    if value is None or value == "" or value == []:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ",".join(map(shown, value)) if isinstance(value, (list, tuple)) else str(value)
