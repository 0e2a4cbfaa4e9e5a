"""Sequences as a collate function of transformers makes them: called with one item at a time, so nothing is padded."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np

from lengthwise.core.batch import BatchStream
from lengthwise.core.column_names import LOSS_MASKS, PADDING, PROMPT_MASK
from lengthwise.core.errors import InputError
from lengthwise.core.lengths import LengthIndex
from lengthwise.session.collated_together import mixed_column
from lengthwise.session.item_values import as_array
from lengthwise.session.sequence_units import members_of

_ENDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Of the sequences of a row, as kernels of flash attention take them."""
_DRAWING = ("DataCollatorForWholeWordMask", "DataCollatorForPermutationLanguageModeling")
"""Collators of transformers that draw at random."""
MakeStream = Callable[[LengthIndex, str], tuple[BatchStream, int]]
"""From lengths and objective to batches, and how many an epoch has."""
CALLED_TWICE = 8
"""Items that are collated a second time, to see whether they come out the same."""


class CollatedItems:
    """Items of ``dataset`` with their columns as ``collate`` gives them."""

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any],
        *,
        needs_labels: bool,
        batch_size: int = 1,
        make_stream: MakeStream | None = None,
    ) -> None:
        """Try the collator.

        Args:
            dataset: the items.
            collate: makes a batch of a list of items.
            needs_labels: whether a batch without labels cannot be used.
            batch_size: items that ``collate`` gets at once where the user's own loop calls it; more than 1: they have
                to come out as each does alone.
            make_stream: makes the batches of a run and says how many an epoch has; None: they are the sampler's.

        Raises:
            InputError: an item comes out otherwise the second time, or beside others.
        """
        self._dataset, self._collate, self._needs_labels = dataset, collate, needs_labels
        self.make_stream = make_stream
        inner = getattr(collate, "data_collator", collate)
        draws = bool(getattr(inner, "mlm", False)) or any(kind.__name__ in _DRAWING for kind in type(inner).__mro__)
        if draws or any(self._differs(number) for number in range(min(len(dataset), CALLED_TWICE))):
            raise InputError(
                f"{_name(collate)} makes another batch of the same item every time; hide tokens with "
                "lengthwise={'objective': 'masked', 'mask_token_id': ...} and collate without"
            )
        count = min(batch_size, len(dataset), CALLED_TWICE)
        if count > 1 and (column := mixed_column(collate, [dataset[number] for number in range(count)])):
            raise InputError(
                f"{_name(collate)} makes other {column} of {count} items together than of each alone, beyond padding, "
                "and items are collated one at a time here, where sequences of a batch are not computed together. Make "
                "what depends on a batch in a loss of your own, or set per_device_train_batch_size=1 and "
                "gradient_accumulation_steps to the product of both: then transformers collates one item at a time, too"
            )

    def _differs(self, number: int) -> bool:
        """Whether the same item is collated in two ways; one that is random itself is noticed when lengths are read."""
        item = self._dataset[number]
        if (members := members_of(f"item {number} of train_dataset", item, slot_tokens=1)) is not None:
            raise InputError(
                f"item {number} of train_dataset is a {type(item).__name__} of {len(members)} sequences that share a "
                "micro-batch, and lengthwise.Trainer computes losses of single ones; make the loss of them in a loop "
                "of your own: lengthwise.prepare"
            )
        once, again = (self._collated(number, copy.copy(item)) for _ in range(2))
        return once.keys() != again.keys() or any(not np.array_equal(once[key], again[key]) for key in once)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self._collated(number, self._dataset[number])

    def _collated(self, number: int, item: Any) -> dict[str, Any]:
        where = f"item {number} of train_dataset"
        self._check_masks_are_seen(item, where)
        try:
            batch = self._collate([item])
        except Exception as error:
            raise InputError(
                f"{_name(self._collate)} cannot collate {where}, {type(item).__name__}, by itself "
                f"({type(error).__name__}: {error}); items are dictionaries with input_ids and labels"
            ) from error
        if not hasattr(batch, "items"):
            raise InputError(
                f"{_name(self._collate)} gives {type(batch).__name__} for {where}; a batch is a dictionary with "
                "input_ids and labels"
            )
        wanted = ("input_ids", "labels") if self._needs_labels else ("input_ids",)
        missing = [key for key in wanted if batch.get(key) is None]
        if missing:
            raise InputError(
                f"{_name(self._collate)} gives no {' and no '.join(missing)} for {where}; for next tokens use "
                "DataCollatorForLanguageModeling(tokenizer, mlm=False), or items with labels"
            )
        return {key: value for key, value in self._row(batch, where).items() if value is not None}

    def _row(self, batch: Any, where: str) -> dict[str, Any]:
        """The columns of a batch of one, without its first axis."""
        length = np.shape(batch["input_ids"])[-1]
        row = {}
        for key, value in batch.items():
            if value is None or isinstance(value, str):
                continue
            array = as_array(f"{key} of {where}", value)
            if key in _ENDS:
                if array.tolist() not in ([0, length], length):
                    raise InputError(f"{key} of {where} are the ends of several sequences; give each as its own item")
                continue
            if array.ndim and (len(array) != 1 or (key == "input_ids" and array.ndim != 2)):
                raise InputError(f"{key} of {where} has shape {array.shape} as a batch of one; one row is needed")
            row[key] = array[0] if array.ndim else array
        mask = row.get(PADDING)
        if mask is not None and mask.ndim and len(mask) and not mask[0]:
            raise InputError(
                f"{_name(self._collate)} pads {where} before its tokens, which moves their positions in some models; "
                "pad behind them: tokenizer.padding_side='right'"
            )
        return row

    def _check_masks_are_seen(self, item: Any, where: str) -> None:
        """Raise ``InputError`` if a mask of tokens that have a loss is removed before items are collated."""
        kept_columns = getattr(self._collate, "signature_columns", None)
        if kept_columns is None or not hasattr(item, "keys"):
            return
        removed = [name for name in (*LOSS_MASKS, PROMPT_MASK) if name in item and name not in kept_columns]
        if removed:
            raise InputError(
                f"{', '.join(removed)} of {where} says which tokens have a loss, and transformers removes it before "
                "items are collated; set remove_unused_columns=False in TrainingArguments"
            )


def _name(collate: Any) -> str:
    inner = getattr(collate, "data_collator", collate)
    return getattr(inner, "__name__", type(inner).__name__)
