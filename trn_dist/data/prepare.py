"""Text to a data set of pre-training shards, over processes.

The stages: train or load the vocabulary, encode the text, make the instances, shuffle them all and write the shards.
Between stages the data lies in files that are mapped into memory, so long text needs no more memory than short text.
The result depends on the text and the settings alone, not on the number of processes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm  # type: ignore[import-untyped]

from trn_dist import __version__
from trn_dist.data.instances import Corpus, InstanceConfig, instance_dtype, make_instances
from trn_dist.data.output import staged
from trn_dist.data.processes import Workers
from trn_dist.data.sampler import IntArray, shuffled
from trn_dist.data.shards import KEYS, Manifest, ManifestShard, write_shard
from trn_dist.data.text import TextFormat, read_documents
from trn_dist.data.vocabulary import Vocabulary
from trn_dist.errors import ConfigError, DataError

VOCAB_NAME = "vocab.txt"

_MIN_VOCAB_SIZE = 100
_MIN_SHARDS = 8
_MAX_SHARD_SIZE = 100_000
# Pieces of work: long enough for the cost of handing them to a process to vanish.
_BLOCK_CHARACTERS = 1 << 20
_BLOCK_TOKENS = 1 << 17


@dataclass(frozen=True)
class PrepareConfig:
    """What to make a data set from, and how; the defaults are those of the published phase-1 data.

    Attributes:
        inputs: text files and directories, see `trn_dist.data.text.read_documents`.
        out: directory of the data set.
        vocab: a BERT `vocab.txt`; None trains a vocabulary on the text.
        vocab_size: most tokens of a trained vocabulary; the default is the size of the uncased BERT models'.
        lowercase: see `trn_dist.data.vocabulary.Vocabulary`.
        text_format: see `read_documents`.
        duplicate_factor: times that the text is gone through, each with other pairs and masks.
        num_shards: None makes 8, or more to keep shards at 100,000 instances at most.
        processes: None takes as many as there are CPUs for this process.
        overwrite: whether a data set in `out` may be replaced.
        instances: how instances are made.

    Raises:
        ConfigError: a value is out of range.
    """

    inputs: tuple[Path, ...]
    out: Path
    vocab: Path | None = None
    vocab_size: int = 30_522
    lowercase: bool = True
    text_format: TextFormat = "blank-line"
    duplicate_factor: int = 5
    num_shards: int | None = None
    processes: int | None = None
    overwrite: bool = False
    instances: InstanceConfig = field(default_factory=InstanceConfig)

    def __post_init__(self) -> None:
        for name in ("duplicate_factor", "num_shards", "processes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        if self.vocab_size < _MIN_VOCAB_SIZE:
            raise ConfigError(
                f"vocab_size must be at least {_MIN_VOCAB_SIZE}, to hold the special tokens and an alphabet, "
                f"not {self.vocab_size}"
            )

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that the output depends on, as the manifest records them."""
        return {
            **asdict(self.instances),
            "duplicate_factor": self.duplicate_factor,
            "lowercase": self.lowercase,
            "text_format": self.text_format,
            "trained_vocab_size": None if self.vocab else self.vocab_size,
        }


def prepare(config: PrepareConfig, *, progress: bool = True) -> Manifest:
    """Makes a data set: `corpus_training_NNNN.hdf5` shards, `vocab.txt` and `manifest.json`.

    Everything is written beside `config.out` and renamed when it is complete; an error or an interrupt leaves nothing
    behind, and an older data set as it was. The same text, settings and package versions give the same bytes.

    Args:
        config: what to do.
        progress: whether to show progress bars on stderr, when that is a terminal.

    Returns:
        The manifest that was written.

    Raises:
        ConfigError: `config.out` holds something already, overlaps an input or cannot be written.
        DataError: the text, the vocabulary or an input file is unusable, see `read_documents` and `Vocabulary.load`;
            there is only one document; or there are fewer instances than shards.
        TrnDistError: a worker process was killed.
    """
    processes = config.processes or len(os.sched_getaffinity(0))
    with staged(config.out, config.inputs, overwrite=config.overwrite) as (output, work), Workers(processes) as workers:
        return _Build(config, output, work, workers, progress).run()


