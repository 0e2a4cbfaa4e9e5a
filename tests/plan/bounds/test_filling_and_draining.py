"""No order of passes lets slices idle less, for less overhead, than is said to be certain."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.core.one_f_one_b import PassTimes, run_stages
from lengthwise.core.pass_order import PassKind
from lengthwise.core.sliced_passes import forwards_first, sliced_orders
from lengthwise.plan.bounds.filling_and_draining import ends_of_slices, most_beside_s
from tests.examples import examples

WORK_S = st.floats(-3, 0).map(lambda power: 10.0**power)
NUMBERS = tuple(range(1, 65))


def any_order(counts, num_stages, rng):
    """Passes in a random order that cannot block: each stage is ahead of the next by a random number of forwards."""
    ends = np.cumsum(counts)
    backwards = [number for count, end in zip(counts, ends) for number in range(end - 1, end - count - 1, -1)]
    needed = np.repeat(ends, counts)[backwards]
    orders = []
    for _ in range(num_stages):
        needed = np.minimum(np.maximum.accumulate(needed + rng.integers(0, 4, len(needed))), ends[-1])
        order, done = [], 0
        for number, before in zip(backwards, needed):
            order += [(PassKind.FORWARD, k) for k in range(done, before)]
            done = max(done, before)
            order.append((PassKind.BACKWARD, number))
        orders.append(tuple(order))
    return tuple(reversed(orders))


def end_s(counts, slices_s, forwards, num_stages, kind, rng):
    """When the last pass ends."""
    forwards_s = [time_s / forwards for time_s in slices_s]
    passes = PassTimes(forwards_s, [time_s - forward_s for time_s, forward_s in zip(slices_s, forwards_s)])
    if kind == "random":
        orders = any_order(counts, num_stages, rng)
    elif kind == "gpipe":
        orders = forwards_first(counts, num_stages)
    else:
        kept = [1] * len(slices_s)
        orders = sliced_orders(counts, passes, kept, limit_bytes=10**6, num_stages=num_stages).orders
    return max(stage[-1].end_s for stage in run_stages([passes] * num_stages, orders=orders))


@settings(max_examples=examples(400), deadline=None)
@given(
    st.lists(st.tuples(WORK_S, st.integers(1, 8)), min_size=1, max_size=8), st.sampled_from([2, 3, 4, 8]),
    st.sampled_from([3.0, 3.5, 4.0]), st.sampled_from([0.0, 0.01, 0.1]),
    st.sampled_from(["random", "gpipe", "as planned"]), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_no_pipeline_does_more_beside_its_longest_micro_batch_than_is_certain(
    micro_batches, num_stages, forwards, overhead_s, kind, seed
):
    """Micro-batches in any order, in slices of equal work, under any order of passes."""
    rng = np.random.default_rng(seed)
    counts = [count for _, count in micro_batches]
    slices_s = [work_s / count + overhead_s for work_s, count in micro_batches for _ in range(count)]
    time_s = end_s(counts, slices_s, forwards, num_stages, kind, rng)
    works_s = [work_s for work_s, _ in micro_batches]
    longest = int(np.argmax(works_s))
    most_s = most_beside_s(
        time_s * (1 + 1e-9),
        np.array([works_s[longest] + counts[longest] * overhead_s]),
        overhead_s=np.array([overhead_s]),
        slices=np.array([counts[longest]]),
        stages=np.array([num_stages]),
        forwards=(np.array([3.0]), np.array([4.0])) if seed % 2 else (np.array([forwards]),) * 2,
        is_whole=np.array([True]),
    )
    assert sum(works_s) - works_s[longest] <= most_s[0] + 1e-6 * time_s
    ends = ends_of_slices(num_stages, forwards, forwards, NUMBERS, is_whole=True)
    assert sum(slices_s) * ends[len(slices_s) - 1] <= time_s * (1 + 1e-6)


@pytest.mark.parametrize("num_slices", [1, 4, 16])
def test_what_a_micro_batch_takes_alone_leaves_no_room(num_slices):
    """Of eight stages seven wait for a forward and a backward of one slice."""
    alone_s = 1 + 7 / num_slices
    at = {
        "overhead_s": np.array([0.0]), "slices": np.array([num_slices]), "stages": np.array([8]),
        "forwards": (np.array([3.0]), np.array([3.0])), "is_whole": np.array([True]),
    }  # fmt: skip
    (early_s,) = most_beside_s(alone_s * 0.98, np.array([1.0]), **at)
    (late_s,) = most_beside_s(alone_s, np.array([1.0]), **at)
    assert early_s < 0 <= late_s < 0.05 * alone_s


def test_as_few_slices_as_are_certain_idle_no_less_under_the_best_sizes():
    """Two stages and two slices: the sizes are those at which both ends idle alike."""
    (_, ends) = ends_of_slices(2, 3.0, 3.0, (1, 2), is_whole=True)
    sizes = np.linspace(0.01, 0.99, 99)
    best_s = min(end_s([1, 1], [size, 1 - size], 3.0, 2, "gpipe", None) for size in sizes)
    assert ends <= best_s <= ends * 1.2


def test_overhead_leaves_room_for_less_than_idle_stages_alone():
    """The more slices, the less stages idle, and the more overhead there is."""
    at = {
        "slices": np.array([24]), "stages": np.array([8]), "forwards": (np.array([3.0]), np.array([3.0])),
        "is_whole": np.array([True]),
    }  # fmt: skip
    (free_s,) = most_beside_s(1.0, np.array([0.3]), overhead_s=np.array([0.0]), **at)
    (dear_s,) = most_beside_s(1.0, np.array([0.3]), overhead_s=np.array([1e-3]), **at)
    assert free_s > 0.69 and dear_s < free_s - 0.04
