"""The Python environment of the ranks on all hosts: read its file, create it, compare what hosts have.

Finding and activating it is done on the hosts, by hostactivate.py, hostlook.py and hostenv.py.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher.agent import LARGEST_ANSWER, SENTINEL, Agent, understood
from launcher.errors import HostError, InputError, PreflightError, RingctlError
from launcher.fanout import fan_out
from launcher.follow import ASLEEP_S
from launcher.logs import visible
from launcher.model import EnvSpec, from_json, to_json
from launcher.remote import grouped
from launcher.text import Row
from launcher.told import words_of
from launcher.transport import Channel

FILES = ("environment.yaml", "environment.yml")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
ONE_PYTHON = re.compile(r"python\s*={1,2}\s*(\d+\.\d+)(?:\.(?:\d+|\*))?\s*")
FILE_OF_THIS_MACHINE = re.compile(
    r"\s*(?:(?:-r|-c|--requirement|--constraint)\b|(?:-e\s*|--editable[\s=]*)?\.)"
)
NOT_FOR_A_VENV = re.compile(r"(?:python|pip)\b")  # conda packages that every virtual environment has already
SILENCE_S = 60.0  # a host that creates says something every second or so
READ_S = 0.5  # before looking whether the user has had enough
CHECK_S = 120.0
PACKAGES = ("torch", "torchvision", "numpy", "pillow")
MUST_MATCH = ("python", "torch", "torchvision")  # ranks that differ in these do not understand each other
MISSING = "missing"

Show = Callable[[str, str], None]  # (host, one line)
Stop = Callable[[], bool]  # whether the user has had enough


# --- The file ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spec:
    """A conda environment file, with what a host without conda needs to know of it."""

    name: str
    text: str
    digest: str
    python: str  # "3.11", or "" where it is left open
    pip: tuple[str, ...]
    conda_only: tuple[str, ...]  # what a virtual environment cannot have


def find_file(given: str | None) -> Path:
    paths = [Path(given)] if given else [Path(name) for name in FILES]
    for path in paths:
        if path.is_file():
            return path
    if given:
        raise InputError(f"{given}: no such file")
    raise InputError("there is no environment.yaml here", fix="write one, or name another: --file FILE")


def read_spec(path: Path) -> Spec:
    """The file, checked as far as that can be done without conda."""
    import yaml

    try:
        text = path.read_text("utf-8")
        data = yaml.safe_load(text)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    except yaml.YAMLError as error:
        raise InputError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise InputError(f"{path}: not an environment file; it has `name` and `dependencies`")
    name, dependencies = data.get("name"), data.get("dependencies")
    if not isinstance(name, str) or not NAME.fullmatch(name) or name == "base":
        raise InputError(f"{path}: name: write letters, digits, '.', '_' and '-', and not base")
    if not isinstance(dependencies, list):
        raise InputError(f"{path}: dependencies: write a list of packages")
    plain = [item for item in dependencies if isinstance(item, str)]
    pythons = [match[1] for match in map(ONE_PYTHON.fullmatch, plain) if match]
    return Spec(
        name=name,
        text=text,
        digest=hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest(),
        python=pythons[0] if pythons else "",
        pip=tuple(pip_lines(path, dependencies)),
        conda_only=tuple(item for item in plain if not NOT_FOR_A_VENV.match(item)),
    )


def pip_lines(path: Path, dependencies: Sequence[Any]) -> list[str]:
    """The lines of the pip part; only what means the same on every host."""
    lines: list[str] = []
    for item in dependencies:
        if isinstance(item, dict):
            part = item.get("pip", [])
            if not isinstance(part, list) or not all(isinstance(line, str) for line in part):
                raise InputError(f"{path}: dependencies: pip: write a list of packages")
            lines += part
    for line in lines:
        if FILE_OF_THIS_MACHINE.match(line) or "\n" in line:
            raise InputError(
                f"{path}: pip: {line!r} means a file of this machine", fix="write the packages themselves"
            )
    return lines


# --- create --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Created:
    """What became of one host's environment."""

    how: str  # created, updated, up to date
    tool: str  # conda, mamba, micromamba, venv
    prefix: str
    notes: tuple[str, ...] = ()


