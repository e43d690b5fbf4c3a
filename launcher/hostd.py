"""The host-side supervisor: one file, standard library only, Python 3.8 and up.

It is pushed to every host and started there; nothing imports it and it imports nothing of ringctl.
Each call is `python hostd.py COMMAND` with one JSON request on stdin. The answer is on stdout after
a line that reads SENTINEL, so that whatever a login shell prints before it does no harm.

    start    make the run's folder, start the ranks detached, answer once they are under way
    follow   the run's events from a cursor on, raw, until the run is over
    runs     the state of every run on this host
    tell     that a run is about to be stopped, on all of its hosts
    stop     end a run: TERM, grace, KILL, then a sweep for whatever still carries the run's id
    stacks   have the supervisor note where each rank is, as events of the run
    slots    which runs have slots of this host, of whichever user, and its load, memory and disk
    prefork  internal: import torch once and become the ranks (runs in the ranks' own Python)

Processes of a run, and why nothing is left behind:

    warden            sub-reaper; if hostd dies, everything below falls to it, and it kills it all
    └── hostd         sub-reaper; reads the ranks' output, writes events and state, reaps; hears of the
        │             supervisors on the other hosts (hostlease.py)
        ├── rank 0    own session, parent-death signal KILL
        └── rank 1 ...
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import sys
import time

TYPE_CHECKING = False  # a type checker takes it for true; importing `typing` at run time would cost a start
if TYPE_CHECKING:
    import select
    import socket
    from collections.abc import Callable, Iterator
    from types import TracebackType
    from typing import Any

SENTINEL = b"--ringctl-hostd--\n"
SEGMENT_BYTES = 64 << 20  # a log segment is closed and never touched again once it is this long
LONGEST_LINE = 32 << 20  # a line without an end is passed on in pieces of this size
READ_BYTES = 1 << 20
PLAIN = bytes(range(0x20, 0x7F))
REQUEST_S = 60  # whoever began to ask and says no more has gone without a word
TICK_S = 0.2  # metrics are looked at this often
HEARTBEAT_S = 1.0  # state.json is written at least this often
SETTLE_S = 1.0  # after the first failure the other ranks may fail by themselves this long
STOP_SETTLE_S = 3.0  # whoever stopped the run on another host has so long to come here, too
FAILED_GRACE_S = 3.0  # then TERM, and KILL after this
WATCHDOG_S = 30.0  # ranks that made no progress for so long, and for ten of their usual steps, are looked at
USUAL_STEPS = 10
UNTOLD_TIMES = 6  # ranks that tell no steps may stand still this much longer when another host is silent
STACK_S = 0.5  # a rank writes its stack within this
MOST_FRAMES = 40
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
HELD_BYTES = 8 << 20  # events that wait for room on a full disk; ranks that say more meanwhile are ended
ROOM_BYTES = 1 << 20  # kept free on the disk while ranks run, for how they ended
KILLED = "its supervisor was killed"
TOLD_TO_END = "its supervisor was told to end (SIGTERM), and nobody had stopped the run"
ALREADY = "there is a run"  # the controller knows this beginning
NOT_STARTED = "was not started on this host"  # the controller knows these words
STOPPED_EARLY = "it was stopped while it was starting"  # the controller knows these words
SLOTS_TAKEN = "no room for it by now:"  # the controller knows this beginning
PORT_TAKEN = "the master port is taken:"  # the controller knows this beginning, and chooses another
FINAL = ("succeeded", "failed", "stopped")
EXIT_KEYS = ("state", "exit_code", "signal", "reason")
FINAL_EVENTS = (b'{"kind":"rank_exited"', b'{"kind":"host_finished"')
EVENT_KEYS = ("kind", "time", "run", "attempt", "host", "rank")  # a metrics record cannot set these


class Refused(Exception):
    """The request cannot be carried out; the message is for the user."""


# --- Processes -----------------------------------------------------------------------------------

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def prctl(option: int, value: int) -> None:
    """prctl(2); raises OSError where the kernel refuses."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as f:
        return f.read().strip()


def start_time(pid: int) -> int | None:
    """When the process was started, in clock ticks since boot; None if it is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            fields = f.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def identity(pid: int) -> dict[str, Any]:
    """What tells this process from a later one with the same pid."""
    return {"pid": pid, "start": start_time(pid), "boot": boot_id()}


def alive(who: dict[str, Any] | None) -> bool:
    """Whether the process with this identity still runs."""
    if not who or who.get("boot") != boot_id() or who.get("start") is None:
        return False
    return start_time(int(who["pid"])) == int(who["start"])


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def descendants(root: int) -> list[int]:
    """All living processes below `root`, nearest first."""
    children: dict[int, list[int]] = {}
    for pid in all_pids():
        try:
            with open(f"/proc/{pid}/stat", "rb") as f:
                fields = f.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if fields[0] not in (b"Z", b"X"):
            children.setdefault(int(fields[1]), []).append(pid)
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(0), [])
        found += below
        queue += below
    return found


def carriers(run: str, upto: int | None = None) -> list[int]:
    """All our processes whose environment carries the run's id, except this one; only those of attempts
    `upto` one, if it is given."""
    mark, attempt = b"\0RINGCTL_RUN=" + run.encode() + b"\0", re.compile(rb"\0RINGCTL_ATTEMPT=(\d+)\0")
    found = []
    for pid in all_pids():
        try:
            with open(f"/proc/{pid}/environ", "rb") as f:
                environ = b"\0" + f.read()
        except OSError:
            continue
        if mark in environ and pid != os.getpid() and start_time(pid) is not None:
            number = attempt.search(environ)
            if upto is None or number is None or int(number.group(1)) <= upto:
                found.append(pid)
    return found


def send(pid: int, number: int, group: bool = False) -> None:
    """Signal a process or its group; one that is gone already is fine."""
    try:
        if group:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def reap() -> list[tuple[int, int]]:
    """(pid, wait status) of every child that has ended."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, status))


def kill_all(find: Callable[[], list[int]], seconds: float) -> list[int]:
    """KILL what `find()` lists until it lists nothing; returns what is still there after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        reap()
        pids = find()
        if not pids or time.monotonic() > deadline:
            return list(pids)
        for pid in pids:
            send(pid, signal.SIGKILL)
        time.sleep(0.02)


# --- Files ---------------------------------------------------------------------------------------


def home_folder() -> str:
    return os.environ.get("RINGCTL_HOME") or os.path.expanduser("~/.ringctl")


def run_folder(run: str) -> str:
    return os.path.join(home_folder(), "runs", run)


def runs_here() -> list[str]:
    try:
        return sorted(os.listdir(os.path.join(home_folder(), "runs")))
    except FileNotFoundError:
        return []


def replace_file(path: str, data: bytes, durable: bool = True) -> None:
    """Put `data` at `path` so that a reader, or a crash, sees the old content or the new, never a part."""
    if durable:
        remove_leftovers(path)
    temporary = f"{path}.tmp{os.getpid()}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        try:
            write_all(fd, data)
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise
    if durable:
        sync_folder(os.path.dirname(path))


def remove_leftovers(path: str) -> None:
    """What others who were to replace this file have left beside it when they were killed."""
    folder, name = os.path.split(path)
    for other in os.listdir(folder):
        head, _, pid = other.rpartition(".tmp")
        if head == name and pid.isdigit() and start_time(int(pid)) is None:
            remove_file(os.path.join(folder, other))


def remove_file(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def keep_room(folder: str) -> None:
    """Room on the disk for how the run ends, should the disk be full by then."""
    fd = os.open(room_file(folder), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, ROOM_BYTES)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise  # a file system that can keep nothing free is not told from one that did
    finally:
        os.close(fd)


def room_file(folder: str) -> str:
    return os.path.join(folder, "room")


def sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def read_json(path: str) -> dict[str, Any] | None:
    """The file's object, or None if there is none to be read."""
    try:
        with open(path, "rb") as f:
            value = json.loads(f.read())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None  # ValueError: cut short when the machine lost power
    return value if isinstance(value, dict) else None


def read_state(run: str) -> dict[str, Any] | None:
    """The run's state here; "lost" when its supervisor is gone without having finished it."""
    state = read_json(os.path.join(run_folder(run), "state.json"))
    if state is None:
        return None
    if state["state"] not in FINAL and not alive(state["hostd"]) and not alive(state["warden"]):
        newer = read_json(os.path.join(run_folder(run), "state.json")) or state
        state = newer if newer["state"] in FINAL else dict(newer, state="lost")
    return state


def state_to_tell(run: str) -> dict[str, Any] | None:
    """The run's state here. One that cannot be read, perhaps a newer ringctl's, does not hide the others."""
    try:
        return read_state(run)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {"run": run}


def segment_name(attempt: int, segment: int) -> str:
    return f"events-{attempt}-{segment:06d}.jsonl"


def segments(folder: str) -> list[tuple[int, int]]:
    """All (attempt, segment) of a run folder, in order."""
    found = []
    for name in os.listdir(folder):
        if name.startswith("events-") and name.endswith(".jsonl"):
            attempt, _, segment = name[len("events-") : -len(".jsonl")].partition("-")
            if attempt.isdigit() and segment.isdigit():
                found.append((int(attempt), int(segment)))
    return sorted(found)


