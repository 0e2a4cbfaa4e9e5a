"""What a prepared run samples, from its options."""

import numpy as np
import pytest
from torch.nn import functional as F

import lengthwise as lw
from lengthwise.config.prepare_options import read_options
from lengthwise.core.errors import InputError
from lengthwise.core.lengths import LengthIndex
from lengthwise.core.specs import cluster_preset, model_preset
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.data.max_length import apply_max_length
from lengthwise.data.synthetic import synthetic_lengths
from lengthwise.session.prepare_planning import make_planner, make_sampler, with_metric_of
from tests.session import models

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


def every_token(items, policy):
    def loss(output, micro_batch):
        targets = micro_batch.labels if "labels" in items[0] else micro_batch.tokens
        return F.cross_entropy(output[0][0], targets)

    return lw.prepare(
        models.gpt(), items, objective="every-token", policy=policy, steps=1, sequences_per_step=3, loss=loss,
        cost=models.mixed_cost(), memory_gib=40, verbose=False, check=False, clip_norm=0.0, max_stages=1,
        inputs=lambda micro_batch: {"idx": micro_batch.tokens[None]},
    )  # fmt: skip


def test_padding_is_refused_before_the_run_where_it_would_be_learned_from():
    items = [{"input_ids": np.arange(length)} for length in (4, 9, 6)]
    with pytest.raises(
        InputError, match=r"policy='padded' pads .* objective='every-token' .* policy='static' .* labels"
    ):
        every_token(items, "padded")
    every_token(items, "packed").close()
    run = every_token([{**item, "labels": item["input_ids"]} for item in items], "padded")
    for step in run.steps():
        for micro_batch in step:
            step.backward(F.cross_entropy(run.model(**micro_batch.inputs)[0][0], micro_batch.labels))
        assert np.isfinite(step.update().loss)
    run.close()
