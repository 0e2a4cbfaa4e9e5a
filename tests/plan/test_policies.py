"""What every tuned baseline promises, and what distinguishes them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.core.errors import InfeasibleError, InputError
from lengthwise.plan.planner import Planner
from lengthwise.plan.policies import prepare
from lengthwise.plan.solve.shop import Objective
from lengthwise.plan.space.draft_times import time_s
from lengthwise.plan.space.problem import PricedBatch
from lengthwise.plan.uniform.bucket import batch_sizes, bucket, bucket_edges
from lengthwise.plan.uniform.packed import packed
from lengthwise.plan.uniform.padded import padded, step_s
from lengthwise.plan.uniform.static import static
from tests.examples import examples
from tests.plan.costs import SimpleCost, make_batch, make_problem

BASELINES = ("padded", "static", "bucket", "packed", "hotspa")
LENGTHS = st.lists(st.integers(1, 100), min_size=1, max_size=40)


def packs_of(plan):
    return [[m.pack for m in pipeline.micro_batches] for pipeline in plan.pipelines]


def plan_of(policy, lengths, **options):
    return Planner(policy=policy, problem=make_problem(**options))(make_batch(lengths))


def candidate_of(problem, *, degree=1, stages=1):
    return next(k for k in problem.candidates if (k.scheme.degree, k.num_stages) == (degree, stages))


def dealt_by(policy, lengths):
    """Lengths of each pack of each pipeline of a policy's only phase."""
    (phase,) = policy.phases(PricedBatch(policy.problem, make_batch(lengths)))
    return [[[lengths[at] for at in pack] for pack in pipeline.packs] for pipeline in phase]


@pytest.mark.parametrize("policy", BASELINES)
@settings(max_examples=examples(40), deadline=None)
@given(
    lengths=LENGTHS,
    samples=st.lists(LENGTHS, max_size=2),
    num_devices=st.integers(1, 7),
    capacity=st.integers(100, 400),
    objective=st.sampled_from(Objective),
    overhead_per_sequence=st.booleans(),
)
def test_every_sequence_is_planned_once_within_memory_and_above_the_bound(
    policy, lengths, samples, num_devices, capacity, objective, overhead_per_sequence
):
    problem = make_problem(
        SimpleCost(capacity=capacity), num_devices=num_devices, samples=samples, objective=objective,
        overhead_per_sequence=overhead_per_sequence, recomputed=(0, 4),
    )  # fmt: skip
    batch = make_batch(lengths, step=5)
    plan = Planner(policy=policy, problem=problem)(batch)
    plan.check_covers(batch)
    for pipeline, packs in zip(plan.pipelines, packs_of(plan)):
        limit = problem.candidates[0].cost.max_tokens(pipeline.scheme, num_devices=num_devices)
        assert all(pack.num_tokens <= limit for pack in packs)
    assert all(strategy.num_devices == num_devices for strategy in plan.strategies)
    assert 0 < plan.lower_bound_s <= plan.time_s
    assert plan.digest == Planner(policy=policy, problem=problem)(batch).digest


@pytest.mark.parametrize("policy", BASELINES)
def test_the_bound_speaks_of_the_policys_own_schemes(policy):
    plan = plan_of(policy, [100, 40, 30, 20, 20, 20, 10, 10], samples=[[100, 40, 30, 20, 20, 20, 10, 10]])
    lone_s = min(SimpleCost().time_s([100], p.scheme) * p.scheme.num_stages for p in plan.pipelines)
    assert plan.lower_bound_s >= lone_s * (1 - 1e-9)  # the longest sequence alone


@pytest.mark.parametrize("policy", BASELINES)
def test_micro_batches_are_issued_longest_first(policy):
    plan = plan_of(policy, [50, 40, 30, 20, 10, 60, 5, 5] * 3, cost=SimpleCost(capacity=60), max_length=60)
    for pipeline in plan.pipelines:
        times = [m.time_s for m in pipeline.micro_batches]
        assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("policy", BASELINES)
def test_fewer_sequences_than_pipelines_leave_pipelines_empty(policy):
    plan = plan_of(policy, [7], degrees=[1], stages=[1])
    assert sorted(len(held) for held in packs_of(plan)) == [0, 0, 0, 1]


@pytest.mark.parametrize("policy", BASELINES)
def test_what_was_tuned_can_be_named(policy):
    tuned = prepare(policy, make_problem(samples=[[100, 40, 3]]))
    assert tuned.candidate.scheme.name in tuned.name


# What distinguishes them.


