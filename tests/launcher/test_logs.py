"""`ringctl logs`: the merged log as users ask for it, and the pure parts it is made of."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import unicodedata
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher import remote, showlogs
from launcher.errors import InputError
from launcher.logs import (
    Filter,
    Group,
    fold_repeats,
    line_writer,
    parse_grep,
    parse_ranks,
    parse_since,
    ranges,
    visible,
)
from launcher.model import Event
from tests.launcher.ringctl import (
    RINGCTL,
    detach,
    events,
    is_alive,
    lines,
    ringctl,
    run_folder,
    start,
    state,
    wait_for,
    wait_until_final,
    waiting_in,
)

UNTIL_GO = 'echo before; while ! test -e "$0"; do sleep 0.02; done; echo after'


def finished(*command: str, world: int = 2) -> str:
    run = detach(command, world=world)
    wait_until_final(run)
    return run


# --- What is shown -------------------------------------------------------------------------------


def test_every_line_comes_behind_the_label_of_its_rank() -> None:
    run = finished("sh", "-c", "echo out $RANK; echo err $RANK >&2")
    done = ringctl("logs", run)
    assert sorted(done.stdout.splitlines()) == [
        "[0 localhost] err 0",
        "[0 localhost] out 0",
        "[1 localhost] err 1",
        "[1 localhost] out 1",
    ]


def test_ranks_hosts_and_patterns_choose_lines() -> None:
    run = finished("sh", "-c", "echo loss 0.$RANK; echo done $RANK", world=4)
    assert shown(run, "--rank", "0,2-3", "--grep", r"loss \d") == ["loss 0.0", "loss 0.2", "loss 0.3"]
    assert shown(run, "--rank", "1") == ["done 1", "loss 0.1"]
    assert len(shown(run, "--host", "localhost")) == 8
    assert shown(run, "--grep", "^nothing$") == []


def shown(run: str, *options: str) -> list[str]:
    return sorted(ringctl("logs", run, "--no-prefix", *options).stdout.splitlines())


def test_since_leaves_out_what_is_older(tmp_path: Path) -> None:
    go = tmp_path / "go"
    run = detach(["sh", "-c", UNTIL_GO, str(go)], world=1)
    wait_for(lambda: lines(events(run), 0), "the first line")
    between = datetime.now().isoformat()
    go.touch()
    wait_until_final(run)
    assert shown(run, "--since", between) == ["after"]
    assert shown(run, "--since", "1h") == ["after", "before"]


def test_tail_shows_the_last_lines() -> None:
    run = finished("seq", "1", "50", world=1)
    assert ringctl("logs", run, "--tail", "3", "--no-prefix").stdout == "48\n49\n50\n"
    assert ringctl("logs", run, "--tail", "0").stdout == ""
    assert ringctl("logs", run, "--tail", "2", "--grep", "^1", "--no-prefix").stdout == "18\n19\n"


def test_tail_and_follow_show_the_last_lines_and_all_that_come(tmp_path: Path) -> None:
    go = tmp_path / "go"
    run = detach(["sh", "-c", f"seq 1 50; {UNTIL_GO}", str(go)], world=1)
    wait_for(lambda: "before" in lines(events(run), 0), "the first lines")
    follower = start("logs", run, "--tail", "2", "--follow", "--no-prefix")
    assert follower.stdout is not None
    assert [follower.stdout.readline() for _ in range(2)] == ["50\n", "before\n"]
    go.touch()
    assert follower.communicate(timeout=30)[0] == "after\n"
    assert follower.returncode == 0


def test_tail_and_follow_do_not_wait_for_a_rank_to_fall_silent() -> None:
    run = detach(["sh", "-c", "while :; do echo x; sleep 0.1; done"], world=1)
    wait_for(lambda: len(lines(events(run), 0)) > 3, "some lines")
    follower = start("logs", run, "--tail", "2", "--follow", "--no-prefix")
    assert follower.stdout is not None
    assert follower.stdout.readline() == "x\n", "and this test would time out if nothing came"
    follower.terminate()
    follower.communicate(timeout=30)
    ringctl("stop", run)


def test_timestamps_come_before_the_label() -> None:
    run = finished("echo", "hello", world=1)
    line = ringctl("logs", run, "--timestamps").stdout
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d\d\d \[0 localhost\] hello\n", line)
    when = datetime.fromtimestamp(next(e["time"] for e in events(run) if e["kind"] == "line"))
    assert line.startswith(when.strftime("%H:%M:%S"))


def test_every_line_of_json_is_an_event_and_the_last_says_how_it_ended() -> None:
    run = finished("sh", "-c", "echo $RANK; exit $RANK")
    told = [json.loads(line) for line in ringctl("logs", run, "--json").stdout.splitlines()]
    for event in told:
        assert {"kind", "time", "run", "attempt", "host", "rank"} <= event.keys()
        assert event["run"] == run
    assert {"line", "rank_started", "rank_exited"} <= {event["kind"] for event in told}
    assert (told[-1]["kind"], told[-1]["state"], told[-1]["exit_code"]) == ("run_finished", "failed", 1)
    assert "rank 1 on localhost exited with code 1" in told[-1]["cause"]


def test_json_of_a_run_that_goes_on_does_not_say_that_it_is_over() -> None:
    run = detach(["sh", "-c", "echo x; exec sleep 600"], world=1)
    wait_for(lambda: lines(events(run), 0), "a line")
    told = [json.loads(line) for line in ringctl("logs", run, "--json").stdout.splitlines()]
    assert "run_finished" not in {event["kind"] for event in told}
    ringctl("stop", run)


def test_what_ringctl_has_to_say_goes_to_stderr() -> None:
    run = finished("sh", "-c", "echo words; echo 'ValueError: boom' >&2; exit 3", world=1)
    done = ringctl("logs", run)
    assert done.stdout == "[0 localhost] words\n[0 localhost] ValueError: boom\n"
    first, *_, last = done.stderr.splitlines()
    assert first == "failed first: rank 0 on localhost exited with code 3: ValueError: boom"
    assert last.startswith(f"run {run} failed")


def test_there_is_no_previous_attempt_of_a_first_one() -> None:
    run = finished("true", world=1)
    done = ringctl("logs", run, "--previous", code=2)
    assert "first attempt" in done.stderr


def test_a_folder_for_a_log_of_which_nothing_comes_is_not_left_there(tmp_path: Path) -> None:
    empty, begun = tmp_path / "empty", tmp_path / "begun"
    with pytest.raises(InputError), showlogs.new_folder(empty):
        raise InputError("all of its hosts refuse")
    with contextlib.suppress(InputError), showlogs.new_folder(begun):
        (begun / "events.jsonl").touch()
        raise InputError("they refuse to go on")
    assert (empty.exists(), begun.exists()) == (False, True)


def test_bytes_go_into_a_pipe_as_they_were_written(tmp_path: Path) -> None:
    data = (
        bytes(range(32, 256)) + "\n\u4e16\u754c \x1b[31mred\x1b[0m\t\0\n\n".encode() + b"\xff\xfe\xe4\xb8\n"
    )
    (tmp_path / "data").write_bytes(data)
    run = finished("cat", str(tmp_path / "data"), world=1)
    done = subprocess.run([*RINGCTL, "logs", run, "--no-prefix"], capture_output=True, check=True)
    assert done.stdout == data
    labelled = subprocess.run([*RINGCTL, "logs", run], capture_output=True, check=True)
    assert labelled.stdout == b"".join(b"[0 localhost] " + line + b"\n" for line in data.split(b"\n")[:-1])


# --- While it is written, and when nobody reads --------------------------------------------------


def test_following_while_it_is_written_shows_every_line_once_and_in_order() -> None:
    run = detach(["sh", "-c", "for i in $(seq 1 40); do seq $((i * 50 - 49)) $((i * 50)); sleep 0.01; done"])
    told = [json.loads(line) for line in ringctl("logs", run, "--follow", "--json").stdout.splitlines()]
    for rank in (0, 1):
        assert lines(told, rank) == [str(number) for number in range(1, 2001)]
    assert told[-1]["state"] == "succeeded"


def test_two_followers_and_a_latecomer_see_the_same() -> None:
    run = detach(["sh", "-c", "for i in $(seq 1 20); do echo $i; sleep 0.02; done"])
    followers = [start("logs", run, "--follow", "--json") for _ in range(2)]
    seen = [follower.communicate(timeout=60)[0] for follower in followers]
    late = ringctl("logs", run, "--json").stdout
    assert seen[0] == seen[1] == late


def test_a_reader_who_has_seen_enough_ends_it_quietly() -> None:
    run = finished("seq", "1", "100000", world=1)
    for option in ("--prefix", "--json"):
        reading = start("logs", run, option)
        assert reading.stdout is not None
        assert reading.stderr is not None
        assert reading.stdout.readline()
        reading.stdout.close()
        assert reading.stderr.read() == ""
        reading.stderr.close()
        assert reading.wait(timeout=30) == 0


def test_ctrl_c_ends_the_following_and_not_the_run() -> None:
    run = detach(["sh", "-c", "echo up; exec sleep 600"], world=1)
    follower = start("logs", run, "--follow", "--no-prefix", start_new_session=True)
    assert follower.stdout is not None
    assert follower.stdout.readline() == "up\n"
    follower.send_signal(signal.SIGINT)
    _, words = follower.communicate(timeout=30)
    assert follower.returncode == 130
    assert "Traceback" not in words
    assert is_alive(state(run)["ranks"][0]["pid"])
    ringctl("stop", run)


def test_one_ctrl_c_ends_it_also_if_nobody_reads_any_of_its_output() -> None:
    run = finished("seq", "100000", world=1)
    argv = [*RINGCTL, "logs", run]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as reading:
        assert reading.stdout is not None
        pipe = reading.stdout.fileno()
        wait_for(lambda: waiting_in(pipe) > 60_000, "a pipe without room")
        reading.send_signal(signal.SIGINT)
        assert reading.wait(timeout=30) == 130


def kill_supervisors(run: str) -> None:
    """Both at the same moment, so that neither does the other's work."""
    supervisors = [state(run)[who]["pid"] for who in ("warden", "hostd")]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in supervisors:
            subprocess.run(["kill", f"-{number.value}", str(pid)], check=True)
    wait_for(lambda: not any(map(is_alive, supervisors)), "their end")


