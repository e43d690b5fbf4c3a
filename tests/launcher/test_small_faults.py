"""Small faults of real machines: a full disk, a number that is another process's by now, a clock that is set,
a log that goes on in the next file while somebody reads it, lines that never seem to end."""

from __future__ import annotations

import errno
import json
import mmap
import os
import select
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher import cli, hostanswer, hostevents, hostproc, kit, watching
from launcher.agent import Conversation
from launcher.hostpending import Pending
from launcher.hostranks import Rank
from launcher.hostsupervisor import Supervisor
from tests.conftest import eventually
from tests.launcher.hosts import OURS, Hosts, inventory
from tests.launcher.ringctl import (
    RINGCTL,
    detach,
    events,
    is_alive,
    lines,
    ringctl,
    run_folder,
    start,
    state,
    wait_for,
    wait_until_final,
)

RUN = "20260101-000000-abcd"

# --- A full disk ---------------------------------------------------------------------------------

COUNT = """
n=0
while [ ! -e /tmp/done ]; do
    for _ in 1 2 3 4 5 6 7 8 9 10; do n=$((n + 1)); echo $n; done
    echo $n >/tmp/said; sleep 0.01
done
"""
WAIT = "until [ -e /tmp/done ]; do sleep 0.02; done"


@pytest.fixture
def one(cluster: Hosts) -> Any:
    """A host whose disk gets full; what it has in /tmp is on another one."""
    inventory(cluster, only=("server1",))
    yield cluster
    cluster.free_disk("server1")
    for name in ("done", "said"):
        cluster.path("server1", f"/tmp/{name}").unlink(missing_ok=True)


def said(cluster: Hosts) -> int:
    path = cluster.path("server1", "/tmp/said")
    return int(path.read_text() or 0) if path.exists() else 0


def has_begun(cluster: Hosts) -> bool:
    """Whether its rank does something, and its supervisor has written down that it is there: on a disk that
    is full before that, a run does not start."""
    states = [
        json.loads(path.read_text()) for path in cluster.path("server1", f"{OURS}/runs").glob("*/state.json")
    ]
    running = any(state["state"] == "running" for state in states)
    return running and cluster.path("server1", "/tmp/said").exists()


def told() -> Any:
    return json.loads(ringctl("status", "--json").stdout)


def processes(cluster: Hosts, name: str) -> bool:
    return bool(cluster.run("server1", "sh", "-c", f"pgrep -x {name} || true").stdout)


def test_a_run_goes_on_on_a_full_disk_and_what_it_said_is_written_when_there_is_room(one: Hosts) -> None:
    ringctl("launch", "--detach", "--", "sh", "-c", COUNT)
    wait_for(lambda: said(one), "the rank")
    one.fill_disk("server1")
    before = said(one)
    wait_for(lambda: said(one) > before + 150, "more lines")
    assert told()["state"] == "running"
    one.free_disk("server1")
    one.run("server1", "touch", "/tmp/done")
    wait_for(lambda: told()["state"] == "succeeded", "its end")
    shown = ringctl("logs", "--no-prefix").stdout
    assert shown == "".join(f"{number}\n" for number in range(1, said(one) + 1))


def test_a_run_that_ends_on_a_full_disk_says_so_at_once(one: Hosts) -> None:
    fails = "head -c 3000000 /dev/zero >~/big || { seq 1 3000; exit 3; }"
    launch = start("launch", "--", "sh", "-c", f"touch /tmp/said; {WAIT}; {fails}")
    wait_for(lambda: has_begun(one), "the rank")
    one.fill_disk("server1")
    one.run("server1", "touch", "/tmp/done")
    words, _ = launch.communicate(timeout=60)
    assert launch.returncode == 1
    assert "failed first: rank 0 on server1 exited with code 3: head: " in words
    assert "[0 server1] 3000\n" in words
    assert "No space left on device (the disk is full" in words
    assert told()["state"] == "failed"
    assert not list(one.path("server1", f"{OURS}/runs").glob("*/room"))


