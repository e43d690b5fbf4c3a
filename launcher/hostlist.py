"""`-H server1:2,lab@server2` and MPI-style hostfiles -> Inventory, under the same rules as hosts.yaml."""

from __future__ import annotations

import re

from launcher.errors import InputError
from launcher.inventory import Node, build_hosts, shown, wrong
from launcher.model import Inventory

# user@[IPv6]:slots or user@host:slots, where user and slots may be missing
_ENTRY = re.compile(
    r"(?:(?P<user>.*)@)?(?:\[(?P<ipv6>[^][]*)\]|(?P<host>[^][:@]*))(?::(?P<slots>[^:]*))?", re.DOTALL
)
_ENTRY_WANTED = "[user@]host[:slots], with an IPv6 address in brackets: [fe80::1]:2"


def parse_host_list(text: str) -> Inventory:
    """The hosts of `-H host[:slots],...` in order; the first is the master."""
    entries = [entry.strip(" ") for entry in text.split(",")]
    return _inventory([_host(f"-H {shown(entry)}", entry) for entry in entries], "-H")


def parse_hostfile(text: str, source: str) -> Inventory:
    """The hosts of an MPI-style hostfile (`server1 slots=2` or `server1:2`); the first is the master.

    `max_slots` is accepted and has no effect: ringctl never starts more ranks on a host than its slots.
    """
    nodes = []
    # Not splitlines(): it also cuts at form feeds and the like, which no editor counts as lines.
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        if content := line.partition("#")[0].strip(" \t\r"):
            nodes.append(_hostfile_line(f"{source}:{number}", content))
    if not nodes:
        raise InputError(f"{source}:1: the file names no host; write one a line, such as 'server1 slots=2'")
    return _inventory(nodes, source)


def _inventory(nodes: list[Node], source: str) -> Inventory:
    hosts = build_hosts((("", node) for node in nodes), defaults={})
    return Inventory(hosts=hosts, master=hosts[0].name, source=source)


def _hostfile_line(where: str, content: str) -> Node:
    entry, *options = re.split(r"[ \t]+", re.sub(r"[ \t]*=[ \t]*", "=", content))
    node = _host(where, entry)
    given = [key.text for key in node.children[::2]]
    for option in options:
        key, _, value = option.partition("=")
        if key not in ("slots", "max_slots", "max-slots") or not re.fullmatch("[0-9]+", value):
            raise wrong(node, "", f"found {shown(option)}; write slots=NUMBER or max_slots=NUMBER")
        if key in given:
            raise wrong(node, key, f"given twice; write 'HOST {key}=NUMBER' once")
        given.append(key)
        if key == "slots":
            node.children.extend(_pair(where, key, value))
    return node


def _host(where: str, entry: str) -> Node:
    """The host `entry` as the mapping that hosts.yaml would have."""
    found = _ENTRY.fullmatch(entry)
    if not entry or not found:
        raise InputError(f"{where}: not a host; write {_ENTRY_WANTED}")
    node = Node(where, "a mapping", children=_pair(where, "name", found["ipv6"] or found["host"] or ""))
    for key in ("user", "slots"):
        if found[key] is not None:
            node.children.extend(_pair(where, key, found[key]))
    return node


def _pair(where: str, key: str, value: str) -> list[Node]:
    numeric = key == "slots" and re.fullmatch("-?[0-9]+", value)
    return [Node(where, "text", key), Node(where, "a whole number" if numeric else "text", value)]
