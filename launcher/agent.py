"""Talks to ringctl's own programs on one host: the supervisor (hostd) and the probe."""

from __future__ import annotations

import json
from typing import Any

from launcher.errors import HostError, RingctlError
from launcher.model import Facts, Host, from_json
from launcher.transport import Channel, Transport, connect

SENTINEL = b"--ringctl-hostd--\n"
ANSWER_S = 60.0  # by then a host has answered, or something is wrong with it


class Agent:
    """One host, as the commands see it."""

    def __init__(self, host: Host, transport: Transport | None = None) -> None:
        self.host = host
        self.transport = transport or connect(host)

    def facts(self, peers: list[str]) -> Facts:
        answer = self._ask("preflight/probe.py", [], {"peers": peers}, ANSWER_S)
        return from_json(Facts, {**answer, "host": self.host.name})

    def start(self, request: dict[str, Any]) -> dict[str, Any]:
        return self._ask("hostd.py", ["start"], request, ANSWER_S)

    def runs(self, run: str | None = None) -> dict[str, Any]:
        """{"runs": [state, ...], "time": the host's clock}."""
        return self._ask("hostd.py", ["runs"], {"run": run}, ANSWER_S)

    def stop(self, run: str, grace: float) -> dict[str, Any]:
        return self._ask("hostd.py", ["stop"], {"run": run, "grace": grace}, ANSWER_S + grace)

    def follow(self, request: dict[str, Any]) -> Channel:
        """The run's events as hostd's `follow` sends them, sentinel first."""
        argv = [*self.transport.program("hostd.py"), "follow"]
        return self.transport.stream(argv, json.dumps(request).encode())

    def _ask(self, source: str, args: list[str], request: dict[str, Any], timeout: float) -> dict[str, Any]:
        argv = [*self.transport.program(source), *args]
        done = self.transport.run(argv, json.dumps(request).encode(), timeout)
        _, found, text = done.out.partition(SENTINEL)
        if not found:
            said = done.err.decode(errors="replace").strip().splitlines()[-1:] or ["nothing"]
            raise HostError(self.host.name, f"ringctl's {source} did not run there; it said: {said[0]}")
        try:
            answer = json.loads(text)
        except ValueError:
            raise HostError(self.host.name, f"an answer that is not JSON: {text[:80]!r}") from None
        if not isinstance(answer, dict):
            raise HostError(self.host.name, f"an answer that is not an object: {text[:80]!r}")
        if answer.get("kind") == "error":
            raise RingctlError(f"{self.host.name}: {answer['error']}")
        return answer
