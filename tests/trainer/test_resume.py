"""Trainings that are interrupted and go on: to the same bits as if nothing had happened."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import eventually
from tests.trainer import idx
from tests.trainer.ranks import Outcome, at_names, each, free_port, records, together, trained
from trainer import compress, data, group
from trainer.__main__ import main
from trainer.checkpoint_files import TEMPORARY
from trainer.config import Config, parse
from trainer.data import Dataset
from trainer.flat import as_bytes
from trainer.models import MODELS
from trainer.optim import SGD
from trainer.sync import STRATEGIES
from trainer.sync.choice import Choice
from trainer.train import train_on

WAYS = [
    (name, format)
    for name, known in STRATEGIES.items()
    for format in known.formats
    if name != "serial" and format != compress.AUTO
]
STEPS = 10  # of which an epoch of the small images has 4 with three ranks, 5 with two and 10 with one
OPTIONS = ["--steps", str(STEPS), "--batch-size", "4", "--checkpoint-every", "2", "--lr", "0.1"]


@pytest.fixture(autouse=True)
def _restless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model with all that a checkpoint could forget: dropout, batch norm, several shapes."""

    def restless() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 6, kernel_size=5, stride=3),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(6 * 8 * 8, 10),
        )

    monkeypatch.setitem(MODELS, "restless", restless)


@pytest.fixture
def small(tmp_path: Path) -> str:
    return str(idx.write(tmp_path / "small", idx.mnist(40, 3)))


class Interrupted(Exception):
    """Stands for whatever ends a training, on all ranks at once."""


def before_step(number: int, act: Callable[[], None]) -> pytest.MonkeyPatch:
    """Have `act` called when this training, or the next, has the gradients of this step."""
    patch = pytest.MonkeyPatch()
    real_step, calls = SGD.step, [0]

    def step(self: SGD, lr: float) -> None:
        calls[0] += 1
        if calls[0] == number:
            act()
        real_step(self, lr)

    patch.setattr(SGD, "step", step)
    return patch


def run(dataset: Dataset, config: Config) -> nn.Module:
    torch.manual_seed(config.seed)  # as a rank does when it starts
    return train_on(dataset, config)


def end_of(dataset: Dataset, config: Config, folder: Path) -> tuple[bytes, Any]:
    """All bits of the model that a training ends with, and what its last record says of them."""
    metrics = folder / f"metrics-{group.rank()}-{time.monotonic_ns()}"
    os.environ["RINGCTL_METRICS"] = str(metrics)
    model = run(dataset, config)
    last = records(metrics)[-1]
    told = [last[name] for name in ("step", "epoch", "loss", "accuracy", "bytes_sent", "parameters_sha256")]
    return b"".join(as_bytes(tensor) for tensor in model.state_dict().values()), told


def interrupted_before(step: int, dataset: Dataset, config: Config) -> None:
    def interrupt() -> None:
        raise Interrupted

    patch = before_step(step, interrupt)
    try:
        with pytest.raises(Interrupted):
            run(dataset, config)
    finally:
        patch.undo()


def config(rank: int, world: int, folder: Path, **more: Any) -> Config:
    usual = {"model": "restless", "steps": STEPS, "batch_size": 4, "lr": 0.1, "bucket_mb": 0.002}
    saving = {"checkpoint_every": 2, "checkpoint_dir": str(folder), "resume": "auto"}
    chosen: dict[str, Any] = {**usual, **saving, **more}
    return Config(rank=rank, world_size=world, **chosen)


