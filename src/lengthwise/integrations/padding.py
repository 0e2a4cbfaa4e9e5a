"""Rows of different lengths as one padded batch, with the mask that each row needs, for models that take no packs.

batch = lw.pad([row0, row1], mask="square")
loss = model(**batch).loss
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch

from lengthwise.core.errors import InputError
from lengthwise.session.item_columns import ItemColumns
from lengthwise.session.item_values import ExpectedColumns

IGNORED = -100
"""The label of a token without a loss."""


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
    """Rows of token ids, padded at their ends: B rows of T tokens.

    Args:
        rows: ids each, or items with ``input_ids`` and perhaps ``labels``.
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
        ``input_ids`` [B, T], ``labels`` [B, T] with -100 on padding, and ``attention_mask`` if there is one.

    Raises:
        InputError: there is no row, one is empty or longer than ``length``, or there are more than ``rows_to``.
    """
    tokens, labels = zip(*(_of(number, row) for number, row in enumerate(rows))) if len(rows) else ((), ())
    lengths = [len(row) for row in tokens]
    if not lengths:
        raise InputError("there is no row to pad")
    if length is not None and max(lengths) > length:
        raise InputError(f"row {int(np.argmax(lengths))} has {max(lengths):,} tokens, over length={length:,}; raise it")
    if rows_to is not None and len(lengths) > rows_to:
        raise InputError(f"{len(lengths)} rows are more than rows_to={rows_to}; raise it, or give fewer")
    size = (rows_to or len(lengths), length or max(lengths))
    ids, targets = np.full(size, pad_token, dtype=np.int64), np.full(size, IGNORED, dtype=np.int64)
    for number, (row, label) in enumerate(zip(tokens, labels)):
        ids[number, : len(row)], targets[number, : len(row)] = row, label
    batch = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(targets)}
    is_token = torch.arange(size[1]) < torch.tensor(lengths + [0] * (size[0] - len(lengths)))[:, None]
    if mask == "keys":
        batch["attention_mask"] = is_token.long()
    elif mask == "square":
        batch["attention_mask"] = _square(is_token, causal=causal, dtype=mask_dtype)
    elif mask is not None:
        raise InputError(f"no mask {mask!r}; known: keys, square, None")
    return batch


def _square(is_token: torch.Tensor, *, causal: bool, dtype: torch.dtype) -> torch.Tensor:
    """[B, 1, T, T] from [B, T]: which key each query attends to."""
    all_pairs = torch.ones(is_token.shape[1], is_token.shape[1], dtype=torch.bool)
    seen = is_token[:, None, :] & (all_pairs.tril() if causal else all_pairs)
    seen = torch.where(is_token[:, :, None], seen, torch.eye(len(all_pairs), dtype=torch.bool))[:, None]
    if dtype == torch.bool:
        return seen
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


def _of(number: int, row: Any) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and labels of a row."""
    try:
        values = ItemColumns(ExpectedColumns(ignore_index=IGNORED, splits_rows=False)).read(number, row)
    except InputError as error:
        raise InputError(str(error).replace(f"item {number}", f"row {number}")) from error
    return values.tokens, values.tokens if values.labels is None else values.labels
