"""hosts.yaml -> Inventory: every complaint names the file, the line, the key and what to write instead.

The file becomes a tree of `Node`s, each with its line; a table of checks, one a key, turns the tree into
records. Nothing in the file is ever constructed or run: tags are refused, and so are aliases, with which a
few lines could stand for millions.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from launcher.errors import InputError
from launcher.model import EnvSpec, Host, Inventory

MAX_BYTES = 4 * 1024 * 1024  # 10,000 hosts with all their keys take less
MAX_NODES = 500_000
MAX_DEPTH = 16  # a valid file needs five; YAML scanners slow down with the square of it
MAX_SLOTS = 1024

# --- Finding and reading the file ----------------------------------------------------------------


def find(option: str | None, environ: Mapping[str, str], cwd: Path) -> Path | None:
    """The inventory to use, or None for this machine alone; InputError if the one named is missing."""
    for origin, named in (("--hosts", option), ("$RINGCTL_HOSTS", environ.get("RINGCTL_HOSTS") or None)):
        if named is not None:
            path = cwd / named
            if not os.path.lexists(path):
                raise InputError(f"{named}: no such file; {origin} must name an inventory that exists")
            return path
    config = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME") or "~", ".config")
    usual = (cwd / "hosts.yaml", Path(os.path.expanduser(config), "ringctl", "hosts.yaml"))
    # A dangling link counts as there: it is an error to report, not a reason to train on this machine alone.
    return next((path for path in usual if os.path.lexists(path)), None)


def load(path: Path) -> Inventory:
    """The inventory in the file `path`."""
    return parse(read(path), str(path))


def read(path: Path) -> str:
    """The text of an inventory or hostfile; InputError if it is not a readable UTF-8 file of sane size."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise InputError(f"{path}: larger than {MAX_BYTES:,} bytes; that is not a list of hosts")
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}:{line}: not valid UTF-8; save the file as UTF-8 text") from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a folder; name the inventory file in it") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None


def this_machine(slots: int) -> Inventory:
    """The inventory of those who have none: this machine, without SSH."""
    return Inventory(hosts=(Host(name="localhost", local=True, slots=slots),), master="localhost")


def parse(text: str, source: str) -> Inventory:
    """The inventory that `text` describes; complaints begin with `source` and the line."""
    root = _tree(text, source)
    top = {key: value for key, (_, value) in _entries(root, "", _TOP_KEYS).items()}
    if "hosts" not in top:
        raise wrong(root, "hosts", f"missing; write {_HOSTS_WANTED}")
    defaults = _fields(top["defaults"], "defaults", _DEFAULT_KEYS) if "defaults" in top else {}
    entries = top["hosts"].children
    if top["hosts"].kind != "a list" or not entries:
        found = "an empty list" if top["hosts"].kind == "a list" else described(top["hosts"])
        raise wrong(top["hosts"], "hosts", f"found {found}; write {_HOSTS_WANTED}")
    hosts = build_hosts(((f"hosts[{i}]", entry) for i, entry in enumerate(entries)), defaults)
    return Inventory(
        hosts=hosts,
        master=_master(top["master"], hosts) if "master" in top else hosts[0].name,
        master_port=_master_port(top["master_port"]) if "master_port" in top else None,
        source=source,
    )


# --- The tree: what is written where -------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """A piece of the input: where it stands, what it is in words, and its text or its parts in order."""

    where: str  # "hosts.yaml:7"
    kind: str  # "a list", "a mapping" or one of _SCALARS' values
    text: str = ""
    children: list[Node] = field(default_factory=list)  # of a mapping: key, value, key, value...


_SCALARS = {
    "tag:yaml.org,2002:str": "text",
    "tag:yaml.org,2002:int": "a whole number",
    "tag:yaml.org,2002:float": "a number",
    "tag:yaml.org,2002:bool": "true or false",
    "tag:yaml.org,2002:timestamp": "a date",
    "tag:yaml.org,2002:null": "nothing",
}
_UNPRINTABLE = re.compile("[^\t\n\r -~\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _tree(text: str, source: str) -> Node:
    import yaml  # here, so that commands that read no inventory do not pay for it

    if len(text) > MAX_BYTES:
        raise InputError(f"{source}: larger than {MAX_BYTES:,} characters; that is not a list of hosts")
    if bad := _UNPRINTABLE.search(text):
        line = text.count("\n", 0, bad.start()) + 1
        raise InputError(f"{source}:{line}: found the control character {bad[0]!a}; remove it")
    resolver: Any = yaml.resolver.Resolver()  # its stub leaves `resolve` untyped
    builder = _TreeBuilder(
        source, lambda scalar: resolver.resolve(yaml.ScalarNode, scalar.value, scalar.implicit)
    )
    try:
        for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            builder.add(event)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}" if mark else builder.where
        hint = "indent with spaces, and put text with special characters in quotes"
        raise InputError(f"{where}: not valid YAML: {error.problem or error.context}; {hint}") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # escapes for characters that do not exist
        raise InputError(f"{builder.where}: not valid YAML: {' '.join(str(error).split())}") from None
    if not builder.roots or builder.roots[0].kind == "nothing":
        raise InputError(f"{source}:1: hosts: the file is empty; write {_HOSTS_WANTED}")
    return builder.roots[0]


