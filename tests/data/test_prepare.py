import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from trn_dist.data import prepare as prepare_module
from trn_dist.data.instances import InstanceConfig
from trn_dist.data.prepare import PrepareConfig, prepare
from trn_dist.data.shards import ShardSet
from trn_dist.data.vocabulary import Vocabulary
from trn_dist.errors import ConfigError, DataError

COLOURS = ["red", "green", "blue", "yellow", "white", "black", "grey", "brown"]
THINGS = ["house", "river", "stone", "bird", "field", "tower", "garden", "road"]


def sentence(i):
    return f"The {COLOURS[i % 8]} {THINGS[i * 3 % 7]} lies behind the {COLOURS[i * 5 % 8]} {THINGS[i % 8]} number {i}."


VOCAB = "given.txt"


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    documents = ["\n".join(sentence(i) for i in range(start, start + 12)) for start in range(0, 300, 10)]
    path.write_text("\n\n".join(documents))
    return path


def make_config(text, out, **settings):
    defaults = {"vocab_size": 150, "processes": 1, "duplicate_factor": 2, "instances": InstanceConfig(seq_len=48)}
    return PrepareConfig(inputs=(text,), out=out, **{**defaults, **settings})


def files(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_data_set(text, tmp_path):
    out = tmp_path / "deep" / "out"
    manifest = prepare(make_config(text, out, num_shards=3))
    assert sorted(files(out)) == [
        "corpus_training_0000.hdf5",
        "corpus_training_0001.hdf5",
        "corpus_training_0002.hdf5",
        "manifest.json",
        "vocab.txt",
    ]
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    shards = ShardSet.open(out)
    assert shards.manifest == manifest
    assert max(shards.sizes) - min(shards.sizes) <= 1
    assert (shards.seq_len, shards.max_predictions) == (48, 20)
    vocabulary = Vocabulary.load(out / "vocab.txt")
    assert (manifest.vocab_size, manifest.vocab_sha256) == (len(vocabulary), vocabulary.sha256)
    sentences = [sentence(i) for start in range(0, 300, 10) for i in range(start, start + 12)]
    assert manifest.counts == {
        "documents": 30,
        "sentences": 360,
        "tokens": sum(map(len, vocabulary.encode(sentences))),
        "instances": shards.num_samples,
        "predictions": sum(int(np.count_nonzero(shards.read(i)["masked_lm_ids"])) for i in range(3)),
    }
    for shard in manifest.shards:
        assert shard.sha256 == hashlib.sha256((out / shard.name).read_bytes()).hexdigest()
    assert manifest.settings == {
        "seq_len": 48,
        "max_predictions": 20,
        "masked_lm_prob": 0.15,
        "short_seq_prob": 0.1,
        "seed": 12345,
        "duplicate_factor": 2,
        "lowercase": True,
        "text_format": "blank-line",
        "trained_vocab_size": 150,
    }


def test_result_does_not_depend_on_processes_blocks_places_or_time(text, tmp_path, monkeypatch):
    prepare(make_config(text, tmp_path / "one"))
    monkeypatch.setattr(prepare_module, "_BLOCK_CHARACTERS", 1000)
    monkeypatch.setattr(prepare_module, "_BLOCK_TOKENS", 300)
    moved = tmp_path / "moved"
    moved.mkdir()
    text.rename(moved / "renamed")
    prepare(make_config(moved / "renamed", tmp_path / "two", processes=2))
    assert files(tmp_path / "one") == files(tmp_path / "two")


def test_seed_changes_the_shards_but_not_the_vocabulary(text, tmp_path):
    prepare(make_config(text, tmp_path / "one"))
    prepare(make_config(text, tmp_path / "two", instances=InstanceConfig(seq_len=48, seed=1)))
    one, two = files(tmp_path / "one"), files(tmp_path / "two")
    assert one["vocab.txt"] == two["vocab.txt"]
    assert one["corpus_training_0000.hdf5"] != two["corpus_training_0000.hdf5"]


def test_shards_are_shuffled(text, tmp_path):
    """Both shards have instances of the text's first and last documents, and both labels."""
    prepare(make_config(text, tmp_path / "out", num_shards=2, duplicate_factor=8, vocab_size=600))
    vocabulary = Vocabulary.load(tmp_path / "out" / "vocab.txt")
    shards = ShardSet.open(tmp_path / "out")
    for i in range(2):
        columns = shards.read(i)
        assert 0.3 < columns["next_sentence_labels"].mean() < 0.9
        assert set(vocabulary.encode(["0 301"])[0]) <= set(columns["input_ids"].flat)


def test_given_vocabulary(text, tmp_path):
    prepare(make_config(text, tmp_path / "one"))
    manifest = prepare(make_config(text, tmp_path / "two", vocab=tmp_path / "one" / "vocab.txt"))
    assert manifest.settings["trained_vocab_size"] is None
    one, two = files(tmp_path / "one"), files(tmp_path / "two")
    del one["manifest.json"], two["manifest.json"]
    assert one == two


def test_lines_as_documents_and_text_that_the_tokenizer_drops(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("One red bird. \x01\nA blue house!\n\x02\n")
    config = make_config(path, tmp_path / "out", text_format="line", num_shards=2, duplicate_factor=1)
    counts = prepare(config).counts
    assert (counts["documents"], counts["sentences"]) == (2, 2)


def test_default_number_of_shards(text, tmp_path, monkeypatch):
    assert len(prepare(make_config(text, tmp_path / "few")).shards) == 8
    monkeypatch.setattr(prepare_module, "_MAX_SHARD_SIZE", 9)
    manifest = prepare(make_config(text, tmp_path / "many"))
    assert len(manifest.shards) == -(-manifest.counts["instances"] // 9)
    assert max(shard.num_samples for shard in manifest.shards) <= 9


def test_a_data_set_is_kept_or_overwritten(text, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    prepare(make_config(text, out))  # an empty directory is welcome
    before = files(out)
    with pytest.raises(ConfigError, match="out is not empty"):
        prepare(make_config(text, out))
    assert files(out) == before
    prepare(make_config(text, out, overwrite=True, duplicate_factor=1))
    assert files(out) != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "text.txt"]


def test_errors_leave_the_old_data_set_and_nothing_else(text, tmp_path):
    out = tmp_path / "out"
    prepare(make_config(text, out))
    before = files(out)
    text.write_bytes(text.read_bytes() + b"\xff")
    with pytest.raises(DataError, match=r"text\.txt is not UTF-8"):
        prepare(make_config(text, out, overwrite=True, processes=2))
    assert files(out) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "text.txt"]


@pytest.mark.slow
def test_interrupt_leaves_nothing(text, tmp_path):
    out = tmp_path / "results" / "out"
    command = [sys.executable, "-c", INTERRUPTED, str(text), str(out)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        deadline = time.monotonic() + 60
        while not list(out.parent.glob(".out.*/work/instances")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does: to the workers too
        errors = process.communicate(timeout=60)[1]
    assert errors.count("Traceback") == 1
    assert errors.endswith("KeyboardInterrupt\n")
    assert list(out.parent.iterdir()) == []


INTERRUPTED = """
import sys
from pathlib import Path
from trn_dist.data.prepare import PrepareConfig, prepare
text, out = map(Path, sys.argv[1:])
prepare(PrepareConfig((text,), out, vocab_size=150, duplicate_factor=20000, processes=2))
"""


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        ("Only one document. It has two sentences.\n", {}, "the corpus has one document, but the random next"),
        ("\x01\n\n\x02\n", {}, "the corpus is empty: its text has no characters to train a vocabulary on"),
        ("\x01\n\n\x02\n", {"vocab": VOCAB}, "the corpus is empty: its text has no character that the tokenizer keeps"),
        ("\n\n", {}, r"the corpus is empty: no text in .*text\.txt"),
        ("One.\n\nTwo.\n", {"num_shards": 5}, "the text makes 4 instances, too few for num_shards=5"),
        ("One.\n\nTwo.\n", {"vocab": "missing"}, "vocabulary missing does not exist"),
    ],
)
def test_unusable_text(text, tmp_path, monkeypatch, content, settings, message):
    monkeypatch.chdir(tmp_path)
    text.write_text(content)
    Path(VOCAB).write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nword\n")
    with pytest.raises(DataError, match=message):
        prepare(make_config(text, tmp_path / "out", **settings))
    assert sorted(files(tmp_path)) == ["given.txt", "text.txt"]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"duplicate_factor": 0}, "duplicate_factor must be at least 1, not 0"),
        ({"num_shards": 0}, "num_shards must be at least 1, not 0"),
        ({"processes": -1}, "processes must be at least 1, not -1"),
        ({"vocab_size": 99}, "vocab_size must be at least 100, to hold the special tokens and an alphabet, not 99"),
    ],
)
def test_settings_out_of_range(tmp_path, setting, message):
    with pytest.raises(ConfigError) as error:
        PrepareConfig(inputs=(tmp_path,), out=tmp_path / "out", **setting)
    assert str(error.value) == message
