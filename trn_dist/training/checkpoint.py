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
import os
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from trn_dist.errors import CheckpointError

logger = logging.getLogger(__name__)

_FORMAT = 1
_NAME = re.compile(r"step_(\d{8,})")


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

    Raises:
        ValueError: `keep` is neither positive nor -1.
    """

    def __init__(self, directory: Path, *, keep: int = 1) -> None:
        if keep < 1 and keep != -1:
            raise ValueError(f"keep must be at least 1, or -1 to keep all, not {keep}")
        self.directory, self.keep = directory, keep
        self._writer: threading.Thread | None = None
        self._problem: CheckpointError | None = None

    def steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, rising. Contents are not verified."""
        if not self.directory.is_dir():
            return []
        named = ((_NAME.fullmatch(path.name), path) for path in self.directory.iterdir())
        return sorted(int(match[1]) for match, path in named if match and (path / "manifest.json").is_file())

    def path(self, step: int) -> Path:
        """Returns where the checkpoint of a step is, or would be."""
        return self.directory / f"step_{step:08d}"

    def save(self, step: int, tensors: Mapping[str, Mapping[str, torch.Tensor]], state: Mapping[str, Any]) -> Path:
        """Writes a checkpoint, then removes those beyond `keep`.

        Args:
            step: number of complete steps.
            tensors: for each group CPU tensors by name.
            state: JSON values.

        Returns:
            The checkpoint's directory.

        Raises:
            CheckpointError: it could not be written, such as on a full disk; what was there before is untouched.
        """
        final = self.path(step)
        beside = self.directory / f".{final.name}.unfinished"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._remove_unfinished()
            beside.mkdir()
            for group, members in tensors.items():
                contiguous = {name: tensor.contiguous() for name, tensor in members.items()}
                save_file(contiguous, beside / f"{group}.safetensors")
            _write_json(beside / "state.json", state)
            _write_json(beside / "manifest.json", {"format": _FORMAT, "step": step, "files": _describe(beside)})
            _force_to_disk(beside)
            self._put_in_place(beside, final)
            self._point_latest_to(final)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(beside, ignore_errors=True)
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {self.directory}: {error}. "
                "Earlier checkpoints are untouched; free space or fix the permissions and start again"
            ) from error
        self._remove_old()
        return final

    def save_in_background(
        self, step: int, tensors: Mapping[str, Mapping[str, torch.Tensor]], state: Mapping[str, Any]
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
                self.save(step, tensors, state)
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
        path = self.path(step)
        manifest = _read_json(path / "manifest.json")
        if manifest.get("format") != _FORMAT:
            raise CheckpointError(
                f"{path} has checkpoint format {manifest.get('format')!r}; this version of trn_dist reads {_FORMAT}"
            )
        for name, expected in manifest["files"].items():
            _verify(path / name, expected)
        tensors = {
            Path(name).stem: load_file(path / name) for name in manifest["files"] if name.endswith(".safetensors")
        }
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

    def _put_in_place(self, beside: Path, final: Path) -> None:
        if final.exists():
            # The same step again, after a resume from an older checkpoint: until the new one is in place, that one is
            # the latest.
            older = [step for step in self.steps() if self.path(step) != final]
            if older:
                self._point_latest_to(self.path(older[-1]))
            else:
                (self.directory / "latest").unlink(missing_ok=True)
            final.rename(self.directory / f".{final.name}.replaced.unfinished")
        beside.rename(final)
        _force_to_disk(self.directory)
        self._remove_unfinished()

    def _point_latest_to(self, final: Path) -> None:
        beside = self.directory / ".latest.unfinished"
        beside.write_text(final.name + "\n")
        beside.replace(self.directory / "latest")

    def _remove_unfinished(self) -> None:
        for path in self.directory.glob(".step_*.unfinished"):
            shutil.rmtree(path)

    def _remove_old(self) -> None:
        if self.keep == -1:
            return
        for step in self.steps()[: -self.keep]:
            # Without its manifest a directory is no checkpoint, so a removal that is cut short leaves none behind.
            (self.path(step) / "manifest.json").unlink()
            shutil.rmtree(self.path(step))


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
