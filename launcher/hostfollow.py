"""`follow`: sends a run's events from a cursor on, raw, until the run is over."""

from __future__ import annotations

import os
import sys
import time

from launcher.hostanswer import Refused, note
from launcher.hostdisk import READ_BYTES, NotPlain, open_plain, read_json, write_all
from launcher.hostevents import FINAL_EVENTS, segment_name, segments
from launcher.hostruns import FINAL, read_state, run_folder

TYPE_CHECKING = False  # a type checker takes it for true; importing `typing` at run time would cost a start
if TYPE_CHECKING:
    from typing import Any

LAST_BYTES = 64 << 10  # of a log, in which its end is looked for
NOT_STARTED = "was not started on this host"  # the controller knows these words


def command_follow(request: dict[str, Any]) -> None:
    """Send the run's events from `cursor` on: raw lines, and between them what the reader must know. Without
    `follow`, those that are there by now: ranks may say more in the meantime than can be sent.

    {"kind":"cursor",...} comes before the first line of each piece of a segment, {"kind":"tick"} when
    nothing happens for a second, {"kind":"end"} last."""
    run, follow = str(request["run"]), bool(request.get("follow"))
    folder = run_folder(run)
    attempt, segment, offset = first_cursor(folder, request)
    next_tick = 0.0  # the first tick tells the reader that it has caught up
    note("cursor", attempt=attempt, segment=segment, offset=offset)
    state = read_state(run)  # before its lines are looked for: what is over by then has said its last
    last, size = (sys.maxsize, 0) if follow else end_of_log(folder, attempt)
    while True:
        state = read_state(run) if follow else state
        over = (
            not follow or state is None or state["state"] in FINAL + ("lost",) or state["attempt"] != attempt
        )
        later = segment < last and (attempt, segment + 1) in segments(folder)
        path = os.path.join(folder, segment_name(attempt, segment))
        sent = send_lines(path, offset, size if segment == last else sys.maxsize)
        offset += sent
        if sent:
            next_tick = next_tick and time.monotonic() + 1.0
            continue
        if later:
            segment, offset = segment + 1, 0
            note("cursor", attempt=attempt, segment=segment, offset=offset)
        elif over:
            note("end", state=how_it_ended(folder, state, attempt), attempt=attempt)
            return
        else:
            if time.monotonic() >= next_tick:
                note("tick")
                next_tick = time.monotonic() + 1.0
            time.sleep(0.03)


def end_of_log(folder: str, attempt: int) -> tuple[int, int]:
    """The last segment that an attempt has by now, and how long that is."""
    last = max((segment for number, segment in segments(folder) if number == attempt), default=0)
    try:
        return last, os.stat(os.path.join(folder, segment_name(attempt, last))).st_size
    except FileNotFoundError:
        return last, 0


def how_it_ended(folder: str, state: dict[str, Any] | None, attempt: int) -> str:
    """Of an attempt before the newest, of which there is no state any more, its own log tells no more than
    whether it was left without an end: then it is "lost", and else ""."""
    if state is None or state["attempt"] == attempt:
        return str(state["state"]) if state else "lost"
    return "lost" if state["attempt"] > attempt and not has_end(folder, attempt) else ""


def has_end(folder: str, attempt: int) -> bool:
    """Whether the log of an attempt ends as a supervisor ends it, or whoever does so in its place."""
    for number, segment in reversed(segments(folder)):
        if number == attempt and (last := last_lines(os.path.join(folder, segment_name(attempt, segment)))):
            return any(line.startswith(FINAL_EVENTS) for line in last)
    return False


def last_lines(path: str) -> list[bytes]:
    try:
        fd = open_plain(path)
    except (FileNotFoundError, NotPlain):
        return []
    try:
        size = os.fstat(fd).st_size
        return os.pread(fd, LAST_BYTES, max(0, size - LAST_BYTES)).splitlines()
    finally:
        os.close(fd)


def first_cursor(folder: str, request: dict[str, Any]) -> tuple[int, int, int]:
    """Where to begin: the given cursor, or the beginning of the asked-for (default: newest) attempt."""
    cursor = request.get("cursor")
    if cursor:
        attempt, segment, offset = (int(part) for part in cursor)
        return attempt, segment, offset
    try:
        there = sorted({attempt for attempt, _ in segments(folder)})
    except FileNotFoundError:
        raise Refused(f"there is no run {os.path.basename(folder)} on this host") from None
    if request.get("follow"):
        there = [attempt for attempt in there if attempt <= begun_attempt(folder, there)]
    wanted = int(request.get("attempt") or 0) or (there[-1] if there else 0)
    if wanted not in there:
        which = f"attempt {wanted} of run" if wanted else "run"
        raise Refused(f"{which} {os.path.basename(folder)} {NOT_STARTED}")
    return wanted, 1, 0


def begun_attempt(folder: str, there: list[int]) -> int:
    """The newest attempt that has a state. One that only has a log is about to start: as yet the state is
    that of the attempt before, by which it would be taken for over."""
    path = os.path.join(folder, "state.json")
    state = read_json(path)
    if state is None:
        return there[-1] if there and os.path.exists(path) else 0
    return int(state["attempt"])


def send_lines(path: str, offset: int, before: int) -> int:
    """Send whole lines from `offset` on that end `before` there; how many bytes that were."""
    try:
        fd = open_plain(path)
    except (FileNotFoundError, NotPlain):
        return 0
    try:
        size, data = READ_BYTES, b""
        while True:
            data = os.pread(fd, min(size, max(0, before - offset)), offset)
            end = data.rfind(b"\n") + 1
            if end or len(data) < size:
                break
            size *= 4  # one line longer than what was read
        write_all(1, data[:end])
        return end
    finally:
        os.close(fd)
