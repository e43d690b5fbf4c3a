"""The records that flow through ringctl: Inventory, Facts, Plan, Event, RunState.

All are frozen and round-trip through JSON with `to_json` and `from_json`.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

# --- Inventory: what the user says ---------------------------------------------------------------


@dataclass(frozen=True)
class EnvSpec:
    """Which Python environment a host's ranks run in."""

    kind: Literal["conda", "venv", "python"]
    value: str


@dataclass(frozen=True)
class Host:
    """One server of the inventory, with `defaults` already applied."""

    name: str
    address: str = ""  # where SSH goes; "" for this machine
    user: str = ""  # "" leaves it to ~/.ssh/config, then to the local user
    port: int = 0  # SSH port; 0 leaves it to ~/.ssh/config, then 22
    slots: int = 1  # how many ranks it takes
    ifname: str = ""  # interface for gradients; "" means found from the host's route to its peers
    data_address: str = ""  # address for gradients; "" means the address of that interface
    env: EnvSpec | None = None
    workdir: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)  # extra environment of its ranks
    identity_file: str = ""
    host_key: str = ""  # pinned public key, "ssh-ed25519 AAAA..."
    python: str = "python3"  # what runs ringctl's own supervisor there; the ranks use `env`
    local: bool = False  # this machine, without SSH


@dataclass(frozen=True)
class Inventory:
    """All hosts in order. The master holds rank 0."""

    hosts: tuple[Host, ...]
    master: str
    master_port: int | None = None  # None: one that is free on the master
    source: str = ""  # the file it came from, "" for this machine alone


# --- Facts: what a host says ---------------------------------------------------------------------


@dataclass(frozen=True)
class Interface:
    """A network interface of a host."""

    name: str
    address: str  # IPv4, "" if it has none
    mtu: int
    up: bool


@dataclass(frozen=True)
class Folder:
    """A place that a run writes to or reads from."""

    role: Literal["home", "workdir", "data"]
    path: str
    free_bytes: int = 0
    free_inodes: int = 0  # -1 where the file system has no such limit
    problem: str = ""  # why it cannot be used, as the host says it
    on_home_disk: bool = False  # on the one that the user's own folder is on


@dataclass(frozen=True)
class PortUse:
    """The master port, looked at on the master's host."""

    port: int
    free: bool
    owner: str = ""  # who listens there, as far as that can be seen
    run: str = ""  # the run of ours that it belongs to
    reserved: bool = False  # the kernel gives it to nobody who does not ask for it


@dataclass(frozen=True)
class EnvLook:
    """The ranks' environment, as its own Python sees it."""

    problem: str = ""  # why there is none
    kind: str = ""  # of that problem: "missing" or "broken"
    python: str = ""
    executable: str = ""  # as it calls itself
    path: str = ""  # as it is called
    packages: Mapping[str, str | None] = field(default_factory=dict)
    torchvision_for: str = ""  # the torch that its torchvision was made for
    only_interactive: bool = False  # its conda was found only by asking an interactive shell
    imports: Mapping[str, str] = field(
        default_factory=dict
    )  # with --deep: why an import failed, "" if it did not


@dataclass(frozen=True)
class SlotsTold:
    """A run that has slots of a host, of whichever user; see hostslots.taken."""

    run: str
    user: str
    attempt: int
    slots: int
    world: int
    shared: bool


@dataclass(frozen=True)
class Facts:
    """What a host says of itself. The first part is what planning needs, the rest is for the checks."""

    host: str
    home: str  # absolute path of its ringctl folder
    cores: int  # that a process of ours may use
    free_port: int  # not listening and outside the ephemeral range when it was asked
    data_address: str
    ifname: str
    python: str  # the interpreter that answered
    cwd: str = ""

    hostname: str = ""
    identity: str = ""  # the same for two names of one host
    user: str = ""
    machine: str = ""
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # what each name means there
    hosts_lines: tuple[str, ...] = ()  # of /etc/hosts, those about these names
    interfaces: tuple[Interface, ...] = ()
    routes: Mapping[str, str] = field(default_factory=dict)  # peer's address: interface towards it
    port: PortUse | None = None
    ephemeral: tuple[int, ...] = ()
    memory: int = -1  # bytes that ranks may take; -1 if unknown
    shm: int = -1  # free bytes of /dev/shm
    folders: tuple[Folder, ...] = ()
    nofile: tuple[int, ...] = ()  # soft, hard; -1 for no limit
    threads: int = -1  # how many more the user may start; -1 for no limit
    kills_on_logout: bool = False
    cpu_flags: tuple[str, ...] = ()
    gpus: int = 0
    runs: tuple[str, ...] = ()  # of ringctl, going on there
    taken: tuple[SlotsTold, ...] = ()  # the same, of all its users
    stale: tuple[str, ...] = ()  # variables left over from torchrun
    firewalls: tuple[str, ...] = ()  # tools for one that are there
    env: EnvLook | None = None
    data: Mapping[str, str] = field(default_factory=dict)  # file of the dataset: its size, or what is wrong
    listening: tuple[int, ...] = ()  # ports where the probe waits for the other hosts
    noise: str = ""  # what a login shell printed before the answer
    clock_s: float | None = None  # its clock less ours
    clock_error_s: float = 0.0  # how far off that may be


@dataclass(frozen=True)
class Pair:
    """What one host found when it dialled another."""

    source: str
    target: str
    port: int
    problem: str = ""  # "" if all went well
    large: bool = True  # False if small messages arrived and a large one did not
    latency_ms: float | None = None
    mbit_s: float | None = None
    seen: str = ""  # the address that the target saw it come from


