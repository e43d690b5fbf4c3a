"""Runs that are handed in: who starts when, why others wait, and what a killed service has lost (nothing)."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher import history, queued, runs, schedule, watching
from launcher.errors import InputError, RingctlError
from launcher.inventory import this_machine
from launcher.model import Host
from launcher.queued import Submission
from launcher.serve import children, keeper, reserving
from launcher.serve.children import Done
from tests.launcher.ringctl import RINGCTL, detach, events, lines, ringctl, run_folder, state, wait_for
from tests.launcher.serve.service import Service, serving, slow, stopped

HELD = """
import os, time
while not os.path.exists(os.environ["GO"]):
    time.sleep(0.02)
print("done", os.environ["RANK"])
"""
COUNTS = """
import json, os, time
for i in range(int(os.environ["LINES"])):
    print(f"line {i} of {os.environ['RANK']}", flush=True)
    with open(os.environ["RINGCTL_METRICS"], "a") as file:
        print(json.dumps({"step": i, "loss": 1 / (i + 1)}), file=file, flush=True)
    time.sleep(0.02)
"""

# Somebody prunes when a restart has looked at its run, just before nobody else may touch it.
FORGETS = """
import sys
from launcher import history, watching
enter = watching.Keeper.__enter__
def forget_first(keeper):
    history.forget({run!r})
    return enter(keeper)
