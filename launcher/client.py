"""Talks to a service, with nothing but the standard library: who it is, what it answers, what it streams."""

from __future__ import annotations

import http.client
import json
import os
import re
import secrets
import ssl
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from launcher import history
from launcher.errors import HostError, InputError, PreflightError, RingctlError
from launcher.filelock import is_held
from launcher.logs import visible
from launcher.serve.origin import is_loopback
from launcher.told import NAME as RUN_ID

T = TypeVar("T")
ANSWER_S = 60.0
SLOW_S = 400.0  # for what has the service talk to all hosts
STREAM_S = 60.0  # it says that it is there more often than this
PATIENCE_S, AGAIN_S = 15.0, 0.5  # with a service that broke off, or has too much to do
NONE = "there is no service: start one with `ringctl serve`, or name one with --server URL"


@dataclass(frozen=True)
class Own:
    """The service of this user on this machine, as it wrote it down."""

    url: str
    token: str
    pid: int = 0
    page: str = ""  # what users open, where that is another address: a proxy's, or by a name


def own_file() -> Path:
    return history.home() / "serve.json"


def lock_file() -> Path:
    """Held by the service as long as it lives."""
    return history.home() / "serve" / "lock"


def own() -> Own | None:
    """None as well if it was killed: whoever has its port now is not to be sent its token."""
    return history.read_as(Own, own_file()) if is_serving() else None


def is_serving() -> bool:
    return is_held(lock_file())


def client_for(server: str | None) -> Client:
    """The service that is named, or this user's own."""
    mine = own()
    if server is None:
        if mine is None:
            raise InputError(NONE)
        return Client(mine.url, mine.token, is_own=True)
    url = server.rstrip("/")
    token = os.environ.get("RINGCTL_TOKEN", "")
    if not token and mine is not None and mine.url == url:
        return Client(url, mine.token, is_own=True)
    return Client(url, token or from_file())


def from_file() -> str:
    """The token in $RINGCTL_TOKEN_FILE or ~/.ringctl/token, which must be closed to others."""
    path = os.environ.get("RINGCTL_TOKEN_FILE") or str(history.home() / "token")
    try:
        with open(path) as file:
            about = os.fstat(file.fileno())
            if about.st_mode & 0o077 or about.st_uid != os.geteuid():
                mode = f"{stat.S_IMODE(about.st_mode):04o}"
                raise InputError(f"{path}: others may open it (mode {mode})", fix=f"chmod 600 {path}")
            return file.read(1000).strip()
    except OSError:
        raise InputError(
            "no token for this service",
            fix="on its machine: ringctl serve token add NAME; here: put it in $RINGCTL_TOKEN, "
            f"or in {path} with mode 0600",
        ) from None


class Silent(HostError):
    """No answer, or not all of it."""

    broke = False  # after the connection stood: what was asked may have been done


class Nonsense(HostError):
    """An answer that no service would give: asking again is of no use."""


class NotThere(InputError):
    """What was asked for is not known to the service."""


