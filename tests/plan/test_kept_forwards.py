"""Forwards keep what their backward needs until all are done where that fits; else those that save the most time."""

import numpy as np
import pytest

from lengthwise.core.batch import Pack
from lengthwise.core.pipeline_config import Method, uniform_scheme
from lengthwise.core.planned_micro_batch import PlannedMicroBatch
from lengthwise.core.step_plan import Pipeline, StepPlan
from lengthwise.plan.kept_forwards import kept_forwards

STATE = 100


def plan_with(pipelines):
    """A plan of (ranks, phase, ((bytes beyond the state, seconds), ...)) with ids that count up."""
    ids, made = iter(range(1000)), []
    for ranks, phase, sizes in pipelines:
        degree = len(ranks)
        scheme = uniform_scheme(2, degree=degree, method=Method.RING if degree > 1 else Method.DENSE)
        micro_batches = tuple(
            PlannedMicroBatch(pack=Pack(ids=(next(ids),), lengths=(8,)), time_s=time_s, peak_bytes=STATE + num_bytes)
            for num_bytes, time_s in sizes
        )
        made.append(Pipeline(ranks=ranks, phase=phase, scheme=scheme, micro_batches=micro_batches, state_bytes=STATE))
    return StepPlan(
        step=0, policy="by hand", pipelines=tuple(made), loss_normaliser=7, update_s=0.0, time_s=1.0, lower_bound_s=1.0
    )  # fmt: skip


SHARED = ((0, 1), 0, ((30, 3.0), (20, 1.0)))
ALONE = ((0,), 1, ((25, 2.0),)), ((1,), 1, ((10, 1.0), (10, 2.0)))


@pytest.mark.parametrize(
    ("room", "kept"),
    [
        (75, {(0, 0), (0, 1), (1, 0), (2, 0), (2, 1)}),  # rank 0 has 30 + 20 + 25
        (74, {(0, 0), (2, 1)}),  # 30 of it are kept free for the forward of those that keep nothing
        (41, {(2, 1)}),
        (0, set()),
    ],
)
def test_those_that_save_the_most_time_for_their_bytes_are_kept(room, kept):
    assert kept_forwards(plan_with([SHARED, *ALONE]), STATE + room) == kept


def test_what_is_kept_fits_every_rank_beside_the_largest_that_is_not():
    rng = np.random.default_rng(0)
    for _ in range(200):
        pipelines, phase = [], 0
        for phase in range(int(rng.integers(1, 3))):
            cut = int(rng.integers(1, 4))
            for ranks in (tuple(range(cut)), tuple(range(cut, 4))):
                sizes = [(int(rng.integers(0, 50)), float(rng.random())) for _ in range(rng.integers(0, 4))]
                pipelines.append((ranks, phase, tuple(sizes)))
        pipelines.append(((0, 1, 2, 3), phase + 1, ((5, 1.0),)))
        room = int(rng.integers(0, 200))
        plan = plan_with([(ranks, phase, sizes) for ranks, phase, sizes in pipelines if ranks])
        kept = kept_forwards(plan, STATE + room)
        for rank in range(4):
            sizes = {
                (number, index): planned.peak_bytes - STATE
                for number, pipeline in enumerate(plan.pipelines)
                if rank in pipeline.ranks
                for index, planned in enumerate(pipeline.micro_batches)
            }
            others = [size for key, size in sizes.items() if key not in kept]
            beside = max(others, default=0) if kept & sizes.keys() else 0
            assert sum(size for key, size in sizes.items() if key in kept) + beside <= room or not kept & sizes.keys()


def test_stages_keep_nothing():
    plan = plan_with([((0, 1), 0, ((1, 1.0),))])
    scheme = uniform_scheme(2, degree=1, stages=2, method=Method.DENSE)
    pipeline = Pipeline(ranks=(0, 1), scheme=scheme, micro_batches=plan.pipelines[0].micro_batches, state_bytes=STATE)
    staged = StepPlan(
        step=0, policy="by hand", pipelines=(pipeline,), loss_normaliser=7, update_s=0.0, time_s=1.0, lower_bound_s=1.0
    )  # fmt: skip
    assert not kept_forwards(staged, 1 << 40)
