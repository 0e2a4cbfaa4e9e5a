"""Join finished parts, in order and in bounded memory, into the files of an index; index.json comes last."""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lengthwise.core.errors import InputError
from lengthwise.core.lengths import LengthIndex
from lengthwise.index.build_part import MOST_UNUSED, PartJob, part_path
from lengthwise.index.index_info import TOKENIZER_FILES
from lengthwise.index.readers.document import ROW_NAMES, where
from lengthwise.index.settings import FORMAT_VERSION, LOSS_MASK_VERSION
from lengthwise.index.skipped import SkippedDocuments
from lengthwise.index.source_file import Format, WorkUnit
from lengthwise.index.store import MASK_DTYPE, token_blocks, token_digest
from lengthwise.index.tokenizers import dtype_for, load_tokenizer


@dataclass(frozen=True, kw_only=True)
class _Totals:
    num_sequences: int
    num_tokens: int
    max_length: int
    max_token: int
    num_loss_tokens: int
    num_spelled: int
    unused: list[str]
    intake: SkippedDocuments


def assemble(
    job: PartJob, units: list[WorkUnit], out: Path, *, request: dict[str, Any], fingerprint: str
) -> dict[str, Any]:
    """Write the index of finished parts into ``out``; returns what index.json holds.

    Raises:
        InputError: no document has a token.
    """
    totals = _sum_counts(job, units)
    if not totals.num_sequences:
        left_out = ", ".join(f"{count} {reason}" for reason, count in totals.intake.left_out.items() if count)
        why = f"all documents are left out ({left_out})" if left_out else "no document; check path and file types"
        raise InputError(f"{request['source']} holds no sequence: {why}")
    has_tokens = job.tokenizer.kind != "lengths"
    vocab_size, eos_id = totals.max_token + 1, None
    if job.tokenizer.encodes:
        vocab_size, eos_id = load_tokenizer(job.tokenizer).vocab_size, load_tokenizer(job.tokenizer).eos_id
    dtype = dtype_for(vocab_size)
    has_mask = job.fields.marks_loss and totals.num_loss_tokens < totals.num_tokens - totals.num_sequences
    corpus_digest = _join(job, units, out / "tokens.bin", job.token_dtype, dtype) if has_tokens else ""
    corpus_digest += _join(job, units, out / "loss_mask.bin", MASK_DTYPE, MASK_DTYPE) if has_mask else ""
    _join_lengths(job, units, out, totals=totals)
    _whole(out / "documents.jsonl", lambda file: file.writelines(_document_lines(job, units)))
    lengths = LengthIndex(lengths=np.load(out / "lengths.npy", mmap_mode="r"), corpus_digest=corpus_digest)
    names = (
        ["tokens.bin"] * has_tokens + ["loss_mask.bin"] * has_mask + ["offsets.npy", "lengths.npy", "documents.jsonl"]
    )
    for path in _tokenizer_files(job):
        _whole(out / path.name, partial(_copy, path))
        names.append(path.name)
    document = {
        "schema_version": LOSS_MASK_VERSION if has_mask else FORMAT_VERSION,
        "num_sequences": totals.num_sequences,
        "num_tokens": totals.num_tokens,
        "max_length": totals.max_length,
        **({"num_loss_tokens": totals.num_loss_tokens} if has_mask else {}),
        **({"documents_spelling_special_tokens": totals.num_spelled} if totals.num_spelled else {}),
        **({"unused_columns": totals.unused} if totals.unused else {}),
        "has_tokens": has_tokens,
        "vocab_size": vocab_size if has_tokens else None,
        "dtype": dtype.name if has_tokens else None,
        "eos_id": eos_id,
        "tokenizer": job.tokenizer.to_json(),
        "digest": lengths.digest,
        "corpus_digest": corpus_digest,
        "ledger": totals.intake.to_json(),
        "files": {name: (out / name).stat().st_size for name in names},
        "request": request,
        "fingerprint": fingerprint,
    }
    _whole(out / "index.json", lambda file: file.write(json.dumps(document, indent=1).encode() + b"\n"))
    return document


def _copy(path: Path, file: BinaryIO) -> None:
    file.write(path.read_bytes())


