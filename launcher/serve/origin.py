"""Pure: whom a request is addressed to, and which page it comes from. A page of somebody else's must not
reach the service through a name that it made mean 127.0.0.1, nor by a form that it sends here."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from launcher.errors import InputError

HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9.-]+)(?::([0-9]{1,5}))?", re.ASCII)
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Address:
    """Where somebody says a request goes, or comes from."""

    host: str  # in lower case; IPv6 in brackets, in its shortest form
    port: int


def parse_host(text: str, scheme: str) -> Address | None:
    """A Host header; None for what is none."""
    match = HOST.fullmatch(text.lower())
    if match is None:
        return None
    port = int(match[2]) if match[2] else DEFAULT_PORTS[scheme]
    host = match[1]
    if host.startswith("["):
        try:
            host = f"[{ipaddress.IPv6Address(host[1:-1])}]"
        except ValueError:
            return None
    return Address(host, port) if 0 < port < 65536 else None


@dataclass(frozen=True)
class Names:
    """What the service is called: (scheme, address) of every way to it that it knows of."""

    known: frozenset[tuple[str, Address]]

    def knows_host(self, header: str) -> bool:
        """Whether a Host header means us, whichever scheme a proxy before us speaks."""
        return any(parse_host(header, scheme) == address for scheme, address in self.known)

    def knows_origin(self, header: str) -> bool:
        scheme, separator, rest = header.partition("://")
        if not separator or scheme not in DEFAULT_PORTS:
            return False  # also "null", which a sandboxed frame sends
        return (scheme, parse_host(rest, scheme)) in self.known


def names_of(scheme: str, bind: str, port: int, more: Iterable[str] = (), proxy: str = "") -> Names:
    """Of a service that listens at `bind`; `more` are names that users reach it by, `proxy` the URL of what
    stands before it."""
    hosts = {*LOOPBACK} if is_loopback(bind) or is_wildcard(bind) else set()
    hosts |= {bracketed(name.lower()) for name in (*more, *(() if is_wildcard(bind) else (bind,)))}
    known = {(scheme, address) for host in hosts if (address := parse_host(f"{host}:{port}", scheme))}
    if proxy:
        known.add(proxy_address(proxy))
    return Names(frozenset(known))


def proxy_address(url: str) -> tuple[str, Address]:
    parts = urlsplit(url)
    address = parse_host(parts.netloc, parts.scheme) if parts.scheme in DEFAULT_PORTS else None
    if address is None or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise InputError(f"--behind-proxy {url}: write the URL that users open, such as https://runs.lab.org")
    return parts.scheme, address


def bracketed(host: str) -> str:
    try:
        return f"[{ipaddress.IPv6Address(host)}]"
    except ValueError:
        return host


def is_loopback(bind: str) -> bool:
    try:
        return ipaddress.ip_address(bind).is_loopback
    except ValueError:
        return bind == "localhost"


def is_wildcard(bind: str) -> bool:
    try:
        return ipaddress.ip_address(bind).is_unspecified
    except ValueError:
        return False
