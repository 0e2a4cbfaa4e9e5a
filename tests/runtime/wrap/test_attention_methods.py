"""Every attention of any model is exact under every method that shares sequences, on any number of ranks."""

import random
from dataclasses import replace
from functools import partial
from itertools import accumulate

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from lengthwise.core.head_split import ulysses_degree
from lengthwise.core.pipeline_config import Method
from lengthwise.runtime.comm.group import Group
from lengthwise.runtime.loop.planned_pipelines import ANY_MODEL_METHODS
from lengthwise.runtime.parallel.attention_blocks import Task
from lengthwise.runtime.wrap import sharded_attention
from lengthwise.runtime.wrap.context import PackShard
from lengthwise.runtime.wrap.exchange_script import AttentionExchange
from lengthwise.runtime.wrap.sharded_attention import AttentionRequest, attend_shard
from lengthwise.runtime.wrap.zero_collectives import exchanges_of
from tests.runtime.loop import memory_runs
from tests.runtime.loop.memory_runs import train
from tests.runtime.loop.runs import EXACT, Case, Packs, assert_exact, shard_of, step_on_ranks
from tests.runtime.loop.test_families import CASES as FAMILIES
from tests.runtime.parallel.cases import whole_group
from tests.runtime.parallel.flash_on_cpu import flash_on_cpu
from tests.runtime.parallel.test_tokens import random_tree
from tests.runtime.wrap.test_position_ids import built
from tests.runtime.wrap.test_position_masks import CASES as MASKED
from tests.runtime.wrap.test_position_masks import NEXT

MASKED = MASKED | {
    "MPT: by hand, with a bias by position": Case(
        build=partial(built, "MptForCausalLM", d_model=32, n_layers=2, n_heads=4, max_seq_len=40), **NEXT
    )
}
METHODS = tuple(method for method in ANY_MODEL_METHODS if method is not Method.DENSE)
AT_ONCE = tuple((method, 1) for method in METHODS)
"""Methods, and in how many groups of heads attention is computed."""


def strided(number, heads, queries, keys):
    q, k = (torch.arange(span.start, span.stop) for span in (queries, keys))
    return ((q[:, None] - k) % (2 + number) == 0) & (k <= q[:, None])


def sloped(number, heads, queries, keys):
    """A bias by position for each head, as ALiBi has it."""
    q, k = (torch.arange(span.start, span.stop) for span in (queries, keys))
    distance = (q[:, None] - k).double()
    slopes = 0.5 ** (1 + torch.arange(heads.start, heads.stop).double())
    return (-slopes[:, None, None] * distance).masked_fill(distance < 0, -torch.inf)


def drawn_kind(rng, num_heads):
    window = rng.choice((None, None, (rng.randint(0, 9), rng.randint(0, 9))))
    return AttentionRequest(
        causal=rng.random() < 0.6, scale=rng.choice((None, 0.3)), window=window, dropout=rng.choice((0.0, 0.0, 0.3)),
        call=rng.randint(0, 3), mask=rng.choice((None, None, strided, sloped)), softcap=rng.choice((None, 0.7)),
        sinks=rng.choice((None, torch.linspace(-1, 1, num_heads, dtype=torch.float64))),
    )  # fmt: skip


