"""Every format: what is in the file is what is in the index, wherever work units are cut."""

import gzip
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lengthwise.core.errors import InputError
from lengthwise.index.build_part import PartJob, build_part
from lengthwise.index.readers.documents_reader import read_documents
from lengthwise.index.row_fields import RowFields
from lengthwise.index.skipped import SkippedDocuments
from lengthwise.index.source_file import Format
from lengthwise.index.sources import find_sources
from lengthwise.index.tokenizers import TokenizerSpec
from lengthwise.index.work_units import split_units
from tests.examples import examples
from tests.index.build import build, places_of, texts_of, write_jsonl, write_tree

anywhere = settings(
    max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def read_all(path, *, unit_bytes, format=None):
    sources = find_sources(path, format=format, out=path.parent / "out")
    units = split_units(sources, unit_bytes=unit_bytes)
    return [document for unit in units for document in read_documents(unit, field="text")]


@anywhere
@given(texts=st.lists(st.text(max_size=30), max_size=20), unit_bytes=st.integers(1, 200), blanks=st.booleans())
def test_jsonl_documents_do_not_depend_on_where_units_are_cut(tmp_path, texts, unit_bytes, blanks):
    texts = [text.encode(errors="replace").decode() for text in texts]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + ("\n\n" if blanks else "\n") for text in texts))
    documents = [document for document in read_all(path, unit_bytes=unit_bytes) if document.problem != "blank"]
    assert [document.data.decode() for document in documents] == texts


@anywhere
@given(
    records=st.lists(st.text(alphabet="ACGTN", max_size=50), min_size=1, max_size=8),
    width=st.integers(1, 12),
    unit_bytes=st.integers(1, 100),
    newline=st.sampled_from(["\n", "\r\n"]),
)
def test_fasta_records_do_not_depend_on_where_units_are_cut(tmp_path, records, width, unit_bytes, newline):
    lines = []
    for number, record in enumerate(records):
        lines += [f">record {number}", *(record[at : at + width] for at in range(0, len(record), width))]
    path = tmp_path / "a.fa"
    path.write_bytes((newline.join(lines) + newline).encode())
    assert [document.data.decode() for document in read_all(path, unit_bytes=unit_bytes)] == records


@anywhere
@given(
    records=st.lists(
        st.lists(st.sampled_from(["ACGT", "; a comment", ";", "GG;"]), max_size=5), min_size=1, max_size=5
    ),
    unit_bytes=st.integers(1, 60),
    head=st.sampled_from(["", "; before the first record\n", "\ufeff"]),
)
def test_comments_of_fasta_are_no_letters(tmp_path, records, unit_bytes, head):
    path = tmp_path / "a.fa"
    path.write_text(head + "".join("\n".join([">name", *record, ""]) for record in records))
    expected = ["".join(line for line in record if not line.startswith(";")) for record in records]
    assert [document.data.decode() for document in read_all(path, unit_bytes=unit_bytes)] == expected


@anywhere
@given(lines=st.lists(st.text(alphabet="ACGT \t", max_size=12), min_size=1, max_size=6), unit_bytes=st.integers(1, 60))
def test_blanks_within_lines_of_fasta_are_no_letters(tmp_path, lines, unit_bytes):
    """As blocks of ten letters, which would shift all that follows."""
    path = tmp_path / "a.fa"
    path.write_text(">name\n" + "\n".join(lines) + "\n")
    expected = "".join(lines).replace(" ", "").replace("\t", "")
    assert [document.data.decode() for document in read_all(path, unit_bytes=unit_bytes)] == [expected]


@pytest.mark.parametrize("line", ["1 ACGT ACGT", "ACGT >y"])
def test_numbers_and_headers_within_lines_of_fasta_are_refused_by_record(tmp_path, line):
    (tmp_path / "a.fa").write_text(f">w\nACGT\n>x\n{line}\n")
    with pytest.raises(InputError, match=r"a\.fa, record 1 holds digits or '>' among its letters"):
        build(tmp_path / "a.fa", tmp_path / "out")


