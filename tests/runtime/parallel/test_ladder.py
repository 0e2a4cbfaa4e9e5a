"""The memory ladder: offloaded layers compute what others compute, bit for bit, and leave nothing on the device; tiles
compute the same up to the order of sums, and keep their input alone."""

import gc
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lengthwise.core.pipeline_config import HEAD_GROUP_METHODS, WEIGHTS_OF, Method, WeightPlacement
from lengthwise.cost.analytic.volume import layer_volume
from lengthwise.runtime.comm import activation_offload
from lengthwise.runtime.comm.activation_offload import HostOffload
from lengthwise.runtime.models.execution import ActivationPlan
from lengthwise.runtime.models.kept_attention import is_attention
from lengthwise.runtime.parallel import head_groups
from lengthwise.runtime.parallel.sharded_execution import StageExecution
from lengthwise.runtime.parallel.shards import keep_own_rows
from tests.runtime.models.cases import assert_same
from tests.runtime.parallel.cases import (
    SHARDED,
    WHOLE,
    able,
    execution_of,
    model_of,
    on_ranks,
    pack_of,
    small,
    whole_group,
)
from tests.runtime.parallel.test_exactness import FAMILIES

RAGGED = (7, 1, 12, 5)
LADDER_FAMILIES = {"llama": small(), **{name: FAMILIES[name] for name in ("gpt", "bert", "transformer-2d")}}
KEPT = 0.02
"""Relative: rows of log-sum-exps and norms beside the rest, and tokens that ranks do not share evenly."""


ON_RANKS = pytest.mark.parametrize(
    ("num_ranks", "in_turn"),
    [(1, False), (2, True), *(pytest.param(n, False, marks=pytest.mark.deep) for n in (2, 3))],
)
"""``in_turn``: whether each method meets one of several rungs, or all of them."""


def cases_of(names, rungs, in_turn):
    """Families and methods, every method with one family, and the rungs of each."""
    for number, name in enumerate(names):
        methods = able((*SHARDED, *WHOLE), LADDER_FAMILIES[name], whole_group().size)
        methods = methods[:1] if whole_group().size == 1 else methods[number :: len(names)]
        for place, method in enumerate(methods, number):
            yield LADDER_FAMILIES[name], method, [rungs[place % len(rungs)]] if in_turn else rungs


def assert_equal(these, others):
    assert torch.equal(these[0], others[0])
    for name, gradient in these[1].items():
        assert torch.equal(gradient, others[1][name]), name


# ---- offload


@ON_RANKS
def test_offloaded_layers_give_the_same_gradients_bit_for_bit(ranks, num_ranks, in_turn):
    ranks(num_ranks).run(check_offload, list(LADDER_FAMILIES), in_turn)


def check_offload(names, in_turn):
    for spec, method, offloads in cases_of(names, (True, (True, False)), in_turn):
        methods, recompute = (method,) * spec.num_layers, (False, True)
        expected = on_ranks(spec, RAGGED, methods, recompute=recompute)
        for offload in offloads:
            assert_equal(on_ranks(spec, RAGGED, methods, recompute=recompute, offload=offload), expected)


@pytest.mark.first_cells(4)
@pytest.mark.parametrize(
    ("method", "num_ranks"),
    [
        *((method, 2) for method in (*SHARDED, *WHOLE)),
        *(pytest.param(method, 3, marks=pytest.mark.deep) for method in (*SHARDED, *WHOLE)),
        # One rank computes the same by all that share its weights, or do not.
        *((methods[0], 1) for methods in (SHARDED, WHOLE)),
        *(pytest.param(method, 1, marks=pytest.mark.deep) for method in (*SHARDED[1:], *WHOLE[1:])),
    ],
)
def test_an_offloaded_layer_leaves_nothing_on_the_device_and_its_closed_form_on_the_host(ranks, method, num_ranks):
    spec = LADDER_FAMILIES["llama"]
    volume = layer_volume(spec, method, degree=num_ranks, dtype="float32")
    for recompute, per_token in ((False, volume.kept_bytes), (True, volume.input_bytes)):
        num_copied, num_left = zip(*ranks(num_ranks).run(copied_and_left, spec, method, 480, recompute))
        assert max(num_copied) == pytest.approx(per_token * 480 * spec.num_layers, rel=KEPT)
        assert not any(num_left)


