"""Every value of index.json is checked: by itself to its bounds, and against the others."""

import copy
import re

import pytest

from lengthwise.core.lengths import MOST_TOKENS
from lengthwise.index.index_info import MAX_COUNT, MAX_VOCABULARY, check_info

GOOD = {
    "schema_version": 1, "num_sequences": 2, "num_tokens": 10, "max_length": 6, "has_tokens": True, "vocab_size": 257,
    "dtype": "uint16", "eos_id": 256, "tokenizer": {"kind": "bytes", "path": ""}, "digest": "0123456789abcdef",
    "corpus_digest": "ab" * 16,
    "ledger": {
        "documents": 3, "empty": 1, "binary": 0, "undecodable": 0, "unreadable": 0, "examples": {"empty": ["a"]}
    },
    "files": {"tokens.bin": 20, "offsets.npy": 152, "lengths.npy": 136, "documents.jsonl": 80},
    "request": {}, "fingerprint": "f",
}  # fmt: skip
LENGTHS_ALONE = {"has_tokens": False, "vocab_size": None, "dtype": None, "eos_id": None, "corpus_digest": ""}


def changed(**values):
    """The good document with ``values``; names of inner objects are joined by two underscores."""
    document = copy.deepcopy(GOOD)
    for name, value in values.items():
        tree, (*path, key) = document, name.split("__")
        for part in path:
            tree = tree[part]
        tree[key] = value
    return document


def without(*path):
    document = copy.deepcopy(GOOD)
    tree = document
    for part in path[:-1]:
        tree = tree[part]
    del tree[path[-1]]
    return document


def files(**sizes):
    """The files of the good document, with other sizes; None: without the file."""
    named = {
        {"tokens": "tokens.bin", "offsets": "offsets.npy", "lengths": "lengths.npy"}[k]: v for k, v in sizes.items()
    }
    return {"files": {name: size for name, size in (GOOD["files"] | named).items() if size is not None}}


TAKEN = [
    {},
    {"num_sequences": 1, "max_length": 1},
    {"num_sequences": MAX_COUNT, "max_length": MOST_TOKENS, "ledger__documents": MAX_COUNT, "ledger__binary": 0},
    {"eos_id": None},
    {"eos_id": 0},
    {"vocab_size": 1, "eos_id": None},
    {"vocab_size": 1 << 16, "eos_id": (1 << 16) - 1},
    {"dtype": "uint8", "vocab_size": 256, "eos_id": 255, **files(tokens=10)},
    {"dtype": "uint32", "vocab_size": MAX_VOCABULARY, "eos_id": MAX_VOCABULARY - 1, **files(tokens=40)},
    {"corpus_digest": "a" * 200},
    LENGTHS_ALONE | files(tokens=None),
    LENGTHS_ALONE | {"num_tokens": MAX_COUNT} | files(tokens=None),
    {"surprise": 1, "ledger__surprise": 1, "tokenizer__surprise": 1},
]


@pytest.mark.parametrize("values", TAKEN)
def test_values_within_their_bounds_are_taken(values):
    check_info(changed(**values))


REFUSED = [
    ("num_sequences: ", {"num_sequences": 0}),
    ("num_sequences: ", {"num_sequences": MAX_COUNT + 1}),
    ("num_sequences: ", {"num_sequences": 2.0}),
    ("num_tokens: ", {"num_tokens": 0} | files(tokens=0)),
    ("num_tokens: ", LENGTHS_ALONE | {"num_tokens": MAX_COUNT + 1}),
    ("max_length: ", {"max_length": 0}),
    ("max_length: ", {"max_length": MOST_TOKENS + 1}),
    ("has_tokens: ", {"has_tokens": 1}),
    ("vocab_size: ", {"vocab_size": 0}),
    ("vocab_size: ", {"dtype": "uint32", "vocab_size": MAX_VOCABULARY + 1, **files(tokens=40)}),
    ("eos_id: ", {"eos_id": -1}),
    ("eos_id: ", LENGTHS_ALONE | {"eos_id": MAX_VOCABULARY}),
    ("digest: ", {"digest": "0123456789abcde"}),
    ("digest: ", {"digest": "0123456789ABCDEF"}),
    ("corpus_digest: ", {"corpus_digest": "a" * 201}),
    ("corpus_digest: ", {"corpus_digest": "xyz"}),
    ("tokenizer.kind: ", {"tokenizer__kind": 7}),
    ("ledger.documents: ", {"ledger__documents": -1}),
    ("ledger.documents: ", {"ledger__documents": "3"}),
    ("ledger.documents: ", {"ledger__documents": MAX_COUNT + 1}),
    ("ledger.examples.empty: ", {"ledger__examples__empty": []}),
    ("files.tokens.bin: ", files(tokens=-1)),
    ("request: ", {"request": []}),
    ("fingerprint: ", {"fingerprint": None}),
    *(
        (
            f"ledger: examples has no '{reason}', and {reason} is 2",
            {"ledger__empty": 0, f"ledger__{reason}": 2, "ledger__examples": {}},
        )
        for reason in ("empty", "binary", "undecodable", "unreadable")
    ),
    ("files has no offsets.npy", files(offsets=None)),
    ("files has no lengths.npy", files(lengths=None)),
    ("files has no tokens.bin", files(tokens=None)),
    ("files has no lengths.npy", LENGTHS_ALONE | files(lengths=None, tokens=None)),
    *(
        ("has_tokens is true, but vocab_size, dtype or corpus_digest is not given", {name: value})
        for name, value in (("vocab_size", None), ("dtype", None), ("corpus_digest", ""))
    ),
    ("vocab_size is 65,537, more than tokens of uint16 can tell apart", {"vocab_size": (1 << 16) + 1}),
    (
        "vocab_size is 257, more than tokens of uint8 can tell apart",
        {"dtype": "uint8", "eos_id": None, **files(tokens=10)},
    ),
    ("eos_id is 257, vocab_size 257", {"eos_id": 257}),
    ("tokens.bin has 21 bytes, but 10 tokens of uint16 take 20", files(tokens=21)),
    ("tokens.bin has 20 bytes, but 10 tokens of uint32 take 40", {"dtype": "uint32"}),
    ("tokens.bin has 20 bytes, but 10 tokens of uint8 take 10", {"dtype": "uint8", "vocab_size": 256, "eos_id": None}),
]


@pytest.mark.parametrize(("message", "values"), REFUSED)
def test_a_value_that_is_out_of_bounds_or_contradicts_another_is_named(message, values):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        check_info(changed(**values))


@pytest.mark.parametrize("path", [(name,) for name in GOOD] + [("tokenizer", "path"), ("ledger", "binary")])
def test_every_field_is_needed(path):
    with pytest.raises(ValueError, match=rf"^{'.'.join(path)}: field required$"):
        check_info(without(*path))


def test_a_message_shows_the_value_and_no_control_characters():
    with pytest.raises(ValueError, match=r"^max_length: input should be .*, not '6'$"):
        check_info(changed(max_length="6"))
    with pytest.raises(ValueError, match=r"^files\.a\\x1b\..*, not 'a\\x1b'$"):
        check_info(changed(files=GOOD["files"] | {"a\x1b": 1}))
    with pytest.raises(ValueError, match=r"^input should be a valid dictionary"):
        check_info([1])
