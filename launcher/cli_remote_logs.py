"""The log of a run, by a service: shown, followed, downloaded as `ringctl logs` does it without one."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.cli_shared import (
    chosen_refused,
    json_option,
    log_options,
    server_url,
    service_hosts,
    web_option,
)
from launcher.client import Client, client_for
from launcher.errors import HostError, InputError
from launcher.fold import EXIT_CODES
from launcher.model import Event

if TYPE_CHECKING:
    from launcher.logs import Filter
    from launcher.showlogs import Look

OVER = ("succeeded", "failed", "stopped", "lost", "cancelled")
AGAIN_S = 1.0  # before a stream that broke is opened again
GIVE_UP_S = 60.0  # and for how long that is tried
AT_ONCE = 5000  # lines


@click.command()
@click.argument("run", required=False)
@service_hosts
@chosen_refused
@log_options
@web_option
@json_option
def logs(
    run: str | None,
    follow: bool,
    tail: int | None,
    timestamps: bool,
    prefix: bool,
    previous: bool,
    download: str | None,
    web: bool,
    as_json: bool,
    **about: Any,
) -> int:
    """The merged log of a run of the service.

    Into a pipe it is exactly what the ranks wrote, each line behind its label; what ringctl itself has
    to say, such as the first failure, goes to stderr.
    """
    from launcher import logs, showlogs
    from launcher.webpage import open_page

    there = client_for(server_url())
    wanted = logs.filter_of(**about, now=time.time())
    row = there.find(run)
    if web:
        return open_page(f"{there.url}/#/runs/{row['run']}?tab=log")
    refuse_absent(row, wanted, previous)
    attempt = previous_attempt(there, row) if previous else 0
    if download is not None:
        return save(there, row, Path(download), attempt)
    look = showlogs.Look(as_json=as_json, prefix=prefix, timestamps=timestamps, tail=tail)
    if follow and not previous:
        return follow_run(there, row["run"], look=look, wanted=wanted, since=row["attempt"])
    show(there, row["run"], wanted, look, attempt or row["attempt"])
    if row["state"] in OVER and not previous:
        ended(there, row["run"], as_json)
    return 0


def refuse_absent(row: Mapping[str, Any], wanted: Filter, previous: bool) -> None:
    """Ranks and hosts that this run does not have."""
    from launcher.logs import visible

    if previous or row["state"] == "queued":
        return
    absent = sorted(rank for rank in wanted.ranks or () if row["world"] and rank >= row["world"])
    if absent:
        raise InputError(f"--rank {absent[0]}: run {row['run']} has ranks 0 to {row['world'] - 1}")
    for host in sorted(wanted.hosts or ()):
        if host not in row["hosts"]:
            known = visible(", ".join(row["hosts"]))
            raise InputError(f"--host {host}: not a host of run {row['run']}, which has {known}")


def previous_attempt(there: Client, row: Mapping[str, Any]) -> int:
    """The one before the newest that has come to something."""
    told = there.get(there.run(row["run"]))["attempts"]
    before = [each["attempt"] for each in told if each["attempt"] < row["attempt"]]
    if not before:
        raise InputError(f"run {row['run']} has no earlier attempt that was recorded")
    return int(max(before))


# --- As far as it goes ---------------------------------------------------------------------------


Page = tuple[int, list[Event]]  # what was looked through ends with this event


def show(there: Client, run: str, wanted: Filter, look: Look, attempt: int) -> int:
    """Print one attempt; what comes after this event was not looked at."""
    from launcher import showlogs

    write = showlogs.writer(look)
    pages = all_events(there, run) if look.as_json else all_lines(there, run, wanted, look.tail)
    kept: deque[Event] | None = None if look.tail is None else deque(maxlen=look.tail)
    last = 0
    for last, page in pages:  # noqa: B007 - the last one is told
        events = wanted.apply([event for event in page if event.attempt == attempt])
        if kept is None:
            write(events)
        else:
            kept.extend(events)
    if kept:
        write(list(kept))
    return last


def all_events(there: Client, run: str, after: int = 0) -> Iterator[Page]:
    """All that was recorded, page by page."""
    more = True
    while more:
        page = there.get(there.run(run, "/events"), after=after, limit=AT_ONCE)
        more, after = page["more"], page["last"]
        yield after, checked(there, (event_of(each) for each in page["events"]))


def checked(there: Client, told: Iterable[Event]) -> list[Event]:
    """What becomes names of files and counts for a rank's is what it should be, whatever a service tells."""
    from launcher.told import check_events

    try:
        events = list(told)
        if events:
            check_events(events)
    except (TypeError, KeyError, ValueError):
        raise HostError(there.url, "it tells of events that are none") from None
    return events


