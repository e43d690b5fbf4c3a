"""Ask all hosts what they are and whether they reach each other: one process and one connection a host."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from launcher.agent import Agent, Conversation, understood
from launcher.errors import HostError, RingctlError
from launcher.fanout import fan_out
from launcher.logs import CONTROL, TURNING
from launcher.model import Facts, Host, Inventory, Pair, from_json, to_json
from launcher.told import MOST_RUNS, is_moment, plausible

PROBE = "preflight/probe.py"
FACTS_S = 30.0  # by then a host's Python has started from the slowest of disks
DEEP_S = 180.0
DIALS_S = 30.0
PACKAGES = ("torch", "torchvision", "numpy")
MOST_LISTENING = 16
WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@+-]{0,127}")  # of interfaces, hosts and runs

T = TypeVar("T")


@dataclass(frozen=True)
class Need:
    """What a run will want of its hosts."""

    command: Literal["trainer", "python", "other"] = "trainer"
    ranks: Mapping[str, int] = field(default_factory=dict)  # how many each host takes
    environment: str = ""  # the name in the environment.yaml of this folder
    port: int = 0  # the master port, where the user has fixed it
    data: str = ""  # the folder with the dataset, as ranks will be told
    deep: bool = False  # really import torch, which takes seconds
    i_know: bool = False  # gradients may go through a public address
    shared: bool = False  # others that say so, too, may have its slots
    run: str = ""  # its id: slots that it has already, or that are kept for it, are its own
    ending: str = ""  # a run that will have been ended by then: what it has is free
    figures: bool = True  # measure latency and bandwidth of every pair, not only whether it works


@dataclass(frozen=True)
class Survey:
    """What was found. A host is in `facts` or in `errors`."""

    facts: Mapping[str, Facts]
    errors: Mapping[str, RingctlError]
    pairs: tuple[Pair, ...] = ()
    lacking: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # of the code, by the hosts' stores
    open: Mapping[str, Conversation] = field(default_factory=dict)  # where hostd now waits to start something


def take(
    agents: Mapping[str, Agent],
    inventory: Inventory,
    need: Need,
    code: dict[str, Any] | None = None,
    *,
    stay: bool = False,
) -> Survey:
    """All facts, and all pairs of hosts dialled. A host that fails holds up nobody but by its timeout. With
    `stay`, the conversations stay open, to start a run in."""
    asking = Asking(agents, inventory, need, code)
    try:
        asking.ask_facts()
        asking.dial()
        return asking.survey(asking.leave() if stay else {})
    finally:
        asking.close()


def for_plan(agents: Mapping[str, Agent], code: dict[str, Any] | None = None) -> Survey:
    """Only what planning needs. The conversations stay open, to start a run in."""
    addresses, errors = apart(fan_out(agents, lambda name: address_of(agents[name])))
    conversations: dict[str, Conversation] = {}

    def ask(name: str) -> tuple[Facts, dict[str, Any] | None]:
        host = agents[name].host
        request = {"only": "plan", "peers": peers_of(name, addresses)}
        request.update(ifname=host.ifname, data_address=host.data_address)
        conversations[name], lacking = begin(agents[name], request, code)
        return facts_from(agents[name].host, conversations[name], FACTS_S), lacking

    answers, more = apart(fan_out(addresses, ask))
    lacking = {name: lacks for name, (_, lacks) in answers.items() if lacks}
    facts = {name: facts for name, (facts, _) in answers.items()}
    return Survey(facts, {**errors, **more}, (), lacking, conversations)


class Asking:
    """A conversation with each host, in two rounds."""

    def __init__(
        self, agents: Mapping[str, Agent], inventory: Inventory, need: Need, code: dict[str, Any] | None
    ) -> None:
        self.agents, self.inventory, self.need, self.code = agents, inventory, need, code
        self.token = os.urandom(16).hex()
        self.conversations: dict[str, Conversation] = {}
        self.errors: dict[str, RingctlError] = {}
        self.facts: dict[str, Facts] = {}
        self.lacking: dict[str, dict[str, Any]] = {}
        self.pairs: list[Pair] = []

    def close(self) -> None:
        for conversation in self.conversations.values():
            conversation.close()

    def leave(self) -> dict[str, Conversation]:
        """Let the probes go; what stays of each conversation is a hostd that waits for what to start."""
        stay = {name: self.conversations.pop(name) for name in list(self.conversations) if name in self.facts}
        for conversation in stay.values():
            with contextlib.suppress(HostError):  # the start will find out, and do without it
                conversation.say({"leave": True})
        return stay

    def survey(self, stay: Mapping[str, Conversation]) -> Survey:
        order = [name for name in self.agents if name in self.facts]
        facts = {name: self.facts[name] for name in order}
        return Survey(facts, self.errors, tuple(self.pairs), self.lacking, stay)

    # Round one

    def ask_facts(self) -> None:
        addresses = self._note(fan_out(self.agents, lambda name: address_of(self.agents[name])))
        self.facts = self._note(fan_out(addresses, lambda name: self._facts(name, addresses)))

    def _facts(self, name: str, addresses: Mapping[str, str]) -> Facts:
        agent = self.agents[name]
        self.conversations[name], lacking = begin(agent, self._request(agent.host, addresses), self.code)
        if lacking:
            self.lacking[name] = lacking
        facts = facts_from(agent.host, self.conversations[name], DEEP_S if self.need.deep else FACTS_S)
        noise = self.conversations[name].noise.decode(errors="replace").strip()
        return replace(facts, noise=noise[:200])

    def _request(self, host: Host, addresses: Mapping[str, str]) -> dict[str, Any]:
        return {
            "host": host.name,
            "peers": peers_of(host.name, addresses),
            "names": [each.name for each in self.inventory.hosts if each.name in self.agents],
            "ifname": host.ifname,
            "data_address": host.data_address,
            "master": host.name == self.inventory.master and len(self.agents) > 1,
            "port": self.need.port if host.name == self.inventory.master else 0,
            "env": to_json(host.env) if host.env else None,
            "packages": list(PACKAGES),
            "workdir": host.workdir,
            "data": self.need.data,
            "deep": self.need.deep,
            "patience": 2 * (DEEP_S if self.need.deep else FACTS_S),
            "token": self.token,
        }

    # Round two

    def dial(self) -> None:
        alone = [name for name in self.facts if self.agents[name].host.local and len(self.facts) == 1]
        results = self._note(fan_out([name for name in self.facts if name not in alone], self._dial))
        for name, (facts, pairs) in results.items():
            self.facts[name] = facts
            self.pairs += pairs

    def _dial(self, name: str) -> tuple[Facts, list[Pair]]:
        conversation, facts = self.conversations[name], self.facts[name]
        before = time.time()
        conversation.say({"peers": self._peers(name)})
        with understood(name):
            theirs = moment(conversation.answer(FACTS_S)["time"])
            half = (time.time() - before) / 2
            if not self.agents[name].host.local:
                facts = replace(facts, clock_s=theirs - before - half, clock_error_s=half)
            told = conversation.answer(DIALS_S)["pairs"]
            pairs = [from_json(Pair, {**pair, "source": name}) for pair in told]
            check_figures(pairs)
        return facts, [pair for pair in pairs if pair.target in self.facts and pair.target != name]

    def _peers(self, name: str) -> list[dict[str, Any]]:
        """Whom a host dials, beginning with the one after it: so not all measure the same one at once."""
        names, measured = list(self.facts), self.need.figures
        place = names.index(name)
        peers = []
        for peer in names[place + 1 :] + names[:place]:
            about = self.facts[peer]
            address = self.agents[peer].host.data_address or about.data_address
            for number, port in enumerate(about.listening):
                figures = measured and number == 0
                peers.append({"name": peer, "address": address, "port": port, "measure": figures})
        return peers

    def _note(self, results: dict[str, T | RingctlError]) -> dict[str, T]:
        found, errors = apart(results)
        self.errors.update(errors)
        for name in errors:
            self.facts.pop(name, None)
        return found


def apart(results: dict[str, T | RingctlError]) -> tuple[dict[str, T], dict[str, RingctlError]]:
    """(what worked, what did not)."""
    good = {name: found for name, found in results.items() if not isinstance(found, RingctlError)}
    return good, {name: found for name, found in results.items() if isinstance(found, RingctlError)}


def address_of(agent: Agent) -> str:
    """Where the others will find it, as far as that is known before asking."""
    return agent.host.data_address or agent.transport.address() or agent.host.address


def peers_of(name: str, addresses: Mapping[str, str]) -> list[str]:
    return [address for peer, address in addresses.items() if peer != name and address]


def begin(
    agent: Agent, request: dict[str, Any], code: dict[str, Any] | None
) -> tuple[Conversation, dict[str, Any] | None]:
    """Start the probe; in the same process, ask what the code store lacks of the snapshot `code`: a host's
    Python takes longer to start than to answer."""
    if code is None or agent.host.local:
        return agent.converse(PROBE, "probe,hostd:start", [request]), None
    conversation = agent.converse(PROBE, "hoststore:check,probe,hostd:start", [code, request])
    try:
        return conversation, conversation.answer(FACTS_S)
    except BaseException:
        conversation.close()
        raise


def facts_from(host: Host, conversation: Conversation, seconds: float) -> Facts:
    answer = conversation.answer(seconds)
    with understood(host.name):
        facts = from_json(Facts, {**answer, "host": host.name})
        check_plausible(facts)
        usable = tuple(interface for interface in facts.interfaces if WORD.fullmatch(interface.name))
        return replace(facts, interfaces=usable)


def moment(told: Any) -> float:
    if not is_moment(told):
        raise ValueError("a time that is none")
    return float(told)


def check_figures(pairs: Sequence[Pair]) -> None:
    figures = [figure for pair in pairs for figure in (pair.latency_ms, pair.mbit_s)]
    if not all(figure is None or 0 <= figure < 1e12 for figure in figures):
        raise ValueError("a figure that is none")


def check_plausible(facts: Facts) -> None:
    """Raise HostError or ValueError for what would end up in a plan or in a line to type, and is not of its
    kind."""
    addresses = [facts.data_address, *(interface.address for interface in facts.interfaces)]
    runs = [*facts.runs, facts.port.run if facts.port else ""]
    for address in filter(None, addresses):
        ipaddress.IPv4Address(address)
    for word in filter(None, [facts.ifname, facts.hostname, *runs]):
        if not WORD.fullmatch(word):
            raise HostError(facts.host, f"its probe answered with a name that cannot be used: {word[:80]!r}")
    if len(facts.ephemeral) not in (0, 2) or len(facts.nofile) not in (0, 2):
        raise ValueError("a range that is none")
    ports = [facts.free_port, *facts.listening, facts.port.port if facts.port else 0, *facts.ephemeral]
    if not all(0 <= port <= 65535 for port in ports) or len(facts.listening) > MOST_LISTENING:
        raise ValueError("a port that is none")
    figures = [facts.memory, facts.shm, facts.threads, facts.gpus, *facts.nofile]
    figures += [interface.mtu for interface in facts.interfaces]
    figures += [figure for place in facts.folders for figure in (place.free_bytes, place.free_inodes)]
    if not 0 < facts.cores < 1 << 20 or not all(-1 <= figure < 1 << 64 for figure in figures):
        raise ValueError("a machine that nobody has built")
    if len(facts.taken) > MOST_RUNS or not all(map(plausible, facts.taken)):
        raise ValueError("slots that nobody can have")
    for path in (facts.home, facts.python, facts.cwd):
        if CONTROL.search(path) or TURNING.search(path):
            raise HostError(facts.host, f"its probe answered with a path that cannot be used: {path[:80]!r}")
