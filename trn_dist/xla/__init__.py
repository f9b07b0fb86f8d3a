"""Devices, worlds and what crosses the processes of a job: collectives and gradient reduction.

`init()` returns the `World` of this process. PyTorch/XLA is imported only when an XLA device is asked for, so the
native backend works without it.
"""

from trn_dist.errors import RecompileError
from trn_dist.xla.gradients import GradientBuckets, reduce_gradients
from trn_dist.xla.guard import GraphGuard, RecompileWarning
from trn_dist.xla.world import DEVICES, World, init, resolve_device

__all__ = [
    "DEVICES",
    "GradientBuckets",
    "GraphGuard",
    "RecompileError",
    "RecompileWarning",
    "World",
    "init",
    "reduce_gradients",
    "resolve_device",
]