def copied_and_left(spec, method, num_tokens, recompute):
    """Bytes that offloaded layers have in host memory, and storages of theirs that are left on the device."""
    group, weights = whole_group(), WEIGHTS_OF[method]
    model = model_of(spec, dtype=torch.float32)
    if weights is WeightPlacement.SHARDED:
        keep_own_rows(model, spec, rank=group.rank, degree=group.size)
    host, flags = HostOffload("cpu"), (True,) * spec.num_layers
    tokens_T, targets_T, cu_seqlens = pack_of((num_tokens,), spec)
    activations = ActivationPlan(recompute=(recompute,) * len(flags), offload=flags, host=host.micro_batch())
    execution = StageExecution(
        model, group, tokens_T=tokens_T, targets_T=targets_T, cu_seqlens=cu_seqlens, methods=(method,) * len(flags),
        weights=weights, activations=activations,
    )  # fmt: skip
    copied = []

    class Noted(activation_offload.StorageCopy):
        def __init__(self, whole, host):
            copied.append(StorageWeakRef(whole.untyped_storage()))
            super().__init__(whole, host)

    original, activation_offload.StorageCopy = activation_offload.StorageCopy, Noted
    try:
        loss = model.run(execution)
    finally:
        activation_offload.StorageCopy = original
    gc.collect()
    num_left = sum(not storage.expired() for storage in copied)
    loss.backward()
    assert copied and host.blocks.num_used_bytes <= host.blocks.block_bytes, "all went back"
    return host.num_copied_bytes, num_left


def test_a_storage_that_is_saved_twice_is_copied_once_and_its_views_come_back_as_they_were():
    host = HostOffload("cpu")
    weight = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)

    def loss_of(x, hooks):
        with hooks:
            base = x * 2.0
            wide = base[:, 1:5]
            return (wide.T.contiguous() @ base.exp() @ weight).sin().sum() + (wide * base[:, :4]).sum()

    grads = []
    for offload in (None, lambda tensor: tensor.untyped_storage()._cdata == weight.untyped_storage()._cdata):
        x = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
        weight.grad = None
        loss_of(x, host.micro_batch().layer(offload)).backward()
        grads.append((x.grad, weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*grads))
    base, wide, exp, product, sine = 5 * 6, 5 * 4, 5 * 6, 4 * 6, 4 * 4
    assert host.num_copied_bytes == 8 * (base + wide + exp + product + sine)


def test_a_storage_that_is_written_to_between_two_saves_is_copied_twice():
    host = HostOffload("cpu")
    x = torch.ones(4, requires_grad=True)
    with host.micro_batch().layer(lambda tensor: False):
        y = x.detach().clone()
        first = x * y
        y.add_(1.0)
        second = x * y
    (first + 10 * second).sum().backward()
    assert torch.equal(x.grad, torch.full((4,), 21.0))
    assert host.num_copied_bytes == 32


def test_a_host_without_room_is_an_error_of_memory_with_a_way_out():
    spec = LADDER_FAMILIES["llama"]
    model, (tokens_T, targets_T, cu_seqlens) = model_of(spec), pack_of(RAGGED, spec)
    host = HostOffload("cpu", limit_bytes=0)
    activations = ActivationPlan(offload=(True, True), host=host.micro_batch())
    with pytest.raises(MemoryError, match="offload fewer layers, or recompute those that are offloaded"):
        model.run(model.on_one_device(tokens_T, cu_seqlens, targets_T, activations=activations))


# ---- selective recompute


@pytest.mark.first_cells(1)
@ON_RANKS
def test_layers_that_keep_attention_give_the_gradients_of_recomputed_ones_bit_for_bit(ranks, num_ranks, in_turn):
    ranks(num_ranks).run(check_kept_attention, list(LADDER_FAMILIES), in_turn)


KEEPING = ({}, {"offload": True}, {"tile_tokens": 3, "head_groups": 2})


def check_kept_attention(names, in_turn):
    for number, (spec, method, rungs) in enumerate(cases_of(names, KEEPING, in_turn)):
        for rung in rungs:
            options = {**rung, "methods": (method,) * spec.num_layers, "recompute": (True, number % 2 == 0)}
            if method not in HEAD_GROUP_METHODS:
                options.pop("head_groups", None)
            expected = on_ranks(spec, RAGGED, **{name: option for name, option in options.items() if name != "offload"})
            assert_equal(on_ranks(spec, RAGGED, keep_attention=True, **options), expected)


