"""A plan survives JSON, knows its batch, and says what it is for."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.batch import GlobalBatch, Pack
from lengthwise.core.errors import CheckError, InputError
from lengthwise.core.pipeline_config import Method, PipelineConfig, WeightPlacement, dense_scheme, uniform_scheme
from lengthwise.core.planned_micro_batch import PlannedMicroBatch
from lengthwise.core.step_plan import Pipeline, StepPlan


@st.composite
def plans(draw):
    """Two heterogeneous pipelines: a sharded one of two stages, and a dense one with overrides per micro-batch."""
    sharded = PipelineConfig(
        degree=2,
        stage_layers=(1, 2),
        methods=(Method.MEGATRON_TS, Method.METP, Method.ULYSSES_Z),
        recompute=(True, False, True),
        weights=WeightPlacement.SHARDED,
        offload=draw(st.sampled_from([(), (False, True, True)])),
        tile_tokens=draw(st.sampled_from([0, 4096])),
        head_groups=draw(st.sampled_from([1, 4])),
        keep_attention=draw(st.booleans()),
    )
    lengths = draw(st.lists(st.integers(1, 10**6), min_size=2, max_size=12))
    micro_batches = [
        PlannedMicroBatch(
            pack=Pack(
                ids=(i,),
                lengths=(length,),
                padded_to=draw(st.sampled_from([0, length, length + 7])),
                filler=draw(st.sampled_from([0, 0, 9])),
            ),
            time_s=draw(st.floats(0, 1e3)),
            peak_bytes=draw(st.integers(0, 2**50)),
            comm_s=draw(st.floats(0, 1)),
        )
        for i, length in enumerate(lengths)
    ]
    override = PlannedMicroBatch(
        pack=Pack(ids=(99,), lengths=(5,)),
        time_s=0.1,
        peak_bytes=1,
        methods=(Method.DENSE,) * 3,
        recompute=(False, True, False),
        offload=draw(st.sampled_from([None, (), (True, False, True)])),
        tile_tokens=draw(st.sampled_from([None, 0, 512])),
        head_groups=draw(st.sampled_from([None, 1, 2])),
        keep_attention=draw(st.sampled_from([None, False, True])),
    )
    return StepPlan(
        step=draw(st.integers(0, 10**9)),
        policy="any",
        pipelines=(
            Pipeline(ranks=(0, 1, 3, 4), scheme=sharded, micro_batches=tuple(micro_batches)),
            Pipeline(ranks=(2,), scheme=dense_scheme(3), micro_batches=(override,)),
            Pipeline(ranks=(5,), scheme=dense_scheme(3), micro_batches=(), state_bytes=draw(st.integers(0, 2**40))),
            *(Pipeline(ranks=(rank,), scheme=dense_scheme(3), micro_batches=(), phase=1) for rank in range(6)),
        ),
        loss_normaliser=max(1, sum(lengths) - len(lengths) + 4),
        update_s=0.25,
        time_s=2.0,
        lower_bound_s=1.6,
        lr_factor=draw(st.floats(0.1, 10)),
        switch_s=draw(st.floats(0, 1)),
    )


def batch_of(plan):
    packs = [m.pack for pipeline in plan.pipelines for m in pipeline.micro_batches]
    return GlobalBatch(
        step=plan.step,
        ids=tuple(i for pack in packs for i in pack.ids),
        lengths=tuple(n for pack in packs for n in pack.lengths),
    )


@given(plans())
def test_json_round_trip_is_the_identity(plan):
    again = StepPlan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    assert again.digest == plan.digest


@given(plans())
def test_a_plan_covers_its_own_batch_and_no_other(plan):
    batch = batch_of(plan)
    plan.check_covers(batch)
    fewer = GlobalBatch(step=batch.step, ids=batch.ids[1:], lengths=batch.lengths[1:])
    with pytest.raises(CheckError, match="adds"):
        plan.check_covers(fewer)
    other = GlobalBatch(step=batch.step, ids=batch.ids, lengths=(batch.lengths[0] + 1, *batch.lengths[1:]))
    with pytest.raises(CheckError, match="loses"):
        plan.check_covers(other)


@given(plans())
def test_gap_is_time_over_bound(plan):
    assert plan.gap == pytest.approx(0.25)


def example():
    return StepPlan(
        step=3,
        policy="auto",
        pipelines=(
            Pipeline(
                ranks=(0,),
                scheme=dense_scheme(2),
                micro_batches=(
                    PlannedMicroBatch(pack=Pack(ids=(0, 1), lengths=(4, 2), padded_to=4), time_s=1, peak_bytes=8),
                ),
            ),
        ),
        loss_normaliser=4,
        update_s=0.0,
        time_s=1.0,
        lower_bound_s=1.0,
    )


def test_padding_counts_against_computed_tokens():
    assert example().num_computed_tokens == 8
    assert example().padding_fraction == pytest.approx(0.25)


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
@pytest.mark.parametrize("name", ["time_s", "comm_s", "weights_s"])
def test_a_micro_batch_takes_seconds(name, seconds):
    with pytest.raises(InputError, match=f"{name} of a planned micro-batch is {seconds}; seconds are at least 0"):
        PlannedMicroBatch(**{"pack": Pack(ids=(0,), lengths=(4,)), "time_s": 1, "peak_bytes": 8, name: seconds})


def test_a_plan_of_numpys_numbers_has_the_digest_of_its_file():
    plan = replace(example(), time_s=np.float64(0.2), update_s=np.float64(0.1))
    assert StepPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_a_changed_file_is_noticed_by_its_digest():
    document = example().to_json() | {"loss_normaliser": 5}
    with pytest.raises(CheckError, match="changed after it was written"):
        StepPlan.from_json(document)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"schema_version": 99}, "schema 99"), ({"pipelines": [{}]}, "not a plan"), ({"schemes": []}, "not a plan")],
)
def test_a_document_that_is_no_plan_is_refused(change, message):
    with pytest.raises(InputError, match=message):
        StepPlan.from_json(example().to_json() | change)


def test_a_wrong_loss_normaliser_is_noticed():
    with pytest.raises(CheckError, match="divides the loss by 5; the batch has 4 targets"):
        replace(example(), loss_normaliser=5).check_covers(GlobalBatch(step=3, ids=(0, 1), lengths=(4, 2)))


@pytest.mark.parametrize("ranks", [((0,), (0,)), ((0,), (2,)), ((1,), (2,))])
def test_pipelines_must_tile_the_ranks(ranks):
    with pytest.raises(InputError, match="must tile"):
        replace(
            example(),
            pipelines=tuple(Pipeline(ranks=r, scheme=dense_scheme(2), micro_batches=()) for r in ranks),
        )


def test_ranks_that_no_pipeline_uses_are_said_and_written():
    idle = replace(example(), num_devices=example().num_devices + 3)
    assert idle.holdings(0)[-3:] == (None,) * 3
    assert idle.strategies[0].num_idle == 3 and idle.strategies[0].num_devices == idle.num_devices
    used = example().num_devices
    assert idle.strategy_words == f"{example().strategy_words} on {used} of {used + 3} devices"
    assert StepPlan.from_json(idle.to_json()) == idle
    assert "num_devices" not in example().to_json()
    assert idle.digest != example().digest


def test_more_ranks_than_the_cluster_has_are_refused():
    two = tuple(Pipeline(ranks=(rank,), scheme=dense_scheme(2), micro_batches=()) for rank in range(2))
    with pytest.raises(InputError, match="pipelines use 2 ranks, the cluster has 1"):
        replace(example(), pipelines=two, num_devices=1)


def test_sharded_gradients_are_part_of_a_plan():
    kept = uniform_scheme(3, degree=2, method=Method.RING)
    plan, other = (
        replace(example(), pipelines=(Pipeline(ranks=(1, 0), scheme=scheme, micro_batches=()),), num_devices=4)
        for scheme in (kept, replace(kept, shard_gradients=True))
    )
    assert StepPlan.from_json(json.loads(json.dumps(other.to_json()))) == other
    assert plan.digest != other.digest and "shard_gradients" not in plan.to_json()["schemes"][0]
    assert other.gradient_shares(0) == (None,) * 4, "without a micro-batch there are no gradients"


def test_split_backwards_are_part_of_a_plan():
    whole = uniform_scheme(3, degree=2, stages=2, method=Method.RING)
    micro_batch = PlannedMicroBatch(pack=Pack(ids=(1,), lengths=(4,)), time_s=3.0, peak_bytes=1)
    plan, split, later = (
        replace(example(), pipelines=(Pipeline(ranks=(3, 1, 0, 2), scheme=scheme, micro_batches=(m,)),), num_devices=4)
        for scheme, m in (
            (whole, micro_batch),
            (replace(whole, zero_bubble=True), micro_batch),
            (replace(whole, zero_bubble=True), replace(micro_batch, weights_s=0.7)),
        )
    )
    assert len({plan.digest, split.digest, later.digest}) == 3
    for one in (split, later):
        assert StepPlan.from_json(json.loads(json.dumps(one.to_json()))) == one
    assert "zero_bubble" not in plan.to_json()["schemes"][0]
    with pytest.raises(InputError, match="backwards are not split with activations on the host"):
        replace(later.pipelines[0], micro_batches=(replace(micro_batch, tile_tokens=5),))


@given(plans())
def test_any_change_changes_the_digest(plan):
    first = plan.pipelines[0]
    m = first.micro_batches[0]
    changed = (
        replace(m, comm_s=m.comm_s + 1.0),
        replace(m, peak_bytes=m.peak_bytes + 1),
        replace(m, recompute=(False,) * 3),
        replace(m, offload=(True, False, False)),
        replace(m, tile_tokens=17),
        replace(m, head_groups=3),
        replace(m, keep_attention=True),
        replace(m, pack=replace(m.pack, padded_to=m.pack.num_tokens + 9)),
    )
    others = [replace(first, micro_batches=(each, *first.micro_batches[1:])) for each in changed]
    others += [replace(first, state_bytes=first.state_bytes + 1), replace(first, micro_batches=())]
    plans_ = [replace(plan, pipelines=(other, *plan.pipelines[1:])) for other in others]
    plans_ += [replace(plan, switch_s=plan.switch_s + 1), replace(plan, step=plan.step + 1)]
    assert len({plan.digest, *(each.digest for each in plans_)}) == len(plans_) + 1


@given(plans())
def test_each_rank_works_in_one_pipeline_per_phase(plan):
    assert plan.num_phases == 2
    assert [[p.scheme.degree for p in plan.pipelines_of(phase) if 4 in p.ranks] for phase in range(2)] == [[2], [1]]
    assert all(strategy.num_devices == plan.num_devices == 6 for strategy in plan.strategies)


@given(plans())
def test_ranks_hold_what_their_place_among_the_sorted_ranks_of_a_stage_says_and_idle_ones_nothing(plan):
    held = plan.holdings(0)
    assert len(held) == 6
    assert [(one.first, one.end, one.shard, one.num_shards) for one in (held[r] for r in (0, 1, 3, 4))] == [
        (0, 1, 0, 2), (0, 1, 1, 2), (1, 3, 0, 2), (1, 3, 1, 2)
    ]  # fmt: skip
    assert held[2].has_input and held[2].has_output and held[2].num_shards == 1
    assert held[5] is None, "its pipeline has no micro-batch"
    assert plan.holdings(1) == (None,) * 6


@given(plans(), st.permutations(range(6)))
def test_holdings_follow_the_ranks_wherever_they_are(plan, names):
    moved = replace(
        plan, pipelines=tuple(replace(p, ranks=tuple(names[rank] for rank in p.ranks)) for p in plan.pipelines)
    )
    before, after = plan.holdings(0), moved.holdings(0)
    for stage in moved.pipelines[0].ranks_of(0), moved.pipelines[0].ranks_of(1):
        assert list(stage) == sorted(stage)
        assert [after[rank].shard for rank in stage] == [0, 1]
    layers = [(one and (one.first, one.end)) for one in before]
    assert [(one and (one.first, one.end)) for one in (after[names[rank]] for rank in range(6))] == layers


@pytest.mark.parametrize("phases", [(1,), (0, 2)])
def test_phases_count_from_zero_without_gaps(phases):
    pipelines = tuple(Pipeline(ranks=(0,), scheme=dense_scheme(1), micro_batches=(), phase=phase) for phase in phases)
    with pytest.raises(InputError, match="phases must count from 0"):
        StepPlan(
            step=0, policy="any", pipelines=pipelines, loss_normaliser=1, update_s=0.0, time_s=0.0, lower_bound_s=0.0
        )


def test_phases_tile_the_same_ranks():
    pipelines = (
        Pipeline(ranks=(0,), scheme=dense_scheme(1), micro_batches=()),
        Pipeline(ranks=(0,), scheme=dense_scheme(1), micro_batches=(), phase=1),
        Pipeline(ranks=(1,), scheme=dense_scheme(1), micro_batches=(), phase=1),
    )
    with pytest.raises(InputError, match="same ranks"):
        StepPlan(
            step=0, policy="any", pipelines=pipelines, loss_normaliser=1, update_s=0.0, time_s=0.0, lower_bound_s=0.0
        )
