"""Plans of the first steps of a configured run, without running it; needs no torch."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from lengthwise.config.run_config import Config
from lengthwise.core.cost import CostModel
from lengthwise.core.pipeline_config import PipelineConfig
from lengthwise.core.step_plan import StepPlan
from lengthwise.cost.profiled.fitted import FittedCost
from lengthwise.data.corpus import open_corpus
from lengthwise.session.console import progress, stderr
from lengthwise.session.planning import (
    batch_stream,
    make_cost,
    make_planner,
    make_sampler,
    resolve_cluster,
    with_draws,
    with_steps,
)
from lengthwise.session.state_placement import with_planned_state
from lengthwise.session.trained_model import resolve_model

DEFAULT_STEPS = 10
QUANTILES = {"least": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "most": 1.0}
"""Columns of a summary, and how many of the steps are below."""


def plan_steps(
    config: Config,
    steps: int | None,
    *,
    on_cost: Callable[[CostModel], None] = lambda cost: None,
    on_state: Callable[[Config], None] = lambda config: None,
) -> Iterator[StepPlan]:
    """Plan the run's first ``steps`` steps, or all of them, one after another; ``on_cost`` hears what prices them.

    ``on_state`` hears the configuration with the place of the optimizer's state.

    Raises:
        InfeasibleError: before the first plan, if some sequence of the corpus fits nowhere.
    """
    corpus = open_corpus(config.data)
    spec, cluster = resolve_model(config, corpus, only_priced=True), resolve_cluster(config)
    if spec.unpriced:
        stderr().print(f"not priced in {spec.name}: {spec.unpriced}", soft_wrap=True)
    cost = make_cost(config, spec, cluster)
    on_cost(cost)
    made = make_planner(config, cost, spec=spec, cluster=cluster, corpus=corpus)
    on_state(with_planned_state(config, made.problem))
    planner, stream = with_draws(config, made), batch_stream(config, corpus, made.problem)
    steps = steps or with_steps(config, make_sampler(config, corpus)).train.num_steps
    with progress() as bar:
        for _ in bar.track(range(steps), description="plan"):
            yield planner(next(stream))


def beyond_profile(plans: Sequence[StepPlan], cost: CostModel) -> dict[str, Any] | None:
    """The micro-batch of ``plans`` that is farthest beyond what the profile measured, and how sure its seconds are.

    None: costs are not of a profile, or it measured sequences as long.
    """
    if not isinstance(cost, FittedCost):
        return None
    farthest: tuple[float, PipelineConfig, tuple[int, ...]] | None = None
    for plan in plans:
        for pipeline in plan.pipelines:
            for micro_batch in pipeline.micro_batches:
                scheme, lengths = pipeline.scheme_of(micro_batch), micro_batch.pack.lengths
                share = max(lengths) / cost.longest(scheme)
                if share > 1 and (farthest is None or share > farthest[0]):
                    farthest = share, scheme, lengths
    if farthest is None:
        return None
    _, scheme, lengths = farthest
    low_s, high_s = cost.time_range_s(lengths, scheme)
    return {
        "scheme": scheme.name, "longest": max(lengths), "longest_measured": cost.longest(scheme),
        "time_s": cost.time_s(lengths, scheme), "low_s": low_s, "high_s": high_s,
    }  # fmt: skip


def summarize_plans(plans: Sequence[StepPlan]) -> dict[str, Any]:
    """Quantiles of predicted step time and gap over the steps, and the schemes used, those with most tokens first."""
    tokens: Counter[str] = Counter()
    steps: Counter[str] = Counter()
    for plan in plans:
        for pipeline in plan.pipelines:
            num_tokens = sum(sum(micro_batch.pack.lengths) for micro_batch in pipeline.micro_batches)
            tokens[pipeline.scheme.name] += num_tokens
        steps.update({pipeline.scheme.name for pipeline in plan.pipelines if pipeline.micro_batches})
    total = tokens.total()

    def quantiles(values: Sequence[float]) -> dict[str, float]:
        return {name: float(np.quantile(values, share)) for name, share in QUANTILES.items()}

    return {
        "policy": plans[0].policy,
        "num_steps": len(plans),
        "num_devices": plans[0].num_devices,
        "tokens_per_step": total / len(plans),
        "step_time_s": quantiles([plan.time_s for plan in plans]),
        "gap": quantiles([plan.gap for plan in plans]),
        "schemes": {
            name: {"token_share": number / total, "num_steps": steps[name]}
            for name, number in tokens.most_common()
            if number
        },
    }
