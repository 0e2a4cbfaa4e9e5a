"""Who holds which tokens, and what each rank's queries see of each rank's keys: pure integers."""

from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.core.prefix_tree import ROOT, PrefixTree
from lengthwise.runtime.models.attention_view import AttentionView, across_frames, in_order, within_frames
from lengthwise.runtime.parallel.attention_blocks import block_tasks
from lengthwise.runtime.parallel.packed_tasks import packed
from lengthwise.runtime.parallel.tokens import shard_tokens
from tests.examples import examples

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=8)


def boundaries(lengths):
    return tuple(accumulate(lengths, initial=0))


@given(lengths=LENGTHS, degree=st.integers(1, 9), causal=st.booleans())
def test_every_token_has_one_rank_and_ranks_differ_by_one_token(lengths, degree, causal):
    shards = shard_tokens(boundaries(lengths), degree=degree, causal=causal)
    assert sorted(shards.by_rank.tolist()) == list(range(sum(lengths)))
    assert max(shards.sizes) - min(shards.sizes) <= 1
    assert all((np.diff(places) > 0).all() for places in shards.places)


@pytest.mark.parametrize("degree", [2, 3, 4, 8])
def test_causal_work_is_balanced(degree):
    lengths = [1000, 37, 4096, 5, 5, 720]
    cu_seqlens = boundaries(lengths)
    shards = shard_tokens(cu_seqlens, degree=degree, causal=True)
    offsets = in_order(cu_seqlens, causal=True).offsets
    pairs = [int((offsets[places] + 1).sum()) for places in shards.places]
    assert max(pairs) * degree / sum(pairs) < 1.01
    runs = [int((offsets[part] + 1).sum()) for part in np.array_split(np.arange(len(offsets)), degree)]
    assert max(runs) * degree / sum(runs) > 1.25, "in runs, which is what zigzag is for"


@given(
    lengths=LENGTHS,
    degree=st.integers(1, 5),
    kind=st.sampled_from(["causal", "bidirectional", "within frames", "across frames"]),
    frame_size=st.integers(1, 9),
)
@settings(max_examples=examples(60), deadline=None)
def test_tasks_cover_exactly_the_pairs_that_attention_sees(lengths, degree, kind, frame_size):
    cu_seqlens = boundaries(lengths)
    view = {
        "causal": in_order(cu_seqlens, causal=True),
        "bidirectional": in_order(cu_seqlens, causal=False),
        "within frames": within_frames(cu_seqlens, frame_size=frame_size),
        "across frames": across_frames(cu_seqlens, frame_size=frame_size),
    }[kind]
    shards = shard_tokens(cu_seqlens, degree=degree, causal=view.causal)
    seen = np.zeros((sum(lengths), sum(lengths)), dtype=int)
    for rank in range(degree):
        for source in range(degree):
            queries, keys = (np.sort(view.places[shards.places[one]]) for one in (rank, source))
            add_seen(seen, block_tasks(view, shards, rank=rank, source=source), queries, keys)
    assert np.array_equal(seen, visible(view))


@given(seed=st.integers(0, 1 << 20), num_segments=st.integers(1, 9), degree=st.integers(1, 4), zigzag=st.booleans())
@settings(max_examples=examples(60), deadline=None)
def test_tasks_of_a_prefix_tree_also_see_all_that_a_segment_continues(seed, num_segments, degree, zigzag):
    tree = random_tree(np.random.default_rng(seed), num_segments)
    view = in_order((0, tree.num_slots), causal=True, tree=tree)
    shards = shard_tokens(view.cu_seqlens, degree=degree, causal=zigzag)
    seen = np.zeros((tree.num_slots, tree.num_slots), dtype=int)
    for rank in range(degree):
        for source in range(degree):
            tasks = block_tasks(view, shards, rank=rank, source=source)
            add_seen(seen, tasks, *(shards.places[one] for one in (rank, source)))
            launches = packed(tasks, torch.device("cpu"))
            assert len(launches) <= 1 + max(map(len, tree.paths)), "one for each depth"
            for launch in launches:
                queries = torch.arange(len(shards.places[rank]))[launch.query_rows.index]
                assert len(queries.unique()) == len(queries) == int(launch.query_offsets[-1])
    paths = [tree.paths[segment] for segment in tree.segments]
    expected = [[other in path for other in tree.segments] for path in paths]
    assert np.array_equal(seen, np.tril(expected))


def random_tree(rng, num_segments):
    """A prefix tree of segments of one to nine slots in depth-first order."""
    parents, path = [ROOT], [0]
    for segment in range(1, num_segments):
        path = path[: rng.integers(0, len(path) + 1)]
        parents.append(path[-1] if path else ROOT)
        path.append(segment)
    bounds = (0, *accumulate(rng.integers(1, 10, num_segments).tolist()))
    leaves = tuple(segment for segment in range(num_segments) if segment not in parents)
    return PrefixTree(bounds=bounds, parents=tuple(parents), leaves=leaves)


def add_seen(seen, tasks, queries, keys):
    """Count the pairs of places that tasks compute."""
    for task in tasks:
        for number in range(task.count):
            rows = queries[task.query + number * task.num_queries :][: task.num_queries]
            columns = keys[task.key + number * task.num_keys :][: task.num_keys]
            block = np.ones((len(rows), len(columns)), dtype=int)
            seen[np.ix_(rows, columns)] += np.tril(block) if task.causal else block


def visible(view: AttentionView):
    """[T, T] in the order of the view: one where the row's token attends to the column's."""
    sequence = np.repeat(np.arange(len(view.cu_seqlens) - 1), np.diff(view.cu_seqlens))
    same = (sequence[:, None] == sequence[None, :]).astype(int)
    return np.tril(same) if view.causal else same
