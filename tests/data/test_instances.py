import hashlib
import math
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trn_dist.data.instances import (
    Corpus,
    InstanceConfig,
    Pair,
    Span,
    document_pairs,
    instance_dtype,
    make_instances,
    uniform,
)
from trn_dist.data.shards import KEYS, ShardSet, write_shard
from trn_dist.data.vocabulary import SPECIAL_TOKENS, Vocabulary
from trn_dist.errors import ConfigError

VOCABULARY = Vocabulary((*SPECIAL_TOKENS, "[unused0]", *(f"w{i}" for i in range(200))))
CLS, SEP, MASK = 2, 3, 4
FIRST_WORD = 6


def make_corpus(sizes):
    """Makes a corpus from the sentence lengths of each document."""
    lengths = [length for document in sizes for length in document]
    tokens = FIRST_WORD + np.arange(sum(lengths), dtype=np.int32) % 200
    sentences = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    documents = np.concatenate([[0], np.cumsum([len(document) for document in sizes])]).astype(np.int64)
    return Corpus(tokens, sentences, documents)


def scripted(*draws):
    """Returns a source of randomness that gives the listed numbers and no more."""
    return iter(draws).__next__


corpora = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=8), min_size=2, max_size=6).map(make_corpus)
configs = st.builds(
    InstanceConfig,
    seq_len=st.integers(16, 64),
    max_predictions=st.integers(1, 13),
    masked_lm_prob=st.floats(0.01, 0.99),
    short_seq_prob=st.floats(0, 1),
    seed=st.integers(0, 2**64),
)


def test_pairs_by_hand():
    # Document 0 has sentences [0, 5), [5, 9), [9, 15); document 1 has [15, 18), [18, 22).
    corpus = make_corpus([[5, 4, 6], [3, 4]])
    config = InstanceConfig(seq_len=16, max_predictions=2)  # so A and B have 13 tokens together
    draws = (
        0.1,  # not a short document
        # The sentences 0, 1 and 2 reach the target of 13.
        0.5,  # split behind sentence 1 + int(0.5 * 2) = 2
        0.49,  # a random next
        0.0,  # of the first other document, 1
        0.6,  # from its sentence 1: [18, 22), which gives the 4 tokens that are wanted
        # Sentence 2 goes back, and is alone: a random next without a draw for it.
        0.9,  # of document 1
        0.2,  # from its sentence 0: [15, 22), to reach 13 - 6 = 7 tokens
    )
    assert document_pairs(corpus, 0, config, scripted(*draws)) == [
        Pair(Span(0, 9), Span(18, 22), True),
        Pair(Span(9, 15), Span(15, 22), True),
    ]


def test_actual_next_and_truncation_by_hand():
    corpus = make_corpus([[5, 4, 6], [3, 4]])
    config = InstanceConfig(seq_len=16, max_predictions=2)
    draws = (
        0.1,
        0.0,  # split behind sentence 0
        0.5,  # the actual next, [5, 15): 5 + 10 tokens, 2 too many
        0.4,  # the longer, B, loses its first token
        0.7,  # B loses its last token
    )
    assert document_pairs(corpus, 0, config, scripted(*draws)) == [Pair(Span(0, 5), Span(6, 14), False)]


def test_short_document_by_hand():
    corpus = make_corpus([[5, 4, 6], [3, 4]])
    config = InstanceConfig(seq_len=16, max_predictions=2, short_seq_prob=1.0)
    draws = (
        0.99,  # short
        0.3,  # 2 + int(0.3 * 12) = 5 tokens, which sentence 0 has alone: a random next
        *(0.0, 0.0),  # from document 1, sentence 0
        # Sentence 1 has 4 tokens, so sentence 2 joins it.
        *(0.0, 0.6),  # split behind sentence 1; the actual next
    )
    assert document_pairs(corpus, 0, config, scripted(*draws)) == [
        Pair(Span(0, 5), Span(15, 18), True),
        Pair(Span(5, 9), Span(9, 15), False),
    ]


