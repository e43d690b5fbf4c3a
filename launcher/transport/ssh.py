"""Hosts reached by SSH: one strict connection each, reused for everything.

This folder is the only importer of fabric and paramiko.

The command line that the user's login shell reads is always READ_COMMAND; what to run comes through stdin.
So fish, tcsh, a .bashrc that prints, and anything in an inventory are harmless.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import shlex
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import paramiko
from fabric import Config, Connection

from launcher import kit
from launcher.errors import HostError
from launcher.model import Host
from launcher.transport import Channel, Completed, HostKey, sshconfig
from launcher.transport.hostkeys import UnknownKey, fingerprint, name_of, pinned_key, strict_client
from launcher.transport.identity import USUAL_KEYS, Identity, Secrets
from launcher.transport.sentences import CONNECT_S, HUNG_UP, Silence, is_silence, translated

KEEPALIVE_S = 15
DEAD_S = 45.0
READ_COMMAND = (
    """/bin/sh -c 'read -r line; eval "$line"'"""  # the same to every shell; `read` takes one line only
)
WINDOW = 32 << 20  # lets a burst of log lines arrive without waiting for our acknowledgement
PIECE = 1 << 18
TRIES = 6  # sshd drops connections at random when many come at once (MaxStartups)
AT_ONCE_S = 5.0  # a server that throttles hangs up sooner than this

T = TypeVar("T")


class Settings:
    """What all connections of one ringctl command share: the user's SSH configuration and secrets."""

    def __init__(self, no_input: bool = False) -> None:
        # Every error of it is raised, and told once by us.
        logging.getLogger("paramiko").setLevel(logging.CRITICAL)
        self.ssh_config = sshconfig.load()
        self.secrets = Secrets(no_input)

    def config(self) -> Config:
        """fabric's own settings, for one connection: they are not made for several threads."""
        return Config(lazy=True, ssh_config=self.ssh_config)


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
            raise HostError(self.host.name, f"cannot put ringctl's files there; it said: {done.last_words}")

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

    def stream(self, argv: Sequence[str], stdin: bytes) -> Channel:
        channel = self._execute(argv, stdin)
        channel.shutdown_write()
        return SshChannel(channel)

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
            channel = self._session()
            channel.exec_command(READ_COMMAND)
            channel.settimeout(60.0)
            try:
                send_all(channel, command_line(argv) + stdin)
            except OSError:
                if not (channel.closed and channel.get_transport().is_active()):
                    raise
                # It ended without reading all of it; what it said, and its exit code, tell why.
            return channel

    def _session(self) -> paramiko.Channel:
        """On the open connection; on a new one if that turns out to have died unnoticed."""
        transport = self._transport()
        try:
            return transport.open_session(window_size=WINDOW, timeout=CONNECT_S)
        except (paramiko.SSHException, OSError, EOFError):
            if transport.is_active():
                raise
        return self._transport().open_session(window_size=WINDOW, timeout=CONNECT_S)

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
    """The output of a command on a host."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel

    def read(self, timeout: float) -> bytes | None:
        self._channel.settimeout(timeout)
        try:
            return self._channel.recv(1 << 18)
        except TimeoutError:
            return None

    def close(self) -> None:
        self._channel.close()


# --- Connecting ----------------------------------------------------------------------------------


def connection_to(host: Host, settings: Settings) -> Connection:
    """fabric's connection, made strict, behind the jumps that ~/.ssh/config names."""
    key = os.path.expanduser(host.identity_file)
    if key and not os.path.isfile(key):
        raise HostError(
            host.name, f"there is no key file {key}", fix="correct identity_file in the inventory"
        )
    gateway = jumps_to(host.address, settings, {host.address})
    own = {"user": host.user or None, "port": host.port or None}
    connection = Connection(
        host.address, config=settings.config(), gateway=gateway, forward_agent=False, **own
    )
    pinned = pinned_key(host.name, host.host_key) if host.host_key else None
    return strict(connection, settings, [key] if key else [], pinned)


def jumps_to(name: str, settings: Settings, seen: set[str]) -> Connection | str | bool:
    """The jump before `name`, which knows the one before it: the first of a list is reached first, and that
    one by its own way. A host on the way to itself is reached directly."""
    config = settings.ssh_config.lookup(name)
    jumps = config.get("proxyjump", "none")
    if jumps.lower() == "none":
        command = config.get("proxycommand", "none")
        return False if command.lower() == "none" else str(command)
    gateway: Connection | str | bool = False
    for place, hop in enumerate(jumps.split(",")):
        words = hop.strip().removeprefix("ssh://").rstrip("/")
        jump = Connection(words, config=settings.config(), gateway=False, forward_agent=False)
        if jump.original_host in seen:
            continue
        if place == 0:
            gateway = jumps_to(jump.original_host, settings, seen | {jump.original_host})
        jump.gateway = gateway
        gateway = strict(jump, settings, [], None)
    return gateway


