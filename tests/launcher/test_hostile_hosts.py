"""Hosts that are broken, or not on our side: an error that names them, soon and in little memory."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import resource
import shlex
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import paramiko
import pytest

from launcher import environment, history, kit, runs, showlogs, watch
from launcher.agent import Agent, Conversation, decoded, states_of
from launcher.cli_remote_logs import checked, event_of
from launcher.client import Client, Nonsense
from launcher.errors import HostError, RingctlError
from launcher.follow import Decoder, Piece, Reader, Update, follow
from launcher.hostproc import signal_name
from launcher.model import Event, Host, HostPlan, Inventory, Plan, RankSpec, RankState, RunState
from launcher.plan import LaunchOptions
from launcher.push import push, take
from launcher.run import start
from launcher.runs import Found, found_of, updated
from launcher.told import check_exit, checked_state
from launcher.transport import Pool, ssh
from launcher.transport.connect import quick_transport
from launcher.transport.local import LocalTransport
from launcher.transport.sentences import is_silence, translated
from tests.conftest import eventually
from tests.launcher import hosts
from tests.launcher.hosts import HOME, Hosts, write_home
from tests.launcher.ringctl import (
    RINGCTL,
    detach,
    ringctl,
    run_folder,
    state,
    wait_until_final,
)

MARK = "--ringctl-hostd--"
MOST_MEMORY = 700 << 10  # in KiB: what a gigabyte does not fit into


class Liar(LocalTransport):
    """A way to a host whose Python is a script of ours."""

    def __init__(self, script: str) -> None:
        super().__init__(Host("liar", local=True))
        self.script = script

    def program(self, source: str) -> list[str]:  # noqa: ARG002 - it does not care what it is asked for
        return ["/bin/sh", "-c", self.script, "sh", "-"]


def liar(script: str) -> Agent:
    transport = Liar(script)
    return Agent(transport.host, transport)


def telling(*lines: Any) -> str:
    """A script that sends these lines as hostd would."""
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    return f"cat <<'END'\n{MARK}\n{text}END"


# --- All of ringctl, on hosts that lie -----------------------------------------------------------

ENDLESS = {
    "server1": f"echo {MARK}; head -c 20000 /dev/urandom",
    "server2": "yes a chatty login",
    "server3": f"""printf -- '{MARK}\\n{{"a":"'; head -c 1000000000 /dev/zero""",
    "server4": f"echo {MARK}; head -c 1000000 /dev/zero | tr '\\0' '['; echo",
}


# What a process is told to have taken at most begins with what whoever forked it had: so somebody small does.
WEIGH = """if True:
    import resource, subprocess, sys
    code = subprocess.call(sys.argv[1:], stdout=subprocess.DEVNULL)
    print(code, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def weighed(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """What it said on stderr; its exit code and the memory that it took, in KiB, on stdout."""
    return subprocess.run(
        [sys.executable, "-S", "-c", WEIGH, *argv], capture_output=True, text=True, check=True
    )


def bounded(*args: str, code: int) -> str:
    """What ringctl says on stderr; fails if it took the memory that a host wanted it to."""
    done = weighed([*RINGCTL, *args])
    ended, used = map(int, done.stdout.split())
    assert ended == code, done.stderr
    assert "Traceback" not in done.stderr
    assert used < MOST_MEMORY
    return done.stderr


def test_garbage_endless_output_a_gigabyte_and_a_thousand_brackets_end_in_an_error_of_their_host(
    cluster: Hosts,
) -> None:
    for host in cluster.names:
        write_home(cluster, host, "python", '#!/bin/sh\nexec python3 "$@"\n')
        cluster.run(host, "chmod", "+x", "python")
    hosts.inventory(cluster, defaults={"python": f"{HOME}/python"})
    done = ringctl("launch", "--skip-preflight", "--detach", "--json", "--", "true")
    run = json.loads(done.stdout)["run"]
    for host, script in ENDLESS.items():
        write_home(cluster, host, "python", f"#!/bin/sh\n{script}\n")
    for args in (("logs", run), ("preflight",)):
        said = bounded(*args, code=4)
        if args[0] != "preflight":  # which says it in its table
            assert all(f"{host}: " in said for host in ENDLESS), said


# --- One answer ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "script",
    [
        "exit 3",
        "head -c 5000 /dev/urandom",
        f"echo {MARK}; echo {{}}",
        f"echo {MARK}; echo '[]'",
        f"""echo {MARK}; echo '{{"kind": "error"}}'""",
        f"""echo {MARK}; echo '{{"kind": "error", "error": {{"a": "\\u001b[2J"}}}}'""",
        f"""echo {MARK}; echo '{{"runs": 5, "known": 1, "have": "yes"}}'""",
        f"""echo {MARK}; echo '{{"runs": [[]], "known": true, "have": false, "missing": ["../x"]}}'""",
        f"echo {MARK}; echo {{}}; echo {MARK}; echo {{}}",
        "yes",
        "yes >&2",
    ],
)
def test_whatever_is_answered_to_a_question_is_an_error_of_that_host(script: str, tmp_path: Path) -> None:
    agent = liar(script)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("pass")
    asking: list[Callable[[], object]] = [
        lambda: agent.runs(), lambda: agent.stop("r", 0.0), lambda: agent.slots(), lambda: agent.secrets("r")
    ]  # fmt: skip
    if not script.startswith("yes"):  # once is enough to know that it is ended
        asking.append(lambda: raise_first(push(take(tmp_path / "code"), {"liar": agent})))
    for ask in asking:
        with pytest.raises(RingctlError, match=r"^liar: ") as caught:
            ask()
        assert "\x1b" not in str(caught.value)


NOW = {
    "runs": [{"run": "r", "user": "bob", "attempt": 1, "slots": 1, "world": 2, "shared": False}],
    "load": [0.5, 0.4, 0.3], "cores": 4, "memory_free": 1, "memory_total": 2,
    "disk_free": 3, "disk_total": -1, "time": 1e9, "problem": "",
}  # fmt: skip


def taking(**changes: Any) -> dict[str, Any]:
    return {**NOW, "runs": [{**NOW["runs"][0], **changes}]}  # type: ignore[index]  # the list above


@pytest.mark.parametrize(
    "answer",
    [
        taking(run="../../x"),
        taking(run="\x1b[2J"),
        taking(user="\x1b[2J"),
        taking(user=""),
        taking(slots=10**9, world=10**9),
        taking(slots=0),
        taking(slots=1.5),
        taking(shared=1),
        taking(world=0),
        {**NOW, "runs": [NOW["runs"][0]] * 1001},  # type: ignore[index]  # the list above
        {**NOW, "runs": {}},
        {**NOW, "load": [float("nan")] * 3},
        {**NOW, "load": [1.0] * 1000},
        {**NOW, "cores": 0},
        {**NOW, "memory_free": 10**40},
        {**NOW, "time": float("inf")},
        {key: value for key, value in NOW.items() if key != "cores"},
    ],
)
def test_slots_that_nobody_can_have_are_an_error_of_that_host(answer: dict[str, Any]) -> None:
    with pytest.raises(HostError, match=r"^liar: "):
        liar(telling(answer)).slots()


@pytest.mark.parametrize(
    "secrets", [[1], "abc", {"A": 1}, {"A": ["b"]}, {f"A{number}": "b" for number in range(1001)}]
)
def test_secrets_that_no_run_can_have_are_an_error_of_that_host(secrets: object) -> None:
    with pytest.raises(HostError, match=r"^liar: "):
        liar(telling({"secrets": secrets})).secrets("r")
    assert liar(telling({"secrets": {"A": "b"}})).secrets("r")["A"].value == "b"


def test_slots_that_somebody_has_are_told_and_words_do_no_harm() -> None:
    told = liar(telling({**NOW, "problem": "\x1b[2J no"})).slots()
    assert (told.runs[0].run, told.runs[0].user, told.load, told.disk_total) == (
        "r",
        "bob",
        (0.5, 0.4, 0.3),
        -1,
    )
    assert "\x1b" not in told.problem


GREEDY = {
    "a list of lists": "[],", "objects": '{"":0},', "numbers": "0,", "states": '{"run":0},',
}  # fmt: skip


@pytest.mark.parametrize("unit", GREEDY.values(), ids=GREEDY)
@pytest.mark.parametrize("asked", ["runs", "log"])
def test_an_answer_below_the_limit_that_would_take_gigabytes_is_refused(unit: str, asked: str) -> None:
    begin = '{"runs":[' if asked == "runs" else '{"kind":"metric","time":1,"rank":0,"a":['
    head = "" if asked == "runs" else json.dumps(CURSOR, separators=(",", ":")) + "\n"
    parts = f"{MARK + chr(10) + head + begin!r} + {unit!r} * {(60 << 20) // len(unit)} + '0]}}\\n'"
    script = f"import sys; sys.stdout.write({parts})"
    code = f"""if True:
        from tests.launcher.test_hostile_hosts import liar, sys, RingctlError, follow
        agent = liar({"exec python3 -c " + shlex.quote(script)!r})
        try:
            agent.runs() if {asked == "runs"} else list(follow({{"liar": agent}}, "r1", live=False))
        except RingctlError as error:
            print(error, file=sys.stderr)
    """
    done = weighed([sys.executable, "-c", code])
    assert done.stderr.startswith("liar: it")
    assert int(done.stdout.split()[1]) < MOST_MEMORY


@pytest.mark.parametrize("ahead", [3600.0, -3600.0, 0.0])
def test_what_a_host_says_of_its_runs_is_by_our_clock(ahead: float) -> None:
    now = time.time()
    state = {**told_state("liar", 1, r0="succeeded"), "started": now + ahead - 60.0, "ended": now + ahead}
    state["ranks"] = [{**rank, "seen": now + ahead} for rank in state["ranks"]]
    script = telling({"runs": [state], "time": now + ahead})
    (told,) = Agent(Host("liar", "192.0.2.1"), Liar(script)).runs()["runs"]
    known = [told["started"] + 60.0, told["ended"], told["ranks"][0]["seen"]]
    assert all(abs(moment - now) < 30.0 for moment in known), "but for what the answer took"


def test_what_cannot_be_read_of_many_runs_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    good = told_state("liar", 1, r0="succeeded")
    odd = [{"run": f"odd{number}"} for number in range(1000)]
    assert [state["run"] for state in liar(telling({"runs": [*odd, good]})).runs()["runs"]] == ["r1"]
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(
        "liar: what it tells of run odd0, and of 999 more, cannot be read here, and is left"
    )
    with pytest.raises(HostError, match="liar: it answered something else"):
        states_of("liar", [{}] * 100_001)


def test_a_host_with_thousands_of_runs_is_believed() -> None:
    state = told_state("liar", 1, **{f"r{rank}": "succeeded" for rank in range(8)})
    metric = {f"metric{number}": 0.12345 for number in range(20)}
    ranks = [{**rank, "metric": metric} for rank in state["ranks"]]
    runs = [{**state, "world": 8, "ranks": ranks}] * 5000
    found = decoded("liar", json.dumps({"runs": runs}).encode())["runs"]
    assert len(states_of("liar", found)[0]) == 5000


def raise_first(results: dict[str, Any]) -> dict[str, Any]:
    for result in results.values():
        if isinstance(result, RingctlError):
            raise result
    return results


def test_a_host_that_never_stops_talking_is_not_listened_to_for_longer_than_the_others() -> None:
    script = f"printf -- '{MARK}\\n'; exec python3 -c 'import os\nwhile True: os.write(1, bytes(1))'"
    conversation = liar(script).converse("x.py", "x", [{}])
    try:
        with pytest.raises(HostError, match="liar: no answer within 1 s"):
            conversation.answer(1.0)
    finally:
        conversation.close()


def test_a_conversation_is_understood_however_it_is_cut_and_does_not_cost_more_for_each_drop() -> None:
    long = "x" * (30 << 20)
    come = [b"chatty\n--ringctl-", b"hostd--\n", b'{"a":"', long.encode(), *[b"y"] * 2000, b'"', b"}\n--ring"]
    come += [b'ctl-hostd--\n{"b":1}\n' + MARK.encode() + b'\n{"c":2}\n', b""]
    channel: Any = SimpleNamespace(read=lambda _: come.pop(0))
    conversation = Conversation(Scripted(channel), "x.py", ["x"], [{}])  # type: ignore[arg-type]  # as much of a transport as it needs
    began = time.thread_time()
    assert all(long + "y" for _ in range(400))  # as if one drop in five cost a copy of what is there
    copied = time.thread_time()
    assert conversation.answer(60.0) == {"a": long + "y" * 2000}
    assert time.thread_time() - copied < copied - began
    assert conversation.noise == b"chatty\n"
    assert [conversation.answer(60.0) for _ in range(2)] == [{"b": 1}, {"c": 2}]
    with pytest.raises(HostError, match="the connection was lost"):
        conversation.answer(60.0)


class Scripted:
    """A way to a host of which what comes is known."""

    host = Host("liar", local=True)

    def __init__(self, channel: Any) -> None:
        self.channel = channel

    def stream(self, *_: Any, **__: Any) -> Any:
        return self.channel


class Frozen(paramiko.ServerInterface):
    """A server that opens sessions, and begins nothing in them."""

    def __init__(self) -> None:
        self.thawed = threading.Event()

    def check_auth_none(self, username: str) -> int:  # noqa: ARG002 - whoever it is
        return paramiko.common.AUTH_SUCCESSFUL

    def check_channel_request(self, kind: str, chanid: int) -> int:  # noqa: ARG002 - paramiko names them
        return paramiko.common.OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:  # noqa: ARG002 - paramiko names it
        self.thawed.wait(20.0)
        return False


def test_a_server_that_begins_nothing_in_a_session_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "CONNECT_S", 0.5)
    here, there = socket.socketpair()
    server, client, frozen = paramiko.Transport(there), paramiko.Transport(here), Frozen()
    try:
        server.add_server_key(paramiko.RSAKey.generate(2048))
        server.start_server(server=frozen, event=threading.Event())
        client.start_client(timeout=20.0)
        client.auth_none("anybody")
        with pytest.raises(paramiko.SSHException, match="Timeout opening channel") as silent:
            ssh.open_shell(client)
        assert is_silence(silent.value)
    finally:
        frozen.thawed.set()
        for end in (client, server):
            end.close()


