"""The training loop, in one screen: take it, or copy it and change it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

import numpy as np
import numpy.typing as npt
import torch

from trn_dist.training.checkpoint import CheckpointStore
from trn_dist.training.report import RunLog
from trn_dist.training.state import TrainingState
from trn_dist.training.step import Batch, StepResult
from trn_dist.training.stop import SIGTERM_EXIT_CODE, StopRequest
from trn_dist.xla.profiling import StepProfile

HostBatch = dict[str, npt.NDArray[np.generic]]


def fit(
    train_step: Callable[[int, Sequence[Batch]], StepResult],
    state: TrainingState,
    batches: Iterable[Sequence[HostBatch]],
    log: RunLog,
    store: CheckpointStore,
    *,
    save_every: int,
    profile: StepProfile | None = None,
) -> None:
    """Takes a step for each element of `batches`; saves along the way, at the end, and when a SIGTERM asks to leave.

    Args:
        train_step: takes one step, given its index and this worker's micro-batches; a `TrainStep`, or anything that
            returns a `StepResult`.
        state: its `step` is where the run stands; it rises by one a step.
        batches: for each step this worker's micro-batches, as numpy arrays.
        log: takes what each step reports.
        store: of the run's checkpoints; they are written in the background, and the last one is whole at the return.
        save_every: steps between checkpoints. Each is scored with the mean loss of the steps since the one before.
        profile: records some of the steps.

    Raises:
        CheckpointError: a checkpoint could not be written.
        SystemExit: with 143 (128 + SIGTERM), after a checkpoint was saved on request.
    """
    saved, leave = state.step, False
    with StopRequest() as stop:
        for micro_batches in log.waiting_for_input(batches):
            with profile.step(state.step) if profile else nullcontext():
                result = train_step(state.step, [_tensors(batch) for batch in micro_batches])
            log.record(state.step, result)
            state.step += 1
            leave = stop.requested and state.world.rank == 0
            if leave or state.step % save_every == 0:
                saved = _save(state, store, log)
            if leave:
                break
        if saved != state.step:
            _save(state, store, log)
        with log.saving():
            store.wait()
        if leave:
            log.flush()
            state.world.print(f"asked to stop (SIGTERM): saved {store.path(state.step)}, leaving")
            raise SystemExit(SIGTERM_EXIT_CODE)


def _save(state: TrainingState, store: CheckpointStore, log: RunLog) -> int:
    """Starts a checkpoint and returns its step."""
    # What was reported so far goes to the sinks first: a run that resumes here reports the steps behind it only.
    log.deliver()
    with log.saving():
        state.save(store, score=log.loss_since_save())
    return state.step


def _tensors(batch: HostBatch) -> Batch:
    return {name: torch.from_numpy(array) for name, array in batch.items()}
