"""What a run did, for a person and for `results.json`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from trn_dist.training.goodput import goodput
from trn_dist.training.metrics import is_no_number


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
        time_to_train: from the launch of the training's first run to now, the time between runs included.
        average_throughput: sequences per second after the first two steps, which compile.
        peak_throughput: the best mean over ten steps.
        mfu: model FLOPs utilization at the average throughput, 0 to 1; None where the peak is not known.
        mfu_formula: how it is computed.
        flops_per_sequence: that it is computed with, or None.
        peak_flops: of a worker, in operations per second, that it is computed with, or None.
        skipped_steps: steps that changed nothing because a gradient was not finite.
        graphs_compiled: number of graphs this process compiled.
        compile_seconds: spent compiling them.
        wall_time: seconds by category over all runs of the training: `start`, `rendezvous`, `compile`, `input`, `step`,
            `checkpoint` (waiting for saves; most of the writing goes on beside the training), `log`, `other`,
            `lost` (steps that had to be done again) and `down` (between runs).
        goodput: share of the wall time that went into steps that count, 0 to 1.
        world_size: number of workers.
        device: kind of device.
    """

    first_step: int
    last_step: int
    first_loss: float
    final_loss: float
    sequences: int
    seconds: float
    time_to_train: float
    average_throughput: float
    peak_throughput: float
    mfu: float | None
    mfu_formula: str
    flops_per_sequence: float | None
    peak_flops: float | None
    skipped_steps: int
    graphs_compiled: int
    compile_seconds: float
    wall_time: dict[str, float]
    world_size: int
    device: str

    @property
    def goodput(self) -> float:
        """Share of the wall time that went into steps that count, 0 to 1."""
        return goodput(self.wall_time)

    def __str__(self) -> str:
        """A few lines for a person."""
        steps = self.last_step + 1 - self.first_step
        utilization = "" if self.mfu is None else f", {100 * self.mfu:.1f} % of the peak FLOPs"
        total = sum(self.wall_time.values()) or 1.0
        shares = sorted(((name, t / total) for name, t in self.wall_time.items()), key=lambda entry: -entry[1])
        return (
            f"{steps} steps ({self.first_step + 1} to {self.last_step + 1}) in {format_duration(self.seconds)}: "
            f"loss {self.first_loss:.4f} -> {self.final_loss:.4f}\n"
            f"{self.average_throughput:,.1f} sequences/s on average, {self.peak_throughput:,.1f} at best{utilization}; "
            f"{self.graphs_compiled} graphs compiled in {self.compile_seconds:.1f} s\n"
            f"time to train {format_duration(self.time_to_train)}: "
            + ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares if share >= 0.005)
        )

    def write(self, path: Path) -> None:
        """Writes the summary as JSON, whole or not at all; a loss that is no finite number is null."""
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.unfinished")
        content = {name: None if is_no_number(value) else value for name, value in asdict(self).items()}
        content["goodput"] = self.goodput
        beside.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        beside.replace(path)


def format_duration(seconds: float) -> str:
    """`0:07`, `12:34`, `3:04:05`, `1d 03:04:05`."""
    whole = round(seconds)
    days, rest = divmod(whole, 86_400)
    hours, rest = divmod(rest, 3600)
    minutes, secs = divmod(rest, 60)
    if days:
        return f"{days}d {hours:02}:{minutes:02}:{secs:02}"
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"
