from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.core.batch import MASKED, GlobalBatch, Pack, num_masked
from lengthwise.data.order import epoch_order
from lengthwise.runtime.models.targets import IGNORE, TokenMasking, masked_targets, next_token_targets
from tests.runtime.models.cases import pack_of, tokens_of

packs = st.builds(
    lambda lengths, pad: pack_of(*lengths, padded_to=max(lengths) + pad if pad >= 0 else 0),
    st.lists(st.integers(1, 20), min_size=1, max_size=8),
    st.integers(-1, 5),
)


@given(pack=packs)
@settings(deadline=None)
def test_a_pack_has_as_many_targets_as_it_says(pack):
    targets_T = next_token_targets(tokens_of(pack, 50), pack)
    assert (targets_T != IGNORE).sum().item() == pack.num_targets


def test_targets_are_the_next_tokens_of_the_same_sequence():
    tokens_T = torch.arange(8)
    assert next_token_targets(tokens_T, pack_of(3, 1, 4)).tolist() == [1, 2, IGNORE, IGNORE, 5, 6, 7, IGNORE]
    padded = next_token_targets(tokens_T, pack_of(3, 1, padded_to=4))
    assert padded.tolist() == [1, 2, IGNORE, IGNORE, IGNORE, IGNORE, IGNORE, IGNORE]
    with_empty_rows = next_token_targets(tokens_T, Pack(ids=(7,), lengths=(3,), padded_to=4, rows=2))
    assert with_empty_rows.tolist() == [1, 2, IGNORE, IGNORE, IGNORE, IGNORE, IGNORE, IGNORE]


MASKING = TokenMasking(seed=5, vocab_size=50, mask_token_id=49)


@given(pack=packs, seed=st.integers(0, 2**64 - 1))
@settings(deadline=None)
def test_as_many_tokens_of_each_sequence_are_hidden_as_the_batch_says(pack, seed):
    tokens_T = tokens_of(pack, 50)
    inputs_T, targets_T = masked_targets(tokens_T, pack, replace(MASKING, seed=seed))
    starts = pack.cu_seqlens[:-1]
    found = [(targets_T[start : start + length] != IGNORE).sum().item() for start, length in zip(starts, pack.lengths)]
    assert found == [num_masked(length) for length in pack.lengths]
    assert sum(found) == (targets_T != IGNORE).sum()  # none on padding
    batch = GlobalBatch(step=0, ids=pack.ids, lengths=pack.lengths, objective=MASKED)
    assert sum(found) == batch.num_targets
    hidden_T = targets_T != IGNORE
    assert torch.equal(targets_T[hidden_T], tokens_T[hidden_T])
    assert torch.equal(inputs_T[~hidden_T], tokens_T[~hidden_T])
    assert (inputs_T >= 0).all() and (inputs_T < 50).all()


@given(pack=packs)
@settings(deadline=None)
def test_what_is_hidden_depends_on_the_sequence_and_not_on_its_pack(pack):
    tokens_T = tokens_of(pack, 50)
    whole = masked_targets(tokens_T, pack, MASKING)
    for id, start, length in zip(pack.ids, pack.cu_seqlens, pack.lengths):
        alone = masked_targets(tokens_T[start : start + length], Pack(ids=(id,), lengths=(length,)), MASKING)
        for inside, by_itself in zip(whole, alone):
            assert torch.equal(inside[start : start + length], by_itself)


def test_four_fifths_are_masked_a_tenth_is_replaced_and_a_tenth_stays():
    # 30,000 draws: three standard deviations of a share of 0.8 are 0.007, of 0.1 are 0.005.
    chosen, put = MASKING.draw(7, 200_000)
    assert len(chosen) == len(set(chosen.tolist())) == 30_000
    assert (put == 49).mean() == pytest.approx(0.8, abs=0.007)
    assert (put == -1).mean() == pytest.approx(0.1, abs=0.005)
    others = put[(put >= 0) & (put != 49)]
    assert set(others.tolist()) == set(range(49))  # every token but the mask
    assert chosen.mean() == pytest.approx(100_000, rel=0.01)


def test_seeds_and_sequences_are_masked_otherwise():
    draws = [replace(MASKING, seed=seed).draw(sequence, 100)[0].tolist() for seed in (0, 1) for sequence in (0, 1)]
    assert len({tuple(draw) for draw in draws}) == 4


def test_a_mask_does_not_follow_the_order_of_an_epoch():
    assert MASKING.draw(3, 100)[0].tolist() != np.sort(epoch_order(100, seed=5, epoch=3)[: num_masked(100)]).tolist()


def test_masks_stay_what_they_are():
    """Runs go on with the targets they began with."""
    chosen, put = MASKING.draw(0, 50)
    assert chosen.tolist() == [16, 22, 28, 36, 37, 38, 47, 48]
    assert put.tolist() == [49, 14, 49, 49, 49, 49, -1, -1]
