"""All ranks get rank 0's parameters by plain send and recv; `dist.broadcast` does the same in one call."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(rank)  # a different model on each rank ...
model = nn.Linear(4, 2)
print(f"rank {rank} begins with {model.weight[0, 0].item():.4f}", flush=True)

with torch.no_grad():
    for parameter in model.parameters():
        if rank == 0:
            for other in range(1, world):
                dist.send(parameter, other)
        else:
            dist.recv(parameter, 0)  # into the parameter itself: here it is to be replaced

print(f"rank {rank} ends with {model.weight[0, 0].item():.4f}", flush=True)  # ... and the same on all
dist.destroy_process_group()
