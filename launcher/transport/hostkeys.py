"""Host keys: strict always; unknown ones are recorded only by `ringctl trust`, after a yes."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping
from typing import Any

import paramiko

from launcher.errors import InputError


class UnknownKey(paramiko.SSHException):
    """A host showed a key that nobody has trusted yet."""

    def __init__(self, name: str, key: paramiko.PKey) -> None:
        super().__init__(f"unknown host key of {name}")
        self.name = name  # as known_hosts writes it: host, or [host]:port
        self.key = key


class Strict(paramiko.MissingHostKeyPolicy):
    """Refuses, and hands the key to whoever asked, to be shown."""

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:  # noqa: ARG002 - paramiko's signature
        raise UnknownKey(hostname, key)


def fingerprint(key: paramiko.PKey) -> str:
    """As ssh and ssh-keygen show it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode().rstrip("=")


def known_hosts_files(config: Mapping[str, Any]) -> list[str]:
    """Where the user's SSH keeps the keys it knows, the one to write to first."""
    users = str(config.get("userknownhostsfile", "~/.ssh/known_hosts ~/.ssh/known_hosts2")).split()
    shared = str(config.get("globalknownhostsfile", "/etc/ssh/ssh_known_hosts")).split()
    return [os.path.expanduser(path) for path in users + shared]


def pinned(client: paramiko.SSHClient, host: str, port: int, host_key: str) -> None:
    """Accept exactly the key that the inventory gives."""
    kind, text = host_key.split()[:2]
    try:
        key = paramiko.PKey.from_type_string(kind, base64.b64decode(text))
    except (ValueError, paramiko.SSHException) as error:
        raise InputError(f"host_key of {host}: not a public key: {error}") from None
    client.get_host_keys().add(host if port == 22 else f"[{host}]:{port}", kind, key)


def record(path: str, name: str, key: paramiko.PKey) -> None:
    """Add a key to a known_hosts file, with nobody else able to write there."""
    folder = os.path.dirname(path)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    line = f"{name} {key.get_name()} {key.get_base64()}\n".encode()
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            line = b"\n" + line
        os.write(fd, line)
        os.fsync(fd)
    finally:
        os.close(fd)
