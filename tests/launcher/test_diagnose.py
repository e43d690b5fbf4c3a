"""Which failure was the first, and what a user is told about it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher import hostprefork
from launcher.diagnose import LAST_LINES, Cause, Tails, first_failure, standstill
from launcher.hostword import TOLD_TO_END
from launcher.model import Event, Plan, RankState, RunState
from launcher.text import failure_lines
from launcher.traces import Frame, Stack, last_error
from launcher.watch import Stalls

TRACEBACK = ["Traceback (most recent call last):", '  File "t.py", line 3, in <module>']
PEER_DIED = "RuntimeError: [/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:7431"
TIMED_OUT = (
    "RuntimeError: [/gloo/unbound_buffer.cc:81] Timed out waiting 60000ms for recv operation to complete"
)


def at(time: float, text: str) -> Event:
    return Event("line", time, "r", 1, "h0", 0, {"stream": "err", "text": text})


def stack(rank: int, *frames: tuple[str, int, str, str], **more: Any) -> Event:
    return Event("stack", 1.0, "r", 1, f"h{rank}", rank, {"frames": frames, "state": "S", **more})


WAITING = (
    ("/x/site-packages/torch/distributed/c10d.py", 3, "all_reduce", "work.wait()"),
    ("/t.py", 9, "main", "sync(x)"),
)
SLEEPING = (("/t.py", 5, "load", "time.sleep(600)"), ("/t.py", 9, "main", "load()"))
IN_BACKWARD = (
    ("/x/site-packages/torch/autograd/graph.py", 3, "_engine_run_backward", "return"),
    ("/t.py", 7, "main", ""),
)


def seen(*events: Event) -> Tails:
    tails = Tails()
    for event in events:
        tails.add(event)
    return tails


def failed(rank: int, ended: float, **more: Any) -> RankState:
    return RankState(rank, f"h{rank}", **{"state": "failed", "exit_code": 1, "ended": ended, **more})


def run_of(*ranks: RankState, state: Any = "failed") -> RunState:
    return RunState("r", "", 1, len(ranks), state, {rank.rank: rank for rank in ranks})


def cause_of(run: RunState, said: dict[int, list[str]] | None = None) -> Cause:
    cause = first_failure(run, said or {})
    assert cause is not None
    return cause


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=8, unique=True))
def test_the_rank_that_failed_first_is_named(times: list[float]) -> None:
    cause = cause_of(run_of(*(failed(rank, ended) for rank, ended in enumerate(times))))
    first = times.index(min(times))
    assert (cause.rank, cause.host) == (first, f"h{first}")
    assert cause.text.startswith(f"rank {first} on h{first} exited with code 1")


@pytest.mark.parametrize(
    "consequence",
    [
        PEER_DIED,
        "RuntimeError: [/gloo/pair.cc:500] read [127.0.0.1]:3: Connection reset by peer",
        "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed.",
        "RuntimeError: writev [127.0.0.1]:3: Broken pipe",
        "[W1119 TCPStore.cpp:106] [c10d] sendBytes failed on SocketImpl(fd=3, addr=[h0]:3): Broken pipe",
        TIMED_OUT,
    ],
)
def test_a_rank_that_only_lost_its_peer_is_not_to_blame(consequence: str) -> None:
    said = {0: [*TRACEBACK, consequence], 1: [*TRACEBACK, "ValueError: boom"]}
    cause = cause_of(run_of(failed(0, ended=1.0), failed(1, ended=2.0)), said)
    assert cause.text == "rank 1 on h1 exited with code 1: ValueError: boom"


@pytest.mark.parametrize(
    "own",
    [
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "ValueError: shard-3.bin is cut short: expected 4096 bytes, got 0 bytes",
        "websocket.WebSocketException: Socket closed",
        "RuntimeError: Connection reset by peer",
    ],
)
def test_a_rank_that_lost_something_else_than_a_rank_failed_by_itself(own: str) -> None:
    """Whether the others computed, had ended or lost it for that."""
    tails = seen(*(line(0, "err", text) for text in [*TRACEBACK, own]), line(2, "err", PEER_DIED))
    tails.add(stack(1, *SLEEPING))
    stopped = RankState(1, "h1", "stopped", reason="rank 0 failed", ended=3.0)
    run = run_of(failed(0, ended=2.0), stopped, failed(2, ended=1.0), RankState(3, "h3", "succeeded"))
    cause = first_failure(run, tails)
    assert cause is not None
    assert (cause.text, cause.id) == (f"rank 0 on h0 exited with code 1: {own}", "")


def test_a_killed_rank_is_to_blame_even_when_its_peers_ended_first() -> None:
    killed = failed(1, ended=2.0, exit_code=-9, signal="SIGKILL")
    cause = cause_of(run_of(failed(0, ended=1.0), killed), {0: [PEER_DIED]})
    assert cause.text.startswith("rank 1 on h1 was killed by SIGKILL (usually out of memory")
    assert "--batch-size" in cause.fix


def test_where_all_lost_a_peer_the_first_of_them_is_named() -> None:
    run = run_of(failed(0, ended=2.0), failed(1, ended=1.0))
    cause = cause_of(run, {0: [PEER_DIED], 1: [PEER_DIED]})
    assert cause.rank == 1
    assert "another rank ended" in cause.text


def missed(number: int, host: str) -> RankState:
    reason = f"{host} was not heard of for 3 s, and the ranks stood still"
    return RankState(number, f"h{number}", "stopped", signal="SIGTERM", reason=reason)


def test_where_hosts_stopped_hearing_each_other_the_one_in_the_middle_is_named() -> None:
    """All hear the host of rank 0, and that hears all: h0."""
    cut_off = cause_of(run_of(missed(0, "h2"), missed(1, "h0"), missed(2, "h0")))
    assert (cut_off.host, cut_off.id) == ("h0", "host_gone")
    assert cut_off.text.startswith("the run was ended on h1: h0 was not heard of for 3 s")
    two_cut_off = cause_of(run_of(missed(0, "h3"), missed(1, "h3"), missed(2, "h0"), missed(3, "h0")))
    assert two_cut_off.host == "h3", "h1 went on hearing h0"
    for others in ([missed(1, "h2"), missed(2, "h0")], [missed(1, "h2"), missed(2, "h2")]):
        gone = cause_of(run_of(missed(0, "h2"), *others))
        assert gone.host == "h2", "h1 went on hearing h0"
        assert "either" not in gone.text


def test_of_two_hosts_that_did_not_hear_each_other_both_are_named() -> None:
    cause = cause_of(run_of(missed(0, "h1"), missed(1, "h0")))
    assert cause.text.startswith("the run was ended on h0: h1 was not heard of for 3 s")
    assert "h0 and h1 did not hear each other, so it may be either" in cause.text
    assert "either" not in cause_of(run_of(missed(0, "h1"), RankState(1, "h1", "succeeded"))).text


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_rank_that_was_told_to_end_from_outside_is_told_so_whichever_way(name: str) -> None:
    cause = cause_of(run_of(failed(0, ended=1.0, exit_code=-2, signal=name)))
    assert cause.text.startswith(
        f"rank 0 on h0 was killed by {name} (it got a SIGTERM or SIGINT from outside"
    )


@pytest.mark.parametrize(
    ("line", "id_"),
    [
        ("Killed", "killed"),
        ("Killed: 9", "killed"),
        ("run.sh: line 2:  4321 Killed                  python train.py", "killed"),
        ("Killed 3 zombies", ""),
        ("Killed by the early-stopping rule", ""),
    ],
)
def test_a_shells_word_for_a_kill_is_told_from_a_programs_own(line: str, id_: str) -> None:
    assert cause_of(run_of(failed(0, ended=1.0, exit_code=3)), {0: [line]}).id == id_


def test_a_rank_that_was_ended_for_anothers_failure_is_not_to_blame() -> None:
    ended = RankState(
        0, "h0", state="stopped", exit_code=-15, signal="SIGTERM", reason="rank 1 failed", ended=1.0
    )
    assert cause_of(run_of(ended, failed(1, ended=2.0))).rank == 1


@pytest.mark.parametrize(
    ("line", "why", "fix"),
    [
        ("ModuleNotFoundError: No module named 'torch'", "torch is not installed", "pip install"),
        (
            "RuntimeError: The server socket has failed to listen: EADDRINUSE",
            "listens on the master port",
            "--master-port",
        ),
        ("RuntimeError: [enforce fail] Unable to find address for: eth7", "the interface named", "ifname"),
        ("OSError: [Errno 28] No space left on device", "disk is full", "free some space"),
    ],
)
def test_known_failures_come_with_what_to_do(line: str, why: str, fix: str) -> None:
    cause = cause_of(run_of(failed(0, ended=1.0)), {0: [*TRACEBACK, line]})
    assert line in cause.text
    assert why in cause.text
    assert fix in cause.fix


def test_a_cause_beats_a_symptom_and_a_symptom_a_consequence() -> None:
    said = {
        0: [*TRACEBACK, "DistStoreError: Timed out after 5 seconds waiting for clients. 1/3 clients joined."],
        1: [*TRACEBACK, PEER_DIED],
        2: [*TRACEBACK, "RuntimeError: Unable to find address for: eth9"],
    }
    ranks = [failed(0, ended=2.0), failed(1, ended=1.0), failed(2, ended=3.0)]
    assert cause_of(run_of(*ranks), said).id == "ifname"
    assert cause_of(run_of(*ranks[:2]), said).id == "ranks"


def test_a_warning_that_the_program_went_on_after_is_not_why_it_ended() -> None:
    said = ["OSError: [Errno 28] No space left on device", *TRACEBACK, "ValueError: boom"]
    cause = cause_of(run_of(failed(0, ended=1.0)), {0: said})
    assert (cause.id, cause.text) == ("", "rank 0 on h0 exited with code 1: ValueError: boom")


WARNED = "urllib3: [c10d] Connection reset by peer; No space left on device; CUDA out of memory; retrying"
SEGFAULT = {"exit_code": -11, "signal": "SIGSEGV"}


@pytest.mark.parametrize(
    ("ending", "after", "text"),
    [
        ({}, [Event("metric", 12.0, "r", 1, "h0", 0, {"step": 8})], "exited with code 1"),
        ({}, ["on"], "exited with code 1: on"),
        (SEGFAULT, [Event("metric", 12.0, "r", 1, "h0", 0, {"step": 8})], "was killed by SIGSEGV (a comp"),
        (
            SEGFAULT,
            [Event("line", 12.0, "r", 1, "h0", 0, {"stream": "out", "text": "on"})],
            "was killed by SI",
        ),
        (SEGFAULT, ["on"], "was killed by SIGSEGV (a compiled library crashed"),
        (SEGFAULT, [], "was killed by SIGSEGV (a compiled library crashed"),
    ],
)
def test_a_warning_long_before_the_end_is_not_why_a_rank_was_killed_or_gave_up(
    ending: dict[str, Any], after: list[Event | str], text: str
) -> None:
    tails = seen(at(10.0, WARNED))
    for event in after:
        tails.add(at(15.0, event) if isinstance(event, str) else event)
    cause = first_failure(run_of(failed(0, ended=20.0, **ending)), tails)
    assert cause is not None
    assert cause.id == ("crash" if ending else "")
    assert cause.text.startswith(f"rank 0 on h0 {text}")


@pytest.mark.parametrize(
    ("ending", "said", "id_"),
    [
        ({}, [at(10.0, "OSError: No space left on device"), at(12.0, "cleaning up")], "disk"),
        ({}, [at(10.0, "trainer: No space left on device"), at(19.0, "wandb: has sent it all")], "disk"),
        (SEGFAULT, [at(19.0, "OpenBLAS: pthread_create failed"), at(19.2, "OpenBLAS: ...")], "threads"),
        ({"exit_code": -6, "signal": "SIGABRT"}, [at(10.0, "what():  std::bad_alloc")], "oom"),
        ({}, [Event("metric", 10.3, "r", 1, "h0", 0, {"step": 8}), at(10.0, "ENOSPC")], "disk"),
        ({}, [at(18.0, "ENOSPC"), Event("metric", 19.9, "r", 1, "h0", 0, {"step": 8})], "disk"),
    ],
)
def test_what_a_rank_said_in_the_end_is_why(ending: dict[str, Any], said: list[Event], id_: str) -> None:
    """Whatever it still says while it ends, and however late a step is read or its memory saved."""
    cause = first_failure(run_of(failed(0, ended=20.0, **ending)), seen(*said))
    assert cause is not None
    assert cause.id == id_


LOST = "ERROR:root:training failed: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:27"
GAVE_UP = "ERROR:root:training failed: [/gloo/unbound_buffer.cc:81] Timed out waiting 60000ms for recv"


def told(rank: int, *times: float) -> list[Event]:
    return [Event("metric", time, "r", 1, f"h{rank}", rank, {"step": n}) for n, time in enumerate(times)]


def after_words(words: str, other: RankState, *more: Event, **ending: Any) -> Cause:
    """Of a run whose rank 0 said this at 10.0, had something else to do and ended at 20.0; h2 is away."""
    said = sorted([at(10.0, words), at(19.0, "INFO:root:saved a checkpoint"), *more], key=lambda e: e.time)
    run = run_of(failed(0, ended=20.0, **ending), other)
    cause = first_failure(run, seen(*said), {"h2": "h2: no answer"})
    assert cause is not None
    return cause


EARLY = RankState(1, "h1", "succeeded", exit_code=0, ended=9.9)
AWAY = RankState(2, "h2", "unknown", seen=9.5)
ENDED = RankState(1, "h1", "stopped", reason="rank 0 failed", ended=20.5)
WAITED = "rank 0 on h0 waited for it"


@pytest.mark.parametrize(
    ("words", "other", "more", "id_"),
    [
        (LOST, EARLY, [], "uneven"),
        (LOST, replace(EARLY, ended=12.0), [], "uneven"),
        (LOST, AWAY, [], "host_gone"),
        (GAVE_UP, AWAY, [], "host_gone"),
        (LOST, AWAY, told(0, 8.0, 9.0, 9.8), "host_gone"),
        (LOST, AWAY, told(0, *(19.8 + n / 1000 for n in range(300))), "host_gone"),
        (LOST, AWAY, [at(2.0, "No space left on device")], "host_gone"),
        (GAVE_UP, ENDED, [stack(1, *SLEEPING)], "hang"),
    ],
)
def test_a_rank_that_said_whom_it_lost_and_then_saved_for_long_is_not_to_blame(
    words: str, other: RankState, more: list[Event], id_: str
) -> None:
    cause = after_words(words, other, *more)
    assert (cause.rank, cause.id) == (other.rank, id_)
    assert cause.text.endswith(WAITED)


@pytest.mark.parametrize(
    ("words", "other", "more", "ending"),
    [
        (LOST, ENDED, [], {}),  # nobody had ended
        (LOST, ENDED, [stack(1, *SLEEPING)], {}),
        (LOST, replace(EARLY, ended=15.0), [], {}),
        (LOST, replace(AWAY, seen=15.0), [], {}),
        (LOST, EARLY, told(0, 9.0, 11.0), {}),
        (LOST, EARLY, [at(11.0 + n, f"epoch {n}") for n in range(7)], {}),
        (GAVE_UP, ENDED, [stack(1, *SLEEPING), *(at(11.0 + n, f"epoch {n}") for n in range(7))], {}),
        (LOST, EARLY, told(0, 9.0, *(19.0 + n / 5 for n in range(6))), {}),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", EARLY, [], {}),
        ("urllib3: Connection reset by peer; retrying", AWAY, [], {}),
        ("CUDA out of memory; retrying with less", AWAY, [], {}),
        (LOST, AWAY, [], {"exit_code": -9, "signal": "SIGKILL"}),
        (LOST, AWAY, told(0, 19.9), {"exit_code": -6, "signal": "SIGABRT"}),
    ],
)
def test_a_rank_that_warned_and_went_on_is_not_excused_by_another(
    words: str, other: RankState, more: list[Event], ending: dict[str, Any]
) -> None:
    cause = after_words(words, other, *more, **ending)
    assert cause.rank == 0
    assert "another rank" not in cause.text


def test_what_led_to_an_exception_counts_as_part_of_it() -> None:
    first = [*TRACEBACK, "OSError: [Errno 28] No space left on device", ""]
    joined = "During handling of the above exception, another exception occurred:"
    said = [*first, joined, "", *TRACEBACK, "RuntimeError: unexpected pos 64 vs 0"]
    cause = cause_of(run_of(failed(0, ended=1.0)), {0: said})
    assert cause.id == "disk"
    assert "unexpected pos" in cause.text


def test_the_kernels_kill_for_memory_is_told_for_sure() -> None:
    tails = Tails()
    tails.add(Event("oom", 1.0, "r", 1, "h0", 0, {}))
    cause = first_failure(run_of(failed(0, ended=1.0, exit_code=-9, signal="SIGKILL")), tails)
    assert cause is not None
    assert cause.id == "oom"


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        ("trainer: rank 0 could not meet the other 3: ranks 2, 3 have not come within 5 s", [2, 3]),
        ("trainer: rank 0 could not meet the other 3: rank 2 has not come within 5 s", [2]),
        ("torch.distributed.DistStoreError: wait timeout after 3000ms, keys: /0//cpu//0/2", [2]),
        ("RuntimeError: [Rank 0]: Ranks 1, 3 failed to pass monitoredBarrier in 2000 ms", [1, 3]),
    ],
)
def test_ranks_that_did_not_come_are_named_with_their_hosts(line: str, missing: list[int]) -> None:
    others = [RankState(rank, f"h{rank}", state="stopped", reason="rank 0 failed") for rank in (1, 2, 3)]
    cause = cause_of(run_of(failed(0, ended=1.0), *others), {0: [line]})
    assert cause.id == "ranks"
    assert cause.text.partition("; missing: ")[2] == "; ".join(f"rank {rank} on h{rank}" for rank in missing)


DIALLED = (
    "DistNetworkError: The client socket has timed out after 1000ms while trying to connect to (10.0.0.1, 7)."
)


@pytest.mark.parametrize(
    ("zero", "why"),
    [
        (failed(0, ended=1.0), "rank 0 on h0 was up and waited for it, so that is not the address and port"),
        (RankState(0, "h0", state="succeeded", ended=1.0), "rank 0 on h0 had ended by itself"),
        (
            RankState(0, "h0", state="stopped"),
            "rank 0 on h0 had not opened its store: it sat in `time.sleep(600)`",
        ),
        (
            RankState(0, "h9", state="stopped"),
            "rank 0 on h9 said nothing: rank 0 does not answer at the master",
        ),
        (RankState(0, "gone"), "rank 0 on gone cannot be heard any more (gone: no answer)"),
    ],
)
def test_who_could_not_reach_rank_0_is_named_and_what_rank_0_did_meanwhile(zero: RankState, why: str) -> None:
    """Also of those that were ended while they still tried."""
    tails = Tails()
    for rank in (1, 3):
        tails.add(line(rank, "err", DIALLED))
    if zero.state == "failed":
        waited = "DistStoreError: Timed out after 1 seconds waiting for clients. 2/4 clients joined."
        tails.add(line(0, "err", waited))
    if zero.host == "h0":
        tails.add(stack(0, *SLEEPING))
    ended = RankState(3, "h3", state="stopped", reason="rank 1 failed")
    run = run_of(zero, failed(1, ended=2.0), RankState(2, "h2", state="stopped"), ended)
    cause = first_failure(run, tails, {"gone": "gone: no answer"})
    assert cause is not None
    assert (cause.rank, cause.host, cause.id) == (1, "h1", "store_timeout")
    begin = "rank 1 on h1 could not reach rank 0 at 10.0.0.1 port 7, and neither could rank 3; "
    assert cause.text.startswith(begin + why)


def test_a_rank_0_that_looks_for_its_own_store_is_told_also_where_it_was_ended_meanwhile() -> None:
    said = {0: [DIALLED], 1: [DIALLED]}
    for zero in (failed(0, ended=2.0), RankState(0, "h0", state="stopped")):
        cause = cause_of(run_of(zero, failed(1, ended=1.0)), said)
        assert (cause.rank, cause.host, cause.id) == (0, "h0", "stale_env")


def test_whoever_could_not_come_knows_more_than_those_who_waited() -> None:
    waited = "DistStoreError: Timed out after 1 seconds waiting for clients. 1/2 clients joined."
    away = "DistNetworkError: failed to connect to 10.9.9.9:7 (errno: 113 - No route to host)."
    cause = cause_of(run_of(failed(0, ended=1.0), failed(1, ended=2.0)), {0: [waited], 1: [away]})
    assert (cause.rank, cause.id) == (1, "no_route")


class Notes:
    """A screen that remembers what ringctl itself says."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def plan(self, plan: Plan) -> None:
        pass

    def show(self, events: list[Event], state: RunState) -> None:
        pass

    def note(self, text: str) -> None:
        self.said.append(text)


