"""A small model that runs out of memory where it is told to, and steps of it on every rank."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.core.batch import NEXT_TOKEN, GlobalBatch, Pack
from lengthwise.core.pipeline_config import Method, uniform_scheme
from lengthwise.core.planned_micro_batch import PlannedMicroBatch
from lengthwise.core.step_plan import Pipeline, StepPlan
from lengthwise.runtime.comm.world import start_world
from lengthwise.runtime.loop.prepared_model import PreparedModel
from lengthwise.runtime.loop.run import MicroBatchFailure, Run
from lengthwise.runtime.loop.step import Step
from lengthwise.runtime.verify.stage_check import check_stages
from lengthwise.runtime.verify.trace import trace_model
from lengthwise.runtime.wrap.collator import PackCollator
from lengthwise.runtime.wrap.wrapped_model import WrappedModel
from tests.runtime.harness import where_asked

LAYERS, VOCABULARY = 3, 61
LENGTHS = (23, 9, 14, 5)


class Layer(nn.Module):
    """Attention with fewer key/value heads than query heads, and a feed-forward."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.qkv, self.out = nn.Linear(24, 48), nn.Linear(24, 24)
        self.up, self.down = nn.Linear(24, 40), nn.Linear(40, 24)

    def forward(self, x: Tensor) -> Tensor:
        fail_here(f"forward of layer {self.number}")
        for _ in range(2 if self.number == 1 else 1):  # layers need not attend equally often
            x = self.attend(x)
        return FailInBackward.apply(x + self.down(F.gelu(self.up(x))), f"backward of layer {self.number}")

    def attend(self, x: Tensor) -> Tensor:
        """Over all tokens before it."""
        q, k, v = self.qkv(x).split([24, 12, 12], dim=-1)
        q, k, v = (y.unflatten(-1, (-1, 6)).transpose(1, 2) for y in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """A language model with learned positions that gives its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, 24), nn.Embedding(64, 24)
        self.layers = nn.ModuleList(Layer(number) for number in range(LAYERS))

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(idx) + self.places(torch.arange(idx.shape[1], device=idx.device))
        for layer in self.layers:
            x = layer(x)
        logits = x @ self.tokens.weight.T
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


_fails_at: set[str] = set()


def fail_here(place: str) -> None:
    """Run out of memory once, if this is the place."""
    if place in _fails_at:
        _fails_at.remove(place)
        raise torch.OutOfMemoryError(f"out of memory in the {place}")


class FailInBackward(torch.autograd.Function):
    """Does nothing, but fails in the backward where it is to."""

    @staticmethod
    def forward(ctx, x, place):  # type: ignore[no-untyped-def]
        ctx.place = place
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        fail_here(ctx.place)
        return grad, None


class Source:
    """Sequences of ``LENGTHS`` tokens."""

    def tokens(self, sequence: int, /) -> "torch.Tensor":
        generator = torch.Generator().manual_seed(sequence)
        return torch.randint(VOCABULARY, (LENGTHS[sequence],), generator=generator).numpy()


class Stream:
    """The same sequences at every step."""

    def __init__(self) -> None:
        self.step = -1

    def __next__(self) -> GlobalBatch:
        self.step += 1
        return GlobalBatch(step=self.step, ids=(0, 1, 2, 3), lengths=LENGTHS)

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def plan_on(  # type: ignore[no-untyped-def]
    num_ranks: int, degree: int, recomputed: int, shared: Method = Method.ULYSSES, stages: int = 1, head_groups: int = 1
):
    """A planner whose pipelines have ``degree`` ranks a stage and two micro-batches each."""

    def plan(batch: GlobalBatch) -> StepPlan:
        method = shared if degree > 1 else Method.DENSE
        scheme = uniform_scheme(LAYERS, degree=degree, stages=stages, method=method, recomputed=recomputed)
        scheme = replace(scheme, head_groups=head_groups)
        size = degree * stages
        number = num_ranks // size
        packs: list[list[PlannedMicroBatch]] = [[] for _ in range(number)]
        for at, ids in enumerate(((0,), (1, 3), (2,))):
            pack = Pack(ids=ids, lengths=tuple(LENGTHS[i] for i in ids))
            packs[at % number].append(PlannedMicroBatch(pack=pack, time_s=1.0, comm_s=0.0, peak_bytes=0))
        return StepPlan(
            step=batch.step, policy="by hand", loss_normaliser=batch.num_targets, update_s=0.0, time_s=2.0,
            lower_bound_s=0.0,
            pipelines=tuple(
                Pipeline(
                    ranks=tuple(range(at * size, (at + 1) * size)), phase=0, scheme=scheme, state_bytes=0,
                    micro_batches=tuple(held),
                )
                for at, held in enumerate(packs)
            ),
        )  # fmt: skip

    return plan


TRAINED = {
    "all": "",
    "behind the attention": "(down|out)",
    "the upper layers": "layers.2",
    "one in the midst": "layers.1.down",
    "an output bias": "layers.0.down.bias",
    "the first attention": "layers.0.qkv",
    "no layer": "places",
}
"""Parameters that are trained, others frozen, as with adapters or frozen low layers."""


def run_of(wrapped_model, world, *, collator, optimizer, seed=0, by_layer=False, **options) -> Run:
    """A run over a model that is prepared for it and traced, as ``prepare`` makes both.

    ``by_layer``: by shares from the start.
    """
    prepared = PreparedModel.with_optimizer(
        wrapped_model, world, collator=collator, optimizer=optimizer, seed=seed, by_layer=by_layer
    )
    trace_model(prepared)
    return Run(prepared, **options)


def train(
    degree: int,
    recomputed: int,
    fails: dict[int, tuple[str, ...]],
    trained: str = "all",
    method: Method = Method.ULYSSES,
    *,
    by_layer: bool = False,
    stages: int = 1,
    head_groups: int = 1,
) -> tuple[list[float], list[str], Tensor]:
    """Two steps in which ranks run out of memory at some places in the first attempt of the first step.

    Returns losses, who failed where, and the weights.
    """
    world = start_world("cpu")
    torch.manual_seed(0)
    model = Model().double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(re.search(TRAINED[trained], name) is not None)
    run = run_of(
        WrappedModel(model), world, stream=Stream(),
        planner=plan_on(world.size, degree, recomputed, method, stages, head_groups),
        collator=PackCollator(source=Source(), objective=NEXT_TOKEN),
        optimizer=OptimizerSettings(name="sgd", momentum=0.0),
        lr=lambda step: 0.5, clip_norm=0.0, num_steps=2,
    )  # fmt: skip
    run.check_stages = partial(where_asked, check_stages, run)
    for number, layer in enumerate(model.layers if not by_layer else ()):
        if layer.down.weight.requires_grad:
            fail = partial(fail_here, f"gradient of layer {number}")
            hook = lambda _, fail=fail: fail()  # noqa: E731
            hook.__module__ = "lengthwise.tests"  # those of others are refused
            layer.down.weight.register_post_accumulate_grad_hook(hook)
    if by_layer:
        run.gather_by_layer()
    told: list[str] = []

    def on_oom(step: Step, failures: tuple[MicroBatchFailure, ...]) -> None:
        told.extend(f"rank {each.rank} in micro-batch {each.micro_batch}" for each in failures)

    run.on_oom = on_oom
    losses = []
    for step in run.steps():
        _fails_at.clear()
        if step.number == step.attempt == 0:
            _fails_at.update(fails.get(world.rank, ()))
        for micro_batch in step:
            logits, loss = model(**micro_batch.inputs)
            step.backward(loss + 0.0 * (logits * 1).sum())
            assert float(loss.item()) is not None
        result = step.update()
        if result is not None:
            losses.append(result.loss)
    _fails_at.clear()
    run.close()
    return losses, told, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train_alone(ranks, trained: str = "all") -> tuple[list[float], list[str], Tensor]:  # type: ignore[no-untyped-def]
    """:func:`train` on one rank, of which nothing is asked, once in a process."""
    if trained not in _ALONE:
        _ALONE[trained] = ranks(1).run(train, 1, 0, {}, trained)[0]
    return _ALONE[trained]


_ALONE: dict[str, tuple[list[float], list[str], Tensor]] = {}


PLACES = tuple(f"{way} of layer {layer}" for way in ("forward", "backward") for layer in range(LAYERS))
FEW_PLACES = ("forward of layer 0", "forward of layer 2", "backward of layer 1")
at_few_places_and_in_deep_runs_at_all = pytest.mark.parametrize(
    "places", [pytest.param(FEW_PLACES, id="few"), pytest.param(PLACES, marks=pytest.mark.deep, id="all")]
)


def check_recovery(ranks, num_ranks, run, *arguments, places, **options) -> None:  # type: ignore[no-untyped-def]
    """Run :func:`train`, by ``run`` of ``arguments``, where all ranks run out of memory once, at each place in turn."""
    expected = train_alone(ranks)
    for place in places:
        fails = dict.fromkeys(range(num_ranks), (place,))
        for losses, told, weights in ranks(num_ranks).run(run, *arguments, 1, fails, **options):
            assert told, place
            torch.testing.assert_close(losses, expected[0], rtol=0, atol=1e-10)
            torch.testing.assert_close(weights, expected[2], rtol=0, atol=1e-10)
