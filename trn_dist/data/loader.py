"""Batches of one worker: the samples of a step, cut so that every way of splitting the global batch sees the same step.

With W workers, A micro-batches and b samples each, step s covers the stream's positions s*G .. (s+1)*G - 1, where
G = W*A*b. Micro-batch a of rank r takes the positions s*G + (a*W + r)*b + (0 .. b-1). So the set of samples of a step
depends on G alone, and a run may go on with another number of workers.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trn_dist.data.sampler import IntArray, SampleOrder
from trn_dist.errors import ConfigError, DataError

PREDICTIONS_PER_BATCH = "predictions_per_batch"

Batch = dict[str, npt.NDArray[np.generic]]


class Shards(Protocol):
    """What the loader needs of a data set; `trn_dist.data.shards.ShardSet` is one.

    Attributes:
        sizes: number of samples of each shard.
        num_samples: their sum.
    """

    sizes: IntArray
    num_samples: int

    def read(self, index: int) -> Mapping[str, npt.NDArray[np.integer[Any]]]:
        """Returns a shard's columns, [samples, ...] each; `masked_lm_ids` is 0 where nothing is masked."""


@dataclass(frozen=True)
class BatchShape:
    """How a global batch is cut.

    Attributes:
        batch_size: samples in a micro-batch of one worker (b).
        accumulation: micro-batches a step (A).
        rank: of this worker (r).
        world_size: number of workers (W).
    """

    batch_size: int
    accumulation: int = 1
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.accumulation < 1:
            raise ConfigError(
                f"batch_size ({self.batch_size}) and accumulation ({self.accumulation}) must be at least 1"
            )

    @property
    def global_batch(self) -> int:
        """Samples a step, over all workers (G)."""
        return self.batch_size * self.accumulation * self.world_size

    def mine(self, positions: IntArray) -> npt.NDArray[np.bool_]:
        """Tells which positions of the stream are this worker's."""
        turn: IntArray = positions % self.global_batch // self.batch_size
        mine: npt.NDArray[np.bool_] = turn % self.world_size == self.rank
        return mine


@dataclass(frozen=True)
class _LoadedWindow:
    """This worker's share of a window.

    Attributes:
        start: position of the window's first sample.
        stop: position behind its last sample.
        positions: this worker's positions, rising.
        columns: its samples, in the order of `positions`.
        predictions: `predictions[i]` is the number of masked positions in the window's first i samples, of all workers.
    """

    start: int
    stop: int
    positions: IntArray
    columns: Batch
    predictions: IntArray


