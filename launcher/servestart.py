"""Before the service runs: what it may listen on, which hosts are its own, that there is only one of it."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import click

from launcher import ask, client, filelock, history
from launcher.errors import InputError

if TYPE_CHECKING:
    from launcher.model import Inventory

MISSING = "ringctl serve needs starlette and uvicorn"


@dataclass(frozen=True)
class Options:
    """What `ringctl serve` was told."""

    where: ask.Where
    port: int
    bind: str
    tls_cert: str = ""
    tls_key: str = ""
    proxy: str = ""
    names: tuple[str, ...] = ()

    @property
    def scheme(self) -> str:
        return "https" if self.tls_cert else "http"


def absolute(where: Mapping[str, str | None]) -> ask.Where:
    """The same for whoever is in another folder."""
    files = ("hosts_file", "hostfile")
    return ask.Where(
        **{key: os.path.abspath(value) if value and key in files else value for key, value in where.items()}
    )


def start(options: Options) -> int:
    try:
        from launcher.serve import auth, server
        from launcher.serve.service import Settings
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] not in ("starlette", "uvicorn", "anyio", "h11"):
            raise
        raise InputError(MISSING, fix="pip install 'ringctl[serve]'") from None
    from launcher.serve.origin import names_of

    where, inventory = hosts_of(options.where)
    refuse_exposed(options)
    with alone():
        listener = server.listen(options.bind, options.port)
        bound, port = listener.getsockname()[:2]
        names = names_of(options.scheme, options.bind, port, known_names(options), options.proxy)
        secure = options.scheme == "https" or options.proxy.startswith("https:")
        settings = Settings(where, inventory, names, f"ringctl_{port}", secure)
        url, page = own_url(options, bound, port), page_url(options, port)
        token = auth.add_token(auth.OWN, "admin")
        history.write_as(client.Own(url, token, os.getpid(), page), client.own_file())
        if sys.stdout.isatty():
            to_open = f"open {page}/login?key={auth.make_key('admin', auth.user_name())}"
        else:  # a journal or a file keeps what is printed, and whoever reads it there would be let in
            to_open = f"ringctl serve link prints a link that opens {page}"
        listening = server.Listening(options.bind, port, options.tls_cert, options.tls_key)

        def ready() -> None:
            slots = sum(host.slots for host in inventory.hosts)
            click.echo(f"serving {slots} slots of {inventory.source or 'this machine'} at {url}")
            click.echo(to_open)
            sys.stdout.flush()

        try:
            server.run(settings, listening, listener, ready)
        finally:
            client.own_file().unlink(missing_ok=True)
    return 0


def hosts_of(where: ask.Where) -> tuple[ask.Where, Inventory]:
    """The inventory, and the file that it was found in."""
    from pathlib import Path

    from launcher import inventory as inventories

    if not (where.hosts_file or where.host_list or where.hostfile):
        found = inventories.find(None, os.environ, Path())
        if found is not None:
            where = ask.Where(str(found.absolute()), None, None, where.include, where.exclude)
    return where, ask.inventory(where, local=False, world=None)


def refuse_exposed(options: Options) -> None:
    from launcher.serve.origin import is_loopback, proxy_address

    if bool(options.tls_cert) != bool(options.tls_key):
        raise InputError("--tls-cert and --tls-key go together; write both")
    if options.proxy:
        proxy_address(options.proxy)
    if is_loopback(options.bind) or options.tls_cert or options.proxy:
        return
    raise InputError(
        f"--bind {options.bind}: everybody in that network would see tokens and logs",
        fix="add --tls-cert and --tls-key, or --behind-proxy URL, or forward the port: "
        f"ssh -L {options.port}:127.0.0.1:{options.port} SERVER",
    )


def known_names(options: Options) -> tuple[str, ...]:
    """What others call this machine, where they may reach it."""
    from launcher.serve.origin import is_loopback

    if is_loopback(options.bind):
        return options.names
    return (*options.names, socket.gethostname(), socket.getfqdn())


def page_url(options: Options, port: int) -> str:
    """What users open: by the proxy, by the first name that was given, by the address that it listens at."""
    from launcher.serve.origin import bracketed, is_wildcard

    name = options.names[0] if options.names else "127.0.0.1" if is_wildcard(options.bind) else options.bind
    return options.proxy.rstrip("/") or f"{options.scheme}://{bracketed(name)}:{port}"


def own_url(options: Options, bound: str, port: int) -> str:
    """What this machine's own commands ask. A certificate is for a name. In the clear it is the number of a
    loopback address, which no name service can make another; what does not listen there is asked by its
    proxy."""
    from launcher.serve.origin import bracketed, is_loopback, is_wildcard

    if options.scheme == "https":
        return page_url(replace(options, proxy=""), port)
    here = "127.0.0.1" if is_wildcard(bound) else bound
    return f"http://{bracketed(here)}:{port}" if is_loopback(here) else page_url(options, port)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Two services would start the same runs."""
    path = client.lock_file()
    history.make_folder(path.parent)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not filelock.lock_soon(descriptor):
        os.close(descriptor)
        own = client.own()
        raise InputError(
            f"your service runs already{f' at {own.url}' if own else ''}",
            fix="ringctl serve link opens its page",
        )
    client.own_file().unlink(missing_ok=True)  # of one that was killed: its port may be somebody else's now
    try:
        yield
    finally:
        os.close(descriptor)
