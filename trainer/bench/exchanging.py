"""Times ways for gradients to meet, all in the same processes and in turn: A B C A B C ...

What disturbs the machine disturbs all of them. A round counts as long as it took on the slowest rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from trainer import group, sync
from trainer.bench import facts
from trainer.bench.collectives import Timing
from trainer.bench.options import GLOO, Asked, Way
from trainer.bench.reporter import Reporter
from trainer.config import Config
from trainer.errors import InputError
from trainer.flat import Flat

Name = TypeVar("Name")


def nothing() -> None:
    pass


@dataclass(frozen=True)
class Turn:
    """What a contestant does in its turn."""

    timed: Callable[[], object]
    ready: Callable[[], object] = nothing  # before the clock starts
    close: Callable[[], object] = nothing


def time_exchanges(asked: Asked, reporter: Reporter) -> None:
    """Every size and way; all ranks call it, and rank 0 reports."""
    if asked.config.world_size == 1:
        raise InputError("one rank alone exchanges nothing: give it company, as in --world 2")
    ways = (GLOO, *asked.ways)
    torch.set_num_threads(asked.config.threads)
    with group.joined(asked.config):
        reporter.begin(facts.of_all_ranks(asked), planned=len(asked.sizes) * len(ways))
        torch.manual_seed(group.rank())
        for size in asked.sizes:
            flat = gradients(size)
            turns = {way: mean(way, flat, asked.config) for way in ways}
            try:
                seconds = take_turns(turns, asked.rounds)
            finally:
                for turn in turns.values():
                    turn.close()
            for way in ways:
                reporter.add(Timing(flat.gradients.nbytes, way, group.world(), tuple(seconds[way])))


def gradients(size: int) -> Flat:
    """A model of one matrix, as square as it can be, with gradients of about so many bytes."""
    elements = size // 4
    rows = next(rows for rows in range(math.isqrt(elements), 0, -1) if elements % rows == 0)
    return Flat(nn.ParameterList([nn.Parameter(torch.zeros(rows, elements // rows))]))


def mean(way: Way, flat: Flat, config: Config) -> Turn:
    """Make random gradients their mean over all ranks. Several ways may share `flat`: they take turns."""
    if way == GLOO:

        def plain() -> None:
            dist.all_reduce(flat.gradients)
            flat.gradients.div_(dist.get_world_size())

        return Turn(plain, ready=flat.gradients.normal_)
    # A mean of its own has no next message that could make up for what this one lost.
    config = replace(config, sync=way.sync, compress=way.compress, error_feedback=False)
    made = sync.create(nn.Module(), flat, config)

    def ready() -> None:
        made.begin()
        flat.gradients.normal_()

    return Turn(made.meet, ready, made.close)


def take_turns(turns: Mapping[Name, Turn], rounds: int) -> dict[Name, list[float]]:
    """The seconds of every round, on the slowest rank; all ranks get the same."""
    seconds: dict[Name, list[float]] = {name: [] for name in turns}
    for number in range(rounds + 1):
        for name, turn in turns.items():
            turn.ready()
            dist.barrier()
            began = time.perf_counter()
            turn.timed()
            took = torch.tensor(time.perf_counter() - began)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if number:  # the first round opens connections and fills caches
                seconds[name].append(took.item())
    return seconds
