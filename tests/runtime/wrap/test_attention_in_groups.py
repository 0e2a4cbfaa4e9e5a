"""Any attention of any model is exact in groups of heads: masks, windows, sinks, soft caps, dropout, trees, and out of
memory."""

import pytest
import torch

from lengthwise.core.pipeline_config import Method
from lengthwise.runtime.wrap.sharded_attention import AttentionRequest, attend_shard
from tests.runtime.loop.memory_runs import PLACES, train, train_alone
from tests.runtime.loop.runs import Packs, assert_exact, shard_of, step_on_ranks
from tests.runtime.wrap.test_attention_methods import MASKED, check_draws, check_kernels

IN_GROUPS = tuple((Method.ULYSSES, count) for count in (2, 3, 5, 12))
ON_ONE = tuple((Method.DENSE, count) for count in (2, 3, 12))
OF_KERNELS = {"dropout": 0.0, "softcap": None, "mask": None}


@pytest.mark.parametrize("num_ranks", [3, *(pytest.param(n, marks=pytest.mark.deep) for n in (1, 2, 4, 5))])
def test_any_attention_is_exact_in_groups_of_heads(ranks, num_ranks):
    seeds, ways = range(2) if num_ranks == 3 else range(2000, 2060), ON_ONE if num_ranks == 1 else IN_GROUPS
    ranks(num_ranks).run(check_draws, seeds, ways=ways)


@pytest.mark.deep
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_groups_of_heads_attend_along_prefix_trees_and_by_the_kernels_of_gpus(ranks, num_ranks):
    ways = ON_ONE if num_ranks == 1 else IN_GROUPS
    ranks(num_ranks).run(check_draws, range(70, 100), True, ways, causal=True, dropout=0.0, mask=None)
    ranks(num_ranks).run(check_kernels, range(50, 70), ways)


@pytest.mark.deep
@pytest.mark.parametrize("name", MASKED)
def test_masks_sinks_and_soft_caps_of_a_family_are_exact_in_groups_of_heads(ranks, name):
    packs = {"packs": ((2, 3), (5, 8)), "recompute": (True,), "head_groups": 2}
    groups = (Packs(ranks=(0, 1, 2), **packs), Packs(ranks=(1, 2), packs=((4, 1), (0,)), phase=1, head_groups=4))
    groups += (Packs(ranks=(0,), packs=((7,), (9, 6)), phase=1, head_groups=2),)
    for losses_and_changes in ranks(3).run(step_on_ranks, MASKED[name], groups):
        assert_exact(MASKED[name], losses_and_changes, name)


def test_groups_of_heads_attend_in_the_dtype_of_autocast():
    """Queries and keys may be wider, as norms leave them."""
    torch.manual_seed(0)
    tensors = [torch.randn(23, heads, 8, dtype=dtype) for heads, dtype in ((4, None), (2, None), (2, torch.bfloat16))]
    results = []
    for head_groups in (1, 2):
        shard = shard_of((9, 14), dtype=torch.bfloat16, methods=(Method.DENSE,), head_groups=head_groups)
        q, k, v = (x.clone().requires_grad_() for x in tensors)
        with torch.autocast("cpu", torch.bfloat16):
            out = attend_shard(q, k, v, AttentionRequest(causal=True), shard)
        out.float().square().sum().backward()
        results.append((out, q.grad, k.grad, v.grad))
    for whole, grouped in zip(*results, strict=True):
        assert grouped.dtype == whole.dtype
        torch.testing.assert_close(grouped, whole, rtol=2e-2, atol=2e-2)  # products of 8 bits


@pytest.mark.deep  # by default: test_oom_recovery, test_attention_methods
@pytest.mark.parametrize(
    ("num_ranks", "recomputed", "count", "places"),
    [
        (2, 2, 2, ("backward of layer 1",)),
        *(
            pytest.param(num_ranks, recomputed, count, PLACES, marks=pytest.mark.deep)
            for num_ranks in (2, 3) for recomputed in (0, 3) for count in (2, 4)
        ),
    ],
)  # fmt: skip
def test_a_rank_out_of_memory_stands_in_for_itself_in_groups_of_heads(ranks, num_ranks, recomputed, count, places):
    expected = train_alone(ranks)
    for place in places:
        fails = {1: (place,)}
        for losses, told, weights in ranks(num_ranks).run(train, num_ranks, recomputed, fails, head_groups=count):
            assert told == ["rank 1 in micro-batch 0"]
            assert losses == pytest.approx(expected[0], abs=1e-10)
            torch.testing.assert_close(weights, expected[2], rtol=0, atol=1e-10)
