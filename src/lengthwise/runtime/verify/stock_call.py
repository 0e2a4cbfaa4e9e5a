"""Run one sequence through the stock model, and several in one pack as training computes them.

Both sides of the comparison in :mod:`lengthwise.runtime.verify.gradient_check`: losses weighted by their targets,
and the gradient of every trained parameter.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from lengthwise.core.batch import NEXT_TOKEN, Pack
from lengthwise.core.errors import InputError
from lengthwise.core.pipeline_config import Method
from lengthwise.runtime.comm.group import Group
from lengthwise.runtime.loop.fsdp2 import Fsdp2State
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.models.targets import IGNORE
from lengthwise.runtime.verify.loss_calls import ObserveLossCalls
from lengthwise.runtime.wrap.bent_losses import check_not_bent
from lengthwise.runtime.wrap.collator import pad_to_degree
from lengthwise.runtime.wrap.context import PackShard, active
from lengthwise.runtime.wrap.gradient_changes import ObserveGradientChanges
from lengthwise.runtime.wrap.loss_backward import LossTerm, backward, gradients
from lengthwise.runtime.wrap.made_labels import targets_of_loss
from lengthwise.runtime.wrap.micro_batch import MicroBatch
from lengthwise.runtime.wrap.offload_layers import LayerOffload
from lengthwise.runtime.wrap.sequence_by_sequence import seed_for_sequence


@dataclass(frozen=True, kw_only=True)
class GradientResult:
    """The losses of some sequences, each weighted by its targets, summed; and the gradient of that sum."""

    loss: float | None
    """None on a rank that computed nothing."""
    gradients: list[Tensor]
    """One for each trained parameter, or this rank's share of each; with FSDP2 a single one for all of them."""
    without_number: tuple[int, ...] = ()
    """Slots of the sequences whose loss, by itself, is not finite."""


def parameter_names(run: PreparedModel) -> list[str]:
    """The name of each of :attr:`GradientResult.gradients`."""
    return ["all parameters"] if isinstance(run.state, Fsdp2State) else list(run.wrapped_model.structure.parameters)


def shard_for(run: PreparedModel, pack: Pack, group: Group, **options: Any) -> PackShard:
    """The shard with this rank's slots of a pack, computed without noise by the ranks of ``group``."""
    return PackShard(
        step=0, seed=run.seed, ids=pack.ids, cu_seqlens=run.collator.cu_seqlens(pack), group=group,
        tree=run.collator.tree(pack), device=run.world.device,
        has_noise=False, is_causal=run.collator.objective == NEXT_TOKEN, **options,
    )  # fmt: skip


def pack_of(run: PreparedModel, lengths: tuple[int, ...], sequences: tuple[int, ...] | None = None) -> Pack:
    """A pack of synthetic sequences of ``lengths`` in slots; all of them, or those numbered ``sequences``."""
    sequences = tuple(range(len(lengths))) if sequences is None else sequences
    return Pack(ids=sequences, lengths=tuple(lengths[number] * run.collator.slot_tokens for number in sequences))