def create(
    agents: Mapping[str, Agent], spec: Spec, timeout: float, show: Show, stop: Stop
) -> dict[str, Created | RingctlError]:
    """Make it on all hosts side by side; `show` gets the steps as they are taken. Once `stop` says so, it is
    ended on all of them."""
    request = {**to_json(spec), "timeout": timeout}
    return fan_out(agents, lambda name: create_one(agents[name], request, show, stop))


def create_one(agent: Agent, request: dict[str, Any], show: Show, stop: Stop) -> Created:
    host = agent.host.name
    with understood(host):
        ready = agent.ask("hostenv.py", ["ready"], request)["ready"]
        if ready is not None:
            return created("up to date", ready, ())
        for note in notes_of(agent, request, stop):
            if note["kind"] in ("step", "output"):
                show(host, visible(note["text"]))
            elif note["kind"] == "error":
                raise RingctlError(f"{host}: {words_of(note['error'])}")
            elif note["kind"] == "done":
                return created(note["how"], note["record"], note["notes"])
    raise HostError(host, "the creation broke off", fix="repeat it: ringctl env create")


def created(how: Any, record: Any, notes: Any) -> Created:
    words = [words_of(each) for each in (how, record["tool"], record["prefix"])]
    return Created(words[0], words[1], words[2], tuple(map(words_of, notes)))


def notes_of(agent: Agent, request: dict[str, Any], stop: Stop) -> Iterator[dict[str, Any]]:
    """What hostenv's `create` says, line by line. Whoever stops listening ends it there."""
    argv = [*agent.transport.program("hostenv.py"), "create"]
    channel = agent.transport.stream(argv, json.dumps(request).encode() + b"\n")
    rest, begun = b"", False
    try:
        for data in pieces_of(channel, agent.host.name, request["timeout"], stop):
            rest += data
            if len(rest) > LARGEST_ANSWER:
                raise HostError(agent.host.name, "a line without an end")
            if not begun:
                _, begins, after = rest.partition(SENTINEL)
                begun, rest = bool(begins), after if begins else rest
            if begun:
                *whole, rest = rest.split(b"\n")
                yield from map(json.loads, whole)
    finally:
        channel.close()


def pieces_of(channel: Channel, host: str, timeout: float, stop: Stop) -> Iterator[bytes]:
    """What comes, until it ends; HostError if nothing does, or if it goes on for longer than it may. A host
    keeps to its time by itself, and then has as long to say so as for everything it says."""
    heard = time.monotonic()
    until = heard + timeout + SILENCE_S
    while True:
        asked = time.monotonic()
        data = channel.read(READ_S)
        now = time.monotonic()
        if now > asked + READ_S + ASLEEP_S:
            heard, until = now, until + now - asked  # it was us who were stopped (Ctrl-Z)
        if data == b"":
            return
        if stop():
            raise RingctlError(f"{host}: interrupted; what was under way there is being ended")
        if now > until:
            raise HostError(host, f"it was not done after {timeout:g} s, nor did it end; it is given up")
        if data is None and now - heard > SILENCE_S:
            raise HostError(host, f"nothing was heard of it for {SILENCE_S:.0f} s")
        if data:
            heard = now
            yield data


def created_line(host: str, done: Created) -> str:
    return f"{host}: {done.how}: {done.prefix} ({done.tool})"


def elsewhere(agents: Mapping[str, Agent], name: str) -> list[str]:
    """Hosts whose ranks would not run in the environment of this name."""
    return [
        host
        for host, agent in agents.items()
        if agent.host.env is None or (agent.host.env.kind, agent.host.env.value) != ("conda", name)
    ]


