"""`ringctl exec`: one command everywhere, labelled output, a summary, and every byte as it was."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher import fanout, hostproc, remote
from launcher.errors import NO_THREAD
from launcher.fanout import fan_out
from launcher.hostanswer import SENTINEL
from tests.cluster import Cluster
from tests.launcher.hosts import HOME, Hosts, agents, inventory, left_on, ssh_config, vanish
from tests.launcher.ringctl import RINGCTL, is_alive, ringctl, start, wait_for

pytestmark = pytest.mark.usefixtures("cluster")


def results(*args: str, code: int) -> dict[str, Any]:
    found = json.loads(ringctl("exec", "--json", *args, code=code).stdout)
    return {result.pop("host"): result for result in found}


def test_output_is_labelled_and_exit_codes_are_summed_up(cluster: Cluster) -> None:
    script = 'hostname; printf "no end" >&2; case $(hostname) in server[24]) exit 7;; esac'
    done = ringctl("exec", "--", "sh", "-c", script, code=1)
    assert sorted(done.stdout.splitlines()) == [f"[{host}] {host}" for host in cluster.names]
    assert sorted(done.stderr.splitlines()) == [
        *(f"[{host}] no end" for host in cluster.names),
        "exit code 0: 2 of 4 (server1,3)",
        "exit code 7: 2 of 4 (server2,4)",
    ]


def test_all_well_is_zero_and_an_unreachable_host_is_four_and_named(cluster: Cluster) -> None:
    assert ringctl("exec", "--", "true").stderr == "exit code 0: 4 of 4 (server1-4)\n"
    cluster.reset_port("server3", 22)
    done = ringctl("exec", "--", "false", code=4)
    assert "exit code 1: 3 of 4 (server1-2,4)\n" in done.stderr
    assert f"error: server3: connection refused by {cluster.address('server3')}:22\n" in done.stderr


def test_json_has_a_result_or_an_error_for_each_host(cluster: Cluster) -> None:
    cluster.reset_port("server2", 22)
    found = results(
        "--include", "server1,server2", "--", "sh", "-c", "echo out; echo err >&2; exit 3", code=4
    )
    assert found["server1"] == {"exit_code": 3, "out": "out\n", "err": "err\n"}
    assert found["server2"] == {"error": f"server2: connection refused by {cluster.address('server2')}:22"}


def test_a_command_that_is_missing_or_killed_has_an_exit_code_as_in_a_shell() -> None:
    assert results("--include", "server1", "--", "no-such-command", code=1)["server1"]["exit_code"] == 127
    assert (
        results("--include", "server1", "--", "sh", "-c", "kill -9 $$", code=1)["server1"]["exit_code"] == 137
    )


def test_output_that_is_no_text_stays_as_it_is() -> None:
    command = ["exec", "--include", "server1", "--", "printf", r"\377\376\n\001x"]
    done = subprocess.run([*RINGCTL, *command], capture_output=True)
    assert done.stdout == b"[server1] \xff\xfe\n[server1] \x01x\n"


def test_more_output_than_the_window_holds_on_either_stream_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.transport.ssh.WINDOW", 1 << 16)
    script = "head -c 200000 /dev/zero >&2; head -c 200000 /dev/zero; head -c 200000 /dev/zero >&2"
    with agents() as found:
        done = found["server1"].transport.run(["sh", "-c", script], b"", 30.0)
    assert (len(done.out), len(done.err), done.exit_code) == (200_000, 400_000, 0)


@pytest.mark.parametrize("command", [("sleep", "1000"), ("yes", "y" * 1000)], ids=["silent", "endless"])
def test_a_command_that_does_not_end_is_given_up_on(cluster: Hosts, command: tuple[str, ...]) -> None:
    done = ringctl("exec", "--include", "server1", "--timeout", "1", "--", *command, code=4)
    assert done.stderr == "error: server1: no answer within 1 s\n"
    wait_for(lambda: not left_on(cluster), "the command's end there")


def test_what_was_printed_before_the_time_was_up_is_shown() -> None:
    only = ("--include", "server1,server2", "--timeout", "1")
    script = ("sh", "-c", "echo out; echo err >&2; sleep 1000")
    done = ringctl("exec", *only, "--", *script, code=4)
    assert sorted(done.stdout.splitlines()) == ["[server1] out", "[server2] out"]
    assert "[server1] err\n" in done.stderr
    found = results(*only, "--", *script, code=4)
    assert found["server1"] == {"error": "server1: no answer within 1 s", "out": "out\n", "err": "err\n"}


# --- Nobody waits any more -----------------------------------------------------------------------

SOME = ("server1", "server2")
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1); time.sleep(1000)"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_command_ends_with_the_controller(cluster: Hosts, how: signal.Signals) -> None:
    """Also one that others started, and that does not listen to a polite request."""
    command = ("sh", "-c", f'sleep 1000 & python3 -c "{STUBBORN}"; true')
    process = start("exec", "--", *command)
    wait_for(lambda: all(len(cluster.processes(host)) >= 4 for host in cluster.names), "its start everywhere")
    process.send_signal(how)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == (130 if how == signal.SIGINT else -how)
    assert "Traceback" not in errors
    wait_for(lambda: not left_on(cluster), "the command's end there")


# Each in a group, a session, or both of its own; the last by a parent that the first request ends.
APART = """
timeout 1000 sleep 1000 &
setsid sh -c "trap '' TERM; setsid sleep 1000 & sleep 1000" &
setsid -w sh -c "setsid sh -c \\"trap '' TERM; sleep 1000; sleep 1000\\" & exec sleep 1000" &
setsid -w sleep 1000; true
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL, None])
def test_a_command_ends_also_in_groups_and_sessions_of_its_own(
    cluster: Hosts, how: signal.Signals | None
) -> None:
    only = ("--include", "server1,server2", "--timeout", "1000" if how else "3")
    process = start("exec", *only, "--", "sh", "-c", APART)
    wait_for(
        lambda: all(str(left_on(cluster).get(host)).count("'sleep 1000'") == 6 for host in SOME), "all of it"
    )
    if how:
        process.send_signal(how)
    process.communicate(timeout=30)
    assert process.returncode == {signal.SIGINT: 130, signal.SIGKILL: -9, None: 4}[how]
    wait_for(lambda: not left_on(cluster), "the end of all of it")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL, None])
