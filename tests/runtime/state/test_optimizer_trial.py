"""A trial of an optimizer says what checkpoints keep of it, which rate counts, and whether it couples parameters."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.core.errors import InputError
from lengthwise.runtime.state import saver
from lengthwise.runtime.state.optimizer import make_optimizer
from lengthwise.runtime.state.optimizer_trial import after_trial, check_coupling
from lengthwise.runtime.state.parameter_groups import changed_values, restore_values, set_learning_rate


class Sgd(torch.optim.SGD):
    """Calls ``act`` with its groups when it steps."""

    def __init__(self, groups, act, **options):
        super().__init__(groups, **options)
        self.act = act

    def step(self, closure=None):
        super().step()
        self.act(self.param_groups)


def settings_of(make, **asked):
    return OptimizerSettings(name="it", make=make, **asked)


def sgd_that(act):
    return settings_of(partial(Sgd, act=act))


def clips_all(groups):
    """Limit the norm of all weights: what optimizers do that limit the norm of all gradients."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    norm = torch.stack([parameter.detach().norm() for parameter in parameters]).norm()
    for parameter in parameters:
        parameter.data.mul_(min(1.0, 2.0 / norm))


def limits_late(groups):
    """The norm of all weights, after 30 steps."""
    groups[0]["steps"] = groups[0].get("steps", 0) + 1
    if groups[0]["steps"] > 30:
        clips_all(groups)


def moves_the_first(groups):
    groups[0]["params"][0].data.add_(1.0)


def adapts_a_rate(groups):
    """Sum over all parameters what the next step size may come from, as D-Adaptation does."""
    groups[0]["sum"] = groups[0].get("sum", 0.0) + sum(x.detach().norm().item() for x in groups[0]["params"])


def count(groups):
    for group in groups:
        group["steps"] = group.get("steps", 0) + 1
        group["seen"] = (group["steps"], [True, None, "three"])


def adds_noise(groups):
    for group in groups:
        for parameter in group["params"]:
            parameter.data.add_(torch.randn_like(parameter))


@pytest.mark.parametrize("act", [clips_all, moves_the_first, adapts_a_rate, limits_late])
def test_an_optimizer_whose_update_of_a_parameter_depends_on_others_is_for_one_rank(act):
    settings = after_trial(sgd_that(act))
    check_coupling(settings, 1)
    with pytest.raises(InputError, match=r"optimizer=it .*; each of the 3 ranks updates other parameters"):
        check_coupling(settings, 3)


class OfPairs(torch.optim.SGD):
    """Lets ``share`` say how far a step goes for a parameter, from another one that a dictionary names."""

    def __init__(self, groups, partners, share, is_late=False):
        super().__init__(groups, lr=0.1)
        self.partners, self.share, self.is_late = partners, share, is_late

    @torch.no_grad()
    def step(self, closure=None):
        everyone = [parameter for group in self.param_groups for parameter in group["params"]]
        shares = {} if self.is_late else {p: self.share(p, self.partners[p]) for p in everyone}
        for parameter in everyone:
            share = self.share(parameter, self.partners[parameter]) if self.is_late else shares[parameter]
            parameter.sub_(parameter.grad * share, alpha=0.1)


def by_gradients(p, partner):
    return 1.0 if partner.grad is None else p.grad.norm() / (p.grad.norm() + partner.grad.norm())


def by_values(p, partner):
    return partner.detach().abs().mean()


def by_shapes(p, partner):
    """In the shapes of the model alone."""
    return by_gradients(p, partner) if p.dim() == 1 or p.shape[1] == 5 else p.reshape(5, -1).new_ones(())


def layers(num_layers=6):
    return [nn.Parameter(torch.randn(size)) for _ in range(num_layers) for size in ((4, 5), (3, 5), (5,), (5, 5), (5,))]


@pytest.mark.parametrize(
    ("share", "is_late", "is_coupled"),
    [
        (by_gradients, False, True), (by_shapes, False, True),
        (by_values, False, False),  # of before the step, which ranks have of all parameters
        (by_values, True, True),
    ],
)  # fmt: skip
def test_two_parameters_of_a_layer_that_depend_on_one_another_are_for_one_rank(share, is_late, is_coupled):
    parameters = layers()
    partners = {p: p for p in parameters} | {parameters[10]: parameters[13], parameters[13]: parameters[10]}
    make = partial(OfPairs, partners=partners, share=share, is_late=is_late)
    settings = after_trial(settings_of(make), parameters, num_ranks=3)
    if is_coupled:
        with pytest.raises(InputError, match="updates a parameter otherwise where there are others"):
            check_coupling(settings, 3)
    else:
        check_coupling(settings, 3)


UNCOUPLED = [
    torch.optim.SGD, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.Adagrad,
    torch.optim.Adafactor, torch.optim.Muon, partial(torch.optim.AdamW, foreach=True, amsgrad=True),
    partial(transformers.Adafactor, relative_step=False, scale_parameter=False), partial(Sgd, act=adds_noise),
    partial(Sgd, act=count),
]  # fmt: skip


