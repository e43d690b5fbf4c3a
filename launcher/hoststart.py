"""`start`: whether a run may start here, and its folder; then it is its warden's."""

from __future__ import annotations

import json
import os
import signal
import time

from launcher.hostanswer import Refused
from launcher.hostdisk import lock_file, read_json, replace_file
from launcher.hostproc import alive, boot_id, identity
from launcher.hostruns import FINAL, home_folder, read_state, run_folder
from launcher.hoststop import GONE_S, terminate
from launcher.hostwarden import be, be_warden
from launcher.hostword import STOPPED_EARLY, is_stopped

TYPE_CHECKING = False  # a type checker takes it for true; importing `typing` at run time would cost a start
if TYPE_CHECKING:
    from typing import Any

ALREADY = "there is a run"  # the controller knows this beginning
START_S = 45.0  # so long somebody else may take to start the run; whoever asks us waits for a minute
SLOTS_TAKEN = "no room for it by now:"  # the controller knows this beginning


def command_start(request: dict[str, Any]) -> dict[str, Any]:
    """Make the run's folder and start its ranks, detached from whoever asked."""
    from launcher.hoststore import not_ours

    problem = not_ours(home_folder())
    if problem:
        raise Refused(problem)
    folder = run_folder(str(request["run"]))
    for place in (home_folder(), os.path.dirname(folder)):  # `mode` is that of the last folder only
        os.makedirs(place, mode=0o700, exist_ok=True)
    try:
        os.mkdir(folder, 0o700)
        fresh = True
    except FileExistsError:
        fresh = False
    lock = lock_starts(folder)
    try:
        if not fresh:
            before = answered_before(folder, request)
            if before is not None:
                return before
            refuse_again(request)
        plan = dict(request, boot=boot_id(), begun=time.time())
        replace_file(os.path.join(folder, "plan.json"), json.dumps(plan).encode())
        read, write = os.pipe()
        if os.fork() == 0:
            os.close(read)
            be(lambda: be_warden(folder, request, write, lock))
        os.close(write)
        with os.fdopen(read, "rb") as answer:
            reply = answer.read()
    finally:
        os.close(lock)
    if not reply:
        raise Refused(f"the supervisor died while starting; see {folder}/hostd.log")
    result: dict[str, Any] = json.loads(reply)
    if "error" in result:
        raise Refused(result["error"])
    return result


def claim_slots(request: dict[str, Any]) -> dict[str, Any]:
    """Take the slots of a run that is to start only if they are free. They are its own for as long as this
    process lives, which waits for the start."""
    from launcher import hostslots

    about = request["claim"]
    full = hostslots.claim(about, int(about["room"]), identity(os.getpid()))
    if full:
        raise Refused(f"{SLOTS_TAKEN} {full}")
    return {}


def give_back(request: dict[str, Any]) -> None:
    """Slots that were claimed for a start that did not come, or was refused. A run that has begun here
    meanwhile keeps them."""
    from launcher import hostslots

    hostslots.remove_of(str(request["claim"]["run"]), os.getpid())


def lock_starts(folder: str) -> int:
    """Of several who start one run at once, each waits until it is decided about the one before."""
    return lock_file(os.path.join(folder, "start.lock"), START_S)


def answered_before(folder: str, request: dict[str, Any]) -> dict[str, Any] | None:
    """The answer to this very request, if it was carried out and the connection lost before it arrived."""
    token, plan = request.get("token"), read_json(os.path.join(folder, "plan.json"))
    state = read_state(str(request["run"]))
    same = token and plan and plan.get("token") == token and state and state["attempt"] == request["attempt"]
    if same and plan and plan.get("host") != request["host"]:
        names = f"{plan.get('host')} and {request['host']}"
        raise Refused(f"{names} are the same machine and account: leave one of them out of the run")
    if not same or state is None or state["state"] == "lost" or is_stopped(folder, request):
        return None
    failed = [rank["reason"] for rank in state["ranks"] if rank["reason"] and not rank["pid"]]
    if failed and state["state"] in FINAL:
        raise Refused(failed[0])
    return {"hostd": state["hostd"]["pid"], "ranks": {str(r["rank"]): r["pid"] for r in state["ranks"]}}


def refuse_again(request: dict[str, Any]) -> None:
    """A run that is here already starts again only as a later attempt, when the one before has ended, whose
    supervisor then goes. What somebody has stopped does not start again by itself."""
    run, attempt = str(request["run"]), int(request["attempt"])
    before = read_state(run)
    if is_stopped(run_folder(run), request):
        raise Refused(STOPPED_EARLY)
    if attempt == 1 or (before and before["attempt"] >= attempt):
        raise Refused(f"{ALREADY} {run} on this host already")
    if before and before["state"] not in FINAL:  # nobody could ask this host to end it
        raise Refused(f"attempt {before['attempt']} of run {run} still goes on here")
    left = [who["pid"] for who in (before or {}).get("left", ()) if alive(who)]
    if left:
        raise Refused(f"what it has of the attempt before did not end: {left}")
    if before:
        terminate(before, GONE_S, signal.SIGTERM)  # it may stay for other hosts, and has the master port
