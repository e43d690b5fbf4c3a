"""Code to the hosts: what travels, what arrives, and what can go wrong on the way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher import push as pushing
from launcher.errors import InputError, RingctlError
from tests.cluster import Cluster
from tests.launcher.hosts import HOME, OURS, agents, inventory, write_home
from tests.launcher.ringctl import ringctl, start, wait_for

pytestmark = pytest.mark.usefixtures("cluster")


def write(name: str, text: str | bytes = "", mode: int = 0o644) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(mode)
    return path


def push(code: int = 0) -> Any:
    return json.loads(ringctl("push", "--json", code=code).stdout)


def push_here() -> tuple[str, dict[str, Any]]:
    """The same without the command line: the digest, and what it took for each host."""
    snapshot = pushing.take(Path.cwd())
    with agents() as found:
        return snapshot.digest, dict(pushing.push(snapshot, found))


def snapshots(cluster: Cluster, host: str) -> list[str]:
    folder = cluster.path(host, f"{OURS}/code")
    return sorted(path.name for path in folder.iterdir() if len(path.name) == 64) if folder.exists() else []


def tree(folder: Path) -> dict[str, tuple[bytes, bool]]:
    """Every file, and every link with its target, by its path."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_symlink():
            found[str(path.relative_to(folder))] = (b"-> " + os.fsencode(os.readlink(path)), False)
        elif path.is_file():
            found[str(path.relative_to(folder))] = (path.read_bytes(), os.access(path, os.X_OK))
    return found


# --- What travels --------------------------------------------------------------------------------


def test_only_what_a_host_lacks_travels_and_everything_arrives(cluster: Cluster) -> None:
    write("train.py", "print('hello')\n")
    write("lib/tool.sh", "#!/bin/sh\n", 0o755)
    write("lib/copy.py", "print('hello')\n")  # the same content is sent once
    write("data.bin", os.urandom(100_000))
    write("lib/na\udcffme ü\n", "odd")
    Path("link").symlink_to("lib/copy.py")
    Path("folder").symlink_to("lib")
    Path("dangling").symlink_to("lib/later")
    first = push()
    assert {host: its["files"] for host, its in first["hosts"].items()} == dict.fromkeys(cluster.names, 4)
    assert all(100_000 < its["bytes"] < 110_000 for its in first["hosts"].values())
    for host in cluster.names:
        assert tree(cluster.path(host, f"{OURS}/code/{first['digest']}")) == tree(Path.cwd())
    assert push()["hosts"] == {host: {"files": 0, "bytes": 0} for host in cluster.names}
    write("train.py", "print('changed')\n")
    second = push()
    assert second["digest"] != first["digest"]
    assert all(its["files"] == 1 and its["bytes"] < 200 for its in second["hosts"].values())
    assert snapshots(cluster, "server1") == sorted([first["digest"], second["digest"]])


def test_what_git_ignores_and_ringignore_names_stays_here(cluster: Cluster) -> None:
    subprocess.run(["git", "init", "-q"], check=True)
    write(".gitignore", "*.log\nbuild/\n")
    write(".ringignore", "# big\nweights/\n/notes.txt\n*.tmp\n!keep.tmp\n")
    for name in ("a.log", "build/x", "weights/w", "deep/weights/w", "notes.txt", "deep/x.tmp"):
        write(name)
    kept = {"tracked.py", "new.py", "deep/notes.txt", "keep.tmp", ".gitignore", ".ringignore", "tracked.log"}
    for name in kept - {".gitignore", ".ringignore"}:
        write(name)
    subprocess.run(["git", "add", "-f", "tracked.py", "tracked.log"], check=True)
    write("gone.py")
    subprocess.run(["git", "add", "gone.py"], check=True)
    Path("gone.py").unlink()
    inventory(cluster, only=("server1",))
    digest, _ = push_here()
    assert set(tree(cluster.path("server1", f"{OURS}/code/{digest}"))) == kept


def test_without_git_all_but_the_usual_junk_is_pushed(cluster: Cluster) -> None:
    for name in (
        "a.py",
        "pkg/__pycache__/a.pyc",
        ".venv/bin/python",
        "pkg/b.pyc",
        ".hidden",
        "node_modules/x",
    ):
        write(name)
    inventory(cluster, only=("server1",))
    digest, _ = push_here()
    assert set(tree(cluster.path("server1", f"{OURS}/code/{digest}"))) == {"a.py", ".hidden"}


