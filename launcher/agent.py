"""Talks to ringctl's own programs on one host: the supervisor (hostd), the probe, the code store."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from launcher import kit
from launcher.errors import HostError, RingctlError
from launcher.model import Host
from launcher.redact import Hidden, revealed
from launcher.told import (
    HostNow,
    check_stopped,
    checked_now,
    checked_secrets,
    checked_state,
    clocks_apart,
    is_light,
    on_our_clock,
    words_of,
)
from launcher.transport import Channel, Completed, Pool, Transport

SENTINEL = b"--ringctl-hostd--\n"
ANSWER_S = 60.0  # by then a host has answered, or something is wrong with it
LARGEST_ANSWER = 64 << 20
LARGEST_SHORT = 1 << 20  # which cannot take much memory, whatever is in it
LARGEST_NOISE = 1 << 20  # of a login shell, before the first answer
MOST_VALUES = 4_000_000  # in an answer; those of an honest one take more than ten bytes each
MOST_STATES = 100_000  # in an answer; a host may have had as many runs
STRANGE = "it answered something else than it was asked"
NEWER = "another version of ringctl may have started it"
SHELL = "look at what its shell reads first there, such as ~/.bashrc"


def agents_for(hosts: Iterable[Host], pool: Pool) -> dict[str, Agent]:
    """An agent for each host, by its name, on the pool's connections."""
    return {host.name: Agent(host, pool.transport(host), pool.hidden) for host in hosts}


class Agent:
    """One host, as the commands see it."""

    def __init__(self, host: Host, transport: Transport, hidden: tuple[str, ...] = ()) -> None:
        self.host = host
        self.transport = transport
        self.hidden = hidden  # values that nothing it says may show

    def converse(self, source: str, calls: str, requests: list[dict[str, Any]]) -> Conversation:
        """Begin one with our host-side files; `calls` names those that answer one after the other, in one
        process; `source` is who answers first, for a complaint."""
        argv = [*self.transport.program(source)[:-1], calls]
        return Conversation(self.transport, source, argv, requests)

    def start(self, request: dict[str, Any]) -> dict[str, Any]:
        return self.ask("hostd.py", ["start"], request)

    def runs(self, run: str | None = None) -> dict[str, Any]:
        """{"runs": [state, ...], "time": the host's clock}, the states by our clock. If that of one `run`
        cannot be read, that is an error: the host has something of it."""
        asked = time.time()
        answer = self.ask("hostd.py", ["runs"], {"run": run})
        answered = time.time()
        with understood(self.host.name):
            states, unread = states_of(self.host.name, answer["runs"])
            apart = 0.0 if self.host.local else clocks_apart(answer["time"], asked, answered)
        if unread and run is not None:
            raise HostError(self.host.name, f"{unread}; {NEWER}")
        if unread:
            print(f"{self.host.name}: {unread}, and is left out; {NEWER}", file=sys.stderr)
        return {**answer, "runs": [on_our_clock(state, apart) for state in states] if apart else states}

    def slots(self) -> HostNow:
        """Who has which slots of it, and what it is doing."""
        answer = self.ask("hostd.py", ["slots"], {})
        with understood(self.host.name):
            return checked_now(answer)

    def secrets(self, run: str) -> dict[str, Hidden]:
        """What the run's log there may not show."""
        answer = self.ask("hostd.py", ["secrets"], {"run": run})
        with understood(self.host.name):
            return {name: Hidden(value) for name, value in checked_secrets(answer).items()}

    def announce(self, run: str, again: str) -> None:
        """That the run is about to be started again by hand, by whom the host will know by this token."""
        self.ask("hostd.py", ["again"], {"run": run, "again": again})

    def tell_stop(
        self,
        run: str,
        grace: float,
        attempt: int,
        timeout: float,
        *,
        exact: bool = False,
        again: str = "",
        age: float = 0.0,
    ) -> None:
        """That it is about to be asked to."""
        request = {"run": run, "grace": grace, "attempt": attempt, "exact": exact, "again": again, "age": age}
        self.ask("hostd.py", ["tell"], request, timeout=timeout)

    def stop(
        self,
        run: str,
        grace: float,
        reason: str = "stopped",
        attempt: int = 1,
        *,
        exact: bool = False,
        again: str = "",
        age: float = 0.0,
    ) -> dict[str, Any]:
        """This attempt and those before it; unless it is `exact`, also a later one that the host knows of. It
        calls off whatever start by hand was announced, but for that of `again`, who ends it for that; what is
        `exact` is ringctl's own, and calls off none. It has been wanted for `age` seconds."""
        request = {"run": run, "grace": grace, "reason": reason, "attempt": attempt, "exact": exact}
        request |= {"again": again, "age": age}
        answer = self.ask("hostd.py", ["stop"], request, timeout=ANSWER_S + grace)
        with understood(self.host.name):
            check_stopped(answer)
        return answer

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
        stdin = b"".join(map(line, requests)) + body
        began = time.monotonic()
        done = self.transport.run(argv, stdin, timeout, LARGEST_ANSWER)
        if os.environ.get("RINGCTL_VERBOSE"):
            took = (time.monotonic() - began) * 1000
            with contextlib.suppress(BrokenPipeError):  # whoever read that may have gone; this may be a stop
                print(f"{self.host.name}: {' '.join(argv[-2:])[-40:]}: {took:.0f} ms", file=sys.stderr)
        if kit.MISSING in done.out and SENTINEL not in done.out:
            self.transport.install()
            done = self.transport.run(argv, stdin, timeout, LARGEST_ANSWER)
        texts = done.out.split(SENTINEL)[1:]
        answers = [decoded(self.host.name, text) for text in texts]
        if len(answers) != len(requests):
            raise not_run(self.host, source, done)
        return answers


