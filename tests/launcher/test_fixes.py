"""What preflight says of hosts of every kind; and its lines, typed as they are by a shell here, on files like
theirs."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from launcher import kit, render, text
from launcher.agent import not_run
from launcher.errors import HostError
from launcher.model import EnvLook, EnvSpec, Facts, Folder, Host, Interface, Inventory, Pair, SlotsTold
from launcher.preflight import fixes, hostfacts, mend
from launcher.preflight.checks import judge
from launcher.preflight.examine import Examined
from launcher.preflight.mend import Means
from launcher.preflight.report import host_lines
from launcher.preflight.survey import Need, Survey, facts_from
from launcher.transport import Completed
from launcher.transport.ssh import not_installed

NAMES = ("a", "b", "c", "d")
HOSTS = {name: Host(name, f"10.0.0.{number}") for number, name in enumerate(NAMES, start=1)}


def facts(name: str, **more: Any) -> Facts:
    """Of a host with which all is well."""
    address = HOSTS[name].address
    usual: dict[str, Any] = {
        "host": name, "home": "/h/.ringctl", "cores": 2, "free_port": 1, "python": "/usr/bin/python3",
        "hostname": name, "machine": "x86_64", "cpu_flags": ("avx2",), "ephemeral": (1, 2), "listening": (7,),
        "data_address": address, "ifname": "eth0", "interfaces": (Interface("eth0", address, 1500, True),),
        "names": {each: (host.address,) for each, host in HOSTS.items()},
        "routes": {host.address: "eth0" for host in HOSTS.values()},
    }  # fmt: skip
    return Facts(**{**usual, **more})


def examined(
    of_host: Mapping[str, Mapping[str, Any]],
    *,
    broken: Mapping[tuple[str, str], Pair] | None = None,
    hosts: Mapping[str, Host] = HOSTS,
    need: Need | None = None,
) -> Examined:
    """Preflight of four hosts, as if they had said this."""
    about = {name: facts(name, **of_host.get(name, {})) for name in NAMES}
    ends = [(a, b) for a in NAMES for b in NAMES if a != b]
    pairs = tuple((broken or {}).get(pair, Pair(*pair, port=7)) for pair in ends)
    survey, asked = Survey(about, {}, pairs), tuple(hosts.values())
    results = judge(asked, need or Need(command="other"), survey)
    return Examined(asked, survey, tuple(results))


def remarks(found: Examined) -> set[tuple[str, str, str]]:
    return {(r.name, r.host, r.fix) for r in found.results if r.status in ("warn", "fail")}


def typed(line: str, home: Path, **stand_ins: str) -> subprocess.CompletedProcess[str]:
    """A line in a shell whose home is this; sudo lets it do what it does anyhow."""
    tools = home / "bin"
    tools.mkdir(exist_ok=True)
    for name, script in {"sudo": 'exec "$@"', **stand_ins}.items():
        (tools / name).write_text(f"#!/bin/sh\n{script}\n")
        (tools / name).chmod(0o755)
    environ = {**os.environ, "HOME": str(home), "PATH": f"{tools}:{os.environ['PATH']}"}
    return subprocess.run(["bash", "-c", line], env=environ, capture_output=True, text=True, timeout=60)


# --- Folders -------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", ["/ belongs to root", "/: Read-only file system", "no folder"])
def test_a_workdir_that_is_not_ours_is_never_taken_from_its_owner(problem: str) -> None:
    found = examined({"b": {"folders": (Folder("workdir", "/", 1 << 40, -1, problem),)}})
    own = "mkdir -p ~/ring\nwrite `workdir: ~/ring` for b in the inventory"
    assert remarks(found) == {("folders", "b", own)}


def test_a_workdir_that_is_only_missing_is_made() -> None:
    found = examined({"b": {"folders": (Folder("workdir", "/w d", problem="there is no folder /w d"),)}})
    assert remarks(found) == {("folders", "b", "mkdir -p '/w d'")}


def test_of_ringctls_own_folder_only_itself_is_taken(tmp_path: Path) -> None:
    found = examined(
        {
            "a": {"folders": (Folder("home", "/h/.ringctl", 1 << 40, -1, "/h/.ringctl belongs to root"),)},
            "b": {"folders": (Folder("home", "/data", 1 << 40, -1, "/data belongs to root"),)},
            "c": {"folders": (Folder("home", "/h/.ringctl", 1 << 40, -1, "/h: Read-only file system"),)},
            "d": {"folders": (Folder("home", "/h/.ringctl", 0, 0, "/h/.ringctl is no folder"),)},
        }
    )
    assert {name for name, _, _ in remarks(found)} == {"folders"}
    said = {host: fix for _, host, fix in remarks(found)}
    assert "chown" not in said["b"] + said["c"] + said["d"]
    assert "remount" in said["c"]
    assert said["d"] == "mv /h/.ringctl /h/.ringctl.old"
    assert typed(said["a"], tmp_path).returncode == 0  # there was none before
    assert (tmp_path / ".ringctl").is_dir()


def test_a_host_tells_what_is_in_the_way_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "gone").symlink_to("/nowhere")
    for name in ("file", "gone"):
        place = str(tmp_path / name)
        assert hostfacts.folder("home", place)["problem"] == f"{place} is no folder"
        missing = f"there is no folder {place}, and it cannot be made"
        assert hostfacts.folder("workdir", place)["problem"] == missing
    new = str(tmp_path / "new")
    assert hostfacts.folder("workdir", new)["problem"] == f"there is no folder {new}"
    assert hostfacts.folder("home", new)["problem"] == ""


@pytest.mark.parametrize(
    ("before", "fix"),
    [
        ("touch ~/.ringctl", "mv ~/.ringctl ~/.ringctl.old"),
        ("ln -s /nowhere ~/.ringctl", "mv ~/.ringctl ~/.ringctl.old"),
        ("mkdir ~/.ringctl; mount -t tmpfs -o size=32k none ~/.ringctl", "du -xahD ~/.ringctl |"),
        ("mkdir ~/.ringctl; mount -t tmpfs -o ro none ~/.ringctl", '"$(findmnt -no TARGET -T ~/.ringctl)"'),
        ("mount -t tmpfs -o size=4k none ~", "du -xahD ~ |"),
    ],
)
def test_why_our_files_cannot_be_put_there(tmp_path: Path, before: str, fix: str) -> None:
    (tmp_path / "files").write_bytes(kit.contents())
    install = shlex.join([sys.executable, "-I", "-c", kit.INSTALL, kit.folder()])
    script = f"exec <{tmp_path}/files; {before}; {install}"
    done = typed(f"exec unshare -m bash -c {shlex.quote(script)}", tmp_path)
    assert done.stderr == ""
    assert fix in not_installed(HOSTS["a"], Completed(1, done.stdout.encode(), b"")).fix


def test_the_mount_is_found_whatever_it_is_called(tmp_path: Path) -> None:
    place = tmp_path / "my data"
    place.mkdir()
    script = f"""mount -t tmpfs none "{place}"; {fixes.writable(str(place))}"""
    done = typed(f"unshare -m sh -c {shlex.quote(script)}", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_takes_the_room_is_looked_for_where_it_is_full() -> None:
    def full(problem: str, home_disk: bool = True) -> dict[str, Any]:
        return {"folders": (Folder("home", "/h/.ringctl", 50 << 30, -1, problem, home_disk),)}

    found = examined({"a": full("/h: Disk quota exceeded"), "b": full("/h: No space left on device", False)})
    said = {host: fix for name, host, fix in remarks(found) if name == "disk"}
    assert said["a"].startswith("du -xahD ~ |")
    assert said["b"].startswith("du -xahD /h/.ringctl |")
    assert all("remove 200 MB" in fix for fix in said.values())


def test_shared_memory_grows_beyond_what_is_used(tmp_path: Path) -> None:
    df = "echo Used; echo 3145728"  # kilobytes: 3 GB
    assert (
        typed(fixes.BIGGER_SHM, tmp_path, df=df, mount="echo $*").stdout == "-o remount,size=5120M /dev/shm\n"
    )


# --- /etc/hosts and shells -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("127.0.0.1 localhost\n10.0.0.4 d files.lan", "127.0.0.1 localhost\n10.0.0.4 d files.lan\n"),
        ("10.9.9.9\tb b.lan b b\n# b was here\n", "10.9.9.9\t b.lan  \n# b was here\n"),
        ("10.9.9.9 bb ab b#b\n", "10.9.9.9 bb ab #b\n"),
    ],
)
def test_a_name_is_given_another_meaning_in_place(tmp_path: Path, before: str, after: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(before)
    number = file.stat().st_ino
    known = facts("a", hosts_lines=tuple(line.partition("#")[0] for line in before.splitlines()))
    done = typed(fixes.hosts_line(known, "10.0.0.2", "b").replace("/etc/hosts", str(file)), tmp_path)
    assert done.returncode == 0, done.stderr
    assert file.read_text() == f"{after}10.0.0.2 b\n"
    assert file.stat().st_ino == number


def test_variables_are_unset_and_what_sets_them_is_left_alone(tmp_path: Path) -> None:
    before = "if true; then\n  export PET_A=1\nfi\nexport PET_B=2 KEEP=3"
    (tmp_path / ".bashrc").write_text(before)
    assert typed(fixes.without_variables(["PET_A", "PET_B"]), tmp_path).returncode == 0
    assert (tmp_path / ".bashrc").read_text().startswith(before)
    after = typed(". ~/.bashrc; echo ${PET_A-none} ${PET_B-none} $KEEP", tmp_path)
    assert after.stdout == "none none 3\n"


def test_a_shell_that_is_made_quiet_is_kept_as_it_was_beside(tmp_path: Path) -> None:
    (tmp_path / ".bashrc").write_text("echo hello\n")
    assert typed(fixes.QUIET_SHELL, tmp_path).returncode == 0
    assert typed(". ~/.bashrc", tmp_path).stdout == ""
    assert (tmp_path / ".bashrc.bak").read_text() == "echo hello\n"


# --- What a host says of itself ------------------------------------------------------------------


class Answers:
    """A conversation with a host that says just this."""

    def __init__(self, **more: Any) -> None:
        self.told = {"home": "/x", "cores": 1, "free_port": 1, "python": "p", **more}

    def answer(self, _: float) -> dict[str, Any]:
        return self.told


def heard(**told: Any) -> Facts:
    return facts_from(HOSTS["a"], Answers(**told), 1.0)  # type: ignore[arg-type]  # no more is asked of it


def test_odd_names_of_users_and_interfaces_do_not_put_a_host_out() -> None:
    odd = {"name": "vpn#1", "address": "10.8.0.1", "mtu": 1500, "up": True}
    told = {"data_address": "10.0.0.1", "ifname": "eth0", "user": "CORP\\alice", "interfaces": [odd]}
    assert heard(**told).interfaces == ()
    with pytest.raises(HostError, match="a name that cannot be used: 'vpn#1'"):
        heard(**{**told, "ifname": "vpn#1"})


@pytest.mark.parametrize("home", ["/x\x1b[2J", "/x\u202ey"])
def test_a_path_that_shows_as_another_is_refused(home: str) -> None:
    with pytest.raises(HostError, match="a path that cannot be used: "):
        heard(data_address="10.0.0.1", ifname="eth0", home=home)


def test_no_line_names_the_user() -> None:
    limits = {"user": "CORP\\alice", "nofile": (64, 64), "threads": 1, "kills_on_logout": True}
    said = [fix for _, _, fix in remarks(examined({"a": limits}))]
    assert len(said) == 3
    assert not any("alice" in fix for fix in said)


def test_a_shell_that_lets_nobody_in_is_to_be_another() -> None:
    said = Completed(1, b"This account is currently not available.\n", b"", began=False)
    assert (
        not_run(Host("a", "10.0.0.1", user="train"), "probe.py", said).fix == "sudo chsh -s /bin/bash train"
    )


def test_a_clock_that_is_off_from_all_hosts_is_the_one_here() -> None:
    off = {name: {"clock_s": 3600.5} for name in NAMES}
    assert {fix for _, _, fix in remarks(examined(off))} == {
        "sudo timedatectl set-ntp true  # on this machine"
    }
    one = {**{name: {"clock_s": 0.1} for name in NAMES}, "b": {"clock_s": 3600.0}}
    assert remarks(examined(one)) == {("clock", "b", "sudo timedatectl set-ntp true")}


def test_a_host_known_by_its_number_is_given_a_name_that_is_none() -> None:
    hosts = {**HOSTS, "a": Host("10.0.0.1", "10.0.0.1")}
    survey = Survey({"10.0.0.1": facts("a", hostname="localhost"), "b": facts("b")}, {})
    said = judge([hosts["a"], hosts["b"]], Need(), survey, ["loopback_name"])
    assert said[0].fix == "sudo hostnamectl set-hostname host-10-0-0-1"


# --- The network ---------------------------------------------------------------------------------


def dropped(source: str, target: str) -> tuple[tuple[str, str], Pair]:
    return (source, target), Pair(source, target, 7, "no answer (timed out)")


def test_who_gets_through_to_nobody_is_where_the_firewall_is() -> None:
    found = examined({}, broken=dict(dropped("c", other) for other in "abd"))
    assert [(name, host) for name, host, _ in remarks(found)] == [("firewall", "c")]
    (fix,) = [fix for _, _, fix in remarks(found)]
    assert fix.startswith("sudo iptables -I OUTPUT -p tcp -d 10.0.0.1,10.0.0.2,10.0.0.4 -j ACCEPT")
    found = examined({}, broken=dict(dropped(other, "c") for other in "abd"))
    assert {(name, host) for name, host, _ in remarks(found)} == {("firewall", "c")}
    assert {fix.partition(" -p ")[0] for _, _, fix in remarks(found)} == {"sudo iptables -I INPUT"}


def test_who_drops_answers_too_is_told_to_let_in_what_arrives() -> None:
    both = dict(dropped(*ends) for other in "abd" for ends in (("c", other), (other, "c")))
    found = examined({}, broken=both)
    assert {(name, host) for name, host, _ in remarks(found)} == {("firewall", "c")}
    assert {fix.partition(" -j ")[0] for _, _, fix in remarks(found)} == {
        "sudo iptables -I INPUT -p tcp -s 10.0.0.1,10.0.0.2,10.0.0.4"
    }


CHAINS = """table inet filter {{
	chain {name} {{
		type {kind} hook {hook} priority filter; policy drop;
	}}
}}
"""


@pytest.mark.parametrize(
    ("kind", "hook", "rules"),
    [
        ("filter", "input", "insert rule inet filter c ip saddr 10.0.0.2 meta l4proto tcp accept\n"),
        ("filter", "prerouting", "insert rule inet filter c ip saddr 10.0.0.2 meta l4proto tcp accept\n"),
        ("nat", "input", ""),
        ("filter", "output", ""),
    ],
)
def test_nft_is_told_which_chains_or_that_there_are_none(
    tmp_path: Path, kind: str, hook: str, rules: str
) -> None:
    (tmp_path / "chains").write_text(CHAINS.format(name="c", kind=kind, hook=hook))
    done = typed(
        fixes.firewall(facts("a", firewalls=("nft",)), ["10.0.0.2"]),
        tmp_path,
        nft='[ "$1" = list ] && exec cat ~/chains || exec cat',
    )
    assert done.stdout == rules
    assert (done.returncode == 0) == bool(rules)
    assert ("nft has no chain for it" in done.stderr) == (not rules)


def test_other_firewalls_let_in_tcp_of_the_peers_and_before_what_forbids_it() -> None:
    ufw = fixes.firewall(facts("a", firewalls=("ufw", "nft")), ["10.0.0.2", "10.0.0.3"])
    assert "ufw prepend allow proto tcp from $peer" in ufw
    zone = fixes.firewall(facts("a", firewalls=("firewall-cmd",)), ["10.0.0.2"])
    assert """'rule family="ipv4" source address="10.0.0.2" protocol value="tcp" accept'""" in zone
    assert "trusted" not in zone


@pytest.mark.parametrize(("own", "next_"), [(9000, 1500), (1500, 1400), (1400, 1280), (576, 576)])
def test_large_messages_that_get_lost_are_one_finding_with_a_smaller_mtu(own: int, next_: int) -> None:
    about = {"ifname": "eth0:1", "interfaces": (Interface("eth0:1", "10.0.0.2", own, True),)}
    cut = {("a", "b"): Pair("a", "b", 7, "large messages do not arrive (timed out)", large=False)}
    assert remarks(examined({"b": about}, broken=cut)) == {
        ("mtu", "b", f"sudo ip link set dev eth0 mtu {next_}")
    }


def test_a_name_that_means_an_ipv6_address_leads_nowhere_else() -> None:
    names = {name: (host.address,) for name, host in HOSTS.items()}
    assert remarks(examined({"a": {"names": {**names, "b": ("fd00::2",)}}})) == set()
    elsewhere = examined({"a": {"names": {**names, "b": ("10.9.9.9", "fd00::2")}}})
    assert {(name, host) for name, host, _ in remarks(elsewhere)} == {("alias_elsewhere", "a")}


def test_only_the_names_that_were_asked_about_are_mended() -> None:
    names = {"a": ("10.0.0.1",), "b": (), "c": ("10.9.9.9",), "d": ("10.0.0.4",)}
    found = examined({"a": {"names": names}})
    some = Examined(found.hosts, found.survey, tuple(r for r in found.results if r.name == "alias_missing"))
    assert mend.wrong_names(some) == {"a": {"b": "10.0.0.2"}}
    assert mend.wrong_names(found) == {"a": {"b": "10.0.0.2", "c": "10.0.0.3"}}


# --- Environments and data -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("here", "line"), [("ring", "ringctl env create --include b"), ("", "/usr/bin/python3 -m")]
)
def test_an_environment_is_only_created_from_a_file_that_is_here(here: str, line: str) -> None:
    host = Host("b", "10.0.0.2", env=EnvSpec("conda", "ring"))
    env = EnvLook(problem="there is no conda environment 'ring'", kind="missing")
    found = examined({"b": {"env": env}}, hosts={**HOSTS, "b": host}, need=Need(environment=here))
    (fix,) = [fix for name, _, fix in remarks(found) if name == "env_missing"]
    assert fix.startswith(line)
    means = Means(Inventory(found.hosts, "a"), environment="ring")
    assert len(mend.actions(found, means)) == bool(here)


@pytest.mark.parametrize(
    ("address", "folder", "source", "end"),
    [
        ("10.0.0.1", "~/data/mnist", "~/data/mnist/", "10.0.0.1:."),
        ("fd00::1", "/data/it is", "'/data/it is/'", "'[fd00::1]:.'"),
        ("10.0.0.1", "~", "~/", "10.0.0.1:."),
        ("10.0.0.1", "~bob/x", "~bob/x/", "10.0.0.1:."),
    ],
)
def test_data_are_copied_into_a_folder_that_is_made(address: str, folder: str, source: str, end: str) -> None:
    line = fixes.dataset(Host("a", address), folder)
    enter = f"mkdir -p {fixes.path(folder)} && cd {fixes.path(folder)} && rsync"
    assert line == f"rsync -a --rsync-path={shlex.quote(enter)} {source} {end}"


# --- Narrow terminals ----------------------------------------------------------------------------


def test_a_terminal_too_narrow_for_the_table_is_told_host_by_host(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    rows: list[text.Row] = [
        ["", "server1", "server2"],
        ["ssh", "✓", "✓"],
        ["network", "✗ firewall", "✓"],
        ["names", "! twice", "·"],
    ]
    monkeypatch.setattr(render, "is_terminal", lambda: True)
    least = render.least_width(rows)
    for width in (20, least - 1, least, 80):
        monkeypatch.setenv("COLUMNS", str(width))
        render.show_table(rows, host_lines(rows))
        shown = capfdbinary.readouterr().out.decode()
        assert all(word in shown for word in ("server1", "server2", "firewall", "twice"))
        assert (shown == "server1: ✗ firewall\nserver1: ! twice\nserver2: ✓\n") == (width < least)


# --- Others who are there ------------------------------------------------------------------------


def has(run: str, user: str = "bob", slots: int = 1, shared: bool = False) -> SlotsTold:
    return SlotsTold(run, user, 1, slots, 8, shared)


def slots_taken(host: Host, need: Need, *taken: SlotsTold, runs: tuple[str, ...] = ()) -> list[str]:
    found = examined({"a": {"taken": taken, "runs": runs}}, hosts={**HOSTS, "a": host}, need=need)
    return [
        result.found for result in found.results if result.name == "slots_taken" and result.status == "warn"
    ]


def test_slots_that_others_have_are_told_only_if_too_few_are_left() -> None:
    host, one = Host("a", "10.0.0.1", slots=2), Need(command="other", ranks={"a": 1})
    assert slots_taken(host, one, has("x")) == []
    assert slots_taken(host, one, has("x"), has("y", "eve")) == [
        "2 of 2 slots are taken by run x of user bob, run y of user eve"
    ]
    assert slots_taken(host, one, has("x", slots=2), runs=("x",)) == [], "of ours, `busy` tells"
    assert slots_taken(host, one, has("x", slots=2, shared=True), has("y", slots=2, shared=True)) == [
        "2 of 2 slots are taken by run x of user bob, run y of user bob"
    ]
    sharing = Need(command="other", ranks={"a": 1}, shared=True)
    assert slots_taken(host, sharing, has("x", slots=2, shared=True)) == []
    assert slots_taken(host, sharing, has("x", slots=2)) != []


def test_this_machine_has_a_slot_a_core_where_nobody_says_otherwise() -> None:
    here, two = Host("a", "10.0.0.1", slots=1, local=True), Need(command="other", ranks={"a": 1})
    assert slots_taken(here, two, has("x")) == []
    assert slots_taken(here, two, has("x", slots=2)) == ["2 of 2 slots are taken by run x of user bob"]
