"""Many hosts over SSH: a command, a whole launch, and what the controller itself takes."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.measurement import Measurement, Series, Target
from benchmarks.workbench import BIN, Workbench
from tests.cluster import Cluster

RINGCTL = str(BIN / "ringctl")
HOSTS = 32
SIZES = (8, 32, 64)
Peak = tuple[int, int]  # kB of memory, threads


def over_ssh(bench: Workbench) -> Iterator[Measurement]:
    """`true` on 32 hosts, and a launch of `true` on them, beside pdsh."""
    with Cluster(HOSTS, folder=bench.folder / "cluster") as cluster:
        exec_ = [RINGCTL, "exec", "--hosts", str(cluster.hosts_file), "--", "true"]
        (bench.folder / "project").mkdir()
        start = [RINGCTL, "launch", "--hosts", str(cluster.hosts_file), "--detach", "--", "true"]
        launch = ["sh", "-c", f"cd {bench.folder}/project && exec {shlex.join(start)}"]
        contestants = {
            "ringctl exec": timed(bench, cluster, exec_),
            "ringctl launch": timed(bench, cluster, launch),
            "pdsh": timed(bench, cluster, pdsh(cluster)),
        }
        for once in contestants.values():
            once()  # code and kit are on the hosts from now on: an unchanged push is what is asked for
        series = bench.alternate(f"{HOSTS} hosts", contestants, unit="s", rounds=5, within=150)
    yield Measurement(
        f"true on {HOSTS} hosts", series["ringctl exec"], series["pdsh"], Target("ratio", "at most", 0.9)
    )
    what = f"launch on {HOSTS} hosts, until started"
    yield Measurement(what, series["ringctl launch"], series["pdsh"], Target("ratio", "at most", 1.5))


def controller(bench: Workbench) -> Iterator[Measurement]:
    """Memory and threads of the controller, with 8, 32 and 64 hosts, within 256 open files."""
    few, some, many = (footprint(bench, size) for size in SIZES)
    for index, what in enumerate(("memory", "threads")):
        first, more = added(few, some, SIZES[:2], index), added(some, many, SIZES[1:], index)
        yield Measurement(
            f"controller's {what} for every host more",
            Series("from {} to {} hosts".format(*SIZES[1:]), "", (more,)),
            Series("from {} to {} hosts".format(*SIZES[:2]), "", (first,)),
            Target("ratio", "at most", 1.1),
        )


def added(fewer: Peak, more: Peak, sizes: Sequence[int], index: int) -> float:
    """What each host between these sizes adds: it is the same for all where something grows linearly."""
    return (more[index] - fewer[index]) / (sizes[1] - sizes[0])


def footprint(bench: Workbench, size: int) -> Peak:
    with Cluster(size, folder=bench.folder / f"cluster{size}") as cluster:
        return peak(bench, cluster)


def peak(bench: Workbench, cluster: Cluster) -> Peak:
    """What the controller takes at the peak of an exec on all hosts."""
    command = [RINGCTL, "exec", "--hosts", str(cluster.hosts_file), "--", "sleep", "1"]
    limited = ["prlimit", "--nofile=256:256", *command]
    memory = threads = 0
    with bench.start(limited, extra={"HOME": str(cluster.home)}) as process:
        while process.poll() is None:
            now = status_of(process.pid)
            memory, threads = max(memory, now[0]), max(threads, now[1])
            time.sleep(0.02)
        process.communicate()
    bench.must_succeed(process)
    return memory, threads


def status_of(pid: int) -> Peak:
    """Of a process; zeros once it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0, 0
    fields = {key: value.split() for key, _, value in (line.partition(":") for line in lines)}
    return int(fields.get("VmHWM", ["0"])[0]), int(fields.get("Threads", ["0"])[0])


def pdsh(cluster: Cluster) -> list[str]:
    return ["pdsh", "-f", "64", "-R", "ssh", "-w", ",".join(cluster.names), "true"]


def timed(bench: Workbench, cluster: Cluster, argv: Sequence[str]) -> Callable[[], float]:
    extra = {"HOME": str(cluster.home), "PDSH_SSH_ARGS_APPEND": f"-F {cluster.ssh_config}"}

    def once() -> float:
        start = time.perf_counter()
        bench.run(argv, extra=extra)
        return time.perf_counter() - start

    return once
