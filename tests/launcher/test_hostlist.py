"""`-H a,b` and hostfiles: what they may say, and what is said about mistakes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.errors import InputError
from launcher.hostlist import parse_host_list, parse_hostfile
from launcher.model import Host, Inventory


def test_a_host_list_gives_users_and_slots_and_its_first_host_is_master() -> None:
    found = parse_host_list("server1:2,lab@server2, 192.168.0.3:4")
    assert found.hosts == (
        Host("server1", address="server1", slots=2),
        Host("server2", address="server2", user="lab"),
        Host("192.168.0.3", address="192.168.0.3", slots=4),
    )
    assert (found.master, found.master_port, found.source) == ("server1", None, "-H")


def test_an_ipv6_address_stands_in_brackets() -> None:
    found = parse_host_list("[fe80::1%eth0]:2,me@[::1]")
    assert found.hosts == (
        Host("fe80::1%eth0", address="fe80::1%eth0", slots=2),
        Host("::1", address="::1", user="me"),
    )


def test_the_last_at_sign_ends_the_user() -> None:
    (host,) = parse_host_list("me@corp@server1").hosts
    assert (host.user, host.name) == ("me@corp", "server1")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "-H '': not a host; write [user@]host[:slots]"),
        ("a,,b", "-H '': not a host"),
        ("a,", "-H '': not a host"),
        ("fe80::1", "-H 'fe80::1': not a host; write [user@]host[:slots], with an IPv6 address in brackets"),
        ("a:2:3", "-H 'a:2:3': not a host"),
        ("[::1]2", "-H '[::1]2': not a host"),
        ("a:0", "-H 'a:0': slots: found 0; write a whole number from 1 to 1024"),
        ("a:-1", "slots: found -1"),
        ("a:1025", "slots: found 1025"),
        ("a:x", "slots: found 'x'"),
        ("a:", "slots: found ''"),
        ("a,b,a:2", "-H 'a:2': name: duplicate host 'a'"),
        ("-oProxyCommand=x", "name: found '-oProxyCommand=x'"),
        ("-l@a", "user: found '-l'"),
        ("@a", "user: found ''"),
        ("a;b", "name: found 'a;b'"),
        ("a b", "name: found 'a b'"),
        ("a\n", "name: found 'a\\n'"),
        ("[]:2", "name: found ''"),
        ("192.168.0.300", "name: found '192.168.0.300'"),
    ],
)
def test_a_mistake_in_a_host_list_is_named_with_the_entry(text: str, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_host_list(text)
    assert expected in str(caught.value)
    assert str(caught.value).startswith("-H ")
    assert "\n" not in str(caught.value)


def test_a_hostfile_is_read_in_all_its_dialects() -> None:
    found = parse_hostfile(
        "\ufeff# the lab\n\nserver1 slots=2\nserver2:3   # fast\n"
        "\tlab@server3 slots = 4 max_slots=8\r\nserver4 max-slots=2",
        "hostfile",
    )
    assert found.hosts == (
        Host("server1", address="server1", slots=2),
        Host("server2", address="server2", slots=3),
        Host("server3", address="server3", user="lab", slots=4),
        Host("server4", address="server4"),
    )
    assert (found.master, found.source) == ("server1", "hostfile")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "hostfile:1: the file names no host"),
        ("# nobody\n", "hostfile:1: the file names no host"),
        ("a\nb slot=2\n", "hostfile:2: found 'slot=2'; write slots=NUMBER"),
        ("a b\n", "hostfile:1: found 'b'; write slots=NUMBER"),
        ("a slots=two\n", "hostfile:1: found 'slots=two'"),
        ("a\n\nb slots=0\n", "hostfile:3: slots: found 0; write a whole number from 1 to 1024"),
        ("a slots=2 slots=3\n", "hostfile:1: slots: given twice"),
        ("a:1 slots=2\n", "hostfile:1: slots: given twice"),
        ("a\nb\na slots=2\n", "hostfile:3: name: duplicate host 'a', already at hostfile:1"),
        ("a\n$(b)\n", "hostfile:2: name: found '$(b)'"),
        ("a\nb\x0bc\n", "hostfile:2: name: found 'b\\x0bc'"),
        ("a\n-b\n", "hostfile:2: name: found '-b'"),
        ("a\nfe80::1\n", "hostfile:2: not a host"),
    ],
)
def test_a_mistake_in_a_hostfile_is_named_with_file_and_line(text: str, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_hostfile(text, "hostfile")
    assert str(caught.value).startswith(expected)


def outcome(read: Callable[[], Inventory]) -> str:
    try:
        return "an inventory" if read().hosts else "no hosts"
    except InputError as error:
        return str(error)


@settings(deadline=None)
@given(st.text() | st.text(alphabet="ab1@:[],= \t\n#-"))
def test_any_text_is_a_list_of_hosts_or_an_input_error(text: str) -> None:
    assert outcome(lambda: parse_host_list(text)).startswith(("-H ", "an inventory"))
    assert outcome(lambda: parse_hostfile(text, "hostfile")).startswith(("hostfile:", "an inventory"))
