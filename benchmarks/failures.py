"""How soon it is over when a rank dies, and how soon a training goes on when a host is lost."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from benchmarks.measurement import Measurement, Series, Target
from benchmarks.workbench import BIN, PROGRAMS, CannotRun, Workbench
from tests.cluster import Cluster

RINGCTL = str(BIN / "ringctl")
HOSTS, PORT = 4, 29555
PID = "/home/train/together.pid"
ROUNDS = 5
WAIT_S = 120.0
TRAINING = ["--", "--steps", "100000", "--batch-size", "4", "--threads", "1", "--checkpoint-every", "50"]


def rank_death(bench: Workbench) -> Iterator[Measurement]:
    """A rank dies on one of 4 hosts: until all have ended everywhere and it is said why; torchrun a node."""
    with Cluster(HOSTS, folder=bench.folder / "cluster") as cluster:
        shutil.copy(PROGRAMS / "together.py", bench.folder / "together.py")
        for host in cluster.names:
            cluster.run(host, "sh", "-c", "cat >together.py", input=(PROGRAMS / "together.py").read_text())
        contestants: dict[str, Callable[[], float]] = {
            "ringctl": lambda: ringctl_ends(bench, cluster),
            "torchrun": lambda: torchrun_ends(cluster),
        }
        series = bench.alternate("death of a rank", contestants, unit="s", rounds=ROUNDS, within=240)
    ours, theirs = series["ringctl"], series["torchrun"]
    what = "from a rank's death to the end everywhere"
    yield Measurement(what, ours, theirs, Target("ours", "at most", 3.0))
    yield Measurement(f"{what}, the worst", ours, theirs, Target("ours", "at most", 10.0), "worst")


def ringctl_ends(bench: Workbench, cluster: Cluster) -> float:
    argv = [RINGCTL, "launch", "--hosts", str(cluster.hosts_file), "--", "python", "together.py"]
    with bench.start(argv, extra={"HOME": str(cluster.home)}) as process:
        died = kill_a_rank(cluster)
        out, _ = process.communicate(timeout=WAIT_S)
    if b"failed first: rank 2 on server3" not in out:
        raise CannotRun(f"ringctl did not name the rank that was killed: {out[-500:]!r}")
    until_idle(cluster)
    return time.monotonic() - died


def torchrun_ends(cluster: Cluster) -> float:
    """As people start it: one torchrun in a shell on each host."""
    address = cluster.address(cluster.names[0])
    with ExitStack() as stack:
        nodes: list[subprocess.Popen[str]] = []
        for number, host in enumerate(cluster.names):
            script = (
                f"GLOO_SOCKET_IFNAME={cluster.ifname(host)} exec {cluster.python} -m torch.distributed.run"
                f" --nnodes {HOSTS} --node-rank {number} --nproc-per-node 1 --master-addr {address}"
                f" --master-port {PORT} together.py >torchrun.log 2>&1"
            )
            nodes.append(stack.enter_context(cluster.spawn(host, "sh", "-c", script)))
        died = kill_a_rank(cluster)
        for node in nodes:
            node.wait(timeout=WAIT_S)
        until_idle(cluster)
        return time.monotonic() - died


def kill_a_rank(cluster: Cluster) -> float:
    """The one on the third host, once all have met; when that was."""
    deadline = time.monotonic() + WAIT_S
    while not all(cluster.path(host, PID).exists() for host in cluster.names):
        if time.monotonic() > deadline:
            raise CannotRun("the ranks have not met")
        time.sleep(0.05)
    time.sleep(1.0)  # in the middle of things
    pid = cluster.path(cluster.names[2], PID).read_text()
    for host in cluster.names:
        cluster.path(host, PID).unlink()
    died = time.monotonic()
    cluster.run(cluster.names[2], "kill", "-KILL", pid)
    return died


def until_idle(cluster: Cluster) -> None:
    deadline = time.monotonic() + WAIT_S
    while any("together.py" in " ".join(p.argv) for host in cluster.names for p in cluster.processes(host)):
        if time.monotonic() > deadline:
            raise CannotRun("ranks are left")
        time.sleep(0.02)
    for host in cluster.names:
        cluster.path(host, PID).unlink(missing_ok=True)


def host_loss(bench: Workbench) -> Iterator[Measurement]:
    """A host is cut off: until that is noticed and the ranks are ended, and until it trains on without."""
    with Cluster(HOSTS, folder=bench.folder / "cluster") as cluster:
        noticed, going, launched = zip(*(lose_a_host(bench, cluster) for _ in range(3)), strict=True)
    launch = Series("a launch, to its first step", "s", launched)
    yield Measurement(
        "from a host's loss until it is noticed", Series("ringctl", "s", noticed), launch,
        Target("ours", "at most", 15.0), "worst",
    )  # fmt: skip
    yield Measurement("from then on until it trains again", Series("ringctl", "s", going), launch)


def lose_a_host(bench: Workbench, cluster: Cluster) -> tuple[float, float, float]:
    """(until noticed, from then until the next attempt's first step, a launch until its first step)."""
    again = ["--max-restarts", "1", "--min-world", "3", "--restart-delay", "0"]
    argv = [RINGCTL, "launch", "--json", "--hosts", str(cluster.hosts_file), *again, *TRAINING]
    began = time.monotonic()
    with bench.start(argv, extra={"HOME": str(cluster.home)}) as process:
        assert process.stdout is not None
        first = until(process.stdout, lambda event: event["kind"] == "metric" and event.get("step", 0) >= 1)
        launched = time.monotonic() - began
        until(process.stdout, lambda event: event["kind"] == "metric" and event.get("step", 0) >= 60)
        cluster.cut(cluster.names[-1])
        cut = time.monotonic()
        until(process.stdout, lambda event: event["kind"] == "rank_exited")
        noticed = time.monotonic()
        until(process.stdout, lambda event: event["kind"] == "metric" and event["attempt"] == 2)
        going = time.monotonic()
        cluster.heal(cluster.names[-1])
        process.terminate()
        process.stdout.read()
    bench.run([RINGCTL, "stop", str(first["run"])], extra={"HOME": str(cluster.home)})
    cluster.end_sessions(cluster.names[-1])
    return noticed - cut, going - noticed, launched


def until(stream: Any, wanted: Callable[[Any], bool]) -> Any:
    """The first event that is wanted."""
    for line in stream:
        event = json.loads(line)
        if wanted(event):
            return event
    raise CannotRun("the launch ended early")
