"""The application: every request goes through the same gates, in the same order, to the handler that the
table of routes (routes.py) names."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from anyio import to_thread
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route as Path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from launcher.errors import RingctlError
from launcher.serve import limits, pages
from launcher.serve.auth import Who
from launcher.serve.call import Answer, Call, Refused, refusal
from launcher.serve.routes import PATHS, ROUTES, Param, Route
from launcher.serve.schema import problem
from launcher.serve.service import Service

log = logging.getLogger("ringctl.serve")

CONTENT_SECURITY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
ASK_FOR_ONE = (
    "ringctl serve link prints a link that opens the page; ringctl serve token add NAME makes a token"
)


class Addressed:
    """Takes a request by a whole address, as a proxy is sent it, for one by path: what it names as the host
    goes before the header, as RFC 9112 has it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].lower().startswith(("http://", "https://")):
            scope = with_path(scope)
        await self.app(scope, receive, send)


def with_path(scope: Scope) -> Scope:
    _, _, rest = scope["raw_path"].decode("latin-1").partition("://")
    host, slash, path = rest.partition("/")
    headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
    headers.append((b"host", host.encode("latin-1")))
    path = slash + path or "/"
    return {**scope, "headers": headers, "path": unquote(path), "raw_path": path.encode("latin-1")}


def make_app(service: Service) -> Addressed:
    """All routes of the table, each path once."""
    paths: dict[str, dict[str, Route]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method] = route
    hands = limits.Hands()
    gates = [Path(path, Gate(service, by_method, hands)) for path, by_method in paths.items()]
    app = Starlette(routes=gates, exception_handlers={404: functools.partial(not_found, service)})
    app.router.redirect_slashes = False
    return Addressed(app)


async def not_found(service: Service, request: Request, _error: Exception) -> Response:
    """Said to those alone who would be told more elsewhere, and not without end."""
    try:
        refuse_two_lengths(request)
        refuse_strange_host(service, request)
        if not service.requests.of(client_of(request)).take():
            raise too_many()
    except Refused as refused:
        return response(refused.answer())
    return response(Refused(404, "there is nothing at this address", "GET /openapi.json lists all").answer())


def client_of(request: Request) -> str:
    return request.client.host if request.client else ""


