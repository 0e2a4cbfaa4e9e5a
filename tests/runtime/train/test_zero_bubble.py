"""Split backwards on ranks: gradients of weights come later, in the order of the plan, and are those of one device."""

import random
from dataclasses import replace
from unittest import mock

import pytest
import torch

from lengthwise.core.errors import InputError
from lengthwise.core.pipeline_config import Method, uniform_scheme
from lengthwise.core.zero_bubble import pass_orders
from lengthwise.runtime.loop.planned_pipelines import check_executable as check_any_model
from lengthwise.runtime.models.products import WeightGradients
from lengthwise.runtime.train.executable import check_compiled
from tests.runtime.train.families import FAMILIES, assert_as_on_one_device, run_plan
from tests.runtime.train.test_execute_pipeline import Recorder, batch_of, plan_of, weights_that_come_when_waited_for
from tests.sim.random_plans import SPEC

LENGTHS = (13, 9, 1, 6, 11, 2, 7)
PACKS = [[0], [4, 2], [1], [6], [3, 5]]


def split(scheme, batch, *, share=1 / 3):
    """A plan of one pipeline on all its ranks whose micro-batches take seconds in proportion to their tokens."""
    plan = plan_of(batch, (tuple(range(scheme.num_devices)), replace(scheme, zero_bubble=True), PACKS, 0))
    (pipeline,) = plan.pipelines
    timed = tuple(
        replace(m, time_s=float(m.pack.num_tokens), weights_s=share * m.pack.num_tokens) for m in pipeline.micro_batches
    )
    return replace(plan, pipelines=(replace(pipeline, micro_batches=timed),))


def stages_of(*layers, degree=1, method=Method.DENSE, recomputed=0):
    scheme = uniform_scheme(SPEC.num_layers, degree=degree, stages=len(layers), method=method, recomputed=recomputed)
    return replace(scheme, stage_layers=layers)


SCHEMES = {
    "two stages": stages_of(3, 1),
    "three stages, one layer of four recomputed": stages_of(1, 2, 1, recomputed=1),
    "two stages, all recomputed": stages_of(2, 2, recomputed=4),
    "four stages": stages_of(1, 1, 1, 1),
    "two stages of two ranks": stages_of(1, 3, degree=2, method=Method.RING, recomputed=2),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.deep] * (name == "four stages")) for name in SCHEMES]
)
def test_split_backwards_give_the_gradient_of_one_device(ranks, name):
    ranks(SCHEMES[name].num_devices).run(_check, SCHEMES[name], ["llama"], (False,))


@pytest.mark.deep  # by default: llama above
def test_split_backwards_of_other_families_do_and_weights_are_never_used_before_they_have_come(ranks):
    names = [name for name in FAMILIES if name != "llama"]
    ranks(3).run(_check, SCHEMES["three stages, one layer of four recomputed"], names, (False, True))


def _check(scheme, families, poisons, share=1 / 3):
    for name in families:
        batch = batch_of(*LENGTHS, spec=FAMILIES[name])
        for poison in poisons:
            with weights_that_come_when_waited_for() if poison else mock.MagicMock():
                found = run_plan(FAMILIES[name], batch, split(scheme, batch, share=share))
            assert_as_on_one_device(FAMILIES[name], batch, found)


def test_gradients_of_weights_are_pushed_as_the_last_weight_pass_has_them_and_no_sooner(ranks):
    batch = batch_of(*LENGTHS)
    plan = split(stages_of(1, 3), batch)
    assert [kind.word for kind, _ in pass_orders(plan.pipelines[0])[1]][-3:] == ["backward", "weights", "weights"]
    last = ranks(2).run(_recorded, batch, plan)[1]
    assert last[-9:] == [
        ("weights", 4), ("push", 5), ("push", 4), ("weights", 3), ("push", 3), ("weights", 2), ("push", 2), ("push", 1),
        ("push", 0),
    ], "the loss and the norm, and each layer, once its gradients are there"  # fmt: skip


def _recorded(batch, plan):
    """The events of a run, with each unit whose gradients of weights are there."""
    recorder, compute = Recorder(), WeightGradients.compute

    def recorded(self, complete):
        def hear(unit):
            recorder.events.append(("weights", unit))
            complete(unit)

        compute(self, hear)

    with recorder.routes(), mock.patch.object(WeightGradients, "compute", recorded):
        found = run_plan(SPEC, batch, plan, prepare=recorder.watch)
    assert_as_on_one_device(SPEC, batch, found)
    return recorder.events


def test_products_leave_gradients_of_weights_alone_for_later_and_they_are_those_of_autograd():
    rng = torch.Generator().manual_seed(0)
    x_tI = torch.randn(5, 3, generator=rng, dtype=torch.float64)
    weight, bias = (torch.randn(*shape, generator=rng, dtype=torch.float64) for shape in ((4, 3), (4,)))
    down = torch.randn(4, 2, generator=rng, dtype=torch.float64)
    found = []
    for products in (None, WeightGradients()):
        own = [one.detach().clone().requires_grad_() for one in (x_tI, weight, bias, down)]
        if products is None:
            ((own[0] @ own[1].T + own[2]).relu() @ own[3]).square().sum().backward()
        else:
            of_unit = products.of_unit(2)
            of_unit.matmul(of_unit.linear(own[0], own[1], own[2]).relu(), own[3]).square().sum().backward()
            assert own[1].grad is None and own[3].grad is None and own[2].grad is not None
            completed = []
            products.compute(completed.append)
            assert completed == [2]
        found.append([one.grad for one in own])
    for ours, expected in zip(*found):
        torch.testing.assert_close(ours, expected, rtol=1e-14, atol=1e-14)


def test_compiled_layers_and_some_prepared_models_refuse_split_backwards():
    plan = split(stages_of(1, 3), batch_of(*LENGTHS))
    with pytest.raises(InputError, match=r"splits backwards, and those of compiled layers are whole; plan with zero_b"):
        check_compiled(plan)
    with pytest.raises(InputError, match=r"pipelines\[0\] splits backwards, and why not; plan with zero_bubble=false"):
        check_any_model(plan, SPEC.num_layers, 2, stage_problem="", split_problem="why not")
    check_any_model(plan, SPEC.num_layers, 2, stage_problem="")


@pytest.mark.deep
def test_many_split_plans_give_the_gradient_of_one_device(ranks):
    rng = random.Random(7)
    for _ in range(20):
        cut, share = rng.randint(1, 3), rng.choice((0.05, 0.2, 1 / 3))
        scheme = stages_of(cut, 4 - cut, degree=2, method=Method.ULYSSES, recomputed=rng.randint(0, 3))
        ranks(4).run(_check, scheme, ["llama"], (False,), share)
