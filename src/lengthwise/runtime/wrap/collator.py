"""The collator: how a pack of sequences becomes the tensors of a micro-batch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from lengthwise.core.batch import EVERY_TOKEN, Pack
from lengthwise.core.errors import InputError
from lengthwise.runtime.models.targets import IGNORE, TokenMasking
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
    passed: Mapping[str, Callable[[int], np.ndarray]] = field(default_factory=dict)
    """Further arguments of the forward by name, one value for each token of a sequence."""
    loss_columns: Mapping[str, Callable[[int], np.ndarray]] = field(default_factory=dict)
    """Columns for the user's loss by name, one value for each token of a sequence."""
    special: Callable[[int], np.ndarray] | None = None
    """Which tokens of a sequence are never hidden; None: any may be."""
    kinds: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Slots of the corpus that differ, ``tokens`` and each further column, to compare the model on; nothing: the first
    sequence is taken for all."""

    units: Units | None = None
    """Of which sequences those consist that are planned; None: of one each."""

    def computed(self, pack: Pack) -> Pack:
        """The pack of the sequences that are computed, from a planned pack of units."""
        return pack if self.units is None else self.units.members(pack)

    @property
    def has_all_targets(self) -> bool:
        """Whether each slot has a loss, whatever its sequence holds."""
        return self.objective == EVERY_TOKEN and self.labels is None

    def cu_seqlens(self, pack: Pack) -> tuple[int, ...]:
        """Sequence boundaries of a pack in slots. Padding is a sequence of its own: models may attend both ways."""
        ends = {start + length for start, length in zip(pack.cu_seqlens, pack.lengths)}
        return tuple(bound // self.slot_tokens for bound in sorted({*pack.cu_seqlens, *ends}))


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
            f"sequences {pack.ids[:5]} of {sum(pack.lengths) // slots} slots would be padded to "
            f"{pack.num_tokens // slots} for {degree} ranks, but the objective {EVERY_TOKEN} has a loss for every "
            "slot; plan a lower degree for them, or no padding"
        )
    return pack
