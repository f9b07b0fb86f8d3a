"""A loop with an optimizer of PyTorch's and `reduce_gradients`: `torch_optimizer.py OUT DEVICE DTYPE`."""

import json
import sys
from pathlib import Path

import torch

import trn_dist.xla as xla
from trn_dist.xla.graphs import count_graphs

out, device, dtype = Path(sys.argv[1]), sys.argv[2], getattr(torch, sys.argv[3])

with xla.init(device) as world:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).to(world.device)
    unused = torch.nn.Parameter(torch.ones(3, device=world.device))
    parameters = [*model.parameters(), unused]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    compiled = []
    for step in range(6):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))[world.rank :: world.size]
        model(x.to(world.device)).square().mean().backward()
        xla.reduce_gradients(parameters, world, bucket_mb=0.0002, dtype=dtype)
        optimizer.step()
        optimizer.zero_grad()
        world.sync()
        compiled.append(count_graphs(world).compiled)
    weights = [view.flatten().tolist() for view in world.host_views(parameters)]
    world.barrier()
    (out / f"{world.rank}.json").write_text(json.dumps({"weights": weights, "compiled": compiled}))
