"""What would a step cost on eight GPUs? Lengths in, plans out; no torch, no GPU.

python examples/01_plan_on_a_laptop.py
"""

import numpy as np

from lengthwise.core.lengths import LengthIndex
from lengthwise.core.specs import cluster_preset, model_preset
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.data.sampler import Sampler
from lengthwise.plan.planner import Planner
from lengthwise.plan.policies import POLICIES
from lengthwise.plan.space.search_space import RecomputeMode, SearchSpace, make_problem, sample_lengths
from lengthwise.sim.engine import simulate

# A long-tailed corpus: half of the sequences below 700 tokens, the longest twenty times that and more.
lengths = np.minimum(np.random.default_rng(0).lognormal(6.5, 1.2, 20_000).astype(np.int64) + 2, 16_384)
corpus = LengthIndex(lengths=lengths)
model, cluster = model_preset("llama-7b"), cluster_preset("1x8xH200-141GB")
cost = AnalyticCost(model=model, cluster=cluster)

search_space = SearchSpace(max_stages=1, recompute=RecomputeMode.ALL)
problem = make_problem(
    cost,
    cluster=cluster,
    num_layers=model.num_layers,
    max_length=corpus.max_length,
    search_space=search_space,
    samples=sample_lengths(corpus, tokens_per_step=400_000, seed=0),
)

for policy in POLICIES:
    planner = Planner(policy=policy, problem=problem)
    sampler = Sampler(corpus, seed=0, tokens_per_step=400_000)
    plans = [planner(next(sampler)) for _ in range(10)]
    timelines = [simulate(plan) for plan in plans]
    seconds = sum(timeline.step_time_s for timeline in timelines)
    tokens = sum(plan.num_computed_tokens * (1 - plan.padding_fraction) for plan in plans)
    gap = max(plan.gap for plan in plans)
    print(f"{policy:9} {tokens / seconds:9,.0f} tokens/s, at most {gap:.1%} above the proven bound")
