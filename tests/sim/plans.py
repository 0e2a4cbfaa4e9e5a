"""Step plans small enough to check by hand."""

from dataclasses import replace

from hypothesis import strategies as st

from lengthwise.core.batch import Pack
from lengthwise.core.one_f_one_b import most_weights_in
from lengthwise.core.pipeline_config import Method, uniform_scheme
from lengthwise.core.planned_micro_batch import PlannedMicroBatch
from lengthwise.core.step_plan import Pipeline, StepPlan

LAYERS = 12
STATE = 1000


def lane(*times_s, degree=1, stages=1, recomputed=0, comm=0.0, held=(), padded_to=0, weights=0.0, layers=LAYERS):
    """A pipeline yet without ranks: seconds of its micro-batches, and the bytes each takes above the model state.

    ``weights``: the share of the most that gradients of weights can take; where they take any, backwards are split.
    """
    scheme = uniform_scheme(
        layers, degree=degree, stages=stages, recomputed=recomputed,
        method=Method.ULYSSES if degree > 1 else Method.DENSE,
    )  # fmt: skip
    weights *= stages > 1
    scheme = replace(scheme, zero_bubble=weights > 0)
    micro_batches = tuple(
        PlannedMicroBatch(
            pack=Pack(ids=(i,), lengths=(5,), padded_to=padded_to),
            time_s=time_s,
            comm_s=comm * time_s,
            weights_s=weights * most_weights_in(scheme.recompute) * time_s,
            peak_bytes=STATE + (held[i] if held else 600),
        )
        for i, time_s in enumerate(times_s)
    )
    return scheme, micro_batches


def make_plan(*phases, update_s=0.5, switch_s=0.0, step=4, num_devices=0):
    """A plan of phases, each a list of lanes on consecutive ranks; times as the planner predicts them."""
    pipelines, total_s = [], update_s + switch_s
    for number, lanes in enumerate(phases):
        first, longest_s = 0, 0.0
        for scheme, micro_batches in lanes:
            ranks = tuple(range(first, first + scheme.num_devices))
            first += scheme.num_devices
            pipelines.append(
                Pipeline(ranks=ranks, scheme=scheme, micro_batches=micro_batches, phase=number, state_bytes=STATE)
            )
            times_s = [m.time_s for m in micro_batches]
            longest_s = max(longest_s, sum(times_s) + (scheme.num_stages - 1) * max(times_s, default=0.0))
        total_s += longest_s
    return StepPlan(
        step=step, policy="any", pipelines=tuple(pipelines), loss_normaliser=1, update_s=update_s, switch_s=switch_s,
        time_s=total_s, lower_bound_s=0.0, num_devices=num_devices,
    )  # fmt: skip


seconds = st.floats(0.01, 10.0)
maybe_seconds = st.just(0.0) | seconds


@st.composite
def lanes(draw, *, num_devices, decreasing=True):
    """Lanes that tile ``num_devices``; every micro-batch of a lane recomputes the same layers."""
    found, left = [], num_devices
    while left:
        stages = draw(st.integers(1, min(4, left)))
        degree = draw(st.integers(1, left // stages))
        times_s = draw(st.lists(seconds, max_size=7))
        found.append(
            lane(
                *(sorted(times_s, reverse=True) if decreasing else times_s),
                degree=degree, stages=stages, recomputed=draw(st.integers(0, LAYERS)),
                comm=draw(st.sampled_from([0.0, 0.25, 1.0])),
                weights=draw(st.sampled_from([0.0, 0.0, 0.5, 1.0])),
                held=draw(st.lists(st.integers(0, 10**6), min_size=len(times_s), max_size=len(times_s))),
            )
        )  # fmt: skip
        left -= degree * stages
    return found


@st.composite
def plans(draw, *, decreasing=True):
    """Plans of one to three phases on one to eight devices, or on some of them."""
    num_devices = draw(st.integers(1, 8))
    phases = [
        draw(lanes(num_devices=draw(st.sampled_from([num_devices, max(1, num_devices - 2)])), decreasing=decreasing))
        for _ in range(draw(st.integers(1, 3)))
    ]
    return make_plan(
        *phases,
        update_s=draw(maybe_seconds),
        switch_s=draw(maybe_seconds) if len(phases) > 1 else 0.0,
        step=draw(st.integers(0, 5)),
        num_devices=num_devices,
    )
