import json
from collections import Counter
from dataclasses import replace
from itertools import accumulate, islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.core.batch import GlobalBatch
from lengthwise.core.errors import InfeasibleError, InputError
from lengthwise.plan.dcp.form_batches import FormedBatches, form_batches
from lengthwise.plan.planner import Planner
from tests.examples import examples
from tests.plan.costs import SimpleCost, make_problem

LONGEST = 100
PROBLEMS = {
    num_devices: make_problem(
        SimpleCost(capacity=30, c_s=0.05), num_devices=num_devices, stages=[1], recomputed=(0, 4), max_length=LONGEST
    )
    for num_devices in (1, 3, 4, 7)
}

streams = st.lists(st.lists(st.integers(1, LONGEST), min_size=1, max_size=12), max_size=10)


def stream_of(batches, first_step=5):
    """Global batches whose ids count the sequences of the whole stream."""
    starts = accumulate((len(batch) for batch in batches), initial=0)
    return [
        GlobalBatch(step=first_step + step, ids=tuple(range(start, start + len(batch))), lengths=tuple(batch))
        for step, (start, batch) in enumerate(zip(starts, batches))
    ]


def tailed_stream(num_batches=30, size=24, seed=0):
    generator = np.random.default_rng(seed)
    lengths = np.clip(generator.lognormal(2.5, 1.0, (num_batches, size)), 1, LONGEST).astype(int)
    return stream_of(lengths.tolist())


def sequences(batches):
    return Counter(pair for batch in batches for pair in zip(batch.ids, batch.lengths))


@given(
    streams, st.sampled_from(sorted(PROBLEMS)), st.integers(1, 3), st.integers(1, 4), st.sampled_from([1.0, 1.7, 4.0])
)
@settings(max_examples=examples(60), deadline=None)
def test_formed_batches_hold_every_sequence_of_the_stream_once(batches, num_devices, g_min, window, growth_cap):
    stream = stream_of(batches)
    formed = list(form_batches(iter(stream), PROBLEMS[num_devices], g_min=g_min, window=window, growth_cap=growth_cap))
    assert sequences(formed) == sequences(stream)
    assert [batch.step for batch in formed] == list(range(5, 5 + len(formed)))


def test_formed_batches_and_their_plans_keep_what_is_predicted():
    stream = [replace(batch, objective="masked") for batch in tailed_stream(6)]
    planner = Planner(policy="dcp-intra", problem=PROBLEMS[4])
    formed = list(form_batches(stream, PROBLEMS[4]))
    assert {batch.objective for batch in formed} == {"masked"}
    assert all(planner(batch).loss_normaliser == batch.num_targets < batch.num_tokens / 4 for batch in formed)


@given(streams, st.sampled_from(sorted(PROBLEMS)))
@settings(max_examples=examples(30), deadline=None)
def test_the_oldest_sequence_held_is_in_the_next_batch(batches, num_devices):
    stream = stream_of(batches)
    left = sorted(sequence for batch in stream for sequence in batch.ids)
    for batch in form_batches(iter(stream), PROBLEMS[num_devices], window=2):
        assert left[0] in batch.ids
        left = [sequence for sequence in left if sequence not in batch.ids]


def test_equal_streams_form_equal_batches():
    formed = [list(form_batches(iter(tailed_stream()), PROBLEMS[4])) for _ in range(2)]
    assert formed[0] == formed[1]


def test_an_endless_stream_is_read_only_a_window_ahead():
    read = 0

    def endless():
        nonlocal read
        for batch in tailed_stream(1000, 8):
            read += 1
            yield batch

    formed = list(islice(form_batches(endless(), PROBLEMS[4], window=4), 10))
    used = sum(len(batch.ids) for batch in formed)
    assert read <= used // 8 + 1 + 4


@pytest.mark.parametrize("growth_cap", [1.0, 2.0, 4.0])
def test_no_batch_exceeds_the_cap_in_batches_of_the_sampler(growth_cap):
    formed = list(form_batches(iter(tailed_stream(size=24)), PROBLEMS[4], growth_cap=growth_cap))
    assert max(len(batch.ids) for batch in formed) <= growth_cap * 24


