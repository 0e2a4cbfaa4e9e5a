"""Which ranks of a stage hold which tokens: sizes, plans that say so, and placements that no plan has."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.batch import Pack
from lengthwise.core.errors import InputError
from lengthwise.core.pipeline_config import Method, uniform_scheme
from lengthwise.core.planned_micro_batch import PlannedMicroBatch, PlannedSlice
from lengthwise.core.step_plan import Pipeline, StepPlan
from lengthwise.core.token_placement import Piece, share_sizes
from tests.sim.random_plans import random_placement

LENGTHS = (9, 4, 7)
PLACEMENT = ((), (Piece(1, 4),), (Piece(0, 5), Piece(1, 2)))


def pipeline_of(placement, **of_pack):
    pack = Pack(ids=(0, 1, 2), lengths=LENGTHS, **of_pack)
    scheme = uniform_scheme(2, degree=2, method=Method.RING)
    micro_batch = PlannedMicroBatch(pack=pack, time_s=1.0, peak_bytes=8, placement=placement)
    return Pipeline(ranks=(0, 1), scheme=scheme, micro_batches=(micro_batch,))


def plan_of(placement):
    return StepPlan(
        step=0, policy="by hand", pipelines=(pipeline_of(placement),), loss_normaliser=17, update_s=0.0, time_s=1.0,
        lower_bound_s=1.0,
    )  # fmt: skip


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8), degree=st.integers(1, 5), seed=st.integers(0, 99))
def test_sizes_count_every_token_once(lengths, degree, seed):
    placement = random_placement(random.Random(seed), lengths, degree)
    sizes = share_sizes(lengths, placement, degree)
    assert len(sizes) == degree and sum(sizes) == sum(lengths)
    in_equal_parts = share_sizes(lengths, (), degree)
    assert sum(in_equal_parts) == sum(lengths) and max(in_equal_parts) - min(in_equal_parts) <= 1


def test_shared_sequences_are_in_equal_parts_beside_those_on_one_rank():
    assert share_sizes(LENGTHS, PLACEMENT, 2) == [5 + 5, 4 + 4 + 2]


def test_a_plan_with_a_placement_comes_back_from_its_file_and_another_placement_is_another_plan():
    plan = plan_of(PLACEMENT)
    assert StepPlan.from_json(plan.to_json()) == plan
    digests = {plan_of(placement).digest for placement in ((), PLACEMENT, (*PLACEMENT[:2], (Piece(1, 7),)))}
    assert len(digests) == 3, "ranks that hold other tokens must not run together"


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (PLACEMENT[:2], "the placement of a micro-batch is of 2 sequences, its pack has 3"),
        (((), (Piece(1, 5),), ()), "the pieces of sequence 1 of a micro-batch have 5 tokens in all, it has 4"),
        (((Piece(2, 9),), (), ()), "sequence 0 of a micro-batch has tokens on rank 2 of a stage of 2 ranks, which"),
    ],
)
def test_a_placement_that_is_none_of_the_pack_is_refused(placement, message):
    with pytest.raises(InputError, match=message):
        pipeline_of(placement)


def test_padded_packs_and_packs_in_slices_have_no_placement():
    with pytest.raises(InputError, match="a micro-batch of padded sequences has no placement"):
        pipeline_of(PLACEMENT, padded_to=10)
    scheme = uniform_scheme(2, degree=2, method=Method.ULYSSES)
    (micro_batch,) = pipeline_of(PLACEMENT).micro_batches
    with pytest.raises(InputError, match="a micro-batch in slices has no placement"):
        Pipeline(ranks=(0, 1), scheme=scheme, micro_batches=(replace(micro_batch, slices=(PlannedSlice(20, 1.0),)),))