def event_of(told: dict[str, Any]) -> Event:
    data = {key: value for key, value in told.items() if key not in {"id", *Event._fields}}
    head = {key: told[key] for key in ("kind", "time", "run", "attempt", "host", "rank")}
    return Event(**head, data=data)


def all_lines(there: Client, run: str, wanted: Filter, tail: int | None) -> Iterator[Page]:
    """Lines alone, in order; no more of the beginning than is needed."""
    path = there.run(run, "/log")
    given = {"rank": only(wanted.ranks), "host": only(wanted.hosts)}
    after, more = first_needed(there, path, given, wanted, tail), True
    while more:
        page = there.get(path, after=after, limit=AT_ONCE, **given)
        more, after = page["more"], max(after, page["last"] or 0)
        yield after, checked(there, (line_event(run, line) for line in page["lines"]))


def only(some: frozenset[Any] | None) -> Any:
    """For the service, which filters by one of them; several are chosen here."""
    return next(iter(some)) if some is not None and len(some) == 1 else None


def first_needed(there: Client, path: str, given: Mapping[str, Any], wanted: Filter, tail: int | None) -> int:
    """What is before this event is not shown: it is too long ago, or more than the last lines."""
    if wanted.since is None and (tail is None or wanted.grep is not None or several(wanted)):
        return 0
    limit = AT_ONCE if tail is None or wanted.since is not None else min(max(tail, 1), AT_ONCE)
    before, count = None, 0
    while True:
        page = there.get(path, before=before, limit=limit, **given)
        before, count = page["first"] or 0, count + len(page["lines"])
        early = wanted.since is not None and any(line[1] < wanted.since for line in page["lines"])
        if not page["more"] or early or (tail is not None and wanted.since is None and count >= tail):
            return max(0, before - 1)


def several(wanted: Filter) -> bool:
    """Whether the service cannot choose the lines by itself."""
    return any(some is not None and len(some) != 1 for some in (wanted.ranks, wanted.hosts))


def line_event(run: str, line: Sequence[Any]) -> Event:
    _, when, attempt, host, rank, stream, text = line
    return Event("line", when, run, attempt, host, rank, {"stream": stream, "text": text})


def save(there: Client, row: Mapping[str, Any], target: Path, attempt: int) -> int:
    """Write DIR/<run>/."""
    from launcher import showlogs

    folder = showlogs.new_folder(target / row["run"])
    wanted = attempt or row["attempt"]
    pages = ([e for e in page if e.attempt == wanted] for _, page in all_events(there, row["run"]))
    print(f"{showlogs.write_files(pages, folder)} files in {folder}")
    return 0


# --- To its end ----------------------------------------------------------------------------------


def follow_run(
    there: Client,
    run: str,
    *,
    as_json: bool = False,
    look: Look | None = None,
    wanted: Filter | None = None,
    since: int = 1,
) -> int:
    """What comes, from the attempt `since` to the run's end; a connection that breaks goes on where it was.
    The exit code."""
    from launcher import logs, showlogs

    look = look or showlogs.Look(as_json=as_json, prefix=True, timestamps=False, tail=None)
    wanted = wanted or logs.EVERYTHING
    follower = Follower(there, run, look, wanted, since)
    if look.tail is not None:
        follower.after = show(there, run, wanted, look, since)
    until = 0.0
    while True:
        try:
            for name, number, data in there.stream(there.run(run, "/stream"), follower.after):
                until = 0.0
                follower.take(name, number, data)
                if name == "end":
                    return ended(there, run, look.as_json)
        except HostError as error:
            until = until or time.monotonic() + GIVE_UP_S
            if time.monotonic() > until:
                raise
            click.echo(f"{error.message}; trying again", err=True)
        time.sleep(AGAIN_S)
        there.renew()