@pytest.mark.parametrize("text", [b">x\rACGT\r>y\rGG\r", b">x\nACGT\r>y\rGG\n", b">x\r\nACGT\r\n>y\rGG\r\n"])
def test_line_ends_of_old_macs_in_fasta_are_refused_with_the_way_out(tmp_path, text):
    (tmp_path / "a.fa").write_bytes(text)
    with pytest.raises(InputError, match=r"a\.fa has line ends of old Macs .*: tr '\\r' '\\n' < FILE > NEW"):
        build(tmp_path / "a.fa", tmp_path / "out", on_empty="drop")


@pytest.mark.parametrize("name", ["a.faa", "a.ffn", "a.frn", "a.fas", "a.fsa", "a.mpfa", "a.FAA", "a.faa.gz"])
def test_fasta_by_its_other_suffixes_is_told_by_what_it_begins_with(tmp_path, name):
    path, pack = tmp_path / name, gzip.compress if name.endswith(".gz") else bytes
    path.write_bytes(pack(b"\n>p\nMK V\n>q\nMK\n"))
    assert [document.data for document in read_all(path, unit_bytes=99)] == [b"MKV", b"MK"]
    (tmp_path / "b.fas").write_bytes(b"(defun f ())")
    assert [document.data for document in read_all(tmp_path / "b.fas", unit_bytes=99)] == [b"(defun f ())"]


@pytest.mark.parametrize(
    ("name", "head", "words"),
    [
        ("r.fastq", "@r1\nACGT\n+\nIIII\n", "is FASTQ, which is not read; write its reads as FASTA"),
        ("r.fq.gz", "@r1\nACGT\n+\nIIII\n", "is FASTQ"),
        ("g.gbk", "LOCUS  X\n", "is GenBank"),
        ("g.gff3", "##gff-version 3\n", "is GFF, which is not read; index the FASTA"),
        ("g.sam", "@HD\tVN:1\n", "is SAM"),
    ],
)
def test_formats_of_sequences_that_are_not_read_are_refused_by_name(tmp_path, name, head, words):
    path = tmp_path / name
    path.write_bytes(gzip.compress(head.encode()) if name.endswith(".gz") else head.encode())
    with pytest.raises(InputError, match=f"^{name} {words}.* one text with --format text$"):
        read_all(path, unit_bytes=99)
    plain = tmp_path / name.removesuffix(".gz")
    plain.write_text("no such format")
    assert len(read_all(plain, unit_bytes=99)) == 1, "other files by that name are texts"


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path):
    mark = b"\xef\xbb\xbf"
    source = write_tree(tmp_path / "src", {"a.txt": mark + b"one", "b.txt": mark, "c.txt": b"two" + mark})
    assert texts_of(build(source, tmp_path / "out")) == [b"one", b"two" + mark]


def test_a_folder_is_read_in_sorted_order_without_hidden_files(tmp_path):
    names = ["b.txt", "a/z.py", "a/b/c.py", ".hidden/x.py", "a/.secret", "a.txt"]
    source = write_tree(tmp_path / "src", {name: name.encode() for name in names})
    store = build(source, tmp_path / "out")
    assert [place["source"] for place in places_of(store)] == ["a.txt", "a/b/c.py", "a/z.py", "b.txt"]
    assert texts_of(store) == [b"a.txt", b"a/b/c.py", b"a/z.py", b"b.txt"]


@pytest.mark.parametrize(
    ("globs", "expected"),
    [
        (("*.py",), ["a/x.py", "top.py"]),
        (("**/*.py",), ["a/x.py", "top.py"]),
        (("a/*",), ["a/x.py", "a/y.txt"]),
        (("*.txt", "top.*"), ["a/y.txt", "top.py"]),
    ],
)
def test_globs_choose_files_by_name_or_path(tmp_path, globs, expected):
    source = write_tree(tmp_path / "src", {"a/x.py": b"x", "a/y.txt": b"y", "top.py": b"t"})
    assert [file.name for file in find_sources(source, globs=globs, out=tmp_path).files] == expected


