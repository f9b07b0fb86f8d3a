"""Trains a small network data-parallel: `train_small.py OUT DEVICE BATCH ACCUMULATION STEPS PRECISION`.

The global batch of a step is the same however it is cut, so worlds of different sizes can be compared.
"""

import hashlib
import json
import sys
from pathlib import Path

import torch

import trn_dist.xla as xla
from trn_dist.training import AdamW, Precision, TrainStep, linear_warmup_linear_decay
from trn_dist.xla.graphs import count_graphs

out, device = Path(sys.argv[1]), sys.argv[2]
batch_size, accumulation, steps = map(int, sys.argv[3:6])
precision = Precision.named(sys.argv[6])


def samples(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 12, generator=generator)


with xla.init(device) as world:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.Tanh(), torch.nn.Linear(24, 12))
    model = model.to(precision.weights).to(world.device)
    optimizer = AdamW(
        model.named_parameters(),
        master_weights=precision.master_weights,
        stochastic_rounding=precision.stochastic_rounding,
    )

    def loss(batch):
        x = batch["x"].to(precision.weights)
        return (model(x).float() - x.float().sin()).square().mean()

    train_step = TrainStep(
        world,
        loss,
        optimizer,
        linear_warmup_linear_decay(1e-2, 5, 100),
        accumulation=accumulation,
        precision=precision,
        bucket_mb=0.001,
    )
    losses, norms, digests, compiled = [], [], [], []
    for step in range(steps):
        x = samples(step)
        turns = [a * world.size + world.rank for a in range(accumulation)]
        result = train_step(step, [{"x": x[t * batch_size : (t + 1) * batch_size]} for t in turns])
        compiled.append(count_graphs(world).compiled)
        views = world.host_views([result.loss, result.gradient_norm, *model.parameters()])
        losses.append(views[0].item())
        norms.append(views[1].item())
        content = b"".join(view.contiguous().view(torch.uint8).numpy().tobytes() for view in views[2:])
        digests.append(hashlib.sha256(content).hexdigest())
    result = {
        "losses": losses,
        "norms": norms,
        "digests": digests,
        "weights": [view.float().flatten().tolist() for view in views[2:]],
        "compiled": compiled,
    }
    world.barrier()
    (out / f"{world.rank}.json").write_text(json.dumps(result))
