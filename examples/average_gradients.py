"""Data parallelism by hand: each rank trains on its own numbers, and all take the same step.

The model is a line through points of y = 3x + 1. The ranks see different points and end with the same line.
"""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)  # the same model everywhere
model = nn.Linear(1, 1)
mine = torch.Generator().manual_seed(rank)  # and a share of the data for each

for _ in range(200):
    x = torch.randn(16, 1, generator=mine)
    loss = ((model(x) - (3 * x + 1)) ** 2).mean()
    model.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None  # backward has made it
        dist.all_reduce(parameter.grad)  # the sum over all ranks ...
        parameter.grad /= world  # ... makes the mean
        with torch.no_grad():
            parameter.sub_(0.1 * parameter.grad)

slope, offset = model.weight.item(), model.bias.item()
print(f"rank {rank} found y = {slope:.3f} x + {offset:.3f}", flush=True)
dist.destroy_process_group()
