"""The page in a real browser, in front of a real service with real runs."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.ringctl import ringctl
from tests.launcher.serve.browser import (
    Browser,
    browsing,
    curve,
    needs_chromium,
    quiet_network,
    skipped_headings,
)
from tests.launcher.serve.service import Service, serving

pytestmark = needs_chromium

SCREENS = ("runs", "queue", "hosts", "compare", "submit")
TABS = ("overview", "log", "ranks", "preflight", "plan", "checkpoints", "attempts")
HOSTILE = "<img src=x onerror='window.hit=1'><script>window.hit=1</script>"

# Goes on until somebody ends it, the first time; the second time it comes to an end.
TRAINS = f"""
import json, os, time
rank, attempt = int(os.environ["RANK"]), int(os.environ["RINGCTL_ATTEMPT"])
print(\"\"\"{HOSTILE}\"\"\", flush=True)
for _ in range(37):
    print("the same again", flush=True)
steps = int(os.environ.get("STEPS") or (100000 if attempt == 1 else 60))
for step in range(1, steps + 1):
    told = {{"step": step, "steps": steps, "loss": 2 / step, "accuracy": 1 - 1 / step}}
    with open(os.environ["RINGCTL_METRICS"], "a") as file:
        print(json.dumps({{**told, "step_ms": 20.0 + 20 * rank, "comm_ms": 5.0}}), file=file)
    time.sleep(0.02)
print("\\x1b[32mdone\\x1b[0m", rank, flush=True)
print("this was", rank, flush=True)
"""
TALKS = """
from itertools import count
from time import sleep
for number in count(0, 400):
    print(*(f"line {number + i:07}" for i in range(400)), sep="\\n", flush=True)
    sleep(0.04)
"""
PASSES = """
const [text, search] = arguments;
return import("/page/logmodel.js").then(({ passes }) => passes([1, 0, 1, "a", 0, "out", text], { search }));
"""
COLOURS = """
document.documentElement.dataset.theme = arguments[0];
const { backgroundColor, color } = getComputedStyle(document.body);
return [backgroundColor, color];
"""
LIGHT, DARK = ["rgb(247, 248, 250)", "rgb(27, 31, 39)"], ["rgb(17, 20, 26)", "rgb(232, 235, 241)"]
BUSY = "const end = Date.now() + 4000; while (Date.now() < end);"
UNNAMED = """
const named = (one) => one.ariaLabel || one.innerText?.trim() || one.labels?.length || one.title;
return [...document.querySelectorAll("button, a[href], input, select, textarea")]
  .filter((one) => one.checkVisibility() && !named(one)).map((one) => one.outerHTML.slice(0, 200))
"""
TURNING = "[\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\u001b]"
OBEYED = f"""
const read = ["title", "aria-label", "aria-valuetext", "placeholder"];
const all = [...document.querySelectorAll("*")];
const told = all.flatMap((one) => [one.textContent, ...read.map((name) => one.getAttribute(name) ?? "")]);
return [document.title, ...told].filter((text) => /{TURNING}/.test(text)).map((text) => text.slice(0, 200));
"""
OLDER_LATE = """
const asks = window.fetch, held = [];  // a page of one run, so that there are older ones
window.fetch = (where, ...more) => {
  const answer = asks(where.replace("limit=50", "limit=1"), ...more);
  return where.includes("before=") ? new Promise((come) => held.push(() => come(answer))) : answer;
};
window.letCome = () => held.forEach((come) => come());
"""
LISTENS_AGAIN = 'return import("/page/live.js").then(({ listen }) => { listen("/api/stream", {}, {}); });'
LOSES_ANSWERS = """
const asks = window.fetch;
let left = 3;  // what may be asked again is asked three times
window.fetch = async (where, ...more) => {
  const answer = await asks(where, ...more);
  if (where.startsWith("/api/submit") && left-- > 0) throw new TypeError("no answer");
  return answer;
};
"""
BUSY_AT_FIRST = """
const asks = window.fetch, busy = { status: 429, headers: { "Retry-After": "1" } };
let left = 2;
window.fetch = async (...asked) => (left-- > 0 ? new Response("{}", busy) : asks(...asked));
return import("/page/api.js").then(({ get }) => get("/api/me"));
"""
MEANS = """
const [series, key] = arguments;
return import("/page/series.js").then(({ Measured }) => new Measured({ series }).means(key, true));
"""
BOXES = 'return import("/page/views/hosts.js").then(({ boxes }) => boxes(...arguments));'
WHY_WAITS = 'return import("/page/runparts.js").then(({ whyWaits }) => whyWaits(...arguments));'
# A log of its own, which gets from `answer` what it asks for, if `answer` is asked in time.
IN_A_LOG = """
const line = (id, rank = 0) => [id, 0, 1, "a", rank, "out", `line ${id}`], asks = window.fetch;
const soon = () => new Promise((go) => setTimeout(go, 10));
const told = (lines, more) => new Response(JSON.stringify({
  lines, more, first: lines[0]?.[0] ?? 0, last: lines[lines.length - 1]?.[0] ?? 0,
}));
const ids = (view) => view.rows.rows.map((row) => row.line[0]);
let asked = 0, answer;
window.fetch = (where) => { asked += 1; return answer(where); };
return import("/page/log.js").then(async ({ LogView }) => {
  const begin = () => {
    const view = new LogView("r", [], {});
    document.body.append(view.element);
    return view;
  };
  const work = async () => { %s };
  try {
    return await work();
  } finally {
    window.fetch = asks;
    document.querySelectorAll("body > .log").forEach((one) => one.remove());
  }
});
"""
OLDER_WHILE_NEW = """
let come = null;  // whoever asks for older lines waits for this
answer = (where) => {
  if (!where.includes("before=")) return Promise.resolve(told([line(3), line(4)], true));
  return new Promise((go) => { come = () => go(told([line(1), line(2)], false)); });
};
const view = begin();
while (!come) await soon();
view.take([line(5)]);
come();
while (view.loading) await soon();
view.take([line(6)]);
return ids(view);
"""
OTHER_FILTER_WHILE_NEW = """
let come = null;
answer = () => new Promise((go) => { come = () => go(told([line(7, 1)], false)); });
const view = begin();
view.take([line(8, 0)]);
view.filter("rank", "1");
view.take([line(9, 0), line(10, 1)]);
come();
while (view.loading) await soon();
return ids(view);
"""
READ_WHILE_FULL = """
answer = () => Promise.resolve(told(Array.from({ length: 60000 }, (_, at) => line(at + 1)), false));
const view = begin();
while (view.loading) await soon();
view.follow(false);
view.box.scrollTop = 20000;
const thousand = (id) => Array.from({ length: 1000 }, (_, at) => line(id + at));
for (let id = 60001; id <= 70000; id += 1000) view.take(thousand(id));
const [first] = ids(view);
return [first, view.rows.newer];
"""
FAILS_AGAIN_AND_AGAIN = """
answer = (where) => Promise.resolve(
  where.includes("before=") ? new Response("{}", { status: 500 }) : told([line(3)], true));
const view = begin();
while (asked < 2 || view.loading) await soon();
for (let time = 0; time < 50; time += 1) { view.render(); await soon(); }
return asked;
"""
TOO_MUCH_MEANWHILE = """
let come = null;
answer = (where) => {
  if (where.includes("after=1")) return Promise.resolve(told([line(2), line(3)], false));
  return new Promise((go) => { come = () => go(told([line(1)], false)); });
};
const view = begin();
view.take(Array.from({ length: 30001 }, (_, at) => line(at + 2)));
come();
for (let time = 0; time < 100 && ids(view).length < 2; time += 1) await soon();
return ids(view);
"""
THE_SAME_FOR_HOURS = """
const said = (id) => [id, 0, 1, "a", 0, "out", "the same"];
answer = (where) => {
  const before = Number(new URL(where, location).searchParams.get("before") ?? 1000001);
  return Promise.resolve(told(Array.from({ length: 1000 }, (_, at) => said(before - 1000 + at)), true));
};
const view = begin();
for (let time = 0; time < 60; time += 1) { view.render(); await soon(); }
return [ids(view).length, view.rows.said];
"""
STAYS_IN_SIGHT = """
answer = () => Promise.resolve(told([line(1), line(2)], false));
const view = begin();
while (view.loading) await soon();
view.render();
const [first] = view.list.children;
view.take([line(3), line(4)]);
view.render();
return [[...view.list.children].indexOf(first), view.list.children.length];
"""
NOT_UNDER_A_BUTTON = """
answer = () => Promise.resolve(told([line(1)], false));
const view = begin(), many = () => view.list.children.length;
while (view.loading) await soon();
view.render();
view.list.firstChild.dispatchEvent(new PointerEvent("pointerdown", { bubbles: true }));
view.take([line(2)]);
view.render();
const meanwhile = many();
dispatchEvent(new PointerEvent("pointerup"));
view.render();
view.box.dispatchEvent(new PointerEvent("pointerdown"));  // its scroll bar
view.take([line(3)]);
view.render();
return [meanwhile, many()];
"""
CANNOT_BE_HAD = """
answer = () => Promise.resolve(new Response("{}", { status: 500 }));
const view = begin();
while (view.loading) await soon();
view.take([line(9)]);
view.render();
return [view.nothing(), ids(view)];
"""
SEAM = """
const { LogRows } = await import("/page/logmodel.js");
const rows = new LogRows(), said = (id) => [id, 0, 1, "a", id % 2, "out", "the same"];
rows.first = 5;
rows.prepend([said(3), said(4)]);
const added = rows.prepend([line(1), said(2)]);
const [, same] = rows.rows;
return [added, same.count, same.ranks.size, rows.first, rows.last];
"""
RANK_IS_GONE = """
answer = () => Promise.resolve(told([], false));
const view = begin();
view.update({ ranks: [0, 1, 2, 3].map((rank) => ({ rank, host: "a" })) });
view.filter("rank", "3");
view.update({ ranks: [{ rank: 0, host: "a" }] });
return [view.picks.rank.value, view.picks.rank.options.length];
"""
BY_KEYBOARD = """
answer = () => Promise.resolve(told([line(1), line(2), line(3)], false));
const view = begin();
while (view.loading) await soon();
const press = (key) => view.box.dispatchEvent(new KeyboardEvent("keydown", { key }));
for (const key of ["Enter", "ArrowDown"]) press(key);
return view.chosen;
"""
ENDLESS = """
return document.getAnimations().filter((one) => one.effect.getComputedTiming().iterations === Infinity)
  .map((one) => one.animationName)
"""
OVERFLOWING = """
return [...document.querySelectorAll("main th, main td")]
  .filter((cell) => cell.scrollWidth > cell.clientWidth + 1).map((cell) => cell.textContent);
"""
AXIS = """
const [y] = arguments;
return import("/page/charts.js").then(({ LineChart, ticks }) => {
  const chart = new LineChart({ title: "Accuracy", percent: true });
  chart.lines = [{ x: y.map((_, at) => at), y }];
  const { low, high } = chart.measure();
  return ticks(low, high, 5);
});
"""


class Scene:
    """A service, a browser that is signed in there, and a script to train with."""

    def __init__(self, service: Service, browser: Browser) -> None:
        self.service, self.browser = service, browser
        self.script = service.folder / "train.py"
        self.script.write_text(TRAINS)
        self.finished = ""  # a run that has ended

    def go(self, place: str) -> None:
        """By way of an empty screen, so that nothing is taken for the new one that was there before."""
        for each in ("nowhere", place):
            self.browser.open(f"{self.service.url}/#/{each}")
            if each == "nowhere":
                self.browser.wait_for_text("There is nothing here")


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """One of each for all tests here, which build on each other: a browser is heavy."""
    folder = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RINGCTL_HOME", str(folder / "ringctl"))
        patch.setenv("RINGCTL_SLOTS", str(folder / "slots"))
        patch.delenv("RINGCTL_HOSTS", raising=False)
        with quiet_network(), serving(slots=2) as service, browsing() as browser:
            browser.open(service.link)
            yield Scene(service, browser)


@pytest.fixture
def scene(opened: Scene, clean: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:  # noqa: ARG001 - sets the environment
    monkeypatch.setenv("RINGCTL_HOME", str(Path(opened.service.folder) / "ringctl"))
    monkeypatch.setenv("RINGCTL_SLOTS", str(Path(opened.service.folder) / "slots"))
    yield opened
    opened.browser.complaints()  # they are none of the next test's


@pytest.fixture
def finished(scene: Scene) -> str:
    """A run of the tests before, or one that is quickly made."""
    if not scene.finished:
        run = scene.service.submit(sys.executable, str(scene.script), variables={"STEPS": "60"}, world=2)
        scene.service.wait_for_state(run, "succeeded", "failed")
        scene.finished = run
    return scene.finished


# --- Before the first run ------------------------------------------------------------------------


def test_where_there_are_no_runs_the_page_says_how_to_make_one(scene: Scene) -> None:
    scene.browser.wait_for_text("No runs yet")
    scene.browser.wait_for_text("ringctl submit --world 2")
    assert scene.browser.complaints() == []


# --- The log -------------------------------------------------------------------------------------


def said(browser: Browser) -> list[str]:
    return list(
        browser.script(
            "return [...document.querySelectorAll('.logline .said')].map((one) => one.textContent)"
        )
    )


def test_lines_are_shown_as_they_are_and_never_obeyed(scene: Scene, finished: str) -> None:
    browser = scene.browser
    scene.go(f"runs/{finished}?tab=log")
    browser.wait(lambda: HOSTILE in said(browser), "the line")
    assert browser.script("return window.hit") is None
    assert any(text.startswith("done ") for text in said(browser)), "without what a terminal obeys"


def test_what_is_said_again_and_again_is_folded_and_can_be_unfolded(scene: Scene, finished: str) -> None:
    browser = scene.browser
    scene.go(f"runs/{finished}?tab=log&rank=0")
    browser.wait(lambda: "(x 37)" in browser.text(".loglines"), "folded lines")
    browser.click(".logtools input[type=checkbox]:not([role])")
    browser.wait(lambda: said(browser).count("the same again") > 5, "each of them")


def test_a_line_is_found_and_has_an_address_of_its_own(scene: Scene, finished: str) -> None:
    browser = scene.browser
    scene.go(f"runs/{finished}?tab=log")
    browser.type(".log [data-search]", "this was 1")
    browser.wait(lambda: len(said(browser)) == 1, "only what is searched for")
    browser.click(".logline")
    browser.wait_for_text("this was 1", ".logdetail")
    line = browser.script("return new URLSearchParams(location.hash.split('?')[1]).get('line')")
    scene.go(f"runs/{finished}?tab=log&line={line}")
    browser.wait_for_text("this was 1", ".logdetail")
    browser.wait(lambda: len(said(browser)) > 1, "the lines around it")


def test_the_filters_of_a_log_are_in_its_address_and_stay_when_it_is_loaded_again(
    scene: Scene, finished: str
) -> None:
    browser = scene.browser
    place = f"runs/{finished}?tab=log&rank=1&host=here&stream=out&search=this+was"
    scene.go(place)
    for _ in range(2):
        browser.wait(lambda: said(browser) == ["this was 1"], "only what is asked for")
        assert browser.script("return location.hash") == f"#/{place}"
        browser.driver.refresh()


@pytest.mark.parametrize("search", ["an ERROR in", "\x1b[31m"], ids=["shown", "written"])
def test_a_line_that_comes_in_is_found_as_it_is_shown_and_as_it_was_written(
    scene: Scene, search: str
) -> None:
    text = "an \x1b[31mErr\x1b[1mor\x1b[0m in red"
    assert scene.browser.script(PASSES, text, search) is True
    assert scene.browser.script(PASSES, text, search + "!") is False


def test_an_error_does_not_turn_the_text_around_it(scene: Scene) -> None:
    browser, service = scene.browser, scene.service
    fails = "raise ValueError('photo_\u202egpj.exe \\u2067 \\x1b[31mred')"
    run = service.submit(sys.executable, "-c", fails, prefork=False, skip_preflight=True)
    service.wait_for_state(run, "failed")
    for place, where in (("", "#cause"), ("?tab=attempts", ".attempts"), ("?tab=plan", ".panel")):
        scene.go(f"runs/{run}{place}")
        browser.wait_for_text("gpj.exe", where)
        assert browser.script(OBEYED) == []
    scene.go(f"runs?search={run}")
    browser.wait_for_text("gpj.exe", "table.runs")
    assert browser.script(OBEYED) == []
    scene.go("runs/%E2%80%AEgpj")
    browser.wait_for_text("There is no such run")
    assert browser.script(OBEYED) == []


# --- Everywhere ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", [[1.0], [0.0], [0.98], [0.1, 1.0], [0.9, 1.0000001], [1.2]], ids=str)
def test_the_axis_of_a_share_ends_at_nothing_and_at_all(scene: Scene, shares: list[float]) -> None:
    scene.go("runs")
    marks = scene.browser.script(AXIS, shares)
    assert len(marks) > 2
    assert 0 <= marks[0] < marks[-1] <= 1


def test_the_newest_throughput_is_that_of_all_ranks_also_while_some_have_not_come_so_far(
    scene: Scene,
) -> None:
    speeds = {0: [100.0, 100.0, 100.0], 1: [100.0, 100.0], 2: [10.0, 10.0]}
    series = [
        {"rank": rank, "attempt": 1, "step": list(range(1, len(of) + 1)), "samples_per_s": of}
        for rank, of in speeds.items()
    ]
    (curve,) = scene.browser.script(MEANS, series, "samples_per_s")
    assert curve["x"] == [1, 2, 3]
    assert curve["y"] == pytest.approx([210, 210, 210])


@pytest.mark.parametrize(
    ("taken", "slots", "filled"),
    [(64, 66, 15), (66, 66, 16), (1, 66, 1), (0, 66, 0), (33, 66, 8), (1, 2, 1), (5, 4, 4)],
)
def test_boxes_of_slots_are_all_filled_only_if_none_is_free(
    scene: Scene, taken: int, slots: int, filled: int
) -> None:
    made = scene.browser.script(BOXES, taken, slots)
    assert (sum(made), len(made)) == (filled, min(slots, 16))


def test_long_names_of_runs_stay_in_their_places(scene: Scene, finished: str) -> None:
    browser = scene.browser
    names = ("a-very-long-name-" * 4)[:64], "x" * 64
    runs = [scene.service.submit("true", at=9e9, name=name) for name in names]
    for width in (1360, 390):
        browser.size(width, 900)
        for place in (f"compare?runs={','.join([finished, *runs])}", f"runs/{runs[1]}", "queue", "runs"):
            scene.go(place)
            browser.wait_for_text(names[1])
            browser.wait(lambda: not browser.all("main .skeleton"), "the screen")
            assert browser.script(OVERFLOWING) == []
            assert browser.script("return document.documentElement.scrollWidth - innerWidth") <= 0
    browser.size(1360, 900)
    for run in runs:
        scene.service.client().post(f"/api/runs/{run}/cancel")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_colours_are_those_that_the_system_asks_for_unless_somebody_has_chosen(
    scene: Scene, dark: bool
) -> None:
    browser = scene.browser
    try:
        browser.size(1360, 900, dark=dark)
        worn = {theme: browser.script(COLOURS, theme) for theme in ("light", "dark", "auto")}
        assert worn == {"light": LIGHT, "dark": DARK, "auto": DARK if dark else LIGHT}
    finally:
        browser.size(1360, 900)


def shown_runs(browser: Browser) -> list[str]:
    names = "[...document.querySelectorAll('table.runs tbody tr')].map((row) => row.querySelector('a').hash)"
    return list(browser.script(f"return {names}"))


@pytest.mark.usefixtures("finished")
def test_the_keyboard_leads_through_the_page(scene: Scene) -> None:
    browser = scene.browser
    scene.go("hosts")
    browser.wait_for_text("slots")

    def press(keys: str) -> None:
        browser.driver.switch_to.active_element.send_keys(keys)

    press("gr")
    browser.wait(lambda: browser.all("tr[data-item]"), "the runs")
    press("j")
    browser.wait(
        lambda: browser.script("return document.activeElement.closest('[data-item]') !== null"), "a row"
    )
    newest = shown_runs(browser)[0].rpartition("/")[2]
    press("\ue007")  # Enter
    browser.wait_for_text(newest, ".runhead")
    press("2")
    browser.one("#tab-log[aria-selected=true]")
    press("/")
    assert browser.script("return document.activeElement.matches('[data-search]')")
    press("\ue00c")  # Escape
    press("?")
    browser.one("dialog.keys[open]")
    press("\ue00c")
    browser.wait(lambda: not browser.all("dialog"), "the list of keys to close")


@pytest.mark.parametrize("screen", [*SCREENS, *TABS])
def test_every_screen_fits_a_phone_has_names_for_all_and_no_complaint(
    scene: Scene, finished: str, screen: str
) -> None:
    browser = scene.browser
    browser.size(390, 844, dark=True)
    place = {"compare": f"compare?runs={finished}"}.get(screen, screen)
    scene.go(place if screen in SCREENS else f"runs/{finished}?tab={screen}")
    browser.wait(lambda: not browser.all("main .skeleton") and browser.all("main h1"), "the screen")
    assert browser.script("return document.documentElement.scrollWidth - innerWidth") <= 0
    assert browser.script(UNNAMED) == []
    assert len(browser.all("main h1")) == 1
    assert skipped_headings(browser) == []
    assert browser.complaints() == []
    browser.size(1360, 900)


def test_a_page_whose_service_is_killed_says_so_and_goes_on_where_it_was(
    opened: Scene, tmp_path: Path
) -> None:
    browser, script = opened.browser, tmp_path / "train.py"
    script.write_text(TRAINS)
    with serving(slots=2) as service:
        browser.open(service.link)
        run = service.submit(sys.executable, str(script), world=2, name="goes-on")
        browser.open(f"{service.url}/#/runs/{run}")
        browser.wait(lambda: curve(browser).count("L") > 3, "a curve")
        service.kill()
        browser.wait_for_text("Reconnecting", "#connection")
        service.start()
        browser.wait_for_text("Live", "#connection")
        before = curve(browser)
        browser.wait(lambda: curve(browser) != before, "a curve that moves again")
        browser.click("#stop")
        browser.click("dialog [value=yes]")
        browser.wait_for_text("Stopped", ".runhead")


def newest(browser: Browser) -> int:
    """The number of the last line that is shown; 0 if there is none."""
    return int(["line 0", *said(browser)][-1].split()[1])


def test_a_browser_that_is_too_slow_goes_on_with_the_newest_lines_and_says_what_it_left_out(
    scene: Scene,
) -> None:
    service, browser = scene.service, scene.browser
    run = service.submit(sys.executable, "-c", TALKS, prefork=False)
    service.wait_for_state(run, "running")
    scene.go(f"runs/{run}?tab=log")
    first = int(browser.wait(lambda: newest(browser), "lines"))
    browser.wait(lambda: newest(browser) > first + 10000, "lines that come in, and the time with them")
    browser.script(BUSY)
    browser.wait_for_text("lines passed by unseen", ".log")
    before = int(browser.wait(lambda: newest(browser), "the newest lines"))
    browser.wait(lambda: newest(browser) > before + 10000, "lines that go on")
    service.client().post(f"/api/runs/{run}/stop")
    service.wait_for_state(run, "stopped")
    scene.go(f"runs/{run}?tab=log&search={before - 5000:07}")
    browser.wait(lambda: said(browser) == [f"line {before - 5000:07}"], "a line that was left out")


IN_LOGS = {
    "older lines come late": (OLDER_WHILE_NEW, [1, 2, 3, 4, 5, 6]),
    "some came under another filter": (OTHER_FILTER_WHILE_NEW, [7, 10]),
    "more comes than it keeps, while somebody reads": (READ_WHILE_FULL, [1, True]),
    "older lines cannot be had": (FAILS_AGAIN_AND_AGAIN, 2),  # the first question, and one that failed
    "the newest cannot be had": (CANNOT_BE_HAD, ["The log could not be had.", []]),
    "somebody selects a text in it": (STAYS_IN_SIGHT, [0, 4]),  # whose element stays
    "more comes meanwhile than it keeps": (TOO_MUCH_MEANWHILE, [1, 2, 3]),  # so it asks for it
    "it says the same for hours": (THE_SAME_FOR_HOURS, [1, 21000]),  # of which it does not ask for all
    "a button is down": (NOT_UNDER_A_BUTTON, [1, 3]),  # under which nothing moves
    "the same was said on both sides of a seam": (SEAM, [1, 3, 2, 1, 4]),
    "it shows a rank that is no more": (RANK_IS_GONE, ["3", 3]),
    "there is no mouse": (BY_KEYBOARD, 2),
}


@pytest.mark.parametrize(("work", "result"), IN_LOGS.values(), ids=IN_LOGS)
def test_a_log_shows_what_it_should_also_if(scene: Scene, work: str, result: object) -> None:
    scene.go("runs")
    assert scene.browser.script(IN_A_LOG.replace("%s", work)) == result


@pytest.mark.parametrize("waiting", ["needs 8 slots; the hosts have 4", "r1 has the slots"])
def test_a_run_that_is_to_wait_for_a_moment_tells_what_else_keeps_it(scene: Scene, waiting: str) -> None:
    scene.go("runs")
    assert scene.browser.script(WHY_WAITS, {"at": 2000.0, "waiting": waiting}, 1000.0) == waiting
    moment = {"at": 2000.0, "waiting": "waiting until 18:00"}
    assert scene.browser.script(WHY_WAITS, moment, 1000.0) != moment["waiting"]


def test_what_somebody_is_about_to_press_or_reads_stays_while_a_run_goes_on_and_ends(scene: Scene) -> None:
    service, browser = scene.service, scene.browser
    run = service.submit(sys.executable, "-c", TRAINS, world=1, variables={"STEPS": "100000"}, prefork=False)
    service.wait_for_state(run, "running")
    scene.go(f"runs/{run}?tab=log")
    browser.one("#stop").send_keys("")  # the focus is there
    browser.click("[data-follow]")
    browser.script("window.read = document.querySelector('.logbox')")
    before = browser.text(".progress")
    browser.wait(lambda: browser.text(".progress") != before, "steps")
    assert browser.script("return document.activeElement.id") == "stop"
    service.client().post(f"/api/runs/{run}/stop")
    browser.wait_for_text("Stopped", ".runhead")
    assert browser.script("return window.read === document.querySelector('.logbox')")


def test_nothing_moves_for_ever_while_a_run_goes_on(scene: Scene) -> None:
    """It would have the whole page laid out sixty times a second, in every browser that looks at it."""
    service, browser = scene.service, scene.browser
    run = service.submit("sleep", "600", world=2, prefork=False)
    service.wait_for_state(run, "running")
    for place in ("runs", f"runs/{run}", f"runs/{run}?tab=log", "hosts", "queue"):
        scene.go(place)
        browser.wait(lambda: not browser.all("main .skeleton") and browser.all("main h1"), "the screen")
        assert browser.script(ENDLESS) == [], place
    scene.go("runs")
    assert browser.one("[role=progressbar].unsure")
    service.client().post(f"/api/runs/{run}/stop")
    service.wait_for_state(run, "stopped")


def test_what_is_submitted_again_has_all_options_of_the_first(scene: Scene) -> None:
    service, browser = scene.service, scene.browser
    options = {"master_port": 29555, "i_know": True, "skip_preflight": True, "shared": True}
    secret = {"secrets": {"SOME_TOKEN": "b7d1c09e"}}
    variables = {
        "LINES": "one\nB=2",
        "SPACES": " x ",
        "QUOTED": '"q"',
        "ODD": "a\\b\r\u202e=",
        "PLAIN": "it's",
    }
    words = ("it's", "", "a\u202eb", "c\r\nd\\'", '"$HOME"', " e ")
    first = service.submit(
        "true", *words, world=1, name="first", prefork=False, variables=variables, **options, **secret
    )
    service.wait_for_state(first, "succeeded")
    scene.go(f"submit?from={first}")
    browser.click("#send")
    browser.wait_for_text("The service does not tell what it was", ".formerror")
    browser.type("[name=secrets]", "SOME_TOKEN=4f60aa12")
    browser.type("[name=name]", "second")
    browser.click("#send")
    again = browser.wait(
        lambda: [row["run"] for row in service.client().get("/api/runs")["runs"] if row["name"] == "second"],
        "the run",
    )
    service.wait_for_state(again[0], "succeeded")
    was, now = (service.client().get(f"/api/runs/{run}/submission") for run in (first, again[0]))
    assert {**was, "name": "second"} == now
    assert {name: now[name] for name in options} == options


def test_a_run_whose_code_the_service_does_not_have_is_submitted_again_from_where_it_is(
    scene: Scene, tmp_path: Path
) -> None:
    service, browser = scene.service, scene.browser
    (tmp_path / "hello.py").write_text("print('hello')")
    options = ("--world", "1", "--name", "by-hand", "--env", "A=b c", "--no-prefork", "--skip-preflight")
    ringctl("launch", "--local", *options, "--", sys.executable, "hello.py", cwd=tmp_path)
    run = str(service.client().get("/api/runs", search="by-hand")["runs"][0]["run"])
    scene.go(f"runs/{run}")
    browser.click(".actions a[href*=submit]")
    browser.wait_for_text(f"Its code is not here: it was launched in {tmp_path}")
    assert not browser.all("#send")
    typed = shlex.split(browser.text(".empty code"))
    assert typed == ["ringctl", "submit", *options[:4], "--env", "A=b c", *options[-2:], "--", *typed[-2:]]
    again = ringctl("submit", "--json", *typed[2:], cwd=tmp_path)
    service.wait_for_state(json.loads(again.stdout)["run"], "succeeded")


@pytest.mark.parametrize(
    ("field", "typed", "told"),
    [
        ("command", "echo it's broken", "the quote in 's broken is not closed"),
        ("command", "echo \\", "nothing follows"),
        ("variables", 'A="x', "the quotes of A do not match"),
        ("world", "1.5", "Ranks: "),
    ],
)
def test_what_cannot_be_read_as_it_was_meant_is_not_submitted(
    scene: Scene, field: str, typed: str, told: str
) -> None:
    scene.go("submit")
    scene.browser.one("#send")
    scene.browser.script("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    scene.browser.type(f"[name={field}]", typed)
    scene.browser.click("#send")
    scene.browser.wait_for_text(told, ".formerror")


def test_what_is_sent_again_because_no_answer_came_is_one_run(scene: Scene) -> None:
    service, browser = scene.service, scene.browser
    scene.go("submit")
    browser.type("[name=command]", "true")
    browser.type("[name=name]", "once")
    browser.script(LOSES_ANSWERS)
    browser.click("#send")
    browser.wait_for_text("The service does not answer", ".formerror")
    browser.click("#send")
    browser.wait_for_text("once", ".runhead")
    (row,) = service.client().get("/api/runs", search="once")["runs"]
    service.wait_for_state(row["run"], "succeeded")


def test_what_a_busy_service_does_not_answer_is_asked_for_again(scene: Scene) -> None:
    assert scene.browser.script(BUSY_AT_FIRST)["role"] == "admin"


@pytest.fixture
def two_runs(scene: Scene, finished: str) -> Iterator[Scene]:
    """At the list of runs, of which the older one has succeeded and one is shown at a time."""
    service = scene.service
    service.client().post(f"/api/runs/{service.submit('true', at=9e9)}/cancel")
    scene.go("runs")
    scene.browser.wait(lambda: f"#/runs/{finished}" in shown_runs(scene.browser), "the runs")
    scene.browser.script(OLDER_LATE)
    yield scene
    scene.browser.driver.refresh()


def test_older_runs_that_come_late_are_not_shown_under_another_filter(two_runs: Scene) -> None:
    browser = two_runs.browser
    every, queued, failed = (f".chips button:nth-child({at})" for at in (1, 3, 5))
    browser.click(queued)
    browser.wait_for_text("No run matches")
    browser.click(every)
    browser.wait(lambda: len(shown_runs(browser)) == 1, "one run, and none of those before")
    browser.click(".foot button")
    browser.click(failed)
    browser.click(queued)
    browser.wait_for_text("No run matches")
    browser.script("window.letCome()")
    browser.click(every)
    browser.click(queued)  # by the time that this is answered, what came is long there
    browser.wait_for_text("No run matches")
    assert shown_runs(browser) == []


def test_older_runs_that_cannot_be_had_are_not_passed_over_in_silence(two_runs: Scene) -> None:
    browser = two_runs.browser
    browser.click(".chips button:nth-child(1)")
    browser.one(".foot button")
    browser.script("window.fetch = () => Promise.reject(new TypeError('gone'))")
    browser.click(".foot button")
    browser.wait_for_text("The service does not answer", "#announcements")
    assert len(shown_runs(browser)) == 1


def test_whoever_is_signed_out_elsewhere_is_told_to_sign_in_and_keeps_a_form_that_is_half_filled(
    scene: Scene,
) -> None:
    browser = scene.browser
    ringctl("serve", "token", "add", "bob")
    browser.open(ringctl("serve", "link", "--user", "bob").stdout.strip())
    scene.go("submit")
    browser.type("[name=command]", "half a command")
    ringctl("serve", "token", "remove", "bob")
    status = "return fetch('/api/me').then((answer) => answer.status)"
    browser.wait(lambda: browser.script(status) == 401, "the service to know")
    browser.script(LISTENS_AGAIN)  # sooner than the service looks whether somebody may still listen
    browser.wait_for_text("You are not signed in here", "#announcements")
    assert browser.text("#connection") == ""
    assert browser.script("return document.querySelector('[name=command]').value") == "half a command"
    scene.go("runs")
    browser.wait_for_text("You are not signed in here", "main .error")
    browser.driver.switch_to.new_window("tab")
    try:
        browser.open(ringctl("serve", "link").stdout.strip())
    finally:
        browser.driver.close()
        browser.driver.switch_to.window(browser.driver.window_handles[0])
    browser.click(".error button")
    browser.wait_for_text("Live", "#connection")


def test_whoever_may_only_look_has_no_button_that_changes_something_and_may_leave(
    scene: Scene, finished: str
) -> None:
    browser, service = scene.browser, scene.service
    run = service.submit("true", at=9e9)
    changing = "#submit-link, #preflight, #stop, #restart, #cancel, #send, .submits, .actions a[href*=submit]"
    for link, expected in (("", True), ("--read-only", False)):
        browser.open(ringctl("serve", "link", *link.split()).stdout.strip())
        seen = set()
        for place in ("queue", "hosts", "submit", f"runs/{run}", f"runs/{finished}"):
            scene.go(place)
            browser.wait(lambda: not browser.all("main .skeleton") and browser.all("main h1"), "the screen")
            seen |= set(browser.texts(changing))
        assert bool(seen) == expected, seen
    assert "Cancel" not in browser.text("main")
    browser.click("#sign-out")
    browser.click("dialog [value=yes]")
    browser.wait_for_text("not signed in", "body")
    browser.open(service.url)
    browser.wait_for_text("not signed in", "body")
    service.client().post(f"/api/runs/{run}/cancel")
