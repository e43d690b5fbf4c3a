"""Failures that really happen, on this machine and on the hosts, and what ringctl says of each."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher import text
from launcher.model import Event, RunState
from tests.launcher import hosts
from tests.launcher.failing import (
    MEET,
    Step,
    explained,
    failure,
    failure_and_screen,
    failure_together,
    produces,
    program,
    together,
    watched,
)
from tests.launcher.hosts import Hosts, inventory


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# --- One process and its host --------------------------------------------------------------------

ALONE = {
    "disk": "import os; os.write(os.open('/dev/full', os.O_WRONLY), b'x')",
    "nofile": """
        import os, resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (9, 9))
        [os.open("/", os.O_RDONLY) for _ in range(9)]
    """,
    "no_torch": "import torch",
    "module_missing": "import no_such_module",
    "library_missing": "import ctypes; ctypes.CDLL('libnosuch.so.9')",
    "file_missing": "open('no-such-file')",
    "readonly": "open('/proc/sys/kernel/ostype', 'w')",
    "oom": "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28)); bytes(1 << 30)",
    "dataset": "import gzip, io; gzip.open(io.BytesIO(gzip.compress(b'x' * 9999)[:30])).read()",
    "unpicklable": "import pickle; pickle.dumps(lambda: 1)",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "terminated": "import os; os.kill(os.getpid(), 15)",
    "sighup": "import os; os.kill(os.getpid(), 1)",
    "crash": "import ctypes; ctypes.string_at(0)",
    "shm": """
        import mmap
        with open("short", "w+b") as f:
            f.truncate(8192)
            memory = mmap.mmap(f.fileno(), 8192)
            f.truncate(0)
            memory[5000]
    """,
    "sigill": """
        import ctypes, mmap, platform
        code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        code.write(bytes([0x0F, 0x0B]) if platform.machine() == "x86_64" else bytes(4))
        ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
    """,
}  # fmt: skip


@produces(*ALONE)
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("id_", ALONE)
def test_what_a_rank_dies_of_is_told(id_: str) -> None:
    _, path = program(ALONE[id_])
    cause = failure([sys.executable, "-S", path], prefork=False)
    assert (cause.id, cause.rank, cause.known) == (id_, 0, True)
    assert cause.fix
    assert "{host}" not in cause.fix


@pytest.mark.usefixtures("folder")
def test_an_exception_of_the_program_itself_is_shown_with_its_line_and_nothing_is_made_up() -> None:
    cause = failure(
        program("import sys\nprint('No space left on device', file=sys.stderr)\n{}['gradient']\n")
    )
    assert cause.text == "rank 0 on localhost exited with code 1: KeyError: 'gradient'"
    assert [(frame.line, frame.text) for frame in cause.trace] == [(3, "{}['gradient']")]
    assert (cause.id, cause.fix, cause.known) == ("", "", True)


OWN_SERVER = """
def fetch():  # from a server that hangs up
    there = socket.create_server(("127.0.0.1", 0))
    here = socket.create_connection(there.getsockname())
    accepted, _ = there.accept()
    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    accepted.close()
    here.recv(1)
"""
OWN_CHILD = """
def fetch():  # by a program that has ended
    child = subprocess.Popen(["true"], stdin=subprocess.PIPE, bufsize=0)
    child.wait()
    child.stdin.write(b"x")
