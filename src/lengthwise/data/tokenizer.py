"""Text to token ids, many documents at a time: raw bytes, DNA triplets, or any Hugging Face tokenizer.json."""

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from lengthwise.core.errors import InputError

Encoded = tuple[np.ndarray, np.ndarray]
"""Tokens of all documents end to end, and the number of tokens of each."""

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


@dataclass(frozen=True, kw_only=True)
class TokenizerSpec:
    """Which tokenizer; small enough to send to a worker, which loads it once."""

    kind: Literal["bytes", "3mer", "huggingface", "tokens", "lengths"]
    """``tokens``: the source holds ids already; ``lengths``: it holds no tokens at all."""
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
        return Bytes(append_eos=spec.append_eos)
    if spec.kind == "3mer":
        return Triplets(append_eos=spec.append_eos)
    assert spec.kind == "huggingface", spec.kind
    return HuggingFace(Path(spec.path), eos_token=spec.eos_token if spec.append_eos else "")


class Bytes:
    """Every byte is its own id; 256 ends a sequence."""

    def __init__(self, *, append_eos: bool = True) -> None:
        self.eos_id = 256 if append_eos else None
        self.vocab_size = 257 if append_eos else 256

    def encode(self, documents: list[bytes]) -> Encoded:
        """One token a byte."""
        lengths = np.fromiter(map(len, documents), dtype=np.int64, count=len(documents))
        return np.frombuffer(b"".join(documents), dtype=np.uint8), lengths


class Triplets:
    """Non-overlapping triplets of the bases ACGT, upper or lower case: ids 0 (AAA) to 63 (TTT).

    64 stands for a triplet with any other letter and for the one or two bases left at the end; 65 ends a sequence.
    """

    UNKNOWN_ID = 64

    def __init__(self, *, append_eos: bool = True) -> None:
        self.eos_id = 65 if append_eos else None
        self.vocab_size = 66 if append_eos else 65
        self._base_of_letter = np.full(256, 4, dtype=np.uint8)
        for base, letters in enumerate((b"Aa", b"Cc", b"Gg", b"Tt")):
            self._base_of_letter[list(letters)] = base

    def encode(self, documents: list[bytes]) -> Encoded:
        """One token per three bases."""
        encoded = [self._triplets(document) for document in documents]
        lengths = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded))
        return np.concatenate(encoded) if encoded else np.empty(0, dtype=np.uint8), lengths

    def _triplets(self, document: bytes) -> np.ndarray:
        padded = document + b"-" * (-len(document) % 3)
        bases = self._base_of_letter[np.frombuffer(padded, dtype=np.uint8)].reshape(-1, 3)
        ids = bases[:, 0] * np.uint8(16) + bases[:, 1] * np.uint8(4) + bases[:, 2]
        ids[(bases == 4).any(axis=1)] = self.UNKNOWN_ID
        return ids


class HuggingFace:
    """A tokenizer.json, with everything switched off that would cut, pad or decorate a document."""

    def __init__(self, path: Path, *, eos_token: str) -> None:
        self._tokenizer = _open_tokenizer(path)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # "<|endoftext|>" written in a document does not end it
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self.eos_id = self._tokenizer.token_to_id(eos_token) if eos_token else None
        self._dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32

    def encode(self, documents: list[bytes]) -> Encoded:
        """Tokens by the file's own rules, without special tokens."""
        texts = [document.decode() for document in documents]
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ids = [np.array(encoding.ids, dtype=self._dtype) for encoding in encodings]
        lengths = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
        return np.concatenate(ids) if ids else np.empty(0, dtype=self._dtype), lengths


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
        raise InputError(f"no tokenizer at {path}; give bytes, 3mer, or the path of a Hugging Face tokenizer.json")
    vocabulary = _open_tokenizer(file).get_vocab(with_added_tokens=True)
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
    except (ValueError, AttributeError) as error:
        raise InputError(f"{path} is not a tokenizer configuration: {error}") from None
    return str(token.get("content", "") if isinstance(token, dict) else token or "")


def _open_tokenizer(path: Path) -> Any:
    tokenizers = import_tokenizers()
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exception
        raise InputError(f"{path} is not a Hugging Face tokenizer.json: {error}") from None


def import_tokenizers() -> Any:
    """The ``tokenizers`` package, or one clear error."""
    try:
        import tokenizers
    except ImportError:
        raise InputError(
            "a tokenizer.json needs the package tokenizers; pip install 'lengthwise[data]', or use --tokenizer bytes"
        ) from None
    return tokenizers


def file_digest(path: Path) -> str:
    """Sixteen hex digits over a tokenizer file."""
    return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()