def test_while_rank_0_waits_for_others_their_hosts_and_states_are_told_once() -> None:
    screen = Notes()
    stalls = Stalls(screen)
    state = run_of(
        running(0), running(1), RankState(2, "h2"), RankState(3, "h3", state="failed"), state="running"
    )
    said = line(0, "err", "trainer: still waiting: ranks 1, 2, 3 have not come")
    for _ in range(2):
        stalls.look([said], state, Tails(), {})
    assert screen.said == [
        "rank 1 on h1: runs there but has not joined the others, rank 2 on h2: has not been started yet, "
        "rank 3 on h3: has failed"
    ]


def test_a_line_that_names_ranks_without_end_is_read_as_soon_as_any_other() -> None:
    screen = Notes()
    stalls = Stalls(screen)
    state = run_of(running(0), running(1), state="running")
    for times in (100, 200_000):
        said = line(0, "out", f"ranks {','.join(['1-999999'] * times)} have not come")
        stalls.look([said], state, Tails(), {})
    assert screen.said == ["rank 1 on h1: runs there but has not joined the others"]


def test_the_last_word_of_the_trainer_is_why_it_ended() -> None:
    cause = cause_of(run_of(failed(0, ended=1.0)), {0: ["trainer: --epochs 0: must be 1 or more"]})
    assert cause.known
    assert failure_lines(cause) == [
        "failed first: rank 0 on h0 exited with code 1: trainer: --epochs 0: must be 1 or more"
    ]
    silent = failed(0, ended=1.0, exit_code=3)
    assert not cause_of(run_of(silent), {0: ["trainer: warning: the disk is slow"]}).known


