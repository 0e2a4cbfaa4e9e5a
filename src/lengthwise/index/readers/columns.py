"""Columns of Parquet and Arrow files: text row by row, or ready tokens whose lengths come from the list offsets."""

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from lengthwise.core.column_names import LABELS
from lengthwise.core.column_rules import TOKEN_TYPES, reason_refused
from lengthwise.core.errors import InputError, LengthwiseError, first_line
from lengthwise.index.document_limits import MAX_DOCUMENT
from lengthwise.index.readers.arrow import arrow_batches, arrow_schema
from lengthwise.index.readers.document import Document, TokenRows, from_utf8, row_of, token_rows, where
from lengthwise.index.readers.token_columns import LOSS_COLUMNS, Column, ColumnsOfFirstRow
from lengthwise.index.readers.unused_columns import check_harmless, first_given, sample_of_type
from lengthwise.index.source_file import Format, SourceFile, WorkUnit, check_unchanged, explaining, open_parquet

_BATCH_BYTES = 16 << 20
_MAX_ROWS = 1 << 16
_TEXTS = ("is_string", "is_large_string", "is_string_view")
_LISTS = ("is_list", "is_large_list", "is_fixed_size_list", "is_list_view", "is_large_list_view")


Kind = Literal["text", "tokens", "flags", "numbers", "messages", "nothing", "other"]
"""What a column or field holds: ``tokens`` are lists of integers, ``flags`` of booleans, ``numbers`` of fractions too;
``nothing`` does not tell, being null or an empty list."""


def column_kind(unit: WorkUnit, field: str) -> Literal["text", "tokens", "nothing"]:
    """What the column holds, by its type.

    Raises:
        InputError: there is no such column, or it holds neither text nor tokens.
    """
    file, schema = unit.files[0], _schema(unit)
    _check_once(file, schema, field)
    kind = _kind_of(schema.field(field).type)
    if kind in ("text", "tokens", "nothing"):
        return kind
    raise InputError(
        f"{file.name}: column {field!r} is {schema.field(field).type}, neither text nor lists of integers; choose with "
        "--field"
    )


def column_kinds(unit: WorkUnit) -> dict[str, Kind]:
    """What each column of a table holds, by its type."""
    return {field.name: _kind_of(field.type) for field in _schema(unit)}


def _schema(unit: WorkUnit) -> Any:
    file = unit.files[0]
    with explaining(f"{file.name} is damaged", "; write the file again"):
        schema = open_parquet(file).schema_arrow if unit.format is Format.PARQUET else arrow_schema(file)
        list(schema.names)  # which raises where a name cannot be read
    return schema


def _check_once(file: SourceFile, schema: Any, field: str) -> None:
    """Raise ``InputError`` unless one column has this name."""
    count = schema.names.count(field)
    if count != 1:
        available = f"(columns: {', '.join(schema.names)})"
        raise InputError(
            f"{file.name} has {count or 'no'} column{'s' * (count > 1)} {field!r}; choose with --field {available}"
        )


def _kind_of(type: Any) -> Kind:
    import pyarrow as pa

    plain = type.value_type if pa.types.is_dictionary(type) else type
    if _is_any(plain, _TEXTS):
        return "text"
    if pa.types.is_null(plain):
        return "nothing"
    if not _is_any(plain, _LISTS):
        return "other"
    kinds: dict[str, Kind] = {
        "is_integer": "tokens",
        "is_boolean": "flags",
        "is_floating": "numbers",
        "is_null": "nothing",
    }
    kind: Kind = next((kinds[name] for name in kinds if getattr(pa.types, name)(plain.value_type)), "other")
    return "messages" if pa.types.is_struct(plain.value_type) else kind


def _is_any(kind: Any, names: tuple[str, ...]) -> bool:
    import pyarrow as pa

    return any(
        getattr(pa.types, name)(kind) for name in names if hasattr(pa.types, name)
    )  # views are not in all versions


