"""Checkpoints: a directory per step that is either whole and verified or not there.

```
checkpoints/
  latest                    name of the newest complete checkpoint
  step_00000200/
    manifest.json           format, step, and the size and sha256 of every other file; written last
    state.json              counters, settings and versions
    model.safetensors
    optimizer.safetensors
```

A checkpoint is written beside its place, forced to the disk and renamed; `latest` moves only then. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from trn_dist.errors import CheckpointError

logger = logging.getLogger(__name__)

_FORMAT = 1
_NAME = re.compile(r"step_(\d{8,})|\.step_(\d{8,})\.replaced")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory.

    Attributes:
        step: number of steps that were complete when it was written.
        tensors: for each group (`model`, `optimizer`) CPU tensors by name.
        state: everything else, as JSON values.
    """

    step: int
    tensors: dict[str, dict[str, torch.Tensor]]
    state: dict[str, Any]


class CheckpointStore:
    """The checkpoints of a run in a directory. One process of the job saves, all may load.

    Args:
        directory: made when the first checkpoint is saved.
        keep: how many complete checkpoints to keep, the newest first; -1 keeps all.
        keep_best: keep the one with the lowest score beside them.

    Raises:
        ValueError: `keep` is neither positive nor -1.
    """

    def __init__(self, directory: Path, *, keep: int = 1, keep_best: bool = False) -> None:
        if keep < 1 and keep != -1:
            raise ValueError(f"keep must be at least 1, or -1 to keep all, not {keep}")
        self.directory, self.keep, self.keep_best = directory, keep, keep_best
        self._writer: threading.Thread | None = None
        self._problem: CheckpointError | None = None

    def steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, rising. Contents are not verified."""
        if not self.directory.is_dir():
            return []
        named = ((_NAME.fullmatch(path.name), path) for path in self.directory.iterdir())
        complete = {match for match, path in named if match and (path / "manifest.json").is_file()}
        return sorted({int(match[1] or match[2]) for match in complete})

    def path(self, step: int) -> Path:
        """Returns where the checkpoint of a step is, or would be."""
        place, replaced = self._place(step), self._replaced(step)
        # Between the two renames of a replacement the old one is the only one.
        return replaced if replaced.exists() and not place.exists() else place

    def score(self, step: int) -> float | None:
        """Returns the score that the checkpoint of a step was saved with.

        Raises:
            CheckpointError: it is not there.
        """
        score = _read_json(self.path(step) / "manifest.json").get("score")
        return None if score is None else float(score)

    def best(self, among: Iterable[int] | None = None) -> int | None:
        """Returns the step of the checkpoint with the lowest score, the newest of equals; None where none has one.

        Args:
            among: steps to choose from; None for all.
        """
        known = []
        for step in self.steps() if among is None else among:
            # One whose manifest is damaged is passed over; whoever loads it is told.
            with suppress(CheckpointError):
                if (score := self.score(step)) is not None:
                    known.append((score, -step))
        return -min(known)[1] if known else None

    def save(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, torch.Tensor]],
        state: Mapping[str, Any],
        score: float | None = None,
    ) -> Path:
        """Writes a checkpoint, then removes those beyond `keep`, and those of later steps.

        A run that went on from an earlier checkpoint than the newest, because that one was damaged or because it was
        told to, has left the later ones behind: a resume must not come back to them.

        Args:
            step: number of complete steps.
            tensors: for each group CPU tensors by name.
            state: JSON values.
            score: what `keep_best` compares, such as a loss; the lower, the better. NaN is no score.

        Returns:
            The checkpoint's directory.

        Raises:
            CheckpointError: it could not be written, such as on a full disk; what was there before is untouched. Or it
                was, and an old one could not be removed.
        """
        final = self._place(step)
        beside = self.directory / f".{final.name}.unfinished"
        known = None if score is None or math.isnan(score) else score
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._remove_unfinished()
            beside.mkdir()
            for group, members in tensors.items():
                contiguous = {name: tensor.contiguous() for name, tensor in members.items()}
                save_file(contiguous, beside / f"{group}.safetensors")
            _write_json(beside / "state.json", state)
            manifest = {"format": _FORMAT, "step": step, "score": known, "files": _describe(beside)}
            _write_json(beside / "manifest.json", manifest)
            _force_to_disk(beside)
            self._put_in_place(beside, final, step)
            self._point_latest_to(final)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(beside, ignore_errors=True)
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {self.directory}: {error}. "
                "Earlier checkpoints are untouched; free space or fix the permissions and start again"
            ) from error
        try:
            self._remove_old(step)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint of step {step} is saved, but old ones in {self.directory} could not be removed: "
                f"{error}"
            ) from error
        return final

    def save_in_background(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, torch.Tensor]],
        state: Mapping[str, Any],
        score: float | None = None,
    ) -> None:
        """Starts writing a checkpoint in a thread and returns; the arguments are those of `save`.

        A checkpoint that is still being written is waited for first. The tensors must not change until `wait` returns;
        `World.snapshot` gives such tensors.

        Raises:
            CheckpointError: the checkpoint before this one could not be written.
        """
        self.wait()

        def write() -> None:
            try:
                self.save(step, tensors, state, score)
            except CheckpointError as error:
                self._problem = error

        # Not a daemon: an interpreter that ends waits for the checkpoint to be whole.
        self._writer = threading.Thread(target=write, name="trn_dist-checkpoint")
        self._writer.start()

    def wait(self) -> None:
        """Waits until nothing is being written any more.

        Raises:
            CheckpointError: the checkpoint could not be written.
        """
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._problem is not None:
            problem, self._problem = self._problem, None
            raise problem

    def load(self, step: int) -> Checkpoint:
        """Reads and verifies the checkpoint of a step.

        Raises:
            CheckpointError: it is not there, or a file is missing, cut short or changed; the message names the file.
        """
        self.verify(step)
        return self.read(step)

    def verify(self, step: int) -> None:
        """Compares every byte of the checkpoint of a step with its manifest.

        Raises:
            CheckpointError: see `load`.
        """
        path = self.path(step)
        for name, expected in self._manifest(step)["files"].items():
            _verify(path / name, expected)

    def read(self, step: int) -> Checkpoint:
        """Reads the checkpoint of a step that was verified already, by this process or another one of this host.

        The tensors are mapped, not read: what another process of the host has read is not read again.

        Raises:
            CheckpointError: it is not there, or not in the format.
        """
        path, manifest = self.path(step), self._manifest(step)
        try:
            tensors = {
                Path(name).stem: load_file(path / name) for name in manifest["files"] if name.endswith(".safetensors")
            }
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        return Checkpoint(step=int(manifest["step"]), tensors=tensors, state=_read_json(path / "state.json"))

    def newest(self) -> Checkpoint | None:
        """Returns the newest checkpoint that verifies, or None where there is no checkpoint at all.

        A damaged one is reported as a warning and passed over.

        Raises:
            CheckpointError: there are checkpoints and all are damaged.
        """
        problems = []
        for step in reversed(self.steps()):
            try:
                return self.load(step)
            except CheckpointError as error:
                problems.append(str(error))
                logger.warning("passing over the checkpoint of step %d: %s", step, error)
        if problems:
            raise CheckpointError(f"no checkpoint in {self.directory} can be used: {'; '.join(problems)}")
        return None

    def _place(self, step: int) -> Path:
        return self.directory / f"step_{step:08d}"

    def _replaced(self, step: int) -> Path:
        return self.directory / f".step_{step:08d}.replaced"

    def _manifest(self, step: int) -> dict[str, Any]:
        manifest = _read_json(self.path(step) / "manifest.json")
        if manifest.get("format") != _FORMAT:
            raise CheckpointError(
                f"{self.path(step)} has checkpoint format {manifest.get('format')!r}; this version of trn_dist reads "
                f"{_FORMAT}"
            )
        return manifest

    def _put_in_place(self, beside: Path, final: Path, step: int) -> None:
        if final.exists():
            # The same step again: until the new one is in place, another one or the old one is the latest.
            older = [known for known in self.steps() if known != step]
            if older:
                self._point_latest_to(self._place(older[-1]))
            else:
                (self.directory / "latest").unlink(missing_ok=True)
            final.rename(self._replaced(step))
        beside.rename(final)
        _force_to_disk(self.directory)
        self._remove_unfinished()

    def _point_latest_to(self, final: Path) -> None:
        beside = self.directory / ".latest.unfinished"
        beside.write_text(final.name + "\n")
        beside.replace(self.directory / "latest")

    def _remove_unfinished(self) -> None:
        for replaced in self.directory.glob(".step_*.replaced"):
            place = self.directory / replaced.name.removeprefix(".").removesuffix(".replaced")
            if place.exists():
                shutil.rmtree(replaced)
            else:
                replaced.rename(place)
        for path in self.directory.glob(".step_*.unfinished"):
            shutil.rmtree(path)

    def _remove_old(self, newest: int) -> None:
        """Removes what is beyond `keep` now that `newest` is there."""
        steps = self.steps()
        before = [step for step in steps if step <= newest]
        kept = set(before if self.keep == -1 else before[-self.keep :])
        if self.keep_best and (best := self.best(among=before)) is not None:
            kept.add(best)
        for step in steps:
            if step not in kept:
                # By its new name it is no checkpoint; a removal that is cut short is finished by the next save.
                doomed = self.directory / f".{self._place(step).name}.unfinished"
                self._place(step).rename(doomed)
                shutil.rmtree(doomed)


def _describe(directory: Path) -> dict[str, dict[str, Any]]:
    return {
        path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(directory.iterdir())
        if path.name != "manifest.json"
    }


def _verify(path: Path, expected: Mapping[str, Any]) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    size = path.stat().st_size
    if size != expected["bytes"]:
        raise CheckpointError(f"{path} has {size} bytes instead of {expected['bytes']}: it was cut short or changed")
    if _sha256(path) != expected["sha256"]:
        raise CheckpointError(f"{path} does not have the sha256 of its manifest: its content was changed")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: {path.parent} is not a complete checkpoint") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error})") from error
    return content


def _force_to_disk(directory: Path) -> None:
    """Flushes the files and the directory, so that a rename never shows a file whose content is still on its way."""
    for path in (*_files(directory), directory):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in directory.iterdir() if path.is_file())
