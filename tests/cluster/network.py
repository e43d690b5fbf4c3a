"""The wires: one switch in a namespace of its own, a cable to every host and one to the controller.

The switch lives apart so that the machine's firewall does not see what hosts send each other, and
so that all cables vanish with the process that holds its namespace.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .commands import SYSTEM_PATH, ClusterError, call, inside, wait_until
from .processes import MARK

Direction = Literal["in", "out", "both"]
Port = int | tuple[int, int]

INTERFACE_NAMES = ("eth0", "enp1s0", "ens3", "eno1", "enp0s25", "ens18", "eth1", "enp3s0f0")
DECOY = "docker0"
_TABLE = "inet ringtest"
# All namespaces share the kernel's one neighbour table of 1024 entries. Permanent entries are not
# counted, so larger clusters use those; smaller ones resolve addresses as real networks do.
_MOST_WITH_REAL_ARP = 20


@dataclass(frozen=True)
class Cable:
    """One host's connection. `port` is the switch's end, `ifname` the host's."""

    name: str
    port: str
    ifname: str
    address: str
    mac: str


def cables(names: Sequence[str], addresses: Sequence[str]) -> list[Cable]:
    """One cable each, with interface names that differ from host to host."""
    return [
        Cable(
            name=name,
            port=f"port{index}",
            ifname=INTERFACE_NAMES[index] if index < len(INTERFACE_NAMES) else f"enp{index}s0",
            address=address,
            mac=f"02:72:63:00:{index // 256:02x}:{index % 256:02x}",
        )
        for index, (name, address) in enumerate(zip(names, addresses, strict=True))
    ]


def start_switch(mark: str) -> subprocess.Popen[bytes]:
    """The process that holds the switch's namespace."""
    switch = subprocess.Popen(
        ["unshare", "--net", "sleep", "infinity"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # else whoever reads ours to its end would wait for the cluster's
        env={MARK: mark, "PATH": SYSTEM_PATH},
        start_new_session=True,
    )
    ours = os.readlink("/proc/self/ns/net")
    wait_until(lambda: os.readlink(f"/proc/{switch.pid}/ns/net") != ours, "the switch's namespace")
    return switch


def connect(switch: int, ends: Sequence[tuple[Cable, int]]) -> None:
    """Make the switch and plug every cable's far end into the network namespace of its process."""
    lines = ["link add switch type bridge stp_state 0 mcast_snooping 0", "link set switch up"]
    for cable, pid in ends:
        far_end = f"peer name {cable.ifname} address {cable.mac} netns {pid}"
        lines += [
            f"link add {cable.port} type veth {far_end}",
            f"link set {cable.port} master switch up",
        ]
    _ip(switch, lines)


def configure(pid: int, cable: Cable, prefix_length: int, peers: Sequence[Cable], decoy: bool) -> None:
    """Give a host its address, and a bridge such as Docker makes if wanted."""
    lines = [
        "link set lo up",
        f"address add {cable.address}/{prefix_length} dev {cable.ifname}",
        f"link set {cable.ifname} up",
    ]
    if len(peers) > _MOST_WITH_REAL_ARP:
        others = [peer for peer in peers if peer != cable]
        lines += [f"neigh replace {peer.address} lladdr {peer.mac} dev {cable.ifname}" for peer in others]
    if decoy:
        lines += [
            f"link add {DECOY} type bridge",
            f"address add 172.17.0.1/16 dev {DECOY}",
            "link add veth1f0c2a7 type veth peer name veth9b3d5e1",  # a container, which gives it a carrier
            f"link set veth1f0c2a7 master {DECOY} up",
            "link set veth9b3d5e1 up",
            f"link set {DECOY} up",
        ]
    _ip(pid, lines)


def set_link(switch: int, cable: Cable, state: Literal["up", "down"]) -> None:
    _ip(switch, [f"link set {cable.port} {state}"])


def set_mtu(pid: int, cable: Cable, mtu: int) -> None:
    _ip(pid, [f"link set {cable.ifname} mtu {mtu}"])


def limit_rate(switch: int, pid: int, cable: Cable, rate: str | None) -> None:
    """Shape both ends of a cable, so that the limit holds in each direction by itself."""
    for process, device in ((switch, cable.port), (pid, cable.ifname)):
        tc = [*inside(process, "net"), "tc", "qdisc"]
        if rate is not None:
            call([*tc, "replace", "dev", device, "root", *_bucket(rate)])
        elif "tbf" in call([*tc, "show", "dev", device, "root"]):
            call([*tc, "delete", "dev", device, "root"])


def _bucket(rate: str) -> list[str]:
    """A token bucket that holds 10 ms, which is enough for any clock tick, and at least one large packet."""
    burst = max(bits_per_second(rate) // 8 // 100, 65536)
    return ["tbf", "rate", rate, "burst", str(burst), "latency", "50ms"]


def bits_per_second(rate: str) -> int:
    """`200mbit` as a number."""
    match = re.fullmatch(r"(\d+)([kmg])bit", rate)
    if not match:
        raise ClusterError(f"rate {rate!r}: want a number and kbit, mbit or gbit, such as 200mbit")
    return int(match[1]) * {"k": 10**3, "m": 10**6, "g": 10**9}[match[2]]


@dataclass(frozen=True)
class Block:
    """Packets that a host's firewall takes away.

    `port` is the host's own port: "in" is what arrives for it, "out" what it sends. With `new_only`
    connections that exist go on and only new ones suffer. `reset` answers instead of being silent.
    """

    direction: Literal["in", "out"]
    peer: str = ""  # an address, "" for everyone
    port: Port | None = None
    new_only: bool = False
    reset: bool = False


def block(pid: int, *blocks: Block) -> None:
    """Add rules to a host's firewall."""
    lines = [
        f"add table {_TABLE}",
        f"add chain {_TABLE} in {{ type filter hook input priority 0; }}",
        f"add chain {_TABLE} out {{ type filter hook output priority 0; }}",
        *(f"add rule {_TABLE} {rule(block)}" for block in blocks),
    ]
    call([*inside(pid, "net"), "nft", "-f", "-"], input="\n".join(lines) + "\n")


def rule(block: Block) -> str:
    """One block in nftables' words, chain first."""
    words: list[str] = [block.direction]
    if block.peer:
        words.append(f"ip {'saddr' if block.direction == 'in' else 'daddr'} {block.peer}")
    if block.port is not None:
        ports = "{}-{}".format(*block.port) if isinstance(block.port, tuple) else str(block.port)
        words.append(f"tcp {'dport' if block.direction == 'in' else 'sport'} {ports}")
    if block.new_only:
        words.append("tcp flags & (syn | ack) == syn")
    words.append("meta l4proto tcp reject with tcp reset" if block.reset else "drop")
    return " ".join(words)


def unblock(pid: int) -> None:
    """Remove every rule that `block` added."""
    call([*inside(pid, "net"), "nft", "-f", "-"], input=f"add table {_TABLE}\ndelete table {_TABLE}\n")


def _ip(pid: int, lines: Sequence[str]) -> None:
    call([*inside(pid, "net"), "ip", "-batch", "-"], input="\n".join(lines) + "\n")
