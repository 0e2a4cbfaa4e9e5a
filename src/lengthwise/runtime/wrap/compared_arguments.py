"""Arguments of a loop's call of a prepared model that no comparison before the run had.

Packs are compared with the stock model as it is called with the arguments of a micro-batch. A further one may let the
model compute what was never compared: mix the sequences of a pack, or return another loss than the one that is weighed.
"""

from collections.abc import Mapping
from inspect import Parameter
from typing import Any

import torch
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


class ComparedArguments:
    """The arguments of one model's calls, as comparisons have had them."""

    def __init__(
        self, name: str, parameters: Mapping[str, Parameter], *, is_hugging_face: bool, is_by_sequence: bool
    ) -> None:
        """``name``: of the model's class; ``parameters``: of its forward."""
        self._name, self._parameters, self._is_by_sequence = name, parameters, is_by_sequence
        self._known = frozenset((*TOKENS, *TARGETS, *POSITIONS, "attention_mask")) | (
            _TRANSFORMERS if is_hugging_face else frozenset()
        )
        self._values: dict[str, set[Any]] = {}
        """The numbers, flags and words that a function of the user's made while packs were compared."""

    def note(self, inputs: Mapping[str, Any]) -> None:
        """Note the arguments of a call that is compared."""
        for name, value in inputs.items():
            if isinstance(value, _PLAIN):
                self._values.setdefault(name, set()).add(value)

    def check(self, kwargs: Mapping[str, Any], micro_batch: MicroBatch, inputs: Mapping[str, Any]) -> None:
        """Raise ``InputError`` if a loop's call has an argument beside ``inputs`` of the micro-batch."""
        for name, value in kwargs.items():
            if name in POSITIONS and value is not inputs.get(name):
                self._check_positions(name, value, micro_batch)
            if name in self._known:
                continue
            if name not in inputs and not self._is_default(name, value):
                raise self._refusal(name)
            if name in inputs and isinstance(value, _PLAIN) and not self._is_by_sequence:
                self._check_value(name, value)

    def _is_default(self, name: str, value: Any) -> bool:
        """Whether an argument is as good as left out."""
        if value is None:
            return True
        parameter = self._parameters.get(name)
        return parameter is not None and isinstance(value, _PLAIN) and value == parameter.default

    def _check_value(self, name: str, value: Any) -> None:
        """Raise ``InputError`` if a number was one and the same in all calls that were compared, and is another now."""
        compared = self._values.get(name, set())
        if len(compared) == 1 and value not in compared:
            raise InputError(
                f"{self._name} was called with {name}={value!r}, and packs were compared with {name}="
                f"{next(iter(compared))!r} alone; set what changes as an attribute of the model (model.{name} = "
                "..., read by its forward), whose changes are compared anew"
            )

    def _check_positions(self, name: str, positions: Any, micro_batch: MicroBatch) -> None:
        """Raise ``InputError`` for positions that are counted through the row, over the ends of its sequences."""
        expected = micro_batch.positions
        row = torch.arange(micro_batch.shard.num_slots, device=expected.device)
        if not isinstance(positions, Tensor) or positions.shape[-1:] != row.shape or positions.is_floating_point():
            return
        is_real = micro_batch.shard.sequences >= 0
        if bool((positions.to(row.device) == row).all()) and not bool((row == expected)[is_real].all()):
            raise InputError(
                f"{self._name} was called with {name} that count from 0 to {len(row) - 1:,}, and a micro-batch's row "
                f"has several sequences or a part of one; leave {name} out (they are filled in), or give "
                "micro_batch.positions[None]"
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
            f"the forward, or set it as an attribute of the model, whose changes are compared anew (model.{name} = ...)"
        )