def test_padded_takes_the_samplers_order_and_pads_to_the_longest_of_a_micro_batch():
    plan = plan_of("padded", [3, 9, 4, 4, 7], num_devices=2, batch_size=2)
    packs = sorted((pack for held in packs_of(plan) for pack in held), key=lambda pack: pack.ids)
    assert [(pack.ids, pack.padded_to) for pack in packs] == [((10, 11), 9), ((12, 13), 4), ((14,), 7)]


def test_padded_gives_all_micro_batches_of_a_step_one_shape_if_asked():
    plan = plan_of("padded", [3, 9, 4, 4, 7], num_devices=2, batch_size=2, one_shape=True)
    packs = sorted((pack for held in packs_of(plan) for pack in held), key=lambda pack: pack.ids)
    assert [pack.ids for pack in packs] == [(10, 11), (12, 13), (14,)]
    assert {pack.cu_seqlens for pack in packs} == {(0, 9, 18)}
    assert len({m.time_s for pipeline in plan.pipelines for m in pipeline.micro_batches}) == 1


@settings(max_examples=examples(40), deadline=None)
@given(LENGTHS, st.integers(1, 5), st.booleans(), st.booleans(), st.sampled_from(Objective))
def test_padded_tunes_on_the_seconds_that_its_arrangement_takes(
    lengths, size, one_shape, overhead_per_sequence, objective
):
    problem = make_problem(overhead_per_sequence=overhead_per_sequence, objective=objective, one_shape=one_shape)
    priced = PricedBatch(problem, make_batch(lengths))
    for candidate in problem.candidates:
        if problem.num_devices % candidate.num_devices == 0:
            arranged = time_s(priced, padded(problem, candidate, size=size)(priced))
            assert arranged - 0.25 == pytest.approx(step_s(priced, candidate, size=size), rel=1e-12)


def test_padded_batches_are_larger_where_overheads_are():
    samples = [[50] * 64]
    sizes = [
        int(prepare("padded", make_problem(SimpleCost(c_s=c_s), samples=samples, degrees=[1])).setting.split()[0])
        for c_s in (0.0, 10.0)
    ]
    assert sizes[0] == 1
    assert sizes[1] == 8  # of 10 that memory holds; 16 sequences are each device's share


def test_static_fills_packs_to_the_context_length_whatever_memory_holds():
    problem = make_problem(num_devices=2)
    dealt = dealt_by(static(problem, candidate_of(problem)), [60, 50, 40, 30, 20])
    assert dealt == [[[60, 40]], [[50, 30, 20]]]


@given(LENGTHS)
def test_static_deals_as_many_packs_to_every_pipeline(lengths):
    problem = make_problem()
    counts = [len(packs) for packs in dealt_by(static(problem, candidate_of(problem)), lengths)]
    assert max(counts) - min(counts) <= 1


def test_packed_gives_every_pipeline_a_pack_and_balances_tokens():
    problem = make_problem(num_devices=3)
    dealt = dealt_by(packed(problem, candidate_of(problem)), [30, 20, 10, 30, 20, 10, 6])
    tokens = [sum(map(sum, packs)) for packs in dealt]
    assert max(tokens) - min(tokens) <= 6


def test_packed_packs_finer_where_stages_would_idle():
    samples = [[10] * 64]
    one, four = (
        prepare("packed", make_problem(SimpleCost(c_s=0.05), samples=samples, degrees=[1], stages=[stages]))
        for stages in (1, 4)
    )
    assert "packs each" not in one.name
    assert "packs each" in four.name


def test_a_bucket_holds_lengths_within_a_factor_of_two_in_the_samplers_order():
    problem = make_problem(num_devices=1)
    edges = bucket_edges(problem, shortest=20)
    assert edges == (100, 50, 25)
    policy = bucket(problem, candidate_of(problem), edges=edges, sizes=(1, 2, 4))
    lengths = [25, 50, 100, 26, 51, 1, 40]
    assert dealt_by(policy, lengths) == [[[100], [51], [50, 26], [40], [25, 1]]]


def test_micro_batches_of_all_buckets_take_as_long_where_memory_allows():
    candidate = candidate_of(make_problem(SimpleCost(capacity=300)))
    edges = (100, 50, 25, 12)
    sizes = batch_sizes(candidate, edges, budget=1.0)
    times_s = candidate.times_s(np.array(edges))
    for edge, size, each_s in zip(edges, sizes, times_s):
        assert size * each_s <= times_s[0] * (1 + 1e-12)
        assert (size + 1) * each_s > times_s[0] or (size + 1) * edge > 300
    assert sizes[0] == 1
    assert batch_sizes(candidate, edges, budget=1e9) == (3, 6, 12, 25)  # what memory holds


