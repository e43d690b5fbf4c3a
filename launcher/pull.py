"""Pure: what the hosts have of a run -> its checkpoints, which are complete, and whose model to take."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from launcher import text
from launcher.errors import HostError
from launcher.hostfiles import MOST_STEPS
from launcher.logs import ranges
from launcher.model import from_json
from launcher.remote import grouped
from launcher.told import is_shallow

MOST = 10**18  # steps, bytes and whatever else a host counts
MOST_RANKS = 10**6
MOST_METRICS = 10**5  # files of them on one host
SHA256 = re.compile(r"[0-9a-f]{64}")
NOT_FINISHED = "it was not finished"


# --- What a host says (see hostfiles.py) ---------------------------------------------------------


@dataclass(frozen=True)
class FileAbout:
    """A file as its manifest has it."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a rank wrote into a checkpoint."""

    rank: int
    epoch: int
    run: Mapping[str, Any]  # the options that decide about the run's bits
    files: Mapping[str, FileAbout]
    model: str = ""  # the checksum of the model.pt that its part belongs to, wherever that is


@dataclass(frozen=True)
class StepOnHost:
    """What one host has of a checkpoint."""

    step: int
    written: float
    files: Mapping[str, int]  # name: its bytes, as they are
    manifests: tuple[Manifest, ...]
    unread: tuple[int, ...]  # ranks whose manifest is damaged
    turn: int = 0  # of several checkpoints with the number of this step, from 0


@dataclass(frozen=True)
class MetricsFile:
    """The metrics of a rank in one attempt."""

    rank: int
    attempt: int
    bytes: int

    @property
    def path(self) -> str:
        """On its host, in the run's folder."""
        return f"ranks/{self.rank}/metrics-{self.attempt}.jsonl"

    @property
    def name(self) -> str:
        """Here."""
        return f"rank-{self.rank}-attempt-{self.attempt}.jsonl"


@dataclass(frozen=True)
class Listing:
    """What one host has of a run."""

    steps: tuple[StepOnHost, ...]
    ranks: tuple[int, ...]  # that it had in the last attempt that it took part in
    metrics: tuple[MetricsFile, ...]
    events: int  # bytes of its log
    checkpoint_dir: str  # where it was told to put checkpoints, if that is not in the run's folder
    world: int = 0  # how many ranks that attempt had on all hosts; 0: an older ringctl's answer does not say


def listing(host: str, answer: Mapping[str, Any]) -> Listing:
    """A host's answer, believed only as far as it makes sense; HostError if it does not."""
    try:
        found = from_json(Listing, answer)
        makes_sense = len(found.steps) <= MOST_STEPS and len(found.metrics) <= MOST_METRICS
        makes_sense = makes_sense and all(number_makes_sense(*pair) for pair in numbers(found))
        makes_sense = makes_sense and all(
            is_shallow(part.run) for step in found.steps for part in step.manifests
        )
    except (TypeError, KeyError, ValueError, AttributeError):
        makes_sense = False
    if not makes_sense or not all(SHA256.fullmatch(file.sha256) for file in files_in(found)):
        raise HostError(host, "what it says of the run's files makes no sense", fix="look at the host")
    return found


def files_in(found: Listing) -> Iterable[FileAbout]:
    return (file for step in found.steps for part in step.manifests for file in part.files.values())


def numbers(found: Listing) -> Iterable[tuple[float, int]]:
    """Every number of a listing, and what it must stay below."""
    yield found.events, MOST
    yield found.world, MOST_RANKS
    yield from ((rank, found.world or MOST_RANKS) for rank in found.ranks)
    yield from ((file.bytes, MOST) for file in files_in(found))
    for file in found.metrics:
        yield from ((file.rank, MOST_RANKS), (file.attempt, MOST_RANKS), (file.bytes, MOST))
    for step in found.steps:
        yield from ((step.step, MOST), (step.turn, MOST_RANKS), (step.written, MOST_RANKS**2))
        yield from ((size, MOST) for size in step.files.values())
        yield from ((rank, MOST_RANKS) for rank in step.unread)
        for part in step.manifests:
            yield from ((part.rank, MOST_RANKS), (part.epoch, MOST))