def test_the_output_folder_inside_the_source_is_no_source(tmp_path):
    write_tree(tmp_path, {"a.txt": b"a", "index/parts/x": b"x"})
    assert [file.name for file in find_sources(tmp_path, out=tmp_path / "index").files] == ["a.txt"]


def test_a_single_text_file_is_one_sequence(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes("Zażółć\r\n".encode() * 50)
    assert texts_of(build(path, tmp_path / "out")) == [path.read_bytes()]


def test_jsonl_places_count_lines_from_one_over_blank_lines_and_shards(tmp_path):
    source = tmp_path / "src"
    source.mkdir()
    (source / "a.jsonl").write_text('\ufeff{"text": "one"}\n\n\n{"text": "two"}\n\n')
    write_jsonl(source / "b.jsonl", ["three"])
    store = build(source, tmp_path / "out", unit_bytes=7)
    assert texts_of(store) == [b"one", b"two", b"three"]
    assert places_of(store) == [
        {"source": "a.jsonl", "line": 1},
        {"source": "a.jsonl", "line": 4},
        {"source": "b.jsonl", "line": 1},
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": ', "a.jsonl:31 is not a line of JSON: expecting value at column 9; mend or remove it"),
        ("[1]", "a.jsonl:31: expected a JSON object, found list"),
        ('{"body": "x"}', "a.jsonl:31 has no field 'text'; choose with --field (fields here: body)"),
        ('{"text": 3}', "a.jsonl:31: expected text, found int"),
        ('{"text": ""}', "a.jsonl:31 is empty"),
        ('{"text": null}', "a.jsonl:31 is empty"),
        (
            '{"text": "\\ud800"}',
            "a.jsonl:31 holds half of a surrogate pair, which UTF-8 cannot write; mend it, or leave",
        ),
        ("[" * 100_000, "a.jsonl:31 is not a line of JSON"),
    ],
)
def test_a_bad_json_line_is_refused_by_file_and_line(tmp_path, line, said):
    path = write_jsonl(tmp_path / "a.jsonl", ["fine"] * 30)
    path.write_text(path.read_text() + line + "\n" + '{"text": "fine"}\n')
    with pytest.raises(InputError) as caught:
        build(path, tmp_path / "out", unit_bytes=64)
    assert said in str(caught.value)


def test_ready_tokens_of_jsonl_are_kept_as_they_are(tmp_path):
    rows = [[5, 70_000], [1], [2, 3, 4]]
    store = build(write_jsonl(tmp_path / "a.jsonl", rows, field="ids"), tmp_path / "out", field="ids", unit_bytes=16)
    assert [store.tokens(id).tolist() for id in range(3)] == rows
    assert (store.vocab_size, store.eos_id, store.info["dtype"]) == (70_001, None, "uint32")


@pytest.mark.parametrize("value", ["text", [1.5], [[1], [2, 3]], [-1], [1 << 32], {"a": 1}])
def test_what_is_no_list_of_token_ids_is_refused_by_line(tmp_path, value):
    path = write_jsonl(tmp_path / "a.jsonl", [[1, 2], value])
    with pytest.raises(InputError, match=r"a\.jsonl:2"):
        build(path, tmp_path / "out")


