"""What a run has on a host that people want at home: one file, standard library only, Python 3.8 and up.

One JSON request in the first line of stdin. Answers are on stdout, each after a line that reads SENTINEL.

    list   the run's checkpoints and metrics, and how long its log is
    send   files of it, each from an offset on: an answer with the number of bytes, then these, raw

Nothing is read but files of these kinds below the run's own folder. A symbolic link that leads out of it is
not followed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import stat
import sys

from launcher.hostdisk import read_json

TYPE_CHECKING = False  # a type checker takes it for true; importing `typing` at run time would cost a start
if TYPE_CHECKING:
    from typing import Any

SENTINEL = b"--ringctl-hostd--\n"
CHUNK = 1 << 20
REQUEST_S = 60  # whoever asks has said all by then
MANIFEST_BYTES = 1 << 20
MOST_STEPS = 64  # that are told of, the newest; the trainer keeps two
RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
STEP = re.compile(r"step-([0-9]{8,18})(?:\.([1-9][0-9]{0,5}))?")
PART = re.compile(r"rank-(0|[1-9][0-9]{0,5})\.(pt|json)")
METRICS = re.compile(r"metrics-([1-9][0-9]{0,5})\.jsonl")
NUMBER = re.compile(r"0|[1-9][0-9]{0,5}")
EVENTS = re.compile(r"events-([0-9]+)-[0-9]+\.jsonl")
SENT = re.compile(
    r"checkpoints/step-[0-9]{8,18}(\.[0-9]{1,6})?/model\.pt|ranks/[0-9]{1,6}/metrics-[0-9]{1,6}\.jsonl"
)


class Refused(Exception):
    """The request cannot be carried out; the message is for the user."""


class Shorter(Exception):
    """A file has become shorter while it was sent: all that can be done is to break off."""


# --- Places --------------------------------------------------------------------------------------


def run_folder(run: object) -> str:
    """The run's own folder, with all links on the way to it followed."""
    home = os.environ.get("RINGCTL_HOME") or os.path.expanduser("~/.ringctl")
    if not isinstance(run, str) or not RUN.fullmatch(run):
        raise Refused("that is not the name of a run")
    folder = os.path.realpath(os.path.join(home, "runs", run))
    if not os.path.isdir(folder):
        raise Refused(f"there is no run {run} on this host")
    return folder


def below(base: str, *parts: str) -> str:
    """The path of something in the run's folder without any links, or "" if it is not in there."""
    path = os.path.realpath(os.path.join(base, *parts))
    return path if path.startswith(base + os.sep) else ""


def names_in(base: str, *parts: str) -> list[str]:
    """What is in a folder of the run's; nothing if that is none."""
    folder = below(base, *parts) if parts else base
    try:
        return os.listdir(folder) if folder else []
    except OSError:
        return []


def about(base: str, *parts: str) -> os.stat_result | None:
    """Size and time of a file in the run's folder; None if it is none, or not in there."""
    path = below(base, *parts)
    try:
        found = os.stat(path) if path else None
    except OSError:
        return None
    return found if found and stat.S_ISREG(found.st_mode) else None


def open_file(base: str, path: str) -> int:
    real = below(base, path)
    if not SENT.fullmatch(path) or not real or about(base, path) is None:
        raise Refused(f"there is no file {path[:100]} of the run on this host")
    return opened(real)


def opened(real: str) -> int:
    """Should it be no plain file any more, opening it does not wait."""
    return os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


# --- list ----------------------------------------------------------------------------------------


def command_list(request: dict[str, Any]) -> dict[str, Any]:
    base = run_folder(request.get("run"))
    plan = plan_of(base)
    return {
        "steps": [step_in(base, *place) for place in step_places(base)],
        "ranks": [int(rank["rank"]) for rank in plan["ranks"]],
        "world": int(plan["world"]),
        "metrics": metrics_in(base),
        "events": events_bytes(base),
        "checkpoint_dir": elsewhere(base),
    }


def step_places(base: str) -> list[tuple[int, int, str]]:
    """Step, turn and folder of the newest checkpoints, in order; what has another name, or is no folder, is
    none."""
    matches = [match for match in map(STEP.fullmatch, names_in(base, "checkpoints")) if match]
    found = [(int(match[1]), int(match[2] or 0), match[0]) for match in matches]
    places = [place for place in found if place[2].partition(".")[0] == f"step-{place[0]:08d}"]
    return [p for p in sorted(places) if os.path.isdir(below(base, "checkpoints", p[2]))][-MOST_STEPS:]


def step_in(base: str, step: int, turn: int, name: str) -> dict[str, Any]:
    """What this host has of one checkpoint: its files, and what their manifests say."""
    files, manifests, unread, written = {}, [], [], 0.0
    for file in sorted(names_in(base, "checkpoints", name)):
        match = PART.fullmatch(file)
        found = about(base, "checkpoints", name, file) if match or file == "model.pt" else None
        if found is None:
            continue
        written = max(written, found.st_mtime)
        if match and match[2] == "json":
            manifest = manifest_in(below(base, "checkpoints", name, file), step, int(match[1]))
            manifests += [manifest] if manifest else []
            unread += [] if manifest else [int(match[1])]
        else:
            files[file] = found.st_size
    found_here = {"files": files, "manifests": manifests, "unread": unread}
    return {"step": step, "turn": turn, "written": written, **found_here}


