"""What must hold after every fault, once its runs are over. Each returns what is wrong, in words."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.conftest import eventually
from tests.launcher import hosts
from tests.launcher.hosts import OURS
from tests.launcher.ringctl import ringctl
from tests.soak.faults import Expected
from tests.soak.scene import Scene, launcher_processes

Lines = Mapping[tuple[int, int, str], list[str]]  # what each rank printed in each attempt, by stream


def problems(scene: Scene, expected: Expected) -> dict[str, list[str]]:
    """By what was promised; all of them empty if all is well."""
    return {
        "orphans": orphans(scene),
        "files": unreadable(scene),
        "lines": [words for run in expected.runs for words in line_problems(scene, run, expected)],
        "ends": [words for run in expected.runs for words in end_problems(scene, run, expected)],
    }


def orphans(scene: Scene) -> list[str]:
    """Processes, ports and temporary files that are left."""
    found = []
    if not eventually(lambda: not hosts.left_on(scene.cluster), 10.0):
        found.append(f"left running: {hosts.left_on(scene.cluster)}")
    if not eventually(lambda: not launcher_processes(scene), 10.0):
        found.append(f"watchers: {launcher_processes(scene)}")
    places = [scene.home / "watch"]
    places += [scene.cluster.path(host, f"{OURS}/runs") for host in scene.cluster.names]
    found += [f"temporary: {path}" for place in places for path in temporary_files(place)]
    return found


def temporary_files(place: Path) -> Iterator[Path]:
    return (path for path in place.rglob("*") if ".tmp" in path.name)


def unreadable(scene: Scene) -> list[str]:
    """State and event files that are not what they should be."""
    found = []
    places = [scene.home / "watch"]
    places += [scene.cluster.path(host, f"{OURS}/runs") for host in scene.cluster.names]
    for path in [path for place in places for kind in ("json", "jsonl") for path in place.rglob(f"*.{kind}")]:
        try:
            lines = path.read_bytes().splitlines() if path.suffix == ".jsonl" else [path.read_bytes()]
            for line in lines:
                json.loads(line)
        except ValueError as error:
            found.append(f"{path}: {error}")
    found += [f"damaged: {path}" for path in scene.home.glob("history.db.damaged-*")]
    return found


def line_problems(scene: Scene, run: str, expected: Expected) -> list[str]:
    """Lines that are lost or repeated: on the hosts, in the log, and on the screen that was always there."""
    there = lines_on_hosts(scene, run)
    found = [f"{run}: {where}: {words}" for where, said in there.items() for words in gaps(said)]
    newest = max(int(scene.state(host, run)["attempt"]) for host in scene.cluster.names)
    log, complaints = told(run)
    found += differences(f"{run}: logs{complaints}", of_attempt(there, newest), of_attempt(log, newest))
    for shown in expected.shown:
        if shown.id == run:
            seen = by_rank(shown.seen())
            first = min((attempt for attempt, _, _ in seen), default=1) if shown.follows else 1
            wanted = {where: said for where, said in there.items() if where[0] >= first}
            found += differences(f"{run}: {'follower' if shown.follows else 'launch'}", wanted, seen)
    return found


def gaps(said: Iterable[str]) -> list[str]:
    """Numbered lines that do not follow each other."""
    numbers = [int(text.split()[1]) for text in said if text.startswith("line ")]
    return [f"{one} is followed by {two}" for one, two in itertools.pairwise(numbers) if two != one + 1]


def lines_on_hosts(scene: Scene, run: str) -> Lines:
    """What the ranks printed, as the hosts have it."""
    found = []
    for host in scene.cluster.names:
        for path in sorted(scene.on(host, run).glob("events-*.jsonl")):
            attempt = int(path.name.split("-")[1])
            found += [{**json.loads(line), "attempt": attempt} for line in path.read_bytes().splitlines()]
    return by_rank(found)


def told(run: str) -> tuple[Lines, str]:
    """What `logs` prints, and what it complains of."""
    done = ringctl("logs", run, "--json", code=None)
    complaints = f" (exit {done.returncode}: {done.stderr[-500:].strip()})" if done.returncode else ""
    return by_rank([json.loads(line) for line in done.stdout.splitlines()]), complaints


def by_rank(events: Iterable[Any]) -> Lines:
    found = defaultdict(list)
    for event in events:
        if event["kind"] == "line":
            found[event["attempt"], event["rank"], event["stream"]].append(event["text"])
    return dict(found)


def of_attempt(lines: Lines, attempt: int) -> Lines:
    return {where: said for where, said in lines.items() if where[0] == attempt}


def differences(what: str, wanted: Lines, got: Lines) -> list[str]:
    return [
        f"{what}, attempt {where[0]}, rank {where[1]} ({where[2]}): {len(got.get(where, []))} lines of "
        f"{len(wanted.get(where, []))}"
        for where in sorted(wanted.keys() | got.keys())
        if wanted.get(where, []) != got.get(where, [])
    ]


def end_problems(scene: Scene, run: str, expected: Expected) -> list[str]:
    """A state that is not the right one in the end."""
    status = json.loads(ringctl("status", run, "--json", code=None).stdout)
    found = []
    if expected.succeeded and status["state"] != "succeeded":
        found.append(
            f"{run} is {status['state']}, attempt {status['attempt']}{last_words(scene, run, expected)}"
        )
    if not expected.succeeded and status["state"] in ("running", "starting", "succeeded"):
        found.append(f"{run} is {status['state']}")
    if expected.succeeded and expected.training and status["state"] == "succeeded":
        hashes = {
            rank["metric"].get("parameters_sha256")
            for host in scene.cluster.names
            for rank in scene.state(host, run)["ranks"]
        }
        if hashes != {scene.expected}:
            found.append(f"{run} ends with other parameters: {hashes}")
    return found


def last_words(scene: Scene, run: str, expected: Expected) -> str:
    """Of whoever watched it."""
    logs = [scene.home / "watch" / f"{run}.log", *(shown.err for shown in expected.shown if shown.id == run)]
    told = [path.read_text()[-1500:] for path in logs if path.exists()]
    return "".join(f"\n{text}" for text in told)