def test_parquet_text_and_tokens_are_read_row_by_row(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    texts = [f"row {row} é" for row in range(50)]
    tokens = [list(range(1, 2 + row % 7)) for row in range(50)]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": texts, "ids": tokens}), path, row_group_size=8)
    text_store = build(path, tmp_path / "text", unit_bytes=100)
    assert texts_of(text_store) == [text.encode() for text in texts]
    assert places_of(text_store)[20] == {"source": "a.parquet", "row": 20}
    token_store = build(path, tmp_path / "ids", field="ids", unit_bytes=100)
    assert [token_store.tokens(id).tolist() for id in range(50)] == tokens
    assert token_store.info["dtype"] == "uint8"


def test_parquet_nulls_are_empty_documents(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", None], "ids": [[1], None]}), path)
    for field in ("text", "ids"):
        with pytest.raises(InputError, match=r"a\.parquet, row 1 is empty"):
            build(path, tmp_path / f"{field}-refused", field=field)
        assert build(path, tmp_path / field, field=field, on_empty="drop").info["ledger"]["empty"] == 1


def test_parquet_columns_that_cannot_be_used_are_refused(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": [1.5], "n": [[1, None]], "neg": [[-1]]}), path)
    for field, said in (("y", "columns: x, n, neg"), ("x", "neither text"), ("n", "missing values"), ("neg", "id -1")):
        with pytest.raises(InputError, match=said):
            build(path, tmp_path / field, field=field)
    path.write_bytes(b"not parquet")
    with pytest.raises(InputError, match="not a Parquet file"):
        build(path, tmp_path / "out")


def test_npy_is_an_index_of_lengths_alone(tmp_path):
    lengths = np.array([3, 1, 2_000_000], dtype=np.int64)
    np.save(tmp_path / "lengths.npy", lengths)
    store = build(tmp_path / "lengths.npy", tmp_path / "out", unit_bytes=8)
    assert store.lengths.lengths.tolist() == lengths.tolist() and not store.has_tokens
    for ask in (lambda: store.tokens(0), lambda: store.vocab_size):
        with pytest.raises(InputError, match="lengths alone"):
            ask()


@pytest.mark.parametrize(
    "array", [np.ones((2, 2), dtype=int), np.ones(3), np.array([1, -2]), np.array([1, 0]), np.array([], dtype=int)]
)
def test_npy_that_is_no_row_of_lengths_is_refused(tmp_path, array):
    np.save(tmp_path / "lengths.npy", array)
    with pytest.raises(InputError):
        build(tmp_path / "lengths.npy", tmp_path / "out")


def test_a_file_that_is_no_text_is_refused_or_counted(tmp_path):
    files = {"a.txt": b"a", "b.bin": b"x\0y", "c.txt": b"\xff\xfe", "empty.txt": b""}
    source = write_tree(tmp_path / "src", files)
    (source / "gone.txt").symlink_to("nowhere")
    with pytest.raises(InputError, match=r"b\.bin is a binary file.*--on-binary skip.*--glob"):
        build(source, tmp_path / "refused")
    ledger = build(source, tmp_path / "out", on_binary="skip").info["ledger"]
    counts = {key: ledger[key] for key in ("documents", "empty", "binary", "undecodable", "unreadable")}
    assert counts == {"documents": 5, "empty": 1, "binary": 1, "undecodable": 1, "unreadable": 1}
    assert ledger["examples"]["binary"] == ["b.bin"]


def test_rows_that_are_left_out_are_named_by_file_and_row(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    source = tmp_path / "src"
    source.mkdir()
    write_jsonl(source / "a.jsonl", ["one", "", *["fine"] * 20, "\ud800", ""])
    write_jsonl(source / "b.jsonl", ["\ud800"] * 9 + ["", "two"])
    for unit_bytes in (64, 1 << 20):
        store = build(source, tmp_path / f"{unit_bytes}", unit_bytes=unit_bytes, on_binary="skip", on_empty="drop")
        ledger = store.info["ledger"]
        assert (ledger["documents"], ledger["empty"], ledger["undecodable"], len(store)) == (35, 3, 10, 22)
        assert ledger["examples"]["empty"] == ["a.jsonl:2", "a.jsonl:24", "b.jsonl:10"]
        assert ledger["examples"]["undecodable"] == ["a.jsonl:23", *(f"b.jsonl:{line}" for line in range(1, 5))]
    pq.write_table(pa.table({"text": ["a", None, "b", None]}), tmp_path / "a.parquet", row_group_size=2)
    ledger = build(tmp_path / "a.parquet", tmp_path / "table", unit_bytes=1, on_empty="drop").info["ledger"]
    assert ledger["examples"]["empty"] == ["a.parquet, row 1", "a.parquet, row 3"]
    (tmp_path / "a.fa").write_text(">x\nACGT\n>y\n\n>z\nA\u00e9\n")
    ledger = build(tmp_path / "a.fa", tmp_path / "fasta", unit_bytes=4, on_empty="drop", on_binary="skip").info[
        "ledger"
    ]
    assert ledger["examples"] == {"empty": ["a.fa, record 1"], "undecodable": ["a.fa, record 2"]}


def test_names_of_files_that_a_build_of_an_earlier_version_remembered_stay():
    skipped = SkippedDocuments()
    for names in (["a.jsonl"], ["a.jsonl", "b.jsonl"]):
        skipped.merge({"documents": 3, "empty": 1, "examples": {"empty": names}}, lambda file, row: "")
    assert skipped.examples["empty"] == ["a.jsonl", "b.jsonl"]


@pytest.mark.parametrize("first", ["[1, null, 3]", "[null]", '[1, "a"]', "[[1, 2]]", "[1, 2.5]"])
def test_a_first_row_whose_list_is_no_list_of_tokens_is_refused_as_a_later_one_is(tmp_path, first):
    (tmp_path / "a.jsonl").write_text(f'{{"input_ids": {first}}}\n')
    for name, field in (("named", {"field": "input_ids"}), ("found", {})):
        with pytest.raises(InputError, match=r"a\.jsonl:1: 'input_ids' must be a list of whole numbers"):
            build(tmp_path / "a.jsonl", tmp_path / name, **field)


def test_a_length_beyond_all_limits_is_refused_as_it_is_in_the_file(tmp_path):
    np.save(tmp_path / "a.npy", np.array([3, 2**63 + 5], dtype=np.uint64))
    with pytest.raises(InputError, match=r"a\.npy, row 1 is 9,223,372,036,854,775,813; more than"):
        build(tmp_path / "a.npy", tmp_path / "out")


def test_a_corpus_without_any_token_is_refused(tmp_path):
    source = write_tree(tmp_path / "src", {"a.txt": b""})
    with pytest.raises(InputError, match=r"holds no sequence: all documents are left out \(1 empty\)"):
        build(source, tmp_path / "out")


def test_text_before_the_first_fasta_header_is_refused(tmp_path):
    (tmp_path / "a.fa").write_text("ACGT\n>x\nACGT\n")
    with pytest.raises(InputError, match="not FASTA"):
        build(tmp_path / "a.fa", tmp_path / "out")


def test_a_file_that_changed_since_it_was_listed_is_refused(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("before")
    unit = split_units(find_sources(path, out=tmp_path / "out"), unit_bytes=64)[0]
    path.write_text("after that")
    job = PartJob(
        parts=str(tmp_path / "parts"),
        tokenizer=TokenizerSpec(kind="bytes"),
        fields=RowFields(),
        drop_empty=True,
        skip_binary=True,
    )
    with pytest.raises(InputError, match="changed while it was indexed"):
        build_part(job, unit)


def test_a_folder_of_mixed_formats_needs_a_choice(tmp_path):
    source = write_tree(tmp_path / "src", {"a.jsonl": b'{"text": "a"}\n', "b.txt": b"b"})
    with pytest.raises(InputError, match=r"1 jsonl, 1 text.*--glob.*--format text"):
        build(source, tmp_path / "out")
    assert texts_of(build(source, tmp_path / "shards", globs=("*.jsonl",))) == [b"a"]
    assert len(build(source, tmp_path / "texts", format=Format.TEXT)) == 2
