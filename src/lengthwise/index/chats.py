"""Chats as tokens: rendered by the tokenizer's own chat template, and which of the tokens have a loss."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lengthwise.core.errors import InputError, first_line
from lengthwise.core.read_file import brief
from lengthwise.index.row_fields import MESSAGES, RowFields
from lengthwise.index.tokenizers import TokenizerSpec, load_tokenizer

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_OTHERWISE = "use --loss assistant, if the template marks what is generated, or --loss all"
_SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}
_TOOLS, _OPTIONS, _LIKED = "tools", "chat_template_kwargs", "label"
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
_PARTS = ("image", "video", "audio")
BESIDE_CHATS = (_TOOLS, _OPTIONS, _LIKED, *_MEDIA)
"""Fields beside a chat that are read if rows have them: tools and options of its template, and what is refused."""
_OURS = ("tools", "tokenize", "return_dict", "return_assistant_tokens_mask", "add_generation_prompt", "chat_template")
"""Options of templates that rows do not choose."""


class ChatRow(NamedTuple):
    """One chat: its fields by name, and its place in words for messages."""

    fields: Mapping[str, Any]
    place: Callable[[], str]


class _Rendered(NamedTuple):
    """The text of a chat, and the letters of it that have a loss."""

    text: str
    start: int = 0
    stop: int = 0


class EncodedChats(NamedTuple):
    """Tokens of chats end to end, the number of each, and which have a loss (None: all)."""

    flat: np.ndarray
    lengths: np.ndarray
    loss_mask: np.ndarray | None


@lru_cache(maxsize=4)
def open_chat_encoder(spec: TokenizerSpec, fields: RowFields) -> "ChatEncoder":
    """The encoder of chats with these ``fields``, loaded once per process.

    Raises:
        InputError: transformers is missing, it cannot load the tokenizer, or there is no fitting chat template.
    """
    return ChatEncoder(spec, fields)


class ChatEncoder:
    """Renders chats with the tokenizer of a folder, and encodes them with its special tokens."""

    def __init__(self, spec: TokenizerSpec, fields: RowFields) -> None:
        self._fields, self._eos_id = fields, load_tokenizer(spec).eos_id
        self._vocab_size, self._tokenizer = load_tokenizer(spec).vocab_size, _load(Path(spec.path).parent)
        if fields.has_turns and not fields.is_plain:
            self._check_template()

    def encode(self, rows: Sequence[ChatRow]) -> EncodedChats:
        """The tokens of ``rows``; one without a chat has none.

        Raises:
            InputError: the template cannot render a row, or it does not render it as the loss needs it.
        """
        for row in rows:
            self._check_beside(row)
        if self._fields.loss == "assistant":
            encoded = [self._by_generation(row) for row in rows]
        else:
            encoded = self._by_letters([self._render(row) for row in rows])
        lengths = np.array([len(ids) for ids, _ in encoded], dtype=np.int64)
        flat = np.concatenate([np.empty(0, dtype=np.int64), *(np.array(ids, dtype=np.int64) for ids, _ in encoded)])
        if len(flat) and (largest := int(flat.max())) >= self._vocab_size:
            raise InputError(
                f"the tokenizer makes token {largest}, and its tokenizer.json ends at {self._vocab_size - 1}; save it "
                "again with save_pretrained, so that tokenizer.json has all tokens"
            )
        if self._fields.loss == "all":
            return EncodedChats(flat, lengths, None)
        return EncodedChats(flat, lengths, np.concatenate([np.empty(0, dtype=bool), *(mask for _, mask in encoded)]))

    def _check_beside(self, row: ChatRow) -> None:
        """Raise ``InputError`` for what would be lost or misread: images, sound, and completions nobody likes."""
        for name in _MEDIA:
            if row.fields.get(name) not in (None, [], ""):
                raise InputError(
                    f"{row.place()}: {name!r} holds what is no text, and an index holds text alone; leave such rows "
                    f"out, or read them without it: --ignore {name}"
                )
        if len(self._fields.chat) > 1 and isinstance(row.fields.get(_LIKED), bool):
            raise InputError(
                f"{row.place()}: {_LIKED!r} is {str(row.fields[_LIKED]).lower()}, which says whether a completion is "
                "wanted (KTO), and every completion of an index is learned; keep the wanted ones, and read them with "
                f"--ignore {_LIKED}"
            )

    def _by_letters(self, rendered: Sequence[_Rendered]) -> list[tuple[list[int], np.ndarray]]:
        """Ids of each text, and which of them hold a letter with a loss."""
        if not (texts := [chat.text for chat in rendered]):
            return []
        encoding = self._tokenizer(
            texts, add_special_tokens=self._fields.is_plain, return_offsets_mapping=True, verbose=False
        )
        chats = []
        for chat, ids, offsets in zip(rendered, encoding["input_ids"], encoding["offset_mapping"]):
            starts, stops = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
            mask = (stops > chat.start) & (starts < chat.stop)
            if not chat.text:
                ids, mask = [], mask[:0]
            elif self._eos_id is not None:
                is_ended = bool(ids) and ids[-1] == self._eos_id
                ids = ids if is_ended else [*ids, self._eos_id]
                mask = np.append(mask[: len(ids) - 1], True)
            chats.append((ids, mask))
        return chats

    def _by_generation(self, row: ChatRow) -> tuple[list[int], np.ndarray]:
        """Ids of a chat, and which of them its template marks as generated."""
        if self._is_empty(row):
            return [], np.empty(0, dtype=bool)
        messages, _ = self._messages(row)
        encoding = self._apply(row, messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return encoding["input_ids"], np.array(encoding["assistant_masks"], dtype=bool)

    def _is_empty(self, row: ChatRow) -> bool:
        """Whether a row has no chat: its field, or prompt or completion, is null, or no message is to be learned."""
        values = [row.fields[name] for name in self._fields.chat]
        return any(value is None for value in values) or (self._fields.has_turns and values[-1] == [])

    def _render(self, row: ChatRow) -> _Rendered:
        if self._is_empty(row):
            return _Rendered("")
        values = [row.fields[name] for name in self._fields.chat]
        if self._fields.is_plain or not self._fields.has_turns:
            for name, value in zip(self._fields.chat, values):
                if not isinstance(value, str):
                    raise InputError(f"{row.place()}: {name!r} must be text like the first row's, not {brief(value)}")
            text = "".join(values)
            return _Rendered(text, len(values[0]), len(text))
        messages, answer = self._messages(row)
        text = str(self._apply(row, messages, tokenize=False))
        if self._fields.loss == "all" or answer is None:
            return _Rendered(text)
        before = str(self._apply(row, messages[: answer.start], tokenize=False, add_generation_prompt=True))
        upto = str(self._apply(row, messages[: answer.stop], tokenize=False)) if answer.stop < len(messages) else text
        if not (text.startswith(before) and text.startswith(upto)):
            raise InputError(
                f"{row.place()}: the chat template renders what comes before the last answer otherwise than with it, "
                f"so that the answer cannot be told apart; {_OTHERWISE}"
            )
        return _Rendered(text, len(before), len(upto))

    def _messages(self, row: ChatRow) -> tuple[list[dict[str, Any]], slice | None]:
        """The messages of a row, and which of them are the completion: the last answer, if there is one."""
        lists = [_checked_messages(row, name) for name in self._fields.chat]
        if len(lists) > 1:
            return lists[0] + lists[1], slice(len(lists[0]), len(lists[0]) + len(lists[1]))
        answers = [number for number, message in enumerate(lists[0]) if message["role"] == "assistant"]
        return lists[0], slice(answers[-1], answers[-1] + 1) if answers else None

    def _apply(self, row: ChatRow, messages: list[dict[str, Any]], **options: Any) -> Any:
        row_options = _without_nulls(row.fields.get(_OPTIONS) or {})
        if not isinstance(row_options, dict) or any(name in _OURS for name in row_options):
            raise InputError(
                f"{row.place()}: {_OPTIONS!r} is {brief(row_options)}; it is to be an object of the template's own "
                f"options, none of {', '.join(_OURS)}"
            )
        try:
            return self._tokenizer.apply_chat_template(messages, tools=row.fields.get(_TOOLS), **row_options, **options)
        except Exception as error:  # of templates, which raise what they like
            raise InputError(
                f"{row.place()}: the chat template cannot render it: {first_line(error)}; mend the row, or the template"
            ) from None

    def _check_template(self) -> None:
        try:
            template = self._tokenizer.get_chat_template()
        except ValueError:
            raise InputError(
                "the tokenizer has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json); "
                "give the tokenizer of a chat model, or rows whose prompt and completion are text"
            ) from None
        if self._fields.loss == "assistant" and not _GENERATION.search(template):
            raise InputError(
                "--loss assistant: the chat template does not mark what the assistant generates ({% generation %}); "
                "use --loss completions or all, or a template that marks it"
            )


def _checked_messages(row: ChatRow, name: str) -> list[dict[str, Any]]:
    messages = _without_nulls(row.fields[name] or [])
    if isinstance(messages, list):
        messages = [_with_role(message) for message in messages]
    if not isinstance(messages, list) or not all(isinstance(item, dict) and "role" in item for item in messages):
        raise InputError(
            f"{row.place()}: {name!r} must be a list of {MESSAGES}, each with role and content, not {brief(messages)}"
        )
    for part in (part for item in messages if isinstance(item.get("content"), list) for part in item["content"]):
        kind = str(part.get("type", "")) if isinstance(part, dict) else ""
        if any(medium in kind for medium in _PARTS):
            raise InputError(
                f"{row.place()}: {name!r} has a part of type {kind!r}, and an index holds text alone; leave such "
                "rows out"
            )
    return messages


def _with_role(message: Any) -> Any:
    """A message of ``role`` and ``content``; ShareGPT calls them ``from`` and ``value``, and has other speakers."""
    if not isinstance(message, dict) or "role" in message or not {"from", "value"} <= message.keys():
        return message
    others = {name: value for name, value in message.items() if name not in ("from", "value")}
    return {"role": _SPEAKERS.get(message["from"], message["from"]), "content": message["value"], **others}


def _without_nulls(value: Any) -> Any:
    """The value without keys that are null: columns give every message the keys of all."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _load(folder: Path) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise InputError("chats need the package transformers; pip install 'lengthwise[hf]'") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        _keep_whitespace_in_offsets(tokenizer)
        return tokenizer
    except Exception as error:
        raise InputError(
            f"transformers cannot load the tokenizer: {first_line(error)}; save it again with save_pretrained"
        ) from None


def _keep_whitespace_in_offsets(tokenizer: Any) -> None:
    """Have tokens of whitespace say which letters they hold; some tokenizers trim them to none (``trim_offsets``)."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    processor = getattr(backend, "post_processor", None)
    if backend is not None and processor is not None:
        state = json.loads(processor.__getstate__(), object_hook=_untrimmed)
        processor.__setstate__(json.dumps(state).encode())
        backend.post_processor = processor


def _untrimmed(values: dict[str, Any]) -> dict[str, Any]:
    return {**values, "trim_offsets": False} if "trim_offsets" in values else values
