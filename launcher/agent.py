"""Talks to ringctl's own programs on one host: the supervisor (hostd), the probe and the code store."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from typing import Any

from launcher import kit
from launcher.errors import HostError, RingctlError
from launcher.model import Facts, Host, from_json
from launcher.transport import Channel, Pool, Transport

SENTINEL = b"--ringctl-hostd--\n"
ANSWER_S = 60.0  # by then a host has answered, or something is wrong with it
LARGEST_ANSWER = 64 << 20


def agents_for(hosts: Iterable[Host], pool: Pool) -> dict[str, Agent]:
    """An agent for each host, by its name, on the pool's connections."""
    return {host.name: Agent(host, pool.transport(host)) for host in hosts}


class Agent:
    """One host, as the commands see it."""

    def __init__(self, host: Host, transport: Transport) -> None:
        self.host = host
        self.transport = transport

    def facts(
        self, peers: list[str], code: dict[str, Any] | None = None
    ) -> tuple[Facts, dict[str, Any] | None]:
        """What planning needs to know; and, for the snapshot `code`, what the code store lacks of it. Both in
        one process there, because a host's Python takes longer to start than to answer."""
        request = {"peers": peers}
        if code is None or self.host.local:
            answer, lacking = self.ask("preflight/probe.py", [], request), None
        else:
            argv = [*self.transport.program("preflight/probe.py")[:-1], "probe,hoststore:check"]
            answer, lacking = self._run("preflight/probe.py", argv, [request, code], b"", ANSWER_S)
        return from_json(Facts, {**answer, "host": self.host.name}), lacking

    def start(self, request: dict[str, Any]) -> dict[str, Any]:
        return self.ask("hostd.py", ["start"], request)

    def runs(self, run: str | None = None) -> dict[str, Any]:
        """{"runs": [state, ...], "time": the host's clock}."""
        return self.ask("hostd.py", ["runs"], {"run": run})

    def stop(self, run: str, grace: float, reason: str = "stopped") -> dict[str, Any]:
        request = {"run": run, "grace": grace, "reason": reason}
        return self.ask("hostd.py", ["stop"], request, timeout=ANSWER_S + grace)

    def follow(self, request: dict[str, Any]) -> Channel:
        """The run's events as hostd's `follow` sends them, sentinel first."""
        argv = [*self.transport.program("hostd.py"), "follow"]
        return self.transport.stream(argv, json.dumps(request).encode())

    def ask(
        self,
        source: str,
        args: list[str],
        request: dict[str, Any],
        body: bytes = b"",
        timeout: float = ANSWER_S,
    ) -> dict[str, Any]:
        """One question to one of our host-side files; `body` follows the request's line on its stdin."""
        argv = [*self.transport.program(source), *args]
        return self._run(source, argv, [request], body, timeout)[0]

    def _run(
        self, source: str, argv: list[str], requests: list[dict[str, Any]], body: bytes, timeout: float
    ) -> list[dict[str, Any]]:
        """An answer for each request; our files are put there first if they are missing."""
        stdin = b"".join(json.dumps(request).encode() + b"\n" for request in requests) + body
        began = time.monotonic()
        done = self.transport.run(argv, stdin, timeout)
        if os.environ.get("RINGCTL_VERBOSE"):
            took = (time.monotonic() - began) * 1000
            print(f"{self.host.name}: {' '.join(argv[-2:])[-40:]}: {took:.0f} ms", file=sys.stderr)
        if kit.MISSING in done.out and SENTINEL not in done.out:
            self.transport.install()
            done = self.transport.run(argv, stdin, timeout)
        texts = done.out.split(SENTINEL)[1:]
        answers = [self._decode(text) for text in texts]
        for answer in answers:
            if answer.get("kind") == "error":
                raise RingctlError(f"{self.host.name}: {answer['error']}")
        if len(answers) != len(requests):
            raise HostError(
                self.host.name,
                f"ringctl's {source} did not run there with {self.host.python}; it said: {done.last_words}",
                fix="name a Python 3.8 or newer as `python` of the host in the inventory",
            )
        return answers

    def _decode(self, text: bytes) -> dict[str, Any]:
        """One answer; HostError for whatever else came."""
        try:
            answer = json.loads(text[:LARGEST_ANSWER])
        except (ValueError, RecursionError):
            raise HostError(self.host.name, f"an answer that is not JSON: {text[:80]!r}") from None
        if not isinstance(answer, dict):
            raise HostError(self.host.name, f"an answer that is not an object: {text[:80]!r}")
        return answer
