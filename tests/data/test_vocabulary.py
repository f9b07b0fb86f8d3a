import hashlib
import os
import subprocess
import sys

import pytest
from transformers import BertTokenizer

from trn_dist.data.vocabulary import SPECIAL_TOKENS, Vocabulary
from trn_dist.errors import DataError

WORDS = [*SPECIAL_TOKENS, "[unused0]", "un", "##aff", "##able", "the", "cafe", "!", "[", "]", "mask", "The", "Café"]

TRAIN = """
from trn_dist.data.vocabulary import Vocabulary
rows = [[f"Word{chr(97 + i % 7)}{chr(98 + i % 11)} of {chr(1040 + i % 64)}x 東{i % 13}!" for i in range(400)]]
print(Vocabulary.train(lambda: rows, size=220).sha256)
"""


@pytest.fixture
def vocab(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("".join(f"{word}\n" for word in WORDS), encoding="utf-8")
    return path


def test_load_and_save(vocab, tmp_path):
    vocabulary = Vocabulary.load(vocab)
    assert vocabulary.tokens == tuple(WORDS)
    assert len(vocabulary) == len(WORDS)
    assert vocabulary.id("un") == 6
    assert vocabulary.sha256 == hashlib.sha256(vocab.read_bytes()).hexdigest()
    vocabulary.save(tmp_path / "again.txt")
    assert (tmp_path / "again.txt").read_bytes() == vocab.read_bytes()


def test_line_ends_of_other_systems_and_a_missing_last_one(vocab):
    vocab.write_bytes("\r\n".join(WORDS).encode())
    assert Vocabulary.load(vocab).tokens == tuple(WORDS)


def test_words_are_neither_special_nor_unused(vocab):
    assert Vocabulary.load(vocab).words.tolist() == list(range(6, len(WORDS)))


def test_encoding_by_hand(vocab):
    lower, cased = Vocabulary.load(vocab), Vocabulary.load(vocab, lowercase=False)
    assert lower.encode(["UNAFFABLE the Café!", "", "xyz"]) == [[6, 7, 8, 9, 10, 11], [], [1]]
    assert cased.encode(["The Café!"]) == [[15, 16, 11]]
    assert lower.decode([6, 7, 8, 9, 11]) == "unaffable the !"


def test_special_tokens_in_text_are_text(vocab):
    ids = [WORDS.index(word) for word in ("[", "mask", "]")]
    assert Vocabulary.load(vocab).encode(["[MASK]"]) == [ids]


@pytest.mark.parametrize("lowercase", [True, False])
def test_encoding_is_that_of_the_bert_tokenizer(lowercase, tmp_path):
    sentences = [
        "The naïve café, re-opened in 1998; it's “GOOD”!",
        "東京 and 京都 are far\u00a0apart\u200b. \x00Tabs\tand a word" + "x" * 120,
        "unaffable(un) -- UN'AFF",
    ]
    vocabulary = Vocabulary.train(lambda: [sentences], size=150, lowercase=lowercase)
    vocabulary.save(tmp_path / "vocab.txt")
    theirs = BertTokenizer(str(tmp_path / "vocab.txt"), do_lower_case=lowercase)
    assert vocabulary.encode(sentences) == [theirs.encode(text, add_special_tokens=False) for text in sentences]


def test_trained_vocabulary_merges_what_is_frequent():
    vocabulary = Vocabulary.train(lambda: [["low low low lower lowest", "東京! low"]], size=100)
    assert vocabulary.tokens[:5] == SPECIAL_TOKENS
    assert {"low", "東", "京", "!", "##w"} <= set(vocabulary.tokens)
    assert not {"##東", "##!"} & set(vocabulary.tokens)  # these characters are always words of their own
    assert "lowest" not in vocabulary.tokens  # `##st` occurs once
    assert vocabulary.encode(["low"]) == [[vocabulary.id("low")]]


def test_trained_vocabulary_has_the_size_asked_for():
    sentences = [f"word{chr(97 + i)}{chr(97 + j)} {chr(0x400 + i)}" for i in range(26) for j in range(26)] * 2
    assert len(Vocabulary.train(lambda: [sentences], size=120)) == 120


@pytest.mark.slow
def test_training_is_deterministic_over_processes_and_threads():
    hashes = set()
    for seed, threads in (("0", "1"), ("1", "3"), ("2", "2")):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads}
        hashes.add(
            subprocess.run([sys.executable, "-c", TRAIN], env=environment, capture_output=True, check=True).stdout
        )
    assert len(hashes) == 1


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([w for w in WORDS if w != "[MASK]"], r"vocab\.txt lacks \[MASK\]: is it a BERT vocab\.txt"),
        (WORDS[5:], r"lacks \[PAD\], \[UNK\], \[CLS\], \[SEP\], \[MASK\]"),
        ([*WORDS, "un"], r"vocab\.txt: line 18 repeats the token 'un' of line 7"),
        ([*WORDS[:6], "", *WORDS[6:]], r"vocab\.txt: line 7 is empty"),
        ([*WORDS[1:], "[PAD]"], r"vocab\.txt: \[PAD\] is in line 17 but must be in line 1"),
        (WORDS[:6], r"vocab\.txt has no words, only special tokens"),
        ([], r"lacks \[PAD\]"),
    ],
)
def test_bad_vocabularies(vocab, lines, message):
    vocab.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    with pytest.raises(DataError, match=message):
        Vocabulary.load(vocab)


def test_missing_and_undecodable_vocabularies(vocab, tmp_path):
    with pytest.raises(DataError, match="missing does not exist"):
        Vocabulary.load(tmp_path / "missing")
    vocab.write_bytes(b"[PAD]\n\xff")
    with pytest.raises(DataError, match=r"vocab\.txt is not UTF-8 at byte offset 6"):
        Vocabulary.load(vocab)
