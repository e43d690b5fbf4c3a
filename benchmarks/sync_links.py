"""Gradients over limited links: the ring and its formats beside gloo's all_reduce, and a step beside DDP's.

Four ranks on four hosts, all contestants in the same processes, taking turns. A round counts as long as it
took on the slowest rank.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import trainer
from benchmarks.measurement import Measurement, Series, Target
from benchmarks.workbench import PROGRAMS, CannotRun, Workbench
from tests.cluster import Cluster

WORLD = 4
PORT = "23456"
WITHIN_S = 150.0
MEGABYTES = 12
# Rate of every link: rounds of the mean, rounds of the step.
RATES: dict[str, tuple[int, int]] = {"200mbit": (7, 7), "1gbit": (15, 15), "unlimited": (15, 15)}
BITS_PER_S = {"200mbit": 200e6, "1gbit": 1e9}

# Ours, theirs: how much of their time ours may take, at each rate.
MEAN_TARGETS: dict[str, dict[str, float]] = {
    "ring": {"200mbit": 1.0, "1gbit": 1.05, "unlimited": 1.1},
    "ring:fp16": {"200mbit": 1 / 1.9, "1gbit": 1 / 1.7},
    "ring:int8": {"200mbit": 1 / 3.8, "1gbit": 1 / 3},
    "ring:int4": {"200mbit": 1 / 7, "1gbit": 1 / 4},
}
STEP_TARGETS: dict[str, dict[str, float]] = {
    "ddp": {"200mbit": 1 / 3, "1gbit": 1 / 1.3, "unlimited": 1.0},
    "ddp:fp16": {"200mbit": 1 / 1.7},
    "naive-ring": {"200mbit": 1 / 12},
}
WIRE_LIMIT = 1.08  # times the time that the bytes themselves take at 200 Mbit/s


def sync_links(bench: Workbench) -> Iterator[Measurement]:
    """The mean of 12 MB beside all_reduce, and a training step with 8 bits beside DDP and the naive ring."""
    with Cluster(WORLD, folder=bench.folder / "cluster") as cluster:
        for host in cluster.names:
            bring_code(cluster, host)
        for rate, (means, steps) in RATES.items():
            for host in cluster.names:
                cluster.limit_rate(host, None if rate == "unlimited" else rate)
            yield from mean(bench, cluster, rate, means)
            yield from step(bench, cluster, rate, steps)


def mean(bench: Workbench, cluster: Cluster, rate: str, rounds: int) -> Iterator[Measurement]:
    series = take_turns(bench, cluster, f"mean at {rate}", "mean", rounds, ["gloo", *MEAN_TARGETS])
    for ours, limits in MEAN_TARGETS.items():
        what = f"mean of {MEGABYTES} MB, {rate}"
        target = Target("ratio", "at most", limits[rate]) if rate in limits else None
        yield Measurement(what, series[ours], series["gloo"], target)
    if rate in BITS_PER_S:
        seconds = 2 * (WORLD - 1) / WORLD * MEGABYTES * 8e6 / BITS_PER_S[rate]
        limit = Series("bytes on the wire", "s", (seconds,))
        target = Target("ratio", "at most", WIRE_LIMIT) if rate == "200mbit" else None
        yield Measurement(f"mean of {MEGABYTES} MB, {rate}", series["ring"], limit, target)


def step(bench: Workbench, cluster: Cluster, rate: str, rounds: int) -> Iterator[Measurement]:
    names = ["ring:int8", *STEP_TARGETS, "alone"]
    series = take_turns(bench, cluster, f"step at {rate}", "step", rounds, names)
    for theirs in (*STEP_TARGETS, "alone"):
        limits = STEP_TARGETS.get(theirs, {})
        target = Target("ratio", "at most", limits[rate]) if rate in limits else None
        yield Measurement(f"step of mnist-cnn, batch 16, {rate}", series["ring:int8"], series[theirs], target)


def take_turns(
    bench: Workbench, cluster: Cluster, what: str, kind: str, rounds: int, names: Sequence[str]
) -> dict[str, Series]:
    """What each contestant took in each round, in seconds."""
    ranks = [start(cluster, number, [kind, str(rounds), *names]) for number in range(WORLD)]
    try:
        out, _ = ranks[0].communicate(timeout=WITHIN_S)
        for rank in ranks[1:]:
            rank.communicate(timeout=WITHIN_S)
    except subprocess.TimeoutExpired:
        raise CannotRun(f"{what}: not done within {WITHIN_S:.0f} s") from None
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    lines = out.splitlines()
    if not lines or not lines[-1].startswith("{"):
        raise CannotRun(f"{what}: rank 0 gave no result")
    seconds = json.loads(lines[-1])
    series = {name: Series(name, "s", tuple(seconds[name])) for name in names}
    medians = ", ".join(f"{name} {1000 * each.figure('median'):.0f} ms" for name, each in series.items())
    bench.say(f"{what}: {medians}")
    return series


def start(cluster: Cluster, number: int, arguments: Sequence[str]) -> subprocess.Popen[str]:
    host = cluster.names[number]
    variables = {
        "RANK": number,
        "WORLD_SIZE": WORLD,
        "MASTER_ADDR": cluster.address(cluster.names[0]),
        "MASTER_PORT": PORT,
        "GLOO_SOCKET_IFNAME": cluster.ifname(host),
        "OMP_NUM_THREADS": 1,
        "PYTHONPATH": f"/home/{cluster.user}/code",
    }
    environment = [f"{name}={value}" for name, value in variables.items()]
    program = f"/home/{cluster.user}/code/sync_rank.py"
    return cluster.spawn(host, "env", *environment, cluster.python, program, *arguments)


def bring_code(cluster: Cluster, host: str) -> None:
    """The trainer and the program of a rank, into the home of the host's user."""
    code = cluster.path(host, f"/home/{cluster.user}/code")
    code.mkdir()
    package = Path(trainer.__file__).parent
    shutil.copytree(package, code / "trainer", ignore=shutil.ignore_patterns("__pycache__", "mini"))
    shutil.copy(PROGRAMS / "sync_rank.py", code)