def test_a_push_to_a_host_that_always_wants_the_same_comes_to_an_end(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("pass")
    snapshot = take(tmp_path)
    wants = json.dumps({"have": False, "missing": [entry.content for entry in snapshot.entries]})
    answer = push(snapshot, {"liar": liar(f"cat >/dev/null; echo {MARK}; echo '{wants}'")})["liar"]
    assert "as fast as it comes" in str(answer)


# --- Logs ----------------------------------------------------------------------------------------

CURSOR = {"kind": "cursor", "time": 1e9, "attempt": 1, "segment": 1, "offset": 0}
TICK = '{"kind":"tick","time":1000000000.0}'
LINE = {"kind": "line", "time": 1e9, "rank": 0, "stream": "out", "text": "x"}


@pytest.mark.parametrize(
    "script",
    [
        telling(CURSOR, {**LINE, "stream": "/../../../stolen"}),
        telling(CURSOR, {**LINE, "rank": "/../../stolen"}),
        telling(CURSOR, {**LINE, "rank": None}),
        telling(CURSOR, {**LINE, "text": 5}),
        telling(CURSOR, {**LINE, "end": {}}),
        telling(CURSOR, {**LINE, "time": 1e300}),
        telling(CURSOR, {**LINE, "time": 10**400}),
        telling({**CURSOR, "time": 10**400}),
        telling(CURSOR, {**LINE, "time": float("nan")}),
        telling(CURSOR, {"kind": "rank_exited", "time": 1e9, "rank": 0}),
        telling({**CURSOR, "attempt": "../../x"}),
        telling(CURSOR, {"kind": "tick", "time": 1e9}) + f"\nwhile :; do echo '{TICK}'; sleep 0.2; done",
        telling({"kind": "error", "time": 1e9, "error": {"\x1b[2J": 1}}),
        telling(CURSOR) + "\nhead -c 100000 /dev/zero | tr '\\0' '['; echo",
    ],
)
def test_what_no_rank_wrote_is_not_written_down(script: str, tmp_path: Path) -> None:
    found = Found("r1", "", (Host("liar", local=True),), 1.0)
    target = tmp_path / "a" / "b" / "c"
    with contextlib.suppress(RingctlError):
        assert showlogs.download(found, {"liar": liar(script)}, target) == 4
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert all(path.is_relative_to(target / "r1") for path in written), written


def test_one_host_that_lies_does_not_keep_the_others_from_being_heard() -> None:
    end = {"kind": "end", "time": 1e9, "state": "succeeded"}
    good = Agent(Host("good", local=True), Liar(telling(CURSOR, LINE, end)))
    agents = {"good": good, "liar": liar(telling(CURSOR, {**LINE, "rank": []}))}
    seen, lost = [], {}
    for update in follow(agents, "r1", live=True):
        seen += update.events
        lost = dict(update.lost)
    assert [event.data["text"] for event in seen if event.host == "good"] == ["x"]
    assert lost["liar"].startswith("its events cannot be read: ")


class Forgetful(Liar):
    """A host that says that it lacks our files, however often they are put there, until it has `whole`."""

    def __init__(self, whole: Path) -> None:
        lacks = f"[ -e {whole} ] || {{ printf %s '{kit.MISSING.decode()}'; exit 1; }}"
        super().__init__(f"cat >/dev/null; {lacks}\n{telling(CURSOR, LINE, END)}")
        self.installs = 0

    def install(self) -> None:
        self.installs += 1


def test_a_host_that_always_lacks_our_files_gets_them_once_and_then_counts_as_away(tmp_path: Path) -> None:
    lacking = "liar: ringctl's files have been put there, and it says that they are missing"
    host = Forgetful(tmp_path / "whole")
    agents = {"liar": Agent(host.host, host)}
    for update in follow(agents, "r1", live=False):
        assert host.installs < 2
        last = update
    assert (last.away, host.installs) == ({"liar": lacking}, 1)
    away, seen = [], []
    for update in follow(agents, "r1", live=True):
        assert host.installs < 10
        away += [update.away.get("liar")]
        seen += update.events
        if update.away:
            (tmp_path / "whole").touch()
    assert lacking in away, "it is said to whoever waits"
    assert [event.data.get("text") for event in seen] == ["x"], "who waits hears of it once it is mended"


def test_a_host_that_never_catches_up_does_not_keep_others_from_being_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor time that is spent showing what came: that may be an hour."""
    monkeypatch.setattr("launcher.follow.BEHIND_S", 2.0)
    failed = {**EXITED, "rank": 0, "state": "failed", "exit_code": 3, "time": time.time()}
    good = telling({**CURSOR, "time": time.time()}, failed) + every(0.1, 1000, {**CURSOR, "kind": "tick"})
    old = telling(CURSOR) + every(0.1, 1000, {**LINE, "rank": 1})
    agents = two(good, old)
    seen: list[Event] = []
    began, shown = time.monotonic(), 0.0
    with contextlib.closing(follow(agents, "r1", live=True, attempt=1, rank_hosts=PLACES)) as updates:
        for update in updates:
            seen += [event for event in update.events if event.host == "good"]
            if shown < 4.0:
                assert not update.caught_up
                time.sleep(0.5)
                shown += 0.5
            if seen:
                break
            assert time.monotonic() < began + 60, "what the good host said is held back"
        assert update.caught_up
        assert (update.away, update.lost) == ({}, {})
        late = next(event for update in updates for event in update.events)
    assert [event.kind for event in seen] == ["rank_exited"]
    assert late.host == "liar", "it is still heard"


def every(seconds: float, times: int, line: Any) -> str:
    said = json.dumps(line, separators=(",", ":"))
    return f"\nfor i in $(seq {times}); do echo '{said}'; sleep {seconds}; done"


def test_only_what_is_in_a_log_keeps_one_listening_who_does_not_wait_for_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not what is said about it. One that comes slowly is heard to its end, also if it is not believed."""
    monkeypatch.setattr("launcher.follow.ANSWER_S", 2.0)
    others = {**LINE, "rank": 1}
    slow = telling(CURSOR) + every(0.25, 11, others) + f"\necho '{json.dumps(END, separators=(',', ':'))}'"
    agents = two(slow, telling(CURSOR) + every(0.25, 1000, CURSOR))
    began = time.monotonic()
    for update in follow(agents, "r1", live=False, rank_hosts={0: "good"}):
        assert time.monotonic() < began + 60
        last = update
    assert last.away == {"liar": "liar: nothing whole has come for 2 s"}
    assert last.lost == {}


def test_time_that_is_spent_showing_a_log_does_not_count_against_its_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, spent = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: real() + spent[0])

    class Shown(queue.Queue[Piece]):
        """By a pager, in which somebody reads for an hour."""

        def put(self, item: Piece, block: bool = True, timeout: float | None = None) -> None:
            spent[0] += 3600.0
            super().put(item, block, timeout)

    line = json.dumps(LINE, separators=(",", ":"))
    halves = f"\nsleep 0.3; printf %s '{line[:20]}'; sleep 0.3; echo '{line[20:]}'; sleep 0.3; "
    agent = liar(telling(CURSOR) + halves + f"echo '{json.dumps(END, separators=(',', ':'))}'")
    pieces, request = Shown(), {"run": "r1", "follow": False, "attempt": 0}
    Reader(agent, request, Decoder("r1", "liar"), pieces, threading.Event()).run()
    heard = list(pieces.queue)
    assert [piece.away for piece in heard if piece.away] == []
    assert [event.data["text"] for piece in heard for event in piece.events] == ["x"]
    assert heard[-1].over


