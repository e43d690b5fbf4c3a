"""Files of a run, from its hosts to this machine: streamed to the disk, bounded in length and time, verified.

Names and places come from here, never from a host. A host is believed about how long a file is as far as
there is room for it, and may take its time as long as something comes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from launcher.agent import ANSWER_S, Agent, Conversation
from launcher.errors import HostError, RingctlError
from launcher.fanout import fan_out
from launcher.pull import Copy, Listing, MetricsFile, listing
from launcher.text import size
from launcher.transport import Channel

SOURCE = "hostfiles.py"
QUIET_S = 60.0  # in so long
WAIT_S = 1.0  # for the next piece, before looking again
LONGEST_S = 5.0  # counts of what took longer: we may have been stopped meanwhile
LEAST_BYTES = 64 << 10  # at least so much comes, or the rest of a file
GROWTH = 64 << 20  # that a file or a log may have become longer since its host told its length
BLOCK = 1 << 20


class Damaged(RingctlError):
    """A host has another model than the one that was written there."""


class NotHere(RingctlError):
    """This machine cannot take what a host sends."""


class NoRoom(NotHere):
    """A host says that it has more than there is room for here."""


class Gone(RingctlError):
    """A host does not have a file any more."""


# --- Asking --------------------------------------------------------------------------------------


def listings(agents: Mapping[str, Agent], run: str) -> dict[str, Listing | RingctlError]:
    """What each host has of the run, or why that is not known."""

    def ask(name: str) -> Listing:
        conversation = agents[name].converse(SOURCE, "hostfiles:list", [{"run": run}])
        with contextlib.closing(conversation):
            return listing(name, conversation.answer(ANSWER_S))

    return fan_out(agents, ask)


class Sender(Conversation):
    """A host that sends files, one after the other."""

    @classmethod
    def of(cls, agent: Agent, run: str, files: Sequence[Mapping[str, Any]]) -> Sender:
        argv = [*agent.transport.program(SOURCE), "send"]
        return cls(agent.transport, SOURCE, argv, [{"run": run, "files": list(files)}])

    def length(self, path: str, seconds: float = ANSWER_S) -> int:
        """Of what is wanted of the next file, which is that."""
        answer = self.answer(max(seconds, 0.0))
        if "missing" in answer:
            raise Gone(f"{self.host.name}: {path} is not there any more")
        length = answer.get("bytes")
        if not isinstance(length, int) or isinstance(length, bool) or length < 0:
            raise HostError(self.host.name, f"it does not say how long {path} is")
        return length

    def body(self, length: int, pace: Pace | None = None) -> Iterator[bytes]:
        """So many bytes, as they come, and none that comes after them."""
        pace = pace or Pace(self.host.name)
        while length:
            data = bytes(self._rest) or self._channel.read(pace.left())
            if data == b"":
                raise HostError(self.host.name, "the connection was lost")
            piece, self._rest = (data or b"")[:length], bytearray((data or b"")[length:])
            length -= len(piece)
            pace.came(len(piece))
            yield piece


class Pace:
    """What is asked of a host that sends: not to be fast, but to come to an end. Only the time that was spent
    waiting for it counts: not what we did meanwhile, nor how long we were stopped (Ctrl-Z)."""

    def __init__(self, host: str) -> None:
        self._host, self._came, self._waited, self._began = host, 0, 0.0, time.monotonic()

    def left(self) -> float:
        """How long to wait for more; HostError if too little has come for too long."""
        if self._waited >= QUIET_S:
            raise HostError(self._host, f"it sent no more than {self._came:,} bytes in {QUIET_S:.0f} s")
        self._began = time.monotonic()
        return WAIT_S

    def came(self, number: int) -> None:
        """So many bytes have come since, perhaps none."""
        self._waited += min(time.monotonic() - self._began, WAIT_S)
        self._came += number
        if self._came >= LEAST_BYTES:
            self._came, self._waited = 0, 0.0


# --- Models and metrics --------------------------------------------------------------------------


def take_model(agent: Agent, run: str, folder: str, copy: Copy, part: Path) -> None:
    """`part` is the whole model afterwards. It goes on from what there is of it, and what has come when the
    host goes away stays."""
    if is_copy(part, copy):
        return
    digest, have = begun(part, copy.bytes)
    path = f"checkpoints/{folder}/model.pt"
    with contextlib.closing(Sender.of(agent, run, [{"path": path, "offset": have}])) as sender:
        length = sender.length(path)
        if have + length != copy.bytes:
            raise Damaged(f"{copy.host}: model.pt has {have + length:,} bytes of {copy.bytes:,}")
        need_room(part.parent, length)
        write(part, "ab", sender.body(length), digest)
    if digest.hexdigest() == copy.sha256:
        return
    part.unlink()
    if not have:
        raise Damaged(f"{copy.host}: model.pt has not the checksum that it had when it was written")
    take_model(agent, run, folder, copy, part)  # its beginning was perhaps that of a damaged one


def begun(part: Path, whole: int) -> tuple[Any, int]:
    """The hash of what there is of a file, and how much that is; what is as long as it is no beginning."""
    with writing(part):
        have = part.stat().st_size if part.exists() else 0
        if have < whole:
            return hashed(part), have
        part.unlink(missing_ok=True)
        return hashlib.sha256(), 0


def is_copy(path: Path, copy: Copy) -> bool:
    """Whether a file here is that very model."""
    with writing(path):
        same_size = path.is_file() and path.stat().st_size == copy.bytes
        return same_size and bool(hashed(path).hexdigest() == copy.sha256)


def hashed(path: Path) -> Any:
    """The SHA-256 of a file so far; of one that is not there, that of nothing."""
    digest = hashlib.sha256()
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest


def take_metrics(agent: Agent, run: str, files: Sequence[MetricsFile], folder: Path, lines: bool) -> int:
    """Write each under its name here; how many that were. `lines`: somebody may still be writing the last."""
    wanted = [{"path": file.path, "offset": 0, "lines": lines} for file in files]
    pace, patience = Pace(agent.host.name), ANSWER_S  # with all of them together
    with contextlib.closing(Sender.of(agent, run, wanted)) as sender:
        for file in files:
            began = time.monotonic()
            length = sender.length(file.path, patience)
            patience -= min(time.monotonic() - began, LONGEST_S)
            if length > file.bytes + GROWTH:
                raise HostError(agent.host.name, f"{file.path} is longer than it said")
            need_room(folder, length)
            half = folder / (file.name + ".part")
            write(half, "wb", sender.body(length, pace))
            half.rename(folder / file.name)
    return len(files)


def write(path: Path, mode: Literal["wb", "ab"], pieces: Iterable[bytes], digest: Any = None) -> None:
    """All of them, as they come, and to the disk."""
    with writing(path), path.open(mode) as file:
        for piece in pieces:
            file.write(piece)
            if digest is not None:
                digest.update(piece)
        file.flush()
        os.fsync(file.fileno())


def need_room(folder: Path, number: int) -> None:
    free = shutil.disk_usage(folder).free
    if number > free:
        words = f"{folder}: no room: {size(number)} are needed there, and {size(free)} are free"
        raise NoRoom(words, fix="make room there, or name another folder")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """What this machine's disk refuses is told with the file that it was about."""
    try:
        yield
    except OSError as error:
        raise NotHere(f"{error.filename or path}: {error.strerror or error}") from None


# --- Logs ----------------------------------------------------------------------------------------


class Bounded(Agent):
    """A host whose log may have so many bytes, and has to come to an end."""

    def __init__(self, agent: Agent, most: int) -> None:
        super().__init__(agent.host, agent.transport, agent.hidden)
        self._most = most + GROWTH

    def follow(self, request: dict[str, Any]) -> Channel:
        return BoundedChannel(super().follow(request), self.host.name, self._most)


class BoundedChannel:
    """A channel with an end; see Channel."""

    def __init__(self, channel: Channel, host: str, most: int) -> None:
        self._channel, self._host, self._left, self._pace = channel, host, most, Pace(host)
        self.began = channel.began

    def read(self, timeout: float) -> bytes | None:
        data = self._channel.read(min(timeout, self._pace.left()))
        self._left -= len(data or b"")
        if self._left < 0:
            raise HostError(self._host, "its log is longer than it said")
        self._pace.came(len(data or b""))
        return data

    def send(self, data: bytes) -> None:
        self._channel.send(data)

    def end_input(self) -> None:
        self._channel.end_input()

    def errors(self) -> bytes:
        said, self.began = self._channel.errors(), self._channel.began
        return said

    def close(self) -> None:
        self._channel.close()
