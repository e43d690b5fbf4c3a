"""The one file that the history is in: SQLite, opened for each question and closed again.

Nothing is kept open between calls, so that it does not matter which thread or forked process asks. Each write
is one transaction: a kill at any moment leaves what was there or what came.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from launcher.errors import NotKept, RingctlError
from launcher.wholefile import sync_folder

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

BUSY_S = 20.0  # how long somebody else may be writing
MOST_WAL = 16 << 20  # bytes that its log keeps after a burst
LEAST_ROOM = 64 << 10  # bytes that a transaction needs
BESIDE = ("", "-wal", "-shm", "-journal")  # what SQLite calls its files
# Machines that share one of these share no memory, which WAL needs.
SHARED_DISKS = (
    "nfs",
    "cifs",
    "smb",
    "ceph",
    "lustre",
    "gpfs",
    "9p",
    "afs",
    "beegfs",
    "fuse.",
    "ocfs2",
    "gfs2",
)

# One entry a version: what leads to it from the one before. Never change one that was released; add another.
SCHEMA: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE runs (
            run TEXT PRIMARY KEY, name TEXT NOT NULL, user TEXT NOT NULL, state TEXT NOT NULL,
            world INTEGER NOT NULL, attempt INTEGER NOT NULL, hosts TEXT NOT NULL,
            submitted REAL, started REAL, ended REAL, error TEXT NOT NULL DEFAULT '',
            fix TEXT NOT NULL DEFAULT '', command TEXT NOT NULL DEFAULT '[]',
            summary TEXT NOT NULL DEFAULT '{}')""",
        # Beside the rows that lists go through, for it is long.
        "CREATE TABLE records (run TEXT PRIMARY KEY, record TEXT NOT NULL)",
        "CREATE INDEX runs_state ON runs (state)",
        """CREATE TABLE chunks (
            run TEXT NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL, flags INTEGER NOT NULL,
            data BLOB NOT NULL)""",  # with a rowid: a large blob in a key's tree would slow the search for it
        "CREATE UNIQUE INDEX chunks_first ON chunks (run, first)",
        """CREATE TABLE metrics (
            run TEXT NOT NULL, id INTEGER NOT NULL, attempt INTEGER NOT NULL, rank INTEGER NOT NULL,
            step INTEGER, time REAL NOT NULL, kind INTEGER NOT NULL, level INTEGER NOT NULL,
            data TEXT NOT NULL, PRIMARY KEY (run, id)) WITHOUT ROWID""",
        "CREATE INDEX metrics_level ON metrics (run, attempt, kind, level)",
        """CREATE TABLE series (
            run TEXT NOT NULL, attempt INTEGER NOT NULL, rank INTEGER NOT NULL, kind INTEGER NOT NULL,
            count INTEGER NOT NULL, last INTEGER NOT NULL,
            PRIMARY KEY (run, attempt, rank, kind)) WITHOUT ROWID""",
        """CREATE TABLE attempts (
            run TEXT NOT NULL, attempt INTEGER NOT NULL, state TEXT NOT NULL, started REAL, ended REAL,
            world INTEGER NOT NULL, cause TEXT, folded TEXT, upto INTEGER NOT NULL DEFAULT 0,
            over INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (run, attempt)) WITHOUT ROWID""",
        """CREATE TABLE positions (
            run TEXT NOT NULL, attempt INTEGER NOT NULL, host TEXT NOT NULL, cursor TEXT NOT NULL,
            count INTEGER NOT NULL, PRIMARY KEY (run, attempt, host)) WITHOUT ROWID""",
        """CREATE TABLE queue (
            place INTEGER PRIMARY KEY AUTOINCREMENT, run TEXT NOT NULL UNIQUE,
            priority INTEGER NOT NULL DEFAULT 0, after TEXT NOT NULL DEFAULT '', at REAL,
            submission TEXT NOT NULL, state TEXT NOT NULL, why TEXT NOT NULL DEFAULT '', child TEXT,
            user TEXT NOT NULL DEFAULT '')""",
        """CREATE TABLE tokens (
            name TEXT PRIMARY KEY, hash TEXT NOT NULL, role TEXT NOT NULL, created REAL NOT NULL,
            used REAL) WITHOUT ROWID""",
        """CREATE TABLE notes (key TEXT PRIMARY KEY, time REAL NOT NULL, data TEXT NOT NULL) WITHOUT ROWID""",
    ),
)
VERSION = len(SCHEMA)
OF_A_RUN = ("records", "chunks", "metrics", "series", "attempts", "positions")  # tables beside `runs`


# --- Asking and writing --------------------------------------------------------------------------


STRAY = re.compile("[\ud800-\udfff]")  # bytes that are no text, as Python holds them; SQLite refuses them


def storable(words: str) -> str:
    """As SQLite takes it. What ranks say, and what is typed, may hold stray bytes."""
    return STRAY.sub(lambda match: f"\\x{ord(match[0]) & 0xFF:02x}", words)


def read(path: Path, work: Work[T], nothing: T) -> T:
    """What `work` finds there; `nothing` where there is no such file yet. On a disk that can only be read,
    too."""
    before = number_of(path)
    if before is None:
        return nothing
    try:
        with contextlib.closing(connect(path)) as db:
            version = version_of(db, path)
            if version == VERSION:
                return work(db)
        if version == 0:
            return nothing  # whoever was to make it was killed
        make(path)
        with contextlib.closing(connect(path)) as db:
            return work(db)
    except sqlite3.OperationalError as error:
        try:
            with beside_a_lock(path) as db:
                return work(db) if version_of(db, path) == VERSION else nothing
        except (sqlite3.Error, OSError):
            raise RingctlError(f"{path}: cannot be read: {error}") from None
    except sqlite3.DatabaseError as error:
        if not is_damage(error):
            raise
        put_aside(path, before, error)
        return nothing


