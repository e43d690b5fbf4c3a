"""What a rank prints and what it writes to its metrics file, made into events."""

from __future__ import annotations

import json
import os
import re

from launcher.hostdisk import READ_BYTES, read_plain

TYPE_CHECKING = False  # a type checker takes it for true; importing `typing` at run time would cost a start
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

LONGEST_LINE = 32 << 20  # a line without an end is passed on in pieces of this size
PLAIN = bytes(range(0x20, 0x7F))
LONGEST_RECORD = 64 << 10  # bytes of a metrics record; longer ones are left out,
MOST_DEEP = 8  # and such as hold lists or objects in each other to more levels than this
MOST_KEPT = 200  # names whose last values are kept of a rank, in its state and in every answer about it,
LONGEST_KEPT = 200  # as long as neither the name nor the value is longer
COMPARED = 2000  # bytes at two places of a metrics file; both have room where its warden finds them
EVENT_KEYS = ("kind", "time", "run", "attempt", "host", "rank")  # a metrics record cannot set these


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
    """New records of a rank's metrics file, which its program appends to, or writes anew with what it had
    written and more, or with other records instead."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.offset = 0
        self.head = b""  # the first bytes of what was read,
        self.mark = b""  # and those before `offset`: what somebody has written anew has others
        self.skipped = 0  # bytes that nobody has read

    def size(self) -> int:
        try:
            return os.stat(self.path).st_size
        except OSError:
            return 0

    def read(self) -> list[dict[str, Any]]:
        """The records added since the last call; what is not a JSON object, or too much of one, is left
        out."""
        data = self.unread()
        whole = data[: data.rfind(b"\n") + 1]
        if not whole and len(data) >= READ_BYTES - COMPARED:
            whole = data  # no record is a megabyte long: skip the garbage
        self.take(whole)
        return records_in(whole)

    def rest(self, most: int) -> Iterator[list[dict[str, Any]]]:
        """What is there now, a piece at a time: whoever goes on writing does not keep us. Of more than `most`
        bytes, the last ones."""
        self.unread()  # it may have been begun anew
        end = self.size()
        self.skip_to(end - most)
        before = -1
        while before < self.offset < end:
            before = self.offset
            yield self.read()
        yield self.read_unended()

    def unread(self) -> bytes:
        """What is there behind what was read, about as much as is read at a time."""
        try:
            data = read_plain(self.path, self.offset - len(self.mark))
            if data.startswith(self.mark):
                return data[len(self.mark) :]
            if len(data) < len(self.mark) and self.is_being_repeated():
                return b""  # until it is as long as it was
            self.offset, self.head, self.mark = 0, b"", b""
            return read_plain(self.path)
        except OSError:
            return b""

    def is_being_repeated(self) -> bool:
        """Whether a file that is shorter now begins as it did: its program is about to write the same again,
        and then more. If it has ended before that, all that is there was read."""
        return self.head.startswith(read_plain(self.path)[: len(self.head)])

    def take(self, data: bytes) -> None:
        """This was read."""
        if self.offset == len(self.head):
            self.head = (self.head + data)[:COMPARED]
        self.mark = (self.mark + data)[-COMPARED:]
        self.offset += len(data)

    def skip_to(self, offset: int) -> None:
        if offset > self.offset:
            self.skipped += offset - self.offset
            self.offset, self.mark = offset, b""

    def read_unended(self) -> list[dict[str, Any]]:
        """The last record, if it is whole and has no newline behind it: nobody who has ended writes one."""
        data = self.unread()
        records = records_in(data) if b"\n" not in data else []
        self.take(data if records else b"")
        return records

    @property
    def place(self) -> list[bytes]:
        """How far it was read, for whoever is to go on."""
        return [b"%d %d " % (self.offset, len(self.head)), self.head, self.mark]

    def go_on_from(self, place: bytes) -> None:
        offset, size, known = place.split(b" ", 2)
        self.offset, self.head, self.mark = int(offset), known[: int(size)], known[int(size) :]


def records_in(lines: bytes) -> list[dict[str, Any]]:
    records = []
    for line in lines.splitlines():
        try:
            record = plain(json.loads(line)) if len(line) <= LONGEST_RECORD else None
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            records.append({k: v for k, v in record.items() if k not in EVENT_KEYS})
    return records


def plain(value: Any, levels: int = MOST_DEEP) -> Any:
    """Without NaN and infinities, which JSON does not have: they become "nan", "inf", "-inf". A ValueError if
    there are more levels than so many."""
    if isinstance(value, (dict, list)) and not levels:
        raise ValueError("too many levels")
    if isinstance(value, dict):
        return {key: plain(part, levels - 1) for key, part in value.items()}
    if isinstance(value, list):
        return [plain(part, levels - 1) for part in value]
    return str(value) if isinstance(value, float) and not -1e308 <= value <= 1e308 else value


def keep_last(last: dict[str, Any], record: dict[str, Any]) -> None:
    """Take the record's values into what was last told, of which there is never more than fits a state."""
    for name, value in record.items():
        short = isinstance(value, (int, float, str)) and max(len(name), len(str(value))) <= LONGEST_KEPT
        if short and (name in last or len(last) < MOST_KEPT):
            last[name] = value
