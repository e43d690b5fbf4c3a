"""hosts.yaml: what it may say, and what is said to someone who wrote it wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher import inventory
from launcher.errors import InputError
from launcher.model import EnvSpec, Host, Inventory

PROJECT = Path(__file__).resolve().parents[2]


def complaint_about(text: str) -> str:
    with pytest.raises(InputError) as caught:
        inventory.parse(text, "hosts.yaml")
    assert caught.value.exit_code == 2
    return str(caught.value)


def only_host(text: str) -> Host:
    (host,) = inventory.parse(text, "hosts.yaml").hosts
    return host


# --- What may be written -------------------------------------------------------------------------


def test_the_inventory_of_the_design_is_read() -> None:
    found = inventory.parse(
        """\
master: server2
master_port: 23456
defaults:
  user: train
  env: {conda: fl38}
  workdir: ~/ring-reduce
hosts:
  - {name: server1, address: 192.168.0.1}
  - {name: server2, address: 192.168.0.2, user: lab, slots: 2, ifname: enps1}
""",
        "hosts.yaml",
    )
    env = EnvSpec("conda", "fl38")
    assert found.hosts == (
        Host("server1", address="192.168.0.1", user="train", env=env, workdir="~/ring-reduce"),
        Host(
            "server2",
            address="192.168.0.2",
            user="lab",
            env=env,
            workdir="~/ring-reduce",
            slots=2,
            ifname="enps1",
        ),
    )
    assert (found.master, found.master_port, found.source) == ("server2", 23456, "hosts.yaml")


def test_every_key_of_a_host_arrives() -> None:
    host = only_host(
        """\
hosts:
  - name: a
    address: a.example.org
    user: first.last@corp
    port: 65535
    slots: 1024
    ifname: eth0.100
    data_address: fd00::1
    env: {venv: ~/my venv}
    workdir: /scratch/with space
    variables: {A: b}
    identity_file: ~/.ssh/id
    host_key: ssh-ed25519 AAAA+/==
    python: /usr/bin/python3.8
    local: true
"""
    )
    assert host == Host(
        name="a",
        address="a.example.org",
        user="first.last@corp",
        port=65535,
        slots=1024,
        ifname="eth0.100",
        data_address="fd00::1",
        env=EnvSpec("venv", "~/my venv"),
        workdir="/scratch/with space",
        variables={"A": "b"},
        identity_file="~/.ssh/id",
        host_key="ssh-ed25519 AAAA+/==",
        python="/usr/bin/python3.8",
        local=True,
    )


def test_a_plain_string_is_name_and_address_of_a_host_and_the_first_host_is_master() -> None:
    found = inventory.parse("hosts: [server1, 192.168.0.2]", "hosts.yaml")
    assert found.hosts == (
        Host("server1", address="server1"),
        Host("192.168.0.2", address="192.168.0.2"),
    )
    assert found.master == "server1"


def test_a_local_host_needs_no_address() -> None:
    assert only_host("hosts: [{name: here, local: true}]") == Host("here", local=True)


def test_a_host_that_is_not_local_after_all_is_reached_by_its_name() -> None:
    assert only_host("hosts: [{name: there, local: false}]") == Host("there", address="there")


@pytest.mark.parametrize("line", ["", "master_port: auto\n"])
def test_the_master_port_is_chosen_later_unless_it_is_given(line: str) -> None:
    assert inventory.parse(line + "hosts: [a]", "hosts.yaml").master_port is None


def test_defaults_apply_wherever_they_stand_and_a_host_overrides_them() -> None:
    found = inventory.parse(
        """\
hosts:
  - a
  - {name: b, port: 23, env: {python: /opt/py}, variables: {SHARED: own, MINE: x}}
