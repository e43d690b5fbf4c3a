"""The table of failures, and the page that is made of it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import catalogue
from launcher.catalogue import ROWS, Row

PROJECT = Path(__file__).resolve().parents[2]
MADE = subprocess.run(
    [sys.executable, str(PROJECT / "scripts" / "troubleshooting.py")],
    capture_output=True,
    text=True,
    check=True,
).stdout
PATTERNS = [pattern for row in ROWS for pattern in row.patterns]


def test_the_page_is_what_the_table_makes_of_it() -> None:
    assert (PROJECT / "docs" / "troubleshooting.md").read_text() == MADE, "run scripts/troubleshooting.py"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_every_row_says_what_it_is_and_what_to_do(row: Row) -> None:
    assert f"<sub>`{row.id}`</sub>" in MADE
    assert row.patterns
    assert row.cause
    assert row.fix
    assert not row.cause.endswith(".")
    assert "\n" not in row.cause + row.fix
    assert not re.search(r"[a-z]{2}  [a-z]", row.cause + row.fix), "put together with a space too many"


def test_no_row_is_there_twice() -> None:
    assert len({row.id for row in ROWS}) == len(ROWS)
    assert len(set(PATTERNS)) == len(PATTERNS)


def test_the_page_shows_what_a_log_shows_and_no_regular_expressions() -> None:
    shown = [line for line in MADE.splitlines() if line.startswith("You see: ")]
    assert len(shown) == len(ROWS)
    assert not [line for line in shown if re.search(r"\(\?|\\[a-zA-Z]|\[\^", line)]
    assert "`waiting for clients. N/N`" in "".join(shown)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_quick_look_at_a_log_misses_nothing_that_the_table_knows(pattern: str) -> None:
    piece = catalogue.literal(pattern)
    assert len(piece) > 3
    assert mandatory(pattern, piece), f"{piece!r} need not be in a line that {pattern!r} matches"


def mandatory(pattern: str, piece: str) -> bool:
    """Whether the regular expression has `piece` as it stands, outside of anything optional."""
    escaped = re.escape(piece).replace(r"\ ", " ").replace(r"\'", "'").replace(r"\-", "-")
    plain = re.sub(r"\\([^\w\s\[\].()?*+^$|])", r"\1", pattern)
    depth, outside = 0, []
    for number, sign in enumerate(plain):
        bare = number == 0 or plain[number - 1] != "\\"
        depth += (sign == "(") * bare - (sign == ")") * bare
        outside.append(sign if depth == 0 else "\0")
    text = "".join(outside)
    at = text.find(re.sub(r"\\([^\w\s\[\].()?*+^$|])", r"\1", escaped))
    return at >= 0 and text[at + len(escaped) : at + len(escaped) + 1] not in ("?", "*")


def test_a_cause_comes_before_what_follows_from_it() -> None:
    lines = ["Connection closed by peer [10.0.0.1]", "OSError: [Errno 28] No space left on device"]
    found = catalogue.find(lines)
    assert found is not None
    assert found.id == "disk"


def test_errno_97_is_noise() -> None:
    line = (
        "[W socket.cpp:697] [c10d] The server socket cannot be initialized on [::]:2 (errno: 97 - ss_family)."
    )
    assert catalogue.find([line]) is None


def test_what_only_means_something_between_hosts_is_not_said_of_one_host() -> None:
    line = "timed out connecting: SO_ERROR: Connection refused, remote=[127.0.0.1]:60851$0"
    here, there = catalogue.find([line], one_host=True), catalogue.find([line])
    assert here is not None
    assert there is not None
    assert (here.id, there.id) == ("refused", "loopback_name")
