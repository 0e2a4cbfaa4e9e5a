"""The analytic model grows, adds up, and charges recompute, rings, stages and gathered weights as derived."""

import pickle
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.core.errors import InputError
from lengthwise.core.pipeline_config import Method, PipelineConfig, WeightPlacement, dense_scheme, spread
from lengthwise.core.specs import ClusterSpec, cluster_preset, model_preset
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.cost.analytic.stage_time import LAUNCH_S, layer_flops_per_s
from lengthwise.cost.analytic.volume import layer_volume
from lengthwise.cost.links import (
    LINK_EFFICIENCY,
    collective_bytes_per_s,
    exchange_bytes_per_s,
    hop_bytes_per_s,
    ring_call_s,
    stage_hop_bytes_per_s,
)
from lengthwise.cost.memory_model import kept_bytes_per_layer
from tests.cost.profiles import PARALLEL, kept_bytes_per_token, scheme_of
from tests.examples import examples

GIB = 2**30
COUNTED = [
    ("metp", 524288, True, 8.71), ("ulysses_z", 4096, False, 2.80), ("ulysses_z", 4096, True, 2.80),
    ("ulysses_z", 65536, False, 5.63), ("ulysses_z", 65536, True, 3.87),
    ("megatron_ts", 65536, False, 5.69), ("megatron_ts", 65536, True, 4.84), ("ulysses_ring", 65536, False, 8.56),
    ("ulysses_ring", 65536, True, 7.19), ("ring", 65536, False, 8.57), ("ring", 65536, True, 7.78),
]  # fmt: skip
"""Method, tokens, recompute and GiB at the peak of a dry run: two layers of llama-7b on eight ranks."""
COUNTED_WITH_SHARES = [
    ((4,), 0, 4096, 6.44, 6.35), ((4,), 0, 65536, 10.47, 7.81),
    ((2, 2), 0, 4096, 5.71, 5.69), ((2, 2), 0, 65536, 13.84, 8.88),
    ((2, 2), 1, 4096, 5.49, 5.50), ((2, 2), 1, 65536, 10.18, 8.56),
]  # fmt: skip
"""Layers of stages, the stage, tokens, and GiB without and with recompute at the peak of a dry run: llama-7b on eight
ranks that share layers by ulysses and keep shares of gradients."""
MODEL = model_preset("llama-7b")
CLUSTER = cluster_preset("2x8xA800-80GB")
COST = AnalyticCost(model=MODEL, cluster=CLUSTER)
MATMUL_FLOPS_PER_S = layer_flops_per_s(MODEL, CLUSTER.device, "bfloat16")
ATTENTION_FLOPS_PER_S = CLUSTER.device.attention_flops_per_s("bfloat16")
DENSE = dense_scheme(MODEL.num_layers)
SCHEMES = [DENSE, *(scheme_of(MODEL, method, stages=2, recomputed=5) for method in PARALLEL)]
MIXED = PipelineConfig(
    degree=4,
    stage_layers=(10, 12, 10),
    methods=(Method.MEGATRON_TS,) * 10 + (Method.MEGATRON_CZ,) * 12 + (Method.METP,) * 10,
    recompute=spread(7, 32),
    weights=WeightPlacement.SHARDED,
)


@pytest.mark.parametrize("scheme", [*SCHEMES, MIXED], ids=lambda scheme: scheme.name)
def test_times_and_bytes_grow_with_every_length(scheme):
    @settings(max_examples=examples(30))
    @given(st.lists(st.integers(1, 10**6), min_size=1, max_size=8), st.integers(1, 1000))
    def check(lengths, more):
        longer = [lengths[0] + more, *lengths[1:]]
        assert COST.time_s(longer, scheme) > COST.time_s(lengths, scheme)
        few, many = COST.peak_bytes([sum(lengths), sum(longer)], scheme, num_devices=16)
        assert few < many

    check()


@pytest.mark.parametrize("scheme", [*SCHEMES, MIXED], ids=lambda scheme: scheme.name)
def test_a_pack_costs_its_sequences_and_one_overhead(scheme):
    lengths = np.array([500, 20, 30_000])
    parts = COST.sequence_times_s(lengths, scheme)
    assert COST.time_s(lengths.tolist(), scheme) == pytest.approx(parts.sum() + COST.overhead_s(scheme))
    assert COST.time_s([30_520], scheme) > COST.time_s(lengths.tolist(), scheme)  # attention ends with a sequence
    communication = COST.comm_times_s(lengths, scheme)
    assert ((communication >= 0) & (communication < parts)).all()


