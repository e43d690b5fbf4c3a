"""The folder that `ringctl pull` writes. What comes is put into DIR/pull.part first, and gets its place when
all of it is there; an interrupted pull leaves nothing else, and the next one goes on from it. One that was
interrupted while things got their places also leaves DIR/pull.placing, which goes last of all."""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from launcher.errors import InputError
from launcher.fetch import write, writing
from launcher.ownfolder import closed_to_others
from launcher.wholefile import replace_whole, sync_folder

PART = "pull.part"
MODEL, ABOUT, METRICS, LOGS = "model.pt", "checkpoint.json", "metrics", "logs"
EVENTS = "events.jsonl"
PLACING = "pull.placing"  # names the run, from before the first thing gets its place until PART is gone
METRICS_FILE = re.compile(r"rank-[0-9]+-attempt-[0-9]+\.jsonl")
LOG_FILE = re.compile(r"events\.jsonl|rank[0-9]+\.(out|err)\.log")


def refuse_full(folder: Path, force: bool, run: str | None = None) -> None:
    """InputError if there is something in the folder that is not ours to replace. Where a pull was
    interrupted while it put things in their places, the next one of that run goes on; None: of which run is
    not known yet."""
    try:
        names = set(os.listdir(folder)) - {PART, PLACING}
        begun = placed_in(folder)
        force = force or (begun is not None and run in (None, begun))
    except FileNotFoundError:
        return
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror}; name another folder") from None
    if names and not force:
        raise InputError(
            f"{folder} is there already, and not empty",
            fix="name another folder, or write --force to replace what a pull has put there",
        )


