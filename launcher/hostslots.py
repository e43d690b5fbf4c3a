"""Who has which slots of this host: one small file for each run, readable by all users of the host.

Standard library only, Python 3.8 and up; hostd and the probe import it. The supervisor of a run writes its
record when it starts and removes it at the end. The folder is everybody's, so nothing in it is believed that
is not borne out: a record counts only if it is a plain file of the user whose number its name begins with,
and as long as the process that it names lives and is that user's. What a killed supervisor or a reboot has
left counts for nothing, and goes when its owner next comes by. Only where the next attempt of a run is
about to start does its record count without a process, and not for long (`let_go`). All of this is for others
to see; no run fails for want of it, and only one that says so, as those of a service do, waits for what
others have (`claim`).
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import time

TYPE_CHECKING = False  # a type checker takes it for true; importing `typing` at run time would cost a start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

FOLDER = "/var/tmp/ringctl-slots"  # noqa: S108 - meant to be found by every user; see `usable`
RECORD = re.compile(r"([0-9]{1,10})-([A-Za-z0-9][A-Za-z0-9._-]{0,127})\.json")
FRESH = 0o700  # the mode of the folder until it has been opened to all
BESIDE = re.compile(r"\.[0-9]{1,10}-[0-9a-f]{16}\.tmp")  # a record before it has its name
NUMBERS = ("attempt", "slots", "world", "pid", "start_time")
TOLD = ("run", "attempt", "slots", "world", "shared")
LARGEST = 4096  # bytes of a record
MOST_SLOTS, MOST_RANKS = 1024, 100_000
WRITTEN_S = 60.0  # by then a record has its name, or never will
MOST_NAMES = 100_000  # that are looked at
MOST_SWEPT = 1000  # at a start, which waits for nothing
MOST_OF_A_USER = 250
MOST_RUNS = 1000  # that are told
MOST_KEPT_S = 3600.0  # for the next attempt of a run; who waits longer than that stands back
LOOK_S = 2.0  # whatever others have put there: by then, what was found is told
NO_FOLDER = "what runs take of this host is not written down for others to see: "


def place() -> str:
    return os.environ.get("RINGCTL_SLOTS") or FOLDER


# --- The folder ----------------------------------------------------------------------------------


class Unusable(Exception):
    """The folder cannot be used; the message says why."""


def open_folder(make: bool) -> int:
    """The folder as a descriptor, whatever may be put in its place meanwhile; FileNotFoundError if it is not
    there and not to be made."""
    path = place()
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    if make:
        try:
            os.mkdir(path, FRESH)
        except FileExistsError:
            pass
    try:
        folder = os.open(path, flags)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Unusable(f"{path}: {error.strerror}") from None
    try:
        usable(folder, path)
    except BaseException:
        os.close(folder)
        raise
    return folder


def usable(folder: int, path: str) -> None:
    """Each user must be able to add files and nobody to take away another's: with the sticky bit only their
    owner can, the folder's owner, and root."""
    about = os.fstat(folder)
    mode = stat.S_IMODE(about.st_mode)
    if mode == FRESH and about.st_uid == os.getuid():
        os.fchmod(folder, 0o1777)  # made just now, or once by one of ours that was killed then
        return
    if not mode & stat.S_ISVTX or not (mode & stat.S_IWOTH or about.st_uid == 0):
        raise Unusable(
            f"{path} is not a folder that all users may write to, each their own files (mode 1777)"
        )


# --- Processes -----------------------------------------------------------------------------------


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as f:
        return f.read().strip()


def is_alive(pid: int, start: int, uid: int) -> bool:
    """Whether the process with this number that started then is there, and is that user's."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            owner, fields = os.fstat(f.fileno()).st_uid, f.read().rpartition(b")")[2].split()
    except OSError:
        return is_hidden(pid)
    return owner == uid and fields[0] not in (b"Z", b"X") and int(fields[19]) == start


def is_hidden(pid: int) -> bool:
    """Where users do not see each other's processes (hidepid), only that there is one can be known."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return False


# --- Writing -------------------------------------------------------------------------------------


def record_name(run: str) -> str:
    return f"{os.getuid()}-{run}.json"


