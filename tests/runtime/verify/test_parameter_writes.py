"""Models whose forward writes to their parameters."""

import pytest
import torch
from torch import nn

import lengthwise as lw
from lengthwise.core.errors import CheckError, InputError
from lengthwise.runtime.verify.parameter_writes import RefuseParameterWrites
from tests.session import models
from tests.session.loops import as_started_by_torchrun
from tests.session.structure_runs import OPTIONS, rows, train_alone

STEPS = 3


class Clamping(models.GPT):
    """Clamps a weight in training, to a bit more than its largest value of the beginning."""

    def __init__(self):
        super().__init__()
        self.limit = float(self.head.weight.detach().abs().max()) * 1.01

    def forward(self, idx, targets=None):
        if self.training:
            self.head.weight.data.clamp_(-self.limit, self.limit)
        return super().forward(idx, targets)


def clamping():
    torch.manual_seed(0)
    return Clamping().double()


def train_clamping():
    """Losses of steps, and the largest difference of weights to a loop alone after each; or what refused them."""
    as_started_by_torchrun()
    model, found = clamping(), []
    _, expected = train_alone(clamping(), STEPS)
    run = lw.prepare(model, rows(), steps=STEPS, packing="always", **OPTIONS)
    try:
        for step in run.steps():
            for micro_batch in step:
                step.backward(model(**micro_batch.inputs)[1])
            step.update()
            with run.plain():
                now, alone = dict(model.named_parameters()), expected[step.number]
                found.append(max(float((now[name] - alone[name]).detach().abs().max()) for name in alone))
    except CheckError as error:
        return str(error)
    finally:
        run.close()
    return found, float(now["head.weight"].detach().abs().max()) > model.limit


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.deep), 2])
def test_a_forward_that_clamps_weights_is_exact_where_that_changes_them_later(ranks, num_ranks):
    for outcome in ranks(num_ranks).run(train_clamping):
        differences, has_grown = outcome
        assert len(differences) == STEPS and max(differences) < 1e-10
        assert has_grown, "the weights grew beyond the limit, so that they were clamped"


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.clamp_(-0.1, 0.1),
        lambda weight: weight.clamp_min_(torch.tensor(-9.0)),
        lambda weight: weight.mul_(1.0),
        lambda weight: weight.copy_(weight.clone()),
    ],
)
def test_other_writes_are_refused(write):
    model = nn.Linear(3, 3)
    for may_clamp in (True, False):
        refused = pytest.raises(InputError, match=r"changes its parameter weight \(Linear, by ")
        with refused, RefuseParameterWrites(model, may_clamp=may_clamp):
            write(model.weight.data)
    with RefuseParameterWrites(model, may_clamp=True):
        model.weight.data.clamp_(-9.0, 9.0).clamp_min_(-9.0)
    with pytest.raises(InputError, match="by clamp_"), RefuseParameterWrites(model):
        model.weight.data.clamp_(-9.0, 9.0)
