"""Text files to documents, and documents to sentences."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal, cast

from trn_dist.errors import DataError

TextFormat = Literal["blank-line", "line"]

_SUFFIXES = (".txt", ".txt.gz")
_GZIP_MAGIC = b"\x1f\x8b"  # RFC 1952, section 2.3.1

_CLOSING = "\"'”’»)\\]」』）"  # noqa: RUF001 - these quotes and brackets are meant
_OPENING = "\"'“‘«(["  # noqa: RUF001
_BOUNDARY = re.compile(rf"(?P<mark>[.!?…]+)[{_CLOSING}]*\s+|[。！？]+[{_CLOSING}]*\s*")  # noqa: RUF001
_INITIALS = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]")  # J (in "J. Smith"), e.g, U.S
_ABBREVIATIONS = {
    *("approx", "cf", "dr", "eq", "fig", "figs", "gen", "jr", "mr", "mrs"),
    *("ms", "mt", "pp", "prof", "rev", "sr", "st", "vol", "vs"),
}


def read_documents(inputs: Iterable[str | Path], text_format: TextFormat = "blank-line") -> Iterator[list[str]]:
    """Yields the documents of text files, one at a time: memory holds one document.

    Args:
        inputs: files, read whatever their names, and directories, whose `*.txt` and `*.txt.gz` files are read in the
            order of their paths, at any depth. Files that begin as gzip does are decompressed.
        text_format: `blank-line`: documents are separated by blank lines, and a line is a sentence or a paragraph.
            `line`: each line is a document. The end of a file ends a document.

    Yields:
        The sentences of a document, at least one, as `split_sentences` cuts the lines.

    Raises:
        DataError: an input is missing, a directory has no text files, a file is not UTF-8 or is damaged gzip, or no
            file has any text.
    """
    files = find_files(inputs)
    empty = True
    for path in files:
        for document in _file_documents(path, text_format):
            empty = False
            yield document
    if empty:
        raise DataError(f"the corpus is empty: no text in {', '.join(map(str, files))}: give files with text")


def find_files(inputs: Iterable[str | Path]) -> list[Path]:
    """Lists the text files that inputs stand for, in reading order.

    Raises:
        DataError: an input is missing, or a directory has no text files.
    """
    files: list[Path] = []
    for path in map(Path, inputs):
        if path.is_dir():
            found = sorted(file for file in path.rglob("*") if file.name.endswith(_SUFFIXES) and file.is_file())
            if not found:
                raise DataError(f"{path} holds no *.txt or *.txt.gz files: name the files themselves, or rename them")
            files += found
        elif path.exists():
            files.append(path)
        else:
            raise DataError(f"input {path} does not exist")
    return files


def split_sentences(text: str) -> list[str]:
    """Cuts a line of text into sentences.

    A sentence ends at `.`, `!`, `?` or `…`, with any closing quotes and brackets, before white space, unless the next
    letter is lower-case, or the mark is the single full stop of an initial (`J. Smith`, `e.g.`, `U.S.`) or of a common
    English abbreviation (`Dr.`, `vs.`). The full-width marks of Chinese and Japanese end a sentence with or without
    white space. A wrong cut does no harm beyond a segment that begins in the middle of a sentence.

    Returns:
        The sentences without surrounding white space; none for a blank line.
    """
    sentences, start = [], 0
    for boundary in _BOUNDARY.finditer(text):
        if _ends_sentence(text, start, boundary):
            sentences.append(text[start : boundary.end()].strip())
            start = boundary.end()
    if rest := text[start:].strip():
        sentences.append(rest)
    return [sentence for sentence in sentences if sentence]


def _ends_sentence(text: str, start: int, boundary: re.Match[str]) -> bool:
    following = text[boundary.end() : boundary.end() + 4].lstrip(_OPENING)
    if following[:1].islower():
        return False
    if boundary["mark"] != ".":
        return True
    word = text[text.rfind(" ", start, boundary.start()) + 1 : boundary.start()].lstrip(_OPENING)
    return not (_INITIALS.fullmatch(word) or word.lower() in _ABBREVIATIONS)


def _file_documents(path: Path, text_format: TextFormat) -> Iterator[list[str]]:
    document: list[str] = []
    for line in _lines(path):
        sentences = split_sentences(line)
        if document and (text_format == "line" or not sentences):
            yield document
            document = []
        document += sentences
    if document:
        yield document


def _lines(path: Path) -> Iterator[str]:
    """Yields the lines of a UTF-8 file; the bytes of a newline occur in no other character, so lines decode alone."""
    offset = 0
    with _opened(path) as (file, where):
        for line in file:
            try:
                yield line.decode("utf-8-sig" if offset == 0 else "utf-8")
            except UnicodeDecodeError as error:
                # The signature's decoder counts from behind the signature.
                at = offset + error.start + (len(line) - len(error.object))
                raise DataError(
                    f"{path} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {at:,}{where}: "
                    "convert it, for example with iconv"
                ) from error
            offset += len(line)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], str]]:
    """Opens a file, decompressed if need be, and says which stream its offsets count in."""
    with path.open("rb") as raw:
        if raw.read(2) != _GZIP_MAGIC:
            raw.seek(0)
            yield raw, ""
            return
        raw.seek(0)
        try:
            with gzip.open(raw) as file:
                yield cast(IO[bytes], file), " of the decompressed text"
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{path} is damaged gzip ({error}): copy or compress it again") from error