def test_ranks_that_say_too_much_for_a_full_disk_are_ended_and_the_disk_is_named(one: Hosts) -> None:
    launch = start("launch", "--", "sh", "-c", f"touch /tmp/said; {WAIT}; exec yes $(seq 1 1000)")
    wait_for(lambda: has_begun(one), "the rank")
    one.fill_disk("server1")
    one.run("server1", "touch", "/tmp/done")
    wait_for(lambda: processes(one, "yes"), "the flood")
    wait_for(lambda: not processes(one, "yes"), "the end of the rank")
    assert told()["state"] == "running", "nobody knows yet, and nothing is lost"
    one.free_disk("server1")
    words, _ = launch.communicate(timeout=60)
    assert launch.returncode == 1
    assert "the run was ended on server1" in words
    assert "No space left on device (the disk is full" in words
    assert told()["state"] == "failed"


def test_what_a_stop_on_a_full_disk_could_not_keep_of_the_log_is_told(one: Hosts) -> None:
    says = f"touch /tmp/said; {WAIT}; seq 1 60000; echo all >/tmp/said; sleep 600"
    launch = start("launch", "--", "sh", "-c", says)
    wait_for(lambda: has_begun(one), "the rank")
    one.fill_disk("server1")
    one.run("server1", "touch", "/tmp/done")
    wait_for(one.path("server1", "/tmp/said").read_text, "what it says")
    stopped = ringctl("stop", "--grace", "5").stdout
    shown, _ = launch.communicate(timeout=60)
    assert launch.returncode == 130, shown[-1000:]
    numbers = [line for line in shown.splitlines() if line.startswith("[0 server1] ")]
    assert numbers == [f"[0 server1] {number}" for number in range(1, len(numbers) + 1)]
    lost = f"server1: {60000 - len(numbers)} lines of its log are lost: they could not be written down"
    one.free_disk("server1")
    assert [lost in words for words in (stopped, shown, ringctl("logs").stderr)] == [True] * 3
    (rank,) = told()["ranks"]
    assert (told()["state"], rank["signal"]) == ("stopped", "SIGTERM")


def test_half_a_line_for_which_there_is_no_room_is_taken_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, write = hostevents.EventLog(str(tmp_path), 1), os.write
    written: list[int] = []

    def with_room_for_ten(fd: int, data: bytes) -> int:
        if written:
            raise OSError(errno.ENOSPC, "full")
        written.append(write(fd, data[:10]))
        return 10

    with monkeypatch.context() as full:
        full.setattr(os, "write", with_room_for_ten)
        for number in range(3):
            log.event("line", rank=0, text=f"{number}" * 100)
        hostevents.log_exit(log, 0, "stopped", -15, "SIGTERM", "stopped")
        assert log.shorten(50) == 3
    assert log.finish()
    first, second = (path.read_bytes() for path in sorted(tmp_path.glob("events-*")))
    assert (len(first), json.loads(second)["kind"]) == (10, "rank_exited")


def with_short_files(program: str) -> str:
    """A run that has succeeded where no file may be longer than two megabytes."""
    words = ["sh", "-c", 'ulimit -f 4096; exec "$@"', "-", *RINGCTL]
    launch = ["launch", "--local", "--world", "1", "--detach", "--", "sh", "-c", program]
    subprocess.run([*words, *launch], check=True, capture_output=True)
    run = json.loads(ringctl("ps", "--json").stdout)[0]["run"]
    assert wait_until_final(run)["state"] == "succeeded"
    return str(run)


def test_a_log_goes_on_in_the_next_file_where_files_may_not_be_longer() -> None:
    program = "python3 -S -c 'for n in range(60000): print(n, 60 * chr(46))'"
    run = with_short_files(program)
    assert len(list(run_folder(run).glob("events-*"))) > 1
    shown = [json.loads(line) for line in ringctl("logs", run, "--json").stdout.splitlines()]
    assert [line.split()[0] for line in lines(shown, 0)] == [str(n) for n in range(60000)]


