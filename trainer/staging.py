"""MNIST's four files on this host: found, unpacked or downloaded, and verified. Nothing here imports torch.

What has to be unpacked or downloaded is done by one process of the host while the others wait for it, and a
file gets its name once its hash is right. What is there already is verified by every process, so that a
truncated or corrupt file is replaced and never trained on.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import http.client
import math
import os
import struct
import urllib.request
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from trainer.errors import InputError, TrainerError
from trainer.wholefile import replacing

# sha256 of each file of the whole MNIST, unpacked: whoever packed it, these bytes must come out.
OFFICIAL: Mapping[str, str] = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
FILES = tuple(OFFICIAL)
MINI = Path(__file__).resolve().parent / "mini"
SUMS = "SHA256SUMS"

IMAGES_MAGIC, LABELS_MAGIC = 2051, 2049
SIDE = 28
BLOCK = 1 << 20
SILENCE_S = 30  # a mirror that sends nothing for so long is given up


class SourceError(TrainerError):
    """A packed file cannot be read, or holds something else than it should."""


# --- The three kinds of --data; each function returns the folder that holds the four files, unpacke---


def mini(home: Path) -> Path:
    """The subset that ships with the trainer, unpacked below `home`."""
    sums = _read_sums(MINI / SUMS)
    if sums is None:
        raise TrainerError(f"{MINI / SUMS} is missing or damaged: install ringctl again")
    return _stage(home, f"mini-{_short(sums.values())}", [str(MINI)], sums)


def given(path: str, home: Path) -> Path:
    """The files in the user's own folder; if they are packed, unpacked below `home`."""
    folder, packed = find(path)
    if not packed:
        return folder
    content = _short(_sha256(folder / f"{name}.gz") for name in FILES)
    staged = _stage(home, f"packed-{content}", [str(folder)], sums=None)
    _check_format(staged)
    return staged


def downloaded(mirrors: Sequence[str], home: Path, sums: Mapping[str, str] = OFFICIAL) -> Path:
    """The whole MNIST; of each file the first of `mirrors` (URLs, or folders) that has it as it should be."""
    return _stage(home, f"mnist-{_short(sums.values())}", mirrors, sums)


def find(path: str) -> tuple[Path, bool]:
    """The folder at or below `path` with all four files, and whether they are packed; InputError if none."""
    if not os.path.isdir(os.path.expanduser(path)):
        raise InputError(
            f"--data {path!r} is not a folder on this machine; it is mini, download, or a folder"
        )
    root = Path(path).expanduser()
    folders = (root / "MNIST" / "raw", root / "raw", root)
    for suffix in ("", ".gz"):
        for folder in folders:
            if all(os.path.isfile(folder / (name + suffix)) for name in FILES):
                if not suffix:
                    _check_format(folder)
                return folder, bool(suffix)
    wanted = ", ".join(FILES)
    raise InputError(
        f"--data {path!r} lacks MNIST's files: it needs {wanted}, or all four as .gz, there or in MNIST/raw"
    )


# --- Staging --------------------------------------------------------------------------------------


def home_folder(environ: Mapping[str, str]) -> Path:
    """Where ringctl keeps its files on this host."""
    return Path(environ.get("RINGCTL_HOME") or "~/.ringctl").expanduser()


def _stage(home: Path, label: str, sources: Sequence[str], sums: Mapping[str, str] | None) -> Path:
    """The folder `label` below `home`, holding all files with these hashes; makes or repairs it where needed.

    Without `sums` whatever unpacks without an error is right, and its hashes are kept beside it for the next
    time.
    """
    folder = home / "data" / label / "MNIST" / "raw"
    if _is_whole(folder, sums):
        return folder
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        with _only_one_process(home / "data" / f"{label}.lock"):
            if not _is_whole(folder, sums):  # another process may have done it while this one waited
                _fill(folder, sources, sums)
    except OSError as error:
        raise TrainerError(
            f"cannot unpack the data into {folder}: {error.strerror or error}; "
            "make room there, or set RINGCTL_HOME to another folder"
        ) from error
    return folder


def _fill(folder: Path, sources: Sequence[str], sums: Mapping[str, str] | None) -> None:
    found = {}
    for name in FILES:
        if sums is not None and _sha256(folder / name) == sums[name]:
            continue
        found[name] = _from_first_good(folder / name, sources, sums[name] if sums else None)
    if sums is None:
        text = "".join(f"{digest}  {name}\n" for name, digest in found.items())
        _write(folder / SUMS, [text.encode()])


