import gzip

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trn_dist.data.text import find_files, read_documents, split_sentences
from trn_dist.errors import DataError


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("", []),
        ("  \t ", []),
        ("One sentence", ["One sentence"]),
        ("It ran. It stopped!  Did it? Yes…", ["It ran.", "It stopped!", "Did it?", "Yes…"]),
        ('He said "Stop." Then he left.', ['He said "Stop."', "Then he left."]),
        ("(It ran.) It stopped.", ["(It ran.)", "It stopped."]),
        ("It took 3.5 seconds. 4 were left.", ["It took 3.5 seconds.", "4 were left."]),
        ("Use a list, e.g. A or this. See Fig. 3 by Dr. J. R. Smith of the U.S. Army.",
         ["Use a list, e.g. A or this.", "See Fig. 3 by Dr. J. R. Smith of the U.S. Army."]),
        ("Is it J.? Yes.", ["Is it J.?", "Yes."]),
        ("It ran... and then it stopped.", ["It ran... and then it stopped."]),
        ("It ran! “Did it?” It did.", ["It ran!", "“Did it?”", "It did."]),
        ("今日は。元気？はい！", ["今日は。", "元気？", "はい！"]),  # noqa: RUF001
        ("...", ["..."]),
    ],
)  # fmt: skip
def test_sentences(text, sentences):
    assert split_sentences(text) == sentences


@settings(deadline=None)
@given(st.text(alphabet="aB1 .!?\"')。\t…", max_size=60))
def test_sentences_lose_nothing_but_white_space(text):
    sentences = split_sentences(text)
    assert "".join("".join(sentences).split()) == "".join(text.split())
    assert all(sentence == sentence.strip() != "" for sentence in sentences)


def test_blank_lines_separate_documents(tmp_path):
    path = tmp_path / "corpus"
    path.write_bytes(b"\n\nOne. Two.\r\nThree.\n \t\n\nFour.\n")
    assert list(read_documents([path])) == [["One.", "Two.", "Three."], ["Four."]]


def test_a_document_a_line(tmp_path):
    path = tmp_path / "corpus"
    path.write_text("One. Two.\n\nThree.\nFour.")
    assert list(read_documents([str(path)], "line")) == [["One.", "Two."], ["Three."], ["Four."]]


@settings(deadline=None)
@given(documents=st.lists(st.lists(st.sampled_from(["One.", "Two words.", "É。"]), min_size=1), min_size=1))
@pytest.mark.parametrize("text_format", ["blank-line", "line"])
def test_documents_round_trip(tmp_path_factory, text_format, documents):
    path = tmp_path_factory.mktemp("round") / "corpus"
    line, end = ("\n", "\n\n") if text_format == "blank-line" else (" ", "\n")
    path.write_text(end.join(line.join(document) for document in documents), encoding="utf-8")
    assert list(read_documents([path], text_format)) == documents


def test_directories_are_read_in_the_order_of_paths_and_files_end_documents(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "deep.txt").write_text("Deep.")
    (tmp_path / "a.txt").write_text("A.")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"C."))
    (tmp_path / "notes.md").write_text("Not this.")
    assert list(read_documents([tmp_path])) == [["A."], ["Deep."], ["C."]]
    assert find_files([tmp_path / "notes.md", tmp_path / "b"]) == [tmp_path / "notes.md", tmp_path / "b" / "deep.txt"]


def test_gzip_is_known_by_its_content(tmp_path):
    (tmp_path / "compressed.txt").write_bytes(gzip.compress(b"One.\n") + gzip.compress(b"Two.\n"))
    (tmp_path / "plain.txt.gz").write_text("Three.")
    assert list(read_documents([tmp_path])) == [["One.", "Two."], ["Three."]]


def test_signature_of_utf8_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfOne.\n")
    assert list(read_documents([tmp_path])) == [["One."]]


@pytest.mark.parametrize(
    ("content", "byte", "offset"),
    [
        (b"One.\nT\xe9o.\n", "e9", 6),
        (b"\xff\xfeO\x00", "ff", 0),
        (b"\xef\xbb\xbfO\xc3", "c3", 4),  # after a signature, and cut off
        (b"\xc3\xa9\n" * 2000 + b"\x80", "80", 6000),
    ],
)
@pytest.mark.parametrize("compressed", [False, True])
def test_bad_utf8_names_file_and_offset(tmp_path, content, byte, offset, compressed):
    path = tmp_path / "bad.txt"
    path.write_bytes(gzip.compress(content) if compressed else content)
    where = " of the decompressed text" if compressed else ""
    with pytest.raises(DataError, match=rf"bad\.txt is not UTF-8: byte 0x{byte} at offset {offset:,}{where}: convert"):
        list(read_documents([path]))


def test_damaged_gzip(tmp_path):
    content = gzip.compress(b"".join(b"Line %d.\n" % i for i in range(1000)))
    path = tmp_path / "bad.gz"
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 0xFF
    for damaged in (content[:-20], content[: len(content) // 2], bytes(flipped), content + b"trailing"):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"bad\.gz (is damaged gzip .*copy or compress it again|is not UTF-8)"):
            list(read_documents([path]))


def test_inputs_without_text(tmp_path):
    with pytest.raises(DataError, match="missing does not exist"):
        list(read_documents([tmp_path / "missing"]))
    with pytest.raises(DataError, match=r"holds no \*\.txt or \*\.txt\.gz files: name the files"):
        list(read_documents([tmp_path]))
    (tmp_path / "blank.txt").write_text("\n \n")
    with pytest.raises(DataError, match=r"the corpus is empty: no text in .*blank\.txt"):
        list(read_documents([tmp_path]))
