"""One optimizer step: micro-batches, accumulation, reduction, clipping and the update, without a host read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from trn_dist.training.optimizers import Optimizer
from trn_dist.training.precision import Precision
from trn_dist.training.schedules import Schedule
from trn_dist.xla import GradientBuckets, GraphGuard, World
from trn_dist.xla.guard import Action
from trn_dist.xla.world import derive_seed

Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class StepResult:
    """What a step reports; the tensors are scalars on the device, to be read later.

    Attributes:
        loss: mean of the micro-batches' losses over the step and the world, fp32.
        gradient_norm: global L2 norm of the reduced gradients before clipping, fp32.
        finite: whether all gradients were finite; where not, the step changed neither weights nor optimizer state.
        learning_rate: of this step.
    """

    loss: torch.Tensor
    gradient_norm: torch.Tensor
    finite: torch.Tensor
    learning_rate: float


class TrainStep:
    """Runs optimizer steps of a model over a world.

    The loss of a step is the mean of `loss(batch)` over its micro-batches and over the ranks. Random numbers (dropout,
    stochastic rounding) depend on the seed, the step, the micro-batch and the rank alone, so a run that resumes at a
    step draws what the uninterrupted run drew.

    On an XLA device each micro-batch is a graph of its own when there are several (compile time stays that of one), and
    on CPU XLA the reduction cuts the graph once more; with one micro-batch on Neuron the step is one graph.

    Args:
        world: from `trn_dist.xla.init`.
        loss: computes the scalar loss of a micro-batch; the model is whatever it closes over.
        optimizer: holds the model's parameters.
        schedule: learning rate by step.
        accumulation: micro-batches a step.
        max_gradient_norm: bound of the global gradient norm, or None.
        precision: under which the loss is computed.
        seed: of the run.
        bucket_mb: capacity of a gradient bucket in MiB.
        new_graphs: what a step that makes a new graph after the first two does: `raise`, `warn` or `allow`.

    Attributes:
        guard: the graph guard; its `expect_graphs` is for an evaluation between the steps.
    """

    def __init__(
        self,
        world: World,
        loss: Callable[[Batch], torch.Tensor],
        optimizer: Optimizer,
        schedule: Schedule,
        *,
        accumulation: int = 1,
        max_gradient_norm: float | None = 1.0,
        precision: Precision,
        seed: int = 0,
        bucket_mb: float = 50.0,
        new_graphs: Action = "raise",
    ) -> None:
        self.world, self.loss, self.optimizer, self.schedule = world, loss, optimizer, schedule
        self.accumulation, self.max_gradient_norm = accumulation, max_gradient_norm
        self.precision, self.seed = precision, seed
        self.buckets = GradientBuckets(optimizer.parameters.items(), bucket_mb=bucket_mb, num_scalars=1)
        self.guard = GraphGuard(world, self._take, action=new_graphs)
        self._start_over()
        world.sync()

    def __call__(self, step: int, micro_batches: Sequence[Batch]) -> StepResult:
        """Takes the step with index `step` (0 is the first of the run) on `accumulation` micro-batches.

        Args:
            step: index of the step over the whole run, not over this process's life.
            micro_batches: tensors on the host or the device, of the same shapes at every call.

        Raises:
            RecompileError: the step makes a graph that those before it did not; see `GraphGuard`.
        """
        if len(micro_batches) != self.accumulation:
            raise ValueError(f"a step takes {self.accumulation} micro-batches, not {len(micro_batches)}")
        return self.guard(step, micro_batches)

    def _take(self, step: int, micro_batches: Sequence[Batch]) -> StepResult:
        self._accumulate(step, micro_batches)
        (loss,) = self.buckets.all_reduce(self.world)
        norm = self.buckets.clip(self.max_gradient_norm)
        learning_rate = self.schedule(step)
        # The same on every rank: the ranks must round the same weights the same way.
        self.world.seed(derive_seed(self.seed, "rounding", step))
        finite = torch.isfinite(norm)
        self.optimizer.step(self.buckets.gradients(), learning_rate, apply=finite)
        self._start_over()
        self.world.sync()
        return StepResult(loss, norm, finite, learning_rate)

    def _start_over(self) -> None:
        """Empties the sums of a step. Several micro-batches get zeros to add to, executed before the first of them."""
        if self.accumulation > 1:
            self.buckets.zero()
        else:
            self.buckets.clear()

    def _accumulate(self, step: int, micro_batches: Sequence[Batch]) -> None:
        """Adds up the gradients and the loss of this rank's micro-batches in the buckets."""
        for index, batch in enumerate(micro_batches):
            self.world.seed(derive_seed(self.seed, "micro-batch", step, index, self.world.rank))
            on_device = {name: tensor.to(self.world.device) for name, tensor in batch.items()}
            with self.precision.autocast(self.world.device):
                share = self.loss(on_device) / self.accumulation
            share.backward()  # type: ignore[no-untyped-call]
            self.buckets.collect(share)
            if self.accumulation > 1:
                self.world.sync()
