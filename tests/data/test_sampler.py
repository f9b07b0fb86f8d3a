import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trn_dist.data.sampler import SampleOrder, shuffled
from trn_dist.errors import ConfigError

MASK = 2**64 - 1
sizes = st.lists(st.integers(1, 30), min_size=1, max_size=7)


def splitmix64(state):
    """The generator of Steele, Lea and Flood (2014) in Python's own integers."""
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_the_hash_is_splitmix64():
    """The first outputs of SplitMix64 with seed 1234567, as published with the generator's reference code."""
    state, outputs = 1234567, []
    for _ in range(3):
        outputs.append(splitmix64(state))
        state = (state + 0x9E3779B97F4A7C15) & MASK
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(count=st.integers(0, 50), key=st.lists(st.integers(0, 2**63), min_size=1, max_size=3))
def test_the_order_is_that_of_the_hashes(count, key):
    state = 0
    for part in key:
        state = splitmix64(state ^ part)
    hashes = [splitmix64((state + i) & MASK) for i in range(count)]
    assert shuffled(count, *key).tolist() == sorted(range(count), key=hashes.__getitem__)


@settings(deadline=None)
@given(sizes=sizes, window=st.integers(1, 8), seed=st.integers(0, 9), epoch=st.integers(0, 3))
def test_an_epoch_holds_every_sample_once(sizes, window, seed, epoch):
    order = SampleOrder(sizes, seed=seed, window_shards=window)
    n = sum(sizes)
    seen = [order.locate(position) for position in range(epoch * n, (epoch + 1) * n)]
    assert sorted(seen) == [(shard, row) for shard, size in enumerate(sizes) for row in range(size)]


@settings(deadline=None)
@given(sizes=sizes, window=st.integers(1, 8))
def test_windows_tile_the_stream_and_read_each_shard_once(sizes, window):
    order = SampleOrder(sizes, seed=0, window_shards=window)
    position, shards = 0, []
    while position < 2 * sum(sizes):
        found = order.window_at(position)
        assert found.start == position
        assert len(found.shards) <= window
        assert order.window_at(found.stop - 1).start == found.start
        shards += found.shards
        position = found.stop
    assert sorted(shards) == sorted(2 * list(range(len(sizes))))


def test_epochs_and_seeds_differ():
    def first_epoch(seed, epoch=0):
        order = SampleOrder([40, 60], seed=seed)
        return [order.locate(epoch * 100 + position) for position in range(100)]

    assert first_epoch(1) == first_epoch(1)
    assert first_epoch(1) != first_epoch(2)
    assert first_epoch(1) != first_epoch(1, epoch=1)


def test_samples_are_mixed():
    """Neighbours in the stream are no neighbours in the shard: the mean distance of a random order is n / 3."""
    rows = shuffled(3000, 5)
    assert np.abs(np.diff(rows)).mean() == pytest.approx(1000, rel=0.05)


@pytest.mark.parametrize("sizes", [[], [0]])
def test_no_samples(sizes):
    with pytest.raises(ConfigError, match="no samples"):
        SampleOrder(sizes, seed=0)


def test_an_empty_window():
    with pytest.raises(ConfigError, match="at least one shard, not 0"):
        SampleOrder([3], seed=0, window_shards=0)
