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
    seen = {size: footprint(bench, size) for size in SIZES}
    for index, what in enumerate(("memory above one host", "threads")):
        for small, large in ((8, 32), (32, 64)):
            ours, theirs = seen[large][index] / large, seen[small][index] / small
            yield Measurement(
                f"controller's {what}, per host, {large} beside {small}",
                Series(f"{large} hosts", "", (ours,)),
                Series(f"{small} hosts", "", (theirs,)),
                Target("ratio", "at most", 1.1),
            )


def footprint(bench: Workbench, size: int) -> tuple[float, float]:
    """(kB, threads) at the peak of an exec on `size` hosts, less what one host takes."""
    with Cluster(size, folder=bench.folder / f"cluster{size}") as cluster:
        one = peak(bench, cluster, ["--include", cluster.names[0]])
        all_ = peak(bench, cluster, [])
    return all_[0] - one[0], all_[1] - one[1]


def peak(bench: Workbench, cluster: Cluster, only: Sequence[str]) -> tuple[int, int]:
    command = [RINGCTL, "exec", "--hosts", str(cluster.hosts_file), *only, "--", "sleep", "1"]
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


def status_of(pid: int) -> tuple[int, int]:
    """(peak memory in kB, threads) of a process; zeros once it is gone."""
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
