"""A cluster of real hosts on this machine: namespaces with an sshd each, on one switch. Needs root."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import resource
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal

from . import memory, network, processes, registry
from .access import AccessFiles, Door, new_key, write_access
from .commands import PATIENCE, ClusterError, await_ssh, require_tools, side_by_side
from .image import PYTHON, Image, hosts_text
from .machine import Machine
from .network import Block, Cable, Direction, Port

CONTROLLER = "controller"  # stands for this machine wherever a host's peer is named
_TOOLS = ("ip", "tc", "nft", "nsenter", "unshare", "setpriv", "prlimit", "sshd", "ssh")


class Cluster(AccessFiles):
    """N hosts, made by `with` or `start()` and gone without trace after it.

    Files for the controller are as in AccessFiles. Hosts are called server1, server2, ... and have
    one unprivileged user, whose Python with torch is `python`.
    """

    python = PYTHON

    def __init__(
        self,
        hosts: int = 4,
        *,
        folder: Path | None = None,  # for the files; must be empty or not exist, and goes with the cluster
        rate: str | None = None,  # of every link, each direction by itself: "200mbit"
        subnet: str | None = None,  # such as 10.213.7.0/24; one that no other cluster has if not given
        user: str = "train",
        home_size: str = "1g",
        shm_size: str = "50%",
        decoy: bool = False,  # give each host a docker0 with 172.17.0.1
        own_name_loopback: bool = False,  # each host's own name means 127.0.1.1 to it
        persistent: bool = False,  # survives this process, until destroy_clusters(folder)
    ) -> None:
        super().__init__((folder or registry.temporary_folder()).resolve())
        self.user = user
        self.names = tuple(f"server{index + 1}" for index in range(hosts))
        self._rate, self._subnet = rate, subnet
        self._home_size, self._shm_size = home_size, shm_size
        self._decoy, self._own_name_loopback = decoy, own_name_loopback
        self._persistent = persistent
        self._record: registry.Record | None = None
        self._switch: subprocess.Popen[bytes] | None = None
        self._machines: dict[str, Machine] = {}
        self._uplink: Cable | None = None

    # --- Life ------------------------------------------------------------------------------------

    def __enter__(self) -> Cluster:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> Cluster:
        """Returns when every host's sshd answers; leaves nothing behind if that fails."""
        if os.getuid() != 0:
            raise ClusterError("network namespaces need root; LoopbackCluster does not")
        require_tools(*_TOOLS)
        self._record = registry.claim(self.folder, self._persistent)
        try:
            self._make(self._record)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Remove everything; may be repeated."""
        if self._record:
            registry.release(self._record)
            self._record = None
        for machine in self._machines.values():
            machine.collect()
        if self._switch:
            self._switch.wait()

    def _make(self, record: registry.Record) -> None:
        net = ipaddress.IPv4Network(self._subnet or f"10.213.{record.number}.0/24")
        addresses = [str(net[index + 1]) for index in range(len(self.names))]
        cables = network.cables(self.names, addresses)
        self._uplink = Cable(CONTROLLER, "uplink", record.link, str(net[-2]), "02:72:63:ff:ff:ff")
        self._machines = self._describe(cables, record)
        machines = self._machines.values()
        self._switch = network.start_switch(record.mark)
        side_by_side(Machine.begin_build, machines)
        side_by_side(Machine.finish_build, machines)
        ends = [(machine.cable, machine.holder) for machine in machines]
        network.connect(self._switch.pid, [*ends, (self._uplink, os.getpid())])
        network.configure(os.getpid(), self._uplink, net.prefixlen, cables, decoy=False)
        side_by_side(lambda machine: self._configure(machine, net.prefixlen), machines)
        side_by_side(Machine.begin_boot, machines)
        side_by_side(Machine.finish_boot, machines)
        side_by_side(await_ssh, addresses)

    def _describe(self, cables: Sequence[Cable], record: registry.Record) -> dict[str, Machine]:
        """Write the controller's files and say what each host will be."""
        identity = new_key()
        doors = [Door(cable.name, cable.address, 22, new_key()) for cable in cables]
        write_access(self, doors, identity, self.user, self.python)
        everyone = {cable.name: cable.address for cable in cables}
        machines = {}
        for cable, door in zip(cables, doors, strict=True):
            image = Image(
                hostname=cable.name,
                hosts_text=hosts_text(cable.name, everyone, self._own_name_loopback),
                host_key=door.host_key,
                user=self.user,
                authorized_keys=identity.public + "\n",
                home_size=self._home_size,
            )
            machines[cable.name] = Machine(image, cable, record.mark, self.folder, self._shm_size)
        return machines

    def _configure(self, machine: Machine, prefix_length: int) -> None:
        assert self._uplink
        peers = [*(other.cable for other in self._machines.values()), self._uplink]
        network.configure(machine.holder, machine.cable, prefix_length, peers, self._decoy)
        if self._rate:
            self.limit_rate(machine.cable.name, self._rate)

    # --- Looking ---------------------------------------------------------------------------------

    def address(self, host: str) -> str:
        """The address of a host, or of this machine for CONTROLLER."""
        return self._cable(host).address

    def ifname(self, host: str) -> str:
        return self._cable(host).ifname

    def path(self, host: str, path: str) -> Path:
        """A file of a running host, to read or write from here. Absolute symbolic links leave the host."""
        return self._machine(host).path(path)

    def processes(self, host: str) -> list[processes.Process]:
        """What runs on a host besides its first process and sshd; nothing when it is off."""
        return [
            process
            for process in self._machine(host).processes()
            if process.host_pid != 1 and process.name != "sshd"
        ]

    def is_idle(self, host: str) -> bool:
        """Whether nothing runs on a host but its first process and the sshd that listens."""
        return self._machine(host).is_idle()

    def listening_ports(self, host: str) -> set[int]:
        """TCP ports that anything on a host listens on, sshd's 22 included."""
        return processes.listening_ports(self._machine(host).holder)

    def run(
        self, host: str, *argv: str, user: str | None = None, input: str = "", check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run something on a host without SSH, as its user or as "root"; raises on failure if `check`."""
        command = self._machine(host).command(argv, user or self.user)
        done = subprocess.run(command, input=input, capture_output=True, text=True, timeout=PATIENCE)
        if check and done.returncode:
            raise ClusterError(f"{host}: {' '.join(argv)}: exit {done.returncode}: {done.stderr.strip()}")
        return done

    def spawn(self, host: str, *argv: str, user: str | None = None) -> subprocess.Popen[str]:
        """Start something on a host that runs until the returned process is killed, or the host is."""
        command = self._machine(host).command(argv, user or self.user)
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    # --- The network -----------------------------------------------------------------------------

    def cut(self, host: str) -> None:
        """Pull the host's cable; connections stay open and nothing answers."""
        network.set_link(self._switch_pid, self._cable(host), "down")

    def heal(self, host: str) -> None:
        """Put the cable back."""
        network.set_link(self._switch_pid, self._cable(host), "up")

    def limit_rate(self, host: str, rate: str | None) -> None:
        """Limit what a host sends and what it gets, each to this rate; None lifts it."""
        network.limit_rate(self._switch_pid, self._machine(host).holder, self._cable(host), rate)

    def set_mtu(self, host: str, mtu: int) -> None:
        network.set_mtu(self._machine(host).holder, self._cable(host), mtu)

    def drop_port(
        self,
        host: str,
        port: Port,
        *,
        from_: str | None = None,
        direction: Direction = "in",
        new_only: bool = False,
    ) -> None:
        """Drop what a host gets on a port or range of its own ("in"), what it sends from it ("out"), or both.

        `from_` limits it to one peer. `new_only` is a usual firewall: connections that exist go on,
        also those the host made itself from such a port.
        """
        peer = self.address(from_) if from_ else ""
        wanted: tuple[Literal["in", "out"], ...] = ("in", "out") if direction == "both" else (direction,)
        self._block(host, *(Block(way, peer=peer, port=port, new_only=new_only) for way in wanted))

    def drop_from(self, host: str, peer: str) -> None:
        """Drop all that one peer sends to a host, and nothing in the other direction."""
        self._block(host, Block("in", peer=self.address(peer)))

    def drop_between(self, one: str, other: str) -> None:
        """Drop all between two hosts (not the controller), both ways."""
        self.drop_from(one, other)
        self.drop_from(other, one)

    def reset_port(self, host: str, port: Port, *, from_: str | None = None) -> None:
        """Answer what arrives on a port with a TCP reset: open connections break, new ones are refused."""
        peer = self.address(from_) if from_ else ""
        self._block(host, Block("in", peer=peer, port=port, reset=True))

    def clear_rules(self, host: str) -> None:
        """Lift all drops and resets that were put on a host."""
        network.unblock(self._machine(host).holder)

    def write_hosts(self, host: str, addresses: Mapping[str, str]) -> None:
        """Replace what a host's /etc/hosts says of all names but localhost."""
        self.path(host, "/etc/hosts").write_text(hosts_text(host, addresses, own_name_loopback=False))

    # --- The host itself -------------------------------------------------------------------------

    def kill_host(self, host: str) -> None:
        """End all its processes at once. Its network stays, so peers see their connections close."""
        self._machine(host).kill()

    def boot(self, host: str) -> None:
        """Start a killed host: a new boot id, empty /tmp, the same disk; returns when sshd listens."""
        self._machine(host).begin_boot()
        self._machine(host).finish_boot()

    def reboot(self, host: str) -> None:
        self.kill_host(host)
        self.boot(host)

    def power_off(self, host: str) -> None:
        """Take it away without a word to anyone; `boot` and `heal` bring it back."""
        self.cut(host)
        self.kill_host(host)

    def stop_sshd(self, host: str) -> None:
        """New connections are refused; those that exist go on, as with a service manager's stop."""
        self._machine(host).stop_sshd()

    def start_sshd(self, host: str) -> None:
        self._machine(host).start_sshd()

    def end_sessions(self, host: str) -> None:
        """Kill the sshd processes of all open connections, not the one that listens."""
        machine = self._machine(host)
        listener = machine.sshd()
        spared = listener.pid if listener else 0  # by its number: its title counts those who are signing in
        for process in machine.processes():
            if process.name == "sshd" and process.pid != spared:
                with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                    os.kill(process.pid, signal.SIGKILL)

    def limit_open_files(self, host: str, limit: int) -> None:
        """Hard and soft limit of every login from now on."""
        listener = self._machine(host).sshd()
        if not listener:
            raise ClusterError(f"{host}: sshd is not running")
        resource.prlimit(listener.pid, resource.RLIMIT_NOFILE, (limit, limit))

    def limit_memory(self, host: str, size: int) -> None:
        """Let the kernel kill a process when all of the host's exceed so many bytes, until the next boot."""
        assert self._record
        pids = [process.pid for process in self._machine(host).processes()]
        memory.limit(self._record.mark, host, pids, size)

    def fill_disk(self, host: str, leave: int = 0) -> None:
        """Leave so many bytes free in the user's home; takes no memory."""
        self._machine(host).fill_home(leave)

    def use_up_inodes(self, host: str) -> None:
        """Leave room in the user's home for data but not for one more file."""
        self._machine(host).use_up_inodes()

    def free_disk(self, host: str) -> None:
        """Undo `fill_disk` and `use_up_inodes`."""
        self._machine(host).free_home()

    def resize_shm(self, host: str, size: str) -> None:
        """The size of /dev/shm until the next boot: "1m"."""
        self._machine(host).resize_shm(size)

    # --- Parts -----------------------------------------------------------------------------------

    @property
    def _switch_pid(self) -> int:
        if not self._switch:
            raise ClusterError("the cluster is not running")
        return self._switch.pid

    def _machine(self, host: str) -> Machine:
        try:
            return self._machines[host]
        except KeyError:
            raise ClusterError(f"no host {host}; there are: {', '.join(self._machines)}") from None

    def _cable(self, host: str) -> Cable:
        return self._uplink if host == CONTROLLER and self._uplink else self._machine(host).cable

    def _block(self, host: str, *blocks: Block) -> None:
        network.block(self._machine(host).holder, *blocks)
