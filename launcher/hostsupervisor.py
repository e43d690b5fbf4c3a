"""The supervisor: starts a host's ranks, passes on what they say, and sees them to their end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time

from launcher.hostactivate import activate, clean_environ
from launcher.hostanswer import Refused
from launcher.hostcode import WORK, copy_code, mend_copy, remove_half
from launcher.hostdisk import (
    NO_FOLDER,
    NO_ROOM,
    READ_BYTES,
    ROOM_BYTES,
    remove_file,
    replace_file,
    room_file,
)
from launcher.hostending import SETTLE_S, STOP_SETTLE_S, TICK_S, Ending
from launcher.hostevents import EventLog, log_exit
from launcher.hostoutput import keep_last
from launcher.hostproc import (
    exit_code,
    identity,
    kill_below,
    oom_kills,
    reap,
    send,
    signal_name,
    start_time,
)
from launcher.hostprogress import Stacks
from launcher.hostranks import MOST_METRICS, Rank, hold_port, python_command, start_plain, start_zygote
from launcher.hostword import END_SIGNALS, STOPPED_EARLY

TYPE_CHECKING = False  # a type checker takes it for true; importing `typing` at run time would cost a start
if TYPE_CHECKING:
    import select
    import socket
    from collections.abc import Iterator
    from typing import Any

HEARTBEAT_S = 1.0  # state.json is written at least this often
ASKED_S = 5.0  # so long they are, of all ranks together, if somebody waits for the end of the run
LOG_BYTES = 3 * ROOM_BYTES // 4  # of the room that is kept for the end
LASTING_S = (
    60.0  # what keeps the end from being written down may pass, such as a server of files that restarts
)
REPORT_S = 10.0  # a rank that its zygote has started reports within this, or never
FILTER_S = 0.2  # what ranks have left behind may pass on what they said, if something comes this often,
FILTERS_S = 2.0  # for so long at most,
FILTERS_BYTES = 32 << 20  # and no more of the log than this: what is in pipes is less
HELD_BYTES = 8 << 20  # events that wait for room on a full disk; ranks that say more meanwhile are ended


class Supervisor:
    """Starts a host's ranks and sees them to their end."""

    def __init__(self, folder: str, plan: dict[str, Any], warden: dict[str, Any], ranks: list[Rank]) -> None:
        self.folder, self.plan, self.warden, self.ranks = folder, plan, warden, ranks
        self.log = EventLog(folder, int(plan["attempt"]))
        self.readers = {fd: (rank, splitter) for rank in ranks for fd, splitter in rank.splitters.items()}
        self.poll: select.poll | None = None
        self.orphans: dict[int, int] = {}  # ended before we were told whose pid it was
        self.port: socket.socket | None = None  # open as long as the master port is ours
        self.zygote = 0  # the process that imports torch and forks the ranks; 0 for none
        self.zygote_status: int | None = None
        self.zygote_ended = 0.0  # when that was seen
        self.report_fd = -1
        self.report = b""
        self.state = "starting"
        self.started = time.time()
        self.ended: float | None = None
        self.failed: Rank | None = None
        self.next_heartbeat = 0.0
        self.oom_kills = oom_kills()
        self.stacks = Stacks(self.log)
        self.ending = Ending(folder, plan, warden, self.ranks, self.stacks)
        self.lease_fd = -1
        self.left: list[dict[str, Any]] = []  # processes that could not be ended
        self.unwritten = 0  # lines of the log that there was no room for
        self.unsaved: int | None = None  # why the state could not be written the last time that it was not
        self.read_until = float("inf")  # of what the ranks told last no more than a piece is read after this

    # starting

    def start(self) -> None:
        """Start all ranks, or raise Refused with none of them left."""
        environ = activate(self.plan["env"], clean_environ(dict(os.environ)))
        cwd = self.make_folder()
        self.port = hold_port(int(self.plan.get("listens") or 0), str(self.plan["run"]))
        self.lease_fd = self.ending.open_lease()
        for rank in self.ranks:
            os.makedirs(os.path.dirname(rank.metrics.path), mode=0o700, exist_ok=True)
            os.makedirs(rank.env["RINGCTL_CHECKPOINTS"], mode=0o700, exist_ok=True)
        command = python_command(self.ranks[0].argv) if self.plan["prefork"] else None
        if command is not None:
            self.zygote, self.report_fd = start_zygote(self.ranks, command, environ, cwd)
        else:
            self.start_each(environ, cwd)
        for rank in self.ranks:
            rank.close_write_ends()
        self.state = "running"
        self.write_state()

    def start_each(self, environ: dict[str, str], cwd: str) -> None:
        """One after the other; what the first say does not wait for the last."""
        import select

        heard = select.poll()
        for fd in self.readers:
            heard.register(fd, select.POLLIN)
        for rank in self.ranks:
            with undisturbed() as mask:
                self.rank_started(rank, start_plain(rank, environ, cwd, mask))
                for fd, _ in heard.poll(0):
                    self.read_output(fd)

    def make_folder(self) -> str:
        """Where the ranks run: the run's own copy of its code, or wherever the plan says."""
        own, code = os.path.join(self.folder, WORK), str(self.plan.get("code") or "")
        if not os.path.isdir(own):
            copy_code(code, own)
        elif code:
            mend_copy(code, own)
        cwd = os.path.expanduser(str(self.plan["workdir"]))
        if not os.path.isdir(cwd):
            raise Refused(f"there is no folder {cwd}")
        return cwd

    def rank_started(self, rank: Rank, pid: int) -> None:
        rank.pid, rank.start, rank.state, rank.seen = pid, start_time(pid), "running", time.time()
        rank.progress.at = time.monotonic()
        self.log.event("rank_started", rank=rank.number, pid=pid)
        if pid in self.orphans:
            self.rank_ended(rank, self.orphans.pop(pid))

    # the loop

    def run(self) -> None:
        """Until every rank has ended and nothing of the run is left."""
        import select

        wake_read, wake_write = os.pipe()
        for fd in (wake_read, wake_write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in END_SIGNALS:
            signal.signal(number, self.ending.on_terminate)
        signal.signal(signal.SIGUSR1, self.stacks.on_look)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        poll = self.poll = select.poll()
        # The zygote's report comes before the pipes, so that a rank is known before its first line.
        others = [fd for fd in (self.report_fd, self.lease_fd) if fd >= 0]
        for fd in [wake_read] + others + list(self.readers):
            poll.register(fd, select.POLLIN)
        next_tick = 0.0
        while any(rank.status is None for rank in self.ranks):
            for fd, _ in poll.poll(TICK_S * 1000):
                if fd == wake_read:
                    os.read(wake_read, 4096)
                elif fd == self.report_fd:
                    self.read_report()
                elif fd == self.lease_fd:
                    self.ending.hear()
                elif fd in self.readers and self.log.held <= HELD_BYTES:
                    self.read_output(fd)
                elif fd in self.readers:
                    time.sleep(TICK_S / 10)  # the ranks wait for room, too
            self.collect()
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + TICK_S
                self.tick()
        self.finish()

    def tick(self) -> None:
        """What is done now and then: metrics, held-back lines, ending what must end, heartbeat."""
        now, clock = time.time(), time.monotonic()
        for rank in self.ranks:
            self.pass_on(rank, rank.metrics.read())
            for fd, splitter in rank.splitters.items():
                out = splitter.flush(now, at_end=False)
                if out:
                    rank.pending[fd].begin()
                    self.log.write(out)
                self.all_but_rest_written(rank, fd)  # also what has waited for room until now
        self.stacks.watch(self.ranks, clock, look=not self.ending.reason)
        self.mind_the_disk(clock)
        self.ending.beat(clock)
        for number in self.ending.due(clock):
            self.signal_ranks(number)
        if clock >= self.next_heartbeat:
            self.next_heartbeat = clock + HEARTBEAT_S
            self.ending.mind_the_word(STOP_SETTLE_S)
            self.save(durable=False)

    def signal_ranks(self, number: int) -> None:
        if self.zygote and self.zygote_status is None:
            send(self.zygote, number, group=True)
        for rank in self.ranks:
            if rank.status is None:
                rank.reason = rank.reason or self.ending.reason
                if rank.pid:
                    send(rank.pid, number, group=True)

    def mind_the_disk(self, clock: float) -> None:
        """Try again to write what waits for room. Ranks that say more than can wait are ended. What we cannot
        write the ranks can not either: their metrics are on the same disk."""
        written = self.log.flush()
        if not written or self.unsaved is not None:
            for rank in self.ranks:
                rank.progress.untold = True
        if written or self.log.held <= HELD_BYTES or self.ending.reason:
            return
        self.ending.fail(f"{self.plan['host']}: the log cannot be written: {self.log.problem}", clock)

    # what comes in

    def read_output(self, fd: int) -> bool:
        """Take what a pipe holds; False once it is at its end."""
        rank, splitter = self.readers[fd]
        rank.pending[fd].begin()
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            self.all_but_rest_written(rank, fd)
            return True
        now = round(time.time(), 6)
        rank.seen = now
        rank.progress.printed()
        out = splitter.feed(data, now) if data else splitter.flush(now, at_end=True)
        if out:
            self.log.write(out)
        self.all_but_rest_written(rank, fd)
        if not data:
            self.forget(fd)
        return bool(data)

    def all_but_rest_written(self, rank: Rank, fd: int) -> None:
        """Of what was read; unless it waits for room on a full disk, or was too long to be written at all."""
        if not self.log.held and not self.log.lost:
            rank.pending[fd].done(rank.splitters[fd].pieces)

    def forget(self, fd: int) -> None:
        rank, _ = self.readers.pop(fd)
        rank.splitters.pop(fd)
        if self.poll is not None:
            self.poll.unregister(fd)
        os.close(fd)

    def pass_on(self, rank: Rank, records: list[dict[str, Any]]) -> None:
        """What was read of its metrics file."""
        rank.passed_on.begin()
        for record in records:
            keep_last(rank.last, record)
            rank.seen = time.time()
            if rank.progress.stepped(record):
                self.stacks.looks = 0
        if records:
            self.log.write(rank.metric_lines(records))
        if not self.log.held and not self.log.lost:
            rank.passed_on.done(rank.metrics.place)

    def read_last_metrics(self, rank: Rank) -> None:
        """With an ear for the others; and for whoever ends the run, not for long."""
        for records in rank.metrics.rest(MOST_METRICS):
            self.pass_on(rank, records)
            self.ending.attend(0.0)
            now = time.monotonic()
            if self.ending.asked:
                self.read_until = min(self.read_until, now + ASKED_S)
            if now > self.read_until:
                rank.metrics.skip_to(rank.metrics.size())
                return

    def read_report(self) -> bool:
        """Take the pids that the zygote reports; False once it has reported all it will."""
        try:
            data = os.read(self.report_fd, 65536)
        except BlockingIOError:
            return True
        self.report += data
        *lines, self.report = self.report.split(b"\n")
        for line in lines:
            number, pid = (int(word) for word in line.split())
            self.rank_started(next(r for r in self.ranks if r.number == number), pid)
        if not data and self.poll is not None:
            self.close_report()
        return bool(data)

    def close_report(self) -> None:
        if self.poll is not None:
            self.poll.unregister(self.report_fd)
        os.close(self.report_fd)
        self.report_fd = -1

    def collect(self) -> None:
        """Take note of every child that has ended. What a zygote's imports have started may keep its report
        open for ever."""
        for pid, status in reap():
            # The number of one that has ended may be that of something else below us by now.
            rank = next((r for r in self.ranks if r.pid == pid and not r.ended), None)
            if rank is not None:
                self.rank_ended(rank, status)
            elif pid == self.zygote and self.zygote_status is None:
                self.zygote_status, self.zygote_ended = status, time.monotonic()
            elif self.report_fd >= 0:
                self.orphans[pid] = status
        if self.zygote_status is None:
            return
        if self.report_fd >= 0 and time.monotonic() > self.zygote_ended + REPORT_S and self.read_report():
            self.close_report()
        if self.report_fd < 0:
            self.zygote_gone()

    def zygote_gone(self) -> None:
        """Ranks that it never got to start have ended the way it did. Called once its report is whole: each
        rank that it did start holds the report open until it has told its pid."""
        for rank in self.ranks:
            if not rank.pid and rank.status is None:
                self.rank_ended(rank, self.zygote_status or 1 << 8)

    def read_rest(self, fd: int) -> None:
        """One read takes all that a pipe holds. What was left in the background may write for ever."""
        if wait_readable(fd, 0) and self.read_output(fd) and wait_readable(fd, 0):
            self.read_output(fd)

    def rank_ended(self, rank: Rank, status: int) -> None:
        """Its last lines, then its one final event; then the others follow if it failed."""
        for fd in list(rank.splitters):
            self.read_rest(fd)
        self.read_last_metrics(rank)
        if status and self.ending.was_stopped():
            rank.reason = rank.reason or "stopped"
        if self.ending.is_felled:
            rank.reason = rank.reason or self.ending.reason
        rank.status, rank.seen = status, time.time()
        rank.state = "stopped" if rank.reason else "succeeded" if status == 0 else "failed"
        rank.stopping = self.ending.stopping() if rank.reason == "stopped" else None
        if rank.state == "failed" and exit_code(status) == -signal.SIGKILL:
            self.note_oom(rank)
        how = exit_code(status), signal_name(status), rank.reason, rank.stopping
        log_exit(self.log, rank.number, rank.state, *how)
        if rank.state == "failed" and self.failed is None:
            self.failed = rank
            if not self.ending.reason:
                self.ending.fail(f"rank {rank.number} failed", time.monotonic() + SETTLE_S)
        self.save()

    def note_oom(self, rank: Rank) -> None:
        """Say so if the kernel has killed for want of memory since the ranks were started."""
        kills = oom_kills()
        if kills > self.oom_kills:
            self.oom_kills += 1  # one each: another of our ranks may have been killed in the same moment
            self.log.event("oom", rank=rank.number)

    # its slots, for others to see

    def take_slots(self) -> None:
        """Should that not be possible, hostd.log says why, and nothing else comes of it."""
        from launcher import hostslots

        plan = self.plan
        about = str(plan["run"]), int(plan["attempt"]), len(self.ranks), int(plan["world"])
        problem = hostslots.write(*about, bool(plan.get("shared")), self.warden)
        try:
            sys.stderr.write(f"{problem}\n" if problem else "")
            sys.stderr.flush()
        except OSError:
            pass  # a full disk: that is told by what matters

    def free_slots(self) -> None:
        """Before the final state is written: the next attempt may start at once then, and if one may come by
        itself the slots are kept for it."""
        from launcher import hostslots

        hostslots.let_go(
            str(self.plan["run"]), float(self.plan.get("keeps") or 0) if self.state == "failed" else 0.0
        )

    # the end

    def finish(self) -> None:
        """End what the ranks left behind, take its last words, and write the final state. Then nothing waits
        for us any more, but perhaps supervisors elsewhere."""
        self.hear_filters()
        self.left = kill_below(10.0, self.ending.attend)
        self.take_last_words()
        for rank in self.ranks:  # what they left behind may have told more
            self.read_last_metrics(rank)
        self.ended = time.time()
        failed = any(rank.state == "failed" for rank in self.ranks)
        stopped = any(rank.state == "stopped" for rank in self.ranks)
        self.state = "failed" if failed or stopped else "succeeded"
        if stopped and self.ending.stop_requested:
            self.state = "stopped"
        self.free_slots()
        self.unwritten = self.log.lost
        self.log_end(**({"unwritten": self.unwritten} if self.unwritten else {}))
        self.ending.tell_the_end(self.state)
        self.close_in_time()
        self.ending.linger()

    def hear_filters(self) -> None:
        """What ranks said through a filter of their own (`exec > >(tee log)`) is in its pipe when they end.
        Who only holds ours open is not waited for; nor anybody, if somebody ends the run."""
        now = time.monotonic()
        heard, until, most = now, now + FILTERS_S, self.log.given + FILTERS_BYTES
        while self.readers and now < min(heard + FILTER_S, until):
            if self.ending.is_pressed or self.log.given > most:
                break
            ready = [fd for fd in self.readers if wait_readable(fd, 0)] if self.log.held <= HELD_BYTES else []
            for fd in ready:
                heard = now if self.read_output(fd) else heard
            self.ending.attend(0.0 if ready else TICK_S / 20)
            now = time.monotonic()

    def take_last_words(self) -> None:
        """Of what has ended, and of what could not be."""
        for fd in list(self.readers):
            self.read_rest(fd)
            if fd in self.readers:
                rank, splitter = self.readers[fd]
                rank.pending[fd].begin()
                self.log.write(splitter.flush(time.time(), at_end=True))
                self.forget(fd)

    def waits_for_room(self) -> bool:
        """Whether a full disk keeps the end from being written down: there may be room one day."""
        return self.log.unsaved in NO_ROOM or self.unsaved in NO_ROOM

    def log_end(self, **more: object) -> None:
        left = [process["pid"] for process in self.left]
        if unread := sum(rank.metrics.skipped for rank in self.ranks):
            more["unread"] = unread
        self.log.event("host_finished", rank=None, state=self.state, left=left, **more)

    def close(self) -> bool:
        """Whether all is written down, to the end, for which room was kept. A long log does not get it."""
        if self.log.held > LOG_BYTES and not self.log.flush():
            return False
        return self.close_with_room()

    def close_in_time(self) -> None:
        """Nothing runs any more: there is time to wait for room on the disk, unless we are asked to end."""
        patience = time.monotonic() + LASTING_S
        while not self.close() and not self.ending.asked:
            if not self.waits_for_room() and time.monotonic() > patience:
                self.save()  # without the end of the log, if it is that
                break
            self.ending.attend(TICK_S)
        if self.log.held:
            self.close_short()

    def close_with_room(self) -> bool:
        try:
            remove_file(room_file(self.folder))
        except OSError:
            pass  # a disk that can only be read by now
        return self.log.finish() and self.save()

    def close_short(self) -> None:
        """The disk stays full, and somebody does not want to wait: write down how the run ended, and of the
        log as much as there is room for then."""
        lost = self.log.shorten(LOG_BYTES)
        if lost:  # one of them is the last
            self.unwritten = self.log.lost + lost - 1
            self.log_end(unwritten=self.unwritten)
        self.close_with_room()

    def abandon(self, error: str) -> bool:
        """The start failed: leave no process, and say of every rank that it did not start, or what it said
        until then. Whether that is written down."""
        for number in END_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if self.report_fd >= 0:
            self.read_report()  # those that the zygote has got to
        self.collect()  # those that have ended by themselves
        self.left = kill_below(5.0)
        remove_half(self.folder)
        self.state, reason = ("stopped", "stopped") if error == STOPPED_EARLY else ("failed", error)
        self.free_slots()
        self.take_last_words()
        for rank in [rank for rank in self.ranks if not rank.ended]:
            self.read_last_metrics(rank)
            rank.state, rank.reason = self.state, reason
            code, name = (-signal.SIGKILL, "SIGKILL") if rank.pid else (127, None)
            log_exit(self.log, rank.number, self.state, code, name, reason)
        self.ended, self.unwritten = time.time(), self.log.lost
        self.log_end(cause=error, **({"unwritten": self.unwritten} if self.unwritten else {}))
        return self.close()

    def close_later(self) -> None:
        """What could not be written down at once; whoever asked has been told meanwhile."""
        for number in END_SIGNALS:
            signal.signal(number, self.ending.on_terminate)
        self.close_in_time()

    def save(self, durable: bool = True) -> bool:
        """Whether the state could be written; if not, the next heartbeat tries again."""
        try:
            self.write_state(durable)
        except OSError as error:
            if error.errno in NO_FOLDER:
                raise
            self.unsaved = error.errno
            return False
        self.unsaved = None
        return True

    def write_state(self, durable: bool = True) -> None:
        state = {
            "run": self.plan["run"], "name": self.plan["name"], "attempt": self.plan["attempt"],
            "world": self.plan["world"], "host": self.plan["host"], "state": self.state,
            "started": self.started, "ended": self.ended, "updated": time.time(),
            "uptime": time.clock_gettime(time.CLOCK_BOOTTIME),
            "hostd": identity(os.getpid()), "warden": self.warden, "segment": self.log.segment,
            "ranks": [rank.to_json() for rank in self.ranks], "left": self.left,
            "unwritten": self.unwritten or self.log.lost,
        }  # fmt: skip
        replace_file(os.path.join(self.folder, "state.json"), json.dumps(state).encode(), durable)


@contextlib.contextmanager
def undisturbed() -> Iterator[set[int]]:
    """Who is told to end while it starts leaves off at once; but not between starting a rank and knowing it,
    or between reading and writing. Gives the signals that are blocked otherwise."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
    try:
        yield {int(number) for number in before}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def wait_readable(fd: int, seconds: float) -> bool:
    import select

    poll = select.poll()  # select() itself knows no descriptor from 1024 on
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))
