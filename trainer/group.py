"""The process group of all ranks: joining and leaving it, and the few things all ranks do together.

With one rank there is no group, and everything here is a no-op.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from trainer.config import Config
from trainer.errors import TrainerError


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def joined(config: Config) -> Iterator[None]:
    """Be a member of the group inside the block; TrainerError if the others do not come, or go away."""
    if config.world_size == 1:
        yield
        return
    if config.gloo_socket_ifname:
        os.environ["GLOO_SOCKET_IFNAME"] = config.gloo_socket_ifname
    with _explained(f"rank {config.rank} could not meet the other {config.world_size - 1}"):
        dist.init_process_group(
            "gloo",
            init_method=config.init_method,
            rank=config.rank,
            world_size=config.world_size,
            timeout=timedelta(seconds=config.timeout),
        )
    with _explained(f"rank {config.rank} lost another rank, whose own output says why"):
        yield
        dist.barrier()  # nobody leaves while another still needs it
        dist.destroy_process_group()


def wait_for_all(seconds: float) -> None:
    """Return when every rank has come here; fail, naming those that have not, after `seconds`."""
    if dist.is_initialized():
        dist.monitored_barrier(timeout=timedelta(seconds=seconds), wait_all_ranks=True)


def copy_from_rank_0(tensor: Tensor) -> None:
    if dist.is_initialized():
        dist.broadcast(tensor, src=0)


def add_over_ranks(tensor: Tensor) -> None:
    """Replace `tensor` by its sum over all ranks."""
    if dist.is_initialized():
        dist.all_reduce(tensor)


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn torch's and gloo's complaints about the network into a TrainerError that keeps their words."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise  # a mistake in this code, or in a model
        reason = str(error).partition(" This is typically caused by")[0].strip()
        raise TrainerError(f"{what}: {reason}") from error
