"""The commands that hand runs to a service: `submit`, and `launch` where a service is named."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from launcher.cli_shared import (
    F,
    json_option,
    refused_option,
    run_options,
    server_url,
    service_hosts,
)
from launcher.errors import InputError

if TYPE_CHECKING:
    from launcher.client import Client

PLANNED = "a plan is made when the run gets its slots"


def chosen_options(command: F) -> F:
    """Which of the service's hosts."""
    command = click.option("--exclude", default="", metavar="NAMES", help="Not these hosts of it.")(command)
    return click.option(
        "--include", default="", metavar="NAMES", help="Only these hosts of the service's inventory."
    )(command)


# --- submit --------------------------------------------------------------------------------------


@click.command(context_settings={"allow_interspersed_args": False})
@run_options
@chosen_options
@service_hosts
@click.option(
    "--priority", type=click.IntRange(-1000, 1000), default=0, help="Higher goes first; 0 by default."
)
@click.option("--after", metavar="RUN", help="Not before that run is over.")
@click.option("--at", metavar="WHEN", help="Not before 18:00, 2026-01-31T18:00, or in 90s, 10m, 2h, 1d.")
@click.option("--wait", "-w", is_flag=True, help="Return when it is over, with its exit code.")
@click.option("--follow", "-f", is_flag=True, help="The same, and show its log.")
@json_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def submit(after: str | None, at: str | None, wait: bool, follow: bool, as_json: bool, **asked: Any) -> int:
    """Hand in a run to the service, which starts it when its slots are free.

    What follows -- is as for launch. The code of a command, the folder that you are in, goes along. Ctrl-C
    leaves the run alone, also with --wait and --follow.
    """
    from launcher import cli_remote_logs
    from launcher.client import client_for

    service = client_for(server_url())
    queued = {
        "after": service.find(after)["run"] if after else "",
        "at": parse_at(at, time.time()) if at is not None else None,
    }
    row = handed_in(service, {**asked, **queued})
    if not (wait or follow):
        return told(service, row, as_json)
    try:
        if follow:
            return cli_remote_logs.follow_run(service, row["run"], as_json=as_json)
        return waited(service, row, as_json)
    except KeyboardInterrupt:
        click.echo(f"run {row['run']} goes on without us\n{next_steps(service, row)}", err=True)
        return 130


def handed_in(service: Client, asked: dict[str, Any]) -> dict[str, Any]:
    """The row of a run that was asked for with `run_options` and `chosen_options`."""
    from launcher import ask

    command, env_file = asked.pop("command"), asked.pop("env_file")
    variables = ask.variables(asked.pop("variables"))
    secrets = ask.with_secrets(env_file, variables)
    body = {
        **asked,
        "command": list(command),
        "variables": variables,
        "secrets": {name: value.value for name, value in secrets.items()},
        "code": upload(service, command, env_file or ""),
    }
    return dict(service.post_once("/api/submit", body))


def told(service: Client, row: dict[str, Any], as_json: bool) -> int:
    from launcher import text

    if as_json:
        click.echo(text.json_line(row))
    else:
        click.echo(handed_in_line(row))
        click.echo(next_steps(service, row))
    return 0


def handed_in_line(row: dict[str, Any]) -> str:
    from launcher.logs import visible

    return visible(f"handed in {row['run']}" + (f": {row['waiting']}" if row["waiting"] else ""))


def next_steps(service: Client, row: dict[str, Any]) -> str:
    by = f"  ringctl --server {service.url}"
    return f"{by} logs {row['run']} --follow\n{by} stop {row['run']}"


def waited(service: Client, row: dict[str, Any], as_json: bool) -> int:
    from launcher import cli_remote_logs, text

    if not as_json:
        click.echo(handed_in_line(row))
    row = cli_remote_logs.wait_for_end(service, row["run"])
    if as_json:
        click.echo(text.json_line(row))
    else:
        cli_remote_logs.tell_end(service, row["run"], as_json=False)
    return cli_remote_logs.exit_code(row["state"])


def upload(service: Client, command: tuple[str, ...], env_file: str) -> str:
    """The digest of the code that a command needs, once the service has it; "" for the built-in trainer."""
    import tempfile

    from launcher import codestore, push
    from launcher.ask import TRAINER
    from launcher.plan import is_trainer

    if is_trainer(command):
        return ""
    snapshot = push.of_command(command, TRAINER, env_file)
    if not service.get(f"/api/code/{snapshot.digest}")["have"]:
        with tempfile.TemporaryFile() as file:
            codestore.packed(snapshot, file)
            service.put(f"/api/code/{snapshot.digest}", file)
    return snapshot.digest


def parse_at(text: str, now: float) -> float:
    """A moment to come: 18:00 (today or tomorrow), 2026-01-31T18:00, or 90s, 10m, 2h, 1d from now."""
    import re
    from datetime import datetime, timedelta

    from launcher.logs import UNITS

    if match := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text):
        return now + float(match[1]) * UNITS[match[2]]
    today = datetime.fromtimestamp(now)
    try:
        if match := re.fullmatch(r"(\d{1,2}):(\d{2})", text):
            then = today.replace(hour=int(match[1]), minute=int(match[2]), second=0, microsecond=0)
            return (then if then > today else then + timedelta(days=1)).timestamp()
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise InputError(
            f"--at {text}: not a time",
            fix="write when (18:00, 2026-01-31T18:00) or in how long (90s, 10m, 2h, 1d)",
        ) from None


# --- launch --------------------------------------------------------------------------------------


@click.command(context_settings={"allow_interspersed_args": False})
@run_options
@chosen_options
@service_hosts
@refused_option("--local", is_flag=True, why="a service has its own hosts")
@refused_option("--dry-run", is_flag=True, why=PLANNED)
@refused_option("--commands", is_flag=True, why=PLANNED)
@click.option("--detach", "-d", is_flag=True, help="Return once it is handed in.")
@click.option("--verbose", "-v", is_flag=True, hidden=True, expose_value=False)  # of a plan that is shown
@json_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def launch(detach: bool, as_json: bool, **asked: Any) -> int:
    """Hand in a run to the service and follow it, through the queue to its end.

    As without a service, Ctrl-C stops the run, or takes it from the queue; if ringctl itself goes away
    the run goes on. `submit --follow` is the same, but for Ctrl-C, which leaves the run alone.
    """
    from launcher import cli_remote_logs
    from launcher.client import client_for

    service = client_for(server_url())
    row = handed_in(service, asked)
    if detach:
        return told(service, row, as_json)
    return cli_remote_logs.attached(service, row["run"], as_json=as_json)
