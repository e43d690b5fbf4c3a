"""The commands. Each reads its input, calls the steps in run.py, and shows the result.

Heavy modules are imported inside the commands: `ringctl --help` and `ringctl ps` answer at once.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from launcher import (
    __version__,
    cli_bench,
    cli_env,
    cli_explain,
    cli_history,
    cli_hosts,
    cli_init,
    cli_preflight,
    cli_pull,
    cli_report,
    cli_runs,
    cli_serve,
    cli_submit,
    output,
)
from launcher.cli_shared import (
    agents_of,
    all_runs,
    detail_of,
    host_options,
    inventory_at,
    json_option,
    log_options,
    named_run,
    pool,
    run_argument,
    run_options,
    show_status,
    web_option,
)
from launcher.errors import NO_THREAD, HostError, InputError, RingctlError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from launcher.agent import Agent
    from launcher.ask import Asked
    from launcher.model import Plan
    from launcher.output import Output, Regardless
    from launcher.render import RunScreen
    from launcher.runs import Found
    from launcher.watch import Interrupts
    from launcher.watching import Again, Keeper


LATELY = 20  # runs that ps shows
UNREAD = "nobody reads this any more"
FULL = "what ringctl prints goes to a disk that is full"
FOLLOWING = ("launch", "restart", "submit", "bench")  # a run that they have started


def main() -> None:
    """The console script: the only place that exits the process."""
    if home := os.environ.get("RINGCTL_HOME"):
        # Supervisors and ranks run in folders of their own, where a relative path would mean another one.
        os.environ["RINGCTL_HOME"] = os.path.abspath(home)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would keep us from waiting for a child
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for as long as we live
    output.show_all()
    try:
        code = cli.main(prog_name="ringctl", standalone_mode=False)
        sys.stdout.flush()
    except OSError as error:
        if was_interrupted(error):
            leave(130)
        print(f"error: {refusal(error)}", file=sys.stderr)
        if error.errno == errno.ENOSPC:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still buffered
        code = 1
    except click.exceptions.Abort:
        code = 130
    except RuntimeError as error:  # of which Abort is one
        if str(error) != NO_THREAD:
            raise
        print(
            "error: this machine cannot start another thread; a run that was started goes on", file=sys.stderr
        )
        code = 1
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except RingctlError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    leave(code if isinstance(code, int) else 0)


def leave(code: int) -> NoReturn:
    if code == 130:  # who has pressed Ctrl-C does not wait for others to read
        output.drop_unread()
    sys.exit(code)


def was_interrupted(error: BaseException | None) -> bool:
    """Whether it came up only where Ctrl-C was to be told of: its reader may have ended of it, too."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def refusal(error: OSError) -> str:
    """What this machine would not do, where nobody has expected that."""
    if error.errno == errno.ENOSPC:
        return f"{FULL}; a run that was started goes on"
    where = f"{error.filename}: " if error.filename else ""
    return f"this machine refuses: {where}{error.strerror or error}"


class Commands(click.Group):
    """All commands; what each does when whoever read its output has seen enough; and which of them a service
    answers, if one is named."""

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        found = super().get_command(context, name)
        if not context.params.get("server"):
            return found
        from launcher import cli_remote

        return cli_remote.command(name, found)

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except BrokenPipeError as error:
            output.drop_unread()
            if was_interrupted(error):
                return 130
            if context.invoked_subcommand not in FOLLOWING:
                return 0
            click.echo(f"{UNREAD}; a run that was started goes on", err=True)
            return 1  # it has not seen how that ends
        except KeyboardInterrupt:
            output.drop_unread()  # click ends the line of the ^C before it is here again, whoever reads that
            raise


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ringctl")
@click.option("--no-input", is_flag=True, help="Never ask for a passphrase or a yes; fail instead.")
@click.option(
    "--server",
    envvar="RINGCTL_SERVER",
    metavar="URL",
    help="Ask a service (ringctl serve) instead of the hosts.",
)
@click.option("-v", "--verbose", is_flag=True, help="Say on stderr what is asked of which host.")
def cli(no_input: bool, server: str | None, verbose: bool) -> None:  # noqa: ARG001 - read from the context
    """Train on a few servers you can only SSH into, or on this machine alone.

    \b
    ringctl launch --local --world 4       train the built-in ring here
    ringctl launch --world 2 -- python my_train.py --lr 0.1
    ringctl logs --follow                  one merged log, at any time
    ringctl stop                           end it everywhere
    """
    from launcher import ownfolder, watching

    if verbose:
        os.environ["RINGCTL_VERBOSE"] = "1"
    os.environ.pop("RINGCTL_SERVER", None)  # what we start, such as a watcher, works on the hosts
    ownfolder.check()
    for words in watching.pick_up(click.get_current_context().invoked_subcommand):
        click.echo(words, err=True)


