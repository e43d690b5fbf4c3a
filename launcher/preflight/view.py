"""What a check sees, and what it says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from launcher.model import Facts, Host, Pair, Status
from launcher.preflight.survey import Need, Survey


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be, on the host that a check looks at."""

    status: Status
    found: str
    wanted: str = ""
    fix: str = ""
    peer: str = ""
    blocking: bool = False


def blocker(found: str, wanted: str, fix: str, peer: str = "") -> Finding:
    return Finding("fail", found, wanted, fix, peer, blocking=True)


@dataclass(frozen=True)
class View:
    """What a check sees: one host, and the survey it is part of."""

    host: Host
    facts: Facts
    need: Need
    survey: Survey
    incoming: Sequence[Pair]  # what others found when they dialled it
    views: Mapping[str, View] = field(repr=False, compare=False)  # of all hosts that answered

    @property
    def ranks(self) -> int:
        return self.need.ranks.get(self.host.name, 1)

    @property
    def peers(self) -> list[View]:
        return [view for view in self.views.values() if view is not self]

    @property
    def address(self) -> str:
        """Where it takes gradients."""
        return self.host.data_address or self.facts.data_address


def views_of(hosts: Sequence[Host], need: Need, survey: Survey) -> dict[str, View]:
    """One for each host that answered."""
    incoming: dict[str, list[Pair]] = {host.name: [] for host in hosts}
    for pair in survey.pairs:
        incoming[pair.target].append(pair)
    views: dict[str, View] = {}
    for host in hosts:
        if host.name in survey.facts:
            facts = survey.facts[host.name]
            views[host.name] = View(host, facts, need, survey, incoming[host.name], views)
    return views


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
