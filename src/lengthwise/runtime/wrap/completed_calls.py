"""Complete a loop's call of a prepared model by what it leaves out of ``micro_batch.inputs``.

In ``model(input_ids=micro_batch.inputs["input_ids"], labels=micro_batch.inputs["labels"])`` positions are missing, by
which a model would count through the whole pack, and that labels are shifted already, so that it would shift them once
more. What the tokens or labels of the micro-batch leave no doubt of is filled in; the rest is refused.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor

from lengthwise.core.errors import InputError
from lengthwise.runtime.models.targets import IGNORE
from lengthwise.runtime.wrap.forward_arguments import POSITIONS, TARGETS, TOKENS
from lengthwise.runtime.wrap.made_labels import MadeLabels
from lengthwise.runtime.wrap.micro_batch import MicroBatch

_EMBEDDED = "inputs_embeds"
_LABELS, _SHIFTED = "labels", "shift_labels"


@dataclass(frozen=True, kw_only=True)
class CompletedCall:
    """The arguments of a call, as the model's forward gets them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    num_targets: int | None = None
    """The number of targets where it is not the micro-batch's, so that the step does not know the loss' weight."""

    num_made_targets: int | None = None
    """The number of targets of labels that ``inputs=`` makes, or the loop changed in place, which weighs the loss;
    None: the micro-batch's."""

    def stretched(self, num_slots: int, more: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for ``more`` slots than the ``num_slots`` of the call: these, and some of them again."""

        def longer(value: Any) -> Any:
            if more == num_slots or not isinstance(value, Tensor) or num_slots not in value.shape:
                return value
            again = torch.arange(more, device=value.device) % num_slots
            return value.index_select(value.shape.index(num_slots), again)

        return tuple(map(longer, self.args)), {name: longer(value) for name, value in self.kwargs.items()}

    def weighed_by_micro_batch(self) -> "CompletedCall":
        """Return the same call, whose loss is made elsewhere or has no weight."""
        return replace(self, num_targets=None, num_made_targets=None)

    def weighed_by_labels(self, made: MadeLabels, micro_batch: MicroBatch) -> "CompletedCall":
        """Return the same call, whose loss is weighted by the targets of labels that ``inputs=`` makes."""
        count = made.count(self.kwargs, micro_batch)
        if made.is_mean:
            return replace(self, num_targets=None, num_made_targets=count)
        return replace(self, num_targets=None if count == micro_batch.num_targets else count)


@dataclass(frozen=True, kw_only=True)
class LabelUse:
    """How a model uses the labels of a call."""

    has_two_forms: bool = False
    """Whether its class shifts labels, so that a call may have each token's own, or what each token predicts."""
    crosses_ends: bool = False
    """Whether it would shift labels across the ends of sequences where it is not told that they are shifted."""
    is_module: bool = False
    """Whether it is a user's own module, whose labels have an ``ignore_index`` of its own."""
    drops_first: bool = False
    """Whether the label of a sequence's first token is that of none."""
    is_by_sequence: bool = False
    """Whether the model computes sequence by sequence, whose losses are weighted by the targets that they had."""

    @property
    def has_other_slots(self) -> bool:
        """Whether the targets of labels are not counted by the slots of a pack that have them."""
        return self.drops_first or self.is_by_sequence

    def ignored(self, micro_batch: MicroBatch) -> int:
        """The label that has no loss."""
        return micro_batch.ignore_index if self.is_module else IGNORE


class CallCompletion:
    """Completes the calls of one model."""

    def __init__(self, forward: Callable[..., Any], name: str) -> None:
        """``forward``: the model's own; ``name``: of its class."""
        self._name = name
        parameters = signature(forward).parameters.values()
        self._positional = [p.name for p in parameters if p.kind is Parameter.POSITIONAL_OR_KEYWORD]
        self._is_named = not any(p.kind in (Parameter.POSITIONAL_ONLY, Parameter.VAR_POSITIONAL) for p in parameters)
        self._names = frozenset(p.name for p in parameters)
        self._takes_any = any(p.kind is Parameter.VAR_KEYWORD for p in parameters)

    def __call__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        micro_batch: MicroBatch,
        *,
        inputs: dict[str, Any],
        fills: Collection[str],
        use: LabelUse | None,
    ) -> CompletedCall:
        """Complete a call by ``inputs`` of the micro-batch.

        ``fills``: names of what may be filled in; ``use``: of the call's labels, None: they are left as they are.

        Raises:
            InputError: the model would shift its labels across the ends of sequences.
        """
        if self._is_named and len(args) <= len(self._positional):
            kwargs = dict(zip(self._positional[1:], args[1:])) | kwargs  # by name they can be completed
            args = args[:1]
        elif len(args) > 1:  # which of them is what cannot be told
            return CompletedCall(args=args, kwargs=kwargs, num_targets=_changed_number(args, micro_batch))
        if not self._is_of_slots(args, kwargs, micro_batch, inputs):
            return CompletedCall(args=args, kwargs=kwargs)
        first = dict.fromkeys(self._positional[: len(args)])
        missing = {
            name: value
            for name, value in inputs.items()
            if name in fills and name not in first and self._takes(name) and _is_missing(name, kwargs)
        }
        completed = kwargs | missing
        if use is None:
            return CompletedCall(args=args, kwargs=completed)
        labels, num_targets = self._labels(completed, micro_batch, inputs, use)
        completed = completed | labels
        call = CompletedCall(args=args, kwargs=completed, num_targets=num_targets)
        used = completed.get(_SHIFTED)
        used = completed.get(_name(inputs)) if used is None else used
        if use.has_other_slots or micro_batch.handed_out.targets_of_changed(used) is None:
            return call
        return replace(call, num_targets=None, num_made_targets=num_targets)

    def _takes(self, name: str) -> bool:
        return self._takes_any or name in self._names

    def _is_of_slots(self, args: Any, kwargs: dict[str, Any], micro_batch: MicroBatch, inputs: dict[str, Any]) -> bool:
        """Whether the call is given a value for each slot of this rank, such as the micro-batch's tokens."""
        passed = [*args, *kwargs.values()]
        if any(isinstance(value, Tensor) and value is other for value in passed for other in inputs.values()):
            return True
        tokens = next((kwargs[name] for name in TOKENS if kwargs.get(name) is not None), args[0] if args else None)
        is_embedded = tokens is None
        tokens = kwargs.get(_EMBEDDED) if is_embedded else tokens
        if not isinstance(tokens, Tensor) or tokens.is_floating_point() is not is_embedded:
            return False
        return tuple(tokens.shape[:2]) == (1, micro_batch.shard.num_slots)

    def _labels(
        self, kwargs: dict[str, Any], micro_batch: MicroBatch, inputs: dict[str, Any], use: LabelUse
    ) -> tuple[dict[str, Tensor], int | None]:
        """The labels that the forward is to get, and the number of targets if it is not the micro-batch's."""
        name, as_given = _name(inputs), micro_batch.handed_out.as_given
        labels, expected, shifted = kwargs.get(name), as_given(inputs.get(name)), kwargs.get(_SHIFTED)
        if shifted is None and (labels is None or _is_same(labels, expected)):
            return {_SHIFTED: labels} if labels is not None and _SHIFTED in inputs else {}, None
        if shifted is not None and _is_same(shifted, as_given(inputs.get(_SHIFTED))) and _is_same(labels, expected):
            return {}, None
        if shifted is not None:
            return self._shifted(labels, shifted, micro_batch, inputs, use)
        if not isinstance(labels, Tensor) or not isinstance(expected, Tensor) or labels.shape != expected.shape:
            return {}, _other_number(labels, micro_batch, use)
        if use.has_two_forms and any(_is_same(labels, other, micro_batch) for other in _forms(micro_batch)):
            return {name: expected} | ({_SHIFTED: expected} if _SHIFTED in inputs else {}), None
        if use.crosses_ends and _is_at(labels, inputs[name]):  # changed in place
            return {_SHIFTED: labels}, _other_number(labels, micro_batch, use)
        if use.crosses_ends:
            raise self._refusal(name)
        return self._others(name, labels, micro_batch, use)

    def _others(
        self, name: str, labels: Tensor, micro_batch: MicroBatch, use: LabelUse
    ) -> tuple[dict[str, Tensor], int | None]:
        """Labels of the user's own, which the model uses as they are, or shifts within sequences."""
        as_given = micro_batch.handed_out.as_given
        is_shifting = use.is_module and use.drops_first
        if is_shifting and _is_same(labels, as_given(micro_batch.targets)[None], micro_batch):
            return {name: as_given(micro_batch.targets_to_shift)[None]}, None
        if use.drops_first and labels.shape == (1, micro_batch.shard.num_slots):
            is_of_none = (micro_batch.shard.positions == 0) | (micro_batch.shard.sequences < 0)
            labels = labels.masked_fill(is_of_none, use.ignored(micro_batch))
        return {name: labels}, _other_number(labels, micro_batch, use)

    def _shifted(
        self, labels: Any, shifted: Any, micro_batch: MicroBatch, inputs: dict[str, Any], use: LabelUse
    ) -> tuple[dict[str, Tensor], int | None]:
        """Labels beside ``shift_labels``, of which the model uses these alone."""
        others = (inputs.get(_LABELS), shifted, *_forms(micro_batch))
        if isinstance(labels, Tensor) and not any(_is_same(labels, other, micro_batch) for other in others):
            raise InputError(
                f"{self._name} was called with labels that are neither shift_labels nor the micro-batch's, and it uses "
                "shift_labels alone; give both what each token is to predict: model(**{**micro_batch.inputs, 'labels': "
                "targets, 'shift_labels': targets})"
            )
        return {}, _other_number(shifted, micro_batch, use)

    def _refusal(self, name: str) -> InputError:
        return InputError(
            f"{self._name} was called with {name} that are not micro_batch.inputs[{name!r}] and without shift_labels, "
            "so it would shift them across the ends of sequences; give model(**micro_batch.inputs), or what each token "
            f"is to predict as {name}= and as shift_labels=, or leave {name} out and make the loss from the logits"
        )


