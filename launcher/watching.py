"""Who looks after a run that starts again by itself: a lock, and a file that says how far it is.

Both are in ~/.ringctl/watch. Whoever launched the run holds the lock; detached, that is a process of its own.
When it is killed the file stays and the lock is free: then the next ringctl command has a new one go on.

A `restart` cannot have that lock while somebody watches the attempt that it ends: it has another, see Again.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from launcher import history
from launcher.errors import NotKept, RingctlError, StoppedEarly
from launcher.filelock import LOOK_S, is_held, try_lock
from launcher.wholefile import remove_leftovers

if TYPE_CHECKING:
    from launcher.watch import Interrupts

BEGIN_S = 20.0  # by then a watcher has said that it is there
END_S = 30.0  # and by then it has gone, once its run was stopped
# Not what is in this folder; and whoever started us in the background may have had SIGINT ignored, by which
# we are told to give up.
WATCHER = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "del sys.path[0]; from launcher.__main__ import main; main()"
)
NOT_NEEDED = (
    "stop",
    "restart",
    "watcher",
    "completion",
)  # commands that leave runs that nobody watches as they are


@dataclass(frozen=True)
class Failure:
    """How one attempt ended."""

    attempt: int
    step: float | None  # the last one that the rank which failed first had done
    error: str  # what is the same when it fails in the same way; "" for what says nothing about the program
    cause: str  # in a sentence
    counts: bool = True  # as one of those that --max-restarts allows


@dataclass(frozen=True)
class Watch:
    """How far a watched run has come."""

    run: str
    pid: int = 0  # of who watches it
    here: bool = True  # it is the launch itself, in its terminal
    doing: str = ""  # besides watching
    due: float = 0.0  # by the clock, when that is to happen; 0 for what happens now, or nobody knows when
    failures: tuple[Failure, ...] = ()


def folder() -> Path:
    return history.home() / "watch"


def file_of(run: str) -> Path:
    return folder() / f"{run}.json"


def mark_of(run: str) -> Path:
    """There if somebody has stopped the run. A file of its own: who watches the run writes the other one."""
    return folder() / f"{run}.stopped"


def read(run: str) -> Watch | None:
    return history.read_as(Watch, file_of(run))


def write(watch: Watch) -> None:
    history.write_as(watch, file_of(watch.run))


def begin(run: str) -> Watch:
    """A run that nobody was to watch; what was stopped before this is another matter."""
    mark_of(run).unlink(missing_ok=True)
    return Watch(run)


class Book:
    """The file of a run that we watch."""

    def __init__(self, watch: Watch, *, took_over: bool = False) -> None:
        self._watch = watch
        self.took_over = took_over  # from somebody who was killed, perhaps just before a start

    @property
    def failures(self) -> tuple[Failure, ...]:
        return self._watch.failures

    @property
    def stopped(self) -> bool:
        """Whether somebody has stopped the run meanwhile."""
        return mark_of(self._watch.run).exists()

    def unmet(self) -> float | None:
        """The grace of a stop that somebody has begun and does not see to any more."""
        with contextlib.suppress(OSError, ValueError), open(mark_of(self._watch.run)) as mark:
            fcntl.flock(mark, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return float(mark.read())
        return None

    def note(self, doing: str = "", failure: Failure | None = None, *, due: float = 0.0) -> None:
        before = [
            known for known in self._watch.failures if failure is None or known.attempt != failure.attempt
        ]
        failures = (*before, failure) if failure else tuple(before)
        self._watch = replace(self._watch, doing=doing, due=due, failures=failures)
        with contextlib.suppress(RingctlError):  # a full disk: who would go on after us knows less
            write(self._watch)


@contextlib.contextmanager
def watched(run: str) -> Iterator[Book | None]:
    """Watch the run in a process apart: nobody else does meanwhile. When this ends well nobody need watch it
    any more. None if that is so already: somebody else was asked to as well, and has seen it through."""
    with alone(run):
        if read(run) is None:
            yield None
            return
        yield take(run, here=False)
        forget(run)


def take(run: str, *, here: bool) -> Book:
    """The book of a run whose lock is ours, from now on in our name."""
    before = read(run) or begin(run)
    watch = replace(before, pid=os.getpid(), here=here, doing="", due=0.0)
    write(watch)
    return Book(watch, took_over=bool(before.pid))


# --- Signals that would end us -------------------------------------------------------------------

ENDING = (signal.SIGHUP, signal.SIGTERM)  # a terminal that is closed sends the one, and its shell both
Handler = Callable[[int, object], None]


def mind_signals(act: Handler, instead: Handler | signal.Handlers = signal.SIG_DFL) -> list[signal.Signals]:
    """Have them `act` so `instead` of as they did. Who has started us with one of them ignored (`nohup`)
    wants us to stay."""
    minded = [number for number in ENDING if signal.getsignal(number) == instead]
    for number in minded:
        signal.signal(number, act)
    return minded


def end_by(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # the first process of a container is not ended by that


# --- Starting it again by hand -------------------------------------------------------------------


def again_of(run: str) -> Path:
    """Locked while somebody is about to start the run again; what it says is whether that is still wanted."""
    return folder() / f"{run}.again"


WANTED, CALLED_OFF = b"1", b"0"  # of one length: what is there can be replaced on a full disk, too


class Again:
    """That somebody is about to start a run again: from before it has looked at it, and so before it ends
    anything, until it has started. Whoever stops the run meanwhile calls that off. The mark of a stop is not
    enough: it is for who watches the run, and goes with the watcher that is ended for the start."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.token = secrets.token_hex(16)  # by which the run's hosts know this start
        self.has_started = False
        self.ended_by = 0  # what is to end us, and came while that was held
        self._minded: list[signal.Signals] = []
        self._held = contextlib.ExitStack()

    def __enter__(self) -> Again:
        with contextlib.ExitStack() as failing:
            failing.enter_context(alone(self.run, "again"))
            try:
                again_of(self.run).write_bytes(WANTED)
            except OSError as error:
                words = f"cannot be written: {error.strerror}; the run is as it was"
                raise NotKept(f"{again_of(self.run)}: {words}") from None
            self._held = failing.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()
        if self.ended_by:  # it has not started; why not is told first
            atexit.register(end_by, self.ended_by)
        else:
            self.let_signals_end_us()

    def hold_signals(self) -> None:
        """An attempt is about to be ended for it: what is to end us does so once it has started, or will
        not."""
        self._minded = mind_signals(self.remember)

    def remember(self, number: int, _: object) -> None:
        self.ended_by = self.ended_by or number

    def let_signals_end_us(self) -> None:
        for number in self._minded:
            signal.signal(number, signal.SIG_DFL)
        self._minded.clear()
        if self.ended_by:
            end_by(self.ended_by)

    def started(self) -> None:
        """From here on a stop finds the new attempt."""
        self.has_started = True
        self._held.close()

    def refuse_stopped(self) -> None:
        if again_of(self.run).read_bytes() != WANTED:
            raise StoppedEarly(f"somebody has stopped run {self.run} meanwhile: it is not started")


