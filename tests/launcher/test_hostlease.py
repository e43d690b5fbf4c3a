"""The lease that a run's supervisors hold: real datagrams on loopback, and a clock that the test turns."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from launcher.hostlease import Lease, sign, verified
from launcher.hostprogress import Progress

SECRET = "5e" * 32


def about(port: int, secret: str = SECRET, others: int = 1) -> dict[str, Any]:
    place = {"leader": "s1", "address": "127.0.0.1", "port": port}
    return {**place, "others": others, "secret": secret, "seconds": 10.0}


@pytest.fixture
def port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.contextmanager
def opened(*leases: Lease) -> Iterator[None]:
    try:
        for lease in leases:
            assert lease.open(0.0) >= 0
        yield
    finally:
        for lease in leases:
            if lease._socket is not None:
                lease._socket.close()


@contextlib.contextmanager
def supervisors(port: int, many: int) -> Iterator[list[Lease]]:
    """Of a run on so many hosts, the leader first; none has heard of another yet."""
    leases = [Lease(about(port, others=many - 1), f"s{number}") for number in range(1, many + 1)]
    with opened(*leases):
        yield leases


def hear(lease: Lease, now: float) -> None:
    """Wait until something has come, and take it in."""
    assert lease._socket is not None
    select.select([lease._socket], [], [], 2.0)
    lease.receive(now)


def meet(leader: Lease, *others: Lease, now: float) -> None:
    for other in others:
        other.beat(now)
        hear(leader, now)
        hear(other, now)


def test_whoever_was_heard_and_falls_silent_is_missed_by_the_leader_and_then_by_all(port: int) -> None:
    with supervisors(port, 3) as (one, two, three):
        meet(one, two, three, now=0.0)
        assert not one.silent(9.0)
        meet(one, two, now=12.0)
        assert one.silent(12.0) == {"s3": 12.0}
        assert list(two.silent(12.0)) == ["s3"]
        meet(one, three, two, now=13.0)
        assert not one.silent(13.0)
        assert not two.silent(13.0)


def test_who_hears_nothing_of_the_leader_misses_it(port: int) -> None:
    with supervisors(port, 2) as (one, two):
        meet(one, two, now=0.0)
        assert two.silent(11.0) == {"s1": 11.0}


def test_nobody_is_missed_for_a_time_in_which_nobody_could_look(port: int) -> None:
    """All hosts of a run may be stopped together: a queue suspends it, the disks under them all hang."""
    with supervisors(port, 2) as (one, two):
        one.beat(0.0)
        meet(one, two, now=0.0)
        for lease in (one, two):
            for tenth in range(1, 51):
                lease.beat(tenth / 10)
            assert lease.beat(45.0) == 40.0, "so long it was asleep"
            assert not lease.silent(45.0)
            for tenth in range(1, 61):
                lease.beat(45.0 + tenth / 10)
            assert [round(seconds) for seconds in lease.silent(51.0).values()] == [11]


def test_whoever_always_looks_late_misses_the_others_all_the_same(port: int) -> None:
    """A host that swaps, or whose disk takes seconds for each write."""
    with supervisors(port, 2) as (one, two):
        one.beat(0.0)
        meet(one, two, now=0.0)
        for lease in (one, two):
            for number in range(1, 10):
                lease.beat(number * 1.5)
            assert lease.silent(13.5)


def test_a_lease_that_never_began_does_not_run_out(port: int) -> None:
    with supervisors(port, 2) as (one, two):
        two.beat(0.0)
        assert not two.silent(1e6)
        assert not one.silent(1e6)


def test_a_failure_on_one_host_is_told_to_all_others_at_once(port: int) -> None:
    with supervisors(port, 3) as (one, two, three):
        meet(one, two, three, now=0.0)
        two.bye("failed", "rank 1 failed")
        hear(one, 1.0)
        hear(three, 1.0)
        told = {"state": "failed", "reason": "rank 1 failed"}
        assert (one.over, three.over) == (told, told)


def test_whoever_has_finished_is_not_missed(port: int) -> None:
    with supervisors(port, 2) as (one, two):
        meet(one, two, now=0.0)
        two.bye("succeeded", "")
        hear(one, 1.0)
        assert one.over is None
        assert not one.silent(100.0)


def lose(lease: Lease) -> None:
    """What has come gets lost on its way."""
    assert lease._socket is not None
    while select.select([lease._socket], [], [], 0.0)[0]:
        lease._socket.recv(2000)


def test_a_goodbye_that_was_lost_is_said_again_until_the_leader_has_heard_it(port: int) -> None:
    with supervisors(port, 2) as (one, two):
        meet(one, two, now=0.0)
        two.bye("succeeded", "")
        lose(one)
        assert two.is_needed(2.0, since=1.0)
        two.beat(2.0)
        hear(one, 2.0)
        assert not one.silent(100.0)
        assert two.is_needed(2.0, since=1.0)
        hear(two, 2.0)
        assert not two.is_needed(2.0, since=1.0)


def test_a_leader_that_has_finished_is_not_missed_though_its_goodbye_was_lost(port: int) -> None:
    with supervisors(port, 2) as (one, two):
        meet(one, two, now=0.0)
        one.bye("succeeded", "")
        lose(two)
        meet(one, two, now=2.0)
        assert not two.silent(100.0)


def test_a_leader_that_has_finished_still_passes_on_word_between_the_others(port: int) -> None:
    with supervisors(port, 3) as (one, two, three):
        meet(one, two, three, now=0.0)
        one.bye("succeeded", "")
        meet(one, two, three, now=9.0)
        assert one.is_needed(18.0, since=1.0)
        meet(one, three, now=30.0)
        assert three.silent(30.0) == {"s2": 21.0}
        two.bye("failed", "rank 1 failed")
        hear(one, 30.0)
        hear(three, 30.0)
        assert three.over == {"state": "failed", "reason": "rank 1 failed"}
        three.bye("failed", "rank 1 failed")
        hear(one, 30.0)
        assert not one.is_needed(30.0, since=1.0)


def test_nobody_stays_for_others_that_are_not_heard_of_any_more(port: int) -> None:
    with supervisors(port, 2) as (one, two):
        meet(one, two, now=0.0)
        for lease in (one, two):
            assert lease.is_needed(17.0, since=8.0)
            assert not lease.is_needed(19.0, since=8.0)


def test_who_ends_before_the_others_were_heard_stays_for_some_leases_from_its_start(port: int) -> None:
    with supervisors(port, 2) as (one, two):
        for lease in (one, two):
            assert lease.is_needed(79.0, since=1.0)
            assert not lease.is_needed(81.0, since=79.0)


def test_a_failure_is_told_to_who_starts_only_after_it_and_heard_from_who_ended_before(port: int) -> None:
    one, two, three = (Lease(about(port, others=2), host) for host in ("s1", "s2", "s3"))
    with opened(two):
        two.bye("failed", "rank 1 failed")
        hear(two, 0.0)  # that nobody is there
        with opened(one, three):
            one.bye("succeeded", "")
            assert one.is_needed(1.0, since=1.0)
            meet(one, two, now=2.0)
            assert not two.is_needed(2.0, since=0.0)
            assert one.is_needed(2.0, since=1.0)
            meet(one, three, now=3.0)
            assert three.over == {"state": "failed", "reason": "rank 1 failed"}


def test_the_leader_says_goodbye_to_all(port: int) -> None:
    with supervisors(port, 2) as (one, two):
        meet(one, two, now=0.0)
        one.bye("stopped", "stopped")
        hear(two, 1.0)
        assert two.over == {"state": "stopped", "reason": "stopped"}


def test_who_does_not_know_the_secret_is_not_heard(port: int) -> None:
    one, stranger = Lease(about(port), "s1"), Lease(about(port, "ab" * 32), "s2")
    with opened(one, stranger):
        stranger.beat(0.0)
        stranger.bye("stopped", "stopped")
        hear(one, 0.0)
        assert one.over is None
        assert not one.silent(1e6)


def test_what_was_heard_before_does_not_count_again(port: int) -> None:
    one, two = Lease(about(port), "s1"), Lease(about(port), "s2")
    secret = bytes.fromhex(SECRET)
    with opened(one, two), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        recorded = sign(secret, {"kind": "here", "host": "s2", "number": 7})
        end.sendto(recorded, ("127.0.0.1", port))
        hear(one, 0.0)
        end.sendto(recorded, ("127.0.0.1", port))
        hear(one, 11.0)
        assert one.silent(11.0) == {"s2": 11.0}


@pytest.mark.parametrize(
    "words", [{"kind": "here"}, {"kind": "bye", "state": "failed", "reason": "it is old"}]
)
def test_what_was_said_to_the_leader_is_nothing_to_another(port: int, words: dict[str, str]) -> None:
    with supervisors(port, 2) as (one, two):
        meet(one, two, now=0.0)
        assert one._socket is not None
        recorded = sign(bytes.fromhex(SECRET), {**words, "host": "s3", "number": 7})
        one._socket.sendto(recorded, one._addresses["s2"])
        hear(two, 1.0)
        assert two.over is None
        assert two.silent(12.0) == {"s1": 12.0}


@pytest.mark.parametrize("data", [b"", b"x" * 31, b"x" * 32, b"x" * 1400, b"\0" * 64])
def test_whatever_comes_from_elsewhere_is_nothing(data: bytes) -> None:
    assert verified(bytes.fromhex(SECRET), data) is None


def test_where_the_port_is_taken_there_is_no_lease_and_no_harm(port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", port))
        lease = Lease(about(port), "s1")
        assert lease.open(0.0) == -1
        lease.beat(0.0)
        lease.receive(0.0)
        lease.bye("failed", "rank 0 failed")
        assert not lease.silent(1e6)


def test_how_long_a_rank_took_to_begin_is_no_usual_step() -> None:
    progress = Progress("")
    progress.at -= 50.0
    progress.stepped({"step": 1})
    assert not progress.stood(0.0, 0.0), "a first step that took long may be followed by others like it"
    progress.at -= 1.0
    progress.stepped({"step": 2})
    progress.at -= 11.0
    assert progress.stood(8.0, 0.0), "for eleven usual steps"


def test_ranks_do_not_stand_still_for_a_time_in_which_nobody_could_look() -> None:
    progress = Progress("")
    progress.stepped({"step": 1})
    progress.at -= 30.0
    assert progress.stood(8.0, 30.0)
    progress.slept(25.0, time.monotonic())
    assert not progress.stood(8.0, 30.0)
    progress.at -= 9.0
    progress.slept(25.0, time.monotonic())
    assert progress.stood(8.0, 30.0), "once: who always looks late sees it, too"


def test_where_steps_may_be_lost_a_longer_time_without_one_is_no_standstill_but_not_an_endless_one() -> None:
    progress = Progress("")
    for step in (1, 2):
        progress.stepped({"step": step})
    progress.untold = True
    progress.at -= 9.0
    assert not progress.stood(8.0, 600.0), "though the other host is silent for long"
    progress.at -= 40.0
    assert progress.stood(8.0, 9.0)
    progress.stepped({"step": 3})
    progress.at -= 9.0
    assert progress.stood(8.0, 9.0), "it has told its steps again, and how long it had not is no usual step"
