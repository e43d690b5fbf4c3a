"""Commands that look at runs and end them, by a service: what `ringctl --server URL` uses in their place."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import click

from launcher.cli_shared import json_option, server_url, web_option
from launcher.client import Client, client_for
from launcher.errors import HostError, InputError
from launcher.fold import EXIT_CODES

OVER = ("succeeded", "failed", "stopped", "lost", "cancelled")
AGAIN_S = 1.0  # before a stream that broke is opened again
GIVE_UP_S = 60.0  # and for how long that is tried


def service() -> Client:
    return client_for(server_url())


def exit_code(state: str) -> int:
    return 130 if state == "cancelled" else {str(key): code for key, code in EXIT_CODES.items()}.get(state, 1)


# --- looking -------------------------------------------------------------------------------------


def row_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """As `ps --json` has it without a service."""
    return {key: row[key] for key in ("run", "name", "state", "world", "hosts", "started", "attempt")}


@click.command()
@click.option("--all", "-a", "everything", is_flag=True, help="Up to a thousand, not just the last twenty.")
@json_option
def ps(everything: bool, as_json: bool) -> int:
    """What runs at the service, and what ran lately."""
    from launcher import render, text
    from launcher.logs import visible

    rows = service().get("/api/runs", limit=1000 if everything else 20)["runs"][::-1]
    if as_json:
        click.echo(text.json_line([row_json(row) for row in rows]))
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
@web_option
@json_option
def status(run: str | None, web: bool, as_json: bool) -> int:
    """How a run of the service is: each rank's state, step, loss and last sign of life."""
    from launcher import render, text
    from launcher.logs import visible

    there = service()
    found = there.get(there.run(there.find(run)["run"]))
    if web:
        return open_page(f"{there.url}/#/runs/{found['run']}")
    if as_json:
        click.echo(
            text.json_line({**row_json(found), "ranks": found["ranks"], "watched": found["watched"] or None})
        )
        return 0
    name = f" ({found['name']})" if found["name"] else ""
    render.say([visible(f"run {found['run']}{name}: {found['state']}")])
    render.say([visible(words) for words in (found["waiting"], found["watched"], found["error"]) if words])
    keys = ("rank", "host", "state", "pid", "exit_code", "step", "loss", "samples_per_s")
    table = [tuple(cell(rank[key]) for key in keys) for rank in found["ranks"]]
    render.show_table([("RANK", "HOST", "STATE", "PID", "EXIT", "STEP", "LOSS", "SAMPLES/S"), *table])
    return 0


def cell(value: Any) -> str:
    from launcher.text import brief

    return "-" if value is None else brief(round(value, 3) if isinstance(value, float) else value)


def open_page(address: str) -> int:
    """In a browser, if there is one; printed in any case."""
    import webbrowser

    click.echo(address)
    try:
        kind = webbrowser.get()
    except webbrowser.Error:
        return 0
    if not isinstance(kind, webbrowser.GenericBrowser) or isinstance(kind, webbrowser.BackgroundBrowser):
        kind.open(address)  # not one that would take this terminal
    return 0


# --- logs ----------------------------------------------------------------------------------------


@click.command()
@click.argument("run", required=False)
@click.option("--follow", "-f", "goes_on", is_flag=True, help="Go on until the run is over.")
@click.option("--rank", type=click.IntRange(0), help="Only this rank.")
@click.option("--host", help="Only this host.")
@click.option("--tail", type=click.IntRange(1, 5000), metavar="N", help="Only the last N lines.")
@web_option
@json_option
def logs(
    run: str | None,
    goes_on: bool,
    rank: int | None,
    host: str | None,
    tail: int | None,
    web: bool,
    as_json: bool,
) -> int:
    """The merged log of a run of the service."""
    there = service()
    row = there.find(run)
    if web:
        return open_page(f"{there.url}/#/runs/{row['run']}?tab=log")
    if goes_on:
        return follow(there, row["run"], as_json=as_json, rank=rank, host=host)
    path, wanted = there.run(row["run"], "/log"), {"rank": rank, "host": host}
    if tail is not None:
        show(there.get(path, limit=tail, **wanted)["lines"], as_json)
        return 0
    after, more = 0, True
    while more:
        page = there.get(path, after=after, limit=5000, **wanted)
        show(page["lines"], as_json)
        more, after = page["more"], page["last"] or after
    return 0


def show(lines: list[list[Any]], as_json: bool) -> None:
    """As `logs` shows them: bytes as they were for a pipe, harmless for a terminal."""
    from launcher import render
    from launcher.logs import visible

    terminal = render.is_terminal()
    out = []
    for _, when, attempt, host, rank, stream, text in lines:
        if as_json:
            about = {"kind": "line", "time": when, "attempt": attempt, "host": host, "rank": rank}
            out.append(json.dumps({**about, "stream": stream, "text": text}, separators=(",", ":")))
        else:
            line = f"[{rank} {host}] {text}"
            out.append(visible(line) if terminal else line)
    if out:
        render.write_out(("\n".join(out) + "\n").encode("utf-8", "surrogateescape"))


