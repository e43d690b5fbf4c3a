"""The log of a run, by a service: shown, followed, downloaded as `ringctl logs` does it without one."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
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
from launcher.client import Client, Nonsense, client_for
from launcher.errors import HostError, InputError
from launcher.fold import EXIT_CODES
from launcher.model import Event

if TYPE_CHECKING:
    from launcher.logs import Filter
    from launcher.model import RunState
    from launcher.render import RunScreen
    from launcher.showlogs import Look
    from launcher.watch import Outcome

OVER = ("succeeded", "failed", "stopped", "lost", "cancelled")
AGAIN_S = 1.0  # before a stream that broke is opened again
GIVE_UP_S = 60.0  # and for how long that is tried
AT_ONCE = 5000  # lines
SETTLE_S = 2.0  # so long the log of a run that has just ended is waited for to be recorded whole


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
        follow_run(there, row["run"], look=look, wanted=wanted, since=row["attempt"])
        return HostError.exit_code if gaps(there, row["run"], lambda each: each >= row["attempt"]) else 0
    shown = attempt or row["attempt"]
    missing = settled_gaps(there, row["run"], between(shown, row))
    show(there, row["run"], wanted, look, shown)
    tell_last(there, row["run"], showlogs.note, lambda each: each == shown)
    if previous:
        showlogs.finish(outcome_of(there, row, attempt), look)
    elif row["state"] in (*OVER, "queued"):
        tell_end(there, row["run"], as_json)
    return tell_gaps(missing, showlogs.note)


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
    """The one before the newest that has come to something: a number that no host knows belongs to one that
    did not start."""
    if row["attempt"] == 1:
        raise InputError(f"run {row['run']} is in its first attempt; there is none before it")
    told = there.get(there.run(row["run"]))["attempts"]
    begun = [each["attempt"] for each in told if each["started"] is not None]
    before = [attempt for attempt in begun if attempt < row["attempt"]]
    if not before:
        raise InputError(f"run {row['run']} has no earlier attempt that was recorded")
    return int(max(before))


def outcome_of(there: Client, row: Mapping[str, Any], attempt: int) -> Outcome:
    """How an attempt before the newest ended, of which there is no more than was recorded."""
    from launcher import fold, retold
    from launcher.model import RunState

    state = RunState(row["run"], row["name"], attempt, 0, "starting", {})
    for page in all_events(there, row["run"], upto=newest(there, row["run"])):
        for event in page.events:
            if event.attempt == attempt and event.kind != "line":
                state = fold.fold(fold.with_rank(state, event), event)
    told = there.get(there.run(row["run"]))["attempts"]
    ended = next(each for each in told if each["attempt"] == attempt)
    return there.understood(lambda: retold.with_cause(replace(state, state=ended["state"]), ended["cause"]))


# --- As far as it goes ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Page:
    """Some of what was recorded."""

    last: int  # what was looked through ends with this event
    events: Sequence[Event]
    numbers: Sequence[int]  # of these events

    def to_end_of(self, attempt: int) -> Page:
        """Up to where a later one begins, if it does here."""
        for n, event in enumerate(self.events):
            if event.attempt > attempt:
                return Page(self.numbers[n] - 1, self.events[:n], self.numbers[:n])
        return self


def show(there: Client, run: str, wanted: Filter, look: Look, attempt: int, *, late: bool = True) -> int:
    """Print one attempt; what comes after this event was not looked at. `late`: also what was recorded of it
    after a later one had begun."""
    from launcher import showlogs

    write = showlogs.writer(look)
    if look.as_json:
        pages = all_events(there, run, upto=newest(there, run))
    else:
        pages = all_lines(there, run, wanted, look.tail, attempt)
    kept: deque[Event] | None = None if look.tail is None else deque(maxlen=look.tail)
    last = 0
    for page in pages:
        part = page if late else page.to_end_of(attempt)
        last = part.last
        events = wanted.apply([event for event in part.events if event.attempt == attempt])
        if kept is None:
            write(events)
        else:
            kept.extend(events)
        if part is not page:
            break
    if kept:
        write(list(kept))
    return last


def newest(there: Client, run: str) -> int:
    """The last event that is recorded by now: whoever shows a log as far as it goes ends with the page that
    has it, for a run that goes on may say more in the meantime than can be read."""
    page = there.get(there.run(run, "/log"), limit=1)
    return there.understood(lambda: int(page["last"] or 0))


def all_events(
    there: Client, run: str, after: int = 0, kind: str | None = None, upto: int = sys.maxsize
) -> Iterator[Page]:
    """All that was recorded, or all of one kind, page by page."""
    more = True
    while more and after < upto:
        page = there.get(there.run(run, "/events"), after=after, limit=AT_ONCE, kind=kind)
        more, after = page["more"], page["last"]
        events = checked(there, (event_of(each) for each in page["events"]))
        yield Page(after, events, numbers(there, "id", page["events"]))


def tell_last(
    there: Client, run: str, note: Callable[[str], None], wanted: Callable[[int], bool], after: int = 0
) -> int:
    """What hosts have said last, after this event, in attempts that are `wanted`: which lines are lost, which
    processes are left. Until which event was looked."""
    from launcher.lastword import LAST, said_last
    from launcher.logs import visible

    for page in all_events(there, run, after, LAST):
        after = page.last
        for words in said_last(event for event in page.events if wanted(event.attempt)):
            note(visible(words))
    return after


def gaps(there: Client, run: str, wanted: Callable[[int], bool] = lambda _: True) -> dict[int, str]:
    """What to say of each attempt that is `wanted` and over, and not recorded whole."""
    from launcher.lastword import lacking

    detail = there.get(there.run(run))
    found = there.understood(lambda: lacking(detail))
    return {attempt: words for attempt, words in found.items() if wanted(attempt)}


def settled_gaps(there: Client, run: str, wanted: Callable[[int], bool] = lambda _: True) -> dict[int, str]:
    """The same, for whoever is about to read the log: what is recorded after that may be missed. If it is
    being recorded at this moment, that is waited for, but not for long."""
    from launcher.lastword import to_do

    until = time.monotonic() + SETTLE_S
    while to_do((found := gaps(there, run, wanted)).values()) and time.monotonic() < until:
        time.sleep(AGAIN_S / 10)
    return found


def between(shown: int, row: Mapping[str, Any]) -> Callable[[int], bool]:
    """The attempt that is shown, and those between it and the newest, of which nothing may be known."""
    return lambda each: each == shown or shown < each < row["attempt"]


def tell_gaps(found: Mapping[int, str], note: Callable[[str], None]) -> int:
    """The exit code, as without a service."""
    from launcher.lastword import to_do

    for words in (
        *(f"attempt {attempt}: {words}" for attempt, words in found.items()),
        *to_do(found.values()),
    ):
        note(words)
    return HostError.exit_code if found else 0


def checked(there: Client, told: Iterable[Event]) -> list[Event]:
    """What becomes names of files and counts for a rank's is what it should be, whatever a service tells."""
    from launcher.follow import NOT_AS_AGREED
    from launcher.told import check_events

    try:
        events = list(told)
        if events:
            check_events(events)
    except NOT_AS_AGREED:
        raise Nonsense(there.url, "it tells of events that are none") from None
    return events


