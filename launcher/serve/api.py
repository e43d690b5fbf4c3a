"""What the addresses below /api do. Each function is one route of the table in routes.py."""

from __future__ import annotations

import shlex
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from starlette.concurrency import run_in_threadpool

from launcher import __version__, ask, codestore, history, listing, pruning, queued, redact, schedule, tape
from launcher import report as reports
from launcher import runs as all_runs
from launcher.errors import InputError, RingctlError
from launcher.inventory import variable_problem
from launcher.model import from_json, to_json
from launcher.plan import is_trainer, place
from launcher.serve import prom
from launcher.serve.auth import Who
from launcher.serve.call import Answer, Call, Refused
from launcher.serve.children import ringctl
from launcher.serve.keeper import Keeper, planned
from launcher.serve.service import fresh_id

STOP_S = 120.0  # besides the grace that ranks are given
REPORT_S = 20.0  # a report does not wait longer for hosts
CANCEL_S = 15.0  # by then a launch that is interrupted has ended, most times


def health(_call: Call) -> dict[str, Any]:
    return {"ok": True, "version": __version__}


def prometheus(call: Call) -> Answer:
    text = prom.exposition(call.service)
    return Answer(text, kind="text/plain; version=0.0.4; charset=utf-8")


def me(call: Call) -> dict[str, Any]:
    assert call.who is not None
    return {"user": call.who.name, "role": call.who.role}


# --- Looking -------------------------------------------------------------------------------------


def runs(call: Call) -> dict[str, Any]:
    wanted = call.query
    rows = listing.rows(
        limit=wanted["limit"] + 1,
        before=wanted["before"] or None,
        state=wanted["state"] or None,
        search=wanted["search"],
    )
    page = rows[: wanted["limit"]]
    return {"runs": page, "next": page[-1]["run"] if len(rows) > len(page) else None}


def find(call: Call) -> dict[str, Any]:
    """As the commands without a service find it; by its id also what they cannot read any more."""
    wanted = call.query["run"]
    row = listing.row(wanted) if wanted else None
    if row is not None:
        return row
    found = all_runs.candidates(wanted)
    if not found and wanted is None:
        fix = "hand one in: ringctl submit --world 2; ringctl queue shows what waits"
        raise Refused(404, "there is no run yet", fix)
    if not found:
        raise Refused(404, f"there is no run {wanted!r}", "ringctl ps lists the runs")
    return known(call, listing.row(all_runs.find_run(wanted, found).run))


def run(call: Call) -> dict[str, Any]:
    found = known(call, call.service.detail(call.path["run"]))
    return found if call.may_change(found) else {**found, "actions": []}


def known(call: Call, found: dict[str, Any] | None) -> dict[str, Any]:
    if found is None:
        raise Refused(
            404,
            f"there is no run {call.path.get('run', '')[:64]!r}",
            "the list of runs shows which there are",
        )
    return found


def row_of(call: Call) -> dict[str, Any]:
    return known(call, listing.row(call.path["run"]))


def metrics(call: Call) -> dict[str, Any]:
    row_of(call)
    return dict(tape.series(call.path["run"], points=call.query["points"]))


def log(call: Call) -> dict[str, Any]:
    row_of(call)
    wanted = call.query
    if wanted["after"] is not None and wanted["before"] is not None:
        raise Refused(400, "after and before exclude each other", "leave one")
    page = tape.lines(
        call.path["run"],
        after=wanted["after"],
        before=wanted["before"],
        limit=wanted["limit"],
        rank=None if wanted["rank"] is None else {wanted["rank"]},
        host={wanted["host"]} if wanted["host"] else None,
        since=wanted["since"],
        stream=wanted["stream"],
        search=wanted["search"],
    )
    return {"lines": page.lines, "first": page.first, "last": page.last, "more": page.more}


def events(call: Call) -> dict[str, Any]:
    """All kinds of them, or what hosts have said last; no more at once than is held in memory without a
    thought."""
    row_of(call)
    run, after = call.path["run"], call.query["after"]
    if call.query["kind"]:
        its, last, more = tape.events_of_kind(run, call.query["kind"], after, call.query["limit"])
        return {"events": [tape.numbered(*each) for each in its], "last": last, "more": more}
    some = tape.events(run, after, call.query["limit"], tape.MOST_BYTES)
    last = some[-1][0] if some else after
    found = [tape.numbered(*each) for each in some]
    return {"events": found, "last": last, "more": last < tape.last(run)}