# --- What is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "inside/../../outside"])
def test_a_link_that_leaves_the_folder_is_refused_before_anything_is_touched(
    cluster: Cluster, target: str
) -> None:
    Path("inside").mkdir()
    Path("escape").symlink_to(target)
    with pytest.raises(InputError, match="a symbolic link that leaves the folder") as refused:
        push_here()
    assert "escape" in refused.value.fix
    assert snapshots(cluster, "server1") == []


def test_what_is_neither_file_nor_link_is_refused_with_exit_2(cluster: Cluster) -> None:
    os.mkfifo("pipe")
    done = ringctl("push", code=2)
    assert "pipe: neither a file nor a link\n  add pipe to .ringignore" in done.stderr
    assert "neither a file nor a link" in ringctl("launch", "--", "true", code=2).stderr
    assert not cluster.path("server1", OURS).exists()
    write(".ringignore", "pipe\n")
    ringctl("push")


@pytest.mark.parametrize("path", ["../escape", "/tmp/escape", "a/../../escape", ""])
def test_a_host_refuses_paths_that_leave_the_tree(cluster: Cluster, path: str) -> None:
    entry = {"path": path, "kind": "link", "content": "x", "size": 0, "executable": False}
    request = {"digest": "a" * 64, "entries": [entry], "blobs": []}
    with agents() as found, pytest.raises(RingctlError, match="a path that leaves the tree"):
        found["server1"].ask("hoststore.py", ["receive"], request)
    assert snapshots(cluster, "server1") == []
    assert [path.name for path in cluster.path("server1", f"{OURS}/code").iterdir()] == ["blobs"]


def test_a_full_disk_is_told_of_the_host_and_leaves_no_half_snapshot(cluster: Cluster) -> None:
    write("data.bin", os.urandom(12 << 20))  # more than is under way when the host gives up
    inventory(cluster, only=("server1", "server2"))
    with agents() as found:
        found["server2"].runs()  # our own files are there before the disk is full
    cluster.fill_disk("server2", leave=1 << 20)
    try:
        _, results = push_here()
    finally:
        cluster.free_disk("server2")
    assert results["server1"].files == 1
    assert "server2: " in results["server2"].message
    assert "No space left on device" in results["server2"].message
    assert snapshots(cluster, "server2") == []
    _, results = push_here()
    assert (results["server1"].files, results["server2"].files) == (0, 1)


# --- Damage --------------------------------------------------------------------------------------


def test_damage_on_a_host_is_noticed_and_repaired(cluster: Cluster) -> None:
    """Also where a file keeps its length."""
    write("a.py", "print('aaaa')\n")
    write("b.sh", "echo b\n", 0o755)
    write("c.py", "print('c')\n")
    inventory(cluster, only=("server1",))
    digest, _ = push_here()
    place = cluster.path("server1", f"{OURS}/code/{digest}")
    whole = tree(place)

    def edit(name: str, text: str) -> None:
        (place / name).chmod(0o644)
        (place / name).write_text(text)

    damages: tuple[Callable[[], object], ...] = (
        lambda: edit("a.py", "print('evil')\n"),  # through the link also the content itself
        lambda: edit("b.sh", "echo c\n"),
        lambda: (place / "c.py").unlink(),
        lambda: (place / "b.sh").chmod(0o444),
        lambda: shutil.rmtree(place),
    )
    for damage in damages:
        damage()
        assert not place.exists() or tree(place) != whole
        push_here()
        assert tree(place) == whole
        assert push_here()[1]["server1"].files == 0
    assert len(snapshots(cluster, "server1")) == 1


def test_a_file_that_changes_while_it_is_pushed_is_not_taken_for_the_other(cluster: Cluster) -> None:
    write("a.py", "print('one')\n")
    inventory(cluster, only=("server1",))
    snapshot = pushing.take(Path.cwd())
    write("a.py", "print('two')\n")
    with agents() as found:
        results = pushing.push(snapshot, found)
    assert "a file changed while it was pushed; push again" in str(results["server1"])
    Path("a.py").unlink()
    with agents() as found:
        results = pushing.push(snapshot, found)
    assert "a.py: No such file or directory while it was pushed" in str(results["server1"])
    assert snapshots(cluster, "server1") == []


