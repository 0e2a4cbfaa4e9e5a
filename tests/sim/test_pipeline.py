"""1F1B against its definition, written as a recursion."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.pass_order import issue_order
from lengthwise.core.step_plan import Pipeline
from lengthwise.sim.pipeline import run_pipeline
from tests.sim.plans import LAYERS, lane, seconds

MIXED_RECOMPUTE = 13 / 12
"""A forward is at most 1/3 of a micro-batch, where nothing is recomputed; a backward 3/4, where everything is."""


def pipeline_of(*times_s, **options):
    scheme, micro_batches = lane(*times_s, **options)
    return Pipeline(ranks=tuple(range(scheme.num_devices)), scheme=scheme, micro_batches=micro_batches)


def unhindered(pipeline):
    return [[1.0] * len(pipeline.micro_batches)] * pipeline.scheme.num_stages


@st.composite
def pipelines(draw):
    """A pipeline, and how much slower each stage computes each micro-batch."""
    stages, times_s = draw(st.integers(1, 5)), draw(st.lists(seconds, max_size=8))
    factors = st.lists(st.floats(0.5, 3.0), min_size=len(times_s), max_size=len(times_s))
    pipeline = pipeline_of(*times_s, stages=stages, recomputed=draw(st.integers(0, LAYERS)))
    return pipeline, draw(st.lists(factors, min_size=stages, max_size=stages))


def ends_s(pipeline, slowdowns, start_s, transfer_s):
    """When each pass of each stage ends: after the pass before it and, a transfer later, the one it needs."""
    last, count = pipeline.scheme.num_stages - 1, len(pipeline.micro_batches)
    share = 1 / (3 + pipeline.scheme.num_recomputed / LAYERS)
    orders = [issue_order(s, num_stages=last + 1, num_micro_batches=count) for s in range(last + 1)]

    @cache
    def end_s(stage, is_backward, i):
        place = orders[stage].index((is_backward, i))
        free_s = end_s(stage, *orders[stage][place - 1]) if place else start_s
        if is_backward:
            ready_s = end_s(stage, False, i) if stage == last else end_s(stage + 1, True, i) + transfer_s
        else:
            ready_s = end_s(stage - 1, False, i) + transfer_s if stage else start_s
        part = 1 - share if is_backward else share
        return max(free_s, ready_s) + part * slowdowns[stage][i] * pipeline.micro_batches[i].time_s

    return [[end_s(stage, *one) for one in order] for stage, order in enumerate(orders)]


@given(pipelines(), st.floats(0.0, 5.0), st.sampled_from([0.0, 0.3]))
def test_every_pass_starts_as_soon_as_its_stage_is_free_and_its_input_is_there(case, start_s, transfer_s):
    pipeline, slowdowns = case
    run = run_pipeline(pipeline, slowdowns, start_s=start_s, transfer_s=transfer_s)
    expected = ends_s(pipeline, slowdowns, start_s, transfer_s)
    assert [[one.end_s for one in passes] for passes in run.stages] == [pytest.approx(times) for times in expected]
    assert run.end_s == pytest.approx(max((times[-1] for times in expected if times), default=start_s))


@pytest.mark.parametrize(("recomputed", "forward_s"), [(0, 1 / 3), (LAYERS, 1 / 4), (LAYERS // 2, 1 / 3.5)])
def test_backward_is_two_forwards_and_the_recomputed_layers_again(recomputed, forward_s):
    pipeline = pipeline_of(1.0, recomputed=recomputed)
    forward, backward = run_pipeline(pipeline, unhindered(pipeline)).stages[0]
    assert (forward.end_s, backward.end_s) == pytest.approx((forward_s, 1.0))
    assert backward.end_s - backward.start_s == pytest.approx(forward_s * (2 + recomputed / LAYERS))


def test_what_a_micro_batch_recomputes_goes_before_what_its_scheme_does():
    scheme, (micro_batch,) = lane(1.0, recomputed=LAYERS)
    plain = type(micro_batch)(**{**vars(micro_batch), "recompute": (False,) * LAYERS})
    pipeline = Pipeline(ranks=(0,), scheme=scheme, micro_batches=(micro_batch, plain))
    ends_s = [one.end_s for one in run_pipeline(pipeline, unhindered(pipeline)).stages[0]]
    assert ends_s == pytest.approx([1 / 4, 1, 4 / 3, 2])


@given(st.integers(1, 5), st.lists(st.tuples(seconds, st.integers(0, LAYERS)), min_size=1, max_size=8))
def test_mixed_recompute_exceeds_the_flow_shop_by_at_most_a_twelfth(stages, sizes):
    sizes = sorted(sizes, reverse=True)
    times_s = [time_s for time_s, _ in sizes]
    scheme, micro_batches = lane(*times_s, stages=stages)
    mixed = tuple(
        type(m)(**{**vars(m), "recompute": (True,) * layers + (False,) * (LAYERS - layers)})
        for m, (_, layers) in zip(micro_batches, sizes)
    )
    pipeline = Pipeline(ranks=tuple(range(stages)), scheme=scheme, micro_batches=mixed)
    planned_s = sum(times_s) + (stages - 1) * max(times_s)
    assert run_pipeline(pipeline, unhindered(pipeline)).end_s <= planned_s * MIXED_RECOMPUTE * (1 + 1e-9)


def test_a_transfer_is_paid_once_per_hop_there_and_back():
    pipeline = pipeline_of(1.0, stages=4)
    assert run_pipeline(pipeline, unhindered(pipeline), transfer_s=0.5).end_s == pytest.approx(4 + 6 * 0.5)
