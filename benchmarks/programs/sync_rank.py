"""A rank that lets ways of averaging take turns, A B C A B C ..., and says how long each took.

    sync_rank.py mean ROUNDS NAME ...    the mean of 12 MB
    sync_rank.py step ROUNDS NAME ...    a training step of the 1.2 M parameter CNN, batch 16

NAME is a strategy and maybe a format, as in ring:int8; `gloo` is a plain all_reduce, `alone` no exchange.
The last line of rank 0 is JSON: seconds of every round for each name, on the slowest rank.
"""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from trainer import sync
from trainer.bench import exchanging
from trainer.bench.exchanging import Turn, take_turns
from trainer.bench.options import Way
from trainer.config import Config
from trainer.flat import Flat
from trainer.models import MODELS
from trainer.optim import SGD
from trainer.sync.serial import Serial
from trainer.sync.strategy import Strategy

BYTES = 12_000_000


def configured(name: str) -> Config:
    way = way_of(name)
    return Config(
        sync=way.sync, compress=way.compress, rank=dist.get_rank(), world_size=dist.get_world_size()
    )


def way_of(name: str) -> Way:
    sync, _, format = name.partition(":")
    return Way(sync, format or "none")


def mean(name: str) -> Turn:
    """Average 12 MB of random gradients."""
    return exchanging.mean(way_of(name), exchanging.gradients(BYTES), Config())


def step(name: str) -> Turn:
    """Forward, backward, exchange and update."""
    model = MODELS["mnist-cnn"]()
    flat = Flat(model)
    config = Config() if name == "alone" else configured(name)
    made = Alone(model, flat, config) if name == "alone" else sync.create(model, flat, config)
    optimizer = SGD(flat, momentum=0.9)
    pixels = torch.randn(16, 1, 28, 28).to(memory_format=torch.channels_last)
    labels = torch.randint(10, (16,))

    def once() -> None:
        made.begin()
        cross_entropy(made.model(pixels), labels).backward()  # type: ignore[no-untyped-call]  # torch's
        made.finish()
        optimizer.step(lr=0.001)

    return Turn(once)


class Alone(Serial):
    """Computes as one of many, and exchanges nothing."""

    def __init__(self, model: nn.Module, flat: Flat, config: Config) -> None:
        Strategy.__init__(self, model, flat, config)


def main() -> None:
    kind, rounds, names = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    contestants = {name: {"mean": mean, "step": step}[kind](name) for name in names}
    seconds = take_turns(contestants, rounds)
    if dist.get_rank() == 0:
        print(json.dumps(seconds), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
