"""`tell` and `stop`: ends a run here, down to whatever still carries its id."""

from __future__ import annotations

import os
import signal
import time

from launcher.hostbooks import REPLACED, Known, close_books, heard_at
from launcher.hostcode import remove_half
from launcher.hostdisk import remove_leftovers
from launcher.hostproc import (
    Carriers,
    alive,
    all_pids,
    boot_id,
    descendants,
    identity,
    is_ours,
    kill_all,
    send,
    session_of,
    start_time,
)
from launcher.hostruns import FINAL, Unreadable, read_state, run_folder
from launcher.hostword import KILLED, MAY_BE, NOT_AGAIN, REBOOTED, STOP_SIGNAL, leave_word, stop_word

TYPE_CHECKING = False  # a type checker takes it for true; importing `typing` at run time would cost a start
if TYPE_CHECKING:
    from typing import Any

LOOKS = 16  # one sees a process that forks and ends without a pause three times of four, and less under load
HEARD_S = 5.0  # a supervisor that is there says so every second, and minds a word after three
SWEPT_S = 8.0  # by then a supervisor whose ranks were ended has said so
GONE_S = 5.0  # a supervisor whose ranks have ended goes at once when it is told to


def command_tell(request: dict[str, Any]) -> dict[str, Any]:
    """That this attempt of the run is to be stopped, which `stop` then sees to. Ranks that fail meanwhile,
    for want of those on other hosts, are stopped ones."""
    run, attempt = str(request["run"]), int(request["attempt"])
    state = read_state(run)
    if state is not None and state["state"] not in (*FINAL, "lost") and int(state["attempt"]) == attempt:
        try:
            Wanted(request).leave_word(attempt)
        except OSError:
            pass  # a full disk: `stop` ends it all the same
    return {}


class Wanted:
    """What is to end here, and why."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.run, self.grace = str(request["run"]), float(request.get("grace", 5.0))
        self.reason, self.attempt = str(request.get("reason") or "stopped"), int(request.get("attempt") or 1)
        self.folder, self.again = run_folder(self.run), str(request.get("again") or "")
        self.age = float(request.get("age") or 0.0)  # seconds; an older ringctl does not say
        # None: also whatever later attempt there is
        self.upto = self.attempt if request.get("exact") else None
        self.gone = ""  # why its supervisor was, before anybody wanted it to end

    def leave_word(self, attempt: int) -> None:
        by_hand = self.upto is None
        leave_word(self.folder, attempt, self.grace, self.reason, self.again, self.age, by_hand)

    def look_who_was_gone(self, state: dict[str, Any]) -> None:
        """Before the word is left: a host that has lost its power, say, was not stopped. Somebody may have
        left one since, and not come any further."""
        if state["state"] != "lost":
            return
        word = stop_word(self.folder, int(state["attempt"]))
        if word is None or float(word.get("time") or 0.0) > heard_at(state) + HEARD_S:
            self.gone = KILLED if state["hostd"]["boot"] == boot_id() else REBOOTED

    def is_later(self, state: dict[str, Any]) -> bool:
        """What runs here is not what was to be ended."""
        return self.upto is not None and int(state["attempt"]) > self.upto


def command_stop(request: dict[str, Any]) -> dict[str, Any]:
    """End the run here and wait for it; says what was ended and what could not be."""
    wanted = Wanted(request)
    try:
        before = state_or_word(wanted)
    except Unreadable:
        before = state_once_swept(wanted)
    if before is None:
        return unknown(wanted)
    wanted.look_who_was_gone(before)
    number: int = signal.SIGTERM
    ends, unsaid = 0, ""  # the newest attempt that has been told; why that could not be written down
    while ends < int(before["attempt"]) and not wanted.is_later(before):
        ends = max(wanted.attempt, int(before["attempt"]))
        try:
            wanted.leave_word(ends)
        except OSError as error:
            # A full disk: it ends all the same, with the supervisor's own grace.
            number = STOP_SIGNAL if wanted.reason == "stopped" else signal.SIGTERM
            unsaid = error.strerror or str(error)
        # Who was about to start has not seen the word, and is there now.
        before = read_state(wanted.run) or before
    if wanted.is_later(before):
        return {"known": True, "was": before["state"], "state": before["state"], "ended": [], "left": []}
    running = [r["rank"] for r in before["ranks"] if r["state"] in ("waiting", "running")]
    left, still = end_all(wanted, before, ends, number)
    told = {"known": True, "was": before["state"], "ended": running}
    return dict(told, **in_the_end(wanted, before, left, still, unsaid))


def unknown(wanted: Wanted) -> dict[str, Any]:
    """There is no such run here; what was about to be one ends."""
    early = Carriers(wanted.run, wanted.upto)
    left = kill_all(lambda: early.look() if read_state(wanted.run) is None else iter(()), 5.0)
    remove_leftovers(wanted.folder, *REPLACED)
    return {"known": False, "ended": [], "left": left}


def end_all(
    wanted: Wanted, before: dict[str, Any], ends: int, number: int
) -> tuple[list[int], list[dict[str, Any]]]:
    """End the attempts up to this number; what could not be, of what carries the run's id and of what was
    below its supervisor."""
    top = next((who for who in (before["warden"], before["hostd"]) if alive(who)), None)
    below = [identity(pid) for pid in descendants(int(top["pid"]))] if top else []
    terminate(before, wanted.grace + 15.0, number)
    sought = Carriers(wanted.run, ends)  # what somebody has started since is not ours
    if is_seen_to(wanted.run, before):
        left = kill_all(sought.look, 5.0)
    else:
        below += [identity(pid) for pid in in_sessions(before)]
        left = kill_all(sought.look, 5.0, LOOKS, sought.saw_all)
        remove_half(wanted.folder)
    below += before.get("left", ())
    kill_all(lambda: (int(who["pid"]) for who in below if alive(who) and is_ours(int(who["pid"]))), 5.0)
    return left, [who for who in below if alive(who)]  # such as what was made another user's


def in_the_end(
    wanted: Wanted, before: dict[str, Any], left: list[int], still: list[dict[str, Any]], unsaid: str
) -> dict[str, Any]:
    """Write down how it ended, if neither its supervisor nor its warden could, and say so."""
    if wanted.reason in ("stopped", NOT_AGAIN):
        free_kept_slots(wanted.run)
    why = ""
    try:
        known = Known(unasked=bool(wanted.gone))
        close_books(wanted.folder, wanted.gone or wanted.reason, still, MAY_BE, known)
    except OSError as error:
        why = error.strerror or str(error)  # a full disk, say: what matters is ended
    after = read_state(wanted.run) or before
    still = [
        *still,
        *(who for who in after.get("left", ()) if alive(who)),
    ]  # only its supervisor knew of them
    kept = after["state"] in FINAL
    if unsaid and wanted.reason == "stopped" and after["state"] != "stopped":
        kept, why = False, f"{unsaid}, so that it may be started again"
    told = {"state": after["state"], "left": sorted({*left, *(who["pid"] for who in still)})}
    return dict(told, unwritten=after.get("unwritten", 0), kept=kept, why=why)


def is_seen_to(run: str, before: dict[str, Any]) -> bool:
    """Whether a supervisor, or its warden, has lived to see to it that nothing is left."""
    if before["state"] == "lost":
        return False
    try:
        after = read_state(run)
    except Unreadable:
        return False
    return after is not None and after["state"] != "lost"


def in_sessions(state: dict[str, Any]) -> list[int]:
    """Those of our processes that are surely in the session of one of its ranks, whatever they have made of
    their environment: they were there when the supervisor was last heard of, and the rank was. The number of
    what has ended since may be another session's by now."""
    uptime = state.get("uptime")
    if not isinstance(uptime, float) or state["hostd"]["boot"] != boot_id():
        return []
    sessions = {rank.get("pid") or 0 for rank in state["ranks"] if rank["state"] == "running"}
    ticks = int(uptime * os.sysconf("SC_CLK_TCK"))  # whole ones, as the starts of processes are
    return [pid for pid in all_pids() if session_of(pid) in sessions and (start_time(pid) or ticks) < ticks]


