"""Models whose trained parameters have several dtypes: each computes in its own, and is updated in the widest."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lengthwise as lw
from lengthwise.config.optimizer_settings import OptimizerSettings
from tests.plan.costs import SimpleCost, StagesFitMore
from tests.runtime.harness import with_check
from tests.session import models
from tests.session.loops import as_started_by_torchrun, step_through
from tests.session.test_prepare import OPTIONS, batches_of

PLAIN_SGD = OptimizerSettings(name="sgd", momentum=0.0, weight_decay=0.0)
LR = 0.5
COMMON = OPTIONS | {
    "optimizer": PLAIN_SGD, "lr": LR, "weight_decay": 0.0, "clip_norm": 0.0, "memory_gib": 40, "recompute": "none",
    "verbose": False,
}  # fmt: skip
CLOSE = 2e-6
"""Of layers in float32, whose sums have another order on other ranks, over three steps."""


class WideNorm(nn.LayerNorm):
    """A norm that computes in its own dtype, whatever comes, and keeps that."""

    def forward(self, x):
        return super().forward(x.to(self.weight.dtype))


class NarrowLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x.to(self.weight.dtype))


def mixed_gpt(seed=0, narrow=torch.float32, wide=torch.float64):
    """Layers in one dtype, and norms, positions and the hidden states between layers in a wider one."""
    torch.manual_seed(seed)
    model = models.GPT()
    for module in list(model.modules()):
        if isinstance(module, (nn.Linear, nn.LayerNorm)):
            module.__class__ = WideNorm if isinstance(module, nn.LayerNorm) else NarrowLinear
    model.to(narrow)
    for module in model.modules():
        if isinstance(module, WideNorm) or module is model.places:
            module.to(wide)
    return model


def trained_alone(num_steps=3, changed_after=None):
    """Weights after steps of SGD on master weights in the widest dtype, of which the model's are casts."""
    model, rows = mixed_gpt(), models.rows()
    masters = {name: value.detach().double() for name, value in model.named_parameters()}
    for number, ids in enumerate(batches_of(rows, num_steps=num_steps)):
        sums = {name: torch.zeros_like(value) for name, value in masters.items()}
        count = sum(len(rows[i]) - 1 for i in ids)
        for i in ids:
            model.zero_grad()
            (models.sum_of_losses(model, rows[i], None) / count).backward()
            for name, value in model.named_parameters():
                sums[name] += value.grad
        with torch.no_grad():
            for name, value in model.named_parameters():
                masters[name] -= LR * sums[name]
                value.copy_(masters[name])
        if number == changed_after:
            halve(model)
            masters = {name: value.detach().double() if "mlp" in name else masters[name]
                       for name, value in model.named_parameters()}  # fmt: skip
    return {name: value.detach().numpy() for name, value in model.named_parameters()}


@torch.no_grad()
def halve(model):
    """What a loop may do to weights between two steps."""
    for name, value in model.named_parameters():
        if "mlp" in name:
            value.mul_(0.5)


def trained(options, changed_after=None):
    as_started_by_torchrun()
    model = mixed_gpt()
    run = lw.prepare(model, models.rows(), **COMMON | options)
    for number, step in enumerate(run.steps()):
        for micro_batch in step:
            step.backward(model(**micro_batch.inputs)[1])
        step.update()
        if number == changed_after:
            halve(model)
    run.close()
    return {name: value.detach().numpy().copy() for name, value in model.named_parameters()}


def assert_close(found, expected):
    assert {name: value.dtype for name, value in found.items()} == {name: v.dtype for name, v in expected.items()}
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=CLOSE, atol=CLOSE, err_msg=name)


WAYS = {
    "whole": {"cost": models.mixed_cost()},
    "by layer": {"cost": models.mixed_cost(), "weights": "by-layer"},
    "in shares": {"cost": models.mixed_cost(), "shard_gradients": "all", "policy": "static"},
    "in host memory": {"cost": models.mixed_cost(), "offload_state": "host"},
    "in stages": {
        "cost": StagesFitMore(capacity=40, loss=0.4, c_s=0.05), "max_degree": 1, "policy": "static",
    },
}  # fmt: skip

