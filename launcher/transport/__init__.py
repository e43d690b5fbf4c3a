"""Ways to reach a host: one small protocol, and `connect` to choose between `local` and `ssh`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from launcher.model import Host


@dataclass(frozen=True)
class Completed:
    """A finished command."""

    exit_code: int
    out: bytes
    err: bytes


class Channel(Protocol):
    """The output of a command that still runs."""

    def read(self, timeout: float) -> bytes | None:
        """What has come; None if nothing came in `timeout` seconds; b"" once it is over."""

    def close(self) -> None:
        """Stop listening; the command ends by itself when it next writes."""


class Transport(Protocol):
    """A host that commands can be run on. Raises HostError for whatever stands between."""

    host: Host

    def program(self, source: str) -> list[str]:
        """The argv that runs one of our host-side files (`hostd.py`, `preflight/probe.py`) there."""

    def run(self, argv: Sequence[str], stdin: bytes, timeout: float) -> Completed:
        """Run to the end."""

    def stream(self, argv: Sequence[str], stdin: bytes) -> Channel:
        """Start, and read as it goes."""

    def close(self) -> None:
        """Give the connection back."""


def connect(host: Host) -> Transport:
    """The transport that `host` asks for."""
    from launcher.transport.local import LocalTransport

    return LocalTransport(host)