def numbers(there: Client, key: str | int, told: Sequence[Any]) -> list[int]:
    """Which each of the events has."""
    return there.understood(lambda: [int(each[key]) for each in told])


def event_of(told: dict[str, Any]) -> Event:
    rest = {key: value for key, value in told.items() if key not in {"id", *Event._fields}}
    whole = told.get("data")  # the record itself, where it has names that are taken
    data = whole if isinstance(whole, dict) else rest
    head = {key: told[key] for key in ("kind", "time", "run", "attempt", "host", "rank")}
    return Event(**head, data=data)


def all_lines(there: Client, run: str, wanted: Filter, tail: int | None, attempt: int) -> Iterator[Page]:
    """Lines alone, in order; no more of the beginning than is needed for this attempt."""
    path = there.run(run, "/log")
    since = None if wanted.since is None else max(0, int(wanted.since))
    given = {"rank": only(wanted.ranks), "host": only(wanted.hosts), "since": since}
    after, more = first_needed(there, path, given, wanted, tail, attempt), True
    upto = newest(there, run)  # not before, or those that are needed might come after it
    while more and after < upto:
        page = there.get(path, after=after, limit=AT_ONCE, **given)
        more, after = page["more"], max(after, page["last"] or 0)
        events = checked(there, (line_event(run, line) for line in page["lines"]))
        yield Page(after, events, numbers(there, 0, page["lines"]))