def log_exit(log: EventLog, rank: int, state: str, code: int, signal: str | None, reason: str) -> None:
    """A rank's one final event; `reason` says why it did not end by itself."""
    log.event("rank_exited", rank=rank, state=state, exit_code=code, signal=signal, reason=reason)


class EventLog:
    """The run's events as JSON lines in numbered segments that are only ever appended to."""

    def __init__(self, folder: str, attempt: int) -> None:
        self.folder = folder
        self.attempt = attempt
        mine = [s for a, s in segments(folder) if a == attempt]
        self.segment = max(mine) if mine else 0
        self.fd = -1
        self.size = 0
        self.waiting: list[memoryview] = []  # what there was no room for, in pieces of whole lines
        self.held = 0  # bytes of it
        self.torn = False  # the first of them is written in part
        self.problem: str | None = None  # why it was not written
        self.next_segment()

    def next_segment(self) -> None:
        path = os.path.join(self.folder, segment_name(self.attempt, self.segment + 1))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        fd = os.open(path, flags, 0o600)
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = fd
        self.segment += 1
        self.size = 0

    def write(self, data: bytes) -> None:
        """Append whole lines. On a full disk they wait in memory, and all later ones behind them."""
        self.waiting.append(memoryview(data))
        self.held += len(data)
        self.flush()

    def flush(self) -> bool:
        """Whether nothing waits any more, having written what there is room for."""
        while self.waiting:
            piece = self.waiting[0]
            try:
                if self.size >= SEGMENT_BYTES and not self.torn:
                    self.next_segment()
                written = os.write(self.fd, piece)
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                self.problem = error.strerror
                return False
            self.size += written
            self.held -= written
            self.torn = written < len(piece)
            self.waiting[:1] = [piece[written:]] if self.torn else []
        return True

    def finish(self) -> bool:
        """Whether all of it is written, for good."""
        try:
            if self.flush():
                os.fsync(self.fd)
                return True
        except OSError as error:  # some file systems look for room only now
            if error.errno not in NO_ROOM:
                raise
            self.problem = error.strerror
        return False

    def event(self, kind: str, /, **data: object) -> None:
        record = dict({"kind": kind, "time": round(time.time(), 6)}, **data)
        self.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")


# --- Output of a rank ----------------------------------------------------------------------------


def written_bytes(data: bytes) -> int:
    """About how long this is as JSON: what is not plain text takes up to six bytes each."""
    return len(data) + 5 * len(data.translate(None, PLAIN))


class LineSplitter:
    """Bytes in, event lines out. Ends are \\n, \\r\\n and \\r; bytes that are not UTF-8 survive as
    surrogate escapes, so text and end together give back exactly what the rank wrote."""

    ENDS = re.compile(rb"\r\n|\n|\r")

    def __init__(self, rank: int, stream: str) -> None:
        self.head = '{"kind":"line","time":%s,"rank":' + f'{rank},"stream":"{stream}","text":'
        self.pieces: list[bytes] = []  # of a line whose end has not come yet
        self.size = 0  # of those but the first, as they will be written
        self.held = False  # those pieces end in a \\r, and have done so for a tick

    def feed(self, data: bytes, now: float) -> bytes:
        """Events for all lines that `data` completes."""
        self.held = False
        if b"\n" not in data and b"\r" not in data and not self._ends_in_return():
            self.pieces.append(data)
            return self._cut_endless(now)
        data = b"".join(self.pieces) + data
        if b"\r" in data:
            return self._feed_with_returns(data, now)
        whole, _, rest = data.rpartition(b"\n")
        self.pieces = [rest] if rest else []
        head, quote = self.head % repr(now), json.encoder.encode_basestring_ascii
        lines = [head + quote(line.decode("utf-8", "surrogateescape")) + "}\n" for line in whole.split(b"\n")]
        return "".join(lines).encode("ascii")

    def flush(self, now: float, at_end: bool) -> bytes:
        """A line that has waited behind a carriage return for a whole tick; `at_end`, whatever there is."""
        ends_in_return = self._ends_in_return()
        if not self.pieces or not (at_end or (ends_in_return and self.held)):
            self.held = ends_in_return
            return b""
        text = b"".join(self.pieces)
        self.pieces = []
        return self._event(text[:-1], "\r", now) if ends_in_return else self._event(text, "", now)

    def _ends_in_return(self) -> bool:
        return bool(self.pieces) and self.pieces[-1].endswith(b"\r")

    def _cut_endless(self, now: float) -> bytes:
        self.size = (self.size if len(self.pieces) > 2 else 0) + written_bytes(self.pieces[-1])
        if self.size <= LONGEST_LINE:
            return b""
        text = b"".join(self.pieces)
        self.pieces = []
        return self._event(text, "", now)

    def _feed_with_returns(self, data: bytes, now: float) -> bytes:
        out, start = [], 0
        for match in self.ENDS.finditer(data):
            if match.group() == b"\r" and match.end() == len(data):
                break  # a \\n may follow in the next piece
            out.append(self._event(data[start : match.start()], match.group().decode(), now))
            start = match.end()
        self.pieces = [data[start:]] if start < len(data) else []
        return b"".join(out)

    def _event(self, text: bytes, end: str, now: float) -> bytes:
        quoted = json.dumps(text.decode("utf-8", "surrogateescape"))
        tail = "" if end == "\n" else f',"end":{json.dumps(end)}'
        return (self.head % repr(now) + quoted + tail + "}\n").encode("ascii")


class MetricsTail:
    """New records of a rank's metrics file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.offset = 0

    def size(self) -> int:
        try:
            return os.stat(self.path).st_size
        except OSError:
            return 0

    def read(self) -> list[dict[str, Any]]:
        """The records added since the last call; what is not a JSON object is left out."""
        try:
            with open(self.path, "rb") as f:
                f.seek(self.offset)
                data = f.read(READ_BYTES)
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        if not whole and len(data) == READ_BYTES:
            whole = data  # no record is a megabyte long: skip the garbage
        self.offset += len(whole)
        records = []
        for line in whole.splitlines():
            try:
                record = plain(json.loads(line))
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                records.append({k: v for k, v in record.items() if k not in EVENT_KEYS})
        return records


def plain(value: Any) -> Any:
    """Without NaN and infinities, which JSON does not have: they become "nan", "inf", "-inf"."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list):
        return [plain(part) for part in value]
    return str(value) if isinstance(value, float) and not -1e308 <= value <= 1e308 else value


# --- The environment of the ranks ----------------------------------------------------------------

CONDA_BASES = """
    ~/miniconda3 ~/anaconda3 ~/miniforge3 ~/mambaforge ~/miniconda ~/anaconda ~/miniforge ~/conda ~/.conda
    ~/micromamba ~/.local/share/mamba ~/.micromamba /opt/conda /opt/miniconda3 /opt/anaconda3 /opt/miniforge3
    /opt/mambaforge /opt/miniconda /opt/anaconda /usr/local/miniconda3 /usr/local/anaconda3
    /usr/local/miniforge3 /usr/share/miniconda
""".split()  # noqa: SIM905 - reads better than twenty quoted lines
CONDA_TOOLS = ("conda", "mamba", "micromamba")
CONDA_UNSET = "***unset***"  # what conda writes for a variable that was set and is not any more
LOGIN_S = 10.0  # a login shell that takes longer waits for something
ACTIVATION_S = 30.0  # with two logins still within what a controller waits for a start
OF_THE_SHELL = ("_", "PWD", "OLDPWD", "SHLVL")  # what a shell sets for itself
STALE = ("TORCHELASTIC_", "GROUP_", "ROLE_", "PET_", "RINGCTL_")


def clean_environ(environ: dict[str, str]) -> dict[str, str]:
    """Without what another launcher, or another run of ours, left in it; our home folder stays."""
    return {k: v for k, v in environ.items() if k == "RINGCTL_HOME" or not k.startswith(STALE)}


def find_program(name: str, path: str, cwd: str) -> str | None:
    """The executable that a shell in `cwd` would start for `name`."""
    places = [""] if "/" in name else path.split(":")
    for place in places:
        candidate = os.path.join(cwd, place, os.path.expanduser(name))
        if os.path.isfile(candidate) and os.access(candidate, os.X_OK):
            return candidate
    return None


def with_python(environ: dict[str, str], python: str) -> dict[str, str]:
    path = os.path.dirname(python) + ":" + environ.get("PATH", os.defpath)
    return {k: v for k, v in dict(environ, PATH=path).items() if k != "PYTHONHOME"}


def recorded_prefixes() -> list[str]:
    """Environments that conda, mamba and micromamba have noted for this user, wherever they are."""
    try:
        with open(os.path.expanduser("~/.conda/environments.txt")) as f:
            return [line.strip() for line in f if line.strip()]
    except (OSError, ValueError):
        return []


