"""`ringctl checkpoints` and `ringctl pull`: what a run has made is found on its hosts, and comes whole."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher import cli_pull, fetch, hostfiles, kit, pull, pulling, runs
from launcher.agent import Agent, agents_for
from launcher.errors import HostError, InputError, RingctlError
from launcher.follow import follow
from launcher.model import Host
from launcher.pull import FileAbout, Listing, Manifest, StepOnHost
from launcher.pullfolder import PullFolder, refuse_full
from launcher.transport import Pool
from tests.launcher import hosts
from tests.launcher.conftest import become_controller
from tests.launcher.hosts import OURS, Hosts, inventory
from tests.launcher.ringctl import (
    RINGCTL,
    detach,
    events,
    is_alive,
    launch,
    lines,
    ringctl,
    run_folder,
    start,
    state,
    wait_for,
    wait_until_final,
)

# Saves the steps in $0 as the trainer does, a model of $1 bytes on each host, and a line of metrics.
SAVE = r"""
import hashlib, json, os, sys
from pathlib import Path
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
for step in map(int, sys.argv[1].split(",")):
    place = Path(os.environ["RINGCTL_CHECKPOINTS"], f"step-{step:08d}")
    place.mkdir(parents=True, exist_ok=True)
    contents = {f"rank-{rank}.pt": b"own"}
    if os.environ["LOCAL_RANK"] == "0":
        contents["model.pt"] = (b"model of step %d, " % step * int(sys.argv[2]))[: int(sys.argv[2])]
    files = {}
    for name, content in contents.items():
        (place / name).write_bytes(content)
        files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    about = {"version": 1, "step": step, "epoch": 1, "rank": rank, "files": files}
    about["run"] = {"--world-size": world}
    (place / f"rank-{rank}.json").write_text(json.dumps(about))
    with open(os.environ["RINGCTL_METRICS"], "a") as file:
        print(json.dumps({"step": step}), file=file)
print("saved", rank)
"""


def saving(steps: str, model_bytes: int = 4000) -> list[str]:
    return ["python3", "-c", SAVE, steps, str(model_bytes)]


def model_of(step: int, model_bytes: int = 4000) -> bytes:
    return (b"model of step %d, " % step * model_bytes)[:model_bytes]


def saved(steps: str, world: int = 2) -> str:
    """A run on this machine that is over."""
    return str(launch(saving(steps), world=world)[-1]["run"])


def step_folder(run: str, step: int) -> Path:
    return run_folder(run) / "checkpoints" / f"step-{step:08d}"


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def damage(path: Path) -> None:
    """The same length, other bytes."""
    with path.open("r+b") as file:
        file.write(b"\0" * 100)


def about(folder: Path) -> Any:
    return json.loads((folder / "checkpoint.json").read_text())


def listed(*args: str, code: int = 0) -> Any:
    return json.loads(ringctl("checkpoints", *args, "--json", code=code).stdout)


@contextlib.contextmanager
def heard_of(run: str) -> Iterator[pulling.Heard]:
    """What the run's hosts have of it, in this process."""
    pool = Pool(no_input=True)
    try:
        found = runs.find_run(run, runs.remembered())
        yield pulling.hear(found, agents_for(found.hosts, pool))
    finally:
        pool.close()


# --- On this machine -----------------------------------------------------------------------------


def test_what_the_trainer_saved_is_listed_and_comes_whole_with_metrics_and_logs(tmp_path: Path) -> None:
    run = str(launch(["--steps", "4", "--checkpoint-every", "2", "--threads", "1"])[-1]["run"])
    told = listed(run)
    assert [(c["step"], c["complete"], c["world"]) for c in told["checkpoints"]] == [
        (2, True, 2),
        (4, True, 2),
    ]
    assert [(part["rank"], part["ok"]) for part in told["checkpoints"][1]["parts"]] == [(0, True), (1, True)]
    table = ringctl("checkpoints", run).stdout.splitlines()
    assert table[0].split() == ["STEP", "EPOCH", "COMPLETE", "RANKS", "ON", "MODEL", "ON", "SIZE", "WRITTEN"]
    assert table[2].split()[:7] == ["4", "1", "yes", "0-1", "of", "2", "localhost"]
    ringctl("pull", cwd=tmp_path)
    folder = tmp_path / run
    model = (step_folder(run, 4) / "model.pt").read_bytes()
    assert (folder / "model.pt").read_bytes() == model
    assert about(folder)["sha256"] == hashlib.sha256(model).hexdigest()
    assert (about(folder)["step"], about(folder)["options"]["--world-size"]) == (4, 2)
    for rank in (0, 1):
        metrics = (run_folder(run) / f"ranks/{rank}/metrics-1.jsonl").read_bytes()
        assert (folder / f"metrics/rank-{rank}-attempt-1.jsonl").read_bytes() == metrics != b""
    ringctl("logs", run, "--download", str(tmp_path / "logs"))
    assert files_in(folder / "logs") == files_in(tmp_path / "logs" / run)
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoint.json",
        "logs",
        "metrics",
        "model.pt",
    ]


def test_a_folder_with_something_in_it_is_refused_and_force_replaces_only_what_is_ours(
    tmp_path: Path,
) -> None:
    run, folder = saved("2,4"), tmp_path / "mine"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    done = ringctl("pull", run, str(folder), code=2)
    assert f"{folder} is there already, and not empty" in done.stderr
    assert list(folder.iterdir()) == [folder / "notes.txt"]
    ringctl("pull", run, str(folder), "--force")
    assert (folder / "model.pt").read_bytes() == model_of(4)
    (folder / "logs" / "rank7.out.log").write_text("of an older attempt")
    ringctl("pull", run, str(folder), "--force", "--step", "2")
    assert (folder / "model.pt").read_bytes() == model_of(2)
    assert about(folder)["step"] == 2
    assert (folder / "notes.txt").read_text() == "mine"
    assert sorted(p.name for p in (folder / "logs").iterdir()) == [
        "events.jsonl", "rank0.out.log", "rank1.out.log"
    ]  # fmt: skip
    (tmp_path / "file").write_text("")
    assert ringctl("pull", run, str(tmp_path / "file"), code=2).stderr.count("Traceback") == 0


