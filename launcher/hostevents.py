"""A run's event log: JSON lines in numbered segments."""

from __future__ import annotations

import errno
import json
import os
import time

from launcher.hostdisk import NO_FOLDER

RANK_EXITED = b'{"kind":"rank_exited"'
FINAL_EVENTS = (RANK_EXITED, b'{"kind":"host_finished"')
SEGMENT_BYTES = 64 << 20  # a log segment is closed and never touched again once it is this long


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


def log_exit(
    log: EventLog,
    rank: int,
    state: str,
    code: int,
    signal: str | None,
    reason: str,
    stopping: float | None = None,
    ago: float | None = None,
) -> None:
    """A rank's one final event; `reason` says why it did not end by itself. If that was a stop, this host had
    heard of it so many seconds before. One that nobody looked after was still there so long `ago`."""
    about = {"state": state, "exit_code": code, "signal": signal, "reason": reason}
    known = {"stopping": stopping, "ago": ago}
    more = {key: round(seconds, 3) for key, seconds in known.items() if seconds is not None}
    log.event("rank_exited", rank=rank, **about, **more)


def event_line(kind: str, /, **data: object) -> bytes:
    record = dict({"kind": kind, "time": round(time.time(), 6)}, **data)
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


class EventLog:
    """The run's events as JSON lines in numbered segments that are only ever appended to."""

    def __init__(self, folder: str, attempt: int) -> None:
        self.folder = folder
        self.attempt = attempt
        mine = [s for a, s in segments(folder) if a == attempt]
        self.segment = max(mine) if mine else 0
        self.fd = -1
        self.size = 0
        self.given = 0  # bytes, of all segments
        self.waiting: list[memoryview] = []  # what there was no room for, in pieces of whole lines
        self.held = 0  # bytes of it
        self.torn = False  # the first of them is written in part
        self.problem: str | None = None  # why it was not written
        self.unsaved: int | None = None  # the same, as its number
        self.lost = 0  # lines that are longer than a file may be
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
        self.given += len(data)
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
                if error.errno in NO_FOLDER:
                    raise
                if (
                    error.errno == errno.EFBIG and self.size
                ):  # what `ulimit -f` allows: it goes on in the next one
                    self.pass_on()
                    continue
                self.problem, self.unsaved = error.strerror, error.errno
                return False
            self.unsaved = None
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
                self.unsaved = None
                return True
        except OSError as error:  # some file systems look for room only now
            self.problem, self.unsaved = error.strerror, error.errno
        return False

    def pass_on(self) -> None:
        """Begin the next segment with the line of which this one has a part, which is passed over there; or,
        if there is nothing else in this one, with the line after it: no segment has room for it."""
        whole = self.waiting[0].obj
        assert isinstance(whole, bytes)
        written = len(whole) - len(self.waiting[0])
        start = whole.rfind(b"\n", 0, written) + 1
        if written - start >= self.size:
            start, self.lost = whole.index(b"\n", written) + 1, self.lost + 1
        self.held += written - start
        self.waiting[:1] = [memoryview(whole)[start:]] if start < len(whole) else []
        self.torn, self.size = False, SEGMENT_BYTES

    def shorten(self, most: int) -> int:
        """On a disk that stays full: of what waits, keep the first lines up to so many bytes, and how ranks
        ended. How many are lost."""
        data = b"".join(self.waiting)
        kept = data.rfind(b"\n", 0, most) + 1
        rest = data[kept:].splitlines(keepends=True)
        ends = [line for line in rest if line.startswith(RANK_EXITED)]
        if self.torn and not kept:
            self.torn, self.size = False, SEGMENT_BYTES  # half a line is passed over at a segment's end
        self.waiting = [memoryview(part) for part in (data[:kept], *ends) if part]
        self.held = sum(map(len, self.waiting))
        return len(rest) - len(ends)

    def close(self) -> None:
        os.close(self.fd)

    def event(self, kind: str, /, **data: object) -> None:
        self.write(event_line(kind, **data))