def conda_bases(environ: dict[str, str]) -> list[str]:
    """Folders that may have conda environments below `envs/`, the most telling first."""
    path = environ.get("PATH", os.defpath)
    tools = [environ.get("CONDA_EXE"), environ.get("MAMBA_EXE")]
    tools += [find_program(name, path, "/") for name in CONDA_TOOLS]
    bases = [os.path.dirname(os.path.dirname(os.path.realpath(tool))) for tool in tools if tool]
    for prefix in [environ.get("MAMBA_ROOT_PREFIX"), environ.get("CONDA_PREFIX")] + recorded_prefixes():
        if prefix:
            above, folder = os.path.split(os.path.dirname(prefix))
            bases.append(above if folder == "envs" else prefix)
    return bases + [os.path.expanduser(base) for base in CONDA_BASES]


def named_prefix(name: str, environ: dict[str, str]) -> str | None:
    """The folder of a conda environment, by what `environ` and the user's records tell."""
    bases = conda_bases(environ)
    prefixes = bases if name == "base" else [os.path.join(base, "envs", name) for base in bases]
    for prefix in prefixes + [p for p in recorded_prefixes() if os.path.basename(p) == name]:
        if has_python(prefix) and os.path.isdir(os.path.join(prefix, "conda-meta")):
            return prefix
    return None


def has_python(prefix: str) -> bool:
    return os.path.isfile(os.path.join(prefix, "bin", "python"))


def made_venv(name: str) -> str | None:
    """What `ringctl env create` made where there is no conda. The link's target: a newer one replaces the
    link, and a run stays with what it started in."""
    prefix = os.path.realpath(os.path.join(home_folder(), "venvs", name))
    return prefix if has_python(prefix) else None


def env_record(name: str) -> str:
    """Where `ringctl env create` notes how far it came."""
    return os.path.join(home_folder(), "envs", name, "record.json")


def find_prefix(name: str) -> str | None:
    """An environment by its name. Login shells come last: they take time, and may do anything."""
    found = named_prefix(name, dict(os.environ)) or made_venv(name)
    logins = login_environs() if found is None else iter(())
    return found or next(filter(None, (named_prefix(name, environ) for environ in logins)), None)


def conda_prefix(name: str) -> str:
    """The folder of the environment that `{conda: NAME}` or `{conda: PATH}` means, without conda on PATH."""
    if "/" in name:
        prefix = os.path.expanduser(name)
        if not has_python(prefix):
            raise Refused(f"there is no conda environment at {prefix}")
        return prefix
    if (read_json(env_record(name)) or {}).get("state") == "creating":
        raise Refused(f"the environment {name!r} on this host is not finished; repeat: ringctl env create")
    found = find_prefix(name)
    if found is None:
        raise Refused(f"there is no conda environment {name!r} on this host; create it: ringctl env create")
    return found


def activate(spec: dict[str, str] | None, environ: dict[str, str]) -> dict[str, str]:
    """The environment of a process inside conda / venv / python; None leaves it as it is."""
    if spec is None:
        return environ
    value = os.path.expanduser(spec["value"])
    if spec["kind"] == "python":
        python = find_program(value, environ.get("PATH", os.defpath), os.getcwd())
        if python is None:
            raise Refused(f"there is no Python at {value}")
        return with_python(environ, python)
    if spec["kind"] == "venv":
        if not has_python(value):
            raise Refused(f"there is no virtual environment at {value}")
        return inside_venv(environ, value)
    prefix = conda_prefix(spec["value"])
    if not os.path.isdir(os.path.join(prefix, "conda-meta")):
        return inside_venv(environ, prefix)
    inside = with_python(environ, os.path.join(prefix, "bin", "python"))
    inside.update(CONDA_PREFIX=prefix, CONDA_DEFAULT_ENV=spec["value"], CONDA_SHLVL="1")
    inside.update(conda_variables(prefix))
    return run_activation_scripts(prefix, inside)


def inside_venv(environ: dict[str, str], prefix: str) -> dict[str, str]:
    return dict(with_python(environ, os.path.join(prefix, "bin", "python")), VIRTUAL_ENV=prefix)


def conda_variables(prefix: str) -> dict[str, str]:
    """What packages, and then `conda env config vars`, set in an environment."""
    import glob

    found: dict[str, Any] = {}
    for path in sorted(glob.glob(os.path.join(glob.escape(prefix), "etc/conda/env_vars.d/*"))):
        found.update(read_json(path) or {})
    found.update((read_json(os.path.join(prefix, "conda-meta", "state")) or {}).get("env_vars") or {})
    return {k: str(v) for k, v in found.items() if k != "PATH" and v != CONDA_UNSET}


def run_activation_scripts(prefix: str, environ: dict[str, str]) -> dict[str, str]:
    """What the environment is after the packages' own activate.d scripts."""
    import glob

    scripts = sorted(glob.glob(os.path.join(glob.escape(prefix), "etc/conda/activate.d/*.sh")))
    if not scripts:
        return environ
    shell = find_program("bash", environ["PATH"], "/") or "/bin/sh"
    code = 'for f in "$@"; do echo "$f" >&2; . "$f" >/dev/null; done; printf %s "$0"; env -0'
    inside, said = shell_environ([shell, "-c", code, SENTINEL.decode()] + scripts, environ, ACTIVATION_S)
    if inside is None:
        last = max((said.rfind(script), script) for script in scripts)[1]
        raise Refused(f"{last} did not come to its end; it said: {said.rpartition(last)[2].strip()[-300:]}")
    own = {k: v for k, v in inside.items() if k not in OF_THE_SHELL}
    return dict(own, **{k: environ[k] for k in OF_THE_SHELL if k in environ})


def login_environs() -> Iterator[dict[str, str]]:
    """What the user has after logging in by hand: conda's set-up often sits behind .bashrc's interactive
    guard. First as the login shell sees it, then as bash does that is started in a terminal."""
    path = os.environ.get("PATH", os.defpath)
    shell = os.environ.get("SHELL") or "/bin/sh"
    attempts = [[shell, "-ic" if shell.endswith("csh") else "-lic"]]
    bash = find_program("bash", path, "/")
    attempts += [[bash, "-ic"]] if bash else []
    for start in attempts:
        command = f"echo {SENTINEL.decode().strip()}; env -0"  # the same to every shell
        environ, _ = shell_environ(start + [command], dict(os.environ, TERM="dumb"), LOGIN_S)
        if environ is not None:
            yield environ


def has_ended(child: int) -> bool:
    """Whether a child has, without reaping it: until then its number, and its group's, are nobody else's."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def shell_environ(
    argv: list[str], environ: dict[str, str], seconds: float
) -> tuple[dict[str, str] | None, str]:
    """(environment, stderr) of a shell whose commands end with printing SENTINEL and `env -0`; None if they
    did not get there in time. Its output goes to memory, which nobody waits for: what a .bashrc leaves in
    the background cannot keep us, and ends with the shell."""
    import subprocess

    with os.fdopen(os.memfd_create("out"), "rb") as out, os.fdopen(os.memfd_create("err"), "rb") as err:
        try:
            process = subprocess.Popen(
                argv, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
        except OSError as error:
            return None, f"{argv[0]}: {error.strerror}"
        deadline = time.monotonic() + seconds
        while not has_ended(process.pid) and time.monotonic() < deadline:
            time.sleep(0.005)
        send(process.pid, signal.SIGKILL, group=True)
        process.wait()
        text, said = (os.pread(f.fileno(), os.fstat(f.fileno()).st_size, 0) for f in (out, err))
    _, found, after = text.rpartition(SENTINEL)
    pairs = after.decode("utf-8", "surrogateescape").split("\0")
    after_it = dict(pair.partition("=")[::2] for pair in pairs if "=" in pair)
    return after_it if found else None, said.decode(errors="replace")


# --- Where a rank is -----------------------------------------------------------------------------

STACK_SIGNAL = signal.SIGRTMIN + 9  # programs have their own uses for SIGUSR1; the trainer knows this one
THREAD = re.compile(r"^(Current thread|Thread|Stack) ?\S* ?.*\(most recent call first\):$")
STACK_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


def stack_file(metrics: str) -> str:
    """Where a rank writes its stack when asked; that it is there says that the rank knows how to."""
    return metrics + ".stacks"


def register_stacks(metrics: str) -> None:
    """In the rank: write all threads' stacks to its file when asked, even in the middle of a C function."""
    import faulthandler

    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
    try:
        fd = os.open(stack_file(metrics), flags, 0o600)
    except OSError:
        return  # a full disk: the rank runs all the same
    faulthandler.register(STACK_SIGNAL, file=fd, all_threads=True, chain=False)


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for a signal that would kill it otherwise."""
    try:
        with open(f"/proc/{pid}/status") as f:
            caught = next((line for line in f if line.startswith("SigCgt:")), "SigCgt: 0")
    except OSError:
        return False
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def cpu_and_state(pid: int) -> tuple[int, str]:
    """Clock ticks of processor time that a process has used, and its state: R, S, D, T."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            fields = f.read().rpartition(b")")[2].split()
    except OSError:
        return 0, ""
    return int(fields[11]) + int(fields[12]), fields[0].decode()


def main_stack(dump: str) -> list[tuple[str, int, str]]:
    """(file, line, function) of the main thread in a dump of faulthandler's, innermost first."""
    threads: list[tuple[bool, list[tuple[str, int, str]]]] = []
    for line in dump.splitlines():
        thread, frame = THREAD.match(line), STACK_FRAME.match(line)
        if thread:
            threads.append((thread.group(1) != "Thread", []))
        elif frame and threads:
            threads[-1][1].append((frame.group(1), int(frame.group(2)), frame.group(3)))
    # The kernel gives a signal to the main thread, so that is the current one; else it is the oldest.
    current = [frames for is_current, frames in threads if is_current and frames]
    return (current or [frames for _, frames in threads] or [[]])[-1][:MOST_FRAMES]


