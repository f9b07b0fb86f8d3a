"""Writes the demo's corpus: the English prose that comes with every Python, as documents separated by blank lines.

    python examples/bert_phase1/corpus.py OUT.txt

It takes the language reference in `pydoc_data.topics` (a document a topic) and the docstrings of the standard
library (a document a module), which are parsed from the source files and never imported. Code, tables and signatures
are left out. The same Python gives the same file.
"""

import argparse
import ast
import inspect
import pydoc_data.topics
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

# Tests and tools whose docstrings are not prose, and what is not part of the library.
SKIPPED = {"test", "tests", "idlelib", "lib2to3", "pydoc_data", "site-packages", "dist-packages", "__pycache__"}

MIN_WORDS = 5
MIN_DOCUMENT_WORDS = 20
MIN_LETTERS = 0.9  # of the characters of a paragraph that are not blank
MIN_PLAIN_WORDS = 0.75  # of its words

ROLE = re.compile(r":[a-z:]+:`~?([^`<]+?)(?: <[^>]*>)?`")
QUOTED = re.compile(r"``?([^`]+)``?_{0,2}|\*\*?([^*\s](?:[^*]*[^*\s])?)\*\*?")
EMPTY_CALL = re.compile(r"(?<=\w)\(\)")  # "calls close() first" is prose
BULLET = re.compile(r"(?:[-*+•]|\(?[0-9a-z][.)])\s+")
NOT_PROSE = re.compile(r">>>|\.\.\.\s|[|+$%@#\\=~^]|[-=*_]{3,}|::=|->|\w\(|\)\s*:$|https?:")
PLAIN_WORD = re.compile(r"[(\"']*[A-Za-z]+(?:[-'’][A-Za-z]+)*[)\"']*[.,;:!?]*[)\"']*")  # noqa: RUF001


def topics() -> Iterator[str]:
    """Yields the texts of the language reference."""
    for _, text in sorted(pydoc_data.topics.topics.items()):
        yield text


def module_docstrings(library: Path) -> Iterator[str]:
    """Yields, for each module of a library, its docstrings in the order of the source."""
    for path in sorted(library.rglob("*.py")):
        if not SKIPPED.isdisjoint(path.relative_to(library).parts):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in others' source
            tree = ast.parse(path.read_bytes())
        documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
        nodes.sort(key=lambda node: getattr(node, "lineno", 0))
        yield "\n\n".join(filter(None, map(ast.get_docstring, nodes)))


def paragraphs(text: str) -> Iterator[str]:
    """Yields the paragraphs of prose in a text, each in one line and without markup."""
    for block in filter(str.strip, re.split(r"\n\s*\n", text.expandtabs())):
        lines = inspect.cleandoc(block).splitlines()
        # A list without blank lines between its items is one paragraph an item.
        starts = [i for i, line in enumerate(lines) if i == 0 or BULLET.match(line)]
        for start, stop in zip(starts, [*starts[1:], len(lines)], strict=True):
            paragraph = " ".join(line.strip() for line in lines[start:stop])
            paragraph = BULLET.sub("", paragraph, count=1) if BULLET.match(paragraph) else paragraph
            paragraph = ROLE.sub(r"\1", paragraph)
            paragraph = QUOTED.sub(lambda found: found[1] or found[2], paragraph)
            paragraph = EMPTY_CALL.sub("", paragraph.replace("::", ":"))
            paragraph = re.sub(r"\s+", " ", paragraph).strip()
            if is_prose(paragraph):
                yield paragraph


def is_prose(paragraph: str) -> bool:
    """Tells whether a paragraph is made of English sentences, not of code, a table or a signature."""
    words = paragraph.split()
    letters = sum(character.isalpha() for character in paragraph)
    return (
        len(words) >= MIN_WORDS
        and paragraph[0].isalpha()
        and paragraph.rstrip("\"')")[-1] in ".!?:"
        and not NOT_PROSE.search(paragraph)
        and letters >= MIN_LETTERS * sum(map(len, words))
        and sum(PLAIN_WORD.fullmatch(word) is not None for word in words) >= MIN_PLAIN_WORDS * len(words)
    )


def documents() -> Iterator[list[str]]:
    """Yields the documents of the corpus as lists of paragraphs; a paragraph that occurs twice is kept once."""
    seen: set[str] = set()
    library = Path(sysconfig.get_path("stdlib"))
    for source in (topics(), module_docstrings(library)):
        for text in source:
            document = [p for p in dict.fromkeys(paragraphs(text)) if p not in seen]
            seen.update(document)
            if sum(len(paragraph.split()) for paragraph in document) >= MIN_DOCUMENT_WORDS:
                yield document


def main() -> int:
    """Writes the corpus and prints its size."""
    parser = argparse.ArgumentParser(description="Write the English prose that comes with Python as a corpus.")
    parser.add_argument("out", type=Path, metavar="OUT.txt", help="file to write")
    out: Path = parser.parse_args().out
    corpus = ["\n".join(document) for document in documents()]
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial")
    partial.write_text("\n\n".join(corpus) + "\n", encoding="utf-8")
    partial.replace(out)
    print(f"{out}: {len(corpus):,} documents, {sum(len(document.split()) for document in corpus):,} words")
    return 0


if __name__ == "__main__":
    sys.exit(main())
