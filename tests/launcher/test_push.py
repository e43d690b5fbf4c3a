"""Code to the hosts: what travels, what arrives, and what can go wrong on the way."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher import hoststore, kit
from launcher import push as pushing
from launcher.errors import HostError, InputError, RingctlError
from launcher.fanout import exit_code
from launcher.ignore import ignore_matcher
from tests.cluster import Cluster
from tests.launcher.hosts import HOME, OURS, Hosts, agents, inventory, left_on, vanish, write_home
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


def names_here() -> set[str]:
    return {entry.path for entry in pushing.take(Path.cwd()).entries}


def git(*args: str, folder: str = ".") -> None:
    mine = ("-c", "user.email=a@b", "-c", "user.name=n", "-c", "protocol.file.allow=always")
    subprocess.run(["git", *mine, *args], cwd=folder, check=True, capture_output=True)


def test_submodules_and_repositories_inside_are_pushed_as_far_as_they_are_there(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "inner.py").write_text("pass\n")
    for command in (("init", "-q"), ("add", "."), ("commit", "-qm", "x")):
        git(*command, folder=str(other))
    git("init", "-q")
    git("submodule", "add", "-q", str(other), "sub")
    write("nested/kept.py")
    write("nested/dropped.py")
    write("nested/secret")
    write("nested/.gitignore", "secret\n")
    git("init", "-q", folder="nested")
    write(".ringignore", "nested/dropped.py\n")
    rest = {".gitmodules", ".ringignore", "nested/kept.py", "nested/.gitignore"}
    assert names_here() == rest | {"sub/inner.py"}
    git("submodule", "deinit", "-f", "sub")
    assert names_here() == rest


def test_where_git_cannot_say_what_it_ignores_nothing_is_pushed(monkeypatch: pytest.MonkeyPatch) -> None:
    git("init", "-q")
    write(".gitignore", "secret\n")
    write("secret")
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    with pytest.raises(InputError, match=r"git cannot say .* dubious ownership"):
        names_here()
    monkeypatch.delenv("GIT_TEST_ASSUME_DIFFERENT_OWNER")
    assert names_here() == {".gitignore"}
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(InputError, match="there is no git here"):
        names_here()


def test_a_folder_that_cannot_be_read_is_no_secret_unless_it_is_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Root may read all; so what os.walk and git say of such a folder to others is said in their place."""
    write("open.py")
    write("locked/file")

    def scandir(path: str, real: Any = os.scandir) -> Any:
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(InputError, match="locked: Permission denied") as refused:
        names_here()
    assert refused.value.fix == "add locked to .ringignore"
    words = "warning: could not open directory 'locked/': Permission denied\n"
    says = f"#!/bin/sh\nprintf 'open.py\\0'; printf \"{words}\" >&2\n"
    write("bin/git", says, 0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", os.path.abspath("bin"), prepend=":")
        with pytest.raises(InputError, match="locked: Permission denied"):
            names_here()
        write(".ringignore", "locked/\n")
        assert names_here() == {"open.py"}
    assert names_here() == {"open.py", ".ringignore", "bin/git"}


def test_ringignore_is_read_as_git_reads_gitignore() -> None:
    names = [
        "a1",
        "a3",
        "b c",
        "#h",
        "!x",
        ".hid",
        "sub/a2",
        "sub/deep/x.log",
        "a]",
        "7z",
        "a*b",
        "axb",
        "tail ",
    ]
    for name in names:
        write(name)
    rules = [
        ["a[12]", "b c", "\\#h", "\\!x"],
        ["a[!12]", "[[:digit:]]*", "*.log"],
        ["a[]]", "a\\*b", ".*"],
        ["tail\\ ", "/a1", "sub/**/*.log"],
        ["a?", "!a3", "# a3", "[z", "sub/   "],
        ["sub/", "!sub/a2"],
        ["*", "!a1", "!*.log"],
        ["sub/**", "!sub/a2", "!sub/deep/", "a**"],
    ]
    git("init", "-q")
    for lines in rules:
        write(".git/info/exclude", "\n".join(lines))
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--others", "--exclude-standard"], capture_output=True, check=True
        ).stdout
        ignored = ignore_matcher(lines)
        assert {name for name in names if not ignored(name)} == set(listed.decode().split("\0")[:-1])
    write(".ringignore", "[z-a]\n")
    with pytest.raises(InputError, match="bad character range"):
        names_here()


def test_a_link_to_the_folder_itself_stays_inside() -> None:
    Path("self").symlink_to(".")
    assert names_here() == {"self"}


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


def test_what_is_neither_file_nor_link_is_refused_with_exit_2(bare: Cluster) -> None:
    os.mkfifo("pipe")
    done = ringctl("push", code=2)
    assert "pipe: neither a file nor a link\n  add pipe to .ringignore" in done.stderr
    assert "neither a file nor a link" in ringctl("launch", "--", "true", code=2).stderr
    assert not bare.path("server1", OURS).exists()
    write(".ringignore", "pipe\n")
    ringctl("push")