def test_on_this_machine_too_it_ends_in_groups_and_sessions_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: signal.Signals | None
) -> None:
    (tmp_path / "here.yaml").write_text("hosts: [{name: here, local: true}]\n")
    monkeypatch.setenv("RINGCTL_HOSTS", str(tmp_path / "here.yaml"))
    began = tmp_path / "began"
    script = f"""
        setsid -w sh -c 'sleep 1000 & echo $$ $! >{began}; wait' &
        timeout 1000 sh -c 'echo $$ >>{began}.2; exec sleep 1000'
    """
    process = start("exec", "--timeout", "1000" if how else "2", "--", "sh", "-c", script)
    files = (began, Path(f"{began}.2"))
    wait_for(lambda: all(file.exists() and file.read_text().endswith("\n") for file in files), "its start")
    pids = [int(pid) for file in files for pid in file.read_text().split()]
    if how:
        process.send_signal(how)
    process.communicate(timeout=30)
    if how == signal.SIGKILL:
        wait_for(lambda: not any(map(is_alive, pids)), "the end of all of it")
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_where_processes_cannot_be_looked_at_its_own_group_ends(shell: str) -> None:
    script = remote.SCRIPT.replace("/proc/", "/nowhere/")
    argv = [shell, "-c", script, "sh", "begun", "20", "sh", "-c", "trap '' TERM; sleep 1000; sleep 1000"]
    pipe = subprocess.PIPE
    heard = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
    assert heard.stdout is not None
    assert heard.stdout.readline() == b"begun\n"
    heard.communicate(timeout=30)  # which closes its stdin, and waits for all who have its output
    assert heard.returncode == -signal.SIGTERM


BEGINS_MORE = """
    use POSIX; $SIG{TERM} = "IGNORE"; $| = 1; print "begun\\n";
    for (1..400) { if (!fork()) { POSIX::setsid(); sleep 60; exit } select undef, undef, undef, 0.01 }
    sleep 60
"""
TAKES_ALL_ROOM = """
    $SIG{TERM} = "IGNORE"; $| = 1;
    while (1) { my $pid = fork(); last if !defined $pid; if (!$pid) { sleep 60; exit } }
    print "begun\\n"; sleep 60
"""


