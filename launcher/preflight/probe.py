"""Runs on a host and says what it finds there: one file, standard library only, Python 3.8 and up.

One JSON request on stdin (`peers`: the addresses of the other hosts), one JSON answer on stdout after
a line that reads SENTINEL.
"""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import sys
import time

TYPE_CHECKING = False  # a type checker takes it for true; importing `typing` at run time would cost a start
if TYPE_CHECKING:
    from typing import Any

SENTINEL = b"--ringctl-hostd--\n"
SIOCGIFADDR = 0x8915
PORTS_FROM = 20000  # below the usual ephemeral range, above what services use


def usable_cores() -> int:
    """How many cores a process of ours may use: affinity, and the cgroup's share where it is less."""
    cores = len(os.sched_getaffinity(0))
    try:
        with open("/sys/fs/cgroup/cpu.max") as f:
            quota, period = f.read().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return cores


def ephemeral_range() -> tuple[int, int]:
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as f:
            low, high = f.read().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return 32768, 60999


def is_free(port: int) -> bool:
    with socket.socket() as s:
        try:
            s.bind(("", port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A port that nobody listens on and that no outgoing connection will be given; 0 if there is none."""
    low, high = ephemeral_range()
    candidates = [port for port in range(PORTS_FROM, 65536) if not low <= port <= high]
    random.shuffle(candidates)
    return next((port for port in candidates if is_free(port)), 0)


def interfaces() -> dict[str, str]:
    """The IPv4 address of each interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        import fcntl

        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(s.fileno(), SIOCGIFADDR, request)
            except OSError:
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def source_address(peer: str) -> str:
    """The address this host would use towards `peer`; "" if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            s.connect((peer, 9))  # sends nothing: only the kernel's choice of route is asked
        except OSError:
            return ""
        return str(s.getsockname()[0])


def data_path(peers: list[str]) -> tuple[str, str]:
    """(address, interface) towards the peers; loopback when there are none."""
    names = {address: name for name, address in interfaces().items()}
    for peer in peers:
        address = source_address(peer)
        if address in names:
            return address, names[address]
    return "127.0.0.1", names.get("127.0.0.1", "lo")


def facts(request: dict[str, Any]) -> dict[str, Any]:
    address, ifname = data_path(request.get("peers") or [])
    return {
        "home": os.environ.get("RINGCTL_HOME") or os.path.expanduser("~/.ringctl"),
        "cores": usable_cores(),
        "free_port": free_port(),
        "data_address": address,
        "ifname": ifname,
        "python": sys.executable,
        "cwd": os.getcwd(),
        "time": time.time(),
    }


def main() -> int:
    request = json.loads(sys.stdin.buffer.readline() or b"{}")
    sys.stdout.buffer.write(SENTINEL + json.dumps(facts(request)).encode() + b"\n")
    sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
