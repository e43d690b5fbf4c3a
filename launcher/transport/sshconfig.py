"""The user's SSH configuration, with the files that `Include` names in it, which paramiko does not follow."""

from __future__ import annotations

import glob
import os
import shlex

import paramiko

from launcher.errors import InputError

FILES = ("~/.ssh/config", "/etc/ssh/ssh_config")  # what an earlier one says counts
DEEPEST = 16  # as in ssh: files that include each other end somewhere


def load() -> paramiko.SSHConfig:
    """What ssh would read; InputError where it cannot be understood."""
    lines: list[str] = []
    for path in map(os.path.expanduser, FILES):
        lines += ["Host *", *expanded(path, os.path.dirname(path), 0)]
    try:
        return paramiko.SSHConfig.from_text("\n".join(lines))
    except (paramiko.SSHException, ValueError) as error:
        raise InputError(f"{FILES[0]}: {error}") from None


def expanded(path: str, folder: str, depth: int) -> list[str]:
    """The lines of a configuration file with those of the files it includes; none if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    found, block = [], "Host *"
    for line in lines:
        word, _, rest = line.strip().replace("=", " ", 1).partition(" ")
        if word.lower() in ("host", "match"):
            block = line
        if word.lower() != "include":
            found.append(line)
        elif depth < DEEPEST:
            for name in included(rest, folder):
                found += expanded(name, folder, depth + 1)
            found.append(block)  # the included file may have begun another
    return found


def included(patterns: str, folder: str) -> list[str]:
    """The files that an Include means; relative ones are beside the configuration it is in."""
    try:
        words = shlex.split(patterns)
    except ValueError:
        raise InputError(f"{FILES[0]}: a quote is left open in 'Include {patterns}'") from None
    return [
        name for word in words for name in sorted(glob.glob(os.path.join(folder, os.path.expanduser(word))))
    ]
