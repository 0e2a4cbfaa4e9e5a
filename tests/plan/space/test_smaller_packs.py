"""Packs larger than any that was measured are cut, where prediction has it that this costs next to nothing."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.plan.planner import Planner
from lengthwise.plan.space.draft_plan import DraftPlan, PipelineDraft
from lengthwise.plan.space.draft_times import time_s
from lengthwise.plan.space.problem import PricedBatch
from lengthwise.plan.space.smaller_packs import NEXT_TO_NOTHING, in_measured_packs
from tests.examples import examples
from tests.plan.costs import SimpleCost, make_batch, make_problem

MEASURED = 64


class Measured(SimpleCost):
    """A cost of a profile that had packs of up to 64 tokens."""

    def largest_pack(self, scheme):
        return MEASURED


def as_it_is(priced, draft):
    return draft


def packs_of(draft):
    return [pack for phase in draft.phases for pipeline in phase for pack in pipeline.packs]


def one_pack(lengths, **cost):
    problem = make_problem(Measured(**cost), num_devices=1)
    priced = PricedBatch(problem, make_batch(lengths))
    pipeline = PipelineDraft(candidate=problem.candidates[0], ranks=(0,), packs=(tuple(range(len(lengths))),))
    return priced, DraftPlan(phases=((pipeline,),))


@settings(max_examples=examples(200))
@given(st.lists(st.integers(1, 90), min_size=1, max_size=30), st.sampled_from([0.0, 1e-4, 1e-3, 0.1]))
def test_every_sequence_is_in_one_pack_and_packs_are_as_measured_or_as_they_were(lengths, overhead_s):
    priced, draft = one_pack(lengths, c_s=overhead_s, capacity=4000)
    packs = packs_of(smaller := in_measured_packs(priced, draft, as_it_is))
    assert Counter(position for pack in packs for position in pack) == Counter(range(len(lengths)))
    assert time_s(priced, smaller) <= time_s(priced, draft) * (1 + NEXT_TO_NOTHING)
    if len(packs) > 1:
        assert all(len(pack) == 1 or sum(lengths[k] for k in pack) <= MEASURED for pack in packs)
        assert sum(lengths) > MEASURED
    else:
        assert smaller is draft


def test_a_micro_batch_that_costs_more_than_next_to_nothing_is_not_made():
    assert len(packs_of(in_measured_packs(*one_pack([40] * 6, c_s=0.0), as_it_is))) == 6
    assert len(packs_of(in_measured_packs(*one_pack([30] * 6, c_s=0.0), as_it_is))) == 3
    assert len(packs_of(in_measured_packs(*one_pack([30] * 6, c_s=0.1), as_it_is))) == 1


def test_the_default_policy_makes_packs_as_they_were_measured():
    batch = make_batch([20] * 24)

    def largest(cost):
        plan = Planner(policy="auto", problem=make_problem(cost, num_devices=2))(batch)
        plan.check_covers(batch)
        return max(micro.pack.num_tokens for pipeline in plan.pipelines for micro in pipeline.micro_batches)

    assert largest(SimpleCost(c_s=1e-3)) == 240 and largest(Measured(c_s=1e-3)) <= MEASURED
    assert largest(Measured(c_s=1.0)) == 240
