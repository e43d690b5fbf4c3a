"""The files with which a controller reaches the hosts: key, known_hosts, ssh_config, hosts.yaml.

    FOLDER/hosts.yaml id_ed25519 known_hosts ssh_config    for ringctl, and `ssh -F FOLDER/ssh_config HOST`
    FOLDER/home/.ssh/{config,known_hosts,id_ed25519}       the same as someone's home: set HOME=FOLDER/home

The two sets are copies, so a test may spoil one (delete known_hosts, say) and still use the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat


@dataclass(frozen=True)
class KeyPair:
    """An Ed25519 key as OpenSSH writes it."""

    private: str
    public: str


@dataclass(frozen=True)
class Door:
    """Where one host's sshd listens and what it proves itself with."""

    name: str
    address: str
    port: int
    host_key: KeyPair


class AccessFiles:
    """Where the files of a cluster are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def hosts_file(self) -> Path:
        return self.folder / "hosts.yaml"

    @property
    def identity_file(self) -> Path:
        return self.folder / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    @property
    def ssh_config(self) -> Path:
        return self.folder / "ssh_config"

    @property
    def home(self) -> Path:
        """A home folder for the controller, with ~/.ssh in it."""
        return self.folder / "home"


def new_key() -> KeyPair:
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return KeyPair(private.decode(), public.decode())


def write_access(
    files: AccessFiles, doors: Sequence[Door], identity: KeyPair, user: str, python: str
) -> None:
    """Write both sets of files."""
    inventory = {
        "master": doors[0].name,
        "defaults": {"user": user, "identity_file": str(files.identity_file), "env": {"python": python}},
        "hosts": [_inventory_entry(door) for door in doors],
    }
    files.hosts_file.write_text(yaml.safe_dump(inventory, sort_keys=False))
    dot_ssh = files.home / ".ssh"
    dot_ssh.mkdir(parents=True, mode=0o700)
    for config, folder in ((files.ssh_config, files.folder), (dot_ssh / "config", dot_ssh)):
        _write_private(folder / "id_ed25519", identity.private)
        (folder / "id_ed25519.pub").write_text(identity.public + "\n")
        (folder / "known_hosts").write_text("".join(map(_known_host, doors)))
        config.write_text("".join(_config_entry(door, user, folder) for door in doors))


def _inventory_entry(door: Door) -> dict[str, str | int]:
    entry: dict[str, str | int] = {"name": door.name, "address": door.address}
    if door.port != 22:
        entry["port"] = door.port
    return entry


def _known_host(door: Door) -> str:
    names = f"{door.name},{door.address}" if door.port == 22 else f"[{door.address}]:{door.port}"
    return f"{names} {door.host_key.public}\n"


def _config_entry(door: Door, user: str, folder: Path) -> str:
    lines = (
        f"Host {door.name}",
        f"    HostName {door.address}",
        f"    Port {door.port}",
        f"    User {user}",
        f"    IdentityFile {folder / 'id_ed25519'}",
        "    IdentitiesOnly yes",
        f"    UserKnownHostsFile {folder / 'known_hosts'}",
        "    GlobalKnownHostsFile /dev/null",
        "    StrictHostKeyChecking yes",
    )
    return "\n".join(lines) + "\n\n"


def _write_private(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text)