def test_a_host_that_is_given_up_for_what_it_says_is_believed_up_to_there() -> None:
    updates: list[Update] = []
    with pytest.raises(RingctlError, match="its events cannot be read: TypeError"):
        updates += follow({"liar": liar(telling(CURSOR, LINE, {**LINE, "text": 7}, END))}, "r1", live=False)
    assert [event.data["text"] for update in updates for event in update.events] == ["x"]


def test_of_an_attempt_that_did_not_start_it_is_said_how_to_see_the_one_before() -> None:
    refused = {"kind": "error", "time": 1e9, "error": "attempt 2 of run r1 was not started on this host"}
    with pytest.raises(RingctlError, match=r"not started on this host\n.*--previous"):
        list(follow({"liar": liar(telling(refused))}, "r1", live=False, attempt=2))


DEEP: Any = 1
for _ in range(400):
    DEEP = {"a": DEEP}
STACK = {"kind": "stack", "time": 1e9, "rank": 0, "state": "S", "busy": False}


@pytest.mark.parametrize(
    "lie",
    [
        {**STACK, "frames": [["a.py", float("inf"), "f", "t"]]},
        {**STACK, "frames": [["a.py", "1", "f", "t"]]},
        {**STACK, "frames": "abcd"},
        {**STACK, "frames": [], "state": DEEP},
        {"kind": "anything", "time": 1e9, "x": DEEP},
    ],
)
def test_a_host_whose_events_are_none_is_told_of_in_a_sentence(lie: dict[str, Any]) -> None:
    with pytest.raises(RingctlError, match=r"^liar: its events cannot be read: (Type|Value)Error"):
        list(follow({"liar": liar(telling(CURSOR, lie, END))}, "r1", live=True))


