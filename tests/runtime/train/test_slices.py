"""Micro-batches in slices on ranks: later slices see earlier keys, and every gradient is that of one device."""

import random
from dataclasses import replace
from itertools import pairwise
from unittest import mock

import pytest
import torch

from lengthwise.core.errors import InputError
from lengthwise.core.pass_order import PipelineSchedule
from lengthwise.core.pipeline_config import Method, uniform_scheme
from lengthwise.core.planned_micro_batch import PlannedSlice
from lengthwise.core.step_plan import StepPlan
from lengthwise.runtime.loop.planned_pipelines import check_executable as check_any_model
from lengthwise.runtime.train.clock import StepClock
from lengthwise.runtime.train.executable import check_compiled, check_executable
from lengthwise.runtime.train.execute_pipeline import WeightPhaseRun
from lengthwise.runtime.train.execute_step import run_micro_batches
from tests.runtime.parallel.flash_on_cpu import flash_on_cpu
from tests.runtime.train.families import FAMILIES, assert_as_on_one_device, pushed_gradients, run_plan, source_of
from tests.runtime.train.runs import local_world, new_state
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
}
QUICK = (
    "one device", "two stages in tiles, all recomputed", "two stages, half of the layers offloaded",
    "two ranks with sharded weights",
)  # fmt: skip


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    "name",
    # Stages without tiles compute other families, below.
    [pytest.param(name, marks=[pytest.mark.deep] * (name not in QUICK)) for name in SCHEMES],
)
def test_slices_give_the_gradient_of_one_device(ranks, name):
    ranks(SCHEMES[name].num_devices).run(_check, SCHEMES[name], ["llama"])


def test_slices_of_other_causal_families_and_under_gpipe_do(ranks):
    names = [name for name, spec in FAMILIES.items() if spec.causal]
    ranks(2).run(_check, SCHEMES["two stages"], names)
    ranks(2).run(_check, SCHEMES["two stages"], ["llama"], schedule=PipelineSchedule.GPIPE)


def _check(scheme, families, cuts=CUTS, **options):
    for name in families:
        batch = batch_of(*LENGTHS, spec=FAMILIES[name])
        found = run_plan(FAMILIES[name], batch, sliced(scheme, batch, cuts), **options)
        assert_as_on_one_device(FAMILIES[name], batch, found)


def test_gradients_that_are_summed_in_another_dtype_are_those_of_whole_micro_batches(ranks):
    for (name, cut), (_, whole) in zip(*(ranks(2).run(_narrow, SCHEMES["two stages"], cuts)[1] for cuts in (CUTS, ()))):
        torch.testing.assert_close(cut, whole, rtol=0.05, atol=0.02 * whole.abs().max().item(), msg=name)


def _narrow(scheme, cuts):
    """Gradients of steps in bfloat16, which are summed in float32."""
    batch, world = batch_of(*LENGTHS), local_world()
    model, state = new_state(world, torch.bfloat16)
    plan = sliced(scheme, batch, cuts or ((),) * len(PACKS))
    run_micro_batches(plan, model, state, source_of(batch), clock=StepClock(world))
    return sorted((name, gradient.float()) for name, gradient in pushed_gradients(state).items())


def test_by_the_kernels_of_gpus_a_slice_is_two_launches_and_as_exact(ranks):
    assert ranks(2).run(_by_flash, SCHEMES["two stages"])[0] == {"forward": 3 * 16, "backward": 3 * 16}


def _by_flash(scheme):
    """Launches of the first of two stages: its three layers', of ten passes, six of which see earlier slices."""
    spec = replace(SPEC, head_size=8)
    batch = batch_of(*LENGTHS, spec=spec)
    with flash_on_cpu() as calls:
        found = run_plan(spec, batch, sliced(scheme, batch))
        launches = dict(calls)
    assert_as_on_one_device(spec, batch, found)
    return launches


def test_models_that_look_ahead_and_compiled_layers_refuse_slices_and_ranks_without_tokens_too():
    plan = sliced(SCHEMES["two stages"], batch_of(*LENGTHS))
    with pytest.raises(
        InputError, match=r"micro-batches are cut .*model test also see later ones; plan again with plan.slices=none"
    ):
        check_executable(plan, replace(SPEC, causal=False), 2)
    with pytest.raises(InputError, match=r"pipelines\[0\] cuts micro-batches into slices, and compiled.*compile=false"):
        check_compiled(plan)
    with pytest.raises(InputError, match=r"pipelines\[0\] cuts micro-batches into slices, and tokens see later ones; "):
        check_any_model(plan, SPEC.num_layers, 2, stage_problem="", slice_problem="tokens see later ones")
    shared = sliced(SCHEMES["two stages of two ranks"], batch_of(*LENGTHS))
    with pytest.raises(InputError, match=r"has a slice of 1 tokens for 2 ranks, of which some would have none, and"):
        check_any_model(shared, SPEC.num_layers, 4, stage_problem="")


def test_a_plan_with_slices_comes_back_from_its_file():
    plan = sliced(SCHEMES["two stages"], batch_of(*LENGTHS))
    assert StepPlan.from_json(plan.to_json()) == plan
    other = sliced(SCHEMES["two stages"], batch_of(*LENGTHS), cuts=[(5, 9, 2, 7), *CUTS[1:]])
    assert other.digest != plan.digest, "ranks that cut a micro-batch elsewhere must not run together"


def test_keys_and_values_and_their_gradients_are_there_once_and_gone_with_the_first_slice(ranks):
    kept = ranks(1).run(_kept_between_passes, SCHEMES["one device"])[0]
    before, after = kept["forward 0.3"], kept["backward 0.0"]
    assert before == SPEC.num_layers, "layers have the keys of all slices"
    assert after == 0 and kept["end"] == 0


def _kept_between_passes(scheme):
    kept, batch = {}, batch_of(*LENGTHS)
    compute = WeightPhaseRun._compute

    def counted(self, operation, how):
        compute(self, operation, how)
        tables = [keys for sliced in self._sliced.values() for keys in sliced._keys.values()]
        kept[f"{operation.kind} {self._slice(operation).name}"] = len(tables)
        kept["end"] = len(tables)

    with mock.patch.object(WeightPhaseRun, "_compute", counted):
        run_plan(SPEC, batch, sliced(scheme, batch))
    return kept


@pytest.mark.deep
def test_many_cuts_give_the_gradient_of_one_device(ranks):
    rng = random.Random(3)
    for _ in range(30):
        cut, degree = rng.randint(1, 3), rng.choice((1, 2))
        method = Method.ULYSSES if degree == 2 else Method.DENSE
        scheme = stages_of(cut, 4 - cut, degree=degree, method=method, recomputed=rng.randint(0, 4))
        cuts = []
        for pack in PACKS:
            total = sum(LENGTHS[i] for i in pack)
            places = sorted(rng.sample(range(1, total), rng.randint(0, min(6, total - 1))))
            cuts.append(tuple(b - a for a, b in pairwise([0, *places, total])) if places else ())
        ranks(2 * degree).run(_check, scheme, ["llama"], cuts=cuts)
