"""The files on a host: several processes at once, damage of every kind, mirrors, full disks."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import os
import resource
import signal
import stat
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer import idx
from tests.trainer.ranks import each
from trainer import staging
from trainer.errors import InputError, TrainerError

IMAGES = "train-images-idx3-ubyte"


def sums_of(files: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def held(folder: Path, files: dict[str, bytes]) -> bool:
    return all((folder / name).read_bytes() == content for name, content in files.items())


def half_written(home: Path) -> list[Path]:
    return list(home.rglob("*.part"))


class Mirror:
    """An HTTP server on this machine that counts what it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.asked: Counter[str] = Counter()
        mirror = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            def __init__(self, *args: object) -> None:
                super().__init__(*args, directory=str(folder))  # type: ignore[arg-type]  # passed on as given

            def do_GET(self) -> None:
                mirror.asked[self.path.lstrip("/")] += 1
                super().do_GET()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))

    def __enter__(self) -> Mirror:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def files() -> dict[str, bytes]:
    return idx.mnist()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def mirror(tmp_path: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Mirror(idx.write(tmp_path / "mirror", files, packed=True)) as mirror:
        yield mirror


def test_mini_is_unpacked_once_by_whichever_process_comes_first(home: Path) -> None:
    folders = each(6, lambda _: staging.mini(home))
    assert len(set(folders)) == 1
    assert sorted(path.name for path in folders[0].iterdir()) == sorted(staging.FILES)
    assert sums_of({name: (folders[0] / name).read_bytes() for name in staging.FILES}) == {
        line.split()[1]: line.split()[0] for line in (staging.MINI / "SHA256SUMS").read_text().splitlines()
    }


def test_ringctls_home_is_for_its_owner_only(home: Path) -> None:
    staging.mini(home)
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


def test_home_is_below_the_users_unless_the_environment_says_otherwise(tmp_path: Path) -> None:
    assert staging.home_folder({}) == Path.home() / ".ringctl"
    assert staging.home_folder({"RINGCTL_HOME": str(tmp_path)}) == tmp_path


@pytest.mark.parametrize("damage", ["truncated", "changed", "removed"])
def test_a_damaged_file_is_replaced_and_whole_ones_are_left(damage: str, home: Path) -> None:
    folder = staging.mini(home)
    good = (folder / IMAGES).read_bytes()
    untouched = (folder / "t10k-images-idx3-ubyte").stat().st_mtime_ns
    if damage == "removed":
        (folder / IMAGES).unlink()
    else:
        (folder / IMAGES).write_bytes(good[:1000] if damage == "truncated" else good[:-1] + b"\xaa")
    assert staging.mini(home) == folder
    assert (folder / IMAGES).read_bytes() == good
    assert (folder / "t10k-images-idx3-ubyte").stat().st_mtime_ns == untouched


def test_what_a_killed_process_left_is_removed(home: Path) -> None:
    folder = staging.mini(home)
    (folder / IMAGES).rename(folder / f"{IMAGES}.part")
    staging.mini(home)
    assert not half_written(home)


def test_a_process_that_is_killed_while_it_unpacks_leaves_nothing_half_written(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(_: str) -> Iterator[bytes]:
        yield bytes(staging.BLOCK)
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(staging, "_unpacked", begin)
        each(1, lambda _: staging.mini(home), dying=[0])
    (folder,) = (home / "data").glob("*/MNIST/raw")
    assert not list(folder.iterdir())
    assert staging.mini(home) == folder


def test_a_damaged_copy_of_the_users_packed_files_is_replaced_too(
    tmp_path: Path, home: Path, files: dict[str, bytes]
) -> None:
    mine = idx.write(tmp_path / "mine", files, packed=True)
    folder = staging.given(str(mine), home)
    assert held(folder, files)
    (folder / IMAGES).write_bytes(files[IMAGES][:100])
    assert staging.given(str(mine), home) == folder
    assert held(folder, files)
    (folder / "SHA256SUMS").write_text("nonsense")
    (folder / IMAGES).write_bytes(b"more nonsense")
    assert held(staging.given(str(mine), home), files)


def test_other_packed_files_in_the_same_folder_are_noticed(tmp_path: Path, home: Path) -> None:
    mine = idx.write(tmp_path / "mine", idx.mnist(40), packed=True)
    staging.given(str(mine), home)
    idx.write(mine, idx.mnist(50), packed=True)
    assert held(staging.given(str(mine), home), idx.mnist(50))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda packed: packed[:100], "ended before the end-of-stream marker"),
        (lambda packed: packed[:-5] + b"\0\0\0\0\0", "failed"),
        (lambda _: b"<html>not here</html>", "Not a gzipped file"),
        (lambda _: b"", "is not an MNIST file"),
        (lambda _: gzip.compress(b"something else"), "is not an MNIST file"),
    ],
    ids=["cut short", "wrong checksum", "not packed", "empty", "other content"],
)
def test_a_corrupt_packed_file_is_refused_by_name_and_nothing_half_written_stays(
    damage: object, reason: str, tmp_path: Path, home: Path, files: dict[str, bytes]
) -> None:
    mine = idx.write(tmp_path / "mine", files, packed=True)
    packed = mine / f"{IMAGES}.gz"
    packed.write_bytes(damage(packed.read_bytes()))  # type: ignore[operator]  # from the table above
    with pytest.raises(TrainerError, match=IMAGES) as caught:
        staging.given(str(mine), home)
    assert reason in str(caught.value)
    assert not half_written(home)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        ({IMAGES: b"\0\0\x08\x03" + b"\0" * 5}, "is not an MNIST file"),
        ({IMAGES: idx.mnist()[IMAGES][:-1]}, "bytes instead of 31,376"),
        ({IMAGES: idx.mnist(side=32)[IMAGES]}, "32x32"),
        ({IMAGES: idx.mnist(30)[IMAGES]}, "30 images but"),
    ],
    ids=["no header", "truncated", "another size", "fewer images than labels"],
)
def test_unpacked_files_are_looked_at_before_training(
    spoil: dict[str, bytes], reason: str, tmp_path: Path, files: dict[str, bytes]
) -> None:
    mine = idx.write(tmp_path / "mine", files | spoil)
    with pytest.raises(InputError, match=reason):
        staging.find(str(mine))


