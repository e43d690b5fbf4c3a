"""Attempts that come quickly after each other: no line of one in another's log, and none twice."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sqlite3
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher import fold, history
from launcher.agent import agents_for
from launcher.run import start_request
from launcher.transport import Pool
from tests.conftest import eventually
from tests.launcher import hosts
from tests.launcher.hosts import HOME, OURS, Hosts, inventory
from tests.launcher.ringctl import RINGCTL, ringctl, run_folder, wait_for

TWICE = """
echo "attempt $RINGCTL_ATTEMPT"
[ $RINGCTL_ATTEMPT = 2 ] || { sleep 1; exit 3; }
"""


def record_of(run: str) -> history.Record:
    record = history.read(run)
    assert record is not None
    return record


def test_who_follows_from_just_before_an_attempt_starts_sees_each_attempt_once(tmp_path: Path) -> None:
    options = (
        "--local",
        "--world",
        "1",
        "--detach",
        "--json",
        "--max-restarts",
        "1",
        "--restart-delay",
        "0.3",
    )
    run = json.loads(ringctl("launch", *options, "--", "sh", "-c", TWICE).stdout)["run"]
    lock = os.open(run_folder(run) / "start.lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)  # a host that is slow to start
    try:
        wait_for(lambda: record_of(run).plan.attempt == 2, "the second attempt to be written down")
        with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
            follower = subprocess.Popen([*RINGCTL, "logs", run, "--follow"], stdout=out, stderr=err)
        wait_for(lambda: "attempt 1" in (tmp_path / "out").read_text(), "the first attempt's log")
    finally:
        os.close(lock)
    assert follower.wait(timeout=30) == 0
    lines = (tmp_path / "out").read_text().splitlines()
    assert lines == ["[0 localhost] attempt 1", "[0 localhost] attempt 2"]


def test_writing_down_an_end_does_not_undo_the_attempt_that_has_begun_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = json.loads(ringctl("launch", "--local", "--world", "1", "--detach", "--json", "--", "true").stdout)[
        "run"
    ]
    first = record_of(run)
    second = replace(first.plan, attempt=2)
    read: Any = history.record_of
    other: list[threading.Thread] = []

    def slowly(db: sqlite3.Connection, name: str) -> history.Record | None:
        record: history.Record | None = read(db, name)
        if not other:
            other.append(
                threading.Thread(target=history.remember, args=(second, first.inventory, first.options))
            )
            other[0].start()
            other[0].join(0.5)
        return record

    monkeypatch.setattr(history, "record_of", slowly)
    history.close(fold.initial(first.plan))
    other[0].join()
    monkeypatch.setattr(history, "record_of", read)
    assert record_of(run).plan.attempt == 2


def test_a_line_of_bytes_that_are_no_text_can_be_longer_than_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = "head -c 14000000 /dev/zero; echo; echo after"
    ringctl("launch", "--local", "--world", "1", "--", "sh", "-c", command)
    ringctl("logs", "--download", "all")
    (log,) = Path("all").glob("*/rank0.out.log")
    assert log.read_bytes() == bytes(14_000_000) + b"\nafter\n"


def test_what_a_host_has_of_an_earlier_attempt_explains_nothing_of_the_newest(cluster: Hosts) -> None:
    """The second attempt came to one host only: its launch was killed between the starts."""
    inventory(cluster, only=("server1", "server2"))
    program = "[ -e ~/well ] || { echo ValueError: of the first >&2; exit 3; }"
    ringctl("launch", "--skip-preflight", "--", "sh", "-c", program, code=1)
    # Supervisors stay until they have heard of each other, and the next start ends that of its host.
    assert eventually(lambda: not hosts.left_on(cluster), 20.0), hosts.left_on(cluster)
    before = history.recall()[-1]
    run, plan = before.plan.run, replace(before.plan, attempt=2)
    history.remember(plan, before.inventory, before.options)
    cluster.path("server1", f"{HOME}/well").touch()
    with contextlib.closing(Pool(no_input=True)) as pool:
        agent = agents_for(before.hosts[:1], pool)["server1"]
        agent.start({**start_request(plan, "server1"), "lease": None, "automatic": False, "since": 1})
    path = cluster.path("server1", f"{OURS}/runs/{run}/state.json")
    wait_for(lambda: json.loads(path.read_text())["state"] == "succeeded", "the second attempt's end")
    told = json.loads(ringctl("explain", run, "--json", code=None).stdout)
    assert "of the first" not in json.dumps(told)
    assert told["state"] != "failed"