def _sum_counts(job: PartJob, units: list[WorkUnit]) -> _Totals:
    intake = SkippedDocuments()
    num_sequences = num_tokens = max_length = num_loss_tokens = num_spelled = 0
    max_token = -1
    unused: dict[str, None] = {}
    for unit, counts, rows_before in _with_counts(job, units):
        num_sequences += counts["num_sequences"]
        num_tokens += counts["num_tokens"]
        max_length = max(max_length, counts["max_length"])
        max_token = max(max_token, counts["max_token"])
        num_loss_tokens += counts.get("num_loss_tokens", 0)  # parts of an earlier version have none
        num_spelled += counts.get("num_spelled", 0)
        unused |= dict.fromkeys(counts.get("unused", ()))
        intake.merge(counts["intake"], partial(_place, unit, rows_before))
    return _Totals(
        num_sequences=num_sequences,
        num_tokens=num_tokens,
        max_length=max_length,
        max_token=max_token,
        num_loss_tokens=num_loss_tokens,
        num_spelled=num_spelled,
        unused=sorted(unused)[:MOST_UNUSED],
        intake=intake,
    )


def _with_counts(job: PartJob, units: list[WorkUnit]) -> Iterator[tuple[WorkUnit, dict[str, Any], int]]:
    """Each unit, the counts of its part, and how many rows its file has before it."""
    path, rows_before = "", 0
    for unit in units:
        counts: dict[str, Any] = json.loads((part_path(job, unit.number) / "counts.json").read_text())
        if unit.files[0].path != path:
            path, rows_before = unit.files[0].path, 0
        yield unit, counts, rows_before
        rows_before += counts["num_rows"]


def _place(unit: WorkUnit, rows_before: int, file: int, row: int) -> str:
    return where(unit, row, file=file, rows_before=rows_before)


def _whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Put a file in place by a rename, once all of it is on disk."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _tokenizer_files(job: PartJob) -> list[Path]:
    """The files of the tokenizer, in the folder of parts."""
    folder = Path(job.tokenizer.path).parent
    return [path for name in TOKENIZER_FILES if job.tokenizer.path and (path := folder / name).is_file()]


def _join(job: PartJob, units: list[WorkUnit], path: Path, dtype_of_parts: np.dtype[Any], dtype: np.dtype[Any]) -> str:
    """Write the numbers that parts have in a file of this name end to end; returns their digest."""
    digests: list[str] = []

    def write(file: BinaryIO) -> None:
        def blocks() -> Iterator[np.ndarray]:
            for unit in units:
                for block in token_blocks(part_path(job, unit.number) / path.name, dtype_of_parts):
                    narrowed = block.astype(dtype, copy=False)
                    file.write(narrowed.data)
                    yield narrowed

        digests.append(token_digest(blocks(), dtype))

    _whole(path, write)
    return digests[0]


def _join_lengths(job: PartJob, units: list[WorkUnit], out: Path, *, totals: _Totals) -> None:
    dtype = np.dtype("<i4" if totals.max_length < 1 << 31 else "<i8")

    def write_lengths(file: BinaryIO) -> None:
        _write_header(file, dtype, totals.num_sequences)
        for lengths in _part_lengths(job, units):
            file.write(lengths.astype(dtype).data)

    def write_offsets(file: BinaryIO) -> None:
        _write_header(file, np.dtype("<i8"), totals.num_sequences + 1)
        start = np.zeros(1, dtype="<i8")
        file.write(start.data)
        for lengths in _part_lengths(job, units):
            offsets = start + np.cumsum(lengths, dtype="<i8")
            file.write(offsets.data)
            start = offsets[-1:] if len(offsets) else start

    _whole(out / "lengths.npy", write_lengths)
    _whole(out / "offsets.npy", write_offsets)


def _write_header(file: BinaryIO, dtype: np.dtype[Any], size: int) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (size,)}
    np.lib.format.write_array_header_1_0(file, header)


def _part_lengths(job: PartJob, units: list[WorkUnit]) -> Iterator[np.ndarray]:
    for unit in units:
        yield np.load(part_path(job, unit.number) / "lengths.npy")


def _document_lines(job: PartJob, units: list[WorkUnit]) -> Iterator[bytes]:
    """One line per sequence: the source file and, in files of many documents, which line, record or row."""
    for unit, _, rows_before in _with_counts(job, units):
        origins = np.load(part_path(job, unit.number) / "origins.npy")
        names = [json.dumps(file.name) for file in unit.files]
        if unit.format is Format.TEXT:
            yield from (f'{{"source": {names[file]}}}\n'.encode() for file in origins[:, 0].tolist())
            continue
        key = ROW_NAMES.get(unit.format, "row")
        first = rows_before + (unit.format is Format.JSONL)  # lines are counted from 1, all else from 0
        rows = (origins[:, 1] + first).tolist()
        yield from (f'{{"source": {names[0]}, "{key}": {row}}}\n'.encode() for row in rows)
