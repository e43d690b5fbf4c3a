"""Whatever a host, or a file, says: an error that names it, or something harmless. Never a traceback."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from launcher import fold, hostlist, inventory, kit, push, text
from launcher.agent import decoded, states_of
from launcher.diagnose import Tails
from launcher.errors import HostError, InputError, RingctlError
from launcher.follow import NOT_AS_AGREED, Decoder, Merger
from launcher.logs import fold_repeats, line_writer
from launcher.model import Event, Facts, Host, Inventory, Pair, from_json
from launcher.plan import LaunchOptions, make_plan
from launcher.preflight import report
from launcher.preflight.checks import judge
from launcher.preflight.examine import Examined, result_line
from launcher.preflight.survey import PACKAGES, Need, Survey, check_figures, check_plausible
from launcher.redact import read_env_file
from launcher.render import LiveScreen
from launcher.runs import Found
from launcher.told import check_stopped, words_of
from launcher.watch import outcome
from tests.launcher.ringctl import detach, events, launch, state, wait_until_final

EXAMPLES = settings(derandomize=True, max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 1 << 40, 10**400, 1e300, 1e999, "", "../../x", "\x1b]0;x\x07", "a\nb", "\ud800"])
    | st.text(max_size=8)
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a piece of JSON."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [(value, key) for key in keys] + [place for key in keys for place in places(value[key])]


@st.composite
def damaged(draw: st.DrawFn, genuine: Any) -> Any:
    """A genuine answer of which a few parts are gone, or something else."""
    value = copy.deepcopy(genuine)
    for _ in range(draw(st.integers(1, 3))):
        container, key = draw(st.sampled_from(places(value) or [([None], 0)]))
        if isinstance(container, dict) and draw(st.booleans()):
            del container[key]
        else:
            container[key] = draw(JSON)
    return value


def harmless(text: str) -> bool:
    """Whether a terminal would obey nothing of it."""
    return not any(mark in text for mark in ("\x1b", "\x07", "\ud800"))


def tried(call: Callable[[], Any]) -> tuple[Any, str]:
    """(what it gives, why it refuses), one of them; a refusal can be shown as it is."""
    try:
        return call(), ""
    except RingctlError as error:
        words = str(error)
    assert words
    assert harmless(words)
    return None, words


# --- Files of the user ---------------------------------------------------------------------------

GENUINE_INVENTORY = {
    "master": "a", "master_port": 23456, "defaults": {"user": "train", "slots": 2, "env": {"conda": "x"}},
    "hosts": [{"name": "a", "address": "10.0.0.1", "variables": {"A": "b"}}, {"name": "b", "port": 22}],
}  # fmt: skip


@EXAMPLES
@given(damaged(GENUINE_INVENTORY).map(lambda value: yaml.dump(value, allow_unicode=True)) | st.text())
def test_an_inventory_is_read_or_refused_by_its_line(content: str) -> None:
    found, refusal = tried(lambda: inventory.parse(content, "hosts.yaml"))
    assert found.hosts if found else refusal.startswith("hosts.yaml")


@EXAMPLES
@given(st.text(alphabet="ab1:@[],=# \n\t\x1b\u2028sltos.", max_size=60))
def test_a_host_list_and_a_hostfile_are_read_or_refused(content: str) -> None:
    for parse in (hostlist.parse_host_list, functools.partial(hostlist.parse_hostfile, source="hosts")):
        with contextlib.suppress(InputError):
            assert parse(content).hosts


@EXAMPLES
@given(st.binary(max_size=80) | st.text(alphabet="AB=# \"'\n\r\0x", max_size=40).map(str.encode))
def test_an_env_file_is_read_or_refused_without_a_word_of_its_values(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.env"
    path.touch(mode=0o600)
    path.write_bytes(b"FIRST=hunter22\n" + data)
    found, refusal = tried(lambda: read_env_file(str(path)))
    assert "hunter22" not in refusal + repr(found)
    assert refusal or found["FIRST"].value == "hunter22"


# --- What a host answers -------------------------------------------------------------------------


@EXAMPLES
@given(st.binary() | JSON.map(json.dumps).map(str.encode) | st.just(b"[" * 100_000))
def test_an_answer_is_an_object_or_an_error_of_its_host(data: bytes) -> None:
    found, refusal = tried(lambda: decoded("server1", data))
    assert refusal.startswith("server1: ") if refusal else isinstance(found, dict)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the probe of this machine really answers, asked as `ringctl preflight` asks it."""
    folder = tmp_path_factory.mktemp("told")
    request = {
        "host": "server1", "peers": ["127.0.0.1"], "names": ["server1"], "ifname": "", "data_address": "",
        "master": True, "port": 23456, "env": {"kind": "python", "value": sys.executable},
        "packages": list(PACKAGES), "workdir": str(folder), "data": "", "deep": False, "patience": 60,
        "token": "x",
    }  # fmt: skip
    argv = [sys.executable, "-I", "-S", "-c", kit.RUN, kit.HERE, "probe"]
    data = json.dumps(request).encode() + b'\n{"peers": []}\n{"leave": true}\n'
    done = subprocess.run(argv, input=data, capture_output=True, check=True, timeout=60)
    answer: dict[str, Any] = json.loads(done.stdout.split(b"--ringctl-hostd--\n")[1])
    return answer


