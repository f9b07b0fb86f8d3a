"""What a run is made of at a step boundary: saved whole, restored whole, or refused."""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Collection, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from trn_dist.errors import CheckpointError, ConfigError
from trn_dist.training.checkpoint import Checkpoint, CheckpointStore
from trn_dist.training.optimizers import Optimizer
from trn_dist.xla import World
from trn_dist.xla.world import RANDOM_NUMBERS


class TrainingState:
    """The model, the optimizer and the position of a run.

    Random numbers and the order of samples depend on the seed and the position alone, so a checkpoint holds the rule by
    which they are derived, and the numbers of steps and samples; with another rule it is refused.

    Args:
        world: the job's.
        model: on the world's device.
        optimizer: of the model's parameters.
        identity: settings that a resumed run must share with the run that wrote the checkpoint, such as the global
            batch, the seed, the data's fingerprint and the model's configuration; JSON values. An entry
            `global_batch` is what samples are counted by.

    Attributes:
        step: number of steps taken.
        restored_seconds: how long `resume` took.
    """

    def __init__(self, world: World, model: torch.nn.Module, optimizer: Optimizer, identity: Mapping[str, Any]) -> None:
        self.world, self.model, self.optimizer = world, model, optimizer
        self.identity = {"random_numbers": RANDOM_NUMBERS, **identity}
        self.step = 0
        self.restored_seconds = 0.0
        self._resumed_at = (0, 0)  # step, and samples read until then

    @property
    def samples(self) -> int:
        """Number of samples trained on, over all ranks; 0 where the identity does not say the global batch."""
        step, samples = self._resumed_at
        return samples + (self.step - step) * int(self.identity.get("global_batch", 0))

    @property
    def sample_offset(self) -> int:
        """Samples read beyond step * global batch: not 0 once the run went on with another global batch."""
        return self.samples - self.step * int(self.identity.get("global_batch", 0))

    def save(self, store: CheckpointStore, *, score: float | None = None) -> None:
        """Starts to save a checkpoint of this step from rank 0, in the background; the other ranks go on at once.

        Call `store.wait()` before the checkpoint is needed.

        Args:
            store: where to.
            score: see `CheckpointStore.save`; that of rank 0 counts.

        Raises:
            CheckpointError: see `CheckpointStore.save_in_background`.
        """
        if self.world.rank != 0:
            return
        tensors = {"model": self._weights(), "optimizer": self.optimizer.state_tensors()}
        names = [(group, name) for group, members in tensors.items() for name in members]
        views = self.world.snapshot([tensors[group][name] for group, name in names])
        on_host: dict[str, dict[str, torch.Tensor]] = {group: {} for group in tensors}
        for (group, name), view in zip(names, views, strict=True):
            on_host[group][name] = view
        state = {
            "step": self.step,
            "samples": self.samples,
            "optimizer_steps": self.optimizer.steps,
            "world_size": self.world.size,
            "identity": self.identity,
            "versions": _versions(),
        }
        store.save_in_background(self.step, on_host, state, score)

    def resume(self, store: CheckpointStore, *, step: int | None = None, may_change: Collection[str] = ()) -> bool:
        """Restores the newest usable checkpoint, or that of `step`; every rank calls this.

        One rank of each host verifies the files; the others of the host map what that one has read.

        Args:
            store: where from.
            step: of the checkpoint, or None for the newest.
            may_change: names in the identity that may differ from the checkpoint's. With `global_batch`, read on from
                `sample_offset`.

        Returns:
            Whether there was a checkpoint.

        Raises:
            CheckpointError: the checkpoint is damaged or missing, or a host does not see what rank 0 sees.
            ConfigError: it belongs to a run with another identity.
        """
        begin = time.perf_counter()
        # Rank 0 chooses, so that no two ranks resume from different steps.
        chosen: tuple[int | None, str] = (step, "")
        checkpoint: Checkpoint | None = None
        if self.world.rank == 0:
            try:
                checkpoint = store.newest() if step is None else store.load(step)
                chosen = (checkpoint.step if checkpoint else None, "")
            except CheckpointError as error:
                chosen = (None, str(error))
        chosen_step, problem = self.world.broadcast_object(chosen)
        if problem:
            raise CheckpointError(problem)
        if chosen_step is None:
            return False
        self._verify_on_each_host(store, chosen_step)
        self._restore(checkpoint or store.read(chosen_step), may_change)
        self.restored_seconds = time.perf_counter() - begin
        return True

    def _verify_on_each_host(self, store: CheckpointStore, step: int) -> None:
        """Raises on every rank what the first rank of any host finds; rank 0 has verified already."""
        problem = ""
        if self.world.local_rank == 0 and self.world.rank != 0:
            try:
                store.verify(step)
            except CheckpointError as error:
                problem = f"rank {self.world.rank}: {error}"
        problems = [text for text in self.world.all_gather_object(problem) if text]
        if problems:
            raise CheckpointError(f"not every host sees a good checkpoint of step {step}: {'; '.join(problems)}")

    def load_weights(self, source: CheckpointStore | Mapping[str, torch.Tensor], *, step: int | None = None) -> None:
        """Takes the weights alone from another run's checkpoint, such as phase 1's at the start of phase 2.

        Args:
            source: checkpoints, or weights by this model's names.
            step: of the checkpoint, or None for the newest.

        Raises:
            CheckpointError: there is no usable checkpoint, or its weights are not this model's.
        """
        if isinstance(source, CheckpointStore):
            checkpoint = source.newest() if step is None else source.load(step)
            if checkpoint is None:
                raise CheckpointError(f"there is no checkpoint in {source.directory} to take the weights from")
            source = checkpoint.tensors["model"]
        self._load_model(source)
        self.optimizer.reset_master_weights()

    def fingerprint(self) -> str:
        """Returns the sha256 over the names, shapes, dtypes and values of all weights."""
        weights = self._weights()
        digest = hashlib.sha256()
        for name, view in zip(weights, self.world.host_views(list(weights.values())), strict=True):
            digest.update(f"{name} {tuple(view.shape)} {view.dtype}\n".encode())
            digest.update(view.reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def _weights(self) -> dict[str, torch.Tensor]:
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    def _restore(self, checkpoint: Checkpoint, may_change: Collection[str]) -> None:
        theirs = {"random_numbers": RANDOM_NUMBERS, **checkpoint.state["identity"]}
        for name in sorted((self.identity.keys() | theirs.keys()) - set(may_change)):
            if self.identity.get(name) != theirs.get(name):
                raise ConfigError(
                    f"the checkpoint of step {checkpoint.step} was written with {name} = {theirs.get(name)!r}, this "
                    f"run has {self.identity.get(name)!r}: the run would not go on as it was. Use the same setting, "
                    "or another output directory for a new run"
                )
        self._load_model(checkpoint.tensors["model"])
        self.optimizer.load_state(checkpoint.tensors["optimizer"], int(checkpoint.state["optimizer_steps"]))
        self.step = checkpoint.step
        before = checkpoint.step * int(theirs.get("global_batch", 0))
        self._resumed_at = (checkpoint.step, int(checkpoint.state.get("samples", before)))

    @torch.no_grad()
    def _load_model(self, tensors: Mapping[str, torch.Tensor]) -> None:
        mine = self._weights()
        if mine.keys() != tensors.keys():
            different = ", ".join(sorted(mine.keys() ^ tensors.keys())[:3])
            raise CheckpointError(f"the checkpoint's weights are not this model's: they differ in {different}")
        for name, tensor in mine.items():
            if tensor.shape != tensors[name].shape:
                raise CheckpointError(
                    f"the checkpoint's weight {name} has shape {tuple(tensors[name].shape)}, the model's "
                    f"{tuple(tensor.shape)}"
                )
            tensor.copy_(tensors[name])


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("trn-dist", "torch", "torch_xla", "torch-neuronx", "neuronx-cc"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
