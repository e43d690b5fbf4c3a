"""One stream from many hosts: nothing lost, nothing repeated, each rank in its own order."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher import kit
from launcher.follow import (
    BEHIND_S,
    LONGEST_BEHIND_S,
    LONGEST_EVENT,
    MOST_HELD,
    NOT_AS_AGREED,
    Clock,
    Decoder,
    Heard,
    Merger,
    Piece,
    Place,
)
from launcher.model import Event
from tests.launcher.ringctl import detach, events, run_folder, wait_for, wait_until_final, waiting_in

HOSTD = [sys.executable, "-I", "-S", "-c", kit.RUN, kit.HERE, "hostd"]


def stream(run: str, cursor: list[int] | None = None) -> bytes:
    """What a follower of a finished run is sent."""
    request = json.dumps({"run": run, "follow": True, "cursor": cursor})
    done = subprocess.run([*HOSTD, "follow"], input=request.encode(), capture_output=True, check=True)
    return done.stdout


def sent_at(data: bytes) -> float:
    """The time of hostd's first word: a follower takes the two clocks for equal when it is also its own."""
    first = re.search(rb'^\{"kind":"cursor","time":([0-9.]+)', data, re.MULTILINE)
    assert first
    return float(first[1])


def cut_into_segments(run: str, pieces: int) -> None:
    """Spread the run's log over several segments, as a long run's is."""
    (whole,) = run_folder(run).glob("events-1-*.jsonl")
    lines = whole.read_bytes().splitlines(keepends=True)
    size = len(lines) // pieces + 1
    for number in range(pieces):
        part = run_folder(run) / f"events-1-{number + 1:06d}.jsonl"
        part.write_bytes(b"".join(lines[number * size : (number + 1) * size]))


@pytest.fixture
def run() -> str:
    """A finished run with a hundred lines of each of two ranks, in three segments."""
    run = detach(["sh", "-c", "seq 1 100; printf '\\344\\270 \\377\\r'; echo '{\"kind\":\"end\"}'"])
    wait_until_final(run)
    cut_into_segments(run, 3)
    return run


def decoded(pieces: list[Piece]) -> list[Event]:
    return [event for piece in pieces for event in piece.events]


def flat(found: list[Event]) -> list[Any]:
    """As they are on disk."""
    return [{"kind": e.kind, "time": e.time, "rank": e.rank, **e.data} for e in found]


# --- Decoder -------------------------------------------------------------------------------------


def test_a_stream_holds_every_event_and_says_when_it_is_over(run: str) -> None:
    data = stream(run)
    piece = Decoder(run, "h", lambda: sent_at(data)).feed(data)
    assert flat(piece.events) == events(run)
    assert {(e.run, e.attempt, e.host) for e in piece.events} == {(run, 1, "h")}
    assert piece.over


def test_fed_byte_by_byte_it_says_the_same_as_fed_whole(run: str) -> None:
    data = b"Welcome to a chatty login shell\n" + stream(run)
    whole, slow = (Decoder(run, "h", lambda: sent_at(data)) for _ in range(2))
    at_once = whole.feed(data)
    pieces = [slow.feed(data[i : i + 1]) for i in range(len(data))]
    assert decoded(pieces) == at_once.events
    assert slow.cursor == whole.cursor
    assert [piece.over for piece in pieces].count(True) == 1
    assert pieces[-1].over


def boundaries(data: bytes) -> Iterator[int]:
    """Places around each of hostd's own words in the stream."""
    for mark in (b"--ringctl-hostd--\n", b'{"kind":"cursor"', b'{"kind":"end","time"'):
        at = data.find(mark)
        while at >= 0:
            end = data.index(b"\n", at) + 1
            yield from (at + 1, end - 1, end)
            at = data.find(mark, at + 1)