def _from_first_good(target: Path, sources: Sequence[str], wanted: str | None) -> str:
    """Write `target` from the first source that is right, and return its hash."""
    reasons = []
    for source in sources:
        location = f"{source.rstrip('/')}/{target.name}.gz"
        try:
            return _write(target, _unpacked(location), wanted)
        except SourceError as error:
            reasons.append(f"{location}: {error}")
    raise TrainerError(
        f"no usable {target.name}.gz ({'; '.join(reasons)}); "
        "get MNIST's four files by other means and give their folder as --data FOLDER, or use --data mini"
    )


def _unpacked(location: str) -> Iterator[bytes]:
    """The content of a .gz at a path or URL, in blocks."""
    try:
        with _open(location) as packed, gzip.GzipFile(fileobj=packed) as stream:
            while block := stream.read(BLOCK):
                yield block
    except (OSError, EOFError, zlib.error, http.client.HTTPException, ValueError) as error:
        reason = str(error).removeprefix("<urlopen error ").removesuffix(">")
        raise SourceError(reason or type(error).__name__) from error


def _open(location: str) -> IO[bytes]:
    if "://" not in location:
        return open(location, "rb")
    print(f"fetching {location}", flush=True)
    return cast(IO[bytes], urllib.request.urlopen(location, timeout=SILENCE_S))


def _write(target: Path, blocks: Iterable[bytes], wanted: str | None = None) -> str:
    """Replace `target` by these bytes and return their hash; if it is not the wanted one, change nothing."""
    digest = hashlib.sha256()
    with replacing(target, target.with_name(f"{target.name}.part")) as file:
        for block in blocks:
            digest.update(block)
            file.write(block)
        if wanted not in (None, digest.hexdigest()):
            raise SourceError("unpacks to something else than MNIST's")
    return digest.hexdigest()


@contextmanager
def _only_one_process(path: Path) -> Iterator[None]:
    """Wait for the lock on this file; a process that dies gives it back."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# --- Verifying ------------------------------------------------------------------------------------


def _is_whole(folder: Path, sums: Mapping[str, str] | None) -> bool:
    known = sums if sums is not None else _read_sums(folder / SUMS)
    return known is not None and all(_sha256(folder / name) == known[name] for name in FILES)


def _read_sums(path: Path) -> dict[str, str] | None:
    """Name -> hash, as `sha256sum` writes it; None if the file is not there or does not cover all files."""
    try:
        lines = [line.split() for line in path.read_text(errors="replace").splitlines()]
    except OSError:
        return None
    sums = {words[1]: words[0] for words in lines if len(words) == 2}
    return sums if set(FILES) <= set(sums) else None


def _sha256(path: Path) -> str:
    """Hash of a file, "" if it cannot be read."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
    except OSError:
        return ""
    return digest.hexdigest()


def _short(digests: Iterable[str]) -> str:
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:16]


def _check_format(folder: Path) -> None:
    """InputError unless the files' headers and sizes are those of 28x28 images with one label each."""
    for part in ("train", "t10k"):
        images, labels = folder / f"{part}-images-idx3-ubyte", folder / f"{part}-labels-idx1-ubyte"
        count, rows, columns = _header(images, IMAGES_MAGIC, dimensions=3)
        (label_count,) = _header(labels, LABELS_MAGIC, dimensions=1)
        if (rows, columns) != (SIDE, SIDE):
            raise InputError(f"{images} has images of {rows}x{columns}; the trainer takes {SIDE}x{SIDE}")
        if count != label_count:
            raise InputError(f"{images} has {count:,} images but {labels.name} {label_count:,} labels")


def _header(path: Path, magic: int, dimensions: int) -> tuple[int, ...]:
    """The dimensions that an idx file states; InputError if it is none, or not as long as it states."""
    length = 4 + 4 * dimensions
    try:
        with path.open("rb") as file:
            head = file.read(length)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    if len(head) < length or head[:4] != struct.pack(">I", magic):
        raise InputError(f"{path} is not an MNIST file: copy it again")
    shape = struct.unpack(f">{dimensions}I", head[4:])
    wanted = length + math.prod(shape)
    if size != wanted:
        raise InputError(f"{path} has {size:,} bytes instead of {wanted:,}: copy it again")
    return shape
