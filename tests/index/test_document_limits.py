"""Limits of a document and an archive, files that are not what they were, and corpora that are odd but sound."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lengthwise.core.errors import InputError
from lengthwise.index.readers import document as documents
from lengthwise.index.readers import documents_reader as read
from lengthwise.index.readers.compressed import open_unpacked
from lengthwise.index.readers.documents_reader import read_documents
from lengthwise.index.source_file import SourceFile, check_unchanged, open_source
from lengthwise.index.sources import find_sources
from lengthwise.index.work_units import split_units
from tests.data.bad_corpora import END, GOOD, header, in_base_256, member, sample_archive
from tests.index.build import build, places_of, texts_of, write_jsonl, write_tree


def all_documents(path, *, unit_bytes, **options):
    units = split_units(find_sources(path, out=path.parent / "out"), unit_bytes=unit_bytes)
    return [document for unit in units for document in read_documents(unit, field="text", **options)]


def test_documents_over_the_limit_are_skipped_and_counted_on_request(tmp_path):
    texts = ["a", "b" * 500, "c"]
    write_jsonl(tmp_path / "a.jsonl", texts)
    (tmp_path / "a.tar").write_bytes(
        b"".join(member(f"{n}.txt".encode(), t.encode()) for n, t in enumerate(texts)) + END
    )
    (tmp_path / "a.fa").write_text("".join(f">{n}\n{text}\n" for n, text in enumerate(texts)))
    write_tree(tmp_path / "texts", {f"{n}.txt": text.encode() for n, text in enumerate(texts)})
    for name in ("a.jsonl", "a.tar", "a.fa", "texts"):
        store = build(tmp_path / name, tmp_path / f"{name}-index", max_document=100, on_large="skip", unit_bytes=64)
        assert texts_of(store) == [b"a", b"c"]
        assert (store.info["ledger"]["documents"], store.info["ledger"]["large"]) == (3, 1)
    assert [place["line"] for place in places_of(build(tmp_path / "a.jsonl", tmp_path / "a.jsonl-index",
            max_document=100, on_large="skip", unit_bytes=64))] == [1, 3]  # fmt: skip
    ids = write_jsonl(tmp_path / "ids.jsonl", [[1], [2] * 500, [3]], field="ids")
    store = build(ids, tmp_path / "ids", field="ids", max_document=100, on_large="skip", unit_bytes=64)
    assert [store.tokens(id).tolist() for id in range(2)] == [[1], [3]] and store.info["ledger"]["large"] == 1


def test_rows_over_the_limit_are_skipped_and_counted_on_request(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["a", "b" * 500, "c"]}), tmp_path / "a.parquet")
    store = build(tmp_path / "a.parquet", tmp_path / "out", max_document=100, on_large="skip")
    assert texts_of(store) == [b"a", b"c"] and store.info["ledger"]["large"] == 1


@pytest.mark.parametrize("name", ["a.jsonl", "a.fa"])
def test_a_line_across_many_units_is_read_once_not_once_for_every_unit(tmp_path, monkeypatch, name):
    """What is read is counted for one long line of n units and of 4 n: four times as much, not sixteen."""
    counts = []

    def counting(file, limits):
        opened = open_unpacked(file, limits)

        class Counting:
            def __getattr__(self, attribute):
                return getattr(opened, attribute)

            def __enter__(self):
                return self

            def __exit__(self, *error):
                opened.close()

            def readline(self, size=-1):
                line = opened.readline(size)
                counts[-1] += len(line)
                return line

        return Counting()

    monkeypatch.setattr(read, "open_unpacked", counting)
    for length in (20_000, 80_000):
        line = json.dumps({"text": "x" * length}) if name == "a.jsonl" else ">record\n" + "A" * length
        (tmp_path / name).write_text(line + "\n")
        counts.append(0)
        (document,) = all_documents(tmp_path / name, unit_bytes=100)
        assert len(document.data) == length
    assert counts[1] < 5 * counts[0] and counts[1] < 4 * 80_000


def test_places_behind_a_long_line_are_counted_in_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "_BLOCK_BYTES", 7)
    texts = ["a", "b" * 300, "c", ""]
    with pytest.raises(InputError, match=r"a\.jsonl:4 is empty"):
        build(write_jsonl(tmp_path / "a.jsonl", texts), tmp_path / "out", unit_bytes=50)
    (tmp_path / "a.fa").write_text(">a\nAC\n>b\n" + "G>T\n" * 30 + ">c\n" + "T" * 90 + "\n>d\n")
    for unit_bytes in (20, 50, 1000):
        with pytest.raises(InputError, match=r"a\.fa, record 3 is empty"):
            build(tmp_path / "a.fa", tmp_path / "out", unit_bytes=unit_bytes, on_binary="skip")


def test_odd_but_sound_json_lines_are_taken(tmp_path):
    lines = [
        b'\xef\xbb\xbf{"text": "byte order mark"}',
        b'{"text": "carriage return"}\r',
        b"",
        b'{"text": "another \\"text\\": of text", "x": {"text": "inside"}}',
        b'{"text": "nan", "x": [NaN, -Infinity, 1e999], "y": ' + b"9" * 4000 + b"}",
        b'{"text": "NUL \\u0000 and a pair \\ud83d\\ude00"}',
        b'{"text": "nested", "x": ' + b"[" * 500 + b"]" * 500 + b"}",
        b'{"text": "no newline at the end"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    for unit_bytes in (64, 1 << 20):
        texts = texts_of(build(tmp_path / "a.jsonl", tmp_path / f"{unit_bytes}", unit_bytes=unit_bytes))
        assert [text.split()[0] for text in texts] == [
            b"byte",
            b"carriage",
            b"another",
            b"nan",
            b"NUL",
            b"nested",
            b"no",
        ]


def test_odd_but_sound_archives_are_taken(tmp_path):
    (tmp_path / "a.tar").write_bytes(
        member(b"v", b"", b"V") + member(b"g", b"12 comment=x\n", b"g") + header(b"d/", 0, b"5")
        + member(b"/abs/../a.txt", b"one") + member(b"b.jpg", b"\xff") + member(b"b.txt", b"two")
        + member(b"././@LongLink", b"long/" * 60 + b"c.txt\0", b"L") + member(b"short", b"three")
        + header(b"e.txt", in_base_256(4)) + b"four" + bytes(508) + END + bytes(9000)
    )  # fmt: skip
    assert texts_of(build(tmp_path / "a.tar", tmp_path / "out")) == [b"one", b"two", b"three", b"four"]
    (tmp_path / "b.tar.gz").write_bytes(gzip.compress(sample_archive(["a.txt"])) + gzip.compress(bytes(4 << 20)))
    assert texts_of(build(tmp_path / "b.tar.gz", tmp_path / "b")) == [b"text"]


def test_records_of_a_pax_header_are_read_in_one_pass(tmp_path):
    names = b"".join(b"14 comment=ab\n" for _ in range(40_000))
    (tmp_path / "a.tar").write_bytes(member(b"p", names, b"x") + GOOD + END)
    assert texts_of(build(tmp_path / "a.tar", tmp_path / "out")) == [b"fine"]


def test_an_archive_may_unpack_to_so_many_times_its_size(tmp_path, monkeypatch):
    monkeypatch.setattr("lengthwise.index.document_limits.FREE_BYTES", 1 << 16)
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(member(b"a.txt", b"text") + END + bytes(2 << 20)))
    with pytest.raises(InputError, match=r"a\.tar\.gz \(.* unpacks to .* or more; .* allowed, 250 times.*--max-ratio"):
        build(path, tmp_path / "out")
    assert texts_of(build(path, tmp_path / "out", max_ratio=2000)) == [b"text"]


def test_a_usual_limit_does_not_change_what_an_index_is_known_by(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["a"])
    request = build(path, tmp_path / "out").info["request"]
    assert not {"max_document", "on_large", "max_ratio"} & set(request)
    with pytest.raises(InputError, match="max_document: None then, 1000 now"):
        build(path, tmp_path / "out", max_document=1000)
    build(path, tmp_path / "other", max_document=1000)
    with pytest.raises(InputError, match="max_document: 1000 then, None now"):
        build(path, tmp_path / "other")


def test_a_pipe_that_took_the_place_of_a_file_is_refused_without_waiting(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("{}")
    (file,) = find_sources(path, out=tmp_path / "out").files
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(InputError, match=r"a\.jsonl cannot be read: it is no regular file"):
        open_source(file)
    with pytest.raises(InputError, match="changed while it was indexed"):
        check_unchanged(file)


def test_a_file_that_was_written_to_at_the_same_size_is_refused(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["before"])
    file: SourceFile = find_sources(path, out=tmp_path / "out").files[0]
    check_unchanged(file)
    os.utime(path, ns=(file.mtime_ns, file.mtime_ns + 1))
    with pytest.raises(InputError, match="was written to while it was indexed"):
        check_unchanged(file)


def test_a_file_that_vanishes_is_refused_by_name(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["before"])
    units = split_units(find_sources(path, out=tmp_path / "out"), unit_bytes=64)
    path.unlink()
    with pytest.raises(InputError, match=r"a\.jsonl cannot be read: No such file"):
        list(read_documents(units[0], field="text"))


def test_a_folder_that_cannot_be_read_is_refused_not_passed_over(tmp_path, monkeypatch):
    write_tree(tmp_path / "src", {"a.txt": b"a", "closed/b.txt": b"b"})
    scandir = os.scandir

    def closed(folder):
        if Path(folder).name == "closed":
            raise PermissionError(13, "Permission denied", folder)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(InputError, match=r"the folder .*closed cannot be read: Permission denied"):
        build(tmp_path / "src", tmp_path / "out")


@pytest.mark.parametrize("stride", [23, pytest.param(1, marks=pytest.mark.deep)])
@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_no_wrong_byte_of_a_table_ends_a_process(tmp_path, kind, stride):
    """Bytes of a small file, one after another, in a process of its own: an index or an error, never a crash."""
    pytest.importorskip("pyarrow")
    command = [sys.executable, "-c", FLIP, kind, str(tmp_path), str(stride)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.split() == ["some", "refused"], (done.returncode, done.stderr[-2000:])


FLIP = """
import sys
from pathlib import Path
import pyarrow as pa
import pyarrow.parquet as pq
from lengthwise.core.errors import InputError
from lengthwise.index.readers.documents_reader import read_documents, read_token_rows
from lengthwise.index.sources import find_sources
from lengthwise.index.work_units import split_units

