"""Whole weights and their gradients move beneath passes, and steps are the same to the last bit as if they did not."""

import copy
import pickle
from unittest import mock

import pytest
import torch
from torch import nn

from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.runtime.state.optimizer import make_optimizer
from lengthwise.runtime.state.owned_segments import segments_of, update_at_once, update_by_unit
from lengthwise.runtime.state.pending_parameter import PendingParameter
from lengthwise.runtime.state.table import ParameterTable
from lengthwise.runtime.state.update_overlap import UpdateOverlap
from tests.runtime.loop.runs import Packs, in_double, prepared
from tests.runtime.loop.test_families import CASES
from tests.runtime.train.runs import local_world

NUM_STEPS, LAYERS = 2, 3
REST = tuple(range(4, 10))
KINDS = {
    "pipelines of unequal shapes": (
        Packs(ranks=(2, 0), packs=((0, 1), (3,), (2,)), recompute=(True, False)),
        Packs(ranks=(1,), packs=(REST[:3], REST[3:]), recompute=(False, True)),
    ),
    "stages": (
        Packs(ranks=(2, 0), packs=((0, 1), (3,), (2,)), stage_layers=(1, 2)),
        Packs(ranks=(1,), packs=(REST[:3], REST[3:])),
    ),
    "split backwards": (
        Packs(ranks=(2, 0), packs=((0, 1), (3,), (2,)), stage_layers=(1, 2), splits=True),
        Packs(ranks=(1,), packs=(REST[:3], REST[3:])),
    ),
    "an idle rank": (Packs(ranks=(0, 1), packs=(tuple(range(10)),)), Packs(ranks=(2,), packs=())),
}  # fmt: skip


def steps_of(groups, *, by_layer, overlaps, reads_early=False):
    """Losses, weights, units pushed within backwards, and parameters that were on their way after each update."""
    pushed, pending, push = [], [], UpdateOverlap._push

    def counted(self, position, **options):
        before = self._state._next_push
        push(self, position, **options)
        pushed.append(before - self._state._next_push)

    adamw = OptimizerSettings(name="adamw", eps=1e-3)
    with (
        in_double(),
        mock.patch("tests.runtime.loop.runs.DENSE", adamw),
        mock.patch.object(UpdateOverlap, "_push", counted),
    ):
        run = prepared(
            CASES["llama"], groups, local_world(), num_steps=NUM_STEPS, by_layer=by_layer, compares_stages=False
        )
        run.lr, run.clip_norm = (lambda step: 0.02), 0.05
        if not overlaps:
            run.begin_update = run.state.clear_gradient
        losses = []
        for step in run.steps():
            for micro_batch in step:
                early = [run.model.lm_head.weight, *run.model.model.layers[-1].parameters()] if reads_early else []
                penalty = sum((weight.square().sum() for weight in early), torch.zeros(()))
                loss = run.wrapped_model.loss_of(run.model(**micro_batch.inputs), micro_batch)
                step.backward(loss + (penalty - penalty.detach()))
            losses.append(step.update().loss)
            parameters = dict(run.model.named_parameters())
            pending.append(sum(type(parameter) is PendingParameter for parameter in parameters.values()))
            check_reads(parameters)
        is_on = run.overlap is not None and run.overlap._is_on
        with run.plain():
            weights = [parameter.detach().clone() for parameter in run.model.parameters()]
        run.close()
    return losses, weights, sum(pushed), pending, is_on


def check_reads(parameters):
    """Whatever reads a parameter first waits for it."""
    name = "model.layers.1.mlp.up_proj.weight"
    parameter = parameters.get(name)
    if type(parameter) is PendingParameter:
        assert (parameter.shape, parameter.requires_grad) == (parameter.detach().shape, True)
        assert type(parameter) is nn.Parameter and isinstance(parameter, nn.Parameter)
        assert torch.equal(copy.deepcopy(parameter), pickle.loads(pickle.dumps(parameter)))


def overlapped_and_not(kind, by_layer=False, reads_early=False):
    results = [
        steps_of(KINDS[kind], by_layer=by_layer, overlaps=overlaps, reads_early=reads_early)
        for overlaps in (True, False)
    ]
    losses, weights = zip(*(result[:2] for result in results))
    assert losses[0] == losses[1] and losses[0][0] != losses[0][-1]
    assert all(map(torch.equal, *weights)), "the same to the last bit"
    assert results[1][2:] == (0, [0] * NUM_STEPS, False), "nothing moves beneath passes"
    return results[0][2:]


PUSHED = {
    "pipelines of unequal shapes": (4, 4, 4),
    "stages": (2, 4, 4),
    "split backwards": (3, 4, 4),
    "an idle rank": (4, 4, 0),
}
"""Units that each rank pushes within a step's last backward: all but its first layer and what is before it.

Where that is split, gradients of weights come last, those of the first layer with them.
"""


@pytest.mark.deep  # by default: by layer, below
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.deep] * (kind in ("stages", "an idle rank", "split backwards")))
        for kind in KINDS
    ],
)
def test_steps_are_the_same_to_the_last_bit_with_pushes_and_pulls_beneath_passes(ranks, kind):
    found = ranks(3).run(overlapped_and_not, kind)
    assert [pushed for pushed, _, _ in found] == [NUM_STEPS * number for number in PUSHED[kind]]
    assert all(is_on and min(pending) > 0 for _, pending, is_on in found), "an update waits for no weights"


@pytest.mark.deep
@pytest.mark.parametrize("kind", [pytest.param("stages", marks=pytest.mark.deep), "split backwards"])
def test_weights_of_stages_move_beneath_passes_by_layer_too(ranks, kind):
    found = ranks(3).run(overlapped_and_not, kind, by_layer=True)
    assert [pushed for pushed, _, _ in found] == [NUM_STEPS * number for number in PUSHED[kind]]


def test_gradients_that_come_after_their_push_are_pushed_again(ranks):
    """Of a loss that read weights before the forward."""
    found = ranks(3).run(overlapped_and_not, "pipelines of unequal shapes", reads_early=True)
    for pushed, _, is_on in found:
        assert not is_on and 0 < pushed <= LAYERS + 1, "in the first step alone"


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor"])
@pytest.mark.parametrize("is_narrow", [False, True])
def test_an_update_unit_by_unit_is_that_of_all_at_once(name, is_narrow):
    model = nn.ModuleDict({"a": nn.Linear(5, 3), "layers": nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 3)])})
    units = {name: 0 if name[0] == "a" else int(name.split(".")[1]) + 1 for name, _ in model.named_parameters()}
    table, settings, found = ParameterTable.of_units(model, units, 4), OptimizerSettings(name=name), []
    generator = torch.Generator().manual_seed(0)
    first, gradients = (torch.randn(table.num_elements, generator=generator) for _ in range(2))
    for by_unit in (True, False):
        master, pushed = first.clone(), gradients.to(torch.bfloat16 if is_narrow else torch.float32, copy=True)
        segments = segments_of(
            table,
            ((0, table.num_elements),),
            master=master,
            pushed=pushed,
            by_parameter=settings.needs_whole_parameters,
        )
        optimizer = make_optimizer(
            settings, decaying=[s.parameter for s in segments if s.decays],
            others=[s.parameter for s in segments if not s.decays],
        )  # fmt: skip
        for group in optimizer.param_groups:
            group["lr"] = 0.1
        for _ in range(2):
            if by_unit:
                assert list(update_by_unit(optimizer, segments, 0.5, 4)) == [0, 1, 2, 3]
            else:
                update_at_once(optimizer, segments, 0.5)
        found.append(master)
    assert torch.equal(*found) and not torch.equal(found[0], first)