def checkpoints(call: Call) -> dict[str, Any]:
    row_of(call)
    found: dict[str, Any] = ringctl("checkpoints", call.path["run"], "--json", seconds=60.0).json()
    return found


def submission(call: Call) -> dict[str, Any]:
    """Also of a run that was launched without the service, unless its code would have to come from a folder
    that the service knows nothing of."""
    row_of(call)
    row = queued.row(call.path["run"])
    if row is not None:
        return without_secrets(row.submission)
    record = history.read(call.path["run"])
    if record is None:
        raise Refused(404, "how this run was started is not known here")
    options = record.options
    said = queued.Submission(
        command=options.command,
        world=options.world,
        name=options.name,
        variables=options.variables,
        secrets=dict.fromkeys(options.secrets, ""),
        max_restarts=options.max_restarts,
        restart_delay=options.restart_delay,
        min_world=options.min_world,
        prefork=options.prefork,
        shared=options.shared,
        master_port=options.master_port,
        i_know=options.i_know,
        skip_preflight=not options.preflight,
    )
    if not is_trainer(options.command):
        raise Refused(409, f"its code is not here: it was launched in {options.workdir}", typed(said))
    return without_secrets(said)


def typed(said: queued.Submission) -> str:
    """The command that hands it in from where its code is."""
    told = without_secrets(said)
    given = {
        "--world": said.world,
        "--name": said.name,
        "--max-restarts": said.max_restarts,
        "--restart-delay": said.restart_delay if said.max_restarts else None,
        "--min-world": said.min_world,
        "--master-port": said.master_port,
        "--env-file": "FILE" if told["secrets"] else None,
    }
    flags = {"no-prefork": not said.prefork, "shared": said.shared, "i-know": said.i_know}
    words = ["ringctl", "submit", *(word for pair in given.items() if pair[1] for word in map(str, pair))]
    words += [word for name, value in told["variables"].items() for word in ("--env", f"{name}={value}")]
    words += [f"--{name}" for name, on in {**flags, "skip-preflight": said.skip_preflight}.items() if on]
    return shlex.join([*words, "--", *said.command])


def without_secrets(said: queued.Submission) -> dict[str, Any]:
    """What looks like a secret is told as one is: by its name alone."""
    hidden = [name for name, value in said.variables.items() if redact.tells(name, value)]
    variables = {name: value for name, value in said.variables.items() if name not in hidden}
    secrets = dict.fromkeys((*said.secrets, *hidden), "")
    told: dict[str, Any] = to_json(replace(said, variables=variables, secrets=secrets))
    return {key: value for key, value in told.items() if key != "key"}  # it is of that one run


def report(call: Call) -> Answer:
    run, found = call.path["run"], call.service.detail(call.path["run"])
    data = reports.collect(run, known(call, found), saved(run) if found and found["plan"] else None)
    if call.query["format"] == "json":
        return Answer(data)
    if call.query["format"] == "markdown":
        return Answer(reports.render_markdown(data), kind="text/markdown; charset=utf-8")
    policy = {"Content-Security-Policy": reports.content_security_policy()}
    return Answer(reports.render_html(data), kind="text/html; charset=utf-8", headers=policy)


def saved(run: str) -> dict[str, Any] | None:
    """Its checkpoints, if its hosts say in time."""
    try:
        return dict(ringctl("checkpoints", run, "--json", seconds=REPORT_S).json())
    except (Refused, RingctlError):
        return None


def compare(call: Call) -> dict[str, Any]:
    names = list(dict.fromkeys(call.query["runs"].split(",")))
    for name in names:
        if listing.row(name) is None:
            raise Refused(404, f"there is no run {name!r}")
    return dict(listing.compared(names))


# --- Changing runs -------------------------------------------------------------------------------


def mine(call: Call) -> dict[str, Any]:
    """The row of a run that whoever asks may change: their own, or any for an admin."""
    row = row_of(call)
    if not call.may_change(row):
        raise Refused(403, f"run {row['run']} is {row['user'] or 'somebody else'}'s", "ask them, or an admin")
    return row