class Gate:
    """One path: an ASGI application that lets through only what the table declares."""

    def __init__(self, service: Service, routes: Mapping[str, Route], hands: limits.Hands) -> None:
        self.service, self.routes, self.hands = service, routes, hands

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.AsyncExitStack() as held:  # until it is answered
            answer = await self.answered(Request(scope, receive), held)
            if answer is not None:
                held.callback(answer.done)
                await response(answer)(scope, receive, in_pieces(send))

    async def answered(self, request: Request, held: contextlib.AsyncExitStack) -> Answer | None:
        """Whatever happens; None only for a client that has gone."""
        try:
            return await self.answer(request, held)
        except ClientDisconnect:
            return None
        except (Refused, RingctlError) as error:
            return self.refused(error)
        except asyncio.CancelledError:
            if not self.service.ending:
                raise
            return Refused(503, "the service ends", "ask again when it is there again").answer()
        except Exception:
            log.exception("%r %r", request.method, request.url.path)
            fix = "its log says more: please report it"
            return Refused(500, "this is a mistake in ringctl", fix).answer()

    def refused(self, error: Refused | RingctlError) -> Answer:
        said = error if isinstance(error, Refused) else refusal(error)
        unnamed = self.service.unnamed
        return Refused(said.status, unnamed(said.error), unnamed(said.fix), said.headers).answer()

    async def answer(self, request: Request, held: contextlib.AsyncExitStack) -> Answer:
        refuse_two_lengths(request)
        refuse_strange_host(self.service, request)
        route = self.routes.get(request.method)
        if route is None:
            allowed = ", ".join(sorted(self.routes))
            raise Refused(
                405, f"{request.method[:20]} is not for this address", f"use {allowed}", {"Allow": allowed}
            )
        refuse_foreign_origin(self.service, request)
        refuse_strange_path(request)
        who = await self.who(request, route)
        query = read_query(route.query, request.query_params.multi_items())
        body, incoming = None, None
        if route.upload:
            most = limited(request, limits.MOST_CODE)
            incoming = in_time(request, most, limits.CODE_S)
        elif route.body is not None:
            body = await read_json(request, route.body, route.may_be_empty)
        call = Call(self.service, who, request.path_params, query, body, lower_headers(request), incoming)
        if inspect.iscoroutinefunction(route.handler):
            return as_answer(await route.handler(call))
        try:
            return await self.made(request, route, call, held)
        except limits.Busy as busy:
            fix = "ask again when they are answered"
            raise Refused(429, str(busy), fix, {"Retry-After": "2"}) from None

    async def made(
        self, request: Request, route: Route, call: Call, held: contextlib.AsyncExitStack
    ) -> Answer:
        """In a thread that is for it, and encoded there: the event loop would answer nobody meanwhile."""
        user = call.who.name if call.who else ""

        def work() -> Answer:
            return as_answer(route.handler(call)).encoded()

        if route.is_large(call.query):
            await held.enter_async_context(self.hands.turn(user))
            if await request.is_disconnected():  # while it waited
                raise ClientDisconnect
            return await self.hands.make(work)
        if not route.slow:
            return await to_thread.run_sync(work)
        if route.method != "GET":
            return await self.hands.change(user, work)
        held.enter_context(self.hands.looking(user))
        return await self.hands.read(work)

    async def who(self, request: Request, route: Route) -> Who | None:
        """Whoever asks, if they may; a client that guesses has to wait."""
        client, opens = client_of(request), route.handler is pages.login
        credentials = self.service.credentials
        shown = credentials.shown(lower_headers(request))
        if route.role is None and not shown:
            # Others at the same address, who may ask for anything else, keep nobody from signing in.
            if not (self.service.logins if opens else self.service.requests).of(client).take():
                raise too_many()
            return None
        who = credentials.remembered(shown) if shown else None
        if who is None and shown:
            who = await run_in_threadpool(credentials.look_up, shown)
        if who is None:
            if not (self.service.logins if opens else self.service.failures).of(client).take():
                raise too_many()  # which does not keep out whoever has a token, at the same address
            if route.role is None:
                return None
            said = "this token is not known here" if shown else "a token is needed"
            raise Refused(401, said, ASK_FOR_ONE, {"WWW-Authenticate": "Bearer"})
        if not self.service.requests.of(f"{who.name}@{client}").take():
            raise too_many()
        if route.role is None:
            return who
        if not who.may(route.role):
            raise Refused(403, f"this token may {who.role} only", f"it takes one that may {route.role}")
        if who.by_cookie:
            refuse_other_pages(request)
        return who


def as_answer(found: Any) -> Answer:
    return found if isinstance(found, Answer) else Answer(found)


def too_many() -> Refused:
    return Refused(429, "too many requests", "wait a moment", {"Retry-After": "2"})


# --- Where it comes from, where it goes ----------------------------------------------------------


def refuse_two_lengths(request: Request) -> None:
    """Whoever passed it on may have seen the end of the body elsewhere, and what follows as another request:
    nothing more is read from there."""
    if "content-length" in request.headers and "transfer-encoding" in request.headers:
        raise Refused(400, "the length of the body is said in two ways", "leave one", {"Connection": "close"})


def refuse_strange_host(service: Service, request: Request) -> None:
    """A page whose name was made to mean this machine sends that name."""
    hosts = request.headers.getlist("host")
    if len(hosts) != 1 or not service.names.knows_host(hosts[0]):
        raise Refused(
            421, "this service has another name", "open it by the address that `ringctl serve` printed"
        )


def refuse_foreign_origin(service: Service, request: Request) -> None:
    origin = request.headers.get("origin")
    if request.method != "GET" and origin is not None and not service.names.knows_origin(origin):
        raise Refused(403, "a page of another site may not ask this", "open the service's own page")