def source_line(path: str, number: int) -> str:
    import linecache

    return linecache.getline(path, number).strip()[:160]


def oom_kills() -> int:
    """How many processes the kernel has killed for want of memory: in our control group, else at all."""
    try:
        with open("/proc/self/cgroup") as f:
            groups = [line.rstrip("\n").split(":", 2) for line in f]
    except OSError:
        groups = []
    places = [f"/sys/fs/cgroup{path}/memory.events" for _, names, path in groups if not names]
    places += [
        f"/sys/fs/cgroup/memory{path}/memory.oom_control"
        for _, names, path in groups
        if "memory" in names.split(",")
    ]
    for place in places + ["/proc/vmstat"]:
        try:
            with open(place) as f:
                counts = dict(line.split()[:2] for line in f)
        except (OSError, ValueError):
            continue
        if "oom_kill" in counts:
            return int(counts["oom_kill"])
    return 0


class Progress:
    """When a rank last got on, by its steps if it tells them, else by what it prints."""

    def __init__(self, patience: str) -> None:
        try:
            self.least = float(patience or WATCHDOG_S)
        except ValueError:
            self.least = WATCHDOG_S
        self.at = time.monotonic()
        self.usual = 0.0  # seconds between two signs of progress, over the last few
        self.signs = 0
        self.step: object = None

    def made(self) -> None:
        now = time.monotonic()
        new = 0.2 if self.signs > 1 else 1.0  # how long it took to begin says nothing once there is more
        self.usual = (1.0 - new) * self.usual + new * (now - self.at)
        self.at = now
        self.signs += 1

    def printed(self) -> None:
        if self.step is None:
            self.made()

    def stepped(self, record: dict[str, Any]) -> bool:
        """Whether this metrics record tells of another step than the one before."""
        step = record.get("step")
        if step is None or step == self.step:
            return False
        self.step = step
        self.made()
        return True

    def stood(self, lease: float, silence: float) -> bool:
        """Whether there was none for as long as the lease, and for ten usual steps. Where no steps are told,
        nobody knows: printed lines may mean nothing, so another host's silence has to be a long one."""
        if self.step is None:
            return silence > UNTOLD_TIMES * lease
        return time.monotonic() - self.at > max(lease, USUAL_STEPS * self.usual)

    def lacks(self, times: float) -> bool:
        """Whether there was none for `times` as long as one waits for it; never if that is 0 or less."""
        patience = max(self.least, USUAL_STEPS * self.usual)
        return self.least > 0 and time.monotonic() - self.at > times * patience


# --- Starting ranks ------------------------------------------------------------------------------


class PythonCommand:
    """`python FLAGS script.py ARGS` or `python FLAGS -m module ARGS`, taken apart."""

    def __init__(self, flags: list[str], target: str, module: bool, args: list[str]) -> None:
        self.flags, self.target, self.module, self.args = flags, target, module, args


def python_command(argv: list[str]) -> PythonCommand | None:
    """None for what is not Python, or what only a real start of Python can do (-c, -i, stdin, a folder)."""
    name = os.path.basename(argv[0])
    if not (
        (name.startswith("python") and name[len("python") :].replace(".", "").isdigit()) or name == "python"
    ):
        return None
    i = 1
    while i < len(argv):
        word = argv[i]
        if word in ("-W", "-X"):
            i += 2
        elif word == "-m":
            return PythonCommand(argv[1:i], argv[i + 1], True, argv[i + 2 :]) if i + 1 < len(argv) else None
        elif word.startswith(("-W", "-X")) or (
            word.startswith("-") and word[1:] and set(word[1:]) <= set("bBdEIOPqsSuv")
        ):
            i += 1
        elif word.startswith("-") or not word.endswith(".py"):
            return None
        else:
            return PythonCommand(argv[1:i], word, False, argv[i + 1 :])
    return None


class Rank:
    """One rank of this host: its pipes, its process, how it ended."""

    def __init__(self, spec: dict[str, Any], patience: str = "") -> None:
        self.number = int(spec["rank"])
        self.local_rank = int(spec["local_rank"])
        self.argv = [str(word) for word in spec["argv"]]
        self.env = dict(spec["env"])
        self.metrics = MetricsTail(str(self.env["RINGCTL_METRICS"]))
        self.progress = Progress(patience)
        self.ticks = -1  # processor time when it was asked for its stack; -1 when it was not
        self.splitters: dict[int, LineSplitter] = {}
        self.write_ends: list[int] = []
        self.pid = 0
        self.start: int | None = None
        self.status: int | None = None
        self.state = "waiting"
        self.reason = ""
        self.seen = time.time()
        self.last: dict[str, Any] = {}

    def open_pipes(self) -> None:
        import fcntl

        for stream in ("out", "err"):
            read, write = os.pipe()
            os.set_blocking(read, False)
            try:
                fcntl.fcntl(write, 1031, READ_BYTES)  # F_SETPIPE_SZ, named only from Python 3.10 on
            except OSError:
                pass  # the user's share of pipe memory is used up; the usual size does as well
            self.splitters[read] = LineSplitter(self.number, stream)
            self.write_ends.append(write)

    @property
    def ended(self) -> bool:
        return self.status is not None

    def close_write_ends(self) -> None:
        for fd in self.write_ends:
            os.close(fd)
        self.write_ends = []

    def to_json(self) -> dict[str, Any]:
        return {
            "rank": self.number, "pid": self.pid or None, "start": self.start, "state": self.state,
            "exit_code": None if self.status is None else exit_code(self.status),
            "signal": None if self.status is None else signal_name(self.status),
            "reason": self.reason, "seen": self.seen, "metric": self.last,
        }  # fmt: skip


def exit_code(status: int) -> int:
    """A wait status as Python's subprocess gives it: -9 for SIGKILL."""
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def signal_name(status: int) -> str | None:
    if not os.WIFSIGNALED(status):
        return None
    try:
        return signal.Signals(os.WTERMSIG(status)).name
    except ValueError:
        return f"signal {os.WTERMSIG(status)}"


def become_rank_process(supervisor: int) -> None:
    """In the new process: own session, and dead as soon as the supervisor is."""
    os.setsid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)  # it died before the line above took effect
    raise_open_files()


def raise_open_files() -> None:
    """As many open files as the host allows: the usual soft limit is low for a connection to each peer."""
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        pass  # the host has lowered what it allows since: the rank keeps the limit it has


def copy_code(digest: str, target: str) -> None:
    """A run's own copy of a snapshot: what it writes there stays with the run, and the snapshot as it was."""
    import shutil

    if not digest:
        os.mkdir(target, 0o700)
        return
    source = os.path.join(home_folder(), "code", digest)
    if not os.path.isdir(source):
        raise Refused("the code of this run is not on this host; push it again")
    shutil.copytree(source, target, symlinks=True)
    for folder, _, files in os.walk(target):
        os.chmod(folder, 0o700)
        for path in [os.path.join(folder, name) for name in files]:
            if not os.path.islink(path):
                os.chmod(path, os.stat(path).st_mode | 0o200)


def hold_port(port: int, run: str) -> socket.socket | None:
    """Refuse to start ranks whose master port somebody has taken since it was chosen. A run has its port from
    here on, though its ranks do not listen yet: to other runs it is taken for as long as what this returns is
    open. That is a name, not a file, so that it is gone when the supervisor is, and means this host alone."""
    import socket

    if not port:
        return None
    held = socket.socket(socket.AF_UNIX)
    try:
        held.bind(f"\0ringctl master port {port}")
    except OSError:
        others = [name for name in runs_here() if name != run and holds(name, port)]
        who = f"run {others[0]}" if others else "a run of another user"
        raise Refused(f"{PORT_TAKEN} {port}, by {who}") from None
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("", port))
        except OSError as error:
            raise Refused(f"{PORT_TAKEN} {port}: {error.strerror}") from None
    return held


def holds(run: str, port: int) -> bool:
    """Whether that run is going on here and has this master port."""
    plan, state = read_json(os.path.join(run_folder(run), "plan.json")), read_state(run)
    return bool(plan and plan.get("listens") == port and state and state["state"] in ("starting", "running"))


def rank_program(rank: Rank, env: dict[str, str], cwd: str) -> str:
    """The executable of the rank's command. Where there is only a python3, `python` means that."""
    name, path = rank.argv[0], env.get("PATH", os.defpath)
    found = find_program(name, path, cwd) or (
        find_program("python3", path, cwd) if name == "python" else None
    )
    if found is None:
        raise Refused(f"there is no program {name!r} on this host")
    return found