@pytest.mark.parametrize(
    ("program", "most"), [(BEGINS_MORE, 0), (TAKES_ALL_ROOM, 30)], ids=["more", "no room"]
)
@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_what_begins_ever_more_ends_and_what_leaves_no_room_for_another_process(
    shell: str, program: str, most: int
) -> None:
    mark = f"mark-{secrets.token_hex(8)}"
    user = 40_000 + secrets.randbelow(20_000)  # nobody else's processes count
    with given_up(shell, "perl", "-e", program, mark, user=user, most=most):
        pass
    wait_for(lambda: not marked(mark), "the end of all of it")


def test_what_processes_of_others_are_called_does_not_decide_who_is_ended() -> None:
    place = Path("/tmp") / secrets.token_hex(2)
    place.mkdir()
    name = f'$0 = " {place}/*\\n"; $| = 1; print "called\\n"; sleep 60'
    pipe, own = subprocess.PIPE, secrets.token_hex(8)
    other = subprocess.Popen(["perl", "-e", "sleep 60", own], start_new_session=True)
    called = subprocess.Popen(["perl", "-e", name], stdout=pipe, start_new_session=True)
    try:
        for number in range(30):  # as many as the fields of a process
            (place / f"b{number}").touch()
        assert called.stdout is not None
        called.stdout.readline()
        with given_up("sh", "sleep", "1000") as process:
            (place / f"a 99999.1:{process.pid}:{other.pid}:0: b").touch()
        assert other.poll() is None
    finally:
        for each in (other, called):
            each.kill()
            each.communicate()
        shutil.rmtree(place)


@contextlib.contextmanager
def given_up(
    shell: str, *command: str, user: int | None = None, most: int = 0
) -> Iterator[subprocess.Popen[bytes]]:
    """A command as a host runs it, with whatever is done beside it; then nobody waits for it any more."""

    def limit() -> None:
        if most:
            resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
        if user is not None:
            os.setgid(user)
            os.setuid(user)

    argv, pipe = [shell, "-c", remote.SCRIPT, "sh", "heard", "20", *command], subprocess.PIPE
    process = subprocess.Popen(
        argv,
        stdin=pipe,
        stdout=pipe,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=limit,
        cwd="/",
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"heard\n"
    if "perl" in command:
        assert process.stdout.readline() == b"begun\n"
    yield process
    process.communicate(timeout=30)


def marked(mark: str) -> list[int]:
    """The processes that have this among their words."""
    found = []
    for pid in hostproc.all_pids():
        with contextlib.suppress(OSError):
            if mark.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def quick(beat_s: float, *args: str) -> subprocess.Popen[str]:
    """ringctl with more beats a second."""
    program = f"from launcher import __main__, remote; remote.BEAT_S = {beat_s}; __main__.main()"
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", program, *args], stdout=pipe, stderr=pipe, text=True)


def test_a_command_ends_though_the_controller_went_without_a_word(cluster: Hosts) -> None:
    process = quick(0.2, "exec", "--include", "server1", "--", "sh", "-c", "sleep 1000 & sleep 1000")
    wait_for(lambda: str(left_on(cluster)).count("sleep 1000") > 2, "its start")
    vanish(cluster, "server1", process)


def test_a_controller_that_is_suspended_hears_all_of_it_later(cluster: Hosts) -> None:
    begun = cluster.path("server1", f"{HOME}/begun")
    script = "touch begun; printf a >&2; sleep 0.5; printf b >&2; touch over"
    process = quick(0.02, "exec", "--include", "server1", "--", "sh", "-c", script)
    wait_for(begun.exists, "its start")
    process.send_signal(signal.SIGSTOP)
    wait_for(begun.with_name("over").exists, "its end")
    process.send_signal(signal.SIGCONT)
    _, errors = process.communicate(timeout=30)
    assert errors == "[server1] ab\nexit code 0: 1 of 1 (server1)\n"


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_beats_are_in_no_output_and_what_sends_them_ends_with_the_command(shell: str) -> None:
    """Also where it writes no newline, shows the processes, or a login shell makes one stream of both."""
    script = """
        for n in 1 2 3 4 5; do printf o$n; printf e$n >&2; sleep 0.1; done; cat /proc/$PPID/cmdline; exit 3
    """
    sentinel = SENTINEL.decode().strip()
    argv = [shell, "-c", remote.SCRIPT, "sh", sentinel, "0.02", "sh", "-c", script]
    pipe = subprocess.PIPE
    heard = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
    assert heard.stdout is not None
    assert heard.stderr is not None
    out, err = heard.stdout.read(), heard.stderr.read()
    assert heard.wait() == 3
    assert err.count(remote.BEAT) > 5
    assert remote.after_mark(err) == b"e1e2e3e4e5"
    assert remote.BEAT not in out
    assert b"ringctl-beat" in remote.after_mark(out).removeprefix(b"o1o2o3o4o5")
    assert remote.after_mark(out + err).endswith(b"e1e2e3e4e5")


def test_ctrl_c_is_not_held_up_by_a_host_that_says_nothing(cluster: Hosts) -> None:
    ssh_config("ConnectTimeout 60")
    cluster.cut("server2")
    process = start("exec", "--include", "server1,server2", "--", "echo", "here")
    assert process.stdout is not None
    assert process.stdout.readline() == "[server1] here\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)  # half of what the other would be waited for
    assert process.returncode == 130


def test_what_a_command_leaves_in_the_background_on_purpose_stays(cluster: Hosts) -> None:
    done = ringctl("exec", "--include", "server1", "--", "sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo $!")
    label, pid = done.stdout.split()
    assert label == "[server1]"
    wait_for(
        lambda: [process.argv for process in cluster.processes("server1")] == [("sleep", "1000")],
        "the end of all but that",
    )
    cluster.run("server1", "kill", pid)


def test_fanning_out_hears_of_each_as_it_comes_and_leaves_what_is_under_way_when_interrupted() -> None:
    slow, heard = threading.Event(), []

    def work(item: int) -> int:
        if item == 0:
            slow.wait(60)
        return item * item

    def done(item: int, result: object) -> None:
        heard.append((item, result))
        if len(heard) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fan_out(range(4), work, done)
    assert sorted(heard) == [(1, 1), (2, 4), (3, 9)]
    slow.set()
    assert fan_out(range(4), work) == {0: 0, 1: 1, 2: 4, 3: 9}


def test_with_fewer_threads_than_hosts_all_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[threading.Thread] = []
    begin = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError(NO_THREAD)
        started.append(thread)
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    assert fan_out(range(9), lambda number: number + 1) == {number: number + 1 for number in range(9)}


def test_a_bug_is_raised_once_all_others_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fanout, "AT_ONCE", 2)
    last, heard = threading.Event(), []

    def work(item: int) -> None:
        if item == 0:
            raise ZeroDivisionError
        if item == 2:  # begun by whoever came to grief with the first
            last.set()
        last.wait(60)

    with pytest.raises(ZeroDivisionError):
        fan_out(range(3), work, lambda item, _: heard.append(item))
    assert sorted(heard) == [1, 2]


