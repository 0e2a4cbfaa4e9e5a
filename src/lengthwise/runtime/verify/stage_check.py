"""Check, before a pipeline of several stages runs, that its stages add up to the gradients of the whole model.

One rank alone computes a pack with all layers, and then stage by stage, handing on hidden states and their gradients as
ranks would. What else passes between layers, such as a router's loss over all of them or a skip connection, makes the
two differ.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from lengthwise.core.errors import CheckError, Setting
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.loop.synthetic_batches import LENGTHS, synthetic, whole_shard
from lengthwise.runtime.verify.float64_mode import noise_free
from lengthwise.runtime.verify.gradient_check import dtypes_of, tolerance_of, worst_difference
from lengthwise.runtime.verify.stock_call import GradientResult, gradients_in_pack, pack_of
from lengthwise.runtime.verify.verdict import NotInThisDtype, on_every_rank
from lengthwise.runtime.wrap.context import active
from lengthwise.runtime.wrap.stage_pass import StagedForward


def check_stages(run: PreparedModel, stage_layers: Sequence[int]) -> None:
    """Compare the gradients of stages of ``stage_layers`` layers with those of the whole model; every rank calls this.

    Raises:
        CheckError: they differ by more than rounding.
        InputError: the model cannot be computed in stages at all.
    """
    dtypes = dtypes_of(run)
    for dtype in dtypes:
        try:
            with noise_free(run, dtype), synthetic(run, LENGTHS):
                on_every_rank(
                    run, partial(_compare, run, stage_layers, dtype), f"stages of {list(stage_layers)} layers"
                )
            return
        except NotInThisDtype as error:
            if dtype == dtypes[-1]:
                raise error.reason from None


def _compare(run: PreparedModel, stage_layers: Sequence[int], dtype: torch.dtype | None) -> None:
    expected, _ = gradients_in_pack(run, LENGTHS, run.alone)
    assert expected is not None, "this rank is in its own group"
    tolerance = tolerance_of(dtype, run.state.compute_dtype)
    worst = worst_difference(run, _gradients_in_stages(run, stage_layers), expected, tolerance)
    if worst.ratio > 1.0:
        raise CheckError(
            f"{type(run.model).__name__} learns something else in stages of {list(stage_layers)} layers than in one: "
            f"{worst.name} differs by {worst.relative:.1e} (limit {tolerance.relative:.0e}), so more than hidden "
            f"states passes between its layers; plan with one stage ({Setting.MAX_STAGES}=1)"
        )


def _gradients_in_stages(run: PreparedModel, stage_layers: Sequence[int]) -> GradientResult:
    """Loss and gradients of a pack that goes through the stages one after another on this rank."""
    pack, parameters = pack_of(run, LENGTHS), list(run.wrapped_model.structure.parameters.values())
    passes, sent, loss = list[tuple[StagedForward, Tensor]](), torch.empty(0), torch.empty(0)
    for first, end in pairwise((0, *accumulate(stage_layers))):
        shard, received = whole_shard(run, pack), sent
        stage = shard.stage_pass = StagedForward(
            layers=range(first, end), num_layers=sum(stage_layers),
            receive=lambda like, received=received: received.clone(),  # type: ignore[misc]
        )  # fmt: skip
        with active(shard):
            micro_batch = run.make(shard, pack)
            output = run.model(**micro_batch.inputs)
            if shard.has_failed:
                raise torch.OutOfMemoryError("the model's forward ran out of memory")
            if stage.is_last:
                loss = run.wrapped_model.loss_of(output, micro_batch) * micro_batch.num_targets
        result = loss if stage.output is None else stage.output
        passes.append((stage, result))
        sent = result.detach()
    totals = [torch.zeros_like(parameter) for parameter in parameters]
    gradient: Tensor | None = torch.ones_like(loss)
    for stage, result in reversed(passes):
        inputs = parameters if stage.input is None else [*parameters, stage.input]
        if result.requires_grad and gradient is not None:
            computed = torch.autograd.grad(result, inputs, gradient, allow_unused=True)
            totals = [total if added is None else total + added for total, added in zip(totals, computed)]
            gradient = computed[-1] if stage.input is not None else None
    return GradientResult(loss=float(loss.detach()), gradients=totals)
