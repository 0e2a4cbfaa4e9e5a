"""Slices: forwards in order, backwards in reverse, no stage holds more than the plan says, and the bubble is theirs."""

from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.batch import Pack
from lengthwise.core.errors import InputError
from lengthwise.core.one_f_one_b import PassTimes, run_stages
from lengthwise.core.pass_order import PassKind, PipelineSchedule, issue_order
from lengthwise.core.pipeline_config import Method, dense_scheme, uniform_scheme
from lengthwise.core.planned_micro_batch import PlannedMicroBatch, PlannedSlice
from lengthwise.core.sliced_passes import RULES, forwards_first, sliced_end, sliced_orders, slices_of
from lengthwise.core.step_plan import Pipeline
from lengthwise.core.zero_bubble import pass_orders, pass_times

FORWARD, BACKWARD = PassKind.FORWARD, PassKind.BACKWARD
LAYERS = 8


def micro_batch(number, sizes, *, peak_bytes=0, cut=True):
    num_tokens = sum(sizes)
    return PlannedMicroBatch(
        pack=Pack(ids=(number,), lengths=(num_tokens,)), time_s=float(num_tokens), peak_bytes=peak_bytes,
        slices=tuple(PlannedSlice(size, float(size)) for size in sizes) if cut else (),
    )  # fmt: skip


def pipeline(*micro_batches, stages=4, state_bytes=0):
    scheme = uniform_scheme(LAYERS, stages=stages, method=Method.DENSE)
    return Pipeline(
        ranks=tuple(range(stages)), scheme=scheme, micro_batches=micro_batches, state_bytes=state_bytes
    )  # fmt: skip


@st.composite
def pipelines(draw):
    sizes = draw(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=6))
    peaks = st.integers(50, 4000)
    cut = [micro_batch(k, s, peak_bytes=draw(peaks), cut=draw(st.booleans())) for k, s in enumerate(sizes)]
    return pipeline(*cut, stages=draw(st.integers(1, 6)), state_bytes=50)


@given(pipelines(), st.sampled_from(PipelineSchedule))
def test_forwards_run_in_order_and_the_slices_of_each_micro_batch_go_back_in_reverse(line, schedule):
    slices = slices_of(line)
    assert [part.number for part in slices] == list(range(len(slices)))
    back = sorted(range(len(slices)), key=lambda k: (slices[k].micro_batch, -slices[k].part))
    for order in pass_orders(line, schedule):  # messages between two stages arrive in the order they are sent
        assert [k for kind, k in order if kind is FORWARD] == list(range(len(slices)))
        assert [k for kind, k in order if kind is BACKWARD] == back
        for k, part in enumerate(slices):
            later = [n for n, other in enumerate(slices) if other.micro_batch == part.micro_batch and n >= k]
            assert all(order.index((FORWARD, n)) < order.index((BACKWARD, k)) for n in later)


@given(pipelines())
def test_no_stage_keeps_more_than_the_largest_peak_above_the_model_state(line):
    slices, limit = slices_of(line), max(m.peak_bytes for m in line.micro_batches) - line.state_bytes
    for order in pass_orders(line):
        kept_bytes = 0
        for kind, k in order:
            kept_bytes += slices[k].kept_bytes if kind is FORWARD else -slices[k].kept_bytes
            assert 0 <= kept_bytes <= limit
        assert not kept_bytes


@given(st.integers(1, 8), st.integers(1, 6), st.sampled_from(PipelineSchedule))
def test_where_nothing_is_cut_the_order_is_that_of_the_schedule(count, stages, schedule):
    times = PassTimes([1.0] * count, [2.0] * count)
    found = (
        forwards_first([1] * count, stages)
        if schedule is PipelineSchedule.GPIPE
        else sliced_orders([1] * count, times, [7] * count, limit_bytes=7 * stages, num_stages=stages).orders
    )
    for stage, order in enumerate(found):
        assert list(order) == issue_order(stage, num_stages=stages, num_micro_batches=count, schedule=schedule)


