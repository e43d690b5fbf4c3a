"""`ringctl --server URL`: every command asks the service, or says what to do instead."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest

from launcher import (
    cli,
    cli_history,
    cli_remote,
    cli_remote_logs,
    cli_remote_runs,
    cli_submit,
    client,
    fold,
    history,
    logs,
    recorder,
    showlogs,
    tape,
    watching,
)
from launcher.cli_remote_logs import AT_ONCE
from launcher.model import Event, Host, Inventory
from launcher.plan import LaunchOptions
from launcher.serve import children
from launcher.watch import Outcome
from tests.launcher.ringctl import RINGCTL, detach, launch, ringctl, wait_for, wait_until_final
from tests.launcher.serve.service import Service, serving
from tests.launcher.test_tape import PLAN
from tests.launcher.test_terminals import Terminal

SPEAKS = """
import json, os, sys, time
n, rank = os.environ["RINGCTL_ATTEMPT"], os.environ["RANK"]
told = {"epoch": 1, "epochs": 3, "step": 7, "steps": 9, "loss": 0.123456, "accuracy": 0.875, "step_ms": 10.0}
told |= {"id": "exp-7", "data": [1], "comm_ms": 2.5, "samples_per_s": 1234.5, "bytes_sent": 98765432}
with open(os.environ["RINGCTL_METRICS"], "a") as file:
    print(json.dumps(told), file=file)
