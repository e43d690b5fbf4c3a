"""What a test host's root holds: the machine's /usr, a Python with torch at /opt/ring, and files of its own.

Nothing else of the machine is there, above all not this project: what a host has of it was pushed.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .access import KeyPair

PYTHON = "/opt/ring/bin/python"
GUEST = "/opt/guest.py"
USER_ID = 23001
HOME_INODES = 200_000

_OURS = ("launcher", "trainer")
_NOT_INSTALLED = (
    'raise ModuleNotFoundError(f"{__name__} is not installed on test hosts, it must be pushed")\n'
)
_FOLDERS = {
    "/dev/pts": 0o755,
    "/dev/shm": 0o755,
    "/home": 0o755,
    "/mnt": 0o755,
    "/opt": 0o755,
    "/proc": 0o755,
    "/root": 0o755,
    "/run": 0o755,
    "/sys": 0o755,
    "/tmp": 0o755,
    "/etc": 0o755,
    "/var/log": 0o755,
    "/var/tmp": 0o1777,
}
_SSHD_CONFIG = """\
HostKey /etc/ssh/ssh_host_ed25519_key
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PrintMotd no
AcceptEnv LANG LC_*
Subsystem sftp /usr/lib/openssh/sftp-server
"""


@dataclass(frozen=True)
class Image:
    """What may differ from host to host."""

    hostname: str
    hosts_text: str
    host_key: KeyPair
    user: str
    authorized_keys: str
    home_size: str


def root_spec(image: Image, root: Path) -> dict[str, Any]:
    """What `guest.py build` is told."""
    covers = [*_project_covers()]
    links = [*_system_links()]
    if not os.path.exists("/usr/bin/python3"):
        # Every server has a plain python3; here it is the one that /opt/ring was made from.
        links.append(("/opt/local/bin/python3", f"{sys.base_prefix}/bin/python3"))
        covers.append(("/opt/local", "/usr/local"))
    return {
        "root": str(root),
        "hostname": image.hostname,
        "folders": list(_FOLDERS.items()),
        "read_only": [*_system_folders(), *_python_folders()],
        "files": _files(image),
        "links": links,
        "covers": covers,
        "home": {
            "path": f"/home/{image.user}",
            "uid": USER_ID,
            "size": image.home_size,
            "inodes": HOME_INODES,
            "authorized_keys": image.authorized_keys,
        },
    }


def hosts_text(own_name: str, addresses: Mapping[str, str], own_name_loopback: bool) -> str:
    """An /etc/hosts that knows everyone; the own name may mean 127.0.1.1, as Debian's installer writes it."""
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
    for name, address in addresses.items():
        own = name == own_name and own_name_loopback
        lines.append(f"{'127.0.1.1' if own else address} {name}")
    return "\n".join(lines) + "\n"


def _system_folders() -> list[tuple[str, str]]:
    shared = ["/usr", "/etc/alternatives", *_top_level()]
    return [(path, path) for path in shared if os.path.isdir(path) and not os.path.islink(path)]


def _system_links() -> list[tuple[str, str]]:
    return [(path, os.readlink(path)) for path in _top_level() if os.path.islink(path)]


def _top_level() -> list[str]:
    return [
        path for path in ("/bin", "/sbin", "/lib", "/lib32", "/libx32", "/lib64") if os.path.lexists(path)
    ]


def _python_folders() -> list[tuple[str, str]]:
    """This interpreter's environment at /opt/ring, and the installation it was made from at its own path."""
    folders = [(sys.prefix, "/opt/ring")]
    if not Path(sys.base_prefix).is_relative_to("/usr"):
        folders.append((sys.base_prefix, sys.base_prefix))
    return folders


def _project_covers() -> list[tuple[str, str]]:
    """Hide a copy of this project that is installed in the environment."""
    packages = sysconfig.get_path("purelib")
    roots = ["/opt/ring"] + ([sys.prefix] if sys.prefix == sys.base_prefix else [])
    return [
        ("/opt/not-installed", f"{root}/{os.path.relpath(packages, sys.prefix)}/{package}")
        for package in _OURS
        if os.path.isdir(f"{packages}/{package}")
        for root in roots
    ]


def _files(image: Image) -> Sequence[tuple[str, str, int]]:
    user, home = image.user, f"/home/{image.user}"
    passwd = (
        "root:x:0:0:root:/root:/bin/bash",
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin",
        "sshd:x:100:65534::/run/sshd:/usr/sbin/nologin",
        f"{user}:x:{USER_ID}:{USER_ID}::{home}:/bin/bash",
    )
    groups = ("root:x:0:", "tty:x:5:", "nogroup:x:65534:", f"{user}:x:{USER_ID}:")
    shadow = (f"{line.split(':')[0]}:*:19000:0:99999:7:::" for line in passwd)
    return (
        ("/etc/passwd", "\n".join(passwd) + "\n", 0o644),
        ("/etc/group", "\n".join(groups) + "\n", 0o644),
        ("/etc/shadow", "\n".join(shadow) + "\n", 0o640),
        ("/etc/nsswitch.conf", "passwd: files\ngroup: files\nshadow: files\nhosts: files\n", 0o644),
        ("/etc/hosts", image.hosts_text, 0o644),
        ("/etc/hostname", image.hostname + "\n", 0o644),
        ("/etc/machine-id", uuid.uuid4().hex + "\n", 0o444),
        ("/etc/ssh/sshd_config", _SSHD_CONFIG, 0o644),
        ("/etc/ssh/ssh_host_ed25519_key", image.host_key.private, 0o600),
        ("/etc/ssh/ssh_host_ed25519_key.pub", image.host_key.public + "\n", 0o644),
        (GUEST, Path(__file__).with_name("guest.py").read_text(), 0o644),
        ("/opt/not-installed/__init__.py", _NOT_INSTALLED, 0o644),
    )
