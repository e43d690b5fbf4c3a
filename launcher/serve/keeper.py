"""Looks after all runs: starts those whose turn it is, records those that go on, asks the hosts how they are.

It holds no run's fate: launches and watchers are processes of their own, and all that it knows is in the
database. Killed at any moment and started again, it goes on from there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from launcher import history, queued, recorder, runs, schedule, watching
from launcher.agent import Agent
from launcher.ask import chosen_hosts
from launcher.errors import InputError, RingctlError
from launcher.fanout import fan_out
from launcher.model import Host, Inventory
from launcher.queued import Queued
from launcher.run import SLOTS_TAKEN
from launcher.serve import reserving
from launcher.serve.call import Refused
from launcher.serve.children import ENDS, ringctl
from launcher.serve.reserving import Reservation
from launcher.transport import Pool

if TYPE_CHECKING:
    from launcher.history import Record
    from launcher.recorder import Batch, Recorder
    from launcher.told import HostNow

log = logging.getLogger("ringctl.serve")

TICK_S = 0.2
LOOK_S = 1.0  # how often it looks for runs that others have started
AGAIN_S = 5.0  # before a run that was cancelled is ended again, where a host was silent
WATCHERS_S = 5.0  # how often it looks for runs that have lost their watcher
LONGEST_WAIT_S = 300.0  # for the next one, if they end at once: they say why
GAPS_S = 60.0  # how often it asks hosts for what they could not tell
HOSTS_S = 3.0  # how often hosts are asked
FRESH_S = 1.0  # what a host said is believed for so long when slots are given away
HELD_S = 3.0  # a run that its hosts have refused, for others were faster, is not tried again before that
MOST_TRIES = 3  # of a launch that was killed before it came to an end
NOTHING_STARTED = "nothing was started"
OVER = ("succeeded", "failed", "stopped", "lost", "cancelled")


@dataclass(frozen=True)
class Seen:
    """What a host last said."""

    now: HostNow | None = None
    seen: float | None = None
    error: str = ""
    asked: float = 0.0  # when that question began, by the monotonic clock

    @property
    def answers(self) -> bool:
        return self.now is not None and not self.error


class Keeper:
    """The queue, the launches, the recorders, the hosts."""

    def __init__(
        self, inventory: Inventory, on_batch: Callable[[Batch], None], on_change: Callable[[str], None]
    ) -> None:
        self.inventory = inventory
        self.on_batch, self.on_change = on_batch, on_change
        self.hosts: Mapping[str, Seen] = {host.name: Seen() for host in inventory.hosts}
        self.recorders: dict[str, tuple[Recorder, threading.Thread]] = {}
        self._filling: set[str] = set()  # of those, runs that are over, and have no slots
        self.reserved: dict[str, Reservation] = {}  # slots of runs that are being started again
        self._stopping: list[str] = []  # runs that nobody may start again meanwhile
        self.giving = threading.RLock()  # whoever gives slots away, or takes them
        self._launches: dict[str, subprocess.Popen[bytes]] = {}
        self._held: dict[str, float] = {}  # until when runs are not tried again, and say why
        self._ending: set[str] = set()  # runs that were cancelled while they started
        self._unsure: set[str] = set()  # runs whose hosts are asked whether they have begun
        self._stop = threading.Event()
        self._looking = threading.Lock()
        self._wake = threading.Event()
        self._ask_now = threading.Event()
        self._looked = 0.0
        self._gaps_at = 0.0  # when to ask again for what hosts that were away have
        self._watchers_at = 0.0  # when to look again for runs that have lost their watcher
        self._unwatched: set[str] = set()  # those that had none the last time
        # When each of these gets a new one, and how long they wait for the one after that.
        self._replaced: dict[str, tuple[float, float]] = {}
        self._pool = Pool(no_input=True)
        self._asking = {host.name: threading.Lock() for host in inventory.hosts}
        self._hearing = threading.Lock()
        self._threads = [
            threading.Thread(target=self._keep, name="keeper", daemon=True),
            threading.Thread(target=self._ask_on, name="hosts", daemon=True),
        ]

    def start(self) -> None:
        self.reserved = {each.taken.run: each for each in reserving.left()}
        self.look_for_runs()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End what is ours alone; runs and their launches go on."""
        self._stop.set()
        self._wake.set()
        self._ask_now.set()
        for thread in (*self._threads, *(thread for _, thread in list(self.recorders.values()))):
            thread.join(timeout=10.0)
        self._pool.close()

    def wake(self) -> None:
        """Something has changed that may let a run start."""
        self._wake.set()

    def is_busy(self, run: str) -> bool:
        """Whether more of it may come."""
        return run in self.recorders or run in self.reserved or watching.is_announced(run)

    # --- the loop ---

    def _keep(self) -> None:
        while not self._stop.is_set():
            try:
                self.turn()
            except RingctlError as error:  # such as a disk that is full: the next turn may do better
                log.error("%s", error)
                self._stop.wait(LOOK_S)
            except Exception:
                log.exception("the keeper goes on after a mistake")
                self._stop.wait(LOOK_S)
            self._wake.wait(TICK_S)

    def turn(self) -> None:
        woken = self._wake.is_set()
        self._wake.clear()
        self.look_at_launches()
        self.look_at_restarts()
        if self._launches:
            self.look_for_runs()  # what begins is heard from its first line on
        if woken or time.monotonic() - self._looked > LOOK_S:
            self._looked = time.monotonic()
            self.look_for_runs()
            self.give_slots()
        if time.monotonic() >= self._watchers_at:
            self._watchers_at = time.monotonic() + WATCHERS_S
            self.look_for_watchers()

    def look_for_watchers(self) -> None:
        """Whoever is without one twice in a row gets a new one, beside the loop: a launch lets go of its run
        before the watcher that it begins has it."""
        before, self._unwatched = self._unwatched, set(watching.unwatched())
        self._replaced = {run: self._replaced.get(run, (0.0, WATCHERS_S)) for run in self._unwatched}
        now = time.monotonic()
        lost = [run for run in before & self._unwatched if now >= self._replaced[run][0]]
        for run in lost:
            wait = min(2 * self._replaced[run][1], LONGEST_WAIT_S)
            self._replaced[run] = now + wait, wait
        if lost:
            args = (sorted(lost),)
            threading.Thread(target=self._replace_watchers, args=args, daemon=True).start()

    def _replace_watchers(self, lost: list[str]) -> None:
        for words in watching.pick_up(None, lost):
            log.warning("%s", words)

    # --- launches ---

    def look_at_launches(self) -> None:
        for row in queued.rows("starting"):
            if row.run in self._ending or row.run in self._unsure:
                continue
            process = self._launches.get(row.run)
            if process is not None and process.poll() is None:
                continue
            if process is None and queued.is_launching(row.run):
                continue  # begun by the service that was here before
            self._launches.pop(row.run, None)
            record = history.read(row.run)
            if record is None or queued.told(row.run)[0]:
                self.after_launch(row, None)
            else:
                self._unsure.add(row.run)
                args = (row, record)
                threading.Thread(target=self._ask_whether_begun, args=args, daemon=True).start()
            self._wake.set()
            self.on_change(row.run)

    def _ask_whether_begun(self, row: Queued, record: Record) -> None:
        """Beside the loop: a host that is silent holds up nobody else."""
        try:
            self.after_launch(row, record)
        except Exception:
            log.exception("run %s: what became of its launch", row.run)
            self._stop.wait(LOOK_S)  # before it is looked at again
        finally:
            self._unsure.discard(row.run)
            self._wake.set()
            self.on_change(row.run)

    def after_launch(self, row: Queued, record: Record | None) -> None:
        """Its process is gone: did it start the run, fail to, or was it killed? Hosts are asked about a
        `record`."""
        said, complaint = queued.told(row.run)
        started = said or (record is not None and self.has_begun(record))
        if started and queued.begun(row.run):
            return
        if self.is_cancelled(row.run):
            self.after_cancel(row.run, started is not False)
            return
        if started is None:
            self._stop.wait(AGAIN_S)  # then it is asked again: nobody may take what perhaps runs for failed
            return
        if not complaint and row.tries < MOST_TRIES:
            log.warning("run %s: its launch was killed; it is launched again", row.run)
            queued.change(row.run, "starting", "starting", tries=row.tries + 1, pid=0)
            self.launch(replace(row, tries=row.tries + 1))
            return
        why, _, fix = (complaint or "its launch was killed, again and again").partition("\n")
        if SLOTS_TAKEN in why:
            self._held[row.run] = time.monotonic() + HELD_S
            queued.put_back(row.run, why)
            self._ask_now.set()
            return
        attempt = record.plan.attempt if record else None
        queued.conclude(row.run, "starting", "failed", why, what_to_do(fix), attempt)

    def is_cancelled(self, run: str) -> bool:
        row = queued.row(run)
        return row is not None and row.cancelled

    def after_cancel(self, run: str, started: bool) -> None:
        """Its launch has ended: what it may have started is ended, too."""
        if not started:
            queued.conclude(run, "starting", "cancelled")
            return
        self._ending.add(run)
        threading.Thread(target=self._end, args=(run,), name=f"end {run}", daemon=True).start()

    def _end(self, run: str) -> None:
        """Beside the loop, and until it has worked: a host that is silent holds up nobody else."""
        try:
            while not self._stop.is_set() and not self.has_ended(run):
                self._stop.wait(AGAIN_S)
        finally:
            self._ending.discard(run)
            self._wake.set()
            self.on_change(run)

    def has_ended(self, run: str) -> bool:
        try:
            done = ringctl("stop", run, "--json", hands=ENDS)
            if done.code not in (0, 1):
                raise done.refusal()
            queued.change(run, "starting", "started")
        except (Refused, RingctlError) as error:
            log.warning("run %s was cancelled while it started, and is not ended yet: %s", run, error)
            return False
        return True

    def has_begun(self, record: Record) -> bool | None:
        """Whether some host knows of it, though its launch has not lived to say so; None if those that answer
        do not, and others are silent. Hosts are not asked about a run that has ended since."""
        with contextlib.closing(Pool(no_input=True)) as pool:
            found = runs.refreshed(runs.found_of(record), pool)
        if found.is_over or found.states:
            return True
        return None if found.silent else False

    def launch(self, row: Queued) -> None:
        try:
            process = queued.spawn(row.run, self.inventory_for(row.slots))
        except OSError as error:
            raise RingctlError(f"run {row.run}: its launch cannot be started: {error}") from None
        if process is not None:
            self._launches[row.run] = process
            queued.change(row.run, "starting", "starting", pid=process.pid)

    def inventory_for(self, slots: Mapping[str, int]) -> Inventory:
        """Just the slots that were given, so that plan.place takes just them."""
        hosts = tuple(
            replace(host, slots=slots[host.name]) for host in self.inventory.hosts if slots.get(host.name)
        )
        if not hosts:
            raise RingctlError("its hosts are no longer in the inventory")
        names = [host.name for host in hosts]
        master = self.inventory.master if self.inventory.master in names else names[0]
        return replace(self.inventory, hosts=hosts, master=master)

    def cancel(self, run: str) -> bool:
        """Take it from the queue; a launch that is under way is interrupted. Whether it was there still."""
        with self.giving:
            if queued.conclude(run, "queued", "cancelled"):
                return True
        # Written down first: whoever looks after the launch then ends what it may have started.
        if not queued.change(run, "starting", "starting", cancelled=True):
            return False
        row = queued.row(run)
        if row is not None and row.pid and queued.is_launching(run):  # so the number is its own
            with contextlib.suppress(ProcessLookupError):
                os.kill(row.pid, signal.SIGINT)  # as Ctrl-C: it ends by itself what it has started
        return True

    # --- starting again ---

    def reserve(self, taken: schedule.Taken, rooms: Mapping[str, int]) -> Reservation:
        """Slots that were found free, for a run that is started again; by whoever holds `giving`. Its hosts
        have the last word, by the `rooms` that they have."""
        if taken.run in self._stopping:
            raise Refused(409, f"run {taken.run} is being stopped at this moment", "try again")
        if taken.run in self.reserved:
            raise Refused(409, f"run {taken.run} is being started again already", "wait until it has started")
        self.reserved[taken.run] = reserving.reserve(taken, rooms)
        return self.reserved[taken.run]

    def release(self, run: str) -> None:
        """Whoever started it again is through with it; else its slots stay taken until that is so."""
        self.reserved[run].let_go()
        self.look_at_restarts()
        self.wake()

    def look_at_restarts(self) -> None:
        if not self.reserved:
            return
        with self.giving:
            for run, held in list(self.reserved.items()):
                if held.descriptor is None and not reserving.is_held(run):
                    self.look_for_runs()  # from here on it has its slots as one that goes on
                    reserving.remove(run)
                    del self.reserved[run]
                    self._wake.set()
                    self.on_change(run)

    @contextlib.contextmanager
    def stopping(self, run: str, seconds: float) -> Iterator[None]:
        """Nobody starts it again meanwhile; whoever is about to is interrupted, and has ended."""
        with self.giving:
            self._stopping.append(run)
            held = self.reserved.get(run)
        try:
            if held is not None:
                self._end_restart(run, held, time.monotonic() + seconds)
            yield
        finally:
            self._stopping.remove(run)

    def _end_restart(self, run: str, held: Reservation, until: float) -> None:
        interrupted = False
        while self.reserved.get(run) is held:
            if time.monotonic() > until:
                raise Refused(409, f"run {run} is being started again, which does not end", "try again")
            interrupted = interrupted or held.interrupt()
            self._wake.set()
            time.sleep(0.05)

    def is_stopping(self, run: str) -> bool:
        return run in self._stopping

    # --- recording ---

    def look_for_runs(self) -> None:
        """Record every run that goes on, whoever has started it; and, now and then, what hosts that were away
        have of others."""
        gaps = time.monotonic() >= self._gaps_at
        if gaps:
            self._gaps_at = time.monotonic() + GAPS_S
        going = recorder.due(gaps=False)
        for run in recorder.due() if gaps else going:
            with self._looking:  # also whoever has just started one looks
                if run in self.recorders or self._stop.is_set():
                    continue
                if run not in going:
                    self._filling.add(run)
                self._record(run)

    def _record(self, run: str) -> None:
        recording = recorder.Recorder(
            run, on_batch=self.on_batch, stop=self._stop, note=lambda words: log.info("%s: %s", run, words)
        )

        def work() -> None:
            try:
                recording.record()
            except RingctlError as error:
                log.warning("%s: %s", run, error)
                self._stop.wait(LOOK_S)  # before it is tried again
            except Exception:
                log.exception("recording %s", run)
                self._stop.wait(5 * LOOK_S)
            finally:
                self._filling.discard(run)
                self.recorders.pop(run, None)
                self._ask_now.set()  # its slots are free
                self._wake.set()
                self.on_change(run)

        thread = threading.Thread(target=work, name=f"record {run}", daemon=True)
        self.recorders[run] = (recording, thread)
        thread.start()

    # --- slots ---

    def own(self) -> list[schedule.Taken]:
        """The slots of our runs that start or go on; also between two attempts of one, and before one that
        somebody has asked for."""
        recorded = set(self.recorders) - self._filling
        taken = {row.run: self.of_queue(row) for row in queued.with_slots(recorded)}
        taken |= {run: its for run in recorded - taken.keys() if (its := self.of_launch(run))}
        for run, held in list(self.reserved.items()):
            before = taken.get(run, held.taken)
            taken[run] = replace(before, slots=most(before.slots, held.taken.slots))
        return list(taken.values())

    def of_queue(self, row: Queued) -> schedule.Taken:
        """What it was given; once it was started again, what it has of that. One that goes on with fewer
        ranks where hosts fail may come back to any of them."""
        record = history.read(row.run) if row.state == "started" else None
        slots = self.here(record.hosts, planned(record)) if record else {}
        if not slots or (record and record.options.min_world is not None):
            slots = most(slots, row.slots)
        return schedule.Taken(row.run, slots, row.submission.shared, row.user)

    def of_launch(self, run: str) -> schedule.Taken | None:
        """Of a plain launch: hosts tell of it only while an attempt goes on there."""
        record = history.read(run)
        if record is None:
            return None
        told = next((each for each in self.others(()) if each.run == run), None)
        slots = most(told.slots if told else {}, self.here(record.hosts, planned(record)))
        return schedule.Taken(run, slots, record.options.shared, told.user if told else history.own_name())

    def here(self, hosts: Iterable[Host], slots: Mapping[str, int]) -> dict[str, int]:
        """Slots of hosts as whoever launched a run calls them, by the names that they have here."""
        names = {place_of(host): host.name for host in self.inventory.hosts}
        found = dict[str, int]()
        for host in hosts:
            if (name := names.get(place_of(host))) and slots.get(host.name):
                found[name] = found.get(name, 0) + slots[host.name]
        return found

    def rooms(self, hosts: Iterable[Host]) -> dict[str, int]:
        """How many slots those of them have that are ours, too; by the names that they have there."""
        slots = {place_of(host): host.slots for host in self.inventory.hosts}
        return {host.name: slots[place_of(host)] for host in hosts if place_of(host) in slots}

    def others(self, own: Collection[str]) -> tuple[schedule.Taken, ...]:
        told = {name: seen.now.runs for name, seen in self.hosts.items() if seen.now is not None}
        return schedule.taken_by_others(told, own)

    def decide(self, waiting: list[Queued]) -> schedule.Decision:
        own = self.own()
        mine = {each.run for each in own}
        rooms = [
            schedule.Room(host.name, host.slots, answers=self.hosts[host.name].answers)
            for host in sorted(self.inventory.hosts, key=lambda host: host.name != self.inventory.master)
        ]
        known = {run: self.is_over(run) for row in waiting if (run := row.submission.after)}
        over = [run for run, is_over in known.items() if is_over]
        going = [run for run, is_over in known.items() if is_over is False]
        wanted = [self.wanted(row) for row in waiting]
        return schedule.decide(wanted, own, self.others(mine), rooms, over, time.time(), going)

    def is_over(self, run: str) -> bool | None:
        """Whether it has ended, and nobody starts it again; None of one that is not known here any more."""
        if not (state := history.state_of(run)):
            return None
        recorded = run in self.recorders and run not in self._filling
        return state in OVER and not (recorded or run in self.reserved or watching.is_watched(run))

    def wanted(self, row: Queued) -> schedule.Queued:
        said = row.submission
        try:
            hosts = chosen_hosts(self.inventory, said.include or None, said.exclude or None).hosts
        except InputError:
            hosts = ()  # a host that was there when it was handed in
        return schedule.Queued(
            run=row.run,
            hosts=tuple(host.name for host in hosts),
            world=said.world,
            priority=said.priority,
            place=row.place,
            after=said.after,
            at=said.at,
            shared=said.shared,
        )

    def give_slots(self) -> None:
        """Start those whose turn it is; the others learn why they wait."""
        waiting = queued.rows("queued")
        if not waiting:
            return
        with self.giving:
            since = time.monotonic() - FRESH_S
            self._held = {run: until for run, until in self._held.items() if until > time.monotonic()}
            decision = self.decide(waiting)
            if old := self.asked_before(since, {name for start in decision.starts for name in start.slots}):
                self.ask_hosts(old)
                decision = self.decide(waiting)
            begun = [
                start.run
                for start in decision.starts
                if start.run not in self._held
                and not self.asked_before(since, start.slots)  # else later
                and self.begin(start)
            ]
        news = {
            row.run: why
            for row in waiting
            if (why := decision.waiting.get(row.run, "")) != row.why and row.run not in self._held
        }
        if news:
            queued.explain(news)
        for run in begun:
            history.mark(run, "starting")
            row = queued.row(run)
            if row is not None and not row.cancelled:
                self.launch(row)

    def begin(self, start: schedule.Start) -> bool:
        """Write down that it has its slots. What the hosts said of them may be a moment old: they themselves
        see to it, as the run starts, that it is among those that they have."""
        rooms = {host.name: host.slots for host in self.inventory.hosts if host.name in start.slots}
        slots = dict(start.slots)
        return queued.change(start.run, "queued", "starting", slots=slots, rooms=rooms, tries=0)

    # --- hosts ---

    def _ask_on(self) -> None:
        while not self._stop.is_set():
            try:
                self.ask_hosts()
            except Exception:
                log.exception("asking the hosts")
            self._ask_now.wait(HOSTS_S)
            self._ask_now.clear()

    def ask_hosts(self, names: Collection[str] | None = None) -> None:
        """How each of them is now, or these. What one says counts from when it was asked, however long
        another takes: one that is silent holds up nobody else."""
        wanted = [host for host in self.inventory.hosts if names is None or host.name in names]
        agents = {host.name: Agent(host, self._pool.transport(host)) for host in wanted}

        def ask(name: str) -> None:
            with self._asking[name]:
                began, answer = time.monotonic(), answer_of(agents[name])
            with self._hearing:
                self.hosts = {**self.hosts, name: heard(self.hosts[name], answer, began)}

        fan_out(agents, ask)

    def ask_again(self, names: Collection[str]) -> None:
        """Those that answer, and said how they are too long ago to take their slots."""
        answering = [name for name in names if self.hosts[name].answers]
        if old := self.asked_before(time.monotonic() - FRESH_S, answering):
            self.ask_hosts(old)

    def asked_before(self, since: float, names: Collection[str]) -> set[str]:
        """Those that were last asked too long ago to give their slots away."""
        return {name for name in names if self.hosts[name].asked < since}


def planned(record: history.Record) -> dict[str, int]:
    """How many slots its newest attempt has on each host."""
    return {host.host: len(host.ranks) for host in record.plan.hosts}


def place_of(host: Host) -> tuple[str, int]:
    """What is the same of a machine in every inventory."""
    return ("", 0) if host.local else (host.address, host.port or 22)


def most(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """By host, the more of both."""
    return {name: max(one.get(name, 0), other.get(name, 0)) for name in {**one, **other}}


def what_to_do(said: str) -> str:
    """The lines after a complaint; that nothing was started is no advice."""
    lines = [line.strip() for line in said.splitlines()]
    return "\n".join(line for line in lines if line and line != NOTHING_STARTED)


def answer_of(agent: Agent) -> HostNow | RingctlError:
    try:
        return agent.slots()
    except RingctlError as error:
        return error


def heard(before: Seen, answer: HostNow | RingctlError, began: float) -> Seen:
    if began < before.asked:
        return before  # somebody else has asked since
    if isinstance(answer, RingctlError):
        return replace(before, error=answer.message, asked=began)
    return Seen(answer, time.time(), asked=began)
