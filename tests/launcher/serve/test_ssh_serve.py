"""The service and real hosts: code that travels, and slots that several users share."""

from __future__ import annotations

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
