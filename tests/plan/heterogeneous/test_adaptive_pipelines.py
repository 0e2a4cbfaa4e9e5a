"""Which candidates of a family run which sequences."""

from itertools import combinations

import numpy as np
import pytest

from lengthwise.core.batch import GlobalBatch
from lengthwise.core.specs import cluster_preset, model_preset
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.plan.heterogeneous.adaptive_pipelines import (
    CandidateFamily,
    families_by_pivot,
    families_of,
    fastest_rungs,
    tile_of,
)
from lengthwise.plan.space.problem import PricedBatch
from lengthwise.plan.space.search_space import SearchSpace, make_problem

LONGEST = 131_072
MODELS = ("llama-7b", "llama-3-8b", "llama-13b", "llama-32b")
CLUSTERS = ("2x8xH100-80GB", "4x8xH100-80GB", "8x8xH100-80GB", "4x8xA800-80GB")
MOST_MEMBERS = 10
"""Members of a family of which all lists are tried."""


@pytest.fixture(scope="module")
def problem():
    """A model whose long sequences are best kept in host memory, and whose short ones on the device."""
    model, cluster = model_preset("llama-13b"), cluster_preset("8x8xH100-80GB")
    return problem_of(model, cluster, np.array([LONGEST, *[4096] * 100]), longest=LONGEST)


def problem_of(model, cluster, sample, *, longest):
    cost = AnalyticCost(model=model, cluster=cluster)
    return make_problem(
        cost, cluster=cluster, num_layers=model.num_layers, max_length=longest, search_space=SearchSpace(),
        samples=[sample],
    )  # fmt: skip


def alone_s(rungs, lengths):
    """Seconds of sequences that have a pack of their own, each as the first rung that holds it."""
    limits = [rung.max_tokens for rung in rungs]
    every_s = np.array([rung.times_s(lengths) + rung.overhead_s for rung in rungs])
    return every_s[np.searchsorted(limits, lengths), np.arange(len(lengths))]


@pytest.mark.first_cells(1)
def test_rungs_are_as_fast_as_the_best_of_all_lists_of_a_familys_members(problem):
    num_families = 0
    for members in problem.families.values():
        few = members[:: len(members) // MOST_MEMBERS + 1]
        longest = max(member.max_tokens for member in few)
        lengths = np.unique(np.geomspace(1, longest, 2000).astype(int))
        weights = np.diff(np.log(lengths), prepend=0) / lengths
        by_room = sorted(few, key=lambda member: member.max_tokens)
        lists_s = []
        for count in range(1, len(few) + 1):
            for tried in combinations(by_room, count):
                rooms = [member.max_tokens for member in tried]
                if rooms[-1] == longest and len(set(rooms)) == count:
                    times_s = alone_s(tried, lengths)
                    if (np.diff(times_s) >= 0).all():
                        lists_s.append(float(times_s @ weights))
        assert float(alone_s(fastest_rungs(few), lengths) @ weights) <= min(lists_s) * 1.002
        num_families += len(lists_s) > 20
    assert num_families > 10


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.deep) for seed in (1, 2, 3))])
def test_each_rung_holds_more_tokens_and_no_sequence_takes_less_time_than_a_shorter_one(seed):
    rng = np.random.default_rng(seed)
    model, cluster = model_preset(str(rng.choice(MODELS))), cluster_preset(str(rng.choice(CLUSTERS)))
    longest = int(rng.choice([8192, 32_768, 65_536]))
    batch = np.minimum(longest, rng.lognormal(8, 1.5, 64).astype(int) + 1)
    any_problem = problem_of(model, cluster, batch, longest=longest)
    priced = PricedBatch(any_problem, GlobalBatch(step=0, ids=tuple(range(64)), lengths=tuple(batch.tolist())))
    for members in any_problem.families.values():
        part = rng.permutation(len(members))[: rng.integers(1, len(members) + 1)]
        for chosen in (members, [members[place] for place in sorted(part.tolist())]):
            rungs = fastest_rungs(chosen)
            assert (np.diff([rung.max_tokens for rung in rungs]) > 0).all()
            assert rungs[-1].max_tokens == max(member.max_tokens for member in chosen)
            for family in families_by_pivot(chosen):
                ends = np.array([rung.max_tokens for rung in (family.pivot, *family.leaner)])
                lengths = np.unique(np.concatenate([ends, ends[:-1] + 1, batch[batch <= ends[-1]]]))
                assert (np.diff(family.times_s(lengths)) >= 0).all()
                times_s = tile_of(family, 1).times_s(priced)[np.argsort(priced.lengths)]
                assert (np.diff(times_s[np.isfinite(times_s)]) >= 0).all()


def test_what_is_faster_for_long_sequences_alone_runs_them(problem):
    """Keys, values and inputs of long sequences go to the host in less time than recompute takes; short ones do not."""
    families = [
        family
        for family in families_of(problem, problem.candidates)
        if family.scheme.degree == 16 and family.num_stages == 1 and "ulysses" in family.scheme.name
    ]
    assert families
    for family in families:
        tile = CandidateFamily(pivot=family.pivot, leaner=family.leaner)
        run = next(rung for rung in (tile.pivot, *tile.leaner) if rung.max_tokens >= LONGEST)
        assert any(run.scheme.offload) and not any(run.scheme.recompute), run.scheme.name


def test_every_rung_is_the_pivot_of_a_family_with_those_after_it(problem):
    members = max(problem.families.values(), key=len)
    rungs = fastest_rungs(members)
    families = families_by_pivot(members)
    if members[0].num_stages == 1:
        assert [(family.pivot, *family.leaner) for family in families] == [
            tuple(rungs[place:]) for place in range(len(rungs))
        ]
