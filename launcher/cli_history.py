"""`ringctl runs`: what was run, side by side, into files, and away with what is old."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from launcher.cli_shared import F, complete_run, json_option, pool
from launcher.errors import HostError, InputError, RingctlError

if TYPE_CHECKING:
    from launcher.text import Row

LIST = "ringctl runs list shows them"
NAMED = 5  # attempts of which the same is said
STATES = ("queued", "starting", "running", "succeeded", "failed", "stopped", "lost", "cancelled")


class NotWritten(InputError):
    """This machine cannot take an export."""


@click.group()
def runs() -> None:
    """What was run from here: list it, compare it, write it into files, forget what is old."""


def id_of(reference: str) -> str:
    """The run meant by an id, a name or a unique beginning; no host is asked."""
    from launcher import runs as all_runs

    known = all_runs.candidates(reference)
    if not known:
        raise InputError(f"there is no run {reference!r}", fix=LIST)
    return all_runs.find_run(reference, known).run


# --- list ----------------------------------------------------------------------------------------


def list_options(command: F) -> F:
    for option in reversed(
        (
            click.option(
                "--state", metavar="STATES", help=f"Only these, separated by commas: {', '.join(STATES)}."
            ),
            click.option(
                "--search", metavar="WORDS", default="", help="Only runs with these words in what is known."
            ),
            click.option(
                "--limit",
                type=click.IntRange(1, 10**9),
                default=20,
                help="How many, newest first; 20 by default.",
            ),
            json_option,
        )
    ):
        command = option(command)
    return command


@runs.command("list")
@list_options
def list_(state: str | None, search: str, limit: int, as_json: bool) -> int:
    """What was run from here, the newest first. Hosts are asked about runs that were not over yet."""
    from launcher import listing

    refuse_states(state)
    refresh()
    show_list(listing.rows(limit=limit, state=state, search=search), as_json, bool(state or search))
    return 0


def refuse_states(state: str | None) -> None:
    unknown = [one for one in state.split(",") if one not in STATES] if state else []
    if unknown:
        raise InputError(f"--state {unknown[0]}: not a state", fix=f"there are {', '.join(STATES)}")


def show_list(found: list[dict[str, Any]], as_json: bool, chosen: bool) -> None:
    from launcher import render, text

    if as_json:
        click.echo(text.json_line(found))
    elif found:
        render.show_table(list_rows(found, time.time()))
    else:
        click.echo("no runs like that" if chosen else "no runs yet; ringctl launch starts one")


def refresh() -> None:
    """Have the hosts of runs that go on say how they are; how one ended is written down by that, and
    here that nobody looks after it any more."""
    from launcher import history, listing
    from launcher import runs as all_runs

    rows = listing.rows(limit=1000, state=",".join((*listing.GOING_ON, "lost")))
    known = {row["run"]: row["state"] for row in rows}
    records = [record for run in known if (record := history.read(run))]
    for now in all_runs.all_refreshed([all_runs.found_of(record) for record in records], pool()):
        if now.is_over or now.state is None:
            continue
        if now.state.state == "lost" and not now.silent:
            history.close(now.state)
        elif now.state.state == "running" != known[now.run]:
            with contextlib.suppress(RingctlError):  # a disk that can only be read: then it is not said
                history.mark_running(now.run, now.state.attempt)


def list_rows(found: list[dict[str, Any]], now: float) -> list[Row]:
    from launcher.compare import shown
    from launcher.logs import visible
    from launcher.text import ago

    rows: list[Row] = [("RUN", "NAME", "STATE", "WORLD", "STARTED", "STEP", "LOSS", "ACCURACY", "ERROR")]
    for row in found:
        began = ago(row["started"] or row["submitted"], now)
        figures = [shown(row[key])[:12] for key in ("step", "loss", "accuracy")]
        cells = (row["run"], row["name"] or "-", row["state"], str(row["world"]), began, *figures)
        rows.append((*map(visible, cells), visible(row["error"])[:60]))
    return rows


# --- diff ----------------------------------------------------------------------------------------


def diff_options(command: F) -> F:
    command = json_option(command)
    command = click.option("--all", "everything", is_flag=True, help="Also what is the same.")(command)
    return click.argument("names", nargs=-1, metavar="A B [MORE...]", shell_complete=complete_run)(command)


@runs.command()
@diff_options
def diff(names: tuple[str, ...], everything: bool, as_json: bool) -> int:
    """How runs differ: what was asked for, and what came of it. Exit code 0, whether or not they do."""
    from launcher import listing

    chosen = several(names, id_of)
    show_diff(listing.compared(chosen), everything, as_json)
    return 0


def several(names: tuple[str, ...], find: Callable[[str], str]) -> list[str]:
    """The runs that are meant, each once."""
    if len(names) < 2:
        raise InputError("name two runs or more", fix=LIST)
    found = list(dict.fromkeys(map(find, names)))
    if len(found) < 2:
        raise InputError(f"{' and '.join(names)} are the same run", fix=LIST)
    return found


def show_diff(told: dict[str, Any], everything: bool, as_json: bool) -> None:
    from launcher import render, text

    if as_json:
        click.echo(text.json_line(told))
        return
    for what in ("options", "results"):
        table = diff_rows(what, told, everything)
        if len(table) > 1:
            render.show_table(table)
        else:
            click.echo(f"the same {what}")


def diff_rows(what: str, told: dict[str, Any], everything: bool) -> list[Row]:
    from launcher.compare import shown
    from launcher.logs import visible

    rows: list[Row] = [(what.upper(), *(row["run"] for row in told["runs"]))]
    shown_ones = [entry for entry in told[what] if everything or entry["differs"]]
    return [*rows, *((e["key"], *(visible(shown(value))[:70] for value in e["values"])) for e in shown_ones)]


# --- export --------------------------------------------------------------------------------------


def export_options(command: F) -> F:
    command = click.option(
        "--out", metavar="PLACE", help="A new file, or with a slash at its end a new folder."
    )(command)
    return click.argument("names", nargs=-1, metavar="[RUN...]", shell_complete=complete_run)(command)


@runs.command()
@export_options
def export(names: tuple[str, ...], out: str | None) -> int:
    """Write down all that is known of runs, as JSON lines: of all of them, or of those named.

    One line a run, {"kind": "run", ...}, and after it one for each of its recorded events. Into a folder,
    each run is a file RUN.jsonl of its own.
    """
    from launcher import history, listing

    chosen = [id_of(name) for name in names] or history.names()
    return export_to(out, chosen, lambda run: listing.detail(run) or {"run": run}, events_of)


def export_to(
    out: str | None,
    chosen: list[str],
    detail: Callable[[str], Mapping[str, Any]],
    events: Callable[[str], Iterator[Mapping[str, Any]]],
) -> int:
    """The exit code, which tells whether all logs that are recorded are whole: without a service none is."""
    from launcher.lastword import NOT_RECORDED, lacking

    missing: dict[str, dict[int, str]] = {}

    def lines(run: str) -> Iterator[str]:
        about = detail(run)
        missing[run] = lacking(about)
        yield json.dumps({"kind": "run", **about}) + "\n"
        yield from (json.dumps(event) + "\n" for event in events(run))

    write_all(out, chosen, lines)
    for words in not_whole(missing):
        click.echo(words, err=True)
    lacks = {words for its in missing.values() for words in its.values()}
    return HostError.exit_code if lacks - {NOT_RECORDED} else 0


def not_whole(missing: Mapping[str, Mapping[int, str]]) -> list[str]:
    """A sentence for all attempts that lack the same; of runs that nobody recorded there may be many."""
    from launcher.lastword import to_do
    from launcher.logs import visible

    which: dict[str, list[str]] = {}
    for run, attempts in missing.items():
        for attempt, words in attempts.items():
            which.setdefault(words, []).append(visible(f"run {run}, attempt {attempt}"))
    more = {words: f"; and {len(its) - NAMED} more" for words, its in which.items() if len(its) > NAMED}
    found = [f"{'; '.join(its[:NAMED])}{more.get(words, '')}: {words}" for words, its in which.items()]
    return [*found, *to_do(which)]


def write_all(out: str | None, chosen: list[str], lines: Callable[[str], Iterator[str]]) -> None:
    if out is None:
        for run in chosen:
            sys.stdout.writelines(lines(run))
    elif out.endswith("/"):
        folder = made(Path(out))
        try:
            for run in chosen:
                with new_file(folder / f"{run}.jsonl") as file:
                    file.writelines(lines(run))
        except NotWritten:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    else:
        with new_file(Path(out)) as file:
            for run in chosen:
                file.writelines(lines(run))
    if out is not None:
        click.echo(f"{len(chosen)} runs in {out}")


def made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise InputError(f"{folder} is there already; name another folder") from None
    except OSError as error:
        raise InputError(f"{folder}: cannot be made: {error.strerror}") from None
    return folder


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[IO[str]]:
    """Whole, or not there."""
    from launcher.wholefile import new_whole

    try:
        with new_whole(path) as file:  # of ASCII, which JSON with its escapes is
            yield file
    except FileExistsError:
        raise InputError(f"{path} is there already; name another file") from None
    except OSError as error:
        raise NotWritten(f"{path}: cannot be written: {error.strerror}") from None


def events_of(run: str) -> Iterator[Mapping[str, Any]]:
    from launcher import tape

    after, upto = 0, tape.last(run)  # what comes meanwhile may never end
    while after < upto and (some := tape.events(run, after, 5000)):
        yield from (tape.numbered(id_, event) for id_, event in some)
        after = some[-1][0]


# --- prune ---------------------------------------------------------------------------------------


def prune_options(command: F) -> F:
    for option in reversed(
        (
            click.option("--older-than", metavar="AGE", help="Those that ended so long ago: 30d, 12h."),
            click.option("--keep", type=click.IntRange(0, 10**9), metavar="N", help="All but the newest N."),
            click.option("--logs-only", is_flag=True, help="Only what was recorded of them: log and curves."),
            click.option("--dry-run", is_flag=True, help="Say which, and do nothing."),
            click.option("--yes", is_flag=True, help="Do not ask."),
            json_option,
        )
    ):
        command = option(command)
    return command


@runs.command()
@prune_options
def prune(older_than: str | None, keep: int | None, logs_only: bool, **how: bool) -> int:
    """Forget runs that are over; with both --older-than and --keep, those that both name.

    What is on the hosts stays there. A run that goes on, or may, is never forgotten.
    """
    from launcher import pruning

    age = age_of(older_than, keep)
    chosen = pruning.chosen(age, keep, time.time(), logs_only=logs_only)
    prune_chosen(
        list(chosen), lambda: pruning.forget(chosen, logs_only=logs_only), logs_only=logs_only, **how
    )
    return 0


def age_of(older_than: str | None, keep: int | None) -> float | None:
    if older_than is None and keep is None:
        raise InputError("say which: --older-than 30d, --keep 100, or both")
    return None if older_than is None else seconds(older_than)


def prune_chosen(
    chosen: list[str],
    forget: Callable[[], list[str]],
    *,
    logs_only: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Say which, ask, and do it; `forget` says which of them it forgot."""
    from launcher import text

    forgotten: list[str] = []
    what = "the log of " if logs_only else ""
    if not as_json:
        for run in chosen:
            click.echo(f"{'would forget' if dry_run else 'to forget'} {what}{run}")
    if chosen and not dry_run:
        if not yes and not confirmed(f"Forget {what}{text.count(len(chosen), 'run')}?"):
            raise InputError("nothing was forgotten", fix="--yes does it without asking")
        forgotten = forget()
        for run in chosen:
            if run not in forgotten:
                click.echo(f"{run} stays: it was started again, or somebody is at it", err=True)
    if as_json:
        click.echo(text.json_line({"forgotten": forgotten, "chosen": chosen}))
    elif not chosen:
        click.echo("there is nothing to forget")


def seconds(text: str) -> float:
    from launcher.logs import UNITS

    unit = UNITS.get(text[-1:], 0)
    try:
        age = float(text[:-1]) * unit
    except ValueError:
        age = -1.0
    if unit == 0 or not 0 <= age < 1e11:
        raise InputError(f"--older-than {text}: not an age", fix="write 30d, 12h or 90m")
    return age


def confirmed(question: str) -> bool:
    if click.get_current_context().find_root().params.get("no_input") or not sys.stdin.isatty():
        raise InputError(f"{question} There is nobody to ask", fix="--yes does it without asking")
    return click.confirm(question)
