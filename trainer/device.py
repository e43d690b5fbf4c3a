"""Where a rank computes, and over what the ranks talk.

Tested: CPU with gloo. CUDA with NCCL is written after torch's documentation and has not been tried on a GPU;
nor has MPI, which needs a torch that was built with it.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from trainer.config import Config
from trainer.errors import InputError
from trainer.sync import STRATEGIES


def chosen(config: Config) -> torch.device:
    """The device that `--device` asks for. With `auto` it is a GPU where there is one that can be used."""
    if config.device == "cpu":
        return torch.device("cpu")
    fits = "cuda" in STRATEGIES[config.sync].devices and config.backend in ("auto", "nccl")
    if torch.cuda.is_available() and (config.device == "cuda" or fits):
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    if config.device == "cuda":
        raise InputError("--device cuda: this torch sees no GPU here; leave --device out to use the CPU")
    return torch.device("cpu")


def backend(config: Config) -> str:
    """What to give to `init_process_group`."""
    if config.backend == "mpi" and not dist.is_mpi_available():
        raise InputError("--backend mpi: this torch was built without MPI; use gloo, or build torch with it")
    if config.backend == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
        raise InputError("--backend nccl: it needs a GPU and a torch with CUDA; use gloo on CPUs")
    if config.backend in ("gloo", "mpi"):
        return config.backend
    # Gradients are on the GPU, but counts and hashes are not.
    return "cpu:gloo,cuda:nccl" if chosen(config).type == "cuda" else "gloo"
