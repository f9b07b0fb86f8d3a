"""Where the numbers of a run go: JSON lines, TensorBoard, or a sink of one's own."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from trn_dist.errors import MissingDependencyError


class Sink(Protocol):
    """Takes the numbers of each step."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the values of a step; steps rise by one from call to call."""

    def close(self) -> None:
        """Flushes and releases what the sink holds."""


class JsonLines:
    """Writes one JSON object a step: `{"step": 3, "loss": 9.1, ...}`; NaN and infinities, which JSON lacks, as null.

    Args:
        path: of the file; its folder is made.
        start: first step that will be written. Lines of this and later steps, left by a run that went on beyond its
            last checkpoint, are dropped, so that each step stands in the file once.
    """

    def __init__(self, path: Path, *, start: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _keep_lines_before(path, start)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """See `Sink.write`."""
        numbers = {name: None if is_no_number(value) else value for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **numbers}, allow_nan=False) + "\n")

    def close(self) -> None:
        """See `Sink.close`."""
        self._file.close()


class TensorBoard:
    """Writes scalars as TensorBoard events.

    Args:
        directory: of the event files.
        start: first step that will be written; TensorBoard hides events of this and later steps in older files.

    Raises:
        MissingDependencyError: the package tensorboard is not installed.
    """

    def __init__(self, directory: Path, *, start: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingDependencyError(
                "TensorBoard events need the package tensorboard: pip install 'trn-dist[train]'"
            ) from error
        self._writer = SummaryWriter(str(directory), purge_step=start)  # type: ignore[no-untyped-call]

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """See `Sink.write`."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """See `Sink.close`."""
        self._writer.close()  # type: ignore[no-untyped-call]


def is_no_number(value: object) -> bool:
    """Tells NaN and the infinities, which JSON cannot say, from everything else."""
    return isinstance(value, float) and not math.isfinite(value)


def _keep_lines_before(path: Path, start: int) -> None:
    """Drops the lines of step `start` and later, and a last line that was cut short."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            step = json.loads(line)["step"]
        except ValueError:
            break
        if step < start:
            kept.append(line + "\n")
    beside = path.with_name(f".{path.name}.unfinished")
    beside.write_text("".join(kept), encoding="utf-8")
    beside.replace(path)
