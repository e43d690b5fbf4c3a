"""`ringctl logs`: the merged log on a terminal, into a pipe, or as JSON."""

from __future__ import annotations

import contextlib
import errno
import gc
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher import fold, history, render, retold, text, watch, watching
from launcher.agent import Agent
from launcher.diagnose import Cause, Tails
from launcher.errors import HostError, InputError, RingctlError
from launcher.fetch import NotHere, writing
from launcher.follow import Place, Update, first, follow, newly_lost, presence
from launcher.lastword import said_last
from launcher.logs import Filter, fold_repeats, line_writer, visible
from launcher.model import Event, RunState, from_json
from launcher.ownfolder import closed_to_others
from launcher.rests import Rests
from launcher.runs import Found, found_of

MOST_MISSED = 100  # attempts that are looked for; what a host says of their number may be nonsense
START_S = 15.0  # by then all hosts have started what one of them has
HELD_BYTES = 4 << 20  # of a log that is written to files, before they are opened


@dataclass(frozen=True)
class Look:
    """How the log is shown."""

    as_json: bool
    prefix: bool
    timestamps: bool
    tail: int | None


Latest = Callable[[], tuple[Found, Mapping[str, Agent]]]  # the agents of all hosts it ever was on


def follow_attempts(run: str, latest: Latest, wanted: Filter, look: Look) -> int:
    """Print the run's events until its end, through all attempts that it starts by itself, or somebody by
    hand meanwhile; also through those that were over before anybody looked. What hosts that were away have of
    them is printed once it can be."""
    with contextlib.closing(Rests(run, note)) as rests:
        outcome, code, agents = follow_each(latest, wanted, look, rests)
        write = writer(replace(look, tail=None))
        for events in rests.last(agents):
            write(wanted.apply(events))
        for words in rests.missing():
            print(f"error: {words}", file=sys.stderr)
            code = HostError.exit_code
    if outcome is not None:
        finish(outcome, look)
    return code


def note(words: str) -> None:
    print(visible(words), file=sys.stderr)


def follow_each(
    latest: Latest, wanted: Filter, look: Look, rests: Rests
) -> tuple[watch.Outcome | None, int, Mapping[str, Agent]]:
    """How the last attempt ended, if it has, the exit code, and all hosts that the run was on."""
    shown, outcome, code = 0, None, 0
    while True:
        found, agents = latest()
        begun = as_begun(found)
        newest = begun.attempt if begun else 0
        if outcome is not None and newest <= shown:  # the next one is on no host yet
            if not watching.begins_again(found.run, shown):
                return outcome, code, agents
            time.sleep(0.2)
            continue
        for missed in range(max(shown + 1, newest - MOST_MISSED), newest) if shown else ():
            with contextlib.suppress(RingctlError):  # a number that no host knows: it did not start
                past = show_attempt(found, agents, wanted, look, live=False, attempt=missed, rests=rests)
                rests.add(agents, past.rest, missed, found.rank_hosts_in(missed))
        now = {host.name: agents[host.name] for host in found.hosts}
        its = agents if newest < found.attempt else now  # the next one may be on other hosts than this
        known = known_end(found, newest)
        last = show_attempt(found, its, wanted, look, live=known is None, attempt=newest, rests=rests)
        outcome, code = last.outcome, last.code
        if known is None and (known := known_end(now_known(found), newest)):
            code = HostError.exit_code if last.away else 0  # whoever has not started it has no part of it
        outcome = as_known(outcome, known)
        if known is None and outcome is not None and newest == found.attempt:
            outcome.note()  # else a later one may be elsewhere, too
        if outcome is None:
            return None, code, agents
        shown = outcome.state.attempt
        if not goes_on(outcome.state):
            return outcome, code, agents
        rests.add(its, last.rest, newest, found.rank_hosts_in(newest))
        print(f"attempt {shown} {outcome.state.state}; attempt {shown + 1}:", file=sys.stderr)
        look = replace(look, tail=None)


def as_begun(found: Found) -> RunState | None:
    """What is known of it; as long as no host has said anything, how it was begun here."""
    return found.state or (fold.initial(found.record.plan) if found.record else None)