def test_a_folder_that_is_gone_is_a_mistake_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("gone").mkdir()
    monkeypatch.chdir("gone")
    Path("../gone").resolve().rmdir()
    for command in (("push",), ("launch", "--", "true")):
        done = ringctl(*command, code=2)
        assert "the folder you are in is gone" in done.stderr
    monkeypatch.chdir("..")


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


def test_ringctls_own_files_are_put_there_again_when_they_are_damaged(bare: Cluster) -> None:
    inventory(bare, only=("server1",))
    with agents() as found:
        found["server1"].runs()
        (place,) = bare.path("server1", f"{OURS}/kit").iterdir()
        (ours,) = place.iterdir()
        whole = {path: path.read_bytes() for path in ours.rglob("*.py")}

        def garble(name: str, data: bytes) -> None:
            (ours / name).write_bytes(data)
            shutil.rmtree(ours / "__pycache__")

        damages: tuple[Callable[[], object], ...] = (
            lambda: (ours / "hostd.py").unlink(),
            lambda: garble("hostd.py", b""),
            lambda: garble("hostd.py", b"\0" * 4096),
            lambda: garble("hostsupervisor.py", whole[ours / "hostsupervisor.py"][:5000]),
            lambda: garble("preflight/hostfacts.py", b""),  # which another one imports when it needs it
            lambda: [path.write_bytes(b"garbage") for path in ours.glob("__pycache__/hostd.*")],
        )
        for damage in damages:
            damage()
            assert found["server1"].runs()["runs"] == []
            assert {path: path.read_bytes() for path in ours.rglob("*.py")} == whole
    assert list(place.parent.iterdir()) == [place]


def test_ringctls_own_files_leave_nothing_half_done_on_a_full_disk_nor_for_long(bare: Cluster) -> None:
    inventory(bare, only=("server1",))
    kits = bare.path("server1", f"{OURS}/kit")
    bare.fill_disk("server1", leave=20_000)
    try:
        with agents() as found, pytest.raises(HostError, match=r"/kit/\w+: No space left on device"):
            found["server1"].runs()
        assert list(kits.iterdir()) == []
    finally:
        bare.free_disk("server1")
    (kits / "tmpkilled").mkdir()
    later = kit.INSTALL.replace("time.time()", "(time.time() + 7200)")
    with agents() as found:
        done = found["server1"].transport.run(
            ["python3", "-I", "-c", later, kit.folder()], kit.contents(), 30.0
        )
    assert done.out == kit.INSTALLED
    assert [path.name for path in kits.iterdir()] == [os.path.basename(kit.folder())]


