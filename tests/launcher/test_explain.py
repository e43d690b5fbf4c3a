"""`ringctl explain`: of runs, and of logs that ringctl did not write."""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher import foreign
from launcher.diagnose import Cause
from tests.launcher.ringctl import RINGCTL, detach, events, launch, lines, ringctl, run_folder, wait_for

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TRACEBACK = textwrap.dedent(
    """\
    Traceback (most recent call last):
      File "/home/me/train.py", line 30, in <module>
        main()
      File "/opt/x/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1778, in _call_impl
        return forward_call(*args, **kwargs)
               ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
      File "/home/me/train.py", line 12, in main
        raise ValueError("boom")
    ValueError: boom
    """
)
LOST = "RuntimeError: [/x/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:7"


def cause_of(data: str | bytes) -> Cause:
    raw = data.encode() if isinstance(data, str) else data
    cause = foreign.read(foreign.lines_of(io.BytesIO(raw))).cause
    assert cause is not None
    return cause


def explain(*args: str, code: int = 0, **options: Any) -> Any:
    return json.loads(ringctl("explain", "--json", *args, code=code, **options).stdout)


def labelled(rank: int, text: str) -> str:
    return "".join(f"[rank{rank}]: {line}\n" for line in text.splitlines())


# --- Logs of others ------------------------------------------------------------------------------


def test_a_traceback_is_cut_to_the_users_own_lines() -> None:
    cause = cause_of(TRACEBACK)
    assert cause.text == "line 1: ValueError: boom"
    assert [f"{frame.place} {frame.text}" for frame in cause.trace] == [
        "/home/me/train.py:30 main()",
        '/home/me/train.py:12 raise ValueError("boom")',
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text,
        lambda text: text.replace("\n", "\r\n"),
        lambda text: "\x1b[31m" + text.replace("\n", "\x1b[0m\n\x1b[31m"),
        lambda text: text + "\udcff\udcfe half a character\n",
        lambda text: "x" * 300_000 + "\n" + text,
        lambda text: text.replace("Traceback", " 10%\r 99%\rTraceback"),
        lambda text: text.rstrip("\n"),
        lambda text: "".join(f"12:00:00.123 [1 server2] {line}\n" for line in text.splitlines()),
        lambda text: "".join(f"[default1]:{line}\n" for line in text.splitlines()),
        lambda text: labelled(0, TRACEBACK.replace("ValueError: boom", LOST)) + labelled(1, text),
    ],
    ids=["plain", "dos", "colours", "bytes", "long", "progress", "cut", "ringctl", "torchrun", "torch"],
)
def test_the_form_of_a_log_does_not_matter(change: Any) -> None:
    cause = cause_of(change(TRACEBACK).encode("utf-8", "surrogateescape"))
    assert cause.text.endswith(": ValueError: boom")
    assert [frame.line for frame in cause.trace] == [30, 12]
    assert cause.rank in (None, 1)


@given(st.binary(max_size=2000))
def test_no_log_is_too_strange_to_be_read(data: bytes) -> None:
    foreign.read(foreign.lines_of(io.BytesIO(data)))


def test_a_failure_in_the_middle_of_a_long_log_is_found_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "huge.log"
    with path.open("w") as log:
        for number in range(300_000):
            log.write(f"[rank{number % 4}]: step {number} loss 0.123\n")
            if number == 150_000:
                log.write(labelled(2, TRACEBACK))
        log.write("[rank0]: " + "y" * 20_000_000 + "\n")
    limit = 300 << 20
    done = subprocess.run(
        [*RINGCTL, "explain", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
    )
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "failed first: rank 2: ValueError: boom")


def test_of_an_endless_traceback_the_exception_and_what_led_to_it_are_kept() -> None:
    """And of what the log goes on with, nothing that would take their place."""
    first, frames, last = (
        TRACEBACK.splitlines()[1:3],
        TRACEBACK.splitlines()[3:5],
        TRACEBACK.splitlines()[-3:],
    )
    deep = [TRACEBACK.splitlines()[0], *first, *frames * 2000, *last]
    for after in ([], ["step 1", "  loss 0.5"] * 5000):
        cause = cause_of("\n".join([*deep, *after]))
        assert cause.text == "line 1: ValueError: boom"
        assert [frame.line for frame in cause.trace] == [30, 12]


def test_an_exception_in_a_group_is_found(tmp_path: Path) -> None:
    (tmp_path / "group.py").write_text(
        "def part(number):\n"
        "    try:\n"
        "        raise ValueError(f'part {number}')\n"
        "    except ValueError as error:\n"
        "        return error\n"
        "raise ExceptionGroup('all parts', [part(1), part(2)])\n"
    )
    log = subprocess.run([sys.executable, "group.py"], capture_output=True, text=True, cwd=tmp_path).stderr
    for text in (log, labelled(1, log)):
        cause = cause_of(text)
        assert cause.text.endswith(": ValueError: part 2")
        assert [(frame.line, frame.function) for frame in cause.trace] == [(3, "part")]


