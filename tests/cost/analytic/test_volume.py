"""The closed forms count what simple enumerations count, and add up to the model's own FLOPs."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.errors import InputError
from lengthwise.core.pipeline_config import Method
from lengthwise.core.specs import model_preset
from lengthwise.cost.analytic.heads import split_heads
from lengthwise.cost.analytic.volume import layer_volume
from lengthwise.cost.memory_model import kept_bytes_per_layer, state_bytes
from tests.cost.profiles import PARALLEL, kept_bytes_per_token

MODEL = model_preset("llama-3-8b")
GATHERED = {Method.MEGATRON_CZ: Method.RING, Method.COLOSSAL_Z: Method.RING, Method.ULYSSES_Z: Method.ULYSSES}


def volume(method, degree=4, model=MODEL, dtype="bfloat16"):
    return layer_volume(model, method, degree=degree, dtype=dtype)


@pytest.mark.parametrize("method", [method for method in PARALLEL if method is not Method.METP])
@pytest.mark.parametrize("degree", [1, 2, 8])
def test_devices_together_do_the_flops_of_the_model(method, degree):
    layer = volume(method, degree)
    head = 6 * MODEL.hidden_size * MODEL.vocab_size
    for length in (1, 10_000):
        done = sum(
            part.matmul_flops * length + part.attention_flops * length**2 for part in (layer.forward, layer.backward)
        )
        if method is Method.COLOSSAL_Z and degree > 1:  # its forward attends twice
            done -= layer.forward.attention_flops / 2 * length**2
        expected = (float(MODEL.train_flops([length])[0]) - head * length) / MODEL.num_layers
        assert done * degree == pytest.approx(expected, rel=1e-12)


def test_metp_makes_qkv_and_activations_again_in_the_backward():
    more = volume(Method.METP).backward.matmul_flops - volume(Method.RING).backward.matmul_flops
    remade = MODEL.hidden_size * (MODEL.qkv_size + 2 * MODEL.ffn_size)
    assert more * 4 == pytest.approx(2 * remade)
    plain = replace(MODEL, gated_ffn=False)
    more = (
        volume(Method.METP, model=plain).backward.matmul_flops - volume(Method.RING, model=plain).backward.matmul_flops
    )
    assert more * 4 == pytest.approx(2 * plain.hidden_size * (plain.qkv_size + plain.ffn_size))


@pytest.mark.parametrize("method", PARALLEL)
def test_alone_a_device_sends_nothing_and_buffers_nothing(method):
    layer = volume(method, degree=1)
    for part in (layer.forward, layer.backward):
        for sent in (part.tokens, part.weights):
            assert sent.num_bytes == 0
            assert sent.calls == 0
    assert layer.buffer_bytes == 0
    if method is not Method.METP:
        assert layer.kept_bytes == kept_bytes_per_layer(MODEL, 2)
        assert layer.live_bytes == 0


def test_a_grid_of_ulysses_and_rings_holds_what_the_larger_of_both_does_of_its_tokens():
    ulysses, ring = volume(Method.ULYSSES, degree=4), volume(Method.RING, degree=2)
    assert volume(Method.ULYSSES_RING, degree=8).live_bytes == pytest.approx(
        max(4 / 8 * ulysses.live_bytes, 2 / 8 * 3 / 4 * ring.live_bytes)  # of four blocks at master precision, three
    )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "degree"), [(32, 8, 4), (32, 8, 3), (32, 8, 16), (14, 2, 4), (16, 16, 24)]
)
def test_ulysses_sends_what_every_pair_of_ranks_exchanges(heads, kv_heads, degree):
    model = replace(MODEL, num_heads=heads, num_kv_heads=kv_heads)
    group = heads // kv_heads
    unit = group if degree <= kv_heads else 1
    owned = [
        range(rank * (heads // unit) // degree * unit, (rank + 1) * (heads // unit) // degree * unit)
        for rank in range(degree)
    ]
    numbers = 0
    for source in range(degree):
        for target in set(range(degree)) - {source}:
            shared = {head // group for head in owned[target]}
            numbers += (len(owned[target]) + 2 * len(shared)) * model.head_size  # towards the heads
            numbers += len(owned[source]) * model.head_size  # outputs, back to the tokens
    per_rank_and_token = numbers / degree / degree
    assert volume(Method.ULYSSES, degree, model).forward.tokens.all_to_all == pytest.approx(per_rank_and_token * 2)


def test_fewer_kv_heads_send_less():
    whole = replace(MODEL, num_kv_heads=MODEL.num_heads)
    for method in (Method.ULYSSES, Method.RING, Method.METP):
        few, many = (volume(method, model=model).forward.tokens.num_bytes for model in (MODEL, whole))
        assert few < many


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 64))
def test_every_query_head_has_one_rank_and_the_busiest_sets_the_pace(group, kv_heads, degree):
    heads = group * kv_heads
    split = split_heads(heads, kv_heads, degree=degree)
    assert split.num_heads * degree >= heads
    expected = -(-kv_heads // degree) * group if degree <= kv_heads else -(-heads // degree)
    assert split.num_heads == expected
    assert kv_heads <= split.num_kv_copies <= min(degree, heads) + kv_heads
    if degree <= kv_heads:
        assert split.num_kv_copies == kv_heads


def test_heads_that_do_not_divide_make_all_wait_for_the_busiest():
    layer = volume(Method.ULYSSES, degree=3)  # 8 groups of 4 heads over 3 ranks: 3, 3 and 2 groups
    even = MODEL.num_heads / 3
    assert layer.forward.attention_flops == pytest.approx(
        volume(Method.RING, degree=3).forward.attention_flops * 12 / even
    )


def test_a_ring_sends_every_block_past_every_rank():
    p, block = 5, 2 * MODEL.num_kv_heads * MODEL.head_size / 5
    layer = volume(Method.RING, degree=p)
    assert layer.forward.tokens.ring == pytest.approx(sum(block * 2 for _ in range(p - 1)))
    gradients_home = sum(block * 4 for _ in range(p))
    assert layer.backward.tokens.ring == pytest.approx(layer.forward.tokens.ring + gradients_home)
    assert (layer.forward.tokens.calls, layer.backward.tokens.calls) == (p - 1, p)


@pytest.mark.parametrize("method", GATHERED)
def test_sharded_weights_add_their_gathering_and_nothing_per_token(method):
    layer, whole = volume(method), volume(GATHERED[method])
    keys_again = 1.5 if method is Method.COLOSSAL_Z else 1.0
    assert layer.forward.tokens.num_bytes == keys_again * whole.forward.tokens.num_bytes
    assert layer.backward.tokens == whole.backward.tokens
    assert layer.kept_bytes == whole.kept_bytes
    params = MODEL.layer_matmul_params
    assert whole.forward.weights.num_bytes == 0
    assert layer.forward.weights.all_gather == pytest.approx(params * 2 * 3 / 4)
    assert layer.backward.weights.reduce_scatter == pytest.approx(params * 4 * 3 / 4)


def test_metp_moves_the_same_weights_and_keys_and_keeps_less_than_all():
    metp, gathered = volume(Method.METP), volume(Method.MEGATRON_CZ)
    assert metp.forward.weights.num_bytes == pytest.approx(gathered.forward.weights.num_bytes)
    assert metp.forward.tokens.ring == gathered.forward.tokens.ring
    assert metp.kept_bytes < 0.5 * min(volume(method).kept_bytes for method in PARALLEL if method is not Method.METP)


def test_tensor_parallel_moves_whole_activations_however_many_share_them():
    forwards = [volume(Method.MEGATRON_TS, degree).forward.tokens for degree in (2, 8)]
    for degree, sent in zip((2, 8), forwards):
        assert sent.num_bytes == pytest.approx(4 * MODEL.hidden_size * 2 * (degree - 1) / degree)
    assert volume(Method.ULYSSES, 8).forward.tokens.num_bytes < forwards[1].num_bytes / 8


def test_tensor_parallel_needs_a_key_value_head_per_device():
    with pytest.raises(InputError, match="8 key/value heads, too few for degree 16"):
        volume(Method.MEGATRON_TS, degree=16)


@pytest.mark.parametrize("method", PARALLEL)
@pytest.mark.parametrize("recompute", [False, True])
def test_sharing_a_layer_keeps_its_share_of_a_dense_layer(method, recompute):
    layer, dense = volume(method), volume(Method.DENSE, degree=1)
    assert layer.input_bytes == dense.input_bytes / 4
    copied_output = MODEL.num_heads * MODEL.head_size * 2 / 4 if "ulysses" in method else 0
    if method is not Method.METP:
        assert layer.kept_bytes == pytest.approx(dense.kept_bytes / 4 + copied_output)


def test_memory_of_a_dense_model_is_the_sum_of_its_layers_and_its_loss():
    layer, loss = kept_bytes_per_layer(MODEL, 2), 3 * MODEL.hidden_size * 2
    assert kept_bytes_per_token(MODEL, dtype="bfloat16", recompute=False) == MODEL.num_layers * layer + loss
    inputs = MODEL.num_layers * MODEL.hidden_size * 2
    assert kept_bytes_per_token(MODEL, dtype="bfloat16", recompute=True) == inputs + layer + loss


def test_models_without_a_memory_model_are_refused():
    with pytest.raises(InputError, match="no memory model for family 'mamba'"):
        layer_volume(replace(model_preset("llama-7b"), family="mamba"), Method.DENSE, degree=1, dtype="bfloat16")


def test_more_devices_hold_less_optimizer_state_each():
    model = model_preset("llama-tiny")
    sizes = [state_bytes(model, num_devices=n, dtype="bfloat16") for n in (1, 2, 4)]
    assert sizes[0] == model.num_params * 18
    assert sizes[1] == model.num_params * (6 + 8)
    assert sizes[0] > sizes[1] > sizes[2] > model.num_params * 6
