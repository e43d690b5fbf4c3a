"""Which host keys nobody has trusted yet, and recording them once somebody has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.agent import Agent
from launcher.errors import RingctlError
from launcher.fanout import fan_out


@dataclass(frozen=True)
class KeyOf:
    """An unknown key, to be shown."""

    host: str  # as the inventory calls it
    name: str  # as known_hosts will: the jump host's name where it is that one's key
    kind: str
    fingerprint: str
    file: str  # where it will be recorded
    key: Any


def unknown_keys(agents: Mapping[str, Agent]) -> tuple[list[KeyOf], list[str], list[RingctlError]]:
    """(unknown keys, hosts whose key is known, why the others could not be asked)."""

    def check(name: str) -> KeyOf | None:
        found = agents[name].transport.unknown_key()
        return KeyOf(name, *found) if found else None

    results = fan_out(agents, check)
    errors = [result for result in results.values() if isinstance(result, RingctlError)]
    unknown = {result.name: result for result in results.values() if isinstance(result, KeyOf)}
    return list(unknown.values()), [host for host, result in results.items() if result is None], errors


def record(keys: list[KeyOf]) -> None:
    from launcher.transport.hostkeys import record as write

    for key in keys:
        write(key.file, key.name, key.key)