def test_a_folder_that_lacks_a_file_is_refused(tmp_path: Path, files: dict[str, bytes]) -> None:
    mine = idx.write(tmp_path / "mine", files)
    (mine / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(InputError, match="lacks MNIST's files"):
        staging.find(str(mine))


def test_one_process_downloads_each_file_once_and_the_others_wait(
    mirror: Mirror, home: Path, files: dict[str, bytes]
) -> None:
    folders = each(5, lambda _: staging.downloaded([mirror.url], home, sums_of(files)))
    assert mirror.asked == {f"{name}.gz": 1 for name in files}
    assert held(folders[0], files)
    staging.downloaded([mirror.url], home, sums_of(files))
    assert mirror.asked.total() == len(files)


def test_a_mirror_that_lacks_a_file_or_has_a_wrong_one_is_passed_over(
    mirror: Mirror, tmp_path: Path, home: Path, files: dict[str, bytes]
) -> None:
    other = idx.write(tmp_path / "other", files | {IMAGES: idx.mnist(30)[IMAGES]}, packed=True)
    (other / "t10k-labels-idx1-ubyte.gz").unlink()
    with Mirror(other) as bad:
        folder = staging.downloaded([bad.url, mirror.url], home, sums_of(files))
    assert held(folder, files)
    assert mirror.asked == {f"{IMAGES}.gz": 1, "t10k-labels-idx1-ubyte.gz": 1}


def test_when_no_mirror_helps_the_error_names_each_and_a_way_out(
    mirror: Mirror, home: Path, files: dict[str, bytes]
) -> None:
    wrong = sums_of(files) | {IMAGES: "0" * 64}
    with pytest.raises(TrainerError) as caught:
        staging.downloaded(["http://127.0.0.1:1/", mirror.url], home, wrong)
    message = str(caught.value)
    assert f"http://127.0.0.1:1/{IMAGES}.gz: " in message
    assert "Connection refused" in message
    assert "urlopen" not in message
    assert f"{mirror.url}{IMAGES}.gz: unpacks to something else" in message
    assert "--data FOLDER" in message
    assert not half_written(home)


def test_a_full_disk_is_told_in_a_sentence_and_nothing_half_written_stays(home: Path) -> None:
    def work(_: int) -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            staging.mini(home)
        except TrainerError as error:
            return str(error)
        return "no error"

    (message,) = each(1, work)
    assert "cannot unpack the data into" in message
    assert "File too large" in message
    assert "RINGCTL_HOME" in message
    assert not half_written(home)
    assert (staging.mini(home) / IMAGES).exists()  # with room again it works


def test_a_home_that_cannot_be_made_is_told_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainerError, match="set RINGCTL_HOME to another folder"):
        staging.mini(tmp_path / "file" / "home")
