"""Following 8 hosts: lines a second, and the delay from print to screen, beside eight `ssh host tail -f`."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator

from benchmarks.measurement import Measurement, Series, Target
from benchmarks.workbench import BIN, Workbench
from tests.cluster import Cluster

RINGCTL = str(BIN / "ringctl")
HOSTS = 8
LINES = 40_000  # of each host
PRINT_LINES = (
    f"i=0; while [ $i -lt {LINES} ]; do i=$((i+1)); echo line $i of a log that somebody follows; done"
)
PRINT_TIMES = "import time\nfor _ in range(60): print(time.time(), flush=True); time.sleep(0.1)"


def follow_hosts(bench: Workbench) -> Iterator[Measurement]:
    """Ranks print as fast as a shell does; the clock runs from the first line to the last."""
    with Cluster(HOSTS, folder=bench.folder / "cluster") as cluster:
        side = Side(bench, cluster)
        speed = bench.alternate(
            f"{HOSTS} hosts, {LINES:,} lines each",
            {"ringctl logs --follow": side.our_speed, "ssh tail -f": side.their_speed},
            unit="lines/s",
            rounds=4,
            within=120,
        )
        delay = bench.alternate(
            "delay from print to screen",
            {"ringctl logs --follow": side.our_delay, "ssh tail -f": side.their_delay},
            unit="s",
            rounds=3,
            within=90,
        )
    yield measurement("lines a second", speed, Target("ratio", "at least", 0.8))
    yield measurement("median delay", delay, Target("difference", "at most", 0.1))


def measurement(what: str, series: dict[str, Series], target: Target) -> Measurement:
    return Measurement(
        f"following {HOSTS} hosts, {what}", series["ringctl logs --follow"], series["ssh tail -f"], target
    )


class Side:
    """The same work, done both ways."""

    def __init__(self, bench: Workbench, cluster: Cluster) -> None:
        self.bench, self.cluster = bench, cluster
        self.env = {"HOME": str(cluster.home), "RINGCTL_HOSTS": str(cluster.hosts_file)}
        self.ssh = f"ssh -F {cluster.ssh_config}"

    def launch(self, *command: str) -> str:
        out = self.bench.run([RINGCTL, "launch", "--detach", "--json", "--", *command], extra=self.env)
        return str(json.loads(out)["run"])

    def our_speed(self) -> float:
        run = self.launch("sh", "-c", PRINT_LINES)
        return self.speed([RINGCTL, "logs", run, "--follow"])

    def their_speed(self) -> float:
        """The ssh that follows the file also starts the printing into it."""
        return self.speed(self.tails(f"({PRINT_LINES}) > log"))

    def speed(self, argv: list[str]) -> float:
        """Lines a second between the first and the last; connecting is another benchmark's matter."""
        moments: list[float] = []
        self.each_line(argv, HOSTS * LINES, lambda _: moments.append(time.perf_counter()))
        return len(moments) / (moments[-1] - moments[0])

    def our_delay(self) -> float:
        run = self.launch("python", "-c", PRINT_TIMES)
        return self.median_delay([RINGCTL, "logs", run, "--follow", "--no-prefix"])

    def their_delay(self) -> float:
        return self.median_delay(self.tails(f"{self.cluster.python} -c {shlex.quote(PRINT_TIMES)} > log"))

    def tails(self, printing: str) -> list[str]:
        begin = f"rm -f log; touch log; nohup sh -c {shlex.quote(printing)} >/dev/null 2>&1 &"
        remote = shlex.quote(begin + " exec tail -n +1 -f log")
        each = [f"{self.ssh} {name} {remote}" for name in self.cluster.names]
        return ["sh", "-c", " & ".join(each) + " & wait"]

    def median_delay(self, argv: list[str]) -> float:
        """Leaves out the first third, in which the followers were still connecting."""
        delays: list[float] = []
        self.each_line(argv, HOSTS * 60, lambda line: delays.append(time.time() - float(line)))
        late = [d for d in delays if d >= 0]
        return statistics.median(late[len(late) // 3 :])

    def each_line(self, argv: list[str], lines: int, take: Callable[[bytes], None]) -> None:
        with self.bench.start(argv, extra=self.env) as process:
            assert process.stdout is not None
            for _ in range(lines):
                line = process.stdout.readline()
                if not line:
                    break
                take(line)
            self.end(process)

    def end(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ProcessLookupError):  # it ends by itself once the run is over
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        for name in self.cluster.names:
            with contextlib.suppress(ProcessLookupError):  # a session that ended while it was looked for
                self.cluster.end_sessions(name)