# --- Checks: what that means ---------------------------------------------------------------------

Status = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class CheckResult:
    """The verdict of one check about one host, or about the way from a host to a peer."""

    name: str
    host: str
    status: Status
    found: str = ""
    wanted: str = ""
    fix: str = ""  # the exact line to type, or what else to do
    peer: str = ""
    blocking: bool = False  # a run would not start, or would not get far


# --- Plan: what will be done ---------------------------------------------------------------------


@dataclass(frozen=True)
class RankSpec:
    """One process to start."""

    rank: int
    local_rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True)
class HostPlan:
    """What one host's supervisor is told."""

    host: str
    workdir: str
    env: EnvSpec | None
    prefork: bool  # import torch once and fork the ranks, where the command is Python
    ranks: tuple[RankSpec, ...]
    code: str = ""  # digest of the snapshot whose copy is the run's own folder; "" for none
    listens: int = 0  # the master port, on the master's host: it must still be free there
    shared: bool = False  # its slots may be others' as well, who say so, too
    keeps: float = 0.0  # seconds for which its slots are kept after a failure, for the next attempt


@dataclass(frozen=True)
class Plan:
    """A whole run, exactly as it will be started."""

    run: str
    name: str
    attempt: int
    world: int
    master_address: str
    master_port: int
    command: tuple[str, ...]  # as the user gave it
    hosts: tuple[HostPlan, ...]
    code: str = ""  # digest of the code that all ranks run; "" when it is used where it is

    @property
    def rank_hosts(self) -> dict[int, str]:
        """Which host each rank is on."""
        return {rank.rank: host.host for host in self.hosts for rank in host.ranks}


# --- Event and RunState: what happened -----------------------------------------------------------


class Event(NamedTuple):  # a tuple, because a log has millions: it is made three times as fast
    """One thing that happened. `data` holds what is particular to its kind:

    line            stream ("out" or "err"), text, end (only when not a newline)
    rank_started    pid
    rank_exited     state, exit_code, signal (a name, or null), reason (why it did not end by itself, or "");
                    of one that was stopped: stopping (for how many seconds its host had known of that);
                    of one whose supervisor was gone: ago (so many seconds before it was still there)
    metric          the record that the rank wrote
    stack           where a rank is that makes no progress, or was just before it was ended
    oom             the kernel killed a process of the rank for want of memory
    run_finished    state, exit_code, cause, fix, accuracy, parameters_sha256
    """

    kind: str
    time: float
    run: str
    attempt: int
    host: str
    rank: int | None
    data: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "time": self.time,
            "run": self.run,
            "attempt": self.attempt,
            "host": self.host,
            "rank": self.rank,
            **self.data,
        }


RankStatus = Literal["waiting", "running", "succeeded", "failed", "stopped", "unknown"]
RunStatus = Literal["starting", "running", "succeeded", "failed", "stopped", "lost"]


@dataclass(frozen=True)
class RankState:
    """The latest that is known of one rank."""

    rank: int
    host: str
    state: RankStatus = "waiting"
    pid: int | None = None
    exit_code: int | None = None
    signal: str | None = None
    reason: str = ""  # why it did not end by itself
    stopping: float | None = None  # if somebody has stopped it, how long its host had known of that
    ended: float | None = None
    seen: float | None = None  # last output, metric or change
    metric: Mapping[str, Any] = field(default_factory=dict)  # newest value of each metric


@dataclass(frozen=True)
class RunState:
    """A run, folded from its events."""

    run: str
    name: str
    attempt: int
    world: int
    state: RunStatus
    ranks: Mapping[int, RankState]
    started: float | None = None
    ended: float | None = None
    unwritten: Mapping[str, int] = field(default_factory=dict)  # lines of each host's log that are lost


# --- JSON ----------------------------------------------------------------------------------------

T = TypeVar("T")
SCALARS: dict[Any, tuple[type, ...]] = {str: (str,), int: (int,), float: (float, int), bool: (bool,)}


def to_json(record: Any) -> Any:
    """A record as plain dicts, lists and scalars."""
    return dataclasses.asdict(record, dict_factory=_plain)


def _plain(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: sorted(value) if isinstance(value, frozenset) else value for key, value in pairs}


def from_json(cls: type[T], data: Any) -> T:
    """The record that `to_json` made `data` from; raises TypeError or KeyError on anything else."""
    return typing.cast(T, _build(cls, data))


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _build(kind: Any, data: Any) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = _hints(kind)
        if not isinstance(data, dict):
            raise TypeError(f"expected an object, not {type(data).__name__}")
        known = {
            f.name: _build(hints[f.name], data[f.name]) for f in dataclasses.fields(kind) if f.name in data
        }
        return kind(**known)
    if origin is types.UnionType:
        rest = [a for a in args if a is not type(None)]
        return None if data is None else _build(rest[0], data)
    if origin in (tuple, frozenset):
        if not isinstance(data, (list, tuple)):
            raise TypeError(f"expected a list, not {type(data).__name__}")
        return origin(_build(args[0], item) for item in data)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(data, Mapping):
            raise TypeError(f"expected an object, not {type(data).__name__}")
        key = int if args[0] is int else str
        return {key(k): _build(args[1], v) for k, v in data.items()}
    if origin is Literal:
        if data not in args:
            raise TypeError(f"expected one of {args}, not {data!r}")
        return data
    if kind in SCALARS and (
        not isinstance(data, SCALARS[kind]) or (isinstance(data, bool) and kind is not bool)
    ):
        raise TypeError(f"expected {kind.__name__}, not {type(data).__name__}")
    return data
