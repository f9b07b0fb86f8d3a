"""The log of a run on rank 0: a progress line, metric sinks and a summary file."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TextIO, TypeVar

from trn_dist.training.goodput import Ledger, launched
from trn_dist.training.metrics import JsonLines, Sink, TensorBoard
from trn_dist.training.mfu import FORMULA, Utilization
from trn_dist.training.phases import PhaseClock
from trn_dist.training.step import StepResult
from trn_dist.training.summary import Summary, format_duration
from trn_dist.xla import World
from trn_dist.xla.graphs import count_graphs

T = TypeVar("T")

_WINDOW = 10  # steps over which the throughput is averaged, as in the published tutorial
_WARM_UP = 2  # steps that compile; left out of every throughput


class RunLog:
    """Collects what each step reports and reads it from the device later, a few steps at a time.

    Only rank 0 writes; on the other ranks the log keeps the times and does nothing else.

    Args:
        world: the job's.
        sinks: take every step's numbers.
        global_batch: sequences a step, over all workers.
        start: index of the first step of this run.
        stop: index behind its last step.
        log_every: steps between progress lines, which is also how often losses are read from the device.
        print_gradient_norm: show it in the progress line.
        utilization: what model FLOPs utilization is computed from, where the peak is known.
        restored: seconds it took to restore a checkpoint before this log was made.
        ledger: path of the account of where the time of all runs went, or None for this run's alone.
        stream: where progress goes.

    Attributes:
        clock: knows the phase the loop is in, and what has passed in each.
    """

    def __init__(
        self,
        world: World,
        sinks: Sequence[Sink],
        *,
        global_batch: int,
        start: int,
        stop: int,
        log_every: int = 10,
        print_gradient_norm: bool = False,
        utilization: Utilization | None = None,
        restored: float = 0.0,
        ledger: Path | None = None,
        stream: TextIO = sys.stdout,
    ) -> None:
        self.world, self.sinks, self.stream = world, sinks if world.rank == 0 else (), stream
        self.global_batch, self.start, self.stop, self.log_every = global_batch, start, stop, log_every
        self.print_gradient_norm, self.utilization = print_gradient_norm, utilization
        self.skipped_steps = 0
        self.clock = PhaseClock()
        self._started, waited = launched()
        self._rendezvous = waited + world.joined_seconds
        self._restored = restored
        self._compiled_before = count_graphs(world).compile_seconds
        self._before = time.time() - self._started  # from the launch to this log
        self._ledger = Ledger(ledger, first_step=start, started=self._started) if ledger and world.rank == 0 else None
        self._pending: list[tuple[int, StepResult, float]] = []
        self._times: deque[float] = deque(maxlen=_WINDOW + 1)
        self._warm: tuple[int, float] | None = None  # steps done and time when the warm-up was over
        self._peak = 0.0
        self._losses: tuple[float, float] = (float("nan"), float("nan"))
        self._since_save: list[float] = []
        self._newest: tuple[tuple[int, StepResult, float], float, float] | None = None  # report, loss, gradient norm

    @classmethod
    def in_directory(cls, directory: Path, world: World, *, start: int, **options: Any) -> RunLog:  # noqa: ANN401
        """Returns a log that writes `metrics.jsonl` and TensorBoard events into a directory, from rank 0.

        Args:
            directory: of the run.
            world: the job's.
            start: index of the first step of this run; what an earlier run wrote of this and later steps is dropped.
            **options: the other arguments of `RunLog`.
        """
        sinks: list[Sink] = []
        if world.rank == 0:
            sinks = [
                JsonLines(directory / "metrics.jsonl", start=start),
                TensorBoard(directory / "tensorboard", start=start),
            ]
        return cls(world, sinks, start=start, ledger=directory / "goodput.json", **options)

    def waiting_for_input(self, batches: Iterable[T]) -> Iterator[T]:
        """Passes on the elements of `batches`, and counts the time until each is there as input."""
        iterator = iter(batches)
        while True:
            with self.clock.within("input"):
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            yield batch

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Counts the time of its body as time that the run waits for checkpoints."""
        with self.clock.within("checkpoint"):
            yield

    @contextmanager
    def other_work(self) -> Iterator[None]:
        """Counts the time of its body, such as an evaluation, as no part of a step; the watchdog lets it take long."""
        with self.clock.within("other"):
            yield

    def record(self, step: int, result: StepResult) -> None:
        """Takes the report of a step that was just launched."""
        now = self.clock.step_done()
        done = step + 1 - self.start
        if done == _WARM_UP:
            self._warm = (done, now)
        if done >= _WARM_UP:
            self._times.append(now)
            if len(self._times) > _WINDOW:
                self._peak = max(self._peak, self._window_throughput())
        self._pending.append((step, result, self._window_throughput()))
        if done == 1 or done % self.log_every == 0 or step + 1 == self.stop:
            self.flush()

    def __enter__(self) -> Self:
        if self.world.rank == 0 and self.world.device.type == "xla":
            print("compiling the graphs of the first step", file=self.stream, flush=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            # What is pending may wait for ranks that are gone; it must not keep the error from being seen.
            self._pending.clear()
        self.close()

    def flush(self) -> None:
        """Reads the pending reports from the device, hands them to the sinks and prints the newest step."""
        self.deliver()
        if self.world.rank == 0 and self._newest:
            self._print(*self._newest)

    def deliver(self) -> None:
        """Reads the pending reports from the device and hands them to the sinks."""
        pending, self._pending = self._pending, []
        if pending and self.world.rank == 0:
            with self.clock.within("log"):
                self._deliver(pending)

    def _deliver(self, pending: list[tuple[int, StepResult, float]]) -> None:
        read = [(result.loss, result.gradient_norm, result.finite) for _, result, _ in pending]
        views = iter(self.world.host_views([tensor for tensors in read for tensor in tensors]))
        values = [
            (float(loss), float(norm), bool(finite)) for loss, norm, finite in zip(views, views, views, strict=True)
        ]
        for (step, result, throughput), (loss, norm, finite) in zip(pending, values, strict=True):
            self.skipped_steps += not finite
            numbers = {"loss": loss, "learning_rate": result.learning_rate, "gradient_norm": norm}
            if not finite:
                numbers["skipped_steps"] = self.skipped_steps
            if throughput:
                numbers["sequences_per_second"] = throughput
            for sink in self.sinks:
                sink.write(step, numbers)
        self._since_save += [loss for loss, _, _ in values]
        first = self._losses[0] if pending[0][0] > self.start else values[0][0]
        self._losses = (first, values[-1][0])
        self._newest = (pending[-1], values[-1][0], values[-1][1])
        if self._ledger:
            self._ledger.update(steps=self.clock.steps, seconds=self.wall_time())

    def loss_since_save(self) -> float | None:
        """Returns the mean of the losses that were delivered since the last call, or None where there is none."""
        losses, self._since_save = self._since_save, []
        return sum(losses) / len(losses) if losses else None

    def close(self) -> None:
        """Delivers what is pending and closes the sinks."""
        self.deliver()
        self.clock.enter("end")
        for sink in self.sinks:
            sink.close()

    def wall_time(self) -> dict[str, float]:
        """Returns where the wall time of this run went so far, in seconds by category; see `Summary.wall_time`."""
        seconds = self.clock.seconds
        compiled = count_graphs(self.world).compile_seconds
        start = self._before - self._rendezvous - self._compiled_before - self._restored
        return {
            "start": max(0.0, start),
            "rendezvous": self._rendezvous,
            "compile": compiled,
            "input": seconds["input"],
            # Graphs are compiled where the step asks for them.
            "step": max(0.0, seconds["step"] - (compiled - self._compiled_before)),
            "checkpoint": seconds["checkpoint"] + self._restored,
            "log": seconds["log"],
            "other": seconds["other"],
        }

    def summary(self, last_step: int) -> Summary:
        """Returns the summary of the run up to `last_step`."""
        now = self._times[-1] if self._times else self.clock.now()
        done = last_step + 1 - self.start
        warm_done, warm_time = self._warm or (done, now)
        average = (done - warm_done) * self.global_batch / (now - warm_time) if now > warm_time else 0.0
        graphs, known = count_graphs(self.world), self.utilization
        if self._ledger:
            self._ledger.update(steps=self.clock.steps, seconds=self.wall_time())
        return Summary(
            first_step=self.start,
            last_step=last_step,
            first_loss=self._losses[0],
            final_loss=self._losses[1],
            sequences=done * self.global_batch,
            seconds=now - self.clock.begin,
            time_to_train=self._ledger.time_to_train() if self._ledger else time.time() - self._started,
            average_throughput=average,
            peak_throughput=self._peak or self._window_throughput(),
            mfu=known.of(average, self.world.size) if known else None,
            mfu_formula=FORMULA,
            flops_per_sequence=known.flops_per_sequence if known else None,
            peak_flops=known.peak_flops if known else None,
            skipped_steps=self.skipped_steps,
            graphs_compiled=graphs.compiled,
            compile_seconds=graphs.compile_seconds,
            wall_time=self._ledger.totals() if self._ledger else self.wall_time(),
            world_size=self.world.size,
            device=self.world.kind,
        )

    def _window_throughput(self) -> float:
        """Sequences per second over the last steps; 0 while there is nothing to average."""
        if len(self._times) < 2:
            return 0.0
        return (len(self._times) - 1) * self.global_batch / (self._times[-1] - self._times[0])

    def _print(self, newest: tuple[int, StepResult, float], loss: float, norm: float) -> None:
        step, result, throughput = newest
        parts = [f"step {step + 1}/{self.stop}", f"loss {loss:.4f}", f"lr {result.learning_rate:.3e}"]
        if self.skipped_steps:
            parts.append(f"{self.skipped_steps} steps skipped (gradients not finite)")
        if self.print_gradient_norm:
            parts.append(f"grad norm {norm:.3f}")
        if throughput:
            remaining = (self.stop - step - 1) * self.global_batch / throughput
            parts += [f"{throughput:,.1f} seq/s", f"ETA {format_duration(remaining)}"]
        print("  ".join(parts), file=self.stream, flush=True)
