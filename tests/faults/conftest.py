"""A small data set for the training script; see tests/examples for what the script is asked to do otherwise."""

import argparse
from pathlib import Path

import pytest

from trn_dist.data.instances import InstanceConfig
from trn_dist.data.prepare import PrepareConfig, prepare


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few hundred instances of 32 tokens, from the source of one of Python's own modules."""
    folder = tmp_path_factory.mktemp("data")
    lines = Path(argparse.__file__).read_text().splitlines()
    sentences = [line.strip() for line in lines if len(line.split()) > 4]
    text = folder / "text.txt"
    text.write_text("\n\n".join("\n".join(sentences[i : i + 12]) for i in range(0, 720, 12)))
    instances = InstanceConfig(seq_len=32, max_predictions=5)
    out = folder / "shards"
    config = PrepareConfig(inputs=(text,), out=out, vocab_size=500, num_shards=3, processes=1, instances=instances)
    prepare(config, progress=False)
    return out
