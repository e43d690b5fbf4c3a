"""Checks of names, interfaces, ways between hosts, and ports."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator

from launcher.model import Facts, Pair
from launcher.plan import EXPOSED_FIX, exposed, is_public
from launcher.preflight import fixes
from launcher.preflight.view import Finding, View, blocker, is_loopback

MTUS = (1500, 1400, 1280, 1000, 576)  # to try one after the other; the last is what all must carry
UNLESS = "  # unless what lies between the hosts carries no more"
SYSTEM_NAMES = ("localhost", "ip6-")  # mean what the system says, on every host


def no_way(view: View) -> bool:
    """Whether it knows no way to any other host; its address is then its own loopback."""
    return bool(view.facts.routes) and not any(view.facts.routes.values()) and not view.host.data_address


def twice(view: View) -> Iterator[Finding]:
    for peer in view.peers:
        if view.facts.identity and peer.facts.identity == view.facts.identity:
            yield blocker(
                f"it is the same host as {peer.host.name}",
                "each host once, with as many `slots` as it should take ranks",
                f"take {view.host.name} or {peer.host.name} out of the inventory",
                peer=peer.host.name,
            )


def loopback_name(view: View) -> Iterator[Finding]:
    own = view.facts.hostname
    means = view.facts.names.get(own, ())
    if own.startswith("localhost"):
        fix = f"sudo hostnamectl set-hostname {shlex.quote(name_for(view.host.name))}"
        yield Finding("warn", f"it is called {own}", "a name of its own", fix)
    elif no_way(view):
        return  # there is no address to propose; `route` says so
    elif not means or all(is_loopback(address) for address in means):
        what = f"means {', '.join(means)}" if means else "means nothing"
        yield Finding(
            "warn",
            f"its own name {own} {what} there; ringctl names the interface itself, gloo by hand would not",
            f"{own} means {view.address}",
            fixes.hosts_line(view.facts, view.address, own),
        )


def name_for(host: str) -> str:
    """One that it could be called by; a number is none."""
    return f"host-{re.sub('[.:%]+', '-', host)}" if ":" in host or host.replace(".", "").isdigit() else host


def multihomed(view: View) -> Iterator[Finding]:
    own = view.facts.hostname
    means = [a for a in view.facts.names.get(own, ()) if not is_loopback(a) and ":" not in a]
    others = {i.address: i.name for i in view.facts.interfaces if i.address and i.name != view.facts.ifname}
    expected = view.address in means or view.host.address in means or no_way(view)
    if means and not expected and any(address in others for address in means):
        wrong = next(address for address in means if address in others)
        yield Finding(
            "warn",
            f"its own name {own} means {wrong}, which is {others[wrong]}'s, and peers are reached by "
            f"{view.facts.ifname}; ringctl names the interface itself, gloo by hand would not",
            f"{own} means {view.address}",
            fixes.hosts_line(view.facts, view.address, own),
        )


def aliases(view: View) -> list[tuple[View, tuple[str, ...]]]:
    """The other hosts that have a name of their own rather than a number, and what each means here."""
    known = view.facts.names
    named = [peer for peer in view.peers if peer.host.name in known and not no_way(peer)]
    return [(peer, known[peer.host.name]) for peer in named if not peer.host.name.startswith(SYSTEM_NAMES)]


def unknown(view: View) -> list[View]:
    return [peer for peer, means in aliases(view) if not means]


def led_elsewhere(view: View) -> list[View]:
    """By their IPv4 addresses: of the others, hosts are not asked."""
    means = [(peer, {address for address in found if ":" not in address}) for peer, found in aliases(view)]
    return [peer for peer, addresses in means if addresses and not addresses & addresses_of(peer)]


def alias_missing(view: View) -> Iterator[Finding]:
    if peers := unknown(view):
        lines = [fixes.hosts_line(view.facts, peer.address, peer.host.name) for peer in peers]
        names = ", ".join(peer.host.name for peer in peers)
        yield Finding(
            "warn",
            f"{names} mean{'s' if len(peers) == 1 else ''} nothing there; ringctl uses numbers",
            "every host knows the others by name",
            "\n".join(lines),
        )


def alias_elsewhere(view: View) -> Iterator[Finding]:
    for peer in led_elsewhere(view):
        means = ", ".join(view.facts.names[peer.host.name])
        yield Finding(
            "warn",
            f"{peer.host.name} means {means} there; ringctl uses numbers",
            f"{peer.host.name} means {peer.address}",
            fixes.hosts_line(view.facts, peer.address, peer.host.name),
        )


def addresses_of(peer: View) -> set[str]:
    """What a name of another host may mean."""
    its = {interface.address for interface in peer.facts.interfaces if not is_loopback(interface.address)}
    return its | {peer.address, peer.host.address}


def public(view: View) -> Iterator[Finding]:
    """gloo listens on the data interface alone, but torch's store on all of the master's."""
    wanted = "a private address, or a firewall that keeps others out"
    if view.need.i_know:
        return
    if is_public(view.facts.data_address):
        words = exposed(view.host.name, view.facts.data_address).removeprefix(f"{view.host.name}: ")
        yield blocker(words, wanted, EXPOSED_FIX)
    open_ = [
        i for i in view.facts.interfaces if is_public(i.address) and i.address != view.facts.data_address
    ]
    if open_ and view.host.name == next(iter(view.need.ranks), "") and len(view.need.ranks) > 1:
        ends = ", ".join(f"{i.address} ({i.name})" for i in open_)
        found = f"the master port listens on all addresses, also on the public {ends}"
        yield Finding("warn", found, wanted, "let a firewall close all ports there but SSH's; then: --i-know")


def ifname(view: View) -> Iterator[Finding]:
    wanted, own = view.host.ifname, view.host.data_address
    usable = ", ".join(f"{i.name} ({i.address})" for i in view.facts.interfaces if i.address)
    addresses = [i.address for i in view.facts.interfaces if i.name == wanted]
    right = next((name for name in view.facts.routes.values() if name), "")
    fix = fixes.found_by_itself(view.host, "ifname", right)
    lonely = right not in ("", wanted) and not any(peer.host.ifname for peer in view.peers)
    if not addresses:
        yield blocker(f"there is no interface {wanted}; it has {usable}", f"an interface {wanted}", fix)
    elif not any(addresses):
        yield blocker(f"{wanted} has no IPv4 address; it has {usable}", f"an address on {wanted}", fix)
    elif own and own not in addresses:
        found = f"{wanted} has {', '.join(addresses)}, and not the data address {own}"
        fix = fixes.leave_out(view.host, "ifname")
        yield blocker(found, "the interface that has the data address", fix)
    elif right not in ("", wanted) and addresses[0] in twins(view):
        twin = twins(view)[addresses[0]]
        found = f"{wanted} has {addresses[0]} there, and so has {twin}: it does not lead to the others"
        yield blocker(found, "an interface that leads to the other hosts", fix)
    elif lonely and any(pair.problem for pair in view.incoming):
        found = f"{wanted} ({addresses[0]}) is not reached from the others; the way to them is {right}"
        yield blocker(found, "an interface that leads to the other hosts", fix)


def twins(view: View) -> dict[str, str]:
    """Data addresses of the other hosts; no two should be the same."""
    return {peer.address: peer.host.name for peer in view.peers}


def route(view: View) -> Iterator[Finding]:
    given = [peer for peer in view.peers if peer.host.data_address]
    wrong = {peer.host.data_address for peer in given if any(data_address(peer))}  # said already, of them
    missing = [peer for peer, name in view.facts.routes.items() if not name and peer not in wrong]
    if missing:
        fix = "give the hosts addresses of one network, or write `data_address` for each in the inventory"
        yield blocker(f"there is no route to {', '.join(missing)}", "a route to every host", fix)


def data_address(view: View) -> Iterator[Finding]:
    has = {interface.address for interface in view.facts.interfaces}
    right = view.facts.data_address  # of the way to the others: the one that was given is not there
    fix = fixes.found_by_itself(view.host, "data_address", "" if is_loopback(right) else right)
    if ":" in view.host.data_address:
        yield blocker(f"{view.host.data_address} is an IPv6 address", "an IPv4 address", fix)
    elif view.host.data_address not in has:
        usable = ", ".join(sorted(address for address in has if address and not is_loopback(address)))
        found = f"{view.host.data_address} is not an address of it; it has {usable}"
        yield blocker(found, "an address of the host", fix)


def firewall(view: View) -> Iterator[Finding]:
    """Said of the host that others do not get through to, or that gets through to no other: there something
    can be done about it."""
    if explained_by_interface(view) or no_way(view) or not view.facts.listening:
        return
    shut_out = [pair for pair in view.incoming if is_shut_out(view, pair)]
    sources = list(dict.fromkeys(view.views[pair.source].address for pair in shut_out))
    here = [pair for pair in shut_out if not is_shut_in(view.views[pair.source])]  # else said of that one
    if is_shut_in(view) and not here:  # else answers to it may be dropped like all that arrives
        fix = fixes.firewall(view.facts, [peer.address for peer in view.peers], fixes.WAY_OUT)
        found = "no connection from it gets through to any other host"
        yield blocker(found, "TCP on all ports between the hosts", fix)
    for pair in here:
        what = "no connection" if not reached_from(view, pair.source) else f"no connection to {pair.port}"
        yield blocker(
            f"{what} gets through to it: {pair.problem}",
            "TCP on all ports between the hosts",
            fixes.firewall(view.facts, sources),
            peer=pair.source,
        )


def is_shut_out(view: View, pair: Pair) -> bool:
    """Whether nothing came of dialling it; said once, where no port of it was reached."""
    if not pair.problem or not pair.large or no_way(view.views[pair.source]):
        return False
    return pair.port == view.facts.listening[0] or reached_from(view, pair.source)


def is_shut_in(view: View) -> bool:
    """Whether it reaches none of several hosts, though somebody else does, and can be told so."""
    dialled = [peer for peer in view.peers if any(pair.source == view.host.name for pair in peer.incoming)]
    by_others = any(
        not pair.problem for peer in dialled for pair in peer.incoming if pair.source != view.host.name
    )
    tried = [pair for peer in dialled for pair in peer.incoming if pair.source == view.host.name]
    shut = all(pair.problem and pair.large for pair in tried)
    return shut and by_others and len(dialled) > 1 and bool(view.facts.listening)


def reached_from(view: View, source: str) -> bool:
    """Whether a host gets through to a port of the ephemeral range, where gloo listens."""
    first = view.facts.listening[0]
    return any(p.source == source and p.port == first and not p.problem for p in view.incoming)


def mtu(view: View) -> Iterator[Finding]:
    own = mtu_of(view.facts)
    cut_off = [pair for pair in view.incoming if pair.problem and not pair.large]
    for pair in cut_off:
        yield blocker(
            "small messages get through to it, large ones do not",
            "messages of any size arrive",
            fixes.mtu(view.facts.ifname, next((size for size in MTUS if size < own), MTUS[-1])),
            peer=pair.source,
        )
    if cut_off or no_way(view) or explained_by_interface(view):
        return
    connected = [each.facts for each in view.views.values() if not no_way(each)]
    usual = Counter(map(mtu_of, connected)).most_common(1)[0][0]
    if own != usual:
        yield Finding(
            "warn",
            f"{view.facts.ifname} has an MTU of {own}, the other hosts {usual}",
            "the same MTU on all hosts",
            f"{fixes.mtu(view.facts.ifname, usual)}{UNLESS if own < usual else ''}",
        )


def mtu_of(facts: Facts) -> int:
    return next((i.mtu for i in facts.interfaces if i.name == facts.ifname), 0)


def port_used(view: View) -> Iterator[Finding]:
    port = view.facts.port
    if port and not port.free and (not port.run or port.run != view.need.ending):
        fix = f"ringctl stop {port.run}" if port.run else fixes.OTHER_PORT
        whose = f"{port.owner}, of run {port.run}" if port.run else port.owner
        yield blocker(f"port {port.port} is taken by {whose}", "a free master port", fix)


def port_ephemeral(view: View) -> Iterator[Finding]:
    port, (low, high) = view.facts.port, view.facts.ephemeral
    if port and low <= port.port <= high and not port.reserved:
        yield Finding(
            "warn",
            f"port {port.port} is in the ephemeral range {low}-{high}: any program may be given it",
            "a master port outside that range",
            fixes.OTHER_PORT,
        )


def explained_by_interface(view: View) -> bool:
    """Whether the interface that the inventory names, and that it listened on, is why others do not get to
    it."""
    there = bool(view.host.ifname) and view.facts.ifname == view.host.ifname
    return there and any(True for _ in ifname(view))
