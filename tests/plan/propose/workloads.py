"""Workloads small enough for brute force."""

import numpy as np
from hypothesis import strategies as st

from lengthwise.plan.heterogeneous.propose.workload import Workload, make_workload
from tests.plan.costs import SimpleCost, make_problem


@st.composite
def problems(draw, *, max_devices=8, max_steps=10, max_sequences=12, **fixed):
    """Any small cluster under any simple cost, with steps whose sequences fit."""
    num_devices = draw(st.integers(1, max_devices))
    cost = SimpleCost(
        a_s=draw(st.sampled_from([0.0, 1e-5, 1e-4, 1e-3])),
        c_s=draw(st.sampled_from([0.0, 0.1, 0.5])),
        capacity=draw(st.sampled_from([60, 100, 1000])),
        loss=draw(st.sampled_from([-0.05, 0.0, 0.1, 0.4])),
    )
    options = {"devices_per_node": draw(st.sampled_from([1, 2, 4, 8])), **fixed}
    empty = make_problem(cost, num_devices=num_devices, **options)
    longest = max(candidate.max_tokens for candidate in empty.candidates)
    lengths = st.lists(st.integers(1, min(longest, 400)), min_size=1, max_size=max_sequences)
    samples = draw(st.lists(lengths, min_size=1, max_size=max_steps))
    most = max(max(sample) for sample in samples)
    return make_problem(cost, num_devices=num_devices, samples=samples, max_length=most, **options)


def workload_of(problem) -> Workload:
    """The workload of all samples under all candidates."""
    return make_workload(problem, problem.candidates, problem.samples)


def counts_of(workload, **pipelines) -> np.ndarray:
    """Numbers of pipelines from names such as ``d2s1`` (degree 2, one stage)."""
    names = [f"d{candidate.scheme.degree}s{candidate.num_stages}" for candidate in workload.candidates]
    assert set(pipelines) <= set(names)
    return np.array([pipelines.get(name, 0) for name in names])
