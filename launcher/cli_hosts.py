"""Commands about the hosts themselves: hosts, trust, exec, push."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from launcher.cli_shared import host_options, inventory_at, json_option, pool
from launcher.errors import InputError, RingctlError
from launcher.fanout import exit_code

if TYPE_CHECKING:
    from collections.abc import Mapping

    from launcher.agent import Agent
    from launcher.transport import Completed, HostKey


def agents_at(where: dict[str, str | None]) -> dict[str, Agent]:
    """The hosts given or found; there must be some."""
    from launcher.agent import agents_for

    inventory = inventory_at(where)
    if inventory is None:
        raise InputError(
            "there is no inventory here", fix="write a hosts.yaml, or name hosts: -H server1,server2"
        )
    return agents_for(inventory.hosts, pool())


# --- hosts ---------------------------------------------------------------------------------------


@click.command()
@host_options
@json_option
def hosts(as_json: bool, **where: str | None) -> int:
    """Who has which slots of the hosts, of whichever user, and their load, memory and disk."""
    from launcher import ask, occupancy, text
    from launcher.agent import agents_for

    inventory = ask.inventory(ask.Where(**where), False, None)
    results = occupancy.look(agents_for(inventory.hosts, pool()))
    told = [occupancy.host_json(host, results[host.name]) for host in inventory.hosts]
    errors = [result for result in results.values() if isinstance(result, RingctlError)]
    if as_json:
        click.echo(text.json_line(told))
    else:
        from launcher import render

        render.show_table(occupancy.rows(told))
        for host in told:
            if host["problem"]:
                click.echo(f"{host['name']}: {host['problem']}", err=True)
    for error in errors:
        click.echo(f"error: {error}", err=True)
    return exit_code(errors)


# --- trust ---------------------------------------------------------------------------------------


@click.command()
@click.argument("names", nargs=-1, metavar="[HOST]...")
@host_options
@click.option(
    "--yes", is_flag=True, help="Record without asking; only where you know the fingerprints are right."
)
def trust(names: tuple[str, ...], yes: bool, **where: str | None) -> int:
    """Show the host keys of all hosts and, after a yes, record the unknown ones.

    A key that has changed is never recorded: remove the old one by hand once you know why.
    """
    from launcher import text
    from launcher import trust as trusting

    agents = agents_at(where)
    wrong = [name for name in names if name not in agents]
    if wrong:
        raise InputError(f"{wrong[0]!r} is not a host of the inventory, which has {', '.join(agents)}")
    chosen = {name: agent for name, agent in agents.items() if not names or name in names}
    recorded: set[HostKey] = set()
    while True:
        keys, errors = trusting.host_keys(chosen)
        unknown = trusting.unknown(keys)
        if not unknown:
            break
        show_keys(unknown)
        question = f"Compare with the servers' own. Record {text.count(len(unknown), 'new key')}?"
        if not (yes or agreed(question)):
            click.echo("nothing was recorded")
            return 1
        trusting.record(unknown, recorded)  # behind a jump host that is trusted now there may be others
    show_keys(keys)
    for error in errors:
        click.echo(f"error: {error}", err=True)
    return exit_code(errors)


def show_keys(keys: Mapping[str, HostKey]) -> None:
    for host, key in keys.items():
        known = "new" if key.file else "known"
        click.echo(f"{host:16} {key.name:24} {key.kind} {key.fingerprint} {known}")


def agreed(question: str) -> bool:
    """A yes, typed; without a terminal nobody can say it."""
    root = click.get_current_context().find_root()
    if root.params.get("no_input") or not sys.stdin.isatty():
        raise InputError("nobody is here to say yes", fix="say it with --yes")
    return click.confirm(question)


# --- exec ----------------------------------------------------------------------------------------


@click.command("exec", context_settings={"allow_interspersed_args": False})
@host_options
@click.option("--timeout", type=click.FloatRange(0.1), default=600.0, help="Seconds to wait for a host.")
@json_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def execute(command: tuple[str, ...], timeout: float, as_json: bool, **where: str | None) -> int:
    """Run a command on every host: labelled output, then a summary of exit codes."""
    from launcher import remote, text

    agents = agents_at(where)
    results = remote.execute(agents, command, timeout, None if as_json else show_output)
    failed = {host: done for host, done in results.items() if isinstance(done, RingctlError)}
    codes = {host: done.exit_code for host, done in results.items() if not isinstance(done, RingctlError)}
    if as_json:
        click.echo(text.json_line([remote.result_json(host, done) for host, done in results.items()]))
    else:
        for line in remote.summary(codes, failed):
            click.echo(line, err=True)
    return exit_code(failed.values()) or int(any(codes.values()))


def show_output(host: str, done: Completed) -> None:
    from launcher import remote

    for stream, data in ((sys.stdout, done.out), (sys.stderr, done.err)):
        for piece in remote.labelled(host, data):
            stream.buffer.write(piece)
        stream.flush()


# --- push ----------------------------------------------------------------------------------------


@click.command()
@host_options
@json_option
def push(as_json: bool, **where: str | None) -> int:
    """Push the folder you are in to every host, as launch does before it starts a command of yours."""
    from pathlib import Path

    from launcher import ask, text
    from launcher import push as pushing

    agents = agents_at(where)
    snapshot = pushing.take(Path(ask.folder()))
    results = pushing.push(snapshot, agents, lambda words: click.echo(words, err=True))
    told: dict[str, Any] = {}
    for host, done in results.items():
        if isinstance(done, RingctlError):
            click.echo(f"error: {done}", err=True)
        else:
            told[host] = {"files": done.files, "bytes": done.bytes}
            if not as_json:
                click.echo(
                    f"{host}: "
                    + (f"{done.files} files, {done.bytes:,} bytes" if done.files else "up to date")
                )
    if as_json:
        click.echo(text.json_line({"digest": snapshot.digest, "hosts": told}))
    return exit_code(done for done in results.values() if isinstance(done, RingctlError))