defaults: {port: 22, slots: 3, env: {conda: fl38}, variables: {SHARED: all, ALL: y}}
""",
        "hosts.yaml",
    )
    a, b = found.hosts
    assert (a.port, a.slots, a.env, a.variables) == (
        22,
        3,
        EnvSpec("conda", "fl38"),
        {"SHARED": "all", "ALL": "y"},
    )
    assert (b.port, b.slots, b.env, b.variables) == (
        23,
        3,
        EnvSpec("python", "/opt/py"),
        {"SHARED": "own", "ALL": "y", "MINE": "x"},
    )


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["A", "a b", "x.y", "ÄÖ"]), st.text(st.characters(codec="utf-8"))))
def test_values_of_variables_come_out_exactly_as_they_were_written(variables: dict[str, str]) -> None:
    written = {name: value.replace("\0", "") for name, value in variables.items()}
    text = yaml.safe_dump({"hosts": [{"name": "a", "variables": written}]}, default_style='"')
    assert only_host(text).variables == written


def test_quotes_newlines_and_umlauts_in_a_block_arrive() -> None:
    host = only_host('hosts:\n- name: a\n  variables:\n    V: |\n      it\'s "ü"; $(x)\n      two\n')
    assert host.variables == {"V": 'it\'s "ü"; $(x)\ntwo\n'}


@pytest.mark.parametrize(
    "address",
    ["10.0.0.1", "fe80::1", "fe80::1%eth0", "::ffff:10.0.0.1", "a", "a-b.c_d.example.org", "host.", "3com"],
)
def test_addresses_may_be_ipv4_ipv6_or_names(address: str) -> None:
    assert only_host(f"hosts: [{{name: a, address: '{address}'}}]").address == address


@pytest.mark.parametrize("user", ["lab-1", "first.last", "_svc", "a@corp.example"])
def test_usual_user_names_are_accepted(user: str) -> None:
    assert only_host(f"hosts: [{{name: a, user: {user}}}]").user == user


def test_ten_thousand_hosts_are_read_in_order() -> None:
    lines = [f"  - {{name: h{i}, address: 10.0.{i // 256}.{i % 256}, slots: 2}}\n" for i in range(10_000)]
    found = inventory.parse("hosts:\n" + "".join(lines), "hosts.yaml")
    assert [host.name for host in found.hosts] == [f"h{i}" for i in range(10_000)]


def test_the_example_that_is_shipped_is_valid_and_shows_every_key() -> None:
    example = PROJECT / "hosts.example.yaml"
    found = inventory.load(example)
    assert found.master == "server1"
    assert {host.local for host in found.hosts} == {True, False}
    keys = set(Host.__dataclass_fields__) | {"master", "master_port", "defaults", "hosts"}
    text = example.read_text()
    assert {key for key in keys if not re.search(rf"^[ -]*{key}:", text, re.MULTILINE)} == set()


def test_the_implicit_inventory_is_this_machine_without_ssh() -> None:
    found = inventory.this_machine(4)
    assert found.hosts == (Host("localhost", local=True, slots=4),)
    assert (found.master, found.source) == ("localhost", "")


# --- What is said about mistakes -----------------------------------------------------------------

ONE = "hosts:\n- name: a\n"  # what is added to it stands on line 3

BAD = [
    # unknown and duplicate keys
    ("hosts:\n- a\n- name: b\n  prot: 22\n", 4, ["hosts[1].prot: unknown key; did you mean 'port'?"]),
    ("hosts: [a]\nzzz: 1\n", 2, ["zzz: unknown key", "master, master_port, defaults, hosts"]),
    ("hots: [a]\n", 1, ["hots: unknown key; did you mean 'hosts'?"]),
    ("hosts: [a]\nMaster: a\n", 2, ["Master: unknown key; did you mean 'master'?"]),
    ("defaults:\n  usr: x\nhosts: [a]\n", 2, ["defaults.usr", "'user'"]),
    ("defaults:\n  address: x\nhosts: [a]\n", 2, ["defaults.address: belongs to one host", "'hosts'"]),
    ("defaults: {local: true}\nhosts: [a]\n", 1, ["defaults.local: belongs to one host"]),
    (ONE + "  port: 1\n  port: 2\n", 4, ["hosts[0].port: duplicate key", "hosts.yaml:3"]),
    ("hosts: [a]\nhosts: [b]\n", 2, ["hosts: duplicate key", "hosts.yaml:1"]),
    (ONE + "  variables:\n    A: x\n    A: y\n", 5, ["hosts[0].variables.A: duplicate key"]),
    (ONE + "  <<: {port: 1}\n", 3, ["unknown key", "'defaults'"]),
    (ONE + "  ? [x]\n  : y\n", 3, ["hosts[0]: found a list", "plain text"]),
    (ONE + '  "a\\nb": 1\n', 3, ["hosts[0].'a\\nb': unknown key"]),
    # the file as a whole
    ("", 1, ["hosts: the file is empty"]),
    ("# only a comment\n\n", 1, ["hosts: the file is empty"]),
    ("---\n...\n", 1, ["hosts: the file is empty"]),
    ("master: a\n", 1, ["hosts: missing", "- {name: server1"]),
    ("hosts:\n", 1, ["hosts: found nothing", "write a list"]),
    ("hosts: []\n", 1, ["hosts: found an empty list"]),
    ("hosts: {}\n", 1, ["hosts: found a mapping"]),
    ("hosts:\n  a: {address: b}\n", 2, ["hosts: found a mapping", "write a list"]),
    ("- a\n- b\n", 1, ["found a list"]),
    ("server1\n", 1, ["found 'server1'"]),
    ("hosts: [a]\n---\nhosts: [b]\n", 2, ["second document"]),
    ("hosts: [a\n", 2, ["not valid YAML"]),
    ("hosts:\n- name: a\n\tport: 1\n", 3, ["not valid YAML", "spaces"]),
    ("hosts: [a]\nmaster: b: c\n", 2, ["not valid YAML"]),
    ("hosts: [a]\n\x07\n", 2, ["control character '\\x07'"]),
    ("hosts: [a]\n\ud800\n", 2, ["control character"]),
    ("%YAML 1." + "9" * 5000 + "\n---\nhosts: [a]", 1, ["not valid YAML"]),
    # what could run code or eat the memory
    ("hosts:\n- !!python/object/apply:os.system ['false']\n", 2, ["tag", "python/object/apply:os.system"]),
    ("!!python/object:os.system {}\n", 1, ["tag", "without a tag"]),
    ("hosts:\n- !mine a\n", 2, ["tag '!mine'"]),
    ("hosts: !%ED%A0%80 x\n", 1, ["not valid YAML"]),
    ('hosts: "\\UFFFFFFFF"\n', 1, ["not valid YAML"]),
    ('hosts: ["\\ud800"]\n', 1, []),  # the two scanners differ in their reason
    ("a: &a [x, x]\nb: &b [*a, *a]\n", 2, ["alias '*a'", "'defaults'"]),
    ("hosts: &h [*h]\n", 1, ["alias '*h'"]),
    ("hosts: " + "[" * 100_000, 1, ["levels"]),
    # numbers
    (ONE + "  port: 0\n", 3, ["hosts[0].port: found 0; write a whole number from 1 to 65535"]),
    (ONE + "  port: 65536\n", 3, ["hosts[0].port: found 65536"]),
    (ONE + "  port: -22\n", 3, ["found -22"]),
    (ONE + '  port: "22"\n', 3, ["hosts[0].port: found the text '22'; write 22 without quotes"]),
    (ONE + "  port: ssh\n", 3, ["found 'ssh'; write a whole number"]),
    (ONE + "  port: true\n", 3, ["found true; write a whole number"]),
    (ONE + "  port: 22.0\n", 3, ["found 22.0"]),
    (ONE + "  port: 022\n", 3, ["found 022"]),
    (ONE + "  port: 1:30\n", 3, ["found 1:30"]),
    (ONE + "  port:\n", 3, ["hosts[0].port: found nothing"]),
    (ONE + "  port: [22]\n", 3, ["hosts[0].port: found a list"]),
    (ONE + "  port: " + "9" * 5000 + "\n", 3, ["found 999", "1 to 65535"]),
    ("master_port: 70000\nhosts: [a]\n", 1, ["master_port: found 70000"]),
    ('master_port: "23456"\nhosts: [a]\n', 1, ["master_port", "23456 without quotes"]),
    ("master_port: any\nhosts: [a]\n", 1, ["master_port: found 'any'; write auto or a whole number"]),
    ("master_port: false\nhosts: [a]\n", 1, ["master_port: found false"]),
    (ONE + "  slots: 0\n", 3, ["hosts[0].slots: found 0; write a whole number from 1 to 1024"]),
    (ONE + "  slots: -1\n", 3, ["hosts[0].slots: found -1"]),
    (ONE + "  slots: 1000000\n", 3, ["hosts[0].slots: found 1000000"]),
    ("defaults:\n  slots: 0\nhosts: [a]\n", 2, ["defaults.slots: found 0"]),
    # hosts
    ("hosts:\n- a\n- b\n- a\n", 4, ["hosts[2].name: duplicate host 'a'", "hosts.yaml:2"]),
    ("hosts:\n- {address: a}\n", 2, ["hosts[0].name: missing"]),
    ("hosts:\n- [a]\n", 2, ["hosts[0]: found a list"]),
    ("hosts:\n- 4\n", 2, ["hosts[0]: found 4", 'write it in quotes: "4"']),
    ("hosts:\n- no\n", 2, ["found no, which YAML reads as true or false", '"no"']),
    ("hosts:\n-\n", 2, ["hosts[0]: found nothing"]),
    ("hosts:\n- lab@a\n", 2, ["hosts[0]: found 'lab@a'"]),
    ("hosts: [server1, server2]\nmaster: sever2\n", 2, ["master: no host", "did you mean 'server2'?"]),
    ("hosts: [a, b]\nmaster: other\n", 2, ["master: no host is named 'other'; the hosts are: a, b"]),
    ("hosts: [a]\nmaster: [a]\n", 2, ["master: found a list"]),
    (ONE + "  local: maybe\n", 3, ["hosts[0].local: found 'maybe'; write true or false"]),
    (ONE + "  local: 'true'\n", 3, ["hosts[0].local: found 'true'; write true or false"]),
    (ONE + "  address: 192.168.0.300\n", 3, ["hosts[0].address: found '192.168.0.300'"]),
    (ONE + "  address: 10.1.2\n", 3, ["hosts[0].address: found '10.1.2'"]),
    (ONE + "  address: lab@b\n", 3, ["found 'lab@b'", "user and port have keys of their own"]),
    (ONE + "  address: b:22\n", 3, ["found 'b:22'", "user and port have keys of their own"]),
    (ONE + "  address: '[::1]'\n", 3, ["found '[::1]'"]),
    (ONE + "  address: a..b\n", 3, ["found 'a..b'"]),
    (ONE + f"  address: {'a.' * 127}\n", 3, ["hosts[0].address: found 'a.a.", "...'"]),
    (ONE + "  address: 'fe80::1%;reboot'\n", 3, ["found 'fe80::1%;reboot'"]),
    (ONE + "  ifname: abcdefghijklmnop\n", 3, ["hosts[0].ifname", "ip link"]),
    (ONE + "  host_key: AAAA\n", 3, ["hosts[0].host_key: found 'AAAA'", "ssh-ed25519"]),
    (ONE + "  host_key: server1 ssh-rsa AAAA\n", 3, ["hosts[0].host_key", "TYPE BASE64"]),
    # environments and folders
    (ONE + "  env: fl38\n", 3, ["hosts[0].env: found 'fl38'", "{conda: NAME}"]),
    (ONE + "  env: {}\n", 3, ["hosts[0].env: found an empty mapping; write exactly one of"]),
    (ONE + "  env: {conda: a, venv: b}\n", 3, ["hosts[0].env: found conda and venv; write exactly one of"]),
    (ONE + "  env: {cond: a}\n", 3, ["hosts[0].env.cond: unknown key; did you mean 'conda'?"]),
    (ONE + "  env: {conda: ''}\n", 3, ["hosts[0].env.conda: found ''"]),
    (ONE + "  env: {conda: -n}\n", 3, ["hosts[0].env.conda: found '-n'", "no dash"]),
    (ONE + '  env: {venv: "a\\0b"}\n', 3, ["hosts[0].env.venv: found 'a\\x00b'"]),
    (ONE + "  env: {python: 3.10}\n", 3, ["hosts[0].env.python: found 3.10", "in quotes"]),
    (ONE + '  workdir: "a\\nb"\n', 3, ["hosts[0].workdir: found 'a\\nb'; write one line"]),
    (ONE + '  workdir: "a\\0b"\n', 3, ["hosts[0].workdir"]),
    (ONE + "  python: -c\n", 3, ["hosts[0].python: found '-c'"]),
    # variables
    (ONE + "  variables: [A]\n", 3, ["hosts[0].variables: found a list"]),
    (ONE + "  variables: {A: 4}\n", 3, ["variables.A: found 4, which YAML reads as a whole", '"4"']),
    (ONE + "  variables: {A: true}\n", 3, ["variables.A: found true", 'write it in quotes: "true"']),
    (ONE + "  variables: {A: 2024-01-02}\n", 3, ["a date", '"2024-01-02"']),
    (ONE + "  variables: {A: }\n", 3, ["variables.A: found nothing"]),
    (ONE + "  variables: {A: [x]}\n", 3, ["variables.A: found a list"]),
    (ONE + "  variables: {4: x}\n", 3, ["hosts[0].variables: found 4", "in quotes"]),
    (ONE + "  variables: {'': x}\n", 3, ["hosts[0].variables: the name ''"]),
    (ONE + "  variables: {A=B: x}\n", 3, ["the name 'A=B': write a name that has no '='"]),
    (ONE + '  variables: {"A\\0": x}\n', 3, ["the name 'A\\x00'", "NUL"]),
    (ONE + '  variables: {A: "x\\0"}\n', 3, ["variables.A: found 'x\\x00'; write text without NUL"]),
    (ONE + "  variables: {RANK: x}\n", 3, ["the name 'RANK': reserved", "numbers the ranks"]),
    (ONE + "  variables: {WORLD_SIZE: x}\n", 3, ["the name 'WORLD_SIZE': reserved", "--world"]),
    (ONE + "  variables: {MASTER_ADDR: x}\n", 3, ["reserved", "'master'"]),
    (ONE + "  variables: {MASTER_PORT: x}\n", 3, ["reserved", "'master_port'"]),
    (ONE + "  variables: {GLOO_SOCKET_IFNAME: x}\n", 3, ["reserved", "'ifname'"]),
    (ONE + "  variables: {RINGCTL_X: x}\n", 3, ["the name 'RINGCTL_X': reserved", "ringctl's own"]),
    (ONE + "  variables: {PYTHONUNBUFFERED: ''}\n", 3, ["reserved", "leave it out"]),
    (ONE + "  variables: {PET_X: x}\n", 3, ["reserved", "torchrun"]),
    (
        "defaults:\n  variables:\n    LOCAL_RANK: x\nhosts: [a]\n",
        3,
        ["defaults.variables: the name 'LOCAL_RANK'"],
    ),
]


@pytest.fixture(params=["libyaml", "pure Python"])
def _each_scanner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyYAML has two scanners; which one a user gets depends on how it was installed."""
    if request.param == "pure Python":
        monkeypatch.delattr(yaml, "CSafeLoader", raising=False)


