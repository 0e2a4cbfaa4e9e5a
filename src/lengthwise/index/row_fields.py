"""Which fields of a row are read: as asked for, or by the names and types that the first row has."""

from dataclasses import dataclass
from typing import Any

from lengthwise.core.errors import InputError
from lengthwise.index.document_limits import Limits
from lengthwise.index.readers.columns import column_kinds
from lengthwise.index.readers.document import LABELS, LOSS_MASKS
from lengthwise.index.readers.documents_reader import read_first_row
from lengthwise.index.settings import IndexSettings
from lengthwise.index.source_file import Format, WorkUnit
from lengthwise.index.sources import Sources

MESSAGES, PAIR, TEXT, TOKENS = "messages", ("prompt", "completion"), "text", "input_ids"
CONVERSATIONS = "conversations"
"""The chats of ShareGPT: messages of ``from`` and ``value``."""
_WITH_FIELDS = (Format.JSONL, Format.PARQUET, Format.ARROW, Format.TAR)
_ROWS = (Format.JSONL, Format.PARQUET, Format.ARROW)


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
    loss_field: str = ""
    """The field beside ready tokens that says which of them have a loss."""

    @property
    def marks_loss(self) -> bool:
        """Whether some tokens have no loss."""
        return bool(self.loss_field) or (bool(self.chat) and self.loss != "all")

    def to_json(self) -> dict[str, Any]:
        """What tells requests apart; chats and labels are left out where there are none, as in earlier versions."""
        if self.chat:
            return {"field": self.field, "chat": list(self.chat), "loss": self.loss}
        return {"field": self.field} | ({"loss": self.loss_field} if self.loss_field else {})


def row_fields(settings: IndexSettings, sources: Sources) -> RowFields:
    """The fields of a request; the first row is looked at where the request does not name them.

    Raises:
        InputError: the rows are no chats, and were said to be, or ``--loss`` says what they cannot.
    """
    if sources.format not in _WITH_FIELDS:
        return _without_chat(settings, RowFields(field=settings.reader))
    default = "txt" if sources.format is Format.TAR else TEXT
    if sources.format not in _ROWS:
        return _without_chat(settings, RowFields(field=settings.field or default))
    kinds = _first_kinds(sources, settings.limits)
    field = settings.field or _field_by_kinds(kinds, is_chat=settings.chat)
    if settings.chat or kinds.get(field) == MESSAGES or (not settings.field and field == PAIR[0]):
        return _of_chat(settings, kinds, field)
    named = next((name for name in (LABELS, *LOSS_MASKS) if name in kinds), "")
    has_labels = kinds.get(field) == "tokens" and kinds.get(named) == "tokens" and settings.loss != "all"
    return _without_chat(settings, RowFields(field=field, loss_field=named if has_labels else ""))


def _field_by_kinds(kinds: dict[str, str], *, is_chat: bool) -> str:
    if TEXT in kinds and not is_chat:
        return TEXT
    for name in (MESSAGES, CONVERSATIONS):
        if kinds.get(name) == MESSAGES:
            return name
    if all(name in kinds for name in PAIR):
        return PAIR[0]
    return TOKENS if kinds.get(TOKENS) == "tokens" and not is_chat else TEXT


def _of_chat(settings: IndexSettings, kinds: dict[str, str], field: str) -> RowFields:
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
    return RowFields(field=field, chat=PAIR if is_pair else (field,), has_turns=has_turns, is_plain=is_plain, loss=loss)


def _without_chat(settings: IndexSettings, fields: RowFields) -> RowFields:
    if settings.chat:
        raise InputError("--chat reads rows of JSON lines, Parquet or Arrow; write the chats to one of them")
    if settings.loss not in ("", "all"):
        raise InputError(
            f"--loss {settings.loss} is of chats, and rows are none; give rows with messages or with prompt and "
            "completion, or leave it out"
        )
    return fields


def _first_kinds(sources: Sources, limits: Limits) -> dict[str, str]:
    """What the fields of the first row hold: ``text``, ``tokens``, ``messages`` or ``other``; empty: there is none."""
    file = sources.files[0]
    unit = WorkUnit(number=0, format=sources.format, files=(file,), stop=max(file.size, 0))
    try:
        if sources.format is not Format.JSONL:
            return dict(column_kinds(unit))
        return {name: _kind_of(value) for name, value in read_first_row(unit, limits).items()}
    except InputError:
        return {}  # what is damaged is explained where all of it is read


def _kind_of(value: Any) -> str:
    if isinstance(value, str):
        return "text"
    if not isinstance(value, list):
        return "other"
    if value and all(isinstance(item, dict) for item in value):
        return "messages"
    return "tokens" if all(type(item) is int for item in value) else "other"