def number_makes_sense(number: float, limit: int) -> bool:
    return math.isfinite(number) and 0 <= number < limit


# --- What that is together -----------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """What one rank has of a checkpoint."""

    rank: int
    host: str
    bytes: int
    problem: str = ""  # why it cannot be used


@dataclass(frozen=True)
class Copy:
    """A model on a host, as the manifest of the rank that wrote it has it."""

    host: str
    bytes: int
    sha256: str
    problem: str = ""  # why it cannot be used, as far as its size tells


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on all hosts that answered."""

    step: int
    epoch: int | None
    world: int | None
    finished: bool | None  # by all ranks; None: what is missing may be on a host that did not answer
    complete: bool | None  # and all of that is still there
    parts: tuple[Part, ...]
    models: tuple[Copy, ...]
    bytes: int  # on all hosts together
    written: float
    options: Mapping[str, Any]
    problems: tuple[str, ...] = ()
    turn: int = 0

    @property
    def folder(self) -> str:
        """Its name on each host."""
        return f"step-{self.step:08d}" + (f".{self.turn}" if self.turn else "")

    @property
    def steps(self) -> int | None:
        """In all: with another number of ranks an attempt has others, so that less may be more."""
        steps = self.options.get("steps in all")
        return steps if type(steps) is int and 0 < steps < MOST else None

    @property
    def whole_models(self) -> tuple[Copy, ...]:
        return tuple(copy for copy in self.models if not copy.problem)


def checkpoints(listings: Mapping[str, Listing], all_heard: bool) -> list[Checkpoint]:
    """All of them, by step."""
    there: dict[tuple[int, int], dict[str, StepOnHost]] = {}
    for host, found in listings.items():
        for step in found.steps:
            there.setdefault((step.step, step.turn), {})[host] = step
    now = {host: (found.world, frozenset(found.ranks)) for host, found in listings.items()}
    return [checkpoint(*place, there[place], now, all_heard) for place in sorted(there)]


def checkpoint(
    number: int,
    turn: int,
    there: Mapping[str, StepOnHost],
    now: Mapping[str, Now],
    all_heard: bool,
) -> Checkpoint:
    """One step, put together from what each host has of it, and the ranks that each host has now."""
    world, manifests = of_one_save([(part, host) for host, step in there.items() for part in step.manifests])
    first = manifests[0][0] if manifests else None
    parts = tuple(sorted(parts_in(there), key=lambda part: (part.rank, part.host)))
    models = copies(manifests, there)
    damaged = {(part.rank, part.host) for part in parts if part.problem}
    # What an interrupted save has left need not be where the rank was that finished this one.
    finished = {part.rank for part in parts if part.problem != NOT_FINISHED}
    on_heard = finished.union(*also_then(world, manifests, now))

    def has_all(ranks: Set[int]) -> bool | None:
        return are_all(world, ranks, on_heard, all_heard) if world else False

    complete = has_all({part.rank for part, host in manifests if (part.rank, host) not in damaged})
    return Checkpoint(
        step=number,
        epoch=first.epoch if first else None,
        world=world,
        finished=has_all({part.rank for part, _ in manifests}),
        complete=complete and any(not copy.problem for copy in models),
        parts=parts,
        models=models,
        bytes=sum(size for step in there.values() for size in step.files.values()),
        written=max(step.written for step in there.values()),
        options=first.run if first else {},
        problems=tuple(problems(parts, models, {part.rank for part, _ in manifests})),
        turn=turn,
    )


Told = list[tuple[Manifest, str]]  # manifests, each with its host
Now = tuple[int, Set[int]]  # of so many ranks, those that a host had in the last attempt that it took part in


def also_then(world: int | None, manifests: Told, now: Mapping[str, Now]) -> Iterable[Set[int]]:
    """The ranks of each host that it will have had when this was saved: it has finished some of them, and has
    these and the others now, among as many ranks. An attempt may have had others, or on other hosts."""
    then: dict[str, set[int]] = {}
    for part, host in manifests:
        then.setdefault(host, set()).add(part.rank)
    return [now[host][1] for host, ranks in then.items() if world == now[host][0] and ranks <= now[host][1]]


def of_one_save(told: Told) -> tuple[int | None, Told]:
    """How many ranks have written this step, and their manifests, by rank. Two attempts may have come to the
    same step, with different numbers of ranks or other models: then those count of which more is there."""
    saves: dict[tuple[int, str], Told] = {}
    for part, host in sorted(told, key=lambda pair: pair[0].rank):
        world = part.run.get("--world-size")
        if isinstance(world, int) and part.rank < world < MOST_RANKS:
            saves.setdefault((world, part.model), []).append((part, host))
    if not saves:
        return None, []
    best = max(saves, key=lambda save: (len({part.rank for part, _ in saves[save]}) / save[0], *save))
    return best[0], saves[best]


def are_all(world: int, ranks: Set[int], on_heard: Iterable[int], all_heard: bool) -> bool | None:
    """Whether these are all ranks; None if those that are missing are on hosts that did not answer."""
    if len(ranks) == world:
        return True
    return False if all_heard or any(rank < world and rank not in ranks for rank in on_heard) else None


def parts_in(there: Mapping[str, StepOnHost]) -> Iterable[Part]:
    """The parts on each host: with a manifest, with one that is damaged, or without."""
    for host, step in there.items():
        told = {part.rank: part for part in step.manifests}
        begun = {rank_of(name) for name in step.files} - {None}
        for rank in {*told, *step.unread, *begun}:
            if rank is None:
                continue
            name = f"rank-{rank}.pt"
            problem = NOT_FINISHED
            if rank in told:
                problem = file_problem(name, told[rank], step)
            elif rank in step.unread:
                problem = f"rank-{rank}.json is damaged"
            yield Part(rank, host, step.files.get(name, 0), problem)


def rank_of(name: str) -> int | None:
    match = re.fullmatch(r"rank-([0-9]{1,6})\.pt", name)
    return int(match[1]) if match else None


def file_problem(name: str, manifest: Manifest, step: StepOnHost) -> str:
    """What is wrong with a file, as far as its size tells; "" if nothing is."""
    if name not in manifest.files:
        return f"{name} is not in its manifest"
    if name not in step.files:
        return f"{name} is not there"
    wanted, has = manifest.files[name].bytes, step.files[name]
    return "" if has == wanted else f"{name} has {has:,} bytes of {wanted:,}"


def copies(manifests: Sequence[tuple[Manifest, str]], there: Mapping[str, StepOnHost]) -> tuple[Copy, ...]:
    """The models, each host's once, that of the lowest rank first."""
    found: dict[str, Copy] = {}
    for part, host in manifests:
        about = part.files.get("model.pt")
        if about and host not in found:
            found[host] = Copy(host, about.bytes, about.sha256, file_problem("model.pt", part, there[host]))
    return tuple(found.values())


