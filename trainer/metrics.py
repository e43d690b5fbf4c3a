"""What a rank reports: one JSON object a line in the file $RINGCTL_METRICS, for whoever follows the run.

    time            seconds since 1970
    step, steps     steps done, and planned in all
    epoch, epochs   the one that is running, from 1, and how many there will be
    loss            mean over the steps since the last record; null if it is not a number, or of no step
    samples_per_s   of this rank
    step_ms         mean time of a step
    comm_ms         mean time of a step spent waiting for the mean gradient after the own one was ready, for
                    slower ranks too; what was done meanwhile is not in it (ddp waits elsewhere: always 0)
    bytes_sent      by this rank since the start
    skipped         steps left out because of infinities or NaNs, if there were any

A record at the end of an epoch also has `accuracy`. The last one has `final` (true), `accuracy` and
`parameters_sha256`, and its means are over the whole run.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Protocol

INTERVAL_S = 0.25
LAST_S = 5.0  # a full disk may have room again within this, and nothing comes after the last record


class Counters(Protocol):
    """What a strategy counts."""

    bytes_sent: int
    skipped: int


@dataclass
class Span:
    """Sums over some steps, and what they say."""

    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    comm_seconds: float = 0.0
    loss_sum: float = 0.0
    losses: int = 0  # steps that were not left out

    def add(self, loss: float | None, samples: int, seconds: float, comm_seconds: float) -> None:
        self.steps += 1
        self.samples += samples
        self.seconds += seconds
        self.comm_seconds += comm_seconds
        if loss is not None:
            self.loss_sum += loss
            self.losses += 1

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def comm_share(self) -> float:
        return self.comm_seconds / self.seconds if self.seconds else 0.0

    def record(self) -> dict[str, object]:
        steps = self.steps or 1
        loss = self.loss_sum / self.losses if self.losses else math.nan
        return {
            "loss": round(loss, 6) if math.isfinite(loss) else None,
            "samples_per_s": round(self.samples_per_s, 1),
            "step_ms": round(1000 * self.seconds / steps, 3),
            "comm_ms": round(1000 * self.comm_seconds / steps, 3),
        }


class Metrics:
    """Times the steps of this rank, and writes records: about four a second, one an epoch, and a last one."""

    def __init__(self, path: str, *, steps: int, epochs: int) -> None:
        self.steps = steps
        self.epochs = epochs
        self.step = 0
        self.epoch = 0
        self.bytes_sent = self.skipped = 0
        self.whole_run, self.this_epoch, self._unwritten = Span(), Span(), Span()
        self._begun_earlier = Span()  # part of the next epoch, from before a checkpoint
        self._ticked = self._written = time.monotonic()
        self._lines = Lines(path)

    def epoch_begins(self) -> None:
        self.epoch += 1
        self.this_epoch, self._begun_earlier = self._begun_earlier, Span()
        self._ticked = time.monotonic()

    def step_done(self, loss: float | None, samples: int, comm_seconds: float, sync: Counters) -> None:
        """Count a step that took from the last call, or the epoch's begin, until now; no loss: left out."""
        now = time.monotonic()
        for span in (self.whole_run, self.this_epoch, self._unwritten):
            span.add(loss, samples, now - self._ticked, comm_seconds)
        self.step += 1
        self.bytes_sent, self.skipped = sync.bytes_sent, sync.skipped
        self._ticked = now
        if now - self._written >= INTERVAL_S:
            self._write(self._unwritten)

    def epoch_done(self, accuracy: float) -> None:
        self._write(self._unwritten if self._unwritten.steps else self.this_epoch, accuracy=accuracy)

    def run_done(self, accuracy: float, parameters_sha256: str, patience: float = LAST_S) -> None:
        """Write the last record; where that fails, again and again for so many seconds."""
        end = {"accuracy": accuracy, "final": True, "parameters_sha256": parameters_sha256}
        self._lines.append_last(self._record(self.whole_run, **end), patience)
        self._lines.close()

    def state_dict(self) -> dict[str, Any]:
        """How far this rank is, and its sums, for `load_state_dict` before the first epoch begins."""
        counts = {name: getattr(self, name) for name in ("step", "epoch", "bytes_sent", "skipped")}
        return counts | {"whole_run": asdict(self.whole_run), "this_epoch": asdict(self.this_epoch)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step, self.bytes_sent, self.skipped = state["step"], state["bytes_sent"], state["skipped"]
        self.epoch = state["epoch"] - 1  # it begins again, and goes on
        self.whole_run, self._begun_earlier = Span(**state["whole_run"]), Span(**state["this_epoch"])

    def _write(self, span: Span, **extra: object) -> None:
        if self._lines.append(self._record(span, **extra)):
            self._unwritten = Span()
        self._written = time.monotonic()  # also if it failed: the next try is as far away as the next record

    def _record(self, span: Span, **extra: object) -> dict[str, object]:
        progress = {"step": self.step, "steps": self.steps, "epoch": self.epoch, "epochs": self.epochs}
        counts = {"bytes_sent": self.bytes_sent} | ({"skipped": self.skipped} if self.skipped else {})
        return {"time": time.time(), **progress, **span.record(), **counts, **extra}


class Lines:
    """A file that grows by one JSON object a line, each in a single write where there is room: no reader
    sees half a line there.

    With the path "" nothing is written. A file that cannot be written is told once and does not end the
    training: that record is left out, and the next one is tried.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._torn = False  # the file ends in half a line
        self._told = False
        if path:
            self._try(b"")

    def append(self, record: Mapping[str, object]) -> bool:
        """Whether nothing of it is lost."""
        return not self._path or self._try(json.dumps(record, allow_nan=False).encode() + b"\n")

    def append_last(self, record: Mapping[str, object], patience: float) -> None:
        """The one record that is worth waiting for room, for so many seconds."""
        until = time.monotonic() + patience
        while not self.append(record):
            if time.monotonic() >= until:
                tell(f"the last metrics record could not be written to {self._path}")
                return
            time.sleep(INTERVAL_S)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _try(self, line: bytes) -> bool:
        """Whether all of it is written; half of one that is not spoils only itself. If only its newline is
        missing, that comes with the next one: whoever reads takes a last record without."""
        rest = b"\n" + line if self._torn else line
        try:
            if self._descriptor is None:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                self._descriptor = os.open(self._path, flags, 0o600)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
                self._torn = bool(rest)
        except OSError as error:
            if rest == b"\n":
                return True
            if not self._told:
                tell(f"metrics are lost as long as {self._path} cannot be written: {error.strerror}")
            self._told = True
            return False
        return True


def tell(warning: str) -> None:
    with suppress(OSError):  # stderr may be a file on the same disk
        print(f"trainer: warning: {warning}", file=sys.stderr, flush=True)