def placed_in(folder: Path) -> str | None:
    """The run of which a pull was interrupted while it put things in their places."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return (folder / PLACING).read_text(errors="replace")
    return None


class Told(NamedTuple):
    """An event in a file of them."""

    time: float
    run: str
    host: str
    line: bytes


def events_in(path: Path) -> Iterator[Told]:
    """All but what is none, in a file that somebody may have changed."""
    with path.open("rb") as lines:
        for line in lines:
            if (event := told_in(line)) is not None:
                yield event


def told_in(line: bytes) -> Told | None:
    with contextlib.suppress(ValueError, TypeError, KeyError):
        event = json.loads(line)
        return Told(float(event["time"]), str(event["run"]), str(event["host"]), line)
    return None


class PullFolder:
    """DIR, and DIR/pull.part while it is pulled into."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.part = folder, folder / PART
        self.metrics, self.logs = self.part / METRICS, self.part / LOGS

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """For this process alone, and closed to other users. Of an earlier pull only models remain, whole or
        not."""
        with closed_to_others(), self._held():
            yield

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        with writing(self.folder):
            self.part.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.part, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InputError(f"another `ringctl pull` is writing to {self.folder}") from None
            with writing(self.folder):
                for path in (self.metrics, self.logs):
                    shutil.rmtree(path, ignore_errors=True)
                    path.mkdir()
            yield
        finally:
            os.close(descriptor)

    def model_part(self, sha256: str) -> Path:
        """Where a model is put as it comes; the beginnings of others are of no use any more."""
        mine = self.part / f"model-{sha256}.part"
        for other in self.part.glob("model-*.part"):
            if other != mine:
                other.unlink()
        return mine

    def has_another(self, run: str) -> bool:
        """Whether what an earlier pull has put there is of another run: by its log or, without, its model."""
        with writing(self.folder):
            with contextlib.suppress(FileNotFoundError):
                for event in events_in(self.folder / LOGS / EVENTS):
                    return event.run != run
            with contextlib.suppress(FileNotFoundError, ValueError, TypeError, KeyError):
                return bool(json.loads((self.folder / ABOUT).read_bytes())["run"] != run)
        return False

    def begin_placing(self, run: str) -> None:
        """What is interrupted from now on may go on in a folder with something in it."""
        with writing(self.folder):
            replace_whole(self.part / PLACING, run.encode())  # what a kill leaves of it goes with the rest
            (self.part / PLACING).replace(self.folder / PLACING)
            sync_folder(self.folder)

    def place_model(self, part: Path | None, about: Mapping[str, Any]) -> None:
        """The model and what it is. They are never there together if they do not belong together. Without
        `part` the model is in its place already."""
        with writing(self.folder):
            beside = self.part / ABOUT
            write(beside, "wb", [json.dumps(about, indent=1).encode() + b"\n"])
            if part is not None:
                (self.folder / ABOUT).unlink(missing_ok=True)
                sync_folder(self.folder)  # also after a power cut
                part.replace(self.folder / MODEL)
                sync_folder(self.folder)
            beside.replace(self.folder / ABOUT)
            sync_folder(self.folder)

    def drop_logs(self, hosts: set[str]) -> None:
        """What has come of hosts that broke off is not their log, and gets no place."""
        events, kept = self.logs / EVENTS, self.logs / f"{EVENTS}.part"
        ranks: set[int | None] = set()  # of which they have told: where ranks are is not known everywhere
        with writing(self.logs):
            if events.exists():
                with events.open("rb") as lines, kept.open("wb") as file:
                    for line in lines:
                        event = json.loads(line)
                        if event["host"] in hosts:
                            ranks.add(event["rank"])
                        else:
                            file.write(line)
                kept.replace(events)
            for path in self.logs.glob("rank*.log"):
                if int(path.name.split(".")[0].removeprefix("rank")) in ranks:
                    path.unlink()

    def has_come(self) -> bool:
        """Whether there are metrics or logs to be placed."""
        with writing(self.folder):
            return any(
                path.suffix != ".part" for kind in (self.metrics, self.logs) for path in kind.iterdir()
            )

    def place_rest(self, whole_logs: bool, is_others: bool = False) -> dict[str, int]:
        """Metrics and logs, a file at a time; how many of each. What an earlier pull has left of logs, and
        nothing replaces, goes if these are of all hosts; else it may be that of the one that is missing. What
        it has left of another run goes where something has come in its place."""
        with writing(self.folder):
            if not whole_logs:
                self._keep_earlier_events()
            for source, name in ((self.metrics, METRICS_FILE), (self.logs, LOG_FILE)):
                come = self._come(source)
                if (is_others and come) or (whole_logs and source is self.logs):
                    self._remove_others(source.name, name, come)
            return {source.name: self._place(source) for source in (self.metrics, self.logs)}

    def _keep_earlier_events(self) -> None:
        """Those that an earlier pull has brought of hosts of which none have come now stay, between the new
        ones by their time: all hosts' are in one file."""
        new, old, both = self.logs / EVENTS, self.folder / LOGS / EVENTS, self.logs / f"{EVENTS}.part"
        if not new.exists() or not old.exists():
            return
        come = {(event.run, event.host) for event in events_in(new)}
        runs = {run for run, _ in come}
        earlier = (e for e in events_in(old) if e.run in runs and (e.run, e.host) not in come)
        with both.open("wb") as file:
            file.writelines(e.line for e in heapq.merge(events_in(new), earlier, key=lambda e: e.time))
        both.replace(new)

    def _come(self, source: Path) -> set[str]:
        return {path.name for path in source.iterdir() if path.suffix != ".part"}

    def _remove_others(self, kind: str, name: re.Pattern[str], come: set[str]) -> None:
        """Files of this kind with such a name, but for those that are about to be replaced."""
        for path in (self.folder / kind).glob("*"):
            if name.fullmatch(path.name) and path.name not in come:
                path.unlink()

    def _place(self, source: Path) -> int:
        target = self.folder / source.name
        target.mkdir(exist_ok=True)
        names = self._come(source)
        for name in names:
            (source / name).replace(target / name)
        return len(names)

    def close(self, keep_model: bool) -> None:
        """All that came has its place; but for a model of which a part came, if there is one."""
        with writing(self.folder):
            begun = [path for path in self.part.glob("model-*.part") if keep_model]
            for path in self.part.iterdir():
                if path not in begun:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            if not begun:
                self.part.rmdir()
            (self.folder / PLACING).unlink(missing_ok=True)  # until here the same command goes on