def write(run: str, attempt: int, slots: int, world: int, shared: bool, holder: dict[str, Any]) -> str:
    """Put down that the run has these slots as long as `holder`, a process as hostd's identity() tells it,
    lives. Says why it could not, or ""."""
    record = {
        "run": run, "user": os.environ.get("USER") or str(os.getuid()), "attempt": attempt,
        "slots": slots, "world": world, "shared": shared,
        "pid": holder["pid"], "start_time": holder["start"], "boot_id": holder["boot"],
    }  # fmt: skip
    try:
        folder = open_folder(make=True)
    except (Unusable, OSError) as error:
        return NO_FOLDER + str(error)
    try:
        sweep(folder)
        put(folder, record_name(run), json.dumps(record).encode())
    except OSError as error:
        return f"{NO_FOLDER}{place()}: {error.strerror}"
    finally:
        os.close(folder)
    return ""


def claim(about: dict[str, Any], room: int, holder: dict[str, Any]) -> str:
    """Take slots for a run that must find them free: says who has them if they are not, among the `room` that
    this host has, and takes none then. It is written before it is looked, so of two who come at once at least
    one sees the other, and there is no lock that somebody could keep."""
    run, slots, shared = str(about["run"]), int(about["slots"]), bool(about["shared"])
    mine = (run, user_name(os.getuid()))
    here = has_holder(run)
    if not here:  # else it has begun already, which its start will find out
        write(run, int(about["attempt"]), slots, int(about["world"]), shared, holder)
    others = [each for each in taken()[0] if (each["run"], each["user"]) != mine]
    words = why_full(others, slots, shared, room)
    if words and not here:
        remove(run)
    return words


def why_full(others: list[dict[str, Any]], slots: int, shared: bool, room: int) -> str:
    """Runs that share lie on top of each other; nobody else lies on them."""
    counted = [each for each in others if not (each["shared"] and shared)]
    has = sum(each["slots"] for each in counted if not each["shared"])
    has += max([each["slots"] for each in counted if each["shared"]] or [0])
    if not counted or has + slots <= room:
        return ""
    by = ", ".join(f"run {each['run']} of user {each['user']}" for each in counted[:3])
    more = f" and {len(counted) - 3} more" if len(counted) > 3 else ""
    slots_are = f"{'slot' if room == 1 else 'slots'} {'is' if has == 1 else 'are'}"
    return f"{has} of {room} {slots_are} taken by {by}{more}"


