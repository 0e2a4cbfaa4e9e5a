"""The report on sampling equals what its words say, and speaks up where an order is no sample of the corpus."""

import json

import numpy as np
import pytest

from lengthwise.core.lengths import LengthIndex
from lengthwise.data.order import OrderSettings, make_order
from lengthwise.data.sampler import Sampler
from lengthwise.data.sampling_bias import safety_of
from lengthwise.data.sort_key import by_length, of_values

COUNT = 3000
LENGTHS = LengthIndex(lengths=np.random.default_rng(0).lognormal(5, 1, COUNT).astype(int) + 1)


def report(settings, *, difficulty=None, metric=None, **budget):
    order = make_order(settings, difficulty or by_length(LENGTHS))
    sampler = Sampler(LENGTHS, seed=1, order=order, **(budget or {"tokens_per_step": 8192}))
    return safety_of(sampler, LENGTHS, metric=metric, metric_name="loss" if metric is not None else "")


@pytest.fixture(scope="module")
def by_order():
    names = {
        "shuffled": OrderSettings(),
        "sorted": OrderSettings(order="sorted"),
        "root": OrderSettings(order="curriculum", pacing="root"),
        "natural": OrderSettings(order="curriculum", pacing="natural"),
        "windowed": OrderSettings(order="windowed", window=500),
    }
    return {name: report(settings) for name, settings in names.items()}


def test_a_random_order_needs_no_word(by_order):
    safety = by_order["shuffled"]
    assert safety.warnings == () and safety.each_once
    assert safety.trends[0].strength < 0.15 and safety.trends[0].largest_drift < 0.12


def test_an_order_by_length_is_said_to_follow_it(by_order):
    for name in ("sorted", "root"):
        safety = by_order[name]
        assert safety.trends[0].spearman > 0.9 and safety.trends[0].largest_drift > 0.8 and safety.each_once
        assert "steps follow length" in safety.warnings[0] and "low length" in safety.warnings[0]
        assert any("tenth 10 of the epoch" in warning for warning in safety.warnings)
    assert by_order["root"].trends[0].drift_by_tenth[0] < by_order["sorted"].trends[0].drift_by_tenth[0]


def test_batches_of_one_group_are_said_to_be_alike_but_follow_nothing(by_order):
    for name in ("natural", "windowed"):
        safety = by_order[name]
        assert safety.trends[0].between_steps > 0.8 > 0.5 > by_order["shuffled"].trends[0].between_steps
        assert any("alike in length" in warning for warning in safety.warnings)
        assert not any("follow" in warning for warning in safety.warnings)


def test_numbers_equal_those_of_a_loop_over_the_batches(by_order):
    sampler = Sampler(LENGTHS, seed=1, tokens_per_step=8192, order=make_order("sorted", by_length(LENGTHS)))
    batches = []
    while sampler.epoch == 0:
        batches.append(next(sampler))
    safety = by_order["sorted"]
    tokens = np.array([batch.num_tokens for batch in batches])
    means = np.array([np.mean(batch.lengths) for batch in batches])
    assert safety.num_steps == len(batches)
    assert (safety.tokens.mean, safety.tokens.variance) == pytest.approx((tokens.mean(), tokens.var()))
    assert safety.tokens.coefficient == pytest.approx(tokens.std() / tokens.mean())
    assert (safety.tokens.least, safety.tokens.most) == (tokens.min(), tokens.max())
    assert safety.sequences.mean == pytest.approx(COUNT / len(batches))
    assert safety.trends[0].pearson == pytest.approx(np.corrcoef(means, np.arange(len(means)))[0, 1])
    edges = [len(batches) * tenth // 10 for tenth in range(11)]
    assert safety.tokens_by_tenth[3] == pytest.approx(tokens[edges[3] : edges[4]].mean())
    seen = np.array([tokens[:edge].sum() for edge in edges[1:]]) / tokens.sum()
    assert safety.coverage_by_tenth == pytest.approx(seen.tolist()) and safety.coverage_by_tenth[-1] == 1
    part = [length for batch in batches[edges[2] : edges[3]] for length in batch.lengths]
    every = LENGTHS.lengths
    drift = max(abs(np.mean(part <= value) - np.mean(every <= value)) for value in every)
    assert safety.trends[0].drift_by_tenth[2] == pytest.approx(drift)


def test_a_tenth_of_one_step_has_no_correlation():
    tenths = report(OrderSettings(order="sorted"), sequences_per_step=COUNT // 7).trends[0].pearson_by_tenth
    assert tenths == (None,) * 8
    tenths = report(OrderSettings(order="sorted"), sequences_per_step=COUNT // 20).trends[0].pearson_by_tenth
    assert all(found is not None and abs(found) > 0.99 for found in tenths)


def test_ranks_correlate_as_scipy_has_it():
    spearmanr = pytest.importorskip("scipy.stats").spearmanr
    safety = report(OrderSettings(order="curriculum", pacing="step"), sequences_per_step=30)
    order = make_order(OrderSettings(order="curriculum", pacing="step"), by_length(LENGTHS))
    ids = order.arrange(np.arange(COUNT), seed=1, epoch=0)
    means = LENGTHS.lengths[ids].reshape(-1, 30).mean(1)
    assert safety.trends[0].spearman == pytest.approx(spearmanr(means, np.arange(len(means))).statistic)


def test_another_metric_has_a_line_of_its_own():
    loss = -LENGTHS.lengths.astype(float)
    safety = report(OrderSettings(order="sorted"), difficulty=of_values(loss, COUNT), metric=loss)
    length, found = safety.trends
    assert (length.name, found.name) == ("length", "loss") and length.spearman < -0.9 < 0.9 < found.spearman
    assert any("early steps come from sequences of high length" in warning for warning in safety.warnings)
    assert any("early steps come from sequences of low loss" in warning for warning in safety.warnings)


def test_uneven_steps_and_epochs_that_are_not_the_corpus_are_named():
    safety = report(OrderSettings(order="sorted"), sequences_per_step=30)
    assert any("tokens of a step vary" in warning for warning in safety.warnings)

    class Half:
        def ids(self, epoch):
            return np.arange(COUNT // 2)

        def to_json(self):
            return {}

    half = safety_of(Sampler(LENGTHS, seed=1, sequences_per_step=30, selection=Half()), LENGTHS)
    assert not half.each_once and any("leaves sequences out" in warning for warning in half.warnings)


@pytest.mark.parametrize("count", [1, 2, 5, 11])
def test_the_smallest_corpora_have_a_report(count):
    lengths = LengthIndex(lengths=np.full(count, 7))
    safety = safety_of(Sampler(lengths, seed=0, sequences_per_step=1), lengths)
    assert safety.trends[0].strength == 0 and safety.warnings == ()
    assert json.loads(json.dumps(safety.to_json()))["each_once"]
