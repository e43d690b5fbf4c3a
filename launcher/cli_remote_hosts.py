"""Commands about hosts, by a service: who has which slots, and what preflight finds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import click

from launcher.cli_shared import json_option, refused_option, server_url, service_hosts
from launcher.client import Client, client_for
from launcher.errors import HostError, InputError, PreflightError, RingctlError

LOOK_S = 0.3  # between two looks whether it is done
CHECK_S = 330.0  # a little longer than the service gives it
ALL = "a service checks all of its hosts, for whatever may run there"
THERE = "what it would change is on the service's side: run it there"
FIGURES = ("memory_free", "memory_total", "disk_free", "disk_total")


# --- hosts ---------------------------------------------------------------------------------------


@click.command()
@service_hosts
@click.option("--include", metavar="NAMES", help="Only these hosts of it, separated by commas.")
@click.option("--exclude", metavar="NAMES", help="Not these hosts of it.")
@json_option
def hosts(include: str | None, exclude: str | None, as_json: bool) -> int:
    """Who has which slots of the service's hosts, of whichever user, and their load, memory and disk."""
    from launcher import occupancy, render, text
    from launcher.logs import visible

    told = chosen(
        [as_told(host) for host in client_for(server_url()).get("/api/hosts")["hosts"]], include, exclude
    )
    if as_json:
        click.echo(text.json_line(told))
    else:
        render.show_table([tuple(map(visible, row)) for row in occupancy.rows(told)])
        for host in told:
            if host["problem"]:
                click.echo(visible(f"{host['name']}: {host['problem']}"), err=True)
    for host in told:
        if host["error"]:
            click.echo(visible(f"error: {host['error']}"), err=True)
    return HostError.exit_code if any(host["error"] for host in told) else 0


def as_told(host: Mapping[str, Any]) -> dict[str, Any]:
    """As `hosts --json` tells it without a service; one that nobody has asked yet has not answered."""
    unasked = host["seen"] is None and not host["error"]
    return {
        **host,
        **{key: -1 if host[key] is None else host[key] for key in FIGURES},
        "cores": host["cores"] or 0,
        "error": f"{host['name']}: the service has not heard of it yet" if unasked else host["error"],
    }


def chosen(told: list[dict[str, Any]], include: str | None, exclude: str | None) -> list[dict[str, Any]]:
    names = {host["name"] for host in told}
    wanted = set(include.split(",")) if include is not None else names
    unwanted = set(exclude.split(",")) if exclude is not None else set()
    for name in sorted((wanted | unwanted) - names):
        raise InputError(f"{name!r} is not a host of the service, which has {', '.join(sorted(names))}")
    return [host for host in told if host["name"] in wanted - unwanted]


# --- preflight -----------------------------------------------------------------------------------


@click.command(context_settings={"allow_interspersed_args": False})
@service_hosts
@refused_option("--local", is_flag=True, why="a service has its own hosts")
@refused_option("--world", type=int, why=ALL)
@refused_option("--include", why=ALL)
@refused_option("--exclude", why=ALL)
@refused_option("--master-port", type=int, why=ALL)
@refused_option("--only", why=ALL)
@refused_option("--skip", why=ALL)
@refused_option("--i-know", is_flag=True, why=ALL)
@refused_option("--deep", is_flag=True, why=ALL)
@refused_option("--fix", is_flag=True, why=THERE)
@refused_option("--yes", is_flag=True, why=THERE)
@click.option("--last", is_flag=True, help="What the last one found; the hosts are not asked again.")
@click.option("-v", "--verbose", is_flag=True, help="Every check, and all findings.")
@json_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def preflight(last: bool, verbose: bool, as_json: bool, command: tuple[str, ...]) -> int:
    """Have the service check everything that is known to go wrong, on all of its hosts.

    Exit code 0: a run would start; 3: something would stop it; 4: a host could not be reached.
    """
    from launcher import text
    from launcher.cli_preflight import show_tables

    if command:
        raise InputError(f"{command[0]}: {ALL}", fix="leave out what follows --")
    there = client_for(server_url())
    told = there.get("/api/preflight") if last else checked(there)
    if told is None:
        raise InputError("the service has not checked its hosts yet", fix="leave out --last")
    names = [host["name"] for host in there.get("/api/hosts")["hosts"]]
    examined = examined_of(told, names)
    if as_json:
        click.echo(text.json_line({key: told[key] for key in ("ok", "checks", "pairs")}))
    else:
        show_tables(examined, verbose)
    return 0 if told["ok"] else examined.exit_code or PreflightError.exit_code


def checked(there: Client) -> Any:
    """What a new one finds."""
    before = there.get("/api/preflight")
    try:
        there.post("/api/preflight")
    except InputError:
        raise
    except RingctlError as error:
        if "already" not in error.message:
            raise
    until = time.monotonic() + CHECK_S
    while (now := there.get("/api/preflight")) == before:
        if time.monotonic() > until:
            raise RingctlError(
                "the service has not ended its check of the hosts", fix="--last shows it later"
            )
        time.sleep(LOOK_S)
    return now


def examined_of(told: Mapping[str, Any], names: list[str]) -> Any:
    """As the tables want it."""
    from launcher.model import CheckResult, Host, Pair, from_json
    from launcher.preflight.examine import Examined
    from launcher.preflight.survey import Survey

    results = tuple(from_json(CheckResult, each) for each in told["checks"])
    pairs = tuple(
        Pair(
            source=each["from"],
            target=each["to"],
            port=0,
            problem=each["problem"],
            latency_ms=each["latency_ms"],
            mbit_s=each["mbit_s"],
            seen=each["seen"],
        )
        for each in told["pairs"]
    )
    unheard = {
        each.host: HostError(each.host, each.found)
        for each in results
        if each.name.startswith("ssh_") and each.status == "fail" and each.blocking
    }
    reached: dict[str, Any] = {name: {} for name in names if name not in unheard}
    hosts = tuple(Host(name) for name in names)
    return Examined(hosts, Survey(reached, unheard, pairs), results)