def stop(call: Call) -> dict[str, Any]:
    run = mine(call)["run"]
    grace, keeper = float(call.body.get("grace", 5.0)), call.service.keeper
    with keeper.stopping(run, grace + STOP_S):
        if is_cancelled(call, run) and not has_later_attempt(run):
            return known(call, listing.row(run))
        done = ringctl("stop", run, "--json", "--grace", str(grace), seconds=grace + STOP_S)
    done.json()
    if done.code not in (0, 1):
        raise done.refusal()
    call.service.keeper.wake()
    return known(call, listing.row(run))


def has_later_attempt(run: str) -> bool:
    """Whether somebody has started it again, which may be while its launch is still there."""
    record = history.read(run)
    return record is not None and record.plan.attempt > 1


def cancel(call: Call) -> dict[str, Any]:
    run = mine(call)["run"]
    if not is_cancelled(call, run):
        raise RingctlError(f"run {run} is not waiting", fix=f"ringctl stop {run} ends one that runs")
    return known(call, listing.row(run))


def is_cancelled(call: Call, run: str) -> bool:
    """Whether it was still in the queue, or its launch under way; then that has ended now, most times."""
    if not call.service.keeper.cancel(run):
        return False
    wait_for_launch(call.service.keeper, run)
    call.service.keeper.wake()
    return True


def wait_for_launch(keeper: Keeper, run: str) -> bool:
    """Whether nobody launches it any more, after a while at the most."""
    until = time.monotonic() + CANCEL_S
    while (entry := queued.row(run)) and entry.state == "starting":
        if time.monotonic() > until:
            return False
        keeper.wake()
        time.sleep(0.1)
    return True


def restart(call: Call) -> dict[str, Any]:
    """At once, and only if its slots are free: its checkpoints are on its own hosts."""
    row = mine(call)
    run, keeper = row["run"], call.service.keeper
    record = history.read(run)
    if record is None:
        raise Refused(409, f"run {run} has never started", "hand it in again")
    if queued.row(run) is not None and record.options.secrets and not queued.env_file(run).exists():
        raise Refused(409, "its secrets are not here any more", "hand it in again, with them")
    world, grow = call.body.get("world"), bool(call.body.get("grow"))
    if world is not None and grow:
        raise Refused(400, "grow means as many ranks as it was launched with", "leave out world")
    if not wait_for_launch(keeper, run):
        raise Refused(409, f"run {run} is being started at this moment", "try again")
    if world is None and not grow:
        needed = keeper.here(record.hosts, planned(record))
    else:
        hosts = record.inventory.hosts
        needed = keeper.here(hosts, {host.name: host.slots for host in hosts})
    keeper.ask_hosts(needed)  # one that is silent holds up nobody else
    with keeper.giving:
        keeper.ask_again(needed)
        wish = schedule.Taken(run, needed, record.options.shared, row["user"])
        refuse_taken(keeper, wish)
        held = keeper.reserve(wish, keeper.rooms((*record.hosts, *record.inventory.hosts)))
    try:
        more = ["--world", str(int(world))] if world is not None else ["--grow"] if grow else []
        more += ["--i-know"] if call.body.get("i_know") else []
        folder = code_folder(run, record.options.workdir)
        done = ringctl("restart", run, "--detach", "--json", *more, seconds=300.0, folder=folder, held=held)
        if keeper.is_stopping(run):
            raise Refused(409, f"somebody has stopped run {run} meanwhile", "start it again")
        done.json()
    finally:
        keeper.release(run)
    return known(call, listing.row(run))


def code_folder(run: str, launched_in: str) -> Path:
    """Where a restart looks for the run's code: not in whatever folder the service was started in."""
    for folder in (queued.work_folder(run), Path(launched_in or "/nonexistent")):
        if folder.is_dir():
            return folder
    empty = history.home() / "serve" / "empty"
    history.make_folder(empty)
    return empty


def refuse_taken(keeper: Keeper, wish: schedule.Taken) -> None:
    own = keeper.own()
    taken = [*own, *keeper.others({each.run for each in own})]
    for host in keeper.inventory.hosts:
        others = [each for each in taken if each.slots.get(host.name) and each.run != wish.run]
        if wish.slots.get(host.name) and others and schedule.used([*others, wish], host.name) > host.slots:
            names = ", ".join(sorted(each.run for each in others))
            raise Refused(
                409, f"{host.name}: its slots are taken by {names}", "wait, or submit the run again"
            )


