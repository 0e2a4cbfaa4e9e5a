"""Readers of other packages: text and tokens, the same for any number of processes, refused by file where they fail."""

import sys
from importlib.metadata import EntryPoint, EntryPoints

import numpy as np
import pytest

from lengthwise.core import plugins
from lengthwise.core.errors import InputError
from lengthwise.index.build import build_index
from lengthwise.index.settings import IndexSettings
from lengthwise.index.source_file import Format
from lengthwise.index.store import open_index

SOURCE = """
import numpy as np

def texts(path):
    yield from path.read_text().split(";")

def tokens(path):
    for text in texts(path):
        yield np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)

def numbers(path):
    yield "text"
    yield 3

def fails_at_once(path):
    yield 3

def fails(path):
    yield "text"
    raise KeyError("no more")
"""


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """Six files of documents between semicolons, and the module ``readers_here``."""
    (tmp_path / "readers_here.py").write_text(SOURCE)
    (tmp_path / "SRC").mkdir()
    for number in range(6):
        (tmp_path / "SRC" / f"{number}.part").write_text(";".join("ab" * (number + k + 1) for k in range(5)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("readers_here", None)
    return tmp_path


def built(files, reader, *, workers=1, **options):
    out = files / f"{reader.rpartition(':')[2]}-{workers}"
    build_index(IndexSettings(source=files / "SRC", reader=reader, **options), out, workers=workers)
    return open_index(out)


def test_documents_are_those_of_the_function_for_any_number_of_processes(files):
    expected = [2 * (number + k + 1) for number in range(6) for k in range(5)]
    one, three = (built(files, "readers_here:texts", workers=workers) for workers in (1, 3))
    assert one.digest == three.digest
    assert list(one.lengths.lengths) == [length + 1 for length in expected]  # with the end-of-sequence token
    ready = built(files, "readers_here:tokens")
    assert list(ready.lengths.lengths) == expected
    assert np.array_equal(ready.tokens(7), one.tokens(7)[:-1])


def test_a_change_of_the_reader_makes_another_index(files):
    built(files, "readers_here:texts")
    (files / "readers_here.py").write_text(SOURCE + "\n# changed\n")
    with pytest.raises(InputError, match=r"holds another index .*reader_digest"):
        built(files, "readers_here:texts")


def test_entry_points_are_readers_by_name(files, monkeypatch):
    entry = EntryPoint(name="parts", value="readers_here:texts", group=plugins.READERS)
    monkeypatch.setattr(plugins, "entry_points", lambda group: EntryPoints((entry,)).select(group=group))
    assert len(built(files, "parts")) == 30


@pytest.mark.parametrize(
    ("reader", "message"),
    [
        ("readers_here:numbers", r"fails in 0\.part after 1 document: TypeError: a document is text, .*not int"),
        ("readers_here:fails", r"fails in 0\.part after 1 document: KeyError"),
        ("readers_here:fails_at_once", r"fails in 0\.part after 0 documents: TypeError"),
        ("readers_here:text", "has no 'text'; did you mean texts"),
        ("nowhere:texts", "reader nowhere:texts: no module 'nowhere'"),
    ],
)
def test_what_a_reader_does_wrong_is_refused_by_file(files, reader, message):
    with pytest.raises(InputError, match=message):
        built(files, reader)


def test_larger_documents_are_left_out_as_those_of_other_formats(files):
    store = built(files, "readers_here:texts", max_document=10, on_large="skip")
    assert store.info["ledger"]["large"] == 30 - len(store) > 0


@pytest.mark.parametrize(
    "options", [{"reader": "a:b", "format": Format.TEXT}, {"reader": "a:b", "field": "x"}, {"format": Format.READER}]
)
def test_options_that_contradict_a_reader_are_refused(files, options):
    with pytest.raises(InputError, match="--reader"):
        IndexSettings(source=files / "SRC", **options)
