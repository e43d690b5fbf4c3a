"""All that changes while a run trains, to be taken out for a checkpoint and put back from one."""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer import group
from trainer.checkpoint_files import copied
from trainer.errors import TrainerError
from trainer.metrics import Metrics
from trainer.optim import SGD
from trainer.sync.strategy import Strategy


@dataclass
class State:
    """Where a training is. What follows from the step, such as the order of the images, is not here."""

    model: nn.Module  # itself, not as a strategy wraps it
    optimizer: SGD
    strategy: Strategy
    metrics: Metrics
    first_world: int  # how many ranks the run began with: the learning rate was meant for those

    @property
    def lr_scale(self) -> float:
        """By the linear scaling rule: as many times the images in a step, as many times the rate."""
        return group.world() / self.first_world

    def shared(self) -> dict[str, Any]:
        """Model and optimizer, the same for any number of ranks. All of them have to call it."""
        model = self.model.state_dict() | mean_statistics(self.model)
        return {"model": model, "optimizer": self.optimizer.state_dict(), "first_world": self.first_world}

    def own(self) -> dict[str, Any]:
        """What this rank alone knows."""
        return {
            "buffers": dict(self.model.named_buffers()),
            "random": _random_state(self.optimizer.velocity.device),
            "strategy": self.strategy.state_dict(),
            "metrics": self.metrics.state_dict(),
        }

    def put_back_shared(self, shared: Mapping[str, Any], world: int) -> None:
        """Be where the training of `world` ranks was when this was taken out."""
        first_world = shared.get("first_world", world)
        if not isinstance(first_world, int) or first_world < 1:
            raise ValueError(f"a run cannot have begun with {first_world!r:.20} ranks")
        self.model.load_state_dict(shared["model"])
        self.optimizer.load_state_dict(shared["optimizer"])
        self.first_world = first_world

    def send_from(self, source: int) -> None:
        """Give all ranks what that rank has put back with `put_back_shared`."""
        first_world = torch.tensor(self.first_world)
        for tensor in (self.optimizer.flat.parameters, self.optimizer.velocity, first_world):
            group.copy_from(source, tensor)
        self.first_world = int(first_world)
        for buffer in self.model.buffers():
            if buffer.numel():
                raw = buffer.reshape(-1).view(torch.uint8).clone()  # gloo does not know every type
                group.copy_from(source, raw)
                buffer.copy_(raw.view(buffer.dtype).view_as(buffer))

    def put_back_own(self, own: Mapping[str, Any]) -> None:
        """Know again what this rank alone knew."""
        for name, buffer in self.model.named_buffers():
            buffer.copy_(own["buffers"][name])
        self.strategy.load_state_dict(own["strategy"])
        self.metrics.load_state_dict(own["metrics"])
        self.strategy.bytes_sent, self.strategy.skipped = self.metrics.bytes_sent, self.metrics.skipped
        torch.set_rng_state(own["random"]["cpu"])
        if "cuda" in own["random"] and torch.cuda.is_available():
            torch.cuda.set_rng_state(own["random"]["cuda"], self.optimizer.velocity.device)

    def send_strategy(self, source: int, afresh: Collection[int]) -> None:
        """Give the ranks that begin afresh what the others have in common, such as the format that
        `--compress auto` took. What those alone know, their error feedback, is not for them."""
        state = self.strategy.state_dict() if group.rank() == source else {}
        common = {name: torch.zeros_like(of) if name == "residual" else of for name, of in state.items()}
        packed = io.BytesIO()
        torch.save(copied(common), packed)
        raw = group.copy_bytes_from(source, packed.getvalue())
        if group.rank() in afresh:
            self.strategy.load_state_dict(torch.load(io.BytesIO(raw), weights_only=True))

    def begin_afresh(self, step: int, epoch: int, steps_of_epoch: int) -> None:
        """Be at this place of the training, knowing nothing but what all ranks know."""
        counts = {"step": step, "epoch": epoch, "bytes_sent": 0, "skipped": 0}
        self.metrics.load_state_dict({**counts, "whole_run": {}, "this_epoch": {"steps": steps_of_epoch}})


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
