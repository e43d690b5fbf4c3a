"""Code to the hosts: a snapshot of a folder, known by its content; only what a host lacks travels."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import subprocess
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from launcher.agent import Agent, understood
from launcher.errors import HostError, InputError, RingctlError
from launcher.fanout import fan_out
from launcher.ignore import Ignored, ignore_matcher, ignore_rules
from launcher.model import to_json
from launcher.plan import is_trainer

JUNK = """
    .git .hg .svn .venv venv node_modules __pycache__ *.pyc *.pyo *.egg-info .mypy_cache .pytest_cache
    .ruff_cache .hypothesis .tox .nox .ipynb_checkpoints .DS_Store .cluster
""".split()  # noqa: SIM905 - reads better than sixteen quoted lines
MOST_BYTES = 2 << 30
MOST_FILES = 100_000
SAMPLE = 16 << 10  # so much of a file tells whether compressing it is worth the time
PUSH_S = 3600.0
BATCH = 16 << 20  # so much is sent at once, unless one file is larger
MOST_IN_VAIN = 3  # another push may collect what this one counted on
MOST_PACKED = 16  # batches kept for other hosts: one that asks oddly must not fill our memory
LARGE = 5 << 20  # from here on it takes long enough to say so
SAY_S = 2.0
NO_REPOSITORY = "not a git repository (or any"  # git's words for it, as opposed to one that is damaged
UNREADABLE = re.compile(r"warning: could not open directory '(.*?)/?': (.*)")


@dataclass(frozen=True)
class Entry:
    """One file or symbolic link of a snapshot."""

    path: str
    kind: Literal["file", "link"]
    content: str  # SHA-256 of the file, or where the link points
    size: int
    executable: bool


@dataclass(frozen=True)
class Snapshot:
    """A folder as it was at one moment."""

    root: str
    entries: tuple[Entry, ...]
    digest: str

    def about(self) -> dict[str, Any]:
        """What a host's code store is asked about it."""
        return {"digest": self.digest, "entries": [to_json(entry) for entry in self.entries]}

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.entries)


# --- Taking a snapshot ---------------------------------------------------------------------------


def take(root: Path, secret: str = "") -> Snapshot:
    """The folder's files: what git tracks or would track, else all but the usual junk; less .ringignore, and
    less the file `secret`."""
    ignored = ignore_rules(root)
    hidden = os.path.relpath(os.path.realpath(secret), os.path.realpath(root)) if secret else ""
    names = sorted({name for name in list_files(root, ignored) if not ignored(name) and name != hidden})
    return snapshot_of(root, names)


def of_command(command: tuple[str, ...], trainer: str, env_file: str = "") -> Snapshot:
    """What hosts need to run it: the folder the user is in, but not the file with the run's secrets; or the
    built-in trainer."""
    from launcher.ask import folder

    return of_package(Path(trainer).parent) if is_trainer(command) else take(Path(folder()), env_file)


def of_package(package: Path) -> Snapshot:
    """One Python package, below a folder of its own."""
    found = walk(package, package.parent, lambda name: False)  # noqa: ARG005 - nothing of it is left out
    return snapshot_of(package.parent, sorted(found))


def snapshot_of(root: Path, names: Iterable[str]) -> Snapshot:
    entries = tuple(entry for name in names if (entry := read_entry(root, name)))
    if len(entries) > MOST_FILES or sum(entry.size for entry in entries) > MOST_BYTES:
        raise InputError(
            f"{root}: {len(entries):,} files are too much to push",
            fix="name what the run does not need in .ringignore",
        )
    canonical = json.dumps([to_json(entry) for entry in entries], sort_keys=True)
    return Snapshot(
        str(root), entries, hashlib.sha256(canonical.encode("utf-8", "surrogateescape")).hexdigest()
    )


def read_entry(root: Path, name: str) -> Entry | None:
    """None if there is no such file any more."""
    path = root / name
    try:
        about = path.lstat()
        if stat.S_ISLNK(about.st_mode):
            return Entry(name, "link", link_target(root, name), 0, False)
        if not stat.S_ISREG(about.st_mode):
            raise InputError(f"{path}: neither a file nor a link", fix=f"add {name} to .ringignore")
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise cannot_read(path, name, error.strerror) from None
    return Entry(name, "file", hashlib.sha256(data).hexdigest(), len(data), bool(about.st_mode & 0o100))