def prune(call: Call) -> dict[str, Any]:
    asked = call.body
    age, keep = asked.get("older_than"), asked.get("keep")
    if age is None and keep is None:
        raise Refused(400, "older_than and keep are missing", "give one of them, or both")
    logs_only = bool(asked.get("logs_only"))
    found = pruning.chosen(age, None if keep is None else int(keep), time.time(), logs_only=logs_only)
    if asked.get("runs") is not None:
        seen = set(asked["runs"])
        found = {run: attempt for run, attempt in found.items() if run in seen}
    forgotten = [] if asked.get("dry_run") else pruning.forget(found, logs_only=logs_only)
    return {"chosen": list(found), "forgotten": forgotten}


# --- Handing in ----------------------------------------------------------------------------------


def queue(call: Call) -> dict[str, Any]:
    return {"queue": call.service.queue()}


def submit(call: Call) -> Answer:
    who = call.who
    assert who is not None
    said = checked(call, from_json(queued.Submission, without_nulls(call.body)))
    return Answer(enlisted(call, said, who), 201)


def without_nulls(body: dict[str, Any]) -> dict[str, Any]:
    return {key: whole(value) for key, value in body.items() if value is not None}


def whole(value: Any) -> Any:
    """1.0 is a whole number in JSON."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def checked(call: Call, said: queued.Submission) -> queued.Submission:
    """Refuse what can never run, before it waits for hours."""
    inventory = replace(
        call.service.settings.inventory, source="the service"
    )  # where its file is helps nobody
    hosts = ask.chosen_hosts(inventory, said.include or None, said.exclude or None)
    world = place(hosts, said.world)[-1][1].stop
    ask.Restarts(said.max_restarts, said.restart_delay, said.min_world).check(world)
    for name in (*said.variables, *said.secrets):
        if problem := variable_problem(name):
            raise InputError(f"{name}: {problem}")
    both = said.variables.keys() & said.secrets.keys()
    if both:
        raise InputError(f"{min(both)} is given as a variable and as a secret; leave one")
    for name, value in said.secrets.items():
        if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
            raise InputError(f"{name}: write the value as it is, without quotes")
    if said.after and listing.row(said.after) is None:
        raise InputError(f"after: there is no run {said.after!r}")
    if said.code and not codestore.has(said.code):
        raise Refused(409, "its code is not here", f"PUT it to /api/code/{said.code} first")
    if is_trainer(said.command):
        ask.check_trainer(said.command, "--check-options")
    elif not said.command[0]:
        raise InputError("the command is empty")
    return replace(said, world=world)


def enlisted(call: Call, said: queued.Submission, who: Who) -> dict[str, Any]:
    run = fresh_id(lambda run: listing.row(run) is not None)
    run = queued.add(run, who.name, said)
    call.service.keeper.wake()
    return known(call, listing.row(run))


def have_code(call: Call) -> dict[str, Any]:
    digest = call.path["digest"]
    return {"digest": digest, "have": codestore.has(digest)}


async def put_code(call: Call) -> dict[str, Any]:
    digest = call.path["digest"]
    assert call.incoming is not None
    try:
        with await run_in_threadpool(incoming_file) as file:
            async for piece in call.incoming:
                await run_in_threadpool(file.write, piece)
            await run_in_threadpool(file.seek, 0)
            if not codestore.has(digest):
                await run_in_threadpool(codestore.receive, digest, file)
    except OSError as error:
        raise codestore.not_kept(error) from None
    return {"digest": digest, "have": True}


def incoming_file() -> BinaryIO:
    queued.make_folders(codestore.store())
    return tempfile.TemporaryFile(dir=codestore.store())


# --- Hosts ---------------------------------------------------------------------------------------


def hosts(call: Call) -> dict[str, Any]:
    return {"hosts": call.service.host_rows()}


def preflight(call: Call) -> dict[str, Any] | None:
    return call.service.preflight()


def start_preflight(call: Call) -> Answer:
    if not call.service.start_check():
        raise Refused(409, "the hosts are being checked already", "wait for what it finds")
    return Answer(call.service.preflight(), 202)