# --- launch --------------------------------------------------------------------------------------


@cli.command(context_settings={"allow_interspersed_args": False})
@run_options
@host_options
@click.option("--local", is_flag=True, help="On this machine alone, without SSH.")
@click.option("--detach", "-d", is_flag=True, help="Return once it has started.")
@click.option("--dry-run", is_flag=True, help="Show the plan and do nothing.")
@click.option("--commands", is_flag=True, help="With --dry-run: as shell commands to start it by hand.")
@click.option("-v", "--verbose", is_flag=True, help="Also show the plan's environment.")
@json_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def launch(
    world: int | None,
    local: bool,
    name: str,
    detach: bool,
    dry_run: bool,
    commands: bool,
    variables: tuple[str, ...],
    env_file: str | None,
    i_know: bool,
    shared: bool,
    master_port: int | None,
    skip_preflight: bool,
    prefork: bool,
    max_restarts: int,
    restart_delay: float,
    min_world: int | None,
    verbose: bool,
    as_json: bool,
    command: tuple[str, ...],
    **where: str | None,
) -> int:
    """Start a run on every host and follow it.

    What follows -- is options for the built-in ring trainer if it begins with a dash, and a command
    otherwise; a command finds torchrun's usual environment variables.

    Ctrl-C stops the run; a second Ctrl-C kills it. If ringctl itself goes away the run goes on.
    """
    from launcher import ask, run

    if commands and not dry_run:
        raise InputError("--commands shows how to start by hand; write --dry-run --commands")
    asked = ask.run(
        ask.inventory(ask.Where(**where), local, world),
        command,
        world=world,
        name=name,
        master_port=master_port,
        prefork=prefork,
        variables=ask.variables(variables),
        env_file=env_file,
        i_know=i_know,
        shared=shared,
        restarts=ask.Restarts(max_restarts, restart_delay, min_world),
    )
    if dry_run:
        ready = run.prepare(asked.inventory, asked.options, pool())
        ready.close()
        show_plan(ready.plan, as_json, commands, verbose)
        return 0
    return launch_and_watch(asked, preflight=not skip_preflight, detach=detach, as_json=as_json)


def launch_and_watch(
    asked: Asked,
    *,
    preflight: bool,
    detach: bool,
    as_json: bool,
    screen_on: Callable[[Output], RunScreen] | None = None,
    again: Again | None = None,
    regardless: Regardless | None = None,
) -> int:
    """Start the run and, unless it is to go on by itself, show it to its end; the exit code. With `again` it
    is one that is to have another attempt, which nobody else may give it meanwhile, and which begins
    `regardless` of who reads."""
    from dataclasses import replace

    from launcher import attempts, fold, redact, render, watch, watching

    pool().hidden = redact.to_look_for(asked.options.secrets)
    interrupts = watch.Interrupts()
    shown = output.Output(interrupts)
    screen = screen_on(shown) if screen_on else render.screen_for(as_json, shown)
    asked = replace(asked, options=replace(asked.options, preflight=preflight))
    try:
        watches = asked.options.max_restarts > 0 or (again is not None and has_leftovers(again.run))
        with watching.Keeper(interrupts, watches=watches, again=again) as keeper:
            if again:
                refuse_late(asked, again.run)
            plan, agents = begun(asked, screen, interrupts, keeper)
            keeper.started()
            if detach and not interrupts.count:
                watcher = keeper.hand_over()
                shown.catch_up(regardless)
                show_detached(plan, watcher, as_json, again=asked.options.max_restarts > 0)
                return 0
            shown.catch_up(regardless)
            asked = replace(asked, options=replace(asked.options, run=plan.run))
            with screen:
                outcome = attempts.see_through(asked, plan, agents, screen, interrupts, pool(), keeper.book)
            keeper.give_back()
    except KeyboardInterrupt:
        shown.hint("interrupted; nothing was started")
        return 130
    finally:
        interrupts.release()
    screen.finish(outcome)
    late = outcome.state.state == "succeeded"  # before anybody could stop it
    return 130 if interrupts.count and not late else fold.exit_code(outcome.state)


