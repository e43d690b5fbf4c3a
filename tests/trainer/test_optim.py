from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.trainer.ranks import each
from trainer.flat import Flat
from trainer.optim import SGD


def test_it_steps_as_torchs_own_sgd_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch.optim makes one when it is imported

    def work(_: int) -> None:
        ours, theirs = nn.Linear(50, 20), nn.Linear(50, 20)
        theirs.load_state_dict(ours.state_dict())
        flat = Flat(ours)
        optimizer = SGD(flat, momentum=0.9)
        reference = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
        for lr in (0.1, 0.05, 0.2):
            flat.gradients.normal_()
            theirs.bias.grad = flat.gradients[:20].clone()
            theirs.weight.grad = flat.gradients[20:].view(20, 50).clone()
            reference.param_groups[0]["lr"] = lr
            reference.step()
            optimizer.step(lr)
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict())

    each(1, work)
