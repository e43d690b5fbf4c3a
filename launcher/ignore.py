"""Which paths a .ringignore means, read as git reads .gitignore."""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Callable, Iterable
from pathlib import Path

from launcher.errors import InputError

Ignored = Callable[[str], bool]


def ignore_rules(root: Path) -> Ignored:
    try:
        lines = (root / ".ringignore").read_text("utf-8", "surrogateescape").splitlines()
    except FileNotFoundError:
        lines = []
    except OSError as error:
        raise InputError(f"{root / '.ringignore'}: {error.strerror}") from None
    return ignore_matcher(lines)


def ignore_matcher(lines: Iterable[str]) -> Ignored:
    """Like .gitignore: the last rule that matches a path decides, but what is in an ignored folder stays so.

    A path that ends in a slash is a folder."""
    rules = []
    for line in lines:
        rule = re.sub(r"(?<!\\)\s+$", "", line)
        if rule and not rule.startswith("#"):
            rules.append((rule.startswith("!"), ignore_pattern(rule.removeprefix("!"))))

    def matched(path: str) -> bool:
        return next((not keep for keep, pattern in reversed(rules) if pattern.match(path)), False)

    @functools.cache
    def ignored_folder(path: str) -> bool:
        return bool(path) and (ignored_folder(folder_of(path)) or matched(path))

    def ignored(path: str) -> bool:
        return ignored_folder(folder_of(path)) or matched(path)

    return ignored


def folder_of(path: str) -> str:
    """Of `a/b` and of `a/b/` it is `a/`; "" at the top."""
    return path[: path.rstrip("/").rfind("/") + 1]


RULE_PARTS = re.compile(r"(\\.|\*\*/|/\*\*\Z|\*+|\?|\[[!^]?\]?(?:\[:\w+:\]|[^\]])*\])", re.S)
WILD = {"**/": "(?:.*/)?", "/**": "/.+", "?": "[^/]"}
CLASSES = {
    "alnum": "0-9A-Za-z",
    "alpha": "A-Za-z",
    "digit": "0-9",
    "lower": "a-z",
    "punct": re.escape(string.punctuation),
    "space": r"\s",
    "upper": "A-Z",
    "xdigit": "0-9A-Fa-f",
}


def ignore_pattern(rule: str) -> re.Pattern[str]:
    """`*.log` and `data/` anywhere, `/out` and `a/b` from the top; `**` over folders, `[a-f]` one of them,
    a backslash before what is meant as it stands."""
    anchored = "/" in rule.rstrip("/")
    body = ""
    for part in RULE_PARTS.split(rule.strip("/")):
        if part.startswith("\\") and len(part) == 2:
            body += re.escape(part[1])
        elif part.startswith("[") and part.endswith("]"):
            body += one_of(part[1:-1])
        elif part.strip("*"):
            body += WILD.get(part, re.escape(part))
        else:
            body += "[^/]*" if part else ""
    tail = "/" if rule.endswith("/") else "/?"
    try:
        return re.compile(("" if anchored else "(?:.*/)?") + body + tail + r"\Z", re.S)
    except re.error as error:
        raise InputError(f".ringignore: {rule}: {error}") from None


def one_of(characters: str) -> str:
    """What is between brackets, as a regular expression: never a slash."""
    inverse = characters[:1] in ("!", "^")
    inner = ""
    for part in re.split(r"(\[:\w+:\])", characters[1:] if inverse else characters):
        name = part[2:-2] if part.startswith("[:") else ""
        inner += CLASSES.get(name) or re.sub(r"\\(.)|([\[\]^&~|\\])", r"\\\1\2", part)
    return f"(?!/)[{'^' if inverse else ''}{inner}]"
