"""Everything that ends ringctl early, and the exit code each means.

    RingctlError            1   the run failed, or a step of it did
    ├── InputError          2   the input is wrong; nothing was touched
    ├── PreflightError      3   the hosts would not have been able to train
    ├── StoppedEarly      130   somebody stopped the run before all of it had started
    ├── NotKept             1   this machine cannot write down what it must not forget: a full disk
    └── HostError           4   a host could not be reached, or refused us

Each message says what happened, where, and (`fix`) what to do next.
"""

from __future__ import annotations

NO_THREAD = "can't start new thread"  # Python's words, in a RuntimeError


class RingctlError(Exception):
    """The root: shown as one message without a traceback, then the process exits with `exit_code`."""

    exit_code = 1

    def __init__(self, message: str, *, fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.message}\n  {self.fix}" if self.fix else self.message


class InputError(RingctlError):
    """The command line or the inventory is wrong; raised before any host is touched."""

    exit_code = 2


class PreflightError(RingctlError):
    """A check found something that would stop the run."""

    exit_code = 3


class StoppedEarly(RingctlError):
    """Somebody stopped the run before all of it had started."""

    exit_code = 130


class NotKept(RingctlError):
    """This machine cannot write down what it must not forget: a full disk, or one that can only be read."""


class HostError(RingctlError):
    """A host could not be reached, refused us, or answered nonsense."""

    exit_code = 4

    def __init__(self, host: str, message: str, *, fix: str = "", kind: str = "ssh_connect") -> None:
        super().__init__(f"{host}: {message}", fix=fix)
        self.host, self.words = host, message
        self.kind = kind  # the check that it fails
