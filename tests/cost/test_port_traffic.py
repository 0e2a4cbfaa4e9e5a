"""The price of an update is that of the slices that the runtime sends, through the busiest port or link."""

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from lengthwise.core.layout import Layout, row_bounds, sharded_by_unit
from lengthwise.core.node_exchange import landing_layout
from lengthwise.core.parameter_shapes import unit_shapes
from lengthwise.core.pipeline_config import Method, Strategy, homogeneous, uniform_scheme
from lengthwise.core.specs import ClusterSpec, ModelSpec, cluster_preset, model_preset
from lengthwise.cost.links import LINK_EFFICIENCY
from lengthwise.cost.port_traffic import hold_the_same, port_traffic
from lengthwise.cost.weight_shards import WeightTraffic

SIZES = {"num_layers": 3, "hidden_size": 3, "ffn_size": 24, "num_heads": 8, "num_kv_heads": 4, "head_size": 2}
BIASED = {"gated_ffn": False, "qkv_bias": True, "max_positions": 9}
SPECS = [
    ModelSpec(name="llama", vocab_size=37, **SIZES),
    ModelSpec(name="tied", vocab_size=37, tied_embeddings=True, qkv_bias=True, **SIZES),
    ModelSpec(name="gpt", vocab_size=37, family="gpt", tied_embeddings=True, **SIZES, **BIASED),
    ModelSpec(name="bert", vocab_size=37, family="bert", causal=False, **SIZES, **BIASED),
    ModelSpec(name="one word", vocab_size=1, **SIZES),
]
METHODS = [Method.ULYSSES, Method.MEGATRON_TS]


