from types import SimpleNamespace

import pytest
import torch

from trn_dist.models.bert import BertConfig

VOCABULARY = 203  # not a multiple of 8


@pytest.fixture
def config():
    return BertConfig.named("tiny", vocab_size=VOCABULARY, dropout=0.0, attention_dropout=0.0)


@pytest.fixture
def make_batch():
    """Batches with padding, ragged numbers of predictions, and the shards' dtypes."""

    def make(seed=0, batch=4, seq_len=32, predictions=5):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(12, seq_len + 1, (batch,), generator=generator)
        mask = (torch.arange(seq_len)[None] < lengths[:, None]).to(torch.int8)
        ids = torch.randint(1, VOCABULARY, (batch, seq_len), generator=generator, dtype=torch.int32) * mask
        segments = (torch.arange(seq_len)[None] >= lengths[:, None] // 2).to(torch.int8) * mask
        positions = torch.zeros(batch, predictions, dtype=torch.int32)
        targets = torch.zeros(batch, predictions, dtype=torch.int32)
        for row in range(batch):
            count = 1 + (row + seed) % predictions
            where = torch.randperm(10, generator=generator)[:count].sort().values + 1
            positions[row, :count] = where.int()
            targets[row, :count] = torch.randint(1, VOCABULARY, (count,), generator=generator, dtype=torch.int32)
        labels = torch.randint(0, 2, (batch,), generator=generator, dtype=torch.int8)
        inputs = (ids, mask, segments, positions)
        return SimpleNamespace(inputs=inputs, targets=targets, labels=labels)

    return make
