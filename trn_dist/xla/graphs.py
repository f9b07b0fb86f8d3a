"""What PyTorch/XLA has compiled so far in this process."""

from __future__ import annotations

from dataclasses import dataclass

from trn_dist.xla.world import World


@dataclass(frozen=True)
class GraphCount:
    """Graphs compiled by this process.

    Attributes:
        compiled: number of graphs compiled.
        compile_seconds: time spent compiling them.
    """

    compiled: int = 0
    compile_seconds: float = 0.0

    def __sub__(self, earlier: GraphCount) -> GraphCount:
        return GraphCount(self.compiled - earlier.compiled, self.compile_seconds - earlier.compile_seconds)


def count_graphs(world: World) -> GraphCount:
    """Returns the count so far, from torch_xla's own metrics (`UncachedCompile`, `CompileTime`); zero without XLA."""
    if world.device.type != "xla":
        return GraphCount()
    import torch_xla.debug.metrics as xla_metrics

    times = xla_metrics.metric_data("CompileTime")  # type: ignore[no-untyped-call]
    return GraphCount(
        compiled=int(xla_metrics.counter_value("UncachedCompile") or 0),  # type: ignore[no-untyped-call]
        compile_seconds=times[1] / 1e9 if times else 0.0,
    )
