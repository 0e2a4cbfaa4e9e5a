"""What the user's loop is given: one micro-batch, this rank's share of it, ready for the model's forward."""

from collections.abc import Callable, Collection, Iterator
from functools import cached_property
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lengthwise.core.batch import NEXT_TOKEN, Pack
from lengthwise.core.errors import InputError
from lengthwise.runtime.comm.group import Group
from lengthwise.runtime.models.targets import IGNORE, masked_targets
from lengthwise.runtime.train.micro_batch_tensors import feed, with_padding
from lengthwise.runtime.wrap.collator import PackCollator
from lengthwise.runtime.wrap.context import PackShard
from lengthwise.runtime.wrap.counter_rng import normal_slots, uniform_sequences
from lengthwise.runtime.wrap.handed_out import GivenInputs, HandedOut
from lengthwise.runtime.wrap.loss_terms import LossTotals, Over, share_of_mean, share_of_sum
from lengthwise.runtime.wrap.sequence_sums import own_slots, sums_by_sequence


class MicroBatch:
    """A micro-batch on this rank: model inputs, labels and means. t slots of this rank, T of the pack."""

    def __init__(
        self,
        shard: PackShard,
        pack: Pack,
        collator: PackCollator,
        *,
        make_inputs: "Callable[[MicroBatch], dict[str, Any]]",
    ) -> None:
        self.shard, self.pack = shard, pack
        self._collator, self._make_inputs = collator, make_inputs
        self.slot_tokens, self.ignore_index = collator.slot_tokens, collator.ignore_index
        """The number of tokens in a slot, and the target of a token without a loss."""
        self.has_all_targets = collator.has_all_targets
        """Whether each slot of a sequence has a target."""
        self.totals = LossTotals(
            targets=max(1, sum(pack.lengths)), slots=sum(collator.lengths(pack)) // collator.slot_tokens,
            sequences=len(collator.members(pack)), units=self._count_units(),
        )  # fmt: skip
        """Totals by which means over the step divide; those of the micro-batch itself where it belongs to no step."""
        self.means, self.shares = set[Over | Literal["sum"]](), list[Tensor]()
        """The kinds of means that :meth:`mean` computed, and whether :meth:`sum` computed any; what these returned."""
        self.handed_out = HandedOut()
        shard.alone, shard.micro_batch = self._alone, self
        shard.targets_of = lambda: self.targets_by_sequence

    @cached_property
    def inputs(self) -> dict[str, Any]:
        """The arguments of the model's forward."""
        return self.given.inputs

    @cached_property
    def given(self) -> GivenInputs:
        """The arguments of the model's forward, whatever the loop does to :attr:`inputs`."""
        return GivenInputs(self._make_inputs(self))

    def whole(self) -> "MicroBatch":
        """Return a micro-batch of the same pack with all of its slots on this rank."""
        alone = self.shard.alone_with(self.shard.ids, self.shard.cu_seqlens, self.shard.tree)
        return MicroBatch(alone, self.pack, self._collator, make_inputs=self._make_inputs)

    def _alone(self, number: int) -> "MicroBatch":
        """Return a micro-batch of the sequence with this number in the pack, with all of its slots on this rank."""
        pack = Pack(ids=(self.pack.ids[number],), lengths=(self.pack.lengths[number],))
        shard = self.shard.alone_with(pack.ids, self._collator.cu_seqlens(pack), self._collator.tree(pack))
        return MicroBatch(shard, pack, self._collator, make_inputs=self._make_inputs)

    @property
    def group(self) -> Group:
        """The ranks that share this micro-batch."""
        return self.shard.group

    @property
    def degree(self) -> int:
        """The number of ranks that share this micro-batch."""
        return self.shard.group.size

    @cached_property
    def positions(self) -> Tensor:
        """[t] int64: the position in its sequence of each slot of this rank."""
        return self.handed_out.copy_of(self.shard.positions)

    @cached_property
    def sequences(self) -> list[np.ndarray]:
        """The sequences of the whole pack, as the corpus has them; units with shared prefixes as they are laid out."""
        return [self._collator.source.tokens(sequence) for sequence in self.pack.ids]

    @property
    def numbers(self) -> list[int]:
        """The numbers that the run has for the sequences of this micro-batch, in the order of :meth:`per_sequence`."""
        return self._collator.members(self.pack)

    @property
    def sequence_ids(self) -> list[int]:
        """The number of the item of each sequence, in what ``prepare`` was given, in the order of :meth:`per_sequence`.

        Parts of an item that is split, and members of a unit, have its number. Of ``run.step(items)``: in the items of
        all ranks, those of rank 0 first.
        """
        return self._collator.items(self.numbers)

    def own_slots(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """For each sequence its item's number, which of this rank's slots it has, and their positions in it."""
        for item, (_, slots, positions) in zip(self.sequence_ids, own_slots(self.shard, self.numbers)):
            yield item, slots, positions

    def own(self, whole: Tensor | np.ndarray) -> Tensor:
        """Select this rank's slots ``[t, ...]``, on its device, of a tensor ``[T, ...]`` for the whole pack.

        Without padding, such as the sequences end to end, where the pack has some: that is added, as zeros.
        """
        values, pack, size = torch.as_tensor(whole), self.pack, self._collator.slot_tokens
        if len(values) != self.shard.cu_seqlens[-1] and len(values) * size == sum(pack.lengths):
            values = with_padding(values, pack, num_slots=self.shard.cu_seqlens[-1], slot_tokens=size)
        if len(values) != self.shard.cu_seqlens[-1]:
            raise InputError(
                f"own() selects of one value for each of the {self.shard.cu_seqlens[-1]:,} slots of a micro-batch; got "
                f"{len(values):,}"
            )
        return values[torch.from_numpy(self.shard.places).to(values.device)].to(self.shard.device)

    @cached_property
    def _laid_out(self) -> tuple[Tensor, Tensor]:
        """The tokens and targets [T] of the whole pack."""
        collator, pack = self._collator, self.pack
        name = "sequence {}".format if collator.shared else lambda number: f"sequence {collator.items([number])[0]}"
        fed = feed(collator.source, pack, torch.device("cpu"), name=name)
        tokens_T, targets_T = fed.tokens_T, fed.targets_T
        if collator.labels is not None:
            targets_T = self._from_labels(targets_T, collator.labels)
        elif collator.masking is not None:
            tokens_T, targets_T = masked_targets(tokens_T, pack, collator.masking, special=collator.special)
        return tokens_T, targets_T.masked_fill(targets_T == collator.ignore_index, IGNORE)

    @cached_property
    def _fed(self) -> tuple[Tensor, Tensor]:
        tokens_T, targets_T = self._laid_out
        return self.own(tokens_T), self.own(targets_T)

    def label_among(self, labels: Collection[int]) -> int | None:
        """The first of ``labels`` that a token of the pack is to predict; None: none is."""
        return next((label for label in sorted(labels) if bool((self._laid_out[1] == label).any())), None)

    @property
    def targets_by_sequence(self) -> tuple[int, ...]:
        """The number of targets of each sequence of the pack, over all ranks that share it."""
        pack = self.pack
        if self._collator.has_all_targets:
            return pack.lengths
        targets_T = self._laid_out[1]
        spans = zip(pack.cu_seqlens, pack.lengths)
        return tuple(int((targets_T[start : start + length] != IGNORE).sum()) for start, length in spans)

    def _from_labels(self, targets_T: Tensor, labels: Callable[[int], np.ndarray]) -> Tensor:
        """Targets [T] from labels of the corpus: the next token's where that is predicted, else each token's own."""
        shift = int(self._predicts_next)
        targets_T = torch.full_like(targets_T, IGNORE)
        for sequence, start, length in zip(self.pack.ids, self.pack.cu_seqlens, self.pack.lengths):
            values = np.ascontiguousarray(labels(sequence)[shift:], dtype=np.int64)
            targets_T[start : start + length - shift] = torch.from_numpy(values)
        return targets_T

    @property
    def _predicts_next(self) -> bool:
        """Whether each token predicts the label of the next one."""
        return self._collator.objective == NEXT_TOKEN and self._collator.shifts_labels

    @cached_property
    def unshifted_labels(self) -> Tensor:
        """[t] int64: each token's own label, for models that shift labels in their own loss."""
        labels_T = np.full(self.pack.num_tokens, IGNORE, dtype=np.int64)
        labels_of = self._collator.labels or self._collator.source.tokens
        for sequence, start, length in zip(self.pack.ids, self.pack.cu_seqlens, self.pack.lengths):
            labels_T[start : start + length] = labels_of(sequence)
        labels_T[labels_T == self._collator.ignore_index] = IGNORE
        return self.handed_out.copy_of(self.own(labels_T), ignored=IGNORE)

    @cached_property
    def targets_to_shift(self) -> Tensor:
        """[t] int64: each token's own label, for modules that shift labels themselves; that of a sequence's first
        token, which none predicts, and of those without a loss is ``ignore_index``.
        """
        labels = self.handed_out.as_given(self.unshifted_labels).masked_fill(self.shard.positions == 0, IGNORE)
        return self._with_ignored(labels)

    @cached_property
    def passed(self) -> dict[str, Tensor]:
        """Further columns of the items by name, with one value for each slot of this rank: [t, ...]."""
        return {
            name: self._spread([np.asarray(values_of(sequence)).astype(np.int64) for sequence in self.pack.ids])
            for name, values_of in self._collator.passed.items()
        }

    def column(self, name: str, *, of: Literal["tokens", "targets"] = "tokens") -> Tensor:
        """[t, ...] the values of one of ``loss_columns=`` for this rank's slots, 0 for padding.

        ``of``: "tokens", each slot has the value of its own token; "targets", that of the token that it predicts, the
        next one of its sequence (0 at its end), or with other objectives its own. A slot that sequences share has the
        mean of their values.

        Raises:
            InputError: there is no such column.
        """
        values = self._collator.loss_column(name, self.pack)
        if of == "targets" and self._predicts_next:
            values = [np.concatenate([array[1:], np.zeros_like(array[:1])]) for array in values]
        if (shared := self._collator.shared) is not None:
            rows, trees = iter(values), [shared.tree(unit) for unit in self.pack.ids]
            values = [tree.mean(list(islice(rows, len(tree.leaves)))) for tree in trees]
        return self._spread(values)

    def column_by_sequence(self, name: str) -> Tensor:
        """[s, ...] the first value of each sequence in one of ``loss_columns=``, in the order of :meth:`per_sequence`.

        Raises:
            InputError: there is no such column.
        """
        first = np.stack([array[0] for array in self._collator.loss_column(name, self.pack)])
        return torch.from_numpy(first).to(self.shard.device)

    def _spread(self, values: list[np.ndarray]) -> Tensor:
        """[t, ...] this rank's slots of values of all sequences, [length, ...] each."""
        num_slots, size = self.pack.num_tokens // self._collator.slot_tokens, self._collator.slot_tokens
        whole_T = np.zeros((num_slots, *values[0].shape[1:]), dtype=np.result_type(*values))
        for start, array in zip(self.pack.cu_seqlens, values):
            whole_T[start // size : start // size + len(array)] = array
        return self.own(whole_T)

    def sum(self, values: Tensor, *, over: Literal["tokens", "units"] = "tokens") -> Tensor:
        """This rank's share of a sum over the whole step, of one value for each of its slots, [t] or [1, t].

        The sum over micro-batches and ranks is that sum. Divide it by any number that is the same on every rank, such
        as ``step.total(column)``, and give it as ``step.backward(..., mean_over="step")``. Padding is left out, and a
        slot counts once for each sequence that shares it.
        ``over``: "units", of one value for each of the u units of this micro-batch instead, [u].

        Raises:
            InputError: there is not one value for each slot or unit.
        """
        self.shares.append(share_of_sum(self, values, over))
        self.means.add("sum")
        return self.shares[-1]

    def mean(self, values: Tensor, *, over: Over) -> Tensor:
        """This rank's share of a mean over the whole step, of one value for each of its slots, [t] or [1, t].

        ``over``: "targets", those that have a target; "tokens", all; "sequences", the mean over sequences of the mean
        over all tokens of each, with a target or without (over those of a mask: "units", of ``per_sequence(values *
        mask) / per_sequence(mask)``); "units", of one value for each of the u units of this micro-batch instead, [u],
        made of :meth:`per_sequence` and so the same on every rank that shares it. The sum over micro-batches and ranks
        is that mean: ``step.backward(loss, side=...)``, or without a loss ``step.backward(..., mean_over="step")``.

        Raises:
            InputError: there is not one value for each slot, or the number of targets is not known.
        """
        self.shares.append(share_of_mean(self, values, over))
        self.means.add(over)
        return self.shares[-1]

    def per_sequence(self, values: Tensor) -> Tensor:
        """[s, ...] the sum over each of the s sequences of this micro-batch of ``values`` [t, ...] or [1, t, ...].

        The same on every rank that shares the micro-batch, whichever slots it has; each of them calls it, and makes the
        same loss of it, a mean over units: ``step.backward(loss, mean_over="units")``, or a term by
        ``micro_batch.mean(values, over="units")``. Differentiable; in float32 or more. Two small exchanges.

        Raises:
            InputError: there is not one value for each slot, or ranks that share the micro-batch have other shapes.
        """
        return sums_by_sequence(self.shard, values)

    @cached_property
    def units(self) -> Tensor:
        """[u, M] int64: for each unit of this micro-batch, which of its sequences are the unit's M members, in order.

        ``per_sequence(values)[micro_batch.units]`` is [u, M, ...]. Where items are single sequences, M is 1.

        Raises:
            InputError: it is no micro-batch of a step, and has other sequences than whole units; or units of the step
                have different numbers of members, see :attr:`unit_ids`.
        """
        count, units = len(self.unit_ids), self._collator.units
        if units is not None and self._num_members is None:
            raise InputError(
                f"units have {units.sizes_text} sequences, so micro_batch.units is no [u, M]; micro_batch.unit_ids [s] "
                "says which of micro_batch.num_units units each sequence belongs to: "
                "torch.zeros(num_units).index_add(0, unit_ids, values) sums over each"
            )
        return torch.arange(count, device=self.shard.device).view(-1, self._num_members or 1)

    @cached_property
    def unit_ids(self) -> Tensor:
        """[s] int64: which of the u units of this micro-batch, from 0, each of its sequences belongs to.

        In the order of :meth:`per_sequence`; the sequences of a unit are next to each other, in the order of the item.
        Where items are single sequences, or ``coupled_loss=`` has members planned apart, each is a unit of its own.

        Raises:
            InputError: units of the step are cut in parts; or it is no micro-batch of a step, and has other sequences
                than whole units.
        """
        self._check_units_are_whole()
        numbers, are_whole = self._units
        if not are_whole:
            text = "" if self._collator.units is None else self._collator.units.sizes_text
            raise InputError(
                f"units have {text} sequences, and these are {len(numbers)} by which the model is compared before the "
                "run; loss= is the mean over targets that is compared. Make a loss over units in the loop: "
                "step.backward(loss, mean_over='units')"
            )
        return torch.from_numpy(numbers).to(self.shard.device)

    @property
    def num_units(self) -> int:
        """The number u of units of this micro-batch, one at least.

        Raises:
            InputError: units of the step are cut in parts.
        """
        self._check_units_are_whole()
        return self._count_units()

    def _count_units(self) -> int:
        return 1 + int(self._units[0].max(initial=0))

    def _check_units_are_whole(self) -> None:
        """Raise ``InputError`` if units of the step are cut, for which nothing over units can be made here."""
        units = self._collator.units
        if units is not None and units.parts:
            raise InputError(
                f"units of step {self.shard.step} are cut into {len(units.parts)} parts in different micro-batches, so "
                "no loss of whole units can be made here; make it in coupled_loss=, or set cut_units=False"
            )

    @cached_property
    def is_last(self) -> Tensor:
        """[t] bool: whether each slot of this rank is the last one of its sequence."""
        tree = self.shard.tree
        bounds = self.shard.cu_seqlens[1:] if tree is None else [tree.bounds[leaf + 1] for leaf in tree.leaves]
        ends = np.asarray(bounds) - 1
        return torch.from_numpy(np.isin(self.shard.places, ends)).to(self.shard.device) & (self.shard.sequences >= 0)

    @cached_property
    def _units(self) -> tuple[np.ndarray, bool]:
        members, units = self._collator.members(self.pack), self._collator.units
        return (np.arange(len(members)), True) if units is None else units.planned_units(members)

    @property
    def _num_members(self) -> int | None:
        units = self._collator.units
        return 1 if units is None or units.are_split else units.num_members

    @cached_property
    def tokens(self) -> Tensor:
        """[t] int64 token ids."""
        return self.handed_out.copy_of(self._fed[0])

    @cached_property
    def targets(self) -> Tensor:
        """[t] int64: what each token is to predict, ``ignore_index`` where nothing."""
        return self._with_ignored(self._fed[1])

    def _with_ignored(self, labels: Tensor) -> Tensor:
        labels = labels.masked_fill(labels == IGNORE, self.ignore_index)
        return self.handed_out.copy_of(labels, ignored=self.ignore_index)

    @cached_property
    def labels(self) -> Tensor:
        """[t] int64: what each token is to predict, -100 where nothing, as transformers models take it."""
        return self.handed_out.copy_of(self._fed[1], ignored=IGNORE)

    @property
    def has_target(self) -> Tensor:
        """[t] bool: whether each slot is to predict anything."""
        return self._fed[1] != IGNORE

    @cached_property
    def num_targets(self) -> int:
        """The number of this rank's tokens that have a loss."""
        if self._collator.has_all_targets:
            return self.shard.num_unpadded * self._collator.slot_tokens
        return int(self.has_target.sum())

    def normal(self, *shape: int, call: int = 0) -> Tensor:
        """``[t, *shape]`` standard normal numbers that belong to the slots: the same at every degree, in every pack.

        ``call`` tells several draws of a micro-batch apart.
        """
        return normal_slots(self.shard, shape, call)

    def uniform_of_sequences(self, *, call: int = 0) -> Tensor:
        """[t] a number in [0, 1) for each sequence, repeated for its slots: such as the time of a diffusion."""
        return uniform_sequences(self.shard, call)
