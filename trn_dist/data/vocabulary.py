"""WordPiece vocabularies: BERT's `vocab.txt`, read from a file or trained on a corpus."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from trn_dist.errors import DataError

PAD, UNK, CLS, SEP, MASK = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

_MAX_ALPHABET = 1000
_MIN_FREQUENCY = 2


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model, and how text is cut into them.

    Attributes:
        tokens: in the order of their ids; `[PAD]` is 0.
        lowercase: whether text is lower-cased and stripped of accents first, as for the uncased BERT models.
    """

    tokens: tuple[str, ...]
    lowercase: bool = True

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def load(cls, path: str | Path, *, lowercase: bool = True) -> Vocabulary:
        """Reads a BERT `vocab.txt`: a token a line, the line's number (from 0) being its id.

        Raises:
            DataError: the file is missing or not UTF-8; a line is empty or repeats a token; one of `SPECIAL_TOKENS`
                is missing; `[PAD]` is not the first; or there are no others.
        """
        path = Path(path)
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except FileNotFoundError as error:
            raise DataError(f"vocabulary {path} does not exist") from error
        except UnicodeDecodeError as error:
            raise DataError(f"vocabulary {path} is not UTF-8 at byte offset {error.start:,}") from error
        if lines[-1] == "":
            lines.pop()
        _check(path, lines)
        return cls(tuple(lines), lowercase)

    @classmethod
    def train(
        cls, read: Callable[[], Iterable[list[str]]], *, size: int = 30_522, lowercase: bool = True
    ) -> Vocabulary:
        """Trains a WordPiece vocabulary, the same for the same text and settings on any number of threads.

        Pieces are merged as in byte-pair encoding, the most frequent pair first, until there are `size` tokens or no
        pair is left that occurs twice. The alphabet is the most frequent characters, at most 1,000 and at most a
        quarter of `size`.

        Args:
            read: gives the documents, as lists of sentences; called twice.
            size: most tokens that the vocabulary may have. The default is that of the published uncased vocabulary.
            lowercase: see the class.

        Raises:
            DataError: the text has nothing but white space and control characters.
        """
        tokenizer = _tokenizer(models.WordPiece(unk_token=UNK), lowercase)
        alphabet = _alphabet(tokenizer, read(), min(_MAX_ALPHABET, size // 4))
        if not alphabet:
            raise DataError("the corpus is empty: its text has no characters to train a vocabulary on")
        # The trainer numbers the pieces of one character in the order of a randomised hash map, and breaks ties
        # between pairs by those numbers. As special tokens, the pieces are numbered in the order given.
        inner = [f"##{character}" for character in alphabet if not _stands_alone(tokenizer, character)]
        trainer = trainers.WordPieceTrainer(
            vocab_size=size,
            min_frequency=_MIN_FREQUENCY,
            special_tokens=[*SPECIAL_TOKENS, *alphabet, *inner],
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
            show_progress=False,
        )
        tokenizer.train_from_iterator(read(), trainer)
        ids = tokenizer.get_vocab(with_added_tokens=False)
        return cls(tuple(sorted(ids, key=ids.__getitem__)), lowercase)

    def save(self, path: Path) -> None:
        """Writes a BERT `vocab.txt`."""
        path.write_bytes(self._text)

    @property
    def sha256(self) -> str:
        """The hash, in hex, of the `vocab.txt` that `save` writes."""
        return hashlib.sha256(self._text).hexdigest()

    @cached_property
    def words(self) -> npt.NDArray[np.int32]:
        """The ids of the tokens that occur in text: all but the special and the `[unusedN]` ones."""
        return np.asarray([i for i, token in enumerate(self.tokens) if not _is_special(token)], dtype=np.int32)

    def id(self, token: str) -> int:
        """Returns a token's id."""
        return self._ids[token]

    def encode(self, sentences: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each sentence, without `[CLS]` and `[SEP]`; `[MASK]` in the text is plain text."""
        encodings = self._tokenizer.encode_batch_fast(list(sentences), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns tokens as readable text: pieces of a word joined, words separated by a blank."""
        return " ".join(self.tokens[i] for i in ids).replace(" ##", "")

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return _tokenizer(models.WordPiece(self._ids, unk_token=UNK), self.lowercase)

    @property
    def _text(self) -> bytes:
        return "".join(f"{token}\n" for token in self.tokens).encode()


def _tokenizer(model: models.WordPiece, lowercase: bool) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def _alphabet(tokenizer: Tokenizer, documents: Iterable[list[str]], limit: int) -> list[str]:
    counts: Counter[str] = Counter()
    for sentences in documents:
        counts.update(tokenizer.normalizer.normalize_str("\n".join(sentences)))
    characters = [character for character in counts if not character.isspace()]
    return sorted(sorted(characters, key=lambda character: (-counts[character], character))[:limit])


def _stands_alone(tokenizer: Tokenizer, character: str) -> bool:
    """Tells whether a character is always a word of its own, as punctuation and Chinese characters are."""
    text = tokenizer.normalizer.normalize_str(f"a{character}a")
    return len(tokenizer.pre_tokenizer.pre_tokenize_str(text)) > 1


def _is_special(token: str) -> bool:
    return token in SPECIAL_TOKENS or (token.startswith("[unused") and token.endswith("]"))


def _check(path: Path, lines: list[str]) -> None:
    first_lines: dict[str, int] = {}
    for number, token in enumerate(lines, start=1):
        if not token:
            raise DataError(f"vocabulary {path}: line {number:,} is empty: remove it")
        if token in first_lines:
            raise DataError(
                f"vocabulary {path}: line {number:,} repeats the token {token!r} of line {first_lines[token]:,}: "
                "each token must stand once"
            )
        first_lines[token] = number
    missing = [token for token in SPECIAL_TOKENS if token not in first_lines]
    if missing:
        raise DataError(f"vocabulary {path} lacks {', '.join(missing)}: is it a BERT vocab.txt, one token a line?")
    if lines[0] != PAD:
        raise DataError(
            f"vocabulary {path}: {PAD} is in line {first_lines[PAD]:,} but must be in line 1, because shards are "
            "padded with 0"
        )
    if all(map(_is_special, lines)):
        raise DataError(f"vocabulary {path} has no words, only special tokens: is it whole?")
