"""Trains every case of the table, one after the other, in the same processes.

A case of n ranks takes the first n of all, in a group of their own; the others wait for the next case.
Seeds are the outer loop: what disturbs the machine for a while disturbs all cases.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from trainer import data, group
from trainer.bench import facts, table
from trainer.bench.options import Asked
from trainer.bench.reporter import Reporter
from trainer.bench.table import Case, Run
from trainer.config import Config
from trainer.data import Dataset, Images
from trainer.errors import InputError, TrainerError
from trainer.models import MODELS
from trainer.train import DOWNLOAD_PATIENCE_S, planned, train_on

T = TypeVar("T")
WARM_UP_STEPS = 3
A_LONG_TIME = timedelta(days=30)  # whoever waits is woken, or loses its connection to rank 0, before


def train_all(asked: Asked, reporter: Reporter) -> None:
    """Every case with every seed; all ranks call it, and rank 0 reports."""
    config = asked.config
    if config.world_size == 1 and len(asked.ways) > 1:
        raise InputError(f"one rank alone has no use for {asked.ways[1]}: give it company, as in --world 2")
    torch.set_num_threads(config.threads)
    cases = table.cases(config.world_size, asked.ways)
    seeds = range(config.seed, config.seed + asked.seeds)
    rooms = Rooms(config)

    def prepare() -> Dataset:
        dataset = data.load(config.data, os.environ)
        group.wait_for_all(DOWNLOAD_PATIENCE_S if config.data == "download" else config.timeout)
        reporter.begin(about(asked, dataset), planned=len(seeds) * len(cases))
        return dataset

    def measure(dataset: Dataset, case: Case, seed: int) -> None:
        reporter.add(trained(case, dataset, configured(config, case, seed), metrics))

    with metrics_file() as metrics:
        dataset = rooms.first(config.world_size, prepare)
        assert dataset is not None  # every rank is among the first of all
        for case in cases:
            rooms.first(case.ranks, partial(warm_up, dataset, configured(config, case, config.seed)))
        for seed in seeds:
            for case in cases:
                rooms.first(case.ranks, partial(measure, dataset, case, seed))
        rooms.first(config.world_size, lambda: None)  # rank 0, who keeps the rooms, leaves with the last


def configured(config: Config, case: Case, seed: int) -> Config:
    """Every row has the learning rate that was asked for, however many ranks an earlier attempt had."""
    sync, compress = case.way.sync, case.way.compress
    return replace(config, sync=sync, compress=compress, world_size=case.ranks, first_world=None, seed=seed)


def warm_up(dataset: Dataset, config: Config) -> None:
    """Without a word, the first steps in this process, which take longer than all others."""
    count = WARM_UP_STEPS * config.batch_size * config.world_size
    few = Dataset(
        *(Images(images.pixels[:count], images.labels[:count]) for images in (dataset.train, dataset.test))
    )
    with redirect_stdout(None):
        train_on(few, replace(config, steps=WARM_UP_STEPS, epochs=None))


def trained(case: Case, dataset: Dataset, config: Config, metrics: Path) -> Run:
    """Train; what all ranks of the group measured meanwhile."""
    torch.manual_seed(config.seed)
    written = metrics.stat().st_size if metrics.exists() else 0
    train_on(dataset, config)
    records = [json.loads(text) for text in group.gather_texts(last_line(metrics, written))]
    return table.run_of(case, config.seed, records)


class Rooms:
    """Groups of the first ranks, one after the other. All ranks take part in all of them, if only by waiting
    outside."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._number = 0
        self._house = house(config) if config.world_size > 1 else None

    def first(self, ranks: int, work: Callable[[], T]) -> T | None:
        """Let the first `ranks` do this together, and return when they have; what came of it, to them."""
        self._number += 1
        if self._house is None:
            return work()
        room = PrefixStore(f"bench/{self._number}", self._house)
        if self._config.rank >= ranks:
            with group.explained(f"rank {self._config.rank} lost rank 0, whose own output says why"):
                room.wait(["done"], A_LONG_TIME)
            return None
        with group.joined(replace(self._config, world_size=ranks), room):
            result = work()
        if self._config.rank == 0:
            room.set("done", "")
        return result


def house(config: Config) -> Store:
    """Where all ranks meet."""
    with group.explained(f"rank {config.rank} could not meet the other {config.world_size - 1}"):
        store = group.meeting_place(config)
        if store is None:  # torchrun has it
            store, _, _ = next(rendezvous(config.init_method, config.rank, config.world_size))
    return store


def about(asked: Asked, dataset: Dataset) -> dict[str, Any]:
    """What a reader must know; all ranks must ask."""
    config = asked.config
    epochs, _ = planned(config, len(dataset.train))
    return {
        **facts.of_all_ranks(asked),
        "model": config.model,
        "parameters": sum(parameter.numel() for parameter in MODELS[config.model]().parameters()),
        "images": len(dataset.train),
        "batch_size": config.batch_size,
        "epochs": None if config.steps else epochs,
        "steps": config.steps,
        "seeds": asked.seeds,
    }


@contextmanager
def metrics_file() -> Iterator[Path]:
    """Where the trainer writes its metrics, and the benchmark reads them."""
    with ExitStack() as stack:
        if not os.environ.get("RINGCTL_METRICS"):  # a rank that was started by hand
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
            os.environ["RINGCTL_METRICS"] = os.path.join(folder, "metrics.jsonl")
        yield Path(os.environ["RINGCTL_METRICS"])


def last_line(path: Path, start: int) -> str:
    """The trainer's final record, behind the first `start` bytes: those are of other trainings."""
    try:
        return path.read_bytes()[start:].decode().splitlines()[-1]
    except (OSError, IndexError):
        raise TrainerError(f"{path}: the trainer could not write its metrics there") from None
