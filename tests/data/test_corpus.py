import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "examples" / "bert_phase1" / "corpus.py"


@pytest.fixture(scope="module")
def corpus():
    spec = importlib.util.spec_from_file_location("bert_phase1_corpus", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "paragraphs"),
    [
        ("Return a new list that\nholds   the items.", ["Return a new list that holds the items."]),
        ("One line of prose is here.\n\n    And an indented one is too.",
         ["One line of prose is here.", "And an indented one is too."]),
        ("- The first item of a list.\n- The second item\n  of a list.",
         ["The first item of a list.", "The second item of a list."]),
        ("Call :func:`open` or ``close()`` on *the* file::", ["Call open or close on the file:"]),
        ("It calls close() before it returns to the caller.", ["It calls close before it returns to the caller."]),
        (">>> Some example of it is here.", []),
        ("f(x, y) returns the sum of both of them.", []),
        ("Name   Kind   Default   Of The   Table", []),
        ("x = y + z is not an English sentence.", []),
        ("Too few words.", []),
        ("1 2 3 4 5 6 7 8 9 are numbers.", []),
        ("", []),
    ],
)  # fmt: skip
def test_paragraphs(corpus, text, paragraphs):
    assert list(corpus.paragraphs(text)) == paragraphs


def test_docstrings_of_a_library_are_parsed_and_not_imported(corpus, tmp_path):
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "skipped.py").write_text('"""A test."""')
    (tmp_path / "b.py").write_text(
        '"""Module."""\nraise SystemExit\nclass C:\n    "Class."\n    async def f(self):\n        "Method."\n'
        'def g():\n    "Function."\n    "\\d"\n'
    )
    (tmp_path / "a.py").write_text("x = 1\n")
    assert list(corpus.module_docstrings(tmp_path)) == ["", "Module.\n\nClass.\n\nMethod.\n\nFunction."]


def write_corpus(out, hash_seed):
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.run([sys.executable, PATH, out], env=environment, capture_output=True, text=True, check=True)


def test_the_corpus_is_much_prose_and_the_same_in_every_process(tmp_path):
    one, two = tmp_path / "new" / "one.txt", tmp_path / "new" / "two.txt"
    printed = write_corpus(one, "7").stdout
    write_corpus(two, "8")
    text = one.read_text(encoding="utf-8")
    assert text == two.read_text(encoding="utf-8")
    assert sorted(path.name for path in one.parent.iterdir()) == ["one.txt", "two.txt"]
    documents = text.split("\n\n")
    assert printed == f"{one}: {len(documents):,} documents, {len(text.split()):,} words\n"
    assert len(documents) > 200
    assert len(text.split()) > 100_000
    assert ">>>" not in text
    paragraphs = [line for line in text.splitlines() if line]
    assert len(set(paragraphs)) == len(paragraphs)
