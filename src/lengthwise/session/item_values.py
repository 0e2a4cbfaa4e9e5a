"""What an item holds for a model, what a model expects of items, and their values as arrays."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lengthwise.core.batch import NEXT_TOKEN
from lengthwise.core.errors import InputError


@dataclass(frozen=True, kw_only=True, eq=False)
class ItemRow:
    """What one item holds for the model: values of its tokens, without padding."""

    tokens: np.ndarray
    labels: np.ndarray | None = None
    passed: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Arguments of the forward beside the tokens, and columns for the loss, one value per token."""
    special: np.ndarray | None = None
    """True for tokens that are never hidden."""
    bounds: tuple[int, ...] = ()
    """Where the sequences of the row begin, and its end."""
    is_unit: bool = False
    """Whether it is a unit, whose members are the sequences of the row."""

    @property
    def used(self) -> frozenset[str]:
        """What it has beside tokens: ``labels``, ``special``, arguments of the forward, or columns for the loss."""
        labels, special = self.labels is not None, self.special is not None
        return frozenset([*["labels"] * labels, *["special"] * special, *self.passed])


@dataclass(frozen=True, kw_only=True)
class ExpectedColumns:
    """What a model makes of items."""

    objective: str = NEXT_TOKEN
    arguments: frozenset[str] = frozenset()
    """Parameters of the model's forward."""
    label_limit: int | None = None
    """Labels are below it; None: the number is not known."""
    ignore_index: int = -100
    slot_tokens: int = 1
    needs_labels: bool = False
    """Whether the model has nothing to learn from tokens without labels."""
    labels_sequences: bool = False
    """Whether an item has one label, of the whole sequence."""
    makes_inputs: bool = False
    """Whether the user's own ``inputs=`` makes the forward's arguments."""
    loss_columns: tuple[str, ...] = ()
    """Names of columns that are for the user's loss, with a number for each token, or one for all of the sequence."""
    shares_prefixes: bool = False
    """Whether sequences of a unit have what they begin with in common."""
    splits_rows: bool = True
    """Whether rows that were packed before may be split into their sequences."""
    special_tokens: frozenset[int] = frozenset()
    """Tokens that have a meaning of their own, as far as the model says."""


def is_mapping(item: Any) -> bool:
    """Whether an item has columns."""
    return hasattr(item, "keys") and hasattr(item, "__getitem__")


def as_array(where: str, values: Any) -> np.ndarray:
    """The values as NumPy has them.

    Raises:
        InputError: they are rows of different lengths, or no numbers at all.
    """
    try:
        if isinstance(values, torch.Tensor):
            values = values.detach().cpu()
            return (values.float() if values.dtype == torch.bfloat16 else values).numpy()
        return np.asarray(values)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise InputError(
            f"{where} holds {type(values).__name__}, which is no array of numbers ({error}); give each item one row"
        ) from error


def not_tokenised(what: str, values: np.ndarray) -> InputError:
    """The error for text or bytes in the place of token ids."""
    if values.dtype.kind == "S":
        return InputError(
            f"{what} is bytes, which may be text or tokens: where each byte is a token, from 0 to 255, give "
            "np.frombuffer(row, np.uint8); tokenise text first (tokenizer(texts)['input_ids'])"
        )
    return InputError(
        f"{what} is text; a corpus holds token ids: tokenise it first (tokenizer(texts)['input_ids']), or make an "
        "index of the files with `lengthwise index`"
    )


def as_torch_has_it(what: str, array: np.ndarray) -> np.ndarray:
    """Numbers in a dtype that torch computes with: of wide unsigned integers int64, of ``longdouble`` float64.

    Raises:
        InputError: an integer is beyond int64.
    """
    kind, size = array.dtype.kind, array.dtype.itemsize
    if kind == "u" and size > 1:
        if array.size and int(array.max()) > np.iinfo(np.int64).max:
            raise InputError(f"{what} has {int(array.max())} in it; integers are up to 2^63 - 1")
        return array.astype(np.int64)
    if kind == "f" and size > 8:
        return array.astype(np.float64)
    return array.astype(array.dtype.newbyteorder("="), copy=False) if kind in "biuf" else array


def without_padding(array: np.ndarray, keep: np.ndarray) -> np.ndarray:
    """The part of a column of one value per token that is no padding; another column as it is."""
    return array[keep] if array.shape == keep.shape else array


def first_leaf(value: Any) -> Any:
    """The first number or text in nested lists, None if there is none; a tensor or an array stands for its own."""
    if isinstance(value, list | tuple):
        return next((leaf for item in value if (leaf := first_leaf(item)) is not None), None)
    if isinstance(value, np.ndarray) and value.dtype.kind in "USO":
        return first_leaf(value.tolist()) if value.size else None
    return np.float64(0) if isinstance(value, np.ndarray) else value


def row_advice(tokens: np.ndarray) -> str:
    """What to do about an item of such values, which are no row of token ids."""
    if tokens.ndim == 2 and len(tokens) == 1 and tokens.dtype.kind in "iu":
        return "it is a batch of one row: give that row, as tokenizer(text)['input_ids'] is without return_tensors"
    if not tokens.ndim and tokens.dtype.kind in "iu":
        return (
            "where the corpus is one long row, cut it into sequences: at the ends of documents, or "
            "[ids[i : i + 1024] for i in range(0, len(ids), 1024)]"
        )
    if tokens.ndim == 1 and tokens.dtype.kind == "b":
        return "its ids are booleans: give them as integers, row.astype(int)"
    if tokens.ndim == 1 and tokens.dtype.kind == "f" and bool((tokens == np.floor(tokens)).all()):
        return "its ids are floats: give them as integers"
    if tokens.ndim == 1 and tokens.dtype.kind == "b":
        return "its ids are booleans: give them as integers"
    return "of sequences of anything else say how many tokens each element of the first axis is: slot_tokens"


def cannot_be_used(where: str, name: str, reason: str, *, is_for_loss: bool = False) -> InputError:
    """The error for a column that would change what is learned, and that nobody knows how to use.

    ``is_for_loss``: it has numbers that a loss may be made of.
    """
    named = f"name it in loss_columns=({name!r},) if the loss is made of it (micro_batch.column({name!r})), "
    return InputError(
        f"column {name} of {where} {reason}; {named if is_for_loss else ''}leave it out of the items, or make the "
        "forward's arguments yourself with inputs=lambda micro_batch: {...}"
    )
