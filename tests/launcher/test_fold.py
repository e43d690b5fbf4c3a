"""Events -> RunState: the one truth behind screens, exit codes and reports."""

from __future__ import annotations

import json
from functools import reduce
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher import fold
from launcher.diagnose import first_failure
from launcher.hostword import KILLED, REBOOTED, TOLD_TO_END
from launcher.model import (
    Event,
    HostPlan,
    Plan,
    RankSpec,
    RankState,
    RankStatus,
    RunState,
    RunStatus,
    to_json,
)
from tests.launcher.ringctl import detach, events, state, wait_until_final


def plan_of(world: int) -> Plan:
    ranks = tuple(RankSpec(rank, rank, ("true",), {}) for rank in range(world))
    return Plan("r", "n", 1, world, "127.0.0.1", 1, (), (HostPlan("h", "/", None, True, ranks),))


def event(kind: str, rank: int | None, time: float, **data: Any) -> Event:
    return Event(kind, time, "r", 1, "h", rank, data)


def exited(rank: int, time: float, state: str, code: int = 0, **data: Any) -> Event:
    return event(
        "rank_exited", rank, time, **{"state": state, "exit_code": code, "signal": None, "reason": "", **data}
    )


def folded(world: int, *happened: Event) -> RunState:
    return reduce(fold.fold, happened, fold.initial(plan_of(world)))


def test_a_run_goes_from_starting_to_running_to_succeeded() -> None:
    story = [
        event("rank_started", 0, 1.0, pid=10),
        event("rank_started", 1, 2.0, pid=11),
        exited(1, 3.0, "succeeded"),
        exited(0, 4.0, "succeeded"),
    ]
    states = [folded(2, *story[:n]).state for n in range(5)]
    assert states == ["starting", "running", "running", "running", "succeeded"]
    end = folded(2, *story)
    assert (end.started, end.ended) == (1.0, 4.0)
    assert (end.ranks[0].pid, end.ranks[1].ended) == (10, 3.0)


def test_a_metric_updates_what_it_names_and_keeps_the_rest() -> None:
    run = folded(1, event("metric", 0, 1.0, step=1, loss=2.0), event("metric", 0, 2.0, step=2))
    assert run.ranks[0].metric == {"step": 2, "loss": 2.0}


def test_lines_and_strangers_change_nothing() -> None:
    before = folded(1, event("rank_started", 0, 1.0, pid=10))
    for other in (
        event("line", 0, 2.0, stream="out", text="x"),
        event("metric", 7, 2.0, step=1),
        event("host_finished", None, 2.0, state="succeeded"),
        event("of a newer ringctl", None, 2.0),
    ):
        assert fold.fold(before, other) == before


def rank(state: RankStatus, reason: str = "") -> RankState:
    return RankState(0, "h", state=state, reason=reason)


@pytest.mark.parametrize(
    ("ranks", "status"),
    [
        ([rank("waiting"), rank("waiting")], "starting"),
        ([rank("waiting"), rank("running")], "running"),
        ([rank("succeeded"), rank("running")], "running"),
        ([rank("failed"), rank("running")], "running"),
        ([rank("succeeded"), rank("succeeded")], "succeeded"),
        ([rank("failed"), rank("succeeded")], "failed"),
        ([rank("failed"), rank("stopped", "rank 0 failed")], "failed"),
        ([rank("stopped", "stopped"), rank("succeeded")], "stopped"),
        ([rank("stopped", "stopped"), rank("stopped", "stopped")], "stopped"),
        ([rank("stopped", "its supervisor was killed")], "failed"),
        ([rank("failed"), rank("unknown")], "lost"),
        ([rank("stopped", "stopped"), rank("succeeded"), rank("unknown")], "lost"),
        ([rank("succeeded"), rank("unknown")], "running"),
        ([rank("failed"), rank("running"), rank("unknown")], "running"),
    ],
)
def test_what_the_ranks_together_amount_to(ranks: list[RankState], status: str) -> None:
    assert fold.run_status(dict(enumerate(ranks))) == status


