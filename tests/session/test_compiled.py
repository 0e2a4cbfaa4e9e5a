"""Layers of any model compiled around their attention train what one device trains uncompiled."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import lengthwise as lw
from lengthwise.core.errors import CheckError, InputError
from lengthwise.runtime.wrap import compiled_modules
from tests.plan.costs import SimpleCost
from tests.runtime.loop.runs import in_double
from tests.session import models
from tests.session.loops import as_started_by_torchrun, step_through, weights_of
from tests.session.test_planned_stages import STAGED, build, items_of, loop_alone
from tests.session.test_prepare import EXACT, OPTIONS, assert_equal_weights

COMPILED = {"compile": True, "compile_backend": "eager", "memory_gib": 40, "verbose": False, "packing": "always"}
SHARED = OPTIONS | COMPILED | {"steps": 2, "cost": models.mixed_cost(), "policy": "dcp-intra"}
"""Rows of 64 tokens need two devices of 40 tokens each."""
ALONE = OPTIONS | COMPILED | {"steps": 2, "cost": SimpleCost(capacity=100)}
WAYS = {
    "whole": ("gpt2", SHARED | {"recompute": "none"}),
    "by layer": ("gpt2", SHARED | {"recompute": "none", "weights": "by-layer"}),
    "recomputed": ("gpt2", SHARED | {"recompute": "all"}),
    "in groups of heads": ("gpt2", SHARED | {"recompute": "none", "methods": ("ulysses",)}),
    "stages": ("gpt2", STAGED | COMPILED),
    "modules": ("plain", SHARED | {"recompute": "all", "weights": "by-layer"}),
    "alone": ("gpt2", ALONE | {"recompute": "selective"}),
}
AHEAD = {"compile_backend": "aot_eager"}
"""Backwards are graphs too, which takes longer: in deep runs."""


def in_groups(plan):
    pipelines = (replace(p, scheme=replace(p.scheme, head_groups=2)) for p in plan.pipelines)
    return replace(plan, pipelines=tuple(pipelines))


def train(names, **backend):
    """By way: losses, weights, the degrees and stages of plans, what was compiled, and graphs compiled in steps."""
    as_started_by_torchrun()
    found = {}
    for name in names:
        family, options = WAYS[name]
        with in_double():
            run = lw.prepare(build(family), items_of(family), **options | backend)
            planner, schemes = run.planner, set()

            def noted(batch, planner=planner, schemes=schemes, name=name):
                plan = planner(batch) if name != "in groups of heads" else in_groups(planner(batch))
                schemes |= {(p.scheme.degree, p.scheme.num_stages) for p in plan.pipelines if p.micro_batches}
                return plan

            run.planner = noted
            losses, *_ = step_through(run, run.wrapped_model.loss_of)
            compiled = run.wrapped_model.compiled
            run.close()
            found[name] = losses, weights_of(run.model), schemes, compiled.names, compiled.recompiles()
    return found


@pytest.mark.parametrize(
    ("num_ranks", "names", "backend"),
    [
        pytest.param(1, ["alone"], AHEAD, marks=pytest.mark.deep),
        (2, ["modules"], {}),
        pytest.param(2, list(WAYS)[:-1], AHEAD, marks=pytest.mark.deep),
    ],
)
def test_compiled_layers_train_what_one_device_trains(ranks, num_ranks, names, backend):
    expected = {family: loop_alone(family) for family in {WAYS[name][0] for name in names}}
    whole_layers = [f"layers.{number}" for number in range(4)]
    for found in ranks(num_ranks).run(train, names, **backend):
        for name, (losses, weights, schemes, compiled, num_graphs) in found.items():
            family = WAYS[name][0]
            np.testing.assert_allclose(losses, expected[family][0], rtol=EXACT, err_msg=name)
            assert_equal_weights(weights, expected[family][1])
            assert compiled == (whole_layers if family == "gpt2" else [f"layers.{n}.mlp" for n in range(3)]), name
            assert num_graphs <= 4, f"{name}: layers and sizes share graphs, but for those of one token"
            if num_ranks > 1 and WAYS[name][1]["recompute"] == "none":
                degrees, stages = map(max, zip(*schemes))
                assert (stages if name == "stages" else degrees) == 2, (name, schemes)


def one_step(model, **options):
    run = lw.prepare(model, models.rows(8), **(ALONE | {"steps": 1} | options))
    try:
        return step_through(run, run.wrapped_model.loss_of)[0], weights_of(model)
    finally:
        run.close()


@pytest.mark.deep
def test_what_is_watched_or_evaluated_is_computed_uncompiled():
    """Hooks hear of their modules, and the plain model is as it was."""
    model, heard = build("gpt2"), []
    run = lw.prepare(model, models.rows(8), check=False, **ALONE | {"steps": 1})
    model.transformer.h[1].mlp.register_forward_hook(lambda *args: heard.append("mlp"))
    calls = []
    for part in run.wrapped_model.compiled._parts:
        part.compiled = lambda *args, name=part.name, code=part.compiled, **kwargs: (
            calls.append(name), code(*args, **kwargs),
        )[1]  # fmt: skip
    step_through(run, run.wrapped_model.loss_of)
    assert heard and "layers.1" not in calls and "layers.0" in calls
    calls.clear()
    with run.plain(), torch.no_grad():
        model(torch.arange(9)[None])
    run.close()
    model(torch.arange(9)[None])
    assert not calls
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.deep
@pytest.mark.parametrize("in_place", [pytest.param(True, marks=pytest.mark.deep), False])
def test_layers_that_their_user_compiled_are_compiled_by_the_run_and_given_back_compiled(in_place):
    expected, _ = one_step(build("gpt2"), compile=False)
    model = build("gpt2")
    layers = model.transformer.h
    for number, layer in enumerate(list(layers)):
        if in_place:
            layer.compile(backend="aot_eager")
        else:
            layers[number] = torch.compile(layer, backend="aot_eager")
    with pytest.raises(InputError, match=r"transformer\.h\.0 of GPT2LMHeadModel is compiled.* or say compile=True"):
        one_step(model, compile=False)
    losses, _ = one_step(model)
    np.testing.assert_allclose(losses, expected, rtol=EXACT)
    assert all((layer._compiled_call_impl is not None) == in_place for layer in layers)
    assert in_place or {type(vars(layer)["forward"]).__name__ for layer in layers} == {"function"}
    with pytest.raises(InputError, match=r"is compiled as a whole.* give model\._orig_mod"):
        one_step(torch.compile(build("gpt2")))


@pytest.mark.deep
def test_compiled_code_that_computes_otherwise_is_refused(monkeypatch):
    def wrong(function, **options):
        return lambda *args, **kwargs: function(*args, **kwargs) * 1.001

    monkeypatch.setattr(compiled_modules.torch, "compile", wrong)
    with pytest.raises(CheckError, match="do not compute what they compute"):
        one_step(models.gpt())


class Bare(nn.Module):
    """A layer of which every part attends or is one kernel."""

    def __init__(self):
        super().__init__()
        self.attention = models.Attention(24, 4, causal=True)
        self.norm = nn.LayerNorm(24)

    def forward(self, x):
        return x + self.attention(self.norm(x))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"feed_forward_tile": 5}, "compiled layers compute all tokens at once"),
        ({"packing": "never"}, "compile=True: GPT is computed sequence by sequence"),
        ({"compile_backend": "fast"}, "torch has the backends .*inductor"),
        ({"layers": "blocks"}, "no module in the layers of GPT has several operations"),
    ],
)
def test_what_cannot_be_compiled_is_refused(options, reason):
    model = models.gpt()
    if "layers" in options:
        model.blocks = nn.ModuleList(Bare() for _ in range(2)).double()
    with pytest.raises(InputError, match=reason):
        one_step(model, **options)
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.deep
def test_inductor_compiles_them_for_any_number_of_tokens():
    expected = one_step(build("gpt2"), compile=False)
    losses, weights = one_step(build("gpt2"), compile_backend="inductor")
    np.testing.assert_allclose(losses, expected[0], rtol=EXACT)
    assert_equal_weights(weights, expected[1])
