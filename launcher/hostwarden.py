"""The warden and hostd: the two processes that a run has on a host besides its ranks, which they outlive.

Why nothing is left behind:

    warden            sub-reaper; if hostd dies, everything below falls to it, and it kills it all
    └── hostd         sub-reaper; reads the ranks' output, writes events and state, reaps; hears of the
        │             supervisors on the other hosts (hostlease.py)
        ├── rank 0    own session, parent-death signal KILL
        └── rank 1 ...
"""

from __future__ import annotations

import json
import os
import signal
import time

from launcher.hostanswer import Refused
from launcher.hostbooks import close_books
from launcher.hostdisk import NO_ROOM, keep_room, write_all
from launcher.hostprefork import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, prctl
from launcher.hostproc import identity, kill_below, send
from launcher.hostsupervisor import HEARTBEAT_S, Supervisor
from launcher.hostword import KILLED, MAY_BE, STOPPED_EARLY, is_stopped, stop_word

TYPE_CHECKING = False  # a type checker takes it for true; importing `typing` at run time would cost a start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def be(body: Callable[[], int]) -> None:
    """What a forked process does for the rest of its life; never returns into what its parent was doing."""
    try:
        os._exit(body())
    except BaseException:  # our own bug: leave its trace in hostd.log
        import traceback

        traceback.print_exc()
        os._exit(1)


def detach(folder: str) -> None:
    """Own session, no terminal, nobody else's files held open."""
    os.setsid()
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(os.path.join(folder, "hostd.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for fd in (null, log):
        if fd > 2:
            os.close(fd)


def be_warden(folder: str, plan: dict[str, Any], answer: int) -> int:
    """Start hostd and outlive it: when it is gone, so is everything below it."""
    detach(folder)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    warden = identity(os.getpid())
    child = os.fork()
    if child == 0:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        be(lambda: be_hostd(folder, plan, warden, answer))
    os.close(answer)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: send(child, number))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    status: int | None = None
    while status is None:
        pid, ended = os.waitpid(-1, 0)
        if pid == child:
            status = ended
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the child's number is nobody's, or somebody else's
    left = kill_below(10.0)
    if status:  # hostd did not live to do it itself
        from launcher import hostslots

        wanted = (stop_word(folder, int(plan["attempt"])) or {}).get("reason") == "stopped"
        hostslots.let_go(str(plan["run"]), 0.0 if wanted else float(plan.get("keeps") or 0))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    unwritten = 0
    while status and not books_closed(folder, left, unwritten):  # else hostd did it, or whoever has ended it
        unwritten = MAY_BE  # a full disk: as soon as there is room
        time.sleep(HEARTBEAT_S)
    return 0


def books_closed(folder: str, left: list[dict[str, Any]], unwritten: int) -> bool:
    try:
        close_books(folder, KILLED, left, unwritten)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        return False
    return True


def be_hostd(folder: str, plan: dict[str, Any], warden: dict[str, Any], answer: int) -> int:
    """Start the ranks, tell whoever waits at `answer` how that went, and see them to their end."""
    try:
        supervisor = Supervisor(folder, plan, warden)
    except OSError as error:
        write_all(answer, json.dumps({"error": str(error)}).encode())
        return 0
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stopped_early)
        supervisor.write_state()
        keep_room(folder)
        if is_stopped(folder, plan):  # whoever comes later finds the state saved above
            stopped_early()
        supervisor.take_slots()
        supervisor.start()
        reply: dict[str, Any] = {
            "hostd": os.getpid(),
            "ranks": {str(r.number): r.pid for r in supervisor.ranks},
        }
    except (Refused, OSError) as error:
        supervisor.abandon(str(error))
        write_all(answer, json.dumps({"error": str(error)}).encode())
        return 0
    write_all(answer, json.dumps(reply).encode())
    os.close(answer)
    supervisor.run()
    return 0


def stopped_early(*_: object) -> None:
    raise Refused(STOPPED_EARLY)
