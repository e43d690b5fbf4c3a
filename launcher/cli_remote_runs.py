"""`ringctl runs`, by a service: what it knows, side by side, into files, and away with what is old."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from launcher import cli_history
from launcher.cli_shared import server_url
from launcher.client import Client, NotThere, client_for

AT_ONCE = 1000  # rows


@click.group()
def runs() -> None:
    """What the service knows: list it, compare it, write it into files, forget what is old."""


def pages(there: Client, **wanted: Any) -> Iterator[list[dict[str, Any]]]:
    """All rows, newest first, some at a time."""
    before: str | None = None
    while True:
        page = there.get("/api/runs", limit=AT_ONCE, before=before, **wanted)
        yield page["runs"]
        before = page["next"]
        if before is None:
            return


def id_of(there: Client, reference: str) -> str:
    """The run that is meant; if there is none, with what to do as without a service."""
    try:
        return str(there.find(reference)["run"])
    except NotThere as error:
        error.fix = cli_history.LIST
        raise


@runs.command("list")
@cli_history.list_options
def list_(state: str | None, search: str, limit: int, as_json: bool) -> int:
    """What was run there, the newest first."""
    cli_history.refuse_states(state)
    found: list[dict[str, Any]] = []
    for page in pages(client_for(server_url()), state=state, search=search or None):
        found += page
        if len(found) >= limit:
            break
    cli_history.show_list(found[:limit], as_json, bool(state or search))
    return 0


@runs.command()
@cli_history.diff_options
def diff(names: tuple[str, ...], everything: bool, as_json: bool) -> int:
    """How runs differ: what was asked for, and what came of it. Exit code 0, whether or not they do."""
    there = client_for(server_url())
    chosen = cli_history.several(names, lambda name: id_of(there, name))
    cli_history.show_diff(there.get("/api/compare", runs=",".join(chosen)), everything, as_json)
    return 0


@runs.command()
@cli_history.export_options
def export(names: tuple[str, ...], out: str | None) -> int:
    """Write down all that the service knows of runs, as JSON lines: of all of them, or of those named.

    One line a run, {"kind": "run", ...}, and after it one for each of its recorded events. Into a folder,
    each run is a file RUN.jsonl of its own.
    """
    there = client_for(server_url())
    chosen = [id_of(there, name) for name in names]
    if not chosen:
        chosen = [row["run"] for page in pages(there) for row in page][::-1]
    return cli_history.export_to(
        out, chosen, lambda run: detail_of(there, run), lambda run: events_of(there, run)
    )


def detail_of(there: Client, run: str) -> dict[str, Any]:
    from launcher.lastword import lacking
    from launcher.listing import AT_THE_MOMENT

    about = {**there.get(there.run(run)), **AT_THE_MOMENT}
    there.understood(lambda: lacking(about))
    return about


def events_of(there: Client, run: str) -> Iterator[Mapping[str, Any]]:
    from launcher.cli_remote_logs import newest

    after, more, upto = 0, True, newest(there, run)
    while more and after < upto:
        page = there.get(there.run(run, "/events"), after=after, limit=5000)
        yield from page["events"]
        more, after = page["more"], page["last"]


@runs.command()
@cli_history.prune_options
def prune(older_than: str | None, keep: int | None, logs_only: bool, **how: bool) -> int:
    """Have the service forget runs that are over; with both --older-than and --keep, those that both name.

    It takes a token of an admin. What is on the hosts stays there. A run that goes on, or may, is never
    forgotten.
    """
    there = client_for(server_url())
    asked = {"older_than": cli_history.age_of(older_than, keep), "keep": keep, "logs_only": logs_only}
    chosen = there.post("/api/prune", {**asked, "dry_run": True})["chosen"]

    def forget() -> list[str]:
        return list(there.post("/api/prune", {**asked, "runs": chosen})["forgotten"])

    cli_history.prune_chosen(chosen, forget, logs_only=logs_only, **how)
    return 0
