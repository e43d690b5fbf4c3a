"""The service and real hosts: a run seen from the page, code that travels, slots that several users share."""

from __future__ import annotations

import json
import re
from pathlib import Path

from launcher import queued
from tests.launcher.hosts import Hosts, inventory, second_user
from tests.launcher.ringctl import ringctl, wait_for
from tests.launcher.serve.accounts import Account, accounts
from tests.launcher.serve.browser import Browser, browsing, curve, needs_chromium, quiet_network, share
from tests.launcher.serve.service import Service, serving, stopped

TWO = ("server1", "server2")
STEPS = "160"
HELD = """
import os, time
while not os.path.exists(os.path.expanduser("~/go-" + os.environ["WHICH"])):
    time.sleep(0.05)
print("done", os.environ["RANK"], os.environ["RINGCTL_HOST"])
"""


# --- One run, from the page ----------------------------------------------------------------------


@needs_chromium
def test_a_run_from_the_form_to_its_report(cluster: Hosts) -> None:
    path = inventory(cluster, TWO)
    cluster.limit_rate("server2", "20mbit")  # so it is still at it when a rank is killed
    try:
        with serving("--hosts", str(path)) as service:
            wait_for(lambda: service.client().get("/api/preflight"), "the links to be measured")
            with quiet_network(service.port), browsing() as browser:
                browser.open(service.link)
                browser.open(f"{service.url}/#/submit")
                hand_in(browser)
                watch(browser)
                [row] = service.client().get("/api/runs")["runs"]
                pid = service.row(row["run"])["ranks"][1]["pid"]
                cluster.run("server2", "kill", "-KILL", str(pid))
                see_the_cause(browser)
                cluster.limit_rate("server2", None)
                restart(browser)
                assert service.row(row["run"])["preflight"]["ok"]
                open_report(browser)
                assert browser.complaints() == []
    finally:
        cluster.limit_rate("server2", None)


def hand_in(browser: Browser) -> None:
    options = f"--steps {STEPS} --batch-size 4 --threads 1 --checkpoint-every 20"
    browser.type("[name=command]", options)
    browser.type("[name=world]", "2")
    browser.type("[name=name]", "from-the-page")
    browser.click("#send")


def watch(browser: Browser) -> None:
    """The curves move, and the ring knows its ranks and its links."""
    browser.wait_for_text("Running", ".runhead")
    browser.wait(lambda: curve(browser).count("L") > 3, "a curve")
    before = curve(browser)
    browser.wait(lambda: curve(browser) != before and share(browser) > 15, "a curve that moves")
    browser.wait_for_text("rank 1", ".timebars")
    browser.wait(lambda: len(browser.all("svg.ring .knot.go")) == 2, "both ranks in the ring")
    links = browser.texts("svg.ring .linklabel")
    assert len(links) == 2
    assert all("bit/s" in text and "ms" in text for text in links), links


def see_the_cause(browser: Browser) -> None:
    """Within 5 s where no other tests run beside it: benchmarks/page_cause.py measures that."""
    browser.wait_for_text("1 on server2", "#cause", seconds=60)
    browser.wait_for_text("Failed", ".runhead")
    assert "killed" in browser.text("#cause").lower()
    browser.wait(lambda: browser.all("svg.ring .knot.bad"), "the rank in the ring")


def restart(browser: Browser) -> None:
    browser.click("#restart")
    browser.click("dialog [value=yes]")
    browser.wait_for_text("attempt 2", ".runhead")
    browser.wait_for_text("Succeeded", ".runhead", seconds=60)
    browser.wait(lambda: share(browser) == 100, "the bar at its end")
    browser.wait_for_text("attempt 2", ".chart")
    browser.click("#tab-preflight")
    browser.wait_for_text("ready", "#panel")
    browser.click("#tab-checkpoints")
    titles = browser.wait(lambda: browser.texts("#panel thead th"), "the checkpoints")
    saved = dict(zip(titles, browser.texts("#panel tbody tr:last-child > *"), strict=True))
    assert saved["Step"] in (STEPS, "20"), "of one end of the list"
    assert (saved["Complete"], saved["Ranks"], saved["Host"]) == ("yes", "0, 1 of 2", "server1, server2")
    assert re.search(r"\d\d:\d\d:\d\d$", saved["Saved"])


def open_report(browser: Browser) -> None:
    browser.open(browser.one("#report").get_attribute("href"))
    browser.wait(lambda: curve(browser), "a curve in the report")
    assert "from-the-page" in browser.text("h1")


# --- The queue -----------------------------------------------------------------------------------


@needs_chromium
def test_three_runs_of_two_accounts_share_four_slots_in_the_right_order_and_the_page_says_why(
    cluster: Hosts, tmp_path: Path
) -> None:
    path = inventory(cluster, TWO, server1={"slots": 2}, server2={"slots": 2})
    with serving("--hosts", str(path)) as service:
        ann, bob = (signed_in(account) for account in accounts(tmp_path, "ann", "bob"))

        def hand_in(who: Account, which: str, world: int) -> str:
            options = ["--world", str(world), "--env", f"WHICH={which}", "--no-prefork", "--json"]
            told = who.ringctl("--server", service.url, "submit", *options, "--", "python3", "held.py")
            return str(json.loads(told)["run"])

        first, second, third = hand_in(ann, "1", 2), hand_in(bob, "2", 3), hand_in(ann, "3", 2)
        service.wait_for_state(first, "running")
        assert service.row(first)["hosts"] == ["server1"]
        wait_for(lambda: service.row(second)["waiting"] == "waiting for 1 slot on server1", "the reason")
        behind = f"behind run {second}, which it would delay"
        wait_for(lambda: service.row(third)["waiting"] == behind, "its reason")
        queue = json.loads(bob.ringctl("--server", service.url, "queue", "--json"))
        assert [(row["user"], row["world"]) for row in queue] == [("bob", 3), ("ann", 2)]
        see_why_it_waits(service, second, third)

        let_go(cluster, "1")
        service.wait_for_state(second, "running")
        assert service.row(third)["state"] == "queued"
        wait_for(lambda: free(service) == {"server1": 0, "server2": 1}, "what the hosts say of their slots")
        let_go(cluster, "2")
        service.wait_for_state(third, "running")
        let_go(cluster, "3")
        for run in (first, second, third):
            service.wait_for_state(run, "succeeded")
        begun = [service.row(run)["started"] for run in (first, second, third)]
        assert begun == sorted(begun)
        wait_for(lambda: len(service.lines(second)) == 3, "all of its lines")
        assert {line.split()[2] for line in service.lines(second)} == {"server1", "server2"}


