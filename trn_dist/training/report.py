"""The log of a run on rank 0: a progress line, metric sinks and a summary file."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, TextIO, TypeVar

from trn_dist.training.metrics import JsonLines, Sink, TensorBoard, is_no_number
from trn_dist.training.step import StepResult
from trn_dist.xla import World
from trn_dist.xla.graphs import GraphCount, count_graphs

T = TypeVar("T")

_WINDOW = 10  # steps over which the throughput is averaged, as in the published tutorial
_WARM_UP = 2  # steps that compile; left out of every throughput


@dataclass(frozen=True)
class Summary:
    """What a run did, for `results.json`. Times are seconds of wall clock; rates are sequences per second.

    Attributes:
        first_step: index of the first step taken by this run.
        last_step: index of the last step taken; -1 if none was.
        first_loss: loss of the first step.
        final_loss: loss of the last step.
        sequences: number of sequences trained on by this run, over all workers.
        seconds: from the first step's start to the last one's end.
        average_throughput: sequences per second after the first two steps, which compile.
        peak_throughput: the best mean over ten steps.
        input_seconds: spent waiting for batches.
        checkpoint_seconds: spent waiting for checkpoints; most of the writing goes on beside the training.
        skipped_steps: steps that changed nothing because a gradient was not finite.
        graphs_compiled: number of graphs this process compiled.
        compile_seconds: spent compiling them.
        world_size: number of workers.
        device: kind of device.
    """

    first_step: int
    last_step: int
    first_loss: float
    final_loss: float
    sequences: int
    seconds: float
    average_throughput: float
    peak_throughput: float
    input_seconds: float
    checkpoint_seconds: float
    skipped_steps: int
    graphs_compiled: int
    compile_seconds: float
    world_size: int
    device: str

    def __str__(self) -> str:
        """A few lines for a person."""
        steps = self.last_step + 1 - self.first_step
        return (
            f"{steps} steps ({self.first_step + 1} to {self.last_step + 1}) in {format_duration(self.seconds)}: "
            f"loss {self.first_loss:.4f} -> {self.final_loss:.4f}\n"
            f"{self.average_throughput:,.1f} sequences/s on average, {self.peak_throughput:,.1f} at best; "
            f"{self.graphs_compiled} graphs compiled in {self.compile_seconds:.1f} s"
        )

    def write(self, path: Path) -> None:
        """Writes the summary as JSON, whole or not at all; a loss that is no finite number is null."""
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.unfinished")
        content = {name: None if is_no_number(value) else value for name, value in asdict(self).items()}
        beside.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        beside.replace(path)


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
        stream: where progress goes.
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
        stream: TextIO = sys.stdout,
    ) -> None:
        self.world, self.sinks, self.stream = world, sinks if world.rank == 0 else (), stream
        self.global_batch, self.start, self.stop, self.log_every = global_batch, start, stop, log_every
        self.print_gradient_norm = print_gradient_norm
        self.input_seconds = self.checkpoint_seconds = 0.0
        self.skipped_steps = 0
        self._pending: list[tuple[int, StepResult, float]] = []
        self._times: deque[float] = deque(maxlen=_WINDOW + 1)
        self._graphs: GraphCount = count_graphs(world)
        self._begin = time.perf_counter()
        self._warm: tuple[int, float] | None = None  # steps done and time when the warm-up was over
        self._peak = 0.0
        self._losses: tuple[float, float] = (float("nan"), float("nan"))

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
        return cls(world, sinks, start=start, **options)

    def waiting_for_input(self, batches: Iterable[T]) -> Iterator[T]:
        """Passes on the elements of `batches`, and counts the time until each is there."""
        iterator = iter(batches)
        while True:
            begin = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                self.input_seconds += time.perf_counter() - begin
            yield batch

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Counts the time of its body as time that the run waits for checkpoints."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.checkpoint_seconds += time.perf_counter() - begin

    def record(self, step: int, result: StepResult) -> None:
        """Takes the report of a step that was just launched."""
        now = time.perf_counter()
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
        """Reads the pending reports from the device, hands them to the sinks and prints the newest."""
        if not self._pending or self.world.rank != 0:
            self._pending.clear()
            return
        read = [(result.loss, result.gradient_norm, result.finite) for _, result, _ in self._pending]
        views = iter(self.world.host_views([tensor for tensors in read for tensor in tensors]))
        values = [
            (float(loss), float(norm), bool(finite)) for loss, norm, finite in zip(views, views, views, strict=True)
        ]
        for (step, result, throughput), (loss, norm, finite) in zip(self._pending, values, strict=True):
            self.skipped_steps += not finite
            numbers = {"loss": loss, "learning_rate": result.learning_rate, "gradient_norm": norm}
            if not finite:
                numbers["skipped_steps"] = self.skipped_steps
            if throughput:
                numbers["sequences_per_second"] = throughput
            for sink in self.sinks:
                sink.write(step, numbers)
        first = self._losses[0] if self._pending[0][0] > self.start else values[0][0]
        self._losses = (first, values[-1][0])
        self._print(self._pending[-1], values[-1][0], values[-1][1])
        self._pending.clear()

    def close(self) -> None:
        """Flushes and closes the sinks."""
        self.flush()
        for sink in self.sinks:
            sink.close()

    def summary(self, last_step: int) -> Summary:
        """Returns the summary of the run up to `last_step`."""
        now = self._times[-1] if self._times else time.perf_counter()
        graphs = count_graphs(self.world) - self._graphs
        done = last_step + 1 - self.start
        warm_done, warm_time = self._warm or (done, now)
        return Summary(
            first_step=self.start,
            last_step=last_step,
            first_loss=self._losses[0],
            final_loss=self._losses[1],
            sequences=done * self.global_batch,
            seconds=now - self._begin,
            average_throughput=(done - warm_done) * self.global_batch / (now - warm_time) if now > warm_time else 0.0,
            peak_throughput=self._peak or self._window_throughput(),
            input_seconds=self.input_seconds,
            checkpoint_seconds=self.checkpoint_seconds,
            skipped_steps=self.skipped_steps,
            graphs_compiled=graphs.compiled,
            compile_seconds=graphs.compile_seconds,
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


def format_duration(seconds: float) -> str:
    """`0:07`, `12:34`, `3:04:05`, `1d 03:04:05`."""
    whole = round(seconds)
    days, rest = divmod(whole, 86_400)
    hours, rest = divmod(rest, 3600)
    minutes, secs = divmod(rest, 60)
    if days:
        return f"{days}d {hours:02}:{minutes:02}:{secs:02}"
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"