def test_one_device_does_the_models_flops_at_the_stated_shares():
    lengths = np.array([1, 1000, 100_000])
    attention = 6.0 * MODEL.num_layers * MODEL.num_heads * MODEL.head_size * lengths.astype(float) ** 2
    device, head = CLUSTER.device, 6.0 * MODEL.hidden_size * MODEL.vocab_size * lengths
    layers = MODEL.train_flops(lengths) - attention - head
    moved_bytes = device.activation_passes * MODEL.num_layers * kept_bytes_per_layer(MODEL, 2) * lengths
    expected = (layers + head) / (device.matmul_share * device.flops_per_s) + attention / ATTENTION_FLOPS_PER_S
    expected += moved_bytes / device.memory_bytes_per_s
    assert layers / MATMUL_FLOPS_PER_S == pytest.approx(
        expected - (head / device.matmul_flops_per_s("bfloat16") + attention / ATTENTION_FLOPS_PER_S)
    )
    assert COST.sequence_times_s(lengths, DENSE) == pytest.approx(expected)
    assert COST.comm_times_s(lengths, DENSE).tolist() == [0, 0, 0]
    assert COST.overhead_s(DENSE) == pytest.approx(LAUNCH_S * 32)


@pytest.mark.parametrize("method", [Method.DENSE, *PARALLEL])
def test_recompute_costs_exactly_one_more_forward_of_its_layers(method):
    degree = 1 if method is Method.DENSE else 4
    lengths = np.array([100.0, 50_000.0])
    none, some, every = (scheme_of(MODEL, method, degree=degree, recomputed=r) for r in (0, 8, 32))
    more_s, all_more_s = (
        COST.sequence_times_s(lengths, s) - COST.sequence_times_s(lengths, none) for s in (some, every)
    )
    assert all_more_s == pytest.approx(4 * more_s)
    forward = layer_volume(MODEL, method, degree=degree, dtype="bfloat16").forward
    attention_s = forward.attention_flops * lengths**2 / ATTENTION_FLOPS_PER_S
    hops_s = forward.tokens.ring * lengths / hop_bytes_per_s(degree, CLUSTER)
    sent_s = (forward.tokens.num_bytes - forward.tokens.ring) * lengths / collective_bytes_per_s(degree, CLUSTER)
    matmul_s = forward.matmul_flops * lengths / MATMUL_FLOPS_PER_S
    assert more_s == pytest.approx(8 * (matmul_s + np.maximum(attention_s, hops_s) + sent_s))
    assert COST.overhead_s(some) - COST.overhead_s(none) == pytest.approx(
        (COST.overhead_s(every) - COST.overhead_s(none)) / 4
    )


def test_hops_hide_behind_the_attention_of_long_sequences_only():
    scheme = scheme_of(MODEL, Method.RING, degree=8)
    short, long = COST.comm_times_s(np.array([1000, 1_000_000]), scheme)
    assert short > 0
    assert long == 0
    attention = 6.0 * MODEL.num_layers * MODEL.num_heads * MODEL.head_size * 1e12 / 8
    rest = float(COST.sequence_times_s(np.array([1]), DENSE)[0]) / 8
    expected = attention / ATTENTION_FLOPS_PER_S
    assert COST.sequence_times_s(np.array([1_000_000]), scheme)[0] == pytest.approx(expected + rest * 1e6, rel=1e-3)


def test_gathering_weights_is_paid_per_micro_batch_and_not_per_token():
    whole, gathered = (scheme_of(MODEL, method, degree=8) for method in (Method.ULYSSES, Method.ULYSSES_Z))
    more_s = COST.overhead_s(gathered) - COST.overhead_s(whole)
    moved = MODEL.num_layers * MODEL.layer_matmul_params * 7 / 8 * (2 + 2 + 4)
    assert more_s == pytest.approx(moved / collective_bytes_per_s(8, CLUSTER), rel=0.2)  # and latencies
    assert more_s > moved / collective_bytes_per_s(8, CLUSTER)
    per_token = COST.sequence_times_s(np.array([1000.0]), gathered) - COST.sequence_times_s(np.array([1000.0]), whole)
    vocabulary = 2 * (1 / 8 + 1) * 7 / 8 * MODEL.hidden_size * 2 * 1000  # after the split embedding, around the head
    assert per_token[0] == pytest.approx(vocabulary / collective_bytes_per_s(8, CLUSTER))


