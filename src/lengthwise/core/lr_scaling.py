"""How the learning-rate follows the size of a batch: a function of the batch that is optimised, never of a counter."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lengthwise.core.arguments import check_arguments
from lengthwise.core.batch import GlobalBatch, num_targets
from lengthwise.core.errors import InputError, Setting
from lengthwise.core.lengths import LengthIndex

RULES = ("none", "linear", "sqrt")
SIZES = ("tokens", "sequences", "targets")
MAX_LR_FACTOR = 1e6
"""Above it, a factor is a mistake: no optimizer survives such a learning-rate."""


@dataclass(frozen=True, kw_only=True)
class LrScaling:
    """Multiplies the learning-rate by size / reference (linear; Goyal et al. 2017) or its root (sqrt; Krizhevsky 2014).

    Both rules keep the noise of an update what it is at the reference size, under different models of it; neither is
    sound far from the reference, so ``clamp`` bounds the factor.
    """

    rule: str = "linear"
    """One of ``RULES``; none: the factor is 1."""
    by: str = "tokens"
    """What a batch's size counts: one of ``SIZES``; targets are tokens that have a loss."""
    reference: float
    """The size that the base learning-rate is for."""
    clamp: tuple[float, float] | None = None
    """Least and most that the factor may be; None: any."""

    def __post_init__(self) -> None:
        for name, allowed in (("rule", RULES), ("by", SIZES)):
            if (value := getattr(self, name)) not in allowed:
                raise InputError(f"learning-rate scaling: no {name} {value!r}; known: {', '.join(allowed)}")
        check_arguments({"reference": float, "clamp": Sequence[float] | None}, vars(self))
        if not 0 < self.reference < math.inf:
            raise InputError(f"learning-rate scaling: the reference is {self.reference}; give the size of a batch")
        if self.clamp is not None and not (len(self.clamp) == 2 and 0 <= self.clamp[0] <= self.clamp[1]):
            raise InputError(f"learning-rate scaling: the clamp is {self.clamp}; give the least factor, then the most")

    def factor(self, size: float) -> float:
        """The learning-rate factor of a batch of ``size``.

        Raises:
            InputError: the size is not a positive number.
        """
        if not 0 < size < math.inf:
            raise InputError(
                f"learning-rate scaling: a batch has size {size}; it needs at least one of what is counted"
            )
        ratio = size / self.reference
        factor = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[self.rule]
        factor = factor if self.clamp is None else min(max(factor, self.clamp[0]), self.clamp[1])
        if factor > MAX_LR_FACTOR:
            raise InputError(
                f"learning-rate scaling: a batch of size {size:g} multiplies the learning-rate by {factor:g}, over "
                f"{MAX_LR_FACTOR:g}; raise {Setting.LR_REFERENCE}, now {self.reference:g}, or set {Setting.LR_CLAMP}"
            )
        return factor

    def of(self, batch: GlobalBatch) -> float:
        """Factor of a global batch; one without any target has the least there can be."""
        sizes = {"tokens": batch.num_tokens, "sequences": len(batch.ids), "targets": max(1, batch.num_targets)}
        return self.factor(sizes[self.by])


def mean_size(
    lengths: LengthIndex, *, by: str, objective: str, tokens_per_step: int | None, sequences_per_step: int | None
) -> float:
    """Size of a batch of the budget, if sequences were those of the corpus on average; exactly one budget is given."""
    share = (
        sequences_per_step / len(lengths) if sequences_per_step else (tokens_per_step or 0) / lengths.num_tokens
    )  # of the corpus
    if by == "targets" and lengths.targets is not None:
        return int(lengths.targets.sum()) * share
    if by == "targets":
        return num_targets(tuple(lengths.lengths.tolist()), objective=objective) * share
    return (lengths.num_tokens if by == "tokens" else len(lengths)) * share
