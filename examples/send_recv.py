"""A tensor goes once around the ring: each rank adds its own number and passes it on."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
left, right = (rank - 1) % world, (rank + 1) % world

number = torch.tensor([float(rank)])
if rank == 0:
    dist.send(number, right)
    dist.recv(number, left)  # what comes back has been everywhere
    print(f"the ranks' numbers add up to {number.item():g}", flush=True)
else:
    arrived = torch.empty(1)  # not `number`: that is still to be added
    dist.recv(arrived, left)
    dist.send(arrived + number, right)
    print(f"rank {rank} got {arrived.item():g} and passed on {(arrived + number).item():g}", flush=True)

dist.destroy_process_group()