@pytest.mark.parametrize("lie", [{"time": 10**400}, {"kind": "stack", "frames": 5}, {"text": []}])
def test_a_service_that_tells_of_events_that_are_none_is_named(lie: dict[str, Any]) -> None:
    head = {"run": "r1", "attempt": 1, "host": "h"}
    with pytest.raises(Nonsense, match="events that are none"):
        checked(Client("http://127.0.0.1:9", "token"), [event_of({**LINE, **head, **lie})])


def test_a_metric_that_is_nested_too_deep_is_left_out_and_the_run_goes_on() -> None:
    """A program may have written it, which is nothing that its host can help."""
    metric = {"kind": "metric", "time": 1e9, "rank": 0, "step": 1, "tree": {"a": [1, {"b": 2}]}, "x": DEEP}
    agents = {"liar": liar(telling(CURSOR, metric, LINE, END))}
    events = [event for update in follow(agents, "r1", live=True) for event in update.events]
    assert [dict(event.data) for event in events if event.kind == "metric"] == [
        {"step": 1, "tree": {"a": [1, {"b": 2}]}}
    ]
    assert [event.data["text"] for event in events if event.kind == "line"] == ["x"]


EXITED = {"kind": "rank_exited", "time": 1e9, "exit_code": 0, "signal": None, "reason": ""}
END = {"kind": "end", "time": 1e9, "state": "succeeded"}
PLACES = {0: "good", 1: "liar"}


