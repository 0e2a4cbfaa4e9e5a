"""Held-out documents: on one side alone, the same for every seed, and every token is counted."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.errors import InputError
from lengthwise.core.lengths import LengthIndex
from lengthwise.data.holdout import hold_out
from lengthwise.data.max_length import apply_max_length


@given(
    lengths=st.lists(st.integers(1, 60), min_size=2, max_size=40),
    share=st.floats(0.001, 0.999),
    rule=st.sampled_from(["split", "truncate"]),
)
def test_every_document_is_on_one_side_and_every_token_is_counted(lengths, share, rule):
    index = LengthIndex(lengths=np.array(lengths, dtype=np.int32), corpus_digest="c")
    view = apply_max_length(index, max_length=20, rule=rule)
    trained, held = hold_out(view, share)
    assert set(trained.base_ids).isdisjoint(held.base_ids)
    for name in ("base_ids", "starts"):
        together = np.concatenate([getattr(trained, name), getattr(held, name)])
        assert sorted(together.tolist()) == sorted(getattr(view, name).tolist())
    assert len(np.unique(held.base_ids)) == min(max(1, round(share * len(lengths))), len(lengths) - 1)
    for side, other in ((trained, held), (held, trained)):
        ledger = side.ledger
        kept_or_cut = ledger.tokens_out + ledger.tokens_cut + ledger.tokens_held_out
        assert ledger.tokens_in == kept_or_cut and ledger.tokens_held_out == other.lengths.num_tokens
        assert ledger.held_out == len(other.lengths) and ledger.sequences_out == len(side.lengths)
    assert len({view.lengths.digest, trained.lengths.digest, held.lengths.digest}) == 3


def test_one_document_cannot_be_shared():
    view = apply_max_length(LengthIndex(lengths=np.array([90])), max_length=20, rule="split")
    with pytest.raises(InputError, match=r"validation_share=0\.1 of 1 document leaves nothing to train on"):
        hold_out(view, 0.1)
