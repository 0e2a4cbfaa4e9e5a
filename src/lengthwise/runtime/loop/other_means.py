"""Means over tokens or units of losses that a forward returned for each sequence of a micro-batch.

Sequence by sequence a loop gets their mean by targets. For another mean each has another weight, which is put right in
what the loop made of it, if that is no more than a multiple to which something is added: the derivative by the mean is
constant then.
"""

import torch
from torch import Tensor

from lengthwise.core.errors import InputError
from lengthwise.runtime.wrap.bent_losses import bends_after
from lengthwise.runtime.wrap.loss_check import MeanOver
from lengthwise.runtime.wrap.micro_batch import MicroBatch
from lengthwise.runtime.wrap.missing_tensor import MissingTensor
from lengthwise.runtime.wrap.sequence_means import SequenceMean


def with_other_mean(loss: Tensor, micro_batch: MicroBatch, mean_over: MeanOver | None) -> Tensor:
    """A loss of sequences' means, with each of them weighted as a mean over "tokens" or "units" weighs it.

    Raises:
        InputError: the loss is another function of such a mean than a multiple of it, to which something is added.
    """
    if mean_over not in ("tokens", "units") or isinstance(loss, MissingTensor) or not loss.requires_grad:
        return loss
    means = [mean for forward in micro_batch.shard.passes for mean in forward.sequence_means]
    for mean in means:
        (slope,) = torch.autograd.grad(loss, [mean.edge], create_graph=True, allow_unused=True)
        if slope is None:
            continue
        if slope.requires_grad or bends_after(loss, mean.edge.node):
            raise InputError(
                f"the loss with mean_over={mean_over!r} is made of what the forward returned for each sequence, by "
                "more than a factor that is a number and terms that are added; take that function of the loss of each "
                "sequence, in the forward"
            )
        weights = _weights(mean, micro_batch, mean_over)
        changes = [value * (new - old) for value, new, old in zip(mean.values, weights, mean.weights) if new != old]
        if changes:
            loss = loss + slope.detach() * torch.stack(changes).sum()
    return loss


def _weights(mean: SequenceMean, micro_batch: MicroBatch, mean_over: MeanOver) -> list[float]:
    """The weight of each sequence; 0 for one without a target, whose loss is no number."""
    if mean_over == "tokens":
        lengths = micro_batch.pack.lengths
        weights = [length / sum(lengths) for length in lengths]
    else:
        units = micro_batch.unit_ids.tolist()
        weights = [1 / (micro_batch.num_units * units.count(unit)) for unit in units]
    return [
        weight if used or bool(torch.isfinite(value.detach())) else 0.0
        for weight, used, value in zip(weights, mean.weights, mean.values)
    ]