def test_what_an_earlier_pull_has_put_there_of_another_run_gives_way(tmp_path: Path) -> None:
    three, one, folder = saved("2", world=3), saved("4", world=1), tmp_path / "folder"
    ringctl("pull", three, str(folder))
    for name in ("mine.jsonl", "rank-7-attempt-1.jsonl"):
        (folder / "metrics" / name).write_text("")
    ringctl("pull", three, str(folder), "--force")
    assert len(os.listdir(folder / "metrics")) == 5, (
        "of the same run, they may be of a host that has lost them"
    )
    ringctl("pull", one, str(folder), "--force")
    assert sorted(os.listdir(folder / "metrics")) == ["mine.jsonl", "rank-0-attempt-1.jsonl"]
    assert sorted(os.listdir(folder / "logs")) == ["events.jsonl", "rank0.out.log"]


def test_whose_files_are_there_is_known_by_the_log_or_else_by_the_model(tmp_path: Path) -> None:
    to = PullFolder(tmp_path)
    assert not to.has_another("a")
    for text, expected in (('{"run": "a"}', False), ('{"run": "b"}', True), ("[]", False), ("{", False)):
        (tmp_path / "checkpoint.json").write_text(text)
        assert to.has_another("a") is expected
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "events.jsonl").write_text('odd\n{"time": 1, "run": "a", "host": "h"}\n')
    assert (to.has_another("a"), to.has_another("b")) == (False, True)


