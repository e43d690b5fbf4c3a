"""A training script of your own: torch's DistributedDataParallel, and progress that ringctl shows."""

import json
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 50

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(rank)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

# Whatever is appended to this file, a JSON object a line, ringctl shows as the rank's progress.
with open(os.environ.get("RINGCTL_METRICS", os.devnull), "a", buffering=1) as metrics:
    for step in range(1, STEPS + 1):
        x = torch.randn(64, 8)
        loss = ((model(x) - x.sum(1, keepdim=True).sin()) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()  # DDP averages the gradients meanwhile
        optimizer.step()
        print(
            json.dumps({"time": time.time(), "step": step, "steps": STEPS, "loss": loss.item()}), file=metrics
        )

total = sum(parameter.sum().item() for parameter in model.parameters())
print(f"rank {rank} of {world}: loss {loss.item():.3f}, parameters add up to {total:.6f}", flush=True)
dist.destroy_process_group()
