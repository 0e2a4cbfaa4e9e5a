"""The sampler: every epoch each sequence once, the same on every machine, exactly resumable."""

import json
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.errors import InputError
from lengthwise.core.lengths import LengthIndex
from lengthwise.data.batch_budget import Budget
from lengthwise.data.order import OrderSettings, epoch_order, make_order
from lengthwise.data.sampler import Sampler
from lengthwise.data.sort_key import by_length

lengths_lists = st.lists(st.integers(1, 50), min_size=1, max_size=40)
budgets = st.one_of(
    st.builds(lambda size: {"tokens_per_step": size}, st.integers(1, 200)),
    st.builds(lambda size: {"sequences_per_step": size}, st.integers(1, 50)),
)


ORDERS = [
    OrderSettings(order="shuffled"),
    OrderSettings(order="corpus"),
    OrderSettings(order="sorted"),
    OrderSettings(order="windowed", window=8),
    OrderSettings(order="curriculum", pacing="root", pacing_start=0.3),
    OrderSettings(order="curriculum", pacing="step", curriculum_epochs=1),
    OrderSettings(order="curriculum", pacing="natural", pacing_stages=3, curriculum_epochs=2),
]
all_budgets = st.one_of(
    budgets,
    st.builds(
        lambda size, least: {"budget": Budget(tokens=size, padded=True, min_sequences=least)},
        st.integers(1, 200),
        st.integers(1, 3),
    ),
    st.builds(
        lambda size, count: {"budget": Budget(tokens=size, padded=True, equal_shapes=count)},
        st.integers(1, 200),
        st.integers(1, 3),
    ),
)


def ordered(lengths, settings):
    return make_order(settings, by_length(index_of(lengths)))


def index_of(lengths):
    return LengthIndex(lengths=np.array(lengths, dtype=np.int32))


def take_epochs(sampler, count):
    """Batches of ``count`` epochs, a list each."""
    epochs = [[] for _ in range(count)]
    while sampler.epoch < count:
        epochs[sampler.epoch].append(next(sampler))
    return epochs


@given(
    lengths=lengths_lists, budget=budgets, seed=st.integers(0, 1 << 40), name=st.sampled_from(["shuffled", "corpus"])
)
def test_every_epoch_holds_every_sequence_once_in_its_own_order(lengths, budget, seed, name):
    epochs = take_epochs(Sampler(index_of(lengths), seed=seed, order=make_order(name), **budget), 3)
    for epoch, batches in enumerate(epochs):
        ids = [id for batch in batches for id in batch.ids]
        in_turn = list(range(len(lengths)))
        order = epoch_order(len(lengths), seed=seed, epoch=epoch).tolist() if name == "shuffled" else in_turn
        assert ids == order
        assert all(batch.lengths == tuple(lengths[id] for id in batch.ids) for batch in batches)
    assert [batch.step for batches in epochs for batch in batches] == list(range(sum(map(len, epochs))))


@pytest.mark.parametrize(("objective", "num_targets"), [("next-token", 9 + 99), ("masked", 2 + 15)])
def test_batches_know_what_is_predicted_and_the_order_does_not_depend_on_it(objective, num_targets):
    sampler, other = (
        Sampler(index_of([10, 100]), seed=0, sequences_per_step=2, **more) for more in ({"objective": objective}, {})
    )
    assert sampler.state_dict() == other.state_dict()
    batch = next(sampler)
    assert (batch.ids, batch.objective, batch.num_targets) == (next(other).ids, objective, num_targets)


@given(lengths=lengths_lists, budget=st.integers(1, 200), seed=st.integers(0, 99))
def test_a_token_budget_is_filled_as_far_as_the_order_allows(lengths, budget, seed):
    for batches in take_epochs(Sampler(index_of(lengths), seed=seed, tokens_per_step=budget), 2):
        for batch, after in zip(batches, [*batches[1:], None]):
            assert batch.num_tokens <= budget or len(batch.ids) == 1
            assert after is None or batch.num_tokens + after.lengths[0] > budget


@given(lengths=lengths_lists, size=st.integers(1, 50))
def test_only_the_last_batch_of_an_epoch_is_smaller(lengths, size):
    for batches in take_epochs(Sampler(index_of(lengths), seed=1, sequences_per_step=size), 2):
        assert all(len(batch.ids) == size for batch in batches[:-1]) and 1 <= len(batches[-1].ids) <= size


@given(lengths=lengths_lists, budget=all_budgets, settings=st.sampled_from(ORDERS))
def test_every_order_and_budget_holds_every_sequence_once_an_epoch(lengths, budget, settings):
    sampler = Sampler(index_of(lengths), seed=2, order=ordered(lengths, settings), **budget)
    for batches in take_epochs(sampler, 3):
        assert sorted(id for batch in batches for id in batch.ids) == list(range(len(lengths)))
        assert all(batch.lengths == tuple(lengths[id] for id in batch.ids) for batch in batches)


