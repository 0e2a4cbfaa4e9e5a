"""Batches that the ranks bring themselves: items that become known to all as lengths, and go where they are computed.

Every rank has items of its own, any number of them. Lengths are gathered, so that all ranks plan the same step; then
each item is sent to the ranks whose micro-batches have it, and to no other.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from lengthwise.core.batch import GlobalBatch, attention_length
from lengthwise.core.cut_plan import CutPlan
from lengthwise.core.errors import InputError, LengthwiseError
from lengthwise.core.prefix_tree import PrefixTree
from lengthwise.runtime.comm.collectives import all_to_all, gather_rows
from lengthwise.runtime.comm.objects import gather_json
from lengthwise.runtime.comm.world import DistContext
from lengthwise.runtime.loop.call_order import RankOperation, sync_ranks
from lengthwise.runtime.wrap.collator import PackCollator, with_shared_prefixes
from lengthwise.runtime.wrap.shared_prefixes import tree_of
from lengthwise.runtime.wrap.unit_members import Units

TOKENS, LABELS, SPECIAL = "tokens", "labels", "special"
"""Names of columns of a sequence; all others are those of the forward and of the loss."""

SequenceColumns = Mapping[str, np.ndarray]
"""The columns of one sequence by name, with a value for each slot."""
PlanUnits = Callable[[GlobalBatch, Callable[[int], PrefixTree]], CutPlan]
"""Plans a batch of units that may be cut, with the prefix tree of each."""
ReadItems = Callable[[Iterable[Any]], list[list[SequenceColumns]]]
"""Reads items: the sequences of each, one, or the members of a unit."""


@dataclass(frozen=True, eq=False, kw_only=True)
class BroughtBatch:
    """A global batch of the items of all ranks, and this rank's items. Sequences are numbered by rank and item."""

    batch: GlobalBatch
    units: Units
    """The sequences of each item, of all ranks, and their tokens."""
    counts: tuple[int, ...]
    """The number of items of each rank."""
    first: int
    """The number of this rank's first item."""
    sequences: Mapping[int, SequenceColumns]
    """This rank's sequences by number."""
    has_units: bool = False
    """Whether items are units of sequences."""
    trees: Sequence[PrefixTree] = ()
    """The prefix tree of each item, of all ranks, where units share prefixes."""
    received: dict[int, SequenceColumns] = field(default_factory=dict)
    """Sequences that this rank computes."""

    def owner(self, sequence: int) -> int:
        """The rank that brought a sequence."""
        return int(np.searchsorted(np.cumsum(self.counts), self.units.unit_of([sequence])[0], side="right"))

    def column(self, name: str, sequence: int) -> np.ndarray:
        """The values of a column for a sequence that this rank computes."""
        return self.received[sequence][name]

    def tokens(self, sequence: int, /) -> np.ndarray:
        """The tokens of a sequence that this rank computes."""
        return self.received[sequence][TOKENS]


