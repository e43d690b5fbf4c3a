"""A report as one HTML file that asks nobody for anything: the page's own style and charts are in it.

Tables and the log are plain HTML, to be read without a script; the curves are drawn by the same modules
that the page uses, put together into one script. A policy in the file allows just this script and this style.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher import reporttext as words
from launcher.text import number

PAGE = Path(__file__).parent / "serve" / "page"
STYLES = ("theme.css", "style.css", "charts.css", "report.css")
# Each after what it needs.
MODULES = ("format", "dom", "icons", "series", "charts", "bars", "ring", "matrix", "curves", "report")
IMPORT = re.compile(r"^import .*? from \"\./[a-z]+\.js\";\n", re.M)
EXPORT = re.compile(r"^export (?=(?:const|function|class|async) )", re.M)
IN_SCRIPT = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})
CURVES = ("rank", "attempt", "step", "time", "loss", "accuracy", "samples_per_s", "step_ms", "comm_ms")
LONG_WORD = 20
DRAWN = ("run", "name", "state", "steps", "ranks", "links", "preflight")


@functools.cache
def style() -> str:
    return "".join((PAGE / name).read_text(encoding="utf-8") for name in STYLES)


@functools.cache
def script() -> str:
    """The modules as one: each name is there once, so that nothing has to be imported."""
    parts = [(PAGE / f"{name}.js").read_text(encoding="utf-8") for name in MODULES]
    body = "\n".join(EXPORT.sub("", IMPORT.sub("", part)) for part in parts)
    return f'"use strict";\n{{\n{body}}}\n'


def hash_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def content_security_policy() -> str:
    """Of the file itself; whoever serves one sends it as a header as well."""
    own = f"script-src {hash_of(script())}; style-src {hash_of(style())}"
    return f"default-src 'none'; {own}; base-uri 'none'; form-action 'none'"


# --- Pieces --------------------------------------------------------------------------------------


def json_in_html(data: Any) -> str:
    """JSON that no text in it can end the script element with."""
    return json.dumps(finite(data), separators=(",", ":"), allow_nan=False).translate(IN_SCRIPT)


def finite(data: Any) -> Any:
    """With null in place of what JSON has no word for."""
    if isinstance(data, float):
        return number(data)
    if isinstance(data, Mapping):
        return {str(key): finite(value) for key, value in data.items()}
    return [finite(value) for value in data] if isinstance(data, (list, tuple)) else data


def text(value: str) -> str:
    return html.escape(words.seen(value))


def length(cell: str) -> str:
    """A word is broken only if it is longer than words are: a path, or a sum."""
    return ' class="long"' if any(len(word) > LONG_WORD for word in cell.split()) else ""


def table(name: str, head: words.Cells, rows: Iterable[words.Cells], kind: str = "", said: str = "") -> str:
    def row(cells: Sequence[str], tag: str, scope: str) -> str:
        first, *rest = cells
        inside = "".join(f"<{tag}{length(cell)}>{html.escape(cell)}</{tag}>" for cell in rest)
        return f'<tr><th scope="{scope}">{html.escape(first)}</th>{inside}</tr>'

    made = [row(cells, "td", "row") for cells in rows]
    note = f'<p class="soft small">{html.escape(said)}</p>' if said else ""
    if not made:
        return f'<section class="card pad"><h2>{html.escape(name)}</h2>{note}</section>\n' if said else ""
    heads = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in head)
    return (
        f'<section class="card pad"><h2>{html.escape(name)}</h2>{note}<div class="scroll">'
        f'<table class="plain {kind}">'
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(made)}</tbody></table></div></section>\n"
    )


def cause(run: Mapping[str, Any]) -> str:
    found = words.first_error(run)
    if not found or not found.get("text") or run["state"] == "succeeded":
        return ""
    fix = f'<p class="fixline">{text(found["fix"])}</p>' if found.get("fix") else ""
    inside = f"<strong>{text(found['text'])}</strong>{fix}"
    return f'<div class="banner bad" id="cause"><div>{inside}</div></div>\n'


def stats(run: Mapping[str, Any]) -> str:
    made = [(html.escape(name), html.escape(value)) for name, value in words.results(run)]
    inside = [f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in made if len(value) < 32]
    rest = [(name, value) for name, value in made if len(value) >= 32]
    long = [f'<p class="soft small">{name}: <code>{value}</code></p>' for name, value in rest]
    return f'<dl class="stats">{"".join(inside)}</dl>{"".join(long)}\n' if made else ""


def preflight(run: Mapping[str, Any]) -> str:
    """In words; the script puts the page's tables in their place."""
    if not run.get("preflight"):
        return ""
    findings = [f"{where}: {check}: {found}" for where, check, found, _ in words.finding_rows(run)]
    said = "".join(f"<p>{html.escape(line)}</p>" for line in (words.preflight_words(run), *findings))
    return f'<section class="card pad" id="preflight"><h2>Preflight</h2><div>{said}</div></section>\n'


