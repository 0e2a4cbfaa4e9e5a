"""Sequences whole on one rank of a stage: balanced, within memory, and priced as what ranks then send."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.core.pipeline_config import Method, uniform_scheme
from lengthwise.core.specs import cluster_preset, model_preset
from lengthwise.core.token_placement import check_placement, share_sizes
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.data.synthetic import synthetic_lengths
from lengthwise.plan.space.candidate import make_candidates
from lengthwise.plan.space.placed_sequences import MORE_PAIRS, MORE_TOKENS, place_sequences, with_local_sequences
from tests.examples import examples

LLAMA = model_preset("llama-7b")
COST = AnalyticCost(model=LLAMA, cluster=cluster_preset("1x8xH100-80GB"))


def pairs_of_ranks(lengths, placement, degree):
    """By looking at every token."""
    pairs = [0.0] * degree
    for length, pieces in zip(lengths, placement):
        if not pieces:
            pairs = [of_rank + length * (length + 1) / 2 / degree for of_rank in pairs]
        ends = [rank for rank, size in pieces for _ in range(size)]
        for position, rank in enumerate(ends):
            pairs[rank] += position + 1
    return pairs


@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=60),
    degree=st.integers(2, 8),
    longest=st.integers(0, 200),
    room=st.floats(1.0, 2.0),
)
@settings(max_examples=examples(150), deadline=None)
def test_no_rank_has_many_more_tokens_or_pairs_than_the_mean(lengths, degree, longest, room):
    total = sum(lengths)
    placed = place_sequences(tuple(lengths), degree=degree, longest=longest, most_tokens=int(total * room))
    if not placed.placement:
        return
    check_placement(lengths, placed.placement, degree)
    sizes, pairs = share_sizes(lengths, placed.placement, degree), pairs_of_ranks(lengths, placed.placement, degree)
    assert max(sizes) == placed.most_tokens <= max(-(-total // degree), int(total * room) // degree)
    assert max(sizes) <= max(-(-total // degree), (1 + MORE_TOKENS) * total / degree)
    assert placed.of_mean_tokens == pytest.approx(max(sizes) * degree / total)
    assert placed.of_mean_pairs == pytest.approx(max(pairs) * degree / sum(pairs))
    assert placed.of_mean_pairs <= 1 + MORE_PAIRS
    assert all(not pieces or length <= longest for length, pieces in zip(lengths, placed.placement))


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_of_a_long_sequence_among_short_ones_ranks_share_little_else(degree):
    lengths = [32_768, *np.minimum(synthetic_lengths("commoncrawl", 60, seed=degree), 2048).tolist()]
    placed = place_sequences(tuple(lengths), degree=degree, longest=2048, most_tokens=2 * sum(lengths))
    assert placed.placement[0] == ()
    whole = sum(length for length, pieces in zip(lengths, placed.placement) if len(pieces) == 1)
    assert whole > 0.9 * sum(lengths[1:])


def test_a_sequence_alone_is_in_equal_parts():
    assert place_sequences((900,), degree=2, longest=1000, most_tokens=2000).placement == ()


def test_prices_are_those_of_one_device_up_to_the_longest_and_of_the_ring_beyond():
    scheme = uniform_scheme(LLAMA.num_layers, degree=8, method=Method.RING)
    (ring,) = make_candidates([scheme], COST, num_devices=8)
    (local,) = with_local_sequences([ring])
    lengths = np.array([1, 64, local.longest_local, local.longest_local + 1, 30_000])
    dense_s = COST.sequence_times_s(lengths, uniform_scheme(LLAMA.num_layers)) / 8
    assert local.times_s(lengths)[:3] == pytest.approx(dense_s[:3], rel=1e-9)
    assert (local.times_s(lengths)[:2] < ring.times_s(lengths)[:2]).all()
    assert (local.times_s(lengths)[3:] == ring.times_s(lengths)[3:]).all()
    assert (local.comm_times_s(lengths)[:3] == 0).all() and (np.diff(local.times_s(np.arange(1, 9999))) > 0).all()
    assert local.max_tokens == ring.max_tokens


def test_only_methods_that_exchange_keys_and_values_have_local_sequences():
    schemes = [
        uniform_scheme(LLAMA.num_layers, degree=degree, method=method)
        for method, degree in ((Method.DENSE, 1), (Method.ULYSSES, 2), (Method.RING, 2), (Method.ALL_GATHER, 2))
    ]
    local = with_local_sequences(make_candidates(schemes, COST, num_devices=8))
    assert [candidate.scheme.methods[0] for candidate in local] == [Method.RING, Method.ALL_GATHER]
