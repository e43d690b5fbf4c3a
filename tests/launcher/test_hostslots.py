"""Who has which slots of a host: a record for each run, in a folder that belongs to everybody."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher import hostslots, watching
from launcher.hostproc import identity, start_time
from tests.launcher.ringctl import detach, launch, ringctl, run_folder, state, wait_for, wait_until_final

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
ME = os.getuid()
BOB = 23007


def folder() -> Path:
    return Path(os.environ["RINGCTL_SLOTS"])


def record(run: str, uid: int = ME, **changes: Any) -> Path:
    """A record as hostd writes it, of this very process, with changes."""
    who = identity(os.getpid())
    told = {
        "run": run, "user": "x", "attempt": 1, "slots": 2, "world": 4, "shared": False,
        "pid": who["pid"], "start_time": who["start"], "boot_id": who["boot"], **changes,
    }  # fmt: skip
    return entry(f"{uid}-{run}.json", json.dumps(told).encode())


def entry(name: str, data: bytes) -> Path:
    folder().mkdir(exist_ok=True)
    folder().chmod(0o1777)
    path = folder() / name
    path.write_bytes(data)
    return path


def told() -> list[dict[str, Any]]:
    runs, problem = hostslots.taken()
    assert problem == ""
    return runs


# --- A run's own record --------------------------------------------------------------------------


def test_a_run_has_its_slots_as_long_as_it_runs_and_none_afterwards() -> None:
    assert told() == []
    run = detach(["sleep", "600"], world=2)
    (mine,) = told()
    user = mine.pop("user")
    assert user == hostslots.user_name(ME)
    assert mine == {"run": run, "attempt": 1, "slots": 2, "world": 2, "shared": False}
    assert stat.S_IMODE(folder().stat().st_mode) == 0o1777
    (path,) = folder().iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    ringctl("stop", run)
    assert list(folder().iterdir()) == []


def test_a_run_that_shares_its_slots_says_so() -> None:
    run = detach(["sleep", "600"], world=1, options=["--shared"])
    assert [each["shared"] for each in told()] == [True]
    ringctl("stop", run)


def test_a_run_that_fails_or_cannot_start_gives_its_slots_back() -> None:
    launch(["sh", "-c", "exit 3"], world=1, code=1)
    launch(["no-such-program"], world=1, code=None)
    assert list(folder().iterdir()) == []


def test_when_the_supervisor_is_killed_its_warden_gives_the_slots_back() -> None:
    run = detach(["sleep", "600"], world=1)
    os.kill(state(run)["hostd"]["pid"], signal.SIGKILL)
    wait_until_final(run)
    assert list(folder().iterdir()) == []


def test_what_is_left_when_all_is_killed_counts_for_nothing_and_goes_with_the_next_start() -> None:
    run = detach(["sleep", "600"], world=1)
    warden, hostd = state(run)["warden"]["pid"], state(run)["hostd"]["pid"]
    os.kill(hostd, signal.SIGSTOP)  # so that it does not clear up when its warden is gone
    os.kill(warden, signal.SIGKILL)
    os.kill(hostd, signal.SIGKILL)
    wait_for(lambda: told() == [], "the record to count for nothing")
    assert [path.name for path in folder().iterdir()] == [f"{ME}-{run}.json"]
    ringctl("stop", run)
    launch(["true"], world=1)
    assert list(folder().iterdir()) == []


def test_a_record_holds_no_command_and_no_variable() -> None:
    run = detach(["sh", "-c", "sleep 600 # hunter2"], world=1, options=["--env", "TOKEN=hunter2"])
    (path,) = folder().iterdir()
    names = ["attempt", "boot_id", "pid", "run", "shared", "slots", "start_time", "user", "world"]
    assert sorted(json.loads(path.read_text())) == names
    ringctl("stop", run)


# --- Between two attempts -------------------------------------------------------------------------

AGAIN = ["--max-restarts", "2", "--restart-delay", "300"]


@pytest.mark.parametrize("fails", [True, False])  # else its supervisor is killed
def test_until_its_next_attempt_begins_by_itself_a_run_keeps_its_slots(fails: bool) -> None:
    command = ["sh", "-c", "exit 3"] if fails else ["sleep", "600"]
    run = detach(command, world=2, options=AGAIN)
    if not fails:
        os.kill(state(run)["hostd"]["pid"], signal.SIGKILL)
    wait_until_final(run)
    wait_for(lambda: "begins in" in watching.sentence(run), "its watcher to wait for the next attempt")
    assert [(each["run"], each["slots"]) for each in told()] == [(run, 2)]
    ringctl("stop", run)
    assert list(folder().iterdir()) == []


@pytest.mark.parametrize("allowed", [1, 5])  # there is no third that would fail as the first two did
def test_after_its_last_attempt_a_run_keeps_nothing(allowed: int) -> None:
    options = ["--max-restarts", str(allowed), "--restart-delay", "0"]
    launch(["sh", "-c", "exit 3"], world=1, code=1, options=options)
    assert list(folder().iterdir()) == []


def test_a_start_that_fails_keeps_nothing_for_attempts_that_do_not_come(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    launch([str(program)], world=1, code=1, options=["--max-restarts", "3", "--restart-delay", "3600"])
    assert list(folder().iterdir()) == []


def test_where_it_cannot_be_written_that_slots_are_kept_none_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def put(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = record("r")
    monkeypatch.setattr(hostslots, "put", put)
    hostslots.let_go("r", 60.0)
    assert not path.exists()


def test_slots_that_are_kept_are_the_runs_own_again_when_its_next_attempt_starts() -> None:
    once = 'test "$RINGCTL_ATTEMPT" = 1 && exit 3; sleep 600'
    run = detach(["sh", "-c", once], world=1, options=["--max-restarts", "1", "--restart-delay", "0"])
    wait_for(lambda: state(run)["attempt"] == 2 and state(run)["state"] == "running", "the second attempt")
    (path,) = folder().iterdir()
    assert "until" not in json.loads(path.read_text())
    ringctl("stop", run)
    assert list(folder().iterdir()) == []


@pytest.mark.parametrize(("seconds", "counts"), [(60.0, True), (-0.1, False), (1e9, False)])
def test_what_is_kept_counts_without_a_process_but_not_for_long(seconds: float, counts: bool) -> None:
    record("kept", start_time=1, until=hostslots.since_boot() + seconds)  # no process began then
    assert bool(told()) is counts
    about = {"run": "other", "attempt": 1, "slots": 1, "world": 1, "shared": False}
    assert bool(hostslots.claim(about, 2, identity(os.getpid()))) is counts
    hostslots.remove("other")


def test_whoever_starts_the_next_attempt_takes_over_what_is_kept_for_it() -> None:
    path = record("kept", start_time=1, until=hostslots.since_boot() + 60)
    about = {"run": "kept", "attempt": 2, "slots": 2, "world": 2, "shared": False}
    assert hostslots.claim(about, 2, identity(os.getpid())) == ""
    found = json.loads(path.read_text())
    assert (found["attempt"], found["pid"], "until" in found) == (2, os.getpid(), False)


# --- What does not count --------------------------------------------------------------------------


def gone_process() -> dict[str, Any]:
    child = subprocess.Popen(["sleep", "600"])
    who = {"pid": child.pid, "start_time": start_time(child.pid)}
    child.kill()
    child.wait()
    return who


STALE: dict[str, Callable[[], dict[str, Any]]] = {
    "its process has ended": gone_process,
    "its number is another process's now": lambda: {"start_time": 1},
    "the host was started anew": lambda: {"boot_id": "00000000-0000-0000-0000-000000000000"},
}


@pytest.mark.parametrize("changes", STALE.values(), ids=STALE)
def test_a_stale_record_counts_for_nothing(changes: Callable[[], dict[str, Any]]) -> None:
    good, stale = record("good"), record("stale", **changes())
    assert [each["run"] for each in told()] == ["good"]
    assert good.exists()
    assert stale.exists(), "whoever looks takes nothing away"


def link(path: Path) -> None:
    path.rename(path.parent.parent / "real")
    path.symlink_to(path.parent.parent / "real")


def second_name(path: Path) -> None:
    os.link(path, path.parent.parent / "second")


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def holding(**changes: Any) -> Callable[[Path], object]:
    return lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


HOSTILE: dict[str, Callable[[Path], object]] = {
    "a link": link,
    "a file with a second name": second_name,
    "a pipe": fifo,
    "a folder": folder_instead,
    "a huge file": lambda path: os.truncate(path, 1 << 40),
    "garbage": lambda path: path.write_bytes(os.urandom(1000)),
    "a thousand brackets": lambda path: path.write_bytes(b"[" * 4000),
    "a list": lambda path: path.write_text("[]"),
    "nothing": lambda path: path.write_text(""),
    "another run's": holding(run="other"),
    "a number that is a truth": holding(slots=True),
    "more slots than there are ranks": holding(slots=5),
    "slots without end": holding(slots=10**30, world=10**31),
    "negative slots": holding(slots=-2),
    "the first process": holding(pid=1),
    "every process": holding(pid=-1),
    "no process": holding(pid=None),
    "a run with a path for a name": lambda path: path.rename(path.parent / f"{ME}-..json"),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_an_entry_that_is_no_record_is_passed_over(change: Callable[[Path], object]) -> None:
    record("good")
    change(record("bad"))
    assert [each["run"] for each in told()] == ["good"]


@root_only
def test_a_record_of_another_user_counts_only_under_that_ones_number_and_with_a_process_of_that_one() -> None:
    child = subprocess.Popen(["sleep", "600"], user=BOB)
    try:
        its = {"pid": child.pid, "start_time": start_time(child.pid), "user": "root"}
        os.chown(record("good", BOB, **its), BOB, BOB)
        os.chown(record("not-mine", ME), BOB, BOB)
        os.chown(record("not-his-process", BOB), BOB, BOB)
        record("not-his-file", BOB, **its)
        assert [(each["run"], each["user"]) for each in told()] == [("good", str(BOB))]
    finally:
        child.kill()
        child.wait()


def test_of_one_user_no_more_runs_are_told_than_leave_room_for_others() -> None:
    for number in range(hostslots.MOST_OF_A_USER + 50):
        record(f"run{number}")
    assert len(told()) == hostslots.MOST_OF_A_USER


# --- The folder itself ---------------------------------------------------------------------------


def not_sticky() -> None:
    folder().mkdir()
    folder().chmod(0o777)


def a_link_to_somewhere() -> None:
    (folder().parent / "elsewhere").mkdir()
    folder().symlink_to(folder().parent / "elsewhere")


def a_file() -> None:
    folder().write_text("")


def somebody_elses_alone() -> None:
    folder().mkdir(0o755)
    os.chown(folder(), BOB, BOB)


@pytest.mark.parametrize(
    "prepare", [not_sticky, a_link_to_somewhere, a_file, pytest.param(somebody_elses_alone, marks=root_only)]
)
def test_a_folder_that_somebody_may_have_set_a_trap_with_is_not_used_and_the_run_starts(
    prepare: Callable[[], None],
) -> None:
    prepare()
    run = detach(["true"], world=1)
    wait_until_final(run)
    said = (run_folder(run) / "hostd.log").read_text()
    assert said.count("is not written down for others to see") == 1
    assert str(folder()) in said
    runs, problem = hostslots.taken()
    assert runs == []
    assert str(folder()) in problem
    assert not list((folder().parent / "elsewhere").glob("*"))


def test_a_name_that_somebody_has_taken_already_does_not_keep_a_run_from_starting() -> None:
    entry("x", b"").unlink()
    run = "r-1"
    (folder() / f"{ME}-{run}.json").mkdir()
    problem = hostslots.write(run, 1, 1, 1, False, identity(os.getpid()))
    assert "is not written down for others to see" in problem
    assert [path.name for path in folder().iterdir()] == [f"{ME}-{run}.json"], "and nothing is left beside it"


# --- Slots that must be free ---------------------------------------------------------------------


def claimed(run: str, slots: int, room: int, *, shared: bool = False) -> str:
    about = {"run": run, "attempt": 1, "slots": slots, "world": slots, "shared": shared}
    return hostslots.claim(about, room, identity(os.getpid()))


def test_slots_that_must_be_free_are_taken_if_they_are_and_else_it_is_said_who_has_them() -> None:
    me = hostslots.user_name(ME)
    assert claimed("first", 2, 4) == ""
    assert claimed("second", 3, 4) == f"2 of 4 slots are taken by run first of user {me}"
    assert [each["run"] for each in told()] == ["first"], "who does not get them takes none"
    assert claimed("second", 2, 4) == ""
    assert claimed("first", 2, 4) == "", "its own are no reason"
    assert claimed("third", 1, 4).startswith("4 of 4 slots are taken by run first of ")


def test_runs_that_share_slots_find_those_of_each_other_free_and_no_one_elses() -> None:
    record("theirs", shared=True)
    assert claimed("mine", 2, 2, shared=True) == ""
    assert claimed("alone", 1, 2).startswith("2 of 2 slots are taken by run mine of ")
    record("theirs", shared=False)
    assert claimed("another", 1, 2, shared=True).startswith("2 of 2 slots are taken by run theirs of ")


def test_what_a_killed_run_has_left_is_no_reason_to_wait() -> None:
    record("killed", pid=2**22 + 1)
    assert claimed("mine", 2, 2) == ""


def test_where_nothing_can_be_written_down_no_run_waits_for_that() -> None:
    folder().symlink_to("/etc")
    assert claimed("mine", 2, 2) == ""


def test_a_folder_whose_maker_was_killed_before_it_was_open_to_all_is_opened_by_the_next() -> None:
    folder().mkdir(0o700)
    assert hostslots.write("r", 1, 1, 1, False, identity(os.getpid())) == ""
    assert stat.S_IMODE(folder().stat().st_mode) == 0o1777


def test_a_record_that_was_not_finished_is_taken_away_by_its_owner() -> None:
    half = entry(f".{ME}-0123456789abcdef.tmp", b"{")
    assert hostslots.write("r", 1, 1, 1, False, identity(os.getpid())) == ""
    assert half.exists(), "it may be in the making"
    os.utime(half, (0, 0))
    assert hostslots.write("r", 1, 1, 1, False, identity(os.getpid())) == ""
    assert not half.exists()
