"""Policies against each other by name: what ``lengthwise compare`` runs, for the tables."""

from lengthwise.core.pipeline_config import Method
from lengthwise.core.specs import model_preset
from lengthwise.plan.policies import POLICIES
from lengthwise.plan.space.search_space import SearchSpace
from lengthwise.plan.space.sharded_gradients import GradientSharding
from lengthwise.plan.space.sliced_packs import Slices
from lengthwise.plan.space.split_backwards import ZeroBubble
from lengthwise.report.pages.compare_results import ClusterResult
from lengthwise.session.compare_policies import ComparedCluster, PolicyComparison
from lengthwise.session.plan_lengths import TOKENS_PER_DEVICE
from lengthwise.session.planning_args import make_cluster, open_source

SEED = 0
METHODS = (
    Method.ULYSSES,
    Method.RING,
    Method.MEGATRON_TS,
    Method.MEGATRON_CZ,
    Method.ULYSSES_Z,
    Method.METP,
)
"""What the published systems use between them, so that each has its own."""


def play(
    model: str,
    lengths: str,
    *,
    gpus: int,
    steps: int,
    device: str = "H100-80GB",
    memory_gib: float | None = None,
    policies: tuple[str, ...] = tuple(POLICIES),
    tokens_per_device: float = TOKENS_PER_DEVICE,
) -> ClusterResult:
    """Every policy on the same steps of one corpus; nodes of 8 devices, schemes of every degree up to 8 stages.

    A step holds ``tokens_per_device`` a device, 3,125 unless given, or one sequence of the longest length.
    """
    comparison, entry = setting(
        model, lengths, gpus=gpus, steps=steps, device=device, memory_gib=memory_gib, policies=policies,
        tokens_per_device=tokens_per_device,
    )  # fmt: skip
    return comparison.run(entry, with_steps=False, on_step=lambda *_: None)


def setting(
    model: str,
    lengths: str,
    *,
    gpus: int,
    steps: int,
    device: str = "H100-80GB",
    memory_gib: float | None = None,
    policies: tuple[str, ...] = tuple(POLICIES),
    tokens_per_device: float = TOKENS_PER_DEVICE,
    search_space: SearchSpace | None = None,
) -> tuple[PolicyComparison, ComparedCluster]:
    """What :func:`play` runs, and on which cluster."""
    cluster, spec = make_cluster(device, gpus, devices_per_node=8, memory_gib=memory_gib), model_preset(model)
    index, slices = open_source(lengths, seed=SEED), Slices.AUTO if spec.causal else Slices.NONE
    comparison = PolicyComparison(
        model=spec,
        dtype="bfloat16",
        search_space=search_space
        or SearchSpace(
            methods=METHODS, shard_gradients=GradientSharding.AUTO, zero_bubble=ZeroBubble.AUTO, slices=slices
        ),
        policies=policies,
        lengths=index,
        num_steps=steps,
        seed=SEED,
    )
    budget = max(round(tokens_per_device * gpus), index.max_length)
    return comparison, comparison.enter(cluster, tokens_per_step=budget)
