"""The test cluster keeps its promises: real hosts, faults that act as named, and nothing left afterwards."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from . import CONTROLLER, Cluster, ClusterError, LoopbackCluster, image, processes
from .commands import wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "scripts" / "cluster"

DIAL = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=0.5)"
SEND_DATAGRAM = "import socket, sys; socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', (sys.argv[1], 5000))"
RECEIVE_DATAGRAM = """
import socket
receiver = socket.socket(type=socket.SOCK_DGRAM)
receiver.bind(("", 5000))
print("ready", flush=True)
print(receiver.recvfrom(9)[1][0], flush=True)
"""
# Sends back one line for each line it gets.
ECHO_SERVER = """
import socket, sys
server = socket.create_server(("", 7000))
print("ready", flush=True)
while True:
    connection = server.accept()[0]
    with connection, connection.makefile("rw") as stream:
        try:
            for line in stream:
                stream.write(line)
                stream.flush()
        except OSError:
            pass
"""
ECHO_CLIENT = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 7000))
connection.settimeout(1)
with connection.makefile("rw") as stream:
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            stream.write(line)
            stream.flush()
            print("echo" if stream.readline() == line else "closed", flush=True)
        except OSError as error:
            print(type(error).__name__, flush=True)
            break
"""
TAKE = """
import socket, sys, time
server = socket.create_server(("", 6000))
print("ready", flush=True)
connection = server.accept()[0]
received, begun = 0, time.monotonic()
while data := connection.recv(1 << 16):
    received += len(data)
print(received, time.monotonic() - begun, flush=True)
"""
GIVE = "import socket, sys; socket.create_connection((sys.argv[1], 6000)).sendall(bytes(int(sys.argv[2])))"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(4, folder=tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


def ssh(
    cluster: Cluster | LoopbackCluster, host: str, command: str, *options: str
) -> subprocess.CompletedProcess[str]:
    # The default key exchange takes 0.2 s of processor time, and is not what is tested here.
    usual = ("-o", "BatchMode=yes", "-o", "KexAlgorithms=curve25519-sha256", "-o", "ConnectTimeout=10")
    argv = ["ssh", "-F", str(cluster.ssh_config), *options, *usual, host, command]
    return subprocess.run(argv, capture_output=True, text=True, timeout=20)


def silent(cluster: Cluster, host: str) -> bool:
    """Whether nothing at all answers an SSH client."""
    answer = ssh(cluster, host, "true", "-o", "ConnectTimeout=1")
    return answer.returncode == 255 and "timed out" in answer.stderr


def python(cluster: Cluster, host: str, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return cluster.run(host, "python3", "-I", "-S", "-c", code, *arguments, check=False)


def start_python(cluster: Cluster, host: str, code: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a program on a host and wait until it says that it is ready."""
    program = cluster.spawn(host, "python3", "-I", "-S", "-u", "-c", code, *arguments)
    assert read(program) == "ready"
    return program


def read(program: subprocess.Popen[str]) -> str:
    assert program.stdout
    return program.stdout.readline().strip()


def ask(program: subprocess.Popen[str]) -> str:
    assert program.stdin
    program.stdin.write("hello\n")
    program.stdin.flush()
    return read(program)


def end(*programs: subprocess.Popen[str]) -> None:
    for program in programs:
        program.kill()
        program.communicate()


def reaches(cluster: Cluster, host: str, peer: str, port: int = 22) -> bool:
    return python(cluster, host, DIAL, cluster.address(peer), str(port)).returncode == 0


# --- The hosts -----------------------------------------------------------------------------------


def test_every_host_runs_a_command_for_its_user_over_ssh(cluster: Cluster) -> None:
    for host in cluster.names:
        answer = ssh(cluster, host, "hostname; id -un; pwd; ulimit -n")
        assert answer.stdout.split() == [host, "train", "/home/train", "1024"], answer.stderr


def test_hosts_have_host_keys_of_their_own_and_only_known_hosts_makes_them_trusted(cluster: Cluster) -> None:
    keys = {cluster.path(host, "/etc/ssh/ssh_host_ed25519_key.pub").read_text() for host in cluster.names}
    assert len(keys) == 4
    untrusted = ssh(cluster, "server1", "true", "-o", "UserKnownHostsFile=/dev/null")
    assert untrusted.returncode == 255
    assert "Host key verification failed" in untrusted.stderr


def test_another_key_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True)
    config = tmp_path / "config"
    config.write_text(
        cluster.ssh_config.read_text().replace(str(cluster.identity_file), str(tmp_path / "key"))
    )
    answer = subprocess.run(
        ["ssh", "-F", config, "-o", "BatchMode=yes", "server1", "true"],
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert answer.returncode == 255
    assert "Permission denied (publickey)" in answer.stderr


def test_the_inventory_names_every_host_and_what_reaches_it(cluster: Cluster) -> None:
    inventory = yaml.safe_load(cluster.hosts_file.read_text())
    assert [host["name"] for host in inventory["hosts"]] == list(cluster.names)
    assert [host["address"] for host in inventory["hosts"]] == [
        cluster.address(host) for host in cluster.names
    ]
    assert inventory["defaults"]["env"] == {"python": cluster.python}
    assert Path(inventory["defaults"]["identity_file"]).stat().st_mode & 0o777 == 0o600


def test_the_home_for_controllers_reaches_the_hosts_too(cluster: Cluster) -> None:
    config = cluster.home / ".ssh" / "config"
    answer = subprocess.run(
        ["ssh", "-F", config, "server4", "hostname"], capture_output=True, text=True, timeout=20
    )
    assert answer.stdout == "server4\n", answer.stderr
    assert str(cluster.known_hosts) not in config.read_text()  # so that spoiling one set leaves the other


@pytest.mark.parametrize("folder", ["/home/train", "/tmp", "/dev/shm", "/var/tmp"])
def test_what_one_host_writes_no_other_host_and_not_this_machine_sees(cluster: Cluster, folder: str) -> None:
    name = f"{folder}/written-by-server1"
    cluster.run("server1", "touch", name)
    assert cluster.run("server1", "test", "-e", name, check=False).returncode == 0
    for host in cluster.names[1:]:
        assert cluster.run(host, "test", "-e", name, check=False).returncode == 1
    assert not Path(name).exists()


def test_interface_names_differ_from_host_to_host(cluster: Cluster) -> None:
    seen = [set(cluster.run(host, "ls", "/sys/class/net").stdout.split()) - {"lo"} for host in cluster.names]
    assert seen == [{cluster.ifname(host)} for host in cluster.names]
    assert len(set.union(*seen)) == 4


def test_hosts_know_each_other_by_name(cluster: Cluster) -> None:
    for host in cluster.names:
        for peer in cluster.names:
            assert cluster.run(host, "getent", "hosts", peer).stdout.split()[0] == cluster.address(peer)
    cluster.write_hosts("server4", {"server1": cluster.address("server2")})
    assert cluster.run("server4", "getent", "hosts", "server1").stdout.split()[0] == cluster.address(
        "server2"
    )
    assert cluster.run("server4", "getent", "hosts", "server3", check=False).returncode == 2
    cluster.write_hosts("server4", {host: cluster.address(host) for host in cluster.names})


def test_the_user_can_import_torch_but_nothing_of_this_project(cluster: Cluster) -> None:
    assert ssh(cluster, "server1", f"{cluster.python} -c 'import torch'").returncode == 0
    for package in ("trainer", "launcher"):
        answer = cluster.run("server1", cluster.python, "-c", f"import {package}", check=False)
        assert "ModuleNotFoundError" in answer.stderr
    assert cluster.run("server1", "test", "-e", str(REPOSITORY / "trainer"), check=False).returncode == 1


def test_a_project_installed_into_the_environment_is_hidden_from_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(image, "_OURS", ("yaml",))  # stands for it: a package that is surely installed
    with Cluster(1) as cluster:
        answer = cluster.run("server1", cluster.python, "-c", "import yaml", check=False)
    assert "ModuleNotFoundError: yaml is not installed on test hosts" in answer.stderr


def test_looking_shows_what_runs_and_listens_on_a_host_and_only_there(cluster: Cluster) -> None:
    server = start_python(cluster, "server2", ECHO_SERVER)
    (process,) = cluster.processes("server2")
    assert (process.name, process.uid) == ("python3", image.USER_ID)
    assert cluster.listening_ports("server2") == {22, 7000}
    assert cluster.listening_ports("server1") == {22}
    assert cluster.processes("server1") == []
    end(server)
    wait_until(lambda: cluster.processes("server2") == [], "the server's end")
    assert cluster.listening_ports("server2") == {22}


def test_two_clusters_live_side_by_side(cluster: Cluster) -> None:
    with Cluster(1) as other:
        assert other.address("server1") != cluster.address("server1")
        assert ssh(other, "server1", "hostname").returncode == 0
    assert ssh(cluster, "server1", "hostname").returncode == 0


def test_a_decoy_interface_and_a_loopback_name_are_there_when_asked_for() -> None:
    with Cluster(2, decoy=True, own_name_loopback=True) as cluster:
        assert (
            "172.17.0.1/16" in cluster.run("server2", "ip", "-4", "address", "show", "docker0", "up").stdout
        )
        assert cluster.run("server2", "getent", "hosts", "server2").stdout.split()[0] == "127.0.1.1"
        assert cluster.run("server2", "getent", "hosts", "server1").stdout.split()[0] == cluster.address(
            "server1"
        )
        assert reaches(cluster, "server2", "server1")


def test_a_large_cluster_does_not_fill_the_neighbour_table() -> None:
    with Cluster(22) as cluster:
        neighbours = cluster.run("server22", "ip", "neigh", "show", "nud", "permanent").stdout.splitlines()
        assert len(neighbours) == 22  # 21 hosts and the controller
        assert reaches(cluster, "server22", "server1")


# --- Faults of the network -----------------------------------------------------------------------


def test_a_cut_host_is_out_of_reach_until_it_is_healed(cluster: Cluster) -> None:
    cluster.cut("server3")
    assert not reaches(cluster, "server1", "server3")
    assert silent(cluster, "server3")
    assert reaches(cluster, "server1", "server2")
    cluster.heal("server3")
    wait_until(lambda: reaches(cluster, "server1", "server3"), "the way back")
    assert ssh(cluster, "server3", "hostname").stdout == "server3\n"


def test_a_dropped_port_is_closed_to_the_named_peer_alone(cluster: Cluster) -> None:
    cluster.drop_port("server1", 22, from_="server2")
    assert not reaches(cluster, "server2", "server1")
    assert reaches(cluster, "server3", "server1")
    cluster.drop_port("server1", 22, from_=CONTROLLER)
    assert silent(cluster, "server1")
    cluster.clear_rules("server1")
    assert reaches(cluster, "server2", "server1")
    assert ssh(cluster, "server1", "true").returncode == 0


def test_a_firewall_for_new_connections_leaves_the_old_ones_and_those_going_out(cluster: Cluster) -> None:
    server = start_python(cluster, "server1", ECHO_SERVER)
    client = start_python(cluster, "server2", ECHO_CLIENT, cluster.address("server1"))
    cluster.drop_port("server1", (1024, 65535), new_only=True)
    assert ask(client) == "echo"
    assert not reaches(cluster, "server3", "server1", 7000)
    assert reaches(cluster, "server1", "server3")
    cluster.drop_port("server1", (1024, 65535))
    assert ask(client) == "TimeoutError"
    cluster.clear_rules("server1")
    end(server, client)


def test_a_reset_port_breaks_open_connections(cluster: Cluster) -> None:
    server = start_python(cluster, "server1", ECHO_SERVER)
    client = start_python(cluster, "server2", ECHO_CLIENT, cluster.address("server1"))
    assert ask(client) == "echo"
    cluster.reset_port("server1", 7000)
    assert ask(client) == "ConnectionResetError"
    cluster.clear_rules("server1")
    end(server, client)


def test_a_drop_from_one_peer_is_one_way(cluster: Cluster) -> None:
    cluster.drop_from("server1", "server2")
    receivers = {host: start_python(cluster, host, RECEIVE_DATAGRAM) for host in ("server1", "server2")}
    python(cluster, "server2", SEND_DATAGRAM, cluster.address("server1"))
    python(cluster, "server3", SEND_DATAGRAM, cluster.address("server1"))
    python(cluster, "server1", SEND_DATAGRAM, cluster.address("server2"))
    assert read(receivers["server1"]) == cluster.address("server3")
    assert read(receivers["server2"]) == cluster.address("server1")
    cluster.clear_rules("server1")
    end(*receivers.values())


def test_a_drop_between_two_hosts_leaves_the_others(cluster: Cluster) -> None:
    cluster.drop_between("server1", "server2")
    assert not reaches(cluster, "server1", "server2")
    assert not reaches(cluster, "server2", "server1")
    assert reaches(cluster, "server3", "server1")
    assert reaches(cluster, "server3", "server2")
    cluster.clear_rules("server1")
    cluster.clear_rules("server2")
    assert reaches(cluster, "server1", "server2")


def seconds_to_send(cluster: Cluster, sender: str, receiver: str, size: int) -> float:
    taker = start_python(cluster, receiver, TAKE)
    python(cluster, sender, GIVE, cluster.address(receiver), str(size))
    received, seconds = read(taker).split()
    end(taker)
    assert int(received) == size
    return float(seconds)


@pytest.mark.parametrize(("sender", "receiver"), [("server1", "server2"), ("server2", "server1")])
def test_a_rate_limit_slows_what_a_host_sends_and_what_it_gets(
    cluster: Cluster, sender: str, receiver: str
) -> None:
    size = 4_000_000
    unlimited = seconds_to_send(cluster, sender, receiver, size)
    cluster.limit_rate("server1", "40mbit")
    slow = seconds_to_send(cluster, sender, receiver, size)
    cluster.limit_rate("server1", "160mbit")
    faster = seconds_to_send(cluster, sender, receiver, size)
    cluster.limit_rate("server1", None)
    lifted = seconds_to_send(cluster, sender, receiver, size)
    assert slow > 4 * unlimited
    assert 2 < slow / faster < 8  # four times the rate
    assert slow > 4 * lifted


def test_a_smaller_mtu_is_seen_on_the_host(cluster: Cluster) -> None:
    cluster.set_mtu("server4", 1300)
    assert cluster.run("server4", "cat", f"/sys/class/net/{cluster.ifname('server4')}/mtu").stdout == "1300\n"
    cluster.set_mtu("server4", 1500)


# --- Faults of a host ----------------------------------------------------------------------------


def boot_id(cluster: Cluster, host: str) -> str:
    return cluster.run(host, "cat", "/proc/sys/kernel/random/boot_id").stdout


def test_a_reboot_ends_all_processes_empties_tmp_keeps_the_disk_and_changes_the_boot_id(
    cluster: Cluster,
) -> None:
    before = boot_id(cluster, "server3")
    assert boot_id(cluster, "server4") != before
    cluster.run("server3", "touch", "/tmp/volatile", "/home/train/durable")
    ssh(cluster, "server3", "setsid sleep 1000 >/dev/null 2>&1 </dev/null &")
    wait_until(
        lambda: [process.argv for process in cluster.processes("server3")] == [("sleep", "1000")],
        "a process that outlives its session",
    )
    cluster.reboot("server3")
    assert cluster.processes("server3") == []
    assert boot_id(cluster, "server3") not in (before, boot_id(cluster, "server4"))
    assert ssh(cluster, "server3", "ls /tmp /home/train").stdout.split() == [
        "/home/train:",
        "durable",
        "/tmp:",
    ]


def test_a_killed_host_takes_no_other_with_it_and_stays_off_until_it_is_booted(cluster: Cluster) -> None:
    elsewhere = start_python(cluster, "server1", ECHO_SERVER)
    client = start_python(cluster, "server4", ECHO_CLIENT, cluster.address("server1"))
    cluster.kill_host("server4")
    assert read(client) == ""  # its end
    assert cluster.processes("server4") == []
    assert cluster.listening_ports("server4") == set()
    assert ssh(cluster, "server4", "true").returncode == 255
    assert len(cluster.processes("server1")) == 1
    cluster.boot("server4")
    assert ssh(cluster, "server4", "hostname").stdout == "server4\n"
    end(elsewhere, client)


def test_a_host_without_power_closes_no_connection(cluster: Cluster) -> None:
    server = start_python(cluster, "server4", ECHO_SERVER)
    client = start_python(cluster, "server1", ECHO_CLIENT, cluster.address("server4"))
    assert ask(client) == "echo"
    cluster.power_off("server4")
    assert ask(client) == "TimeoutError"
    cluster.boot("server4")
    cluster.heal("server4")
    wait_until(lambda: reaches(cluster, "server1", "server4"), "the way back")
    end(server, client)


def test_stopping_sshd_refuses_new_connections_and_leaves_open_ones(cluster: Cluster) -> None:
    argv = ["ssh", "-F", str(cluster.ssh_config), "server2", "cat"]
    session = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert ask(session) == "hello"
    cluster.stop_sshd("server2")
    assert not reaches(cluster, "server1", "server2")
    assert ask(session) == "hello"
    cluster.start_sshd("server2")
    assert ssh(cluster, "server2", "ulimit -n").stdout == "1024\n"
    cluster.end_sessions("server2")
    assert read(session) == ""
    end(session)
    assert ssh(cluster, "server2", "true").returncode == 0


def test_a_full_disk_says_so_until_it_is_freed(cluster: Cluster) -> None:
    write = ("dd", "if=/dev/zero", "of=/home/train/data", "bs=64k", "count=1")
    cluster.fill_disk("server2")
    assert "No space left on device" in cluster.run("server2", *write, check=False).stderr
    assert cluster.run("server1", *write, check=False).returncode == 0
    assert cluster.run("server2", "touch", "/tmp/elsewhere", check=False).returncode == 0
    cluster.free_disk("server2")
    assert cluster.run("server2", *write, check=False).returncode == 0


def test_without_inodes_no_file_can_be_made_but_data_can_be_written(cluster: Cluster) -> None:
    cluster.run("server2", "touch", "/home/train/old")
    cluster.use_up_inodes("server2")
    refused = cluster.run("server2", "touch", "/home/train/new", check=False)
    assert "No space left on device" in refused.stderr
    cluster.run("server2", "dd", "if=/dev/zero", "of=/home/train/old", "bs=64k", "count=1", "conv=notrunc")
    cluster.free_disk("server2")
    cluster.run("server2", "touch", "/home/train/new")


def test_limits_of_open_files_and_shared_memory_hold_for_logins(cluster: Cluster) -> None:
    cluster.limit_open_files("server4", 64)
    cluster.resize_shm("server4", "1m")
    assert ssh(cluster, "server4", "ulimit -Hn; df --output=size -k /dev/shm | tail -1").stdout.split() == [
        "64",
        "1024",
    ]
    cluster.reboot("server4")
    assert ssh(cluster, "server4", "ulimit -n").stdout == "1024\n"


def test_a_host_over_its_memory_limit_has_a_process_killed(cluster: Cluster) -> None:
    take_memory = "python3 -I -S -c 'bytearray(200 << 20)'"
    assert ssh(cluster, "server2", take_memory).returncode == 0
    cluster.limit_memory("server2", 100 << 20)
    assert ssh(cluster, "server2", f"{take_memory}; echo $?").stdout == "137\n"
    assert ssh(cluster, "server1", take_memory).returncode == 0
    cluster.reboot("server2")
    assert ssh(cluster, "server2", take_memory).returncode == 0


# --- Nothing left --------------------------------------------------------------------------------


def namespaces(pid: int) -> set[str]:
    return {os.readlink(f"/proc/{pid}/ns/{kind}") for kind in ("net", "mnt", "uts", "ipc", "pid")}


def traces(mark: str, folder: Path, own: set[str]) -> list[str]:
    """What is still to be seen of a cluster, by its mark, its folder and the namespaces that were its own."""
    found = [f"process {pid}" for pid in processes.marked(mark)]
    found += [
        f"process {process.pid} in a namespace"
        for process in processes.everything()
        if own & _seen(process.pid)
    ]
    found += [
        f"mount {line}"
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
        if str(folder) in line
    ]
    found += [f"interface {path.name}" for path in Path("/sys/class/net").iterdir() if mark in path.name]
    found += [str(path) for path in Path("/run").glob(f"*/*{mark}*")]
    found += [str(path) for path in Path("/sys/fs/cgroup").rglob(f"rc{mark}*")]
    return found + ([str(folder)] if folder.exists() else [])


def _seen(pid: int) -> set[str]:
    try:
        return namespaces(pid)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()  # it ended, or it is one that even root may not look into, and then not ours


def mark_of(cluster: Cluster) -> str:
    return cluster.ifname(CONTROLLER).removeprefix("rc")


def test_nothing_is_left_after_the_end(tmp_path: Path) -> None:
    with Cluster(2, folder=tmp_path / "made") as cluster:
        ssh(cluster, "server1", "setsid sleep 1000 >/dev/null 2>&1 </dev/null &")
        (sleeper,) = cluster.processes("server1")
        own = namespaces(sleeper.pid) - namespaces(os.getpid())
        assert len(own) == 5
        assert len(traces(mark_of(cluster), cluster.folder, own)) > 5  # so that finding none means something
        cluster.limit_memory("server1", 100 << 20)
        cluster.kill_host("server2")
    assert traces(mark_of(cluster), cluster.folder, own) == []


def test_a_failed_start_leaves_nothing(tmp_path: Path) -> None:
    cluster = Cluster(2, folder=tmp_path / "made", rate="fast")
    with pytest.raises(ClusterError, match="rate 'fast'"):
        cluster.start()
    assert traces(mark_of(cluster), cluster.folder, set()) == []


def test_a_folder_with_something_in_it_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ClusterError, match="is not empty"):
        Cluster(1, folder=tmp_path).start()
    assert (tmp_path / "thesis.tex").exists()


START_AND_WAIT = """
import sys, time
from pathlib import Path
from tests.cluster import CONTROLLER, Cluster
cluster = Cluster(2, folder=Path(sys.argv[1])).start()
(sleeper,) = [cluster.spawn("server1", "sleep", "1000")]
print(cluster.ifname(CONTROLLER).removeprefix("rc"), flush=True)
time.sleep(60)
"""


def killed_owner(folder: Path) -> str:
    """Start a cluster in another process, SIGKILL that process, and return the mark of what it left."""
    owner = subprocess.Popen(
        [sys.executable, "-c", START_AND_WAIT, str(folder)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    mark = read(owner)
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    assert len(traces(mark, folder, set())) > 5
    return mark


def script(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=60)


def test_what_a_killed_owner_left_is_removed_by_down_and_nothing_else(
    cluster: Cluster, tmp_path: Path
) -> None:
    mark = killed_owner(tmp_path / "made")
    down = script("down", "--dir", tmp_path / "none")
    assert str(tmp_path / "made") in down.stdout, down.stderr
    assert traces(mark, tmp_path / "made", set()) == []
    assert ssh(cluster, "server1", "hostname").stdout == "server1\n"


def test_what_a_killed_owner_left_is_removed_by_the_next_start(tmp_path: Path) -> None:
    mark = killed_owner(tmp_path / "made")
    with Cluster(1, folder=tmp_path / "made"):
        assert traces(mark, tmp_path / "none", set()) == []


def test_the_script_starts_hosts_that_outlive_it_and_removes_them(tmp_path: Path) -> None:
    folder = tmp_path / "people"
    up = script("up", "--hosts", "2", "--rate", "200mbit", "--dir", folder)
    assert "2 hosts are up, each link at 200mbit" in up.stdout, up.stderr
    again = script("up", "--dir", folder)
    assert (again.returncode, again.stdout) == (1, "")
    assert f"{folder} is not empty" in again.stderr
    login = next(line for line in up.stdout.splitlines() if line.startswith("    ssh "))
    answer = subprocess.run([*login.split(), "hostname"], capture_output=True, text=True, timeout=20)
    assert answer.stdout == "server1\n", answer.stderr
    down = script("down", "--dir", folder)
    assert str(folder) in down.stdout, down.stderr
    assert not folder.exists()


# --- Without root --------------------------------------------------------------------------------


def test_loopback_hosts_are_apart_and_know_their_processes(tmp_path: Path) -> None:
    with LoopbackCluster(2, folder=tmp_path / "made") as loopback:
        assert (
            ssh(
                loopback, "server1", "touch ~/mine; setsid sleep 1000 >/dev/null 2>&1 </dev/null &"
            ).returncode
            == 0
        )
        assert loopback.path("server1", "mine").exists()
        assert not loopback.path("server2", "mine").exists()
        (sleeper,) = loopback.processes("server1")
        assert sleeper.argv == ("sleep", "1000")
        loopback.stop_sshd("server1")
        assert ssh(loopback, "server1", "true").returncode == 255
        assert ssh(loopback, "server2", "true").returncode == 0
        loopback.start_sshd("server1")
        assert ssh(loopback, "server1", "true").returncode == 0
        assert loopback.processes("server1") == [sleeper]
        loopback.kill_host("server1")
        assert loopback.processes("server1") == []
        assert ssh(loopback, "server2", "setsid sleep 1000 >/dev/null 2>&1 </dev/null &").returncode == 0
        (left,) = loopback.processes("server2")
    assert processes.start_time(left.pid) is None
    assert not (tmp_path / "made").exists()


LOOPBACK = """
import subprocess
from tests.cluster import Cluster, ClusterError, LoopbackCluster
try:
    Cluster(1).start()
except ClusterError as error:
    print(error)
with LoopbackCluster(3) as loopback:
    for host in loopback.names:
        argv = ["ssh", "-F", str(loopback.ssh_config), host, "id -un; basename $(dirname ~)"]
        print(*subprocess.run(argv, capture_output=True, text=True, timeout=20).stdout.split())
"""


def test_loopback_hosts_need_no_root(cluster: Cluster) -> None:
    shutil.copytree(Path(__file__).parent, cluster.path("server1", "/home/train/lib/tests/cluster"))
    argv = ("env", "PYTHONPATH=/home/train/lib", "PYTHONDONTWRITEBYTECODE=1", cluster.python, "-c", LOOPBACK)
    answer = cluster.run("server1", *argv)
    assert answer.stdout.splitlines() == [
        "network namespaces need root; LoopbackCluster does not",
        "train server1",
        "train server2",
        "train server3",
    ], answer.stderr
    assert cluster.processes("server1") == []
    assert cluster.listening_ports("server1") == {22}
    assert cluster.run("server1", "sh", "-c", "ls -d /tmp/ringctl*", check=False).stdout == ""