def test_a_lost_run_says_so_when_it_is_followed() -> None:
    run = detach(["sh", "-c", "echo up; exec sleep 600"], world=1)
    wait_for(lambda: lines(events(run), 0), "the rank")
    kill_supervisors(run)
    done = ringctl("logs", run, "--follow", "--json", code=4)
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert (told[-1]["kind"], told[-1]["state"], told[-1]["exit_code"]) == ("run_finished", "lost", 1)
    assert "localhost: its supervisor is gone" in ringctl("logs", run, code=4).stderr
    ringctl("stop", run)


def test_an_attempt_that_has_ended_is_not_said_to_be_lost_with_the_one_after_it() -> None:
    command = "echo attempt $RINGCTL_ATTEMPT; [ $RINGCTL_ATTEMPT = 1 ] && exit 3; exec sleep 600"
    run = detach(["sh", "-c", command], world=1)
    wait_until_final(run)
    ringctl("restart", run, "--detach")
    wait_for(lambda: "attempt 2" in lines(events(run), 0), "its second attempt")
    kill_supervisors(run)
    assert "its supervisor is gone" in ringctl("logs", run, code=4).stderr
    assert "its supervisor is gone" not in ringctl("logs", run, "--previous").stderr
    (log,) = run_folder(run).glob("events-1-*")
    unended = [line for line in log.read_bytes().splitlines(keepends=True) if b'_exited"' not in line]
    log.write_bytes(b"".join(line for line in unended if b'"host_finished"' not in line))
    assert "its supervisor is gone" in ringctl("logs", run, "--previous", code=4).stderr
    ringctl("stop", run)