def test_what_all_ranks_said_is_told_of_all_and_by_rank_0() -> None:
    ranks = [failed(0, ended=3.0), failed(1, ended=1.0), failed(2, ended=2.0)]
    said = {rank: ["trainer: there is no data in /data"] for rank in range(3)}
    cause = cause_of(run_of(*ranks), said)
    assert cause.rank == 0
    assert cause.text.endswith("trainer: there is no data in /data; all 3 ranks said so")
    assert cause_of(run_of(*ranks), {**said, 2: ["trainer: something else"]}).rank == 1


def test_a_port_that_is_taken_comes_before_what_it_leads_to() -> None:
    said = {
        0: ["trainer: rank 0 could not meet the other 2: code: -98, name: EADDRINUSE"],
        1: ["trainer: rank 1 belongs to run a, but here meets run b: two runs use the same port"],
        2: ["trainer: a process with rank 2 came before: give each process a rank of its own"],
    }
    ranks = [failed(0, ended=3.0), failed(1, ended=2.0), failed(2, ended=1.0)]
    assert cause_of(run_of(*ranks), said).id == "port_used"
    assert cause_of(run_of(*ranks[1:]), said).id == "rank_twice"
    assert cause_of(run_of(ranks[1]), said).id == "two_runs"


# --- Ranks that wait -----------------------------------------------------------------------------


