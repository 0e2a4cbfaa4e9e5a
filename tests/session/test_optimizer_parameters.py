"""Optimizers of one's own that tell parameters apart, or look at the model, train what a plain loop does."""

import logging
from functools import cache

import numpy as np
import pytest
import torch

import lengthwise as lw
from lengthwise.core.errors import InputError
from tests.session import models
from tests.session.loops import as_started_by_torchrun, step_through, weights_of
from tests.session.test_own_optimizers import loop_on_one_device
from tests.session.test_prepare import OPTIONS, STEPS, assert_equal_weights

COMMON = {name: value for name, value in OPTIONS.items() if name != "lr"} | {"memory_gib": 200, "check": False}


def parameters_of(groups):
    return [parameter for group in groups for parameter in group["params"]]


def by_choice(chosen):
    """SGD with a high rate for what ``chosen`` says."""

    def make(groups):
        everyone = parameters_of(groups)
        return torch.optim.SGD(
            [
                {"params": [p for p in everyone if chosen(p)], "lr": 0.5, "name": "chosen"},
                {"params": [p for p in everyone if not chosen(p)], "lr": 0.1, "name": "others"},
            ]
        )

    return make


class Looks(torch.optim.Optimizer):
    """SGD by an ``update`` of each parameter that it is given, its gradient and its rate."""

    def __init__(self, groups, update, before=None):
        super().__init__(groups, {"lr": 0.1})
        self.update, self.seen = update, parameters_of(self.param_groups)
        for parameter in self.seen if before is not None else ():
            self.state[parameter]["before"] = before(parameter)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, group["lr"], self.state[parameter])


def identity(model):
    head = {id(parameter) for parameter in model.head.parameters()}
    return by_choice(lambda p: id(p) in head)


def membership(model):
    return by_choice(lambda p: any(p is other for other in model.blocks[1].parameters()) or p in {model.head.weight})


def names(model):
    names_of = {parameter: name for name, parameter in model.named_parameters()}
    return by_choice(lambda p: names_of[p].endswith("norm.weight") or "tokens" in names_of[p])


def attribute(model):
    model.head.weight.is_big = model.norm.bias.is_big = True
    return by_choice(lambda p: getattr(p, "is_big", False))


def values(model):
    """Zeros, such as biases that nothing has trained yet, apart."""
    return by_choice(lambda p: not p.detach().any())


def each_apart(model):
    """As layer-wise decay of rates does: a group of each parameter."""
    names_of = {id(parameter): name for name, parameter in model.named_parameters()}
    rates = {name: 0.2 / (2 + place) for place, name in enumerate(names_of.values())}
    return lambda groups: torch.optim.SGD([
        {"params": [p], "lr": rates[names_of[id(p)]], "name": names_of[id(p)]} for p in parameters_of(groups)
    ])  # fmt: skip


def read_in_steps(model):
    """Attributes that every parameter has, without any default."""
    for place, parameter in enumerate(model.parameters()):
        parameter.lr_mult = 1.0 + place % 3

    def update(p, gradient, lr, state):
        p.sub_(gradient, alpha=lr * p.lr_mult)

    return lambda groups: Looks(groups, update)


def tensors_of_the_model(model):
    """Follows the first weights, which have the model's shapes, and limits those of the head."""
    first = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    names_of = {id(parameter): name for name, parameter in model.named_parameters()}

    def update(p, gradient, lr, state):
        p.sub_(gradient + 0.5 * (p - first[names_of[id(p)]]), alpha=lr)
        if p is model.head.weight:
            model.head.weight.data.clamp_(-0.1, 0.1)

    return lambda groups: Looks(groups, update)


def replaced_data(model):
    """With state from when it is made, and new tensors as data of parameters."""

    def update(p, gradient, lr, state):
        p.data = p.data - lr * (gradient + 0.5 * (p.data - state["before"]))

    return lambda groups: Looks(groups, update, before=lambda p: p.detach().clone())


def the_model_alone(model):
    return lambda groups: torch.optim.SGD(
        [{"params": model.head.parameters(), "lr": 0.5}, {"params": [*model.norm.parameters()]},
         {"params": [p for n, p in model.named_parameters() if n[:4] not in ("head", "norm")]}], lr=0.1,
    )  # fmt: skip


KINDS = {
    make.__name__: make
    for make in (
        identity, membership, names, attribute, values, each_apart, read_in_steps, tensors_of_the_model, replaced_data,
        the_model_alone,
    )
}  # fmt: skip


def prepared(model, optimizer, **options):
    return lw.prepare(model, models.rows(), cost=models.mixed_cost(), optimizer=optimizer, **COMMON | options)


def trained(kinds, **options):
    """Weights after a run with each kind of optimizer."""
    as_started_by_torchrun()
    outcomes = []
    for kind in kinds:
        model = models.gpt()
        run = prepared(model, KINDS[kind](model), **options)
        step_through(run)
        run.close()
        outcomes.append(weights_of(model))
    return outcomes


@cache
def plain(kind):
    """Weights after a loop of one's own."""
    made = {}

    def make(model):
        made["optimizer"] = KINDS[kind](model)

    def optimizer(groups):
        return made["optimizer"](groups)

    return loop_on_one_device(optimizer, None, None, noting=make)[1]


QUICK = (({}, ("identity", "tensors_of_the_model")), ({"weights": "by-layer"}, ("read_in_steps",)))
REST = [({}, tuple(KINDS)), ({"weights": "by-layer"}, tuple(KINDS))]


@pytest.mark.parametrize(
    ("options", "kinds"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.deep) for case in REST)]
)
def test_an_optimizer_has_the_models_own_parameters_on_several_ranks(ranks, options, kinds):
    for weights, kind in zip(ranks(2).run(trained, kinds, **options)[0], kinds):
        assert_equal_weights(weights, plain(kind))