def goes_on(ended: RunState) -> bool:
    """Wait as long as somebody may start the run again: whether there is a later attempt than this."""
    if ended.state == "succeeded":
        return False
    by_itself = ended.state != "stopped" and watching.begins_again(ended.run, ended.attempt)
    return by_itself or watching.begun_by_hand(ended.run, ended.attempt)


def known_end(found: Found, attempt: int) -> watch.Outcome | None:
    """How the attempt ended, if somebody here has heard that of all its hosts."""
    if found.end is None or found.end.attempt != attempt or found.end.state not in fold.ENDED:
        return None
    cause: Cause | None = None
    with contextlib.suppress(*history.UNREADABLE):  # another version wrote it
        cause = from_json(Cause, found.cause) if found.cause else None
    return watch.Outcome(found.end, cause)


def now_known(found: Found) -> Found:
    """With what somebody here may have heard of the run meanwhile."""
    record = history.read(found.run) if found.from_here else None
    return found_of(record) if record else found


def as_known(outcome: watch.Outcome | None, known: watch.Outcome | None) -> watch.Outcome | None:
    """How an attempt ended, with what was seen of it now. A host that is away by now, has nothing of it any
    more, or never started it, changes nothing about an end that is known."""
    seen_to_end = outcome is not None and known is not None and outcome.state.state == known.state.state
    return outcome if known is None or seen_to_end else known


def previous(found: Found, agents: Mapping[str, Agent]) -> int:
    """The attempt before the newest one; a number that no host knows belongs to one that did not start. One
    that may be on hosts which are away is passed over, which is told."""
    newest = max(found.attempt, newest_of(found)) if found.from_here else newest_of(found) or 1
    passed: list[tuple[int, str]] = []
    for attempt in range(newest - 1, max(0, newest - 1 - MOST_MISSED), -1):
        with contextlib.suppress(RingctlError):
            away: Mapping[str, str] = {}
            places = found.rank_hosts_in(attempt)
            events = follow(agents, found.run, live=False, attempt=attempt, some=True, rank_hosts=places)
            with contextlib.closing(events):
                for update in events:
                    away = update.away
                    if update.events:
                        tell_passed(passed, attempt)
                        return attempt
            passed += [(attempt, why) for why in away.values()]
    raise InputError(f"run {found.run} has no earlier attempt on the hosts that can be asked")


def tell_passed(passed: Iterable[tuple[int, str]], shown: int) -> None:
    """Attempts that come after the one that is shown, and may be on hosts that are away."""
    for attempt, why in passed:
        note(f"attempt {attempt} cannot be looked for: {why}; this is attempt {shown}")


def show(found: Found, agents: Mapping[str, Agent], wanted: Filter, look: Look, *, attempt: int = 0) -> int:
    """Print the run's events as far as they go; then how it ended, if it has."""
    attempt = attempt or newest_of(found)
    shown = show_attempt(found, agents, wanted, look, live=False, attempt=attempt)
    outcome = as_known(shown.outcome, known_end(found, attempt))
    if outcome is not None:
        finish(outcome, look)
    return shown.code


def newest_of(found: Found) -> int:
    """The newest attempt: what a host has of an earlier one is not to be mixed with it."""
    return found.state.attempt if found.state else 0


@dataclass(frozen=True)
class Shown:
    """What came of an attempt whose events were printed."""

    outcome: watch.Outcome | None  # how it ended, if it has
    code: int  # the exit code, which tells whether a host's part is missing
    away: Mapping[str, str]  # hosts that are away, and why
    rest: Mapping[str, Place]  # hosts that have more to tell, or are away, and how far their part was shown


def show_attempt(
    found: Found,
    agents: Mapping[str, Agent],
    wanted: Filter,
    look: Look,
    *,
    live: bool,
    attempt: int = 0,
    rests: Rests | None = None,
) -> Shown:
    """Print one attempt's events until its end (`live`) or as far as they go; and between them what comes of
    attempts before it."""
    gc.disable()  # events hold no cycles; looking for some in a million of them costs a quarter of the time
    write, seen, last = writer(look), Seen(found, attempt), Last(look)
    on_fewer = seen.former or found.is_on_no_other(attempt)
    for update in follow(
        agents,
        found.run,
        live=live,
        attempt=attempt,
        some=on_fewer or known_end(found, attempt) is not None,
        patience=START_S if live and not on_fewer else 0.0,
        rank_hosts=found.rank_hosts_in(attempt),
        after=None if rests is None else {},
    ):
        seen.take(update)
        write(last.of(wanted.apply(update.events), update.caught_up))
        if rests is not None and not last.holds_back and (late := rests.look()):
            write(wanted.apply(late))
        if live and moved_on(seen.state, attempt, seen.latest.away):
            break
    write(last.of([], caught_up=True))
    return seen.shown(live or (found.state is not None and found.state.state == "lost"))