def start_plain(rank: Rank, environ: dict[str, str], cwd: str) -> int:
    """Start the rank as a process of its own."""
    import subprocess

    env = dict(environ, **rank.env)
    program = rank_program(rank, env, cwd)
    supervisor = os.getpid()
    try:
        process = subprocess.Popen(
            [program] + rank.argv[1:], env=env, cwd=cwd, stdin=subprocess.DEVNULL,
            stdout=rank.write_ends[0], stderr=rank.write_ends[1],
            preexec_fn=lambda: become_rank_process(supervisor),
        )  # fmt: skip
    except OSError as error:
        raise Refused(f"rank {rank.number}: cannot start {program}: {error.strerror}") from None
    process.returncode = 0  # reaped by the supervisor's own loop, not by Popen
    return process.pid


def start_zygote(
    ranks: list[Rank], command: PythonCommand, environ: dict[str, str], cwd: str
) -> tuple[int, int]:
    """Start the process that imports torch and forks the ranks: its pid, and where it reports their pids."""
    import subprocess

    common = {k: v for k, v in ranks[0].env.items() if all(r.env.get(k) == v for r in ranks)}
    env = dict(environ, **common)
    python = rank_program(ranks[0], env, cwd)
    report_read, report_write = os.pipe()
    request = {
        "supervisor": os.getpid(), "report": report_write, "target": command.target, "module": command.module,
        "args": command.args, "preload": len(ranks) > 1,
        "ranks": [
            {"rank": r.number, "argv": r.argv, "env": r.env, "fds": r.write_ends} for r in ranks
        ],
    }  # fmt: skip
    supervisor = os.getpid()
    process = subprocess.Popen(
        [python] + command.flags + [os.path.abspath(__file__), "prefork"],
        env=env, cwd=cwd, stdin=subprocess.PIPE,
        stdout=ranks[0].write_ends[0], stderr=ranks[0].write_ends[1],
        pass_fds=[report_write] + [fd for r in ranks for fd in r.write_ends],
        preexec_fn=lambda: become_rank_process(supervisor),
    )  # fmt: skip
    os.close(report_write)
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(request).encode())
        process.stdin.close()
    except BrokenPipeError:
        pass  # it died at once; its exit status says why
    process.returncode = 0  # reaped by the supervisor's own loop, not by Popen
    return process.pid, report_read


# --- The supervisor ------------------------------------------------------------------------------