def test_who_fails_while_a_stop_has_long_patience_makes_no_failure_of_it() -> None:
    def ended(failed: float) -> str:
        started = [event("rank_started", n, 1.0, pid=n + 6) for n in (0, 1)]
        slow = exited(1, 70.0, "stopped", -9, reason="stopped", stopping=60.0)  # stop --grace 60
        run = folded(2, *started, exited(0, failed, "failed", 1), slow)
        told = [to_json(rank) for rank in run.ranks.values()]
        host = {"run": "r", "name": "", "attempt": 1, "world": 2, "host": "h", "started": 1.0, "ended": 70.0}
        assert fold.from_states([{**host, "state": "failed", "ranks": told}]).state == run.state
        return run.state

    assert ended(14.0) == "stopped", "for want of those that were told"
    assert ended(5.0) == "failed", "before anybody was"


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (exited(0, 20.0, "stopped", -9, reason=KILLED, ago=0.5), "failed"),
        (
            exited(0, 90.0, "stopped", -9, reason=REBOOTED, ago=70.0),
            "failed",
        ),  # written down once it was back
        (exited(0, 20.0, "stopped", -15, reason=TOLD_TO_END), "failed"),
        (
            exited(0, 90.0, "stopped", -9, reason=REBOOTED, ago=18.0),
            "stopped",
        ),  # after that, while it was cut off
    ],
)
def test_a_run_had_failed_if_a_host_was_lost_before_somebody_stopped_it(end: Event, status: str) -> None:
    started = [event("rank_started", n, 1.0, pid=n + 6) for n in (0, 1)]
    stopped = exited(1, 70.0, "stopped", -15, reason="stopped", stopping=2.0)
    run = folded(2, *started, *sorted((end, stopped), key=lambda each: each.time))
    assert run.state == status
    told = [to_json(rank) for rank in run.ranks.values()]
    host = {"run": "r", "name": "", "attempt": 1, "world": 2, "host": "h", "started": 1.0, "ended": 90.0}
    assert fold.from_states([{**host, "state": "failed", "ranks": told}]).state == status
    cause = first_failure(run, {})
    if status == "stopped":
        assert cause is None
    else:
        assert cause is not None
        assert cause.text.startswith(f"the run was ended on h: {end.data['reason']}")


@pytest.mark.parametrize(
    ("failed", "stops", "status"),
    [
        (13.0, {10.0: 7}, "stopped"),  # it failed for want of what was stopped
        (9.5, {10.0: 7}, "stopped"),  # while the stop waited for hosts, and ranks had their grace
        (9.5, {10.0: 7, 40.0: 8}, "stopped"),
        (10.0, {40.0: 7}, "failed"),  # long before anybody stopped the run
        (10.0, {12.0: None}, "failed"),  # the other has never begun
    ],
)
def test_who_fails_once_the_run_was_stopped_makes_no_failure_of_it_and_who_had_failed_before_does(
    failed: float, stops: dict[float, int | None], status: str
) -> None:
    """By events, and by what the hosts say of their ranks."""
    started = [event("rank_started", n, 1.0, pid=pid) for n, pid in enumerate((6, *stops.values())) if pid]
    ends = [exited(n, time, "stopped", -15, reason="stopped") for n, time in enumerate(stops, 1)]
    run = folded(1 + len(stops), *started, exited(0, failed, "failed", 1), *ends)
    assert run.state == status
    told = [
        {**NOTHING_YET, **{key: getattr(rank, key) for key in ("rank", "state", "reason", "pid", "seen")}}
        for rank in run.ranks.values()
    ]
    host = {"run": "r", "name": "", "attempt": 1, "world": 2, "host": "h", "started": 1.0, "ended": 50.0}
    assert fold.from_states([{**host, "state": "failed", "ranks": told}]).state == status


@given(st.lists(st.sampled_from(get_args(RankStatus)), min_size=1, max_size=6))
def test_a_run_is_over_exactly_when_all_its_ranks_are(states: list[RankStatus]) -> None:
    status = fold.run_status({number: rank(state) for number, state in enumerate(states)})
    assert (status in fold.ENDED) == (not {"waiting", "running", "unknown"} & set(states))


def story_of(number: int) -> list[Event]:
    """All of one rank's events, at times that other ranks share."""
    end = exited(number, 3.0, "failed" if number == 1 else "succeeded", number)
    return [event("rank_started", number, 1.0, pid=number), event("metric", number, 2.0, step=number), end]


@given(st.permutations([0, 0, 0, 1, 1, 1, 2, 2, 2]))
def test_however_the_ranks_are_heard_the_run_ends_the_same(order: list[int]) -> None:
    stories = {number: iter(story_of(number)) for number in range(3)}
    mixed = [next(stories[number]) for number in order]
    assert folded(3, *mixed) == folded(3, *(one for number in range(3) for one in story_of(number)))


@pytest.mark.parametrize("status", get_args(RunStatus))
def test_the_exit_code_follows_from_the_state(status: RunStatus) -> None:
    run = RunState("r", "", 1, 1, status, {})
    assert fold.exit_code(run) == {"succeeded": 0, "stopped": 130}.get(status, 1)


@pytest.mark.parametrize(
    ("told", "result"),
    [
        ([(1, 0.97)], 0.97),
        ([(0, 0.97), (1, 0.97)], 0.97),
        ([(0, 0.5), (0, 0.97), (1, 0.97)], 0.97),
        ([(0, None), (1, 0.97)], 0.97),
        ([(0, 0.97), (1, 0.5)], None),
        ([], None),
    ],
    ids=["by one", "by all", "by one again", "as nothing by one", "otherwise by one", "by none"],
)
def test_a_result_is_what_all_ranks_say_that_tell_of_it(
    told: list[tuple[int, float | None]], result: float | None
) -> None:
    run = folded(3, *(event("metric", rank, 1.0, accuracy=value) for rank, value in told))
    assert fold.result(run, "accuracy") == result


