import importlib
import os
import random
import string
import subprocess
import sys
from pathlib import Path

import pytest

from distlion_lab.errors import DataError
from distlion_lab.tasks import corpus
from distlion_lab.tasks.corpus import load_corpus


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    """The library with its cache in the test's folder and its network switched off."""
    module = importlib.import_module("datasets")
    monkeypatch.setattr(module.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(module.config, "HF_HUB_OFFLINE", True)
    return module


def test_embedded_corpus_is_prose_and_says_nothing_twice():
    corpus = load_corpus(None)
    lines = (corpus.train + corpus.heldout).decode().splitlines()
    assert 200_000 < sum(map(len, lines)) < 1_000_000
    assert len(set(lines)) == len(lines)
    assert all(line[0].isupper() and line[-1] in ".:" for line in lines)
    assert set("".join(lines)) <= set(string.ascii_letters + " ,.:;()'\"-")


def test_embedded_corpus_holds_out_whole_files():
    corpus = load_corpus(None)
    first_heldout_lines = corpus.heldout[:400]
    assert first_heldout_lines not in corpus.train


def test_file_holds_out_its_last_part_from_a_line_end(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"a line of text\n" * 100)
    corpus = load_corpus(str(path))
    assert corpus.train + corpus.heldout == path.read_bytes()
    assert corpus.train.endswith(b"\n")


def make_books(folder, count):
    folder.mkdir()
    for number in reversed(range(count)):
        (folder / f"{number:02d}.txt").write_text(f"book {number:02d};")
    return str(folder)


def test_folder_is_read_in_the_order_of_its_names_and_its_20th_book_is_held_out(tmp_path):
    corpus = load_corpus(make_books(tmp_path / "books", 45))
    kept = [number for number in range(45) if number not in (19, 39)]
    assert corpus.train.decode() == "".join(f"book {number:02d};" for number in kept)
    assert corpus.heldout.decode() == "book 19;book 39;"


def test_last_book_of_a_small_folder_is_held_out(tmp_path):
    corpus = load_corpus(make_books(tmp_path / "books", 3))
    assert corpus.train == b"book 00;book 01;"
    assert corpus.heldout == b"book 02;"


def test_folder_takes_text_files_only(tmp_path):
    folder = make_books(tmp_path / "books", 2)
    (tmp_path / "books" / "00-readme.md").write_text("no book")
    (tmp_path / "books" / "00-more.txt").mkdir()
    assert load_corpus(folder).train == b"book 00;"


@pytest.mark.parametrize("count", [0, 1])
def test_folder_without_a_book_to_hold_out_is_refused(tmp_path, count):
    with pytest.raises(DataError, match=f"two or more files .* found {count}"):
        load_corpus(make_books(tmp_path / "books", count))


def test_lengths_of_books_add_up_to_the_training_part(tmp_path):
    corpus = load_corpus(None)
    assert len(corpus.book_bytes) > 100
    assert sum(corpus.book_bytes) == len(corpus.train)


def test_file_is_one_book(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"a line of text\n" * 100)
    corpus = load_corpus(str(path))
    assert corpus.book_bytes == (len(corpus.train),)


@pytest.mark.parametrize("end", ["", "\n"])
@pytest.mark.parametrize("long", ["x" * 1_075_000, "word " * 215_000, "\u00e9\u6f22" * 200_000])
def test_text_with_a_very_long_last_line_is_split_by_its_share(tmp_path, long, end):
    path = tmp_path / "text.txt"
    text = ("a line of text\n" * 150 + long + end).encode()
    path.write_bytes(text)
    corpus = load_corpus(str(path))
    assert corpus.train + corpus.heldout == text
    assert 0.05 <= len(corpus.heldout) / len(text) <= 0.1
    # No character is cut, and no word if there is one.
    corpus.heldout.decode()
    assert not long.startswith("word ") or corpus.train.endswith(b" ")


def test_text_whose_validation_part_is_the_longer_one_is_refused_with_both_sizes(tmp_path):
    (tmp_path / "0.txt").write_text("a short book\n" * 10)
    (tmp_path / "1.txt").write_text("a book of some length\n" * 1000)
    with pytest.raises(DataError, match="130 bytes to train on, and 22,000 to validate"):
        load_corpus(str(tmp_path))


def test_pipe_is_refused_without_waiting_for_a_writer(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match=r"pipe' cannot be read .it is a pipe or a device"):
        load_corpus(str(tmp_path / "pipe"))


def test_device_is_refused():
    with pytest.raises(DataError, match="it is a pipe or a device"):
        load_corpus("/dev/zero")


def test_sparse_file_beyond_the_limit_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "sparse.txt"
    path.touch()
    os.truncate(path, 100 << 30)
    with pytest.raises(DataError, match="it has more than 1,073,741,824 bytes"):
        load_corpus(str(path))


def test_books_of_a_folder_share_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("distlion_lab.tasks.corpus.FILE_BYTES", 20)
    with pytest.raises(DataError, match=r"02.txt' cannot be read .it has more than 4 bytes"):
        load_corpus(make_books(tmp_path / "books", 3))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
@pytest.mark.parametrize("text", ["plain words\n", "\u6f22\u5b57\n", "\u00e9t\u00e9\n"])
def test_text_in_another_encoding_is_refused(tmp_path, encoding, text):
    path = tmp_path / "text.txt"
    path.write_bytes((text * 100).encode(encoding))
    with pytest.raises(DataError, match=r"is no UTF-8 text: it has byte 0x.. near position"):
        load_corpus(str(path))


def test_random_bytes_are_refused(tmp_path):
    (tmp_path / "noise").write_bytes(random.Random(0).randbytes(10_000))
    with pytest.raises(DataError, match="is no UTF-8 text"):
        load_corpus(str(tmp_path / "noise"))


@pytest.mark.parametrize(("tail", "at"), [(b"\x80\xff", 5), (b"a", 1)])
def test_a_wrong_byte_behind_a_character_cut_by_a_chunk_is_named(tmp_path, monkeypatch, tail, at):
    monkeypatch.setattr(corpus, "_CHUNK_BYTES", 4)
    (tmp_path / "text.txt").write_bytes(b"a\xf0\x9f\x98" + tail)
    with pytest.raises(DataError, match=f"position {at};"):
        load_corpus(str(tmp_path / "text.txt"))


def test_text_that_ends_within_a_character_is_read(tmp_path):
    """As the first 10^8 bytes of a larger text do."""
    (tmp_path / "text.txt").write_bytes(("a line\n" * 100 + "\u6f22").encode()[:-1])
    assert load_corpus(str(tmp_path / "text.txt")).heldout.endswith(b"\xe6\xbc")


def test_no_path_is_refused():
    with pytest.raises(DataError, match="text data '' is no path; expected the path of a text"):
        load_corpus("")


def test_text_in_place_of_its_path_is_one_short_line():
    with pytest.raises(
        DataError, match=r"To be, or not.* cannot be read .File name too long"
    ) as info:
        load_corpus("To be, or not to be, that is the question. " * 200)
    assert len(str(info.value)) < 400


def test_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"no_such\.txt"):
        load_corpus(str(tmp_path / "no_such.txt"))