def test_a_push_that_is_killed_leaves_no_half_snapshot_and_the_next_one_goes_on(cluster: Cluster) -> None:
    for number in range(3):
        write(f"large{number}.bin", os.urandom(17 << 20))
    inventory(cluster, only=("server1",))
    with agents() as found:
        found["server1"].runs()
    cluster.limit_rate("server1", "200mbit")
    try:
        pusher = start("push")
        blobs = cluster.path("server1", f"{OURS}/code/blobs")
        wait_for(lambda: blobs.exists() and len(list(blobs.iterdir())) == 2, "the middle of the second file")
        pusher.send_signal(signal.SIGKILL)
        _, said = pusher.communicate()
    finally:
        cluster.limit_rate("server1", None)
    assert "pushing code: 0 of 53 MB" in said
    wait_for(lambda: not cluster.processes("server1"), "the end of what took the code there")
    assert snapshots(cluster, "server1") == []
    assert [len(path.name) for path in blobs.iterdir()] == [64], "whole files stay, and nothing else"
    digest, results = push_here()
    assert results["server1"].files == 2
    assert tree(cluster.path("server1", f"{OURS}/code/{digest}")) == tree(Path.cwd())


def test_what_is_collected_while_it_is_counted_on_is_sent_after_all(cluster: Cluster) -> None:
    write("old.py", "old\n")
    inventory(cluster, only=("server1",))
    push_here()
    write("new.py", "new\n")
    snapshot = pushing.take(Path.cwd())
    with agents() as found:
        agent, ask = found["server1"], found["server1"].ask

        def ask_and_lose(source: str, args: list[str], *rest: Any, **more: Any) -> Any:
            answer = ask(source, args, *rest, **more)
            if args == ["check"]:
                shutil.rmtree(cluster.path("server1", f"{OURS}/code"))
            return answer

        agent.ask = ask_and_lose  # type: ignore[method-assign]
        done = pushing.push(snapshot, found)["server1"]
    assert isinstance(done, pushing.Pushed)
    assert done.files == 2
    assert tree(cluster.path("server1", f"{OURS}/code/{snapshot.digest}")) == tree(Path.cwd())


# --- Old snapshots -------------------------------------------------------------------------------


def test_old_snapshots_are_collected_but_never_that_of_a_run(cluster: Cluster) -> None:
    """Both kinds of run: a command of the user's, and the built-in trainer, which has no copy of its own."""
    write_home(cluster, "server1", "python", "#!/bin/sh\nexec sleep 1000\n")  # a trainer that takes its time
    cluster.run("server1", "chmod", "+x", "python")
    inventory(cluster, only=("server1",), server1={"env": {"python": f"{HOME}/python"}})
    write("run.py", "pass\n")
    unchecked = "--skip-preflight"  # which would see that this Python is none
    runs = [detach(unchecked, "--", "sleep", "1000"), detach(unchecked, "--", "--steps", "1000000")]
    used = {snapshot_of(cluster, run) for run in runs}
    assert len(used) == 2
    newest = push_times(9)
    found = snapshots(cluster, "server1")
    assert used <= set(found)
    assert newest in found
    assert len(found) == 2 + 8 + 1  # those in use, the newest few, and the one that was just pushed
    for run in runs:
        ringctl("stop", run)
    push_times(1)
    assert set(snapshots(cluster, "server1")) & used == {snapshot_of(cluster, runs[1])}, "it may be restarted"


def test_contents_that_no_snapshot_has_are_collected_once_nobody_can_be_about_to_use_them(
    cluster: Cluster,
) -> None:
    inventory(cluster, only=("server1",))
    write("new.py", "pass\n")
    digest, _ = push_here()
    blobs = cluster.path("server1", f"{OURS}/code/blobs")
    for name in ("tmp-broken", "a" * 64):
        (blobs / name).write_text("x")
    later = "import time, hoststore; time.time = lambda now=time.time: now() + 7200; hoststore.main()"
    collect = [
        "python3",
        "-c",
        f"import sys, glob; sys.path += glob.glob('{OURS}/kit/*'); {later}",
        "collect",
    ]
    with agents() as found:
        found["server1"].ask("hoststore.py", ["collect"], {})
        assert len(list(blobs.iterdir())) == 3
        found["server1"].transport.run(collect, b"{}\n", 30.0)
    assert len(list(blobs.iterdir())) == 1
    assert tree(cluster.path("server1", f"{OURS}/code/{digest}")) == tree(Path.cwd())


def detach(*command: str) -> str:
    return str(json.loads(ringctl("launch", "--detach", "--json", *command).stdout)["run"])


def snapshot_of(cluster: Cluster, run: str) -> str:
    return str(json.loads(cluster.path("server1", f"{OURS}/runs/{run}/plan.json").read_text())["snapshot"])


def push_times(count: int) -> str:
    """Different snapshots; the digest of the last."""
    digest = ""
    with agents() as found:
        for _ in range(count):
            write("only.py", os.urandom(8))
            snapshot = pushing.take(Path.cwd())
            assert isinstance(pushing.push(snapshot, found)["server1"], pushing.Pushed)
            digest = snapshot.digest
    return digest
