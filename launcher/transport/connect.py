"""The way to a host: through its jumps, to a server with a known key, as who ~/.ssh/config says we are."""

from __future__ import annotations

import functools
import logging
import os
import random
import shlex
import socket
import time
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import paramiko
from fabric import Config, Connection

from launcher.errors import HostError
from launcher.model import Host
from launcher.transport import HostKey, sshconfig
from launcher.transport.bounds import BoundedTransport
from launcher.transport.hostkeys import UnknownKey, fingerprint, pinned_key, policy_for
from launcher.transport.identity import USUAL_KEYS, Identity, Secrets
from launcher.transport.proxy import Proxy
from launcher.transport.sentences import (
    CONNECT_S,
    HUNG_UP,
    Farewell,
    ProxyEnded,
    Silence,
    end_of,
    is_silence,
    translated,
)
from launcher.transport.sshconfig import Target, name_of

KEEPALIVE_S = 15
DEAD_S = 45.0
TRIES = 6  # sshd drops connections at random when many come at once (MaxStartups)
# How ssh, as a ProxyCommand, says that a server hung up on it.
SSH_HUNG_UP = ("kex_exchange_identification", "Connection closed by", "Connection reset by")
AT_ONCE_S = 5.0  # a server that throttles hangs up sooner than this

T = TypeVar("T")


class Settings:
    """What all connections of one ringctl command share: the user's SSH configuration and secrets."""

    def __init__(self, no_input: bool = False) -> None:
        # Every error of it is raised, and told once by us.
        logging.getLogger("paramiko").setLevel(logging.CRITICAL)
        self.ssh_config = sshconfig.load()
        self.secrets = Secrets(no_input)

    def target(self, host: Host) -> Target:
        """What the inventory and the user's SSH configuration say about it together."""
        return self.ssh_config.lookup(host.address, host.user, host.port)


# --- Describing the way --------------------------------------------------------------------------

# Before a server there is another one, or a command, or (False) nothing.
Gateway: TypeAlias = "Connection | Proxy | bool"


def connection_to(host: Host, settings: Settings) -> Connection:
    """fabric's connection, made strict, behind the jumps that ~/.ssh/config names."""
    key = os.path.expanduser(host.identity_file)
    if key and not os.path.isfile(key):
        raise HostError(
            host.name, f"there is no key file {key}", fix="correct identity_file in the inventory"
        )
    target = settings.target(host)
    pinned = pinned_key(host.name, host.host_key) if host.host_key else None
    gateway = gateway_to(target, settings, {target.name})
    return strict(target, gateway, settings, [key] if key else [], pinned)


def gateway_to(target: Target, settings: Settings, seen: set[str]) -> Gateway:
    """The jump before a server, which knows the one before it: the first of a list is reached first, and that
    one by its own way. A host on the way to itself is reached directly."""
    if target.proxy_command:
        return Proxy(target.proxy_command)
    gateway: Gateway = False
    for place, (name, user, port) in enumerate(target.jumps):
        if name in seen:
            continue
        jump = settings.ssh_config.lookup(name, user, port)
        if place == 0:
            gateway = gateway_to(jump, settings, seen | {name})
        gateway = strict(jump, gateway, settings, [], None)
    return gateway


def strict(
    target: Target, gateway: Gateway, settings: Settings, keys: list[str], pinned: paramiko.PKey | None
) -> Connection:
    """Only known host keys, only the identities that ssh would offer; fabric would accept any host."""
    seconds = min(target.timeout or CONNECT_S, 60.0)
    # fabric's own settings are not made for several threads, and it has nothing to look up: we have.
    config = Config(lazy=True, ssh_config=paramiko.SSHConfig())
    connection = Connection(
        target.host, user=target.user, port=target.port, config=config, gateway=gateway, forward_agent=False
    )
    connection.original_host, connection.connect_timeout = target.name, seconds
    named = keys + [path for path in target.identity_files if os.path.isfile(path)]
    usual = [] if named else [p for p in map(os.path.expanduser, USUAL_KEYS) if os.path.isfile(p)]
    policy = policy_for(target, pinned)
    connection.connect_kwargs.clear()
    connection.connect_kwargs.update(
        auth_strategy=Identity(
            user=target.user,
            where=f"{target.user}@{name_of(target.host, target.port)}",
            ssh_words=ssh_words(target),
            files=list(dict.fromkeys(named + usual)),
            only=target.identities_only,
            secrets=settings.secrets,
        ),
        transport_factory=functools.partial(quick_transport, {key.get_name() for key in policy.trusted}),
        banner_timeout=seconds,
        auth_timeout=30.0,
        channel_timeout=CONNECT_S,
    )
    connection.client = paramiko.SSHClient()
    connection.client.set_missing_host_key_policy(policy)
    return connection