@dataclass(frozen=True)
class _Build:
    """The stages of a run.

    Attributes:
        config: what to do.
        output: directory of the finished files.
        work: directory of the files between stages.
        workers: that do the work.
        progress: whether to show progress bars.
    """

    config: PrepareConfig
    output: Path
    work: Path
    workers: Workers
    progress: bool

    def run(self) -> Manifest:
        vocabulary = self.make_vocabulary()
        vocabulary.save(self.output / VOCAB_NAME)
        load = partial(_load_vocabulary, self.output / VOCAB_NAME, self.config.lowercase)
        self.encode(load)
        corpus = Corpus.open(self.work)
        self.make(corpus, load)
        instances = _open_instances(self.work, self.config.instances)
        manifest = Manifest(
            library_version=__version__,
            counts={
                "documents": corpus.num_documents,
                "sentences": len(corpus.sentences) - 1,
                "tokens": len(corpus.tokens),
                "instances": len(instances),
                "predictions": int(np.count_nonzero(instances["masked_lm_ids"])),
            },
            vocab_size=len(vocabulary),
            vocab_sha256=vocabulary.sha256,
            settings=self.config.settings,
            shards=self.write_shards(len(instances)),
        )
        manifest.write(self.output)
        return manifest

    def make_vocabulary(self) -> Vocabulary:
        if self.config.vocab:
            return Vocabulary.load(self.config.vocab, lowercase=self.config.lowercase)
        return Vocabulary.train(
            lambda: self.documents("vocabulary"), size=self.config.vocab_size, lowercase=self.config.lowercase
        )

    def encode(self, load: Callable[[], Vocabulary]) -> None:
        """Writes the arrays of a `Corpus`."""
        with ExitStack() as stack:
            tokens, sentences, documents = (
                stack.enter_context((self.work / name).open("wb")) for name in ("tokens", "sentences", "documents")
            )
            num_tokens, num_sentences = np.zeros(1, np.int64), np.zeros(1, np.int64)
            num_tokens.tofile(sentences)
            num_sentences.tofile(documents)
            blocks = _blocks(self.documents("encode"))
            for ids, sentence_sizes, document_sizes in self.workers.map(partial(_encode_block, load), blocks):
                ids.tofile(tokens)
                (num_tokens + np.cumsum(sentence_sizes)).tofile(sentences)
                (num_sentences + np.cumsum(document_sizes)).tofile(documents)
                num_tokens += len(ids)
                num_sentences += len(sentence_sizes)
        if not num_tokens[0]:
            raise DataError("the corpus is empty: its text has no character that the tokenizer keeps")

    def make(self, corpus: Corpus, load: Callable[[], Vocabulary]) -> None:
        """Writes the instances, in the order of (duplicate, document)."""
        if corpus.num_documents < 2:
            raise DataError(
                "the corpus has one document, but the random next sentences of a document come from others: separate "
                "documents by blank lines, or use the format 'line'"
            )
        tasks = [(duplicate, part) for duplicate in range(self.config.duplicate_factor) for part in _parts(corpus)]
        function = partial(_make_block, self.work, load, self.config.instances)
        with _instances_path(self.work).open("wb") as file:
            for instances in self.bar(self.workers.map(function, tasks), "instances", "block", len(tasks)):
                instances.tofile(file)

    def write_shards(self, num_instances: int) -> tuple[ManifestShard, ...]:
        """Shuffles the instances and writes them as shards whose sizes differ by one at most."""
        num_shards = self.config.num_shards or max(
            min(_MIN_SHARDS, num_instances), -(-num_instances // _MAX_SHARD_SIZE)
        )
        if num_shards > num_instances:
            raise DataError(f"the text makes {num_instances:,} instances, too few for num_shards={num_shards:,}")
        order = shuffled(num_instances, self.config.instances.seed)
        width = max(4, len(str(num_shards - 1)))
        bounds = pairwise(num_instances * i // num_shards for i in range(num_shards + 1))
        tasks = ((f"corpus_training_{i:0{width}}.hdf5", order[start:stop]) for i, (start, stop) in enumerate(bounds))
        function = partial(_write_shard, self.work, self.output, self.config.instances)
        return tuple(self.bar(self.workers.map(function, tasks), "shards", "shard", num_shards))

    def documents(self, stage: str) -> Iterable[list[str]]:
        return self.bar(read_documents(self.config.inputs, self.config.text_format), stage, "document")

    def bar(self, items: Iterable[Any], stage: str, unit: str, total: int | None = None) -> Iterable[Any]:
        bar: Iterable[Any] = tqdm(
            items,
            stage,
            total,
            unit=f" {unit}s",
            disable=None if self.progress else True,  # None: only when stderr is no terminal
        )
        return bar


@lru_cache(maxsize=1)
def _load_vocabulary(path: Path, lowercase: bool) -> Vocabulary:
    return Vocabulary.load(path, lowercase=lowercase)


def _blocks(documents: Iterable[list[str]]) -> Iterator[list[list[str]]]:
    """Groups documents into pieces of work of about `_BLOCK_CHARACTERS`."""
    block: list[list[str]] = []
    size = 0
    for document in documents:
        block.append(document)
        size += sum(map(len, document))
        if size >= _BLOCK_CHARACTERS:
            yield block
            block, size = [], 0
    yield block


def _encode_block(
    load: Callable[[], Vocabulary], block: list[list[str]]
) -> tuple[npt.NDArray[np.int32], IntArray, IntArray]:
    """Returns a block's tokens, the sizes of its sentences in tokens, and of its documents in sentences; none is 0."""
    ids = iter(load().encode([sentence for document in block for sentence in document]))
    encoded = [[tokens for tokens in (next(ids) for _ in document) if tokens] for document in block]
    sentences = list(chain.from_iterable(encoded))
    return (
        np.fromiter(chain.from_iterable(sentences), np.int32),
        np.asarray([len(tokens) for tokens in sentences], np.int64),
        np.asarray([len(document) for document in encoded if document], np.int64),
    )


def _parts(corpus: Corpus) -> list[range]:
    """Groups documents into pieces of work of about `_BLOCK_TOKENS`."""
    document_starts = corpus.sentences[corpus.documents[:-1]]
    firsts = np.unique(np.searchsorted(document_starts, np.arange(0, document_starts[-1] + 1, _BLOCK_TOKENS)))
    return [range(first, stop) for first, stop in pairwise([*firsts.tolist(), corpus.num_documents])]


def _make_block(
    work: Path, load: Callable[[], Vocabulary], config: InstanceConfig, task: tuple[int, range]
) -> npt.NDArray[np.void]:
    duplicate, documents = task
    return make_instances(Corpus.open(work), documents, load(), config, duplicate=duplicate)


def _instances_path(work: Path) -> Path:
    return work / "instances"


def _open_instances(work: Path, config: InstanceConfig) -> npt.NDArray[np.void]:
    return np.asarray(np.memmap(_instances_path(work), instance_dtype(config), mode="r"))


def _write_shard(work: Path, output: Path, config: InstanceConfig, task: tuple[str, IntArray]) -> ManifestShard:
    name, rows = task
    instances = _open_instances(work, config)[rows]
    write_shard(output / name, {key: instances[key] for key in KEYS})
    with (output / name).open("rb") as file:
        return ManifestShard(name, len(rows), hashlib.file_digest(file, "sha256").hexdigest())
