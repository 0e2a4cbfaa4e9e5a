"""Tar shards: members of a sample belong together wherever units are cut, and a damaged archive is never read short."""

import gzip
import io
import json
import tarfile

import pytest

from lengthwise.core.errors import InputError
from lengthwise.index.readers.documents_reader import read_documents
from lengthwise.index.readers.webdataset import tar_samples
from lengthwise.index.sources import find_sources
from lengthwise.index.work_units import split_units
from tests.index.build import build, places_of, texts_of

TEXTS = [f"text {number} é\n" * (1 + number % 9) for number in range(60)]


def write_tar(path, members, *, format=tarfile.PAX_FORMAT):
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = "w:gz" if path.name.endswith("gz") else "w"
    with tarfile.open(path, mode, format=format) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def samples(texts, *, folder=""):
    for number, text in enumerate(texts):
        document = json.dumps({"text": text, "ids": [number, 1]}).encode()
        yield from (
            (f"{folder}{number:03d}.{kind}", data) for kind, data in (("json", document), ("TXT", text.encode()))
        )
        yield f"{folder}{number:03d}.seg.txt", b"another field"


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("folder", ["", "é/" + "long/" * 22, "x" * 90 + "/" + "y" * 90 + "/"])
def test_samples_do_not_depend_on_where_units_are_cut(tmp_path, format, folder):
    if format == tarfile.USTAR_FORMAT and len(folder) > 150:
        folder = folder[:140] + "/"
    path = write_tar(tmp_path / "a.tar", samples(TEXTS, folder=folder), format=format)
    assert len(split_units(find_sources(path, out=tmp_path / "out"), unit_bytes=2000)) > 20
    for unit_bytes in (1, 9000, 1 << 20):
        units = split_units(find_sources(path, out=tmp_path / "out"), unit_bytes=unit_bytes)
        documents = [document for unit in units for document in read_documents(unit, field="txt")]
        assert [document.data.decode() for document in documents] == TEXTS
    store = build(path, tmp_path / "out", unit_bytes=9000)
    assert places_of(store) == [{"source": "a.tar", "sample": number} for number in range(60)]


def test_a_folder_of_shards_plain_and_compressed_is_read_in_order(tmp_path):
    source = tmp_path / "src"
    write_tar(source / "0.tar", samples(TEXTS[:20]))
    write_tar(source / "1.tar.gz", samples(TEXTS[20:40]))
    write_tar(source / "2.tgz", samples(TEXTS[40:]))
    store = build(source, tmp_path / "out", unit_bytes=3000)
    assert texts_of(store) == [text.encode() for text in TEXTS]
    assert places_of(store)[20] == {"source": "1.tar.gz", "sample": 0}
    assert texts_of(build(source, tmp_path / "json", field="json:text", unit_bytes=3000)) == texts_of(store)
    assert texts_of(build(source, tmp_path / "seg", field="seg.txt")) == [b"another field"] * 60
    ids = build(source, tmp_path / "ids", field="json:ids", unit_bytes=3000)
    assert [ids.tokens(id).tolist() for id in range(60)] == [[number, 1] for part in range(3) for number in range(20)]