def test_a_line_that_is_longer_than_a_file_may_be_is_left_out_and_that_is_said() -> None:
    program = "echo before; head -c 3000000 /dev/zero | tr '\\0' x; echo; echo after"
    run = with_short_files(program)
    told = ringctl("logs", run, "--json")
    assert lines([json.loads(line) for line in told.stdout.splitlines()], 0) == ["before", "after"]
    assert "localhost: 1 lines of its log are lost: they could not be written down" in told.stderr


def test_pipes_that_cannot_be_opened_are_why_a_run_has_failed() -> None:
    words = ["sh", "-c", 'ulimit -n 60; exec "$@"', "-", *RINGCTL]
    launch = ["launch", "--local", "--world", "16", "--skip-preflight", "--", "true"]
    done = subprocess.run([*words, *launch], capture_output=True, text=True)
    assert done.returncode == 1
    assert "the pipes of its ranks cannot be opened: Too many open files" in done.stderr
    assert json.loads(ringctl("ps", "--all", "--json").stdout)[0]["state"] == "failed"


@pytest.mark.parametrize("files", [11, 12])  # with the first, the host cannot be asked afterwards either
def test_a_launch_that_failed_because_of_this_machine_is_started_by_nobody_later(files: int) -> None:
    words = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "-", *RINGCTL]
    launch = ["launch", "--local", "--world", "2", "--max-restarts", "1", "--skip-preflight", "--", "true"]
    done = subprocess.run([*words, *launch], capture_output=True, text=True)
    assert done.returncode == 1
    assert "the pipes of its ranks cannot be opened: Too many open files" in done.stderr, "why it failed"
    found = ringctl("ps", "--json")
    assert (json.loads(found.stdout)[0]["state"], found.stderr) == ("failed", "")


def test_nor_is_one_for_which_this_machine_could_not_ask_its_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(Conversation, "last", refuse)
    words = ["launch", "--local", "--world", "1", "--max-restarts", "1", "--skip-preflight", "--", "true"]
    with pytest.raises(OSError, match="Too many open files"):
        cli.cli.main(words, standalone_mode=False)
    assert not watching.to_be_watched()


def test_what_could_not_be_ended_may_talk_on_and_keeps_nobody_from_taking_the_last_words(
    tmp_path: Path,
) -> None:
    spec = {"rank": 0, "local_rank": 0, "argv": [], "env": {"RINGCTL_METRICS": str(tmp_path / "metrics")}}
    rank = Rank(spec)
    rank.open_pipes()
    with subprocess.Popen(["yes"], stdout=rank.write_ends[0]) as talker:
        reader = next(iter(rank.splitters))
        assert eventually(lambda: select.select([reader], [], [], 0)[0], 10.0)
        words = list(rank.last_words())
        talker.kill()
    rank.close_pipes()
    assert {json.loads(line)["text"] for line in b"".join(words).splitlines()[:-1]} == {"y"}


def test_a_log_and_a_state_that_cannot_be_written_for_a_moment_are_written_later(tmp_path: Path) -> None:
    spec = {"rank": 0, "local_rank": 0, "argv": [], "env": {"RINGCTL_METRICS": str(tmp_path / "metrics")}}
    plan = {"run": RUN, "name": "", "attempt": 1, "world": 1, "host": "here"}
    supervisor = Supervisor(str(tmp_path), plan, {}, [Rank(spec)])
    log, path = supervisor.log, tmp_path / "events-1-000001.jsonl"
    written = os.dup(log.fd)
    log.event("one")
    os.dup2(os.open(path, os.O_RDONLY), log.fd)  # no disk that gets read-only is to be had here
    (tmp_path / "state.json").mkdir()
    log.event("two")
    assert (log.finish(), supervisor.save(), log.problem) == (False, False, os.strerror(errno.EBADF))
    os.dup2(written, log.fd)
    (tmp_path / "state.json").rmdir()
    assert (log.finish(), supervisor.save()) == (True, True)
    assert [json.loads(line)["kind"] for line in path.read_bytes().splitlines()] == ["one", "two"]
    assert json.loads((tmp_path / "state.json").read_text())["run"] == RUN


