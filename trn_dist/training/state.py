"""What a run is made of at a step boundary: saved whole, restored whole, or refused."""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from trn_dist.errors import CheckpointError, ConfigError
from trn_dist.training.checkpoint import Checkpoint, CheckpointStore
from trn_dist.training.optimizers import Optimizer
from trn_dist.xla import World


class TrainingState:
    """The model, the optimizer and the position of a run.

    Random numbers and the order of samples depend on the seed and the step alone, so the number of steps taken is the
    whole position.

    Args:
        world: the job's.
        model: on the world's device.
        optimizer: of the model's parameters.
        identity: settings that a resumed run must share with the run that wrote the checkpoint, such as the global
            batch, the seed, the data's fingerprint and the model's configuration; JSON values.

    Attributes:
        step: number of steps taken.
        restored_seconds: how long `resume` took.
    """

    def __init__(self, world: World, model: torch.nn.Module, optimizer: Optimizer, identity: Mapping[str, Any]) -> None:
        self.world, self.model, self.optimizer = world, model, optimizer
        self.identity = dict(identity)
        self.step = 0
        self.restored_seconds = 0.0

    def save(self, store: CheckpointStore) -> None:
        """Starts to save a checkpoint of this step from rank 0, in the background; the other ranks go on at once.

        Call `store.wait()` before the checkpoint is needed.

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
            "optimizer_steps": self.optimizer.steps,
            "world_size": self.world.size,
            "identity": self.identity,
            "versions": _versions(),
        }
        store.save_in_background(self.step, on_host, state)

    def resume(self, store: CheckpointStore, *, step: int | None = None) -> bool:
        """Restores the newest usable checkpoint, or that of `step`; every rank calls this.

        Returns:
            Whether there was a checkpoint.

        Raises:
            CheckpointError: the checkpoint is damaged or missing, or this rank does not see what rank 0 sees.
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
        self._restore(checkpoint or store.load(chosen_step))
        self.restored_seconds = time.perf_counter() - begin
        return True

    def load_weights(self, store: CheckpointStore, *, step: int | None = None) -> None:
        """Takes the weights alone from another run's checkpoint, such as phase 1's at the start of phase 2.

        Raises:
            CheckpointError: there is no usable checkpoint, or its weights are not this model's.
        """
        checkpoint = store.newest() if step is None else store.load(step)
        if checkpoint is None:
            raise CheckpointError(f"there is no checkpoint in {store.directory} to take the weights from")
        self._load_model(checkpoint.tensors["model"])
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

    def _restore(self, checkpoint: Checkpoint) -> None:
        theirs = checkpoint.state["identity"]
        for name in sorted(self.identity.keys() | theirs.keys()):
            if self.identity.get(name) != theirs.get(name):
                raise ConfigError(
                    f"the checkpoint of step {checkpoint.step} was written with {name} = {theirs.get(name)!r}, this "
                    f"run has {self.identity.get(name)!r}: the run would not go on as it was. Use the same setting, "
                    "or another output directory for a new run"
                )
        self._load_model(checkpoint.tensors["model"])
        self.optimizer.load_state(checkpoint.tensors["optimizer"], int(checkpoint.state["optimizer_steps"]))
        self.step = checkpoint.step

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