# --- Pure parts ----------------------------------------------------------------------------------


def line(rank: int, text: str, stream: str = "out", time: float = 0.0, host: str = "h") -> Event:
    return Event("line", time, "r", 1, host, rank, {"stream": stream, "text": text})


LINES = st.lists(st.builds(line, st.integers(0, 3), st.sampled_from("abc"), st.sampled_from(["out", "err"])))


@given(LINES)
def test_folding_loses_nothing_and_keeps_each_ranks_order(said: list[Event]) -> None:
    groups = fold_repeats(said)
    for rank in range(4):
        mine = [(e.data["text"], e.data["stream"]) for e in said if e.rank == rank]
        assert [(g.text, g.stream) for g in groups if rank in g.members] == mine
    assert sum(len(group.members) for group in groups) == len(said)


def folded_one_by_one(said: list[Event]) -> list[Group]:
    """What folding means: a line joins the first like it that comes after all that its rank has said."""
    groups: list[Group] = []
    for each in said:
        assert each.rank is not None
        text, stream = each.data["text"], each.data["stream"]
        own = max((n for n, group in enumerate(groups) if each.rank in group.members), default=-1)
        like = [group for group in groups[own + 1 :] if (group.text, group.stream) == (text, stream)]
        if not like:
            like = [Group(text, stream, {}, each.time)]
            groups += like
        like[0].members[each.rank] = each.host
    return groups


