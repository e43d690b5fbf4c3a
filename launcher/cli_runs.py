"""The commands that end runs and start them again."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from launcher.cli_shared import (
    complete_run,
    host_options,
    inventory_at,
    json_option,
    named_run,
    pool,
    restart_options,
    run_argument,
)
from launcher.errors import HostError, InputError, RingctlError, StoppedEarly

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from launcher.ask import Asked
    from launcher.model import Host
    from launcher.runs import Found
    from launcher.watching import Again

# --- stop ----------------------------------------------------------------------------------------


@click.command()
@run_argument
@host_options
@click.option("--grace", type=click.FloatRange(0, 3600), default=5.0, help="Seconds between TERM and KILL.")
@json_option
def stop(run: str | None, grace: float, as_json: bool, **where: str | None) -> int:
    """End the latest run, or RUN, on all its hosts. May be repeated."""
    from launcher import runs, text

    if grace != grace:
        raise InputError("--grace nan: write a number of seconds")
    since = time.monotonic()  # hosts that cannot be reached are waited for
    found = named_run(run, where)
    hosts = inventory_at(where) if found.elsewhere else None
    ended = end_for_good(found, grace, hosts.hosts if hosts else (), since)
    results = ended.answers
    errors = [result for result in results.values() if isinstance(result, RingctlError)]
    answers = {host: answer for host, answer in results.items() if isinstance(answer, dict)}
    if not errors:
        runs.settle(found.run, ended.attempt, pool())
    if as_json:
        failed = {host: str(error) for host, error in results.items() if isinstance(error, RingctlError)}
        click.echo(text.json_line({"run": found.run, "hosts": answers, "errors": failed}))
    else:
        for host, answer in answers.items():
            click.echo(stopped_line(host, answer))
        for error in errors:
            click.echo(f"error: {error}", err=True)
    if found.elsewhere:
        from launcher.logs import ranges

        words = f"rank {ranges(found.elsewhere)} of it is on a host that is not named here, and may go on"
        click.echo(f"error: {words}", err=True)
        return HostError.exit_code
    left = any(answer["left"] or not answer.get("kept", True) for answer in answers.values())
    return HostError.exit_code if errors else 1 if left or ended.watched else 0


@dataclass(frozen=True)
class Ended:
    """What came of ending a run."""

    attempt: int  # that its hosts were told to end; it is not started any more, but a later one may be
    answers: dict[str, dict[str, Any] | RingctlError]  # of each host
    watched: bool  # somebody still watches it, or is about to start it


def end_for_good(found: Found, grace: float, others: Sequence[Host], since: float) -> Ended:
    """End the run; also whoever is about to start it again by hand does not."""
    from launcher import watching

    begins = watching.call_off(found.run)
    ended = end_everywhere(found, grace, others, since=since)
    if begins and not watching.is_called_off(found.run):
        ended = replace(ended, watched=True)
    if ended.watched and not (words := still_there(found.run)):
        ended = replace(ended, watched=False)
    elif ended.watched:
        click.echo(f"error: {words}", err=True)
    return ended


def still_there(run: str) -> str:
    """ "" if whoever it was waited for has ended at this moment."""
    from launcher import watching

    who = watching.sentence(run)
    return f"run {run} is still {who}; end that process" if who else ""


def end_everywhere(
    found: Found,
    grace: float,
    others: Sequence[Host] = (),
    again: str = "",
    since: float | None = None,
) -> Ended:
    """End the run, and have nobody start it again by itself. Hosts that only an earlier attempt was on are
    told as well, and so are `others` that may be about to start it; of them it is told what they had, and who
    may still have something. Who does so to start it `again` is not called off by that."""
    from launcher import history, runs, watching
    from launcher.agent import agents_for

    with watching.giving_up(found.run, grace) as watcher:
        record = history.read(found.run) if found.from_here else None
        found = runs.found_of(record) if record else found  # somebody may just have started it once more
        agents = agents_for((*others, *found.former, *found.hosts), pool())
        results = runs.stop(agents, found.run, grace, attempt=found.attempt, again=again, since=since)
        failed = [name for name, answer in results.items() if isinstance(answer, RingctlError)]
        ended = [name for name, answer in results.items() if isinstance(answer, dict) and not answer["left"]]
        history.note_ended(found.run, ended)
        watched = not watching.wait_for_end(found.run, watcher)
    its = {host.name for host in found.hosts}
    told = {name: answer for name, answer in results.items() if name in its or had_some(answer)}
    unended = {name: results[name] for name in found.unended if name in failed}
    return Ended(found.attempt, {**told, **unended}, watched)


def had_some(answer: dict[str, Any] | RingctlError) -> bool:
    return isinstance(answer, dict) and bool(answer["ended"] or answer["left"])


def stopped_line(host: str, answer: dict[str, Any]) -> str:
    from launcher.told import unwritten

    return "\n".join(filter(None, (what_ended(host, answer), unwritten(host, answer))))


def what_ended(host: str, answer: dict[str, Any]) -> str:
    from launcher.logs import ranges
    from launcher.told import words_of

    if not answer["known"]:
        return f"{host}: had not started it, and will not"
    if answer["left"]:
        return f"{host}: could not end processes {words_of(answer['left'])}"
    if not answer["ended"]:
        going_on = answer["was"] in ("starting", "running")  # without ranks: somebody else ends it, too
        was = "being ended" if going_on else answer["was"]
        return f"{host}: was {was} already; nothing is left of it"
    return f"{host}: ended ranks {ranges(answer['ended'])}; nothing is left of them"


# --- restart -------------------------------------------------------------------------------------


@click.command()
@click.argument("run", shell_complete=complete_run)
@restart_options
@json_option
def restart(run: str, world: int | None, grow: bool, i_know: bool, detach: bool, as_json: bool) -> int:
    """Start RUN again with the same code and options, as its next attempt; from its checkpoint if it has one.

    On the hosts of its last attempt, unless --world or --grow says otherwise. If it still runs it is stopped
    first. `logs --previous` shows the attempt before.
    """
    from launcher import cli, output, watching

    if world is not None and grow:
        raise InputError("--grow means as many ranks as it was launched with; leave out --world")
    with (
        watching.Again(known_here(run)) as again,
        output.Regardless() as regardless,  # what was ended for it is not left so because nobody reads that
        contextlib.ExitStack() as afterwards,
    ):
        with telling("nothing was touched"):
            unannounced = announce(again)
            asked, found = asked_again(again.run, world, grow, i_know)
            refuse_unannounced(asked, unannounced)
        if not found.is_over or watching.read(found.run):
            look_before(found, asked)
            again.hold_signals()
            afterwards.enter_context(telling_what_ended(found, again))
            end_before(found, asked, again)
            asked, found = asked_again(found.run, world, grow, i_know)
        elif found.unended:
            with telling("nothing was started"):
                end_before(found, asked, again)
            asked, found = asked_again(found.run, world, grow, i_know)
        asked = replace(asked, again=again.token)
        return cli.launch_and_watch(
            asked, preflight=True, detach=detach, as_json=as_json, again=again, regardless=regardless
        )


def announce(again: Again) -> dict[str, RingctlError]:
    """To the run's hosts, before it is looked at: a stop from another machine calls it off there. Why some
    could not be told."""
    from launcher import history
    from launcher.agent import agents_for
    from launcher.fanout import fan_out

    record = history.read(again.run)
    agents = agents_for((*record.former, *record.hosts), pool()) if record else {}
    told = fan_out(agents, lambda name: agents[name].announce(again.run, again.token))
    return {name: error for name, error in told.items() if isinstance(error, RingctlError)}


def refuse_unannounced(asked: Asked, unannounced: Mapping[str, RingctlError]) -> None:
    """A host that the run is to be on, and that answers, has to know: else nobody elsewhere calls it off."""
    from launcher import restarts

    for host in restarts.needed(asked):
        error = unannounced.get(host.name)
        if error is not None and not isinstance(error, HostError):
            raise error  # a full disk, say: nothing would start there either


def known_here(reference: str) -> str:
    """The id of a run that was started from here, before any host is asked."""
    from launcher import runs

    with contextlib.suppress(InputError):
        found = runs.find_run(reference, runs.candidates(reference))
        if not found.never_started:
            return found.run
    found = named_run(reference, {})
    raise InputError(f"run {found.run} was not started from here, so its options are not known here")


def look_before(found: Found, asked: Asked) -> None:
    """What goes on is ended only for a start that its hosts, and this machine, have room for."""
    from launcher import run

    known = {host.name for host in (*found.hosts, *found.former)}
    with telling(f"attempt {found.attempt} is as it was"):
        run.could_start_again(asked, pool(), known)


@contextlib.contextmanager
def telling(words: str) -> Iterator[None]:
    """How things stand if this fails because of a host, or of this machine."""
    try:
        yield
    except InputError:
        raise  # what was asked for is wrong, which says enough
    except RingctlError as error:
        error.message += f"; {words}"
        raise


@contextlib.contextmanager
def telling_what_ended(found: Found, again: Again) -> Iterator[None]:
    """Whatever keeps the run from starting from here on: it does not go on as it did before."""
    words, fix = f"attempt {found.attempt} was ended for it", f"to go on: ringctl restart {found.run}"
    try:
        yield
    except StoppedEarly:
        raise  # which is what somebody wanted
    except RingctlError as error:
        if not again.has_started:
            error.message += f"; {words}"
            error.fix = error.fix or fix
        raise
    except KeyboardInterrupt:
        click.echo(f"interrupted; {words}\n  {fix}", err=True)
        raise
    if not again.has_started:  # an interrupted launch has said so
        click.echo(f"{words}\n  {fix}", err=True)


def end_before(found: Found, asked: Asked, again: Again) -> None:
    """End the attempt before. A host that cannot be asked, or cannot end what it has, is asked again if it is
    not needed any more."""
    from launcher import history, restarts
    from launcher.leftovers import what_is_left

    needed = {host.name for host in restarts.needed(asked)}
    ended = end_everywhere(found, grace=5.0, again=again.token)
    if ended.watched and (words := still_there(found.run)):
        raise RingctlError(words)
    for host, answer in ended.answers.items():
        left, silent = what_is_left(answer), answer.message if isinstance(answer, RingctlError) else ""
        if host in needed and (left or silent):
            raise HostError(host, left or f"cannot stop the attempt before: {silent}")
        if left or silent:
            words = silent or f"{host}: {left}"
            click.echo(f"{words}; it is asked again for as long as somebody watches the run", err=True)
            history.note_ended(found.run, (), [host])


def asked_again(run: str, world: int | None, grow: bool, i_know: bool = False) -> tuple[Asked, Found]:
    """What the run's next attempt is to be, and the run as it is; nothing is touched."""
    from launcher import ask, history, push, queued, restarts
    from launcher.serve import reserving

    found = named_run(run, {})
    record = history.read(found.run)
    if record is None:
        raise RingctlError(f"run {found.run} was forgotten by somebody else at this moment (runs prune)")
    if record.plan.attempt != found.attempt:
        raise RingctlError(f"run {found.run} was started again by somebody else at this moment")
    before = record.options
    snapshot = push.of_command(before.command, ask.TRAINER, before.env_file) if before.code else None
    if snapshot and snapshot.digest != record.options.code:
        snapshot = None  # what is here has changed since; the hosts have the run's own
    attempt = record.plan.attempt + 1
    options = replace(ask.again(record.options), attempt=attempt, since=attempt)
    options = replace(options, i_know=options.i_know or i_know)
    asked = ask.Asked(record.inventory, options, snapshot)
    if world is None and not grow:
        asked = restarts.same_world(asked, record.plan, record.hosts)
    else:
        asked = restarts.other_world(asked, world)
    asked = replace(asked, rooms={**queued.rooms(found.run), **reserving.rooms(found.run)})
    return on_hosts_that_answer(asked, as_before=world is None), found