def stock_output(
    run: PreparedModel,
    lengths: tuple[int, ...],
    sequence: int,
    *,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> tuple[Any, MicroBatch]:
    """Call the stock model on one sequence alone, within ``around()``; returns its output and the micro-batch."""
    pack = pack_of(run, lengths, (sequence,))
    shard = shard_for(run, pack, run.alone)
    micro_batch = run.make(shard, pack)
    with active(shard):
        inputs = run.wrapped_model.stock_inputs_of(micro_batch)
    by_sequence = run.wrapped_model.by_sequence is not None
    with run.wrapped_model.plain(), seed_for_sequence(shard, sequence) if by_sequence else nullcontext(), around():
        return run.model(**inputs), micro_batch


def stock_loss(run: PreparedModel, lengths: tuple[int, ...], sequence: int) -> tuple[Tensor | None, int]:
    """The mean loss of one sequence and the number of its targets; no loss where it has none."""
    with ObserveLossCalls() as calls:
        output, micro_batch = stock_output(run, lengths, sequence)
        with active(micro_batch.shard):
            if not (num_targets := run.wrapped_model.targets_of(micro_batch)):
                return None, 0
            loss = run.wrapped_model.loss_of(output, micro_batch)
    if micro_batch.handed_out.has_labels:
        run.wrapped_model.labels = replace(run.wrapped_model.labels, are_read=True)
    if micro_batch.slot_tokens == 1:
        uncounted = calls.uncounted(loss, lambda: micro_batch.labels)
        run.wrapped_model.ignored_labels |= uncounted - {IGNORE, micro_batch.ignore_index}
    if loss.dim():
        raise InputError(f"the loss has shape {tuple(loss.shape)}; it is to be one number, the mean over the targets")
    return loss, num_targets


def gradients_alone(run: PreparedModel, lengths: tuple[int, ...], *, gradients: bool = True) -> GradientResult:
    """Loss and gradients of the stock model, called on each sequence of ``lengths`` slots in turn."""
    total, summed, is_summed, without_number = 0.0, None, is_summed_over_ranks(run), list[int]()
    for sequence in range(len(lengths)):
        with run.gathered():
            with ObserveGradientChanges() as changes:
                loss, num_targets = stock_loss(run, lengths, sequence)
            if loss is None:
                continue
            run.wrapped_model.gradient_changes |= changes.of(loss)
            total += float(loss.detach().double()) * num_targets
            if not isfinite(loss.detach()):
                without_number.append(lengths[sequence])
            if gradients:
                added = gradients_of_loss(run, loss, num_targets / (run.world.size if is_summed else 1))
                summed = added if summed is None else [a + b for a, b in zip(summed, added)]
    if gradients and is_summed:
        summed = taken_gradients(run)
    return GradientResult(loss=total, gradients=summed or [], without_number=tuple(without_number))


def gradients_in_pack(
    run: PreparedModel,
    lengths: tuple[int, ...],
    group: Group | None,
    *,
    method: Method = Method.ULYSSES,
    offload: bool = False,
    gradients: bool = True,
    **options: Any,
) -> tuple[GradientResult | None, int]:
    """Loss and gradients of one pack that the ranks of ``group`` share, and the number of exchanges of this rank.

    (None, 0) on ranks outside of any group, unless they have a share of the gradients. ``options``: other fields of the
    shard.
    """
    is_summed = is_summed_over_ranks(run)
    result, num_made, total = [], 0, torch.zeros(1, dtype=torch.float64, device=run.world.device)
    with run.gathered(is_active=group is not None):
        if group is not None:
            pack = pad_to_degree(pack_of(run, lengths), group.size, run.collator)
            methods = (method,) * run.wrapped_model.structure.num_layers
            shard = shard_for(run, pack, group, methods=methods, **options)
            if offload and gradients:
                shard.offload = LayerOffload((True,) * len(methods), run.world.offload.micro_batch())
            with active(shard):
                made_before = shard.num_exchanges
                micro_batch = run.make(shard, pack)
                output = run.model(**micro_batch.inputs)
                if shard.has_failed:
                    raise torch.OutOfMemoryError("the model's forward ran out of memory")
                loss, num_targets = run.wrapped_model.loss_of(output, micro_batch), targets_of_loss(micro_batch)
                if run.wrapped_model.by_sequence is None:
                    check_not_bent(loss, model=type(run.model).__name__, micro_batch=micro_batch)
                if num_targets:
                    total += loss.detach().double() * num_targets
                if gradients:
                    num_groups = run.world.size // group.size if is_summed else 1
                    result = gradients_of_loss(run, loss, num_targets / num_groups, shard)
            num_made = shard.num_exchanges - made_before
            group.all_reduce(total, torch.distributed.ReduceOp.SUM)
    if is_summed and gradients:
        result = taken_gradients(run)
    elif group is not None:
        _sum_over(group, result)
    if group is None and run.gather is None:
        return None, 0
    return GradientResult(loss=None if group is None else float(total), gradients=result), num_made


def gradients_of_pack(run: PreparedModel, lengths: tuple[int, ...], **options: Any) -> GradientResult:
    """Loss and gradients of one pack that this rank computes alone."""
    result, _ = gradients_in_pack(run, lengths, run.alone, **options)
    assert result is not None, "this rank is in its own group"
    return result


def is_summed_over_ranks(run: PreparedModel) -> bool:
    """Whether backwards of all ranks are added up, and leave each its share of the gradient."""
    return run.gather is not None or isinstance(run.state, Fsdp2State)


def taken_gradients(run: PreparedModel) -> list[Tensor]:
    """This rank's share of the gradients that backwards of all ranks were added up in, which is cleared."""
    if run.gather is not None:
        return run.gather.take_gradient()
    assert isinstance(run.state, Fsdp2State)
    return [run.state.take_gradient()]


def gradients_of_loss(run: PreparedModel, loss: Tensor, weight: float, shard: PackShard | None = None) -> list[Tensor]:
    """Gradients of the mean loss times a weight, such as its number of targets, for every trained parameter.

    A rank without targets, or with sums over sequences, takes part in the backward of its ``shard`` with zeros.
    """
    terms = [LossTerm(value=loss, weight=weight)] if weight else []
    if shard is not None:
        shard.backward_begun = shard.num_exchanges
        shard = shard if not terms or shard.has_sums else None
    if is_summed_over_ranks(run):
        run.begin_backward()
        backward(terms, shard)
        return []
    parameters = list(run.wrapped_model.structure.parameters.values())
    computed = gradients(parameters, terms, shard)
    return [
        torch.zeros_like(parameter) if gradient is None else gradient
        for parameter, gradient in zip(parameters, computed)
    ]


SUMMED_AT_ONCE = 1 << 24
"""Numbers of gradients that are copied to be summed by one collective."""


def _sum_over(group: Group, gradients: list[Tensor]) -> None:
    """Sum gradients over the ranks of a group, in place."""
    if group.size == 1 or not gradients:
        return
    if sum(gradient.numel() for gradient in gradients) > SUMMED_AT_ONCE:
        for number, gradient in enumerate(gradients):
            gradients[number] = group.all_reduce(gradient.contiguous(), torch.distributed.ReduceOp.SUM)
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    group.all_reduce(flat, torch.distributed.ReduceOp.SUM)
    parts = flat.split([gradient.numel() for gradient in gradients])
    gradients[:] = [part.view(gradient.shape) for part, gradient in zip(parts, gradients)]
