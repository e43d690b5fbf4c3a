"""What the commands share: options that choose hosts, the connections, and finding a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

if TYPE_CHECKING:
    from launcher.agent import Agent
    from launcher.errors import RingctlError
    from launcher.model import Inventory
    from launcher.runs import Found
    from launcher.transport import Pool

F = TypeVar("F", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
i_know_option = click.option(
    "--i-know", is_flag=True, help="Let ranks talk to each other through a public address."
)


def host_options(command: F) -> F:
    """Which hosts: an inventory, a list, a hostfile; all of them or some. See ask.Where."""
    for option in (
        click.option("--exclude", metavar="NAMES", help="Not these hosts of it, separated by commas."),
        click.option("--include", metavar="NAMES", help="Only these hosts of it, separated by commas."),
        click.option("--hostfile", metavar="FILE", help="An MPI-style hostfile instead."),
        click.option(
            "-H", "host_list", metavar="LIST", help="Hosts instead of a file: server1:2,lab@server2."
        ),
        click.option("--hosts", "hosts_file", metavar="FILE", help="The inventory; ./hosts.yaml by default."),
    ):
        command = option(command)
    return command


web_option = click.option("--web", is_flag=True, help="Open its page at your service instead.")


def server_url() -> str | None:
    """The service that `ringctl --server URL` names."""
    return cast("str | None", click.get_current_context().find_root().params.get("server"))


def complete_run(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """For the shell: runs that begin like this; no host is asked, for a Tab must not open a connection."""
    from launcher import history

    return [run for run in history.names() if run.startswith(incomplete)]


run_argument = click.argument("run", required=False, shell_complete=complete_run)


def pool() -> Pool:
    """This command's connections, closed when it ends."""
    from launcher.transport import Pool

    context = click.get_current_context().find_root()
    if context.obj is None:
        context.obj = Pool(no_input=bool(context.params.get("no_input")))
        context.call_on_close(context.obj.close)
    return cast(Pool, context.obj)


def all_runs(
    inventory: Inventory | None = None, recent: int | None = None
) -> tuple[list[Found], list[RingctlError]]:
    """Runs that were started from here, are on this machine, or on the hosts of `inventory`; and why some of
    the hosts did not answer."""
    from launcher import runs

    return runs.find_runs(pool(), inventory.hosts if inventory else (), recent)


def inventory_at(where: dict[str, str | None]) -> Inventory | None:
    """The hosts that `host_options` name, or that are found; None where there are none but this machine."""
    from launcher.ask import Where

    return Where(**where).inventory()


def named_run(reference: str | None, where: dict[str, str | None]) -> Found:
    """The run meant by `reference`: one started from here, else one on the hosts given or found."""
    from launcher import runs
    from launcher.errors import InputError

    given = any(where.values())
    known = [] if given else runs.remembered(1 if reference is None else None, reference or "")
    try:
        return runs.refreshed(runs.find_run(reference, known), pool())
    except InputError:
        found, errors = all_runs(inventory_at(where))
        try:
            return runs.find_run(reference, found)
        except InputError as error:
            raise (errors or [error])[0] from None


def agents_of(found: Found, *, former: bool = False) -> dict[str, Agent]:
    """Its hosts; also those that only earlier attempts were on, if they are asked for."""
    from launcher.agent import agents_for

    pool().hidden = secrets_of(found.run)
    return agents_for((*found.hosts, *(found.former if former else ())), pool())


def secrets_of(run: str) -> tuple[str, ...]:
    """Values that its log may not show, as far as the file that they came from can still be read."""
    from launcher import history, redact
    from launcher.errors import InputError

    record = history.read(run)
    try:
        return redact.of_run(record.options) if record else ()
    except InputError as error:
        click.echo(f"warning: secrets are not looked for in what is shown: {error.message}", err=True)
        return ()
