"""Which checkpoint is taken, and how a run goes on from it: what every rank concludes from the same words."""

from __future__ import annotations

import pytest

from trainer import candidates
from trainer.candidates import ABSENT, AFRESH, EXACT, RESIZED, UNUSABLE, WHOLE, Key, Look
from trainer.errors import InputError

FOUR = "--world-size 4, not 2"


@pytest.mark.parametrize(
    ("hosts", "copies", "expected"),
    [
        ("aabb", 0, [0]),
        ("aabb", 1, [0, 2]),
        ("abab", 1, [0, 1]),
        ("aabbcd", 2, [0, 2, 4]),
        ("abcd", 9, [0, 1, 2, 3]),
        ("aaaa", 1, [0]),
    ],
)
def test_the_first_rank_on_each_of_the_next_hosts_writes_the_model_too(
    hosts: str, copies: int, expected: list[int]
) -> None:
    assert candidates.writers(hosts, copies) == expected


def test_the_newest_is_the_one_that_is_furthest_whatever_its_ranks_count() -> None:
    by_two, by_four = [Key(140, 200), Key(150, 200)], [Key(80, 100)]
    assert candidates.newest_first([*by_two, *by_four, *by_two]) == [
        Key(80, 100),
        Key(150, 200),
        Key(140, 200),
    ]


def test_of_several_with_the_number_of_a_step_the_one_that_is_furthest_is_the_newest_or_else_the_last() -> (
    None
):
    alone, grown, again = Key(400, 45_000), Key(400, 22_500, 1), Key(400, 22_500, 2)
    assert candidates.newest_first([alone, grown, again]) == [again, grown, alone]
    assert candidates.newest_first([alone, Key(400, None, 1)]) == [Key(400, None, 1), alone]


def test_a_step_without_a_manifest_is_the_one_that_another_rank_has_a_manifest_of() -> None:
    assert candidates.newest_first([Key(8, None), Key(8, 10), Key(9, None)]) == [Key(9, None), Key(8, 10)]


@pytest.mark.parametrize(
    ("looks", "is_later", "expected"),
    [
        ([Look(WHOLE), Look(WHOLE, has_model=True)], False, EXACT),
        ([Look(WHOLE, is_own=True, has_model=True), Look(ABSENT)], True, AFRESH),
        ([Look(WHOLE, is_own=True, has_model=True), Look(ABSENT)], False, UNUSABLE),
        ([Look(WHOLE, has_model=True), Look(ABSENT)], True, UNUSABLE),
        ([Look(ABSENT), Look(WHOLE, is_own=True)], True, UNUSABLE),
        ([Look(ABSENT), Look(ABSENT, "", FOUR, True, True, True)], True, RESIZED),
        ([Look(ABSENT), Look(ABSENT, "", FOUR, True, True, False)], True, UNUSABLE),
    ],
)
def test_how_a_run_can_go_on(looks: list[Look], is_later: bool, expected: str) -> None:
    assert candidates.verdict(Key(4, 8), looks, is_later) == expected


@pytest.mark.parametrize(
    ("is_resized", "is_own", "is_later"), [(True, True, False), (True, False, True), (False, True, True)]
)
def test_another_run_is_refused(is_resized: bool, is_own: bool, is_later: bool) -> None:
    looks = [Look(ABSENT), Look(ABSENT, "", FOUR, is_resized, is_own, True)]
    with pytest.raises(InputError, match="step 4 was made with --world-size 4, not 2"):
        candidates.verdict(Key(4, 8), looks, is_later)


def test_a_part_belongs_to_the_model_that_it_was_saved_with() -> None:
    looks = [Look(WHOLE, model_sha256="old"), Look(WHOLE, model_sha256="new"), Look(WHOLE), Look(ABSENT)]
    assert candidates.without_part(looks, "new") == [0, 3]


@pytest.mark.parametrize(
    ("step", "steps", "now", "expected"),
    [(50, 100, 200, 100), (7, 12, 20, 11), (10, 10, 10, 10), (1, 9, 3, 0)],
)
def test_a_step_is_as_far_for_another_number_of_ranks(step: int, steps: int, now: int, expected: int) -> None:
    assert candidates.ported(step, steps, now) == expected


@pytest.mark.parametrize(("step", "expected"), [(0, 1), (4, 1), (5, 2), (14, 3), (15, 3)])
def test_the_epoch_follows_from_the_step(step: int, expected: int) -> None:
    assert candidates.epoch_of(step, per_epoch=5, epochs=3) == expected
