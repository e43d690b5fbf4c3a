"""Who may do what: tokens for programs, one-time links that become a browser's session. Only hashes of them
are kept, in the history's database; a secret is shown once, to whoever made it."""

from __future__ import annotations

import getpass
import hashlib
import hmac
import json
import re
import secrets
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from launcher import database, history
from launcher.errors import InputError

Role = Literal["read", "submit", "admin"]
ROLES: tuple[Role, ...] = ("read", "submit", "admin")  # each may do what those before it may
TOKEN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
LINK_S = 3600.0
SESSION_S = 30 * 86400.0
OWN = "(this service's own)"  # the token in serve.json; no user's can have this name


@dataclass(frozen=True)
class Who:
    """Somebody who has shown that they may."""

    name: str
    role: Role
    by_cookie: bool = False  # a browser sends it by itself, also for a page of somebody else's

    def may(self, role: Role) -> bool:
        return ROLES.index(self.role) >= ROLES.index(role)


def user_name() -> str:
    """The user whose service this is."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user that the system has no name for
        return "me"


def hashed(secret: str) -> str:
    """Secrets are 256 random bits: nobody finds one from this."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


# --- Tokens --------------------------------------------------------------------------------------


def checked_name(name: str) -> str:
    if not TOKEN_NAME.fullmatch(name):
        raise InputError(f"{name!r} is no name for a token: write letters, digits, '.', '_', '-' and '@'")
    return name


def add_token(name: str, role: Role) -> str:
    """A new one, told this once."""
    if name != OWN:
        checked_name(name)
    secret = f"ringctl_{secrets.token_urlsafe(32)}"
    row = (name, hashed(secret), role, time.time())

    def work(db: sqlite3.Connection) -> None:
        if name == OWN:
            db.execute("DELETE FROM tokens WHERE name = ?", (name,))
        if db.execute("SELECT 1 FROM tokens WHERE name = ?", (name,)).fetchone():
            raise InputError(
                f"there is a token {name!r} already",
                fix=f"ringctl serve token remove {name}, or another name",
            )
        db.execute("INSERT INTO tokens(name, hash, role, created) VALUES (?, ?, ?, ?)", row)

    database.write(history.file(), work)
    return secret


def own_token() -> sqlite3.Row | None:
    """The row of the service's own."""
    return next((row for row in token_rows() if row["name"] == OWN), None)


def put_back_own(row: sqlite3.Row) -> bool:
    """Whether it had gone, and is there again: a damaged database is put aside, with all that was in it."""
    if own_token() is not None:
        return False
    sql = "INSERT OR IGNORE INTO tokens(name, hash, role, created) VALUES (?, ?, ?, ?)"
    values = (row["name"], row["hash"], row["role"], row["created"])
    return database.write(history.file(), lambda db: db.execute(sql, values).rowcount) > 0


def remove_token(name: str) -> None:
    """And whatever else lets them in: links that were not opened yet, browsers that are signed in."""

    def work(db: sqlite3.Connection) -> int:
        opened = "SELECT key, data FROM notes WHERE key LIKE 'login:%' OR key LIKE 'session:%'"
        theirs = [(row["key"],) for row in db.execute(opened) if json.loads(row["data"])["user"] == name]
        db.executemany("DELETE FROM notes WHERE key = ?", theirs)
        return db.execute("DELETE FROM tokens WHERE name = ?", (name,)).rowcount + len(theirs)

    if not database.write(history.file(), work):
        raise InputError(f"there is no token {name!r}", fix="ringctl serve token list")


def tokens() -> list[dict[str, Any]]:
    """All but the service's own; what they are made of is not kept."""
    rows = token_rows()
    keys = ("name", "role", "created", "used")
    return [{key: row[key] for key in keys} for row in rows if row["name"] != OWN]


def token_rows() -> list[sqlite3.Row]:
    def work(db: sqlite3.Connection) -> list[sqlite3.Row]:
        return db.execute("SELECT * FROM tokens ORDER BY created").fetchall()

    return database.read(history.file(), work, [])