def _is_missing(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether a call lacks an argument that has no other meaning than that of the micro-batch."""
    if name in (*TOKENS, *TARGETS, _SHIFTED):
        return False
    return kwargs.get(name) is None if name in POSITIONS else name not in kwargs


def _forms(micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """The labels of the micro-batch: what each token predicts, and each token's own."""
    as_given = micro_batch.handed_out.as_given
    return as_given(micro_batch.labels)[None], as_given(micro_batch.unshifted_labels)[None]


def _is_same(labels: Any, others: Any, micro_batch: MicroBatch | None = None) -> bool:
    """Whether two tensors of labels are equal; ``micro_batch``: at the slots of its sequences, whatever padding has."""
    if labels is others:
        return True
    if not isinstance(labels, Tensor) or not isinstance(others, Tensor):
        return False
    if labels.shape != others.shape or labels.device != others.device or labels.is_floating_point():
        return False
    if _is_at(labels, others):
        return True
    is_equal = labels == others
    if micro_batch is not None and is_equal.shape == (1, micro_batch.shard.num_slots):
        is_equal = is_equal | (micro_batch.shard.sequences < 0)
    return bool(is_equal.all())


def _is_at(labels: Any, others: Any) -> bool:
    """Whether two tensors of labels are one in memory."""
    if not isinstance(labels, Tensor) or not isinstance(others, Tensor):
        return False
    return labels.data_ptr() == others.data_ptr() and labels.stride() == others.stride()


def _name(inputs: dict[str, Any]) -> str:
    """The argument that has the labels."""
    return next((name for name in TARGETS if name in inputs), _LABELS)


def _other_number(labels: Any, micro_batch: MicroBatch, use: LabelUse) -> int | None:
    """The number of targets of labels of a user's own, unless it is the micro-batch's."""
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return None
    is_target = labels != use.ignored(micro_batch)
    number = int(is_target.sum())
    if number != micro_batch.num_targets:
        return number
    if use.is_by_sequence and is_target.numel() == micro_batch.shard.num_slots:
        sequences = micro_batch.shard.sequences
        of_others = (sequences[has.flatten()].sort().values for has in (is_target, micro_batch.has_target))
        return None if torch.equal(*of_others) else number
    return None


def _changed_number(values: Iterable[Any], micro_batch: MicroBatch) -> int | None:
    """The number of targets of labels among ``values`` that were changed in place, unless it is the micro-batch's."""
    numbers = (micro_batch.handed_out.targets_of_changed(value) for value in values)
    return next((number for number in numbers if number not in (None, micro_batch.num_targets)), None)
