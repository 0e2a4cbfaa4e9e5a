"""Parquet rows: text row by row, or ready tokens whose lengths come from the list offsets without decoding."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from lengthwise.core.errors import InputError
from lengthwise.data.documents import Document, TokenRows, check_tokens, from_text
from lengthwise.data.source import SourceFile
from lengthwise.data.units import Unit, open_parquet

_BATCH_BYTES = 16 << 20


def column_kind(file: SourceFile, field: str) -> str:
    """``text`` or ``tokens``, by the type of the column."""
    import pyarrow as pa

    schema = open_parquet(file).schema_arrow
    if field not in schema.names:
        raise InputError(
            f"{file.name} has no column {field!r}; choose with --field (columns: {', '.join(schema.names)})"
        )
    kind = schema.field(field).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "text"
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if is_list and pa.types.is_integer(kind.value_type):
        return "tokens"
    raise InputError(
        f"{file.name}: column {field!r} is {kind}, neither text nor lists of integers; choose with --field"
    )


def _columns(unit: Unit, field: str, expected: str) -> Iterator[Any]:
    file = unit.files[0]
    if column_kind(file, field) != expected:
        raise InputError(f"{file.name}: column {field!r} is not {expected} as in the first file; index the two apart")
    parquet = open_parquet(file)
    groups = [parquet.metadata.row_group(group) for group in range(unit.start, unit.stop)]
    num_rows = sum(group.num_rows for group in groups)
    row_bytes = sum(group.total_byte_size for group in groups) // max(num_rows, 1)
    batch_size = min(max(_BATCH_BYTES // max(row_bytes, 1), 1), 1 << 16)
    for batch in parquet.iter_batches(batch_size, row_groups=list(range(unit.start, unit.stop)), columns=[field]):
        yield batch.column(0)


def read_parquet_text(unit: Unit, *, field: str) -> Iterator[Document]:
    """Rows of a text column."""
    row = 0
    for column in _columns(unit, field, "text"):
        for value in column.to_pylist():
            yield from_text(row, value, unit)
            row += 1


def read_parquet_tokens(unit: Unit, *, field: str) -> Iterator[TokenRows]:
    """Rows of a column of lists of token ids, a batch at a time."""
    import pyarrow.compute as pc

    row = 0
    for column in _columns(unit, field, "tokens"):
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
        values = column.flatten()
        if values.null_count:
            raise InputError(f"{unit.files[0].name}: column {field!r} holds lists with missing values; fill them first")
        flat = values.to_numpy(zero_copy_only=False)
        check_tokens(flat, unit, row)
        yield TokenRows(row, len(lengths), flat.astype(np.uint32), lengths)
        row += len(lengths)
