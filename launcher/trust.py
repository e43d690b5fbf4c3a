"""Which host keys nobody has trusted yet, and recording them once somebody has."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.agent import Agent
from launcher.errors import HostError, RingctlError
from launcher.fanout import fan_out
from launcher.transport import HostKey


def host_keys(agents: Mapping[str, Agent]) -> tuple[dict[str, HostKey], list[RingctlError]]:
    """({host: its key, or that of the first unknown jump before it}, why the others could not be asked)."""
    results = fan_out(agents, lambda name: agents[name].transport.host_key())
    errors = [result for result in results.values() if isinstance(result, RingctlError)]
    return {name: key for name, key in results.items() if isinstance(key, HostKey)}, errors


def unknown(keys: Mapping[str, HostKey]) -> dict[str, HostKey]:
    """Those to be recorded, a jump host's once."""
    first: dict[tuple[str, str], str] = {}
    for host, key in keys.items():
        if key.file:
            first.setdefault((key.name, key.file), host)
    return {host: keys[host] for host in first.values()}


def record(keys: Mapping[str, HostKey], recorded: set[HostKey]) -> None:
    """Write them down; `recorded` are those that have been already, which must not come again."""
    from launcher.transport.hostkeys import record as write

    for host, key in keys.items():
        if key in recorded:
            raise HostError(
                host,
                f"the key of {key.name} was recorded in {key.file}, but is not known from there",
                fix="look at UserKnownHostsFile in ~/.ssh/config",
            )
        write(key.file, key.name, key.key)
        recorded.add(key)
