"""Commands that look at runs and end them, by a service: what `ringctl --server URL` uses in their place."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import click

from launcher import cli_remote_hosts, cli_remote_logs, cli_remote_runs, cli_submit
from launcher.cli_remote_logs import OVER
from launcher.cli_report import report_options
from launcher.cli_shared import (
    chosen_refused,
    json_option,
    never_started,
    restart_options,
    server_url,
    service_hosts,
    show_status,
    web_option,
)
from launcher.client import Client, client_for
from launcher.errors import HostError, InputError
from launcher.webpage import open_page

LATELY = 20  # runs


def service() -> Client:
    return client_for(server_url())


# --- looking -------------------------------------------------------------------------------------


def lately(there: Client, limit: int) -> list[dict[str, Any]]:
    """So many that were handed in last, and what is not over, in the order in which they were started."""
    newest = there.get("/api/runs", limit=limit)["runs"]
    going_on = there.get("/api/runs", limit=1000, state="queued,starting,running")["runs"]
    rows = {row["run"]: row for row in (*reversed(going_on), *reversed(newest))}
    return sorted(rows.values(), key=lambda row: row["started"] or row["submitted"] or 0.0)


def row_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """As `ps --json` has it without a service."""
    return {key: row[key] for key in ("run", "name", "state", "world", "hosts", "started", "attempt")}


def state_line(row: Mapping[str, Any]) -> str:
    from launcher.logs import visible

    return visible(f"run {row['run']}: {row['state']}")


@click.command()
@click.option("--all", "-a", "everything", is_flag=True, help="Up to a thousand runs instead of twenty.")
@service_hosts
@chosen_refused
@json_option
def ps(everything: bool, as_json: bool) -> int:
    """What runs at the service or waits there, and what ran lately.

    Shows the last twenty runs that were handed in, and older ones that are not over; the one that was started
    last comes last, and what waits counts from when it was handed in.
    """
    from launcher import render, text
    from launcher.logs import visible

    rows = lately(service(), 1000 if everything else LATELY)
    if as_json:
        click.echo(text.json_line([row_json(row) for row in rows]))
        return 0
    if not rows:
        click.echo("no runs yet; hand one in: ringctl submit --world 2")
        return 0
    table = [
        (
            row["run"],
            visible(row["name"]) or "-",
            row["state"],
            str(row["world"] or "-"),
            visible(",".join(row["hosts"][:3]))
            + (f" +{len(row['hosts']) - 3}" if len(row["hosts"]) > 3 else ""),
            visible(row["user"]) or "-",
            text.ago(row["started"] or row["submitted"], time.time()),
        )
        for row in rows
    ]
    render.show_table([("RUN", "NAME", "STATE", "WORLD", "HOSTS", "USER", "STARTED"), *table])
    return 0


@click.command()
@click.argument("run", required=False)
@service_hosts
@chosen_refused
@web_option
@json_option
def status(run: str | None, web: bool, as_json: bool) -> int:
    """How a run of the service is: each rank's state, step, loss and last sign of life."""
    from launcher import retold

    there = service()
    detail = detail_of(there, run)
    if web:
        return open_page(f"{there.url}/#/runs/{detail['run']}")
    found = there.understood(lambda: retold.found_of(detail, time.time()))
    show_status(found, detail, detail["watched"], as_json=as_json)
    return 0


def detail_of(there: Client, run: str | None) -> dict[str, Any]:
    """All that the service knows of the run that is meant."""
    return dict(there.get(there.run(there.find(run)["run"])))


def begun(there: Client, run: str | None) -> str:
    """The id of a run that has started, or may still."""
    detail = detail_of(there, run)
    if detail["plan"] is None and detail["state"] in OVER:
        raise never_started(detail)
    return str(detail["run"])


# --- ending and starting again -------------------------------------------------------------------


@click.command()
@click.argument("run", required=False)
@service_hosts
@chosen_refused
@click.option("--grace", type=click.FloatRange(0, 120), default=5.0, help="Seconds between TERM and KILL.")
@json_option
def stop(run: str | None, grace: float, as_json: bool) -> int:
    """End a run of the service everywhere, or take it from the queue."""
    from launcher import text

    if grace != grace:
        raise InputError("--grace nan: write a number of seconds")
    there = service()
    row = there.post(there.run(begun(there, run), "/stop"), {"grace": grace})
    click.echo(text.json_line(row_json(row)) if as_json else state_line(row))
    return 0


