"""Micro-batches in slices on ranks: later slices see earlier keys, and every gradient is that of one device."""

from dataclasses import replace

import pytest

from lengthwise.core.pass_order import PipelineSchedule
from lengthwise.core.pipeline_config import Method, uniform_scheme
from lengthwise.core.planned_micro_batch import PlannedSlice
from tests.runtime.train.families import FAMILIES, assert_as_on_one_device, run_plan
from tests.runtime.train.test_execute_pipeline import batch_of, plan_of
from tests.sim.random_plans import SPEC

LENGTHS = (23, 9, 1, 6, 11, 2, 7)
PACKS = [[0], [4, 2, 1], [3, 5], [6]]
CUTS = [(5, 9, 1, 8), (13, 1, 7), (), (3, 4)]
"""Slices of each pack: within a sequence, of several, across boundaries, of one token; and a pack that is not cut."""


def sliced(scheme, batch, cuts=CUTS, packs=PACKS):
    plan = plan_of(batch, (tuple(range(scheme.num_devices)), scheme, packs, 0))
    (pipeline,) = plan.pipelines
    cut = tuple(
        replace(m, slices=tuple(PlannedSlice(size, float(size)) for size in sizes))
        for m, sizes in zip(pipeline.micro_batches, cuts)
    )
    return replace(plan, pipelines=(replace(pipeline, micro_batches=cut),))


def stages_of(*layers, degree=1, method=Method.DENSE, recomputed=0, **more):
    scheme = uniform_scheme(SPEC.num_layers, degree=degree, stages=len(layers), method=method, recomputed=recomputed)
    return replace(scheme, stage_layers=layers, **more)


SCHEMES = {
    "one device": stages_of(4),
    "two stages": stages_of(3, 1),
    "three stages, one layer of four recomputed": stages_of(1, 2, 1, recomputed=1),
    "two stages, all recomputed but attention": stages_of(2, 2, recomputed=4, keep_attention=True),
    "two stages in tiles, all recomputed": stages_of(1, 3, recomputed=4, tile_tokens=3),
    "two stages, half of the layers offloaded": stages_of(2, 2, offload=(True, False) * 2),
    "two stages of two ranks": stages_of(1, 3, degree=2, method=Method.ULYSSES, recomputed=2),
    "three ranks": stages_of(4, degree=3, method=Method.ULYSSES),
    "two ranks with sharded weights": stages_of(4, degree=2, method=Method.ULYSSES_Z, recomputed=2),
    "two ranks with sharded gradients": stages_of(4, degree=2, method=Method.ULYSSES, shard_gradients=True),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_slices_give_the_gradient_of_one_device(ranks, name):
    ranks(SCHEMES[name].num_devices).run(_check, SCHEMES[name], ["llama"])


def test_slices_of_other_causal_families_and_under_gpipe_do(ranks):
    names = [name for name, spec in FAMILIES.items() if spec.causal]
    ranks(2).run(_check, SCHEMES["two stages"], names)
    ranks(2).run(_check, SCHEMES["two stages"], ["llama"], schedule=PipelineSchedule.GPIPE)


def _check(scheme, families, **options):
    for name in families:
        batch = batch_of(*LENGTHS, spec=FAMILIES[name])
        assert_as_on_one_device(
            FAMILIES[name], batch, run_plan(FAMILIES[name], batch, sliced(scheme, batch), **options)
        )
