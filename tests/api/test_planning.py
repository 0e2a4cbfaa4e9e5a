"""What a prepared run samples, from its options."""

import numpy as np
import pytest

from lengthwise.api.options import read_options
from lengthwise.api.planning import make_sampler, with_metric_of
from lengthwise.core.errors import InputError
from lengthwise.core.lengths import LengthIndex
from lengthwise.data.rules import apply_max_length

LENGTHS = LengthIndex(lengths=np.array([5, 40, 7, 9, 3]))
METRIC = [3.0, 1.0, 2.0, 5.0, 4.0]


def test_pieces_of_a_sequence_are_as_hard_as_the_whole_and_come_by_a_metric_of_the_user():
    view = apply_max_length(LENGTHS, max_length=10, rule="split")
    options = with_metric_of(read_options({"order": "sorted", "metric": METRIC, "sequences_per_step": 20}), view)
    batch = next(make_sampler(options, view.lengths, "next-token"))
    assert view.base_ids[list(batch.ids)].tolist() == [1, 1, 1, 1, 2, 0, 4, 3]


def test_without_a_metric_lengths_are_followed_and_a_curriculum_resumes():
    options = read_options({"order": "curriculum", "pacing": "step", "pacing_start": 0.2, "sequences_per_step": 2})
    sampler = make_sampler(options, LENGTHS, "next-token")
    batches = [next(sampler) for _ in range(6)]
    assert batches[0].ids == (4, 0)
    again = make_sampler(options, LENGTHS, "next-token")
    sampler.skip_to(2)
    again.load_state_dict(sampler.state_dict())
    assert [next(again) for _ in range(4)] == batches[2:]


def test_a_metric_that_is_not_one_number_per_sequence_is_refused():
    view = apply_max_length(LENGTHS, max_length=None, rule="error")
    with pytest.raises(InputError, match="one number for each of 5 sequences"):
        with_metric_of(read_options({"order": "sorted", "metric": [1.0]}), view)
