"""A loop under the watchdog: `watched.py OUT hang|straggle`. Rank 1 never comes back, or is slow in data."""

import sys
import time
from pathlib import Path

import torch

import trn_dist.xla as xla
from trn_dist.training import Watchdog
from trn_dist.training.phases import PhaseClock

out, fault = Path(sys.argv[1]), sys.argv[2]


def never_returns():
    time.sleep(3600)


with xla.init("cpu") as world:
    clock = PhaseClock()
    with Watchdog(world, clock, out / "stacks", minimum=3.0, every=0.2):
        for step in range(100):
            with clock.within("input"):
                if fault == "straggle" and world.rank == 1:
                    time.sleep(0.05)
            if fault == "hang" and world.rank == 1 and step == 20:
                never_returns()
            gradient = torch.ones(1000)
            world.all_reduce_([gradient])
            clock.step_done()