def ssh_words(target: Target) -> str:
    """What to give to ssh, which reads the same configuration and so goes the same way."""
    port = "" if target.port == 22 else f"-p {target.port} "
    return port + shlex.quote(f"{target.user}@{target.name}")


# --- Going it ------------------------------------------------------------------------------------


def open_chain(connection: Connection, host: str) -> None:
    """Open the jumps on the way, then the connection itself; an unknown host key is left to the caller."""
    gateway = connection.gateway
    if isinstance(gateway, Connection) and not gateway.is_connected:
        with translated(host, jump=gateway.original_host, passing=(UnknownKey,)):
            open_chain(gateway, host)
    retried(lambda: open_one(connection), connection.connect_timeout)


def open_one(connection: Connection) -> None:
    began = time.monotonic()
    try:
        connection.open()
        watch_over(connection.transport)
    except paramiko.ChannelException as error:
        jump, where = connection.gateway.original_host, end_of(connection.host, connection.port)
        raise paramiko.SSHException(f"jump host {jump} cannot reach {where} ({error.text})") from None
    except BaseException as error:
        gateway, words = connection.gateway, ""
        if isinstance(gateway, Proxy) and is_hung_up(error):
            words = gateway.last_words()
        transport = connection.client.get_transport()
        greeted = transport is not None and bool(transport.remote_version)
        connection.client.close()  # its thread, and its socket
        if words:
            raise ProxyEnded(words) from None
        silent = is_silence(error) or str(error).startswith(HUNG_UP)
        if silent and time.monotonic() >= began + connection.connect_timeout:
            raise Silence(f"no answer within {connection.connect_timeout:g} s") from None
        if greeted and is_hung_up(error):
            raise Farewell("the server hung up after its greeting") from None
        raise


def watch_over(transport: paramiko.Transport) -> None:
    """Notice a connection that leads nowhere any more: something is sent now and then, and if nobody takes
    it for long the kernel ends the connection, and with it whatever waits for an answer."""
    transport.set_keepalive(KEEPALIVE_S)
    sock = transport.sock
    if isinstance(sock, socket.socket) and sock.family != socket.AF_UNIX:  # that one leads to a ProxyCommand
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(DEAD_S * 1000))


def close_chain(gateway: Gateway) -> None:
    while isinstance(gateway, Connection):
        gateway.client.close()
        gateway = gateway.gateway
    if isinstance(gateway, Proxy):
        gateway.close()


def quick_transport(kinds: set[str], sock: Any, **options: Any) -> paramiko.Transport:
    """Asks for a host key of these kinds, which are known, before others. Prefers ciphers that authenticate
    by themselves: one pass in OpenSSL instead of two."""
    transport = BoundedTransport(sock, **options)
    security = transport.get_security_options()
    security.ciphers = sorted(security.ciphers, key=lambda name: "-gcm@" not in name)
    kind_of = {"rsa-sha2-512": "ssh-rsa", "rsa-sha2-256": "ssh-rsa"}  # ways to sign with that kind
    security.key_types = sorted(security.key_types, key=lambda name: kind_of.get(name, name) not in kinds)
    return transport


def retried(work: Callable[[], T], seconds: float = CONNECT_S) -> T:
    """Again, a little later, where sshd hung up before it said anything: it throttles at random. Not for
    longer than one that is silent would be waited for."""
    deadline = time.monotonic() + seconds
    for attempt in range(TRIES):
        began, pause = time.monotonic(), random.uniform(0.1, 0.4) * 2**attempt
        try:
            return work()
        except (paramiko.SSHException, EOFError, ConnectionError) as error:
            now = time.monotonic()
            last = attempt == TRIES - 1 or now + pause > deadline
            if last or now >= began + AT_ONCE_S or not is_hung_up(error):
                raise
        time.sleep(pause)
    raise AssertionError("unreachable")


def is_hung_up(error: BaseException) -> bool:
    """Whether the server, or what leads there, went away before it had said anything."""
    if isinstance(error, ProxyEnded):
        return any(word in str(error) for word in SSH_HUNG_UP)
    words = (HUNG_UP, "No existing session", "EOF during negotiation")
    gone = (EOFError, ConnectionResetError, BrokenPipeError)
    return isinstance(error, gone) or any(word in str(error) for word in words)


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
