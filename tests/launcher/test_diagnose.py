"""Which failure was the first, and what a user is told about it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.diagnose import LAST_LINES, Cause, Tails, first_failure, last_error
from launcher.model import Event, RankState, RunState

TRACEBACK = ["Traceback (most recent call last):", '  File "t.py", line 3, in <module>']
PEER_DIED = "RuntimeError: [/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:7431"


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
        "RuntimeError: [/gloo/unbound_buffer.cc:81] Timed out waiting 60000ms for recv operation to complete",
    ],
)
def test_a_rank_that_only_lost_its_peer_is_not_to_blame(consequence: str) -> None:
    said = {0: [*TRACEBACK, consequence], 1: [*TRACEBACK, "ValueError: boom"]}
    cause = cause_of(run_of(failed(0, ended=1.0), failed(1, ended=2.0)), said)
    assert cause.text == "rank 1 on h1 exited with code 1: ValueError: boom"


def test_a_killed_rank_is_to_blame_even_when_its_peers_ended_first() -> None:
    killed = failed(1, ended=2.0, exit_code=-9, signal="SIGKILL")
    cause = cause_of(run_of(failed(0, ended=1.0), killed), {0: [PEER_DIED]})
    assert cause.text == "rank 1 on h1 was killed by SIGKILL (usually out of memory)"
    assert "--batch-size" in cause.fix


def test_where_all_lost_a_peer_the_first_of_them_is_named() -> None:
    run = run_of(failed(0, ended=2.0), failed(1, ended=1.0))
    cause = cause_of(run, {0: [PEER_DIED], 1: [PEER_DIED]})
    assert cause.rank == 1
    assert "another rank ended" in cause.text


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
            "port is in use",
            "--master-port",
        ),
        ("RuntimeError: [enforce fail] Unable to find address for: eth7", "network interface", "ifname"),
        ("OSError: [Errno 28] No space left on device", "disk is full", "free some space"),
    ],
)
def test_known_failures_come_with_what_to_do(line: str, why: str, fix: str) -> None:
    cause = cause_of(run_of(failed(0, ended=1.0)), {0: [*TRACEBACK, line]})
    assert line in cause.text
    assert why in cause.text
    assert fix in cause.fix


def test_a_rank_that_did_not_start_says_why() -> None:
    cause = cause_of(run_of(failed(0, ended=1.0, exit_code=127, reason="there is no program 'x'")))
    assert cause.text == "rank 0 on h0 did not start: there is no program 'x'"


def test_a_run_whose_supervisor_was_killed_says_where() -> None:
    ended = RankState(0, "h0", state="stopped", reason="its supervisor was killed")
    assert cause_of(run_of(ended)).text == "the run was ended on h0: its supervisor was killed"


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
