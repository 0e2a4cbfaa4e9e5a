"""Rows of different lengths as one padded batch, with the mask that each row needs, for models that take no packs.

batch = lw.pad([row0, row1], mask="square")
loss = model(**batch).loss
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from lengthwise.core.arguments import arguments_checked
from lengthwise.core.errors import InputError
from lengthwise.core.read_file import brief
from lengthwise.session.item_columns import ItemColumns
from lengthwise.session.item_values import ExpectedColumns

IGNORED = -100
"""The label of a token without a loss."""


@arguments_checked
def pad(
    rows: Sequence[Any],
    *,
    length: int | None = None,
    rows_to: int | None = None,
    mask: Literal["keys", "square"] | None = "keys",
    causal: bool = True,
    pad_token: int = 0,
    mask_dtype: torch.dtype = torch.bool,
) -> dict[str, torch.Tensor]:
    """Rows of token ids or of feature vectors, padded at their ends: B rows of T tokens.

    Args:
        rows: ids each, or items with ``input_ids`` and perhaps ``labels``; or floating-point features [T_i, E] each (of
            audio, video, embeddings), or items with one such column and perhaps ``labels`` of tokens, [T_i].
        length: T; None: that of the longest.
        rows_to: B, the last ones of padding alone; None: as many as there are.
        mask: ``keys``, [B, T] integers, 1 where there is a token; ``square``, [B, 1, T, T], for every token the tokens
            it attends to; None: none, which is exact for causal models, where no token looks at padding behind it.
        causal: of ``square``: only tokens up to itself.
        pad_token: what padding is filled with.
        mask_dtype: of ``square``: bool, True where it attends, as ``scaled_dot_product_attention`` takes it; or that of
            the model, 0 there and the least number elsewhere, as ``attn_implementation="eager"`` adds it. A token of
            padding attends to itself, so that nothing becomes NaN; no other token does.

    Returns:
        ``input_ids`` [B, T], ``labels`` [B, T] with -100 on padding, and ``attention_mask`` if there is one. Instead of
        ``input_ids``, features [B, T, E] with zeros on padding, by the name of their column (``inputs_embeds`` where
        they have none), with ``labels`` where items have them.

    Raises:
        InputError: there is no row, one is empty or longer than ``length``, there are more than ``rows_to``, or
            features differ in E or dtype.
    """
    if isinstance(rows, Mapping) or not hasattr(rows, "__len__"):
        raise InputError(f"rows={brief(rows)}: give a list of rows, even if there is one")
    if not len(rows):
        raise InputError("there is no row to pad")
    name = _name_of_features(rows[0])
    read = _tokens_of if name is None else partial(_features_of, name)
    columns, labels = zip(*(read(number, row) for number, row in enumerate(rows)))
    lengths = [len(column) for column in columns]
    _check_alike(columns, labels)
    if length is not None and max(lengths) > length:
        raise InputError(f"row {int(np.argmax(lengths))} has {max(lengths):,} tokens, over length={length:,}; raise it")
    if rows_to is not None and len(lengths) > rows_to:
        raise InputError(f"{len(lengths)} rows are more than rows_to={rows_to}; raise it, or give fewer")
    size = (rows_to or len(lengths), length or max(lengths))
    batch = {name or "input_ids": _stack(columns, size, pad_token if name is None else 0)}
    if labels[0] is not None:
        batch["labels"] = _stack(labels, size, IGNORED)
    is_token = torch.arange(size[1]) < torch.tensor(lengths + [0] * (size[0] - len(lengths)))[:, None]
    if mask == "keys":
        batch["attention_mask"] = is_token.long()
    elif mask == "square":
        batch["attention_mask"] = _square(is_token, causal=causal, dtype=mask_dtype)
    return batch


def _square(is_token: torch.Tensor, *, causal: bool, dtype: torch.dtype) -> torch.Tensor:
    """[B, 1, T, T] from [B, T]: which key each query attends to."""
    all_pairs = torch.ones(is_token.shape[1], is_token.shape[1], dtype=torch.bool)
    seen = is_token[:, None, :] & (all_pairs.tril() if causal else all_pairs)
    seen = torch.where(is_token[:, :, None], seen, torch.eye(len(all_pairs), dtype=torch.bool))[:, None]
    if dtype == torch.bool:
        return seen
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


def _check_alike(columns: Sequence[torch.Tensor], labels: Sequence[torch.Tensor | None]) -> None:
    """Raise ``InputError`` unless all rows have as many features of one dtype, and all or none have labels."""
    for number, (column, label) in enumerate(zip(columns, labels)):
        if column.shape[1:] != columns[0].shape[1:] or column.dtype != columns[0].dtype:
            raise InputError(
                f"row {number} has {column.shape[1]} features a token in {column.dtype}, the first has "
                f"{columns[0].shape[1]} in {columns[0].dtype}; give all rows the same"
            )
        if (label is None) != (labels[0] is None):
            raise InputError(
                f"row {number} and the first differ in whether they have labels; give all rows labels, or none"
            )


def _stack(columns: Sequence[torch.Tensor], size: tuple[int, int], fill: int) -> torch.Tensor:
    """[B, T, ...] of columns [T_i, ...]."""
    stacked = columns[0].new_full((*size, *columns[0].shape[1:]), fill)
    for number, column in enumerate(columns):
        stacked[number, : len(column)] = column
    return stacked


def _tokens_of(number: int, row: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels of a row."""
    if getattr(row, "ndim", 1) > 1:
        raise InputError(
            f"row {number} is {str(row.dtype).removeprefix('torch.')} of shape {list(row.shape)}; a row is token ids "
            "[T] or floating-point features [T, E]"
        )
    try:
        values = ItemColumns(ExpectedColumns(ignore_index=IGNORED, splits_rows=False)).read(number, row)
    except InputError as error:
        raise InputError(str(error).replace(f"item {number}", f"row {number}")) from error
    labels = values.tokens if values.labels is None else values.labels
    return torch.from_numpy(values.tokens.astype(np.int64)), torch.from_numpy(labels.astype(np.int64))