@pytest.mark.usefixtures("_each_scanner")
@pytest.mark.parametrize(("text", "line", "fragments"), BAD, ids=[text[:60] for text, _, _ in BAD])
def test_a_mistake_is_named_with_file_line_key_and_remedy(text: str, line: int, fragments: list[str]) -> None:
    message = complaint_about(text)
    assert message.startswith(f"hosts.yaml:{line}: ")
    assert [part for part in fragments if part not in message] == []
    assert "\n" not in message
    assert len(message) < 400


def test_a_file_of_countless_values_is_refused_before_it_fills_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inventory, "MAX_NODES", 1000)
    assert complaint_about("hosts:\n" + "- a\n" * 2000).startswith("hosts.yaml:999: more than 1,000 values")


@pytest.mark.parametrize("key", ["name", "address", "user", "ifname", "data_address"])
@pytest.mark.parametrize(
    "value",
    ["-x", "", " ", "a b", " a", "a;b", "a|b", "a&b", "$(a)", "`a`", "a'b", 'a"b', "a\\b", "a>b", "a*", "a\n"]
    + ["a\nb", "a\tb", "a\0b", "a\x1b[1m", "a\x85", "a/b", "a#b", "a=b", "a,b", "ä", "a" * 300],
)
def test_nothing_that_a_shell_or_ssh_could_misread_is_accepted(key: str, value: str) -> None:
    fields = {"name": "h", key: value}
    message = complaint_about(yaml.safe_dump({"hosts": [fields]}, default_style='"', width=10_000))
    assert f"hosts[0].{key}: found " in message
    assert message.isprintable()


