"""Columns beside ready tokens are read in every row and file, or refused by row."""

import json

import pytest

from lengthwise.core.errors import InputError
from lengthwise.index.store import open_index
from tests.index.build import build, places_of, write_tree

SUFFIXES = [".jsonl", ".parquet", ".tar"]


def write_rows(path, rows):
    """Rows as JSON lines, Parquet, or JSON members of a tar; a column that some rows lack is null there in Parquet."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        pa = pytest.importorskip("pyarrow")
        names = dict.fromkeys(name for row in rows for name in row)
        table = pa.table({name: [row.get(name) for row in rows] for name in names})
        pytest.importorskip("pyarrow.parquet").write_table(table, path, row_group_size=2)
    else:
        import tarfile

        folder = path.parent / f"{path.name}.members"
        write_tree(folder, {f"{number}.json": json.dumps(row).encode() for number, row in enumerate(rows)})
        with tarfile.open(path, "w") as archive:
            for number in range(len(rows)):
                archive.add(folder / f"{number}.json", f"{number}.json")
    return path


def build_rows(path, rows, out, **settings):
    field = {"field": "json:input_ids"} if path.suffix == ".tar" else {}
    return build(write_rows(path, rows), out, **field, **settings)


def sequences_of(store):
    """Tokens of each sequence, and which have a loss."""
    masks = [store.loss_mask(id) for id in range(len(store))]
    return [
        (store.tokens(id).tolist(), [True] * (store.lengths.lengths[id] - 1) if mask is None else mask[1:].tolist())
        for id, mask in enumerate(masks)
    ]


def test_pieces_of_a_packed_row_come_from_that_row(tmp_path):
    rows = [{"input_ids": [1, 2]}, {"input_ids": [3, 4, 5, 6], "position_ids": [0, 1, 0, 1]}, {"input_ids": [7, 8]}]
    store = build_rows(tmp_path / "a.jsonl", rows, tmp_path / "out", unit_bytes=40)
    assert [place["line"] for place in places_of(store)] == [1, 2, 2, 3]
    assert store.info["ledger"]["documents"] == 3


def test_rows_of_padding_alone_are_empty(tmp_path):
    rows = [{"input_ids": [1, 2], "attention_mask": [1, 1]}, {"input_ids": [0, 0], "attention_mask": [0, 0]}]
    with pytest.raises(InputError, match=r"a\.jsonl:2 is empty"):
        build_rows(tmp_path / "a.jsonl", rows, tmp_path / "out")
    assert sequences_of(build_rows(tmp_path / "a.jsonl", rows, tmp_path / "out", on_empty="drop")) == [([1, 2], [True])]


IDS = {"input_ids": [1, 2, 3]}
REFUSED = {
    "labels later": ([IDS, {**IDS, "labels": [1, 2, 3]}], "{second} has 'labels', and {first} has no .*--loss all"),
    "a mask later": ([IDS, {**IDS, "prompt_mask": [1, 0, 0]}], "{second} has 'prompt_mask', and {first} has no labels"),
    "null first": ([{**IDS, "labels": None}, {**IDS, "labels": [1, 2, 3]}], "{second} has 'labels', and {first} has"),
    "labels first": ([{**IDS, "labels": [1, 2, 3]}, IDS], "{second} has no labels and no mask, and {first} has 'label"),
    "fractions as ids": ([{"input_ids": [1.0, 2.0]}], "'input_ids'.*(list of whole numbers|lists of integers)"),
    "a class as labels": ([{**IDS, "labels": 3}], "'labels'.*list of (whole )?numbers"),
    "booleans as labels": ([{**IDS, "labels": [True, False, True]}], "'labels'.*list of (whole )?numbers"),
    "a mask of 2": ([{**IDS, "loss_mask": [0, 2, 1]}], "{first}: 'loss_mask' has 2 for token 2; a mask has 1"),
    "a prompt in the midst": ([{**IDS, "prompt_mask": [0, 1, 0]}], "{first}: 'prompt_mask' is to be 1 for the tokens"),
    "a hole": ([{**IDS, "attention_mask": [1, 0, 1]}], "{first}: 'attention_mask' hides a token between others"),
    "padding of 2": ([{**IDS, "attention_mask": [1, 2, 1]}], "{first}: 'attention_mask' has 2; it is to be 0"),
    "short padding": ([{**IDS, "attention_mask": [1, 1]}], "{first} has 3 tokens and 2 values in 'attention_mask'"),
    "a loss on padding": (
        [{**IDS, "attention_mask": [1, 1, 0], "labels": [-100, 2, 3]}], "{first} has a loss on its padding",
    ),
    "positions that jump": ([{**IDS, "position_ids": [0, 2, 4]}], "position_ids of {first} do not.*drop the column"),
}  # fmt: skip


@pytest.mark.parametrize("suffix", SUFFIXES[:2])
@pytest.mark.parametrize(("rows", "said"), REFUSED.values(), ids=REFUSED)
def test_what_contradicts_itself_or_the_first_row_is_refused_by_row(tmp_path, rows, said, suffix):
    lines, rows_of_table = (r"a\.jsonl:1", r"a\.jsonl:2"), (r"a\.parquet, row 0", r"a\.parquet, row 1")
    first, second = lines if suffix == ".jsonl" else rows_of_table
    with pytest.raises(InputError, match=said.format(first=first, second=second)):
        build_rows(tmp_path / f"a{suffix}", rows, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("suffix", SUFFIXES[:2])
def test_the_first_file_does_not_hide_labels_of_the_second(tmp_path, suffix):
    (tmp_path / "rows").mkdir()
    write_rows(tmp_path / "rows" / f"a{suffix}", [IDS, IDS])
    write_rows(tmp_path / "rows" / f"b{suffix}", [{**IDS, "labels": [-100, 2, 3]}])
    with pytest.raises(InputError, match=rf"b\{suffix}.* has 'labels', and a\{suffix}.* has no labels"):
        build(tmp_path / "rows", tmp_path / "out")
    build(tmp_path / "rows", tmp_path / "all", loss="all")
    assert not open_index(tmp_path / "all").has_loss_mask


@pytest.mark.parametrize("suffix", SUFFIXES[:2])
@pytest.mark.parametrize("left_out", [{"input_ids": None, "labels": None}, {"input_ids": [], "labels": []}])
def test_a_row_that_is_left_out_does_not_decide_what_others_have(tmp_path, left_out, suffix):
    rows = [left_out, {**IDS, "labels": [-100, 2, -100]}]
    store = build_rows(tmp_path / f"a{suffix}", rows, tmp_path / "out", on_empty="drop")
    assert sequences_of(store) == [([1, 2, 3], [True, False])]


TELLING = {
    "text after a list": ([{"text": []}, {"text": None}, {"text": "abc"}], [97, 98, 99, 256]),
    "tokens after null": ([{"input_ids": None}, {"input_ids": []}, IDS], [1, 2, 3]),
    "nothing in the first file": ([], [1, 2, 3]),
}


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(("rows", "tokens"), TELLING.values(), ids=TELLING)
def test_the_first_row_that_tells_decides_what_rows_hold(tmp_path, rows, tokens, suffix):
    if suffix == ".parquet" and not rows:
        pytest.skip("a table without a row has columns all the same")
    (tmp_path / "rows").mkdir()
    write_rows(tmp_path / "rows" / f"a{suffix}", rows[:-1])
    write_rows(tmp_path / "rows" / f"b{suffix}", rows[-1:] or [IDS])
    field = {"field": f"json:{next(iter((rows or [IDS])[-1]))}"} if suffix == ".tar" else {}
    store = build(tmp_path / "rows", tmp_path / "out", on_empty="drop", globs=(f"*{suffix}",), **field)
    assert [store.tokens(id).tolist() for id in range(len(store))] == [tokens]


def test_text_beside_labelled_tokens_is_not_taken_without_a_word(tmp_path):
    source = write_rows(tmp_path / "a.jsonl", [{"text": "abc", **IDS, "labels": [-100, -100, 3]}])
    with pytest.raises(InputError, match="'text', 'input_ids' and 'labels'; give --field input_ids"):
        build(source, tmp_path / "out")
    assert build(source, tmp_path / "tokens", field="input_ids").has_loss_mask
    assert not build(source, tmp_path / "text", field="text").has_loss_mask


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_columns_that_are_not_used_are_kept_by_name_and_known_ones_are_ignored_on_demand(tmp_path, suffix):
    rows = [{**IDS, "url": "x", "labels": [-100, 2, 3]}, {**IDS, "length": 3, "labels": [-100, -100, 3]}]
    store = build_rows(tmp_path / f"a{suffix}", rows, tmp_path / "out", unit_bytes=30)
    assert store.has_loss_mask and store.info["unused_columns"] == ["length", "url"]
    without = build_rows(tmp_path / f"a{suffix}", rows, tmp_path / "ignored", ignore=("labels",))
    assert not without.has_loss_mask and without.info["unused_columns"] == ["labels", "length", "url"]
    assert "unused_columns" not in build_rows(tmp_path / f"b{suffix}", [IDS], tmp_path / "plain").info


def test_ignored_columns_are_of_rows_that_have_columns(tmp_path):
    source = write_rows(tmp_path / "a.jsonl", [{"text": "abc", "url": "x"}])
    with pytest.raises(InputError, match="--ignore url: 'text' is text, beside which nothing is read; leave it out"):
        build(source, tmp_path / "out", ignore=("url",))
    with pytest.raises(InputError, match="--ignore text and --field text contradict each other"):
        build(source, tmp_path / "out", field="text", ignore=("text",))


@pytest.mark.parametrize("values", ["[[[1, 2]]]", "[1]"])
def test_a_column_of_tokens_of_another_type_is_named(tmp_path, values):
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(pytest.importorskip("pyarrow").table({"input_ids": json.loads(values)}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"column 'input_ids' is .*int64.*, neither text nor lists of integers"):
        build(tmp_path / "a.parquet", tmp_path / "out")
    (tmp_path / "a.jsonl").write_text('{"input_ids": 1}\n')
    with pytest.raises(InputError, match="'input_ids' is no list of whole numbers"):
        build(tmp_path / "a.jsonl", tmp_path / "out")


def test_the_request_tells_columns_apart(tmp_path):
    rows = [{**IDS, "attention_mask": [1, 1, 0]}]
    assert build_rows(tmp_path / "a.jsonl", rows, tmp_path / "padded").info["request"]["columns"] == ["attention_mask"]
    rows = [{**IDS, "labels": [1, 2, 3], "loss_mask": [0, 1, 1]}]
    assert build_rows(tmp_path / "b.jsonl", rows, tmp_path / "b").info["request"]["loss"] == ["labels", "loss_mask"]