def _name_of_features(row: Any) -> str | None:
    """The name of the column of feature vectors; None where rows are tokens."""
    for name, value in row.items() if isinstance(row, Mapping) else [("inputs_embeds", row)]:
        kind = getattr(getattr(value, "dtype", None), "kind", None)  # of an array
        if getattr(value, "ndim", 0) == 2 and (kind == "f" if kind else torch.as_tensor(value).is_floating_point()):
            return str(name)
    return None


def _as_tensor(number: int, value: Any) -> torch.Tensor:
    """Features as a tensor, in this machine's order of bytes.

    Raises:
        InputError: torch has no such numbers.
    """
    if isinstance(value, np.ndarray) and not value.dtype.isnative:
        value = value.astype(value.dtype.newbyteorder("="))
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError) as error:
        dtype = getattr(value, "dtype", type(value).__name__)
        raise InputError(
            f"row {number} has features in {dtype}, which torch does not have; give float16, float32 or float64"
        ) from error


def _features_of(name: str, number: int, row: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Features and labels of a row."""
    value, labels = (row.get(name), row.get("labels")) if isinstance(row, Mapping) else (row, None)
    features = _as_tensor(number, value) if value is not None else torch.empty(0)
    if features.ndim != 2 or not features.is_floating_point() or not features.numel():
        raise InputError(
            f"row {number} has features of shape {list(features.shape)} in {features.dtype}; give numbers [T, E] of at "
            "least one token, as the first row's"
        )
    if labels is None:
        return features, None
    targets = torch.as_tensor(labels)
    if targets.shape != features.shape[:1]:
        raise InputError(
            f"row {number} has {len(features):,} tokens and labels of shape {list(targets.shape)}; give one for each "
            f"token, {IGNORED} where it has no loss"
        )
    return features, targets.long()