class Seen:
    """What was heard of an attempt: its state, and the last lines of its ranks. Tells who comes and goes."""

    def __init__(self, found: Found, attempt: int) -> None:
        state = as_begun(found)
        state = fold.before(state) if state else None
        self.attempt, self.tails = attempt, Tails()
        self.former = bool(attempt) and (state is None or state.attempt != attempt or attempt < found.attempt)
        if state is not None and self.former:
            state = replace(state, attempt=attempt, ranks={}, world=0)  # it may have had others
        self.state = state
        self.latest = Update([], caught_up=False, away={}, lost={})

    def take(self, update: Update) -> None:
        for words in (*presence(self.latest.away, update.away), *newly_lost(self.latest.lost, update.lost)):
            print(words, file=sys.stderr)
        self.latest = update
        for event in update.events:
            if event.kind != "line" and self.state is not None:
                known = fold.with_rank(self.state, event) if self.former else self.state
                self.state = fold.fold(known, event)
            self.tails.add(event)
        for words in said_last(update.events):
            note(words)

    def shown(self, over: bool) -> Shown:
        """What came of it, where it is `over` though its events may not say so."""
        unheard, outcome = self.latest.unheard, None
        if self.state is not None and (over or self.state.state in fold.ENDED):
            outcome = watch.outcome(self.state, self.tails, unheard)
        more = self.latest.away.keys() | self.latest.open | self.latest.going_on
        rest = {host: self.latest.places.get(host, first(self.attempt)) for host in more}
        return Shown(outcome, HostError.exit_code if unheard else 0, self.latest.away, rest)


class Last:
    """Holds events back until all that had happened is known, if only the last of them are to be shown."""

    def __init__(self, look: Look) -> None:
        self.as_json = look.as_json
        self._kept: deque[Event] | None = None if look.tail is None else deque(maxlen=look.tail)

    @property
    def holds_back(self) -> bool:
        return self._kept is not None

    def of(self, events: list[Event], caught_up: bool) -> list[Event]:
        """Those to be shown now."""
        if self._kept is None:
            return events
        self._kept.extend(events if self.as_json else [event for event in events if event.kind == "line"])
        if not caught_up:
            return []
        kept, self._kept = list(self._kept), None
        return kept


def moved_on(state: RunState | None, attempt: int, away: Mapping[str, str]) -> bool:
    """Whether a later attempt has begun, and only hosts that cannot be heard keep us with this one."""
    if not away or state is None:
        return False
    going_on = {rank.host for rank in state.ranks.values() if rank.state in ("waiting", "running")}
    if not going_on <= away.keys():
        return False
    record = history.read(state.run)
    watched = watching.read(state.run) if watching.is_watched(state.run) else None
    return record is not None and record.plan.attempt > attempt > 0 and not (watched and watched.doing)


def download(found: Found, agents: Mapping[str, Agent], target: Path, *, attempt: int = 0) -> int:
    """Write DIR/<run>/, and tell whose part of it is missing."""
    with new_folder(target / found.run) as folder:
        files, last = save(found, agents, folder, attempt=attempt)
    for words in lacks(last).values():
        print(f"error: {words}", file=sys.stderr)
    print(f"{files} files in {folder}")
    return HostError.exit_code if last.unheard else 0


