import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.errors import InputError
from lengthwise.data.synthetic import (
    DOCUMENTS_LONGEST,
    EDGES,
    GITHUB_CODE,
    GRCH38,
    IMAGES,
    LONGEST,
    NAMES,
    SHORTEST,
    VIDEOS,
    synthetic_lengths,
)

MANY = 50_000
SHARE_TOLERANCE = 0.01
"""Four standard deviations of a share of 50,000 draws."""


@given(st.sampled_from(sorted(NAMES)), st.integers(1, 200), st.integers(0, 200), st.integers(0, (1 << 64) - 1))
def test_fewer_sequences_are_the_first_of_more(name, few, more, seed):
    assert np.array_equal(synthetic_lengths(name, few, seed), synthetic_lengths(name, few + more, seed)[:few])


@pytest.mark.parametrize("name", NAMES)
def test_lengths_are_whole_numbers_of_tokens(name):
    lengths = synthetic_lengths(name, MANY)
    assert lengths.dtype == np.int64
    assert lengths.min() >= SHORTEST
    assert not np.array_equal(lengths, synthetic_lengths(name, MANY, seed=1))


def test_draws_are_the_same_on_every_machine():
    assert synthetic_lengths("commoncrawl", 5, 3).tolist() == [32768, 971, 280, 323, 640]
    assert synthetic_lengths("grch38", 5, 3).tolist() == [624000, 14253, 20778, 144, 12972]


@pytest.mark.parametrize(("name", "published"), [("githubcode", GITHUB_CODE), ("grch38", GRCH38)])
def test_binned_lengths_have_the_published_shares_and_maximum(name, published):
    percent, longest = published
    lengths = synthetic_lengths(name, MANY)
    found = np.histogram(lengths, bins=[*EDGES, longest + 1])[0] / MANY
    assert np.abs(found - np.array(percent) / sum(percent)).max() < SHARE_TOLERANCE
    assert lengths.max() == longest


@given(st.sampled_from(sorted(NAMES)), st.integers(1, 400), st.integers(0, (1 << 64) - 1))
def test_a_sample_of_any_size_has_the_longest_published_sequence(name, count, seed):
    assert synthetic_lengths(name, count, seed).max() == LONGEST[name]


def test_web_text_is_as_long_as_published():
    lengths = synthetic_lengths("commoncrawl", 400_000)
    assert 750 < lengths.mean() < 850
    tokens_before = np.cumsum(lengths)
    starts = np.searchsorted(tokens_before, np.arange(0, tokens_before[-1] - 1_600_000, 1_600_000))
    longest = np.maximum.reduceat(lengths, starts)
    assert 15_000 < np.percentile(longest, 5) <= np.percentile(longest, 95) <= DOCUMENTS_LONGEST


def test_mixes_of_images_and_videos_have_the_lengths_of_the_benchmark():
    known = {length for length, _ in (*IMAGES, *VIDEOS)}
    short, even, long = (synthetic_lengths(f"dcp-{mix}", MANY) for mix in ("short", "balanced", "long"))
    assert set(short) | set(even) <= known
    assert set(long) == {length for length, _ in VIDEOS}
    share_below_4k = [lengths[lengths < 4096].sum() / lengths.sum() for lengths in (short, even, long)]
    assert share_below_4k[0] > 0.6 > share_below_4k[1] > 0.1 > share_below_4k[2]


@pytest.mark.parametrize(
    ("name", "count", "seed", "message"),
    [
        ("comoncrawl", 1, 0, "did you mean commoncrawl"),
        ("grch38", 0, 0, "at least 1"),
        ("grch38", 1, -1, "out of range"),
    ],
)
def test_what_cannot_be_drawn_is_refused(name, count, seed, message):
    with pytest.raises(InputError, match=message):
        synthetic_lengths(name, count, seed)
