"""What a prepared run samples, from its options."""

import numpy as np
import pytest

from lengthwise.config.prepare_options import read_options
from lengthwise.core.errors import InputError
from lengthwise.core.lengths import LengthIndex
from lengthwise.core.specs import cluster_preset, model_preset
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.data.max_length import apply_max_length
from lengthwise.data.synthetic import synthetic_lengths
from lengthwise.session.prepare_planning import make_planner, make_sampler, with_metric_of

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


@pytest.mark.parametrize("order", ["shuffled", "sorted"])
def test_policies_are_tuned_on_batches_that_the_run_does_not_compute(order):
    """Random ones, whatever the order: a sorted run's first batches are alike."""
    lengths = LengthIndex(lengths=synthetic_lengths("commoncrawl", 3000, 0))
    options = read_options({"order": order, "sequences_per_step": 50, "policy": "static"})
    cluster = cluster_preset("2xcpu")
    cost = AnalyticCost(model=model_preset("llama-tiny"), cluster=cluster, dtype="float32")
    planner = make_planner(options, cost, cluster=cluster, num_layers=4, lengths=lengths, objective="next-token")
    samples = planner.problem.samples
    sampler = make_sampler(options, lengths, "next-token")
    computed = [np.array(next(sampler).lengths) for _ in samples]
    assert samples and not any(np.array_equal(sample, batch) for sample in samples for batch in computed)
    assert max(map(np.mean, samples)) < 4 * min(map(np.mean, samples))