# --- check ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Look:
    """What a host's environment has, as its own Python sees it."""

    python: str
    executable: str
    machine: str
    packages: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def compared(self) -> dict[str, str | None]:
        return {"python": self.python, "machine": self.machine, **self.packages}


@dataclass(frozen=True)
class Difference:
    """Something that is not the same on all hosts, or missing."""

    what: str
    values: Mapping[str, str | None]  # by host; None: it is not there
    blocking: bool  # ranks would not work together


def check(agents: Mapping[str, Agent], packages: Sequence[str]) -> dict[str, Look | RingctlError]:
    """Ask every host's environment; nothing is imported there."""

    def look(name: str) -> Look:
        env = agents[name].host.env
        request = {"env": to_json(env) if env else None, "packages": list(packages)}
        with understood(name):
            found = from_json(Look, agents[name].ask("hostlook.py", [], request, timeout=CHECK_S))
            return replace(found, packages={package: found.packages[package] for package in packages})

    return fan_out(agents, look)


def differences(looks: Mapping[str, Look]) -> list[Difference]:
    """What differs or is missing, in the order of the table."""
    found = []
    for what in next(iter(looks.values())).compared if looks else ():
        values = {host: look.compared[what] for host, look in looks.items()}
        missing = None in values.values()
        if missing or len(set(values.values())) > 1:
            apart = len({essence(what, value) for value in values.values()}) > 1
            found.append(Difference(what, values, missing or (apart and what in MUST_MATCH)))
    return found


def essence(what: str, value: str | None) -> str | None:
    """What has to be the same: of Python the first two numbers, of a package all but its build (+cpu)."""
    if value is None:
        return None
    return ".".join(value.split(".")[:2]) if what == "python" else value.partition("+")[0]


def usual(values: Mapping[str, str | None]) -> str | None:
    """What most hosts have; the first host's where no value has a majority."""
    return Counter(values.values()).most_common(1)[0][0]  # among equals, the one that was met first


def env_text(env: EnvSpec | None) -> str:
    return f"{env.kind} {env.value}" if env else "as it is"


def check_rows(looks: Mapping[str, Look], envs: Mapping[str, EnvSpec | None]) -> list[Row]:
    """Hosts by packages; what is not as on most hosts is marked."""
    odd = {difference.what: usual(difference.values) for difference in differences(looks)}
    rows: list[Row] = []
    for host, look in looks.items():
        cells = [
            (value or MISSING) + (" *" if value is None or value != odd.get(what, value) else "")
            for what, value in look.compared.items()
        ]
        rows.append((host, env_text(envs[host]), *map(visible, cells)))
        header = ("HOST", "ENVIRONMENT", *(what.upper() for what in look.compared))
    return [header, *rows] if rows else []


def difference_line(difference: Difference) -> str:
    """torch differs: 2.13.0 on server1-3; missing on server4."""
    hosts: dict[str | None, list[str]] = {}
    for host, value in difference.values.items():
        hosts.setdefault(value, []).append(host)
    parts = [
        f"{MISSING if value is None else visible(value)} on {grouped(names)}"
        for value, names in hosts.items()
    ]
    return (
        f"{difference.what} differs: {'; '.join(parts)}" if parts[1:] else f"{difference.what} is {parts[0]}"
    )


def check_json(results: Mapping[str, Look | RingctlError], found: Sequence[Difference]) -> dict[str, Any]:
    hosts = [
        {"host": host, **({"error": look.message} if isinstance(look, RingctlError) else to_json(look))}
        for host, look in results.items()
    ]
    return {"ok": exit_code(results, found) == 0, "hosts": hosts, "differs": [to_json(one) for one in found]}


def exit_code(results: Mapping[str, Look | RingctlError], found: Sequence[Difference]) -> int:
    """0 the ranks would work together, 3 they would not, 4 a host could not be asked."""
    errors = [error for error in results.values() if isinstance(error, RingctlError)]
    if any(isinstance(error, HostError) for error in errors):
        return HostError.exit_code
    return PreflightError.exit_code if errors or any(one.blocking for one in found) else 0
