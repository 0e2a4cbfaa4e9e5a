"""Global batches and packs: sequence ids and their lengths, never token values."""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol

from lengthwise.core.errors import InputError

NEXT_TOKEN, MASKED, EVERY_TOKEN = OBJECTIVES = ("next-token", "masked", "every-token")
"""Tokens that have a loss: every token but the first, randomly masked ones, or every token."""
MASKED_SHARE = 0.15
"""Share of a sequence's tokens that are predicted with the objective ``masked`` (Devlin et al. 2019)."""


def num_targets(lengths: tuple[int, ...], *, objective: str = NEXT_TOKEN) -> int:
    """Tokens that have a loss: all but the first of each sequence, of each sequence :func:`num_masked`, or all."""
    if objective == MASKED:
        return sum(map(num_masked, lengths))
    if objective == EVERY_TOKEN:
        return sum(lengths)
    return sum(lengths) - len(lengths)


def num_masked(length: int) -> int:
    """Tokens predicted of a sequence with the objective ``masked``: 15 %, at least one."""
    return max(1, round(MASKED_SHARE * length))


@dataclass(frozen=True, kw_only=True)
class GlobalBatch:
    """The sequences of one optimizer step. A function of seed and step alone, never of the cluster."""

    step: int
    ids: tuple[int, ...]
    lengths: tuple[int, ...]
    """Length of each sequence, in tokens."""
    objective: str = NEXT_TOKEN
    """One of ``OBJECTIVES``; decides how many tokens have a loss."""
    targets: tuple[int, ...] | None = None
    """Tokens of each sequence that have a loss, where the data says which; None: those that the objective says."""
    attention_lengths: tuple[int, ...] | None = None
    """Length of a sequence whose tokens attend to as many on average as those of each; None: its own. See
    :func:`attention_length`."""

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise InputError(f"step {self.step}: no objective {self.objective!r}; known: {', '.join(OBJECTIVES)}")
        if len(self.ids) != len(self.lengths):
            raise InputError(f"step {self.step}: {len(self.ids)} ids but {len(self.lengths)} lengths")
        if self.targets is not None and len(self.targets) != len(self.ids):
            raise InputError(f"step {self.step}: {len(self.ids)} ids but {len(self.targets)} counts of targets")
        if self.attention_lengths is not None and len(self.attention_lengths) != len(self.ids):
            raise InputError(
                f"step {self.step}: {len(self.ids)} ids but {len(self.attention_lengths)} lengths of attention"
            )
        if not self.ids:
            raise InputError(f"step {self.step}: a global batch needs at least one sequence")
        if min(self.lengths) < 1:
            where = self.ids[self.lengths.index(min(self.lengths))]
            raise InputError(f"step {self.step}: sequence {where} has length {min(self.lengths)}, below 1 token")

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of all sequences, without padding."""
        return sum(self.lengths)

    @cached_property
    def num_targets(self) -> int:
        """Tokens of the step that have a loss."""
        if self.targets is not None:
            return sum(self.targets)
        return num_targets(self.lengths, objective=self.objective)


def attention_length(num_tokens: int, num_pairs: int) -> int:
    """Length x of a causal sequence whose tokens attend to as many on average: a unit costs ``num_tokens`` / x such.

    A unit of several sequences, or a prefix tree, is planned as one sequence of ``num_tokens``, and attention in it is
    cheaper than in such a sequence. A cost of a x^2 + b x for a sequence of x tokens makes it a x T + b T for T tokens.

    Args:
        num_tokens: of the unit.
        num_pairs: of a token and one that it attends to, itself included.
    """
    return min(num_tokens, max(1, round(2 * num_pairs / num_tokens - 1)))


def filler_lengths(filler: int, longest: int) -> tuple[int, ...]:
    """Lengths of sequences of padding: ``filler`` tokens in all, at most ``longest`` each.

    Any model that holds the pack's longest sequence holds them, and their attention costs no more than it must.
    """
    num_longest, rest = divmod(filler, longest)
    return (longest,) * num_longest + ((rest,) if rest else ())


@dataclass(frozen=True, kw_only=True)
class Pack:
    """Sequences laid end to end in one forward; attention never crosses a boundary.

    ``padded_to`` > 0 lays every sequence out in that many tokens, the padding at its end. No token of a sequence
    looks at it and no padding token is a target, so a padded pack is as exact as a dense one; it costs more. ``rows``
    above the number of sequences lays out as many, the last ones of padding alone: every pack of ``rows`` sequences of
    ``padded_to`` tokens has one shape. ``filler`` more tokens of padding at the end of the pack, in sequences of their
    own that are no longer than its longest, bring it to a size that many packs share.
    """

    ids: tuple[int, ...]
    lengths: tuple[int, ...]
    padded_to: int = 0
    rows: int = 0
    filler: int = 0

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.lengths) or not self.ids:
            raise InputError(f"a pack needs as many lengths as ids and at least one; got {len(self.ids)} ids")
        if self.padded_to and self.padded_to < max(self.lengths):
            raise InputError(f"sequences of {max(self.lengths):,} tokens cannot be padded to {self.padded_to:,}")
        if self.rows and (self.rows < len(self.lengths) or not self.padded_to):
            raise InputError(
                f"{len(self.lengths)} sequences padded to {self.padded_to:,} tokens cannot be laid out in {self.rows} "
                "rows"
            )
        if self.filler < 0:
            raise InputError(f"a pack is filled up with 0 tokens or more, not {self.filler:,}")

    @cached_property
    def computed_lengths(self) -> tuple[int, ...]:
        """Tokens each sequence occupies in the forward, padding included; then those of padding alone."""
        laid_out = (self.padded_to,) * max(self.rows, len(self.lengths)) if self.padded_to else self.lengths
        return laid_out + filler_lengths(self.filler, max(laid_out)) if self.filler else laid_out

    @cached_property
    def num_tokens(self) -> int:
        """Tokens the forward computes, padding included."""
        return sum(self.computed_lengths)

    @cached_property
    def num_targets(self) -> int:
        """Tokens of the pack that have a loss in next-token prediction."""
        return num_targets(self.lengths)

    @cached_property
    def cu_seqlens(self) -> tuple[int, ...]:
        """Offsets of the sequence boundaries: ``num_sequences + 1`` values, from 0 to ``num_tokens``."""
        return (0, *accumulate(self.computed_lengths))


class BatchStream(Protocol):
    """A source of global batches that can be resumed; :class:`lengthwise.data.sampler.Sampler` is one."""

    def __next__(self) -> GlobalBatch: ...
    def state_dict(self) -> dict[str, Any]:
        """The state of the stream, from which it can go on."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Go on from the state of a checkpoint."""
        ...
