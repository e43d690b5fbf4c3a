"""`ringctl hosts`: who has which slots, also of other users, on real hosts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launcher import hosts
from tests.launcher.hosts import SLOTS, Hosts
from tests.launcher.ringctl import launch, ringctl, wait_for

TWO = ("server1", "server2")


def told(*args: str, code: int = 0) -> dict[str, Any]:
    return {host["name"]: host for host in json.loads(ringctl("hosts", "--json", *args, code=code).stdout)}


def started(*args: str) -> str:
    done = ringctl("launch", "--skip-preflight", "--detach", "--json", *args, "--", "sleep", "600")
    return str(json.loads(done.stdout)["run"])


def hide_processes(cluster: Hosts, host: str, how: int) -> None:
    cluster.run(host, "mount", "-o", f"remount,hidepid={how}", "/proc", user="root")


def test_each_of_two_users_sees_what_the_other_has_and_is_warned_before_a_launch(cluster: Hosts) -> None:
    inventory = hosts.inventory(cluster, TWO, defaults={"slots": 2})
    with hosts.second_user(cluster) as of_bob:
        its = started("--hosts", str(of_bob), "--world", "3")
        mine = started("--world", "1", "--include", "server2")
        found = told()
        assert {name: (host["taken"], host["free"]) for name, host in found.items()} == {
            "server1": (2, 0),
            "server2": (2, 0),
        }
        bobs = {"run": its, "user": "bob", "slots": 2, "shared": False}
        ours = {"run": mine, "user": "train", "slots": 1, "shared": False}
        assert found["server1"]["runs"] == [bobs]
        assert found["server2"]["runs"] == [{**bobs, "slots": 1}, ours]
        assert told("--hosts", str(of_bob)).keys() == found.keys()

        hide_processes(cluster, "server1", 2)
        try:
            assert told()["server1"]["runs"] == [bobs], "also where users do not see each other's processes"
        finally:
            hide_processes(cluster, "server1", 0)

        done = ringctl("launch", "--world", "2", "--hosts", str(inventory), "--", "true")
        assert f"server1: 2 of 2 slots are taken by run {its} of user bob (slots_taken)" in done.stdout
        checks = json.loads(ringctl("preflight", "--json", "--only", "slots_taken").stdout)["checks"]
        assert {(check["host"], check["status"], check["blocking"]) for check in checks} == {
            ("server1", "warn", False),
            ("server2", "warn", False),
        }

        ringctl("stop", its, "--hosts", str(of_bob))
        ringctl("stop", mine)
        assert {host["taken"] for host in told().values()} == {0}
        checks = json.loads(ringctl("preflight", "--json", "--only", "slots_taken").stdout)["checks"]
        assert {check["status"] for check in checks} == {"ok"}


def test_between_two_attempts_of_somebody_elses_run_its_slots_are_still_taken(cluster: Hosts) -> None:
    hosts.inventory(cluster, TWO)
    with hosts.second_user(cluster) as of_bob:
        again = ["--hosts", str(of_bob), "--max-restarts", "1", "--restart-delay", "300"]
        done = ringctl("launch", "--skip-preflight", "--detach", "--json", *again, "--", "sh", "-c", "exit 3")
        run = json.loads(done.stdout)["run"]
        wait_for(lambda: "begins in" in ringctl("status", run).stdout, "bob's run to wait")
        assert {name: [each["run"] for each in host["runs"]] for name, host in told().items()} == {
            "server1": [run],
            "server2": [run],
        }
        ringctl("stop", run, "--hosts", str(of_bob))
        assert {host["taken"] for host in told().values()} == {0}


def test_after_a_power_cut_nothing_is_taken_and_a_host_that_is_away_is_said_to_be(cluster: Hosts) -> None:
    hosts.inventory(cluster, TWO)
    started("--include", "server1")
    assert told()["server1"]["taken"] == 1
    cluster.kill_host("server1")
    done = ringctl("hosts", code=4)
    assert "does not answer" in done.stdout
    assert "error: server1: " in done.stderr
    cluster.boot("server1")
    assert list(cluster.path("server1", SLOTS).iterdir()), "the record is still there"
    assert told()["server1"]["taken"] == 0


def test_a_full_disk_where_the_records_are_keeps_no_run_from_starting(cluster: Hosts) -> None:
    hosts.inventory(cluster, ("server1",))
    cluster.run(
        "server1", "mount", "-t", "tmpfs", "-o", "size=4k,mode=1777", "tmpfs", "/var/tmp", user="root"
    )
    try:
        cluster.run("server1", "sh", "-c", "head -c 4096 /dev/zero >/var/tmp/full")
        run = started()
        said = cluster.path("server1", f"{hosts.OURS}/runs/{run}/hostd.log")
        wait_for(lambda: "No space left on device" in said.read_text(), "a word about it")
        assert told()["server1"]["taken"] == 0
        ringctl("stop", run)
    finally:
        cluster.run("server1", "umount", "-l", "/var/tmp", user="root")


def test_what_hosts_shows_of_this_machine_is_a_table_for_people() -> None:
    launch(["true"], world=1)
    done = ringctl("hosts")
    head, row = done.stdout.splitlines()
    assert head.split("  ")[0] == "HOST"
    assert row.startswith("localhost")
    assert "GB" in row
    assert done.stderr == ""


def test_that_the_records_cannot_be_used_on_a_host_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RINGCTL_SLOTS", str(tmp_path / "trap"))
    (tmp_path / "trap").symlink_to("/etc")
    assert "localhost: what runs take of this host is not written down" in ringctl("hosts").stderr
