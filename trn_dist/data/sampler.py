"""The order in which samples are read: a pure function of (sizes, seed, position), the same on any number of workers.

A run is an endless stream of positions 0, 1, 2, ...; with N samples, position p is entry p % N of epoch p // N, so
nothing is dropped and no batch is ragged. Within an epoch the shards are shuffled and grouped into windows of a few
shards, and the samples of a window are shuffled together: as good as a global shuffle when the shards themselves were
shuffled, and every shard is read once an epoch, whole, which is the only fast way to read HDF5.

Shuffles sort by SplitMix64 hashes (Steele, Lea and Flood 2014) instead of drawing from a library's generator, whose
streams may change between versions: a resumed run must find the order it left.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trn_dist.errors import ConfigError

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Window:
    """A few shards whose samples are shuffled together.

    Attributes:
        epoch: index of the epoch.
        shards: indices of the shards, in reading order.
        start: position in the stream of the window's first sample.
        stop: position behind its last sample.
        order: `order[i]` is the row, in the concatenation of the shards, of the sample at position `start + i`.
    """

    epoch: int
    shards: tuple[int, ...]
    start: int
    stop: int
    order: IntArray


class SampleOrder:
    """The stream of samples over shards.

    Args:
        sizes: number of samples of each shard.
        seed: of the shuffles.
        window_shards: number of shards shuffled together; costs that many shards of memory while one is loaded.

    Raises:
        ConfigError: no samples, or a window of less than one shard.
    """

    def __init__(self, sizes: npt.ArrayLike, *, seed: int, window_shards: int = 8) -> None:
        self.sizes: IntArray = np.asarray(sizes, dtype=np.int64)
        if self.sizes.sum() <= 0:
            raise ConfigError("there are no samples to order")
        if window_shards < 1:
            raise ConfigError(f"a shuffle window must hold at least one shard, not {window_shards}")
        self.seed, self.window_shards = seed, window_shards
        self.num_samples = int(self.sizes.sum())

    def window_at(self, position: int) -> Window:
        """Returns the window that holds a position of the stream."""
        epoch, entry = divmod(position, self.num_samples)
        shards = shuffled(len(self.sizes), self.seed, epoch)
        starts = np.concatenate([[0], np.cumsum(self.sizes[shards])])
        last = int(np.searchsorted(starts, entry, side="right")) - 1
        first = last - last % self.window_shards
        behind = min(first + self.window_shards, len(shards))
        start, stop = int(starts[first]), int(starts[behind])
        return Window(
            epoch=epoch,
            shards=tuple(int(shard) for shard in shards[first:behind]),
            start=epoch * self.num_samples + start,
            stop=epoch * self.num_samples + stop,
            order=shuffled(stop - start, self.seed, epoch, first + 1),
        )

    def locate(self, position: int) -> tuple[int, int]:
        """Returns the shard and the row in it of the sample at a position: the slow, plain form, for inspection."""
        window = self.window_at(position)
        row = int(window.order[position - window.start])
        for shard in window.shards:
            if row < self.sizes[shard]:
                return shard, row
            row -= int(self.sizes[shard])
        raise AssertionError("a window's order stays within its shards")


def shuffled(count: int, *key: int) -> IntArray:
    """Returns 0 .. count-1 in an order that depends on the key alone, on every machine and version."""
    state: npt.NDArray[np.uint64] = np.zeros(1, dtype=np.uint64)
    for part in key:
        state = _splitmix64(state ^ np.uint64(part & 0xFFFFFFFFFFFFFFFF))
    return np.argsort(_splitmix64(np.arange(count, dtype=np.uint64) + state), kind="stable").astype(np.int64)


def _splitmix64(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of SplitMix64 on each element; arithmetic is modulo 2**64."""
    z = state + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
