"""What the trainer's tests share."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def _torch_for_ddp(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Import once, for all forked ranks, what making a DistributedDataParallel imports: it takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        importlib.import_module("torch._dynamo")


@pytest.fixture
def with_ddp(_torch_for_ddp: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests whose ranks use torch's DistributedDataParallel."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
