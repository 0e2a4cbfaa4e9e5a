"""Who holds which tokens, and what each rank's queries see of each rank's keys: pure integers."""

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.runtime.models.attention_view import AttentionView, across_frames, in_order, within_frames
from lengthwise.runtime.parallel.attention_blocks import block_tasks
from lengthwise.runtime.parallel.tokens import shard_tokens

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
@settings(max_examples=60, deadline=None)
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
            for task in block_tasks(view, shards, rank=rank, source=source):
                for number in range(task.count):
                    rows = queries[task.query + number * task.num_queries :][: task.num_queries]
                    columns = keys[task.key + number * task.num_keys :][: task.num_keys]
                    block = np.ones((len(rows), len(columns)), dtype=int)
                    seen[np.ix_(rows, columns)] += np.tril(block) if task.causal else block
    assert np.array_equal(seen, visible(view))


def visible(view: AttentionView):
    """[T, T] in the order of the view: one where the row's token attends to the column's."""
    sequence = np.repeat(np.arange(len(view.cu_seqlens) - 1), np.diff(view.cu_seqlens))
    same = (sequence[:, None] == sequence[None, :]).astype(int)
    return np.tril(same) if view.causal else same