def lacks(last: Update) -> dict[str, str]:
    """What a log that is over lacks of which host, in a sentence."""
    ends = dict.fromkeys(last.ended_early, "its log is as far as it got")
    return {host: f"{why}; {ends.get(host, 'its part is missing')}" for host, why in last.unheard.items()}


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """One that is ours alone. If this machine cannot take all of what is to be in it, it is not left there
    with a part of it; nor empty, if nothing comes of it."""
    with closed_to_others():
        make_folder(folder)
        try:
            yield folder
        except NotHere:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        except BaseException:
            with contextlib.suppress(OSError):  # there is something in it
                folder.rmdir()
            raise


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise InputError(f"{folder} is there already; name another folder") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NotHere(f"{folder}: {error.strerror}") from None
        raise InputError(f"{folder}: {error.strerror}; name another folder") from None


def save(found: Found, agents: Mapping[str, Agent], folder: Path, *, attempt: int = 0) -> tuple[int, Update]:
    """Write what the hosts have of an attempt: how many files that are, and the last that was heard."""
    last = Update([], caught_up=False, away={}, lost={})

    def pages() -> Iterator[Sequence[Event]]:
        nonlocal last
        asked = attempt or newest_of(found)
        places, some = found.rank_hosts_in(asked), attempt > 0 or found.is_on_no_other(asked)
        for update in follow(agents, found.run, live=False, attempt=asked, some=some, rank_hosts=places):
            last = update
            yield update.events

    return write_files(pages(), folder), last


def write_files(pages: Iterable[Sequence[Event]], folder: Path) -> int:
    """Write events.jsonl in merged order, and what each rank wrote, byte for byte: how many files. What is
    lost of it is told."""
    files = Files(folder)
    try:
        for page in pages:
            for event in page:
                files.add("events.jsonl", text.json_line(event.to_json()).encode() + b"\n")
                if event.kind == "line":
                    data = event.data["text"] + event.data.get("end", "\n")
                    name = f"rank{event.rank}.{event.data['stream']}.log"
                    files.add(name, data.encode("utf-8", "surrogateescape"))
            for words in said_last(page):
                note(words)
    finally:
        files.write()
    return len(files.names)


class Files:
    """New files in a folder, which grow side by side. One is open at a time: a run may have more ranks, with
    two files each, than a process may have files open. So that each is not opened for every line, what comes
    is held for a while."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: set[str] = set()
        self._held: dict[str, list[bytes]] = {}
        self._bytes = 0

    def add(self, name: str, data: bytes) -> None:
        self._held.setdefault(name, []).append(data)
        self._bytes += len(data)
        if self._bytes >= HELD_BYTES:
            self.write()

    def write(self) -> None:
        """What is held. Of what this machine cannot take, the rest is not tried again."""
        held, self._held, self._bytes = self._held, {}, 0
        self.names |= held.keys()
        with writing(self.folder):
            for name, pieces in held.items():
                with open(self.folder / name, "ab") as file:
                    file.writelines(pieces)


def writer(look: Look) -> Callable[[list[Event]], None]:
    if look.as_json:
        return write_json
    if render.is_terminal():
        return terminal_writer(look)
    lines = line_writer(look.prefix, look.timestamps, obeyed=sys.stdout.isatty())
    return lambda events: render.write_out(lines(events)) if events else None


def write_json(events: list[Event]) -> None:
    render.write_out("".join(text.json_line(event.to_json()) + "\n" for event in events).encode())


def terminal_writer(look: Look) -> Callable[[list[Event]], None]:
    console = render.console()

    def write(events: list[Event]) -> None:
        groups = fold_repeats([event for event in events if event.kind == "line"])
        if groups:
            render.print_groups(console, groups, look.timestamps, look.prefix)

    return write


def finish(outcome: watch.Outcome, look: Look) -> None:
    """How the run ended: the last JSON event, or a word on stderr so that a pipe holds only the log."""
    if look.as_json:
        write_json([outcome.event()])
    else:
        for line in (*text.cause_lines(outcome), text.verdict(outcome)):
            print(visible(line), file=sys.stderr)


def tell_end(detail: Mapping[str, Any], *, as_json: bool) -> None:
    """How a run ended that the history or a service tells of, also one that never started. Of one that still
    waits, why."""
    outcome = retold.outcome_of(detail, time.time())
    if not as_json:
        for line in retold.unstarted_lines(detail):
            print(visible(line), file=sys.stderr)
    if detail["state"] != "queued":
        finish(outcome, Look(as_json=as_json, prefix=True, timestamps=False, tail=None))