class _TreeBuilder:
    """Puts PyYAML's events together, refusing what could run code or grow beyond what is written."""

    def __init__(self, source: str, resolve: Callable[[Any], str]) -> None:
        self.source = source
        self.where = f"{source}:1"
        self.roots: list[Node] = []  # one a document
        self._open: list[list[Node]] = [self.roots]
        self._resolve = resolve  # which tag PyYAML would give an untagged scalar
        self._count = 0

    def add(self, event: Any) -> None:
        name = type(event).__name__
        self.where = f"{self.source}:{event.start_mark.line + 1}"
        if getattr(event, "tag", None):
            raise InputError(f"{self.where}: found the tag {shown(event.tag)}; write the value without a tag")
        if name == "AliasEvent":
            hint = "write the value itself, or write what hosts share under 'defaults'"
            raise InputError(f"{self.where}: found the alias {shown('*' + event.anchor)}; {hint}")
        if name == "DocumentStartEvent" and self.roots:
            raise InputError(f"{self.where}: a second document begins here; write all hosts in one")
        if name in ("SequenceEndEvent", "MappingEndEvent"):
            self._open.pop()
        elif name in ("ScalarEvent", "SequenceStartEvent", "MappingStartEvent"):
            self._attach(event, name)

    def _attach(self, event: Any, name: str) -> None:
        if name == "ScalarEvent":
            kind = _SCALARS.get(self._resolve(event), "text")
            self._open[-1].append(Node(self.where, kind, event.value))
        else:
            node = Node(self.where, "a list" if name == "SequenceStartEvent" else "a mapping")
            self._open[-1].append(node)
            self._open.append(node.children)
        self._count += 1
        if self._count > MAX_NODES or len(self._open) > MAX_DEPTH:
            limits = f"{MAX_NODES:,} values or {MAX_DEPTH} levels"
            raise InputError(f"{self.where}: more than {limits}; that is not a list of hosts")


# --- Complaints ----------------------------------------------------------------------------------


def wrong(node: Node, path: str, problem: str) -> InputError:
    """The complaint about the key `path`, which stands at `node`."""
    return InputError(f"{node.where}: {path}: {problem}" if path else f"{node.where}: {problem}")


