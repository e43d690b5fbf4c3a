"""Ways to reach a host: one small protocol, and `connect` to choose between `local` and `ssh`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from launcher.errors import HostError
from launcher.model import Host

if TYPE_CHECKING:
    from launcher.transport.connect import Settings


MOST_OUTPUT = 256 << 20  # of a command that is waited for: all of it is kept
LAST_BYTES = 64 << 10
LONGEST_WORDS = 500


def too_much(host: str, most: int) -> HostError:
    return HostError(host, f"it printed more than {most >> 20} MB, and was ended")


@dataclass(frozen=True)
class Completed:
    """A finished command."""

    exit_code: int
    out: bytes
    err: bytes
    began: bool = True  # False if the login shell there ended before it came to the command

    @property
    def last_words(self) -> str:
        """The last line of what it said, for a complaint."""
        from launcher.logs import visible

        ends = b"\n".join(said[-LAST_BYTES:] for said in (self.out, self.err))
        lines = ends.decode(errors="replace").strip().splitlines()
        return visible(lines[-1][:LONGEST_WORDS]) if lines else "nothing"


class TimedOut(HostError):
    """A command was given up on. Holds what it had printed by then."""

    def __init__(self, host: str, seconds: float, out: bytes, err: bytes) -> None:
        super().__init__(host, f"no answer within {seconds:.0f} s")
        self.out, self.err = out, err


@dataclass(frozen=True)
class HostKey:
    """What a server proves itself with."""

    name: str  # as known_hosts has it; a jump host's where it is that one's key
    kind: str
    fingerprint: str
    file: str  # where to record it; "" if it is known already
    key: Any


class Channel(Protocol):
    """The output of a command that still runs."""

    began: bool  # as of Completed; certain once it is over and `errors` was called

    def read(self, timeout: float) -> bytes | None:
        """What has come; None if nothing came in `timeout` seconds; b"" once it is over."""

    def send(self, data: bytes) -> None:
        """More for its stdin, where that was kept open."""

    def end_input(self) -> None:
        """Nothing more will be sent."""

    def errors(self) -> bytes:
        """What has come on its stderr since the last call."""

    def close(self) -> None:
        """Stop listening; the command ends by itself when it next writes."""


class Transport(Protocol):
    """A host that commands can be run on. Raises HostError for whatever stands between."""

    host: Host

    def program(self, source: str) -> list[str]:
        """The argv that runs one of our host-side files, such as `hostd.py`, there."""

    def install(self) -> None:
        """Put our host-side files there; called when a `program` said that they are missing."""

    def run(
        self, argv: Sequence[str], stdin: bytes | None, timeout: float, most: int = MOST_OUTPUT
    ) -> Completed:
        """Run to the end; TimedOut if that takes too long, HostError if it prints more than `most` bytes.
        Without `stdin` it stays open and empty for as long as somebody here waits, so that a command can tell
        when nobody does any more."""

    def stream(self, argv: Sequence[str], stdin: bytes, more: bool = False) -> Channel:
        """Start, and read as it goes; with `more`, its stdin is kept open."""

    def address(self) -> str:
        """The numeric address it was reached at; "" if none is known (this machine, a name that only a jump
        host can look up)."""

    def host_key(self) -> HostKey | None:
        """The first host key on the way there that nobody has trusted yet; else the host's own, asked for
        without logging in. None where there is none (this machine)."""

    def close(self) -> None:
        """Give the connection back; the next call opens a new one."""


Key = tuple[str | int, ...]


def way_to(host: Host) -> Key:
    """What tells one connection from another."""
    return host.name, host.address, host.user, host.port, host.identity_file, host.host_key, host.python


class Pool:
    """One transport a host, kept for as long as a command of ringctl runs."""

    def __init__(self, no_input: bool = False) -> None:
        self._no_input = no_input
        self.hidden: tuple[str, ...] = ()  # values that must not be shown, whatever a host says
        self._settings: Settings | None = None
        self._open: dict[Key, Transport] = {}

    def transport(self, host: Host) -> Transport:
        """The one that `host` asks for; opened when it is first used."""
        where = way_to(host)
        if where not in self._open:
            self._open[where] = self._make(host)
        return self._open[where]

    def close(self) -> None:
        for transport in self._open.values():
            transport.close()

    def _make(self, host: Host) -> Transport:
        if host.local:
            from launcher.transport.local import LocalTransport

            return LocalTransport(host)
        from launcher.transport.connect import Settings
        from launcher.transport.ssh import SshTransport

        self._settings = self._settings or Settings(no_input=self._no_input)
        return SshTransport(host, self._settings)
