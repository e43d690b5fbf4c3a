"""Hosts reached by SSH: one strict connection each, reused for everything.

This folder is the only importer of fabric and paramiko.

The command line that the user's login shell reads is always READ_COMMAND; what to run comes through stdin.
So fish, tcsh, a .bashrc that prints, and anything in an inventory are harmless.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import shlex
import threading
import time
from collections.abc import Sequence
from typing import cast

import paramiko
from fabric import Connection

from launcher import kit
from launcher.errors import HostError, InputError
from launcher.model import Host
from launcher.told import words_of
from launcher.transport import LAST_BYTES, MOST_OUTPUT, Channel, Completed, HostKey, TimedOut, too_much
from launcher.transport.bounds import Unasked
from launcher.transport.connect import (
    KeyShown,
    Nobody,
    Settings,
    close_chain,
    connection_to,
    host_key,
    open_chain,
)
from launcher.transport.hostkeys import UnknownKey
from launcher.transport.sentences import CONNECT_S, Silence, translated

READ_COMMAND = (
    """/bin/sh -c 'read -r line; eval "$line"'"""  # the same to every shell; `read` takes one line only
)
BEGAN = b"--ringctl-shell--\n"  # on stderr: the login shell has come to our line
WINDOW = 32 << 20  # lets a burst of log lines arrive without waiting for our acknowledgement
PIECE = 1 << 18
SEND_S = 60.0  # by then a host has taken a request
SESSION_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.0)


class SshTransport:
    """A host reached by SSH. Opened when first used; after `close` or a drop, opened again."""

    def __init__(self, host: Host, settings: Settings) -> None:
        self.host = host
        self.settings = settings
        self._connection: Connection | None = None
        self._lock = threading.Lock()

    def program(self, source: str) -> list[str]:
        return [self.host.python, "-I", "-S", "-c", kit.run_there(), kit.folder(), kit.module(source)]

    def install(self) -> None:
        argv = [self.host.python, "-I", "-c", kit.INSTALL, kit.folder()]
        done = self.run(argv, kit.contents(), 60.0)
        if kit.INSTALLED not in done.out:
            raise not_installed(self.host, done)

    def run(
        self, argv: Sequence[str], stdin: bytes | None, timeout: float, most: int = MOST_OUTPUT
    ) -> Completed:
        deadline = time.monotonic() + timeout
        channel = self._execute(argv, stdin or b"", timeout)
        out, err = bytearray(), bytearray()
        try:
            with translated(self.host.name):
                if stdin is not None:
                    channel.shutdown_write()
                is_late = not heard_out(channel, deadline, out, err, most)
                refuse_unasked(channel)
        finally:
            close(channel)
        if len(out) + len(err) > most:
            raise too_much(self.host.name, most)
        if is_late:
            raise TimedOut(self.host.name, timeout, bytes(out), after_mark(bytes(err))[1])
        if channel.exit_status == -1:
            alive = channel.get_transport().is_active()
            what = "was killed" if alive else "ran, but the connection was lost"
            raise HostError(self.host.name, f"the command there {what}")
        began, rest = after_mark(bytes(err))
        return Completed(channel.exit_status, bytes(out), rest, began or BEGAN in out)

    def stream(self, argv: Sequence[str], stdin: bytes, more: bool = False) -> Channel:
        channel = SshChannel(self.host.name, self._execute(argv, stdin, SEND_S))
        if not more:
            channel.end_input()
        return channel

    def address(self) -> str:
        """Where the connection goes. Behind a jump host, what that one was asked to reach, if it is numeric:
        a name may mean something only there."""
        transport, connection = self._transport(), self._connection
        if connection is None:
            return ""
        if connection.gateway:
            return str(connection.host) if is_numeric(connection.host) else ""
        return str(transport.getpeername()[0])

    def host_key(self) -> HostKey:
        connection = connection_to(self.host, self.settings)
        connection.connect_kwargs["auth_strategy"] = Nobody()
        try:
            with translated(self.host.name, passing=(UnknownKey, KeyShown)):
                open_chain(connection, self.host.name)
        except UnknownKey as error:
            if not error.file:
                raise InputError(
                    f"{self.host.name}: there is no file to record the key of {error.name} in",
                    fix="take `UserKnownHostsFile none` out of ~/.ssh/config, or pin host_key",
                ) from None
            return host_key(error.name, error.key, error.file)
        except KeyShown as shown:
            return host_key(self.settings.target(self.host).known_as, shown.key, "")
        finally:
            close_chain(connection)
        raise AssertionError("unreachable: nobody has said who they are")

    def close(self) -> None:
        # Not with the lock, which whoever opens a connection holds for as long as that takes.
        connection, self._connection = self._connection, None
        close_chain(connection or False)

    def _execute(self, argv: Sequence[str], stdin: bytes, seconds: float) -> paramiko.Channel:
        """The command, started, with all of its stdin sent."""
        with translated(self.host.name):
            channel = self._shell()
            try:
                send_all(channel, command_line(argv) + stdin, seconds)
            except (OSError, EOFError):
                if not (channel.closed and channel.get_transport().is_active()):
                    close(channel)
                    raise
                # It ended without reading all of it; what it said, and its exit code, tell why.
            return channel

    def _shell(self) -> paramiko.Channel:
        """On the open connection; on a new one if that turns out to have died unnoticed."""
        transport = self._transport()
        try:
            return open_shell(transport)
        except Exception as error:  # see `translated`
            if transport.is_active() and not isinstance(error, (EOFError, ConnectionError)):
                raise
        transport.close()
        return open_shell(self._transport())

    def _transport(self) -> paramiko.Transport:
        """The open connection; a dead one is replaced."""
        with self._lock:
            connection = self._connection
            transport = connection.client.get_transport() if connection else None
            if transport is None or not transport.is_active():
                close_chain(connection or False)
                self._connection = connection = self._open()
                transport = connection.client.get_transport()
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
        self._errors = b""
        self.began = False

    def read(self, timeout: float) -> bytes | None:
        self._channel.settimeout(timeout)
        with translated(self._host):  # it also tells the server that there is room again
            self._take_errors()  # for which there is the same room
            try:
                data = self._channel.recv(1 << 18)
            except TimeoutError:
                return None
            if not data:
                refuse_unasked(self._channel)
            return data

    def send(self, data: bytes) -> None:
        with translated(self._host):
            send_all(self._channel, data, SEND_S)

    def end_input(self) -> None:
        with translated(self._host):
            self._channel.shutdown_write()

    def errors(self) -> bytes:
        with translated(self._host):
            self._take_errors()
        said, self._errors = self._errors, b""
        return said

    def _take_errors(self) -> None:
        """All there is, of which the end is kept."""
        if self._channel.recv_stderr_ready():
            self._errors += self._channel.recv_stderr(WINDOW)
        if not self.began:
            self.began, self._errors = after_mark(self._errors)
        self._errors = self._errors[-LAST_BYTES:]

    def close(self) -> None:
        close(self._channel)


def not_installed(host: Host, done: Completed) -> HostError:
    """Why our files are not there: the disk, its owner, something in the way, or something else."""
    from launcher.agent import understood  # which imports this package
    from launcher.preflight import fixes

    _, told, text = done.out.partition(kit.CANNOT)
    if not told:
        words = f"cannot put ringctl's files there; it said: {done.last_words}"
        return HostError(host.name, words, kind="python_old")
    with understood(host.name):
        number, why, path, inodes, own_disk = json.loads(text.split(b"\n")[0])
        why, path = words_of(why), words_of(path)
    words, own = f"cannot put ringctl's files there: {path}: {why}", "~/.ringctl"
    place = own if own_disk else "~"
    if number in (errno.ENOSPC, errno.EDQUOT):
        if inodes == 0:
            return HostError(host.name, words, fix=fixes.room_for_files(place), kind="inodes")
        return HostError(host.name, words, fix=fixes.room(place), kind="disk")
    if number in (errno.ENOTDIR, errno.EEXIST, errno.ENOENT):
        words, fix = f"{words}: {own} is no folder, or leads to none", fixes.aside(own)
    else:
        fix = fixes.writable(place) if number == errno.EROFS else fixes.owner()
    return HostError(host.name, words, fix=fix, kind="folders")


# --- Bytes ---------------------------------------------------------------------------------------


def open_shell(transport: paramiko.Transport) -> paramiko.Channel:
    """A session in which `sh` waits for its one line. A server that allows few may not have noticed yet that
    the one before is over."""
    for pause in SESSION_PAUSES_S:
        try:
            channel = transport.open_session(window_size=WINDOW, timeout=CONNECT_S)
        except paramiko.ChannelException:
            if not pause:
                raise
            time.sleep(pause)
        else:
            begin_shell(channel)
            return channel
    raise AssertionError("unreachable: the last pause is none")


def begin_shell(channel: paramiko.Channel) -> None:
    """paramiko itself would wait without end for the server to say that it has begun."""
    is_late = threading.Event()

    def give_up() -> None:
        is_late.set()
        close(channel)

    timer = threading.Timer(CONNECT_S, give_up)
    timer.daemon = True
    timer.start()
    try:
        channel.exec_command(READ_COMMAND)
    except paramiko.SSHException:
        if is_late.is_set():
            raise paramiko.SSHException("Timeout opening channel.") from None
        raise
    finally:
        timer.cancel()


def refuse_unasked(channel: paramiko.Channel) -> None:
    """Where the connection is over because more came than was asked for, say that."""
    error = channel.get_transport().saved_exception
    if isinstance(error, Unasked):
        raise error


def command_line(argv: Sequence[str]) -> bytes:
    """argv for a POSIX shell on one line; newlines in it come from a variable."""
    words = shlex.join(argv).replace("\n", """'"$N"'""")
    began = BEGAN.decode().strip()
    line = f"""echo {began} >&2; N="$(printf "\\nx")"; N="${{N%x}}"; exec {words}\n"""
    return line.encode("utf-8", "surrogateescape")


def after_mark(err: bytes) -> tuple[bool, bytes]:
    """(whether the command began, what came on stderr since, or all if it did not)."""
    _, began, rest = err.partition(BEGAN)
    return bool(began), rest if began else err


def send_all(channel: paramiko.Channel, data: bytes, seconds: float) -> None:
    """In pieces: paramiko's own copies all that is left for every packet, and gives each its own time."""
    deadline, sent = time.monotonic() + seconds, 0
    while sent < len(data):
        try:
            channel.settimeout(remaining(deadline))
            took = channel.send(data[sent : sent + PIECE])
        except TimeoutError:
            raise Silence(f"it did not take what it was sent within {seconds:.0f} s") from None
        if not took:
            raise OSError("Socket is closed")  # paramiko's words, where it knows in time
        sent += took


def close(channel: paramiko.Channel) -> None:
    with contextlib.suppress(EOFError, OSError, paramiko.SSHException):  # the connection is gone already
        channel.close()


def heard_out(channel: paramiko.Channel, deadline: float, out: bytearray, err: bytearray, most: int) -> bool:
    """Until its exit code is known, or there is more than `most`; False if time was up before."""
    try:
        read_both(channel, deadline, out, err, most)
        return len(out) + len(err) > most or channel.status_event.wait(max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        return False


def read_both(channel: paramiko.Channel, deadline: float, out: bytearray, err: bytearray, most: int) -> None:
    """Each is emptied while the other is waited for: they share one window."""
    data = b"more"
    while data and len(out) + len(err) <= most:
        channel.settimeout(min(0.2, remaining(deadline)))
        with contextlib.suppress(TimeoutError):
            data = channel.recv(1 << 18)
            out += data
        while channel.recv_stderr_ready() and len(err) <= most:
            err += channel.recv_stderr(1 << 18)
    data = b"more"
    while data and len(out) + len(err) <= most:
        channel.settimeout(remaining(deadline))
        data = channel.recv_stderr(1 << 18)
        err += data


def remaining(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def is_numeric(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True
