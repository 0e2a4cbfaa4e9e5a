"""JSON files are lines or arrays of rows by what they begin with, and never one text without a word."""

import gzip
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lengthwise.core.errors import InputError
from lengthwise.index.document_limits import Limits
from lengthwise.index.readers import json_array
from lengthwise.index.readers.document import OversizedValue
from lengthwise.index.readers.json_array import read_json_array
from lengthwise.index.source_file import Format, source_file
from tests.examples import examples
from tests.index.build import build, places_of, texts_of, write_tree

TEXTS = ["one", 'two "quoted" ]}', "três\n"]
ROWS = [{"text": text} for text in TEXTS]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.ndjson", LINES),
        ("a.json", LINES),
        ("a.json", "\n" + json.dumps(ROWS)),
        ("a.json", "\ufeff" + json.dumps(ROWS, indent=2, ensure_ascii=False)),
        ("a.JSON.gz", json.dumps(ROWS)),
        ("a.ndjson.gz", LINES),
    ],
)
def test_rows_are_read_by_what_a_file_begins_with(tmp_path, name, content):
    data = content.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    store = build(tmp_path / name, tmp_path / "out")
    assert texts_of(store) == [text.encode() for text in TEXTS]
    assert [place.get("line") or place["row"] + 1 for place in places_of(store)][-1] in (3, 4)
    as_text = build(tmp_path / name, tmp_path / "text", format=Format.TEXT) if not name.endswith(".gz") else None
    assert as_text is None or texts_of(as_text) == [content.removeprefix("\ufeff").encode()]


def test_tokens_with_labels_may_be_an_array(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([{"input_ids": [1, 2, 3], "labels": [-100, -100, 3]}]))
    store = build(tmp_path / "a.json", tmp_path / "out")
    assert (store.tokens(0).tolist(), store.loss_mask(0).tolist()) == ([1, 2, 3], [False, False, True])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=3), values, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(st.text(max_size=3), json_values, max_size=3)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(objects, max_size=4),
    block=st.integers(1, 40),
    indent=st.sampled_from([None, 1]),
    raw=st.booleans(),
)
def test_an_array_is_its_elements_wherever_blocks_end(tmp_path, rows, block, indent, raw):
    path = tmp_path / "a.json"
    path.write_bytes(json.dumps(rows, indent=indent, ensure_ascii=raw).encode(errors="surrogatepass"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_array, "_BLOCK", block)
        values = [json.loads(data) for data in read_json_array(source_file(path, "a.json"), Limits())]
    assert values == rows


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('[{"text": "a"}', r"a\.json, row 0 is followed by the end of the file, not by a comma"),
        ('[{"text": "a"} {"text": "b"}]', r"a\.json, row 0 is followed by '\{'"),
        (
            '[{"text": "a"}, {"text": }]' + " " * 50,
            r"a\.json, row 1 is not JSON: Expecting value at character 10 of the row; mend",
        ),
        (
            '[{"text": "a"}, {"text": "b',
            r"a\.json, row 1 is not JSON: Unterminated string starting at character 10 of the row",
        ),
        ('[{"text": "a"},]', r"a\.json, row 1 is not JSON: Expecting value"),
        ('[{"text": "a"}] []', r"a\.json goes on with '\['"),
        ('[{"text": "a"}, 5]', r"a\.json, row 1: expected a JSON object, found int"),
        ('["a"]', r"a\.json, row 0: expected a JSON object, found str"),
        ("[" * 20_000, r"a\.json, row 0 is not JSON"),
        ("[]", "holds no sequence"),
        ('{\n "text": "a"\n}', r"a\.json is neither JSON lines nor a JSON array of rows; .*--format text"),
        ('"text"', r"a\.json is neither JSON lines nor a JSON array"),
        ('{"rows": []}', r"a\.json:1 has no field 'text'"),
    ],
)
def test_what_is_no_array_of_rows_is_refused_by_row(tmp_path, content, said):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(InputError, match=said):
        build(tmp_path / "a.json", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_large_rows_are_named(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": "a" * 200}, {"text": "b"}]))
    large, small = read_json_array(source_file(path, "a.json"), Limits(document=100))
    assert large == OversizedValue(212) and json.loads(small) == {"text": "b"}
    with pytest.MonkeyPatch.context() as patch, pytest.raises(InputError, match="row 0 has more than 100 bytes"):
        patch.setattr(json_array, "_BLOCK", 128)
        list(read_json_array(source_file(path, "a.json"), Limits(document=100)))


@pytest.mark.parametrize("name", ["a.csv", "a.TSV", "a.csv.gz"])
def test_tables_of_text_are_refused_with_the_way_out(tmp_path, name):
    source = write_tree(tmp_path / "rows", {name: b"text\nabc\n"})
    for path in (source, source / name):
        with pytest.raises(InputError, match=r"is a \.[ct]sv table, .*Parquet.*--format text"):
            build(path, tmp_path / "out")
    write_tree(source, {"README.md": b"about it"})
    with pytest.raises(InputError, match=r"mixes formats \(1 [ct]sv, 1 text, by what files hold\).*--glob"):
        build(source, tmp_path / "out")
    if not name.endswith(".gz"):
        assert len(build(source, tmp_path / "out", format=Format.TEXT)) == 2


def test_settings_among_code_stay_texts(tmp_path):
    source = write_tree(tmp_path / "code", {"a.py": b"1", "package.json": b'{\n "name": "a"\n}'})
    assert texts_of(build(source, tmp_path / "out")) == [b"1", b'{\n "name": "a"\n}']
    write_tree(source, {"rows.json": LINES.encode()})
    with pytest.raises(InputError, match=r"mixes formats \(1 jsonl, 2 text, by what files hold\).*--glob '\*\.json'"):
        build(source, tmp_path / "mixed")
