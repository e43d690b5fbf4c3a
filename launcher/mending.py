"""`ringctl preflight --fix`: says what it would do, asks, does it, and says what came of it on each host."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import click

from launcher import dataset, environment, inventory, push, remote, runs, yamltext
from launcher.agent import Agent, agents_for
from launcher.cli_env import interruptible
from launcher.cli_shared import pool
from launcher.errors import InputError, RingctlError
from launcher.fanout import fan_out
from launcher.logs import visible
from launcher.preflight import mend
from launcher.preflight.examine import Seen, data_folder, environment_here
from launcher.preflight.mend import Action, Means
from launcher.told import words_of
from launcher.wholefile import replace_whole

CREATE_S = 3600.0
SUDO_S = 30.0
GRACE_S = 5.0
Outcome = Mapping[str, str | RingctlError]  # by host (or file): what was done, or why it was not


def mended(seen: Seen, again: Callable[[], Seen], *, yes: bool, as_json: bool) -> Seen | None:
    """Put right what can be, after a yes, and look again; None if nothing was done."""

    def say(line: str) -> None:
        click.echo(visible(line), err=as_json)

    means = means_for(seen)
    todo = mend.actions(seen.examined, means)
    for line in mend.by_hand(seen.examined, todo):
        say(f"to be done by hand {line}")
    if not todo:
        wrong = seen.examined.failures or seen.examined.warnings
        say("there is nothing that ringctl can mend by itself" if wrong else "there is nothing to mend")
        return None
    for action in todo:
        say(f"would {action.sentence}")
    chosen = agreed(todo, yes, say, as_json)
    if not chosen:
        say("nothing was changed")
        return None
    with interruptible() as stop:
        for action in chosen:
            if not stop():
                tell(carry_out(action, seen, means, say, stop), say)
    if stop():
        raise KeyboardInterrupt
    return again()


def agreed(todo: Sequence[Action], yes: bool, say: Callable[[str], None], as_json: bool) -> list[Action]:
    """What the user says yes to: to all at once, but for what takes a yes of its own."""
    if yes:
        return list(todo)
    if click.get_current_context().find_root().params.get("no_input") or not sys.stdin.isatty():
        say("nobody is here to say yes; say it with --yes")
        return []
    together = [action for action in todo if not action.alone]
    chosen = together if together and click.confirm("Do this?", err=as_json) else []
    for action in todo:
        if action.alone and click.confirm(visible(f"And {action.sentence}?"), err=as_json):
            chosen = [*chosen, action]
    return [action for action in todo if action in chosen]


def tell(outcome: Outcome, say: Callable[[str], None]) -> None:
    """Host by host, but what several have in common once."""
    alike: dict[str, list[str]] = {}
    for where, what in outcome.items():
        if isinstance(what, RingctlError):
            fix = "".join(f"\n  {line}" for line in what.fix.splitlines())
            what = f"not mended: {what.message.removeprefix(f'{where}: ')}{fix}"
        alike.setdefault(what, []).append(where)
    for what, places in alike.items():
        for line in f"{remote.grouped(places)}: {what}".splitlines():
            say(line)


# --- What there is to mend with ------------------------------------------------------------------


def means_for(seen: Seen) -> Means:
    hosts, options = seen.asked.inventory, seen.asked.options
    data = data_folder(options.command)
    return Means(
        inventory=hosts,
        text=inventory_text(hosts.source),
        port_given=options.master_port is not None,
        environment=environment_here(),
        data=data,
        data_whole=bool(data) and dataset.is_whole(data),
        runs=frozenset(found.run for found in runs.remembered()),
        sudo=with_sudo({name: seen.agents[name] for name in mend.wrong_names(seen.examined)}),
    )


def inventory_text(source: str) -> str:
    """The file that says who the hosts are; "" if they came from the command line or a hostfile."""
    try:
        text = inventory.read(Path(source))
        inventory.parse(text, source)
    except InputError:
        return ""
    return text


def with_sudo(agents: Mapping[str, Agent]) -> frozenset[str]:
    """Hosts where sudo asks for no password."""
    answers = remote.execute(agents, ["sudo", "-n", "true"], SUDO_S, None)
    return frozenset(
        name for name, done in answers.items() if not isinstance(done, RingctlError) and done.exit_code == 0
    )


# --- Doing it ------------------------------------------------------------------------------------


def carry_out(
    action: Action, seen: Seen, means: Means, say: Callable[[str], None], stop: Callable[[], bool]
) -> Outcome:
    agents = {name: seen.agents[name] for name in action.hosts}
    if action.kind == "run":
        return stop_run(action.run, agents, seen)
    if action.kind == "inventory":
        return edit_inventory(action, means)
    if action.kind == "environment":
        return create_environment(agents, say, stop)
    if action.kind == "code":
        return push_code(agents, seen, say)
    if action.kind == "data":
        return dataset.copy(agents, means.data)
    return fan_out(agents, lambda name: name_hosts(agents[name], action.names[name]))


def stop_run(run: str, agents: Mapping[str, Agent], seen: Seen) -> Outcome:
    """On all hosts that know it; at least on the one where it was found."""
    found, _ = runs.find_runs(pool(), seen.asked.inventory.hosts)
    known = [host for each in found if each.run == run for host in each.hosts]
    its = agents_for(known, pool()) or dict(agents)
    outcome: dict[str, str | RingctlError] = {}
    for name, answer in runs.stop(its, run, GRACE_S).items():
        if isinstance(answer, RingctlError):
            outcome[name] = answer
        elif answer["left"]:
            outcome[name] = RingctlError(f"cannot end processes {words_of(answer['left'])}")
        else:
            outcome[name] = f"run {run} is stopped"
    return outcome


def edit_inventory(action: Action, means: Means) -> Outcome:
    """Replaced whole, with the old one beside it; not if somebody has changed it since it was read."""
    file = os.path.realpath(means.inventory.source)
    try:
        text = inventory.read(Path(file))
        if text != means.text:
            raise RingctlError("somebody has changed it meanwhile")
        new = yamltext.edited(text, action.edits)
        inventory.parse(new, file)
        mode = stat.S_IMODE(os.stat(file).st_mode)
        replace_whole(Path(f"{file}.bak"), Path(file).read_bytes(), mode)
        replace_whole(Path(file), new.encode(), mode)
    except OSError as error:
        return {means.inventory.source: RingctlError(f"{error.filename}: {error.strerror}")}
    except RingctlError as error:
        return {means.inventory.source: error}
    return {means.inventory.source: "is changed; the old one is beside it, with .bak behind its name"}


def create_environment(
    agents: Mapping[str, Agent], say: Callable[[str], None], stop: Callable[[], bool]
) -> Outcome:
    spec = environment.read_spec(environment.find_file(None))
    made = environment.create(agents, spec, CREATE_S, lambda host, line: say(f"{host}: {line}"), stop)
    return {
        name: done if isinstance(done, RingctlError) else f"{done.how}: {done.prefix} ({done.tool})"
        for name, done in made.items()
    }


def push_code(agents: Mapping[str, Agent], seen: Seen, say: Callable[[str], None]) -> Outcome:
    assert seen.asked.snapshot is not None  # something of it was lacking
    pushed = push.push(seen.asked.snapshot, agents, say, seen.examined.survey.lacking)
    return {
        name: done if isinstance(done, RingctlError) else f"has the code ({done.bytes:,} bytes)"
        for name, done in pushed.items()
    }


# --- /etc/hosts ----------------------------------------------------------------------------------

# Only where the file is still the one that was looked at, and all of the new one has come. It is written
# into, not replaced: in a container it is a mount of its own.
WRITE_HOSTS = """
set -e
[ "$(sha256sum </etc/hosts)" = "$2  -" ] || { echo "it was changed meanwhile" >&2; exit 1; }
cp -p /etc/hosts "$1"
cat >"$1.new"
[ "$(sha256sum <"$1.new")" = "$3  -" ] || { rm "$1.new"; echo "it came in pieces" >&2; exit 1; }
cat "$1.new" >/etc/hosts
rm "$1.new"
"""


def name_hosts(agent: Agent, names: Mapping[str, str]) -> str:
    """Let names mean addresses there; the old file stays beside the new one."""
    host = agent.host.name
    looked = remote.execute({host: agent}, ["cat", "/etc/hosts"], SUDO_S, None)[host]
    if isinstance(looked, RingctlError):
        raise looked
    new = mend.etc_hosts(looked.out.decode(errors="surrogateescape"), names).encode(errors="surrogateescape")
    backup = time.strftime("/etc/hosts.ringctl-%Y%m%d-%H%M%S.bak")
    sums = [hashlib.sha256(data).hexdigest() for data in (looked.out, new)]
    argv = ["sudo", "-n", "/bin/sh", "-c", WRITE_HOSTS, "sh", backup, *sums]
    done = agent.transport.run(argv, new, SUDO_S)
    if done.exit_code:
        raise RingctlError(f"/etc/hosts: {done.last_words}")
    return f"/etc/hosts is changed; the old one is {backup}"