def drawn_case(rng):
    """Queries, keys and values of a pack, the gradient of the output, and the attention."""
    num_kv, group_size = rng.choice((1, 2, 3, 4)), rng.choice((1, 2, 3))
    size, value_size = rng.choice(((4, 4), (4, 6), (6, 3)))
    lengths = tuple(rng.choice((1, 2, rng.randint(3, 40))) for _ in range(rng.randint(1, 4)))
    generator = torch.Generator().manual_seed(rng.randint(0, 1 << 30))
    shapes = ((num_kv * group_size, size), (num_kv, size), (num_kv, value_size), (num_kv * group_size, value_size))
    tensors = [torch.randn(sum(lengths), *shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return lengths, tensors, drawn_kind(rng, num_kv * group_size)


def attended(lengths, tensors, kind, group, *, recompute=False, **options):
    """Outputs and gradients of queries, keys, values and sinks on one rank, its places, and its shard."""
    shard = PackShard(
        step=0, seed=1, ids=tuple(range(len(lengths))), cu_seqlens=tuple(accumulate(lengths, initial=0)), group=group,
        device=torch.device("cpu"), **options,
    )  # fmt: skip
    places = torch.from_numpy(shard.places)
    qkv = [x[places].requires_grad_() for x in tensors[:3]]
    sinks = None if kind.sinks is None else kind.sinks.clone().requires_grad_()

    def compute(q, k, v):
        return attend_shard(q, k, v, replace(kind, sinks=sinks), shard).sin()  # layers save what attention gives

    with set_checkpoint_early_stop(False):
        out = checkpoint(compute, *qkv, use_reentrant=False) if recompute else compute(*qkv)
    before = shard.num_exchanges
    out.backward(tensors[3][places])
    grads = [x.grad for x in qkv]
    if sinks is not None:
        grads.append(torch.zeros_like(sinks) if sinks.grad is None else sinks.grad)  # a rank without heads
    return [out.detach(), *grads], places, shard, (before, shard.num_exchanges - before)


def attended_by_path(tree, tensors, kind):
    """The same of each path of a prefix tree by itself; what paths share has the gradient of its output once."""
    found, is_new = [torch.zeros_like(x) for x in (tensors[3], *tensors[:3])], torch.ones(tree.num_slots).double()
    for member in range(len(tree.leaves)):
        slots = torch.from_numpy(tree.slots_of(member))
        of_path = [x[slots] for x in tensors]
        of_path[3] = of_path[3] * is_new[slots, None, None]
        out, *grads = attended((len(slots),), of_path, kind, Group(rank=0))[0]
        found[0][slots], is_new[slots] = out, 0.0
        for total, grad in zip(found[1:4], grads):
            total.index_add_(0, slots, grad)
        if kind.sinks is not None:
            found[4:] = [sum((grads[3], *found[4:]))]
    return found


def check_draws(seeds, has_trees=False, ways=AT_ONCE, **changes):
    group = whole_group()
    for seed in seeds:
        rng = random.Random(seed)
        lengths, tensors, kind = drawn_case(rng)
        kind, tree = replace(kind, **changes), None
        if has_trees:
            tree = random_tree(np.random.default_rng(seed), rng.randint(1, 8))
            lengths = (tree.num_slots,)
            tensors = [torch.randn(tree.num_slots, *x.shape[1:], dtype=x.dtype) for x in tensors]
        for x in tensors:
            dist.broadcast(x, src=0)
        expected = attended_by_path(tree, tensors, kind) if tree else attended(lengths, tensors, kind, Group(rank=0))[0]
        sharded_attention.QUERY_CHUNK = rng.choice((3, 512))
        for method, head_groups in ways:
            group.sent.clear()
            recompute = rng.random() < 0.5
            found, places, shard, issued = attended(
                lengths, tensors, kind, group, recompute=recompute, methods=(method,), tree=tree,
                is_causal=rng.random() < 0.5, head_groups=head_groups,
            )  # fmt: skip
            if kind.sinks is not None:
                dist.all_reduce(found[4])
            for name, got, whole in zip(("output", "queries", "keys", "values", "sinks"), found, expected):
                own = whole if name == "sinks" else whole[places]
                error = float((got - own).norm()) / max(float(whole.norm()), 1e-3)
                assert error <= EXACT, f"seed {seed}, {method} in {head_groups}, {name}: {error:.1e}"
            check_script(shard, issued, recompute)
    sharded_attention.QUERY_CHUNK = 512


def check_script(shard, issued, recompute):
    """A rank that stands in for itself issues as many exchanges as the attention did."""
    forward, backward = (len(exchanges_of(shard, shard.attended[0], is_forward)) for is_forward in (True, False))
    assert issued == (forward, backward + recompute * forward)
    if shard.head_groups > 1:
        assert forward == backward == (2 * shard.head_groups if shard.group.size > 1 else 0)


@pytest.mark.parametrize("num_ranks", [3, *(pytest.param(n, marks=pytest.mark.deep) for n in (2, 4))])
def test_any_attention_is_exact_under_every_method(ranks, num_ranks):
    ranks(num_ranks).run(check_draws, range(3 if num_ranks == 3 else 6))


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.deep), 3])
def test_any_attention_is_exact_by_the_kernels_of_gpus(ranks, num_ranks):
    ranks(num_ranks).run(check_kernels, range(50, 52 if num_ranks == 3 else 55))


