"""Build one work unit: read, encode, count, and put the result in place by a single rename."""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from lengthwise.core.errors import InputError
from lengthwise.core.lengths import MOST_TOKENS
from lengthwise.index.chats import BESIDE_CHATS, ChatRow, open_chat_encoder
from lengthwise.index.document_limits import DEFAULT_LIMITS, Limits
from lengthwise.index.readers.document import BLANK, Document, OversizedValue, TokenRows, where
from lengthwise.index.readers.documents_reader import read_documents, read_records, read_token_rows
from lengthwise.index.row_fields import RowFields
from lengthwise.index.skipped import SkippedDocuments
from lengthwise.index.source_file import Format, WorkUnit, check_unchanged
from lengthwise.index.store import MASK_DTYPE
from lengthwise.index.tokenizers import HuggingFaceTokenizer, TokenizerSpec, append_eos, dtype_for, load_tokenizer
from lengthwise.index.work_units import open_lengths

_BATCH_BYTES = 1 << 20
_BATCH_DOCUMENTS = 4096
_BATCH_CHATS = 256
_PACKED = (".gz", ".zst", ".bz2", ".xz", ".lz4", ".zip", ".7z")
MOST_UNUSED = 64
"""Names of columns that are not read which an index keeps."""
READY_DTYPE = np.dtype("<u4")
"""Type of tokens in the parts when the vocabulary is only known once all are read."""


@dataclass(frozen=True, kw_only=True)
class PartJob:
    """All that a worker must know besides the unit."""

    parts: str
    tokenizer: TokenizerSpec
    drop_empty: bool
    skip_binary: bool
    fields: RowFields
    """What is read of every row."""
    skip_large: bool = False
    limits: Limits = DEFAULT_LIMITS

    @property
    def token_dtype(self) -> np.dtype[Any]:
        """Type of the tokens in the parts."""
        return dtype_for(load_tokenizer(self.tokenizer).vocab_size) if self.tokenizer.encodes else READY_DTYPE


class _Batch(NamedTuple):
    """Consecutive documents: tokens end to end (None: lengths alone), token counts, and (file, row) of each."""

    flat: np.ndarray | None
    lengths: np.ndarray
    origins: np.ndarray
    loss_mask: np.ndarray | None = None
    """Of each token whether it has a loss; None: all have one."""


@dataclass
class _Tally:
    intake: SkippedDocuments = field(default_factory=SkippedDocuments)
    num_rows: int = 0
    max_token: int = -1
    num_loss_tokens: int = 0
    num_spelled: int = 0
    unused: dict[str, None] = field(default_factory=dict)
    """Names of columns that are not read."""


def part_path(job: PartJob, number: int) -> Path:
    """Where the finished part of unit ``number`` is."""
    return Path(job.parts) / f"{number:07d}"


