"""One rank's sixth batch is smaller than all others: `ragged_batch.py OUT`."""

import sys

import torch

import trn_dist.xla as xla
from trn_dist.errors import exit_code_of
from trn_dist.training import AdamW, Precision, TrainStep, linear_warmup_linear_decay


def main():
    with xla.init("cpu-xla") as world:
        model = torch.nn.Linear(4, 4).to(world.device)
        step = TrainStep(
            world,
            lambda batch: model(batch["x"]).square().mean(),
            AdamW(model.named_parameters()),
            linear_warmup_linear_decay(1e-2, 5, 100),
            precision=Precision.named("fp32"),
        )
        for index in range(10):
            ragged = index == 5 and world.rank == 1
            step(index, [{"x": torch.randn(3 if ragged else 8, 4)}])


sys.exit(exit_code_of(main))