def follow(
    there: Client, run: str, *, as_json: bool, rank: int | None = None, host: str | None = None
) -> int:
    """Lines as they come, to the end; a connection that breaks goes on where it was. The exit code."""
    after, until = 0, 0.0
    while True:
        try:
            for name, number, data in there.stream(there.run(run, "/stream"), after):
                until = 0.0
                if name == "lines":
                    some = [
                        line
                        for line in data
                        if (rank is None or line[4] == rank) and (host is None or line[3] == host)
                    ]
                    show(some, as_json)
                elif name == "run":
                    if data["state"] == "queued" and data["waiting"] and not as_json:
                        click.echo(f"{run}: {data['waiting']}", err=True)
                elif name == "end":
                    return ended(there, run, as_json)
                after = max(after, number)
        except HostError as error:
            until = until or time.monotonic() + GIVE_UP_S
            if time.monotonic() > until:
                raise
            click.echo(f"{error.message}; trying again", err=True)
        time.sleep(AGAIN_S)


def ended(there: Client, run: str, as_json: bool) -> int:
    from launcher import text

    found = there.get(there.run(run))
    cause = found["cause"] or {}
    if as_json:
        about = {"kind": "run_finished", "run": run, "state": found["state"], "attempt": found["attempt"]}
        click.echo(text.json_line({**about, "cause": cause.get("text"), "fix": cause.get("fix")}))
    else:
        tell_end(found)
    return exit_code(found["state"])


def tell_end(found: Mapping[str, Any]) -> None:
    """How a run ended, and why; also one that never started."""
    from launcher.logs import visible

    fix = (found["cause"] or {}).get("fix") or found["fix"]
    if found["error"]:
        click.echo(visible(found["error"]), err=True)
        for number, line in enumerate(fix.splitlines()):
            click.echo(visible(f"  {'to do: ' if number == 0 else ''}{line}"), err=True)
    click.echo(f"run {found['run']} {found['state']}", err=True)


def wait_for_end(there: Client, run: str) -> dict[str, Any]:
    """Its row, once it is over."""
    until = 0.0
    while True:
        try:
            row = there.get(there.run(run))
            until = 0.0
            if row["state"] in OVER and not row["watched"]:
                return dict(row)
        except HostError:
            until = until or time.monotonic() + GIVE_UP_S
            if time.monotonic() > until:
                raise
        time.sleep(AGAIN_S)


# --- ending and starting again -------------------------------------------------------------------


@click.command()
@click.argument("run", required=False)
@json_option
def stop(run: str | None, as_json: bool) -> int:
    """End a run of the service everywhere, or take it from the queue."""
    return act(run, "/stop", {}, as_json)


@click.command()
@click.argument("run")
@click.option("--world", type=click.IntRange(1), metavar="N", help="With so many ranks.")
@click.option("--grow", is_flag=True, help="With as many ranks as it was launched with.")
@json_option
def restart(run: str, world: int | None, grow: bool, as_json: bool) -> int:
    """Have the service start a run again, from its checkpoint if it has one."""
    body = {**({} if world is None else {"world": world}), **({"grow": True} if grow else {})}
    return act(run, "/restart", body, as_json)


def act(run: str | None, what: str, body: Mapping[str, Any], as_json: bool) -> int:
    from launcher import text

    there = service()
    row = there.post(there.run(there.find(run)["run"], what), body)
    click.echo(text.json_line(row_json(row)) if as_json else f"run {row['run']}: {row['state']}")
    return 0


# --- runs ----------------------------------------------------------------------------------------


@click.group()
def runs() -> None:
    """Runs that the service knows."""


@runs.command("list")
@click.option("--state", help="Only these states, separated by commas.")
@click.option("--search", help="Only those that hold this text.")
@click.option("--limit", type=click.IntRange(1, 1000), default=50, help="50 by default.")
@json_option
def list_runs(state: str | None, search: str | None, limit: int, as_json: bool) -> int:
    """Newest first."""
    from launcher import render, text
    from launcher.logs import visible

    rows = service().get("/api/runs", limit=limit, state=state, search=search)["runs"]
    if as_json:
        click.echo(text.json_line(rows))
        return 0
    table = [
        (row["run"], visible(row["name"]) or "-", row["state"], cell(row["loss"]), cell(row["accuracy"]))
        for row in rows
    ]
    render.show_table([("RUN", "NAME", "STATE", "LOSS", "ACCURACY"), *table])
    return 0


COMMANDS = {each.name: each for each in (ps, status, logs, stop, restart, runs)}
WITHOUT = ("serve", "submit", "queue", "cancel", "completion")  # these need no other version


def command(name: str, plain: click.Command | None) -> click.Command | None:
    """What `ringctl --server URL name` means."""
    if plain is None or name in WITHOUT:
        return plain
    if name not in COMMANDS:
        raise InputError(
            f"{name} works on the hosts, not by a service; leave out --server and RINGCTL_SERVER"
        )
    return COMMANDS[name]
