"""What comes by itself: all of it, in order, for readers that are quick, slow, late or cut off."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher import history
from launcher.client import Client, events
from launcher.errors import HostError
from launcher.model import Event, RunState
from launcher.recorder import Batch
from launcher.serve import call, stream
from tests.launcher.ringctl import ringctl, wait_for
from tests.launcher.serve.service import Service, serving

TALKS = """
import json, os, sys, time
rank = os.environ["RANK"]
for i in range(300):
    print(f"{rank}:{i}", flush=True)
    if i % 10 == 0:
        with open(os.environ["RINGCTL_METRICS"], "a") as file:
            print(json.dumps({"step": i, "loss": 1.0}), file=file, flush=True)
    time.sleep(0.005)
"""


class Reader:
    """Somebody who reads a stream to its end."""

    def __init__(self, there: Client, run: str, after: int = 0) -> None:
        self.lines: list[str] = []
        self.ids: list[int] = []
        self.metrics: dict[int, Any] = {}
        self.states: list[str] = []
        self.times: list[float] = []
        self.ended = False
        self.last = after
        self._there, self._run = there, run

    def read(self, most: int | None = None) -> Reader:
        for name, number, data in self._there.stream(f"/api/runs/{self._run}/stream", self.last):
            if name == "lines":
                self.lines += [line[6] for line in data]
                self.ids += [line[0] for line in data]
            elif name == "metrics":
                self.metrics.update({metric[0]: metric[4] for metric in data})
            elif name == "now":
                self.times.append(data)
            elif name == "run":
                self.states.append(data["state"])
            elif name == "end":
                self.ended = True
            self.last = max(self.last, number)
            if most is not None and len(self.lines) >= most:
                break
        return self


def talking(service: Service) -> str:
    return service.submit(sys.executable, "-c", TALKS, world=2, prefork=False)


def in_order(lines: list[str], rank: int) -> bool:
    mine = [line for line in lines if line.startswith(f"{rank}:")]
    return mine == [f"{rank}:{i}" for i in range(300)]


def test_readers_get_everything_once_and_in_order_also_those_who_come_late_or_are_cut_off() -> None:
    with serving() as service:
        there, run = service.client(), talking(service)
        early, cut = Reader(there, run), Reader(there, run)

        def read_in_pieces() -> None:
            while not cut.ended:
                cut.read(most=len(cut.lines) + 40)

        threads = [threading.Thread(target=early.read), threading.Thread(target=read_in_pieces)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        late = Reader(there, run).read()
        for reader in (early, cut, late):
            assert reader.ended
            assert in_order(reader.lines, 0)
            assert in_order(reader.lines, 1)
            assert reader.ids == sorted(set(reader.ids))
            assert len(reader.metrics) == 60
            assert reader.times == sorted(reader.times)
            assert 0 <= time.time() - reader.times[-1] < 120
            assert reader.states[-1] == "succeeded"
        middle = late.ids[len(late.ids) // 2]
        assert Reader(there, run, after=middle).read().ids == [
            number for number in late.ids if number > middle
        ]


def test_the_header_of_a_browser_that_comes_back_goes_before_the_address() -> None:
    with serving() as service:
        run = talking(service)
        service.wait_for_state(run, "succeeded")
        whole = Reader(service.client(), run).read()
        last = whole.ids[-1]
        answer = service.raw(
            "GET", f"/api/runs/{run}/stream?after=0", headers={"Last-Event-ID": str(last - 1)}
        )
        assert answer.headers["content-type"].startswith("text/event-stream")
        told = [data for name, _, data in events(iter(answer.body.splitlines(True))) if name == "lines"]
        assert [line[0] for lines in told for line in lines] == [last]


def test_a_reader_that_does_not_read_holds_up_nobody() -> None:
    with serving() as service:
        run = talking(service)
        with socket.create_connection(("127.0.0.1", service.port)) as lazy:
            request = f"GET /api/runs/{run}/stream HTTP/1.1\r\nHost: 127.0.0.1:{service.port}\r\n"
            lazy.sendall(f"{request}Authorization: Bearer {service.token}\r\n\r\n".encode())
            assert Reader(service.client(), run).read().ended


@contextlib.contextmanager
def listening(service: Service) -> Iterator[list[tuple[str, Any]]]:
    """What the first screen hears, until the service ends."""
    heard: list[tuple[str, Any]] = []

    def listen() -> None:
        with contextlib.suppress(HostError):
            for name, _, data in service.client().stream("/api/stream"):
                heard.append((name, data))

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    yield heard
    service.stop()
    thread.join(timeout=10)
    assert not thread.is_alive(), "a service that ends closes its streams"
    service.start()


def test_a_run_that_waits_tells_why_and_the_first_screen_hears_of_it() -> None:
    with serving() as service, listening(service) as heard:
        there = service.client()
        run = service.submit("x", at=time.time() + 3600, name="patient")
        wait_for(lambda: run in json.dumps(heard), "its row")
        rows = [row for name, data in heard if name == "runs" for row in data if row["run"] == run]
        assert (rows[-1]["state"], rows[-1]["name"]) == ("queued", "patient")
        wait_for(lambda: any(name == "hosts" for name, _ in heard), "the hosts")
        there.post(f"/api/runs/{run}/cancel")
        wait_for(lambda: "cancelled" in json.dumps(heard), "its end")


def test_what_leaves_the_first_screen_is_told_as_it_ended_and_what_is_forgotten_as_gone(
    tmp_path: Path,
) -> None:
    waits = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.05)"
    with serving() as service, listening(service) as heard:
        run = service.submit(sys.executable, "-c", waits, prefork=False, skip_preflight=True)
        service.wait_for_state(run, "running")
        for number in range(60):  # newer ones, more than the first screen shows
            history.enlist(f"newer-{number}", state="cancelled")

        def states(of: str) -> list[str]:
            return [
                row["state"] for name, data in heard if name == "runs" for row in data if row["run"] == of
            ]

        wait_for(lambda: states("newer-59"), "the newest")
        wait_for(lambda: states(run)[-1:] == ["running"], "how it is")
        (tmp_path / "go").touch()
        wait_for(lambda: states(run)[-1:] == ["succeeded"], "how it ended")
        for name in (run, "newer-59"):
            history.forget(name)
            wait_for(functools.partial(heard.__contains__, ("gone", [name])), "that it is gone")
        history.enlist("newer-59", state="cancelled")
        wait_for(lambda: len(states("newer-59")) == 2, "that there is such a one again")


def test_a_log_that_was_pruned_is_streamed_to_nobody_and_the_next_attempts_to_all() -> None:
    says = "import os; [print(os.environ['RINGCTL_ATTEMPT'], i) for i in range(300)]"
    with serving() as service:
        there, run = service.client(), service.submit(sys.executable, "-c", says, prefork=False)
        service.wait_for_state(run, "succeeded")
        first = Reader(there, run).read()
        assert first.lines == [f"1 {i}" for i in range(300)]
        wait_for(lambda: run in ringctl("runs", "prune", "--keep", "0", "--logs-only", "--yes").stdout, "it")
        assert Reader(there, run).read().lines == []
        there.post(f"/api/runs/{run}/restart")
        second = [f"2 {i}" for i in range(300)]
        wait_for(lambda: service.lines(run) == second, "the second attempt's lines", 60.0)
        service.wait_for_state(run, "succeeded")
        assert Reader(there, run).read().lines == second
        assert Reader(there, run, after=first.last).read().lines == second


def test_an_unknown_run_has_no_stream() -> None:
    with serving() as service:
        assert service.raw("GET", "/api/runs/none/stream").status == 404


# --- What is shared ------------------------------------------------------------------------------


def lines_of(texts: list[str]) -> Iterator[tuple[int, Event]]:
    for number, text in enumerate(texts, start=1):
        yield number, Event("line", 1.0, "r", 1, "h", 0, {"stream": "out", "text": text})


def test_hostile_lines_stay_data() -> None:
    texts = ["a\ndata: x\n\nevent: end", "\r", "\u2028", "</script>", "\x1b[2J", "\udcff", "\0"]
    block = stream.encoded(list(lines_of(texts)))
    told = list(events(iter(block.data.splitlines(keepends=True))))
    assert [(name, number) for name, number, _ in told] == [("lines", len(texts))]
    assert [line[6] for line in told[0][2]] == texts


def test_a_loss_that_is_no_number_is_sent_as_none() -> None:
    assert json.loads(call.to_bytes({"loss": [float("nan"), float("inf"), 1.0]})) == {
        "loss": [None, None, 1.0]
    }


def test_blocks_are_encoded_once_for_all_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def read_block(run: str, after: int) -> stream.Block:
        made.append((run, after))
        return stream.Block(after + 10, b"x" * 100)

    monkeypatch.setattr(stream, "read_block", read_block)

    async def work() -> None:
        live = stream.Live(None)  # type: ignore[arg-type]  # nobody asks for a detail here
        blocks = await asyncio.gather(*(live.block("r", 0) for _ in range(5)))
        assert all(block is blocks[0] for block in blocks)
        assert await live.block("r", 0) is blocks[0]

    asyncio.run(work())
    assert made == [("r", 0)]


def test_whoever_is_a_little_behind_gets_what_was_encoded_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(stream, "read_block")  # so that nobody can
    events = [Event("line", 0.0, "r", 1, "h", 0, {"stream": "out", "text": str(n)}) for n in range(6)]
    state = RunState("r", "", 1, 1, "running", {})

    async def work() -> None:
        live = stream.Live(None)  # type: ignore[arg-type]  # as above
        live.of_run["r"] += 1
        for at in (0, 2, 4):  # while the only reader is still busy with something else
            live.batch(Batch("r", at + 1, events[at : at + 2], state, {}))
        await asyncio.sleep(0)
        ends = []
        after = 0
        while after < 6:
            block = await live.block("r", after)
            assert block is not None
            after = block.last
            ends.append(after)
        assert ends == [2, 4, 6]

    asyncio.run(work())


@pytest.mark.parametrize(
    ("kind", "data", "many"),
    [
        ("line", {"stream": "out", "text": "x" * 1000}, 349),
        ("metric", {"step": 1, "text": 5}, 15887),
        ("metric", {"step": 1, "notes": "x" * 60_000}, 256),
        ("host_finished", {"state": "succeeded", "text": 5}, 10**4),
    ],
)
def test_only_what_is_small_is_encoded_as_it_comes(kind: str, data: dict[str, Any], many: int) -> None:
    event = Event(kind, 0.0, "r", 1, "h", 0, data)
    assert stream.is_small([event] * many)
    assert kind == "host_finished" or not stream.is_small([event] * (many + 1))


def test_whoever_has_all_that_was_recorded_does_not_have_the_tape_read_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def read_block(_: str, after: int) -> stream.Block:
        asked.append(after)
        return stream.Block(after, b"")

    monkeypatch.setattr(stream, "read_block", read_block)
    event = Event("line", 0.0, "r", 1, "h", 0, {"stream": "out", "text": "x"})
    state = RunState("r", "", 1, 1, "running", {})

    async def work() -> None:
        live = stream.Live(None)  # type: ignore[arg-type]  # as above
        live.batch(Batch("r", 1, [event, event], state, {}))
        await asyncio.sleep(0)
        assert await live.block("r", 2) is None
        assert asked == []
        assert await live.block("r", 2, sure=True) is None
        live.batch(Batch("r", 3, [], state, {}, over=True))
        await asyncio.sleep(0)
        assert await live.block("r", 2) is None
        assert asked == [2, 2], "for sure, and once nobody records it any more"

    asyncio.run(work())


def test_lines_do_not_wait_until_somebody_has_looked_how_the_run_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "read_block", lambda _, after: stream.Block(after, b""))
    monkeypatch.setattr(stream, "DETAIL_S", 0.0)
    monkeypatch.setattr(stream, "OLD_S", 60.0)
    event = Event("line", 0.0, "r", 1, "h", 0, {"stream": "out", "text": "x"})
    state = RunState("r", "", 1, 1, "running", {})
    looked, go = iter((True, False)), threading.Event()

    class Slow:
        def detail_and_over(self, run: str) -> tuple[dict[str, object], bool]:
            assert next(looked, False) or go.wait(30)
            return {"run": run, "ranks": [], "actions": []}, False

    async def work() -> None:
        live = stream.Live(Slow())  # type: ignore[arg-type]  # all that is asked of the service
        live.of_run["r"] += 1
        told = stream.follow_run(live, "r", 0, changes=True)
        assert (await anext(told)).startswith(b"event: run")
        coming = asyncio.ensure_future(anext(told))
        live.batch(Batch("r", 1, [event], state, {}))
        assert (await asyncio.wait_for(coming, 10)).startswith(b"event: now")
        assert (await anext(told)).startswith(b"event: lines")
        await told.aclose()  # type: ignore[attr-defined]  # it is a generator
        go.set()

    asyncio.run(work())


def test_time_that_passes_is_no_news() -> None:
    def told(words: str) -> Any:
        return stream.steady({"state": "failed", "watched": f"watched by a watcher, {words}"})

    assert told("attempt 2 begins in 40 s") == told("attempt 2 begins in 39 s")
    assert told("attempt 2 begins in 39 s") != told("starting attempt 2") != told("starting attempt 3")


def test_old_blocks_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MOST_KEPT", 1000)
    monkeypatch.setattr(stream, "read_block", lambda _, after: stream.Block(after + 1, b"x" * 300))

    async def work() -> None:
        live = stream.Live(None)  # type: ignore[arg-type]  # as above
        for after in range(50):
            await live.block("r", after)
        assert len(live._blocks) <= 4
        assert live._kept <= 1000

    asyncio.run(work())
