"""Commands about the Python environment of the ranks: env create, env check."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

from launcher.cli_hosts import agents_at
from launcher.cli_shared import host_options, json_option
from launcher.errors import HostError, RingctlError

if TYPE_CHECKING:
    from launcher.agent import Agent
    from launcher.environment import Created


@click.group()
def env() -> None:
    """Create the Python environment of the ranks on all hosts, and compare what they have."""


# --- create --------------------------------------------------------------------------------------


@env.command()
@click.option(
    "--file", "file", metavar="FILE", help="A conda environment file; ./environment.yaml by default."
)
@host_options
@click.option("--timeout", type=click.FloatRange(1), default=3600.0, help="Seconds that a host may take.")
@json_option
def create(file: str | None, timeout: float, as_json: bool, **where: str | None) -> int:
    """Create the environment of an environment.yaml on every host, side by side.

    With the conda, mamba or micromamba that a host has; an environment of that name is brought up to date.
    Where there is none of them, its pip part becomes a virtual environment under ~/.ringctl/venvs. Either
    way `env: {conda: NAME}` in the inventory means it. When nothing has changed nothing is done.
    """
    from launcher import environment, model, text

    spec = environment.read_spec(environment.find_file(file))
    agents = agents_at(where)
    with interruptible() as stop:
        results = environment.create(
            agents, spec, timeout, lambda host, line: click.echo(f"{host}: {line}", err=as_json), stop
        )
    failed = {host: done for host, done in results.items() if isinstance(done, RingctlError)}
    created = {host: done for host, done in results.items() if not isinstance(done, RingctlError)}
    if as_json:
        hosts = {host: model.to_json(done) for host, done in created.items()}
        errors = {host: str(error) for host, error in failed.items()}
        click.echo(text.json_line({"name": spec.name, "hosts": hosts, "errors": errors}))
    else:
        show_created(created, {host: agents[host] for host in created}, spec.name)
    for error in failed.values():
        click.echo(f"error: {error}", err=True)
    if stop():
        return 130
    unreachable = any(isinstance(error, HostError) for error in failed.values())
    return HostError.exit_code if unreachable else 1 if failed else 0


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C only makes the yielded function true, so that every host can be told; a second one is final."""
    stopped = threading.Event()

    def interrupt(*_: object) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        stopped.set()

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield stopped.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def show_created(created: dict[str, Created], agents: dict[str, Agent], name: str) -> None:
    from launcher import environment, remote

    for host, done in created.items():
        click.echo(environment.created_line(host, done))
        for note in done.notes:
            click.echo(f"{host}: note: {note}")
    others = environment.elsewhere(agents, name)
    if others:
        click.echo(
            f"the ranks on {remote.grouped(others)} run in it once the inventory says env: {{conda: {name}}}"
        )


# --- check ---------------------------------------------------------------------------------------


@env.command()
@host_options
@click.option("--package", "packages", multiple=True, metavar="NAME", help="Also this one; may be repeated.")
@json_option
def check(packages: tuple[str, ...], as_json: bool, **where: str | None) -> int:
    """Compare Python, torch, torchvision and other packages of all hosts.

    Exit code 3 when ranks would not work together: another Python 3.x, torch or torchvision somewhere, or
    something missing.
    """
    from launcher import environment, render, text

    agents = agents_at(where)
    names = list(dict.fromkeys([*environment.PACKAGES, *packages]))
    results = environment.check(agents, names)
    looks = {host: look for host, look in results.items() if not isinstance(look, RingctlError)}
    found = environment.differences(looks)
    if as_json:
        click.echo(text.json_line(environment.check_json(results, found)))
        return environment.exit_code(results, found)
    if looks:
        envs = {host: agents[host].host.env for host in looks}
        render.show_table(environment.check_rows(looks, envs))
    render.say([environment.difference_line(one) for one in found])
    for error in results.values():
        if isinstance(error, RingctlError):
            click.echo(f"error: {error}", err=True)
    code = environment.exit_code(results, found)
    if code == 0:
        click.echo("the hosts agree")
    elif any(one.blocking for one in found):
        click.echo("make them the same: ringctl env create", err=True)
    return code
