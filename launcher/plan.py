"""Pure: inventory + facts + options -> Plan. The same input gives the same plan, to the byte."""

from __future__ import annotations

import ipaddress
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from launcher.errors import InputError, PreflightError
from launcher.model import EnvSpec, Facts, Host, HostPlan, Inventory, Plan, RankSpec
from launcher.redact import Hidden

LONGEST_DELAY_S = 60.0  # between two attempts
STARTS_S = 45.0  # by then an attempt has started, or has met something that keeps it waiting


@dataclass(frozen=True)
class LaunchOptions:
    """What the user asked for, beyond the inventory."""

    run: str
    name: str
    command: tuple[str, ...]  # as given: options for the built-in trainer, or a command of its own
    trainer: str  # path of the built-in trainer on this machine
    world: int | None = None  # None: every slot
    attempt: int = 1
    since: int = 1  # the last attempt that somebody typed; a stop before that is over and done with
    promised: bool = False  # somebody knows its id already, so it keeps it
    max_restarts: int = 0  # how often it starts again by itself after a failure
    restart_delay: float = 2.0  # seconds before it does; twice as many each time
    preflight: bool = True  # whether it is checked before it starts
    min_world: int | None = None  # go on with so many ranks if hosts cannot be reached; None: with all or not
    full_world: int | None = None  # how many it was launched with, if an attempt has another number
    left_out: frozenset[str] = frozenset()  # hosts of the inventory that it goes on without
    master_port: int | None = None
    prefork: bool = True
    workdir: str = ""  # where local ranks run
    code: str = ""  # digest of what was pushed to the other hosts
    code_files: frozenset[str] = frozenset()
    variables: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)  # such variables whose values are redact.Hidden
    env_file: str = ""  # where they come from, for a restart: only their names are remembered
    i_know: bool = False  # gradients may go through a public address
    shared: bool = False  # its slots may be others' as well, who say so, too


def is_trainer(command: tuple[str, ...]) -> bool:
    """Whether what follows `--` is options for the built-in trainer rather than a command."""
    return not command or command[0].startswith("-")


def place(inventory: Inventory, world: int | None) -> list[tuple[Host, range]]:
    """Which ranks go where: the master's host first, then in the inventory's order, each filled up."""
    hosts = sorted(inventory.hosts, key=lambda host: host.name != inventory.master)
    slots = sum(host.slots for host in hosts)
    world = slots if world is None else world
    if world < 1:
        raise InputError(f"--world {world}: a run has at least one rank; write --world 1 or more")
    if world > slots:
        where = inventory.source or "this machine"
        raise InputError(
            f"--world {world} is more than the {slots} slots of {where}",
            fix=f"write --world {slots} or less, or raise `slots` of a host",
        )
    placed, first = [], 0
    for host in hosts:
        count = min(host.slots, world - first)
        if count > 0:
            placed.append((host, range(first, first + count)))
            first += count
    return placed


def make_plan(inventory: Inventory, facts: Mapping[str, Facts], options: LaunchOptions) -> Plan:
    """The whole run. `facts` holds every host that `place` names."""
    placed = place(inventory, options.world)
    world = placed[-1][1].stop
    master = facts[placed[0][0].name]
    address = placed[0][0].data_address or master.data_address
    port = options.master_port or inventory.master_port or master.free_port
    for host, _ in placed:
        refuse_without_way(host, facts[host.name])
        if is_public(facts[host.name].data_address) and not options.i_know:
            raise PreflightError(exposed(host.name, facts[host.name].data_address), fix=EXPOSED_FIX)
    if not all(isinstance(value, Hidden) for value in options.secrets.values()):
        raise InputError(f"the run had secrets from {options.env_file}, which was not read again")
    if not port:
        raise PreflightError(f"{master.host}: no free port outside the ephemeral range for the master")
    shared = {
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "PYTHONUNBUFFERED": "1",
        "RINGCTL_RUN": options.run,
        "RINGCTL_ATTEMPT": str(options.attempt),
        **first_world(options, world),
    }
    return Plan(
        run=options.run,
        name=options.name,
        attempt=options.attempt,
        world=world,
        master_address=address,
        master_port=port,
        command=options.command,
        hosts=tuple(host_plan(host, ranks, facts[host.name], shared, options) for host, ranks in placed),
        code=options.code,
    )


