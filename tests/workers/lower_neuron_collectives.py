"""Lowers the functional collectives of the Neuron world for a rank of 64: `lower_neuron_collectives.py OUT RANK`."""

import json
import os
import sys
from pathlib import Path

os.environ["XLA_ALWAYS_ALLREDUCE"] = "1"  # or torch_xla leaves out the collectives of its world of one

import torch
import torch_xla

import trn_dist.xla as xla
from trn_dist.xla.pjrt import NeuronWorld


class LoweredWorld(NeuronWorld):
    """A NeuronWorld that opens the CPU in the place of the NeuronCore."""

    def __init__(self, rank):
        self.rank, self.size = rank, 64
        self.device = torch_xla.device()


def lower(*tensors):
    return torch_xla._XLAC._get_xla_tensors_hlo(list(tensors))


world = LoweredWorld(int(sys.argv[2]))
x = torch.randn(4, 5).to(world.device)
weight = torch.nn.Parameter(torch.randn(5, 5).to(world.device))
bias = torch.nn.Parameter(torch.randn(5).to(world.device))
(x @ weight + bias).square().sum().backward()
xla.reduce_gradients([weight, bias], world)
texts = {
    "all_reduce": lower(world.all_reduce(x, "mean")),
    "all_gather": lower(world.all_gather(x)),
    "broadcast": lower(world.broadcast(x, source=3)),
    "reduce_gradients": lower(weight.grad, bias.grad),
}
(Path(sys.argv[1]) / "0.json").write_text(json.dumps(texts))
os._exit(0)  # the pending graph holds collectives that this process could not run
