"""JSON lines and FASTA under gzip and zstd: the index is that of the unpacked file; damage and bombs are refused."""

import gzip
import json
import random
import sys

import pyarrow as pa
import pytest

from lengthwise.core.errors import InputError
from lengthwise.index.document_limits import FREE_BYTES, Limits
from lengthwise.index.readers.compressed import open_unpacked
from lengthwise.index.source_file import source_file
from tests.index.build import build, places_of, texts_of

TEXTS = [f"text {number} " * (1 + number % 7) for number in range(300)]
JSONL = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
FASTA = "".join(f">{number}\n{'ACGT' * (number % 9)}\nNN\n" for number in range(40)).encode()


def zstd(data: bytes, path) -> bytes:
    with pa.CompressedOutputStream(pa.OSFile(str(path), "wb"), "zstd") as out:
        out.write(data)
    return path.read_bytes()


def packed(data: bytes, suffix: str, path) -> bytes:
    return gzip.compress(data) if suffix == "gz" else zstd(data, path)


@pytest.mark.parametrize("suffix", ["gz", "zst", "GZ"])
@pytest.mark.parametrize(("name", "data"), [("a.jsonl", JSONL), ("a.fa", FASTA), ("a.fna", FASTA)])
def test_the_index_is_that_of_the_unpacked_file(tmp_path, name, data, suffix):
    (tmp_path / name).write_bytes(data)
    middle = data.index(b"\n", len(data) // 2) + 1  # as pigz, bgzip and `cat a.gz b.gz` write it: in several parts
    parts = [packed(part, suffix.lower(), tmp_path / "part") for part in (data[:middle], data[middle:])]
    (tmp_path / f"{name}.{suffix}").write_bytes(b"".join(parts))
    plain, unpacked = (
        build(tmp_path / file, tmp_path / f"{file} index", unit_bytes=200) for file in (name, f"{name}.{suffix}")
    )
    assert texts_of(unpacked) == texts_of(plain)
    same = [{**place, "source": name} for place in places_of(unpacked)]
    assert same == places_of(plain)


def test_a_folder_may_mix_packed_and_unpacked_files(tmp_path):
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "0.jsonl").write_bytes(JSONL)
    (folder / "1.jsonl.gz").write_bytes(gzip.compress(JSONL))
    zstd(JSONL, folder / "2.jsonl.zst")
    assert texts_of(build(folder, tmp_path / "out")) == 3 * [text.encode() for text in TEXTS]


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_damaged_files_are_refused_by_name(tmp_path, suffix):
    noise = random.Random(0).randbytes(3000).hex()
    data = packed(json.dumps({"text": noise}).encode(), suffix, tmp_path / "part")
    path = tmp_path / f"a.jsonl.{suffix}"
    for wrong in (data[: len(data) // 2], data[:-1], b"not packed at all\n", data[:20] + b"!!!!" + data[24:]):
        path.write_bytes(wrong)
        with pytest.raises(InputError, match=rf"a\.jsonl\.{suffix} is cut off or damaged: .*; write it again"):
            build(path, tmp_path / "out")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_what_unpacks_to_far_more_than_its_size_is_refused(tmp_path, suffix):
    path = tmp_path / f"a.jsonl.{suffix}"
    path.write_bytes(packed(b"\n" * (4 << 20), suffix, tmp_path / "part"))
    file = source_file(path, path.name)
    limits = Limits(ratio=2)
    assert limits.unpacked(file.size) == FREE_BYTES
    with open_unpacked(file, limits) as opened:
        assert len(opened.read()) == 4 << 20
    with pytest.MonkeyPatch.context() as patch, open_unpacked(file, limits) as opened:
        patch.setattr("lengthwise.index.document_limits.FREE_BYTES", 1 << 20)
        with pytest.raises(InputError, match=rf"a\.jsonl\.{suffix} .* unpacks to .* raise --max-ratio"):
            opened.read()


def test_zstd_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl.zst"
    zstd(JSONL, path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=r"reading zstd .*lengthwise\[data\]"):
        build(path, tmp_path / "out")
