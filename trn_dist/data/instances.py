"""BERT's pre-training instances: masked sentence pairs (Devlin et al. 2018, sections 3.1 and A.2).

Everything drawn at random for a document comes from a generator of its own, keyed by (seed, duplicate, document), so
instances do not depend on how documents are spread over processes. Of the generator only `random()` is used, whose
stream the standard library promises to keep between versions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trn_dist.data.shards import DTYPES, KEYS
from trn_dist.data.vocabulary import CLS, MASK, SEP, Vocabulary
from trn_dist.errors import ConfigError

MIN_SEQ_LEN = 16
MAX_SEQ_LEN = 512

_NUM_SPECIAL = 3  # [CLS] A [SEP] B [SEP]
_MASKED, _KEPT = 0.8, 0.1  # of the chosen tokens; the rest become random words (Devlin et al. 2018, A.1)

Uniform = Callable[[], float]
"""Draws from [0, 1)."""


@dataclass(frozen=True)
class InstanceConfig:
    """How instances are made; the defaults are those of the published phase-1 data.

    Attributes:
        seq_len: tokens an instance, with special tokens and padding.
        max_predictions: most tokens that are masked in an instance.
        masked_lm_prob: share of an instance's tokens, special ones counted, that are masked.
        short_seq_prob: share of documents cut to a random length below `seq_len`, so that the model meets short input.
        seed: of everything random.

    Raises:
        ConfigError: a value is out of range.
    """

    seq_len: int = 128
    max_predictions: int = 20
    masked_lm_prob: float = 0.15
    short_seq_prob: float = 0.1
    seed: int = 12345

    def __post_init__(self) -> None:
        if not MIN_SEQ_LEN <= self.seq_len <= MAX_SEQ_LEN:
            reason = (
                f"BERT has position embeddings for {MAX_SEQ_LEN}"
                if self.seq_len > MAX_SEQ_LEN
                else f"a pair of sentences and {_NUM_SPECIAL} special tokens need room"
            )
            raise ConfigError(f"seq_len must be {MIN_SEQ_LEN} .. {MAX_SEQ_LEN}, not {self.seq_len}: {reason}")
        if not 1 <= self.max_predictions <= self.seq_len - _NUM_SPECIAL:
            raise ConfigError(
                f"max_predictions must be 1 .. seq_len - {_NUM_SPECIAL} = {self.seq_len - _NUM_SPECIAL}, "
                f"not {self.max_predictions}"
            )
        if not 0 < self.masked_lm_prob < 1:
            raise ConfigError(f"masked_lm_prob must lie between 0 and 1, not be {self.masked_lm_prob}")
        if not 0 <= self.short_seq_prob <= 1:
            raise ConfigError(f"short_seq_prob must be 0 .. 1, not {self.short_seq_prob}")


@dataclass(frozen=True)
class Corpus:
    """Encoded text: all tokens in a row, and where sentences and documents begin in it.

    Attributes:
        tokens: int32 [number of tokens].
        sentences: int64 [number of sentences + 1]; sentence s is `tokens[sentences[s]:sentences[s + 1]]`.
        documents: int64 [number of documents + 1]; document d has the sentences `documents[d] .. documents[d + 1] - 1`,
            at least one.
    """

    tokens: npt.NDArray[np.int32]
    sentences: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int64]

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.documents) - 1

    @classmethod
    def open(cls, directory: Path) -> Corpus:
        """Maps the files `tokens`, `sentences` and `documents`, the arrays' bytes alone, into memory.

        Processes that open the same files share their pages.
        """
        tokens = np.memmap(directory / "tokens", dtype=np.int32, mode="r")
        starts = (np.memmap(directory / name, dtype=np.int64, mode="r") for name in ("sentences", "documents"))
        # Indexing the memmap class itself is slow; a plain array over the same pages is not.
        return cls(np.asarray(tokens), *map(np.asarray, starts))


class Span(NamedTuple):
    """The tokens `start .. stop - 1` of a corpus."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of tokens."""
        return self.stop - self.start


class Pair(NamedTuple):
    """The two segments of an instance.

    Attributes:
        a: the first.
        b: the second: what follows `a`, or text of another document.
        is_random: whether it is of another document.
    """

    a: Span
    b: Span
    is_random: bool


def instance_dtype(config: InstanceConfig) -> np.dtype[np.void]:
    """Returns the record of an instance: a field for each key of a shard, in the shapes and dtypes of shards."""
    widths = dict(zip(KEYS, (*3 * (config.seq_len,), *2 * (config.max_predictions,)), strict=False))
    return np.dtype([(key, DTYPES[key], widths.get(key, ())) for key in KEYS])


def uniform(*key: int) -> Uniform:
    """Returns a generator of its own for a key, the same on every machine and version."""
    digest = hashlib.sha256(",".join(map(str, key)).encode()).digest()
    return Random(int.from_bytes(digest)).random