# --- Whatever is thrown at it --------------------------------------------------------------------


def outcome(read: Callable[[], Inventory]) -> str:
    """What came of it; any error but InputError gets through and fails the test."""
    try:
        return "an inventory" if read().hosts else "no hosts"
    except InputError as error:
        return str(error)


YAML_WORDS = st.sampled_from(
    ["hosts", "name", "env", "variables", "master", ": ", ":", "- ", "[", "]", "{", "}", ",", "\n", "\n  "]
    + ["\n    ", "&a ", "*a", "!!str ", "!x ", "|", ">", "'", '"', "\\", "%TAG", "---", "...", "?", "#", "<<"]
    + ["22", "true", "null", "\t", "\r", "\ufeff", "\x85", "\u2028", "\0", "a"]
)


@settings(deadline=None)
@given(st.one_of(st.text(), st.lists(YAML_WORDS, max_size=60).map("".join)))
def test_any_text_is_an_inventory_or_an_input_error(text: str) -> None:
    assert re.match(r"hosts\.yaml:\d+: |an inventory$", outcome(lambda: inventory.parse(text, "hosts.yaml")))


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5))
HOST_KEYS = st.sampled_from([*Host.__dataclass_fields__, "conda", "other"])
TREES = st.recursive(
    SCALARS,
    lambda parts: st.lists(parts, max_size=4) | st.dictionaries(HOST_KEYS, parts, max_size=4),
    max_leaves=12,
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["hosts", "defaults", "master", "master_port"]), TREES))
def test_any_tree_is_an_inventory_or_an_input_error(tree: dict[str, object]) -> None:
    text = yaml.safe_dump(tree)
    assert re.match(r"hosts\.yaml:\d+: |an inventory$", outcome(lambda: inventory.parse(text, "hosts.yaml")))


