"""Bounds of policies never exceed the optimum of what they may use, and plans are near it."""

from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import numpy as np
import pytest

from lengthwise.core.errors import InfeasibleError
from lengthwise.core.pipeline_config import Method
from lengthwise.plan.dcp.dcp import usable_candidates
from lengthwise.plan.heterogeneous.hydraulis import published_space
from lengthwise.plan.layerwise.layer_assignment import mixed_candidates
from lengthwise.plan.planner import Planner
from lengthwise.plan.space.finer_recompute import between, next_fewer
from lengthwise.plan.space.split_backwards import ZeroBubble
from tests.plan.brute_force import BruteForce
from tests.plan.costs import HiddenUpdates, SimpleCost, make_batch, make_problem


@dataclass(frozen=True)
class UnevenUpdates(SimpleCost):
    """Updates take as long as the slowest scheme's, which grows with the share of the weights that a device holds."""

    unit_s: float = 0.5

    def update_s(self, strategy):
        return 0.05 + max(self.unit_s / scheme.num_stages for scheme in strategy.schemes)


@dataclass(frozen=True)
class FitsInStages(UnevenUpdates):
    """Long sequences fit in stages alone, which share a layer only at a loss."""

    def max_tokens(self, scheme, *, num_devices):
        return super().max_tokens(scheme, num_devices=num_devices) * scheme.num_stages**2 // (2 * scheme.degree)

    def _factor(self, scheme):
        return super()._factor(scheme) * scheme.degree


def case(seed, *, hides=False, zero_bubble=ZeroBubble.NONE):
    """A small problem and the lengths of a batch; ``hides``: whether passes hide a part of the update."""
    rng = np.random.default_rng(seed)
    cost = (UnevenUpdates if zero_bubble is ZeroBubble.NONE else FitsInStages)(
        a_s=rng.choice([0.0, 1e-4, 1e-2]),
        b_s=rng.choice([1e-3, 1e-2]),
        c_s=rng.choice([0.0, 0.05, 0.5]),
        loss=rng.choice([0.0, 0.1, 0.5]),
        capacity=int(rng.integers(30, 120)),
        unit_s=rng.choice([0.0, 0.1, 1.0]),
    )
    problem = make_problem(
        HiddenUpdates(cost, slowdown=[0.0, 0.5][seed % 2]) if hides else cost,
        num_devices=int(rng.choice([2, 3, 4])),
        methods=(Method.ULYSSES,),
        recomputed=[(0,), (0, 4)][rng.integers(2)],
        stages=[1, 2],
        zero_bubble=zero_bubble,
        samples=[np.minimum(rng.lognormal(3, 0.8, 12).astype(int) + 1, 100) for _ in range(3)],
    )
    longest = min(100, problem.leanest.max_tokens)
    lengths = np.minimum(rng.lognormal(3, 1, int(rng.integers(2, 6))).astype(int) + 1, longest)
    return problem, lengths.tolist()


def planned(policy, seed, candidates_of, *, hides=False, zero_bubble=ZeroBubble.NONE, **options):
    """The plan and the optimum of a case, or None where the policy cannot run."""
    problem, lengths = case(seed, hides=hides, zero_bubble=zero_bubble)
    try:
        plan = Planner(policy=policy, problem=problem)(make_batch(lengths))
    except InfeasibleError:
        return None
    return plan, BruteForce(problem, candidates_of(problem), lengths, **options).best_s()


def everything(problem):
    return with_all_levels([*problem.candidates, *mixed_candidates(problem)])


def usable(problem):
    return with_all_levels(usable_candidates(problem))


def with_all_levels(candidates):
    """These, and those that recompute any number of layers between two of them, as packs of plans may."""
    finer = [level for more, fewer in next_fewer(candidates).items() for level in between(fewer, more)]
    return [*candidates, *finer]


SPACES = {
    "hydraulis": (published_space, {}, 24),
    "dcp-intra": (usable, {"most_phases": 2}, 40),
    "auto": (everything, {"most_phases": 2, "may_idle": True}, 10),
}
"""Candidates, options and the number of cases, of which every run of the tests takes half."""
MOST_ABOVE = {"hydraulis": (1.005, 1.05), "dcp-intra": (1.005, 1.05), "auto": (1.005, 1.05)}
"""Planned time over the optimum: mean and worst."""


@pytest.mark.first_cells(2)
@pytest.mark.parametrize("share", [0.25, pytest.param(1.0, marks=pytest.mark.deep)])
@pytest.mark.parametrize("policy", SPACES)
def test_the_bound_of_a_policy_holds_for_all_plans_of_its_space(policy, share):
    candidates_of, options, cases = SPACES[policy]
    cases, ratios = int(share * cases), []
    for seed in range(cases):
        if result := planned(policy, seed, candidates_of, **options):
            plan, best_s = result
            assert plan.lower_bound_s <= best_s * (1 + 1e-9), seed
            ratios.append(plan.time_s / best_s)
    assert len(ratios) > cases / 2
    mean, worst = MOST_ABOVE[policy]
    assert fmean(ratios) < mean and max(ratios) < worst


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 24), marks=pytest.mark.deep)])
def test_the_bound_holds_where_passes_hide_a_part_of_the_update(seeds):
    ratios = []
    for seed in seeds:
        plan, best_s = planned("auto", seed, everything, hides=True, may_idle=True)
        assert plan.lower_bound_s <= best_s * (1 + 1e-9), seed
        assert plan.hidden_update_s > 0, seed
        ratios.append(plan.time_s / best_s)
    assert fmean(ratios) < 1.01 and max(ratios) < 1.1


