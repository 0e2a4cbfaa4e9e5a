"""Length rules: every token of the corpus is in exactly one place: out, dropped or cut."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.config.run_config import DataConfig
from lengthwise.core.errors import InputError
from lengthwise.core.lengths import LengthIndex
from lengthwise.data.corpus import open_corpus
from lengthwise.data.max_length import apply_max_length
from tests.index.build import build, write_jsonl

lengths_lists = st.lists(st.integers(1, 60), min_size=1, max_size=40)


def index_of(lengths):
    return LengthIndex(lengths=np.array(lengths, dtype=np.int32), corpus_digest="c")


@given(lengths=lengths_lists, max_length=st.integers(1, 70), rule=st.sampled_from(["drop", "truncate", "split"]))
def test_no_token_is_lost_or_invented(lengths, max_length, rule):
    if rule == "drop" and min(lengths) > max_length:
        return
    view = apply_max_length(index_of(lengths), max_length=max_length, rule=rule)
    ledger = view.ledger
    assert sum(lengths) == ledger.tokens_in == ledger.tokens_out + ledger.tokens_dropped + ledger.tokens_cut
    assert ledger.sequences_out == ledger.sequences_in - ledger.dropped - ledger.split + ledger.pieces
    assert ledger.tokens_out == view.lengths.num_tokens and ledger.sequences_out == len(view.lengths)
    assert view.lengths.max_length <= max_length
    covered = np.zeros((len(lengths), 61), dtype=int)
    for length, base, start in zip(view.lengths.lengths, view.base_ids, view.starts):
        assert start >= 0 and start + length <= lengths[base]
        covered[base, start : start + length] += 1
    expected = np.zeros_like(covered)
    for base, length in enumerate(lengths):
        kept = {"drop": length * (length <= max_length), "truncate": min(length, max_length), "split": length}[rule]
        expected[base, :kept] = 1
    assert np.array_equal(covered, expected)


@given(lengths=lengths_lists, max_length=st.integers(1, 70))
def test_split_makes_the_fewest_pieces_and_they_differ_by_one_token_at_most(lengths, max_length):
    view = apply_max_length(index_of(lengths), max_length=max_length, rule="split")
    assert view.base_ids.tolist() == sorted(view.base_ids.tolist())
    for base, length in enumerate(lengths):
        pieces = view.lengths.lengths[view.base_ids == base]
        assert len(pieces) == -(-length // max_length) and pieces.max() - pieces.min() <= 1


def test_without_a_limit_the_corpus_is_the_index_itself():
    index = index_of([3, 9])
    view = apply_max_length(index, max_length=None, rule="error")
    assert view.lengths is index and view.ledger.tokens_out == 12


def test_rule_and_limit_are_in_the_digest():
    index = index_of([3, 9])
    choices = [(rule, limit) for rule in ("error", "drop", "truncate", "split") for limit in (9, 10)]
    digests = {apply_max_length(index, max_length=limit, rule=rule).lengths.digest for rule, limit in choices}
    assert len(digests | {index.digest}) == len(choices) + 1


def test_over_length_sequences_are_refused_by_number_with_the_way_out():
    with pytest.raises(InputError) as caught:
        apply_max_length(index_of([3, 9, 11]), max_length=8, rule="error")
    message = str(caught.value)
    assert message.startswith(
        "sequence 1 has 9 tokens, over data.max_length 8; in all, 2 of 3 sequences are longer, the longest with 11. "
    )
    assert "data.max_length" in message and "data.over_length" in message


def test_dropping_everything_is_refused():
    with pytest.raises(InputError, match="all 2 sequences are over"):
        apply_max_length(index_of([3, 9]), max_length=2, rule="drop")
    with pytest.raises(InputError, match="at least 1 token"):
        apply_max_length(index_of([3]), max_length=0, rule="split")


@pytest.mark.parametrize("rule", ["drop", "truncate", "split"])
def test_a_corpus_gives_the_tokens_of_its_view(tmp_path, rule):
    store = build(write_jsonl(tmp_path / "a.jsonl", ["abcdefgh", "ab", "abcdefghijklm"]), tmp_path / "out")
    config = DataConfig(index=str(store.path), max_length=9, over_length=rule)
    corpus = open_corpus(config)
    whole = [store.tokens(id).tolist() for id in range(3)]
    expected = {
        "drop": whole[:2],
        "truncate": [whole[0], whole[1], whole[2][:9]],
        "split": [whole[0], whole[1], whole[2][:7], whole[2][7:]],
    }[rule]
    assert [corpus.tokens(id).tolist() for id in range(len(corpus))] == expected
    assert corpus.vocab_size == 257 and corpus.digest == corpus.lengths.digest != store.digest
    with pytest.raises(InputError, match="no sequence"):
        corpus.tokens(len(corpus))


def test_a_run_without_an_index_is_refused():
    with pytest.raises(InputError, match=r"data\.index is not set"):
        open_corpus(DataConfig())
