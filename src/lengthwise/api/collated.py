"""Sequences as a collate function of transformers makes them: called with one item at a time, so nothing is padded."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from lengthwise.core.errors import InputError

_KNOWN = ("input_ids", "labels", "attention_mask", "position_ids")


class Collated:
    """Items of ``dataset`` with ``input_ids`` and ``labels``, as ``collate`` gives them."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], *, needs_labels: bool) -> None:
        self._dataset, self._collate, self._needs_labels = dataset, collate, needs_labels
        self._item = lru_cache(maxsize=64)(self._make)
        if len(dataset) and any(
            not np.array_equal(once[key], again[key])
            for once, again in [(self._make(0), self._make(0))]
            for key in once
        ):
            raise InputError(
                f"{_name(collate)} makes another batch of the same item every time; hide tokens with "
                "lengthwise={'objective': 'masked', 'mask_token_id': ...} and collate without"
            )

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        return self._item(int(number))

    def _make(self, number: int) -> dict[str, np.ndarray]:
        batch = {key: np.asarray(value) for key, value in self._collate([self._dataset[number]]).items()}
        where = f"item {number} of train_dataset"
        others = [key for key in batch if key not in _KNOWN and _says_something(batch[key])]
        if others:
            raise InputError(
                f"{_name(self._collate)} gives {', '.join(others)} for {where}; packs know input_ids and labels. Leave "
                "them out of the dataset, or make the forward's arguments with lengthwise={'inputs': ...}"
            )
        wanted = ("input_ids", "labels") if self._needs_labels else ("input_ids",)
        missing = [key for key in wanted if key not in batch]
        if missing:
            raise InputError(
                f"{_name(self._collate)} gives no {' and no '.join(missing)} for {where}; for next tokens use "
                "DataCollatorForLanguageModeling(tokenizer, mlm=False), or items with labels"
            )
        for key in wanted:
            if batch[key].ndim != 2 or len(batch[key]) != 1:
                raise InputError(f"{key} of {where} has shape {batch[key].shape} as a batch of one; one row is needed")
        keep = np.ones(batch["input_ids"].shape[1], dtype=bool)
        if "attention_mask" in batch:
            keep = batch["attention_mask"][0].astype(bool)
        positions = batch.get("position_ids")
        if positions is not None and not np.array_equal(positions[0][keep], np.arange(keep.sum())):
            raise InputError(
                f"position_ids of {where} do not count from 0; several sequences in one item are not known"
            )
        return {key: batch[key][0][keep] for key in wanted}


def _says_something(values: np.ndarray) -> bool:
    return bool(np.asarray(values != values.flat[0]).any()) if values.size else False


def _name(collate: Any) -> str:
    inner = getattr(collate, "data_collator", collate)
    return getattr(inner, "__name__", type(inner).__name__)