def link_target(root: Path, name: str) -> str:
    """Where a symbolic link points, which must be inside the folder."""
    path, top = root / name, os.path.realpath(root)
    target, real = os.readlink(path), os.path.realpath(path)
    if os.path.isabs(target) or not (real == top or real.startswith(top + os.sep)):
        raise InputError(
            f"{path}: a symbolic link that leaves the folder",
            fix=f"add {name} to .ringignore, or copy what it means",
        )
    return target


def cannot_read(path: Path, name: str, why: str | None) -> InputError:
    return InputError(f"{path}: {why}", fix=f"add {name} to .ringignore")


def list_files(root: Path, ignored: Ignored, under: str = "") -> list[str]:
    """Paths below `under`, a folder of `root`, relative to `root`; some may be `ignored`."""
    folder = root / under
    git = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(git, capture_output=True, check=False, env={**os.environ, "LC_ALL": "C"})
    except FileNotFoundError:
        if any((place / ".git").exists() for place in (folder.absolute(), *folder.absolute().parents)):
            raise InputError(f"{folder}: there is no git here to say what it ignores") from None
        return walk(folder, root, ignored)
    words = done.stderr.decode(errors="replace").strip()
    if done.returncode and NO_REPOSITORY in words:
        return walk(folder, root, ignored)
    if done.returncode:
        # Without git nobody knows what is to stay here: it may be secrets.
        raise InputError(f"{folder}: git cannot say what belongs to it: {words.replace(chr(10), ' ')}")
    prefix = f"{under}/" if under else ""
    for match in UNREADABLE.finditer(words):
        if not ignored(f"{prefix}{match[1]}/"):
            raise cannot_read(root / f"{prefix}{match[1]}", f"{prefix}{match[1]}", match[2])
    names = [prefix + os.fsdecode(name).rstrip("/") for name in done.stdout.split(b"\0") if name]
    # Submodules, and repositories of their own in a folder that is not tracked.
    inner = {name for name in names if os.path.isdir(root / name) and not os.path.islink(root / name)}
    whole = [name for name in sorted(inner) if os.path.lexists(root / name / ".git") and name != under]
    inside = [path for name in whole for path in list_files(root, ignored, name)]
    return [name for name in names if name not in inner] + inside


def walk(folder: Path, root: Path, ignored: Ignored) -> list[str]:
    """Everything below `folder` but the usual junk, relative to `root`."""
    junk = ignore_matcher(JUNK)
    found = []

    def complain(error: OSError) -> None:
        name = os.path.relpath(error.filename, root)
        if not ignored(f"{name}/"):
            raise cannot_read(Path(error.filename), name, error.strerror) from None

    for parent, folders, files in os.walk(folder, onerror=complain):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        folders[:] = [name for name in folders if name not in links and not junk(name)]
        found += [
            os.path.relpath(os.path.join(parent, name), root) for name in files + links if not junk(name)
        ]
    return found


# --- Pushing -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pushed:
    """What it took to bring one host up to date."""

    files: int
    bytes: int


def push(
    snapshot: Snapshot,
    agents: Mapping[str, Agent],
    say: Callable[[str], None] | None = None,
    lacking: Mapping[str, dict[str, Any]] | None = None,
) -> dict[str, Pushed | RingctlError]:
    """Bring every host up to date; each one checks every file by its hash before it counts as there. `say`
    hears now and then how far a large push has come; `lacking` is what hosts have said already."""
    bodies, progress, about = Bodies(snapshot), Progress(say), snapshot.about()

    def work(name: str) -> Pushed:
        answer = (lacking or {}).get(name) or agents[name].ask("hoststore.py", ["check"], about)
        answer = bodies.lacking(name, answer)
        return push_one(agents[name], about, answer, bodies, progress)

    return fan_out(agents, work)


