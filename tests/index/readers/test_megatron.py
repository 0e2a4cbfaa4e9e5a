"""Megatron's .bin and .idx: a document is a sequence, and two files that disagree are refused with the numbers."""

import struct
from itertools import chain

import numpy as np
import pytest

from lengthwise.core.errors import InputError
from lengthwise.index.sources import find_sources
from lengthwise.index.work_units import split_units
from tests.index.build import build, places_of, write_tree

RNG = np.random.default_rng(0)
DOCUMENTS = [[list(map(int, RNG.integers(0, 60_000, RNG.integers(0, 9)))) for _ in range(1 + n % 3)] for n in range(50)]
WHOLE = [list(chain(*parts)) for parts in DOCUMENTS]


def write_pair(prefix, documents=DOCUMENTS, *, code=8, dtype="<u2"):
    """The two files as Megatron's MMapIndexedDataset builder writes them; a document is a list of stored sequences."""
    stored = [np.array(part, dtype=dtype) for parts in documents for part in parts]
    sizes = np.array([len(part) for part in stored], dtype="<i4")
    pointers = (np.cumsum(sizes, dtype="<i8") - sizes) * np.dtype(dtype).itemsize
    bounds = np.cumsum([0] + [len(parts) for parts in documents], dtype="<i8")
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, code, len(sizes), len(bounds))
    prefix.with_name(prefix.name + ".idx").write_bytes(head + sizes.tobytes() + pointers.tobytes() + bounds.tobytes())
    prefix.with_name(prefix.name + ".bin").write_bytes(b"".join(part.tobytes() for part in stored))
    return prefix


def tokens_of(store):
    return [store.tokens(id).tolist() for id in range(len(store))]


@pytest.mark.parametrize("spelling", ["", ".idx", ".bin"])
def test_every_document_is_one_sequence_wherever_units_are_cut(tmp_path, spelling):
    prefix = write_pair(tmp_path / "my.corpus_text_document")
    source = prefix.with_name(prefix.name + spelling)
    assert len(split_units(find_sources(source, out=tmp_path / "out"), unit_bytes=50)) > 10
    for unit_bytes in (1, 50, 1 << 20):
        store = build(source, tmp_path / f"{unit_bytes}", unit_bytes=unit_bytes, on_empty="drop")
        assert tokens_of(store) == [tokens for tokens in WHOLE if tokens]
        kept = [number for number, tokens in enumerate(WHOLE) if tokens]
        name = "my.corpus_text_document.idx"
        assert places_of(store) == [{"source": name, "document": number} for number in kept]
    assert store.info["ledger"]["documents"] == 50 and store.info["ledger"]["empty"] == 50 - len(kept)
    assert (store.vocab_size, store.eos_id) == (1 + max(map(max, filter(None, WHOLE))), None)
    with pytest.raises(InputError, match=rf"idx, document {WHOLE.index([])} is empty"):
        build(source, tmp_path / "refused", unit_bytes=50)


@pytest.mark.parametrize(("code", "dtype"), [(1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")])
def test_every_integer_type_is_read(tmp_path, code, dtype):
    store = build(write_pair(tmp_path / "a", [[[1, 2], [3]], [[127]]], code=code, dtype=dtype), tmp_path / "out")
    assert tokens_of(store) == [[1, 2, 3], [127]]


def test_a_folder_of_pairs_is_read_in_sorted_order(tmp_path):
    source = tmp_path / "src"
    source.mkdir()
    for name, token in (("b", 2), ("a", 1)):
        write_pair(source / name, [[[token]]])
    assert tokens_of(build(source, tmp_path / "out")) == [[1], [2]]
    assert tokens_of(build(source, tmp_path / "glob", globs=("b.idx",))) == [[2]]
    with pytest.raises(InputError, match="tokens already, there is no text to encode; leave bytes out"):
        build(source, tmp_path / "encoded", tokenizer="bytes")
    (source / "a.bin").unlink()
    with pytest.raises(InputError, match=r"a\.idx has no a\.bin beside it"):
        build(source / "a", tmp_path / "alone")


def test_bin_and_idx_that_are_not_a_pair_stay_what_they_were(tmp_path):
    source = write_tree(tmp_path / "src", {"a.txt": b"a", "x.bin": b"text", "y.idx": b"text"})
    assert len(build(source, tmp_path / "out")) == 3


def damaged(path, at, kind, value):
    data = bytearray(path.read_bytes())
    struct.pack_into(kind, data, at, value)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("at", "kind", "value", "said"),
    [
        (0, "<9s", b"TNTIDX\x00\x00", r"old TNTIDX format"),
        (0, "<9s", b"something", r"does not start with MMIDIDX"),
        (9, "<Q", 2, r"version 2"),
        (17, "<B", 7, r"type code 7 \(float32\)"),
        (17, "<B", 99, r"unknown type code 99"),
        (17, "<B", 4, r"stored sequence 1 starts at byte 4 of a\.bin, but those before it end at 8"),
        (18, "<Q", 5, r"a\.idx has 94 bytes, but 5 sequences and 3 document bounds take 118"),
        (26, "<Q", 4, r"a\.idx has 94 bytes, but 3 sequences and 4 document bounds take 102"),
        (34, "<i", -2, r"stored sequence 0 has -2 tokens"),
        (42, "<i", 3, r"a\.bin has 8 bytes, but a\.idx counts 12 \(6 tokens of 2 bytes\)"),
        (54, "<q", 2, r"stored sequence 1 starts at byte 2"),
        (70, "<q", 1, r"from stored sequence 0 to 3 in ascending order, not from 1 to 3"),
        (86, "<q", 2, r"not from 0 to 2"),
        (78, "<q", 9, r"in ascending order"),
    ],
)
def test_a_damaged_index_is_refused_with_the_numbers(tmp_path, at, kind, value, said):
    write_pair(tmp_path / "a", [[[1, 2], [3]], [[4]]])
    damaged(tmp_path / "a.idx", at, kind, value)
    with pytest.raises(InputError, match=said) as caught:
        build(tmp_path / "a", tmp_path / "out")
    assert str(caught.value).startswith(("a.idx", "a.bin"))


def test_files_of_the_wrong_size_are_refused_with_both_sizes(tmp_path):
    prefix = write_pair(tmp_path / "a", [[[1, 2], [3]], [[4]]])
    data, index = (tmp_path / "a.bin").read_bytes(), (tmp_path / "a.idx").read_bytes()
    for wrong in (data[:-1], data + b"x", b""):
        (tmp_path / "a.bin").write_bytes(wrong)
        with pytest.raises(InputError, match=rf"a\.bin has {len(wrong)} bytes, but a\.idx counts 8"):
            build(prefix, tmp_path / "out")
    (tmp_path / "a.idx").write_bytes(index + bytes(3))
    with pytest.raises(InputError, match="multimodal"):
        build(prefix, tmp_path / "out")
    (tmp_path / "a.idx").write_bytes(index[:20])
    with pytest.raises(InputError, match="20 bytes, its header alone has 34"):
        build(prefix, tmp_path / "out")


def test_a_negative_id_is_refused_by_its_document(tmp_path):
    prefix = write_pair(tmp_path / "a", [[[1]], [[2], [3, -5]], [[4]]], code=4, dtype="<i4")
    with pytest.raises(InputError, match=r"a\.idx, document 1: token id -5"):
        build(prefix, tmp_path / "out", unit_bytes=4)