PAIR = {"target": "server1", "port": 7, "problem": "", "latency_ms": 0.1, "mbit_s": 900.0, "seen": "10.0.0.1"}


def test_facts_of_a_host_are_judged_or_refused_whatever_they_are(told: dict[str, Any]) -> None:
    hosts = (Host("server1", "10.0.0.1"), Host("server2", "10.0.0.2"))
    sane = from_json(Facts, {**told, "host": "server2"})
    check_plausible(sane)
    seen = {"judged": 0, "refused": 0}

    @settings(EXAMPLES, max_examples=250)
    @example(told, [PAIR])
    @given(damaged(told), damaged([PAIR]))
    def are_judged(answer: Any, dialled: Any) -> None:
        try:
            facts = from_json(Facts, {**answer, "host": "server1"})
            check_plausible(facts)
            pairs = [from_json(Pair, {**pair, "source": "server2"}) for pair in dialled]
            check_figures(pairs)
        except (TypeError, KeyError, ValueError, AttributeError, IndexError, OverflowError, HostError):
            seen["refused"] += 1
            return
        seen["judged"] += 1
        need = Need(ranks={"server1": 1, "server2": 1})
        ways = tuple(pair for pair in pairs if pair.target == "server1")
        survey = Survey({"server1": facts, "server2": sane}, {}, ways)
        examined = Examined(hosts, survey, tuple(judge(hosts, need, survey)))
        json.dumps(report.as_json(examined, facts=True))
        assert harmless("".join(map(result_line, examined.results)))
        report.table_rows(examined, every_check=True)
        report.pair_rows(examined, 80)
        assert report.attention_lines(examined, everything=True) is not None
        with contextlib.suppress(RingctlError):
            options = LaunchOptions("r1", "", (), "/t", workdir="/w", i_know=True)
            plan = make_plan(Inventory(hosts, "server1"), survey.facts, options)
            assert harmless("\n".join(text.plan_lines(plan)))

    are_judged()
    assert all(seen.values()), seen


@pytest.mark.parametrize(
    "lie",
    [
        {"home": "/h/\x1b[2J"}, {"cwd": "/a\nb"}, {"free_port": 70000}, {"free_port": -1}, {"cores": 0},
        {"cores": 1 << 40}, {"memory": 1 << 70}, {"listening": [7] * 100}, {"listening": [99999]},
        {"nofile": [0, 10**400]},
        {"data_address": "1.2.3.4; reboot"}, {"ifname": "eth0; reboot"}, {"ephemeral": [1, 2, 3]},
    ],
    ids=str,
)  # fmt: skip
def test_facts_that_cannot_be_are_refused(told: dict[str, Any], lie: dict[str, Any]) -> None:
    with pytest.raises((ValueError, HostError)):
        check_plausible(from_json(Facts, {**told, **lie, "host": "server1"}))


