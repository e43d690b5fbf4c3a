"""The user's SSH configuration, read as ssh reads it: the first value counts, whoever it comes from."""

from __future__ import annotations

import getpass
import os
import re
import socket
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from launcher.transport.sshlines import Line as Line  # for whoever reads `SshConfig.files`
from launcher.transport.sshlines import any_fits, parsed

FILES = ("~/.ssh/config", "/etc/ssh/ssh_config")  # what an earlier one says counts
NOT_OURS = ("localnetwork", "version", "sessiontype", "command")  # criteria of newer ones: taken for false
KNOWN_HOSTS = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")
SHARED_KNOWN_HOSTS = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")
SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


@dataclass(frozen=True)
class Target:
    """How to reach one server."""

    name: str  # as it was asked for
    host: str  # where that is
    user: str
    port: int
    identity_files: tuple[str, ...]
    identities_only: bool
    known_as: str  # in known_hosts
    known_hosts: tuple[str, ...]  # the user's own files, the one to write to first; none is possible
    shared_known_hosts: tuple[str, ...]
    timeout: float | None  # seconds
    jumps: tuple[tuple[str, str, int], ...]  # (name, user, port) of each, as far as given, the first first
    proxy_command: str  # "" for none


@dataclass(frozen=True)
class SshConfig:
    """The parsed files."""

    files: tuple[tuple[Line, ...], ...]

    def lookup(self, name: str, user: str = "", port: int = 0) -> Target:
        """How ssh would reach `name` with `-l user -p port`; InputError for a value that means nothing."""
        reading = Reading(name, user, port)
        reading.apply(self.files)
        if canonical := canonical_name(name, reading):
            reading.name, reading.canonical = canonical, canonical
        if canonical or reading.wants_final:
            reading.final = True
            reading.apply(self.files)
        return target(name, reading)


def load() -> SshConfig:
    """What ssh would read; InputError where it cannot be understood."""
    return SshConfig(tuple(parsed(path, os.path.dirname(path), 0) for path in FILES))


# --- One server's part ---------------------------------------------------------------------------


@dataclass
class Reading:
    """What counts for one server, gathered line by line."""

    name: str
    user: str
    port: int
    options: dict[str, Line] = field(default_factory=dict)
    identity_files: list[str] = field(default_factory=list)
    wants_final: bool = False
    final: bool = False
    canonical: str = ""

    def apply(self, files: Iterable[tuple[Line, ...]]) -> None:
        for lines in files:
            self._apply(lines, active=True, never=False)

    def _apply(self, lines: Iterable[Line], active: bool, never: bool) -> None:
        """`never`: the file is included from where nothing counts, so no block of its own does."""
        for line in lines:
            if line.keyword == "host":
                active = not never and any_fits(line.words, self.name)
            elif line.keyword == "match":
                active = not never and self._matches(line)
            elif line.keyword == "include":
                for file in line.files:
                    self._apply(file, active, never or not active)
            elif active and line.keyword == "identityfile":
                self.identity_files += [word for word in line.words if word not in self.identity_files]
            elif active and line.keyword in ("proxyjump", "proxycommand"):
                self._compete(line)
            elif active:
                self.options.setdefault(line.keyword, line)

    def _compete(self, line: Line) -> None:
        """The first of either is the one, but for a command behind `ProxyJump none`."""
        first = self.options.setdefault("proxy", line)
        no_jump = first.keyword == "proxyjump" and first.words[0].lower() == "none"
        if no_jump and line.keyword == "proxycommand":
            self.options["proxy"] = line

    def _matches(self, line: Line) -> bool:
        words, verdict = list(line.words), True
        while words:
            word = words.pop(0).lower()
            criterion = word.removeprefix("!")
            if criterion in ("final", "canonical"):
                self.wants_final = self.wants_final or criterion == "final"
                holds = self.final
            elif criterion == "all":
                holds = True
            elif not words:
                raise line.wrong(f"{criterion} needs a value")
            else:
                holds = verdict and self._holds(criterion, words.pop(0), line)
            verdict = verdict and holds != word.startswith("!") and criterion not in NOT_OURS
        return verdict

    def _holds(self, criterion: str, value: str, line: Line) -> bool:
        local = getpass.getuser()
        texts = {
            "host": self.host,
            "originalhost": self.name,
            "user": self.user or self.first("user") or local,
            "localuser": local,
            "tagged": self.first("tag"),
        }
        if criterion in texts:
            return any_fits(value.split(","), texts[criterion])
        if criterion == "exec":
            command = expanded(value, self.tokens())
            null = subprocess.DEVNULL
            return subprocess.run(["/bin/sh", "-c", command], stdin=null, stdout=null).returncode == 0
        if criterion in NOT_OURS:
            return False
        raise line.wrong(f"{criterion} is nothing that can be matched")

    def first(self, key: str) -> str:
        return self.options[key].words[0] if key in self.options else ""

    @property
    def host(self) -> str:
        given = self.canonical or self.first("hostname")
        return expanded(given, {"h": lambda: self.name}) if given else self.name

    def tokens(self) -> Mapping[str, Callable[[], str]]:
        return {
            "h": lambda: self.host,
            "n": lambda: self.name,
            "p": lambda: str(self.port or self.first("port") or 22),
            "r": lambda: self.user or self.first("user") or getpass.getuser(),
            "u": getpass.getuser,
            "d": lambda: os.path.expanduser("~"),
            "i": lambda: str(os.getuid()),
            "k": lambda: self.first("hostkeyalias") or self.name,
            "L": lambda: socket.gethostname().partition(".")[0],
            "l": socket.getfqdn,
        }