def test_only_the_end_of_the_stream_is_smaller_than_the_cap_allows():
    formed = list(form_batches(iter(tailed_stream(60, 24)), PROBLEMS[4], growth_cap=2.0))
    assert min(len(batch.ids) for batch in formed[: len(formed) // 2]) >= 24 / 2 / 2  # rounded down to whole rounds


def test_no_sequence_is_passed_over_for_long():
    window, size = 4, 24
    newest = 0
    for batch in form_batches(iter(tailed_stream(200, size)), PROBLEMS[7], window=window):
        newest = max(newest, *batch.ids)
        assert newest - min(batch.ids) <= 3 * window * size


@pytest.mark.deep
def test_formed_batches_are_computed_faster_than_the_samplers():
    problem, stream = PROBLEMS[7], tailed_stream(18, 16, seed=3)
    planner = Planner(policy="dcp-intra", problem=problem)
    formed = list(form_batches(iter(stream), problem, growth_cap=3.0))
    assert sum(planner(batch).time_s for batch in formed) < sum(planner(batch).time_s for batch in stream)


def test_all_groups_accumulate_more_until_one_reaches_g_min():
    stream = stream_of([[10] * 8] * 40)  # groups of one kind, each with one sequence that fits at a time
    sizes = {
        g_min: {len(batch.ids) for batch in islice(form_batches(stream, PROBLEMS[4], g_min=g_min, g_max=2), 3)}
        for g_min in (1, 3, 4, 5)
    }
    (once,) = sizes[1]
    assert sizes == {1: {once}, 3: {3 * once}, 4: {4 * once}, 5: {5 * once}}


def test_formed_batches_say_how_many_tokens_have_a_loss():
    stream = [replace(batch, targets=tuple(length // 2 for length in batch.lengths)) for batch in tailed_stream(6)]
    first = FormedBatches(Rewinding(stream), PROBLEMS[4], window=4)
    batches = [next(first)]
    second = FormedBatches(Rewinding(stream), PROBLEMS[4], window=4)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for batch in [*batches, *second]:
        assert batch.targets == tuple(length // 2 for length in batch.lengths)


def test_a_sequence_that_fits_nowhere_is_refused():
    with pytest.raises(InfeasibleError, match=r"sequence 1 \(5,000 tokens\)"):
        list(form_batches(iter(stream_of([[3, 5000]])), PROBLEMS[4]))


def test_a_sequence_longer_than_the_run_promises_is_refused():
    with pytest.raises(InputError, match=r"sequence 1 has 101 tokens, more than data.max_length \(100\)"):
        list(form_batches(iter(stream_of([[3, 101]])), PROBLEMS[4]))


def test_a_window_without_a_batch_is_refused():
    with pytest.raises(InputError, match=r"got 0 and 4.0"):
        list(form_batches(iter(stream_of([[3]])), PROBLEMS[4], window=0))


class Rewinding:
    """A stream that can be gone on with."""

    def __init__(self, batches):
        self.batches, self.at = batches, 0

    def __next__(self):
        if self.at == len(self.batches):
            raise StopIteration
        self.at += 1
        return self.batches[self.at - 1]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize("num_before", [0, 1, 7])
def test_a_run_that_forms_batches_goes_on_with_the_same_ones(num_before):
    stream = tailed_stream()
    whole = list(FormedBatches(Rewinding(stream), PROBLEMS[4], window=4))
    first = FormedBatches(Rewinding(stream), PROBLEMS[4], window=4)
    before = list(islice(first, num_before))
    state = json.loads(json.dumps(first.state_dict()))
    second = FormedBatches(Rewinding(stream), PROBLEMS[4], window=4)
    second.load_state_dict(state)
    assert before + list(second) == whole


def test_a_run_that_forms_batches_goes_on_on_another_cluster_with_every_sequence_once():
    stream = tailed_stream()
    first = FormedBatches(Rewinding(stream), PROBLEMS[4], window=4)
    before = list(islice(first, 5))
    second = FormedBatches(Rewinding(stream), PROBLEMS[7], window=4)
    second.load_state_dict(first.state_dict())
    assert sequences(before + list(second)) == sequences(stream)
    with pytest.raises(InputError, match="forms no batches"):
        second.load_state_dict({"epoch": 0})