@given(pipelines())
def test_no_pass_waits_for_one_that_never_comes(line):
    num_stages = line.scheme.num_stages
    runs = run_stages([pass_times(line)] * num_stages, orders=pass_orders(line))
    slices = slices_of(line)
    assert all(len(passes) == 2 * len(slices) for passes in runs)
    assert max(passes[-1].end_s for passes in runs) >= sum(m.time_s for m in line.micro_batches) * (1 - 1e-9)


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("count", [1, 4, 16])
def test_a_micro_batch_in_equal_slices_has_the_bubble_of_one_slice(stages, count):
    """(S - 1) (F + B) of a slice, where 1F1B has that of the whole micro-batch."""
    line = pipeline(micro_batch(0, [3] * count), stages=stages)
    end_s = max(passes[-1].end_s for passes in run_stages([pass_times(line)] * stages, orders=pass_orders(line)))
    assert end_s == pytest.approx(3 * count + 3 * (stages - 1))


def test_short_micro_batches_follow_a_long_one_without_a_bubble_between_them():
    line = pipeline(micro_batch(0, [1] * 8, peak_bytes=110), *(micro_batch(k, [1], peak_bytes=40) for k in range(1, 9)))
    runs = run_stages([pass_times(line)] * 4, orders=pass_orders(line))
    assert max(passes[-1].end_s for passes in runs) == pytest.approx(8 + 8 + 3)


def test_stages_compute_short_micro_batches_while_they_wait_for_the_gradient_of_a_slice():
    """Four stages, eight slices of 0.25 s and twenty micro-batches of 0.05 s: with one forward at a time, 3.75 s."""
    times = PassTimes([0.25 / 3] * 8 + [0.05 / 3] * 20, [0.5 / 3] * 8 + [0.1 / 3] * 20)
    found = sliced_orders(
        [8] + [1] * 20, times, [30_000, *[10_000] * 7, *[5000] * 20], limit_bytes=190_000, num_stages=4
    )
    assert 3.0 + 3 * 0.25 / 3 < found.end_s < 3.6
    assert found.end_s == max(passes[-1].end_s for passes in run_stages([times] * 4, orders=found.orders))


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_small_micro_batches_before_a_cut_one_leave_the_last_stage_less_to_wait_for(stages):
    """Their backwards are put off until the forwards of its slices have run, which would come late behind them."""
    works_s = [*(0.12 * 1.3**k for k in range(6)), *[0.5] * 16, *[0.4] * 12]
    times = PassTimes([work_s / 3 for work_s in works_s], [2 * work_s / 3 for work_s in works_s])
    kept_bytes, counts = [round(1000 * work_s) for work_s in works_s], [*[1] * 6, 16, *[1] * 12]
    options = {"limit_bytes": 8000 + 500 * stages, "num_stages": stages}
    of_ramp = sliced_end(counts, times, kept_bytes, **options)
    at_once = sliced_end(counts, times, kept_bytes, **options, rules=[rule for rule in RULES if not rule.postponed])
    assert of_ramp.rule.postponed and of_ramp.end_s - sum(works_s) < 0.85 * (at_once.end_s - sum(works_s))


@given(pipelines(), st.floats(0.5, 1.5))
def test_the_end_of_orders_is_that_of_their_passes_and_is_told_only_below_a_limit(line, share):
    slices = slices_of(line)
    counts = [len(m.slices) or 1 for m in line.micro_batches]
    times, kept_bytes = pass_times(line), [part.kept_bytes for part in slices]
    bounds = {"limit_bytes": max(m.peak_bytes for m in line.micro_batches), "num_stages": line.scheme.num_stages}
    found = sliced_orders(counts, times, kept_bytes, **bounds)
    runs = run_stages([times] * line.scheme.num_stages, orders=found.orders)
    assert found.end_s == max(passes[-1].end_s for passes in runs)
    fastest = sliced_end(counts, times, kept_bytes, **bounds)
    assert fastest.end_s == found.end_s
    assert sliced_end(counts, times, kept_bytes, **bounds, rules=(fastest.rule,)) == fastest
    limit_s = share * found.end_s
    told_s = sliced_end(counts, times, kept_bytes, **bounds, limit_s=limit_s).end_s
    assert told_s == (found.end_s if found.end_s < limit_s else float("inf"))


