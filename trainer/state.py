"""All that changes while a run trains, to be taken out for a checkpoint and put back from one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer import group
from trainer.errors import TrainerError
from trainer.metrics import Metrics
from trainer.optim import SGD
from trainer.sync.strategy import Strategy


@dataclass(frozen=True)
class State:
    """Where a training is. What follows from the step, such as the order of the images, is not here."""

    model: nn.Module  # itself, not as a strategy wraps it
    optimizer: SGD
    strategy: Strategy
    metrics: Metrics

    def shared(self) -> dict[str, Any]:
        """Model and optimizer, the same for any number of ranks. All of them have to call it."""
        model = self.model.state_dict() | mean_statistics(self.model)
        return {"model": model, "optimizer": self.optimizer.state_dict()}

    def own(self) -> dict[str, Any]:
        """What this rank alone knows."""
        return {
            "buffers": dict(self.model.named_buffers()),
            "random": _random_state(self.optimizer.velocity.device),
            "strategy": self.strategy.state_dict(),
            "metrics": self.metrics.state_dict(),
        }

    def put_back(self, shared: Mapping[str, Any] | None, own: Mapping[str, Any]) -> None:
        """Be where the training was when these were taken out; `send_from_rank_0` does the rest."""
        if shared is not None:
            self.model.load_state_dict(shared["model"])
            self.optimizer.load_state_dict(shared["optimizer"])
        for name, buffer in self.model.named_buffers():
            buffer.copy_(own["buffers"][name])
        self.strategy.load_state_dict(own["strategy"])
        self.metrics.load_state_dict(own["metrics"])
        self.strategy.bytes_sent, self.strategy.skipped = self.metrics.bytes_sent, self.metrics.skipped
        torch.set_rng_state(own["random"]["cpu"])
        if "cuda" in own["random"] and torch.cuda.is_available():
            torch.cuda.set_rng_state(own["random"]["cuda"], self.optimizer.velocity.device)

    def send_from_rank_0(self) -> None:
        """Give all ranks rank 0's parameters and optimizer."""
        group.copy_from_rank_0(self.optimizer.flat.parameters)
        group.copy_from_rank_0(self.optimizer.velocity)


def mean_statistics(model: nn.Module) -> dict[str, Tensor]:
    """The running means and variances of all batch-norm layers, averaged over all ranks.

    TrainerError names those with a NaN. An infinity may be meant, as in a mask, and stays one.
    """
    own = {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    if not own:
        return {}
    together = torch.cat([buffer.reshape(-1) for buffer in own.values()])
    group.add_over_ranks(together)
    together.div_(group.world())
    if together.isnan().any():
        bad = next((name for name, buffer in own.items() if buffer.isnan().any()), "")
        found = [f"rank {rank} in {name}" for rank, name in enumerate(group.gather_texts(bad)) if name]
        raise TrainerError(f"the statistics of {', '.join(found) or 'all ranks together'} have a NaN")
    parts = torch.split(together, [buffer.numel() for buffer in own.values()])
    return {
        name: part.view_as(buffer).to(buffer.dtype)
        for (name, buffer), part in zip(own.items(), parts, strict=True)
    }


def _random_state(device: torch.device) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state