def test_a_stage_is_priced_by_the_slowest_of_the_pipeline():
    lengths = np.array([10, 1000, 100_000])
    two = scheme_of(MODEL, Method.DENSE, degree=1, stages=2)
    head_s = 6 * MODEL.hidden_size * MODEL.vocab_size * lengths / CLUSTER.device.matmul_flops_per_s("bfloat16")
    handed_s = 2 * MODEL.hidden_size * 2 * lengths / hop_bytes_per_s(2, CLUSTER)
    half_s = (COST.sequence_times_s(lengths, DENSE) - head_s) / 2
    assert COST.sequence_times_s(lengths, two) == pytest.approx(half_s + head_s + handed_s)
    assert COST.comm_times_s(lengths, two) == pytest.approx(handed_s)
    uneven = replace(two, stage_layers=(24, 8))
    assert (COST.sequence_times_s(lengths, uneven) > COST.sequence_times_s(lengths, two)).all()


def test_each_length_is_priced_by_the_stage_that_it_costs_most():
    alone = [
        replace(MIXED, stage_layers=(n,), methods=MIXED.methods[at : at + n], recompute=MIXED.recompute[at : at + n])
        for at, n in ((0, 10), (10, 12), (22, 10))
    ]
    slowest = np.zeros(4)
    lengths = np.array([10, 3000, 40_000, 900_000])
    for part in alone:
        model = replace(MODEL, num_layers=part.num_layers)
        slowest = np.maximum(slowest, AnalyticCost(model=model, cluster=CLUSTER).sequence_times_s(lengths, part))
    # each part alone also has an embedding, a head and no neighbours, which is little
    assert COST.sequence_times_s(lengths, MIXED) == pytest.approx(slowest, rel=0.1)


def test_bytes_of_a_dense_model_are_those_counted_on_its_operators():
    for recompute in (False, True):
        scheme = dense_scheme(MODEL.num_layers, recompute=recompute)
        few, many = COST.peak_bytes(np.array([2**20, 2**21]), scheme, num_devices=16)
        expected = kept_bytes_per_token(MODEL, dtype="bfloat16", recompute=recompute)
        # In the last layer's backward the loss is gone; gradients of gate and up are there, and that of the output.
        expected += 2 * (2 * MODEL.ffn_size + MODEL.hidden_size - 3 * MODEL.hidden_size)
        assert (many - few) / 2**20 == pytest.approx(expected)


def test_the_first_stage_keeps_as_many_micro_batches_as_there_are_stages():
    def per_token(stages):
        few, many = COST.peak_bytes([10**6, 2 * 10**6], scheme_of(MODEL, Method.DENSE, 1, stages), num_devices=16)
        return (many - few) / 1e6

    outputs = 4 * MODEL.hidden_size * 2  # which the second stage has got
    assert per_token(4) == pytest.approx(per_token(1) + outputs, rel=1e-6)