class Client:
    """One service."""

    def __init__(self, url: str, token: str, *, is_own: bool = False) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
            raise InputError(f"--server {url}: write a URL such as http://127.0.0.1:8411")
        if parts.scheme == "http" and not is_loopback(parts.hostname):
            raise InputError(
                f"--server {url}: a token would travel in the clear",
                fix="use https://, or forward its port: ssh -L 8411:127.0.0.1:8411 SERVER",
            )
        self.url, self._token, self._parts, self._is_own = url, token, parts, is_own

    def get(self, path: str, **query: Any) -> Any:
        return self._ask("GET", with_query(path, query))

    def text(self, path: str, **query: Any) -> str:
        """What is no JSON, or is passed on as it is."""
        return self._answer("GET", with_query(path, query), seconds=SLOW_S).decode()

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return self._ask("POST", path, json.dumps(body or {}).encode(), seconds=SLOW_S)

    def post_once(self, path: str, body: Mapping[str, Any]) -> Any:
        """With a key, so that it can be tried again if the connection breaks and nobody knows whether it was
        heard: a service that was killed may be back in a moment."""
        until, broke = time.monotonic() + PATIENCE_S, False
        body = {**body, "key": secrets.token_hex(16)}
        while True:
            try:
                return self.post(path, body)
            except Silent as silent:
                broke = broke or silent.broke
                if not broke or time.monotonic() > until:
                    raise
            time.sleep(AGAIN_S)
            self.renew()

    def put(self, path: str, file: IO[bytes]) -> Any:
        return self._ask("PUT", path, file, kind="application/octet-stream", seconds=SLOW_S)

    def run(self, run: str, rest: str = "") -> str:
        return f"/api/runs/{quote(run, safe='')}{rest}"

    def renew(self) -> None:
        """The token of a service that was started again in between: this user's own has a new one then."""
        mine = own() if self._is_own else None
        if mine is not None and mine.url == self.url:
            self._token = mine.token

    def _connect(self, seconds: float) -> http.client.HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port
        if self._parts.scheme == "https":
            trust = ssl.create_default_context(cafile=os.environ.get("RINGCTL_CA") or None)
            return http.client.HTTPSConnection(host, port, timeout=seconds, context=trust)
        return http.client.HTTPConnection(host, port, timeout=seconds)

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Any, kind: str
    ) -> http.client.HTTPResponse:
        headers = {"Authorization": f"Bearer {self._token}", "Accept": "*/*"}
        if body is not None:
            headers["Content-Type"] = kind
        if hasattr(body, "seek"):
            headers["Content-Length"] = str(body.seek(0, os.SEEK_END))
            body.seek(0)
        try:
            connection.request(method, path, body, headers)
        except BrokenPipeError:
            pass  # it has heard enough, and may have said why
        except (OSError, http.client.HTTPException) as error:
            raise self._silent(error) from None
        try:
            return connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise self._silent(error) from None

    def _read(self, answer: http.client.HTTPResponse) -> bytes:
        try:
            return answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._silent(error) from None

    def _silent(self, error: Exception) -> Silent:
        words = seen(getattr(error, "strerror", None) or str(error) or type(error).__name__)
        silent = Silent(self.url, f"the service does not answer: {words}", fix="is `ringctl serve` running?")
        lost = isinstance(error, (ConnectionError, http.client.IncompleteRead))
        silent.broke = lost and not isinstance(error, ConnectionRefusedError)
        return silent

    def _ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        kind: str = "application/json",
        seconds: float = ANSWER_S,
    ) -> Any:
        data = self._answer(method, path, body, kind, seconds)
        try:
            answer = json.loads(data) if data else None
        except ValueError:
            raise HostError(self.url, "what answers there is no ringctl service") from None
        if not all(isinstance(run, str) and RUN_ID.fullmatch(run) for run in runs_in(answer)):
            raise HostError(self.url, "it tells of a run with an id that is none")
        return answer

    def _answer(
        self,
        method: str,
        path: str,
        body: Any = None,
        kind: str = "application/json",
        seconds: float = ANSWER_S,
    ) -> bytes:
        until = time.monotonic() + PATIENCE_S
        while True:
            connection = self._connect(seconds)
            try:
                answer = self._send(connection, method, path, body, kind)
                data = self._read(answer)
            finally:
                connection.close()
            if answer.status < 400:
                return data
            wait = again_after(answer)
            if wait is None or time.monotonic() + wait > until:
                raise refused(answer.status, data)
            time.sleep(wait)

    def stream(self, path: str, after: int = 0) -> Iterator[tuple[str, int, Any]]:
        """(event, id, data) as they come, until the service ends the stream."""
        connection = self._connect(STREAM_S)
        try:
            answer = self._send(connection, "GET", f"{path}?after={after}" if after else path, None, "")
            if answer.status >= 400:
                raise refused(answer.status, answer.read())
            yield from events(answer)
        except (OSError, http.client.HTTPException) as error:
            raise self._silent(error) from None
        finally:
            connection.close()

    def understood(self, work: Callable[[], T]) -> T:
        """What `work` makes of its answers, if they are what they should be."""
        try:
            return work()
        except (TypeError, KeyError, ValueError, AttributeError):
            raise Nonsense(self.url, "it tells of a run what nobody understands") from None

    def find(self, reference: str | None) -> dict[str, Any]:
        """The row of the run that is meant, by the rule of the commands without a service: see
        runs.find_run."""
        return dict(self.get("/api/find", run=reference))


def again_after(answer: http.client.HTTPResponse) -> float | None:
    """In how many seconds a service that has too much to do wants to be asked again: it has done nothing."""
    said = answer.headers.get("Retry-After", "")
    return float(said) if answer.status == 429 and re.fullmatch("[0-9]{1,4}", said) else None


def runs_in(answer: Any) -> Iterator[Any]:
    """The ids of the runs that an answer is about: they become names of files here."""
    if not isinstance(answer, dict):
        return
    yield from (answer[key] for key in ("run",) if key in answer)
    for key in ("runs", "queue", "events", "chosen", "forgotten"):
        for each in answer.get(key) or ():
            yield each.get("run") if isinstance(each, dict) else each


def with_query(path: str, query: Mapping[str, Any]) -> str:
    given = {key: value for key, value in query.items() if value is not None}
    return f"{path}?{urlencode(given)}" if given else path


def events(lines: Iterator[bytes] | http.client.HTTPResponse) -> Iterator[tuple[str, int, Any]]:
    """Server-sent events."""
    name, number, data = "message", 0, b""
    for line in lines:
        line = line.rstrip(b"\r\n")
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if not line:
            if data:
                yield name, number, json.loads(data)
            name, data = "message", b""
        elif field == b"event":
            name = value.decode()
        elif field == b"id":
            number = int(value)
        elif field == b"data":
            data += value


KINDS: Mapping[int, type[RingctlError]] = {400: InputError, 401: InputError, 403: InputError, 404: NotThere}


def seen(said: Any) -> str:
    """Words of a service, with nothing that a terminal would obey."""
    return "\n".join(map(visible, str(said).splitlines()))


def refused(status: int, data: bytes) -> RingctlError:
    """The service's complaint, as our own."""
    try:
        said = json.loads(data)
        error, fix = seen(said["error"]), seen(said["fix"])
    except (ValueError, KeyError, TypeError):
        error, fix = f"the service answered {status}", ""
    if status == 502:
        host, colon, words = error.partition(": ")
        return HostError(host, words, fix=fix) if colon else HostError("the service", error, fix=fix)
    return KINDS.get(status, PreflightError if status == 409 and "preflight" in error else RingctlError)(
        error, fix=fix
    )
