"""A run in one file, to keep beside a paper or to send: what was asked for and what came out.

`collect` gives the data, which is also what `ringctl report --json` prints (docs/report.md); `render_html`
and `render_markdown` are pure.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from launcher import __version__
from launcher.errors import InputError, RingctlError
from launcher.reporthtml import content_security_policy, render_html
from launcher.reporttext import render_markdown

if TYPE_CHECKING:
    from launcher.recorder import Batch

__all__ = ["collect", "content_security_policy", "record_now", "render_html", "render_markdown"]

VERSION = 1  # of the data
POINTS = 600  # of a curve
LAST_LINES = 300
QUIET_S = 2.0  # whoever hears nothing for so long has heard what there is
LONGEST_S = 120.0


def collect(
    run: str, detail: Mapping[str, Any] | None = None, checkpoints: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """All that is written down here of a run; no host is asked. A service knows more of its `detail`; of its
    `checkpoints` only the hosts know."""
    from launcher import listing, tape

    detail = detail or listing.detail(run)
    if detail is None:
        raise InputError(f"there is no run {run!r}", fix="ringctl runs list shows them")
    page = tape.lines(run, limit=LAST_LINES)
    return {
        "report": VERSION,
        "ringctl": __version__,
        "made": time.time(),
        "run": {**detail, **listing.AT_THE_MOMENT},
        "metrics": tape.series(run, points=POINTS),
        "checkpoints": checkpoints,
        "log": {"lines": page.lines, "more": page.more},
    }


def record_now(run: str) -> None:
    """Write down what the hosts tell of a run that nobody has recorded; of one that goes on, what has
    happened by now. Where a service records it, that is enough. A host that is away leaves a gap."""
    from launcher import recorder

    if run not in recorder.due(lately=math.inf):
        return
    seen, stop = Seen(), threading.Event()
    one = recorder.Recorder(run, on_batch=seen.take, stop=stop)
    failed: list[RingctlError] = []
    thread = threading.Thread(target=_record, args=(one, failed), name=f"record {run}")
    thread.start()
    try:
        while thread.is_alive() and not seen.enough():
            thread.join(0.05)
    finally:
        stop.set()
        thread.join()
    if failed and "by somebody else" not in failed[0].message:
        raise failed[0]


def _record(one: Any, failed: list[RingctlError]) -> None:
    try:
        one.record()
    except RingctlError as error:
        failed.append(error)


class Seen:
    """Whether a recorder has come to what happens now."""

    def __init__(self) -> None:
        self.began = time.time()
        self.heard = self.start = time.monotonic()
        self.caught_up = False

    def take(self, batch: Batch) -> None:
        self.heard = time.monotonic()
        with contextlib.suppress(IndexError):
            self.caught_up = batch.over or batch.events[-1].time >= self.began

    def enough(self) -> bool:
        now = time.monotonic()
        return self.caught_up or now > self.heard + QUIET_S or now > self.start + LONGEST_S