@pytest.mark.parametrize(
    "method",
    [
        Method.DENSE, Method.RING, Method.MEGATRON_TS,
        *(pytest.param(method, marks=pytest.mark.deep) for method in (Method.ULYSSES, Method.METP)),
    ],
)  # fmt: skip
def test_a_layer_that_keeps_attention_runs_no_kernel_of_it_twice(ranks, method):
    num_ranks = 1 if method is Method.DENSE else 2
    for kept, again in zip(*(ranks(num_ranks).run(attention_kernels, method, keep) for keep in (True, False))):
        assert kept > 0 and again == 2 * kept


def attention_kernels(method, keep_attention):
    """Launches of attention's forward in a forward and backward of which every layer is recomputed."""
    spec, count = LADDER_FAMILIES["llama"], Counter()
    methods = (method,) * spec.num_layers

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            count["attention"] += is_attention(func)
            return func(*args, **kwargs or {})

    with Counting():
        on_ranks(spec, RAGGED, methods, recompute=(True,) * len(methods), keep_attention=keep_attention)
    return count["attention"]


# ---- tiles

EXACT = 1e-12
"""float64, relative to the largest entry: sums over tiles come in another order."""


@pytest.mark.first_cells(1)
@ON_RANKS
def test_tiles_give_the_gradients_of_all_tokens_at_once(ranks, num_ranks, in_turn):
    ranks(num_ranks).run(check_tiles, list(LADDER_FAMILIES), in_turn)


IN_TILES = ({"recompute": (False, True)}, {"offload": True, "recompute": (True, False)})


def check_tiles(names, in_turn):
    for spec, method, rungs in cases_of(names, IN_TILES, in_turn):
        methods = (method,) * spec.num_layers
        expected = on_ranks(spec, RAGGED, methods)
        for planned in rungs:
            loss, gradients = on_ranks(spec, RAGGED, methods, tile_tokens=3, **planned)
            assert_same(loss, expected[0], tolerance=EXACT)
            assert_same(gradients, expected[1], tolerance=EXACT)


@pytest.mark.parametrize("method", [Method.DENSE, Method.RING, Method.ULYSSES_Z, Method.MEGATRON_TS])
def test_a_tiled_half_keeps_its_input_alone(ranks, method):
    num_ranks = 1 if method is Method.DENSE else 2
    for name, norm_numbers in (("llama", 1), ("gpt", 2), ("bert", 4)):
        spec = LADDER_FAMILIES[name]
        columns, copies = spec.ffn_size / (num_ranks if method is Method.MEGATRON_TS else 1), 3 if spec.gated_ffn else 2
        own = 480 // num_ranks
        half = ranks(num_ranks).run(kept_by_half, spec, method, 0)
        tiled = ranks(num_ranks).run(kept_by_half, spec, method, 7)
        assert max(tiled) == own * spec.hidden_size * 8
        widened = columns * copies * (480 if method is Method.MEGATRON_TS else own)
        inside = own * (spec.hidden_size * (2 if name == "bert" else 1) + norm_numbers) + widened
        assert max(half) - max(tiled) == 8 * inside