def running(rank: int, **more: Any) -> RankState:
    return RankState(rank, f"h{rank}", state="running", **more)


def test_a_rank_that_is_elsewhere_keeps_the_others_waiting() -> None:
    state = run_of(running(0), running(1, metric={"step": 7}), state="running")
    said = standstill(state, seen(stack(0, *WAITING), stack(1, *SLEEPING)), {})
    assert said == (
        "no progress: rank 1 on h1, after step 7, is in `time.sleep(600)` at /t.py:5; "
        "rank 0 waits in `sync(x)` at /t.py:9"
    )


def test_ranks_that_compute_keep_nobody_waiting() -> None:
    state = run_of(running(0), running(1), state="running")
    assert standstill(state, seen(stack(0, *SLEEPING), stack(1, *SLEEPING)), {}) == ""
    busy = stack(0, *IN_BACKWARD, busy=True), stack(1, *IN_BACKWARD, busy=True)
    assert standstill(state, seen(*busy), {}) == ""


def test_a_host_that_is_away_keeps_the_others_waiting() -> None:
    state = run_of(running(0), running(1), state="running")
    said = standstill(state, seen(stack(0, *WAITING)), {"h1": "h1: the connection was lost"})
    assert said.startswith("no progress: rank 1 on h1 cannot be heard (h1: the connection was lost); rank 0")