def only(some: frozenset[Any] | None) -> Any:
    """For the service, which filters by one of them; several are chosen here."""
    return next(iter(some)) if some is not None and len(some) == 1 else None


def first_needed(
    there: Client, path: str, given: Mapping[str, Any], wanted: Filter, tail: int | None, attempt: int
) -> int:
    """What is before this event is not shown: it is more than the attempt's last lines."""
    if tail is None or wanted.grep is not None or several(wanted):
        return 0
    few = max(tail, 1)  # also for none: whoever follows gets all of an attempt that has begun after its last
    limit, before, count = min(few, AT_ONCE), None, 0
    while True:
        page = there.get(path, before=before, limit=limit, **given)
        before, count = page["first"] or 0, count + sum(line[2] == attempt for line in page["lines"])
        if not page["more"] or count >= few:
            return max(0, before - 1)
        limit = AT_ONCE  # those of a later attempt may be many


def several(wanted: Filter) -> bool:
    """Whether the service cannot choose the lines by itself."""
    return any(some is not None and len(some) != 1 for some in (wanted.ranks, wanted.hosts))


def line_event(run: str, line: Sequence[Any]) -> Event:
    _, when, attempt, host, rank, stream, text = line
    return Event("line", when, run, attempt, host, rank, {"stream": stream, "text": text})


def save(there: Client, row: Mapping[str, Any], target: Path, attempt: int) -> int:
    """Write DIR/<run>/."""
    from launcher import showlogs

    wanted = attempt or row["attempt"]
    missing = settled_gaps(there, row["run"], between(wanted, row))
    upto = newest(there, row["run"])
    events = (page.events for page in all_events(there, row["run"], upto=upto))
    pages = ([event for event in some if event.attempt == wanted] for some in events)
    with showlogs.new_folder(target / row["run"]) as folder:
        files = showlogs.write_files(pages, folder)
    code = tell_gaps(missing, showlogs.note)
    print(f"{files} files in {folder}")
    return code


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
        follower.after = show(there, run, wanted, look, since, late=False)
    return follow_on(follower)


def follow_on(follower: Follower) -> int:
    """From where it is."""
    there, run = follower.there, follower.run
    until = 0.0
    while True:
        try:
            for name, number, data in there.stream(there.run(run, "/stream"), follower.after):
                until = 0.0
                follower.take(name, number, data)
                if name == "end":
                    follower.tell_last()
                    follower.tell_gaps()
                if name == "end" and follower.screen is not None:
                    return exit_code(follower.state.state if follower.state else "")
                if name == "end":
                    return tell_end(there, run, follower.look.as_json)
        except Nonsense:
            raise
        except HostError as error:
            until = until or time.monotonic() + GIVE_UP_S
            if time.monotonic() > until:
                raise
            click.echo(f"{error.message}; trying again", err=True)
        time.sleep(AGAIN_S)
        there.renew()


