"""Corpora that cannot be indexed as they are: tables, lengths, FASTA, tokenizers and options."""

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from tests.data.bad_corpora import Case, Words, file, npy


def _npy(array: np.ndarray) -> Callable[[Path], Words]:
    def make(folder: Path) -> Words:
        np.save(folder / "a.npy", array, allow_pickle=True)
        return [folder / "a.npy"]

    return make


def lengths_cases() -> Iterator[Case]:
    """Rows of lengths."""
    arrays = {
        "two rows": (np.ones((2, 2), dtype=int), r"must hold one row of integers"),
        "one number": (np.array(5), r"must hold one row of integers"),
        "fractions": (np.ones(3), r"must hold one row of integers"),
        "booleans": (np.ones(3, dtype=bool), r"must hold one row of integers"),
        "times": (np.ones(3, dtype="m8[s]"), r"must hold one row of integers"),
        "texts": (np.array(["a"]), r"must hold one row of integers"),
        "records": (np.zeros(2, dtype=[("a", "i4")]), r"must hold one row of integers"),
        "objects": (np.array([1, None], dtype=object), r"a\.npy is not a \.npy array of numbers"),
        "none": (np.array([], dtype=np.int64), r"holds no sequence"),
        "a negative one": (np.array([4, -1]), r"a\.npy, row 1 is -1"),
        "zero": (np.array([4, 0]), r"a\.npy, row 1 is empty"),
        "2^62": (np.array([1, 1 << 62]), r"a\.npy, row 1 is 4,611,686,018,427,387,904; more than"),
        "2^64 - 1": (np.array([1, 2**64 - 1], dtype=np.uint64), r"a\.npy, row 1 is .*; more than"),
    }
    for name, (array, said) in arrays.items():
        yield Case(f"npy: {name}", _npy(array), said)
    heads = {
        "2^62 counted": "{'descr': '<i8', 'fortran_order': False, 'shape': (4611686018427387904,), }",
        "2^70 counted": "{'descr': '<i8', 'fortran_order': False, 'shape': (1180591620717411303424,), }",
        "-1 counted": "{'descr': '<i8', 'fortran_order': False, 'shape': (-1,), }",
        "a type that is none": "{'descr': 'zz', 'fortran_order': False, 'shape': (1,), }",
        "a header that is no dictionary": "[1]",
        "a header that is no Python": "{'descr'",
        "a header of brackets": "[" * 110,
        "keys missing": "{'descr': '<i8'}",
    }
    for name, head in heads.items():
        yield Case(f"npy: {name}", file("a.npy", npy(head)), r"a\.npy is not a \.npy array of numbers")
    for name, data in {"nothing": b"", "not npy": b"hello" * 50, "zip": b"PK\x03\x04" + bytes(60)}.items():
        yield Case(f"npy: {name}", file("a.npy", data), r"a\.npy is not a \.npy array of numbers")


def fasta_cases() -> Iterator[Case]:
    """DNA."""
    yield Case("fasta: text first", file("a.fa", b"ACGT\n>x\nAC\n"), r"a\.fa is not FASTA")
    yield Case("fasta: no record", file("a.fa", b"\n\n"), r"holds no sequence")
    yield Case("fasta: a header alone", file("a.fa", b">x\n"), r"record 0 is empty")
    yield Case("fasta: an empty record", file("a.fa", b">x\nAC\n>y\n>z\nAC\n"), r"record 1 is empty")
    yield Case(
        "fasta: not ASCII", file("a.fa", b">x\nAC\n>y\n\xff\xfe\n"), r"record 1 holds a letter that is not ASCII"
    )
    large = file("a.fa", b">x\nAC\n>y\n" + b"ACGT\n" * 9, "--max-document", 30)
    yield Case("fasta: too large a record", large, r"record 1 has 36 bytes, and a document may have 30")
    for name in ("0mer", "13mer", "6mer/0", "6mer/7"):
        yield Case(f"fasta: {name}", file("a.fa", b">x\nAC\n", "--tokenizer", name), rf"--tokenizer {name}")


def _pair(folder: Path, *, head=b"MMIDIDX\x00\x00", version=1, code=4, sizes=(2, 1), pointers=None, bounds=(0, 1, 2),
          counts=None, data=None) -> Words:  # fmt: skip
    sizes = np.array(sizes, dtype="<i4")
    pointers = np.cumsum(sizes, dtype="<i8") * 4 - 4 * sizes if pointers is None else np.array(pointers, dtype="<i8")
    bounds = np.array(bounds, dtype="<i8")
    begin = struct.pack("<9sQBQQ", head, version, code, *(counts or (len(sizes), len(bounds))))
    (folder / "a.idx").write_bytes(begin + sizes.tobytes() + pointers.tobytes() + bounds.tobytes())
    (folder / "a.bin").write_bytes(np.arange(3, dtype="<i4").tobytes() if data is None else data)
    return [folder / "a.idx"]


