"""What one rank computes, sends and holds in a planned step, by the closed forms: the right-hand side of a dry run."""

from collections import Counter
from dataclasses import dataclass, field, fields, replace

import numpy as np

from lengthwise.core.batch import num_targets
from lengthwise.core.layout import shard_size
from lengthwise.core.parameter_shapes import stage_unit_sizes
from lengthwise.core.planned_micro_batch import PlannedMicroBatch
from lengthwise.core.specs import ModelSpec
from lengthwise.core.step_plan import Pipeline, StepPlan
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.cost.analytic.grouped_heads import grouped_heads, has_groups
from lengthwise.cost.analytic.layer_bytes import ffn_forward_flops, has_tiles
from lengthwise.cost.analytic.second_forward import forward_without_attention
from lengthwise.cost.analytic.stage_memory import MemoryParts
from lengthwise.cost.analytic.volume import LayerPass, layer_volume
from lengthwise.cost.memory_model import gradient_bytes


@dataclass(kw_only=True)
class RankWork:
    """FLOPs, bytes sent within pipelines by kind of collective, and the peak of memory by kind."""

    matmul_flops: float = 0.0
    attention_flops: float = 0.0
    sent_bytes: Counter[str] = field(default_factory=Counter)
    """Of the collectives of layers, and of gradients that are reduced to shares; those of embedding and head, and what
    moves weights, left out."""
    peak: MemoryParts | None = None
    """None for a rank that computes nothing."""

    def add(self, volume: LayerPass, micro_batch: PlannedMicroBatch, model: ModelSpec, *, count: int) -> None:
        """Add a pass of a layer ``count`` times."""
        pack = micro_batch.pack
        lengths = np.diff(pack.cu_seqlens).astype(np.float64)
        self.matmul_flops += count * volume.matmul_flops * pack.num_tokens
        self.attention_flops += count * volume.attention_flops * float((lengths * model.reach(lengths)).sum())
        for sent, per in ((volume.tokens, pack.num_tokens), (volume.weights, 1)):
            for kind in fields(sent):
                if kind.name != "calls" and (num_bytes := getattr(sent, kind.name)):
                    self.sent_bytes[kind.name] += count * num_bytes * per


def rank_work(plan: StepPlan, rank: int, cost: AnalyticCost, *, is_prepared: bool = False) -> RankWork:
    """The work of ``rank`` in the step of ``plan``, of which every stage is priced as its busiest rank.

    ``is_prepared``: of a prepared model, whose groups of heads keep queries, keys and values.
    """
    work = RankWork()
    for pipeline in plan.pipelines:
        if rank in pipeline.ranks:
            stage = next(s for s in range(pipeline.scheme.num_stages) if rank in pipeline.ranks_of(s))
            for micro_batch in pipeline.micro_batches:
                _add(work, pipeline, micro_batch, stage, cost, is_prepared)
                parts = cost.stage_memory(pipeline.scheme_of(micro_batch), stage, num_devices=plan.num_devices).at(
                    micro_batch.pack.num_tokens
                )
                if work.peak is None or parts.total > work.peak.total:
                    work.peak = parts
    return work


def _add(
    work: RankWork,
    pipeline: Pipeline,
    micro_batch: PlannedMicroBatch,
    stage: int,
    cost: AnalyticCost,
    is_prepared: bool,
) -> None:
    scheme, model = pipeline.scheme_of(micro_batch), cost.model
    if scheme.shard_gradients:
        width = gradient_bytes(cost.dtype, is_narrow=cost.narrow_gradients)
        padded = sum(shard_size(size, scheme.degree) for size in stage_unit_sizes(model, scheme, stage))
        work.sent_bytes["reduce_scatter"] += padded * (scheme.degree - 1) * width
    for layer in scheme.layers_of_stage(stage):
        volume = layer_volume(model, scheme.methods[layer], degree=scheme.degree, dtype=cost.dtype)
        if has_groups(scheme, scheme.methods[layer]):
            groups = scheme.head_groups
            products = volume.backward.matmul_flops
            volume = grouped_heads(volume, model, degree=scheme.degree, dtype=cost.dtype, groups=groups).volume
            if is_prepared:
                volume = replace(volume, backward=replace(volume.backward, matmul_flops=products))
        work.add(volume.forward, micro_batch, model, count=1)
        if scheme.recompute[layer]:
            is_kept = scheme.keep_attention
            again = forward_without_attention(volume.forward, scheme.methods[layer]) if is_kept else volume.forward
            work.add(again, micro_batch, model, count=1)
        work.add(volume.backward, micro_batch, model, count=1)
        if has_tiles(scheme, scheme.methods[layer]) and not scheme.recompute[layer]:
            work.matmul_flops += ffn_forward_flops(model) / scheme.degree * micro_batch.pack.num_tokens
    if stage == scheme.num_stages - 1:
        targets = num_targets(micro_batch.pack.lengths, objective=model.objective)
        work.matmul_flops += 6.0 * model.hidden_size * model.vocab_size * targets / scheme.degree
