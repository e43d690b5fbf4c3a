"""Preflight of few and of many hosts beside pdsh, and all pairs of sixty-four."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

from benchmarks.measurement import Measurement, Series, Target
from benchmarks.over_ssh import RINGCTL, pdsh, timed
from benchmarks.workbench import CannotRun, Workbench
from tests.cluster import Cluster

LIMITS = {4: 2.0, 32: 1.5}
MANY = 64


def preflight(bench: Workbench) -> Iterator[Measurement]:
    """All checks and all pairs, beside `true` on the same hosts."""
    for hosts, limit in LIMITS.items():
        with Cluster(hosts, folder=bench.folder / f"cluster{hosts}") as cluster:
            contestants = {
                "ringctl preflight": timed(bench, cluster, command(cluster)),
                "pdsh": timed(bench, cluster, pdsh(cluster)),
            }
            for once in contestants.values():
                once()  # ringctl's own files are there from now on, as from the second time on
            series = bench.alternate(f"{hosts} hosts", contestants, unit="s", rounds=5, within=100)
        what = f"preflight of {hosts} hosts, all checks and pairs"
        target = Target("ratio", "at most", limit)
        yield Measurement(what, series["ringctl preflight"], series["pdsh"], target)


def all_pairs(bench: Workbench) -> Iterator[Measurement]:
    """Sixty-four hosts: every directed pair is tried, within 256 open files."""
    with Cluster(MANY, folder=bench.folder / "cluster") as cluster:
        limited = ["prlimit", "--nofile=256:256", *command(cluster), "--json"]
        extra = {"HOME": str(cluster.home)}
        bench.run(limited, extra=extra, timeout=300)
        began = time.perf_counter()
        told = json.loads(bench.run(limited, extra=extra, timeout=300))
        bench.say(f"{MANY} hosts took {time.perf_counter() - began:.1f} s")
    remarks = [check for check in told["checks"] if check["status"] in ("warn", "fail")]
    if remarks:
        raise CannotRun(f"healthy hosts were not found so: {remarks[0]}")
    reached = [pair for pair in told["pairs"] if not pair["problem"]]
    wanted = float(MANY * (MANY - 1))
    yield Measurement(
        f"directed pairs of {MANY} hosts tried and good",
        Series("ringctl preflight", "", (float(len(reached)),)),
        Series("all there are", "", (wanted,)),
        Target("ratio", "at least", 1.0),
    )


def command(cluster: Cluster) -> list[str]:
    return [RINGCTL, "preflight", "--hosts", str(cluster.hosts_file)]
