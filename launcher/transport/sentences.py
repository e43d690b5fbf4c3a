"""Errors of the SSH libraries, each as a sentence that says what happened and what to do."""

from __future__ import annotations

import contextlib
import shlex
import socket
from collections.abc import Iterator
from typing import cast

import paramiko

from launcher.errors import NO_THREAD, HostError, RingctlError
from launcher.logs import visible
from launcher.transport.hostkeys import RevokedKey, UnknownKey, fingerprint
from launcher.transport.identity import Denied

CONNECT_S = 10.0  # for each step of a connection
SILENT = ("No existing session", "Timeout opening channel", "Timeout")  # how paramiko says that time is up
SEE_LOG = "sudo journalctl -u ssh -n 20  # on its console: its log says why"
UNREACHED = "switch it on and plug it in, or correct its `address` in the inventory"
# How paramiko says that what it hears is not the SSH that it knows.
NOT_OURS = ("Indecipherable", "Incompatible", "Invalid", "Mismatched MAC", "Expecting packet", "Bad packet")
HUNG_UP = "Error reading SSH protocol banner"  # or that, where time was up before the server said a word


class ProxyEnded(paramiko.SSHException):
    """A ProxyCommand ended before it had led anywhere; says what it said."""


class Farewell(paramiko.SSHException):
    """A server said who it is, and hung up: that is none that throttles."""


class Silence(TimeoutError):
    """A server did not answer in time; says how long that was."""


def is_silence(error: BaseException) -> bool:
    return isinstance(error, TimeoutError) or str(error).startswith(SILENT)


@contextlib.contextmanager
def translated(
    host: str, jump: str = "", passing: tuple[type[paramiko.SSHException], ...] = ()
) -> Iterator[None]:
    """Every error of the libraries but those `passing` becomes one HostError; `jump` is the server on the
    way where it happened. That is any there is: what paramiko's thread stumbles over in a packet is raised as
    it is where an answer is waited for."""
    try:
        yield
    except passing:
        raise
    except RingctlError:
        raise
    except Exception as error:
        message, fix = sentence(error, host)
        message = visible(message)  # it may hold the server's own words
        words = f"jump host {jump}: {message}" if jump else message
        raise HostError(host, words, fix=fix, kind=kind_of(error)) from None


def kind_of(error: Exception) -> str:
    """Which check of `ringctl preflight` it belongs to."""
    if isinstance(error, (UnknownKey, RevokedKey, paramiko.BadHostKeyException)):
        return "ssh_hostkey"
    return "ssh_auth" if isinstance(error, Denied) else "ssh_connect"


def sentence(error: Exception, host: str) -> tuple[str, str]:
    """(what happened, what to do)."""
    text = str(error) or type(error).__name__
    if not isinstance(error, (paramiko.SSHException, OSError, EOFError)):
        return about_stumbling(error)
    if isinstance(error, (UnknownKey, RevokedKey, paramiko.BadHostKeyException)):
        return about_host_key(error, host)
    if isinstance(error, Denied):
        return text, error.fix
    if isinstance(error, ProxyEnded):
        return f"its ProxyCommand ended: {text}", "try it by hand: it is in ~/.ssh/config"
    if isinstance(error, socket.gaierror):
        return f"its name is not known here ({error.strerror})", "write a numeric address in the inventory"
    if isinstance(error, paramiko.ssh_exception.NoValidConnectionsError):
        return about_connecting(error)
    if is_silence(error):
        own = text if isinstance(error, Silence) else f"no answer within {CONNECT_S:.0f} s"
        return own, UNREACHED
    if isinstance(error, Farewell):
        return text, SEE_LOG
    if isinstance(error, paramiko.SSHException) and text.startswith(NOT_OURS):
        return about_strangers(text)
    if isinstance(error, paramiko.ChannelException):
        return f"the server refused another session ({text})", "raise MaxSessions in its sshd_config"
    if isinstance(error, (EOFError, ConnectionError)) or text.startswith(HUNG_UP):
        return "the server hung up in the middle", f"{SEE_LOG}; or correct its `port` in the inventory"
    return text, ""


def about_stumbling(error: Exception) -> tuple[str, str]:
    """Over what nobody has thought of."""
    if str(error) == NO_THREAD:
        return "this machine cannot start another thread", "ulimit -u  # how many you may have; end some"
    return about_strangers(f"{type(error).__name__}: {error}")


def about_strangers(text: str) -> tuple[str, str]:
    fix = "correct its `port` in the inventory, or update its SSH server"
    return f"what answers there does not speak SSH 2 as we do ({text[:80]})", fix


def about_host_key(
    error: UnknownKey | RevokedKey | paramiko.BadHostKeyException, host: str
) -> tuple[str, str]:
    if isinstance(error, UnknownKey):
        return (
            f"unknown host key {error.key.get_name()} {fingerprint(error.key)} of {error.name}",
            f"ringctl trust {host}  # once you have compared it with the server's own",
        )
    if isinstance(error, RevokedKey):
        return str(error), "ask whoever runs it for its new key"
    was, now = fingerprint(error.expected_key), fingerprint(error.key)
    return (
        f"the host key of {error.hostname} has changed: known is {was}, but it showed {now}; "
        "it was reinstalled, or someone is in between",
        "ask whoever runs it; if it was reinstalled, remove the old key (ssh-keygen -R "
        f"{shlex.quote(error.hostname)}, or host_key in the inventory), then: ringctl trust {host}",
    )


def end_of(address: str, port: int) -> str:
    """One end of a connection, as people write it."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def about_connecting(error: paramiko.ssh_exception.NoValidConnectionsError) -> tuple[str, str]:
    first = cast(OSError, next(iter(error.errors.values())))
    where = end_of(*next(iter(error.errors))[:2])
    if isinstance(first, ConnectionRefusedError):
        return (
            f"connection refused by {where}",
            "sudo systemctl start ssh  # on its console; or correct its `port` in the inventory",
        )
    return f"{(first.strerror or str(first)).lower()}: {where}", UNREACHED
