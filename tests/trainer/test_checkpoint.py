"""The files of checkpoints: what a crash, a full disk, damage or malice do to them."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import eventually
from tests.trainer.ranks import at_names, each, together
from trainer import group, wholefile
from trainer.checkpoint import OWN, Checkpoints
from trainer.checkpoint_files import SEAL, TEMPORARY, Damaged, read_manifest, sealed
from trainer.errors import InputError
from trainer.saver import Saver

RUN = {"--model": "bn-cnn", "--world-size": 1}
ONE: dict[str, Any] = {"--world-size": 1, "steps in all": 20}
TWO: dict[str, Any] = {"--world-size": 2, "steps in all": 10}
LIMIT = 1 << 20


def opened(folder: Path, made_by: str = "", **changes: Any) -> Checkpoints:
    return Checkpoints(str(folder), RUN | changes, LIMIT, made_by)


def of_attempt(number: int, folder: Path, hosts: str = "", run: str = "run-1", **changes: Any) -> Checkpoints:
    """For ranks on these hosts, a letter each, with one copy of the model."""
    return Checkpoints(str(folder), RUN | changes, LIMIT, run, attempt=number, hosts=list(hosts), copies=1)


def save(checkpoints: Checkpoints, step: int, weight: float | None = None) -> bool:
    """Save something that tells the step, or this."""
    shared = {"model": {"weight": torch.full((3, 2), float(step) if weight is None else weight)}}
    return checkpoints.save(step, 1, shared, {"random": torch.arange(step), "metrics": {"step": step}})


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*"))


def read_back(folder: Path) -> int | None:
    """The step of the newest whole checkpoint, after a look at what is in it."""
    part = opened(folder).newest("auto")
    if part is None:
        return None
    assert part.own is not None
    assert part.own["metrics"] == {"step": part.step}
    assert torch.equal(part.own["random"], torch.arange(part.step))
    if group.rank() == 0:
        assert part.shared is not None
        assert torch.equal(part.shared["model"]["weight"], torch.full((3, 2), float(part.step)))
    return part.step


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the checkpoints of steps 4 and 6."""
    checkpoints = opened(tmp_path / "checkpoints")
    checkpoints.prepare()
    assert all(save(checkpoints, step) for step in (2, 4, 6))
    return tmp_path / "checkpoints"


def test_the_last_two_are_kept_and_the_newest_is_read_back(folder: Path) -> None:
    assert saved_steps(folder) == [4, 6]
    assert read_back(folder) == 6


def test_a_manifest_says_what_was_saved(folder: Path) -> None:
    place = folder / "step-00000006"
    assert sorted(path.name for path in place.iterdir()) == [
        ".gitignore",
        "model.pt",
        "rank-0.json",
        "rank-0.pt",
    ]
    manifest = json.loads((place / "rank-0.json").read_text())
    assert (manifest["step"], manifest["epoch"], manifest["rank"], manifest["run"]) == (6, 1, 0, RUN)
    raw = (place / "model.pt").read_bytes()
    assert manifest["files"]["model.pt"] == {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}


def test_a_tensor_that_is_part_of_a_larger_one_is_saved_without_the_rest(tmp_path: Path) -> None:
    large = torch.zeros(100_000)
    saver = Saver(opened(tmp_path), None)
    saver.save(1, 1, {"model": {"weight": large[:10]}}, {})
    assert saver.wait()
    assert (tmp_path / "step-00000001" / "model.pt").stat().st_size < 10_000


