"""Every host dials every other: one file, standard library only, Python 3.8 and up, beside probe.py.

A connection says the token that all hosts of this preflight were given, and is told where it was seen to come
from. Then come messages: `P` is sent back at once, and `D`, a length and as many bytes are answered with how
many are still to come. Nothing else is accepted, and nobody without the token gets a word.

All connections of a host are small generators in one loop, so that sixty peers need no threads.
"""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import struct
import time

TYPE_CHECKING = False  # a type checker takes it for true; importing `typing` at run time would cost a start
if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import Any

    Task = Generator[tuple[int, int, float], None, None]  # (descriptor, events, deadline) waited for

CONNECT_S = 3.0  # a lost packet is sent again after one second, and after three
STEP_S = 2.0  # for each message after that
SAMPLE_S = 0.3  # of throughput, at most
MEASURE_S = 3.0  # for all samples of a host
LARGE = 64 << 10  # several jumbo frames
SAMPLE, PINGS = 512 << 10, 5
FEW = 16  # peers; with more of them each is measured more briefly
LONGEST_HELLO = 1 << 12
READ, WRITE = select.EPOLLIN, select.EPOLLOUT


class Lost(Exception):
    """A conversation that did not come to its end; the message says how far it came."""


# --- The loop ------------------------------------------------------------------------------------


class Loop:
    """Runs generators, each of which yields what it waits for and until when."""

    def __init__(self) -> None:
        self.poll = select.epoll()
        self.waiting: dict[int, tuple[Task, float]] = {}

    def start(self, task: Task) -> None:
        self._step(task, False)

    def watch(self, fd: int) -> None:
        """Report, by `turn`, when something that no task waits for can be read."""
        self.poll.register(fd, READ)

    def unwatch(self, fd: int) -> None:
        self.poll.unregister(fd)

    def close(self) -> None:
        for task, _ in self.waiting.values():
            task.close()  # and with it its socket
        self.poll.close()

    def turn(self, until: float) -> list[int]:
        """Wait for the next thing to happen, and let its task go on; which watched descriptors are ready."""
        soonest = min([deadline for _, deadline in self.waiting.values()] + [until])
        ready = []
        for fd, _ in self.poll.poll(max(0.0, soonest - time.monotonic())):
            if fd in self.waiting:
                self._step(self._taken(fd), False)
            else:
                ready.append(fd)
        now = time.monotonic()
        for fd in [fd for fd, (_, deadline) in self.waiting.items() if deadline <= now]:
            if fd in self.waiting:
                self._step(self._taken(fd), True)
        return ready

    def _taken(self, fd: int) -> Task:
        self.poll.unregister(fd)
        return self.waiting.pop(fd)[0]

    def _step(self, task: Task, late: bool) -> None:
        try:
            fd, events, deadline = task.throw(TimeoutError()) if late else next(task)
        except StopIteration:
            return
        self.poll.register(fd, events)
        self.waiting[fd] = (task, deadline)


def read_line(sock: socket.socket, deadline: float) -> Generator[tuple[int, int, float], None, bytes]:
    """Up to a newline and not further: what follows it is not ours to take."""
    line = b""
    while not line.endswith(b"\n"):
        yield sock.fileno(), READ, deadline
        head = sock.recv(LONGEST_HELLO, socket.MSG_PEEK)
        if not head or len(line) > LONGEST_HELLO:
            raise Lost("it hung up" if not head else "it said something else")
        line += sock.recv(head.find(b"\n") + 1 or len(head))
    return line


def send(sock: socket.socket, data: bytes, deadline: float) -> Task:
    view = memoryview(data)
    while view:
        try:
            view = view[sock.send(view) :]
        except BlockingIOError:
            yield sock.fileno(), WRITE, deadline


# --- Being dialled -------------------------------------------------------------------------------