class ItemExchange:
    """Gathers what ranks bring, and sends items to the ranks that compute them. Every rank makes the same calls."""

    def __init__(
        self,
        world: DistContext,
        collator: PackCollator,
        *,
        read_items: ReadItems,
        objective: str,
        max_length: int,
        cuts_units: bool,
        plan_forwards: PlanUnits,
    ) -> None:
        """``collator``: that of the corpus, whose columns items have; ``max_length``: of an item, in tokens, and
        with ``cuts_units`` of a sequence; ``plan_forwards``: plans forwards of items without a backward.
        """
        self.plan_forwards, self._cuts_units = plan_forwards, cuts_units
        self._world, self._collator, self._read_items = world, collator, read_items
        self._objective, self._max_length = objective, max_length

    def gather(
        self, items: Iterable[Any] | None, step: int, operation: RankOperation = RankOperation.ITEMS
    ) -> BroughtBatch | None:
        """Make one batch of the items of all ranks; None: no rank has any more, which it says by None.

        Raises:
            InputError: an item cannot be used or is too long, or no rank has an item.
            CheckError: ranks call different things.
        """
        world = self._world
        rows, problem = self._read([] if items is None else items)
        said = [int(items is None)]
        reports = sync_ranks(world, operation, step, values=said, note=problem.marked if problem else "")
        reports.check_same()
        if problem is not None:
            raise problem
        where = operation.call if operation is RankOperation.SCORE else f"step {step}"
        if any(reports.notes):
            raise InputError(f"{where}: {reports.notes_text()}")
        if all(reports.column(0)):
            return None
        size = self._collator.slot_tokens
        said_lengths = [([size * len(columns[TOKENS]) for columns in item], self._shared(item)) for item in rows]
        by_rank = gather_json(world, said_lengths)
        said_of_all = [said for of_rank in by_rank for said in of_rank]
        lengths = [length for length, _ in said_of_all]
        if not lengths:
            raise InputError(f"{where}: no rank brought an item; bring one at least")
        are_split = self._collator.units is not None and self._collator.units.are_split
        if are_split:
            said_of_all = [([length], None) for of_item in lengths for length in of_item]
        trees = [None if shared is None else PrefixTree(**shared) for _, shared in said_of_all]
        computed, attention_lengths = _planned_lengths([of_item for of_item, _ in said_of_all], trees)
        counts = tuple(map(len, by_rank))
        units = Units(offsets=np.cumsum([0, *map(len, lengths)]), lengths=np.concatenate(lengths), are_split=are_split)
        first = sum(counts[: world.rank])
        sequences = dict(enumerate((columns for item in rows for columns in item), start=int(units.offsets[first])))
        brought = BroughtBatch(
            batch=GlobalBatch(
                step=step,
                ids=tuple(range(len(computed))),
                lengths=tuple(computed),
                objective=self._objective,
                attention_lengths=None if attention_lengths == computed else tuple(attention_lengths),
            ),
            units=units,
            counts=counts,
            first=first,
            sequences=sequences,
            has_units=self._collator.units is not None,
            trees=[tree for tree in trees if tree is not None],
        )
        self._check_lengths(brought)
        return brought

    def _read(self, items: Iterable[Any]) -> tuple[list[list[SequenceColumns]], LengthwiseError | None]:
        """The sequences of this rank's items, or why they cannot be read, which other ranks have to be told."""
        try:
            return self._read_items(items), None
        except LengthwiseError as error:
            return [], error
        except Exception as error:  # an iterator of the user's own may raise anything
            problem = InputError(f"items of this rank could not be read ({type(error).__name__}: {error})")
            problem.__cause__ = error
            return [], problem

    def _shared(self, item: list[SequenceColumns]) -> dict[str, list[int]] | None:
        """The fields of the prefix tree of a unit; None: units do not share what their sequences begin with."""
        collator = self._collator
        if collator.shared is None:
            return None
        rows = [{name: columns[name] for name in (TOKENS, *collator.passed)} for columns in item]
        tree = tree_of(rows, [columns[LABELS] for columns in item], collator.ignore_index)
        return {name: list(values) for name, values in tree.fields.items()}

    def _check_lengths(self, brought: BroughtBatch) -> None:
        lengths = brought.units.lengths if self._cuts_units else np.asarray(brought.batch.lengths)
        longest = int(np.argmax(lengths))
        length, first = int(lengths[longest]), longest if self._cuts_units else brought.units.planned(longest)[0]
        owner = brought.owner(first)
        if length > self._max_length:
            number = int(brought.units.unit_of([first])[0]) - sum(brought.counts[:owner])
            raise InputError(
                f"step {brought.batch.step}: item {number} of rank {owner} has {length:,} tokens, over "
                f"{self._max_length:,}, for which plans keep memory; cut it, or raise step_max_length of prepare"
            )

    def collator(self, brought: BroughtBatch, cut: CutPlan) -> PackCollator:
        """Send each item to the ranks that compute it under a plan; return the collator of what this rank got."""
        units, plan = cut_units(brought.units, cut), cut.plan
        packs = [(pipeline.ranks, planned.pack) for pipeline in plan.pipelines for planned in pipeline.micro_batches]
        parcels: list[dict[int, SequenceColumns]] = [{} for _ in range(self._world.size)]
        for ranks, pack in packs:
            for numbers in map(units.planned, pack.ids):
                if numbers[0] in brought.sequences:
                    for rank in ranks:
                        parcels[rank].update({number: brought.sequences[number] for number in numbers})
        brought.received.clear()
        brought.received.update(exchange(self._world, parcels))
        before = self._collator
        collator = replace(
            before,
            source=brought,
            shared=None,
            labels=before.labels and partial(brought.column, LABELS),
            special=before.special and partial(brought.column, SPECIAL),
            passed={name: partial(brought.column, name) for name in before.passed},
            loss_columns={name: partial(brought.column, name) for name in before.loss_columns},
            units=before.units and units,
            item_numbers=units.unit_of(range(len(units.lengths))) if brought.has_units else None,
        )
        return collator if before.shared is None else with_shared_prefixes(collator)