def test_stages_that_come_later_keep_less():
    """All slices of one micro-batch, and the largest once more for each stage behind."""
    line = pipeline(micro_batch(0, [2, 2], peak_bytes=60), micro_batch(1, [4], peak_bytes=60), stages=2)
    words = [" ".join("FB"[kind] + str(k) for kind, k in order) for order in pass_orders(line)]
    assert words == ["F0 F1 B1 F2 B0 B2", "F0 F1 B1 B0 F2 B2"], "17 bytes of each slice, 30 of the other"
    more = replace(line, micro_batches=(line.micro_batches[0], micro_batch(1, [4], peak_bytes=30)))
    words = [" ".join("FB"[kind] + str(k) for kind, k in order) for order in pass_orders(more)]
    assert words == ["F0 F1 F2 B1 B0 B2", "F0 F1 B1 F2 B0 B2"]


@given(pipelines())
def test_no_stage_keeps_more_than_all_of_one_micro_batch_and_a_slice_for_each_stage_behind(line):
    slices, of_each = slices_of(line), [0] * len(line.micro_batches)
    for part in slices:
        of_each[part.micro_batch] += part.kept_bytes
    for behind, order in enumerate(reversed(pass_orders(line))):
        kept_bytes = most_bytes = 0
        for kind, k in order:
            kept_bytes += slices[k].kept_bytes if kind is FORWARD else -slices[k].kept_bytes
            most_bytes = max(most_bytes, kept_bytes)
        is_within = most_bytes <= max(of_each) + behind * max(part.kept_bytes for part in slices)
        assert is_within or not any(m.slices for m in line.micro_batches), "1F1B counts micro-batches"


def test_slices_that_do_not_cover_their_pack_or_cannot_be_are_refused():
    with pytest.raises(InputError, match=r"slices of a micro-batch have 5 tokens in all, its pack has 6"):
        pipeline(replace(micro_batch(0, [2, 4]), slices=(PlannedSlice(2, 1.0), PlannedSlice(3, 1.0))))
    ring = uniform_scheme(LAYERS, degree=2, method=Method.RING)
    with pytest.raises(InputError, match=r"which ranks keep under dense, ulysses, ulysses_z, not ring; .*slices=1"):
        Pipeline(ranks=(0, 1), scheme=ring, micro_batches=(micro_batch(0, [2, 4]),))
    with pytest.raises(InputError, match=r"backwards are not split with .* or slices; .*zero_bubble=false"):
        replace(uniform_scheme(LAYERS, stages=2, method=Method.DENSE), zero_bubble=True, slices=2)
    with pytest.raises(InputError, match=r"slices of tokens or into groups of heads, not both; .*slices=1"):
        replace(dense_scheme(LAYERS), head_groups=2, slices=2)
    with pytest.raises(InputError, match=r"reduce gradients to shares once for a micro-batch, .*slices=1"):
        replace(uniform_scheme(LAYERS, degree=2, method=Method.ULYSSES), shard_gradients=True, slices=2)
    with pytest.raises(InputError, match=r"0 slices; such a scheme has slices=1"):
        replace(dense_scheme(LAYERS), slices=0)
    assert replace(dense_scheme(LAYERS), slices=4).name == "<1,1> dense c4"


def test_times_and_tokens_of_slices_add_up():
    line = pipeline(micro_batch(0, [5, 2, 1], peak_bytes=100), micro_batch(1, [4], cut=False))
    times = pass_times(line)
    assert [f + b for f, b in zip(times.forwards_s, times.backwards_s)] == pytest.approx([5.0, 2.0, 1.0, 4.0])
    assert [part.tokens for part in slices_of(line)] == [range(5), range(5, 7), range(7, 8), range(4)]
    assert [part.name for part in slices_of(line)] == ["0.0", "0.1", "0.2", "1"]
    in_flight = 8 + 3 * 5
    assert [part.kept_bytes for part in slices_of(line)][:3] == [100 * size // in_flight for size in (5, 2, 1)]
    assert list(accumulate([5, 2, 1]))[-1] == line.micro_batches[0].pack.num_tokens
    assert isinstance(times, PassTimes)
