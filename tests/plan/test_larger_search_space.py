"""A larger search space holds what a smaller one holds, and searches that find less in it find hardly less."""

from dataclasses import replace

import numpy as np
import pytest

from lengthwise.core.batch import GlobalBatch
from lengthwise.core.errors import InfeasibleError
from lengthwise.core.pipeline_config import Method
from lengthwise.core.specs import cluster_preset, model_preset
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.plan.heterogeneous.adaptive_pipelines import undominated
from lengthwise.plan.planner import Planner
from lengthwise.plan.space.memory_ladder import OffloadMode
from lengthwise.plan.space.search_space import RecomputeMode, SearchSpace, make_problem

METHODS = (Method.ULYSSES, Method.RING, Method.MEGATRON_TS)
EVERYTHING = SearchSpace(methods=METHODS)
SAME = 1 + 1e-9
"""Rounding of sums."""
HARDLY_SLOWER = 1.01
"""Searches of strategies are no proof: docs/concepts/planning.md says how many plans become slower, and by how much."""
MODELS = ("transformer-2d-1.2b", "llama-7b", "llama-3-8b", "llama-13b", "llama-32b", "llama-66b")
CLUSTERS = ("1x1", "1x4", "1x8", "2x1", "3x1", "2x4", "2x8", "4x1", "8x1", "4x4", "5x4", "3x8", "16x1", "8x8", "64x1")
CORPORA = ("lognormal", "pareto", "two-humped", "equal", "uniform", "long")
FIRST_SEED, SETTINGS = 5000, 32


