from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.errors import InputError
from lengthwise.core.pass_order import PassKind, PipelineSchedule, issue_order
from lengthwise.core.pipeline_config import (
    Method,
    PipelineConfig,
    Strategy,
    WeightPlacement,
    WeightShard,
    dense_scheme,
    homogeneous,
    spread,
    uniform_scheme,
)


def sharded(degree=2, stage_layers=(2, 1), methods=(Method.METP,) * 3, **more):
    return PipelineConfig(
        degree=degree,
        stage_layers=stage_layers,
        methods=methods,
        recompute=(False,) * len(methods),
        weights=WeightPlacement.SHARDED,
        **more,
    )


def test_stages_hold_consecutive_layers():
    assert [list(sharded().layers_of_stage(stage)) for stage in range(2)] == [[0, 1], [2]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"degree": 0}, "degree >= 1"),
        ({"stage_layers": (3, 0)}, "at least one layer"),
        ({"stage_layers": [2, 1]}, r"stage_layers of a scheme is a tuple, not \[2, 1\]"),
        ({"stage_layers": (1.5, 1.5)}, "whole numbers of layers, not 1.5"),
        ({"degree": 2.0}, "degree of a scheme is a whole number, not 2.0"),
        ({"zero_bubble": "all"}, "zero_bubble of a scheme is a bool, not 'all'"),
        ({"stage_layers": (2, 2)}, "4 layers, but there are 3 methods"),
        ({"methods": (Method.ULYSSES,) * 3}, "needs whole weights"),
        ({"methods": (Method.DENSE,) * 3}, "degree must be 1"),
        ({"offload": (True, False)}, "2 offload flags for 3 layers"),
        ({"tile_tokens": -1}, "at least 1 token, or 0 for all, not -1"),
        ({"head_groups": 0}, "0 groups of heads: a scheme has at least 1"),
        ({"shard_gradients": True}, "whole weights, two at least; a scheme of degree 2 with sharded weights"),
        ({"zero_bubble": True}, "the weights whole, under all_gather, dense, ring, ulysses, ulysses_ring, not metp"),
        ({"head_groups": 2}, "only with layers under dense, ulysses, ulysses_z, not metp alone"),
    ],
)
def test_a_scheme_that_cannot_run_is_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        sharded(**arguments)


def test_homogeneous_strategies_tile_consecutive_ranks():
    strategy = homogeneous(sharded(), 8)
    assert strategy.ranks == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert strategy.num_devices == 8
    with pytest.raises(InputError, match="6 devices cannot be tiled by pipelines of 4"):
        homogeneous(sharded(), 6)


def test_a_scheme_needs_all_its_ranks():
    with pytest.raises(InputError, match="needs 4 ranks, not 1"):
        Strategy(schemes=(sharded(),), ranks=((0,),))


def test_dense_holds_the_whole_model_on_one_device():
    assert dense_scheme(5).num_devices == 1


def test_uniform_schemes_spread_layers_and_recompute_evenly():
    scheme = uniform_scheme(7, degree=2, stages=3, method=Method.RING, recomputed=3)
    assert scheme.stage_layers == (3, 2, 2)
    assert scheme.num_recomputed == 3
    assert [sum(scheme.recompute[i] for i in scheme.layers_of_stage(stage)) for stage in range(3)] == [1, 1, 1]
    assert scheme.weights is WeightPlacement.WHOLE
    offloaded = uniform_scheme(7, degree=2, method=Method.RING, recomputed=3, offloaded=7, tile_tokens=64)
    assert offloaded.num_offloaded == 7 and offloaded.is_offloaded(6) and not scheme.is_offloaded(6)
    assert (scheme.name, offloaded.name) == ("<2,3> ring r3", "<2,1> ring r3 o7 t64")
    assert replace(offloaded, offload=(False,) * 7, tile_tokens=0) == replace(scheme, stage_layers=(7,))
    assert replace(offloaded, shard_gradients=True).name == "<2,1> ring r3 o7 t64 z2"
    assert uniform_scheme(2, degree=2, method=Method.METP).weights is WeightPlacement.SHARDED


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"stage_layers": (7,)}, "a scheme of 1 stage has none"),
        ({"shard_gradients": True}, "no gradients of weights that ranks could reduce"),
        ({"offload": (True,) * 7}, "not split with activations on the host, tiles, groups of heads or slices"),
        ({"tile_tokens": 64}, "not split with activations on the host, tiles, groups of heads or slices"),
    ],
)
def test_split_backwards_are_refused_where_they_cannot_be(others, message):
    split = replace(uniform_scheme(7, degree=2, stages=3, method=Method.RING, recomputed=3), zero_bubble=True)
    assert split.name == "<2,3> ring r3 zb"
    with pytest.raises(InputError, match=message):
        replace(split, **others)


