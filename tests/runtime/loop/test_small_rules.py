"""Rates, parameters, buffers and models beside the prepared one: what is refused, and what is put back."""

import math
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from lengthwise.core.errors import InputError
from lengthwise.core.pipeline_config import Method, uniform_scheme
from lengthwise.runtime.loop.learning_rate import learning_rate_of
from lengthwise.runtime.loop.plan_limits import PlanLimits
from lengthwise.runtime.loop.saved_buffers import MOST_BYTES, buffers_to_save, restore_buffers
from lengthwise.runtime.loop.unprepared_models import may_mix_tokens
from lengthwise.runtime.loop.watched_parameters import WatchedParameters
from lengthwise.runtime.wrap.preserved_state import preserve_state


def test_a_rate_is_scaled_and_one_that_is_no_rate_is_a_sentence():
    assert learning_rate_of(lambda step: 0.5 * step, 3, 0.25) == (0.375, "")
    assert learning_rate_of(lambda step: 0.0, 3, 1.0) == (0.0, "")
    for lr, named in (
        (lambda step: -1e-9, "is -1e-09"),
        (lambda step: math.inf, "is inf"),
        (lambda step: math.nan, "nan"),
    ):
        rate, problem = learning_rate_of(lr, 3, 1.0)
        assert math.isnan(rate) and named in problem and "lr of step 3" in problem
    assert learning_rate_of(0.5, 3, 0.25) == (0.125, ""), "a number, as of run.lr = 0.5"
    rate, problem = learning_rate_of(lambda step: 1 / 0, 3, 1.0)
    assert math.isnan(rate) and "failed with ZeroDivisionError" in problem


def layers():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].bias.requires_grad_(False)
    return model


CHANGES = {
    "the parameter 0.bias is gone": lambda model: setattr(model[0], "bias", None),
    "the parameter 2.weight was added": lambda model: model.append(nn.Linear(2, 2)),
    "the parameter 0.weight was replaced by another": lambda model: setattr(
        model[0], "weight", nn.Parameter(torch.zeros(2, 2))
    ),
    "the parameter 0.weight was frozen": lambda model: model[0].weight.requires_grad_(False),
    "the parameter 1.bias was unfrozen": lambda model: model[1].bias.requires_grad_(True),
}


@pytest.mark.parametrize("problem", CHANGES)
def test_a_parameter_that_is_not_what_it_was_is_named(problem):
    model = layers()
    watched = WatchedParameters(model)
    assert watched.problem() == ""
    CHANGES[problem](model)
    assert watched.problem().startswith(f"{problem} since the model was prepared")


def test_parameters_that_fsdp2_puts_in_the_place_of_shares_are_no_change(monkeypatch):
    monkeypatch.setattr("lengthwise.runtime.loop.watched_parameters.fsdp_modules", lambda model: [model])
    model = layers()
    watched = WatchedParameters(model)
    model[0].weight = nn.Parameter(torch.zeros(2, 2))
    assert watched.problem() == ""


def test_buffers_and_all_generators_are_put_back_whatever_happens_inside():
    model = nn.BatchNorm1d(3)
    model.register_buffer("grown", torch.zeros(2))
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = random.random(), float(np.random.rand()), torch.rand(2).tolist()
    for set_state, state in zip((random.setstate, np.random.set_state, torch.set_rng_state), states):
        set_state(state)
    with pytest.raises(KeyError), preserve_state(model):
        model(torch.randn(5, 3))
        model.grown = torch.ones(4)
        random.random(), np.random.rand()
        raise KeyError
    assert (random.random(), float(np.random.rand()), torch.rand(2).tolist()) == expected
    assert model.running_mean.tolist() == [0.0] * 3 and int(model.num_batches_tracked) == 0
    assert model.grown.tolist() == [1.0] * 4, "it has another shape now"


def buffered(**buffers):
    model = nn.Module()
    for name, value in buffers.items():
        model.register_buffer(name, value, persistent=name != "made")
    return model


