"""Lowers the training step for one NeuronCore of 64 and leaves its HLO text: `lower_neuron_step.py OUT ACCUMULATION`.

Nothing is executed: a Trainium device would compile this graph. XLA_ALWAYS_ALLREDUCE keeps collectives in the graph
although the world that torch_xla sees here is one process.
"""

import json
import os
import sys
from pathlib import Path

os.environ.update(PJRT_DEVICE="CPU", XLA_ALWAYS_ALLREDUCE="1")

import torch
import torch_xla

from trn_dist.training import AdamW, Precision, TrainStep
from trn_dist.xla.pjrt import NeuronWorld


class LoweredWorld(NeuronWorld):
    """A NeuronWorld that opens the CPU in the place of the NeuronCore and keeps graphs instead of running them."""

    def __init__(self):
        self.rank, self.size, self.local_rank, self.local_size = 3, 64, 3, 32
        self.device = torch_xla.device()
        self.graphs = []
        self.roots = list

    def sync(self, *, wait=False):  # noqa: ARG002
        roots = [root for root in self.roots() if root is not None]
        self.graphs.append(torch_xla._XLAC._get_xla_tensors_hlo(roots))


world = LoweredWorld()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32)).to(world.device)
optimizer = AdamW(model.named_parameters())
torch_xla.sync()
accumulation = int(sys.argv[2])
# A bucket of 4,200 elements takes the last layer (2,080) and the bias of the first (64); the next its weight (4,096).
step = TrainStep(
    world,
    lambda batch: model(batch["x"]).square().mean(),
    optimizer,
    lambda step: 1e-3,
    accumulation=accumulation,
    precision=Precision.named("fp32"),
    bucket_mb=4200 * 4 / 2**20,
    new_graphs="allow",  # the guard would execute what the step leaves pending
)
world.graphs.clear()
world.roots = lambda: [*model.parameters(), *optimizer.state_tensors().values(), *step.buckets.buckets]
step(0, [{"x": torch.randn(8, 64)}] * accumulation)
(Path(sys.argv[1]) / "0.json").write_text(json.dumps(world.graphs))
os._exit(0)  # the pending graph holds collectives that this process could not run
