"""`ringctl launch` on this machine: from the plan to the exit code, and what an interruption leaves."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from launcher import cli, history
from launcher.model import Plan, from_json, to_json
from launcher.output import UNREAD_S
from tests.launcher.ringctl import (
    RINGCTL,
    detach,
    events,
    exits,
    is_alive,
    launch,
    lines,
    ringctl,
    run_folder,
    start,
    state,
    unread_pipe,
    wait_for,
    wait_until_final,
    waiting_in,
)

TALKS = ("sh", "-c", "while :; do echo x; sleep 0.05; done")
METRICS = 'echo "{\\"step\\": 2, \\"steps\\": 2, \\"loss\\": 0.25, \\"accuracy\\": 0.975}" >>$RINGCTL_METRICS'


def home() -> Path:
    return Path(os.environ["RINGCTL_HOME"])


def only_run() -> str:
    """The id of the one run there is, once it has started."""
    return wait_for(lambda: [p.parent.name for p in home().glob("runs/*/state.json")], "the run")[0]  # type: ignore[no-any-return]  # a list of str


# --- What is shown -------------------------------------------------------------------------------


def test_as_json_every_line_is_an_event_and_the_last_tells_the_result() -> None:
    seen = launch(["sh", "-c", f"{METRICS}; echo hello $RANK"])
    assert seen[-1]["kind"] == "run_finished"
    assert (seen[-1]["state"], seen[-1]["exit_code"], seen[-1]["cause"]) == ("succeeded", 0, None)
    assert seen[-1]["accuracy"] == 0.975
    assert [event["kind"] for event in seen].count("run_finished") == 1
    assert lines(seen, 1) == ["hello 1"]
    assert {event["rank"] for event in seen if event["kind"] == "metric"} == {0, 1}


def test_into_a_pipe_go_plan_lines_table_and_verdict_without_escape_codes() -> None:
    done = ringctl(
        "launch", "--local", "--world", "2", "--name", "mine", "--", "sh", "-c", f"{METRICS}; echo hi"
    )
    assert "\x1b" not in done.stdout
    assert "\r" not in done.stdout
    assert done.stderr == ""
    shown = done.stdout.splitlines()
    assert re.fullmatch(r"run \S+ \(mine\): 2 ranks on 1 host, master 127\.0\.0\.1:\d+", shown[0])
    assert shown[1].startswith("command: sh -c")
    assert shown[2].split()[:2] == ["HOST", "RANKS"]
    assert shown[3].split()[:3] == ["localhost", "0-1", "lo"]
    assert sorted(shown[4:6]) == ["[0 localhost] hi", "[1 localhost] hi"]
    assert shown[6].split()[:4] == ["RANK", "HOST", "STATE", "EXIT"]
    assert shown[7].split()[:6] == ["0", "localhost", "succeeded", "0", "2", "0.250"]
    assert shown[8].split()[:6] == ["1", "localhost", "succeeded", "0", "2", "0.250"]
    assert re.fullmatch(r"run \S+ succeeded after [\d.]+ s; test accuracy 97\.5%", shown[9])
    assert len(shown) == 10


def test_a_failed_run_exits_with_1_and_names_the_rank_and_what_it_said() -> None:
    script = 'test $RANK = 1 || exec sleep 600; echo "RuntimeError: boom" >&2; exit 4'
    done = ringctl("launch", "--local", "--world", "2", "--", "sh", "-c", script, code=1)
    shown = done.stdout.splitlines()
    assert "failed first: rank 1 on localhost exited with code 4: RuntimeError: boom" in shown
    assert re.match(r"run \S+ failed after", shown[-1])


def test_whatever_a_rank_calls_its_metrics_the_run_is_shown_to_its_end() -> None:
    odd = (
        r'{"step": [1], "loss": "\ud800", "self": 1, "kind": "x", "h": [NaN], "accuracy": 1' + "0" * 400 + "}"
    )
    seen = ringctl("launch", "--local", "--world", "1", "--", "sh", "-c", 'echo "$0" >>$RINGCTL_METRICS', odd)
    assert "succeeded" in seen.stdout.splitlines()[-1]
    done = ringctl("logs", "--json").stdout
    (metric,) = [e for e in map(strict, done.splitlines()) if e["kind"] == "metric"]
    assert (metric["step"], metric["self"], metric["h"]) == ([1], 1, ["nan"])
    assert "succeeded" in ringctl("status").stdout


def strict(line: str) -> Any:
    """As a reader in another language takes it: without NaN."""

    def refuse(word: str) -> Any:
        raise ValueError(word)

    return json.loads(line, parse_constant=refuse)


def test_the_last_of_very_many_metrics_counts() -> None:
    script = """
        import json, os
        record = {"pad": "x" * 100}
        with open(os.environ["RINGCTL_METRICS"], "w") as f:
            f.writelines(json.dumps({**record, "step": n}) + "\\n" for n in range(30_000))
            f.write('{"accuracy": 0.5}\\n')
    """
    seen = launch(["python", "-S", "-c", textwrap.dedent(script)], world=1)
    assert seen[-1]["accuracy"] == 0.5
    assert [event["step"] for event in seen if "step" in event] == list(range(30_000))


def test_a_reader_who_has_seen_enough_of_a_launch_ends_it_and_not_the_run() -> None:
    launching = start("launch", "--local", "--world", "1", "--", *TALKS)
    assert launching.stdout is not None
    assert launching.stderr is not None
    for _ in range(6):
        assert launching.stdout.readline()
    launching.stdout.close()
    said = launching.stderr.read()
    launching.stderr.close()
    assert launching.wait(timeout=30) == 1, "it has not seen how the run ended"
    run = only_run()
    is_there = is_alive(state(run)["ranks"][0]["pid"])
    ringctl("stop", run)
    assert is_there
    assert said == "nobody reads this any more; a run that was started goes on\n"


def test_whoever_sees_no_more_of_a_restart_is_told_what_a_launch_tells() -> None:
    run = detach(TALKS, world=1)
    ringctl("stop", run)
    starting = start("restart", run)
    assert starting.stdout is not None
    assert starting.stdout.readline()
    starting.stdout.close()
    assert starting.stderr is not None
    said = starting.stderr.read()
    starting.stderr.close()
    code = starting.wait(timeout=30)
    ringctl("stop", run)
    assert (code, said) == (1, "nobody reads this any more; a run that was started goes on\n")


@pytest.mark.parametrize("full", [False, True])
def test_a_launch_that_nobody_is_shown_starts_nothing_and_says_so(full: bool) -> None:
    argv = [*RINGCTL, "launch", "--local", "--world", "1", "--", *TALKS]
    with open("/dev/full", "wb") if full else unread_pipe() as out:
        done = subprocess.run(argv, stdout=out, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    said = f"error: {cli.FULL if full else cli.UNREAD}; nothing was started\n"
    assert (done.returncode, done.stderr) == (1, said)
    assert json.loads(ringctl("ps", "--json").stdout) == []


@pytest.mark.parametrize("one_pipe", [False, True])
def test_ctrl_c_stops_the_run_also_if_it_ends_the_reader(one_pipe: bool) -> None:
    pipe, both = subprocess.PIPE, subprocess.STDOUT if one_pipe else subprocess.PIPE
    argv = [*RINGCTL, "launch", "--local", "--world", "1", "--", *TALKS]
    with subprocess.Popen(argv, stdout=pipe, stderr=both, text=True) as launching:
        assert launching.stdout is not None
        for _ in range(6):
            assert launching.stdout.readline()
        launching.send_signal(signal.SIGINT)
        launching.stdout.close()  # as `| tee log` does
        said = launching.stderr.read() if launching.stderr else "nobody reads this"
        assert launching.wait(timeout=30) == 130
    assert state(only_run())["state"] == "stopped"
    assert said.startswith("nobody reads this")
    assert "goes on" not in said


def test_ctrl_c_stops_the_run_also_while_a_reader_takes_nothing() -> None:
    argv = [*RINGCTL, "launch", "--local", "--world", "1", "--", "sh", "-c", "seq 100000; sleep 600"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as launching:
        assert launching.stdout is not None
        pipe = launching.stdout.fileno()
        wait_for(lambda: waiting_in(pipe) > 60_000, "a pipe without room")
        launching.send_signal(signal.SIGINT)
        wait_until_final(only_run())
        assert launching.poll() is None, "the reader may still go on"
        began = time.monotonic()
        while launching.poll() is None:  # each begins its patience anew, but the third ends that
            assert time.monotonic() - began < UNREAD_S
            launching.send_signal(signal.SIGINT)
            time.sleep(0.1)  # two of the same signal at once would be one
        assert launching.returncode in (130, -signal.SIGINT), "the latter if one came when it had ended"
    assert state(only_run())["state"] == "stopped"


def test_ctrl_c_before_anything_is_started_ends_it_also_if_nobody_reads_that() -> None:
    reads, writes = os.pipe()
    argv = [*RINGCTL, "launch", "--local", "--world", "1", "--", "true"]
    with open(writes, "wb", buffering=0) as out:
        os.set_blocking(writes, False)
        while out.write(b"y" * 4096):
            pass
        os.set_blocking(writes, True)
        with subprocess.Popen(argv, stdout=out, stderr=out) as launching, open(reads, "rb"):
            wait_for(lambda: (home() / "history.db").exists(), "what preflight has found")
            launching.send_signal(signal.SIGINT)
            assert launching.wait(timeout=30) == 130
    assert not (home() / "runs").exists()


# --- Detached, and found again -------------------------------------------------------------------


def test_a_detached_run_goes_on_by_itself_and_says_how_to_find_it() -> None:
    done = ringctl("launch", "--local", "--world", "1", "--detach", "--", "sleep", "600")
    run = only_run()
    assert f"started {run}" in done.stdout
    assert f"ringctl logs {run} --follow" in done.stdout
    assert f"ringctl stop {run}" in done.stdout
    assert is_alive(state(run)["ranks"][0]["pid"])
    ringctl("stop")


def test_a_run_is_found_by_id_by_name_by_beginning_and_as_the_latest() -> None:
    first = detach(["echo", "first"], world=1, options=["--name", "mine"])
    second = detach(["echo", "second"], world=1, options=["--name", "mine"])
    third = detach(["echo", "third"], world=1)
    for run in (first, second, third):
        wait_until_final(run)
    for reference, word in ((first, "first"), ("mine", "second"), (third[:-1], "third"), (None, "third")):
        assert ringctl("logs", *([reference] if reference else []), "--no-prefix").stdout == f"{word}\n"
    ambiguous = ringctl("logs", first[:4], code=2)
    assert "the beginning of 3 runs" in ambiguous.stderr


def test_two_launches_at_the_same_moment_both_work() -> None:
    launches = [
        start("launch", "--local", "--world", "2", "--json", "--", "sh", "-c", "echo $0", w) for w in "ab"
    ]
    told = []
    for launched in launches:
        out, err = launched.communicate(timeout=60)
        assert launched.returncode == 0, err
        told.append([json.loads(line) for line in out.splitlines()])
    assert [lines(seen, 1) for seen in told] == [["a"], ["b"]]
    assert told[0][-1]["run"] != told[1][-1]["run"]
    assert len(json.loads(ringctl("ps", "--json").stdout)) == 2


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"hostd": 3', b'{"newer": {}}'])
def test_two_runs_on_one_host_cannot_have_the_same_master_port(damage: bytes) -> None:
    """Though the first does not listen there yet; it has the port until it ends. What is left of an older one
    that cannot be read changes nothing."""
    port = str(json.loads(dry_run("--json"))["master_port"])
    older = run_folder("20260101-000000-abcd")
    older.mkdir(parents=True)
    (older / "plan.json").write_text(json.dumps({"listens": int(port)}))
    (older / "state.json").write_bytes(damage)
    options = ["--skip-preflight", "--master-port", port]
    first = detach(["sleep", "600"], world=1, options=options)
    command = ("--local", "--world", "1", *options, "--", "sleep", "600")
    refused = ringctl("launch", "--detach", *command, code=1).stderr
    assert f"the master port is taken: {port}, by run {first}; nothing was left running" in refused
    assert "leave out --master-port" in refused
    ringctl("stop", first)
    ringctl("stop", detach(["sleep", "600"], world=1, options=options))


def test_ctrl_c_while_ringctl_is_still_being_loaded_ends_it_quietly(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("import time\nprint('loading', flush=True)\ntime.sleep(600)\n")
    starting = start("ps", env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert starting.stdout is not None
    assert starting.stdout.readline() == "loading\n"
    starting.send_signal(signal.SIGINT)
    assert starting.communicate(timeout=60) == ("", "")
    assert starting.returncode == 130


def test_a_relative_home_folder_means_the_one_seen_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGCTL_HOME", "mine")
    monkeypatch.chdir(tmp_path)
    seen = launch(
        ["sh", "-c", "cd /; echo $RINGCTL_METRICS; cd /; echo '{\"step\": 7}' >>$RINGCTL_METRICS"], world=1
    )
    assert lines(seen, 0)[0].startswith(f"{tmp_path}/mine/runs/")
    assert [event["step"] for event in seen if event["kind"] == "metric"] == [7]


def test_what_ringctl_keeps_is_for_its_user_alone() -> None:
    run = detach(["true"], world=1)
    wait_until_final(run)
    for folder in (home(), home() / "runs", run_folder(run)):
        assert folder.stat().st_mode & 0o777 == 0o700, folder
    for path in home().glob("history*"):
        assert path.stat().st_mode & 0o777 == 0o600, path
    assert history.file().exists()


def test_a_home_folder_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGCTL_HOME", "/dev/null/home")
    done = ringctl("launch", "--local", "--world", "1", "--skip-preflight", "--", "true", code=1)
    assert re.fullmatch(r"error: /dev/null/home: cannot be made: Not a directory\n", done.stderr)
    assert ringctl("ps", "--json").stdout == "[]\n"


ODD = 'it\'s "quoted" $HOME `x`\nsecond line \\ \u4e16\u754c'


def test_the_inventory_decides_about_a_local_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    host = {
        "name": "here",
        "local": True,
        "slots": 3,
        "workdir": str(tmp_path / "work"),
        "variables": {"ODD": ODD},
    }
    inventory = {"master_port": 23457, "hosts": [host]}
    (tmp_path / "hosts.yaml").write_text(json.dumps(inventory))  # JSON is YAML
    monkeypatch.chdir(tmp_path)
    done = ringctl(
        "launch", "--json", "--", "sh", "-c", 'printf "%s" "$ODD" >odd$RANK; pwd; echo $MASTER_PORT'
    )
    seen = [json.loads(line) for line in done.stdout.splitlines()]
    assert {event["host"] for event in seen if event["rank"] is not None} == {"here"}
    for rank in range(3):
        assert lines(seen, rank) == [str(tmp_path / "work"), "23457"]
        assert (tmp_path / "work" / f"odd{rank}").read_bytes() == ODD.encode()


# --- When ringctl itself goes away ---------------------------------------------------------------

COUNT = """
import socket, sys, time
with socket.create_server(("127.0.0.1", 0)) as server:
    print("port", server.getsockname()[1], flush=True)
    for number in range(1, 301):
        print(number, flush=True)
        time.sleep(0.005)
    time.sleep(600)