# --- Files ---------------------------------------------------------------------------------------


@settings(deadline=None)
@given(data=st.binary())
def test_any_bytes_in_a_file_are_an_inventory_or_an_input_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(data)
    assert outcome(lambda: inventory.load(path)).startswith((f"{path}:", "an inventory"))


def test_a_file_with_a_byte_order_mark_and_windows_line_ends_is_read(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yaml"
    path.write_bytes(b"\xef\xbb\xbfhosts:\r\n- a\r\n")
    assert inventory.load(path).hosts == (Host("a", address="a"),)
    assert inventory.load(path).source == str(path)


def test_a_file_that_is_not_utf8_is_refused_with_the_line(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yaml"
    path.write_bytes(b"hosts:\n- a\n# \xe4\n")
    with pytest.raises(InputError, match=re.escape(f"{path}:3: not valid UTF-8")):
        inventory.load(path)


def test_a_file_that_is_far_too_large_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yaml"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse: takes no disk, but could not be read into memory
    with pytest.raises(InputError, match="larger than"):
        inventory.read(path)
    with pytest.raises(InputError, match="larger than"):
        inventory.parse("#" * (inventory.MAX_BYTES + 1), "hosts.yaml")


def test_a_folder_a_missing_file_and_an_unreadable_one_are_input_errors(tmp_path: Path) -> None:
    loop = tmp_path / "loop.yaml"
    loop.symlink_to(loop)
    with pytest.raises(InputError, match="is a folder"):
        inventory.load(tmp_path)
    with pytest.raises(InputError, match="cannot be read: No such file"):
        inventory.load(tmp_path / "none.yaml")
    with pytest.raises(InputError, match="cannot be read: Too many levels"):
        inventory.load(loop)


def test_the_inventory_is_looked_for_in_the_documented_order(tmp_path: Path) -> None:
    cwd, config, home = tmp_path / "cwd", tmp_path / "config", tmp_path / "home"
    here = cwd / "hosts.yaml"
    in_config = config / "ringctl" / "hosts.yaml"
    in_home = home / ".config" / "ringctl" / "hosts.yaml"
    named, from_environ = cwd / "named.yaml", tmp_path / "environ.yaml"
    environ = {"HOME": str(home)}

    cwd.mkdir()
    assert inventory.find(None, environ, cwd) is None
    for path, more in [(in_home, {}), (in_config, {"XDG_CONFIG_HOME": str(config)}), (here, {})]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        environ.update(more)
        assert inventory.find(None, environ, cwd) == path
    from_environ.touch()
    environ["RINGCTL_HOSTS"] = str(from_environ)
    assert inventory.find(None, environ, cwd) == from_environ
    named.touch()
    assert inventory.find("named.yaml", environ, cwd) == named


@pytest.mark.parametrize(
    ("option", "environ", "origin"),
    [("gone.yaml", {}, "--hosts"), (None, {"RINGCTL_HOSTS": "gone.yaml"}, "$RINGCTL_HOSTS")],
)
def test_a_file_that_was_named_but_is_missing_is_an_error_even_if_there_is_another(
    tmp_path: Path, option: str | None, environ: dict[str, str], origin: str
) -> None:
    (tmp_path / "hosts.yaml").touch()
    with pytest.raises(InputError, match=re.escape(f"gone.yaml: no such file; {origin}")):
        inventory.find(option, environ, tmp_path)


def test_an_empty_variable_names_no_file(tmp_path: Path) -> None:
    environ = {"RINGCTL_HOSTS": "", "XDG_CONFIG_HOME": "", "HOME": str(tmp_path)}
    assert inventory.find(None, environ, tmp_path) is None


def test_a_dangling_link_is_found_and_then_reported(tmp_path: Path) -> None:
    (tmp_path / "hosts.yaml").symlink_to("gone")
    path = inventory.find(None, {"HOME": str(tmp_path)}, tmp_path)
    assert path == tmp_path / "hosts.yaml"
    with pytest.raises(InputError, match="No such file"):
        inventory.load(path)


def test_importing_the_module_does_not_import_yaml() -> None:
    code = "import sys, launcher.inventory, launcher.hostlist; sys.exit('yaml' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PROJECT).returncode == 0
