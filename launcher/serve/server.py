"""Starts the service and lets it listen: uvicorn, with limits on what a client may do to it."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import signal
import socket
import sqlite3
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

import uvicorn

from launcher import pruning
from launcher.errors import InputError, RingctlError
from launcher.serve import auth, children, limits
from launcher.serve.app import make_app
from launcher.serve.service import Service, Settings
from launcher.serve.stream import Live

log = logging.getLogger("ringctl.serve")

OWN_S = 2.0  # how often it looks whether its own token is still known
LOST = (
    "the database was damaged and begun anew: tokens, links, the queue and earlier runs are gone from it; "
    "what was there is beside it. ringctl serve link opens the page, ringctl serve token add makes tokens"
)
END_S = 3  # for requests that are being answered when it is to end


@dataclass(frozen=True)
class Listening:
    """Where the service listens, and what for."""

    bind: str
    port: int
    tls_cert: str = ""
    tls_key: str = ""

    @property
    def scheme(self) -> str:
        return "https" if self.tls_cert else "http"


class Server(uvicorn.Server):
    """Ends streams first: they would go on for ever."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self.service.ending = True
        self.service.live.close_soon()


def listen(bind: str, port: int) -> limits.Listener:
    """The socket; its port may have been chosen by the kernel."""
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    listener = limits.Listener(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((bind, port))
    except OSError as error:
        listener.close()
        raise InputError(
            f"cannot listen at {bind} port {port}: {error.strerror}", fix="name another: --port N"
        ) from None
    return listener


def config_for(app: object, listening: Listening, listener: limits.Listener) -> uvicorn.Config:
    """Raises InputError for TLS files that are none."""
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]  # Starlette is an ASGI application
        http=functools.partial(limits.PatientProtocol, listener),  # type: ignore[arg-type]  # what makes one
        ws="none",
        lifespan="off",
        loop="asyncio",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=END_S,
        h11_max_incomplete_event_size=limits.MOST_HEAD,
        ssl_certfile=listening.tls_cert or None,
        ssl_keyfile=listening.tls_key or None,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise InputError(f"--tls-cert {listening.tls_cert}: {error}") from None
    if config.ssl is not None:
        config.ssl.minimum_version = ssl.TLSVersion.TLSv1_2
    return config


async def serve(
    settings: Settings, listening: Listening, listener: limits.Listener, ready: Callable[[], None]
) -> None:
    """Until it is told to end. `ready` is called once it answers."""
    service = Service(settings)
    service.live = Live(service)
    server = Server(config_for(make_app(service), listening, listener), service)
    own = auth.own_token()
    sweep()
    service.keeper.start()
    service.check_first()
    beside = [asyncio.create_task(tell(server, ready)), asyncio.create_task(keep_own_token(own))]
    try:
        await server.serve(sockets=[listener])
    finally:
        for task in beside:
            task.cancel()
        service.live.close()
        children.end_looks()
        await asyncio.to_thread(service.keeper.stop)


def sweep() -> None:
    """What was left behind when we were killed. Nobody else hands in runs or code meanwhile."""
    try:
        pruning.sweep(0.0)
    except (RingctlError, OSError) as error:
        log.warning("what belongs to no run could not be removed: %s", error)


async def tell(server: Server, ready: Callable[[], None]) -> None:
    while not server.started:
        await asyncio.sleep(0.01)
    ready()


async def keep_own_token(own: sqlite3.Row | None) -> None:
    """Whoever has this account gets in also after the database was damaged, and begun anew by whoever saw it
    first: else the service would be there, and closed to all. So its own token is read before it says that it
    is there."""
    while own is not None:
        await asyncio.sleep(OWN_S)
        try:
            if await asyncio.to_thread(auth.put_back_own, own):
                log.error("%s", LOST)
        except (RingctlError, sqlite3.Error) as error:  # such as a full disk: the next look may do better
            log.error("its own token: %s", error)


def run(
    settings: Settings, listening: Listening, listener: limits.Listener, ready: Callable[[], None]
) -> None:
    """Until Ctrl-C or SIGTERM."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(
            number, lambda *_: None
        )  # uvicorn raises it again when it has ended: we end by ourselves
    gc.freeze()  # what is here stays: the collector need not go through it whenever many lines come
    asyncio.run(serve(settings, listening, listener, ready))