def put(folder: int, name: str, data: bytes) -> None:
    """The whole file or none, and never through a link or into a file that somebody else has put there."""
    beside = f".{os.getuid()}-{os.urandom(8).hex()}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(beside, flags, 0o600, dir_fd=folder)
    try:
        try:
            os.fchmod(fd, 0o644)
            if os.write(fd, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(fd)
        os.rename(beside, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:  # also that we are told to end
        try:
            os.unlink(beside, dir_fd=folder)
        except FileNotFoundError:
            pass  # it has its name already
        raise


def remove(run: str) -> None:
    """The run has nothing here any more. If it cannot be taken away, it counts for nothing all the same."""

    def work(folder: int) -> None:
        try:
            os.unlink(record_name(run), dir_fd=folder)
        except OSError:
            pass

    in_folder(work)


def remove_of(run: str, pid: int) -> None:
    """If they are held by this process, and by no later one."""

    def work(folder: int) -> None:
        record = own(folder, run)
        if record is not None and record["pid"] == pid:
            remove(run)

    in_folder(work)


def let_go(run: str, kept_s: float) -> None:
    """The run has ended here; its slots are kept so many seconds for its next attempt. By the clock since the
    host's boot, which nobody can set."""

    def work(folder: int) -> None:
        record = own(folder, run)
        if record is None:
            return
        until = since_boot() + min(kept_s, MOST_KEPT_S)
        try:
            put(folder, record_name(run), json.dumps(dict(record, until=until)).encode())
        except OSError:
            remove(run)  # a full disk: nothing is kept

    if kept_s > 0:
        in_folder(work)
    else:
        remove(run)


def in_folder(work: Callable[[int], None]) -> None:
    """Where there is none that can be used, there is nothing to do."""
    try:
        folder = open_folder(make=False)
    except (Unusable, OSError):
        return
    try:
        work(folder)
    finally:
        os.close(folder)


def since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def own(folder: int, run: str) -> dict[str, Any] | None:
    """The record of a run of ours, if it counts."""
    name = record_name(run)
    try:
        return read(folder, name, os.stat(name, dir_fd=folder, follow_symlinks=False), boot_id())
    except OSError:
        return None


def has_holder(run: str) -> bool:
    """Whether a run of ours has slots here, and a process that stands for it."""
    try:
        folder = open_folder(make=False)
    except (Unusable, OSError):
        return False
    try:
        record = own(folder, run)
    finally:
        os.close(folder)
    return record is not None and is_held(record, os.getuid())


def sweep(folder: int) -> None:
    """Take away what our own runs have left that are gone, as far as that takes no time."""
    uid, boot = os.getuid(), boot_id()
    for name in names_in(folder, MOST_SWEPT):
        if not name.lstrip(".").startswith(f"{uid}-"):
            continue
        try:
            about = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if about.st_uid == uid and is_left_over(folder, name, about, boot):
                os.unlink(name, dir_fd=folder)
        except OSError:
            continue  # gone already


def is_left_over(folder: int, name: str, about: os.stat_result, boot: str) -> bool:
    if BESIDE.fullmatch(name):
        return time.time() - about.st_mtime > WRITTEN_S
    return bool(RECORD.fullmatch(name)) and read(folder, name, about, boot) is None


# --- Reading -------------------------------------------------------------------------------------


def taken() -> tuple[list[dict[str, Any]], str]:
    """(what each run has here that lives, why the folder is not used). None that there is no folder: nobody
    has started anything yet."""
    try:
        folder = open_folder(make=False)
    except FileNotFoundError:
        return [], ""
    except (Unusable, OSError) as error:
        return [], NO_FOLDER + str(error)
    try:
        return records(folder), ""
    finally:
        os.close(folder)


def records(folder: int) -> list[dict[str, Any]]:
    """In the order of their names, so that all see the same."""
    found: list[dict[str, Any]] = []
    of_user: dict[int, int] = {}
    deadline, boot = time.monotonic() + LOOK_S, boot_id()
    for name in names_in(folder, MOST_NAMES):
        match = RECORD.fullmatch(name)
        if not match or time.monotonic() > deadline:
            continue
        try:
            about = os.stat(name, dir_fd=folder, follow_symlinks=False)
            record = read(folder, name, about, boot)
        except OSError:
            continue  # it ended just now
        if record and of_user.get(about.st_uid, 0) < MOST_OF_A_USER:
            of_user[about.st_uid] = of_user.get(about.st_uid, 0) + 1
            told = {key: record[key] for key in TOLD}
            found.append(dict(told, user=user_name(about.st_uid)))
    return sorted(found, key=lambda each: (each["user"], each["run"]))[:MOST_RUNS]


def names_in(folder: int, most: int) -> list[str]:
    """Of what there is, which may be any number."""
    names = []
    with os.scandir(folder) as entries:
        for entry in entries:
            names.append(entry.name)
            if len(names) >= most:
                break
    return names


def read(folder: int, name: str, about: os.stat_result, boot: str) -> dict[str, Any] | None:
    """What a record says, if it counts."""
    match = RECORD.fullmatch(name)
    if not match or not is_plain(about) or about.st_uid != int(match[1]):
        return None
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(name, flags, dir_fd=folder)
    try:
        opened = os.fstat(fd)
        if not is_plain(opened) or opened.st_uid != about.st_uid:
            return None  # something else by now
        data = os.read(fd, LARGEST + 1)
    finally:
        os.close(fd)
    record = parsed(data)
    if record is None or record["run"] != match[2] or record["boot_id"] != boot:
        return None
    return record if is_kept(record) or is_held(record, about.st_uid) else None


def is_held(record: dict[str, Any], uid: int) -> bool:
    """Whether the process that has its slots lives. One that has let them go may live on, for other hosts."""
    return "until" not in record and is_alive(record["pid"], record["start_time"], uid)


def is_kept(record: dict[str, Any]) -> bool:
    """Whether its slots are kept for the next attempt, though no process has them."""
    until = record.get("until")
    return type(until) is float and 0 < until - since_boot() <= MOST_KEPT_S


def is_plain(about: os.stat_result) -> bool:
    return stat.S_ISREG(about.st_mode) and about.st_nlink == 1 and about.st_size <= LARGEST


def parsed(data: bytes) -> dict[str, Any] | None:
    """A record of which every part is of its kind."""
    try:
        record = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    if not all(type(record.get(key)) is int for key in NUMBERS) or type(record.get("shared")) is not bool:
        return None
    slots, world = record["slots"], record["world"]
    likely = 1 <= slots <= MOST_SLOTS and slots <= world <= MOST_RANKS and 1 <= record["attempt"] <= 10**6
    real = 1 < record["pid"] < 1 << 31 and isinstance(record.get("boot_id"), str)
    return record if likely and real else None


def user_name(uid: int) -> str:
    """As the system knows it: what a record says of itself is its owner's choice."""
    import pwd

    try:
        name = pwd.getpwuid(uid).pw_name
    except (KeyError, OSError):
        return str(uid)
    return name if re.fullmatch(r"[A-Za-z0-9_.][A-Za-z0-9_.@+$-]{0,63}", name) else str(uid)
