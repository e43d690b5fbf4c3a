"""What the commands share: options that choose hosts, the connections, and finding a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

if TYPE_CHECKING:
    from launcher.agent import Agent
    from launcher.errors import InputError, RingctlError
    from launcher.history import Record
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


def run_options(command: F) -> F:
    """What a run is started with, by `launch` as by `submit`."""
    for option in reversed(
        (
            click.option("--world", type=int, metavar="N", help="How many ranks; every slot by default."),
            click.option("--name", default="", help="A name to find the run by."),
            click.option(
                "--env", "-e", "variables", multiple=True, metavar="NAME=VALUE", help="Set for every rank."
            ),
            click.option(
                "--env-file", metavar="FILE", help="More of those, secret: NAME=VALUE lines, mode 0600."
            ),
            i_know_option,
            click.option(
                "--shared", is_flag=True, help="Its slots may be taken by others as well that say --shared."
            ),
            click.option("--master-port", type=click.IntRange(1, 65535), help="A free one by default."),
            click.option(
                "--skip-preflight",
                is_flag=True,
                help="Start unchecked: what preflight would name then fails in the run.",
            ),
            click.option(
                "--prefork/--no-prefork",
                default=True,
                help="Import torch once a host, if it is needed, and fork the ranks.",
            ),
            click.option(
                "--max-restarts",
                type=click.IntRange(0),
                default=0,
                metavar="K",
                help="Start again after a failure; 0 by default.",
            ),
            click.option(
                "--restart-delay",
                type=click.FloatRange(0, 3600),
                default=2.0,
                metavar="S",
                help="Seconds before that; twice as many each time.",
            ),
            click.option(
                "--min-world",
                type=click.IntRange(1),
                metavar="M",
                help="Go on with so many ranks if hosts stay unreachable.",
            ),
        )
    ):
        command = option(command)
    return command


def log_options(command: F) -> F:
    """Which lines of a log, and how: what `logs` takes, by hosts as by a service."""
    for option in reversed(
        (
            click.option("--follow", "-f", is_flag=True, help="Go on until the run is over."),
            click.option("--rank", "ranks", metavar="0,2-3", help="Only these ranks."),
            click.option("--host", "hosts", multiple=True, help="Only this host; may be repeated."),
            click.option("--since", metavar="WHEN", help="90s, 10m, 2h, 1d ago, or 2026-01-31T18:00."),
            click.option(
                "--tail",
                type=click.IntRange(0, 10**9),
                metavar="N",
                help="Only the last N lines; with --json, events.",
            ),
            click.option("--grep", metavar="REGEX", help="Only lines that match, whatever their colours."),
            click.option("--timestamps", "-t", is_flag=True, help="With the time of each line."),
            click.option("--prefix/--no-prefix", default=True, help="Label lines with rank and host."),
            click.option("--previous", is_flag=True, help="The attempt before the newest."),
            click.option(
                "--download",
                metavar="DIR",
                help="Into files instead: one a rank and stream, and all events.",
            ),
        )
    ):
        command = option(command)
    return command


def restart_options(command: F) -> F:
    """What `restart` takes, by hosts as by a service."""
    for option in reversed(
        (
            click.option("--world", type=click.IntRange(1), metavar="N", help="With so many ranks."),
            click.option("--grow", is_flag=True, help="With as many ranks as it was launched with."),
            i_know_option,
            click.option("--detach", "-d", is_flag=True, help="Return once it has started."),
        )
    ):
        command = option(command)
    return command


def refused_option(*names: str, why: str, **options: Any) -> Callable[[F], F]:
    """An option that means nothing where a service is asked, and says so."""

    def refuse(_context: click.Context, parameter: click.Parameter, value: object) -> None:
        if value not in (None, False, ()):
            from launcher.errors import InputError

            raise InputError(f"{parameter.opts[-1]}: {why}; leave it out, or --server and RINGCTL_SERVER")

    return click.option(*names, hidden=True, expose_value=False, callback=refuse, help=why, **options)


def service_hosts(command: F) -> F:
    """A service works on its own hosts: what names others is refused."""
    for name in ("--hosts", "-H", "--hostfile"):
        command = refused_option(name, f"no_{name.strip('-')}", why="a service has its own hosts")(command)
    return command


def chosen_refused(command: F) -> F:
    """The same, of commands that are about one run, or all."""
    for name in ("--include", "--exclude"):
        command = refused_option(name, why="a service knows the hosts of its runs")(command)
    return command


web_option = click.option(
    "--web", is_flag=True, help="Open its page at your service (ringctl serve) instead."
)


def server_url() -> str | None:
    """The service that `ringctl --server URL` names."""
    return cast("str | None", click.get_current_context().find_root().params.get("server"))


def complete_run(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """For the shell: runs that begin like this; no host is asked, for a Tab must not open a connection. None
    where there is something wrong: that is for a command to say."""
    from launcher import history
    from launcher.errors import RingctlError

    try:
        return [run for run in history.names() if run.startswith(incomplete)]
    except RingctlError:
        return []


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


def named_run(reference: str | None, where: dict[str, str | None], *, unstarted: bool = False) -> Found:
    """The run meant by `reference`: one started from here, else one on the hosts given or found. One that was
    handed in and has never started is refused, unless the caller has something to say of it."""
    from launcher import runs
    from launcher.errors import InputError

    known = [] if any(where.values()) else runs.candidates(reference)
    if not known:
        elsewhere, errors = all_runs(inventory_at(where))
        try:
            return runs.find_run(reference, elsewhere)
        except InputError as error:
            raise (errors or [error])[0] from None
    found = runs.find_run(reference, known)
    if found.never_started and not unstarted:
        raise never_started(detail_of(found))
    return found if found.never_started else runs.refreshed(found, pool())


def detail_of(found: Found) -> dict[str, Any]:
    """What the history has of it."""
    from launcher import listing
    from launcher.errors import InputError

    detail = listing.detail(found.run)
    if detail is None:
        raise InputError(f"run {found.run} was forgotten by somebody else at this moment (runs prune)")
    return detail


def never_started(detail: Mapping[str, Any]) -> InputError:
    """Nothing can be done with such a run. What is known of it may be words of a service, or of a host."""
    from launcher.client import seen
    from launcher.errors import InputError

    if detail["state"] == "queued":
        fix = f"ringctl cancel {detail['run']} takes it from the queue"
        why = f": {detail['waiting']}" if detail["waiting"] else ""
        return InputError(seen(f"run {detail['run']} waits in the queue{why}"), fix=fix)
    why = f": {detail['error']}" if detail["error"] else f"; it is {detail['state']}"
    return InputError(seen(f"run {detail['run']} has never started{why}"), fix=seen(detail["fix"]))


def show_status(found: Found, detail: Mapping[str, Any] | None, watched: str, *, as_json: bool) -> None:
    """How a run is: as its hosts say, or as the history or a service has it, which is `detail` then."""
    from launcher import render, retold, text

    now = time.time()
    if as_json:
        click.echo(text.json_line({**text.status_json(found, now), "watched": watched or None}))
        return
    state = found.state
    name = f" ({found.name})" if found.name else ""
    render.say([f"run {found.run}{name}: {text.run_json(found)['state']}"])
    render.say(retold.unstarted_lines(detail) if detail else [])
    render.say([*text.attempt_lines(found, watched), *text.lost_lines(state)])
    if state and text.progress_parts(state):
        render.say(["  ".join(text.progress_parts(state))])
    if not found.never_started:
        render.show_table(text.status_rows(found, now))


def agents_of(found: Found, *, former: bool = False) -> dict[str, Agent]:
    """Its hosts; also those that only earlier attempts were on, if they are asked for. What they tell
    is freed of the run's secrets."""
    from launcher import history
    from launcher.agent import agents_for

    record = history.read(found.run)
    pool().hidden, problem = secrets_of(record) if record else ((), f"run {found.run} is not known here")
    agents = agents_for((*found.hosts, *(found.former if former else ())), pool())
    if record is None or record.options.env_file:
        hide_what_hosts_know(found.run, agents, problem)
    return agents


def secrets_of(record: Record) -> tuple[tuple[str, ...], str]:
    """Values that its log may not show, and why the file that they came from cannot be read, if it cannot."""
    from launcher import redact
    from launcher.errors import InputError

    try:
        return redact.of_run(record.options), ""
    except InputError as error:
        return (), error.message


def hide_what_hosts_know(run: str, agents: Mapping[str, Agent], problem: str) -> None:
    """Each host knows what its ranks were given, whatever the file holds by now. Where there is no file to
    read either, for which `problem` is the reason, it is said that nothing is hidden."""
    from launcher import redact
    from launcher.errors import RingctlError
    from launcher.fanout import fan_out

    answers = fan_out(agents, lambda name: agents[name].secrets(run))
    for name, told in answers.items():
        if not isinstance(told, RingctlError):
            agents[name].hidden = redact.longest_first((*agents[name].hidden, *redact.to_look_for(told)))
    errors = [told.message for told in answers.values() if isinstance(told, RingctlError)]
    if problem and errors:
        more = f" (and {len(errors) - 1} more hosts)" if errors[1:] else ""
        why = f"{problem}; {errors[0]}{more}"
        click.echo(f"warning: secrets are not looked for in what is shown: {why}", err=True)
