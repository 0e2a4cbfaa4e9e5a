"""Check, before a pipeline of several stages or slices runs, that they add up to the gradients of the whole model.

Every rank alone computes a pack with all layers, and then stage by stage, handing on hidden states and their gradients
as ranks would. What else passes between layers, such as a router's loss over all of them or a skip connection, makes
the two differ. Forwards of all stages come first, and are computed again for their backwards, so that no more than one
stage is kept: where weights are gathered by layer, a rank has those of one at a time, and those before all layers.
What the last stage gives a loop beside the loss is compared, too.
Backwards of stages are whole, or split as plans with a zero bubble have them. Where plans cut micro-batches into
slices, every stage computes the slices of the pack in order, and their backwards in reverse.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from lengthwise.core.errors import CheckError, InputError, Setting, first_line
from lengthwise.runtime.loop.planned_pipelines import weights_of_layers
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.loop.synthetic_batches import traced_lengths, varied, whole_shard
from lengthwise.runtime.models.products import WeightGradients
from lengthwise.runtime.parallel.slice_attention import PackSlices
from lengthwise.runtime.verify.precision import Tolerance, compare_precisely
from lengthwise.runtime.verify.stage_values import ForwardValues, check_last_stage, values_of_forward
from lengthwise.runtime.verify.stock_call import (
    GradientResult,
    gradients_of_pack,
    is_summed_over_ranks,
    pack_of,
    taken_gradients,
)
from lengthwise.runtime.verify.verdict import on_every_rank
from lengthwise.runtime.verify.worst_difference import worst_difference
from lengthwise.runtime.verify.zero_weights import Fill, finite
from lengthwise.runtime.wrap.context import active
from lengthwise.runtime.wrap.loss_backward import Roots
from lengthwise.runtime.wrap.made_labels import targets_of_loss
from lengthwise.runtime.wrap.stage_pass import StagedForward

Cuts = tuple[range | None, ...]
"""Tokens of each slice of a pack; None: all of it."""


def cuts_of(first: int, second: int) -> Cuts:
    """Slices of a pack of two: one token, the end of a sequence and the next one's beginning, and no target at all."""
    inner, total = first * 4 // 11, first + second
    bounds = sorted({0, inner, inner + 1, first + max(1, second * 2 // 7), total - 1, total})
    return tuple(range(start, end) for start, end in pairwise(bounds))


def check_stages(run: PreparedModel, stage_layers: Sequence[int], splits: bool = False, slices: bool = False) -> None:
    """Compare the gradients of stages of ``stage_layers`` layers with those of the whole model; every rank calls this.

    ``splits``: whether all stages but the first split their backwards. ``slices``: whether the pack is cut into slices.

    Raises:
        CheckError: they differ by more than rounding.
        InputError: the model cannot be computed in stages at all, or no backward of its layers can be split.
    """
    if slices and len(stage_layers) > 1 and not run.is_cuttable:
        check_stages(run, stage_layers)
    lengths = traced_lengths(run.collator)
    cuts: Cuts = cuts_of(*lengths) if slices else (None,)
    what = f"stages of {list(stage_layers)} layers{' in slices' if slices else ''}"

    def compare(tolerance: Tolerance, fill: Fill) -> None:
        with varied(run, lengths):
            values = ForwardValues()
            with values_of_forward(run.model, values):
                expected = on_every_rank(run, partial(finite, partial(gradients_of_pack, run, lengths), fill), what)
            on_every_rank(run, partial(_compare, run, stage_layers, splits, cuts, expected, values, tolerance), what)

    compare_precisely(run, compare)


def _compare(
    run: PreparedModel,
    stage_layers: Sequence[int],
    splits: bool,
    cuts: Cuts,
    expected: GradientResult,
    whole: ForwardValues,
    tolerance: Tolerance,
) -> None:
    last = ForwardValues()
    with _failures_explained(run, stage_layers):
        in_stages = _gradients_in_stages(run, stage_layers, splits, cuts, last)
    worst = worst_difference(run, in_stages, expected, tolerance)
    if worst.ratio > 1.0 and (splits or len(cuts) > 1):
        unlike = worst_difference(run, _gradients_in_stages(run, stage_layers), expected, tolerance)
        if unlike.ratio <= 1.0:
            otherwise, setting = (
                ("that split their backwards than in one", "zero_bubble='none'")
                if splits
                else ("whose micro-batches are cut into slices than from whole ones", f"{Setting.SLICES}=none")
            )
            raise CheckError(
                f"{type(run.model).__name__} learns something else in stages of {list(stage_layers)} layers "
                f"{otherwise}: {worst.name} differs by {worst.relative:.1e} (limit {tolerance.relative:.0e}); plan "
                f"with {setting}"
            )
        worst = unlike
    if worst.ratio > 1.0:
        raise CheckError(
            f"{type(run.model).__name__} learns something else in stages of {list(stage_layers)} layers than in one: "
            f"{worst.name} differs by {worst.relative:.1e} (limit {tolerance.relative:.0e}), so more than hidden "
            f"states passes between its layers; plan with one stage ({Setting.MAX_STAGES}=1)"
        )
    if len(cuts) == 1:
        check_last_stage(run.model, last, whole, tolerance.relative)


@contextmanager
def _failures_explained(run: PreparedModel, stage_layers: Sequence[int]) -> Iterator[None]:
    """Within, what a model's code raises becomes a ``CheckError`` with the reason: in one stage it had just computed.

    A later stage does not compute the layers before it, which may leave more than hidden states, such as shared keys.
    """
    try:
        yield
    except (LookupError, AttributeError, TypeError) as error:
        raise CheckError(
            f"{type(run.model).__name__} fails where plans compute it otherwise than its user, in stages of "
            f"{list(stage_layers)} layers ({type(error).__name__}: {first_line(error)}), as it does not in one, so "
            f"more than hidden states passes between its layers; plan with one stage ({Setting.MAX_STAGES}=1)"
        ) from error


def _gradients_in_stages(
    run: PreparedModel,
    stage_layers: Sequence[int],
    splits: bool = False,
    cuts: Cuts = (None,),
    last: ForwardValues | None = None,
) -> GradientResult:
    """Loss and gradients of a pack that goes through the stages one after another on this rank.

    ``last``: gets what the forward of the last stage gives beside them.

    Raises:
        InputError: backwards are to be split, and none can be.
    """
    used, is_summed = run.wrapped_model.used_units, is_summed_over_ranks(run)
    stages = [range(first, end) for first, end in pairwise((0, *accumulate(stage_layers)))]
    received, totals, num_waiting = [[torch.empty(0)] * len(cuts)], list[Tensor](), 0
    with run.pinned(weights_of_layers(range(0), used)):
        for layers in stages[:-1]:
            with run.pinned(weights_of_layers(layers, used)), torch.no_grad():
                received.append([sent.result for sent in _forwards(run, layers, received[-1], cuts, None)])
        loss, gradients = 0.0, [torch.tensor(1 / run.world.size if is_summed else 1.0)] * len(cuts)
        for layers in reversed(stages):
            with run.pinned(weights_of_layers(layers, used)):
                later = WeightGradients(is_open=False) if splits and layers.start else None
                seen = last if layers is stages[-1] else None
                with nullcontext() if seen is None else values_of_forward(run.model, seen):
                    computed = list(_forwards(run, layers, received.pop(), cuts, later))
                loss += sum(float(part.result.detach()) for part in computed if part.stage.is_last)
                for number in reversed(range(len(cuts))):
                    with nullcontext() if later is None else later.opened():
                        added = _backward(run, computed[number], gradients[number])
                    num_waiting += 0 if later is None else _add_waiting(run, later, added)
                    totals = added if not totals else [total + more for total, more in zip(totals, added)]
                gradients = [_gradient_of(part.stage.input) for part in computed if part.stage.input is not None]
    if splits and not num_waiting:
        raise InputError(
            f"no backward of {type(run.model).__name__} can be split: its layers multiply tokens by no trained weight; "
            "plan with zero_bubble='none'"
        )
    return GradientResult(loss=loss, gradients=taken_gradients(run) if is_summed else totals)


def _add_waiting(run: PreparedModel, gradients: WeightGradients, added: list[Tensor]) -> int:
    """Add the gradients of weights that a backward left for later to those it gave; returns how many there were."""
    if run.gather is not None:
        count = sum(1 for _ in gradients.kept())
        gradients.compute(lambda unit: None)
        return count
    places = {id(parameter): n for n, parameter in enumerate(run.wrapped_model.structure.parameters.values())}
    count = 0
    for _, weight, gradient in gradients.taken():
        added[places[id(weight)]] = added[places[id(weight)]] + gradient
        count += 1
    return count


@dataclass(frozen=True, kw_only=True, eq=False)
class _StageResult:
    """What a stage made of the pack, or of one slice of it."""

    stage: StagedForward
    result: Tensor
    """The hidden states that it sends on, or of the last stage the sum of losses."""
    roots: Roots
    """Where the backward of a last stage begins that has no targets, with zeros."""


def _forwards(
    run: PreparedModel, layers: range, received: Sequence[Tensor], cuts: Cuts, gradients: WeightGradients | None
) -> Iterator[_StageResult]:
    """The forwards of a stage, of one slice after another.

    ``gradients``: takes those of weights that its backward leaves for later; None: it leaves none.
    """
    pack = pack_of(run, traced_lengths(run.collator))
    slices = PackSlices(run.collator.cu_seqlens(pack))
    for sent, tokens in zip(received, cuts):
        shard = whole_shard(run, pack)
        shard.weight_gradients, shard.part = gradients, None if tokens is None else slices.slice(tokens)
        stage = shard.stage_pass = StagedForward(
            layers=layers,
            num_layers=run.wrapped_model.structure.num_layers,
            receive=partial(_as_received, sent),
        )
        with active(shard):
            micro_batch = run.make(shard, pack)
            output = run.model(**micro_batch.inputs)
            if shard.has_failed:
                raise torch.OutOfMemoryError("the model's forward ran out of memory")
            result = stage.output
            if stage.is_last:
                count = targets_of_loss(micro_batch)
                result = run.wrapped_model.loss_of(output, micro_batch) * count if count else torch.zeros(())
        assert result is not None, "the forward ended after the stage"
        roots = tuple(root for forward in shard.passes for root in forward.roots)
        yield _StageResult(stage=stage, result=result, roots=() if result.requires_grad else roots)


def _as_received(sent: Tensor, like: Tensor) -> Tensor:
    return sent.view(like.shape).clone()


def _backward(run: PreparedModel, computed: _StageResult, gradient: Tensor) -> list[Tensor]:
    """The backward of a stage, which leaves its input a gradient; returns those of parameters that are not summed."""
    stage, result = computed.stage, computed.result
    parameters = [] if run.gather is not None else list(run.wrapped_model.structure.parameters.values())
    begins: list[Any] = [edge for edge, _ in computed.roots]
    weights = [zeros for _, zeros in computed.roots]
    if result.requires_grad:
        begins, weights = [result], [gradient.to(result).expand_as(result)]
    if not begins:
        return [torch.zeros_like(parameter) for parameter in parameters]
    if run.gather is not None:
        torch.autograd.backward(begins, weights)
        return []
    inputs = parameters if stage.input is None else [*parameters, stage.input]
    added = torch.autograd.grad(begins, inputs, weights, allow_unused=True)
    if stage.input is not None:
        stage.input.grad = added[-1]
    return [torch.zeros_like(x) if part is None else part for x, part in zip(parameters, added)]


def _gradient_of(received: Tensor) -> Tensor:
    """The gradient of what a stage received; zeros if nothing depends on it."""
    return torch.zeros_like(received) if received.grad is None else received.grad
