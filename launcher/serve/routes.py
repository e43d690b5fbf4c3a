"""Every address of the service, in one table: who may ask what, with which parameters, and what comes back.
The application and the OpenAPI document are made from it; what is not in it is denied."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher import __version__
from launcher.lastword import LAST
from launcher.serve import api, pages, stream
from launcher.serve.auth import Role
from launcher.serve.call import Call, Refused
from launcher.serve.schema import KIND_WORDS, Schema, problem, ref
from launcher.serve.shapes import DIGEST, NOTHING, PRUNE, RESTART, RUN_ID, SHAPES, STATES, STOP, SUBMISSION

EVENTS, HTML, PLAIN = "text/event-stream", "text/html", "text/plain"


@dataclass(frozen=True)
class Param:
    """One parameter of a query."""

    name: str
    schema: Schema
    default: Any = None
    required: bool = False

    def read(self, text: str) -> Any:
        value: Any = text
        if self.schema["type"] == "integer":
            if not re.fullmatch(r"-?[0-9]{1,15}", text):
                raise Refused(400, f"{self.name}: expected {KIND_WORDS['integer']}")
            value = int(text)
        if why := problem(self.schema, value, self.name):
            raise Refused(400, why)
        return value


@dataclass(frozen=True)
class Route:
    """One method of one path."""

    method: str
    path: str
    handler: Callable[[Call], Any]
    role: Role | None  # None: nobody need show who they are
    summary: str
    answer: str = ""  # the name of a shape
    kind: str = "application/json"
    status: int = 200
    query: Sequence[Param] = ()
    body: Schema | None = None
    may_be_empty: bool = True  # that body
    slow: bool = False  # it waits for hosts, or reads much
    large: bool = False  # its answer may be: there are few of these at a time
    many: int = 0  # or it may be if more than so many rows are wanted
    upload: bool = False  # its body is bytes, which the handler reads by itself
    errors: Sequence[int] = ()  # besides what every route may answer

    def is_large(self, query: Mapping[str, Any]) -> bool:
        return self.large or bool(self.many and query["limit"] > self.many)


def whole(name: str, low: int, high: int, default: int | None = None) -> Param:
    return Param(name, {"type": "integer", "minimum": low, "maximum": high}, default)


def text(name: str, most: int = 200, pattern: str = "", default: str = "", required: bool = False) -> Param:
    schema: dict[str, Any] = {"type": "string", "maxLength": most}
    return Param(name, {**schema, "pattern": pattern} if pattern else schema, default, required)


MOST_ID = 10**15 - 1
SOME_STATES = rf"^({'|'.join(STATES)})(,({'|'.join(STATES)}))*$"
OF_RUNS = (
    whole("limit", 1, 1000, 50),
    text("before", 64, RUN_ID),
    text("state", 200, SOME_STATES),
    text("search"),
)
OF_LOG = (
    whole("after", 0, MOST_ID),
    whole("before", 0, MOST_ID),
    whole("limit", 1, 5000, 500),
    whole("rank", 0, 10**6),
    text("host"),
    whole("since", 0, MOST_ID, 0),
    Param("stream", {"type": "string", "enum": ["out", "err"]}),
    text("search"),
)
OF_EVENTS = (
    whole("after", 0, MOST_ID, 0),
    whole("limit", 1, 5000, 1000),
    Param("kind", {"type": "string", "enum": [LAST]}),
)
TWO_OR_MORE = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}(,[A-Za-z0-9][A-Za-z0-9._-]{0,63}){0,15}$"
FORMAT = Param("format", {"type": "string", "enum": ["html", "markdown", "json"]}, "html")
RUN = "/api/runs/{run}"

# fmt: off
ROUTES: tuple[Route, ...] = (
    Route("GET", "/", pages.index, None, "The page", kind=HTML, query=(whole("again", 0, 1),),
          errors=(401,)),
    Route("GET", "/page/{file:path}", pages.asset, "read", "A file of the page", kind="*/*",
          errors=(304, 404)),
    Route("GET", "/login", pages.login, None, "Open the page by a one-time link", kind=HTML, status=303,
          query=(text("key", required=True),), errors=(401,)),
    Route("POST", "/logout", pages.logout, "read", "End this browser's session", "SignedOut", body=NOTHING,
          errors=(409,)),
    Route("GET", "/healthz", api.health, None, "Whether the service answers", "Health"),
    Route("GET", "/openapi.json", lambda _call: document(), "read", "This document"),
    Route("GET", "/metrics", api.prometheus, "read", "For Prometheus", kind=PLAIN, large=True),

    Route("GET", "/api/me", api.me, "read", "Who asks, and what they may do", "Me"),
    Route("GET", "/api/runs", api.runs, "read", "Runs, newest first", "Runs", query=OF_RUNS, many=100),
    Route("GET", "/api/find", api.find, "read", "The run that an id, its beginning or a name means", "RunRow",
          query=(Param("run", {"type": "string", "maxLength": 200}),), errors=(404,)),
    Route("GET", RUN, api.run, "read", "One run", "RunDetail", errors=(404,)),
    Route("GET", RUN + "/metrics", api.metrics, "read", "Curves, thinned to some points", "Metrics",
          query=(whole("points", 2, 5000, 400),), large=True, errors=(404,)),
    Route("GET", RUN + "/log", api.log, "read", "Lines of its log", "Log", query=OF_LOG, large=True,
          errors=(404,)),
    Route("GET", RUN + "/events", api.events, "read", "All that was recorded, in order", "Events",
          query=OF_EVENTS, large=True, errors=(404,)),
    Route("GET", RUN + "/stream", stream.of_run, "read", "Lines, metrics and states as they come",
          kind=EVENTS, query=(whole("after", 0, MOST_ID),), errors=(404, 503)),
    Route("GET", RUN + "/checkpoints", api.checkpoints, "read", "What it has saved", "Checkpoints",
          slow=True, errors=(404, 409, 502)),
    Route("GET", RUN + "/submission", api.submission, "read", "What was handed in, without secrets",
          "Submission", errors=(404, 409)),
    Route("GET", RUN + "/report", api.report, "read", "One file about it", kind="*/*", query=(FORMAT,),
          slow=True, errors=(404,)),
    Route("POST", RUN + "/stop", api.stop, "submit", "End it everywhere", "RunRow", body=STOP,
          slow=True, errors=(404, 409, 502)),
    Route("POST", RUN + "/restart", api.restart, "submit", "Start it again from its checkpoint", "RunRow",
          body=RESTART, slow=True, errors=(404, 409, 502)),
    Route("POST", RUN + "/cancel", api.cancel, "submit", "Take it from the queue", "RunRow", body=NOTHING,
          slow=True, errors=(404, 409)),
    Route("GET", "/api/stream", stream.of_all, "read", "Runs and hosts as they change", kind=EVENTS,
          query=(whole("after", 0, MOST_ID),), errors=(503,)),
    Route("POST", "/api/prune", api.prune, "admin", "Forget runs that are over", "Pruned", body=PRUNE,
          may_be_empty=False, slow=True, errors=(409,)),
    Route("GET", "/api/queue", api.queue, "read", "Runs that wait, in order, and why", "Queue"),
    Route("POST", "/api/submit", api.submit, "submit", "Hand in a run", "RunRow", status=201, body=SUBMISSION,
          may_be_empty=False, errors=(409,)),
    Route("GET", "/api/code/{digest}", api.have_code, "submit", "Whether a snapshot is here", "Have"),
    Route("PUT", "/api/code/{digest}", api.put_code, "submit", "A snapshot of code as a tar, packed or not",
          "Have", upload=True, errors=(409,)),
    Route("GET", "/api/hosts", api.hosts, "read", "Slots, load, memory and disk of the hosts", "Hosts"),
    Route("GET", "/api/preflight", api.preflight, "read", "What the last one found", "Preflight"),
    Route("POST", "/api/preflight", api.start_preflight, "submit", "Check all hosts now", "Preflight",
          status=202, body=NOTHING, errors=(409,)),
    Route("GET", "/api/compare", api.compare, "read", "What differs between runs", "Compared",
          query=(text("runs", 1100, TWO_OR_MORE, required=True),), errors=(404,)),
)
# fmt: on


# --- The document --------------------------------------------------------------------------------


def document() -> dict[str, Any]:
    """OpenAPI 3.1, of the table above."""
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        path = re.sub(r"\{(\w+):\w+\}", r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "ringctl", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": SHAPES,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


PATHS = {"run": {"type": "string", "pattern": RUN_ID}, "digest": {"type": "string", "pattern": DIGEST}}


def operation(route: Route) -> dict[str, Any]:
    named = re.findall(r"\{(\w+)(?::\w+)?\}", route.path)
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": PATHS.get(name, {"type": "string"})}
        for name in named
    ] + [
        {"name": param.name, "in": "query", "required": param.required, "schema": param.schema}
        for param in route.query
    ]
    about: dict[str, Any] = {
        "summary": route.summary,
        "operationId": operation_id(route),
        "parameters": parameters,
        "responses": {str(route.status): good(route), **bad(route)},
        "security": [{"token": []}] if route.role else [],
    }
    if route.role:
        about["description"] = f"For tokens that may {route.role}."
    if route.upload:
        binary = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
        about["requestBody"] = {"required": True, "content": binary}
    elif route.body is not None:
        about["requestBody"] = {
            "required": not route.may_be_empty,
            "content": {"application/json": {"schema": route.body}},
        }
    return about


def operation_id(route: Route) -> str:
    words = re.findall(r"\w+", re.sub(r":\w+", "", route.path)) or ["page"]
    return "_".join([route.method.lower(), *words])


def good(route: Route) -> dict[str, Any]:
    schema = ref(route.answer) if route.answer else {}
    if route.status == 303:
        return {"description": "the page"}
    return {"description": route.summary, "content": {route.kind: {"schema": schema} if schema else {}}}


def bad(route: Route) -> dict[str, Any]:
    """What goes wrong for all routes, and for this one."""
    codes = {400, 421, 429, *route.errors}
    codes |= {401, 403} if route.role else set()
    codes |= {408, 413, 415} if route.body is not None or route.upload else set()
    codes |= {404} if "{" in route.path else set()
    codes |= {403} if route.method != "GET" else set()
    said = {"application/json": {"schema": ref("Error")}}
    if route.kind == HTML:
        said[HTML] = {}
    return {str(code): {"description": WORDS[code], "content": said} for code in sorted(codes)}


WORDS = {
    304: "the file that you have is the newest",
    400: "what was asked makes no sense",
    401: "no token, or one that is not known",
    403: "the token may not do this, or a foreign page asked",
    404: "there is no such thing",
    408: "the body did not come in time",
    409: "not as things are now",
    413: "too large",
    415: "not JSON",
    421: "the service has another name",
    429: "too many requests",
    502: "a host could not be asked",
    503: "too many streams",
}
