import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trn_dist.data.loader import PREDICTIONS_PER_BATCH, BatchLoader, BatchShape
from trn_dist.errors import ConfigError, DataError


class FakeShards:
    """Shards in memory: `input_ids` of a sample is its own number, so that a batch tells which samples it holds."""

    def __init__(self, sizes):
        self.sizes = np.array(sizes)
        self.num_samples = int(self.sizes.sum())
        self.starts = np.concatenate([[0], np.cumsum(sizes)])
        self.reads = []

    def predictions(self, sample):
        return 1 + sample % 3

    def read(self, shard):
        self.reads.append(shard)
        samples = np.arange(self.starts[shard], self.starts[shard + 1], dtype=np.int32)
        masked = np.zeros((len(samples), 3), dtype=np.int32)
        for row, sample in enumerate(samples):
            masked[row, : self.predictions(sample)] = 7
        positions = np.zeros_like(masked)
        tokens = samples[:, None].repeat(2, axis=1)
        return {"input_ids": tokens, "masked_lm_ids": masked, "masked_lm_positions": positions}


def ids(batch):
    return batch["input_ids"][:, 0].tolist()


def loader(sizes, shape, **options):
    return BatchLoader(FakeShards(sizes), shape, **{"seed": 5, "window_shards": 2, **options})


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    window=st.integers(1, 3),
    batch_size=st.integers(1, 3),
    accumulation=st.integers(1, 3),
    world_size=st.integers(1, 3),
    step=st.integers(0, 12),
)
def test_a_step_is_its_part_of_the_stream(sizes, window, batch_size, accumulation, world_size, step):
    """Epoch ends, window ends and shard ends included; every rank's batches are static in shape."""
    global_batch = batch_size * accumulation * world_size
    if sum(sizes) < global_batch:
        sizes = [*sizes, global_batch]
    ranks = [
        loader(sizes, BatchShape(batch_size, accumulation, rank, world_size), window_shards=window)
        for rank in range(world_size)
    ]
    batches = [rank.step(step) for rank in ranks]
    order, shards = ranks[0].order, ranks[0].shards
    expected = []
    for position in range(step * global_batch, (step + 1) * global_batch):
        shard, row = order.locate(position)
        expected.append(int(shards.starts[shard]) + row)
    seen = [sample for micro in range(accumulation) for rank in batches for sample in ids(rank[micro])]
    assert seen == expected
    mean = sum(shards.predictions(sample) for sample in expected) / (accumulation * world_size)
    for batch in (batch for rank in batches for batch in rank):
        assert batch["input_ids"].shape == (batch_size, 2)
        assert batch["input_ids"].dtype == np.int32
        assert batch[PREDICTIONS_PER_BATCH] == pytest.approx(mean)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_another_number_of_workers_sees_the_same_steps(world_size):
    def step_of(world_size, accumulation, step):
        ranks = [loader([30, 17, 9], BatchShape(2, accumulation, r, world_size)) for r in range(world_size)]
        return sorted(sample for rank in ranks for batch in rank.step(step) for sample in ids(batch))

    for step in range(10):
        assert step_of(world_size, 4 // world_size, step) == step_of(4, 1, step)


def test_iterating_is_asking_step_by_step_and_reads_each_shard_once_an_epoch():
    shape = BatchShape(4)
    one = loader([8, 8, 8, 8], shape)
    iterated = [[ids(batch) for batch in step] for step in one.steps(0, 8)]
    assert sorted(one.shards.reads) == [0, 1, 2, 3]
    other = loader([8, 8, 8, 8], shape)
    assert iterated == [[ids(batch) for batch in other.step(index)] for index in range(8)]


def test_starting_in_the_middle_gives_the_same_steps():
    whole = [[ids(b) for b in step] for step in loader([13, 8, 11], BatchShape(3)).steps(0, 20)]
    rest = [[ids(b) for b in step] for step in loader([13, 8, 11], BatchShape(3)).steps(7, 20)]
    assert rest == whole[7:]


def test_an_error_while_reading_ahead_reaches_the_consumer():
    broken = loader([8, 8, 8, 8], BatchShape(8))
    whole = broken.shards.read

    def read(shard):
        if len(broken.shards.reads) == 2:  # the first window is two shards, and two steps
            raise DataError(f"shard {shard} is damaged")
        return whole(shard)

    broken.shards.read = read
    steps = broken.steps(0, 4)
    assert [len(next(steps)), len(next(steps))] == [1, 1]
    with pytest.raises(DataError, match="is damaged"):
        next(steps)


def test_the_thread_ends_with_the_iterator():
    def reading():
        return [thread for thread in threading.enumerate() if thread.name == "trn_dist-read-ahead"]

    steps = loader([50], BatchShape(2)).steps(0, 1000)
    next(steps)
    assert reading()
    steps.close()
    assert not reading()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("input_ids", 100, r"shard [01] .* has input_ids from \d+ to 100, but the model takes 0 to 99"),
        ("masked_lm_ids", 100, "has masked_lm_ids from 0 to 100, but the model takes 0 to 99"),
        ("masked_lm_positions", 2, "has masked_lm_positions from 0 to 2, but the model takes 0 to 1"),
        ("masked_lm_positions", -1, "has masked_lm_positions from -1 to 0"),
    ],
)
def test_what_the_model_cannot_look_up_is_refused(key, value, message):
    """XLA clamps an index that is out of range, so nothing else would tell."""
    batches = loader([8, 8], BatchShape(4), vocab_size=100)
    batches.step(0)
    broken = loader([8, 8], BatchShape(4), vocab_size=100)
    whole = broken.shards.read

    def read(shard):
        content = whole(shard)
        content[key][3, 1] = value
        return content

    broken.shards.read = read
    with pytest.raises(DataError, match=message):
        broken.step(0)


def test_fewer_samples_than_a_global_batch():
    with pytest.raises(DataError, match=r"has 10 samples, fewer than one global batch of 16 \(2 workers x 4 micro"):
        loader([6, 4], BatchShape(2, 4, 0, 2))


@pytest.mark.parametrize(("batch_size", "accumulation"), [(0, 1), (1, 0)])
def test_sizes_must_be_positive(batch_size, accumulation):
    with pytest.raises(ConfigError, match="must be at least 1"):
        BatchShape(batch_size, accumulation)


def test_another_global_batch_reads_on_from_where_the_one_before_stopped():
    """Five steps of 6, then steps of 4 from the same position: no sample twice, none left out."""
    before = loader([20, 30], BatchShape(3, 2, 0, 1))
    first = [sample for step in range(5) for batch in before.step(step) for sample in ids(batch)]
    after = loader([20, 30], BatchShape(4, 1, 0, 1), sample_offset=5 * 6 - 5 * 4)
    second = [sample for step in range(5, 10) for batch in after.step(step) for sample in ids(batch)]
    assert sorted(first + second) == list(range(50))