def stand_in_for_wide_queries(method):
    """Attention on the first rank of queries and keys that a norm left in float32; the second rank sends zeros."""
    shard = PackShard(
        step=0, seed=1, ids=(0,), cu_seqlens=(0, 17), group=whole_group(), device=torch.device("cpu"),
        methods=(method,), dtype=torch.bfloat16,
    )  # fmt: skip
    if shard.group.rank == 1:
        call = AttentionExchange(num_heads=4, num_kv_heads=2, head_size=8, dtype=torch.float32, layer=None)
        for is_forward in (True, False):
            for exchange in exchanges_of(shard, call, is_forward):
                exchange.issue(shard.device)
        return True
    q, k, v = (torch.ones(shard.num_slots, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    with torch.autocast("cpu", torch.bfloat16):
        out = attend_shard(q, k, v.bfloat16(), AttentionRequest(causal=True), shard)
    out.float().sum().backward()
    return all(x.grad.isfinite().all() and x.grad.dtype == torch.float32 for x in (q, k, v))


@pytest.mark.parametrize("method", [Method.ULYSSES, Method.RING])
def test_ranks_exchange_the_dtype_of_autocast_which_one_that_stands_in_knows(ranks, method):
    assert ranks(2).run(stand_in_for_wide_queries, method) == [True, True]


@pytest.mark.parametrize("num_ranks", [3, *(pytest.param(n, marks=pytest.mark.deep) for n in (2, 4))])
def test_attention_along_prefix_trees_is_that_of_each_path(ranks, num_ranks):
    ranks(num_ranks).run(check_draws, range(70, 75), has_trees=True, causal=True, dropout=0.0, mask=None)


@pytest.mark.deep
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5])
def test_attention_along_many_more_prefix_trees_is_that_of_each_path(ranks, num_ranks):
    for first in range(1000, 1200, 40):
        seeds = range(first, first + 40)
        ranks(num_ranks).run(check_draws, seeds, has_trees=True, causal=True, dropout=0.0, mask=None)


def check_kernels(seeds, ways=AT_ONCE):
    """Causal and open attention, windows and sinks, and prefix trees, for which there are kernels of blocks."""
    with flash_on_cpu() as calls:
        check_draws(seeds, ways=ways, dropout=0.0, softcap=None, mask=None)
        check_draws(seeds, has_trees=True, ways=ways, causal=True, dropout=0.0, softcap=None, mask=None)
        check_window_after_plain()
    assert calls["forward"] and calls["backward"]


def check_window_after_plain():
    """Layers of one micro-batch with a window and without: where each token sees itself alone, it gets its value."""
    shard = PackShard(
        step=0, seed=1, ids=(0,), cu_seqlens=(0, 17), group=whole_group(), device=torch.device("cpu"),
        methods=(Method.RING,),
    )  # fmt: skip
    q, k, v = torch.randn(3, shard.num_slots, 2, 4, dtype=torch.float64)
    for window in (None, (0, 0)):
        out = attend_shard(q, k, v, AttentionRequest(causal=True, window=window), shard)
    torch.testing.assert_close(out, v)


@pytest.mark.deep
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 6])
def test_many_more_attentions_are_exact_under_every_method(ranks, num_ranks):
    for first in range(100, 500, 40):
        ranks(num_ranks).run(check_draws, range(first, first + 40))


TOGETHER = (
    # All methods in one step, at odd and even degrees, with layers that recompute and layers that do not.
    Packs(ranks=(0, 1, 2, 3), packs=((2, 3), (5, 8)), recompute=(True, False, True), method=Method.ULYSSES_RING),
    Packs(ranks=(0, 1, 2), packs=((4, 1), (0,)), recompute=(True,), phase=1, method=Method.RING),
    Packs(ranks=(3,), packs=((7,),), phase=1),
    Packs(ranks=(1, 2), packs=((9, 6),), phase=2, method=Method.ALL_GATHER),
    Packs(ranks=(0,), packs=(), phase=2),
    Packs(ranks=(3,), packs=(), phase=2),
)
MASKED_TOGETHER = (
    Packs(ranks=(0, 1, 2), packs=((2, 3), (5, 8)), recompute=(True,), method=Method.RING),
    Packs(ranks=(1, 2), packs=((4, 1), (0,)), recompute=(True,), phase=1, method=Method.ALL_GATHER),
    Packs(ranks=(0,), packs=((7,), (9, 6)), phase=1),
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.deep] * (name != "llama")) for name in FAMILIES],
)
def test_a_family_trains_as_its_own_loop_does_under_all_methods_in_one_step(ranks, name):
    for found in ranks(4).run(step_on_ranks, FAMILIES[name], TOGETHER):
        assert_exact(FAMILIES[name], found, name)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.deep] * name.startswith(("Bloom", "GPT-J", "Llama 4", "MPT", "Gemma 2")))
        for name in MASKED
    ],
)
def test_masks_sinks_and_soft_caps_of_a_family_are_exact_in_rings(ranks, name):
    for found in ranks(3).run(step_on_ranks, MASKED[name], MASKED_TOGETHER):
        assert_exact(MASKED[name], found, name)


