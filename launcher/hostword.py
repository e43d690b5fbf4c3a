"""The word that a run is to end: left in its folder by whoever stops it, for all times."""

from __future__ import annotations

import json
import os
import signal
import time

from launcher.hostdisk import LOCK_S, NO_ROOM, ROOM, lock_file, read_json, replace_file, replace_in_room
from launcher.hostruns import is_state, run_folder

TYPE_CHECKING = False  # a type checker takes it for true; importing `typing` at run time would cost a start
if TYPE_CHECKING:
    from typing import Any

KILLED = "its supervisor was killed"
REBOOTED = "its supervisor is gone, for the host was started anew since"
TOLD_TO_END = "its supervisor was told to end (SIGTERM), and nobody had stopped the run"
NOT_AGAIN = "it is not started again"  # so what has failed need not keep its slots any longer
UNASKED = (KILLED, REBOOTED, TOLD_TO_END)  # nobody had wanted the run to end then
# Told to end by a stop whose word could not be written down; others send SIGTERM and SIGINT as well.
STOP_SIGNAL = signal.SIGRTMIN + 11
END_SIGNALS = (signal.SIGTERM, signal.SIGINT, STOP_SIGNAL)
STOP = "stop.json"  # in a run's folder: the word
MAY_BE = -1  # lines of the log that are lost: it is not known whether there are any
NUMBER = (int, float)
WORD = {"attempt": (int,), "wanted": (int,), "grace": NUMBER, "time": NUMBER, "reason": (str,), "off": (str,)}
MOST_AGED_S = 7200.0  # a stop that seems to have been wanted for longer was not
MOST_PATIENT = 1e9  # seconds; what is more is no grace, nor what is not a number
STOPPED_EARLY = "it was stopped while it was starting"  # the controller knows these words


def leave_word(
    folder: str,
    attempt: int,
    grace: float,
    reason: str,
    again: str = "",
    age: float = 0.0,
    by_hand: bool = True,
) -> None:
    """Write down for the supervisor, and for all times, that this attempt and those before it are to end. Of
    several who ask at once the least patient counts, and that somebody wants it so. Whoever has announced a
    start by hand, and is not the one who asks (`again`), does not start it, if it is somebody who asks, and
    not ringctl by itself. That it is wanted is so many seconds old."""
    path = os.path.join(folder, STOP)
    lock = lock_file(os.path.join(folder, "lock"), LOCK_S)
    try:
        before = read_word(folder)
        if before and int(before.get("attempt", attempt)) >= attempt:
            attempt, grace = int(before.get("attempt", attempt)), min(grace, float(before["grace"]))
        elif before and started_after(folder, int(before.get("attempt", attempt))):
            before = None  # that was about an attempt which somebody has wanted another one after
        wanted = max(attempt if reason == "stopped" else 0, stopped_in(before or {}))
        word = {"attempt": attempt, "grace": grace, "reason": "stopped" if wanted else reason}
        off = announced(folder) if reason == "stopped" and by_hand else again
        off = off if off != again else (before or {}).get("off", "")
        since = time.time() - age
        if stopped_in(before or {}) >= attempt:  # somebody has wanted it for longer
            since = min(since, float((before or {}).get("time", since)))
        word.update(wanted=wanted, time=since, off=off)
        if before and is_said(word, before):
            return  # which needs no room on a full disk
        try:
            replace_file(path, json.dumps(word).encode())
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            if os.path.exists(path + ROOM):
                replace_in_room(path, json.dumps(word).encode())
            elif not before or not is_said({**word, "grace": before.get("grace")}, before):
                raise  # else all is said but how patient this one is
    finally:
        os.close(lock)


def read_word(folder: str) -> dict[str, Any] | None:
    """The word that was left there. What is none, which a rank may have put in its place, says nothing."""
    word = read_json(os.path.join(folder, STOP))
    if word is None or "grace" not in word:
        return None
    fits = all(type(word[key]) in kinds for key, kinds in WORD.items() if key in word)
    return word if fits and 0 <= word["grace"] <= MOST_PATIENT else None


def age_of(word: dict[str, Any]) -> float:
    """For how many seconds somebody has wanted that; clocks may have been set since."""
    now = time.time()
    return float(min(max(0.0, now - word.get("time", now)), MOST_AGED_S))


def is_said(word: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether the word that was left before says as much."""
    return all(before.get(key) == word[key] for key in word if key != "time")


def stopped_in(word: dict[str, Any]) -> int:
    """The last attempt that somebody wanted stopped; 0 if nobody has."""
    return int(word.get("wanted") or word.get("attempt") or 1) if word.get("reason") == "stopped" else 0


def started_after(folder: str, attempt: int) -> bool:
    """Whether a later attempt than this one has been started here. Numbers that a start has used up
    elsewhere do not count: what somebody has stopped stays stopped."""
    state = read_json(os.path.join(folder, "state.json"))
    return state is not None and is_state(state) and int(state["attempt"]) > attempt


def command_again(request: dict[str, Any]) -> dict[str, Any]:
    """Somebody is about to start the run again by hand, and may end it for that: until it has started, a stop
    of somebody else's, on whatever machine, calls that off."""
    folder = run_folder(str(request["run"]))
    if os.path.isdir(folder):
        replace_file(os.path.join(folder, "again.json"), json.dumps({"again": request["again"]}).encode())
    return {}


def announced(folder: str) -> str:
    """Who was the last to announce a start by hand; "" for nobody."""
    return str((read_json(os.path.join(folder, "again.json")) or {}).get("again", ""))


def stop_word(folder: str, attempt: int) -> dict[str, Any] | None:
    """What whoever ended this attempt, or a later one, has left; None if nobody has."""
    word = read_word(folder)
    return word if word and int(word.get("attempt", attempt)) >= attempt else None


def is_stopped(folder: str, request: dict[str, Any]) -> bool:
    """Whether this attempt must not start: it was stopped, or called off, or it starts by itself after
    somebody stopped the run."""
    word = read_word(folder) or {}
    unwanted = bool(request.get("automatic")) and stopped_in(word) >= int(request.get("since") or 1)
    called_off = bool(request.get("again")) and word.get("off") == request["again"]
    return unwanted or called_off or stop_word(folder, int(request["attempt"])) is not None