class Follower:
    """What has been shown of a run so far."""

    def __init__(self, there: Client, run: str, look: Look, wanted: Filter, since: int) -> None:
        from launcher import showlogs

        self.there, self.run, self.look, self.wanted, self.since = there, run, look, wanted, since
        self.after = 0
        self._write = showlogs.writer(replace(look, tail=None))
        self._why = ""

    def take(self, name: str, number: int, data: Any) -> None:
        if self.look.as_json:  # all kinds of events, of which a stream tells but two
            for last, page in all_events(self.there, self.run, self.after):
                self._show(page)
                self.after = last
        elif name == "run":
            self._say_why(data)
        elif name == "lines":
            new = (line_event(self.run, line) for line in data if line[0] > self.after)
            self._show(checked(self.there, new))
            self.after = max(self.after, number)

    def _show(self, events: list[Event]) -> None:
        self._write(self.wanted.apply([event for event in events if event.attempt >= self.since]))

    def _say_why(self, row: Mapping[str, Any]) -> None:
        """Why it waits, once for each reason."""
        from launcher.logs import visible

        if row["state"] == "queued" and row["waiting"] != self._why:
            self._why = row["waiting"]
            click.echo(visible(f"{self.run}: {self._why}"), err=True)


def attached(there: Client, run: str, *, as_json: bool, since: int = 1) -> int:
    """The same for whoever has started the run: Ctrl-C stops it, as it does without a service."""
    try:
        return follow_run(there, run, as_json=as_json, since=since)
    except KeyboardInterrupt:
        again = "Ctrl-C again leaves that to the service"
        click.echo(f"stopping run {run}; {again}", err=True)
    with contextlib.suppress(KeyboardInterrupt):
        there.post(there.run(run, "/stop"))
        wait_for_end(there, run)
        ended(there, run, as_json)
    return 130


def ended(there: Client, run: str, as_json: bool) -> int:
    from launcher import text

    found = there.get(there.run(run))
    cause = found["cause"] or {}
    if as_json:
        about = {"kind": "run_finished", "run": run, "state": found["state"], "attempt": found["attempt"]}
        why = {"cause": cause.get("text"), "fix": cause.get("fix")}
        result = {key: found[key] for key in ("accuracy", "parameters_sha256")}
        click.echo(text.json_line({**about, "exit_code": exit_code(found["state"]), **why, **result}))
    else:
        tell_end(found)
    return exit_code(found["state"])


def exit_code(state: str) -> int:
    return 130 if state == "cancelled" else {str(key): code for key, code in EXIT_CODES.items()}.get(state, 1)


def tell_end(found: Mapping[str, Any]) -> None:
    """How a run ended, and why; also one that never started."""
    from launcher.logs import visible

    fix = (found["cause"] or {}).get("fix") or found["fix"]
    if found["error"]:
        click.echo(visible(found["error"]), err=True)
        for number, line in enumerate(fix.splitlines()):
            click.echo(visible(f"  {'to do: ' if number == 0 else ''}{line}"), err=True)
    click.echo(visible(f"run {found['run']} {found['state']}"), err=True)


def wait_for_end(there: Client, run: str) -> dict[str, Any]:
    """Its row, once it is over."""
    until = 0.0
    while True:
        try:
            row = there.get(there.run(run))
            until = 0.0
            if row["state"] in OVER and not row["watched"]:
                return dict(row)
        except HostError:
            until = until or time.monotonic() + GIVE_UP_S
            if time.monotonic() > until:
                raise
        time.sleep(AGAIN_S)
        there.renew()
