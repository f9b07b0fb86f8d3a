"""Reduction of gradients on CPU XLA against a bare gloo all-reduce of CPU tensors of the same size, in one run.

torchrun --nproc_per_node 2 benchmarks/reduce_gradients.py [MEGABYTES]
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import trn_dist.xla as xla

ROUNDS = 15


def seconds(work: Callable[[], object], world: xla.World) -> float:
    world.barrier()
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main() -> None:
    megabytes = float(sys.argv[1]) if len(sys.argv) > 1 else 100.0
    with xla.init("cpu-xla") as world:
        elements = int(megabytes * 2**20 / 4)
        plain = torch.ones(elements)
        parameter = torch.nn.Parameter(torch.zeros(elements, device=world.device))
        buckets = xla.GradientBuckets([("w", parameter)], bucket_mb=megabytes)
        times: dict[str, list[float]] = {"gloo": [], "ours": []}
        for _ in range(ROUNDS):
            buckets.zero()
            world.sync(wait=True)
            times["gloo"].append(seconds(lambda: dist.all_reduce(plain), world))
            times["ours"].append(seconds(lambda: buckets.all_reduce(world), world))
        bare, ours = (statistics.median(values[2:]) for values in times.values())
        world.print(
            f"{megabytes:.0f} MiB over {world.size} workers: gloo {bare * 1e3:.1f} ms, buckets {ours * 1e3:.1f} ms, "
            f"ratio {ours / bare:.2f}"
        )


if __name__ == "__main__":
    main()
