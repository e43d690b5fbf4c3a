"""`ringctl logs`: the merged log on a terminal, into a pipe, or as JSON."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from launcher import fold, render, text, watch
from launcher.agent import Agent
from launcher.diagnose import Tails
from launcher.errors import HostError, InputError
from launcher.follow import follow, newly_lost, presence
from launcher.logs import Filter, fold_repeats, line_writer, visible
from launcher.model import Event
from launcher.runs import Found


@dataclass(frozen=True)
class Look:
    """How the log is shown."""

    as_json: bool
    prefix: bool
    timestamps: bool
    tail: int | None


def show(
    found: Found, agents: Mapping[str, Agent], wanted: Filter, look: Look, *, live: bool, back: int
) -> int:
    """Print the run's events until its end (`live`) or as far as they go; then how it ended, if it has.
    The exit code tells whether a host's part is missing."""
    gc.disable()  # events hold no cycles; looking for some in a million of them costs a quarter of the time
    write, tails = writer(look), Tails()
    state = fold.before(found.state) if found.state else None
    kept: deque[Event] | None = None if look.tail is None else deque(maxlen=look.tail)
    away: Mapping[str, str] = {}
    gone: Mapping[str, str] = {}
    unheard: Mapping[str, str] = {}
    for update in follow(agents, found.run, live=live, back=back):
        for words in (*presence(away, update.away), *newly_lost(gone, update.lost)):
            print(words, file=sys.stderr)
        away, gone, unheard = update.away, update.lost, update.unheard
        for event in update.events:
            if event.kind != "line" and state is not None:
                state = fold.fold(state, event)
            tails.add(event)
        events = wanted.apply(update.events)
        if kept is not None:
            kept.extend(events if look.as_json else [event for event in events if event.kind == "line"])
            if not update.caught_up:
                continue
            events, kept = list(kept), None
        write(events)
    if kept:
        write(list(kept))
    lost = live or (found.state is not None and found.state.state == "lost")
    if state is not None and (lost or state.state in fold.ENDED):
        outcome = watch.outcome(state, tails, unheard)
        if live and not back:
            outcome.note()
        finish(outcome, look)
    return HostError.exit_code if unheard else 0


def download(found: Found, agents: Mapping[str, Agent], target: Path, *, back: int) -> int:
    """Write DIR/<run>/: events.jsonl in merged order, and what each rank wrote, byte for byte."""
    folder = target / found.run
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise InputError(f"{folder} is there already; name another folder") from None
    files: dict[str, BinaryIO] = {}
    away: Mapping[str, str] = {}
    with contextlib.ExitStack() as stack:

        def file(name: str) -> BinaryIO:
            if name not in files:
                files[name] = stack.enter_context(open(folder / name, "wb"))
            return files[name]

        for update in follow(agents, found.run, live=False, back=back):
            away = update.unheard
            for event in update.events:
                file("events.jsonl").write(text.json_line(event.to_json()).encode() + b"\n")
                if event.kind == "line":
                    data = event.data["text"] + event.data.get("end", "\n")
                    name = f"rank{event.rank}.{event.data['stream']}.log"
                    file(name).write(data.encode("utf-8", "surrogateescape"))
    for reason in away.values():
        print(f"error: {reason}; its part is missing", file=sys.stderr)
    print(f"{len(files)} files in {folder}")
    return HostError.exit_code if away else 0


def writer(look: Look) -> Callable[[list[Event]], None]:
    if look.as_json:
        return write_json
    if render.is_terminal():
        return terminal_writer(look)
    lines = line_writer(look.prefix, look.timestamps)
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
