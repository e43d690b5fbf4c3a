"""A few faults of the soak, in `make test`; `make soak` has them all, for as long as one likes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launcher.conftest import cluster, four_hosts  # noqa: F401 - fixtures
from tests.launcher.hosts import Hosts
from tests.soak.faults import FAULTS
from tests.soak.soak import Tally, scene_in, schedule, soak, summary

SHORT = ["warden killed", "stopped while it starts again", "stop killed on its way", "sshd restarted"]


def test_a_short_soak_finds_nothing_left_lost_or_wrong(
    cluster: Hosts,  # noqa: F811 - the fixture
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RINGCTL_LEASE", "3")  # put back afterwards
    tally = Tally(seed=11)
    said: list[str] = []
    scene = scene_in(tmp_path / "soak", cluster, tally.seed)
    soak(scene, tally, said.append, seconds=600.0, most=len(SHORT), only=SHORT)
    assert tally.good, "\n".join([*said, *summary(tally)])
    assert sorted(tally.faults) == sorted(SHORT)


def test_the_same_seed_gives_the_same_faults_and_every_fault_comes() -> None:
    one, other = schedule(5, list(FAULTS)), schedule(5, list(FAULTS))
    names = [one() for _ in range(2 * len(FAULTS))]
    assert names == [other() for _ in range(2 * len(FAULTS))]
    assert set(names[: len(FAULTS)]) == set(names[len(FAULTS) :]) == set(FAULTS)