@settings(deadline=None, max_examples=150)
@given(corpus=corpora, config=configs, data=st.data())
def test_pairs_cover_the_document_and_random_ones_come_from_others(corpus, config, data):
    document = data.draw(st.integers(0, corpus.num_documents - 1))
    starts = corpus.sentences[corpus.documents]
    own = range(starts[document], starts[document + 1])
    pairs = document_pairs(corpus, document, config, uniform(config.seed))
    for a, b, is_random in pairs:
        assert a.size >= 1
        assert b.size >= 1
        assert a.size + b.size <= config.seq_len - 3
        assert own.start <= a.start
        assert a.stop <= own.stop
        inside = own.start <= b.start and b.stop <= own.stop
        assert inside != is_random
        other = np.searchsorted(starts, b.start, side="right") - 1
        assert b.stop <= starts[other + 1]
    assert [pair.a.start for pair in pairs] == sorted(pair.a.start for pair in pairs)
    longest = max(np.diff(corpus.sentences))
    if longest * 9 <= config.seq_len - 3:  # nothing is cut, so each token is used once
        used = [span for a, b, is_random in pairs for span in ([a] if is_random else [a, b])]
        assert [i for span in used for i in range(*span)] == list(own)


@settings(deadline=None, max_examples=150)
@given(corpus=corpora, config=configs, duplicate=st.integers(0, 9))
def test_instances_are_masked_pairs(corpus, config, duplicate):
    documents = range(corpus.num_documents)
    instances = make_instances(corpus, documents, VOCABULARY, config, duplicate=duplicate)
    pairs = [
        pair
        for document in documents
        for pair in document_pairs(corpus, document, config, uniform(config.seed, duplicate, document))
    ]
    assert len(instances) == len(pairs)
    for instance, (a, b, is_random) in zip(instances, pairs, strict=True):
        tokens = [CLS, *corpus.tokens[slice(*a)], SEP, *corpus.tokens[slice(*b)], SEP]
        length, padding = len(tokens), config.seq_len - len(tokens)
        count = min(config.max_predictions, max(1, round(length * config.masked_lm_prob)), length - 3)
        unused = [0] * (config.max_predictions - count)
        positions = instance["masked_lm_positions"][:count]
        originals = instance["masked_lm_ids"][:count]

        assert instance["masked_lm_positions"][count:].tolist() == unused
        assert instance["masked_lm_ids"][count:].tolist() == unused
        assert positions.tolist() == sorted(set(positions.tolist()))
        assert not {0, a.size + 1, length - 1} & set(positions.tolist())
        restored = instance["input_ids"].copy()
        masked = restored[positions]
        assert all(token == MASK or token >= FIRST_WORD for token in masked)
        restored[positions] = originals
        assert restored.tolist() == [*tokens, *[0] * padding]
        assert instance["input_mask"].tolist() == [1] * length + [0] * padding
        assert instance["segment_ids"].tolist() == [0] * (a.size + 2) + [1] * (b.size + 1) + [0] * padding
        assert instance["next_sentence_labels"] == is_random


@settings(deadline=None, max_examples=30)
@given(corpus=corpora, config=configs, data=st.data())
def test_instances_do_not_depend_on_how_documents_are_grouped(corpus, config, data):
    cut = data.draw(st.integers(0, corpus.num_documents))
    whole = make_instances(corpus, range(corpus.num_documents), VOCABULARY, config)
    parts = [
        make_instances(corpus, part, VOCABULARY, config) for part in (range(cut), range(cut, corpus.num_documents))
    ]
    assert whole.tobytes() == np.concatenate(parts).tobytes()


def test_duplicates_and_seeds_differ():
    corpus = make_corpus([[10, 12, 9, 14] * 5, [8, 11] * 9])
    config, other = InstanceConfig(seq_len=64), InstanceConfig(seq_len=64, seed=1)
    made = [
        make_instances(corpus, range(2), VOCABULARY, config).tobytes(),
        make_instances(corpus, range(2), VOCABULARY, config, duplicate=1).tobytes(),
        make_instances(corpus, range(2), VOCABULARY, other).tobytes(),
    ]
    assert len(set(made)) == 3