def test_ranks_that_all_wait_on_several_hosts_have_lost_the_network() -> None:
    state = run_of(running(0, metric={"step": 1}), running(1), state="running")
    said = standstill(state, seen(stack(0, *WAITING), stack(1, *WAITING)), {})
    assert "packets between the hosts are lost" in said


def test_what_becomes_the_ranks_is_not_taken_for_the_users_own_program() -> None:
    assert Frame(hostprefork.__file__, 1, "run_script").is_library


def test_a_rank_that_has_stepped_since_is_not_where_it_was() -> None:
    tails = seen(stack(0, *WAITING), Event("metric", 2.0, "r", 1, "h0", 0, {"step": 8}))
    assert tails.stacks == {}


def test_waiting_inside_a_backward_pass_is_told_from_computing_by_the_processor() -> None:
    waiting = Stack.from_event(stack(0, *IN_BACKWARD, busy=False).data)
    computing = Stack.from_event(stack(0, *IN_BACKWARD, busy=True).data)
    assert (waiting.waits, computing.waits) == (True, False)


def test_a_rank_that_did_not_start_says_why() -> None:
    cause = cause_of(run_of(failed(0, ended=1.0, exit_code=127, reason="there is no program 'x'")))
    assert cause.text == "rank 0 on h0 did not start: there is no program 'x'"


