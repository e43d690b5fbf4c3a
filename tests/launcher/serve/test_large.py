"""Large answers: for readers that are slow, that are many, and that do not read at all."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

import pytest

from tests.launcher.ringctl import wait_for
from tests.launcher.serve.service import Service, serving

LINES, LETTERS = 5000, 830
ESTABLISHED = "01"  # as the kernel writes it


def talkative(service: Service, letter: str = "x") -> str:
    """A run whose log is larger than any answer."""
    says = f"[print(str(i).rjust(6, '0') + {letter!r} * {LETTERS}) for i in range({LINES})]"
    run = service.submit(sys.executable, "-c", says, prefork=False, skip_preflight=True)
    service.wait_for_state(run, "succeeded")
    return run


def asked(service: Service, path: str, token: str = "", times: int = 1) -> socket.socket:
    """A connection on which it was asked, so many times, and nothing is read yet: no more than a little comes
    without that."""
    end = socket.socket()
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    end.settimeout(30)
    end.connect(("127.0.0.1", service.port))
    lines = (
        f"GET {path} HTTP/1.1",
        f"Host: 127.0.0.1:{service.port}",
        f"Authorization: Bearer {token or service.token}",
    )
    end.sendall("\r\n".join((*lines, "", "")).encode() * times)
    return end


def read_slowly(end: socket.socket) -> tuple[int, int]:
    """How long a body was to be, and how much of it came, at 200 kB/s or less."""
    got, wanted, head = b"", 1 << 30, b""
    while len(got) < wanted and (piece := end.recv(4096)):
        got += piece
        if not head and b"\r\n\r\n" in got:
            head, _, got = got.partition(b"\r\n\r\n")
            wanted = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        time.sleep(0.02)
    return wanted, len(got)


@pytest.mark.parametrize("what", ["events", "log"])
def test_a_slow_reader_gets_all_of_a_large_answer(what: str) -> None:
    with serving(before="from launcher.serve import limits; limits.HEAD_S = 0.1") as service:
        run = talkative(service)
        with asked(service, f"/api/runs/{run}/{what}?limit=5000") as end:
            wanted, came = read_slowly(end)
        assert (came, wanted > 500_000) == (wanted, True)


def test_a_reader_that_takes_nothing_is_given_up() -> None:
    with serving(before="from launcher.serve import limits; limits.SEND_S = 0.5") as service:
        run = talkative(service)
        with asked(service, f"/api/runs/{run}/log?limit=5000") as end:
            wait_for(lambda: is_served(service, end), "its connection")
            wait_for(lambda: not is_served(service, end), "its end")
            wanted, came = read_slowly(end)
        assert came < wanted


def is_served(service: Service, end: socket.socket) -> bool:
    """Whether the service still holds its side of a connection: what it has sent may well be on its way."""
    ports = [f"0100007F:{port:04X}" for port in (service.port, end.getsockname()[1])]
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()]
    return any(row[1:4] == [*ports, ESTABLISHED] for row in rows)
