"""One service for all tests that only knock at its door; those that change something start their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.serve.service import Service, serving


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service that was started before the test, in a home of its own."""
    folder = tmp_path_factory.mktemp("door")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RINGCTL_HOME", str(folder / "ringctl"))
        patch.setenv("RINGCTL_SLOTS", str(folder / "slots"))  # not those of whatever else runs here
        patch.delenv("RINGCTL_HOSTS", raising=False)
        with serving(slots=2) as service:
            yield service


@pytest.fixture
def at_the_door(door: Service, clean: None, monkeypatch: pytest.MonkeyPatch) -> Service:  # noqa: ARG001 - sets the environment
    """The same, with its home as ours."""
    monkeypatch.setenv("RINGCTL_HOME", str(Path(door.folder) / "ringctl"))
    monkeypatch.setenv("RINGCTL_SLOTS", str(Path(door.folder) / "slots"))
    return door