def push_one(
    agent: Agent, about: dict[str, Any], answer: dict[str, Any], bodies: Bodies, progress: Progress
) -> Pushed:
    """A batch at a time, so that a push that breaks off goes on where it was."""
    files = size = in_vain = 0
    total = bodies.size(answer["missing"])
    while not answer["have"]:
        left = set(answer["missing"])
        progress.tell(agent.host.name, total - bodies.size(answer["missing"]), total)
        blobs, body = bodies.of(bodies.batch(answer["missing"]))
        answer = agent.ask("hoststore.py", ["receive"], {**about, "blobs": blobs}, body, timeout=PUSH_S)
        answer = bodies.lacking(agent.host.name, answer)
        files, size = files + len(blobs), size + len(body)
        asks_again = {content for content, _ in blobs} & set(answer["missing"])
        in_vain += not answer["have"] and bool(asks_again or not set(answer["missing"]) < left)
        if in_vain > MOST_IN_VAIN:
            raise RingctlError(f"{agent.host.name}: somebody removes the code there as fast as it comes")
    return Pushed(files, size)


class Progress:
    """Says how far a push has come, every few seconds; nothing of a small one."""

    def __init__(self, say: Callable[[str], None] | None) -> None:
        self._say = say
        self._next = 0.0
        self._hosts: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def tell(self, host: str, there: int, total: int) -> None:
        with self._lock:
            self._hosts[host] = (there, total)
            if self._say and total >= LARGE and time.monotonic() >= self._next:
                self._next = time.monotonic() + SAY_S
                done, all_ = (sum(sizes) / 1e6 for sizes in zip(*self._hosts.values(), strict=True))
                self._say(f"pushing code: {done:,.0f} of {all_:,.0f} MB")


class Bodies:
    """Compressed contents for `receive`: most hosts lack the same files, so each set is packed once."""

    def __init__(self, snapshot: Snapshot) -> None:
        files = [entry for entry in snapshot.entries if entry.kind == "file"]
        self._paths = {entry.content: os.path.join(snapshot.root, entry.path) for entry in files}
        self._sizes = {entry.content: entry.size for entry in files}
        self._packed: dict[tuple[str, ...], tuple[list[tuple[str, int]], bytes]] = {}
        self._lock = threading.Lock()

    def lacking(self, host: str, answer: Mapping[str, Any]) -> dict[str, Any]:
        """What a host's store says of the snapshot, with nothing that is not part of it."""
        with understood(host):
            have, missing = answer["have"], answer["missing"]
            if type(have) is not bool or not isinstance(missing, list):
                raise TypeError("have, missing")
            alien = [content for content in missing if content not in self._sizes]
        if alien:
            raise HostError(host, f"it asked for {alien[0]!r:.80}, which is not part of the snapshot")
        return {"have": have, "missing": list(dict.fromkeys(missing))}

    def size(self, contents: Iterable[str]) -> int:
        return sum(self._sizes.get(content, 0) for content in contents)

    def batch(self, missing: Iterable[str]) -> tuple[str, ...]:
        """The first few of them."""
        chosen: list[str] = []
        size = 0
        for content in missing:
            size += self._sizes.get(content, 0)
            if chosen and size > BATCH:
                break
            chosen.append(content)
        return tuple(chosen)

    def of(self, missing: tuple[str, ...]) -> tuple[list[tuple[str, int]], bytes]:
        """([(content, size), ...], their bytes in that order, compressed)."""
        with self._lock:
            if missing not in self._packed:
                while len(self._packed) >= MOST_PACKED:
                    del self._packed[next(iter(self._packed))]
                self._packed[missing] = self._pack(missing)
            return self._packed[missing]

    def _pack(self, missing: tuple[str, ...]) -> tuple[list[tuple[str, int]], bytes]:
        packer = Packer()
        blobs = []
        for content in missing:
            try:
                data = Path(self._paths[content]).read_bytes()
            except OSError as error:
                raise RingctlError(f"{self._paths[content]}: {error.strerror} while it was pushed") from None
            blobs.append((content, len(data)))
            packer.add(data)
        return blobs, packer.finish()


class Packer:
    """Puts contents one behind the other, compressed where that helps: a chain of zlib streams."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._level = 0
        self._stream = zlib.compressobj(0)

    def add(self, data: bytes) -> None:
        sample = data[:SAMPLE]
        level = 1 if len(zlib.compress(sample, 1)) < 0.9 * len(sample) else 0
        if level != self._level:
            self._pieces.append(self._stream.flush())
            self._stream, self._level = zlib.compressobj(level), level
        self._pieces.append(self._stream.compress(data))

    def finish(self) -> bytes:
        return b"".join([*self._pieces, self._stream.flush()])
