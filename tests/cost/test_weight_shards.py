"""Who holds what adds up to the model, and moving it costs what the layouts' transfers count."""

from dataclasses import replace

import pytest

from lengthwise.core.layout import Layout, sharded_by_unit, transfers
from lengthwise.core.pipeline_config import Method, Strategy, WeightPlacement, homogeneous
from lengthwise.core.specs import MODELS, cluster_preset, model_preset
from lengthwise.cost.links import LINK_EFFICIENCY
from lengthwise.cost.weight_shards import WeightTraffic, held_params, largest_held_params
from tests.cost.profiles import scheme_of

MODEL = model_preset("llama-7b")
NODE = cluster_preset("8xH100-80GB")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_stages_hold_the_model_between_them(name, stages):
    model = model_preset(name)
    scheme = scheme_of(model, Method.ULYSSES, degree=2, stages=stages)
    copied = model.vocab_size * model.hidden_size if model.tied_embeddings and stages > 1 else 0
    assert sum(held_params(model, scheme, stage=stage) for stage in range(stages)) == model.num_params + copied


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_sharded_weights_are_split_and_norms_are_not(degree):
    scheme = scheme_of(MODEL, Method.METP, degree=degree)
    norms = (2 * MODEL.num_layers + 1) * MODEL.hidden_size
    assert held_params(MODEL, scheme, stage=0) == (MODEL.num_params - norms) // degree + norms


@pytest.mark.parametrize("name", ["bert-1024", "gpt-12288"])
def test_positions_and_output_biases_are_not_split(name):
    model = replace(model_preset(name), vocab_size=30_464)
    whole = model.num_layers * model.layer_whole_params + model.input_whole_params + model.output_whole_params
    assert model.layer_whole_params == 6 * model.hidden_size  # two norms of two and the biases of proj and down
    assert whole > model.max_positions * model.hidden_size
    scheme = scheme_of(model, Method.METP, degree=8)
    assert held_params(model, scheme, stage=0) == (model.num_params - whole) // 8 + whole


