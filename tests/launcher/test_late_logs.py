"""Logs that go on long after the end was asked for: shown whole where they come to an end, else cut and said
to be."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from launcher import history, rests, showlogs, watch
from launcher.logs import EVERYTHING
from launcher.model import Event, Host, Inventory, RankState, RunState
from launcher.plan import LaunchOptions
from launcher.rests import Rests
from launcher.runs import Found
from launcher.transport import Pool
from tests.launcher.test_hostile_hosts import (
    CURSOR,
    END,
    EXITED,
    LINE,
    MARK,
    Notes,
    liar,
    plan_on,
    telling,
    two,
)
from tests.launcher.test_rests import LINES, LOST, TOLD, rest_of, texts

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


def test_an_attempt_that_is_passed_over_because_its_hosts_are_away_is_told(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Of four, the third never started, and the hosts of the second are away."""
    refused = compact({"kind": "error", "time": 1e9, "error": "run r1 was not started on this host"})
    tells = f"""request=$(cat); echo {MARK}
case $request in
*'"attempt": 3'*|*'"attempt":3'*) echo '{refused}';;
*'"attempt": 1'*|*'"attempt":1'*) echo '{compact(CURSOR)}'; echo '{compact(LINE)}'; echo '{compact(END)}';;
esac"""
    host = Host("liar", "192.0.2.1")
    found = Found("r1", "", (host,), 0.0, attempt=4)
    assert showlogs.previous(found, {"liar": liar(tells)}) == 1
    said = capfd.readouterr().err
    assert said == "attempt 2 cannot be looked for: liar: the connection was lost; this is attempt 1\n"


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


# --- A host whose ranks have ended, and that never says that its log has ---------------------------

ENDED = {**STOPPED, "state": "failed", "reason": "", "exit_code": 3}
NEVER_OVER = f"while echo '{compact({**CURSOR, 'kind': 'tick'})}'; do sleep 0.1; done"


def wait_at(
    screen: Shown, interrupts: watch.Interrupts, *, again: bool = False, stopped: bool = False
) -> watch.Outcome:
    """How a run of one rank is seen that has failed on such a host."""
    script = asked_to_stop(f"echo '{compact(ENDED)}'; {NEVER_OVER}")
    state = RunState("r1", "", 1, 1, "starting", {0: RankState(0, "liar")})
    return watch.watch(
        state, {"liar": liar(script)}, screen, interrupts, again=again, given_up=lambda: stopped
    )


@pytest.mark.timeout(60)
def test_ctrl_c_ends_the_wait_for_a_log_that_is_never_over_which_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "TOLD_S", 1.0)
    interrupts = watch.Interrupts()

    def press(screen: Shown) -> None:
        interrupts.count = sum(watch.NOT_OVER in note for note in screen.notes)

    screen = Shown(then=press)
    outcome = wait_at(screen, interrupts)
    assert screen.notes == [
        f"liar: {watch.NOT_OVER}",
        "stopping the run; press Ctrl-C again to kill it",
        MISSING,
    ]
    assert outcome.state.state == "failed"


@pytest.mark.timeout(60)
def test_a_next_attempt_does_not_wait_for_a_log_that_is_never_over() -> None:
    outcome = wait_at(Shown(), watch.Interrupts(), again=True)
    assert (outcome.state.state, set(outcome.heard_to)) == ("failed", {"liar"})


@pytest.mark.timeout(60)
def test_whoever_watches_a_run_that_is_stopped_does_not_wait_for_a_log_that_is_never_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "TOLD_S", 1.0)
    monkeypatch.setattr(watch, "LATEST_S", 3600.0)
    assert wait_at(Shown(), watch.Interrupts(), again=True, stopped=True).state.state == "failed"


# --- Beside a host that is away ------------------------------------------------------------------

LAST_WORD = [{**TOLD, "text": "the last word"}, {**LOST, "left": []}]
GOOD_LOST = "good: 4711 lines of its log are lost: they could not be written down"
LATE = "; ".join(f"echo '{compact(told)}'" for told in LAST_WORD)


def ends_and_then(lines: str) -> str:
    """A host whose rank has ended, and which then tells this."""
    return asked_to_stop(f"echo '{compact(STOPPED)}'; {lines}")


def stop_two(script: str, screen: Shown, monkeypatch: pytest.MonkeyPatch, *, again: bool) -> watch.Outcome:
    """How a run is seen that was asked to end, on this host and on one that is away."""
    monkeypatch.setattr(watch, "RETRY_S", 0.1)
    monkeypatch.setattr(watch, "AGAIN_S", 0.1)
    monkeypatch.setattr(watch, "LATEST_S", 4.0)
    interrupts = watch.Interrupts()
    interrupts.count = 1
    state = RunState("r1", "", 1, 2, "starting", {0: RankState(0, "good"), 1: RankState(1, "liar")})
    return watch.watch(state, two(script, "exit 1"), screen, interrupts, again=again)


def test_the_last_word_of_a_host_is_shown_though_another_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Shown()
    stop_two(ends_and_then(f"sleep 2; {LATE}"), screen, monkeypatch, again=False)
    assert screen.lines == ["the last word"]
    assert GOOD_LOST in screen.notes
    assert screen.notes.count(MISSING) == 1


def test_a_host_that_talks_on_is_cut_and_said_to_be_though_another_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen, began = Shown(), time.monotonic()
    stop_two(ends_and_then(number(ENDLESS, 0.05)), screen, monkeypatch, again=False)
    assert time.monotonic() < began + 60
    assert "good, liar: the rest of the log of attempt 1 is missing here" in screen.notes


def test_the_last_word_of_a_host_is_left_to_be_read_beside_the_next_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = Shown()
    outcome = stop_two(ends_and_then(f"sleep 2; {LATE}"), screen, monkeypatch, again=True)
    assert screen.lines == []
    assert outcome.heard_to.keys() == {"good", "liar"}
    assert outcome.since.keys() == {"liar"}
    assert outcome.heard_to["good"].taken == 2


def test_the_last_word_of_a_host_is_read_by_logs_beside_the_next_attempt(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = plan_on(2, "good", "liar")
    inventory = Inventory((Host("good", local=True), Host("liar", local=True)), "good")
    history.remember(plan, inventory, LaunchOptions("r1", "", ("true",), "/t"))
    agents, places = two(ends_and_then(f"sleep 2; {LATE}"), "exit 1"), {0: "good", 1: "liar"}
    monkeypatch.setattr(Pool, "transport", lambda _pool, host: agents[host.name].transport)
    ranks = {rank: RankState(rank, host, state="running") for rank, host in places.items()}
    found = replace(
        Found("r1", "", inventory.hosts, 0.0, rank_hosts=places),
        end=RunState("r1", "", 1, 2, "running", ranks),
    )
    look, write = showlogs.Look(as_json=False, prefix=True, timestamps=False, tail=None), capfd.readouterr
    with contextlib.closing(Rests("r1", showlogs.note)) as found_later:
        shown = showlogs.show_attempt(
            found, agents, EVERYTHING, look, live=True, attempt=1, rests=found_later
        )
        assert "the last word" not in write().out
        assert shown.rest.keys() == {"good", "liar"}
        assert shown.away.keys() == {"liar"}
        found_later.add(agents, shown.rest, 1, places)
        seen = [text for events in found_later.last(agents) for text in texts(events)]
        (missing,) = found_later.missing()
    assert seen == ["the last word"]
    assert GOOD_LOST in write().err
    assert missing.startswith("liar: ")


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
