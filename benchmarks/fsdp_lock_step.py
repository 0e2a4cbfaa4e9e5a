"""verl's micro-batches under FSDP, whose ranks wait for one another in every micro-batch.

As github.com/verl-project/verl has it: actors train under FSDP with gradient checkpointing, and layers are sharded
again after their forward (trainer/config, commits 0db13434 and 01d4d766). So each layer's weights are gathered from all
ranks in the forward and again in the backward, and no rank is more than a layer or two ahead of another: a step takes
the sum over micro-batches of the rank that is slowest in each.

With dynamic batches, which are off by default, every rank has as many as the one that needs most, sorted by work, then
with the smaller ones at both ends (`rearrange_micro_batches`, commit 0db13434; called so by workers/engine/utils.py,
commit 05a1edd6). As that is the same order on all ranks, sorting alone gives the same sums.

What FSDP costs besides is left out: gathering weights and reducing gradients in every micro-batch. A step's update is
that of all sides, in which gradients are reduced once and weights gathered once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from balanced_dynamic_batches import DynamicBatches, recomputing

from lengthwise.core.pipeline_config import Method
from lengthwise.core.specs import ClusterSpec, ModelSpec
from lengthwise.cost.memory_model import DTYPE_BYTES, gradient_bytes, largest_unit
from lengthwise.plan.space.candidate import Candidate
from lengthwise.plan.space.draft_times import phase_times_s, step_times_s
from lengthwise.plan.space.problem import PlanningProblem, PricedBatch
from lengthwise.plan.space.search_space import SearchSpace

UNITS_AT_ONCE = 2
"""Layers whose weights and gradients are whole at one time: the one computed, and the one gathered ahead."""


DEFAULT_TOKENS = 16_384
"""Of `ppo_max_token_len_per_gpu` (trainer/config/actor/actor.yaml, commit 018f23b5): the limit of a GPU."""


@dataclass(frozen=True, kw_only=True)
class LockStepBatches(DynamicBatches):
    """Dynamic micro-batches of ranks that wait for the slowest in each."""

    def step_s(self, priced: PricedBatch) -> float:
        """Seconds of a step, its update included; infinite where it does not fit."""
        draft = self.draft(priced)
        if draft is None:
            return float("inf")
        _, _, update_s = step_times_s(priced, draft)
        return lock_step_s(phase_times_s(priced, draft.phases[0])) + update_s


def lock_step_s(times_s: Sequence[Sequence[float]]) -> float:
    """Seconds of ranks that compute micro-batches of ``times_s[rank]``, each beginning when all have ended the last."""
    return sum(max(of_one_number) for of_one_number in zip_longest(*times_s, fillvalue=0.0))


def with_sharded_state(cluster: ClusterSpec, model: ModelSpec, *, dtype: str) -> ClusterSpec:
    """The cluster with as much more memory as FSDP saves: whole weights and gradients, but for two units of them."""
    width = DTYPE_BYTES[dtype] + gradient_bytes(dtype)
    saved = model.num_params * (1 - 1 / cluster.num_devices) - UNITS_AT_ONCE * largest_unit(model)
    memory_bytes = cluster.device.memory_bytes + max(0, int(saved * width))
    return replace(cluster, device=replace(cluster.device, memory_bytes=memory_bytes))


def fsdp_search_space(model: ModelSpec) -> SearchSpace:
    """What verl shards a micro-batch by under FSDP: Ulysses of any degree."""
    return SearchSpace(head_layers=model.head_layers, methods=(Method.ULYSSES,), max_stages=1)


def checkpointing(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that recompute every layer whole, as transformers' gradient checkpointing does, and no other."""
    return [candidate for candidate in recomputing(candidates) if candidate.scheme.is_plain]


def default_limit(problem: PlanningProblem, candidate: Candidate) -> list[int]:
    """The default limit over the GPUs that share a micro-batch; none where the longest sequence exceeds it."""
    limit = DEFAULT_TOKENS * candidate.scheme.degree
    return [limit] if problem.max_length <= limit <= candidate.max_tokens else []