def two(good: str, lies: str) -> dict[str, Agent]:
    """Both hear what they are asked before they answer."""
    good, lies = (f"cat >/dev/null\n{script}" for script in (good, lies))
    return {"good": Agent(Host("good", local=True), Liar(good)), "liar": liar(lies)}


def test_a_host_is_not_believed_about_the_ranks_of_another() -> None:
    failed = {**EXITED, "rank": 0, "state": "failed", "exit_code": 3}
    lies = [{**EXITED, "rank": 0, "state": "succeeded"}, {**LINE, "rank": 0, "text": "all is well"}]
    own = [{**LINE, "rank": 1}, {**EXITED, "rank": 1, "state": "succeeded"}]
    agents = two(telling(CURSOR, failed, END), telling(CURSOR, *lies, own[0], *lies, own[1], END))
    updates = list(follow(agents, "r1", live=False, attempt=1, after={}, rank_hosts=PLACES))
    seen = [(e.host, e.rank, e.kind) for update in updates for e in update.events]
    assert sorted(seen) == [("good", 0, "rank_exited"), ("liar", 1, "line"), ("liar", 1, "rank_exited")]
    first = {**updates[-1].places, "liar": replace(updates[-1].places["liar"], cursor=(1, 1, 0), before=0)}
    again = follow(agents, "r1", live=False, attempt=1, after=first, rank_hosts=PLACES)
    assert [e for update in again for e in update.events if e.host == "liar"] == [], (
        "what is taken is counted"
    )


def told_state(host: str, attempt: int, **ranks: str) -> dict[str, Any]:
    nothing: dict[str, Any] = {
        "pid": 1, "exit_code": 0, "signal": None, "reason": "", "seen": 1.0, "metric": {}
    }  # fmt: skip
    its = [{**nothing, "rank": int(name[1:]), "state": how} for name, how in ranks.items()]
    about = {"run": "r1", "name": "", "world": 2, "started": 1.0, "ended": 2.0, "state": its[0]["state"]}
    return {**about, "host": host, "attempt": attempt, "ranks": its}


def test_whatever_signal_kills_a_rank_its_state_and_its_end_can_be_read() -> None:
    names = [signal_name(number) for number in range(1, 65)]
    assert len(set(names)) == 64
    assert names[42] == "SIG43", "a real-time signal has no other name"
    for name in (*names, "signal 43"):  # the last as an older ringctl wrote it
        state = told_state("h", 1, r0="failed")
        state["ranks"][0].update(signal=name, exit_code=-9)
        assert checked_state(state)["ranks"][0]["signal"] == name
        check_exit(state["ranks"][0])
    assert signal_name(1 << 8) is None, "it ended by itself"


def state_after(*states: dict[str, Any], **about: Any) -> RunState:
    its = tuple(Host(state["host"], "10.0.0." + str(n)) for n, state in enumerate(states, 1))
    found = Found("r1", "", its, 1.0, **about)
    answers = [(host, [state]) for host, state in zip(its, states, strict=True)]
    now = updated(found, answers).state  # type: ignore[arg-type]  # what a host says is any mapping
    assert now is not None
    return now


def test_a_state_tells_only_of_its_hosts_ranks_and_of_attempts_that_can_be() -> None:
    good = told_state("good", 1, r0="failed")
    now = state_after(good, told_state("liar", 1, r0="succeeded", r1="succeeded"), rank_hosts=PLACES)
    assert (now.state, now.ranks[0].state, now.ranks[0].host) == ("failed", "failed", "good")
    now = state_after(good, told_state("liar", 900000, r0="succeeded", r1="succeeded"), rank_hosts=PLACES)
    assert (now.attempt, now.ranks[0].state) == (1, "failed")
    # An attempt that nobody began here: not if only some tell of it, or others cannot be asked.
    ahead = told_state("liar", 2, r0="running", r1="running")
    now = state_after(good, ahead, rank_hosts=PLACES)
    assert (now.attempt, now.state) == (1, "failed")
    now = state_after(told_state("good", 2, r1="running"), ahead, rank_hosts=PLACES)
    assert (now.attempt, now.state) == (2, "running"), "this history is an old copy"
    its = Found("r1", "", (Host("good", "10.0.0.1"), Host("liar", "10.0.0.2")), 1.0, rank_hosts=PLACES)
    away = updated(its, [(its.hosts[0], HostError("good", "away")), (its.hosts[1], [ahead])])
    assert (away.states, away.is_over) == ((), False)
    going = told_state("good", 1, r0="running")
    now = state_after(going, told_state("liar", 2, r0="succeeded", r1="succeeded"), rank_hosts=PLACES)
    assert (now.attempt, now.ranks[0].host) == (1, "good"), "not while others go on with what is known"
    shrunk = {**told_state("good", 1, r0="succeeded"), "world": 1}
    assert state_after(shrunk, told_state("liar", 1, r1="running"), rank_hosts=PLACES).world == 2
    now = state_after(told_state("good", 500, r1="running"), told_state("liar", 500, r0="running"))
    assert (now.attempt, now.state) == (500, "running")


def plan_on(attempt: int, *hosts: str) -> Plan:
    """A rank on each."""
    places = tuple(
        HostPlan(host, "/t", None, False, (RankSpec(rank, 0, (), {}),)) for rank, host in enumerate(hosts)
    )
    return Plan("r1", "", attempt, len(hosts), "127.0.0.1", 1, ("true",), places)