"""
OWN_FILE = "def fetch(): raise ValueError('shard 3 is cut short: expected 4096 bytes, got 0 bytes')"


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("fetch", [OWN_SERVER, OWN_CHILD, OWN_FILE], ids=["server", "child", "file"])
def test_a_rank_that_lost_what_is_no_rank_is_named_and_not_one_that_computes_or_is_done(fetch: str) -> None:
    act = "fetch() if rank == 0 else None if rank == 2 else time.sleep(600)\n"
    body = "import os, socket, struct, subprocess, time\nrank = int(os.environ['RANK'])\n"
    start = "if rank == 0: time.sleep(0.3)\n"  # the others are where they will be
    cause = failure(program(body + textwrap.dedent(fetch) + "\n" + start + act), world=3)
    assert (cause.rank, cause.id) == (0, "")
    assert cause.trace[-1].function == "fetch"


@pytest.mark.usefixtures("folder")
def test_a_rank_that_is_killed_after_it_had_warned_and_gone_on_is_named_and_the_kill() -> None:
    body = """
    import json, os, sys, time
    metrics = open(os.environ["RINGCTL_METRICS"], "a", buffering=1)
    if os.environ["RANK"] == "0":
        print("[c10d] Connection reset by peer; No space left on device; retrying", file=sys.stderr)
        time.sleep(1)
        metrics.write(json.dumps({"step": 1}) + "\\n")
        os.kill(os.getpid(), 9)
    time.sleep(600)
    """
    cause = failure(program(body), world=2)
    assert (cause.rank, cause.id) == (0, "killed")
    assert cause.text.startswith("rank 0 on localhost was killed by SIGKILL (usually out of memory")


def test_what_is_not_known_is_said_to_be_unknown_with_the_last_lines() -> None:
    outcome, _ = watched(["sh", "-c", "echo one; echo two >&2; exit 7"])
    assert outcome.cause is not None
    assert not outcome.cause.known
    shown = text.cause_lines(outcome)
    assert shown[0] == "failed first: rank 0 on localhost exited with code 7: two"
    assert shown[1:] == ["  why is not known here; its last lines were", "  | two"]


# --- Ranks that need each other ------------------------------------------------------------------


@pytest.mark.usefixtures("folder")
def test_a_rank_that_raises_in_step_3_is_named_with_its_own_lines() -> None:
    body = """
    def train(number):
        if rank == 1 and number == 3:
            raise ValueError("the third batch is bad")
        step(number)

    join()
    for number in range(1, 100):
        train(number)
    """
    cause = failure_together(body, world=3)
    assert cause.text == "rank 1 on localhost exited with code 1: ValueError: the third batch is bad"
    assert [frame.text for frame in cause.trace] == [
        "train(number)",
        'raise ValueError("the third batch is bad")',
    ]


@produces("peer_died")
@pytest.mark.usefixtures("folder")
def test_a_rank_that_is_killed_is_named_and_not_those_that_lost_it() -> None:
    command = together("join()\nstep(1)\nif rank == 1: os.kill(os.getpid(), 9)\nstep(2)")
    cause, screen = failure_and_screen(command, world=3)
    assert (cause.rank, cause.id) == (1, "killed")
    assert "was killed by SIGKILL" in cause.text
    alone = explained(screen.log_of(0))
    assert (alone.rank, alone.id) == (0, "peer_died")
    assert "the rank that failed first is not in this log" in alone.fix


@produces("hang")
@pytest.mark.usefixtures("folder")
def test_a_rank_that_hangs_is_named_with_its_step_and_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGCTL_WATCHDOG", "1")
    command = together(
        """
        def load(number):
            if rank == 1 and number == 4:
                time.sleep(600)  # a disk that does not answer

        join()
        for number in range(1, 100):
            load(number)
            step(number)
        """,
        timeout=3,
    )
    outcome, screen = watched(command, world=3)
    cause = outcome.cause
    assert cause is not None
    assert (cause.rank, cause.id) == (1, "hang")
    assert "rank 1 on localhost, after step 3, hung: it sat in `time.sleep(600)" in cause.text
    assert "waited for it in `dist.all_reduce(torch.ones(size))`" in cause.text
    assert [frame.function for frame in cause.trace] == ["<module>", "load"]
    noted = [
        note for note in screen.notes if note.startswith("no progress: rank 1 on localhost, after step 3")
    ]
    assert len(noted) == 1
    assert "ranks 0,2 wait in `dist.all_reduce" in noted[0]


@pytest.mark.usefixtures("folder")
def test_a_slow_run_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGCTL_WATCHDOG", "0.3")
    slow = "import time\nend = time.monotonic() + 1.5\nwhile time.monotonic() < end: pass\n"
    outcome, screen = watched(program(slow), prefork=False)
    assert (outcome.state.state, screen.notes) == ("succeeded", [])


UNEVEN = "join()\nfor number in range(3 if rank == 1 else 5):\n    step(number)\n"


@produces("uneven")
@pytest.mark.usefixtures("folder")
def test_ranks_with_fewer_batches_are_named() -> None:
    cause = failure_together(UNEVEN)
    assert (cause.rank, cause.id) == (1, "uneven")
    assert "rank 1 on localhost, after step 2, had ended by itself, without an error" in cause.text
    assert "drop_last=True" in cause.fix


@pytest.mark.usefixtures("folder")
def test_ranks_that_wait_in_different_calls_are_told_apart() -> None:
    cause = failure_together(UNEVEN + "dist.barrier()", timeout=2)
    assert cause.id == "uneven"
    assert "rank 0 in `dist.all_reduce(torch.ones(size))`" in cause.text
    assert "rank 1 in `dist.barrier()`" in cause.text


@produces("code_differs")
@pytest.mark.usefixtures("folder")
def test_ranks_with_different_models_are_told() -> None:
    assert failure_together("join()\nstep(1, 1000 - 100 * rank)").id == "code_differs"


@produces("port_used")
@pytest.mark.usefixtures("folder")
def test_a_port_that_is_taken_after_the_start_is_told() -> None:
    body = """
    import socket
    if rank == 0:
        taken = socket.create_server(("", int(os.environ["MASTER_PORT"])))
    join()
    """
    cause = failure_together(body)
    assert (cause.rank, cause.id) == (0, "port_used")
    assert "--master-port" in cause.fix


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("late", ["metrics.close()", "logging.info('saved it')"])
def test_a_rank_that_says_whom_it_lost_and_ends_later_is_not_named(
    late: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether its metrics come when their file is closed, or it still has something to say."""
    monkeypatch.setattr("launcher.diagnose.WHILE_S", 0.5)
    body = f"""
    import logging
    logging.basicConfig(level=logging.INFO)
    metrics = open(os.environ["RINGCTL_METRICS"], "a")
    join()
    try:
        for number in range(3 if rank == 1 else 5):
            step(number)
    except RuntimeError as error:
        logging.error("training failed: %s", error)
        time.sleep(1)  # an emergency checkpoint
        {late}
        os._exit(1)
    """
    cause = failure_together(body)
    assert (cause.rank, cause.id) == (1, "uneven")
    assert cause.text.endswith("rank 0 on localhost waited for it")