@pytest.mark.parametrize(
    ("num_ranks", "method", "recomputed"),
    [
        pytest.param(3, Method.RING, 2, marks=pytest.mark.deep),
        *(
            pytest.param(num_ranks, method, recomputed, marks=pytest.mark.deep)
            for num_ranks in (2, 3, 4) for method in METHODS[1:] for recomputed in (0, 3)
        ),
    ],
)  # fmt: skip
def test_a_rank_out_of_memory_stands_in_for_itself_in_rings_too(ranks, num_ranks, method, recomputed):
    expected = memory_runs.train_alone(ranks)
    for place in memory_runs.PLACES:
        for losses, told, weights in ranks(num_ranks).run(train, num_ranks, recomputed, {1: (place,)}, method=method):
            assert told == ["rank 1 in micro-batch 0"]
            assert losses == pytest.approx(expected[0], abs=1e-10)
            torch.testing.assert_close(weights, expected[2], rtol=0, atol=1e-10)


@pytest.mark.deep
@pytest.mark.parametrize("fails", [pytest.param({}, marks=pytest.mark.deep), {1: ("backward of layer 1",)}])
def test_weights_gathered_by_layer_and_rings_go_together_also_out_of_memory(ranks, fails):
    expected = memory_runs.train_alone(ranks)
    for losses, _, weights in ranks(3).run(train, 3, 2, fails, method=Method.RING, by_layer=True):
        assert losses == pytest.approx(expected[0], abs=1e-10)
        torch.testing.assert_close(weights, expected[2], rtol=0, atol=1e-10)


def train_failing_in_ring(fails_at, recomputed, method):
    """As :func:`train`, where rank 1 runs out of memory at the n-th block of attention of its first attempt."""
    attend, attend_backward, count = Task.attend, Task.attend_backward, 0

    def counted(function):
        def call(*args):
            nonlocal count
            count += memory_runs._fails_at == {"ring"}
            if count == fails_at:
                memory_runs.fail_here("ring")
            return function(*args)

        return call

    Task.attend, Task.attend_backward = counted(attend), counted(attend_backward)
    try:
        return train(dist.get_world_size(), recomputed, {1: ("ring",)}, method=method)
    finally:
        Task.attend, Task.attend_backward = attend, attend_backward


@pytest.mark.parametrize(
    ("method", "recomputed"),
    [(Method.RING, 1), *(pytest.param(method, 2, marks=pytest.mark.deep) for method in METHODS[1:])],
)
@pytest.mark.parametrize("fails_at", [*(pytest.param(n, marks=pytest.mark.deep) for n in (2, 5)), 14])
def test_a_rank_out_of_memory_in_the_midst_of_a_ring_leaves_no_message_behind(ranks, method, recomputed, fails_at):
    expected = memory_runs.train_alone(ranks)
    num_ranks = 4 if method is Method.ULYSSES_RING else 3
    for losses, told, weights in ranks(num_ranks).run(train_failing_in_ring, fails_at, recomputed, method):
        assert told == ["rank 1 in micro-batch 0"]
        assert losses == pytest.approx(expected[0], abs=1e-10)
        torch.testing.assert_close(weights, expected[2], rtol=0, atol=1e-10)


def test_layers_beyond_those_of_the_plan_share_as_its_last_one_does():
    shard = shard_of((9, 4), rank=1, degree=4, methods=(Method.ULYSSES, Method.RING))
    kinds = [
        (sharing.exchange is None, sharing.ring is None)
        for layer in (None, 0, 1, 7) for sharing in [shard.sharing(num_heads=4, num_kv_heads=2, layer=layer)]
    ]  # fmt: skip
    assert kinds == [(False, True), (False, True), (True, False), (True, False)]


def test_neighbours_divide_the_ranks_and_where_they_can_the_heads():
    def of(degree, num_heads, num_kv_heads, method=Method.ULYSSES_RING):
        return ulysses_degree(method, degree, num_heads, num_kv_heads)

    assert [of(degree, 32, 8) for degree in (1, 2, 3, 4, 6, 8, 16, 64)] == [1, 1, 1, 2, 2, 4, 8, 8]
    assert of(8, 2, 2) == 2 and of(6, 3, 1) == 3 and of(9, 2, 1) == 1
    assert of(4, 10, 5) == 2, "heads that do not divide are shared unevenly"
    assert of(6, 6, 6, Method.ULYSSES) == 6 and of(6, 6, 6, Method.RING) == of(6, 6, 6, Method.ALL_GATHER) == 1