ONE_RANK = {"cost": SimpleCost(capacity=80)}


@pytest.fixture(scope="module")
def alone():
    return trained_alone()


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("way", ["whole", "in host memory"])
def test_one_rank_trains_each_parameter_in_its_dtype(alone, way):
    assert_close(trained(WAYS[way] | ONE_RANK), alone)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.deep] * way.startswith(("in shares", "in host"))) for way in WAYS]
)
def test_ranks_train_each_parameter_in_its_dtype(ranks, alone, way):
    for found in ranks(2).run(with_check, trained, WAYS[way]):
        assert_close(found, alone)


def test_what_a_loop_writes_to_a_narrow_parameter_is_kept(ranks):
    """Where it did not write, the master weights keep digits that the model's parameters have not."""
    expected = trained_alone(changed_after=0)
    assert_close(trained(ONE_RANK, 0), expected)
    for found in ranks(2).run(trained, {"cost": models.mixed_cost()}, 0):
        assert_close(found, expected)


class PreciseLinear(nn.Linear):
    """Weights in float32, and products in float64."""

    def forward(self, x):
        return F.linear(x.double(), self.weight.double(), None if self.bias is None else self.bias.double())


def first_loss(options):
    """Of a model whose hidden states are more precise than all of its weights."""
    as_started_by_torchrun()
    torch.manual_seed(0)
    model = models.GPT()
    for module in list(model.modules()):
        if isinstance(module, nn.Linear):
            module.__class__ = PreciseLinear
        elif isinstance(module, nn.LayerNorm):
            module.__class__ = WideNorm
            module.double()
            del module.weight, module.bias  # nothing else is in float64
            module.register_buffer("weight", torch.ones(24).double())
            module.register_buffer("bias", torch.zeros(24).double())
    run = lw.prepare(model, models.rows(), **COMMON | options | {"steps": 1})
    losses, _, _ = step_through(run)
    run.close()
    return losses[0]


def test_stages_send_hidden_states_as_precise_as_they_are(ranks):
    for found in ranks(2).run(first_loss, WAYS["in stages"]):
        np.testing.assert_allclose(found, first_loss(ONE_RANK), rtol=1e-12)


class CastsItself(models.GPT):
    """Weights in float32; embeddings are cast to bfloat16, as modded-nanogpt does, products and logits too."""

    def forward(self, idx, targets=None):
        x = self.tokens(idx).bfloat16() + self.places(torch.arange(idx.shape[1])).to(torch.bfloat16)
        for block in self.blocks:
            x = block(x).to(dtype=torch.float16).bfloat16()
        logits = self.head(self.norm(x)).float()
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class CastLinear(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class CastNorm(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x, (x.shape[-1],), self.weight.type_as(x), self.bias.type_as(x))


def test_a_model_that_casts_to_16_bits_itself_is_compared_without_their_rounding():
    torch.manual_seed(0)
    model = CastsItself()
    for module in list(model.modules()):
        if isinstance(module, nn.Linear | nn.LayerNorm):
            module.__class__ = CastLinear if isinstance(module, nn.Linear) else CastNorm
    lw.prepare(model, models.rows(), **COMMON | ONE_RANK | {"packing": "always", "recompute": "auto"}).close()


def test_losses_are_scaled_where_some_parameters_are_in_float16():
    model = mixed_gpt(narrow=torch.bfloat16, wide=torch.float16)
    run = lw.prepare(model, models.rows(), **COMMON | ONE_RANK | {"check": False})
    assert run.state.loss_scaler is not None and run.state.compute_dtype is torch.float32
    run.close()
    assert {value.dtype for value in model.parameters()} == {torch.bfloat16, torch.float16}