watching.Keeper.__enter__ = forget_first
"""


def held(service: Service, go: Path, **more: Any) -> str:
    """A run that goes on until there is a file."""
    return service.submit(
        sys.executable, "-c", HELD, variables={"GO": str(go)}, prefork=False, **{"world": 2, **more}
    )


# --- One run -------------------------------------------------------------------------------------


def test_a_run_that_is_handed_in_runs_is_recorded_and_ends(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "mine.py").write_text(
        "import helper, os\nprint('rank', os.environ['RANK'], helper.WORD, os.environ['KEY'])"
    )
    (project / "helper.py").write_text("WORD = 'from the snapshot'")
    (tmp_path / "secret.env").write_text("KEY=not-to-be-seen\n")
    (tmp_path / "secret.env").chmod(0o600)
    with serving() as service:
        options = ("--world", "2", "--env-file", str(tmp_path / "secret.env"), "--follow")
        done = ringctl("submit", *options, "--", "python", "mine.py", cwd=project)
        assert sorted(done.stdout.splitlines()) == [
            f"[{rank} here] rank {rank} from the snapshot ***" for rank in (0, 1)
        ]
        run = service.client().find(None)["run"]
        assert service.row(run)["state"] == "succeeded"
        said = service.client().get(f"/api/runs/{run}/submission")
        assert (said["command"], said["secrets"]) == (["python", "mine.py"], {"KEY": ""})
        kept = Path(os.environ["RINGCTL_HOME"]) / "serve" / "runs" / run
        holding = [
            path for path in kept.rglob("*") if path.is_file() and b"not-to-be-seen" in path.read_bytes()
        ]
        assert [(path.name, path.stat().st_mode & 0o777) for path in holding] == [("secrets.env", 0o600)]


def test_a_run_with_secrets_starts_again_after_its_end_until_it_is_forgotten() -> None:
    script = [sys.executable, "-c", "import os; print(os.environ['KEY'][:3], os.environ['KEY'])"]
    with serving() as service:
        run = service.submit(*script, secrets={"KEY": "not-to-be-seen"}, prefork=False)
        service.wait_for_state(run, "succeeded")
        service.client().post(f"/api/runs/{run}/restart")
        wait_for(lambda: len(service.lines(run)) == 2, "the second attempt")
        assert service.lines(run) == ["not ***"] * 2
        assert ringctl("logs", run, "--no-prefix").stdout == "not ***\n", "hidden also after its end"
        service.wait_for_state(run, "succeeded")
        wait_for(lambda: run in ringctl("runs", "prune", "--keep", "0", "--yes").stdout, "it to be forgotten")
    kept = Path(os.environ["RINGCTL_HOME"]) / "serve" / "runs" / run
    assert not (kept / "secrets.env").exists()


def test_a_run_that_cannot_start_says_why(tmp_path: Path) -> None:
    with serving() as service:
        done = ringctl(
            "submit", "--world", "1", "--wait", "--json", "--", "no-such-program", cwd=tmp_path, code=1
        )
        row = json.loads(done.stdout)
        assert row["state"] == "failed"
        assert "no-such-program: no such command" in row["error"]
        with pytest.raises(InputError, match="more than the 2 slots"):
            service.submit("--epochs", "1", world=3)


# --- The order -----------------------------------------------------------------------------------


def test_three_runs_start_in_the_right_order_and_the_third_says_why_it_waits(tmp_path: Path) -> None:
    with serving(slots=4) as service:
        first = held(service, tmp_path / "go1", world=3)
        service.wait_for_state(first, "running")
        second = held(service, tmp_path / "go2", world=3)
        third = held(service, tmp_path / "go3", world=3, priority=5)
        wait_for(lambda: service.row(second)["waiting"] and service.row(third)["waiting"], "their reasons")
        assert service.row(third)["waiting"] == "waiting for 2 slots on here"
        assert [row["run"] for row in service.client().get("/api/queue")["queue"]] == [third, second]
        (tmp_path / "go1").touch()
        service.wait_for_state(first, "succeeded")
        service.wait_for_state(third, "running")
        assert service.row(second)["state"] == "queued"
        (tmp_path / "go3").touch()
        service.wait_for_state(second, "running")
        service.wait_for_state(third, "succeeded")
        (tmp_path / "go2").touch()
        service.wait_for_state(second, "succeeded")


def test_who_was_faster_keeps_the_slots_and_the_run_that_was_to_have_them_goes_on_waiting(
    tmp_path: Path,
) -> None:
    with serving(slots=2) as service:
        run = held(service, tmp_path / "go")
        pid = wait_for(lambda: (row := queued.row(run)) and row.pid, "its launch")
        options = ("--env", f"GO={tmp_path / 'done'}", "--no-prefork")
        with stopped(pid):  # it has its slots, as the service believes
            other = detach([sys.executable, "-c", HELD], options=options)  # which asks nobody
        its = f"here: no room for it by now: 2 of 2 slots are taken by run {other} of user "
        wait_for(lambda: service.row(run)["waiting"].startswith(its), "the reason")
        assert service.row(run)["state"] == "queued"
        assert history.read(run) is None, "nothing was started"
        wait_for(lambda: service.row(run)["waiting"] == "waiting for 2 slots on here", "the usual reason")
        (tmp_path / "done").touch()
        service.wait_for_state(run, "running")
        assert service.row(run)["attempt"] == 1
        (tmp_path / "go").touch()
        service.wait_for_state(run, "succeeded")


def test_a_run_waits_for_another_and_for_its_time_and_can_be_cancelled(tmp_path: Path) -> None:
    with serving() as service:
        first = held(service, tmp_path / "go", world=1)
        after = held(service, tmp_path / "go", world=1, after=first)
        later = held(service, tmp_path / "go", world=1, at=time.time() + 3600)
        wait_for(lambda: service.row(after)["waiting"].startswith(f"waiting for run {first}"), "the reason")
        wait_for(lambda: service.row(later)["waiting"].startswith("waiting until "), "the other reason")
        assert "cancelled" in ringctl("cancel", later).stdout
        assert service.row(later)["state"] == "cancelled"
        with pytest.raises(RingctlError, match="is not waiting"):
            service.client().post(f"/api/runs/{later}/cancel")
        (tmp_path / "go").touch()
        assert service.wait_for_state(after, "succeeded")["started"] > service.row(first)["ended"]


@pytest.mark.parametrize("what", ["cancel", "stop"])
@pytest.mark.parametrize("after_s", [0.0, 0.4])
def test_a_run_that_is_ended_while_it_starts_does_not_run(tmp_path: Path, what: str, after_s: float) -> None:
    with serving() as service:
        run = held(service, tmp_path / "go")
        service.wait_for_state(run, "starting", seconds=30)
        time.sleep(after_s)  # in whichever part of its launch that is
        ended = ("cancelled", "stopped")
        answer = service.raw("POST", f"/api/runs/{run}/{what}", b"{}")
        if what == "cancel" and answer.status == 409:  # it was quicker than we
            answer = service.raw("POST", f"/api/runs/{run}/stop", b"{}")
        assert answer.json["state"] in ended
        assert not launches(run)
        (tmp_path / "go").touch()
        again = service.submit("true", world=2)  # gets the slots, and starts after all that could
        service.wait_for_state(again, "succeeded")
        assert service.row(run)["state"] in ended
        assert service.lines(run) == []


def test_a_run_is_in_the_queue_and_among_all_runs_at_the_same_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(history, "enlist_in", killed)
        with pytest.raises(KeyboardInterrupt):
            queued.add("r1", "me", queued.Submission(("true",)))
    assert queued.rows() == []
    queued.add("r1", "me", queued.Submission(("true",)))
    with monkeypatch.context() as patch:
        patch.setattr(history, "mark_in", killed)
        with pytest.raises(KeyboardInterrupt):
            queued.conclude("r1", "queued", "cancelled")
    assert [row.state for row in queued.rows()] == ["queued"]
    assert queued.conclude("r1", "queued", "cancelled")
    assert history.state_of("r1") == "cancelled"


def test_what_a_launch_noted_is_no_complaint() -> None:
    assert queued.complaint("warning: the clocks differ\n") == ""
    said = "warning: the clocks differ\nerror: no such command\n  to do: write another\n"
    assert queued.complaint(said) == "no such command\n  to do: write another"


def test_a_host_that_is_silent_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".ssh").mkdir(mode=0o700)
    (tmp_path / ".ssh" / "config").write_text("Host *\n  ConnectTimeout 60\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hosts = tmp_path / "hosts.yaml"
        port = silent.getsockname()[1]
        hosts.write_text(
            "hosts:\n  - {name: here, local: true, slots: 2}\n"
            f"  - {{name: silent, address: 127.0.0.1, port: {port}}}\n"
        )
        with serving("--hosts", str(hosts)) as service:
            run = service.submit("true", world=2)
            service.wait_for_state(run, "succeeded", seconds=45)  # it is given up after sixty
            wait_for(lambda: free(service) == {"here": 2, "silent": 0}, "its slots to be free")


def free(service: Service) -> dict[str, int]:
    return {row["name"]: row["free"] for row in service.client().get("/api/hosts")["hosts"]}


def test_runs_that_share_their_slots_lie_on_top_of_each_other(tmp_path: Path) -> None:
    with serving() as service:
        runs = [held(service, tmp_path / "go", shared=True) for _ in range(2)]
        for run in runs:
            service.wait_for_state(run, "running")

        def taken() -> tuple[int, int, int]:
            (host,) = service.client().get("/api/hosts")["hosts"]
            return host["taken"], host["free"], len(host["runs"])

        wait_for(lambda: taken() == (2, 0, 2), "the host to tell of both")
        (tmp_path / "go").touch()


def test_slots_of_a_plain_launch_are_not_given_away(tmp_path: Path) -> None:
    with serving() as service:
        script = tmp_path / "held.py"
        script.write_text(HELD)
        options = ("--env", f"GO={tmp_path / 'go'}", "--no-prefork")
        run = detach([sys.executable, str(script)], world=1, options=options)
        wait_for(lambda: service.client().get("/api/hosts")["hosts"][0]["free"] == 1, "the host's word")
        waiting = held(service, tmp_path / "go", world=2)
        wait_for(lambda: "waiting for 1 slot on here" in service.row(waiting)["waiting"], "the reason")
        (tmp_path / "go").touch()
        service.wait_for_state(waiting, "succeeded")
        assert service.row(run)["state"] == "succeeded", "it is recorded as well"
        assert service.lines(run) == ["done 0"]


def test_a_plain_launch_that_starts_again_keeps_its_slots_and_whoever_is_to_come_after_it_waits(
    tmp_path: Path,
) -> None:
    script = tmp_path / "fails_once.py"
    script.write_text(f"import os\nif os.environ['RINGCTL_ATTEMPT'] == '1':\n    exit(1)\n{HELD}")
    with serving(slots=2) as service:
        options = ("--max-restarts", "1", "--restart-delay", "3", "--env", f"GO={tmp_path / 'go'}")
        run = detach([sys.executable, str(script)], world=1, options=options)
        after = service.submit("true", after=run, priority=1)
        other = service.submit("true", world=2)
        wait_for(lambda: service.row(after)["waiting"] == f"waiting for run {run} to end", "the reason")
        wait_for(lambda: service.row(other)["waiting"] == "waiting for 1 slot on here", "the other reason")
        (tmp_path / "go").touch()
        began = [service.wait_for_state(each, "succeeded")["started"] for each in (after, other)]
        assert (service.row(run)["state"], service.row(run)["attempt"]) == ("succeeded", 2)
        assert min(began) > service.row(run)["ended"]


# --- Ending --------------------------------------------------------------------------------------


def test_a_cancelled_run_is_ended_again_where_a_host_was_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [Done(4, "", "error: server1: does not answer"), Done(4, "", ""), Done(0, "{}", "")]
    asked: list[tuple[str, ...]] = []

    def hands(*args: str, **_: Any) -> Done:
        asked.append(args)
        return answers[len(asked) - 1]

    monkeypatch.setattr(keeper, "ringctl", hands)
    monkeypatch.setattr(keeper, "AGAIN_S", 0.01)
    changed: list[str] = []
    one = keeper.Keeper(this_machine(1), lambda _: None, changed.append)
    queued.add("r1", "ann", queued.Submission(world=1))
    assert queued.change("r1", "queued", "starting", slots={"here": 1}, cancelled=True)
    one.after_cancel("r1", started=True)
    one.look_at_launches()
    wait_for(lambda: changed == ["r1"], "its end")
    assert asked == [("stop", "r1", "--json")] * 3, "until it has worked, and by nobody else meanwhile"
    row = queued.row("r1")
    assert row is not None
    assert row.state == "started"


def test_a_silent_host_that_may_have_begun_with_a_run_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silent, asked = threading.Event(), []

    def ask(found: runs.Found, _pool: object) -> runs.Found:
        asked.append(found.run)
        assert silent.wait(30)
        return found

    changed: list[str] = []
    one = keeper.Keeper(this_machine(1), lambda _: None, changed.append)
    known = history.read(detach(["true"], world=1, options=("--no-prefork",)))
    assert known is not None
    monkeypatch.setattr(runs, "refreshed", ask)
    for run in ("r1", "r2"):
        queued.add(run, "ann", queued.Submission(world=1))
        assert queued.change(run, "queued", "starting", slots={"here": 1}, tries=keeper.MOST_TRIES)
    history.remember(replace(known.plan, run="r1"), known.inventory, known.options)  # and then it was killed
    for _ in range(2):
        one.look_at_launches()
    wait_for(lambda: asked == ["r1"], "the question, once")
    states = [row.state for run in ("r1", "r2") if (row := queued.row(run))]
    assert states == ["starting", "failed"]
    history.remember(replace(known.plan, run="r1", attempt=2), known.inventory, known.options)
    silent.set()
    wait_for(lambda: (row := queued.row("r1")) and row.state == "failed", "the end of it")
    assert history.state_of("r1") == "starting", "somebody has started it again without the service"
    wait_for(lambda: changed[-1:] == ["r1"], "the thread's end")


def test_a_run_is_stopped_and_started_again_by_the_command_line(tmp_path: Path) -> None:
    with serving() as service:
        run = held(service, tmp_path / "go", world=2)
        service.wait_for_state(run, "running")
        by = ("--server", service.url)
        ringctl(*by, "stop", run)
        assert service.wait_for_state(run, "stopped")["actions"] == ["restart"]
        ringctl(*by, "restart", run, "--detach")
        assert service.wait_for_state(run, "running")["attempt"] == 2
        (tmp_path / "go").touch()
        service.wait_for_state(run, "succeeded")
        assert sorted(ringctl(*by, "logs", run).stdout.splitlines()) == ["[0 here] done 0", "[1 here] done 1"]
        assert [row["run"] for row in json.loads(ringctl(*by, "ps", "--json").stdout)] == [run]
        assert json.loads(ringctl(*by, "status", "--json").stdout)["attempt"] == 2


def test_a_run_that_is_being_started_again_keeps_its_slots_whoever_asks_or_is_killed() -> None:
    with serving(slots=1) as service, ThreadPoolExecutor() as pool:
        run = service.submit("true", prefork=False)
        service.wait_for_state(run, "succeeded")
        first = pool.submit(service.raw, "POST", f"/api/runs/{run}/restart", b"{}")
        (pid,) = wait_for(lambda: processes("restart", run), "the restart")
        with stopped(pid):
            again = service.raw("POST", f"/api/runs/{run}/restart", b"{}")
            assert (again.status, "being started again already" in again.json["error"]) == (409, True)
            waiting = service.submit("true", prefork=False)
            wait_for(lambda: service.row(waiting)["waiting"] == "waiting for 1 slot on here", "the reason")
            service.kill()
            assert isinstance(first.exception(timeout=30), OSError | http.client.HTTPException)
            service.start()
            other = service.submit("true", prefork=False)
            wait_for(lambda: service.row(other)["waiting"] == "waiting for 1 slot on here", "a decision")
            assert service.row(waiting)["state"] == "queued"
        started = service.wait_for_state(waiting, "succeeded")["started"]
        assert (service.row(run)["attempt"], service.row(run)["state"]) == (2, "succeeded")
        assert started > service.row(run)["ended"]
        assert list(reserving.folder().iterdir()) == []


def test_a_restart_is_brought_to_its_end_whatever_it_has_to_say_when_the_service_is_killed(
    tmp_path: Path,
) -> None:
    go = tmp_path / "go"
    talks = "print('a word on stderr', file=sys.stderr, flush=True); print('and one here', flush=True); "
    before = f"{slow('restart', go)}\nc.WATCHER = c.WATCHER.replace('del sys', {talks + 'del sys'!r})"
    with serving(before=before) as service, ThreadPoolExecutor() as pool:
        run = service.submit("sleep", "1000", prefork=False)
        service.wait_for_state(run, "running")
        asked = pool.submit(service.raw, "POST", f"/api/runs/{run}/restart", b"{}")
        wait_for(lambda: list(tmp_path.glob("go?*")), "the restart")
        service.kill()
        assert isinstance(asked.exception(timeout=30), OSError | http.client.HTTPException)
        go.touch()
        wait_for(lambda: not processes("restart", run), "its end")
        assert (state(run)["attempt"], state(run)["state"]) == (2, "running")
        service.start()


def test_a_restart_is_interrupted_also_by_a_service_that_has_not_begun_it() -> None:
    held = reserving.reserve(schedule.Taken("r1", {"here": 1}, shared=True, user="ann"), {"there": 2})
    assert held.descriptor is not None
    waits = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(waits, pass_fds=[held.descriptor], stderr=subprocess.DEVNULL) as process:
        try:
            held.begun(process)
            held.let_go()  # as if we were killed
            (found,) = reserving.left()
            assert found.taken == held.taken
            assert reserving.rooms("r1") == {"there": 2}
            assert found.interrupt()
            assert process.wait(timeout=30) != 0
        finally:
            process.kill()
    assert not found.interrupt(), "the number may be somebody else's by now"
    assert reserving.rooms("r1") == {}
    assert (list(reserving.left()), list(reserving.folder().iterdir())) == ([], [])


def test_a_run_that_is_stopped_while_it_is_started_again_does_not_go_on(tmp_path: Path) -> None:
    with serving() as service, ThreadPoolExecutor() as pool:
        run = held(service, tmp_path / "go", world=1)
        service.wait_for_state(run, "running")
        again = pool.submit(service.raw, "POST", f"/api/runs/{run}/restart", b"{}")
        (pid,) = wait_for(lambda: processes("restart", run), "the restart")
        with stopped(pid):
            stop = pool.submit(service.raw, "POST", f"/api/runs/{run}/stop", b"{}")
            wait_for(lambda: stop.done() or is_interrupted(pid), "the stop")
        assert (stop.result().status, stop.result().json["state"]) == (200, "stopped")
        assert again.result().status in (200, 409)
        assert not processes("restart", run)
        assert service.row(run)["state"] == "stopped"


def test_a_run_that_shares_starts_again_beside_others_and_has_no_more_slots_than_ranks(
    tmp_path: Path,
) -> None:
    with serving(slots=2) as service:
        (tmp_path / "go").touch()
        run = held(service, tmp_path / "go", shared=True)
        service.wait_for_state(run, "succeeded")
        (tmp_path / "go").unlink()
        other = held(service, tmp_path / "go", shared=True)
        service.wait_for_state(other, "running")
        answer = service.raw("POST", f"/api/runs/{run}/restart", b'{"world": 1}')
        assert answer.status == 200, answer.body
        service.wait_for_state(run, "running")
        (host,) = service.client().get("/api/hosts")["hosts"]
        assert {each["run"]: each["slots"] for each in host["runs"]} == {run: 1, other: 2}
        (tmp_path / "go").touch()


def test_a_run_is_not_started_again_on_slots_that_somebody_has_just_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(slots=1, before="from launcher.serve import keeper; keeper.HOSTS_S = 600.0") as service:
        run = service.submit("true", prefork=False)
        service.wait_for_state(run, "succeeded")
        wait_for(lambda: not still_recorded(service, run), "its slots to be free")
        with monkeypatch.context() as elsewhere:
            elsewhere.setenv("RINGCTL_HOME", str(tmp_path / "other"))
            options = ("--env", f"GO={tmp_path / 'go'}", "--no-prefork")
            other = detach([sys.executable, "-c", HELD], world=1, options=options)
            there = run_folder(other)
        answer = service.raw("POST", f"/api/runs/{run}/restart", b"{}")
        (tmp_path / "go").touch()
        wait_for(lambda: '"succeeded"' in (there / "state.json").read_text(), "the end of it")
        assert (answer.status, answer.json["error"]) == (409, f"here: its slots are taken by {other}")


def test_a_restart_that_has_just_begun_keeps_its_run_from_being_forgotten_and_the_host_has_the_last_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = tmp_path / "begin"
    run = detach(["true"], world=1, options=("--no-prefork",))
    with serving(slots=1, before=slow("restart", begin)) as service, ThreadPoolExecutor() as pool:
        service.wait_for_state(run, "succeeded")
        wait_for(lambda: not still_recorded(service, run), "its slots to be free")
        again = pool.submit(service.raw, "POST", f"/api/runs/{run}/restart", b"{}")
        wait_for(lambda: list(tmp_path.glob("begin*")), "the restart")
        assert "nothing to forget" in ringctl("runs", "prune", "--keep", "0", "--yes").stdout
        with monkeypatch.context() as elsewhere:
            elsewhere.setenv("RINGCTL_HOME", str(tmp_path / "other"))
            options = ("--env", f"GO={tmp_path / 'go'}", "--no-prefork")
            other = detach([sys.executable, "-c", HELD], world=1, options=options)  # which asks nobody
            there = run_folder(other)
        begin.touch()
        answer = again.result()
        (tmp_path / "go").touch()
        wait_for(lambda: '"succeeded"' in (there / "state.json").read_text(), "the end of it")
        why = f"localhost: no room for it by now: 1 of 1 slot is taken by run {other} of user "
        assert (answer.status, answer.json["error"].startswith(why)) == (409, True), answer.json
        assert (service.row(run)["attempt"], service.row(run)["state"]) == (1, "succeeded")


def test_readers_of_a_run_that_somebody_is_about_to_start_again_wait_for_that() -> None:
    one = keeper.Keeper(this_machine(1), lambda _: None, lambda _: None)
    with watching.Again("r"):
        assert one.is_busy("r")
    assert not one.is_busy("r")


def test_a_run_that_was_forgotten_meanwhile_is_not_started_again() -> None:
    run = detach(["true"], world=1, options=("--no-prefork",))
    wait_for(lambda: json.loads(ringctl("status", run, "--json").stdout)["state"] == "succeeded", "its end")
    argv = [*RINGCTL[:-1], FORGETS.format(run=run) + RINGCTL[-1]]
    done = subprocess.run([*argv, "restart", run], capture_output=True, text=True, check=False)
    assert (done.returncode, "was forgotten by somebody else" in done.stderr) == (1, True), done
    assert history.read(run) is None


def test_an_attempt_waits_for_slots_that_others_have_taken_and_uses_up_no_restart(tmp_path: Path) -> None:
    script = f"{HELD}\nif os.environ['RINGCTL_ATTEMPT'] == '1':\n    raise SystemExit(1)"
    variables = {"GO": str(tmp_path / "go")}
    with serving(slots=1) as service:
        again = {"max_restarts": 1, "restart_delay": 0.1, "prefork": False}
        run = service.submit(sys.executable, "-c", script, variables=variables, **again)
        service.wait_for_state(run, "running")
        options = ("--env", f"GO={tmp_path / 'done'}", "--no-prefork")
        other = detach([sys.executable, "-c", HELD], world=1, options=options)  # which asks nobody
        (tmp_path / "go").touch()
        why = (
            f"attempt 2 waits for its slots: here: no room for it by now: 1 of 1 slot is taken by run {other}"
        )
        wait_for(lambda: why in (service.row(run)["watched"] or ""), "the reason")
        assert service.row(run)["attempt"] == 1
        (tmp_path / "done").touch()
        assert service.wait_for_state(run, "succeeded")["attempt"] == 2
        assert service.row(run)["started"] > service.wait_for_state(other, "succeeded")["ended"]


def test_runs_that_users_stop_and_those_that_the_keeper_ends_do_not_wait_for_each_other() -> None:
    run = detach(["true"], world=1, options=("--no-prefork",))
    one = keeper.Keeper(this_machine(1), lambda _: None, lambda _: None)
    with all_of(children.CHANGES):
        assert one.has_ended(run)
    with all_of(children.ENDS):
        assert children.ringctl("stop", run, "--json").code == 0


def test_what_changes_something_and_takes_too_long_ends_what_it_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    begun = f"touch {tmp_path / 'begun'}; sleep 600"
    launch = ("launch", "--local", "--world", "1", "--no-prefork", "--", "sh", "-c", begun)
    with pytest.raises(RingctlError, match="took longer than 8 s and was ended"):
        children.ringctl(*launch, seconds=8.0)
    assert (tmp_path / "begun").exists()
    assert [row["state"] for row in json.loads(ringctl("ps", "--json").stdout)] == ["stopped"]


def test_a_run_that_ended_before_its_killed_launch_could_say_so_has_begun() -> None:
    run = detach(["true"], world=1, options=("--no-prefork",))
    wait_for(lambda: "succeeded" in ringctl("status", run).stdout, "its end to be known here")
    record = history.read(run)
    assert record is not None
    assert keeper.Keeper(this_machine(1), lambda _: None, lambda _: None).has_begun(record)


def test_a_run_of_which_a_host_that_is_silent_may_know_has_neither_begun_nor_failed() -> None:
    """Its secrets are still needed: to hide them in its log, and to start it again."""
    run = detach(["sleep", "600"], world=1, options=("--no-prefork",))
    record = history.read(run)
    assert record is not None
    one = keeper.Keeper(this_machine(1), lambda _: None, lambda _: None)
    assert one.has_begun(record) is True
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        away = Host("localhost", "127.0.0.1", port=nobody.getsockname()[1])
    assert one.has_begun(replace(record, hosts=(away,))) is None
    queued.add(run, "root", Submission(secrets={"KEY": "a"}))
    queued.write_secrets(run, {"KEY": "a"})
    queued.change(run, "queued", "starting")
    assert queued.conclude(run, "starting", "failed", "no answer")
    assert queued.env_file(run).exists()
    ringctl("stop", run)


def test_a_queue_outlives_a_start_with_too_few_slots() -> None:
    with serving(slots=2) as service:
        run = service.submit("true", world=2, at=time.time() + 2, prefork=False)
        service.kill()
        small = Service(slots=1).start()
        try:
            wait_for(lambda: small.row(run)["waiting"] == "needs 2 slots; the hosts have 1", "the reason")
        finally:
            small.stop()
        Service(slots=2)  # its inventory, as it was
        service.start()
        service.wait_for_state(run, "succeeded")


AGAIN = "import os; n = os.environ['RINGCTL_ATTEMPT']; print('attempt', n); exit(n == '1')"


def waits_again(service: Service, **more: Any) -> str:
    """A run that has failed and is about to start again."""
    run = service.submit(sys.executable, "-c", AGAIN, world=2, max_restarts=1, prefork=False, **more)
    wait_for(lambda: "attempt 2 begins" in (service.row(run)["watched"] or ""), "its back-off")
    return run


def test_a_service_that_is_killed_between_two_attempts_tells_nobody_that_the_run_is_over() -> None:
    with serving() as service:
        run = waits_again(service, restart_delay=10)
        service.kill()
        service.start()
        [host] = service.client().get("/api/hosts")["hosts"]
        assert [(row["run"], row["slots"]) for row in host["runs"]] == [(run, 2)]
        done = ringctl("--server", service.url, "logs", run, "--follow", "--no-prefix")
        assert done.stdout.splitlines() == ["attempt 1"] * 2 + ["attempt 2"] * 2


def test_a_service_replaces_a_watcher_that_was_killed() -> None:
    with serving() as service:
        run = waits_again(service, restart_delay=5)
        watch = watching.read(run)
        assert watch is not None
        os.kill(watch.pid, signal.SIGKILL)
        assert service.wait_for_state(run, "succeeded")["attempt"] == 2


@contextlib.contextmanager
def all_of(hands: threading.BoundedSemaphore) -> Iterator[None]:
    """Somebody has them, as if hosts were silent."""
    count = 0
    while hands.acquire(blocking=False):
        count += 1
    try:
        yield
    finally:
        hands.release(count)


def is_interrupted(pid: int) -> bool:
    """Whether a process that is stopped will get SIGINT."""
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(status["ShdPnd"], 16) & 1 << signal.SIGINT - 1)


def test_a_run_that_fails_starts_again_by_itself_and_keeps_its_slots() -> None:
    script = "import os; n = os.environ['RINGCTL_ATTEMPT']; print('attempt', n); exit(n == '1')"
    with serving() as service:
        again = {"max_restarts": 2, "restart_delay": 0.5, "prefork": False}
        run = service.submit(sys.executable, "-c", script, world=2, **again)
        after = service.submit(sys.executable, "-c", "print('after')", world=2, prefork=False)
        found = service.wait_for_state(after, "succeeded")
        first = service.row(run)
        assert (first["state"], first["attempt"]) == ("succeeded", 2)
        assert [each["state"] for each in first["attempts"]] == ["failed", "succeeded"]
        assert found["started"] > first["ended"], "nobody else had its slots in between"
        assert sorted(service.lines(run)) == ["attempt 1", "attempt 1", "attempt 2", "attempt 2"]


def test_a_service_started_where_another_is_named_works_on_its_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGCTL_SERVER", "http://127.0.0.1:1")
    with serving() as service:
        run = held(service, tmp_path / "go", world=1)
        service.wait_for_state(run, "running")
        service.client().post(f"/api/runs/{run}/stop")
        service.wait_for_state(run, "stopped")


def test_others_may_not_stop_what_is_not_theirs(tmp_path: Path) -> None:
    with serving() as service:
        run = held(service, tmp_path / "go", world=1)
        token = ringctl("serve", "token", "add", "bob").stdout.strip()
        assert service.raw("POST", f"/api/runs/{run}/stop", b"{}", token=token).status == 403
        answer = service.raw("POST", "/api/submit", json.dumps({"command": ["x"]}).encode(), token=token)
        assert (answer.status, answer.json["user"]) == (201, "bob")
        assert service.raw("POST", f"/api/runs/{answer.json['run']}/stop", b"{}", token=token).status in (
            200,
            400,
            409,
        )
        (tmp_path / "go").touch()
        service.wait_for_state(run, "succeeded")


# --- Killed --------------------------------------------------------------------------------------


def test_a_service_that_is_killed_at_ten_random_moments_loses_no_run_no_line_and_no_metric() -> None:
    chance, count, runs = random.Random(7), 250, list[str]()
    with serving(slots=4) as service:
        for kill in range(10):
            if kill % 3 == 0:
                variables = {"LINES": str(count)}
                command = (sys.executable, "-u", "-c", COUNTS)
                runs.append(service.submit(*command, world=2, variables=variables, prefork=False))
            time.sleep(chance.uniform(0.0, 0.6))
            service.kill()
            service.start()
            assert len(service.client().get("/api/runs")["runs"]) == len(runs)
        for run in runs:
            service.wait_for_state(run, "succeeded", seconds=90)
            wait_for(lambda run=run: not still_recorded(service, run), "all of it")  # type: ignore[misc]  # bound
            there = events(run)
            for rank in (0, 1):
                assert printed(service, run, rank) == lines(there, rank) == [*counted(count, rank)]
            series = service.client().get(f"/api/runs/{run}/metrics", points=5000)["series"]
            assert {each["rank"]: each["step"] for each in series} == {
                rank: [each["step"] for each in there if each["kind"] == "metric" and each["rank"] == rank]
                for rank in (0, 1)
            }
            assert [len(each["step"]) for each in series] == [count, count]


def still_recorded(service: Service, run: str) -> bool:
    """Whether its stream goes on: it ends when nothing more can come."""
    there = service.client()
    return [name for name, _, _ in there.stream(there.run(run, "/stream"))][-1] != "end"


def printed(service: Service, run: str, rank: int) -> list[str]:
    """What was recorded of one rank, in its order."""
    page = service.client().get(f"/api/runs/{run}/log", after=0, limit=5000, rank=rank)
    assert not page["more"]
    return [line[6] for line in page["lines"]]


def counted(count: int, rank: int) -> Iterator[str]:
    return (f"line {number} of {rank}" for number in range(count))


def test_a_launch_that_is_killed_is_begun_again(tmp_path: Path) -> None:
    with serving() as service:
        run = held(service, tmp_path / "go", world=1)
        lock = Path(os.environ["RINGCTL_HOME"]) / "serve" / "runs" / run / "inventory.json"
        wait_for(lock.exists, "the launch")
        for pid in launches(run):
            os.kill(pid, signal.SIGKILL)
        (tmp_path / "go").touch()
        service.wait_for_state(run, "succeeded")
        wait_for(lambda: service.lines(run) == ["done 0"], "its line, once")


def launches(run: str) -> list[int]:
    return processes("start-queued", run)


def processes(command: str, run: str) -> list[int]:
    """Those of ringctl that do this with the run."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if command.encode() in words and run.encode() in words:
            found.append(int(pid))
    return found
