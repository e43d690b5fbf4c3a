"""What must not be seen: values that go to the hosts and are shown nowhere, and how a log is freed of them.

A `Hidden` is "***" to whatever prints it, writes it down or makes it into JSON. Its value is taken out in one
place only: where a request is written to the stdin of our own program on a host.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from launcher.errors import InputError
from launcher.model import HostPlan, Plan

if TYPE_CHECKING:
    from launcher.plan import LaunchOptions

SHOWN = "***"
SHORTEST = 6  # a shorter value is part of too many words to be looked for in a log
MOST_BYTES = 1 << 20
# One of the parts of a name between underscores: HF_TOKEN, PGPASSWORD, but not TOKENIZERS_PARALLELISM.
TELLING = re.compile(
    r"[A-Z0-9]*(PASSWORD|PASSWD|PASSPHRASE|SECRET|TOKEN|APIKEY)S?|KEYS?|PASS|AUTH|CREDENTIALS?|COOKIES?"
)
IN_URL = re.compile(r"://[^/\s:@]*:[^/\s@]+@")  # http://user:password@proxy


class Hidden(str):
    """A value for the hosts alone."""

    value: str

    def __new__(cls, value: str) -> Hidden:
        hidden = super().__new__(cls, SHOWN)
        hidden.value = value
        return hidden

    def __deepcopy__(self, _: object) -> Hidden:
        return self  # a copy made by `dataclasses.asdict` still has to travel


# --- The file ------------------------------------------------------------------------------------


def read_env_file(path: str) -> dict[str, Hidden]:
    """NAME=VALUE lines of a file that nobody else can read; a complaint never holds a value."""
    from launcher.inventory import variable_problem

    found: dict[str, Hidden] = {}
    # Not splitlines(): a value may hold a form feed and the like.
    for number, line in enumerate(private_text(path).removeprefix("\ufeff").split("\n"), start=1):
        line = line.removesuffix("\r")
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = line.partition("=")
        name = name.strip()
        where = f"--env-file {path}:{number}"
        if not equals or not re.fullmatch(r"\S+", name):
            raise InputError(f"{where}: not a variable; write NAME=VALUE, one a line")
        if problem := variable_problem(name):
            raise InputError(f"{where}: {name}: {problem}")
        if name in found:
            raise InputError(f"{where}: {name} is given twice; keep one of the two")
        if "\0" in value or (len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"):
            raise InputError(f"{where}: {name}: write the value as it is, without quotes and NUL")
        found[name] = Hidden(value)
    return found


def private_text(path: str) -> str:
    """The text of a file that is ours and closed to everybody else."""
    try:
        # Not blocking, for it may be a pipe that nobody writes to.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            about = os.fstat(fd)
            if not stat.S_ISREG(about.st_mode):
                raise InputError(f"--env-file {path}: not a file")
            if about.st_uid != os.geteuid():
                raise InputError(f"--env-file {path}: it belongs to somebody else; make a copy of your own")
            if about.st_mode & 0o077:
                mode = f"{stat.S_IMODE(about.st_mode):04o}"
                raise InputError(
                    f"--env-file {path}: others may open it (mode {mode})", fix=f"chmod 600 {path}"
                )
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise InputError(f"--env-file {path}: cannot be read: {error.strerror}") from None
    if len(data) > MOST_BYTES:
        raise InputError(f"--env-file {path}: larger than {MOST_BYTES:,} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise InputError(f"--env-file {path}: not valid UTF-8 text") from None


# --- To the hosts --------------------------------------------------------------------------------


def revealed(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """A request as its host needs it. Only what starts ranks holds anything hidden."""
    ranks = request.get("ranks")
    if not isinstance(ranks, Sequence):
        return request
    return {**request, "ranks": [{**rank, "env": plain(rank["env"])} for rank in ranks]}


def plain(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value.value if isinstance(value, Hidden) else value for name, value in env.items()}


# --- On the screen -------------------------------------------------------------------------------


def tells(name: str, value: str) -> bool:
    """Whether a variable looks like a secret."""
    parts = name.upper().replace("-", "_").split("_")
    return any(TELLING.fullmatch(part) for part in parts) or bool(IN_URL.search(value))


def shown(plan: Plan) -> Plan:
    """The plan to show: what looks like a secret is hidden too, though nobody said that it is one."""

    def env(each: Mapping[str, str]) -> dict[str, str]:
        return {
            name: Hidden(value) if tells(name, value) and not isinstance(value, Hidden) else value
            for name, value in each.items()
        }

    def host(each: HostPlan) -> HostPlan:
        return replace(each, ranks=tuple(replace(rank, env=env(rank.env)) for rank in each.ranks))

    return replace(plan, hosts=tuple(map(host, plan.hosts)))


def to_look_for(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Values that no line of a log may show, the longest first, for one may be part of another."""
    values = (value.value for value in variables.values() if isinstance(value, Hidden))
    return longest_first(value for value in values if len(value) >= SHORTEST)


def longest_first(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(values), key=len, reverse=True))


def of_run(options: LaunchOptions) -> tuple[str, ...]:
    """Values that its log may not show; raises InputError if the file that they came from cannot be read."""
    return to_look_for(read_env_file(options.env_file)) if options.env_file else ()


def without(values: Iterable[str], said: Any) -> Any:
    """What a host said, with these values replaced wherever they stand in its texts."""
    if isinstance(said, str):
        for value in values:
            said = said.replace(value, SHOWN)
        return said
    if isinstance(said, dict):
        return {without(values, key): without(values, each) for key, each in said.items()}
    return [without(values, each) for each in said] if isinstance(said, list) else said
