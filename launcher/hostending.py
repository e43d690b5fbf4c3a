"""Why and when ranks are ended: one failed, the run was stopped or is over elsewhere, a host is silent."""

from __future__ import annotations

import os
import signal
import time

from launcher.hostprogress import STACK_S
from launcher.hostword import KILLED, STOP_SIGNAL, TOLD_TO_END, age_of, stop_word

TYPE_CHECKING = False  # a type checker takes it for true; importing `typing` at run time would cost a start
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from launcher.hostlease import Lease
    from launcher.hostprogress import Stacks
    from launcher.hostranks import Rank

TICK_S = 0.2  # metrics are looked at this often, and whether something is due
SETTLE_S = 1.0  # after the first failure the other ranks may fail by themselves this long
STOP_SETTLE_S = 3.0  # whoever stopped the run on another host has so long to come here, too
FAILED_GRACE_S = 3.0  # then TERM, and KILL after this


class Ending:
    """Whether the ranks that still run are being ended; the supervisor sends the signals that are due."""

    def __init__(
        self, folder: str, plan: dict[str, Any], warden: dict[str, Any], ranks: list[Rank], stacks: Stacks
    ) -> None:
        self.folder, self.plan, self.warden = folder, plan, warden
        self.ranks, self.stacks = ranks, stacks
        self.lease: Lease | None = None  # where there are other hosts
        self.reason = ""  # why the ranks that still run are being ended
        self.since = 0.0  # and since when that was known here
        self.term_at: float | None = None
        self.kill_at: float | None = None
        self.stop_requested = False
        self.asked = False  # somebody has told us to end
        self.stop_told = False  # the other hosts know of it
        self.word_seen: float | None = None  # when that it is to be stopped was seen to be written down

    def begin(self, reason: str, term_at: float) -> None:
        """TERM then, KILL some time later; where they are until then is noted."""
        self.reason, self.since, self.stacks.wanted = reason, time.monotonic(), True
        self.term_at, self.kill_at = term_at, term_at + FAILED_GRACE_S

    def fail(self, reason: str, term_at: float) -> None:
        """The same, for a reason of this host's own, which the others are told."""
        self.begin(reason, term_at)
        if self.lease is not None:
            self.lease.bye("failed", self.reason)

    def due(self, clock: float) -> Iterator[int]:
        """The signals that the ranks are to get now."""
        if self.term_at is not None and clock >= self.term_at:
            yield signal.SIGTERM
            self.term_at = None
        if self.kill_at is not None and clock >= self.kill_at:
            yield signal.SIGKILL
            self.kill_at = clock + TICK_S

    # somebody has told us to

    def on_terminate(self, number: int, _: object) -> None:
        """Without a word that it is to be stopped, SIGTERM and SIGINT come from somebody else: the host is
        shut down, say."""
        self.end_as_told(stop_word(self.folder, int(self.plan["attempt"])) or {}, number)

    def stopping(self) -> float | None:
        """For how many seconds it has been known here that somebody stops the run."""
        return time.monotonic() - self.since if self.stop_requested else None

    @property
    def is_pressed(self) -> bool:
        """Somebody wants the run, or this supervisor, to end: nobody waits for more of what ranks say. Where
        one has failed, here or elsewhere, that may be why."""
        return self.asked and (self.reason == "stopped" or self.is_felled)

    @property
    def is_felled(self) -> bool:
        """It was not the run that somebody wanted to end, but all that is here, as when a host is shut down:
        ranks that end now were told to as well, whatever their exit code says."""
        return self.asked and self.reason in (KILLED, TOLD_TO_END)

    def end_as_told(self, request: dict[str, Any], number: int = signal.SIGTERM) -> None:
        now = time.monotonic()
        orphaned = not request and os.getppid() != self.warden["pid"]
        first = not self.reason
        self.asked = True
        if first:  # whoever asks may have wanted it for a while
            self.since = now - age_of(request)
        unasked = KILLED if orphaned else "stopped" if number == STOP_SIGNAL else TOLD_TO_END
        self.reason = self.reason or (str(request.get("reason") or "stopped") if request else unasked)
        self.stop_requested = self.reason == "stopped"
        self.term_at = now
        if first and not orphaned and not self.stop_requested:  # a rank elsewhere failed: where are ours?
            self.stacks.wanted, self.term_at = True, now + STACK_S + 2 * TICK_S
        kill_at = self.term_at + float(request.get("grace", FAILED_GRACE_S))
        self.kill_at = kill_at if self.kill_at is None else min(kill_at, self.kill_at)

    def mind_the_word(self, patience: float) -> None:
        """Whoever stops a run tells all of its hosts first, and ends it then. Who is killed between the two
        does not come: what was told holds all the same."""
        word = None if self.reason else stop_word(self.folder, int(self.plan["attempt"]))
        if not word:
            return
        self.word_seen = self.word_seen or time.monotonic()
        if time.monotonic() >= self.word_seen + patience:
            self.end_as_told(word)

    def was_stopped(self) -> bool:
        """Whether somebody has stopped the run, here or on another host: a rank that fails now does so for
        want of those that were ended."""
        self.mind_the_word(patience=0.0)
        if self.lease is not None and not self.reason:
            clock = time.monotonic()
            self.lease.receive(clock)
            if self.lease.over and self.lease.over["state"] == "stopped":
                self.mind_the_others(self.lease, clock)
        return self.stop_requested

    # the other hosts

    def open_lease(self) -> int:
        """The descriptor that word of the other hosts comes in at; -1 where there are none."""
        if not self.plan.get("lease"):
            return -1
        from launcher.hostlease import Lease

        self.lease = Lease(self.plan["lease"], str(self.plan["host"]))
        return self.lease.open(time.monotonic())

    def hear(self) -> None:
        if self.lease is not None:
            self.lease.receive(time.monotonic())

    def beat(self, clock: float) -> None:
        """Tell the others that this host is there, and mind how they are."""
        if self.lease is not None:
            asleep = self.lease.beat(clock)
            for rank in self.ranks:
                rank.progress.slept(asleep, clock)
            self.mind_the_others(self.lease, clock)

    def mind_the_others(self, lease: Lease, clock: float) -> None:
        """End the ranks when the run has ended elsewhere, and when another host is silent and the ranks stand
        still, for want of it. As long as they get on they are left alone."""
        over, silent = lease.over, lease.silent(clock)
        if self.stop_requested and not self.stop_told:  # before the ranks end: theirs fail for want of ours
            self.stop_told = True
            lease.bye("stopped", "stopped")
        if self.reason:
            return
        if over:
            self.stop_requested = over["state"] == "stopped"
            self.begin(str(over["reason"]), clock + (STOP_SETTLE_S if self.stop_requested else SETTLE_S))
        elif silent:
            host, seconds = max(silent.items(), key=lambda item: item[1])
            going = [rank for rank in self.ranks if not rank.ended]
            if all(rank.progress.stood(lease.seconds, seconds) for rank in going):
                reason = f"{host} was not heard of for {seconds:.0f} s, and the ranks stood still"
                self.begin(reason, clock + STACK_S + 2 * TICK_S)

    def attend(self, seconds: float) -> None:
        """Wait so long, with an ear for the others."""
        if self.lease is None:
            time.sleep(seconds)
        else:
            self.lease.attend(seconds)

    def linger(self) -> None:
        """All has ended here, and that is written down: stay for the other hosts, as long as they need it and
        nobody tells us to end. If that is because the run is stopped, pass it on."""
        since = time.monotonic()
        if self.lease is None or self.asked:
            return
        while not self.asked and self.lease.is_needed(time.monotonic(), since):
            self.lease.attend(TICK_S)
        if self.asked and stop_word(self.folder, int(self.plan["attempt"])):
            self.tell_the_end("stopped" if self.stop_requested else "failed")

    def tell_the_end(self, state: str) -> None:
        """How it ended here; what befell this supervisor by itself, with whose that is."""
        if self.lease is not None:
            own = f"{self.plan['host']}: " if self.reason in (KILLED, TOLD_TO_END) else ""
            self.lease.bye(state, "stopped" if state == "stopped" else own + self.reason)
