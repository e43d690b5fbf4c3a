"""One decision of the queue with 1,000 runs in it, beside one that starts whatever fits."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

from benchmarks.measurement import Measurement, Target
from benchmarks.workbench import Workbench
from launcher.schedule import Queued, Room, Taken, decide

RUNS = 1000
ROOMS = tuple(Room(f"server{number}", 8) for number in range(32))
NAMES = tuple(room.name for room in ROOMS)
RACKS = tuple(NAMES[first : first + 8] for first in range(0, len(NAMES), 8))
OURS, THEIRS = "ringctl's queue", "whatever fits"

Case = tuple[list[Queued], list[Taken]]


def schedule(bench: Workbench) -> Iterator[Measurement]:
    """A queue as people hand it in, and one in which as much as possible has to be reckoned with."""
    for what, case in (("of all kinds", of_all_kinds()), ("that overtake", that_overtake())):
        series = bench.alternate(
            f"{RUNS:,} queued runs {what}",
            {OURS: timed(case, overtaking), THEIRS: timed(case, greedily)},
            unit="s",
            rounds=20,
            within=20,
        )
        yield Measurement(
            f"a decision about {RUNS:,} queued runs {what}",
            series[OURS],
            series[THEIRS],
            Target("ours", "at most", 0.05),
            statistic="best",
        )


def of_all_kinds() -> Case:
    """Half of the slots are taken; some want certain hosts, come after others, have a time, or share."""
    chance = random.Random(1)
    queued = [
        Queued(
            f"run{number}",
            NAMES if chance.random() < 0.3 else chance.choice(RACKS),
            chance.choice((1, 2, 4, 8, 16, 32)),
            priority=chance.choice((0, 0, 0, 1)),
            place=number,
            after=f"run{number - 1}" if number and chance.random() < 0.1 else "",
            at=chance.choice((None, None, None, 2e9)),
            shared=chance.random() < 0.1,
        )
        for number in range(RUNS)
    ]
    return queued, [Taken(f"t{number}", {NAMES[number]: 8}) for number in range(16)]


def that_overtake() -> Case:
    """Hundreds of large runs ahead, each of another size, and small ones that find their way past them."""
    large = [Queued(f"large{number}", NAMES, 160 + number % 64, place=number) for number in range(RUNS // 2)]
    small = [Queued(f"small{number}", NAMES, 1, place=RUNS + number) for number in range(RUNS // 2)]
    return large + small, [Taken("t", dict.fromkeys(NAMES[:20], 8))]


def timed(case: Case, once: Callable[[Case], int]) -> Callable[[], float]:
    def measure() -> float:
        began = time.perf_counter()
        once(case)
        return time.perf_counter() - began

    return measure


def overtaking(case: Case) -> int:
    return len(decide(case[0], case[1], (), ROOMS, (), 1.9e9).starts)


def greedily(case: Case) -> int:
    """What a queue costs that has no reasons to give and keeps nothing for those ahead."""
    queued, taken = case
    free = {room.name: room.slots for room in ROOMS}
    for each in taken:
        for name, slots in each.slots.items():
            free[name] -= slots
    started = 0
    for run in sorted(queued, key=lambda run: (-run.priority, run.place)):
        need = run.world or sum(room.slots for room in ROOMS if room.name in run.hosts)
        if need > sum(free[name] for name in run.hosts):
            continue
        for name in run.hosts:
            taking = min(need, free[name])
            free[name], need = free[name] - taking, need - taking
        started += 1
    return started
