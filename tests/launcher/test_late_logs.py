"""Logs that go on long after the end was asked for: shown whole where they come to an end, else cut and said
to be."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from launcher import rests, watch
from launcher.model import Event, RankState, RunState
from tests.launcher.test_hostile_hosts import CURSOR, END, EXITED, MARK, Notes, liar, telling, two
from tests.launcher.test_rests import LINES, TOLD, rest_of, texts

MISSING = "liar: the rest of the log of attempt 1 is missing here"
STARTED = {"kind": "rank_started", "time": 1e9, "rank": 0, "pid": 1}
STOPPED = {**EXITED, "rank": 0, "state": "stopped", "reason": "stopped"}


class Shown(Notes):
    """A screen that takes its time for each event."""

    def __init__(self, each: float = 0.0, then: Callable[[Shown], None] = lambda _: None) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.each, self.then = each, then

    def show(self, events: list[Event], state: RunState) -> None:  # noqa: ARG002 - a Screen gets both
        for text in texts(events):
            time.sleep(self.each)
            self.lines.append(text)
        self.then(self)


def compact(told: dict[str, Any]) -> str:
    return json.dumps(told, separators=(",", ":"))


def asked_to_stop(lines: str) -> str:
    """A host that says that it has ended its ranks, and whose log is what this shell script prints."""
    return f"""
cat >/dev/null
if [ $2 = follow ]; then
    echo {MARK}; echo '{compact(CURSOR)}'; echo '{compact(STARTED)}'
    {lines}
    echo '{compact(STOPPED)}'; echo '{compact({**END, "state": "stopped"})}'; exit