def test_after_a_drop_anywhere_nothing_is_lost_and_nothing_repeated(run: str) -> None:
    data, whole = stream(run), events(run)

    def resumed_after(cuts: list[int]) -> list[Any]:
        received, pieces = data, []
        decoder = Decoder(run, "h", lambda: sent_at(received))
        for cut in cuts:
            pieces.append(decoder.feed(received[:cut]))
            decoder.restart()
            received = stream(run, decoder.cursor)
        pieces.append(decoder.feed(received))
        assert pieces[-1].over
        return flat(decoded(pieces))

    for cut in sorted(set(boundaries(data))):
        assert resumed_after([cut]) == whole, f"cut at {cut}"

    @settings(max_examples=10, deadline=None)
    @given(st.lists(st.integers(0, len(data) - 1), min_size=1, max_size=2))
    def wherever(cuts: list[int]) -> None:
        assert resumed_after(cuts) == whole

    wherever()


def test_a_log_as_far_as_it_goes_ends_where_it_ended_when_it_was_asked_for() -> None:
    """A rank may print more in the meantime than can be sent."""
    run = detach(["seq", "1", "2000"], world=1)
    wait_until_final(run)
    cut_into_segments(run, 2)
    there, last = events(run), run_folder(run) / "events-1-000002.jsonl"
    half, rest = b'{"kind":"line","time":1.0,', b'"rank":0,"stream":"out","text":"late"}\n'
    with open(last, "ab") as log:
        log.write(half)
    pipe = subprocess.PIPE
    with subprocess.Popen([*HOSTD, "follow"], stdin=pipe, stdout=pipe) as sending:
        assert sending.stdin is not None
        assert sending.stdout is not None
        with sending.stdin:
            sending.stdin.write(json.dumps({"run": run, "attempt": 1}).encode())
        out = sending.stdout.fileno()
        wait_for(lambda: waiting_in(out) > 10_000, "its first lines")  # it knows the end
        with open(last, "ab") as log:
            log.write(rest + half + rest)
        (run_folder(run) / "events-1-000003.jsonl").write_bytes(half + rest)
        data = sending.stdout.read()
    piece = Decoder(run, "h", lambda: sent_at(data)).feed(data)
    assert flat(piece.events) == there
    assert (piece.over, piece.state) == (True, "succeeded")


def test_times_of_a_host_whose_clock_is_ahead_are_corrected(run: str) -> None:
    data = stream(run)
    (first, *_) = Decoder(run, "h", lambda: sent_at(data) - 3600).feed(data).events
    assert first.time == pytest.approx(events(run)[0]["time"] - 3600)


def test_what_hostd_refuses_is_passed_on() -> None:
    data = subprocess.run(
        [*HOSTD, "follow"], input=b'{"run": "none"}', capture_output=True, check=False
    ).stdout
    piece = Decoder("none", "h").feed(data)
    assert piece.over
    assert "there is no run none" in piece.error


LINE = {"kind": "line", "time": 1e9, "rank": 0, "stream": "out", "text": "x"}
CURSOR = {"kind": "cursor", "time": 1e9, "attempt": 1, "segment": 1, "offset": 0}
TICK = {"kind": "tick", "time": 1e9}
END = {"kind": "end", "time": 1e9, "state": "succeeded"}


def sent(*lines: Any) -> bytes:
    """As hostd sends it."""
    return b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)


def begun() -> Decoder:
    decoder = Decoder("r1", "h", lambda: 1e9)
    decoder.feed(b"--ringctl-hostd--\n" + sent(CURSOR))
    return decoder


def told_at(seconds: float, ahead: float, *lines: Any) -> tuple[float, bytes]:
    """What comes so long after the begin from a host whose clock is so far ahead by then."""
    return 1e9 + seconds, sent(*({**line, "time": 1e9 + seconds + ahead} for line in lines))


@pytest.mark.parametrize("set_to", [-3600.0, 3600.0])
@pytest.mark.parametrize("noticed", [[LINE], [TICK]], ids=["by a line", "by a tick"])
def test_a_clock_that_is_set_while_the_host_is_heard_changes_no_times(
    set_to: float, noticed: list[dict[str, Any]]
) -> None:
    came = [
        told_at(1.0, 7.0, TICK),
        told_at(2.0, 7.0, LINE),
        told_at(3.0, set_to, *noticed),
        told_at(4.0, set_to, LINE),
        told_at(5.0, set_to + 0.2, LINE),
    ]
    times = heard_at([(1e9, b"--ringctl-hostd--\n" + sent({**CURSOR, "time": 1e9 + 7.0})), *came])
    assert times[0] == 1e9 + 2.0
    assert times[-2:] == pytest.approx([1e9 + 4.0, 1e9 + 5.2])


