"""Small models of every family that random plans can run, and batches and plans for them."""

import random
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.core.batch import GlobalBatch, Pack
from lengthwise.core.pass_order import PipelineSchedule
from lengthwise.core.specs import ModelSpec
from lengthwise.core.step_plan import StepPlan
from lengthwise.runtime.models.base import Transformer
from lengthwise.runtime.models.registry import build_model
from lengthwise.runtime.models.targets import TokenMasking
from lengthwise.runtime.state.sharded import ShardedState
from lengthwise.runtime.train.clock import StepClock
from lengthwise.runtime.train.execute_step import run_micro_batches
from lengthwise.runtime.train.micro_batch_tensors import feed, masking_of
from tests.runtime.train.runs import SETTINGS, RandomTokens, local_world, new_state
from tests.sim.random_plans import SPEC, random_batch, random_plan

EXACT = 1e-10
"""float64: sums in another order differ by rounding alone."""

BIASED = {"gated_ffn": False, "qkv_bias": True, "tied_embeddings": True, "max_positions": 64}
FAMILIES: dict[str, ModelSpec] = {
    "llama": SPEC,
    "tied llama": replace(SPEC, tied_embeddings=True, qkv_bias=True),
    "gpt": replace(SPEC, family="gpt", **BIASED),
    "bert": replace(SPEC, family="bert", causal=False, mask_token_id=36, **BIASED),
    "transformer-1d": replace(SPEC, family="transformer-1d", gated_ffn=False),
    "transformer-2d": replace(
        SPEC, family="transformer-2d", gated_ffn=False, causal=False, frame_size=4, mask_token_id=36
    ),
}


def random_case(spec: ModelSpec, seed: int, num_ranks: int) -> tuple[GlobalBatch, StepPlan]:
    """A batch of the model's objective and any plan for it."""
    rng = random.Random(seed)
    batch = replace(random_batch(rng, seed), objective=spec.objective)
    return batch, random_plan(rng, batch, num_ranks)


def source_of(batch: GlobalBatch) -> RandomTokens:
    return RandomTokens(dict(zip(batch.ids, batch.lengths)))


def masking_for(spec: ModelSpec) -> TokenMasking | None:
    return masking_of(spec, seed=5)


def gradients_on_one_device(spec: ModelSpec, batch: GlobalBatch) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the whole batch in one forward."""
    model = build_model(spec, dtype=torch.float64, seed=1)
    pack = Pack(ids=batch.ids, lengths=batch.lengths)
    fed = feed(source_of(batch), pack, torch.device("cpu"), masking=masking_for(spec))
    loss = model(fed.tokens_T, fed.cu_seqlens, fed.targets_T) / max(1, batch.num_targets)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def pushed_gradients(state: ShardedState) -> dict[str, torch.Tensor]:
    """What owners were pushed, from all ranks, by parameter."""
    whole = torch.zeros(state.table.num_elements, dtype=torch.float64)
    own = torch.cat([state.master[:0], *(segment.parameter.grad.flatten() for segment in state.owned.all)])
    at = 0
    for start, end in state.owned_layout.intervals[state.world.rank]:
        whole[start:end] = own[at : at + end - start]
        at += end - start
    dist.all_reduce(whole)
    return {name: whole[slice(*slot.interval)].view(slot.shape) for name, slot in state.table.slots.items()}


def run_plan(
    spec: ModelSpec,
    batch: GlobalBatch,
    plan: StepPlan,
    *,
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B,
    settings: OptimizerSettings = SETTINGS,
    prepare: Callable[[Transformer, ShardedState], None] = lambda model, state: None,
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of a plan on the ranks of a pool, from a fresh model in float64."""
    world = local_world()
    model, state = new_state(world, torch.float64, spec=spec, settings=settings)
    prepare(model, state)
    loss = run_micro_batches(
        plan, model, state, source_of(batch), clock=StepClock(world), masking=masking_for(spec), schedule=schedule
    )
    dist.all_reduce(loss)
    return loss.item(), pushed_gradients(state)


def assert_as_on_one_device(spec: ModelSpec, batch: GlobalBatch, found: tuple[float, dict[str, torch.Tensor]]) -> None:
    """``found`` is what :func:`gradients_on_one_device` gives."""
    (expected_loss, expected), (loss, gradients) = gradients_on_one_device(spec, batch), found
    assert abs(loss - expected_loss) <= EXACT * max(1.0, abs(expected_loss)), (loss, expected_loss)
    for name, gradient in gradients.items():
        wanted = expected.get(name, torch.zeros_like(gradient))
        torch.testing.assert_close(gradient, wanted, rtol=EXACT, atol=EXACT, msg=f"gradient of {name}")
