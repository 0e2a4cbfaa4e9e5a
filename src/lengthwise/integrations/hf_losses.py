"""Losses that transformers' Trainer makes of logits, on packs and shards: label smoothing and ``compute_loss_func``.

``compute_loss_func(outputs, labels, num_items_in_batch)`` gets sequences with each token's own label, moves labels to
the tokens that predict them, and divides a sum over tokens by ``num_items_in_batch``. A shard has labels moved
already, from the next rank too. So it gets a row more, before its labels and behind its logits, which moving drops.

T tokens of one sequence, t slots of this rank, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lengthwise.runtime.models.targets import IGNORE
from lengthwise.runtime.wrap.micro_batch import MicroBatch

LossOf = Callable[[Any, MicroBatch], Tensor]
LossFunction = Callable[..., Tensor]

SUM_TOLERANCE = 1e-4
"""How far the loss of parts may be from that of a whole, relative: functions may compute in float32."""
_NUM_TOKENS, _CUT, _TIMES_AS_MANY, _NUM_CLASSES = 9, 4, 3, 100
_WAY_OUT = "make the loss with lengthwise={'loss': lambda output, micro_batch: ...}"


def smoothed_loss(factor: float) -> LossOf:
    """The mean cross-entropy of this rank's targets with label smoothing (Szegedy et al. 2016), by chunks of tokens."""

    def loss_of(output: Any, micro_batch: MicroBatch) -> Tensor:
        return F.cross_entropy(
            output.logits.flatten(0, 1), micro_batch.labels, ignore_index=IGNORE, label_smoothing=factor
        )

    return loss_of


def loss_of_function(function: LossFunction) -> LossOf:
    """The mean loss of this rank's targets by a ``compute_loss_func`` that is a sum over tokens."""

    def loss_of(output: Any, micro_batch: MicroBatch) -> Tensor:
        return _mean_of_shard(function, output.logits, micro_batch.labels[None], micro_batch.num_targets)

    return loss_of


def _mean_of_shard(function: LossFunction, logits: Tensor, targets: Tensor, num_targets: int) -> Tensor:
    """The mean over targets [1, t], which are those of the logits [1, t, V] in the same place."""
    num_slots = targets.shape[1]
    places = torch.arange(num_slots + 1, device=targets.device).clamp(max=num_slots - 1)  # logits may be deferred
    labels = F.pad(targets, (1, 0), value=IGNORE)
    count = torch.tensor(max(1, num_targets), device=targets.device)
    return function(_outputs(logits[:, places]), labels, num_items_in_batch=count)


def function_problem(function: LossFunction, vocab_size: int | None) -> str:
    """Why a ``compute_loss_func`` cannot be computed on shards of packs; an empty string if it can.

    It is called with random logits of one sequence, and of two parts of it: the sum has to be the same. With a larger
    ``num_items_in_batch``, as the rest of a step makes it, it has to be less in proportion.

    ``vocab_size``: None where the model does not say it.
    """
    vocab_size = vocab_size or _NUM_CLASSES
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, _NUM_TOKENS, vocab_size, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, vocab_size, (1, _NUM_TOKENS), generator=generator)
    labels[0, 2] = IGNORE
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE)
    try:
        count = int((targets != IGNORE).sum())
        expected, of_more = (
            float(function(_outputs(logits), labels, num_items_in_batch=torch.tensor(number))) * number
            for number in (count, count * _TIMES_AS_MANY)
        )
        parts = 0.0
        for part in (slice(0, _CUT), slice(_CUT, None)):
            number = int((targets[:, part] != IGNORE).sum())
            parts += float(_mean_of_shard(function, logits[:, part], targets[:, part], number)) * number
        scale = max(abs(expected), 1e-12)
    except Exception as error:
        reason = " ".join(str(error).split())[:150]
        return f"it cannot be computed of logits and labels alone ({type(error).__name__}: {reason}); {_WAY_OUT}"
    if not abs(parts - expected) / scale <= SUM_TOLERANCE:  # also where they are not numbers
        return (
            "it is no sum over tokens, each of the logits before its label, divided by num_items_in_batch: of two "
            f"parts of a sequence it gives {parts:.6g}, of the whole {expected:.6g}; {_WAY_OUT}"
        )
    if abs(of_more - expected) / scale <= SUM_TOLERANCE:
        return ""
    more = count * _TIMES_AS_MANY
    return (
        f"it does not divide by num_items_in_batch: where that is {count} it gives {expected / count:.6g}, and where "
        f"it is {more} {of_more / more:.6g}, not {expected / more:.6g}; sum over tokens and divide by it, or {_WAY_OUT}"
    )


def _outputs(logits: Tensor) -> Any:
    from transformers.modeling_outputs import CausalLMOutput

    return CausalLMOutput(logits=logits)