def lengths_of(corpus, rng, *, tokens, longest):
    """Lengths of a step."""
    count = max(8, tokens // 100)
    drawn = {
        "lognormal": lambda: np.exp(rng.normal(np.log(500), 1.2, count)),
        "pareto": lambda: 300 * (1 + rng.pareto(1.2, count)),
        "two-humped": lambda: np.where(
            rng.random(count) < 0.05, longest * rng.uniform(0.5, 1, count), rng.integers(50, 600, count)
        ),
        "equal": lambda: np.full(count, longest // 4),
        "uniform": lambda: rng.integers(16, longest, count),
        "long": lambda: np.exp(rng.normal(np.log(longest / 4), 0.6, count)),
    }[corpus]()
    clipped = np.clip(drawn, 16, longest).astype(int)
    return clipped[: max(1, int(np.searchsorted(np.cumsum(clipped), tokens)))]


def smaller_spaces(rng, num_devices):
    """Search spaces that lack one thing: degrees, stages, one method or two, levels of recompute, offload, tiles."""
    for name, limits in (("max_degree", (1, 2, 4, 8, 16, 32)), ("max_stages", (1, 2, 4))):
        if lower := [limit for limit in limits if limit < num_devices]:
            yield replace(EVERYTHING, **{name: int(rng.choice(lower))})
    if num_devices > 1:
        left_out = int(rng.integers(3))
        yield replace(EVERYTHING, methods=tuple(method for k, method in enumerate(METHODS) if k != left_out))
        yield replace(EVERYTHING, methods=(METHODS[rng.integers(3)],))
    yield replace(EVERYTHING, recompute=RecomputeMode.NONE)
    yield replace(EVERYTHING, recompute=RecomputeMode.ALL)
    yield replace(EVERYTHING, offload=OffloadMode.NONE)
    yield replace(EVERYTHING, tile_tokens=0)


def problem_of(model, cluster, space, *, longest, samples=()):
    spec, devices = model_preset(model), cluster_preset(cluster)
    cost = AnalyticCost(model=spec, cluster=devices)
    return make_problem(
        cost, cluster=devices, num_layers=spec.num_layers, max_length=longest, search_space=space, samples=samples
    )


def time_s(problem, lengths):
    batch = GlobalBatch(step=0, ids=tuple(range(len(lengths))), lengths=tuple(lengths.tolist()))
    return Planner(policy="auto", problem=problem)(batch).time_s


@pytest.mark.parametrize(
    ("model", "cluster", "longest"),
    [
        ("llama-3-8b", "3x1xH100-80GB", 65_536),
        pytest.param("llama-13b", "1x8xH100-80GB", 16_384, marks=pytest.mark.deep),
    ],
)
def test_every_smaller_search_space_is_part_of_the_larger_one(model, cluster, longest):
    schemes = {candidate.scheme for candidate in problem_of(model, cluster, EVERYTHING, longest=longest).candidates}
    for space in (
        replace(EVERYTHING, max_degree=2),
        *smaller_spaces(np.random.default_rng(0), cluster_preset(cluster).num_devices),
    ):
        try:
            smaller = problem_of(model, cluster, space, longest=longest)
        except InfeasibleError:
            continue
        assert schemes.issuperset(candidate.scheme for candidate in smaller.candidates), space


@pytest.mark.deep  # by default: of six sequences, below
def test_tiles_make_no_plan_of_three_equal_sequences_slower():
    lengths = np.full(3, 16_384)
    spaces = EVERYTHING, replace(EVERYTHING, tile_tokens=0)
    more_s, fewer_s = (
        time_s(problem_of("llama-3-8b", "4x1xH100-80GB", space, longest=65_536, samples=[lengths]), lengths)
        for space in spaces
    )
    assert more_s <= fewer_s * SAME


@pytest.mark.deep
def test_few_short_sequences_are_planned_alike_whatever_baselines_are_tuned_to():
    lengths = np.array([560, 479, 587, 212, 512])
    samples = [lengths_of("two-humped", np.random.default_rng(k), tokens=32_768, longest=32_768) for k in range(32)]
    more_s, fewer_s = (
        time_s(problem_of("transformer-2d-1.2b", "4x1xH100-80GB", space, longest=32_768, samples=samples), lengths)
        for space in (EVERYTHING, replace(EVERYTHING, methods=(Method.RING,)))
    )
    assert more_s <= fewer_s * SAME


@pytest.mark.deep
def test_tiles_displace_no_level_of_recompute_that_is_faster_at_some_lengths():
    lengths = np.array([9483, 8399, 1541, 8641, 13899, 4239])
    spaces = EVERYTHING, replace(EVERYTHING, tile_tokens=0)
    tiled, plain = (
        problem_of("llama-3-8b", "4x1xA800-80GB", space, longest=16_384, samples=[lengths]) for space in spaces
    )
    assert time_s(tiled, lengths) <= time_s(plain, lengths) * SAME
    for family, members in plain.families.items():
        if members[0].num_stages > 1:
            names = {candidate.scheme.name for candidate in undominated(tiled.families[family])}
            assert names.issuperset(k.scheme.name for k in undominated(members) if k.scheme.is_plain), family


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + SETTINGS))
def test_no_plan_is_a_hundredth_slower_in_a_larger_search_space(seed):
    rng = np.random.default_rng(seed)
    cluster = cluster_preset(f"{rng.choice(CLUSTERS)}x{rng.choice(['H100-80GB', 'A800-80GB'])}")
    model, corpus = str(rng.choice(MODELS)), str(rng.choice(CORPORA))
    longest = int(rng.choice([4096, 16_384, 32_768, 65_536]))
    tokens = max(longest, int(rng.choice([1500, 3125, 12_500])) * cluster.num_devices)
    drawn = [lengths_of(corpus, rng, tokens=tokens, longest=longest) for _ in range(33)]
    options = {"longest": longest, "samples": drawn[1:]}
    try:
        everything_s = time_s(problem_of(model, cluster.name, EVERYTHING, **options), drawn[0])
    except InfeasibleError:
        return
    for space in smaller_spaces(rng, cluster.num_devices):
        try:
            smaller_s = time_s(problem_of(model, cluster.name, space, **options), drawn[0])
        except InfeasibleError:
            continue
        assert everything_s <= smaller_s * HARDLY_SLOWER, space