def test_generator_is_the_standard_librarys_seeded_with_a_sha256():
    seed = int.from_bytes(hashlib.sha256(b"12345,0,7").digest(), "big")
    draw, expected = uniform(12345, 0, 7), Random(seed)
    assert [draw() for _ in range(5)] == [expected.random() for _ in range(5)]


def within(count, trials, probability):
    """Tells whether a binomial count lies within 5 standard deviations."""
    return abs(count - trials * probability) < 5 * math.sqrt(trials * probability * (1 - probability))


def test_shares_of_masks_words_and_random_nexts():
    corpus = make_corpus([[7, 5, 9, 6, 8] * 40] * 40)
    config = InstanceConfig(seq_len=64, short_seq_prob=0.0)
    instances = make_instances(corpus, range(40), VOCABULARY, config)
    used = instances["masked_lm_ids"] != 0
    shown = np.take_along_axis(instances["input_ids"], instances["masked_lm_positions"], axis=1)[used]
    originals = instances["masked_lm_ids"][used]
    predictions = len(originals)
    assert predictions > 10_000
    assert within(np.count_nonzero(shown == MASK), predictions, 0.8)
    # A random word is the original one once in 200 times.
    assert within(np.count_nonzero(shown == originals), predictions, 0.1 + 0.1 / 200)
    words = shown[(shown != MASK) & (shown != originals)]
    assert set(words.tolist()) == set(range(FIRST_WORD, FIRST_WORD + 200))
    # Chunks at the end of a document are few, so nearly all have several sentences and draw.
    assert within(np.count_nonzero(instances["next_sentence_labels"]), len(instances), 0.5)
    # The place of a masked token is uniform: half of them lie in the first half of the text.
    lengths = instances["input_mask"].sum(axis=1, dtype=int, keepdims=True)
    early = (instances["masked_lm_positions"] < lengths / 2) & used
    assert abs(np.count_nonzero(early) / predictions - 0.5) < 0.02


def test_instances_are_what_shards_hold(tmp_path):
    config = InstanceConfig(seq_len=32, max_predictions=5)
    instances = make_instances(make_corpus([[7, 5, 9], [6, 8]]), range(2), VOCABULARY, config)
    assert instances.dtype == instance_dtype(config)
    write_shard(tmp_path / "training.hdf5", {key: instances[key] for key in KEYS})
    for key, column in ShardSet.open(tmp_path).read(0).items():
        assert column.dtype == instances[key].dtype
        np.testing.assert_array_equal(column, instances[key])


def test_corpus_of_files(tmp_path):
    corpus = make_corpus([[7, 5, 9], [6, 8]])
    for name in ("tokens", "sentences", "documents"):
        getattr(corpus, name).tofile(tmp_path / name)
    opened = Corpus.open(tmp_path)
    assert opened.num_documents == 2
    for name in ("tokens", "sentences", "documents"):
        np.testing.assert_array_equal(getattr(opened, name), getattr(corpus, name))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"seq_len": 513}, "seq_len must be 16 .. 512, not 513: BERT has position embeddings for 512"),
        ({"seq_len": 15}, "seq_len must be 16 .. 512, not 15: a pair of sentences and 3 special tokens need room"),
        ({"max_predictions": 0}, "max_predictions must be 1 .. seq_len - 3 = 125, not 0"),
        ({"seq_len": 20, "max_predictions": 18}, "max_predictions must be 1 .. seq_len - 3 = 17, not 18"),
        ({"masked_lm_prob": 0.0}, "masked_lm_prob must lie between 0 and 1, not be 0.0"),
        ({"masked_lm_prob": float("nan")}, "masked_lm_prob must lie between 0 and 1, not be nan"),
        ({"short_seq_prob": 1.1}, "short_seq_prob must be 0 .. 1, not 1.1"),
    ],
)
def test_settings_out_of_range(setting, message):
    with pytest.raises(ConfigError) as error:
        InstanceConfig(**setting)
    assert str(error.value) == message