@pytest.mark.parametrize("what", ["state", "log"])
def test_ranks_do_not_stand_still_because_their_steps_cannot_be_written(tmp_path: Path, what: str) -> None:
    metrics = tmp_path / "metrics"
    spec = {"rank": 0, "local_rank": 0, "argv": [], "env": {"RINGCTL_METRICS": str(metrics)}}
    plan, rank = {"run": RUN, "name": "", "attempt": 1, "world": 1, "host": "here"}, Rank(spec)
    supervisor = Supervisor(str(tmp_path), plan, {}, [rank])
    written = os.dup(supervisor.log.fd)

    def stands_still() -> bool:
        rank.progress.at -= 9.0
        supervisor.next_heartbeat = 0.0
        for _ in range(2):
            supervisor.tick()
        return rank.progress.stood(8.0, 9.0)

    metrics.write_text('{"step": 1}\n')
    supervisor.tick()
    if what == "state":
        (tmp_path / "state.json").unlink()
        (tmp_path / "state.json").mkdir()
    else:
        os.dup2(os.open(tmp_path / "events-1-000001.jsonl", os.O_RDONLY), supervisor.log.fd)
        supervisor.log.event("waits")
    assert not stands_still()
    if what == "state":
        (tmp_path / "state.json").rmdir()
    os.dup2(written, supervisor.log.fd)
    assert not stands_still(), "nobody knows yet"
    metrics.write_text('{"step": 1}\n{"step": 2}\n')
    supervisor.tick()
    assert stands_still()


def test_once_there_is_room_again_what_had_waited_for_it_is_not_taken_for_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = {"rank": 0, "local_rank": 0, "argv": [], "env": {"RINGCTL_METRICS": str(tmp_path / "metrics")}}
    plan, rank = {"run": RUN, "name": "", "attempt": 1, "world": 1, "host": "here"}, Rank(spec)
    rank.open_pipes()
    supervisor, reader, write = (
        Supervisor(str(tmp_path), plan, {}, [rank]),
        next(iter(rank.splitters)),
        os.write,
    )

    def to_a_full_disk(fd: int, data: bytes) -> int:
        if fd == supervisor.log.fd:
            raise OSError(errno.ENOSPC, "full")
        return write(fd, data)

    with monkeypatch.context() as full:
        full.setattr(os, "write", to_a_full_disk)
        os.write(rank.write_ends[0], b"a line\nhalf of one")
        supervisor.read_output(reader)
        supervisor.tick()
        assert rank.has_lost_words(), "if the supervisor were killed now"
    for _ in range(2):
        supervisor.tick()
    assert (rank.has_lost_words(), rank.pending[reader].rest) == (False, b"half of one")
    rank.close_pipes()
    os.close(supervisor.log.fd)


def test_what_drips_in_without_a_lines_end_is_not_counted_each_time_anew() -> None:
    class Looked(list[bytes]):
        pieces = 0

        def __iter__(self) -> Iterator[bytes]:
            for piece in super().__iter__():
                Looked.pieces += 1
                yield piece

    pending = Pending()
    pending.begin()
    pending.done(Looked([b"x"] * 1_000_000))
    assert pending.rest is None
    assert Looked.pieces <= mmap.PAGESIZE