class Supervisor:
    """Starts a host's ranks and sees them to their end."""

    def __init__(self, folder: str, plan: dict[str, Any], warden: dict[str, Any]) -> None:
        self.folder, self.plan, self.warden = folder, plan, warden
        self.log = EventLog(folder, int(plan["attempt"]))
        self.ranks = [Rank(spec, str(plan.get("watchdog") or "")) for spec in plan["ranks"]]
        self.readers: dict[int, tuple[Rank, LineSplitter]] = {}
        self.poll: select.poll
        self.orphans: dict[int, int] = {}  # ended before we were told whose pid it was
        self.port: socket.socket | None = None  # open as long as the master port is ours
        self.zygote = 0  # the process that imports torch and forks the ranks; 0 for none
        self.zygote_status: int | None = None
        self.report_fd = -1
        self.report = b""
        self.state = "starting"
        self.started = time.time()
        self.ended: float | None = None
        self.ending = ""  # why the ranks that still run are being ended
        self.term_at: float | None = None
        self.kill_at: float | None = None
        self.stop_requested = False
        self.asked = False  # somebody has told us to end
        self.stop_told = False  # the other hosts know of it
        self.failed: Rank | None = None
        self.next_heartbeat = 0.0
        self.oom_kills = oom_kills()
        self.wants_stacks = False
        self.stacks_at: float | None = None  # when what the ranks wrote is read
        self.looks = 0  # how often the ranks were looked at since they last got on
        self.lease: Any = None  # hostlease.Lease, where there are other hosts
        self.lease_fd = -1
        self.word_seen: float | None = None  # when that it is to be stopped was seen to be written down

    # starting

    def start(self) -> None:
        """Start all ranks, or raise Refused with none of them left."""
        environ = activate(self.plan["env"], clean_environ(dict(os.environ)))
        cwd = self.make_folder()
        self.port = hold_port(int(self.plan.get("listens") or 0), str(self.plan["run"]))
        if self.plan.get("lease"):
            from launcher.hostlease import Lease

            self.lease = Lease(self.plan["lease"], str(self.plan["host"]))
            self.lease_fd = self.lease.open()
        for rank in self.ranks:
            os.makedirs(os.path.dirname(rank.metrics.path), mode=0o700, exist_ok=True)
            os.makedirs(rank.env["RINGCTL_CHECKPOINTS"], mode=0o700, exist_ok=True)
            rank.open_pipes()
            self.readers.update({fd: (rank, splitter) for fd, splitter in rank.splitters.items()})
        command = python_command(self.ranks[0].argv) if self.plan["prefork"] else None
        if command is not None:
            self.zygote, self.report_fd = start_zygote(self.ranks, command, environ, cwd)
            os.set_blocking(self.report_fd, False)
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
            self.rank_started(rank, start_plain(rank, environ, cwd))
            for fd, _ in heard.poll(0):
                self.read_output(fd)

    def make_folder(self) -> str:
        """Where the ranks run: the run's own copy of its code, or wherever the plan says."""
        own = os.path.join(self.folder, "work")
        if not os.path.isdir(own):
            copy_code(str(self.plan.get("code") or ""), own)
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
        signal.signal(signal.SIGTERM, self.on_terminate)
        signal.signal(signal.SIGINT, self.on_terminate)
        signal.signal(signal.SIGUSR1, self.on_look)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self.poll = select.poll()
        # The zygote's report comes before the pipes, so that a rank is known before its first line.
        others = [fd for fd in (self.report_fd, self.lease_fd) if fd >= 0]
        for fd in [wake_read] + others + list(self.readers):
            self.poll.register(fd, select.POLLIN)
        next_tick = 0.0
        while any(rank.status is None for rank in self.ranks):
            for fd, _ in self.poll.poll(TICK_S * 1000):
                if fd == wake_read:
                    os.read(wake_read, 4096)
                elif fd == self.report_fd:
                    self.read_report()
                elif fd == self.lease_fd:
                    self.lease.receive(time.monotonic())
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

    def on_terminate(self, number: int, _: object) -> None:
        """SIGINT is that of a stop whose word could not be written down; without a word, SIGTERM comes from
        somebody else: the host is shut down, say."""
        self.end_as_told(stop_word(self.folder, int(self.plan["attempt"])) or {}, number)

    def end_as_told(self, request: dict[str, Any], number: int = signal.SIGTERM) -> None:
        now = time.monotonic()
        orphaned = not request and os.getppid() != self.warden["pid"]
        first = not self.ending
        self.asked = True
        unasked = KILLED if orphaned else "stopped" if number == signal.SIGINT else TOLD_TO_END
        self.ending = self.ending or (str(request.get("reason") or "stopped") if request else unasked)
        self.stop_requested = self.ending == "stopped"
        self.term_at = now
        if first and not orphaned and not self.stop_requested:  # a rank elsewhere failed: where are ours?
            self.wants_stacks, self.term_at = True, now + STACK_S + 2 * TICK_S
        kill_at = self.term_at + float(request.get("grace", FAILED_GRACE_S))
        self.kill_at = kill_at if self.kill_at is None else min(kill_at, self.kill_at)

    def tick(self) -> None:
        """What is done now and then: metrics, held-back lines, ending what must end, heartbeat."""
        now, clock = time.time(), time.monotonic()
        for rank in self.ranks:
            self.read_metrics(rank)
            for splitter in rank.splitters.values():
                out = splitter.flush(now, at_end=False)
                if out:
                    self.log.write(out)
        self.watch_progress(clock)
        self.mind_the_disk(clock)
        if self.lease is not None:
            self.lease.beat(clock)
            self.mind_the_others(clock)
        if self.term_at is not None and clock >= self.term_at:
            self.signal_ranks(signal.SIGTERM)
            self.term_at = None
        if self.kill_at is not None and clock >= self.kill_at:
            self.signal_ranks(signal.SIGKILL)
            self.kill_at = clock + TICK_S
        if clock >= self.next_heartbeat:
            self.next_heartbeat = clock + HEARTBEAT_S
            self.mind_the_word(STOP_SETTLE_S)
            self.save(durable=False)

    def signal_ranks(self, number: int) -> None:
        if self.zygote and self.zygote_status is None:
            send(self.zygote, number, group=True)
        for rank in self.ranks:
            if rank.status is None:
                rank.reason = rank.reason or self.ending
                if rank.pid:
                    send(rank.pid, number, group=True)

    def mind_the_others(self, clock: float) -> None:
        """End the ranks when the run has ended elsewhere, and when another host is silent and the ranks stand
        still, for want of it. As long as they get on they are left alone."""
        over, silent = self.lease.over, self.lease.silent(clock)
        if self.stop_requested and not self.stop_told:  # before the ranks end: theirs fail for want of ours
            self.stop_told = True
            self.lease.bye("stopped", "stopped")
        if self.ending:
            return
        if over:
            self.stop_requested = over["state"] == "stopped"
            self.end_ranks(str(over["reason"]), clock + (STOP_SETTLE_S if self.stop_requested else SETTLE_S))
        elif silent:
            host, seconds = max(silent.items(), key=lambda item: item[1])
            going = [rank for rank in self.ranks if not rank.ended]
            if all(rank.progress.stood(self.lease.seconds, seconds) for rank in going):
                reason = f"{host} was not heard of for {seconds:.0f} s, and the ranks stood still"
                self.end_ranks(reason, clock + STACK_S + 2 * TICK_S)

    def mind_the_disk(self, clock: float) -> None:
        """Try again to write what waits for room. Ranks that say more than can wait are ended."""
        if self.log.flush() or self.log.held <= HELD_BYTES or self.ending:
            return
        self.end_ranks(f"{self.plan['host']}: the log cannot be written: {self.log.problem}", clock)
        if self.lease is not None:
            self.lease.bye("failed", self.ending)

    def end_ranks(self, reason: str, term_at: float) -> None:
        """TERM then, KILL some time later; where they are until then is noted."""
        self.ending, self.wants_stacks = reason, True
        self.term_at, self.kill_at = term_at, term_at + FAILED_GRACE_S

    # where the ranks are

    def on_look(self, *_: object) -> None:
        self.wants_stacks = True

    def watch_progress(self, clock: float) -> None:
        """Note where the ranks are when somebody asks, and when one of them has not got on for long: then
        again after four times as long, and so on."""
        running = [rank for rank in self.ranks if rank.pid and rank.status is None]
        if self.stacks_at is not None:
            if clock >= self.stacks_at:
                self.stacks_at = None
                self.note_stacks(running)
        elif self.wants_stacks:
            self.wants_stacks = False
            self.ask_for_stacks(running, clock)
        elif not self.ending and any(rank.progress.lacks(4**self.looks) for rank in running):
            self.looks += 1
            self.ask_for_stacks(running, clock)

    def ask_for_stacks(self, ranks: list[Rank], clock: float) -> None:
        """The signal to those that write their stack then, and to nobody whom it would kill."""
        self.stacks_at = clock + STACK_S
        for rank in ranks:
            rank.ticks = cpu_and_state(rank.pid)[0]
            path = stack_file(rank.metrics.path)
            if os.path.exists(path) and catches(rank.pid, STACK_SIGNAL):
                os.truncate(path, 0)
                send(rank.pid, STACK_SIGNAL)

    def note_stacks(self, ranks: list[Rank]) -> None:
        """Write down what they wrote, and whether they were using the processor."""
        for rank in ranks:
            if rank.ticks < 0:
                continue
            ticks, state = cpu_and_state(rank.pid)
            try:
                with open(stack_file(rank.metrics.path), errors="replace") as f:
                    stack = main_stack(f.read(READ_BYTES))
            except OSError:
                stack = []
            frames = [[path, line, name, source_line(path, line)] for path, line, name in stack]
            busy = (ticks - rank.ticks) / os.sysconf("SC_CLK_TCK") > 0.2 * STACK_S
            rank.ticks = -1
            self.log.event("stack", rank=rank.number, frames=frames, state=state, busy=busy)

    # what comes in

    def read_output(self, fd: int) -> bool:
        """Take what a pipe holds; False once it is at its end."""
        rank, splitter = self.readers[fd]
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return True
        now = round(time.time(), 6)
        rank.seen = now
        rank.progress.printed()
        out = splitter.feed(data, now) if data else splitter.flush(now, at_end=True)
        if out:
            self.log.write(out)
        if not data:
            self.forget(fd)
        return bool(data)

    def forget(self, fd: int) -> None:
        rank, _ = self.readers.pop(fd)
        rank.splitters.pop(fd)
        self.poll.unregister(fd)
        os.close(fd)

    def read_metrics(self, rank: Rank) -> bool:
        """Pass on new records; False if there was nothing new in the file."""
        before = rank.metrics.offset
        for record in rank.metrics.read():
            rank.last.update({k: v for k, v in record.items() if isinstance(v, (int, float, str, bool))})
            rank.seen = time.time()
            if rank.progress.stepped(record):
                self.looks = 0
            self.log.event("metric", rank=rank.number, **record)
        return rank.metrics.offset != before

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
        if not data:
            self.poll.unregister(self.report_fd)
            os.close(self.report_fd)
            self.report_fd = -1
        return bool(data)

    def collect(self) -> None:
        """Take note of every child that has ended."""
        for pid, status in reap():
            rank = next((r for r in self.ranks if r.pid == pid), None)
            if rank is not None:
                self.rank_ended(rank, status)
            elif pid == self.zygote:
                self.zygote_status = status
            elif self.report_fd >= 0:
                self.orphans[pid] = status
        if self.zygote_status is not None and self.report_fd < 0:
            self.zygote_gone()

    def zygote_gone(self) -> None:
        """Ranks that it never got to start have ended the way it did. Called once its report is whole: each
        rank that it did start holds the report open until it has told its pid."""
        for rank in self.ranks:
            if not rank.pid and rank.status is None:
                self.rank_ended(rank, self.zygote_status or 1 << 8)

    def rank_ended(self, rank: Rank, status: int) -> None:
        """Its last lines, then its one final event; then the others follow if it failed."""
        for fd in list(rank.splitters):
            # One read takes all that a pipe holds. What it left in the background may write for ever.
            if wait_readable(fd, 0) and self.read_output(fd) and wait_readable(fd, 0):
                self.read_output(fd)
        end = rank.metrics.size()  # whoever goes on writing there does not keep the rank from ending
        while rank.metrics.offset < end and self.read_metrics(rank):
            pass  # a piece at a time
        if status and self.was_stopped():
            rank.reason = rank.reason or "stopped"
        rank.status, rank.seen = status, time.time()
        rank.state = "stopped" if rank.reason else "succeeded" if status == 0 else "failed"
        if rank.state == "failed" and exit_code(status) == -signal.SIGKILL:
            self.note_oom(rank)
        log_exit(self.log, rank.number, rank.state, exit_code(status), signal_name(status), rank.reason)
        if rank.state == "failed" and self.failed is None:
            self.failed = rank
            if not self.ending:
                self.end_ranks(f"rank {rank.number} failed", time.monotonic() + SETTLE_S)
                if self.lease is not None:
                    self.lease.bye("failed", self.ending)
        self.save()

    def was_stopped(self) -> bool:
        """Whether somebody has stopped the run, here or on another host: a rank that fails now does so for
        want of those that were ended."""
        self.mind_the_word(patience=0.0)
        if self.lease is not None and not self.ending:
            clock = time.monotonic()
            self.lease.receive(clock)
            if self.lease.over and self.lease.over["state"] == "stopped":
                self.mind_the_others(clock)
        return self.stop_requested

    def mind_the_word(self, patience: float) -> None:
        """Whoever stops a run tells all of its hosts first, and ends it then. Who is killed between the two
        does not come: what was told holds all the same."""
        word = None if self.ending else stop_word(self.folder, int(self.plan["attempt"]))
        if not word:
            return
        self.word_seen = self.word_seen or time.monotonic()
        if time.monotonic() >= self.word_seen + patience:
            self.end_as_told(word)

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
        """Before the final state is written: the next attempt may start at once then."""
        from launcher import hostslots

        hostslots.remove(str(self.plan["run"]))

    # the end

    def finish(self) -> None:
        """End what the ranks left behind, take its last words, and write the final state."""
        left = kill_all(lambda: descendants(os.getpid()), 10.0)
        self.free_slots()
        for fd in list(self.readers):
            while fd in self.readers and wait_readable(fd, 0):
                self.read_output(fd)
            if fd in self.readers:
                out = self.readers[fd][1].flush(time.time(), at_end=True)
                self.log.write(out)
                self.forget(fd)
        self.ended = time.time()
        failed = any(rank.state == "failed" for rank in self.ranks)
        stopped = any(rank.state == "stopped" for rank in self.ranks)
        self.state = (
            "stopped" if stopped and self.stop_requested else "failed" if failed or stopped else "succeeded"
        )
        self.log.event("host_finished", rank=None, state=self.state, left=left)
        if self.lease is not None:
            self.lease.bye(self.state, "stopped" if self.state == "stopped" else self.ending)
        while not self.close() and not self.asked:
            time.sleep(TICK_S)  # nothing runs any more: there is time to wait for room on the disk

    def close(self) -> bool:
        """Whether how the run ended is written down, for which room was kept."""
        remove_file(room_file(self.folder))
        return self.log.finish() and self.save()

    def abandon(self, error: str) -> None:
        """The start failed: leave no process, and say of every rank that it did not start."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        kill_all(lambda: descendants(os.getpid()), 5.0)
        self.free_slots()
        self.state, reason = ("stopped", "stopped") if error == STOPPED_EARLY else ("failed", error)
        for rank in self.ranks:
            rank.state, rank.reason = self.state, reason
            log_exit(self.log, rank.number, self.state, 127, None, reason)
        self.ended = time.time()
        self.log.event("host_finished", rank=None, state=self.state, cause=error, left=[])
        self.close()

    def save(self, durable: bool = True) -> bool:
        """Whether there was room for the state; if not, the next heartbeat tries again."""
        try:
            self.write_state(durable)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            return False
        return True

    def write_state(self, durable: bool = True) -> None:
        state = {
            "run": self.plan["run"], "name": self.plan["name"], "attempt": self.plan["attempt"],
            "world": self.plan["world"], "host": self.plan["host"], "state": self.state,
            "started": self.started, "ended": self.ended, "updated": time.time(),
            "hostd": identity(os.getpid()), "warden": self.warden, "segment": self.log.segment,
            "ranks": [rank.to_json() for rank in self.ranks],
        }  # fmt: skip
        replace_file(os.path.join(self.folder, "state.json"), json.dumps(state).encode(), durable)


def wait_readable(fd: int, seconds: float) -> bool:
    import select

    poll = select.poll()  # select() itself knows no descriptor from 1024 on
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


# --- start ---------------------------------------------------------------------------------------


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
        replace_file(os.path.join(folder, "plan.json"), json.dumps(request).encode())
        read, write = os.pipe()
        if os.fork() == 0:
            os.close(read)
            os.close(lock)
            be(lambda: be_warden(folder, request, write))
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


def lock_starts(folder: str) -> int:
    """Of several who start one run at once, each waits until it is decided about the one before."""
    import fcntl

    lock = os.open(os.path.join(folder, "start.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def is_stopped(folder: str, request: dict[str, Any]) -> bool:
    """Whether this attempt must not start: it was stopped, or it starts by itself after somebody stopped the
    run."""
    word = read_json(os.path.join(folder, "stop.json")) or {}
    unwanted = bool(request.get("automatic")) and stopped_in(word) >= int(request.get("since") or 1)
    return unwanted or stop_word(folder, int(request["attempt"])) is not None


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
    """A run that is here already starts again only as a later attempt, when the one before has ended. What
    somebody has stopped does not start again by itself."""
    run, attempt = str(request["run"]), int(request["attempt"])
    before = read_state(run)
    if is_stopped(run_folder(run), request):
        raise Refused(STOPPED_EARLY)
    if attempt == 1 or (before and (before["state"] not in FINAL or before["attempt"] >= attempt)):
        raise Refused(f"{ALREADY} {run} on this host already")


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
    kill_all(lambda: descendants(os.getpid()), 10.0)
    if status:  # hostd did not live to do it itself
        from launcher import hostslots

        hostslots.remove(str(plan["run"]))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while not books_closed(folder) and status:
        time.sleep(HEARTBEAT_S)  # a full disk: as soon as there is room; not if hostd was told not to wait
    return 0


def books_closed(folder: str) -> bool:
    try:
        close_books(folder, KILLED)
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


def close_books(folder: str, reason: str) -> None:
    """Give every rank its final event, and the run its final state, if its supervisor did not live to."""
    import fcntl

    lock = os.open(os.path.join(folder, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remove_file(room_file(folder))
        remove_leftovers(os.path.join(folder, "state.json"))
        state = read_json(os.path.join(folder, "state.json"))
        if state is None or state["state"] in FINAL or alive(state["hostd"]):
            return  # the last: of a later attempt, which began this moment
        asked = stop_word(folder, int(state["attempt"]))
        stopped = asked is not None and asked.get("reason", "stopped") == "stopped"
        reason = "stopped" if stopped else reason
        told = final_ranks(folder, int(state["attempt"]))
        for rank in state["ranks"]:
            if rank["state"] in ("waiting", "running"):
                killed = {"state": "stopped", "exit_code": -9, "signal": "SIGKILL", "reason": reason}
                rank.update(told.get(rank["rank"]) or killed)
        all_well = all(rank["state"] == "succeeded" for rank in state["ranks"])
        final = "succeeded" if all_well else "stopped" if stopped else "failed"
        state.update(state=final, ended=time.time(), cause=reason)
        log_ends(folder, state, told)
        replace_file(os.path.join(folder, "state.json"), json.dumps(state).encode())
    finally:
        os.close(lock)


def final_ranks(folder: str, attempt: int) -> dict[int | None, dict[str, Any]]:
    """How the ranks ended whose final event is in the log already; None stands for the host's own."""
    told = {}
    for number, segment in segments(folder):
        if number != attempt:
            continue
        with open(os.path.join(folder, segment_name(attempt, segment)), "rb") as f:
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
    log = EventLog(folder, int(state["attempt"]))
    state["segment"] = log.segment
    for rank in lacking:
        log_exit(log, rank["rank"], *(rank[key] for key in EXIT_KEYS))
    if None not in told:
        log.event("host_finished", rank=None, state=state["state"], cause=state["cause"], left=[])
    if not log.finish():
        if log.size == 0:
            remove_file(os.path.join(folder, segment_name(log.attempt, log.segment)))
        raise OSError(errno.ENOSPC, log.problem)


