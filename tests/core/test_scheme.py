import pytest

from lengthwise.core.errors import InputError
from lengthwise.core.scheme import (
    Method,
    Scheme,
    Strategy,
    Weights,
    dense_scheme,
    homogeneous,
    spread,
    uniform_scheme,
)


def sharded(degree=2, stage_layers=(2, 1), methods=(Method.METP,) * 3):
    return Scheme(
        degree=degree,
        stage_layers=stage_layers,
        methods=methods,
        recompute=(False,) * len(methods),
        weights=Weights.SHARDED,
    )


def test_stages_hold_consecutive_layers():
    assert [list(sharded().layers_of_stage(stage)) for stage in range(2)] == [[0, 1], [2]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"degree": 0}, "degree >= 1"),
        ({"stage_layers": (3, 0)}, "at least one layer"),
        ({"stage_layers": (2, 2)}, "4 layers, but there are 3 methods"),
        ({"methods": (Method.ULYSSES,) * 3}, "needs whole weights"),
        ({"methods": (Method.DENSE,) * 3}, "degree must be 1"),
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
    assert scheme.weights is Weights.WHOLE
    assert uniform_scheme(2, degree=2, method=Method.METP).weights is Weights.SHARDED


@pytest.mark.parametrize(("count", "total"), [(0, 5), (5, 5), (3, 8), (1, 1)])
def test_spread_sets_as_many_flags_as_asked(count, total):
    assert sum(spread(count, total)) == count
    assert len(spread(count, total)) == total


def test_more_stages_than_layers_are_refused():
    with pytest.raises(InputError, match="2 layers cannot form 3 stages"):
        uniform_scheme(2, stages=3)
