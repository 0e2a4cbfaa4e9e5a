"""Find out from calls of a model how its loss uses labels."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lengthwise.core.batch import NEXT_TOKEN
from lengthwise.core.errors import InputError
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.models.targets import IGNORE
from lengthwise.runtime.verify.stock_call import pack_of, shard_for
from lengthwise.runtime.wrap.context import active
from lengthwise.runtime.wrap.forward_arguments import TARGETS
from lengthwise.runtime.wrap.label_convention import LabelConvention, loss_of_logits
from lengthwise.runtime.wrap.micro_batch import MicroBatch

SAME = 1e-5
"""Relative difference of two losses that rounding explains, in float32 and above; in 16 bits 1,000 times that."""
MOST_TRIED = 16
"""Labels by which one is replaced, to see whether it has an effect."""
FEWEST = 3
"""Tokens of a sequence from which a module's use of labels is found out."""


def learn_labels(run: PreparedModel, tokens: Tensor) -> LabelConvention:
    """Determine a model's label convention from calls with one sequence of ``tokens`` [L] and different labels.

    A model that fails, or whose loss is none of these, is taken for the usual kind; the check before training decides.
    """
    usual, wrapped_model = LabelConvention(), run.wrapped_model
    if wrapped_model.objective != NEXT_TOKEN:
        return usual
    if not wrapped_model.uses_labels:
        is_module = not wrapped_model.structure.is_hugging_face and bool((tokens != tokens[0]).any())
        return replace(usual, is_in_module=is_module and _shifts(run, tokens))
    first = torch.full_like(tokens, IGNORE)
    first[0] = tokens[0]
    shifted = torch.cat([tokens[1:], first.new_full((1,), IGNORE)])
    with torch.no_grad(), wrapped_model.plain():
        try:
            alone = float(_call(run, tokens, first).loss)
            if alone == alone and alone != 0.0:  # the first label counts
                return LabelConvention(shifts=False, takes_shifted=False)
            expected = _call(run, tokens, tokens)
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
            return usual
        try:
            # Without labels but these: other losses of an untrained model may be the same by chance.
            taken = _call(run, tokens, torch.full_like(tokens, IGNORE), shift_labels=shifted[None]).loss
        except (RuntimeError, TypeError, ValueError, IndexError):
            taken = None
    if taken is not None and _is_same(taken, expected.loss):
        return usual
    if _is_same(loss_of_logits(expected.logits, shifted[None]), expected.loss):
        return replace(usual, takes_shifted=False)
    return usual


def _shifts(run: PreparedModel, tokens: Tensor) -> bool:
    """Whether the loss of a user's module depends on the last label it is given, and not on the first one."""
    wrapped_model, pack = run.wrapped_model, pack_of(run, (len(tokens),))
    micro_batch = run.make(shard_for(run, pack, run.alone), pack)
    inputs = wrapped_model.stock_inputs_of(micro_batch)
    name = next((name for name in TARGETS if name in inputs), None)
    if name is None or len(tokens) < FEWEST or wrapped_model.make_inputs is not None:
        return False
    usual = _loss(run, micro_batch, inputs | {name: tokens[None]})
    if usual is None or usual.isnan().any():
        return False

    def has_effect(place: int) -> bool | None:
        """Whether another label at a place makes another loss; None: the model fails with one."""
        for labels in changed_labels(tokens, place):
            loss = _loss(run, micro_batch, inputs | {name: labels[None]})
            if loss is None or not torch.equal(usual, loss):
                return None if loss is None else True
        return False

    return has_effect(0) is False and has_effect(-1) is True


def changed_labels(labels: Tensor, place: int) -> Iterator[Tensor]:
    """Labels with another one at a place of the flattened ones: with each that there is, and ``MOST_TRIED`` at most.

    In 16 bits a loss may be the same by rounding, whatever one of its labels is.
    """
    flat = labels.flatten()
    others = torch.unique(flat[flat != flat[place]])[:MOST_TRIED]
    for other in others if len(others) else (flat[place] == 0).to(flat.dtype)[None]:
        changed = flat.clone()
        changed[place] = other
        yield changed.view(labels.shape)


def _loss(run: PreparedModel, micro_batch: MicroBatch, inputs: dict[str, Any]) -> Tensor | None:
    """The loss of a call of the model; None if it fails, or returns none."""
    devices = [run.world.device] if run.world.device.type == "cuda" else []
    with torch.no_grad(), run.wrapped_model.plain(), run.gathered(), torch.random.fork_rng(devices):
        torch.manual_seed(0)
        try:
            with active(micro_batch.shard):
                return run.wrapped_model.loss_of(run.model(**inputs), micro_batch)
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError, InputError):
            return None


def _call(run: PreparedModel, tokens: Tensor, labels: Tensor, **options: Any) -> Any:
    with run.gathered():
        return run.model(input_ids=tokens[None], labels=labels[None], **options)


def _is_same(loss: Tensor, other: Tensor) -> bool:
    is_half = {loss.dtype, other.dtype} & {torch.bfloat16, torch.float16}
    same = SAME * (1000.0 if is_half else 1.0)
    return bool((loss.double() - other.double()).abs() <= same * other.double().abs())
