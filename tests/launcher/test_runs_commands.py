"""`ringctl runs`: what was run is listed, compared, written into files, and forgotten when it is old."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher import codestore, compare, history, listing, pruning, queued, tape, watching
from launcher.model import Event, Host, HostPlan, Inventory, Plan, RankSpec, RankState, RunState
from launcher.plan import LaunchOptions
from launcher.recorder import Recorder
from tests.launcher.hosts import Terminal
from tests.launcher.ringctl import RINGCTL, detach, events, launch, ringctl, wait_for, wait_until_final

DAY = 86400.0
HOST = Host("a", "10.0.0.1")
METRICS = 'echo "{\\"step\\": 5, \\"steps\\": 9, \\"loss\\": 0.125, \\"accuracy\\": 0.5}" >>$RINGCTL_METRICS'


def remember(
    run: str,
    *,
    days: float = 0.0,
    command: tuple[str, ...] = ("true",),
    state: str = "succeeded",
    metric: Mapping[str, Any] | None = None,
    variables: Mapping[str, str] | None = None,
    name: str = "",
) -> None:
    """A run that ended so many days ago; "" for one that goes on."""
    ended = time.time() - days * DAY
    rank = RankSpec(0, 0, command, {"OMP_NUM_THREADS": "2", "API_TOKEN": "hunter2"})
    plan = Plan(run, name, 1, 1, "10.0.0.1", 1, command, (HostPlan("a", "/w", None, False, (rank,)),))
    ranks = {0: RankState(0, "a", "succeeded", metric=metric or {})}
    end = RunState(run, name, 1, 1, state, ranks, ended - 60, ended) if state else None  # type: ignore[arg-type]  # any
    options = LaunchOptions(run, name, command, "/t", variables=variables or {})
    history.write(history.Record(plan, (HOST,), ended - 60, Inventory((HOST,), "a"), options, end))


def listed(*options: str) -> list[Any]:
    found: list[Any] = json.loads(ringctl("runs", "list", "--json", *options).stdout)
    return found


def names() -> list[str]:
    return [row["run"] for row in listing.rows()]


def with_a_log(run: str, lines: int = 1000) -> None:
    said = [
        Event("line", 1.0, run, 1, "a", 0, {"stream": "out", "text": os.urandom(400).hex()})
        for _ in range(lines)
    ]
    record = history.read(run)
    assert record is not None
    assert record.end is not None
    with tape.Tape(run) as book:
        book.append(said, 1, {}, record.end)


# --- list ----------------------------------------------------------------------------------------


def test_where_nothing_ran_it_says_how_to_start() -> None:
    assert "ringctl launch" in ringctl("runs", "list").stdout
    assert listed() == []
    assert not history.home().exists()


def test_the_list_tells_what_came_of_real_runs() -> None:
    good = launch(["sh", "-c", METRICS], options=["--name", "mine"])[-1]["run"]
    bad = launch(["sh", "-c", "echo OSError: [Errno 28] No space left on device >&2; exit 3"], code=1)[-1][
        "run"
    ]
    going = detach(["sleep", "600"], world=1)
    rows = {row["run"]: row for row in listed()}
    assert list(rows) == [going, bad, good]
    assert {run: row["state"] for run, row in rows.items()} == {
        good: "succeeded",
        bad: "failed",
        going: "running",
    }
    assert (rows[good]["step"], rows[good]["loss"], rows[good]["accuracy"]) == (5, 0.125, 0.5)
    assert (rows[good]["name"], rows[good]["world"], rows[good]["hosts"]) == ("mine", 2, ["localhost"])
    assert "exited with code 3" in rows[bad]["error"]
    assert rows[going]["ended"] is None
    table = ringctl("runs", "list").stdout
    assert table.splitlines()[0].split()[:3] == ["RUN", "NAME", "STATE"]
    ringctl("stop", going)
    assert listed("--state", "stopped")[0]["run"] == going


def test_the_list_is_chosen_from_by_state_words_and_number() -> None:
    for number in range(6):
        remember(f"run-{number}", name=f"name{number % 2}", state="failed" if number % 3 else "succeeded")
    assert [row["run"] for row in listed("--limit", "2")] == ["run-5", "run-4"]
    assert "--limit" in ringctl("runs", "list", "--limit", "9" * 20, code=2).stderr
    assert [row["run"] for row in listed("--state", "succeeded")] == ["run-3", "run-0"]
    assert [row["run"] for row in listed("--state", "failed,stopped", "--search", "NAME1")] == [
        "run-5",
        "run-1",
    ]
    assert listing.rows(2, before="run-4")[0]["run"] == "run-3"
    assert listing.rows(search="%' OR 1") == []
    assert listing.count_states() == {"failed": 4, "succeeded": 2}
    assert "--state asleep: not a state" in ringctl("runs", "list", "--state", "asleep", code=2).stderr


def test_the_time_that_is_left_follows_the_pace() -> None:
    told = {"step": 30, "steps": 100, "at": 120.0, "since": [1, 100.0, 10]}
    assert listing.left_s(told, 1, 120.0) == 70.0
    assert listing.left_s(told, 1, 150.0) == 40.0
    assert listing.left_s(told, 2, 120.0) is None, "of an attempt before"
    assert listing.left_s({"step": 3}, 1, 120.0) is None


def test_all_that_is_known_of_a_run_holds_no_secret() -> None:
    remember("one", variables={"HF_TOKEN": "hunter2", "LR": "1"}, command=("python", "a.py", "--lr", "3"))
    told = listing.detail("one")
    assert told is not None
    assert "hunter2" not in json.dumps(told)
    assert (told["options"]["--lr"], told["options"]["env LR"], told["options"]["env HF_TOKEN"]) == (
        "3",
        "1",
        "***",
    )
    assert [rank["host"] for rank in told["ranks"]] == ["a"]
    assert told["environment"]["a"]["threads"] == "2"
    assert [attempt["state"] for attempt in told["attempts"]] == ["succeeded"]
    assert listing.detail("another") is None
    history.enlist("queued", world=2)
    waiting = listing.detail("queued")
    assert waiting is not None
    assert (waiting["state"], waiting["plan"], waiting["ranks"]) == ("queued", None, [])


# --- diff ----------------------------------------------------------------------------------------


def test_the_difference_of_two_runs_is_what_was_asked_and_what_came_of_it() -> None:
    remember("one", command=("--lr", "0.1", "--epochs", "2"), metric={"loss": 0.5, "accuracy": 0.9})
    remember("two", command=("--lr=0.2", "--epochs", "2.0", "--fast"), metric={"loss": 0.25, "accuracy": 0.9})
    told = json.loads(ringctl("runs", "diff", "one", "two", "--json").stdout)
    assert [row["run"] for row in told["runs"]] == ["one", "two"]
    assert {e["key"]: e["values"] for e in told["options"] if e["differs"]} == {
        "--lr": ["0.1", "0.2"],
        "--fast": [None, True],
    }
    assert {e["key"]: e["values"] for e in told["results"] if e["differs"]} == {"loss": [0.5, 0.25]}
    shown = ringctl("runs", "diff", "one", "two").stdout
    assert "--lr" in shown
    assert "--epochs" not in shown
    assert "--epochs" in ringctl("runs", "diff", "one", "two", "--all").stdout
    assert "there is no run 'three'" in ringctl("runs", "diff", "one", "three", code=2).stderr
    assert "name two runs" in ringctl("runs", "diff", "one", code=2).stderr


@pytest.mark.parametrize(
    ("command", "found"),
    [
        (["--lr", "-0.5", "-v", "--", "x"], {"--lr": "-0.5", "-v": True, "--": "x"}),
        (["python", "a.py", "in", "--k=v=w"], {"command": "python a.py in", "--k": "v=w"}),
        ([], {"command": "built-in ring trainer"}),
        (["--a", "1", "--a", "2"], {"--a": "2"}),
    ],
)
def test_options_are_read_from_a_command_line(command: list[str], found: dict[str, Any]) -> None:
    assert found.items() <= compare.words_of(command).items()


# --- export --------------------------------------------------------------------------------------


def test_an_export_holds_the_run_and_each_of_its_events() -> None:
    run = detach(["sh", "-c", "echo hello; exit 3"], world=1)
    wait_until_final(run)
    Recorder(run).record()
    remember("other")
    lines = [json.loads(line) for line in ringctl("runs", "export", run).stdout.splitlines()]
    about, *said = lines
    assert (about["kind"], about["run"], about["state"]) == ("run", run, "failed")
    assert "exited with code 3" in about["cause"]["text"]
    assert [event["id"] for event in said] == list(range(1, len(said) + 1))
    assert [event["kind"] for event in said] == [event["kind"] for event in events(run)]
    assert {event["run"] for event in said} == {run}
    assert ringctl("runs", "export", "--out", "all/").stdout == "2 runs in all/\n"
    try:
        assert sorted(path.name for path in Path("all").iterdir()) == sorted([f"{run}.jsonl", "other.jsonl"])
        assert "all is there already" in ringctl("runs", "export", "--out", "all/", code=2).stderr
        ringctl("runs", "export", "other", "--out", "all/more")
        assert json.loads(Path("all/more").read_text())["run"] == "other"
    finally:
        shutil.rmtree("all")


def test_in_an_export_a_record_with_a_number_of_its_own_keeps_it_beside_the_events() -> None:
    record = '{"step": 1, "id": "exp-7"}'
    run = detach(["sh", "-c", f"echo '{record}' >>$RINGCTL_METRICS"], world=1)
    wait_until_final(run)
    Recorder(run).record()
    _, *said = [json.loads(line) for line in ringctl("runs", "export", run).stdout.splitlines()]
    assert [event["id"] for event in said] == list(range(1, len(said) + 1))
    assert [event["data"] for event in said if event["kind"] == "metric"] == [json.loads(record)]


def test_a_file_of_an_export_is_whole_or_not_there(tmp_path: Path) -> None:
    remember("long")
    with_a_log("long", 30_000)
    place = tmp_path / "place"
    place.mkdir()
    out, folder = place / "long.jsonl", place / "all"
    full = f"ulimit -f 20000; {shlex.join(RINGCTL)} runs export long --out"
    for where in (str(out), f"{folder}/"):
        done = subprocess.run(["sh", "-c", f"{full} {where}"], capture_output=True, text=True)
        assert (done.returncode, "long.jsonl: cannot be written: File too large" in done.stderr) == (2, True)
        assert list(place.iterdir()) == []
    pipe = subprocess.PIPE
    with subprocess.Popen([*RINGCTL, "runs", "export", "long", "--out", str(out)], stderr=pipe) as killed:
        wait_for(lambda: any(path.stat().st_size for path in place.iterdir()), "its first lines")
        killed.kill()
    assert not out.exists()
    ringctl("runs", "export", "long", "--out", str(out), code=4)  # of which nobody has seen the end
    assert list(place.iterdir()) == [out]
    whole = out.read_text()
    assert len(whole.splitlines()) > 30_000
    assert "is there already" in ringctl("runs", "export", "long", "--out", str(out), code=2).stderr
    assert (list(place.iterdir()), out.read_text()) == ([out], whole)


# --- prune ---------------------------------------------------------------------------------------


@pytest.fixture
def four() -> None:
    for number, days in enumerate((90, 40, 10, 0)):
        remember(f"run-{number}", days=days)


@pytest.mark.usefixtures("four")
def test_old_runs_are_forgotten_and_others_are_not() -> None:
    assert "would forget run-0" in ringctl("runs", "prune", "--older-than", "30d", "--dry-run").stdout
    assert len(names()) == 4
    said = ringctl("runs", "prune", "--older-than", "30d", code=2).stderr
    assert "nobody to ask" in said
    assert len(names()) == 4
    ringctl("runs", "prune", "--older-than", "30d", "--keep", "3", "--yes")
    assert names() == ["run-3", "run-2", "run-1"]
    told = json.loads(ringctl("runs", "prune", "--keep", "1", "--yes", "--json").stdout)
    assert told["forgotten"] == ["run-1", "run-2"]
    assert names() == ["run-3"]
    assert "nothing to forget" in ringctl("runs", "prune", "--keep", "1", "--yes").stdout
    for options, words in (((), "say which"), (("--older-than", "soon"), "not an age")):
        assert words in ringctl("runs", "prune", *options, code=2).stderr


@pytest.mark.usefixtures("four")
def test_with_a_run_goes_what_was_checked_before_it() -> None:
    for run in ("run-0", "run-3", "nobody-knows"):
        history.note_preflight(run, {"ok": True, "checks": [], "pairs": []})
    checked = {run: bool(history.preflight_of(run)) for run in ("run-0", "run-3", "nobody-knows")}
    assert checked == {"run-0": True, "run-3": True, "nobody-knows": False}
    ringctl("runs", "prune", "--keep", "1", "--yes")
    assert history.preflight_of("run-0") is None
    assert history.preflight_of("run-3") is not None


def test_a_run_that_goes_on_or_may_is_never_forgotten() -> None:
    remember("going", days=90, state="")
    remember("lost", state="lost")
    remember("watched", days=90, state="failed")
    remember("recorded", days=90)
    remember("over", days=90)
    history.enlist("queued")
    with watching.alone("watched"), watching.lock("recorded", "recording"):
        ringctl("runs", "prune", "--keep", "0", "--yes")
    assert sorted(names()) == ["going", "lost", "queued", "recorded", "watched"]
    ringctl("runs", "prune", "--keep", "0", "--yes")
    assert sorted(names()) == ["going", "lost", "queued"]
    record = history.read("lost")
    assert record is not None
    assert record.end is not None
    old = time.time() - 2 * DAY
    history.write(replace(record, started=old, end=replace(record.end, ended=old)))
    ringctl("runs", "prune", "--keep", "0", "--yes")
    assert "lost" not in names()


def test_a_run_that_is_started_again_while_it_asks_is_not_forgotten() -> None:
    run = launch(["sh", "-c", "[ $RINGCTL_ATTEMPT = 2 ] && exec sleep 300; exit 3"], world=1, code=1)[-1][
        "run"
    ]
    remember("over")
    terminal = Terminal("runs", "prune", "--keep", "0")
    terminal.expect("Forget 2 runs?")
    ringctl("restart", run, "--detach")
    terminal.type("y\n")
    assert f"{run} stays: it was started again" in terminal.finish(0)
    assert names() == [run]
    assert "ended ranks 0" in ringctl("stop", run, "--grace", "0").stdout
    assert history.state_of(run) == "stopped"


def test_what_somebody_holds_or_has_begun_anew_meanwhile_stays() -> None:
    for run in ("held", "recorded", "anew", "over"):
        remember(run)
    chosen = pruning.chosen(None, 0, time.time())
    record = history.read("anew")
    assert record is not None
    assert record.end is not None
    plan, end = replace(record.plan, attempt=2), replace(record.end, attempt=2)
    history.write(replace(record, plan=plan, end=end))
    with watching.alone("held"), watching.lock("recorded", "recording"):
        assert pruning.forget(chosen) == ["over"]
        assert watching.is_watched("held")
    assert sorted(names()) == ["anew", "held", "recorded"]


def test_who_waited_for_a_lock_that_was_removed_holds_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    remember("over")
    real, opened = watching.opened, []

    def open_and_forget(path: Path) -> int:
        descriptor = real(path)
        opened.append(path)
        if len(opened) == 1:
            assert pruning.forget({"over": 1}) == ["over"]  # removes the file that was just opened
        return descriptor

    monkeypatch.setattr(watching, "opened", open_and_forget)
    with watching.lock("over") as got:
        assert got
        assert watching.is_watched("over")


def test_with_the_logs_goes_their_room_on_the_disk() -> None:
    remember("one")
    with_a_log("one")
    before = history.file().stat().st_size
    ringctl("runs", "prune", "--keep", "0", "--logs-only", "--yes")
    assert names() == ["one"]
    assert tape.lines("one").lines == []
    assert [attempt["state"] for attempt in tape.attempts("one")] == ["succeeded"]
    assert history.file().stat().st_size < before / 2
    assert "nothing to forget" in ringctl("runs", "prune", "--keep", "0", "--logs-only", "--yes").stdout


def test_the_numbers_of_a_log_go_on_after_it_was_forgotten() -> None:
    remember("one")
    with_a_log("one", lines=3)
    record = history.read("one")
    assert record is not None
    assert record.end is not None
    event = Event("line", 1.0, "one", 1, "a", 0, {"stream": "out", "text": "x"})
    with tape.Tape("one") as book:
        assert [book.append([event], 1, {}, record.end) for _ in range(2)] == [4, 5]
    ringctl("runs", "prune", "--keep", "0", "--logs-only", "--yes")
    assert (tape.first("one"), tape.last("one")) == (None, 0)
    with tape.Tape("one") as book:
        assert book.append([event], 1, {}, record.end) == 6
    assert (tape.first("one"), tape.last("one")) == (6, 6)
    assert [line[0] for line in tape.lines("one").lines] == [6]
    assert [number for number, _ in tape.events("one")] == [6]


def test_what_a_service_kept_of_a_run_goes_with_it() -> None:
    code = codestore.folder_of("a" * 64)
    for run in ("old", "new"):
        queued.add(run, "me", queued.Submission(("true",), code=code.name if run == "new" else ""))
        queued.work_folder(run).mkdir()
        (queued.work_folder(run) / "mine.py").write_text("1")
        queued.conclude(run, "queued", "failed", "no")
    for folder in (code, codestore.folder_of("b" * 64)):
        folder.mkdir(parents=True)
        os.utime(folder, (0, 0))
    assert pruning.forget({"old": 1}) == ["old"]
    assert not queued.folder("old").exists()
    assert queued.work_folder("new").is_dir()
    assert [path.name for path in codestore.store().iterdir()] == [code.name]


def test_what_was_left_when_a_prune_or_an_upload_was_killed_goes_with_the_next_one() -> None:
    queued.add("known", "me", queued.Submission(("true",), secrets={"KEY": "a"}))
    for run in ("left", "coming", "starts"):
        queued.write_secrets(run, {"KEY": "to be removed"})
    queued.work_folder("left").mkdir()
    (queued.work_folder("left") / "result").touch()
    for name in (".coming-old", ".coming-new"):
        (codestore.store() / name / "deep").mkdir(parents=True)
    for path in (queued.folder("known"), queued.folder("left"), codestore.store() / ".coming-old"):
        os.utime(path, (0, 0))
    with queued.lock("starts"):
        os.utime(queued.folder("starts"), (0, 0))
        pruning.forget({})
    secrets = {path.parent.name for path in queued.folder("x").parent.glob("*/secrets.env")}
    assert secrets == {"known", "coming", "starts"}
    assert (queued.work_folder("left") / "result").exists(), "its ranks may have written that"
    assert [path.name for path in codestore.store().iterdir()] == [".coming-new"]