def refuse_other_pages(request: Request) -> None:
    """A cookie comes by itself. Browsers say whose page sent it along; whoever does not is none."""
    site = request.headers.get("sec-fetch-site", "same-origin")
    if site not in ("same-origin", "none"):
        raise Refused(403, "a page of another site may not ask this", "open the service's own page")
    if request.method != "GET" and "origin" not in request.headers:
        raise Refused(403, "a cookie alone may not change anything", "programs use a token")


def lower_headers(request: Request) -> dict[str, str]:
    found = {key.lower(): value for key, value in request.headers.items()}
    return {**found, "cookie": "; ".join(request.headers.getlist("cookie"))}  # a proxy may have split them


def refuse_strange_path(request: Request) -> None:
    """What stands in the places of a path is looked at before anybody uses it."""
    for name, value in request.path_params.items():
        if name in PATHS and problem(PATHS[name], value):
            raise Refused(404, "there is nothing at this address", "GET /openapi.json lists all")


# --- What it says --------------------------------------------------------------------------------


def read_query(params: Sequence[Param], given: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """The values of declared parameters, each once; others are refused."""
    known = {param.name: param for param in params}
    found: dict[str, Any] = {param.name: param.default for param in params}
    seen: set[str] = set()
    for name, text in given:
        if name not in known or name in seen:
            twice = "given twice" if name in seen else "no parameter of this address"
            raise Refused(400, f"{name[:40]!r}: {twice}", f"it takes {', '.join(known) or 'none'}")
        seen.add(name)
        found[name] = known[name].read(text)
    for param in params:
        if param.required and param.name not in seen:
            raise Refused(400, f"{param.name} is missing", f"add ?{param.name}=")
    return found


def limited(request: Request, most: int) -> int:
    """Refuse a body by its announced size, before any of it is read; the size that it may have."""
    length = request.headers.get("content-length")
    if length is not None and (not length.isdigit() or int(length) > most):
        raise too_large(most)
    return most


def too_large(most: int) -> Refused:
    return Refused(413, f"more than {most >> 20} MB", "send less", {"Connection": "close"})


async def in_time(request: Request, most: int, seconds: float) -> AsyncIterator[bytes]:
    """The pieces of a body, as long as they are not too much and come in time."""
    size, until, pieces = 0, asyncio.get_running_loop().time() + seconds, request.stream().__aiter__()
    while True:
        left = until - asyncio.get_running_loop().time()
        try:
            piece = await asyncio.wait_for(pieces.__anext__(), max(0.0, left))
        except StopAsyncIteration:
            return
        except (TimeoutError, asyncio.TimeoutError):
            raise Refused(
                408, f"the body did not come within {seconds:.0f} s", "", {"Connection": "close"}
            ) from None
        size += len(piece)
        if size > most:
            raise too_large(most)
        yield piece


async def read_json(request: Request, schema: Mapping[str, Any], may_be_empty: bool) -> Any:
    most = limited(request, limits.MOST_BODY)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    data = b"".join([piece async for piece in in_time(request, most, limits.BODY_S)])
    if not data and not kind and may_be_empty:
        data = b"{}"  # nothing to say
    elif kind != "application/json":
        # What a form of another site can send is none of these.
        raise Refused(415, "the body is not declared as JSON", "send Content-Type: application/json")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise Refused(400, "the body is not JSON", "") from None
    if why := problem(schema, value):
        raise Refused(400, why)
    return value


def in_pieces(send: Send) -> Send:
    """Sends one piece of a body after the other, each when the one before is gone: what a slow reader has not
    taken yet is here once, and not in the buffer of its connection as well."""

    async def sending(message: Message) -> None:
        body = message.get("body", b"")
        last = max(0, len(body) - 1) // limits.PIECE * limits.PIECE
        for at in range(0, last, limits.PIECE):
            await send({**message, "body": body[at : at + limits.PIECE], "more_body": True})
        await send({**message, "body": body[last:]} if last else message)

    return sending


def response(answer: Answer) -> Response:
    headers = {**HEADERS, **answer.headers}
    if answer.stream is not None:
        return StreamingResponse(answer.stream, answer.status, headers, answer.kind)
    return Response(answer.data(), answer.status, headers, answer.kind)
