"""Columns of a corpus' items: used, named once as not used where they are harmless, or refused with the way out."""

from typing import Any

import numpy as np
import torch

from lengthwise.core.batch import MASKED, NEXT_TOKEN
from lengthwise.core.column_names import LABELS, LOSS_MASKS, PADDING, POSITIONS, PROMPT_MASK, TOKENS
from lengthwise.core.column_rules import HARMLESS, MEANINGFUL, SPECIAL, TOKEN_TYPES, reason_refused
from lengthwise.core.errors import InputError
from lengthwise.index.packed_rows import sequence_bounds
from lengthwise.runtime.wrap.forward_arguments import POSITIONS as POSITION_ARGUMENTS
from lengthwise.runtime.wrap.forward_arguments import TARGETS as TARGET_ARGUMENTS
from lengthwise.runtime.wrap.forward_arguments import TOKENS as TOKEN_ARGUMENTS
from lengthwise.session.item_values import (
    ExpectedColumns,
    ItemRow,
    as_array,
    as_torch_has_it,
    cannot_be_used,
    first_leaf,
    is_mapping,
    not_tokenised,
    row_advice,
    without_padding,
)
from lengthwise.session.sequence_units import joined, members_of

_MEDIA = ("pixel", "image", "audio", "video", "speech", "input_features", "input_values")
"""Parts of names of columns that hold other things than tokens."""
_OWN_ARGUMENTS = frozenset([*TOKEN_ARGUMENTS, *TARGET_ARGUMENTS, *POSITION_ARGUMENTS])
"""Arguments of a forward that are made from tokens and labels."""
_NOT_PASSED = ("past", "cache", "decoder", "head_mask", "shift_labels", "inputs_embeds", "logits", "output_", "return_")
_NOT_OF_LOSS = frozenset([*TOKENS, *LABELS, *POSITIONS, PADDING, SPECIAL, TOKEN_TYPES])
"""Columns that items have for the model, and no loss is made of."""
LARGEST_ID = np.iinfo(np.int64).max