def random_strategy(rng, num_ranks):
    """Pipelines of any sizes that tile the ranks, on consecutive ranks or anywhere."""
    ranks, schemes, placed = list(range(num_ranks)), [], []
    if rng.random() < 0.3:
        rng.shuffle(ranks)
    most = rng.choice([1, 2, 8, num_ranks])
    while ranks:
        degree = rng.randint(1, min(most, len(ranks), 16))
        stages = rng.randint(1, min(3, len(ranks) // degree))
        method = rng.choice(METHODS) if degree > 1 else Method.DENSE
        scheme = uniform_scheme(3, degree=degree, stages=stages, method=method)
        if method is Method.ULYSSES:
            scheme = replace(scheme, shard_gradients=random.Random(str(ranks)).random() < 0.5)
        for _ in range(rng.randint(1, len(ranks) // scheme.num_devices)):
            schemes.append(scheme)
            placed.append(tuple(ranks[: scheme.num_devices]))
            ranks = ranks[scheme.num_devices :]
    return Strategy(schemes=tuple(schemes), ranks=tuple(placed))


def weights_of_ranks(strategy):
    """The shard of weights of each rank that is in a pipeline."""
    return {
        rank: scheme.holding(*divmod(place, scheme.degree))
        for scheme, ranks in zip(strategy.schemes, strategy.ranks)
        for place, rank in enumerate(ranks)
    }


def gradient_shares(strategy):
    """The share of gradients of each rank that keeps one."""
    return {
        rank: share
        for scheme, ranks in zip(strategy.schemes, strategy.ranks)
        for place, rank in enumerate(ranks)
        if (share := scheme.gradient_share(place % scheme.degree))
    }


def layouts(model, strategy, of_gradients=False):
    """Bounds of the units, who owns what, and who computes with what, or keeps its gradients."""
    units = ["input", *["layer"] * model.num_layers, "output"]
    bounds, starts = [0], {}
    for number, unit in enumerate(units):
        start = bounds[-1]
        for name, (rows, columns) in unit_shapes(model, unit).items():
            starts[number, name] = start
            start += rows * columns
        bounds.append(start)
    held_by = weights_of_ranks(strategy)
    intervals = []
    for rank in range(strategy.num_devices):
        held, mine = held_by[rank], []
        share = gradient_shares(strategy).get(rank) if of_gradients else None
        for number, unit in enumerate(units):
            before = len(mine)
            is_there = {"input": held.has_input, "output": held.has_output}.get(
                unit, held.first <= number - 1 < held.end
            )
            for name, (rows, columns) in unit_shapes(model, unit).items():
                is_tied = model.tied_embeddings and name == "embedding" and held.has_output
                cut = row_bounds(name, model, degree=held.num_shards) if held.num_shards > 1 else None
                first, end = (0, rows) if cut is None else cut[held.shard : held.shard + 2]
                if (is_there or is_tied) and first < end:
                    start = starts[number, name]
                    mine.append((start + first * columns, start + end * columns))
            if share:
                elements = np.concatenate([np.arange(a, b) for a, b in [(0, 0), *mine[before:]]])
                size = -(-len(elements) // share[1])
                kept = elements[share[0] * size : (share[0] + 1) * size]
                mine[before:] = [(kept[0], kept[-1] + 1)] if len(kept) else []
        intervals.append(tuple(mine))
    computed = Layout(num_elements=bounds[-1], intervals=tuple(intervals))
    return bounds, sharded_by_unit(bounds, strategy.num_devices), computed


def who(layout):
    """[ranks, elements] who has what."""
    has = np.zeros((layout.num_ranks, layout.num_elements), dtype=bool)
    for rank, intervals in enumerate(layout.intervals):
        for start, end in intervals:
            has[rank, start:end] = True
    return has


def counted(model, strategy, per_node, num_units=None, of_gradients=False):
    """[4, ranks] The elements of the first units, or all, that are sent and received, element by element."""
    bounds, owned, computed = layouts(model, strategy, of_gradients)
    num_ranks, traffic = strategy.num_devices, np.zeros((4, strategy.num_devices))
    owner, computes = who(owned).argmax(axis=0), who(computed)
    landed = who(landing_layout(owned, computed, ranks_per_node=per_node))
    for first, end in [*pairwise(bounds)][:num_units]:
        unit = slice(first, end)
        if computes[:, unit].all():
            shard = -(-(end - first) // num_ranks)
            for rank in range(num_ranks):
                in_node = sum(other // per_node == rank // per_node for other in range(num_ranks))
                traffic[:2, rank] += (num_ranks - in_node) * shard / in_node
                traffic[2:, rank] += (num_ranks - 1) * shard
            continue
        crosses = landed[:, unit] & (owner[unit] != np.arange(num_ranks)[:, None])
        traffic[0] += np.bincount(np.broadcast_to(owner[unit], crosses.shape)[crosses], minlength=num_ranks)
        traffic[1] += crosses.sum(axis=1)
        for node in range(0, num_ranks, per_node):
            ranks = slice(node, min(node + per_node, num_ranks))
            in_node = ranks.stop - ranks.start
            source = landed[ranks, unit].argmax(axis=0)
            moves = computes[ranks, unit] & (source != np.arange(in_node)[:, None])
            traffic[2, ranks] += np.bincount(np.broadcast_to(source, moves.shape)[moves], minlength=in_node)
            traffic[3, ranks] += moves.sum(axis=1)
    return traffic


def sides_of(traffic):
    return [traffic.sent_across, traffic.received_across, traffic.sent_within, traffic.received_within]


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.deep)])
def test_prices_are_those_of_the_bytes_that_are_sent_for_a_thousand_strategies(step):
    """Or for every fifth of them."""
    rng, device = random.Random(0), cluster_preset("H100-80GB").device
    sizes = {8: 400, 12: 100, 16: 250, 23: 50, 32: 130, 64: 40, 128: 20, 256: 10}
    assert sum(sizes.values()) == 1_000
    for num_ranks, count in sizes.items():
        for number in range(0, count, step):
            model, strategy = SPECS[number % len(SPECS)], random_strategy(rng, num_ranks)
            per_node = rng.choice([4, 8])
            found = port_traffic(model, strategy, ranks_per_node=per_node)
            expected = counted(model, strategy, per_node)
            np.testing.assert_allclose(sides_of(found), expected, err_msg=f"{num_ranks} ranks, strategy {number}")
            if number % 4 == 0:  # what a first forward waits for
                of_first = port_traffic(model, strategy, ranks_per_node=per_node, is_first=True)
                np.testing.assert_allclose(sides_of(of_first), counted(model, strategy, per_node, num_units=2))
            if number % 4 == 1:
                pushed = port_traffic(model, strategy, ranks_per_node=per_node, of_gradients=True)
                np.testing.assert_allclose(sides_of(pushed), counted(model, strategy, per_node, of_gradients=True))
            cluster = ClusterSpec.of_devices(num_ranks, device, devices_per_node=per_node)
            price_s = WeightTraffic(model=model, cluster=cluster, dtype="bfloat16").exchange_s(strategy, 2)
            ports_s = expected[:2].max() * 2 / device.network_bytes_per_s
            links_s = expected[2:].max() * 2 / device.link_bytes_per_s
            assert price_s == pytest.approx(max(ports_s, links_s) / LINK_EFFICIENCY)


def test_nothing_moves_exactly_where_each_rank_has_the_same_shard():
    rng, answers = random.Random(2), []
    for _ in range(2_000):
        one, other = (random_strategy(rng, rng.choice([2, 4])) for _ in range(2))
        if one.num_devices == other.num_devices:
            answers.append(weights_of_ranks(one) == weights_of_ranks(other))
            assert hold_the_same(one, other) == answers[-1]
            keeps_the_same = answers[-1] and gradient_shares(one) == gradient_shares(other)
            assert hold_the_same(one, other, of_gradients=True) == keeps_the_same
    assert 100 < sum(answers) < len(answers) - 100


def test_equal_pipelines_whose_weights_lie_alike_are_priced_once(monkeypatch):
    cluster, model = cluster_preset("4x8xH100-80GB"), model_preset("llama-7b")
    mover, priced = WeightTraffic(model=model, cluster=cluster, dtype="bfloat16"), []
    counted_once = WeightTraffic.exchange_s
    monkeypatch.setattr(
        WeightTraffic, "exchange_s", lambda *of, **how: priced.append(of[1]) or counted_once(*of, **how)
    )
    schemes = [
        uniform_scheme(model.num_layers, degree=4, method=Method.ULYSSES, recomputed=recomputed)
        for recomputed in range(9)
    ]
    assert len({mover.update_s(homogeneous(scheme, 32)) for scheme in schemes}) == 1
    assert len(priced) == 2, "all units, and the first ones"
    pair = homogeneous(schemes[0], 32)
    turned = Strategy(schemes=pair.schemes, ranks=pair.ranks[::-1])
    assert pair.is_homogeneous and not turned.is_homogeneous
    mover.update_s(turned)
    assert priced[2:] == [turned] * 2


def test_no_update_is_faster_than_that_of_equal_pipelines_of_one_of_its_schemes():
    """What bounds of plans rest on."""
    rng, cluster = random.Random(1), cluster_preset("4x8xH100-80GB")
    model = model_preset("llama-7b")
    mover, worst = WeightTraffic(model=model, cluster=cluster, dtype="bfloat16"), 1.0
    for _ in range(100):
        strategy = random_strategy(rng, 32)
        schemes = [replace_layers(scheme, model.num_layers) for scheme in strategy.schemes]
        strategy = Strategy(schemes=tuple(schemes), ranks=strategy.ranks)
        for scheme in set(schemes):
            if 32 % scheme.num_devices == 0:
                parts, equal = mover.update_parts(strategy), mover.update_parts(homogeneous(scheme, 32))
                worst = min(worst, parts.whole_s / equal.whole_s, parts.least_s / equal.least_s)
    assert worst == 1


def replace_layers(scheme, num_layers):
    other = uniform_scheme(num_layers, degree=scheme.degree, stages=scheme.num_stages, method=scheme.methods[0])
    return replace(other, shard_gradients=scheme.shard_gradients)