@pytest.mark.parametrize(("count", "total"), [(0, 5), (5, 5), (3, 8), (1, 1)])
def test_spread_sets_as_many_flags_as_asked(count, total):
    assert sum(spread(count, total)) == count
    assert len(spread(count, total)) == total


def test_more_stages_than_layers_are_refused():
    with pytest.raises(InputError, match="2 layers cannot form 3 stages"):
        uniform_scheme(2, stages=3)


FORWARD, BACKWARD, _ = PassKind


@given(st.integers(1, 6), st.integers(0, 9), st.sampled_from(PipelineSchedule))
def test_every_stage_runs_each_pass_once_and_a_forward_before_its_backward(num_stages, count, schedule):
    for stage in range(num_stages):
        order = issue_order(stage, num_stages=num_stages, num_micro_batches=count, schedule=schedule)
        assert sorted(order) == [(kind, i) for kind in (FORWARD, BACKWARD) for i in range(count)]
        assert all(order.index((FORWARD, i)) < order.index((BACKWARD, i)) for i in range(count))
        for kind in (FORWARD, BACKWARD):  # messages between two stages arrive in the order they are sent
            assert [i for other, i in order if other is kind] == list(range(count))


@given(st.integers(1, 6), st.integers(0, 9))
def test_1f1b_keeps_no_more_micro_batches_than_there_are_stages_left_and_gpipe_keeps_all(num_stages, count):
    for stage in range(num_stages):
        for schedule, most in (
            (PipelineSchedule.ONE_F_ONE_B, min(count, num_stages - stage)),
            (PipelineSchedule.GPIPE, count),
        ):
            order = issue_order(stage, num_stages=num_stages, num_micro_batches=count, schedule=schedule)
            held = [0]
            for kind, _ in order:
                held.append(held[-1] + (-1 if kind is BACKWARD else 1))
            assert (max(held), held[-1]) == (most, 0)


def test_the_last_stage_alternates_and_the_first_warms_up():
    assert issue_order(2, num_stages=3, num_micro_batches=2) == [
        (FORWARD, 0), (BACKWARD, 0), (FORWARD, 1), (BACKWARD, 1)
    ]  # fmt: skip
    assert issue_order(0, num_stages=3, num_micro_batches=4) == [
        (FORWARD, 0), (FORWARD, 1), (FORWARD, 2), (BACKWARD, 0), (FORWARD, 3), (BACKWARD, 1),
        (BACKWARD, 2), (BACKWARD, 3),
    ]  # fmt: skip


def test_gpipe_runs_all_forwards_then_all_backwards():
    assert issue_order(0, num_stages=2, num_micro_batches=2, schedule=PipelineSchedule.GPIPE) == [
        (FORWARD, 0), (FORWARD, 1), (BACKWARD, 0), (BACKWARD, 1)
    ]  # fmt: skip


def test_ranks_hold_the_layers_of_their_stage_and_one_shard_where_weights_are_sharded():
    held = [[sharded().holding(stage, place) for place in range(2)] for stage in range(2)]
    assert [(one.first, one.end, one.shard, one.num_shards) for stage in held for one in stage] == [
        (0, 2, 0, 2), (0, 2, 1, 2), (2, 3, 0, 2), (2, 3, 1, 2)
    ]  # fmt: skip
    assert [(one.has_input, one.has_output) for one, _ in held] == [(True, False), (False, True)]


@pytest.mark.parametrize(
    "scheme",
    [dense_scheme(3), sharded(degree=1, stage_layers=(3,)), uniform_scheme(3, degree=4, method=Method.RING)],
    ids=lambda scheme: f"{scheme.name} {scheme.weights}",
)
def test_one_stage_with_whole_weights_or_one_rank_holds_everything(scheme):
    whole = WeightShard(first=0, end=3, num_layers=3)
    assert whole.has_input and whole.has_output
    assert [scheme.holding(0, place) for place in range(scheme.degree)] == [whole] * scheme.degree
