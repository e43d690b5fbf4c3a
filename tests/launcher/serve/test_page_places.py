"""What the page shows where: which runs come first, what leaves the screen, and where links lead."""

from __future__ import annotations

import contextlib
import functools
import http.server
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher import history, watching
from tests.launcher.ringctl import ringctl, wait_for
from tests.launcher.serve.browser import Browser, browsing, needs_chromium, quiet_network
from tests.launcher.serve.service import Service, serving

pytestmark = needs_chromium

WAITS = """
import os, sys, time
print("hello from", os.environ["RANK"], flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
"""
TELLS = """
import itertools, json, os, time
for step in itertools.count(1):
    with open(os.environ["RINGCTL_METRICS"], "a") as file:
        print(json.dumps({"step": step, "steps": 100000, "loss": 1 / step, "step_ms": 50.0}), file=file)
    time.sleep(0.05)
"""
FAILS_ONCE = "import os; raise SystemExit(int(os.environ['RINGCTL_ATTEMPT'] == '1'))"
MORE = 55  # than the newest that are listed at once
AT = 9e9  # a moment that no test comes to
ALONE = {"prefork": False, "skip_preflight": True}
NAMES = "return [...document.querySelectorAll('table.runs a.name')].map((one) => one.textContent)"
HOLD = """
window.held = [...arguments].map((one) => document.querySelector(one));
held[0].focus();
"""
HELD = "return document.activeElement === held[0] && held.every((one) => one.isConnected)"
OFFERED = """
const all = (one) => [...one.options].map((option) => option.textContent);
return [...document.querySelectorAll(".logtools select")].slice(0, 2).map(all);
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One for all tests here, in a network of its own, in which they start their services."""
    with quiet_network(), browsing() as browser:
        yield browser


def names(browser: Browser) -> list[str]:
    return list(browser.script(NAMES))


def waiting(service: Service, go: Path, **more: object) -> str:
    """A run that goes on until there is such a file."""
    return service.submit(sys.executable, "-c", WAITS, str(go), **{**ALONE, **more})


def enlist_more(count: int = MORE) -> None:
    """Newer ones, which are over."""
    for number in range(count):
        history.enlist(f"20260101-000000-{number:04}", name=f"newer{number:02}", state="cancelled")


# --- Which runs are shown, and where -------------------------------------------------------------


def test_a_run_that_goes_on_is_shown_first_however_many_are_newer_and_leaves_when_it_has_ended(
    browser: Browser, tmp_path: Path
) -> None:
    with serving(slots=1) as service:
        patient = service.submit("true", at=AT, name="patient")
        oldest = waiting(service, tmp_path / "go", name="oldest")
        service.wait_for_state(oldest, "running")
        enlist_more()
        browser.open(service.link)
        browser.wait(lambda: len(names(browser)) == 52, "a page of runs, and those that are older")
        assert names(browser)[:3] == ["oldest", "patient", f"newer{MORE - 1}"]
        browser.script("location.hash = '#/runs?state=running%2Cstarting'")
        browser.wait(lambda: names(browser) == ["oldest"], "what goes on")
        (tmp_path / "go").touch()
        browser.wait_for_text("No run matches")
        browser.click(".empty button")
        browser.wait(lambda: names(browser)[:1] == ["patient"], "all of them")
        service.client().post(f"/api/runs/{patient}/cancel")
        browser.wait(lambda: browser.texts("tr.queued") == [], "the other one to be cancelled")


@pytest.mark.parametrize("at", [0, 2], ids=["which-ends", "beside-it"])
def test_the_focus_stays_on_a_run_that_comes_to_another_place(
    browser: Browser, tmp_path: Path, at: int
) -> None:
    focused = "return document.activeElement.textContent"
    with serving(slots=1) as service:
        run = waiting(service, tmp_path / "go", name="ends")
        service.wait_for_state(run, "running")
        enlist_more(3)
        browser.open(service.link)
        browser.wait(lambda: names(browser) == ["ends", "newer02", "newer01", "newer00"], "the runs")
        browser.script("document.querySelectorAll('table.runs a.name')[arguments[0]].focus()", at)
        (tmp_path / "go").touch()
        browser.wait(lambda: names(browser) == ["newer02", "newer01", "newer00", "ends"], "it to end")
        assert browser.script(focused) == ("ends", "newer02", "newer01")[at]


def test_what_is_focused_or_pressed_stays_while_a_run_tells_how_far_it_is(browser: Browser) -> None:
    from selenium.webdriver import ActionChains

    def wait_for_more(selector: str) -> None:
        before = browser.text(selector)
        browser.wait(lambda: browser.text(selector) not in ("", before), "more of the run")

    with serving(slots=1) as service:
        run = service.submit(sys.executable, "-c", TELLS, name="tells", **ALONE)
        enlist_more()
        browser.open(service.link)
        wait_for_more("tr.running .far")
        browser.script(HOLD, "tr.running [data-choose]", "tr.running a.name", ".foot button")
        wait_for_more("tr.running .far")
        assert browser.script(HELD)
        ActionChains(browser.driver).click_and_hold(browser.one("tr.running a.name")).perform()
        wait_for_more("tr.running .far")
        ActionChains(browser.driver).release().perform()
        browser.wait(lambda: browser.driver.current_url.endswith(f"#/runs/{run}"), "what was clicked")
        browser.click("#tab-ranks")
        browser.one("#panel .textlink")
        browser.script(HOLD, "#panel .textlink", "#panel .scroll")
        wait_for_more("#panel td.number")
        assert browser.script(HELD)


