"""What offload, tiles and a state on the host cost: bytes on the device and the host, and seconds."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.core.errors import InputError
from lengthwise.core.pipeline_config import Method, homogeneous, uniform_scheme
from lengthwise.core.specs import cluster_preset, model_preset
from lengthwise.core.wording import GIB
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.cost.analytic.stage_time import TILE_LAUNCH_S, layer_flops_per_s
from lengthwise.cost.analytic.volume import layer_volume
from lengthwise.cost.corrected import CorrectedCost
from lengthwise.cost.links import exchange_bytes_per_s, host_copy_bytes_per_s
from tests.examples import examples

MODEL = model_preset("llama-3-8b")
LAYERS = MODEL.num_layers
CLUSTER = cluster_preset("8xH100-80GB")
COST = AnalyticCost(model=MODEL, cluster=CLUSTER)
ON_HOST = AnalyticCost(model=MODEL, cluster=CLUSTER, state_on_host=True)
METHODS = (Method.ULYSSES, Method.RING, Method.ULYSSES_Z, Method.MEGATRON_TS, Method.METP)
RUNGS = ((0, 0, 0), (0, 12, 0), (12, 32, 0), (32, 32, 0), (32, 32, 4096), (0, 0, 1024))


def scheme_of(method=Method.ULYSSES, recomputed=0, offloaded=0, tile_tokens=0, *, stages=1, degree=8):
    return uniform_scheme(
        LAYERS, degree=degree // stages, stages=stages, method=method, recomputed=recomputed, offloaded=offloaded,
        tile_tokens=tile_tokens,
    )  # fmt: skip


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("method", METHODS)
def test_times_and_bytes_grow_with_length_under_every_rung(method, rung):
    scheme = scheme_of(method, *rung)

    @settings(max_examples=examples(20), deadline=None)
    @given(st.integers(1, 10**6), st.integers(1, 10**5))
    def check(length, more):
        shorter_s, longer_s = COST.sequence_times_s(np.array([length, length + more]), scheme)
        assert 0 < shorter_s < longer_s
        few, many = COST.peak_bytes([length, length + more], scheme, num_devices=8)
        assert few < many

    check()


@pytest.mark.parametrize("recomputed", [0, LAYERS])
@pytest.mark.parametrize("method", METHODS)
def test_offload_moves_what_layers_save_to_the_host_but_for_two(method, recomputed):
    tokens = 1 << 20
    volume = layer_volume(MODEL, method, degree=8, dtype="bfloat16")
    saved = tokens * (volume.input_bytes if recomputed else volume.kept_bytes)
    kept, offloaded = (scheme_of(method, recomputed, count) for count in (0, LAYERS))
    fewer = COST.stage_memory(kept, 0, num_devices=8).moments[0].activations.at(tokens)
    assert fewer == pytest.approx(LAYERS * saved)
    moments = COST.stage_memory(offloaded, 0, num_devices=8).moments
    assert moments[0].activations.at(tokens) == 0
    freed = COST.peak_bytes(tokens, kept, num_devices=8) - COST.peak_bytes(tokens, offloaded, num_devices=8)
    assert freed == pytest.approx((LAYERS - 2) * saved, rel=0.05)
    assert COST.host_bytes(tokens, offloaded, num_devices=8) == pytest.approx(LAYERS * saved)
    assert COST.host_bytes(tokens, kept, num_devices=8) == 0


def test_copies_cost_what_is_beyond_the_passes_they_run_beneath():
    kept, offloaded, recomputed = scheme_of(), scheme_of(offloaded=LAYERS), scheme_of(recomputed=LAYERS)
    volume = layer_volume(MODEL, Method.ULYSSES, degree=8, dtype="bfloat16")
    copy_s = LAYERS * volume.kept_bytes / host_copy_bytes_per_s(CLUSTER)
    short, long = np.array([1024]), np.array([1 << 20])
    plain_s, offload_s, again_s = (COST.sequence_times_s(short, scheme)[0] for scheme in (kept, offloaded, recomputed))
    exposed_s = offload_s - plain_s
    assert 0 < exposed_s < 2 * 1024 * copy_s
    forward_s = again_s - plain_s
    backward_s = plain_s - forward_s  # and the head's
    assert exposed_s >= 2 * 1024 * copy_s - forward_s - backward_s
    assert COST.comm_times_s(short, offloaded)[0] - COST.comm_times_s(short, kept)[0] == pytest.approx(exposed_s)
    assert COST.sequence_times_s(long, offloaded) == COST.sequence_times_s(long, kept)  # attention hides all
    assert COST.overhead_s(offloaded) > COST.overhead_s(kept)


def test_tiles_compute_feed_forwards_twice_and_keep_their_input_alone():
    tokens, whole, tiled = np.array([65_536]), scheme_of(), scheme_of(tile_tokens=2048)
    again_s = 65_536 * LAYERS * 6 * MODEL.hidden_size * MODEL.ffn_size / 8
    again_s /= layer_flops_per_s(MODEL, CLUSTER.device, "bfloat16")
    added_s = (COST.sequence_times_s(tokens, tiled) - COST.sequence_times_s(tokens, whole))[0]
    assert added_s == pytest.approx(again_s + LAYERS * 65_536 / 8 / 2048 * TILE_LAUNCH_S)
    small, large = (scheme_of(recomputed=LAYERS, tile_tokens=size) for size in (1024, 16_384))
    untiled = scheme_of(recomputed=LAYERS)
    peaks = [int(COST.peak_bytes(1 << 20, scheme, num_devices=8)) for scheme in (small, large, untiled)]
    assert peaks[0] <= peaks[1] < peaks[2]
    metp = [scheme_of(Method.METP, tile_tokens=size) for size in (0, 1024)]
    assert COST.max_tokens(metp[0], num_devices=8) == COST.max_tokens(metp[1], num_devices=8)


@pytest.mark.parametrize("method", METHODS)
def test_a_layer_that_keeps_attention_runs_none_of_it_again_and_keeps_its_output(method):
    tokens = 1 << 18
    full = scheme_of(method, LAYERS)
    kept = replace(full, keep_attention=True)
    none, all_again, without = (
        float(COST.sequence_times_s(np.array([tokens]), scheme)[0]) for scheme in (scheme_of(method), full, kept)
    )
    volume = layer_volume(MODEL, method, degree=8, dtype="bfloat16")
    attention_s = LAYERS * volume.forward.attention_flops * tokens**2
    attention_s /= CLUSTER.device.attention_flops_per_s("bfloat16")
    assert none < without < all_again and all_again - without >= attention_s * 0.99
    outputs = tokens * LAYERS * MODEL.num_heads * (MODEL.head_size * 2 + 4) / 8
    saved = [COST.stage_memory(scheme, 0, num_devices=8).moments[0].activations.at(tokens) for scheme in (full, kept)]
    assert saved[1] - saved[0] == pytest.approx(outputs)


@pytest.mark.parametrize("method", [Method.ULYSSES, Method.ULYSSES_Z])
def test_groups_of_heads_free_queries_keys_and_values_and_exchange_them_once_more(method):
    tokens, whole = 1 << 18, scheme_of(method)
    grouped = replace(whole, head_groups=4)
    volume = layer_volume(MODEL, method, degree=8, dtype="bfloat16")
    saved = [
        COST.stage_memory(scheme, 0, num_devices=8).moments[0].activations.at(tokens) for scheme in (whole, grouped)
    ]
    heads = (2 * MODEL.num_heads + 2 * MODEL.num_kv_heads) * MODEL.head_size * 2 / 8  # outputs by heads among them
    assert saved[0] - saved[1] == pytest.approx(tokens * LAYERS * heads)
    short = np.array([4096])
    added_s = float((COST.sequence_times_s(short, grouped) - COST.sequence_times_s(short, whole))[0])
    again = 2 * MODEL.hidden_size * (MODEL.num_heads + 2 * MODEL.num_kv_heads) * MODEL.head_size / 8
    products_s = LAYERS * 4096 * again / layer_flops_per_s(MODEL, CLUSTER.device, "bfloat16")
    sent_s = LAYERS * 4096 * volume.forward.tokens.all_to_all / exchange_bytes_per_s(8, CLUSTER)
    assert added_s == pytest.approx(products_s + sent_s)
    assert COST.overhead_s(grouped) > COST.overhead_s(whole)
    leanest = replace(scheme_of(method, LAYERS, LAYERS, 4096), head_groups=4)
    one = replace(leanest, head_groups=1)
    assert COST.max_tokens(leanest, num_devices=8) > 1.15 * COST.max_tokens(one, num_devices=8)


def test_a_micro_batch_fits_the_host_too():
    scheme = scheme_of(recomputed=LAYERS, offloaded=LAYERS, tile_tokens=4096)
    small = replace(CLUSTER, device=CLUSTER.device.with_host_memory(16))
    cost = AnalyticCost(model=MODEL, cluster=small)
    most = cost.max_tokens(scheme, num_devices=8)
    assert most == cost.max_host_tokens(scheme, num_devices=8) < COST.max_tokens(scheme, num_devices=8)
    assert cost.host_bytes(most, scheme, num_devices=8) <= 16 * GIB < cost.host_bytes(most + 9, scheme, num_devices=8)
    assert CorrectedCost(cost).max_tokens(scheme, num_devices=8) == most
    tiny = replace(CLUSTER, device=CLUSTER.device.with_host_memory(15))
    assert AnalyticCost(model=MODEL, cluster=tiny, state_on_host=True).max_tokens(scheme_of(), num_devices=8) == 0


def test_stages_put_what_they_keep_of_all_micro_batches_on_the_host():
    one, two = (scheme_of(recomputed=LAYERS, offloaded=LAYERS, stages=stages) for stages in (1, 2))
    assert COST.host_bytes(8192, two, num_devices=8) == pytest.approx(2 * COST.host_bytes(8192, one, num_devices=8))


def test_a_state_on_the_host_frees_the_optimizer_and_slows_the_update():
    scheme = scheme_of(Method.ULYSSES_Z)
    on_device, on_host = (cost.stage_memory(scheme, 0, num_devices=8) for cost in (COST, ON_HOST))
    assert on_device.optimizer == pytest.approx(16 * MODEL.num_params / 8, rel=1e-3)
    assert on_host.optimizer < on_device.optimizer / 10 and on_host.weights == on_device.weights
    assert ON_HOST.host_bytes(0, scheme, num_devices=8) >= 16 * MODEL.num_params / 8
    strategy, host = homogeneous(scheme, 8), CLUSTER.device
    added_s = ON_HOST.update_s(strategy) - COST.update_s(strategy)
    read_s = 32 * MODEL.num_params / 8 / (0.8 * host.host_memory_bytes_per_s)
    assert added_s > read_s * 0.9
    assert ON_HOST.sequence_times_s(np.array([99]), scheme) == COST.sequence_times_s(np.array([99]), scheme)


def test_one_device_alone_hands_its_gradients_to_the_host():
    single = AnalyticCost(model=MODEL, cluster=cluster_preset("1xH100-80GB"), state_on_host=True)
    scheme = uniform_scheme(LAYERS, recomputed=LAYERS, offloaded=LAYERS, tile_tokens=4096)
    head = 4096 * MODEL.vocab_size
    gradients = single.stage_memory(scheme, 0, num_devices=1).gradients
    assert 4 * 3 * head <= gradients <= 4 * 3 * head * 1.001, "those of the head are summed, two more on their way"
    assert single.max_tokens(scheme, num_devices=1) > 400_000


def test_a_cpu_can_put_nothing_on_the_host():
    cpus = cluster_preset("8xcpu")
    with pytest.raises(InputError, match="nothing of a cpu can be put into host memory"):
        AnalyticCost(model=MODEL, cluster=cpus).overhead_s(scheme_of(offloaded=1))
    costs = [AnalyticCost(model=MODEL, cluster=cpus, state_on_host=on_host) for on_host in (False, True)]
    on_device, on_host = (cost.peak_bytes(4096, scheme_of(), num_devices=8) for cost in costs)
    assert on_device == on_host and not costs[1].state_on_host


def test_a_host_without_room_for_what_layers_save_leaves_the_state_there():
    cost, scheme = ON_HOST.without_offload(), scheme_of(Method.ULYSSES_Z, LAYERS, LAYERS)
    assert cost.max_tokens(scheme, num_devices=8) == 0 < ON_HOST.max_tokens(scheme, num_devices=8)
    kept = scheme_of(Method.ULYSSES_Z, LAYERS)
    assert cost.max_tokens(kept, num_devices=8) == ON_HOST.max_tokens(kept, num_devices=8) > 0
