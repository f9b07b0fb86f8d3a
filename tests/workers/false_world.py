"""A device whose all-reduce silently does nothing, as torch_xla's own is on the CPU: `false_world.py OUT`."""

import json
import sys
from pathlib import Path

import torch_xla
import torch_xla.core.xla_model as xm

import trn_dist.xla as xla
from trn_dist.errors import WorldError
from trn_dist.xla.pjrt import CpuXlaWorld


def all_reduce_of_torch_xla(self, tensors, op="mean"):
    xm.all_reduce(xm.REDUCE_SUM, list(tensors), scale=1.0 / self.size if op == "mean" else 1.0)
    torch_xla.sync()


CpuXlaWorld.all_reduce_ = all_reduce_of_torch_xla
try:
    with xla.init("cpu-xla"):
        message = "no error"
except WorldError as error:
    message = str(error)
rank = int(__import__("os").environ["RANK"])
(Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(message))