def test_what_comes_late_is_not_taken_for_a_clock_that_was_set() -> None:
    begin = (1e9, b"--ringctl-hostd--\n" + sent(CURSOR))
    ticks = [told_at(1.0, 0.0, TICK), told_at(59.0, 0.0, TICK)]
    late = (1e9 + 60.0, sent({**LINE, "time": 1e9 + 2.0}))  # it had waited for room on a disk
    assert heard_at([begin, *ticks, late, told_at(61.0, 0.0, LINE)]) == [1e9 + 2.0, 1e9 + 61.0]


def test_a_log_that_is_read_later_has_the_times_that_are_in_it() -> None:
    """The clock was set back an hour during the run, and is right now."""
    lines = sent({**LINE, "time": 1e9 - 60.0}, {**LINE, "time": 1e9 - 3600.0})
    begin = b"--ringctl-hostd--\n" + sent(CURSOR)
    assert heard_at([(1e9, begin), (1e9, lines), (1e9, sent(END))]) == [1e9 - 60.0, 1e9 - 3600.0]


def heard_at(came: list[tuple[float, bytes]]) -> list[float]:
    """The times of the events, of what came when."""
    now = [0.0]
    decoder, times = Decoder("r1", "h", lambda: now[0]), []
    for now[0], data in came:
        times += [event.time for event in decoder.feed(data).events]
    return times