def test_batches_of_the_natural_mixture_are_of_one_group_each_and_groups_come_in_random_order():
    lengths = list(range(1, 121))
    order = make_order(ORDERS[-1], by_length(index_of(lengths)))
    sampler = Sampler(index_of(lengths), seed=5, sequences_per_step=7, order=order)
    first, second, third = take_epochs(sampler, 3)
    for batches in (first, second):
        groups = [{id // 40 for id in batch.ids} for batch in batches]
        assert all(len(group) == 1 for group in groups)
        in_turn = [group.pop() for group in groups]
        assert sorted(in_turn) == [0] * 6 + [1] * 6 + [2] * 6 != in_turn
    assert any(len({id // 40 for id in batch.ids}) > 1 for batch in third), "shuffled after its epochs"
    assert [batch.ids for batch in first] != [batch.ids for batch in second]


def test_batches_of_windows_are_of_similar_lengths_and_come_in_random_order():
    lengths = np.random.default_rng(0).permutation(np.arange(1, 257)).tolist()
    budget = Budget(tokens=1024, padded=True)
    order = make_order(OrderSettings(order="windowed", window=64), by_length(index_of(lengths)))
    batches = take_epochs(Sampler(index_of(lengths), seed=1, budget=budget, order=order), 1)[0]
    computed = [len(batch.lengths) * max(batch.lengths) for batch in batches]
    assert max(computed) <= 1024 and sum(computed) < 1.15 * sum(lengths)
    longest = [max(batch.lengths) for batch in batches]
    turns = sum((a < b) != (b < c) for a, b, c in zip(longest, longest[1:], longest[2:]))
    assert turns > len(batches) / 3, "not one window after the other"


@given(
    lengths=lengths_lists,
    budget=all_budgets,
    settings=st.sampled_from(ORDERS),
    step=st.integers(0, 60),
    drawn=st.integers(0, 30),
)
def test_a_restored_and_a_skipped_sampler_go_on_like_the_first(lengths, budget, settings, step, drawn):
    budget = {**budget, "order": ordered(lengths, settings)}
    whole = list(islice(Sampler(index_of(lengths), seed=3, **budget), step + 5))
    sampler = Sampler(index_of(lengths), seed=3, **budget)
    for _ in range(drawn):
        next(sampler)
    sampler.skip_to(step)
    restored = Sampler(index_of(lengths), seed=3, **budget)
    restored.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert list(islice(sampler, 5)) == list(islice(restored, 5)) == whole[step:]


def test_the_order_is_the_one_of_the_first_release():
    assert epoch_order(10, seed=0, epoch=0).tolist() == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
    assert epoch_order(10, seed=1, epoch=2).tolist() == [4, 2, 0, 6, 1, 5, 9, 8, 7, 3]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"digest": "0"}, "digest"),
        ({"seed": 8}, "seed: 8 in the state, 7 here"),
        ({"tokens_per_step": 9}, "tokens_per_step: 9 in the state, 10 here"),
        ({"tokens_per_step": None, "sequences_per_step": 2}, "sequences_per_step: 2"),
        ({"order": {"name": "corpus"}}, r"\(data.order: 'corpus' in the state, 'shuffled' here\)"),
        ({"order": {"name": "shuffled", "window": 3}}, "order.window: 3 in the state, None here"),
        ({"selection": {"sizes": [3]}}, r"selection.sizes: \[3\] in the state, None here"),
        ({"schema_version": 9}, "schema_version"),
        ({"position": 3}, "damaged"),
        ({"position": 1}, "damaged"),
        ({"epoch": -1}, "damaged"),
        ({"step": "1"}, "damaged"),
    ],
)
def test_a_state_of_another_run_is_refused_by_name(change, said):
    sampler = Sampler(index_of([1, 2, 3]), seed=7, tokens_per_step=10)
    with pytest.raises(InputError, match=said):
        sampler.load_state_dict({**sampler.state_dict(), **change})


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({}, "exactly one of"),
        ({"tokens_per_step": 1, "sequences_per_step": 1}, "exactly one of"),
        ({"tokens_per_step": 0}, "at least 1"),
        ({"sequences_per_step": 1, "seed": -1}, "seed -1"),
        ({"sequences_per_step": 1, "budget": Budget(tokens=1)}, "give one"),
    ],
)
def test_budgets_and_seeds_that_make_no_sense_are_refused(choice, said):
    with pytest.raises(InputError, match=said):
        Sampler(index_of([1]), **{"seed": 0, **choice})


def test_skipping_before_the_start_is_refused():
    with pytest.raises(InputError, match="step -1"):
        Sampler(index_of([1]), seed=0, sequences_per_step=1).skip_to(-1)


def test_another_corpus_with_equal_lengths_is_not_resumed():
    lengths = np.arange(1, 40)
    first = Sampler(LengthIndex(lengths=lengths, corpus_digest="a" * 32), seed=1, sequences_per_step=4)
    other = Sampler(LengthIndex(lengths=lengths, corpus_digest="b" * 32), seed=1, sequences_per_step=4)
    next(first)
    with pytest.raises(
        InputError, match=r"the sequences are others than .*digest \w+ in the state, \w+ here\); resume"
    ):
        other.load_state_dict(first.state_dict())
