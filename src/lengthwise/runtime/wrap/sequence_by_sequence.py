"""Compute a micro-batch sequence by sequence: the stock forward, called once for each, by one rank.

What packs and shards would change is exact this way whatever the model does: convolutions, recurrences, encoders with a
decoder, lengths that its factors depend on. Outputs are put together as a pack would have them: what has an axis of
slots end to end, losses as their mean weighted by the targets of each sequence, and what there is one of for each
sequence, where it has one label or the model is frozen, as the rows of a batch. Random numbers are those of the step
and the sequence, whatever else is in the micro-batch.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lengthwise.core.errors import InputError
from lengthwise.runtime.wrap.context import CallCounts, PackShard, active
from lengthwise.runtime.wrap.counter_rng import mix_word
from lengthwise.runtime.wrap.handed_out import version_of
from lengthwise.runtime.wrap.made_labels import MadeLabels
from lengthwise.runtime.wrap.sequence_means import SequenceMean, mean_of
from lengthwise.runtime.wrap.unusable import Unusable

Shapes = dict[str, tuple[int, ...]]
"""Shapes of the tensors in a tree, by their path."""


def not_combined(name: str, *, has_loss: bool, other_shapes: str = "") -> Unusable:
    """A placeholder for an output of several sequences that cannot be combined.

    ``has_loss``: whether the user's ``loss=`` makes the loss of the outputs; ``other_shapes``: what its shapes are
    where these depend on the sequence, otherwise than by one value for each slot.
    """
    way_out = (
        ("make loss= of its outputs by token" if has_loss else "use its loss and its outputs by token")
        + ", or let the forward return the loss of its sequence, from an argument labels that inputs= makes as "
        "micro_batch.column_by_sequence(name), without loss= or with loss=lambda output, micro_batch: output.loss"
    )
    if other_shapes:
        way_out = (
            "let the forward, or a module around it, take the targets of its sequence as well, which inputs= makes, "
            "and return the mean loss over them, without loss=: a sequence weighs by its targets then"
        )
    return Unusable(
        name,
        f"has {other_shapes or 'one value for each of several sequences'}, which cannot be put together for a "
        f"micro-batch of a model that is computed sequence by sequence; {way_out}",
    )


class SequenceBySequence:
    """Calls a model's forward on the sequences of a micro-batch, one after the other."""

    def __init__(
        self,
        forward: Callable[..., Any],
        model_name: str,
        make: Callable[..., dict[str, Any]] | None = None,
        *,
        made_labels: Callable[[], MadeLabels | None] = lambda: None,
        has_rows: bool = False,
        has_loss: bool = False,
    ) -> None:
        """``make``: the user's function from a micro-batch to the arguments of the forward; None: there is none;
        ``made_labels``: how the loss uses labels among them; ``has_rows``: an output of one row
        ``[1, ...]`` for each sequence is one row of a batch;
        ``has_loss``: the user's ``loss=`` makes the loss of outputs.
        """
        self._made_labels, self._has_rows, self._has_loss = made_labels, has_rows, has_loss
        self._forward, self._name, self._make = forward, model_name, make
        self._parameters = list(signature(forward).parameters)
        self._input_axes: dict[str, int | None] = {}
        self._output_axes: dict[str, int | None] = {}
        self._seen: list[tuple[Shapes, Shapes]] = []

    def learn(self, lengths: tuple[int, int]) -> None:
        """Derive the slot axes of inputs and outputs from the last two micro-batches, of one sequence each."""
        (inputs, outputs), (other_inputs, other_outputs) = self._seen[-2:]
        self._input_axes = _axes(inputs, other_inputs, lengths)
        self._output_axes = _axes(outputs, other_outputs, lengths)

    def __call__(self, shard: PackShard, args: Any, kwargs: Any) -> Any:
        """Compute the forward's output for the whole micro-batch."""
        arguments, shard.preserves_rng = _leaves((args, kwargs)), True
        outputs, spans, counts, made_counts = list[Any](), [], [], []
        made = self._made(shard, dict(zip(self._parameters, args)) | kwargs)
        padded = (*shard.ids, *[-1] * (len(shard.cu_seqlens) - 1 - len(shard.ids)))
        for sequence, span, num_targets in zip(padded, pairwise(shard.cu_seqlens), shard.num_targets()):
            if sequence < 0:
                continue
            shard.counts = CallCounts(forward=shard.counts.forward)
            (some_args, some_kwargs), copies = self._cut((args, kwargs), *span, shard.num_slots)
            if made:
                inputs = made[len(outputs)]
                some_args = tuple([inputs.get(name, value) for name, value in zip(self._parameters, some_args)])
                some_kwargs = {name: inputs.get(name, value) for name, value in some_kwargs.items()}
            with seed_for_sequence(shard, sequence):
                outputs.append(self._forward(*some_args, **some_kwargs))
            copies.write_back()
            spans.append(span)
            counts.append(num_targets)
            made_counts.append(self._made_count(dict(zip(self._parameters, some_args)) | some_kwargs))
        if not outputs:
            raise InputError(f"a micro-batch of {self._name} has no sequence")
        counts = self._weights(shard, counts, made_counts)
        if len(outputs) == 1 and shard.num_slots == spans[0][1] - spans[0][0]:
            self._seen = [*self._seen[-1:], (_shapes(arguments), _shapes(_leaves(outputs[0])))]
            return outputs[0]
        combined, means = self._combined(outputs, spans, counts, shard.num_slots)
        if shard.passes:
            shard.passes[-1].sequence_means += means
        return combined

    def _made(self, shard: PackShard, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        """For each of several sequences, what ``make`` makes for it alone of the ``arguments`` that it made for all.

        Raises:
            InputError: an argument belongs to sequences, and is not what was made.
        """
        micro_batch, make_alone = shard.micro_batch, shard.alone
        if self._make is None or make_alone is None:
            return []
        if len(shard.ids) < 2 or len(micro_batch.pack.ids) != len(shard.ids):
            return []
        of_all, of_sequences = micro_batch.given.values, list[dict[str, Any]]()
        for number in range(len(shard.ids)):
            alone = make_alone(number)
            with active(alone.shard):
                of_sequences.append(alone.inputs)
        shared = {name: value for name, value in arguments.items() if name in of_all}
        unchanged = {name for name in shared if not micro_batch.given.is_changed(name)}
        same = {name for name in unchanged if _is_equal(shared[name], of_all[name])}
        for name in shared.keys() - same:
            is_constant = all(_is_equal(inputs.get(name), of_all[name]) for inputs in of_sequences)
            if not is_constant and not self._is_by_slot(shared[name], shard.num_slots):
                raise InputError(
                    f"{self._name} is computed sequence by sequence; its argument {name!r} is another one for each "
                    f"sequence, without an axis of the {shard.num_slots:,} slots of the micro-batch, and not what "
                    f"inputs= makes, which is called for each sequence again. Give it micro_batch.inputs[{name!r}], "
                    "and draw random numbers with micro_batch.normal or micro_batch.uniform_of_sequences"
                )
        return [{name: inputs[name] for name in same & inputs.keys()} for inputs in of_sequences]

    def _made_count(self, arguments: dict[str, Any]) -> int | None:
        """The number of targets of labels that ``make`` made for a sequence; None: it made none."""
        made = self._made_labels()
        return None if made is None else made.count_in_sequence(arguments)

    def _weights(self, shard: PackShard, planned: list[int], made_counts: list[int | None]) -> list[int]:
        """The targets that the losses of sequences are weighted by; notes what weighs the loss of all of them."""
        counts = [count if made is None else made for count, made in zip(planned, made_counts)]
        if (made := self._made_labels()) is None or not shard.passes:
            return planned
        if made.is_mean:
            shard.passes[-1].num_made_targets = sum(counts)
            return counts
        shard.passes[-1].num_other_targets = None if counts == planned else sum(counts)
        return planned

    def _is_by_slot(self, value: Any, num_slots: int) -> bool:
        """Whether every tensor of an argument has an axis of slots."""
        return all(
            _axis_of(leaf, num_slots) is not None for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)
        )

    def _cut(self, arguments: Any, start: int, end: int, num_slots: int) -> tuple[Any, "_Copies"]:
        """Cut the arguments to the slots from ``start`` to ``end``, as copies that a forward may change in place."""
        leaves, form = pytree.tree_flatten_with_path(arguments)
        cut, copies = [], _Copies()
        for path, leaf in leaves:
            name = pytree.keystr(path)
            if isinstance(leaf, Tensor):
                axis = self._input_axes[name] if name in self._input_axes else _axis_of(leaf, num_slots)
                if axis is not None and leaf.shape[axis] == num_slots:
                    leaf = copies.of(leaf.narrow(axis, start, end - start))
            cut.append(leaf)
        return pytree.tree_unflatten(cut, form), copies

    def _combined(
        self, outputs: list[Any], spans: list[tuple[int, int]], counts: list[int], num_slots: int
    ) -> tuple[Any, list[SequenceMean]]:
        """The outputs of all sequences as one, and the means among them."""
        flat = [pytree.tree_flatten_with_path(output) for output in outputs]
        if any(form != flat[0][1] for _, form in flat):
            raise InputError(f"{self._name} returns outputs of different forms for sequences of different lengths")
        combined, means = [], list[SequenceMean]()
        for number, (path, first) in enumerate(flat[0][0]):
            values, name = [leaves[number][1] for leaves, _ in flat], pytree.keystr(path)
            if all(isinstance(value, Tensor) for value in values):
                value, mean = self._combined_tensors(name, values, spans, counts, num_slots)
                combined.append(value)
                means += [] if mean is None else [mean]
            elif all(type(value) is type(first) and value == first for value in values[1:]):
                combined.append(first)
            else:
                combined.append(self._not_combined(name, values, spans))
        return pytree.tree_unflatten(combined, flat[0][1]), means

    def _combined_tensors(
        self, name: str, values: list[Tensor], spans: list[tuple[int, int]], counts: list[int], num_slots: int
    ) -> tuple[Any, SequenceMean | None]:
        """One output of all sequences, and the record of it where it is a mean."""
        lengths = [end - start for start, end in spans]
        axis = self._output_axes.get(name, _axis_of(values[0], lengths[0]))
        if axis is not None and all(
            value.dim() > axis and value.shape[axis] == length for value, length in zip(values, lengths)
        ):
            return _end_to_end(values, spans, axis, num_slots), None
        if values[0].dim() == 0 and values[0].is_floating_point():
            return mean_of(values, counts)
        if len(values) == 1:
            return values[0], None
        if self._has_rows and all(value.shape == (1, *values[0].shape[1:]) for value in values):
            return torch.cat(values), None
        return self._not_combined(name, values, spans), None

    def _not_combined(self, name: str, values: list[Any], spans: list[tuple[int, int]]) -> Unusable:
        shapes = {
            tuple(value.shape): end - start for value, (start, end) in zip(values, spans) if isinstance(value, Tensor)
        }
        other_shapes = ""
        if len(shapes) > 1:
            of_two = (f"of {slots} slots the shape {shape}" for shape, slots in list(shapes.items())[:2])
            other_shapes = f"for a sequence {' and for one '.join(of_two)}, without an axis of slots"
        return not_combined(f"output{name} of {self._name}", has_loss=self._has_loss, other_shapes=other_shapes)


