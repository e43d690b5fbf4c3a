"""Which checkpoint is taken, and how a run goes on from it: what every rank concludes from the same words."""

from __future__ import annotations

import pytest

from trainer import candidates
from trainer.candidates import ABSENT, AFRESH, DAMAGED, EXACT, RESIZED, UNFINISHED, UNUSABLE, WHOLE, Key, Look
from trainer.errors import InputError

OURS = Look(WHOLE, is_own=True, has_manifest=True, has_model=True)
BY_FOUR = OURS._replace(kind=ABSENT, difference="--world-size 4, not 2", is_resized=True)


def in_order(*keys: Key) -> list[Key]:
    """The newest first; nobody has a manifest."""
    return candidates.newest_first(dict.fromkeys(keys, ()))


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
    assert in_order(Key(140, 200), Key(150, 200), Key(80, 100)) == [
        Key(80, 100),
        Key(150, 200),
        Key(140, 200),
    ]


def test_of_several_with_the_number_of_a_step_the_one_that_is_furthest_is_the_newest_or_else_the_last() -> (
    None
):
    alone, grown, again = Key(400, 45_000), Key(400, 22_500, 1), Key(400, 22_500, 2)
    assert in_order(alone, grown, again) == [again, grown, alone]
    assert in_order(alone, Key(400, None, 1)) == [Key(400, None, 1), alone]


def test_a_step_without_a_manifest_is_the_one_that_another_rank_has_a_manifest_of() -> None:
    assert in_order(Key(8, None), Key(8, 10), Key(9, None)) == [Key(9, None), Key(8, 10)]
    without_steps = Key(8, None, world=2, model="a")
    assert in_order(Key(8, None), without_steps) == [without_steps]


def test_of_two_models_of_one_step_the_one_of_which_more_ranks_have_a_manifest_is_first() -> None:
    begun, complete = Key(6, 10, world=3, model="a"), Key(6, 10, world=2, model="b")
    for in_folder in ({begun: [0], complete: [0, 1]}, {complete: [0, 1], begun: [0, 2]}):
        assert candidates.newest_first(in_folder) == [complete, begun]
    assert candidates.newest_first({complete: [0], begun: [0, 2]}) == [begun, complete]


@pytest.mark.parametrize(
    ("looks", "is_later", "expected"),
    [
        ([OURS._replace(has_model=False), OURS], False, EXACT),
        ([OURS, Look(ABSENT)], True, AFRESH),
        ([OURS, Look(DAMAGED)], True, AFRESH),
        ([OURS, Look(UNFINISHED)], True, UNUSABLE),
        ([OURS, Look(UNFINISHED), Look(ABSENT)], True, AFRESH),
        ([OURS._replace(kind=ABSENT), Look(ABSENT)], True, AFRESH),
        ([OURS, Look(ABSENT)], False, UNUSABLE),
        ([OURS._replace(is_own=False), Look(ABSENT)], True, UNUSABLE),
        ([Look(ABSENT), OURS._replace(has_model=False)], True, UNUSABLE),
        ([Look(ABSENT), BY_FOUR], True, RESIZED),
        ([Look(ABSENT), BY_FOUR._replace(has_model=False)], True, UNUSABLE),
    ],
)
def test_how_a_run_can_go_on(looks: list[Look], is_later: bool, expected: str) -> None:
    assert candidates.verdict(Key(4, 8), looks, is_later) == expected


def test_a_part_that_was_begun_here_is_not_on_its_host_if_the_rank_has_a_manifest_on_another() -> None:
    begun = [OURS._replace(kind=UNFINISHED), Look(UNFINISHED)]
    assert candidates.verdict(Key(4, 8), candidates.corrected(begun, [0]), is_later=True) == AFRESH
    assert candidates.verdict(Key(4, 8), candidates.corrected(begun, []), is_later=True) == UNUSABLE


def test_what_an_interrupted_save_has_left_is_known_by_its_checksum() -> None:
    begun = [OURS, Look(UNFINISHED, sha256="left"), Look(UNFINISHED, sha256="c")]
    assert candidates.strangers(begun, {"parts_sha256": ["a", "b", "c"]}) == [1]
    assert candidates.strangers(begun, {}) == [], "one from before they were listed"


@pytest.mark.parametrize(
    ("is_resized", "is_own", "is_later"), [(True, True, False), (True, False, True), (False, True, True)]
)
def test_another_run_is_refused(is_resized: bool, is_own: bool, is_later: bool) -> None:
    looks = [Look(ABSENT), BY_FOUR._replace(is_resized=is_resized, is_own=is_own)]
    with pytest.raises(InputError, match="step 4 was made with --world-size 4, not 2"):
        candidates.verdict(Key(4, 8), looks, is_later)


@pytest.mark.parametrize(
    ("step", "steps", "now", "expected"),
    [(50, 100, 200, 100), (7, 12, 20, 11), (10, 10, 10, 10), (1, 9, 3, 0)],
)
def test_a_step_is_as_far_for_another_number_of_ranks(step: int, steps: int, now: int, expected: int) -> None:
    assert candidates.ported(step, steps, now) == expected


@pytest.mark.parametrize(("step", "expected"), [(0, 1), (4, 1), (5, 2), (14, 3), (15, 3)])
def test_the_epoch_follows_from_the_step(step: int, expected: int) -> None:
    assert candidates.epoch_of(step, per_epoch=5, epochs=3) == expected
