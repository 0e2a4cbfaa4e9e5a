"""From a configuration to the parts of a run that need no torch: sampler, model spec, costs, planner."""

from dataclasses import replace
from pathlib import Path

from lengthwise.config import Config
from lengthwise.core.cost import CostModel, ProfileTable
from lengthwise.core.errors import InputError
from lengthwise.core.lengths import LengthIndex
from lengthwise.core.scheme import dense_scheme
from lengthwise.core.specs import ClusterSpec, ModelSpec, cluster_preset, model_preset
from lengthwise.cost.analytic import AnalyticCost
from lengthwise.cost.fitted import FittedCost
from lengthwise.data.corpus import Corpus
from lengthwise.data.sampler import Sampler
from lengthwise.plan.planner import Planner
from lengthwise.plan.policies import find_policy

DEFAULT_TOKENS_PER_STEP = 65_536


def make_sampler(config: Config, lengths: LengthIndex) -> Sampler:
    """The stream of global batches; a token budget of 64K where neither budget is set."""
    data = config.data
    tokens = data.tokens_per_step
    if tokens is None and data.sequences_per_step is None:
        tokens = DEFAULT_TOKENS_PER_STEP
    return Sampler(
        lengths,
        seed=config.seed,
        tokens_per_step=tokens,
        sequences_per_step=data.sequences_per_step,
        shuffle=data.shuffle,
    )


def resolve_model(config: Config, corpus: Corpus | None) -> ModelSpec:
    """The model's sizes; a preset's vocabulary becomes what the index needs, rounded up to a multiple of 64.

    Raises:
        InputError: the model embeds fewer token ids than the index has.
    """
    model = config.model
    needed = corpus.vocab_size if corpus is not None and corpus.store.has_tokens else None
    if model.hf:
        from lengthwise.runtime.model.hf_config import read_spec

        spec = read_spec(Path(model.hf))
    else:
        spec = model_preset(model.preset)
        wanted = model.vocab_size or (needed and -(-needed // 64) * 64)
        spec = replace(spec, vocab_size=wanted) if wanted else spec
    if needed and spec.vocab_size < needed:
        raise InputError(
            f"the index has {needed:,} token ids, model {spec.name} embeds {spec.vocab_size:,}; "
            "index with the model's own tokenizer.json or raise model.vocab_size"
        )
    return spec


def resolve_cluster(config: Config) -> ClusterSpec:
    """The cluster that the configuration names.

    Raises:
        InputError: it names none.
    """
    if not config.cluster.name:
        raise InputError("cluster.name is not set; name the devices to plan for, such as 1x8xH100-80GB or 2xcpu")
    return cluster_preset(config.cluster.name, memory_gib=config.cluster.memory_gib)


def make_cost(config: Config, spec: ModelSpec, cluster: ClusterSpec) -> CostModel:
    """Fitted to ``plan.profile`` where there is one, else analytic.

    Raises:
        InputError: the profile is of another model, dtype or recompute setting.
    """
    if not config.plan.profile:
        return AnalyticCost(model=spec, cluster=cluster, dtype=config.train.dtype)
    table = ProfileTable.load(Path(config.plan.profile))
    if table.dtype != config.train.dtype:
        raise InputError(
            f"{config.plan.profile} was measured in {table.dtype}, the run computes in {config.train.dtype}; "
            "profile again with the run's train.dtype"
        )
    return FittedCost(table, model=spec, cluster=cluster)


def make_planner(config: Config, cost: CostModel, *, spec: ModelSpec, cluster: ClusterSpec, longest: int) -> Planner:
    """The planner of the configured policy, one dense pipeline per device of ``cluster``."""
    return Planner(
        policy=config.plan.policy,
        arrange=find_policy(config.plan.policy),
        cost=cost,
        scheme=dense_scheme(spec.num_layers, recompute=config.plan.recompute),
        num_devices=cluster.num_devices,
        memory_bytes=cluster.device.memory_bytes,
        max_length=longest,
        token_limit=config.plan.max_tokens,
        batch_size=config.plan.batch_size,
    )
