"""The way to a host: through its jumps, to a server with a known key, as who ~/.ssh/config says we are."""

from __future__ import annotations

import logging
import os
import random
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar

import paramiko
from fabric import Config, Connection

from launcher.errors import HostError
from launcher.model import Host
from launcher.transport import HostKey, sshconfig
from launcher.transport.hostkeys import UnknownKey, fingerprint, name_of, pinned_key, strict_client
from launcher.transport.identity import USUAL_KEYS, Identity, Secrets
from launcher.transport.sentences import CONNECT_S, HUNG_UP, Silence, is_silence, translated

KEEPALIVE_S = 15
DEAD_S = 45.0
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


# --- Describing the way --------------------------------------------------------------------------


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


# --- Going it ------------------------------------------------------------------------------------


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


# --- Looking at a host key -----------------------------------------------------------------------


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
