"""Pure: what preflight found -> what ringctl can put right by itself, each said before it is done.

Only what cannot harm: nothing here touches host keys, firewalls, or processes of other people.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from launcher import yamltext
from launcher.model import CheckResult, Facts, Host, Inventory
from launcher.preflight import fixes
from launcher.preflight import network_checks as net
from launcher.preflight.examine import Examined
from launcher.preflight.survey import Need
from launcher.preflight.view import View, views_of
from launcher.remote import grouped
from launcher.text import count
from launcher.yamltext import Edit

Kind = Literal["run", "inventory", "environment", "code", "data", "names"]

OWN_NAME = ("loopback_name", "multihomed")
ALIASES = ("alias_missing", "alias_elsewhere")
ENVIRONMENT = ("env_missing", "env_broken", "torch", "torchvision")
PORT = ("port_used", "port_ephemeral")
BY_HAND = (*OWN_NAME, *ALIASES, "firewall")  # what only somebody with root's rights can do
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
SYSTEM_NAME = re.compile(r"localhost\b|ip6-")  # these must go on meaning what they do


@dataclass(frozen=True)
class Means:
    """What there is to mend with."""

    inventory: Inventory
    text: str = ""  # of the inventory's file; "" where the hosts came from the command line
    port_given: bool = False  # on the command line, which is not ours to change
    environment: str = ""  # the name in the environment.yaml of this folder
    data: str = ""  # the folder that ranks will be told
    data_whole: bool = False  # and whether it is on this machine too, whole
    runs: frozenset[str] = frozenset()  # started from here
    sudo: frozenset[str] = frozenset()  # hosts where it asks for no password


@dataclass(frozen=True)
class Action:
    """One thing to do."""

    kind: Kind
    hosts: tuple[str, ...]
    sentence: str
    alone: bool = False  # takes a yes of its own
    run: str = ""
    edits: tuple[Edit, ...] = ()
    names: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # by host: what names are to mean


def actions(examined: Examined, means: Means) -> list[Action]:
    """All that can be done, in the order in which it is done."""
    return [
        *stop_run(examined, means),
        *change_inventory(examined, means),
        *environment(examined, means),
        *push_code(examined),
        *copy_data(examined, means),
        *name_hosts(examined, means),
    ]


def remarks(examined: Examined, names: Collection[str]) -> list[CheckResult]:
    """What these checks found fault with, on hosts that were reached."""
    return [
        result
        for result in examined.results
        if result.name in names and result.status in ("fail", "warn") and result.host in examined.survey.facts
    ]


def host_of(examined: Examined, name: str) -> Host:
    return next(host for host in examined.hosts if host.name == name)


def in_order(examined: Examined, names: Iterable[str]) -> tuple[str, ...]:
    wanted = set(names)
    return tuple(host.name for host in examined.hosts if host.name in wanted)


# --- The master port -----------------------------------------------------------------------------


def run_on_port(examined: Examined, means: Means) -> tuple[Facts, str, bool] | None:
    """(the master's host, the run of ours that has its port, whether that still goes on); None if there is
    no such run, or it goes on and was not started from here."""
    for result in remarks(examined, ["port_used"]):
        facts = examined.survey.facts[result.host]
        run = facts.port.run if facts.port else ""
        going_on = any(run in its.runs for its in examined.survey.facts.values())
        if run and (run in means.runs or not going_on):
            return facts, run, going_on
    return None


def stop_run(examined: Examined, means: Means) -> Iterator[Action]:
    found = run_on_port(examined, means)
    if found and found[0].port:
        facts, run, going_on = found
        what = "which is still going on and" if going_on else "which is over, but of which a process"
        sentence = f"stop run {run}, {what} has port {found[0].port.port} of {facts.host}"
        yield Action("run", (facts.host,), sentence, alone=going_on, run=run)


# --- The inventory -------------------------------------------------------------------------------


def change_inventory(examined: Examined, means: Means) -> Iterator[Action]:
    """All changes of the file at once, so that what is kept beside it is the file as it was."""
    changes = [*other_port(examined, means), *interfaces(examined, means)] if means.text else []
    if changes:
        words = "; ".join(sentence for sentence, _ in changes)
        sentence = f"write into {means.inventory.source}: {words}"
        yield Action("inventory", (), sentence, edits=tuple(edit for _, edit in changes))


def other_port(examined: Examined, means: Means) -> Iterator[tuple[str, Edit]]:
    wrong = remarks(examined, PORT)
    if run_on_port(examined, means):
        wrong = [result for result in wrong if result.name != "port_used"]
    edit = yamltext.top_edit(means.text, "master_port", "auto")
    if wrong and edit is not None and not means.port_given:
        yield f"master_port: auto, instead of {means.inventory.master_port}", edit


def interfaces(examined: Examined, means: Means) -> Iterator[tuple[str, Edit]]:
    for result in remarks(examined, ["ifname"]):
        right = usable_interface(examined.survey.facts[result.host])
        edit = yamltext.host_edit(means.text, result.host, "ifname", right)
        if right and edit is not None:
            was = host_of(examined, result.host).ifname
            yield f"ifname: {right} for {result.host}, instead of {was}", edit


def usable_interface(facts: Facts) -> str:
    """The one towards the other hosts; of a host that has none to reach, the first with an address."""
    if facts.routes:
        return next((name for name in facts.routes.values() if name), "")
    own = [each.name for each in facts.interfaces if each.up and each.address and each.name != "lo"]
    return own[0] if own else ""


# --- Environment, code and data ------------------------------------------------------------------


def environment(examined: Examined, means: Means) -> Iterator[Action]:
    hosts = []
    for result in remarks(examined, ENVIRONMENT):
        made = fixes.is_made(host_of(examined, result.host), means.environment)
        if made and result.fix.startswith("ringctl env create "):
            hosts.append(result.host)
    if hosts:
        where = in_order(examined, hosts)
        sentence = f"create the environment {means.environment} of environment.yaml on {grouped(where)}"
        yield Action("environment", where, sentence)


def push_code(examined: Examined) -> Iterator[Action]:
    lacking = {name: lacks for name, lacks in examined.survey.lacking.items() if not lacks["have"]}
    if lacking:
        where = in_order(examined, lacking)
        files = count(max(len(lacks["missing"]) for lacks in lacking.values()), "file")
        yield Action("code", where, f"push the code ({files}) to {grouped(where)}")


def copy_data(examined: Examined, means: Means) -> Iterator[Action]:
    """Only where it is missing or damaged: data that are whole but others are somebody's."""
    portable = means.data.startswith(("/", "~/"))  # a relative folder is another one on each host
    hosts = [
        result.host
        for result in remarks(examined, ["dataset"])
        if is_damaged(examined.survey.facts[result.host]) and not host_of(examined, result.host).local
    ]
    if hosts and means.data_whole and portable:
        where = in_order(examined, hosts)
        yield Action("data", where, f"copy the dataset {means.data} from this machine to {grouped(where)}")


def is_damaged(facts: Facts) -> bool:
    return any(not name or words[:1] == "!" for name, words in facts.data.items())


# --- Names ---------------------------------------------------------------------------------------


def wrong_names(examined: Examined) -> dict[str, dict[str, str]]:
    """By host: names that mean nothing or something else there, and what they should mean."""
    found: dict[str, dict[str, str]] = {}
    views = views_of(examined.hosts, Need(), examined.survey)
    for result in remarks(examined, (*OWN_NAME, *ALIASES)):
        view = views[result.host]
        own = {view.facts.hostname: view.address}
        names = own if result.name in OWN_NAME else misunderstood(view, result.name)
        found.setdefault(result.host, {}).update(
            {name: address for name, address in names.items() if can_be_named(name, address)}
        )
    return {host: names for host, names in found.items() if names}


def misunderstood(view: View, check: str) -> dict[str, str]:
    """What the other hosts' names should mean, as far as this check finds fault with them."""
    wrong = {"alias_missing": net.unknown, "alias_elsewhere": net.led_elsewhere}[check](view)
    return {peer.host.name: peer.address for peer in wrong}


def can_be_named(name: str, address: str) -> bool:
    try:
        loopback = ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
    return bool(NAME.fullmatch(name)) and not SYSTEM_NAME.match(name) and not loopback


def name_hosts(examined: Examined, means: Means) -> Iterator[Action]:
    wrong = wrong_names(examined)
    names = {host: its for host, its in wrong.items() if host in means.sudo}
    for host in in_order(examined, names):
        lines = ", ".join(f"{address} {name}" for name, address in names[host].items())
        sentence = f"put into /etc/hosts of {host}, with sudo: {lines}"
        yield Action("names", (host,), sentence, alone=True, names={host: names[host]})


def etc_hosts(text: str, names: Mapping[str, str]) -> str:
    """/etc/hosts in which these names mean these addresses and nothing else; the rest stays as it is."""
    lines = []
    for line in text.splitlines():
        words, hash_, comment = line.partition("#")
        kept = [word for word in words.split()[1:] if word not in names]
        if len(kept) == len(words.split()[1:]):
            lines.append(line)
        elif kept:
            lines.append(" ".join([words.split()[0], *kept]) + (f"  {hash_}{comment}" if hash_ else ""))
    lines += [f"{address} {name}" for name, address in names.items()]
    return "\n".join(lines) + "\n"


def by_hand(examined: Examined, todo: Iterable[Action]) -> list[str]:
    """Lines to paste on the hosts where ringctl may not, or will not, do it."""
    mended = {action.hosts[0] for action in todo if action.kind == "names"}
    lines = [
        f"on {result.host}: {line}"
        for result in remarks(examined, BY_HAND)
        if result.name == "firewall" or result.host not in mended
        for line in result.fix.splitlines()
    ]
    return list(dict.fromkeys(lines))