def test_the_last_stage_holds_the_loss():
    model = replace(MODEL, num_layers=2, vocab_size=10**6)
    cost = AnalyticCost(model=model, cluster=CLUSTER)
    scheme = dense_scheme(2)
    state = model.num_params * (2 + 4) + 16 * -(-model.num_params // 16)
    fixed = int(cost.peak_bytes(0, scheme, num_devices=16))
    assert fixed == state + (4 + 2) * model.hidden_size * model.vocab_size  # its gradient at both precisions


def test_logits_of_short_packs_are_no_full_chunk():
    model = replace(MODEL, num_layers=2)
    scheme, tokens = dense_scheme(2), np.array([3000, 4000, 10**4])
    peaks = AnalyticCost(model=model, cluster=CLUSTER).peak_bytes(tokens, scheme, num_devices=16)
    kept = kept_bytes_per_token(model, dtype="bfloat16", recompute=False)
    assert peaks[1] - peaks[0] == pytest.approx(1000 * (kept + (4 + 2) * model.vocab_size), rel=1e-6)
    assert peaks[2] - peaks[1] == pytest.approx(6000 * kept + (4 + 2) * (2**27 - 4000 * model.vocab_size), rel=1e-6)


def test_more_recomputed_layers_hold_more_tokens_and_metp_the_most():
    most = [COST.max_tokens(scheme_of(MODEL, Method.ULYSSES, recomputed=r), num_devices=16) for r in (0, 8, 16, 32)]
    assert most == sorted(most)
    assert most[-1] > 2 * most[0]
    by_method = {method: COST.max_tokens(scheme_of(MODEL, method), num_devices=16) for method in PARALLEL}
    assert max(by_method, key=by_method.__getitem__) is Method.METP


@pytest.mark.parametrize("scheme", SCHEMES[1:], ids=lambda scheme: scheme.name)
def test_max_tokens_is_the_most_that_fits(scheme):
    most = COST.max_tokens(scheme, num_devices=16)
    peaks = COST.peak_bytes([most, most + 1], scheme, num_devices=16)
    assert peaks[0] <= CLUSTER.device.memory_bytes < peaks[1]
    assert COST.peak_bytes(np.zeros((2, 3)), scheme, num_devices=16).shape == (2, 3)
    assert COST.peak_bytes(5, scheme, num_devices=16).shape == ()


def test_a_model_that_fits_nowhere_has_room_for_no_token():
    cost = AnalyticCost(model=MODEL, cluster=cluster_preset("8xA100-40GB"))
    assert cost.max_tokens(dense_scheme(32), num_devices=8) == 0


def test_groups_beyond_a_node_talk_through_its_ports():
    rates = collective_bytes_per_s, exchange_bytes_per_s, hop_bytes_per_s
    cluster = cluster_preset("4x8xH100-80GB")
    assert {rate(8, cluster) for rate in rates} == {LINK_EFFICIENCY * 450e9}
    ring, exchange, hop = (rate(16, cluster) / LINK_EFFICIENCY for rate in rates)
    assert (ring, hop) == (8 * 50e9, 50e9)
    assert exchange == pytest.approx(50e9 * 15 / 8)  # 8 of 15 peers are on the other node


def test_a_collective_that_passes_every_rank_starts_later_with_every_node():
    cluster = cluster_preset("8x8xH100-80GB")
    assert [ring_call_s(degree, cluster) for degree in (2, 8, 16, 64)] == pytest.approx([3e-5, 3e-5, 6e-5, 24e-5])
    measured = replace(cluster, device=replace(cluster.device, network_call_s=1e-3))
    assert ring_call_s(64, measured) == 1e-3 and ring_call_s(8, cluster_preset("8x1xH100-80GB")) == 3e-5
    model, slower = replace(MODEL, num_heads=64, num_kv_heads=64), replace(cluster, devices_per_node=64)
    seconds = {
        method: [
            AnalyticCost(model=model, cluster=which).overhead_s(scheme_of(model, method, degree=64))
            for which in (cluster, slower)
        ]
        for method in (Method.MEGATRON_TS, Method.RING)
    }
    apart_s, together_s = seconds[Method.MEGATRON_TS]
    assert apart_s - together_s == pytest.approx((10 * MODEL.num_layers + 2) * 7 * 3e-5)  # and of the head
    assert seconds[Method.RING][0] == seconds[Method.RING][1]  # a hop passes one rank


def test_nodes_of_one_device_talk_through_their_ports_alone():
    cluster = cluster_preset("8x1xH100-80GB")
    assert exchange_bytes_per_s(8, cluster) == hop_bytes_per_s(8, cluster) == LINK_EFFICIENCY * 50e9
    assert collective_bytes_per_s(8, cluster) == LINK_EFFICIENCY * 50e9
    cost = AnalyticCost(model=MODEL, cluster=cluster)
    assert 0 < cost.time_s([4096], scheme_of(MODEL, Method.ULYSSES, degree=8)) < np.inf


@pytest.mark.parametrize("link", [1e9, 450e9])
def test_a_link_that_no_device_has_a_peer_on_changes_nothing(link):
    cluster = cluster_preset("8x1xA800-80GB")
    device = replace(cluster.device, link_bytes_per_s=link)
    usual, cost = (AnalyticCost(model=MODEL, cluster=which) for which in (cluster, replace(cluster, device=device)))
    for method in (Method.RING, Method.ALL_GATHER, Method.MEGATRON_TS, Method.ULYSSES):
        scheme = scheme_of(MODEL, method, degree=8)
        assert cost.time_s([4096], scheme) == usual.time_s([4096], scheme)


@pytest.mark.parametrize("network", [1e9, 25e9, 50e9, 400e9])
def test_hops_over_several_nodes_are_no_faster_than_their_slowest(network):
    device = replace(cluster_preset("2x8xL40S-48GB").device, network_bytes_per_s=network)
    link = device.link_bytes_per_s
    one = ClusterSpec(num_nodes=1, devices_per_node=16, device=device)
    two = replace(one, num_nodes=2, devices_per_node=8)
    assert hop_bytes_per_s(16, one) == LINK_EFFICIENCY * link
    assert hop_bytes_per_s(16, two) == LINK_EFFICIENCY * min(link, network)
    assert collective_bytes_per_s(16, two) <= collective_bytes_per_s(16, one)
    assert stage_hop_bytes_per_s(4, 16, two) == hop_bytes_per_s(16, two), "of four stages, two hops are within a node"
    assert stage_hop_bytes_per_s(8, 16, two) == LINK_EFFICIENCY * network, "both stages take a whole node"
    assert stage_hop_bytes_per_s(4, 8, two) == LINK_EFFICIENCY * link


@pytest.mark.parametrize("nodes", ["16x1", "8x2", "2x8", "1x8+5", "1x16"])
@pytest.mark.parametrize("field", ["link_bytes_per_s", "network_bytes_per_s"])
def test_a_faster_link_or_network_makes_nothing_slower(nodes, field):
    cluster = cluster_preset(f"{nodes}xL40S-48GB")
    degrees = range(2, cluster.num_devices + 1)

    def rates(bytes_per_s):
        faster = replace(cluster, device=replace(cluster.device, **{field: bytes_per_s}))
        groups = [
            rate(p, faster) for rate in (collective_bytes_per_s, exchange_bytes_per_s, hop_bytes_per_s) for p in degrees
        ]
        stages = [stage_hop_bytes_per_s(p, cluster.num_devices, faster) for p in range(1, cluster.num_devices)]
        return np.array(groups + stages)

    rising = [rates(bytes_per_s) for bytes_per_s in (1e9, 10e9, 32e9, 33e9, 100e9, 1e12)]
    assert all((faster >= slower).all() for slower, faster in pairwise(rising))


def test_bytes_of_absurd_lengths_are_more_than_any_device_has():
    peaks = COST.peak_bytes(np.array([1e6, 1e15, 1e30]), scheme_of(MODEL, Method.ULYSSES, degree=8), num_devices=16)
    assert (np.diff(peaks.astype(float)) >= 0).all() and peaks[-1] >= 2**60


def test_what_cannot_run_is_refused():
    model = model_preset("llama-3-8b")
    cost = AnalyticCost(model=model, cluster=CLUSTER)
    with pytest.raises(InputError, match="too few for degree 16"):
        cost.max_tokens(scheme_of(model, Method.MEGATRON_TS, degree=16), num_devices=16)
    with pytest.raises(InputError, match="the scheme has 4 layers, model llama-7b has 32"):
        COST.overhead_s(dense_scheme(4))


def test_equal_schemes_cost_the_same_and_survive_pickling():
    lengths, twin = np.array([17, 3000]), replace(MIXED)
    assert COST.sequence_times_s(lengths, twin).tolist() == COST.sequence_times_s(lengths, MIXED).tolist()
    copy = pickle.loads(pickle.dumps(COST))
    assert copy.sequence_times_s(lengths, MIXED).tolist() == COST.sequence_times_s(lengths, MIXED).tolist()
    assert copy.max_tokens(MIXED, num_devices=16) == COST.max_tokens(MIXED, num_devices=16)


def test_a_transformer_2d_costs_less_than_its_attention_over_everything_would():
    model = model_preset("transformer-2d-1.2b")
    families = ("transformer-2d", "transformer-1d")
    both = [AnalyticCost(model=replace(model, family=family), cluster=CLUSTER) for family in families]
    scheme = dense_scheme(model.num_layers)
    lengths = np.array([100.0, 10_000.0])
    two_axes, whole = (cost.sequence_times_s(lengths, scheme) for cost in both)
    assert (two_axes < whole).all()
    attention_s = (whole - two_axes) / (lengths - model.reach(lengths))
    np.testing.assert_allclose(attention_s[1], 100 * attention_s[0])  # per token of the sequence and of the reach


@pytest.mark.parametrize(("method", "tokens", "recompute", "counted"), COUNTED)
def test_peaks_are_those_that_dry_runs_counted(method, tokens, recompute, counted):
    scheme = replace(scheme_of(replace(MODEL, num_layers=2), Method(method), degree=8), recompute=(recompute,) * 2)
    cost = AnalyticCost(model=replace(MODEL, num_layers=2), cluster=cluster_preset("1x8xH100-80GB"))
    assert cost.peak_bytes(tokens, scheme, num_devices=8) / GIB == pytest.approx(counted, rel=0.05)


def test_util_tokens_are_where_lone_sequences_reach_85_percent_of_the_best_rate():
    model, cluster = model_preset("llama-13b"), cluster_preset("2x8xA800-80GB")
    cost, before = AnalyticCost(model=model, cluster=cluster), 0
    for degree in (2, 4, 8):  # Hydraulis measured 896, 1,280 and 1,536, with larger constants
        scheme = scheme_of(model, Method.MEGATRON_TS, degree=degree)
        lengths = np.arange(1, 1 << 15)
        rates = lengths / (cost.sequence_times_s(lengths, scheme) + cost.overhead_s(scheme))
        first = int(lengths[np.argmax(rates >= 0.85 * rates.max())])
        assert first <= cost.util_tokens(scheme) <= 1.03 * first + 1
        assert before < cost.util_tokens(scheme) < 2048
        before = cost.util_tokens(scheme)


@pytest.mark.parametrize(("stage_layers", "stage", "num_tokens", "kept_gib", "recomputed_gib"), COUNTED_WITH_SHARES)
def test_shares_of_gradients_take_what_was_counted_beside_the_whole_ones_of_each_moment(
    stage_layers, stage, num_tokens, kept_gib, recomputed_gib
):
    model = replace(MODEL, num_layers=4)
    cost = AnalyticCost(model=model, cluster=cluster_preset("1x8xH100-80GB"))
    for is_recomputed, counted in ((False, kept_gib), (True, recomputed_gib)):
        scheme = PipelineConfig(
            degree=8 // len(stage_layers), stage_layers=stage_layers, recompute=(is_recomputed,) * 4,
            methods=(Method.ULYSSES,) * 4, shard_gradients=True,
        )  # fmt: skip
        peak = cost.stage_memory(scheme, stage, num_devices=8).at(num_tokens).total
        assert peak / GIB == pytest.approx(counted, rel=0.04)


IN_STAGES = [
    replace(scheme_of(MODEL, method, stages=8, recomputed=recomputed), shard_gradients=shards, zero_bubble=splits)
    for method, recomputed, shards, splits in (
        (Method.ULYSSES, 0, False, False), (Method.RING, 32, True, False), (Method.ULYSSES, 0, False, True),
        (Method.MEGATRON_TS, 0, False, False),
        (Method.METP, 16, False, False),
    )
]  # fmt: skip


@pytest.mark.parametrize("scheme", [*IN_STAGES, MIXED], ids=lambda scheme: scheme.name)
def test_peaks_are_those_of_all_stages(scheme):
    tokens = np.array([0, 1, 1000, 100_000, 10_000_000])
    stages = [COST.stage_memory(scheme, stage, num_devices=16) for stage in range(scheme.num_stages)]
    most = np.max([line.at(tokens) for stage in stages for line in stage.lines], axis=0)
    assert COST.peak_bytes(tokens, scheme, num_devices=16).tolist() == most.astype(np.int64).tolist()


@pytest.mark.parametrize("name", ["2x8xA800-80GB", "1x1xA800-80GB"])
def test_costs_with_the_state_on_the_host_are_those_made_for_it(name):
    cluster, lengths = cluster_preset(name), np.array([17, 3000])
    on_device = AnalyticCost(model=MODEL, cluster=cluster)
    on_host, fresh = on_device.with_state_on_host(), AnalyticCost(model=MODEL, cluster=cluster, state_on_host=True)
    for scheme in [DENSE, *(SCHEMES + IN_STAGES if cluster.num_devices > 1 else ())]:
        for cost, as_made in ((on_device, AnalyticCost(model=MODEL, cluster=cluster)), (on_host, fresh)):
            peaks, expected = (
                of.peak_bytes(lengths, scheme, num_devices=cluster.num_devices) for of in (cost, as_made)
            )
            assert peaks.tolist() == expected.tolist()
            assert cost.time_s(lengths, scheme) == as_made.time_s(lengths, scheme)
        assert on_host.host_bytes(5, scheme, num_devices=16) == fresh.host_bytes(5, scheme, num_devices=16)