def strict(
    connection: Connection, settings: Settings, keys: list[str], pinned: paramiko.PKey | None
) -> Connection:
    """Only known host keys, only the identities that ssh would offer; fabric would accept any host."""
    config = connection.ssh_config
    named = keys + [path for path in config.get("identityfile", []) if os.path.isfile(path)]
    usual = [] if named else [p for p in map(os.path.expanduser, USUAL_KEYS) if os.path.isfile(p)]
    connection.connect_timeout = min(float(connection.connect_timeout or CONNECT_S), 60.0)
    connection.connect_kwargs.clear()
    connection.connect_kwargs.update(
        auth_strategy=Identity(
            user=connection.user,
            where=f"{connection.user}@{name_of(connection.host, connection.port)}",
            files=list(dict.fromkeys(named + usual)),
            only=config.get("identitiesonly", "no") == "yes",
            secrets=settings.secrets,
        ),
        transport_factory=quick_transport,
        banner_timeout=connection.connect_timeout,
        auth_timeout=30.0,
        channel_timeout=CONNECT_S,
    )
    connection.client = strict_client(connection.host, connection.port, config, pinned)
    return connection


def open_chain(connection: Connection, host: str) -> None:
    """Open the jumps on the way, then the connection itself; an unknown host key is left to the caller."""
    gateway = connection.gateway
    if isinstance(gateway, Connection) and not gateway.is_connected:
        with translated(host, jump=gateway.original_host, passing=(UnknownKey,)):
            open_chain(gateway, host)
    retried(lambda: open_one(connection))


def open_one(connection: Connection) -> None:
    began = time.monotonic()
    try:
        connection.open()
        watch_over(connection.transport)
    except paramiko.ChannelException as error:
        jump, where = connection.gateway.original_host, f"{connection.host}:{connection.port}"
        raise paramiko.SSHException(f"jump host {jump} cannot reach {where} ({error.text})") from None
    except BaseException as error:
        connection.client.close()  # its thread, and its socket
        silent = is_silence(error) or str(error).startswith(HUNG_UP)
        if silent and time.monotonic() >= began + connection.connect_timeout:
            raise Silence(f"no answer within {connection.connect_timeout:g} s") from None
        raise


def watch_over(transport: paramiko.Transport) -> None:
    """Notice a connection that leads nowhere any more: something is sent now and then, and if nobody takes
    it for long the kernel ends the connection, and with it whatever waits for an answer."""
    transport.set_keepalive(KEEPALIVE_S)
    if isinstance(transport.sock, socket.socket):
        transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(DEAD_S * 1000))


def close_chain(connection: Connection | str | bool) -> None:
    while isinstance(connection, Connection):
        connection.client.close()
        connection = connection.gateway


def quick_transport(sock: Any, **options: Any) -> paramiko.Transport:
    """Prefers ciphers that authenticate by themselves: one pass in OpenSSL instead of two."""
    transport = paramiko.Transport(sock, **options)
    security = transport.get_security_options()
    security.ciphers = sorted(security.ciphers, key=lambda name: "-gcm@" not in name)
    return transport


def retried(work: Callable[[], T]) -> T:
    """Again, a little later, where sshd hung up before it said anything: it throttles at random."""
    for attempt in range(TRIES):
        began = time.monotonic()
        try:
            return work()
        except (paramiko.SSHException, EOFError, ConnectionResetError) as error:
            at_once = time.monotonic() < began + AT_ONCE_S
            if not (at_once and is_throttled(error)) or attempt == TRIES - 1:
                raise
        time.sleep(random.uniform(0.1, 0.4) * 2**attempt)
    raise AssertionError("unreachable")


def is_throttled(error: BaseException) -> bool:
    words = (HUNG_UP, "No existing session", "EOF during negotiation")
    return isinstance(error, (EOFError, ConnectionResetError)) or any(word in str(error) for word in words)


class KeyShown(paramiko.AuthenticationException):
    """The server has shown a host key that is trusted, and that was all we wanted."""

    def __init__(self, key: paramiko.PKey) -> None:
        super().__init__("not logged in")
        self.key = key


class Nobody:
    """In place of an Identity, to look at the host key and go."""

    def authenticate(self, transport: paramiko.Transport) -> list[str]:
        raise KeyShown(transport.get_remote_server_key())


def host_key(name: str, key: paramiko.PKey, file: str) -> HostKey:
    return HostKey(name, key.get_name(), fingerprint(key), file, key)


# --- Bytes ---------------------------------------------------------------------------------------


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