def megatron_cases() -> Iterator[Case]:
    """Pairs of .bin and .idx."""
    most, least = (1 << 63) - 1, -(1 << 63)
    wrong: dict[str, tuple[dict, str]] = {
        "a wrong magic": ({"head": b"NONSENSE!"}, r"does not start with MMIDIDX"),
        "the old magic": ({"head": b"TNTIDX\x00\x00\x00"}, r"old TNTIDX"),
        "version 2^62": ({"version": 1 << 62}, r"version 4611686018427387904"),
        "a type that is none": ({"code": 99}, r"unknown type code 99"),
        "fractions": ({"code": 7}, r"type code 7 \(float32\)"),
        "2^62 sequences": ({"counts": (1 << 62, 3)}, r"a\.idx has \d+ bytes, but 4,611,686,018,427,387,904 sequences"),
        "2^64 - 1 documents": ({"counts": (2, (1 << 64) - 1)}, r"18,446,744,073,709,551,615 document"),
        "a negative size": ({"sizes": (4, -1)}, r"stored sequence 1 has -1 tokens"),
        "sequences that overlap": ({"pointers": (0, 4)}, r"stored sequence 1 starts at byte 4 .* end at 8"),
        "a pointer beyond the file": ({"pointers": (0, 1 << 62)}, r"stored sequence 1 starts at byte 4,611"),
        "documents backwards": ({"bounds": (0, 2, 1, 2)}, r"in ascending order"),
        "documents beyond": ({"bounds": (0, 1, 9)}, r"not from 0 to 9"),
        "documents around the end of int64": ({"bounds": (0, most, least, -1, 2)}, r"in ascending order"),
        "no documents": ({"bounds": ()}, r"not nowhere"),
        "a negative id": ({"data": np.array([1, -7, 2], dtype="<i4").tobytes()}, r"document 0: token id -7"),
        "too few tokens": ({"data": b"1234"}, r"a\.bin has 4 bytes, but a\.idx counts 12"),
        "an empty document": ({"bounds": (0, 0, 2)}, r"document 0 is empty"),
    }
    for name, (changes, said) in wrong.items():
        yield Case(f"megatron: {name}", lambda folder, changes=changes: _pair(folder, **changes), said)

    def alone(folder: Path) -> Words:
        (folder / "a.idx").write_bytes(b"MMIDIDX\x00\x00")
        return [folder, "--format", "megatron"]

    yield Case("megatron: half a pair", alone, r"a\.idx has no a\.bin beside it")


def saved_cases() -> Iterator[Case]:
    """Folders of save_to_disk."""

    def saved(state: str) -> Callable[[Path], Words]:
        def make(folder: Path) -> Words:
            (folder / "dataset_info.json").write_text("{}")
            (folder / "state.json").write_text(state)
            return [folder]

        return make

    states = {
        "cut off": ("{", r"state\.json cannot be read"),
        "deep": ("[" * 20_000, r"state\.json cannot be read"),
        "a list": ("[]", r"holds no JSON object"),
        "no files": ("{}", r"does not list the data files"),
        "files that are numbers": ('{"_data_files": [7]}', r"does not list the data files"),
        "a file that is gone": ('{"_data_files": [{"filename": "x.arrow"}]}', r"lists x\.arrow, which is not there"),
        "files outside": ('{"_data_files": [{"filename": "../../../etc/passwd"}]}', r"lies outside|not there"),
        "a file name that is none": ('{"_data_files": [{"filename": null}]}', r"lists None, which is not there"),
    }
    for name, (state, said) in states.items():
        yield Case(f"saved: {name}", saved(state), said)

    def split(folder: Path) -> Words:
        (folder / "dataset_dict.json").write_text('{"splits": ["../up"]}')
        return [folder, "--split", "../up"]

    yield Case("saved: a split upwards", split, r"cannot be read|no such split|names no splits")


