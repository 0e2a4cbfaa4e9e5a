"""What every policy promises, and what distinguishes them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.core.batch import GlobalBatch
from lengthwise.core.errors import InfeasibleError, InputError
from lengthwise.plan.policies import POLICIES, find_policy
from tests.plan.conftest import SimpleCost

LENGTHS = st.lists(st.integers(1, 100), min_size=1, max_size=40)


def packs_of(plan):
    return [[m.pack for m in pipeline.micro_batches] for pipeline in plan.pipelines]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_sequence_is_planned_once_within_memory_and_above_the_bound(policy, planner):
    make = planner  # the fixture makes planners; hypothesis runs inside

    @settings(max_examples=150, deadline=None)
    @given(LENGTHS, st.integers(1, 7), st.integers(100, 400))
    def check(lengths, num_devices, capacity):
        batch = GlobalBatch(step=5, ids=tuple(range(len(lengths))), lengths=tuple(lengths))
        plan = make(policy, num_devices=num_devices, cost=SimpleCost(capacity=capacity))(batch)
        plan.check_covers(batch)
        assert all(pack.num_tokens <= capacity for held in packs_of(plan) for pack in held)
        assert plan.lower_bound_s <= plan.time_s * (1 + 1e-12)
        assert plan.digest == make(policy, num_devices=num_devices, cost=SimpleCost(capacity=capacity))(batch).digest

    check()


@settings(max_examples=150, deadline=None)
@given(lengths=LENGTHS, num_devices=st.integers(1, 7))
def test_balanced_is_never_slower_than_a_third_above_the_bound_when_memory_is_ample(lengths, num_devices):
    from lengthwise.core.scheme import dense_scheme
    from lengthwise.plan.planner import Planner

    batch = GlobalBatch(step=0, ids=tuple(range(len(lengths))), lengths=tuple(lengths))
    planner = Planner(
        policy="balanced", arrange=find_policy("balanced"), cost=SimpleCost(capacity=10**6), scheme=dense_scheme(1),
        num_devices=num_devices, memory_bytes=2**40, max_length=100,
    )  # fmt: skip
    assert planner(batch).gap <= 1 / 3 + 1e-9  # LPT's guarantee (Graham 1969)


def test_micro_batches_are_issued_longest_first(planner, batch):
    plan = planner(cost=SimpleCost(capacity=60))(batch([50, 40, 30, 20, 10, 60, 5, 5]))
    for pipeline in plan.pipelines:
        times = [m.time_s for m in pipeline.micro_batches]
        assert times == sorted(times, reverse=True)


def test_padded_batches_take_the_sampler_order_and_pad_to_their_longest(planner, batch):
    plan = planner("padded", num_devices=2, batch_size=2)(batch([3, 9, 4, 4, 7]))
    packs = sorted((pack for held in packs_of(plan) for pack in held), key=lambda pack: pack.ids)
    assert [(pack.ids, pack.padded_to) for pack in packs] == [((10, 11), 9), ((12, 13), 4), ((14,), 7)]


def test_padded_takes_the_most_sequences_that_fit_at_the_longest_length(planner, batch):
    plan = planner("padded", num_devices=1, max_length=100, cost=SimpleCost(capacity=350))(batch([10] * 7))
    assert sorted(len(pack.ids) for pack in packs_of(plan)[0]) == [1, 3, 3]


def test_padded_refuses_a_batch_size_that_memory_cannot_hold(planner, batch):
    with pytest.raises(InfeasibleError, match=r"4 sequences padded to 90 tokens \(360 in all\) needs 360.0 GiB"):
        planner("padded", batch_size=4, cost=SimpleCost(capacity=300))(batch([90, 1, 1, 1]))


def test_static_fills_packs_to_the_context_length(planner, batch):
    plan = planner("static", num_devices=2, max_length=100)(batch([60, 50, 40, 30, 20]))
    assert sorted(pack.num_tokens for held in packs_of(plan) for pack in held) == [100, 100]


def test_packed_gives_every_device_a_pack(planner, batch):
    plan = planner("packed", num_devices=3)(batch([30, 20, 10, 30, 20, 10, 5]))
    assert all(packs_of(plan))


def test_balanced_balances_time_where_packed_balances_tokens(planner, batch):
    lengths = [100, 50, 50, *[10] * 20]
    balanced, packed = (planner(policy, num_devices=2)(batch(lengths)) for policy in ("balanced", "packed"))
    assert balanced.time_s < packed.time_s
    assert balanced.gap < 0.05


def test_a_sequence_that_fits_nowhere_is_refused_with_the_number_the_limit_and_the_way_out(planner, batch):
    with pytest.raises(InfeasibleError, match=r"sequence 11 \(2,000 tokens\) needs 2000.0 GiB.*has 1000.0 GiB.*Set "):
        planner()(batch([5, 2000]))


def test_a_model_that_fits_nowhere_is_said_to_be_the_reason(planner, batch):
    with pytest.raises(InfeasibleError, match="so no length fits: use devices with more memory"):
        planner(cost=SimpleCost(capacity=0))(batch([5]))


def test_a_users_own_limit_is_named_as_such(planner, batch):
    with pytest.raises(InfeasibleError, match=r"plan.max_tokens \(50 tokens"):
        planner(token_limit=50)(batch([60]))


def test_fewer_sequences_than_devices_leave_devices_empty(planner, batch):
    plan = planner(num_devices=4)(batch([7]))
    assert sorted(len(held) for held in packs_of(plan)) == [0, 0, 0, 1]


def test_a_mistyped_policy_suggests_the_nearest():
    with pytest.raises(InputError, match="did you mean balanced"):
        find_policy("balance")
