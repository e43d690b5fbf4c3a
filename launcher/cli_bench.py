"""The commands that measure what training, and the links, reach."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from launcher.cli_shared import F, host_options, json_option
from launcher.errors import InputError

if TYPE_CHECKING:
    from launcher.output import Output
    from launcher.render import RunScreen

PASSING_ON = {"ignore_unknown_options": True}  # they are the benchmark's, or the trainer's


@click.group()
def bench() -> None:
    """Measure: what training gains from ranks and formats, and what the links carry."""


def bench_options(command: F) -> F:
    """Where to measure, and where to put the results; all other words are passed on."""
    options: list[Callable[[F], F]] = [
        click.option("--world", type=int, metavar="N", help="How many ranks; every slot by default."),
        host_options,
        click.option("--local", is_flag=True, help="On this machine alone, without SSH."),
        click.option("--skip-preflight", is_flag=True, help="Start unchecked."),
        click.option("--out", default="bench-results", metavar="DIR", help="./bench-results by default."),
        json_option,
        click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF THE BENCHMARK]..."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@bench.command(context_settings=PASSING_ON)
@bench_options
def table(**given: Any) -> int:
    """Train alone, on 2, 4, ... ranks, and in every way asked for; compare time, bytes and accuracy.

    \b
    ringctl bench table --local --world 4 --compress int8,int4 --sync ddp
    --sync LIST        also these strategies
    --compress LIST    also these formats: int8 on the ring, ddp:fp16 on another
    --seeds K          trainings of each (3)
    --rate 200mbit     what the links carry, for the report

    All options of the trainer are accepted as well: --model, --data, --epochs, --steps, --batch-size, ...
    The results go into table.md, table.json and table.png.
    """
    return measure("table", **given)


@bench.command(context_settings=PASSING_ON)
@bench_options
def collectives(**given: Any) -> int:
    """Time the exchange of gradients, beside gloo's all_reduce in the same processes.

    \b
    ringctl bench collectives --world 4 --sizes 1mb,12mb --compress int8 --rate 200mbit
    --sizes LIST       of the gradients in fp32 (4kb,64kb,1mb,4mb,16mb,64mb)
    --sync LIST        also these strategies
    --compress LIST    also these formats
    --rounds K         of which the median counts (11)
    --rate 200mbit     what the links carry: shows how near to it each comes

    The results go into collectives.md, collectives.json and collectives.png.
    """
    return measure("collectives", **given)


def measure(
    kind: str,
    *,
    world: int | None,
    local: bool,
    skip_preflight: bool,
    out: str,
    as_json: bool,
    words: tuple[str, ...],
    **where: str | None,
) -> int:
    """Launch the benchmark, follow it, and write down what it found, also if it was cut short."""
    from launcher import ask, bench, cli, render

    asked = ask.run(
        ask.inventory(ask.Where(**where), local, world),
        ("--bench", kind, *words, "--out", "-"),
        world=world,
        name=f"bench-{kind}",
    )
    prepare(out)
    # Ranks that a training does not need make no progress while it runs, and nothing is wrong with that.
    os.environ.setdefault("RINGCTL_WATCHDOG", "0")
    figures = bench.Figures()

    def screen_on(output: Output) -> RunScreen:
        return bench.Collecting(bench.Quiet(output) if as_json else render.screen_for(False, output), figures)

    code = cli.launch_and_watch(
        asked, preflight=not skip_preflight, detach=False, as_json=as_json, screen_on=screen_on
    )
    if not figures.measured:
        return code
    command = f"ringctl {shlex.join(sys.argv[1:])}"
    told = bench.write_report(out, figures.results(kind, command))
    if as_json:
        with open(os.path.join(out, f"{kind}.json")) as file:
            click.echo(file.read(), nl=False)
    else:
        render.show_table(figures.rows)
    for line in told:
        click.echo(line, err=as_json)
    return code


def prepare(out: str) -> None:
    """The folder for the results: what is wrong with it is told before anything is measured."""
    import importlib.util

    try:
        os.makedirs(out, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {out}: {error.strerror}") from None
    if not os.access(out, os.W_OK | os.X_OK):
        raise InputError(f"--out {out}: you may not write there")
    if importlib.util.find_spec("matplotlib") is None:
        click.echo("there will be no picture: pip install 'ringctl[bench]' first to have one", err=True)
