"""The warden and hostd: the two processes that a run has on a host besides its ranks, which they outlive.

Why nothing is left behind:

    warden            sub-reaper; if hostd dies, everything below falls to it, and it kills it all
    └── hostd         sub-reaper; reads the ranks' output, writes events and state, reaps; hears of the
        │             supervisors on the other hosts (hostlease.py)
        ├── rank 0    own session, parent-death signal KILL
        └── rank 1 ...
"""

from __future__ import annotations

import errno
import functools
import json
import os
import signal
import time

from launcher.hostanswer import Refused
from launcher.hostbooks import Known, close_books, log_last_words
from launcher.hostcode import remove_half
from launcher.hostdisk import NO_ROOM, keep_room, keep_room_for_word, open_own, write_all
from launcher.hostprefork import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, prctl, raise_open_files
from launcher.hostproc import identity, kill_below, reap, send
from launcher.hostranks import Rank
from launcher.hostsupervisor import HEARTBEAT_S, Supervisor
from launcher.hostword import (
    END_SIGNALS,
    KILLED,
    MAY_BE,
    STOP,
    STOP_SIGNAL,
    STOPPED_EARLY,
    TOLD_TO_END,
    is_stopped,
    stop_word,
)

TYPE_CHECKING = False  # a type checker takes it for true; importing `typing` at run time would cost a start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def be(body: Callable[[], int]) -> None:
    """What a forked process does for the rest of its life; never returns into what its parent was doing."""
    try:
        os._exit(body())
    except BaseException:  # our own bug: leave its trace in hostd.log
        try:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(1)


def detach(folder: str) -> None:
    """Own session, no terminal, nobody else's files held open."""
    os.setsid()
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDONLY)
    log = open_own(os.path.join(folder, "hostd.log"), os.O_WRONLY | os.O_APPEND)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for fd in (null, log):
        if fd > 2:
            os.close(fd)


def be_warden(folder: str, plan: dict[str, Any], answer: int, lock: int) -> int:
    """Start hostd and outlive it: when it is gone, so is everything below it. Until there is a state by which
    others know of us, the `lock` on starts is held, whatever becomes of whoever asked."""
    detach(folder)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    raise_open_files()
    warden = identity(os.getpid())
    ranks = [Rank(spec, str(plan.get("watchdog") or "")) for spec in plan["ranks"]]
    problem = open_pipes(ranks)  # here, so that what they hold is not lost with hostd
    child = os.fork()
    if child == 0:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        be(lambda: be_hostd(folder, plan, warden, ranks, problem, answer, lock))
    os.close(answer)
    os.close(lock)
    for rank in ranks:
        rank.close_write_ends()
    known = Known()

    def pass_on(number: int, _: object) -> None:
        known.told_to_end = number != STOP_SIGNAL
        send(child, number)

    for number in END_SIGNALS:
        signal.signal(number, pass_on)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    while child not in known.statuses:
        pid, ended = os.waitpid(-1, 0)
        known.statuses[pid] = ended
    word = stop_word(folder, int(plan["attempt"]))
    known.unasked = word is None
    known.statuses.update(reap())  # ranks that had ended as well, and that nobody has reaped
    status = known.statuses[child]
    for number in END_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the child's number is nobody's, or somebody else's
    left = kill_below(10.0)
    if status:  # hostd did not live to do it itself
        from launcher import hostslots

        wanted = (word or {}).get("reason") == "stopped"
        hostslots.let_go(str(plan["run"]), 0.0 if wanted else float(plan.get("keeps") or 0))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    unwritten = 0
    if status:
        remove_half(folder)
        unwritten = log_all_words(folder, int(plan["attempt"]), ranks)
        known.metrics = {rank.number: rank.last for rank in ranks}
    while status and not books_closed(folder, left, unwritten, known):  # else hostd did, or who has ended it
        time.sleep(HEARTBEAT_S)  # a full disk: as soon as there is room
    return 0


def open_pipes(ranks: list[Rank]) -> str:
    """All of them or none; why, if none."""
    try:
        for rank in ranks:
            rank.open_pipes()
    except OSError as error:
        for rank in ranks:
            rank.close_pipes()
        return f"the pipes of its ranks cannot be opened: {error.strerror}"
    return ""


def log_all_words(folder: str, attempt: int, ranks: list[Rank]) -> int:
    """What the ranks said that hostd has not written; MAY_BE if some of it is lost."""
    words = (said for rank in ranks for said in rank.last_words())
    while True:
        try:
            all_written = log_last_words(folder, attempt, words)
        except OSError as error:
            if error.errno == errno.EAGAIN:  # somebody holds its lock, and nothing is read yet
                continue
            all_written = False
        break
    return 0 if all_written and not any(rank.has_lost_words() for rank in ranks) else MAY_BE


def books_closed(folder: str, left: list[dict[str, Any]], unwritten: int, known: Known) -> bool:
    try:
        close_books(folder, KILLED, left, unwritten, known)
    except OSError as error:
        if error.errno not in (*NO_ROOM, errno.EAGAIN):  # the latter: somebody holds its lock
            raise
        return False
    return True


def be_hostd(
    folder: str,
    plan: dict[str, Any],
    warden: dict[str, Any],
    ranks: list[Rank],
    problem: str,
    answer: int,
    lock: int,
) -> int:
    """Start the ranks, unless there is a problem already, tell whoever waits at `answer` how that went, and
    see them to their end."""
    try:
        supervisor = Supervisor(folder, plan, warden, ranks)
    except OSError as error:
        say(answer, {"error": str(error)})
        return 0
    is_known = False  # there is a state by which somebody can find us
    ended_early = functools.partial(refuse_to_start, folder, plan, warden)
    try:
        for number in END_SIGNALS:
            signal.signal(number, ended_early)
        try:
            supervisor.write_state()
            is_known = True
        finally:
            os.close(lock)
        keep_room(folder)
        keep_room_for_word(os.path.join(folder, STOP))
        if is_stopped(folder, plan):  # whoever comes later finds the state saved above
            raise Refused(STOPPED_EARLY)
        if problem:
            raise Refused(problem)
        supervisor.take_slots()
        supervisor.start()
        for number in END_SIGNALS:
            signal.signal(number, supervisor.ending.on_terminate)
        reply: dict[str, Any] = {
            "hostd": os.getpid(),
            "ranks": {str(r.number): r.pid for r in supervisor.ranks},
        }
    except (Refused, OSError) as error:
        is_closed = supervisor.abandon(str(error))
        say(answer, {"error": str(error)})
        if is_known and not is_closed:
            supervisor.close_later()
        return 0
    say(answer, reply)
    supervisor.run()
    return 0


def say(answer: int, reply: dict[str, Any]) -> None:
    try:
        write_all(answer, json.dumps(reply).encode())
    except BrokenPipeError:
        pass  # whoever asked was killed; what has started goes on, and can be asked for
    os.close(answer)


def refuse_to_start(
    folder: str, plan: dict[str, Any], warden: dict[str, Any], number: int, _: object
) -> None:
    """Told to end while the ranks are started: by a stop, which has left its word, or by somebody else. Once
    is enough."""
    for each in END_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    word = stop_word(folder, int(plan["attempt"])) or {}
    if number == STOP_SIGNAL or word.get("reason") == "stopped":
        raise Refused(STOPPED_EARLY)
    raise Refused(str(word.get("reason") or (TOLD_TO_END if os.getppid() == warden["pid"] else KILLED)))
