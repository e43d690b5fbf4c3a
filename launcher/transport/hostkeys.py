"""Host keys: strict always; unknown ones are recorded only by `ringctl trust`, after a yes."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
from collections.abc import Iterable, Iterator

import paramiko

from launcher.errors import InputError, RingctlError
from launcher.transport.sshconfig import Target
from launcher.transport.sshlines import any_fits


class UnknownKey(paramiko.SSHException):
    """A host showed a key that nobody has trusted yet."""

    def __init__(self, name: str, key: paramiko.PKey, file: str) -> None:
        super().__init__(f"unknown host key of {name}")
        self.name = name  # as known_hosts writes it: host, or [host]:port
        self.key = key
        self.file = file  # where to record it


class RevokedKey(paramiko.SSHException):
    """A host showed a key that known_hosts marks as revoked."""


class Strict(paramiko.MissingHostKeyPolicy):
    """Takes a key that is trusted; refuses any other, and hands an unknown one to whoever asked, to be shown.
    paramiko itself would keep only one key of a kind for each server."""

    def __init__(
        self, name: str, file: str, trusted: list[paramiko.PKey], revoked: list[paramiko.PKey]
    ) -> None:
        self.name, self.file, self.trusted, self.revoked = name, file, trusted, revoked

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:  # noqa: ARG002 - paramiko's signature
        if key in self.revoked:
            raise RevokedKey(f"the host key {fingerprint(key)} of {self.name} is marked as revoked here")
        if key in self.trusted:
            return
        if not self.trusted:
            raise UnknownKey(self.name, key, self.file)
        same = [known for known in self.trusted if known.get_name() == key.get_name()]
        raise paramiko.BadHostKeyException(self.name, key, (same or self.trusted)[0])


def fingerprint(key: paramiko.PKey) -> str:
    """As ssh and ssh-keygen show it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode().rstrip("=")


def policy_for(target: Target, pinned: paramiko.PKey | None) -> Strict:
    """Only a server with the pinned key or, without one, with a key in known_hosts."""
    files = (*target.known_hosts, *target.shared_known_hosts)
    trusted, revoked = ([pinned], []) if pinned else known_keys(files, target.known_as)
    return Strict(target.known_as, next(iter(target.known_hosts), ""), trusted, revoked)


# --- known_hosts ---------------------------------------------------------------------------------


def known_keys(files: Iterable[str], name: str) -> tuple[list[paramiko.PKey], list[paramiko.PKey]]:
    """(keys that the server `name` may have, keys that nobody may have any more)."""
    trusted: list[paramiko.PKey] = []
    revoked: list[paramiko.PKey] = []
    for path in files:
        for marker, names, kind, text in entries(path):
            if marker in ("", "@revoked") and is_named(names, name):
                try:
                    key = public_key(kind, text)
                except ValueError:
                    continue  # a line that ssh does not understand either
                (revoked if marker else trusted).append(key)
    return [key for key in trusted if key not in revoked], revoked


def entries(path: str) -> Iterator[tuple[str, str, str, str]]:
    """(marker, names, kind, key in base64) of each line."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = file.read().splitlines()
    except OSError:
        return
    for line in lines:
        words = line.split()
        marker = words.pop(0) if words and words[0].startswith("@") else ""
        if len(words) >= 3 and not words[0].startswith("#"):
            yield marker, words[0], words[1], words[2]


def is_named(names: str, name: str) -> bool:
    """Whether the first field of a line means `name`: hashed, or patterns of which one may say no."""
    if names.startswith("|1|"):
        return is_hash_of(names, name)
    return any_fits(names.lower().split(","), name.lower())


def is_hash_of(hashed: str, name: str) -> bool:
    try:
        salt, digest = (base64.b64decode(part) for part in hashed.split("|")[2:4])
    except ValueError:
        return False
    return hmac.compare_digest(hmac.new(salt, name.encode(), "sha1").digest(), digest)


def public_key(kind: str, text: str) -> paramiko.PKey:
    """The key that a line of known_hosts, or an inventory, gives; ValueError if it is none."""
    try:
        return paramiko.PKey.from_type_string(kind, base64.b64decode(text, validate=True))
    except (paramiko.pkey.UnknownKeyType, paramiko.SSHException, IndexError, ValueError) as error:
        raise ValueError(str(error) or "not a public key") from None


def pinned_key(host: str, host_key: str) -> paramiko.PKey:
    """The key that the inventory gives."""
    kind, text = host_key.split()[:2]
    try:
        return public_key(kind, text)
    except ValueError:
        raise InputError(f"host_key of {host}: {kind} {text[:16]}... is not a public key") from None


def record(path: str, name: str, key: paramiko.PKey) -> None:
    """Add a key to a known_hosts file, with nobody else able to write there."""
    line = f"{name} {key.get_name()} {key.get_base64()}\n".encode()
    try:
        os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":
                line = b"\n" + line
            os.write(fd, line)
        finally:
            os.close(fd)
    except OSError as error:
        raise RingctlError(
            f"cannot record the key of {name} in {path}: {error.strerror}",
            fix="look at UserKnownHostsFile in ~/.ssh/config",
        ) from None
