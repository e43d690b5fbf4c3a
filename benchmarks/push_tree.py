"""Pushing a tree of 20 MB to 8 hosts, beside eight rsyncs at once."""

from __future__ import annotations

import random
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.measurement import Measurement, Series, Target
from benchmarks.workbench import BIN, Workbench
from tests.cluster import Cluster

RINGCTL = str(BIN / "ringctl")
HOSTS = 8
FILES, FILE_BYTES = 400, 50_000


def push_tree(bench: Workbench) -> Iterator[Measurement]:
    """The first time, with one file changed, and unchanged."""
    tree = bench.folder / "tree"
    make_tree(tree)
    with Cluster(HOSTS, folder=bench.folder / "cluster") as cluster:
        stages: dict[str, Callable[[], None]] = {
            "the first time": lambda: forget(cluster),
            "one file changed": lambda: change(tree),
            "unchanged": lambda: None,
        }
        rounds = 4
        seen: dict[str, tuple[list[float], list[float], list[float]]] = {s: ([], [], []) for s in stages}
        for _ in range(rounds):
            for stage, prepare in stages.items():
                prepare()
                seen[stage][0].append(ours(bench, cluster, tree))
                seen[stage][1].append(rsync(bench, cluster, tree))
                seen[stage][2].append(connecting(bench, cluster))
            bench.say(", ".join(f"{s} {v[0][-1]:.2f} s, rsync {v[1][-1]:.2f} s" for s, v in seen.items()))
    for stage, (mine, theirs, connect) in seen.items():
        if stage == "unchanged":
            pair = Series("ringctl push", "s", tuple(mine)), Series("ringctl exec true", "s", tuple(connect))
            yield Measurement("push unchanged (one question a host), beside one command", *pair)
        pair = Series("ringctl push", "s", tuple(mine)), Series("rsync -az", "s", tuple(theirs))
        target = None if stage == "unchanged" else Target("ratio", "at most", 1.2)
        yield Measurement(f"push 20 MB to {HOSTS} hosts, {stage}", *pair, target)


def make_tree(tree: Path) -> None:
    """Half of it text-like, half of it random: code, and data that does not compress."""
    chance = random.Random(1)
    for number in range(FILES):
        path = tree / f"package{number % 20}" / f"file{number}.dat"
        path.parent.mkdir(parents=True, exist_ok=True)
        if number % 2:
            path.write_bytes(chance.randbytes(FILE_BYTES))
        else:
            words = b" ".join(b"%d" % chance.randrange(1000) for _ in range(FILE_BYTES // 4))
            path.write_bytes(words[:FILE_BYTES])


def forget(cluster: Cluster) -> None:
    for name in cluster.names:
        cluster.run(name, "rm", "-rf", f"/home/{cluster.user}/.ringctl/code", f"/home/{cluster.user}/tree")


def change(tree: Path) -> None:
    (tree / "package0" / "file0.dat").write_bytes(random.randbytes(FILE_BYTES))


def ours(bench: Workbench, cluster: Cluster, tree: Path) -> float:
    command = [RINGCTL, "push", "--hosts", str(cluster.hosts_file)]
    return timed(bench, cluster, ["sh", "-c", f"cd {shlex.quote(str(tree))} && exec {shlex.join(command)}"])


def connecting(bench: Workbench, cluster: Cluster) -> float:
    return timed(bench, cluster, [RINGCTL, "exec", "--hosts", str(cluster.hosts_file), "--", "true"])


def rsync(bench: Workbench, cluster: Cluster, tree: Path) -> float:
    """All hosts at once, each by a process of its own."""
    ssh = f"ssh -F {cluster.ssh_config}"
    each = [shlex.join(["rsync", "-az", "-e", ssh, f"{tree}/", f"{name}:tree/"]) for name in cluster.names]
    return timed(bench, cluster, ["sh", "-c", " & ".join(each) + " & wait"])


def timed(bench: Workbench, cluster: Cluster, argv: list[str]) -> float:
    start = time.perf_counter()
    bench.run(argv, extra={"HOME": str(cluster.home)})
    return time.perf_counter() - start
