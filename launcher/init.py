"""Pure: the hosts that `ringctl init` is told of, and the commented hosts.yaml that it writes of them."""

from __future__ import annotations

import fnmatch
import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from launcher.errors import InputError
from launcher.logs import visible
from launcher.model import EnvSpec, Facts, Host
from launcher.preflight.fixes import size
from launcher.text import count
from launcher.yamltext import scalar

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
NOT_A_HOST = re.compile(r"localhost\b|ip6-|broadcasthost$")
COLUMN = 38  # where comments begin


# --- Where names come from -----------------------------------------------------------------------


def of_etc_hosts(text: str, names: str) -> list[str]:
    """Aliases of an /etc/hosts: those named, else the first of every address that is another machine's."""
    lines = [line.partition("#")[0].split() for line in text.splitlines()]
    known = [(words[0], words[1:]) for words in lines if len(words) > 1]
    if names:
        wanted = [name.strip() for name in names.split(",") if name.strip()]
        aliases = {alias for _, its in known for alias in its}
        for name in wanted:
            if name not in aliases:
                raise InputError(f"--etc-hosts {name}: /etc/hosts has no such alias")
        return list(dict.fromkeys(wanted))
    first: dict[str, str] = {}
    for address, its in known:
        hosts = [alias for alias in its if NAME.fullmatch(alias) and not NOT_A_HOST.match(alias)]
        if hosts and is_a_machine(address):
            first.setdefault(address, hosts[0])
    if not first:
        raise InputError("--etc-hosts: /etc/hosts names no other machine")
    return list(dict.fromkeys(first.values()))


def is_a_machine(address: str) -> bool:
    try:
        about = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return not (about.is_loopback or about.is_multicast or about.is_unspecified or about.is_reserved)


def of_ssh_config(words: Iterable[str], pattern: str) -> list[str]:
    """Of what an SSH configuration has behind Host, the names that are no patterns, in its order."""
    found = list(dict.fromkeys(word for word in words if NAME.fullmatch(word)))
    patterns = [each.strip() for each in pattern.split(",") if each.strip()] or ["*"]
    chosen = [name for name in found if any(fnmatch.fnmatchcase(name, each) for each in patterns)]
    if not chosen:
        has = f"it has {', '.join(found)}" if found else "it has none"
        raise InputError(f"--ssh-config {pattern}".rstrip() + ": ~/.ssh/config has no such Host", fix=has)
    return chosen


# --- What was found ------------------------------------------------------------------------------


@dataclass(frozen=True)
class FoundEnv:
    """An environment on a host, and what it has."""

    env: EnvSpec
    python: str = ""
    packages: Mapping[str, str | None] = field(default_factory=dict)

    def version(self, package: str) -> str:
        """Without what says how it was built: 2.13.0+cpu is 2.13.0."""
        return (self.packages.get(package) or "").partition("+")[0]

    @property
    def about(self) -> str:
        has = [f"{name} {self.version(name)}" for name in ("torch", "torchvision") if self.version(name)]
        return ", ".join([f"Python {self.python}", *has])


@dataclass(frozen=True)
class Met:
    """A host as it was given, and what it said, or why it said nothing."""

    host: Host
    facts: Facts | None = None
    envs: tuple[FoundEnv, ...] = ()
    no_search: str = ""  # why its environments could not be looked for
    problem: str = ""
    unknown_key: bool = False  # that is the problem: nobody has trusted it yet


def chosen_envs(met: Sequence[Met]) -> dict[str, FoundEnv]:
    """For each host the environment to run in: one with torch, the same everywhere if there is one."""
    able = {each.host.name: usable(each.envs) for each in met if each.facts is not None}
    for first in next(iter(able.values()), []):
        same = {host: twin_of(first, envs) for host, envs in able.items()}
        if all(same.values()):
            return {host: found for host, found in same.items() if found is not None}
    return {host: envs[0] for host, envs in able.items() if envs}


def usable(envs: Iterable[FoundEnv]) -> list[FoundEnv]:
    """Those with torch that can be written down, first those that the built-in trainer can do with."""
    able = [found for found in envs if found.version("torch") and is_writable(found.env.value)]
    return sorted(able, key=lambda found: not found.version("torchvision"))