def test_nothing_there_is_no_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert read_back(tmp_path / "nowhere") is None
    (tmp_path / "step-later").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    assert read_back(tmp_path) is None
    save(opened(tmp_path), 3)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "scratch") == [
        "notes.txt",
        "step-00000003",
        "step-later",
    ]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["model.pt", "rank-0.pt", "rank-0.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_a_damaged_one_falls_back_to_the_one_before_with_a_warning(
    name: str, damage: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "step-00000006" / name
    raw = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(raw[: len(raw) // 2])
    elif damage == "flip":
        raw[0 if name.endswith("json") else len(raw) // 2] ^= 1
        path.write_bytes(raw)
    else:
        path.unlink()
    assert read_back(folder) == 4
    (warning,) = capsys.readouterr().err.splitlines()
    if (name, damage) == ("rank-0.json", "remove"):  # as if it had been interrupted while it was written
        assert warning == "trainer: warning: the checkpoint of step 6 was not finished"
    else:
        told = "trainer: warning: the checkpoint of step 6 is not whole: rank 0: "
        assert warning.startswith(f"{told}{path} ")


def test_when_none_is_whole_training_does_not_silently_begin_anew(folder: Path) -> None:
    for place in folder.glob("step-*"):
        (place / "model.pt").write_bytes(b"")
    with pytest.raises(
        InputError, match=r"step 6 .* has 0 bytes of .* step 4 .* To start afresh: --resume never"
    ):
        read_back(folder)
    assert saved_steps(folder) == [4, 6]


def test_what_an_abandoned_run_left_goes_when_a_new_checkpoint_is_whole(folder: Path) -> None:
    fresh = opened(folder)
    save(fresh, 3)
    assert saved_steps(folder) == [3]
    save(fresh, 5)
    assert saved_steps(folder) == [3, 5]


def test_after_going_on_the_one_gone_on_from_is_kept_beside_the_next(folder: Path) -> None:
    going_on = opened(folder)
    assert going_on.newest("auto") is not None
    save(going_on, 8)
    assert saved_steps(folder) == [6, 8]


def test_of_two_of_one_step_the_later_turn_is_gone_on_from_and_if_it_is_damaged_the_other_is_and_stays(
    folder: Path,
) -> None:
    later = folder / "step-00000006.1"
    shutil.copytree(folder / "step-00000006", later)
    part = opened(folder).newest("auto")
    assert part is not None
    assert (part.step, part.turn) == (6, 1)
    (later / "model.pt").write_bytes(b"")
    going_on = opened(folder)
    part = going_on.newest("auto")
    assert part is not None
    assert (part.step, part.turn) == (6, 0)
    save(going_on, 8)
    assert saved_steps(folder) == [6, 8]


def test_an_own_checkpoint_is_one_of_an_earlier_attempt_of_the_same_run(folder: Path) -> None:
    assert opened(folder).newest(OWN) is None, "it was made by hand, and so is this one"
    assert opened(folder, "run-1").newest(OWN) is None
    save(opened(folder, "run-1"), 3)
    assert opened(folder, "run-2").newest(OWN) is None
    part = opened(folder, "run-1").newest(OWN)
    assert part is not None
    assert part.step == 3


@pytest.mark.parametrize("name", ["model.pt", "rank-0.json"])
def test_own_checkpoints_that_are_there_and_damaged_are_not_as_if_there_were_none(
    name: str, folder: Path
) -> None:
    first = opened(folder, "run-1")
    assert all(save(first, step) for step in (3, 5))
    for step in (3, 5):
        path = folder / f"step-{step:08d}" / name
        path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(InputError, match=r"step 5 is not whole.*step 3 is not whole.*: launch a new run"):
        opened(folder, "run-1").newest(OWN)
    assert opened(folder, "run-2").newest(OWN) is None, "they are of another run"
    assert opened(folder).newest(OWN) is None


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"--model": "mnist-cnn"}, "step 6 was made with --model 'bn-cnn', not 'mnist-cnn'"),
        ({"--world-size": 4}, "step 6 was made with --world-size 1, not 4"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(changes: dict[str, Any], text: str, folder: Path) -> None:
    with pytest.raises(InputError, match=text):
        opened(folder, **changes).newest("auto")


def test_bits_may_differ_when_another_version_saved_it_which_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "__version__", "99.0")
    assert read_back(folder) == 6
    assert "step 6 was saved by another version of the trainer or of torch" in capsys.readouterr().err


def test_bits_may_differ_where_a_rank_goes_on_with_another_number_of_threads_which_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def work(rank: int) -> None:
        def checkpoints() -> Checkpoints:
            return opened(tmp_path / str(rank), "", **{"--world-size": 2})

        save(checkpoints(), 2)
        assert checkpoints().newest("auto") is not None
        torch.set_num_threads(1 + 2 * rank)
        assert checkpoints().newest("auto") is not None

    together(2, tmp_path, work)
    assert capfd.readouterr().err == (
        "trainer: warning: step 2 was saved with another number of threads (rank 1: 1, now 3): "
        "bits may differ\n"
    )


def test_a_manifest_from_before_threads_were_noted_is_read(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = folder / "step-00000006" / "rank-0.json"
    old = unsealed(manifest)
    assert old.pop("threads") == torch.get_num_threads()
    manifest.write_text(json.dumps(sealed(old)))
    assert read_back(folder) == 6
    assert capsys.readouterr().err == ""


# --- Malice ---------------------------------------------------------------------------------------


class Malicious:
    """Unpickled without care, it makes a file."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.proof),)


def malicious_files(proof: Path) -> Iterator[bytes]:
    bomb = Malicious(proof)
    yield pickle.dumps(bomb)
    for content in (bomb, {"own": bomb}):
        file = io.BytesIO()
        torch.save(content, file)
        yield file.getvalue()
    file = io.BytesIO()
    torch.save({"own": bomb}, file, _use_new_zipfile_serialization=False)
    yield file.getvalue()


def plant(raw: bytes, path: Path) -> None:
    """Put this file into a checkpoint, with the right size and checksum in the manifest."""
    manifest = unsealed(path.parent / "rank-0.json")
    manifest["files"][path.name] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    (path.parent / "rank-0.json").write_text(json.dumps(sealed(manifest)))
    path.write_bytes(raw)


def unsealed(path: Path) -> dict[str, Any]:
    """A manifest without the checksum of its own."""
    manifest: dict[str, Any] = json.loads(path.read_text())
    del manifest[SEAL]
    return manifest


@pytest.mark.parametrize("name", ["model.pt", "rank-0.pt"])
def test_a_malicious_checkpoint_executes_nothing(
    name: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # what users set to load files of others
    proof = tmp_path / "proof"
    for raw in malicious_files(proof):
        plant(raw, folder / "step-00000006" / name)
        assert read_back(folder) == 4
        assert (
            f"{folder / 'step-00000006' / name} is not a checkpoint of the trainer" in capsys.readouterr().err
        )
        assert not proof.exists()
    assert torch.load(io.BytesIO(raw), weights_only=False)  # it would have been dangerous
    assert proof.exists()


def test_a_file_that_would_fill_the_memory_is_not_loaded(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "step-00000006" / "model.pt"
    file = io.BytesIO()
    torch.save({"zeros": torch.zeros(LIMIT)}, file)
    plant(file.getvalue(), path)
    assert read_back(folder) == 4
    assert "is too large for this model" in capsys.readouterr().err
    packed = io.BytesIO()
    with zipfile.ZipFile(file) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry))
    assert len(packed.getvalue()) < LIMIT
    plant(packed.getvalue(), path)
    assert read_back(folder) == 4
    assert "is not a checkpoint of the trainer" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"version": 1, "run": 3}', '{"version": 2, "run": {}}', "[" * 100_000, '{"run": {}']
)
def test_a_manifest_that_makes_no_sense_is_damage(text: str, folder: Path) -> None:
    (folder / "step-00000006" / "rank-0.json").write_text(text)
    assert read_back(folder) == 4


@pytest.mark.parametrize("value", ["1", None, [], {}, 1.5])
@pytest.mark.parametrize("name", ["bytes", "sha256", "files", "step"])
def test_a_manifest_with_values_of_another_kind_is_damage(
    name: str, value: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "step-00000006" / "rank-0.json"
    manifest = unsealed(path)
    (manifest if name in manifest else manifest["files"]["rank-0.pt"])[name] = value
    path.write_text(json.dumps(sealed(manifest)))
    assert read_back(folder) == 4
    assert "the checkpoint of step 6 is not whole: rank 0: " in capsys.readouterr().err


def test_whichever_bit_of_a_manifest_flips_it_says_what_was_written_or_is_damage(tmp_path: Path) -> None:
    first = of_attempt(1, tmp_path, **ONE)
    assert all(save(first, step) for step in (4, 6))
    path = tmp_path / "step-00000006" / "rank-0.json"
    whole = path.read_bytes()
    expected = unsealed(path)
    found = []
    for place in range(8 * len(whole)):
        raw = bytearray(whole)
        raw[place // 8] ^= 1 << place % 8
        path.write_bytes(raw)
        with contextlib.suppress(Damaged):
            told = read_manifest(path, 6)
            found.append({name: told[name] for name in expected})
    assert all(manifest == expected for manifest in found)
    path.write_bytes(whole.replace(b'"steps in all": 20', b'"steps in all": 24'))
    part = of_attempt(2, tmp_path, **ONE).newest("auto")
    assert part is not None
    assert (part.step, part.steps) == (4, 20)


def test_a_manifest_from_before_they_had_a_checksum_is_read(folder: Path) -> None:
    for path in folder.rglob("rank-0.json"):
        path.write_text(json.dumps(unsealed(path)))
    assert read_back(folder) == 6


def test_a_checkpoint_under_the_name_of_another_step_is_damage(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "step-00000006").rename(folder / "step-00000009")
    assert read_back(folder) == 4
    assert "rank-0.json is of step 6, not 9" in capsys.readouterr().err


@pytest.mark.parametrize("metrics", [{"step": "abc"}, {"step": 9}, {}, 3])
def test_a_part_that_tells_another_step_is_damage(metrics: Any, folder: Path) -> None:
    file = io.BytesIO()
    torch.save({"metrics": metrics}, file)
    plant(file.getvalue(), folder / "step-00000006" / "rank-0.pt")
    assert read_back(folder) == 4


# --- Crashes and full disks -----------------------------------------------------------------------


class Crash(BaseException):
    """The machine loses its power."""


NO_ROOM = OSError(errno.ENOSPC, "No space left on device")


class Disk:
    """Lets one call to the operating system fail, and then those that need what has failed: without power all
    of them, on a full disk those that take room. Knows what a loss of power would take back."""

    CALLS = ("mkdir", "open", "fsync", "link", "replace", "unlink", "rmdir")
    REMOVING = ("unlink", "rmdir")

    def __init__(self, failing: int, failure: BaseException) -> None:
        self.calls = 0
        self._failing, self._failure = failing, failure
        # New name -> the one before, if any, and what was there before, until the folder is on the disk.
        self._unsynced: dict[str, tuple[str, bytes | None]] = {}
        self._synced: set[int] = set()  # inodes whose content is on the disk
        self._real = {name: getattr(os, name) for name in self.CALLS}

    @contextmanager
    def at_work(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in self.CALLS:
                patch.setattr(os, name, self._watched(name))
            yield

    def lose_power(self, folder: Path) -> None:
        """Take back each new name that is not safe, and half of each file that is not."""
        for new, (old, before) in reversed(self._unsynced.items()):
            if os.path.exists(new):
                os.rename(new, old) if old else os.unlink(new)
            if before is not None:
                Path(new).write_bytes(before)
                self._synced.add(os.stat(new).st_ino)
        for path in folder.rglob("*"):
            if path.is_file() and path.stat().st_ino not in self._synced:
                os.truncate(path, path.stat().st_size // 2)

    def trusts(self, folder: Path) -> None:
        """What is there by now is on the disk."""
        self._synced |= {path.stat().st_ino for path in folder.rglob("*")}

    def _watched(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            if name == "open" and arguments[1] & os.O_TMPFILE != os.O_TMPFILE:
                return self._real[name](*arguments, **more)  # it is not for writing
            self.calls += 1
            if self.calls == self._failing or (self.calls > self._failing and not self._can_do(name)):
                raise self._failure
            before = old_content(arguments[1]) if name == "replace" else None
            result = self._real[name](*arguments, **more)
            if name == "fsync":
                self._fsynced(arguments[0])
            elif name in ("link", "replace"):
                self._unsynced[str(arguments[1])] = (str(arguments[0]) if name == "replace" else "", before)
            return result

        return call

    def _can_do(self, name: str) -> bool:
        return isinstance(self._failure, OSError) and name in self.REMOVING

    def _fsynced(self, descriptor: int) -> None:
        if os.fstat(descriptor).st_nlink:  # as btrfs does it: of a file without a name the size is not kept
            self._synced.add(os.fstat(descriptor).st_ino)
        here = os.readlink(f"/proc/self/fd/{descriptor}")
        self._unsynced = {new: old for new, old in self._unsynced.items() if os.path.dirname(new) != here}


def old_content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


UNNAMED, NAMED, COPIED = "without a name", "under a temporary name", "copied to a temporary name"


@pytest.fixture(params=[UNNAMED, NAMED, COPIED])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How files are written: on a disk that has files without a name, on one that has not, and where a link
    to such a file is not allowed."""
    real_open = os.open

    def open_without(path: Any, flags: int, *more: Any, **most: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real_open(path, flags, *more, **most)

    def link_without(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    if request.param == NAMED:
        monkeypatch.setattr(os, "open", open_without)
    elif request.param == COPIED:
        monkeypatch.setattr(os, "link", link_without)
    return str(request.param)


def failing_at(number: int, failure: BaseException, folder: Path) -> tuple[Disk, Checkpoints]:
    """A folder with the checkpoints of steps 4 and 6, and a disk whose n-th call from now on fails."""
    shutil.rmtree(folder, ignore_errors=True)
    checkpoints = opened(folder)
    for step in (2, 4, 6):
        save(checkpoints, step)
    disk = Disk(number, failure)
    disk.trusts(folder)
    return disk, checkpoints


@pytest.mark.usefixtures("way")
def test_wherever_the_power_is_lost_a_whole_checkpoint_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    found: list[int] = []
    for number in range(1, 100):
        disk, checkpoints = failing_at(number, Crash(), folder)
        with disk.at_work():
            try:
                save(checkpoints, 8)
            except Crash:
                pass
        disk.lose_power(folder)
        found.append(read_back(folder) or 0)
        going_on = opened(folder)
        going_on.prepare()
        assert not list(folder.rglob(f"*{TEMPORARY}"))
        assert going_on.newest("auto") is not None
        assert save(going_on, 10)
        assert saved_steps(folder) == [found[-1], 10]
        if disk.calls < number:
            break
    assert found == sorted(found), "once it is there it stays"
    assert (found[0], found[-1]) == (6, 8), "what was saved is safe"
    assert len(found) > 10, "few of the calls were seen"


@pytest.mark.usefixtures("way")
def test_a_full_disk_is_told_and_the_checkpoints_before_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, failures = tmp_path / "checkpoints", 0
    for number in range(1, 100):
        disk, checkpoints = failing_at(number, NO_ROOM, folder)
        with disk.at_work():
            is_saved = save(checkpoints, 8)
        told = capsys.readouterr().err
        if is_saved:
            break  # from here on only what is old is removed
        failures += 1
        assert saved_steps(folder) == [4, 6]
        assert told.startswith(
            "trainer: warning: step 8 could not be saved, the checkpoint before it stays: "
        )
        assert told.endswith(": No space left on device\n")
        assert "None" not in told
        assert save(checkpoints, 10), "there is room again"
        assert saved_steps(folder) == [6, 10]
    assert failures > 8


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("failure", [Crash(), NO_ROOM], ids=repr)
def test_wherever_the_first_save_after_a_grow_fails_what_it_went_on_from_stays(
    failure: BaseException, tmp_path: Path
) -> None:
    """6 of 20 steps are 3 of 10: three steps later the number is that of the newest checkpoint once more."""
    folder, found = tmp_path / "checkpoints", []
    for number in range(1, 100):
        shutil.rmtree(folder, ignore_errors=True)
        alone = of_attempt(1, folder, **ONE)
        assert all(save(alone, step) for step in (4, 6))
        grown = of_attempt(2, folder, **TWO)
        grown.prepare()
        assert grown.newest("auto") is not None
        disk = Disk(number, failure)
        disk.trusts(folder)
        with disk.at_work(), contextlib.suppress(Crash):
            save(grown, 6, weight=0.5)
        if isinstance(failure, Crash):
            disk.lose_power(folder)
        going_on = of_attempt(3, folder, **TWO)
        going_on.prepare()
        part = going_on.newest("auto")
        assert part is not None
        assert part.shared is not None
        found.append((part.steps, part.shared["model"]["weight"][0, 0].item()))
        assert save(going_on, 8)
        assert len(names(folder)) == 2, "that and the one gone on from"
        if disk.calls < number:
            break
    assert set(found) == {(20, 6.0), (10, 0.5)}
    assert found == sorted(found, reverse=True), "once it is there it stays"
    assert found.count((20, 6.0)) > 8, "few of the calls were seen"


@pytest.mark.usefixtures("way")
def test_a_fresh_start_that_cannot_be_saved_leaves_what_was_there_also_if_it_is_of_that_step(
    folder: Path,
) -> None:
    for number in range(1, 100):
        disk, fresh = Disk(number, NO_ROOM), opened(folder)
        with disk.at_work():
            if save(fresh, 6):
                break
        assert names(folder) == ["step-00000004", "step-00000006"]
        assert read_back(folder) == 6
    assert number > 8, "few of the calls were seen"
    assert save(fresh, 8)
    assert names(folder) == ["step-00000006.1", "step-00000008"]


def test_one_of_a_later_turn_can_be_named(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    assert save(of_attempt(1, folder, **ONE), 6)
    grown = of_attempt(2, folder, **TWO)
    assert grown.newest("auto") is not None
    assert save(grown, 6)
    assert names(folder) == ["step-00000006", "step-00000006.1"]
    for name, steps in (("step-00000006", 20), ("step-00000006.1", 10)):
        part = of_attempt(3, tmp_path / "other", **TWO).newest(str(folder / name))
        assert part is not None
        assert part.steps == steps


@pytest.mark.usefixtures("way")
def test_a_file_that_cannot_be_written_to_the_end_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def work(_: int) -> bool:
        checkpoints = opened(tmp_path)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        return save(checkpoints, 2)

    assert each(1, work) == [False]
    assert f"rank 0: {tmp_path / 'step-00000002' / 'rank-0.pt'}: File too large" in capfd.readouterr().err
    assert not names(tmp_path)


@pytest.mark.parametrize("failure", [Crash(), NO_ROOM], ids=repr)
def test_wherever_it_fails_to_replace_a_file_it_is_the_one_before_or_the_new_one(
    failure: BaseException, way: str, tmp_path: Path
) -> None:
    path, found = tmp_path / "folder" / "file", []
    temporary = path.with_name("file.part")
    path.parent.mkdir()
    for number in range(1, 100):
        path.write_bytes(b"before" * 1000)
        temporary.write_bytes(b"left by another")
        disk = Disk(number, failure)
        disk.trusts(path.parent)
        with disk.at_work(), contextlib.suppress(Crash, OSError):
            wholefile.write(path, temporary, b"new" * 1000)
        if isinstance(failure, Crash):
            disk.lose_power(path.parent)
        elif number > 1:  # which was to remove it
            assert not temporary.exists()
        found.append(path.read_bytes()[:6])
        assert path.read_bytes() in (b"before" * 1000, b"new" * 1000)
        if disk.calls < number:
            break
    assert found == sorted(found), "once it is there it stays"
    assert (found[0], found[-1]) == (b"before", b"newnew")
    assert len(found) == {UNNAMED: 9, NAMED: 6, COPIED: 9}[way], "some of the calls were not seen"


def test_a_rank_that_is_killed_while_it_writes_a_checkpoint_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoints"

    def write_half(_: Any, file: Any) -> None:
        file.write(bytes(1 << 20))
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(torch, "save", write_half)
    each(1, lambda _: save(opened(folder), 2), dying=[0])
    assert [path.name for path in folder.glob("*/*")] == [".gitignore"]


@pytest.mark.usefixtures("way")
def test_a_file_may_be_read_by_whoever_may_read_other_new_files(tmp_path: Path) -> None:
    file, other = tmp_path / "file", tmp_path / "other"
    wholefile.write(file, tmp_path / "temporary", b"content")
    other.touch()
    assert file.stat().st_mode == other.stat().st_mode
    assert not (tmp_path / "temporary").exists()


@pytest.mark.usefixtures("way")
def test_several_at_once_may_write_the_same_file(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()

    def work(number: int) -> None:
        for _ in range(50):
            wholefile.write(folder / "file", folder / f"file.{number}", b"content")

    each(3, work)
    assert [(path.name, path.read_bytes()) for path in folder.iterdir()] == [("file", b"content")]


@pytest.mark.parametrize("where", ["file", "/proc/self/fdinfo"])
def test_a_folder_that_cannot_be_written_is_refused(where: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / where / "checkpoints"
    with pytest.raises(InputError, match=rf"cannot write checkpoints: rank 0: {folder}: .*--checkpoint-dir"):
        opened(folder).prepare()


def test_what_earlier_attempts_were_about_to_write_goes_and_nothing_else(folder: Path) -> None:
    place = folder / "step-00000006"
    whole = sorted(path.name for path in place.iterdir())
    begun = [f"model.pt{TEMPORARY}", f"model.pt.3-4711{TEMPORARY}", f"rank-1.json.1-5{TEMPORARY}"]
    mine = [f"mine.pt.3-4711{TEMPORARY}", f"notes{TEMPORARY}"]
    for name in (*begun, *mine):
        (place / name).touch()
    opened(folder).prepare()
    assert sorted(path.name for path in place.iterdir()) == sorted([*whole, *mine])


def test_a_probe_that_an_earlier_attempt_was_killed_at_goes_and_that_of_another_rank_stays(
    tmp_path: Path,
) -> None:
    hosts = [tmp_path / "a", tmp_path / "b"]
    hosts[0].mkdir()
    for rank in range(3):
        for name in (f"probe-{rank}", f"probe-{rank}.{rank}-4711{TEMPORARY}"):
            (hosts[0] / name).touch()
    (hosts[0] / "probe-8").write_text("notes")
    (hosts[0] / "probe-9.notes").touch()
    together(2, tmp_path, lambda rank: opened(hosts[rank]).prepare())
    assert sorted(path.name for path in hosts[0].iterdir()) == [
        "probe-1",
        "probe-1.1-4711.tmp",
        "probe-8",
        "probe-9.notes",
    ]


def test_looking_whether_a_folder_can_be_written_leaves_nothing_there(tmp_path: Path) -> None:
    opened(tmp_path / "a" / "b").prepare()
    assert not list((tmp_path / "a" / "b").iterdir())


def test_git_ignores_checkpoints_and_nothing_beside_them(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    checkpoints = opened(tmp_path)
    checkpoints.prepare()
    save(checkpoints, 2)
    for command in ["init"], ["status", "--porcelain", "--untracked-files=all", "--", ".", ":!scratch"]:
        done = subprocess.run(["git", *command], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "?? mine.py\n"


def test_what_is_no_folder_is_no_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "step-00000008").write_text("")
    (folder / "step-00000009").symlink_to("nowhere")
    opened(folder).prepare()
    assert read_back(folder) == 6
    assert capsys.readouterr().err == ""


# --- Several ranks, each with a disk of its own -----------------------------------------------------


def test_ranks_agree_on_the_newest_that_all_of_them_have_whole(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def work(rank: int) -> list[int | str | None]:
        results: list[int | str | None] = []

        def begin(case: str) -> Path:
            folder = tmp_path / case / str(rank)
            checkpoints = opened(folder)
            assert all(save(checkpoints, step) for step in (2, 4))
            return folder

        def look(folder: Path) -> None:
            try:
                results.append(read_back(folder))
            except InputError as error:
                results.append(str(error))

        look(begin("whole"))
        cut = begin("rank 1 was cut short")
        if rank == 1:
            (cut / "step-00000004" / "rank-1.pt").write_bytes(b"")
        look(cut)
        missing = begin("rank 1 is on another host")
        if rank == 1:
            shutil.rmtree(missing)
        look(missing)
        early = begin("the first was not finished")
        shutil.rmtree(early / "step-00000002")
        if rank == 1:
            (early / "step-00000004" / "rank-1.json").unlink()
        look(early)
        return results

    for rank, results in enumerate(together(2, tmp_path, work)):
        whole, before, refused, afresh = results
        assert (whole, before, afresh) == (4, 2, None)
        assert refused.startswith(f"cannot go on from {tmp_path}/rank 1 is on another host/{rank}: ")
        assert "step 4 is not whole: rank 1: its part is not on its host" in refused
    told = capfd.readouterr().err.splitlines()
    cut = tmp_path / "rank 1 was cut short" / "1" / "step-00000004" / "rank-1.pt"
    assert told[0].startswith(
        f"trainer: warning: the checkpoint of step 4 is not whole: rank 1: {cut} has 0 bytes of "
    )
    assert told[1:] == ["trainer: warning: the checkpoint of step 4 was not finished"]


def test_when_one_rank_cannot_save_all_of_them_know(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def work(rank: int) -> tuple[str, bool, int | None]:
        folder = tmp_path / str(rank)
        if rank == 1:
            folder.write_text("in the way")
        with pytest.raises(InputError) as caught:
            opened(folder).prepare()
        if rank == 1:
            folder.unlink()
        checkpoints = opened(folder)
        checkpoints.prepare()
        save(checkpoints, 2)
        if rank == 1:
            (folder / "step-00000004").write_text("in the way")
        return str(caught.value), save(checkpoints, 4), read_back(folder)

    refused = (
        f"cannot write checkpoints: rank 1: {tmp_path / '1'}: File exists; choose another --checkpoint-dir"
    )
    assert together(2, tmp_path, work) == [(refused, False, 2)] * 2
    place = tmp_path / "1" / "step-00000004"
    told = f"step 4 could not be saved, the checkpoint before it stays: rank 1: {place}: File exists"
    assert f"trainer: warning: {told}\n" in capfd.readouterr().err


def test_a_folder_that_one_rank_cannot_look_at_ends_all_of_them(tmp_path: Path) -> None:
    long = "x" * 256

    def work(rank: int) -> list[str]:
        save(opened(tmp_path / str(rank)), 2)
        step = tmp_path / str(rank) / "step-00000004"
        if rank == 1:
            step.symlink_to(tmp_path / long)
        group.wait_for_all(30)
        told = []
        for folder in (tmp_path / (long if rank == 1 else "0"), tmp_path / str(rank)):
            with pytest.raises(InputError) as caught:
                opened(tmp_path / "other").newest(str(folder))
            told.append(str(caught.value))
        return told

    why = "cannot look for a checkpoint to go on from: rank 1: {}: File name too long"
    places = (tmp_path / long, tmp_path / "1" / "step-00000004")
    assert together(2, tmp_path, work) == [[why.format(place) for place in places]] * 2


def test_a_folder_of_a_user_that_there_is_not_has_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot go on from .*/~nobody-has-this-name/runs: there is none"):
        opened(tmp_path).newest("~nobody-has-this-name/runs")


@pytest.mark.usefixtures("way")
def test_hosts_that_share_a_folder_write_their_copies_of_the_model_at_the_same_time(tmp_path: Path) -> None:
    """Each has written all of it before the first of them gives it its name."""
    folder, others = tmp_path / "shared", tmp_path / "rank 1 has written"

    def work(rank: int) -> bool:
        def before(target: Path) -> None:
            if target.name == "model.pt" and rank == 0:
                assert eventually(others.exists)
            elif target.name == "model.pt":
                others.touch()
                assert eventually(target.exists)

        checkpoints = of_attempt(1, folder, "ab", **TWO)
        at_names(before)
        return save(checkpoints, 2)

    assert together(2, tmp_path, work) == [True, True]
    assert not list(folder.rglob(f"*{TEMPORARY}"))

    def again(_: int) -> tuple[int, tuple[int, ...]]:
        part = of_attempt(2, folder, "ab", **TWO).newest("auto")
        assert part is not None
        return part.step, part.afresh

    assert together(2, tmp_path, again) == [(2, ())] * 2


# --- Copies on other hosts ------------------------------------------------------------------------


def test_the_first_rank_on_another_host_has_a_copy_of_the_model_in_its_manifest(tmp_path: Path) -> None:
    def work(rank: int) -> dict[str, Any]:
        hosts = "aabc"
        place = tmp_path / hosts[rank] / "step-00000002"
        assert save(of_attempt(1, tmp_path / hosts[rank], hosts), 2)
        manifest = json.loads((place / f"rank-{rank}.json").read_text())
        for name, facts in manifest["files"].items():
            assert hashlib.sha256((place / name).read_bytes()).hexdigest() == facts["sha256"]
        return dict(manifest)

    manifests = together(4, tmp_path, work)
    having = [rank for rank, manifest in enumerate(manifests) if "model.pt" in manifest["files"]]
    assert having == [0, 2]
    sums = {manifests[rank]["files"]["model.pt"]["sha256"] for rank in having}
    assert {manifest["model_sha256"] for manifest in manifests} == sums
    assert not (tmp_path / "c" / "step-00000002" / "model.pt").exists()


def test_a_model_that_is_not_the_same_everywhere_is_not_saved(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def work(rank: int) -> tuple[bool, list[int]]:
        folder = tmp_path / str(rank)
        checkpoints = of_attempt(1, folder, "ab")
        save(checkpoints, 2)
        shared = {"model": {"weight": torch.full((3, 2), float(rank))}}
        return checkpoints.save(4, 1, shared, {"metrics": {"step": 4}}), saved_steps(folder)

    assert together(2, tmp_path, work) == [(False, [2])] * 2
    assert capfd.readouterr().err == (
        "trainer: warning: step 4 could not be saved, the checkpoint before it stays: "
        "rank 1: its model.pt is not the same as that of other ranks\n"
    )


def test_a_later_attempt_takes_the_lowest_copy_that_is_whole(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def work(rank: int) -> list[Any]:
        results: list[Any] = []

        def look(case: str, lose: Callable[[Path], None], number: int = 2) -> None:
            folder = tmp_path / case / str(rank)
            first = of_attempt(1, folder, "abc")
            assert all(save(first, step) for step in (2, 4))
            lose(folder)
            try:
                part = of_attempt(number, folder, "abc").newest("auto")
            except InputError as error:
                results.append(str(error))
                return
            assert part is not None
            assert (part.shared is not None) == (rank == part.sender)
            assert (part.own is None) == (rank in part.afresh)
            results.append((part.step, part.sender, part.afresh))

        def lose_host(folder: Path) -> None:
            if rank == 0:
                shutil.rmtree(folder)

        def damage(folder: Path) -> None:
            if rank == 0:
                (folder / "step-00000004" / "model.pt").write_bytes(b"")

        def cut_own_part(folder: Path) -> None:
            if rank == 2:
                (folder / "step-00000004" / "rank-2.pt").write_bytes(b"")

        look("lost", lose_host)
        look("lost at first", lose_host, number=1)
        look("damaged", damage)
        look("cut", cut_own_part)
        return results

    for lost, refused, damaged, cut in together(3, tmp_path, work):
        assert lost == (4, 1, (0,))
        assert "step 4 is not whole: rank 0: its part is not on its host" in refused
        assert damaged == (4, 1, ()), "the copy is as good"
        assert cut == (2, 0, ()), "the one before leads to the same bits"
    place = tmp_path / "damaged" / "0" / "step-00000004" / "model.pt"
    why = f"for it is not whole elsewhere: rank 0: {place} has 0 bytes of "
    assert f"the model of step 4 is taken from rank 1, {why}" in capfd.readouterr().err


def test_what_another_number_of_ranks_saved_is_for_later_attempts_of_the_same_run_only(
    tmp_path: Path,
) -> None:
    """Four ranks on two hosts save; then one host is left, and its ranks have other numbers."""
    four: dict[str, Any] = {"--world-size": 4, "steps in all": 8}
    two: dict[str, Any] = {"--world-size": 2, "steps in all": 16}
    folder = tmp_path / "b"

    def first(rank: int) -> bool:
        checkpoints = of_attempt(1, tmp_path / "aabb"[rank], "aabb", **four)
        return all(save(checkpoints, step) for step in (2, 4))

    def refused(number: int, run: str, text: str, **changes: Any) -> None:
        with pytest.raises(InputError, match=text):
            of_attempt(number, folder, "bb", run, **two, **changes).newest("auto")

    def then(rank: int) -> list[Any]:
        refused(1, "run-1", "step 4 was made with --world-size 4, not 2")
        refused(2, "run-2", "step 4 was made with --world-size 4, not 2")
        refused(2, "run-1", "step 4 was made with --model", **{"--model": "mnist-cnn"})
        found = []
        for step in (4, 2):
            part = of_attempt(2, folder, "bb", **two).newest("auto")
            assert part is not None
            assert part.own is None
            found.append((part.step, part.steps, part.world, part.sender, part.is_resized))
            group.wait_for_all(30)
            if rank == 0:
                (folder / f"step-{step:08d}" / "model.pt").unlink()
            group.wait_for_all(30)
        refused(2, "run-1", r"step 4 is not whole: rank 0: .*/model.pt cannot be read: No such file")
        return found

    assert all(together(4, tmp_path, first))
    assert together(2, tmp_path, then) == [[(4, 8, 4, 0, True), (2, 8, 4, 0, True)]] * 2


def test_of_attempts_with_other_numbers_of_ranks_the_one_that_is_furthest_counts(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    alone = of_attempt(1, folder, **ONE)
    assert all(save(alone, step) for step in (8, 10))

    def grown(_: int) -> tuple[int, bool]:
        checkpoints = of_attempt(2, folder, "aa", **TWO)
        part = checkpoints.newest("auto")
        assert part is not None
        return part.step, save(checkpoints, 6)

    assert together(2, tmp_path, grown) == [(10, True)] * 2
    assert saved_steps(folder) == [6, 10]
    again = of_attempt(3, folder, **ONE)
    part = again.newest("auto")
    assert part is not None
    assert (part.step, part.steps, part.world) == (6, 10, 2)
    assert save(again, 14)
    assert saved_steps(folder) == [6, 14]


def test_the_first_one_after_a_grow_that_was_not_finished_gives_way_to_the_one_before(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    assert save(of_attempt(1, folder, **ONE), 10)

    def grown(rank: int) -> tuple[int, int | None]:
        checkpoints = of_attempt(2, folder, "aa", **TWO)
        assert checkpoints.newest("auto") is not None
        assert save(checkpoints, 6)
        if rank == 1:
            (folder / "step-00000006" / "rank-1.json").unlink()
        group.wait_for_all(30)
        part = of_attempt(3, folder, "aa", **TWO).newest("auto")
        assert part is not None
        return part.step, part.steps

    assert together(2, tmp_path, grown) == [(10, 20)] * 2


def test_a_checkpoint_has_nothing_of_more_ranks_that_began_with_it_and_were_interrupted(
    tmp_path: Path,
) -> None:
    place = tmp_path / "checkpoints" / "step-00000004"

    def save_it(_: int) -> bool:
        return save(of_attempt(1, tmp_path / "checkpoints", "aaa"), 4)

    together(3, tmp_path, save_it)
    for manifest in place.glob("*.json"):
        manifest.unlink()
    together(2, tmp_path, save_it)
    assert sorted(path.name for path in place.glob("rank-*")) == [
        "rank-0.json",
        "rank-0.pt",
        "rank-1.json",
        "rank-1.pt",
    ]


@pytest.mark.parametrize("later", [TWO, TWO | {"--world-size": 3}], ids=["fewer ranks", "as many"])
def test_a_host_that_comes_back_with_a_model_that_was_never_finished_gives_way_to_a_complete_one(
    later: dict[str, Any], tmp_path: Path
) -> None:
    """Of three ranks only the one on a got to its manifest. The others, or as many on other hosts, came to
    that step later, and were through with it."""
    three, hosts = TWO | {"--world-size": 3}, "abc"

    def first(rank: int) -> None:
        save(of_attempt(1, tmp_path / hosts[rank], hosts, **three), 6, weight=1.0)
        if rank:
            (tmp_path / hosts[rank] / "step-00000006" / f"rank-{rank}.json").unlink()

    def then(rank: int) -> bool:
        now = "bcd"[: later["--world-size"]]
        return save(of_attempt(2, tmp_path / now[rank], now, **later), 6, weight=2.0)

    def at_last(rank: int) -> tuple[int, float | None]:
        part = of_attempt(3, tmp_path / hosts[rank], hosts, **three).newest("auto")
        assert part is not None
        return part.sender, part.shared["model"]["weight"][0, 0].item() if part.shared else None

    together(3, tmp_path, first)
    assert all(together(later["--world-size"], tmp_path, then))
    assert together(3, tmp_path, at_last) == [(1, None), (1, 2.0), (1, None)]


def test_what_an_interrupted_save_has_left_does_not_hide_the_one_that_was_finished_since(
    tmp_path: Path,
) -> None:
    """Nobody on b and d got to a manifest. Then b and c were through with that step; now d is back for c."""

    def first(rank: int) -> None:
        place = tmp_path / "bd"[rank]
        save(of_attempt(1, place, "bd", **TWO), 6, weight=1.0)
        (place / "step-00000006" / f"rank-{rank}.json").unlink()

    def then(rank: int) -> bool:
        shared = {"model": {"weight": torch.ones(2)}}
        own = {"random": torch.ones(rank + 1), "metrics": {"step": 6}}
        return of_attempt(2, tmp_path / "bc"[rank], "bc", **TWO).save(6, 1, shared, own)

    def at_last(rank: int) -> tuple[int, int, tuple[int, ...]]:
        part = of_attempt(3, tmp_path / "bd"[rank], "bd", **TWO).newest("auto")
        assert part is not None
        return part.step, part.sender, part.afresh

    together(2, tmp_path, first)
    assert together(2, tmp_path, then) == [True, True]
    assert together(2, tmp_path, at_last) == [(6, 0, (1,))] * 2


def test_hosts_agree_on_a_folder_that_none_of_them_has_a_finished_checkpoint_in(tmp_path: Path) -> None:
    """Rank 0 is on a new host, rank 1 on the one where a rank was alone."""
    save(of_attempt(1, tmp_path / "1", **ONE), 6)

    def grown(rank: int) -> tuple[bool, list[str]]:
        checkpoints = of_attempt(2, tmp_path / str(rank), "ab", **TWO)
        assert checkpoints.newest("auto") is not None
        return save(checkpoints, 6), names(tmp_path / str(rank))

    later = "step-00000006.1"
    assert together(2, tmp_path, grown) == [(True, [later]), (True, ["step-00000006", later])]


# --- Beside the training --------------------------------------------------------------------------


def test_while_a_rank_still_removes_what_is_old_the_next_one_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of one host share a folder, and nothing but saving itself holds their savers together."""
    folder = tmp_path / "checkpoints"

    def work(rank: int) -> list[bool]:
        checkpoints = opened(folder)
        saves = [save(checkpoints, 2), save(checkpoints, 4)]
        real, manifests = group.gather_texts, [folder / "step-00000006" / f"rank-{n}.json" for n in range(2)]

        def gather(*said: Any) -> list[str]:
            texts = real(*said)
            if all(manifest.exists() for manifest in manifests):
                assert eventually((tmp_path / "rank 1 is through").exists)
                assert not eventually((folder / "step-00000008").exists, 0.3)
            return texts

        if rank == 0:
            monkeypatch.setattr(group, "gather_texts", gather)
        saves.append(save(checkpoints, 6))
        monkeypatch.undo()
        if rank == 1:
            (tmp_path / "rank 1 is through").touch()
        return [*saves, save(checkpoints, 8)]

    assert together(2, tmp_path, work) == [[True] * 4] * 2
    assert saved_steps(folder) == [6, 8]
    assert together(2, tmp_path, lambda _: read_back(folder)) == [8, 8]


class Slow(Checkpoints):
    """Begins to write when it is let, and notes what was there when it was asked to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), RUN, LIMIT)
        self.begin = threading.Event()
        self.under_way = threading.Event()
        self.there: list[list[int]] = []

    def save(self, *what: Any) -> bool:
        self.there.append(saved_steps(self.folder))
        self.under_way.set()
        assert self.begin.wait(30)
        return super().save(*what)


def test_what_is_trained_while_it_is_saved_is_not_saved(tmp_path: Path) -> None:
    checkpoints = Slow(tmp_path)
    saver = Saver(checkpoints, None)
    weight, random = torch.full((3, 2), 2.0), torch.arange(2)
    saver.save(2, 1, {"model": {"weight": weight}}, {"random": random, "metrics": {"step": 2}})
    assert checkpoints.under_way.wait(30)
    weight.zero_()
    random.zero_()
    checkpoints.begin.set()
    assert saver.wait()
    assert read_back(tmp_path) == 2
    saver.close()


def test_a_save_waits_for_the_one_before(tmp_path: Path) -> None:
    checkpoints = Slow(tmp_path)
    saver = Saver(checkpoints, None)

    def train() -> None:
        for step in (2, 4, 6):
            shared = {"model": {"weight": torch.full((3, 2), float(step))}}
            saver.save(step, 1, shared, {"random": torch.arange(step), "metrics": {"step": step}})
        saver.close()

    training = threading.Thread(target=train)
    training.start()
    assert checkpoints.under_way.wait(30)
    checkpoints.begin.set()
    training.join(30)
    assert checkpoints.there == [[], [2], [2, 4]]
    assert read_back(tmp_path) == 6


def test_a_mistake_while_saving_ends_the_training_or_is_told_where_that_has_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saver = Saver(opened(tmp_path), None)
    saver.save(2, 1, {"model": threading.Lock()}, {})
    with pytest.raises(TypeError, match="pickle"):
        saver.wait()
    saver.close()
    assert capsys.readouterr().err == "", "it was raised already"
    saver.save(4, 1, {"model": threading.Lock()}, {})
    saver.close()
    told = capsys.readouterr().err
    assert told.startswith("trainer: warning: rank 0 could not finish the checkpoint of step 4: Traceback")
    assert "cannot pickle" in told


def test_a_save_that_does_not_end_does_not_keep_a_failed_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.saver.CLOSE_S", 0.05)
    checkpoints = Slow(tmp_path)
    saver = Saver(checkpoints, None)
    saver.save(2, 1, {}, {})
    saver.close()
    assert "rank 0 could not finish the checkpoint of step 2: " in capsys.readouterr().err
    checkpoints.begin.set()
    assert saver.wait()