class _Copies:
    """Copies of parts of tensors: a forward that writes into its arguments changes none that another one saved."""

    def __init__(self) -> None:
        self._made: list[tuple[Tensor, Tensor, int]] = []

    def of(self, part: Tensor) -> Tensor:
        """A copy of a part of a tensor."""
        copy = part.clone()
        self._made.append((part, copy, version_of(copy)))
        return copy

    def write_back(self) -> None:
        """Change the tensors as their copies were, for the loop to see, as far as they have no gradients."""
        for part, copy, version in self._made:
            if version_of(copy) != version and not copy.requires_grad:
                part.copy_(copy)


def _end_to_end(values: list[Tensor], spans: Sequence[tuple[int, int]], axis: int, num_slots: int) -> Tensor:
    """Concatenate the slots of sequences as the pack has them, with zeros for padding."""
    parts, place = [], 0
    for value, (start, end) in zip(values, spans):
        if start > place:
            parts.append(_zeros_like(value, axis, start - place))
        parts.append(value)
        place = end
    if num_slots > place:
        parts.append(_zeros_like(values[0], axis, num_slots - place))
    return torch.cat(parts, dim=axis) if len(parts) > 1 else parts[0]


def _zeros_like(value: Tensor, axis: int, size: int) -> Tensor:
    return value.new_zeros([size if number == axis else extent for number, extent in enumerate(value.shape)])