def manifest_in(path: str, step: int, rank: int) -> dict[str, Any] | None:
    """Of a manifest what is wanted; None if it is damaged, or that of something else."""
    try:
        with os.fdopen(opened(path), "rb") as file:
            told = json.loads(file.read(MANIFEST_BYTES))
        files = {
            str(name): {"bytes": int(of["bytes"]), "sha256": str(of["sha256"])}
            for name, of in told["files"].items()
            if name in ("model.pt", f"rank-{rank}.pt")
        }
        run, epoch, model = dict(told["run"]), int(told["epoch"]), str(told.get("model_sha256", ""))
        if told["version"] != 1 or told["step"] != step or told["rank"] != rank or not is_sealed(told):
            return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return None  # OverflowError: what Python reads as infinity
    return {"rank": rank, "epoch": epoch, "run": run, "files": files, "model": model}


def is_sealed(manifest: dict[str, Any]) -> bool:
    """Whether it says what the trainer has written; those of before have no checksum of their own."""
    rest = {name: value for name, value in manifest.items() if name != "sha256"}
    own = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
    return bool(manifest.get("sha256", own) == own)


def metrics_in(base: str) -> list[dict[str, int]]:
    found = []
    for rank in names_in(base, "ranks"):
        for name in names_in(base, "ranks", rank) if NUMBER.fullmatch(rank) else []:
            match, file = METRICS.fullmatch(name), about(base, "ranks", rank, name)
            if match and file:
                found.append({"rank": int(rank), "attempt": int(match[1]), "bytes": file.st_size})
    return sorted(found, key=lambda file: (file["rank"], file["attempt"]))


def events_bytes(base: str) -> int:
    """How long the log of the newest attempt is here."""
    sizes: dict[int, int] = {}
    for match in map(EVENTS.fullmatch, names_in(base)):
        file = about(base, match[0]) if match else None
        if match and file:
            sizes[int(match[1])] = sizes.get(int(match[1]), 0) + file.st_size
    return sizes[max(sizes)] if sizes else 0


def elsewhere(base: str) -> str:
    """The folder that the run's checkpoints are in, if they are not in the run's own; else ""."""
    own, plan = os.path.join(base, "checkpoints"), plan_of(base)
    argv = plan["ranks"][0]["argv"] if plan["ranks"] else []
    named = os.path.expanduser(chosen_folder(argv) or own)
    place = os.path.realpath(os.path.join(os.path.expanduser(plan["workdir"]), named))
    return "" if place in (own, below(base, "checkpoints")) else place


def plan_of(base: str) -> dict[str, Any]:
    """What this host was told to do in the last attempt that it took part in; without ranks, if nothing."""
    nothing: dict[str, Any] = {"ranks": [], "workdir": "", "world": 0}
    try:
        return dict(nothing, **(read_json(os.path.join(base, "plan.json")) or {}))
    except OSError:
        return nothing


def chosen_folder(argv: list[str]) -> str:
    """What --checkpoint-dir says, in any of the ways to write it; the last one counts."""
    folder = ""
    for word, after in zip(argv, argv[1:] + [""]):
        option, given, value = word.partition("=")
        if option.replace("_", "-") == "--checkpoint-dir":
            folder = value if given else after
    return folder


# --- send ----------------------------------------------------------------------------------------


def command_send(request: dict[str, Any]) -> None:
    """Each of the `files`: {"path", "offset", "lines": whether to send whole lines only}."""
    base = run_folder(request.get("run"))
    for wanted in request["files"]:
        try:
            fd = open_file(base, str(wanted["path"]))
        except (Refused, OSError) as error:
            answer({"missing": str(error)})
            continue
        try:
            send(fd, max(0, int(wanted.get("offset", 0))), bool(wanted.get("lines")))
        finally:
            os.close(fd)


def send(fd: int, offset: int, lines: bool) -> None:
    """So many bytes as the file has now; somebody may be writing to it."""
    size = os.fstat(fd).st_size
    left = max(0, (last_line_end(fd, size) if lines else size) - offset)
    answer({"bytes": left})
    while left:
        data = os.pread(fd, min(left, CHUNK), offset)
        if not data:
            raise Shorter
        sys.stdout.buffer.write(data)
        offset, left = offset + len(data), left - len(data)


def last_line_end(fd: int, size: int) -> int:
    """Where the last whole line ends."""
    end = size
    while end:
        begin = max(0, end - CHUNK)
        newline = os.pread(fd, end - begin, begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0


# --- main ----------------------------------------------------------------------------------------


def answer(value: dict[str, Any]) -> None:
    sys.stdout.buffer.write(SENTINEL + json.dumps(value).encode() + b"\n")


def main() -> int:
    signal.alarm(REQUEST_S)
    request = json.loads(sys.stdin.buffer.readline() or b"{}")
    signal.alarm(0)
    try:
        if sys.argv[1] == "list":
            answer(command_list(request))
        else:
            command_send(request)
        sys.stdout.buffer.flush()
    except Refused as error:
        answer({"kind": "error", "error": str(error)})
    except (BrokenPipeError, Shorter):
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