def who_bears(secret: str) -> Who | None:
    """Whose token this is."""
    mine, now = hashed(secret), time.time()
    found = None
    for row in token_rows():  # all of them: how long it takes tells nothing
        if hmac.compare_digest(row["hash"], mine):
            found = row
    if found is None:
        return None
    if found["name"] != OWN and now - (found["used"] or 0.0) > 60.0:
        sql = "UPDATE tokens SET used = ? WHERE name = ?"
        database.write(history.file(), lambda db: db.execute(sql, (now, found["name"])), safe=False)
    return Who(user_name() if found["name"] == OWN else found["name"], found["role"])


# --- Links and sessions --------------------------------------------------------------------------


def make_key(role: Role, user: str) -> str:
    """The key of a link that opens the page once."""
    key = secrets.token_urlsafe(32)
    keep("login", key, {"role": role, "user": user})
    return key


def redeem(key: str) -> str | None:
    """The secret of a new session, for a link's key that nobody has used yet."""
    name, now = f"login:{hashed(key)}", time.time()

    def work(db: sqlite3.Connection) -> str | None:
        row = db.execute("SELECT time, data FROM notes WHERE key = ?", (name,)).fetchone()
        db.execute("DELETE FROM notes WHERE key = ?", (name,))
        db.execute("DELETE FROM notes WHERE key LIKE 'login:%' AND time < ?", (now - LINK_S,))
        db.execute("DELETE FROM notes WHERE key LIKE 'session:%' AND time < ?", (now - SESSION_S,))
        return row["data"] if row and row["time"] > now - LINK_S else None

    data = database.write(history.file(), work)
    if data is None:
        return None
    secret = secrets.token_urlsafe(32)
    keep("session", secret, json.loads(data))
    return secret


def keep(kind: str, secret: str, data: dict[str, str]) -> None:
    row = (f"{kind}:{hashed(secret)}", time.time(), json.dumps(data))
    sql = "INSERT INTO notes(key, time, data) VALUES (?, ?, ?)"
    database.write(history.file(), lambda db: db.execute(sql, row))


def who_has_session(secret: str) -> Who | None:
    key, sql = f"session:{hashed(secret)}", "SELECT time, data FROM notes WHERE key = ?"
    row = database.read(history.file(), lambda db: db.execute(sql, (key,)).fetchone(), None)
    if row is None or row["time"] < time.time() - SESSION_S:
        return None
    data = json.loads(row["data"])
    return Who(data["user"], data["role"], by_cookie=True)


def end_session(secret: str) -> None:
    key, sql = f"session:{hashed(secret)}", "DELETE FROM notes WHERE key = ?"
    database.write(history.file(), lambda db: db.execute(sql, (key,)))


def read_cookies(header: str) -> dict[str, str]:
    """All of them, whatever is in those of other programs, which a browser sends along: it knows no ports."""
    pairs = (part.partition("=") for part in header.split(";"))
    return {name.strip(): value.strip() for name, _, value in pairs}


class Credentials:
    """Who a request is from. What was found is believed for a moment, for a page asks often."""

    FOR_S = 2.0
    MOST = 1000

    def __init__(self, cookie: str) -> None:
        self.cookie = cookie  # its name
        self._known: dict[tuple[str, str], tuple[float, Who]] = {}

    def shown(self, headers: Mapping[str, str]) -> tuple[str, str] | None:
        """(kind, secret) that a request carries; a token goes before a cookie."""
        authorization = headers.get("authorization", "")
        scheme, _, token = authorization.partition(" ")
        if authorization:
            return ("bearer", token.strip()) if scheme.lower() == "bearer" else ("bearer", "")
        cookies = read_cookies(headers.get("cookie", ""))
        return ("session", cookies[self.cookie]) if self.cookie in cookies else None

    def remembered(self, shown: tuple[str, str]) -> Who | None:
        until, who = self._known.get((shown[0], hashed(shown[1])), (0.0, None))
        return who if until > time.monotonic() else None

    def look_up(self, shown: tuple[str, str]) -> Who | None:
        """Asks the database; None if nobody has that."""
        kind, secret = shown
        who = who_bears(secret) if kind == "bearer" else who_has_session(secret)
        if who is not None:
            if len(self._known) >= self.MOST:
                self._known.clear()
            self._known[kind, hashed(secret)] = (time.monotonic() + self.FOR_S, who)
        return who

    def sign_out(self, secret: str) -> None:
        """A browser's session is over at once, here and in the database."""
        end_session(secret)
        self._known.pop(("session", hashed(secret)), None)