def without_room(cluster: Hosts) -> None:
    """A run on a disk that is full, and somebody else was quicker to use what was kept free for its end."""
    ringctl("launch", "--detach", "--", "sh", "-c", COUNT)
    wait_for(lambda: said(cluster), "the rank")
    (room,) = cluster.path("server1", f"{OURS}/runs").glob("*/room")
    room.unlink()
    cluster.fill_disk("server1")
    before = said(cluster)
    wait_for(lambda: said(cluster) > before + 60, "lines for which there is no room")


def test_a_run_that_waits_for_room_can_be_stopped(one: Hosts) -> None:
    without_room(one)
    one.run("server1", "touch", "/tmp/done")
    wait_for(lambda: not processes(one, "sleep"), "the end of the rank")
    assert told()["state"] == "running"
    assert "could not be written down there: No space left on device" in ringctl("stop", code=1).stdout
    assert eventually(lambda: not processes(one, "python3"), 10.0), "the supervisors wait for nothing now"
    one.free_disk("server1")
    assert "lines of its log may be lost" in ringctl("stop").stdout
    assert told()["state"] == "stopped"
    assert "lines of its log may be lost" in ringctl("logs").stderr


def test_a_supervisor_that_is_killed_on_a_full_disk_is_told_of_when_there_is_room(one: Hosts) -> None:
    without_room(one)
    (file,) = one.path("server1", f"{OURS}/runs").glob("*/state.json")
    one.run("server1", "kill", "-9", str(json.loads(file.read_text())["hostd"]["pid"]))
    wait_for(lambda: not processes(one, "sleep"), "the end of the rank")
    assert told()["state"] == "running"
    one.free_disk("server1")
    wait_for(lambda: told()["state"] == "failed", "word of it")
    assert {rank["exit_code"] for rank in told()["ranks"]} == {-9}
    assert "lines of its log may be lost" in ringctl("logs").stderr


# --- Numbers of processes ------------------------------------------------------------------------


@pytest.mark.parametrize("args", [["ps"], ["preflight", "--local"]], ids=" ".join)
def test_where_next_to_no_files_can_be_open_it_says_so(args: list[str]) -> None:
    few = ["sh", "-c", 'ulimit -n 8; exec "$@"', "sh"]
    done = subprocess.run([*few, *RINGCTL, *args], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "error: this machine refuses: Too many open files\n")


def ask_hostd(command: str, request: dict[str, object]) -> Any:
    argv = [sys.executable, "-I", "-S", "-c", kit.RUN, kit.HERE, "hostd", command]
    done = subprocess.run(argv, input=json.dumps(request).encode(), capture_output=True, check=True)
    return json.loads(done.stdout.partition(hostanswer.SENTINEL)[2])


@pytest.mark.parametrize("differs", ["start", "boot"])
def test_a_process_that_has_the_number_of_a_supervisor_of_old_is_left_alone(differs: str) -> None:
    run = detach(["true"], world=1)
    about = wait_until_final(run)
    wait_for(lambda: not is_alive(about["warden"]["pid"]), "the end of its supervisors")
    other = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        who = {**hostproc.identity(other.pid), differs: 1 if differs == "start" else "another one"}
        about.update(state="running", ended=None, hostd=who, warden=who)
        about["ranks"][0].update(state="running", pid=other.pid, start=1, exit_code=None)
        (run_folder(run) / "state.json").write_text(json.dumps(about))
        (run_folder(run) / "events-1-000001.jsonl").write_text("")
        assert ask_hostd("runs", {"run": run})["runs"][0]["state"] == "lost"
        assert ask_hostd("stacks", {"run": run}) == {"known": True, "asked": False}
        stopped = ask_hostd("stop", {"run": run, "grace": 0.1})
        assert (stopped["was"], stopped["state"], stopped["left"]) == ("lost", "failed", [])
        assert other.poll() is None
        assert is_alive(other.pid)
    finally:
        other.kill()
        other.wait()


# --- A clock that is set, and a log in many files ------------------------------------------------

