"""Runs the collectives of a world and leaves what this rank saw: `collectives.py OUT DEVICE`."""

import json
import sys
from pathlib import Path

import torch

import trn_dist.xla as xla
from trn_dist.errors import ConfigError

out, device = Path(sys.argv[1]), sys.argv[2]
with xla.init(device) as world:
    base = torch.arange(6, dtype=torch.float32, device=world.device).view(2, 3) + 10 * world.rank
    summed, averaged = base * 1.0, base * 1.0
    world.all_reduce_([summed], op="sum")
    world.all_reduce_([averaged], op="mean")
    # A view takes its base along.
    whole = torch.ones(4, device=world.device) * (world.rank + 1)
    world.all_reduce_([whole[1:3]], op="sum")
    # What follows in the graph must see the reduced values.
    after = averaged * 2
    views = [view.tolist() for view in world.host_views([base, summed, averaged, after, whole])]
    mean = world.all_reduce(base)
    gathered = world.all_gather(base[:, 1])
    counts = world.all_gather(torch.tensor(world.rank, device=world.device))
    received = world.broadcast(base.to(torch.bfloat16), source=1)
    twice = received * 2
    functional = [view.tolist() for view in world.host_views([base, mean, gathered, counts, received.float(), twice])]
    try:
        world.require_equal(seed=7, batch=world.rank)
    except ConfigError as error:
        disagreement = str(error)
    world.require_equal(seed=7)
    result = {
        "views": views,
        "functional": functional,
        "objects": world.all_gather_object({"rank": world.rank}),
        "broadcast": world.broadcast_object(f"from {world.rank}"),
        "disagreement": disagreement,
        "place": [world.rank, world.size, world.local_rank, world.local_size],
    }
    world.barrier()
    (out / f"{world.rank}.json").write_text(json.dumps(result))
