"""The arguments of a prepared model's forward: those that a micro-batch gives, and those of a loop's call of it."""

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

from torch import Tensor, nn

from lengthwise.core.batch import NEXT_TOKEN
from lengthwise.core.errors import InputError
from lengthwise.runtime.wrap.compared_arguments import ComparedArguments
from lengthwise.runtime.wrap.completed_calls import CallCompletion, CompletedCall, LabelUse
from lengthwise.runtime.wrap.context import PackShard
from lengthwise.runtime.wrap.forward_arguments import POSITIONS, TARGETS, TOKENS
from lengthwise.runtime.wrap.frozen_arguments import FrozenArguments
from lengthwise.runtime.wrap.label_convention import LabelConvention
from lengthwise.runtime.wrap.micro_batch import MicroBatch
from lengthwise.runtime.wrap.position_ids import StockPositions
from lengthwise.runtime.wrap.structure import hugging_face_models
from lengthwise.runtime.wrap.user_functions import INPUTS, checked_inputs, user_function

MakeInputs = Callable[[MicroBatch], dict[str, Any]]


class ForwardInputs:
    """What the forward of one model is given."""

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        *,
        objective: str,
        make: MakeInputs | None,
        labels: Callable[[], LabelConvention],
        positions: StockPositions | None,
        is_hugging_face: bool,
        has_loss: bool,
    ) -> None:
        """``forward``: the model's own; ``make``: the user's function for its arguments; ``labels``: the convention of
        the moment; ``positions``: None where it is computed sequence by sequence; ``has_loss``: whether a function of
        the user's makes its loss.
        """
        self._name, self._objective, self._make, self._convention = type(model).__name__, objective, make, labels
        self._positions, self._is_by_sequence = positions, positions is None
        self._is_hugging_face, self._has_own_loss = is_hugging_face, has_loss
        self._parameters = signature(forward).parameters
        self._takes_cache = is_hugging_face and "use_cache" in self._parameters
        is_changed_by_hooks = bool(model._forward_pre_hooks_with_kwargs)
        kinds = {parameter.kind for parameter in self._parameters.values()}
        self._takes_any, self._is_making = is_changed_by_hooks or Parameter.VAR_KEYWORD in kinds, False
        self._completion = CallCompletion(forward, self._name)
        self._compared = ComparedArguments(
            self._name,
            self._parameters,
            is_hugging_face=bool(hugging_face_models(model)),
            is_by_sequence=self._is_by_sequence,
        )

    def of(self, micro_batch: MicroBatch) -> dict[str, Any]:
        """The arguments for a micro-batch."""
        if self._make is not None:
            return self._made_by_user(micro_batch, self._make)
        if not self._is_by_sequence:
            return self._of_pack(micro_batch)
        without_cache = {"use_cache": False} if self._takes_cache else {}  # a layer that recomputes would add to it
        return self.of_stock_call(micro_batch) | without_cache

    def of_stock_call(self, micro_batch: MicroBatch) -> dict[str, Any]:
        """The arguments of a stock call on one sequence: tokens and labels, positions only if it needs them."""
        if self._make is not None:
            return self._made_by_user(micro_batch, self._make)
        inputs = self._of_pack(micro_batch)
        optional = {name for name, parameter in self._parameters.items() if parameter.default is not parameter.empty}
        positions = POSITIONS if self._is_hugging_face else optional & set(POSITIONS)
        added = ("shift_labels", "use_cache", *positions)
        stock = {name: value for name, value in inputs.items() if name not in added}
        if self._shifts:
            stock["labels"] = micro_batch.unshifted_labels[None]
        return stock

    def completed(
        self, shard: PackShard, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_frozen: bool, is_compared: bool
    ) -> CompletedCall:
        """A loop's call with what it leaves out of its micro-batch's arguments; ``is_frozen``: it has no loss;
        ``is_compared``: packs were compared with the stock model, so that this call is a loop's.

        Raises:
            InputError: the model would shift its labels across the ends of sequences, or compute what was not compared.
        """
        if (micro_batch := shard.micro_batch) is None or shard.has_failed:
            return CompletedCall(args=args, kwargs=kwargs)
        inputs = self._of_frozen(micro_batch) if is_frozen else micro_batch.given.values
        use = self._label_use(inputs, is_frozen=is_frozen)
        fills = POSITIONS if self._make is not None and not is_frozen else tuple(inputs)
        if is_frozen and isinstance(self._make, FrozenArguments):
            self._make.check(args, kwargs)
            inputs |= self._make(micro_batch)
        call = self._completion(args, kwargs, micro_batch, inputs=inputs, fills=fills, use=use)
        if is_compared or is_frozen:
            self._compared.check(call.kwargs, micro_batch, micro_batch.given.values | inputs)
        else:
            self._compared.note(call.kwargs)
        if not is_frozen and (made := self._convention().made) is not None:
            return call.weighed_by_labels(made, micro_batch)
        return call.weighed_by_micro_batch() if is_frozen or self._has_own_loss else call

    def _made_by_user(self, micro_batch: MicroBatch, make: MakeInputs) -> dict[str, Any]:
        if self._is_making:
            raise InputError(
                "inputs= reads micro_batch.inputs, which it is to make itself: use micro_batch.tokens[None], "
                "micro_batch.labels[None], micro_batch.positions[None] or micro_batch.column(name)[None], and return "
                "all arguments of the forward"
            )
        self._is_making = True
        try:
            with user_function(INPUTS, micro_batch.shard.device):
                made = make(micro_batch)
        finally:
            self._is_making = False
        inputs = checked_inputs(made)
        if not self._takes_any and (others := [name for name in inputs if name not in self._parameters]):
            raise InputError(
                f"inputs= makes the argument {others[0]!r}, which the forward of {self._name} does not take; it takes "
                f"{', '.join(self._parameters)}"
            )
        return inputs

    def _of_pack(self, micro_batch: MicroBatch) -> dict[str, Any]:
        tokens = micro_batch.tokens[None]
        if self._is_hugging_face:
            targets = micro_batch.labels[None]
            inputs: dict[str, Any] = {"input_ids": tokens, "labels": targets} | self._position_argument(micro_batch)
            if self._objective == NEXT_TOKEN or self._takes_cache:
                inputs["use_cache"] = False
            if self._shifts and self._convention().takes_shifted:
                inputs["shift_labels"] = targets  # by itself it would shift across the ends of shards
            return inputs | self._passed(micro_batch)
        inputs = {}
        if (name := next((name for name in TOKENS if name in self._parameters), None)) is not None:
            inputs[name] = tokens
        if (name := next((name for name in TARGETS if name in self._parameters), None)) is not None:
            is_shifting = self._convention().is_in_module
            inputs[name] = (micro_batch.targets_to_shift if is_shifting else micro_batch.targets)[None]
        if not any(name in inputs for name in TOKENS):
            raise InputError(
                f"the forward of {self._name} takes {', '.join(self._parameters)}; say which is what: "
                "prepare(..., inputs=lambda micro_batch: {'tokens': micro_batch.tokens[None], ...})"
            )
        return inputs | self._position_argument(micro_batch) | self._passed(micro_batch)

    def _of_frozen(self, micro_batch: MicroBatch) -> dict[str, Any]:
        """The arguments beside its tokens for a model that computes beside the one that micro-batches are made for."""
        inputs: dict[str, Any] = self._position_argument(micro_batch) | self._passed(micro_batch)
        if self._takes_cache:
            inputs["use_cache"] = False
        labels = ("labels", "shift_labels")
        if self._is_hugging_face and all(name in micro_batch.given.values for name in labels):
            inputs |= {name: micro_batch.given.values[name] for name in labels}
        return inputs

    @property
    def _shifts(self) -> bool:
        """Whether this is a transformers model that shifts labels by itself."""
        return self._is_hugging_face and self._objective == NEXT_TOKEN and self._convention().shifts

    def _label_use(self, inputs: dict[str, Any], *, is_frozen: bool) -> LabelUse | None:
        """How the model uses the labels of a call; None: nobody knows, for the user makes its arguments."""
        if self._make is not None and not (is_frozen and self._is_hugging_face):
            return None
        if not self._is_hugging_face:
            in_module = self._convention().is_in_module
            return LabelUse(is_module=True, drops_first=in_module, is_by_sequence=self._is_by_sequence)
        return LabelUse(
            has_two_forms=self._shifts, crosses_ends="shift_labels" in inputs,
            drops_first=self._shifts and self._is_by_sequence, is_by_sequence=self._is_by_sequence,
        )  # fmt: skip

    def _position_argument(self, micro_batch: MicroBatch) -> dict[str, Tensor]:
        """The positions of this rank's slots, if the forward takes them."""
        if self._is_hugging_face:
            positions = self._positions
            return {"position_ids": positions.of(micro_batch)[None]} if positions and positions.is_argument else {}
        name = next((name for name in POSITIONS if name in self._parameters), None)
        return {} if name is None else {name: micro_batch.positions[None]}

    def _passed(self, micro_batch: MicroBatch) -> dict[str, Tensor]:
        """Further columns of the items, as keyword arguments of the forward."""
        return {name: values[None] for name, values in micro_batch.passed.items()}