@produces("ranks")
@pytest.mark.usefixtures("folder")
def test_a_rank_that_never_comes_is_named() -> None:
    cause = failure_together("if rank == 1: time.sleep(600)\njoin()", timeout=1)
    assert cause.id == "ranks"
    assert "; missing: rank 1 on localhost, which was in `if rank == 1: time.sleep(600)`" in cause.text


@produces("alias_missing")
@pytest.mark.usefixtures("folder")
def test_a_name_that_nobody_knows_is_told() -> None:
    body = "os.environ['MASTER_ADDR'] = 'no-such-host.invalid' if rank else os.environ['MASTER_ADDR']\njoin()"
    cause = failure_together(body, timeout="1 if rank else 30")
    assert (cause.rank, cause.id) == (1, "alias_missing")


# --- Hosts and what is between them --------------------------------------------------------------

ON_HOSTS = "join()\nfor number in range(100000):\n    step(number)\n    time.sleep(0.02)\n"


def once_it_trains(act: Callable[[], None]) -> Step:
    """Do something to a run that has made some steps."""
    done: list[bool] = []

    def look(_: list[Event], state: RunState) -> None:
        steps = [rank.metric.get("step", 0) for rank in state.ranks.values()]
        if not done and min(steps) > 3:
            done.append(True)
            act()

    return look


@pytest.fixture
def two(cluster: Hosts) -> Hosts:
    inventory(cluster, only=("server1", "server2"))
    return cluster


