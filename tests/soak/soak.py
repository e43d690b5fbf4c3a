"""The schedule: seeded, so that the same faults come in the same order again."""

from __future__ import annotations

import inspect
import os
import random
import shutil
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher import history
from tests.launcher import hosts
from tests.launcher.hosts import Hosts
from tests.soak.checks import problems
from tests.soak.faults import FAULTS, Expected
from tests.soak.scene import LEASE_S, Scene, launcher_processes, mended, stop_all

Say = Callable[[str], None]
TRAININGS = tuple(name for name, fault in FAULTS.items() if "training=True" in inspect.getsource(fault))
PROMISES = ("orphans", "lines", "files", "ends")


@dataclass
class Tally:
    """What came of it."""

    seed: int
    faults: Counter[str] = field(default_factory=Counter)
    wrong: dict[str, list[str]] = field(default_factory=lambda: {promise: [] for promise in PROMISES})
    broken: list[str] = field(
        default_factory=list
    )  # faults that could not be carried out, or runs that did not end
    trainings: int = 0  # that were started again or disturbed, and had to end with the same bits
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return not self.broken and not any(self.wrong.values())


def schedule(seed: int, names: Sequence[str]) -> Callable[[], str]:
    """One name after the other: every fault once, in an order of their own, then again in another."""
    chance, left = random.Random(seed), list[str]()

    def following() -> str:
        if not left:
            left.extend(chance.sample(sorted(names), len(names)))
        return left.pop()

    return following


def soak(
    scene: Scene, tally: Tally, say: Say, *, seconds: float, most: int, only: Sequence[str] = ()
) -> None:
    """Until so much time has passed, or so many faults were seen through."""
    os.environ["RINGCTL_LEASE"] = str(LEASE_S)
    os.chdir(scene.folder)
    began = time.monotonic()
    if not only or any(name in TRAININGS for name in only):
        undisturbed(scene)
    following = schedule(tally.seed, only or list(FAULTS))
    while time.monotonic() - began < seconds and tally.faults.total() < most:
        name = following()
        tally.faults[name] += 1
        one(scene, name, tally, say)
        tally.seconds = time.monotonic() - began


def undisturbed(scene: Scene) -> None:
    run = scene.train()
    assert run.finish() == 0, run.err.read_text()
    last = run.seen()[-1]
    scene.expected = str(last["parameters_sha256"])
    assert last["state"] == "succeeded"


def one(scene: Scene, name: str, tally: Tally, say: Say) -> None:
    """One fault, and what is wrong after it."""
    began = time.monotonic()
    before = set(scene.runs())
    try:
        with mended(scene):
            expected = FAULTS[name](scene)
            tally.trainings += expected.training
            found = problems(scene, expected)
    except Exception:  # the next fault comes all the same; this one is told
        tally.broken.append(f"{name}: {traceback.format_exc(limit=-3)}")
        say(f"{tally.faults.total():4} {name}: BROKEN\n{tally.broken[-1]}")
        clear(scene, sorted(set(scene.runs()) - before))
        return
    for promise, words in found.items():
        tally.wrong[promise] += [f"{name}: {text}" for text in words]
    bad = [text for words in found.values() for text in words]
    say(f"{tally.faults.total():4} {name}: {'ok' if not bad else 'WRONG'} ({time.monotonic() - began:.1f} s)")
    for text in bad:
        say(f"       {text}")
    if bad:
        clear(scene, sorted(set(scene.runs()) - before))
    forget(scene, expected)


def clear(scene: Scene, runs: Sequence[str]) -> None:
    """So that one fault's harm is not counted again with the next."""
    hosts.mend(scene.cluster)
    stop_all(runs)
    for pid in launcher_processes(scene):
        os.kill(pid, signal.SIGKILL)
    hosts.reset(scene.cluster)
    shutil.rmtree(scene.home / "watch", ignore_errors=True)
    for run in scene.runs():
        history.forget(run)


def forget(scene: Scene, expected: Expected) -> None:
    """Runs that are seen through: their folders on the hosts would be looked at again and again."""
    for run in expected.runs:
        for host in scene.cluster.names:
            shutil.rmtree(scene.on(host, run), ignore_errors=True)
        history.forget(run)


def summary(tally: Tally) -> list[str]:
    """As docs/results keeps it."""
    total = tally.faults.total()
    return [
        f"{total} faults over 4 hosts in {tally.seconds:.0f} s, seed {tally.seed}",
        f"orphans (processes, ports, temporary files): {len(tally.wrong['orphans'])}",
        f"lost or repeated lines: {len(tally.wrong['lines'])}",
        f"unreadable files: {len(tally.wrong['files'])}",
        f"runs whose final state is wrong: {len(tally.wrong['ends'])}",
        f"trainings that had to end with the bits of an undisturbed one: {tally.trainings}",
        f"faults that could not be seen through: {len(tally.broken)}",
    ]


def table(tally: Tally) -> list[str]:
    rows = [f"| {name} | {tally.faults[name]} |" for name in sorted(tally.faults)]
    return ["| fault | times |", "| --- | --- |", *rows]


def scene_in(folder: Path, cluster: Hosts, seed: int) -> Scene:
    folder.mkdir(parents=True, exist_ok=True)
    return Scene(cluster, folder, random.Random(seed + 1))