def test_where_only_consequences_are_in_the_log_it_says_so() -> None:
    cause = cause_of(labelled(0, TRACEBACK.replace("ValueError: boom", LOST)))
    assert cause.id == "peer_died"
    assert "the rank that failed first is not in this log" in cause.fix


IN_TORCH = (
    '  File "/home/me/train.py", line 9, in <module>\n    dist.init_process_group("gloo")\n'
    '  File "/x/site-packages/torch/distributed/rendezvous.py", line 5, in _create\n    return TCPStore(\n'
)
IN_URLLIB = (
    '  File "/home/me/train.py", line 9, in <module>\n    fetch(url)\n'
    '  File "/usr/lib/python3.11/socket.py", line 706, in readinto\n    return self._sock.recv_into(b)\n'
)


@pytest.mark.parametrize(
    ("frames", "error", "id_"),
    [
        (IN_TORCH, "RuntimeError: Connection reset by peer", "peer_died"),  # as torch 1 has it
        (IN_TORCH, "RuntimeError: Broken pipe", "peer_died"),
        (IN_TORCH, "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes", "store_died"),
        (
            IN_TORCH,
            "torch.distributed.DistBackendError: NCCL error\nCall to recv failed: Broken pipe",
            "peer_died",
        ),
        (IN_URLLIB, "ConnectionResetError: [Errno 104] Connection reset by peer", ""),
        (IN_URLLIB, "http.client.IncompleteRead: got 0 bytes", ""),
        (IN_URLLIB, "RuntimeError: Broken pipe", ""),
    ],
)
def test_a_connection_that_torch_did_not_lose_is_no_other_ranks_fault(
    frames: str, error: str, id_: str
) -> None:
    cause = cause_of(labelled(1, f"Traceback (most recent call last):\n{frames}{error}\n"))
    assert (cause.rank, cause.id) == (1, id_)
    assert ("is not in this log" in cause.fix) == bool(id_)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("epoch 1 loss 0.5\nepoch 2 loss 0.4\n", 1),
        ("", 1),
        ("nohup: ignoring input\nKilled\n", 0),
        (TRACEBACK, 0),
    ],
    ids=["fine", "empty", "killed", "raised"],
)
def test_the_exit_code_tells_whether_it_could_explain(text: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(text)
    shown = ringctl("explain", str(tmp_path / "log"), code=code).stdout
    assert ("nothing in them is known to be a failure" in shown) == (code == 1)
    assert explain("-", code=code, input=text)["explained"] == (code == 0)


def test_what_is_not_there_is_told() -> None:
    assert "cannot read ./no.log: No such file" in ringctl("explain", "./no.log", code=2).stderr
    assert "there is no run" in ringctl("explain", "nosuchrun", code=2).stderr
    assert "is a folder" in ringctl("explain", "/", code=2).stderr
    assert "cannot read /proc/self/mem: Input" in ringctl("explain", "/proc/self/mem", code=2).stderr


def test_what_is_no_log_is_told(tmp_path: Path) -> None:
    assert "/dev/zero is neither a file nor a pipe" in ringctl("explain", "/dev/zero", code=2).stderr
    for encoding in ("utf-16", "utf-16-le", "utf-16-be"):
        (tmp_path / "log").write_text(TRACEBACK, encoding=encoding)
        refused = ringctl("explain", str(tmp_path / "log"), code=2).stderr.splitlines()
        assert refused[0].endswith("log is UTF-16")
        assert subprocess.run(refused[1].split("|")[0], shell=True, capture_output=True).returncode == 0
    os.mkfifo(tmp_path / "pipe")
    writer = subprocess.Popen(["sh", "-c", 'echo Killed >"$0"', str(tmp_path / "pipe")])
    assert explain(str(tmp_path / "pipe"))["id"] == "killed"
    assert writer.wait() == 0


def run_torchrun(folder: Path, body: str) -> str:
    (folder / "train.py").write_text(textwrap.dedent(body))
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    done = subprocess.run(
        [*TORCHRUN, str(folder / "train.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=90,
        env=environ,
        text=True,
    )
    assert done.returncode
    return done.stdout


def test_a_log_of_torchrun_whose_rank_was_killed_is_explained(tmp_path: Path) -> None:
    log = run_torchrun(
        tmp_path, "import os, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\ntime.sleep(60)\n"
    )
    cause = cause_of(log)
    assert (cause.rank, cause.id) == (1, "killed")
    assert "was killed by SIGKILL" in cause.text


def test_a_log_of_torchrun_whose_rank_raised_is_explained(tmp_path: Path) -> None:
    log = run_torchrun(
        tmp_path,
        """
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            raise KeyError("weights")
        dist.barrier()
        """,
    )
    cause = cause_of(log)
    assert cause.text == "rank 1: KeyError: 'weights'"
    assert [frame.line for frame in cause.trace] == [5]


# --- Runs ----------------------------------------------------------------------------------------

FAILS = [
    "sh",
    "-c",
    'if [ "$RANK" = 1 ]; then echo "OSError: [Errno 28] No space left on device" >&2; exit 3; fi',
]


def test_a_run_its_log_and_its_events_are_explained_alike(tmp_path: Path) -> None:
    last = launch(FAILS, code=1)[-1]
    of_run = explain()
    assert (of_run["run"], of_run["state"], of_run["id"]) == (last["run"], "failed", "disk")
    assert (of_run["cause"], of_run["fix"]) == (last["cause"], last["fix"])
    saved = tmp_path / "events"
    saved.write_text(ringctl("logs", "--json").stdout)
    assert explain(str(saved))["cause"] == last["cause"]
    log = tmp_path / "log"
    log.write_text(ringctl("logs").stdout)
    of_log = explain(str(log))
    assert (of_log["rank"], of_log["host"], of_log["id"]) == (1, "localhost", "disk")


def test_what_launch_said_is_what_its_saved_output_says(tmp_path: Path) -> None:
    shown = ringctl("launch", "--local", "--world", "2", "--", *FAILS, code=1).stdout
    (tmp_path / "shown").write_text(shown)
    said = ringctl("explain", str(tmp_path / "shown")).stdout.splitlines()
    assert said[0] in shown.splitlines()
    assert said == ringctl("explain").stdout.splitlines()


def test_a_run_that_succeeded_has_nothing_to_explain() -> None:
    launch(["true"])
    about = explain(code=1)
    assert (about["explained"], about["cause"], about["state"]) == (False, None, "succeeded")


def wait_until_up(run: str) -> None:
    """Until both ranks have said so."""
    wait_for(lambda: [lines(events(run), rank) for rank in (0, 1)] == [["up"], ["up"]], "their first words")


def test_a_run_that_hangs_is_explained_while_it_does(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        "import os, time\n"
        "class Work:\n"
        "    def wait(self): time.sleep(600)\n"
        "def read():\n"
        "    time.sleep(600)\n"
        "print('up', flush=True)\n"
        "read() if os.environ['RANK'] == '1' else Work().wait()\n"
    )
    run = detach(["python", "-S", str(program)])
    try:
        wait_for(lambda: len(list(run_folder(run).glob("ranks/*/*.stacks"))) == 2, "two ranks")
        wait_until_up(run)
        about = explain(run)
        assert about["note"].startswith("no progress: rank 1 on localhost is in `time.sleep(600)`")
        assert "rank 0 waits in" in about["note"]
        assert about["places"]["1"] == f"`time.sleep(600)` at {program}:5"
    finally:
        ringctl("stop", run)


def test_a_signal_is_only_sent_to_ranks_that_want_it() -> None:
    """It would kill a program that knows nothing of it."""
    run = detach(["sh", "-c", "echo up; sleep 600"])
    wait_until_up(run)
    about = explain(run, code=1)
    assert about["note"] == "the run goes on; no rank has failed"
    assert set(about["places"]) == {"0", "1"}
    state = json.loads(ringctl("status", "--json").stdout)
    assert [rank["state"] for rank in state["ranks"]] == ["running", "running"]
    ringctl("stop", run)


def test_a_program_with_its_own_use_for_usr1_is_not_disturbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    handler = "import signal, sys, time; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(9))"
    Path("own.py").write_text(f"{handler}\nprint('up', flush=True)\ntime.sleep(600)\n")
    run = detach(["python", "-S", "own.py"])
    wait_until_up(run)
    explain(run, code=1)
    state = json.loads(ringctl("status", "--json").stdout)
    assert [rank["state"] for rank in state["ranks"]] == ["running", "running"]
    ringctl("stop", run)


def test_a_rank_that_was_stopped_by_a_signal_is_told() -> None:
    run = detach(["sh", "-c", "echo $$; exec sleep 600"], world=1)
    pid = int(wait_for(lambda: ringctl("logs", "--no-prefix").stdout, "its number"))
    os.kill(pid, signal.SIGSTOP)
    assert explain(run, code=1)["places"] == {"0": "a stop by a signal (SIGSTOP) or a debugger"}
    os.kill(pid, signal.SIGCONT)
    ringctl("stop", run)


@pytest.mark.parametrize(
    "log",
    [
        "run 20260101-0-abcd: 1 rank on 1 host\ncommand: echo EADDRINUSE\nrun 20260101-0-abcd succeeded\n",
        "OSError: [Errno 98] EADDRINUSE, trying port 6007\n" + "".join(f"step {n}\n" for n in range(100)),
        "nohup: ignoring SIGHUP\nstep 1\n",
        "wandb: Authentication failed, going on offline\nstep 1\n",
        "urllib3: ConnectionResetError(104, 'Connection reset by peer'); retrying\nstep 1\n",
        '{"kind": "line", "time": 1}\n{"kind": [[[\nstep 1\n',
    ],
)
def test_what_went_on_after_all_is_no_failure(log: str, tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(log)
    assert json.loads(ringctl("explain", str(path), "--json", code=1).stdout)["explained"] is False
