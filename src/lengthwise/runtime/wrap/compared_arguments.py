"""Arguments of a loop's call of a prepared model that no comparison before the run had.

Packs are compared with the stock model as it is called with the arguments of a micro-batch. A further one may let the
model compute what was never compared: mix the sequences of a pack, or return another loss than the one that is weighed.
"""

from collections.abc import Mapping
from inspect import Parameter
from typing import Any

import numpy as np
from torch import Tensor

from lengthwise.core.errors import InputError
from lengthwise.runtime.wrap.forward_arguments import POSITIONS, TARGETS, TOKENS
from lengthwise.runtime.wrap.micro_batch import MicroBatch

_TRANSFORMERS = frozenset({
    "attention_mask", "cache_position", "inputs_embeds", "logits_to_keep", "output_attentions", "output_hidden_states",
    "output_router_logits", "past_key_values", "return_dict", "shift_labels", "token_type_ids", "use_cache",
})  # fmt: skip
"""Arguments of models of transformers that say what is returned, repeat what the micro-batch has, or are checked."""
_PLAIN = (bool, int, float, str)
_ITEMS = "num_items_in_batch"
_MOST_HELD = 64
"""Numbers of a container that are compared."""


class ComparedArguments:
    """The arguments of one model's calls, as comparisons have had them."""

    def __init__(
        self, name: str, parameters: Mapping[str, Parameter], *, is_hugging_face: bool, is_by_sequence: bool
    ) -> None:
        """``name``: of the model's class; ``parameters``: of its forward."""
        self._name, self._parameters, self._is_by_sequence = name, parameters, is_by_sequence
        main_names = [next((name for name in names if name in parameters), "") for names in (TOKENS, TARGETS)]
        self._known = frozenset((*main_names, *POSITIONS, "inputs_embeds")) | (
            _TRANSFORMERS if is_hugging_face else frozenset()
        )
        self._values: dict[str, set[Any]] = {}
        """The numbers, flags and words that a function of the user's made while packs were compared."""

    def note(self, inputs: Mapping[str, Any]) -> None:
        """Note the arguments of a call that is compared."""
        for name, value in inputs.items():
            if (contents := _contents_of(value)) is not None:
                self._values.setdefault(name, set()).add(contents)

    def check(self, kwargs: Mapping[str, Any], micro_batch: MicroBatch, inputs: Mapping[str, Any]) -> None:
        """Raise ``InputError`` if a loop's call has an argument beside ``inputs`` of the micro-batch."""
        handed = micro_batch.given
        for name, value in kwargs.items():
            is_made = value is inputs.get(name) and not (name in handed.values and handed.is_changed(name))
            if name in POSITIONS and not is_made:
                self._check_positions(name, value, micro_batch)
            if name in self._known or (name == "attention_mask" and isinstance(value, Tensor)):
                continue
            if name not in inputs and not self._is_default(name, value):
                raise self._refusal(name)
            if name in inputs and not self._is_by_sequence:
                self._check_value(name, value)

    def _is_default(self, name: str, value: Any) -> bool:
        """Whether an argument is as good as left out."""
        parameter = self._parameters.get(name)
        if value is None:
            return parameter is None or parameter.default is None or parameter.default is parameter.empty
        if parameter is None or isinstance(value, Tensor):
            return parameter is not None and value is parameter.default
        try:
            return value is parameter.default or bool(value == parameter.default)
        except (TypeError, ValueError, RuntimeError):  # of arrays
            return False

    def _check_value(self, name: str, value: Any) -> None:
        """Raise ``InputError`` if a number was one and the same in all calls that were compared, and is another now."""
        compared, contents = self._values.get(name, set()), _contents_of(value)
        if len(compared) == 1 and contents is not None and contents not in compared:
            raise InputError(
                f"{self._name} was called with {name}={value!r}, and packs were compared with {name}="
                f"{next(iter(compared))!r} alone; set what changes as an attribute of the model (model.{name} = "
                "..., read by its forward), whose changes are compared anew"
            )

    def _check_positions(self, name: str, positions: Any, micro_batch: MicroBatch) -> None:
        """Raise ``InputError`` for positions of a loop's own that are not the same in every sequence, from its start.

        Where ranks share a pack, or it goes in slices, they are the micro-batch's own with the same number added.
        """
        expected = micro_batch.positions
        if not isinstance(positions, Tensor) or positions.shape[-1:] != expected.shape:
            return
        is_real, shard = micro_batch.shard.sequences >= 0, micro_batch.shard
        places = expected[is_real]
        for row in positions.to(expected.device).reshape(-1, len(expected))[:, is_real]:
            first = row.new_zeros(int(places.max()) + 1 if len(places) else 0).scatter(0, places, row)
            is_same = bool((first[places] == row).all())
            if is_same and len(row) and (shard.group.size > 1 or shard.part is not None):
                added = row[0] - places[0]
                is_same = bool(added >= 0) and bool((row == places + added).all())
            if not is_same:
                raise InputError(
                    f"{self._name} was called with {name} that do not begin anew with each sequence, and a "
                    f"micro-batch's row has several sequences or a part of one; leave {name} out (they are filled in), "
                    "give micro_batch.positions[None], or make them by inputs=, which is compared"
                )

    def _refusal(self, name: str) -> InputError:
        if name == _ITEMS:
            return InputError(
                f"{self._name} was called with {_ITEMS}, by which it divides its loss, and the step weighs a "
                "micro-batch's mean by its targets in the whole step: leave it out"
            )
        return InputError(
            f"{self._name} was called with the argument {name!r}, which micro_batch.inputs has not, so packs were not "
            "compared with it; give it by prepare(..., inputs=lambda micro_batch: {...}), which makes all arguments of "
            "the forward, or let the forward read an attribute of the model instead, whose changes are compared anew"
        )


def _contents_of(value: Any) -> Any:
    """What can be compared of a number, a flag, a word or a small container of these; None: nothing.

    Tensors on a device are not looked at, which would wait for it.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Tensor):
        is_small = value.device.type == "cpu" and value.numel() == 1
        return value.item() if is_small and not value.requires_grad else None
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, list | tuple | dict) and len(value) <= _MOST_HELD:
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        contents = tuple((key, _contents_of(part)) for key, part in parts)
        return None if any(part is None for _, part in contents) else contents
    return None