def test_the_focus_stays_while_other_runs_come_and_go(browser: Browser, tmp_path: Path) -> None:
    with serving(slots=2) as service:
        run = waiting(service, tmp_path / "go", name="goes-on")
        first, _ = (service.submit("true", at=AT, name=name) for name in ("first", "second"))
        service.wait_for_state(run, "running")
        browser.open(service.link)
        browser.open(f"{service.url}/#/queue")
        browser.wait(lambda: browser.texts(".queue a.name") == ["first", "second"], "what waits")
        browser.script(HOLD, "[aria-label='Cancel second']", ".queue li:last-child a")
        service.client().post(f"/api/runs/{first}/cancel")
        browser.wait(lambda: browser.texts(".queue a.name") == ["second"], "one to leave")
        assert browser.script(HELD)
        browser.open(f"{service.url}/#/hosts")
        browser.wait(lambda: browser.texts(".uses a") == ["goes-on"], "what runs")
        browser.script(HOLD, ".uses a", ".host")
        waiting(service, tmp_path / "go", name="comes")
        browser.wait(lambda: "0 of 2 free" in browser.text(".host"), "another one to start")
        browser.wait(lambda: len(browser.texts(".uses a")) == 2, "both")
        assert browser.script(HELD)
        (tmp_path / "go").touch()


def test_a_run_that_is_forgotten_leaves_the_page(browser: Browser) -> None:
    with serving() as service:
        enlist_more(3)
        browser.open(service.link)
        browser.wait(lambda: len(names(browser)) == 3, "the runs")
        ringctl("runs", "prune", "--keep", "1", "--yes")
        browser.wait(lambda: names(browser) == ["newer02"], "those that are gone to be gone")


def test_whoever_was_away_sees_how_runs_ended_meanwhile(browser: Browser, tmp_path: Path) -> None:
    with serving(slots=1) as service:
        run = waiting(service, tmp_path / "go", name="oldest")
        service.wait_for_state(run, "running")
        browser.open(service.link)
        browser.wait(lambda: names(browser) == ["oldest"], "the run")
        service.kill()
        browser.wait_for_text("Reconnecting", "#connection")
        (tmp_path / "go").touch()
        wait_for(lambda: ringctl("ps", "--json").stdout.count("succeeded"), "it to end")
        enlist_more()
        service.start()
        browser.wait(lambda: not browser.all("tr.running, tr.starting"), "nothing that goes on")


def test_runs_are_in_the_order_in_which_they_were_handed_in_whatever_the_clock_said(browser: Browser) -> None:
    ids = ["20260101-120000-cccc", "20260101-120000-aaaa", "20260101-120000-bbbb"]
    with serving() as service:
        for run in ids:
            history.enlist(run, name=run[-4:], state="cancelled")
        enlist_more()
        browser.open(service.link)
        browser.wait(lambda: len(names(browser)) == 50, "the newest")
        history.enlist("20251231-120000-dddd", name="newest", state="cancelled")
        browser.wait(lambda: names(browser)[0] == "newest", "one whose id is the oldest")
        browser.driver.refresh()
        browser.click(".foot button")
        browser.wait(lambda: len(names(browser)) == MORE + 4, "all of them")
        listed = [row["name"] for row in service.client().get("/api/runs", limit=1000)["runs"]]
        assert names(browser) == listed
        assert listed[0] == "newest"
        assert listed[-3:] == ["bbbb", "aaaa", "cccc"]


# --- What a run can be told, and tells -----------------------------------------------------------


def test_a_run_that_waits_for_its_next_attempt_can_be_stopped(browser: Browser) -> None:
    with serving(slots=1) as service:
        run = service.submit(
            sys.executable, "-c", FAILS_ONCE, max_restarts=1, restart_delay=300, name="again", **ALONE
        )
        browser.open(service.link)
        for opened in ("while it starts", "while it waits"):
            browser.open(f"{service.url}/#/runs/{run}")
            browser.wait_for_text("attempt 2 begins in", ".runhead", 60)
            assert "Failed" in browser.text(".runhead"), opened
            browser.one("#stop")
            browser.open(f"{service.url}/#/nowhere")
        browser.open(f"{service.url}/#/runs/{run}")
        browser.click("#stop")
        browser.wait_for_text("It does not start again by itself", "dialog")
        browser.click("dialog [value=yes]")
        wait_for(lambda: not watching.is_watched(run) and watching.read(run) is None, "nobody to watch it")
        browser.wait(lambda: not browser.all("#stop") and browser.all("#restart"), "nothing to be stopped")
        assert service.row(run)["attempt"] == 1
        assert "begins in" not in browser.text(".runhead")


