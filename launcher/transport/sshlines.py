"""The lines of SSH configuration files, cut into words as ssh cuts them, and how ssh compares names."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from launcher.errors import InputError

DEEPEST = 16  # as in ssh: files that include each other end somewhere
WHOLE_LINE = ("proxycommand", "localcommand", "remotecommand", "knownhostscommand")


@dataclass(frozen=True)
class Line:
    """A keyword with its value, and where it stands."""

    keyword: str
    words: tuple[str, ...]
    where: str
    text: str
    files: tuple[tuple[Line, ...], ...] = ()  # of an Include

    def wrong(self, why: str) -> InputError:
        return InputError(f"{self.where}: {self.text}: {why}")


def parsed(path: str, folder: str, depth: int) -> tuple[Line, ...]:
    """The lines of a file that say something; none if it cannot be read."""
    try:
        with open(os.path.expanduser(path), encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().split("\n")
    except OSError:
        return ()
    found = []
    for number, text in enumerate(lines, 1):
        if line := parsed_line(text.strip(), f"{path}: line {number}"):
            if line.keyword == "include" and depth < DEEPEST:
                files = tuple(parsed(name, folder, depth + 1) for name in included(line.words, folder))
                line = replace(line, files=files)
            found.append(line)
    return tuple(found)


def parsed_line(text: str, where: str) -> Line | None:
    if not text or text.startswith("#"):
        return None
    match = re.match(r'"?([^\s="]+)"?(?:\s*=\s*|\s+)(.*)', text, re.S)
    if not match or not match[2]:
        raise InputError(f"{where}: {text} has no value")
    keyword, value = match[1].lower(), match[2]
    words = (value,) if keyword in WHOLE_LINE else tuple(split(value, where))
    if not words:
        raise InputError(f"{where}: {text} has no value")
    return Line(keyword, words, where, text)


def split(text: str, where: str) -> Iterator[str]:
    """Words as ssh cuts them: quotes of both kinds, a backslash only before what it can protect."""
    word, quote, begun, place = "", "", False, 0
    while place < len(text):
        char = text[place]
        after = text[place + 1 : place + 2]
        if char == "\\" and (after in ("'", '"', "\\") or (after == " " and not quote)) and after:
            word, begun, place = word + after, True, place + 1
        elif char == quote:
            quote = ""
        elif char in "'\"" and not quote:
            quote, begun = char, True
        elif char.isspace() and not quote:
            if begun:
                yield word
            word, begun = "", False
        elif char == "#" and not begun and not quote:
            return
        else:
            word, begun = word + char, True
        place += 1
    if quote:
        raise InputError(f"{where}: a quote is left open in {text}")
    if begun:
        yield word


def included(patterns: Iterable[str], folder: str) -> Iterator[str]:
    """The files that an Include means; relative ones are beside the user's, or the system's, own."""
    for pattern in patterns:
        yield from sorted(glob.glob(os.path.expanduser(os.path.join(folder, pattern))))


# --- Names ---------------------------------------------------------------------------------------


def fits(pattern: str, text: str) -> bool:
    """As ssh compares: `*` and `?` and nothing else."""
    if "*" not in pattern and "?" not in pattern:
        return pattern == text
    body = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
    return re.fullmatch(body, text, re.S) is not None


def any_fits(patterns: Iterable[str], text: str) -> bool:
    """Whether one fits, and none that begins with `!` does."""
    verdict = False
    for pattern in patterns:
        if fits(pattern.removeprefix("!"), text):
            if pattern.startswith("!"):
                return False
            verdict = True
    return verdict
