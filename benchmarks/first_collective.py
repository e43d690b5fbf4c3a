"""How long it takes from the command until all ranks have finished their first collective."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.measurement import Measurement, Target
from benchmarks.workbench import BIN, PROGRAMS, CannotRun, Workbench, free_port

RANK = str(PROGRAMS / "collective.py")
WITHIN_S = {4: 80, 8: 160}  # for each number of ranks
TARGETS = {8: Target("ratio", "at most", 0.25)}  # four times faster than torchrun


def first_collective(bench: Workbench) -> Iterator[Measurement]:
    """From the command to the first finished collective on this machine: torchrun, torch.multiprocessing."""
    finish(bench, 2, ringctl)  # torch's files are in the page cache from now on, for all alike
    for world, within in WITHIN_S.items():
        contestants: dict[str, Callable[[], float]] = {
            starter.__name__: partial(finish, bench, world, starter) for starter in (ringctl, torchrun, spawn)
        }
        what = f"{world} ranks"
        series = bench.alternate(what, contestants, unit="s", rounds=5, within=within)
        yield Measurement(what, series["ringctl"], series["torchrun"], TARGETS.get(world))
        yield Measurement(what, series["ringctl"], series["spawn"])


def ringctl(world: int) -> list[str]:
    return [str(BIN / "ringctl"), "launch", "--local", "--world", str(world), "--", "python", RANK]


def torchrun(world: int) -> list[str]:
    port = str(free_port())
    return [str(BIN / "torchrun"), "--nproc-per-node", str(world), "--master-port", port, RANK]


def spawn(world: int) -> list[str]:
    return [sys.executable, RANK, str(world)]


def finish(bench: Workbench, world: int, starter: Callable[[int], list[str]]) -> float:
    """Seconds until the last rank has finished; returns once everything has ended."""
    done = bench.folder / "done"
    done.mkdir()
    argv = starter(world)
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}  # read by spawn's ranks alone
    start = time.time()
    bench.run(argv, extra={"BENCH_DONE": str(done), **rendezvous})
    moments = [float(path.read_text()) for path in done.iterdir()]
    for path in done.iterdir():
        path.unlink()
    done.rmdir()
    if len(moments) != world:
        raise CannotRun(f"{starter.__name__}: {len(moments)} of {world} ranks finished the collective")
    return max(moments) - start