@pytest.mark.parametrize(
    ("stages", "degree", "shards"), [(1, 1, 1), (1, 2, 1), (2, 1, 1), (2, 2, 1), (1, 2, 2), (2, 2, 2), (1, 8, 8)]
)
def test_a_pull_fetches_what_a_rank_holds_but_for_the_nth_part_that_it_owns(stages, degree, shards):
    """Exactly so where weights are whole; where they are sharded, in the mean over which ranks hold which shards."""
    num_ranks, num_layers, layer_size = 8, 8, 64
    held = []
    for rank in range(num_ranks):
        stage, place = divmod(rank % (stages * degree), degree)
        width = layer_size // shards
        layers = range(stage * num_layers // stages, (stage + 1) * num_layers // stages)
        starts = [layer * layer_size + place % shards * width for layer in layers]
        held.append(tuple((start, start + width) for start in starts))
    size = num_layers * layer_size
    owned = sharded_by_unit(range(0, size + 1, layer_size), num_ranks)
    fetched = []
    for turn in range(num_ranks):
        moves = transfers(owned, Layout(num_elements=size, intervals=tuple(held[turn:] + held[:turn])))
        fetched.append(sum(move.num_elements for move in moves if move.source != move.target))
    expected = num_ranks * size / stages / shards * (num_ranks - 1) / num_ranks
    assert sum(fetched) / num_ranks == expected
    assert shards > 1 or set(fetched) == {expected}


@pytest.mark.parametrize(
    "scheme",
    [
        scheme_of(MODEL, Method.DENSE, degree=1),
        scheme_of(MODEL, Method.ULYSSES, degree=4),
        scheme_of(MODEL, Method.METP, degree=4),
        scheme_of(MODEL, Method.MEGATRON_TS, degree=2, stages=4),
    ],
    ids=lambda scheme: scheme.name,
)
def test_within_a_node_a_move_takes_what_the_link_needs(scheme):
    mover = WeightTraffic(model=MODEL, cluster=NODE, dtype="bfloat16")
    moved = largest_held_params(MODEL, scheme) * 7 / 8
    rate = LINK_EFFICIENCY * NODE.device.link_bytes_per_s
    strategy = homogeneous(scheme, 8)
    exchange_s = mover.exchange_s(strategy, 2)
    own_rows = (
        0.15 if scheme.weights is WeightPlacement.SHARDED else 1e-6
    )  # a shard's rows are not an eighth of each unit
    assert exchange_s == pytest.approx(moved * 2 / rate, rel=own_rows)
    optimizer_s = 8 * 4 * MODEL.num_params / 8 / NODE.device.memory_bytes_per_s
    assert mover.update_s(strategy) == pytest.approx(exchange_s * (4 + 2) / 2 + optimizer_s)


def test_updates_take_longer_across_nodes_and_for_larger_models():
    mover = WeightTraffic(model=MODEL, cluster=cluster_preset("2x8xH100-80GB"), dtype="bfloat16")
    scheme = scheme_of(MODEL, Method.DENSE, degree=1)
    within, across = (mover.update_s(homogeneous(scheme, n)) for n in (8, 16))
    assert 0.05 < within < across < 5
    smaller = WeightTraffic(model=model_preset("qwen2.5-0.5b"), cluster=mover.cluster, dtype="bfloat16")
    assert smaller.update_s(homogeneous(scheme_of(smaller.model, Method.DENSE, degree=1), 16)) < across


def test_a_node_fetches_each_slice_once():
    cluster = cluster_preset("2x8xA800-80GB")
    mover = WeightTraffic(model=MODEL, cluster=cluster, dtype="bfloat16")
    ports = 8 * cluster.device.network_bytes_per_s * LINK_EFFICIENCY
    across_s = MODEL.num_params * 2 * 8 / 16 / ports
    whole, sharded = (homogeneous(scheme_of(MODEL, m, degree=8), 16) for m in (Method.RING, Method.METP))
    assert mover.exchange_s(whole, 2) == pytest.approx(MODEL.num_params * 2 * 15 / 16 / 200e9 / LINK_EFFICIENCY)
    assert mover.exchange_s(sharded, 2) == pytest.approx(across_s, rel=0.01)  # norms are not split


def test_switching_costs_nothing_where_every_rank_keeps_its_slice():
    mover = WeightTraffic(model=MODEL, cluster=NODE, dtype="bfloat16")
    whole = [homogeneous(scheme_of(MODEL, method, degree=p), 8)
             for method, p in ((Method.DENSE, 1), (Method.RING, 8), (Method.ULYSSES, 2))]  # fmt: skip
    sharded = [homogeneous(scheme_of(MODEL, method, degree=4), 8) for method in (Method.METP, Method.ULYSSES_Z)]
    for kept in (whole, sharded):
        assert all(mover.switch_s(before, after) == 0 for before in kept for after in kept)
    staged = homogeneous(scheme_of(MODEL, Method.ULYSSES, degree=2, stages=2), 8)
    for before, after in ((whole[0], sharded[0]), (sharded[0], whole[0]), (whole[0], staged), (sharded[0], staged)):
        expected = mover.exchange_s(before, 4) + mover.exchange_s(after, 2)
        assert mover.switch_s(before, after) == expected > 0


def test_mixed_strategies_move_as_slowly_as_their_fullest_rank():
    mover = WeightTraffic(model=MODEL, cluster=NODE, dtype="bfloat16")
    dense, split = scheme_of(MODEL, Method.DENSE, degree=1), scheme_of(MODEL, Method.METP, degree=4)
    mixed = Strategy(schemes=(split, dense, dense, dense, dense), ranks=((0, 1, 2, 3), (4,), (5,), (6,), (7,)))
    assert mover.exchange_s(mixed, 2) == mover.exchange_s(homogeneous(dense, 8), 2)
    assert (split.holding(0, 2).shard, split.holding(0, 2).num_shards) == (2, 4)