def kept_by_half(spec, method, tile_tokens):
    """Bytes that the half of a layer behind attention saves."""
    group, weights = whole_group(), WEIGHTS_OF.get(method, WeightPlacement.WHOLE)
    model = model_of(spec)
    if weights is WeightPlacement.SHARDED:
        keep_own_rows(model, spec, rank=group.rank, degree=group.size)
    methods = (method,) * spec.num_layers
    execution = execution_of(model, group, (40,) * 12, methods, weights, tile_tokens=tile_tokens)
    x_tD = torch.randn(480 // group.size, spec.hidden_size, dtype=torch.float64, requires_grad=True)
    layer, host = model.layers[0], HostOffload("cpu")
    with host.micro_batch().layer(lambda tensor: any(same_storage(tensor, weight) for weight in model.parameters())):
        out_tD = execution.operators(0).tokenwise(layer.tokenwise_half, x_tD)
    out_tD.sum().backward()
    return host.num_copied_bytes


def same_storage(tensor, other):
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def test_the_second_forward_of_a_recomputed_layer_leaves_its_tiled_half_out():
    spec = LADDER_FAMILIES["llama"]
    model, (tokens_T, targets_T, cu_seqlens) = model_of(spec), pack_of((24,), spec)
    calls = Counter()
    for number, layer in enumerate(model.layers):
        original = layer.tokenwise_half
        layer.tokenwise_half = lambda x, ffn, o=original, n=number: (calls.update([n]), o(x, ffn))[1]
    activations = ActivationPlan(recompute=(True, False), tile_tokens=6)
    model.run(model.on_one_device(tokens_T, cu_seqlens, targets_T, activations=activations)).backward()
    assert calls == {0: 8, 1: 8}, "four tiles forward, and again in the backward"


# ---- groups of heads


@pytest.mark.parametrize("num_tokens", [0, 1, 6, 7, 8, 50])
def test_gradients_are_cast_in_their_own_memory(monkeypatch, num_tokens):
    monkeypatch.setattr(head_groups, "AT_ONCE", 7)
    x = torch.randn(num_tokens, 12, generator=torch.Generator().manual_seed(0))
    expected, place = x.bfloat16(), x.data_ptr()
    narrowed = head_groups._narrowed(x, torch.bfloat16)
    assert torch.equal(narrowed, expected) and narrowed.data_ptr() == place


@pytest.mark.parametrize(
    ("num_ranks", "names"),
    [
        (1, ("llama", "bert")),  # three ranks: tests/runtime/loop/test_head_groups.py
        *(pytest.param(n, tuple(LADDER_FAMILIES), marks=pytest.mark.deep) for n in (1, 2, 3)),
    ],
)  # fmt: skip
def test_groups_of_heads_give_the_gradients_of_all_heads_at_once(ranks, num_ranks, names):
    ranks(num_ranks).run(check_head_groups, names)


UNEVEN_HEADS = {"llama": (10, 5), "gpt": (6, 2), "bert": (4, 4), "transformer-2d": (8, 1)}
"""Query and key/value heads: ones that ranks and groups do not share evenly."""


def check_head_groups(names):
    for name in names:
        spec = replace(LADDER_FAMILIES[name], **dict(zip(("num_heads", "num_kv_heads"), UNEVEN_HEADS[name])))
        for method, count in ((Method.ULYSSES, 2), (Method.ULYSSES_Z, 3), (Method.ULYSSES, 7)):
            if whole_group().size == 1:
                method = Method.DENSE
            methods = (method,) * spec.num_layers
            expected = on_ranks(spec, RAGGED, methods)
            loss, gradients = on_ranks(
                spec, RAGGED, methods, head_groups=count, recompute=(False, True), offload=(True, False), tile_tokens=5
            )
            assert_same(loss, expected[0], tolerance=EXACT)
            assert_same(gradients, expected[1], tolerance=EXACT)


@pytest.mark.parametrize(("method", "num_ranks"), [(Method.DENSE, 1), (Method.ULYSSES, 2), (Method.ULYSSES_Z, 2)])
def test_attention_in_groups_of_heads_keeps_its_input_its_output_and_log_sum_exps(ranks, method, num_ranks):
    spec = small(num_heads=8, num_kv_heads=4)
    for count in (2, 4):
        for num_copied in ranks(num_ranks).run(kept_by_attention, spec, method, count):
            tokens = 2 * spec.hidden_size + 1 + spec.num_heads * spec.head_size  # with the norm's input and number
            assert num_copied == 8 * 480 // num_ranks * (tokens + spec.num_heads)


def kept_by_attention(spec, method, head_groups):
    """Bytes that norm and attention of a layer save."""
    group, weights = whole_group(), WEIGHTS_OF.get(method, WeightPlacement.WHOLE)
    model = model_of(spec)
    if weights is WeightPlacement.SHARDED:
        keep_own_rows(model, spec, rank=group.rank, degree=group.size)
    methods = (method,) * spec.num_layers
    execution = execution_of(model, group, (40,) * 12, methods, weights, head_groups=head_groups)
    x_tD = torch.randn(480 // group.size, spec.hidden_size, dtype=torch.float64, requires_grad=True)
    layer, host = model.layers[0], HostOffload("cpu")
    lasting = [*model.parameters(), *execution._views[0].made_tables]
    with host.micro_batch().layer(lambda tensor: any(same_storage(tensor, other) for other in lasting)):
        out_tD = execution.operators(0).attention(layer.pre_attention(x_tD), layer.attention_weights)
    out_tD.sum().backward()
    return host.num_copied_bytes