def test_a_firewall_raised_while_they_train_is_told_from_a_hang(two: Hosts) -> None:
    def drop() -> None:
        two.drop_between("server1", "server2")

    cause = failure(together(ON_HOSTS, timeout=3), local=False, world=2, during=once_it_trains(drop))
    assert cause.id == "firewall"
    assert "all wait for each other: packets between the hosts are lost" in cause.text


@produces("host_gone")
def test_a_host_that_is_gone_while_they_train_is_named(two: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.follow.SILENCE_S", 2.0)
    monkeypatch.setattr("launcher.watch.RETRY_S", 1.0)
    monkeypatch.setattr("launcher.transport.connect.CONNECT_S", 2.0)
    command = together(ON_HOSTS, timeout=3)
    outcome, _ = watched(command, local=False, world=2, during=once_it_trains(lambda: two.cut("server2")))
    cause = outcome.cause
    assert cause is not None
    assert (cause.rank, cause.host, cause.id) == (1, "server2", "host_gone")
    assert "server2" in cause.text
    assert "cannot be heard any more" in cause.text
    hosts.mend(two)
    with hosts.agents() as found:
        found["server2"].stop(outcome.state.run, 0.0)


@produces("firewall")
def test_a_firewall_that_only_lets_the_master_port_through_is_told(two: Hosts) -> None:
    for host, peer in (("server1", "server2"), ("server2", "server1")):
        two.drop_port(host, (32768, 60999), from_=peer, new_only=True)
    cause = failure(together(MEET, timeout=1), local=False, world=2)
    assert cause.id == "firewall"
    assert "preflight" in cause.fix


@produces("loopback_name")
def test_a_wrong_interface_that_the_user_insists_on_is_told(two: Hosts) -> None:
    inventory(two, only=("server1", "server2"), defaults={"ifname": "lo"})
    # Rank 1 is the first to give up, however long a busy machine takes to start either of them.
    cause = failure(together("join()", timeout="30 if rank == 0 else 5"), local=False, world=2)
    assert cause.id == "loopback_name"
    assert "ifname" in cause.fix


@produces("ifname")
def test_an_interface_that_is_not_there_is_told(cluster: Hosts) -> None:
    inventory(cluster, only=("server2",), server2={"ifname": "eth9"})
    cause = failure(together("join()"), local=False, world=1)
    assert (cause.host, cause.id) == ("server2", "ifname")
    assert "eth9" in cause.text


@pytest.fixture
def little_memory(cluster: Hosts) -> Iterator[Hosts]:
    inventory(cluster, only=("server3",))
    cluster.limit_memory("server3", 300 << 20)
    yield cluster
    hosts.reset(cluster)
    cluster.reboot("server3")


def test_the_kernels_own_kill_for_want_of_memory_is_told_for_sure(little_memory: Hosts) -> None:
    command = program("data = bytearray()\nwhile True: data += bytes(1 << 24)\n")
    cause = failure(command, local=False, world=1)
    assert (cause.host, cause.id) == ("server3", "oom")
    assert "was killed by SIGKILL" in cause.text
    assert little_memory.names


@produces("ssh_hostkey", "ssh_auth")
@pytest.mark.parametrize(
    ("options", "id_"),
    [
        (["-o", "StrictHostKeyChecking=yes"], "ssh_hostkey"),
        (
            ["-o", "StrictHostKeyChecking=no", "-o", "IdentitiesOnly=yes", "-o", "IdentityFile=/dev/null"],
            "ssh_auth",
        ),
    ],
)
def test_what_ssh_itself_says_is_explained(cluster: Hosts, options: list[str], id_: str) -> None:
    to = f"nobody@{cluster.address('server1')}"
    common = ["-F", "/dev/null", "-o", "BatchMode=yes", "-o", "UserKnownHostsFile=/dev/null"]
    ssh = ["ssh", *common, *options, to, "true"]
    said = subprocess.run(ssh, capture_output=True, text=True, timeout=30).stderr
    assert explained(said).id == id_
