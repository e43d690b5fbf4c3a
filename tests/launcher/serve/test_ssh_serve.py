"""The service and real hosts: code that travels, and slots that several users share."""

from __future__ import annotations

import json
from pathlib import Path

from launcher import codestore, push
from launcher.client import Client
from tests.launcher.hosts import Hosts, inventory
from tests.launcher.ringctl import ringctl, wait_for
from tests.launcher.serve.service import serving

HELD = """
import os, time
while not os.path.exists(os.path.expanduser("~/go-" + os.environ["WHICH"])):
    time.sleep(0.05)
print("done", os.environ["RANK"], os.environ["RINGCTL_HOST"])
"""


def test_three_runs_of_two_users_share_four_slots_in_the_right_order(cluster: Hosts, tmp_path: Path) -> None:
    path = inventory(cluster, ("server1", "server2"), server1={"slots": 2}, server2={"slots": 2})
    (Path.cwd() / "held.py").write_text(HELD)
    with serving("--hosts", str(path)) as service:
        tokens = {name: ringctl("serve", "token", "add", name).stdout.strip() for name in ("ann", "bob")}
        ann, bob = (Client(service.url, tokens[name]) for name in ("ann", "bob"))
        snapshot = push.take(Path.cwd())
        with open(tmp_path / "code.tar", "w+b") as file:
            codestore.packed(snapshot, file)
            ann.put(f"/api/code/{snapshot.digest}", file)

        def hand_in(who: Client, which: str, world: int) -> str:
            body = {"command": ["python3", "held.py"], "code": snapshot.digest, "prefork": False}
            return str(
                who.post("/api/submit", {**body, "world": world, "variables": {"WHICH": which}})["run"]
            )

        def go(which: str) -> None:
            for host in ("server1", "server2"):
                cluster.run(host, "touch", f"go-{which}")

        first, second, third = hand_in(ann, "1", 2), hand_in(bob, "2", 3), hand_in(ann, "3", 2)
        service.wait_for_state(first, "running")
        assert service.row(first)["hosts"] == ["server1"]
        wait_for(lambda: service.row(second)["waiting"] == "waiting for 1 slot on server1", "the reason")
        wait_for(lambda: service.row(third)["waiting"] == f"behind run {second}, which it would delay", "it")
        assert [(row["user"], row["world"]) for row in ann.get("/api/queue")["queue"]] == [
            ("bob", 3),
            ("ann", 2),
        ]
        go("1")
        service.wait_for_state(second, "running")
        assert service.row(third)["state"] == "queued"

        def free() -> dict[str, int]:
            return {row["name"]: row["free"] for row in bob.get("/api/hosts")["hosts"]}

        wait_for(lambda: free() == {"server1": 0, "server2": 1}, "what the hosts say of their slots")
        go("2")
        service.wait_for_state(third, "running")
        go("3")
        for run in (first, second, third):
            service.wait_for_state(run, "succeeded")
        wait_for(lambda: len(service.lines(second)) == 3, "all of its lines")
        assert {line.split()[2] for line in service.lines(second)} == {"server1", "server2"}


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