def expanded(text: str, tokens: Mapping[str, Callable[[], str]]) -> str:
    known: dict[str, Callable[[], str]] = {**tokens, "%": lambda: "%"}
    return re.sub("%(.)", lambda match: known[match[1]]() if match[1] in known else match[0], text)


def canonical_name(name: str, reading: Reading) -> str:
    """The name with the first of the user's domains in which it exists; "" to leave it as it is."""
    wanted = reading.first("canonicalizehostname")
    dots = reading.first("canonicalizemaxdots")
    proxied = reading.first("proxy").lower() not in ("", "none")
    if wanted not in ("yes", "always") or (proxied and wanted == "yes"):
        return ""
    if name.count(".") > (int(dots) if dots.isdigit() else 1) or "canonicaldomains" not in reading.options:
        return ""
    for domain in reading.options["canonicaldomains"].words:
        try:
            socket.getaddrinfo(f"{name}.{domain}", None)
        except OSError:
            continue
        return f"{name}.{domain}"
    return ""


# --- What it means -------------------------------------------------------------------------------


def target(name: str, reading: Reading) -> Target:
    tokens, options = reading.tokens(), reading.options
    port = reading.port or (port_of(options["port"]) if "port" in options else 22)
    alias = reading.first("hostkeyalias")
    host = reading.host

    def files(key: str, usual: tuple[str, ...]) -> tuple[str, ...]:
        words = options[key].words if key in options else usual
        return tuple(path_of(word, tokens) for word in words if word.lower() != "none")

    proxy = options.get("proxy")
    value = expanded(" ".join(proxy.words), tokens) if proxy else "none"
    through = proxy if proxy is not None and value.lower() != "none" else None
    return Target(
        name=name,
        host=host,
        user=reading.user or reading.first("user") or getpass.getuser(),
        port=port,
        identity_files=tuple(path_of(path, tokens) for path in reading.identity_files),
        identities_only=reading.first("identitiesonly").lower() in ("yes", "true"),
        known_as=alias or name_of(host.lower(), port),
        known_hosts=files("userknownhostsfile", KNOWN_HOSTS),
        shared_known_hosts=files("globalknownhostsfile", SHARED_KNOWN_HOSTS),
        timeout=seconds_of(options["connecttimeout"]) if "connecttimeout" in options else None,
        jumps=jumps_of(through, value) if through and through.keyword == "proxyjump" else (),
        proxy_command=value if through and through.keyword == "proxycommand" else "",
    )


def name_of(host: str, port: int) -> str:
    """As known_hosts writes it."""
    return host if port == 22 else f"[{host}]:{port}"


def path_of(text: str, tokens: Mapping[str, Callable[[], str]]) -> str:
    with_variables = re.sub(r"\$\{(\w+)\}", lambda match: os.environ.get(match[1], match[0]), text)
    return os.path.expanduser(expanded(with_variables, tokens))


def port_of(line: Line) -> int:
    port = number_of(line.words[0])
    if port is None:
        raise line.wrong("not a port")
    return port


def number_of(text: str) -> int | None:
    """A port as a number, or as /etc/services names it."""
    try:
        port = int(text) if re.fullmatch("[0-9]{1,5}", text) else socket.getservbyname(text, "tcp")
    except OSError:
        return None
    return port if 0 < port < 65536 else None


def seconds_of(line: Line) -> float | None:
    text = line.words[0].lower()
    if text == "none":
        return None
    parts = re.findall(r"([0-9]+)([smhdw]?)", text)
    if "".join(number + unit for number, unit in parts) != text:
        raise line.wrong("not a time")
    return float(sum(int(number) * SECONDS[unit] for number, unit in parts)) or None


def jumps_of(line: Line, value: str) -> tuple[tuple[str, str, int], ...]:
    """[user@]host[:port], or a URI of the same, several separated by commas."""
    found = []
    for hop in value.split(","):
        words = hop.strip().removeprefix("ssh://").rstrip("/")
        user, _, place = words.rpartition("@")
        match = re.fullmatch(r"(?:\[([^\]]+)\]|([^:\[\]]+))(?::(.*))?", place)
        bare = re.fullmatch(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(?:%\w+)?", place)  # IPv6
        port = number_of(match[3]) if match and match[3] is not None else 0
        if port is None or not (match or bare):
            raise line.wrong(f"{words!r} is not [user@]host[:port]")
        name = (match[1] or match[2]) if match else place
        found.append((name, user, port))
    return tuple(found)
