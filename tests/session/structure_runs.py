"""A model of a user's on ranks, under plans of every kind, beside the same model in its user's own loop."""

from functools import partial
from importlib import import_module

import numpy as np
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lengthwise as lw
from lengthwise.config.optimizer_settings import OptimizerSettings
from lengthwise.core.batch import Pack
from lengthwise.core.errors import LengthwiseError
from lengthwise.core.pipeline_config import Method, uniform_scheme
from lengthwise.core.planned_micro_batch import PlannedMicroBatch
from lengthwise.core.step_plan import Pipeline, StepPlan
from lengthwise.runtime.profile.two_layer_profile import ProfilingEffort, measure
from tests.plan.costs import SimpleCost
from tests.session.loops import as_started_by_torchrun
from tests.session.models import VOCAB
from tests.session.structures import adapted

LENGTHS = (13, 5, 21, 2, 8, 17)
LR = 0.3
DECAY = 0.75
"""Of averages of weights."""
PLAIN_SGD = OptimizerSettings(name="sgd", momentum=0.0, weight_decay=0.0)
OPTIONS = {
    "sequences_per_step": len(LENGTHS), "order": "corpus", "optimizer": PLAIN_SGD, "lr": LR, "clip_norm": 0.0,
    "cost": SimpleCost(capacity=1000), "memory_gib": 1000, "policy": "static", "verbose": False,
}  # fmt: skip
KINDS = ("alone", "ulysses", "ring", "stages")
"""Of plans: each rank by itself, all ranks share packs by a method, or a stage on each rank."""


def rows():
    return [np.random.default_rng(number).integers(0, VOCAB, length) for number, length in enumerate(LENGTHS)]


def build(name, is_adapted=False):
    """The model of a class, ``module.Class``, in training mode; with its layers frozen but for adapters."""
    torch.manual_seed(0)
    module, _, kind = name.rpartition(".")
    model = getattr(import_module(f"tests.session.{module}"), kind)().double()
    return (adapted(model) if is_adapted else model).train()


def train_alone(model, num_steps):
    """Losses and, after each step, the weights."""
    losses, weights = [], []
    for _ in range(num_steps):
        total = torch.zeros((), dtype=torch.float64)
        for row in rows():
            tokens = torch.as_tensor(row)[None]
            targets = torch.cat([tokens[:, 1:], torch.full((1, 1), -100)], 1)
            loss = model(tokens, targets)[1] * (len(row) - 1) / (sum(LENGTHS) - len(LENGTHS))
            loss.backward()
            total += loss.detach()
        losses.append(float(total))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= LR * parameter.grad
                    parameter.grad = None
        weights.append({name: value.detach().clone() for name, value in model.named_parameters()})
    return losses, weights


def pipeline_of(lengths, ranks, packs, num_layers, recomputes, *, phase=0, method=Method.DENSE, num_stages=1):
    """From the second pack on every other layer is recomputed, if any is, and the others are offloaded."""
    planned = []
    for number, ids in enumerate(ids for ids in packs if ids):
        flags = tuple((layer + number) % 2 == 1 for layer in range(num_layers)) if number else None
        planned.append(
            PlannedMicroBatch(
                pack=Pack(ids=tuple(ids), lengths=tuple(lengths[i] for i in ids)), time_s=1.0, peak_bytes=0,
                recompute=flags if recomputes else None, offload=flags and tuple(not flag for flag in flags),
            )
        )  # fmt: skip
    degree = len(ranks) // num_stages
    method = method if degree > 1 else Method.DENSE
    scheme = uniform_scheme(num_layers, degree=degree, method=method, recomputed=0, stages=num_stages)
    return Pipeline(ranks=ranks, phase=phase, scheme=scheme, micro_batches=tuple(planned))


def plan_of(kind, num_layers, num_ranks, recomputes, batch):
    lengths = dict(zip(batch.ids, batch.lengths))
    ids, everyone = sorted(lengths), tuple(range(num_ranks))
    make = partial(pipeline_of, lengths, num_layers=num_layers, recomputes=recomputes)
    if kind == "alone":
        shares = [ids[rank::num_ranks] for rank in everyone]
        pipelines = [make((rank,), [share[:1], share[1:]]) for rank, share in enumerate(shares)]
    elif kind == "stages":
        pipelines = [make(everyone, [ids[:2], ids[2:3], ids[3:]], num_stages=num_ranks)]
    else:
        pipelines = [make(everyone, [ids[:2], ids[2:4]], method=Method(kind))]
        pipelines += [make((rank,), [ids[4:5], ids[5:]] if rank == 0 else [], phase=1) for rank in everyone]
    return StepPlan(
        step=batch.step, policy="by hand", pipelines=tuple(pipelines), loss_normaliser=batch.num_targets, update_s=0.0,
        time_s=1.0, lower_bound_s=1.0,
    )  # fmt: skip