def test_empty_file_is_refused(tmp_path):
    path = tmp_path / "empty.txt"
    path.write_bytes(b"")
    with pytest.raises(DataError, match="empty"):
        load_corpus(str(path))


def test_hub_data_set_that_was_saved_to_disk_keeps_its_test_split(tmp_path, datasets):
    parts = {
        name: datasets.Dataset.from_dict({"text": [f"{name} one", f"{name} two"]})
        for name in ("train", "test")
    }
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    corpus = load_corpus(f"hf:{tmp_path / 'saved'}")
    assert corpus.train == b"train one\ntrain two"
    assert corpus.heldout == b"test one\ntest two"


def test_hub_folder_of_text_files_is_split_at_a_line(tmp_path, datasets):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "train.txt").write_text("word\n" * 100)
    corpus = load_corpus(f"hf:{folder}")
    assert corpus.train.count(b"word") + corpus.heldout.count(b"word") == 100


def test_hub_data_set_with_one_column_of_strings_needs_no_column_named_text(tmp_path, datasets):
    rows = datasets.Dataset.from_dict({"content": ["abc\n"] * 50, "number": [1] * 50})
    rows.save_to_disk(str(tmp_path / "saved"))
    assert load_corpus(f"hf:{tmp_path / 'saved'}").train.startswith(b"abc")


def test_hub_data_set_without_a_clear_text_column_is_refused(tmp_path, datasets):
    datasets.Dataset.from_dict({"a": ["x"], "b": ["y"]}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DataError, match="column 'text'"):
        load_corpus(f"hf:{tmp_path / 'saved'}")


def test_hub_data_set_that_does_not_exist_is_a_data_error(tmp_path, datasets):
    with pytest.raises(DataError, match="hf:nobody/nothing"):
        load_corpus("hf:nobody/nothing")


def test_datasets_is_imported_only_when_asked_for():
    code = (
        "import sys; from distlion_lab.tasks.corpus import load_corpus; load_corpus(None); "
        "sys.exit('datasets' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_source_of_a_file_is_its_path(tmp_path):
    path = Path(tmp_path / "text.txt")
    path.write_text("some words\n" * 10)
    assert load_corpus(str(path)).source == str(path)


def test_hub_that_fails_in_any_way_is_one_line(monkeypatch):
    class TransportError(Exception):
        """Such as those of httpx, which derive from no error of the operating system."""

    def fail(*args):
        raise TransportError("no route\nto the hub")

    monkeypatch.setattr("datasets.load_dataset", fail)
    with pytest.raises(DataError, match="hf:some/data cannot be opened: no route to the hub"):
        load_corpus("hf:some/data")
