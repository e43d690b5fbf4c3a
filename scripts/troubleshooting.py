"""Print docs/troubleshooting.md, made from the table that `ringctl explain` uses:

python scripts/troubleshooting.py > docs/troubleshooting.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launcher.catalogue import THEMES, Row

HEAD = """# Troubleshooting

<!-- Made by scripts/troubleshooting.py from launcher/catalogue.py; change it there. -->

Something failed? Let ringctl read the log first:

    ringctl explain              # the latest run
    ringctl explain RUN          # another one, also while it runs: who keeps the others waiting
    ringctl explain train.log    # any log, also of torchrun or nohup; - for stdin

It names the rank that failed first, the line of your program, the cause, and what to do. It exits with 0 if
it could explain the failure, with 1 if it found none or does not know it, with 2 if there is no such run or
file. `--json` prints the same as an object.

**Before a launch**, `ringctl preflight` finds most of this without starting anything, and prints the line
that mends it.

**A run that hangs.** When ranks make no progress for 30 s, and for ten times their usual step, their hosts
note in which call each rank is, and ringctl says who keeps the others waiting. It ends nothing: that may
only be slow. For another patience set `RINGCTL_WATCHDOG=SECONDS` where you launch; 0 turns it off.
By hand, `kill -USR1 PID` makes a trainer that was started without
ringctl print its stack.

**Many messages, one cause.** When a rank ends, all others lose their connection to it, and each says so in
its own way. Those are consequences; the table says which they are. Look for the first rank that says
anything else.
"""


def document() -> str:
    """The whole page."""
    parts = [HEAD, *contents()]
    for theme, rows in THEMES:
        parts.append(f"## {theme}\n")
        parts += ["\n".join(section(row)) + "\n" for row in rows]
    return "\n".join(parts)


def contents() -> Iterator[str]:
    for theme, rows in THEMES:
        links = ", ".join(f"[{row.title}](#{anchor(row.title)})" for row in rows)
        yield f"- **{theme}**: {links}"
    yield ""


def anchor(title: str) -> str:
    """What GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def section(row: Row) -> Iterator[str]:
    yield f"### {capital(row.title)}"
    yield ""
    seen = [f"`{as_seen(pattern)}`" for pattern in row.patterns]
    seen += [f"a rank killed by {name}" for name in row.signals]
    torchs = ", where torch, gloo or NCCL says so: any other connection ends in these words too"
    yield f"You see: {', '.join(dict.fromkeys(seen))}{torchs if row.only_torch else ''}."
    yield ""
    yield f"Why: {row.cause}."
    yield ""
    yield f"Do: {row.fix.replace('{host}', 'HOST')}."
    for label, text in (("Preflight sees it", row.seen_by), ("By itself ringctl", row.auto)):
        if text:
            yield ""
            yield f"{label}: {text}."
    yield ""
    yield f"<sub>`{row.id}`</sub>"


def capital(text: str) -> str:
    return text if text.startswith(".") else text[0].upper() + text[1:]


READABLE = (  # from a regular expression to what one sees in a log
    (r"\(\?!.*?\)", ""),
    (r"\^\(\?:.*?\)\?", ""),  # optional, at the beginning
    (r"\((?:\?:)?([^()|]*)\|[^()]*\)\??", r"\1"),  # the first of several
    (r"\(\?:([^()]*)\)\?", ""),
    (r"\(([^()?][^()]*)\)", r"\1"),
    (r"\[(\w)\w\](?!\+|\*)", r"\1"),  # either case
    (r"\[[^]]*\][+*]?", "..."),
    (r"\\d(?:\{\d+\})?\+?", "N"),
    (r"(?:\\[SwW][+*]?|\.[*+]\??)", "..."),
    (r"\\s[*]", ""),
    (r"\\s\+", " "),
    (r"\\b|\^|\$", ""),
    (r"(\w)\?", r"\1"),
    (r"\\(.)", r"\1"),
    (r"(\.\.\.)[.\s]*(?=\.\.\.)", ""),
)


def as_seen(pattern: str) -> str:
    """A pattern as a reader would recognise it in a log."""
    pattern = pattern.replace(r"\(", "\1").replace(r"\)", "\2").replace(r"\[", "\3").replace(r"\]", "\4")
    for expression, replacement in READABLE:
        pattern = re.sub(expression, replacement, pattern)
    for mark, sign in (("\1", "("), ("\2", ")"), ("\3", "["), ("\4", "]")):
        pattern = pattern.replace(mark, sign)
    return pattern.strip(" :|")


if __name__ == "__main__":
    sys.stdout.write(document())