def first_world(options: LaunchOptions, world: int) -> dict[str, str]:
    """How many ranks the first attempt had, for one that has another number: `--lr` was meant for those."""
    differs = options.attempt > 1 and options.full_world not in (None, world)
    return {"RINGCTL_FIRST_WORLD": str(options.full_world)} if differs else {}


def refuse_without_way(host: Host, facts: Facts) -> None:
    """Without a way to the others a host would wait for them at its own loopback, for ever."""
    if facts.routes and not any(facts.routes.values()) and not host.data_address:
        raise PreflightError(
            f"{host.name}: it has no route to {', '.join(facts.routes)}",
            fix="give each host a numeric IPv4 `address` or `data_address` that the others reach",
        )


def is_public(address: str) -> bool:
    """Whether the whole Internet could reach it: it is no loopback, private, link-local or carrier's own."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_global
    except ValueError:
        return False  # a name: what it means is judged by the address that its host answers with


EXPOSED_FIX = (
    "write a private `data_address` or `ifname`, such as a VPN's; if a firewall keeps others out: --i-know"
)


def exposed(host: str, address: str) -> str:
    return (
        f"{host}: its data address {address} is a public one: "
        "whoever reaches the ports of a run can read and change what the ranks send each other"
    )


def host_plan(
    host: Host, ranks: range, facts: Facts, shared: Mapping[str, str], options: LaunchOptions
) -> HostPlan:
    """One host's part of the plan."""
    ifname = host.ifname or facts.ifname
    on_host = {
        "OMP_NUM_THREADS": str(max(1, facts.cores // len(ranks))),
        **host.variables,
        **options.variables,
        **options.secrets,
        **shared,
        "LOCAL_WORLD_SIZE": str(len(ranks)),
        "GLOO_SOCKET_IFNAME": ifname,
        "TP_SOCKET_IFNAME": ifname,
        "RINGCTL_HOST": host.name,
        "RINGCTL_HOME": facts.home,
        "RINGCTL_CHECKPOINTS": f"{facts.home}/runs/{options.run}/checkpoints",
    }
    folder, argv = folder_and_argv(host, facts, options)
    return HostPlan(
        host=host.name,
        workdir=folder,
        env=host.env,
        prefork=options.prefork,
        ranks=tuple(rank_spec(rank, rank - ranks.start, argv, on_host) for rank in ranks),
        code="" if host.local or is_trainer(options.command) else options.code,
        listens=int(shared["MASTER_PORT"]) if ranks.start == 0 else 0,
        shared=options.shared,
        keeps=kept_after_failure(options),
    )


def kept_after_failure(options: LaunchOptions) -> float:
    """For how many seconds its slots are kept: until the next attempt should have started, if one comes."""
    failures = options.attempt - options.since + 1
    return restart_delay(options, failures) + STARTS_S if failures <= options.max_restarts else 0.0


def restart_delay(options: LaunchOptions, failures: int) -> float:
    """Seconds before the next attempt: twice as many after each failure, but not for ever."""
    longest = max(LONGEST_DELAY_S, options.restart_delay)
    return float(min(longest, options.restart_delay * 2 ** (min(failures, 20) - 1)))


def folder_and_argv(host: Host, facts: Facts, options: LaunchOptions) -> tuple[str, tuple[str, ...]]:
    """Where a host's ranks run, and what.

    On this machine that is the user's own folder. Elsewhere it is the run's own copy of the snapshot, or
    the host's `workdir`, where relative names of pushed files are made to mean that copy."""
    if host.local:
        return host.workdir or options.workdir or facts.cwd, rank_argv(host.env, options, options.trainer)
    copy = f"{facts.home}/runs/{options.run}/work"
    argv = rank_argv(host.env, options, f"{facts.home}/code/{options.code}/trainer/__main__.py")
    if host.workdir:
        argv = tuple(f"{copy}/{word}" if word in options.code_files else word for word in argv)
    return host.workdir or copy, argv


def rank_spec(rank: int, local_rank: int, argv: tuple[str, ...], on_host: Mapping[str, str]) -> RankSpec:
    run, attempt = on_host["RINGCTL_RUN"], on_host["RINGCTL_ATTEMPT"]
    metrics = f"{on_host['RINGCTL_HOME']}/runs/{run}/ranks/{rank}/metrics-{attempt}.jsonl"
    own = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "RINGCTL_METRICS": metrics}
    return RankSpec(rank, local_rank, argv, {**on_host, **own})


def rank_argv(env: EnvSpec | None, options: LaunchOptions, trainer: str) -> tuple[str, ...]:
    """The command of every rank; `python` means the environment's own."""
    if is_trainer(options.command):
        argv: tuple[str, ...] = ("python", trainer, *options.command)
    else:
        argv = options.command
    if env is not None and env.kind == "python" and argv[0] in ("python", "python3"):
        return (env.value, *argv[1:])
    return argv


def shell_commands(plan: Plan) -> dict[str, list[str]]:
    """For each host, lines to paste into a shell there that start its ranks by hand."""
    return {
        host.host: [*to_export(host), *(shell_command(host, rank) for rank in host.ranks)]
        for host in plan.hosts
    }


def to_export(host: HostPlan) -> list[str]:
    """What to do first about values that are not shown."""
    names = sorted(
        {name for rank in host.ranks for name, value in rank.env.items() if isinstance(value, Hidden)}
    )
    return [f"# export {' '.join(names)} first: what is secret is not shown here"] if names else []


def shell_command(host: HostPlan, rank: RankSpec) -> str:
    """One rank, quoted. ringctl's own folders are left out, for a run by hand has none: it is in the host's
    `workdir` or, without one, in the home folder that the code must be."""
    folder, argv = by_hand(host, rank)
    env = {k: v for k, v in rank.env.items() if not (k.startswith("RINGCTL_") or isinstance(v, Hidden))}
    words = ["env", *(f"{name}={value}" for name, value in env.items()), *argv]
    activate = {"venv": ". {}/bin/activate && ", "conda": "conda activate {} && "}
    prefix = (
        activate[host.env.kind].format(quote_path(host.env.value))
        if host.env and host.env.kind in activate
        else ""
    )
    log = f"rank{rank.rank}.log"
    return f"cd {folder} && {prefix}nohup {shlex.join(words)} >{log} 2>&1 </dev/null &"


def by_hand(host: HostPlan, rank: RankSpec) -> tuple[str, tuple[str, ...]]:
    """(the folder, quoted; the argv) without what only ringctl puts on a host: snapshots and their copies."""
    home, run = rank.env.get("RINGCTL_HOME", ""), rank.env.get("RINGCTL_RUN", "")
    copy = f"{home}/runs/{run}/work"
    folder = "~" if host.workdir == copy else quote_path(host.workdir)
    argv = [word.removeprefix(f"{copy}/") for word in rank.argv]
    if argv[1:] and argv[1].startswith(f"{home}/code/") and argv[1].endswith("/trainer/__main__.py"):
        python = "python3" if host.env is None else argv[0]
        argv[:2] = [python, "-m", "trainer"]
    return folder, tuple(argv)


def quote_path(path: str) -> str:
    """Quoted for a shell, but with a leading ~ still meaning the home folder."""
    return "~/" + shlex.quote(path[2:]) if path.startswith("~/") else shlex.quote(path)
