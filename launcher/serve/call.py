"""One request, as a handler sees it: checked, and with who it is from; and what a handler answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from launcher.errors import HostError, InputError, PreflightError, RingctlError
from launcher.serve.auth import Who

if TYPE_CHECKING:
    from launcher.serve.service import Service


@dataclass(frozen=True)
class Call:
    """What was asked."""

    service: Service
    who: Who | None  # None only where no token is needed
    path: Mapping[str, str]
    query: Mapping[str, Any]
    body: Any = None  # of JSON, once it was read and checked
    headers: Mapping[str, str] = field(default_factory=dict)
    incoming: AsyncIterator[bytes] | None = None  # the body of a route that reads it by itself

    def may_change(self, run: Mapping[str, Any]) -> bool:
        """Whether whoever asks may stop a run and start it again: their own, or any for an admin."""
        who = self.who
        return who is not None and (who.may("admin") or (who.may("submit") and run["user"] == who.name))


@dataclass(frozen=True)
class Answer:
    """What is sent back: JSON unless it says otherwise."""

    body: Any
    status: int = 200
    kind: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    stream: AsyncIterator[bytes] | None = None
    done: Callable[[], None] = lambda: None  # called once it was sent, or could not be

    def data(self) -> bytes:
        if isinstance(self.body, bytes):
            return self.body
        return to_bytes(self.body) if self.kind == "application/json" else str(self.body).encode()

    def encoded(self) -> Answer:
        """With its body as bytes, which takes a while."""
        return replace(self, body=self.data())


def to_bytes(value: Any) -> bytes:
    """As JSON that a browser reads: it knows no NaN, and escapes keep stray bytes of a log apart."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:
        return json.dumps(without_nan(value), separators=(",", ":"), allow_nan=False).encode()


def without_nan(value: Any) -> Any:
    """With null for what is no number; a loss that became one is not there."""
    if isinstance(value, float):
        return value if value - value == 0.0 else None
    if isinstance(value, dict):
        return {key: without_nan(each) for key, each in value.items()}
    return [without_nan(each) for each in value] if isinstance(value, (list, tuple)) else value


class Refused(Exception):
    """A request that is not answered as it would like to be."""

    def __init__(
        self, status: int, error: str, fix: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(error)
        self.status, self.error, self.fix, self.headers = status, error, fix, headers or {}

    def answer(self) -> Answer:
        return Answer({"error": self.error, "fix": self.fix}, self.status, headers=self.headers)


STATUS: Mapping[type[RingctlError], int] = {InputError: 400, PreflightError: 409, HostError: 502}


def refusal(error: RingctlError) -> Refused:
    """What the rest of ringctl complains of, as an answer."""
    status = next((code for kind, code in STATUS.items() if isinstance(error, kind)), 409)
    return Refused(status, error.message, error.fix)