def build_part(job: PartJob, unit: WorkUnit) -> int:
    """Build the part of ``unit`` unless it is there; returns the unit's number."""
    final = part_path(job, unit.number)
    if final.exists():
        return unit.number
    partial = final.with_name(f"{final.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _write_part(job, unit, partial)
    if final.exists():  # a worker that outlived its killed parent was quicker; it wrote the same
        shutil.rmtree(partial)
    else:
        partial.rename(final)
    return unit.number


def _write_part(job: PartJob, unit: WorkUnit, folder: Path) -> None:
    tally = _Tally()
    lengths: list[np.ndarray] = [np.empty(0, dtype=np.int64)]
    origins: list[np.ndarray] = [np.empty((0, 2), dtype=np.int64)]
    with (folder / "tokens.bin").open("wb") as tokens, (folder / "loss_mask.bin").open("wb") as masks:
        for batch in _batches(job, unit, tally):
            left = _without_loss(job, unit, _without_empty(job, unit, batch, tally), tally)
            lengths.append(_write_tokens(job, left, tokens, tally))
            origins.append(left.origins)
            if left.loss_mask is not None:
                masks.write(left.loss_mask.astype(MASK_DTYPE).data)
        _sync(tokens)
        _sync(masks)
    all_lengths = np.concatenate(lengths)
    counts = {
        "num_sequences": len(all_lengths),
        "num_tokens": int(all_lengths.sum()),
        "max_length": int(all_lengths.max(initial=0)),
        "num_rows": tally.num_rows,
        "max_token": tally.max_token,
        "num_loss_tokens": tally.num_loss_tokens,
        "num_spelled": tally.num_spelled,
        "unused": list(tally.unused)[:MOST_UNUSED],
        "intake": tally.intake.to_json(),
    }
    with (folder / "lengths.npy").open("wb") as file:
        np.save(file, all_lengths)
        _sync(file)
    with (folder / "origins.npy").open("wb") as file:
        np.save(file, np.concatenate(origins))
        _sync(file)
    with (folder / "counts.json").open("wb") as file:
        file.write(json.dumps(counts).encode())
        _sync(file)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _write_tokens(job: PartJob, batch: _Batch, tokens: BinaryIO, tally: _Tally) -> np.ndarray:
    flat, lengths = batch.flat, batch.lengths
    if flat is None or not len(lengths):
        return lengths
    if job.tokenizer.encodes and not job.fields.chat:  # chats end as their template says
        eos_id = load_tokenizer(job.tokenizer).eos_id
        flat, lengths = (flat, lengths) if eos_id is None else append_eos(flat, lengths, eos_id)
    tally.max_token = max(tally.max_token, int(flat.max()))
    tokens.write(flat.astype(job.token_dtype, copy=False).data)
    return lengths


def _without_empty(job: PartJob, unit: WorkUnit, batch: _Batch, tally: _Tally) -> _Batch:
    is_empty = batch.lengths == 0
    if not is_empty.any():
        return batch
    file, row = map(int, batch.origins[int(np.argmax(is_empty))])
    if not job.drop_empty:
        place = where(unit, row, file=file)
        raise InputError(f"{place} is empty: it has no token; remove it, or pass --on-empty drop")
    tally.intake.add("empty", _places(batch, is_empty))
    return batch._replace(lengths=batch.lengths[~is_empty], origins=batch.origins[~is_empty])


def _without_loss(job: PartJob, unit: WorkUnit, batch: _Batch, tally: _Tally) -> _Batch:
    """Leave out, or refuse, documents without a token that has a loss; the first one has none: nothing predicts it."""
    if batch.loss_mask is None or batch.flat is None or not len(batch.lengths):
        return batch
    mask, starts = batch.loss_mask.copy(), np.cumsum(batch.lengths) - batch.lengths
    mask[starts] = False
    counts = np.add.reduceat(mask, starts, dtype=np.int64)
    tally.num_loss_tokens += int(counts.sum())
    if (has_loss := counts > 0).all():
        return batch._replace(loss_mask=mask)
    file, row = map(int, batch.origins[int(np.argmin(has_loss))])
    if not job.drop_empty:
        why = "there is no turn of the assistant" if job.fields.chat else f"{_loss_columns(job)}"
        place = where(unit, row, file=file)
        raise InputError(f"{place} has no token with a loss: {why}; remove it, or pass --on-empty drop")
    tally.intake.add("no_loss", _places(batch, ~has_loss))
    stays = np.repeat(has_loss, batch.lengths)
    return _Batch(batch.flat[stays], batch.lengths[has_loss], batch.origins[has_loss], mask[stays])


def _places(batch: _Batch, is_left_out: np.ndarray) -> list[tuple[int, int]]:
    """The file and row of some documents of a batch."""
    return [(file, row) for file, row in batch.origins[is_left_out].tolist()]


def _loss_columns(job: PartJob) -> str:
    names = job.fields.beside.loss
    return f"{' and '.join(map(repr, names))} leave{'s' if len(names) == 1 else ''} all out"


def _batches(job: PartJob, unit: WorkUnit, tally: _Tally) -> Iterator[_Batch]:
    if job.fields.chat:
        yield from _chat_batches(job, unit, tally)
        return
    if job.tokenizer.kind == "lengths":
        yield _length_batch(unit, tally)
        return
    if job.tokenizer.kind == "tokens":
        for rows in read_token_rows(unit, field=job.fields.field, first_row=job.fields.beside, limits=job.limits):
            tally.num_rows = rows.first_row + rows.num_rows
            tally.unused |= dict.fromkeys(rows.unused)
            if rows.large:
                tally.intake.documents += 1
                _pass_over(job, unit, Document(0, rows.first_row, b"", "large", rows.large), tally)
                continue
            numbers = rows.first_row + np.arange(len(rows.lengths)) if rows.row_numbers is None else rows.row_numbers
            tally.intake.documents += len(numbers) if rows.row_numbers is None else len(np.unique(numbers))
            origins = np.stack([np.zeros_like(numbers), numbers], axis=1)
            yield _Batch(rows.flat, rows.lengths, origins, _mask_of(job, rows))
        return
    tokenizer = load_tokenizer(job.tokenizer)
    for documents in _document_batches(job, unit, tally):
        texts = [document.data for document in documents]
        flat, lengths = tokenizer.encode(texts)
        if isinstance(tokenizer, HuggingFaceTokenizer):
            tally.num_spelled += tokenizer.count_spelled(texts)
        origins = np.array([(document.file, document.row) for document in documents], dtype=np.int64)
        yield _Batch(flat, lengths, origins)


def _chat_batches(job: PartJob, unit: WorkUnit, tally: _Tally) -> Iterator[_Batch]:
    encoder = open_chat_encoder(job.tokenizer, job.fields)
    beside = tuple(name for name in BESIDE_CHATS if name not in (*job.fields.chat, *job.fields.beside.ignored))
    records = read_records(unit, fields=job.fields.chat, optional=beside, limits=job.limits)
    while group := list(islice(records, _BATCH_CHATS)):
        tally.num_rows = group[-1][0] + 1
        chats = [(row, value) for row, value in group if value is not BLANK]
        tally.intake.documents += len(chats)
        for row, value in chats:
            if isinstance(value, OversizedValue):
                _pass_over(job, unit, Document(0, row, b"", "large", value.size), tally)
        chats = [(row, value) for row, value in chats if not isinstance(value, OversizedValue)]
        flat, lengths, mask = encoder.encode([ChatRow(value, partial(where, unit, row)) for row, value in chats])
        origins = np.array([(0, row) for row, _ in chats], dtype=np.int64).reshape(-1, 2)
        yield _Batch(flat, lengths, origins, mask)


def _mask_of(job: PartJob, rows: TokenRows) -> np.ndarray | None:
    """The loss mask of rows of tokens; an empty row, such as a blank line, has an empty one."""
    if job.fields.beside.loss and rows.loss_mask is None:
        return np.empty(0, dtype=bool)
    return rows.loss_mask


def _document_batches(job: PartJob, unit: WorkUnit, tally: _Tally) -> Iterator[list[Document]]:
    batch: list[Document] = []
    num_bytes = 0
    for document in read_documents(unit, field=job.fields.field, limits=job.limits):
        tally.num_rows = document.row + 1
        if document.problem == "blank":
            continue
        tally.intake.documents += 1
        if document.problem:
            _pass_over(job, unit, document, tally)
            continue
        batch.append(document)
        num_bytes += len(document.data)
        if num_bytes >= _BATCH_BYTES or len(batch) == _BATCH_DOCUMENTS:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _pass_over(job: PartJob, unit: WorkUnit, document: Document, tally: _Tally) -> None:
    """Count a document that is left out, or refuse it."""
    if not (job.skip_large if document.problem == "large" else job.skip_binary):
        raise InputError(f"{where(unit, document.row, file=document.file)} {_why(document, job.limits, unit)}")
    tally.intake.add(document.problem, [(document.file, document.row)])


def _why(document: Document, limits: Limits, unit: WorkUnit) -> str:
    """Why a document is refused, and the way out."""
    if document.problem == "large":
        return (
            f"has {document.size:,} bytes, and a document may have {limits.document:,}; raise --max-document, or skip "
            "such documents with --on-large skip"
        )
    is_file = unit.format is Format.TEXT
    is_packed = is_file and unit.files[document.file].name.lower().endswith(_PACKED)
    reason = {
        "binary": f"is {'a binary file' if is_file else 'binary'} (it holds a NUL byte);",
        "undecodable": f"{document.reason or 'is not text in UTF-8'};",
        "unreadable": "cannot be read;",
    }[document.problem]
    if is_packed and document.problem != "unreadable":
        reason = "is compressed: unpack it first; or"
    if is_file:
        return f"{reason} skip such files with --on-binary skip, or choose files with --glob"
    return f"{reason} mend it, or leave such documents out with --on-binary skip"


def _length_batch(unit: WorkUnit, tally: _Tally) -> _Batch:
    check_unchanged(unit.files[0])
    lengths = np.array(open_lengths(unit.files[0])[unit.start : unit.stop])
    if len(lengths) and (shortest := int(lengths.min())) < 0:
        place = where(unit, int(np.argmin(lengths)))
        raise InputError(f"{place} is {shortest}; a length is a number of tokens, 0 or more")
    if len(lengths) and (longest := int(lengths.max())) > MOST_TOKENS:
        place = where(unit, int(np.argmax(lengths)))
        raise InputError(f"{place} is {longest:,}; more than {MOST_TOKENS:,} tokens are no sequence")
    tally.num_rows = len(lengths)
    tally.intake.documents += len(lengths)
    rows = np.arange(len(lengths))
    return _Batch(None, lengths.astype(np.int64), np.stack([np.zeros_like(rows), rows], axis=1))
