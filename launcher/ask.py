"""What the user asked for, checked before anything is touched."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from launcher import hostlist
from launcher import inventory as inventories
from launcher.errors import InputError
from launcher.model import EnvSpec, Host, Inventory
from launcher.plan import EXPOSED_FIX, LaunchOptions, exposed, is_public, is_trainer, place
from launcher.redact import Hidden, read_env_file

if TYPE_CHECKING:
    from launcher.push import Snapshot

TRAINER = str(Path(__file__).resolve().parent.parent / "trainer" / "__main__.py")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MOST_LOCAL_RANKS = 1024
LEASE_S, LEAST_LEASE_S = 8.0, 1.0  # supervisors hear of each other once a second


@dataclass(frozen=True)
class Where:
    """Which hosts the user means: the options of `host_options`."""

    hosts_file: str | None = None
    host_list: str | None = None
    hostfile: str | None = None
    include: str | None = None
    exclude: str | None = None

    def inventory(self) -> Inventory | None:
        """The hosts given or found, or None where there are none but this machine."""
        given = [option for option in (self.hosts_file, self.host_list, self.hostfile) if option is not None]
        if len(given) > 1:
            raise InputError("--hosts, -H and --hostfile exclude each other; leave one")
        found = self._read()
        if found is None:
            if self.include or self.exclude:
                raise InputError(
                    "--include and --exclude choose among the hosts of an inventory; there is none"
                )
            return None
        chosen = chosen_hosts(found, self.include, self.exclude)
        here = [host.name for host in chosen.hosts if host.local]
        if len(here) > 1:
            raise InputError(
                f"{chosen.source}: hosts {' and '.join(here)} are both this machine (local: true)",
                fix="write it once, with `slots`",
            )
        return replace(chosen, hosts=tuple(with_key(with_local_env(host)) for host in chosen.hosts))

    def _read(self) -> Inventory | None:
        if self.host_list is not None:
            return hostlist.parse_host_list(self.host_list)
        if self.hostfile is not None:
            return hostlist.parse_hostfile(inventories.read(Path(self.hostfile)), self.hostfile)
        path = inventories.find(self.hosts_file, os.environ, Path())
        return inventories.load(path) if path is not None else None


def chosen_hosts(inventory: Inventory, include: str | None, exclude: str | None) -> Inventory:
    """Some of the hosts; the master stays the master if it is among them."""
    names = {host.name for host in inventory.hosts}
    wanted = set(include.split(",")) if include is not None else names
    unwanted = set(exclude.split(",")) if exclude is not None else set()
    for name in sorted((wanted | unwanted) - names):
        has = ", ".join(sorted(names))
        raise InputError(f"{name!r} is not a host of {inventory.source or 'the list'}, which has {has}")
    left = wanted - unwanted
    hosts = tuple(host for host in inventory.hosts if host.name in left)
    if not hosts:
        raise InputError("--include and --exclude leave no host")
    kept = inventory.master if inventory.master in {host.name for host in hosts} else hosts[0].name
    return replace(inventory, hosts=hosts, master=kept)


def inventory(where: Where, local: bool, world: int | None) -> Inventory:
    """The inventory to launch on: this machine when asked for, or when there is no other."""
    if local and where != Where():
        raise InputError("--local means this machine alone; leave out what names other hosts")
    found = None if local else where.inventory()
    if found is not None:
        return found
    if world is not None and world > MOST_LOCAL_RANKS:
        raise InputError(f"--world {world}: one machine takes at most {MOST_LOCAL_RANKS} ranks")
    slots = world if world and world > 0 else len(os.sched_getaffinity(0))
    here = inventories.this_machine(slots)
    return replace(here, hosts=tuple(with_local_env(host) for host in here.hosts))


@dataclass(frozen=True)
class Restarts:
    """What is to happen after a failure."""

    most: int = 0
    delay: float = 2.0
    min_world: int | None = None

    def check(self, world: int) -> None:
        if self.delay != self.delay:
            raise InputError("--restart-delay nan: write a number of seconds")
        if self.min_world is None:
            return
        if self.min_world > world:
            raise InputError(f"--min-world {self.min_world} is more than the {world} ranks of the run")
        if not self.most:
            raise InputError("--min-world says how a run is started again; add --max-restarts K")


@dataclass(frozen=True)
class Asked:
    """A run as the user wants it."""

    inventory: Inventory
    options: LaunchOptions
    snapshot: Snapshot | None  # of the code, where it has to travel
    rooms: Mapping[str, int] = field(default_factory=dict)  # slots of hosts that must have enough free
    again: str = ""  # by which its hosts know who has announced this start to them, and may be called off


def run(
    hosts: Inventory,
    command: tuple[str, ...],
    *,
    run: str = "",
    world: int | None = None,
    name: str = "",
    master_port: int | None = None,
    prefork: bool = True,
    variables: Mapping[str, str] | None = None,
    env_file: str | None = None,
    i_know: bool = False,
    shared: bool = False,
    restarts: Restarts | None = None,
    pushes: bool = True,
    snapshot: Snapshot | None = None,
) -> Asked:
    """What `launch` and `preflight` are told, checked as far as this machine can. Code that is not going to
    be pushed is not looked at. Of a `run` whose id somebody knows already, with code of which there is a
    `snapshot`, if they are given."""
    from launcher.history import new_run_id

    check_patience()
    placed = place(hosts, world)
    restarts = restarts or Restarts()
    restarts.check(placed[-1][1].stop)
    if not i_know:
        refuse_public(host for host, _ in placed)
    secrets = with_secrets(env_file, variables or {})
    away = not all(host.local for host in hosts.hosts)
    check_command(command, away=away)
    snapshot = (snapshot or code_of(command, env_file or "")) if away and pushes else None
    options = LaunchOptions(
        run=run or new_run_id(),
        promised=bool(run),
        name=run_name(name),
        command=command,
        trainer=TRAINER,
        world=world,
        master_port=master_port,
        prefork=prefork,
        max_restarts=restarts.most,
        restart_delay=restarts.delay,
        min_world=restarts.min_world,
        workdir=folder(),
        code=snapshot.digest if snapshot else "",
        code_files=frozenset(entry.path for entry in snapshot.entries) if snapshot else frozenset(),
        variables=variables or {},
        secrets=secrets,
        env_file=os.path.abspath(env_file) if env_file is not None else "",
        i_know=i_know,
        shared=shared,
    )
    return Asked(hosts, options, snapshot)


def refuse_public(hosts: Iterable[Host]) -> None:
    """As far as that can be seen before any host is asked."""
    for host in hosts:
        if is_public(host.data_address):
            raise InputError(exposed(host.name, host.data_address), fix=EXPOSED_FIX)


def with_secrets(env_file: str | None, variables: Mapping[str, str]) -> dict[str, Hidden]:
    """What the file holds; none of it may be given by --env too."""
    found = read_env_file(env_file) if env_file is not None else {}
    for name in found.keys() & variables.keys():
        raise InputError(f"{name} is given by --env and in {env_file}; leave one")
    return found


def again(options: LaunchOptions) -> LaunchOptions:
    """For another attempt, with the secrets, which nobody has remembered."""
    check_patience()
    secrets = with_secrets(options.env_file or None, options.variables)
    lacking = sorted(options.secrets.keys() - secrets.keys())
    if lacking:
        raise InputError(f"--env-file {options.env_file}: {', '.join(lacking)} is gone; the run had it")
    return replace(options, secrets=secrets)


def check_patience() -> None:
    """What the environment says of it, before anything is started with that."""
    lease_seconds()
    seconds_of("RINGCTL_WATCHDOG", 0.0, 0.0)  # unset, supervisors have their own


def lease_seconds() -> float:
    """How long a supervisor may hear nothing of the others."""
    return seconds_of("RINGCTL_LEASE", LEASE_S, LEAST_LEASE_S)


def seconds_of(variable: str, usual: float, least: float) -> float:
    said = os.environ.get(variable, "")
    try:
        seconds = float(said or usual)
    except ValueError:
        seconds = math.nan
    if not least <= seconds < math.inf:
        raise InputError(f"{variable}={said}: write a number of seconds, {least:g} or more")
    return seconds


def code_of(command: tuple[str, ...], env_file: str = "") -> Snapshot:
    from launcher import push  # which most commands do without

    return push.of_command(command, TRAINER, env_file)


def with_local_env(host: Host) -> Host:
    """On this machine, ranks run in the environment the user is in, unless the inventory says otherwise."""
    return replace(host, env=EnvSpec("python", local_python())) if host.local and host.env is None else host


def with_key(host: Host) -> Host:
    """A key file is where it is, also for whoever watches the run from another folder."""
    if not host.identity_file or host.identity_file.startswith(("~", "/")):
        return host
    return replace(host, identity_file=os.path.abspath(host.identity_file))


def local_python() -> str:
    """The Python of the activated environment; else our own, if it has torch; else the one on PATH."""
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        python = os.path.join(os.environ.get(variable, ""), "bin", "python")
        if os.environ.get(variable) and os.access(python, os.X_OK):
            return python
    if importlib.util.find_spec("torch") is not None:
        return sys.executable
    return shutil.which("python3") or shutil.which("python") or sys.executable


def folder() -> str:
    """Where the user is, and where ranks on this machine run."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise InputError("the folder you are in is gone; change to one that exists") from None


