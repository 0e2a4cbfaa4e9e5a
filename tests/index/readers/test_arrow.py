"""Arrow, Feather and saved Hugging Face data sets: rows in the order of the source, and damage said by file and row."""

import json

import numpy as np
import pytest

from lengthwise.core.errors import InputError
from lengthwise.index.sources import find_sources
from lengthwise.index.work_units import split_units
from tests.index.build import build, places_of, texts_of

pa = pytest.importorskip("pyarrow")

TEXTS = [f"row {row} é " * (row % 5) for row in range(1, 90)]
IDS = [list(range(row % 7)) for row in range(1, 90)]
IDS[6] = [70_000]


def write_stream(path, table, *, rows=8):
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def save(folder, tables, **state):
    """A folder as ``save_to_disk`` leaves it, its files numbered backwards so that their names are not their order."""
    names = [f"data-{9 - number:05d}.arrow" for number in range(len(tables))]
    for name, table in zip(names, tables):
        write_stream(folder / name, table)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names], **state}))
    return folder


@pytest.mark.parametrize("writer", ["stream", "stream-dictionary", "file", "file-dictionary", "compressed"])
def test_text_and_tokens_of_arrow_files_are_read_row_by_row(tmp_path, writer):
    texts = pa.array(TEXTS).dictionary_encode() if writer.endswith("dictionary") else pa.array(TEXTS)
    table = pa.table({"other": TEXTS, "text": texts, "ids": IDS})
    path = tmp_path / "a.arrow"
    if writer.startswith("stream"):
        write_stream(path, table)
    else:
        options = pa.ipc.IpcWriteOptions(compression="lz4" if writer == "compressed" else None)
        with pa.ipc.new_file(path, table.schema, options=options) as opened:
            opened.write_table(table, max_chunksize=8)
    units = split_units(find_sources(path, out=tmp_path / "out"), unit_bytes=1000)
    assert len(units) == 1 if writer.endswith("dictionary") else len(units) > 3
    store = build(path, tmp_path / "text", unit_bytes=1000, on_empty="drop")
    assert texts_of(store) == [text.encode() for text in TEXTS if text]
    rows = [row for row, text in enumerate(TEXTS) if text]
    assert places_of(store) == [{"source": "a.arrow", "row": row} for row in rows]
    assert store.info["ledger"]["documents"] == 89 and store.info["ledger"]["empty"] == TEXTS.count("")
    store = build(path, tmp_path / "ids", field="ids", unit_bytes=1000, on_empty="drop")
    assert [store.tokens(id).tolist() for id in range(len(store))] == [ids for ids in IDS if ids]


LISTS = {
    "list": (pa.list_(pa.int16()), [[5, 6], [7], [8, 9, 1]]),
    "large_list": (pa.large_list(pa.uint64()), [[5, 6], [7], [8, 9, 1]]),
    "fixed_size_list": (pa.list_(pa.int8(), 2), [[5, 6], [7, 8], [9, 1]]),
    **({"list_view": (pa.list_view(pa.int32()), [[5, 6], [7], [8]])} if hasattr(pa, "list_view") else {}),
}


@pytest.mark.parametrize("kind", LISTS)
def test_lists_of_every_kind_are_tokens_and_missing_ones_are_empty(tmp_path, kind):
    type, rows = LISTS[kind]
    table = pa.table({"ids": pa.array([rows[0], None, *rows[1:]], type=type)})
    path = write_stream(tmp_path / "a.arrow", table.slice(0), rows=2)
    with pytest.raises(InputError, match=r"a\.arrow, row 1 is empty"):
        build(path, tmp_path / "refused", field="ids")
    store = build(path, tmp_path / "out", field="ids", unit_bytes=1, on_empty="drop")
    assert [store.tokens(id).tolist() for id in range(3)] == rows
    assert [place["row"] for place in places_of(store)] == [0, 2, 3]


def test_list_views_out_of_order_keep_the_order_of_rows(tmp_path):
    if not hasattr(pa, "ListViewArray"):
        pytest.skip("this pyarrow has no list views")
    views = pa.ListViewArray.from_arrays(pa.array([4, 0, 2], pa.int32()), pa.array([2, 2, 3], pa.int32()), range(1, 7))
    store = build(write_stream(tmp_path / "a.arrow", pa.table({"ids": views})), tmp_path / "out", field="ids")
    assert [store.tokens(id).tolist() for id in range(3)] == [[5, 6], [1, 2], [3, 4, 5]]


def test_a_saved_data_set_is_read_in_the_order_its_state_gives(tmp_path):
    table = pa.table({"text": [f"row {row}" for row in range(60)]})
    source = save(tmp_path / "saved", [table.slice(0, 30), table.slice(30, 0), table.slice(30, 30)])
    store = build(source, tmp_path / "out", unit_bytes=200)
    assert texts_of(store) == [b"row %d" % row for row in range(60)]
    assert places_of(store)[30] == {"source": "data-00007.arrow", "row": 0}


