"""What a check sees, and what it says."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from launcher.model import Facts, Host, Inventory, Pair, Status
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
    inventory: Inventory
    need: Need
    survey: Survey

    @property
    def ranks(self) -> int:
        return self.need.ranks.get(self.host.name, 1)

    @property
    def peers(self) -> list[Facts]:
        return [facts for name, facts in self.survey.facts.items() if name != self.host.name]

    @property
    def address(self) -> str:
        """Where it takes gradients."""
        return self.host.data_address or self.facts.data_address

    def of(self, name: str) -> View:
        """Another host in the same survey."""
        host = next(host for host in self.inventory.hosts if host.name == name)
        return View(host, self.survey.facts[name], self.inventory, self.need, self.survey)

    def address_of(self, peer: Facts) -> str:
        return self.of(peer.host).address

    def incoming(self) -> list[Pair]:
        """What others found when they dialled it."""
        return [pair for pair in self.survey.pairs if pair.target == self.host.name]


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