@given(LINES)
def test_folding_is_what_it_means(said: list[Event]) -> None:
    assert fold_repeats(said) == folded_one_by_one(said)


def test_a_line_that_one_rank_repeats_a_hundred_thousand_times_is_folded_as_soon_as_others() -> None:
    assert len(fold_repeats([line(0, "y")] * 100_000)) == 100_000


def test_the_same_line_of_several_ranks_becomes_one() -> None:
    said = [line(rank, text) for text in ("loading", "ready") for rank in (2, 0, 1, 5)]
    groups = fold_repeats(said)
    assert [(group.label(), group.text) for group in groups] == [("[0-2,5]", "loading"), ("[0-2,5]", "ready")]


def test_a_line_that_one_rank_repeats_is_shown_as_often_as_it_came() -> None:
    groups = fold_repeats([line(0, "x"), line(0, "x"), line(1, "x")])
    assert [group.label() for group in groups] == ["[0-1]", "[0 h]"]


@given(st.frozensets(st.integers(0, 999_999), min_size=1))
def test_ranks_as_they_are_written_are_ranks_as_they_are_read(ranks: frozenset[int]) -> None:
    assert parse_ranks(ranges(ranks)) == ranks


@pytest.mark.parametrize(
    ("text", "ranks"), [("0", {0}), ("0,2-3", {0, 2, 3}), (" 1 , 1-2 ", {1, 2}), ("7-7", {7})]
)
def test_ranks_and_ranges_of_ranks(text: str, ranks: set[int]) -> None:
    assert parse_ranks(text) == ranks


def test_ranks_that_are_named_over_and_over_are_counted_to_once() -> None:
    assert parse_ranks(",".join(["0-999999"] * 20_000), below=3) == {0, 1, 2}
    assert len(parse_ranks(",".join(["0-999999"] * 20_000))) == 1_000_000


@pytest.mark.parametrize("text", ["", ",", "a", "-1", "3-1", "1-", "1.5", "0x1", "1;2", "99999999"])
def test_what_is_no_rank_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="0,2-3"):
        parse_ranks(text)


@pytest.mark.parametrize(
    ("text", "ago"), [("90s", 90), ("10m", 600), ("2h", 7200), ("1d", 86400), ("1.5m", 90)]
)
def test_since_may_be_so_long_ago(text: str, ago: float) -> None:
    assert parse_since(text, now=1e9) == 1e9 - ago