def problems(parts: Sequence[Part], models: Sequence[Copy], have_finished: Set[int]) -> Iterable[str]:
    """What is wrong; nothing is where a rank that has finished elsewhere has left the beginning of a part."""
    for part in parts:
        if part.problem and not (part.problem == NOT_FINISHED and part.rank in have_finished):
            yield f"{part.host}: rank {part.rank}: {part.problem}"
    for copy in models:
        if copy.problem:
            yield f"{copy.host}: {copy.problem}"
    if len({copy.sha256 for copy in models}) > 1:
        yield "hosts have different models: " + ", ".join(f"{c.host} {c.sha256[:12]}" for c in models)


# --- What to take --------------------------------------------------------------------------------


def candidates(found: Sequence[Checkpoint], step: int | None) -> list[Checkpoint]:
    """Whose model may be taken, the best first: that of `step`, else the newest that is not known to be
    unfinished. (What a manifest lists was on the disk before the manifest was.)"""
    return best_first(c for c in found if (c.finished is not False if step is None else c.step == step))


def best_first(found: Iterable[Checkpoint]) -> list[Checkpoint]:
    """Those with a model: what is not known to be unfinished, and what is newer, comes first."""
    with_model = [c for c in found if c.models]
    counted = all(c.steps for c in with_model)

    def worth(of: Checkpoint) -> tuple[bool, Fraction, int, int]:
        return of.finished is not False, Fraction(of.step, of.steps or 1) * counted, of.step, of.turn

    return sorted(with_model, key=worth, reverse=True)


