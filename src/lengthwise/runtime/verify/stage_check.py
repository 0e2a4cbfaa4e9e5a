"""Check, before a pipeline of several stages runs, that its stages add up to the gradients of the whole model.

Every rank alone computes a pack with all layers, and then stage by stage, handing on hidden states and their gradients
as ranks would. What else passes between layers, such as a router's loss over all of them or a skip connection, makes
the two differ. Forwards of all stages come first, and are computed again for their backwards, so that no more than one
stage is kept: where weights are gathered by layer, a rank has those of one at a time, and those before all layers.
Backwards of stages are whole, or split as plans with a zero bubble have them.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from lengthwise.core.errors import CheckError, InputError, Setting
from lengthwise.runtime.loop.planned_pipelines import weights_of_layers
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.loop.synthetic_batches import LENGTHS, synthetic, whole_shard
from lengthwise.runtime.models.products import WeightGradients
from lengthwise.runtime.verify.float64_mode import noise_free
from lengthwise.runtime.verify.gradient_check import dtypes_of, tolerance_of, worst_difference
from lengthwise.runtime.verify.stock_call import (
    GradientResult,
    gradients_in_pack,
    is_summed_over_ranks,
    pack_of,
    taken_gradients,
)
from lengthwise.runtime.verify.verdict import NotInThisDtype, on_every_rank
from lengthwise.runtime.wrap.context import active
from lengthwise.runtime.wrap.stage_pass import StagedForward


def check_stages(run: PreparedModel, stage_layers: Sequence[int], splits: bool = False) -> None:
    """Compare the gradients of stages of ``stage_layers`` layers with those of the whole model; every rank calls this.

    ``splits``: whether all stages but the first split their backwards.

    Raises:
        CheckError: they differ by more than rounding.
        InputError: the model cannot be computed in stages at all, or no backward of its layers can be split.
    """
    dtypes = dtypes_of(run)
    for dtype in dtypes:
        try:
            with noise_free(run, dtype), synthetic(run, LENGTHS):
                comparison = partial(_compare, run, stage_layers, splits, dtype)
                on_every_rank(run, comparison, f"stages of {list(stage_layers)} layers")
            return
        except NotInThisDtype as error:
            if dtype == dtypes[-1]:
                raise error.reason from None


def _compare(run: PreparedModel, stage_layers: Sequence[int], splits: bool, dtype: torch.dtype | None) -> None:
    expected, _ = gradients_in_pack(run, LENGTHS, run.alone)
    assert expected is not None, "this rank is in its own group"
    tolerance = tolerance_of(dtype, run.state.compute_dtype)
    worst = worst_difference(run, _gradients_in_stages(run, stage_layers, splits), expected, tolerance)
    if worst.ratio > 1.0 and splits:
        unsplit = worst_difference(run, _gradients_in_stages(run, stage_layers, False), expected, tolerance)
        if unsplit.ratio <= 1.0:
            raise CheckError(
                f"{type(run.model).__name__} learns something else in stages of {list(stage_layers)} layers that split "
                f"their backwards than in one: {worst.name} differs by {worst.relative:.1e} (limit "
                f"{tolerance.relative:.0e}); plan with zero_bubble='none'"
            )
        worst = unsplit
    if worst.ratio > 1.0:
        raise CheckError(
            f"{type(run.model).__name__} learns something else in stages of {list(stage_layers)} layers than in one: "
            f"{worst.name} differs by {worst.relative:.1e} (limit {tolerance.relative:.0e}), so more than hidden "
            f"states passes between its layers; plan with one stage ({Setting.MAX_STAGES}=1)"
        )


def _gradients_in_stages(run: PreparedModel, stage_layers: Sequence[int], splits: bool) -> GradientResult:
    """Loss and gradients of a pack that goes through the stages one after another on this rank.

    Raises:
        InputError: backwards are to be split, and none can be.
    """
    used, is_summed = run.wrapped_model.used_units, is_summed_over_ranks(run)
    cuts = [range(first, end) for first, end in pairwise((0, *accumulate(stage_layers)))]
    received, totals, num_waiting = [torch.empty(0)], list[Tensor](), 0
    with run.pinned(weights_of_layers(range(0), used)):
        for layers in cuts[:-1]:
            with run.pinned(weights_of_layers(layers, used)), torch.no_grad():
                received.append(_forward(run, layers, received[-1])[1])
        loss, gradient = torch.zeros(()), torch.tensor(1 / run.world.size if is_summed else 1.0)
        for layers in reversed(cuts):
            with run.pinned(weights_of_layers(layers, used)):
                gradients = WeightGradients(is_open=False) if splits and layers.start else None
                stage, result = _forward(run, layers, received.pop(), gradients)
                loss = result.detach() if stage.is_last else loss
                with nullcontext() if gradients is None else gradients.opened():
                    added = _backward(run, stage, result, gradient.to(result).expand_as(result))
                num_waiting += 0 if gradients is None else _add_waiting(run, gradients, added)
                totals = added if not totals else [total + more for total, more in zip(totals, added)]
                gradient = gradient if stage.input is None else _gradient_of(stage.input)
    if splits and not num_waiting:
        raise InputError(
            f"no backward of {type(run.model).__name__} can be split: its layers multiply tokens by no trained weight; "
            "plan with zero_bubble='none'"
        )
    return GradientResult(loss=float(loss), gradients=taken_gradients(run) if is_summed else totals)


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


def _forward(
    run: PreparedModel, layers: range, received: Tensor, gradients: WeightGradients | None = None
) -> tuple[StagedForward, Tensor]:
    """The forward of a stage, and what it sends on: hidden states, or of the last one the sum of losses.

    ``gradients``: takes those of weights that its backward leaves for later; None: it leaves none.
    """
    pack = pack_of(run, LENGTHS)
    shard = whole_shard(run, pack)
    shard.weight_gradients = gradients
    stage = shard.stage_pass = StagedForward(
        layers=layers,
        num_layers=run.wrapped_model.structure.num_layers,
        receive=lambda like: received.view(like.shape).clone(),
    )
    with active(shard):
        micro_batch = run.make(shard, pack)
        output = run.model(**micro_batch.inputs)
        if shard.has_failed:
            raise torch.OutOfMemoryError("the model's forward ran out of memory")
        if stage.is_last:
            return stage, run.wrapped_model.loss_of(output, micro_batch) * micro_batch.num_targets
    assert stage.output is not None, "the forward ended after the stage"
    return stage, stage.output


def _backward(run: PreparedModel, stage: StagedForward, result: Tensor, gradient: Tensor) -> list[Tensor]:
    """The backward of a stage, which leaves its input a gradient; returns those of parameters that are not summed."""
    parameters = [] if run.gather is not None else list(run.wrapped_model.structure.parameters.values())
    if not result.requires_grad:
        return [torch.zeros_like(parameter) for parameter in parameters]
    if run.gather is not None:
        torch.autograd.backward(result, gradient)
        return []
    inputs = parameters if stage.input is None else [*parameters, stage.input]
    computed = torch.autograd.grad(result, inputs, gradient, allow_unused=True)
    if stage.input is not None:
        stage.input.grad = computed[-1]
    return [torch.zeros_like(x) if added is None else added for x, added in zip(parameters, computed)]


def _gradient_of(received: Tensor) -> Tensor:
    """The gradient of what a stage received; zeros if nothing depends on it."""
    return torch.zeros_like(received) if received.grad is None else received.grad