def table_cases() -> Iterator[Case]:
    """Parquet and Arrow; without pyarrow there are none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def table(columns: dict, suffix: str, *options: object, change=None) -> Callable[[Path], Words]:
        def make(folder: Path) -> Words:
            path, content = folder / f"a{suffix}", pa.table(columns)
            if suffix == ".parquet":
                pq.write_table(content, path)
            else:
                with pa.ipc.new_stream(path, content.schema) as writer:
                    writer.write_table(content)
            if change:
                path.write_bytes(change(path.read_bytes()))
            return [path, *options]

        return make

    texts = {"text": ["a", "b"]}
    for suffix in (".parquet", ".arrow"):
        bad: dict[str, tuple[Callable[[Path], Words], str]] = {
            "nothing": (file(f"a{suffix}", b""), r"is not an Arrow file: it is empty|is not a Parquet file"),
            "nonsense": (file(f"a{suffix}", b"nonsense" * 99), r"is not a Parquet file|cannot be read as Arrow"),
            "cut off": (table(texts, suffix, change=lambda data: data[:-30]), r"cut off|not a Parquet|without its end"),
            "another column": (table({"body": ["a"]}, suffix), r"no column 'text'; .*\(columns: body\)"),
            "numbers": (table({"text": [1.5]}, suffix), r"column 'text' is double, neither text nor lists"),
            "lists of fractions": (table({"text": [[1.5]]}, suffix), r"neither text nor lists of integers"),
            "lists of lists": (table({"text": [[[1]]]}, suffix), r"neither text nor lists of integers"),
            "nulls alone": (table({"text": pa.nulls(2)}, suffix), r"row 0 is empty"),
            "a null": (table({"text": ["a", None]}, suffix), r"row 1 is empty"),
            "a null id": (table({"text": [[1], [2, None]]}, suffix), r"row 1: column 'text' holds a list with missing"),
            "a null list": (table({"text": [[1], None]}, suffix), r"row 1 is empty"),
            "a negative id": (table({"text": [[1], [-1]]}, suffix), r"row 1: token id -1"),
            "2^63 as id": (table({"text": pa.array([[1 << 63]], pa.list_(pa.uint64()))}, suffix), r"row 0: token id"),
            "no rows": (table({"text": pa.array([], pa.string())}, suffix), r"holds no sequence"),
            "a dot in the name": (table(texts, suffix, "--field", "text.x"), r"no column 'text\.x'"),
            "too large a row": (
                table({"text": ["a", "b" * 40]}, suffix, "--max-document", 30),
                r"row 1 has 40 bytes, and a document may have 30",
            ),
        }
        for name, (make, said) in bad.items():
            yield Case(f"{suffix[1:]}: {name}", make, said)


def tokenizer_cases() -> Iterator[Case]:
    """Tokenizers."""

    def tokenizer(text: str, *, name="tokenizer.json", config: str | None = None) -> Callable[[Path], Words]:
        def make(folder: Path) -> Words:
            (folder / "a.txt").write_text("text")
            (folder / "model").mkdir()
            (folder / "model" / name).write_text(text)
            if config is not None:
                (folder / "model" / "tokenizer_config.json").write_text(config)
            return [folder / "a.txt", "--tokenizer", folder / "model"]

        return make

    model = {"type": "WordLevel", "vocab": {"word": 0}, "unk_token": "[UNK]"}
    words = json.dumps({"version": "1.0", "added_tokens": [], "model": model})
    nothing = json.dumps({"version": "1.0", "added_tokens": [], "model": {**model, "vocab": {}}})
    bad = {
        "none": (tokenizer("{}", name="other.json"), r"no tokenizer at"),
        "empty": (tokenizer(""), r"is not a Hugging Face tokenizer\.json"),
        "not JSON": (tokenizer("{"), r"is not a Hugging Face tokenizer\.json"),
        "no model": (tokenizer('{"version": "1.0"}'), r"is not a Hugging Face tokenizer\.json"),
        "deep": (tokenizer("[" * 20_000), r"is not a Hugging Face tokenizer\.json"),
        "no token": (tokenizer(nothing), r"has no token at all"),
        "no token for what it does not know": (tokenizer(words), r"tokenizer\.json cannot encode a text"),
        "a configuration that is none": (tokenizer(words, config="["), r"is not a tokenizer configuration"),
        "a deep configuration": (tokenizer(words, config="[" * 20_000), r"is not a tokenizer configuration"),
        "an end of another vocabulary": (tokenizer(words, config='{"eos_token": "</s>"}'), r"no such token"),
    }
    for name, (make, said) in bad.items():
        yield Case(f"tokenizer: {name}", make, said)


def option_cases() -> Iterator[Case]:
    """Options."""
    options: dict[str, tuple[Words, str]] = {
        "--train-bpe 0": (["--train-bpe", 0], r"--train-bpe 0: a byte-level vocabulary has"),
        "--train-bpe 1": (["--train-bpe", 1], r"--train-bpe 1: a byte-level"),
        "--train-bpe 10^9": (["--train-bpe", 10**9], r"--train-bpe 1000000000: .* at most 1,048,576"),
        "--train-bpe and --tokenizer": (["--train-bpe", 300, "--tokenizer", "bytes"], r"exclude each other"),
        "--workers 0": (["--workers", 0], r"--workers 0: 1 to"),
        "--workers -1": (["--workers", -1], r"--workers -1: 1 to"),
        "--workers 10^6": (["--workers", 10**6], r"--workers 1000000: this machine may run \d+ at most"),
        "--max-document 0": (["--max-document", 0], r"--max-document 0: at least 1"),
        "--max-document -1": (["--max-document", -1], r"--max-document -1: at least 1"),
        "--tokenizer of another format": (["--tokenizer", "3mer"], r"reads FASTA"),
        "--format megatron": (["--format", "megatron"], r"a\.bin beside|no Megatron|a Megatron data set is both"),
        "--format tar": (["--format", "tar"], r"a\.txt is cut off"),
        "--format parquet": (["--format", "parquet"], r"a\.txt is not a Parquet file"),
        "--format npy": (["--format", "npy"], r"a\.txt is not a \.npy array"),
        "--format jsonl": (["--format", "jsonl"], r"a\.txt:1 is not a line of JSON"),
    }
    for name, (words, said) in options.items():
        yield Case(name, file("a.txt", b"some text", *words), said)
