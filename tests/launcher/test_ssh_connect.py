"""Getting to a host: ~/.ssh/config, jumps, agents, passphrases, odd shells; one sentence when it fails."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.errors import HostError, InputError
from launcher.transport import sshconfig
from launcher.transport.connect import AT_ONCE_S, TRIES, retried, ssh_words
from launcher.transport.sshconfig import SshConfig, name_of
from launcher.transport.sshlines import parsed
from tests.cluster import CONTROLLER, Cluster
from tests.conftest import eventually
from tests.launcher.hosts import (
    HOME,
    Hosts,
    Terminal,
    agents,
    dot_ssh,
    fingerprint,
    host_file,
    inventory,
    login_shell,
    new_key,
    refusal,
    sh,
    ssh_agent,
    ssh_config,
    sshd_option,
    write_home,
)
from tests.launcher.ringctl import ringctl, wait_for

pytestmark = pytest.mark.usefixtures("cluster")

HUNG_UP = "the server hung up in the middle"
WHO = "id -un; hostname; set -- $SSH_CONNECTION; echo $1 $4"


def came_from(cluster: Cluster, peer: str, port: int = 22) -> str:
    return f"{cluster.address(peer)} {port}\n"


@contextlib.contextmanager
def second_sshd(cluster: Cluster, host: str, port: int) -> Iterator[None]:
    argv = ("/usr/sbin/sshd", "-D", "-p", str(port), "-o", "PidFile=none")
    sshd = cluster.spawn(host, *argv, user="root")
    try:
        wait_for(lambda: port in cluster.listening_ports(host), f"port {port}")
        yield
    finally:
        sshd.kill()
        sshd.wait()
        for stream in (sshd.stdin, sshd.stdout):
            assert stream is not None
            stream.close()


# --- ~/.ssh/config -------------------------------------------------------------------------------


def test_the_users_ssh_config_says_where_who_and_with_which_key(cluster: Cluster) -> None:
    where = cluster.address("server3")
    key = Path(cluster.identity_file).read_text()
    (dot_ssh() / "special").write_text(key)
    ssh_config(f"Host box\n  HostName {where}\n  Port 2222\n  User train\n  IdentityFile ~/.ssh/special\n")
    (dot_ssh() / "id_ed25519").unlink()
    words = cluster.path("server3", "/etc/ssh/ssh_host_ed25519_key.pub").read_text()
    (dot_ssh() / "known_hosts").write_text(f"[{where}]:2222 {words}")
    Path(os.environ["RINGCTL_HOSTS"]).write_text("hosts: [box]\n")
    with second_sshd(cluster, "server3", 2222):
        assert sh("box", WHO) == "train\nserver3\n" + came_from(cluster, CONTROLLER, 2222)


def test_the_inventory_counts_more_than_the_ssh_config(cluster: Cluster) -> None:
    ssh_config("Host *\n  User nobody\n  Port 2222\n")
    inventory(cluster, server1={"user": "train", "port": 22})
    assert sh("server1", "id -un") == "train\n"


def test_included_files_of_the_ssh_config_count(cluster: Cluster) -> None:
    (dot_ssh() / "config.d").mkdir()
    (dot_ssh() / "config.d" / "lab").write_text(
        f"Host box\n  HostName {cluster.address('server2')}\n  IdentityFile {cluster.identity_file}\n"
    )
    ssh_config("Include config.d/* nowhere/*\nUser train\nInclude config")
    Path(os.environ["RINGCTL_HOSTS"]).write_text("hosts: [box]\n")
    assert sh("box", "id -un; hostname") == "train\nserver2\n"


def test_an_ssh_config_that_cannot_be_read_is_a_mistake_of_the_user() -> None:
    ssh_config('Match nonsense "')
    error = refusal("server1")
    assert isinstance(error, InputError)
    assert error.message.startswith("~/.ssh/config: ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Port abc", "~/.ssh/config: line 1: Port abc: not a port"),
        ("Host *\n  ConnectTimeout soon", "line 2: ConnectTimeout soon: not a time"),
        ("ProxyJump server3:abc", "'server3:abc' is not [user@]host[:port]"),
        ("Match nonsense x", "line 1: Match nonsense x: nonsense is nothing that can be matched"),
        ("Foo", "line 1: Foo has no value"),
    ],
)
def test_a_value_in_the_ssh_config_that_means_nothing_is_shown_with_its_line(text: str, words: str) -> None:
    ssh_config(text)
    done = ringctl("exec", "--include", "server1,server2", "--", "true", code=2)
    assert words in done.stderr
    assert "Traceback" not in done.stderr


IN_SSH = ("hostname", "user", "port", "hostkeyalias", "userknownhostsfile", "proxyjump", "proxycommand")


@pytest.mark.parametrize("who", [(), ("-l", "train", "-p", "23")], ids=["plain", "with user and port"])
@pytest.mark.parametrize(
    "text",
    [
        "Include\t{0}/star\nUser late\n",
        "Host other\n  Include {0}/star\n",
        "Host other\n  Include {0}/bare\n  User x\nHost b*\n  Port 5\n",
        "Host box\n  Include {0}/bare\n  Port 9\n",
        "Match user train\n  Port 99\nMatch !user train\n  Port 98\n",
        "HostName %h.example.org\nMatch host box.example.org\n  User x\n",
        "Match originalhost b*,!box\n  Port 3\nMatch originalhost b?x\n  Port 4\n",
        'Host !box *\n  Port 3\nHost = "box"\n  Port=4\n',
        'UserKnownHostsFile "/a b/kh" /c\n',
        "HostKeyAlias foo\nProxyJump train@[10.0.0.3]:2222,x\nProxyCommand nc\n",
        "ProxyCommand exec nc %h %p # all of it\nProxyJump x\n",
        "ProxyJump none\nProxyCommand nc\nProxyJump x\n",
        "ProxyCommand none\nProxyJump x\n",
        'Match final\n  User f\nMatch exec "test %h = box"\n  Port 12\n',
        "Match all\n  User DOM\\\\me # comment\nConnectTimeout none\n",
    ],
)
def test_the_ssh_config_is_read_as_ssh_reads_it(tmp_path: Path, text: str, who: tuple[str, ...]) -> None:
    (tmp_path / "star").write_text("Host *\n  User nobody\n")
    (tmp_path / "bare").write_text("User bare\n")
    config = tmp_path / "config"
    config.write_text(text.replace("{0}", str(tmp_path)))
    asked = ["ssh", "-F", str(config), "-G", *who, "box"]
    shown = subprocess.run(asked, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL).stdout
    theirs = dict(reversed([line.split(" ", 1) for line in shown.splitlines() if " " in line]))
    user, port = (who[1], int(who[3])) if who else ("", 0)
    found = SshConfig((parsed(str(config), str(tmp_path), 0),)).lookup("box", user, port)
    jumps = ",".join(f"{u}@[{n}]:{p}" if u else n for n, u, p in found.jumps)
    ours = {
        "hostname": found.host,
        "user": found.user,
        "port": str(found.port),
        "hostkeyalias": "" if found.known_as in (name_of(found.host, found.port),) else found.known_as,
        "userknownhostsfile": " ".join(found.known_hosts),
        "proxyjump": jumps,
        "proxycommand": found.proxy_command,
    }
    theirs["proxycommand"] = (
        theirs.get("proxycommand", "").replace("%h", found.host).replace("%p", str(found.port))
    )
    if "UserKnownHostsFile" not in text:
        theirs["userknownhostsfile"] = ours["userknownhostsfile"]  # below what ssh takes for the home folder
    assert ours == {key: theirs.get(key, "") for key in IN_SSH}


def test_who_the_inventory_says_we_are_chooses_the_key_and_fills_in_the_command(cluster: Cluster) -> None:
    where = cluster.address("server1")
    (dot_ssh() / "train_key").write_text(Path(cluster.identity_file).read_text())
    (dot_ssh() / "train_key").chmod(0o600)
    (dot_ssh() / "id_ed25519").unlink()
    known = (dot_ssh() / "known_hosts").as_posix()
    inventory(
        cluster, only=("server1",), defaults={"identity_file": None}, server1={"port": 22, "user": "train"}
    )
    proxy = f"  ProxyCommand exec ssh -F {cluster.ssh_config} -W %h:%p server2\n"
    for key in (
        "Host *\n  IdentityFile ~/.ssh/%r_key\n",
        "Match user train\n  IdentityFile ~/.ssh/train_key\n",
    ):
        end = f"Host *\n  UserKnownHostsFile {known}\n  IdentitiesOnly yes\n"
        (dot_ssh() / "config").write_text(f"{key}Host {where}\n  Port 2222\n  User nobody\n{proxy}{end}")
        assert sh("server1", WHO) == "train\nserver1\n" + came_from(cluster, "server2")


# --- Jumps ---------------------------------------------------------------------------------------


def test_one_jump_leads_to_a_host_that_cannot_be_reached_directly(cluster: Cluster) -> None:
    cluster.drop_from("server3", CONTROLLER)
    ssh_config(f"Host {cluster.address('server3')}\n  ProxyJump server1\n")
    assert sh("server3", WHO) == "train\nserver3\n" + came_from(cluster, "server1")


@pytest.mark.parametrize(
    "jumps",
    [
        "Host {3}\n  ProxyJump server1,train@{2}:22\n",
        "Host {3}\n  ProxyJump server2\nHost server2\n  ProxyJump server1\n",
    ],
    ids=["listed", "each by its own way"],
)
def test_two_jumps_are_taken_in_the_order_that_ssh_takes_them(cluster: Cluster, jumps: str) -> None:
    for peer in (CONTROLLER, "server1"):
        cluster.drop_from("server3", peer)
    cluster.drop_from("server2", CONTROLLER)
    addresses = {str(number): cluster.address(f"server{number}") for number in (1, 2, 3)}
    text = jumps
    for number, address in addresses.items():
        text = text.replace(f"{{{number}}}", address)
    ssh_config(text)
    assert sh("server3", WHO) == "train\nserver3\n" + came_from(cluster, "server2")


def test_host_keys_of_jumps_are_checked_as_strictly(cluster: Cluster) -> None:
    cluster.drop_from("server3", CONTROLLER)
    ssh_config(f"Host {cluster.address('server3')}\n  ProxyJump server1\n")
    (dot_ssh() / "known_hosts").unlink()
    inventory(cluster, only=("server3",))
    error = refusal("server3")
    assert error.exit_code == 4
    assert f"unknown host key ssh-ed25519 {fingerprint(cluster, 'server1')}" in error.message
    done = ringctl("trust", "--yes")  # first the jump's key, then the one behind it
    assert done.stdout.index(fingerprint(cluster, "server1")) < done.stdout.index(
        fingerprint(cluster, "server3")
    )
    assert sh("server3", "hostname") == "server3\n"


def test_what_goes_wrong_at_a_jump_is_told_of_the_jump(cluster: Cluster) -> None:
    ssh_config(f"Host {cluster.address('server3')}\n  ProxyJump server1\n")
    cluster.reset_port("server3", 22, from_="server1")
    where = f"{cluster.address('server3')}:22"
    assert f"server3: jump host server1 cannot reach {where} (Connect failed)" == refusal("server3").message
    cluster.stop_sshd("server1")
    try:
        message = refusal("server3").message
    finally:
        cluster.start_sshd("server1")
    assert message == f"server3: jump host server1: connection refused by {cluster.address('server1')}:22"


def test_a_proxy_command_is_used(cluster: Cluster) -> None:
    cluster.drop_from("server3", CONTROLLER)
    command = f"ssh -F {cluster.ssh_config} -W %h:%p server2"
    ssh_config(f"Host {cluster.address('server3')}\n  ProxyCommand {command}\n")
    assert sh("server3", WHO) == "train\nserver3\n" + came_from(cluster, "server2")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ('sh -c "echo no such instance >&2; exit 1"', "no such instance"),
        ("/no/such/program %h", "/no/such/program: not found"),
        ("exec false", "exit code 1"),
    ],
)
def test_a_proxy_command_that_fails_is_quoted_at_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, command: str, words: str
) -> None:
    monkeypatch.setattr("launcher.transport.connect.TRIES", 1000)  # as many as would not end in time
    ssh_config(f"Host {cluster.address('server3')}\n  ProxyCommand {command}\n")
    message = refusal("server3").message
    assert message.startswith("server3: its ProxyCommand ended: ")
    assert message.endswith(words)


DEAF = """
import os, socket, sys, threading, time
server, way = socket.create_connection((sys.argv[1], int(sys.argv[2]))), socket.socket(fileno=0)