Owners = Callable[[int], Mapping[int, str] | None]  # the attempt -> which host each rank is on, if known


def metrics_of(listings: Mapping[str, Listing], owners: Owners) -> dict[str, list[MetricsFile]]:
    """Which host is asked for which metrics: each rank's once, and of no host but the one that it was on in
    that attempt, where that is known."""
    chosen: dict[tuple[int, int], tuple[str, MetricsFile]] = {}
    for host, found in listings.items():
        for file in found.metrics:
            places = owners(file.attempt)
            if places is None or places.get(file.rank) == host:
                chosen.setdefault((file.rank, file.attempt), (host, file))
    wanted: dict[str, list[MetricsFile]] = {}
    for host, file in chosen.values():
        wanted.setdefault(host, []).append(file)
    return wanted


def chosen_folders(listings: Mapping[str, Listing]) -> dict[str, str]:
    """Hosts whose ranks were told to put checkpoints somewhere else, and where."""
    return {host: found.checkpoint_dir for host, found in listings.items() if found.checkpoint_dir}


# --- How it looks --------------------------------------------------------------------------------


def model_json(run: str, of: Checkpoint, copy: Copy) -> dict[str, Any]:
    """checkpoint.json, which lies beside a model."""
    return {
        "run": run,
        "step": of.step,
        "epoch": of.epoch,
        "complete": of.complete,
        "written": of.written,
        "bytes": copy.bytes,
        "sha256": copy.sha256,
        "host": copy.host,
        "options": dict(of.options),
    }


def checkpoint_json(of: Checkpoint) -> dict[str, Any]:
    """One entry of `ringctl checkpoints --json`."""
    return {
        "step": of.step,
        "folder": of.folder,
        "epoch": of.epoch,
        "world": of.world,
        "complete": of.complete,
        "parts": [{"rank": p.rank, "host": p.host, "bytes": p.bytes, "ok": not p.problem} for p in of.parts],
        "models": [
            {"host": c.host, "bytes": c.bytes, "sha256": c.sha256, "ok": not c.problem} for c in of.models
        ],
        "bytes": of.bytes,
        "written": of.written,
        "problems": list(of.problems),
    }


def checkpoint_of(told: Mapping[str, Any]) -> Checkpoint:
    """What `checkpoint_json` tells, as far as it is shown again."""

    def problem(each: Mapping[str, Any]) -> str:
        return "" if each["ok"] else "damaged"

    return Checkpoint(
        step=told["step"],
        epoch=told["epoch"],
        world=told["world"],
        finished=told["complete"],
        complete=told["complete"],
        parts=tuple(Part(p["rank"], p["host"], p["bytes"], problem(p)) for p in told["parts"]),
        models=tuple(Copy(c["host"], c["bytes"], c["sha256"], problem(c)) for c in told["models"]),
        bytes=told["bytes"],
        written=told["written"],
        options={},
        problems=tuple(told["problems"]),
    )


COMPLETE = {True: "yes", False: "no", None: "unknown"}


def checkpoint_rows(found: Sequence[Checkpoint], now: float) -> list[text.Row]:
    rows: list[text.Row] = [("STEP", "EPOCH", "COMPLETE", "RANKS", "ON", "MODEL ON", "SIZE", "WRITTEN")]
    for of in found:
        whole = [part for part in of.parts if not part.problem]
        rows.append(
            (
                str(of.step),
                "-" if of.epoch is None else str(of.epoch),
                COMPLETE[of.complete],
                f"{ranges({part.rank for part in whole}) or 'none'} of {of.world or '?'}",
                grouped(list(dict.fromkeys(part.host for part in of.parts))) or "-",
                grouped([copy.host for copy in of.whole_models]) or "-",
                text.size(of.bytes),
                text.ago(of.written, now),
            )
        )
    return rows
