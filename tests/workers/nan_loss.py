"""The loss of one rank is no number in one step: `nan_loss.py OUT DEVICE`."""

import hashlib
import json
import sys
from pathlib import Path

import torch

import trn_dist.xla as xla
from trn_dist.training import AdamW, Precision, TrainStep, linear_warmup_linear_decay

out, device = Path(sys.argv[1]), sys.argv[2]

with xla.init(device) as world:
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 6).to(world.device)
    step = TrainStep(
        world,
        lambda batch: model(batch["x"]).square().mean(),
        AdamW(model.named_parameters()),
        linear_warmup_linear_decay(1e-2, 2, 100),
        precision=Precision.named("fp32"),
    )
    seen = []
    for index in range(6):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * index + world.rank))
        if index == 3 and world.rank == 1:
            x[0, 0] = float("nan")
        result = step(index, [{"x": x}])
        views = world.host_views([result.finite, *model.parameters()])
        content = b"".join(view.contiguous().numpy().tobytes() for view in views[1:])
        seen.append((bool(views[0]), hashlib.sha256(content).hexdigest()))
    world.barrier()
    (out / f"{world.rank}.json").write_text(json.dumps(seen))
