"""How much one client may ask of the service: requests a second, bytes, and time to say what it wants."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread
from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_BODY = 1 << 20
MOST_CODE = 64 << 20  # a snapshot as a packed tar
BODY_S = 30.0  # a small body has come by then
CODE_S = 300.0
HEAD_S = 10.0  # and the head of a request by then, of each on a connection
PIECE = 64 << 10  # bytes of an answer that wait to be sent: the rest stays where it is until these are gone
SEND_S = 30.0  # by then a reader has taken a piece
MOST_CONNECTIONS = 256
MOST_HANDSHAKES = 64  # besides them
MOST_STREAMS = 128
MOST_STREAMS_EACH = 64  # of one user: nobody keeps all others out
# Requests at once that wait for hosts: the others' threads are not theirs. Whoever only looks never keeps
# anybody from ending a run.
MOST_READS = 8
MOST_READS_EACH = 2  # of one user
MOST_CHANGES = 12
MOST_CHANGES_EACH = 4
# Large answers at once, from when they are made until they are sent; the others wait for their turn.
MOST_LARGE = 32
MOST_LARGE_EACH = 4  # of one user
MOST_WAITING_EACH = 64
MOST_MAKERS = 2  # of them, at once: each takes its share of the one processor that Python uses
MOST_HEAD = 16 << 10

T = TypeVar("T")


class Bucket:
    """So many at once, and so many a second after that."""

    def __init__(self, burst: float, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.burst, self.rate, self.clock = burst, rate, clock
        self._left, self._at = burst, clock()

    def take(self) -> bool:
        now = self.clock()
        self._left = min(self.burst, self._left + (now - self._at) * self.rate)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Buckets:
    """One for each client; those that were not seen for long are forgotten."""

    MOST = 4096

    def __init__(self, burst: float, rate: float) -> None:
        self._burst, self._rate = burst, rate
        self._known: OrderedDict[str, Bucket] = OrderedDict()

    def of(self, client: str) -> Bucket:
        bucket = self._known.get(client)
        if bucket is None:
            bucket = self._known[client] = Bucket(self._burst, self._rate)
            if len(self._known) > self.MOST:
                self._known.popitem(last=False)
        self._known.move_to_end(client)
        return bucket


class Busy(Exception):
    """One user asks for too much at once; the message says of what."""


class Hands:
    """The threads of requests that wait for hosts, or whose answers are large: some for looking, others for
    changing something, and of each no more than some for one user. Made in the event loop, and used there
    alone."""

    def __init__(self) -> None:
        self._reading, self._changing = CapacityLimiter(MOST_READS), CapacityLimiter(MOST_CHANGES)
        self._making, self._large = CapacityLimiter(MOST_MAKERS), CapacityLimiter(MOST_LARGE)
        self._reads: Counter[str] = Counter()
        self._changes: dict[str, CapacityLimiter] = {}
        self._large_of: dict[str, CapacityLimiter] = {}

    @contextlib.contextmanager
    def looking(self, user: str) -> Iterator[None]:
        """While hosts are waited for, and until the answer is sent. Raises Busy: a page that looks can look
        again."""
        if self._reads[user] >= MOST_READS_EACH:
            raise Busy(f"{MOST_READS_EACH} of your requests wait for hosts already")
        self._reads[user] += 1
        try:
            yield
        finally:
            self._reads[user] -= 1
            if not self._reads[user]:
                del self._reads[user]

    async def read(self, work: Callable[[], T]) -> T:
        return await to_thread.run_sync(work, limiter=self._reading)

    @contextlib.asynccontextmanager
    async def turn(self, user: str) -> AsyncIterator[None]:
        """While a large answer is made, and until it is sent; waits for it. Raises Busy for a user who waits
        too often."""
        mine = self._large_of.setdefault(user, CapacityLimiter(MOST_LARGE_EACH))
        if mine.statistics().tasks_waiting >= MOST_WAITING_EACH:
            raise Busy(f"{MOST_WAITING_EACH} of your requests wait already")
        async with mine, self._large:
            yield

    async def make(self, work: Callable[[], T]) -> T:
        return await to_thread.run_sync(work, limiter=self._making)

    async def change(self, user: str, work: Callable[[], T]) -> T:
        """Waits for the user's turn: whoever ends ten runs at once means all of them."""
        async with self._changes.setdefault(user, CapacityLimiter(MOST_CHANGES_EACH)):
            return await to_thread.run_sync(work, limiter=self._changing)


class Listener(socket.socket):
    """Also counts connections that do not speak HTTP yet, for want of a TLS handshake: nobody else knows of
    them. When there are too many, the oldest goes first."""

    def __init__(self, family: int) -> None:
        # By its name: only then asyncio sends answers at once (TCP_NODELAY), and nobody waits for an ACK.
        super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        # Inherited by its connections. Else the kernel would take megabytes, whether or not they are read.
        self.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, PIECE)
        self._shaking: dict[int, socket.socket] = {}

    def accept(self) -> tuple[socket.socket, Any]:
        end, address = super().accept()
        self._shaking = {number: each for number, each in self._shaking.items() if each.fileno() == number}
        self._shaking[end.fileno()] = end
        if len(self._shaking) > MOST_HANDSHAKES:
            with contextlib.suppress(OSError):  # it has gone by itself
                self._shaking.pop(next(iter(self._shaking))).shutdown(socket.SHUT_RDWR)
        return end, address

    def speaks(self, transport: asyncio.BaseTransport) -> None:
        self._shaking.pop(transport.get_extra_info("socket").fileno(), None)


class PatientProtocol(H11Protocol):
    """Closes a connection whose request does not come in time, or whose answer is not taken; when there are
    too many connections, the one that has been silent for longest goes first."""

    def __init__(self, listener: Listener, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.listener = listener
        self.silent_since = float("inf")  # for as long as a request is being answered
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        self.listener.speaks(transport)
        # So that we hear when all is sent: writing is paused until then.
        transport.set_write_buffer_limits(high=1, low=0)
        super().connection_made(transport)
        self._wait_for_head()
        if len(self.connections) > MOST_CONNECTIONS:
            mine = [each for each in self.connections if isinstance(each, PatientProtocol)]
            min(mine, key=lambda each: each.silent_since).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self._is_answering() and not self.flow.write_paused:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        if not self.flow.write_paused:
            self._wait_for_head()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_waiting()
        self.silent_since = self.loop.time()
        self._timer = self.loop.call_later(SEND_S, self.transport.abort)

    def resume_writing(self) -> None:
        """All that was written is sent."""
        super().resume_writing()
        self._stop_waiting()
        if not self._is_answering():
            self._wait_for_head()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_head(self) -> None:
        self._stop_waiting()
        self.silent_since = self.loop.time()
        self._timer = self.loop.call_later(HEAD_S, self._end)

    def _stop_waiting(self) -> None:
        self.silent_since = float("inf")
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        """The end of an answer may still be on its way through TLS."""
        if self.cycle is None:
            self.transport.abort()
        else:
            self.transport.close()
            self._timer = self.loop.call_later(SEND_S, self.transport.abort)
