"""A controller and its hosts, and a run on them that something is about to happen to."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher import history
from tests.launcher import hosts
from tests.launcher.hosts import OURS, Hosts
from tests.launcher.ringctl import RINGCTL, is_alive, ringctl, wait_for

LEASE_S = 3
TRAIN = ["--steps", "60", "--batch-size", "32", "--seed", "3", "--threads", "1", "--checkpoint-every", "5"]
TRAINING = ["--", *TRAIN, "--timeout", "8", "--model", "bn-cnn"]
AGAIN = ["--max-restarts", "6", "--restart-delay", "0.2"]
# Prints numbered lines, tells them as its steps, and goes on after the last one that it has noted.
COUNT = """
import json, os, sys, time
noted = os.path.join(os.environ["RINGCTL_CHECKPOINTS"], "count-" + os.environ["RANK"])
first = int(open(noted).read()) if os.path.exists(noted) else 0
metrics = open(os.environ["RINGCTL_METRICS"], "a", buffering=1)
for number in range(first + 1, int(sys.argv[1]) + 1):
    print(f"line {number}")
    print(json.dumps({"step": number}), file=metrics)
    with open(noted + ".new", "w") as f:
        f.write(str(number))
    os.rename(noted + ".new", noted)
    time.sleep(0.01)
    if sys.argv[2:] and number % 60 == 0 and os.environ["RANK"] == "1":
        sys.exit(number)
"""
# Prints what no terminal wants to see, and one line of megabytes. That has no returns in it: each ends a line
# of its own, and half a million short lines are another matter than a long one.
NOISE = r"""
import os, random, sys, time
chance = random.Random(sys.argv[1] + os.environ["RANK"])
pieces = [b"\x1b[2J\x1b]0;title\x07", b"\xff\xfe\x80", b"\0\t", "\u2028é".encode(), b"plain", b"\r50%\r"]
long = chance.randrange(60)
for number in range(60):
    line = b"".join(chance.choices(pieces[: 5 if number == long else 6], k=chance.randrange(1, 9)))
    data = line * (1 if number != long else 3_000_000 // len(line)) + b"\n"
    stream = 1 + chance.randrange(2)
    while data:
        data = data[os.write(stream, data):]
    time.sleep(0.03)
"""


class Scene:
    """Where it happens."""

    def __init__(self, cluster: Hosts, folder: Path, chance: random.Random) -> None:
        self.cluster, self.folder, self.chance = cluster, folder, chance
        self.launches: list[subprocess.Popen[bytes]] = []
        self.expected = ""  # the hash of the parameters that an undisturbed training ends with
        (folder / "count.py").write_text(COUNT)
        (folder / "noise.py").write_text(NOISE)

    def close(self) -> None:
        """However it ends, no launch is left."""
        for process in self.launches:
            process.kill()
            process.wait()

    @property
    def home(self) -> Path:
        return Path(os.environ["RINGCTL_HOME"])

    def any_host(self) -> str:
        return self.chance.choice(self.cluster.names)

    def between(self, least: float, most: float) -> float:
        return self.chance.uniform(least, most)

    # runs

    def train(self, *options: str) -> Run:
        return Run(self, "launch", *AGAIN, *options, *TRAINING)

    def count(self, lines: int = 150, *options: str) -> Run:
        return Run(self, "launch", *AGAIN, *options, "--", "python3", "count.py", str(lines))

    def runs(self) -> list[str]:
        return sorted(record.plan.run for record in history.recall())

    # hosts

    def on(self, host: str, run: str) -> Path:
        return self.cluster.path(host, f"{OURS}/runs/{run}")

    def state(self, host: str, run: str) -> Mapping[str, Any]:
        try:
            found = json.loads((self.on(host, run) / "state.json").read_text())
        except FileNotFoundError:
            return {"state": "", "ranks": [], "attempt": 0, "hostd": {"pid": 0}, "warden": {"pid": 0}}
        return dict(found)

    def events(self, host: str, run: str) -> list[Any]:
        """Of all its attempts, as the host has them."""
        paths = sorted(self.on(host, run).glob("events-*.jsonl"))
        return [json.loads(line) for path in paths for line in path.read_bytes().splitlines()]

    def kill(self, host: str, pid: int | None, number: int) -> None:
        """By its number inside the host; one that is not there yet, or no more, is left alone."""
        if not pid:
            return
        self.cluster.run(host, "sh", "-c", 'kill -"$0" "$1" 2>/dev/null || true', str(int(number)), str(pid))


class Run:
    """An attached launch, whose JSON goes into a file."""

    def __init__(self, scene: Scene, *words: str) -> None:
        self.scene = scene
        self.follows = words[0] == "logs"  # it has not seen the attempts before it began
        known = set(scene.runs())
        number = len(list(scene.folder.glob("out-*")))
        self.out, self.err = scene.folder / f"out-{number}", scene.folder / f"err-{number}"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            command = [*RINGCTL, words[0], "--json", *words[1:]]
            self.process = subprocess.Popen(command, stdout=out, stderr=err, cwd=scene.folder)
        scene.launches.append(self.process)
        self.id = ""
        self._known = known

    def begun(self) -> Run:
        """Once it has an id."""
        self.id = str(
            wait_for(lambda: sorted(set(self.scene.runs()) - self._known), "the run's record", 60)[0]
        )
        return self

    def step(self) -> int:
        ranks = [
            rank for host in self.scene.cluster.names for rank in self.scene.state(host, self.id)["ranks"]
        ]
        return max((rank["metric"].get("step", 0) for rank in ranks), default=0)

    def at_step(self, step: int) -> Run:
        """Once some rank has come so far, or the run is over."""
        self.begun()
        wait_for(lambda: self.step() >= step or self.is_over(), f"step {step}", 90)
        return self

    def is_over(self) -> bool:
        return self.process.poll() is not None

    def finish(self, seconds: float = 180.0) -> int:
        try:
            return self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            raise AssertionError(f"it did not end: {self.err.read_text()[-1500:]}") from None

    def kill(self) -> None:
        """The launch, not the run."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def seen(self) -> list[Any]:
        """The events that the launch printed; the last line may be cut short if it was killed."""
        lines = self.out.read_bytes().split(b"\n")
        return [json.loads(line) for line in lines[:-1]]


def launcher_processes(scene: Scene) -> list[int]:
    """Watchers of this scene that still run."""
    found = []
    for path in (scene.home / "watch").glob("*.json"):
        pid = int(json.loads(path.read_text()).get("pid") or 0)
        if pid and is_alive(pid):
            found.append(pid)
    return found


def wait(seconds: float) -> None:
    """For a fault that takes its time."""
    time.sleep(seconds)


def stop_all(runs: Sequence[str]) -> None:
    for run in runs:
        ringctl("stop", run, "--grace", "0.5", code=None)


@contextlib.contextmanager
def mended(scene: Scene) -> Iterator[None]:
    """Whatever happens, the hosts are whole afterwards."""
    try:
        yield
    finally:
        hosts.mend(scene.cluster)