def free_kept_slots(run: str) -> None:
    """Those of an attempt that had failed already, and after which none comes now."""
    from launcher import hostslots

    if not hostslots.has_holder(run):
        hostslots.remove(run)


def state_or_word(wanted: Wanted) -> dict[str, Any] | None:
    """The run's state; one that has none yet is told not to start, and has a moment to have one after all."""
    deadline = time.monotonic() + 3.0
    while True:
        state = read_state(wanted.run)
        if state is not None:
            return state
        fresh = not os.path.isdir(wanted.folder)
        os.makedirs(wanted.folder, mode=0o700, exist_ok=True)
        if not os.path.exists(os.path.join(wanted.folder, "stop.json")):
            wanted.leave_word(wanted.attempt)
        if fresh or time.monotonic() > deadline:
            return read_state(wanted.run)
        time.sleep(0.05)


def state_once_swept(wanted: Wanted) -> dict[str, Any] | None:
    """The state of a run whose ranks may have put something else in its place: they are ended first, and
    their supervisor then writes how. Where there is none to do so it stays Unreadable."""
    try:
        wanted.leave_word(wanted.attempt)
    except OSError:
        pass  # a full disk
    sought, deadline = Carriers(wanted.run, wanted.upto), time.monotonic() + SWEPT_S
    kill_all(sought.look, 5.0, LOOKS, sought.saw_all)
    while True:
        try:
            return read_state(wanted.run)
        except Unreadable:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def terminate(state: dict[str, Any], seconds: float, number: int) -> None:
    """Ask the supervisor to end, also one that only stays for other hosts by now; if it does not in time,
    end it, and its warden ends the rest."""
    hostd, warden = state["hostd"], state["warden"]
    # A warden without hostd may wait for room on a full disk.
    first = (hostd, number, seconds) if alive(hostd) else (warden, signal.SIGTERM, seconds)
    steps = (first, (hostd, signal.SIGKILL, 15.0), (warden, signal.SIGKILL, 5.0))
    for who, number, patience in steps:
        if alive(who):
            send(int(who["pid"]), number)
        deadline = time.monotonic() + patience
        while alive(hostd) or alive(warden):
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        else:
            return
