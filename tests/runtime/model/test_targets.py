import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.runtime.model.targets import IGNORE, next_token_targets
from tests.runtime.model.cases import pack_of, tokens_of

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
