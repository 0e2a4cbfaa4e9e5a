"""Stages of any model split their backwards, learn the same whatever goes wrong, and leave for later what they can."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from lengthwise.runtime.models.products import WeightGradients
from lengthwise.runtime.wrap.context import active
from lengthwise.runtime.wrap.split_products import splitting, weight_product
from tests.runtime.harness import with_check
from tests.runtime.loop import memory_runs
from tests.runtime.loop.loops import plain_loop, train_through_trouble, with_plans_changed
from tests.runtime.loop.runs import assert_exact, shard_of, step_on_ranks
from tests.runtime.loop.test_families import CASES
from tests.runtime.loop.test_stages import FOUR, THREE, TWO

PLACES = [
    "gradient of layer 1",
    *(
        pytest.param(place, marks=pytest.mark.deep)
        for place in (
            "gradient of layer 2", "forward of layer 1", "backward of layer 1", "backward of layer 2",
        )
    ),
]  # fmt: skip


def split(groups):
    """The same pipelines, with split backwards where they have several stages."""
    return tuple(replace(group, splits=True) for group in groups)


def with_split_backwards(plan):
    """The plan, where stages split the backwards of all micro-batches but the last."""
    pipelines = []
    for pipeline in plan.pipelines:
        *others, last = pipeline.micro_batches
        others = [replace(micro_batch, weights_s=0.2) for micro_batch in others]
        scheme = replace(pipeline.scheme, zero_bubble=True, recompute=(True, False, False))
        pipelines.append(replace(pipeline, scheme=scheme, micro_batches=(*others, last)))
    return replace(plan, pipelines=tuple(pipelines))


def splitting_all(function, *arguments, **options):
    """``function`` where stages of every plan split their backwards."""
    return with_plans_changed(with_split_backwards, function, *arguments, **options)


@pytest.mark.parametrize(
    ("name", "groups"),
    [("llama", FOUR), *(pytest.param(*case, marks=pytest.mark.deep) for case in (("gpt2", TWO), ("llama", THREE)))],
)
def test_a_family_whose_stages_split_backwards_trains_as_its_own_loop_does(ranks, name, groups):
    size = 1 + max(rank for group in groups for rank in group.ranks)
    for found in ranks(size).run(step_on_ranks, CASES[name], split(groups), compares_stages=groups is not FOUR):
        assert_exact(CASES[name], found, name)


@pytest.mark.deep
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("groups", [split(TWO), split(FOUR)])
def test_every_family_whose_stages_split_backwards_trains_as_its_own_loop_does(ranks, name, groups):
    size = 1 + max(rank for group in groups for rank in group.ranks)
    for found in ranks(size).run(step_on_ranks, CASES[name], groups):
        assert_exact(CASES[name], found, name)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("trained", [pytest.param("all", marks=pytest.mark.deep), "the upper layers", "an output bias"])
def test_a_model_of_which_only_parts_are_trained_splits_what_it_can(ranks, trained):
    expected = memory_runs.train_alone(ranks, trained)
    if trained == "an output bias":  # no weight, so that nothing is left for later
        with pytest.raises(Exception, match="no backward of Model can be split"):
            ranks(3).run(with_check, splitting_all, memory_runs.train, 1, 1, {}, trained, stages=3)
        return
    for losses, _, weights in ranks(3).run(splitting_all, memory_runs.train, 1, 1, {}, trained, stages=3):
        assert losses == pytest.approx(expected[0], abs=1e-10)
        torch.testing.assert_close(weights, expected[2], rtol=0, atol=1e-10)


@pytest.mark.parametrize("place", PLACES)
def test_a_stage_that_runs_out_of_memory_keeps_no_other_waiting(ranks, place):
    expected = memory_runs.train_alone(ranks)
    for losses, told, weights in ranks(3).run(
        splitting_all, memory_runs.train, 1, 1, dict.fromkeys(range(3), (place,)), stages=3
    ):
        assert told, place
        assert losses == pytest.approx(expected[0], abs=1e-10)
        torch.testing.assert_close(weights, expected[2], rtol=0, atol=1e-10)


@pytest.mark.deep
@pytest.mark.parametrize(
    "place",
    ["before the backward", *(pytest.param(p, marks=pytest.mark.deep) for p in ("the loss", "after the backward"))],
)
def test_a_stage_that_leaves_a_step_keeps_no_other_waiting(ranks, place):
    losses, expected = plain_loop()
    for troubled in (0, 2):
        for found, weights, _ in ranks(3).run(splitting_all, train_through_trouble, 1, 1, place, {troubled}, stages=3):
            assert found == pytest.approx(losses, abs=1e-10)
            torch.testing.assert_close(weights, expected, rtol=0, atol=1e-10)


@pytest.mark.deep
@pytest.mark.parametrize(("name", "groups"), [("llama", TWO), pytest.param("gpt2", THREE, marks=pytest.mark.deep)])
def test_stages_whose_weights_are_gathered_for_a_step_split_backwards_too(ranks, name, groups):
    size = 1 + max(rank for group in groups for rank in group.ranks)
    for found in ranks(size).run(step_on_ranks, CASES[name], split(groups), by_layer=True):
        assert_exact(CASES[name], found, name)


class Odd(nn.Module):
    """Products that can be split, and some that cannot."""

    def __init__(self):
        super().__init__()
        self.first, self.normed, self.frozen = nn.Linear(6, 8), weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8)
        self.mixed, self.experts = nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(3, 6, 6))
        self.again, self.mapped = nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        x = self.frozen(self.normed(self.first(x).tanh()).tanh()).tanh() @ self.mixed
        x = torch.addmm(self.first.bias[:6], x.flatten(0, 1), self.experts[1]).view(x.shape)
        x = checkpoint(self.again, torch.vmap(self.mapped)(x), use_reentrant=False)
        return F.linear(input=self.first(x).tanh(), weight=self.first.weight.T, bias=None)


def gradients_of(model, x, gradients, dtype):
    """Output, gradients that the backward gave, and those after what it left for later."""
    shard = shard_of((5,))
    shard.weight_gradients, shard.layer = gradients, 0
    x = x.clone().requires_grad_()
    model.zero_grad()
    with active(shard), splitting(shard), torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float64):
        out = model(x)
    out.double().square().sum().backward()
    at_once = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    if gradients is not None:
        gradients.compute(lambda unit: None)
    return [out, x.grad, *(p.grad for p in model.parameters() if p.requires_grad)], at_once


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_products_of_a_layer_leave_the_gradients_of_trained_weights_for_later(dtype):
    """Under autocast, bit for bit."""
    torch.manual_seed(0)
    model = Odd().to(torch.float64 if dtype is torch.float64 else torch.float32)
    x = torch.randn(2, 5, 6, dtype=model.mixed.dtype)
    expected, _ = gradients_of(model, x, None, dtype)
    found, at_once = gradients_of(model, x, WeightGradients(), dtype)
    later = [name for name, gradient in at_once.items() if gradient is None]
    assert "mixed" in later and not {"experts", "normed.bias", "again.weight", "mapped.weight"} & set(later)
    for value, other in zip(found, expected):
        exact = {"rtol": 1e-12, "atol": 1e-12} if dtype is torch.float64 else {"rtol": 1e-2, "atol": 1e-2}
        torch.testing.assert_close(value, other, **exact)
    whole, at_once = gradients_of(model, x, WeightGradients(is_open=False), dtype)
    for value, other in zip(whole, found):
        torch.testing.assert_close(value, other)
    assert all(gradient is not None for name, gradient in at_once.items() if "frozen" not in name), (
        "of another derivative"
    )


def test_weights_with_hooks_of_their_own_have_whole_backwards():
    weight, x = nn.Parameter(torch.ones(3, 2)), torch.ones(4, 2)
    assert weight_product(F.linear, (x, weight), {}) is not None
    assert weight_product(F.linear, (x, weight), {"bias": nn.Parameter(torch.ones(3))}) is not None
    assert weight_product(torch.matmul, (x, weight.T), {}) is None
    assert weight_product(F.linear, (x[0], weight), {}) is None
    weight.register_hook(lambda gradient: gradient.clamp(max=0.5))
    assert weight_product(F.linear, (x, weight), {}) is None
