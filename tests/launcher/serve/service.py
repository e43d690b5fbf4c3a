"""A real `ringctl serve` on loopback, and the ways to ask it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from launcher import client
from launcher.errors import RingctlError
from tests.launcher.ringctl import RINGCTL, ringctl, wait_for


def slow(command: str, go: Path) -> str:
    """To be run before a service: whoever has it run this command leaves a file beside `go`, and waits until
    that is there, for a minute at most."""
    return f"""import launcher.serve.children as c
c.WATCHER = "import os, sys, time; until = time.monotonic() + 60\\n" \\
    "if {command!r} in sys.argv: open({str(go)!r} + str(os.getpid()), 'w').close()\\n" \\
    "while {command!r} in sys.argv and not os.path.exists({str(go)!r}) and time.monotonic() < until:\\n" \\
    "    time.sleep(0.05)\\n" + c.WATCHER"""


class Service:
    """One service, which may be killed and started again at the same port."""

    def __init__(self, *options: str, slots: int = 2, folder: Path | None = None, before: str = "") -> None:
        self.folder = folder or Path(os.environ["RINGCTL_HOME"]).parent
        hosts = self.folder / "serve-hosts.yaml"
        if "--hosts" not in options:
            hosts.write_text(f"hosts:\n  - {{name: here, local: true, slots: {slots}}}\n")
            options = ("--hosts", str(hosts), *options)
        self.options, self.port = options, 0
        self.argv = [*RINGCTL[:-1], f"{before}; {RINGCTL[-1]}"] if before else RINGCTL
        self.process: subprocess.Popen[str] | None = None
        self.url = ""

    def start(self) -> Service:
        argv = [*self.argv, "--no-input", "serve", "--port", str(self.port), *self.options]
        with open(self.folder / "serve.err", "ab") as errors:
            self.process = subprocess.Popen(
                argv, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=self.folder
            )
        self.url = self._line().split()[-1]
        assert "ringctl serve link" in self._line(), "a pipe is told no secret"
        self.port = urlsplit(self.url).port or 0
        return self

    def _line(self) -> str:
        assert self.process is not None
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, (self.folder / "serve.err").read_text()
        return line

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        return self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> int:
        assert self.process is not None
        assert self.process.stdout is not None
        self.process.send_signal(how)
        code = self.process.wait(timeout=30)
        self.process.stdout.close()
        self.process = None
        return code

    @property
    def link(self) -> str:
        """A new one, which opens the page once."""
        return ringctl("serve", "link").stdout.strip()

    @property
    def token(self) -> str:
        own = client.own()
        assert own is not None
        return own.token

    def client(self) -> client.Client:
        return client.client_for(None)

    def raw(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        token: str | None = "",
    ) -> Answer:
        """One request as it is written; with the service's own token unless another or none is given."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        sent = dict(headers or {})
        if token is not None:
            sent.setdefault("Authorization", f"Bearer {token or self.token}")
        if body is not None:
            sent.setdefault("Content-Type", "application/json")
        try:
            connection.putrequest(method, path, skip_host="Host" in sent, skip_accept_encoding=True)
            for name, value in sent.items():
                connection.putheader(name, value)
            if body is not None and "Content-Length" not in sent:
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            answer = connection.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def submit(self, *command: str, **more: Any) -> str:
        body = {"command": list(command), "world": 1, **more}
        return str(self.client().post("/api/submit", body)["run"])

    def row(self, run: str) -> Any:
        return self.client().get(f"/api/runs/{run}")

    def wait_for_state(self, run: str, *states: str, seconds: float = 60.0) -> Any:
        return wait_for(
            lambda: (row := self.row(run))["state"] in states and row, f"{run} to be {states}", seconds
        )

    def lines(self, run: str) -> list[str]:
        """The text of all lines that were recorded."""
        found, after = [], 0
        while True:
            page = self.client().get(f"/api/runs/{run}/log", after=after, limit=5000)
            found += [line[6] for line in page["lines"]]
            if not page["more"]:
                return found
            after = page["last"]


class Answer:
    """What came back."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@contextlib.contextmanager
def serving(*options: str, slots: int = 2, before: str = "") -> Iterator[Service]:
    """Runs that are left are ended, then the service. `before` is Python that it runs first."""
    service = Service(*options, slots=slots, before=before)
    try:
        yield service.start()
        if service.process is not None:
            end_runs(service)
            assert service.stop() == 0, (service.folder / "serve.err").read_text()
    finally:
        if service.process is not None:  # the test has failed
            with contextlib.suppress(Exception):
                end_runs(service)
            service.kill()


def end_runs(service: Service) -> None:
    there, deadline = service.client(), time.monotonic() + 60
    while rows := there.get("/api/runs", state="queued,starting,running")["runs"]:
        assert time.monotonic() < deadline, "runs that do not end"
        for row in rows:
            with contextlib.suppress(RingctlError):  # it has just started, or ended
                there.post(f"/api/runs/{row['run']}/{'cancel' if row['state'] == 'queued' else 'stop'}")
        time.sleep(0.05)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that goes on afterwards where it was; not within a write to the database, for which all
    others would wait."""
    os.kill(pid, signal.SIGSTOP)
    while is_writing(pid):
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.01)
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def is_writing(pid: int) -> bool:
    """Whether it holds one of the locks that SQLite takes for a write."""
    locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return any(
        ["POSIX", "WRITE", str(pid)] == [words[1], words[3], words[4]] for words in locks if "->" not in words
    )
