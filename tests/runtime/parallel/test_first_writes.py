"""Buffers that start empty end as those that start from zeros: of rows, of attention, and of its gradients."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lengthwise.runtime.comm.group import Group
from lengthwise.runtime.models.attention_view import in_order
from lengthwise.runtime.parallel.attention_blocks import LaunchedAlone, MaskedTask, block_tasks
from lengthwise.runtime.parallel.first_writes import FirstWrites, Rows
from lengthwise.runtime.parallel.ring import Ring
from lengthwise.runtime.parallel.ring_attention import ring_backward, ring_forward
from lengthwise.runtime.parallel.tokens import shard_tokens
from tests.examples import examples
from tests.runtime.parallel.flash_on_cpu import flash_on_cpu
from tests.runtime.parallel.test_tokens import random_tree

EXACT = 1e-12
"""Relative to numbers of size one, in float64."""
NUM_ROWS = 12
RUN = st.tuples(st.integers(0, NUM_ROWS - 1), st.integers(1, 5)).map(lambda run: (run[0], min(NUM_ROWS, sum(run))))


@given(results=st.lists(st.lists(RUN, min_size=1, max_size=3), max_size=6))
@example(results=[[(row, row + 1)] for row in range(1, NUM_ROWS, 2)])
@settings(max_examples=examples(200), deadline=None)
def test_first_results_are_written_and_later_ones_added(results):
    writes = FirstWrites.of(results, NUM_ROWS)
    x = writes.fill(torch.full((NUM_ROWS,), torch.nan), 0.0)
    expected = torch.zeros(NUM_ROWS)
    for runs, is_first in zip(results, writes.is_first):
        rows = Rows.of(runs, torch.device("cpu"))
        numbers = torch.cat([torch.arange(start, end) for start, end in runs])
        values = torch.arange(1.0, len(numbers) + 1)
        expected.index_add_(0, numbers, values)
        (rows.write if is_first else rows.add)(x, values)
    assert torch.equal(x, expected)


@given(seed=st.integers(0, 1 << 20), num_segments=st.integers(1, 9))
@settings(max_examples=examples(50), deadline=None)
def test_one_rank_starts_a_prefix_tree_from_no_zeros(seed, num_segments):
    """Each query and key is first written by the task of its own segment."""
    ring, tree = ring_of_tree(seed, num_segments)
    schedule = ring.schedule(torch.empty(tree.num_slots, 1, 8))
    hop = schedule.hops[0]
    assert not schedule.queries.blank and not hop.keys.blank
    assert hop.is_first == hop.keys.is_first == tuple(task.causal for task in hop.tasks)


@pytest.mark.parametrize("degree", [2, 3])
def test_a_ring_starts_from_zeros_in_no_row_of_a_query(degree):
    cu_seqlens = (0, 13, 40, 49)
    view, shards = in_order(cu_seqlens, causal=True), shard_tokens(cu_seqlens, degree=degree, causal=True)
    for rank in range(degree):
        tasks = tuple(block_tasks(view, shards, rank=rank, source=source) for source in range(degree))
        ring = Ring(group=Group(rank=rank, ranks=tuple(range(degree))), sizes=shards.sizes, tasks=tasks)
        schedule = ring.schedule(torch.empty(shards.sizes[rank], 1, 8))
        assert not schedule.queries.blank
        assert all(schedule.hops[rank].is_first) and all(schedule.hops[rank].keys.is_first)
        assert not any(any(hop.is_first) for source, hop in schedule.hops.items() if source != rank)


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_prefix_tree_is_exact_from_memory_that_is_not_numbers(seed, flash):
    ring, tree = ring_of_tree(seed, 8)
    paths = [tree.paths[segment] for segment in tree.segments]
    sees = torch.tensor([[other in path for other in tree.segments] for path in paths]).tril()
    with flash_on_cpu() if flash else uninitialized_is_nan():
        check_attention(ring, sees, seed)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_overlapping_masked_tasks_are_exact_from_memory_that_is_not_numbers(seed, has_sinks):
    """Also queries that see no key, by no task or a mask of nothing."""
    rng = np.random.default_rng(seed)
    sees = torch.from_numpy(rng.random((20, 20)) < 0.4)
    tasks, covered = [], torch.zeros(20, 20, dtype=torch.bool)
    for _ in range(6):
        (query, key), (rows, columns) = rng.integers(0, 17, 2).tolist(), rng.integers(1, 8, 2).tolist()
        places = slice(query, min(20, query + rows)), slice(key, min(20, key + columns))
        mask = (sees & ~covered)[places]
        block = {"query": query, "num_queries": len(mask), "key": key, "num_keys": mask.shape[1]}
        if mask.all():
            tasks.append(LaunchedAlone(**block))
        else:
            tasks.append(MaskedTask(**block, mask=lambda device, mask=mask: mask))
        covered[places] = True
    with uninitialized_is_nan():
        ring = Ring(group=Group(rank=0), sizes=(20,), tasks=(tuple(tasks),))
        check_attention(ring, sees & covered, seed, sinks=torch.randn(2).double() if has_sinks else None)


def ring_of_tree(seed, num_segments):
    """One rank's ring of a random prefix tree, and the tree."""
    tree = random_tree(np.random.default_rng(seed), num_segments)
    view = in_order((0, tree.num_slots), causal=True, tree=tree)
    shards = shard_tokens(view.cu_seqlens, degree=1, causal=True)
    tasks = block_tasks(view, shards, rank=0, source=0)
    return Ring(group=Group(rank=0), sizes=shards.sizes, tasks=(tasks,)), tree


def check_attention(ring, sees, seed, *, sinks=None):
    """Compare one rank's attention and its gradients with softmax over all keys, in float64."""
    torch.manual_seed(seed)
    q, k, v, dout = (torch.randn(len(sees), 2, 8, dtype=torch.float64) for _ in range(4))
    qkv = [x.clone().requires_grad_() for x in (q, k, v)]
    logits = torch.einsum("lnh,snh->nls", *qkv[:2]) * 8**-0.5
    logits = logits.masked_fill(~sees, -torch.inf)
    extra = torch.full((2,), -torch.inf) if sinks is None else sinks
    lse = torch.logsumexp(torch.cat([logits, extra.double()[:, None, None].expand(-1, len(sees), 1)], 2), 2)
    weights = (logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    expected = torch.einsum("nls,snh->lnh", weights, qkv[2])
    out, actual_lse = ring_forward(q, k, v, ring, sinks_N=sinks)
    torch.testing.assert_close(actual_lse, lse.T.detach(), rtol=0, atol=EXACT)
    torch.testing.assert_close(out, expected.detach(), rtol=0, atol=EXACT)
    gradients = torch.autograd.grad(expected, qkv, dout)
    for actual, gradient in zip(ring_backward(dout, q, k, v, out, actual_lse, ring), gradients):
        torch.testing.assert_close(actual, gradient, rtol=0, atol=EXACT)


@contextmanager
def uninitialized_is_nan():
    """Within, tensors of torch.empty are full of NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