def on_hosts_that_answer(asked: Asked, *, as_before: bool) -> Asked:
    """With as many ranks; unless it is to be `as_before`, others take the place of hosts that cannot be
    reached. Raises if there are too few."""
    from launcher import restarts, runs

    while True:
        answers = runs.ask_hosts(restarts.needed(asked), pool(), asked.options.run)
        silent = {host.name: answer for host, answer in answers if isinstance(answer, RingctlError)}
        if not silent:
            return asked
        error = next(iter(silent.values()))
        others, room = restarts.leaving_out(asked, silent)
        world = min(room, asked.options.world or room)
        if as_before or world != asked.options.world:
            error.message += "; the next attempt needs it"
            if world:
                error.fix = f"without it: ringctl restart {asked.options.run} --world {world}"
            raise error
        for answer in silent.values():
            click.echo(f"{answer.message}; not on it", err=True)
        asked = others


# --- watcher -------------------------------------------------------------------------------------


@click.command(hidden=True)
@click.argument("run")
def watcher(run: str) -> int:
    """Watch a detached run to its end and start it again if it fails."""
    from launcher import agent, ask, attempts, fold, history, queued, redact, render, watch, watching

    screen = render.NoteScreen()
    with watching.watched(run) as book:
        if book is None:
            return 0
        record = history.read(run)
        if record is None:
            watching.forget(run)
            raise InputError(f"there is no run {run} here")
        options, rooms = ask.again(record.options), queued.rooms(run)
        asked = ask.Asked(record.inventory, options, None, rooms)  # the hosts have the run's code
        pool().hidden = redact.to_look_for(asked.options.secrets)
        agents = agent.agents_for(record.hosts, pool())
        outcome = attempts.see_through(
            asked, record.plan, agents, screen, watch.Interrupts(), pool(), book, lines=False
        )
    screen.finish(outcome)
    return fold.exit_code(outcome.state)