def begun(
    asked: Asked, screen: RunScreen, interrupts: Interrupts, keeper: Keeper
) -> tuple[Plan, dict[str, Agent]]:
    """The run, started; one that was not is nobody's to watch."""
    from launcher import run

    try:
        return run.launch(asked, pool(), screen, interrupts, begin=keeper.begin)
    except BaseException as error:  # also what this machine refuses: who is told that it failed has it fail
        keeper.give_back()
        refuse_unshown(error)
        raise


def refuse_unshown(error: BaseException) -> None:
    """Who cannot be shown that a run begins has none started, and is told so."""
    if was_interrupted(error):
        return
    if isinstance(error, BrokenPipeError):
        output.drop_unread()
        raise RingctlError(f"{UNREAD}; nothing was started") from None
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        raise RingctlError(f"{FULL}; nothing was started") from None


def has_leftovers(run: str) -> bool:
    """Whether hosts may still have something of its attempts before: somebody has to ask them until they have
    not."""
    from launcher import history

    record = history.read(run)
    return bool(record and record.unended)


def refuse_late(asked: Asked, run: str) -> None:
    """Somebody may have started the run since it was looked at, or forgotten it; from here on nobody does."""
    from launcher import history

    record = history.read(run)
    if record is None:
        raise RingctlError(f"run {run} was forgotten by somebody else at this moment (runs prune)")
    if record.plan.attempt >= asked.options.attempt:
        raise RingctlError(f"run {run} was started again by somebody else at this moment")


def show_plan(plan: Plan, as_json: bool, commands: bool, verbose: bool) -> None:
    from launcher import model, redact, render, text
    from launcher.plan import shell_commands

    plan = redact.shown(plan)
    if as_json:
        click.echo(text.json_line(model.to_json(plan)))
    elif commands:
        for host, lines in shell_commands(plan).items():
            render.say([f"# on {host}", *lines])
    else:
        head, command, *_ = text.plan_lines(plan)
        render.say([head, command])
        render.show_table(text.plan_rows(plan))
        if verbose:
            render.say([f"{k}={v}" for k, v in sorted(plan.hosts[0].ranks[0].env.items())])


def show_detached(plan: Plan, watcher: int, as_json: bool, *, again: bool) -> None:
    from launcher import text

    if as_json:
        about = {"run": plan.run, "name": plan.name, "world": plan.world}
        click.echo(text.json_line({**about, **({"watcher": watcher} if watcher else {})}))
    else:
        click.echo(f"started {plan.run}; it goes on by itself")
        if watcher:
            what = "starts it again if it fails" if again else "ends what is left of the attempts before"
            click.echo(f"process {watcher} on this machine watches it, and {what}")
        click.echo(f"  ringctl logs {plan.run} --follow\n  ringctl stop {plan.run}")


# --- logs ----------------------------------------------------------------------------------------


@cli.command()
@run_argument
@host_options
@log_options
@web_option
@json_option
def logs(
    run: str | None,
    follow: bool,
    ranks: str | None,
    hosts: tuple[str, ...],
    since: str | None,
    tail: int | None,
    grep: str | None,
    timestamps: bool,
    prefix: bool,
    previous: bool,
    download: str | None,
    web: bool,
    as_json: bool,
    **where: str | None,
) -> int:
    """The merged log of all ranks, of the latest run or of RUN.

    Into a pipe it is exactly what the ranks wrote, each line behind its label; what ringctl itself has
    to say, such as the first failure, goes to stderr.
    """
    from launcher import logs, showlogs

    if web:
        return cli_serve.open_run(run, "?tab=log")
    wanted = logs.filter_of(ranks, hosts, since, grep, now=time.time())
    found = named_run(run, where, unstarted=not (previous or download))
    if found.never_started:
        showlogs.tell_end(detail_of(found), as_json=as_json)
        return 0
    world = found.state.world if found.state else 0
    absent = sorted(rank for rank in wanted.ranks or () if world and rank >= world and not previous)
    if absent:
        raise InputError(f"--rank {absent[0]}: run {found.run} has ranks 0 to {world - 1}")
    its = (*found.hosts, *(found.former if previous else ()))
    unknown = [host for host in hosts if host not in {h.name for h in its}]
    if unknown:
        known = ", ".join(host.name for host in its)
        raise InputError(f"--host {unknown[0]}: not a host of run {found.run}, which has {known}")
    if previous and found.state is not None and found.state.attempt == 1:
        raise InputError(f"run {found.run} is in its first attempt; there is none before it")
    agents = agents_of(found, former=previous)
    attempt = showlogs.previous(found, agents) if previous else 0
    if download is not None:
        return showlogs.download(found, agents, Path(download), attempt=attempt)
    look = showlogs.Look(as_json=as_json, prefix=prefix, timestamps=timestamps, tail=tail)
    if follow and not previous:
        return showlogs.follow_attempts(found.run, lambda: latest(found), wanted, look)
    return showlogs.show(found, agents, wanted, look, attempt=attempt)