# --- follow, runs, stop --------------------------------------------------------------------------


def command_follow(request: dict[str, Any]) -> None:
    """Send the run's events from `cursor` on: raw lines, and between them what the reader must know.

    {"kind":"cursor",...} comes before the first line of each piece of a segment, {"kind":"tick"} when
    nothing happens for a second, {"kind":"end"} last."""
    run, follow = str(request["run"]), bool(request.get("follow"))
    folder = run_folder(run)
    attempt, segment, offset = first_cursor(folder, request)
    next_tick = 0.0  # the first tick tells the reader that it has caught up
    note("cursor", attempt=attempt, segment=segment, offset=offset)
    while True:
        state = read_state(run)
        over = (
            not follow or state is None or state["state"] in FINAL + ("lost",) or state["attempt"] != attempt
        )
        later = (attempt, segment + 1) in segments(folder)
        sent = send_lines(os.path.join(folder, segment_name(attempt, segment)), offset)
        offset += sent
        if sent:
            next_tick = next_tick and time.monotonic() + 1.0
            continue
        if later:
            segment, offset = segment + 1, 0
            note("cursor", attempt=attempt, segment=segment, offset=offset)
        elif over:
            note("end", state=state["state"] if state else "lost", attempt=attempt)
            return
        else:
            if time.monotonic() >= next_tick:
                note("tick")
                next_tick = time.monotonic() + 1.0
            time.sleep(0.03)


def first_cursor(folder: str, request: dict[str, Any]) -> tuple[int, int, int]:
    """Where to begin: the given cursor, or the beginning of the asked-for (default: newest) attempt."""
    cursor = request.get("cursor")
    if cursor:
        attempt, segment, offset = (int(part) for part in cursor)
        return attempt, segment, offset
    try:
        there = sorted({attempt for attempt, _ in segments(folder)})
    except FileNotFoundError:
        raise Refused(f"there is no run {os.path.basename(folder)} on this host") from None
    if request.get("follow"):
        there = [attempt for attempt in there if attempt <= begun_attempt(folder, there)]
    wanted = int(request.get("attempt") or 0) or (there[-1] if there else 0)
    if wanted not in there:
        which = f"attempt {wanted} of run" if wanted else "run"
        raise Refused(f"{which} {os.path.basename(folder)} {NOT_STARTED}")
    return wanted, 1, 0


def begun_attempt(folder: str, there: list[int]) -> int:
    """The newest attempt that has a state. One that only has a log is about to start: as yet the state is
    that of the attempt before, by which it would be taken for over."""
    path = os.path.join(folder, "state.json")
    state = read_json(path)
    if state is None:
        return there[-1] if there and os.path.exists(path) else 0
    return int(state["attempt"])


def note(kind: str, **data: object) -> None:
    line = json.dumps(dict({"kind": kind, "time": time.time()}, **data), separators=(",", ":"))
    write_all(1, line.encode() + b"\n")


def send_lines(path: str, offset: int) -> int:
    """Send whole lines from `offset` on; how many bytes that were."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    try:
        size, data = READ_BYTES, b""
        while True:
            data = os.pread(fd, size, offset)
            end = data.rfind(b"\n") + 1
            if end or len(data) < size:
                break
            size *= 4  # one line longer than what was read
        write_all(1, data[:end])
        return end
    finally:
        os.close(fd)


def command_runs(request: dict[str, Any]) -> dict[str, Any]:
    """The state of every run on this host, and this host's clock."""
    wanted = request.get("run")
    states = [state_to_tell(name) for name in runs_here() if wanted in (None, name)]
    return {"runs": [state for state in states if state], "time": time.time()}


def command_slots(_: dict[str, Any]) -> dict[str, Any]:
    """Who has what of this host, and what it is doing."""
    from launcher import hostslots, hosttop

    runs, problem = hostslots.taken()
    return dict(hosttop.now(home_folder()), runs=runs, problem=problem, time=time.time())


def command_tell(request: dict[str, Any]) -> dict[str, Any]:
    """That this attempt of the run is to be stopped, which `stop` then sees to. Ranks that fail meanwhile,
    for want of those on other hosts, are stopped ones."""
    run, attempt = str(request["run"]), int(request["attempt"])
    state = read_state(run)
    if state is not None and state["state"] not in FINAL and int(state["attempt"]) == attempt:
        try:
            leave_word(run_folder(run), attempt, float(request["grace"]), "stopped")
        except OSError:
            pass  # a full disk: `stop` ends it all the same
    return {}