@EXAMPLES
@given(st.data())
def test_a_code_store_that_asks_for_anything_gets_only_what_is_pushed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "pushed"
    folder.mkdir(exist_ok=True)
    (folder / "a.py").write_text("pass")
    bodies = push.Bodies(push.snapshot_of(folder, ["a.py"]))
    contents = [entry.content for entry in push.snapshot_of(folder, ["a.py"]).entries]
    answer = data.draw(damaged({"have": False, "missing": contents * 2}))
    found, refusal = tried(lambda: bodies.lacking("server1", answer))
    if not refusal:
        assert set(found["missing"]) <= set(contents)
        bodies.of(bodies.batch(found["missing"]))


@EXAMPLES
@given(damaged({"known": True, "was": "running", "ended": [0, 1], "left": []}))
def test_an_answer_to_stop_is_one_or_is_refused(answer: Any) -> None:
    from launcher.cli_runs import stopped_line

    with contextlib.suppress(TypeError, KeyError, ValueError):
        check_stopped(answer)
        assert harmless(stopped_line("server1", answer))


# --- What a host tells of a run ------------------------------------------------------------------


@pytest.fixture(scope="module")
def genuine() -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """The state and the events of a real run."""
    script = """echo out; echo err >&2; echo '{"step": 1, "loss": 0.5, "accuracy": 0.9}' >>$RINGCTL_METRICS"""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        import tempfile

        home = stack.enter_context(tempfile.TemporaryDirectory())
        patch.setenv("RINGCTL_HOME", home)
        patch.setenv("RINGCTL_SLOTS", f"{home}/slots")
        run = detach(["sh", "-c", script], world=2)
        wait_until_final(run)
        yield state(run), events(run)


def test_the_state_of_a_run_is_shown_or_left_out(
    genuine: tuple[dict[str, Any], list[dict[str, Any]]],
) -> None:
    assert len(states_of("server1", [genuine[0]])[0]) == 1
    seen = set()

    @settings(EXAMPLES, max_examples=150)
    @given(damaged([genuine[0], genuine[0]]))
    def is_shown(answer: Any) -> None:
        try:
            states, unread = states_of("server1", answer)
        except HostError:
            return
        assert harmless(unread)
        seen.add(len(states))
        for each in states:
            found = Found(each["run"], each["name"], (Host("h"),), each["started"], (each,), from_here=False)
            words = [cell for row in text.status_rows(found, 1e9) for cell in row]
            words += [cell for row in text.ps_rows([found], 1e9) for cell in row]
            json.dumps(text.status_json(found, 1e9))
            assert harmless(" ".join(words))
            assert (Path("/a") / each["run"]).parent == Path("/a"), "a name is no path"

    is_shown()
    assert len(seen) > 1, "some are left out, and some are not"


CURSOR = {"kind": "cursor", "time": 1e9, "attempt": 1, "segment": 1, "offset": 0}
END = {"kind": "end", "time": 1e9, "state": "succeeded", "attempt": 1}


def sent(lines: list[Any]) -> bytes:
    """As hostd sends it."""
    return b"--ringctl-hostd--\n" + b"".join(
        json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines
    )