def test_a_log_that_is_opened_before_the_run_starts_can_be_filtered_by_rank_and_host_once_it_has(
    browser: Browser, tmp_path: Path
) -> None:
    with serving(slots=2) as service:
        first = waiting(service, tmp_path / "first")
        run = waiting(service, tmp_path / "second", world=2)
        browser.open(service.link)
        browser.open(f"{service.url}/#/runs/{run}?tab=log")
        browser.one(".logtools")
        assert browser.script(OFFERED) == [["all ranks"], ["all hosts"]]
        (tmp_path / "first").touch()
        service.wait_for_state(first, "succeeded")
        offered = [["all ranks", "rank 0", "rank 1"], ["all hosts", "here"]]
        browser.wait(lambda: browser.script(OFFERED) == offered, "its ranks and hosts")
        (tmp_path / "second").touch()


def test_a_moment_is_told_by_the_clock_of_whoever_looks(browser: Browser) -> None:
    elsewhere = "Asia/Tokyo" if time.strftime("%z") != "+0900" else "Asia/Kolkata"
    at = time.time() + 1800
    with serving() as service:
        run = service.submit("true", at=at, name="later")
        wait_for(lambda: service.row(run)["waiting"], "the reason")
        browser.driver.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": elsewhere})
        try:
            browser.open(service.link)
            browser.wait_for_text("later")
            shown = browser.script("return new Date(1000 * arguments[0]).toTimeString().slice(0, 5)", at)
            for place in ("runs", "queue", f"runs/{run}"):
                browser.open(f"{service.url}/#/{place}")
                browser.wait(lambda: browser.texts(".reason, .banner strong"), "the reason")
                (reason,) = browser.texts(".reason, .banner strong")
                assert reason.startswith("Waiting until")
                assert reason.endswith(shown), "and no other time"
                assert service.row(run)["waiting"][-5:] not in browser.text("main")
        finally:
            browser.driver.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": ""})


def test_a_comparison_says_what_it_leaves_out(browser: Browser) -> None:
    with serving() as service:
        enlist_more(10)
        browser.open(service.link)
        browser.wait(lambda: len(names(browser)) == 10, "the runs")
        browser.script("document.querySelectorAll('[data-choose]').forEach((one) => one.click())")
        assert browser.text(".comparebar") == "Compare 8 of 10 runs"
        browser.click(".comparebar")
        browser.wait(lambda: len(browser.all(".picked li")) == 8, "as many as there are colours")
        browser.wait_for_text("10 runs were chosen: the first 8 of them are compared", ".picker")
        known = [row["run"] for row in service.client().get("/api/runs")["runs"]]
        history.forget(known[1])
        browser.open(f"{service.url}/#/compare?runs={','.join(known[:3])}")
        browser.wait_for_text(f"Not known any more, and left out: {known[1]}", ".picker")
        assert browser.texts(".picked li a") == ["newer09", "newer07"]
        browser.wait_for_text("Curves", ".comparison")


# --- Links ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def elsewhere(target: str) -> Iterator[str]:
    """The address of a page of another site with a link."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(f'<a href="{target}">look</a>'.encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as site:
        thread = threading.Thread(target=site.serve_forever)
        thread.start()
        try:
            yield f"http://localhost:{site.server_port}/"
        finally:
            site.shutdown()
            thread.join()


@contextlib.contextmanager
def linked() -> Iterator[tuple[Service, str, str]]:
    """A service, the place of a run's log on its page, and another site with a link to that."""
    with serving() as service:
        run = service.submit(sys.executable, "-c", "print('hello')", name="linked", **ALONE)
        service.wait_for_state(run, "succeeded")
        place = f"{service.url}/#/runs/{run}?tab=log"
        with elsewhere(place) as site:
            yield service, place, site


def test_a_link_that_is_followed_from_another_site_leads_to_its_place(browser: Browser) -> None:
    with linked() as (service, place, site):
        browser.open(service.link)
        browser.wait_for_text("linked")
        browser.open(site)
        browser.click("a")
        browser.wait_for_text("hello", ".loglines")
        assert browser.driver.current_url == place


def is_elsewhere(browser: Browser, before: str) -> bool:
    return bool(browser.driver.current_url != before)


def test_whoever_signs_in_after_following_a_link_comes_to_its_place(browser: Browser) -> None:
    with linked() as (service, place, site):
        browser.driver.delete_all_cookies()
        browser.open(site)
        browser.click("a")
        for _ in range(2):
            browser.wait_for_text("You are not signed in here", "body")
            shown = browser.driver.current_url
            assert "linked" not in browser.driver.page_source
            browser.click("button")
            browser.wait(functools.partial(is_elsewhere, browser, shown), "another try")
        tab = browser.driver.current_window_handle
        browser.driver.switch_to.new_window("tab")
        browser.open(service.link)
        browser.driver.close()
        browser.driver.switch_to.window(tab)
        browser.click("button")
        browser.wait_for_text("hello", ".loglines")
        assert browser.driver.current_url == place