def test_a_host_is_not_believed_about_ranks_that_it_did_not_have_then(tmp_path: Path) -> None:
    """Where they were is remembered of all attempts: the second was without one host, the third as before."""
    inventory = Inventory((Host("good", "10.0.0.1"), Host("liar", "10.0.0.2")), "good")
    options = LaunchOptions("r1", "", ("true",), "/t")
    for plan in (plan_on(1, "good", "liar"), plan_on(2, "good"), plan_on(3, "liar", "good")):
        history.remember(plan, inventory, options)
    record = history.read("r1")
    assert record is not None
    found = found_of(record)
    places = [found.rank_hosts_in(attempt) for attempt in (1, 2, 3, 4)]
    assert places == [{0: "good", 1: "liar"}, {0: "good"}, {0: "liar", 1: "good"}, None]
    lies = [{**LINE, "rank": rank, "text": "mine"} for rank in (0, 1, 7)]
    agents = two(telling(CURSOR, LINE, END), telling(CURSOR, *lies, END))
    showlogs.save(found, agents, tmp_path, attempt=1)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert sorted((event["host"], event["rank"]) for event in events) == [("good", 0), ("liar", 1)]


def test_a_host_that_tells_of_another_attempt_than_it_was_asked_for_is_not_heard() -> None:
    end = telling(CURSOR, LINE, END)
    agents = two(end, telling({**CURSOR, "attempt": 7}, {**LINE, "rank": 1}, END))
    updates = list(follow(agents, "r1", live=False, attempt=1))
    assert {event.attempt for update in updates for event in update.events} == {1}
    assert "an attempt that it was not asked for" in updates[-1].lost["liar"]


def test_a_run_that_is_started_again_while_its_hosts_are_asked_is_told_as_it_is_now() -> None:
    inventory = Inventory((Host("good", "10.0.0.1"),), "good")
    history.remember(plan_on(1, "good"), inventory, LaunchOptions("r1", "", ("true",), "/t"))
    record = history.read("r1")
    assert record is not None
    before = found_of(record)
    history.remember(plan_on(2, "good"), inventory, LaunchOptions("r1", "", ("true",), "/t"))
    now = updated(before, [(inventory.hosts[0], [told_state("good", 2, r0="running")])])
    assert now.attempt == 2
    assert now.state is not None
    assert now.state.state == "running"


class Notes:
    """A screen."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def plan(self, plan: Any) -> None: ...

    def show(self, events: list[Event], state: RunState) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)


TICKING = """
if [ $2 = follow ]; then
    echo MARK; echo 'CURSOR'; echo 'STARTED'
    while echo '{"kind":"tick","time":1000000000.0}'; do sleep 0.1; done
