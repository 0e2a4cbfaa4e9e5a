"""Numbers that a forward returned for each sequence of a micro-batch, and the mean of them that a loop gets."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceMean:
    """The mean of a number that a forward returned for each sequence."""

    edge: GradientEdge
    """What made the mean, whatever a loop does to it in place."""
    values: Sequence[Tensor]
    weights: Sequence[float]
    """Of each value in the mean."""


def mean_of(values: Sequence[Tensor], counts: Sequence[int]) -> tuple[Tensor, SequenceMean | None]:
    """The mean of losses weighted by their targets, and the record of it; if there is no target, the first loss."""
    total = sum(counts)
    weights = [count / total if total else float(not number) for number, count in enumerate(counts)]
    mean = torch.stack([value * weight for value, weight in zip(values, weights) if weight]).sum()
    if not mean.requires_grad:
        return mean, None
    return mean, SequenceMean(edge=get_gradient_edge(mean), values=values, weights=weights)