@pytest.mark.parametrize("make", UNCOUPLED)
def test_optimizers_that_update_each_parameter_by_itself_are_for_any_number_of_ranks(make):
    before = torch.get_rng_state()
    settings = after_trial(settings_of(make, asked_lr=1e-2))
    check_coupling(settings, 64)
    assert settings.base_lr in (None, 1e-2)
    assert torch.equal(torch.get_rng_state(), before)


def adds_a_tensor(groups):
    groups[0]["sum"] = groups[0].get("sum", torch.zeros(())) + 1


def changes_the_rate(groups):
    groups[0]["lr"] *= 0.9


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (adds_a_tensor, "keeps sum as a Tensor in its parameter groups and changes it"),
        (changes_the_rate, "changes lr of its parameter groups when it steps"),
    ],
)
def test_what_a_step_changes_in_groups_and_checkpoints_cannot_keep_is_refused(act, message):
    with pytest.raises(InputError, match=f"optimizer=it {message}"):
        after_trial(sgd_that(act))


def test_values_that_steps_change_in_groups_come_back_and_constants_stay_as_they_are_now():
    settings = after_trial(settings_of(partial(Sgd, act=count, momentum=0.5)))
    assert settings.group_values == ("seen", "steps")
    parameters = {"decaying": [nn.Parameter(torch.ones(2, 2))], "others": [nn.Parameter(torch.ones(2))]}
    optimizer = make_optimizer(settings, **parameters)
    optimizer.step()
    saved = json.loads(json.dumps(changed_values(optimizer)))
    other = make_optimizer(settings_of(partial(Sgd, act=count, momentum=0.8)), **parameters)
    restore_values(other, saved)
    for group in other.param_groups:
        assert group["seen"] == (1, [True, None, "three"])
        assert (group["steps"], group["momentum"]) == (1, 0.8)
    restore_values(other, {})
    assert changed_values(other) == {"0": {}, "1": {}}


def test_a_checkpoint_has_the_groups_of_all_ranks():
    group = SimpleNamespace(gather=lambda own: [[{}, {"1": {"steps": 1}}], own, [{"0": {"steps": 3}}, {}]])
    document = {"step": 3, "optimizer": {"name": "it", "groups": {"1": {"steps": 3}}}}
    groups = saver._with_groups_of_all(document, group)["optimizer"]["groups"]
    assert groups == {"0": {"steps": 3}, "1": {"steps": 3}}


def test_a_rank_without_parameters_of_one_kind_has_the_groups_of_the_other():
    """With the rate that they have on all ranks, and their position."""
    settings = after_trial(
        settings_of(lambda groups: torch.optim.Adagrad([{**groups[0], "lr": 0.4}, {**groups[1], "lr": 0.1}]))
    )
    vector = nn.Parameter(torch.ones(3))
    optimizer = make_optimizer(settings, decaying=[], others=[vector])
    set_learning_rate(optimizer, 0.2)
    empty, group = optimizer.param_groups
    assert not empty["params"] and empty["lr"] == 0.2
    assert list(map(id, group["params"])) == [id(vector)] == list(map(id, optimizer.state))
    assert group["lr"] == 0.05 and settings.base_lr == 0.4
    assert list(changed_values(optimizer)) == ["1"]


def test_lists_with_a_value_for_each_parameter_go_with_it():
    """As the names that optimizers of torch note; constants such as betas stay."""
    parameters = [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2))]
    names = {id(parameter): f"parameter {place}" for place, parameter in enumerate(parameters)}

    def make(groups):
        return Sgd([{**g, "names": [names[id(p)] for p in g["params"]], "betas": [0.5, 0.9]} for g in groups], print)

    kinds = {"decaying": parameters[:2], "others": parameters[2:]}
    optimizer = make_optimizer(settings_of(make), **kinds, leave_out={id(parameters[0]), id(parameters[2])})
    first, second = optimizer.param_groups
    assert (first["names"], second["names"]) == (["parameter 1"], [])
    assert first["betas"] == second["betas"] == [0.5, 0.9]
    assert changed_values(optimizer) == {"0": {}} and changed_values(optimizer, of_empty=True) == {"1": {}}


def test_frozen_parameters_are_no_matter_to_optimizers_of_torch_and_refused_for_others():
    trained, frozen = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2), requires_grad=False)
    settings = settings_of(lambda groups: torch.optim.SGD([trained, frozen], lr=0.1))
    optimizer = make_optimizer(settings, decaying=[trained], others=[])
    assert [id(parameter) for parameter in optimizer.param_groups[0]["params"]] == [id(trained)]
    with pytest.raises(InputError, match=r"takes 1 others, 1 of them frozen: .* Sgd may read frozen parameters"):
        make_optimizer(settings_of(lambda groups: Sgd([trained, frozen], print)), decaying=[trained], others=[])