@pytest.mark.parametrize("zero_bubble", [ZeroBubble.AUTO, pytest.param(ZeroBubble.ALL, marks=pytest.mark.deep)])
def test_the_bound_holds_where_stages_split_backwards(zero_bubble):
    ratios, num_split = [], 0
    seeds = (0, 2, 4, 5) if zero_bubble == ZeroBubble.ALL else (0, 2)
    for seed in seeds:
        plan, best_s = planned("auto", seed, everything, zero_bubble=zero_bubble, **SPACES["auto"][1])
        assert plan.lower_bound_s <= best_s * (1 + 1e-9), seed
        num_split += any(pipeline.scheme.zero_bubble for pipeline in plan.pipelines)
        ratios.append(plan.time_s / best_s)
    assert num_split == len(seeds) and fmean(ratios) < 1.01 and max(ratios) < 1.05


@pytest.mark.deep
@pytest.mark.parametrize("policy", SPACES)
def test_hundreds_of_plans_are_near_the_optimum_of_their_space(policy):
    candidates_of, options, _ = SPACES[policy]
    if policy == "dcp-intra":
        candidates_of = usable_candidates  # by which it deals packs; each then recomputes as few layers as it can
    results = [planned(policy, seed, candidates_of, **options) for seed in range(250)]
    ratios = [plan.time_s / best_s for plan, best_s in filter(None, results)]
    assert len(ratios) > 200
    assert fmean(ratios) < 1.005 and max(ratios) < 1.05


METHODS = (Method.ULYSSES, Method.RING, Method.MEGATRON_TS, Method.ULYSSES_Z)
POOLS = (
    {"methods": METHODS[:1], "max_degree": 2, "max_stages": 1},
    {"methods": METHODS[:2], "max_degree": 2, "max_stages": 1},
    {"methods": METHODS[:3], "max_degree": 2, "max_stages": 1},
    {"methods": METHODS[:3], "max_degree": 8, "max_stages": 1},
    {"methods": METHODS, "max_degree": 8, "max_stages": 2},
)
"""Each with all candidates of those before it."""


def planned_in(pools, seed):
    """Seconds of `auto`'s plan of one random batch under each pool; inf where a pool does not hold it."""
    rng = np.random.default_rng(seed)
    cost = UnevenUpdates(
        a_s=rng.choice([0.0, 1e-4, 1e-2]),
        b_s=rng.choice([1e-3, 1e-2]),
        c_s=rng.choice([0.0, 0.05, 0.5]),
        loss=rng.choice([0.0, 0.1, 0.5]),
        capacity=int(rng.integers(30, 120)),
        unit_s=rng.choice([0.0, 0.1, 1.0]),
        method_factors=dict(zip(METHODS, rng.uniform(0.8, 1.4, len(METHODS)).tolist())),
    )
    num_devices, recomputed = int(rng.choice([2, 3, 4, 8])), [(0,), (0, 4)][rng.integers(2)]
    samples = [np.minimum(rng.lognormal(3, 0.8, 12).astype(int) + 1, 100) for _ in range(3)]
    lengths = np.minimum(rng.lognormal(3, 1, int(rng.integers(2, 14))).astype(int) + 1, 100)
    times_s = []
    for pool in pools:
        problem = make_problem(
            cost,
            num_devices=num_devices,
            methods=pool["methods"],
            recomputed=recomputed,
            degrees=[d for d in (1, 2, 3, 4, 8) if d in (num_devices, 1, 2, 4) and d <= pool["max_degree"]],
            stages=list(range(1, pool["max_stages"] + 1)),
            samples=samples,
        )
        try:
            times_s.append(Planner(policy="auto", problem=problem)(make_batch(lengths.tolist())).time_s)
        except InfeasibleError:
            times_s.append(np.inf)
    return times_s


def assert_no_slower(times_s):
    assert all(more_s <= less_s * (1 + 1e-9) for less_s, more_s in pairwise(times_s)), times_s


@pytest.mark.parametrize(("seed", "pools"), [(19, POOLS[2:4]), pytest.param(48, POOLS[1:3], marks=pytest.mark.deep)])
def test_layerwise_mixes_are_planned_on_every_degree_whatever_paradyse_itself_would_use(seed, pools):
    assert_no_slower(planned_in(pools, seed))


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(30))
def test_more_kinds_do_not_make_the_plan_slower(seed):
    assert_no_slower(planned_in(POOLS, seed))
