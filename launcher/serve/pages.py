"""The page and its files, all read once from the package; and the way in by a one-time link."""

from __future__ import annotations

import functools
import gzip
import hashlib
import html
from dataclasses import dataclass
from pathlib import Path

from launcher.serve import auth
from launcher.serve.auth import SESSION_S
from launcher.serve.call import Answer, Call, Refused

KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".json": "application/json",
}


LINK = "Type <code>ringctl serve link</code> and open what it prints."
HINT_SECURITY = (
    "default-src 'none'; script-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)


@dataclass(frozen=True)
class Asset:
    """One file of the page."""

    data: bytes
    packed: bytes
    kind: str
    tag: str


@functools.cache
def assets() -> dict[str, Asset]:
    """By their paths below page/: what is not here cannot be asked for, whatever it is called."""
    root = Path(__file__).parent / "page"
    files = [path for path in root.rglob("*") if path.is_file() and path.suffix in KINDS]
    return {str(path.relative_to(root)): read(path) for path in files}


def read(path: Path) -> Asset:
    data = path.read_bytes()
    tag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
    return Asset(data, gzip.compress(data, 9), KINDS[path.suffix], tag)


def asset(call: Call) -> Answer:
    found = assets().get(call.path["file"])
    if found is None:
        raise Refused(404, "there is no such file")
    return served(call, found)


def served(call: Call, found: Asset) -> Answer:
    headers = {"ETag": found.tag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
    if call.headers.get("if-none-match") == found.tag:
        return Answer(b"", 304, found.kind, headers)
    if "gzip" in call.headers.get("accept-encoding", "") and len(found.packed) < len(found.data):
        return Answer(found.packed, 200, found.kind, {**headers, "Content-Encoding": "gzip"})
    return Answer(found.data, 200, found.kind, headers)


def index(call: Call) -> Answer:
    found = assets().get("index.html")
    if call.who is None:
        return not_signed_in(call)
    return served(call, found) if found else hint("The page is not part of this installation.")


def not_signed_in(call: Call) -> Answer:
    """Perhaps somebody is, and has followed a link from elsewhere: with that a browser sends no cookie of
    this kind, but it does with what our own pages ask for. A form keeps the place in the address behind the
    #, which no server is told; only if it leads to another address than this one, so the number changes.
    Where somebody is signed in the script, which nobody else gets, sends the form by itself, once."""
    other = 1 - (call.query["again"] or 0)
    from_elsewhere = call.headers.get("sec-fetch-site") == "cross-site"
    script = '<script src="/page/again.js" defer></script>' if from_elsewhere else ""
    again = f'<form><input type="hidden" name="again" value="{other}"><button>Try again</button></form>'
    return hint("You are not signed in here.", LINK, again + script, 401)


def hint(what: str, then: str = "", again: str = '<a href="/">Try again</a>', status: int = 404) -> Answer:
    text = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>ringctl</title>'
        f"<p>{html.escape(what)}</p><p>{then}</p>{again}</html>"
    )
    return Answer(text, status, "text/html; charset=utf-8", {"Content-Security-Policy": HINT_SECURITY})


def login(call: Call) -> Answer:
    """A key that nobody has used becomes a cookie of this browser."""
    secret = auth.redeem(call.query["key"])
    if secret is None:
        return hint("This link was used already, or is too old.", LINK, status=401)
    return Answer(b"", 303, "text/plain", {"Location": "/", "Set-Cookie": cookie(call, secret, SESSION_S)})


def cookie(call: Call, secret: str, seconds: float) -> str:
    settings = call.service.settings
    text = f"{settings.cookie}={secret}; Path=/; HttpOnly; SameSite=Strict; Max-Age={int(seconds)}"
    return f"{text}; Secure" if settings.secure else text


def logout(call: Call) -> Answer:
    """This browser's session is over, here and there; its other cookies and others' sessions stay."""
    shown = call.service.shown(call)
    if shown is None or shown[0] != "session":
        raise Refused(409, "only a browser signs out", "ringctl serve token remove NAME voids a token")
    call.service.credentials.sign_out(shown[1])
    return Answer({"signed_out": True}, headers={"Set-Cookie": cookie(call, "", 0)})