def test_a_pull_that_is_interrupted_while_it_puts_things_in_their_places_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, folder = saved("2,4"), tmp_path / "folder"

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    to = PullFolder(folder)
    with monkeypatch.context() as patch, heard_of(run) as heard, to.open():
        patch.setattr(PullFolder, "place_rest", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pulling.bring(heard, to, None)
    assert sorted(os.listdir(folder)) == ["checkpoint.json", "model.pt", "pull.part", "pull.placing"]
    other = saved("6")
    assert "not empty" in ringctl("pull", other, str(folder), code=2).stderr
    assert about(folder)["run"] == run, "what is there of this run is not the other one's to replace"
    ringctl("pull", run, str(folder))
    assert sorted(os.listdir(folder)) == ["checkpoint.json", "logs", "metrics", "model.pt"]
    assert "not empty" in ringctl("pull", run, str(folder), code=2).stderr


def test_wherever_a_pull_is_interrupted_while_things_get_their_places_it_goes_on(tmp_path: Path) -> None:
    def place_all(to: PullFolder) -> None:
        to.begin_placing("a")
        to.place_model(to.model_part("0"), {"run": "a"})
        to.place_rest(whole_logs=True)
        to.close(keep_model=False)

    def pulls(folder: Path, after: int) -> bool:
        """Whether it got through: not if it was to change more files and folders than so many."""
        to, changes = PullFolder(folder), itertools.count()

        def change(real: Any, *args: Any, **options: Any) -> Any:
            if next(changes) >= after:
                raise KeyboardInterrupt
            return real(*args, **options)

        with to.open(), pytest.MonkeyPatch.context() as patch:
            for path in (to.model_part("0"), to.metrics / "rank-0-attempt-1.jsonl", to.logs / "events.jsonl"):
                path.touch()
            for name in ("mkdir", "replace", "unlink", "rmdir"):
                patch.setattr(os, name, functools.partial(change, getattr(os, name)))
            with contextlib.suppress(KeyboardInterrupt):
                place_all(to)
                return True
        return False

    for after in itertools.count():
        folder = tmp_path / str(after)
        if pulls(folder, after):
            break
        refuse_full(folder, force=False, run="a")
        assert pulls(folder, 1000)
        assert sorted(os.listdir(folder)) == ["checkpoint.json", "logs", "metrics", "model.pt"]
    assert after > 10
    with pytest.raises(InputError, match="not empty"):
        refuse_full(folder, force=False, run="a")


def test_after_a_power_cut_a_model_is_not_beside_what_another_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to, calls = PullFolder(tmp_path), []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        calls.append("synced " + os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        real_fsync(descriptor)

    def replaced(source: Any, target: Any) -> None:
        calls.append("replaced " + Path(target).name)
        real_replace(source, target)

    with to.open():
        (model := to.model_part("0")).touch()
        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "replace", replaced)
        to.place_model(model, {"run": "a"})
    folder = f"synced {tmp_path.name}"
    model_there, about_there = "replaced model.pt", "replaced checkpoint.json"
    assert calls == ["synced checkpoint.json", folder, model_there, folder, about_there, folder]


def modes_below(folder: Path) -> set[tuple[bool, int]]:
    """(whether it is a folder, its mode) of all that is in there."""
    return {(path.is_dir(), path.stat().st_mode & 0o777) for path in folder.rglob("*")}


def test_what_comes_is_closed_to_others_and_what_was_there_keeps_its_mode(tmp_path: Path) -> None:
    run, mine = saved("2,4"), tmp_path / "mine"
    closed = {(True, 0o700), (False, 0o600)}
    (tmp_path / "new").mkdir(mode=0o755)
    ringctl("pull", run, str(tmp_path / "new" / "folder" / "below"))
    ringctl("logs", run, "--download", str(tmp_path / "new" / "logs"))
    assert modes_below(tmp_path / "new") == closed
    mine.mkdir(mode=0o755)
    (mine / "notes.txt").write_text("mine")
    (mine / "notes.txt").chmod(0o644)
    ringctl("pull", run, str(mine), "--force")
    assert (mine.stat().st_mode & 0o777, (mine / "notes.txt").stat().st_mode & 0o777) == (0o755, 0o644)
    (mine / "notes.txt").unlink()
    assert modes_below(mine) == closed


def test_a_damaged_model_is_never_taken_and_a_step_that_is_not_there_leaves_nothing(tmp_path: Path) -> None:
    run = saved("2,4", world=1)
    damage(step_folder(run, 4) / "model.pt")
    done = ringctl("pull", run, str(tmp_path / "older"))
    assert "step 4: localhost: model.pt has not the checksum" in done.stderr
    assert (tmp_path / "older" / "model.pt").read_bytes() == model_of(2)
    done = ringctl("pull", run, str(tmp_path / "four"), "--step", "4", code=1)
    assert "error: no host has a whole model of step 4" in done.stderr
    assert sorted(path.name for path in (tmp_path / "four").iterdir()) == ["logs", "metrics"]
    done = ringctl("pull", run, str(tmp_path / "three"), "--step", "3", code=2)
    assert "--step 3: " in done.stderr
    assert done.stderr.endswith("it has: 2, 4\n")
    assert not (tmp_path / "three").exists()


def test_without_a_checkpoint_metrics_and_logs_come_and_that_is_said(tmp_path: Path) -> None:
    twice = "echo hello; for a in 1 2; do echo {} >>${RINGCTL_METRICS%1.jsonl}$a.jsonl; done"
    run = str(launch(["sh", "-c", twice], world=1)[-1]["run"])
    assert f"run {run} has no checkpoints" in ringctl("checkpoints", run).stdout
    done = ringctl("pull", run, str(tmp_path / "new"))
    assert f"run {run} has no checkpoints: no model is pulled" in done.stderr
    assert set(files_in(tmp_path / "new")) == {
        "metrics/rank-0-attempt-1.jsonl", "metrics/rank-0-attempt-2.jsonl",
        "logs/events.jsonl", "logs/rank0.out.log",
    }  # fmt: skip


def test_lines_that_are_lost_are_told_by_a_pull_and_a_download(tmp_path: Path) -> None:
    run = saved("1")
    (file,) = run_folder(run).glob("events-*.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["kind"] for line in lines].count("host_finished") == 1
    last = next(line for line in lines if line["kind"] == "host_finished")
    last["unwritten"] = 17  # as a supervisor writes it that had no room
    file.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    told = "localhost: 17 lines of its log are lost: they could not be written down\n"
    assert ringctl("logs", run, "--download", str(tmp_path / "down")).stderr == told
    assert ringctl("pull", run, str(tmp_path / "pulled")).stderr.endswith(told)


def test_lines_that_are_lost_are_told_by_status_and_explain_also_once_the_end_is_remembered() -> None:
    run = detach(["python3", "-c", "raise ValueError('odd')"], world=1)
    wait_until_final(run)
    file = run_folder(run) / "state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "unwritten": -1}))
    told = "localhost: lines of its log may be lost: nobody could write them down\n"
    for _ in range(2):  # its host is asked the first time only
        assert told in ringctl("status", run).stdout
        assert ringctl("explain", run).stderr == told


def test_checkpoints_that_a_user_wanted_elsewhere_are_said_to_be_there(tmp_path: Path) -> None:
    words = ("--checkpoint-dir", "first", f"--checkpoint_dir={tmp_path / 'other'}")
    run = str(launch(["sh", "-c", "true", *words], world=1)[-1]["run"])
    assert listed(run)["elsewhere"] == {"localhost": str(tmp_path / "other")}
    said = ringctl("pull", run, str(tmp_path / "new")).stderr
    assert f"localhost: the run saves to {tmp_path / 'other'} (--checkpoint-dir)" in said


def test_a_run_that_goes_on_is_pulled_with_whole_lines_of_metrics(tmp_path: Path) -> None:
    script = (
        f'"$@"; printf "half of a li" >>$RINGCTL_METRICS; while ! test -e {tmp_path}/go; do sleep 0.02; done'
    )
    run = detach(["sh", "-c", script, "sh", *saving("2,4")])
    metrics = [run_folder(run) / f"ranks/{rank}/metrics-1.jsonl" for rank in (0, 1)]
    wait_for(
        lambda: all(m.exists() and m.read_text().endswith("li") for m in metrics), "two halves of a line"
    )
    ringctl("pull", run, str(tmp_path / "new"))
    (tmp_path / "go").touch()
    assert (tmp_path / "new" / "model.pt").read_bytes() == model_of(4)
    for rank in (0, 1):
        pulled = (tmp_path / "new" / f"metrics/rank-{rank}-attempt-1.jsonl").read_text()
        assert pulled == '{"step": 2}\n{"step": 4}\n'
    wait_until_final(run)


def test_what_the_run_removes_before_it_is_sent_gives_way_to_what_it_has_saved_since(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, to = saved("2,4"), PullFolder(tmp_path / "new")
    with heard_of(run) as heard, to.open():
        step_folder(run, 4).rename(step_folder(run, 8))
        for path in step_folder(run, 8).glob("*.json"):
            path.write_text(json.dumps({**json.loads(path.read_text()), "step": 8}))
        model = pulling.bring_model(heard, to, None)
        assert model is not None
        assert model[0].step == 8, "not the older one, which is still there"
        step_folder(run, 8).rename(step_folder(run, 4))
        assert pulling.bring_model(heard, PullFolder(tmp_path / "other"), 8) is None
        assert heard.code == 1
    assert (
        "step 4: localhost: checkpoints/step-00000004/model.pt is not there any more"
        in capsys.readouterr().err
    )


def test_two_pulls_do_not_write_to_one_folder(tmp_path: Path) -> None:
    one, other = PullFolder(tmp_path / "new"), PullFolder(tmp_path / "new")
    with one.open():
        with pytest.raises(InputError, match="another `ringctl pull` is writing"), other.open():
            pass
        assert sorted(os.listdir(one.part)) == ["logs", "metrics"]
    with other.open():
        other.close(keep_model=False)


# --- Names ---------------------------------------------------------------------------------------


def test_a_host_sends_models_and_metrics_out_of_the_runs_own_folder_and_nothing_else(tmp_path: Path) -> None:
    run = saved("2,4", world=1)
    (tmp_path / "secret").write_text("secret")
    (step_folder(run, 4) / "model.pt").unlink()
    (step_folder(run, 4) / "model.pt").symlink_to(tmp_path / "secret")
    asked = [
        "checkpoints/step-00000004/model.pt",  # a link that leads out
        "checkpoints/step-00000002/../step-00000002/model.pt",
        "../../../secret",
        str(tmp_path / "secret"),
        "plan.json",
        "",
    ]
    right = "checkpoints/step-00000002/model.pt"
    with heard_of(run) as heard:
        agent = heard.agents["localhost"]
        wanted = [{"path": path, "offset": 0} for path in [*asked, right]]
        with contextlib.closing(fetch.Sender.of(agent, run, wanted)) as sender:
            for path in asked:
                with pytest.raises(fetch.Gone):
                    sender.length(path)
            assert b"".join(sender.body(sender.length(right))) == model_of(2)
        for name in ("../runs", "..", "", f"{run}/ranks"):
            refused = pytest.raises(RingctlError, match="not the name of a run")
            with refused, contextlib.closing(fetch.Sender.of(agent, name, wanted)) as sender:
                sender.length(right)
    ringctl("pull", run, str(tmp_path / "new"))
    assert (tmp_path / "new" / "model.pt").read_bytes() == model_of(2)


@pytest.mark.parametrize("run", ["../x", "/etc", "", "..", "a/b", "-rf", "a\nb"])
def test_a_run_id_that_is_no_name_is_not_taken_for_a_folder(run: str) -> None:
    with pytest.raises(InputError):
        cli_pull.folder_for(run)


def a_listing(**changes: Any) -> dict[str, Any]:
    """A host's answer."""
    file = {"bytes": 3, "sha256": "0" * 64}
    manifest = {"rank": 0, "epoch": 1, "run": {"--world-size": 1}, "files": {"model.pt": file}}
    step = {"step": 2, "written": 1.0, "files": {"model.pt": 3}, "manifests": [manifest], "unread": []}
    whole = {"steps": [step], "ranks": [0], "metrics": [{"rank": 0, "attempt": 1, "bytes": 3}]}
    answer: dict[str, Any] = {**whole, "events": 0, "checkpoint_dir": ""}
    for path, value in changes.items():
        *way, last = [int(key) if key.isdigit() else key for key in path.split("__")]
        place = answer
        for key in way:
            place = place[key]  # type: ignore[index]  # lists and dicts alike
        place[last] = value  # type: ignore[index]  # lists and dicts alike
    return answer


@pytest.mark.parametrize(
    "change",
    [
        {"steps": None},
        {"steps__0__step": -1},
        {"steps__0__step": 10**30},
        {"steps__0__step": "../../x"},
        {"steps__0__turn": -1},
        {"steps__0__turn": "/../../x"},
        {"steps__0__written": float("nan")},
        {"steps__0__files__model.pt": True},
        {"steps__0__manifests__0__files__model.pt__sha256": "../../x"},
        {"steps__0__manifests__0__run": {"x": json.loads("[" * 30 + "]" * 30)}},
        {"steps__0__manifests__0__files__model.pt__bytes": 10**30},
        {"metrics__0__rank": "../../x"},
        {"metrics__0__attempt": -1},
        {"metrics__0": []},
        {"events": 1e300},
        {"ranks": [None]},
        {"world": -1},
        {"world": "1"},
        {"world": 1, "ranks": [1]},
    ],
    ids=str,
)
def test_an_answer_that_makes_no_sense_is_not_believed(change: dict[str, Any]) -> None:
    assert pull.listing("server1", a_listing()).steps[0].step == 2
    with pytest.raises(HostError, match="server1: "):
        pull.listing("server1", a_listing(**change))


# --- Which checkpoint ----------------------------------------------------------------------------


def on_host(step: int, *ranks: int, world: int = 2, steps: int | None = None, turn: int = 0) -> StepOnHost:
    options = {"--world-size": world} | ({"steps in all": steps} if steps else {})
    file = FileAbout(3, "0" * 64)
    parts = tuple(Manifest(r, 1, options, {f"rank-{r}.pt": file, "model.pt": file}) for r in ranks)
    return StepOnHost(step, 1.0, {**{f"rank-{r}.pt": 3 for r in ranks}, "model.pt": 3}, parts, (), turn)


def host_with(*steps: StepOnHost, ranks: tuple[int, ...] = (), world: int = 0) -> Listing:
    return Listing(steps, ranks, (), 0, "", world)


@pytest.mark.parametrize(
    ("answered", "all_heard", "complete"),
    [
        ({"a": host_with(on_host(2, 0)), "b": host_with(on_host(2, 1))}, True, True),
        ({"a": host_with(on_host(2, 0, 1))}, False, True),
        ({"a": host_with(on_host(2, 0))}, True, False),
        ({"a": host_with(on_host(2, 0))}, False, None),
        ({"a": host_with(on_host(2, 0), ranks=(0, 1), world=2)}, False, False),
        ({"a": host_with(on_host(2, 0), ranks=(0, 1))}, False, None),
        ({"a": host_with(on_host(2, 0), ranks=(0, 1), world=3)}, False, None),
        ({"a": host_with(on_host(2, 0), ranks=(1,), world=2)}, False, None),
        (
            {"a": host_with(on_host(2, 0), ranks=(0,), world=2), "b": host_with(ranks=(1,), world=2)},
            False,
            None,
        ),
        ({"a": host_with(on_host(2, 0, 1, world=4)), "b": host_with(on_host(2, 0, 1))}, True, True),
    ],
    ids=[
        *("all", "all of those heard", "one missing", "one away", "one missing on one heard"),
        *("of as many ranks as nobody says", "of fewer ranks than now", "of as many ranks on other hosts"),
        *("one perhaps on another host then", "two worlds"),
    ],
)
def test_a_checkpoint_is_complete_when_all_ranks_have_finished_it(
    answered: dict[str, Listing], all_heard: bool, complete: bool | None
) -> None:
    (found,) = pull.checkpoints(answered, all_heard)
    assert found.complete is complete


def test_a_host_tells_how_many_ranks_a_run_has_on_all_hosts() -> None:
    with heard_of(saved("2", world=3)) as heard:
        told = heard.listings["localhost"]
    assert (told.ranks, told.world) == ((0, 1, 2), 3)


def test_the_newest_model_is_pulled_though_the_hosts_that_answer_had_other_ranks_when_it_was_saved() -> None:
    first, second = on_host(4, 0, world=3, steps=10), on_host(8, 0, world=2, steps=15)
    answered = {
        "a": host_with(first, ranks=(0,), world=3),
        "b": host_with(on_host(4, 1, world=3, steps=10), second, ranks=(1,), world=3),
    }
    found = pull.checkpoints(answered, all_heard=False)
    assert [(of.step, of.world, of.complete) for of in found] == [(4, 3, None), (8, 2, None)]
    assert [of.step for of in pull.candidates(found, None)] == [8, 4]


def test_of_two_models_of_one_step_the_one_is_pulled_of_which_more_is_there() -> None:
    def with_model(step: StepOnHost, sha256: str) -> StepOnHost:
        file = FileAbout(3, sha256)
        parts = [
            replace(part, model=sha256, files={**part.files, "model.pt": file}) for part in step.manifests
        ]
        return replace(step, manifests=tuple(parts))

    unfinished, whole = "a" * 64, "b" * 64
    answered = {"a": host_with(with_model(on_host(2, 0), unfinished))}
    answered |= {name: host_with(with_model(on_host(2, rank), whole)) for rank, name in enumerate("bc")}
    (found,) = pull.checkpoints(answered, all_heard=True)
    assert found.complete is True
    assert {copy.sha256 for copy in found.models} == {whole}


def without(step: StepOnHost, *names: str) -> StepOnHost:
    """That host's step once these files have gone."""
    return replace(step, files={name: size for name, size in step.files.items() if name not in names})


@pytest.mark.parametrize(
    ("answered", "all_heard", "complete"),
    [
        ({"a": host_with(without(on_host(2, 0, world=1), "rank-0.pt"))}, True, False),
        ({"a": host_with(without(on_host(2, 0, 1), "rank-1.pt"))}, False, False),
        ({"a": host_with(without(on_host(2, 0, 1), "model.pt"))}, True, False),
        ({"a": host_with(without(on_host(2, 0), "model.pt")), "b": host_with(on_host(2, 1))}, True, True),
        ({"a": host_with(without(on_host(2, 0, 1), "rank-0.pt")), "b": host_with(on_host(2, 0))}, True, True),
    ],
    ids=["its only part", "a part", "its only model", "one of two models", "one of two of the same part"],
)
def test_a_checkpoint_of_which_something_has_gone_is_complete_only_if_it_is_there_once_more(
    answered: dict[str, Listing], all_heard: bool, complete: bool
) -> None:
    (found,) = pull.checkpoints(answered, all_heard)
    assert found.problems
    assert found.complete is complete
    assert pull.candidates([found], None) == [found], "all ranks had finished it, so its model is worth a try"


def with_left_over(step: StepOnHost, rank: int) -> StepOnHost:
    """That host's step with the part of a rank whose save was interrupted before its manifest."""
    return replace(step, files={**step.files, f"rank-{rank}.pt": 3})


def test_what_an_interrupted_save_has_left_says_nothing_of_the_one_that_was_finished_since() -> None:
    first, second = with_left_over(on_host(4, 0, world=3), 2), on_host(4, 1, world=3)
    near = {"a": host_with(on_host(2, 0, world=3), first), "b": host_with(second)}
    _, newest = away = pull.checkpoints(near, all_heard=False)
    assert (newest.finished, newest.complete) == (None, None), (
        "rank 2 may have finished on the host that is away"
    )
    assert pull.candidates(away, None)[0] is newest
    assert newest.problems == ("a: rank 2: it was not finished",)
    newest = pull.checkpoints({**near, "c": host_with(on_host(4, 2, world=3))}, all_heard=True)[-1]
    assert (newest.finished, newest.complete, newest.problems) == (True, True, ())
    assert pull.checkpoints(near, all_heard=True)[-1].finished is False


def test_a_model_is_pulled_though_a_part_beside_it_has_gone_and_that_is_said(tmp_path: Path) -> None:
    run = saved("2,4")
    (step_folder(run, 4) / "rank-1.pt").unlink()
    table = ringctl("checkpoints", run).stdout.splitlines()
    assert table[2].split()[2:6] == ["no", "0", "of", "2"]
    assert table[3] == "step 4: localhost: rank 1: rank-1.pt is not there"
    done = ringctl("pull", run, str(tmp_path / "four"))
    assert "the checkpoint of step 4 is not complete; its model is" in done.stderr
    assert (tmp_path / "four" / "model.pt").read_bytes() == model_of(4)


def test_the_newest_is_the_one_that_is_furthest_also_if_the_number_of_ranks_has_changed() -> None:
    four = on_host(90, 0, 1, 2, 3, world=4, steps=100)
    two = on_host(60, 0, 1, world=2, steps=200)
    later = on_host(120, 0, 1, world=2, steps=200)
    known = pull.checkpoints({"a": host_with(four, two, later, on_host(195, 0, steps=200))}, True)
    assert [of.step for of in pull.candidates(known, None)] == [90, 120, 60]
    assert [of.step for of in pull.candidates(known, 195)] == [195], "asked for, it is taken as it is"


def test_of_two_with_the_number_of_a_step_the_one_that_is_furthest_is_the_newest() -> None:
    alone, grown = on_host(400, 0, world=1, steps=45_000), on_host(400, 0, steps=22_500, turn=1)
    known = pull.checkpoints(
        {"a": host_with(alone, grown), "b": host_with(on_host(400, 1, steps=22_500, turn=1))}, True
    )
    assert [(of.folder, of.world, of.complete) for of in known] == [
        ("step-00000400", 1, True),
        ("step-00000400.1", 2, True),
    ]
    for step in (None, 400):
        assert [of.turn for of in pull.candidates(known, step)] == [1, 0]


def test_of_two_with_the_number_of_a_step_one_that_was_finished_is_taken_before_a_later_one() -> None:
    whole, begun = on_host(4, 0, 1), on_host(4, 0, turn=1)
    known = pull.checkpoints({"a": host_with(whole, begun)}, True)
    assert [of.turn for of in pull.candidates(known, 4)] == [0, 1]


def test_a_model_comes_out_of_the_folder_of_a_later_turn(tmp_path: Path) -> None:
    run = saved("2,4", world=1)
    step_folder(run, 4).rename(step_folder(run, 2).with_name("step-00000002.1"))
    manifest = step_folder(run, 2).with_name("step-00000002.1") / "rank-0.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"step": 2}))
    folders = [(of["step"], of["folder"], of["complete"]) for of in listed(run)["checkpoints"]]
    assert folders == [(2, "step-00000002", True), (2, "step-00000002.1", True)]
    ringctl("pull", run, str(tmp_path / "new"))
    assert (tmp_path / "new" / "model.pt").read_bytes() == model_of(4)


def test_a_world_that_a_host_only_claims_is_not_counted_through() -> None:
    steps = [on_host(step, 0, world=999_999) for step in range(2000)]
    for all_heard, complete in ((True, False), (False, None)):
        found = pull.checkpoints({"h": host_with(*steps, ranks=(0,))}, all_heard)
        assert {of.complete for of in found} == {complete}


def test_steps_without_end_are_put_together_as_soon_as_few() -> None:
    steps = [on_host(step, 0, 1) for step in range(30_000)]
    ranks = tuple(range(2))
    assert len(pull.checkpoints({"h": host_with(*steps, ranks=ranks)}, True)) == 30_000


def test_damage_that_can_be_seen_is_told(tmp_path: Path) -> None:
    run = saved("2,4")
    (step_folder(run, 4) / "rank-0.pt").write_bytes(b"")
    (step_folder(run, 4) / "rank-1.json").write_text("{")
    (step_folder(run, 2) / "rank-1.json").unlink()
    two, four = listed(run)["checkpoints"]
    assert (two["complete"], four["complete"]) == (False, False)
    assert two["problems"] == ["localhost: rank 1: it was not finished"]
    assert four["problems"] == [
        "localhost: rank 0: rank-0.pt has 0 bytes of 3",
        "localhost: rank 1: rank-1.json is damaged",
    ]
    for name, *step in (("new",), ("four", "--step", "4")):
        done = ringctl("pull", run, str(tmp_path / name), *step)
        assert "the checkpoint of step 4 is not complete; its model is" in done.stderr
        assert (tmp_path / name / "model.pt").read_bytes() == model_of(4)
    for four_or_two in (2, 4):
        (step_folder(run, four_or_two) / "rank-0.json").unlink()
    done = ringctl("pull", run, str(tmp_path / "none"))
    assert "no checkpoint is complete (step 2, 4): no model is pulled" in done.stderr


def test_a_number_in_a_manifest_that_is_none_is_damage(tmp_path: Path) -> None:
    file = {"bytes": 3, "sha256": "0" * 64}
    about = {"version": 1, "step": 2, "epoch": 1, "rank": 0, "run": {}, "files": {"model.pt": file}}
    path = tmp_path / "rank-0.json"
    for number, is_read in ((3, True), (float("inf"), False), (float("nan"), False)):
        file["bytes"] = number
        path.write_text(json.dumps(about))
        assert (hostfiles.manifest_in(str(path), 2, 0) is not None) is is_read


def test_a_rank_has_the_metrics_that_its_own_host_has_of_it() -> None:
    first, second = pull.MetricsFile(0, 1, 3), pull.MetricsFile(0, 2, 3)
    claimed = {name: replace(host_with(), metrics=(first, second)) for name in ("a", "b")}
    assert pull.metrics_of(claimed, lambda _: {0: "b"}) == {"b": [first, second]}
    assert pull.metrics_of(claimed, lambda _: None) == {"a": [first, second]}
    moved = {1: {0: "a"}, 2: {0: "b"}}
    assert pull.metrics_of(claimed, moved.get) == {"a": [first], "b": [second]}


# --- Over SSH ------------------------------------------------------------------------------------


def on_servers(cluster: Hosts, steps: str, model_bytes: int = 4000) -> str:
    """A run on two servers that is over."""
    inventory(cluster, only=("server1", "server2"))
    done = ringctl("launch", "--skip-preflight", "--json", "--", *saving(steps, model_bytes))
    return str(json.loads(done.stdout.splitlines()[-1])["run"])


def model_on(cluster: Hosts, host: str, run: str, step: int) -> Path:
    return cluster.path(host, f"{OURS}/runs/{run}/checkpoints/step-{step:08d}/model.pt")


def test_a_damaged_copy_or_a_host_that_is_away_gives_way_to_the_next_host_that_has_it(
    cluster: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = on_servers(cluster, "2,4")
    with heard_of(run) as heard, (to := PullFolder(tmp_path / "cut")).open():
        cluster.reset_port("server1", 22)
        model = pulling.bring_model(heard, to, None)
    assert model is not None
    assert (model[0].step, model[1].host, heard.code) == (4, "server2", 4)
    cluster.clear_rules("server1")

    (folder := tmp_path / "elsewhere").mkdir()
    become_controller(cluster, folder, monkeypatch)  # one that has not started it
    monkeypatch.setenv("RINGCTL_HOME", str(folder / "ringctl"))
    inventory(cluster, only=("server1", "server2"))
    damage(model_on(cluster, "server1", run, 4))
    done = ringctl("pull", run)
    assert "step 4: server1: model.pt has not the checksum" in done.stderr
    assert "server2 has it too, and is asked" in done.stderr
    assert Path(run, "model.pt").read_bytes() == model_of(4)
    assert (about(Path(run))["step"], about(Path(run))["host"]) == (4, "server2")

    cluster.reset_port("server1", 22)
    done = ringctl("pull", run, "rest", code=4)
    assert "error: server1: connection refused" in done.stderr
    assert "its part is missing" in done.stderr
    assert Path("rest", "model.pt").read_bytes() == model_of(4)
    assert sorted(files_in(Path("rest", "metrics"))) == ["rank-1-attempt-1.jsonl"]
    assert sorted(files_in(Path("rest", "logs"))) == ["events.jsonl", "rank1.out.log"]
    told = listed(run, code=4)
    assert [checkpoint["complete"] for checkpoint in told["checkpoints"]] == [None, None]
    assert list(told["errors"]) == ["server1"]

    cluster.reset_port("server2", 22)
    ringctl("pull", run, "nothing", code=4)
    assert not Path("nothing").exists()


def test_an_interrupted_pull_leaves_nothing_half_and_the_next_one_goes_on(cluster: Hosts) -> None:
    size = 4_000_000
    run = on_servers(cluster, "2", size)
    model_on(cluster, "server2", run, 2).unlink()
    cluster.limit_rate("server1", "8mbit")
    try:
        process = start("pull", run, "new")
        wait_for(
            lambda: any(part.stat().st_size for part in Path("new/pull.part").glob("model-*.part")),
            "the first bytes",
        )
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        cluster.limit_rate("server1", None)
    assert process.returncode == 130, said
    assert "the same command goes on from there" in said
    assert "Traceback" not in said
    assert os.listdir("new") == ["pull.part"]
    damage(model_on(cluster, "server1", run, 2))  # where it begins, which has come
    ringctl("pull", run, "new")
    assert Path("new/model.pt").read_bytes() == model_of(2, size)
    assert sorted(os.listdir("new")) == ["checkpoint.json", "logs", "metrics", "model.pt"]


# --- Hosts that mean no good ---------------------------------------------------------------------

# Takes the place of hostfiles.py. It knows the run's model, and sends it as MANNERS says.
HOSTILE = r"""
import sys, time
SENTINEL, MODEL = b"--ringctl-hostd--\n", {model!r}
def say(data):
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
def main():
    sys.stdin.buffer.readline()
    {manners}
"""
LENGTH = r"""say(SENTINEL + b'{"bytes": %d}\n' % len(MODEL))"""
MORE = LENGTH + "; say(MODEL + b'more' * 1000000)"
ANNOUNCED = r"""say(SENTINEL + b'{"bytes": 1000000000000000000}\n' + MODEL)"""
NOTHING = LENGTH + "; sys.stdin.read()"
DROPS = LENGTH + "\n    for byte in MODEL: say(bytes([byte])); time.sleep(0.1)"
NAMES = r"""say(SENTINEL + b'{"bytes": "../../x"}\n')"""
ENDLESS = r"""
    say(SENTINEL + b'{"kind":"cursor","time":1,"attempt":1,"segment":1,"offset":0}\n')
    while True:
        say(b'{"kind":"line","time":1,"rank":0,"stream":"out","text":"x"}\n' * 100)
"""


@pytest.fixture
def hostile(cluster: Hosts) -> Iterator[Any]:
    """Call it to have server1 answer so; in this process, where nobody waits for a minute."""
    with hosts.agents() as agents:

        def behave(manners: str, model: bytes = b"", file: str = "hostfiles.py") -> Agent:
            path = cluster.path("server1", f"{OURS}/kit/{Path(kit.folder()).name}/launcher/{file}")
            assert path.exists()
            text = HOSTILE.format(manners=manners, model=model)
            # A shorter one would be put there again, and one as long be taken for what Python has compiled.
            path.write_text(text.ljust(path.stat().st_size + 1))
            return agents["server1"]

        yield behave
    shutil.rmtree(cluster.path("server1", f"{OURS}/kit"))


def test_a_host_cannot_send_more_than_it_should_nor_keep_us_waiting(
    hostile: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, part = model_of(2, 200), tmp_path / "model.part"
    copy = pull.Copy("server1", len(model), hashlib.sha256(model).hexdigest())
    monkeypatch.setattr(fetch, "QUIET_S", 0.5)
    fetch.take_model(hostile(MORE, model), "a-run", "step-00000002", copy, part)
    assert part.read_bytes() == model
    part.unlink()
    for manners, kind, words in (
        (ANNOUNCED, fetch.Damaged, "has 1,000,000,000,000,000,000 bytes of 200"),
        (NOTHING, HostError, "it sent no more than 0 bytes"),
        (DROPS, HostError, "it sent no more than"),
        (NAMES, HostError, "it does not say how long"),
    ):
        with pytest.raises(kind, match=words):
            fetch.take_model(hostile(manners, model), "a-run", "step-00000002", copy, part)
    assert 0 < len(part.read_bytes()) < len(model), "what dropped in stays, to go on from"
    huge = replace(copy, bytes=10**18)
    with pytest.raises(fetch.NotHere, match="are needed there"):
        fetch.take_model(hostile(ANNOUNCED, model), "a-run", "step-00000002", huge, tmp_path / "huge")
    file = pull.MetricsFile(0, 1, 3)
    with pytest.raises(HostError, match="is longer than it said"):
        fetch.take_metrics(hostile(ANNOUNCED, model), "a-run", [file], tmp_path, False)
    assert sorted(path.name for path in tmp_path.glob("*.part")) == ["model.part"]


def test_only_the_time_spent_waiting_for_a_host_counts_against_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "QUIET_S", 2.5)
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    pace = fetch.Pace("a")

    def wait(seconds: float, number: int) -> None:
        pace.left()
        clock[0] += seconds
        pace.came(number)

    wait(3600.0, 1)  # stopped by Ctrl-Z: a second of it at most was waiting
    clock[0] += 3600.0  # ours, between two pieces
    wait(1.0, fetch.LEAST_BYTES)  # enough has come: it begins anew
    wait(1.0, 1)
    wait(1.0, 1)
    wait(1.0, 1)
    with pytest.raises(HostError, match="no more than 3 bytes"):
        pace.left()


def test_of_a_host_that_broke_off_while_it_sent_its_log_nothing_is_kept(tmp_path: Path) -> None:
    to = PullFolder(tmp_path)
    with to.open():
        for rank in (0, 1, 11):
            (to.logs / f"rank{rank}.out.log").write_text("x")
        told = [("a", 0), ("b", 1), ("a", 11), ("a", None)]
        lines = [json.dumps({"host": host, "rank": rank}) + "\n" for host, rank in told]
        (to.logs / "events.jsonl").write_text("".join(lines))
        to.drop_logs({"a"})
        assert sorted(path.name for path in to.logs.iterdir()) == ["events.jsonl", "rank1.out.log"]
        assert (to.logs / "events.jsonl").read_text() == lines[1]


def test_of_a_host_whose_supervisor_is_gone_comes_all_that_there_is(tmp_path: Path) -> None:
    run = detach(["sh", "-c", "echo said; sleep 600"], world=1)
    wait_for(lambda: lines(events(run), 0), "what it says")
    about = state(run)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for who in ("warden", "hostd"):
            os.kill(about[who]["pid"], number)
    wait_for(lambda: not is_alive(about["ranks"][0]["pid"]), "the end of its rank")
    for args in (("pull", run, str(tmp_path / "new")), ("logs", run, "--download", str(tmp_path / "dir"))):
        done = ringctl(*args, code=4)
        assert (
            "its supervisor is gone, and has not said how its ranks ended; its log is as far as"
            in done.stderr
        )
    for folder in (tmp_path / "new" / "logs", tmp_path / "dir" / run):
        assert (folder / "rank0.out.log").read_text() == "said\n"
    ringctl("stop", run)


def test_events_of_a_host_that_is_away_stay_where_an_earlier_pull_has_put_them(tmp_path: Path) -> None:
    def said(time: float, host: str, text: str, run: str = "r") -> str:
        return json.dumps({"time": time, "run": run, "host": host, "text": text}) + "\n"

    to, events = PullFolder(tmp_path), tmp_path / "logs" / "events.jsonl"
    events.parent.mkdir()
    theirs = [said(2.0, "b", "two"), said(4.0, "b", "four")]
    mine = [said(1.0, "a", "one"), said(3.0, "a", "three"), said(5.0, "a", "five")]
    of_another = said(1.0, "b", "one", run="another")
    events.write_text(of_another + mine[0] + theirs[0] + "no event\n" + mine[1] + theirs[1])
    with to.open():
        (to.logs / "events.jsonl").write_text("".join(mine))
        to.place_rest(whole_logs=False)
        assert events.read_text() == "".join((mine[0], theirs[0], mine[1], theirs[1], mine[2]))
        (to.logs / "events.jsonl").write_text("".join(mine))
        to.place_rest(whole_logs=True)
        assert events.read_text() == "".join(mine)


def test_a_host_that_claims_more_than_this_disk_holds_gives_way_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def take(_: Any, to: PullFolder, __: Any, copy: pull.Copy) -> None:
        fetch.need_room(to.folder, copy.bytes)

    monkeypatch.setattr(pulling, "take", take)
    missed: dict[str, RingctlError] = {}
    heard: Any = SimpleNamespace(miss=missed.__setitem__, away=missed)
    copies = (pull.Copy("liar", 10**18, "0"), pull.Copy("honest", 1, "0"))
    chosen = pulling.first_whole(heard, PullFolder(tmp_path), SimpleNamespace(step=4, models=copies))  # type: ignore[arg-type]  # all that is asked of a checkpoint
    assert chosen == copies[1]
    assert "are needed there" in missed["liar"].message
    assert "honest has it too, and is asked" in capsys.readouterr().err
    older = SimpleNamespace(step=2, models=(pull.Copy("liar", 1, "0"),))
    assert pulling.first_whole(heard, PullFolder(tmp_path), older) is None, "it is not asked again"  # type: ignore[arg-type]  # as above


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a disk")
def test_a_disk_without_room_is_named_and_nothing_is_said_to_be_there_that_is_not(tmp_path: Path) -> None:
    run = detach(["sh", "-c", '"$@"; seq 1 5000', "sh", *saving("2", 20_000)], world=1)
    wait_until_final(run)

    disk, target = tmp_path / "disk", str(tmp_path / "disk" / "results")
    disk.mkdir()

    def on_a_disk_of(size: str, *args: str) -> tuple[str, str, set[str]]:
        """What ringctl says, and the names of the files that are left."""
        find = f"find {disk} -type f -printf '%f\\n' >{tmp_path}/left"
        script = f'mount -t tmpfs -o size={size} tmpfs {disk} && "$@"; code=$?; {find}; exit $code'
        command = ["unshare", "-m", "sh", "-c", script, "sh", *RINGCTL, *args]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 1, done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout, done.stderr, set((tmp_path / "left").read_text().split())

    out, said, left = on_a_disk_of("16k", "pull", run, target)
    assert f"error: {target}: there is no room for run {run}" in said
    assert (out, left) == ("", set())
    out, said, left = on_a_disk_of("64k", "pull", run, target)
    assert f"error: {target}: there is no room for all of run {run}; what has come is there" in said
    assert f"run {run} is in" not in out
    assert {"model.pt", "checkpoint.json"} <= left
    out, said, left = on_a_disk_of("64k", "logs", run, "--download", target)
    assert said == f"error: {target}/{run}: No space left on device\n"
    assert (out, left) == ("", set())


def test_a_disk_without_room_is_no_host_that_is_away(tmp_path: Path) -> None:
    its = tuple(Host(name, "10.0.0.1") for name in ("a", "b"))
    agents: Any = dict.fromkeys(("a", "b"))
    heard = pulling.Heard(runs.Found("r", "", its, 1.0), agents)
    with pytest.raises(fetch.NoRoom) as caught:
        fetch.need_room(tmp_path, 10**18)
    heard.miss("a", caught.value)
    assert (heard.code, heard.near) == (1, ["b"])
    heard.miss("b", HostError("b", "the connection was lost"))
    assert heard.code == 4


def test_a_host_that_tells_of_more_checkpoints_or_metrics_than_any_has_makes_no_sense() -> None:
    step = {"step": 1, "written": 1.0, "files": {}, "manifests": [], "unread": [], "turn": 0}
    file = {"rank": 0, "attempt": 1, "bytes": 1}
    told: dict[str, Any] = {"steps": [], "ranks": [], "metrics": [], "events": 0, "checkpoint_dir": ""}
    assert pull.listing("a", {**told, "steps": [step] * 64, "metrics": [file]})
    for more in ({"steps": [step] * 65}, {"metrics": [file] * (pull.MOST_METRICS + 1)}):
        with pytest.raises(HostError, match="makes no sense"):
            pull.listing("a", {**told, **more})


def test_a_log_without_an_end_is_given_up(hostile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "GROWTH", 100_000)
    bounded = fetch.Bounded(hostile(ENDLESS, file="hostd.py"), 0)
    *_, last = follow({"server1": bounded}, "a-run", live=False)
    assert last.away == {"server1": "server1: its log is longer than it said"}