def test_small_buffers_come_back_and_large_ones_have_to_be_what_they_were():
    many = MOST_BYTES // 4
    saved = buffers_to_save(buffered(small=torch.arange(3.0), most=torch.ones(many), large=torch.ones(many + 1)))
    assert ["bytes" in saved[name] for name in ("small", "most", "large")] == [True, True, False]
    model = buffered(small=torch.zeros(3), most=torch.zeros(many), large=torch.ones(many + 1), made=torch.zeros(1))
    assert "made" not in buffers_to_save(model)
    restore_buffers(model, saved, Path("it"))
    assert model.small.tolist() == [0.0, 1.0, 2.0] and bool(model.most.all())
    for other, named in (
        (buffered(large=torch.zeros(many + 1)), "buffer large has other values than when it was saved"),
        (buffered(small=torch.zeros(4)), r"buffer small as torch.float32 \[3\], the model as torch.float32 \[4\]"),
        (buffered(small=torch.zeros(3, dtype=torch.int32)), r"torch.float32 \[3\], the model as torch.int32 \[3\]"),
    ):
        with pytest.raises(InputError, match=named):
            restore_buffers(other, saved, Path("it"))


class Block(nn.Linear):
    """A layer of one's own."""


def of_transformers():
    model = nn.Linear(2, 2)
    model.set_attn_implementation, model.config = print, object()
    return model


@pytest.mark.parametrize(
    ("module", "may_mix"),
    [
        (nn.MultiheadAttention(4, 2), True),
        (nn.Sequential(nn.Conv1d(2, 2, 3)), True),
        (of_transformers(), True),
        (nn.ModuleDict({"layers": nn.ModuleList([Block(2, 2), Block(2, 2)])}), True),
        (nn.ModuleList([Block(2, 2)]), False),
        (nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), False),
        (nn.ModuleList([Block(2, 2), nn.LayerNorm(2)]), False),
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU()), False),
    ],
)
def test_tokens_may_meet_where_a_module_attends_convolves_recurs_or_stacks_layers(module, may_mix):
    assert may_mix_tokens(module) == may_mix


def shared_plan(**options):
    """What :class:`PlanLimits` reads of a plan with a micro-batch that two ranks share."""
    scheme = replace(uniform_scheme(2, degree=2, method=Method.ULYSSES), **options)
    pipeline = SimpleNamespace(
        scheme=scheme,
        micro_batches=(None,),
        scheme_of=lambda planned: scheme,
        methods_of=lambda planned: scheme.methods,
    )
    return SimpleNamespace(step=4, pipelines=(pipeline,))


@pytest.mark.parametrize(
    ("problem", "limits", "plan", "of_model"),
    [
        ("has degree 2, and at most 1 may share a sequence of Linear", {"max_degree": 1}, {}, {}),
        ("has degree 2, and Linear is computed sequence by sequence", {}, {}, {"by_sequence": "one by one"}),
        ("shares sequences by ulysses, and Linear was compared", {"methods": (Method.RING,)}, {}, {}),
        ("computes in tiles of tokens or groups of heads", {}, {"head_groups": 2}, {"compiled": "its layers"}),
        ("computes in tiles of tokens or groups of heads", {}, {"tile_tokens": 64}, {"compiled": "its layers"}),
        ("shards gradients .*, and coupled_loss=", {}, {"shard_gradients": True}, {"is_coupled": True}),
    ],
)
def test_a_plan_beyond_what_a_model_was_compared_in_is_refused_by_name(problem, limits, plan, of_model):
    is_coupled = of_model.pop("is_coupled", False)
    model = SimpleNamespace(**{"model": nn.Linear(1, 1), "by_sequence": None, "compiled": None} | of_model)
    with pytest.raises(InputError, match=rf"plan for step 4: pipelines\[0\] {problem}.*; plan "):
        PlanLimits(**limits).check(shared_plan(**plan), model, is_coupled=is_coupled)
    PlanLimits(max_degree=2, methods=(Method.ULYSSES,)).check(
        shared_plan(), SimpleNamespace(model=nn.Linear(1, 1), by_sequence=None, compiled=None)
    )