class BatchLoader:
    """Gives the micro-batches of any step of a run; reading ahead happens in a thread.

    Args:
        shards: the data set.
        shape: how a global batch is cut, and which part is this worker's.
        seed: of the shuffles.
        vocab_size: of the model; every token must be below it. On an XLA device an embedding would silently take the
            last row for a token beyond it.
        window_shards: see `SampleOrder`.
        sample_offset: position in the stream of step 0's first sample; see `TrainingState.sample_offset`.

    Raises:
        DataError: the data set has fewer samples than one global batch; from the methods: a shard is damaged, or holds
            a token or a position that cannot be.
    """

    def __init__(
        self,
        shards: Shards,
        shape: BatchShape,
        *,
        seed: int,
        vocab_size: int | None = None,
        window_shards: int = 8,
        sample_offset: int = 0,
    ) -> None:
        if shards.num_samples < shape.global_batch:
            raise DataError(
                f"the data set has {shards.num_samples:,} samples, fewer than one global batch of "
                f"{shape.global_batch:,} ({shape.world_size} workers x {shape.accumulation} micro-batches x "
                f"{shape.batch_size}): lower batch_size or grad_accum_usteps, or prepare more data"
            )
        self.shards, self.shape, self.vocab_size, self.sample_offset = shards, shape, vocab_size, sample_offset
        self.order = SampleOrder(shards.sizes, seed=seed, window_shards=window_shards)
        self._window: _LoadedWindow | None = None

    def step(self, index: int) -> list[Batch]:
        """Returns this worker's micro-batches of a step.

        Args:
            index: of the step over the whole run, from 0.

        Returns:
            For each micro-batch the shard columns, [batch_size, ...] in the shards' own integer dtypes, and
            `predictions_per_batch`: an fp32 scalar, the masked positions of the whole step over all workers divided by
            its number of micro-batches. A sum over a micro-batch divided by it averages, over micro-batches and
            workers, to the mean over all masked positions of the step, however the step is cut.
        """
        shape = self.shape
        pieces: list[Batch] = []
        predictions = 0
        position = self.sample_offset + index * shape.global_batch
        stop = position + shape.global_batch
        while position < stop:
            window = self._window_at(position)
            piece_stop = min(stop, window.stop)
            first, last = np.searchsorted(window.positions, [position, piece_stop])
            pieces.append({key: column[first:last] for key, column in window.columns.items()})
            predictions += int(
                window.predictions[piece_stop - window.start] - window.predictions[position - window.start]
            )
            position = piece_stop
        whole = {key: np.concatenate([piece[key] for piece in pieces]) for key in pieces[0]}
        per_batch = np.asarray(predictions / (shape.world_size * shape.accumulation), dtype=np.float32)
        return [
            {
                **{key: column[i * shape.batch_size : (i + 1) * shape.batch_size] for key, column in whole.items()},
                PREDICTIONS_PER_BATCH: per_batch,
            }
            for i in range(shape.accumulation)
        ]

    def steps(self, start: int, stop: int) -> Iterator[list[Batch]]:
        """Yields the steps `start` .. `stop` - 1, each prepared in a thread while the one before is being trained on.

        The thread ends when the iterator is closed or exhausted; its errors are raised at the step they belong to.
        """
        ready: queue.Queue[list[Batch] | BaseException] = queue.Queue(maxsize=2)
        closed = threading.Event()

        def put(item: list[Batch] | BaseException) -> None:
            while not closed.is_set():
                try:
                    return ready.put(item, timeout=0.1)
                except queue.Full:
                    continue

        def read_ahead() -> None:
            for index in range(start, stop):
                if closed.is_set():
                    return
                try:
                    put(self.step(index))
                except BaseException as error:  # noqa: BLE001 - handed over to the consumer, which raises it
                    return put(error)

        thread = threading.Thread(target=read_ahead, name="trn_dist-read-ahead", daemon=True)
        thread.start()
        try:
            for _ in range(start, stop):
                item = ready.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            closed.set()
            thread.join()

    def _window_at(self, position: int) -> _LoadedWindow:
        if self._window is None or not self._window.start <= position < self._window.stop:
            self._window = None  # free the old window before the new one is read
            self._window = self._load(position)
        return self._window

    def _load(self, position: int) -> _LoadedWindow:
        window = self.order.window_at(position)
        positions = np.arange(window.start, window.stop, dtype=np.int64)
        mine = self.shape.mine(positions)
        my_rows = window.order[mine]
        counts = np.empty(window.stop - window.start, dtype=np.int64)
        columns: Batch = {}
        first = 0
        for shard in window.shards:
            content = self.shards.read(shard)
            self._check_ranges(shard, content)
            size = int(self.order.sizes[shard])
            counts[first : first + size] = np.count_nonzero(content["masked_lm_ids"], axis=1)
            here = (my_rows >= first) & (my_rows < first + size)
            for key, column in content.items():
                target = columns.setdefault(key, np.empty((len(my_rows), *column.shape[1:]), dtype=column.dtype))
                target[here] = column[my_rows[here] - first]
            first += size
        predictions = np.concatenate([[0], np.cumsum(counts[window.order])])
        return _LoadedWindow(window.start, window.stop, positions[mine], columns, predictions)

    def _check_ranges(self, shard: int, content: Mapping[str, npt.NDArray[np.integer[Any]]]) -> None:
        seq_len = content["input_ids"].shape[1]
        limits = {"input_ids": self.vocab_size, "masked_lm_ids": self.vocab_size, "masked_lm_positions": seq_len}
        for key, limit in limits.items():
            low, high = int(content[key].min()), int(content[key].max())
            if low < 0 or (limit is not None and high >= limit):
                raise DataError(
                    f"shard {shard} (in the order of their names) has {key} from {low} to {high}, but the model takes "
                    f"0 to {(limit or 0) - 1}: it was made with another vocabulary or sequence length, or is damaged"
                )