# hostd itself, with a clock that is as wrong as the file says, and with short segments.
SET_CLOCK = textwrap.dedent("""
    import os, sys, time
    sys.path.insert(0, sys.argv.pop(1))
    clock, real = sys.argv.pop(1), time.time
    def shifted():
        with open(clock) as f:
            return real() + float(f.read() or 0)
    time.time = shifted
    from launcher import hostd, hostevents
    hostevents.SEGMENT_BYTES = 4000
    sys.exit(hostd.main())
""")


def with_a_clock(folder: Path, command: list[str]) -> str:
    """Start a run here whose supervisor goes by the clock that is set in `folder`."""
    like = detach(["true"], world=1)
    wait_until_final(like)
    plan = (run_folder(like) / "plan.json").read_text().replace(like, RUN)
    request = json.loads(plan)
    request["ranks"][0]["argv"] = command
    argv = [sys.executable, "-I", "-S", "-c", SET_CLOCK, kit.HERE, str(folder / "clock"), "start"]
    (folder / "clock").write_text("0")
    done = subprocess.run(argv, input=json.dumps(request).encode(), capture_output=True, check=True)
    assert b'"hostd"' in done.stdout, done.stdout
    return RUN


def set_clock(folder: Path, seconds: float) -> None:
    (folder / "new").write_text(str(seconds))
    (folder / "new").rename(folder / "clock")


def test_a_clock_that_is_set_and_a_log_in_many_files_lose_nothing_while_followed(tmp_path: Path) -> None:
    count = f"n=0; until [ -e {tmp_path}/done ]; do n=$((n + 1)); echo $n; sleep 0.005; done"
    run = with_a_clock(tmp_path, ["sh", "-c", count])
    follower = start("logs", run, "--follow", "--no-prefix")

    def more() -> None:
        before = len(lines(whole_events(run), 0))
        wait_for(lambda: len(lines(whole_events(run), 0)) > before + 80, "more lines")

    for ahead in (0, 3600, -3600, 0):
        set_clock(tmp_path, ahead)
        more()
    (tmp_path / "done").touch()
    shown, words = follower.communicate(timeout=60)
    assert follower.returncode == 0, words
    wait_until_final(run)
    numbers = lines(events(run), 0)
    assert shown.split() == numbers == [str(number) for number in range(1, len(numbers) + 1)]
    times = [event["time"] for event in events(run) if event["kind"] == "line"]
    assert max(times) - min(times) > 7000, "the clock was set"
    assert len(hostevents.segments(str(run_folder(run)))) > 4
    assert ringctl("logs", run, "--no-prefix").stdout == shown


def whole_events(run: str) -> list[Any]:
    """Of a run that goes on: a line may be under way."""
    paths = sorted(run_folder(run).glob("events-*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_bytes().split(b"\n")[:-1]]


# --- Lines ---------------------------------------------------------------------------------------


def test_lines_of_ten_megabytes_and_bytes_of_every_kind_are_followed_as_they_were_written(
    tmp_path: Path,
) -> None:
    odd = b"\xff\xfe\xe4\xb8 \x1b]0;title\x07\x1b[2J\x1b[10A\0"
    data = b"x" * 10_000_000 + odd + b"\n" + odd * 200_000 + b"\nlast\n"
    (tmp_path / "data").write_bytes(data)
    run = detach(
        ["sh", "-c", f"cat {tmp_path}/data; until [ -e {tmp_path}/done ]; do sleep 0.02; done"], world=1
    )
    with (tmp_path / "shown").open("wb") as out:
        follower = subprocess.Popen([*RINGCTL, "logs", run, "--follow", "--no-prefix"], stdout=out)
    wait_for(lambda: os.stat(tmp_path / "shown").st_size == len(data), "all of it")
    (tmp_path / "done").touch()
    assert follower.wait(timeout=60) == 0
    assert (tmp_path / "shown").read_bytes() == data
    assert state(run)["state"] == "succeeded"