class Follower:
    """What has been shown of a run so far. Where there is a `screen`, how it ended is for the caller to tell.
    What a piece of it is shown in is `whole`: nobody leaves that in the middle and comes back."""

    def __init__(
        self,
        there: Client,
        run: str,
        look: Look,
        wanted: Filter,
        since: int,
        screen: RunScreen | None = None,
        whole: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        from launcher import showlogs

        self.there, self.run, self.look, self.wanted, self.since = there, run, look, wanted, since
        self.after = 0
        self.state: RunState | None = None  # as the service last told it
        self.screen, self._whole = screen, whole
        self._write = showlogs.writer(replace(look, tail=None))
        self._note = showlogs.note if screen is None else screen.note
        self._why = ""
        self._attempt = 0  # that it was last told to be in
        self._told = 0  # what hosts have said last is told up to this event
        self._planned = 0  # the attempt whose plan was shown

    def take(self, name: str, number: int, data: Any) -> None:
        if name == "run":
            self._say_how(data)
            before, self._attempt = self._attempt, self.there.understood(lambda: int(data["attempt"]))
            if self._attempt > before > 0:
                self.tell_last()
        if self.look.as_json:  # all kinds of events, of which a stream tells but two
            for page in all_events(self.there, self.run, self.after):
                self._show(page.events, page.last)
        elif name == "lines":
            new = (line_event(self.run, line) for line in data if line[0] > self.after)
            self._show(checked(self.there, new), max(self.after, number))

    def tell_last(self) -> None:
        """Lines that are lost: a stream has none of what tells of them."""
        self._told = tell_last(self.there, self.run, self._note, self._is_shown, self._told)

    def tell_gaps(self) -> None:
        tell_gaps(gaps(self.there, self.run, self._is_shown), self._note)

    def _is_shown(self, attempt: int) -> bool:
        return attempt >= self.since

    def _show(self, new: Sequence[Event], upto: int) -> None:
        events = self.wanted.apply([event for event in new if self._is_shown(event.attempt)])
        if self.screen is not None and events:
            self._show_plan(self.screen, max(event.attempt for event in events))
        with self._whole():
            self.after = upto
            if self.screen is None:
                self._write(events)
            elif events and self.state is not None:
                self.screen.show(events, self.state)

    def _say_how(self, row: Mapping[str, Any]) -> None:
        """Why it waits, once for each reason; on a screen, how far it is."""
        from launcher import retold
        from launcher.logs import visible

        if row["state"] == "queued" and row["waiting"] != self._why:
            self._why = row["waiting"]
            click.echo(visible(f"{self.run}: {self._why}"), err=True)
        if self.screen is not None:
            self.state = self.there.understood(lambda: retold.state_of(row, time.time()))
            if row["state"] != "queued" and row["attempt"] >= self.since:
                self._show_plan(self.screen, row["attempt"])
            with self._whole():
                self.screen.show([], self.state)

    def _show_plan(self, screen: RunScreen, attempt: int) -> None:
        """Once for each attempt, before its first line; a stream leaves it out, for it is large."""
        from launcher import retold

        if attempt <= self._planned:
            return
        detail = self.there.get(self.there.run(self.run))
        self.state = self.there.understood(lambda: retold.state_of(detail, time.time()))
        plan = self.there.understood(lambda: retold.plan_of(detail))
        if plan is not None:
            with self._whole():
                self._planned = plan.attempt
                screen.plan(plan)


def attached(there: Client, run: str, *, as_json: bool, since: int = 1) -> int:
    """The same for whoever has started the run, on the screen of a launch: Ctrl-C stops it, as it does
    without a service."""
    from launcher import logs, render, showlogs
    from launcher.output import Interrupted, Output

    interrupted = Interrupted()
    output = Output(interrupted)
    screen = render.screen_for(as_json, output)
    look = showlogs.Look(as_json=as_json, prefix=True, timestamps=False, tail=None)
    follower = Follower(there, run, look, logs.EVERYTHING, since, screen, interrupted.held)
    with interrupted:
        try:
            with screen:
                code = follow_on(follower)
        except KeyboardInterrupt:
            output.hint(f"stopping run {run}; Ctrl-C again leaves that to the service")
        else:
            return finished(there, run, screen, code)
        with contextlib.suppress(KeyboardInterrupt):
            there.post(there.run(run, "/stop"))
            with screen:
                follow_on(follower)  # what the ranks say while they end
            finished(there, run, screen, 130)
    return 130


def finished(there: Client, run: str, screen: RunScreen, code: int) -> int:
    """How it ended, as a launch tells it; one that never started has no more than a reason."""
    from launcher import render, retold, showlogs

    detail = there.get(there.run(run))
    if detail["plan"] is None:
        showlogs.tell_end(detail, as_json=isinstance(screen, render.JsonScreen))
    else:
        screen.finish(there.understood(lambda: retold.outcome_of(detail, time.time())))
    return code


def tell_end(there: Client, run: str, as_json: bool) -> int:
    """How it ended, as `logs` tells it; the exit code."""
    from launcher import showlogs

    detail = there.get(there.run(run))
    there.understood(lambda: showlogs.tell_end(detail, as_json=as_json))
    return exit_code(detail["state"])


def exit_code(state: str) -> int:
    return EXIT_CODES.get(state, 1)


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
