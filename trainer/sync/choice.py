"""`--compress auto`: try each format for a few steps of real training, and stay with the fastest."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from trainer import group
from trainer.compress import AUTO_TRIES as TRIES

CLOSE = 1.03  # so little more time is a fair price for the more faithful format


class Choice:
    """Says which format to try in the next step, and at last which one to keep, on all ranks alike.

    What is measured is the time of whole steps, because that is what counts: communication that hides behind
    the backward pass is free. A step takes as long as it does on the slowest rank.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names  # the most faithful first
        self._seconds: list[list[float]] = [[] for _ in names]
        self._bytes: list[int] = []
        self._now = 0
        self._began = 0.0
        self.trying = names[0]

    def step_begins(self) -> None:
        self._began = time.monotonic()

    def step_ends(self, bytes_sent: int) -> str:
        """Count a step that sent so much; returns "" until the choice is made, then what it is and why."""
        seen = self._seconds[self._now]
        seen.append(time.monotonic() - self._began)
        if len(seen) < TRIES:
            return ""
        self._bytes.append(bytes_sent)
        if self._now + 1 < len(self._names):
            self._now += 1
            self.trying = self._names[self._now]
            return ""
        medians = torch.tensor([statistics.median(seen[1:]) for seen in self._seconds], dtype=torch.float64)
        dist.all_reduce(medians, op=dist.ReduceOp.MAX)
        decision = torch.tensor(pick(medians.tolist()))
        group.copy_from_rank_0(decision)
        self.trying = self._names[int(decision)]
        return self._reason(medians.tolist())

    def not_made(self) -> str:
        """What to say when the run is over before."""
        used = [name for name, seen in zip(self._names, self._seconds, strict=True) if seen]
        were = "was" if len(used) == 1 else "were"
        return f"--compress auto: too few steps to choose; {' and '.join(used)} {were} used"

    def _reason(self, medians: Sequence[float]) -> str:
        times = ", ".join(f"{name} {1000 * s:.0f} ms" for name, s in zip(self._names, medians, strict=True))
        rate = 8 * self._bytes[0] / medians[0] / 1e6
        return (
            f"--compress auto takes {self.trying}: the first steps took {times} (slowest rank, median of "
            f"{TRIES - 1}), uncompressed at {rate:,.0f} Mbit/s a rank"
        )


def pick(seconds: Sequence[float]) -> int:
    """The first that is not much slower than the fastest."""
    return next(number for number, value in enumerate(seconds) if value <= CLOSE * min(seconds))