def test_pipelines_of_one_round_hold_different_buckets():
    problem = make_problem(num_devices=2, degrees=[1], stages=[1])
    policy = bucket(problem, candidate_of(problem), edges=(100, 50), sizes=(1, 1))
    assert dealt_by(policy, [20, 100]) == [[[100]], [[20]]]


def test_balancing_time_beats_balancing_tokens_where_attention_dominates():
    lengths = [100, *[10] * 30]
    options = {
        "cost": SimpleCost(a_s=1e-2, c_s=0.0),
        "num_devices": 2,
        "degrees": [1],
        "stages": [1],
        "samples": [lengths],
    }
    hotspa, by_tokens = (plan_of(policy, lengths, **options) for policy in ("hotspa", "packed"))
    assert hotspa.time_s < by_tokens.time_s
    assert hotspa.gap < 0.05


# Refusals.


def test_padded_refuses_a_batch_size_that_memory_cannot_hold():
    message = r"4 sequences padded to 90 tokens \(360 in all\) needs 360.0 GiB .* has 300.0 GiB.*Lower plan.batch_size"
    with pytest.raises(InfeasibleError, match=message):
        plan_of("padded", [90, 1, 1, 1], batch_size=4, cost=SimpleCost(capacity=300), max_length=90, degrees=[1])


def test_padded_computes_wider_before_it_refuses_a_batch_size():
    plan = plan_of("padded", [90, 1, 1, 1], batch_size=4, cost=SimpleCost(capacity=300), max_length=90, degrees=[1, 2])
    assert {pipeline.scheme.degree for pipeline in plan.pipelines} == {2}


@pytest.mark.parametrize("policy", BASELINES)
def test_a_sequence_that_no_equal_pipelines_hold_is_refused_with_number_limit_and_way_out(policy):
    options = {"cost": SimpleCost(capacity=100), "num_devices": 7, "degrees": [1, 4], "max_length": 500, "stages": [1]}
    with pytest.raises(InfeasibleError, match=r"500 tokens needs 125.0 GiB .*has 100.0 GiB. Set .*=400 ") as error:
        prepare(policy, make_problem(**options))
    assert error.value.exit_code == 3
    assert policy in str(error.value)


@pytest.mark.parametrize("policy", [*BASELINES, "hydraulis", "auto"])
def test_devices_that_no_pipelines_fill_stay_idle_and_the_plan_says_so(policy):
    plan = plan_of(policy, [30, 20, 10], num_devices=7, degrees=[2, 4], stages=[1])
    assert plan.num_devices == 7
    assert "of 7 devices" in plan.strategy_words
    if policy in ("hydraulis", "auto"):
        assert plan.num_used == 6, "as many as a mix fills"


@pytest.mark.parametrize("policy", ["hydraulis", "auto"])
def test_devices_stay_idle_only_if_nothing_fills_them(policy):
    plan = plan_of(policy, [30] * 20, num_devices=7, degrees=[1, 2, 4], stages=[1])
    assert plan.num_used == 7
    assert "of 7 devices" not in plan.strategy_words


@pytest.mark.parametrize("policy", BASELINES)
def test_a_users_own_limit_is_named_as_such(policy):
    with pytest.raises(
        InfeasibleError, match=r"exceeds plan.max_tokens \(50 tokens.* Raise plan.max_tokens if"
    ) as error:
        prepare(policy, make_problem(token_limit=50, max_length=60))
    assert "recompute" not in str(error.value)


def test_a_sequence_over_a_users_own_limit_is_refused_without_advice_that_leaves_the_limit():
    problem = make_problem(token_limit=50, max_length=50, num_devices=4, degrees=[1], recomputed=(0,))
    with pytest.raises(InfeasibleError) as error:
        problem.check_fits(np.array([20, 60]))
    assert str(error.value) == (
        "sequence 1 (60 tokens) exceeds plan.max_tokens (50 tokens per micro-batch). Raise plan.max_tokens if a device "
        "holds more. Set data.max_length=50 or less with data.over_length=split."
    )


@pytest.mark.parametrize("policy", BASELINES)
def test_a_sequence_beyond_the_promised_longest_is_planned_or_refused_but_never_lost(policy):
    options = {"cost": SimpleCost(capacity=300), "num_devices": 3, "degrees": [1, 2], "stages": [1], "max_length": 100}
    options |= {"samples": [[100] * 9]}
    assert plan_of(policy, [150, 20, 3], **options).num_computed_tokens >= 173
    with pytest.raises(InfeasibleError, match=f"policy {policy}: .* needs .* Lower "):  # two devices would hold it
        plan_of(policy, [500, 20, 3], **options)


def test_a_mistyped_policy_suggests_the_nearest():
    with pytest.raises(InputError, match="did you mean packed"):
        prepare("pakced", make_problem())