"""


def test_a_run_outlives_its_killed_controller_and_no_line_of_it_is_lost_or_repeated() -> None:
    launched = start("launch", "--local", "--world", "2", "--json", "--", "python", "-S", "-c", COUNT)
    assert launched.stdout is not None
    while json.loads(launched.stdout.readline()).get("text") != "20":
        pass
    launched.kill()
    launched.communicate()
    run = only_run()
    ranks = [rank["pid"] for rank in state(run)["ranks"]]
    assert all(map(is_alive, ranks))
    follower = start("logs", "--follow", "--json")
    wait_for(lambda: all("300" in lines(events(run), rank) for rank in (0, 1)), "all lines")
    assert "nothing is left" in ringctl("stop").stdout
    told = [json.loads(line) for line in follower.communicate(timeout=30)[0].splitlines()]
    assert (told[-1]["kind"], told[-1]["state"]) == ("run_finished", "stopped")
    for rank in (0, 1):
        port, *numbers = lines(told, rank)
        assert numbers == [str(number) for number in range(1, 301)]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(port.split()[1]))).close()
    about = state(run)
    for pid in (*ranks, about["hostd"]["pid"], about["warden"]["pid"]):
        assert not is_alive(pid)


def interrupted(script: str, world: int, *, times: int) -> tuple[subprocess.Popen[str], list[str]]:
    """Launch, wait for every rank to say that it is up, press Ctrl-C so often; what was shown."""
    argv = ("launch", "--local", "--world", str(world), "--", "sh", "-c", script)
    launched = start(*argv, start_new_session=True)
    assert launched.stdout is not None
    shown: list[str] = []

    def read_until(word: str, count: int = 1) -> None:
        for _ in range(count):
            while word not in (line := launched.stdout.readline()):  # type: ignore[union-attr]  # asserted above
                assert line, f"no {word!r} in {shown}"
                shown.append(line)
            shown.append(line)

    read_until("is up", world)
    launched.send_signal(signal.SIGINT)
    for _ in range(times - 1):
        read_until("press Ctrl-C again")
        launched.send_signal(signal.SIGINT)
    out, err = launched.communicate(timeout=60)
    assert err == ""
    return launched, [*shown, *out.splitlines(keepends=True)]


def test_the_first_ctrl_c_stops_the_run_cleanly_and_says_so() -> None:
    script = 'trap "echo got TERM; exit 0" TERM; echo is up; while :; do sleep 0.05; done'
    launched, shown = interrupted(script, 2, times=1)
    text = "".join(shown)
    assert launched.returncode == 130
    assert "stopping the run; press Ctrl-C again to kill it" in text
    assert sorted(line for line in shown if line.endswith("] got TERM\n")) == [
        "[0 localhost] got TERM\n",
        "[1 localhost] got TERM\n",
    ]
    assert "failed first" not in text
    assert re.match(r"run \S+ stopped after", shown[-1])
    assert {e["reason"] for e in exits(events(only_run())).values()} == {"stopped"}


def test_a_ctrl_c_after_the_last_rank_has_ended_changes_nothing_about_how_the_run_did() -> None:
    launched = start("launch", "--local", "--world", "1", "--json", "--", "true")
    assert launched.stdout is not None
    for line in launched.stdout:
        if (last := json.loads(line))["kind"] == "rank_exited":
            launched.send_signal(signal.SIGINT)
    launched.communicate(timeout=60)
    assert (last["state"], launched.returncode) == ("succeeded", last["exit_code"])


def test_the_second_ctrl_c_kills() -> None:
    script = 'trap "" TERM; echo is up; while :; do sleep 0.05; done'
    launched, shown = interrupted(script, 2, times=2)
    assert launched.returncode == 130
    assert "killing the run" in "".join(shown)
    final = exits(events(only_run()))
    assert {e["signal"] for e in final.values()} == {"SIGKILL"}
    assert json.loads((run_folder(only_run()) / "stop.json").read_text())["grace"] == 0


def test_a_run_that_is_stopped_before_its_ranks_exist_was_stopped_and_did_not_fail(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import time; time.sleep(600)")  # as slow to import as torch is
    (tmp_path / "program.py").write_text("import torch; print('never')")
    run = detach(["python", "-S", str(tmp_path / "program.py")], options=["--prefork"])
    assert {rank["state"] for rank in state(run)["ranks"]} == {"waiting"}
    ringctl("stop", run)
    assert {e["state"] for e in exits(events(run)).values()} == {"stopped"}
    assert json.loads(ringctl("status", run, "--json").stdout)["state"] == "stopped"


def test_what_a_rank_left_writing_in_the_background_does_not_keep_the_run_going() -> None:
    run = detach(["sh", "-c", f"yes {'x' * 30} & echo last words"], world=1)
    assert wait_until_final(run)["state"] == "succeeded"
    (log,) = run_folder(run).glob("events-*.jsonl")
    assert b'"last words"' in log.read_bytes()


# --- The built-in trainer ------------------------------------------------------------------------


def test_the_built_in_trainer_is_used_even_where_a_file_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trainer.py").write_text("raise SystemExit('this is not the trainer')")
    monkeypatch.chdir(tmp_path)
    done = ringctl("launch", "--local", "--world", "2", "--json", "--", "--steps", "2")
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["state"] == "succeeded"
    assert len(last["parameters_sha256"]) == 64
    assert 0 <= last["accuracy"] <= 1


# --- Only the plan -------------------------------------------------------------------------------


def dry_run(*options: str) -> str:
    command = ("launch", "--local", "--world", "2", "--dry-run", *options)
    return ringctl(*command, "--", "sh", "-c", "echo rank $RANK of $WORLD_SIZE").stdout


def test_a_dry_run_shows_the_plan_and_touches_nothing(tmp_path: Path) -> None:
    shown = dry_run("--name", "mine")
    assert "(mine): 2 ranks on 1 host" in shown
    assert "localhost  0-1" in shown
    assert "MASTER_PORT=" in dry_run("--verbose")
    assert not home().exists()
    assert {path.name for path in tmp_path.iterdir()} <= {"scratch"}


def test_a_dry_run_as_json_is_the_plan_and_the_same_facts_give_the_same_one() -> None:
    plans = [json.loads(dry_run("--json", "--master-port", "23456")) for _ in range(2)]
    plan = from_json(Plan, plans[0])
    assert (plan.world, plan.master_port, plan.rank_hosts) == (2, 23456, {0: "localhost", 1: "localhost"})
    assert plan.hosts[0].ranks[1].env["RANK"] == "1"
    same = [json.dumps(plan).replace(plan["run"], "RUN") for plan in plans]
    assert same[0] == same[1]


def test_the_chosen_port_is_free_and_outside_the_ephemeral_range() -> None:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    for _ in range(3):
        port = json.loads(dry_run("--json"))["master_port"]
        assert 1024 <= port <= 65535
        assert not low <= port <= high
        with socket.socket() as server:
            server.bind(("", port))


def test_shell_commands_of_a_dry_run_start_the_ranks_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    commands = dry_run("--commands")
    assert commands.startswith("# on localhost\n")
    subprocess.run(["sh"], input=f"{commands}\nwait\n", text=True, check=True, cwd="/")
    for rank in (0, 1):
        assert (tmp_path / f"rank{rank}.log").read_text() == f"rank {rank} of 2\n"
    assert not home().exists()


def test_whoever_starts_it_may_have_had_the_ends_of_children_ignored() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # which those that it starts inherit
    try:
        process = start("launch", "--local", "--world", "2", "--", "sh", "-c", "(setsid sleep 600 &); exit 3")
    finally:
        signal.signal(signal.SIGCHLD, before)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1, err
    assert "exited with code 3" in out + err
    assert "No child processes" not in out + err


def test_what_was_planned_is_what_is_started() -> None:
    run = detach(["true"])
    wait_until_final(run)
    told = json.loads((run_folder(run) / "plan.json").read_text())
    record = history.read(run)
    assert record is not None
    assert told["ranks"] == json.loads(json.dumps(to_json(record.plan)))["hosts"][0]["ranks"]


def test_a_huge_file_of_metrics_keeps_no_other_rank_waiting() -> None:
    text = "import os; open(os.environ['RINGCTL_METRICS'], 'a').truncate(1 << 42)"
    events = launch(["python", "-S", "-c", f"{text}; print('done')"], world=2)
    assert lines(events, 0) == lines(events, 1) == ["done"]