def test_a_result_is_that_of_a_rank_that_told_its_end() -> None:
    run = folded(
        2,
        event("metric", 0, 1.0, accuracy=0.5, step=7),
        event("metric", 1, 2.0, accuracy=0.97, step=9, parameters_sha256="abc"),
    )
    assert [fold.result(run, key) for key in ("accuracy", "step")] == [0.97, 9]


@pytest.mark.parametrize(
    "command", ["exit 0", "exit $RANK", "kill -KILL $$", "test $RANK = 0 || sleep 600; exit 3"]
)
def test_the_events_and_the_hosts_own_word_tell_the_same_story(command: str) -> None:
    script = f'echo "{{\\"step\\": $RANK}}" >>$RINGCTL_METRICS; {command}'
    run = detach(["sh", "-c", script])
    wait_until_final(run)
    told = [Event(e.pop("kind"), e.pop("time"), run, 1, "localhost", e.pop("rank"), e) for e in events(run)]
    initial = fold.from_states([{**state(run), "ranks": [{**r, **NOTHING_YET} for r in state(run)["ranks"]]}])
    from_events = reduce(fold.fold, told, initial)
    from_host = fold.from_states([state(run)])

    def essence(run: RunState) -> Any:
        about = json.loads(json.dumps(to_json(run)))
        ranks = [{k: v for k, v in r.items() if k not in ("seen", "ended")} for r in about["ranks"].values()]
        return about["state"], ranks

    assert essence(from_events) == essence(from_host)
    assert from_host.state in fold.ENDED


NOTHING_YET: dict[str, Any] = {
    "state": "waiting",
    "pid": None,
    "exit_code": None,
    "signal": None,
    "reason": "",
    "metric": {},
}


def test_the_newest_attempt_counts_and_a_lost_host_makes_a_lost_run() -> None:
    def host(name: str, attempt: int, status: str, rank_state: str, number: int) -> dict[str, Any]:
        ranks = [{**NOTHING_YET, "rank": number, "state": rank_state, "seen": 1.0}]
        about = {"run": "r", "name": "", "world": 2, "started": float(attempt), "ended": None}
        return {**about, "host": name, "attempt": attempt, "state": status, "ranks": ranks}

    old = host("a", 1, "failed", "failed", 0)
    run = fold.from_states(
        [old, host("a", 2, "running", "running", 0), host("b", 2, "running", "running", 1)]
    )
    assert (run.attempt, run.state, list(run.ranks), run.started) == (2, "running", [0, 1], 2.0)
    lost = fold.from_states([host("a", 1, "lost", "running", 0), host("b", 1, "running", "running", 1)])
    assert (lost.state, [rank.state for rank in lost.ranks.values()]) == ("lost", ["unknown", "running"])


def test_a_rank_that_tells_ever_more_metrics_is_known_by_the_first_of_them_and_their_newest_values() -> None:
    state = fold.initial(plan_of(1))
    for first in range(0, 200_000, 50):
        told = {"step": first, **{f"m{number}": 1 for number in range(first, first + 50)}}
        state = fold.fold(state, event("metric", 0, 1.0, **told))
    metric = state.ranks[0].metric
    assert len(metric) == fold.MOST_NAMES
    assert metric["step"] == 199_950
    assert "m0" in metric


def test_what_is_no_plain_value_or_has_no_end_is_not_kept_as_a_metric() -> None:
    told = {"step": 3, "loss": None, "tree": {"a": [1]}, "list": [1], "name": "x" * 9999, "n" * 9999: 1}
    state = fold.fold(fold.initial(plan_of(1)), event("metric", 0, 1.0, **told))
    assert state.ranks[0].metric == {"step": 3, "loss": None}


def test_a_reason_without_an_end_is_cut() -> None:
    state = fold.fold(fold.initial(plan_of(1)), exited(0, 1.0, "failed", 1, reason="conda: " * 100_000))
    assert state.ranks[0].reason.startswith("conda: ")
    assert len(state.ranks[0].reason) <= 2000


def test_lines_that_a_host_has_lost_are_part_of_the_run_and_nonsense_is_not() -> None:
    ended = fold.fold(fold.initial(plan_of(1)), event("host_finished", None, 3.0, unwritten=-1))
    assert ended.unwritten == {"h": -1}
    assert fold.before(ended).unwritten == {}
    for nonsense in (-2, 1 << 60, "5", True, None, 0):
        after = fold.fold(fold.initial(plan_of(1)), event("host_finished", None, 3.0, unwritten=nonsense))
        assert after.unwritten == {}