def call_off(run: str) -> bool:
    """Whoever is about to start the run again does not; whether there is somebody. Called before a stop reads
    which attempt there is, as that is written before it is looked whether it was called off: so either is
    seen."""
    with contextlib.suppress(OSError), open(again_of(run), "r+b") as file:
        file.write(CALLED_OFF)  # where nothing can be written, no start could be written down either
    return is_announced(run)


def is_announced(run: str) -> bool:
    """Whether somebody is about to start the run again by hand."""
    return is_held(again_of(run))


def begun_by_hand(run: str, attempt: int) -> bool:
    """Whether a later attempt than this has begun; whoever is about to start one by hand is waited for. That
    is announced before an attempt is ended for it, and until the next one is written down."""
    while is_announced(run):
        time.sleep(0.1)
    record = history.read(run)
    return record is not None and record.plan.attempt > attempt


def is_called_off(run: str) -> bool:
    """Whether nobody is about to start the run again any more, a while after that was called off."""
    deadline = time.monotonic() + END_S
    while is_announced(run):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


class Keeper:
    """Holds the lock of a run that is started here and, if it `watches`, has somebody go on with it should we
    be ended: from before it is anywhere until it is over, or until somebody else watches it. SIGKILL
    leaves that to the next command."""

    def __init__(self, interrupts: Interrupts, *, watches: bool, again: Again | None = None) -> None:
        self.interrupts, self.watches, self.again = interrupts, watches, again
        self.run = again.run if again else ""
        self.book: Book | None = None
        self._held = contextlib.ExitStack()
        self._minded: list[signal.Signals] = []
        self._ended_by = 0  # the first of them that came
        self._hands_over = False  # at this moment

    def __enter__(self) -> Keeper:
        with contextlib.ExitStack() as failing:
            if self.again:
                failing.enter_context(alone(self.run))
                self.again.refuse_stopped()
                refuse_stopping(self.run)
                mark_of(self.run).unlink(missing_ok=True)
            self._held = failing.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is KeyboardInterrupt:  # between two tries: whoever pressed Ctrl-C wants none after it
            self.give_back()
        elif self.book and kind is not None:  # nobody reads what we show, say
            self._hand_over_if_possible()
        self._release_signals()
        self._held.close()

    def begin(self, run: str) -> None:
        """It is about to be started, or another than the one that was; not if it was stopped meanwhile."""
        if self.again:
            self.again.refuse_stopped()
        if run == self.run and mark_of(run).exists():
            raise StoppedEarly(f"somebody has stopped run {run} meanwhile: it is not started")
        if not self.watches:
            return
        if run != self.run:
            self.give_back()
            self._held.enter_context(alone(run))
        self.run = run
        self._minded += mind_signals(self._leave)
        self.book = take(run, here=True)

    def started(self) -> None:
        """What has come to end us since the attempt before was ended for this one does so."""
        if self.again is None:
            return
        self.again.started()
        if self.book is None:
            self.again.let_signals_end_us()
            return
        self._minded += mind_signals(self._leave, self.again.remember)
        if self.again.ended_by:
            self._leave(self.again.ended_by, None)

    def hand_over(self) -> int:
        """Have a process apart watch it; its pid, 0 if nobody need."""
        with self._ending_afterwards():
            return self._begin_watcher()

    def _hand_over_if_possible(self) -> None:
        """Else the next command has somebody watch it."""
        with self._ending_afterwards(), contextlib.suppress(OSError, RingctlError):
            self._pass_on_ctrl_c()
            self._begin_watcher()
            self._pass_on_ctrl_c()  # it may just have come

    def _begin_watcher(self) -> int:
        self.book = None
        self._held.close()
        return spawn(self.run) if self.watches else 0

    def _pass_on_ctrl_c(self) -> None:
        """The run is to be stopped, as by a `stop` that was killed, unless somebody else does so: it may have
        been counted only, and what has begun to stop the run ends with us."""
        if self.interrupts.count and not mark_of(self.run).exists():
            with giving_up(self.run, self.interrupts.grace):
                pass

    def give_back(self) -> None:
        """It was not started, or is over."""
        if self.book:
            forget(self.run)
        self.book = None
        self._release_signals()
        self._held.close()

    def _release_signals(self) -> None:
        for number in self._minded:
            signal.signal(number, signal.SIG_DFL)
        self._minded.clear()

    def _leave(self, number: int, _: object) -> None:
        """Have somebody else watch the run, and end by this signal. Others meanwhile change nothing."""
        if self._ended_by:
            return
        self._ended_by = number
        self.interrupts.hold()  # else Ctrl-C would end us in the middle of it
        signal.raise_signal(number)  # Python then also calls what a Ctrl-C that came with it is counted by
        if not self._hands_over:  # else we end after that
            self._hand_over_if_possible()

    @contextlib.contextmanager
    def _ending_afterwards(self) -> Iterator[None]:
        """The run is handed over meanwhile: a signal that is to end us does so then."""
        self._hands_over = True
        try:
            yield
        finally:
            self._release_signals()
            if self._ended_by:
                end_by(self._ended_by)