def test_members_that_are_no_samples_are_passed_over(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        for name, kind in (("folder", tarfile.DIRTYPE), ("link.md", tarfile.SYMTYPE), ("README", tarfile.REGTYPE)):
            info = tarfile.TarInfo(name)
            info.type = kind
            archive.addfile(info, io.BytesIO())
        for name in (".hidden", "__meta.info__", "folder/a.txt", "folder/b.txt"):
            info = tarfile.TarInfo(name)
            info.size = 2
            archive.addfile(info, io.BytesIO(b"ok"))
    assert texts_of(build(path, tmp_path / "out", unit_bytes=600)) == [b"ok", b"ok"]


@pytest.mark.parametrize(
    ("member", "field", "said"),
    [
        (("030.txt", b""), "", r"sample 30 \(030\) is empty"),
        (("030.txt", b"\xff"), "", r"sample 30 \(030\) is not text in UTF-8"),
        (("030.txt", b"a\0"), "", r"sample 30 \(030\) is binary .*leave such documents out"),
        (("030.cls", b"1"), "", r"sample 30 \(030\) has no member \.txt, only \.cls; choose with --field"),
        (("030.json", b"{"), "json:text", r"sample 30 \(030\) is not JSON"),
        (("030.json", b"[1]"), "json:text", r"sample 30 \(030\): expected a JSON object, found list"),
        (("030.json", b"{}"), "json:text", r"sample 30 \(030\) has no field 'text'"),
        (("030.json", b'{"text": [1]}'), "json:text", r"sample 30 \(030\): expected text, found list"),
        (("029.txt", b"again"), "", r"two members of sample '029' are named \.txt"),
    ],
)
def test_a_bad_sample_is_refused_by_archive_and_sample(tmp_path, member, field, said):
    kind = "json" if field else "txt"
    good = b'{"text": "fine"}' if field else b"fine"
    members = [(f"{number:03d}.{kind}", good) for number in range(40)]
    members[30] = member
    for path in (write_tar(tmp_path / "a.tar", members), write_tar(tmp_path / "a.tar.gz", members)):
        with pytest.raises(InputError, match=rf"a\.tar(\.gz)?[,:] {said}"):
            build(path, tmp_path / "out", field=field, unit_bytes=5000)


def test_samples_that_hold_no_text_are_dropped_and_counted_on_request(tmp_path):
    path = write_tar(tmp_path / "a.tar", [("a.txt", b"a"), ("b.txt", b""), ("c.txt", b"\xff"), ("d.txt", b"d")])
    ledger = build(path, tmp_path / "out", on_empty="drop", on_binary="skip", unit_bytes=600).info["ledger"]
    assert (ledger["documents"], ledger["empty"], ledger["undecodable"]) == (4, 1, 1)


def test_an_archive_cut_anywhere_is_refused(tmp_path):
    members = [("a.txt", b"a" * 700), ("b.txt", b"b" * 700)]
    plain = write_tar(tmp_path / "whole.tar", members).read_bytes()
    path = tmp_path / "a.tar"
    for size in (0, 300, 512, 600, 1536, 1800, 2048, 2500, 3072):  # headers at 0 and 1536, the end mark at 3072
        path.write_bytes(plain[:size])
        with pytest.raises(InputError, match=r"a\.tar is cut off"):
            build(path, tmp_path / "out", unit_bytes=1000)
    packed = gzip.compress(plain)
    path = tmp_path / "a.tar.gz"
    for wrong in (packed[:30], packed[:-1], packed[:-9], packed[:40] + b"!" + packed[41:], b"no gzip"):
        path.write_bytes(wrong)
        with pytest.raises(InputError, match=r"a\.tar\.gz"):
            build(path, tmp_path / "out")


def test_a_compressed_archive_with_any_wrong_byte_is_refused(tmp_path):
    path = write_tar(tmp_path / "a.tar.gz", samples(TEXTS))
    whole = path.read_bytes()
    for at in range(20, len(whole) - 8, 41):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        with pytest.raises(InputError, match=r"a\.tar\.gz"):
            list(tar_samples(find_sources(path, out=tmp_path / "out").files[0], extension="txt"))


def test_a_damaged_archive_is_not_read_short(tmp_path):
    whole = write_tar(tmp_path / "a.tar", [(f"{number}.txt", b"text") for number in range(6)])
    data = bytearray(whole.read_bytes())
    data[2 * 1024 + 5] ^= 1  # the header of the third member
    whole.write_bytes(data)
    with pytest.raises(InputError, match=r"a\.tar has no tar header at byte 2,048"):
        build(whole, tmp_path / "out")
    path = write_tar(tmp_path / "b.tar", [("a.txt", b"a")])
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(InputError, match=r"b\.tar goes on after its end mark at byte 1,024"):
        build(path, tmp_path / "out")
    (tmp_path / "c.tar").write_bytes(b"no archive" * 200)
    with pytest.raises(InputError, match=r"c\.tar has no tar header at byte 0"):
        build(tmp_path / "c.tar", tmp_path / "out")
