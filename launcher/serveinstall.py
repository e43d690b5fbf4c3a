"""`ringctl serve --install`: a unit of the user's own systemd, or its text where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click

from launcher.errors import InputError, RingctlError
from launcher.servestart import Options, hosts_of, refuse_exposed
from launcher.watching import WATCHER
from launcher.wholefile import replace_whole

UNIT = "ringctl-serve.service"
ASK_S = 20.0
KEPT = ("RINGCTL_HOME", "PATH", "VIRTUAL_ENV", "CONDA_PREFIX")  # the last two say where ranks find torch


def unit_text(options: Options) -> str:
    """Its launches and watchers are left alone when it ends: runs do not depend on it."""
    kept = {name: os.environ[name] for name in KEPT if os.environ.get(name)}
    environment = "".join(f"Environment={quoted(f'{name}={value}')}\n" for name, value in kept.items())
    return (
        "[Unit]\n"
        "Description=ringctl: queue, API and page for training runs\n"
        "After=network-online.target\n\n"
        "[Service]\n"
        f"ExecStart={' '.join([quoted(sys.executable), *map(argument, argv(options))])}\n"
        f"{environment}"
        f"WorkingDirectory={plain_path(os.getcwd())}\n"
        "Restart=always\n"
        "RestartSec=2\n"
        "KillMode=process\n"
        "UMask=0077\n\n"
        "[Install]\n"
        "WantedBy=default.target\n"
    )


def argv(options: Options) -> list[str]:
    """What Python is told: as `-m launcher` it would take a folder of that name, or a json.py, that lies in
    the folder it works in."""
    where, _ = hosts_of(options.where)  # the inventory that is found now
    given = {
        "--hosts": where.hosts_file,
        "-H": where.host_list,
        "--hostfile": where.hostfile,
        "--include": where.include,
        "--exclude": where.exclude,
        "--port": str(options.port),
        "--bind": options.bind,
        "--tls-cert": os.path.abspath(options.tls_cert) if options.tls_cert else None,
        "--tls-key": os.path.abspath(options.tls_key) if options.tls_key else None,
        "--behind-proxy": options.proxy or None,
    }
    words = [word for name, value in given.items() if value for word in (name, value)]
    names = [word for name in options.names for word in ("--name", name)]
    return ["-c", WATCHER, "--no-input", "serve", *words, *names]


def quoted(word: str) -> str:
    """As systemd reads it: no specifier, no line's end."""
    text = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{text}"'.replace("\n", "\\n")


def argument(word: str) -> str:
    """The same in a command, after the program: no variable either."""
    return quoted(word).replace("$", "$$")


def plain_path(path: str) -> str:
    """A setting that takes a path as it stands, to the line's end."""
    if any(ord(c) < 32 for c in path) or path != path.strip() or path.endswith("\\"):
        raise InputError(
            f"{path!r}: systemd cannot work in a folder of this name", fix="change to another one"
        )
    return path.replace("%", "%%")


def install(options: Options) -> int:
    """Write the unit and start it; where that cannot be done, print it and say what to do with it."""
    refuse_exposed(options)
    text = unit_text(options)
    if not has_systemd():
        click.echo(text)
        click.echo(
            f"there is no systemd for this user here; for one, put this into ~/.config/systemd/user/{UNIT}",
            err=True,
        )
        return 0
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    path = Path(base) / "systemd" / "user" / UNIT
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_whole(path, text.encode(), 0o644)
    except OSError as error:
        raise RingctlError(f"{path}: cannot be written: {error.strerror}") from None
    for words in (("daemon-reload",), ("enable", UNIT), ("restart", UNIT)):
        systemctl(*words)
    click.echo(f"{path} is in place and started; ringctl serve link prints a link to the page")
    click.echo("  to have it run while you are not logged in: loginctl enable-linger")
    click.echo(f"  its log: journalctl --user -u {UNIT}; away with it: systemctl --user disable --now {UNIT}")
    return 0


def has_systemd() -> bool:
    try:
        done = subprocess.run(
            ["systemctl", "--user", "show-environment"],  # noqa: S607 - the one on the user's PATH is meant
            capture_output=True,
            timeout=ASK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def systemctl(*words: str) -> None:
    done = subprocess.run(
        ["systemctl", "--user", *words],  # noqa: S607 - the same
        capture_output=True,
        text=True,
        timeout=ASK_S,
        check=False,
    )
    if done.returncode:
        raise RingctlError(f"systemctl --user {' '.join(words)}: {done.stderr.strip()}")
