"""Pure: which trainings the table compares, and what their figures say together."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.bench.options import RING, SERIAL, Way

SPLITS = ("serial", "naive-ring", "ring", "all-reduce", "reduce-broadcast")  # ddp waits inside of backward


@dataclass(frozen=True)
class Case:
    """A training to compare with the others."""

    ranks: int
    way: Way

    def __str__(self) -> str:
        return str(self.way) if self.ranks == 1 else f"{self.way} x{self.ranks}"


@dataclass(frozen=True)
class Run:
    """One finished training of a case: what its ranks measured, in their order."""

    case: Case
    seed: int
    steps: int
    samples_per_s: tuple[float, ...]
    step_ms: tuple[float, ...]
    comm_ms: tuple[float, ...]
    bytes_sent: tuple[int, ...]
    accuracy: float

    @property
    def name(self) -> str:
        return str(self.case)

    @property
    def seconds(self) -> float:
        """In steps, on the slowest rank."""
        return self.steps * max(self.step_ms) / 1000


@dataclass(frozen=True)
class Row:
    """A case: means over its seeds and ranks."""

    case: Case
    seeds: int
    seconds: float
    speed_up: float | None  # images a second, against one process alone
    step_ms: float
    comm_ms: float | None  # None where it cannot be told from computing
    bytes_per_step: float  # sent by a rank
    accuracy: float
    spread: float | None  # standard deviation of the accuracy over the seeds, where there are several

    @property
    def name(self) -> str:
        return str(self.case)

    @property
    def compute_ms(self) -> float | None:
        return None if self.comm_ms is None else self.step_ms - self.comm_ms


def cases(world: int, ways: Sequence[Way]) -> list[Case]:
    """One process alone; the fp32 ring on 2, 4, ... and all ranks; every other way on all ranks."""
    if world == 1:
        return [Case(1, SERIAL)]
    powers = [2**power for power in range(1, world.bit_length()) if 2**power < world]
    rings = [Case(ranks, RING) for ranks in (*powers, world)]
    return [Case(1, SERIAL), *rings, *(Case(world, way) for way in ways if way != RING)]


def run_of(case: Case, seed: int, records: Sequence[Mapping[str, Any]]) -> Run:
    """From the last metrics record of every rank."""

    def each(name: str) -> tuple[Any, ...]:
        return tuple(record[name] for record in records)

    first = records[0]
    return Run(
        case, seed, first["step"], each("samples_per_s"), each("step_ms"), each("comm_ms"),
        each("bytes_sent"), first["accuracy"],
    )  # fmt: skip


def rows(runs: Sequence[Run]) -> list[Row]:
    """One for each case, in the order in which they were first run."""
    alone = [sum(run.samples_per_s) for run in runs if run.case.way == SERIAL]
    of_case: dict[Case, list[Run]] = {}
    for run in runs:
        of_case.setdefault(run.case, []).append(run)
    return [_row(case, of, statistics.fmean(alone) if alone else None) for case, of in of_case.items()]


def _row(case: Case, runs: Sequence[Run], alone: float | None) -> Row:
    speed = statistics.fmean(sum(run.samples_per_s) for run in runs)
    accuracies = [run.accuracy for run in runs]
    comm: float | None = statistics.fmean(value for run in runs for value in run.comm_ms)
    if case.way == SERIAL:
        comm = 0.0  # what is measured is a look at the gradients
    elif case.way.sync not in SPLITS:
        comm = None
    return Row(
        case=case,
        seeds=len(runs),
        seconds=statistics.fmean(run.seconds for run in runs),
        speed_up=speed / alone if alone else None,
        step_ms=statistics.fmean(value for run in runs for value in run.step_ms),
        comm_ms=comm,
        bytes_per_step=statistics.fmean(sent / run.steps for run in runs for sent in run.bytes_sent),
        accuracy=statistics.fmean(accuracies),
        spread=statistics.stdev(accuracies) if len(runs) > 1 else None,
    )


def cells(row: Row) -> dict[str, str]:
    """The row as people read it, by column."""
    compute, comm = row.compute_ms, row.comm_ms
    spread = "" if row.spread is None else f" ± {100 * row.spread:.2f}"
    return {
        "ranks": str(row.case.ranks),
        "sync": row.case.way.sync,
        "compress": row.case.way.compress,
        "time": f"{row.seconds:.1f} s",
        "speed-up": "-" if row.speed_up is None else f"{row.speed_up:.2f}x",
        "step": f"{row.step_ms:.2f} ms",
        "compute": "not known" if compute is None else f"{compute:.2f} ms",
        "communication": "not known" if comm is None else f"{comm:.2f} ms",
        "sent a step": f"{row.bytes_per_step / 1e6:.3f} MB",
        "accuracy": f"{100 * row.accuracy:.2f}{spread} %",
    }


def run_from_json(data: Mapping[str, Any]) -> Run:
    """What `dataclasses.asdict` made of a Run."""
    case = Case(data["case"]["ranks"], Way(**data["case"]["way"]))
    lists = {name: tuple(value) for name, value in data.items() if isinstance(value, (list, tuple))}
    return Run(**{**data, **lists, "case": case})