class ItemColumns:
    """Reads items; ``unused`` gathers the names of columns that were left out."""

    def __init__(self, expected: ExpectedColumns) -> None:
        self.expected, self._hides = expected, expected.objective == MASKED
        self.unused: dict[str, str] = {}
        """Names of columns that are not used, with the reason."""
        self.maybe_meant: dict[str, bool] = {}
        """Names of those that the forward may be meant to get; whether each item has one integer per token in it."""
        self.only_values: dict[str, np.ndarray | None] = {}
        """By name, the one value that such a column has everywhere, [1]; None: there are several."""

    def read(self, number: int, item: Any) -> ItemRow:
        """What the item with this number holds; of a unit, all of its members end to end.

        Raises:
            InputError: it holds no tokens, or a column would change what is learned and cannot be used.
        """
        where = f"item {number}"
        members = members_of(where, item, slot_tokens=self.expected.slot_tokens)
        if members is None:
            return self._read(where, item)
        return joined(
            where, [self._read(f"member {member} of {where}", values) for member, values in enumerate(members)]
        )

    def _read(self, where: str, item: Any) -> ItemRow:
        """One sequence, or a row of several that were packed before."""
        if not is_mapping(item):
            tokens = self._tokens(where, item)
            self._loss_columns(where, {}, tokens)
            self._check_labels_given(where, None)
            return ItemRow(tokens=tokens, bounds=(0, len(tokens)))
        values = {str(name): value for name, value in item.items() if value is not None}
        name = next((name for name in TOKENS if name in values), None)
        if name is None:
            raise InputError(
                f"{where} has {', '.join(values) or 'no columns'}, and none of {', '.join(TOKENS)}; tokenise it first, "
                "and call the column of token ids input_ids"
            )
        tokens = self._tokens(where, values.pop(name), name)
        if self.expected.slot_tokens > 1:
            columns = self._loss_columns(where, values, tokens)
            self._check_slots(where, {name: value for name, value in values.items() if name not in columns})
            return ItemRow(tokens=tokens, passed=columns, bounds=(0, len(tokens)))
        return self._row(where, tokens, values)

    def _row(self, where: str, tokens: np.ndarray, values: dict[str, Any]) -> ItemRow:
        columns = self._loss_columns(where, values, tokens)
        keep = self._padding(where, tokens, values)
        masks = [self._loss_mask(where, name, values.pop(name), tokens) for name in LOSS_MASKS if name in values]
        if PROMPT_MASK in values:
            others = [*masks, *(name for name in LABELS if name in values)]
            after_prompt = self._after_prompt(where, values.pop(PROMPT_MASK), tokens, keep)
            masks.append(after_prompt & (keep | bool(others)))  # padding is neither prompt nor learned
        positions = {name: values.pop(name) for name in POSITIONS if name in values}
        arrays = {name: as_array(f"{name} of {where}", values) for name, values in positions.items()}
        bounds = sequence_bounds(
            where, int(keep.sum()), {name: without_padding(array, keep) for name, array in arrays.items()}
        )
        if len(bounds) > 2 and (self.expected.labels_sequences or not self.expected.splits_rows):
            raise InputError(
                f"{where} holds {len(bounds) - 1} sequences packed into one row; give each sequence as an item of its "
                "own: packs are planned"
            )
        special = values.pop(SPECIAL, None)
        if special is not None and not self._hides:
            special, self.unused[SPECIAL] = None, ""
        elif special is not None:
            special = self._mask(where, SPECIAL, special, tokens)[keep]
        labels = self._labels(where, tokens, values, masks, keep)
        passed = {
            name: array[keep]
            for name, value in values.items()
            if name not in columns and (array := self._other(where, name, value, tokens)) is not None
        }
        passed |= {name: array[keep] for name, array in columns.items()}
        return ItemRow(tokens=tokens[keep], labels=labels, passed=passed, special=special, bounds=bounds)

    def _loss_columns(self, where: str, values: dict[str, Any], tokens: np.ndarray) -> dict[str, np.ndarray]:
        """The columns for the loss by name, with a value for each token: [length, ...].

        Raises:
            InputError: a column is missing, or its values are no finite numbers, one per token or one for all.
        """
        return {name: _loss_column(where, name, values.get(name), len(tokens)) for name in self.expected.loss_columns}

    def _leave_out(self, name: str, reason: str = "") -> None:
        self.unused.setdefault(name, reason)

    def _tokens(self, where: str, values: Any, name: str = "") -> np.ndarray:
        what = f"{name} of {where}" if name else where
        tokens = as_array(what, values)
        if tokens.dtype.kind in "USO":
            if tokens.dtype.kind != "O" or any(isinstance(value, str) for value in tokens.flat):
                raise not_tokenised(what, tokens)
            odd = next((value for value in tokens.flat if type(value) is not int or value > LARGEST_ID), values)
            raise InputError(
                f"{what} is {type(values).__name__} with {odd!r:.40} in it, not a row of token ids; give each item "
                "integers from 0 to 2^63 - 1"
            )
        if not tokens.size:
            raise InputError(f"{what} is empty; leave items without tokens out")
        if self.expected.slot_tokens > 1:
            if not tokens.ndim:
                raise InputError(f"{what} is a single number; its first axis is to be the slots")
            return tokens
        if tokens.ndim > 1 and tokens.dtype.kind == "f":
            raise InputError(
                f"{what} is {tokens.dtype} of shape {tokens.shape}, not a row of token ids. Where each element of the "
                "first axis is several tokens, as a frame is, say of how many: slot_tokens. Where it is one, as in "
                "latents of [tokens, channels], give items {'input_ids': zeros of as many, 'latents': them}, with "
                "loss_columns=('latents',) and inputs= that takes micro_batch.column('latents')"
            )
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise InputError(
                f"{what} is {tokens.dtype} of shape {tokens.shape}, not a row of token ids; {row_advice(tokens)}"
            )
        if int(tokens.min()) < 0 or int(tokens.max()) > LARGEST_ID:
            bad = int(tokens.min()) if int(tokens.min()) < 0 else int(tokens.max())
            raise InputError(f"{what} has token id {bad}; ids are from 0 to 2^63 - 1: look at how it was tokenised")
        return tokens

    def _padding(self, where: str, tokens: np.ndarray, values: dict[str, Any]) -> np.ndarray:
        """Which tokens are no padding: all, or one stretch of them."""
        keep = np.ones(len(tokens), dtype=bool)
        if PADDING in values:
            mask = values.pop(PADDING)
            is_open = isinstance(mask, list) and mask.count(1) == len(mask) == len(tokens)  # faster than an array
            keep = keep if is_open else self._mask(where, PADDING, mask, tokens)
            self._leave_out(PADDING, "packs have no padding")
        if not keep.any():
            raise InputError(f"{where} has an {PADDING} of zeros alone: it has no tokens; leave such items out")
        if keep.all():
            return keep
        first, last = int(np.argmax(keep)), len(keep) - int(np.argmax(keep[::-1]))
        if not keep[first:last].all():
            hidden = first + int(np.argmin(keep[first:last]))
            raise InputError(
                f"{where} has an {PADDING} that hides token {hidden} between others; packs hide nothing but padding at "
                "the ends: leave such tokens out of the item, or give them no loss with labels of "
                f"{self.expected.ignore_index}"
            )
        return keep

    def _mask(self, where: str, name: str, value: Any, tokens: np.ndarray) -> np.ndarray:
        """Zeros and ones, one for each token, as booleans."""
        mask = as_array(f"{name} of {where}", value)
        if mask.shape != tokens.shape:
            raise InputError(
                f"{name} of {where} has shape {mask.shape}, and there are {len(tokens)} tokens; give one number per "
                "token"
            )
        if mask.dtype.kind not in "biuf" or not bool(((mask == 0) | (mask == 1)).all()):
            odd = next(value for value in mask.tolist() if value not in (0, 1))
            raise InputError(f"{name} of {where} has {odd!r} in it; it is to be 0 or 1 for each token")
        return mask.astype(bool)

    def _loss_mask(self, where: str, name: str, value: Any, tokens: np.ndarray) -> np.ndarray:
        if self._hides:
            raise InputError(
                f"{name} of {where} says which tokens have a loss, but the objective {MASKED} draws those that it "
                f"hides; give labels ({self.expected.ignore_index} where there is no loss) with tokens hidden by "
                "yourself, or leave the column out"
            )
        return self._mask(where, name, value, tokens)

    def _after_prompt(self, where: str, value: Any, tokens: np.ndarray, keep: np.ndarray) -> np.ndarray:
        """Which tokens the prompt does not hold, which begins the item once its padding is cut off."""
        is_prompt = self._loss_mask(where, PROMPT_MASK, value, tokens)
        unpadded = is_prompt[keep]
        if not unpadded[: int(unpadded.sum())].all():
            raise InputError(
                f"{PROMPT_MASK} of {where} is to be 1 for the tokens of a prompt, which begins the item, and it is "
                "not; give a loss_mask instead, 1 for each token that has a loss"
            )
        return ~is_prompt

    def _labels(
        self, where: str, tokens: np.ndarray, values: dict[str, Any], masks: list[np.ndarray], keep: np.ndarray
    ) -> np.ndarray | None:
        if self.expected.labels_sequences:
            return self._label_of_sequence(where, values, masks, int(keep.sum()))
        labels: np.ndarray | None = None
        for name in (name for name in LABELS if name in values):
            given_labels = as_array(f"{name} of {where}", values.pop(name))
            if labels is not None or (not given_labels.ndim and name != "labels"):
                self._leave_out(name, "the tokens are what is predicted")
                continue
            labels = self._per_token(where, name, given_labels, tokens)
        ignored = self.expected.ignore_index
        if masks:
            if labels is None and self.expected.objective != NEXT_TOKEN:
                raise InputError(
                    f"{where} has a mask of tokens with a loss but no labels, which {self.expected.objective} needs"
                )
            labels = np.where(np.all(masks, axis=0), tokens if labels is None else labels, ignored).astype(np.int64)
        if labels is not None:
            self._check_padding(where, labels, keep)
            labels = labels[keep]
        self._check_labels_given(where, labels)
        return labels

    def _label_of_sequence(
        self, where: str, values: dict[str, Any], masks: list[np.ndarray], length: int
    ) -> np.ndarray:
        """The label of the whole sequence at its first token, and no loss at the others."""
        given_labels = {name: as_array(f"{name} of {where}", values.pop(name)) for name in LABELS if name in values}
        if masks:
            raise InputError(f"{where} has a mask of tokens with a loss, and the model has one label for a sequence")
        name = next(iter(given_labels), None)
        self._check_labels_given(where, None if name is None else given_labels[name])
        assert name is not None, "a label was given"
        label = given_labels[name]
        if (
            label.size != 1
            or label.dtype.kind not in "biu"
            or not 0 <= int(label.item()) < (self.expected.label_limit or 0)
        ):
            raise InputError(
                f"{name} of {where} is {label.tolist()!r:.40}, and the model has one label for a sequence, from 0 to "
                f"{(self.expected.label_limit or 0) - 1}; give it one integer"
            )
        labels = np.full(length, self.expected.ignore_index, dtype=np.int64)
        labels[0] = label.item()
        return labels

    def _check_padding(self, where: str, labels: np.ndarray, keep: np.ndarray) -> None:
        padded = labels[~keep]
        if len(padded) and bool((padded != self.expected.ignore_index).any()):
            raise InputError(
                f"{where} has labels on its padding, which has no loss here: give padding the label "
                f"{self.expected.ignore_index}, or leave it out (a tokenizer with padding=False)"
            )

    def _check_labels_given(self, where: str, labels: np.ndarray | None) -> None:
        if labels is None and self.expected.needs_labels:
            raise InputError(
                f"{where} has no labels, and the model learns from the label of each "
                + (
                    "sequence: give it a label"
                    if self.expected.labels_sequences
                    else f"token: give it labels, {self.expected.ignore_index} where there is no loss"
                )
            )

    def _per_token(self, where: str, name: str, labels: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        expected = self.expected
        if labels.shape != tokens.shape:
            count = f"{labels.size} labels" if labels.ndim == 1 else f"labels of shape {labels.shape}"
            raise InputError(
                f"{where} has {len(tokens)} tokens and {count}; give each token its own, {expected.ignore_index} where "
                "it is not to be predicted"
            )
        if labels.dtype.kind not in "iu":
            raise InputError(
                f"{name} of {where} is {labels.dtype}; labels are integers. Of regression make the loss with loss= and "
                "inputs="
            )
        wrong = labels[(labels != expected.ignore_index) & ((labels < 0) | (labels > LARGEST_ID))]
        if len(wrong):
            raise InputError(
                f"{where} has label {int(wrong[0])}; labels are from 0, or {expected.ignore_index} where there is no "
                "loss (ignore_index=)"
            )
        if expected.label_limit is not None and int(labels.max()) >= expected.label_limit:
            raise InputError(
                f"{where} has label {int(labels.max()):,}, and the model predicts labels up to "
                f"{expected.label_limit - 1:,}; use its tokenizer, or a head of as many classes"
            )
        return labels.astype(np.int64)

    def _other(self, where: str, name: str, value: Any, tokens: np.ndarray) -> np.ndarray | None:
        """What is passed to the forward under the column's own name; None: it is not used."""
        if isinstance(value, str):
            self._leave_out(name)
            return None
        reason = self._reason_not_used(name, value)
        if reason is not None:
            self._leave_out(name, reason)
            return None
        leaf = first_leaf(value)
        if not isinstance(leaf, bool | int | float | np.generic | torch.Tensor):
            raise cannot_be_used(where, name, f"holds {type(leaf).__name__}")
        array = as_array(f"{name} of {where}", value)
        others = (*_NOT_PASSED, *MEANINGFUL)
        is_taken = name in self.expected.arguments - _OWN_ARGUMENTS and not any(part in name for part in others)
        is_per_token = array.ndim >= 1 and len(array) == len(tokens)
        if is_taken and is_per_token and array.dtype.kind in "biu":
            return array.astype(np.int64)
        reason = self._reason_refused(name, array)
        if reason:
            is_for_loss = array.dtype.kind in "biuf" and (is_per_token or not array.ndim) and name not in _NOT_OF_LOSS
            raise cannot_be_used(where, name, reason, is_for_loss=is_for_loss)
        is_meant = is_per_token and array.ndim == 1 and array.dtype.kind in "biu" and name != TOKEN_TYPES
        self.maybe_meant[name] = is_meant and self.maybe_meant.get(name, True)
        only = self.only_values.get(name, array[:1]) if is_meant else None
        self.only_values[name] = only if only is not None and bool((array == only).all()) else None
        self._leave_out(name, "all are 0" if name == TOKEN_TYPES else "")
        return None

    def _reason_not_used(self, name: str, value: Any) -> str | None:
        """Why a column is left out whatever its values are; None: that depends on them."""
        if self.expected.makes_inputs:
            return "inputs= makes the forward's arguments"
        leaf = first_leaf(value)
        if name in (*TOKENS, *HARMLESS) or leaf is None or isinstance(leaf, str):
            return ""
        is_number = isinstance(leaf, bool | int | float | np.generic | torch.Tensor)
        is_medium = hasattr(leaf, "__array_interface__") or any(part in name for part in _MEDIA)
        return None if is_number or is_medium else ""

    def _reason_refused(self, name: str, array: np.ndarray) -> str:
        """Why a column that cannot be passed would change what is learned; empty: it is harmless."""
        if name in self.expected.arguments & _OWN_ARGUMENTS and array.ndim:
            return f"is an argument of the model's forward that is made from {TOKENS[0]} and {LABELS[0]}"
        if name in self.expected.arguments - _OWN_ARGUMENTS and name != TOKEN_TYPES:
            return "is an argument of the model's forward, and not one integer per token"
        return reason_refused(name, array)

    def _check_slots(self, where: str, values: dict[str, Any]) -> None:
        """Raise ``InputError`` for columns of values for slots, which only the user's own forward could use."""
        for name, value in values.items():
            if self._reason_not_used(name, value) is None and np.ndim(value):
                raise cannot_be_used(where, name, f"is not known for slots of {self.expected.slot_tokens} tokens")
            self._leave_out(name)


def _loss_column(where: str, name: str, value: Any, num_slots: int) -> np.ndarray:
    if name in _NOT_OF_LOSS and name != TOKEN_TYPES:
        raise InputError(f"loss_columns names {name}, which items have for the model; give the column another name")
    if value is None:
        raise InputError(f"{where} has no column {name}, which loss_columns names; give it to every item")
    array = as_array(f"{name} of {where}", value)
    array = as_torch_has_it(f"{name} of {where}", np.full(num_slots, array) if array.ndim == 0 else array)
    if array.dtype.kind not in "biuf" or len(array) != num_slots:
        raise InputError(
            f"{name} of {where} is {array.dtype} of shape {array.shape}, and there are {num_slots} tokens; a column of "
            f"loss_columns has one number or array for each token, [{num_slots}] or [{num_slots}, ...], or one number "
            f"for the whole sequence{_repeated(array, num_slots)}"
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        place = int(np.argmin(np.isfinite(array.reshape(num_slots, -1)).all(axis=1)))
        raise InputError(
            f"{name} of {where} is {array[place]} at token {place}, which no loss can be made of; give it a finite "
            "number, or 0 where the loss leaves the token out"
        )
    return array


def _repeated(array: np.ndarray, num_slots: int) -> str:
    """What to do with a vector for the whole sequence, in words; empty: it is something else."""
    if array.ndim != 1 or array.dtype.kind not in "biuf":
        return ""
    return f"; repeat a vector for the whole sequence to [{num_slots}, {len(array)}]"
