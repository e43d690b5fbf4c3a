"""Commands about what a run has made: checkpoints, pull."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.cli_shared import host_options, json_option, named_run, pool, run_argument
from launcher.errors import InputError

if TYPE_CHECKING:
    from launcher.pulling import Heard


def heard_of(run: str | None, where: dict[str, str | None]) -> Heard:
    """What all hosts of a run have of it, also those that only earlier attempts were on."""
    from launcher import pulling
    from launcher.agent import agents_for

    found = named_run(run, where)
    return pulling.hear(found, agents_for((*found.hosts, *found.former), pool()))


# --- checkpoints ---------------------------------------------------------------------------------


@click.command()
@run_argument
@host_options
@json_option
def checkpoints(run: str | None, as_json: bool, **where: str | None) -> int:
    """Which checkpoints the latest run, or RUN, has, and on which hosts.

    A checkpoint is complete when all ranks have finished their parts of it, and these are there. That is
    unknown while a host that may have one cannot be reached. `ringctl pull` brings a model here.
    """
    from launcher import pull, pulling, render, text
    from launcher.logs import visible

    heard = heard_of(run, where)
    if as_json:
        click.echo(text.json_line(heard.told()))
        return heard.code
    found = heard.checkpoints()
    if found:
        render.show_table(pull.checkpoint_rows(found, time.time()))
        render.say([visible(f"step {of.step}: {words}") for of in found for words in of.problems])
    elif heard.listings:
        click.echo(f"run {heard.found.run} has no checkpoints")
    pulling.tell_elsewhere(pull.chosen_folders(heard.listings))
    return heard.code


# --- pull ----------------------------------------------------------------------------------------


@click.command()
@run_argument
@click.argument("folder", metavar="[DIR]", required=False)
@host_options
@click.option("--step", type=click.IntRange(0, 10**17), metavar="N", help="The model of this step.")
@click.option("--force", is_flag=True, help="Also if DIR is not empty; what a pull put there is replaced.")
def pull(run: str | None, folder: str | None, step: int | None, force: bool, **where: str | None) -> int:
    """Bring model, metrics and logs of the latest run, or of RUN, to DIR, or to ./RUN.

    The model is that of the newest complete checkpoint, verified by its checksum. Where a host's copy is
    damaged, or the host is away, the next host that has it is asked. Interrupted, the same command goes on.
    """
    from launcher import pulling
    from launcher.pullfolder import PullFolder, refuse_full

    if folder is not None:
        refuse_full(Path(folder), force)  # before any host is asked
    heard = heard_of(run, where)
    if folder is None:
        folder = folder_for(heard.found.run)
    refuse_full(Path(folder), force, heard.found.run)
    if not heard.listings:
        return heard.code
    refuse_step(heard, step)
    to = PullFolder(Path(folder))
    try:
        with to.open():
            pulling.bring(heard, to, step)
    except KeyboardInterrupt:
        click.echo(
            f"interrupted; what has come is in {to.part}: the same command goes on from there", err=True
        )
        return 130
    if heard.no_room:
        pulling.complain(
            f"{folder}: there is no room for all of run {heard.found.run}; what has come is there"
        )
    else:
        click.echo(f"run {heard.found.run} is in {folder}")
    return heard.code


def folder_for(run: str) -> str:
    """A run's id as the name of a folder; that of a run that was not started here is a host's word."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", run):
        raise InputError(f"{run[:80]!r} is no name for a folder", fix="name one: ringctl pull RUN DIR")
    return run


def refuse_step(heard: Heard, step: int | None) -> None:
    """InputError if no host has a model of that step; nothing has been written then."""
    known = [of.step for of in heard.checkpoints() if of.models]
    if step is not None and step not in known and not heard.code:
        there = ", ".join(map(str, known)) or "none"
        raise InputError(f"--step {step}: run {heard.found.run} has no model of it; of these it has: {there}")