@pytest.mark.usefixtures("with_ddp")
def test_every_strategy_and_format_goes_on_to_the_same_bits(tmp_path: Path, small: str) -> None:
    world = 3  # with two, the order in which gradients are added could not matter

    def work(rank: int) -> list[bool]:
        dataset = data.load(small, os.environ)
        same = []
        for sync, format in WAYS:
            more = {"sync": sync, "compress": format, "topk_ratio": 0.1, "powersgd_rank": 2}
            folders = [tmp_path / f"{sync}-{format}-{number}" for number in range(2)]
            expected = end_of(dataset, config(rank, world, folders[0], **more), tmp_path)
            interrupted_before(8, dataset, config(rank, world, folders[1], **more))
            same.append(end_of(dataset, config(rank, world, folders[1], **more), tmp_path) == expected)
        return same

    for same in together(world, tmp_path, work):
        assert [way for way, is_same in zip(WAYS, same, strict=True) if not is_same] == []


@pytest.mark.parametrize(("world", "format"), [(1, "none"), (2, "int4")])
def test_it_does_not_matter_when_nor_how_often_it_is_interrupted(
    world: int, format: str, tmp_path: Path, small: str
) -> None:
    def work(rank: int) -> tuple[bool, list[int]]:
        dataset = data.load(small, os.environ)
        sync = "serial" if world == 1 else "ring"
        expected = end_of(
            dataset, config(rank, world, tmp_path / "whole", sync=sync, compress=format), tmp_path
        )
        ends = []
        for step in range(1, STEPS + 1):
            mine = config(rank, world, tmp_path / f"at-{step}", sync=sync, compress=format)
            interrupted_before(step, dataset, mine)
            ends.append(end_of(dataset, mine, tmp_path))
        often = config(rank, world, tmp_path / "often", sync=sync, compress=format)
        for _ in range(4):
            interrupted_before(3, dataset, often)  # after two more steps
        ends.append(end_of(dataset, often, tmp_path))
        return all(end == expected for end in ends), [end[1][0] for end in ends]

    ends = together(world, tmp_path, work) if world > 1 else each(1, work)
    assert ends == [(True, [STEPS] * (STEPS + 1))] * world


def test_checkpoints_do_not_change_what_is_trained(tmp_path: Path, small: str) -> None:
    def work(rank: int) -> bool:
        dataset = data.load(small, os.environ)
        mine = config(rank, 2, tmp_path / "checkpoints", compress="int8")
        without = Config(**{**vars(mine), "checkpoint_every": 0, "resume": "never"})
        return end_of(dataset, mine, tmp_path) == end_of(dataset, without, tmp_path)

    assert together(2, tmp_path, work) == [True, True]


def test_the_model_file_has_the_mean_statistics_of_all_ranks_and_needs_nothing_else(
    tmp_path: Path, small: str
) -> None:
    def work(rank: int) -> dict[str, bytes]:
        dataset = data.load(small, os.environ)
        model = run(dataset, config(rank, 2, tmp_path / "checkpoints"))
        return {name: as_bytes(tensor) for name, tensor in model.state_dict().items()}

    trained_model, _ = together(2, tmp_path, work)
    path = tmp_path / "checkpoints" / f"step-{STEPS:08d}" / "model.pt"
    saved = torch.load(path, weights_only=True)
    assert {name: as_bytes(tensor) for name, tensor in saved["model"].items()} == trained_model
    assert saved["optimizer"].keys() == dict(MODELS["restless"]().named_parameters()).keys()


