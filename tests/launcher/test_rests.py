"""What hosts that were away have of an attempt: read once they are back, and for no longer than is wanted."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher import attempts, history, nextattempt, rests, watching
from launcher.agent import Agent
from launcher.ask import Asked
from launcher.follow import GONE, STILL_GOES_ON, first
from launcher.model import Event, Host, Inventory, Plan, RunState
from launcher.plan import LaunchOptions
from launcher.rests import Rests
from launcher.transport import Pool
from launcher.watch import Interrupts, Outcome, Screen
from tests.launcher.ringctl import wait_for
from tests.launcher.test_hostile_hosts import CURSOR, END, MARK, Notes, liar, plan_on, telling

TOLD = {"kind": "line", "time": 1e9, "rank": 0, "stream": "out"}
LINES = [{**TOLD, "text": f"line {number}"} for number in range(3)]
LOST = {"kind": "host_finished", "time": 1e9, "rank": None, "state": "failed", "left": [7], "unwritten": 4711}
LOST_WORDS = "liar: 4711 lines of its log are lost: they could not be written down"
ENDLESS = f"""
echo {MARK}; echo '{json.dumps(CURSOR, separators=(",", ":"))}'
while echo '{json.dumps(LINES[0], separators=(",", ":"))}'; do sleep 0.05; done
"""


@contextlib.contextmanager
def rest_of(
    script: str, monkeypatch: pytest.MonkeyPatch, note: Callable[[str], None] = lambda _: None
) -> Iterator[tuple[Rests, dict[str, Agent]]]:
    """All that a host, which is this script, has of attempt 1."""
    script = f"asked=$(cat)\n{script}"
    agents = {"liar": liar(script)}
    monkeypatch.setattr(Pool, "transport", lambda _pool, _host: liar(script).transport)
    with contextlib.closing(Rests("r1", note)) as found:
        found.add(agents, {"liar": first(1)}, 1, {0: "liar"})
        yield found, agents


def texts(events: list[Event]) -> list[str]:
    return [event.data["text"] for event in events if event.kind == "line"]


def test_what_a_host_has_is_read_once_it_is_back_and_each_line_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    back = tmp_path / "back"
    script = f"[ -e {back} ] || exit 0\n{telling(CURSOR, *LINES, END)}"
    with rest_of(script, monkeypatch) as (found, agents):
        assert not found.look()
        wait_for(lambda: not found.look() and found.missing()[0].startswith("liar: "), "that it is away")
        back.touch()
        seen = list[str]()

        def is_read() -> bool:
            seen.extend(texts(found.look()))
            return not found.missing()

        wait_for(is_read, "its lines")
        assert seen == ["line 0", "line 1", "line 2"]
        assert not list(found.last(agents))


def test_who_was_away_is_asked_once_more_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    back = tmp_path / "back"
    script = f"[ -e {back} ] || exit 0\n{telling(CURSOR, *LINES, END)}"
    with rest_of(script, monkeypatch) as (found, agents):
        found.look()
        back.touch()
        assert [text for events in found.last(agents) for text in texts(events)][-1] == "line 2"
        assert found.missing() == []


def test_what_a_host_lost_while_it_was_away_and_could_not_end_is_told_once_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notes: list[str] = []
    with rest_of(telling(CURSOR, LINES[0], LOST, END), monkeypatch, notes.append) as (found, agents):
        assert [text for events in found.last(agents) for text in texts(events)] == ["line 0"]
    assert notes[0] == "liar: what it said in attempt 1 while it was not heard:"
    assert notes[1:] == ["liar: could not end processes [7]", LOST_WORDS]


def test_a_host_that_has_no_more_to_say_is_not_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    nothing = {**LOST, "left": [], "unwritten": 0}
    with rest_of(telling(CURSOR, nothing, END), monkeypatch, notes.append) as (found, agents):
        assert [event.kind for events in found.last(agents) for event in events] == ["host_finished"]
    assert notes == []


@pytest.mark.parametrize("state", ["running", "lost"])
def test_what_has_no_end_when_the_run_is_over_is_read_again_until_it_has_one(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = tmp_path / "ended"
    rest = telling(CURSOR, *LINES, {**END, "state": "stopped"})
    script = f"if [ -e {ended} ]; then {rest}\nelse {telling(CURSOR, {**END, 'state': state})}\nfi"
    with rest_of(script, monkeypatch) as (found, agents):
        threading.Timer(0.5, ended.touch).start()
        assert [text for events in found.last(agents) for text in texts(events)][-1] == "line 2"
        assert found.missing() == []


@pytest.mark.parametrize(("state", "why"), [("running", STILL_GOES_ON), ("lost", GONE)])
def test_what_never_has_an_end_is_said_to_be_missing(
    state: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rests, "QUIET_S", 0.5)
    notes: list[str] = []
    end = {**END, "state": state}
    known = telling({**CURSOR, "offset": 1}, end)
    script = f"case $asked in\n*'1, 0]'*)\n{telling(CURSOR, LINES[0], end)}\n;;\n*)\n{known}\n;;\nesac"
    with rest_of(script, monkeypatch, notes.append) as (found, agents):
        assert texts(found.look() + [event for events in found.last(agents) for event in events]) == [
            "line 0"
        ]
        (words,) = found.missing()
    assert words == f"liar: {why}; the rest of its log of attempt 1 is missing here"
    assert notes == ["liar: what it said in attempt 1 while it was not heard:"]


def test_who_never_comes_back_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with rest_of("exit 0", monkeypatch) as (found, agents):
        assert not list(found.last(agents))
        (words,) = found.missing()
    assert words == "liar: the connection was lost; the rest of its log of attempt 1 is missing here"


def test_a_host_that_never_comes_to_an_end_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    with rest_of(ENDLESS, monkeypatch) as (found, agents):
        for _ in range(2):  # whoever looks goes on with something else in between
            wait_for(lambda: texts(found.look()) and True, "a line")
        assert not list(found.last(agents, given_up=lambda: True))
        monkeypatch.setattr(rests, "HURRY_S", 0.5)
        list(found.last(agents, hurry=lambda: True))
        monkeypatch.setattr(rests, "LONGEST_S", 0.5)
        list(found.last(agents))
        (words,) = found.missing()
    assert words == "liar: it does not come to an end; the rest of its log of attempt 1 is missing here"


class Watched(Notes):
    """A screen, and how the attempts end that it shows: the first fails, without having heard the liar."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def show(self, events: list[Event], state: RunState) -> None:  # noqa: ARG002 - a Screen gets both
        self.seen += texts(events)

    def one_attempt(self, plan: Plan, _agents: object, screen: Screen, *_: object, **__: object) -> Any:
        state = RunState("r1", "", plan.attempt, 1, "failed" if plan.attempt == 1 else "succeeded", {})
        if plan.attempt == 1:
            return Outcome(state, None, heard_to={"liar": first(1)}), None

        def is_seen() -> bool:
            screen.show([], state)
            return bool(self.seen)

        wait_for(is_seen, "a line of the attempt before")
        self.note("the second attempt is watched")
        return Outcome(state, None), None


