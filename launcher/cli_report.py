"""The command that puts a run into one file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.cli_shared import F, named_run, pool, run_argument
from launcher.errors import InputError

if TYPE_CHECKING:
    from launcher.runs import Found


def report_options(command: F) -> F:
    for option in reversed(
        (
            click.option(
                "--out", "-o", metavar="FILE", help="Where to; RUN.html here by default, - for stdout."
            ),
            click.option(
                "--markdown", "kind", flag_value="markdown", help="Markdown, with tables and small curves."
            ),
            click.option("--json", "kind", flag_value="json", help="The data itself."),
            click.option(
                "--html", "kind", flag_value="html", default="html", help="One HTML file that needs no other."
            ),
        )
    ):
        command = option(command)
    return command


@click.command()
@run_argument
@report_options
def report(run: str | None, out: str | None, kind: str) -> int:
    """Put the latest run, or RUN, into one file: curves, tables, the end of its log.

    Markdown and JSON are printed unless --out names a file. What nobody has recorded yet is asked of
    its hosts.
    """
    from launcher import report as reports
    from launcher import text
    from launcher.cli_remote_logs import tell_gaps
    from launcher.lastword import lacking
    from launcher.showlogs import note

    found = named_run(run, {}, unstarted=True)
    if not found.never_started:
        reports.record_now(found.run)
    data = reports.collect(found.run, checkpoints=checkpoints_of(found))
    if kind == "json":
        made = text.json_line(data)
    else:
        made = reports.render_markdown(data) if kind == "markdown" else reports.render_html(data)
    put(made, found.run, out, kind)
    return tell_gaps(lacking(data["run"]), note)


def checkpoints_of(found: Found) -> dict[str, Any] | None:
    """What its hosts have saved; None of a run that has not come to any. A host that is away is named."""
    from launcher import pulling
    from launcher.agent import agents_for

    if not found.hosts:
        return None
    agents = agents_for((*found.hosts, *found.former), pool())
    return pulling.hear(found, agents).told()


def put(made: str, run: str, out: str | None, kind: str) -> None:
    """Into the file that was named, or where each kind goes by itself."""
    where = out or (f"{run}.html" if kind == "html" else "-")
    if not made.endswith("\n"):
        made += "\n"
    if where in ("-", "/dev/stdout"):  # which may be a file that somebody has open to append to
        shown = sys.stdout.isatty()  # a pipe gets it as it is
        click.echo("".join(map(visible_line, made.splitlines())) if shown else made, nl=False)
        return
    write(Path(where), made)
    click.echo(f"{where}: the report of run {run}", err=True)


def visible_line(line: str) -> str:
    from launcher.logs import visible

    return visible(line) + "\n"


def write(path: Path, made: str) -> None:
    from launcher.wholefile import write_where_named

    try:
        write_where_named(path, made.encode("utf-8", "replace"))
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None
