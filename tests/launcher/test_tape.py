"""What is recorded of a run can be read again: from any number on, from the end, filtered, thinned."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher import fold, history, tape
from launcher.diagnose import Cause
from launcher.follow import Place
from launcher.model import Event, Host, HostPlan, Inventory, Plan, RankSpec, from_json
from launcher.plan import LaunchOptions
from launcher.watch import Outcome

RUN = "20260101-000000-abcd"
RANKS = tuple(RankSpec(rank, 0, ("x",), {}) for rank in range(2))
PLAN = Plan(
    RUN,
    "",
    1,
    2,
    "a",
    1,
    ("true",),
    tuple(HostPlan(f"h{n}", "/", None, False, RANKS[n : n + 1]) for n in (0, 1)),
)
STATE = fold.initial(PLAN)


@pytest.fixture
def book() -> Iterator[tape.Tape]:
    inventory = Inventory((Host("h0"), Host("h1")), "h0")
    history.remember(PLAN, inventory, LaunchOptions(RUN, "", ("true",), "/t"))
    with tape.Tape(RUN) as book:
        yield book


def line(number: int, rank: int = 0, stream: str = "out", text: str = "") -> Event:
    data = {"stream": stream, "text": text or f"line {number}"}
    return Event("line", float(number), RUN, 1, f"h{rank}", rank, data)


def metric(step: int, rank: int = 0, **data: float) -> Event:
    return Event("metric", float(step), RUN, 1, f"h{rank}", rank, {"step": step, **data})


def record(book: tape.Tape, events: Sequence[Event], size: int = 7) -> None:
    for at in range(0, len(events), size):
        book.append(events[at : at + size], 1, {}, STATE)


def texts(page: tape.Page) -> list[str]:
    return [line[6] for line in page.lines]


# --- Events --------------------------------------------------------------------------------------


def test_events_come_back_as_they_were_numbered_from_one(book: tape.Tape) -> None:
    odd = ["", "\udcff\x00\n", "☃ \U0001f600", '"quoted" \\ ["line"', "x" * 100_000]
    events = [line(n, n % 2, text=text) for n, text in enumerate(odd)]
    events += [metric(1, loss=0.5), Event("rank_started", 1.0, RUN, 1, "h0", None, {"pid": 3})]
    record(book, events, 2)
    assert tape.events(RUN) == list(enumerate(events, 1))
    assert tape.events(RUN, after=3, limit=2) == [(4, events[3]), (5, events[4])]
    assert tape.events(RUN, after=len(events)) == []
    assert tape.last(RUN) == book.last == len(events)
    assert tape.events("another") == []


def test_events_come_back_though_there_are_metrics_alone(book: tape.Tape) -> None:
    events = [metric(number) for number in range(30)]
    record(book, events)
    assert [event for _, event in tape.events(RUN)] == events


def test_whoever_opens_it_again_goes_on_after_the_last(book: tape.Tape) -> None:
    record(book, [line(n) for n in range(10)])
    with tape.Tape(RUN) as again:
        assert again.last == 10
        assert again.append([line(10)], 1, {}, STATE) == 11
    assert [id_ for id_, _ in tape.events(RUN)] == list(range(1, 12))


def test_many_small_batches_become_few_chunks(book: tape.Tape) -> None:
    record(book, [line(n, text="x" * 100) for n in range(2000)], 5)
    count = history.ask(lambda db: db.execute("SELECT count(*) FROM chunks").fetchone()[0], 0)
    assert count < 10
    assert len(tape.events(RUN)) == 2000


def test_whole_chunks_end_where_something_that_was_written_down_at_a_time_ends(book: tape.Tape) -> None:
    record(book, [line(n, text="x" * 1000) for n in range(300)], 40)
    assert tape.whole_chunks(RUN, 300, 10) == []
    for after in range(0, 300, 7):
        found = tape.whole_chunks(RUN, after, 10)
        last = found[-1][0]
        assert found == tape.events(RUN, after, last - after)
        assert last % 40 == 0 or last == 300
        assert len(found) >= 10 or last == 300


def test_much_that_comes_at_once_becomes_chunks_that_are_not_too_large(
    book: tape.Tape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tape, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(tape, "LARGEST_CHUNK", 3000)
    events = [line(n, text="é" * (2000 if n == 50 else 100)) for n in range(100)]
    record(book, events, 100)
    sizes = [sum(map(len, rows)) for _, rows in tape.upwards(RUN, 0)]
    assert len(sizes) > 20
    assert [size > 3000 for size in sizes].count(True) == 1, "one event is not cut"
    assert tape.events(RUN) == list(enumerate(events, 1))
    assert texts(tape.lines(RUN, limit=100)) == [event.data["text"] for event in events]
    with tape.Tape(RUN) as again:
        assert again.append([line(100)], 1, {}, STATE) == 101


def test_one_question_brings_so_many_bytes_and_the_next_goes_on(
    book: tape.Tape, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = [line(n, text="é" * (500 if n == 50 else 10)) for n in range(100)]
    record(book, events, 9)
    monkeypatch.setattr(tape, "MOST_BYTES", 1000)
    up, after, more = list[str](), 0, True
    while more:
        page = tape.lines(RUN, after=after, limit=60)
        assert 0 < len(page.lines) <= 10
        up, after, more = up + texts(page), page.last, page.more
    down, before, more = list[str](), 101, True
    while more:
        page = tape.lines(RUN, before=before, limit=60)
        down, before, more = texts(page) + down, page.first, page.more
    said = [event.data["text"] for event in events]
    assert (up, down) == (said, said)
    found, some = list[tuple[int, Event]](), tape.events(RUN, most=1000)
    while some:
        assert len(some) <= 10
        found += some
        some = tape.events(RUN, after=found[-1][0], most=1000)
    assert found == list(enumerate(events, 1))
    assert len(tape.whole_chunks(RUN, 0, 60, 1000)) <= 10


def test_events_of_one_kind_are_found_among_many_page_by_page(
    book: tape.Tape, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [Event("line", 1e9, RUN, 1, "h0", 0, {"stream": "out", "text": "x" * 100})] * 3000
    ends = [Event("host_finished", 1e9, RUN, 1, f"h{n}", None, {"unwritten": n}) for n in (0, 1)]
    book.append([*lines, ends[0], *lines, ends[1], *lines], 1, {}, fold.initial(PLAN))
    first, second = (3001, ends[0]), (6002, ends[1])
    assert tape.events_of_kind(RUN, "host_finished", 0, 10) == ([first, second], 9002, False)
    assert tape.events_of_kind(RUN, "host_finished", 0, 1) == ([first], 3001, True)
    assert tape.events_of_kind(RUN, "host_finished", 3001, 1) == ([second], 6002, True)
    assert tape.events_of_kind(RUN, "host_finished", 6002, 1) == ([], 9002, False)
    monkeypatch.setattr(tape, "LOOK_BYTES", 1000)
    after, found, more = 0, [], True
    while more:
        some, after, more = tape.events_of_kind(RUN, "host_finished", after, 10)
        found += some
    assert (found, after) == ([first, second], 9002)


def test_places_go_with_the_events(book: tape.Tape) -> None:
    assert book.places(1) == {}
    place = Place((1, 2, 300), 40, 50)
    book.append([line(1)], 1, {"h0": place}, STATE)
    book.append([line(2)], 2, {"h0": Place((2, 1, 0), 0, 1)}, STATE)
    assert book.places(1) == {"h0": place}
    assert book.places(2) == {"h0": Place((2, 1, 0), 0, 1)}


def test_a_run_that_was_forgotten_is_not_recorded_any_more(book: tape.Tape) -> None:
    book.append([line(1)], 1, {}, STATE)
    history.forget(RUN)
    with pytest.raises(tape.Forgotten):
        book.append([metric(1, loss=1.0)], 1, {}, STATE)
    assert tape.events(RUN) == []


# --- Lines ---------------------------------------------------------------------------------------


def test_the_newest_lines_come_first_to_hand_and_the_rest_page_by_page(book: tape.Tape) -> None:
    record(book, [e for n in range(1, 101) for e in (line(n), metric(n))])
    newest = tape.lines(RUN, limit=30)
    assert texts(newest) == [f"line {n}" for n in range(71, 101)]
    assert (newest.last, newest.more) == (200, True)
    older = tape.lines(RUN, before=newest.first, limit=1000)
    assert texts(older) == [f"line {n}" for n in range(1, 71)]
    assert not older.more
    later = tape.lines(RUN, after=newest.first, limit=5)
    assert texts(later) == [f"line {n}" for n in range(72, 77)]
    assert later.more
    end = tape.lines(RUN, after=later.last, limit=1000)
    assert texts(end)[-1] == "line 100"
    assert (end.last, end.more) == (200, False)
    assert tape.lines(RUN, after=200) == tape.Page([], 201, 200, False)
    assert tape.lines("another") == tape.Page([], 1, 0, False)


def test_lines_are_filtered_by_rank_host_stream_and_words(book: tape.Tape) -> None:
    said = ["one", "two (2)", "☃ three", 'a "four"']
    record(
        book,
        [line(n, r, s, w) for n, (r, s, w) in enumerate(itertools.product((0, 1), ("out", "err"), said))],
    )
    assert len(tape.lines(RUN).lines) == 16
    assert {each[4] for each in tape.lines(RUN, rank=[1]).lines} == {1}
    assert {each[3] for each in tape.lines(RUN, host=["h0"]).lines} == {"h0"}
    assert {each[5] for each in tape.lines(RUN, stream="err").lines} == {"err"}
    assert texts(tape.lines(RUN, search="(2)")) == ["two (2)"] * 4
    assert texts(tape.lines(RUN, search="☃")) == ["☃ three"] * 4
    assert texts(tape.lines(RUN, search='"four"')) == ['a "four"'] * 4
    assert texts(tape.lines(RUN, search="^o|w", regex=True)) == ["one", "two (2)"] * 4
    (only,) = tape.lines(RUN, rank=[0], host=["h0"], stream="err", search="one").lines
    assert only[3:] == ["h0", 0, "err", "one"]
    assert tape.lines(RUN, rank=[7]).lines == []
    assert tape.lines(RUN, search="stream").lines == [], "the words of the format are not the log's"


def test_words_are_found_in_any_case_and_through_colours(book: tape.Tape) -> None:
    said = [
        "Error: no",
        "\x1b[31mer\x1b[0mror: red",
        "\x1b]8;;x\x07error\x1b]8;;\x07 link",
        "Äußerst",
        "well",
    ]
    record(book, [line(n, text=text) for n, text in enumerate(said)])
    assert texts(tape.lines(RUN, search="error")) == said[:3]
    assert texts(tape.lines(RUN, search="ERROR: RED")) == said[1:2]
    assert texts(tape.lines(RUN, search="^error", regex=True)) == said[1:3]
    assert texts(tape.lines(RUN, search="äuß")) == said[3:4]
    assert texts(tape.lines(RUN, search="\x1b[31m")) == said[1:2], "whoever looks for a colour finds it"


def test_one_question_looks_through_a_part_of_a_long_log(
    book: tape.Tape, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(book, [line(n, text="rare" if n == 3 else "x" * 2000) for n in range(300)], 10)
    monkeypatch.setattr(tape, "LOOK_BYTES", 100_000)
    page, pages = tape.lines(RUN, search="rare"), 1
    assert (page.lines, page.more) == ([], True)
    while page.more and not page.lines:
        page, pages = tape.lines(RUN, search="rare", before=page.first), pages + 1
    assert texts(page) == ["rare"]
    assert pages > 3


# --- Metrics -------------------------------------------------------------------------------------


def test_a_short_series_comes_whole(book: tape.Tape) -> None:
    record(book, [metric(n, rank, loss=n / 2, step_ms=3.0) for n in range(1, 51) for rank in (0, 1)])
    record(book, [metric(50, 0, accuracy=0.9)])
    told = tape.series(RUN)
    assert told["last"] == 101
    first, second = told["series"]
    assert (first["rank"], second["rank"], first["attempt"]) == (0, 1, 1)
    assert first["step"] == [*range(1, 51), 50]
    assert second["loss"] == [n / 2 for n in range(1, 51)]
    assert first["accuracy"] == [None] * 50 + [0.9]
    assert {len(first[key]) for key in ("time", *tape.CURVES)} == {51}


def test_a_long_series_is_thinned_and_keeps_its_end_and_every_accuracy(book: tape.Tape) -> None:
    events = [metric(n, loss=1.0 / n) for n in range(1, 3001)]
    for n in range(500, 3001, 500):
        events.insert(n + n // 500 - 1, metric(n, accuracy=n / 3000))
    record(book, events, 97)
    (curve,) = tape.series(RUN, points=100)["series"]
    losses = [value for value in curve["loss"] if value is not None]
    assert 50 <= len(losses) <= 101
    assert losses[-1] == 1.0 / 3000
    assert [value for value in curve["accuracy"] if value is not None] == [
        n / 3000 for n in range(500, 3001, 500)
    ]
    assert curve["step"] == sorted(curve["step"])


def test_what_is_not_a_number_is_null(book: tape.Tape) -> None:
    record(book, [metric(1, loss=math.nan, samples_per_s=math.inf)])
    (curve,) = tape.series(RUN)["series"]
    assert (curve["loss"], curve["samples_per_s"]) == ([None], [None])
    assert tape.metrics(RUN) == [[1, 1.0, 1, 0, {"step": 1, "loss": None, "samples_per_s": None}]]


def test_a_metric_out_of_all_proportion_does_not_swell_lists_and_streams(book: tape.Tape) -> None:
    data = {"step": 10**4200, "loss": 1.5, "epoch": "B" * 4000, "note": "C" * 400_000}
    event = Event("metric", 1.0, RUN, 1, "a", 0, data)
    record(book, [event])
    summary = history.ask(lambda db: db.execute("SELECT summary FROM runs").fetchone()[0], "")
    assert len(summary) < 200
    assert tape.metric_of(1, event) == [1, 1.0, 1, 0, {"step": None, "loss": 1.5, "epoch": None}]
    assert tape.events(RUN, 0, 10)[0][1].data == data, "all of it is among the events"


def test_the_row_of_a_list_follows_the_metrics(book: tape.Tape) -> None:
    for step in range(1, 101):
        book.append(
            [metric(step, rank, steps=100, loss=1.0 / step, samples_per_s=10.0) for rank in (0, 1)],
            1,
            {},
            STATE,
        )
    summary = history.ask(lambda db: db.execute("SELECT summary FROM runs").fetchone()[0], "")
    told = json.loads(summary)
    assert (told["step"], told["steps"], told["loss"], told["samples_per_s"]) == (100, 100, 0.01, 20.0)
    assert len(told["spark"]) <= tape.SPARK
    assert (told["spark"][0], told["spark"][-1]) == (1.0, 0.01)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 2000))
def test_a_sparkline_is_short_and_ends_with_the_newest(count: int) -> None:
    summary = tape.Summary()
    for number in range(count):
        summary.draw(float(number))
    spark = summary.told["spark"]
    assert len(spark) <= tape.SPARK
    assert spark[-1] == count - 1
    assert spark == sorted(set(spark))
    assert count < 40 or len(spark) >= tape.SPARK // 2


def test_many_curves_have_fewer_points_each(book: tape.Tape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape, "MOST_POINTS", 200)
    record(book, [metric(step, rank, loss=1.0) for step in range(1, 101) for rank in range(8)], 100)
    curves = tape.series(RUN, points=5000)["series"]
    assert [len(curve["step"]) for curve in curves] == [25] * 8, "every fourth"
    assert {curve["step"][-1] for curve in curves} == {100}


# --- Attempts ------------------------------------------------------------------------------------


def test_how_an_attempt_ended_is_kept(book: tape.Tape) -> None:
    started = Event("rank_started", 5.0, RUN, 1, "h0", 0, {"pid": 3})
    state = fold.fold(STATE, started)
    book.append([started, line(1)], 1, {}, state)
    assert tape.folded(RUN) == state
    assert [a["state"] for a in tape.attempts(RUN)] == ["running"]
    assert not tape.is_recorded(RUN, 1)
    cause = Cause(0, "h0", "it went away", "look there")
    book.finish(Outcome(fold.as_lost(state), cause))
    (attempt,) = tape.attempts(RUN)
    assert (attempt["state"], attempt["started"], attempt["world"]) == ("lost", 5.0, 2)
    assert from_json(Cause, attempt["cause"]) == cause
    assert tape.is_recorded(RUN, 1)


def test_the_last_words_of_an_attempt_hold_older_errors_too(
    book: tape.Tape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tape, "LAST_EVENTS", 50)
    monkeypatch.setattr(tape, "EARLIER_CHUNK", 10)
    record(book, [line(1, stream="err", text="Traceback")], 1)
    record(book, [line(n, text="x" * 3000) for n in range(1000)], 20)
    words = tape.last_words(RUN, 1)
    assert words[0].data["text"] == "Traceback"
    assert 50 <= len(words) < 200
    assert tape.last_words(RUN, 2) == []


def test_late_events_of_one_attempt_hide_nothing_of_the_next(book: tape.Tape) -> None:
    """A host was away, and is asked for the rest of the first attempt while the second goes on."""
    second = replace(STATE, attempt=2)
    started = [Event("rank_started", 5.0, RUN, 2, f"h{rank}", rank, {"pid": 3}) for rank in (0, 1)]
    exited = Event("rank_exited", 6.0, RUN, 2, "h0", 0, {"code": 1})
    said = Event("line", 6.0, RUN, 2, "h0", 0, {"stream": "err", "text": "Traceback"})
    record(book, [line(1)])
    book.append(started[:1], 2, {}, second)
    book.append([said, started[1], exited], 2, {}, second)
    record(book, [line(n, text="x" * tape.CHUNK_BYTES) for n in (2, 3)])
    book.finish(Outcome(fold.as_lost(STATE), None), gap=True)
    assert tape.folded(RUN, 2) == second, "it is written down with the first of its events"
    assert tape.unfolded(RUN, 2) == [started[1], exited]
    assert tape.last_words(RUN, 2) == [*started[:1], said, started[1], exited]


def test_what_comes_while_a_page_is_read_is_not_passed_over(
    book: tape.Tape, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(book, [line(number) for number in range(3)])
    newest, come = tape.last, iter([[line(3)]])

    def last(run: str) -> int:
        record(book, next(come, []))
        return newest(run)

    monkeypatch.setattr(tape, "last", last)
    page = tape.lines(RUN, after=0)
    after = tape.lines(RUN, after=page.last)
    assert texts(page) + texts(after) == [f"line {number}" for number in range(4)]


@pytest.mark.parametrize(
    "read", [lambda: tape.events(RUN), lambda: tape.lines(RUN, after=0).lines], ids=["events", "lines"]
)
def test_what_comes_between_two_chunks_that_are_read_is_not_passed_over(
    book: tape.Tape, monkeypatch: pytest.MonkeyPatch, read: Callable[[], Sequence[Sequence[object]]]
) -> None:
    """The chunk that was read last grows, and another begins."""
    record(book, [line(1), line(2)])
    come = iter([[line(3)], [line(4, text="x" * tape.CHUNK_BYTES)]])
    one_chunk = tape.one_chunk

    def and_more_comes(words: str, values: tuple[Any, ...]) -> tuple[int, list[bytes]] | None:
        found = one_chunk(words, values)
        for events in come:
            record(book, events)
        return found

    monkeypatch.setattr(tape, "one_chunk", and_more_comes)
    assert [each[0] for each in read()] == [1, 2, 3, 4]
    assert [first for first, _ in tape.upwards(RUN, 0)] == [1, 4]


def test_lines_since_a_moment_are_found_also_behind_older_ones_that_came_late(book: tape.Tape) -> None:
    record(book, [line(10), line(20), *(line(number, rank=1) for number in range(8, 25))])
    assert [each[1] for each in tape.lines(RUN, since=20.0, rank=[0]).lines] == [20.0]
    assert [each[1] for each in tape.lines(RUN, since=20.0, after=0).lines] == [20.0, *range(20, 25)]
    assert [each[1] for each in tape.lines(RUN, since=20.5, limit=2).lines] == [23.0, 24.0]
