"""A recipe whose graphs are locked: `lock_recipe.py DEVICE WIDTH DROPOUT SEED [EXIT_CODE]`."""

import sys

import torch

import trn_dist.xla as xla
from trn_dist.training import AdamW, Precision, TrainStep, linear_warmup_linear_decay

device, width, dropout, seed = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])

with xla.init(device) as world:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(8, width), torch.nn.Dropout(dropout), torch.nn.Linear(width, 2)]
    model = torch.nn.Sequential(*(layer for layer in layers if dropout or layer is not layers[1])).to(world.device)
    step = TrainStep(
        world,
        lambda batch: model(batch["x"]).square().mean(),
        AdamW(model.named_parameters()),
        linear_warmup_linear_decay(1e-3 * seed, 2, 100),
        accumulation=2,
        precision=Precision.named("fp32"),
    )
    for index in range(3):
        step(index, [{"x": torch.randn(4, 8)}] * 2)

sys.exit(int(sys.argv[5]) if len(sys.argv) > 5 else 0)