def shown(text: str) -> str:
    """`text` in quotes, on one line and of bounded length."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


def described(node: Node) -> str:
    """What was found, for a complaint."""
    if node.kind == "text":
        return shown(node.text)
    return node.kind if node.kind in ("nothing", "a list", "a mapping") else node.text[:60]


def _suggestion(text: str, known: Collection[str], what: str) -> str:
    folded = {name.lower(): name for name in known}
    if close := difflib.get_close_matches(text[:100].lower(), folded, n=1):
        return f"did you mean {folded[close[0]]!r}?"
    some = ", ".join(list(known)[:20]) + (", ..." if len(known) > 20 else "")
    return f"{what}: {some}"


def _join(path: str, key: str) -> str:
    key = key if re.fullmatch(r"[\w.-]{1,60}", key) else shown(key)
    return f"{path}.{key}" if path else key


# --- Mappings ------------------------------------------------------------------------------------

Check = Callable[[Node, str], Any]  # (what was found, its key) -> the value, or InputError


def _pairs(node: Node, path: str) -> dict[str, tuple[Node, Node]]:
    if node.kind != "a mapping":
        raise wrong(node, path, f"found {described(node)}; write 'key: value' lines")
    pairs: dict[str, tuple[Node, Node]] = {}
    for key, value in zip(node.children[::2], node.children[1::2], strict=True):
        text = _string(key, path, "a key that is plain text")
        if text in pairs:
            first = pairs[text][0].where
            raise wrong(key, _join(path, text), f"duplicate key, already at {first}; keep one of the two")
        pairs[text] = (key, value)
    return pairs


def _entries(node: Node, path: str, known: Collection[str]) -> dict[str, tuple[Node, Node]]:
    pairs = _pairs(node, path)
    for text, (key, _) in pairs.items():
        if text in known:
            continue
        if text == "<<":
            raise wrong(key, _join(path, text), "unknown key; write what hosts share under 'defaults'")
        if text in _HOST_KEYS and path == "defaults":
            raise wrong(key, _join(path, text), "belongs to one host; write it under 'hosts'")
        raise wrong(key, _join(path, text), f"unknown key; {_suggestion(text, known, 'the keys here are')}")
    return pairs


def _fields(node: Node, path: str, checks: Mapping[str, Check]) -> dict[str, Any]:
    entries = _entries(node, path, checks)
    return {key: checks[key](value, _join(path, key)) for key, (_, value) in entries.items()}


# --- Single values -------------------------------------------------------------------------------


def _string(node: Node, path: str, wanted: str) -> str:
    if node.kind == "text":
        return node.text
    if node.kind in ("nothing", "a list", "a mapping"):
        raise wrong(node, path, f"found {described(node)}; write {wanted}")
    found = described(node)
    raise wrong(node, path, f'found {found}, which YAML reads as {node.kind}; write it in quotes: "{found}"')


def _text(allowed: Callable[[str], object], wanted: str) -> Check:
    def check(node: Node, path: str) -> str:
        text = _string(node, path, wanted)
        if not allowed(text):
            raise wrong(node, path, f"found {shown(text)}; write {wanted}")
        return text

    return check


def _matching(pattern: str, wanted: str) -> Check:
    return _text(re.compile(pattern).fullmatch, wanted)


def _whole(low: int, high: int, instead: str = "") -> Check:
    wanted = f"{instead}a whole number from {low} to {high}"

    def check(node: Node, path: str) -> int:
        # Only plain decimals: YAML 1.1 would read 022 as 18 and 1:30 as 90.
        number = int(node.text) if re.fullmatch(r"0|-?[1-9][0-9]{0,8}", node.text) else low - 1
        if not low <= number <= high:
            raise wrong(node, path, f"found {described(node)}; write {wanted}")
        if node.kind != "a whole number":
            raise wrong(node, path, f"found the text {shown(node.text)}; write {number} without quotes")
        return number

    return check


def _flag(node: Node, path: str) -> bool:
    word = node.text.lower()
    if node.kind != "true or false" or word not in ("true", "yes", "on", "false", "no", "off"):
        raise wrong(node, path, f"found {described(node)}; write true or false")
    return word in ("true", "yes", "on")


# A name is also what SSH is given where there is no address, so both follow the same rule: characters that
# mean nothing to a shell or to ssh's options. User and port are kept out: they have their own keys.
_LABEL = "[A-Za-z0-9_][A-Za-z0-9_-]{0,62}"
_DNS_NAME = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*\.?")
_NUMERIC = re.compile(r"[0-9]+(\.[0-9]+)+|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9_.-]+)?")


def _is_host(text: str) -> bool:
    if not _NUMERIC.fullmatch(text):
        return _DNS_NAME.fullmatch(text) is not None
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


_NAME_WANTED = "a name of letters, digits, '-', '_' and '.' that begins with no dash, or an IP address"
_name = _text(_is_host, _NAME_WANTED)
_address = _text(_is_host, "an IPv4 or IPv6 address or a DNS name; user and port have keys of their own")
# '@' for directory accounts (first.last@corp). DOMAIN\user is refused, for the backslash means something to
# shells; such an account goes into ~/.ssh/config.
_user = _matching(
    r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,63}", "letters, digits, '.', '_', '-' and '@', no dash first"
)
_ifname = _matching(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,14}", "an interface as `ip link` shows it, such as eth0")
_CONTROL = r"\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff"
_line = _matching(rf"[^\s{_CONTROL}-][^{_CONTROL}]*", "one line of text that begins with no dash or space")
_host_key = _matching(  # the comment behind it is as long as it likes, and means nothing
    rf"[a-z0-9][a-z0-9@.-]* [A-Za-z0-9+/]+={{0,2}}( [^{_CONTROL}]*)?",
    "TYPE BASE64, such as 'ssh-ed25519 AAAAC3Nz...'",
)


def _env(node: Node, path: str) -> EnvSpec:
    wanted = "exactly one of {conda: NAME}, {venv: PATH} and {python: PATH}"
    kinds: tuple[Literal["conda", "venv", "python"], ...] = ("conda", "venv", "python")
    if node.kind != "a mapping":
        raise wrong(node, path, f"found {described(node)}; write {wanted}")
    fields = _fields(node, path, dict.fromkeys(kinds, _line))
    if len(fields) != 1:
        raise wrong(node, path, f"found {' and '.join(fields) or 'an empty mapping'}; write {wanted}")
    return next(EnvSpec(kind, fields[kind]) for kind in kinds if kind in fields)


# --- A rank's extra environment ------------------------------------------------------------------

# OMP_NUM_THREADS is not here: ringctl only proposes a value.
_RESERVED = {
    "RANK": "ringctl numbers the ranks; leave it out",
    "LOCAL_RANK": "ringctl numbers the ranks; leave it out",
    "WORLD_SIZE": "ringctl sets it; use the option --world",
    "LOCAL_WORLD_SIZE": "ringctl sets it; use 'slots'",
    "MASTER_ADDR": "ringctl sets it; use 'master' and 'data_address'",
    "MASTER_PORT": "ringctl sets it; use 'master_port'",
    "GLOO_SOCKET_IFNAME": "ringctl sets it; use 'ifname'",
    "TP_SOCKET_IFNAME": "ringctl sets it; use 'ifname'",
    "PYTHONUNBUFFERED": "ringctl sets it, for lines to arrive at once; leave it out",
}
_value = _matching(r"[^\x00\ud800-\udfff]*", "text without NUL")


def variable_problem(name: str) -> str:
    """Why a rank's environment cannot have a variable of this name; "" if it can."""
    if not re.fullmatch(r"[^=\x00\ud800-\udfff]+", name):
        return "write a name that has no '=' and no NUL"
    if name.startswith("RINGCTL_"):
        return "reserved: names that begin so are ringctl's own; choose another"
    if name.startswith(("TORCHELASTIC_", "GROUP_", "ROLE_", "PET_")):
        return "reserved: ringctl removes torchrun's own variables; choose another"
    return f"reserved: {_RESERVED[name]}" if name in _RESERVED else ""