def show_everywhere(happened: list[Event], begin: Mapping[str, Any]) -> None:
    """All that is made of events: the fold, a pipe, JSON, a terminal, and why it failed."""
    before = fold.from_states([begin])
    now, tails = fold.before(before), Tails()
    for event in happened:
        now = fold.fold(now, event)
        tails.add(event)
    line_writer(prefix=True, timestamps=True)(happened)
    for event in happened:
        json.dumps(event.to_json())
    lines = [event for event in happened if event.kind == "line"]
    fold_repeats(lines)
    paper = io.StringIO()
    screen = LiveScreen(Console(force_terminal=True, file=paper, width=80, color_system=None))
    screen.show(happened, now)
    screen.finish(outcome(now, tails))
    json.dumps(outcome(now, tails).event().to_json())
    text.columns(text.rank_rows(now))
    assert "\x1b]" not in paper.getvalue()


def test_events_are_shown_or_refused(genuine: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    begin, happened = genuine
    seen = {"shown": 0, "refused": 0}

    @settings(EXAMPLES, max_examples=250)
    @given(damaged([CURSOR, *happened, END]) | st.lists(JSON, max_size=4).map(lambda more: [CURSOR, *more]))
    def are_shown(lines: list[Any]) -> None:
        decoder = Decoder("r1", "h", lambda: 1e9)
        try:
            piece = decoder.feed(sent(lines))
        except NOT_AS_AGREED:
            seen["refused"] += 1  # what Reader catches, and tells as an error of the host
            return
        seen["shown"] += 1
        assert harmless(piece.error + piece.state)
        assert decoder.cursor is None or all(type(part) is int for part in decoder.cursor)
        merger = Merger(["h", "other"])
        show_everywhere([*merger.add(piece), *merger.ready(float("inf"))], begin)

    are_shown()
    assert all(seen.values()), seen


@EXAMPLES
@given(st.lists(st.binary(max_size=40), max_size=6))
def test_any_bytes_at_all_are_no_more_than_an_error(pieces: list[bytes]) -> None:
    decoder = Decoder("r1", "h")
    with contextlib.suppress(*NOT_AS_AGREED):
        for data in (b"--ringctl-hostd--\n", *pieces):
            decoder.feed(data)


def test_a_stream_without_an_end_does_not_fill_the_memory() -> None:
    for begins in (b"", b"--ringctl-hostd--\n"):
        decoder, given = Decoder("r1", "h"), 0
        decoder.feed(begins)
        try:
            while given < 100:
                decoder.feed(b"x" * (1 << 20))
                given += 1
        except ValueError:
            pass
        assert given <= 65


def test_ranks_without_end_do_not_fill_the_memory() -> None:
    decoder = Decoder("r1", "h", lambda: 1e9)
    many = [{"kind": "line", "time": 1e9, "rank": r, "stream": "out", "text": "x"} for r in range(2000)]
    with pytest.raises(ValueError, match="more ranks"):
        decoder.feed(sent([CURSOR, *many]))


def test_a_cursor_that_is_none_never_goes_back_to_a_host() -> None:
    for wrong in ("1", -1, 1.5, None, [1], True, 1 << 80):
        with pytest.raises(ValueError, match="cursor"):
            Decoder("r1", "h", lambda: 1e9).feed(sent([{**CURSOR, "offset": wrong}]))


def test_a_rank_may_call_its_metrics_what_it_likes() -> None:
    """What is refused is a host's doing, never a rank's."""
    odd = '{"kind": 1, "rank": "x", "time": [], "stream": 5, "state": {}, "step": {"a": 1}, "loss": "nan"}'
    seen = launch(["sh", "-c", f"echo '{odd}' >>$RINGCTL_METRICS; printf 'a\\0b\\033[2J\\n'"], world=1)
    assert [event["state"] for event in seen if event["kind"] == "metric"] == [{}]
    assert seen[-1]["state"] == "succeeded"


def test_words_of_a_host_are_short_and_plain() -> None:
    assert words_of("one\x1b[2J\ntwo") == "one\\x1b[2J\ntwo"
    assert len(words_of("x" * 10**6)) == 2000
    assert len(words_of({"a": "x" * 10**6})) <= 200
