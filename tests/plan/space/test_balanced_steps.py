"""Estimates of typical steps whose work is balanced over all devices."""

import numpy as np
import pytest

from lengthwise.core.pipeline_config import Method
from lengthwise.core.specs import cluster_preset, model_preset
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.plan.space.balanced_steps import CLASSES, BalancedSteps, pays
from lengthwise.plan.space.candidate import make_candidates, schemes_of

MODEL, CLUSTER = model_preset("llama-7b"), cluster_preset("1x8xH100-80GB")
COST = AnalyticCost(model=MODEL, cluster=CLUSTER)
NEAR = 1e-3
"""Twice the width at which the search ends, and more."""


def candidates_of(degrees=(1, 2, 8), stages=(1, 2)):
    schemes = schemes_of(
        MODEL.num_layers, degrees=degrees, stages=stages, methods=(Method.ULYSSES,), recomputed=(0, MODEL.num_layers)
    )
    return make_candidates(schemes, COST, num_devices=8)


def steps_of(lengths, longest=None):
    return BalancedSteps([np.array(lengths)], num_devices=8, longest=longest or max(lengths))


def share_s(candidate, length):
    """Seconds of a sequence with its share of the overhead of a full pack."""
    return candidate.times_s(np.array([length]))[0] + candidate.overhead_s * length / candidate.max_tokens


def test_pipelines_of_one_device_share_the_work_evenly():
    steps, alone = steps_of([4096] * 64), candidates_of(degrees=(1,), stages=(1,))
    assert steps.mixed_s(steps.under(alone)).sum() == pytest.approx(8 * min(share_s(k, 4096) for k in alone), rel=NEAR)
    assert steps.under(alone).equal_s.sum() == pytest.approx(8 * min(share_s(k, 4096) for k in alone))


def test_nobody_fills_the_bubble_of_a_sequence_that_takes_the_whole_step():
    (*_, staged) = candidates_of(degrees=(1,), stages=(2,))
    steps = steps_of([16_384])
    alone_s = 2 * (staged.times_s(np.array([16_384]))[0] + staged.overhead_s)
    assert steps.mixed_s(steps.under([staged])).sum() == pytest.approx(alone_s, rel=NEAR)
    assert steps.under([staged]).equal_s.sum() == pytest.approx(alone_s)


def test_more_candidates_make_no_step_slower_and_tables_add_up():
    rng = np.random.default_rng(0)
    steps = steps_of(rng.integers(100, 30_000, 50).tolist())
    every = candidates_of()
    for number in range(1, len(every)):
        some, others = steps.under(every[:number]), steps.under(every[number:])
        whole = steps.under(every)
        for seconds in (steps.mixed_s, lambda of: of.equal_s):
            merged_s, some_s = seconds(some.merged(others)), seconds(some)
            assert (merged_s == seconds(whole)).all() and (merged_s <= some_s * (1 + NEAR)).all()


def test_a_step_takes_for_ever_where_no_candidate_holds_the_longest_sequence():
    (held, *_) = candidates_of(degrees=(1,), stages=(1,))
    within, beyond = steps_of([100], held.max_tokens), steps_of([100], held.max_tokens + 1)
    for steps, is_finite in ((within, True), (beyond, False)):
        under = steps.under([held])
        assert np.isfinite(steps.mixed_s(under)) == np.isfinite(under.equal_s) == [is_finite]
    assert beyond.mixed_s(beyond.under([])) == [np.inf]


def test_others_pay_where_many_steps_gain_beside_one_giant():
    """One device each is faster for short sequences, and does not hold the giant."""
    slow, fast = candidates_of(degrees=(8,), stages=(1,)), candidates_of(degrees=(1,), stages=(1,))
    giant, short = np.array([slow[-1].max_tokens]), np.full(64, 512)
    options = {"num_devices": 8, "max_length": int(giant[0])}
    assert pays(fast, slow, samples=[giant, *[short] * 4], **options)
    assert not pays(fast, slow, samples=[giant], **options) and not pays((), slow, samples=[giant], **options)
    assert not pays(slow[:1], slow, samples=[short], **options)


def test_without_samples_a_step_of_halves_of_the_longest_length_is_made_up():
    made_up = BalancedSteps((), num_devices=8, longest=4096)
    given = steps_of([4096, *[2048] * 2, *[1024] * 4, *[512] * 8, *[256] * 16, *[128] * 32])
    under = made_up.under(candidates_of())
    assert made_up.mixed_s(under) == given.mixed_s(under)
    assert CLASSES > 12  # a class holds less than an octave