def test_whoever_begins_to_send_ringctls_own_files_and_says_no_more_is_not_waited_for(tmp_path: Path) -> None:
    impatient = kit.INSTALL.replace("signal.alarm(60)", "signal.alarm(1)")
    argv = [sys.executable, "-I", "-c", impatient, str(tmp_path / "kit" / "new")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as installing:
        assert installing.stdin is not None
        installing.stdin.write(kit.contents()[:1000])
        installing.stdin.flush()
        assert installing.wait(20) == -signal.SIGALRM
    assert list(tmp_path.glob("kit/*")) == []


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
    mine = RingctlError("a.py: gone while it was pushed")
    assert exit_code([mine]) == 1, "no host is to blame"
    assert exit_code([mine, HostError("server1", "is away")]) == 4
    assert exit_code([]) == 0


def taken(cluster: Cluster, host: str) -> dict[int, int]:
    """How much of the file that it is taking each process there has by now."""
    found = {}
    for process in cluster.processes(host):
        with contextlib.suppress(OSError):  # it has ended
            for fd in Path(f"/proc/{process.pid}/fd").iterdir():
                if "/code/blobs/" in os.readlink(fd):
                    found[process.pid] = fd.stat().st_size
    return found


def test_what_takes_a_push_leaves_nothing_half_written_when_it_is_killed(cluster: Hosts) -> None:
    write("large.bin", os.urandom(12 << 20))
    inventory(cluster, only=("server1",))
    cluster.limit_rate("server1", "20mbit")
    try:
        pusher = start("push")
        (pid,) = wait_for(lambda: taken(cluster, "server1"), "the middle of the file")
        os.kill(pid, signal.SIGKILL)
        pusher.communicate(timeout=30)
    finally:
        cluster.limit_rate("server1", None)
    assert pusher.returncode != 0
    blobs = cluster.path("server1", f"{OURS}/code/blobs")
    assert list(blobs.iterdir()) == []
    digest, _ = push_here()
    assert tree(cluster.path("server1", f"{OURS}/code/{digest}")) == tree(Path.cwd())


def no_such_call(*_: object, **__: object) -> None:
    raise OSError(errno.EOPNOTSUPP, "Operation not supported")


@pytest.mark.parametrize("lacking", [None, "open_nameless", "link"])
@pytest.mark.parametrize("there", [None, b"good", b"evil"])
def test_a_file_is_taken_whole_whatever_the_file_system_lacks_and_whatever_is_there(
    monkeypatch: pytest.MonkeyPatch, lacking: str | None, there: bytes | None
) -> None:
    content = hashlib.sha256(b"good").hexdigest()
    blob = Path(hoststore.store("blobs", content))
    blob.parent.mkdir(parents=True)
    if there:
        blob.write_bytes(there)
    if there == b"good":
        hoststore.settle(str(blob), 0o444)
    if lacking == "open_nameless":
        monkeypatch.setattr(hoststore, "open_nameless", lambda _: None)
    elif lacking:
        monkeypatch.setattr(os, lacking, no_such_call)
    data = hoststore.Inflate(io.BytesIO(zlib.compress(b"goodevil")))
    hoststore.take_blob(data, content, 4)
    assert data.read(10) == b"evil"
    assert blob.read_bytes() == b"good"
    assert hoststore.is_verified(str(blob), 4)
    assert stat.S_IMODE(blob.stat().st_mode) == 0o444
    with pytest.raises(hoststore.Refused, match="broke off"):
        hoststore.take_blob(data, content, 4)
    assert list(blob.parent.iterdir()) == [blob]


def test_ctrl_c_ends_a_push_at_once(cluster: Hosts) -> None:
    write("large.bin", os.urandom(12 << 20))
    inventory(cluster, only=("server1", "server2"))
    with agents() as found:
        found["server1"].runs()
    cluster.limit_rate("server1", "2mbit")  # for a minute, if nobody ended it
    try:
        pusher = start("push")
        wait_for(lambda: taken(cluster, "server1"), "the middle of the file")
        pusher.send_signal(signal.SIGINT)
        _, said = pusher.communicate(timeout=30)
    finally:
        cluster.limit_rate("server1", None)
    assert pusher.returncode == 130
    assert "Traceback" not in said
    wait_for(lambda: not left_on(cluster), "the end of what took the code there")
    assert snapshots(cluster, "server1") == []


# As a host gets it: with more beats a second.
QUICK = """
import sys
from launcher import __main__, kit
beat, name = "BEAT_S = 20.0", "launcher/hoststore.py"
assert beat in kit.texts()[name]
kit.texts()[name] = kit.texts()[name].replace(beat, "BEAT_S = 0.2")
__main__.main()
"""


def test_what_a_push_began_ends_though_the_controller_went_without_a_word(cluster: Hosts) -> None:
    write("big", os.urandom(3 << 20))
    cluster.limit_rate("server1", "8mbit")
    pipe, args = subprocess.PIPE, ("push", "--include", "server1")
    process = subprocess.Popen([sys.executable, "-c", QUICK, *args], stdout=pipe, stderr=pipe, text=True)
    blobs = cluster.path("server1", f"{OURS}/code/blobs")
    try:
        wait_for(lambda: sum(taken(cluster, "server1").values()) > 1 << 18, "a part of it")
        vanish(cluster, "server1", process)
        assert list(blobs.iterdir()) == []
    finally:
        cluster.limit_rate("server1", None)


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
        wait_for(
            lambda: blobs.exists() and len(list(blobs.iterdir())) == 1 and taken(cluster, "server1"),
            "the middle of the second file",
        )
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

        agent.ask = ask_and_lose  # type: ignore[method-assign]  # the one call is watched
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
    later = "from launcher import hoststore; time.time = lambda now=time.time: now() + 7200; hoststore.main()"
    collect = [
        "python3",
        "-c",
        f"import glob, sys, time; sys.path += glob.glob('{OURS}/kit/*'); {later}",
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


# --- By hand, where nothing is pushed ------------------------------------------------------------


def test_lines_to_paste_work_where_the_code_is_and_ringctl_has_never_been(cluster: Cluster) -> None:
    fake = '#!/bin/sh\necho "$PWD: $*"\n'
    write("bin/tool.py", "pass\n")
    for host in ("server1", "server2"):
        write_home(cluster, host, "python", fake)
        cluster.run(host, "chmod", "+x", "python")
    own = {"env": {"python": f"{HOME}/python"}}
    inventory(cluster, only=("server1", "server2"), defaults=own, server2={"workdir": "/tmp"})
    for command, words in (
        (("--steps", "3"), "-m trainer --steps 3"),
        (("python", "bin/tool.py"), "bin/tool.py"),
    ):
        shown = ringctl("launch", "--dry-run", "--commands", "--", *command).stdout.splitlines()
        lines = dict(zip(shown[::2], shown[1::2], strict=True))
        for host, folder, rank in (("server1", HOME, 0), ("server2", "/tmp", 1)):
            line = lines[f"# on {host}"]
            assert ".ringctl" not in line
            cluster.run(host, "sh", "-c", f"{line} wait")
            assert cluster.path(host, f"{folder}/rank{rank}.log").read_text() == f"{folder}: {words}\n"
            cluster.path(host, f"{folder}/rank{rank}.log").unlink()