def test_a_run_whose_supervisor_was_killed_says_where() -> None:
    ended = RankState(0, "h0", state="stopped", reason="its supervisor was killed")
    cause = cause_of(run_of(ended))
    assert cause.text.startswith("the run was ended on h0: its supervisor was killed (logind ended")
    assert cause.fix == "`loginctl enable-linger` on h0"


KILLED = RankState(
    2,
    "h2",
    state="stopped",
    signal="SIGKILL",
    reason="its supervisor was killed",
    ended=3.0,
    metric={"step": 7},
)
GONE = "its supervisor is gone, and has not said how its ranks ended"


@pytest.mark.parametrize(
    ("said", "then"),
    [("RuntimeError: Connection closed by peer [10.0.0.3]:5", "waited for it"), ("lost", "failed")],
)
def test_a_host_whose_supervisor_was_killed_is_named_and_not_the_ranks_that_failed_for_want_of_it(
    said: str, then: str
) -> None:
    """Also if nobody knows the words of those; nor the one that was healthy, and was ended with them."""
    ended = RankState(1, "h1", state="stopped", reason="rank 0 failed", ended=2.5)
    state = run_of(failed(0, ended=2.0), ended, KILLED)
    tails = seen(line(0, "err", said), stack(1, *SLEEPING))
    cause = first_failure(state, tails)
    assert cause is not None
    assert (cause.rank, cause.host, cause.fix) == (2, "h2", "`loginctl enable-linger` on h2")
    assert cause.text.startswith("rank 2 on h2, after step 7, was ended: its supervisor was killed (")
    assert f"; rank 0 on h0 {then}" in cause.text