def listener(address: str, port: int = 0) -> socket.socket:
    """On the interface that gradients will take; port 0 is one of the ephemeral range, as gloo takes them."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
        sock.listen(256)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def welcome(server: socket.socket, loop: Loop, name: str, token: str) -> None:
    """Take whoever is waiting."""
    while True:
        try:
            sock, (address, _) = server.accept()
        except OSError:
            return
        sock.setblocking(False)
        loop.start(serve(sock, address, name, token))


def serve(sock: socket.socket, address: str, name: str, token: str) -> Task:
    """One peer, until it hangs up or is silent for long."""
    with sock:
        try:
            hello = yield from read_line(sock, time.monotonic() + STEP_S)
            if hello.strip() != token.encode():
                return
            answer = json.dumps({"name": name, "seen": address}).encode() + b"\n"
            yield from send(sock, answer, time.monotonic() + STEP_S)
            while True:
                yield sock.fileno(), READ, time.monotonic() + CONNECT_S + MEASURE_S
                kind = sock.recv(1)
                if kind == b"P":
                    yield from send(sock, kind, time.monotonic() + STEP_S)
                elif kind == b"D":
                    yield from swallow(sock)
                else:
                    return
        except (OSError, ValueError, RecursionError, Lost):
            return


def swallow(sock: socket.socket) -> Task:
    """Take a message in; after SAMPLE_S say how far it came, without waiting for its end."""
    head = b""
    while len(head) < 8:
        yield sock.fileno(), READ, time.monotonic() + STEP_S
        piece = sock.recv(8 - len(head))
        if not piece:
            raise Lost("it hung up")
        head += piece
    left = struct.unpack(">Q", head)[0]
    enough = time.monotonic() + SAMPLE_S
    while left and time.monotonic() < enough:
        yield sock.fileno(), READ, time.monotonic() + STEP_S
        size = len(sock.recv(min(left, 1 << 18)))
        if not size:
            raise Lost("it hung up")
        left -= size
    report = json.dumps({"left": left}).encode() + b"\n"
    yield from send(sock, report, time.monotonic() + STEP_S)


# --- Dialling ------------------------------------------------------------------------------------


def dial_all(
    peers: list[dict[str, Any]], loop: Loop, servers: list[socket.socket], name: str, token: str
) -> list[dict[str, Any]]:
    """What came of each peer (`name`, `address`, `port`, whether to `measure` it), while being dialled."""
    results = [{"target": peer["name"], "port": peer["port"], "problem": "not tried"} for peer in peers]
    open_ones: list[tuple[socket.socket, dict[str, Any]]] = []
    for peer, result in zip(peers, results):
        loop.start(dial(peer, result, token, open_ones if peer.get("measure") else None))
    serve_until(lambda: all(r["problem"] != "not tried" for r in results), loop, servers, name, token, 15.0)
    order = {peer["name"]: place for place, peer in enumerate(peers)}
    open_ones.sort(key=lambda pair: order[pair[1]["target"]])
    few = len(peers) <= FEW
    loop.start(measure_all(open_ones, SAMPLE if few else LARGE, PINGS if few else 2))
    serve_until(lambda: not open_ones, loop, servers, name, token, 10.0)
    return results


def serve_until(
    done: Any, loop: Loop, servers: list[socket.socket], name: str, token: str, seconds: float
) -> None:
    deadline = time.monotonic() + seconds
    by_fd = {server.fileno(): server for server in servers}
    while not done() and time.monotonic() < deadline:
        for fd in loop.turn(min(deadline, time.monotonic() + 0.5)):
            if fd in by_fd:
                welcome(by_fd[fd], loop, name, token)


def dial(
    peer: dict[str, Any],
    result: dict[str, Any],
    token: str,
    open_ones: list[tuple[socket.socket, dict[str, Any]]] | None,
) -> Task:
    """Connect, be recognised, get a small and then a large message across; kept open to be measured."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    kept = False
    try:
        yield from connect(sock, peer["address"], int(peer["port"]))
        yield from send(sock, token.encode() + b"\n", time.monotonic() + STEP_S)
        answer = json.loads((yield from read_line(sock, time.monotonic() + STEP_S)))
        if answer["name"] != peer["name"]:
            raise Lost(f"{peer['address']} leads to {answer['name']} from there")
        result["seen"] = str(answer["seen"])
        result["large"] = False
        yield from transfer(sock, LARGE, time.monotonic() + STEP_S)
        result["large"], kept = True, open_ones is not None
        if open_ones is not None:
            open_ones.append((sock, result))
        result["problem"] = ""
    except TimeoutError:
        what = "large messages do not arrive" if "seen" in result else "no answer"
        result["problem"] = f"{what} (timed out)"
    except OSError as error:
        result["problem"] = os.strerror(error.errno).lower() if error.errno else str(error)
    except (Lost, ValueError, KeyError, TypeError, RecursionError) as error:
        result["problem"] = str(error) or "it said something else"
    finally:
        if not kept:
            sock.close()


def connect(sock: socket.socket, address: str, port: int) -> Task:
    code = sock.connect_ex((address, port))
    if code == errno.EINPROGRESS:
        yield sock.fileno(), WRITE, time.monotonic() + CONNECT_S
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))


def transfer(
    sock: socket.socket, size: int, deadline: float
) -> Generator[tuple[int, int, float], None, dict[str, Any]]:
    """Send a message of this size; what the other end says of it."""
    yield from send(sock, b"D" + struct.pack(">Q", size) + bytes(min(size, LARGE)), deadline)
    left, block = size - min(size, LARGE), bytes(LARGE)
    while left and not readable(sock):  # an early word means: that is enough
        yield from send(sock, block[:left], deadline)
        left -= min(left, LARGE)
    report = json.loads((yield from read_line(sock, deadline)))
    return dict(report)


def readable(sock: socket.socket) -> bool:
    try:
        return bool(sock.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False


def measure_all(open_ones: list[tuple[socket.socket, dict[str, Any]]], sample: int, pings: int) -> Task:
    """One after the other, so that they do not measure each other."""
    over = time.monotonic() + MEASURE_S
    while open_ones:
        sock, result = open_ones[0]
        with sock:
            try:
                if time.monotonic() < over:
                    yield from measure(sock, result, sample, pings)
            except (OSError, Lost, ValueError, KeyError, TypeError, RecursionError):
                pass  # it could be reached; how fast is not known
        open_ones.pop(0)


def measure(sock: socket.socket, result: dict[str, Any], sample: int, pings: int) -> Task:
    times = []
    for _ in range(pings):
        began = time.monotonic()
        yield from send(sock, b"P", began + STEP_S)
        yield sock.fileno(), READ, began + STEP_S
        sock.recv(1)
        times.append(time.monotonic() - began)
    result["latency_ms"] = round(min(times) * 1000, 3)
    began = time.monotonic()
    report = yield from transfer(sock, sample, began + STEP_S)
    result["mbit_s"] = round((sample - report["left"]) * 8 / (time.monotonic() - began) / 1e6, 1)