def document_pairs(corpus: Corpus, document: int, config: InstanceConfig, draw: Uniform) -> list[Pair]:
    """Cuts a document into segment pairs that fit `config.seq_len`.

    Sentences are gathered up to a target length and split in two at a random sentence. Half of the time, and always
    when there is only one sentence, the second part is replaced by text that begins at a random sentence of another
    document, and its sentences go back to be used next.

    Args:
        corpus: of at least two documents.
        document: its index.
        config: lengths and probabilities.
        draw: source of randomness.
    """
    first, stop = int(corpus.documents[document]), int(corpus.documents[document + 1])
    starts: list[int] = corpus.sentences[first : stop + 1].tolist()
    longest = config.seq_len - _NUM_SPECIAL
    target = longest if draw() >= config.short_seq_prob else 2 + _below(longest - 1, draw)
    pairs = []
    begin, count = 0, stop - first
    while begin < count:
        end = begin + 1
        while end < count and starts[end] - starts[begin] < target:
            end += 1
        single = end - begin == 1
        split = end if single else begin + 1 + _below(end - begin - 1, draw)
        a = Span(starts[begin], starts[split])
        is_random = single or draw() < 0.5
        b = _random_next(corpus, document, target - a.size, draw) if is_random else Span(starts[split], starts[end])
        pairs.append(Pair(*_truncate(a, b, longest, draw), is_random))
        begin = split if is_random else end
    return pairs


def make_instances(
    corpus: Corpus, documents: range, vocabulary: Vocabulary, config: InstanceConfig, *, duplicate: int = 0
) -> npt.NDArray[np.void]:
    """Makes the instances of some documents, masked, in the order of the documents.

    Args:
        corpus: of at least two documents.
        documents: indices of those to make instances of.
        vocabulary: that the corpus is encoded in.
        config: lengths, probabilities and seed.
        duplicate: of the data set; each has other pairs and masks.

    Returns:
        [number of instances] of `instance_dtype(config)`.
    """
    drawn = [(uniform(config.seed, duplicate, document), document) for document in documents]
    pairs = [(pair, draw) for draw, document in drawn for pair in document_pairs(corpus, document, config, draw)]
    instances = np.zeros(len(pairs), instance_dtype(config))
    columns = {key: instances[key] for key in KEYS}
    cls_id, sep_id, mask_id = (vocabulary.id(token) for token in (CLS, SEP, MASK))
    words = vocabulary.words.tolist()
    for row, (pair, draw) in enumerate(pairs):
        len_a, length = pair.a.size, pair.a.size + pair.b.size + _NUM_SPECIAL
        ids = columns["input_ids"][row]
        ids[0] = cls_id
        ids[1 : len_a + 1] = corpus.tokens[pair.a.start : pair.a.stop]
        ids[len_a + 1] = ids[length - 1] = sep_id
        ids[len_a + 2 : length - 1] = corpus.tokens[pair.b.start : pair.b.stop]
        columns["input_mask"][row, :length] = 1
        columns["segment_ids"][row, len_a + 2 : length] = 1
        columns["next_sentence_labels"][row] = pair.is_random
        positions = _masked_positions(len_a, length, config, draw)
        columns["masked_lm_positions"][row, : len(positions)] = positions
        columns["masked_lm_ids"][row, : len(positions)] = ids[positions]
        ids[positions] = [_replacement(int(ids[position]), mask_id, words, draw) for position in positions]
    return instances


def _below(count: int, draw: Uniform) -> int:
    return int(draw() * count)


def _random_next(corpus: Corpus, document: int, wanted: int, draw: Uniform) -> Span:
    """Takes sentences of another document, from a random one on, until there are `wanted` tokens or no more."""
    other = _below(corpus.num_documents - 1, draw)
    other += other >= document
    first, stop = int(corpus.documents[other]), int(corpus.documents[other + 1])
    begin = first + _below(stop - first, draw)
    start = int(corpus.sentences[begin])
    ends = corpus.sentences[begin + 1 : stop + 1]
    last = min(int(np.searchsorted(ends, start + wanted)), len(ends) - 1)
    return Span(start, int(ends[last]))


def _truncate(a: Span, b: Span, longest: int, draw: Uniform) -> tuple[Span, Span]:
    """Drops tokens of whichever is longer, at random from its front or its back, until both fit together."""
    while a.size + b.size > longest:
        longer = a if a.size > b.size else b
        shorter = Span(longer.start + 1, longer.stop) if draw() < 0.5 else Span(longer.start, longer.stop - 1)
        a, b = (shorter, b) if longer is a else (a, shorter)
    return a, b


def _masked_positions(len_a: int, length: int, config: InstanceConfig, draw: Uniform) -> list[int]:
    """Chooses distinct positions of tokens that are not special, in rising order."""
    choices = [*range(1, len_a + 1), *range(len_a + 2, length - 1)]
    count = min(config.max_predictions, max(1, round(length * config.masked_lm_prob)), len(choices))
    for i in range(count):  # the first steps of a Fisher-Yates shuffle
        j = i + _below(len(choices) - i, draw)
        choices[i], choices[j] = choices[j], choices[i]
    return sorted(choices[:count])


def _replacement(token: int, mask_id: int, words: list[int], draw: Uniform) -> int:
    chance = draw()
    if chance < _MASKED:
        return mask_id
    return token if chance < _MASKED + _KEPT else words[_below(len(words), draw)]