def outcomes(name, *, weights="whole", is_adapted=False, kinds=KINDS, keeps_averages=False, **options):
    """By kind of plan: the largest difference to a loop alone after its step, or what refused it.

    ``keeps_averages``: whether averages of the weights, kept by the loop, are compared as well.

    Where ``prepare`` refuses the model, what it said alone. Models that are computed sequence by sequence have plans
    of ranks by themselves.
    """
    as_started_by_torchrun()
    model = build(name, is_adapted)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    own_forwards = sum("forward" in vars(module) for module in model.modules())
    methods = tuple(kind for kind in kinds if kind in ("ulysses", "ring")) or ("ulysses",)
    try:
        run = lw.prepare(model, rows(), steps=len(KINDS), weights=weights, methods=methods, **OPTIONS, **options)
    except LengthwiseError as error:
        assert all(value.is_meta or torch.equal(value, before[name]) for name, value in model.named_parameters())
        return f"{type(error).__name__}: {error}"
    is_alone = run.world.size == 1 or run.wrapped_model.by_sequence is not None
    kinds = [kind for kind in kinds if kind == "alone" or not is_alone]
    with run.plain():
        averages = Averages(model) if keeps_averages else None
    expected, done, found = train_alone(build(name, is_adapted), len(kinds)), 0, {}
    for kind in kinds:
        run.planner = partial(plan_of, kind, run.wrapped_model.structure.num_layers, run.world.size, run.can_recompute)
        try:
            step = next(run.steps())
        except LengthwiseError as error:
            found[kind] = f"{type(error).__name__}: {error}"
            continue
        for micro_batch in step:
            step.backward(model(**micro_batch.inputs)[1])
        loss = step.update().loss
        with run.plain():
            weights = expected[1][done]
            found_now = {name: x.detach() for name, x in model.named_parameters() if x.numel()}
            errors = [float((x - weights[name]).abs().max()) for name, x in found_now.items()]
            if averages is not None:
                averages.update(model)
                errors.append(averages.error([before, *expected[1][: done + 1]]))
        found[kind] = max(*errors, abs(loss - expected[0][done]))
        done += 1
    run.close()
    assert sum("forward" in vars(module) for module in model.modules()) == own_forwards, "the model is as it was"
    return found


class Averages:
    """Averages of a model's weights, by torch and by hand, as loops keep them."""

    def __init__(self, model):
        self.model = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        self.by_hand = {name: value.detach().clone() for name, value in model.named_parameters()}
        self.update(model)

    def update(self, model):
        self.model.update_parameters(model)
        for name, value in model.named_parameters():
            self.by_hand[name].lerp_(value.detach(), 1 - DECAY)

    def error(self, weights):
        """The largest difference to the averages of ``weights``, which are those after each step."""
        expected = weights[0]
        for now in weights[1:]:
            expected = {name: DECAY * value + (1 - DECAY) * now[name] for name, value in expected.items()}
        found = [dict(self.model.module.named_parameters()), self.by_hand]
        expected = {name: x for name, x in expected.items() if x.numel()}
        return max(float((values[name] - x).detach().abs().max()) for values in found for name, x in expected.items())


def many_outcomes(cases):
    """:func:`outcomes` of (name, weights) without the comparison before the run."""
    kinds = ("alone", "ulysses", "stages")
    return [outcomes(name, weights=weights, kinds=kinds, check=False, keeps_averages=True) for name, weights in cases]


def compared_outcomes(cases):
    """:func:`outcomes` of (name, weights)."""
    return [outcomes(name, weights=weights, kinds=("alone", "ulysses", "stages")) for name, weights in cases]


def profile_of(name, **options):
    """The profile of a model, measured as shortly as can be."""
    run = lw.prepare(build(name), rows(), steps=1, check=False, **OPTIONS, **options)
    table = measure(run, longest=16, effort=ProfilingEffort(repeats=1, budget_s=0.0))
    run.close()
    return table
