"""Find out from calls of a model which of the labels that a user's ``inputs=`` makes have a loss, and what it is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lengthwise.core.errors import CommunicationError
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.loop.synthetic_batches import synthetic, traced_lengths
from lengthwise.runtime.models.targets import IGNORE
from lengthwise.runtime.verify.learn_labels import changed_labels
from lengthwise.runtime.verify.stock_call import pack_of, shard_for
from lengthwise.runtime.verify.summed_losses import check_no_sum, is_close
from lengthwise.runtime.wrap.context import active
from lengthwise.runtime.wrap.made_labels import NAMES, MadeLabels, is_labels
from lengthwise.runtime.wrap.micro_batch import MicroBatch

MOST_TRIED = 8
"""Sequences of which the one with the most labels is taken."""

LossOf = Callable[[Tensor], float | None]
"""The loss of a call with other labels; None: the call fails, or returns none."""


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A call of the stock model on one sequence, with the arguments that ``inputs=`` makes."""

    micro_batch: MicroBatch
    inputs: dict[str, Any]

    def labels(self) -> dict[str, Tensor]:
        """The arguments that may be labels, by name."""
        return {name: self.inputs[name] for name in NAMES if is_labels(self.inputs.get(name))}


def learn_made_labels(run: PreparedModel) -> MadeLabels | None:
    """How the loss depends on labels that ``inputs=`` makes; None: it makes none, or the loss does not depend on them.

    Every rank calls this, with the same outcome.

    Raises:
        CheckError: the loss is a sum over them.
    """
    if run.wrapped_model.make_inputs is None:
        return None
    lengths = traced_lengths(run.collator) * (MOST_TRIED // 2)
    with synthetic(run, lengths):
        tried = [_made(run, lengths, sequence) for sequence in range(len(lengths))]
        for name in NAMES:
            if not (calls := [call for call in tried if call is not None and name in call.labels()]):
                continue
            if (made := _learned(run, name, calls)) is not None:
                return made
    return None


def _made(run: PreparedModel, lengths: tuple[int, ...], sequence: int) -> _Call | None:
    pack = pack_of(run, lengths, (sequence,))
    micro_batch = run.make(shard_for(run, pack, run.alone), pack)
    with active(micro_batch.shard):
        try:
            return _Call(micro_batch=micro_batch, inputs=dict(run.wrapped_model.stock_inputs_of(micro_batch)))
        except Exception:  # such as a sequence that the user's corpus has not; the comparison says what is wrong
            return None


def _learned(run: PreparedModel, name: str, calls: list[_Call]) -> MadeLabels | None:
    """Which labels of an argument have a loss; None: the loss does not depend on them, or no call succeeds, or it was
    not seen which of them count: a module of a user's own may leave others out by a mask, or by a label of its own.
    """
    is_hugging_face = run.wrapped_model.structure.is_hugging_face
    ignored = IGNORE if is_hugging_face else run.collator.ignore_index
    takes_ignored = is_hugging_face or any(bool((call.labels()[name] == ignored).any()) for call in calls)
    call = max(calls, key=lambda call: call.labels()[name].numel())
    labels = call.labels()[name]
    meant = labels.flatten()[labels.flatten() != ignored]
    if not meant.numel():
        return None
    labels, size = torch.where(labels == ignored, meant[0], labels), labels.numel()
    loss_of: LossOf = partial(_loss, run, name, _with_decoder_inputs(run, call, labels))
    everything = loss_of(labels)
    if everything is None or everything != everything:
        return None
    has_effect = partial(_has_effect, loss_of, labels, everything)
    first, last = has_effect(0), has_effect(size - 1)
    if first is None or last is None:
        return None
    if size == 1:  # a class of the sequence
        others = (labels, *changed_labels(labels, 0))
        is_class = first and call.micro_batch.shard.num_slots > 1 and not _is_condition(run, name, call, others)
        return (
            MadeLabels(name=name, ignored=ignored, drops_first=False, drops_last=False, is_mean=True)
            if is_class
            else None
        )
    drops_first, drops_last = not first, not last
    made = partial(MadeLabels, name=name, ignored=ignored, drops_first=drops_first, drops_last=drops_last)
    start, end, middle = int(drops_first), size - int(drops_last), size // 2
    if drops_first and drops_last and has_effect(middle) is False:
        return None
    if not takes_ignored:
        is_other = any(call.micro_batch.shard.num_slots not in call.labels()[name].shape for call in calls)
        is_other &= not _is_condition(run, name, call, (labels, *changed_labels(labels, middle)))
        return made(is_mean=False) if is_other else None
    if not start < middle < end:
        return None
    parts = [loss_of(_only(labels, part, ignored)) for part in (slice(start, middle), slice(middle, end))]
    before, after = parts
    if before is None or after is None:
        return made(is_mean=False)
    mean = (before * (middle - start) + after * (end - middle)) / (end - start)
    if not (is_mean := is_close(everything, mean, run.state.coarsest_dtype)):
        check_no_sum(run, everything, before, after)
    return made(is_mean=is_mean)


def _with_decoder_inputs(run: PreparedModel, call: _Call, labels: Tensor) -> _Call:
    """The call with the inputs of its decoder, where transformers would make them of labels that are left out later."""
    make = getattr(run.model, "prepare_decoder_input_ids_from_labels", None)
    if make is None or any(name in call.inputs for name in ("decoder_input_ids", "decoder_inputs_embeds")):
        return call
    return replace(call, inputs=call.inputs | {"decoder_input_ids": make(labels=labels)})


def _has_effect(loss_of: LossOf, labels: Tensor, everything: float, place: int) -> bool | None:
    """Whether another label at a place makes another loss than ``everything``; None: there is none with one."""
    for changed in changed_labels(labels, place):
        loss = loss_of(changed)
        if loss is None or loss != loss:
            return None
        if loss != everything:
            return True
    return False


def numbers_in_loss(run: PreparedModel) -> list[str]:
    """Arguments of one number or row for a sequence that its loss depends on, and no layer does.

    ``inputs=`` makes them; such are the targets of regression. Every rank calls this.
    """
    if run.wrapped_model.make_inputs is None:
        return []
    lengths = traced_lengths(run.collator)
    with synthetic(run, lengths):
        call = _made(run, lengths, 0)
        return [] if call is None else [name for name in call.inputs if _is_number_in_loss(run, name, call)]


def _is_number_in_loss(run: PreparedModel, name: str, call: _Call) -> bool:
    value = call.inputs[name]
    if not _is_of_sequence(value, call.micro_batch.shard.num_slots):
        return False
    others = [value, *(pytree.tree_map_only(Tensor, partial(_changed, number=n), value) for n in range(2))]
    losses = [_loss(run, name, call, other) for other in others]
    numbers = {loss for loss in losses if loss is not None and loss == loss}
    return len(numbers) > 1 and not _is_condition(run, name, call, others)


def _is_of_sequence(value: Any, num_slots: int) -> bool:
    """Whether an argument is a number or a row for the only sequence of a call, or a list of what it has, such as the
    classes and boxes of what is to be found in it.
    """
    tensors = _tensors(value)
    return (
        isinstance(value, Tensor | list | tuple)
        and (not isinstance(value, Tensor) or value.dim() > 0)
        and len(value) == 1
        and all(tensor.numel() and num_slots not in tensor.shape for tensor in tensors)
        and bool(tensors)
    )


def _changed(value: Tensor, number: int) -> Tensor:
    """Other numbers or labels than those of a sequence, of which there are several."""
    if value.is_floating_point():
        return value + 1.0 + number
    others = [*changed_labels(value, 0)] if is_labels(value) else []
    return others[number] if number < len(others) else value


def _is_condition(run: PreparedModel, name: str, call: _Call, different: Sequence[Tensor]) -> bool:
    """Whether one number of a sequence changes what its layers compute, so that it is no label of it."""
    last, seen = run.wrapped_model.structure.layers[-1], list[list[Tensor]]()
    for values in different:
        seen.append([])
        handle = last.register_forward_hook(lambda layer, args, output: seen[-1].extend(_tensors(output)))
        try:
            _loss(run, name, call, values)
        finally:
            handle.remove()
    first, *others = seen
    return any(not torch.equal(*pair) for other in others for pair in zip(first, other))


def _tensors(output: Any) -> list[Tensor]:
    return [value for value in pytree.tree_leaves(output) if isinstance(value, Tensor)]


def _only(labels: Tensor, places: slice, ignored: int) -> Tensor:
    """The labels at some places, all others ignored."""
    some = torch.full_like(labels.flatten(), ignored)
    some[places] = labels.flatten()[places]
    return some.view(labels.shape)


def _loss(run: PreparedModel, name: str, call: _Call, labels: Tensor) -> float | None:
    """The loss of a call with other labels."""
    devices = [run.world.device] if run.world.device.type == "cuda" else []
    with torch.no_grad(), run.wrapped_model.plain(), run.gathered(), torch.random.fork_rng(devices):
        torch.manual_seed(0)
        try:
            with active(call.micro_batch.shard):
                loss = run.wrapped_model.loss_of(run.model(**call.inputs | {name: labels}), call.micro_batch)
        except CommunicationError:
            raise
        except Exception:  # such as labels that the user's own module does not take
            return None
    return float(loss) if loss.numel() == 1 else None