def _is_equal(first: Any, second: Any) -> bool:
    """Whether two arguments have the same values."""
    if first is second:
        return True
    leaves, form = pytree.tree_flatten(first)
    others, other_form = pytree.tree_flatten(second)
    return form == other_form and all(
        torch.equal(leaf, other)
        if isinstance(leaf, Tensor) and isinstance(other, Tensor)
        else type(leaf) is type(other) and not isinstance(leaf, Tensor) and bool(leaf == other)
        for leaf, other in zip(leaves, others)
    )


def _leaves(values: Any) -> list[tuple[str, Any]]:
    return [(pytree.keystr(path), leaf) for path, leaf in pytree.tree_flatten_with_path(values)[0]]


def _shapes(leaves: list[tuple[str, Any]]) -> "Shapes":
    return {name: tuple(leaf.shape) for name, leaf in leaves if isinstance(leaf, Tensor)}


def _axes(first: "Shapes", second: "Shapes", lengths: tuple[int, int]) -> dict[str, int | None]:
    """The axis of each tensor that grew as the lengths did, by name."""
    axes: dict[str, int | None] = {}
    for name in first.keys() & second.keys():
        sizes = list(zip(first[name], second[name]))
        axes[name] = sizes.index(lengths) if lengths in sizes else None
    return axes


def _axis_of(tensor: Tensor, num_slots: int) -> int | None:
    """Guess the slot axis of a tensor that was absent when axes were learned."""
    axes = [axis for axis, size in enumerate(tensor.shape) if size == num_slots]
    return next((axis for axis in axes if axis or num_slots > 1 or tensor.dim() == 1), None)


@contextmanager
def seed_for_sequence(shard: PackShard, sequence: int) -> Iterator[None]:
    """Within, seed all random generators for a sequence in this forward of its step; restore them afterwards."""
    seed = mix_word(mix_word(mix_word(shard.seed) ^ shard.step) ^ shard.counts.in_micro_batch(sequence))
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = [shard.device] if shard.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed % (1 << 63))
        random.seed(seed)
        np.random.seed(seed % (1 << 32))
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