def run_name(name: str) -> str:
    if name and not NAME.fullmatch(name):
        raise InputError(
            f"--name {name!r}: write letters, digits, '.', '_' and '-', beginning with a letter or digit"
        )
    return name


def variables(pairs: Iterable[str]) -> dict[str, str]:
    """NAME=VALUE from the command line."""
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise InputError(f"--env {pair!r}: write NAME=VALUE")
        problem = inventories.variable_problem(name)
        if problem:
            raise InputError(f"--env {pair!r}: {problem}")
        found[name] = value
    return found


def check_command(command: tuple[str, ...], *, away: bool = False) -> None:
    """Refuse a command that cannot start, or trainer options that the trainer would refuse. When `away`, the
    data are looked for on the hosts, not here."""
    if is_trainer(command):
        check_trainer(command, "--check-options" if away else "--check")
        return
    program, *rest = command
    if not program or "\0" in "".join(command):
        raise InputError("the command after -- is empty")
    if os.path.basename(program).startswith("python"):
        script = script_of(rest)
        if script.endswith(".py") and not os.path.isfile(script):
            raise InputError(f"{script}: no such script in {folder()}")
    elif (
        shutil.which(program, path=f"{os.path.dirname(local_python())}:{os.environ.get('PATH', '')}") is None
    ):
        raise InputError(f"{program}: no such command", fix="options for the ring trainer begin with a dash")


def script_of(words: list[str]) -> str:
    """The script that `python WORDS` runs; "" if it runs a module, a string or its stdin."""
    words = list(words)
    while words:
        word = words.pop(0)
        if word in ("-W", "-X"):
            words = words[1:]
        elif not word.startswith("-"):
            return word
        elif word.endswith(("m", "c")):
            return ""
    return ""


def check_trainer(options: tuple[str, ...], how: str) -> None:
    """Let the trainer itself judge its options; it does that without importing torch."""
    if not options:
        return
    argv = [sys.executable, "-S", TRAINER, how, *options]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(
            done.stderr.strip() or f"the trainer refused its options (exit code {done.returncode})"
        )