@pytest.mark.usefixtures("unchecked")
def test_an_optimizer_has_the_models_own_parameters_on_one_rank():
    for options, kinds in (({}, KINDS), ({"offload_state": "host"}, ("attribute", "replaced_data"))):
        for weights, kind in zip(trained(kinds, **options), kinds):
            assert_equal_weights(weights, plain(kind))


def rounded(kind):
    """Weights of a model in bfloat16, whose masters are in float32, after a step, and their attributes and classes."""
    model = models.gpt().bfloat16()
    optimizer = KINDS[kind](model)
    run = lw.prepare(
        model, models.rows(), cost=models.mixed_cost(), optimizer=optimizer, **COMMON | {"steps": 1}, clip_norm=0.0
    )
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    step_through(run)
    run.close()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {type(parameter) for parameter in model.parameters()} == {torch.nn.Parameter}
    return {name: (parameter.detach() - before[name]).float().norm() for name, parameter in model.named_parameters()}


def test_parameters_of_16_bits_are_told_apart():
    high, low = rounded("identity"), rounded("names")
    assert high["head.weight"] > 3 * low["head.weight"]
    assert low["tokens.weight"] > 3 * high["tokens.weight"]


class Momentum(Looks):
    """Counts in its groups as well."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        super().step()


def momentum_of_groups(model):
    """Groups by identity, of which some ranks update nothing, and rates by attributes."""
    small = {id(parameter) for parameter in (model.norm.weight, model.head.weight)}
    model.head.weight.scale = 3.0

    def update(p, gradient, lr, state):
        momentum = state.setdefault("momentum", torch.zeros_like(p))
        momentum.mul_(0.9).add_(gradient)
        p.sub_(momentum, alpha=lr * getattr(p, "scale", 1.0))

    def make(groups):
        kinds = {True: [], False: []}
        for parameter in parameters_of(groups):
            kinds[id(parameter) in small].append(parameter)
        return Momentum([{"params": kinds[False]}, {"params": kinds[True], "lr": 0.3}], update)

    return make


KINDS["momentum_of_groups"] = momentum_of_groups


def in_parts(folder, *, last, is_first):
    as_started_by_torchrun()
    model = models.gpt(seed=0 if is_first else 7)
    run = lw.prepare(
        model, models.rows(), cost=models.mixed_cost(), optimizer=momentum_of_groups(model), recompute="none",
        **COMMON | {"steps": last},
    )  # fmt: skip
    if not is_first:
        assert run.resume(folder) == 1
    step_through(run)
    run.save(folder)
    values = [group.get("steps") for group in run.state.optimizer.param_groups]
    run.close()
    return weights_of(model), values


def test_groups_of_chosen_parameters_resume_on_another_number_of_ranks(ranks, tmp_path):
    ranks(2).run(in_parts, tmp_path, last=1, is_first=True)
    outcomes = ranks(3).run(in_parts, tmp_path, last=STEPS, is_first=False)
    assert_equal_weights(outcomes[0][0], plain("momentum_of_groups"))
    assert {value for _, values in outcomes for value in values} == {STEPS}


def hooked(groups):
    for parameter in parameters_of(groups):
        parameter.register_post_accumulate_grad_hook(lambda p: None)
    return torch.optim.SGD(groups, lr=0.1)


def test_hooks_that_an_optimizer_registers_are_refused_and_taken_away():
    model = models.gpt()
    with pytest.raises(InputError, match="registers hooks on the gradients of parameters when it is made"):
        prepared(model, hooked)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_a_trial_leaves_parameters_as_they_were():
    model = models.gpt()
    before = {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
    values, calls = weights_of(model), []

    def marks(groups):
        calls.append(len(groups))
        for parameter in parameters_of(groups):
            parameter.number_of_calls = getattr(parameter, "number_of_calls", 0) + 1
        return torch.optim.SGD(groups, lr=0.1) if len(calls) < 3 else None

    with pytest.raises(InputError, match="makes a NoneType"):
        prepared(model, marks)
    assert not any(vars(parameter) for parameter in model.parameters())
    assert {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()} == before
    assert all(np.array_equal(values[name], value) for name, value in weights_of(model).items())


def test_an_optimizer_that_is_another_each_time_is_refused():
    calls = []

    def numbered(groups):
        calls.append(len(calls))
        return torch.optim.SGD([{**group, "number": len(calls)} for group in groups], lr=0.1)

    with pytest.raises(InputError, match=r"numbered makes other parameter groups each time .*'number': \d+.*; then "):
        prepared(models.gpt(), numbered)


def test_an_empty_group_is_warned_of(caplog):
    other = models.gpt()
    with caplog.at_level(logging.WARNING, logger="lengthwise"):
        prepared(models.gpt(), identity(other)).close()
    [message] = [record.getMessage() for record in caplog.records if "without any parameter" in record.getMessage()]
    assert (
        "make makes 1 group without any parameter (position 0)" in message
        and "41 parameters that GPT trains" in message
    )
    caplog.clear()
    model = models.gpt()
    prepared(model, identity(model)).close()
    assert not [record for record in caplog.records if "without any parameter" in record.getMessage()]


def test_the_optimizer_itself_may_not_step_in_the_loop():
    model, made = models.gpt(), []

    def optimizer(groups):
        made.append(torch.optim.SGD(groups, lr=0.1))
        return made[-1]

    run = prepared(model, optimizer)
    for step in run.steps():
        for micro_batch in step:
            step.backward(model(**micro_batch.inputs)[1])
        with pytest.raises(InputError, match=r"SGD.step\(\) would update .*, which step.update\(\) updates"):
            made[-1].step()
        step.update()
    run.close()
