"""The training loop, in one screen: take it, or copy it and change it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from trn_dist.training.report import RunLog
from trn_dist.training.state import TrainingState
from trn_dist.training.step import Batch, TrainStep

HostBatch = dict[str, npt.NDArray[np.generic]]


def fit(
    train_step: TrainStep,
    state: TrainingState,
    batches: Iterable[Sequence[HostBatch]],
    log: RunLog,
    *,
    save: Callable[[], None],
    save_every: int,
) -> None:
    """Takes a step for each element of `batches` and saves along the way and at the end.

    Args:
        train_step: takes one step.
        state: its `step` is where the run stands; it rises by one a step.
        batches: for each step this worker's micro-batches, as numpy arrays.
        log: takes what each step reports.
        save: saves a checkpoint of `state`.
        save_every: steps between checkpoints.
    """
    saved = state.step
    waiting_since = time.perf_counter()
    for micro_batches in batches:
        log.input_seconds += time.perf_counter() - waiting_since
        log.record(state.step, train_step(state.step, [_tensors(batch) for batch in micro_batches]))
        state.step += 1
        if state.step % save_every == 0:
            saved = _save(save, state, log)
        waiting_since = time.perf_counter()
    if saved != state.step:
        _save(save, state, log)


def _save(save: Callable[[], None], state: TrainingState, log: RunLog) -> int:
    begin = time.perf_counter()
    save()
    log.checkpoint_seconds += time.perf_counter() - begin
    return state.step


def _tensors(batch: HostBatch) -> Batch:
    return {name: torch.from_numpy(array) for name, array in batch.items()}
