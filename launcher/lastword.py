"""Pure: what a host's last event of an attempt is worth saying, and what is not recorded of one, to whoever
reads the log in whatever way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from launcher.model import Event
from launcher.told import unread, unwritten, words_of

LAST = "host_finished"
GAP = "part of its log is missing: a host that has it could not be heard or read"
NOT_RECORDED = "its log is not recorded"
LACKS = {"gap": GAP, "part": "only part of its log is recorded so far", "no": NOT_RECORDED}
ASK = (
    "look again in a moment, or ask its hosts: `ringctl logs RUN` without --server shows what they have, "
    "`ringctl report RUN` also records it"
)
MOST = 1000  # attempts: a service may tell whatever it likes
GOING_ON = ("queued", "starting", "running")


def said_last(events: Iterable[Event]) -> list[str]:
    """A sentence for each host that could not end all processes, and for each that has lost lines."""
    return [words for event in events if event.kind == LAST for words in sentences(event) if words]


def sentences(event: Event) -> tuple[str, str, str]:
    left = event.data.get("left")
    could_not = f"{event.host}: could not end processes {words_of(left)}" if left else ""
    return could_not, unwritten(event.host, event.data), unread(event.host, event.data)


def lacking(run: Mapping[str, Any]) -> dict[int, str]:
    """Of a run as `listing.detail` tells it: what to say of each attempt that is over and not recorded whole.
    Whoever has one that goes on recorded comes to its end, and of one that did not start there is no log."""
    told = {each["attempt"]: recorded(each) for each in run.get("attempts") or []}
    newest = run.get("attempt")
    if not told or not isinstance(newest, int):
        return {}
    # A recorder writes down one after the other, also those that did not start.
    found = {attempt: told.get(attempt, "no") for attempt in range(max(1, newest - MOST), newest + 1)}
    goes_on = run["state"] in GOING_ON
    if (goes_on and found[newest] != "gap") or (found[newest] == "no" and not has_begun(run)):
        found[newest] = "whole"
    return {attempt: LACKS[how] for attempt, how in found.items() if how in LACKS}


def recorded(attempt: Mapping[str, Any]) -> str:
    """An older ringctl tells of gaps alone."""
    return str(attempt.get("recorded") or ("gap" if attempt.get("gap") else "whole"))


def has_begun(run: Mapping[str, Any]) -> bool:
    """Whether a rank of its newest attempt was started, or may have been."""
    ranks = run.get("ranks") or []
    return any(rank.get("pid") is not None or rank.get("state") in ("running", "unknown") for rank in ranks)


def to_do(lacks: Iterable[str]) -> list[str]:
    """Of a gap whoever recorded it asks again by itself."""
    return [f"  to do: {ASK}"] if any(words != GAP for words in lacks) else []