def cut_units(units: Units, cut: CutPlan) -> Units:
    """The units of a step, cut as its plan has them."""
    first = units.offsets
    parts = {number: tuple(int(first[unit]) + k for k in members) for number, (unit, members) in cut.parts.items()}
    return replace(units, parts=parts, repeated_tokens=cut.repeated_tokens)


def _planned_lengths(lengths: Sequence[list[int]], trees: Sequence[PrefixTree | None]) -> tuple[list[int], list[int]]:
    """Tokens and attention lengths of what is planned, of its sequences' lengths and its prefix tree."""
    computed = [sum(of_item) if tree is None else tree.num_slots for of_item, tree in zip(lengths, trees)]
    pairs = [
        sum(n * (n + 1) // 2 for n in of_item) if tree is None else tree.num_pairs
        for of_item, tree in zip(lengths, trees)
    ]
    return computed, [attention_length(count, num_pairs) for count, num_pairs in zip(computed, pairs)]


def exchange(world: DistContext, parcels: Sequence[Mapping[int, SequenceColumns]]) -> dict[int, SequenceColumns]:
    """Send ``parcels[r]``, columns by number of sequence, to rank r; return what all ranks sent here.

    Every rank calls this. Columns of one sequence that several ranks send are put together by name.
    """
    contents = [b"" if rank == world.rank else _packed(p) for rank, p in enumerate(parcels)]
    received: dict[int, dict[str, np.ndarray]] = {
        number: dict(columns) for number, columns in parcels[world.rank].items()
    }
    if world.size == 1:
        return dict(received)
    sizes = gather_rows(torch.tensor([len(content) for content in contents], device=world.device))
    sent = torch.frombuffer(bytearray(b"".join(contents) or b"\0"), dtype=torch.uint8).to(world.device)
    receive = sizes[:, world.rank].tolist()
    out = torch.empty(sum(receive), dtype=torch.uint8, device=world.device)
    all_to_all(out, sent[: sum(map(len, contents))], receive=receive, send=[len(content) for content in contents])
    for content in out.cpu().split(receive):
        for number, columns in _unpacked(content.numpy().tobytes()).items():
            received.setdefault(number, {}).update(columns)
    return dict(received)


def _packed(parcel: Mapping[int, SequenceColumns]) -> bytes:
    from safetensors.numpy import save

    named = {f"{number}/{name}": values for number, columns in parcel.items() for name, values in columns.items()}
    return save({name: np.asarray(values, order="C") for name, values in named.items()}) if named else b""


def _unpacked(content: bytes) -> dict[int, dict[str, np.ndarray]]:
    from safetensors.numpy import load

    parcel: dict[int, dict[str, np.ndarray]] = {}
    for key, values in (load(content) if content else {}).items():
        number, _, name = key.partition("/")
        parcel.setdefault(int(number), {})[name] = values
    return parcel