def latest(found: Found) -> tuple[Found, Mapping[str, Agent]]:
    """The run as it is now, and all hosts that it is or was on."""
    from launcher import history, runs

    record = history.read(found.run)
    found = runs.refreshed(runs.found_of(record), pool()) if record else found
    return found, agents_of(found, former=True)


# --- ps, status, stop ----------------------------------------------------------------------------


@cli.command()
@click.option(
    "--all", "-a", "everything", is_flag=True, help="All runs, also those that others find on the hosts."
)
@host_options
@json_option
def ps(everything: bool, as_json: bool, **where: str | None) -> int:
    """What runs, and what ran lately.

    Shows the last twenty runs that were started from here; with --all, or when hosts are named, every run
    that is on the hosts.
    """
    from launcher import text

    everything = everything or any(where.values())
    runs, errors = all_runs(inventory_at(where)) if everything else all_runs(recent=LATELY)
    for error in errors:
        click.echo(f"error: {error}", err=True)
    if not everything:
        recent = {found.run for found in runs[-LATELY:]}
        runs = [f for f in runs if f.run in recent or (f.state and f.state.state in ("starting", "running"))]
    if as_json:
        click.echo(text.json_line([text.run_json(found) for found in runs]))
    elif not runs and not errors:
        click.echo("no runs yet; start one: ringctl launch --local --world 2")
    else:
        from launcher import render

        render.show_table(text.ps_rows(runs, time.time()))
    return HostError.exit_code if everything and errors else 0


@cli.command()
@run_argument
@host_options
@web_option
@json_option
def status(run: str | None, web: bool, as_json: bool, **where: str | None) -> int:
    """How the latest run, or RUN, is: each rank's state, step, loss and last sign of life."""
    from launcher import retold, watching

    if web:
        return cli_serve.open_run(run)
    found = named_run(run, where, unstarted=True)
    for words in found.silent:
        click.echo(f"error: {words}", err=True)
    detail = detail_of(found) if found.never_started else None
    found = retold.found_of(detail, time.time()) if detail else found
    show_status(found, detail, watching.sentence(found.run), as_json=as_json)
    return HostError.exit_code if found.silent else 0


# --- hosts ---------------------------------------------------------------------------------------

cli.add_command(cli_init.init)
cli.add_command(cli_preflight.preflight)
cli.add_command(cli_hosts.hosts)
cli.add_command(cli_hosts.trust)
cli.add_command(cli_hosts.execute)
cli.add_command(cli_hosts.push)
cli.add_command(cli_env.env)
cli.add_command(cli_explain.explain)
cli.add_command(cli_bench.bench)
cli.add_command(cli_pull.checkpoints)
cli.add_command(cli_pull.pull)
cli.add_command(cli_history.runs)
cli.add_command(cli_report.report)
cli.add_command(cli_runs.stop)
cli.add_command(cli_runs.restart)
cli.add_command(cli_runs.watcher)
cli.add_command(cli_serve.serve)
cli.add_command(cli_submit.submit)
cli.add_command(cli_serve.queue)
cli.add_command(cli_serve.cancel)
cli.add_command(cli_serve.start_queued)


# --- completion ----------------------------------------------------------------------------------


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print shell completion: eval "$(ringctl completion bash)"."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None  # click knows the three of the choice above
    click.echo(kind(cli, {}, "ringctl", "_RINGCTL_COMPLETE").source())