def test_a_rank_that_failed_long_before_a_supervisor_was_killed_did_so_by_itself() -> None:
    late = replace(KILLED, ended=60.0)
    cause = first_failure(run_of(failed(0, ended=2.0), late), seen(line(0, "err", "my own words")))
    assert cause is not None
    assert cause.text == "rank 0 on h0 exited with code 1: my own words"


@pytest.mark.parametrize("why", [KILLED.reason, GONE])
@pytest.mark.parametrize("error", ["my own words", "Connection closed by peer [10.0.0.3]:5"])
def test_a_rank_that_failed_on_a_host_did_so_before_its_supervisor_was_killed(error: str, why: str) -> None:
    """It was the supervisor that told of the failure."""
    cause = cause_of(run_of(failed(0, 2.0), replace(KILLED, host="h0", reason=why)), {0: [error]})
    assert cause.text.startswith(f"rank 0 on h0 exited with code 1: {error}")


@pytest.mark.parametrize("why", [TOLD_TO_END, "the log cannot be written: Input/output error"])
def test_what_a_supervisor_ends_its_ranks_for_was_there_before_one_of_them_failed(why: str) -> None:
    """Else it would end them for that one, as after a shutdown of which all processes are told."""
    ended = replace(KILLED, host="h0", reason=why)
    cause = cause_of(run_of(failed(0, 2.0), ended), {0: [*TRACEBACK, "ValueError: told to end"]})
    assert cause.text.startswith(f"rank 2 on h0, after step 7, was ended: {why}")


@pytest.mark.parametrize(
    ("error", "ended", "blamed"),
    [
        ("ValueError: label 17", 2.0, 0),
        ("ValueError: what came is empty", 4.0, 2),  # the other host had fallen by then
        ("mine.PeerLost: 2", 2.0, 2),  # so it had here, but for the time until that was written down
    ],
)
def test_what_no_rank_fails_of_for_want_of_another_is_not_laid_on_a_host_that_fell_later(
    error: str, ended: float, blamed: int
) -> None:
    assert cause_of(run_of(failed(0, ended), KILLED), {0: [*TRACEBACK, error]}).rank == blamed