fi
printf -- 'MARK\\n{"known": true, "was": "running", "state": "stopped", "ended": [1], "left": []}\\n'
"""


def test_a_host_that_says_it_stopped_and_goes_on_is_named_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "TOLD_S", 0.3)
    monkeypatch.setattr(watch, "GRACE_S", 0.1)
    started = json.dumps({"kind": "rank_started", "time": 1e9, "rank": 1, "pid": 1}, separators=(",", ":"))
    cursor = json.dumps(CURSOR, separators=(",", ":"))
    lies = TICKING.replace("MARK", MARK).replace("CURSOR", cursor).replace("STARTED", started)
    stopped = {**EXITED, "rank": 0, "state": "stopped", "reason": "stopped"}
    ranks = {rank: RankState(rank, host) for rank, host in PLACES.items()}
    state, screen, interrupts = RunState("r1", "", 1, 2, "starting", ranks), Notes(), watch.Interrupts()
    interrupts.count = 1
    agents = two(telling(CURSOR, stopped, {**END, "state": "stopped"}), lies)
    began = time.monotonic()
    outcome = watch.watch(state, agents, screen, interrupts)
    assert time.monotonic() < began + 60
    assert outcome.state.state == "lost"
    assert [rank.state for rank in outcome.state.ranks.values()] == ["stopped", "unknown"]
    assert any(note.startswith("liar: it was asked to end its ranks") for note in screen.notes)
    assert "liar" in outcome.away


# --- Environments --------------------------------------------------------------------------------


def test_a_host_that_creates_an_environment_without_end_is_given_up_after_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environment, "SILENCE_S", 1.0)
    ready, busy = ('{"ready": null}', '{"kind":"output","text":"still at it"}')
    script = f"echo {MARK}; [ $2 = create ] || exec echo '{ready}'; while echo '{busy}'; do sleep 0.1; done"
    said: list[str] = []
    began = time.monotonic()
    spec = environment.Spec("x", "name: x\n", "d", "3.11", (), ())
    agents = {"liar": liar(script)}
    result = environment.create(
        agents, spec, 0.5, lambda _, line: said.append(line), lambda: time.monotonic() > began + 30
    )["liar"]
    assert isinstance(result, HostError)
    assert result.message == "liar: it was not done after 0.5 s, nor did it end; it is given up"
    assert "still at it" in said


def test_the_time_of_a_host_that_creates_stands_still_while_ringctl_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, come = [0.0], [b"a", b"b", b""]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def read(_: float) -> bytes:
        clock[0] += 3600.0  # Ctrl-Z
        return come.pop(0)

    channel: Any = SimpleNamespace(read=read)
    assert list(environment.pieces_of(channel, "a", 1.0, lambda: False)) == [b"a", b"b"]


# --- What is no SSH server -----------------------------------------------------------------------

NOISE = random.Random(7).randbytes(4000)


def text_of(words: bytes) -> bytes:
    return struct.pack(">I", len(words)) + words


def packet(payload: bytes) -> bytes:
    pad = 16 - (5 + len(payload)) % 8
    return struct.pack(">IB", len(payload) + pad + 1, pad) + payload + bytes(pad)


def methods(*named: bytes) -> bytes:
    """What a server says that it has: ways to exchange keys, kinds of host keys, and what everybody has."""
    usual = [b"aes128-ctr"] * 2 + [b"hmac-sha2-256"] * 2 + [b"none"] * 2 + [b""] * 2
    return packet(b"\x14" + b"c" * 16 + b"".join(map(text_of, [*named, *usual])) + bytes(5))


POINT = packet(
    b"\x1f" + text_of(text_of(b"ecdsa-sha2-nistp256")) + text_of(b"\4" + b"y" * 64) + text_of(b"z")
)
GREETINGS = [
    b"\0" * 1000,
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b"SSH-2.0-\xff\xfe\r\n" + NOISE,
    b"SSH-2.0-x\r\n" + b"\xff" * 100,
    b"SSH-2.0-x\r\n\0\0\0\x0c\x0a\x14" + NOISE,
    b"SSH-1.5-old\r\n",
    b"x" * (1 << 20),
    b"SSH-2.0-x\r\n" + packet(b""),
    b"SSH-2.0-x\r\n" + packet(b"\1" + bytes(4) + text_of(b"\xff\x1b[2J") + text_of(b"")),
    b"SSH-2.0-x\r\n" + methods(b"\xff\xfe", b"ssh-ed25519"),
    b"SSH-2.0-x\r\n" + methods(b"ecdh-sha2-nistp256", b"ecdsa-sha2-nistp256") + POINT,
    b"SSH-2.0-x\r\n" + struct.pack(">I", (1 << 31) + 4) + bytes(100),
]


@contextlib.contextmanager
def servers(greetings: list[bytes]) -> Iterator[list[int]]:
    """Ports of this machine where whoever comes is greeted like this, and shown the door."""
    over, open_, threads = threading.Event(), [], []

    def greet(server: socket.socket, words: bytes) -> None:
        while not over.is_set():
            with contextlib.suppress(OSError), server.accept()[0] as guest:
                guest.settimeout(5.0)
                guest.sendall(words)
                guest.shutdown(socket.SHUT_WR)
                while guest.recv(65536):
                    pass

    for words in greetings:
        server = socket.create_server(("127.0.0.1", 0))
        server.settimeout(0.1)
        open_.append(server)
        threads.append(threading.Thread(target=greet, args=(server, words)))
        threads[-1].start()
    try:
        yield [server.getsockname()[1] for server in open_]
    finally:
        over.set()
        for thread in threads:
            thread.join()
        for server in open_:
            server.close()


def test_what_speaks_no_ssh_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text("ConnectTimeout 2\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    errors: dict[str, BaseException] = {}
    pool = Pool(no_input=True)

    def reach(name: str, port: int) -> None:
        try:
            pool.transport(Host(name, "127.0.0.1", user="x", port=port)).run(["true"], b"", 30.0)
        except BaseException as error:  # looked at below
            errors[name] = error

    with servers(GREETINGS) as ports:
        guests = [
            threading.Thread(target=reach, args=(f"h{number}", port)) for number, port in enumerate(ports)
        ]
        for guest in guests:
            guest.start()
        for guest in guests:
            guest.join()
    pool.close()
    assert {name: type(error) for name, error in errors.items()} == {
        f"h{number}": HostError for number in range(len(GREETINGS))
    }
    assert not any("\x1b" in str(error) for error in errors.values())
    strange = [number for number, error in enumerate(map(str, errors.values())) if "SSH 2 as we do" in error]
    assert len(strange) >= 5
    assert any("Invalid packet length" in str(error) for error in errors.values())


def test_a_server_that_speaks_no_ssh_is_away_to_whoever_follows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    pool = Pool(no_input=True)
    with servers([b"SSH-2.0-x\r\n" + packet(b"")]) as (port,):
        host = Host("liar", "127.0.0.1", user="x", port=port)
        *_, last = follow({"liar": Agent(host, pool.transport(host))}, "r1", live=False)
    assert "does not speak SSH 2 as we do (IndexError: " in last.away["liar"]


def test_whoever_follows_a_host_is_told_of_whatever_ends_that() -> None:
    class Broken(Liar):
        def stream(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("can't start new thread")

    broken = Broken("")
    with pytest.raises(RingctlError, match="liar: its events cannot be read: RuntimeError: can't start"):
        list(follow({"liar": Agent(broken.host, broken)}, "r1", live=True))


def test_where_no_thread_can_be_started_it_is_not_the_host_that_is_blamed() -> None:
    with pytest.raises(HostError, match="liar: this machine cannot start another thread"), translated("liar"):
        raise RuntimeError("can't start new thread")


class Anybodys(paramiko.ServerInterface):
    """A server that lets anybody in, and answers every command in its own way."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.over = threading.Event()

    def answer(self, channel: Any) -> None:
        """Called for each command, in a thread of its own."""

    def check_auth_none(self, username: str) -> int:  # noqa: ARG002 - whoever it is
        return paramiko.common.AUTH_SUCCESSFUL

    def check_channel_request(self, kind: str, chanid: int) -> int:  # noqa: ARG002 - paramiko names them
        return paramiko.common.OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:  # noqa: ARG002 - paramiko names it
        self.threads.append(threading.Thread(target=self.answered, args=(channel,)))
        self.threads[-1].start()
        return True

    def answered(self, channel: Any) -> None:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self.answer(channel)


class Flood(Anybodys):
    """Says very much on stderr in each session, and then a word on stdout."""

    def __init__(self, size: int, heeds_window: bool) -> None:
        super().__init__()
        self.size, self.heeds_window = size, heeds_window

    def answer(self, channel: Any) -> None:
        if not self.heeds_window:
            channel._wait_for_send_window = lambda size: min(size, 32000)
        channel.sendall_stderr(ssh.BEGAN + bytes(self.size) + b"its last words")
        channel.sendall(b"a word")


class Drip(Anybodys):
    """Takes what it is told a byte at a time, and is never quiet for long."""

    def answer(self, channel: Any) -> None:
        more = paramiko.Message()
        more.add_byte(paramiko.common.cMSG_CHANNEL_WINDOW_ADJUST)
        more.add_int(channel.remote_chanid)
        more.add_int(1)
        while not self.over.wait(0.1):
            channel.transport._send_user_message(more)


@contextlib.contextmanager
def session_with(liar: Anybodys, **options: Any) -> Iterator[paramiko.Channel]:
    here, there = socket.socketpair()
    server, client = paramiko.Transport(there, **options), quick_transport(set(), here)
    try:
        server.add_server_key(paramiko.RSAKey.generate(2048))
        server.start_server(server=liar, event=threading.Event())
        client.start_client(timeout=20.0)
        client.auth_none("anybody")
        yield ssh.open_shell(client)
    finally:
        liar.over.set()
        for end in (client, server):
            end.close()
        for thread in liar.threads:
            thread.join()


def heard_of(channel: ssh.SshChannel) -> bytes:
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline:
        data = channel.read(0.1)
        if data is not None:
            return data
    raise AssertionError("nothing came")


