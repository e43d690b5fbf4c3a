"""A rank: join the group, finish one collective, and leave the time of that in $BENCH_DONE/<rank>.

With a number as argument it is no rank, but starts that many with torch.multiprocessing.spawn.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn


def rank() -> None:
    dist.init_process_group("gloo")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    moment = time.time()
    assert ones.item() == dist.get_world_size()
    print(f"rank {dist.get_rank()}: the first collective is done", flush=True)
    with open(os.path.join(os.environ["BENCH_DONE"], str(dist.get_rank())), "w") as f:
        f.write(repr(moment))
    dist.destroy_process_group()


def spawned(number: int) -> None:
    os.environ["RANK"] = str(number)
    rank()


if __name__ == "__main__":
    if len(sys.argv) == 1:
        rank()
    else:
        os.environ["WORLD_SIZE"] = sys.argv[1]
        spawn(spawned, nprocs=int(sys.argv[1]))  # type: ignore[no-untyped-call]  # torch has no types for it
