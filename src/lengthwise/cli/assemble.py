"""From a configuration to the parts of a run that need no torch: sampler, model spec, costs, planner."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np

from lengthwise.config import Config
from lengthwise.core.cost import CostModel, ProfileTable
from lengthwise.core.errors import InputError
from lengthwise.core.lengths import LengthIndex
from lengthwise.core.specs import ClusterSpec, ModelSpec, cluster_preset, model_preset
from lengthwise.cost.analytic import AnalyticCost
from lengthwise.cost.fitted import FittedCost
from lengthwise.data.corpus import Corpus
from lengthwise.data.sampler import Sampler
from lengthwise.plan.planner import Planner
from lengthwise.plan.pool import NUM_SAMPLES, SAMPLES_SEED, Pool, Recompute, make_problem
from lengthwise.plan.solve.shop import Objective

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
    """Fitted to or learned from ``plan.profile`` where there is one, else analytic.

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
    if config.plan.recompute not in ("auto", measured := "all" if table.recompute else "none"):
        raise InputError(
            f"{config.plan.profile} was measured with plan.recompute={measured}, the run has "
            f"plan.recompute={config.plan.recompute}; profile again with the run's setting"
        )
    if config.plan.cost == "hybrid":
        from lengthwise.cost.hybrid import HybridCost

        return HybridCost(table, model=spec, cluster=cluster)
    return FittedCost(table, model=spec, cluster=cluster)


def make_planner(
    config: Config, cost: CostModel, *, spec: ModelSpec, cluster: ClusterSpec, lengths: LengthIndex
) -> Planner:
    """The planner of the configured policy for a corpus.

    Raises:
        InfeasibleError: not even the model's state fits a device, or some sequence fits under no scheme.
    """
    plan = config.plan
    pool = Pool(max_degree=plan.max_degree, max_stages=plan.max_stages, recompute=Recompute(plan.recompute))
    problem = make_problem(
        cost,
        cluster=cluster,
        num_layers=spec.num_layers,
        max_length=lengths.max_length,
        pool=pool,
        samples=_samples(config, lengths),
        token_limit=plan.max_tokens,
    )
    problem.check_fits(lengths.lengths)
    problem = replace(problem, batch_size=plan.batch_size, objective=Objective(plan.objective))
    return Planner(policy=plan.policy, problem=problem)


def _samples(config: Config, lengths: LengthIndex) -> list[np.ndarray]:
    """Lengths of typical batches, drawn with another seed than those of the run."""
    stream = make_sampler(config.model_copy(update={"seed": config.seed ^ SAMPLES_SEED}), lengths)
    return [np.array(batch.lengths, dtype=np.int64) for batch in islice(stream, NUM_SAMPLES)]