def signed_in(account: Account) -> Account:
    """With a token of their own where the command line looks for it, and something to run."""
    token = ringctl("serve", "token", "add", account.name).stdout.strip()
    account.write(".ringctl/token", token)
    account.write("project/held.py", HELD)
    assert account.run(["id", "-un"]).strip() == account.name
    return account


def see_why_it_waits(service: Service, second: str, third: str) -> None:
    with quiet_network(service.port), browsing() as browser:
        browser.open(service.link)
        browser.open(f"{service.url}/#/queue")
        shown = browser.wait(lambda: browser.texts(".queue li"), "those that wait")
        assert len(shown) == 2
        assert "Waiting for 1 slot on server1" in shown[0]
        assert f"Behind run {second}, which it would delay" in shown[1]
        assert "ann" in shown[1]
        browser.open(f"{service.url}/#/runs/{third}")
        browser.wait_for_text(f"Behind run {second}, which it would delay", ".banner")


def let_go(cluster: Hosts, which: str) -> None:
    for host in TWO:
        cluster.run(host, "touch", f"go-{which}")


def free(service: Service) -> dict[str, int]:
    return {row["name"]: row["free"] for row in service.client().get("/api/hosts")["hosts"]}


def test_slots_of_a_plain_launch_from_another_account_are_taken_until_it_ends(cluster: Hosts) -> None:
    path = inventory(cluster, TWO)
    with second_user(cluster) as of_bob, serving("--hosts", str(path)) as service:
        words = ["--hosts", str(of_bob), "--include", "server2", "--skip-preflight", "--detach", "--json"]
        wait_for(lambda: free(service) == {"server1": 1, "server2": 1}, "what the hosts say of their slots")
        run = service.submit("true", world=2, prefork=False)
        launch = wait_for(lambda: (row := queued.row(run)) and row.pid, "its launch")
        with stopped(launch):  # both slots are its own, as the service believes
            his = json.loads(ringctl("launch", *words, "--", "sleep", "600").stdout)["run"]
        says = f"server2: no room for it by now: 1 of 1 slot is taken by run {his} of user bob"
        wait_for(lambda: service.row(run)["waiting"] == says, "what the host itself says")
        wait_for(lambda: free(service) == {"server1": 1, "server2": 0}, "what the hosts say of their slots")
        wait_for(lambda: service.row(run)["waiting"] == "waiting for 1 slot on server2", "the reason")
        [host] = [row for row in service.client().get("/api/hosts")["hosts"] if row["name"] == "server2"]
        assert host["runs"] == [{"run": his, "user": "bob", "slots": 1, "shared": False}]
        ringctl("stop", his, "--hosts", str(of_bob))
        service.wait_for_state(run, "succeeded")


def test_a_report_has_links_checkpoints_plan_and_preflight_also_without_the_service(cluster: Hosts) -> None:
    path = inventory(cluster, ("server1", "server2"))
    train = ("--steps", "12", "--threads", "1", "--checkpoint-every", "6", "--data", "mini")
    with serving("--hosts", str(path)) as service:
        there = service.client()
        done = ringctl("submit", "--world", "2", "--follow", "--json", "--", *train)
        run = json.loads(done.stdout.splitlines()[-1])["run"]
        by = ("--server", service.url)
        assert "ready: 2 hosts" in ringctl(*by, "preflight").stdout
        assert "12" in ringctl(*by, "checkpoints", run).stdout
        told = json.loads(ringctl(*by, "report", run, "--json").stdout)
        assert there.get(there.run(run))["links"] == told["run"]["links"]
    data = json.loads(ringctl("report", run, "--json").stdout)
    assert data["run"]["links"] == told["run"]["links"]
    assert {(link["from"], link["to"]) for link in data["run"]["links"]} == {
        ("server1", "server2"),
        ("server2", "server1"),
    }
    assert all(link["latency_ms"] and link["mbit_s"] for link in data["run"]["links"])
    assert data["run"]["preflight"]["ok"] is True
    assert data["run"]["preflight"]["time"] < data["run"]["ended"], "of its own launch"
    assert {of["step"] for of in data["checkpoints"]["checkpoints"]} == {6, 12}
    assert data["checkpoints"] == told["checkpoints"]
    text = ringctl("report", run, "--markdown").stdout
    for title in ("Curves", "Ranks", "Links", "Checkpoints", "Plan", "Environment", "Preflight"):
        assert f"\n## {title}\n" in text
    ringctl("report", run, "--out", "report.html")
    shown = Path("report.html").read_text()
    assert all(f"<h2>{title}</h2>" in shown for title in ("Links", "Checkpoints", "Plan", "Preflight"))
