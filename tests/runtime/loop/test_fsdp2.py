"""Models that FSDP2 holds: as exact as others with uneven accumulation, and refused where ranks would hang."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.core.batch import NEXT_TOKEN
from lengthwise.core.errors import InputError
from lengthwise.runtime.comm.world import start_world
from lengthwise.runtime.verify.gradient_check import check_exact
from lengthwise.runtime.wrap.collator import PackCollator
from lengthwise.runtime.wrap.wrapped_model import WrappedModel
from tests.runtime.loop.memory_runs import VOCABULARY, Model, Source, Stream, plan_on, run_of

ADAMW = OptimizerSettings(name="adamw")
PLAIN_SGD = OptimizerSettings(name="sgd", momentum=0.0, weight_decay=0.0)


class Routed(Model):
    """A few tokens go to an expert each, which some ranks then use and others not."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(24, 24) for _ in range(VOCABULARY))

    def forward(self, idx, targets):
        hidden = torch.zeros(*idx.shape, 24, dtype=self.places.weight.dtype)
        for number in idx.unique().tolist():
            chosen = idx == number
            hidden = hidden.index_put((chosen,), self.experts[number](self.tokens(idx[chosen])))
        x = hidden + self.places(torch.arange(idx.shape[1]))
        for layer in self.layers:
            x = layer(x)
        logits = x @ self.tokens.weight.T
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def wrapped(world, *, frees=False, dtype=torch.float64, kind=Model):
    torch.manual_seed(0)
    model, mesh = kind().to(dtype), init_device_mesh("cpu", (world.size,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=frees)
    return fully_shard(model, mesh=mesh)


def make_run(model, world, degree, *, keep_attention=False, settings=ADAMW):
    run = run_of(
        WrappedModel(model), world, stream=Stream(), planner=plan_on(world.size, degree, 1),
        collator=PackCollator(source=Source(), objective=NEXT_TOKEN), optimizer=settings, lr=lambda step: 0.01,
        clip_norm=0.05, num_steps=3,
    )  # fmt: skip
    if keep_attention:
        run.wrapped_model.layers.may_keep_attention, plan_of = True, run.planner
        run.planner = lambda batch: with_kept_attention(plan_of(batch))
    return run


def with_kept_attention(plan):
    """The plan, whose recomputed layers keep what attention gave."""
    pipelines = [replace(p, scheme=replace(p.scheme, keep_attention=True)) for p in plan.pipelines]
    assert all(pipeline.scheme.keep_attention for pipeline in pipelines)
    return replace(plan, pipelines=tuple(pipelines))


def train(degree, is_wrapped, dtype=torch.float64, kind=Model, **options):
    world = start_world("cpu")
    torch.manual_seed(0)
    model = wrapped(world, dtype=dtype, kind=kind) if is_wrapped else kind().to(dtype)
    run = make_run(model, world, degree, **options)
    check_exact(run)
    losses = []
    for step in run.steps():
        for micro_batch in step:
            step.backward(model(**micro_batch.inputs)[1])
        losses.append(step.update().loss)
        with run.plain():  # gradients that a loop leaves, which are none of the next step
            model(tokens := torch.arange(4 + world.rank)[None], tokens)[0].square().mean().backward()
    run.close()
    if not is_wrapped:
        return losses, [parameter.detach().clone() for parameter in model.parameters()]
    return losses, [parameter.detach().full_tensor().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("num_ranks", "degree", "keep_attention"),
    [
        (2, 2, True),
        *(pytest.param(4, degree, keeps, marks=pytest.mark.deep) for degree, keeps in ((1, True), (2, False))),
    ],
)
def test_a_model_that_fsdp2_holds_trains_as_one_device_does(ranks, num_ranks, degree, keep_attention):
    """Four ranks for three micro-batches: one has none."""
    expected_losses, expected = ranks(1).run(train, 1, False)[0]
    for losses, weights in ranks(num_ranks).run(train, degree, True, keep_attention=keep_attention):
        assert losses == pytest.approx(expected_losses, abs=1e-10)
        for mine, theirs in zip(weights, expected):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)


@pytest.mark.deep
@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.deep)])
def test_parameters_that_some_ranks_alone_use_are_reduced_by_all(ranks, num_ranks):
    """Those that no rank uses have a gradient of zero, which moves nothing here."""
    expected_losses, expected = ranks(1).run(train, 1, False, kind=Routed, settings=PLAIN_SGD)[0]
    for losses, weights in ranks(num_ranks).run(train, 1, True, kind=Routed, settings=PLAIN_SGD):
        assert losses == pytest.approx(expected_losses, abs=1e-10)
        for mine, theirs in zip(weights, expected):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)


@pytest.mark.deep
def test_a_model_that_fsdp2_holds_in_float32_trains_as_one_device_does(ranks):
    expected_losses, expected = ranks(1).run(train, 1, False, torch.float32)[0]
    for losses, weights in ranks(3).run(train, 1, True, torch.float32):
        assert losses == pytest.approx(expected_losses, rel=1e-5)
        for mine, theirs in zip(weights, expected):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-3)  # AdamW divides rounding by rounding


def test_a_model_that_would_hang_is_refused(ranks):
    ranks(2).run(check_refused)


def check_refused():
    world = start_world("cpu")
    with pytest.raises(
        InputError, match=r"FSDP2 frees its parameters after every forward.*reshard_after_forward=False"
    ):
        make_run(wrapped(world, frees=True), world, 1)
    model, mesh = Model().double(), init_device_mesh("cpu", (world.size,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    with pytest.raises(InputError, match="wrap the model itself"):
        make_run(model, world, 1)
    model = Model().double()
    for number, layer in enumerate(model.layers):
        fully_shard(layer.float() if number else layer, mesh=mesh, reshard_after_forward=False)
    with pytest.raises(InputError, match=r"several dtypes.*float64.*float32"):
        make_run(fully_shard(model, mesh=mesh), world, 1)


@pytest.mark.deep
def test_it_is_profiled_planned_and_trained_as_any_other(ranks, tmp_path):
    found = ranks(2).run(prepared, str(tmp_path / "profile.json"))
    assert found[0] == found[1]
    assert found[0][-1] < found[0][0]


def prepared(profile):
    import lengthwise

    world = start_world("cpu")
    rng = np.random.default_rng(0)
    corpus = [np.resize(rng.integers(0, 61, 5), length) for length in (40, 9, 23, 60, 12, 33)]
    run = lengthwise.prepare(
        wrapped(world, dtype=torch.float32), corpus, sequences_per_step=6, epochs=2, lr=0.01, profile=profile,
        device="cpu", verbose=False, policy="dcp-intra",
    )  # fmt: skip
    losses = []
    for step in run.steps():
        for micro_batch in step:
            step.backward(run.model(**micro_batch.inputs)[1])
        losses.append(step.update().loss)
    run.close()
    return losses