def test_since_may_be_a_date_and_time() -> None:
    assert parse_since("2026-01-31T18:00", now=0.0) == datetime(2026, 1, 31, 18, 0).timestamp()
    assert parse_since("2026-01-31T18:00:00+00:00", now=0.0) == 1769882400.0


@given(
    st.text() | st.from_regex(r"[0-9]{1,400}[smhd]|[0-9]{4}-[0-9]{2}-[0-9]{2}(T[0-9:.+-]*)?", fullmatch=True)
)
def test_since_is_a_moment_or_refused(text: str) -> None:
    try:
        moment = parse_since(text, now=1e9)
    except InputError:
        return
    assert isinstance(moment, float)


@pytest.mark.parametrize("text", ["(", "[", "*", "a{9999999999}", "(" * 10000])
def test_what_is_no_pattern_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="not a regular expression"):
        parse_grep(text)


@pytest.mark.parametrize("text", ["", "banana", "5", "-5m", "10 m", "1e3s", "nan", "2026-13-01", "tomorrow"])
def test_what_is_no_time_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(InputError, match="90s, 10m, 2h, 1d"):
        parse_since(text, now=1e9)


OVERRIDES = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


@given(st.text(st.characters() | st.sampled_from("\u061c\u200e\u200f\u202a\u202e\u2066\u2069")))
def test_nothing_that_a_terminal_would_obey_is_left(text: str) -> None:
    assert not re.search(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\ud800-\udfff]", visible(text))
    assert not {unicodedata.bidirectional(c) for c in visible(text)} & OVERRIDES


def test_escapes_and_stray_bytes_are_shown_and_words_stay() -> None:
    raw = b"\x1b[2Jgr\xc3\xbc\xc3\x9fe\t\xff".decode("utf-8", "surrogateescape")
    assert visible(raw) == "\\x1b[2Jgr\u00fc\u00dfe\t\\xff"
    assert visible("to do: \u202e; mr \u2066x\u2069\u200f") == "to do: \\u202e; mr \\u2066x\\u2069\\u200f"


def test_a_filter_looks_at_rank_host_time_and_text() -> None:
    event = line(1, "loss 0.5", time=10.0, host="a")
    good = {"ranks": frozenset({1}), "hosts": frozenset({"a"}), "since": 10.0, "grep": re.compile("loss")}
    bad = {"ranks": frozenset({0}), "hosts": frozenset({"b"}), "since": 10.1, "grep": re.compile("^oss")}
    assert Filter(**good).passes(event)  # type: ignore[arg-type]  # the four fields, by name
    for name, value in bad.items():
        assert not Filter(**{**good, name: value}).passes(event), name  # type: ignore[arg-type]  # as above


def test_a_pattern_looks_at_lines_only() -> None:
    exit_ = Event("rank_exited", 1.0, "r", 1, "h", 0, {"exit_code": 0})
    assert Filter(grep=re.compile("x")).passes(exit_)


def test_a_pattern_sees_through_colours() -> None:
    red = line(0, "\x1b[1;31mer\x1b[0mror: 5 \x1b(Bleft", time=1.0, host="h")
    for pattern in ("^error: 5 left$", r"\x1b\[1;31m"):
        assert Filter(grep=re.compile(pattern)).passes(red), pattern
    assert not Filter(grep=re.compile("31m error|terror")).passes(red)


def test_lines_are_written_with_label_and_time() -> None:
    write = line_writer(prefix=True, timestamps=True)
    local = datetime.fromtimestamp(1.25).strftime("%H:%M:%S")
    assert write([line(3, "x", time=1.25)]) == f"{local}.250 [3 h] x\n".encode()
    assert write([]) == b""


@given(st.binary(max_size=200), st.integers(1, 5))
def test_each_line_of_a_hosts_output_is_labelled_however_it_is_cut(data: bytes, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("launcher.remote.PIECE", piece)
        pieces = list(remote.labelled("a", data))
    lines = data.removesuffix(b"\n").split(b"\n") if data else []
    assert b"".join(pieces) == b"".join(b"[a] " + line + b"\n" for line in lines)
    assert len(pieces) <= 1 + len(data) // piece
