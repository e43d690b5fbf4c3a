"""`ringctl explain`: why a run, or whatever wrote a log, failed."""

from __future__ import annotations

import os
import shlex
import stat
import time
from typing import TYPE_CHECKING, Any

import click

from launcher.cli_shared import agents_of, complete_run, host_options, json_option, named_run

if TYPE_CHECKING:
    from collections.abc import Mapping
    from io import BufferedReader

    from launcher.agent import Agent
    from launcher.diagnose import Cause, Tails
    from launcher.model import RunState
    from launcher.runs import Found

GOES_ON = "the run goes on; no rank has failed"
LOOK_S = 1.5  # hosts have noted by then where their ranks are


@click.command()
@click.argument("what", required=False, metavar="[RUN|FILE|-]", shell_complete=complete_run)
@host_options
@json_option
def explain(what: str | None, as_json: bool, **where: str | None) -> int:
    """Say what failed first and what to do: of the latest run, of RUN, or in the log FILE (- for stdin).

    FILE may be any log, also of torchrun or nohup. Of a run that still runs, it says which rank keeps the
    others waiting, and where. Exit code 0: here is why. 1: nothing is known to be wrong, or why is not known.
    2: there is no such run or file.
    """
    found = None if is_log(what) else named_run(what, where)
    about = of_run(found) if found else of_log(what)
    show(about, as_json)
    tell_lost(found.state if found else None)
    return 0 if about["explained"] else 1


def tell_lost(state: RunState | None) -> None:
    """Why it failed may have been among lines that are lost."""
    from launcher.logs import visible
    from launcher.text import lost_lines

    for words in lost_lines(state):
        click.echo(visible(words), err=True)


def is_log(what: str | None) -> bool:
    """A file of that name comes before a run; what has a slash in it can only be a file."""
    return what is not None and (what == "-" or "/" in what or os.path.isfile(what))


# --- A log ---------------------------------------------------------------------------------------


def of_log(path: str | None) -> dict[str, Any]:
    from launcher import foreign
    from launcher.errors import InputError

    assert path is not None
    try:
        with opened(path) as file:
            if foreign.is_utf16(file.peek(64)):
                fix = f"iconv -f UTF-16 -t UTF-8 {shlex.quote(path)} | ringctl explain -"
                raise InputError(f"{path} is UTF-16", fix=fix)
            reader = foreign.read(foreign.lines_of(file))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    told = f"{reader.lines:,} lines read; nothing in them is known to be a failure"
    return answer(reader.cause, source=path, note="" if reader.cause else told)


def opened(path: str) -> BufferedReader:
    from launcher.errors import InputError

    try:
        if path == "-":
            return open(0, "rb", closefd=False)
        kind = os.stat(path).st_mode
        if stat.S_ISDIR(kind):
            raise InputError(f"{path} is a folder; name the log file in it")
        if not (stat.S_ISREG(kind) or stat.S_ISFIFO(kind)):
            raise InputError(f"{path} is neither a file nor a pipe")
        return open(path, "rb")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", fix="ringctl ps lists the runs") from None


# --- A run ---------------------------------------------------------------------------------------


def of_run(found: Found) -> dict[str, Any]:
    """Of one that is over, its first failure; of one that runs, who keeps the others waiting."""
    from launcher import fold, model, watch
    from launcher.diagnose import Cause, Tails, first_failure
    from launcher.errors import HostError
    from launcher.follow import follow

    agents = agents_of(found)
    if found.state is None:
        raise HostError(found.hosts[0].name, next(iter(found.silent), "it knows nothing of the run"))
    running = found.state.state in ("starting", "running")
    if found.cause and not running:  # whoever saw it end has looked
        return answer(model.from_json(Cause, found.cause), run=found.run, state=found.state.state)
    if running:
        look_at(agents, found.run)
    tails, state, away = Tails(), fold.before(found.state), dict[str, str]()
    attempt = found.state.attempt
    places, some = found.rank_hosts_in(attempt), found.is_on_no_other(attempt)
    for update in follow(agents, found.run, live=False, attempt=attempt, some=some, rank_hosts=places):
        away = update.unheard
        for event in update.events:
            state = fold.fold(state, event) if event.kind != "line" else state
            tails.add(event)
    if running and state.state not in fold.ENDED:
        cause = first_failure(state, tails, away)
        return answer(cause, run=found.run, state=state.state) if cause else of_going_on(state, tails, away)
    if found.state.state in fold.ENDED and state.state not in fold.ENDED:
        state, away = found.state, {}  # hosts told it once, and have nothing of it any more
    outcome = watch.outcome(state, tails, away)
    note = (
        ""
        if outcome.cause
        else f"run {found.run} {outcome.state.state}; nothing is known to be wrong with it"
    )
    return answer(outcome.cause, run=found.run, state=outcome.state.state, note=note)


def of_going_on(state: RunState, tails: Tails, away: Mapping[str, str]) -> dict[str, Any]:
    """Who keeps the others waiting, if anybody does, and where all ranks are."""
    from launcher.diagnose import standstill

    words = standstill(state, tails, away)
    unheard = "".join(f"; {why}" for why in away.values())
    note = words or (f"no rank that can be heard has failed{unheard}" if away else GOES_ON)
    places = {str(rank): str(stack) for rank, stack in sorted(tails.stacks.items())}
    about = answer(None, run=state.run, state=state.state, note=note)
    return {**about, "explained": bool(words), "places": places}


def look_at(agents: dict[str, Agent], run: str) -> None:
    """Have the hosts note where their ranks are; one that cannot be asked is told of by what follows."""
    from launcher.fanout import fan_out

    fan_out(agents, lambda name: agents[name].ask("hostd.py", ["stacks"], {"run": run}))
    time.sleep(LOOK_S)


# --- What is shown -------------------------------------------------------------------------------


def answer(cause: Cause | None, *, note: str = "", **about: str) -> dict[str, Any]:
    """What --json prints."""
    trace = [
        {"file": frame.file, "line": frame.line, "function": frame.function, "text": frame.text}
        for frame in (cause.trace if cause else ())
    ]
    return {
        "run": about.get("run"),
        "source": about.get("source"),
        "state": about.get("state"),
        "explained": bool(cause and cause.known),
        "id": cause.id if cause else "",
        "rank": cause.rank if cause else None,
        "host": cause.host if cause else "",
        "cause": cause.text if cause else None,
        "fix": cause.fix if cause else "",
        "trace": trace,
        "lines": list(cause.lines) if cause else [],
        "note": note,
        "places": {},
    }


def show(about: dict[str, Any], as_json: bool) -> None:
    from launcher import render, text
    from launcher.diagnose import Cause
    from launcher.logs import visible
    from launcher.traces import Frame

    if as_json:
        click.echo(text.json_line(about))
        return
    lines = [about["note"]] if about["note"] else []
    if about["cause"]:
        trace = tuple(Frame(**frame) for frame in about["trace"])
        cause = Cause(about["rank"], about["host"], about["cause"], about["fix"], tuple(about["lines"]))
        cause = Cause(**{**vars(cause), "trace": trace, "known": about["explained"]})
        lines += text.failure_lines(cause)
    lines += [f"  rank {rank}: {place}" for rank, place in about["places"].items()]
    render.say([visible(line) for line in lines])
