"""Text to token ids, many documents at a time: raw bytes, DNA k-mers, or any Hugging Face tokenizer.json."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lengthwise.core.errors import InputError, first_line, missing_package

Encoded = tuple[np.ndarray, np.ndarray]
"""Tokens of all documents end to end, and the number of tokens of each."""

_LARGEST_FILE = 1 << 29
_EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
EOS_OF_TRAINED = "<|endoftext|>"
"""The end-of-sequence token of a tokenizer trained here."""


class Tokenizer(Protocol):
    """What the index needs of a tokenizer."""

    vocab_size: int
    """One more than the largest id, the end-of-sequence id included."""
    eos_id: int | None

    def encode(self, documents: list[bytes]) -> Encoded:
        """Tokens of UTF-8 documents, without any end-of-sequence token."""
        ...

    def encode_prompt(self, text: str) -> list[int]:
        """Tokens of a text in which spelt special tokens count as such."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens."""
        ...


@dataclass(frozen=True, kw_only=True)
class TokenizerSpec:
    """Which tokenizer; small enough to send to a worker, which loads it once."""

    kind: str
    """``bytes``, ``huggingface`` or k-mers (``3mer``, ``6mer/3``); ``tokens``: the source holds ids already;
    ``lengths``: it holds no tokens at all."""
    path: str = ""
    eos_token: str = ""
    append_eos: bool = True

    @property
    def encodes(self) -> bool:
        """Whether there is text to encode."""
        return self.kind not in ("tokens", "lengths")

    def to_json(self) -> dict[str, Any]:
        """What index.json says of the tokenizer."""
        document = asdict(self)
        document["path"] = "tokenizer.json" if self.path else ""
        return document


@lru_cache(maxsize=4)
def load_tokenizer(spec: TokenizerSpec) -> Tokenizer:
    """The tokenizer of ``spec``, loaded once per process."""
    if spec.kind == "bytes":
        return ByteTokenizer(append_eos=spec.append_eos)
    if kmer := parse_kmer(spec.kind):
        return KmerTokenizer(*kmer, append_eos=spec.append_eos)
    assert spec.kind == "huggingface", spec.kind
    return HuggingFaceTokenizer(Path(spec.path), eos_token=spec.eos_token if spec.append_eos else "")


class ByteTokenizer:
    """Every byte is its own id; 256 ends a sequence."""

    def __init__(self, *, append_eos: bool = True) -> None:
        self.eos_id = 256 if append_eos else None
        self.vocab_size = 257 if append_eos else 256

    def encode(self, documents: list[bytes]) -> Encoded:
        """One token a byte."""
        lengths = np.fromiter(map(len, documents), dtype=np.int64, count=len(documents))
        return np.frombuffer(b"".join(documents), dtype=np.uint8), lengths

    def encode_prompt(self, text: str) -> list[int]:
        """The bytes of the text; there are no special tokens to spell."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the bytes; ids that are none are left out."""
        return bytes(id for id in ids if id < 256).decode(errors="replace")


_LARGEST_KMER = 12
"""4^12 ids are 17 million, the embedding of a large vocabulary many times over."""


def parse_kmer(name: str) -> tuple[int, int] | None:
    """Bases of a k-mer and bases from one to the next: ``6mer`` is (6, 6), ``6mer/3`` is (6, 3); None if it is none."""
    match = re.fullmatch(r"(\d+)mer(?:/(\d+))?", name)
    if match is None:
        return None
    bases = int(match[1])
    stride = int(match[2] or bases)
    if not 1 <= bases <= _LARGEST_KMER:
        raise InputError(f"--tokenizer {name}: a k-mer has 1 to {_LARGEST_KMER} bases, not {bases}")
    if not 1 <= stride <= bases:
        raise InputError(
            f"--tokenizer {name}: the next k-mer starts 1 to {bases} bases on, not {stride}, so that none is left out"
        )
    return bases, stride


