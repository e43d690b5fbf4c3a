"""The command that proves the hosts before anything starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from launcher.cli_shared import host_options, i_know_option, json_option, pool
from launcher.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from launcher.preflight.examine import Examined


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--world", type=int, metavar="N", help="Only the hosts that a launch of N ranks would use.")
@host_options
@click.option("--local", is_flag=True, help="This machine alone.")
@click.option("--master-port", type=click.IntRange(1, 65535), help="As launch would be told.")
@i_know_option
@click.option("--only", metavar="CHECKS", help="Only these checks, separated by commas.")
@click.option("--skip", metavar="CHECKS", help="Not these checks.")
@click.option("--deep", is_flag=True, help="Also import torch on every host, which takes seconds.")
@click.option("--fix", is_flag=True, help="Mend what can safely be mended, after a yes; then look again.")
@click.option("--yes", is_flag=True, help="With --fix: do not ask.")
@click.option("-v", "--verbose", is_flag=True, help="Every check, and all that the hosts said.")
@json_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def preflight(
    world: int | None,
    local: bool,
    master_port: int | None,
    i_know: bool,
    only: str | None,
    skip: str | None,
    deep: bool,
    fix: bool,
    yes: bool,
    verbose: bool,
    as_json: bool,
    command: tuple[str, ...],
    **where: str | None,
) -> int:
    """Check everything that is known to go wrong, on every host, and start nothing.

    What follows -- is as for launch, so that its data folder and its kind of command are looked at too.
    Exit code 0: a run would start; 3: something would stop it; 4: a host could not be reached.
    """
    from launcher import ask
    from launcher.agent import agents_for
    from launcher.plan import place
    from launcher.preflight.examine import Seen, examine

    names = chosen_checks(only, skip)
    if yes and not fix:
        raise InputError("--yes says yes to what --fix would do; write --fix --yes")

    pushes = fix and not only  # of some checks alone, the code is none

    def look() -> Seen:
        asked = ask.run(
            ask.inventory(ask.Where(**where), local, world),
            command,
            world=world,
            master_port=master_port,
            i_know=i_know,
            pushes=pushes,
        )
        agents = agents_for([host for host, _ in place(asked.inventory, world)], pool())
        code = asked.snapshot.about() if asked.snapshot else None
        return Seen(asked, agents, examine(asked.inventory, asked.options, agents, code, names, deep=deep))

    seen = look()
    if not (fix and as_json):
        show(seen.examined, as_json, verbose)
    if fix:
        from launcher.mending import mended

        again = mended(seen, look, yes=yes, as_json=as_json)
        if again or as_json:
            seen = again or seen
            show(seen.examined, as_json, verbose)
    return seen.examined.exit_code


def chosen_checks(only: str | None, skip: str | None) -> list[str]:
    """Names of checks; what is not one is refused with the nearest that is."""
    from launcher.preflight.checks import NAMES

    def named(option: str, text: str | None) -> list[str]:
        words = [word.strip() for word in text.split(",") if word.strip()] if text else []
        for word in words:
            if word not in NAMES:
                import difflib

                near = difflib.get_close_matches(word, NAMES, n=1)
                hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(NAMES)}"
                raise InputError(f"{option} {word}: there is no such check", fix=hint)
        return words

    wanted, unwanted = named("--only", only), named("--skip", skip)
    return [name for name in wanted or NAMES if name not in unwanted]


def show(examined: Examined, as_json: bool, verbose: bool) -> None:
    from launcher import text
    from launcher.preflight import report

    if as_json:
        click.echo(text.json_line(report.as_json(examined, facts=verbose)))
    else:
        facts = report.fact_lines(examined) if verbose else []
        show_tables(examined, verbose, facts)


def show_tables(examined: Examined, verbose: bool, facts: Sequence[str] = ()) -> None:
    import shutil

    from launcher import render
    from launcher.logs import visible
    from launcher.preflight import report

    in_short = report.table_rows(examined)
    rows = report.table_rows(examined, every_check=True) if verbose else in_short
    render.show_table(rows, report.host_lines(in_short))
    width = shutil.get_terminal_size().columns if render.is_terminal() else 200
    pairs = report.pair_rows(examined, width)
    if pairs:
        render.say([""])
        render.show_table(pairs)
    if facts:
        render.say(["", *map(visible, facts)])
    attention = [visible(line) for line in report.attention_lines(examined, everything=verbose)]
    render.show_findings(["", *attention, *([""] if attention else []), report.verdict(examined)])