@contextlib.contextmanager
def lock(run: str, what: str = "lock") -> Iterator[bool]:
    """Whether the run's lock could be had; then it is ours meanwhile. Only who holds it may remove the file:
    else two could hold locks of two files of the same name."""
    history.make_folder(folder())
    path = folder() / f"{run}.{what}"
    descriptor = opened(path)
    try:
        while got := try_lock(descriptor):
            if is_file_of(descriptor, path):
                break
            os.close(descriptor)  # whoever held it before us has removed it
            descriptor = opened(path)
        yield got
    finally:
        os.close(descriptor)


def opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:  # a disk that has become read-only: one that is there can be held all the same
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            raise RingctlError(f"{path}: cannot be made: {error.strerror}") from None


def is_file_of(descriptor: int, path: Path) -> bool:
    """Whether this is still the file of that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def alone(run: str, what: str = "lock") -> Iterator[None]:
    """Nobody else starts this run meanwhile, or watches it. Who only looks holds the lock for a moment."""
    deadline = time.monotonic() + LOOK_S
    while True:
        with lock(run, what) as got:
            if got:
                yield
                return
        if time.monotonic() > deadline:
            raise RingctlError(f"run {run} is being started, or watched, by somebody else at this moment")
        time.sleep(0.02)


def is_watched(run: str) -> bool:
    return is_held(folder() / f"{run}.lock")


def is_about_to_start(run: str) -> bool:
    """Whether somebody waits only until the next attempt of the run may begin, or begins it."""
    watch = read(run)
    return watch is not None and bool(watch.doing) and is_watched(run)


def begins_again(run: str, attempt: int, given_up: Callable[[], bool] = lambda: False) -> bool:
    """Wait as long as somebody may start the run again: whether a later attempt than this has started. A
    launch lets go of its run before the watcher that it begins has it: nobody may have it for a moment."""
    alone_since: float | None = None
    while not given_up():
        watched = read(run) if is_watched(run) else None
        record = history.read(run)
        if record is not None and record.plan.attempt > attempt:
            if watched is None or not watched.doing:  # it is not just about to
                return watched is not None or record.end is not None
        elif watched is None:
            alone_since = alone_since or time.monotonic()
            if read(run) is None or time.monotonic() > alone_since + BEGIN_S:
                return False
        else:
            alone_since = None
        time.sleep(0.1)
    return False


def to_be_watched() -> list[str]:
    """Runs that may start again by themselves."""
    try:
        return sorted(name.removesuffix(".json") for name in os.listdir(folder()) if name.endswith(".json"))
    except OSError:
        return []


def unwatched() -> list[str]:
    """Runs that are to be watched, and are not."""
    return [run for run in to_be_watched() if not is_watched(run)]


def spawn(run: str) -> int:
    """Have a process of its own watch the run, in a session of its own; its pid, once it does."""
    history.make_folder(folder())
    with open(folder() / f"{run}.log", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", WATCHER, "--no-input", "watcher", run],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + BEGIN_S
    while time.monotonic() < deadline:
        watch = read(run)
        if watch is None or (watch.pid == process.pid and is_watched(run)):
            return process.pid
        if process.poll() is not None:
            if watch is not None and is_watched(run):
                return watch.pid  # somebody else was faster
            break
        time.sleep(0.02)
    raise RingctlError(f"run {run} has nobody who watches it; see {folder() / f'{run}.log'}")


def pick_up(command: str | None, only: Container[str] | None = None) -> list[str]:
    """Have somebody watch the runs that lost their watcher, or of these `only` some; a sentence about
    each."""
    told = []
    for run in unwatched() if command not in NOT_NEEDED else []:
        if only is not None and run not in only:
            continue
        if read(run) is None:
            told += unreadable(run)
            continue
        try:
            told.append(f"run {run} had lost its watcher; process {spawn(run)} watches it now")
        except (RingctlError, OSError) as error:
            told.append(str(error))
    return told


def unreadable(run: str) -> list[str]:
    """Nothing of a run that somebody else has seen through meanwhile; else what becomes of it now."""
    words = f"cannot be read, so nobody watches run {run}; remove that file, and `ringctl restart {run}`"
    return [f"{file_of(run)} {words}"] if file_of(run).exists() else []


def refuse_stopping(run: str) -> None:
    with contextlib.suppress(FileNotFoundError), open(mark_of(run)) as mark:
        try:
            fcntl.flock(mark, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RingctlError(f"run {run} is being stopped by somebody else at this moment") from None


@contextlib.contextmanager
def giving_up(run: str, grace: float) -> Iterator[int]:
    """Somebody stops the run: whoever watches it, the process that this yields (0 for nobody), is not to
    start it again, and whoever prepares to start it does not. Should we be killed meanwhile it sees to the
    rest: it can tell by the lock of the mark."""
    if not is_watched(run):
        yield 0
        return
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # a full disk: that it was stopped is on its hosts as well
            mark(run, grace, held)
        watch = read(run)
        yield watch.pid if watch else 0


def mark(run: str, grace: float, held: contextlib.ExitStack) -> None:
    """Whole and locked from the moment that it is there; it stays when the lock goes."""
    path = folder() / f"{run}.stopping-{os.getpid()}"  # `forget` knows its name
    with contextlib.ExitStack() as failing:
        file = failing.enter_context(open(path, "wb", opener=private))
        failing.callback(path.unlink, missing_ok=True)
        file.write(str(grace).encode())
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        path.rename(mark_of(run))
        failing.pop_all()
        held.enter_context(file)


def private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def forget(run: str) -> None:
    """Nobody need watch it any more."""
    stopping: list[Path] = []
    with contextlib.suppress(OSError):  # no descriptor to be had
        stopping = list(folder().glob(f"{run}.stopping-*"))
    for path in (*stopping, mark_of(run), file_of(run)):
        with contextlib.suppress(OSError):  # a read-only disk: whoever watches it next sees that it is over
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        remove_leftovers(file_of(run))


def wait_for_end(run: str, watcher: int) -> bool:
    """Whether nobody watches the run any more, a while after it was given up."""
    deadline = time.monotonic() + END_S
    while is_watched(run) or is_there(watcher):
        if time.monotonic() > deadline:
            return not is_watched(run)
        time.sleep(0.05)
    with lock(run) as got:  # else somebody has begun to watch it anew
        if got:
            forget(run)
    return True


def is_there(pid: int) -> bool:
    """Whether there is such a process; one that has let go of its lock is about to end."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX" and pid != os.getpid()


def sentence(run: str) -> str:
    """Who watches the run; "" for one that nobody needs to watch."""
    watch = read(run)
    if watch is None:
        there = is_watched(run) or is_announced(run)
        return "being started, or watched, by another ringctl on this machine" if there else ""
    if not is_watched(run):
        return "watched by nobody at the moment; the next ringctl command but this has somebody do it"
    who = "its launch" if watch.here else "a watcher"
    doing = f", {watch.doing}{remaining(watch.due)}" if watch.doing else ""
    return f"watched by {who}, process {watch.pid} on this machine{doing}"


def remaining(due: float) -> str:
    """How long it still is until then, at this moment; "" where nobody knows when that is."""
    return f" in {max(0.0, due - time.time()):.0f} s" if due else ""


def steady(words: str) -> str:
    """A sentence without what changes in it by the mere passing of time."""
    return re.sub(r" in \d+ s$", "", words)