kind, folder, stride = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
words = pa.array(["one", "two"] * 9).dictionary_encode()
table = pa.table({"text": words, "plain": ["a", "bc"] * 9, "ids": [[1, 2], [3]] * 9})
path = folder / f"a.{kind}"
if kind == "parquet":
    pq.write_table(table, path)
else:
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)
whole, refused = path.read_bytes(), 0
for at in range(0, len(whole), stride):
    path.write_bytes(whole[:at] + bytes([whole[at] ^ (0xFF if at % 2 else 0x81)]) + whole[at + 1 :])
    for field, read in (("text", read_documents), ("plain", read_documents), ("ids", read_token_rows)):
        try:
            for unit in split_units(find_sources(path, out=folder / "out"), unit_bytes=1 << 20):
                for row in read(unit, field=field):
                    pass
        except InputError:
            refused += 1
print("some refused" if refused else "none refused")
"""


def make_line(path, num_bytes):
    with path.open("wb") as lines:
        lines.write(b'{"text": "fine"}\n{"text": "')
        for _ in range(num_bytes >> 20):
            lines.write(b"x" * (1 << 20))
        lines.write(b'"}\n{"text": "fine"}\n')


def make_bomb(path, num_bytes):
    block = gzip.compress(bytes(64 << 20), 9)
    path.write_bytes(gzip.compress(GOOD) + block * (num_bytes // (64 << 20)))


@pytest.mark.deep
@pytest.mark.parametrize(
    ("make", "name", "num_bytes", "options", "said"),
    [
        (make_line, "a.jsonl", 1 << 30, [], "a.jsonl:2 has 1,073,741,837 bytes, and a document may have 268,435,456"),
        (make_line, "a.jsonl", 1 << 30, ["--on-large", "skip"], "left out: 1 document (large), such as a.jsonl:1"),
        (make_line, "a.jsonl", 200 << 20, [], "3 sequences, 209,715,"),
        (make_bomb, "a.tar.gz", 20 << 30, [], "unpacks to"),
    ],
)
def test_gigabytes_are_refused_or_read_in_bounded_memory(tmp_path, make, name, num_bytes, options, said):
    make(tmp_path / name, num_bytes)
    command = ["-m", "lengthwise", "index", tmp_path / name, "--out", tmp_path / "out", "--workers", "1", *options]
    limited = f"import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_AS, ({6 << 30}, {6 << 30})); "
    limited += "sys.argv = sys.argv[2:]; runpy.run_module('lengthwise', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", limited, *map(str, command)], capture_output=True, text=True)
    assert said in done.stderr and "Traceback" not in done.stderr, done.stderr[-2000:]