def write(path: Path, work: Work[T], *, safe: bool = True) -> T:
    """All that `work` does, or nothing of it; and, if it is to be `safe`, also over a power cut."""
    before = number_of(path)
    try:
        return in_transaction(path, work, safe)
    except sqlite3.DatabaseError as error:
        if not is_damage(error):
            raise cannot_write(path, error) from None
        put_aside(path, before, error)
    try:
        return in_transaction(path, work, safe)
    except sqlite3.Error as error:
        raise cannot_write(path, error) from None


def in_transaction(path: Path, work: Work[T], safe: bool) -> T:
    with contextlib.closing(opened(path)) as db:
        db.execute(f"PRAGMA synchronous={'FULL' if safe else 'NORMAL'}")
        with transaction(db):
            return work(db)


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """All that is done meanwhile, or nothing of it."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):  # SQLite may have done so itself
            db.execute("ROLLBACK")
        raise


def is_damage(error: sqlite3.Error) -> bool:
    """Whether the file is not what SQLite has written: its other complaints are of kinds of their own."""
    return type(error) is sqlite3.DatabaseError


def cannot_write(path: Path, error: sqlite3.Error) -> NotKept:
    """SQLite has several words for a disk without room."""
    why = str(error)
    with contextlib.suppress(OSError):
        disk = os.statvfs(path.resolve().parent)
        if disk.f_flag & os.ST_RDONLY:
            why = "its disk can only be read"
        elif disk.f_bavail * disk.f_frsize < LEAST_ROOM:
            why = "its disk is full"
    return NotKept(f"{path}: cannot be written: {why}")


# --- Opening -------------------------------------------------------------------------------------


def opened(path: Path) -> sqlite3.Connection:
    """The file, made where it is missing. Whoever keeps it open uses it in one thread, and not after fork."""
    if number_of(path) is None:
        make(path)
    db = connect(path)
    try:
        if version_of(db, path) == VERSION:
            return db
        db.close()
        make(path)
        return connect(path)
    except BaseException:
        db.close()
        raise


def connect(path: Path, options: str = "mode=rw") -> sqlite3.Connection:
    db = sqlite3.connect(f"file:{quote(str(path))}?{options}", uri=True, timeout=BUSY_S, isolation_level=None)
    db.row_factory = sqlite3.Row
    return db


def version_of(db: sqlite3.Connection, path: Path) -> int:
    """That of its schema; raises if it is a newer one than ours."""
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    if version > VERSION:
        raise RingctlError(
            f"{path}: a newer ringctl has written it (schema {version}; this one knows {VERSION})",
            fix="use that version, or let RINGCTL_HOME name another folder for this one",
        )
    return version


def number_of(path: Path) -> int | None:
    """What tells the file from one that takes its place; None if there is none."""
    try:
        return path.stat().st_ino
    except OSError:
        return None


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Nobody else makes, replaces or moves the file meanwhile."""
    lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def make(path: Path) -> None:
    """The file with our schema, in place of none or of an older one."""
    try:
        with alone(path):
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            with contextlib.closing(connect(path)) as db:
                upgrade(db, path)
            sync_folder(path.parent)
    except OSError as error:
        raise NotKept(f"{path}: cannot be made: {error.strerror}") from None


def upgrade(db: sqlite3.Connection, path: Path) -> None:
    if version_of(db, path) == 0:
        db.execute("PRAGMA auto_vacuum=INCREMENTAL")
        if not is_shared(path.parent):
            db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=FULL")
    with transaction(db):
        version = version_of(db, path)
        for statement in (statement for step in SCHEMA[version:] for statement in step):
            db.execute(statement)
        db.execute(f"PRAGMA user_version={VERSION}")


def is_shared(folder: Path) -> bool:
    """Whether other machines may have the same disk."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    where = os.path.join(os.path.realpath(folder), "")
    kinds = {}
    for line in lines:
        mount, _, about = line.partition(" - ")
        place = os.path.join(mount.split()[4].encode().decode("unicode_escape"), "")
        if where.startswith(place):
            kinds[place] = about.split()[0]
    return bool(kinds) and kinds[max(kinds, key=len)].startswith(SHARED_DISKS)


# --- Where it cannot be opened as usual ----------------------------------------------------------


@contextlib.contextmanager
def beside_a_lock(path: Path) -> Iterator[sqlite3.Connection]:
    """For a disk that can only be read: SQLite cannot make the files there that it would need. What was
    written last may still be in its log, which it takes in a copy."""
    wal = Path(f"{path}-wal")
    if not wal.exists() or wal.stat().st_size == 0:
        with contextlib.closing(connect(path, "mode=ro&immutable=1")) as db:
            yield db
        return
    with tempfile.TemporaryDirectory() as folder:
        for name in (path, wal):
            shutil.copy(name, folder)
        with contextlib.closing(connect(Path(folder, path.name))) as db:
            yield db


def put_aside(path: Path, before: int | None, error: sqlite3.Error) -> None:
    """What SQLite cannot read is kept under another name, with all that belongs to it; and said so."""
    aside = f"{path}.damaged-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        with alone(path):
            if number_of(path) != before:
                return  # somebody else has done so meanwhile
            for ending in BESIDE:
                with contextlib.suppress(FileNotFoundError):
                    os.rename(f"{path}{ending}", f"{aside}{ending}")
    except OSError as problem:
        raise RingctlError(
            f"{path}: it is damaged ({error}), and cannot be moved aside: {problem.strerror}"
        ) from None
    print(f"{path}: it is damaged ({error}); it is now {aside}, and a new one is begun", file=sys.stderr)
