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
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import paramiko
from fabric import Config, Connection

from launcher import kit
from launcher.errors import HostError
from launcher.model import Host
from launcher.transport import Channel, Completed
from launcher.transport.hostkeys import Strict, UnknownKey, fingerprint, known_hosts_files, pinned

CONNECT_S = 10.0
KEEPALIVE_S = 15
READ_COMMAND = (
    """/bin/sh -c 'read -r line; eval "$line"'"""  # the same to every shell; `read` takes one line only
)
WINDOW = 32 << 20  # lets a burst of log lines arrive without waiting for our acknowledgement
TRIES = 6  # sshd drops connections at random when many come at once (MaxStartups)
DEFAULT_KEYS = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")

T = TypeVar("T")


class Settings:
    """What all connections of one ringctl command share: the user's SSH configuration and passphrases."""

    def __init__(self, no_input: bool = False) -> None:
        logging.getLogger("paramiko").setLevel(
            logging.CRITICAL
        )  # every error of it is raised, and told once by us
        self.config = Config(overrides={"run": {"in_stream": False}})
        self.may_ask = not no_input and sys.stdin.isatty()
        self._asking = threading.Lock()
        self._answers: dict[str, str] = {}

    def ask(self, question: str) -> str:
        """A secret, typed once for all hosts that need it."""
        import getpass

        with self._asking:
            if question not in self._answers:
                self._answers[question] = getpass.getpass(question)
            return self._answers[question]


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
            raise HostError(self.host.name, f"cannot put ringctl's files there: {last_line(done.err)}")

    def run(self, argv: Sequence[str], stdin: bytes, timeout: float) -> Completed:
        deadline = time.monotonic() + timeout
        channel = self._execute(argv, stdin)
        try:
            channel.shutdown_write()
            out = read_all(channel.recv, channel, deadline)
            err = read_all(channel.recv_stderr, channel, deadline)
            if not channel.status_event.wait(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            if channel.exit_status == -1:
                raise HostError(self.host.name, "the connection was lost while a command ran there")
            return Completed(channel.exit_status, out, err)
        except TimeoutError:
            raise HostError(self.host.name, f"no answer within {timeout:.0f} s") from None
        finally:
            channel.close()

    def stream(self, argv: Sequence[str], stdin: bytes) -> Channel:
        channel = self._execute(argv, stdin)
        channel.shutdown_write()
        return SshChannel(channel)

    def address(self) -> str:
        """Where the connection goes; "" through a jump host, whose view of the address may not be ours."""
        with translated(self.host.name):
            transport = self._transport()
        if self._connection is None or self._connection.gateway:
            return ""
        return str(transport.getpeername()[0])

    def unknown_key(self) -> tuple[str, str, str, str, Any] | None:
        try:
            with translated(self.host.name, pass_unknown=True):
                self._transport()
        except UnknownKey as unknown:
            config = self.settings.config.base_ssh_config.lookup(self.host.address)
            key = unknown.key
            return unknown.name, key.get_name(), fingerprint(key), known_hosts_files(config)[0], key
        return None

    def close(self) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
        while isinstance(connection, Connection):
            connection.client.close()
            connection = connection.gateway

    def _execute(self, argv: Sequence[str], stdin: bytes) -> paramiko.Channel:
        """The command, started, with all of its stdin sent."""
        with translated(self.host.name):
            channel = self._transport().open_session(window_size=WINDOW, timeout=CONNECT_S)
            channel.exec_command(READ_COMMAND)
            channel.settimeout(60.0)
            channel.sendall(command_line(argv) + stdin)
            return channel

    def _transport(self) -> paramiko.Transport:
        """The open connection; a dead one is replaced."""
        with self._lock:
            transport = self._connection.client.get_transport() if self._connection else None
            if transport is None or not transport.is_active():
                self._connection = retried(self._open)
                transport = self._connection.client.get_transport()
                assert transport is not None
                transport.set_keepalive(KEEPALIVE_S)
            return cast(paramiko.Transport, transport)

    def _open(self) -> Connection:
        connection = connection_to(self.host, self.settings)
        try:
            open_with_secrets(connection, self.settings)
        except Exception:
            connection.client.close()
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
    """fabric's connection, made strict, with its jumps in the order that OpenSSH takes them."""
    own = {"user": host.user or None, "port": host.port or None}
    keys = [os.path.expanduser(host.identity_file)] if host.identity_file else []
    for path in keys:
        if not os.path.isfile(path):
            raise HostError(
                host.name, f"there is no key file {path}", fix="correct identity_file in the inventory"
            )
    gateway: Connection | bool = False
    probe = Connection(host.address, config=settings.config, gateway=False)
    jumps = probe.ssh_config.get("proxyjump", "none")
    for hop in jumps.split(",") if jumps != "none" else []:
        gateway = strict(
            Connection(hop.strip(), config=settings.config, gateway=gateway, forward_agent=False), [], ""
        )
    if "proxycommand" in probe.ssh_config and not gateway:
        gateway = probe.ssh_config["proxycommand"]
    connection = Connection(host.address, config=settings.config, gateway=gateway, forward_agent=False, **own)
    return strict(connection, keys, host.host_key)


def strict(connection: Connection, keys: list[str], host_key: str) -> Connection:
    """Only known host keys, only the identities that ssh would offer; fabric would accept any host."""
    config = connection.ssh_config
    only = config.get("identitiesonly", "no") == "yes"
    named = keys + [path for path in config.get("identityfile", []) if os.path.isfile(path)]
    usual = [] if named else [p for p in map(os.path.expanduser, DEFAULT_KEYS) if os.path.isfile(p)]
    connection.connect_kwargs.clear()
    connection.connect_kwargs.update(
        key_filename=list(dict.fromkeys(named + usual)),
        allow_agent=not only,
        look_for_keys=False,
        banner_timeout=CONNECT_S,
        auth_timeout=30.0,
    )
    connection.connect_timeout = min(float(connection.connect_timeout or CONNECT_S), 60.0)
    client = connection.client = paramiko.SSHClient()
    client.set_missing_host_key_policy(Strict())
    if host_key:
        pinned(client, connection.host, connection.port, host_key)
    else:
        for path in known_hosts_files(config):
            with contextlib.suppress(FileNotFoundError):
                client.load_system_host_keys(path)
    return connection


def open_with_secrets(connection: Connection, settings: Settings) -> None:
    """Open it and its jumps; where a key is encrypted and there is a terminal, ask for the passphrase."""
    if isinstance(connection.gateway, Connection) and not connection.gateway.is_connected:
        open_with_secrets(connection.gateway, settings)
    try:
        connection.open()
    except paramiko.PasswordRequiredException:
        if not settings.may_ask:
            raise
        encrypted = next((p for p in connection.connect_kwargs["key_filename"] if is_encrypted(p)), "the key")
        connection.connect_kwargs["passphrase"] = settings.ask(f"Passphrase for {encrypted}: ")
        connection.open()
    except paramiko.BadAuthenticationType as error:
        if "password" not in error.allowed_types or not settings.may_ask:
            raise
        where = f"{connection.user}@{connection.host}"
        connection.connect_kwargs["password"] = settings.ask(f"Password for {where}: ")
        connection.open()


def is_encrypted(path: str) -> bool:
    try:
        paramiko.PKey.from_path(path)
    except (TypeError, paramiko.PasswordRequiredException):  # what cryptography and paramiko say of it
        return True
    except (OSError, ValueError, paramiko.SSHException):
        return False
    return False


def retried(work: Callable[[], T]) -> T:
    """Again, a little later, where sshd hung up before it said anything: it throttles at random."""
    for attempt in range(TRIES):
        try:
            return work()
        except (paramiko.SSHException, EOFError, ConnectionResetError) as error:
            if not is_throttled(error) or attempt == TRIES - 1:
                raise
        time.sleep(random.uniform(0.1, 0.4) * 2**attempt)
    raise AssertionError("unreachable")


def is_throttled(error: BaseException) -> bool:
    words = ("Error reading SSH protocol banner", "No existing session", "EOF during negotiation")
    return isinstance(error, (EOFError, ConnectionResetError)) or any(word in str(error) for word in words)


# --- Errors, in a sentence -----------------------------------------------------------------------


@contextlib.contextmanager
def translated(host: str, pass_unknown: bool = False) -> Iterator[None]:
    """Every error of the libraries becomes one HostError that says what happened and what to do."""
    try:
        yield
    except UnknownKey as error:
        if pass_unknown:
            raise
        raise HostError(
            host,
            f"unknown host key {error.key.get_name()} {fingerprint(error.key)} of {error.name}",
            fix=f"compare it with the server's own, then: ringctl trust {host}",
        ) from None
    except (paramiko.SSHException, OSError, EOFError) as error:
        message, fix = sentence(error)
        raise HostError(host, message, fix=fix) from None


def sentence(error: Exception) -> tuple[str, str]:
    """(what happened, what to do)."""
    text = str(error) or type(error).__name__
    if isinstance(error, paramiko.BadHostKeyException):
        was, now = fingerprint(error.expected_key), fingerprint(error.key)
        return (
            f"the host key of {error.hostname} has changed: known is {was}, but it showed {now}; "
            "it was reinstalled, or someone is in between",
            f"ask whoever runs it; if it was reinstalled: ssh-keygen -R {error.hostname}, then ringctl trust",
        )
    if isinstance(error, paramiko.PasswordRequiredException):
        return "the key file is encrypted and nobody is there to ask", "ssh-add it to an agent first"
    if isinstance(error, paramiko.AuthenticationException):
        return (
            f"authentication failed: {text}",
            "name the right key (identity_file) and user in the inventory",
        )
    if isinstance(error, socket.gaierror):
        return f"the name is not known here ({error.strerror})", "write a numeric address in the inventory"
    if isinstance(error, paramiko.ssh_exception.NoValidConnectionsError):
        first = cast(OSError, next(iter(error.errors.values())))
        refused = isinstance(first, ConnectionRefusedError)
        where = "{}:{}".format(*next(iter(error.errors)))
        return (
            (f"connection refused by {where}", "is sshd running there?")
            if refused
            else (f"{first.strerror}: {where}", "")
        )
    if isinstance(error, TimeoutError):
        return f"no answer within {CONNECT_S:.0f} s", "is the host on, and its address right?"
    if isinstance(error, paramiko.ChannelException):
        return f"the server refused another session ({text})", "raise MaxSessions in its sshd_config"
    return f"{text}", ""


# --- Bytes ---------------------------------------------------------------------------------------


def command_line(argv: Sequence[str]) -> bytes:
    """argv for a POSIX shell on one line; newlines in it come from a variable."""
    words = shlex.join(argv).replace("\n", """'"$N"'""")
    return f'N="$(printf "\\nx")"; N="${{N%x}}"; exec {words}\n'.encode("utf-8", "surrogateescape")


def read_all(receive: Callable[[int], bytes], channel: paramiko.Channel, deadline: float) -> bytes:
    pieces: list[bytes] = []
    while True:
        channel.settimeout(max(0.01, deadline - time.monotonic()))
        data = receive(1 << 18)
        if not data:
            return b"".join(pieces)
        pieces.append(data)


def last_line(data: bytes) -> str:
    lines = data.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def offered(connection: Any) -> list[str]:
    """Which keys were shown to the server, for the message when it wants none of them."""
    return [os.path.basename(path) for path in connection.connect_kwargs["key_filename"]]
