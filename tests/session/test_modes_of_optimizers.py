"""Optimizers of one's own whose methods change weights outside of steps, as ``eval()`` and ``train()`` of some do."""

import pytest
import torch

import lengthwise as lw
from lengthwise.core.errors import CheckError, InputError
from tests.session import models
from tests.session.loops import as_started_by_torchrun, weights_of
from tests.session.test_own_optimizers import loop_on_one_device
from tests.session.test_prepare import OPTIONS, assert_equal_weights

COMMON = {name: value for name, value in OPTIONS.items() if name != "lr"} | {"memory_gib": 200, "check": False}
IDS = torch.arange(9)[None]


class ScheduleFree(torch.optim.Optimizer):
    """SGD whose weights are between those that are trained and their average; ``eval()`` gives the average."""

    def __init__(self, groups):
        super().__init__(groups, {"lr": 0.2, "momentum": 0.9, "steps": 0, "is_training": True})

    def eval(self):
        self._move(lambda momentum: 1 - 1 / momentum, is_training=False)

    def train(self):
        self._move(lambda momentum: 1 - momentum, is_training=True)

    @torch.no_grad()
    def _move(self, share, *, is_training):
        for group in self.param_groups:
            for parameter in group["params"] if group["is_training"] != is_training else ():
                if "base" in self.state[parameter]:
                    parameter.lerp_(self.state[parameter]["base"], share(group["momentum"]))
            group["is_training"] = is_training

    @torch.no_grad()
    def restart(self):
        """What no rank can do by itself."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.copy_(self.state[parameter]["base"])

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["is_training"]
            group["steps"] += 1
            share, beta, lr = 1 / group["steps"], group["momentum"], group["lr"]
            for parameter in group["params"]:
                base = self.state[parameter].setdefault("base", parameter.clone())
                parameter.lerp_(base, share).add_(parameter.grad, alpha=lr * (beta * (1 - share) - 1))
                base.sub_(parameter.grad, alpha=lr)


def loss_in_eval(model, optimizer):
    optimizer.eval()
    with torch.no_grad():
        loss = model(IDS)[0].square().sum().item()
    optimizer.train()
    return loss


def prepared(model, dtype=torch.float64, **options):
    return lw.prepare(
        model.to(dtype), models.rows(), cost=models.mixed_cost(), optimizer=ScheduleFree, clip_norm=1.0,
        **COMMON | options,
    )  # fmt: skip


def trained(options):
    """Values in eval mode after each step, and the weights of eval mode after the last."""
    as_started_by_torchrun()
    model, values = models.gpt(), []
    run = prepared(model, **options)
    optimizer = run.state.optimizer
    for step in run.steps():
        optimizer.train()
        for micro_batch in step:
            step.backward(model(**micro_batch.inputs)[1])
        step.update()
        with run.plain():
            values.append(loss_in_eval(model, optimizer))
    optimizer.eval()
    run.close()
    return values, weights_of(model)


def plain():
    models_seen, values, made = [], [], []

    def optimizer(groups):
        made.append(ScheduleFree(groups))
        made[-1].register_step_post_hook(lambda *_: values.append(loss_in_eval(models_seen[-1], made[-1])))
        return made[-1]

    loop_on_one_device(optimizer, None, None, noting=models_seen.append)
    made[-1].eval()
    return values, weights_of(models_seen[-1])


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (2, {}), (2, {"weights": "by-layer"}), (1, {"offload_state": "host"}),
        pytest.param(3, {"offload_state": "host"}, marks=pytest.mark.deep),
    ],
)  # fmt: skip
def test_eval_and_train_of_an_optimizer_are_those_of_one_device(ranks, num_ranks, options):
    values, weights = plain()
    for values_of_ranks, weights_of_ranks in ranks(num_ranks).run(trained, options):
        assert values_of_ranks == pytest.approx(values, rel=1e-10)
        assert_equal_weights(weights_of_ranks, weights)


def test_a_model_of_16_bits_has_the_weights_of_eval_rounded():
    model = models.gpt()
    run = prepared(model, torch.bfloat16)
    optimizer = run.state.optimizer
    updates = iter_of_updates(run, model)
    next(updates), next(updates)
    before = weights_of_masters(run)
    optimizer.eval()
    after = weights_of_masters(run)
    assert any((before[name] != after[name]).any() for name in before)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach(), after[name].bfloat16()), name
    optimizer.train()
    run.close()
    with pytest.raises(InputError, match=r"ScheduleFree.eval\(\) after run.close\(\): the optimizer has weights in"):
        optimizer.eval()


def iter_of_updates(run, model):
    for step in run.steps():
        for micro_batch in step:
            step.backward(model(**micro_batch.inputs)[1])
        yield step.update()


def weights_of_masters(run):
    return {segment.name: segment.master.clone() for segment in run.state.owned.all}


def refusals():
    """Of calls in the midst of a step, of one rank alone, of another method, and after the run."""
    as_started_by_torchrun()
    model, messages = models.gpt(), []
    run = prepared(model)
    optimizer = run.state.optimizer

    def refuse(call, kind):
        with pytest.raises(kind) as refusal:
            call()
        messages.append(str(refusal.value))

    for step in run.steps():
        for micro_batch in step:
            step.backward(model(**micro_batch.inputs)[1])
        refuse(optimizer.eval, CheckError)
        step.update()
        break
    refuse(optimizer.restart, InputError)
    for parameter in model.parameters():
        parameter.data.fill_(0.5)
    if run.world.is_first:
        refuse(optimizer.eval, CheckError)
    else:
        refuse(lambda: run.save("nowhere"), CheckError)
    run.close()
    refuse(optimizer.eval, InputError)
    return messages


def test_methods_that_ranks_cannot_call_are_refused_by_name(ranks):
    for in_step, other, alone, closed in ranks(2).run(refusals):
        assert "ScheduleFree.eval() in the midst of step 0; call it after step.update()" in in_step
        assert "ScheduleFree.restart() changes weights outside of step(): each of the 2 ranks" in other
        assert "called eval() or train() of the optimizer before step 1" in alone and "run.save()" in alone
        assert "ScheduleFree.eval() after run.close(): each rank's optimizer has the state" in closed
