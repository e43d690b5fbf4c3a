"""A rank that averages some large gradients and says what memory that took: {"gradient", "took"} in MB.

    sync_memory.py NAME    a strategy and maybe a format, as in ring:int8

What it took is the peak of the process above what it had when the model was there and no gradient yet.
"""

import ctypes
import json
import sys

import torch
import torch.distributed as dist
from torch import nn

from trainer import sync
from trainer.config import Config
from trainer.flat import Flat

WIDTH, LAYERS = 1000, 16  # 64 MB of gradients


def memory(field: str) -> int:
    """Bytes that the kernel counts: VmRSS is those of now, VmHWM the most there were."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main() -> None:
    strategy, _, format = sys.argv[1].partition(":")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    rank, world = dist.get_rank(), dist.get_world_size()
    config = Config(sync=strategy, compress=format or "none", rank=rank, world_size=world)
    with torch.no_grad():
        model(torch.ones(1, WIDTH))  # libraries are loaded from now on
    flat = Flat(model)  # the parameters have moved, and the gradients take memory once they are written
    ctypes.CDLL(None).malloc_trim(0)
    gradient, before = 4 * WIDTH * WIDTH * LAYERS, memory("VmRSS")
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")  # the peak begins anew
    made = sync.create(model, flat, config)
    for _ in range(3):
        made.begin()
        made.model(torch.ones(1, WIDTH)).sum().backward()
        made.finish()
    took = memory("VmHWM") - before
    print(json.dumps({"gradient": gradient / 1e6, "took": took / 1e6}), flush=True)
    made.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