class Conversation:
    """Questions and answers with one process on a host."""

    def __init__(
        self, transport: Transport, source: str, argv: list[str], requests: list[dict[str, Any]]
    ) -> None:
        self.transport, self.source, self.host = transport, source, transport.host
        self.noise = b""  # what a login shell printed before the first answer
        self._argv, self._stdin = argv, b"".join(map(line, requests))
        self._begun, self._installed = False, False
        self._rest = bytearray()  # grows in place: what drips in behind much is not copied for each drop
        self._channel = transport.stream(argv, self._stdin, more=True)

    def say(self, request: dict[str, Any]) -> None:
        self._channel.send(line(request))

    def last(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Say the last there is to say, and hear the answer."""
        try:
            self.say(request)
            self._channel.end_input()
            return self.answer(seconds)
        finally:
            self.close()

    def answer(self, seconds: float) -> dict[str, Any]:
        """The next one; raises HostError if none comes in time, or none that can be read."""
        deadline = time.monotonic() + seconds
        begin = looked = 0  # where its text begins, once that is known, and how far it was looked for more
        while True:
            if not begin and (at := self._rest.find(SENTINEL, looked)) >= 0:
                begin = looked = at + len(SENTINEL)
            end = self._rest.find(b"\n", looked) if begin else -1
            if end >= 0:
                before, text = self._rest[: begin - len(SENTINEL)], bytes(self._rest[begin:end])
                self.noise, self._begun = (self.noise if self._begun else bytes(before)), True
                del self._rest[: end + 1]
                return decoded(self.host.name, text)
            looked = len(self._rest) if begin else max(0, len(self._rest) - len(SENTINEL))
            left = deadline - time.monotonic()
            data = self._channel.read(left) if left > 0 else None  # who never stops talking has no more time
            if data is None:
                raise self._silence(seconds)
            if not data:
                self._ended_early()
                begin = looked = 0
            self._rest += data
            if len(self._rest) > (LARGEST_ANSWER if self._begun or begin else LARGEST_NOISE):
                raise HostError(self.host.name, "an answer without an end", fix="" if self._begun else SHELL)

    def _silence(self, seconds: float) -> HostError:
        said = self._channel.errors()
        words = f"no answer within {seconds:.0f} s"
        if self._begun or self._channel.began:
            return HostError(self.host.name, words)
        last = Completed(1, bytes(self._rest), said).last_words
        also = f"its login shell waits for something; it said: {last}"
        return HostError(self.host.name, f"{words}: {also}", fix=SHELL)

    def _ended_early(self) -> None:
        """Put our files there and begin again if that is why; raise HostError if it is not."""
        if self._begun:
            raise HostError(self.host.name, "the connection was lost")
        if kit.MISSING not in self._rest or self._installed:
            errors = self._channel.errors()
            done = Completed(1, bytes(self._rest), errors, began=self._channel.began)
            raise not_run(self.host, self.source, done)
        self._channel.close()
        self.transport.install()
        self._installed, self._rest = True, bytearray()
        self._channel = self.transport.stream(self._argv, self._stdin, more=True)

    def close(self) -> None:
        self._channel.close()


def line(request: dict[str, Any]) -> bytes:
    return json.dumps(revealed(request)).encode() + b"\n"


def decoded(host: str, text: bytes) -> dict[str, Any]:
    """One answer; HostError for whatever else came, RingctlError for a refusal."""
    if len(text) > LARGEST_SHORT and not is_light(text, MOST_VALUES):
        raise HostError(host, STRANGE)
    try:
        answer = json.loads(text[:LARGEST_ANSWER])
    except (ValueError, RecursionError):
        raise HostError(host, f"an answer that is not JSON: {text[:80]!r}") from None
    if not isinstance(answer, dict):
        raise HostError(host, f"an answer that is not an object: {text[:80]!r}")
    if answer.get("kind") == "error":
        raise RingctlError(f"{host}: {words_of(answer.get('error'))}")
    return answer


def states_of(host: str, told: Any) -> tuple[list[dict[str, Any]], str]:
    """The states in an answer, and which cannot be read. They may be a newer ringctl's: the others still
    count."""
    if not isinstance(told, list) or len(told) > MOST_STATES:
        raise HostError(host, STRANGE)
    states, unread = [], []
    for state in told:
        try:
            states.append(checked_state(state))
        except (TypeError, KeyError, ValueError, AttributeError):
            if not isinstance(state, dict):
                raise HostError(host, STRANGE) from None
            unread.append(state)
    if not unread:
        return states, ""
    which = f"run {words_of(str(unread[0].get('run')))[:80]}"
    if len(unread) > 1:
        which += f", and of {len(unread) - 1} more,"
    return states, f"what it tells of {which} cannot be read here"


@contextlib.contextmanager
def understood(host: str) -> Iterator[None]:
    """Whatever a host answers that is not what was asked for is a HostError, of that host alone."""
    try:
        yield
    except (TypeError, KeyError, ValueError, AttributeError, IndexError, OverflowError, RecursionError):
        raise HostError(host, STRANGE) from None


def newer_python(host: Host) -> str:
    """That of the ranks is new enough, where the inventory says which it is."""
    env = host.env.value if host.env and host.env.value.startswith("/") else ""
    own = env if not env or (host.env and host.env.kind == "python") else f"{env}/bin/python"
    if own and own != host.python:
        return f"write `python: {own}` for {host.name} in the inventory"
    return f"install Python 3.8 or newer there, and write `python: PATH` for {host.name} in the inventory"


def not_run(host: Host, source: str, done: Completed) -> HostError:
    """Why one of our files has not answered."""
    if not done.began:
        words = f"its login shell ended before it ran anything; it said: {done.last_words}"
        shut = "account is currently not available" in words  # the words of nologin
        user = shlex.quote(host.user) if host.user else "USER"
        return HostError(host.name, words, fix=f"sudo chsh -s /bin/bash {user}" if shut else SHELL)
    newer = newer_python(host)
    _, old, version = done.out.partition(kit.OLD)
    if old:
        number = words_of(version.split(b"\n")[0].decode(errors="replace")[:10])
        return HostError(host.name, f"{host.python} there is Python {number}", fix=newer, kind="python_old")
    words = f"ringctl's {source} did not run there with {host.python}; it said: {done.last_words}"
    return HostError(host.name, words, fix=newer, kind="python_old")