def back():
    while data := server.recv(1 << 16):
        way.sendall(data)
    os._exit(0)

def cut():
    while not os.path.exists(sys.argv[3]):
        time.sleep(0.01)
    way.shutdown(socket.SHUT_RD)
    os.unlink(sys.argv[3])

for each in (back, cut):
    threading.Thread(target=each, daemon=True).start()
while data := way.recv(1 << 16):
    server.sendall(data)
threading.Event().wait(60)
"""
MUCH = "head -c 16000000 /dev/zero"  # more than is sent before we say that there is room again
ON = "while echo; do sleep 0.1; done"  # until nobody listens


@pytest.fixture
def cut(cluster: Cluster, tmp_path: Path) -> Callable[[], None]:
    """After this, server3 can be heard, and nothing can be said to it: a connection that is lost, before it
    is known to be."""
    program, mark = tmp_path / "deaf.py", tmp_path / "cut"
    program.write_text(DEAF)
    command = f"exec {sys.executable} {program} %h %p {mark}"
    ssh_config(f"Host {cluster.address('server3')}\n  ProxyCommand {command}\n")

    def now() -> None:
        mark.touch()
        wait_for(lambda: not mark.exists(), "the cut")

    return now


@pytest.mark.parametrize("where", ["", ">&2"], ids=["stdout", "stderr"])
def test_a_connection_that_is_lost_within_an_answer_is_told_as_that(
    cluster: Cluster, cut: Callable[[], None], where: str
) -> None:
    waits, go = (cluster.path("server3", f"{HOME}/{name}") for name in ("waits", "go"))
    script = f"cd {HOME}; touch waits; until [ -e go ]; do sleep 0.02; done; {MUCH} {where}; {ON}"
    told: list[BaseException] = []

    def ask() -> None:
        try:
            transport.run(["sh", "-c", script], b"", 30.0)
        except BaseException as error:
            told.append(error)

    with agents() as found:
        transport = found["server3"].transport
        asking = threading.Thread(target=ask)
        asking.start()
        wait_for(waits.exists, "the command there")
        cut()
        go.touch()
        asking.join()
    assert [(type(error), str(error).split("\n")[0]) for error in told] == [
        (HostError, f"server3: {HUNG_UP}")
    ]


def test_a_connection_that_is_lost_within_a_stream_is_told_as_that(cut: Callable[[], None]) -> None:
    with agents() as found:
        channel = found["server3"].transport.stream(
            ["sh", "-c", f"{MUCH} >&2 & {MUCH}; {ON}"], b"", more=True
        )
        wait_for(lambda: channel.read(0.1), "the first of it")
        cut()
        for lost in (lambda: channel.read(1.0), channel.errors, lambda: channel.send(b"x")):
            with pytest.raises(HostError, match=HUNG_UP):
                eventually(lambda lost=lost: lost() == b"never")
        channel.close()


def test_the_address_behind_a_jump_is_what_the_jump_was_asked_for_if_it_is_numeric(cluster: Cluster) -> None:
    where, jump = cluster.address("server3"), f"train@[{cluster.address('server1')}]:22"
    named = f"Host alias\n  HostName {where}\nHost alias server3\n  ProxyJump {jump}\n"
    words = cluster.path("server3", "/etc/ssh/ssh_host_ed25519_key.pub").read_text()
    (dot_ssh() / "known_hosts").write_text((dot_ssh() / "known_hosts").read_text() + f"server3 {words}")
    ssh_config(f"{named}Host server3\n  HostName server3\n")
    inventory(cluster, only=("server3",), server3={"address": "alias"})
    with agents() as found:
        assert found["server3"].transport.address() == where
    inventory(cluster, only=("server3",), server3={"address": "server3"})
    with agents() as found:
        assert found["server3"].transport.address() == ""


# --- Keys ----------------------------------------------------------------------------------------


def test_a_key_that_only_the_agent_has_opens_the_door_and_the_agent_stays_here(cluster: Cluster) -> None:
    inventory(cluster, defaults={"identity_file": None})
    (dot_ssh() / "id_ed25519").rename(dot_ssh() / "key")
    ssh_config("ForwardAgent yes\nIdentityFile ~/.ssh/none")
    assert "there was no key to offer" in refusal("server1").message
    with ssh_agent(dot_ssh() / "key"):
        assert sh("server1", "echo ${SSH_AUTH_SOCK-unset}") == "unset\n"


def test_a_key_file_that_the_agent_holds_is_not_asked_for(cluster: Cluster) -> None:
    key = Path(os.environ["HOME"]) / ".ssh" / "id_ed25519"
    inventory(cluster, defaults={"identity_file": str(key)})
    ssh_config("IdentitiesOnly yes")
    with ssh_agent(key):
        subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "secret", "-f", str(key)], check=True)
        key.with_suffix(".pub").unlink()
        assert sh("server1", "id -un") == "train\n"


def test_too_many_keys_in_the_agent_are_named_and_identities_only_leaves_them_out(
    cluster: Cluster, tmp_path: Path
) -> None:
    others = [new_key(tmp_path / f"other{number}") for number in range(7)]
    inventory(cluster, defaults={"identity_file": None})
    with ssh_agent(*others):
        message = refusal("server1").message
        assert "hung up after 6 keys: other0 of the agent, other1 of the agent" in message
        ssh_config("IdentitiesOnly yes")
        assert sh("server1", "id -un") == "train\n"


@pytest.mark.parametrize("kind", ["ed25519", "rsa"])
def test_a_server_that_wants_none_of_the_keys_is_told_which_were_offered(
    cluster: Cluster, tmp_path: Path, kind: str
) -> None:
    key = new_key(tmp_path / "stranger", kind=kind)
    inventory(cluster, defaults={"identity_file": str(key)})
    ssh_config("IdentityFile ~/.ssh/none")
    error = refusal("server1")
    where = f"train@{cluster.address('server1')}"
    assert (
        error.message
        == f"server1: authentication failed for {where}: it takes none of the keys offered: {key}"
    )
    assert "identity_file" in error.fix


def test_a_key_file_that_is_missing_or_no_key_is_named(cluster: Cluster, tmp_path: Path) -> None:
    inventory(
        cluster,
        server1={"identity_file": "~/.ssh/nothing"},
        server2={"identity_file": str(tmp_path / "hosts.yaml")},
    )
    assert refusal("server1").message == f"server1: there is no key file {dot_ssh()}/nothing"
    assert refusal("server2").message.startswith(
        f"server2: the file {tmp_path}/hosts.yaml is not a private key"
    )


@pytest.fixture
def encrypted(cluster: Cluster, tmp_path: Path) -> Path:
    """The one key that the hosts take, encrypted with "secret"."""
    key = tmp_path / "locked"
    key.write_text(Path(cluster.identity_file).read_text())
    key.chmod(0o600)
    change = ["ssh-keygen", "-q", "-p", "-P", "", "-N", "secret", "-f", str(key)]
    subprocess.run(change, check=True, stdout=subprocess.DEVNULL)
    inventory(cluster, defaults={"identity_file": str(key)})
    return key


def test_the_passphrase_of_a_key_is_asked_for_once_for_all_hosts(encrypted: Path) -> None:
    terminal = Terminal("exec", "--", "hostname")
    terminal.expect(f"Passphrase for {encrypted}: ")
    terminal.type("secret\n")
    shown = terminal.finish(0)
    assert shown.count("Passphrase") == 1
    assert "secret" not in shown
    assert all(f"[server{number}] server{number}" in shown for number in (1, 2, 3, 4))


def test_a_wrong_passphrase_and_a_change_of_mind_end_it(encrypted: Path) -> None:
    terminal = Terminal("exec", "--", "hostname")
    terminal.expect("Passphrase for")
    terminal.type("guess\n")
    assert f"server1: that is not the passphrase of the key file {encrypted}" in terminal.finish(4)
    terminal = Terminal("exec", "--", "hostname")
    terminal.expect("Passphrase for")
    terminal.type("\x03")
    assert terminal.finish(130).count("Passphrase") == 1


def test_without_a_terminal_or_with_no_input_nobody_is_asked(encrypted: Path) -> None:
    terminal = Terminal("--no-input", "exec", "--include", "server1", "--", "hostname")
    expected = f"server1: the key file {encrypted} is encrypted and nobody is there to ask for its passphrase"
    assert expected in terminal.finish(4)
    done = ringctl("exec", "--include", "server1", "--", "hostname", code=4)
    assert done.stderr.splitlines() == [
        f"error: {expected}",
        f"  give it to an agent first: ssh-add {encrypted}",
    ]


def test_a_password_is_asked_for_on_a_terminal_and_is_on_no_command_line(cluster: Cluster) -> None:
    # What `openssl passwd -6 -salt salt` makes of "open sesame".
    hashed = subprocess.run(
        ["openssl", "passwd", "-6", "-salt", "salt", "open sesame"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    inventory(cluster, only=("server1",), defaults={"identity_file": None})
    (dot_ssh() / "id_ed25519").unlink()
    ssh_config("IdentityFile ~/.ssh/none")
    unlocked = host_file(
        cluster, "server1", "/etc/shadow", lambda text: text.replace("train:*:", f"train:{hashed}:")
    )
    with unlocked, sshd_option(cluster, "server1", "PasswordAuthentication yes"):
        terminal = Terminal("exec", "--", "cat", f"{HOME}/.ssh/authorized_keys")
        terminal.expect(f"Password for train@{cluster.address('server1')}: ")
        terminal.type("open sesame\n")
        shown = terminal.finish(0)
    assert "[server1] ssh-ed25519" in shown
    assert "sesame" not in shown


# --- What a host may be like ---------------------------------------------------------------------


def test_no_shell_and_no_noise_changes_what_arrives(cluster: Cluster) -> None:
    """Each host is odd in its own way; every byte of the arguments arrives, and nothing else is shown."""
    words = [
        "a b",
        "quote's",
        '"',
        "$HOME",
        "`id`",
        "*",
        "new\nline",
        "\n",
        "",
        "ü",
        "\\n",
        "!x",
        "-e",
        "x ",
        "\t",
        "#",
        "\udcff",
    ]
    write_home(cluster, "server1", ".bashrc", "echo noise; echo more noise >&2; printf 'no newline'\n")
    write_home(cluster, "server2", ".config/fish/config.fish", "echo fish noise\n")
    write_home(cluster, "server3", ".cshrc", "echo tcsh noise\n")
    cluster.run("server4", "sh", "-c", "mkdir only && ln -s /usr/bin/env /usr/bin/python3 only/")
    with (
        login_shell(cluster, "server2", "/usr/bin/fish"),
        login_shell(cluster, "server3", "/usr/bin/tcsh"),
        login_shell(cluster, "server4", "/usr/bin/dash"),
        sshd_option(cluster, "server4", f"SetEnv PATH={HOME}/only"),
    ):
        done = ringctl("exec", "--json", "--", "/bin/sh", "-c", 'printf "%s\\0" "$@"', "", *words)
        results = json.loads(done.stdout)
        bare = sh("server4", "command -v bash sh; echo $PATH")
        launched = ringctl(
            "launch", "--json", "--", "env", "--", "/bin/sh", "-c", 'echo "$0"', "it's rank\n$RANK"
        )
    assert [result["host"] for result in results] == list(cluster.names)
    for result in results:
        assert result["out"] == "".join(f"{word}\0" for word in words), result
        assert (result["err"], result["exit_code"]) == ("", 0)
    assert bare == f"{HOME}/only\n"
    events = [json.loads(line) for line in launched.stdout.splitlines()]
    lines = {(event["rank"], event["text"]) for event in events if event["kind"] == "line"}
    assert lines == {(rank, text) for rank in range(4) for text in ("it's rank", "$RANK")}


def test_an_account_that_runs_nothing_is_told_in_its_own_words(cluster: Cluster) -> None:
    with login_shell(cluster, "server1", "/usr/sbin/nologin"):
        done = ringctl("exec", "--", "hostname", code=4)
        launched = ringctl("launch", "--", "true", code=4)
    assert "server1: it ran no command; it said: This account is currently not available" in done.stderr
    assert "exit code 0: 3 of 4 (server2-4)" in done.stderr
    assert "This account is currently not available" in launched.stderr


def test_a_login_shell_that_ends_early_is_blamed_itself_and_cannot_write_to_our_terminal(
    cluster: Cluster,
) -> None:
    inventory(cluster, only=("server1",))
    write_home(cluster, "server1", ".bashrc", "printf '\\033]0;title\\007 good bye'; exit 3\n")
    executed = ringctl("exec", "--", "hostname", code=4).stderr
    assert "server1: it ran no command; it said: \\x1b]0;title\\x07 good bye\n  look at" in executed
    launched = ringctl("launch", "--", "true", code=4).stderr
    assert "server1: its login shell ended before it ran anything; it said: \\x1b]0;title" in launched
    for shown in (executed, launched):
        assert ".bashrc" in shown
        assert "Python" not in shown
        assert "\x1b" not in shown


@pytest.mark.parametrize("line", ["exec 2>/dev/null", "exec 2>&1"])
def test_a_login_shell_that_redirects_stderr_is_no_obstacle(cluster: Cluster, line: str) -> None:
    inventory(cluster, only=("server1",))
    write_home(cluster, "server1", ".bashrc", f"{line}\n")
    assert ringctl("exec", "--", "hostname").stdout == "[server1] server1\n"
    with agents() as found:
        assert found["server1"].runs()["runs"] == []


# --- One sentence --------------------------------------------------------------------------------


def test_every_way_to_fail_is_one_sentence_and_the_other_hosts_are_asked(
    cluster: Cluster, tmp_path: Path
) -> None:
    stranger = new_key(tmp_path / "stranger")
    one, two, three = (cluster.address(name) for name in ("server1", "server2", "server3"))
    Path(os.environ["RINGCTL_HOSTS"]).write_text(
        f"""
        defaults: {{user: train, identity_file: {cluster.identity_file}}}
        hosts:
          - {{name: fine, address: {cluster.address("server4")}}}
          - {{name: away, address: {one}}}
          - {{name: refuses, address: {two}}}
          - {{name: nowhere, address: no-such-host.invalid}}
          - {{name: denies, address: {three}, identity_file: {stranger}}}
          - {{name: keyless, address: {three}, identity_file: /no/such/key}}
          - {{name: closed, address: {three}, port: 23}}
        """
    )
    ssh_config("ConnectTimeout 1")
    cluster.cut("server1")
    cluster.reset_port("server2", 22)
    done = ringctl("exec", "--", "hostname", code=4)
    assert done.stdout == "[fine] server4\n"
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert errors == [
        "error: away: no answer within 1 s",
        f"error: refuses: connection refused by {two}:22",
        "error: nowhere: its name is not known here (Name or service not known)",
        f"error: denies: authentication failed for train@{three}: it takes none of the keys offered: "
        f"{stranger}",
        "error: keyless: there is no key file /no/such/key",
        f"error: closed: connection refused by {three}:23",
    ]
    assert "Traceback" not in done.stderr


def test_a_server_that_takes_connections_and_says_nothing_is_given_up_on(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.transport.connect.CONNECT_S", 0.5)
    monkeypatch.setattr("launcher.transport.connect.AT_ONCE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        inventory(cluster, server1={"address": "127.0.0.1", "port": server.getsockname()[1]})
        assert refusal("server1").message == "server1: no answer within 0.5 s"
        server.settimeout(0)
        server.accept()[0].close()
        with pytest.raises(BlockingIOError):
            server.accept()  # it was not tried a second time


@pytest.mark.parametrize(
    ("greeting", "words"),
    [
        (b"SSH-2.0-x\r\n", "the server hung up after its greeting"),
        (b"SSH-1.5-x\r\n", "does not speak SSH 2 as we do (Incompatible version (1.5 instead of 2.0))"),
        (b"SSH-2.0-x\r\n" + b"\x01" * 9000, "does not speak SSH 2 as we do ("),
    ],
)
def test_a_server_that_greets_and_no_more_is_told_of_and_asked_once(
    cluster: Cluster, greeting: bytes, words: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            client = server.accept()[0]
            client.sendall(greeting)
            client.shutdown(socket.SHUT_WR)
            with client, contextlib.suppress(ConnectionError):
                while client.recv(1 << 16):
                    pass

        thread = threading.Thread(target=greet)
        thread.start()
        inventory(cluster, server1={"address": "127.0.0.1", "port": server.getsockname()[1]})
        error = refusal("server1")
        thread.join()
        assert words in error.message
        assert error.fix
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()  # it was not tried a second time


def test_ssh_is_told_the_name_that_its_own_configuration_knows(cluster: Cluster) -> None:
    ssh_config(f"Host alias\n  HostName {cluster.address('server3')}\n  ProxyJump server1\n")
    target = sshconfig.load().lookup("alias", "CORP\\alice", 2222)
    assert ssh_words(target) == "-p 2222 'CORP\\alice@alias'"


def test_an_ipv6_address_is_set_apart_from_its_port(cluster: Cluster) -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        port = server.getsockname()[1]
    inventory(cluster, server1={"address": "::1", "port": port})
    assert refusal("server1").message == f"server1: connection refused by [::1]:{port}"


# --- sshd under load -----------------------------------------------------------------------------


def test_a_server_that_drops_connections_at_random_is_asked_again(cluster: Cluster) -> None:
    inventory(cluster, only=("server1",))
    answers: list[bytes] = []

    def connect() -> None:
        with agents() as found:
            answers.append(found["server1"].transport.run(["hostname"], b"", 30.0).out)

    with sshd_option(cluster, "server1", "MaxStartups 1:100:1"):
        before = cluster.path("server1", "/var/log/sshd.log").read_text().count("past MaxStartups")
        threads = [threading.Thread(target=connect) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        log = cluster.path("server1", "/var/log/sshd.log").read_text()
    assert answers == [b"server1\n"] * 4
    assert log.count("MaxStartups") > before, "nothing was dropped, so nothing was tried"


def test_only_what_fails_at_once_is_tried_again_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = [0.0], []
    monkeypatch.setattr("launcher.transport.connect.time.monotonic", lambda: now[0])
    monkeypatch.setattr("launcher.transport.connect.time.sleep", lambda seconds: calls.append(seconds))

    def hang_up(after: float) -> None:
        now[0] += after
        raise EOFError

    with pytest.raises(EOFError):
        retried(lambda: hang_up(0.1))
    assert len(calls) == TRIES - 1
    assert calls != sorted(calls, reverse=True), "each time a little later"
    calls.clear()
    with pytest.raises(EOFError):
        retried(lambda: hang_up(AT_ONCE_S + 1))
    assert calls == []
    with pytest.raises(EOFError):
        retried(lambda: hang_up(0.6), 1.0)
    assert len(calls) <= 1, "not for longer than a server that is silent"


def test_a_whole_launch_takes_one_connection_a_host(cluster: Cluster) -> None:
    def accepted(host: str) -> int:
        return cluster.path(host, "/var/log/sshd.log").read_text().count("Accepted publickey")

    before = {host: accepted(host) for host in cluster.names}
    ringctl("launch", "--", "true")
    assert {host: accepted(host) - before[host] for host in cluster.names} == dict.fromkeys(cluster.names, 1)


def test_a_connection_that_leads_nowhere_any_more_is_noticed_while_a_command_runs(
    cluster: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.transport.connect.KEEPALIVE_S", 1)
    monkeypatch.setattr("launcher.transport.connect.DEAD_S", 1.5)
    with agents() as found:
        transport = found["server1"].transport
        transport.run(["true"], b"", 30.0)
        threading.Timer(0.3, cluster.cut, ["server1"]).start()
        with pytest.raises(HostError, match="the command there ran, but the connection was lost"):
            transport.run(["sleep", "1000"], b"", 60.0)
    cluster.heal("server1")
    for process in cluster.processes("server1"):
        cluster.run("server1", "kill", str(process.host_pid), check=False)


def test_a_host_that_restarted_in_between_is_reached_again(cluster: Cluster) -> None:
    with agents() as found:
        transport = found["server1"].transport
        transport.run(["true"], b"", 30.0)
        for _ in range(3):  # whether or not the drop has been noticed by then
            cluster.end_sessions("server1")
            assert transport.run(["hostname"], b"", 30.0).out == b"server1\n"