def _variables(node: Node, path: str) -> dict[str, str]:
    variables = {}
    for name, (key, value) in _pairs(node, path).items():
        if problem := variable_problem(name):
            raise wrong(key, path, f"the name {shown(name)}: {problem}")
        variables[name] = _value(value, _join(path, name))
    return variables


# --- The schema ----------------------------------------------------------------------------------

_HOST_KEYS: dict[str, Check] = {
    "name": _name,
    "address": _address,
    "user": _user,
    "port": _whole(1, 65535),
    "slots": _whole(1, MAX_SLOTS),
    "ifname": _ifname,
    "data_address": _address,
    "env": _env,
    "workdir": _line,
    "variables": _variables,
    "identity_file": _line,
    "host_key": _host_key,
    "python": _line,
    "local": _flag,
}
_OF_ONE_HOST = {"name", "address", "data_address", "host_key", "local"}
_DEFAULT_KEYS = {key: check for key, check in _HOST_KEYS.items() if key not in _OF_ONE_HOST}
_TOP_KEYS = ("master", "master_port", "defaults", "hosts")
_HOSTS_WANTED = "a list, one '- {name: server1, address: 192.168.0.1}' a host"


def build_hosts(entries: Iterable[tuple[str, Node]], defaults: Mapping[str, Any]) -> tuple[Host, ...]:
    """The hosts in `entries`, each a key path and what stands there; a name may occur once."""
    hosts: list[Host] = []
    seen: dict[str, str] = {}
    for path, node in entries:
        host = _host(node, path, defaults)
        if host.name in seen:
            found = f"duplicate host {host.name!r}, already at {seen[host.name]}"
            raise wrong(node, _join(path, "name"), f"{found}; write it once, with 'slots'")
        seen[host.name] = node.where
        hosts.append(host)
    return tuple(hosts)


def _host(node: Node, path: str, defaults: Mapping[str, Any]) -> Host:
    own = _fields(node, path, _HOST_KEYS) if node.kind == "a mapping" else {"name": _name(node, path)}
    if "name" not in own:
        raise wrong(node, _join(path, "name"), f"missing; write {_NAME_WANTED}")
    if not own.get("local"):
        own.setdefault("address", own["name"])
    variables = {**defaults.get("variables", {}), **own.get("variables", {})}
    return Host(**{**defaults, **own, "variables": variables})


def _master(node: Node, hosts: tuple[Host, ...]) -> str:
    name = _string(node, "master", "the name of one of the hosts")
    names = [host.name for host in hosts]
    if name not in names:
        hint = _suggestion(name, names, "the hosts are")
        raise wrong(node, "master", f"no host is named {shown(name)}; {hint}")
    return name


def _master_port(node: Node) -> int | None:
    if (node.kind, node.text) == ("text", "auto"):
        return None
    return int(_whole(1, 65535, instead="auto or ")(node, "master_port"))
