"""Indexes that were tampered with, files of lengths that are none: refused when they are opened, or before training."""

import os

import numpy as np
import pytest

from tests.cli.bad_inputs import Case, edit_json, few_of_each, no_document, setting, without, writing

INFO = "index/index.json"
STATS = ("stats", "GOOD/index")
VALUES = {
    "num_sequences": (-1, 0, 1.0, "12", True, None, 10**30, 11),
    "num_tokens": (-1, 0, 10**30, 5.5, None, 17),
    "max_length": (0, 10**30, "9", 7),
    "has_tokens": (1, "yes", None),
    "vocab_size": (0, -5, 10**12, "257", None, 1.5, 70000),
    "dtype": ("float16", "object", "O", "int64", "uint32", None, 7, [], "uint16,uint16"),
    "eos_id": (-1, 10**9, 2.5, "256"),
    "tokenizer": (None, [], "bytes", {}, {"kind": 7, "path": ""}),
    "digest": ("", "x" * 16, None, 7, "0" * 16, "0" * 10_000),
    "corpus_digest": (None, 7, "zz"),
    "ledger": (None, {}, [], {"documents": -1}),
    "files": (None, {}, [], {"../../etc/passwd": 7}, {"lengths.npy": -1}, {"lengths.npy": "12"}),
    "request": (None, []),
    "fingerprint": (None, 7),
    "schema_version": (None, 99, "1", [], 10**30),
}
TEXTS = {
    "a list": "[1, 2]",
    "a word": '"index"',
    "null": "null",
    "NaN": '{"schema_version": NaN}',
    "a key twice": '{"schema_version": 1, "schema_version": 2}',
    "nothing": "",
    "cut off": '{"schema_version": ',
}


def _resized(name: str, change: int):
    def spoil(folder):
        path = folder / "index" / name
        os.truncate(path, path.stat().st_size + change)

    return spoil


def _array(name: str, array, **options):
    return lambda folder: np.save(folder / name, array, **options)


def _same_size(name: str, change):
    """Change an array of the index without changing its size."""

    def spoil(folder):
        array = np.load(folder / "index" / name)
        np.save(folder / "index" / name, change(array).astype(array.dtype))

    return spoil


def _header(text: str) -> bytes:
    """A .npy file whose header says ``text``."""
    padded = text.ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded.encode() + b"\0" * 64


LENGTHS = {
    "objects": _array("lengths.npy", np.array([1, "a", None], dtype=object), allow_pickle=True),
    "floats": _array("lengths.npy", np.array([1.0, 2.0])),
    "NaN": _array("lengths.npy", np.array([1.0, np.nan])),
    "negative": _array("lengths.npy", np.array([5, -1])),
    "zero": _array("lengths.npy", np.array([5, 0])),
    "empty": _array("lengths.npy", np.array([], dtype=int)),
    "one number": _array("lengths.npy", np.array(7)),
    "two rows": _array("lengths.npy", np.ones((2, 2), dtype=int)),
    "huge": _array("lengths.npy", np.array([2**62, 1])),
    "huge unsigned": _array("lengths.npy", np.array([2**64 - 1], dtype=np.uint64)),
    "true and false": _array("lengths.npy", np.array([True, False])),
    "text": _array("lengths.npy", np.array(["12", "13"])),
    "records": _array("lengths.npy", np.array([(1, 2)], dtype=[("a", int), ("b", int)])),
    "dates": _array("lengths.npy", np.array(["2024-01-01"], dtype="datetime64[D]")),
    "complex": _array("lengths.npy", np.array([1j])),
    "a huge header": writing(
        "lengths.npy", _header("{'descr': '<i8', 'fortran_order': False, 'shape': (" + "9" * 30 + ",)}")
    ),
    "a negative shape": writing("lengths.npy", _header("{'descr': '<i8', 'fortran_order': False, 'shape': (-1,)}")),
    "code as header": writing("lengths.npy", _header("__import__('os').system('true')")),
    "an unknown type": writing("lengths.npy", _header("{'descr': '<q9', 'fortran_order': False, 'shape': (1,)}")),
    "no header": writing("lengths.npy", b"\x93NUMPY\x01\x00"),
    "zip": writing("lengths.npy", b"PK\x03\x04" + b"\0" * 50),
    "nothing": writing("lengths.npy", b""),
    "text file": writing("lengths.npy", "1\n2\n"),
    "cut off": lambda folder: os.truncate(folder / "lengths.npy", 150),
}