def test_a_server_that_says_more_than_it_was_asked_for_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "WINDOW", 1 << 18)
    with session_with(Flood(4 << 20, heeds_window=False)) as session:
        transport = session.get_transport()
        assert eventually(lambda: not transport.is_active(), 30.0)
        with pytest.raises(HostError, match=r"liar: .*Invalid amount of data"):
            ssh.SshChannel("liar", session).read(10.0)


def test_of_what_comes_on_stderr_of_a_stream_the_end_is_kept_and_nothing_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ssh, "WINDOW", 1 << 18)
    with session_with(Flood(1 << 20, heeds_window=True)) as session:
        channel = ssh.SshChannel("liar", session)
        assert heard_of(channel) == b"a word"
        said = channel.errors()
        assert channel.began
        assert said.endswith(b"its last words")
        assert len(said) <= 64 << 10


def test_a_server_that_takes_a_byte_now_and_then_is_given_up() -> None:
    with session_with(Drip(), default_window_size=16) as session:
        began = time.monotonic()
        with pytest.raises(TimeoutError, match="it did not take what it was sent within 1 s"):
            ssh.send_all(session, bytes(10_000), 1.0)
        assert time.monotonic() < began + 60.0  # all of it would have taken a quarter of an hour


# --- What one host does to the others ------------------------------------------------------------


def test_a_start_that_comes_to_grief_on_one_host_is_undone_on_the_others() -> None:
    ended = []

    class Fake(Agent):
        def start(self, request: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002 - whatever it is
            if self.host.name == "liar":
                raise ZeroDivisionError("a mistake of ours")
            return {}

        def stop(self, *_: Any, **__: Any) -> dict[str, Any]:
            ended.append(self.host.name)
            return {"known": True, "left": []}

    plan = plan_on(1, "good", "liar")
    agents = {name: Fake(Host(name, local=True), Liar("")) for name in ("good", "liar")}
    with pytest.raises(ZeroDivisionError, match="a mistake of ours"):
        start(plan, agents)
    assert set(ended) == {"good", "liar"}


class Counted(dict[str, Any]):
    """A state that counts how often somebody looks whose it is."""

    looks = 0

    def __getitem__(self, key: str) -> Any:
        Counted.looks += key == "run"
        return super().__getitem__(key)


def looks_at(count: int, monkeypatch: pytest.MonkeyPatch) -> int:
    told = told_state("liar", 1, r0="succeeded")
    states = [Counted(told, run=f"r{number:05d}") for number in range(count)]
    monkeypatch.setattr(runs, "ask_hosts", lambda *_: [(Host("liar", "10.0.0.2"), states)])
    Counted.looks = 0
    found, _ = runs.find_runs(Pool(), [Host("liar", "10.0.0.2")])
    assert len(found) == count
    return Counted.looks


def test_twice_as_many_runs_of_a_host_are_twice_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    assert looks_at(400, monkeypatch) <= 2 * looks_at(200, monkeypatch)


# --- Much, and newer -----------------------------------------------------------------------------


def test_of_ten_thousand_hosts_one_can_be_used(tmp_path: Path) -> None:
    lines = ["hosts:", "  - {name: here, local: true, slots: 2}"]
    lines += [f"  - {{name: h{i}, address: 10.1.{i // 250}.{i % 250 + 1}}}" for i in range(10_000)]
    (tmp_path / "hosts.yaml").write_text("\n".join(lines))
    options = ("--hosts", str(tmp_path / "hosts.yaml"))
    plan = json.loads(ringctl("launch", *options, "--world", "2", "--dry-run", "--json", "--", "true").stdout)
    assert [host["host"] for host in plan["hosts"]] == ["here"]
    said = ringctl("launch", *options, "--world", "10003", "--", "true", code=2).stderr
    assert "more than the 10002 slots" in said


def test_more_files_than_can_be_open_at_once_are_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(showlogs, "HELD_BYTES", 20_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ranks, lines = range(200), range(3)
    page = [
        Event("line", 1.0, "r1", 1, "h", rank, {"stream": stream, "text": f"{line} of {rank}"})
        for line in lines
        for rank in ranks
        for stream in ("out", "err")
    ]
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
    try:
        assert showlogs.write_files([page], tmp_path) == 401
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for rank in ranks:
        for stream in ("out", "err"):
            written = (tmp_path / f"rank{rank}.{stream}.log").read_text()
            assert written == "".join(f"{line} of {rank}\n" for line in lines)
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == len(page)


def change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_run_of_a_newer_version_is_left_out_and_the_others_are_not() -> None:
    old, new = detach(["echo", "hi"], world=1), detach(["echo", "hi"], world=1)
    wait_until_final(old)
    wait_until_final(new)
    wait_until_all_said(new)
    change(run_folder(new) / "state.json", ranks={"0": {"state": "asleep"}}, version=99)
    row = (json.dumps({"plan": {"version": 99}, "more": [1]}), new)
    history.change(lambda db: db.execute("UPDATE records SET record = ? WHERE run = ?", row))
    done = ringctl("ps", "--json", "--all", code=None)
    assert [about["run"] for about in json.loads(done.stdout)] == [old]
    assert f"what it tells of run {new} cannot be read here, and is left out" in done.stderr
    for args in (("status", new), ("logs", new), ("restart", new)):
        said = ringctl(*args, code=2).stderr
        assert f"there is no run {new!r}" in said
        assert "Traceback" not in said


def test_a_stop_does_not_make_a_stopped_run_of_one_whose_state_cannot_be_read() -> None:
    run = detach(["sh", "-c", "exit 3"], world=1)
    wait_until_final(run)
    wait_until_all_said(run)
    change(run_folder(run) / "state.json", ranks=[{**state(run)["ranks"][0], "signal": "of/tomorrow"}])
    ringctl("stop", run, code=None)
    assert history.state_of(run) == "starting", "nobody here knows how it ended"
    said = ringctl("status", run, code=4)
    assert f"localhost: what it tells of run {run} cannot be read here" in said.stderr


def wait_until_all_said(run: str) -> None:
    """Its host has written its last word, and will not write over ours."""
    for _ in range(500):
        if state(run)["ended"] and not os.path.exists(f"/proc/{state(run)['warden']['pid']}"):
            return
        time.sleep(0.02)
    raise AssertionError(f"{run} has not ended")
