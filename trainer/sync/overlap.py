"""Exchanges that run beside the backward pass: begun by it, and seen to their end on a thread of their own.

A thread, not asynchronous calls alone: what arrives has to be added before it can go on, and the backward
pass does not come by to do it. torch lets go of the interpreter's lock while it computes, so both really run
at once. The thread does not begin them, because it may be waiting for an arrival, and the wire has nothing to
do meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol

import torch
from torch import Tensor, nn

from trainer.config import Config
from trainer.flat import Flat
from trainer.sync.buckets import Span
from trainer.sync.strategy import Strategy

CLOSE_S = 1.0  # how long to wait for a thread that may be stuck in the network after a failure


Look = Callable[[Tensor], None]


class Exchange(Protocol):
    """Makes one bucket of the flat gradients their mean, in two parts: the next can begin in between.

    It shows each part of the bucket to `Strategy.look` before it changes it or lets another rank change it.
    """

    bytes: int
    """What one run sends from this rank."""

    held: int
    """The bytes of memory it keeps for itself beside the gradients."""

    def start(self) -> None:
        """Post what can be posted without waiting for anyone; others may be going on meanwhile."""

    def finish(self) -> Iterator[int]:
        """Do the rest, after which the gradients are the mean, in steps of one arrival each.

        Yields before each of them: 0 while others still need something from here, then 1. Jobs at 0 go first
        everywhere, in their order; were this to say 1 too early, ranks could wait for each other for ever.
        """


class Overlapping(Strategy):
    """A strategy made of exchanges, each begun as soon as the backward pass has filled its bucket.

    They begin in the same order on all ranks, in which they are listed.
    """

    def __init__(self, model: nn.Module, flat: Flat, config: Config) -> None:
        super().__init__(model, flat, config)
        self._exchanges: list[tuple[Span, Exchange]] = []
        self._of_slot: list[list[int]] = [[] for _ in flat.slots]
        self._missing: list[int] = []
        self._begun = 0
        self._worker = Worker() if flat.gradients.device.type == "cpu" else None
        for number, slot in enumerate(flat.slots):
            if slot.parameter.requires_grad:
                filled = partial(self._filled, number)
                slot.parameter.register_post_accumulate_grad_hook(filled)  # type: ignore[no-untyped-call]  # torch's

    def use(self, exchanges: Sequence[tuple[Span, Exchange]]) -> None:
        """Take these from the next step on, each with the span of the flat gradients that it needs."""
        slots = [Span(slot.start, slot.end) for slot in self.flat.slots]
        self._exchanges = list(exchanges)
        self._of_slot = [
            [number for number, (span, _) in enumerate(exchanges) if span.overlaps(slot)] for slot in slots
        ]
        self._begun = len(exchanges)

    @property
    def held(self) -> int:
        """The bytes of memory that all exchanges keep for themselves beside the gradients."""
        return sum(exchange.held for _, exchange in self._exchanges)

    def begin(self) -> None:
        super().begin()
        self._begun = 0
        self._missing = [0] * len(self._exchanges)
        for numbers in self._of_slot:
            for number in numbers:
                self._missing[number] += 1

    def meet(self) -> None:
        self._begin_more(all_filled=True)
        if self._worker is not None:
            self._worker.wait()
        else:
            for _, exchange in self._exchanges:
                exchange.start()
                for _ in exchange.finish():
                    pass
        self.bytes_sent += sum(exchange.bytes for _, exchange in self._exchanges)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def _filled(self, slot: int, _: Tensor) -> None:
        for number in self._of_slot[slot]:
            self._missing[number] -= 1
        self._begin_more()

    def _begin_more(self, all_filled: bool = False) -> None:
        while self._begun < len(self._exchanges) and (all_filled or self._missing[self._begun] <= 0):
            _, exchange = self._exchanges[self._begun]
            self._begun += 1
            if self._worker is not None:
                with torch.no_grad():
                    exchange.start()
                self._worker.do(exchange.finish)


Finish = Callable[[], Iterator[int]]


class Worker:
    """A thread that sees jobs to their end, first those that others wait for most."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Finish | threading.Event | None] = SimpleQueue()
        self._failure: BaseException | None = None
        # It must not keep the process alive when another part of it has failed.
        self._thread = threading.Thread(target=self._work, name="gradients", daemon=True)
        self._thread.start()

    def do(self, finish: Finish) -> None:
        self._jobs.put(finish)

    def wait(self) -> None:
        """Return when all jobs are done; raises what one of them raised."""
        done = threading.Event()
        self._jobs.put(done)
        done.wait()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(CLOSE_S)

    def _work(self) -> None:
        begun: list[Job] = []
        with torch.no_grad():
            while True:
                try:
                    job = self._jobs.get(block=not begun)
                except Empty:
                    self._go_on(begun)
                    continue
                if job is not None and not isinstance(job, threading.Event):
                    self._begin(job, begun)
                    continue
                while begun:
                    self._go_on(begun)
                if job is None:
                    return
                job.set()

    def _begin(self, job: Finish, begun: list[Job]) -> None:
        if self._failure is None:  # after a failure the others would only wait in vain
            try:
                steps = job()
                begun.append(Job(next(steps, None), steps))
            except BaseException as error:  # `wait` raises it where it is expected
                self._failure = error

    def _go_on(self, begun: list[Job]) -> None:
        """One step of the job that is least far, or the oldest of those."""
        job = min((job for job in begun), key=lambda job: -1 if job.phase is None else job.phase)
        try:
            if self._failure is None and job.phase is not None:
                job.phase = next(job.steps, None)
        except BaseException as error:  # `wait` raises it where it is expected
            self._failure = error
        if job.phase is None or self._failure is not None:
            begun.remove(job)


@dataclass(eq=False)
class Job:
    """An exchange that has begun, and what its next step is; None when there is none."""

    phase: int | None
    steps: Iterator[int]