def _cases() -> list[Case]:
    cases = [
        Case(
            name=f"{key}={str(value)[:20]}",
            arguments=STATS,
            words=("index", "index again"),
            spoil=edit_json(INFO, setting(key, to=value)),
        )
        for key, values in VALUES.items()
        for value in values
    ]
    cases += [
        Case(name=f"no {key}", arguments=STATS, words=("index",), spoil=edit_json(INFO, without(key))) for key in VALUES
    ]
    cases += [
        Case(name=f"index.json: {name}", arguments=STATS, words=("index.json",), spoil=writing(INFO, text))
        for name, text in TEXTS.items()
    ]
    cases += [
        Case(name=f"index.json: {name}", arguments=STATS, words=("index", word), spoil=spoil)
        for name, (spoil, word) in no_document(INFO).items()
    ]
    for name in ("tokens.bin", "lengths.npy", "offsets.npy", "documents.jsonl"):
        cases += [
            Case(name=f"{name} longer", arguments=STATS, words=(name, "bytes instead of"), spoil=_resized(name, 8)),
            Case(name=f"{name} shorter", arguments=STATS, words=(name, "bytes instead of"), spoil=_resized(name, -8)),
            Case(
                name=f"{name} missing",
                arguments=STATS,
                words=(name,),
                spoil=lambda folder, name=name: (folder / "index" / name).unlink(),
            ),
        ]
    cases += [
        Case(
            name="other lengths",
            arguments=STATS,
            words=("not the ones",),
            spoil=_same_size("lengths.npy", lambda a: a + 1),
        ),
        Case(
            name="zero lengths", arguments=STATS, words=("length 0",), spoil=_same_size("lengths.npy", lambda a: a * 0)
        ),
        Case(
            name="other offsets",
            arguments=STATS,
            words=("disagree",),
            spoil=_same_size("offsets.npy", lambda a: a[::-1]),
        ),
        Case(name="a file as index", arguments=("stats", "GOOD/config.toml"), words=("no index at",)),
        Case(
            name="a file as index of a run",
            arguments=("train", "data.index=GOOD/profile.json", "run_folder=new"),
            words=("is a file",),
        ),
    ]
    for command, arguments in {
        "stats": ("stats", "GOOD/lengths.npy"),
        "compare": (
            "compare",
            "--lengths",
            "GOOD/lengths.npy",
            "--model",
            "llama-7b",
            "--device",
            "A100-80GB",
            "--gpus",
            "8",
        ),
    }.items():
        cases += [
            Case(name=f"{command} {name}", arguments=arguments, words=("error:",), spoil=spoil)
            for name, spoil in LENGTHS.items()
        ]
    return cases


TRAIN = ("train", "data.index=GOOD/index", "run_folder=GOOD/new", "train.steps=2")
BEFORE_TRAINING = [
    Case(
        name="other tokens",
        arguments=TRAIN,
        words=("not the ones indexed",),
        code=4,
        spoil=lambda folder: _other_tokens(folder),
    ),
    Case(
        name="a smaller vocabulary",
        arguments=TRAIN,
        words=("the tokens in", "go up to 256", "vocab_size 100"),
        code=4,
        spoil=edit_json(INFO, lambda info: info.update(vocab_size=100, eos_id=7)),
    ),
    Case(
        name="verify",
        arguments=("index", "--verify", "GOOD/index"),
        words=("not the ones indexed",),
        code=4,
        spoil=lambda folder: _other_tokens(folder),
    ),
    Case(
        name="another digest of tokens",
        arguments=STATS,
        words=("not the ones indexed",),
        spoil=edit_json(INFO, setting("corpus_digest", to="0" * 32)),
    ),
]


def _other_tokens(folder):
    tokens = np.fromfile(folder / "index" / "tokens.bin", dtype="<u2")
    tokens[7] += 1
    tokens.tofile(folder / "index" / "tokens.bin")


CASES = [*_cases(), *BEFORE_TRAINING]


@pytest.mark.parametrize("case", few_of_each(CASES), ids=[f"{k}-{case.name[:40]}" for k, case in enumerate(CASES)])
def test_an_index_or_lengths_that_were_tampered_with_are_refused(case, refuse):
    refuse(case)