fi
printf -- '{MARK}\\n{{"known": true, "was": "running", "state": "stopped", "ended": [0], "left": []}}\\n'
"""


def number(count: int, pause: float, moment: str = "1000000000.0") -> str:
    """Shell: so many numbered lines, one by one."""
    line = compact({**TOLD, "time": 0, "text": "TEXT"}).replace(":0,", f":{moment},", 1)
    line = line.replace('"', '\\"').replace("TEXT", "$i")
    return f'i=0; while [ $i -lt {count} ]; do echo "{line}"; i=$((i+1)); sleep {pause}; done'


ENDLESS = 10**9


def stop_it(
    script: str, screen: Shown, interrupts: watch.Interrupts | None = None, *, again: bool = False
) -> watch.Outcome:
    """How a run of one rank is seen that was asked to end before it is watched."""
    interrupts = interrupts or watch.Interrupts()
    interrupts.count = 1
    state = RunState("r1", "", 1, 1, "starting", {0: RankState(0, "liar")})
    return watch.watch(state, {"liar": liar(script)}, screen, interrupts, again=again)


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "GRACE_S", 0.1)
    monkeypatch.setattr(watch, "TOLD_S", 4.0)
    monkeypatch.setattr(watch, "LATEST_S", 1.0)


def test_a_log_that_takes_long_to_come_is_shown_to_its_end() -> None:
    screen = Shown()
    outcome = stop_it(asked_to_stop(number(60, 0.05)), screen)
    assert screen.lines == [str(line) for line in range(60)]
    assert outcome.state.state == "stopped"
    assert MISSING not in screen.notes


def test_a_log_that_takes_long_to_be_shown_is_shown_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LONGEST_S", 3.0)
    screen = Shown(each=0.1)
    outcome = stop_it(asked_to_stop(number(60, 0.02)), screen)
    assert screen.lines == [str(line) for line in range(60)]
    assert outcome.state.state == "stopped"
    assert MISSING not in screen.notes


def test_a_log_is_shown_to_its_end_though_our_clock_is_set_back_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupts, clock = watch.Interrupts(), time.time

    def set_back_and_stop(screen: Shown) -> None:
        if screen.lines and not interrupts.count:
            monkeypatch.setattr(time, "time", lambda: clock() - 3600.0)
            interrupts.count = 1

    screen = Shown(then=set_back_and_stop)
    agents = {"liar": liar(asked_to_stop(number(60, 0.05, f"{clock():.1f}")))}
    state = RunState("r1", "", 1, 1, "starting", {0: RankState(0, "liar")})
    outcome = watch.watch(state, agents, screen, interrupts)
    assert screen.lines == [str(line) for line in range(60)]
    assert outcome.state.state == "stopped"
    assert MISSING not in screen.notes


@pytest.mark.parametrize(
    ("moment", "name", "value"),
    [
        ("9$(date +%s).0", "MOST_LATE", 1 << 30),
        ("1000000000.0", "MOST_LATE", 2000),
        ("1000000000.0", "LONGEST_S", 2.0),
    ],
    ids=["later than it was ended", "more than there can be", "for too long"],
)
def test_a_log_that_never_ends_is_cut_and_said_to_be(
    moment: str, name: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, name, value)
    screen = Shown()
    began = time.monotonic()
    outcome = stop_it(asked_to_stop(number(ENDLESS, 0.05, moment)), screen)
    assert time.monotonic() < began + 60
    assert outcome.state.state == "lost"
    assert screen.notes[-1] == MISSING


def test_what_a_screen_takes_for_a_log_that_never_ends_is_not_given_to_its_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "MOST_LATE", 2000)
    screen = Shown(each=0.2)
    began = time.monotonic()
    stop_it(asked_to_stop(number(ENDLESS, 0.01)), screen)
    assert time.monotonic() < began + 60
    assert screen.notes[-1] == MISSING


def test_a_second_interrupt_gives_up_a_log_that_is_only_waited_for() -> None:
    interrupts = watch.Interrupts()

    def press(screen: Shown) -> None:
        asked = any("stopping the run" in note for note in screen.notes)
        if asked and not any(isinstance(thread, watch.Stop) for thread in threading.enumerate()):
            interrupts.count = 2

    screen = Shown(then=press)
    began = time.monotonic()
    stop_it(asked_to_stop(number(ENDLESS, 0.05)), screen, interrupts)
    assert time.monotonic() < began + 60
    assert screen.notes[-1] == MISSING


def test_what_is_left_of_a_log_when_the_next_attempt_comes_is_read_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "LONGEST_S", 1.0)
    screen = Shown()
    outcome = stop_it(asked_to_stop(number(ENDLESS, 0.05)), screen, again=True)
    assert outcome.heard_to["liar"].taken == 1 + len(screen.lines)
    assert outcome.since == {}  # it can be heard: the next attempt is on it, too
    assert MISSING not in screen.notes  # who reads on says so if need be


def test_a_next_attempt_does_not_wait_for_a_log_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SETTLE_S", 0.1)
    monkeypatch.setattr(watch, "FAILED_GRACE_S", 0.1)
    failed = {**EXITED, "rank": 1, "state": "failed", "exit_code": 3}
    agents = two(telling(CURSOR, failed, {**END, "state": "failed"}), asked_to_stop(number(ENDLESS, 0.05)))
    ranks = {0: RankState(0, "liar"), 1: RankState(1, "good")}
    state, screen = RunState("r1", "", 1, 2, "starting", ranks), Shown()
    began = time.monotonic()
    outcome = watch.watch(state, agents, screen, watch.Interrupts(), again=True)
    assert time.monotonic() < began + 60
    assert outcome.heard_to.keys() == {"liar"}
    assert outcome.cause is not None
    assert outcome.cause.text.startswith("rank 1 on good exited with code 3")


def test_a_rest_that_takes_long_to_be_shown_is_shown_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rests, "QUIET_S", 2.0)
    monkeypatch.setattr(rests, "LONGEST_S", 2.0)
    lines = "; sleep 0.3; ".join(f"echo '{compact(line)}'" for line in LINES)
    script = f"echo {MARK}; echo '{compact(CURSOR)}'; {lines}; echo '{compact(END)}'"
    with rest_of(script, monkeypatch) as (found, agents):
        seen = list[str]()
        for events in found.last(agents):
            time.sleep(2.5)
            seen += texts(events)
        assert seen == ["line 0", "line 1", "line 2"]
        assert found.missing() == []
