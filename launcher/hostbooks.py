"""What is written for a supervisor that did not live to do so: how each rank ended, and the run."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import time

from launcher.hostdisk import (
    LOCK_S,
    ROOM_BYTES,
    NotPlain,
    lock_file,
    open_plain,
    read_json,
    remove_file,
    remove_leftovers,
    replace_file,
    room_file,
)
from launcher.hostevents import FINAL_EVENTS, EventLog, log_exit, segment_name, segments
from launcher.hostoutput import keep_last
from launcher.hostproc import alive, exit_code, signal_name
from launcher.hostruns import FINAL, is_state, state_in
from launcher.hostword import MAY_BE, TOLD_TO_END, age_of, stop_word

TYPE_CHECKING = False  # a type checker takes it for true; importing `typing` at run time would cost a start
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

EXIT_KEYS = ("state", "exit_code", "signal", "reason", "stopping", "ago")
REPLACED = ("state.json", "plan.json", "stop.json", "again.json")


class Known:
    """What is known of ranks whose supervisor is gone: how processes ended that it did not live to reap, by
    their numbers, and what the ranks told last, by theirs. What was gone `unasked` was not stopped, whoever
    wants that since."""

    def __init__(self, *, unasked: bool = False) -> None:
        self.unasked = unasked
        self.statuses: dict[int, int] = {}
        self.metrics: dict[int, dict[str, Any]] = {}
        self.told_to_end = False  # all of them, by somebody who ends whatever is there

    def end_of(self, rank: dict[str, Any], stopped: bool) -> dict[str, Any] | None:
        """How it ended, if it did so by itself: those that were still there are killed with it."""
        status = self.statuses.get(rank["pid"] or 0)
        if status is None or exit_code(status) == -signal.SIGKILL:
            return None
        why = "stopped" if stopped and status else TOLD_TO_END if self.told_to_end else ""
        reason = rank["reason"] or why
        state = "stopped" if reason else "failed" if status else "succeeded"
        code, name = exit_code(status), signal_name(status)
        return {"state": state, "exit_code": code, "signal": name, "reason": reason, "stopping": None}


def close_books(
    folder: str,
    reason: str,
    left: Sequence[dict[str, Any]] = (),
    unwritten: int = 0,
    known: Known | None = None,
) -> None:
    """Give every rank its final event, and the run its final state, if its supervisor did not live to. `left`
    are processes that could not be ended; `unwritten` lines of the log are lost, MAY_BE if nobody knows."""
    known = known or Known()
    lock = lock_books(folder)
    try:
        unwritten = unwritten or (MAY_BE if is_full(folder) else 0)
        remove_file(room_file(folder))
        remove_leftovers(folder, *REPLACED)
        state = state_in(folder)
        if state is None or not is_state(state) or state["state"] in FINAL or alive(state["hostd"]):
            return  # the last: of a later attempt, which began this moment
        asked = None if known.unasked else stop_word(folder, int(state["attempt"]))
        wanted = asked.get("reason", "stopped") if asked else reason  # on a full disk there is no word
        stopped = wanted == "stopped"
        reason = "stopped" if stopped else reason
        told = final_ranks(folder, int(state["attempt"]))
        for rank in state["ranks"]:
            if rank["rank"] in known.metrics:
                keep_last(rank["metric"], known.metrics[rank["rank"]])
            if rank["state"] in ("waiting", "running"):
                killed = {"state": "stopped", "exit_code": -9, "signal": "SIGKILL", "reason": reason}
                killed["stopping"] = age_of(asked) if asked else None
                killed["ago"] = None if asked else gone_for(state)
                rank["seen"] = max(rank.get("seen") or 0.0, heard_at(state))
                rank.update(told.get(rank["rank"]) or known.end_of(rank, stopped) or killed)
        unwritten = unwritten or int(state.get("unwritten") or 0)
        begun = state["state"] != "starting"
        all_well = begun and all(rank["state"] == "succeeded" for rank in state["ranks"])
        final = "succeeded" if all_well else "stopped" if stopped else "failed"
        state.update(state=final, ended=time.time(), cause=reason, left=list(left), unwritten=unwritten)
        log_ends(folder, state, told)
        replace_file(os.path.join(folder, "state.json"), json.dumps(state).encode())
    finally:
        os.close(lock)


def gone_for(state: dict[str, Any]) -> float:
    """For how many seconds nobody has said that its ranks are there."""
    return max(0.0, time.time() - heard_at(state))


def heard_at(state: dict[str, Any]) -> float:
    """When its supervisor said so last."""
    return float(state.get("updated") or time.time())


def lock_books(folder: str) -> int:
    return lock_file(os.path.join(folder, "lock"), LOCK_S)


def log_last_words(folder: str, attempt: int, words: Iterator[bytes]) -> bool:
    """Write what ranks said that their supervisor did not live to write; whether all of it is."""
    lock = lock_books(folder)
    try:
        state = read_json(os.path.join(folder, "state.json"))
        theirs = state is None or not is_state(state) or int(state["attempt"]) != attempt
        if theirs or state is None or state["state"] in FINAL:
            return True  # somebody else has closed them
        first = next(words, None)
        if first is None:
            return True
        with contextlib.closing(EventLog(folder, attempt)) as log:
            for said in itertools.chain((first,), words):
                log.write(said)
            return log.finish() and not log.lost
    finally:
        os.close(lock)


def is_full(folder: str) -> bool:
    """Whether lines may have waited for room on the disk."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize < ROOM_BYTES


def final_ranks(folder: str, attempt: int) -> dict[int | None, dict[str, Any]]:
    """How the ranks ended whose final event is in the log already; None stands for the host's own."""
    told = {}
    for number, segment in segments(folder):
        if number != attempt:
            continue
        try:
            fd = open_plain(os.path.join(folder, segment_name(attempt, segment)))
        except NotPlain:
            continue
        with os.fdopen(fd, "rb") as f:
            for line in f:
                if line.startswith(FINAL_EVENTS) and line.endswith(b"\n"):
                    event = json.loads(line)
                    told[event["rank"]] = {key: event.get(key) for key in EXIT_KEYS}
    return told


def log_ends(folder: str, state: dict[str, Any], told: dict[int | None, dict[str, Any]]) -> None:
    """The final events that are not in the log yet. Where there is no room, no empty segment is left: it is
    tried again, and again."""
    lacking = [rank for rank in state["ranks"] if rank["rank"] not in told]
    if not lacking and None in told:
        return
    with contextlib.closing(EventLog(folder, int(state["attempt"]))) as log:
        state["segment"] = log.segment
        for rank in lacking:
            log_exit(log, rank["rank"], *(rank.get(key) for key in EXIT_KEYS))
        if None not in told:
            left = [who["pid"] for who in state["left"]]
            more = {"unwritten": state["unwritten"]} if state["unwritten"] else {}
            about = {"state": state["state"], "cause": state["cause"], "left": left}
            log.event("host_finished", rank=None, **about, **more)
        if not log.finish():
            if log.size == 0:
                remove_file(os.path.join(folder, segment_name(log.attempt, log.segment)))
            raise OSError(log.unsaved, log.problem)