def log(said: Mapping[str, Any]) -> str:
    if not said["lines"]:
        return ""
    lines = html.escape("\n".join(words.log_line(line) for line in said["lines"]))
    earlier = '<p class="soft small">Earlier lines are left out.</p>' if said.get("more") else ""
    return (
        '<section class="card pad"><h2>End of the log</h2>'
        f'{earlier}<pre class="tail" tabindex="0" aria-label="End of the log">{lines}</pre></section>\n'
    )


def seen(data: Any) -> Any:
    """With all texts as they are shown elsewhere: what a host said may be any bytes."""
    if isinstance(data, str):
        return words.seen(data)
    if isinstance(data, Mapping):
        return {key: seen(value) for key, value in data.items()}
    return [seen(value) for value in data] if isinstance(data, (list, tuple)) else data


def drawn(data: Mapping[str, Any]) -> dict[str, Any]:
    """What the script needs, and no more."""
    series = [{key: one.get(key) for key in CURVES} for one in data["metrics"].get("series") or []]
    return {
        "run": {key: seen(data["run"].get(key)) for key in DRAWN},
        "metrics": {"last": 0, "series": series},
    }


# --- The whole -----------------------------------------------------------------------------------


def render_html(data: Mapping[str, Any]) -> str:
    run = data["run"]
    name, state = text(run.get("name") or run["run"]), text(run["state"])
    head, rows = words.environment(run)
    body = "".join(
        (
            f'<header class="reporthead"><p class="soft">ringctl report</p><h1>{name}</h1>',
            f'<p class="soft"><span data-badge="{state}">{state}</span> <code>{text(run["run"])}</code></p>',
            f"<p>{html.escape(words.sentence(run))}</p></header>\n",
            cause(run),
            stats(run),
            '<noscript><p class="banner">The curves need JavaScript; all else is below.</p></noscript>\n',
            '<div id="curves"></div>\n<div id="pair" class="pair"></div>\n',
            table("Options", ("name", "value"), words.options(run), "pairs"),
            table("Ranks", words.RANKS, words.rank_rows(run)),
            table("Attempts", words.ATTEMPTS, words.attempt_rows(run)),
            table("Links", words.LINKS, words.link_rows(run)),
            table(
                "Checkpoints",
                words.CHECKPOINTS,
                words.checkpoint_rows(data),
                "",
                words.checkpoint_words(data),
            ),
            table("Plan", words.PLAN, words.plan_rows(run), "", words.plan_words(run)),
            table("Environment", head, rows),
            preflight(run),
            log(data["log"]),
            f'<footer class="soft small">Made by ringctl {text(data["ringctl"])}, ',
            f"{words.moment(data['made'])}. This file needs nothing else and asks nobody.</footer>",
        )
    )
    policy = html.escape(content_security_policy())
    return (
        (
            '<!doctype html>\n<html lang="en" data-theme="auto"><head><meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">\n'
            f"<title>{name} · ringctl report</title>\n<style>{style()}</style></head>\n"
            f'<body><main class="report">\n{body}\n</main>\n'
            f'<script type="application/json" id="data">{json_in_html(drawn(data))}</script>\n'
            f"<script>{script()}</script></body></html>\n"
        )
        .encode("utf-8", "replace")
        .decode()
    )
