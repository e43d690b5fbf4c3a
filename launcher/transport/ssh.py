"""Hosts reached by SSH: one strict connection each, reused for everything.

This folder is the only importer of fabric and paramiko.

The command line that the user's login shell reads is always READ_COMMAND; what to run comes through stdin.
So fish, tcsh, a .bashrc that prints, and anything in an inventory are harmless.
"""

from __future__ import annotations

import contextlib
import errno
import json
import shlex
import threading
import time
from collections.abc import Sequence
from typing import cast

import paramiko
from fabric import Connection

from launcher import kit
from launcher.errors import HostError
from launcher.model import Host
from launcher.transport import Channel, Completed, HostKey
from launcher.transport.connect import (
    KeyShown,
    Nobody,
    Settings,
    close_chain,
    connection_to,
    host_key,
    open_chain,
)
from launcher.transport.hostkeys import UnknownKey, name_of
from launcher.transport.sentences import CONNECT_S, translated

READ_COMMAND = (
    """/bin/sh -c 'read -r line; eval "$line"'"""  # the same to every shell; `read` takes one line only
)
WINDOW = 32 << 20  # lets a burst of log lines arrive without waiting for our acknowledgement
PIECE = 1 << 18


class SshTransport:
    """A host reached by SSH. Opened when first used; after `close` or a drop, opened again."""

    def __init__(self, host: Host, settings: Settings) -> None:
        self.host = host
        self.settings = settings
        self._connection: Connection | None = None
        self._lock = threading.Lock()

    def program(self, source: str) -> list[str]:
        return [self.host.python, "-I", "-S", "-c", kit.RUN, kit.folder(), kit.module(source)]

    def install(self) -> None:
        argv = [self.host.python, "-I", "-c", kit.INSTALL, kit.folder()]
        done = self.run(argv, kit.contents(), 60.0)
        if kit.INSTALLED not in done.out:
            raise not_installed(self.host, done)

    def run(self, argv: Sequence[str], stdin: bytes, timeout: float) -> Completed:
        deadline = time.monotonic() + timeout
        channel = self._execute(argv, stdin)
        try:
            channel.shutdown_write()
            out, err = read_both(channel, deadline)
            if not channel.status_event.wait(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
        except TimeoutError:
            raise HostError(self.host.name, f"no answer within {timeout:.0f} s") from None
        finally:
            channel.close()
        if channel.exit_status == -1:
            alive = channel.get_transport().is_active()
            what = "was killed" if alive else "ran, but the connection was lost"
            raise HostError(self.host.name, f"the command there {what}")
        return Completed(channel.exit_status, out, err)

    def stream(self, argv: Sequence[str], stdin: bytes, more: bool = False) -> Channel:
        channel = self._execute(argv, stdin)
        if not more:
            channel.shutdown_write()
        return SshChannel(self.host.name, channel)

    def address(self) -> str:
        """Where the connection goes; "" through a jump host, whose view of the address may not be ours."""
        transport = self._transport()
        if self._connection is None or self._connection.gateway:
            return ""
        return str(transport.getpeername()[0])

    def host_key(self) -> HostKey:
        connection = connection_to(self.host, self.settings)
        connection.connect_kwargs["auth_strategy"] = Nobody()
        try:
            with translated(self.host.name, passing=(UnknownKey, KeyShown)):
                open_chain(connection, self.host.name)
        except UnknownKey as error:
            return host_key(error.name, error.key, error.file)
        except KeyShown as shown:
            return host_key(name_of(connection.host, connection.port), shown.key, "")
        finally:
            close_chain(connection)
        raise AssertionError("unreachable: nobody has said who they are")

    def close(self) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
        if connection:
            close_chain(connection)

    def _execute(self, argv: Sequence[str], stdin: bytes) -> paramiko.Channel:
        """The command, started, with all of its stdin sent."""
        with translated(self.host.name):
            channel = self._shell()
            channel.settimeout(60.0)
            try:
                send_all(channel, command_line(argv) + stdin)
            except OSError:
                if not (channel.closed and channel.get_transport().is_active()):
                    raise
                # It ended without reading all of it; what it said, and its exit code, tell why.
            return channel

    def _shell(self) -> paramiko.Channel:
        """On the open connection; on a new one if that turns out to have died unnoticed."""
        transport = self._transport()
        try:
            return open_shell(transport)
        except (paramiko.SSHException, OSError, EOFError) as error:
            if transport.is_active() and not isinstance(error, (EOFError, ConnectionError)):
                raise
        transport.close()
        return open_shell(self._transport())

    def _transport(self) -> paramiko.Transport:
        """The open connection; a dead one is replaced."""
        with self._lock:
            transport = self._connection.client.get_transport() if self._connection else None
            if transport is None or not transport.is_active():
                self._connection = self._open()
                transport = self._connection.client.get_transport()
                assert transport is not None
            return cast(paramiko.Transport, transport)

    def _open(self) -> Connection:
        connection = connection_to(self.host, self.settings)
        try:
            with translated(self.host.name):
                open_chain(connection, self.host.name)
        except BaseException:
            close_chain(connection)
            raise
        return connection


class SshChannel:
    """A command on a host."""

    def __init__(self, host: str, channel: paramiko.Channel) -> None:
        self._host, self._channel = host, channel

    def read(self, timeout: float) -> bytes | None:
        self._channel.settimeout(timeout)
        try:
            return self._channel.recv(1 << 18)
        except TimeoutError:
            return None

    def send(self, data: bytes) -> None:
        with translated(self._host):
            self._channel.settimeout(CONNECT_S)
            send_all(self._channel, data)

    def errors(self) -> bytes:
        return self._channel.recv_stderr(1 << 18) if self._channel.recv_stderr_ready() else b""

    def close(self) -> None:
        self._channel.close()


def not_installed(host: Host, done: Completed) -> HostError:
    """Why our files are not there: the disk, its owner, or something else."""
    _, told, text = done.out.partition(kit.CANNOT)
    if not told:
        words = f"cannot put ringctl's files there; it said: {done.last_words}"
        return HostError(host.name, words, kind="python_old")
    number, why, path, inodes = json.loads(text.split(b"\n")[0])
    words = f"cannot put ringctl's files there: {path}: {why}"
    if number not in (errno.ENOSPC, errno.EDQUOT):
        return HostError(host.name, words, fix="make ~/.ringctl yours, and writable", kind="folders")
    if inodes == 0:
        return HostError(host.name, words, fix="df -i ~  # then remove small files", kind="inodes")
    return HostError(host.name, words, fix="df -h ~  # then remove what is not needed", kind="disk")


# --- Bytes ---------------------------------------------------------------------------------------


def open_shell(transport: paramiko.Transport) -> paramiko.Channel:
    """A session in which `sh` waits for its one line."""
    channel = transport.open_session(window_size=WINDOW, timeout=CONNECT_S)
    channel.exec_command(READ_COMMAND)
    return channel


def command_line(argv: Sequence[str]) -> bytes:
    """argv for a POSIX shell on one line; newlines in it come from a variable."""
    words = shlex.join(argv).replace("\n", """'"$N"'""")
    return f'N="$(printf "\\nx")"; N="${{N%x}}"; exec {words}\n'.encode("utf-8", "surrogateescape")


def send_all(channel: paramiko.Channel, data: bytes) -> None:
    """In pieces: paramiko's own copies all that is left for every packet."""
    for start in range(0, len(data), PIECE):
        channel.sendall(data[start : start + PIECE])


def read_both(channel: paramiko.Channel, deadline: float) -> tuple[bytes, bytes]:
    """All of stdout and stderr. Each is emptied while the other is waited for: they share one window."""
    out: list[bytes] = []
    err: list[bytes] = []
    while True:
        channel.settimeout(min(0.2, remaining(deadline)))
        with contextlib.suppress(TimeoutError):
            out.append(channel.recv(1 << 18))
        while channel.recv_stderr_ready():
            err.append(channel.recv_stderr(1 << 18))
        if out and not out[-1]:
            break
    while not err or err[-1]:
        channel.settimeout(remaining(deadline))
        err.append(channel.recv_stderr(1 << 18))
    return b"".join(out), b"".join(err)


def remaining(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