LONG = '[{"a":"b\\c\u00e9\U0001f600\udcff,\t' * (LONGEST_EVENT // 5)


def test_a_long_line_is_what_was_written_whatever_is_in_it_and_whatever_is_around_it() -> None:
    lines = [
        LINE, {**LINE, "text": LONG, "end": "\r"}, {**LINE, "text": LONG, "rank": 1},
        {"kind": "metric", "time": 1e9, "rank": 1, "step": 1, "said": "\u00e9" * LONGEST_EVENT},
        {**LINE, "text": ""}, {**LINE, "text": "y" * LONGEST_EVENT}, LINE,
    ]  # fmt: skip
    decoder, data = begun(), sent(*lines)
    assert flat(decoder.feed(data).events) == lines
    assert decoder.cursor == [1, 1, len(data)]
    apart = begun()
    pieces = [apart.feed(data[at : at + 50_000]) for at in range(0, len(data), 50_000)]
    assert flat(decoded(pieces)) == lines
    assert apart.cursor == decoder.cursor
    after = begun()
    after.skip = 2
    assert flat(after.feed(data).events) == lines[2:]


@pytest.mark.parametrize("unit", ["[],", '{"":0},', '"",', "0,"])
@pytest.mark.parametrize(
    "of",
    [
        '{"kind":"metric","time":1,"rank":0,"a":[',
        '{"kind":"tick","time":1,"a":[',
        '{"kind":"line","time":1,"rank":0,"stream":"out","text":"x","a":[',
    ],
)
def test_an_event_that_takes_much_more_memory_than_its_text_is_refused(unit: str, of: str) -> None:
    decoder = begun()
    with pytest.raises(ValueError, match="holds more than any"):
        decoder.feed(f"{of}{unit * (6 * LONGEST_EVENT // len(unit))}0]}}\n".encode())


NO_EVENT = {"kind": "line", "time": 1e9, "rank": 0, "stream": "out", "text": 7}


@pytest.mark.parametrize("between", [b"", sent({**END, "kind": "tick"})])
@pytest.mark.parametrize(
    "bad", [sent(NO_EVENT), b"[\n", b"\n", sent({"kind": "tick"}), sent({**LINE, "rank": None})]
)
def test_what_comes_before_an_event_that_is_none_is_told_all_the_same(bad: bytes, between: bytes) -> None:
    before = [LINE, {**LINE, "rank": 1}]
    decoder = begun()
    with pytest.raises(NOT_AS_AGREED):
        decoder.feed(sent(*before) + between + bad + sent({**LINE, "text": "after"}))
    assert flat(decoder.good.events) == before
    assert decoder.good.place == Place((1, 1, len(sent(*before))), 2, 2)


def work(do: Callable[[], object], times: int) -> float:
    """Seconds of processor time."""
    began = time.thread_time()
    for _ in range(times):
        do()
    return time.thread_time() - began


def test_what_drips_in_behind_an_unfinished_line_is_not_copied_with_it_each_time() -> None:
    """2000 bytes behind a line of 40 MB."""
    decoder, text = begun(), "x" * (40 << 20)
    data = sent({**LINE, "text": text})[:-4]
    decoder.feed(data)
    copying = work(lambda: data + b"y", times=200)
    assert work(lambda: decoder.feed(b"y"), times=2000) < copying
    (event,) = decoder.feed(b'"}\n').events
    assert len(event.data["text"]) == len(text) - 1 + 2000


def test_the_mark_before_the_first_word_is_found_wherever_it_is_cut() -> None:
    data = b"chatty" * 1000 + b"--ringctl-host--ringctl-hostd--\n" + sent(CURSOR, LINE, END)
    for size in (1, 7, 17, 18, 19, 6000):
        decoder = Decoder("r1", "h", lambda: 1e9)
        pieces = [decoder.feed(data[at : at + size]) for at in range(0, len(data), size)]
        assert flat(decoded(pieces)) == [LINE]
        assert pieces[-1].over


# --- Who is waited for ---------------------------------------------------------------------------


def behind_after(seconds: float, lines: Iterable[tuple[float, float]] = (), step: float = 0.5) -> set[str]:
    """Who is still waited for, where one host has caught up, and the other sends lines: (when, of when)."""
    heard, waiting, spent = Heard({"good", "slow"}, some=False), list(lines), 0.0
    heard.take(Piece("good", caught_up=True))
    heard.take(Piece("slow"))
    while spent < seconds:
        while waiting and waiting[0][0] <= spent:
            time_ = waiting.pop(0)[1]
            heard.take(Piece("slow", [Event("line", time_, "r", 1, "slow", 0, {})], watermark=time_))
        spent += step
        heard.waited(step, 1e9 + spent)
    return heard.behind


def test_a_host_that_comes_no_nearer_to_the_present_is_not_waited_for_any_longer() -> None:
    assert behind_after(BEHIND_S - 1) == {"slow"}
    assert behind_after(BEHIND_S + 1) == set()
    same = [(second, 5e8) for second in range(1000)]
    assert behind_after(BEHIND_S + 1, same) == set()
    assert Heard({"dialled"}, some=False).waited(1.0, 1e9) == [], "it may still be away"
    as_time_goes = [(second, 5e8 + second) for second in range(1000)]
    assert behind_after(BEHIND_S + 1, as_time_goes) == set()


def test_a_host_with_a_long_log_is_waited_for_while_it_catches_up_but_not_for_ever() -> None:
    quick = [(second, 5e8 + 100 * second) for second in range(1000)]
    assert behind_after(10 * BEHIND_S, quick) == {"slow"}
    assert behind_after(LONGEST_BEHIND_S + 1, quick) == set()


def test_time_in_which_we_were_stopped_ourselves_does_not_count_against_a_host() -> None:
    assert behind_after(3600.0, step=3600.0) == {"slow"}


# --- Merger --------------------------------------------------------------------------------------


@st.composite
def broadcasts(draw: st.DrawFn, in_order: bool) -> list[Piece]:
    """What several hosts send, cut into pieces, in some order of arrival; each host's own order is kept."""
    queues = []
    for host in range(draw(st.integers(1, 4))):
        times = draw(st.lists(st.integers(1, 50).map(float), max_size=12))
        stamps = sorted(times) if in_order else times
        sent = [Event("line", t, "r", 1, f"h{host}", host, {"n": n}) for n, t in enumerate(stamps)]
        queue, size = [], draw(st.integers(1, 5))
        for i in range(0, len(sent), size):
            part = sent[i : i + size]
            queue.append(Piece(f"h{host}", events=part, watermark=part[-1].time))
        queue.append(Piece(f"h{host}", over=True))
        queues.append(queue)
    arrived = []
    while any(queues):
        arrived.append(draw(st.sampled_from([queue for queue in queues if queue])).pop(0))
    return arrived


def merged(arrived: list[Piece]) -> list[Event]:
    merger = Merger(sorted({piece.host for piece in arrived}))
    return [event for piece in arrived for event in merger.add(piece)]


@given(broadcasts(in_order=True))
def test_events_of_all_hosts_come_out_in_the_order_of_their_times(arrived: list[Piece]) -> None:
    times = [event.time for event in merged(arrived)]
    assert times == sorted(times)


@given(broadcasts(in_order=False))
def test_nothing_is_lost_and_each_hosts_order_stays_even_if_its_clock_jumps(arrived: list[Piece]) -> None:
    out = merged(arrived)
    for host in {piece.host for piece in arrived}:
        sent = [event for piece in arrived if piece.host == host for event in piece.events]
        assert [event for event in out if event.host == host] == sent
    assert len(out) == sum(len(piece.events) for piece in arrived)


def test_an_event_waits_until_no_earlier_one_can_come() -> None:
    early, late = (Event("line", t, "r", 1, host, 0, {}) for t, host in ((1.0, "a"), (2.0, "b")))
    merger = Merger(["a", "b"])
    assert merger.add(Piece("b", events=[late], watermark=2.0)) == []
    assert merger.add(Piece("a", events=[early], watermark=1.0)) == [early]
    assert merger.add(Piece("a", watermark=2.5)) == [late]


def told(host: str, *times: float, size: int = 0, caught_up: bool = False) -> Piece:
    events = [Event("line", time_, "r", 1, host, 0, {}) for time_ in times]
    return Piece(host, events, size, watermark=max(times, default=0.0), caught_up=caught_up)


def test_a_host_that_is_ahead_waits_once_much_of_it_is_held_back() -> None:
    merger = Merger(["ahead", "slow"])
    assert merger.add(told("ahead", 1.0, 2.0, 3.0, 4.0, size=2 * MOST_HELD)) == []
    assert (merger.has_room("ahead"), merger.has_room("slow")) == (False, True)
    assert len(merger.add(told("slow", 2.5))) == 3
    assert merger.has_room("ahead"), "half of it is left"
    assert merger.add(told("slow", 4.0))
    assert merger.held_back == set()


def test_a_host_whose_clock_was_set_back_does_not_wait_for_itself() -> None:
    merger = Merger(["good", "set back"])
    merger.add(told("good", 9000.0))
    shown = merger.add(Piece("set back", told("set back", 5000.0, 1400.0).events, watermark=1400.0))
    assert len(shown) == 2
    assert len(merger.add(told("set back", 1500.0, size=2 * MOST_HELD))) == 1
    assert merger.has_room("set back")


def test_nobody_waits_for_a_host_that_is_let_go_until_it_has_caught_up() -> None:
    merger = Merger(["good", "behind", "late"])
    merger.add(told("behind", 5.0))
    assert merger.add(told("good", 4.0)) == []
    merger.let_go(["late"])
    assert [event.host for event in merger.add(told("late", 1.0))] == ["late", "good"]
    assert [event.host for event in merger.add(told("good", 5.0))] == ["good", "behind"]
    merger.add(told("late", 2.0, caught_up=True))
    assert merger.add(told("good", 7.0)) == []


def test_a_host_that_is_over_is_not_waited_for() -> None:
    late = Event("line", 2.0, "r", 1, "b", 0, {})
    merger = Merger(["a", "b"])
    assert merger.add(Piece("b", events=[late], watermark=2.0)) == []
    assert merger.add(Piece("a", over=True)) == [late]


def test_a_host_whose_clock_was_set_ahead_is_shown_all_the_same() -> None:
    merger = Merger(["a", "b"])
    merger.add(Piece("a", watermark=1.0), 1.0)
    ahead = [Event("line", 3600.0 + n, "r", 1, "b", 0, {"n": n}) for n in range(3)]
    assert merger.add(Piece("b", events=ahead, watermark=3602.0), 1.5) == []
    assert merger.add(Piece("a", watermark=2.0), 2.0) == ahead


def test_a_clock_that_is_set_back_holds_up_nothing_that_hosts_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    before = clock.now()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 3600.0)
    assert before <= clock.now() < before + 60.0
    monkeypatch.setattr(time, "time", lambda: now + 3600.0)
    assert clock.now() == now + 3600.0
