"""One CNN split over two ranks: rank 0 has the convolutions, rank 1 the rest.

Activations go forward and their gradients come back, by send and recv. Between them the two ranks do exactly
what one process with the whole model would do.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

STEPS, BATCH = 30, 32

world = int(os.environ["WORLD_SIZE"])
if world != 2:  # before they meet: who leaves first would take the others' meeting place along
    raise SystemExit(f"this model has two parts, for two ranks; there are {world}")
dist.init_process_group("gloo")
rank = dist.get_rank()

torch.manual_seed(0)
convolutions = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten())
head = nn.Linear(8 * 7 * 7, 10)
part = convolutions if rank == 0 else head
draw = torch.Generator().manual_seed(1)  # both ranks draw the same images, of which each needs a part
digits = torch.randn(10, 1, 28, 28, generator=draw)  # what a digit looks like, before noise

first = last = 0.0
for _ in range(STEPS):
    labels = torch.randint(0, 10, (BATCH,), generator=draw)
    images = digits[labels] + 0.5 * torch.randn(BATCH, 1, 28, 28, generator=draw)
    part.zero_grad()
    if rank == 0:
        activations = convolutions(images)
        dist.send(activations.detach(), 1)
        gradient = torch.empty_like(activations)
        dist.recv(gradient, 1)
        activations.backward(gradient)  # go on where rank 1 stopped
    else:
        activations = torch.empty(BATCH, 8 * 7 * 7)
        dist.recv(activations, 0)
        activations.requires_grad_()  # so that backward leaves its gradient here
        loss = cross_entropy(head(activations), labels)
        torch.autograd.backward(loss)
        assert activations.grad is not None  # as it is to leave it
        dist.send(activations.grad, 0)
        first, last = first or loss.item(), loss.item()
    with torch.no_grad():
        for parameter in part.parameters():
            assert parameter.grad is not None
            parameter.sub_(0.05 * parameter.grad)

if rank == 1:
    print(f"the loss fell from {first:.2f} to {last:.2f}", flush=True)
dist.destroy_process_group()