def test_a_dictionary_of_data_sets_needs_a_split(tmp_path):
    source = tmp_path / "saved"
    for split in ("train", "test"):
        save(source / split, [pa.table({"text": [split]})])
    (source / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert texts_of(build(source, tmp_path / "test", split="test")) == [b"test"]
    assert places_of(build(source, tmp_path / "train", split="train"))[0]["source"] == "train/data-00009.arrow"
    for split, said in (("", "a dataset for each split"), ("dev", "no such split")):
        with pytest.raises(InputError, match=rf"{said}.*--split \(splits: train, test\)"):
            build(source, tmp_path / "out", split=split)
    for choice in ({"split": "train"}, {"globs": ("*",)}):
        with pytest.raises(InputError, match="leave --"):
            build(source / "train", tmp_path / "out", **choice)
    with pytest.raises(InputError, match=r"saved/train' then, .*saved/test' now"):
        build(source, tmp_path / "train", split="test")


def test_saved_data_sets_that_cannot_be_followed_are_refused(tmp_path):
    source = save(tmp_path / "saved", [pa.table({"text": ["a"]})], _indices_data_files=[{"filename": "indices.arrow"}])
    with pytest.raises(InputError, match=r"state\.json orders its rows.*_indices_data_files.*flatten_indices"):
        build(source, tmp_path / "out")
    save(source, [pa.table({"text": ["a"]})])
    (source / "data-00009.arrow").unlink()
    with pytest.raises(InputError, match=r"lists data-00009\.arrow, which is not there"):
        build(source, tmp_path / "out")
    for text, said in (("{", "cannot be read"), ("[]", "no JSON object"), ("{}", "_data_files")):
        (source / "state.json").write_text(text)
        with pytest.raises(InputError, match=said):
            build(source, tmp_path / "out")


def test_a_bad_row_is_named_by_its_number_in_the_file(tmp_path):
    rows = [[1]] * 40
    for number, (value, said) in enumerate({-1: "token id -1", None: "missing values", 1 << 32: "4294967296"}.items()):
        table = pa.table({"ids": [*rows, [3, value], [1]]})
        path = write_stream(tmp_path / f"{number}.arrow", table)
        with pytest.raises(InputError, match=rf"{number}\.arrow, row 40: .*{said}"):
            build(path, tmp_path / "out", field="ids", unit_bytes=300)
    bad = pa.array([b"fine", b"\xff\xfe"]).view(pa.string())
    path = write_stream(tmp_path / "text.arrow", pa.table({"text": bad}))
    with pytest.raises(InputError, match=r"text\.arrow, row 1 is not text in UTF-8"):
        build(path, tmp_path / "out")
    assert build(path, tmp_path / "out", on_binary="skip").info["ledger"]["undecodable"] == 1


def test_columns_that_are_no_text_and_no_lists_of_integers_are_refused(tmp_path):
    columns = {"n": [1], "nested": [[[1]]], "real": [[1.5]], "record": [{"a": 1}], "flag": [[True]], "raw": [b"a"]}
    path = write_stream(tmp_path / "a.arrow", pa.table(columns))
    for name in columns:
        with pytest.raises(InputError, match=rf"a\.arrow: column '{name}' is .*neither text nor lists of integers"):
            build(path, tmp_path / "out", field=name)
    with pytest.raises(InputError, match=r"no column 'text'.*columns: n, nested"):
        build(path, tmp_path / "out")
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    with pytest.raises(InputError, match="2 columns 'text'"):
        build(write_stream(tmp_path / "b.arrow", twice), tmp_path / "out")


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_an_arrow_file_cut_anywhere_is_refused(tmp_path, kind):
    table = pa.table({"ids": IDS})
    whole = write_stream(tmp_path / "whole.arrow", table)
    if kind == "file":
        with pa.ipc.new_file(whole, table.schema) as writer:
            writer.write_table(table, max_chunksize=8)
    data = whole.read_bytes()
    path = tmp_path / "a.arrow"
    for size in (0, 1, 5, 100, len(data) // 2, len(data) // 2 + 3, len(data) - 8, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(InputError, match=r"a\.arrow (is cut off|cannot be read as Arrow|is not an Arrow file)"):
            build(path, tmp_path / "out", field="ids", on_empty="drop", unit_bytes=500)


def test_what_is_no_arrow_is_refused(tmp_path):
    path = tmp_path / "a.feather"
    for data, said in ((b"FEA1" + bytes(60), "version 1"), (b"x" * 300, "Arrow"), (b"\xff" * 300, "Arrow")):
        path.write_bytes(data)
        with pytest.raises(InputError, match=said):
            build(path, tmp_path / "out")


def test_a_damaged_parquet_page_is_refused_by_file_and_row(tmp_path):
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"text": [str(row) * 9 for row in range(100)]}), path, row_group_size=50, compression="gzip"
    )
    data = bytearray(path.read_bytes())
    start = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    data[start : start + 60] = np.random.default_rng(0).bytes(60)
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"a\.parquet, row 50 or one after it is damaged"):
        build(path, tmp_path / "out", unit_bytes=1)