@pytest.mark.parametrize(
    "told",
    [
        f"h1: {GONE}",
        "rank 1 was ended on h1: its supervisor was killed",
        "h1: its supervisor was told to end (SIGTERM), and nobody had stopped the run",
    ],
)
def test_what_befell_another_host_is_told_of_that_one(told: str) -> None:
    """Whoever was told of it ended its ranks for that."""
    ended = RankState(0, "h0", state="stopped", reason=told)
    cause = cause_of(run_of(ended, RankState(1, "h1", state="stopped")))
    assert cause.host == "h1"
    assert cause.text.startswith("the run was ended on h1: its supervisor ")
    assert "h0" not in cause.text + cause.fix


def test_what_befell_a_host_that_the_run_is_not_on_is_not_believed() -> None:
    cause = cause_of(run_of(RankState(0, "h0", state="stopped", reason=f"elsewhere: {GONE}")))
    assert cause.host == "h0"


def test_a_lost_run_does_not_name_a_host_whose_ranks_go_on() -> None:
    unknown = RankState(1, "h1", state="unknown")
    cause = cause_of(run_of(running(0), unknown, state="lost"))
    assert "supervisor on h1 is gone" in cause.text


def test_a_lost_run_says_where_and_how_to_end_the_rest() -> None:
    cause = cause_of(
        run_of(RankState(0, "h0", state="succeeded"), RankState(1, "h1", state="running"), state="lost")
    )
    assert "supervisor on h1 is gone" in cause.text
    assert "ringctl stop" in cause.fix


@pytest.mark.parametrize("state", ["succeeded", "stopped"])
def test_where_nothing_failed_there_is_no_cause(state: str) -> None:
    rank = RankState(0, "h0", state=state, reason="stopped" if state == "stopped" else "")  # type: ignore[arg-type]  # one of two
    assert first_failure(run_of(rank, state=state), {}) is None


def test_nobody_is_to_blame_for_what_fails_once_the_run_was_stopped() -> None:
    run = run_of(
        RankState(0, "h0", state="stopped", reason="stopped", ended=1.0),
        failed(1, ended=3.0),
        state="stopped",
    )
    assert first_failure(run, {1: [TIMED_OUT]}) is None


def test_a_rank_that_somebody_stopped_is_not_taken_for_one_that_hung() -> None:
    run = run_of(RankState(0, "h0", state="stopped", reason="stopped", ended=90.0), failed(1, ended=3.0))
    cause = cause_of(run, {1: [TIMED_OUT]})
    assert (cause.rank, cause.host) == (1, "h1")
    assert "hung" not in cause.text


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ([], ""),
        (["  ", "plain words", ""], "plain words"),
        ([*TRACEBACK, "ValueError: first", "later words"], "ValueError: first"),
        (
            [*TRACEBACK, "ValueError: first", *TRACEBACK, "my.pkg.CustomError: second"],
            "my.pkg.CustomError: second",
        ),
        (["KeyboardInterrupt"], "KeyboardInterrupt"),
        (["an Error in the middle of words is not one", "end"], "end"),
        (["x" * 1000], "x" * 300),
    ],
)
def test_the_line_that_says_what_went_wrong(lines: list[str], error: str) -> None:
    assert last_error(lines) == error


def line(rank: int, stream: str, text: str) -> Event:
    return Event("line", 1.0, "r", 1, "h", rank, {"stream": stream, "text": text})


def test_the_last_words_are_those_on_stderr_or_else_on_stdout() -> None:
    tails = Tails()
    tails.add(line(0, "out", "o"))
    tails.add(line(1, "out", "o"))
    tails.add(line(1, "err", "e"))
    tails.add(Event("metric", 1.0, "r", 1, "h", 2, {"step": 1}))
    assert (tails.of(0), tails.of(1), tails.of(2)) == (["o"], ["e"], [])


def test_only_the_last_words_are_kept() -> None:
    tails = Tails()
    for number in range(10 * LAST_LINES):
        tails.add(line(0, "err", str(number)))
    assert tails.of(0) == [str(number) for number in range(9 * LAST_LINES, 10 * LAST_LINES)]
