"""`prepare(gradient_dtype="compute")` adds gradients up in the dtype of a model's weights, and plans know the bytes."""

import functools

import numpy as np
import pytest
import torch

import lengthwise as lw
from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.core.errors import InputError
from lengthwise.cost.memory_model import state_parts
from lengthwise.cost.profiled.layer_gather_cost import LayerGatherCost
from tests.plan.costs import SimpleCost
from tests.session import models
from tests.session.loops import as_started_by_torchrun, step_through, weights_of
from tests.session.test_prepare import OPTIONS

pytestmark = pytest.mark.usefixtures("unchecked")

PLAIN_SGD = OptimizerSettings(name="sgd", momentum=0.0, weight_decay=0.0)
LR = 0.5
UNIT = 2.0**-8
"""Relative error of one rounding to bfloat16."""
BY_HAND = OPTIONS | {
    "gradient_dtype": "compute", "optimizer": PLAIN_SGD, "lr": LR, "clip_norm": 0.0, "weight_decay": 0.0,
    "max_degree": 1, "max_stages": 1, "recompute": "none", "weights": "whole", "cost": SimpleCost(capacity=64),
    "memory_gib": 40, "tokens_per_step": 400,
}  # fmt: skip


def sums_by_hand():
    """Of one step: weights before, gradients of each micro-batch as autograd has them, their sums, weights after."""
    as_started_by_torchrun()
    model = models.gpt().to(torch.bfloat16)
    run = lw.prepare(model, models.rows(), **BY_HAND | {"steps": 1})
    found, seen = {}, {name: [] for name, _ in model.named_parameters()}
    hooks = [p.register_hook(functools.partial(_keep, seen[name])) for name, p in model.named_parameters()]
    assert run.state.gradients.dtype == run.state.pushed.dtype == torch.bfloat16
    assert run.state.master.dtype == torch.float32 and run.state.gradients.nbytes == run.state.weights.nbytes
    for step in run.steps():
        found["before"] = {name: p.detach().clone() for name, p in model.named_parameters()}
        for micro_batch in step:
            step.backward(run.model(**micro_batch.inputs)[1])
        found["sums"] = {name: p.grad.clone() for name, p in model.named_parameters()}
        step.update()
    for hook in hooks:
        hook.remove()
    run.close()
    found |= {"each": seen, "after": {name: p.detach().clone() for name, p in model.named_parameters()}}
    return {key: {name: _plain(value) for name, value in part.items()} for key, part in found.items()}


def _keep(seen, gradient):
    seen.append(gradient.detach().clone())


def _plain(value):
    return [_plain(part) for part in value] if isinstance(value, list) else value.float().numpy()


def rounded(values):
    return torch.from_numpy(values).to(torch.bfloat16).float().numpy()


@pytest.mark.parametrize("num_ranks", [2])
def test_sums_over_micro_batches_and_ranks_are_rounded_one_by_one_and_the_update_is_not(ranks, num_ranks):
    of_ranks = ranks(num_ranks).run(sums_by_hand)
    assert max(len(of_rank["each"]["head.weight"]) for of_rank in of_ranks) > 1, "several micro-batches"
    for name, before in of_ranks[0]["before"].items():
        for of_rank in of_ranks:
            expected = functools.reduce(lambda total, more: rounded(total + more), of_rank["each"][name])
            assert np.array_equal(of_rank["sums"][name], expected), name
        total = functools.reduce(lambda total, more: rounded(total + more), [r["sums"][name] for r in of_ranks])
        for of_rank in of_ranks:
            assert np.array_equal(of_rank["after"][name], rounded(before - np.float32(LR) * total)), name


def trained(ways, dtype):
    """Weights after each way."""
    as_started_by_torchrun()
    weights = []
    for way in ways:
        model = models.gpt().to(dtype)
        options = OPTIONS | {"steps": 2, "optimizer": PLAIN_SGD, "cost": models.mixed_cost(), "memory_gib": 40} | way
        run = lw.prepare(model, models.rows(), **options)
        step_through(run)
        run.close()
        weights.append({name: value.astype(np.float64) for name, value in weights_of(model.float()).items()})
    return weights


WAYS = [{}, {"weights": "by-layer", "recompute": "all"}, {"offload_state": "host"}]


def test_every_way_of_holding_weights_has_such_gradients_and_float32_is_left_as_it_is(ranks):
    narrow = [way | {"gradient_dtype": "compute"} for way in WAYS]
    first = {name: p.detach().to(torch.bfloat16).double().numpy() for name, p in models.gpt().named_parameters()}
    of_shares = slice(1, None)  # whole weights: above, to the last bit
    wide, other = (ranks(2).run(trained, ways[of_shares], torch.bfloat16)[0] for ways in (WAYS, narrow))
    for expected, found in zip(wide, other):
        for name, value in expected.items():
            moved = np.linalg.norm(value - first[name])
            rounding = UNIT * np.linalg.norm(value)  # of the weights, in each of two steps
            assert np.linalg.norm(found[name] - value) <= 12 * UNIT * moved + 2 * rounding, name
    (exact,), (same,) = (trained([way | {"check": False}], torch.float32) for way in (WAYS[0], narrow[0]))
    assert all(np.array_equal(same[name], value) for name, value in exact.items())


def test_costs_know_the_bytes():
    model = models.gpt().to(torch.bfloat16)
    run = lw.prepare(model, models.rows(), **BY_HAND | {"cost": None, "steps": 1, "verbose": False})
    cost = run.planner.planner.problem.cost.base  # beneath corrections
    weights, gradients, optimizer = state_parts(cost.model, num_devices=1, dtype="bfloat16", narrow_gradients=True)
    assert cost.narrow_gradients
    assert (weights, gradients) == (run.state.weights.nbytes, run.state.gradients.nbytes)
    assert sum(cost.stage_state(1, run.planner.planner.problem.candidates[0].scheme, 0, num_devices=1)[0]) == (
        weights + gradients + optimizer
    )
    run.close()
    units = {"unit_params": (100, 400, 400, 100), "unit_frozen_bytes": (0,) * 4, "dtype": "bfloat16"}
    whole, narrow = (LayerGatherCost(**units, narrow_gradients=is_narrow) for is_narrow in (False, True))
    for moment, (weights, gradients, shares) in whole.state_parts(2).items():
        assert narrow.state_parts(2)[moment] == (weights, gradients // 2, shares - 2 * 500)
    assert narrow.stage_parts(2, range(2)) == (2000, 2000, 14 * 500)


def test_what_cannot_have_them_is_refused(monkeypatch):
    given = BY_HAND | {"optimizer": torch.optim.NAdam}
    with pytest.raises(InputError, match=r"gradient_dtype='compute': .* NAdam may look at all of them"):
        lw.prepare(models.gpt(), models.rows(), **given)
    with pytest.raises(InputError, match="gradient_dtype"):
        lw.prepare(models.gpt(), models.rows(), gradient_dtype="float16")
    monkeypatch.setattr("lengthwise.runtime.loop.prepared_model.fsdp_modules", lambda model: [model])
    with pytest.raises(InputError, match=r"gradient_dtype='compute': FSDP2 keeps the gradients of GPT"):
        lw.prepare(models.gpt(), models.rows(), **BY_HAND)
