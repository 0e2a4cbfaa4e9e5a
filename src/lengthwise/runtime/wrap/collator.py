"""The collator: how a pack of sequences becomes the tensors of a micro-batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np

from lengthwise.core.batch import EVERY_TOKEN, Pack
from lengthwise.core.errors import InputError
from lengthwise.core.prefix_tree import PrefixTree, in_pack
from lengthwise.runtime.models.targets import IGNORE, TokenMasking
from lengthwise.runtime.wrap.corpus_window import CorpusWindow
from lengthwise.runtime.wrap.shared_prefixes import SharedPrefixes
from lengthwise.runtime.wrap.unit_members import Units


class SequenceSource(Protocol):
    """A source of sequences by number, such as a corpus."""

    def tokens(self, sequence: int, /) -> np.ndarray:
        """``[length]`` token ids, or ``[slots, ...]`` of anything."""
        ...


@dataclass(frozen=True, kw_only=True)
class PackCollator:
    """Turns a pack of sequences into the tensors of a micro-batch, with labels, masking and further columns."""

    source: SequenceSource
    objective: str
    masking: TokenMasking | None = None
    ignore_index: int = IGNORE
    slot_tokens: int = 1
    """Tokens of a slot: of a frame, where sequences are videos."""
    labels: Callable[[int], np.ndarray] | None = None
    """Labels of a sequence, each token's own; None: the tokens. Next tokens are predicted by the token before them;
    with other objectives each token predicts its own label."""
    shifts_labels: bool = True
    """Whether, with next tokens, the token before it predicts a label; False: its own token does, as in the model."""
    makes_labels: bool = False
    """Whether ``inputs=`` makes labels, which may have other targets than are counted here."""
    passed: Mapping[str, Callable[[int], np.ndarray]] = field(default_factory=dict)
    """Further arguments of the forward by name, one value for each token of a sequence."""
    loss_columns: Mapping[str, Callable[[int], np.ndarray]] = field(default_factory=dict)
    """Columns for the user's loss by name, one value for each token of a sequence."""
    special: Callable[[int], np.ndarray] | None = None
    """Which tokens of a sequence are never hidden; None: any may be."""
    kinds: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Slots of the corpus that differ, ``tokens`` and each further column, to compare the model on; nothing: the first
    sequence is taken for all."""
    windows: Sequence[CorpusWindow] = ()
    """Slots of several sequences, to compare the model on; nothing: the first sequence is taken for all."""

    borders: Sequence[Mapping[str, np.ndarray]] = ()
    """Columns of short sequences, to compare the model on, which meet in a pack as those of the corpus may."""

    longest: int | None = None
    """Slots of the longest sequence of the corpus; None: it is not known."""

    compared_lengths: tuple[int, ...] = ()
    """Slots of three sequences, as the corpus has them, that a model is compared on which fails with other lengths;
    nothing: the usual ones."""
    slots_of_corpus: np.ndarray | None = None
    """[S] slots of each sequence of the corpus, if a model is compared on whole ones; None: on parts of them."""

    units: Units | None = None
    """Of which sequences those consist that are planned; None: of one each."""

    item_numbers: np.ndarray | None = None
    """[S] the item of each single sequence, in what the user gave; None: its own number."""

    shared: SharedPrefixes | None = None
    """Lays units out as one sequence each, with what their sequences share once; ``source``, ``labels`` and ``passed``
    are by unit then, ``loss_columns`` by sequence as ever."""
    of_sequences: "PackCollator | None" = None
    """Where units are laid out as one sequence each: the collator of their sequences, which that was made of."""

    def computed(self, pack: Pack) -> Pack:
        """The pack that is computed, from a planned pack: of units, that of their sequences."""
        return pack if self.units is None or self.shared is not None else self.units.members(pack)

    def members(self, pack: Pack) -> list[int]:
        """The numbers of the single sequences of a pack that is computed."""
        return list(pack.ids) if self.shared is None else self.shared.ids(pack.ids)

    def items(self, sequences: Sequence[int]) -> list[int]:
        """The item of each of some single sequences, in what the user gave.

        Sequences beyond those of the corpus, on which a model is compared, have numbers that no item has.
        """
        numbers = self.item_numbers
        if numbers is None:
            return list(sequences)
        beyond = 1 + int(numbers.max()) - len(numbers) if max(sequences, default=0) >= len(numbers) else 0
        return [int(numbers[n]) if n < len(numbers) else n + beyond for n in sequences]

    def name(self, sequence: int) -> str:
        """The name of a single sequence in error messages, by its item."""
        item = self.items([sequence])[0]
        if self.units is None:
            return f"item {item}"
        return self.units.name(sequence, None if self.item_numbers is None else item)

    def loss_column(self, name: str, pack: Pack) -> list[np.ndarray]:
        """The values of one of :attr:`loss_columns` for each of :meth:`members`.

        Raises:
            InputError: there is no such column.
        """
        columns = self.loss_columns
        if name not in columns:
            raise InputError(
                f"no column {name!r} of the items is kept for the loss; kept are: {', '.join(columns) or 'none'}. Name "
                f"it in prepare(..., loss_columns=({name!r},))"
            )
        return [np.asarray(columns[name](sequence)) for sequence in self.members(pack)]

    def lengths(self, pack: Pack) -> tuple[int, ...]:
        """The tokens of each of :meth:`members`, whatever they share."""
        if self.shared is None or self.units is None:
            return pack.lengths
        return tuple(self.units.lengths[self.members(pack)].tolist())

    def noise_id(self, number: int) -> int:
        """The number that random draws of a sequence of a computed pack belong to."""
        return number if self.shared is None or self.units is None else self.units.noise_id(number)

    def tree(self, pack: Pack) -> PrefixTree | None:
        """The prefix tree of a pack's slots; None: no item shares anything."""
        if self.shared is None:
            return None
        trees = [(start, self.shared.tree(unit)) for start, unit in zip(pack.cu_seqlens, pack.ids)]
        by_start = dict(trees)
        bounds = self.cu_seqlens(pack)
        return in_pack([by_start.get(start) for start in bounds[:-1]], bounds)

    @property
    def repeated_tokens(self) -> int:
        """Tokens that the step computes more than once, because several parts of a unit begin with them."""
        return 0 if self.units is None else self.units.repeated_tokens

    @property
    def may_leave_out(self) -> bool:
        """Whether labels may leave out targets that lengths count."""
        return self.labels is not None or self.makes_labels

    @property
    def has_all_targets(self) -> bool:
        """Whether each slot has a loss, whatever its sequence holds."""
        return self.objective == EVERY_TOKEN and self.labels is None

    def cu_seqlens(self, pack: Pack) -> tuple[int, ...]:
        """Sequence boundaries of a pack in slots. Padding is a sequence of its own: models may attend both ways."""
        ends = {start + length for start, length in zip(pack.cu_seqlens, pack.lengths)}
        return tuple(bound // self.slot_tokens for bound in sorted({*pack.cu_seqlens, *ends}))


def with_shared_prefixes(collator: PackCollator) -> PackCollator:
    """The collator of units that are laid out as one sequence, from that of their sequences, which have labels."""
    assert collator.units is not None and collator.labels is not None, "checked where options are read"
    shared = SharedPrefixes(
        collator.source.tokens, collator.labels, collator.passed, units=collator.units,
        ignore_index=collator.ignore_index,
    )  # fmt: skip
    passed = {name: partial(shared.passed, name) for name in collator.passed}
    return replace(
        collator, source=shared, labels=shared.labels, passed=passed, shared=shared, of_sequences=collator
    )  # fmt: skip


def with_units(collator: PackCollator, units: Units) -> PackCollator:
    """The collator with other units in place of its own, which share prefixes: such as some that are cut."""
    assert collator.of_sequences is not None, "the sequences of units share prefixes"
    return with_shared_prefixes(replace(collator.of_sequences, units=units))


def pad_to_degree(pack: Pack, degree: int, collator: PackCollator) -> Pack:
    """Pad a pack that has fewer slots than ranks share it: models fail on a rank without any.

    Raises:
        InputError: it has padding, and its model learns from every token.
    """
    slots = collator.slot_tokens
    if pack.num_tokens < degree * slots:
        pack = replace(pack, padded_to=degree * slots, rows=0)
    if collator.has_all_targets and pack.num_tokens > sum(pack.lengths):
        raise InputError(
            f"items {', '.join(map(str, collator.items(collator.members(pack)[:5])))} of {sum(pack.lengths) // slots} "
            f"slots would be padded to {pack.num_tokens // slots} for {degree} ranks, but the objective {EVERY_TOKEN} "
            "has a loss for every slot; plan a lower degree for them (max_degree=), or by a policy without padding"
        )
    return pack