def test_what_auto_took_is_kept(tmp_path: Path, small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured anew it would take another one."""

    def work(rank: int) -> tuple[list[str], list[str]]:
        dataset = data.load(small, os.environ)
        notes: list[str] = []
        monkeypatch.setattr("trainer.train.say", notes.append)
        mine = config(rank, 2, tmp_path / "checkpoints", compress="auto")
        mine = Config(**{**vars(mine), "steps": 20})
        monkeypatch.setattr("trainer.sync.choice.pick", lambda _: 2)
        interrupted_before(18, dataset, mine)
        monkeypatch.setattr("trainer.sync.choice.pick", lambda _: 0)
        first, notes[:] = [note for note in notes if note.startswith("--compress auto")], []
        run(dataset, mine)
        return first, [note for note in notes if note.startswith("--compress auto")]

    for first, then in together(2, tmp_path, work):
        assert first[0].startswith("--compress auto takes int8")
        assert then == ["--compress auto stays with int8, which it took before the checkpoint"]


def test_auto_that_had_not_chosen_yet_measures_anew(tmp_path: Path, small: str) -> None:
    def work(rank: int) -> list[int]:
        dataset = data.load(small, os.environ)
        steps: list[int] = []
        real = Choice.step_ends
        patch = pytest.MonkeyPatch()

        def step_ends(choice: Choice, sent: int) -> str:
            steps.append(sent)
            return real(choice, sent)

        patch.setattr(Choice, "step_ends", step_ends)
        mine = config(rank, 2, tmp_path / "checkpoints", compress="auto")
        mine = Config(**{**vars(mine), "steps": 20})
        interrupted_before(8, dataset, mine)
        steps.clear()
        run(dataset, mine)
        patch.undo()
        return steps

    for steps in together(2, tmp_path, work):
        assert len(steps) == 12  # four with each format
        assert steps[0] > steps[-1]  # the bytes of each step, not their sum


# --- Real ranks, really killed ---------------------------------------------------------------------


def killed(
    world: int,
    folder: Path,
    options: list[str],
    die: Callable[[int], None],
    env: Callable[[int], dict[str, str]] = lambda _: {},
) -> None:
    """Ranks of a training, of which `die(rank)` arranges when it is killed; the others end by themselves."""
    address = f"tcp://127.0.0.1:{free_port()}"

    def as_rank(rank: int) -> int:
        die(rank)
        os.environ.update(env(rank))
        sys.stdout = sys.stderr = (folder / f"killed-{rank}").open("w", buffering=1)
        os.dup2(sys.stdout.fileno(), 1)
        os.dup2(sys.stdout.fileno(), 2)
        place = ["--init-method", address, "--rank", str(rank), "--world-size", str(world)]
        return main([*place, "--gloo_socket_ifname", "lo", "--threads", "1", *options])

    codes = each(world, as_rank, dying=range(world))
    assert None in codes
    assert 0 not in codes


def kill_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_step(number: int) -> Callable[[int], None]:
    """Rank 1 is killed when it has the gradients of this step."""
    return lambda rank: before_step(number, kill_me) and None if rank == 1 else None


def ends(outcomes: list[Outcome]) -> set[Any]:
    assert [outcome.exit_code for outcome in outcomes] == [0] * len(outcomes), [o.err for o in outcomes]
    return {(outcome.last["parameters_sha256"], outcome.last["accuracy"]) for outcome in outcomes}


@pytest.fixture
def options(small: str) -> list[str]:
    return ["--data", small, "--model", "restless", *OPTIONS, "--compress", "int8"]


def test_a_rank_killed_at_any_step_or_in_the_middle_of_saving_does_no_harm(
    tmp_path: Path, options: list[str]
) -> None:
    def at_write(number: int, victim: int) -> Callable[[int], None]:
        """At the n-th file that it has written and not put in its place."""
        calls = [0]

        def before(_: Path) -> None:
            calls[0] += 1
            if calls[0] == number:
                kill_me()

        return lambda rank: at_names(before) if rank == victim else None

    expected = ends(trained(2, tmp_path, *options, "--checkpoint-dir", str(tmp_path / "whole")))
    assert len(expected) == 1
    # The first file is the probe at the start; each checkpoint has two more, and on rank 0 three.
    deaths = {"step 1": at_step(1), "step 7": at_step(7)}
    deaths |= {"first part": at_write(2, victim=1), "manifest of rank 0": at_write(7, victim=0)}
    for name, die in deaths.items():
        saving = [*options, "--checkpoint-dir", str(tmp_path / name)]
        killed(2, tmp_path, saving, die)
        outcomes = trained(2, tmp_path, *saving, "--resume", "auto")
        assert ends(outcomes) == expected, name
        afresh = ["this run starts at its first step"]
        # At step 7 the checkpoint of step 6 is on its way, and the one before it was waited for.
        started = {"step 7": [f"{step} of {STEPS} steps" for step in (4, 6)]}
        started["manifest of rank 0"] = [f"2 of {STEPS} steps"]
        assert any(text in outcomes[0].out for text in started.get(name, afresh)), outcomes[0].out
        assert not list(tmp_path.glob(f"{name}/*/*{TEMPORARY}"))
        assert [path.name for path in sorted((tmp_path / name).glob("step-*"))] == [
            "step-00000008",
            "step-00000010",
        ]


def test_a_rank_killed_between_the_manifests_of_the_first_checkpoint_does_no_harm_to_a_later_attempt(
    tmp_path: Path, options: list[str]
) -> None:
    def before(target: Path) -> None:
        if target.name == "rank-1.json":
            assert eventually(target.with_name("rank-0.json").exists)
            kill_me()

    def die(rank: int) -> None:
        if rank == 1:
            at_names(before)

    expected = ends(trained(2, tmp_path, *options, "--checkpoint-dir", str(tmp_path / "whole")))
    killed(2, tmp_path, options, die, on_hosts(tmp_path, "aa", 1))
    outcomes = trained(2, tmp_path, *options, env=on_hosts(tmp_path, "aa", 2))
    assert ends(outcomes) == expected
    assert outcomes[0].err == "trainer: warning: the checkpoint of step 2 was not finished\n"


@pytest.mark.parametrize("number", [1, 2])
def test_a_rank_killed_while_what_could_not_be_saved_is_removed_does_no_harm(
    tmp_path: Path, options: list[str], number: int
) -> None:
    real_replace, real_unlink, removed = os.replace, os.unlink, [0]

    def replace(*paths: Any, **more: Any) -> None:
        target = Path(paths[1])
        if target.name == "rank-1.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real_replace(*paths, **more)

    def unlink(path: Any, *rest: Any, **more: Any) -> None:
        removed[0] += "probe" not in str(path)
        if removed[0] == number:  # the other rank is through by now, if it does not wait for this one
            eventually(lambda: not list(tmp_path.glob("b/step-*")), 1.0)
            kill_me()
        real_unlink(path, *rest, **more)

    def die(rank: int) -> None:
        if rank == 1:
            os.replace = replace
        else:
            os.unlink = unlink

    expected = ends(trained(2, tmp_path, *options, "--checkpoint-dir", str(tmp_path / "whole")))
    killed(2, tmp_path, options, die, on_hosts(tmp_path, "ab", 1))
    assert ends(trained(2, tmp_path, *options, env=on_hosts(tmp_path, "ab", 2))) == expected


def test_a_folder_that_one_rank_cannot_write_ends_all_of_them_before_the_first_step(
    tmp_path: Path, options: list[str]
) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "checkpoints"
    outcomes = trained(2, tmp_path, *options, env={"RINGCTL_CHECKPOINTS": str(folder)})
    for outcome in outcomes:
        assert (outcome.exit_code, outcome.out, outcome.records) == (2, "", [])
        why = ", ".join(f"rank {rank}: {folder}: Not a directory" for rank in range(2))
        assert outcome.err == f"trainer: cannot write checkpoints: {why}; choose another --checkpoint-dir\n"


@pytest.mark.parametrize(
    ("words", "environ", "expected"),
    [
        ([], {}, (0, "checkpoints", "never")),
        (["--checkpoint-every", "9"], {}, (9, "checkpoints", "auto")),
        (["--checkpoint-every", "9", "--resume", "never"], {}, (9, "checkpoints", "never")),
        (["--resume", "auto"], {"RINGCTL_CHECKPOINTS": "/run"}, (0, "/run", "auto")),
        (["--checkpoint_dir", "/mine"], {"RINGCTL_CHECKPOINTS": "/run"}, (0, "/mine", "never")),
    ],
)
def test_a_run_that_saves_goes_on_unless_told_otherwise(
    words: list[str], environ: dict[str, str], expected: tuple[int, str, str]
) -> None:
    told = parse(words, environ)
    assert (told.checkpoint_every, told.checkpoint_dir, told.resume) == expected


def test_a_run_that_is_finished_says_so_and_tells_its_accuracy_again(
    tmp_path: Path, options: list[str]
) -> None:
    saving = [*options, "--checkpoint-dir", str(tmp_path / "checkpoints")]
    first, again = trained(2, tmp_path, *saving), trained(2, tmp_path, *saving)
    assert ends(first) == ends(again)
    assert "10 of 10 steps were done at the newest checkpoint: nothing is left to train" in again[0].out
    assert first[0].out.splitlines()[-1] == again[0].out.splitlines()[-1]
    assert again[0].last["step"] == STEPS


def test_a_run_whose_end_could_not_be_saved_does_not_end_as_if_it_was(
    tmp_path: Path, options: list[str]
) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for step in (6, 10):
        (folder / f"step-{step:08d}").symlink_to("nowhere")
    for outcome in trained(2, tmp_path, *options, "--checkpoint-dir", str(folder)):
        assert outcome.exit_code == 1
        assert outcome.last["final"] is True
        assert outcome.err.endswith(
            f"trainer: the training is done, but its end could not be saved in {folder}\n"
        )
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == [
        "step-00000004",
        "step-00000008",
    ]


def test_a_second_attempt_goes_on_from_the_first_wherever_that_was_to_begin(
    tmp_path: Path, options: list[str]
) -> None:
    def attempt(run: str, number: int, *more: str) -> str:
        environ = {"RINGCTL_RUN": run, "RINGCTL_ATTEMPT": str(number)}
        outcomes = trained(2, tmp_path, *options, *more, env=environ)
        ends(outcomes)
        return outcomes[0].out

    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    afresh = ("--checkpoint-dir", first, "--resume", "never")
    attempt("one", 1, *afresh)
    assert "this run starts at its first step" in attempt("two", 2, *afresh), "of another run"
    assert "10 of 10 steps" in attempt("two", 3, *afresh)
    elsewhere = ("--checkpoint-dir", second, "--resume", f"{first}/step-00000008")
    assert "8 of 10 steps" in attempt("three", 1, *elsewhere)
    assert "10 of 10 steps" in attempt("three", 2, *elsewhere)


def test_a_checkpoint_from_before_there_were_copies_can_be_gone_on_from(
    tmp_path: Path, options: list[str]
) -> None:
    saving = [*options, "--checkpoint-dir", str(tmp_path / "checkpoints")]
    expected = ends(trained(2, tmp_path, *saving))
    place = tmp_path / "checkpoints" / "step-00000010"
    model = torch.load(place / "model.pt", weights_only=True)
    del model["first_world"]
    torch.save(model, place / "model.pt")
    raw = (place / "model.pt").read_bytes()
    for rank in range(2):
        manifest = json.loads((place / f"rank-{rank}.json").read_text())
        del manifest["model_sha256"], manifest["sha256"]
        if rank == 0:
            facts = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
            manifest["files"]["model.pt"] = facts
        (place / f"rank-{rank}.json").write_text(json.dumps(manifest))
    again = trained(2, tmp_path, *saving)
    assert "10 of 10 steps were done" in again[0].out
    assert ends(again) == expected


def test_a_damaged_newest_checkpoint_is_told_and_the_one_before_leads_to_the_same_end(
    tmp_path: Path, options: list[str]
) -> None:
    saving = [*options, "--checkpoint-dir", str(tmp_path / "checkpoints")]
    expected = ends(trained(2, tmp_path, *saving))
    cut = tmp_path / "checkpoints" / "step-00000010" / "rank-1.pt"
    whole = cut.read_bytes()
    cut.write_bytes(whole[:1000])
    outcomes = trained(2, tmp_path, *saving)
    assert ends(outcomes) == expected
    assert f"8 of {STEPS} steps were done" in outcomes[0].out
    assert outcomes[0].err == (
        "trainer: warning: the checkpoint of step 10 is not whole: "
        f"rank 1: {cut} has 1,000 bytes of {len(whole):,}\n"
    )
    # What was trained again has been saved again.
    assert "10 of 10 steps" in trained(2, tmp_path, *saving)[0].out


def test_a_run_with_other_options_ends_before_anything_is_trained_or_touched(
    tmp_path: Path, options: list[str]
) -> None:
    saving = [*options, "--checkpoint-dir", str(tmp_path / "checkpoints")]
    ends(trained(2, tmp_path, *saving))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "checkpoints").rglob("*.*")}
    for world, change, text in (
        (2, ["--model", "bn-cnn"], "--model 'restless', not 'bn-cnn'"),
        (1, [], "--world-size 2, not 1"),
        (3, [], "--world-size 2, not 3"),
        (2, ["--compress", "int4"], "--compress 'int8', not 'int4'"),
        (2, ["--steps", "20"], "steps in all 10, not 20"),
    ):
        for outcome in trained(world, tmp_path, *saving, *change):
            assert outcome.exit_code == 2
            assert outcome.err == (
                f"trainer: the checkpoint of step 10 was made with {text}: go on with the same, or start "
                "afresh with another --checkpoint-dir, or replace it with --resume never\n"
            )
            assert outcome.records == []
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "checkpoints").rglob("*.*")} == before


def test_a_fresh_start_replaces_what_was_there_and_another_folder_can_be_gone_on_from(
    tmp_path: Path, options: list[str]
) -> None:
    first = [*options, "--checkpoint-dir", str(tmp_path / "first")]
    expected = ends(trained(2, tmp_path, *first))
    second = [*options, "--checkpoint-dir", str(tmp_path / "second")]
    for source, steps in ((tmp_path / "first", 10), (tmp_path / "first" / "step-00000008", 8)):
        outcomes = trained(2, tmp_path, *second, "--resume", str(source))
        assert ends(outcomes) == expected
        assert f"{steps} of 10 steps" in outcomes[0].out
    other = trained(2, tmp_path, *first, "--seed", "5", "--resume", "never", "--steps", "6")
    assert ends(other) != expected
    assert sorted(path.name for path in (tmp_path / "first").glob("step-*")) == [
        "step-00000004",
        "step-00000006",
    ]
    for outcome in trained(2, tmp_path, *second, "--resume", str(tmp_path / "nowhere")):
        why = f"cannot go on from {tmp_path / 'nowhere'}: there is none. To start afresh: --resume never"
        assert (outcome.exit_code, outcome.err) == (2, f"trainer: {why}\n")


# --- Other hosts, other numbers of ranks --------------------------------------------------------------


def on_hosts(folder: Path, hosts: str, attempt: int) -> Callable[[int], dict[str, str]]:
    """The environment of ranks of one run on these hosts, a letter each; each host has its own folder."""

    def environ(rank: int) -> dict[str, str]:
        place = {"RINGCTL_HOST": hosts[rank], "RINGCTL_CHECKPOINTS": str(folder / hosts[rank])}
        return {"RINGCTL_RUN": "run-1", "RINGCTL_ATTEMPT": str(attempt), **place}

    return environ


def test_a_run_that_lost_the_host_of_rank_0_goes_on_from_the_copy_on_another(
    tmp_path: Path, options: list[str]
) -> None:
    killed(2, tmp_path, options, at_step(7), on_hosts(tmp_path, "ab", 1))
    assert (tmp_path / "b" / "step-00000004" / "model.pt").read_bytes()
    # Rank 0 is on a new host now.
    outcomes = trained(2, tmp_path, *options, env=on_hosts(tmp_path, "cb", 2))
    assert len(ends(outcomes)) == 1
    (told,) = [line for line in outcomes[0].out.splitlines() if "at the newest checkpoint" in line]
    assert told.startswith(("4 of 10 steps were done", "6 of 10 steps were done"))
    assert told.endswith(
        "what rank 0 alone knew (random numbers, error feedback) is lost and begins afresh: bits may differ"
    )
    assert "rank 0: its part is not on its host" in outcomes[0].err
    assert outcomes[0].last["step"] == STEPS
    # Rank 1's host is lost as well, and with it all copies but the one that the new host has made since.
    outcomes = trained(2, tmp_path, *options, env=on_hosts(tmp_path, "dc", 3))
    assert "10 of 10 steps were done at the newest checkpoint: nothing is left to train" in outcomes[0].out


def test_a_rank_that_begins_afresh_takes_the_format_that_the_others_took(tmp_path: Path, small: str) -> None:
    """If it measured the link anew, as at the start of a run, the ranks would wait for each other in vain."""
    few = ["--data", small, "--model", "restless", "--batch-size", "4", "--checkpoint-every", "2"]
    options = [*few, "--steps", "20", "--compress", "auto", "--timeout", "20"]
    killed(2, tmp_path, options, at_step(17), on_hosts(tmp_path, "ab", 1))
    outcomes = trained(2, tmp_path, *options, env=on_hosts(tmp_path, "cb", 2))
    assert len(ends(outcomes)) == 1
    assert "begins afresh" in outcomes[0].out
    assert "--compress auto stays with" in outcomes[0].out


def test_without_copies_a_run_that_lost_the_host_of_rank_0_does_not_silently_begin_anew(
    tmp_path: Path, options: list[str]
) -> None:
    alone = [*options, "--checkpoint-copies", "0"]
    ends(trained(2, tmp_path, *alone, env=on_hosts(tmp_path, "ab", 1)))
    assert not list((tmp_path / "b").rglob("model.pt"))
    for world, hosts, resume, text in (
        (2, "cb", "auto", "rank 0: its part is not on its host"),
        (1, "b", "auto", "its model.pt is on none of these hosts"),
        (1, "b", "never", "its model.pt is on none of these hosts"),
    ):
        again = [*alone, "--resume", resume]
        for outcome in trained(world, tmp_path, *again, env=on_hosts(tmp_path, hosts, 2)):
            assert outcome.exit_code == 2
            assert f"the checkpoint of step 10 is not whole: {text}" in outcome.err
    assert len(list((tmp_path / "b").glob("step-*/rank-1.pt"))) == 2, "all is still there"


def test_ranks_killed_while_they_save_after_a_grow_go_on_from_where_they_grew(
    tmp_path: Path, small: str
) -> None:
    """8 of 40 steps are 4 of 20: four steps later the number is that of the newest checkpoint once more."""
    options = ["--data", small, "--model", "restless", "--batch-size", "4"]
    options += ["--epochs", "4", "--checkpoint-every", "4"]

    def with_file(name: str) -> Callable[[int], None]:
        """Rank 0 is killed when it has put this file of step 8 in its place."""

        def after(target: Path) -> None:
            if target.name == name and target.parent.name.startswith("step-00000008"):
                kill_me()

        return lambda rank: at_names(lambda _: None, after) if rank == 0 else None

    killed(1, tmp_path, options, with_file("rank-0.json"), on_hosts(tmp_path, "a", 1))
    killed(2, tmp_path, options, with_file("model.pt"), on_hosts(tmp_path, "aa", 2))
    outcomes = trained(2, tmp_path, *options, env=on_hosts(tmp_path, "aa", 3))
    assert len(ends(outcomes)) == 1
    told = (
        "8 of 40 steps were done at the newest checkpoint by 1 rank, now there are 2: that is 4 of 20 steps"
    )
    assert told in outcomes[0].out
    assert outcomes[0].err == "trainer: warning: the checkpoint of step 8 was not finished\n"


@pytest.fixture
def _rates_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank prints with which learning rate it takes a step."""
    real = SGD.step

    def step(self: SGD, lr: float) -> None:
        print(f"lr {lr!r}", flush=True)
        real(self, lr)

    monkeypatch.setattr(SGD, "step", step)


@pytest.mark.usefixtures("_rates_are_told")
def test_a_run_goes_on_with_fewer_ranks_and_then_with_more(tmp_path: Path, small: str) -> None:
    """Four ranks have 3 steps in an epoch of the small images, two have 5, and three have 4."""
    usual = ["--data", small, "--model", "restless", "--compress", "int8", "--batch-size", "4", "--lr", "0.1"]
    options = [*usual, "--epochs", "4", "--checkpoint-every", "3"]
    planned = {4: 12, 2: 20, 3: 16}

    def begun(world: int, out: str, before: int) -> None:
        """It is as far as those before were, and its learning rate is for as many ranks as it has."""
        lines = out.splitlines()
        (told,) = [line for line in lines if "at the newest checkpoint" in line]
        numbers = [int(word.strip(",:")) for word in told.split() if word.strip(",:").isdigit()]
        step, steps, ranks, now, step_now, steps_now = numbers
        assert (steps, ranks, now, steps_now) == (planned[before], before, world, planned[world])
        assert step_now == step * planned[world] // planned[before] > 0
        assert f"with {world / 4:.4g} times --lr" in told
        rates = [float(line.split()[1]) for line in lines if line.startswith("lr ")]
        assert rates[0] == 0.1 * (world / 4) * (1 - step_now / planned[world])

    killed(4, tmp_path, options, at_step(9), on_hosts(tmp_path, "aabb", 1))
    killed(2, tmp_path, options, at_step(7), on_hosts(tmp_path, "bb", 2))
    begun(2, (tmp_path / "killed-0").read_text(), before=4)
    outcomes = trained(3, tmp_path, *options, env=on_hosts(tmp_path, "bbc", 3))
    assert len(ends(outcomes)) == 1
    begun(3, outcomes[0].out, before=2)
    assert (outcomes[0].last["step"], outcomes[0].last["epoch"]) == (16, 4)
    # What all had at the end is what another number of ranks begins with.
    again = trained(2, tmp_path, *options, env=on_hosts(tmp_path, "cb", 4))
    assert ends(again) == ends(outcomes)
    assert "epoch 4/4  loss -  accuracy" in again[0].out
    assert again[0].last["loss"] is None
    for outcome in trained(2, tmp_path, *options, env=on_hosts(tmp_path, "cb", 1)):
        assert outcome.exit_code == 2
        assert "the checkpoint of step 16 was made with --world-size 3, not 2" in outcome.err


@pytest.mark.usefixtures("_rates_are_told")
@pytest.mark.parametrize("every", ["3", "0"])
def test_a_run_with_fewer_ranks_than_at_first_has_their_rate_also_if_it_starts_at_its_first_step(
    every: str, tmp_path: Path, small: str
) -> None:
    options = ["--data", small, "--model", "restless", "--batch-size", "4", "--lr", "0.1", "--steps", "4"]

    def environ(rank: int) -> dict[str, str]:
        return {**on_hosts(tmp_path, "ab", 2)(rank), "WORLD_SIZE": "2", "RINGCTL_FIRST_WORLD": "4"}

    out = trained(2, tmp_path, *options, "--checkpoint-every", every, env=environ)[0].out
    assert "this run starts at its first step, with 0.5 times --lr\n" in out
    assert "lr 0.05\n" in out
    for place in tmp_path.glob("a/step-*"):
        assert torch.load(place / "model.pt", weights_only=True)["first_world"] == 4