def _columns(unit: WorkUnit, fields: tuple[str, ...], expected: str = "") -> Iterator[tuple[int, list[Any]]]:
    """Pieces of the columns of about ``_BATCH_BYTES``, behind their first row, counted from where the unit starts.

    ``expected`` is what the first of them must hold, ``text`` or ``tokens``; empty: anything.
    """
    import pyarrow as pa

    file = unit.files[0]
    for field in fields[:1] if expected else ():
        if column_kind(unit, field) not in (expected, "nothing"):
            raise InputError(
                f"{file.name}: column {field!r} is not {expected} as in the first file; index the two apart"
            )
    batches = (
        arrow_batches(file, unit.start, unit.stop) if unit.format is Format.ARROW else _parquet_batches(unit, fields)
    )
    row = 0
    try:
        for batch in batches:
            columns = [_checked(batch.column(_place_of(file, batch.schema.names, field))) for field in fields]
            if expected == "text":
                columns[0] = pa.nulls(len(columns[0])) if _kind_of(columns[0].type) == "nothing" else columns[0]
                columns[0].cast(pa.large_binary()).validate(full=True)
            num_rows, num_bytes = len(columns[0]), sum(column.nbytes for column in columns)
            step = min(max(_BATCH_BYTES * num_rows // max(num_bytes, 1), 1), _MAX_ROWS)
            for start in range(0, num_rows, step):
                pieces = [column.slice(start, step) for column in columns]
                yield row, pieces
                row += len(pieces[0])
    except LengthwiseError:
        raise
    except Exception as error:  # of damaged files pyarrow raises errors of many kinds
        raise InputError(
            f"{where(unit, row)} or one after it is damaged: {first_line(error)}; write the file again"
        ) from None


def _checked(column: Any) -> Any:
    """The column, decoded, once it is known that its offsets can be followed."""
    import pyarrow as pa

    is_encoded = pa.types.is_dictionary(column.type)
    column.validate(full=is_encoded)
    return column.dictionary_decode() if is_encoded else column


def _place_of(file: SourceFile, names: list[str], field: str) -> int:
    """Number of the column among those read."""
    if field in names:
        return names.index(field)
    raise InputError(f"{file.name}: column {field!r} is not what its name leads to; rename columns that have a dot")


def _parquet_batches(unit: WorkUnit, fields: tuple[str, ...]) -> Iterator[Any]:
    check_unchanged(unit.files[0])
    parquet = open_parquet(unit.files[0])
    groups = [parquet.metadata.row_group(group) for group in range(unit.start, unit.stop)]
    num_rows = sum(group.num_rows for group in groups)
    row_bytes = sum(group.total_byte_size for group in groups) // max(num_rows, 1)
    batch_size = min(max(_BATCH_BYTES // max(row_bytes, 1), 1), _MAX_ROWS)
    yield from parquet.iter_batches(batch_size, row_groups=list(range(unit.start, unit.stop)), columns=list(fields))


def read_text_column(unit: WorkUnit, *, field: str, most_bytes: int = MAX_DOCUMENT) -> Iterator[Document]:
    """Rows of a text column; those of more than ``most_bytes`` come without their text."""
    import pyarrow as pa

    for first, (column,) in _columns(unit, (field,), "text"):
        for row, value in enumerate(column.cast(pa.large_binary()).to_pylist(), first):
            is_large = value is not None and len(value) > most_bytes
            yield Document(0, row, b"", "large", len(value)) if is_large else from_utf8(0, row, value)


def read_token_column(
    unit: WorkUnit, *, field: str, first_row: ColumnsOfFirstRow
) -> Iterator[tuple[TokenRows, dict[str, Column]]]:
    """Rows of a column of lists of token ids, a piece at a time, and those of the columns beside it that are read."""
    fields = (field, *_columns_beside(unit, first_row.names_read(field)))
    schema = _schema(unit)
    others = {name: type for name, type in zip(schema.names, schema.types) if name not in fields}
    unused = tuple(others)
    doubtful = tuple(name for name, type in others.items() if _is_doubtful(name, type, first_row))
    for first, columns in _columns(unit, (*fields, *doubtful), "tokens"):
        for name, column in zip(doubtful, columns[len(fields) :]):
            _check_harmless(unit, first, name, column, first_row)
        values = [_numbers(unit, first, name, column) for name, column in zip(fields, columns)]
        yield token_rows(unit, first, *values[0][:2])._replace(unused=unused), dict(zip(fields[1:], values[1:]))


def _is_doubtful(name: str, type: Any, first_row: ColumnsOfFirstRow) -> bool:
    """Whether rows of such a column may be refused."""
    sample = sample_of_type(type)
    return sample is not None and name not in first_row.ignored and bool(reason_refused(name, sample))


def _check_harmless(unit: WorkUnit, first: int, name: str, column: Any, first_row: ColumnsOfFirstRow) -> None:
    """Raise ``InputError`` for the first row whose column would change what is learned."""
    if column.null_count == len(column):
        return
    if name == TOKEN_TYPES and _kind_of(column.type) == "tokens":
        numbers = _numbers(unit, first, name, column)
        rows = [row_of(numbers.counts, int(np.argmax(numbers.values != 0)))] if numbers.values.any() else []
    else:
        rows = [row for row in (first_given(column),) if row is not None]
    for row in rows:
        check_harmless(name, column[row].as_py(), first_row, lambda: where(unit, first + rows[0]))


def _columns_beside(unit: WorkUnit, names: tuple[str, ...]) -> Iterator[str]:
    """Names of the columns that hold something for each token; refuses what might mean that, and cannot be read."""
    file, schema = unit.files[0], _schema(unit)
    for name in names:
        if name not in schema.names:
            continue
        _check_once(file, schema, name)
        type = schema.field(name).type
        if (kind := _kind_of(type)) in ("tokens", "flags", "numbers") and (name not in LABELS or kind == "tokens"):
            yield name
        elif kind != "nothing" and not (name in LABELS[1:] and not _is_any(type, _LISTS)):  # a class of the whole row
            way_out = "ignore it with --loss all" if name in LOSS_COLUMNS else "leave it out"
            raise InputError(
                f"{file.name}: column {name!r} is {type}, not a list of numbers with one for each token; mend it, or "
                f"{way_out}"
            )


def _numbers(unit: WorkUnit, first: int, field: str, column: Any) -> Column:
    """The numbers of a column of lists end to end, how many each row has, and which rows are not null."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if _kind_of(column.type) == "nothing":
        column = column.cast(pa.list_(pa.int64()))
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    values = column.flatten()
    if len(lengths) and (int(lengths.min()) < 0 or int(lengths.sum()) != len(values)):
        raise InputError(f"{where(unit, first)} or one after it is damaged: the lists overlap; write the file again")
    if values.null_count:
        row = first + row_of(lengths, int(np.argmax(values.is_null().to_numpy(zero_copy_only=False))))
        raise InputError(f"{where(unit, row)}: column {field!r} holds a list with missing values; fill them first")
    is_given = column.is_valid().to_numpy(zero_copy_only=False)
    return Column(values.to_numpy(zero_copy_only=False), lengths, is_given)


def read_rows(
    unit: WorkUnit, *, fields: tuple[str, ...], optional: tuple[str, ...] = ()
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows of a table as plain values by column: all of ``fields``, and those of ``optional`` that it has."""
    schema = _schema(unit)
    for field in fields:
        _check_once(unit.files[0], schema, field)
    names = (*fields, *(name for name in optional if name in schema.names))
    for first, columns in _columns(unit, names):
        for row, values in enumerate(zip(*(column.to_pylist() for column in columns)), first):
            yield row, dict(zip(names, values))