print(f"attempt {n} of {rank}"); print(f"\\033[31mer\\033[0mror {n}"); print("aside", file=sys.stderr)
sys.exit(n == "1")
"""
WAITS = """
import os, sys, time
print("here", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def spoken(door: Service) -> Iterator[tuple[Service, str]]:
    """A run of two ranks that failed once, at a service that nobody else changes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RINGCTL_HOME", str(Path(door.folder) / "ringctl"))
        again = {"max_restarts": 1, "restart_delay": 0.1, "prefork": False, "name": "spoken"}
        run = door.submit(sys.executable, "-c", SPEAKS, world=2, **again)
        door.wait_for_state(run, "succeeded")
        wait_for(lambda: len(door.lines(run)) == 12, "all lines")
        yield door, run


def asked(service: Service, *words: str, code: int = 0) -> str:
    return ringctl("--server", service.url, *words, code=code).stdout


# --- All commands --------------------------------------------------------------------------------


def options(command: click.Command) -> set[str]:
    """All names of all options, and of arguments."""
    return {name for param in command.params for name in (*param.opts, *param.secondary_opts)}


def shown_options(command: click.Command) -> set[str]:
    """Those that are for users."""
    hidden = {name for param in command.params if getattr(param, "hidden", False) for name in param.opts}
    return options(command) - hidden


def test_launch_and_submit_take_the_same_options() -> None:
    own = {"--local", "--detach", "-d", "--dry-run", "--commands", "--verbose", "-v"}
    queue = {"--priority", "--after", "--at", "--wait", "-w", "--follow", "-f"}
    assert options(cli.launch) - own == options(cli_submit.submit) - queue
    told = {"include", "exclude", "command", "variables", "env_file", "as_json"}
    shared = {p.name: (p.type, p.default) for p in cli.launch.params if p.name not in told}
    other = {p.name: (p.type, p.default) for p in cli_submit.submit.params}
    for name, about in shared.items():
        assert other.get(name, about)[1] == about[1], f"{name} has another default"


def test_every_command_has_a_version_for_services_or_a_sentence() -> None:
    for name, plain in cli.cli.commands.items():
        if name in cli_remote.WITHOUT:
            continue
        assert (name in cli_remote.COMMANDS) != (name in cli_remote.REFUSED), name
        there = cli_remote.COMMANDS.get(name)
        if isinstance(plain, click.Group) and there is not None:
            assert isinstance(there, click.Group)
            for sub, own in plain.commands.items():
                assert shown_options(own) <= options(there.commands[sub]), f"{name} {sub}"
        elif there is not None:
            assert shown_options(plain) <= options(there), name


def test_what_a_service_cannot_do_is_said_with_what_to_do(at_the_door: Service) -> None:
    for name, instead in cli_remote.REFUSED.items():
        done = ringctl("--server", at_the_door.url, name, code=2)
        assert f"{name} works on the hosts, not by a service" in done.stderr
        assert instead in done.stderr
    for words in (("launch", "--local"), ("launch", "--dry-run"), ("ps", "-H", "x"), ("preflight", "--fix")):
        done = ringctl("--server", at_the_door.url, *words, code=2)
        assert f"{words[1]}: " in done.stderr
        assert "leave it out" in done.stderr
    assert "Hand in a run" in ringctl("--server", at_the_door.url, "launch", "--help").stdout


# --- logs ----------------------------------------------------------------------------------------


def test_lines_are_chosen_as_without_a_service(spoken: tuple[Service, str], at_the_door: Service) -> None:
    service, run = spoken
    assert at_the_door is service

    def shown(*words: str) -> list[str]:
        return sorted(asked(service, "logs", run, *words).splitlines())

    assert shown("--rank", "0,1", "--grep", "^attempt") == [
        "[0 here] attempt 2 of 0",
        "[1 here] attempt 2 of 1",
    ]
    assert shown("--grep", "^error 2$", "--no-prefix", "--rank", "1") == ["\x1b[31mer\x1b[0mror 2"]
    assert len(shown()) == 6, "the newest attempt alone"
    assert len(shown("--tail", "4")) == 4
    assert len(shown("--tail", "1", "--grep", "^attempt", "--rank", "0-1")) == 1
    assert shown("--previous", "--rank", "0", "--grep", "attempt") == ["[0 here] attempt 1 of 0"]
    for more in ((), ("--rank", "0"), ("--rank", "0,1"), ("--since", "1h")):
        tail = ringctl("logs", run, "--previous", *more, "--tail", "2").stdout.splitlines()
        assert (len(tail), shown("--previous", *more, "--tail", "2")) == (2, sorted(tail))
    assert len(shown("--since", "1h")) == 6
    assert shown("--since", "2999-01-01T00:00") == []
    assert shown("--timestamps", "--rank", "0", "--grep", "aside")[0][2:3] == ":"
    assert len(shown("--follow")) == 6
    assert len(shown("--follow", "--tail", "2")) == 2
    for wrong in (("--rank", "7"), ("--host", "there")):
        assert (
            f"{wrong[0]} {wrong[1]}: " in ringctl("--server", service.url, "logs", run, *wrong, code=2).stderr
        )


@pytest.mark.parametrize("tail", [0, 2])
@pytest.mark.parametrize("as_json", [False, True])
def test_an_attempt_that_begins_while_the_last_lines_are_looked_for_is_followed_from_its_first_line(
    spoken: tuple[Service, str],
    at_the_door: Service,
    capfd: pytest.CaptureFixture[str],
    tail: int,
    as_json: bool,
) -> None:
    run, look = spoken[1], showlogs.Look(as_json=as_json, prefix=True, timestamps=False, tail=tail)
    second = asked(at_the_door, "logs", run, *["--json"] * as_json).splitlines()
    cli_remote_logs.follow_run(at_the_door.client(), run, look=look, since=1)
    shown = capfd.readouterr().out.splitlines()
    assert (shown[tail:], len(shown)) == (second, tail + len(second))


def test_lines_since_a_moment_are_shown_also_if_a_host_brought_older_ones_after_them() -> None:
    history.remember(
        PLAN, Inventory((Host("h0"), Host("h1")), "h0"), LaunchOptions(PLAN.run, "", ("true",), "/")
    )
    state, now = replace(fold.initial(PLAN), state="failed"), time.time()

    def said(when: float, rank: int, text: str) -> Event:
        return Event("line", when, PLAN.run, 1, f"h{rank}", rank, {"stream": "out", "text": text})

    with tape.Tape(PLAN.run) as book:
        book.append([said(now, 0, "new"), *[said(now - 7200, 1, "old")] * AT_ONCE], 1, {}, state)
        book.append([said(now, 1, "new too")], 1, {}, state)
        book.finish(Outcome(state, None))
    history.mark(PLAN.run, "failed", error="", attempt=1)
    with serving() as service:
        assert asked(service, "logs", PLAN.run, "--since", "1h") == "[0 h0] new\n[1 h1] new too\n"


class Outrun(client.Client):
    """Of a run that says more than can be read."""

    pages = 0

    def get(self, path: str, **query: Any) -> Any:
        answer = super().get(path, **query)
        if query.get("after") is not None:
            self.pages += 1
            assert self.pages < 9, "this never ends"
            line = Event("line", time.time(), PLAN.run, 1, "h0", 0, {"stream": "out", "text": "more"})
            with tape.Tape(PLAN.run) as book:
                book.append([line] * 2 * AT_ONCE, 1, {}, replace(fold.initial(PLAN), state="failed"))
        return answer


@pytest.mark.parametrize(
    "how", ["logs", "logs --json", "logs --tail", "logs --download", "export", "own export"]
)
def test_a_log_as_far_as_it_goes_comes_to_an_end_while_the_run_goes_on(how: str, tmp_path: Path) -> None:
    history.remember(
        PLAN, Inventory((Host("h0"), Host("h1")), "h0"), LaunchOptions(PLAN.run, "", ("true",), "/")
    )
    history.mark(PLAN.run, "failed", error="", attempt=1)  # which nobody has to end
    look = showlogs.Look(
        how.endswith("json"), prefix=True, timestamps=False, tail=2 if "tail" in how else None
    )
    with serving() as service:
        there = Outrun(service.url, service.token)
        there.get(there.run(PLAN.run, "/events"), after=0)  # there is something
        if how == "export":
            assert 0 < len(list(cli_remote_runs.events_of(there, PLAN.run))) <= 2 * AT_ONCE + 1
        elif how == "own export":
            for told in cli_history.events_of(PLAN.run):
                if told["id"] % AT_ONCE == 0:
                    there.get(there.run(PLAN.run, "/events"), after=0)
        elif how.endswith("download"):
            cli_remote_logs.save(there, there.find(PLAN.run), tmp_path, 1)
        else:
            cli_remote_logs.show(there, PLAN.run, logs.EVERYTHING, look, 1)
    assert there.pages > 1


def record_two_attempts(gaps: Collection[int] = ()) -> None:
    """Both on two hosts, of which the first has lost lines. Where there are `gaps`, one was not heard."""
    shown = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    hosts = tuple(
        replace(host, ranks=tuple(replace(rank, env=shown) for rank in host.ranks)) for host in PLAN.hosts
    )
    plans = [replace(PLAN, attempt=attempt, hosts=hosts) for attempt in (1, 2)]
    for plan in plans:
        options = LaunchOptions(plan.run, "", ("true",), "/", attempt=plan.attempt)
        history.remember(plan, Inventory((Host("h0"), Host("h1")), "h0"), options)

    def ended(attempt: int, host: str, unwritten: int) -> Event:
        data = {"state": "failed", "left": [], "unwritten": unwritten}
        return Event("host_finished", time.time(), PLAN.run, attempt, host, None, data)

    with tape.Tape(PLAN.run) as book:
        for plan in plans:
            line = {"stream": "out", "text": f"attempt {plan.attempt}"}
            said = Event("line", time.time(), PLAN.run, plan.attempt, "h0", 0, line)
            last = [ended(plan.attempt, "h0", 16 + plan.attempt), ended(plan.attempt, "h1", 0)]
            state = fold.fold(replace(fold.initial(plan), state="failed", started=1.0), last[0])
            book.append([said, *last], plan.attempt, {}, state)
            book.finish(Outcome(state, None), gap=plan.attempt in gaps)
    history.mark(PLAN.run, "failed", error="", attempt=2)


def test_lines_that_are_lost_are_told_to_whoever_reads_the_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    record_two_attempts()
    first, second = (
        f"h0: {count} lines of its log are lost: they could not be written down\n" for count in (17, 18)
    )
    with serving() as service:
        for words in ((), ("--json",), ("--tail", "1"), ("--follow",), ("--follow", "--tail", "1", "--json")):
            told = ringctl("--server", service.url, "logs", PLAN.run, *words).stderr
            assert (told.count(second), first in told) == (1, False), words
        told = ringctl("--server", service.url, "logs", PLAN.run, "--previous").stderr
        assert (told.count(first), second in told) == (1, False)
        told = ringctl("--server", service.url, "logs", PLAN.run, "--download", str(tmp_path)).stderr
        assert told == second
        assert second in asked(service, "status", PLAN.run)
        assert "lines of the log that are lost | h0: 18 |" in asked(service, "report", PLAN.run, "--markdown")
        capfd.readouterr()
        cli_remote_logs.attached(service.client(), PLAN.run, as_json=False)
        told = "".join(capfd.readouterr())
        assert (told.count(first), told.count(second)) == (1, 1)


def test_a_log_of_which_a_host_has_more_is_told_to_be_no_whole_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    record_two_attempts(gaps=(1,))
    missing = "attempt 1: part of its log is missing: a host that has it could not be heard or read\n"
    previous = ("logs", PLAN.run, "--previous")
    with serving() as service:
        there = ("--server", service.url)
        for words in ((), ("--json",), ("--download", str(tmp_path))):
            told = ringctl(*there, *previous, *words, code=4).stderr
            assert told.count(missing) == 1, words
        for words in ((), ("--follow",)):
            assert missing not in ringctl(*there, "logs", PLAN.run, *words).stderr, (
                "of the second all is there"
            )
        made = ringctl(*there, "report", PLAN.run, "--markdown", code=4)
        assert ("part of its log is missing" in made.stdout, made.stderr) == (True, missing)
        capfd.readouterr()
        cli_remote_logs.attached(service.client(), PLAN.run, as_json=False)
        assert "".join(capfd.readouterr()).count(missing) == 1
        assert f"{PLAN.run}, {missing}" in ringctl(*there, "runs", "export", PLAN.run, code=4).stderr
    exported = ringctl("runs", "export", PLAN.run, code=4)
    assert exported.stderr == f"run {PLAN.run}, {missing}"
    told = json.loads(exported.stdout.splitlines()[0])["attempts"]
    assert [(each["gap"], each["recorded"]) for each in told] == [(True, "gap"), (False, "whole")]


def test_whoever_follows_a_log_of_which_a_host_has_more_is_told_in_the_end() -> None:
    record_two_attempts(gaps=(2,))
    with serving() as service:
        told = ringctl("--server", service.url, "logs", PLAN.run, "--follow", code=4).stderr
    assert told.count("attempt 2: part of its log is missing") == 1


def test_a_log_that_is_not_recorded_to_its_end_yet_is_not_shown_as_a_whole_one(tmp_path: Path) -> None:
    run = detach([sys.executable, "-c", WAITS + "print('there')", str(tmp_path / "go")], world=1)
    stop = threading.Event()
    recording = threading.Thread(target=recorder.Recorder(run, stop=stop).record)
    recording.start()
    wait_for(lambda: tape.lines(run).lines, "its first line")
    stop.set()
    recording.join(10)
    assert ringctl("runs", "export", run).stderr == "", "of a run that goes on there is more to come"
    (tmp_path / "go").touch()
    wait_until_final(run)
    ringctl("status", run)
    part = "attempt 1: only part of its log is recorded so far\n  to do: look again in a moment, or ask"
    assert f"run {run}, {part}" in ringctl("runs", "export", run, code=4).stderr
    with contextlib.ExitStack() as held:
        held.enter_context(watching.lock(run, "recording"))  # so that it takes long
        service = held.enter_context(serving())
        there = ("--server", service.url)
        done = ringctl(*there, "logs", run, code=4)
        assert (done.stdout, part in done.stderr) == ("[0 localhost] here\n", True)
        assert part in ringctl(*there, "logs", run, "--download", str(tmp_path / "a"), code=4).stderr
        assert part in ringctl("report", run, "--json", code=4).stderr
        assert part in ringctl(*there, "report", run, "--json", code=4).stderr
    with serving() as service:
        wait_for(lambda: tape.is_recorded(run, 1), "the rest of it")
        for words in (("logs", run), ("report", run, "--json"), ("runs", "export", run)):
            assert "so far" not in ringctl("--server", service.url, *words).stderr
        assert asked(service, "logs", run) == "[0 localhost] here\n[0 localhost] there\n"


def test_a_log_that_nobody_has_recorded_is_not_shown_as_an_empty_one() -> None:
    run = launch(["echo", "here"], world=1)[-1]["run"]
    record = history.read(run)
    assert record is not None
    assert record.end is not None
    history.write(replace(record, end=replace(record.end, ended=time.time() - 2 * recorder.LATELY_S)))
    unrecorded = "attempt 1: its log is not recorded\n  to do: "
    with serving() as service:
        there = ("--server", service.url)
        assert unrecorded in ringctl(*there, "logs", run, code=4).stderr
        assert unrecorded in ringctl("runs", "export", run).stderr, "which holds what is recorded"
        assert ringctl("report", run, "--json").stderr == "", "whoever makes a report has the hosts asked"
        assert asked(service, "logs", run) == "[0 localhost] here\n"


def test_events_and_files_are_as_without_a_service(
    spoken: tuple[Service, str], at_the_door: Service, tmp_path: Path
) -> None:
    service, run = spoken
    for words in ((), ("--previous",), ("--tail", "3")):
        here = ringctl("logs", run, "--json", *words).stdout.splitlines()
        there = asked(service, "logs", run, "--json", *words).splitlines()
        assert sorted(str(json.loads(line)) for line in there) == sorted(
            str(json.loads(line)) for line in here
        ), words
    followed = [json.loads(line) for line in asked(service, "logs", run, "--json", "--follow").splitlines()]
    assert {"line", "rank_started", "rank_exited", "run_finished"} <= {each["kind"] for each in followed}
    assert at_the_door is service
    ringctl("logs", run, "--download", str(tmp_path / "here"))
    asked(service, "logs", run, "--download", str(tmp_path / "there"))
    for path in (tmp_path / "here" / run).iterdir():
        other = tmp_path / "there" / run / path.name
        assert (other.parent.stat().st_mode & 0o777, other.stat().st_mode & 0o777) == (0o700, 0o600)
        assert sorted(other.read_bytes().splitlines()) == sorted(path.read_bytes().splitlines()), path.name
    assert (
        "is there already"
        in ringctl("--server", service.url, "logs", run, "--download", str(tmp_path / "there"), code=2).stderr
    )


def test_a_number_of_which_no_host_knows_is_not_the_attempt_before() -> None:
    first, newest = (replace(fold.initial(PLAN), attempt=n, state="failed", started=1.0) for n in (1, 4))
    started_nowhere = [
        fold.as_lost(replace(first, attempt=2, started=None, ranks={})),
        replace(first, attempt=3, started=None),
    ]
    options = LaunchOptions(PLAN.run, "", ("true",), "/", attempt=4)
    history.remember(replace(PLAN, attempt=4), Inventory((Host("h0"), Host("h1")), "h0"), options)
    with tape.Tape(PLAN.run) as book:
        for state in (first, *started_nowhere, newest):
            line = {"stream": "out", "text": f"attempt {state.attempt}"}
            said = [Event("line", 1.0, PLAN.run, state.attempt, "h0", 0, line)] if state.started else []
            book.append(said, state.attempt, {}, state)
            book.finish(Outcome(state, None))
    history.mark(PLAN.run, "failed", error="", attempt=4)
    with serving() as service:
        assert asked(service, "logs", PLAN.run, "--previous", "--no-prefix") == "attempt 1\n"


def test_how_a_run_is_and_how_it_ended_is_told_as_without_a_service(
    spoken: tuple[Service, str], at_the_door: Service
) -> None:
    service, run = spoken
    assert at_the_door is service
    failed = service.submit(sys.executable, "-c", "def f():\n    raise ValueError('odd')\nf()", name="odd")
    service.wait_for_state(failed, "failed")
    for each in (run, failed):
        for words in (("status", each), ("status", each, "--json"), ("logs", each)):
            here, there = ringctl(*words), ringctl("--server", service.url, *words)
            assert timeless(there.stdout) == timeless(here.stdout), words
            assert there.stderr == here.stderr, words
    shown = asked(service, "status", run)
    assert "epoch 1/3  step 7/9  loss 0.123  accuracy 87.5%  2,469 samples/s  communication 25%" in shown
    assert "LAST SIGN" in shown
    ended = ringctl("--server", service.url, "logs", failed).stderr
    assert re.search(r"failed first: .*ValueError: odd\n  at .*\n(.*\n)*run .* failed after [0-9.]+ s", ended)


def timeless(shown: str) -> str:
    """Without how long ago something was: somebody else has looked a moment later."""
    return re.sub(r"\d+ (s|min) ago +|\"heartbeat_age_s\":[0-9.]+", "", shown)


def test_a_run_is_found_as_without_a_service() -> None:
    again = "import os, time; time.sleep(300 * (os.environ['RINGCTL_ATTEMPT'] > '1'))"
    with serving() as service:
        server = ("--server", service.url)
        for words in ((), server):
            assert "there is no run yet" in ringctl(*words, "status", code=2).stderr
        first = service.submit(sys.executable, "-c", again, name="mine")
        service.wait_for_state(first, "succeeded")
        second = service.submit("true", name="mine")
        service.wait_for_state(second, "succeeded")
        service.client().post(f"/api/runs/{first}/restart")
        service.wait_for_state(first, "running")
        waits = service.submit("true", name="waits", at=9e9)
        for number in range(1005):
            history.enlist(f"20010101-{number:06}-aaaa", name=f"old{number}", state="cancelled")
        for reference, meant in {
            None: first,
            "mine": first,
            "waits": waits,
            second: second,
            waits[:-1]: waits,
            "old0": "20010101-000000-aaaa",  # more are newer than are listed at once
            "20010101-000007": "20010101-000007-aaaa",
        }.items():
            words = ("status", "--json", *((reference,) if reference else ()))
            for by in ((), server):
                assert json.loads(ringctl(*by, *words).stdout)["run"] == meant, (by, reference)
        for reference in ("20010101-0000", "nope", ""):
            here, there = (ringctl(*by, "status", reference, code=2).stderr for by in ((), server))
            assert there.splitlines()[0] == here.splitlines()[0]
        listed = [
            [row["run"] for row in json.loads(ringctl(*by, "ps", "--json").stdout)] for by in ((), server)
        ]
        assert listed[0] == [second, first]
        assert (listed[1][:2], len(listed[1])) == ([first, waits], 22), "twenty, and what is not over"
        ringctl(*server, "stop")
        assert service.row(first)["state"] == "stopped"
        assert service.row(waits)["state"] == "queued"


def test_a_run_that_never_started_says_why_with_a_service_and_without(
    at_the_door: Service, tmp_path: Path
) -> None:
    run = at_the_door.submit("true", at=9e9, name="never")
    wait_for(lambda: "waiting until" in ringctl("status", "never").stdout, "the reason")
    why = ringctl("stop", run, code=2).stderr
    assert (f"run {run} waits in the queue" in why, f"ringctl cancel {run}" in why) == (True, True)
    other = at_the_door.submit("true", at=9e9)
    for each in (run, other):
        at_the_door.client().post(f"/api/runs/{each}/cancel")
    history.mark(run, "failed", error="server9: cannot be reached", fix="is it on?")
    for server in ((), ("--server", at_the_door.url)):
        shown = ringctl(*server, "status", "never").stdout
        assert shown == f"run {run} (never): failed\nserver9: cannot be reached\n  to do: is it on?\n"
        about = json.loads(ringctl(*server, "status", run, "--json").stdout)
        assert (about["state"], about["ranks"]) == ("failed", [])
        ended = f"server9: cannot be reached\n  to do: is it on?\nrun {run} failed\n"
        assert ringctl(*server, "logs", run).stderr == ended
        for words in ("stop", "checkpoints"):
            refused = ringctl(*server, words, run, code=2).stderr
            assert refused == f"error: run {run} has never started: server9: cannot be reached\n  is it on?\n"
        assert "**server9: cannot be reached**" in ringctl(*server, "report", run, "--markdown").stdout
        assert "cancelled" in ringctl(*server, "runs", "diff", "never", other).stdout
        folder = tmp_path / f"all{len(server)}"
        ringctl(*server, "runs", "export", run, "--out", f"{folder}/")
        assert json.loads((folder / f"{run}.jsonl").read_text())["error"] == "server9: cannot be reached"


# --- Refusals ------------------------------------------------------------------------------------


def test_what_cannot_be_done_is_said_in_the_same_words_as_without_a_service(at_the_door: Service) -> None:
    done = at_the_door.submit("true", name="done")
    waits, cancelled = (at_the_door.submit("true", at=9e9) for _ in range(2))
    at_the_door.client().post(f"/api/runs/{cancelled}/cancel")
    wait_for(lambda: at_the_door.row(waits)["waiting"], "the reason")
    at_the_door.wait_for_state(done, "succeeded")
    for words in (
        ("status", "nope"),
        ("logs", done, "--previous"),
        ("restart", waits),
        ("restart", cancelled),
        ("runs", "diff", done, "nope"),
        ("runs", "export", "nope"),
        ("runs", "diff", done, "done"),
        ("runs", "diff", done),
    ):
        here, there = (ringctl(*by, *words, code=2) for by in ((), ("--server", at_the_door.url)))
        assert (here.stdout, here.stderr) == (there.stdout, there.stderr)
    at_the_door.client().post(f"/api/runs/{waits}/cancel")


def test_a_report_and_an_export_are_the_same_whoever_makes_them(
    spoken: tuple[Service, str], at_the_door: Service
) -> None:
    service, run = spoken
    assert at_the_door is service
    for words in (("report", run, "--json"), ("runs", "export", run)):
        here, there = (ringctl(*by, *words).stdout for by in ((), ("--server", service.url)))
        age = r'"(made|heartbeat_age_s)": ?[0-9.]+'
        assert re.sub(age, "", there) == re.sub(age, "", here)


def test_a_host_that_does_not_answer_a_stop_is_named_with_what_was_stopped_elsewhere() -> None:
    answer = {"known": True, "was": "running", "ended": [0, 1], "left": []}
    silent = "server2: it does not answer\n  is it on?"
    out = json.dumps({"run": "r", "hosts": {"server1": answer}, "errors": {"server2": silent}})
    refusal = children.Done(4, f"{out}\n", "").refusal()
    error = client.refused(refusal.status, refusal.answer().data())
    assert error.exit_code == 4
    assert str(error) == (
        "server2: it does not answer\n  is it on?; server1: ended ranks 0-1; nothing is left of them"
    )


def test_a_refusal_that_names_no_host_is_said_once() -> None:
    refusal = children.Done(4, "", "").refusal()
    assert str(client.refused(502, refusal.answer().data())) == "the service: it ended with code 4"


def test_a_wrong_option_is_one_with_a_service_too() -> None:
    said = "error: --world 99 is more than the 2 slots of hosts.yaml\n  write --world 2 or less\n"
    refusal = children.Done(2, "", said).refusal()
    error = client.refused(refusal.status, refusal.answer().data())
    assert (error.exit_code, f"error: {error}\n") == (2, said)


def test_a_submit_whose_answer_is_cut_off_by_a_kill_is_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as service:
        there, port = service.client(), service.port
        read, kills = there._read, iter([True])

        def cut_off(answer: http.client.HTTPResponse) -> bytes:
            if next(kills, False):
                service.kill()
                service.start()
                raise there._silent(http.client.IncompleteRead(b""))
            return read(answer)

        monkeypatch.setattr(there, "_read", cut_off)
        row = there.post_once("/api/submit", {"world": 1, "at": 9e9})
        assert service.port == port
        assert [each["run"] for each in service.client().get("/api/runs")["runs"]] == [row["run"]]


def test_a_service_that_is_not_there_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(client.Silent) as silent:
        client.Client(f"http://127.0.0.1:{port}", "token").post_once("/api/submit", {})
    assert not silent.value.broke


# --- Services that are not on our side -----------------------------------------------------------

ESCAPE = "\x1b]0;mine\x07"


class Lies(http.server.BaseHTTPRequestHandler):
    """Answers as a service would, with what no service should tell."""

    run = RUN = "20260101-000000-abcd"
    stream = "out"

    def log_message(self, *_: Any) -> None:
        pass

    def row(self, state: str = "failed") -> dict[str, Any]:
        words = dict.fromkeys(("name", "user", "waiting", "error", "fix", "watched"), ESCAPE)
        figures = dict.fromkeys(("accuracy", "parameters_sha256", "epoch", "epochs", "steps"))
        times = {"started": 1.0, "submitted": 1.0, "ended": 2.0}
        lists = {"hosts": ["h"], **{key: [] for key in ("former", "unended", "attempts", "ranks")}}
        about = {"run": self.run, "state": state, "world": 1, "attempt": 1, "cause": None, "plan": None}
        about["unwritten"] = {}
        return {**words, **figures, **times, **lists, **about, "watched": ""}

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        line = {"kind": "line", "time": 1.0, "run": self.run, "attempt": 1, "host": "h", "rank": 0}
        answers: dict[str, Any] = {
            "/api/runs": {"runs": [self.row()], "next": None},
            "events": {"events": [{**line, "stream": self.stream, "text": ""}], "last": 1, "more": False},
            "log": {"lines": [[1, 1.0, 1, ESCAPE, 0, "out", ESCAPE]], "first": 1, "last": 1, "more": False},
        }
        if path.endswith("/report"):
            self.say(f"a report {ESCAPE}\n".encode())
        elif path.endswith("/stream"):
            row = json.dumps(self.row("queued"))
            self.say(f"event: run\ndata: {row}\n\nevent: end\ndata: {{}}\n\n".encode())
        else:
            told = answers.get(path) or answers.get(path.rpartition("/")[2]) or self.row()
            self.say(json.dumps(told).encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.endswith("/cancel"):
            self.say(json.dumps({"error": f"no {ESCAPE}", "fix": ESCAPE}).encode(), 409)
        else:
            self.say(json.dumps(self.row()).encode())

    def say(self, data: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def liar(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Lies]]:
    """A service that tells lies, as the one that is asked."""

    class Own(Lies):
        pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Own)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    monkeypatch.setenv("RINGCTL_SERVER", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("RINGCTL_TOKEN", "token")
    try:
        yield Own
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_no_file_is_written_where_a_service_would_like_it(
    liar: type[Lies], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "some" / "where"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    liar.run = "../../escaped"
    for words in (("report",), ("logs", "--download", "dl"), ("runs", "export", "--out", "all/")):
        assert "a run with an id that is none" in ringctl(*words, code=4).stderr
    liar.run, liar.stream = Lies.RUN, "/../../../escaped"
    assert "events that are none" in ringctl("logs", "--download", "dl", code=4).stderr
    made = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    assert not made, made


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("logs", "[0 "),
        ("logs --follow", f"{Lies.RUN}: "),
        (f"cancel {Lies.RUN}", "error: no "),
        (f"restart {Lies.RUN}", "has never started: "),
        (f"checkpoints {Lies.RUN}", "has never started: "),
        ("submit --world 1", "handed in"),
        ("report --markdown", "a report "),
    ],
)
def test_what_a_service_says_is_shown_and_not_obeyed(liar: type[Lies], words: str, shown: str) -> None:
    assert liar.run == Lies.RUN
    terminal = Terminal([*RINGCTL, *words.split()], 200)
    said = terminal.wait()
    terminal.process.wait(30)
    os.close(terminal.fd)
    assert shown in said
    assert "\\x1b]0;mine\\x07" in said
    assert "\x1b]" not in said


# --- What there is -------------------------------------------------------------------------------


def test_runs_are_compared_exported_and_reported(
    spoken: tuple[Service, str], at_the_door: Service, tmp_path: Path
) -> None:
    service, run = spoken
    other = service.submit(sys.executable, "-c", "print()", at=9e9, name="other")
    assert at_the_door is service
    told = json.loads(asked(service, "runs", "diff", "spoken", other, "--json"))
    assert [row["name"] for row in told["runs"]] == ["spoken", "other"]
    assert "RUN" in asked(service, "runs", "list")
    mine = json.loads(ringctl("runs", "list", "--json", "--search", "spoken").stdout)
    assert json.loads(asked(service, "runs", "list", "--json", "--search", "spoken")) == mine
    asked(service, "runs", "export", "--out", f"{tmp_path}/all/")
    here = [json.loads(line) for line in ringctl("runs", "export", run).stdout.splitlines()]
    there = [json.loads(line) for line in (tmp_path / "all" / f"{run}.jsonl").read_text().splitlines()]
    assert there[1:] == here[1:]
    assert (tmp_path / "all" / f"{other}.jsonl").exists()
    assert asked(service, "report", run, "--markdown").startswith("# spoken")
    assert json.loads(asked(service, "report", run, "--json"))["run"]["run"] == run
    asked(service, "report", run, "--out", f"{tmp_path}/x.html")
    assert (tmp_path / "x.html").read_text().startswith("<!doctype html>")
    service.client().post(f"/api/runs/{other}/cancel")


def test_hosts_checks_and_checkpoints_are_told(spoken: tuple[Service, str], at_the_door: Service) -> None:
    service, run = spoken
    (host,) = json.loads(asked(service, "hosts", "--json"))
    assert (host["name"], host["slots"], host["free"]) == ("here", 2, 2)
    assert "BY RUN" in asked(service, "hosts", "--include", "here")
    assert (
        "not a host of the service"
        in ringctl("--server", service.url, "hosts", "--include", "x", code=2).stderr
    )
    assert "ready: 1 host" in asked(service, "preflight")
    assert json.loads(asked(service, "preflight", "--last", "--json"))["ok"] is True
    assert f"run {run} has no checkpoints" in asked(service, "checkpoints", run)
    assert json.loads(asked(service, "checkpoints", run, "--json"))["checkpoints"] == []
    assert at_the_door is service


def test_only_an_admin_has_runs_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as service:
        run = service.submit(sys.executable, "-c", "print()", prefork=False)
        service.wait_for_state(run, "succeeded")
        secret = ringctl("serve", "token", "add", "bob").stdout.strip()
        old = ("--server", service.url, "runs", "prune", "--keep", "0")
        assert "nobody to ask" in ringctl("--no-input", *old, code=2).stderr
        with monkeypatch.context() as patch:
            patch.setenv("RINGCTL_TOKEN", secret)
            assert "may submit only" in ringctl(*old, "--yes", code=2).stderr
        wait_for(lambda: run in ringctl(*old, "--dry-run").stdout, "the end of its recording")
        assert json.loads(ringctl(*old, "--yes", "--json").stdout)["forgotten"] == [run]
        assert service.client().get("/api/runs")["runs"] == []


# --- launch --------------------------------------------------------------------------------------


def started(service: Service, *words: str) -> subprocess.Popen[str]:
    argv = [*RINGCTL, "--server", service.url, *words]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def newest(service: Service) -> Any:
    return service.client().get("/api/runs")["runs"][0]


def test_a_launch_is_handed_in_and_followed_and_ctrl_c_stops_it(tmp_path: Path) -> None:
    script = [sys.executable, "-c", WAITS, str(tmp_path / "go")]
    with serving(slots=1) as service:
        one = started(service, "launch", "--no-prefork", "--name", "one", "--", *script)
        assert one.stdout is not None
        plan = "".join(iter(one.stdout.readline, "[0 here] here\n"))
        assert re.match(r"run .* \(one\): 1 rank on 1 host, .*\ncommand: (.*\n)*HOST .*\nhere .*\n$", plan)
        two = started(service, "submit", "--no-prefork", "--follow", "--name", "two", "--", *script)
        assert two.stderr is not None
        assert "waiting for 1 slot on here" in two.stderr.readline()
        two.send_signal(signal.SIGINT)
        assert f"run {newest(service)['run']} goes on without us" in two.communicate(timeout=30)[1]
        assert two.returncode == 130
        one.send_signal(signal.SIGINT)
        ended = one.communicate(timeout=60)[0]
        assert re.search(r"RANK .*\n0 +here +stopped .*\nrun .* stopped after [0-9.]+ s\n$", ended), ended
        assert one.returncode == 130
        service.wait_for_state(newest(service)["run"], "running")
        (tmp_path / "go").touch()
        service.wait_for_state(newest(service)["run"], "succeeded")
        row = json.loads(asked(service, "launch", "--detach", "--json", "--", *script))
        assert service.wait_for_state(row["run"], "succeeded")["user"]
        os.remove(tmp_path / "go")
        again = started(service, "restart", row["run"])
        assert again.stdout is not None
        assert "HOST  RANKS" in "".join(iter(again.stdout.readline, "[0 here] here\n"))
        (tmp_path / "go").touch()
        assert re.fullmatch(r"RANK .*\n0 .*\nrun .* succeeded after .*\n", again.communicate(timeout=60)[0])
        assert again.returncode == 0


@pytest.mark.parametrize("as_json", [False, True])
def test_what_ranks_say_from_ctrl_c_to_their_end_is_shown_each_line_once(as_json: bool) -> None:
    script = """
import signal, sys, time
def bye(*_):
    for part in range(5):
        print("saving", part, flush=True); time.sleep(0.1)
    print("bye", flush=True); sys.exit()
signal.signal(signal.SIGTERM, bye)
for n in range(10**9):
    print("line", n, flush=True); time.sleep(0.001)
"""
    asked_for = ["--json"] * as_json
    with serving(slots=1) as service:
        one = started(service, "launch", "--no-prefork", *asked_for, "--", sys.executable, "-c", script)
        assert one.stdout is not None
        early = ""
        while "line 50" not in early:
            early += one.stdout.readline()
        one.send_signal(signal.SIGINT)
        shown = [line for line in (early + one.stdout.read()).splitlines() if is_said(line)]
        one.communicate(timeout=60)
        assert one.returncode == 130
        assert "bye" in shown[-1]
        said = asked(service, "logs", newest(service)["run"], *asked_for).splitlines()
        assert shown == [line for line in said if is_said(line)]


def is_said(line: str) -> bool:
    """By a rank."""
    return line.startswith(("[0 here] ", '{"kind": "line"', '{"kind":"line"'))


def test_ctrl_c_stops_the_run_of_a_launch_also_if_it_ends_whoever_reads_that() -> None:
    script = "import time\nwhile True: print('x', flush=True); time.sleep(0.05)"
    with serving(slots=1) as service:
        one = started(service, "launch", "--no-prefork", "--", sys.executable, "-c", script)
        assert one.stdout is not None
        for _ in range(6):
            assert one.stdout.readline()
        one.send_signal(signal.SIGINT)
        one.stdout.close()
        assert one.stderr is not None
        said = one.stderr.read()
        one.stderr.close()
        assert one.wait(timeout=60) == 130
        assert newest(service)["state"] == "stopped"
    assert "goes on" not in said


def test_what_a_submission_asks_for_reaches_the_launch() -> None:
    with serving(slots=1) as service:
        script = "import os; print(os.environ['MASTER_PORT'])"
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        more = ("--master-port", str(port), "--skip-preflight", "--i-know", "--no-prefork", "--follow")
        done = ringctl("submit", *more, "--", sys.executable, "-c", script)
        assert done.stdout == f"[0 here] {port}\n"
        options = service.row(newest(service)["run"])["options"]
        assert options["preflight"] is False
        told = service.client().get(f"/api/runs/{newest(service)['run']}/submission")
        assert (told["master_port"], told["i_know"], told["skip_preflight"]) == (port, True, True)
