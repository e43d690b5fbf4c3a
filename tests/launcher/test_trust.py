"""Host keys: nothing is said to a server that nobody has trusted, and a changed key is never taken."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from launcher.errors import InputError
from launcher.transport import sshconfig
from launcher.transport.hostkeys import known_keys
from tests.cluster import Cluster
from tests.launcher.hosts import (
    Terminal,
    agents,
    dot_ssh,
    fingerprint,
    inventory,
    new_key,
    refusal,
    sh,
    ssh_config,
)
from tests.launcher.ringctl import ringctl

pytestmark = pytest.mark.usefixtures("cluster")


def known_hosts() -> Path:
    return dot_ssh() / "known_hosts"


def public_key(cluster: Cluster, host: str) -> str:
    """TYPE BASE64, as inventories have it."""
    return cluster.path(host, "/etc/ssh/ssh_host_ed25519_key.pub").read_text().strip()


def another_key(folder: Path, kind: str = "ed25519") -> str:
    words = new_key(folder / f"other-{kind}", kind=kind).with_suffix(".pub").read_text().split()
    return f"{words[0]} {words[1]}"


def fingerprint_of(line: str) -> str:
    done = subprocess.run(["ssh-keygen", "-lf", "-"], input=line, capture_output=True, text=True, check=True)
    return done.stdout.split()[1]


# --- Unknown -------------------------------------------------------------------------------------


def test_an_unknown_key_is_refused_with_its_fingerprint_and_the_command_that_trusts_it(
    cluster: Cluster,
) -> None:
    known_hosts().unlink()
    done = ringctl("exec", "--", "touch", "was-here", code=4)
    for host in cluster.names:
        assert f"{host}: unknown host key ssh-ed25519 {fingerprint(cluster, host)}" in done.stderr
        assert f"\n  ringctl trust {host}  # once you have compared it" in done.stderr
        assert not cluster.path(host, "/home/train/was-here").exists()
    assert not known_hosts().exists()


def test_trust_records_all_keys_after_a_yes_and_ssh_itself_takes_them(cluster: Cluster) -> None:
    known_hosts().write_text("# no newline at the end")
    terminal = Terminal("trust")
    terminal.expect("Record 4 new keys? [y/N]")
    for host in cluster.names:
        assert fingerprint(cluster, host) in terminal.seen
    assert known_hosts().read_text() == "# no newline at the end"
    terminal.type("y\n")
    assert terminal.finish(0).count(" known") == 4
    assert sh("server4", "hostname") == "server4\n"
    options = ("-F", "none", "-o", f"UserKnownHostsFile={known_hosts()}", "-o", "StrictHostKeyChecking=yes")
    identity = ("-i", str(cluster.identity_file), "-o", "BatchMode=yes")
    where = f"train@{cluster.address('server2')}"
    done = subprocess.run(["ssh", *options, *identity, where, "hostname"], capture_output=True, text=True)
    assert (done.stdout, known_hosts().stat().st_mode & 0o022) == ("server2\n", 0)


def test_a_no_records_nothing() -> None:
    known_hosts().unlink()
    terminal = Terminal("trust", "server1")
    terminal.expect("Record 1 new key? [y/N]")
    terminal.type("n\n")
    assert "nothing was recorded" in terminal.finish(1)
    assert not known_hosts().exists()


def test_without_a_terminal_nobody_can_say_yes_but_an_option(cluster: Cluster) -> None:
    known_hosts().unlink()
    assert "nobody is here to say yes" in ringctl("trust", code=2).stderr
    assert not known_hosts().exists()
    assert ringctl("trust", "server2", "--yes").stdout.count(fingerprint(cluster, "server2")) == 2
    assert len(known_hosts().read_text().splitlines()) == 1


def test_trust_of_a_host_that_is_not_there_names_those_that_are() -> None:
    assert (
        "'server9' is not a host of the inventory, which has server1"
        in ringctl("trust", "server9", code=2).stderr
    )


def test_trust_needs_no_key_of_ours(cluster: Cluster, tmp_path: Path) -> None:
    inventory(cluster, defaults={"identity_file": str(new_key(tmp_path / "stranger"))})
    with agents() as found:
        shown = found["server1"].transport.host_key()
    assert shown is not None
    assert (shown.fingerprint, shown.file) == (fingerprint(cluster, "server1"), "")


def test_trust_ends_where_the_file_that_is_written_is_not_the_one_that_is_read() -> None:
    ssh_config("UserKnownHostsFile /dev/null")
    assert (
        "was recorded in /dev/null, but is not known from there" in ringctl("trust", "--yes", code=4).stderr
    )


@pytest.mark.parametrize(
    ("file", "code", "words"),
    [
        ("none", 2, "there is no file to record the key of"),
        ("/proc/nothing/known_hosts", 1, "in /proc/nothing/known_hosts: No such file or directory"),
        ("/etc", 1, "in /etc: Is a directory"),
    ],
)
def test_trust_says_so_where_nothing_can_be_recorded(
    cluster: Cluster, file: str, code: int, words: str
) -> None:
    inventory(cluster, only=("server1",))
    ssh_config(f"UserKnownHostsFile {file}")
    done = ringctl("trust", "--yes", code=code)
    assert words in done.stderr
    assert "UserKnownHostsFile" in done.stderr
    assert "Traceback" not in done.stderr


# --- Changed -------------------------------------------------------------------------------------


def test_a_changed_key_is_refused_with_both_fingerprints_and_no_way_to_skip(
    cluster: Cluster, tmp_path: Path
) -> None:
    old = another_key(tmp_path)
    where = cluster.address("server2")
    lines = known_hosts().read_text().splitlines()
    lines = [f"server2,{where} {old}" if line.startswith("server2,") else line for line in lines]
    known_hosts().write_text("\n".join(lines) + "\n")
    before = known_hosts().read_bytes()
    for command in (("exec", "--", "true"), ("trust", "--yes")):
        done = ringctl(*command, code=4)
        assert f"server2: the host key of {where} has changed" in done.stderr
        assert fingerprint_of(old) in done.stderr
        assert fingerprint(cluster, "server2") in done.stderr
        assert f"ssh-keygen -R {where}" in done.stderr
    assert known_hosts().read_bytes() == before


def test_a_key_of_another_kind_than_the_known_one_counts_as_changed(cluster: Cluster, tmp_path: Path) -> None:
    old = another_key(tmp_path, "ecdsa")
    known_hosts().write_text(f"{cluster.address('server1')} {old}\n")
    error = refusal("server1")
    assert error.exit_code == 4
    assert "has changed" in error.message
    assert fingerprint_of(old) in error.message


def test_a_revoked_key_is_refused_and_cannot_be_trusted(cluster: Cluster) -> None:
    where, key = cluster.address("server1"), public_key(cluster, "server1")
    known_hosts().write_text(f"{where} {key}\n@revoked * {key}\n")
    assert "is marked as revoked" in refusal("server1").message
    before = known_hosts().read_bytes()
    assert "is marked as revoked" in ringctl("trust", "server1", "--yes", code=4).stderr
    assert known_hosts().read_bytes() == before


# --- What known_hosts may look like --------------------------------------------------------------


def test_any_of_several_keys_that_are_known_for_a_host_will_do(cluster: Cluster, tmp_path: Path) -> None:
    where, key = cluster.address("server1"), public_key(cluster, "server1")
    others = [another_key(tmp_path), another_key(tmp_path, "ecdsa")]
    for lines in ([key, *others], [*others, key], [others[1], key, others[0]]):
        known_hosts().write_text("".join(f"{where} {line}\n" for line in lines))
        assert sh("server1", "hostname") == "server1\n"
    known_hosts().write_text("".join(f"{where} {line}\n" for line in others))
    assert fingerprint_of(others[0]) in refusal("server1").message, "the one of the same kind is compared"


def test_a_host_key_alias_and_a_file_with_a_space_in_its_name_are_looked_at(cluster: Cluster) -> None:
    folder = dot_ssh() / "my keys"
    folder.mkdir()
    (folder / "known").write_text(f"thebox {public_key(cluster, 'server1')}\n")
    known_hosts().unlink()
    ssh_config(
        f'UserKnownHostsFile "{folder}/known"\nHost {cluster.address("server1")}\n  HostKeyAlias thebox'
    )
    assert sh("server1", "hostname") == "server1\n"
    assert "unknown host key" in refusal("server2").message


def test_names_are_looked_up_in_small_letters_as_ssh_does(cluster: Cluster) -> None:
    target = sshconfig.SshConfig(()).lookup("Server1.LAB")
    known_hosts().write_text(f"server1.lab {public_key(cluster, 'server1')}\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(known_hosts())], check=True, capture_output=True)
    trusted, _ = known_keys([str(known_hosts())], target.known_as)
    assert [key.get_base64() for key in trusted] == public_key(cluster, "server1").split()[1:2]


def test_hashed_known_hosts_work(cluster: Cluster) -> None:
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(known_hosts())], check=True, capture_output=True)
    assert cluster.address("server1") not in known_hosts().read_text()
    assert sh("server1", "hostname") == "server1\n"


def test_patterns_markers_and_nonsense_in_known_hosts_are_read_as_ssh_reads_them(cluster: Cluster) -> None:
    where, key = cluster.address("server1"), public_key(cluster, "server1")
    nonsense = (
        "@cert-authority * ssh-ed25519 AAAA\nserver1 ssh-what AAAA\n|1|x|y ssh-ed25519 !!!\nword\n\xff\xfe\n"
    )
    network = where.rpartition(".")[0]
    known_hosts().write_text(f"{nonsense}!{where},{network}.* {key}\n", encoding="latin-1")
    assert "unknown host key" in refusal("server1").message
    known_hosts().write_text(f"{nonsense}{network}.? {key}\n", encoding="latin-1")
    assert sh("server1", "hostname") == "server1\n"


# --- Pinned in the inventory ---------------------------------------------------------------------


def test_a_key_pinned_in_the_inventory_needs_no_known_hosts(cluster: Cluster) -> None:
    known_hosts().unlink()
    inventory(
        cluster,
        server1={"host_key": " ".join(public_key(cluster, "server1").split()[:2]) + " root@server1, 2026"},
    )
    assert sh("server1", "hostname") == "server1\n"
    assert "unknown host key" in refusal("server2").message


def test_a_pin_counts_more_than_known_hosts_and_trust_does_not_get_around_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    inventory(cluster, server1={"host_key": another_key(tmp_path)})
    error = refusal("server1")
    assert error.exit_code == 4
    assert "has changed" in error.message
    assert "has changed" in ringctl("trust", "server1", "--yes", code=4).stderr


@pytest.mark.parametrize(
    "pin", ["ssh-ed25519 AAAA", "ssh-what AAAAC3NzaC1lZDI1NTE5AAAAIA==", "ssh-rsa AAAAC3Nz"]
)
def test_a_pin_that_is_no_key_is_a_mistake_in_the_inventory(cluster: Cluster, pin: str) -> None:
    inventory(cluster, server1={"host_key": pin})
    error = refusal("server1")
    assert isinstance(error, InputError)
    assert error.message.startswith("host_key of server1: ")
