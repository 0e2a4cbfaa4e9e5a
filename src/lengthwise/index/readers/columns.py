"""Columns of Parquet and Arrow files: text row by row, or ready tokens whose lengths come from the list offsets."""

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from lengthwise.core.errors import InputError, LengthwiseError, first_line
from lengthwise.index.document_limits import MAX_DOCUMENT
from lengthwise.index.readers.arrow import arrow_batches, arrow_schema
from lengthwise.index.readers.document import Document, TokenRows, from_utf8, row_of, token_rows, where
from lengthwise.index.source_file import Format, SourceFile, WorkUnit, check_unchanged, explaining, open_parquet

_BATCH_BYTES = 16 << 20
_MAX_ROWS = 1 << 16
_TEXTS = ("is_string", "is_large_string", "is_string_view")
_LISTS = ("is_list", "is_large_list", "is_fixed_size_list", "is_list_view", "is_large_list_view")


def column_kind(unit: WorkUnit, field: str) -> Literal["text", "tokens"]:
    """What the column holds, by its type."""
    import pyarrow as pa

    file = unit.files[0]
    with explaining(f"{file.name} is damaged", "; write the file again"):
        schema = open_parquet(file).schema_arrow if unit.format is Format.PARQUET else arrow_schema(file)
        names = list(schema.names)
    count = names.count(field)
    if count != 1:
        available = f"(columns: {', '.join(names)})"
        raise InputError(
            f"{file.name} has {count or 'no'} column{'s' * (count > 1)} {field!r}; choose with --field {available}"
        )
    kind = schema.field(field).type
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    if _is_any(plain, _TEXTS):
        return "text"
    if _is_any(plain, _LISTS) and pa.types.is_integer(plain.value_type):
        return "tokens"
    raise InputError(
        f"{file.name}: column {field!r} is {kind}, neither text nor lists of integers; choose with --field"
    )


def _is_any(kind: Any, names: tuple[str, ...]) -> bool:
    import pyarrow as pa

    return any(
        getattr(pa.types, name)(kind) for name in names if hasattr(pa.types, name)
    )  # views are not in all versions


def _columns(unit: WorkUnit, field: str, expected: str) -> Iterator[tuple[int, Any]]:
    """Pieces of the column of about ``_BATCH_BYTES``, each behind its first row, counted from where the unit starts."""
    import pyarrow as pa

    file = unit.files[0]
    if column_kind(unit, field) != expected:
        raise InputError(f"{file.name}: column {field!r} is not {expected} as in the first file; index the two apart")
    batches = (
        arrow_batches(file, unit.start, unit.stop) if unit.format is Format.ARROW else _parquet_batches(unit, field)
    )
    row = 0
    try:
        for batch in batches:
            column = batch.column(_place_of(file, batch.schema.names, field))
            column.validate(full=pa.types.is_dictionary(column.type))  # before anything follows its offsets
            if pa.types.is_dictionary(column.type):
                column = column.dictionary_decode()
            if expected == "text":
                column.cast(pa.large_binary()).validate(full=True)
            step = min(max(_BATCH_BYTES * len(column) // max(column.nbytes, 1), 1), _MAX_ROWS)
            for start in range(0, len(column), step):
                piece = column.slice(start, step)
                yield row, piece
                row += len(piece)
    except LengthwiseError:
        raise
    except Exception as error:  # of damaged files pyarrow raises errors of many kinds
        raise InputError(
            f"{where(unit, row)} or one after it is damaged: {first_line(error)}; write the file again"
        ) from None


def _place_of(file: SourceFile, names: list[str], field: str) -> int:
    """Number of the column among those read."""
    if field in names:
        return names.index(field)
    raise InputError(f"{file.name}: column {field!r} is not what its name leads to; rename columns that have a dot")


def _parquet_batches(unit: WorkUnit, field: str) -> Iterator[Any]:
    check_unchanged(unit.files[0])
    parquet = open_parquet(unit.files[0])
    groups = [parquet.metadata.row_group(group) for group in range(unit.start, unit.stop)]
    num_rows = sum(group.num_rows for group in groups)
    row_bytes = sum(group.total_byte_size for group in groups) // max(num_rows, 1)
    batch_size = min(max(_BATCH_BYTES // max(row_bytes, 1), 1), _MAX_ROWS)
    yield from parquet.iter_batches(batch_size, row_groups=list(range(unit.start, unit.stop)), columns=[field])


def read_text_column(unit: WorkUnit, *, field: str, most_bytes: int = MAX_DOCUMENT) -> Iterator[Document]:
    """Rows of a text column; those of more than ``most_bytes`` come without their text."""
    import pyarrow as pa

    for first, column in _columns(unit, field, "text"):
        for row, value in enumerate(column.cast(pa.large_binary()).to_pylist(), first):
            is_large = value is not None and len(value) > most_bytes
            yield Document(0, row, b"", "large", len(value)) if is_large else from_utf8(0, row, value)


def read_token_column(unit: WorkUnit, *, field: str) -> Iterator[TokenRows]:
    """Rows of a column of lists of token ids, a piece at a time."""
    import pyarrow.compute as pc

    for first, column in _columns(unit, field, "tokens"):
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
        values = column.flatten()
        if len(lengths) and (int(lengths.min()) < 0 or int(lengths.sum()) != len(values)):
            raise InputError(
                f"{where(unit, first)} or one after it is damaged: the lists overlap; write the file again"
            )
        if values.null_count:
            row = first + row_of(lengths, int(np.argmax(values.is_null().to_numpy(zero_copy_only=False))))
            raise InputError(f"{where(unit, row)}: column {field!r} holds a list with missing values; fill them first")
        yield token_rows(unit, first, values.to_numpy(zero_copy_only=False), lengths)
