"""Plans of the first steps of a configured run, without running it; needs no torch."""

from collections.abc import Iterator

from lengthwise.config.run_config import Config
from lengthwise.core.step_plan import StepPlan
from lengthwise.data.corpus import open_corpus
from lengthwise.session.console import progress, stderr
from lengthwise.session.planning import (
    make_cost,
    make_planner,
    make_sampler,
    resolve_cluster,
    resolve_model,
    with_draws,
    with_steps,
)

DEFAULT_STEPS = 10


def plan_steps(config: Config, steps: int | None) -> Iterator[StepPlan]:
    """Plan the run's first ``steps`` steps, or all of them, one after another.

    Raises:
        InfeasibleError: before the first plan, if some sequence of the corpus fits nowhere.
    """
    corpus = open_corpus(config.data)
    spec, cluster = resolve_model(config, corpus, only_priced=True), resolve_cluster(config)
    if spec.unpriced:
        stderr().print(f"not priced in {spec.name}: {spec.unpriced}", soft_wrap=True)
    cost = make_cost(config, spec, cluster)
    planner = with_draws(config, make_planner(config, cost, spec=spec, cluster=cluster, corpus=corpus))
    sampler = make_sampler(config, corpus)
    steps = steps or with_steps(config, sampler).train.num_steps
    with progress() as bar:
        for _ in bar.track(range(steps), description="plan"):
            yield planner(next(sampler))
