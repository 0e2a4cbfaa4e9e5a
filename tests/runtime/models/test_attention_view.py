from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.runtime.models.attention_view import across_frames, in_order, within_frames
from tests.runtime.models.cases import pack_of

packs = st.lists(st.integers(1, 20), min_size=1, max_size=6).map(lambda lengths: pack_of(*lengths))
VIEWS = {
    "in order": lambda cu_seqlens, frame_size: in_order(cu_seqlens, causal=True),
    "within frames": lambda cu_seqlens, frame_size: within_frames(cu_seqlens, frame_size=frame_size),
    "across frames": lambda cu_seqlens, frame_size: across_frames(cu_seqlens, frame_size=frame_size),
}


def parts_of(view):
    """The pack's tokens in each sequence of the view."""
    order = np.arange(view.num_tokens) if view.order is None else view.order
    return [order[start:end].tolist() for start, end in pairwise(view.cu_seqlens)]


@pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS)
@given(pack=packs, frame_size=st.integers(1, 25))
def test_a_view_shows_every_token_once_in_sequences_without_gaps(make, pack, frame_size):
    view = make(pack.cu_seqlens, frame_size)
    assert view.num_tokens == pack.num_tokens
    assert sorted(token for part in parts_of(view) for token in part) == list(range(pack.num_tokens))
    assert view.cu_seqlens[0] == 0 and all(part for part in parts_of(view))
    assert all(isinstance(cut, int) for cut in view.cu_seqlens)


@pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS)
@given(pack=packs, frame_size=st.integers(1, 25))
def test_places_undo_the_order_and_offsets_count_from_the_start_of_a_sequence(make, pack, frame_size):
    view = make(pack.cu_seqlens, frame_size)
    order = np.arange(view.num_tokens) if view.order is None else view.order
    assert np.array_equal(view.places[order], np.arange(view.num_tokens))
    assert np.array_equal(order[view.places], np.arange(view.num_tokens))
    for part in parts_of(view):
        assert view.offsets[part].tolist() == list(range(len(part)))


@given(pack=packs, frame_size=st.integers(1, 25))
def test_frames_are_runs_of_a_sequence_and_places_meet_across_them(pack, frame_size):
    in_frames = across = ()
    for start, end in pairwise(pack.cu_seqlens):
        frames = [list(range(cut, min(cut + frame_size, end))) for cut in range(start, end, frame_size)]
        in_frames += tuple(frames)
        across += tuple([frame[place] for frame in frames if place < len(frame)] for place in range(len(frames[0])))
    assert parts_of(within_frames(pack.cu_seqlens, frame_size=frame_size)) == list(in_frames)
    assert parts_of(across_frames(pack.cu_seqlens, frame_size=frame_size)) == list(across)
