"""Pure: what a host's last event of an attempt is worth saying, to whoever reads the log in whatever way."""

from __future__ import annotations

from collections.abc import Iterable

from launcher.model import Event
from launcher.told import unwritten, words_of

LAST = "host_finished"
GAP = "part of its log is missing: a host that has it could not be heard or read"  # of an attempt, as recorded


def said_last(events: Iterable[Event]) -> list[str]:
    """A sentence for each host that could not end all processes, and for each that has lost lines."""
    return [words for event in events if event.kind == LAST for words in sentences(event) if words]


def sentences(event: Event) -> tuple[str, str]:
    left = event.data.get("left")
    could_not = f"{event.host}: could not end processes {words_of(left)}" if left else ""
    return could_not, unwritten(event.host, event.data)
