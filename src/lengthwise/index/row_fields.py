"""Which fields of a row are read: as asked for, or by the names and types of the first row that tells."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from lengthwise.core.column_names import TOKENS
from lengthwise.core.errors import InputError
from lengthwise.index.document_limits import Limits
from lengthwise.index.readers.columns import Kind, column_kind, column_kinds
from lengthwise.index.readers.document import where
from lengthwise.index.readers.documents_reader import read_objects, read_token_columns, tells_tokens
from lengthwise.index.readers.token_columns import LOSS_COLUMNS, NO_COLUMNS, ColumnsOfFirstRow
from lengthwise.index.settings import IndexSettings
from lengthwise.index.source_file import Format, WorkUnit, open_parquet
from lengthwise.index.sources import Sources

MESSAGES, PAIR, TEXT = "messages", ("prompt", "completion"), "text"
PREFERENCES = ("chosen", "rejected")
CONVERSATIONS = "conversations"
"""The chats of ShareGPT: messages of ``from`` and ``value``."""
_TABLES = (Format.PARQUET, Format.ARROW)
_ROWS = (Format.JSONL, Format.JSON, *_TABLES)
_LISTS = ("tokens", "flags", "numbers")


@dataclass(frozen=True, kw_only=True)
class RowFields:
    """The fields that are read of every row, and what they say of the loss."""

    field: str = ""
    """The text, or the tokens; the reader of another package; empty where files have no fields."""
    chat: tuple[str, ...] = ()
    """Instead, the fields of a chat: messages, prompt and completion, or text that a chat template made."""
    has_turns: bool = False
    """Whether rows of a chat say who speaks: messages, or prompt and completion."""
    is_plain: bool = False
    """Whether prompt and completion are text, not messages."""
    loss: str = "all"
    """Which tokens of a chat have a loss: ``completions``, ``assistant`` or ``all``."""
    holds_tokens: bool = False
    """Whether ``field`` holds ready tokens, not text."""
    beside: ColumnsOfFirstRow = NO_COLUMNS
    """What stands beside ready tokens: their labels, masks, padding and positions."""

    @property
    def marks_loss(self) -> bool:
        """Whether some tokens have no loss."""
        return bool(self.beside.loss) or (bool(self.chat) and self.loss != "all")

    def to_json(self) -> dict[str, Any]:
        """What tells requests apart; what there is none of is left out, as in earlier versions."""
        if self.chat:
            return {"field": self.field, "chat": list(self.chat), "loss": self.loss}
        loss, others = list(self.beside.loss), list(self.beside.others)
        return {
            "field": self.field,
            **({"loss": loss if len(loss) > 1 else loss[0]} if loss else {}),
            **({"columns": others} if others else {}),
        }


def row_fields(settings: IndexSettings, sources: Sources) -> RowFields:
    """The fields of a request; the first rows are looked at where the request does not name them.

    Raises:
        InputError: the rows are no chats, and were said to be, or ``--loss`` says what they cannot.
    """
    if sources.format in _ROWS:
        return _of_rows(settings, sources)
    name = settings.reader
    if sources.format is Format.TAR:
        name = settings.field or "txt"
    _check_no_chat(settings)
    holds_tokens = sources.format is Format.MEGATRON
    if sources.format in (Format.TAR, Format.READER):
        tells = (tells_tokens(unit, field=name, limits=settings.limits) for unit in _whole_files(sources))
        holds_tokens = next((answer for answer in tells if answer is not None), False)
    if holds_tokens:
        return _with_tokens(settings, sources, name)
    _check_nothing_ignored(settings, name)
    return RowFields(field=name)


def _of_rows(settings: IndexSettings, sources: Sources) -> RowFields:
    name, kinds = _first_that_tells(settings, _kinds_of_rows(sources, settings.limits))
    if settings.chat or kinds.get(name) == MESSAGES or (not settings.field and name == PAIR[0]):
        return _of_chat(settings, kinds, name)
    if not settings.field and name == TEXT and TEXT not in kinds:
        _explain_no_text(sources, kinds)
    _check_no_chat(settings)
    if sources.format in _TABLES and kinds and name not in kinds:
        column_kind(next(_whole_files(sources)), name)  # which says what there is instead
    if kinds.get(name) in _LISTS:
        return _with_tokens(settings, sources, name)
    labelled = next((column for column in LOSS_COLUMNS if kinds.get(column) in _LISTS), "")
    tokens = next((column for column in TOKENS if kinds.get(column) == "tokens"), "")
    if labelled and tokens and not settings.field and settings.loss != "all":
        raise InputError(
            f"{sources.label} has {name!r}, {tokens!r} and {labelled!r}; give --field {tokens} to read the tokens with "
            f"the loss that {labelled!r} gives them, or --field {name} to read the text, of which all tokens have one"
        )
    _check_nothing_ignored(settings, name)
    return RowFields(field=name)


def _explain_no_text(sources: Sources, kinds: dict[str, Kind]) -> None:
    """Raise ``InputError`` for rows of preferences, and where a column of tokens holds something else."""
    if all(name in kinds for name in PREFERENCES):
        raise InputError(
            f"{sources.label} has rows of {' and '.join(map(repr, PREFERENCES))}: an index has no pairs of "
            "preferences; give them to lengthwise.prepare as units of two sequences, or index the answers alone: "
            f"--field {PREFERENCES[0]}"
        )
    for name in TOKENS:
        if kinds.get(name) == "other":
            if sources.format in _TABLES:
                column_kind(next(_whole_files(sources)), name)
            raise InputError(f"{sources.label}: {name!r} is no list of whole numbers; tokens are a list of them a row")


def _check_nothing_ignored(settings: IndexSettings, field: str) -> None:
    if settings.ignore:
        what = f"{field!r} is text" if field else "documents are no rows"
        raise InputError(f"--ignore {settings.ignore[0]}: {what}, beside which nothing is read; leave it out")


def _with_tokens(settings: IndexSettings, sources: Sources, name: str) -> RowFields:
    beside = ColumnsOfFirstRow(ignores_loss=settings.loss == "all", ignored=settings.ignore)
    for unit in _whole_files(sources) if sources.format in (*_ROWS, Format.TAR) else ():
        for rows, columns in read_token_columns(unit, field=name, first_row=beside, limits=settings.limits):
            for row in (rows.lengths > 0).nonzero()[0].tolist()[:1]:
                names = [column for column in beside.names_read(name) if column in columns]
                names = [column for column in names if columns[column].is_given[row]]
                return RowFields(
                    field=name,
                    holds_tokens=True,
                    beside=replace(
                        beside,
                        loss=tuple(column for column in names if column in LOSS_COLUMNS),
                        others=tuple(column for column in names if column not in LOSS_COLUMNS),
                        place=where(unit, rows.first_row + row),
                    ),
                )
    return RowFields(field=name, holds_tokens=True, beside=beside)


def _first_that_tells(settings: IndexSettings, rows: Iterable[dict[str, Kind]]) -> tuple[str, dict[str, Kind]]:
    """The field that is read, and what the fields of the first row hold where it is neither null nor empty."""
    first: dict[str, Kind] = {}
    for kinds in rows:
        first = first or kinds
        name = settings.field or _field_by_kinds(kinds, is_chat=settings.chat)
        if kinds.get(name) != "nothing" and not (name == PAIR[0] and kinds.get(PAIR[1]) == "nothing"):
            return name, kinds
    return settings.field or _field_by_kinds(first, is_chat=settings.chat), first


def _field_by_kinds(kinds: dict[str, Kind], *, is_chat: bool) -> str:
    """The field by the customary names; one that is null or empty counts if there is no other."""
    if TEXT in kinds and not is_chat:
        return TEXT
    tokens = () if is_chat else TOKENS
    for is_empty in (False, True):
        empty = ("nothing",) if is_empty else ()
        for name in (MESSAGES, CONVERSATIONS):
            if kinds.get(name) in (MESSAGES, *empty):
                return name
        if all(name in kinds and (is_empty or kinds[name] != "nothing") for name in PAIR):
            return PAIR[0]
        for name in tokens:
            if kinds.get(name) in (*_LISTS, *empty):
                return name
    return TEXT


def _of_chat(settings: IndexSettings, kinds: dict[str, Kind], field: str) -> RowFields:
    is_pair = field == PAIR[0] and not settings.field
    has_turns = is_pair or kinds.get(field) == MESSAGES
    if not has_turns and settings.loss not in ("", "all"):
        raise InputError(
            f"--loss {settings.loss}: {field!r} holds text, whose turns are not known; give rows with messages or with "
            "prompt and completion, or --loss all"
        )
    is_plain = is_pair and kinds[field] == TEXT
    if is_plain and settings.loss == "assistant":
        raise InputError("--loss assistant: prompt and completion are text, not messages; give --loss completions")
    loss = settings.loss or ("completions" if has_turns else "all")
    beside = ColumnsOfFirstRow(ignored=settings.ignore)
    chat = PAIR if is_pair else (field,)
    return RowFields(field=field, chat=chat, has_turns=has_turns, is_plain=is_plain, loss=loss, beside=beside)


def _check_no_chat(settings: IndexSettings) -> None:
    if settings.chat:
        raise InputError("--chat reads rows of JSON lines, Parquet or Arrow; write the chats to one of them")
    if settings.loss not in ("", "all"):
        raise InputError(
            f"--loss {settings.loss} is of chats, and rows are none; give rows with messages or with prompt and "
            "completion, or leave it out"
        )


def _whole_files(sources: Sources) -> Iterator[WorkUnit]:
    for file in sources.files:
        is_parquet = sources.format is Format.PARQUET
        stop = open_parquet(file).metadata.num_row_groups if is_parquet else max(file.size, 0)
        yield WorkUnit(number=0, format=sources.format, files=(file,), stop=stop)


def _kinds_of_rows(sources: Sources, limits: Limits) -> Iterator[dict[str, Kind]]:
    """What the fields of each row of JSON hold, or the columns of each file of a table."""
    for unit in _whole_files(sources):
        if sources.format in _TABLES:
            try:
                yield dict(column_kinds(unit))
            except InputError:
                return  # what is damaged is explained where all of it is read
            continue
        for row in read_objects(unit, limits):
            yield {name: _kind_of(value) for name, value in row.items()}


def _kind_of(value: Any) -> Kind:
    if value is None or value == []:
        return "nothing"
    if isinstance(value, str):
        return "text"
    if not isinstance(value, list):
        return "other"
    if all(isinstance(item, dict) for item in value):
        return "messages"
    types = set(map(type, value))
    if types <= {int}:
        return "tokens"
    if types <= {bool}:
        return "flags"
    return "other" if types <= {str, dict} else "numbers"  # also one with a null, which reading it refuses
