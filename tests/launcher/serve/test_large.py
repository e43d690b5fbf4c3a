"""Large answers: for readers that are slow, that are many, and that do not read at all."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import time
from pathlib import Path

import pytest

from launcher.serve import limits
from tests.launcher.ringctl import ringctl, wait_for
from tests.launcher.serve.service import Service, serving

LINES, LETTERS = 5000, 830
LARGEST = 2 << 20  # bytes of an answer
ESTABLISHED = "01"  # as the kernel writes it

ONLY_BESIDE = """import threading, launcher.serve.call as call
real = call.to_bytes
def to_bytes(value):
    assert threading.current_thread() is not threading.main_thread()
    return real(value)
call.to_bytes = to_bytes"""


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
    with serving(before="from launcher.serve import limits; limits.HEAD_S = 2") as service:
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


# --- Much at once --------------------------------------------------------------------------------


def test_readers_who_take_nothing_fill_no_memory_and_keep_nobody_waiting() -> None:
    with serving() as service, contextlib.ExitStack() as stack:
        looker = ringctl("serve", "token", "add", "looker", "--read-only").stdout.strip()
        run = talkative(service, "é")
        path = f"/api/runs/{run}/events?limit=5000"
        before = memory(service)
        lazy = [stack.enter_context(asked(service, path, looker, times=2)) for _ in range(20)]
        wait_for(lambda: len(answered(lazy)) >= limits.MOST_LARGE_EACH, "the first to be answered")
        for other in (path, "/healthz", f"/api/runs/{run}/log?limit=5000", f"/api/runs/{run}/metrics"):
            assert service.raw("GET", other).status == 200
        first = answered(lazy)
        assert len(first) == limits.MOST_LARGE_EACH, "the others wait"
        assert memory(service) - before < 100 << 20
        for end in first:
            end.close()
        others = [end for end in lazy if end not in first]
        wait_for(lambda: len(answered(others)) == limits.MOST_LARGE_EACH, "the next to be answered")
        wanted, came = read_slowly(answered(others)[0])
        assert came == wanted


def answered(ends: list[socket.socket]) -> list[socket.socket]:
    """Those to which something has come."""
    return select.select(ends, [], [], 0)[0]


def status(end: socket.socket) -> bytes:
    """What has come, as far as its status, without taking it."""
    return end.recv(12, socket.MSG_PEEK)[9:]


def memory(service: Service) -> int:
    assert service.process is not None
    pages = int(Path(f"/proc/{service.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def test_whoever_waits_too_often_is_told_to_come_back_and_the_command_line_does() -> None:
    few = "limits.MOST_LARGE_EACH = 1; limits.MOST_WAITING_EACH = 2; limits.SEND_S = 3.0"
    with (
        serving(before=f"from launcher.serve import limits; {few}") as service,
        contextlib.ExitStack() as stack,
    ):
        run = talkative(service)
        path = f"/api/runs/{run}/log?limit=5000"
        ends = [stack.enter_context(asked(service, path)) for _ in range(6)]
        told = wait_for(lambda: len(done := answered(ends)) == 4 and done, "all but the two that wait")
        assert sorted(map(status, told)) == [b"200", b"429", b"429", b"429"]
        answer = service.raw("GET", path)
        assert (answer.status, answer.headers["retry-after"]) == (429, "2")
        assert "2 of your requests wait already" in answer.json["error"]
        assert [service.raw("GET", f"/api/runs?limit={many}").status for many in (101, 100)] == [429, 200]
        assert service.client().get(f"/api/runs/{run}/log")["lines"]


def test_an_answer_is_limited_by_what_is_sent_and_the_next_goes_on_where_it_ended() -> None:
    with serving() as service:
        run = talkative(service, "é")
        texts = [str(i).rjust(6, "0") + "é" * LETTERS for i in range(LINES)]
        assert service.lines(run) == texts
        ids: list[int] = []
        said: list[str] = []
        more, last, pages = True, 0, 0
        while more:
            answer = service.raw("GET", f"/api/runs/{run}/events?limit=5000&after={last}")
            assert len(answer.body) <= LARGEST
            more, last, pages = answer.json["more"], answer.json["last"], pages + 1
            ids += [event["id"] for event in answer.json["events"]]
            said += [event["text"] for event in answer.json["events"] if event["kind"] == "line"]
        assert (ids, said, last) == (list(range(1, len(ids) + 1)), texts, ids[-1])
        assert pages > 10
        for where in ("", "&after=0", f"&before={ids[-1]}"):
            assert len(service.raw("GET", f"/api/runs/{run}/log?limit=5000{where}").body) <= LARGEST
        assert ringctl("--server", service.url, "logs", run, "--no-prefix").stdout.split() == texts


def test_answers_are_encoded_beside_the_event_loop() -> None:
    with serving(before=ONLY_BESIDE) as service:
        for path in ("/healthz", "/api/runs", "/api/hosts", "/openapi.json"):
            assert service.raw("GET", path).status == 200, path