@click.command()
@click.argument("run")
@restart_options
@json_option
def restart(run: str, world: int | None, grow: bool, i_know: bool, detach: bool, as_json: bool) -> int:
    """Have the service start a run again, from its checkpoint if it has one, and follow it.

    As without a service, Ctrl-C stops the run.
    """
    from launcher import text
    from launcher.cli_remote_logs import attached

    there = service()
    detail = detail_of(there, run)
    if detail["plan"] is None:
        raise never_started(detail)
    asked = {"world": world, "grow": grow, "i_know": i_know}
    row = there.post(
        there.run(detail["run"], "/restart"), {key: value for key, value in asked.items() if value}
    )
    if not detach:
        return attached(there, row["run"], as_json=as_json, since=row["attempt"])
    click.echo(text.json_line(row_json(row)) if as_json else state_line(row))
    return 0


# --- what it has made ----------------------------------------------------------------------------


@click.command()
@click.argument("run", required=False)
@service_hosts
@chosen_refused
@json_option
def checkpoints(run: str | None, as_json: bool) -> int:
    """Which checkpoints a run of the service has, and on which hosts."""
    from launcher import pull, pulling, render, text
    from launcher.logs import visible

    there = service()
    told = there.get(there.run(begun(there, run), "/checkpoints"))
    code = HostError.exit_code if told["errors"] else 0
    if as_json:
        click.echo(text.json_line(told))
        return code
    for words in told["errors"].values():
        click.echo(f"error: {visible(words)}; its part is missing", err=True)
    found = [pull.checkpoint_of(each) for each in told["checkpoints"]]
    if found:
        render.show_table(pull.checkpoint_rows(found, time.time()))
        render.say([visible(f"step {of.step}: {words}") for of in found for words in of.problems])
    elif not code:
        click.echo(f"run {told['run']} has no checkpoints")
    pulling.tell_elsewhere(told["elsewhere"])
    return code


@click.command()
@click.argument("run", required=False)
@report_options
def report(run: str | None, out: str | None, kind: str) -> int:
    """Put a run of the service into one file: curves, tables, the end of its log."""
    from launcher.cli_report import put
    from launcher.showlogs import note

    there = service()
    found = there.find(run)["run"]
    missing = cli_remote_logs.settled_gaps(there, found)
    put(there.text(there.run(found, "/report"), format=kind), found, out, kind)
    return cli_remote_logs.tell_gaps(missing, note)


# --- which there are -----------------------------------------------------------------------------

COMMANDS = {
    each.name: each
    for each in (
        *(ps, status, stop, restart, checkpoints, report),
        *(cli_remote_logs.logs, cli_remote_runs.runs, cli_remote_hosts.hosts, cli_remote_hosts.preflight),
        cli_submit.launch,
    )
}
WITHOUT = ("serve", "submit", "queue", "cancel", "completion", "watcher", "start-queued")  # need no other
# What works on hosts or files alone, and what to do instead.
REFUSED = {
    "init": "a service was told its hosts when it was started",
    "trust": "a service knows its hosts' keys by its own user's known_hosts: run it there",
    "exec": "a service starts runs and no other commands",
    "push": "submit and launch take the code along",
    "env": "a run's environment is on the service's page and in `report`; run it where the service runs",
    "explain": "`status` and `logs` tell the cause of a failure",
    "bench": "hand in what it would run: submit --world N -- --epochs 1",
    "pull": "files come from the hosts by SSH: run it where the service runs, or name the hosts here; "
    "`report` and `logs --download` work from here",
}


def command(name: str, plain: click.Command | None) -> click.Command | None:
    """What `ringctl --server URL name` means."""
    if plain is None or name in WITHOUT:
        return plain
    if name not in COMMANDS:
        raise InputError(
            f"{name} works on the hosts, not by a service; leave out --server and RINGCTL_SERVER",
            fix=REFUSED[name],
        )
    return COMMANDS[name]
