"""Small models of every family that random plans can run, and batches and plans for them."""

import random
from dataclasses import replace

import torch

from lengthwise.core.batch import GlobalBatch, Pack
from lengthwise.core.plan import StepPlan
from lengthwise.core.specs import ModelSpec
from lengthwise.runtime.model.build import build_model
from lengthwise.runtime.model.targets import Masking
from lengthwise.runtime.train.feed import feed, masking_of
from tests.runtime.train.runs import SPEC, RandomTokens, random_batch, random_plan

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


def masking_for(spec: ModelSpec) -> Masking | None:
    return masking_of(spec, seed=5)


def gradients_on_one_device(spec: ModelSpec, batch: GlobalBatch) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the whole batch in one forward."""
    model = build_model(spec, dtype=torch.float64, seed=1)
    pack = Pack(ids=batch.ids, lengths=batch.lengths)
    fed = feed(source_of(batch), pack, torch.device("cpu"), masking=masking_for(spec))
    loss = model(fed.tokens_T, fed.cu_seqlens, fed.targets_T) / max(1, batch.num_targets)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