def test_a_rest_that_never_comes_to_an_end_does_not_keep_the_next_attempt_from_being_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen, agents, inventory = (
        Watched(),
        {"liar": liar(ENDLESS)},
        Inventory((Host("liar", local=True),), "liar"),
    )
    monkeypatch.setattr(rests, "LONGEST_S", 0.5)
    monkeypatch.setattr(Pool, "transport", lambda _pool, _host: liar(ENDLESS).transport)
    monkeypatch.setattr(attempts, "one_attempt", screen.one_attempt)
    monkeypatch.setattr(nextattempt.Next, "begin", lambda *_: (plan_on(2, "liar"), agents))
    asked = Asked(inventory, LaunchOptions("r1", "", ("true",), "/t", max_restarts=1), None)
    history.make_folder(watching.folder())
    watching.write(watching.begin("r1"))
    with watching.watched("r1") as book:
        rest = (plan_on(1, "liar"), agents, screen, Interrupts(), Pool(), book)
        seeing = threading.Thread(target=attempts.see_through, args=(asked, *rest), daemon=True)
        seeing.start()
        seeing.join(30.0)
    assert "the second attempt is watched" in screen.notes
    assert "does not come to an end" in screen.notes[-1]


def test_a_host_that_had_no_rank_of_the_attempt_has_no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    with rest_of(ENDLESS, monkeypatch) as (found, _), contextlib.closing(Rests("r1", lambda _: None)) as none:
        agents = {"other": Agent(Host("other", local=True), liar(ENDLESS).transport)}
        none.add(agents, {"other": first(1)}, 1, {0: "liar"})
        assert none.missing() == []
        assert found.missing()