def is_writable(value: str) -> bool:
    """Whether an inventory takes it as the name or path of an environment."""
    return value.isprintable() and re.match(r"[^\s-]", value) is not None


def twin_of(one: FoundEnv, among: Iterable[FoundEnv]) -> FoundEnv | None:
    alike = (found for found in among if found.env == one.env)
    return next((found for found in alike if found.version("torch") == one.version("torch")), None)


# --- The file ------------------------------------------------------------------------------------


def inventory_text(met: Sequence[Met]) -> str:
    """The whole file. It loads as it is, whatever the hosts said."""
    envs = chosen_envs(met)
    reached = {each.host.name for each in met if each.facts is not None}
    shared = bool(envs) and set(envs) == reached and len({its.env for its in envs.values()}) == 1
    lines = [
        "# The servers of a ring, as `ringctl init` found them. Change what you like: hosts.example.yaml has",
        "# every key. `ringctl preflight` proves them, `ringctl launch` starts a run on every slot.",
        "",
        line(f"master: {scalar(met[0].host.name)}", "the host that holds rank 0"),
        line("master_port: auto", "a port that is free on the master; or a number such as 23456"),
        "",
        *default_lines(next(iter(envs.values())) if shared else None),
        "hosts:",
    ]
    for each in met:
        own = None if shared else envs.get(each.host.name)
        lines += [*host_lines(each, own, show_env=not shared), ""]
    return "\n".join(lines[:-1]) + "\n"


def line(text: str, comment: str = "") -> str:
    return f"{text.ljust(COLUMN - 2)}  # {quiet(comment)}" if comment else text


def quiet(text: str) -> str:
    """What a host said, as part of a comment: on one line, and nothing that a terminal or YAML would obey."""
    return " ".join(visible(text).split()).encode("ascii", "backslashreplace").decode()


def default_lines(found: FoundEnv | None) -> list[str]:
    if found is None:
        return []
    return ["defaults:", line(f"  env: {env_text(found.env)}", found.about), ""]


def env_text(env: EnvSpec) -> str:
    return f"{{{env.kind}: {scalar(env.value)}}}"


def host_lines(met: Met, env: FoundEnv | None, *, show_env: bool) -> list[str]:
    host, facts = met.host, met.facts
    lines = [f"  # not reached: {quiet(met.problem)}"] if met.problem else []
    lines.append(f"  - name: {scalar(host.name)}")
    if host.address != host.name:
        lines.append(line(f"    address: {scalar(host.address)}", "where SSH goes"))
    if host.user:
        lines.append(f"    user: {scalar(host.user)}")
    elif facts and facts.user:
        lines.append(line(f"    # user: {quiet(facts.user)}", "as SSH has it by itself"))
    lines.append(line(f"    slots: {host.slots}", slots_comment(facts)))
    if facts:
        lines += way_lines(facts)
    if facts and env is not None:
        lines.append(line(f"    env: {env_text(env.env)}", env.about))
    elif facts and show_env:
        why = met.no_search or "no environment with torch was found"
        lines.append(line("    # env: {conda: NAME}", f"{why}; name one, or make one: ringctl env create"))
    return lines


def slots_comment(facts: Facts | None) -> str:
    if facts is None:
        return "how many ranks it takes"
    has = [count(facts.cores, "core")]
    has += [f"{size(facts.memory)} of memory free"] if facts.memory >= 0 else []
    has += [count(facts.gpus, "GPU")] if facts.gpus else []
    return f"how many ranks it takes; it has {', '.join(has)}"


def way_lines(facts: Facts) -> list[str]:
    """Where gradients go. The interface follows from the address, so it is only shown."""
    if not is_a_machine(facts.data_address):
        return []
    address = scalar(facts.data_address)
    lines = [line(f"    data_address: {address}", "where gradients go; left out, it is found by itself")]
    found = "found by itself, from the route to the others"
    return [*lines, line(f"    # ifname: {quiet(facts.ifname)}", found)]