def test_this_machine_as_a_host_is_treated_alike(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "here.yaml").write_text("hosts: [{name: here, local: true}]\n")
    monkeypatch.setenv("RINGCTL_HOSTS", str(tmp_path / "here.yaml"))
    found = results("--timeout", "1", "--", "sh", "-c", "echo out; sleep 1000 & sleep 1000", code=4)
    assert found["here"] == {"error": "here: no answer within 1 s", "out": "out\n", "err": ""}
    assert results("--", "cat", code=0)["here"] == {"exit_code": 0, "out": "", "err": ""}


def test_nothing_in_an_inventory_reaches_a_shell(cluster: Cluster) -> None:
    """Each of these would leave a file if a shell read it."""
    evil = "$(touch pwned) `touch pwned`; touch pwned; ' touch pwned '"
    inventory(
        cluster,
        server1={"python": f"python3{evil}"},
        server2={"workdir": f"/tmp/{evil}"},
        server3={"env": {"venv": evil}},
        server4={"variables": {"EVIL": evil}, "env": None},
    )
    for chosen in ("server1", "server2,server3"):
        assert "Traceback" not in ringctl("launch", "--include", chosen, "--", "touch", "x", code=None).stderr
    done = ringctl("launch", "--include", "server4", "--", "sh", "-c", 'printf "%s" "$EVIL"')
    assert evil in done.stdout
    left = ringctl(
        "exec", "--include", "server2,server3,server4", "--", "find", HOME, "-name", "pwned"
    ).stdout
    assert left == ""
    assert not cluster.path("server1", f"{HOME}/pwned").exists()


def test_exec_needs_hosts_and_says_so(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RINGCTL_HOSTS")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "there is no inventory here" in ringctl("exec", "--", "true", code=2).stderr
