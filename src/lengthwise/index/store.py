"""Open a finished index: its lengths in memory, its tokens read by sequence, checked against what index.json says."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.core.atomic_write import reason, shell_word
from lengthwise.core.errors import CheckError, InputError
from lengthwise.core.lengths import LengthIndex
from lengthwise.core.read_file import brief, read_json
from lengthwise.index.array_file import ArrayFile, load_array
from lengthwise.index.index_info import FILE_NAMES, check_info
from lengthwise.index.settings import FORMAT_VERSION, LOSS_MASK_VERSION

INDEX_FILES = ("index.json", *FILE_NAMES)
"""Every file an index may have; index.json tells that it is whole."""
MASK_DTYPE = np.dtype("u1")
"""Type of the loss mask: 1 for a token that has a loss."""

_BLOCK = 1 << 20
_BLOCK_BYTES = 8 << 20
_DIGITS = 32


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenStore:
    """A corpus on disk. Tokens are read when they are asked for."""

    path: Path
    lengths: LengthIndex
    info: dict[str, Any]
    """What index.json holds."""
    _offsets: ArrayFile
    _tokens: ArrayFile | None
    _loss_mask: ArrayFile | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def digest(self) -> str:
        """Sixteen hex digits over lengths and tokens."""
        return self.lengths.digest

    @property
    def has_tokens(self) -> bool:
        """Whether there are tokens, not lengths alone."""
        return self._tokens is not None

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id; ``InputError`` if the index holds lengths alone."""
        self._require_tokens()
        return int(self.info["vocab_size"])

    @property
    def eos_id(self) -> int | None:
        """The token appended to every sequence, if any."""
        eos_id: int | None = self.info["eos_id"]
        return eos_id

    def tokens(self, id: int) -> np.ndarray:
        """[length] unsigned integers, read-only.

        Raises:
            InputError: there is no such sequence, or the index holds lengths alone.
            LengthwiseError: a file of the index is not as it was when it was opened.
        """
        all_tokens = self._require_tokens()
        if not 0 <= id < len(self.lengths):
            raise InputError(f"no sequence {id} in {self.path}: it has {len(self.lengths):,}, counted from 0")
        start, stop = self._offsets.read(id, id + 2).tolist()
        return all_tokens.read(start, stop)

    @property
    def has_loss_mask(self) -> bool:
        """Whether the index says which tokens have a loss."""
        return self._loss_mask is not None

    def loss_mask(self, id: int) -> np.ndarray | None:
        """[length] booleans, true for tokens that are predicted by those before them; None: all but the first."""
        if self._loss_mask is None:
            return None
        start, stop = self._offsets.read(id, id + 2).tolist()
        return self._loss_mask.read(start, stop) != 0

    def count_targets(self, ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """[B] tokens that have a loss in the ``lengths`` tokens from ``starts`` of sequences ``ids``, ascending.

        The first token of what is cut out has none: no token is before it.
        """
        lengths = lengths.astype(np.int64)
        if self._loss_mask is None:
            return lengths - 1
        ends = self._offsets.read(0, len(self.lengths) + 1)[ids] + starts + lengths
        firsts, counts, begin = ends - lengths + 1, np.empty(len(ids), dtype=np.int64), 0
        while begin < len(ids):
            end = max(begin + 1, int(np.searchsorted(ends, firsts[begin] + _BLOCK)))
            base, rows = int(firsts[begin]), slice(begin, end)
            before = np.concatenate([[0], np.cumsum(self._loss_mask.read(base, int(ends[end - 1])), dtype=np.int64)])
            counts[rows] = before[ends[rows] - base] - before[firsts[rows] - base]
            begin = end
        return counts

    def verify_tokens(self, on_read: Callable[[int], None] | None = None) -> None:
        """Read every token; raise ``CheckError`` unless they are the ones that were indexed, below ``vocab_size``.

        ``on_read`` is called with the number of tokens of every block that was read.
        """
        if not self.has_tokens:
            return
        dtype = np.dtype(self.info["dtype"]).newbyteorder("<")
        largest = -1

        def blocks() -> Iterator[np.ndarray]:
            nonlocal largest
            for block in token_blocks(self.path / "tokens.bin", dtype):
                largest = max(largest, int(block.max()))
                yield block
                if on_read is not None:
                    on_read(len(block))

        named = {"tokens": token_digest(blocks(), dtype)}
        if self.has_loss_mask:
            named["loss masks"] = token_digest(token_blocks(self.path / "loss_mask.bin", MASK_DTYPE), MASK_DTYPE)
        indexed_digests = self.info["corpus_digest"]
        for (name, digest), indexed in zip(named.items(), (indexed_digests[:_DIGITS], indexed_digests[_DIGITS:])):
            if digest != indexed:
                raise CheckError(
                    f"the {name} in {self.path} are not the ones indexed: digest {digest}, index.json says {indexed}; "
                    "index again with --restart"
                )
        if largest >= self.vocab_size:
            raise CheckError(
                f"the tokens in {self.path} go up to {largest:,}, index.json says vocab_size {self.vocab_size:,}; "
                "index again with --restart"
            )

    def _require_tokens(self) -> ArrayFile:
        if self._tokens is None:
            raise InputError(f"{self.path} holds lengths alone, no tokens; index the texts themselves to train on them")
        return self._tokens


def open_index(path: str | Path) -> TokenStore:
    """The finished index in the folder ``path``; reads every length once, no token.

    Raises:
        InputError: there is none, it is half-written or of another version, or its files are not the ones it lists.
    """
    path = Path(path)
    info = read_info(path)
    for name, size in info["files"].items():
        actual = (path / name).stat().st_size if (path / name).is_file() else None
        if actual != size:
            state = "is missing" if actual is None else f"has {actual:,} bytes instead of {size:,}"
            raise InputError(f"the index at {path} is damaged: {name} {state}; index again with --restart")
    damaged = f"the index at {path} is damaged; index again with --restart"
    values = load_array(path / "lengths.npy", way_out=damaged)
    lengths = LengthIndex(lengths=values, corpus_digest=info["corpus_digest"])
    if lengths.digest != info["digest"]:
        raise InputError(
            f"the lengths in {path} are not the ones indexed: digest {lengths.digest}, index.json says "
            f"{info['digest']}; index again with --restart"
        )
    counts = {"num_sequences": len(lengths), "num_tokens": lengths.num_tokens, "max_length": lengths.max_length}
    for name, counted in counts.items():
        if info[name] != counted:
            raise InputError(
                f"the index at {path} is damaged: index.json says {name} {info[name]:,}, lengths.npy {counted:,}; "
                "index again with --restart"
            )
    offsets, tokens, loss_mask = _open_files(path, info)
    if not _agree(offsets, lengths):
        raise InputError(
            f"the index at {path} is damaged: offsets.npy and lengths.npy disagree; index again with --restart"
        )
    return TokenStore(path=path, lengths=lengths, info=info, _offsets=offsets, _tokens=tokens, _loss_mask=loss_mask)


def _open_files(path: Path, info: dict[str, Any]) -> tuple[ArrayFile, ArrayFile | None, ArrayFile | None]:
    """Where sequences begin, the tokens, and which of them have a loss, if the index holds that."""
    try:
        offsets, tokens, mask = ArrayFile.of_npy(path / "offsets.npy"), None, None
        if info["has_tokens"]:
            dtype = np.dtype(info["dtype"]).newbyteorder("<")
            tokens = ArrayFile(path / "tokens.bin", dtype=dtype, count=info["num_tokens"])
        if "loss_mask.bin" in info["files"]:
            mask = ArrayFile(path / "loss_mask.bin", dtype=MASK_DTYPE, count=info["num_tokens"])
    except (OSError, ValueError) as error:
        words = reason(error) if isinstance(error, OSError) else str(error)
        raise InputError(f"the index at {path} is damaged: {words}; index again with --restart") from None
    return offsets, tokens, mask


def read_info(path: Path) -> dict[str, Any]:
    """What index.json in the folder ``path`` holds.

    Raises:
        InputError: there is none, or it is of another version.
    """
    file = path / "index.json"
    if path.exists() and not path.is_dir():
        raise InputError(f"{path} is a file; an index is a folder, made with: lengthwise index SRC --out DIR")
    if not file.exists():
        if (path / "parts").is_dir():
            raise InputError(
                f"the index at {path} is half-written; run the same `lengthwise index` command again to finish it"
            )
        where = "" if path.is_absolute() else f" in the current folder, {Path.cwd()}"
        raise InputError(f"no index at {path}{where}; make one with: lengthwise index SRC --out {shell_word(path)}")
    info = read_json(file, what="that of an index")
    if not isinstance(info, dict) or "schema_version" not in info:
        raise InputError(f"{file} is not that of an index; index again with --restart, or choose another folder")
    if (version := info["schema_version"]) not in (FORMAT_VERSION, LOSS_MASK_VERSION):
        raise InputError(
            f"{file} has schema version {brief(version)}, this program reads {FORMAT_VERSION} and {LOSS_MASK_VERSION}; "
            "index again with --restart"
        )
    try:
        check_info(info)
    except ValueError as error:
        raise InputError(f"{file} is damaged: {error}; index again with --restart") from None
    return info


def token_digest(blocks: Iterator[np.ndarray], dtype: np.dtype[Any]) -> str:
    """Thirty-two hex digits over numbers of ``dtype``."""
    state = hashlib.blake2b(dtype.name.encode(), digest_size=16)
    for block in blocks:
        state.update(block.data)
    return state.hexdigest()


def token_blocks(path: Path, dtype: np.dtype[Any]) -> Iterator[np.ndarray]:
    """The numbers of a file, some megabytes at a time."""
    with path.open("rb") as file:
        while len(block := np.fromfile(file, dtype=dtype, count=_BLOCK_BYTES // dtype.itemsize)):
            yield block


def _agree(offsets: ArrayFile, lengths: LengthIndex) -> bool:
    if len(offsets) != len(lengths) + 1 or offsets.read(0, 1)[0] != 0:
        return False
    count = len(lengths)
    return all(
        np.array_equal(
            np.diff(offsets.read(start, min(start + _BLOCK, count) + 1)), lengths.lengths[start : start + _BLOCK]
        )
        for start in range(0, count, _BLOCK)
    )