class KmerTokenizer:
    """Every ``stride``-th run of k bases ACGT, upper or lower case, as a number of base 4: AAA is 0, AAC 1, TTT 63.

    4^k stands for a run with any other letter, and for bases left at the end that fill no run: one such token then ends
    the record. 4^k + 1 ends a sequence.
    """

    def __init__(self, bases: int, stride: int, *, append_eos: bool = True) -> None:
        self._num_bases, self._stride = bases, stride
        self.unknown_id = 4**bases
        self.eos_id = self.unknown_id + 1 if append_eos else None
        self.vocab_size = self.unknown_id + 1 + append_eos
        self._dtype = dtype_for(self.unknown_id + 1)
        letters = bytes.maketrans(b"ACGTacgt", bytes([0, 1, 2, 3] * 2))
        self._base_of_letter = bytes(letters[letter] if letter in b"ACGTacgt" else 4 for letter in range(256))

    def encode(self, documents: list[bytes]) -> Encoded:
        """One token per ``stride`` bases.

        Documents are laid end to end in slots of whole strides, so that one pass over all of them meets every run; runs
        that would begin in a slot after its last token are taken out again.
        """
        k, stride = self._num_bases, self._stride
        sizes = np.fromiter(map(len, documents), dtype=np.int64, count=len(documents))
        num_whole = np.maximum(sizes - k + stride, 0) // stride
        has_rest = sizes > np.where(num_whole > 0, (num_whole - 1) * stride + k, 0)
        lengths = num_whole + has_rest
        slots = -(-sizes // stride)
        text = b"".join(document + b"-" * (-len(document) % stride) for document in documents) + b"-" * (k - stride)
        ids = self._runs(np.frombuffer(text.translate(self._base_of_letter), dtype=np.uint8), int(slots.sum()))
        starts = np.cumsum(slots) - slots
        ids[(starts + num_whole)[has_rest]] = self.unknown_id
        if not np.array_equal(slots, lengths):
            edges = np.zeros(len(ids) + 1, dtype=np.int8)
            np.add.at(edges, starts + lengths, 1)
            np.add.at(edges, starts + slots, -1)
            ids = ids[np.cumsum(edges[:-1], dtype=np.int8) == 0]
        return ids, lengths

    def encode_prompt(self, text: str) -> list[int]:
        """The k-mers of the text; there are no special tokens to spell."""
        ids: list[int] = self.encode([text.encode()])[0].tolist()
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The first bases of each k-mer, up to where the next one begins; N for those that are unknown."""
        k, unknown = self._num_bases, "4" * self._num_bases
        runs = [np.base_repr(id, 4).zfill(k) if id < self.unknown_id else unknown for id in ids]
        return "".join(run[: self._stride] for run in runs).translate(str.maketrans("01234", "ACGTN"))

    def _runs(self, bases: np.ndarray, count: int) -> np.ndarray:
        """The ids of ``count`` runs, one every stride."""
        ids = np.zeros(count, dtype=self._dtype)
        is_other = bases > 3
        is_unknown = np.zeros(count, dtype=bool) if is_other.any() else None
        stop = (count - 1) * self._stride + 1
        for offset in range(self._num_bases if count else 0):
            ids <<= 2
            ids += bases[offset : offset + stop : self._stride]
            if is_unknown is not None:
                is_unknown |= is_other[offset : offset + stop : self._stride]
        if is_unknown is not None:
            ids[is_unknown] = self.unknown_id
        return ids


class HuggingFaceTokenizer:
    """A tokenizer.json, with everything switched off that would cut, pad or decorate a document."""

    def __init__(self, path: Path, *, eos_token: str) -> None:
        self._tokenizer = _open_tokenizer(path)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # "<|endoftext|>" written in a document does not end it
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self._path = path
        self.eos_id = self._tokenizer.token_to_id(eos_token) if eos_token else None
        self._dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32
        added = self._tokenizer.get_added_tokens_decoder().values()
        self._special = [token.content.encode() for token in added if token.special]

    def count_spelled(self, documents: list[bytes]) -> int:
        """The number of documents that spell a special token, which becomes plain letters."""
        return sum(any(token in document for token in self._special) for document in documents)

    def encode(self, documents: list[bytes]) -> Encoded:
        """Tokens by the file's own rules, without special tokens."""
        texts = [document.decode() for document in documents]
        try:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the package raises bare Exception, or panics
            raise InputError(
                f"the tokenizer {self._path.name} cannot encode a text: {first_line(error)}; use a complete one"
            ) from None
        ids = [np.array(encoding.ids, dtype=self._dtype) for encoding in encodings]
        lengths = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
        return np.concatenate(ids) if ids else np.empty(0, dtype=self._dtype), lengths

    def encode_prompt(self, text: str) -> list[int]:
        """Tokens by the file's own rules; special tokens that the text spells are special tokens."""
        self._tokenizer.encode_special_tokens = False
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
            return ids
        finally:
            self._tokenizer.encode_special_tokens = True

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the tokens; special ones are spelt."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


def append_eos(flat: np.ndarray, lengths: np.ndarray, eos_id: int) -> Encoded:
    """``eos_id`` after every document."""
    dtype = flat.dtype if eos_id <= np.iinfo(flat.dtype).max else np.dtype(np.uint16)
    longer = lengths + 1
    joined = np.empty(len(flat) + len(lengths), dtype=dtype)
    is_token = np.ones(len(joined), dtype=bool)
    is_token[np.cumsum(longer) - 1] = False
    joined[is_token] = flat
    joined[~is_token] = eos_id
    return joined, longer


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """The narrowest unsigned type, little-endian, for ids below ``vocab_size``."""
    return np.dtype("u1" if vocab_size <= 1 << 8 else "<u2" if vocab_size <= 1 << 16 else "<u4")


def find_tokenizer(path: Path) -> tuple[Path, str]:
    """The tokenizer.json at ``path`` (a file or its folder) and the name of its end-of-sequence token, if any.

    The name is that of tokenizer_config.json beside it; without that file, the first customary one in the vocabulary.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise InputError(
            f"no tokenizer at {path}; give bytes, a k-mer such as 3mer, or the path of a Hugging Face tokenizer.json"
        )
    vocabulary = _open_tokenizer(file).get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise InputError(f"{file} has no token at all; give a tokenizer that was trained")
    beside = file.parent / "tokenizer_config.json"
    declared = _declared_eos(beside) if beside.is_file() else ""
    if declared and declared not in vocabulary:
        raise InputError(
            f"{beside} names {declared!r} as end of sequence, but {file} has no such token; mend one of them"
        )
    return file, declared or next((name for name in _EOS_NAMES if name in vocabulary), "")


def _declared_eos(path: Path) -> str:
    try:
        token = json.loads(path.read_text()).get("eos_token")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise InputError(f"{path} is not a tokenizer configuration: {error}") from None
    return str(token.get("content", "") if isinstance(token, dict) else token or "")


def _open_tokenizer(path: Path) -> Any:
    tokenizers = import_tokenizers()
    if (size := path.stat().st_size) > _LARGEST_FILE:
        raise InputError(f"{path} has {size:,} bytes, more than a tokenizer.json has ({_LARGEST_FILE:,})")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the package raises bare Exception, or panics
        raise InputError(f"{path} is not a Hugging Face tokenizer.json: {first_line(error)}") from None


def import_tokenizers() -> Any:
    """The ``tokenizers`` package, or one clear error."""
    try:
        import tokenizers
    except ImportError:
        raise missing_package("a tokenizer.json (unlike --tokenizer bytes)", "tokenizers") from None
    return tokenizers


def file_digest(path: Path) -> str:
    """Sixteen hex digits over a tokenizer file."""
    return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()