def command_stop(request: dict[str, Any]) -> dict[str, Any]:
    """End the run here and wait for it; says what was ended and what could not be."""
    run, grace = str(request["run"]), float(request.get("grace", 5.0))
    reason, attempt = str(request.get("reason") or "stopped"), int(request.get("attempt") or 1)
    folder = run_folder(run)
    upto = attempt if request.get("exact") else None  # None: also whatever later one there is
    before = state_or_word(run, attempt, grace, reason)
    if before is None:
        return {"known": False, "ended": [], "left": kill_all(lambda: carriers(run, upto), 5.0)}
    number = signal.SIGTERM
    if upto is None or int(before["attempt"]) <= upto:
        try:
            leave_word(folder, max(attempt, int(before["attempt"])), grace, reason)
        except OSError:
            # A full disk: it ends all the same, with the supervisor's own grace.
            number = signal.SIGINT if reason == "stopped" else signal.SIGTERM
        before = read_state(run) or before  # who was about to start has not seen the word, and is there now
    if upto is not None and int(before["attempt"]) > upto:
        # Late: what runs here now is not what was to be ended.
        return {"known": True, "was": before["state"], "state": before["state"], "ended": [], "left": []}
    running = [r["rank"] for r in before["ranks"] if r["state"] in ("waiting", "running")]
    if before["state"] not in FINAL:
        terminate(before, grace + 15.0, number)
    left = kill_all(lambda: carriers(run, upto), 5.0)
    try:
        close_books(folder, reason)
    except OSError:
        pass  # a full disk: what matters is ended
    after = read_state(run) or before
    return {"known": True, "was": before["state"], "state": after["state"], "ended": running, "left": left}


def state_or_word(run: str, attempt: int, grace: float, reason: str) -> dict[str, Any] | None:
    """The run's state; one that has none yet is told not to start, and has a moment to have one after all."""
    folder = run_folder(run)
    deadline = time.monotonic() + 3.0
    while True:
        state = read_state(run)
        if state is not None:
            return state
        fresh = not os.path.isdir(folder)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        if not os.path.exists(os.path.join(folder, "stop.json")):
            leave_word(folder, attempt, grace, reason)
        if fresh or time.monotonic() > deadline:
            return read_state(run)
        time.sleep(0.05)


def leave_word(folder: str, attempt: int, grace: float, reason: str) -> None:
    """Write down for the supervisor, and for all times, that this attempt and those before it are to end. Of
    several who ask at once the least patient counts, and that somebody wants it so."""
    import fcntl

    path = os.path.join(folder, "stop.json")
    lock = os.open(os.path.join(folder, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = read_json(path)
        if before and int(before.get("attempt", attempt)) >= attempt:
            attempt, grace = int(before.get("attempt", attempt)), min(grace, float(before["grace"]))
        elif before and started_after(folder, int(before.get("attempt", attempt))):
            before = None  # that was about an attempt which somebody has wanted another one after
        wanted = max(attempt if reason == "stopped" else 0, stopped_in(before or {}))
        word = {"attempt": attempt, "grace": grace, "reason": "stopped" if wanted else reason}
        word.update(wanted=wanted, time=time.time())
        replace_file(path, json.dumps(word).encode())
    finally:
        os.close(lock)


def stopped_in(word: dict[str, Any]) -> int:
    """The last attempt that somebody wanted stopped; 0 if nobody has."""
    return int(word.get("wanted") or word.get("attempt") or 1) if word.get("reason") == "stopped" else 0


def started_after(folder: str, attempt: int) -> bool:
    """Whether a later attempt than this one has been started here. Numbers that a start has used up
    elsewhere do not count: what somebody has stopped stays stopped."""
    state = read_json(os.path.join(folder, "state.json"))
    return state is not None and int(state["attempt"]) > attempt


def stop_word(folder: str, attempt: int) -> dict[str, Any] | None:
    """What whoever ended this attempt, or a later one, has left; None if nobody has."""
    word = read_json(os.path.join(folder, "stop.json"))
    return word if word and int(word.get("attempt", attempt)) >= attempt else None


def terminate(state: dict[str, Any], seconds: float, number: int) -> None:
    """Ask the supervisor to end; if it does not in time, end it, and its warden ends the rest."""
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


def command_stacks(request: dict[str, Any]) -> dict[str, Any]:
    """Have the supervisor look where its ranks are; says whether it is there to do so."""
    state = read_state(str(request["run"]))
    here = state is not None and state["state"] == "running" and alive(state["hostd"])
    if here and state is not None and catches(int(state["hostd"]["pid"]), signal.SIGUSR1):
        send(int(state["hostd"]["pid"]), signal.SIGUSR1)
        return {"known": True, "asked": True}
    return {"known": state is not None, "asked": False}


# --- prefork: in the ranks' own Python -----------------------------------------------------------


def prefork() -> None:
    """Import what every rank needs, fork one process a rank, and there become the user's program."""
    request = json.loads(sys.stdin.buffer.read())
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    target, module = request["target"], request["module"]
    if not sys.flags.isolated and not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.realpath(target))
    if request["preload"]:
        import_once()
    sys.stdout.flush()
    sys.stderr.flush()
    for rank in request["ranks"]:
        if fork_orphan():
            enter_rank(rank, request)
            if module:
                run_module(target, request["args"])
            else:
                run_script(target, request["args"])
            return


def import_once() -> None:
    """torch, where there is one. If it cannot be imported, each rank says so itself when it tries."""
    import gc
    import importlib.util

    if importlib.util.find_spec("torch") is not None:
        try:
            importlib.import_module("torch.distributed")
        except Exception:  # whatever it raises, the rank's own import raises again
            for name in [n for n in sys.modules if n.partition(".")[0] == "torch"]:
                del sys.modules[name]
    gc.freeze()


def fork_orphan() -> bool:
    """Fork twice, so that the new process is a child of the sub-reaper; True in the new process."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return False
    if os.fork():
        os._exit(0)
    return True


def enter_rank(rank: dict[str, Any], request: dict[str, Any]) -> None:
    """Everything that makes this process the rank: session, output, environment, fresh randomness."""
    deadline = time.monotonic() + 5.0
    while os.getppid() != request["supervisor"] and time.monotonic() < deadline:
        time.sleep(0.001)
    become_rank_process(request["supervisor"])
    out, err = rank["fds"]
    os.dup2(out, 1)
    os.dup2(err, 2)
    write_all(request["report"], b"%d %d\n" % (rank["rank"], os.getpid()))
    for fd in [request["report"]] + [fd for other in request["ranks"] for fd in other["fds"]]:
        os.close(fd)
    os.environ.update(rank["env"])
    if hasattr(sys, "orig_argv"):  # novermin
        sys.orig_argv = list(rank["argv"])  # novermin  # type: ignore[attr-defined,unused-ignore]  # Python 3.10
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # its global state was drawn before the fork
    register_stacks(rank["env"]["RINGCTL_METRICS"])
    sys.excepthook = without_our_frames


def without_our_frames(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
    """Show a traceback as if the program had been started by itself."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    value.__traceback__ = trace
    sys.__excepthook__(kind, value, trace)


def fresh_main() -> dict[str, Any]:
    """A new `__main__`, as the interpreter has it before it runs a program."""
    import builtins
    import types

    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    return main.__dict__


def run_script(path: str, args: list[str]) -> None:
    import importlib.machinery

    full = os.path.abspath(path) if sys.version_info >= (3, 9) else path  # as the interpreter itself has it
    loader = importlib.machinery.SourceFileLoader("__main__", full)
    names = fresh_main()
    names.update(__file__=full, __cached__=None, __loader__=loader)
    if sys.version_info < (3, 14):
        names["__annotations__"] = {}
    sys.argv = [path] + args
    with open(full, "rb") as f:
        code = compile(f.read(), full, "exec", dont_inherit=True)
    exec(code, names)


def run_module(name: str, args: list[str]) -> None:
    import runpy

    fresh_main()
    sys.argv = ["-m"] + args
    runpy._run_module_as_main(name, alter_argv=True)  # type: ignore[attr-defined]  # what `python -m` itself calls


# --- main ----------------------------------------------------------------------------------------


def main() -> int:
    command = sys.argv[1]
    if command == "prefork":
        prefork()
        return 0
    commands: dict[str, Callable[[dict[str, Any]], dict[str, Any] | None]] = {
        "start": command_start,
        "follow": command_follow,
        "runs": command_runs,
        "tell": command_tell,
        "stop": command_stop,
        "stacks": command_stacks,
        "slots": command_slots,
    }
    signal.alarm(REQUEST_S)
    text = sys.stdin.buffer.readline()
    if command == "start" and text.startswith(b'{"claim":'):
        if answered(claim_slots, command, json.loads(text)):
            return 1
        signal.alarm(REQUEST_S)
        text = b""
    text += sys.stdin.buffer.read()
    signal.alarm(0)
    if command == "start" and not text:
        return 0  # whoever was about to start something has thought better of it
    return answered(commands[command], command, json.loads(text or b"{}"))


def answered(
    call: Callable[[dict[str, Any]], dict[str, Any] | None], command: str, request: dict[str, Any]
) -> int:
    """The exit code of having answered it."""
    write_all(1, SENTINEL)
    try:
        answer = call(request)
    except Refused as error:
        note("error", error=str(error))
        return 1
    except BrokenPipeError:
        return 0
    except OSError as error:
        note("error", error=f"{error.filename or command}: {os.strerror(error.errno or errno.EIO)}")
        return 1
    if answer is not None:
        write_all(1, json.dumps(answer).encode() + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
